"""A box on a turntable, imaged by casting rays: its long sides look alike, its ends do not, nothing is behind it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tests.sfm.corner import looking, lookup, texture

WIDTH, HEIGHT, FOCAL = 256, 144, 420.0
#: Half the sides of the box, and the distance of the cameras from its middle.
HALF, DISTANCE = np.array([1.0, 0.45, 0.36]), 4.4
#: Texels of a unit of length.
_TEXELS = 200.0


def pose(turn: float) -> NDArray[np.float64]:
    """[4, 4] world to camera, OpenCV axes, from 20 degrees above. turn: degrees about the vertical."""
    angle, rise = np.radians(turn), np.radians(20.0)
    center = DISTANCE * np.array([np.cos(angle) * np.cos(rise), np.sin(angle) * np.cos(rise), np.sin(rise)])
    return looking(center, at=np.zeros(3))


def image(turn: float) -> Image.Image:
    """RGBA of WIDTH x HEIGHT, transparent around the box: the mean of 2 x 2 rays a pixel."""
    x, y = np.meshgrid(*(np.arange(2 * side) / 2 + 0.25 for side in (WIDTH, HEIGHT)))
    rays = np.stack([(x - WIDTH / 2) / FOCAL, (y - HEIGHT / 2) / FOCAL, np.ones(x.shape)], axis=-1)
    matrix = pose(turn)
    center = -matrix[:3, :3].T @ matrix[:3, 3]
    rays = rays @ matrix[:3, :3]
    with np.errstate(divide="ignore"):
        sides = np.sort(np.stack([(-HALF - center) / rays, (HALF - center) / rays]), axis=0)
    axis, depth = sides[0].argmax(axis=-1), sides[0].max(axis=-1)
    hit = depth < sides[1].min(axis=-1)
    at = center + depth[..., None] * rays
    picture = np.zeros((*hit.shape, 4))
    for which in range(3):
        for sign in (-1, 1):
            face = hit & (axis == which) & (np.sign(at[..., which]) == sign)
            # A half turn takes one of the long sides to the other.
            place = np.delete(at[face] * ([sign, sign, 1.0] if which < 2 else 1.0), which, axis=1)
            seed = {0: 2 + sign, 1: 4, 2: 5}[which]
            picture[face, :3] = lookup(texture(seed), (place + 1.0) * _TEXELS)
            picture[face, 3] = 255.0
    mean = picture.reshape(HEIGHT, 2, WIDTH, 2, 4).mean(axis=(1, 3))
    mean[..., :3] *= 255.0 / np.maximum(mean[..., 3:], 1.0)
    return Image.fromarray(mean.clip(0.0, 255.0).round().astype(np.uint8), "RGBA")
