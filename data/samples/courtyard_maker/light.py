"""Light baked once for the whole scene: soft sun shadows, sky light with occlusion, and one bounce."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np

from courtyard_maker import materials
from courtyard_maker.pattern import Array, color
from courtyard_maker.shapes import Patch
from courtyard_maker.world import DOME, Hits, Thing, cast, things

SUN_ELEVATION, SUN_AZIMUTH, SUN_RADIUS = 41.0, 35.0, 5.0  # degrees; the sun is large, for soft shadows
SUN = np.float32(3.3) * color("fff0d8")  # irradiance of a surface that faces the sun
SKY_SHARE = np.float32(0.6)  # of the dome's radiance as it is seen, as light: less of it makes the shadows deeper
_LIFT = 2e-3  # metres off the surface at which its light is gathered
_BLOCK = 20_000  # texels a task
_CHANNELS = 4  # the part of the sun that is seen, and RGB irradiance from all else


@dataclass(frozen=True, slots=True)
class BakeQuality:
    """How finely the light is baked: texels of each chart side relative to the full size, rays for each texel."""

    texels: float = 1.0
    sun_rays: int = 48
    sky_rays: int = 144
    first_rays: int = 32


@dataclass(frozen=True, slots=True, eq=False)
class LightMap:
    """Baked light: for each thing a list of [rows, columns, 4] grids, one for each patch of its chart."""

    grids: tuple[tuple[Array, ...], ...]

    def at(self, thing: int, own_points: Array, own_normals: Array) -> Array:
        """[N, 4] sun seen (0..1) and RGB irradiance from elsewhere, at points of one thing, bilinear."""
        shape = things()[thing].shape
        patch, u, v = shape.chart(own_points, own_normals)
        result = np.empty((len(u), _CHANNELS), np.float32)
        for k, layout in enumerate(shape.patches()):
            rows = np.flatnonzero(patch == k)
            if len(rows):
                result[rows] = _bilinear(self.grids[thing][k], layout, u[rows], v[rows])
        return result


def sun_direction() -> Array:
    """[3] unit vector towards the sun's middle."""
    e, a = np.radians(SUN_ELEVATION), np.radians(SUN_AZIMUTH)
    return np.array([np.cos(e) * np.cos(a), np.cos(e) * np.sin(a), np.sin(e)], np.float32)


def irradiance(light: Array, normals: Array) -> Array:
    """[N, 3] RGB irradiance from baked light [N, 4] and world normals [N, 3]."""
    facing = np.maximum(normals @ sun_direction(), 0.0) * light[:, 0]
    return np.asarray(facing[:, None] * SUN + light[:, 1:], np.float32)


def _bilinear(grid: Array, layout: Patch, u: Array, v: Array) -> Array:
    rows, columns = grid.shape[:2]
    x, y = u * columns - 0.5, v * rows - 0.5
    if not layout.wrap_columns:
        x = np.clip(x, 0, columns - 1)
    if not layout.wrap_rows:
        y = np.clip(y, 0, rows - 1)
    left, top = np.floor(x).astype(np.int32), np.floor(y).astype(np.int32)
    fx, fy = (x - left)[:, None], (y - top)[:, None]
    right = (left + 1) % columns if layout.wrap_columns else np.minimum(left + 1, columns - 1)
    low = (top + 1) % rows if layout.wrap_rows else np.minimum(top + 1, rows - 1)
    left, top = left % columns, top % rows
    upper = grid[top, left] * (1 - fx) + grid[top, right] * fx
    lower = grid[low, left] * (1 - fx) + grid[low, right] * fx
    return np.asarray(upper * (1 - fy) + lower * fy, np.float32)


def _scaled(layout: Patch, factor: float) -> Patch:
    rows, columns = (max(4, round(n * factor)) for n in (layout.rows, layout.columns))
    return Patch(rows, columns, layout.wrap_columns, layout.wrap_rows)


