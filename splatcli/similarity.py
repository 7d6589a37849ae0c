"""Similarities: rotation, scale and shift of points, for what moves models, scenes and cameras."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def uniform_scale(matrix: Floats, tolerance: float) -> float:
    """Return the factor of a matrix [3, 3] that is a rotation times a factor; 1 where it is none or a rotation.

    tolerance: how far M^T M, divided by the factor's square, may be from the identity.
    """
    with np.errstate(all="ignore"):  # of numbers that are not finite nothing below is true
        gram = matrix.T @ matrix
        square = float(np.trace(gram)) / 3
        is_scaled = np.abs(gram - np.eye(3)).max() > tolerance
        return math.sqrt(square) if is_scaled and np.abs(gram / square - np.eye(3)).max() <= tolerance else 1.0


def rigid(matrix: Floats, tolerance: float) -> Floats:
    """Return a camera's matrix [4, 4], for column vectors, if it is a rotation R and a shift. Raise ValueError.

    tolerance: how far R R^T may be from the identity.
    """
    rotation = matrix[:3, :3]
    with np.errstate(all="ignore"):  # of huge numbers the products are none
        orthonormal = np.isfinite(matrix).all() and np.allclose(rotation @ rotation.T, np.eye(3), atol=tolerance)
    if not orthonormal:
        raise ValueError("the pose scales or shears: its rotation part is not orthonormal")
    if not np.linalg.det(rotation) > 0:
        raise ValueError("the pose mirrors: its rotation part has determinant -1")
    if not np.allclose(matrix[3], (0.0, 0.0, 0.0, 1.0), atol=1e-6):
        raise ValueError("the pose's last row is not 0 0 0 1")
    return matrix


@dataclass(frozen=True, slots=True, eq=False)
class Similarity:
    """The map x -> scale * rotation @ x + shift, in float64. The default maps everything to itself."""

    scale: float = 1.0
    rotation: Floats = field(default_factory=lambda: np.eye(3))
    shift: Floats = field(default_factory=lambda: np.zeros(3))

    @classmethod
    def euler(cls, degrees: Sequence[float]) -> Similarity:
        """Return the rotation about the fixed x axis, then about the fixed y axis, then about the fixed z axis."""
        total = np.eye(3)
        for axis, angle in enumerate(degrees):
            c, s = _cos_sin(angle)
            turn = np.eye(3)
            i, j = (axis + 1) % 3, (axis + 2) % 3
            turn[i, i], turn[i, j], turn[j, i], turn[j, j] = c, -s, s, c
            total = turn @ total
        return cls(rotation=total)

    @classmethod
    def of_pairs(cls, old: Floats, new: Floats) -> Similarity:
        """Return the least squares similarity from ``old`` to ``new`` [N, 3] (Umeyama)."""
        a, b = old.mean(axis=0), new.mean(axis=0)
        u, extents, v = np.linalg.svd((new - b).T @ (old - a))
        signs = np.array([1.0, 1.0, np.sign(np.linalg.det(u) * np.linalg.det(v))])
        rotation = (u * signs) @ v
        spread = float(((old - a) ** 2).sum())
        scale = float((extents * signs).sum()) / spread if spread > 0 else 1.0
        return cls(scale, rotation, b - scale * rotation @ a)

    def __call__(self, points: Floats) -> Floats:
        """Return points [N, 3], moved."""
        return np.asarray(self.scale * points @ self.rotation.T + self.shift)

    @property
    def is_identity(self) -> bool:
        return self.scale == 1.0 and not self.turns and not self.shift.any()

    @property
    def turns(self) -> bool:
        """Whether the rotation is more than none."""
        return not np.array_equal(self.rotation, np.eye(3))

    def after(self, first: Similarity) -> Similarity:
        """Return the map that applies ``first`` and then this one."""
        shift = self.scale * (self.rotation @ first.shift) + self.shift
        return Similarity(self.scale * first.scale, self.rotation @ first.rotation, shift)

    def matrix(self) -> Floats:
        """Return [4, 4], for column vectors."""
        full = np.eye(4)
        full[:3, :3] = self.scale * self.rotation
        full[:3, 3] = self.shift
        return full


def _cos_sin(degrees: float) -> tuple[float, float]:
    """Return cosine and sine, exact for multiples of a quarter turn."""
    quarters = degrees / 90.0
    if quarters == round(quarters):
        return ((1.0, 0.0), (0.0, 1.0), (-1.0, 0.0), (0.0, -1.0))[round(quarters) % 4]
    return math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
