"""The solids of the scene: where a ray meets them, their normals, and the charts on which their light is baked."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np

from courtyard_maker.pattern import Array, Floats

FAR = np.float32(1e9)
_MARCH_STEPS = 160
_MARCH_EPSILON = 2e-4


@dataclass(frozen=True, slots=True)
class Patch:
    """One rectangle of a light chart: rows by columns texels; columns may wrap around, rows may too (a torus)."""

    rows: int
    columns: int
    wrap_columns: bool = False
    wrap_rows: bool = False


class Shape(Protocol):
    """A surface in its own frame (metres). Points and directions are [N, 3] float32."""

    @property
    def radius(self) -> float:
        """Of a sphere around the origin that holds the shape; inf switches culling off."""

    def hit(self, origin: Array, direction: Array) -> Array:
        """[N] distance to the first meeting in front of the origin, or FAR."""

    def distance(self, p: Array) -> Array:
        """[N] a signed distance bound, negative inside the solid."""

    def normal(self, p: Array) -> Array:
        """[N, 3] unit normals at surface points."""

    def patches(self) -> list[Patch]:
        """The chart's rectangles."""

    def chart(self, p: Array, normal: Array) -> tuple[Array, Array, Array]:
        """Which patch each surface point lies on, and its u (columns) and v (rows) there, 0..1."""

    def surface(self, patch: int, u: Array, v: Array) -> Array:
        """[N, 3] the surface point at chart coordinates u, v: the inverse of `chart`."""


def _unit(v: Array) -> Array:
    return np.asarray(v / np.maximum(np.linalg.norm(v, axis=1, keepdims=True), 1e-12), np.float32)


def _turn(x: Array, y: Array) -> Array:
    """[N] the angle of (x, y) as a fraction of a turn, 0..1."""
    return np.asarray(np.arctan2(y, x) / (2 * np.pi) % 1.0, np.float32)


def _stack(x: Floats, y: Floats, z: Floats) -> Array:
    return np.stack([x, y, z], 1).astype(np.float32)


def _march(shape: Shape, half_height: float, origin: Array, direction: Array) -> Array:
    """Sphere tracing inside the bounding sphere and |z| <= half_height, where a meeting has no handy closed form."""
    half_b = np.einsum("ij,ij->i", origin, direction)
    root = np.sqrt(np.maximum(half_b**2 - np.einsum("ij,ij->i", origin, origin) + shape.radius**2, 0.0))
    dz = np.where(np.abs(direction[:, 2]) < 1e-9, np.float32(1e-9), direction[:, 2])
    middle, reach = -origin[:, 2] / dz, np.float32(half_height + 1e-4) / np.abs(dz)
    t = np.maximum(np.maximum(-half_b - root, middle - reach), 0.0)
    end = np.minimum(-half_b + root, middle + reach)
    result = np.full(len(t), FAR, np.float32)
    active = np.flatnonzero(end > t)
    for _ in range(_MARCH_STEPS):
        if not len(active):
            break
        d = shape.distance(origin[active] + direction[active] * t[active, None])
        close = d < _MARCH_EPSILON
        result[active[close]] = t[active[close]]
        active, d = active[~close], d[~close]
        t[active] += d
        active = active[t[active] < end[active]]
    return result


@dataclass(frozen=True, slots=True)
class Sphere:
    """A ball around the origin."""

    radius: float

    def hit(self, origin: Array, direction: Array) -> Array:
        half_b = np.einsum("ij,ij->i", origin, direction)
        d = half_b**2 - np.einsum("ij,ij->i", origin, origin) + np.float32(self.radius**2)
        t = -half_b - np.sqrt(np.maximum(d, 0.0))
        return np.where((d > 0) & (t > 0), t, FAR)

    def distance(self, p: Array) -> Array:
        return np.asarray(np.linalg.norm(p, axis=1) - self.radius, np.float32)

    def normal(self, p: Array) -> Array:
        return _unit(p)

    def patches(self) -> list[Patch]:
        return [Patch(32, 64, wrap_columns=True)]

    def chart(self, p: Array, normal: Array) -> tuple[Array, Array, Array]:
        v = np.arccos(np.clip(normal[:, 2], -1, 1)) / np.pi
        return np.zeros(len(p), np.float32), _turn(p[:, 0], p[:, 1]), np.asarray(v, np.float32)

    def surface(self, patch: int, u: Array, v: Array) -> Array:
        ring, a = np.sin(v * np.pi), u * 2 * np.pi
        return np.float32(self.radius) * _stack(ring * np.cos(a), ring * np.sin(a), np.cos(v * np.pi))


