"""Black borders that all images of a scene have: letterbox bars of a video, frames of a scan."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from splatcli.errors import SceneError
from splatcli.scene.scene import Scene
from splatcli.sizes import evenly

#: Images that are compared, at most and at least.
_MOST, _FEWEST = 8, 3
#: The brightest channel: its mean in a black row at most, and its median in the row after the border's edge at least.
_BLACK, _BRIGHT = 8.0, 24.0
#: Share of the images that show the edge. A night sky and an object before a black wall have none.
_EDGES = 0.75
#: Lines from the last black one to where that is looked for: those between are mixed, two of them in a JPEG.
_EDGE = 4
#: A border has at least this part of the rows.
_PART = 0.01

#: Lines beside a border that are taken together, and the share of their pixels that are bright in some image.
_BESIDE, _LINE = 5, 0.9

_SIDES = ("top", "bottom", "left", "right")


def black_borders(images: Sequence[NDArray[np.uint8]]) -> tuple[int, int, int, int]:
    """Return how many rows at top and bottom and columns at left and right are black in all ``images`` [H, W, 3].

    0 where they fade into the image: that is darkness, no border.
    """
    levels = [image.max(axis=2) for image in images]
    columns = [level.T for level in levels]
    top, left = _border(levels), _border(columns)
    return top, _border([level[::-1] for level in levels]), left, _border([column[::-1] for column in columns])


def may_have_borders(images: Sequence[NDArray[np.uint8]]) -> bool:
    """Return whether a line at some edge is black in all ``images`` [H, W, 3], as few of them may tell."""
    levels = np.max([image.max(axis=2) for image in images], axis=0)
    return any(float(line.mean()) <= _BLACK for line in (levels[0], levels[-1], levels[:, 0], levels[:, -1]))


def sure_borders(images: Sequence[NDArray[np.uint8]]) -> tuple[int, int, int, int]:
    """Return black_borders(), also where they surround the images, if the images together say that they are borders.

    The lines beside a border are bright somewhere in nearly all of their pixels, in one image or another. What is dark
    around an object, or above lamps, ends in no such line, and counts 0.
    """
    height, width = images[0].shape[:2]
    top, bottom, left, right = black_borders(images)
    for _ in range(2):  # rows are judged without the black columns, and the other way round
        inside = [image[top : height - bottom, left : width - right] for image in images]
        top, bottom, left, right = (
            sum(pair) for pair in zip((top, bottom, left, right), black_borders(inside), strict=True)
        )
    brightest = np.max([image.max(axis=2) for image in images], axis=0)
    inside_ = brightest[top : height - bottom, left : width - right]
    beside = (inside_, inside_[::-1], inside_.T, inside_.T[::-1])
    sure = [float((lines[1:_BESIDE].max(axis=0, initial=0) >= _BRIGHT).mean()) >= _LINE for lines in beside]
    top, bottom, left, right = (count * found for count, found in zip((top, bottom, left, right), sure, strict=True))
    return top, bottom, left, right


def _border(levels: Sequence[NDArray[np.uint8]]) -> int:
    """Return how many of the first rows of all images [H, W] are black."""
    means = np.stack([level.mean(axis=1) for level in levels])
    rows = means.shape[1]
    count = int(np.argmax([*(means.max(axis=0) > _BLACK), True]))
    inside = np.array(
        [np.median(level[count + 1 : count + _EDGE], axis=1).max() for level in levels if count + 1 < rows]
    )
    if count < max(2.0, _PART * rows) or not inside.size:
        return 0
    return count if float((inside >= _BRIGHT).mean()) >= _EDGES else 0


def listed_borders(borders: Sequence[int]) -> str:
    """Return the sides of borders with their pixels, in words."""
    return ", ".join(f"{side} {count}" for side, count in zip(_SIDES, borders, strict=True) if count)


def border_note(scene: Scene, views: Sequence[int]) -> str | None:
    """Return a sentence about black borders in the images of ``views``; None without, or where the scene has masks."""
    if scene.images.has_masks or scene.images.masked or len(views) < _FEWEST:
        return None
    chosen = evenly(views, _MOST, ends=True)
    with contextlib.suppress(SceneError):  # one that was damaged since it was scored
        images = [scene.images.image(i).pixels for i in chosen]
        if len({image.shape for image in images}) > 1:
            return None
        borders = black_borders(images)
        if any(borders):
            height, width = images[0].shape[:2]
            return (
                f"the images have black borders ({listed_borders(borders)} of {width}x{height} pixels), which are "
                "trained as part of the scene\n  help: crop the images, or hide the borders by masks: splat docs inputs"
            )
    return None
