"""Views that do not fit the others: images of something else, wrong poses, other exposures, blurred images.

Twice in a run every training view is rendered and compared with its image, and the outliers are left out of the steps
that follow (``train.max_view_error``). A view that the others contradict differs from its image about as much as an
image that is slightly shifted differs from itself; that takes into account how much structure the image has.

At the end of a run the training views that steps still fit badly are named by their losses, which cost no render, and
held-out views by their scores.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from splatcli.config import Config
from splatcli.sizes import listed
from splatcli.train.events import ViewScore
from splatcli.train.image_metrics import ssim

#: When views are compared: parts of the steps in which learning rates fall.
CHECKS = (0.4, 0.7)
#: Passes over the training views before the first comparison, and training views below which none is an outlier.
MIN_PASSES, MIN_VIEWS = 5, 8
#: How many times the median error the limit is, at least: a model that fits no view well cannot tell which are wrong,
#: as one of few Gaussians, which lacks the details of close-ups.
MIN_FACTOR = 1.6
#: 1 - SSIM of an outlier, at least: images without structure are not judged.
MIN_DIFFERENCE = 0.2
#: An image is an outlier, too, that is so many times as bright as its render, or as dark. In sound captures whose
#: exposure varies an image reaches 1.14.
MAX_GAIN = 1.3
#: A standard deviation of log gains at the first comparison from which on exposures vary so much that optimising them
#: gains more than it costs (docs/quality.md): sound captures reach 0.033.
MIN_SPREAD = 0.05
#: An image of less detail is blurred: those of sound captures have 0.84 times that of their render or more.
MIN_DETAIL = 0.6
#: The largest part of the views that is left out. With more, it is not clear which of them are wrong.
MOST = 0.25
#: A training view whose loss is so many times the median is a misfit. In sound captures one reaches 3.3 times, cameras
#: turned by 2 degrees have 5 to 8, images of something else 14 (docs/quality.md).
MISFIT = 4.0
#: A held-out view whose PSNR is so many dB below the median of at least MIN_SCORED is an outlier.
OUTLIER_DB, MIN_SCORED = 8.0, 4
#: Views that a message lists.
LISTED = 4
#: The shift, as a part of the longer side, and pixels of that side at most.
SHIFT, SIDE = 0.01, 320


class ViewError(NamedTuple):
    """How a render of a training view differs from its image.

    difference: 1 - SSIM of both. of_shift: that of the image and itself shifted by SHIFT, the mean of both directions.
    gain: the factor of the render that brings it nearest to the image. detail: the image's mean square of the Laplacian
    over the render's.
    """

    difference: float
    of_shift: float
    gain: float
    detail: float = 1.0

    @property
    def error(self) -> float:
        """The difference in units of that of the shifted image."""
        return self.difference / max(self.of_shift, 1e-6)

    @property
    def has_other_exposure(self) -> bool:
        return not 1.0 / MAX_GAIN <= self.gain <= MAX_GAIN


def comparisons_due(config: Config, views: int, step: int) -> int:
    """Return how many times a run with so many training views has to have compared them after step number ``step``.

    A run that optimises poses does not, nor that of a block, which models only a part of what its images show. A run of
    a length that changes compares as soon as a part of its steps is done.
    """
    train = config.train
    if train.max_view_error == 0.0 or config.views.pose_opt or config.data.blocks is not None or views < MIN_VIEWS:
        return 0
    if step * train.batch_size < MIN_PASSES * views:
        return 0
    return sum(step >= part * config.schedule.lr_steps for part in CHECKS)


def outliers(errors: Mapping[int, ViewError], limit: float) -> dict[int, ViewError]:
    """Return those of the outliers by row, largest first; empty where it is not clear which views are wrong.

    limit: of the error.
    """
    if len(errors) < MIN_VIEWS or MIN_FACTOR * statistics.median(view.error for view in errors.values()) > limit:
        return {}
    found = {
        row: view
        for row, view in errors.items()
        if view.has_other_exposure or (view.error > limit and view.difference > MIN_DIFFERENCE)
    }
    if len(found) > MOST * len(errors):
        return {}
    return dict(sorted(found.items(), key=lambda item: (-item[1].error, item[0])))


def exposure_note(errors: Mapping[int, ViewError]) -> str | None:
    """Return a sentence about training images whose exposures vary, None where they do not.

    The standard deviation of log gains is estimated by their median absolute deviation: outliers, which are left out of
    training, do not count.
    """
    gains = [math.log(view.gain) for view in errors.values() if view.gain > 0.0]
    if len(gains) < MIN_VIEWS:
        return None
    middle = statistics.median(gains)
    spread = 1.4826 * statistics.median(abs(gain - middle) for gain in gains)
    if spread < MIN_SPREAD:
        return None
    return (
        f"the brightness of the {len(errors)} training images varies from the model's by {100 * spread:.0f} % "
        "(standard deviation); --ppisp or, faster, --exposure in a new run learns the exposure of each image"
    )


def blurred(errors: Mapping[int, ViewError]) -> list[int]:
    """Return the rows of views whose images are blurred, the most blurred first.

    The others show what they lack, so that renders of these views are sharper. Where most images are blurred, none is
    found.
    """
    if len(errors) < MIN_VIEWS:
        return []
    return sorted((row for row, view in errors.items() if view.detail < MIN_DETAIL), key=lambda row: errors[row].detail)


def blur_note(names: Sequence[str], views: int) -> str | None:
    """Return a sentence about the blurred ones among so many training images, None without one."""
    if not names:
        return None
    verb = "is" if len(names) == 1 else "are"
    return (
        f"{len(names)} of {views} training images {verb} blurred, with less than {100 * MIN_DETAIL:.0f} % of the "
        f"detail of their renders: {listed(names, LISTED)}; add sharp images of what they show"
    )


def misfits(losses: Mapping[str, float]) -> dict[str, float]:
    """Return how many times the median loss training views have that are fitted far worse than the others, worst first.

    losses: of the training views, by name, after MIN_PASSES.
    """
    if len(losses) < MIN_VIEWS:
        return {}
    middle = statistics.median(losses.values())
    found = {name: loss / middle for name, loss in losses.items() if loss > MISFIT * middle > 0.0}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def score_note(views: Sequence[ViewScore], fitted: Mapping[str, float] | None = None) -> str | None:
    """Return a sentence that names the views whose PSNR is far below that of the others, worst first, None without one.

    fitted: by name, the PSNR of a view after color_corrected().
    """
    if len(views) < MIN_SCORED:
        return None
    middle = statistics.median(view.psnr for view in views)
    found = sorted((view for view in views if view.psnr < middle - OUTLIER_DB), key=lambda view: view.psnr)
    if not found:
        return None
    named = [
        f"{view.name} {view.psnr:.1f}" + (f" ({fitted[view.name]:.1f} with its colours fitted)" if fitted else "")
        for view in found
    ]
    verb = "is" if len(found) == 1 else "are"
    low = f"{verb} far below the median PSNR of {middle:.1f} dB"
    return f"{len(found)} of {len(views)} views {low}: {listed(named, LISTED)}"


def view_error(image: Tensor, target: Tensor, masked: Tensor | None) -> ViewError | None:
    """Return how a render of a training view differs from its image, None where no pixel counts.

    image, target: [H, W, 3] float32 in 0..1, the render and the image. masked: [H, W] bool, pixels that do not count.
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
    kept = slice(None) if masked is None else ~masked
    shown, wanted = image[kept].double(), target[kept].double()
    power = float((shown * shown).sum())
    # A render that is black says nothing of exposures.
    gain = float((shown * wanted).sum()) / power if power > 1e-4 * shown.numel() else 1.0
    least = 1e-12  # the difference of neighbours is below a thousandth of a level
    detail = (_detail(target, masked) + least) / (_detail(image, masked) + least)
    return ViewError(difference, statistics.fmean(of_shifts), gain, detail)


def _detail(image: Tensor, masked: Tensor | None) -> float:
    """Return the mean square of the Laplacian of an image's grey levels [H, W, 3], 0 where no pixel counts."""
    grey = image.mean(2, dtype=torch.float64)
    laplacian = 4.0 * grey[1:-1, 1:-1] - grey[2:, 1:-1] - grey[:-2, 1:-1] - grey[1:-1, 2:] - grey[1:-1, :-2]
    if masked is not None:
        near = masked[1:-1, 1:-1] | masked[2:, 1:-1] | masked[:-2, 1:-1] | masked[1:-1, 2:] | masked[1:-1, :-2]
        laplacian = laplacian[~near]
    return float(laplacian.square().mean()) if laplacian.numel() else 0.0


def compared_divisor(width: int, height: int) -> int:
    """Return the power of two that divides the sides of an image before its view is compared."""
    divisor = 1
    while max(width, height) > SIDE * divisor:
        divisor *= 2
    return divisor
