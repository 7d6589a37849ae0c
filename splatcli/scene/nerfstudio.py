"""transforms.json: scenes of nerfstudio and instant-ngp; transforms_train.json: those of Blender, as NeRF's."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splatcli.config import DataConfig
from splatcli.errors import SceneError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.find_images import SUFFIXES, is_file
from splatcli.scene.foreign_lenses import Brown, colmap_camera
from splatcli.scene.panorama import EQUIRECTANGULAR
from splatcli.scene.parsing import load_json, viewmat_of
from splatcli.scene.points import RawPoints, read_points_ply
from splatcli.scene.source import (
    ROTATION_TOLERANCE,
    Problems,
    Reader,
    SceneSource,
    View,
    leads_outside,
    path_in_scene,
)
from splatcli.similarity import uniform_scale
from splatcli.sizes import counted

FILE, BLENDER_FILE = "transforms.json", "transforms_train.json"


def read_nerfstudio(root: Path, data: DataConfig, problems: Problems) -> SceneSource:
    """Read ``transforms.json``: intrinsics per frame or global (the frame wins), distortion, points, named splits.

    Frames whose image is missing are left out when most have one, as the field's readers do: instant-ngp's own fox
    scene lists 17 images that it does not ship.
    """
    file = root / FILE
    document = load_transforms(file)
    views = read_views(document, root, file, data, problems)
    scaled = _scaled_note(views)
    folder, views = _common_folder(root, views)
    points = None
    with problems.collect():
        points = _points(document, root, file, data)
    source = SceneSource(
        root=root,
        file=file,
        views=views,
        image_folders=[root / folder] if folder else [root, root / "images", root / "input"],
        points=points,
        tolerant=True,
        resized_folders=folder != "",
        depth_scale=depth_unit(document, file),
        notes=scaled,
    )
    train, test, val = (
        _listed(document, f"{split}_filenames", root, folder, file, data) for split in ("train", "test", "val")
    )
    test = val if test is None or (not test and val) else test
    if test is None and train is not None:
        test = {view.name for view in views} - train
    unused = set() if train is None or test is None else {view.name for view in views} - train - test
    if unused:
        where = "in neither train_filenames nor test_filenames"
        source.notes.append(counted(len(unused), f"view {where} is left out", f"views {where} are left out"))
    source.train, source.test = train, test
    return source


def read_blender(root: Path, data: DataConfig, problems: Problems) -> SceneSource:
    """Read ``transforms_train.json``, with ``transforms_test.json`` as the held-out views; there are no points."""
    train_file, test_file = root / BLENDER_FILE, root / "transforms_test.json"
    train = read_views(load_transforms(train_file), root, train_file, data, problems)
    source = SceneSource(root, train_file, train, [root], resized_folders=False)
    if test_file.is_file():
        document = load_transforms(test_file)
        test = read_views(document, root, test_file, data, problems) if document.get("frames") != [] else []
        source.views = train + test
        source.train, source.test = {view.name for view in train}, {view.name for view in test}
    else:
        source.notes.append("transforms_test.json is missing: views are held out of transforms_train.json")
    source.notes += _scaled_note(source.views)
    return source


def _scaled_note(views: list[View]) -> list[str]:
    """Return a note on poses with a scale, where there are any."""
    scaled = [view.label for view in views if view.scaled]
    poses = counted(len(scaled), "pose has", "poses have")
    return [f"{poses} a scale, which no image shows and which is left out, e.g. {scaled[0]}"] if scaled else []


def load_transforms(file: Path) -> dict[str, Any]:
    """Return the file's JSON object. Raises SceneError."""
    return load_json(file, dict, "it should start with { and have 'frames'")


def _frames(document: dict[str, Any], file: Path) -> list[object]:
    frames = document.get("frames")
    if not isinstance(frames, list) or not frames:
        raise SceneError(
            "the file has no list 'frames' with at least one frame", where=file, remedy="run the export again"
        )
    return frames


