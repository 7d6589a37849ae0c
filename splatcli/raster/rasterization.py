"""rasterization(): the call of gsplat, for programs written for it; names, shapes and returns are its own.

What it takes is activated (standard deviations, opacities in 0..1), as there. Here is the border: it becomes raw, by
a logarithm and a logit that autograd sees, and goes through the one renderer that there is. docs/api.md has the table
of what is supported.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from splatcli.errors import UsageError
from splatcli.gaussians import SH_REST, Gaussians
from splatcli.raster.rendering import Projected, Render, render
from splatcli.raster.view import Z_FAR, Z_NEAR
from splatcli.scene.camera import Camera

RenderMode = Literal["RGB", "D", "ED", "RGB+D", "RGB+ED"]

#: The constant SH basis function: colour = 0.5 + SH0 * coefficient.
SH0 = 0.28209479177387814

#: Opacities and standard deviations are kept this far from where their logit or logarithm is infinite.
_MOST_OPAQUE, _LEAST = 1.0 - 2.0**-24, 1e-12

_HALVES = (torch.float16, torch.bfloat16)

#: Arguments that have one value here, with what to say to another.
_FIXED: dict[str, tuple[Any, str]] = {
    "radius_clip": (0.0, "Gaussians are culled by what they reach, not by a radius"),
    "eps2d": (0.3, "the blur of 0.3 square pixels is part of the kernels"),
    "sparse_grad": (False, "gradients are dense; training here needs none, see splatcli.raster.engine_for"),
    "camera_model": ("pinhole", "undistort the images: splat does on load"),
    "covars": (None, "give quats and scales"),
}


def rasterization(
    means: Tensor,
    quats: Tensor,
    scales: Tensor,
    opacities: Tensor,
    colors: Tensor,
    viewmats: Tensor,
    Ks: Tensor,
    width: int,
    height: int,
    near_plane: float = Z_NEAR,
    far_plane: float = Z_FAR,
    radius_clip: float = 0.0,
    eps2d: float = 0.3,
    sh_degree: int | None = None,
    packed: bool = True,
    tile_size: int = 16,
    backgrounds: Tensor | None = None,
    render_mode: RenderMode = "RGB",
    sparse_grad: bool = False,
    absgrad: bool = False,
    rasterize_mode: Literal["classic", "antialiased"] = "classic",
    channel_chunk: int = 32,
    distributed: bool = False,
    camera_model: str = "pinhole",
    covars: Tensor | None = None,
    world: Ranks | None = None,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Renders N Gaussians from C cameras, differentiably; leading batch dimensions ``...`` as in gsplat.

    means: [..., N, 3] world units. quats: [..., N, 4] w x y z, any length. scales: [..., N, 3] standard deviations.
    opacities: [..., N] in 0..1.
    colors: [..., (C,) N, D] as they are; or with ``sh_degree`` SH coefficients [..., (C,) N, K, 3].
    viewmats: [..., C, 4, 4] world to camera, OpenCV axes; they get gradients. Ks: [..., C, 3, 3] pixels, no gradient.
    backgrounds: [..., C, D].
    packed: the rows of what is said about projections are those of visible Gaussians only; images are the same.
    tile_size, channel_chunk: taken and not used; they change no result.
    distributed: each rank of ``world`` gives its own Gaussians and as many cameras as the others, and gets images of
        all Gaussians from its own cameras; every rank has to call this and backward() as often. Poses get no gradient
        then, and meta says nothing of projections. Nothing is looked for: no group, no variable; ``world`` is given.

    Half-precision tensors, as a network under autocast emits them, are computed in float32, whatever autocast says, and
    get gradients of their own dtype; with float64 means all is float64. Images have the dtype of the computation.

    Returns (images [..., C, H, W, X], alphas [..., C, H, W, 1], meta). X is D, and one more with a depth; "D" is the
    sum of weight times camera z, "ED" that divided by alpha. meta["means2d"] has the gradient of the projected means
    in its ``grad`` after backward(), and with ``absgrad`` the pixels' magnitudes in its ``absgrad`` (of more than three
    channels those of each three).
    Raises UsageError for what is not supported, ValueError for shapes that do not fit, DistributedError on all ranks
    when they do not agree.
    """
    given = {
        "radius_clip": radius_clip,
        "eps2d": eps2d,
        "sparse_grad": sparse_grad,
        "camera_model": camera_model,
        "covars": covars,
    }
    for name, (only, why) in _FIXED.items():
        if given[name] is not only and given[name] != only:
            raise UsageError(f"{name}={given[name]!r} is not supported", where="rasterization()", remedy=why)
    if distributed != (world is not None):
        raise UsageError(
            "distributed=True and world=... belong together"
            if distributed
            else "world is given without distributed=True",
            where="rasterization()",
            remedy="world=splatcli.distributed.join(...); or leave both out: then the render is local",
        )
    if render_mode not in ("RGB", "D", "ED", "RGB+D", "RGB+ED"):
        raise UsageError(f"there is no render_mode {render_mode!r}", remedy="RGB, D, ED, RGB+D or RGB+ED")
    if rasterize_mode not in ("classic", "antialiased"):
        raise UsageError(f"there is no rasterize_mode {rasterize_mode!r}", remedy="classic or antialiased")
    dtype = torch.float64 if means.dtype == torch.float64 else torch.float32
    means, quats, scales, opacities, colors = (t.to(dtype) for t in (means, quats, scales, opacities, colors))
    viewmats = viewmats.float() if viewmats.dtype in _HALVES else viewmats  # float64 poses come through exactly
    backgrounds = None if backgrounds is None else backgrounds.to(dtype)
    _check(means, quats, scales, opacities, colors, viewmats, Ks, backgrounds, sh_degree)
    batch = means.shape[:-2]
    count, cameras = means.shape[-2], viewmats.shape[-3]
    if world is not None:
        _check_sharded(world, batch, viewmats, cameras, sh_degree)
    per_camera = colors.dim() == len(batch) + (3 if sh_degree is None else 4)

    images, alphas, told = [], [], []
    with torch.autocast(means.device.type, enabled=False):
        for at in itertools.product(*(range(size) for size in batch)):
            raw = (
                means[at],
                quats[at],
                scales[at].clamp(min=_LEAST).log(),
                torch.logit(opacities[at].clamp(_LEAST, _MOST_OPAQUE)),
            )
            for c in range(cameras):
                own = colors[at][c] if per_camera else colors[at]
                view = _View(viewmats[at][c], Ks[at][c], width, height, near_plane, far_plane, rasterize_mode, world)
                behind = None if backgrounds is None else backgrounds[at][c]
                image, alpha, depth, projected = _channels(raw, own, view, behind, sh_degree)
                images.append(_stacked(image, alpha, depth, render_mode))
                alphas.append(alpha[..., None])
                told.append(projected)
    shape = (*batch, cameras, height, width)
    meta = {} if world else _meta(told, opacities, batch, cameras, count, packed=packed, absgrad=absgrad)
    meta |= {"width": width, "height": height, "tile_size": tile_size, "n_cameras": cameras}
    return torch.stack(images).view(*shape, -1), torch.stack(alphas).view(*shape, 1), meta


