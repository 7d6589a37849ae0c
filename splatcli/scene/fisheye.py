"""Lenses that no model of COLMAP has, as the nearest lens of its richest fisheye model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from splatcli.errors import SceneError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.brown import colmap_camera

#: Pixels by which the nearest lens may be off.
NEAR = 0.1
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
    where: object,
    label: str,
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
        return colmap_camera(_MODEL, width, height, [*focal, *head[2:], *coefficients], where, label)

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
    if not off <= NEAR:
        raise SceneError(
            f"{label}: its lens is {off:.2g} pixels away from the nearest one of COLMAP's models",
            where=where,
            remedy="export undistorted images with their cameras, for example as a COLMAP model",
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
