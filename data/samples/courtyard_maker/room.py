"""The surroundings of the solids: the paved floor, the round wall, and the dome of sky and hills behind it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from courtyard_maker.pattern import Array
from courtyard_maker.shapes import FAR, Patch


@dataclass(frozen=True, slots=True)
class Floor:
    """The disc z = 0 seen from above."""

    size: float
    radius: float = float("inf")

    def hit(self, origin: Array, direction: Array) -> Array:
        down = direction[:, 2] < -1e-6
        t = -origin[:, 2] / np.where(down, direction[:, 2], np.float32(-1))
        p = origin[:, :2] + direction[:, :2] * t[:, None]
        return np.where(down & (t > 0) & ((p**2).sum(1) <= self.size**2), t, FAR)

    def distance(self, p: Array) -> Array:
        return p[:, 2]

    def normal(self, p: Array) -> Array:
        return np.tile(np.array([0, 0, 1], np.float32), (len(p), 1))

    def patches(self) -> list[Patch]:
        return [Patch(300, 300)]

    def chart(self, p: Array, normal: Array) -> tuple[Array, Array, Array]:
        # Texels are finest in the middle, where the shadows are: x = size * (0.4 s + 0.6 s^3), here inverted.
        s = np.linspace(-1, 1, 4001)
        x = self.size * (0.4 * s + 0.6 * s**3)
        u, v = (np.interp(p[:, k], x, s * 0.5 + 0.5).astype(np.float32) for k in (0, 1))
        return np.zeros(len(p), np.float32), u, v

    def surface(self, patch: int, u: Array, v: Array) -> Array:
        x, y = (self.size * (0.4 * s + 0.6 * s**3) for s in (2 * u - 1, 2 * v - 1))
        shrink = np.minimum(1.0, 0.99 * self.size / np.maximum(np.hypot(x, y), 1e-9))
        return np.stack([x * shrink, y * shrink, np.zeros_like(x)], 1).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Wall:
    """The inside of an upright cylinder that stands on the floor."""

    size: float
    height: float
    radius: float = float("inf")

    def hit(self, origin: Array, direction: Array) -> Array:
        a = np.maximum((direction[:, :2] ** 2).sum(1), 1e-12)
        b = (origin[:, :2] * direction[:, :2]).sum(1)
        d = b * b - a * ((origin[:, :2] ** 2).sum(1) - np.float32(self.size**2))
        t = (-b + np.sqrt(np.maximum(d, 0.0))) / a
        z = origin[:, 2] + t * direction[:, 2]
        return np.where((d > 0) & (t > 0) & (z >= 0) & (z <= self.height), t, FAR)

    def distance(self, p: Array) -> Array:
        inside = np.float32(self.size) - np.hypot(p[:, 0], p[:, 1])
        return np.where(p[:, 2] > self.height, np.abs(p[:, 2] - self.height), inside)

    def normal(self, p: Array) -> Array:
        rho = np.maximum(np.hypot(p[:, 0], p[:, 1]), 1e-9)
        return np.stack([-p[:, 0] / rho, -p[:, 1] / rho, 0 * rho], 1).astype(np.float32)

    def patches(self) -> list[Patch]:
        return [Patch(32, 400, wrap_columns=True)]

    def chart(self, p: Array, normal: Array) -> tuple[Array, Array, Array]:
        u = np.arctan2(p[:, 1], p[:, 0]) / (2 * np.pi) % 1.0
        return np.zeros(len(p), np.float32), u.astype(np.float32), p[:, 2] / np.float32(self.height)

    def surface(self, patch: int, u: Array, v: Array) -> Array:
        a = u * 2 * np.pi
        return np.stack([self.size * np.cos(a), self.size * np.sin(a), v * self.height], 1).astype(np.float32)


def dome_distance(origin: Array, direction: Array, size: float) -> Array:
    """[N] distance from points inside the dome's sphere to the dome."""
    b = np.einsum("ij,ij->i", origin, direction)
    return np.asarray(-b + np.sqrt(b * b - np.einsum("ij,ij->i", origin, origin) + np.float32(size**2)), np.float32)
