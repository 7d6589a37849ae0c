"""The 3D filter of Mip-Splatting: no Gaussian is finer than the views could show (docs/math.md 2.4).

Training keeps raw parameters and a size for each Gaussian; the kernels blur by it inside. What is rendered or exported
later has the blur in its own scales and opacities, so that any viewer shows what was trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from splatcli.gaussians import Gaussians
from splatcli.rasterizer.context import Z_NEAR
from splatcli.reproducible import exp, log, softplus
from splatcli.scene.camera import Camera

#: Variance of the filter in pixels of the view that sees a Gaussian best, squared (Mip-Splatting).
VARIANCE = 0.2

#: A view sees what lies within its image and this part of its size around it (Mip-Splatting).
MARGIN = 0.15

#: A size of zero is taken for this one, so that its logarithm and the gradient are numbers.
_LEAST = 1e-30

#: Gaussians that are looked at together: a few numbers of each are alive at a time.
_ROWS = 1 << 20


@torch.no_grad()
def filter_sizes(means: Tensor, cameras: Sequence[Camera], largest_of_all: Callable[[float], float] = float) -> Tensor:
    """[N] float32: standard deviation of each Gaussian's filter in world units, for training views ``cameras``.

    means: [N, 3]. The best view of a Gaussian is the one with most pixels to a world unit there. What no view sees
    gets the largest size that any other has; 0 where none sees anything.
    largest_of_all: gives the largest size anywhere for the largest of these, where other processes have more Gaussians.
    """
    rates = torch.cat(
        [_best_rates(rows, cameras) for rows in torch.split(means.float(), _ROWS)] or [means.new_zeros(0)]
    )
    sizes = math.sqrt(VARIANCE) / rates
    seen = rates > 0.0
    coarsest = largest_of_all(float(torch.where(seen, sizes, 0.0).max()) if len(sizes) else 0.0)
    return torch.where(seen, sizes, coarsest)


def _best_rates(means: Tensor, cameras: Sequence[Camera]) -> Tensor:
    """[R] pixels to a world unit at each of means [R, 3], at most; 0 where no view sees it."""
    best = means.new_zeros(len(means))
    columns = means.unbind(1)
    for camera in cameras:
        # No matrix product: its bits may depend on the number of threads.
        x, y, z = (_affine(columns, row) for row in camera.viewmat[:3].tolist())
        u, v = camera.fx * x / z + camera.cx, camera.fy * y / z + camera.cy
        inside = (z > Z_NEAR) & _within(u, camera.width) & _within(v, camera.height)
        best = torch.maximum(best, torch.where(inside, max(camera.fx, camera.fy) / z, 0.0))
    return best


def _affine(columns: tuple[Tensor, ...], row: list[float]) -> Tensor:
    return columns[0] * row[0] + columns[1] * row[1] + columns[2] * row[2] + row[3]


def _within(position: Tensor, size: int) -> Tensor:
    return (position >= -MARGIN * size) & (position <= (1.0 + MARGIN) * size)


def smoothed(gaussians: Gaussians, sizes: Tensor) -> Gaussians:
    """Raw Gaussians that look without a filter as ``gaussians`` do with it; differentiable in them.

    sizes: [N] as of filter_sizes().
    """
    log_scales, log_share = _blurred(gaussians.log_scales, sizes)
    # The logit of opacity times share, in logarithms: neither an opacity near one nor a share near zero loses digits.
    logits = gaussians.logit_opacities.double()
    logits = logits + log_share - _log1p_exp(logits + torch.log(-torch.expm1(log_share)))
    return replace(
        gaussians,
        log_scales=log_scales.to(gaussians.log_scales),
        logit_opacities=logits.to(gaussians.logit_opacities),
    )


@torch.no_grad()
def opacity_shares(gaussians: Gaussians, sizes: Tensor) -> Tensor:
    """[N] double: what the filter leaves of each Gaussian's opacity."""
    blur = log(sizes.clamp(min=_LEAST))[:, None]
    x, y, z = (0.5 * softplus(2.0 * (blur - gaussians.log_scales.double()))).unbind(dim=1)
    return exp(-(x + y + z))


def _blurred(log_scales: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithms of the blurred deviations [N, 3] and of the opacities' shares [N], in double precision."""
    raw = log_scales.double()
    wider = 0.5 * _log1p_exp(2.0 * (sizes.double().clamp(min=_LEAST).log()[:, None] - raw))
    return raw + wider, -wider.sum(dim=1)


def _log1p_exp(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))
