"""rasterization(): gsplat's call, with its names, shapes and returns, for programs written for gsplat.

Its inputs are activated (standard deviations, opacities in 0..1), as in gsplat. They become raw here, by a logarithm
and a logit that autograd sees, and go through the one renderer. docs/api.md has the table of supported arguments.
"""

from __future__ import annotations

import itertools
import math
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from splatcli.errors import UsageError
from splatcli.gaussians import SH_C0, SHN_COUNTS, Gaussians
from splatcli.rasterizer.context import Z_FAR
from splatcli.rasterizer.gsplat_ops import fully_fused_projection, spherical_harmonics
from splatcli.rasterizer.gsplat_tiles import isect_offset_encode, isect_tiles, rasterize_to_pixels
from splatcli.rasterizer.opaque import graph_break, once_differentiable
from splatcli.rasterizer.reference import BLUR, clamped, other_pixels
from splatcli.rasterizer.rendering import Projected, Render, ViewRender
from splatcli.rasterizer.sharded import render_sharded
from splatcli.scene.camera import MODELS, NEAR, Camera, CameraModel

if TYPE_CHECKING:
    from splatcli.distributed.process_group import ProcessGroup

RenderMode = Literal["RGB", "D", "ED", "RGB+D", "RGB+ED"]


#: Opacities and standard deviations are at least this, so that logit and logarithm stay finite.
_LEAST = 1e-12

#: How far opacities stay below 1, in roundings of the dtype: 1.5e-5 in float32. Gradients are multiplied by the
#: distance, of which rounding leaves little nearer to 1.
_BELOW_ONE = 128.0

#: The logit of an opacity that shows nowhere.
_UNSEEN = -100.0

_HALVES = (torch.float16, torch.bfloat16)

#: Arguments with one supported value, and the remedy for another.
_FIXED: dict[str, tuple[Any, str]] = {
    "with_ut": (False, "undistort the images, then the projection needs no unscented transform"),
    "with_eval3d": (False, "Gaussians are evaluated in the image plane; leave it out"),
    "return_normals": (False, "take them from the gradient of a rendered depth"),
    "global_z_order": (True, "Gaussians are blended in the order of camera z"),
    "rays": (None, "give viewmats and Ks"),
    "radial_coeffs": (None, "undistort the images: splat does on load"),
    "tangential_coeffs": (None, "undistort the images: splat does on load"),
    "thin_prism_coeffs": (None, "undistort the images: splat does on load"),
    "ftheta_coeffs": (None, "undistort the images: splat does on load"),
    "lidar_coeffs": (None, "only pinhole, orthographic and fisheye cameras are rendered"),
    "external_distortion_coeffs": (None, "undistort the images: splat does on load"),
    "viewmats_rs": (None, "only global shutters are rendered"),
    "extra_signals": (None, "concatenate them to colors, which take any number of channels"),
    "extra_signals_sh_degree": (None, "concatenate them to colors, which take any number of channels"),
}

RENDER_MODES = ("RGB", "D", "ED", "RGB+D", "RGB+ED")

#: Channels of the training kernels' colours.
CHANNELS = 3

#: Arguments that a render over several processes has at their defaults alone.
_LOCAL: dict[str, Any] = {"radius_clip": 0.0, "eps2d": BLUR, "covars": None}

#: Pixels a side of the tiles that meta lists intersections with, unless the caller names another size.
TILE_SIZE = 16


