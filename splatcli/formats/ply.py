"""Gaussians as INRIA's PLY, which every viewer reads: one vertex a Gaussian, float32, raw parameters."""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splatcli.checkpoint.atomic import write_atomically
from splatcli.checkpoint.foreign.imported import Columns, Floats, ImportedModel, check_finite
from splatcli.errors import ModelFileError, OutputError, UnreadableError, from_os_error
from splatcli.formats.format import Encoded, ExportMetadata, Format, refused_discs
from splatcli.gaussians import SHN_COUNTS, Gaussians
from splatcli.progress import report
from splatcli.sizes import listed

# --- the header: its claims are compared with the file's size before any allocation
#
# plyfile is as fast on plain binary files, but a header that claims 10^9 faces costs it 7.6 GB and 73 s, one of 200 MB
# 96 s, an ASCII file 8.6 times as long, and it refuses comments that are not ASCII (docs/design.md, Dependencies).

#: Longer headers than this belong to no PLY that anyone writes.
_MAX_HEADER = 1 << 20
#: PLY's names of number types -> numpy's.
_TYPES = {
    **dict.fromkeys(("char", "int8"), "i1"),
    **dict.fromkeys(("uchar", "uint8"), "u1"),
    **dict.fromkeys(("short", "int16"), "i2"),
    **dict.fromkeys(("ushort", "uint16"), "u2"),
    **dict.fromkeys(("int", "int32"), "i4"),
    **dict.fromkeys(("uint", "uint32"), "u4"),
    **dict.fromkeys(("float", "float32"), "f4"),
    **dict.fromkeys(("double", "float64"), "f8"),
}


@dataclass(slots=True)
class PlyElement:
    """An element: its name, number of rows, and properties in order, with numpy's names of their types.

    has_list: one of the properties is a list; its type is that of the list's length, and stride a lower bound.
    """

    name: str
    count: int
    properties: dict[str, str] = field(default_factory=dict)
    has_list: bool = False

    @property
    def stride(self) -> int:
        """Return bytes of a row."""
        return sum(int(kind[1]) for kind in self.properties.values())


@dataclass(slots=True)
class PlyHeader:
    """The header of a PLY file.

    format: ascii, binary_little_endian or binary_big_endian. size: bytes up to the data.
    trailing: bytes behind the data, where the header alone gives their number.
    """

    format: str = ""
    elements: list[PlyElement] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    size: int = 0
    trailing: int = 0

    def before(self, name: str) -> list[PlyElement]:
        """Return the elements whose rows come before those of element ``name``."""
        return self.elements[: [element.name for element in self.elements].index(name)]


