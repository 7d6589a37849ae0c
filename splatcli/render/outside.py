"""Views of a model from outside, for models without cameras."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from splatcli.scene.camera import Camera

#: Up in a PLY of which nothing is known.
PLY_UP = np.array([0.0, -1.0, 0.0])
#: Pixels of a view's sides; its field of view in degrees, and how many degrees it stands above the horizon.
_SIDE, _FIELD, _ABOVE = 960, 45.0, 30.0
#: Share of the means that a view shows: stray Gaussians lie far out.
_WITHIN = 0.9


def views_from_outside(means: Tensor, up: NDArray[np.float64], count: int = 1) -> list[Camera]:
    """Return ``count`` square cameras on a circle around means [N, 3], a little above them, evenly spaced.

    up: [3] unit. The circle is about the median of the means.
    """
    means = means.double()
    middle = means.median(dim=0).values
    distances = (means - middle).norm(dim=1)
    radius = max(float(_quantile(distances, _WITHIN)), 1e-6)
    away = radius * 1.1 / math.sin(math.radians(_FIELD) / 2)
    axis = np.eye(3)[int(np.argmin(np.abs(up)))] * -1.0
    x = axis - (axis @ up) * up
    x /= np.linalg.norm(x)
    y = np.cross(up, x)
    turns = [2 * math.pi * index / count for index in range(count)]
    levels = [math.cos(turn) * x + math.sin(turn) * y for turn in turns]
    center = middle.cpu().numpy()
    return [_toward(center, level, up, away, f"outside_{index:02d}") for index, level in enumerate(levels)]


def _toward(
    target: NDArray[np.float64], level: NDArray[np.float64], up: NDArray[np.float64], away: float, name: str
) -> Camera:
    """Return the camera that faces ``target`` from the horizontal direction ``level``, ``away`` units from it."""
    tilt = math.radians(_ABOVE)
    back = math.cos(tilt) * level + math.sin(tilt) * up
    center = target + away * back
    right = np.cross(-back, up)
    right /= np.linalg.norm(right)
    viewmat = np.eye(4)
    viewmat[:3, :3] = np.stack([right, np.cross(-back, right), -back])
    viewmat[:3, 3] = -viewmat[:3, :3] @ center
    focal = 0.5 * _SIDE / math.tan(math.radians(_FIELD) / 2)
    return Camera(name, _SIDE, _SIDE, focal, focal, _SIDE / 2, _SIDE / 2, viewmat)


def _quantile(values: Tensor, share: float) -> Tensor:
    # torch.quantile() refuses more than 16 million values.
    return values.kthvalue(max(1, math.ceil(share * len(values)))).values
