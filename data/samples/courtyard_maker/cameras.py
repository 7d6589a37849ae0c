"""Where the pictures are taken from: two rings around the still life, at two heights and changing distance."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from courtyard_maker.render import View

WIDTH, HEIGHT, FOCAL = 320, 240, 272.0
VIEWS_A_RING = 25


def _looking(name: str, centre: NDArray[np.float64], target: NDArray[np.float64], roll: float) -> View:
    forward = (target - centre) / np.linalg.norm(target - centre)
    right = np.cross(forward, [0.0, 0.0, 1.0])
    right /= np.linalg.norm(right)
    down = np.cross(forward, right)
    c, s = np.cos(roll), np.sin(roll)
    rotation = np.stack([c * right + s * down, c * down - s * right, forward])
    return View(name, WIDTH, HEIGHT, FOCAL, rotation, centre)


def views(rng: np.random.Generator) -> list[View]:
    """All views in name order: the low ring, then the high ring, each once around, all looking inward."""
    result: list[View] = []
    for ring, (height, distance) in enumerate(((0.95, 3.7), (2.25, 3.4))):
        for k in range(VIEWS_A_RING):
            a = 2 * np.pi * (k + 0.5 * ring + 0.15 * rng.uniform(-1, 1)) / VIEWS_A_RING
            r = distance + 0.4 * np.sin(3 * a + ring) + 0.1 * rng.uniform(-1, 1)
            z = height + 0.16 * np.sin(2 * a + 1) + 0.05 * rng.uniform(-1, 1)
            centre = np.array([r * np.cos(a), r * np.sin(a), z])
            target = np.array([0.0, 0.0, 0.62 - 0.1 * ring]) + rng.uniform(-0.15, 0.15, 3)
            roll = float(np.radians(rng.uniform(-2, 2)))
            result.append(_looking(f"view_{len(result):03d}.jpg", centre, target, roll))
    return result
