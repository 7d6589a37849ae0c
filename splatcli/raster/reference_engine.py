"""ReferenceEngine: a training step in plain torch; the oracle of the fused one, and the way without a compiler."""

from __future__ import annotations

import torch
from torch import Tensor

from splatcli.gaussians import GROUPS, Gaussians
from splatcli.raster.adam import AdamState
from splatcli.raster.depth import depth_loss_reference
from splatcli.raster.reference import blend_reference, loss_reference
from splatcli.raster.reference_pressure import push_means_reference, regularise
from splatcli.raster.reference_projection import ALPHA_MIN, Splats, project_visible
from splatcli.raster.smoothing import smoothed
from splatcli.raster.stepping import ImmediateEngine, StepInputs
from splatcli.scene.camera import Camera


class ReferenceEngine(ImmediateEngine):
    """A StepEngine by autograd; any float dtype, any device, and slow."""

    def step(self, gaussians: Gaussians, adam: AdamState, inputs: StepInputs) -> float:
        loss, grads, index, splats, v_means2d, slopes = self._backward(gaussians, inputs)
        pressure, stats, camera = inputs.pressure, inputs.stats, inputs.camera
        regularise(gaussians, grads, pressure)
        adam.apply_reference(gaussians, grads, inputs.lrs)
        if pressure.noise > 0.0:
            push_means_reference(gaussians, adam.step, pressure)
        if stats is not None:
            seen = _touches_image(splats, camera)
            half = v_means2d.new_tensor([0.5 * camera.width, 0.5 * camera.height])
            stats.grad2d.index_add_(0, index[seen], (v_means2d[seen] * half).norm(dim=1).to(stats.grad2d.dtype))
            stats.count.index_add_(0, index[seen], stats.count.new_ones(int(seen.sum())))
        if inputs.correction is not None:
            inputs.correction.learn(*slopes)
        return loss

    @staticmethod
    def _backward(
        gaussians: Gaussians, inputs: StepInputs
    ) -> tuple[float, Gaussians, Tensor, Splats, Tensor, tuple[Tensor | None, Tensor | None]]:
        """(loss, dL/d parameters, indices [V] of the splats, the splats, dL/d means2d [V, 2] per pixel, the rest).

        The rest is what the step's correction learns from.
        """
        camera, correction = inputs.camera, inputs.correction
        viewmat = torch.from_numpy(camera.viewmat).to(gaussians.means)
        exposure = None if correction is None or correction.exposure is None else correction.exposure.to(viewmat)
        with torch.enable_grad():
            leaves = gaussians.map(lambda t: t.detach().requires_grad_(True))
            pose = viewmat.requires_grad_(True) if correction is not None and correction.pose else None
            exposure = None if exposure is None else exposure.detach().requires_grad_(True)
            shown = leaves if inputs.smoothing is None else smoothed(leaves, inputs.smoothing)
            index, splats = project_visible(
                shown, camera, sh_degree=inputs.sh_degree, viewmat=viewmat, antialiased=inputs.antialiased
            )
            image, alpha, depth = blend_reference(splats, camera.width, camera.height, inputs.background)
            if exposure is not None:
                image = image @ exposure[:, :3].T + exposure[:, 3]
            if inputs.hidden is not None:
                image = image.masked_fill(inputs.hidden[..., None], 0.0)
            loss = loss_reference(image, inputs.target.to(image.dtype) / 255.0, inputs.ssim_lambda)
            if inputs.depth is not None:
                loss = loss + depth_loss_reference(alpha, depth, inputs.depth)
            groups = [getattr(leaves, name) for name in GROUPS]
            trained = [tensor for tensor in (pose, exposure) if tensor is not None]
            found = torch.autograd.grad(
                loss, [*groups, splats.means2d, *trained], allow_unused=True, materialize_grads=True
            )
        by_group, v_means2d, rest = found[: len(groups)], found[len(groups)], iter(found[len(groups) + 1 :])
        slopes = (None if pose is None else next(rest).cpu(), None if exposure is None else next(rest).cpu())
        grads = Gaussians(**dict(zip(GROUPS, by_group, strict=True)))
        return float(loss.detach()), grads, index, splats, v_means2d, slopes


@torch.no_grad()
def _touches_image(splats: Splats, camera: Camera) -> Tensor:
    """[V] bool: the box around the area where alpha reaches 1/255 holds a pixel's centre (docs/math.md 5.2)."""
    reach = 2.0 * (splats.opacities / ALPHA_MIN).log().clamp(min=0.0)
    half = (reach[:, None] * splats.cov2d[:, ::2]).sqrt()
    size = half.new_tensor([camera.width, camera.height])
    low, high = splats.means2d - half, splats.means2d + half
    return ((high >= 0.5) & (low <= size - 0.5)).all(dim=1)
