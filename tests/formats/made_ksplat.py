"""Writes ``.ksplat`` files as the description of the format has it, one Gaussian after the other."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from splatcli.gaussians import SHN_COUNTS, Gaussians

CAPACITY = 4
SIDE = 2.0
QUANTA = 32767
SH_RANGE = (-1.25, 1.0)


def ksplat(sections: Sequence[Gaussians], level: int) -> tuple[bytes, list[list[int]]]:
    """(the file, for each section the order in which it holds the Gaussians). Harmonics above degree 2 are left out."""
    header = bytearray(4096)
    struct.pack_into("<BBxxIIIIH", header, 0, 0, 1, *2 * [len(sections)], *2 * [sum(map(len, sections))], level)
    struct.pack_into("<2f", header, 36, *SH_RANGE)
    heads, bodies, orders = [], [], []
    for gaussians in sections:
        head, body, order = _section(gaussians, level)
        heads.append(head)
        bodies.append(body)
        orders.append(order)
    return b"".join([bytes(header), *heads, *bodies]), orders


def _section(gaussians: Gaussians, level: int) -> tuple[bytes, bytes, list[int]]:
    means = gaussians.means.double().numpy()
    cells: dict[tuple[int, ...], list[int]] = {}
    for row, cell in enumerate(np.floor(means / SIDE).astype(int).tolist()):
        cells.setdefault(tuple(cell), []).append(row)
    full, partial = [], []
    for cell, rows in cells.items():
        for first in range(0, len(rows), CAPACITY):
            bucket = (cell, rows[first : first + CAPACITY])
            (full if len(bucket[1]) == CAPACITY else partial).append(bucket)
    degree = min(2, gaussians.sh_degree)
    body = b"".join(struct.pack("<I", len(rows)) for _, rows in partial) if level else b""
    middles = [(np.array(cell) + 0.5) * SIDE for cell, _ in full + partial]
    if level:
        body += b"".join(struct.pack("<3f", *middle) for middle in middles)
    order = []
    for (_, rows), middle in zip(full + partial, middles, strict=True):
        for row in rows:
            body += _row(gaussians, row, level, degree, middle)
            order.append(row)
    head = bytearray(1024)
    struct.pack_into("<2I", head, 0, len(gaussians), len(gaussians))
    if level:
        struct.pack_into("<2IfH", head, 8, CAPACITY, len(middles), SIDE, 12)
        struct.pack_into("<2I2I", head, 24, QUANTA, len(body), len(full), len(partial))
    struct.pack_into("<H", head, 40, degree)
    return bytes(head), body, order


def _row(gaussians: Gaussians, row: int, level: int, degree: int, middle: np.ndarray) -> bytes:
    real = "e" if level else "f"
    mean = gaussians.means[row].double().numpy()
    if level:
        steps = np.clip(np.floor((mean - middle) * QUANTA / (SIDE / 2) + 0.5) + QUANTA, 0, 2 * QUANTA + 1)
        packed = struct.pack("<3H", *steps.astype(int))
    else:
        packed = struct.pack("<3f", *mean)
    quat = gaussians.quats[row].double() / gaussians.quats[row].double().norm()
    packed += struct.pack(f"<7{real}", *gaussians.log_scales[row].double().exp().tolist(), *quat.tolist())
    colour = 0.5 + 0.28209479177387814 * gaussians.sh0[row].double().numpy()
    opacity = float(gaussians.logit_opacities[row].double().sigmoid())
    packed += bytes(int(np.clip(round(255 * value), 0, 255)) for value in [*colour, opacity])
    harmonics = gaussians.shN[row].double().numpy()
    for band in range(1, degree + 1):
        for channel in range(3):
            for value in harmonics[SHN_COUNTS[band - 1] : SHN_COUNTS[band], channel]:
                if level == 2:
                    low, high = SH_RANGE
                    packed += bytes([int((np.clip(value, low, high) - low) / (high - low) * 255)])
                else:
                    packed += struct.pack(f"<{real}", value)
    return packed
