"""Camera files: the views to render, read from four layouts and written as nerfstudio camera paths.

The layouts are recognised by their keys:

    {"cameras": [{name, width, height, fx, fy, cx, cy, viewmat, near, model}]}  ours: Camera, field by field
    [{img_name, width, height, fx, fy, position, rotation}]            INRIA's cameras.json
    {"frames": [{file_path, transform_matrix, ...}], fl_x | camera_angle_x, w, h, ...}   transforms.json; w and h may
                                                                       be missing where the caller knows the size
    {"camera_path": [{camera_to_world, fov}], render_width, render_height, fps}          nerfstudio camera path

A camera path that has only "keyframes" is interpolated (render/keyframes.py). The last two layouts hold
camera-to-world matrices with OpenGL axes (y up, z back). Lens distortion is not rendered: its keys are ignored. All
poses are in the frame of the model. ``ns-render camera-path`` and add-ons for Blender read what is written here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splatcli.errors import SceneError, UsageError
from splatcli.render.keyframes import TOLERANCE, frames_between
from splatcli.scene.camera import NEAR, Camera, CameraModel
from splatcli.similarity import rigid, uniform_scale

#: From OpenGL camera axes to OpenCV's: y and z change sign.
FLIP = np.diag([1.0, -1.0, -1.0, 1.0])

#: What gives a focal length in transforms.json.
_FOCAL_KEYS = ("fl_x", "fl_y", "camera_angle_x", "camera_angle_y")

#: Largest image side in pixels; more is a mistake in the file.
_MAX_SIDE = 65_536

#: The remedy for a file without cameras, or with broken ones.
_REMEDY = "splat export RUN -o cameras.json writes such a file; splat docs cameras has the layouts that are read"

#: The remedy for a transforms.json without the size of the images, which Blender's scripts leave out.
_SIZE_REMEDY = "add w and h, the size of the images in pixels, to the file; splat render takes --size 800x800"

_KEYFRAMES_REMEDY = "save the path again in nerfstudio's viewer, with its camera_path"

#: Plausible frame rates; others are a mistake in the file.
_FPS = (0.01, 1000.0)


@dataclass(frozen=True, slots=True)
class CameraFile:
    """The cameras of a file in its order, and its frame rate, if it has one."""

    cameras: list[Camera]
    fps: float | None = None


def read_cameras(path: Path, size: tuple[int, int] | None = None) -> list[Camera]:
    """Read the cameras of a JSON file in one of the layouts above, in the file's order. size: see below.

    Raises SceneError, which names the entry, for anything that is not a camera.
    """
    return read_camera_file(path, size=size).cameras


def read_camera_file(path: Path, near: float = NEAR, size: tuple[int, int] | None = None) -> CameraFile:
    """Read a JSON file in one of the layouts above. Raise SceneError as ``read_cameras``.

    near: the near plane of cameras for which the file has none, world units.
    size: width and height where a transforms.json has none.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise SceneError(f"cannot read the cameras: {error.strerror}", where=path, remedy=_REMEDY) from None
    except (ValueError, RecursionError) as error:  # invalid JSON or UTF-8, or numbers with thousands of digits
        raise SceneError(f"not valid JSON: {error}", where=path, remedy=_REMEDY) from None

    shared = document if isinstance(document, dict) else {}
    if not shared.get("camera_path") and isinstance(shared.get("keyframes"), list):
        try:
            shared = {**shared, "camera_path": frames_between(shared)}
        except ValueError as error:
            raise SceneError(str(error), where=path, remedy=_KEYFRAMES_REMEDY) from None
    for key, parse in (("cameras", _ours), ("frames", _transforms), ("camera_path", _camera_path)):
        if isinstance(shared.get(key), list):
            entries, parser, label = shared[key], parse, key
            break
    else:
        if not isinstance(document, list):
            raise SceneError(
                "no cameras found",
                where=path,
                remedy='expected a list as INRIA writes it, or an object with "cameras", "frames" or "camera_path"',
            )
        entries, parser, label = document, _inria, "entry"

    if size is not None and label == "frames":
        shared = {"w": size[0], "h": size[1], **shared}
    if not entries:
        raise SceneError("the file has no cameras", where=path, remedy=_REMEDY)
    cameras = []
    for index, entry in enumerate(entries):
        try:
            if not isinstance(entry, dict):
                raise ValueError(f"found {type(entry).__name__}, not an object")
            camera = parser(entry, shared, index)
            cameras.append(camera if label == "cameras" and "near" in entry else replace(camera, near=near))
        except KeyError as error:
            remedy = _SIZE_REMEDY if label == "frames" and error.args[0] in ("w", "h") else _REMEDY
            raise SceneError(f"{error} is missing", where=f"{path}: {label} {index}", remedy=remedy) from None
        except (ValueError, OverflowError) as error:
            raise SceneError(str(error), where=f"{path}: {label} {index}", remedy=_REMEDY) from None
    return CameraFile(cameras, _fps(shared, path) if label == "camera_path" else None)


