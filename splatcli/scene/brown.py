"""Brown's lens model as photogrammetry programs write it, as a COLMAP camera."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from splatcli.errors import SceneError
from splatcli.scene._pycolmap import pycolmap

#: Pixels by which a lens that COLMAP has no model for may be approximated.
TOLERANCE = 0.05
#: Pixels that a skewed pixel grid may shift the image's corners, which is not corrected.
MAX_SKEW = 0.5
#: Radii at which an approximation is fitted and checked.
_RADII = 200
#: Pixels of an image's side.
_MAX_SIDE = 1_000_000
#: A distorted image shows this much more than its corners say, in radius.
_MARGIN = 1.2


@dataclass(frozen=True, slots=True)
class Brown:
    """x' = x (1 + k1 r^2 + k2 r^4 + k3 r^6 + k4 r^8) + 2 p1 x y + p2 (r^2 + 2 x^2), and y' with p1 and p2 exchanged.

    fx, fy, cx, cy: pixels from the upper left corner. radial: k1 to k4. tangential: p1, p2 in OpenCV's order.
    """

    fx: float
    fy: float
    cx: float
    cy: float
    radial: Sequence[float] = ()
    tangential: Sequence[float] = (0.0, 0.0)

    def camera(self, width: int, height: int, where: object, label: str) -> pycolmap.Camera:
        """Return the lens as PINHOLE, OPENCV or FULL_OPENCV. Raises SceneError where none of them comes near it."""
        k1, k2, k3, k4 = [*self.radial, 0.0, 0.0, 0.0, 0.0][:4]
        p1, p2 = self.tangential
        head = [self.fx, self.fy, self.cx, self.cy]
        if not any((k1, k2, k3, k4, p1, p2)):
            return colmap_camera("PINHOLE", width, height, head, where, label)
        if not (k3 or k4):
            return colmap_camera("OPENCV", width, height, [*head, k1, k2, p1, p2], where, label)
        a, b = [k1, k2, k3], [0.0, 0.0, 0.0]
        if k4:
            a, b = self._rational(width, height, np.array([k1, k2, k3, k4]), where, label)
        return colmap_camera("FULL_OPENCV", width, height, [*head, a[0], a[1], p1, p2, a[2], *b], where, label)

    def _rational(
        self, width: int, height: int, k: NDArray[np.float64], where: object, label: str
    ) -> tuple[list[float], list[float]]:
        """Return the quotient nearest to the polynomial of degree 8: three coefficients above, and three below."""
        corner = math.hypot(
            max(self.cx, width - self.cx) / self.fx,
            max(self.cy, height - self.cy) / self.fy,
        )
        largest = (_MARGIN * corner) ** 2
        s = np.linspace(0, 1, _RADII + 1)[1:]
        powers = np.stack([s, s**2, s**3], axis=1)
        wanted = 1 + np.stack([s, s**2, s**3, s**4], axis=1) @ (k * largest ** np.arange(1, 5))
        system = np.concatenate([powers, -wanted[:, None] * powers], axis=1)
        found = np.linalg.lstsq(system, wanted - 1, rcond=None)[0]
        above, below = 1 + powers @ found[:3], 1 + powers @ found[3:]
        off = float(np.abs(above / below - wanted).max()) * math.sqrt(largest) * max(self.fx, self.fy)
        if not (off <= TOLERANCE and below.min() > 0):
            raise SceneError(
                f"{label}: its lens has a term of degree 8 (k4) that no model of COLMAP has, and is {off:.2g} pixels "
                "away from the nearest one",
                where=where,
                remedy="calibrate without k4 (Brown with three radial terms), or export undistorted images",
            )
        scale = largest ** np.arange(1, 4)
        return list(map(float, found[:3] / scale)), list(map(float, found[3:] / scale))


def colmap_camera(
    model: str, width: int, height: int, params: Sequence[float], where: object, label: str
) -> pycolmap.Camera:
    """Return a camera of a COLMAP model with these parameters. Raises SceneError for a size that no image has."""
    if not (0 < width <= _MAX_SIDE and 0 < height <= _MAX_SIDE):
        raise SceneError(
            f"{label}: its images are {width} by {height} pixels",
            where=where,
            remedy="correct the file, or export again",
        )
    camera = pycolmap.Camera.create_from_model_name(pycolmap.INVALID_CAMERA_ID, model, 1.0, width, height)
    camera.params = list(params)
    return camera
