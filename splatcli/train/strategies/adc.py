"""AdcStrategy: adaptive density control as in the original 3DGS and gsplat.

After each ``refine_every`` steps: clone small and split large Gaussians whose projected mean wants to move, then
prune faint and, later, huge ones. Now and then all opacities fall to 0.01, so that only useful Gaussians recover.
Decisions compare raw values (logits, logarithms) with the logarithm of the threshold; nothing is activated but the
scales of the few Gaussians that split. With the name "absgrad" the projected mean's gradient is taken by the pixels'
magnitudes (AbsGS, Ye et al., 2024); with ``revised_opacity`` two Gaussians from one are together as opaque as it was
(Rota Bulo et al., 2024), where each would otherwise keep its opacity and the image grow brighter.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from splatcli.config import Schedule, StrategyConfig
from splatcli.gaussians import Gaussians
from splatcli.raster.stats import GrowthStats
from splatcli.raster.stepping import Pressure
from splatcli.train.strategies.edit import Edit

#: A reset brings opacities down to this: twice the default pruning bound (INRIA, gsplat).
RESET_OPACITY = 0.01

#: A split Gaussian's two children have its standard deviations divided by this: 0.8 times 2 children (INRIA).
SPLIT_SHRINK = 1.6


class AdcStrategy:
    """ADC; see Strategy for the interface.

    iterations: the run's length: its last step neither refines nor resets, and a reset needs a whole
        ``reset_every`` before the end, so that no run stops in the dip that follows a reset.
    extent: world units.
    cap: never more Gaussians than this.
    """

    def __init__(
        self, config: StrategyConfig, schedule: Schedule, iterations: int, extent: float, cap: int | None = None
    ) -> None:
        self.config = config
        self.cap = cap
        self.schedule = schedule
        self.iterations = iterations
        self.extent = extent

    @property
    def absgrad(self) -> bool:
        return self.config.name == "absgrad"

    def observes(self, step: int) -> bool:
        return step < min(self.schedule.refine_stop, self.iterations)

    def pressure(self, step: int, means_lr: float) -> Pressure:
        return Pressure(self.config.opacity_reg, self.config.scale_reg)

    def edits(self, step: int) -> bool:
        return self.refines(step) or self.resets(step)

    def edit(self, step: int, gaussians: Gaussians, stats: GrowthStats, generator: torch.Generator) -> Edit | None:
        ceiling = logit(RESET_OPACITY) if self.resets(step) else None
        if self.refines(step):
            return self._refine(step, gaussians, stats, generator, ceiling)
        if ceiling is not None:
            return Edit.same_rows(len(gaussians), gaussians.device, opacity_ceiling=ceiling)
        return None

    def refines(self, step: int) -> bool:
        """Whether rows are added and removed after ``step``."""
        return self._in_window(step) and step % self.schedule.refine_every == 0

    def resets(self, step: int) -> bool:
        """Whether opacities are lowered after ``step``."""
        every = self.schedule.reset_every
        return self._in_window(step) and step % every == 0 and step + every <= self.iterations

    def _in_window(self, step: int) -> bool:
        return self.schedule.refine_start < step < min(self.schedule.refine_stop, self.iterations)

    @torch.no_grad()
    def _refine(
        self, step: int, gaussians: Gaussians, stats: GrowthStats, generator: torch.Generator, ceiling: float | None
    ) -> Edit:
        grad = stats.mean_grad2d()
        largest = gaussians.log_scales.amax(dim=1)
        large = largest > math.log(self.config.grow_scale3d * self.extent)
        # Comparisons are written so that a NaN is pruned: such a Gaussian is never drawn and never gets better.
        solid = gaussians.logit_opacities >= logit(self.config.prune_opacity)
        huge = math.log(self.config.prune_scale3d * self.extent) if step > self.schedule.prune_huge_start else math.inf
        fits = largest <= huge
        children_fit = largest - math.log(SPLIT_SHRINK) <= huge

        # A candidate that is pruned anyway, with its offspring, does not count against the cap.
        kept = solid & fits
        becomes = torch.where(large, 2 * (solid & children_fit).long(), 2 * kept.long())
        grow = (grad > self.config.grow_threshold) & (becomes > 0)
        if self.cap is not None:
            grow = self._within_cap(grow, grad, becomes - kept.long(), self._room(step, int(kept.sum())))

        split = (grow & large).nonzero().squeeze(1)
        clone = (grow & ~large).nonzero().squeeze(1)
        stay = (kept & ~(grow & large)).nonzero().squeeze(1)
        source = torch.cat([stay, clone, split, split])
        fresh = torch.ones_like(source, dtype=torch.bool)
        fresh[: len(stay)] = False
        means, log_scales = gaussians.means[source], gaussians.log_scales[source]
        if len(split):
            children = slice(len(stay) + len(clone), None)
            means[children] += _offsets(gaussians, source[children], generator)
            log_scales[children] -= math.log(SPLIT_SHRINK)
        values = {"means": means, "log_scales": log_scales}
        if self.config.revised_opacity:
            logits = gaussians.logit_opacities
            values["logit_opacities"] = torch.where(grow, half_as_opaque(logits), logits)[source]
        return Edit(
            source,
            fresh,
            values,
            opacity_ceiling=ceiling,
            cloned=len(clone),
            split=len(split),
            pruned=len(gaussians) - len(stay) - len(split),
        )

    def _room(self, step: int, count: int) -> int:
        """How many rows may be added after ``step`` to the ``count`` that stay.

        The way to the cap is spread over the whole refine window, fast first: with r refinements left, 2 / (r + 1)
        of the gap is filled, which follows cap - (cap - start) (1 - t)^2 over the window. Taking the steepest
        candidates little by little spends the cap better than filling it with the first ones that qualify.
        """
        gap = self.cap - count if self.cap is not None else 0
        last = min(self.schedule.refine_stop, self.iterations) - 1
        left = last // self.schedule.refine_every - (step - 1) // self.schedule.refine_every
        return math.ceil(gap * min(1.0, 2.0 / (left + 1))) if gap > 0 else gap

    @staticmethod
    def _within_cap(grow: Tensor, grad: Tensor, cost: Tensor, budget: int) -> Tensor:
        """[N] bool: the part of ``grow`` that adds at most ``budget`` rows; steepest first, ties by index."""
        candidates = grow.nonzero().squeeze(1)
        order = torch.sort(grad[candidates], descending=True, stable=True).indices
        ranked = candidates[order]
        affordable = cost[ranked].cumsum(0) <= budget
        chosen = torch.zeros_like(grow)
        chosen[ranked[affordable]] = True
        return chosen


def logit(probability: float) -> float:
    """log(p / (1 - p)); minus infinity at 0."""
    return math.log(probability / (1.0 - probability)) if probability > 0 else -math.inf


def half_as_opaque(logits: Tensor) -> Tensor:
    """Logits of 1 - sqrt(1 - o): of each of two Gaussians in one place that are together as opaque as one."""
    # log(1 - o) = -softplus(x), so 1 - o' = exp(-softplus(x) / 2).
    half = 0.5 * torch.nn.functional.softplus(logits)
    return torch.log(torch.expm1(half))


def _offsets(gaussians: Gaussians, rows: Tensor, generator: torch.Generator) -> Tensor:
    """[S, 3] random displacements, world units, distributed as the Gaussians ``rows`` themselves."""
    noise = torch.randn(len(rows), 3, generator=generator).to(gaussians.device, gaussians.means.dtype)
    local = noise * gaussians.log_scales[rows].exp()
    quats = gaussians.quats[rows]
    w, x, y, z = (quats / quats.norm(dim=1, keepdim=True).clamp(min=1e-12)).unbind(dim=1)
    # v + 2w (u x v) + 2 u x (u x v), the rotation of v by the unit quaternion (w, u).
    axis = torch.stack([x, y, z], dim=1)
    cross = torch.linalg.cross(axis, local)
    turned: Tensor = local + 2.0 * (w[:, None] * cross + torch.linalg.cross(axis, cross))
    return turned