def cameras_json(cameras: list[Camera], offset: Sequence[float] = ()) -> str:
    """Return cameras in the layout of splat; ``read_cameras`` returns exactly the same numbers.

    offset: what was subtracted from the input's coordinates; recorded if not zero, and not applied: the cameras are in
        the frame of the model.
    """
    entries = [
        {
            "name": camera.name,
            "width": camera.width,
            "height": camera.height,
            "fx": camera.fx,
            "fy": camera.fy,
            "cx": camera.cx,
            "cy": camera.cy,
            "viewmat": np.asarray(camera.viewmat, dtype=np.float64).tolist(),
            "near": camera.near,
            **({} if camera.model == "pinhole" else {"model": camera.model}),
        }
        for camera in cameras
    ]
    place = {"offset": list(offset)} if any(offset) else {}
    return json.dumps({**place, "cameras": entries}, indent=1) + "\n"


def _ours(entry: dict[str, Any], shared: dict[str, Any], index: int) -> Camera:
    width, height = _side(entry, "width"), _side(entry, "height")
    return Camera(
        name=str(entry.get("name", f"{index:05d}")),
        width=width,
        height=height,
        fx=_focal(entry, "fx"),
        fy=_focal(entry, "fy"),
        cx=_number(entry, "cx"),
        cy=_number(entry, "cy"),
        viewmat=rigid(_matrix(entry, "viewmat"), TOLERANCE),
        near=_near(entry) if "near" in entry else NEAR,
        model=entry.get("model", "pinhole"),
    )


def _inria(entry: dict[str, Any], shared: dict[str, Any], index: int) -> Camera:
    width, height = _side(entry, "width"), _side(entry, "height")
    c2w = np.eye(4)
    c2w[:3, :3] = _array(entry, "rotation", (3, 3))
    c2w[:3, 3] = _array(entry, "position", (3,))
    return Camera(
        name=str(entry.get("img_name", entry.get("id", f"{index:05d}"))),
        width=width,
        height=height,
        fx=_focal(entry, "fx"),
        fy=_focal(entry, "fy"),
        cx=width / 2,
        cy=height / 2,
        viewmat=_inverse(rigid(c2w, TOLERANCE)),
    )


def _transforms(entry: dict[str, Any], shared: dict[str, Any], index: int) -> Camera:
    # A value of the frame wins over the file's, and a focal length or angle of the frame over each of the file.
    if any(key in entry for key in _FOCAL_KEYS):
        shared = {key: value for key, value in shared.items() if key not in _FOCAL_KEYS}
    known = {**shared, **entry}
    width, height = _side(known, "w"), _side(known, "h")
    if "fl_x" in known:
        fx = _focal(known, "fl_x")
    elif "camera_angle_x" in known:
        fx = _focal_from_angle(width, _number(known, "camera_angle_x"))
    else:
        raise ValueError("fl_x and camera_angle_x are missing")
    if "fl_y" in known:
        fy = _focal(known, "fl_y")
    elif "camera_angle_y" in known:
        fy = _focal_from_angle(height, _number(known, "camera_angle_y"))
    else:
        fy = fx
    return Camera(
        name=str(entry.get("file_path", f"{index:05d}")).removeprefix("./"),
        width=width,
        height=height,
        fx=fx,
        fy=fy,
        cx=_number(known, "cx") if "cx" in known else width / 2,
        cy=_number(known, "cy") if "cy" in known else height / 2,
        viewmat=_from_opengl(_matrix(entry, "transform_matrix")),
        model=_transforms_model(known),
    )


