"""Scenes in transforms.json: nerfstudio, instant-ngp, and Blender's transforms_train.json."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splatcli.errors import SceneError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.decode import SUFFIXES
from splatcli.scene.points import PointCloud, read_points_ply
from splatcli.scene.source import SceneSource, View, inside, rigid

#: Larger scene files are refused: 100,000 frames take about 60 MB.
MAX_BYTES = 512 << 20
#: Pixels along the side of a photo; no camera comes near.
MAX_SIDE = 1 << 24

#: Brown's coefficients in OpenCV's order.
_BROWN = ("k1", "k2", "p1", "p2", "k3")
#: camera_model of the file -> (pycolmap model, names of its first coefficients in order; the others are zero).
_MODELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "PINHOLE": ("PINHOLE", ()),
    "SIMPLE_PINHOLE": ("PINHOLE", ()),
    "SIMPLE_RADIAL": ("FULL_OPENCV", _BROWN),
    "RADIAL": ("FULL_OPENCV", _BROWN),
    "OPENCV": ("FULL_OPENCV", _BROWN),
    "FULL_OPENCV": ("FULL_OPENCV", (*_BROWN, "k4", "k5", "k6")),
    "OPENCV_FISHEYE": ("OPENCV_FISHEYE", ("k1", "k2", "k3", "k4")),
}
_COEFFICIENTS = ("k1", "k2", "k3", "k4", "k5", "k6", "p1", "p2")
_INTRINSICS = ("fl_x", "fl_y", "cx", "cy", "w", "h", "camera_angle_x", "camera_angle_y", *_COEFFICIENTS)

#: OpenGL camera axes (x right, y up, z back) to OpenCV's (x right, y down, z forward).
_FLIP = np.array([1.0, -1.0, -1.0])


@dataclass(frozen=True, slots=True)
class _Lens:
    """Intrinsics as a file gives them; what is absent follows from the photo's size."""

    file: Path
    label: str
    model: str
    values: tuple[tuple[str, float], ...]

    def __call__(self, width: int, height: int) -> pycolmap.Camera:
        return _make_lens(self.model, self.values, width, height, self.file, self.label)


def read_nerfstudio(root: Path) -> SceneSource:
    """``transforms.json``: intrinsics per frame or global (the frame wins), distortion, points, named splits.

    Frames whose photo is missing are left out when most have one, as the field's readers do: instant-ngp's own fox
    scene lists 17 photos that it does not ship.
    """
    file = root / "transforms.json"
    document = _load(file)
    frames = _frames(document, file)
    views = [_view(frame, i, document, root, file) for i, frame in enumerate(frames)]
    folder, views = _common_folder(root, views)
    source = SceneSource(
        root=root,
        kind="nerfstudio",
        file=file,
        views=views,
        image_folders=[root / folder],
        points=_points(document, root, file),
        tolerant=True,
        resized_folders=folder != "",
    )
    train = _listed(document, "train_filenames", root, folder, file)
    test = _listed(document, "test_filenames", root, folder, file)
    if test is None:
        test = _listed(document, "val_filenames", root, folder, file)
    if test is None and train is not None:
        test = {view.name for view in views} - train
    source.train, source.test = train, test
    return source


def read_blender(root: Path) -> SceneSource:
    """``transforms_train.json`` with ``transforms_test.json`` as the held-out views; no points."""
    train_file, test_file = root / "transforms_train.json", root / "transforms_test.json"
    document = _load(train_file)
    train = [_view(frame, i, document, root, train_file) for i, frame in enumerate(_frames(document, train_file))]
    source = SceneSource(root, "blender", train_file, train, [root], resized_folders=False)
    if test_file.is_file():
        document = _load(test_file)
        test = [_view(frame, i, document, root, test_file) for i, frame in enumerate(_frames(document, test_file))]
        source.views = train + test
        source.train, source.test = {view.name for view in train}, {view.name for view in test}
    else:
        source.notes.append("transforms_test.json is missing: views are held out of transforms_train.json")
    return source


