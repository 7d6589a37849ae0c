"""Lenses: pinhole and fisheye cameras out of any COLMAP camera model, and images resampled to match.

A lens is a ``pycolmap.Camera`` (model, size, parameters). COLMAP chooses the pinhole that fits into the image without
blank pixels. A lens that sees too far to the side for a plane becomes an equidistant fisheye instead, which shows all
of its image and is blank around it. The image is then sampled along the rays of that camera, at the size that training
wants.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from splatcli.config import Projection
from splatcli.errors import SceneError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.camera import MAX_ANGLE, Camera
from splatcli.scene.panorama import PanoramaFace

if TYPE_CHECKING:
    from torch import Tensor

#: Two lenses with equal keys see alike: model, size, and the bytes of the parameters (NaN does not equal itself).
LensKey = tuple[str, int, int, bytes]

#: Focal lengths beyond this many sides of the picture, or below its inverse, belong to no lens: its view would be
#: narrower than a fifth of an arc second, or within as much of all that lies ahead.
MAX_ZOOM = 1e6
#: Pixels a side; no camera has more, and a negative size written as an unsigned one has.
MAX_SIDE = 1_000_000
#: Points of the pinhole's image that are tried, per axis, when a lens is checked.
_PROBES = 33
#: Pixels (of the lens's own size) that a pinhole may look past the image's edge; COLMAP rounds its size.
_EDGE = 2.0
#: Pixels by which the way there and back through a lens may miss.
_FOLD = 0.5
#: Part of a picture that may fold: real calibrations can do so in their outermost corners.
_FOLDED = 0.01
#: Angle from the optical axis, in radians, beyond which a lens sees too far for a pinhole: 60 degrees. That of an
#: equidistant lens would leave out an eighth of the image, and have 1.5 times as many pixels for the rest.
_WIDE = math.radians(60.0)
#: Directions around the axis and angles from it in which a lens is followed; and how much farther than it sees.
_TURNS, _ANGLES, _BEYOND = 128, 257, 1.02
#: COLMAP's equidistant fisheye without distortion.
_FISHEYE = "FISHEYE"
#: Half sides of an image by which a ray may miss it through rounding.
_ROUNDED = 1e-4
#: Pixels that the bicubic kernel reaches beyond a place.
_KERNEL = 2
#: Rays that are traced through the lens at a time; bounds the float64 temporaries.
_CHUNK = 1 << 18


def lens_key(lens: pycolmap.Camera | PanoramaFace) -> LensKey:
    """Return model, width, height and parameters, which are equal for equal lenses."""
    return lens.model_name, int(lens.width), int(lens.height), lens.params.tobytes()


def check_lens(lens: pycolmap.Camera, where: object, label: str) -> None:
    """Raise SceneError when a lens cannot be right: size, focal length, principal point, finite numbers, model."""

    def refuse(what: str) -> SceneError:
        return SceneError(f"{label}: {what}", where=where, remedy="correct the camera, or calibrate it again")

    if not (1 <= lens.width <= MAX_SIDE and 1 <= lens.height <= MAX_SIDE):
        raise refuse(f"its size is {lens.width}x{lens.height}")
    if lens.is_spherical():
        return  # it has no parameters but its size
    if not lens.verify_params():
        raise refuse(f"{lens.model_name} does not have {len(lens.params)} parameters")
    if not np.isfinite(lens.params).all():
        raise refuse(f"its parameters are not finite: {lens.params_to_string()}")
    side = max(lens.width, lens.height)
    focal = (lens.focal_length_x, lens.focal_length_y)
    if not all(length > 0 and 1 / MAX_ZOOM <= length / side <= MAX_ZOOM for length in focal):
        raise refuse(f"its focal length is {focal[0]:g}, {focal[1]:g}")
    if not (0 <= lens.principal_point_x <= lens.width and 0 <= lens.principal_point_y <= lens.height):
        raise refuse(
            f"its principal point ({lens.principal_point_x:g}, {lens.principal_point_y:g}) "
            f"lies outside its {lens.width}x{lens.height} pixels"
        )


def is_pinhole(lens: pycolmap.Camera) -> bool:
    """Return whether straight lines are straight: a pinhole model, or another one with all coefficients zero.

    ``is_undistorted`` alone is true for fisheye models that have no coefficients.
    """
    return bool(lens.is_perspective_pinhole() and lens.is_undistorted())


def pinhole_of(lens: pycolmap.Camera, where: object, label: str) -> pycolmap.Camera:
    """Return the pinhole that a lens is trained as: itself when straight, else COLMAP's undistorted one without blanks.

    Raises SceneError when the distortion folds over or leaves the image, which only wrong coefficients do.
    """
    if is_pinhole(lens):
        return lens
    try:
        pinhole = pycolmap.undistort_camera(pycolmap.UndistortCameraOptions(), lens)
        usable = _sees_each_ray_once(lens, pinhole)
    except (ValueError, RuntimeError):
        usable = False
    if not usable:
        remedy = "calibrate the camera again, or undistort the images with `colmap image_undistorter`"
        raise _folded_error(lens, where, label, remedy)
    return pinhole


def _folded_error(lens: pycolmap.Camera, where: object, label: str, remedy: str) -> SceneError:
    what = f"its {lens.model_name} distortion cannot be undone; the coefficients {lens.params_to_string()}"
    return SceneError(f"{label}: {what} bend rays out of the image or over one another", where=where, remedy=remedy)


def camera_of(lens: pycolmap.Camera, projection: Projection, where: object, label: str) -> pycolmap.Camera:
    """Return the camera that a lens is trained as, a pinhole or COLMAP's FISHEYE.

    projection: "pinhole"; "fisheye" for every lens but pinholes; "auto" for those that see farther than 60 degrees to
    the side. Raises SceneError for a distortion that cannot be undone.
    """
    if projection == "pinhole" or is_pinhole(lens):
        return pinhole_of(lens, where, label)
    fov = None if projection == "auto" and _is_narrow(lens) else FieldOfView.of(lens)
    if projection == "auto" and (fov is None or fov.widest <= _WIDE):
        return pinhole_of(lens, where, label)
    return _fisheye_of(lens, fov, where, label)


def _is_narrow(lens: pycolmap.Camera) -> bool:
    """Return whether corners and edges are known to be at most _WIDE from the axis.

    It takes a tenth of the time of FieldOfView.of(). The way from a pixel to its ray is checked by the way back, since
    COLMAP's is wrong beyond 90 degrees.
    """
    x, y = np.meshgrid([0.0, lens.width / 2, lens.width], [0.0, lens.height / 2, lens.height])
    pixels = np.stack([x.ravel(), y.ravel()], axis=1)
    rays = np.asarray(lens.cam_ray_from_img(pixels), dtype=np.float64).reshape(-1, 3)
    back = np.asarray(lens.img_from_cam(rays), dtype=np.float64).reshape(-1, 2)
    # Written so that NaN is false.
    return bool((np.abs(back - pixels) <= _FOLD).all() and (rays[:, 2] >= math.cos(_WIDE)).all())


def is_fisheye(camera: pycolmap.Camera) -> bool:
    """Return whether a camera that camera_of() returned is a fisheye."""
    return bool(camera.model_name == _FISHEYE)


def _fisheye_of(lens: pycolmap.Camera, fov: FieldOfView | None, where: object, label: str) -> pycolmap.Camera:
    """Return the equidistant fisheye that shows all that a lens sees up to MAX_ANGLE, as large in its middle.

    fov: FieldOfView.of(lens). Raises SceneError without one: the distortion folds over or leaves the image.
    """
    if fov is None:
        raise _folded_error(lens, where, label, "calibrate the camera again")
    focal = np.array([lens.focal_length_x, lens.focal_length_y])
    low, high = fov.low * focal, fov.high * focal
    width, height = np.maximum(1, np.round(high - low)).astype(int).tolist()
    return pycolmap.Camera(model=_FISHEYE, width=width, height=height, params=[*focal.tolist(), *(-low).tolist()])


@dataclass(frozen=True, slots=True, eq=False)
class FieldOfView:
    """How far a lens sees. COLMAP's way back from pixels is wrong beyond 90 degrees, so rays are followed instead.

    widest: largest angle from the optical axis, radians, of a ray in its image, at most MAX_ANGLE.
    limit: angle up to which rays farther out are farther out in its image.
    low, high: [2], bounds of the rays in its image on an equidistant fisheye of focal length 1.
    """

    widest: float
    limit: float
    low: NDArray[np.float64]
    high: NDArray[np.float64]

    @classmethod
    def of(cls, lens: pycolmap.Camera) -> FieldOfView | None:
        """Return None where rays fold over in most directions while they are in the image, or none but the axis is."""
        turns = np.linspace(0.0, 2.0 * np.pi, _TURNS, endpoint=False)
        around = np.stack([np.cos(turns), np.sin(turns)], axis=1)[:, None]
        reach = MAX_ANGLE
        for _ in range(2):  # the second time as finely as the lens's field of view asks for
            angles = np.linspace(0.0, reach, _ANGLES)
            places = angles[None, :, None] * around
            rays = _from_equidistant(places.reshape(-1, 2), MAX_ANGLE)
            seen = np.asarray(lens.img_from_cam(rays), dtype=np.float64).reshape(places.shape)
            with np.errstate(all="ignore"):
                outward = np.diff(np.linalg.norm(seen - seen[:, :1], axis=2), axis=1) > 0.0  # false for NaN
            last = int(np.where(outward.all(axis=1), _ANGLES - 1, outward.argmin(axis=1)).min())
            inside = np.asarray(((seen >= 0.0) & (seen <= [lens.width, lens.height])).all(axis=2))
            inside &= np.arange(_ANGLES) <= last
            farthest = float(angles[inside.any(axis=0)].max(initial=0.0))
            reach = min(MAX_ANGLE, _BEYOND * farthest)
        if farthest == 0.0 or (last < _ANGLES - 1 and inside[:, last].mean() > 0.5):
            return None
        return cls(farthest, float(angles[last]), places[inside].min(axis=0), places[inside].max(axis=0))


def _from_equidistant(places: NDArray[np.float64], limit: float) -> NDArray[np.float64]:
    """Return [M, 3], unit rays that an equidistant fisheye of focal length 1 sees at ``places`` [M, 2].

    limit: angle from the optical axis, radians, beyond which they are NaN.
    """
    angle = np.hypot(places[:, 0], places[:, 1])
    across = places * np.sinc(angle / np.pi)[:, None]
    return np.column_stack([across, np.where(angle <= (1.0 + 1e-9) * limit, np.cos(angle), np.nan)])


def _sees_each_ray_once(lens: pycolmap.Camera, pinhole: pycolmap.Camera) -> bool:
    """Return whether the rays of a pinhole fall into the lens's image, each at a place of its own."""
    x, y = np.meshgrid(np.linspace(0, pinhole.width, _PROBES), np.linspace(0, pinhole.height, _PROBES))
    pixels = np.stack([x.ravel(), y.ravel()], axis=1)
    seen = np.asarray(lens.img_from_cam(_plane(pinhole, pixels)), dtype=np.float64)
    if not ((seen >= -_EDGE) & (seen <= np.array([lens.width, lens.height]) + _EDGE)).all():
        return False
    # Where a lens folds over, the way back finds another ray.
    rays = np.asarray(lens.cam_from_img(seen), dtype=np.float64)
    back = np.asarray(pinhole.img_from_cam(np.column_stack([rays, np.ones(len(rays))])), dtype=np.float64)
    kept = (np.abs(back - pixels) <= _FOLD).all(axis=1)
    return bool(kept.mean() >= 1 - _FOLDED)


