"""Parts of the readers of other programs' cameras: poses with OpenGL axes, names of images, points beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from splatcli.errors import SceneError
from splatcli.scene.find_images import SUFFIXES, is_file
from splatcli.scene.points import RawPoints, read_points_ply
from splatcli.scene.source import rigid_pose

#: OpenGL camera axes (x right, y up, z back) to OpenCV's (x right, y down, z forward).
_FLIP = np.array([1.0, -1.0, -1.0])
#: Larger files are refused, as transforms.json is.
MAX_BYTES = 128 << 20
#: Stems of point clouds beside a file of cameras, after that file's own.
_POINTS = ("points", "sparse", "sparse_pc", "points3D", "tie_points", "pointcloud")


def viewmat_of(
    rotation: NDArray[np.float64], center: NDArray[np.float64], where: object, label: str, *, opengl: bool
) -> NDArray[np.float64]:
    """[4, 4] world to camera with OpenCV axes, of camera to world [3, 3] and a position [3]. Raises SceneError."""
    pose = rigid_pose(rotation * _FLIP if opengl else rotation, center, where, label)
    viewmat = np.eye(4)
    viewmat[:3, :3] = pose[:3, :3].T
    viewmat[:3, 3] = -pose[:3, :3].T @ center
    return viewmat


def image_name(label: str, folders: Sequence[Path]) -> str:
    """The image that a program calls ``label``: without the folders of another machine, with the ending it has here."""
    name = PurePosixPath(label.replace("\\", "/")).name
    if PurePosixPath(name).suffix.lower() in SUFFIXES or not name:
        return name or label
    for folder in folders:
        for suffix in SUFFIXES:
            for ending in (suffix, suffix.upper()):
                if is_file(folder / f"{name}{ending}"):
                    return f"{name}{ending}"
    return f"{name}{SUFFIXES[0]}"


def points_beside(file: Path, limit: int) -> RawPoints | None:
    """The point cloud beside a file of cameras: ``<its stem>.ply``, else points.ply, sparse.ply and the like."""
    for stem in (file.stem, *_POINTS):
        path = file.with_name(f"{stem}.ply")
        if is_file(path):
            points = read_points_ply(path, limit)
            return points if points.total else None
    return None


def only_one(files: list[Path], what: str) -> Path:
    """The file that describes a scene. Raises SceneError for several."""
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise SceneError(
            f"has several files of {what}: {names}", where=files[0].parent, remedy="keep one of them in the folder"
        )
    return files[0]


def check_size(file: Path) -> None:
    """Raises SceneError for a file that is too large to be a list of cameras."""
    size = file.stat().st_size
    if size > MAX_BYTES:
        raise SceneError(
            f"is {size >> 20} MB large, more than {MAX_BYTES >> 20} MB",
            where=file,
            remedy="export the cameras alone, without points",
        )


def head(file: Path, count: int = 4096) -> bytes:
    """The first bytes of a file."""
    with file.open("rb") as stream:
        return stream.read(count)


def with_suffix(root: Path, suffix: str) -> list[Path]:
    """The files of a folder with an ending, in the order of their names."""
    return sorted(path for path in root.iterdir() if path.suffix.lower() == suffix and path.is_file())
