"""Matches that contradict the cameras: pairs that do so as a whole, and a second motion within pairs.

Images in wrong places contradict the pairs that would put them in the right ones: where a scene repeats, and steps
between images are so large that only what repeats is matched, a model may have small errors in the points that it keeps
and none of the matches of most pairs among them.

What moves through the scene, and moves as one, has epipolar lines of its own.

RANSAC takes the motion of most matches of a pair. Where a figure stands elsewhere in each image and has as many matches
as the scene, cameras follow the one in some pairs and the other in others. Repeated patterns have a second motion, too:
whole pairs of images match a side of a room with another, which the cameras of the model contradict, and pairs that
agree with the cameras have none or some.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splatcli.scene._pycolmap import pycolmap
from splatcli.sfm.matching import pairs_that_hold

#: Pairs that are read, about, for a second motion and for contradictions; matches that a second motion explains, at
#: least.
_PAIRS, _MORE_PAIRS, _LEAST = 40, 300, 15
#: Distance from an epipolar line that counts as on it, in parts of the longer side.
_OFF = 0.004
_TRIALS = 2000
#: The part of a pair's matches from which on it agrees with the cameras, and the quantile over these pairs.
_AGREES, _QUANTILE = 0.5, 0.25

Floats = NDArray[np.float64]


def second_motion(database: Path, model: pycolmap.Reconstruction, seed: int) -> float:
    """Return the share of a pair's matches that the cameras of a model contradict and one other motion explains.

    That is share_of_most() over pairs of registered images that hold.
    """
    registered = set(model.reg_image_ids())
    pairs = sorted(pair for pair in pairs_that_hold(database) if registered.issuperset(pair))
    shares = []
    with pycolmap.Database.open(database) as store:
        for first, second in pairs[:: max(1, len(pairs) // _PAIRS)]:
            matches = np.asarray(store.read_matches(first, second))
            if len(matches) == 0:
                continue
            xy1, xy2 = _places(store, (first, second), matches)
            shares.append(_shares(model.image(first), model.image(second), xy1, xy2, seed))
    return share_of_most(shares)


def contradicted_share(database: Path, model: pycolmap.Reconstruction) -> float:
    """Return the share of matches that are in pairs which the cameras of a model contradict.

    Matches are those that the geometry of two registered images explains, and a pair is contradicted where fewer than
    half of them lie on the epipolar lines of the cameras. 0 without a pair.
    """
    registered = set(model.reg_image_ids())
    pairs = sorted(pair for pair in pairs_that_hold(database) if registered.issuperset(pair))
    contradicted = total = 0
    with pycolmap.Database.open(database) as store:
        for first, second in pairs[:: max(1, len(pairs) // _MORE_PAIRS)]:
            matches = np.asarray(store.read_two_view_geometry(first, second).inlier_matches)
            xy1, xy2 = _places(store, (first, second), matches)
            agreeing = _agree(model.image(first), model.image(second), xy1, xy2)
            contradicted += len(matches) if agreeing.mean() < _AGREES else 0
            total += len(matches)
    return contradicted / total if total else 0.0


def share_of_most(shares: Sequence[tuple[float, float]]) -> float:
    """Return the share of a second motion that three quarters of the pairs which agree with the cameras have at least.

    shares: of each pair, the parts of its matches that agree with the cameras and that the other motion explains. 0
    where no pair agrees.
    """
    second = [other for agreeing, other in shares if agreeing >= _AGREES]
    return float(np.quantile(second, _QUANTILE)) if second else 0.0


def _places(store: pycolmap.Database, pair: tuple[int, int], matches: Any) -> list[Floats]:
    """Return [N, 2] in both images of a pair, the places of the features that ``matches`` [N, 2] names."""
    return [
        np.asarray(store.read_keypoints(image_id), dtype=np.float64)[matches[:, column], :2]
        for column, image_id in enumerate(pair)
    ]


def _off(camera: pycolmap.Camera) -> float:
    return _OFF * float(max(camera.width, camera.height))


def _agree(first: pycolmap.Image, second: pycolmap.Image, xy1: Floats, xy2: Floats) -> NDArray[np.bool_]:
    """Return [N], whether matches [N, 2], pixels, lie on the epipolar lines of two images."""
    assert first.camera is not None
    return np.asarray(_distances(first, second, xy1, xy2) <= _off(first.camera))


def _shares(first: pycolmap.Image, second: pycolmap.Image, xy1: Floats, xy2: Floats, seed: int) -> tuple[float, float]:
    """Return the shares of matches [N, 2], pixels, on the epipolar lines of two images, and off them but on others."""
    assert first.camera is not None
    left = ~_agree(first, second, xy1, xy2)
    agreeing = 1.0 - float(left.mean())
    if left.sum() < _LEAST:
        return agreeing, 0.0
    options = pycolmap.RANSACOptions()
    options.max_error, options.max_num_trials, options.random_seed = _off(first.camera), _TRIALS, seed
    found = pycolmap.estimate_fundamental_matrix(xy1[left], xy2[left], options)
    count = 0 if found is None else int(found["num_inliers"])
    return agreeing, count / len(xy1) if count >= _LEAST else 0.0


def _distances(first: pycolmap.Image, second: pycolmap.Image, xy1: Floats, xy2: Floats) -> Floats:
    """Return Sampson's distances of matches [N, 2] from the epipolar lines of two images, in about pixels."""
    assert first.camera is not None
    assert second.camera is not None
    rays = [
        np.column_stack([np.asarray(camera.cam_from_img(xy)), np.ones(len(xy))])
        for camera, xy in ((first.camera, xy1), (second.camera, xy2))
    ]
    relative = (second.cam_from_world() * first.cam_from_world().inverse()).matrix()
    x, y, z = relative[:, 3]
    essential = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]]) @ relative[:, :3]
    lines, back = rays[0] @ essential.T, rays[1] @ essential
    slopes = np.sqrt((lines[:, :2] ** 2).sum(axis=1) + (back[:, :2] ** 2).sum(axis=1))
    return np.asarray(
        np.abs((rays[1] * lines).sum(axis=1)) / np.maximum(slopes, 1e-30) * first.camera.mean_focal_length()
    )
