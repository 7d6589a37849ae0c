"""ReferenceEngine: a training step in plain torch, for tests of the fused one and where there is no compiler."""

from __future__ import annotations

import torch
from torch import Tensor

from splatcli.gaussians import GROUPS, Gaussians
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.alpha_loss import alpha_loss_reference
from splatcli.rasterizer.depth_loss import depth_loss_reference
from splatcli.rasterizer.filter_3d import apply_filter_3d
from splatcli.rasterizer.ppisp import DARK, PIECES
from splatcli.rasterizer.reference import (
    ALPHA_MIN,
    Splats,
    blend_reference,
    clamped,
    loss_reference,
    noise_reference,
    project_visible,
    regularise_reference,
)
from splatcli.rasterizer.step_inputs import StepInputs, SyncEngine
from splatcli.scene.camera import Camera


class ReferenceEngine(SyncEngine):
    """A StepEngine by autograd; any float dtype, any device, and slow."""

    def step(self, gaussians: Gaussians, adam: AdamState, inputs: StepInputs) -> float:
        loss, grads, index, splats, v_means2d, v_params = self._backward(gaussians, inputs)
        regularisation, stats, camera = inputs.regularisation, inputs.stats, inputs.camera
        regularise_reference(gaussians, grads, regularisation)
        adam.apply_reference(gaussians, grads, inputs.lrs)
        if regularisation.noise > 0.0:
            noise_reference(gaussians, adam.step, regularisation)
        if stats is not None:
            seen = _touches_image(splats, camera)
            half = v_means2d.new_tensor([0.5 * camera.width, 0.5 * camera.height])
            stats.grad2d.index_add_(0, index[seen], (v_means2d[seen] * half).norm(dim=1).to(stats.grad2d.dtype))
            stats.count.index_add_(0, index[seen], stats.count.new_ones(int(seen.sum())))
        if inputs.view_params is not None:
            inputs.view_params.apply_grad(*v_params)
        return loss

    @staticmethod
    def _backward(
        gaussians: Gaussians, inputs: StepInputs
    ) -> tuple[float, Gaussians, Tensor, Splats, Tensor, tuple[Tensor | None, Tensor | None]]:
        """Return (loss, gradients, indices [V] of the splats, the splats, dL/d means2d [V, 2] per pixel, v_params).

        With ``inputs.absgrad`` the fifth is the sum of its pixels' magnitudes. The last one is (v_viewmat, v_colours),
        as ViewParams.apply_grad() takes them.
        """
        camera, view_params = inputs.camera, inputs.view_params
        viewmat = torch.from_numpy(camera.viewmat).to(gaussians.means)
        colours = None if view_params is None or view_params.colours is None else view_params.colours.to(viewmat)
        with torch.enable_grad():
            leaves = gaussians.map(lambda t: t.detach().requires_grad_(True))
            pose = viewmat.requires_grad_(True) if view_params is not None and view_params.pose else None
            filtered = leaves if inputs.filter_3d is None else apply_filter_3d(leaves, inputs.filter_3d)
            colours = None if colours is None else colours.detach().requires_grad_(True)
            index, splats = project_visible(
                filtered, camera, sh_degree=inputs.sh_degree, viewmat=viewmat, antialiased=inputs.antialiased
            )
            magnitudes = torch.zeros_like(splats.means2d, requires_grad=True)
            image, alpha, depth = blend_reference(splats, camera.width, camera.height, inputs.background, magnitudes)
            if colours is not None:
                image = recolour_reference(image, colours)
            if inputs.mask is not None:
                image = image.masked_fill(inputs.mask[..., None], 0.0)
            loss = loss_reference(image, inputs.target.to(image.dtype) / 255.0, inputs.ssim_lambda)
            loss, minimised = with_terms(loss, alpha, depth, inputs)
            groups = [getattr(leaves, name) for name in GROUPS]
            trained = [tensor for tensor in (pose, colours) if tensor is not None]
            found = torch.autograd.grad(
                minimised,
                [*groups, magnitudes if inputs.absgrad else splats.means2d, *trained],
                allow_unused=True,
                materialize_grads=True,
            )
        by_group, v_means2d, rest = found[: len(groups)], found[len(groups)], iter(found[len(groups) + 1 :])
        v_params = (None if pose is None else next(rest).cpu(), None if colours is None else next(rest).cpu())
        grads = Gaussians(**dict(zip(GROUPS, by_group, strict=True)))
        return float(loss.detach()), grads, index, splats, v_means2d, v_params


def with_terms(loss: Tensor, alpha: Tensor, depth: Tensor, inputs: StepInputs) -> tuple[Tensor, Tensor]:
    """Return the loss of an image with the depth term, which is reported, and with the alpha term too."""
    if inputs.depth is not None:
        loss = loss + depth_loss_reference(alpha, depth, inputs.depth)
    if not inputs.has_alpha_term:
        return loss, loss
    weights = inputs.alpha_lambda, inputs.mask_lambda
    return loss, loss + alpha_loss_reference(alpha, inputs.target, inputs.mask, *weights)


