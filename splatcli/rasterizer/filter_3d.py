"""The 3D smoothing filter of Mip-Splatting: no Gaussian is finer than the views can show (docs/math.md 2.4).

Training keeps raw parameters and a size for each Gaussian, by which the kernels blur it. Renders and exports of a
trained model have the blur in their scales and opacities, so that any viewer shows what was trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from splatcli.gaussians import Gaussians
from splatcli.reproducible import exp, log, softplus, sqrt
from splatcli.scene.camera import Camera

#: Variance of the filter in pixels of the view that sees a Gaussian best, squared (Mip-Splatting).
VARIANCE = 0.2

#: A view sees the points in its image and within this part of its size around it (Mip-Splatting).
MARGIN = 0.15

#: A size of zero is replaced by this one, so that its logarithm and the gradient are finite.
_LEAST = 1e-30

#: Gaussians that are processed at once: a few temporary numbers of each.
_ROWS = 1 << 20


@torch.no_grad()
def filter_sizes(means: Tensor, cameras: Sequence[Camera], largest_of_all: Callable[[float], float] = float) -> Tensor:
    """Return [N] float32: standard deviation of each Gaussian's filter, world units, for training views ``cameras``.

    means: [N, 3]. The best view of a Gaussian is the one with most pixels to a world unit there. Gaussians that no view
    sees get the largest size of the others; 0 where no view sees any.
    largest_of_all: returns the largest size of all processes, given the largest of this one.
    """
    rates = torch.cat(
        [_best_rates(rows, cameras) for rows in torch.split(means.float(), _ROWS)] or [means.new_zeros(0)]
    )
    sizes = math.sqrt(VARIANCE) / rates
    seen = rates > 0.0
    coarsest = largest_of_all(float(torch.where(seen, sizes, 0.0).max()) if len(sizes) else 0.0)
    return torch.where(seen, sizes, coarsest)


def _best_rates(means: Tensor, cameras: Sequence[Camera]) -> Tensor:
    """Return [R] the most pixels to a world unit at each of means [R, 3]; 0 where no view sees it."""
    best = means.new_zeros(len(means))
    columns = means.unbind(1)
    for camera in cameras:
        # No matrix product: its bits may depend on the number of threads.
        x, y, z = (_affine(columns, row) for row in camera.viewmat[:3].tolist())
        if camera.model == "pinhole":
            u, v, far = camera.fx * x / z + camera.cx, camera.fy * y / z + camera.cy, z
        elif camera.model == "ortho":
            u, v, far = camera.fx * x + camera.cx, camera.fy * y + camera.cy, torch.ones_like(z)
        else:
            u, v, far = _of_fisheye(camera, x, y, z)
        inside = (z > camera.near) & _within(u, camera.width) & _within(v, camera.height)
        best = torch.maximum(best, torch.where(inside, max(camera.fx, camera.fy) / far, 0.0))
    return best


def _of_fisheye(camera: Camera, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return pixel coordinates and distances [R]; a fisheye shows a world unit by the distance, not by z."""
    across = sqrt(x * x + y * y)
    # Whether a point is in the image takes few digits, but the same ones on every processor.
    angle = torch.from_numpy(np.arctan2(across.double().cpu().numpy(), z.double().cpu().numpy())).to(x)
    scale = angle / across.clamp(min=_LEAST)
    return camera.fx * x * scale + camera.cx, camera.fy * y * scale + camera.cy, sqrt(x * x + y * y + z * z)


def _affine(columns: tuple[Tensor, ...], row: list[float]) -> Tensor:
    return columns[0] * row[0] + columns[1] * row[1] + columns[2] * row[2] + row[3]


def _within(position: Tensor, size: int) -> Tensor:
    return (position >= -MARGIN * size) & (position <= (1.0 + MARGIN) * size)


def apply_filter_3d(gaussians: Gaussians, sizes: Tensor) -> Gaussians:
    """Return raw Gaussians with the filter in their scales and opacities; differentiable in ``gaussians``.

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
    """Return [N] double: the part of each Gaussian's opacity that the filter keeps."""
    blur = log(sizes.clamp(min=_LEAST))[:, None]
    x, y, z = (0.5 * softplus(2.0 * (blur - gaussians.log_scales.double()))).unbind(dim=1)
    return exp(-(x + y + z))


def _blurred(log_scales: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Return logarithms of the blurred deviations [N, 3] and of the opacities' shares [N], in double precision."""
    raw = log_scales.double()
    wider = 0.5 * _log1p_exp(2.0 * (sizes.double().clamp(min=_LEAST).log()[:, None] - raw))
    return raw + wider, -wider.sum(dim=1)


def _log1p_exp(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))
