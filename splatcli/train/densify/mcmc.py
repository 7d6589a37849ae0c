"""McmcStrategy: density control by relocation, as in 3DGS-MCMC (Kheradmand et al., 2024) and gsplat.

Gaussians are samples of a distribution. Noise moves transparent ones. Dead ones, below an opacity, are relocated onto
others that are sampled by opacity; the copies share their opacity so that the image stays. The count grows by a factor
up to the cap. There is no threshold of gradients and no reset. Two regularisers lower what is not needed. docs/math.md
8.2 to 10. Rows are sampled in proportion to weights with the same result on every device and for any number of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from splatcli.config import Config
from splatcli.gaussians import Gaussians
from splatcli.rasterizer.step_inputs import DensifyStats, Regularisation
from splatcli.reproducible import expm1, log, log1p, logit, logit_of, sigmoid
from splatcli.train.densify.base import Refinement

#: Most copies in one place after one refinement: with more, the sums of docs/math.md 10 cancel (gsplat).
MAX_COPIES = 51

#: Largest opacity of copies, whose logit is finite.
MAX_OPACITY = 1.0 - 1e-7

#: Weights are integers of this unit. Sums of integers are exact, so a GPU's are equal to a CPU's; and 2^31 rows of the
#: largest weight fit into 63 bits.
_UNITS = 2.0**31


class McmcStrategy:
    """See Strategy for the interface. The last step of a run does not refine; the scene's extent takes no part.

    seed: of the noise.
    cap: of the Gaussians.
    """

    def __init__(self, config: Config, extent: float) -> None:
        self.config = config.strategy
        self.schedule = config.schedule
        self.iterations = config.train.iterations
        self.seed = config.train.seed
        self.cap = config.max_gaussians()

    @classmethod
    def of(cls, config: Config, extent: float) -> Self:
        """Return the strategy for a run's settings, as the class itself does."""
        return cls(config, extent)

    @property
    def absgrad(self) -> bool:
        return False

    def collects_stats(self, step: int) -> bool:
        return False

    def refines_at(self, step: int) -> bool:
        last = min(self.schedule.refine_stop, self.iterations)
        return self.schedule.refine_start < step < last and step % self.schedule.refine_every == 0

    def grown(self, step: int, count: int) -> int:
        """Return the number of Gaussians after ``step``: ``grow_factor`` times ``count``, at most up to the cap."""
        if not self.refines_at(step):
            return count
        target = int(self.config.grow_factor * count)
        return max(count, target if self.cap is None else min(target, self.cap))

    def regularisation(self, step: int, means_lr: float) -> Regularisation:
        config = self.config
        return Regularisation(config.opacity_reg, config.scale_reg, config.noise_lr * means_lr, self.seed)

    @torch.no_grad()
    def refine(
        self, step: int, gaussians: Gaussians, stats: DensifyStats, generator: torch.Generator
    ) -> Refinement | None:
        if not self.refines_at(step):
            return None
        rows = CopiedRows.of(gaussians)
        # Written so that a NaN is dead.
        dead = ~(rows.logits > logit_of(self.config.prune_opacity))
        moved = self._relocate(rows, dead, generator)
        added = self._grow(rows, self.grown(step, len(rows.source)), generator)
        if moved == 0 and added == 0:
            return None
        return Refinement(
            rows.source,
            rows.reset_moments,
            {"log_scales": rows.log_scales, "logit_opacities": rows.logits},
            cloned=added,
            relocated=moved,
        )

    def _relocate(self, rows: CopiedRows, dead: Tensor, generator: torch.Generator) -> int:
        """Relocate dead rows: they become copies of living ones. Return their number."""
        places = dead.nonzero().squeeze(1)
        chosen = sample_rows(rows.weights().masked_fill(dead, 0.0), len(places), generator)
        if len(chosen) == 0:
            return 0
        rows.share(chosen)
        rows.copy(places, chosen)
        return len(places)

    def _grow(self, rows: CopiedRows, target: int, generator: torch.Generator) -> int:
        """Append copies up to ``target`` rows. Return their number."""
        chosen = sample_rows(rows.weights(), max(0, target - len(rows.source)), generator)
        if len(chosen) == 0:
            return 0
        rows.share(chosen)
        rows.append(chosen)
        return len(chosen)


