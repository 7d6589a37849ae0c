"""A corner of a room, three walls with texture all over, imagegraphed on an arc by casting rays."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from splatcli.scene._pycolmap import pycolmap

WIDTH, HEIGHT, FOCAL = 240, 180, 220.0
#: Texels of a wall's side, and metres of it.
_TEXELS, _SIDE = 512, 4.0


def pose(index: float) -> NDArray[np.float64]:
    """[4, 4] world to camera, OpenCV axes: steps of six degrees at 3.5 m from the corner, up and down a little."""
    angle, rise = np.radians(24 + 6 * index), 0.35 + 0.12 * (index % 3)
    direction = np.array([np.cos(angle), np.sin(angle), rise])
    return looking(3.5 * direction / np.linalg.norm(direction), at=np.array([0.3, 0.3, 0.4]))


def looking(center: NDArray[np.float64], *, at: NDArray[np.float64]) -> NDArray[np.float64]:
    """[4, 4] world to camera, OpenCV axes, of a camera at ``center`` [3] that looks to ``at`` [3]; z is up."""
    forward = (at - center) / np.linalg.norm(at - center)
    right = np.cross(forward, [0.0, 0.0, 1.0])
    right /= np.linalg.norm(right)
    made = np.eye(4)
    made[:3, :3] = np.stack([right, np.cross(forward, right), forward])
    made[:3, 3] = -made[:3, :3] @ center
    return made


def image(index: float, lens: pycolmap.Camera | None = None, *, room: int = 0) -> NDArray[np.uint8]:
    """[HEIGHT, WIDTH, 3]: the mean of 2 x 2 rays a pixel. lens: of this size; a pinhole without one.

    room: which of several corners, each with textures of its own.
    """
    x, y = np.meshgrid(*(np.arange(2 * side) / 2 + 0.25 for side in (WIDTH, HEIGHT)))
    rays = np.stack([(x - WIDTH / 2) / FOCAL, (y - HEIGHT / 2) / FOCAL, np.ones(x.shape)], axis=-1)
    if lens is not None:
        rays[..., :2] = lens.cam_from_img(np.stack([x.ravel(), y.ravel()], axis=1)).reshape(*x.shape, 2)
    matrix = pose(index)
    center = -matrix[:3, :3].T @ matrix[:3, 3]
    rays = rays @ matrix[:3, :3]
    with np.errstate(divide="ignore"):
        depth = np.where(rays < 0, -center / rays, np.inf)
    wall = depth.argmin(axis=-1)
    hit = center + depth.min(axis=-1, keepdims=True) * rays
    picture = np.zeros(hit.shape)
    for axis in range(3):
        at = np.delete(hit[wall == axis], axis, axis=1) / _SIDE * _TEXELS
        picture[wall == axis] = lookup(texture(axis + 3 * room), at)
    return picture.reshape(HEIGHT, 2, WIDTH, 2, 3).mean(axis=(1, 3)).round().astype(np.uint8)


def colours_at(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """[N, 3] of the wall nearest to each point [N, 3]."""
    wall = np.abs(points).argmin(axis=1)
    colours = np.zeros(points.shape)
    for axis in range(3):
        at = np.delete(points[wall == axis], axis, axis=1) / _SIDE * _TEXELS
        colours[wall == axis] = lookup(texture(axis), at)
    return colours


@cache
def texture(axis: int) -> NDArray[np.float64]:
    """[TEXELS, TEXELS, 3] of coloured spots of many sizes."""
    generator = np.random.default_rng(axis)
    layers = []
    for cells in (16, 32, 64, 128):
        coarse = generator.integers(0, 256, (cells, cells, 3), dtype=np.uint8)
        layers.append(np.asarray(Image.fromarray(coarse).resize((_TEXELS, _TEXELS), Image.Resampling.BICUBIC), float))
    mixed = np.mean(layers, axis=0)
    return np.clip(127.5 + 2.2 * (mixed - 127.5), 0, 255)


def lookup(texture: NDArray[np.float64], at: NDArray[np.float64]) -> NDArray[np.float64]:
    """Colours [N, 3] at texel coordinates [N, 2], bilinear, repeated beyond the edge."""
    low = np.floor(at).astype(int)
    part = (at - low)[..., None]
    (u, v), (fu, fv) = (low % _TEXELS).T, part.transpose(1, 0, 2)
    u1, v1 = (u + 1) % _TEXELS, (v + 1) % _TEXELS
    top = texture[u, v] * (1 - fv) + texture[u, v1] * fv
    return np.asarray(top * (1 - fu) + (texture[u1, v] * (1 - fv) + texture[u1, v1] * fv) * fu)
