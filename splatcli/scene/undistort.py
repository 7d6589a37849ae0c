"""Lenses: pinhole cameras out of any COLMAP camera model, and images resampled to match.

A lens is a ``pycolmap.Camera`` (model, size, parameters). COLMAP chooses the pinhole that fits into the image without
blank pixels; the image is then sampled along the rays of that pinhole, at the size that training wants.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from splatcli.errors import SceneError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.camera import Camera

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
#: Rays that are traced through the lens at a time; bounds the float64 temporaries.
_CHUNK = 1 << 18


def lens_key(lens: pycolmap.Camera) -> LensKey:
    return lens.model_name, int(lens.width), int(lens.height), lens.params.tobytes()


def check_lens(lens: pycolmap.Camera, where: object, label: str) -> None:
    """Raise SceneError when a lens cannot be right: size, focal length, principal point, finite numbers, model."""

    def refuse(what: str) -> SceneError:
        return SceneError(f"{label}: {what}", where=where, remedy="correct the camera, or calibrate it again")

    if not (1 <= lens.width <= MAX_SIDE and 1 <= lens.height <= MAX_SIDE):
        raise refuse(f"its size is {lens.width}x{lens.height}")
    if lens.is_spherical():
        raise SceneError(
            f"{label}: {lens.model_name} panoramas cannot be seen through a pinhole",
            where=where,
            remedy="cut them into perspective views first (pycolmap's panorama example does)",
        )
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
        raise SceneError(
            f"{label}: its {lens.model_name} distortion cannot be undone; the coefficients "
            f"{lens.params_to_string()} bend rays out of the image or over one another",
            where=where,
            remedy="calibrate the camera again, or undistort the images with `colmap image_undistorter`",
        )
    return pinhole


def _sees_each_ray_once(lens: pycolmap.Camera, pinhole: pycolmap.Camera) -> bool:
    """Return whether the rays of a pinhole fall into the lens's image, each at a place of its own."""
    matrix = pinhole.calibration_matrix()
    x, y = np.meshgrid(np.linspace(0, pinhole.width, _PROBES), np.linspace(0, pinhole.height, _PROBES))
    pixels = np.stack([x.ravel(), y.ravel()], axis=1)
    seen = _trace(lens, matrix, pixels[:, 0], pixels[:, 1])
    if not ((seen >= -_EDGE) & (seen <= np.array([lens.width, lens.height]) + _EDGE)).all():
        return False
    # Where a lens folds over, the way back finds another ray.
    rays = np.asarray(lens.cam_from_img(seen), dtype=np.float64)
    back = rays * [matrix[0, 0], matrix[1, 1]] + matrix[:2, 2]
    kept = (np.abs(back - pixels) <= _FOLD).all(axis=1)
    return bool(kept.mean() >= 1 - _FOLDED)


def sampling_grid(lens: pycolmap.Camera, camera: Camera) -> Tensor:
    """Return where each pixel of ``camera`` is in the lens's image: [1, H, W, 2] float32, x y from -1 to 1.

    -1 and 1 are the image's outer edges, so that the grid serves an image of any resolution.
    """
    import torch

    matrix = np.array([[camera.fx, 0, camera.cx], [0, camera.fy, camera.cy], [0, 0, 1]])
    grid = np.empty((camera.height, camera.width, 2), dtype=np.float32)
    rows = max(1, _CHUNK // camera.width)
    for top in range(0, camera.height, rows):
        bottom = min(camera.height, top + rows)
        x, y = np.meshgrid(np.arange(camera.width) + 0.5, np.arange(top, bottom) + 0.5)
        seen = _trace(lens, matrix, x.ravel(), y.ravel())
        unit = 2.0 * seen / [lens.width, lens.height] - 1.0
        grid[top:bottom] = unit.reshape(bottom - top, camera.width, 2)
    return torch.from_numpy(grid)[None]


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


def _trace(
    lens: pycolmap.Camera, matrix: NDArray[np.float64], x: NDArray[np.float64], y: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return [M, 2], lens pixels that see what the pinhole ``matrix`` [3, 3] sees at (x, y); NaN where it is blind."""
    rays = np.ones((len(x), 3))
    rays[:, 0] = (x - matrix[0, 2]) / matrix[0, 0]
    rays[:, 1] = (y - matrix[1, 2]) / matrix[1, 1]
    return np.asarray(lens.img_from_cam(rays), dtype=np.float64)


def rescaled(lens: pycolmap.Camera, width: int, height: int) -> pycolmap.Camera:
    """Return the same lens for images of another size and (nearly) the same aspect."""
    if (lens.width, lens.height) == (width, height):
        return lens
    copy = pycolmap.Camera(lens.todict())
    copy.rescale(width, height)
    return copy
