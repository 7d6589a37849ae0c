"""Training views that do not fit the others: images of something else, wrong poses. They are left out of training.

Twice in a run every training view is rendered and compared with its image (``train.max_view_error``). A view that the
others contradict differs from its image about as much as an image that is slightly shifted differs from itself; that
takes into account how much structure the image has. Differences of exposure hardly count.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from torch import Tensor

from splatcli.config import Config
from splatcli.train.image_metrics import ssim

#: When views are compared: parts of the steps in which learning rates fall.
CHECKS = (0.4, 0.7)
#: Passes over the training views before the first comparison, and views below which none is an outlier.
MIN_PASSES, MIN_VIEWS = 5, 8
#: How many times the median error an outlier has, and how large its 1 - SSIM is, at least. The first spares captures
#: that no view fits, the second views without structure.
MIN_FACTOR, MIN_DIFFERENCE = 1.6, 0.1
#: The largest part of the views that is left out. With more, it is not clear which of them are wrong.
MOST = 0.25
#: The shift, as a part of the longer side, and pixels of that side at most.
SHIFT, SIDE = 0.01, 320


def compares_views(config: Config, views: int, step: int) -> bool:
    """Return whether a run with so many training views compares them after step number ``step``.

    A run that optimises poses does not.
    """
    train = config.train
    if train.max_view_error == 0.0 or config.views.pose_opt or views < MIN_VIEWS:
        return False
    passes = step * train.batch_size / views
    return passes >= MIN_PASSES and step in {round(part * config.schedule.lr_steps) for part in CHECKS}


def outliers(figures: Mapping[int, Sequence[float]], limit: float) -> dict[int, float]:
    """Return the errors of the outliers by row, largest first; empty where they are too many.

    figures: (difference, of_shift) of view_error() by row; the error is their quotient. limit: of the error.
    """
    if len(figures) < MIN_VIEWS:
        return {}
    errors = {row: difference / max(of_shift, 1e-6) for row, (difference, of_shift) in figures.items()}
    least = max(limit, MIN_FACTOR * statistics.median(errors.values()))
    found = {row: error for row, error in errors.items() if error > least and figures[row][0] > MIN_DIFFERENCE}
    if len(found) > MOST * len(figures):
        return {}
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def view_error(image: Tensor, target: Tensor, masked: Tensor | None) -> tuple[float, float] | None:
    """Return (difference, of_shift) of a render of a training view; None where no pixel counts.

    image, target: [H, W, 3] float32 in 0..1. masked: [H, W] bool, pixels that do not count. difference: 1 - SSIM of
    both; of_shift: that of the target and itself shifted by SHIFT, the mean of both directions.
    """
    height, width = target.shape[:2]
    step = max(1, round(SHIFT * max(height, width)))
    if min(height, width) <= step:
        return None
    pairs = [(image, target, masked)]
    for axis in (0, 1):
        size = target.shape[axis] - step
        ahead, behind = target.narrow(axis, step, size), target.narrow(axis, 0, size)
        both = None if masked is None else masked.narrow(axis, step, size) | masked.narrow(axis, 0, size)
        pairs.append((ahead.contiguous(), behind.contiguous(), both))
    if any(mask is not None and bool(mask.all()) for _, _, mask in pairs):
        return None
    difference, *of_shifts = (1.0 - ssim(one, other, mask) for one, other, mask in pairs)
    return difference, statistics.fmean(of_shifts)


def compared_divisor(width: int, height: int) -> int:
    """Return the power of two that divides the sides of an image before its view is compared."""
    divisor = 1
    while max(width, height) > SIDE * divisor:
        divisor *= 2
    return divisor