def _load(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > MAX_BYTES:
            raise SceneError(
                f"is {file.stat().st_size >> 20} MB large, more than {MAX_BYTES >> 20} MB",
                where=file,
                remedy="leave only camera poses in it",
            )
        document = json.loads(file.read_text(encoding="utf-8-sig"), parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise SceneError(
            f"not valid JSON: {error.msg}", where=f"{file}:{error.lineno}:{error.colno}", remedy="correct the file"
        ) from None
    except UnicodeDecodeError as error:
        raise SceneError(f"not UTF-8 text: {error}", where=file, remedy="write it again as UTF-8") from None
    except _ConstantError as error:
        raise SceneError(f"has the number {error}", where=file, remedy="correct or remove that frame") from None
    except ValueError as error:  # a whole number with thousands of digits
        raise SceneError(f"has a number that cannot be right: {error}", where=file, remedy="correct the file") from None
    except RecursionError:
        raise SceneError("is nested too deeply", where=file, remedy="write it again") from None
    except OSError as error:
        raise SceneError(f"cannot be read: {error.strerror}", where=file) from None
    if not isinstance(document, dict):
        raise SceneError("holds no JSON object", where=file, remedy="it should start with { and have 'frames'")
    return document


class _ConstantError(ValueError):
    """NaN or Infinity, which JSON does not have but Python's reader accepts."""


def _refuse_constant(text: str) -> float:
    raise _ConstantError(text)


def _frames(document: dict[str, Any], file: Path) -> list[dict[str, Any]]:
    frames = document.get("frames")
    if not isinstance(frames, list) or not frames:
        raise SceneError("has no list 'frames' with at least one frame", where=file, remedy="run the export again")
    for i, frame in enumerate(frames):
        if not isinstance(frame, dict) or not isinstance(frame.get("file_path"), str):
            raise SceneError(f"frame {i} has no 'file_path'", where=file, remedy="correct or remove that frame")
    return frames


def _view(frame: dict[str, Any], i: int, document: dict[str, Any], root: Path, file: Path) -> View:
    label = f"frame {i} {frame['file_path']!r}"
    name = inside(frame["file_path"], root, file, label)
    fisheye = frame.get("is_fisheye", document.get("is_fisheye", False))
    model = str(frame.get("camera_model", document.get("camera_model", "OPENCV_FISHEYE" if fisheye else "OPENCV")))
    values = _intrinsics(frame, document, file, label)
    return View(_with_suffix(name, root), _Lens(file, label, model, values), _viewmat(frame, file, label), label)


def _viewmat(frame: dict[str, Any], file: Path, label: str) -> NDArray[np.float64]:
    """[4, 4] world to camera from ``transform_matrix``, camera to world with OpenGL axes, 3x4 or 4x4."""
    try:
        matrix = np.array(frame.get("transform_matrix"), dtype=np.float64)
    except (TypeError, ValueError, OverflowError):  # OverflowError: a whole number beyond any double
        matrix = np.empty(0)
    if matrix.shape not in ((3, 4), (4, 4)):
        raise SceneError(
            f"{label}: 'transform_matrix' is not a 4x4 matrix of numbers",
            where=file,
            remedy="correct or remove that frame",
        )
    rotation, center = matrix[:3, :3] * _FLIP, matrix[:3, 3]
    c2w = rigid(rotation, center, file, label)
    viewmat = np.eye(4)
    viewmat[:3, :3] = c2w[:3, :3].T
    viewmat[:3, 3] = -c2w[:3, :3].T @ center
    return viewmat


def _intrinsics(
    frame: dict[str, Any], document: dict[str, Any], file: Path, label: str
) -> tuple[tuple[str, float], ...]:
    """The intrinsics of a frame, each taken from the frame if it has it, else from the top of the file."""
    values: dict[str, float] = {}
    # A focal length in the frame replaces an angle at the top, not the other way round.
    focal_in_frame = any(key in frame for key in ("fl_x", "camera_angle_x", "fl_y", "camera_angle_y"))
    for key in _INTRINSICS:
        is_focal = key.startswith(("fl_", "camera_angle_"))
        value = frame.get(key, None if is_focal and focal_in_frame else document.get(key))
        if value is not None:
            values[key] = _number(value, key, file, label)
    params = frame.get("distortion_params", document.get("distortion_params"))
    if params is not None:
        # nerfstudio's order.
        order = ("k1", "k2", "k3", "k4", "p1", "p2")
        if not isinstance(params, list) or len(params) > len(order):
            raise SceneError(
                f"{label}: distortion_params is not a list of up to 6 numbers", where=file, remedy="correct the file"
            )
        pairs = zip(order, params, strict=False)
        values.update({key: _number(value, "distortion_params", file, label) for key, value in pairs})
    return tuple(values.items())


def _number(value: object, key: str, file: Path, label: str) -> float:
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:  # a whole number beyond any double
        number = math.inf
    if not math.isfinite(number):
        raise SceneError(f"{label}: {key} is {value!r:.100}, not a number", where=file, remedy="correct the file")
    return number


def _make_lens(
    model: str, items: tuple[tuple[str, float], ...], width: int, height: int, file: Path, label: str
) -> pycolmap.Camera:
    values = dict(items)
    w, h = values.get("w", float(width)), values.get("h", float(height))
    fx = values.get("fl_x") or _focal(w, values.get("camera_angle_x")) or values.get("fl_y")
    fy = values.get("fl_y") or (_focal(h, values.get("camera_angle_y")) if "fl_x" not in values else None) or fx
    if fx is None or fy is None:
        fx = fy = _focal(h, values.get("camera_angle_y"))
    if fx is None or fy is None:
        raise SceneError(
            f"{label}: no focal length",
            where=file,
            remedy="give fl_x (pixels) or camera_angle_x (radians), in the frame or at the top of the file",
        )
    if model not in _MODELS:
        raise SceneError(
            f"{label}: camera_model {model!r} is not known",
            where=file,
            remedy=f"known: {', '.join(_MODELS)}; else undistort the photos first",
        )
    name, coefficients = _MODELS[model]
    given = {key: values[key] for key in _COEFFICIENTS if values.get(key)}
    stray = set(given) - set(coefficients)
    if stray:
        raise SceneError(
            f"{label}: camera_model {model} has the distortion {', '.join(sorted(stray))}, which it cannot have",
            where=file,
            remedy="set camera_model to OPENCV, or the coefficients to 0",
        )
    if not (1 <= w <= MAX_SIDE and 1 <= h <= MAX_SIDE):
        raise SceneError(f"{label}: its size is {w:g}x{h:g}", where=file, remedy="correct w and h")
    if name == "FULL_OPENCV" and not set(given) - {"k1", "k2", "p1", "p2"}:
        name = "OPENCV"
    lens = pycolmap.Camera.create_from_model_name(pycolmap.INVALID_CAMERA_ID, name, 1.0, round(w), round(h))
    head = [fx, fy, values.get("cx", w / 2), values.get("cy", h / 2), *(given.get(key, 0.0) for key in coefficients)]
    lens.params = (head + [0.0] * len(lens.params))[: len(lens.params)]
    return lens


def _focal(size: float, angle: float | None) -> float | None:
    """Pixels, from an opening angle in radians."""
    if angle is None or not 0 < angle < math.pi:
        return None
    return 0.5 * size / math.tan(0.5 * angle)


def _with_suffix(name: str, root: Path) -> str:
    """The name with an image ending; Blender leaves it out. The usual one, when none of the files is there."""
    if PurePosixPath(name).suffix.lower() in SUFFIXES:
        return name
    for suffix in SUFFIXES:
        if (root / f"{name}{suffix}").is_file():
            return f"{name}{suffix}"
    return name if (root / name).is_file() else f"{name}{SUFFIXES[0]}"


def _common_folder(root: Path, views: list[View]) -> tuple[str, list[View]]:
    """The first folder that all names share becomes the image folder, and the names relative to it."""
    tops = {view.name.partition("/")[0] if "/" in view.name else "" for view in views}
    top = tops.pop() if len(tops) == 1 else ""
    if not top or not (root / top).is_dir():
        return "", views
    return top, [View(view.name.partition("/")[2], view.lens, view.viewmat, view.label) for view in views]


def _listed(document: dict[str, Any], key: str, root: Path, folder: str, file: Path) -> set[str] | None:
    names = document.get(key)
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise SceneError(f"{key} is not a list of file names", where=file, remedy="correct or remove it")
    paths: Iterable[str] = (_with_suffix(inside(name, root, file, key), root) for name in names)
    return {path.removeprefix(f"{folder}/") if folder else path for path in paths}


def _points(document: dict[str, Any], root: Path, file: Path) -> PointCloud | None:
    name = document.get("ply_file_path")
    if name is None:
        return None
    points = read_points_ply(root / inside(str(name), root, file, "ply_file_path"))
    return points if len(points) else None
