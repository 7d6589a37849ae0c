"""Lenses of other programs as COLMAP cameras: Brown's model, and the fisheye model nearest to any other lens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.source import Entry

#: Pixels by which a polynomial of degree 8 may be approximated, and any other lens that COLMAP has no model for.
_POLYNOMIAL_TOLERANCE, _FISHEYE_TOLERANCE = 0.05, 0.1
#: Pixels that a skewed pixel grid may shift the image's corners, which is not corrected.
MAX_SKEW = 0.5
#: Radii at which an approximation is fitted and checked.
_RADII = 200
#: Pixels of an image's side.
_MAX_SIDE = 1_000_000
#: Larger radii than this, relative to the focal length, cannot be squared; none is near it.
_FARTHEST = 1e150
#: A distorted image shows this much more than its corners say, in radius.
_MARGIN = 1.2


@dataclass(frozen=True, slots=True)
class Brown:
    """x' = x (1 + k1 r^2 + k2 r^4 + k3 r^6 + k4 r^8) + 2 p1 x y + p2 (r^2 + 2 x^2), and y' with p1 and p2 exchanged.

    fx, fy, cx, cy: pixels from the upper left corner. radial: k1 to k4. tangential: p1, p2 in OpenCV's order.
    """

    fx: float
    fy: float
    cx: float
    cy: float
    radial: Sequence[float] = ()
    tangential: Sequence[float] = (0.0, 0.0)

    def camera(self, width: int, height: int, entry: Entry) -> pycolmap.Camera:
        """Return the lens as PINHOLE, OPENCV or FULL_OPENCV. Raises SceneError where none of them comes near it."""
        k1, k2, k3, k4 = [*self.radial, 0.0, 0.0, 0.0, 0.0][:4]
        p1, p2 = self.tangential
        head = [self.fx, self.fy, self.cx, self.cy]
        if not any((k1, k2, k3, k4, p1, p2)):
            return colmap_camera("PINHOLE", width, height, head, entry)
        if not (k3 or k4):
            return colmap_camera("OPENCV", width, height, [*head, k1, k2, p1, p2], entry)
        a, b = [k1, k2, k3], [0.0, 0.0, 0.0]
        if k4 and self.fx > 0 and self.fy > 0:  # undistort.py refuses other focal lengths
            a, b = self._rational(width, height, np.array([k1, k2, k3, k4]), entry)
        return colmap_camera("FULL_OPENCV", width, height, [*head, a[0], a[1], p1, p2, a[2], *b], entry)

    def _rational(
        self, width: int, height: int, k: NDArray[np.float64], entry: Entry
    ) -> tuple[list[float], list[float]]:
        """Return the quotient nearest to the polynomial of degree 8: three coefficients above, and three below."""
        corner = math.hypot(
            max(self.cx, width - self.cx) / self.fx,
            max(self.cy, height - self.cy) / self.fy,
        )
        largest = (_MARGIN * min(corner, _FARTHEST)) ** 2
        s = np.linspace(0, 1, _RADII + 1)[1:]
        powers = np.stack([s, s**2, s**3], axis=1)
        with np.errstate(all="ignore"):  # what is too large is not finite
            wanted = 1 + np.stack([s, s**2, s**3, s**4], axis=1) @ (k * largest ** np.arange(1, 5))
            system = np.concatenate([powers, -wanted[:, None] * powers], axis=1)
            solvable = bool(np.isfinite(system).all())
            found = np.linalg.lstsq(system, wanted - 1, rcond=None)[0] if solvable else np.zeros(6)
            above, below = 1 + powers @ found[:3], 1 + powers @ found[3:]
            off = float(np.abs(above / below - wanted).max()) * math.sqrt(largest) * max(self.fx, self.fy)
        off = off if math.isfinite(off) else math.inf
        if not (off <= _POLYNOMIAL_TOLERANCE and below.min() > 0):
            raise entry.error(
                f"its lens has a term of degree 8 (k4) that no model of COLMAP has, and is {off:.2g} pixels away from "
                "the nearest one",
                "calibrate without k4 (Brown with three radial terms), or export undistorted images",
            )
        scale = largest ** np.arange(1, 4)
        return list(map(float, found[:3] / scale)), list(map(float, found[3:] / scale))


def colmap_camera(model: str, width: int, height: int, params: Sequence[float], entry: Entry) -> pycolmap.Camera:
    """Return a camera of a COLMAP model with these parameters. Raises SceneError for a size that no image has."""
    if not (0 < width <= _MAX_SIDE and 0 < height <= _MAX_SIDE):
        raise entry.error(f"its images are {width} by {height} pixels", "correct the file, or export again")
    camera = pycolmap.Camera.create_from_model_name(pycolmap.INVALID_CAMERA_ID, model, 1.0, width, height)
    camera.params = list(params)
    return camera


# --- the nearest fisheye ---

#: Six radial, two tangential and four thin prism coefficients.
_MODEL, _COEFFICIENTS = "RAD_TAN_THIN_PRISM_FISHEYE", 12
#: Powers of the angle that the coefficients stand before, relative to the first.
_POWERS = np.array([2, 4, 6, 8, 10, 12, 1, 1, 1, 3, 1, 3])
#: Directions at which a lens is fitted and checked: angles from the axis times turns about it.
_ANGLES, _TURNS = 64, 16
#: Pixels that no lens shows anything at, so that a fit would be of no use.
_HUGE = 1e7
#: Fits, each with weights by the residuals of the last one.
_ROUNDS = 4
#: A lens is fitted up to this part of the way from the principal point to the farthest corner.
_SEEN = 1.02
#: Angle from the axis up to which a lens is checked: pinhole views show nothing behind.
_WIDEST = 0.499 * math.pi


def angles_of(rays: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [N, 2], the directions of rays [N, 3] as their angles from the optical axis, along x and along y."""
    across = np.linalg.norm(rays[:, :2], axis=1)
    scale = np.arctan2(across, rays[:, 2]) / np.maximum(across, np.finfo(np.float64).tiny)
    return np.asarray(rays[:, :2] * scale[:, None])


