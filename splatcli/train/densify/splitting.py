"""Splitting: what takes the place of a Gaussian that becomes two.

Along the longest axis (``halves``) nothing is drawn: two children that are SHRINK times as long lie so far to both
sides that together they spread as far as the one did; its other axes stay. At random (``drawn``) children are smaller
all round and begin somewhere within it. ``thinned`` has opacities with which what is seen through stays as it was.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from splatcli.gaussians import Gaussians
from splatcli.reproducible import exp, expm1, log, normal, rotate, softplus

#: How long a half is. Second moments stay with halves DISTANCE standard deviations off: their squares sum to 1.
SHRINK = 0.6
DISTANCE = math.sqrt(1.0 - SHRINK**2)

#: A child at random has its parent's standard deviations divided by this: 0.8 times 2 children (INRIA).
SPLIT_SHRINK = 1.6


def long_axis_split(gaussians: Gaussians, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Means and log-scales, each [2 S, 3], of two children of each of ``rows`` [S]: all first ones, then all second."""
    means, log_scales = gaussians.means[rows], gaussians.log_scales[rows]
    offsets = _offsets(gaussians, rows, DISTANCE * _longest(log_scales) * exp(log_scales))
    return torch.cat([means + offsets, means - offsets]), long_axis_scales(log_scales).repeat(2, 1)


def long_axis_scales(log_scales: Tensor) -> Tensor:
    """[N, 3] what halves() makes of log-scales [N, 3]."""
    return log_scales + math.log(SHRINK) * _longest(log_scales)


def _longest(log_scales: Tensor) -> Tensor:
    """[N, 3] 1 for the longest axis, of equal ones the first, 0 for the others."""
    return torch.nn.functional.one_hot(log_scales.argmax(dim=1), 3).to(log_scales)


def sample_split(gaussians: Gaussians, rows: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """As halves(), with children distributed as the Gaussian itself."""
    rows = torch.cat([rows, rows])
    noise = normal(len(rows), 3, generator=generator).to(gaussians.device)
    offsets = _offsets(gaussians, rows, noise * exp(gaussians.log_scales[rows]))
    return gaussians.means[rows] + offsets, gaussians.log_scales[rows] - math.log(SPLIT_SHRINK)


def revised_opacities(logits: Tensor, length: float) -> Tensor:
    """Logits of each of two Gaussians ``length`` times as long as one with ``logits`` [N] that they take the place of.

    Optical depth -log(1 - o), times length, is as much as it was: 1 - (1 - o)^(1 / (2 length)). In one place, with
    length 1, two are together as opaque as the one.
    """
    # log(1 - o) = -softplus(x), so the depth of each is this, and the logit of 1 - exp(-depth) log(exp(depth) - 1).
    depth = softplus(logits) * (0.5 / length)
    return (depth + log(-expm1(-depth))).to(logits.dtype)


def _offsets(gaussians: Gaussians, rows: Tensor, local: Tensor) -> Tensor:
    """[S, 3] in world axes, in the dtype of the means: ``local`` [S, 3] in the axes of the Gaussians ``rows``."""
    return rotate(gaussians.quats[rows], local).to(gaussians.means.dtype)
