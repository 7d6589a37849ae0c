"""The part of pycolmap that most scenes need, for machines without it: it has no wheels for Linux on aarch64.

This module stands in for pycolmap (scene/_pycolmap.py). It has the names, numbers and parameters of all of COLMAP's
camera models, so that models are read, and computes with those of perspective cameras: pinholes, also with OpenCV's
distortion. Everything else of pycolmap raises a ResourceError with the remedy: other lenses, structure from motion.
"""

from __future__ import annotations

import enum
import platform
import shlex
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from splatcli.errors import ResourceError

#: COLMAP's camera models by their numbers: name, parameters of the focal length, and of the distortion.
_MODELS = (
    ("SIMPLE_PINHOLE", 1, 0),
    ("PINHOLE", 2, 0),
    ("SIMPLE_RADIAL", 1, 1),
    ("RADIAL", 1, 2),
    ("OPENCV", 2, 4),
    ("OPENCV_FISHEYE", 2, 4),
    ("FULL_OPENCV", 2, 8),
    ("FOV", 2, 1),
    ("SIMPLE_RADIAL_FISHEYE", 1, 1),
    ("RADIAL_FISHEYE", 1, 2),
    ("THIN_PRISM_FISHEYE", 2, 8),
    ("RAD_TAN_THIN_PRISM_FISHEYE", 2, 12),
    ("SIMPLE_DIVISION", 1, 1),
    ("DIVISION", 2, 1),
    ("SIMPLE_FISHEYE", 1, 0),
    ("FISHEYE", 2, 0),
    ("EUCM", 2, 2),
    ("EQUIRECTANGULAR", 2, -2),  # width and height alone
)
#: Where the coefficients of perspective models are in those of FULL_OPENCV: k1 k2 p1 p2 k3 k4 k5 k6.
_OPENCV = {
    "SIMPLE_PINHOLE": [],
    "PINHOLE": [],
    "SIMPLE_RADIAL": [0],
    "RADIAL": [0, 1],
    "OPENCV": [0, 1, 2, 3],
    "FULL_OPENCV": [0, 1, 2, 3, 4, 5, 6, 7],
}

#: Newton steps on the way back through a distortion, the last step's length on the plane z = 1 when it has arrived, and
#: the distance over which its slope is taken.
_STEPS, _ARRIVED, _SLOPE = 100, 1e-10, 1e-6

#: Limits of the size of an undistorted image, relative to the image.
_SCALES = (0.2, 2.0)

INVALID_CAMERA_ID = (1 << 32) - 1

CameraModelId = enum.IntEnum(  # type: ignore[misc]
    "CameraModelId", {"INVALID": -1, **{name: number for number, (name, _, _) in enumerate(_MODELS)}}
)


def install_remedy() -> str:
    """Return how to come by pycolmap on this machine, or do without."""
    if sys.platform == "linux" and platform.machine() != "x86_64":
        return (
            "pycolmap has no wheels for this machine: build it from COLMAP's sources; or use COLMAP itself, and "
            "`colmap image_undistorter`, which writes images and PINHOLE cameras to train on"
        )
    return f"{shlex.quote(sys.executable)} -m pip install pycolmap"


class _MissingError(ResourceError, AttributeError):
    """pycolmap is not installed; to hasattr() and getattr(), the module has no such attribute."""


def _missing(wanted: str) -> _MissingError:
    return _MissingError(f"{wanted}: pycolmap is not installed", where=sys.executable, remedy=install_remedy())


def __getattr__(name: str) -> NoReturn:
    raise _missing("structure from motion is not possible")