def read_views(document: dict[str, Any], root: Path, file: Path, data: DataConfig, problems: Problems) -> list[View]:
    """Return the views of sound frames; the others are added to ``problems``. Raises SceneError without a list."""
    views = []
    for i, frame in enumerate(_frames(document, file)):
        with problems.collect():
            views.append(_view(frame, i, document, root, file, data))
    return views


def _view(frame: object, i: int, document: dict[str, Any], root: Path, file: Path, data: DataConfig) -> View:
    if not isinstance(frame, dict) or not isinstance(frame.get("file_path"), str):
        raise SceneError(f"frame {i} has no 'file_path'", where=file, remedy="correct or remove that frame")
    label = f"frame {i} {frame['file_path']!r}"
    name, outside = path_in_scene(frame["file_path"], root, file, label, allow_outside=data.allow_outside)
    lens = lens_of(frame, document, file, label)
    if outside is None:
        name = _with_suffix(name, root)
    depth_key = next((key for key in _DEPTHS if frame.get(key) is not None), _DEPTHS[0])
    mask, depth = (_beside(frame, key, root, file, label, data) for key in ("mask_path", depth_key))
    moved = outside is None and leads_outside(frame["file_path"], root)
    viewmat, scaled = _viewmat(frame, file, label)
    return View(name, lens, viewmat, label, outside, mask, depth=depth, moved=moved, scaled=scaled)


def _beside(frame: dict[str, Any], key: str, root: Path, file: Path, label: str, data: DataConfig) -> str | None:
    """Return where another file of a frame is, relative to the scene's folder, or as given where that is allowed."""
    given = frame.get(key)
    if given is None:
        return None
    inside, beyond = path_in_scene(str(given), root, file, f"{label}: {key}", allow_outside=data.allow_outside)
    return beyond or inside


def _viewmat(frame: dict[str, Any], file: Path, label: str) -> tuple[NDArray[np.float64], bool]:
    """Return ([4, 4] world to camera, whether its axes had a scale) of ``transform_matrix``.

    That is camera to world with OpenGL axes, 3x4 or 4x4. Blender's matrices have the scale of the camera, or of what
    it hangs on; its renders do not show that.
    """
    if "transform_matrix" not in frame:
        raise SceneError(f"{label}: no 'transform_matrix'", where=file, remedy="correct or remove that frame")
    matrix = _matrix(frame["transform_matrix"])
    if matrix is None or matrix.shape not in ((3, 4), (4, 4)):
        raise SceneError(
            f"{label}: 'transform_matrix' is not a 4x4 matrix of numbers",
            where=file,
            remedy="correct or remove that frame",
        )
    last = [0.0, 0.0, 0.0, 1.0]
    if len(matrix) == 4 and not np.allclose(matrix[3], last, rtol=0, atol=ROTATION_TOLERANCE):
        raise SceneError(
            f"{label}: the last row of its 'transform_matrix' is {matrix[3].tolist()}, expected 0, 0, 0, 1",
            where=file,
            remedy="transpose the matrices" if matrix[:, 3].tolist() == last else "correct or remove that frame",
        )
    axes = matrix[:3, :3]
    scale = uniform_scale(axes, ROTATION_TOLERANCE)
    return viewmat_of(axes / scale, matrix[:3, 3], file, label, opengl=True), scale != 1.0


def _matrix(rows: object) -> NDArray[np.float64] | None:
    """Return rows of numbers as an array; None for anything else (numpy would take strings for numbers)."""
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == 4 for row in rows):
        return None
    if not all(type(value) in (int, float) for row in rows for value in row):
        return None
    try:
        return np.array(rows, dtype=np.float64)
    except OverflowError:  # a whole number beyond any double
        return None


