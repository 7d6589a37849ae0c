"""The reference renderer and loss: plain torch with autograd, from docs/math.md and not from the native code.

Tests hold the kernels against it; a machine with no compiler renders small work with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from splatcli.gaussians import Gaussians
from splatcli.rasterizer.reference_projection import (
    ALPHA_MIN,
    ReferenceProjection,
    Splats,
    project_reference,
    project_visible,
)
from splatcli.scene.camera import Camera

__all__ = [
    "ReferenceProjection",
    "blend_reference",
    "image_loss_reference",
    "loss_reference",
    "project_reference",
    "render_reference",
    "ssim_reference",
]

#: No single Gaussian hides everything: keeps 1 - alpha away from zero, by which the adjoint divides.
ALPHA_MAX = 0.999
#: A pixel ends before the Gaussian that would bring its transmittance down to this.
TRANSMITTANCE_MIN = 1e-4
#: Pixels a side of the blocks that are blended one at a time, and Gaussians blended at once: they bound the memory.
BLOCK = 32
SLAB = 1024
#: Columns of a splat in the packed table that the blend reads.
_WIDTHS = {"means2d": 2, "cov2d": 3, "conics": 3, "opacities": 1, "colors": 3, "depths": 1, "magnitudes": 2}

SSIM_TAPS = 11
SSIM_SIGMA = 1.5
SSIM_C1, SSIM_C2 = 0.01**2, 0.03**2


def render_reference(
    gaussians: Gaussians,
    camera: Camera,
    *,
    sh_degree: int | None = None,
    background: Tensor | None = None,
    viewmat: Tensor | None = None,
    antialiased: bool = False,
    detach_directions: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Render one view; autograd gives the gradients by the Gaussians, the background and the viewmat.

    sh_degree: the highest degree that is used; None means all that the Gaussians have.
    background: [3] RGB behind everything; None means black.
    viewmat: [4, 4] world to camera instead of the camera's own; the last row is not read.
    antialiased: opacities are scaled by the share of the unblurred ellipse's area.
    detach_directions: the gradient leaves out the path through view-dependent colour; the image is the same.

    Returns (image [H, W, 3], alpha [H, W], depth [H, W] accumulated camera-space z, not divided by alpha)
    in the Gaussians' dtype and on their device. ValueError for a wrong degree or shape.
    """
    _, splats = project_visible(
        gaussians,
        camera,
        sh_degree=sh_degree,
        viewmat=viewmat,
        antialiased=antialiased,
        detach_directions=detach_directions,
    )
    return blend_reference(splats, camera.width, camera.height, background)


