"""The lenses of transforms.json: intrinsics of a frame or of the whole file, as a COLMAP camera."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splatcli.errors import SceneError
from splatcli.scene._pycolmap import pycolmap

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
    "depth_unit_scale_factor": (0.0, _LARGEST, "scene units that 1 in a depth map is, positive"),
    **dict.fromkeys(("camera_angle_x", "camera_angle_y"), (0.0, math.pi, "radians between 0 and 3.14 are expected")),
    **dict.fromkeys(("w", "h"), (0.5, 1e6, "a photo has at least one pixel and less than a million a side")),
}


@dataclass(frozen=True, slots=True)
class TransformsLens:
    """Intrinsics as a file gives them; what is absent follows from the photo's size."""

    file: Path
    label: str
    model: str
    values: tuple[tuple[str, float], ...]

    def __call__(self, width: int, height: int) -> pycolmap.Camera:
        return _make_lens(self.model, self.values, width, height, self.file, self.label)


def lens_of(frame: dict[str, Any], document: dict[str, Any], file: Path, label: str) -> TransformsLens:
    """The lens of one frame; each key is taken from the frame if it has it, else from the top of the file.

    Frames that say nothing of a lens share one, which messages call by the file rather than by the frame.
    """
    own = frame.keys() & {*_INTRINSICS, "is_fisheye", "camera_model", "distortion_params"}
    name = label if own else "the camera at the top of the file"
    fisheye = frame.get("is_fisheye", document.get("is_fisheye", False))
    model = str(frame.get("camera_model", document.get("camera_model", "OPENCV_FISHEYE" if fisheye else "OPENCV")))
    return TransformsLens(file, name, model, _intrinsics(frame, document, file, name))


def depth_unit(document: dict[str, Any], file: Path) -> float | None:
    """Scene units that 1 in a depth map is, where the file says so. Raises SceneError for what cannot be."""
    given = document.get("depth_unit_scale_factor")
    return None if given is None else _number(given, "depth_unit_scale_factor", file, "the top of the file")


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
    if name == "FULL_OPENCV" and not set(given) - {"k1", "k2", "p1", "p2"}:
        name = "OPENCV"
    lens = pycolmap.Camera.create_from_model_name(pycolmap.INVALID_CAMERA_ID, name, 1.0, round(w), round(h))
    head = [fx, fy, values.get("cx", w / 2), values.get("cy", h / 2), *(given.get(key, 0.0) for key in coefficients)]
    lens.params = (head + [0.0] * len(lens.params))[: len(lens.params)]
    return lens


def _focal(size: float, angle: float | None) -> float | None:
    """Pixels, from an opening angle in radians."""
    if angle is None:
        return None
    return 0.5 * size / math.tan(0.5 * angle)
