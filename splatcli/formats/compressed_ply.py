"""PlayCanvas' compressed PLY: chunks of 256 Gaussians with their ranges, 16 bytes a Gaussian, SH as bytes.

Elements: ``chunk`` with the least and the greatest position, log-scale and colour of its Gaussians; ``vertex`` with
four packed words (11 + 10 + 11 bits of position, of scale; two bits and three times ten of rotation; R G B opacity);
``sh`` with the other harmonics, channel-major as in a plain PLY.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splatcli.checkpoint.foreign.imported import (
    Columns,
    Floats,
    ImportedModel,
)
from splatcli.errors import ModelFileError
from splatcli.formats.format import Encoded, ExportMetadata, Format
from splatcli.formats.ply import MIP_COMMENT, PlyElement, PlyHeader, binary_rows, is_antialiased, read_ply_header
from splatcli.formats.quantisation import (
    Doubles,
    colours_of,
    from_smallest_three,
    logits_of,
    opacities_of,
    quantised,
    sh0_of,
    smallest_three,
    unit_quats,
)
from splatcli.gaussians import SHN_COUNTS, Gaussians
from splatcli.scene.points import morton_order

CHUNK = 256
#: Bits of three components in a word, the first highest.
_WORD = (11, 10, 11)
_LOG_SCALES = (-20.0, 20.0)
#: SH bytes cover -4...4.
_SH_RANGE = 8.0
_ROTATION_SCALE = math.sqrt(2.0) / 2

_MEANS = [f"{end}_{axis}" for end in ("min", "max") for axis in "xyz"]
_SCALES = [f"{end}_scale_{axis}" for end in ("min", "max") for axis in "xyz"]
_COLOURS = [f"{end}_{channel}" for end in ("min", "max") for channel in "rgb"]
_PACKED = ["packed_position", "packed_rotation", "packed_scale", "packed_color"]


def encode_compressed_ply(gaussians: Gaussians, metadata: ExportMetadata) -> Encoded:
    """Return the Gaussians in Morton order. Raises DivergedError when a value is not finite."""
    columns = Columns.of(gaussians)
    order = morton_order(columns.means)
    columns = Columns(*(column[order] for column in columns))
    log_scales = np.clip(columns.scales, *_LOG_SCALES)
    means, mean_range = _to_unit(columns.means)
    scales, scale_range = _to_unit(log_scales)
    colours, colour_range = _to_unit(colours_of(columns.sh0).astype(np.float32))
    vertices = np.zeros((len(gaussians), 4), "<u4")
    vertices[:, 0] = _pack(means)
    vertices[:, 1] = _pack_rotations(unit_quats(columns.quats))
    vertices[:, 2] = _pack(scales)
    rgba = np.column_stack([quantised(colours * 255.0, 255), quantised(opacities_of(columns.opacities) * 255, 255)])
    vertices[:, 3] = rgba @ (1 << np.array([24, 16, 8, 0]))
    chunks = np.concatenate([mean_range, scale_range, colour_range], axis=1).astype("<f4")
    shN_numbers = 3 * columns.shN.shape[1]
    harmonics = columns.shN.transpose(0, 2, 1).reshape(len(gaussians), shN_numbers)
    bytes_ = np.clip(np.floor((np.clip(harmonics, -_SH_RANGE, _SH_RANGE) / _SH_RANGE + 0.5) * 256.0), 0, 255).astype(
        np.uint8
    )
    notes = [
        f"clamped {found:,} {what} beyond {most:g}, the range of a compressed PLY"
        for what, values, most in (
            ("log-scales", columns.scales, _LOG_SCALES[1]),
            ("SH coefficients", harmonics, _SH_RANGE / 2),
        )
        if (found := int((np.abs(values) > most).sum()))
    ]
    head = _head(len(chunks), len(gaussians), shN_numbers, metadata)
    return Encoded(head.encode() + chunks.tobytes() + vertices.tobytes() + bytes_.tobytes(), notes)


def import_compressed_ply(path: Path, *, lenient: bool = False) -> ImportedModel:
    """Return the model in a compressed PLY. Raises ModelFileError: damaged, or not laid out as its kind is."""
    header = read_ply_header(path, lenient=lenient)
    antialiased = is_antialiased(header, path)
    chunk, vertex, sh = _elements(header, path)
    count = vertex.count
    ranges = binary_rows(header, chunk, path)
    if count > CHUNK * chunk.count:
        raise ModelFileError(f"{chunk.count:,} chunks of {CHUNK} cannot hold {count:,} Gaussians", where=path)
    if "min_r" not in chunk.properties:  # before version 2 colours were not scaled to the chunk
        colours = np.tile(np.array([0.0, 0, 0, 1, 1, 1]), (chunk.count, 1))
    else:
        colours = _columns(ranges, _COLOURS)
    words = binary_rows(header, vertex, path)
    rgba = np.stack([words["packed_color"] >> shift & 255 for shift in (24, 16, 8, 0)], axis=1) / 255.0
    harmonics = np.zeros((count, 0, 3), np.float32)
    if sh is not None:
        rows = binary_rows(header, sh, path)
        bytes_ = rows.view(np.uint8).reshape(count, 3, len(sh.properties) // 3)
        harmonics = _sh_values()[bytes_].transpose(0, 2, 1)
    notes = [f"ignored {header.trailing} bytes behind the data"] if header.trailing else []
    return ImportedModel(
        "compressed PLY",
        Columns.tensors(
            means=_from_unit(_unpack(words["packed_position"]), _columns(ranges, _MEANS)),
            quats=_unpack_rotations(words["packed_rotation"]),
            scales=_from_unit(_unpack(words["packed_scale"]), _columns(ranges, _SCALES)),
            opacities=logits_of(rgba[:, 3], 1 / 255),
            sh0=sh0_of(_from_unit(rgba[:, :3], colours)),
            shN=harmonics,
        ),
        declared=True,
        sealed=True,
        antialiased=antialiased,
        notes=notes,
    )


def _sh_values() -> Floats:
    """Return [256] what each byte of harmonics stands for; both ends for themselves, for values are clamped to them."""
    units = (np.arange(256) + 0.5) / 256.0
    units[[0, 255]] = 0.0, 1.0
    return ((units - 0.5) * _SH_RANGE).astype(np.float32)


def _head(chunks: int, count: int, shN_numbers: int, metadata: ExportMetadata) -> str:
    lines = ["ply", "format binary_little_endian 1.0"]
    lines += [f"comment {comment}" for comment in metadata.comments]
    lines += [f"comment {MIP_COMMENT}"] if metadata.antialiased else []
    lines += [f"element chunk {chunks}", *(f"property float {name}" for name in [*_MEANS, *_SCALES, *_COLOURS])]
    lines += [f"element vertex {count}", *(f"property uint {name}" for name in _PACKED)]
    if shN_numbers:
        lines += [f"element sh {count}", *(f"property uchar f_rest_{i}" for i in range(shN_numbers))]
    return "\n".join([*lines, "end_header", ""])


def _elements(header: PlyHeader, path: Path) -> tuple[PlyElement, PlyElement, PlyElement | None]:
    """Return the elements chunk, vertex and sh. Raises ModelFileError when one is not laid out as known."""
    if header.format != "binary_little_endian":
        raise ModelFileError(f"a compressed PLY of the format {header.format}", where=path)
    found = {element.name: element for element in header.elements}
    for name, wanted, kind in (("chunk", [*_MEANS, *_SCALES], "f4"), ("vertex", _PACKED, "u4")):
        element = found.get(name)
        if element is None:
            raise ModelFileError(f"a compressed PLY without the element {name}", where=path)
        if missing := [column for column in wanted if element.properties.get(column) != kind]:
            raise ModelFileError(f"element {name} has no {', '.join(missing)} of type {kind}", where=path)
        if any(other != kind for other in element.properties.values()) or element.has_list:
            raise ModelFileError(f"element {name} has columns of several types", where=path)
    colours = [name in found["chunk"].properties for name in _COLOURS]
    if any(colours) != all(colours):
        raise ModelFileError("element chunk has some of the ranges of colours, and not all", where=path)
    sh = found.get("sh")
    if sh is not None:
        expected = {f"f_rest_{i}": "u1" for i in range(len(sh.properties))}
        if sh.properties != expected or len(expected) not in [3 * size for size in SHN_COUNTS] or sh.has_list:
            raise ModelFileError(
                f"element sh has {len(sh.properties)} columns; 9, 24 or 45 of type u1 are known", where=path
            )
        if sh.count != found["vertex"].count:
            raise ModelFileError(f"{sh.count:,} rows of sh for {found['vertex'].count:,} Gaussians", where=path)
    return found["chunk"], found["vertex"], sh


def _columns(rows: NDArray[Any], names: list[str]) -> Doubles:
    """Return [N, len(names)]."""
    if not names:
        return np.zeros((len(rows), 0))
    with np.errstate(invalid="ignore"):  # some NaN of a damaged file
        return np.stack([rows[name].astype(np.float64) for name in names], axis=1)


def _to_unit(values: NDArray[np.floating]) -> tuple[Doubles, Doubles]:
    """Return ([N, 3] in 0...1 of the range of their chunk, [chunks, 6] the least and the greatest)."""
    starts = np.arange(0, len(values), CHUNK)
    low = np.minimum.reduceat(values, starts, axis=0).astype(np.float64)
    high = np.maximum.reduceat(values, starts, axis=0).astype(np.float64)
    chunk = np.arange(len(values)) // CHUNK
    extent = np.where(high > low, high - low, 1.0)
    return (values - low[chunk]) / extent[chunk], np.concatenate([low, high], axis=1)


def _from_unit(units: Doubles, ranges: Doubles) -> Doubles:
    """Return the inverse. units: [N, 3]; ranges: [chunks, 6]."""
    rows = ranges[np.arange(len(units)) // CHUNK]
    with np.errstate(over="ignore", invalid="ignore"):
        values: Doubles = rows[:, :3] + units * (rows[:, 3:] - rows[:, :3])
    return values


def _pack(units: Doubles) -> NDArray[np.int64]:
    x, y, z = (quantised(units[:, i] * (2**bits - 1), 2**bits - 1) for i, bits in enumerate(_WORD))
    return x << 21 | y << 11 | z


def _unpack(words: NDArray[np.uint32]) -> Doubles:
    parts = (words >> 21, words >> 11 & 1023, words & 2047)
    return np.stack([part / (2.0**bits - 1) for part, bits in zip(parts, _WORD, strict=True)], axis=1)


def _pack_rotations(quats: Doubles) -> NDArray[np.int64]:
    largest, others = smallest_three(quats)
    parts = quantised((others * _ROTATION_SCALE + 0.5) * 1023.0, 1023)
    return largest << 30 | parts[:, 0] << 20 | parts[:, 1] << 10 | parts[:, 2]


def _unpack_rotations(words: NDArray[np.uint32]) -> Doubles:
    parts = np.stack([words >> shift & 1023 for shift in (20, 10, 0)], axis=1)
    return from_smallest_three(words >> 30, (parts / 1023.0 - 0.5) / _ROTATION_SCALE)


def is_compressed_ply(head: bytes) -> bool:
    """Return whether a file is a PLY with packed properties."""
    return head.startswith(b"ply") and b"packed_position" in head


FORMAT = Format(
    "compressed.ply",
    ".compressed.ply",
    "a compressed PLY",
    3,
    encode_compressed_ply,
    import_compressed_ply,
    is_compressed_ply,
    has_comments=True,
)
