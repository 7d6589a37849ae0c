"""What changes with the step number alone: learning rates and the active SH degree."""

from __future__ import annotations

import math

from splatcli.config import OptimConfig, Schedule


def log_linear(first: float, last: float, fraction: float) -> float:
    """The value at ``fraction`` (clipped to 0..1) of a straight line between two logarithms."""
    t = min(max(fraction, 0.0), 1.0)
    if t == 1.0:
        return last
    return math.exp((1.0 - t) * math.log(first) + t * math.log(last))


def learning_rates(optim: OptimConfig, schedule: Schedule, extent: float, step: int) -> dict[str, float]:
    """The learning rate of each parameter group at step number ``step``, counted from 1.

    That of the means is multiplied with the scene extent (world units) and falls log-linearly to its final value at
    step ``schedule.lr_steps``, where it stays; the others are constant.
    """
    means = log_linear(optim.means_lr, optim.means_lr_final, step / schedule.lr_steps)
    return {
        "means": means * extent,
        "quats": optim.quats_lr,
        "log_scales": optim.log_scales_lr,
        "logit_opacities": optim.logit_opacities_lr,
        "sh0": optim.sh0_lr,
        "shN": optim.shN_lr,
    }


def active_sh_degree(schedule: Schedule, max_degree: int, step: int) -> int:
    """The SH degree in use at step number ``step``: one more every ``sh_degree_interval`` steps."""
    return min(max_degree, step // schedule.sh_degree_interval)