class Ranks(Protocol):
    """Processes that render together, as seen from here (splatcli.distributed.World is one)."""

    def tell(self, what: str, numbers: Sequence[float]) -> list[list[float]]: ...

    def agree(self, what: str, **facts: int) -> None: ...

    def render(
        self,
        gaussians: Gaussians,
        camera: Camera,
        *,
        background: Tensor | None,
        antialiased: bool,
        z_range: tuple[float, float],
    ) -> Render: ...


def _check_sharded(world: Ranks, batch: torch.Size, viewmats: Tensor, cameras: int, sh_degree: int | None) -> None:
    """UsageError for what ranks cannot do together, DistributedError where they do not agree."""
    if batch:
        raise UsageError("batches are not supported with distributed=True", remedy="one call for each")
    if viewmats.requires_grad:
        raise UsageError("poses get no gradient with distributed=True", remedy="viewmats.detach()")
    world.agree("a rasterization", cameras=cameras, **{"SH degree": -1 if sh_degree is None else sh_degree})


class _View:
    """A camera with the tensor that its pose may get a gradient through."""

    def __init__(
        self,
        viewmat: Tensor,
        K: Tensor,
        width: int,
        height: int,
        near: float,
        far: float,
        mode: str,
        world: Ranks | None = None,
    ) -> None:
        self.world = world
        k = K.detach().double().cpu()
        self.viewmat = viewmat
        self.camera = Camera(
            name="",
            width=width,
            height=height,
            fx=float(k[0, 0]),
            fy=float(k[1, 1]),
            cx=float(k[0, 2]),
            cy=float(k[1, 2]),
            viewmat=viewmat.detach().double().cpu().numpy(),
        )
        self.z_range = (near, far)
        self.antialiased = mode == "antialiased"

    def lift(self, colors: Tensor) -> Tensor:
        """[] what has to be added to ``colors`` to leave none below 0; of several ranks the most that any needs."""
        own = (-colors.detach().amin()).clamp(min=0.0) if colors.numel() else colors.new_zeros(())
        return (
            own if self.world is None else own.new_tensor(max(v for (v,) in self.world.tell("colours", [float(own)])))
        )

    def render(self, gaussians: Gaussians, background: Tensor | None, projected: Projected | None) -> Render:
        if self.world is not None:
            return self.world.render(
                gaussians, self.camera, background=background, antialiased=self.antialiased, z_range=self.z_range
            )
        return render(
            gaussians,
            self.camera,
            background=background,
            viewmat=self.viewmat if self.viewmat.requires_grad else None,
            antialiased=self.antialiased,
            z_range=self.z_range,
            projected=projected,
        )


