"""Views of a model from outside, for models without cameras: on a circle around it, or from all sides."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from splatcli.formats.transform import PLY_UP
from splatcli.gaussians import Gaussians
from splatcli.render.camera_paths import look_at
from splatcli.scene.camera import NEAR, Camera

#: Half the field of view of all in radians, and how many degrees those on a circle stand above the horizon.
_HALF_FIELD, ABOVE = math.radians(45.0) / 2, 30.0
#: Pixels of the sides, on a circle and from all sides.
_SIDE, _SIDE_OF_ALL = 960, 512
#: Share of the means that a view shows: stray Gaussians lie far out.
_WITHIN, _WITHIN_ALL = 0.9, 0.95
#: The near plane of a small model, as a share of the distance to its middle.
_NEAR = 0.003
#: Standard deviations that a Gaussian fills, and logarithms between which its size counts.
_SIGMAS, _LOG_SIZES = 3.0, (-30.0, 30.0)
#: The golden angle, by which points of a Fibonacci sphere turn.
_GOLDEN = math.pi * (3 - 5**0.5)


def views_from_outside(gaussians: Gaussians, up: NDArray[np.float64], count: int = 1) -> list[Camera]:
    """Return ``count`` square cameras on a circle around the Gaussians, a little above them, evenly spaced.

    up: [3] unit. The circle is about the median of the means.
    """
    axis = np.eye(3)[int(np.argmin(np.abs(up)))] * -1.0
    x = axis - (axis @ up) * up
    x /= np.linalg.norm(x)
    turns = 2 * math.pi * np.arange(count)[:, None] / count
    level = np.cos(turns) * x + np.sin(turns) * np.cross(up, x)
    tilt = math.radians(ABOVE)
    poses = _Ball.around(gaussians, _WITHIN).poses(math.cos(tilt) * level + math.sin(tilt) * up, up)
    return _square_cameras("outside", _SIDE, *poses)


def views_from_all_sides(gaussians: Gaussians, count: int) -> list[Camera]:
    """Return ``count`` square cameras evenly on a sphere around the Gaussians, about the median of their means."""
    height = 1 - (2 * np.arange(count) + 1) / count
    level, angle = np.sqrt(1 - height**2), _GOLDEN * np.arange(count)
    directions = np.stack([level * np.cos(angle), height, level * np.sin(angle)], axis=1)
    poses = _Ball.around(gaussians, _WITHIN_ALL).poses(directions, PLY_UP)
    return _square_cameras("shell", _SIDE_OF_ALL, *poses)


@dataclass(frozen=True, slots=True, eq=False)
class _Ball:
    """The ball that fills a view from outside. center: [3], world. radius: world units."""

    center: NDArray[np.float64]
    radius: float

    @classmethod
    def around(cls, gaussians: Gaussians, within: float) -> _Ball:
        """Return the ball about the median of the means that holds the share ``within`` of them, N > 0."""
        means = gaussians.means.double()
        middle = means.median(dim=0).values
        distances = (means - middle).norm(dim=1)
        # torch.quantile() refuses more than 16 million values.
        spread = float(distances.kthvalue(max(1, math.ceil(within * len(distances)))).values)
        # One Gaussian, or several in one place, has its own size only.
        size = float(gaussians.log_scales.double().amax(dim=1).median().clamp(*_LOG_SIZES).exp())
        return cls(middle.cpu().numpy(), max(spread, _SIGMAS * size))

    def poses(self, directions: NDArray[np.float64], up: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
        """Return ([F, 4, 4] camera to world in each of the directions [F, 3], unit; their distance from the middle)."""
        distance = 1.1 * self.radius / math.sin(_HALF_FIELD)
        return look_at(self.center + distance * directions, self.center, up), distance


def _square_cameras(name: str, side: int, poses: NDArray[np.float64], distance: float) -> list[Camera]:
    """Return a camera of side x side pixels for each of ``poses`` [F, 4, 4]. distance: of what they show."""
    focal, near = 0.5 * side / math.tan(_HALF_FIELD), min(NEAR, _NEAR * distance)
    return [
        Camera(f"{name}_{index:02d}", side, side, focal, focal, side / 2, side / 2, np.linalg.inv(pose), near)
        for index, pose in enumerate(poses)
    ]
