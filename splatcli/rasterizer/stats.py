"""DensifyStats: what a training step tells density control about each Gaussian."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class DensifyStats:
    """Sums over the views since the last refinement.

    grad2d  [N] float32  sum of ||(W/2, H/2) * dL/d mean2d||, mean2d in pixels; with absgrad of the pixels' magnitudes
    count   [N] float32  views in which the Gaussian was visible: its support reached a block of pixels
    """

    grad2d: Tensor
    count: Tensor

    def __post_init__(self) -> None:
        if self.grad2d.dim() != 1 or self.grad2d.shape != self.count.shape:
            raise ValueError(f"grad2d is {tuple(self.grad2d.shape)} and count {tuple(self.count.shape)}, not [N] both")

    @classmethod
    def zeros(cls, n: int, device: torch.device | str = "cpu") -> DensifyStats:
        """Nothing seen yet, for ``n`` Gaussians."""
        return cls(torch.zeros(n, device=device), torch.zeros(n, device=device))

    def __len__(self) -> int:
        return self.grad2d.shape[0]

    def mean_grad2d(self) -> Tensor:
        """[N] the mean gradient norm over the views that saw the Gaussian; 0 where none did."""
        return self.grad2d / self.count.clamp(min=1.0)
