"""The sparse points that Gaussians can start from: as files give them, and as training takes them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy
from numpy.typing import NDArray
from plyfile import PlyData

from splatcli.errors import SceneError
from splatcli.sizes import counted

#: Bytes of a PLY that are searched for the end of its header.
_MAX_HEADER = 1 << 20
_TYPE_SIZES = {"char": 1, "uchar": 1, "short": 2, "ushort": 2, "int": 4, "uint": 4, "float": 4, "double": 8}
_TYPE_SIZES |= {"int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "float32": 4, "float64": 8}
#: The part of the points from which on a note says that doubtful ones are left out.
NOTED_SHARE = 0.01
#: What has points with tracks, for remedies.
WITH_TRACKS = (
    "a COLMAP model as its mapper writes it, as the scene or with --points; a PLY has no tracks, and "
    "splat sfm SCENE --cameras SCENE triangulates points that have"
)


@dataclass(frozen=True, slots=True, eq=False)
class Tracks:
    """Which images see which points, as O pairs in any order.

    images: [O] int64, the numbers that the file gives them. points: [O] int64, rows of the points.
    """

    images: NDArray[np.int64]
    points: NDArray[np.int64]

    def moved(self, rows: NDArray[np.int64]) -> Tracks:
        """Return the same where row ``i`` of the points has become ``rows[i]``, -1 for one that was left out."""
        points = rows[self.points]
        kept = points >= 0
        return Tracks(self.images[kept], points[kept])

    def by_image(self, images: list[int]) -> list[NDArray[np.int64]]:
        """Return the points that each of ``images`` sees: ascending rows, each once."""
        order = np.argsort(self.images, kind="stable")
        numbers, points = self.images[order], self.points[order]
        starts, ends = np.searchsorted(numbers, images, "left"), np.searchsorted(numbers, images, "right")
        return [np.unique(points[start:end]) for start, end in zip(starts, ends, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class PointCloud:
    """Points with colours, in the frame of the scene's cameras.

    xyz: [P, 3] float32, world units, all finite.
    rgb: [P, 3] uint8.
    tracks: where they were read.
    """

    xyz: NDArray[np.float32]
    rgb: NDArray[np.uint8]
    tracks: Tracks | None = None

    def __len__(self) -> int:
        return len(self.xyz)


@dataclass(frozen=True, slots=True, eq=False)
class RawPoints:
    """Points as a file has them, in the input's frame.

    xyz: [P, 3] float64, not checked.
    rgb: [P, 3] uint8.
    file: where they come from, for messages.
    total: how many the file has; more than P when only a part was wanted.
    tracks: where they were asked for and are there.
    doubt: [P] of points that two images see, how many times the median their reprojection error is; 0 for others. None
        where that is not known.
    """

    xyz: NDArray[np.float64]
    rgb: NDArray[np.uint8]
    file: Path
    total: int
    tracks: Tracks | None = None
    doubt: NDArray[np.float64] | None = None


#: Pixels: a larger median reprojection error is no inaccuracy. COLMAP leaves out observations that are farther off.
OFF = 4.0


@dataclass(frozen=True, slots=True, eq=False)
class Reprojections:
    """Where images see some points of a scene, and where its cameras and poses put these points, as O pairs.

    observed, projected: [O, 2] float64 pixels; NaN for a point behind its camera, and where the pose is no pose.
    centers: [O, 2] principal points.
    errors: reprojection errors that the files state for these points, in pixels; of those that state one.
    points: the number of points.
    off: pixels up to which a median reprojection error is an inaccuracy.
    """

    observed: NDArray[np.float64]
    projected: NDArray[np.float64]
    centers: NDArray[np.float64]
    errors: NDArray[np.float64]
    points: int
    off: float = OFF


def doubt_of(errors: NDArray[np.float64], lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return [P], the ``doubt`` of points.

    errors: [P] mean reprojection errors; not positive where they are not known. lengths: [P] of the tracks.
    """
    known = errors > 0
    usual = float(np.median(errors[known])) if known.any() else math.inf
    with np.errstate(invalid="ignore"):  # of infinite errors nothing is known
        return np.where(known & (lengths == 2), errors / usual, 0.0)


def stride(total: int, limit: int) -> int:
    """Return the step that takes at most ``limit`` of ``total`` items, spread evenly over the file."""
    return max(1, math.ceil(total / limit))