@dataclass(slots=True, eq=False)
class CopiedRows:
    """The new rows: their sources [M], whether their moments are reset [M], logits and log-scales."""

    source: Tensor
    reset_moments: Tensor
    logits: Tensor
    log_scales: Tensor

    @classmethod
    def of(cls, gaussians: Gaussians) -> CopiedRows:
        source = torch.arange(len(gaussians), device=gaussians.device)
        reset_moments = torch.zeros(len(gaussians), dtype=torch.bool, device=gaussians.device)
        return cls(source, reset_moments, gaussians.logit_opacities.clone(), gaussians.log_scales.clone())

    def weights(self) -> Tensor:
        """Return [M], the sampling weight of each row: its opacity."""
        return sigmoid(self.logits)

    def share(self, chosen: Tensor) -> None:
        """Let each of the ``chosen`` rows share its opacity with its copies; its moments are reset."""
        times = torch.bincount(chosen, minlength=len(self.source))
        rows = times.nonzero().squeeze(1)
        copies = (times[rows] + 1).clamp(max=MAX_COPIES)
        self.logits[rows], shrink = compute_relocation(self.logits[rows], copies)
        self.log_scales[rows] += shrink[:, None]
        self.reset_moments.index_fill_(0, rows, True)  # an assignment copies the number to a GPU, and waits

    def copy(self, places: Tensor, chosen: Tensor) -> None:
        """Replace the rows ``places`` by copies of ``chosen``."""
        for values in (self.source, self.logits, self.log_scales):
            values[places] = values[chosen]
        self.reset_moments.index_fill_(0, places, True)

    def append(self, chosen: Tensor) -> None:
        """Append copies of ``chosen``."""
        self.source = torch.cat([self.source, self.source[chosen]])
        self.logits = torch.cat([self.logits, self.logits[chosen]])
        self.log_scales = torch.cat([self.log_scales, self.log_scales[chosen]])
        self.reset_moments = torch.cat([self.reset_moments, torch.ones_like(chosen, dtype=torch.bool)])


def sample_rows(weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return [count] int64 rows, sampled with replacement in proportion to ``weights``; none where all weights are 0.

    weights: [N] in 0..1, any device; NaN counts as 0. ``torch.multinomial`` takes at most 2^24 of them.
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


def compute_relocation(logits: Tensor, copies: Tensor) -> tuple[Tensor, Tensor]:
    """Return opacity and scales of ``copies`` Gaussians in one place that together look like the one they replace.

    logits: [S]. copies: [S] int64, at least 1.
    Returns logits [S], and what is added to the logarithm of each standard deviation [S]. docs/math.md 10
    """
    opacity = sigmoid(logits)
    n = copies.double()
    each = -expm1(log1p(-opacity.clamp(max=MAX_OPACITY)) / n)
    # Term after term: the order of a sum over a dimension depends on the instruction set.
    binomial = _BINOMIAL.to(logits.device)
    total, term = torch.zeros_like(each), -torch.ones_like(each)
    for k in range(1, int(copies.max()) + 1):
        term = -term * each
        total += term * binomial[copies, k]
    return logit(each).to(logits.dtype), log(opacity / total).to(logits.dtype)


#: [n, k] n over k, divided by the root of k from k = 1 on: here, as a GPU multiplies by the reciprocal instead.
_BINOMIAL = torch.tensor(
    [[math.comb(n, k) / math.sqrt(max(k, 1)) for k in range(MAX_COPIES + 1)] for n in range(MAX_COPIES + 1)],
    dtype=torch.float64,
)
