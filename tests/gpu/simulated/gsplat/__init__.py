"""In the place of gsplat where a GPU is simulated: the one function that scripts/gpu_check asks it for."""

from __future__ import annotations

from typing import Any

import torch

__version__ = "simulated"


def rasterization(
    means: Any,
    quats: Any,
    scales: Any,
    opacities: Any,
    colors: Any,
    viewmats: Any,
    Ks: Any,
    width: int,
    height: int,
    *,
    sh_degree: int,
    packed: bool,
) -> tuple[Any, Any, dict[str, Any]]:
    """As gsplat's, of one view, by our rasterizer on the CPU."""
    from splatcli.gaussians import Gaussians
    from splatcli.native.backend import Backend
    from splatcli.rasterizer import render
    from splatcli.scene.camera import Camera

    assert colors.shape[1:] == (16, 3)
    assert (sh_degree, packed) == (3, False)
    assert viewmats.shape == (1, 4, 4)
    assert Ks.shape == (1, 3, 3)
    (fx, _, cx), (_, fy, cy), _ = Ks[0].tolist()
    camera = Camera("view", width, height, fx, fy, cx, cy, viewmats[0].double().numpy())
    sh0, shN = colors[:, 0].contiguous(), colors[:, 1:].contiguous()
    gaussians = Gaussians(means, quats, torch.log(scales), torch.logit(opacities), sh0, shN)
    out = render(gaussians, camera, backend=Backend.cpu())
    return out.image[None], out.alpha[None, ..., None], {}