def read_ply_header(path: Path, *, lenient: bool) -> PlyHeader:
    """Return the header of a PLY file whose claims fit the size of the file.

    lenient: more bytes than promised are counted in ``trailing`` instead of refused.
    Raises ModelFileError: not a PLY, broken header, impossible counts, data short or followed by more.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(_MAX_HEADER)
    except OSError as error:
        raise from_os_error(error, UnreadableError, path) from None
    if size == 0:
        raise ModelFileError("the file is empty (0 bytes)", where=path)
    if not head.startswith((b"ply\n", b"ply\r\n")):
        raise ModelFileError(f"not a PLY: it starts with {head[:16]!r}", where=path)
    header = _parse(head, path)
    _check_size(header, size, path, lenient=lenient)
    return header


def _parse(head: bytes, path: Path) -> PlyHeader:
    header = PlyHeader()
    position = 0
    number = 0
    while (end := head.find(b"\n", position)) >= 0:
        line = head[position:end].decode("ascii", "replace").strip()
        position, number = end + 1, number + 1
        if line == "end_header":
            header.size = position
            if not header.format:
                raise ModelFileError("the PLY header names no format", where=path)
            return header
        try:
            _parse_line(line, header, first=number == 1)
        except ValueError as error:
            raise ModelFileError(f"line {number} of the PLY header: {error}", where=path) from None
    raise ModelFileError("the PLY header has no end_header: truncated", where=path)


def _parse_line(line: str, header: PlyHeader, *, first: bool) -> None:
    """Add one line to the header. Raises ValueError with the fault."""
    keyword, _, rest = line.partition(" ")
    words = rest.split()
    if first or keyword in ("obj_info", ""):
        return
    if keyword == "comment":
        header.comments.append(rest)
    elif keyword == "format":
        if words not in (["ascii", "1.0"], ["binary_little_endian", "1.0"], ["binary_big_endian", "1.0"]):
            raise ValueError(f"unknown format {rest!r}")
        header.format = words[0]
    elif keyword == "element":
        if len(words) != 2 or not words[1].isascii() or not words[1].isdigit() or len(words[1]) > 18:
            raise ValueError(f"{line!r} is not 'element NAME COUNT' with a count of 0 or more")
        if any(element.name == words[0] for element in header.elements):
            raise ValueError(f"element {words[0]!r} is there twice")
        header.elements.append(PlyElement(words[0], int(words[1])))
    elif keyword == "property":
        if not header.elements:
            raise ValueError("a property before the first element")
        _add_property(header.elements[-1], words)
    else:
        raise ValueError(f"unknown keyword {keyword[:40]!r}")


def _add_property(element: PlyElement, words: list[str]) -> None:
    is_list = len(words) == 4 and words[0] == "list"
    if not is_list and len(words) != 2:
        raise ValueError(f"'property {' '.join(words)}' is not 'property TYPE NAME'")
    kind, name = words[1 if is_list else 0], words[-1]
    if kind not in _TYPES or (is_list and words[2] not in _TYPES):
        raise ValueError(f"unknown type in 'property {' '.join(words)}'")
    if name in element.properties:
        raise ValueError(f"property {name!r} of {element.name!r} is there twice")
    element.properties[name] = _TYPES[kind]
    element.has_list |= is_list


def _check_size(header: PlyHeader, size: int, path: Path, *, lenient: bool) -> None:
    """Compare the counts with the bytes that follow the header, before anything of that size is allocated."""
    hollow = [element.name for element in header.elements if element.count and not element.properties]
    if hollow:
        raise ModelFileError(f"element {hollow[0]!r} has rows, but no properties", where=path)
    rest = size - header.size
    if header.format == "ascii":  # a value takes at least a digit and a separator; the last newline may be missing
        claimed = sum(element.count * 2 * max(1, len(element.properties)) for element in header.elements) - 1
    else:
        claimed = sum(element.count * element.stride for element in header.elements)
    counts = ", ".join(f"{element.count} x {element.name}" for element in header.elements)
    if claimed > rest:
        raise ModelFileError(f"the header promises {counts}: {claimed} bytes; {rest} follow it: truncated", where=path)
    exact = header.format != "ascii" and not any(element.has_list for element in header.elements)
    if exact and claimed < rest:
        if not lenient:
            raise ModelFileError(
                f"{rest - claimed} bytes follow the {counts} that the header promises",
                where=path,
                remedy="export it again, or ignore them with --lenient",
            )
        header.trailing = rest - claimed


def binary_rows(header: PlyHeader, element: PlyElement, path: Path) -> NDArray[Any]:
    """Return the rows of an element without lists as a structured array, memory-mapped from a binary file."""
    before = header.before(element.name)
    if any(other.has_list for other in before):
        raise ModelFileError(f"elements with lists stand before the rows of {element.name!r}", where=path)
    order = "<>"[header.format == "binary_big_endian"]
    dtype = np.dtype([(name, order + kind) for name, kind in element.properties.items()])
    if not element.count:
        return np.empty(0, dtype)
    offset = header.size + sum(other.count * other.stride for other in before)
    return np.memmap(path, dtype, mode="r", offset=offset, shape=(element.count,))


# --- writing

#: The comment behind ``element vertex``, where readers of the fixed form skip it. It settles the space of a scene in
#: millimetres, all of whose log-scales are positive.
RAW_COMMENT = "splatcli: scale_* are natural logarithms, opacity is a logit, rot_* is w x y z, not normalised"

#: The comment of a model that was trained antialiased, in Brush's spelling, which viewers read.
MIP_COMMENT = "SplatRenderMode: mip"
#: What comments say of that: the mode of Brush and splat-transform, in any case, or Postshot's flag.
_RENDER_MODE = re.compile(r"\s*(?:splatrendermode:\s*(\w+)|antialiased\s+([01]))\s*", re.IGNORECASE)

_MEANS = ["x", "y", "z"]
_NORMALS = ["nx", "ny", "nz"]
_SH0 = ["f_dc_0", "f_dc_1", "f_dc_2"]
_OPACITY = ["opacity"]
_SCALES = ["scale_0", "scale_1", "scale_2"]
_QUATS = ["rot_0", "rot_1", "rot_2", "rot_3"]
_REQUIRED = [*_MEANS, *_SH0, *_OPACITY, *_SCALES, *_QUATS]


#: The comment with the SHA-256 of opacity and scale_0 to scale_2 of each vertex in turn, little-endian float32: the
#: values are those that a program of this package wrote, so that no other has activated them, or some, since.
_SEAL = "splatcli: sha256 of opacities and scales: "


class Seal:
    """The digest of opacities and scales, which are added in the order of the file."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, opacities: Floats, scales: Floats) -> None:
        """opacities: [N] logits. scales: [N, 3] logarithms."""
        self._digest.update(np.concatenate([opacities[:, None], scales], axis=1, dtype="<f4").tobytes())

    def add_gaussians(self, gaussians: Gaussians) -> None:
        """Add Gaussians on any device."""
        for start in range(0, len(gaussians), _ROWS):
            piece = slice(start, start + _ROWS)
            logits, scales = gaussians.logit_opacities[piece], gaussians.log_scales[piece]
            self.add(logits.detach().cpu().numpy(), scales.detach().cpu().numpy())

    @property
    def comment(self) -> str:
        """The line for the header."""
        return _SEAL + self._digest.hexdigest()


