"""A camera that stays at one place: a rotation alone explains its matches, and they say nothing about depth.

With a wrong focal length, or one wrong match in a hundred, mapping may still find a model: images of a full turn become
a ring of cameras that look outwards, with small errors and points at depths that are made up.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from splatcli.scene._pycolmap import pycolmap
from splatcli.sfm.matching import pairs_that_hold

#: Pairs that are read, about.
_PAIRS = 120
#: Distance from where a rotation takes a point that counts as there: in parts of the longer side, and pixels at least.
_OFF, _LEAST_OFF = 0.004, 1.5
#: Focal lengths that are tried, in parts of the first guess: of cameras without EXIF, and where all have one. In parts
#: of the longer side none is longer than the last: a step over flat ground from far above looks like a turn then.
_GUESSED, _KNOWN, _LONGEST = np.geomspace(0.4, 1.25, 25), np.geomspace(0.88, 1.14, 7), 1.5
_ROUNDS = 4

Floats = NDArray[np.float64]


def rotation_share(database: Path) -> float:
    """Return the share of a pair's matches that a rotation about the camera's centre explains, the median over pairs.

    Focal lengths are those with which it is largest. Pairs are those that hold, with the matches that do, and of these
    the half that moves most, for small steps look like turns. 0 without a pair.
    """
    pairs = sorted(pairs_that_hold(database))
    with pycolmap.Database.open(database) as store:
        cameras = {int(camera.camera_id): camera for camera in store.read_all_cameras()}
        camera_of = {int(image.image_id): cameras[int(image.camera_id)] for image in store.read_all_images()}
        pairs = [pair for pair in pairs if not any(_is_long(camera_of[image_id]) for image_id in pair)]
        matched = [_matched(store, camera_of, pair) for pair in pairs[:: max(1, len(pairs) // _PAIRS)]]
    if not matched:
        return 0.0
    matched.sort(key=lambda pair: float(np.median(np.linalg.norm(pair[0] - pair[1], axis=1))))
    matched = matched[len(matched) // 2 :]
    factors = _KNOWN if all(camera.has_prior_focal_length for camera in cameras.values()) else _GUESSED
    return max(float(np.median([_share(*pair, factor) for pair in matched])) for factor in factors)


def _is_long(camera: pycolmap.Camera) -> bool:
    return bool(camera.mean_focal_length() > _LONGEST * max(camera.width, camera.height))


def _matched(
    store: pycolmap.Database, camera_of: dict[int, pycolmap.Camera], pair: tuple[int, int]
) -> tuple[Floats, Floats, float]:
    """Return [N, 2] of both images of a pair, the matches from the middle, and how far off counts.

    The unit is the first guess of the focal length. Distortion, which is not known yet, is left out.
    """
    rows = np.asarray(store.read_two_view_geometry(*pair).inlier_matches)
    places, off = [], 0.0
    for column, image_id in enumerate(pair):
        camera = camera_of[image_id]
        xy = np.asarray(store.read_keypoints(image_id), np.float64)[rows[:, column], :2]
        places.append((xy - [camera.width / 2, camera.height / 2]) / camera.mean_focal_length())
        off = max(_OFF * max(camera.width, camera.height), _LEAST_OFF) / camera.mean_focal_length()
    return places[0], places[1], off


def _share(first: Floats, second: Floats, off: float, factor: float) -> float:
    """Return the share of matches that the best rotation brings within ``off``, if focal lengths are ``factor`` times.

    The rotation is that of least squares over the better half, or over all that agree where these are more.
    """
    rays, wanted = _rays(first / factor), _rays(second / factor)
    used, distance = np.ones(len(rays), np.bool_), np.zeros(len(rays))
    for _ in range(_ROUNDS):
        u, _, vt = np.linalg.svd(wanted[used].T @ rays[used])
        turned = rays @ (u @ np.diag([1.0, 1.0, np.linalg.det(u @ vt)]) @ vt).T
        ahead = turned[:, 2] > 0
        at = turned[:, :2] / np.where(ahead, turned[:, 2], 1.0)[:, None]
        distance = np.where(ahead, np.linalg.norm(at * factor - second, axis=1), np.inf)
        used = distance <= max(off, float(np.median(distance)))
    return float((distance <= off).mean())


def _rays(places: Floats) -> Floats:
    """Return [N, 3] unit rays to places at depth 1."""
    rays = np.column_stack([places, np.ones(len(places))])
    return np.asarray(rays / np.linalg.norm(rays, axis=1, keepdims=True))
