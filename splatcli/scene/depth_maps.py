"""Depth maps: files that say how deep the pixels of an image lie. Found, checked by their headers, and read.

A map holds camera-space z (not the length of the ray) of its image's pixels as they are stored, at any resolution of
the same shape; what is 0, negative, NaN or infinite is not known. A relative map holds depth or inverse depth up to a
scale and a shift, which relative_depths.py fits; there only NaN and infinity are not known.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from splatcli.config import DataConfig
from splatcli.errors import SceneError
from splatcli.scene.camera import Camera
from splatcli.scene.decode import apply_orientation, decode_numbers, nearest, read_header, same_shape
from splatcli.scene.find_images import SHOWN, ambiguous_error, is_file, walk
from splatcli.scene.source import Problems, SceneSource, View
from splatcli.sizes import counted, listed

if TYPE_CHECKING:
    from torch import Tensor

#: The value of ``data.depths`` that names no folder.
AUTO = "auto"
#: Endings of maps, the likeliest first.
SUFFIXES = (".npy", ".npz", ".png", ".tif", ".tiff")
#: Scene units that 1 of a whole number is: millimetres where the scene is in metres, as in nerfstudio.
INTEGER_UNIT = 1e-3
#: INRIA's file of scales and shifts, in the folder of a COLMAP model: the maps of a scene that has it are relative.
PARAMS_FILE = "depth_params.json"
#: Pillow's modes of one channel with 16 bits or more, and those of relative maps: networks write gray as RGB, too.
_MODES = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")
_RELATIVE_MODES = (*_MODES, "L", "RGB")
_NPY_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}

_FORMATS = (
    "save it as a PNG or TIFF of 16 bits, or as .npy or .npz with 16 bits or more, one number a pixel; gray pictures "
    "of 8 bits are read as relative depths: --depth-type relative"
)
_GRAY = "save the map itself, in gray, as PNG, TIFF, .npy or .npz"
_DAMAGED = "write the map again, or train without it"


@dataclass(frozen=True, slots=True)
class RelativeFit:
    """How the numbers of a relative map become depths.

    inverse: scale * number + shift is inverse depth, otherwise depth.
    limit: inverse depths below it, or depths above it, are beyond what the fit has seen, and not known.
    """

    inverse: bool
    scale: float
    shift: float
    limit: float

    def __call__(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return depths of any shape in scene units, 0 where nothing is known."""
        fitted = values * np.float32(self.scale) + np.float32(self.shift)
        with np.errstate(divide="ignore", invalid="ignore"):
            if self.inverse:
                return np.where(fitted >= self.limit, 1 / fitted, np.float32(0.0))
            return np.where((fitted > 0.0) & (fitted <= self.limit), fitted, np.float32(0.0))


@dataclass(frozen=True, slots=True)
class DepthFile:
    """A map on disk.

    scale: scene units that 1 in the file is; None takes INTEGER_UNIT for whole numbers and 1 for others.
    orientation: EXIF's, to be applied.
    relative: depth or inverse depth up to a scale and a shift, which are ``fit`` once they are known.
    """

    path: Path
    scale: float | None = None
    orientation: int = 1
    relative: bool = False
    fit: RelativeFit | None = None


def wants_relative(model: Path, data: DataConfig) -> bool:
    """Return whether depth maps are relative: as asked, else where depth_params.json is in the folder ``model``."""
    if data.depths is None or data.depth_type is not None:
        return data.depths is not None and data.depth_type == "relative"
    return data.depths != AUTO and (model / PARAMS_FILE).is_file()


def find_depth_maps(
    source: SceneSource, data: DataConfig, problems: Problems, *, relative: bool
) -> dict[str, DepthFile]:
    """Find the depth map of each view, by name; none where none is asked for, or the scene names none.

    relative: the maps know depth up to a scale and a shift. Maps that are missing are added to ``problems``, or with
    ``data.skip_missing`` reported.
    """
    views, named = source.views, [view for view in source.views if view.depth is not None]
    if data.depths is None:
        if named:
            having = counted(len(named), "image has a depth map", "images have depth maps")
            source.notes.append(f"{having}, which splat train --depth-loss uses")
        return {}
    if data.depths == AUTO:
        where = source.file
        maps, missing = _named(source, named)
    else:
        where = source.root / data.depths
        maps, missing = _in_folder(where, views, problems)
        if missing and not maps:
            endings = ", ".join(SUFFIXES)
            raise SceneError(
                f"no image has a depth map in this folder: looked for {views[0].name} with the ending {endings} beside "
                "or in place of its own",
                where=where,
                remedy="name the maps after their images, as PNG, TIFF, .npy or .npz",
            )
    if missing and not (data.skip_missing and maps):
        problems.add(
            SceneError(
                f"{len(missing)} of {len(missing) + len(maps)} depth maps are missing: {listed(missing, SHOWN)}",
                where=where,
                remedy="put them back; splat train --skip-missing goes on without them",
            )
        )
    if maps:
        source.notes.append(f"{len(maps)} of {len(views)} images have depth maps")
    scale = data.depth_scale or source.depth_scale
    return {name: DepthFile(path, scale, relative=relative) for name, path in maps.items()}