def clean_points(
    raw: RawPoints, offset: NDArray[np.float64], *, drop_bad: bool, max_doubt: float, notes: list[str]
) -> PointCloud | None:
    """Return the points as training takes them; None when none is left.

    offset: [3] the position in the input's frame that becomes the origin; subtracted in float64.
    drop_bad: leave out points that are NaN, infinite or beyond float32, which otherwise raise SceneError.
    max_doubt: leave out points whose ``doubt`` is larger; 0 leaves out none.
    """
    if len(raw.xyz) < raw.total:
        notes.append(f"{len(raw.xyz):,} of {raw.total:,} points are taken, spread over the file (data.max_points)")
    xyz, rgb, tracks = raw.xyz, raw.rgb, raw.tracks
    with np.errstate(over="ignore", invalid="ignore"):
        single = np.ascontiguousarray(xyz - offset, dtype=np.float32)
    good = np.isfinite(single).all(axis=1)
    if not good.all():
        bad = np.flatnonzero(~good)
        if not drop_bad:
            raise SceneError(
                f"{len(bad):,} of {len(xyz):,} points have coordinates that are not finite, the first is number "
                f"{bad[0]}: {xyz[bad[0]].tolist()}",
                where=raw.file,
                remedy="repair the reconstruction; splat train --drop-bad-points goes on without them",
            )
        notes.append(f"{len(bad):,} of {len(xyz):,} points were not finite and are left out")
    if max_doubt > 0 and raw.doubt is not None and (doubtful := good & (raw.doubt > max_doubt)).any():
        count = int(np.count_nonzero(doubtful))
        if count >= NOTED_SHARE * len(xyz):
            doubted = counted(count, "point is", "points are")
            notes.append(
                f"{doubted} left out that two images see with over {max_doubt:g} times the median reprojection error"
            )
        good = good & ~doubtful
    if not good.all():
        single, rgb = single[good], rgb[good]
        tracks = None if tracks is None else tracks.moved(np.where(good, np.cumsum(good) - 1, -1))
    return PointCloud(single, np.ascontiguousarray(rgb, dtype=np.uint8), tracks) if len(single) else None


def read_points_ply(path: Path, limit: int) -> RawPoints:
    """Read the vertices of a PLY file: x y z, and a colour under any of _COLOURS or of _SH0; grey without one.

    limit: at most so many, spread evenly over the file.
    Raises SceneError when the file is missing, damaged, shorter than its header says, or has no coordinates.
    """
    try:
        _check_size(path)
        vertex = PlyData.read(str(path))["vertex"].data
    except SceneError:
        raise
    except OSError as error:
        raise SceneError(f"cannot read the points: {error.strerror}", where=path, remedy=_PLY_REMEDY) from None
    except Exception as error:  # plyfile lets ValueError, OverflowError, UnicodeDecodeError and others through
        reason = str(error) or type(error).__name__
        raise SceneError(f"not a PLY point cloud that can be read: {reason}", where=path, remedy=_PLY_REMEDY) from None
    names = vertex.dtype.names or ()
    if not {"x", "y", "z"} <= set(names):
        raise SceneError(f"has no x, y and z; it has {', '.join(names)}", where=path, remedy=_PLY_REMEDY)
    lists = [name for name in names if vertex.dtype[name].kind == "O"]
    if lists:
        raise SceneError(f"its vertices have lists ({', '.join(lists)})", where=path, remedy=_PLY_REMEDY)
    total = len(vertex)
    vertex = vertex[:: stride(total, limit)]
    with np.errstate(all="ignore"):  # clean_points reports what is not finite
        xyz = np.stack([vertex[axis].astype(np.float64) for axis in "xyz"], axis=1)
        rgb = np.full((len(xyz), 3), 128, dtype=np.uint8)
        channels = next((found for found in _COLOURS if set(found) <= set(names)), None)
        if channels is not None:
            rgb = _bytes(np.stack([vertex[name] for name in channels], axis=1))
        elif set(_SH0) <= set(names):
            from splatcli.gaussians import SH_C0  # loads torch

            sh0 = np.stack([vertex[name].astype(np.float64) for name in _SH0], axis=1)
            rgb = np.clip(np.round(255 * np.nan_to_num(0.5 + SH_C0 * sh0)), 0, 255).astype(np.uint8)
    return RawPoints(xyz, rgb, path, total)