def _channels(
    raw: tuple[Tensor, Tensor, Tensor, Tensor],
    colors: Tensor,
    view: _View,
    background: Tensor | None,
    sh_degree: int | None,
) -> tuple[Tensor, Tensor, Tensor, Projected]:
    """Image [H, W, D], alpha [H, W], depth [H, W] of one camera, three channels at a time."""
    means = raw[0]
    grad = torch.is_grad_enabled()
    projected = Projected.empty(len(means), means.device, means.dtype, with_gradient=grad)
    if sh_degree is not None:
        shown = view.render(Gaussians(*raw, colors[:, 0], colors[:, 1 : 1 + SH_REST[sh_degree]]), background, projected)
        return shown.image, shown.alpha, shown.depth, projected
    none = means.new_zeros(len(means), 0, 3)
    parts, alpha, depth = [], None, None
    for first in range(0, max(1, colors.shape[1]), 3):
        part = colors[:, first : first + 3]
        used = part.shape[1]
        # The kernels cut colours off at 0. What is added here to keep them above is taken off again where it shows.
        lift = view.lift(part)
        padded = torch.nn.functional.pad(part + lift, (0, 3 - used))
        below = None if background is None else torch.nn.functional.pad(background[first : first + 3], (0, 3 - used))
        # Every chunk adds its share to the gradient of the same projected means.
        shown = view.render(Gaussians(*raw, (padded - 0.5) / SH0, none), below, projected)
        parts.append((shown.image - lift * shown.alpha[..., None])[..., :used])
        if alpha is None or depth is None:
            alpha, depth = shown.alpha, shown.depth
    assert alpha is not None
    assert depth is not None
    return torch.cat(parts, dim=-1), alpha, depth, projected


def _stacked(image: Tensor, alpha: Tensor, depth: Tensor, mode: RenderMode) -> Tensor:
    """[H, W, X] what ``mode`` asks for."""
    if mode == "RGB":
        return image
    if mode.endswith("ED"):
        depth = depth / alpha.clamp(min=1e-10)
    return depth[..., None] if mode in ("D", "ED") else torch.cat([image, depth[..., None]], dim=-1)