@dataclass(frozen=True, slots=True)
class Box:
    """A cuboid around the origin, given by its half sizes."""

    half: tuple[float, float, float]

    @property
    def radius(self) -> float:
        return float(np.linalg.norm(self.half))

    def hit(self, origin: Array, direction: Array) -> Array:
        half = np.array(self.half, np.float32)
        inverse = 1.0 / np.where(np.abs(direction) < 1e-9, np.float32(1e-9), direction)
        reach = np.abs(inverse) * half
        near = (-origin * inverse - reach).max(1)
        far = (-origin * inverse + reach).min(1)
        return np.where((near < far) & (near > 0), near, FAR)

    def distance(self, p: Array) -> Array:
        q = np.abs(p) - np.array(self.half, np.float32)
        outside = np.linalg.norm(np.maximum(q, 0.0), axis=1)
        return np.asarray(outside + np.minimum(q.max(1), 0.0), np.float32)

    def normal(self, p: Array) -> Array:
        axis = (np.abs(p) - np.array(self.half, np.float32)).argmax(1)
        n = np.zeros_like(p)
        rows = np.arange(len(p))
        n[rows, axis] = np.sign(p[rows, axis])
        return n

    def patches(self) -> list[Patch]:
        return [Patch(28, 28)] * 6

    def chart(self, p: Array, normal: Array) -> tuple[Array, Array, Array]:
        axis = np.abs(normal).argmax(1)
        rows = np.arange(len(p))
        first, second = (axis + 1) % 3, (axis + 2) % 3
        half = np.array(self.half, np.float32)
        patch = axis * 2 + (normal[rows, axis] < 0)
        u, v = p[rows, first] / half[first] * 0.5 + 0.5, p[rows, second] / half[second] * 0.5 + 0.5
        return patch.astype(np.float32), u, v

    def surface(self, patch: int, u: Array, v: Array) -> Array:
        axis, negative = divmod(patch, 2)
        p = np.zeros((len(u), 3), np.float32)
        p[:, axis] = self.half[axis] * (-1 if negative else 1)
        p[:, (axis + 1) % 3] = (2 * u - 1) * self.half[(axis + 1) % 3]
        p[:, (axis + 2) % 3] = (2 * v - 1) * self.half[(axis + 2) % 3]
        return p


