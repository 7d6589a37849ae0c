"""Visual hull: points on the hull of the silhouettes of images with transparency, for a scene without points.

A place that is transparent in one image is empty; the rest is the visual hull (Laurentini, 1994). It is carved from a
grid of cells, first in the whole box, then on a finer grid where cells are left. It contains the object, with hollows
filled: a better start for training than random points.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from PIL import Image

from splatcli.errors import SceneError
from splatcli.scene.camera import Camera
from splatcli.scene.images import OPAQUE
from splatcli.scene.scene import Scene
from splatcli.sizes import evenly

#: Most images that carve, spread over all; more of them remove hardly any cells.
VIEWS = 48

#: Least images with transparency; the hull of fewer is too far from the object.
MIN_VIEWS = 3

#: A cell that fewer than this part of the images have in sight does not count as full: too few could have carved it.
SEEN_BY = 0.5

#: Cells along the longest edge of the box, in the first and the second grid.
COARSE, FINE = 64, 96

#: Pixels of the longer side of reduced images: a cell covers a few of them.
SILHOUETTE_SIDE = 400

#: Cells over which occupancy is averaged for a normal.
NORMAL_CELLS = 5

#: An image gives the colour of a surface that faces it: from this cosine on, with growing weight.
FACING = 0.3

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Silhouette:
    """The silhouette in one image, of at most SILHOUETTE_SIDE pixels a side.

    pixels: [H, W, 3] uint8 over black; alpha: [H, W] uint8; both are means over the full-size pixels.
    opaque: [H, W] bool, whether any full-size pixel is opaque.
    """

    camera: Camera
    pixels: NDArray[np.uint8]
    alpha: NDArray[np.uint8]
    opaque: Flags

    @classmethod
    def of(cls, camera: Camera, pixels: NDArray[np.uint8], alpha: NDArray[np.uint8]) -> Silhouette:
        """Return the silhouette of an image. pixels, alpha: of the camera's size."""
        step = math.ceil(max(alpha.shape) / SILHOUETTE_SIDE)
        padded = np.pad(alpha >= OPAQUE, [(0, -side % step) for side in alpha.shape])
        height, width = (side // step for side in padded.shape)
        scaled = {name: getattr(camera, name) / step for name in ("fx", "fy", "cx", "cy")}
        return cls(
            replace(camera, width=width, height=height, **scaled),
            np.asarray(Image.fromarray(pixels).reduce(step)),
            np.asarray(Image.fromarray(alpha).reduce(step)),
            np.asarray(padded.reshape(height, step, width, step).any(axis=(1, 3))),
        )

    def at(self, places: Floats) -> tuple[NDArray[np.intp], NDArray[np.intp], Flags]:
        """Return column and row of each place [P, 3], and whether it is in sight; 0, 0 where it is not."""
        camera = self.camera
        if camera.model != "pinhole":
            return camera.pixels_of(places)
        # Sums in a fixed order for any number of threads: every process of a run starts from the same points.
        x, y, z = (
            (row[0] * places[:, 0] + row[1] * places[:, 1] + row[2] * places[:, 2] + row[3])
            for row in camera.viewmat[:3].astype(np.float32)
        )
        before = z > 1e-6
        depth = np.where(before, z, 1.0)
        u = np.clip(np.floor(camera.fx * x / depth + camera.cx), -1, camera.width).astype(np.intp)
        v = np.clip(np.floor(camera.fy * y / depth + camera.cy), -1, camera.height).astype(np.intp)
        inside = before & (u >= 0) & (u < camera.width) & (v >= 0) & (v < camera.height)
        return np.where(inside, u, 0), np.where(inside, v, 0), inside

    def outline(self, center: Floats, cell: float) -> Flags:
        """Return [H, W], where a cell of edge ``cell`` near ``center`` may be full: it covers an opaque pixel."""
        depth = float(self.camera.viewmat[2, :3] @ center + self.camera.viewmat[2, 3])
        reach = 2 * math.ceil(0.5 * self.camera.fx * cell / max(depth, cell)) + 1
        return np.asarray(scipy.ndimage.maximum_filter(self.opaque, size=reach, mode="constant", cval=0))


def hull_points(
    scene: Scene, center: NDArray[np.float64], half: float, n: int, generator: torch.Generator
) -> tuple[Floats, Floats] | None:
    """Return ``n`` points [n, 3] (world units) on the visual hull of the training images, and colours [n, 3] in 0..1.

    center, half: of the box to carve, world units. generator: on the CPU.
    None where too few images have transparency, or where no cell is left.
    """
    views = silhouettes(scene)
    if len(views) < MIN_VIEWS:
        return None
    low = (center - half).astype(np.float32)
    cells, _, cell = _grid(low, low + np.float32(2.0 * half), COARSE)
    full = carve(views, cells, cell)
    if not full.any():
        return None
    left = cells[full]
    cells, shape, cell = _grid(left.min(axis=0) - cell, left.max(axis=0) + cell, FINE)
    full = carve(views, cells, cell).reshape(shape)
    surface = np.flatnonzero(full & ~scipy.ndimage.binary_erosion(full))
    if not len(surface):
        return None
    rounds = [torch.randperm(len(surface), generator=generator) for _ in range(math.ceil(n / len(surface)))]
    chosen = surface[torch.cat(rounds)[:n].numpy()]
    jitter = torch.rand(n, 3, generator=generator, dtype=torch.float32).numpy() - 0.5
    points = (cells[chosen] + jitter * cell).astype(np.float32)
    return points, _colours(views, points, _normals(full, chosen))


def shows_silhouettes(scene: Scene) -> bool:
    """Return whether enough of the training images may be transparent, without decoding them."""
    return sum(1 for _ in _transparent(scene)) >= MIN_VIEWS


def silhouettes(scene: Scene) -> list[Silhouette]:
    """Return the silhouettes of partly transparent training images, at most VIEWS, spread over all.

    An image without an opaque pixel is skipped: usually its mask failed, and it would carve all cells.
    """
    images, found = scene.images.with_alpha(), []
    for i in _transparent(scene):
        try:
            loaded = images.image(i)
        except SceneError:
            continue  # training on it reports the error
        if loaded.alpha is None or loaded.masked is not None:
            continue
        opaque = loaded.alpha >= OPAQUE
        if opaque.any() and not opaque.all():
            found.append(Silhouette.of(scene.cameras[i], loaded.pixels, loaded.alpha))
    return found


def _transparent(scene: Scene) -> Iterator[int]:
    """Yield those of VIEWS training images, spread over all, that may be transparent."""
    for i in evenly(scene.train, VIEWS):
        try:
            if scene.images.may_be_transparent(i):
                yield i
        except SceneError:
            continue  # training on it reports the error


def carve(views: list[Silhouette], places: Floats, cell: float) -> Flags:
    """Return [P], whether no image is transparent in the cell of edge ``cell`` around each of ``places`` [P, 3]."""
    left = np.arange(len(places))
    seen = np.zeros(len(places), np.int32)
    center = places.mean(axis=0)
    for view in views:
        outline = view.outline(center, cell)
        u, v, inside = view.at(places[left])
        seen[left] += inside
        left = left[outline[v, u] | ~inside]
    full = np.zeros(len(places), np.bool_)
    full[left] = seen[left] >= max(MIN_VIEWS, SEEN_BY * len(views))
    return full


def _grid(low: Floats, high: Floats, cells: int) -> tuple[Floats, tuple[int, int, int], float]:
    """Return (centres [P, 3] of cubic cells that fill a box, their numbers along x, y and z, their edge)."""
    cell = float((high - low).max()) / cells
    x, y, z = (max(1, math.ceil(float(span) / cell - 1e-3)) for span in high - low)
    axes = [low[k] + cell * (np.arange(count, dtype=np.float32) + 0.5) for k, count in enumerate((x, y, z))]
    return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 3).astype(np.float32), (x, y, z), cell


