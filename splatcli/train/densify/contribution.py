"""Contributions of Gaussians to the training views, for the refinements that prune the weakest.

The measure is the largest sum of blend weights in any view: what is small, faint or covered in all of them goes. A sum
over the views would remove what few of them show.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from splatcli.gaussians import Gaussians
from splatcli.rasterizer.rendering import blend_weights
from splatcli.scene.camera import Camera
from splatcli.sizes import evenly

if TYPE_CHECKING:
    from splatcli.distributed.process_group import ProcessGroup

#: Views that are rendered, their size as a part of the images', and pixels of their longer side at most.
VIEWS, SCALE, VIEW_SIDE = 64, 0.5, 640


@torch.no_grad()
def largest_weights(
    gaussians: Gaussians,
    cameras: Sequence[Camera],
    turn: int,
    *,
    antialiased: bool = False,
    filter_3d: Tensor | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Return [N], the largest sum of a Gaussian's blend weights in one of some views; 0 where none shows it.

    turn: a number that grows from call to call, so that other views are rendered each time. group: of processes that
    hold the same Gaussians; each renders a part of the views, and all get the same numbers. antialiased, filter_3d: as
    of render().
    """
    largest = gaussians.means.new_zeros(len(gaussians))
    chosen = views_of(len(cameras), turn)
    for index in chosen if group is None else chosen[group.rank :: group.size]:
        weights = blend_weights(gaussians, reduced(cameras[index]), antialiased=antialiased, filter_3d=filter_3d)
        largest = torch.maximum(largest, weights)
    return largest if group is None else torch.stack(group.all_gather(largest)).amax(dim=0)


def views_of(count: int, turn: int) -> list[int]:
    """Return which of ``count`` views are rendered: at most VIEWS, evenly spaced, one further in each turn."""
    return [(index + turn) % count for index in evenly(range(count), VIEWS)]


def reduced(camera: Camera) -> Camera:
    """Return a camera with fewer pixels. The blur of a pixel's size then weighs small Gaussians more."""
    return camera.scaled(min(SCALE, VIEW_SIDE / max(camera.width, camera.height)))
