"""Camera: one undistorted pinhole view, in the one convention that the whole package uses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Camera:
    """A pinhole camera with OpenCV axes: x right, y down, z forward.

    name: the image's path relative to the image folder, with forward slashes; unique in a scene.
    width, height: pixels.
    fx, fy, cx, cy: pixels; the upper left *corner* is (0, 0), the first pixel's centre (0.5, 0.5).
    viewmat: [4, 4] float64, world to camera.
    """

    name: str
    width: int
    height: int
    fx: float
    fy: float
    cx: float
    cy: float
    viewmat: NDArray[np.float64]

    @property
    def center(self) -> NDArray[np.float64]:
        """[3] the camera's position in the world."""
        rotation, translation = self.viewmat[:3, :3], self.viewmat[:3, 3]
        return -rotation.T @ translation

    def resized(self, width: int, height: int) -> Camera:
        """The same view at another image size; intrinsics scale with each axis."""
        sx, sy = width / self.width, height / self.height
        return replace(
            self,
            width=width,
            height=height,
            fx=self.fx * sx,
            fy=self.fy * sy,
            cx=self.cx * sx,
            cy=self.cy * sy,
        )
