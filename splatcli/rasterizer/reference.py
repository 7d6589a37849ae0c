"""The reference in plain torch with autograd: projection, blending, loss, regularisation and noise.

It is written from docs/math.md and not from the native code. Tests compare the kernels with it, and it is the fallback
without a compiler.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from splatcli.gaussians import SHN_COUNTS, Gaussians
from splatcli.rasterizer.step_inputs import NOISE_STEEPNESS, NOISE_THRESHOLD, Regularisation
from splatcli.scene.camera import Camera

__all__ = [
    "blend_reference",
    "image_loss_reference",
    "loss_reference",
    "render_reference",
    "ssim_reference",
]


#: The smallest alpha that is blended: one step of an 8-bit image.
ALPHA_MIN = 1.0 / 255.0
#: Pixels squared added to both image variances, so that no splat falls between pixel centres.
BLUR = 0.3
#: World units below which a Gaussian's depth has to lie; it has to be above the camera's near plane.
FAR = 1e10
#: The Jacobian is linearised at most this fraction of the image size outside the image.
JACOBIAN_MARGIN = 0.15
#: Squared length under which a quaternion has no direction left.
QUAT_NORM2_MIN = 1e-8


@dataclass(frozen=True, slots=True)
class Splats:
    """V projected Gaussians, differentiable in all their inputs.

    means2d    [V, 2] pixels
    cov2d      [V, 3] pixels^2, (xx, xy, yy), blurred
    conics     [V, 3] the inverse of cov2d, (A, B, C)
    depths     [V]    camera-space z, world units
    colors     [V, 3] after the clamp at 0
    opacities  [V]    after the sigmoid, and after the compensation when antialiased
    """

    means2d: Tensor
    cov2d: Tensor
    conics: Tensor
    depths: Tensor
    colors: Tensor
    opacities: Tensor


def project_visible(
    gaussians: Gaussians,
    camera: Camera,
    *,
    sh_degree: int | None = None,
    viewmat: Tensor | None = None,
    antialiased: bool = False,
    detach_directions: bool = False,
    z_range: tuple[float, float] | None = None,
) -> tuple[Tensor, Splats]:
    """Project the Gaussians that no cull removes: (their indices [V], ascending; the Splats).

    The culls are decided first and without gradient. Culled rows never enter the differentiable part,
    so that their gradient is zero whatever they hold, NaN and infinities included.
    """
    degree = gaussians.sh_degree if sh_degree is None else sh_degree
    if not 0 <= degree <= gaussians.sh_degree:
        raise ValueError(f"sh_degree is {degree}, not within 0 and {gaussians.sh_degree}, which the Gaussians have")
    if viewmat is None:
        viewmat = torch.from_numpy(camera.viewmat)
    if viewmat.shape != (4, 4):
        raise ValueError(f"viewmat has shape {tuple(viewmat.shape)}, not (4, 4)")
    viewmat = viewmat.to(gaussians.means)
    with torch.no_grad():
        tried = _project(gaussians, camera, degree, viewmat, antialiased, detach_directions)
        index = torch.nonzero(_survives(gaussians, tried, z_range or (camera.near, FAR))).squeeze(1)
    kept = gaussians.map(lambda rows: rows.index_select(0, index))
    return index, _project(kept, camera, degree, viewmat, antialiased, detach_directions)


def _survives(gaussians: Gaussians, splats: Splats, z_range: tuple[float, float]) -> Tensor:
    """Return [N] bool by docs/math.md 3.6; every comparison is written so that NaN fails it."""
    return (
        (splats.depths > z_range[0])
        & (splats.depths < z_range[1])
        & (splats.opacities >= ALPHA_MIN)
        & (gaussians.quats.square().sum(1) >= QUAT_NORM2_MIN)
        # The determinant is BLUR^2 at least (see _project): what is left to refuse is NaN and overflow.
        & (splats.conics[:, ::2] > 0).all(1)
        & splats.conics.isfinite().all(1)
        & splats.means2d.isfinite().all(1)
        & splats.colors.isfinite().all(1)
    )


def _project(
    gaussians: Gaussians, camera: Camera, degree: int, viewmat: Tensor, antialiased: bool, detach_directions: bool
) -> Splats:
    """Project every row by docs/math.md 2 to 4, without culling."""
    rotation, translation = viewmat[:3, :3], viewmat[:3, 3]
    x, y, z = (gaussians.means @ rotation.T + translation).unbind(1)
    means2d, jacobians = _pixels(x, y, z, camera)

    # Rows of the image-space square root: cov = root root^T, so that it cannot lose its sign to rounding.
    principal_axes = rotation_matrices(gaussians.quats) * gaussians.log_scales.exp()[:, None, :]
    root = jacobians @ rotation @ principal_axes
    row_u, row_v = root.unbind(1)
    raw_a, raw_b, raw_c = (row_u * row_u).sum(1), (row_u * row_v).sum(1), (row_v * row_v).sum(1)
    a, c = raw_a + BLUR, raw_c + BLUR
    # The determinants as sums of what is never negative (Cauchy-Binet); ac - b^2 cancels for long thin splats.
    raw_det = torch.linalg.cross(row_u, row_v).square().sum(1)
    det = raw_det + BLUR * (raw_a + raw_c) + BLUR * BLUR

    opacities = gaussians.logit_opacities.sigmoid()
    if antialiased:
        opacities = opacities * (raw_det / det).clamp(min=0.0).sqrt()
    return Splats(
        means2d=means2d,
        cov2d=torch.stack([a, raw_b, c], 1),
        conics=torch.stack([c, -raw_b, a], 1) / det[:, None],
        depths=z,
        colors=_colors(gaussians, viewmat, degree, detach_directions),
        opacities=opacities,
    )


def rotation_matrices(quats: Tensor) -> Tensor:
    """Return [N, 3, 3] rotations of unnormalised quaternions [N, 4] w x y z (docs/math.md 2.3)."""
    unit = quats / quats.square().sum(1, keepdim=True).sqrt()
    w, axis = unit[:, 0, None, None], unit[:, 1:]
    zero = torch.zeros_like(axis[:, 0])
    ax, ay, az = axis.unbind(1)
    cross = torch.stack([zero, -az, ay, az, zero, -ax, -ay, ax, zero], 1).reshape(-1, 3, 3)
    # Rodrigues in quaternion form: R = I + 2 w [v]x + 2 [v]x [v]x.
    return torch.eye(3, dtype=quats.dtype, device=quats.device) + 2 * (w * cross + cross @ cross)


def _pixels(x: Tensor, y: Tensor, z: Tensor, camera: Camera) -> tuple[Tensor, Tensor]:
    """Return pixels [N, 2] of camera-space points and their derivatives [N, 2, 3] (docs/math.md 3.1 and 3.3)."""
    if camera.model == "pinhole":
        pixels = torch.stack([camera.fx * x / z + camera.cx, camera.fy * y / z + camera.cy], 1)
        return pixels, _jacobians(x, y, z, camera)
    fx, fy, cx, cy = (x.new_tensor(number) for number in (camera.fx, camera.fy, camera.cx, camera.cy))
    return other_pixels(camera.model, (x, y, z), (fx, fy, cx, cy))


def other_pixels(
    model: str, point: tuple[Tensor, Tensor, Tensor], lens: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return pixels [..., 2] and derivatives [..., 2, 3] of an "ortho" or "fisheye" camera (docs/math.md 3.9, 3.10).

    point: x, y, z [...] in camera space. lens: fx, fy, cx, cy, of any shape that fits them.
    The fisheye's derivatives are polar: along the radius the angle grows, across it nothing turns.
    """
    (x, y, z), (fx, fy, cx, cy) = point, lens
    if model == "ortho":
        one, zero = torch.ones_like(x), torch.zeros_like(x)
        rows = torch.stack([fx * one, zero, zero], -1), torch.stack([zero, fy * one, zero], -1)
        return torch.stack([fx * x + cx, fy * y + cy], -1), torch.stack(rows, -2)
    # Near the axis series take the place of quotients that cancel; the terms left out are of the sixth power.
    near_axis = torch.hypot(x.detach(), y.detach()) < torch.finfo(x.dtype).eps ** (1 / 6) * z.detach().abs()
    radius = torch.where(near_axis, 1.0, torch.hypot(torch.where(near_axis, 1.0, x), y))  # autograd stays finite
    cos, sin = x / radius, y / radius
    angle, distance2 = torch.atan2(radius, z), radius.square() + z.square()
    along, across, inward = z / distance2, angle / radius, -radius / distance2
    level = torch.where(near_axis, z, 1.0)
    axis2 = torch.where(near_axis, x.square() + y.square(), 0.0) / level.square()
    share = torch.where(near_axis, (1.0 - axis2 / 3.0 + axis2.square() / 5.0) / level, across)
    bend = (-2.0 / 3.0 + axis2 * 4.0 / 5.0 - axis2.square() * 6.0 / 7.0) / level**3
    steep = 1.0 / (level.square() * (1.0 + axis2))
    xx = torch.where(near_axis, share + bend * x.square(), along * cos.square() + across * sin.square())
    yy = torch.where(near_axis, share + bend * y.square(), along * sin.square() + across * cos.square())
    xy = torch.where(near_axis, bend * x * y, (along - across) * cos * sin)
    xz, yz = (torch.where(near_axis, -axis * steep, inward * turn) for axis, turn in ((x, cos), (y, sin)))
    row_u, row_v = fx[..., None] * torch.stack([xx, xy, xz], -1), fy[..., None] * torch.stack([xy, yy, yz], -1)
    return torch.stack([fx * x * share + cx, fy * y * share + cy], -1), torch.stack([row_u, row_v], -2)


