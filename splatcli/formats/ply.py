"""Gaussians as INRIA's PLY, which every viewer reads: one vertex a Gaussian, float32, raw parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import plyfile
import torch
from numpy.typing import NDArray
from torch import Tensor

from splatcli.checkpoint.atomic import write_atomically
from splatcli.checkpoint.schema import nonfinite
from splatcli.checkpoint.space import space_problem
from splatcli.errors import DivergedError, ModelFileError, OutputError
from splatcli.formats.ply_header import PlyElement, PlyHeader, read_ply_header
from splatcli.gaussians import SH_REST, Gaussians

#: Stands after ``element vertex``, where the fixed-form readers of the field skip it. It is what makes a scene in
#: millimetres, all of whose log-scales are positive, no riddle.
RAW_COMMENT = "splatcli: scale_* are natural logarithms, opacity is a logit, rot_* is w x y z, not normalised"

_MEANS = ["x", "y", "z"]
_NORMALS = ["nx", "ny", "nz"]
_SH0 = ["f_dc_0", "f_dc_1", "f_dc_2"]
_OPACITY = ["opacity"]
_SCALES = ["scale_0", "scale_1", "scale_2"]
_QUATS = ["rot_0", "rot_1", "rot_2", "rot_3"]
_REQUIRED = [*_MEANS, *_SH0, *_OPACITY, *_SCALES, *_QUATS]

Rows = NDArray[np.float32]


def write_ply(gaussians: Gaussians, file: BinaryIO) -> None:
    """Write the Gaussians as a binary little-endian PLY; ``file`` may be a pipe.

    Properties in INRIA's order, normals zero, f_rest channel-major (all R, all G, all B), quaternions as they are:
    reading the file gives the same bits. Raises DivergedError when a value is not finite (no reader takes such a file)
    and ValueError when the parameters are not float32.
    """
    if gaussians.means.dtype != torch.float32:
        raise ValueError(f"the parameters are {gaussians.means.dtype}, not float32")
    for name, tensor in gaussians.items():
        if (found := nonfinite(tensor)) is not None:
            raise DivergedError(f"{name} has {found[0]} NaN or infinite values, the first at {list(found[1])}")
    count, rest = len(gaussians), gaussians.shN.shape[1]
    names = [*_MEANS, *_NORMALS, *_SH0, *_rest_names(3 * rest), *_OPACITY, *_SCALES, *_QUATS]
    table = np.zeros((count, len(names)), dtype="<f4")

    def put(first: str, values: Tensor) -> None:
        column = names.index(first)
        flat = values.detach().cpu().reshape(count, int(np.prod(values.shape[1:])))
        table[:, column : column + flat.shape[1]] = flat.numpy()

    put("x", gaussians.means)
    put("f_dc_0", gaussians.sh0)
    if rest:
        put("f_rest_0", gaussians.shN.transpose(1, 2))
    put("opacity", gaussians.logit_opacities)
    put("scale_0", gaussians.log_scales)
    put("rot_0", gaussians.quats)
    rows = table.view([(name, "<f4") for name in names]).reshape(count)
    element = plyfile.PlyElement.describe(rows, "vertex", comments=[RAW_COMMENT])
    plyfile.PlyData([element], text=False, byte_order="<").write(file)


def write_ply_file(gaussians: Gaussians, path: Path) -> None:
    """Write a PLY file in one step: whatever happens, the place holds the old file or the whole new one.

    Devices and pipes (/dev/stdout) are written to directly. Raises OutputError.
    """
    path = Path(path)
    if path.is_dir():
        raise OutputError("this is a folder, not a file", where=path, remedy=f"name a file, e.g. {path / 'model.ply'}")
    # /dev/stdout may lead to a file, and is still not to be replaced; below /dev/shm are files like others.
    device = path.parts[:2] in (("/", "dev"), ("/", "proc")) and path.parts[2:3] != ("shm",)
    if device or (path.exists() and not path.is_file()):
        try:
            with path.open("wb") as file:
                write_ply(gaussians, file)
        except BrokenPipeError:
            raise  # the reader has had enough: not a failure
        except OSError as error:
            raise OutputError(f"could not write PLY (disk full?): {error.strerror}", where=path) from error
        return
    target = path.resolve() if path.is_symlink() else path
    size = (len(_REQUIRED) + len(_NORMALS) + 3 * gaussians.shN.shape[1]) * 4 * len(gaussians)
    write_atomically(target, lambda file: write_ply(gaussians, file), what="PLY", reserve=size + (1 << 16))


def read_ply(path: Path) -> Gaussians:
    """The Gaussians of an INRIA PLY as float32 CPU tensors, bit for bit where the file holds float32.

    Columns are found by name; ascii, big-endian, other number types and further columns are accepted.
    Raises ModelFileError: damaged, not a splat file, NaN or infinite values, or parameters that are not raw.
    """
    path = Path(path)
    header = read_ply_header(path)
    vertex = _vertex_of(header, path)
    rest = _check_columns(vertex, path)
    rows = _read_rows(header, vertex, path)
    columns = {name: i for i, name in enumerate(vertex.properties)}

    def take(names: list[str]) -> Rows:
        return _columns(rows, [columns[name] for name in names], vertex.properties, path)

    count = vertex.count
    means, scales, opacities = take(_MEANS), take(_SCALES), take(_OPACITY)[:, 0]
    sh_rest = take(_rest_names(rest)).reshape(count, 3, rest // 3).transpose(0, 2, 1)
    fault = space_problem(means, scales, opacities, declared=RAW_COMMENT in header.comments)
    if fault is not None:
        raise ModelFileError(fault, where=path, remedy="export it again from the program that made it, as raw values")
    return Gaussians(
        means=_tensor(means),
        quats=_tensor(take(_QUATS)),
        log_scales=_tensor(scales),
        logit_opacities=_tensor(opacities),
        sh0=_tensor(take(_SH0)),
        shN=_tensor(sh_rest),
    )


def _vertex_of(header: PlyHeader, path: Path) -> PlyElement:
    elements = {element.name: element for element in header.elements}
    vertex = elements.get("vertex")
    if vertex is None:
        raise ModelFileError(f"no vertex element, only {sorted(elements)}", where=path)
    if "packed_position" in vertex.properties:
        raise ModelFileError(
            "this is a PlayCanvas compressed PLY; a plain one is expected",
            where=path,
            remedy="convert it first, e.g. with splat-transform in.compressed.ply out.ply",
        )
    if vertex.has_list:
        raise ModelFileError("vertices with lists are not splats", where=path)
    return vertex


def _check_columns(vertex: PlyElement, path: Path) -> int:
    """The number of f_rest columns, once everything needed is there."""
    present = set(vertex.properties)
    missing = [name for name in _REQUIRED if name not in present]
    if missing == ["scale_2"]:
        raise ModelFileError("two scales a Gaussian: this is a 2D Gaussian (2DGS) model, not a 3D one", where=path)
    if missing:
        looks = (
            "a point cloud" if not present & {"opacity", "scale_0", "rot_0"} else "a splat export without all columns"
        )
        if not present & set(_SH0) and present & {"red", "r", "diffuse_red"} and "opacity" in present:
            looks = "an export with plain rgb colours"
        raise ModelFileError(f"it has no {', '.join(missing)}; it looks like {looks}", where=path)
    if "filter_3D" in present:
        raise ModelFileError(
            "it has a filter_3D column (Mip-Splatting), which changes scales and opacities",
            where=path,
            remedy="use the fused PLY that Mip-Splatting's create_fused_ply.py writes",
        )
    rest = sum(name.startswith("f_rest_") for name in present)
    if rest not in [3 * size for size in SH_REST] or not present >= set(_rest_names(rest)):
        raise ModelFileError(f"{rest} f_rest columns; 0, 9, 24, 45 or 72 are known, numbered from 0", where=path)
    return rest


def _read_rows(header: PlyHeader, vertex: PlyElement, path: Path) -> NDArray[Any]:
    """The vertices as plyfile's structured array, mapped from the file where that can be."""
    try:
        data = plyfile.PlyData.read(str(path))
        rows = cast(NDArray[Any], data["vertex"].data)
    except Exception as error:  # plyfile lets ValueError, UnicodeDecodeError, MemoryError and others through
        raise ModelFileError(f"its data cannot be read: {str(error) or type(error).__name__}", where=path) from None
    if header.format == "ascii":
        lines = sum(bool(line.strip()) for line in path.read_bytes()[header.size :].splitlines())
        promised = sum(element.count for element in header.elements)
        if lines != promised:
            raise ModelFileError(f"{lines} lines of data, the header promises {promised}", where=path)
    if len(rows) != vertex.count or list(rows.dtype.names or ()) != vertex.properties:
        raise ModelFileError("its data do not follow its header", where=path)
    return rows


def _columns(rows: NDArray[Any], indices: list[int], names: list[str], path: Path) -> Rows:
    """[N, len(indices)] float32, contiguous, finite."""
    if not indices:
        return np.empty((len(rows), 0), dtype=np.float32)
    types = {rows.dtype[i] for i in range(len(names))}
    if types == {np.dtype("=f4")} and rows.dtype.itemsize == 4 * len(names) and len(rows):
        values = rows.view("=f4").reshape(len(rows), len(names))[:, indices]
    else:
        with np.errstate(over="ignore"):  # a double too large for float32 becomes infinite and is reported below
            values = np.stack([rows[names[i]].astype(np.float32) for i in indices], axis=1)
    finite = np.isfinite(values)
    if not finite.all():
        row, column = (int(i) for i in np.argwhere(~finite)[0])
        raise ModelFileError(
            f"{int((~finite).sum())} NaN or infinite values in {names[indices[0]]}...{names[indices[-1]]}, "
            f"the first in {names[indices[column]]} of vertex {row}",
            where=path,
        )
    return values


def _rest_names(count: int) -> list[str]:
    return [f"f_rest_{i}" for i in range(count)]


def _tensor(values: Rows) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))
