"""Blend weights: how much each Gaussian contributes to an image.

The weight of a Gaussian in a pixel is alpha times the transmittance before it (docs/math.md 6). Its sum over the pixels
of a view is the derivative of the image by the colour of the Gaussian, so that any renderer with gradients computes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from splatcli.gaussians import Gaussians
from splatcli.rasterizer.rendering import ViewRender
from splatcli.scene.camera import Camera


def blend_weights(
    gaussians: Gaussians, camera: Camera, *, antialiased: bool = False, filter_3d: Tensor | None = None
) -> Tensor:
    """Return [N], the sum of each Gaussian's blend weights over the pixels of a view; 0 where it does not show.

    antialiased, filter_3d: as of render(). Colours are not read. Raises as render() does.
    """
    fixed = {name: column.detach() for name, column in gaussians.items()}
    fixed["shN"] = fixed["means"].new_zeros(len(gaussians), 0, 3)  # the other ones may lie elsewhere (offload)
    colors = fixed["means"].new_zeros(len(gaussians), 1, requires_grad=True)
    with torch.enable_grad():  # for the reference renderer; kernels need no graph
        view = ViewRender(Gaussians(**fixed), camera, antialiased=antialiased, filter_3d=filter_3d, colors=colors)
    return view.blend_weights().clamp(min=0.0)
