"""spherical_harmonics() and fully_fused_projection(): gsplat's calls beside rasterization(), in torch, differentiable.

The renderer does not use them: its kernels project and colour in one pass. They are for programs that need the colours
or the projected Gaussians themselves, on any device and in any float dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from splatcli.rasterizer.context import Z_FAR
from splatcli.rasterizer.reference import ALPHA_MIN, BLUR, JACOBIAN_MARGIN, other_pixels
from splatcli.rotation import rotation_matrices
from splatcli.scene.camera import MODELS, NEAR
from splatcli.sh import sh_basis

#: Standard deviations after which a Gaussian of opacity 1 falls below 1/255; gsplat's bound of the radii.
MAX_EXTENT = 3.33


def refuse(function: str, name: str, value: object, remedy: str) -> NotImplementedError:
    """Return the error for an argument of gsplat's that is not served."""
    text = "a tensor" if isinstance(value, Tensor) else repr(value)
    return NotImplementedError(f"{function}: {name}={text} is not supported; {remedy}")


def spherical_harmonics(
    degrees_to_use: int,
    means: Tensor,
    viewmats: Tensor,
    coeffs: Tensor | None = None,
    masks: Tensor | None = None,
    batch_ids: Tensor | None = None,
    camera_ids: Tensor | None = None,
    gaussian_ids: Tensor | None = None,
    viewmats_rs: Tensor | None = None,
) -> Tensor:
    """Return the sums of spherical harmonics in the directions from the cameras to ``means``, [..., C, N, 3].

    means: [..., N, 3]. viewmats: [..., C, 4, 4]. coeffs: [..., (C,) N, K, 3]. masks: [..., C, N] bool, False gives 0.
    The form of gsplat up to 1.5 works too: (degrees_to_use, dirs [..., 3], coeffs [..., K, 3], masks [...]), with
    directions of any length; returns [..., 3]. A colour is 0.5 more than the sum. Degrees 0 to 4.
    Raises NotImplementedError for packed ids and rolling shutters, ValueError for shapes that do not fit.
    """
    for name, value in (
        ("batch_ids", batch_ids),
        ("camera_ids", camera_ids),
        ("gaussian_ids", gaussian_ids),
        ("viewmats_rs", viewmats_rs),
    ):
        if value is not None:
            remedy = "give dirs and coeffs, (degrees_to_use, dirs, coeffs), of the rows that are needed"
            raise refuse("spherical_harmonics()", name, value, remedy)
    if not 0 <= degrees_to_use <= 4:
        raise ValueError(f"degrees_to_use is {degrees_to_use}, not 0 to 4")
    if coeffs is None or coeffs.dtype == torch.bool:
        directions, coeffs, masks = means, viewmats, masks if coeffs is None else coeffs
    else:
        centers = -(viewmats[..., :3, :3].mT @ viewmats[..., :3, 3:])[..., 0]
        directions = means[..., None, :, :] - centers[..., :, None, :]
        if coeffs.dim() == means.dim() + 1:
            coeffs = coeffs[..., None, :, :, :]
    used = (degrees_to_use + 1) ** 2
    if coeffs.shape[-1] != 3 or coeffs.shape[-2] < used:
        raise ValueError(f"coeffs has shape {tuple(coeffs.shape)}; degree {degrees_to_use} needs [..., {used}, 3]")
    unit = torch.nn.functional.normalize(directions, dim=-1)
    basis = sh_basis(unit.reshape(-1, 3), degrees_to_use).view(*unit.shape[:-1], used)
    sums = (basis[..., None] * coeffs[..., :used, :]).sum(dim=-2)
    return sums if masks is None else torch.where(masks[..., None], sums, 0.0)


