"""Motion of the picture in a video, by which frames are chosen: while the camera stands all frames show the same.

It is measured by how much two frames differ, next to how fast the picture changes from pixel to pixel: a shift by one
pixel changes it by one gradient. That needs no search, and is right up to a few hundredths of the picture's longer
side; larger shifts count as less, a cut as no more than some hundredths.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import gaussian_filter

#: Pixels of the longer side at which frames are compared, and of the squares that are compared each for itself.
_SIDE, _CELL = 128, 16
#: Standard deviation, in these pixels, by which frames are smoothed before: a blur of 12 pixels in 2,000 counts as a
#: motion of 0.3 % so, and as 0.8 % without.
_SMOOTHED = 1.0
#: The part of the squares with texture that move less than what counts as the motion. Not the middle one: an object on
#: a turntable fills less than half of the picture.
_PERCENTILE = 90
#: Squared gradient, in levels of 255 per pixel, of a square with texture; it is added to all, since noise is no motion.
_FLAT = 1.0
#: Factors of contrast, from frame to frame, that an automatic exposure may cause.
_EXPOSURE = 2.0
#: Motion, of the longer side, below which frames show the same: a hand trembles by as much.
SAME = 0.01
#: Frames, each of which was new, with which the next one is compared.
_ANCHORS = 16
#: Motion from frame to frame counts as up to so many times that of the middle of the way: fast parts are blurred, and
#: in a cut nothing moves.
_FASTEST = 3.0
#: The way that a frame is chosen for, at least: neighbours of a real video that are so near were registered both.
_SHORTEST = SAME / 2
#: Frames that are chosen however little moves.
_FEWEST = 20

Floats = NDArray[np.float32]


class Motion:
    """The way that the picture of a video has moved, frame by frame."""

    def __init__(self) -> None:
        self._anchors: list[Floats] = []
        self._before = self._way = 0.0

    def add(self, rgb: NDArray[np.uint8]) -> float:
        """Return the way up to the next frame [H, W, 3] or [H, W], in longer sides; it does not fall.

        A frame moves it on by its distance from an anchor; one that is SAME or more away from all is an anchor itself.
        So a hand that trembles, and comes back to anchors, does not move it on.
        """
        picture = Image.fromarray(rgb).convert("L")
        picture.thumbnail((_SIDE, _SIDE), Image.Resampling.BOX)
        grey = gaussian_filter(np.asarray(picture, dtype=np.float32), _SMOOTHED)
        moved, nearest = (np.inf if self._anchors else 0.0), None
        for index in reversed(range(len(self._anchors))):  # the one that was met last comes first
            moved = min(moved, shift(self._anchors[index], grey))
            if moved < SAME:
                nearest = index
                break
        self._way = max(self._way, self._before + moved)
        if nearest is not None:
            self._anchors.append(self._anchors.pop(nearest))
        else:
            self._anchors = [*self._anchors[1 - _ANCHORS :], grey]
            self._before = self._way
        return self._way


def shift(first: Floats, second: Floats) -> float:
    """Return by how much of the longer side two pictures [H, W] of one size, 0 to 255, are shifted."""
    factor = max(float(first.std()), 1e-3) / max(float(second.std()), 1e-3)
    if not 1 / _EXPOSURE < factor < _EXPOSURE:
        factor = 1.0
    second = np.asarray((second - second.mean()) * np.float32(factor) + first.mean())
    steepness = np.maximum(_cells(_squared_gradient(first)), _cells(_squared_gradient(second)))
    # A shift in one direction meets half of the squared gradient.
    moved = np.sqrt(2 * _cells((first - second) ** 2) / (steepness + _FLAT))
    textured = steepness > _FLAT
    longer: int = max(first.shape)
    return float(np.percentile(moved[textured] if textured.any() else moved, _PERCENTILE)) / longer


def stretches(way: Sequence[float], most: int) -> list[int]:
    """Return the number of the stretch that each frame is in, ascending from 0; at most ``most``, equal in motion.

    way: Motion.add() of each frame. No stretch is shorter than _SHORTEST: there are fewer where less moves, up to
    _FEWEST of equal times at least. A frame that is farther from the one before it begins a stretch.
    """
    if len(way) < 2:
        return [0] * len(way)
    steps = np.diff(np.asarray(way, np.float64))
    usual = _halfway(steps) if way[-1] - way[0] >= SAME else 0.0
    steps = np.minimum([usual, *steps], _FASTEST * usual)  # the first frame is that far from one that is not there
    fewest = min(_FEWEST, most, len(steps))
    steps += max(0.0, fewest * _SHORTEST - steps.sum()) / len(steps)
    low, high = _SHORTEST, max(_SHORTEST, steps.sum())
    if _count(steps, low) > most:
        for _ in range(60):  # the length of which there are ``most``: halved until no float is between
            middle = (low + high) / 2
            low, high = (middle, high) if _count(steps, middle) > most else (low, middle)
        low = high
    ends = np.cumsum(np.minimum(steps, low)) / low
    return [int(number) for number in np.clip(np.ceil(ends - 1e-9) - 1, 0, most - 1)]


def _count(steps: NDArray[np.float64], length: float) -> float:
    """Return how many stretches of a length there are, where frames that are farther apart are one apart."""
    return float(np.minimum(steps, length).sum() / length)


def _halfway(steps: NDArray[np.float64]) -> float:
    """Return the step that half of the way is passed in steps up to."""
    ordered = np.sort(steps)
    return float(ordered[np.searchsorted(np.cumsum(ordered), steps.sum() / 2)])


def _squared_gradient(picture: Floats) -> Floats:
    squared = np.zeros_like(picture)
    for axis in (0, 1):
        if picture.shape[axis] > 1:
            squared += np.gradient(picture, axis=axis) ** 2
    return squared


def _cells(values: Floats) -> Floats:
    """Return the mean of each square of [H, W], [N]; what is left at the ends counts to none."""
    height, width = (max(1, side // _CELL) for side in values.shape)
    rows, columns = (min(_CELL, side) for side in values.shape)
    values = values[: height * rows, : width * columns]
    return np.asarray(values.reshape(height, rows, width, columns).mean(axis=(1, 3)).ravel())