def _is_sealed(header: PlyHeader, columns: dict[str, NDArray[np.float32]]) -> bool:
    """Return whether opacities and scales are as they were when this package wrote them."""
    if not any(text.startswith(_SEAL) for text in header.comments):
        return False
    seal, opacities, scales = Seal(), columns["opacities"], columns["scales"]
    for start in range(0, len(scales), _ROWS):
        seal.add(opacities[start : start + _ROWS], scales[start : start + _ROWS])
    return seal.comment in header.comments


#: Gaussians that are brought into the order of the file at once.
_ROWS = 1 << 18


def encode_ply(gaussians: Gaussians, metadata: ExportMetadata) -> Encoded:
    """Return the Gaussians as a binary PLY in INRIA's layout; see write_ply()."""
    buffer = io.BytesIO()
    comments, notes = ply_comments(metadata)
    write_ply(gaussians, buffer, comments)
    return Encoded(buffer.getvalue(), notes)


def ply_comments(metadata: ExportMetadata) -> tuple[list[str], list[str]]:
    """Return the lines of a header, and notes for the user."""
    if not metadata.antialiased:
        return list(metadata.comments), []
    note = "trained antialiased; viewers that cannot compensate opacity show it too thick"
    return [*metadata.comments, MIP_COMMENT], [note]


def is_antialiased(header: PlyHeader, path: Path) -> bool:
    """Return whether the comments of a PLY say so; the last one counts. Raises ModelFileError for 2D Gaussians."""
    modes = [found.groups() for text in header.comments if (found := _RENDER_MODE.fullmatch(text))]
    mode, flag = modes[-1] if modes else (None, None)
    mode = (mode or "").lower()
    if mode == "2dgs":
        raise refused_discs(path, "SplatRenderMode: 2dgs")
    return mode == "mip" or flag == "1"


