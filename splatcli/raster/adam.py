"""AdamState: the optimiser's moments, and the plain torch form of one Adam step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from splatcli.gaussians import Gaussians


@dataclass(slots=True)
class AdamState:
    """First and second moments of all six groups, under one step count.

    exp_avg, exp_avg_sq: shaped as the Gaussians; row i belongs to Gaussian i.
    step: updates done so far. It is one number for all rows, also for those born later: a new row starts with
        zero moments but with the bias correction of the whole run, as in torch and in the field's trainers.
    beta1, beta2, eps: as in torch.optim.Adam.
    """

    exp_avg: Gaussians
    exp_avg_sq: Gaussians
    step: int
    beta1: float
    beta2: float
    eps: float

    @classmethod
    def zeros_like(
        cls, gaussians: Gaussians, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-15
    ) -> AdamState:
        """The state before the first update of ``gaussians``."""
        return cls(gaussians.map(torch.zeros_like), gaussians.map(torch.zeros_like), 0, beta1, beta2, eps)

    @torch.no_grad()
    def apply_reference(self, gaussians: Gaussians, grads: Gaussians, lrs: dict[str, float]) -> None:
        """One dense Adam step in place on ``gaussians`` and on this state (docs/math.md section 8).

        grads: the gradients, shaped as the Gaussians.
        lrs: learning rate of each group, by its name in GROUPS.
        """
        self.step += 1
        correction1 = 1.0 - self.beta1**self.step
        correction2 = math.sqrt(1.0 - self.beta2**self.step)
        for name, param in gaussians.items():
            grad = getattr(grads, name)
            first = getattr(self.exp_avg, name)
            second = getattr(self.exp_avg_sq, name)
            first.lerp_(grad, 1.0 - self.beta1)
            second.mul_(self.beta2).addcmul_(grad, grad, value=1.0 - self.beta2)
            denominator = (second.sqrt() / correction2).add_(self.eps)
            param.addcdiv_(first, denominator, value=-lrs[name] / correction1)
