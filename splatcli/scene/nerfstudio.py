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
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.find_images import SUFFIXES, is_file
from splatcli.scene.foreign_lenses import Brown, colmap_camera
from splatcli.scene.panorama import EQUIRECTANGULAR
from splatcli.scene.parsing import ROTATION_TOLERANCE, leads_outside, load_json, path_in_scene, viewmat_of
from splatcli.scene.points import RawPoints, read_points_ply
from splatcli.scene.source import Entry, Problems, Reader, SceneSource, View
from splatcli.similarity import uniform_scale
from splatcli.sizes import counted

FILE, BLENDER_FILE, BLENDER_TEST_FILE = "transforms.json", "transforms_train.json", "transforms_test.json"


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
_EDIT_FRAME = "correct or remove that frame"


@dataclass(frozen=True, slots=True, eq=False)
class _Transforms:
    """A transforms file in the scene's folder ``root``, and the object that it holds."""

    root: Path
    whole: Entry
    document: dict[str, Any]
    allow_outside: bool

    @classmethod
    def load(cls, root: Path, name: str, data: DataConfig) -> _Transforms:
        """Read a file. Raises SceneError."""
        file = root / name
        document = load_json(file, dict, "it should start with { and have 'frames'")
        return cls(root, Entry(file, remedy="correct the file"), document, data.allow_outside)

    def views(self, problems: Problems) -> list[View]:
        """Return the views of sound frames; the others are added to ``problems``. Raises SceneError without a list."""
        frames = self.document.get("frames")
        if not isinstance(frames, list) or not frames:
            raise self.whole.error("the file has no list 'frames' with at least one frame", "run the export again")
        views = []
        for i, frame in enumerate(frames):
            with problems.collect():
                views.append(self._view(frame, i))
        return views

    def _view(self, frame: object, i: int) -> View:
        if not isinstance(frame, dict) or not isinstance(path := frame.get("file_path"), str):
            raise self.whole.error(f"frame {i} has no 'file_path'", _EDIT_FRAME)
        entry = self.whole.named(f"frame {i} {path!r}")
        name, outside = self.path(path, entry.label)
        lens = self._lens(frame, entry.label)
        if outside is None:
            name = _with_suffix(name, self.root)
        depth_key = next((key for key in _DEPTHS if frame.get(key) is not None), _DEPTHS[0])
        mask, depth = (self._beside(frame, key, entry.label) for key in ("mask_path", depth_key))
        moved = outside is None and leads_outside(path, self.root)
        viewmat, scaled = _viewmat(frame, entry)
        return View(name, lens, viewmat, entry.label, outside, mask, depth=depth, moved=moved, scaled=scaled)

    def path(self, name: str, label: str) -> tuple[str, str | None]:
        """Return path_in_scene() of a name in the file."""
        return path_in_scene(name, self.root, self.whole.named(label), allow_outside=self.allow_outside)

    def _beside(self, frame: dict[str, Any], key: str, label: str) -> str | None:
        """Return where another file of a frame is, relative to the scene's folder, or as given if that is allowed."""
        given = frame.get(key)
        if given is None:
            return None
        inside, beyond = self.path(str(given), f"{label}: {key}")
        return beyond or inside

    def _lens(self, frame: dict[str, Any], label: str) -> TransformsLens:
        """Return the lens of a frame; each key is taken from the frame if it has it, else from the top of the file.

        Frames that say nothing of a lens share one, which messages call by the file rather than by the frame.
        """
        top = self.document
        own = frame.keys() & {*_INTRINSICS, "is_fisheye", "camera_model", "distortion_params"}
        entry = self.whole.named(label if own else "the camera at the top of the file")
        fisheye = frame.get("is_fisheye", top.get("is_fisheye", False))
        model = str(frame.get("camera_model", top.get("camera_model", "OPENCV_FISHEYE" if fisheye else "OPENCV")))
        model = model.upper() if model.upper() in (*_MODELS, EQUIRECTANGULAR) else model
        values: dict[str, float] = {}
        # A focal length in the frame replaces an angle at the top, not the other way round.
        focal_in_frame = any(key in frame for key in ("fl_x", "camera_angle_x", "fl_y", "camera_angle_y"))
        for key in _INTRINSICS:
            is_focal = key.startswith(("fl_", "camera_angle_"))
            value = frame.get(key, None if is_focal and focal_in_frame else top.get(key))
            if value is not None:
                values[key] = _number(value, key, entry)
        params = frame.get("distortion_params", top.get("distortion_params"))
        if params is not None:
            order = ("k1", "k2", "k3", "k4", "p1", "p2")  # nerfstudio's
            if not isinstance(params, list) or len(params) > len(order):
                raise entry.error("distortion_params is not a list of up to 6 numbers")
            pairs = zip(order, params, strict=False)
            values.update({key: _number(value, "distortion_params", entry) for key, value in pairs})
        return TransformsLens(entry.file, entry.label, model, tuple(values.items()))

    def listed(self, key: str, folder: str) -> set[str] | None:
        """Return the names of views that the file lists, relative to ``folder``; None where it has no such list."""
        names = self.document.get(key)
        if names is None:
            return None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self.whole.error(f"{key} is not a list of file names", "correct or remove it")
        found = (self.path(name, key) for name in names)
        paths = (name if outside else _with_suffix(name, self.root) for name, outside in found)
        return {path.removeprefix(f"{folder}/") if folder else path for path in paths}

    def points(self, limit: int) -> RawPoints | None:
        """Return the points of the PLY that the file names."""
        given = self.document.get("ply_file_path")
        if given is None:
            return None
        if not isinstance(given, str):
            raise self.whole.error(f"ply_file_path is {given!r}, not a file name", "correct or remove it")
        name, outside = self.path(given, "ply_file_path")
        points = read_points_ply(self.root / (outside or name), limit)
        return points if points.total else None

    def depth_unit(self) -> float | None:
        """Return the scene units that 1 in a depth map is, where the file says so. Raises SceneError for no number."""
        nerfstudio, ngp = _DEPTH_UNITS
        key = nerfstudio if self.document.get(nerfstudio) is not None or not self.document.get(ngp) else ngp
        given = self.document.get(key)
        return None if given is None else _number(given, key, self.whole.named("the top of the file"))


