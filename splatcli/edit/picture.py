"""A picture of an edit: what operations drop, in red, over what stays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from splatcli.edit.level import up_of_cameras
from splatcli.edit.operations import EditedModel, merged
from splatcli.formats.transform import PLY_UP
from splatcli.gaussians import SH_C0, Gaussians
from splatcli.rasterizer.rendering import Render, render
from splatcli.render.images import side_by_side, to_uint8
from splatcli.render.outside import views_from_outside
from splatcli.scene.camera import Camera

#: Pixels of a view's longer side; of those that are compared by how much of the dropped they show, and how many.
_SIDE, _SMALL_SIDE, _COMPARED = 960, 160, 40
#: Red, and how much of it is laid over all that is dropped.
_RED, _OVER = torch.tensor([1.0, 0.1, 0.05]), 0.3


def draw(model: EditedModel) -> NDArray[np.uint8]:
    """Return [H, W, 3]: the camera that shows most of what is dropped, and beside it a view from outside.

    Without cameras only the latter. Dropped Gaussians behind others are faintly seen through them. Up in the view from
    outside is that of the model or its cameras, else that of a PLY, -y.
    """
    left, cameras, antialiased = model.gaussians, model.cameras, model.metadata.antialiased
    dropped = merged(model.dropped) if model.dropped else left.map(lambda tensor: tensor[:0])
    up = up_of_cameras(cameras) if model.up is None and cameras else model.up
    (outside,) = views_from_outside(merged([left, dropped]), PLY_UP if up is None else up)
    if not cameras:
        return _view(left, dropped, outside, antialiased)
    chosen = cameras[:: max(1, -(-len(cameras) // _COMPARED))]
    seen = [float(_blend(dropped, _sized(camera, _SMALL_SIDE)).alpha.mean()) for camera in chosen]
    # Among equals, also where nothing is dropped, the one in the middle.
    best = max(range(len(chosen)), key=lambda index: (seen[index], -abs(index - len(chosen) // 2)))
    inside = _sized(chosen[best], _SIDE)
    height = inside.height
    outside = _sized(replace(outside, width=height, cx=height / 2), height)
    return side_by_side([_view(left, dropped, camera, antialiased) for camera in (inside, outside)])


def _view(left: Gaussians, dropped: Gaussians, camera: Camera, antialiased: bool) -> NDArray[np.uint8]:
    if not len(dropped):
        return to_uint8(_blend(left, camera, antialiased).image)
    image = _blend(merged([left, _reddened(dropped)]), camera, antialiased).image
    # Where it is hidden, too, but faintly.
    cover = _OVER * _blend(dropped, camera, antialiased).alpha[..., None].clamp(0, 1)
    return to_uint8(image * (1 - cover) + cover * _RED)


def _reddened(gaussians: Gaussians) -> Gaussians:
    """Return the Gaussians with their brightness in shades of red, the same from all sides."""
    brightness = (gaussians.sh0 * SH_C0 + 0.5).mean(dim=1, keepdim=True).clamp(0, 1)
    sh0 = ((0.35 + 0.65 * brightness) * _RED - 0.5) / SH_C0
    return replace(gaussians, sh0=sh0, shN=gaussians.shN[:, :0])


@torch.no_grad()
def _blend(gaussians: Gaussians, camera: Camera, antialiased: bool = False) -> Render:
    return render(gaussians, camera, antialiased=antialiased)


def _sized(camera: Camera, side: int) -> Camera:
    return camera.scaled(side / max(camera.width, camera.height))
