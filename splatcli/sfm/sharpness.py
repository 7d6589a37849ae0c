"""Which frames to keep: the sharpest of equal stretches, so that blur goes and the path stays covered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import laplace

#: The longer side, in pixels, at which sharpness is judged: noise of single pixels does not count as detail.
_JUDGED_AT = 512

Item = TypeVar("Item")


def sharpness(rgb: NDArray[np.uint8]) -> float:
    """Variance of the Laplacian of the luminance, [H, W, 3] or [H, W]; larger is sharper, 0 is flat."""
    picture = Image.fromarray(rgb).convert("L")
    picture.thumbnail((_JUDGED_AT, _JUDGED_AT), Image.Resampling.BOX)
    return float(laplace(np.asarray(picture, dtype=np.float32)).var())


def sharpest(scored: Iterable[tuple[Item, float]], total: int, count: int) -> Iterator[Item]:
    """The item with the highest score of each of ``count`` equal stretches of ``total`` items, in order.

    The first among equals. Only one item is held at a time. Where there are more items than ``total`` the last
    stretch is longer, where there are fewer some stretches stay empty.
    """
    count = min(count, total)
    stretch, best, best_score = 0, None, -1.0
    for index, (item, score) in enumerate(scored):
        this = min(index * count // total, count - 1)
        if this != stretch and best is not None:
            yield best
            best, best_score = None, -1.0
        stretch = this
        if best is None or score > best_score:
            best, best_score = item, score
    if best is not None:
        yield best
