"""gsplat's calls beside rasterization() that project, colour and convert, in torch, differentiable.

The renderer's one pass does not use them: its kernels project and colour themselves. They are for programs that need
the colours or the projected Gaussians, on any device and in any float dtype. gsplat_tiles.py goes on from there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from splatcli.rasterizer.context import Z_FAR
from splatcli.rasterizer.opaque import graph_break
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


@graph_break
def spherical_harmonics(
    degrees_to_use: int,
    means: Tensor | None = None,
    viewmats: Tensor | None = None,
    coeffs: Tensor | None = None,
    masks: Tensor | None = None,
    batch_ids: Tensor | None = None,
    camera_ids: Tensor | None = None,
    gaussian_ids: Tensor | None = None,
    viewmats_rs: Tensor | None = None,
    *,
    dirs: Tensor | None = None,
) -> Tensor:
    """Return the sums of spherical harmonics in the directions from the cameras to ``means``, [..., C, N, 3].

    means: [..., N, 3]. viewmats: [..., C, 4, 4]. coeffs: [..., (C,) N, K, 3]. masks: [..., C, N] bool, False gives 0.
    The form of gsplat up to 1.5 works too: (degrees_to_use, dirs [..., 3], coeffs [..., K, 3], masks [...]), by place
    or by name, with directions of any length; returns [..., 3]. A colour is 0.5 more than the sum. Degrees 0 to 4.
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
    if dirs is None and (viewmats is None or coeffs is None or coeffs.dtype == torch.bool):
        # Up to 1.5: the places of means and viewmats are those of dirs and coeffs.
        dirs, means = means, None
        if viewmats is not None:
            coeffs, masks = viewmats, masks if coeffs is None else coeffs
    if coeffs is None or (means is None and dirs is None):
        raise ValueError("spherical_harmonics(): give means, viewmats and coeffs; or dirs and coeffs")
    if dirs is not None:
        directions = dirs
    else:
        assert means is not None
        assert viewmats is not None
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


@graph_break
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
) -> tuple[Any, ...]:
    """Project Gaussians into images; docs/math.md 3.

    means: [..., N, 3]. covars: [..., N, 6] (xx, xy, xz, yy, yz, zz) or [..., N, 3, 3]; or None, then quats [..., N, 4]
        w x y z of any length, and scales [..., N, 3], standard deviations. opacities: [..., N], for tighter radii.
    viewmats: [..., C, 4, 4]. Ks: [..., C, 3, 3].
    eps2d: added to both variances, square pixels. radius_clip: Gaussians of no larger radius are left out.
    calc_compensations: return the factors of antialiased opacities. camera_model: "pinhole", "ortho" or "fisheye".

    sparse_grad: accepted; gradients are dense.

    Returns radii [..., C, N, 2] int32, means2d [..., C, N, 2], depths [..., C, N], conics [..., C, N, 3] (xx, xy, yy of
    the inverse covariance) and compensations [..., C, N] or None; 0 where one is not visible. With ``packed``, rows of
    the visible ones: batch_ids [nnz], camera_ids [nnz], gaussian_ids [nnz], then the same five as [nnz, ...].
    Raises NotImplementedError for other camera models, ValueError where neither covars nor both others are given.
    """
    call = "fully_fused_projection()"
    if camera_model not in MODELS:
        raise refuse(call, "camera_model", camera_model, f"there are {', '.join(MODELS)}")
    if covars is None and (quats is None or scales is None):
        raise ValueError("give covars, or quats and scales")
    rotation = viewmats[..., None, :3, :3]
    seen = (means[..., None, :, None, :] @ rotation.mT)[..., 0, :] + viewmats[..., None, :3, 3]
    depths = seen[..., 2]
    in_range = (depths > near_plane) & (depths < far_plane)
    x, y, z = seen[..., 0], seen[..., 1], torch.where(in_range, depths, 1.0)
    centre, jacobians = _pixels((x, y, z), Ks, width, height, camera_model)
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
    dense = (radii, zeroed(centre), zeroed(depths), zeroed(conics), factors)
    if not packed:
        return dense
    images = kept.dim() - 1
    rows, gaussian_ids = kept.flatten(0, images - 1).nonzero().unbind(dim=1)
    packed_rows = (None if t is None else t.flatten(0, images - 1)[rows, gaussian_ids] for t in dense)
    cameras = max(1, kept.shape[-2])
    return rows // cameras, rows % cameras, gaussian_ids, *packed_rows


