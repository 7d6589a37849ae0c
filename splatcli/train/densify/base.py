"""Strategy, the one interface between the training loop and densification, and Edit, a change of rows.

An edit is applied to parameters, moments and statistics at once, so that they cannot disagree.
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


@dataclass(frozen=True, slots=True, eq=False)
class Edit:
    """How M new rows come from N old ones.

    source: [M] int64, the old row that each new row is copied from.
    reset_moments: [M] bool, new rows that begin with zero moments.
    values: group -> [M, ...], columns that replace the copied ones.
    opacity_ceiling: logit that no opacity exceeds afterwards; the opacity moments of all rows are zeroed with it.
    clear_stats: the statistics start anew; else each row keeps those of its source.
    cloned, split, pruned, relocated: numbers of Gaussians, for the record.
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
    def same_rows(cls, n: int, device: torch.device, *, opacity_ceiling: float | None = None) -> Edit:
        """An edit that keeps all ``n`` rows with their statistics."""
        return cls(
            source=torch.arange(n, device=device),
            reset_moments=torch.zeros(n, dtype=torch.bool, device=device),
            opacity_ceiling=opacity_ceiling,
            clear_stats=False,
        )

    def __len__(self) -> int:
        return self.source.shape[0]

    def taken(self, old: Gaussians, store: TensorStorage = DEVICE_STORAGE) -> Gaussians:
        """The rows that the new ones are copied from, of ``old`` with its SH rest in ``store``."""
        return old.map(lambda column: column[self.source], rest=lambda shN: store.rows(shN, self.source))

    def in_order(self) -> Edit:
        """The same with new rows beside those that they come from.

        Gaussians begin in Morton order, and so it stays: what a view reaches lies together in memory.
        """
        order = self.source.argsort(stable=True)
        values = {name: column[order] for name, column in self.values.items()}
        return replace(self, source=self.source[order], reset_moments=self.reset_moments[order], values=values)


@torch.no_grad()
def edited_rows(
    edit: Edit,
    gaussians: Gaussians,
    shares: Callable[[Gaussians], Tensor] | None = None,
    store: TensorStorage = DEVICE_STORAGE,
) -> Gaussians:
    """The Gaussians after ``edit``; shares: see apply_edit(). store: of their SH rest."""
    unknown = set(edit.values) - set(GROUPS)
    if unknown:
        raise ValueError(f"an edit names unknown groups {sorted(unknown)}")
    rows = edit.taken(gaussians, store)
    for name, column in edit.values.items():
        if column.shape != getattr(rows, name).shape:
            raise ValueError(f"{name}: {tuple(column.shape)} instead of {tuple(getattr(rows, name).shape)}")
        setattr(rows, name, store.copy(column, gaussians.device) if name == "shN" else column.clone())
    if edit.opacity_ceiling is not None:
        rows.logit_opacities = _lowered(rows, edit.opacity_ceiling, shares)
    return rows


@torch.no_grad()
def apply_edit(
    edit: Edit,
    gaussians: Gaussians,
    adam: AdamState,
    stats: DensifyStats,
    shares: Callable[[Gaussians], Tensor] | None = None,
) -> tuple[Gaussians, AdamState, DensifyStats]:
    """New Gaussians, moments and statistics after ``edit``; the arguments stay as they are.

    shares: what a 3D filter leaves of the opacities of Gaussians, [M]. The ceiling is for what is left: lowered to it
    before the filter, thin Gaussians would be too faint to be drawn, and would never be seen again.
    """
    rows = edited_rows(edit, gaussians, shares, adam.store)

    def moments(old: Gaussians) -> Gaussians:
        return edit.taken(old, adam.store).map(
            lambda column: column.masked_fill_(as_column(edit.reset_moments, column), 0.0)
        )

    first, second = moments(adam.exp_avg), moments(adam.exp_avg_sq)
    if edit.opacity_ceiling is not None:
        first.logit_opacities.zero_()
        second.logit_opacities.zero_()

    if edit.clear_stats:
        new_stats = DensifyStats.zeros(len(edit), gaussians.device)
    else:
        new_stats = DensifyStats(stats.grad2d[edit.source], stats.count[edit.source])
    new_adam = replace(adam, exp_avg=first, exp_avg_sq=second, rest_steps=adam.rest_steps[edit.source])
    return rows, new_adam, new_stats


def _lowered(rows: Gaussians, ceiling: float, shares: Callable[[Gaussians], Tensor] | None) -> Tensor:
    """Logits [M] under a ceiling, itself a logit; with a filter none is lifted above 0.99 for it."""
    if shares is None:
        return rows.logit_opacities.clamp(max=ceiling)
    opacities = (1.0 / (1.0 + math.exp(-ceiling)) / shares(rows)).clamp(max=0.99)
    return torch.minimum(rows.logit_opacities, logit(opacities).to(rows.logit_opacities))


def as_column(mask: Tensor, like: Tensor) -> Tensor:
    """[M] -> [M, 1, ...] with as many dimensions as ``like``, on its device."""
    return mask.to(like.device).reshape(-1, *[1] * (like.dim() - 1))


@runtime_checkable
class Strategy(Protocol):
    """Decides from statistics and the step number; keeps no state of its own, so that a checkpoint misses none."""

    @property
    def absgrad(self) -> bool:
        """Whether the statistics take the pixels' gradients by their magnitudes (docs/math.md 6.3)."""

    def collects_stats(self, step: int) -> bool:
        """Whether the step about to be done, counted from 1, should add to the statistics."""

    def regularisation(self, step: int, means_lr: float) -> Regularisation:
        """What moves Gaussians beside the image in step number ``step``.

        means_lr: the learning rate of the means in it, world units.
        """

    def edits(self, step: int) -> bool:
        """Whether edit() may change anything after step number ``step``; a GPU is waited for only then."""

    def edit(self, step: int, gaussians: Gaussians, stats: DensifyStats, generator: torch.Generator) -> Edit | None:
        """What to change after step number ``step``; None changes nothing.

        generator: on the CPU, whatever the device of the Gaussians, so that all devices draw the same numbers.
        """