def nearest_fisheye(
    project: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    head: Sequence[float],
    width: int,
    height: int,
    entry: Entry,
) -> pycolmap.Camera:
    """Return the lens of COLMAP nearest to another one. Raises SceneError where that is not near.

    project: [N, 3] rays to [N, 2] pixels. head: fx, fy, cx and cy to start from, pixels per radian.
    """
    with np.errstate(all="ignore"):
        rays = _rays(_reach(project, np.array(head[2:]), np.array([width, height])))
        wanted = project(rays)
    largest = float(np.linalg.norm(angles_of(rays), axis=1).max())

    def lens(unknowns: NDArray[np.float64]) -> pycolmap.Camera:
        focal, coefficients = unknowns[:2] * head[:2], unknowns[2:] / largest**_POWERS
        return colmap_camera(_MODEL, width, height, [*focal, *head[2:], *coefficients], entry)

    def residuals(unknowns: NDArray[np.float64]) -> NDArray[np.float64]:
        found: Any = lens(unknowns).img_from_cam(rays)
        return np.asarray(found - wanted)

    found, off = np.concatenate([np.ones(2), np.zeros(_COEFFICIENTS)]), math.inf
    weights = np.ones((len(rays), 1))
    for _ in range(_ROUNDS if np.abs(wanted).max() < _HUGE else 0):
        # Weights by the last residuals make least squares the least maximum, nearly. Every second direction is for the
        # check alone.
        roots = np.sqrt(weights)
        found = scipy.optimize.least_squares(
            lambda unknowns, roots=roots: (roots * residuals(unknowns))[::2].ravel(), found, method="lm"
        ).x
        lengths = np.abs(residuals(found)).max(axis=1, keepdims=True)
        off = float(lengths.max())
        weights *= lengths + np.finfo(np.float64).eps
        weights /= weights.mean()
    if not off <= _FISHEYE_TOLERANCE:
        raise entry.error(
            f"its lens is {off:.2g} pixels away from the nearest one of COLMAP's models",
            "export undistorted images with their cameras, for example as a COLMAP model",
        )
    return lens(found)


def _rays(widest: float) -> NDArray[np.float64]:
    """Return [_ANGLES * _TURNS, 3] unit rays up to an angle from the axis."""
    angles, turns = np.meshgrid(
        np.linspace(0, widest, _ANGLES + 1)[1:], np.linspace(0, 2 * math.pi, _TURNS + 1)[:-1], indexing="ij"
    )
    across = np.sin(angles)
    return np.stack([across * np.cos(turns), across * np.sin(turns), np.cos(angles)], axis=-1).reshape(-1, 3)


def _reach(
    project: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    center: NDArray[np.float64],
    size: NDArray[np.float64],
) -> float:
    """Return the angle from the axis beyond which a lens shows nothing in its image."""
    offsets = np.linalg.norm(project(_rays(_WIDEST)) - center, axis=1).reshape(_ANGLES, _TURNS)
    corner = float(np.linalg.norm(np.maximum(center, size - center)))
    seen = np.logical_and.accumulate(offsets <= _SEEN * corner).any(axis=1)
    return _WIDEST * min(_ANGLES, int(seen.sum()) + 1) / _ANGLES