def write_ply(gaussians: Gaussians, file: BinaryIO, comments: Sequence[str] = ()) -> None:
    """Write the Gaussians as a binary little-endian PLY; ``file`` may be a pipe. comments: lines for the header.

    Properties in INRIA's order, normals zero, f_rest channel-major (all R, all G, all B), quaternions as they are:
    reading the file gives the same bits. Raises DivergedError when a value is not finite (no reader takes such a file)
    and ValueError when the parameters are not float32.
    """
    if gaussians.means.dtype != torch.float32:
        raise ValueError(f"the parameters are {gaussians.means.dtype}, not float32")
    check_finite(gaussians)
    seal = Seal()
    seal.add_gaussians(gaussians)
    parts = (
        gaussians.map(lambda tensor, start=start: tensor[start : start + _ROWS])  # type: ignore[misc]
        for start in range(0, len(gaussians), _ROWS)
    )
    write_ply_parts(parts, len(gaussians), gaussians.shN.shape[1], file, [seal.comment, *comments])


def write_ply_parts(
    parts: Iterable[Gaussians], count: int, shN_count: int, file: BinaryIO, comments: Sequence[str]
) -> None:
    """Write ``count`` Gaussians in parts, of which one at a time is in memory; see write_ply().

    shN_count: coefficients of shN.
    """
    names = property_names(shN_count)
    lines = ["ply", "format binary_little_endian 1.0", f"element vertex {count}"]
    lines += [f"comment {text}" for text in (RAW_COMMENT, *comments)]
    lines += [*(f"property float {name}" for name in names), "end_header"]
    file.write("\n".join([*lines, ""]).encode("ascii"))
    written = 0
    for part in parts:
        check_finite(part)
        file.write(_table(part, names).data)
        written += len(part)
    if written != count:
        raise ValueError(f"{written} Gaussians came where {count} were announced")


def property_names(shN_count: int) -> list[str]:
    """Return the properties of a vertex in INRIA's order. shN_count: coefficients of shN."""
    return [*_MEANS, *_NORMALS, *_SH0, *_rest_names(3 * shN_count), *_OPACITY, *_SCALES, *_QUATS]


def _table(gaussians: Gaussians, names: list[str]) -> Floats:
    """Return [N, len(names)], the values in the file's order."""
    count = len(gaussians)
    table = np.zeros((count, len(names)), dtype="<f4")

    def put(first: str, values: Tensor) -> None:
        column = names.index(first)
        flat = values.detach().cpu().reshape(count, int(np.prod(values.shape[1:])))
        table[:, column : column + flat.shape[1]] = flat.numpy()

    put("x", gaussians.means)
    put("f_dc_0", gaussians.sh0)
    if gaussians.shN.shape[1]:
        put("f_rest_0", gaussians.shN.transpose(1, 2))
    put("opacity", gaussians.logit_opacities)
    put("scale_0", gaussians.log_scales)
    put("rot_0", gaussians.quats)
    return table


def write_ply_file(gaussians: Gaussians, path: Path, comments: Sequence[str] = ()) -> None:
    """Write a PLY file in one step: at any time, ``path`` holds the old file or the whole new one.

    It is never in memory as a whole. comments: lines for the header.
    Devices and pipes are written to directly. Raises OutputError.
    """
    path = Path(path)
    if path.is_dir():
        raise OutputError("this is a folder, not a file", where=path, remedy=f"name a file, e.g. {path / 'model.ply'}")
    size = 4 * len(property_names(gaussians.shN.shape[1])) * len(gaussians)
    write_atomically(
        path, lambda file: write_ply(gaussians, file, comments), what="PLY", reserve=size + (1 << 16), stream=True
    )


# --- reading


#: Rounding of positions, as a share of the extent, that is noted.
_COARSE = 1e-5
#: Rows that are converted at once: the pages of the file that hold them are read once for all columns.
_READ_ROWS = 50_000