class Camera:
    """A camera of COLMAP: model, size and parameters, which are in pixels from the corner of the image."""

    def __init__(
        self, model: int | str, width: int, height: int, params: Sequence[float] | NDArray[np.float64]
    ) -> None:
        self.model = CameraModelId[model] if isinstance(model, str) else CameraModelId(model)
        self.width, self.height = int(width), int(height)
        self.params = params

    @classmethod
    def create_from_model_id(cls, camera_id: int, model: int, focal: float, width: int, height: int) -> Camera:
        """Return a camera with the principal point in the middle and without distortion."""
        _, focals, others = _MODELS[model]
        center = [width / 2, height / 2] if others >= 0 else [float(width), float(height)]
        return cls(model, width, height, [*[focal] * (focals if others >= 0 else 0), *center, *[0.0] * max(0, others)])

    @classmethod
    def create_from_model_name(cls, camera_id: int, name: str, focal: float, width: int, height: int) -> Camera:
        """Return a camera as create_from_model_id()."""
        return cls.create_from_model_id(camera_id, CameraModelId[name], focal, width, height)

    @property
    def params(self) -> NDArray[np.float64]:
        return self._params

    @params.setter
    def params(self, values: Sequence[float] | NDArray[np.float64]) -> None:
        self._params = np.array(values, dtype=np.float64)

    @property
    def model_name(self) -> str:
        return str(self.model.name)

    @property
    def focal_length_x(self) -> float:
        return float(self.params[0])

    @property
    def focal_length_y(self) -> float:
        return float(self.params[self._focals - 1])

    @property
    def principal_point_x(self) -> float:
        return float(self.params[self._focals])

    @property
    def principal_point_y(self) -> float:
        return float(self.params[self._focals + 1])

    @property
    def _focals(self) -> int:
        return _MODELS[self.model][1]

    def verify_params(self) -> bool:
        """Return whether there are as many parameters as the model has."""
        _, focals, others = _MODELS[self.model]
        return len(self.params) == focals + 2 + others

    def params_to_string(self) -> str:
        return ", ".join(f"{value:.15g}" for value in self.params)

    def is_spherical(self) -> bool:
        return self.model_name == "EQUIRECTANGULAR"

    def is_perspective_pinhole(self) -> bool:
        return self.model_name in (*_OPENCV, "FOV", "SIMPLE_DIVISION", "DIVISION", "EUCM")

    def is_undistorted(self) -> bool:
        return not self.params[self._focals + 2 :].any()

    def cam_from_img(self, pixels: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return [N, 2], x and y of the rays through pixels [N, 2] where z is 1; NaN where the distortion has none."""
        focal, center, coefficients = self._perspective()
        bent = (np.asarray(pixels, dtype=np.float64).reshape(-1, 2) - center) / focal
        return bent if not coefficients.any() else _straightened(bent, coefficients)

    def cam_ray_from_img(self, pixels: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return [N, 3], the rays of unit length through pixels [N, 2]."""
        plane = self.cam_from_img(pixels)
        rays = np.column_stack([plane, np.ones(len(plane))])
        return np.asarray(rays / np.linalg.norm(rays, axis=1, keepdims=True))

    def img_from_cam(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return [N, 2], the pixels of points [N, 3] in the camera's frame, NaN for those that are not before it."""
        focal, center, coefficients = self._perspective()
        points = np.asarray(points, dtype=np.float64).reshape(-1, 3)
        plane = points[:, :2] / np.where(points[:, 2:] >= np.finfo(np.float64).eps, points[:, 2:], np.nan)
        return np.asarray(focal * _bent(plane, coefficients) + center)

    def rescale(self, width: int, height: int) -> None:
        """Scale the camera to images of another size."""
        x, y = width / self.width, height / self.height
        focals = [x, y] if self._focals == 2 else [(x + y) / 2]
        self.params = self.params * np.array([*focals, x, y, *[1.0] * _MODELS[self.model][2]])
        self.width, self.height = width, height

    def _perspective(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Return focal length, principal point, FULL_OPENCV's coefficients. Raises ResourceError for other lenses."""
        if self.model_name not in _OPENCV:
            raise _missing(f"the {self.model_name} lens ({self.params_to_string()}) cannot be undone")
        first, coefficients = self._focals, np.zeros(8)
        coefficients[_OPENCV[self.model_name]] = self.params[first + 2 :]
        return self.params[[0, first - 1]], self.params[first : first + 2], coefficients


def _bent(plane: NDArray[np.float64], coefficients: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return points [N, 2] of the plane z = 1 as OpenCV's distortion moves them. coefficients: k1 k2 p1 p2 k3 to k6."""
    k1, k2, p1, p2, k3, k4, k5, k6 = coefficients
    x, y = plane.T
    r2 = x * x + y * y
    radial = (1.0 + r2 * (k1 + r2 * (k2 + r2 * k3))) / (1.0 + r2 * (k4 + r2 * (k5 + r2 * k6)))
    return np.column_stack(
        [
            x * radial + 2.0 * p1 * x * y + p2 * (r2 + 2.0 * x * x),
            y * radial + 2.0 * p2 * x * y + p1 * (r2 + 2.0 * y * y),
        ]
    )


def _straightened(bent: NDArray[np.float64], coefficients: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the points [N, 2] that _bent() moves to ``bent``, by Newton's method; NaN where it does not arrive."""
    plane, last = bent.copy(), np.full(len(bent), np.inf)
    with np.errstate(all="ignore"):
        for _ in range(_STEPS):
            slopes = [
                (_bent(plane + step, coefficients) - _bent(plane - step, coefficients)) / (2.0 * _SLOPE)
                for step in (np.array([_SLOPE, 0.0]), np.array([0.0, _SLOPE]))
            ]
            (a, c), (b, d) = (slope.T for slope in slopes)
            x, y = (_bent(plane, coefficients) - bent).T
            step = np.column_stack([d * x - b * y, a * y - c * x]) / (a * d - b * c)[:, None]
            plane, last = plane - step, np.hypot(*step.T)
            if (last <= _ARRIVED).all():
                break
    return np.where((last <= _ARRIVED)[:, None], plane, np.nan)


class Rotation3d:
    """A rotation by a unit quaternion x y z w."""

    def __init__(self, xyzw: NDArray[np.float64]) -> None:
        self._xyzw = xyzw

    def matrix(self) -> NDArray[np.float64]:
        """Return [3, 3]."""
        x, y, z, w = map(float, self._xyzw)
        return np.array(
            [
                [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
                [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
                [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
            ]
        )


class UndistortCameraOptions:
    """Options of undistort_camera(): those that are COLMAP's defaults."""


def undistort_camera(options: UndistortCameraOptions, camera: Camera) -> Camera:
    """Return COLMAP's pinhole for a lens: of its focal length, as large as it has no pixel that the lens does not show.

    The outermost rows and columns of pixels are followed: each side of the pinhole's image ends where the innermost of
    them lies. Raises ValueError for a distortion that cannot be undone.
    """
    focal, center, coefficients = camera._perspective()
    width, height = camera.width, camera.height
    if not coefficients.any():
        return Camera("PINHOLE", width, height, [*focal, *center])

    def border(x: Any, y: Any) -> NDArray[np.float64]:
        plane = camera.cam_from_img(np.column_stack(np.broadcast_arrays(x, y)))
        if not np.isfinite(plane).all():
            raise ValueError("the distortion has no inverse at the border of the image")
        return focal * plane + center

    rows, columns = np.arange(height) + 0.5, np.arange(width) + 0.5
    low = np.array([border(0.5, rows)[:, 0].max(), border(columns, 0.5)[:, 1].max()])
    high = np.array([border(width - 0.5, rows)[:, 0].min(), border(columns, height - 0.5)[:, 1].min()])
    size = np.array([width, height])
    scale = 1.0 / np.maximum(center / (center - low), (size - 0.5 - center) / (high - center))
    made = np.maximum(1, (size * np.clip(scale, *_SCALES)).astype(int))
    return Camera("PINHOLE", int(made[0]), int(made[1]), [*focal, *(center * made / size)])
