"""A memory budget of a known size."""

from __future__ import annotations

import torch

from splatcli.rasterizer.memory_budget import MemoryBudget


class FixedBudget(MemoryBudget):
    """A fixed number of bytes for tile intersections, whatever else the process holds."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(torch.device("cpu"))
        self.nbytes = nbytes

    def left(self, reusable: int = 0) -> int:
        return self.nbytes