def blend_reference(
    splats: Splats, width: int, height: int, background: Tensor | None = None, magnitudes: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The second half of ``render_reference``: what splats, ordered by their Gaussians' indices, look like.

    Apart from it, so that the gradient by the projected means can be asked for.
    magnitudes: [V, 2] zeros. What autograd calls their gradient is the sum over the pixels of |dL/d means2d|, each
        pixel's share by itself (docs/math.md 6.3).
    """
    background = splats.means2d.new_zeros(3) if background is None else background.to(splats.means2d)
    if background.shape != (3,):
        raise ValueError(f"background has shape {tuple(background.shape)}, not (3,)")
    # One gather orders everything by depth. Indices ascend before, and the sort is stable: ties go by index.
    magnitudes = torch.zeros_like(splats.means2d) if magnitudes is None else magnitudes
    table = _pack(splats, magnitudes).index_select(0, splats.depths.detach().argsort(stable=True))
    boxes = _support_boxes(table.detach())
    strips = []
    for top in range(0, height, BLOCK):
        bottom = min(top + BLOCK, height)
        blocks = []
        for left in range(0, width, BLOCK):
            right = min(left + BLOCK, width)
            touching = torch.nonzero(_touches(boxes, left, top, right, bottom)).squeeze(1)
            pixels = _pixel_centers(left, top, right, bottom, table)
            # Recomputing a block in the backward pass keeps one block's intermediates alive, not the image's.
            packed = checkpoint(
                _blend, table, touching, pixels, background, use_reentrant=False, preserve_rng_state=False
            )
            assert isinstance(packed, Tensor)
            blocks.append(packed.reshape(bottom - top, right - left, 5))
        strips.append(torch.cat(blocks, 1))
    color, alpha, depth = torch.split(torch.cat(strips, 0), [3, 1, 1], 2)
    return color, alpha.squeeze(2), depth.squeeze(2)


def _pack(splats: Splats, magnitudes: Tensor) -> Tensor:
    """[V, 15] columns by _WIDTHS, so that a block gathers its rows, and scatters their gradient, once."""
    columns = {**{name: getattr(splats, name) for name in _WIDTHS if name != "magnitudes"}, "magnitudes": magnitudes}
    return torch.cat([columns[name].reshape(-1, width) for name, width in _WIDTHS.items()], 1)


class _Magnitudes(torch.autograd.Function):
    """Offsets [K, P] as they are; the second argument's [K] "gradient" is the sum of |gradient| over the pixels."""

    @staticmethod
    def forward(ctx: Any, offsets: Tensor, magnitudes: Tensor) -> Tensor:
        return offsets.clone()

    @staticmethod
    def backward(ctx: Any, v_offsets: Tensor) -> tuple[Tensor, Tensor]:
        return v_offsets, v_offsets.abs().sum(1)


def _support_boxes(table: Tensor) -> Tensor:
    """[V, 4] left, top, right, bottom in pixels of the area where alpha can reach 1/255 (docs/math.md 5.2).

    A little larger than that: a box chooses who is looked at, and the test at each pixel who is blended.
    """
    means2d, cov2d, _, opacities, _, _, _ = torch.split(table, list(_WIDTHS.values()), 1)
    reach = 2.0 * (opacities / ALPHA_MIN).log().clamp(min=0.0)
    half = (reach * cov2d[:, ::2]).sqrt() * 1.001 + 0.01
    return torch.cat([means2d - half, means2d + half], 1)


def _touches(boxes: Tensor, left: int, top: int, right: int, bottom: int) -> Tensor:
    """[V] bool: the box meets the pixels of the block."""
    return (boxes[:, 0] <= right) & (boxes[:, 1] <= bottom) & (boxes[:, 2] >= left) & (boxes[:, 3] >= top)


def _pixel_centers(left: int, top: int, right: int, bottom: int, like: Tensor) -> Tensor:
    """[2, P] x and y of the block's pixel centres, row by row."""
    xs = torch.arange(left, right, device=like.device).to(like.dtype) + 0.5
    ys = torch.arange(top, bottom, device=like.device).to(like.dtype) + 0.5
    return torch.stack([xs.repeat(len(ys)), ys.repeat_interleave(len(xs))])


def _blend(table: Tensor, touching: Tensor, pixels: Tensor, background: Tensor) -> Tensor:
    """[P, 5] colour, alpha and depth of P pixels from the splats ``touching``, nearest first (docs/math.md 6.1)."""
    transmittance = torch.ones_like(pixels[0])
    running = torch.ones_like(pixels[0], dtype=torch.bool)
    sums = table.new_zeros((pixels.shape[1], 4))
    for start in range(0, max(len(touching), 1), SLAB):
        if not bool(running.any()):
            break
        rows = table.index_select(0, touching[start : start + SLAB])
        means2d, cov2d, conics, opacities, colors, depths, magnitudes = torch.split(rows, list(_WIDTHS.values()), 1)
        # q by completing the square, a sum of two squares: rounding cannot make it negative.
        dx, dy = (
            _Magnitudes.apply(means2d[:, k, None] - pixels[k], magnitudes[:, k])  # type: ignore[no-untyped-call]
            for k in range(2)
        )
        slope = cov2d[:, 1, None] / cov2d[:, 0, None]
        q = 0.5 * (dx.square() / cov2d[:, 0, None] + conics[:, 2, None] * (dy - slope * dx).square())
        alphas = (opacities * torch.exp(-q)).clamp(max=ALPHA_MAX)
        alphas = torch.where(alphas >= ALPHA_MIN, alphas, 0.0)
        with torch.no_grad():
            # The product only falls, so this is true up to the Gaussian at which a pixel ends and false from there on.
            goes_on = running & (transmittance * torch.cumprod(1.0 - alphas, 0) > TRANSMITTANCE_MIN)
            running = running & goes_on.all(0)
        alphas = torch.where(goes_on, alphas, 0.0)
        steps = torch.cumprod(torch.cat([transmittance[None], 1.0 - alphas]), 0)
        weights = alphas * steps[:-1]
        sums = sums + weights.T @ torch.cat([colors, depths], 1)
        transmittance = steps[-1]
    color = sums[:, :3] + transmittance[:, None] * background
    return torch.cat([color, 1.0 - transmittance[:, None], sums[:, 3:]], 1)


def ssim_reference(x: Tensor, y: Tensor) -> Tensor:
    """Mean structural similarity of two images [H, W, 3] in 0...1 (docs/math.md 7.2), a scalar tensor."""
    return ssim_map_reference(x, y).mean()


def ssim_map_reference(x: Tensor, y: Tensor) -> Tensor:
    """[3, H, W] structural similarity around each pixel of two images [H, W, 3] in 0...1.

    The window is Gaussian, 11 taps a side with sigma 1.5 px, and sees zeros outside the images.
    """
    fields = torch.cat([x, y, x * x, y * y, x * y], dim=-1).permute(2, 0, 1)
    mean_x, mean_y, mean_xx, mean_yy, mean_xy = torch.chunk(_window(fields), 5)
    var_x, var_y, cov = mean_xx - mean_x.square(), mean_yy - mean_y.square(), mean_xy - mean_x * mean_y
    luminance = (2.0 * mean_x * mean_y + SSIM_C1) / (mean_x.square() + mean_y.square() + SSIM_C1)
    structure = (2.0 * cov + SSIM_C2) / (var_x + var_y + SSIM_C2)
    return luminance * structure


def _window(planes: Tensor) -> Tensor:
    """[C, H, W] Gaussian-weighted local means of ``planes`` [C, H, W]."""
    half, count = SSIM_TAPS // 2, len(planes)
    offsets = torch.arange(-half, half + 1, device=planes.device).to(planes.dtype)
    taps = torch.exp(-offsets.square() / (2.0 * SSIM_SIGMA**2))
    taps = (taps / taps.sum()).repeat(count, 1)
    # A group of its own for each plane: on the CPU eight times as fast as the planes as a batch.
    across = torch.nn.functional.conv2d(planes[None], taps[:, None, None, :], padding=(0, half), groups=count)
    return torch.nn.functional.conv2d(across, taps[:, None, :, None], padding=(half, 0), groups=count)[0]


def loss_reference(image: Tensor, target: Tensor, ssim_lambda: float) -> Tensor:
    """(1 - lambda) mean |image - target| + lambda (1 - mean SSIM), a scalar tensor.

    image, target: [H, W, 3] in 0...1 of one float dtype.
    """
    return (1.0 - ssim_lambda) * (image - target).abs().mean() + ssim_lambda * (1.0 - ssim_reference(image, target))


def image_loss_reference(img1: Tensor, img2: Tensor, ssim_lambda: float, border: int = 0) -> Tensor:
    """loss_reference() of two stacks of images [B, C, H, W]; SSIM leaves out ``border`` pixels at each edge."""
    x, y = (image.flatten(0, 1).permute(1, 2, 0) for image in (img1, img2))
    ssim = ssim_map_reference(x, y)
    counted = ssim[:, border : ssim.shape[1] - border, border : ssim.shape[2] - border]
    return (1.0 - ssim_lambda) * (x - y).abs().mean() + ssim_lambda * (1.0 - counted.mean())