def read_nerfstudio(root: Path, data: DataConfig, problems: Problems) -> SceneSource:
    """Read ``transforms.json``: intrinsics per frame or global (the frame wins), distortion, points, named splits.

    Frames whose image is missing are left out when most have one, as the field's readers do: instant-ngp's own fox
    scene lists 17 images that it does not ship.
    """
    transforms = _Transforms.load(root, FILE, data)
    views = transforms.views(problems)
    scaled = _scaled_note(views)
    folder, views = _common_folder(root, views)
    points = None
    with problems.collect():
        points = transforms.points(data.max_points)
    source = SceneSource(
        root=root,
        file=root / FILE,
        views=views,
        image_folders=[root / folder] if folder else [root, root / "images", root / "input"],
        points=points,
        tolerant=True,
        resized_folders=folder != "",
        depth_scale=transforms.depth_unit(),
        notes=scaled,
    )
    train, test, val = (transforms.listed(f"{split}_filenames", folder) for split in ("train", "test", "val"))
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
    train = _Transforms.load(root, BLENDER_FILE, data).views(problems)
    source = SceneSource(root, root / BLENDER_FILE, train, [root], resized_folders=False)
    if (root / BLENDER_TEST_FILE).is_file():
        held_out = _Transforms.load(root, BLENDER_TEST_FILE, data)
        test = held_out.views(problems) if held_out.document.get("frames") != [] else []
        source.views = train + test
        source.train, source.test = {view.name for view in train}, {view.name for view in test}
    else:
        source.notes.append(f"{BLENDER_TEST_FILE} is missing: views are held out of {BLENDER_FILE}")
    source.notes += _scaled_note(source.views)
    return source


def _scaled_note(views: list[View]) -> list[str]:
    """Return a note on poses with a scale, where there are any."""
    scaled = [view.label for view in views if view.scaled]
    poses = counted(len(scaled), "pose has", "poses have")
    return [f"{poses} a scale, which no image shows and which is left out, e.g. {scaled[0]}"] if scaled else []


def _viewmat(frame: dict[str, Any], entry: Entry) -> tuple[NDArray[np.float64], bool]:
    """Return ([4, 4] world to camera, whether its axes had a scale) of ``transform_matrix``.

    That is camera to world with OpenGL axes, 3x4 or 4x4. Blender's matrices have the scale of the camera, or of what
    it hangs on; its renders do not show that.
    """
    if "transform_matrix" not in frame:
        raise entry.error("no 'transform_matrix'", _EDIT_FRAME)
    matrix = _matrix(frame["transform_matrix"])
    if matrix is None or matrix.shape not in ((3, 4), (4, 4)):
        raise entry.error("'transform_matrix' is not a 4x4 matrix of numbers", _EDIT_FRAME)
    last = [0.0, 0.0, 0.0, 1.0]
    if len(matrix) == 4 and not np.allclose(matrix[3], last, rtol=0, atol=ROTATION_TOLERANCE):
        raise entry.error(
            f"the last row of its 'transform_matrix' is {matrix[3].tolist()}, expected 0, 0, 0, 1",
            "transpose the matrices" if matrix[:, 3].tolist() == last else _EDIT_FRAME,
        )
    axes = matrix[:3, :3]
    scale = uniform_scale(axes, ROTATION_TOLERANCE)
    return viewmat_of(axes / scale, matrix[:3, 3], entry, opengl=True), scale != 1.0


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


