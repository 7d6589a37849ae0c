"""The COLMAP model of the scene: the true cameras, and points as structure from motion would find them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pycolmap
from numpy.typing import NDArray

from courtyard_maker.render import View
from courtyard_maker.world import cast

POINTS = 5200
_OBSERVATIONS = 3  # a point, at most
_NOISE = 0.3  # pixels, of keypoints and of points
_MARGIN = 3.0  # pixels between a keypoint and the image's border

Image = NDArray[np.uint8]
Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Sighting:
    """One point: position [3], colour [3] bytes, and the views (by index) in which it has a keypoint [n, 2]."""

    position: Doubles
    color: NDArray[np.uint8]
    seen_by: NDArray[np.intp]
    keypoints: Doubles


def _texture_pixels(image: Image, count: int, rng: np.random.Generator) -> Doubles:
    """[count, 2] pixel positions, drawn more often where the image has contrast, as a feature detector would."""
    grey = image.astype(np.float64).mean(2)
    down, right = np.gradient(grey)
    weight = np.hypot(down, right) + 2.0
    edge = int(_MARGIN) + 1
    weight[:edge] = weight[-edge:] = 0.0
    weight[:, :edge] = weight[:, -edge:] = 0.0
    flat = rng.choice(weight.size, count, replace=False, p=(weight / weight.sum()).ravel())
    rows, columns = np.divmod(flat, weight.shape[1])
    return np.stack([columns, rows], 1) + rng.uniform(0.1, 0.9, (count, 2))


def visible(view: View, points: Doubles) -> NDArray[np.bool_]:
    """[N] which surface points the view sees: inside the image and not behind anything."""
    pixels, depth = view.project(points)
    size = np.array([view.width, view.height])
    inside = (depth > 0.1) & (pixels > _MARGIN).all(1) & (pixels < size - _MARGIN).all(1)
    rows = np.flatnonzero(inside)
    origins, directions = view.rays(pixels[rows])
    reach = np.linalg.norm(points[rows] - view.centre, axis=1)
    inside[rows] = cast(origins, directions).t > reach * 0.998 - 0.002
    return inside


def bilinear(image: Image, pixels: Doubles) -> Doubles:
    """[N, 3] colours 0..255 of an image at pixel positions [N, 2] (centres at +0.5), which lie inside it."""
    x, y = pixels[:, 0] - 0.5, pixels[:, 1] - 0.5
    j = np.clip(x.astype(np.int64), 0, image.shape[1] - 2)
    i = np.clip(y.astype(np.int64), 0, image.shape[0] - 2)
    u, v = np.clip(x - j, 0, 1)[:, None], np.clip(y - i, 0, 1)[:, None]
    top = image[i, j] * (1 - u) + image[i, j + 1] * u
    low = image[i + 1, j] * (1 - u) + image[i + 1, j + 1] * u
    return np.asarray(top * (1 - v) + low * v, np.float64)


def find_points(views: list[View], images: list[Image], rng: np.random.Generator) -> list[Sighting]:
    """Surface points with texture that at least two views see, with the noise of real keypoints."""
    share = -(-POINTS // len(views))
    found, depths, home = [], [], []
    for k, (view, image) in enumerate(zip(views, images, strict=True)):
        origins, directions = view.rays(_texture_pixels(image, share, rng))
        hits = cast(origins, directions)
        found.append(hits.points.astype(np.float64))
        depths.append(view.project(found[-1])[1])
        home.append(np.full(share, k))
    points, depth, owner = np.concatenate(found), np.concatenate(depths), np.concatenate(home)
    seen = np.stack([visible(view, points) for view in views], 1)
    noise = rng.normal(0.0, _NOISE, points.shape) * (depth / views[0].focal)[:, None]
    sightings = []
    for row, point in enumerate(points):
        others = np.flatnonzero(seen[row] & (np.arange(len(views)) != owner[row]))
        if not len(others):
            continue
        chosen = rng.choice(others, min(_OBSERVATIONS - 1, len(others)), replace=False)
        by = np.sort(np.append(chosen, owner[row]))
        true = np.concatenate([views[k].project(point[None])[0] for k in by])
        color = np.concatenate([bilinear(images[k], xy[None]) for k, xy in zip(by, true, strict=True)]).mean(0)
        keypoints = true + rng.normal(0.0, _NOISE, true.shape)
        sightings.append(Sighting(point + noise[row], np.round(color).astype(np.uint8), by, keypoints))
    return sightings


def write_model(folder: Path, views: list[View], sightings: list[Sighting]) -> None:
    """Write cameras.bin, images.bin, points3D.bin (and COLMAP's rigs.bin, frames.bin) into an existing folder."""
    first = views[0]
    middle = [first.width / 2, first.height / 2]
    camera = pycolmap.Camera(
        camera_id=1, model="PINHOLE", width=first.width, height=first.height, params=[first.focal, first.focal, *middle]
    )
    model = pycolmap.Reconstruction()
    model.add_camera_with_trivial_rig(camera)
    keypoints: list[list[Doubles]] = [[] for _ in views]
    tracks = []
    for sighting in sightings:
        track = pycolmap.Track()
        for k, xy in zip(sighting.seen_by, sighting.keypoints, strict=True):
            track.add_element(int(k) + 1, len(keypoints[k]))
            keypoints[k].append(xy)
        tracks.append(track)
    for k, view in enumerate(views):
        image = pycolmap.Image(view.name, np.array(keypoints[k]).reshape(-1, 2), 1, k + 1)
        pose = pycolmap.Rigid3d(pycolmap.Rotation3d(view.rotation), -view.rotation @ view.centre)
        model.add_image_with_trivial_frame(image, pose)
    for sighting, track in zip(sightings, tracks, strict=True):
        model.add_point3D(sighting.position, track, sighting.color)
    model.update_point_3d_errors()
    model.write_binary(folder)
