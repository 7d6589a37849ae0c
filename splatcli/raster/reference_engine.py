"""ReferenceEngine: a training step in plain torch; the oracle of the fused one, and the way without a compiler."""

from __future__ import annotations

import torch
from torch import Tensor

from splatcli.gaussians import GROUPS, Gaussians
from splatcli.raster.adam import AdamState
from splatcli.raster.reference import blend_reference, loss_reference
from splatcli.raster.reference_projection import ALPHA_MIN, Splats, project_visible
from splatcli.raster.stats import GrowthStats
from splatcli.raster.stepping import ImmediateEngine
from splatcli.scene.camera import Camera


class ReferenceEngine(ImmediateEngine):
    """A StepEngine by autograd; any float dtype, any device, and slow."""

    def step(
        self,
        gaussians: Gaussians,
        adam: AdamState,
        camera: Camera,
        target: Tensor,
        *,
        lrs: dict[str, float],
        sh_degree: int,
        background: Tensor,
        ssim_lambda: float,
        antialiased: bool,
        stats: GrowthStats | None,
        hidden: Tensor | None = None,
    ) -> float:
        """One view's loss, after its gradient has moved ``gaussians`` and ``adam`` in place; adds to ``stats``.

        target: [H, W, 3] uint8, black where hidden. background: [3]. lrs: by the names in GROUPS. hidden: [H, W] bool.
        """
        loss, grads, index, splats, v_means2d = self._backward(
            gaussians, camera, target, sh_degree, background, ssim_lambda, antialiased, hidden
        )
        adam.apply_reference(gaussians, grads, lrs)
        if stats is not None:
            seen = _touches_image(splats, camera)
            half = v_means2d.new_tensor([0.5 * camera.width, 0.5 * camera.height])
            stats.grad2d.index_add_(0, index[seen], (v_means2d[seen] * half).norm(dim=1).to(stats.grad2d.dtype))
            stats.count.index_add_(0, index[seen], stats.count.new_ones(int(seen.sum())))
        return loss

    @staticmethod
    def _backward(
        gaussians: Gaussians,
        camera: Camera,
        target: Tensor,
        sh_degree: int,
        background: Tensor,
        ssim_lambda: float,
        antialiased: bool,
        hidden: Tensor | None,
    ) -> tuple[float, Gaussians, Tensor, Splats, Tensor]:
        """(loss, dL/d parameters, indices [V] of the splats, the splats, dL/d means2d [V, 2] per pixel)."""
        with torch.enable_grad():
            leaves = gaussians.map(lambda t: t.detach().requires_grad_(True))
            index, splats = project_visible(leaves, camera, sh_degree=sh_degree, antialiased=antialiased)
            image, _, _ = blend_reference(splats, camera.width, camera.height, background)
            if hidden is not None:
                image = image.masked_fill(hidden[..., None], 0.0)
            loss = loss_reference(image, target.to(image.dtype) / 255.0, ssim_lambda)
            inputs = [getattr(leaves, name) for name in GROUPS]
            *by_group, v_means2d = torch.autograd.grad(
                loss, [*inputs, splats.means2d], allow_unused=True, materialize_grads=True
            )
        return float(loss.detach()), Gaussians(**dict(zip(GROUPS, by_group, strict=True))), index, splats, v_means2d


@torch.no_grad()
def _touches_image(splats: Splats, camera: Camera) -> Tensor:
    """[V] bool: the box around the area where alpha reaches 1/255 holds a pixel's centre (docs/math.md 5.2)."""
    reach = 2.0 * (splats.opacities / ALPHA_MIN).log().clamp(min=0.0)
    half = (reach[:, None] * splats.cov2d[:, ::2]).sqrt()
    size = half.new_tensor([camera.width, camera.height])
    low, high = splats.means2d - half, splats.means2d + half
    return ((high >= 0.5) & (low <= size - 0.5)).all(dim=1)
