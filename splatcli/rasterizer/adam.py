"""AdamState: the optimiser's moments, lazy updates of shN, and plain torch forms of a step; gsplat's SelectiveAdam."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from splatcli.gaussians import Gaussians
from splatcli.rasterizer.offload import DEVICE_STORAGE, ROWS, TensorStorage
from splatcli.reproducible import power, sqrt


@dataclass(slots=True)
class AdamState:
    """First and second moments of all six groups, under one step count.

    exp_avg, exp_avg_sq: shaped as the Gaussians; row i belongs to Gaussian i.
    step: updates done so far. It is one number for all rows, also for those born later: a new row starts with
        zero moments but with the bias correction of the whole run, as in torch and in the field's trainers.
    beta1, beta2, eps: as in torch.optim.Adam.
    sh_last_step: [N] int32, the last step that was applied to shN of a Gaussian and its moments. A step without a
        gradient changes a number by its moments alone, so the native engines leave shN of Gaussians that a view does
        not reach, and apply all missed steps at once when one does (docs/math.md section 8.1). ``flushed`` gives
        current values.
    storage: where shN and its moments lie.
    size_power: power of a Gaussian's size by which the learning rate of its mean grows; 0: all have one rate. The size
        is the second-longest standard deviation, relative to exp(log_size) (docs/math.md 8.7).
    """

    exp_avg: Gaussians
    exp_avg_sq: Gaussians
    step: int
    beta1: float
    beta2: float
    eps: float
    sh_last_step: Tensor
    storage: TensorStorage = DEVICE_STORAGE
    size_power: float = 0.0
    log_size: float = 0.0

    @classmethod
    def zeros_like(
        cls,
        gaussians: Gaussians,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-15,
        storage: TensorStorage = DEVICE_STORAGE,
        size_power: float = 0.0,
        log_size: float = 0.0,
    ) -> AdamState:
        """Return the state before the first update of ``gaussians``."""
        steps = torch.zeros(len(gaussians), dtype=torch.int32, device=gaussians.device)
        first, second = (gaussians.map(torch.zeros_like, shN=storage.zeros) for _ in range(2))
        return cls(first, second, 0, beta1, beta2, eps, steps, storage, size_power, log_size)

    @property
    def lazy(self) -> bool:
        """Whether missed steps can be applied at once: their sum must be finite."""
        return 0.0 < self.beta1 < 0.9999 * self.beta2 and self.beta2 < 1.0

    @torch.no_grad()
    def flushed(self, gaussians: Gaussians, lr: float) -> Gaussians:
        """Return ``gaussians`` with every missed step applied; shares all tensors but, where steps were missed, shN.

        lr: the learning rate of shN.
        """
        late = self._lagging(gaussians)
        if len(late) == 0:
            return gaussians
        shN = self.storage.copy(gaussians.shN, gaussians.device)
        for rows in torch.split(late, ROWS):
            self._move(shN, rows, lr)
        return replace(gaussians, shN=shN)

    @torch.no_grad()
    def flush(self, gaussians: Gaussians, lr: float) -> None:
        """Apply every missed step in place, to the moments too. lr: the learning rate of shN."""
        late = self._lagging(gaussians)
        for rows in torch.split(late, ROWS) if len(late) else ():
            decays = self._move(gaussians.shN, rows, lr)
            for moment, decay in zip((self.exp_avg.shN, self.exp_avg_sq.shN), decays, strict=True):
                there = rows.to(moment.device)
                moment[there] = (_here(moment, rows) * _column(decay, moment)).to(moment.device)
        # Steps with betas that cannot be lazy are done for all rows and counted here only.
        self.sh_last_step.fill_(self.step)

    def _lagging(self, gaussians: Gaussians) -> Tensor:
        """Return [R] the rows whose shN has missed steps."""
        if not self.lazy or gaussians.shN.numel() == 0:
            return self.sh_last_step.new_zeros(0, dtype=torch.int64)
        return (self.sh_last_step < self.step).nonzero().squeeze(1)

    def _move(self, shN: Tensor, rows: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        """Bring these rows of shN to the current step by their moments; return the moments' decays [R]."""
        rate, eps, *decays = self._decays(rows, lr)
        first, second = _here(self.exp_avg.shN, rows), _here(self.exp_avg_sq.shN, rows)
        moved = _here(shN, rows) - _column(rate, first) * first / (sqrt(second) + _column(eps, first))
        shN[rows.to(shN.device)] = moved.to(shN.device)
        return decays[0], decays[1]

    def _decays(self, rows: Tensor, lr: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return rate, eps and both decays [R] of the steps that each row has missed, float64."""
        table = _on(rows.device, decay_table, self.beta1, self.beta2)
        last_step = self.sh_last_step[rows].long()
        missed = self.step - last_step
        source, target = table[last_step.clamp(max=len(table) - 1)], table[min(self.step, len(table) - 1)]
        count = 1 << self.step.bit_length()  # so that tables are seldom made anew

        def decayed(base: float) -> Tensor:
            return _on(rows.device, _powers, base, count)[missed]

        a = source[:, 0] - decayed(self.beta1 / math.sqrt(self.beta2)) * target[0]
        b = source[:, 1] - decayed(self.beta1 / self.beta2) * target[1]
        return lr * a, self.eps * b / a, decayed(self.beta1), decayed(self.beta2)

    @torch.no_grad()
    def apply_reference(self, gaussians: Gaussians, grads: Gaussians, lrs: dict[str, float]) -> None:
        """Take one dense Adam step in place on ``gaussians`` and on this state (docs/math.md section 8).

        grads: the gradients, shaped as the Gaussians.
        lrs: learning rate of each group, by its name in GROUPS.
        """
        self.flush(gaussians, lrs["shN"])
        self.step += 1
        self.sh_last_step.fill_(self.step)
        correction1 = 1.0 - self.beta1**self.step
        correction2 = math.sqrt(1.0 - self.beta2**self.step)
        factor = self.means_rate(gaussians.log_scales)
        for name, param in gaussians.items():
            grad = getattr(grads, name)
            first = getattr(self.exp_avg, name)
            second = getattr(self.exp_avg_sq, name)
            first.lerp_(grad, 1.0 - self.beta1)
            second.mul_(self.beta2).addcmul_(grad, grad, value=1.0 - self.beta2)
            denominator = (second.sqrt() / correction2).add_(self.eps)
            move = first * factor if name == "means" and self.size_power > 0.0 else first
            param.addcdiv_(move, denominator, value=-lrs[name] / correction1)

    def means_rate(self, log_scales: Tensor) -> Tensor:
        """Return [N, 1], the factors of the means' learning rate for ``log_scales`` [N, 3]; a tenth to ten times."""
        ratio = (second_longest(log_scales) - self.log_size).exp() ** self.size_power
        return ratio.clamp(1.0 / MOST_RATE, MOST_RATE)[:, None]


#: The learning rate of a mean is at most this times that of a typical Gaussian, and at least that part of it.
MOST_RATE = 10.0

#: Logarithms of sizes are added up in integers, of which this many are 1: any order of the rows has the same sum.
_SUM_UNIT = 1 << 20


def second_longest(log_scales: Tensor) -> Tensor:
    """Return [N], the log-scale of the second-longest axis, of [N, 3]."""
    a, b, c = log_scales.unbind(dim=1)
    return torch.maximum(torch.minimum(a, b), torch.minimum(torch.maximum(a, b), c))


@torch.no_grad()
def sum_of_log_sizes(log_scales: Tensor) -> float:
    """Return the sum over Gaussians of the logarithm of the second-longest standard deviation, for [N, 3].

    Rows and parts of them in any order give the same number.
    """
    if len(log_scales) == 0:
        return 0.0
    logs = second_longest(log_scales).nan_to_num(0.0).clamp(-100.0, 100.0)
    return float((logs.double() * _SUM_UNIT).round().long().sum()) / _SUM_UNIT


@lru_cache(maxsize=4)
def decay_table(beta1: float, beta2: float) -> Tensor:
    """Return [S, 2] float64 on the CPU: A and B of docs/math.md section 8.1, row s for numbers last updated at step s.

    The table ends where bias corrections are one; its last row serves all later steps.
    """
    ratio_a, ratio_b = beta1 / math.sqrt(beta2), beta1 / beta2
    last = math.ceil(math.log(1e-10) / math.log(max(beta1, beta2)))
    a, b = ratio_a / (1.0 - ratio_a), ratio_b / (1.0 - ratio_b)
    rows = [(a, b)]
    for step in range(last, 0, -1):
        first, second = 1.0 - beta1**step, 1.0 - beta2**step
        a, b = ratio_a * (math.sqrt(second) / first + a), ratio_b * (second / first + b)
        rows.append((a, b))
    return torch.tensor(rows[::-1], dtype=torch.float64)


def _powers(base: float, count: int) -> Tensor:
    """Return [count] float64 on the CPU: ``base`` to the power of 0, 1, 2 and so on."""
    return power(base, torch.arange(count))


@lru_cache(maxsize=16)
def _on(device: torch.device, make: Callable[..., Tensor], *arguments: float) -> Tensor:
    """Return a table that ``make`` makes of its arguments, kept on ``device``: a copy to a GPU waits for it."""
    return make(*arguments).to(device)


def _here(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return ``rows`` of a tensor that may be on another device, on the device of ``rows``."""
    return tensor[rows.to(tensor.device)].to(rows.device)


def _column(values: Tensor, like: Tensor) -> Tensor:
    """Return values [R] as [R, 1, 1] in the dtype of ``like``."""
    return values.to(like.dtype)[:, None, None]


class SelectiveAdam(torch.optim.Adam):
    """gsplat's optimizer, for loops of one's own: it changes the Gaussians that a view shows, and leaves the others.

    A group has one parameter. Moments have no bias correction, as there.
    """

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
