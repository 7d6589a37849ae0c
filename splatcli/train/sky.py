"""Sky: points far away in the directions in which training images show no SfM point: sky and far background.

Structure from motion finds no points there, so training would fill them with whatever is near, which other views see
as fog. The points are on a sphere around the cameras, beyond the sparse points, and have the colours of the images.
"""

from __future__ import annotations

import math

import numpy as np
import scipy
from numpy.typing import NDArray

from splatcli.errors import SceneError
from splatcli.scene.camera import Camera
from splatcli.scene.images import OPAQUE
from splatcli.scene.scene import Scene
from splatcli.sizes import evenly
from splatcli.train.visual_hull import shows_silhouettes

#: Radius of the sphere, in the distance within which this part of the points lies; where cameras are farther out, as
#: around an object, in their median distance.
RADIUS, WITHIN = 1.5, 0.98

#: With fewer sparse points, directions without one say nothing.
LEAST_POINTS = 500

#: Most training images that are used, spread over all: they are decoded before the first step.
VIEWS = 24

#: Least images in which a direction is free of points, and their least part of the images that show the direction.
MIN_VIEWS, FREE_SHARE = 2, 0.5

#: A direction is free in an image if its nearest point is farther than this, in parts of the longer side.
FREE = 0.04

#: Cells along the longer side of an image, in which the distance to the nearest point is measured.
CELLS = 100

#: Sparse points that are projected at once, so that their numbers stay in a cache.
_AT_ONCE = 1 << 13

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


def sky_points(
    scene: Scene, xyz: NDArray[np.float32], directions: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return points [S, 3] (world units) of sky and far background, and their colours [S, 3] in 0..1.

    xyz: [P, 3] sparse points. directions: how many are tried, evenly over the sphere; S is at most as many.
    S is 0 without directions, with fewer than LEAST_POINTS sparse points, and where most images are transparent around
    an object.
    """
    if len(xyz) < LEAST_POINTS or directions < 1:
        return np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32)
    views = evenly(scene.train, VIEWS)
    sparse = xyz.astype(np.float64)
    centers = np.stack([scene.cameras[i].center for i in scene.train])
    center = np.median(centers, axis=0)
    within = max(np.quantile(_squared(sparse - center), WITHIN), np.median(_squared(centers - center)))
    sphere = center + RADIUS * math.sqrt(float(within)) * even_directions(directions)

    shown = np.zeros(directions, np.int64)
    free = np.zeros((len(views), directions), np.bool_)
    for view, flags in zip(views, free, strict=True):
        camera = scene.cameras[view]
        column, row, inside = camera.pixels_of(sphere)
        shown += inside
        flags[:] = inside & (_distance_to_points(camera, sparse, column, row) > FREE)
    free &= free.sum(axis=0) >= np.maximum(MIN_VIEWS, FREE_SHARE * shown)
    colours = _colours(scene, views, sphere, free)
    known = np.isfinite(colours[:, 0])
    return sphere[known].astype(np.float32), colours[known]


def _squared(apart: Floats) -> Floats:
    return apart[:, 0] ** 2 + apart[:, 1] ** 2 + apart[:, 2] ** 2


#: Cosine and sine of the golden angle, pi (3 - 5^0.5).
_GOLDEN = complex(-0.7373688780783197, 0.6754902942615238)


def even_directions(count: int) -> Floats:
    """Return unit vectors [count, 3], evenly over the sphere: a Fibonacci lattice (Gonzalez 2010).

    By products alone, since sines of numpy have other bits on other processors.
    """
    turned, turn = [], complex(1.0, 0.0)
    for _ in range(count):
        turned.append(turn)
        turn *= _GOLDEN
    around = np.array(turned)
    z = 1.0 - (2.0 * np.arange(count) + 1.0) / count
    ring = np.sqrt(1.0 - z * z)
    return np.stack([ring * around.real, ring * around.imag, z], axis=1)


def _distance_to_points(
    camera: Camera, sparse: Floats, column: NDArray[np.intp], row: NDArray[np.intp]
) -> NDArray[np.float64]:
    """Return the distance from each pixel [D] to the nearest of the points ``sparse`` [P, 3] in the image, in parts of
    its longer side; infinite where it shows none."""
    cell = max(camera.width, camera.height) / CELLS
    empty = np.ones((math.ceil(camera.height / cell), math.ceil(camera.width / cell)), np.bool_)
    for first in range(0, len(sparse), _AT_ONCE):
        u, v, inside = camera.pixels_of(sparse[first : first + _AT_ONCE])
        empty[(v[inside] / cell).astype(np.intp), (u[inside] / cell).astype(np.intp)] = False
    if empty.all():
        return np.full(len(column), np.inf)
    distance: Floats = scipy.ndimage.distance_transform_edt(empty)
    return np.asarray(distance[(row / cell).astype(np.intp), (column / cell).astype(np.intp)] / CELLS)


def _colours(scene: Scene, views: list[int], sphere: Floats, free: Flags) -> NDArray[np.float32]:
    """Return [D, 3] in 0..1, the median of each direction's colours in the images where it is free; NaN without one.

    views: [V] of images. free: [V, D]. Masked and transparent pixels have no colour, and none has one where half of the
    images or more have transparency: nothing is behind what they show.
    """
    found = np.full((len(views), len(sphere), 3), np.nan, np.float32)
    images = scene.images.with_alpha() if shows_silhouettes(scene) else scene.images
    transparent = 0
    for view, flags, colours in zip(views, free, found, strict=True):
        if not flags.any():
            continue
        try:
            image = images.image(view)
        except SceneError:
            continue  # training on it reports the error
        column, row, _ = scene.cameras[view].pixels_of(sphere)
        shows = flags.copy()
        if image.masked is not None:
            shows &= ~image.masked[row, column]
        if image.alpha is not None:
            shows &= image.alpha[row, column] >= OPAQUE
            transparent += bool((image.alpha < OPAQUE).any())
        colours[shows] = image.pixels[row[shows], column[shows]].astype(np.float32) / 255.0
    medians = np.full((len(sphere), 3), np.nan, np.float32)
    some = np.isfinite(found[:, :, 0]).sum(axis=0) >= MIN_VIEWS
    if some.any() and 2 * transparent < len(views):
        medians[some] = np.nanmedian(found[:, some], axis=0)
    return medians
