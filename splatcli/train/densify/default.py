"""AdcStrategy: adaptive density control as in the original 3DGS and gsplat.

Every ``refine_every`` steps small Gaussians whose projected mean has a large gradient are cloned and large ones split;
then transparent and, later, huge ones are pruned. At intervals all opacities are reset to 0.01 or less, so that only
useful Gaussians recover. Variants, each a setting of its own:

- The name "absgrad": the gradient of the projected mean adds the pixels' magnitudes (AbsGS, Ye et al., 2024).
- ``revised_opacity``: clone and split preserve total opacity (Rota Bulo et al., 2024), where each would otherwise keep
  its opacity and the image grow brighter.
- ``long_axis_split``: all that grow are split, small ones too, in two along their longest axis (Deng et al., 2025).

Decisions compare raw values (logits, logarithms) with the logarithm of the threshold; nothing is activated but the
scales of the few Gaussians that split.
"""

from __future__ import annotations

import math
from typing import Self

import torch
from torch import Tensor

from splatcli.config import HULL, Config
from splatcli.gaussians import Gaussians
from splatcli.rasterizer.step_inputs import DensifyStats, Regularisation
from splatcli.reproducible import exp, expm1, log, logit_of, normal, rotate, softplus
from splatcli.train.densify.base import Refinement

#: A reset lowers opacities to this (INRIA), or to twice the pruning bound (gsplat) where that is larger, at most to
#: MAX_RESET_OPACITY.
RESET_OPACITY = 0.01
MAX_RESET_OPACITY = 0.5

#: Refinements of a run that prune the weakest, and the part of the Gaussians that each prunes by default in runs that
#: start on a visual hull: all views show the whole object there (docs/quality.md).
WEAK_PRUNINGS, WEAKEST = 7, 0.1

#: A sampled child has its parent's standard deviations divided by this: 0.8 times 2 children (INRIA).
SAMPLED_SHRINK = 1.6

#: Factor of the longest axis in a long-axis split, and the distance of its children from the centre in standard
#: deviations. The second moment stays: the squares sum to 1.
LONG_AXIS_SHRINK = 0.6
LONG_AXIS_OFFSET = math.sqrt(1.0 - LONG_AXIS_SHRINK**2)


