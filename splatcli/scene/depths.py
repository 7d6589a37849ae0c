"""What is known of the depth of a photo's pixels: by a map of them, or the points that its view is known to see."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from splatcli.errors import SceneError
from splatcli.scene.camera import Camera
from splatcli.scene.scene import Scene

#: World units in front of a camera from which on a point is seen, as the rasterizer has it.
_NEAR = 0.01


@dataclass(frozen=True, slots=True, eq=False)
class KnownDepths:
    """Depths of S pixels of a view.

    pixels: [S] int64, y * width + x, ascending, each once.
    depths: [S] float64, camera-space z in world units, all positive.
    """

    pixels: NDArray[np.int64]
    depths: NDArray[np.float64]

    def without(self, hidden: NDArray[np.bool_]) -> KnownDepths:
        """Those of the pixels that are not hidden; hidden [H, W]."""
        kept = ~hidden.reshape(-1)[self.pixels]
        return KnownDepths(self.pixels[kept], self.depths[kept])


def known_depths(scene: Scene, view: int) -> KnownDepths:
    """What the points that ``view`` sees say of its pixels' depths; hidden pixels included."""
    if scene.points is None or scene.seen is None:
        return KnownDepths(np.zeros(0, np.int64), np.zeros(0))
    return depths_of_points(scene.cameras[view], scene.points.xyz[scene.seen[view]])


def depths_of_points(camera: Camera, xyz: NDArray[np.float32]) -> KnownDepths:
    """The depths of points [P, 3] at the pixels that they fall on: of several points at one, the nearest."""
    seen = xyz @ camera.viewmat[:3, :3].T + camera.viewmat[:3, 3]
    seen = seen[seen[:, 2] > _NEAR]
    x = np.floor(camera.fx * seen[:, 0] / seen[:, 2] + camera.cx)
    y = np.floor(camera.fy * seen[:, 1] / seen[:, 2] + camera.cy)
    inside = (x >= 0) & (x < camera.width) & (y >= 0) & (y < camera.height)
    pixels, depths = (y * camera.width + x)[inside].astype(np.int64), seen[inside, 2]
    pixels, first = np.unique(pixels[order := np.argsort(depths, kind="stable")], return_index=True)
    return KnownDepths(pixels, depths[order][first])


def depths_of_map(depths: NDArray[np.float32]) -> KnownDepths:
    """What a map [H, W] knows, 0 where it knows nothing."""
    pixels = np.flatnonzero(depths)
    return KnownDepths(pixels, depths.reshape(-1)[pixels].astype(np.float64))


def check_depths(scene: Scene) -> None:
    """Raises SceneError where no training view has a known depth."""
    if any(scene.images.knows_depth(view) for view in scene.train):
        return
    if scene.seen is not None and any(len(scene.seen[view]) for view in scene.train):
        return
    what = "has no points" if scene.points is None else "has points, but not which photos see them"
    raise SceneError(
        f"{what}: no depth is known of any training view",
        where=scene.root,
        remedy="--depth-loss wants a COLMAP model whose points have tracks (points3D as the mapper writes it), or "
        "depth maps: depth_file_path in transforms.json, or --depths DIR",
    )
