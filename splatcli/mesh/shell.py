"""Cameras around a model that has none: a shell that looks inwards from all sides."""

from __future__ import annotations

import math

import numpy as np

from splatcli.gaussians import Gaussians
from splatcli.render.camera_paths import look_at
from splatcli.scene.camera import Camera

#: Cameras of the shell, pixels of their sides, and their field of view in degrees.
VIEWS, _SIDE, _FIELD = 64, 512, 45.0
#: Share of the Gaussians' means that a view holds: stray ones lie far out.
_WITHIN = 0.95
#: The golden angle, by which points of a Fibonacci sphere turn.
_GOLDEN = math.pi * (3 - 5**0.5)


def shell(gaussians: Gaussians) -> list[Camera]:
    """Return VIEWS cameras evenly on a sphere around the model that look at its middle."""
    means = gaussians.means.double().cpu().numpy()
    middle = np.median(means, axis=0)
    radius = max(float(np.quantile(np.linalg.norm(means - middle, axis=1), _WITHIN)), 1e-6)
    away = 1.1 * radius / math.sin(math.radians(_FIELD) / 2)
    height = 1 - (2 * np.arange(VIEWS) + 1) / VIEWS
    level, angle = np.sqrt(1 - height**2), _GOLDEN * np.arange(VIEWS)
    directions = np.stack([level * np.cos(angle), height, level * np.sin(angle)], axis=1)
    poses = look_at(middle + away * directions, middle, np.array([0.0, -1.0, 0.0]))
    focal = 0.5 * _SIDE / math.tan(math.radians(_FIELD) / 2)
    return [
        Camera(f"shell_{i:02d}", _SIDE, _SIDE, focal, focal, _SIDE / 2, _SIDE / 2, np.linalg.inv(pose))
        for i, pose in enumerate(poses)
    ]