def sampling_grid(lens: pycolmap.Camera | PanoramaFace, camera: Camera) -> Tensor:
    """Return where each pixel of ``camera`` is in the lens's image: [1, H, W, 2] float32, x y from -1 to 1.

    -1 and 1 are the image's outer edges, so that the grid serves an image of any resolution. What the lens does not
    see, only a fisheye has such pixels, is at BLANK.
    """
    import torch

    fov = FieldOfView.of(lens) if camera.model == "fisheye" and not isinstance(lens, PanoramaFace) else None
    limit = None if fov is None else fov.limit
    grid = np.empty((camera.height, camera.width, 2), dtype=np.float32)
    rows = max(1, _CHUNK // camera.width)
    for top in range(0, camera.height, rows):
        bottom = min(camera.height, top + rows)
        x = (np.arange(camera.width) + 0.5 - camera.cx) / camera.fx
        y = (np.arange(top, bottom) + 0.5 - camera.cy) / camera.fy
        places = np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 2)
        rays = np.column_stack([places, np.ones(len(places))]) if limit is None else _from_equidistant(places, limit)
        seen = np.asarray(lens.img_from_cam(rays), dtype=np.float64)
        unit = 2.0 * seen / [lens.width, lens.height] - 1.0
        if limit is not None:
            unit[~(np.abs(unit) <= 1.0 + _ROUNDED).all(axis=1)] = BLANK
        grid[top:bottom] = unit.reshape(bottom - top, camera.width, 2)
    return torch.from_numpy(grid)[None]


