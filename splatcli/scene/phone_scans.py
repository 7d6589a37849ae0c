"""Folders of phone apps that track the camera while they take images: Polycam and Record3D (ARKit's poses)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splatcli.config import DataConfig
from splatcli.errors import SceneError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.find_images import SUFFIXES, is_file
from splatcli.scene.foreign_lenses import colmap_camera
from splatcli.scene.parsing import load_json, viewmat_of, with_suffix
from splatcli.scene.source import Entry, FixedLens, Problems, Reader, SceneSource, View
from splatcli.sizes import counted

POLYCAM_FILES = "keyframes/ of Polycam"
RECORD3D_FILES = "metadata.json with poses of Record3D"
#: Polycam's folders of cameras and images, the better ones first: those that it has optimised.
_KEYFRAMES = (("corrected_cameras", "corrected_images"), ("cameras", "images"))
#: Metres that 1 in a depth map of Polycam is.
_MILLIMETRES = 0.001
_POLYCAM_EXPORT = "export the raw data again (Polycam: developer mode, then Export, Raw Data)"
_RECORD3D_EXPORT = "export the recording again, with RGB images (Record3D: Export, EXR + RGB)"
_LENS = ("fx", "fy", "cx", "cy", "width", "height")


def read_polycam(root: Path, data: DataConfig, problems: Problems) -> SceneSource:
    """Read the keyframes, optimised where Polycam did so, in ARKit's metres with y up; their depth maps too."""
    keyframes = root / "keyframes"
    cameras, images = _keyframes(keyframes)
    views = []
    for file in with_suffix(keyframes / cameras, ".json"):
        with problems.collect():
            views.append(_keyframe(file, keyframes / images))
    source = SceneSource(root, keyframes / cameras, views, [keyframes / images], tolerant=True)
    if any(view.depth for view in views):
        source.depth_scale = _MILLIMETRES
    if cameras == "cameras":
        source.notes.append(
            "Polycam has not optimised these poses, nor undistorted the images: keyframes/corrected_cameras/ and "
            "corrected_images/ are not there"
        )
    return source


def _keyframes(keyframes: Path) -> tuple[str, str]:
    for cameras, images in _KEYFRAMES:
        if (
            (keyframes / cameras).is_dir()
            and (keyframes / images).is_dir()
            and with_suffix(keyframes / cameras, ".json")
        ):
            return cameras, images
    raise SceneError("has no cameras with images", where=keyframes, remedy=_POLYCAM_EXPORT)


def _keyframe(file: Path, images: Path) -> View:
    document = load_json(file, dict, _POLYCAM_EXPORT)
    whole, entry = Entry(file, remedy=_POLYCAM_EXPORT), Entry(file, f"keyframe {file.stem}")
    keys = [f"t_{row}{column}" for row in range(3) for column in range(4)]
    c2w = np.array(whole.numbers([document.get(key) for key in keys], 12, "t_00 to t_23")).reshape(3, 4)
    *params, width, height = whole.numbers([document.get(key) for key in _LENS], 6, ", ".join(_LENS))
    lens = FixedLens(file, entry.label, colmap_camera("PINHOLE", round(width), round(height), params, entry))
    name = next((f"{file.stem}{suffix}" for suffix in SUFFIXES if is_file(images / f"{file.stem}{suffix}")), None)
    depth = images.parent / "depth" / f"{file.stem}.png"
    return View(
        name or f"{file.stem}.jpg",
        lens,
        viewmat_of(c2w[:, :3], c2w[:, 3], entry, opengl=True),
        entry.label,
        depth=f"keyframes/depth/{file.stem}.png" if is_file(depth) else None,
    )


def read_record3d(root: Path, data: DataConfig, problems: Problems) -> SceneSource:
    """Read the frames of a recording in ARKit's metres with y up; the images are numbered as the poses are."""
    file = _metadata(root)
    assert file is not None
    whole, document = Entry(file, remedy=_RECORD3D_EXPORT), load_json(file, dict, _RECORD3D_EXPORT)
    poses = document.get("poses")
    if not isinstance(poses, list) or not poses:
        raise whole.error("has no list 'poses'")
    folder, names = _numbered(root, whole, len(poses))
    width, height = whole.numbers([document.get("w"), document.get("h")], 2, "w and h")
    shared, own = _intrinsics(document, whole), document.get("perFrameIntrinsicCoeffs")
    views = []
    for i, pose in enumerate(poses):
        with problems.collect():
            entry = whole.named(f"frame {i}")
            values = shared
            if isinstance(own, list) and i < len(own):
                values = whole.numbers(own[i], 4, f"perFrameIntrinsicCoeffs[{i}]")
            lens = FixedLens(file, entry.label, colmap_camera("PINHOLE", round(width), round(height), values, entry))
            numbers = np.array(whole.numbers(pose, 7, f"poses[{i}]"))
            viewmat = viewmat_of(_rotation(numbers[:4], entry), numbers[4:], entry, opengl=True)
            views.append(View(names.get(i, f"{i}.jpg"), lens, viewmat, entry.label))
    source = SceneSource(root, file, views, [folder], tolerant=True)
    if (count := sum(number >= len(poses) for number in names)) > 0:
        what = "of the recording without a pose"
        source.notes.append(counted(count, f"image {what} is left out", f"images {what} are left out"))
    return source


def _numbered(root: Path, whole: Entry, count: int) -> tuple[Path, dict[int, str]]:
    """Return the folder of the images, and their names by the number of their pose, of ``count``."""
    for name in ("rgb", "rgbd"):
        folder = root / name
        if folder.is_dir():
            found = [path.name for suffix in SUFFIXES for path in with_suffix(folder, suffix) if path.stem.isdecimal()]
            if found:
                names = {int(Path(image).stem): image for image in found}
                # Copies of the images may be counted from 1.
                first = int(names.keys() == {*range(1, count + 1)})
                return folder, {number - first: image for number, image in names.items()}
    raise whole.error("has no numbered images in rgb/ or rgbd/ beside it")


def _intrinsics(document: dict[str, Any], whole: Entry) -> list[float]:
    """Return fx, fy, cx, cy of K, whose columns follow one another; its rows do in files that were written again."""
    k = whole.numbers(document.get("K"), 9, "K")
    return [k[0], k[4], k[2], k[5]] if not any(k[6:8]) else [k[0], k[4], k[6], k[7]]


def _rotation(quaternion: NDArray[np.float64], entry: Entry) -> NDArray[np.float64]:
    """Return [3, 3], the rotation of a quaternion x, y, z, w. Raises SceneError unless its length is about 1."""
    with np.errstate(over="ignore"):
        length = float(np.linalg.norm(quaternion))
    if not abs(length - 1) < 0.01:
        raise entry.error(f"the quaternion of its pose is {length:.3g} long, expected 1")
    return np.asarray(pycolmap.Rotation3d(quaternion / length).matrix())


def _is_polycam(root: Path) -> bool:
    return any((root / "keyframes" / cameras).is_dir() for cameras, _ in _KEYFRAMES)


def _is_record3d(root: Path) -> bool:
    return _metadata(root) is not None and any((root / name).is_dir() for name in ("rgb", "rgbd"))


def _metadata(root: Path) -> Path | None:
    """Return the file of poses of an export, or of an unpacked recording (.r3d)."""
    return next((root / name for name in ("metadata.json", "metadata") if is_file(root / name)), None)


POLYCAM = Reader("polycam", POLYCAM_FILES, _is_polycam, read_polycam)
RECORD3D = Reader("record3d", RECORD3D_FILES, _is_record3d, read_record3d)
