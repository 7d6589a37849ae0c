"""The reference projection: raw Gaussians to image-space ellipses, in plain torch and from docs/math.md alone.

It shares no line with the native kernels, on purpose: the two are each other's proof.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from splatcli.gaussians import SH_REST, Gaussians
from splatcli.scene.camera import Camera

#: The smallest alpha that is blended: one step of an 8-bit image.
ALPHA_MIN = 1.0 / 255.0
#: Pixels squared added to both image variances, so that no splat falls between pixel centres.
BLUR = 0.3
#: World units between which a Gaussian's depth has to lie.
NEAR, FAR = 0.01, 1e10
#: The Jacobian is linearised at most this fraction of the image size outside the image.
JACOBIAN_MARGIN = 0.15
#: Squared length under which a quaternion has no direction left.
QUAT_NORM2_MIN = 1e-8


@dataclass(frozen=True, slots=True)
class Splats:
    """V projected Gaussians, differentiable in everything they were made from.

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


@dataclass(frozen=True, slots=True)
class ReferenceProjection(Splats):
    """One row per input Gaussian: V = N, rows of zeros for the culled.

    valid  [N] bool, False for the culled (docs/math.md 3.6). Whether a valid Gaussian touches the image is not asked.
    """

    valid: Tensor


def project_reference(
    gaussians: Gaussians,
    camera: Camera,
    *,
    sh_degree: int | None = None,
    viewmat: Tensor | None = None,
    antialiased: bool = False,
    detach_directions: bool = False,
) -> ReferenceProjection:
    """Project every Gaussian and keep its row; the arguments are those of ``render_reference``."""
    index, splats = project_visible(
        gaussians,
        camera,
        sh_degree=sh_degree,
        viewmat=viewmat,
        antialiased=antialiased,
        detach_directions=detach_directions,
    )
    n = len(gaussians)

    def scatter(rows: Tensor) -> Tensor:
        return rows.new_zeros((n, *rows.shape[1:])).index_copy(0, index, rows)

    return ReferenceProjection(
        means2d=scatter(splats.means2d),
        cov2d=scatter(splats.cov2d),
        conics=scatter(splats.conics),
        depths=scatter(splats.depths),
        colors=scatter(splats.colors),
        opacities=scatter(splats.opacities),
        valid=torch.zeros(n, dtype=torch.bool, device=index.device).index_fill(0, index, True),
    )


def project_visible(
    gaussians: Gaussians,
    camera: Camera,
    *,
    sh_degree: int | None = None,
    viewmat: Tensor | None = None,
    antialiased: bool = False,
    detach_directions: bool = False,
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
        index = torch.nonzero(_survives(gaussians, tried)).squeeze(1)
    kept = gaussians.map(lambda rows: rows.index_select(0, index))
    return index, _project(kept, camera, degree, viewmat, antialiased, detach_directions)


def _survives(gaussians: Gaussians, splats: Splats) -> Tensor:
    """[N] bool by docs/math.md 3.6; every comparison is written so that NaN fails it."""
    return (
        (splats.depths > NEAR)
        & (splats.depths < FAR)
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
    """All of docs/math.md 2 to 4, culls aside, for every row."""
    rotation, translation = viewmat[:3, :3], viewmat[:3, 3]
    x, y, z = (gaussians.means @ rotation.T + translation).unbind(1)
    means2d = torch.stack([camera.fx * x / z + camera.cx, camera.fy * y / z + camera.cy], 1)

    # Rows of the image-space square root: cov = root root^T, so that it cannot lose its sign to rounding.
    principal_axes = rotation_matrices(gaussians.quats) * gaussians.log_scales.exp()[:, None, :]
    root = _jacobians(x, y, z, camera) @ rotation @ principal_axes
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
    """[N, 3, 3] rotations of unnormalised quaternions [N, 4] w x y z (docs/math.md 2.3)."""
    unit = quats / quats.square().sum(1, keepdim=True).sqrt()
    w, axis = unit[:, 0, None, None], unit[:, 1:]
    zero = torch.zeros_like(axis[:, 0])
    ax, ay, az = axis.unbind(1)
    cross = torch.stack([zero, -az, ay, az, zero, -ax, -ay, ax, zero], 1).reshape(-1, 3, 3)
    # Rodrigues in quaternion form: R = I + 2 w [v]x + 2 [v]x [v]x.
    return torch.eye(3, dtype=quats.dtype, device=quats.device) + 2 * (w * cross + cross @ cross)


def _jacobians(x: Tensor, y: Tensor, z: Tensor, camera: Camera) -> Tensor:
    """[N, 2, 3] derivatives of the pixel by the camera-space point, with the clamp of docs/math.md 3.3."""
    margin_u, margin_v = JACOBIAN_MARGIN * camera.width, JACOBIAN_MARGIN * camera.height
    slope_x = (x / z).clamp((-margin_u - camera.cx) / camera.fx, (camera.width + margin_u - camera.cx) / camera.fx)
    slope_y = (y / z).clamp((-margin_v - camera.cy) / camera.fy, (camera.height + margin_v - camera.cy) / camera.fy)
    zero = torch.zeros_like(z)
    row_u = torch.stack([camera.fx / z, zero, -camera.fx * slope_x / z], 1)
    row_v = torch.stack([zero, camera.fy / z, -camera.fy * slope_y / z], 1)
    return torch.stack([row_u, row_v], 1)


def _colors(gaussians: Gaussians, viewmat: Tensor, degree: int, detach_directions: bool) -> Tensor:
    """[N, 3] view-dependent colours (docs/math.md 4.2); clamp passes the gradient at 0 itself."""
    center = -viewmat[:3, :3].T @ viewmat[:3, 3]
    offsets = gaussians.means - center
    if detach_directions:
        offsets = offsets.detach()
    directions = offsets / offsets.square().sum(1, keepdim=True).sqrt()
    coefficients = torch.cat([gaussians.sh0[:, None, :], gaussians.shN[:, : SH_REST[degree], :]], 1)
    return (0.5 + torch.einsum("nk,nkc->nc", sh_basis(directions, degree), coefficients)).clamp(min=0.0)


def sh_basis(directions: Tensor, degree: int) -> Tensor:
    """[N, (degree + 1)^2] real spherical harmonics of unit vectors [N, 3], in INRIA's order and signs.

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