#: Beginnings of camera_model in transforms.json whose straight lines are straight but for the distortion.
_PINHOLES = ("SIMPLE_PINHOLE", "PINHOLE", "SIMPLE_RADIAL", "RADIAL", "OPENCV", "FULL_OPENCV", "PERSPECTIVE")


def _transforms_model(known: dict[str, Any]) -> CameraModel:
    """Return the model that camera_model or is_fisheye names; lens distortion is left out of each."""
    name = known.get("camera_model", "OPENCV_FISHEYE" if known.get("is_fisheye") else "OPENCV")
    if name in _PINHOLES:
        return "pinhole"
    if name == "ORTHOPHOTO":
        return "ortho"
    if not isinstance(name, str) or "FISHEYE" not in name:
        raise ValueError(f"camera_model is {name!r}, which is not rendered")
    if "fl_x" not in known:
        raise ValueError("fl_x is missing, in pixels a radian: the angle of a fisheye does not tell it")
    return "fisheye"


#: camera_type of a camera path. nerfstudio takes the focal length of both from the fov of a perspective camera; that of
#: a fisheye then counts pixels a radian.
_CAMERA_TYPES: dict[str, CameraModel] = {"perspective": "pinhole", "fisheye": "fisheye"}


def _camera_path(entry: dict[str, Any], shared: dict[str, Any], index: int) -> Camera:
    kind = shared.get("camera_type", "perspective")
    if not isinstance(kind, str) or kind not in _CAMERA_TYPES:
        what = f"camera_type is {kind!r}, only {' and '.join(map(repr, _CAMERA_TYPES))} can be rendered"
        if kind == "equirectangular":
            what += "; for panoramas make it 'perspective', and add --projection equirectangular --size 4096x2048"
        raise ValueError(what)
    width, height = _side(shared, "render_width"), _side(shared, "render_height")
    focal = _focal_from_angle(height, math.radians(_number(entry, "fov")))
    return Camera(
        name=f"{index:05d}",
        width=width,
        height=height,
        fx=focal,
        fy=focal,
        cx=width / 2,
        cy=height / 2,
        viewmat=_from_opengl(_matrix(entry, "camera_to_world")),
        model=_CAMERA_TYPES[kind],
    )


def _fps(shared: dict[str, Any], path: Path) -> float | None:
    """Return the frame rate of a camera path; None without one. Raise SceneError."""
    value = shared.get("fps")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not _FPS[0] <= value <= _FPS[1]:
        raise SceneError(
            f"fps is {value!r}, not a number from {_FPS[0]:g} to {_FPS[1]:g}",
            where=path,
            remedy="correct it in the file",
        )
    return float(value)


def _from_opengl(c2w: NDArray[np.float64]) -> NDArray[np.float64]:
    """Convert camera-to-world with OpenGL axes to world-to-camera with OpenCV axes.

    Blender's matrices have the scale of the camera, and those of nerfstudio's add-on that of the scene in Blender;
    neither changes an image.
    """
    c2w = c2w.copy()
    c2w[:3, :3] /= uniform_scale(c2w[:3, :3], TOLERANCE)
    return _inverse(rigid(c2w, TOLERANCE) @ FLIP)


def _inverse(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.linalg.inv(matrix), dtype=np.float64)


def _matrix(entry: dict[str, Any], key: str) -> NDArray[np.float64]:
    """Return [4, 4] from four or three rows, or from the same numbers in one list."""
    try:
        values = np.asarray(entry[key], dtype=np.float64).reshape(-1)
    except (TypeError, ValueError):
        raise ValueError(f"{key} is not a matrix of numbers") from None
    if values.size == 12:
        values = np.append(values, (0.0, 0.0, 0.0, 1.0))
    if values.size != 16 or not np.isfinite(values).all():
        raise ValueError(f"{key} is not a 4x4 matrix of finite numbers")
    return values.reshape(4, 4)