def import_ply(path: Path, *, lenient: bool = False) -> ImportedModel:
    """Return the model in an INRIA PLY, bit for bit where the file holds float32; its space is not checked yet.

    Columns are found by name; ascii, big-endian, doubles and further columns are accepted.
    lenient: bytes behind the data are ignored, with a note.
    Raises ModelFileError: damaged, or not a splat file.
    """
    path = Path(path)
    header = read_ply_header(path, lenient=lenient)
    vertex = _vertex_of(header, path)
    shN_numbers = _check_columns(vertex, path)
    antialiased = is_antialiased(header, path)
    notes = _ignored(header, vertex)
    if header.format == "ascii":
        rows = _ascii_rows(header, vertex, path, notes, lenient)
    else:
        rows = binary_rows(header, vertex, path)
    if header.trailing:
        notes.append(f"ignored {header.trailing} bytes behind the data")
    names = {
        "means": _MEANS,
        "quats": _QUATS,
        "scales": _SCALES,
        "opacities": _OPACITY,
        "sh0": _SH0,
        "shN": _rest_names(shN_numbers),
    }
    columns, off = _columns(rows, names, vertex, path)
    if vertex.count > 1 and off > 0 and off > _COARSE * _extent(columns["means"]):
        notes.append(
            f"positions are rounded by up to {off:.2g} units to float32: subtract an offset from them in the program "
            "that wrote the file"
        )
    columns["opacities"] = columns["opacities"][:, 0]
    columns["shN"] = columns["shN"].reshape(vertex.count, 3, shN_numbers // 3).transpose(0, 2, 1)

    def place(column: str, index: tuple[int, ...]) -> str:
        properties = names[column]
        # shN is [N, K, 3] here and channel-major in the file.
        found = index[2] * (shN_numbers // 3) + index[1] if column == "shN" else index[1] if len(index) > 1 else 0
        span = properties[0] if len(properties) == 1 else f"{properties[0]}...{properties[-1]}"
        return f"{span}, the first in {properties[found]} of vertex {index[0]}"

    return ImportedModel(
        "PLY",
        Columns.tensors(**columns),
        place=place,
        declared=RAW_COMMENT in header.comments,
        sealed=_is_sealed(header, columns),
        antialiased=antialiased,
        notes=notes,
    )


def _columns(
    rows: NDArray[Any], names: dict[str, list[str]], vertex: PlyElement, path: Path
) -> tuple[dict[str, Floats], float]:
    """Return (for each of ``names`` its properties [N, P], by how much float32 rounds positions at most).

    rows: of binary_rows() or _ascii_rows(). path: of messages.
    """
    columns = {column: np.empty((vertex.count, len(part)), np.float32) for column, part in names.items()}
    task, off = f"reading {path.name}", 0.0
    report(task, 0, vertex.count)
    for start in range(0, vertex.count, _READ_ROWS):
        piece = slice(start, min(start + _READ_ROWS, vertex.count))
        for column, part in names.items():
            columns[column][piece] = _float32(rows[piece], part, vertex)
        off = max(off, _rounding(rows[piece], vertex, columns["means"][piece]))
        report(task, piece.stop, vertex.count)
    return columns, off


def _vertex_of(header: PlyHeader, path: Path) -> PlyElement:
    elements = {element.name: element for element in header.elements}
    vertex = elements.get("vertex")
    if _CODEBOOKS in elements:
        raise ModelFileError(f"its values are places in {_CODEBOOKS} (Reduced-3DGS)", where=path, remedy=_UNCOMPRESSED)
    if vertex is None:
        raise ModelFileError(f"no vertex element, only {sorted(elements)}", where=path)
    if vertex.has_list:
        raise ModelFileError("vertices with lists are not splats", where=path)
    return vertex


#: Colours for programs that show points.
_FALLBACK = ["red", "green", "blue", "alpha"]
#: Properties of models in time: centre and extent of a Gaussian's life, in the names of Spacetime Gaussians, and of 4D
#: Gaussians.
_TIMES = {"trbf_center", "trbf_scale", "motion_0", "scale_t", "scale_t_0", "rot_r_0"}
#: The element with which Reduced-3DGS compresses a model.
_CODEBOOKS = "codebook_centers"
_UNCOMPRESSED = (
    "name the PLY that it was compressed from, as point_cloud.ply beside point_cloud_quantised.ply, or export it from "
    "the program that made it as a PLY of floats, SPZ or SOG"
)
#: Properties of Scaffold-GS and its successors, whose networks make Gaussians of anchors for each view.
_ANCHORS = ("f_anchor_feat", "f_offset")
#: Names of the elements that Brush reads as the changes of a later frame.
_CHANGES = "delta_vertex_"
#: Columns of which a PLY of Gaussians has one at least, and a point cloud none.
_OF_GAUSSIANS = {"opacity", "scale_0", "rot_0"}
_USE_OF_POINTS = (
    "name the PLY that a training wrote, as point_cloud/iteration_30000/point_cloud.ply; training starts from points "
    "with splat train SCENE --points FILE, else from those of the scene"
)


def _check_columns(vertex: PlyElement, path: Path) -> int:
    """Return the number of f_rest columns. Raises ModelFileError when a column is missing."""
    present = vertex.properties.keys()
    missing = [name for name in _REQUIRED if name not in present]
    if missing == ["scale_2"]:
        raise refused_discs(path, "two scales a Gaussian")
    if any(name.startswith(_ANCHORS) for name in present):
        raise ModelFileError(
            "it holds the anchors of Scaffold-GS or a successor, of which a network makes Gaussians for each view",
            where=path,
            remedy="train Gaussians on the same photos: splat train SCENE",
        )
    if missing:
        looks = "a splat export without all columns" if present & _OF_GAUSSIANS else "a point cloud"
        if not present & set(_SH0) and present & {"red", "r", "diffuse_red"} and "opacity" in present:
            looks = "an export with plain rgb colours"
        raise ModelFileError(
            f"it has no {', '.join(missing)}; it looks like {looks}",
            where=path,
            remedy=_USE_OF_POINTS if looks == "a point cloud" else None,
        )
    if "filter_3D" in present:
        raise ModelFileError(
            "it has a filter_3D column (Mip-Splatting), which changes scales and opacities",
            where=path,
            remedy="use the fused PLY that Mip-Splatting's create_fused_ply.py writes",
        )
    if moving := sorted(present & _TIMES):
        raise ModelFileError(
            f"its Gaussians move or fade in time ({', '.join(moving)}): this is a 4D model, not a 3D one",
            where=path,
            remedy="export the model at one moment, as a PLY, from the program that trained it",
        )
    shN_numbers = sum(name.startswith("f_rest_") for name in present)
    if shN_numbers not in [3 * size for size in SHN_COUNTS] or not present >= set(_rest_names(shN_numbers)):
        raise ModelFileError(f"{shN_numbers} f_rest columns; 0, 9, 24, 45 or 72 are known, numbered from 0", where=path)
    names = [*_REQUIRED, *_rest_names(shN_numbers)]
    if whole := [name for name in names if not vertex.properties[name].startswith("f")]:
        raise ModelFileError(
            f"whole numbers in {listed(whole, 4)}: another program compressed it",
            where=path,
            remedy=_UNCOMPRESSED,
        )
    return shN_numbers


def is_point_cloud(path: Path) -> bool:
    """Return whether a file is a PLY of points without opacities, scales and rotations. False for a damaged one."""
    try:
        header = read_ply_header(path, lenient=True)
    except (ModelFileError, UnreadableError):
        return False
    present = {name for element in header.elements if element.name == "vertex" for name in element.properties}
    return present >= {"x", "y", "z"} and not present & _OF_GAUSSIANS


def _ignored(header: PlyHeader, vertex: PlyElement) -> list[str]:
    """Return notes on what the file has beside one set of Gaussians."""
    known = {*_REQUIRED, *_NORMALS, *_FALLBACK}
    others = [name for name in vertex.properties if name not in known and not name.startswith("f_rest_")]
    notes = []
    if others:
        notes.append(f"ignored the properties {listed(others, 8)} of its vertices")
    if changes := sum(element.name.startswith(_CHANGES) for element in header.elements):
        notes.append(f"its Gaussians move: the first of {changes + 1:,} frames is read")
    return notes


def _ascii_rows(
    header: PlyHeader, vertex: PlyElement, path: Path, notes: list[str], lenient: bool
) -> NDArray[np.float64]:
    """Return [N, properties], the values of the vertices."""
    lines = [line for line in path.read_bytes()[header.size :].splitlines() if line.strip()]
    promised = sum(element.count for element in header.elements)
    if len(lines) < promised or (len(lines) > promised and not lenient):
        raise ModelFileError(
            f"{len(lines)} lines of data, the header promises {promised}",
            where=path,
            remedy="export it again" + (", or ignore the last ones with --lenient" if len(lines) > promised else ""),
        )
    if len(lines) > promised:
        notes.append(f"ignored {len(lines) - promised} lines behind the data")
    if not vertex.count:
        return np.empty((0, len(vertex.properties)))
    first = sum(element.count for element in header.before("vertex"))
    text = [line.decode("ascii", "replace") for line in lines[first : first + vertex.count]]
    try:
        rows = np.loadtxt(text, dtype=np.float64, ndmin=2, comments=None)
    except ValueError as error:  # it names the row
        raise ModelFileError(f"its data cannot be read: {error}", where=path) from None
    if rows.shape[1] != len(vertex.properties):
        raise ModelFileError(
            f"{rows.shape[1]} values in a line of data, the header names {len(vertex.properties)} properties",
            where=path,
        )
    return rows


def _float32(rows: NDArray[Any], names: list[str], vertex: PlyElement) -> Floats:
    """Return [N, len(names)] float32. A number too large for float32 becomes infinite; any NaN stays one."""
    if not names or not len(rows):
        return np.empty((len(rows), len(names)), dtype=np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        if rows.dtype.names is not None:
            if set(vertex.properties.values()) != {"f4"}:
                return np.stack([rows[name].astype(np.float32) for name in names], axis=1)
            rows = rows.view(rows.dtype[0]).reshape(len(rows), len(vertex.properties))
        order = list(vertex.properties)
        return rows[:, [order.index(name) for name in names]].astype(np.float32)


def _rounding(rows: NDArray[Any], vertex: PlyElement, means: Floats) -> float:
    """Return by how much float32 ``means`` [N, 3] differ at most from the positions in ``rows``; 0 without a number."""
    if rows.dtype.names is not None:
        if {vertex.properties[axis] for axis in _MEANS} == {"f4"}:
            return 0.0
        exact = [rows[axis] for axis in _MEANS]
    else:
        exact = [rows[:, list(vertex.properties).index(axis)] for axis in _MEANS]
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused later, with its place
        off = max(float(np.abs(column - means[:, place]).max()) for place, column in enumerate(exact))
    return off if math.isfinite(off) else 0.0


def _extent(means: Floats) -> float:
    """Return the longest side of the box around some positions."""
    with np.errstate(invalid="ignore"):  # what is not finite is refused later, with its place
        return float((means.max(axis=0).astype(np.float64) - means.min(axis=0)).max())


def _rest_names(count: int) -> list[str]:
    return [f"f_rest_{i}" for i in range(count)]


def is_ply(head: bytes) -> bool:
    """Return whether a file is a PLY other than PlayCanvas' compressed one."""
    return head.startswith(b"ply") and b"packed_position" not in head


FORMAT = Format("ply", ".ply", "a PLY", 4, encode_ply, import_ply, is_ply, has_comments=True)