@dataclass(frozen=True, slots=True)
class Lathe:
    """A body of revolution about z with flat ends; its outline is a smooth curve through evenly spaced radii.

    outline: radii from z = -half_height to z = +half_height; two equal ones make a cylinder.
    """

    outline: tuple[float, ...]
    half_height: float

    @property
    def radius(self) -> float:
        return float(np.hypot(max(self.outline) * 1.1, self.half_height))

    def profile(self, z: Array) -> tuple[Array, Array]:
        """[N] the radius at height z and its slope dr/dz: a Catmull-Rom curve through the outline."""
        knots = np.array([self.outline[0], *self.outline, self.outline[-1]], np.float32)
        spans = len(self.outline) - 1
        x = np.clip((z / self.half_height * 0.5 + 0.5) * spans, 0, spans - 1e-4)
        k = x.astype(np.int32)
        s = x - k
        a, b, c, d = knots[k], knots[k + 1], knots[k + 2], knots[k + 3]
        c1, c2, c3 = 0.5 * (c - a), a - 2.5 * b + 2 * c - 0.5 * d, 1.5 * (b - c) + 0.5 * (d - a)
        slope = (c1 + s * (2 * c2 + s * 3 * c3)) * spans / (2 * self.half_height)
        return b + s * (c1 + s * (c2 + s * c3)), slope

    def hit(self, origin: Array, direction: Array) -> Array:
        if len(set(self.outline)) > 1:
            return _march(self, self.half_height, origin, direction)
        return self._hit_cylinder(origin, direction, np.float32(self.outline[0]))

    def _hit_cylinder(self, origin: Array, direction: Array, r: np.float32) -> Array:
        ox, oy, oz = origin.T
        dx, dy, dz = direction.T
        a = np.maximum(dx * dx + dy * dy, 1e-12)
        b = ox * dx + oy * dy
        d = b * b - a * (ox * ox + oy * oy - r * r)
        side = (-b - np.sqrt(np.maximum(d, 0.0))) / a
        good = (d > 0) & (side > 0) & (np.abs(oz + side * dz) <= self.half_height)
        result = np.where(good, side, FAR)
        end = (-np.sign(dz) * np.float32(self.half_height) - oz) / np.where(np.abs(dz) < 1e-9, np.float32(1e-9), dz)
        good = (end > 0) & ((ox + end * dx) ** 2 + (oy + end * dy) ** 2 <= r * r)
        return np.minimum(result, np.where(good, end, FAR))

    def distance(self, p: Array) -> Array:
        r, _ = self.profile(p[:, 2])
        side = (np.hypot(p[:, 0], p[:, 1]) - r) / _steepness(self)
        return np.asarray(np.maximum(side, np.abs(p[:, 2]) - np.float32(self.half_height)))

    def normal(self, p: Array) -> Array:
        r, slope = self.profile(p[:, 2])
        rho = np.maximum(np.hypot(p[:, 0], p[:, 1]), 1e-9)
        side = _unit(_stack(p[:, 0] / rho, p[:, 1] / rho, -slope))
        end = _stack(0 * rho, 0 * rho, np.sign(p[:, 2]))
        at_end = np.abs(p[:, 2]) - self.half_height > rho - r
        return np.where(at_end[:, None], end, side)

    def patches(self) -> list[Patch]:
        return [Patch(24, 48, wrap_columns=True), Patch(24, 24), Patch(24, 24)]

    def chart(self, p: Array, normal: Array) -> tuple[Array, Array, Array]:
        at_end = np.abs(normal[:, 2]) > 0.999
        patch = np.where(at_end, np.where(normal[:, 2] > 0, 1, 2), 0).astype(np.float32)
        size = np.where(normal[:, 2] > 0, np.float32(self.outline[-1]), np.float32(self.outline[0])) * 2
        u = np.where(at_end, p[:, 0] / size + 0.5, _turn(p[:, 0], p[:, 1]))
        v = np.where(at_end, p[:, 1] / size + 0.5, p[:, 2] / (2 * self.half_height) + 0.5)
        return patch, u, v

    def surface(self, patch: int, u: Array, v: Array) -> Array:
        if patch:
            r, end = (self.outline[-1], self.half_height) if patch == 1 else (self.outline[0], -self.half_height)
            x, y = (2 * u - 1) * r, (2 * v - 1) * r
            # Corners of the square lie outside the disc: they take the light of the rim next to them.
            shrink = np.minimum(1.0, 0.98 * r / np.maximum(np.hypot(x, y), 1e-9))
            return _stack(x * shrink, y * shrink, np.full_like(u, end))
        z = (2 * v - 1) * np.float32(self.half_height)
        radius, _ = self.profile(z)
        return _stack(radius * np.cos(u * 2 * np.pi), radius * np.sin(u * 2 * np.pi), z)


@cache
def _steepness(body: Lathe) -> np.float32:
    """How much the radial gap overstates the distance at the steepest place of the outline."""
    _, slope = body.profile(np.linspace(-body.half_height, body.half_height, 400, dtype=np.float32))
    return np.float32(np.sqrt(1 + (slope**2).max()) * 1.02)


@dataclass(frozen=True, slots=True)
class Torus:
    """A ring about z: `ring` from the centre to the tube's middle, `tube` the tube's radius."""

    ring: float
    tube: float

    @property
    def radius(self) -> float:
        return self.ring + self.tube

    def hit(self, origin: Array, direction: Array) -> Array:
        return _march(self, self.tube, origin, direction)

    def distance(self, p: Array) -> Array:
        return np.hypot(np.hypot(p[:, 0], p[:, 1]) - np.float32(self.ring), p[:, 2]) - np.float32(self.tube)

    def normal(self, p: Array) -> Array:
        rho = np.maximum(np.hypot(p[:, 0], p[:, 1]), 1e-9)
        inward = self.ring / rho
        return _unit(_stack(p[:, 0] * (1 - inward), p[:, 1] * (1 - inward), p[:, 2]))

    def patches(self) -> list[Patch]:
        return [Patch(28, 72, wrap_columns=True, wrap_rows=True)]

    def chart(self, p: Array, normal: Array) -> tuple[Array, Array, Array]:
        rho = np.hypot(p[:, 0], p[:, 1]) - np.float32(self.ring)
        return np.zeros(len(p), np.float32), _turn(p[:, 0], p[:, 1]), _turn(rho, p[:, 2])

    def surface(self, patch: int, u: Array, v: Array) -> Array:
        a, b = u * 2 * np.pi, v * 2 * np.pi
        rho = self.ring + self.tube * np.cos(b)
        return _stack(rho * np.cos(a), rho * np.sin(a), self.tube * np.sin(b))
