"""SPZ, Niantic's compressed splats: about 28 bytes a Gaussian with all harmonics.

Positions are 24-bit fixed point, opacities, colours and log-scales a byte each, rotations the three smallest components
of the quaternion in 10 bits each (before version 3: a byte each of x y z), SH a byte each, coefficient by coefficient,
R G B together. Coordinates are those of a PLY, as Niantic's own converters and SuperSplat write them; the files have no
word for their frame.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from splatcli.checkpoint.foreign.stored import ImportedModel
from splatcli.errors import UsageError
from splatcli.formats.quantisation import (
    Columns,
    Doubles,
    Encoded,
    ExportMetadata,
    Floats,
    columns_of,
    logits_of,
    opacities_of,
    quantised,
    stored_of,
    unit_quats,
)
from splatcli.formats.rotations import largest_and_rest, with_largest
from splatcli.formats.spz_container import ANTIALIASED, Header, pack, unpack
from splatcli.gaussians import SH_REST, Gaussians

_FRACTIONAL_BITS = 12
_LARGEST_POSITION = (1 << 23) - 1
#: Colours are stored as sh0 * 0.15 + 0.5, log-scales as 16 (s + 10), components of quaternions in steps of
#: sqrt(1/2) / 511.
_COLOUR_SCALE = 0.15
_SCALE_STEPS, _SCALE_SHIFT = 16.0, 10.0
_ROTATION_STEPS = 511.0 * math.sqrt(2.0)
#: SH of degree 1 keep 5 bits and higher ones 4, as in the official encoder: bytes rounded so compress better.
_STEP_FIRST, _STEP_OTHERS = 8, 16


def encode_spz(gaussians: Gaussians, told: ExportMetadata) -> Encoded:
    """Version 3, which all readers know. Raises DivergedError for values that are not finite, and UsageError for
    positions beyond what fits.
    """
    return _encode(gaussians, told, 3)


def encode_spz4(gaussians: Gaussians, told: ExportMetadata) -> Encoded:
    """Version 4, a tenth smaller and not read everywhere yet; needs the package zstandard."""
    return _encode(gaussians, told, 4)


def _encode(gaussians: Gaussians, told: ExportMetadata, version: int) -> Encoded:
    columns = columns_of(gaussians)
    notes = _losses(columns)
    bits = _fractional_bits(columns.means)
    if bits < _FRACTIONAL_BITS:
        notes.append(f"positions are rounded to steps of {2.0**-bits:g}: 24 bits hold no more of so large a scene")
    place, rest = largest_and_rest(unit_quats(columns.quats)[:, [1, 2, 3, 0]])
    magnitude = quantised(np.abs(rest) * _ROTATION_STEPS, 511)
    parts = (rest < 0).astype(np.int64) << 9 | magnitude
    packed = place << 30 | parts[:, 0] << 20 | parts[:, 1] << 10 | parts[:, 2]
    streams = [
        _fixed_point(columns.means, bits),
        _bytes(opacities_of(columns.logit_opacities) * 255.0),
        _bytes(columns.sh0.astype(np.float64) * (_COLOUR_SCALE * 255.0) + 127.5),
        _bytes((columns.log_scales.astype(np.float64) + _SCALE_SHIFT) * _SCALE_STEPS),
        packed.astype("<u4").tobytes(),
        _harmonics(columns.shN),
    ]
    flags = ANTIALIASED if told.antialiased else 0
    return Encoded(pack(Header(version, len(gaussians), gaussians.sh_degree, bits, flags), streams), notes)


def read_stored_spz(path: Path, *, lenient: bool = False) -> ImportedModel:
    """What an SPZ file of version 1 to 4 holds.

    Raises ModelFileError: damaged, not SPZ, or impossible counts; VersionError; ResourceError as pack() does.
    """
    header, streams, notes = unpack(path, lenient=lenient)
    count = header.count
    alphas, colours, scales = (np.frombuffer(stream, np.uint8) for stream in streams[1:4])
    harmonics = np.frombuffer(streams[5], np.uint8).reshape(count, SH_REST[header.sh_degree], 3)
    if header.flags & ANTIALIASED:
        notes.append("it was trained antialiased, as the file says; it is taken as if it was not")
    return stored_of(
        f"SPZ version {header.version}",
        means=_positions(streams[0], header),
        quats=_rotations(streams[4], header),
        log_scales=scales.reshape(count, 3) / _SCALE_STEPS - _SCALE_SHIFT,
        logit_opacities=logits_of(alphas / 255.0, 1 / 255),
        sh0=(colours.reshape(count, 3) / 255.0 - 0.5) / _COLOUR_SCALE,
        shN=(harmonics.astype(np.float32) - 128) / 128,
        notes=notes,
    )


def _losses(columns: Columns) -> list[str]:
    """What lies beyond the ranges that the format has, in words."""
    notes = []
    low, high = -_SCALE_SHIFT, 255 / _SCALE_STEPS - _SCALE_SHIFT
    for what, outside in (
        (
            f"log-scales outside {low:g} to {high:.4g}",
            (columns.log_scales < low - 0.5) | (columns.log_scales > high + 0.5),
        ),
        ("SH coefficients beyond 1", np.abs(columns.shN) > 1.0 + 1 / 128),
        ("colours beyond what a byte holds", np.abs(columns.sh0) > 0.5 / _COLOUR_SCALE),
    ):
        if found := int(outside.sum()):
            notes.append(f"clamped {found:,} {what}, the range of SPZ")
    return notes


def _fractional_bits(means: Floats) -> int:
    farthest = float(np.abs(means).max(initial=0.0))
    for bits in range(_FRACTIONAL_BITS, -1, -1):
        if farthest * 2.0**bits <= _LARGEST_POSITION:
            return bits
    raise UsageError(
        f"positions of up to {farthest:.4g} are beyond the {_LARGEST_POSITION:,} units that SPZ holds",
        remedy="leave far Gaussians out with --crop, or write a PLY",
    )


def _fixed_point(means: Floats, bits: int) -> bytes:
    whole = np.floor(means.astype(np.float64) * 2.0**bits + 0.5).astype("<i4")
    return whole.view(np.uint8).reshape(len(means), 3, 4)[:, :, :3].tobytes()


def _positions(stream: bytes, header: Header) -> NDArray[np.floating]:
    if header.version == 1:
        return np.frombuffer(stream, "<f2").reshape(header.count, 3).astype(np.float64)
    parts = np.frombuffer(stream, np.uint8).reshape(header.count, 3, 3)
    wide = np.zeros((header.count, 3, 4), np.uint8)
    wide[:, :, 1:] = parts  # the sign lands in the highest bit of 32
    return (wide.view("<i4")[:, :, 0] >> 8) / 2.0**header.fractional_bits


def _rotations(stream: bytes, header: Header) -> Doubles:
    """[N, 4] w x y z."""
    if header.version < 3:
        xyz = np.frombuffer(stream, np.uint8).reshape(header.count, 3) / 127.5 - 1.0
        return with_largest(np.zeros(header.count, np.int64), xyz)
    packed = np.frombuffer(stream, "<u4").astype(np.int64)
    parts = np.stack([packed >> shift & 1023 for shift in (20, 10, 0)], axis=1)
    rest = np.where(parts & 512, -1.0, 1.0) * (parts & 511) / _ROTATION_STEPS
    return with_largest(packed >> 30, rest)[:, [3, 0, 1, 2]]


def _harmonics(shN: Floats) -> bytes:
    """[N, K, 3] as they lie: coefficient by coefficient, R G B together."""
    steps = np.full((1, shN.shape[1], 1), _STEP_OTHERS)
    steps[:, : SH_REST[1]] = _STEP_FIRST
    fine = np.floor(shN * 128 + 0.5) + 128
    return _bytes(np.floor((fine + steps // 2) / steps) * steps)


def _bytes(values: NDArray[np.floating]) -> bytes:
    payload: bytes = np.clip(np.floor(values + 0.5), 0, 255).astype(np.uint8).tobytes()
    return payload