def fully_fused_projection(
    means: Tensor,
    covars: Tensor | None,
    quats: Tensor | None,
    scales: Tensor | None,
    viewmats: Tensor,
    Ks: Tensor,
    width: int,
    height: int,
    eps2d: float = BLUR,
    near_plane: float = NEAR,
    far_plane: float = Z_FAR,
    radius_clip: float = 0.0,
    packed: bool = False,
    sparse_grad: bool = False,
    calc_compensations: bool = False,
    camera_model: str = "pinhole",
    opacities: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Project Gaussians into images; docs/math.md 3.

    means: [..., N, 3]. covars: [..., N, 6] (xx, xy, xz, yy, yz, zz) or [..., N, 3, 3]; or None, then quats [..., N, 4]
        w x y z of any length, and scales [..., N, 3], standard deviations. opacities: [..., N], for tighter radii.
    viewmats: [..., C, 4, 4]. Ks: [..., C, 3, 3].
    eps2d: added to both variances, square pixels. radius_clip: Gaussians of no larger radius are left out.
    calc_compensations: return the factors of antialiased opacities. camera_model: "pinhole", "ortho" or "fisheye".

    Returns radii [..., C, N, 2] int32, means2d [..., C, N, 2], depths [..., C, N], conics [..., C, N, 3] (xx, xy, yy of
    the inverse covariance) and compensations [..., C, N] or None; 0 where one is not visible.
    Raises NotImplementedError for packed, sparse_grad and other camera models.
    """
    call = "fully_fused_projection()"
    if packed:
        raise refuse(call, "packed", packed, "take the rows whose radii are above 0")
    if sparse_grad:
        raise refuse(call, "sparse_grad", sparse_grad, "gradients are dense")
    if camera_model not in MODELS:
        raise refuse(call, "camera_model", camera_model, f"there are {', '.join(MODELS)}")
    if covars is None and (quats is None or scales is None):
        raise ValueError("give covars, or quats and scales")
    rotation = viewmats[..., None, :3, :3]
    seen = (means[..., None, :, None, :] @ rotation.mT)[..., 0, :] + viewmats[..., None, :3, 3]
    depths = seen[..., 2]
    in_range = (depths > near_plane) & (depths < far_plane)
    x, y, z = seen[..., 0], seen[..., 1], torch.where(in_range, depths, 1.0)
    fx, fy, cx, cy = (Ks[..., i, j, None] for i, j in ((0, 0), (1, 1), (0, 2), (1, 2)))
    centre, jacobians = (
        (
            torch.stack([fx * x / z + cx, fy * y / z + cy], dim=-1),
            _jacobians((x, y, z), (fx, fy, cx, cy), width, height),
        )
        if camera_model == "pinhole"
        else other_pixels(camera_model, (x, y, z), (fx, fy, cx, cy))
    )
    variances, raw_det = _covariances_2d(jacobians @ rotation, covars, quats, scales)
    a, b, c = variances[..., 0, 0] + eps2d, variances[..., 0, 1], variances[..., 1, 1] + eps2d
    det = raw_det + eps2d * (variances[..., 0, 0] + variances[..., 1, 1]) + eps2d * eps2d
    compensations = (raw_det / det).clamp(min=0.0)
    compensations = torch.where(compensations > 0, compensations, 1.0).sqrt() * (compensations > 0)
    extent = _extents(opacities, compensations if calc_compensations else None, depths)
    with torch.no_grad():
        radii = (extent[..., None] * torch.stack([a, c], dim=-1).sqrt()).ceil()
        size = radii.new_tensor([width, height])
        inside = ((centre + radii > 0) & (centre - radii < size)).all(dim=-1)
        kept = in_range & (det > 0) & inside & (extent > 0) & (radii > radius_clip).any(dim=-1)
        radii = torch.where(kept[..., None], radii, 0.0).int()

    def zeroed(values: Tensor) -> Tensor:
        return torch.where(kept.view(*kept.shape, *[1] * (values.dim() - kept.dim())), values, 0.0)

    conics = torch.stack([c, -b, a], dim=-1) / torch.where(det > 0, det, 1.0)[..., None]
    factors = zeroed(compensations) if calc_compensations else None
    return radii, zeroed(centre), zeroed(depths), zeroed(conics), factors


def _jacobians(
    point: tuple[Tensor, Tensor, Tensor], lens: tuple[Tensor, Tensor, Tensor, Tensor], width: int, height: int
) -> Tensor:
    """Return [..., C, N, 2, 3] derivatives of a pinhole's pixel by the point, clamped as in docs/math.md 3.3."""
    (x, y, z), (fx, fy, cx, cy) = point, lens

    def slope(along: Tensor, focal: Tensor, middle: Tensor, side: int) -> Tensor:
        margin = JACOBIAN_MARGIN * side
        return torch.maximum(torch.minimum(along / z, (side + margin - middle) / focal), (-margin - middle) / focal)

    zero = torch.zeros_like(z)
    row_u = torch.stack([fx / z, zero, -fx * slope(x, fx, cx, width) / z], dim=-1)
    row_v = torch.stack([zero, fy / z, -fy * slope(y, fy, cy, height) / z], dim=-1)
    return torch.stack([row_u, row_v], dim=-2)


def _covariances_2d(
    to_image: Tensor, covars: Tensor | None, quats: Tensor | None, scales: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the covariances [..., C, N, 2, 2] in the image before the blur, and their determinants."""
    if covars is not None:
        if covars.shape[-1] == 6:
            xx, xy, xz, yy, yz, zz = covars.unbind(dim=-1)
            covars = torch.stack([xx, xy, xz, xy, yy, yz, xz, yz, zz], dim=-1).view(*covars.shape[:-1], 3, 3)
        flat = to_image @ covars[..., None, :, :, :] @ to_image.mT
        return flat, flat[..., 0, 0] * flat[..., 1, 1] - flat[..., 0, 1].square()
    assert quats is not None
    assert scales is not None
    axes = rotation_matrices(quats.reshape(-1, 4)).view(*quats.shape[:-1], 3, 3) * scales[..., None, :]
    root = to_image @ axes[..., None, :, :, :]
    # A sum of squares (Cauchy-Binet): xx yy - xy^2 cancels for long thin Gaussians.
    det = torch.linalg.cross(root[..., 0, :], root[..., 1, :]).square().sum(dim=-1)
    return root @ root.mT, det


def _extents(opacities: Tensor | None, compensations: Tensor | None, like: Tensor) -> Tensor:
    """Return [..., C, N], the standard deviations at which a Gaussian falls below 1/255; at most MAX_EXTENT."""
    if opacities is None:
        return torch.full_like(like, MAX_EXTENT)
    opacity = opacities.detach()[..., None, :].expand_as(like)
    if compensations is not None:
        opacity = opacity * compensations.detach()
    return (2.0 * (opacity / ALPHA_MIN).clamp(min=1.0).log()).sqrt().clamp(max=MAX_EXTENT)