#: Names of colours in PLY files, the usual ones first.
_COLOURS = (("red", "green", "blue"), ("r", "g", "b"), ("diffuse_red", "diffuse_green", "diffuse_blue"))
#: Constant spherical harmonics in PLY files of Gaussians.
_SH0 = ("f_dc_0", "f_dc_1", "f_dc_2")
#: Floating-point colours whose largest value is above this are 0..255; some in 0..1 exceed 1 a little.
_LARGEST_UNIT = 2.0


def _bytes(channels: NDArray[np.generic]) -> NDArray[np.uint8]:
    """Return [P, 3] colours as bytes: integers above 255 are of 16 bits; floats are 0..1, or 0..255 if any is large."""
    if channels.dtype == np.uint8:
        return channels.astype(np.uint8)
    values = channels.astype(np.float64)
    largest = values.max(initial=0.0, where=np.isfinite(values))
    scale = 1.0
    if channels.dtype.kind == "f":
        scale = 1.0 if largest > _LARGEST_UNIT else 255.0
    elif largest > 255:
        scale = 1 / 257
    return np.clip(np.round(np.nan_to_num(values) * scale), 0, 255).astype(np.uint8)


_PLY_REMEDY = "write the points again as PLY with x y z red green blue, or drop ply_file_path from the scene file"


def _check_size(path: Path) -> None:
    """Raise SceneError for a PLY file shorter than its header claims: plyfile allocates the claim before it reads."""
    with path.open("rb") as file:
        head = file.read(_MAX_HEADER)
    end = re.search(rb"end_header\r?\n", head)
    if not head.startswith(b"ply") or end is None:
        raise SceneError("not a PLY file: no header", where=path, remedy=_PLY_REMEDY)
    lines = head[: end.start()].decode("ascii", "replace").split("\n")
    binary = not any(line.startswith("format ascii") for line in lines)
    need = count = 0
    for line in lines:
        fields = line.split()
        if fields[:1] == ["element"] and len(fields) == 3:
            count = int(fields[2])
            if count < 0:
                raise SceneError(f"claims {count} {fields[1]}s", where=path, remedy=_PLY_REMEDY)
        elif fields[:1] == ["property"] and len(fields) >= 3:
            kind = fields[2] if fields[1] == "list" else fields[1]
            need += count * (_TYPE_SIZES.get(kind, 1) if binary else 2)
    left = path.stat().st_size - end.end()
    # The last number of an ASCII file may come without its line end.
    if need > left + (0 if binary else 1):
        raise SceneError(
            f"its header claims at least {need:,} bytes of data, the file has {left:,}", where=path, remedy=_PLY_REMEDY
        )


def nearest_points(positions: NDArray[np.float64], points: NDArray[np.floating], which: int = 1) -> NDArray[np.float64]:
    """Return [C], the distance from ``positions`` [C, 3] to the nearest of ``points`` [P, 3], or the ``which``-th.

    There must be at least ``which`` points.
    """
    # Cameras are far from points: without boxes drawn tight around them a tree answers a hundred times as fast.
    tree = scipy.spatial.cKDTree(points.astype(np.float64), balanced_tree=False, compact_nodes=False)
    distances: NDArray[np.float64] = tree.query(positions, k=[which])[0][:, 0]
    return distances


#: Cells along an axis: 2**21 three times fit into 63 bits.
_BITS = 21


def morton_order(means: NDArray[np.floating]) -> NDArray[np.int64]:
    """Return [N], the order of positions [N, 3] along a Z curve through their bounds."""
    if not len(means):
        return np.zeros(0, np.int64)
    low = means.min(axis=0).astype(np.float64)
    extent = means.max(axis=0) - low
    cells = (means - low) / np.where(extent > 0, extent, 1.0) * (2**_BITS - 1)
    code = np.zeros(len(means), np.uint64)
    for axis in range(3):
        code |= _spread(cells[:, axis].astype(np.uint64)) << np.uint64(axis)
    return np.argsort(code, kind="stable")


def _spread(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Move each of the 21 lowest bits to three times its place."""
    for shift, mask in (
        (32, 0x001F00000000FFFF),
        (16, 0x001F0000FF0000FF),
        (8, 0x100F00F00F00F00F),
        (4, 0x10C30C30C30C30C3),
        (2, 0x1249249249249249),
    ):
        bits = (bits | bits << np.uint64(shift)) & np.uint64(mask)
    return bits