def _jacobians(x: Tensor, y: Tensor, z: Tensor, camera: Camera) -> Tensor:
    """Return [N, 2, 3] derivatives of a pinhole's pixel by the point, with the clamp of docs/math.md 3.3."""
    margin_u, margin_v = JACOBIAN_MARGIN * camera.width, JACOBIAN_MARGIN * camera.height
    slope_x = clamped(x / z, (-margin_u - camera.cx) / camera.fx, (camera.width + margin_u - camera.cx) / camera.fx)
    slope_y = clamped(y / z, (-margin_v - camera.cy) / camera.fy, (camera.height + margin_v - camera.cy) / camera.fy)
    zero = torch.zeros_like(z)
    row_u = torch.stack([camera.fx / z, zero, -camera.fx * slope_x / z], 1)
    row_v = torch.stack([zero, camera.fy / z, -camera.fy * slope_y / z], 1)
    return torch.stack([row_u, row_v], 1)


def _colors(gaussians: Gaussians, viewmat: Tensor, degree: int, detach_directions: bool) -> Tensor:
    """Return [N, 3] view-dependent colours (docs/math.md 4.2)."""
    center = -viewmat[:3, :3].T @ viewmat[:3, 3]
    offsets = gaussians.means - center
    if detach_directions:
        offsets = offsets.detach()
    directions = offsets / offsets.square().sum(1, keepdim=True).sqrt()
    coefficients = torch.cat([gaussians.sh0[:, None, :], gaussians.shN[:, : SHN_COUNTS[degree], :]], 1)
    return clamped(0.5 + torch.einsum("nk,nkc->nc", sh_basis(directions, degree), coefficients), low=0.0)


