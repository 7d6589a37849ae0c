"""Pose corrections: six numbers that move a camera, and the gradient of a loss in them (docs/math.md 3.8)."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from splatcli.scene.camera import Camera, product

#: Below this angle, in radians, the series of the coefficients are exact to double precision.
_SMALL = 1e-4


def moved(camera: Camera, delta: NDArray[np.float64]) -> Camera:
    """``camera`` turned about its own centre and then shifted, both in its own axes.

    delta: [6], a rotation vector in radians and a translation in world units. Zeros give the very same bits.
    """
    if not delta.any():
        return camera
    rotation, _ = _exponential(delta[:3])
    viewmat = camera.viewmat.copy()
    viewmat[:3] = product(rotation, camera.viewmat[:3])
    viewmat[:3, 3] += delta[3:]
    return replace(camera, viewmat=viewmat)


def delta_gradient(camera: Camera, delta: NDArray[np.float64], v_viewmat: NDArray[np.float64]) -> NDArray[np.float64]:
    """[6] gradient in ``delta``, from v_viewmat [4, 4], that in the matrix of ``moved(camera, delta)``."""
    rotation, jacobian = _exponential(delta[:3])
    turned = product(rotation, camera.viewmat[:3])
    v_turn = np.cross(turned.T, v_viewmat[:3].T).sum(axis=0)
    return np.concatenate([product(jacobian.T, v_turn[:, None])[:, 0], v_viewmat[:3, 3]])


def _exponential(vector: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The rotation of a rotation vector, and the left Jacobian: R(w + dw) = R(J dw) R(w) to first order."""
    x, y, z = vector
    cross = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    angle2 = float(x * x + y * y + z * z)
    angle = math.sqrt(angle2)
    if angle < _SMALL:
        sine, cosine, rest = 1.0 - angle2 / 6.0, 0.5 - angle2 / 24.0, 1.0 / 6.0 - angle2 / 120.0
    else:
        sine = math.sin(angle) / angle
        cosine = 2.0 * (math.sin(0.5 * angle) / angle) ** 2
        rest = (1.0 - sine) / angle2
    square = product(cross, cross)
    return np.eye(3) + sine * cross + cosine * square, np.eye(3) + cosine * cross + rest * square