def _with_suffix(name: str, root: Path) -> str:
    """Return the name with an image ending, which Blender leaves out: the usual one when no such file is there."""
    if PurePosixPath(name).suffix.lower() in SUFFIXES:
        return name
    for suffix in SUFFIXES:
        if is_file(root / f"{name}{suffix}"):
            return f"{name}{suffix}"
    return name if is_file(root / name) else f"{name}{SUFFIXES[0]}"


def _common_folder(root: Path, views: list[View]) -> tuple[str, list[View]]:
    """Return the first folder that all names share, "" for none, and the views with names relative to it."""
    tops = {view.name.partition("/")[0] if "/" in view.name else "" for view in views}
    top = tops.pop() if len(tops) == 1 else ""
    if not top or not (root / top).is_dir():
        return "", views
    return top, [replace(view, name=view.name.partition("/")[2]) for view in views]


def _listed(
    document: dict[str, Any], key: str, root: Path, folder: str, file: Path, data: DataConfig
) -> set[str] | None:
    names = document.get(key)
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise SceneError(f"{key} is not a list of file names", where=file, remedy="correct or remove it")
    found = (path_in_scene(name, root, file, key, allow_outside=data.allow_outside) for name in names)
    paths = (name if outside else _with_suffix(name, root) for name, outside in found)
    return {path.removeprefix(f"{folder}/") if folder else path for path in paths}


def _points(document: dict[str, Any], root: Path, file: Path, data: DataConfig) -> RawPoints | None:
    given = document.get("ply_file_path")
    if given is None:
        return None
    if not isinstance(given, str):
        raise SceneError(f"ply_file_path is {given!r}, not a file name", where=file, remedy="correct or remove it")
    name, outside = path_in_scene(given, root, file, "ply_file_path", allow_outside=data.allow_outside)
    points = read_points_ply(root / (outside or name), data.max_points)
    return points if points.total else None


#: Names of a frame's depth map, and of the scene units that 1 in it is: nerfstudio's, then instant-ngp's (0 for none).
_DEPTHS, _DEPTH_UNITS = ("depth_file_path", "depth_path"), ("depth_unit_scale_factor", "integer_depth_scale")
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

#: Beyond this a number cannot be meant.
_LARGEST = 1e30
_RANGES = {
    **dict.fromkeys(("fl_x", "fl_y"), (0.0, _LARGEST, "a focal length is positive, in pixels")),
    **dict.fromkeys(_DEPTH_UNITS, (0.0, _LARGEST, "scene units that 1 in a depth map is, positive")),
    **dict.fromkeys(("camera_angle_x", "camera_angle_y"), (0.0, math.pi, "radians between 0 and 3.14 are expected")),
    **dict.fromkeys(("w", "h"), (0.5, 1e6, "an image has at least one pixel and less than a million a side")),
}


@dataclass(frozen=True, slots=True)
class TransformsLens:
    """Intrinsics as a file gives them; what is absent follows from the image's size."""

    file: Path
    label: str
    model: str
    values: tuple[tuple[str, float], ...]

    def __call__(self, width: int, height: int) -> pycolmap.Camera:
        return _make_lens(self.model, self.values, width, height, self.file, self.label)


def lens_of(frame: dict[str, Any], document: dict[str, Any], file: Path, label: str) -> TransformsLens:
    """Return the lens of one frame; each key is taken from the frame if it has it, else from the top of the file.

    Frames that say nothing of a lens share one, which messages call by the file rather than by the frame.
    """
    own = frame.keys() & {*_INTRINSICS, "is_fisheye", "camera_model", "distortion_params"}
    name = label if own else "the camera at the top of the file"
    fisheye = frame.get("is_fisheye", document.get("is_fisheye", False))
    model = str(frame.get("camera_model", document.get("camera_model", "OPENCV_FISHEYE" if fisheye else "OPENCV")))
    model = model.upper() if model.upper() in (*_MODELS, EQUIRECTANGULAR) else model
    return TransformsLens(file, name, model, _intrinsics(frame, document, file, name))


