"""SelectiveAdam: gsplat's optimizer, which changes the Gaussians that a view shows and leaves the others as they are.

Moments have no bias correction, as there. Training here has its own Adam (rasterizer/adam.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class SelectiveAdam(torch.optim.Adam):
    """Adam over one parameter a group, with a mask of its rows."""

    def __init__(
        self, params: Any, eps: float = 1e-8, betas: tuple[float, float] = (0.9, 0.999), lr: float = 1e-3
    ) -> None:
        super().__init__(params, lr=lr, eps=eps, betas=betas)

    @torch.no_grad()
    def step(self, visibility: Tensor) -> None:  # type: ignore[override]
        """Take a step along the gradients of the rows of ``visibility`` [N], bool or 0 and 1."""
        rows = visibility.reshape(-1).nonzero()[:, 0]
        for group in self.param_groups:
            if len(group["params"]) != 1:
                raise ValueError(f"a group of SelectiveAdam has {len(group['params'])} parameters, not one")
            (param,) = group["params"]
            if param.grad is None:
                continue
            state = self.state[param]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
            beta1, beta2 = group["betas"]
            gradient = param.grad[rows]
            mean = state["exp_avg"][rows].mul_(beta1).add_(gradient, alpha=1.0 - beta1)
            square = state["exp_avg_sq"][rows].mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
            state["exp_avg"][rows], state["exp_avg_sq"][rows] = mean, square
            param[rows] -= group["lr"] * mean / (square.sqrt() + group["eps"])