def _array(entry: dict[str, Any], key: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    try:
        values = np.asarray(entry[key], dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{key} is not an array of numbers") from None
    if values.shape != shape or not np.isfinite(values).all():
        raise ValueError(f"{key} does not hold {' x '.join(map(str, shape))} finite numbers")
    return values


def _number(entry: dict[str, Any], key: str) -> float:
    value = entry[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{key} is {value!r}, not a finite number")
    return float(value)


def _focal(entry: dict[str, Any], key: str) -> float:
    value = _number(entry, key)
    if value <= 0:
        raise ValueError(f"{key} is {value}, a focal length is above 0")
    return value


def _near(entry: dict[str, Any]) -> float:
    value = _number(entry, "near")
    if value <= 0:
        raise ValueError(f"near is {value}, a near plane is above 0")
    return value


def _focal_from_angle(side: int, angle: float) -> float:
    if not 0 < angle < math.pi:
        raise ValueError(f"a field of view of {math.degrees(angle):.1f} degrees is not between 0 and 180")
    return side / (2 * math.tan(angle / 2))


def _side(entry: dict[str, Any], key: str) -> int:
    value = _number(entry, key)
    if value != int(value) or not 0 < value <= _MAX_SIDE:
        raise ValueError(f"{key} is {value:g}, not a whole number of pixels from 1 to {_MAX_SIDE}")
    return int(value)


#: The suffix of file names in nerfstudio's layout.
SUFFIX = "camera_path.json"
#: Tolerances: pixels from the optical axis to the centre, and relative difference of focal lengths.
_PIXELS, _SHARE = 0.5, 1e-3


def is_camera_path(path: Path) -> bool:
    """Return whether a file of this name is written in nerfstudio's layout."""
    return path.name.lower().endswith(SUFFIX)


def camera_path_json(cameras: Sequence[Camera], fps: float) -> tuple[str, list[str]]:
    """Return (the file, notes on facts that it cannot hold). Poses are in the frame of the model.

    Raises UsageError if the cameras have several sizes or models, or are orthographic.
    """
    sizes = sorted({(camera.width, camera.height) for camera in cameras})
    if len(sizes) != 1:
        raise UsageError(
            f"a camera path has one size, and the views have {len(sizes)}",
            where="--save-cameras",
            remedy="--size {}x{}".format(*sizes[-1]) + "; or a name without camera_path, for the layout of splat",
        )
    models = {camera.model for camera in cameras}
    kinds = [kind for kind, model in _CAMERA_TYPES.items() if models == {model}]
    if not kinds:
        raise UsageError(
            f"a camera path is {' or '.join(_CAMERA_TYPES)}, and the views are {' and '.join(sorted(models))}",
            where="--save-cameras",
            remedy="a name without camera_path, for the layout of splat",
        )
    ((width, height),) = sizes
    document = {
        "camera_type": kinds[0],
        "render_width": width,
        "render_height": height,
        "fps": fps,
        "seconds": len(cameras) / fps,
        "keyframes": [],
        "camera_path": [
            {
                "camera_to_world": (np.linalg.inv(camera.viewmat) @ FLIP).ravel().tolist(),
                "fov": math.degrees(2 * math.atan(height / (2 * camera.fy))),
                "aspect": width / height,
            }
            for camera in cameras
        ],
    }
    odd = sum(_is_odd(camera) for camera in cameras)
    notes = [f"a camera path has square pixels and a central axis, unlike {odd} of the views"] if odd else []
    return json.dumps(document, indent=1) + "\n", notes


def _is_odd(camera: Camera) -> bool:
    off = max(abs(camera.cx - camera.width / 2), abs(camera.cy - camera.height / 2))
    return off > _PIXELS or abs(camera.fx / camera.fy - 1) > _SHARE