def quat_scale_to_covar_preci(
    quats: Tensor, scales: Tensor, compute_covar: bool = True, compute_preci: bool = True, triu: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """Return covariances and their inverses [..., 3, 3], or None for what is not asked for.

    quats: [..., 4] w x y z of any length. scales: [..., 3] standard deviations.
    triu: [..., 6] instead, in the order xx, xy, xz, yy, yz, zz.
    """
    rotations = rotation_matrices(quats.reshape(-1, 4)).view(*quats.shape[:-1], 3, 3)

    def matrices(factors: Tensor) -> Tensor:
        root = rotations * factors[..., None, :]
        whole = root @ root.mT
        if not triu:
            return whole
        row, column = torch.triu_indices(3, 3, device=whole.device)
        return whole[..., row, column]

    return matrices(scales) if compute_covar else None, matrices(1.0 / scales) if compute_preci else None


def world_to_cam(means: Tensor, covars: Tensor, viewmats: Tensor) -> tuple[Tensor, Tensor]:
    """Return means [..., C, N, 3] and covariances [..., C, N, 3, 3] in the axes of the cameras.

    means: [..., N, 3]. covars: [..., N, 3, 3]. viewmats: [..., C, 4, 4].
    """
    rotation = viewmats[..., None, :3, :3]
    seen = (means[..., None, :, None, :] @ rotation.mT)[..., 0, :] + viewmats[..., None, :3, 3]
    return seen, rotation @ covars[..., None, :, :, :] @ rotation.mT


def proj(
    means: Tensor, covars: Tensor, Ks: Tensor, width: int, height: int, camera_model: str = "pinhole"
) -> tuple[Tensor, Tensor]:
    """Return the pixels [..., C, N, 2] of means, and the covariances [..., C, N, 2, 2] there, without a blur.

    means: [..., C, N, 3], covars: [..., C, N, 3, 3], both in the axes of the cameras. Ks: [..., C, 3, 3].
    Raises NotImplementedError for other camera models than "pinhole", "ortho" and "fisheye".
    """
    if camera_model not in MODELS:
        raise refuse("proj()", "camera_model", camera_model, f"there are {', '.join(MODELS)}")
    x, y, z = means.unbind(dim=-1)
    centre, jacobians = _pixels((x, y, z), Ks, width, height, camera_model)
    return centre, jacobians @ covars @ jacobians.mT


def normalized_quat_to_rotmat(quat: Tensor) -> Tensor:
    """Return rotation matrices [..., 3, 3] of quaternions [..., 4] w x y z."""
    return rotation_matrices(quat.reshape(-1, 4)).view(*quat.shape[:-1], 3, 3)


def depth_to_points(depths: Tensor, camtoworlds: Tensor, Ks: Tensor, z_depth: bool = True) -> Tensor:
    """Return the points [..., H, W, 3], in world coordinates, that pixels of pinhole cameras show.

    depths: [..., H, W, 1], camera z, or with ``z_depth=False`` along the ray. camtoworlds: [..., 4, 4].
    Ks: [..., 3, 3].
    """
    height, width = depths.shape[-3:-1]
    y, x = torch.meshgrid(
        torch.arange(height, device=depths.device) + 0.5, torch.arange(width, device=depths.device) + 0.5, indexing="ij"
    )
    fx, fy, cx, cy = (Ks[..., i, j, None, None] for i, j in ((0, 0), (1, 1), (0, 2), (1, 2)))
    rays = torch.stack([(x - cx) / fx, (y - cy) / fy, torch.ones_like(x - cx)], dim=-1)
    rays = (rays[..., None, :] @ camtoworlds[..., None, None, :3, :3].mT)[..., 0, :]
    if not z_depth:
        rays = torch.nn.functional.normalize(rays, dim=-1)
    return camtoworlds[..., None, None, :3, 3] + depths * rays


def depth_to_normal(depths: Tensor, camtoworlds: Tensor, Ks: Tensor, z_depth: bool = True) -> Tensor:
    """Return normals [..., H, W, 3] of a depth map, by central differences of its points; 0 at the edges.

    The arguments are those of depth_to_points().
    """
    points = depth_to_points(depths, camtoworlds, Ks, z_depth)
    down = points[..., 2:, 1:-1, :] - points[..., :-2, 1:-1, :]
    across = points[..., 1:-1, 2:, :] - points[..., 1:-1, :-2, :]
    normals = torch.nn.functional.normalize(torch.linalg.cross(down, across), dim=-1)
    return torch.nn.functional.pad(normals, (0, 0, 1, 1, 1, 1))


def _pixels(
    point: tuple[Tensor, Tensor, Tensor], Ks: Tensor, width: int, height: int, camera_model: str
) -> tuple[Tensor, Tensor]:
    """Return the pixels [..., C, N, 2] of camera points, and their derivatives [..., C, N, 2, 3]."""
    x, y, z = point
    fx, fy, cx, cy = (Ks[..., i, j, None] for i, j in ((0, 0), (1, 1), (0, 2), (1, 2)))
    if camera_model != "pinhole":
        return other_pixels(camera_model, point, (fx, fy, cx, cy))
    centre = torch.stack([fx * x / z + cx, fy * y / z + cy], dim=-1)
    return centre, _jacobians(point, (fx, fy, cx, cy), width, height)


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
