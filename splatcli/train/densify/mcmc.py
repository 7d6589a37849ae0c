"""McmcStrategy: density control by relocation, as in 3DGS-MCMC (Kheradmand et al., 2024) and gsplat.

Gaussians are samples of a distribution. Noise lets the faint ones explore; those that have faded move onto others,
drawn by opacity, and share what they find there so that the image stays; the count grows by a factor until the cap.
Nothing is split by a threshold, nothing is reset. Two regularisers let what is not needed fade. docs/math.md 8.2 to 10.
Rows are drawn in proportion to weights with the same result on every device and for any number of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from splatcli.config import Config, Schedule, StrategyConfig
from splatcli.gaussians import Gaussians
from splatcli.rasterizer.step_inputs import DensifyStats, Regularisation
from splatcli.reproducible import expm1, log, log1p, logit, sigmoid
from splatcli.train.densify.base import Refinement

#: Weights are counted in this unit. Sums of whole numbers have no order, so a GPU's have the bits of a CPU's; and 2^31
#: rows of the largest weight fit into 63 bits.
_UNITS = 2.0**31


def draw(weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """[count] int64 rows, drawn with replacement in proportion to ``weights``; none where all weights are 0.

    weights: [N] in 0..1, any device; NaN counts as 0. ``torch.multinomial`` ends at 2^24 of them.
    generator: on the CPU.
    """
    units = (weights.nan_to_num(0.0).clamp(0.0, 1.0).double() * _UNITS).round().long()
    through = units.cumsum(0)
    total = int(through[-1]) if len(through) else 0
    if total == 0 or count == 0:
        return torch.empty(0, dtype=torch.int64, device=weights.device)
    # 53 random bits, scaled: of 2^31 rows with the largest weight each 2^9 units share one of them, of a weight's 2^31.
    fractions = torch.rand(count, generator=generator, dtype=torch.float64)
    ticks = (fractions * total).long().clamp_(max=total - 1).to(weights.device)
    return torch.searchsorted(through, ticks, right=True)


#: At most so many Gaussians in one place after one refinement: the sums of docs/math.md 10 cancel beyond (gsplat).
MOST_COPIES = 51

#: Copies are not more opaque than this; a logit has to exist.
MOST_OPAQUE = 1.0 - 1e-7


class McmcStrategy:
    """See Strategy for the interface.

    iterations: the run's length; its last step does not refine.
    seed: of the noise.
    cap: never more Gaussians than this.
    """

    def __init__(
        self, config: StrategyConfig, schedule: Schedule, iterations: int, seed: int, cap: int | None = None
    ) -> None:
        self.config = config
        self.cap = cap
        self.schedule = schedule
        self.iterations = iterations
        self.seed = seed

    @classmethod
    def of(cls, config: Config, extent: float) -> McmcStrategy:
        """Return the strategy for a run's settings; the scene's extent takes no part."""
        train = config.train
        return cls(config.strategy, config.schedule, train.iterations, train.seed, config.max_gaussians())

    @property
    def absgrad(self) -> bool:
        return False

    def collects_stats(self, step: int) -> bool:
        return False

    def refines_at(self, step: int) -> bool:
        last = min(self.schedule.refine_stop, self.iterations)
        return self.schedule.refine_start < step < last and step % self.schedule.refine_every == 0

    def regularisation(self, step: int, means_lr: float) -> Regularisation:
        config = self.config
        return Regularisation(config.opacity_reg, config.scale_reg, config.noise_lr * means_lr, self.seed)

    @torch.no_grad()
    def refine(
        self, step: int, gaussians: Gaussians, stats: DensifyStats, generator: torch.Generator
    ) -> Refinement | None:
        if not self.refines_at(step):
            return None
        rows = _Rows.of(gaussians)
        # Written so that a NaN is dead: it is drawn by nobody.
        dead = ~(rows.logits > math.log(self.config.prune_opacity / (1.0 - self.config.prune_opacity)))
        moved = self._relocate(rows, dead, generator)
        added = self._grow(rows, generator)
        if moved == 0 and added == 0:
            return None
        return Refinement(
            rows.source,
            rows.reset_moments,
            {"log_scales": rows.log_scales, "logit_opacities": rows.logits},
            cloned=added,
            relocated=moved,
        )

    def _relocate(self, rows: _Rows, dead: Tensor, generator: torch.Generator) -> int:
        """Dead rows become copies of living ones, in their places; how many."""
        places = dead.nonzero().squeeze(1)
        chosen = draw(rows.weights().masked_fill(dead, 0.0), len(places), generator)
        if len(chosen) == 0:
            return 0
        rows.share(chosen)
        rows.copy(places, chosen)
        return len(places)

    def _grow(self, rows: _Rows, generator: torch.Generator) -> int:
        """Appends copies, ``grow_factor`` times as many rows in all but at most the cap; how many."""
        count = len(rows.source)
        target = int(self.config.grow_factor * count)
        if self.cap is not None:
            target = min(target, self.cap)
        chosen = draw(rows.weights(), max(0, target - count), generator)
        if len(chosen) == 0:
            return 0
        rows.share(chosen)
        rows.append(chosen)
        return len(chosen)


@dataclass(slots=True, eq=False)
class _Rows:
    """The rows as they will be: where each comes from [M], whether it is new [M], and what changes in it."""

    source: Tensor
    reset_moments: Tensor
    logits: Tensor
    log_scales: Tensor

    @classmethod
    def of(cls, gaussians: Gaussians) -> _Rows:
        source = torch.arange(len(gaussians), device=gaussians.device)
        reset_moments = torch.zeros(len(gaussians), dtype=torch.bool, device=gaussians.device)
        return cls(source, reset_moments, gaussians.logit_opacities.clone(), gaussians.log_scales.clone())

    def weights(self) -> Tensor:
        """[M] how likely a row is drawn: its opacity."""
        return sigmoid(self.logits)

    def share(self, chosen: Tensor) -> None:
        """Rows that were ``chosen`` become one of several of themselves that look like one; they begin anew."""
        times = torch.bincount(chosen, minlength=len(self.source))
        rows = times.nonzero().squeeze(1)
        copies = (times[rows] + 1).clamp(max=MOST_COPIES)
        self.logits[rows], shrink = shared(self.logits[rows], copies)
        self.log_scales[rows] += shrink[:, None]
        self.reset_moments[rows] = True

    def copy(self, places: Tensor, chosen: Tensor) -> None:
        """``places`` take the numbers of ``chosen``."""
        for values in (self.source, self.logits, self.log_scales):
            values[places] = values[chosen]
        self.reset_moments[places] = True

    def append(self, chosen: Tensor) -> None:
        """New rows with the numbers of ``chosen``."""
        self.source = torch.cat([self.source, self.source[chosen]])
        self.logits = torch.cat([self.logits, self.logits[chosen]])
        self.log_scales = torch.cat([self.log_scales, self.log_scales[chosen]])
        self.reset_moments = torch.cat([self.reset_moments, torch.ones_like(chosen, dtype=torch.bool)])


def shared(logits: Tensor, copies: Tensor) -> tuple[Tensor, Tensor]:
    """What each of ``copies`` Gaussians in one place must be for all together to look like the one they replace.

    logits: [S]. copies: [S] int64, at least 1.
    Returns logits [S], and what is added to the logarithm of each standard deviation [S]. docs/math.md 10
    """
    opacity = sigmoid(logits)
    n = copies.double()
    each = -expm1(log1p(-opacity.clamp(max=MOST_OPAQUE)) / n)
    # Term after term: the order of a sum over a dimension depends on the instruction set.
    binomial = _BINOMIAL.to(logits.device)
    total, term = torch.zeros_like(each), -torch.ones_like(each)
    for k in range(1, int(copies.max()) + 1):
        term = -term * each
        total += term * (binomial[copies, k] / math.sqrt(k))
    return logit(each).to(logits.dtype), log(opacity / total).to(logits.dtype)


#: [n, k] n over k, 0 beyond n; all of them exact in float64.
_BINOMIAL = torch.tensor(
    [[math.comb(n, k) for k in range(MOST_COPIES + 1)] for n in range(MOST_COPIES + 1)], dtype=torch.float64
)
