"""FreeSpace: the space around the training cameras, in which no Gaussian belongs.

A camera stands in free space at least up to the nearest point of the reconstruction. A Gaussian there is seen by few
other cameras, which cannot tell how far it is: they take it for a part of a surface behind, and a view from near the
camera shows fog. Positions on the way to neighbouring cameras count too, as far as no point can be there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from splatcli.scene.points import nearest_points
from splatcli.scene.scene import Scene

#: Cells along the longest side of the grid that holds the space.
CELLS = 128

#: Cameras whose ways to each camera count, and positions on each way.
NEIGHBOURS, POSITIONS = 3, (0.25, 0.5, 0.75)


def clearances(scene: Scene) -> tuple[float, ...]:
    """Return the distance from the camera of each training view to the nearest sparse point, world units.

    Nothing for a scene without points.
    """
    if scene.points is None or not len(scene.points.xyz):
        return ()
    centers = np.stack([scene.cameras[i].center for i in scene.train])
    return tuple(nearest_points(centers, scene.points.xyz).tolist())


@dataclass(frozen=True, slots=True, eq=False)
class FreeSpace:
    """A grid of cells, each free or not.

    low: [3] the corner of the grid, float32, world units. cell: edge of a cell, world units. free: [X, Y, Z] bool.
    """

    low: Tensor
    cell: float
    free: Tensor

    @classmethod
    def of(
        cls, centers: NDArray[np.float64], distances: Sequence[float], share: float, device: torch.device
    ) -> FreeSpace | None:
        """Return the space around cameras, see free_balls(); None where there is none. A cell counts by its centre."""
        if share <= 0.0 or not len(distances):
            return None
        balls, radii = free_balls(centers, distances, share)
        if not len(balls):
            return None
        low = (balls - radii[:, None]).min(axis=0)
        sides = (balls + radii[:, None]).max(axis=0) - low
        cell = float(sides.max()) / CELLS
        shape = np.maximum(1, np.ceil(sides / cell - 1e-9)).astype(int)
        free = np.zeros(shape, dtype=bool)
        for center, radius in zip((balls - low) / cell - 0.5, radii / cell, strict=True):
            first = np.maximum(0, np.ceil(center - radius)).astype(int)
            last = np.minimum(shape - 1, np.floor(center + radius)).astype(int)
            x, y, z = (np.arange(a, b + 1) - c for a, b, c in zip(first, last, center, strict=True))
            inside = (x**2)[:, None, None] + (y**2)[None, :, None] + (z**2)[None, None, :] < radius**2
            free[first[0] : last[0] + 1, first[1] : last[1] + 1, first[2] : last[2] + 1] |= inside
        return cls(torch.tensor(low, dtype=torch.float32, device=device), cell, torch.from_numpy(free).to(device))

    def contains(self, means: Tensor) -> Tensor:
        """Return [N] bool, which of ``means`` [N, 3] lie in the space; one that is not finite does not."""
        cells = ((means - self.low) / self.cell).floor()
        shape = torch.tensor(self.free.shape, dtype=cells.dtype, device=cells.device)
        within = ((cells >= 0) & (cells < shape)).all(dim=1)
        x, y, z = cells.masked_fill(~within[:, None], 0.0).long().unbind(dim=1)
        return self.free[x, y, z] & within


def free_balls(
    centers: NDArray[np.float64], distances: Sequence[float], share: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return balls [B, 3] and radii [B] of the space around and between cameras, world units.

    centers: [C, 3]. distances: [C], clearances() of them. share: radius of a ball as a part of the distance.
    A ball between two cameras lies in the empty balls around them, so that no ball holds a point.
    """
    full = np.asarray(distances, dtype=np.float64)
    balls, radii = [centers], [share * full]
    neighbours = min(NEIGHBOURS, len(centers) - 1)
    if neighbours > 0:
        apart, other = scipy.spatial.cKDTree(centers).query(centers, k=neighbours + 1)
        for k in range(1, neighbours + 1):
            theirs = full[other[:, k]]
            for t in POSITIONS:
                empty = np.maximum(full - t * apart[:, k], theirs - (1.0 - t) * apart[:, k])
                balls.append((1.0 - t) * centers + t * centers[other[:, k]])
                radii.append(np.minimum(empty, share * np.minimum(full, theirs)))
    center, radius = np.concatenate(balls), np.concatenate(radii)
    return center[radius > 0.0], radius[radius > 0.0]