class AdcStrategy:
    """ADC; see Strategy for the interface.

    The last step of a run neither refines nor resets, and a reset needs a whole ``reset_every`` before the end, so that
    no run ends in the dip after a reset.

    extent: of the scene, world units.
    cap: of the Gaussians.
    prune_weakest: part of the Gaussians that each of WEAK_PRUNINGS refinements prunes for others, under a cap.
    """

    def __init__(self, config: Config, extent: float) -> None:
        self.config = config.strategy
        self.schedule = config.schedule
        self.iterations = config.train.iterations
        self.extent = extent
        self.cap = config.max_gaussians()
        on_hull = config.strategy.name == "absgrad" and config.model.init == HULL
        given = config.strategy.prune_weakest
        self.prune_weakest = given if given is not None else WEAKEST if on_hull else 0.0

    @classmethod
    def of(cls, config: Config, extent: float) -> Self:
        """Return the strategy for a run's settings, as the class itself does."""
        return cls(config, extent)

    @property
    def absgrad(self) -> bool:
        return self.config.name == "absgrad"

    def collects_stats(self, step: int) -> bool:
        return step < min(self.schedule.refine_stop, self.iterations)

    def regularisation(self, step: int, means_lr: float) -> Regularisation:
        return Regularisation(self.config.opacity_reg, self.config.scale_reg)

    def refines_at(self, step: int) -> bool:
        return self.densifies(step) or self.resets_opacity(step)

    def uses_weights(self, step: int) -> bool:
        """Return whether the refinement after ``step`` prunes the weakest: WEAK_PRUNINGS of all, evenly spread."""
        if self.cap is None or self.prune_weakest == 0.0 or not self.densifies(step):
            return False
        every, first = self.schedule.refine_every, self.schedule.refine_start // self.schedule.refine_every
        total = (min(self.schedule.refine_stop, self.iterations) - 1) // every - first
        number = step // every - first
        return number * WEAK_PRUNINGS // total > (number - 1) * WEAK_PRUNINGS // total

    def refine(
        self, step: int, gaussians: Gaussians, stats: DensifyStats, generator: torch.Generator
    ) -> Refinement | None:
        lowered = max(RESET_OPACITY, min(2.0 * self.config.prune_opacity, MAX_RESET_OPACITY))
        ceiling = logit_of(lowered) if self.resets_opacity(step) else None
        if self.densifies(step):
            return self._densify(step, gaussians, stats, generator, ceiling)
        if ceiling is not None:
            return Refinement.same_rows(len(gaussians), gaussians.device, opacity_ceiling=ceiling)
        return None

    def densifies(self, step: int) -> bool:
        """Return whether Gaussians are added and pruned after ``step``."""
        return self._in_window(step) and step % self.schedule.refine_every == 0

    def resets_opacity(self, step: int) -> bool:
        """Return whether opacities are reset after ``step``."""
        every = self.schedule.reset_every
        return self._in_window(step) and step % every == 0 and step + every <= self.iterations

    def grown(self, step: int, count: int) -> int:
        """Return the number of Gaussians after ``step``, if gradients let all grow that the cap has room for."""
        return count + max(0, self._room(step, count)) if self.densifies(step) else count

    def _in_window(self, step: int) -> bool:
        return self.schedule.refine_start < step < min(self.schedule.refine_stop, self.iterations)

    @torch.no_grad()
    def _densify(
        self, step: int, gaussians: Gaussians, stats: DensifyStats, generator: torch.Generator, ceiling: float | None
    ) -> Refinement:
        """Return the refinement that clones, splits and prunes. ceiling: a logit, where opacities are reset too."""
        grad = stats.mean_grad2d()
        largest = gaussians.log_scales.amax(dim=1)
        if self.config.long_axis_split:
            splits = torch.ones_like(largest, dtype=torch.bool)
            largest_child = long_axis_scales(gaussians.log_scales).amax(dim=1)
        else:
            splits = largest > math.log(self.config.grow_scale3d * self.extent)
            largest_child = largest - math.log(SAMPLED_SHRINK)
        # Comparisons are written so that a NaN is pruned: such a Gaussian is never rendered and never recovers.
        opaque = gaussians.logit_opacities >= logit_of(self.config.prune_opacity)
        huge = math.log(self.config.prune_scale3d * self.extent) if step > self.schedule.prune_huge_start else math.inf
        not_huge, children_not_huge = largest <= huge, largest_child <= huge

        high_grad = grad > self.config.grow_threshold
        if stats.weights is not None:
            opaque = opaque & ~self._weakest(opaque & not_huge, high_grad, stats.weights, step)
        kept = opaque & not_huge
        # A candidate that is pruned anyway, with its children, does not count against the cap.
        rows_after = torch.where(splits, 2 * (opaque & children_not_huge).long(), 2 * kept.long())
        grows = high_grad & (rows_after > 0)
        if self.cap is not None:
            grows = self._within_cap(grows, grad, rows_after - kept.long(), self._room(step, int(kept.sum())))

        split = (grows & splits).nonzero().squeeze(1)
        clone = (grows & ~splits).nonzero().squeeze(1)
        stay = (kept & ~(grows & splits)).nonzero().squeeze(1)
        source = torch.cat([stay, clone, split, split])
        reset_moments = torch.ones_like(source, dtype=torch.bool)
        reset_moments[: len(stay)] = False
        means, log_scales = gaussians.means[source], gaussians.log_scales[source]
        if len(split):
            children = (
                long_axis_split(gaussians, split)
                if self.config.long_axis_split
                else sample_split(gaussians, split, generator)
            )
            means[-2 * len(split) :], log_scales[-2 * len(split) :] = children
        values = {"means": means, "log_scales": log_scales}
        if self.config.revised_opacity:
            logits, grown = gaussians.logit_opacities.clone(), torch.cat([clone, split])
            logits[grown] = revised_opacities(logits[grown], LONG_AXIS_SHRINK if self.config.long_axis_split else 1.0)
            values["logit_opacities"] = logits[source]
        return Refinement(
            source,
            reset_moments,
            values,
            opacity_ceiling=ceiling,
            cloned=len(clone),
            split=len(split),
            pruned=len(gaussians) - len(stay) - len(split),
        )

    def _weakest(self, kept: Tensor, high_grad: Tensor, weights: Tensor, step: int) -> Tensor:
        """Return [N] bool, the rows of ``kept`` that contribute least to any view and leave their place to others.

        weights: [N], of DensifyStats. A part ``prune_weakest`` of the rows with a weight is chosen, and no more than
        there are rows that would grow if there was room.
        """
        weighed = (kept & (weights > 0.0)).nonzero().squeeze(1)
        waiting = int((high_grad & kept).sum()) - max(0, self._room(step, int(kept.sum())))
        chosen = min(int(self.prune_weakest * len(weighed)), max(0, waiting))
        weakest = weighed[torch.sort(weights[weighed], stable=True).indices[:chosen]]
        return torch.zeros_like(kept).index_fill_(0, weakest, True)

    def _room(self, step: int, count: int) -> int:
        """Return how many rows may be added after ``step`` to the ``count`` that stay.

        Growth to the cap is spread over the refinement window, fast first: with r refinements left, 2 / (r + 1) of the
        gap is filled, which follows cap - (cap - start) (1 - t)^2. The candidates with the largest gradients of every
        refinement use the cap better than the first ones that qualify.
        """
        gap = self.cap - count if self.cap is not None else 0
        last = min(self.schedule.refine_stop, self.iterations) - 1
        left = last // self.schedule.refine_every - (step - 1) // self.schedule.refine_every
        return math.ceil(gap * min(1.0, 2.0 / (left + 1))) if gap > 0 else gap

    @staticmethod
    def _within_cap(grows: Tensor, grad: Tensor, cost: Tensor, budget: int) -> Tensor:
        """Return [N] bool, the rows of ``grows`` that fit ``budget`` rows; largest gradient first, ties by index."""
        candidates = grows.nonzero().squeeze(1)
        order = torch.sort(grad[candidates], descending=True, stable=True).indices
        ranked = candidates[order]
        affordable = cost[ranked].cumsum(0) <= budget
        chosen = torch.zeros_like(grows)
        chosen[ranked] = affordable
        return chosen


