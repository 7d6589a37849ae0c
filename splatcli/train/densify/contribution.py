"""Contributions of Gaussians to the training views, for the refinements that prune the weakest.

The measure is the largest sum of blend weights in any view: what is small, faint or covered in all of them goes. A sum
over the views would remove what few of them show.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, eq=False)
class BlendWeights:
    """The blend weights of Gaussians in views that are rendered: how much each contributes to an image.

    antialiased, filter_3d: as of render().
    group: of processes that hold the same Gaussians; each renders a part of the views. None: this one renders all.
    """

    gaussians: Gaussians
    cameras: Sequence[Camera]
    antialiased: bool = False
    filter_3d: Tensor | None = None
    group: ProcessGroup | None = None

    def in_views(self, turn: int = 0) -> Iterator[Tensor]:
        """Yield [N] for each view that this process renders: the sums of the weights over its pixels.

        turn: see views_of().
        """
        chosen = views_of(len(self.cameras), turn)
        for index in chosen if self.group is None else chosen[self.group.rank :: self.group.size]:
            camera = reduced(self.cameras[index])
            yield blend_weights(self.gaussians, camera, antialiased=self.antialiased, filter_3d=self.filter_3d)


@torch.no_grad()
def largest_weights(weights: BlendWeights, turn: int) -> Tensor:
    """Return [N], the largest sum of a Gaussian's blend weights in one of some views; 0 where none shows it.

    turn: a number that grows from call to call, so that other views are rendered each time. All processes of a group
    get the same numbers.
    """
    largest, group = weights.gaussians.means.new_zeros(len(weights.gaussians)), weights.group
    for sums in weights.in_views(turn):
        largest = torch.maximum(largest, sums)
    return largest if group is None else torch.stack(group.all_gather(largest)).amax(dim=0)


def views_of(count: int, turn: int) -> list[int]:
    """Return which of ``count`` views are rendered: at most VIEWS, evenly spaced, one further in each turn."""
    return [(index + turn) % count for index in evenly(range(count), VIEWS)]


def reduced(camera: Camera) -> Camera:
    """Return a camera with fewer pixels. The blur of a pixel's size then weighs small Gaussians more."""
    return camera.scaled(min(SCALE, VIEW_SIDE / max(camera.width, camera.height)))
