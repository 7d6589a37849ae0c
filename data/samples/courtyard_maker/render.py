"""Pictures of the scene: supersampled rays, baked light, a smooth pixel filter, and the sRGB curve."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from courtyard_maker import materials
from courtyard_maker.light import LightMap, irradiance, sun_direction
from courtyard_maker.pattern import Array
from courtyard_maker.world import DOME, Hits, cast, things

SAMPLES = 4  # a pixel and axis
_FILTER_SIGMA = 0.45  # pixels
_SHININESS = 12.0


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """A pinhole camera with OpenCV axes: focal length and size in pixels, the principal point in the middle.

    rotation: [3, 3], centre: [3]; x_camera = rotation @ (x_world - centre).
    """

    name: str
    width: int
    height: int
    focal: float
    rotation: NDArray[np.float64]
    centre: NDArray[np.float64]

    def rays(self, pixels: NDArray[np.float64]) -> tuple[Array, Array]:
        """Origins and unit directions [N, 3] in the world through pixel positions [N, 2] (centres at +0.5)."""
        middle = np.array([self.width, self.height]) / 2
        d = np.concatenate([(pixels - middle) / self.focal, np.ones((len(pixels), 1))], 1) @ self.rotation
        d /= np.linalg.norm(d, axis=1, keepdims=True)
        return np.tile(self.centre, (len(d), 1)).astype(np.float32), d.astype(np.float32)

    def project(self, points: NDArray[np.floating]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Pixel positions [N, 2] and depths [N] of world points [N, 3]."""
        p = (np.asarray(points, np.float64) - self.centre) @ self.rotation.T
        return p[:, :2] / p[:, 2:] * self.focal + np.array([self.width, self.height]) / 2, p[:, 2]

    def shrunk(self, factor: int) -> View:
        """The same view with pixels `factor` times as large."""
        size = self.width // factor, self.height // factor
        return View(self.name, *size, self.focal / factor, self.rotation, self.centre)


def shade(hits: Hits, directions: Array, light: LightMap) -> Array:
    """[N, 3] linear radiance towards the ray's origin; directions: [N, 3] of the rays."""
    out = np.empty((len(hits.t), 3), np.float32)
    sky = hits.thing == DOME
    out[sky] = materials.dome(hits.points[sky])
    for k, item in enumerate(things()):
        rows = np.flatnonzero(hits.thing == k)
        if not len(rows):
            continue
        own = item.own(hits.points[rows])
        own_normal = item.shape.normal(own)
        normal = own_normal @ item.rotation.T
        baked = light.at(k, own, own_normal)
        out[rows] = item.albedo(own, own_normal) * irradiance(baked, normal) / np.float32(np.pi)
        if item.gloss:
            d = directions[rows]
            mirrored = d - 2 * np.einsum("ij,ij->i", d, normal)[:, None] * normal
            shine = np.maximum(mirrored @ sun_direction(), 0.0) ** np.float32(_SHININESS) * baked[:, 0]
            out[rows] += (item.gloss * shine)[:, None]
    return out


def to_srgb(linear: Array) -> NDArray[np.uint8]:
    """Linear light, clipped to 0..1, as sRGB bytes."""
    x = np.clip(linear, 0.0, 1.0)
    curve = np.where(x <= 0.0031308, 12.92 * x, 1.055 * x ** (1 / 2.4) - 0.055)
    return np.round(curve * 255.0).astype(np.uint8)


def render(view: View, light: LightMap) -> NDArray[np.uint8]:
    """[H, W, 3] sRGB image: a regular grid of rays a pixel, one pixel of margin, weighed by a Gaussian filter."""
    width, height = (view.width + 2) * SAMPLES, (view.height + 2) * SAMPLES
    fine = np.empty((height, width, 3), np.float32)
    x = (np.arange(width) + 0.5) / SAMPLES - 1.0
    rows_at_once = max(1, 100_000 // width)
    for start in range(0, height, rows_at_once):
        y = (np.arange(start, min(start + rows_at_once, height)) + 0.5) / SAMPLES - 1.0
        pixels = np.stack(np.meshgrid(x, y), -1).reshape(-1, 2)
        origins, directions = view.rays(pixels)
        hits = cast(origins, directions)
        fine[start : start + len(y)] = shade(hits, directions, light).reshape(len(y), width, 3)
    return to_srgb(_filtered(_filtered(fine).transpose(1, 0, 2)).transpose(1, 0, 2))


def _filtered(fine: Array) -> Array:
    """Rows brought to pixel resolution: each pixel weighs the samples within 1.5 pixels of its centre."""
    count = fine.shape[0] // SAMPLES - 2
    offsets = (np.arange(3 * SAMPLES) + 0.5) / SAMPLES - 1.5
    weights = np.exp(-0.5 * (offsets / _FILTER_SIGMA) ** 2)
    weights = (weights / weights.sum()).astype(np.float32)
    out = np.zeros((count, *fine.shape[1:]), np.float32)
    for k, weight in enumerate(weights):
        out += weight * fine[k : k + count * SAMPLES : SAMPLES]
    return out