def depth_unit(document: dict[str, Any], file: Path) -> float | None:
    """Return the scene units that 1 in a depth map is, where the file says so. Raises SceneError for what cannot be."""
    nerfstudio, ngp = _DEPTH_UNITS
    key = nerfstudio if document.get(nerfstudio) is not None or not document.get(ngp) else ngp
    given = document.get(key)
    return None if given is None else _number(given, key, file, "the top of the file")


def _intrinsics(
    frame: dict[str, Any], document: dict[str, Any], file: Path, label: str
) -> tuple[tuple[str, float], ...]:
    """Return the intrinsics of a frame, each taken from the frame if it has it, else from the top of the file."""
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
    if isinstance(value, str):  # as nerfstudio writes coefficients of RealityCapture's tables
        with contextlib.suppress(ValueError):  # reported below
            value = float(value)
    # An integer can be too large to be compared as a float, but not to be compared with one.
    usable = isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST
    if not usable:
        shown = repr(value) if len(repr(value)) < 40 else f"{repr(value)[:40]}..."
        raise SceneError(f"{label}: {key} is {shown}, not a number", where=file, remedy="correct the file")
    wanted = _RANGES.get(key)
    number = float(value)  # type: ignore[arg-type]  # narrowed by usable
    if wanted is not None and not wanted[0] < number < wanted[1]:
        raise SceneError(f"{label}: {key} is {number:g}; {wanted[2]}", where=file, remedy="correct the file")
    return number


def _make_lens(
    model: str, items: tuple[tuple[str, float], ...], width: int, height: int, file: Path, label: str
) -> pycolmap.Camera:
    values = dict(items)
    w, h = values.get("w", float(width)), values.get("h", float(height))
    if model == EQUIRECTANGULAR:  # its focal lengths, half the width, say nothing more
        return colmap_camera(EQUIRECTANGULAR, round(w), round(h), [w, h], file, label)
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
            remedy=f"known: {', '.join((*_MODELS, EQUIRECTANGULAR))}; else undistort the images first",
        )
    name, coefficients = _MODELS[model]
    given = {key: values[key] for key in _COEFFICIENTS if values.get(key)}
    if model == "OPENCV" and "k4" in given and not {"k5", "k6"} & given.keys():
        # nerfstudio's is the factor of r^8, as Metashape's and RealityCapture's, which it converts.
        radial = [given.get(key, 0.0) for key in ("k1", "k2", "k3", "k4")]
        center = values.get("cx", w / 2), values.get("cy", h / 2)
        brown = Brown(fx, fy, *center, radial, (given.get("p1", 0.0), given.get("p2", 0.0)))
        return brown.camera(round(w), round(h), file, label)
    stray = set(given) - set(coefficients)
    if stray:
        raise SceneError(
            f"{label}: camera_model {model} has the distortion {', '.join(sorted(stray))}, which it cannot have",
            where=file,
            remedy="set camera_model to FULL_OPENCV, or the coefficients to 0",
        )
    if name == "FULL_OPENCV" and not set(given) - {"k1", "k2", "p1", "p2"}:
        name = "OPENCV"
    lens = pycolmap.Camera.create_from_model_name(pycolmap.INVALID_CAMERA_ID, name, 1.0, round(w), round(h))
    head = [fx, fy, values.get("cx", w / 2), values.get("cy", h / 2), *(given.get(key, 0.0) for key in coefficients)]
    lens.params = (head + [0.0] * len(lens.params))[: len(lens.params)]
    return lens


def _focal(size: float, angle: float | None) -> float | None:
    """Return a focal length in pixels, from an opening angle in radians."""
    if angle is None:
        return None
    return 0.5 * size / math.tan(0.5 * angle)


READER = Reader("nerfstudio", FILE, lambda root: is_file(root / FILE), read_nerfstudio)
BLENDER_READER = Reader("blender", BLENDER_FILE, lambda root: is_file(root / BLENDER_FILE), read_blender)
