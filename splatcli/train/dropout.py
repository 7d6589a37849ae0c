"""Dropout of Gaussians (DropGaussian, Park et al., 2025): each step leaves a random part of them out.

Where few images show a place, training can fit each of them with Gaussians that views between them contradict.
Gaussians that are missing in a step make the others explain what they covered. All are there when a view is scored,
rendered or exported. Captures of views close to each other lose by it, so that it is on by default where views are far
apart only (docs/quality.md).

A Gaussian is left out by a 3D filter (docs/math.md 2.4) so wide that no opacity remains: it is culled, has no gradient,
and Adam treats it as one that the view does not see.

Blending is linear in each opacity, and Gaussians are left out independently. So the mean image of a step with the rate
r is that of all Gaussians with 1 - r times their opacities, and these are rendered, scored and exported. DropGaussian
raises the opacities of the others by 1 / (1 - r) in each step instead, which opacities near 1 have no room for.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from splatcli.config import Config
from splatcli.reproducible import softplus

#: Size of the 3D filter of a Gaussian that is left out, world units; its square is finite in float32.
_WIDE = 1e18

#: Keeps the random words apart from those of other streams with the same seed.
_STREAM = 0x64726F706F7574

_UINT64 = (1 << 64) - 1
_LEVELS = 256


def dropout_rate(config: Config, step: int) -> float:
    """Return the part of the Gaussians that step number ``step`` leaves out.

    It rises linearly from 0 to ``train.dropout`` at step ``schedule.lr_steps``, and stays there. None is that of a run
    that began before there was dropout: 0.
    """
    return (config.train.dropout or 0.0) * min(1.0, step / config.schedule.lr_steps)


def dropped(seed: int, step: int, count: int, rate: float) -> Tensor:
    """Return [count] bool, the Gaussians that step number ``step`` leaves out: a pure function, on the CPU.

    rate: 0 to 1, rounded to 1/256.
    """
    key = np.array([(seed ^ _STREAM) & _UINT64, step], dtype=np.uint64)
    # numpy guarantees these words for all versions; a byte of a word decides on a Gaussian.
    words = np.random.Philox(key=key).random_raw(-(-count // 8)).astype("<u8")
    return torch.from_numpy(words.view(np.uint8)[:count] < round(_LEVELS * rate))


def mean_opacities(logits: Tensor, rate: float) -> Tensor:
    """Return logits [N] of the opacities that Gaussians have in the mean of steps with that ``rate``, 0 to below 1."""
    if rate == 0.0:
        return logits
    # The logit of (1 - rate) o in logarithms: no opacity near 1 loses digits.
    known = logits.double()
    return (known + math.log1p(-rate) - softplus(known + math.log(rate))).to(logits)


def dropout_filter(sizes: Tensor | None, rows: Tensor) -> Tensor:
    """Return [N] float32 sizes of a 3D filter that leaves out ``rows`` [N] bool.

    sizes: [N], of the filter of the others; None: they have none.
    """
    others = torch.zeros(len(rows), dtype=torch.float32, device=rows.device) if sizes is None else sizes
    return others.masked_fill(rows, _WIDE)
