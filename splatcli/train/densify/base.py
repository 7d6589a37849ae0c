"""Strategy, the interface between the training loop and densification, and Refinement, the change that it returns.

A refinement is applied to parameters, moments and statistics together, so that they cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from splatcli.gaussians import GROUPS, Gaussians
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.offload import DEVICE_STORAGE, TensorStorage
from splatcli.rasterizer.step_inputs import DensifyStats, Regularisation
from splatcli.reproducible import logit


@runtime_checkable
class Strategy(Protocol):
    """Decides from statistics and the step number. It has no state of its own that a checkpoint would have to hold.

    A strategy may have one more method, ``uses_weights(step) -> bool``: whether refine() after step number ``step``
    reads ``stats.weights``, which are None without it.
    """

    @property
    def absgrad(self) -> bool:
        """Whether the statistics add the magnitudes of the pixels' gradients (docs/math.md 6.3)."""

    def collects_stats(self, step: int) -> bool:
        """Return whether step number ``step``, counted from 1, adds to the statistics."""

    def regularisation(self, step: int, means_lr: float) -> Regularisation:
        """Return the regularisation of step number ``step``.

        means_lr: the learning rate of the means in this step, world units.
        """

    def refines_at(self, step: int) -> bool:
        """Return whether refine() may change anything after step number ``step``; only then the engine is drained."""

    def refine(
        self, step: int, gaussians: Gaussians, stats: DensifyStats, generator: torch.Generator
    ) -> Refinement | None:
        """Return the refinement after step number ``step``; None changes nothing.

        generator: on the CPU, whatever the device of the Gaussians, so that all devices draw the same numbers.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Refinement:
    """How M new rows follow from N old ones: kept, cloned, split, pruned or relocated.

    source: [M] int64, the old row that each new row is copied from.
    reset_moments: [M] bool, new rows that begin with zero moments.
    values: group -> [M, ...], columns that replace the copied ones.
    opacity_ceiling: logit that no opacity exceeds afterwards; the opacity moments of all rows are zeroed with it.
    clear_stats: the statistics start at zero; otherwise each row keeps those of its source.
    cloned, split, pruned, relocated: numbers of Gaussians, for the Refined event.
    """

    source: Tensor
    reset_moments: Tensor
    values: dict[str, Tensor] = field(default_factory=dict)
    opacity_ceiling: float | None = None
    clear_stats: bool = True
    cloned: int = 0
    split: int = 0
    pruned: int = 0
    relocated: int = 0

    @classmethod
    def same_rows(cls, n: int, device: torch.device, *, opacity_ceiling: float | None = None) -> Refinement:
        """Return a refinement that keeps all ``n`` rows with their statistics."""
        return cls(
            source=torch.arange(n, device=device),
            reset_moments=torch.zeros(n, dtype=torch.bool, device=device),
            opacity_ceiling=opacity_ceiling,
            clear_stats=False,
        )

    def __len__(self) -> int:
        return self.source.shape[0]

    def check(self, old: Gaussians) -> None:
        """Raise ValueError, which begins with the field, unless the rows follow from ``old``; waits for a GPU."""
        _check_column("source", self.source, torch.int64, (len(self.source),))
        _check_column("reset_moments", self.reset_moments, torch.bool, (len(self.source),))
        if len(self.source):
            first, last = int(self.source.min()), int(self.source.max())
            if first < 0 or last >= len(old):
                raise ValueError(f"source has rows {first} to {last} of {len(old)}")
        for name, column in self.values.items():
            if name not in GROUPS:
                raise ValueError(f"values has no group {name!r}: one of {', '.join(GROUPS)}")
            _check_column(f"values[{name!r}]", column, torch.float32, (len(self.source), *getattr(old, name).shape[1:]))

    def gather(self, old: Gaussians, storage: TensorStorage = DEVICE_STORAGE) -> Gaussians:
        """Return the rows of ``old`` that the new ones are copied from; its shN is in ``storage``."""
        return old.map(lambda column: column[self.source], shN=lambda shN: storage.rows(shN, self.source))

    def without(self, rows: Tensor) -> Refinement:
        """Return the same refinement, where ``rows`` [M] bool are pruned too."""
        stay = (~rows).nonzero().squeeze(1)  # each index by a mask waits for a GPU
        count = len(rows) - len(stay)
        if count == 0:
            return self
        values = {name: column[stay] for name, column in self.values.items()}
        kept = replace(self, source=self.source[stay], reset_moments=self.reset_moments[stay], values=values)
        return replace(kept, pruned=self.pruned + count)

    def sorted_by_source(self) -> Refinement:
        """Return the same refinement with each new row beside its source.

        Gaussians start in Morton order. This keeps it: what a view reaches lies together in memory.
        """
        order = self.source.argsort(stable=True)
        values = {name: column[order] for name, column in self.values.items()}
        return replace(self, source=self.source[order], reset_moments=self.reset_moments[order], values=values)


def _check_column(name: str, column: object, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a column of a refinement is a tensor of this type and shape."""
    found = f"{column.dtype} {[*column.shape]}" if isinstance(column, Tensor) else type(column).__name__
    if found != f"{dtype} {[*shape]}":
        raise ValueError(f"{name} is {found}, not {dtype} {[*shape]}".replace("torch.", ""))