def _meta(
    told: list[Projected],
    opacities: Tensor,
    batch: torch.Size,
    cameras: int,
    count: int,
    *,
    packed: bool,
    absgrad: bool,
) -> dict[str, Any]:
    """What gsplat says of the projections: [..., C, N, ...], or a row for each Gaussian that a camera sees."""
    shape = (*batch, cameras, count)
    fields = {name: torch.stack([getattr(one, name) for one in told]) for name in ("radii", "depths", "conics")}
    dense = torch.stack([one.means2d.detach() for one in told])
    own = opacities.detach().reshape(-1, count).repeat_interleave(cameras, dim=0)
    if packed:
        which, ids = (fields["radii"] > 0).all(dim=-1).nonzero().unbind(dim=1)
        means2d = dense[which, ids]
        meta: dict[str, Any] = {name: tensor[which, ids] for name, tensor in fields.items()}
        meta |= {"opacities": own[which, ids], "gaussian_ids": ids, "camera_ids": which % cameras}
        meta["batch_ids"] = torch.div(which, cameras, rounding_mode="floor")
    else:
        means2d = dense.view(*shape, 2)
        meta = {name: tensor.view(*shape, *tensor.shape[2:]) for name, tensor in fields.items()}
        meta |= {"opacities": own.view(shape), "gaussian_ids": None, "camera_ids": None, "batch_ids": None}
    means2d.requires_grad_(told[0].means2d.requires_grad)
    meta["means2d"] = means2d
    for row, one in enumerate(told):
        if one.means2d.requires_grad:
            hook = _teller(one, row, meta, absgrad=absgrad)
            one.means2d.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return meta


def _teller(one: Projected, row: int, meta: dict[str, Any], *, absgrad: bool) -> Any:
    """Brings what backward() leaves in a camera's own tensors to where gsplat's users look for it."""
    means2d = meta["means2d"]

    def tell(_: Tensor) -> None:
        found = {"grad": one.means2d.grad, "absgrad": one.absgrad if absgrad else None}
        for name, value in found.items():
            if value is None:
                continue
            if getattr(means2d, name, None) is None:
                setattr(means2d, name, torch.zeros_like(means2d))
            target = getattr(means2d, name)
            if meta["gaussian_ids"] is None:
                target.view(-1, *value.shape)[row] = value
            else:
                cameras = meta["n_cameras"]
                mine = meta["batch_ids"] * cameras + meta["camera_ids"] == row
                target[mine] = value[meta["gaussian_ids"][mine]]

    return tell


def _check(
    means: Tensor,
    quats: Tensor,
    scales: Tensor,
    opacities: Tensor,
    colors: Tensor,
    viewmats: Tensor,
    Ks: Tensor,
    backgrounds: Tensor | None,
    sh_degree: int | None,
) -> None:
    """ValueError for the first shape that does not fit, with what was expected."""
    batch, n, cameras = tuple(means.shape[:-2]), means.shape[-2], viewmats.shape[-3]
    if sh_degree is None:
        tails: tuple[tuple[int, ...], ...] = ((n, colors.shape[-1]), (cameras, n, colors.shape[-1]))
    else:
        if not 0 <= sh_degree < len(SH_REST):
            raise ValueError(f"sh_degree is {sh_degree}, not 0 to {len(SH_REST) - 1}")
        terms = colors.shape[-2]
        if terms < 1 + SH_REST[sh_degree]:
            raise ValueError(f"colors has {terms} coefficients, degree {sh_degree} needs {1 + SH_REST[sh_degree]}")
        tails = ((n, terms, 3), (cameras, n, terms, 3))
    expected: dict[str, tuple[Tensor, tuple[tuple[int, ...], ...]]] = {
        "means": (means, ((n, 3),)),
        "quats": (quats, ((n, 4),)),
        "scales": (scales, ((n, 3),)),
        "opacities": (opacities, ((n,),)),
        "colors": (colors, tails),
        "viewmats": (viewmats, ((cameras, 4, 4),)),
        "Ks": (Ks, ((cameras, 3, 3),)),
    }
    if backgrounds is not None:
        expected["backgrounds"] = (backgrounds, ((cameras, colors.shape[-1]),))
    for name, (tensor, fitting) in expected.items():
        if tuple(tensor.shape) not in [(*batch, *tail) for tail in fitting]:
            wanted = " or ".join(str((*batch, *tail)) for tail in fitting)
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {wanted}")