#: Where the pixels of a fisheye camera that its lens does not see are in a sampling grid.
BLANK = 2.0


def blank(grid: Tensor) -> NDArray[np.bool_] | None:
    """Return [H, W], the pixels of a sampling grid [1, H, W, 2] that its lens does not see; None where it sees all."""
    found = (grid[0, :, :, 0] == BLANK).numpy()
    return found if found.any() else None


def resample(image: NDArray[np.uint8], grid: Tensor) -> NDArray[np.uint8]:
    """Return an image [h, w, 3] sampled at a grid [1, H, W, 2] with a bicubic kernel, edges repeated: [H, W, 3]."""
    import torch

    pixels = torch.from_numpy(image).permute(2, 0, 1)[None].float()
    with torch.inference_mode():
        found = torch.nn.functional.grid_sample(
            pixels, grid, mode="bicubic", padding_mode="border", align_corners=False
        )
        result = found[0].round_().clamp_(0, 255).to(torch.uint8).permute(1, 2, 0).contiguous()
    return result.numpy()


def panorama_part(grid: Tensor, width: int, height: int) -> tuple[tuple[NDArray[np.intp], NDArray[np.intp]], Tensor]:
    """Return the part of a panorama that a face shows, as an index of its rows and columns, and the grid in that part.

    grid: the face's in the panorama, whose right edge goes on at the left one. width, height: of the panorama.
    """
    import torch

    size = torch.tensor([width, height])
    places = (grid + 1.0) * (0.5 * size)
    low = places.amin(dim=(0, 1, 2)).floor().int() - _KERNEL
    high = places.amax(dim=(0, 1, 2)).ceil().int() + _KERNEL
    low[1], high[1] = max(0, int(low[1])), min(height, int(high[1]))
    columns, rows = (np.arange(int(begin), int(end)) for begin, end in zip(low, high, strict=True))
    return (rows[:, None], columns[None] % width), (places - low) * (2.0 / (high - low)) - 1.0


def _plane(pinhole: pycolmap.Camera, pixels: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [M, 3], the rays through ``pixels`` [M, 2] of a pinhole, of z 1."""
    return np.column_stack([np.asarray(pinhole.cam_from_img(pixels), dtype=np.float64), np.ones(len(pixels))])


def rescaled(lens: pycolmap.Camera, width: int, height: int) -> pycolmap.Camera:
    """Return the same lens for images of another size and (nearly) the same aspect."""
    if (lens.width, lens.height) == (width, height):
        return lens
    other = copy.copy(lens)
    other.rescale(width, height)
    return other