@torch.no_grad()
def apply_refinement(
    refinement: Refinement,
    gaussians: Gaussians,
    adam: AdamState,
    stats: DensifyStats,
    shares: Callable[[Gaussians], Tensor] | None = None,
) -> tuple[Gaussians, AdamState, DensifyStats]:
    """Return new Gaussians, moments and statistics after a sound ``refinement``; the arguments stay as they are.

    shares: returns [M], the part of the opacities that a 3D filter leaves. The ceiling applies after the filter: under
    a ceiling before it, thin Gaussians would be too faint to be rendered, and would never recover.
    """
    rows = refined_rows(refinement, gaussians, shares, adam.storage)

    def moments(old: Gaussians) -> Gaussians:
        return refinement.gather(old, adam.storage).map(
            lambda column: column.masked_fill_(as_column(refinement.reset_moments, column), 0.0)
        )

    first, second = moments(adam.exp_avg), moments(adam.exp_avg_sq)
    if refinement.opacity_ceiling is not None:
        first.logit_opacities.zero_()
        second.logit_opacities.zero_()

    if refinement.clear_stats:
        new_stats = DensifyStats.zeros(len(refinement), gaussians.device)
    else:
        new_stats = DensifyStats(stats.grad2d[refinement.source], stats.count[refinement.source])
    new_adam = replace(adam, exp_avg=first, exp_avg_sq=second, sh_last_step=adam.sh_last_step[refinement.source])
    return rows, new_adam, new_stats


@torch.no_grad()
def refined_rows(
    refinement: Refinement,
    gaussians: Gaussians,
    shares: Callable[[Gaussians], Tensor] | None,
    storage: TensorStorage = DEVICE_STORAGE,
) -> Gaussians:
    """Return the Gaussians after ``refinement``. shares: see apply_refinement(). storage: of their shN."""
    rows = refinement.gather(gaussians, storage)
    for name, column in refinement.values.items():
        setattr(rows, name, storage.copy(column, gaussians.device) if name == "shN" else column.clone())
    if refinement.opacity_ceiling is not None:
        rows.logit_opacities = _under_ceiling(rows, refinement.opacity_ceiling, shares)
    return rows


def _under_ceiling(rows: Gaussians, ceiling: float, shares: Callable[[Gaussians], Tensor] | None) -> Tensor:
    """Return logits [M] under a ceiling, itself a logit; a filter does not raise an opacity above 0.99."""
    if shares is None:
        return rows.logit_opacities.clamp(max=ceiling)
    opacities = (1.0 / (1.0 + math.exp(-ceiling)) / shares(rows)).clamp(max=0.99)
    return torch.minimum(rows.logit_opacities, logit(opacities).to(rows.logit_opacities))


def as_column(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask [M] as [M, 1, ...] with as many dimensions as ``like``, on its device."""
    return mask.to(like.device).reshape(-1, *[1] * (like.dim() - 1))