@dataclass(frozen=True, slots=True)
class TransformsLens:
    """Intrinsics as a file gives them; what is absent follows from the image's size."""

    file: Path
    label: str
    model: str
    values: tuple[tuple[str, float], ...]

    def __call__(self, width: int, height: int) -> pycolmap.Camera:
        entry, values = Entry(self.file, self.label), dict(self.values)
        w, h = values.get("w", float(width)), values.get("h", float(height))
        if self.model == EQUIRECTANGULAR:  # its focal lengths, half the width, say nothing more
            return colmap_camera(EQUIRECTANGULAR, round(w), round(h), [w, h], entry)
        fx = values.get("fl_x") or _focal(w, values.get("camera_angle_x")) or values.get("fl_y")
        fy = values.get("fl_y") or (_focal(h, values.get("camera_angle_y")) if "fl_x" not in values else None) or fx
        if fx is None or fy is None:
            fx = fy = _focal(h, values.get("camera_angle_y"))
        if fx is None or fy is None:
            remedy = "give fl_x (pixels) or camera_angle_x (radians), in the frame or at the top of the file"
            raise entry.error("no focal length", remedy)
        if self.model not in _MODELS:
            known = ", ".join((*_MODELS, EQUIRECTANGULAR))
            remedy = f"known: {known}; else undistort the images first"
            raise entry.error(f"camera_model {self.model!r} is not known", remedy)
        name, coefficients = _MODELS[self.model]
        given = {key: values[key] for key in _COEFFICIENTS if values.get(key)}
        center = values.get("cx", w / 2), values.get("cy", h / 2)
        if self.model == "OPENCV" and "k4" in given and not {"k5", "k6"} & given.keys():
            # nerfstudio's is the factor of r^8, as Metashape's and RealityCapture's, which it converts.
            radial = [given.get(key, 0.0) for key in ("k1", "k2", "k3", "k4")]
            brown = Brown(fx, fy, *center, radial, (given.get("p1", 0.0), given.get("p2", 0.0)))
            return brown.camera(round(w), round(h), entry)
        stray = set(given) - set(coefficients)
        if stray:
            raise entry.error(
                f"camera_model {self.model} has the distortion {', '.join(sorted(stray))}, which it cannot have",
                "set camera_model to FULL_OPENCV, or the coefficients to 0",
            )
        if name == "FULL_OPENCV" and not set(given) - {"k1", "k2", "p1", "p2"}:
            name = "OPENCV"
        lens = pycolmap.Camera.create_from_model_name(pycolmap.INVALID_CAMERA_ID, name, 1.0, round(w), round(h))
        params = [fx, fy, *center, *(given.get(key, 0.0) for key in coefficients), *[0.0] * len(lens.params)]
        lens.params = params[: len(lens.params)]
        return lens


def _number(value: object, key: str, entry: Entry) -> float:
    if isinstance(value, str):  # as nerfstudio writes coefficients of RealityCapture's tables
        with contextlib.suppress(ValueError):  # reported below
            value = float(value)
    # An integer can be too large to be compared as a float, but not to be compared with one.
    usable = isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST
    if not usable:
        shown = repr(value) if len(repr(value)) < 40 else f"{repr(value)[:40]}..."
        raise entry.error(f"{key} is {shown}, not a number")
    wanted = _RANGES.get(key)
    number = float(value)  # type: ignore[arg-type]  # narrowed by usable
    if wanted is not None and not wanted[0] < number < wanted[1]:
        raise entry.error(f"{key} is {number:g}; {wanted[2]}")
    return number


def _focal(size: float, angle: float | None) -> float | None:
    """Return a focal length in pixels, from an opening angle in radians."""
    if angle is None:
        return None
    return 0.5 * size / math.tan(0.5 * angle)


READER = Reader("nerfstudio", FILE, lambda root: is_file(root / FILE), read_nerfstudio)
BLENDER_READER = Reader("blender", BLENDER_FILE, lambda root: is_file(root / BLENDER_FILE), read_blender)