def _frames(normals: Array) -> tuple[Array, Array]:
    """Two unit vectors that are at right angles to each normal and to each other."""
    helper = np.where(np.abs(normals[:, :1]) > 0.7, np.array([[0, 1, 0]], np.float32), np.array([[1, 0, 0]]))
    first = np.cross(normals, helper)
    first /= np.linalg.norm(first, axis=1, keepdims=True)
    return first.astype(np.float32), np.cross(normals, first).astype(np.float32)


def _disc_samples(count: int, index: int, shift: Array) -> tuple[Array, Array]:
    """One of `count` well spread points of the unit disc for each row of shift [N, 2], rotated by it: (r^2, angle)."""
    golden = 0.6180339887
    r2 = (index + shift[:, 0]) / count
    return r2.astype(np.float32), ((index * golden + shift[:, 1]) % 1.0 * 2 * np.pi).astype(np.float32)


def _sun_seen(points: Array, normals: Array, shift: Array, count: int) -> Array:
    sun = sun_direction()[None]
    first, second = _frames(sun)
    seen = np.zeros(len(points), np.float32)
    lit = np.flatnonzero(normals @ sun[0] > -0.1)
    spread = np.tan(np.radians(SUN_RADIUS))
    for k in range(count):
        r2, angle = _disc_samples(count, k, shift[lit])
        r = np.sqrt(r2) * spread
        d = sun + first * (r * np.cos(angle))[:, None] + second * (r * np.sin(angle))[:, None]
        d = (d / np.linalg.norm(d, axis=1, keepdims=True)).astype(np.float32)
        seen[lit] += cast(points[lit], d).thing == DOME
    return seen / np.float32(count)


def _gather(points: Array, normals: Array, shift: Array, count: int, known: LightMap | None, mean: Array) -> Array:
    """[N, 3] irradiance from the dome and, when the light of one bounce is known, from lit surfaces."""
    first, second = _frames(normals)
    total = np.zeros((len(points), 3), np.float32)
    for k in range(count):
        r2, angle = _disc_samples(count, k, shift)
        r = np.sqrt(r2)
        d = normals * np.sqrt(np.maximum(1 - r2, 0))[:, None]
        d = d + first * (r * np.cos(angle))[:, None] + second * (r * np.sin(angle))[:, None]
        hits = cast(points, np.asarray(d, np.float32))
        sky = np.flatnonzero(hits.thing == DOME)
        total[sky] += materials.dome(hits.points[sky]) * SKY_SHARE * np.float32(np.pi)
        if known is not None:
            total += _bounced(hits, known, mean)
    return total / np.float32(count)


def _bounced(hits: Hits, known: LightMap, mean: Array) -> Array:
    """[N, 3] radiance times pi that diffuse surfaces send on; each thing is taken to have its mean albedo."""
    out = np.zeros((len(hits.t), 3), np.float32)
    for k, item in enumerate(things()):
        rows = np.flatnonzero(hits.thing == k)
        if len(rows):
            own = item.own(hits.points[rows])
            normal = item.shape.normal(own)
            out[rows] = irradiance(known.at(k, own, normal), normal @ item.rotation.T) * mean[k]
    return out


@dataclass(frozen=True, slots=True, eq=False)
class _Texels:
    """All texels of all charts in one row: world points and normals, thing index, and where grids begin."""

    points: Array
    normals: Array
    thing: np.ndarray[tuple[int], np.dtype[np.intp]]
    free: np.ndarray[tuple[int], np.dtype[np.bool_]]
    layouts: list[list[Patch]]


def _texels(factor: float) -> _Texels:
    points, normals, thing, layouts = [], [], [], []
    for k, item in enumerate(things()):
        layouts.append([_scaled(layout, factor) for layout in item.shape.patches()])
        for n, layout in enumerate(layouts[-1]):
            v, u = np.meshgrid(
                (np.arange(layout.rows, dtype=np.float32) + 0.5) / layout.rows,
                (np.arange(layout.columns, dtype=np.float32) + 0.5) / layout.columns,
                indexing="ij",
            )
            own = item.shape.surface(n, u.ravel().astype(np.float32), v.ravel().astype(np.float32))
            normal = item.shape.normal(own)
            normals.append(normal @ item.rotation.T)
            points.append(own @ item.rotation.T + item.centre + normals[-1] * np.float32(_LIFT))
            thing.append(np.full(len(own), k))
    p, owner = np.concatenate(points).astype(np.float32), np.concatenate(thing)
    return _Texels(p, np.concatenate(normals).astype(np.float32), owner, _free(p, owner), layouts)