def clamped(x: Tensor, low: float | None = None, high: float | None = None) -> Tensor:
    """Return ``x`` between the limits, which pass the gradient themselves, as in the kernels.

    Tensor.clamp() passes it there up to torch 2.13, and none or half of it from 2.14 on.
    """
    if low is not None:
        x = torch.where(x < low, low, x)
    return x if high is None else torch.where(x > high, high, x)


def sh_basis(directions: Tensor, degree: int) -> Tensor:
    """Return [N, (degree + 1)^2] real spherical harmonics of unit vectors [N, 3], in INRIA's order and signs.

    By recurrence over associated Legendre functions for any degree (docs/math.md 4.1): the order is
    m = -l ... l within each l, and the sign (-1)^m is part of each function.
    """
    x, y, z = directions.unbind(1)
    columns: dict[tuple[int, int], Tensor] = {}
    # (x + iy)^m, which carries the azimuth together with sin^m of the polar angle.
    real, imag = torch.ones_like(x), torch.zeros_like(x)
    diagonal = 1.0
    for m in range(degree + 1):
        before, legendre = torch.zeros_like(z), torch.full_like(z, diagonal)
        for level in range(m, degree + 1):
            norm = math.sqrt((2 * level + 1) / (4 * math.pi) * math.factorial(level - m) / math.factorial(level + m))
            if m == 0:
                columns[level, 0] = norm * legendre
            else:
                sign_norm = (-1) ** m * math.sqrt(2.0) * norm
                columns[level, m] = sign_norm * legendre * real
                columns[level, -m] = sign_norm * legendre * imag
            after = ((2 * level + 1) * z * legendre - (level + m) * before) / (level + 1 - m)
            before, legendre = legendre, after
        real, imag = real * x - imag * y, real * y + imag * x
        diagonal *= 2 * m + 1
    return torch.stack([columns[level, m] for level in range(degree + 1) for m in range(-level, level + 1)], 1)