def recolour_reference(image: Tensor, colours: Tensor) -> Tensor:
    """Return [H, W, 3] the colours of image after an exposure [3, 4], a bilateral grid [12, L, Y, X], or PPISP [36]."""
    if colours.shape == (36,):
        return _ppisp_reference(image, colours)
    if colours.shape == (3, 4):
        return image @ colours[:, :3].T + colours[:, 3]
    if colours.dim() != 4:
        raise ValueError(f"no map of colours has parameters of shape {tuple(colours.shape)}")
    height, width, _ = image.shape
    y, x = (torch.linspace(-1.0, 1.0, n, dtype=image.dtype, device=image.device) for n in (height, width))
    luma = clamped(image @ image.new_tensor([0.299, 0.587, 0.114]), 0.0, 1.0)
    place = torch.stack([x.expand(height, width), y[:, None].expand(height, width), 2.0 * luma - 1.0], dim=2)
    maps = torch.nn.functional.grid_sample(
        colours[None], place[None, None], mode="bilinear", padding_mode="border", align_corners=True
    )[0, :, 0].view(3, 4, height, width)
    return torch.einsum("ijhw,hwj->hwi", maps[:, :3], image) + maps[:, 3].permute(1, 2, 0)


@torch.no_grad()
def _touches_image(splats: Splats, camera: Camera) -> Tensor:
    """Return [V] bool: the box around the area where alpha reaches 1/255 holds a pixel's centre (docs/math.md 5.2)."""
    reach = 2.0 * (splats.opacities / ALPHA_MIN).log().clamp(min=0.0)
    half = (reach[:, None] * splats.cov2d[:, ::2]).sqrt()
    size = half.new_tensor([camera.width, camera.height])
    low, high = splats.means2d - half, splats.means2d + half
    return ((high >= 0.5) & (low <= size - 0.5)).all(dim=1)


def _ppisp_reference(image: Tensor, params: Tensor) -> Tensor:
    """Return [H, W, 3] as ppisp(): exposure, vignetting, the homography of chromaticities, and responses."""
    height, width, _ = image.shape
    vignetting, response = params[9:24].view(3, 5), params[24:].view(3, 4)
    y, x = (torch.arange(n, dtype=image.dtype, device=image.device) + 0.5 - n / 2 for n in (height, width))
    y, x = y[:, None, None] / max(height, width), x[:, None] / max(height, width)
    r2 = (x - vignetting[:, 0]).square() + (y - vignetting[:, 1]).square()
    falloff = 1.0 + (vignetting[:, 2] + (vignetting[:, 3] + vignetting[:, 4] * r2) * r2) * r2
    lit = image * torch.exp2(params[0]) * clamped(falloff, 0.0, 1.0)

    before = image.new_tensor([[0, 0, 1], [1, 0, 1], [0, 1, 1], [1 / 3, 1 / 3, 1]])
    after = torch.cat([before[:, :2] + params[1:9].view(4, 2), before[:, 2:]], dim=1)
    corners, white = after[:3].T, after[3]
    scaled = corners * torch.linalg.solve(corners, white) @ torch.linalg.inv(before[:3].T)
    rgi = torch.stack([lit[..., 0], lit[..., 1], lit.sum(dim=2)], dim=2)
    turned = rgi @ (scaled * torch.linalg.det(corners) * 3.0).T
    bright = turned[..., 2:] > DARK
    turned = turned * torch.where(bright, rgi[..., 2:] / torch.where(bright, turned[..., 2:], 1.0), 1.0)
    red, green, total = turned.unbind(2)
    corrected = torch.stack([red, green, total - red - green], dim=2)

    one = torch.tensor(1.0, dtype=image.dtype)
    start = [torch.log(torch.expm1(one - least)).to(image.device) for least in (0.3, 0.3, 0.1)]
    toe, shoulder, gamma = (
        least + torch.nn.functional.softplus(response[:, i, None] + start[i]) for i, least in enumerate((0.3, 0.3, 0.1))
    )
    centre = torch.sigmoid(response[:, 3, None])
    at = torch.linspace(0.0, 1.0, PIECES + 1, dtype=image.dtype, device=image.device).expand(3, -1)
    rise = shoulder * centre / (toe + centre * (shoulder - toe))
    low, high = at <= centre, at > centre
    tiny = torch.finfo(image.dtype).tiny
    curve = torch.where(
        low,
        rise * (torch.where(low, at, centre) / centre).clamp(min=tiny) ** toe,
        1.0 - (1.0 - rise) * (torch.where(high, 1.0 - at, 1.0 - centre) / (1.0 - centre)).clamp(min=tiny) ** shoulder,
    )
    curve = curve.clamp(min=tiny) ** gamma
    inside = clamped(corrected, 0.0, 1.0)
    piece = (inside.detach() * PIECES).long().clamp(max=PIECES - 1)
    channel = torch.arange(3, device=image.device)
    part = inside * PIECES - piece
    return (1.0 - part) * curve[channel, piece] + part * curve[channel, piece + 1] + corrected - inside
