"""Damping of view-dependent colour where few training views show a Gaussian.

The coefficients of SH degree 3 are seven of the sixteen of a channel. Where training views are fewer, they fit what is
wrong with each image, and views in between show it. So the images of a trained model have them times

    n^2 / (n^2 + h^2)

with n, the effective number of training views that show the Gaussian, and h = ``train.sh_views``. With w_v, the sum of
its blend weights over the pixels of view v, n = (sum of w_v)^2 / (sum of w_v^2): Kish's effective sample size. It is 3
for one that three views show equally well, and 1 for one that fills a single view and is a point in all others.

The trained coefficients stay as they are: like the 3D filter, the damping is part of the Gaussians that are rendered,
scored and exported, and no step sees it. L. Kish, Survey Sampling, 1965.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from splatcli.gaussians import SH_REST, Gaussians
from splatcli.rasterizer.rendering import blend_weights
from splatcli.scene.camera import Camera
from splatcli.train.densify.contribution import reduced, views_of

if TYPE_CHECKING:
    from splatcli.distributed.process_group import ProcessGroup

#: The first SH degree that is damped.
DEGREE = 3

#: Parts of a pixel that sums of blend weights are rounded to: sums of int64 are the same in any order. The squares of
#: 64 views of at most 640 x 640 pixels, 2^27.7 parts each, add up to 2^61.3.
_PARTS = 512.0


@torch.no_grad()
def effective_views(
    gaussians: Gaussians,
    cameras: Sequence[Camera],
    *,
    antialiased: bool = False,
    filter_3d: Tensor | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Return [N] float32, the effective number of ``cameras`` that show each Gaussian; 0 where none does.

    Of many cameras some are rendered, and their number is scaled to all. antialiased, filter_3d: as of render().
    group: of processes that hold the same Gaussians; each renders a part of the views, and all get the same numbers.
    """
    sums = torch.zeros(2, len(gaussians), dtype=torch.int64, device=gaussians.device)
    chosen = views_of(len(cameras), 0)
    for index in chosen if group is None else chosen[group.rank :: group.size]:
        weights = blend_weights(gaussians, reduced(cameras[index]), antialiased=antialiased, filter_3d=filter_3d)
        parts = (weights.double() * _PARTS).round().long()
        sums[0] += parts
        sums[1] += parts**2
    if group is not None:
        sums = torch.stack(group.all_gather(sums)).sum(dim=0)
    of_all = len(cameras) / max(1, len(chosen))
    first, second = sums[0].double(), sums[1].double()
    return (of_all * first**2 / second.clamp(min=1.0)).float()


@torch.no_grad()
def damp(shN: Tensor, views: Tensor, half: float) -> None:
    """Damp the coefficients [N, K, 3] in place.

    views: [N], of effective_views(). half: number of views, above 0, at which the coefficients are halved.
    """
    first = SH_REST[DEGREE - 1]
    ratio = half / views.to(shN.device).double()  # infinite where no view shows the Gaussian
    shN[:, first:] *= (1.0 / (1.0 + ratio**2)).float()[:, None, None]