#: No single Gaussian hides everything: keeps 1 - alpha away from zero, by which the adjoint divides.
ALPHA_MAX = 0.999
#: A pixel ends before the Gaussian that would bring its transmittance down to this.
TRANSMITTANCE_MIN = 1e-4
#: Pixels a side of the blocks that are blended one at a time, and Gaussians blended at once: they bound the memory.
BLOCK = 32
SLAB = 1024
#: Columns of a splat in the packed table that the blend reads.
_WIDTHS = {"means2d": 2, "cov2d": 3, "conics": 3, "opacities": 1, "depths": 1, "magnitudes": 2}

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
    colors: Tensor | None = None,
    z_range: tuple[float, float] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Render one view; autograd gives the gradients by the Gaussians, the background and the viewmat.

    sh_degree: the highest degree that is used; None means all that the Gaussians have.
    background: [3] RGB behind everything, or [D]; None means black.
    viewmat: [4, 4] world to camera instead of the camera's own; the last row is not read.
    antialiased: opacities are scaled by the share of the unblurred ellipse's area.
    detach_directions: the gradient leaves out the path through view-dependent colour; the image is the same.
    colors: [N, D] colours of any sign in place of those of the SH coefficients.
    z_range: camera z, world units, between which a mean has to lie; by default from the camera's near plane on.

    Returns (image [H, W, 3] or [H, W, D], alpha [H, W], depth [H, W] accumulated camera-space z, not divided by alpha)
    in the Gaussians' dtype and on their device. ValueError for a wrong degree or shape.
    """
    index, splats = project_visible(
        gaussians,
        camera,
        sh_degree=sh_degree,
        viewmat=viewmat,
        antialiased=antialiased,
        detach_directions=detach_directions,
        z_range=z_range,
    )
    if colors is not None:
        splats = replace(splats, colors=colors.index_select(0, index))
    return blend_reference(splats, camera.width, camera.height, background)


def blend_reference(
    splats: Splats, width: int, height: int, background: Tensor | None, magnitudes: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Blend splats, ordered by their Gaussians' indices: the second half of ``render_reference``.

    A function of its own, so that autograd can give the gradient by the projected means.
    magnitudes: [V, 2] zeros. Their "gradient" is the sum over the pixels of |dL/d means2d|, each
        pixel's share by itself (docs/math.md 6.3).
    """
    channels = splats.colors.shape[1]
    background = splats.means2d.new_zeros(channels) if background is None else background.to(splats.means2d)
    if background.shape != (channels,):
        raise ValueError(f"background has shape {tuple(background.shape)}, not ({channels},)")
    # One gather orders everything by depth. Indices ascend before, and the sort is stable: ties go by index.
    magnitudes = torch.zeros_like(splats.means2d) if magnitudes is None else magnitudes
    table = _pack(splats, magnitudes).index_select(0, splats.depths.detach().argsort(stable=True))
    boxes = _support_boxes(table.detach())
    # Recomputing a block in the backward pass keeps one block's intermediates alive, not the image's. checkpoint()
    # imports the compiler of torch, which takes seconds, so that an image without gradients does without.
    blend = _recomputed_blend if torch.is_grad_enabled() else _blend
    strips = []
    for top in range(0, height, BLOCK):
        bottom = min(top + BLOCK, height)
        blocks = []
        for left in range(0, width, BLOCK):
            right = min(left + BLOCK, width)
            touching = torch.nonzero(_touches(boxes, left, top, right, bottom)).squeeze(1)
            pixels = _pixel_centers(left, top, right, bottom, table)
            packed = blend(table, touching, pixels, background)
            blocks.append(packed.reshape(bottom - top, right - left, channels + 2))
        strips.append(torch.cat(blocks, 1))
    color, alpha, depth = torch.split(torch.cat(strips, 0), [channels, 1, 1], 2)
    return color, alpha.squeeze(2), depth.squeeze(2)


