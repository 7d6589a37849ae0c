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

#: How long a half is. Second moments stay with halves DISTANCE standard deviations off: their squares sum to 1.
SHRINK = 0.6
DISTANCE = math.sqrt(1.0 - SHRINK**2)

#: A child at random has its parent's standard deviations divided by this: 0.8 times 2 children (INRIA).
SPLIT_SHRINK = 1.6


def halves(gaussians: Gaussians, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Means and log-scales, each [2 S, 3], of two children of each of ``rows`` [S]: all first ones, then all second."""
    means, log_scales = gaussians.means[rows], gaussians.log_scales[rows]
    offsets = turned(gaussians, rows, DISTANCE * _longest(log_scales) * log_scales.exp())
    return torch.cat([means + offsets, means - offsets]), halved(log_scales).repeat(2, 1)


def halved(log_scales: Tensor) -> Tensor:
    """[N, 3] what halves() makes of log-scales [N, 3]."""
    return log_scales + math.log(SHRINK) * _longest(log_scales)


def _longest(log_scales: Tensor) -> Tensor:
    """[N, 3] 1 for the longest axis, of equal ones the first, 0 for the others."""
    return torch.nn.functional.one_hot(log_scales.argmax(dim=1), 3).to(log_scales)


def drawn(gaussians: Gaussians, rows: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """As halves(), with children distributed as the Gaussian itself."""
    rows = torch.cat([rows, rows])
    noise = torch.randn(len(rows), 3, generator=generator).to(gaussians.device, gaussians.means.dtype)
    offsets = turned(gaussians, rows, noise * gaussians.log_scales[rows].exp())
    return gaussians.means[rows] + offsets, gaussians.log_scales[rows] - math.log(SPLIT_SHRINK)


def thinned(logits: Tensor, length: float) -> Tensor:
    """Logits of each of two Gaussians ``length`` times as long as one with ``logits`` [N] that they take the place of.

    Optical depth -log(1 - o), times length, is as much as it was: 1 - (1 - o)^(1 / (2 length)). In one place, with
    length 1, two are together as opaque as the one.
    """
    # log(1 - o) = -softplus(x), so the depth of each is this, and the logit of 1 - exp(-depth) log(exp(depth) - 1).
    depth = torch.nn.functional.softplus(logits) / (2.0 * length)
    return depth + torch.log(-torch.expm1(-depth))


def turned(gaussians: Gaussians, rows: Tensor, local: Tensor) -> Tensor:
    """[S, 3] in world axes: ``local`` [S, 3] in the axes of the Gaussians ``rows``."""
    quats = gaussians.quats[rows]
    w, x, y, z = (quats / quats.norm(dim=1, keepdim=True).clamp(min=1e-12)).unbind(dim=1)
    # v + 2w (u x v) + 2 u x (u x v), the rotation of v by the unit quaternion (w, u).
    axis = torch.stack([x, y, z], dim=1)
    cross = torch.linalg.cross(axis, local)
    result: Tensor = local + 2.0 * (w[:, None] * cross + torch.linalg.cross(axis, cross))
    return result