def _free(
    points: Array, owner: np.ndarray[tuple[int], np.dtype[np.intp]]
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which texels lie outside all other things: the others are hidden, and their darkness must not leak out."""
    free = np.ones(len(points), np.bool_)
    for k, item in enumerate(things()):
        free &= (owner == k) | (item.shape.distance(item.own(points)) > 0)
    return free


def _as_map(values: Array, texels: _Texels) -> LightMap:
    """Texel values [N, 4] as grids: hidden texels filled from their neighbours, noise lightly blurred away."""
    grids, start = [], 0
    for layouts in texels.layouts:
        mine = []
        for layout in layouts:
            end = start + layout.rows * layout.columns
            grid = values[start:end].reshape(layout.rows, layout.columns, _CHANNELS)
            weight = texels.free[start:end].reshape(layout.rows, layout.columns, 1).astype(np.float32)
            mine.append(_smoothed(grid, np.maximum(weight, 1e-4), layout))
            start = end
        grids.append(tuple(mine))
    return LightMap(tuple(grids))


def _smoothed(grid: Array, weight: Array, layout: Patch) -> Array:
    """Hidden texels (weight near 0) filled from their neighbours ring by ring, then a [1 2 1] blur both ways."""
    for _ in range(6):
        total, trust = _blur(grid * weight, layout), _blur(weight, layout)
        filled = np.where(weight > 0.5, grid, total / trust)
        weight = np.where((weight > 0.5) | (trust > 0.05), 1.0, weight).astype(np.float32)
        grid = filled.astype(np.float32)
    return _blur(grid, layout)


def _blur(grid: Array, layout: Patch) -> Array:
    for axis, wraps in ((0, layout.wrap_rows), (1, layout.wrap_columns)):
        pads = [(0, 0)] * 3
        pads[axis] = (1, 1)
        wide = np.pad(grid, pads, mode="wrap" if wraps else "edge")
        n = grid.shape[axis]
        left, right = np.take(wide, range(n), axis), np.take(wide, range(2, n + 2), axis)
        grid = np.asarray(0.25 * left + 0.5 * grid + 0.25 * right, np.float32)
    return grid


def _mean_albedo(item: Thing, points: Array, normals: Array) -> Array:
    return np.asarray(item.albedo(item.own(points), normals @ item.rotation).mean(0), np.float32)


def bake(quality: BakeQuality, rng: np.random.Generator, pool: Executor) -> LightMap:
    """The light of the whole scene: the sun and the sky first, then again with what the surfaces throw back."""
    texels = _texels(quality.texels)
    p, n = texels.points, texels.normals
    shift = rng.random((len(p), 2), np.float32)
    mean = np.stack([_mean_albedo(x, p[texels.thing == k], n[texels.thing == k]) for k, x in enumerate(things())])
    blocks = [slice(k, k + _BLOCK) for k in range(0, len(p), _BLOCK)]
    rows = [(p[b], n[b], shift[b]) for b in blocks]
    sun = [pool.submit(_sun_seen, *row, quality.sun_rays) for row in rows]
    first = [pool.submit(_gather, *row, quality.first_rays, None, mean) for row in rows]
    seen = np.concatenate([part.result() for part in sun])[:, None]
    direct = _as_map(np.hstack([seen, np.concatenate([part.result() for part in first])]), texels)
    second = [pool.submit(_gather, *row, quality.sky_rays, direct, mean) for row in rows]
    return _as_map(np.hstack([seen, np.concatenate([part.result() for part in second])]), texels)