def _recomputed_blend(*args: Tensor) -> Tensor:
    packed = checkpoint(_blend, *args, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(packed, Tensor)
    return packed


def _pack(splats: Splats, magnitudes: Tensor) -> Tensor:
    """Return [V, 12 + D] columns by _WIDTHS, then colours: a block gathers rows, and scatters their gradient, once."""
    columns = {**{name: getattr(splats, name) for name in _WIDTHS if name != "magnitudes"}, "magnitudes": magnitudes}
    return torch.cat([*(columns[name].reshape(-1, width) for name, width in _WIDTHS.items()), splats.colors], 1)


def _unpack(table: Tensor) -> tuple[Tensor, ...]:
    """Return the columns of _pack(), colours last."""
    widths = list(_WIDTHS.values())
    return torch.split(table, [*widths, table.shape[1] - sum(widths)], 1)


class _Magnitudes(torch.autograd.Function):
    """Offsets [K, P] as they are; the second argument's [K] "gradient" is the sum of |gradient| over the pixels."""

    @staticmethod
    def forward(ctx: Any, offsets: Tensor, magnitudes: Tensor) -> Tensor:
        return offsets.clone()

    @staticmethod
    def backward(ctx: Any, v_offsets: Tensor) -> tuple[Tensor, Tensor]:
        return v_offsets, v_offsets.abs().sum(1)


def _support_boxes(table: Tensor) -> Tensor:
    """Return [V, 4] left, top, right, bottom in pixels of the area where alpha can reach 1/255 (docs/math.md 5.2).

    The boxes are a little larger than that: they choose the pixels that test a splat; the test at each pixel decides.
    """
    means2d, cov2d, _, opacities, *_ = _unpack(table)
    reach = 2.0 * (opacities / ALPHA_MIN).log().clamp(min=0.0)
    half = (reach * cov2d[:, ::2]).sqrt() * 1.001 + 0.01
    return torch.cat([means2d - half, means2d + half], 1)


def _touches(boxes: Tensor, left: int, top: int, right: int, bottom: int) -> Tensor:
    """Return [V] bool: the box meets the pixels of the block."""
    return (boxes[:, 0] <= right) & (boxes[:, 1] <= bottom) & (boxes[:, 2] >= left) & (boxes[:, 3] >= top)


def _pixel_centers(left: int, top: int, right: int, bottom: int, like: Tensor) -> Tensor:
    """Return [2, P] x and y of the block's pixel centres, row by row."""
    xs = torch.arange(left, right, device=like.device).to(like.dtype) + 0.5
    ys = torch.arange(top, bottom, device=like.device).to(like.dtype) + 0.5
    return torch.stack([xs.repeat(len(ys)), ys.repeat_interleave(len(xs))])


def _blend(table: Tensor, touching: Tensor, pixels: Tensor, background: Tensor) -> Tensor:
    """Return [P, D + 2] colour, alpha, depth of P pixels, the splats ``touching`` nearest first (docs/math.md 6.1)."""
    transmittance = torch.ones_like(pixels[0])
    running = torch.ones_like(pixels[0], dtype=torch.bool)
    sums = table.new_zeros((pixels.shape[1], len(background) + 1))
    for start in range(0, max(len(touching), 1), SLAB):
        if not bool(running.any()):
            break
        rows = table.index_select(0, touching[start : start + SLAB])
        means2d, cov2d, conics, opacities, depths, magnitudes, colors = _unpack(rows)
        # q by completing the square, a sum of two squares: rounding cannot make it negative.
        dx, dy = (
            _Magnitudes.apply(means2d[:, k, None] - pixels[k], magnitudes[:, k])  # type: ignore[no-untyped-call]
            for k in range(2)
        )
        slope = cov2d[:, 1, None] / cov2d[:, 0, None]
        q = 0.5 * (dx.square() / cov2d[:, 0, None] + conics[:, 2, None] * (dy - slope * dx).square())
        alphas = clamped(opacities * torch.exp(-q), high=ALPHA_MAX)
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
    color = sums[:, :-1] + transmittance[:, None] * background
    return torch.cat([color, 1.0 - transmittance[:, None], sums[:, -1:]], 1)


def ssim_reference(x: Tensor, y: Tensor) -> Tensor:
    """Return the mean structural similarity of two images [H, W, 3] in 0...1 (docs/math.md 7.2), a scalar tensor."""
    return ssim_map_reference(x, y).mean()


def ssim_map_reference(x: Tensor, y: Tensor) -> Tensor:
    """Return [3, H, W] structural similarity around each pixel of two images [H, W, 3] in 0...1.

    The window is Gaussian, 11 taps a side with sigma 1.5 px, and sees zeros outside the images.
    """
    fields = torch.cat([x, y, x * x, y * y, x * y], dim=-1).permute(2, 0, 1)
    mean_x, mean_y, mean_xx, mean_yy, mean_xy = torch.chunk(_window(fields), 5)
    var_x, var_y, cov = mean_xx - mean_x.square(), mean_yy - mean_y.square(), mean_xy - mean_x * mean_y
    luminance = (2.0 * mean_x * mean_y + SSIM_C1) / (mean_x.square() + mean_y.square() + SSIM_C1)
    structure = (2.0 * cov + SSIM_C2) / (var_x + var_y + SSIM_C2)
    return luminance * structure


def _window(planes: Tensor) -> Tensor:
    """Return [C, H, W] Gaussian-weighted local means of ``planes`` [C, H, W]."""
    half, count = SSIM_TAPS // 2, len(planes)
    offsets = torch.arange(-half, half + 1, device=planes.device).to(planes.dtype)
    taps = torch.exp(-offsets.square() / (2.0 * SSIM_SIGMA**2))
    taps = (taps / taps.sum()).repeat(count, 1)
    # A group of its own for each plane: on the CPU eight times as fast as the planes as a batch.
    across = torch.nn.functional.conv2d(planes[None], taps[:, None, None, :], padding=(0, half), groups=count)
    return torch.nn.functional.conv2d(across, taps[:, None, :, None], padding=(half, 0), groups=count)[0]


def loss_reference(image: Tensor, target: Tensor, ssim_lambda: float) -> Tensor:
    """Return (1 - lambda) mean |image - target| + lambda (1 - mean SSIM), a scalar tensor.

    image, target: [H, W, 3] in 0...1 of one float dtype.
    """
    return (1.0 - ssim_lambda) * (image - target).abs().mean() + ssim_lambda * (1.0 - ssim_reference(image, target))


def image_loss_reference(img1: Tensor, img2: Tensor, ssim_lambda: float, border: int) -> Tensor:
    """Return loss_reference() of two stacks of images [B, C, H, W]; SSIM leaves out ``border`` pixels at each edge."""
    x, y = (image.flatten(0, 1).permute(1, 2, 0) for image in (img1, img2))
    ssim = ssim_map_reference(x, y)
    counted = ssim[:, border : ssim.shape[1] - border, border : ssim.shape[2] - border]
    return (1.0 - ssim_lambda) * (x - y).abs().mean() + ssim_lambda * (1.0 - counted.mean())


_WORD = 0xFFFFFFFF


def regularise_reference(gaussians: Gaussians, grads: Gaussians, regularisation: Regularisation) -> None:
    """Add the gradients of the regularisers to ``grads``, shaped as the Gaussians."""
    if regularisation.opacity_reg == 0.0 and regularisation.scale_reg == 0.0:
        return
    with torch.enable_grad():
        logits = gaussians.logit_opacities.detach().requires_grad_()
        log_scales = gaussians.log_scales.detach().requires_grad_()
        loss = regularisation.opacity_reg * logits.sigmoid().mean() + regularisation.scale_reg * log_scales.exp().mean()
        v_logits, v_log_scales = torch.autograd.grad(loss, [logits, log_scales])
    grads.logit_opacities += v_logits
    grads.log_scales += v_log_scales


@torch.no_grad()
def noise_reference(gaussians: Gaussians, step: int, regularisation: Regularisation) -> None:
    """Move the means in place by noise of the Gaussians' own shapes; the least opaque ones go farthest."""
    rotation = rotation_matrices(gaussians.quats)
    root = rotation * gaussians.log_scales.exp()[:, None, :]
    gate = torch.sigmoid(NOISE_STEEPNESS * (NOISE_THRESHOLD - gaussians.logit_opacities.sigmoid()))
    normal = normals(regularisation.seed, step, len(gaussians)).to(gaussians.means)
    noise = regularisation.noise * gate[:, None] * (root @ root.mT @ normal[:, :, None]).squeeze(2)
    gaussians.means += noise.where(noise.abs() < 1e30, torch.zeros_like(noise))


def normals(seed: int, step: int, n: int) -> Tensor:
    """Return [n, 3] float64 standard normal numbers, row i a function of (seed, step, i) alone."""
    index = torch.arange(n, dtype=torch.int64)
    words = philox([index & _WORD, torch.full_like(index, step & _WORD), torch.full_like(index, step >> 32),
                    torch.zeros_like(index)], seed & _WORD, seed >> 32 & _WORD)  # fmt: skip
    u, v, u2, v2 = (((word >> 8).double() + 0.5) / 2.0**24 for word in words)
    first, second = (-2.0 * u.log()).sqrt(), (-2.0 * u2.log()).sqrt()
    tau = 2.0 * math.pi
    return torch.stack([first * (tau * v).cos(), first * (tau * v).sin(), second * (tau * v2).cos()], dim=1)


def philox(counter: list[Tensor], key0: int, key1: int) -> list[Tensor]:
    """Return Philox4x32-10 (Salmon et al., 2011) of four int64 tensors that hold 32-bit words."""
    c0, c1, c2, c3 = counter
    for _ in range(10):
        low_a, high_a = _product(c0, 0xD2511F53)
        low_b, high_b = _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high_b ^ c1 ^ key0, low_b, high_a ^ c3 ^ key1, low_a
        key0, key1 = (key0 + 0x9E3779B9) & _WORD, (key1 + 0xBB67AE85) & _WORD
    return [c0, c1, c2, c3]


def _product(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return lower and upper 32 bits of a 32-bit product, by halves, since int64 cannot hold all of it."""
    low, high = word * (factor & 0xFFFF), word * (factor >> 16)
    middle = (low >> 16) + high
    return ((middle & 0xFFFF) << 16) | (low & 0xFFFF), middle >> 16