def _normals(full: Flags, chosen: NDArray[np.intp]) -> Floats:
    """Return [n, 3], outward unit normals at the cells ``chosen``; zero where there is no direction."""
    smooth = full.astype(np.float32)
    for _ in range(2):
        smooth = scipy.ndimage.uniform_filter(smooth, NORMAL_CELLS, mode="constant")
    outward = np.stack([-slope.reshape(-1)[chosen] for slope in np.gradient(smooth)], axis=1)
    length = np.linalg.norm(outward, axis=1, keepdims=True)
    return np.asarray(outward / np.maximum(length, 1e-6), np.float32)


def _colours(views: list[Silhouette], points: Floats, normals: Floats) -> Floats:
    """Return [n, 3] in 0..1: the mean colour in the images that the surface faces; grey without one."""
    total, weights = np.zeros((len(points), 3), np.float32), np.zeros((len(points), 1), np.float32)
    for view in views:
        u, v, inside = view.at(points)
        to_camera = view.camera.center.astype(np.float32) - points
        to_camera /= np.maximum(np.linalg.norm(to_camera, axis=1, keepdims=True), 1e-12)
        facing = (to_camera * normals).sum(axis=1) - FACING
        alpha = view.alpha[v, u].astype(np.float32)
        weight = np.where(inside & (alpha >= OPAQUE), np.maximum(facing, 0.0), 0.0)[:, None]
        total += weight * view.pixels[v, u] / np.maximum(alpha, 1.0)[:, None]
        weights += weight
    return np.where(weights > 0.0, np.clip(total / np.maximum(weights, 1e-6), 0.0, 1.0), 0.5).astype(np.float32)
