"""Schedules by the step number: learning rates, the active SH degree and the image size."""

from __future__ import annotations

import math

from splatcli.config import OptimConfig, Schedule


def log_linear(first: float, last: float, fraction: float) -> float:
    """Return the log-linear interpolation between ``first`` and ``last`` at ``fraction``, clipped to 0..1."""
    t = min(max(fraction, 0.0), 1.0)
    if t == 1.0:
        return last
    return math.exp((1.0 - t) * math.log(first) + t * math.log(last))


def learning_rates(optim: OptimConfig, schedule: Schedule, extent: float, step: int) -> dict[str, float]:
    """Return the learning rate of each parameter group at step number ``step``, counted from 1.

    The rate of the means is multiplied by the scene extent (world units). It falls log-linearly to its final value at
    step ``schedule.lr_steps`` and stays there. The others fall likewise by ``optim.final_factor``, except that of shN.
    """
    done = step / schedule.lr_steps
    means = log_linear(optim.means_lr, optim.means_lr_final, done)
    factor = log_linear(1.0, optim.final_factor, done)
    return {
        "means": means * extent,
        "quats": factor * optim.quats_lr,
        "log_scales": factor * optim.log_scales_lr,
        "logit_opacities": factor * optim.logit_opacities_lr,
        "sh0": factor * optim.sh0_lr,
        "shN": optim.shN_lr,
    }


def active_sh_degree(schedule: Schedule, max_degree: int, step: int) -> int:
    """Return the SH degree that step number ``step`` trains: one more every ``sh_degree_interval`` steps."""
    return min(max_degree, (schedule.sh_degree_start or 0) + step // schedule.sh_degree_interval)


def image_divisor(schedule: Schedule, step: int) -> int:
    """Return the divisor of the training images' sides at step number ``step``: reduced first, full size in the end."""
    return 1 << max(0, (schedule.num_downscales or 0) - (step - 1) // schedule.resolution_schedule)
