"""Strategy: the one interface between the training loop and density control."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from splatcli.gaussians import Gaussians
from splatcli.rasterizer.stats import DensifyStats
from splatcli.rasterizer.step_inputs import Regularisation
from splatcli.train.densify.edit import Edit


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