def sample_split(gaussians: Gaussians, rows: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return means and log-scales, each [2 S, 3], of two children of each of ``rows`` [S]: first all first ones.

    Children are sampled from the Gaussian, and smaller in all axes.
    """
    rows = torch.cat([rows, rows])
    noise = normal(len(rows), 3, generator=generator).to(gaussians.device)
    offsets = _offsets(gaussians, rows, noise * exp(gaussians.log_scales[rows]))
    return gaussians.means[rows] + offsets, gaussians.log_scales[rows] - math.log(SAMPLED_SHRINK)


def long_axis_split(gaussians: Gaussians, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return means and log-scales of children as sample_split(), in fixed places on the longest axis.

    Nothing is drawn. The children, LONG_AXIS_SHRINK times as long, lie so far to both sides that together they spread
    as far as the one did; its other axes stay.
    """
    means, log_scales = gaussians.means[rows], gaussians.log_scales[rows]
    offsets = _offsets(gaussians, rows, LONG_AXIS_OFFSET * _longest(log_scales) * exp(log_scales))
    return torch.cat([means + offsets, means - offsets]), long_axis_scales(log_scales).repeat(2, 1)


def long_axis_scales(log_scales: Tensor) -> Tensor:
    """Return [N, 3], the log-scales of long_axis_split() for log-scales [N, 3]."""
    return log_scales + math.log(LONG_AXIS_SHRINK) * _longest(log_scales)


def _longest(log_scales: Tensor) -> Tensor:
    """Return [N, 3], 1 for the longest axis (of equal ones the first), 0 for the others."""
    return torch.nn.functional.one_hot(log_scales.argmax(dim=1), 3).to(log_scales)


def _offsets(gaussians: Gaussians, rows: Tensor, local: Tensor) -> Tensor:
    """Return [S, 3], ``local`` [S, 3] rotated from the axes of the Gaussians ``rows`` into world axes."""
    return rotate(gaussians.quats[rows], local).to(gaussians.means.dtype)


def revised_opacities(logits: Tensor, length: float) -> Tensor:
    """Return logits [N] for two Gaussians, each ``length`` times as long as the one with ``logits`` [N] they replace.

    The optical depth -log(1 - o), times length, is preserved: 1 - (1 - o)^(1 / (2 length)). In one place, with length
    1, the two together have the opacity of the one.
    """
    # log(1 - o) = -softplus(x), so the depth of each is this, and the logit of 1 - exp(-depth) log(exp(depth) - 1).
    depth = softplus(logits) * (0.5 / length)
    return (depth + log(-expm1(-depth))).to(logits.dtype)
