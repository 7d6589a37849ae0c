"""Shares of the matches that cast doubt on a model: a rotation explains them, or they contradict the cameras.

A camera that stays at one place: a rotation alone explains its matches, and they say nothing about depth. With a wrong
focal length, or one wrong match in a hundred, mapping may still find a model: images of a full turn become a ring of
cameras that look outwards, with small errors and points at depths that are made up.

Images in wrong places contradict the pairs that would put them in the right ones: where a scene repeats, and steps
between images are so large that only what repeats is matched, a model may have small errors in the points that it keeps
and none of the matches of most pairs among them. Where two sides of an object look alike, images of one are registered
as images of the other, and the few pairs that contradict this are neighbours, from one side to the next.

What moves through the scene, and moves as one, has epipolar lines of its own. RANSAC takes the motion of most matches
of a pair. Where a figure stands elsewhere in each image and has as many matches as the scene, cameras follow the one in
some pairs and the other in others. Repeated patterns have a second motion, too: whole pairs of images match a side of a
room with another, which the cameras of the model contradict, and pairs that agree with the cameras have none or some.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splatcli.scene._pycolmap import pycolmap
from splatcli.sfm.matching import Pair, neighbours, verified_pairs

Floats = NDArray[np.float64]


# --- a rotation alone -------------------------------------------------------------------------------------------------

#: Pairs that are read, about.
_ROTATION_PAIRS = 120
#: Distance from where a rotation takes a point that counts as there: in parts of the longer side, and pixels at least.
_TURNED_OFF, _LEAST_OFF = 0.004, 1.5
#: Focal lengths that are tried, in parts of the first guess: of cameras without EXIF, and where all have one. In parts
#: of the longer side none is longer than the last: a step over flat ground from far above looks like a turn then.
_GUESSED, _KNOWN, _LONGEST = np.geomspace(0.4, 1.25, 25), np.geomspace(0.88, 1.14, 7), 1.5
_ROUNDS = 4


def rotation_share(database: Path) -> float:
    """Return the share of a pair's matches that a rotation about the camera's centre explains, the median over pairs.

    Focal lengths are those with which it is largest. Pairs are those that are verified, with their inlier matches, and
    of these the half that moves most, for small steps look like turns. 0 without a pair.
    """
    pairs = sorted(verified_pairs(database))
    with pycolmap.Database.open(database) as store:
        cameras = {int(camera.camera_id): camera for camera in store.read_all_cameras()}
        camera_of = {int(image.image_id): cameras[int(image.camera_id)] for image in store.read_all_images()}
        pairs = [pair for pair in pairs if not any(_is_long(camera_of[image_id]) for image_id in pair)]
        matched = [_from_the_middle(store, camera_of, pair) for pair in _some(pairs, _ROTATION_PAIRS)]
    if not matched:
        return 0.0
    matched.sort(key=lambda pair: float(np.median(np.linalg.norm(pair[0] - pair[1], axis=1))))
    matched = matched[len(matched) // 2 :]
    factors = _KNOWN if all(camera.has_prior_focal_length for camera in cameras.values()) else _GUESSED
    return max(float(np.median([_turned(*pair, factor) for pair in matched])) for factor in factors)


def _is_long(camera: pycolmap.Camera) -> bool:
    return bool(camera.mean_focal_length() > _LONGEST * max(camera.width, camera.height))


def _from_the_middle(
    store: pycolmap.Database, camera_of: dict[int, pycolmap.Camera], pair: Pair
) -> tuple[Floats, Floats, float]:
    """Return [N, 2] of both images of a pair, the matches from the middle, and how far off counts.

    The unit is the first guess of the focal length. Distortion, which is not known yet, is left out.
    """
    places, off = [], 0.0
    matches = store.read_two_view_geometry(*pair).inlier_matches
    for image_id, xy in zip(pair, _places(store, pair, matches), strict=True):
        camera = camera_of[image_id]
        places.append((xy - [camera.width / 2, camera.height / 2]) / camera.mean_focal_length())
        off = max(_TURNED_OFF * max(camera.width, camera.height), _LEAST_OFF) / camera.mean_focal_length()
    return places[0], places[1], off


def _turned(first: Floats, second: Floats, off: float, factor: float) -> float:
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


# --- matches that contradict the cameras ------------------------------------------------------------------------------

#: Pairs that are read, about, for a second motion and for contradictions; matches that a second motion explains, at
#: least.
_PAIRS, _MORE_PAIRS, _LEAST = 40, 300, 15
#: Distance from an epipolar line that counts as on it, in parts of the longer side.
_OFF = 0.004
_TRIALS = 2000
#: The part of a pair's matches from which on it agrees with the cameras, and the quantile over these pairs.
_AGREES, _QUANTILE = 0.5, 0.25


def second_motion(database: Path, model: pycolmap.Reconstruction, seed: int) -> float:
    """Return the share of a pair's matches that the cameras of a model contradict and one other motion explains.

    That is share_of_most() over verified pairs of registered images.
    """
    shares = []
    with pycolmap.Database.open(database) as store:
        verified = verified_pairs(database)
        for pair in _some(_registered_pairs(verified, model, verified), _PAIRS):
            matches = np.asarray(store.read_matches(*pair))
            if len(matches):
                shares.append(_shares(model, pair, _places(store, pair, matches), seed))
    return share_of_most(shares)


def contradicted_share(database: Path, model: pycolmap.Reconstruction) -> float:
    """Return the share of matches that are in pairs which the cameras of a model contradict.

    Matches are those that the geometry of two registered images explains, of about _MORE_PAIRS pairs. 0 without a pair.
    """
    counts = verified_pairs(database)
    pairs = _some(_registered_pairs(counts, model, counts), _MORE_PAIRS)
    total = sum(counts[pair] for pair in pairs)
    return sum(counts[pair] for pair in contradicted_pairs(database, model, pairs)) / total if total else 0.0


def contradicted_pairs(database: Path, model: pycolmap.Reconstruction, pairs: Iterable[Pair]) -> set[Pair]:
    """Return those of ``pairs``, verified and of registered images, that the cameras of a model contradict.

    Fewer than half of the matches that the geometry of the two images explains lie on the cameras' epipolar lines.
    """
    found = set()
    with pycolmap.Database.open(database) as store:
        for pair in pairs:
            matches = np.asarray(store.read_two_view_geometry(*pair).inlier_matches)
            if _agree(model, pair, _places(store, pair, matches)).mean() < _AGREES:
                found.add(pair)
    return found


def contradicted_steps(
    database: Path, model: pycolmap.Reconstruction, images: Sequence[int], reach: int
) -> tuple[list[Pair], list[Pair]]:
    """Return the steps from an image to the next that matches hold, and those of them that the cameras contradict.

    images: ids in the order in which they were taken. A step is contradicted where its own pair is, and the pairs
    across it have most of their matches in pairs that are: of registered images at most ``reach`` apart. What moves, or
    looks alike by chance, contradicts single pairs.
    """
    counts, place = verified_pairs(database), {image_id: at for at, image_id in enumerate(images)}
    steps = _registered_pairs(map(_ordered, neighbours(images, 1)), model, counts)
    odd = contradicted_pairs(database, model, steps)
    if not odd:
        return steps, []
    near = _registered_pairs(map(_ordered, neighbours(images, reach)), model, counts)
    wrong = contradicted_pairs(database, model, near)
    found = []
    for step in sorted(odd):
        after = max(place[image_id] for image_id in step)
        across = [pair for pair in near if len({place[image_id] < after for image_id in pair}) == 2]
        if 2 * sum(counts[pair] for pair in across if pair in wrong) > sum(counts[pair] for pair in across):
            found.append(step)
    return steps, found


def _ordered(pair: Pair) -> Pair:
    return min(pair), max(pair)


def share_of_most(shares: Sequence[tuple[float, float]]) -> float:
    """Return the share of a second motion that three quarters of the pairs which agree with the cameras have at least.

    shares: of each pair, the parts of its matches that agree with the cameras and that the other motion explains. 0
    where no pair agrees.
    """
    second = [other for agreeing, other in shares if agreeing >= _AGREES]
    return float(np.quantile(second, _QUANTILE)) if second else 0.0


def _registered_pairs(pairs: Iterable[Pair], model: pycolmap.Reconstruction, verified: Container[Pair]) -> list[Pair]:
    """Return those of ``pairs`` that are verified, of images that a model registers, ascending."""
    registered = set(model.reg_image_ids())
    return sorted(pair for pair in pairs if pair in verified and registered.issuperset(pair))


def _agree(model: pycolmap.Reconstruction, pair: Pair, places: list[Floats]) -> NDArray[np.bool_]:
    """Return [N], whether matches lie on the epipolar lines of two images, by Sampson's distance.

    places: [N, 2] in both images, pixels.
    """
    first, second = (model.image(image_id) for image_id in pair)
    cameras = [model.camera(image.camera_id) for image in (first, second)]
    rays, others = (np.asarray(camera.cam_from_img(xy)) for camera, xy in zip(cameras, places, strict=True))
    essential = pycolmap.essential_matrix_from_pose(second.cam_from_world() * first.cam_from_world().inverse())
    squared = pycolmap.compute_squared_sampson_error(rays, others, essential)
    return np.asarray(np.sqrt(squared) * cameras[0].mean_focal_length() <= _off(cameras[0]))


def _shares(model: pycolmap.Reconstruction, pair: Pair, places: list[Floats], seed: int) -> tuple[float, float]:
    """Return the shares of matches on the epipolar lines of two images, and off them but on others.

    places: [N, 2] in both images, pixels.
    """
    left = ~_agree(model, pair, places)
    agreeing = 1.0 - float(left.mean())
    if left.sum() < _LEAST:
        return agreeing, 0.0
    options = pycolmap.RANSACOptions()
    options.max_error = _off(model.camera(model.image(pair[0]).camera_id))
    options.max_num_trials, options.random_seed = _TRIALS, seed
    found = pycolmap.estimate_fundamental_matrix(places[0][left], places[1][left], options)
    count = 0 if found is None else int(found["num_inliers"])
    return agreeing, count / len(left) if count >= _LEAST else 0.0


def _off(camera: pycolmap.Camera) -> float:
    return _OFF * float(max(camera.width, camera.height))


# --- pairs ------------------------------------------------------------------------------------------------------------


def _some(pairs: Sequence[Pair], count: int) -> Sequence[Pair]:
    """Return about ``count`` of the pairs, evenly spaced."""
    return pairs[:: max(1, len(pairs) // count)]


def _places(store: pycolmap.Database, pair: Pair, matches: Any) -> list[Floats]:
    """Return [N, 2] in both images of a pair, the places of the features that ``matches`` [N, 2] names."""
    return [
        np.asarray(store.read_keypoints(image_id), dtype=np.float64)[np.asarray(matches)[:, column], :2]
        for column, image_id in enumerate(pair)
    ]