def check_depth_map(
    file: DepthFile, image: Path, stored: tuple[int, int], orientation: int, max_pixels: int
) -> DepthFile:
    """Return the map with the orientation to apply, that of its image unless it is upright already, by its header only.

    stored: the image's size in its file. Raises SceneError when the map cannot be read or has another shape.
    """
    size = _size(file, max_pixels)
    for wanted, turn in ((stored, orientation), (stored[::-1] if orientation >= 5 else stored, 1)):
        if same_shape(size, wanted):
            return replace(file, orientation=turn)
    raise SceneError(
        f"the depth map is {size[0]}x{size[1]} pixels, its image {image.name} {stored[0]}x{stored[1]}: not the same "
        "shape",
        where=file.path,
        remedy="make the map of the whole image, at any resolution",
    )


def read_depth_map(file: DepthFile) -> NDArray[np.float32]:
    """Return [H, W], z in scene units, 0 where unknown; of a relative map without a fit the numbers as they are.

    Raises SceneError when it is damaged, or holds no depth.
    """
    path = file.path
    values = _numbers(file)
    if file.relative:
        relative: NDArray[np.float32] = values.astype(np.float32)
        return relative if file.fit is None else file.fit(relative)
    scale = file.scale or (INTEGER_UNIT if values.dtype.kind in "iu" else 1.0)
    with np.errstate(over="ignore", invalid="ignore"):
        depths: NDArray[np.float32] = np.multiply(values, np.float32(scale), dtype=np.float32, casting="unsafe")
        known = (depths > 0.0) & np.isfinite(depths)
    if not known.any() and (values < 0).any():
        raise SceneError(
            f"all depths are 0 or negative, down to {np.nanmin(values):g}",
            where=path,
            remedy="write how far ahead of the camera things are: z, positive",
        )
    depths[~known] = 0.0
    return depths


def _numbers(file: DepthFile) -> NDArray[Any]:
    """Return [H, W], the numbers in the file, upright. Raises SceneError when it is damaged, or coloured."""
    path = file.path
    if path.suffix.lower() in (".npy", ".npz"):
        with _array(path) as (stream, shape, dtype, fortran):
            data = stream.read(prod(shape) * dtype.itemsize)
        if len(data) < prod(shape) * dtype.itemsize:
            raise SceneError("ends in the middle of its numbers", where=path, remedy=_DAMAGED)
        return apply_orientation(
            np.frombuffer(data, dtype).reshape(shape[:2], order="F" if fortran else "C"), file.orientation
        )
    values = decode_numbers(path, file.orientation)
    if values.ndim == 3:
        if (values != values[..., :1]).any():
            raise SceneError("is a coloured picture, whose colours are no depths", where=path, remedy=_GRAY)
        values = values[..., 0]
    return values


def reduce_depths(depths: NDArray[np.float32], size: tuple[int, int]) -> NDArray[np.float32]:
    """Return depths at another width and height, none of them mixed."""
    return np.ascontiguousarray(nearest(depths, size))


def resample_depths(depths: NDArray[np.float32], grid: Tensor) -> NDArray[np.float32]:
    """Return depths [h, w] seen through a lens's sampling grid [1, H, W, 2], none of them mixed; 0 beyond the image."""
    height, width = depths.shape
    unit = 0.5 * (grid[0].numpy() + 1.0)
    x, y = np.floor(unit[..., 0] * width), np.floor(unit[..., 1] * height)
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    rows, columns = (np.where(inside, at, 0.0).astype(np.int32) for at in (y, x))
    return np.asarray(np.where(inside, depths[rows, columns], 0.0), dtype=np.float32)


def _named(source: SceneSource, views: list[View]) -> tuple[dict[str, Path], list[str]]:
    """Return the maps that the scene's own file names, and those of them that are not there."""
    maps = {view.name: source.root / str(view.depth) for view in views}
    missing = [str(view.depth) for view in views if not is_file(maps[view.name])]
    return {name: path for name, path in maps.items() if is_file(path)}, missing


def _in_folder(folder: Path, views: list[View], problems: Problems) -> tuple[dict[str, Path], list[str]]:
    """Find maps by the image's name (a.jpg.npy), or by its stem (a.npy); return them and the images without one."""
    if not folder.is_dir():
        raise SceneError(
            "the folder of depth maps is not there", where=folder, remedy="--depths names a folder inside the scene"
        )
    there = {
        Path(base, file).relative_to(folder).as_posix()
        for base, _, files in walk(folder)
        for file in files
        if file.lower().endswith(SUFFIXES)
    }
    maps: dict[str, Path] = {}
    missing = []
    for view in views:
        stems = dict.fromkeys((view.name, str(PurePosixPath(view.name).with_suffix(""))))
        candidates = [f"{stem}{suffix}" for stem in stems for suffix in SUFFIXES if f"{stem}{suffix}" in there]
        if len(candidates) > 1:
            problems.add(ambiguous_error(folder, view.name, candidates))
        elif candidates:
            maps[view.name] = folder / candidates[0]
        else:
            missing.append(view.name)
    return maps, missing