@graph_break
def rasterization(
    means: Tensor,
    quats: Tensor | None,
    scales: Tensor | None,
    opacities: Tensor,
    colors: Tensor | None,
    viewmats: Tensor,
    Ks: Tensor,
    width: int,
    height: int,
    near_plane: float = NEAR,
    far_plane: float = Z_FAR,
    radius_clip: float = 0.0,
    eps2d: float = BLUR,
    sh_degree: int | None = None,
    packed: bool = True,
    tile_size: int | None = None,
    backgrounds: Tensor | None = None,
    render_mode: RenderMode = "RGB",
    sparse_grad: bool = False,
    absgrad: bool = False,
    rasterize_mode: Literal["classic", "antialiased"] = "classic",
    channel_chunk: int = 32,
    distributed: bool = False,
    camera_model: CameraModel = "pinhole",
    segmented: bool = False,
    covars: Tensor | None = None,
    with_ut: bool = False,
    with_eval3d: bool = False,
    return_normals: bool = False,
    global_z_order: bool = True,
    rays: Tensor | None = None,
    radial_coeffs: Tensor | None = None,
    tangential_coeffs: Tensor | None = None,
    thin_prism_coeffs: Tensor | None = None,
    ftheta_coeffs: object = None,
    lidar_coeffs: object = None,
    external_distortion_coeffs: object = None,
    rolling_shutter: object = "GLOBAL",
    viewmats_rs: Tensor | None = None,
    ut_params: object = None,
    extra_signals: Tensor | None = None,
    extra_signals_sh_degree: int | None = None,
    renderer_config: object = None,
    *,
    group: ProcessGroup | None = None,
    world: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Render N Gaussians from C cameras, differentiably; leading batch dimensions ``...`` as in gsplat.

    means: [..., N, 3] world units. quats: [..., N, 4] w x y z, any length. scales: [..., N, 3] standard deviations, of
        either sign. opacities: [..., N] in 0..1. N and C may be 0.
    colors: [..., (C,) N, D] as they are; or with ``sh_degree`` SH coefficients [..., (C,) N, K, 3], or [N, K, 3] that
        the whole batch shares. Modes without RGB use no colours, and take None.
    viewmats: [..., C, 4, 4] world to camera, OpenCV axes; they get gradients. Ks: [..., C, 3, 3] pixels, no gradient.
    width, height: pixels. near_plane, far_plane: camera z, world units, between which a mean has to lie for its
        Gaussian to be rendered.
    backgrounds: [..., C, D].
    render_mode: "RGB"; "D", depth; "ED", expected depth; or "RGB+D", "RGB+ED" with the depth as the last channel.
    rasterize_mode: "classic"; or "antialiased", which scales opacities by the area that ``eps2d`` adds.
    covars: [..., N, 3, 3] in place of quats and scales, which are not read then and may be None.
    radius_clip: Gaussians with no larger radius, in pixels, are left out; they are projected twice.
    eps2d: added to both variances in the image, square pixels. With another than 0.3, and with covars, the stages of
        gsplat_ops.py and gsplat_tiles.py render, which takes longer and more memory; Ks get gradients then.
    packed: meta has rows only for visible Gaussians; images are the same.
    camera_model: "pinhole"; "ortho", whose focal lengths are pixels a world unit; or "fisheye", equidistant, pixels a
        radian, up to 180 degrees. docs/math.md 3.9, 3.10
    tile_size: of the intersections that meta lists; images do not depend on it.
    channel_chunk, segmented, ut_params: accepted, without effect. sparse_grad: accepted; gradients are dense.
    rolling_shutter, renderer_config: gsplat's objects or None; only a global shutter and RendererConfig_MixedBatch.
    The other arguments are accepted at their defaults, see docs/api.md.
    distributed: each rank of ``group`` gives its own Gaussians and as many cameras as the others, and gets images of
        all Gaussians from its own cameras; every rank has to call this and backward() as often. meta says nothing of
        projections then. Without ``group`` the ranks are those of the default process group.
    world: deprecated, use ``group``.

    Half-precision tensors, as a network under autocast emits them, are computed in float32, whatever autocast says, and
    get gradients of their own dtype; with float64 means all is float64. Images have the dtype of the computation.

    Returns (images [..., C, H, W, X], alphas [..., C, H, W, 1], meta). X is D, and one more with a depth; "D" is the
    sum of weight times camera z, "ED" that divided by alpha. meta["means2d"] is part of the graph between the means and
    the images; its gradient is in its ``grad`` after backward(), and with ``absgrad`` the pixels' magnitudes in its
    ``absgrad``. The tile intersections in meta are listed when they are first read.
    Raises UsageError for an unsupported value, ValueError for shapes that do not fit, TypeError for what is no tensor
    with numbers, DistributedError on all ranks when they do not agree.
    """
    _check_arguments(locals())
    group = group or world
    if distributed and group is None:
        from splatcli.distributed.process_group import default_group

        group = default_group(means.device)
    if "RGB" not in render_mode:
        colors, sh_degree, backgrounds = means.new_zeros(*means.shape[:-1], 0), None, None
    assert colors is not None, "checked above"
    dtype = torch.float64 if means.dtype == torch.float64 else torch.float32
    means, opacities, colors = (t.to(dtype) for t in (means, opacities, colors))
    viewmats = viewmats.float() if viewmats.dtype in _HALVES else viewmats  # float64 poses stay exact
    backgrounds = None if backgrounds is None else backgrounds.to(dtype)
    batch = means.shape[:-2]
    if sh_degree is not None and batch and colors.dim() == 3:
        colors = colors.expand(*batch, *colors.shape)
    shapes = {"covars": covars} if covars is not None else {"quats": quats, "scales": scales}
    shapes = {name: None if tensor is None else tensor.to(dtype) for name, tensor in shapes.items()}
    _check(means, shapes, opacities, colors, viewmats, Ks, backgrounds, sh_degree)
    cameras = viewmats.shape[-3]
    if group is not None:
        local = {"radius_clip": radius_clip, "eps2d": eps2d, "covars": covars}
        _check_sharded(group, batch, viewmats, cameras, sh_degree, local)
    call = _Call(
        means=means,
        shapes=shapes,
        opacities=opacities,
        colors=colors,
        sh_degree=sh_degree,
        viewmats=viewmats,
        Ks=Ks,
        backgrounds=backgrounds,
        near_plane=near_plane,
        far_plane=far_plane,
        radius_clip=radius_clip,
        eps2d=eps2d,
        camera_model=camera_model,
        mode=render_mode,
        antialiased=rasterize_mode == "antialiased",
        packed=packed,
        absgrad=absgrad,
        group=group,
        facts={
            "width": width,
            "height": height,
            **_tiles(width, height, tile_size or TILE_SIZE),
            "n_batches": math.prod(batch),
            "n_cameras": cameras,
        },
    )
    with torch.autocast(means.device.type, enabled=False):
        return call.render_in_stages() if covars is not None or eps2d != BLUR else call.render_by_camera()


def _check_arguments(arguments: dict[str, Any]) -> None:
    """Raise UsageError for a value that is not supported, TypeError for what is no tensor with real numbers.

    arguments: those of rasterization() by their names.
    """
    for name, (only, why) in _FIXED.items():
        value = arguments[name]
        if value is not only and (isinstance(value, Tensor) or value != only):
            text = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise UsageError(f"{name}={text} is not supported", where="rasterization()", remedy=why)
    camera_model, tile_size = arguments["camera_model"], arguments["tile_size"]
    rolling_shutter, renderer_config = arguments["rolling_shutter"], arguments["renderer_config"]
    if camera_model not in MODELS:
        raise UsageError(
            f"camera_model={camera_model!r} is not supported",
            where="rasterization()",
            remedy=f"{', '.join(MODELS)}; images of other lenses are undistorted: splat does on load",
        )
    # gsplat's own enum and classes, without a need to install gsplat.
    if getattr(rolling_shutter, "name", rolling_shutter) not in (None, "GLOBAL"):
        why = "only global shutters are rendered"
        raise UsageError(f"rolling_shutter={rolling_shutter!r} is not supported", where="rasterization()", remedy=why)
    if renderer_config is not None and type(renderer_config).__name__ != "RendererConfig_MixedBatch":
        why = "leave renderer_config out; it changes no image"
        raise UsageError(f"renderer_config={renderer_config!r} is not supported", where="rasterization()", remedy=why)
    if tile_size is not None and not (isinstance(tile_size, int) and tile_size > 0):
        raise UsageError(
            f"tile_size={tile_size!r} is no number of pixels", where="rasterization()", remedy="leave it out"
        )
    optional = ("quats", "scales", "covars", "colors", "backgrounds")
    for name in ("means", "quats", "scales", "covars", "opacities", "colors", "viewmats", "Ks", "backgrounds"):
        given = arguments[name]
        if given is None and name in optional:
            continue
        if not isinstance(given, Tensor):
            raise TypeError(f"{name} is a {type(given).__name__}, not a torch.Tensor")
        if given.is_meta:
            raise TypeError(f"{name} is on meta, where tensors have no numbers")
        if given.layout is not torch.strided:
            raise TypeError(f"{name} is a sparse tensor; {name}.to_dense() is a dense one")
        if given.is_complex():
            raise TypeError(f"{name} is {given.dtype}, not a real number")
    _check_kinds(arguments)
    if (arguments["group"] or arguments["world"]) is not None and not arguments["distributed"]:
        raise UsageError(
            "group is given without distributed=True",
            where="rasterization()",
            remedy="distributed=True; or leave group out: then the render is local",
        )
    mode, rasterize_mode = arguments["render_mode"], arguments["rasterize_mode"]
    if mode not in RENDER_MODES:
        raise UsageError(f"there is no render_mode {mode!r}", remedy="RGB, D, ED, RGB+D or RGB+ED")
    if rasterize_mode not in ("classic", "antialiased"):
        raise UsageError(f"there is no rasterize_mode {rasterize_mode!r}", remedy="classic or antialiased")
    if "RGB" in mode and arguments["colors"] is None:
        raise UsageError(f"render_mode {mode!r} needs colors", remedy="give colors, or render_mode='D' or 'ED'")
    if arguments["covars"] is None and (arguments["quats"] is None or arguments["scales"] is None):
        raise UsageError("there are no shapes", where="rasterization()", remedy="give quats and scales, or covars")


def _check_sharded(
    group: ProcessGroup,
    batch: torch.Size,
    viewmats: Tensor,
    cameras: int,
    sh_degree: int | None,
    arguments: Mapping[str, Any],
) -> None:
    """Raise UsageError for what ranks cannot do together, DistributedError where they do not agree."""
    for name, only in _LOCAL.items():
        value = arguments[name]
        if value is not only and (isinstance(value, Tensor) or value != only):
            text = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise UsageError(
                f"{name}={text} is not supported with distributed=True", where="rasterization()", remedy="leave it out"
            )
    if batch:
        raise UsageError("batches are not supported with distributed=True", remedy="one call for each")
    group.check_agreement("a rasterization", cameras=cameras, **{"SH degree": -1 if sh_degree is None else sh_degree})


def _camera(viewmat: Tensor, K: Tensor, width: int, height: int, model: CameraModel) -> Camera:
    """Return the camera of a pose [4, 4] and intrinsics [3, 3], both of the host."""
    fx, cx, fy, cy = (float(K[at]) for at in ((0, 0), (0, 2), (1, 1), (1, 2)))
    return Camera("", width, height, fx, fy, cx, cy, viewmat.numpy(), model=model)


class _View:
    """A camera. pose: [4, 4], where it gets a gradient."""

    def __init__(
        self, viewmat: Tensor, camera: Camera, near: float, far: float, antialiased: bool, group: ProcessGroup | None
    ) -> None:
        self.group = group
        self.pose = viewmat if viewmat.requires_grad else None
        self.camera = camera
        self.z_range = (near, far)
        self.antialiased = antialiased

    def lift(self, colors: Tensor) -> Tensor:
        """Return [] the least number that lifts all finite ``colors`` to 0 or above, on all ranks of a group."""
        finite = torch.where(colors.detach().isfinite(), colors.detach(), 0.0)
        own = (-finite.amin()).clamp(min=0.0) if colors.numel() else colors.new_zeros(())
        return own if self.group is None else own.new_tensor(self.group.all_reduce_max(float(own)))

    def prepare(self, gaussians: Gaussians, background: Tensor | None, colors: Tensor | None = None) -> ViewRender:
        return ViewRender(
            gaussians,
            self.camera,
            background=background,
            viewmat=self.pose,
            antialiased=self.antialiased,
            z_range=self.z_range,
            colors=colors,
        )


class _CameraRender:
    """The render of one camera; the constructor projects.

    More than three channels are blended together. Up to three, and SH coefficients, are the colours of the training
    kernels. With a group each three channels are a render.
    """

    def __init__(
        self,
        raw: tuple[Tensor, Tensor, Tensor, Tensor],
        colors: Tensor,
        view: _View,
        background: Tensor | None,
        sh_degree: int | None,
    ) -> None:
        self.raw, self.colors, self.view, self.background, self.sh_degree = raw, colors, view, background, sh_degree
        self.lift = colors.new_zeros(())
        self.prepared: ViewRender | None = None
        if view.group is not None:
            return
        if sh_degree is None and colors.shape[1] > CHANNELS:
            # Gaussians whose colours are no numbers are culled, as the kernels cull those of three channels.
            numbers = (0.0 * colors.detach().sum(dim=1, keepdim=True)).expand(-1, CHANNELS)
            gaussians = Gaussians(*raw, numbers, colors.new_zeros(len(colors), 0, 3))
            self.prepared = view.prepare(gaussians, background, colors)
        else:
            gaussians, self.lift = self._three(0)
            self.prepared = view.prepare(gaussians, self._behind(0))

    def project(self) -> Projected:
        assert self.prepared is not None
        return self.prepared.project()

    def absgrad(self) -> Tensor:
        """Return [N, 2] the sums of the pixels' magnitudes after backward()."""
        return self.project().absgrad

    def draw(self, means2d: Tensor | None = None, shares: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return image [H, W, D], alpha [H, W] and depth [H, W]. means2d, shares: as in ViewRender.blend()."""
        if self.prepared is None:
            return self._draw_sharded()
        rendered = self.prepared.blend(means2d, shares)
        if self.prepared.colors is not None:
            return rendered.image, rendered.alpha, rendered.depth
        return self._lowered(rendered, self.lift, 0), rendered.alpha, rendered.depth

    def _draw_sharded(self) -> tuple[Tensor, Tensor, Tensor]:
        view, parts = self.view, []
        assert view.group is not None
        for begin in range(0, 1 if self.sh_degree is not None else max(1, self.colors.shape[1]), CHANNELS):
            gaussians, lift = self._three(begin)
            rendered = render_sharded(
                view.group,
                gaussians,
                view.camera,
                background=self._behind(begin),
                viewmat=view.pose,
                antialiased=view.antialiased,
                z_range=view.z_range,
            )
            parts.append(self._lowered(rendered, lift, begin))
        return torch.cat(parts, dim=-1), rendered.alpha, rendered.depth

    def _lowered(self, rendered: Render, lift: Tensor, begin: int) -> Tensor:
        """Return the image without the lift and without channels that _three() added."""
        if self.sh_degree is not None:
            return rendered.image
        return (rendered.image - lift * rendered.alpha[..., None])[..., : self.colors.shape[1] - begin]

    def _three(self, begin: int) -> tuple[Gaussians, Tensor]:
        """Return the Gaussians with three channels from ``begin`` on, and the lift that keeps these above 0."""
        if self.sh_degree is not None:
            # Their gradients are put together at once; those of two slices would be two tensors of zeros around them.
            count = SHN_COUNTS[self.sh_degree]
            sh0, shN, _ = torch.split(self.colors, [1, count, self.colors.shape[1] - 1 - count], dim=1)
            return Gaussians(*self.raw, sh0[:, 0], shN), self.colors.new_zeros(())
        part = self.colors[:, begin : begin + CHANNELS]
        # The kernels clamp colours at 0. The lift keeps them above, and _lowered() subtracts it from the image.
        lift = self.view.lift(part)
        padded = torch.nn.functional.pad(part + lift, (0, CHANNELS - part.shape[1]))
        none = self.colors.new_zeros(len(self.colors), 0, 3)
        return Gaussians(*self.raw, (padded - 0.5) / SH_C0, none), lift

    def _behind(self, begin: int) -> Tensor | None:
        if self.background is None or self.sh_degree is not None:
            return self.background
        part = self.background[begin : begin + CHANNELS]
        return torch.nn.functional.pad(part, (0, CHANNELS - part.shape[0]))


def raw_geometry(
    means: Tensor, quats: Tensor, scales: Tensor, opacities: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return means, quaternions, log-scales and logits of opacities, from activated values of N Gaussians."""
    return means, quats, scales.abs().clamp(min=_LEAST).log(), _logits(opacities)


def _logits(opacities: Tensor) -> Tensor:
    """Return the logits of ``opacities``, with the gradient of all that are above _LEAST.

    Those at 1 have one too: programs that clamp opacities to 0..1 could never lower them again without it.
    """
    most = 1.0 - _BELOW_ONE * torch.finfo(opacities.dtype).eps
    known = opacities.clamp(min=_LEAST)
    unchanged = (known - known.detach()).nan_to_num(0.0)  # 0, with a gradient; NaN of infinity
    return torch.logit(known.clamp(max=most).detach() + unchanged)


def _stacked(image: Tensor, alpha: Tensor, depth: Tensor, mode: RenderMode) -> Tensor:
    """Return [H, W, X] the channels of ``mode``."""
    if mode == "RGB":
        return image
    if mode.endswith("ED"):
        depth = depth / alpha.clamp(min=1e-10)
    return depth[..., None] if mode in ("D", "ED") else torch.cat([image, depth[..., None]], dim=-1)


class _Projections:
    """The projections in meta, dense or packed to a row for each Gaussian that a camera sees."""

    def __init__(
        self,
        seen: list[Projected],
        opacities: Tensor,
        batch: torch.Size,
        cameras: int,
        packed: bool,
        antialiased: bool,
    ) -> None:
        self.images, self.cameras, self.count = len(seen), cameras, opacities.shape[-1]
        self.shape = (*batch, cameras, self.count)
        like = opacities.detach()

        def stack(name: str, *tail: int, dtype: torch.dtype | None = None) -> Tensor:
            if seen:
                return torch.stack([getattr(one, name) for one in seen])
            return like.new_zeros(0, self.count, *tail, dtype=dtype)

        radii = stack("radii", 2, dtype=torch.int32)
        self.visible = (radii > 0).all(dim=-1)
        #: Image and Gaussian of each row, where meta is packed.
        self.rows = self.visible.nonzero().unbind(dim=1) if packed else None
        # Antialiased opacities are scaled by the projection.
        own = (
            stack("opacities")
            if antialiased
            else like.reshape(math.prod(batch), self.count).repeat_interleave(cameras, dim=0)
        )
        self.radii, self.opacities = self._lay(radii), self._lay(own)
        self.means2d, self.depths, self.conics = (
            self._lay(stack(name, *tail)) for name, *tail in (("means2d", 2), ("depths",), ("conics", 3))
        )

    def _lay(self, dense: Tensor) -> Tensor:
        """Return ``dense`` [images, N, ...] in the layout of meta."""
        return dense.view(*self.shape, *dense.shape[2:]) if self.rows is None else dense[self.rows]

    def _dense(self, laid: Tensor) -> Tensor:
        """Return [images, N, 2] from the layout of meta, differentiably."""
        if self.rows is None:
            return laid.reshape(self.images, self.count, 2)
        return laid.new_zeros(self.images, self.count, 2).index_put(self.rows, laid)

    def in_graph(
        self, model: CameraModel, Ks: Tensor, means: Tensor, quats: Tensor, scales: Tensor, viewmats: Tensor
    ) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
        """Return meta's means2d as a part of the graph, and the arguments of ViewRender.blend() for each image."""
        # torch leaves Function.apply without types.
        means2d, shares = _Means2d.apply(self, model, Ks, means, quats, scales, viewmats)  # type: ignore[no-untyped-call]
        means2d.retain_grad()
        return means2d, self._dense(means2d).unbind(0), shares.unbind(0)

    def fill_absgrad(self, means2d: Tensor, camera_renders: list[_CameraRender]) -> None:
        """Have backward() leave the pixels' magnitudes in ``means2d.absgrad``."""
        known = weakref.ref(means2d)  # means2d holds the hook

        def fill(_: Tensor) -> None:
            tensor = known()
            if tensor is not None and camera_renders:
                tensor.absgrad = self._lay(torch.stack([one.absgrad() for one in camera_renders]))  # type: ignore[attr-defined]

        means2d.register_hook(fill)  # type: ignore[no-untyped-call]

    def meta(self, facts: dict[str, Any], means2d: Tensor) -> dict[str, Any]:
        """Return gsplat's dictionary."""
        fields = _fields(
            self.rows,
            facts,
            radii=self.radii,
            means2d=means2d,
            depths=self.depths,
            conics=self.conics,
            opacities=self.opacities,
        )
        return _Meta(fields, lambda: self._intersections(facts))

    def _intersections(self, facts: dict[str, Any]) -> dict[str, Tensor]:
        """Return the tiles of each Gaussian's box, sorted by image, tile and depth, as gsplat encodes it."""
        rows = None if self.rows is None else self.rows[0]
        return _tile_lists(self.means2d.detach(), self.radii, self.depths, rows, self.shape[:-1], facts)


def _fields(rows: tuple[Tensor, ...] | None, facts: dict[str, Any], **columns: Tensor) -> dict[str, Any]:
    """Return the entries of meta but for the tile intersections. rows: image and Gaussian of each packed row."""
    image_ids, gaussian_ids = rows or (None, None)
    cameras = max(1, facts["n_cameras"])
    return {
        "batch_ids": None if image_ids is None else image_ids // cameras,
        "camera_ids": None if image_ids is None else image_ids % cameras,
        "gaussian_ids": gaussian_ids,
        **columns,
        **facts,
    }


def _tile_lists(
    means2d: Tensor,
    radii: Tensor,
    depths: Tensor,
    image_ids: Tensor | None,
    images: Sequence[int],
    facts: Mapping[str, Any],
) -> dict[str, Tensor]:
    """Return the tile intersections of meta. image_ids: [nnz] the image of each row, or None where there is no row."""
    size, across, down = facts["tile_size"], facts["tile_width"], facts["tile_height"]
    count = math.prod(images)
    tiles_per_gauss, ids, rows = isect_tiles(
        means2d, radii, depths, size, across, down, packed=image_ids is not None, n_images=count, image_ids=image_ids
    )
    return {
        "tiles_per_gauss": tiles_per_gauss,
        "isect_ids": ids,
        "flatten_ids": rows,
        "isect_offsets": isect_offset_encode(ids, count, across, down).view(*images, down, across),
    }


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """The arguments of rasterization(), checked and in the dtype of the computation, and the two ways to render them.

    shapes: quats and scales, or covars. facts: the sizes in meta.
    """

    means: Tensor
    shapes: Mapping[str, Tensor | None]
    opacities: Tensor
    colors: Tensor
    sh_degree: int | None
    viewmats: Tensor
    Ks: Tensor
    backgrounds: Tensor | None
    near_plane: float
    far_plane: float
    radius_clip: float
    eps2d: float
    camera_model: CameraModel
    mode: RenderMode
    antialiased: bool
    packed: bool
    absgrad: bool
    group: ProcessGroup | None
    facts: dict[str, Any]

    def render_by_camera(self) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return what rasterization() does, by the kernels of training, one camera after the other."""
        means, opacities, colors = self.means, self.opacities, self.colors
        batch, cameras, meta = means.shape[:-2], self.facts["n_cameras"], self.facts
        quats, scales = self.shapes["quats"], self.shapes["scales"]
        assert quats is not None
        assert scales is not None
        moved = (means, quats, scales, self.viewmats)
        if self.group is None and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in moved):
            # meta's projected means are between the parameters and the images, so all cameras are projected first.
            renders = list(self._camera_renders(quats, scales))
            seen = [one.project() for one in renders]
            projections = _Projections(seen, opacities, batch, cameras, self.packed, self.antialiased)
            means2d, rows, shares = projections.in_graph(self.camera_model, self.Ks, *moved)
            if self.absgrad:
                projections.fill_absgrad(means2d, renders)
            rendered = [one.draw(*row) for one, *row in zip(renders, rows, shares, strict=True)]
            meta = projections.meta(meta, means2d)
        else:
            seen, rendered = [], []
            for one in self._camera_renders(quats, scales):
                rendered.append(one.draw())
                if self.group is None:
                    seen.append(one.project())
            if self.group is None:
                projections = _Projections(seen, opacities, batch, cameras, self.packed, self.antialiased)
                meta = projections.meta(meta, projections.means2d)
        images = [_stacked(*one, self.mode) for one in rendered]
        shape = (*batch, cameras, self.facts["height"], self.facts["width"])
        if images:
            alphas = [alpha for _, alpha, _ in rendered]
            # One image of many channels is large: it is not copied.
            image, alpha = (some[0][None] if len(some) == 1 else torch.stack(some) for some in (images, alphas))
        else:
            # Empty, but part of the graph, so that backward() works.
            nothing = sum(t.flatten()[:0].sum() for t in (*moved, opacities, colors))
            channels = (colors.shape[-1] if "RGB" in self.mode else 0) + (self.mode != "RGB")
            image = means.new_zeros(0, channels) + nothing
            alpha = image[:, :1]
        return image.view(*shape, -1 if images else image.shape[-1]), alpha.view(*shape, 1), meta

    def _camera_renders(self, quats: Tensor, scales: Tensor) -> Iterator[_CameraRender]:
        means, colors, batch = self.means, self.colors, self.means.shape[:-2]
        per_camera = colors.dim() == len(batch) + (3 if self.sh_degree is None else 4)
        # All cameras at once: each copy from a GPU waits for it.
        poses, lenses = self.viewmats.detach().double().cpu(), self.Ks.detach().double().cpu()
        for at in itertools.product(*(range(size) for size in batch)):
            raw = raw_geometry(means[at], quats[at], scales[at], self.opacities[at])
            for c in range(self.facts["n_cameras"]):
                own = colors[at][c] if per_camera else colors[at]
                camera = _camera(
                    poses[at][c], lenses[at][c], self.facts["width"], self.facts["height"], self.camera_model
                )
                view = _View(
                    self.viewmats[at][c], camera, self.near_plane, self.far_plane, self.antialiased, self.group
                )
                behind = None if self.backgrounds is None else self.backgrounds[at][c]
                if self.radius_clip > 0.0:
                    with torch.no_grad():
                        radii = _CameraRender(raw, own, view, None, self.sh_degree).project().radii
                    reaching = torch.where((radii > self.radius_clip).any(dim=-1), raw[3], _UNSEEN)
                    yield _CameraRender((*raw[:3], reaching), own, view, behind, self.sh_degree)
                else:
                    yield _CameraRender(raw, own, view, behind, self.sh_degree)

    def render_in_stages(self) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return what rasterization() does, by projection, colours, lists and blending, each a node of the graph."""
        means, opacities, colors, backgrounds = self.means, self.opacities, self.colors, self.backgrounds
        facts, batch = self.facts, means.shape[:-2]
        images = (*batch, facts["n_cameras"])
        viewmats, Ks = self.viewmats.to(means), self.Ks.to(means)
        covars, quats, scales = (self.shapes.get(name) for name in ("covars", "quats", "scales"))
        radii, means2d, depths, conics, factors = fully_fused_projection(
            means,
            covars,
            quats,
            scales,
            viewmats,
            Ks,
            facts["width"],
            facts["height"],
            eps2d=self.eps2d,
            near_plane=self.near_plane,
            far_plane=self.far_plane,
            radius_clip=self.radius_clip,
            calc_compensations=self.antialiased,
            camera_model=self.camera_model,
            opacities=opacities,
        )
        own = opacities[..., None, :].expand(depths.shape)
        own = own if factors is None else own * factors
        visible = (radii > 0).all(dim=-1)
        if self.sh_degree is not None:
            sums = spherical_harmonics(self.sh_degree, means, viewmats, colors, visible)
            shown = clamped(sums + 0.5, low=0.0)
        elif colors.dim() == len(batch) + 2:
            shown = colors[..., None, :, :].expand(*images, *colors.shape[-2:])
        else:
            shown = colors
        if self.mode != "RGB":
            shown = torch.cat([shown, depths[..., None]], dim=-1)
            if backgrounds is not None:
                backgrounds = torch.nn.functional.pad(backgrounds, (0, 1))
        rows = None
        if self.packed:
            flat = len(images)
            rows = visible.flatten(0, flat - 1).nonzero().unbind(dim=1)
            radii, means2d, depths, conics, own, shown = (
                t.flatten(0, flat - 1)[rows] for t in (radii, means2d, depths, conics, own, shown)
            )
        image_ids = None if rows is None else rows[0]
        if means2d.requires_grad:
            means2d.retain_grad()
        # Blending has tiles of its own, whichever meta lists.
        tiles = facts
        if facts["tile_size"] != TILE_SIZE:
            tiles = facts | _tiles(facts["width"], facts["height"], TILE_SIZE)
        lists = _tile_lists(means2d.detach(), radii, depths.detach(), image_ids, images, tiles)
        image, alpha = rasterize_to_pixels(
            means2d,
            conics,
            shown,
            own,
            facts["width"],
            facts["height"],
            TILE_SIZE,
            lists["isect_offsets"],
            lists["flatten_ids"],
            backgrounds,
            packed=self.packed,
            absgrad=self.absgrad,
        )
        if self.mode.endswith("ED"):
            image = torch.cat([image[..., :-1], image[..., -1:] / alpha.clamp(min=1e-10)], dim=-1)

        def listed() -> dict[str, Tensor]:
            if tiles is facts:
                return lists
            return _tile_lists(means2d.detach(), radii, depths.detach(), image_ids, images, facts)

        fields = _fields(rows, facts, radii=radii, means2d=means2d, depths=depths, conics=conics, opacities=own)
        return image, alpha, _Meta(fields, listed)


def _tiles(width: int, height: int, size: int) -> dict[str, int]:
    """Return the tiles of an image, as meta has them."""
    return {"tile_size": size, "tile_width": -(-width // size), "tile_height": -(-height // size)}


class _Meta(dict[str, Any]):
    """A dictionary whose tile intersections are listed when they are first read.

    Few programs read them, and listing takes as long as a render.
    """

    LISTED = ("tiles_per_gauss", "isect_ids", "flatten_ids", "isect_offsets")

    def __init__(self, fields: dict[str, Any], listing: Callable[[], dict[str, Tensor]]) -> None:
        super().__init__(fields | dict.fromkeys(self.LISTED))
        self._listing: Callable[[], dict[str, Tensor]] | None = listing

    def _list(self) -> None:
        if self._listing is not None:
            listing, self._listing = self._listing, None
            super().update(listing())

    def __getitem__(self, key: str) -> Any:
        if key in self.LISTED:
            self._list()
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        if key in self.LISTED:
            self._list()
        return super().get(key, default)

    # A copy asks for the keys first: dict(meta), {**meta}, meta.copy().
    def __iter__(self) -> Iterator[str]:
        self._list()
        return super().__iter__()

    def keys(self) -> Any:
        self._list()
        return super().keys()

    def values(self) -> Any:
        self._list()
        return super().values()

    def items(self) -> Any:
        self._list()
        return super().items()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def pop(self, key: str, *default: Any) -> Any:
        self._list()
        return super().pop(key, *default)

    def __reduce__(self) -> Any:
        return dict, (self.copy(),)


class _Means2d(torch.autograd.Function):
    """meta's projected means between the parameters and the images.

    The images' own backward passes bring the images' part of their gradient to the parameters, and report it in
    ``shares``. The rest comes from the caller's own loss in them, and goes through the projection of a point.
    """

    @staticmethod
    def forward(
        ctx: Any,
        projections: _Projections,
        model: CameraModel,
        Ks: Tensor,
        means: Tensor,
        quats: Tensor,
        scales: Tensor,
        viewmats: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.projections, ctx.model = projections, model
        ctx.save_for_backward(Ks, means, viewmats)
        shares = projections.means2d.new_zeros(()).expand(projections.images, projections.count, 2)
        return projections.means2d.clone(), shares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v_means2d: Tensor | None, v_shares: Tensor | None) -> tuple[Tensor | None, ...]:
        if v_means2d is None:
            return None, None, None, None, None, None, None
        projections: _Projections = ctx.projections
        rest = projections._dense(v_means2d)
        rest = rest if v_shares is None else rest - v_shares
        if not bool(rest.any()):
            return None, None, None, None, None, None, None
        Ks, means, viewmats = ctx.saved_tensors
        visible = projections.visible.view(projections.shape)
        rest = rest.view(*projections.shape, 2)
        with torch.enable_grad(), torch.autocast(means.device.type, enabled=False):
            leaves = [means.detach().requires_grad_(), viewmats.detach().to(means.dtype).requires_grad_()]
            points, poses = leaves
            seen = points[..., None, :, :] @ poses[..., :3, :3].mT + poses[..., None, :3, 3]
            z = torch.where(visible, seen[..., 2], 1.0)
            fx, fy = Ks[..., 0, 0, None].to(means), Ks[..., 1, 1, None].to(means)
            if ctx.model == "pinhole":
                pixels = torch.stack([fx, fy], dim=-1) * seen[..., :2] / z[..., None]
            else:
                zero = torch.zeros_like(fx)
                pixels, _ = other_pixels(ctx.model, (seen[..., 0], seen[..., 1], z), (fx, fy, zero, zero))
            at = torch.where(visible[..., None], pixels, 0.0)
            v_means, v_viewmats = torch.autograd.grad(at, leaves, rest)
        return None, None, None, v_means, None, None, v_viewmats.to(viewmats.dtype)


def _check_kinds(arguments: Mapping[str, Any]) -> None:
    """Raise TypeError for the first argument that should be a number and is none, ValueError for one out of range."""
    for name in ("width", "height", "sh_degree"):
        value = arguments[name]
        if not hasattr(value, "__index__") and not (name == "sh_degree" and value is None):
            raise TypeError(f"{name} is {value!r}, not an integer")
    for name in ("width", "height"):
        if operator.index(arguments[name]) < 1:
            raise ValueError(f"{name} is {arguments[name]}; an image has at least one pixel")
    for name in ("near_plane", "far_plane", "radius_clip", "eps2d"):
        value = arguments[name]
        if not hasattr(value, "__float__"):
            raise TypeError(f"{name} is {value!r}, not a number")
    for name in ("radius_clip", "eps2d"):
        if not 0.0 <= float(arguments[name]) < math.inf:
            raise ValueError(f"{name} is {arguments[name]!r}, not a finite number of at least 0")


#: The shapes of what gives a Gaussian its extent, for N of them.
_TAILS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "quats": lambda n: (n, 4),
    "scales": lambda n: (n, 3),
    "covars": lambda n: (n, 3, 3),
}


def _check(
    means: Tensor,
    shapes: Mapping[str, Tensor | None],
    opacities: Tensor,
    colors: Tensor,
    viewmats: Tensor,
    Ks: Tensor,
    backgrounds: Tensor | None,
    sh_degree: int | None,
) -> None:
    """Raise ValueError for the first shape that does not fit, with the expected one."""
    for name, tensor, least in (("means", means, 2), ("colors", colors, 2), ("viewmats", viewmats, 3)):
        if tensor.dim() < least:
            wanted = {"means": "(..., N, 3)", "colors": "(..., N, D)", "viewmats": "(..., C, 4, 4)"}[name]
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {wanted}")
    batch, n, cameras = tuple(means.shape[:-2]), means.shape[-2], viewmats.shape[-3]
    if sh_degree is None:
        tails: tuple[tuple[int, ...], ...] = ((n, colors.shape[-1]), (cameras, n, colors.shape[-1]))
    else:
        if not 0 <= sh_degree < len(SHN_COUNTS):
            raise ValueError(f"sh_degree is {sh_degree}, not 0 to {len(SHN_COUNTS) - 1}")
        needed = 1 + SHN_COUNTS[sh_degree]
        # More coefficients than the degree has are fine; colours without the dimension of coefficients are not.
        terms = colors.shape[-2] if colors.dim() >= len(batch) + 3 else needed
        if terms < needed:
            raise ValueError(f"colors has {terms} coefficients, degree {sh_degree} needs {needed}")
        tails = ((n, terms, 3), (cameras, n, terms, 3))
    expected: dict[str, tuple[Tensor, tuple[tuple[int, ...], ...]]] = {
        "means": (means, ((n, 3),)),
        **{name: (given, (_TAILS[name](n),)) for name, given in shapes.items() if given is not None},
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