def _size(file: DepthFile, max_pixels: int) -> tuple[int, int]:
    """Return width and height, from the header. Raises SceneError for what cannot be a map."""
    path = file.path
    if path.suffix.lower() in (".npy", ".npz"):
        with _array(path) as (_, shape, _, _):
            if shape[0] * shape[1] > max_pixels:
                what = f"is {shape[1]}x{shape[0]}; at most {max_pixels / 1e6:,.0f} million pixels are read"
                raise SceneError(f"{what} (--max-pixels)", where=path, remedy="write a smaller map")
            return shape[1], shape[0]
    header = read_header(path, max_pixels)
    if header.mode not in (_RELATIVE_MODES if file.relative else _MODES):
        remedy = f"{_GRAY}, without transparency" if file.relative else _FORMATS
        raise SceneError(f"holds a picture ({header.mode}), no depths", where=path, remedy=remedy)
    return header.width, header.height


@contextmanager
def _array(path: Path) -> Iterator[tuple[IO[bytes], tuple[int, ...], np.dtype[Any], bool]]:
    """Open a .npy, or the only array of a .npz, at its first number; with shape, type and order.

    The file holds all that its header claims, so that no more memory is allocated than the file is large.
    """
    try:
        with _opened(path) as (stream, size):
            version = npy.read_magic(stream)
            if version not in _NPY_HEADERS:
                raise ValueError(f"version {version} of the format")
            shape, fortran, dtype = _NPY_HEADERS[version](stream)
            if len(shape) == 3 and shape[2] == 1:
                shape = shape[:2]
            if len(shape) != 2 or not all(shape) or dtype.kind not in "iuf" or dtype.itemsize < 2:
                what = f"holds numbers of type {dtype} and shape {shape}, expected [height, width]"
                raise SceneError(f"{what} of 16 bits or more", where=path, remedy=_FORMATS)
            if (need := prod(shape) * dtype.itemsize) > size - stream.tell():
                what = f"its header claims {need:,} bytes of numbers, the file has {max(0, size - stream.tell()):,}"
                raise SceneError(what, where=path, remedy=_DAMAGED)
            yield stream, shape, dtype, fortran
    except (SceneError, MemoryError):
        raise
    except OSError as error:
        raise SceneError(f"cannot be read: {error.strerror or error}", where=path, remedy=_DAMAGED) from None
    except Exception as error:  # zipfile, zlib and numpy raise many kinds at damaged bytes
        raise SceneError(
            f"is no {path.suffix} that can be read: {str(error) or type(error).__name__}", where=path, remedy=_DAMAGED
        ) from None


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], int]]:
    """Open the stream of an array; with the number of its bytes."""
    if path.suffix.lower() == ".npy":
        with path.open("rb") as file:
            yield file, path.stat().st_size
        return
    with zipfile.ZipFile(path) as archive:
        members = [info for info in archive.infolist() if info.filename.endswith(".npy")]
        named = [info for info in members if info.filename == "depth.npy"]
        if len(members) != 1 and not named:
            names = ", ".join(info.filename.removesuffix(".npy") for info in members[:SHOWN])
            raise SceneError(
                f"holds {len(members)} arrays ({names})",
                where=path,
                remedy="keep one array in it, or call that of the depths 'depth'",
            )
        member = (named or members)[0]
        with archive.open(member) as stream:
            yield stream, member.file_size


@dataclass(frozen=True, slots=True, eq=False)
class KnownDepths:
    """Depths of S pixels of a view.

    pixels: [S] int64, y * width + x, ascending, each once.
    depths: [S] float64, camera-space z in world units, all positive.
    """

    pixels: NDArray[np.int64]
    depths: NDArray[np.float64]

    def without(self, masked: NDArray[np.bool_]) -> KnownDepths:
        """Return the depths of the pixels that are not masked; masked [H, W]."""
        kept = ~masked.reshape(-1)[self.pixels]
        return KnownDepths(self.pixels[kept], self.depths[kept])


def depths_of_points(camera: Camera, xyz: NDArray[np.float32]) -> KnownDepths:
    """Return the depths of points [P, 3] at the pixels that they fall on: of several points at one, the nearest.

    Points before the near plane are left out: no Gaussian is rendered there.
    """
    x, y, z = camera.project(xyz)
    inside = (z > camera.near) & (x >= 0) & (x < camera.width) & (y >= 0) & (y < camera.height)
    pixels = y[inside].astype(np.int64) * camera.width + x[inside].astype(np.int64)
    depths = z[inside]
    pixels, first = np.unique(pixels[order := np.argsort(depths, kind="stable")], return_index=True)
    return KnownDepths(pixels, depths[order][first])


def depths_of_map(depths: NDArray[np.float32]) -> KnownDepths:
    """Return the known depths of a map [H, W], 0 where none is known."""
    pixels = np.flatnonzero(depths)
    return KnownDepths(pixels, depths.reshape(-1)[pixels].astype(np.float64))
