"""render(): raw parameters in, images out, gradients back; an autograd function over the native stages."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from splatcli.gaussians import GROUPS, Gaussians
from splatcli.native import abi
from splatcli.native.backend import Backend
from splatcli.native.build import NoCompilerError
from splatcli.rasterizer.context import RasterContext, view_of
from splatcli.rasterizer.filter_3d import apply_filter_3d
from splatcli.rasterizer.memory_budget import MemoryBudget
from splatcli.rasterizer.opaque import graph_break, once_differentiable
from splatcli.rasterizer.reference import render_reference
from splatcli.scene.camera import Camera

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Render:
    """The images of a camera.

    image [H, W, 3]  colour over the background, as trained (display space), not clamped above; [H, W, D] of ``colors``
    alpha [H, W]     1 - transmittance
    depth [H, W]     sum of blending weight times camera z, in world units; divide by alpha for the mean depth
    """

    image: Tensor
    alpha: Tensor
    depth: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Projected:
    """The projected Gaussians of a view; 0 where one is not visible.

    means2d    [N, 2]  pixels
    depths     [N]     camera z, world units
    conics     [N, 3]  inverse 2D covariance: xx, xy, yy, per square pixel
    radii      [N, 2]  int32, half the sides of the box in which a Gaussian reaches 1/255, pixels
    opacities  [N]     as blended: antialiased ones are scaled
    absgrad    [N, 2]  backward() adds to it where blend() got ``means2d``: the sum of the magnitudes of the pixels'
                       shares of their gradient, docs/math.md 6.3
    """

    means2d: Tensor
    depths: Tensor
    conics: Tensor
    radii: Tensor
    opacities: Tensor
    absgrad: Tensor


@graph_break
def render(
    gaussians: Gaussians,
    camera: Camera,
    *,
    sh_degree: int | None = None,
    background: Tensor | None = None,
    viewmat: Tensor | None = None,
    antialiased: bool = False,
    filter_3d: Tensor | None = None,
    backend: Backend | None = None,
    budget: MemoryBudget | None = None,
    z_range: tuple[float, float] | None = None,
    bounds: Tensor | None = None,
) -> Render:
    """Render one view, differentiably in all parameters, the background and the pose.

    sh_degree: the SH degree to use; by default that of the Gaussians.
    background: [3], black by default.
    viewmat: [4, 4] world to camera; replaces the camera's pose and gets a gradient.
    antialiased: scale opacities by the area that the 0.3 px^2 blur added.
    filter_3d: [N] sizes of the 3D filter (rasterizer/filter_3d.py), without gradient; Gaussians of apply_filter_3d()
        need none.
    backend: where to run; by default the library of the parameters' device and dtype.
    budget: bytes for tile intersections; by default nine tenths of the free memory. A view that does not fit at once is
        rendered in bands of tile rows, with the same bits.
    z_range: camera z, world units, between which a mean has to lie for its Gaussian to be seen; by default from the
        camera's near plane on.
    bounds: chunk_bounds() of these Gaussians and ``filter_3d``: on a CPU chunks outside the view are skipped, with the
        same bits. The caller sees to it that they hold.

    Autocast has no effect: half-precision inputs are computed in float32 and get gradients in their own dtype; float64
    is computed in float64. Results are bit-identical for any number of threads. Without a compiler the plain torch
    reference renders, with a warning.
    Gradients of gradients are not available.
    Raises ValueError for shapes that do not fit and for a camera with numbers that are not finite or focal lengths that
    are not positive, TypeError for what is no Gaussians or no tensor, ResourceError when memory does not suffice.
    """
    return ViewRender(
        gaussians,
        camera,
        sh_degree=sh_degree,
        background=background,
        viewmat=viewmat,
        antialiased=antialiased,
        filter_3d=filter_3d,
        backend=backend,
        budget=budget,
        z_range=z_range,
        bounds=bounds,
    ).blend()


def blend_weights(
    gaussians: Gaussians, camera: Camera, *, antialiased: bool = False, filter_3d: Tensor | None = None
) -> Tensor:
    """Return [N], the sum of each Gaussian's blend weights over the pixels of a view; 0 where it does not show.

    The weight in a pixel is alpha times the transmittance before it (docs/math.md 6 and 12). Colours are not read.
    antialiased, filter_3d: as of render(). Raises as render() does.
    """
    fixed = {name: column.detach() for name, column in gaussians.items()}
    fixed["shN"] = fixed["means"].new_zeros(len(gaussians), 0, 3)  # the other ones may lie elsewhere (offload)
    colors = fixed["means"].new_zeros(len(gaussians), 1, requires_grad=True)
    with torch.enable_grad():  # for the reference renderer; kernels need no graph
        view = ViewRender(Gaussians(**fixed), camera, antialiased=antialiased, filter_3d=filter_3d, colors=colors)
    return view.blend_weights().clamp(min=0.0)


class ViewRender:
    """render() in two parts, for programs that use the projected Gaussians in between.

    The arguments are those of render().
    colors: [N, D], any D and sign, blended in place of the SH coefficients' colours, which then only have to be finite
        and get no gradient. The background is [D].
    """

    def __init__(
        self,
        gaussians: Gaussians,
        camera: Camera,
        *,
        sh_degree: int | None = None,
        background: Tensor | None = None,
        viewmat: Tensor | None = None,
        antialiased: bool = False,
        filter_3d: Tensor | None = None,
        backend: Backend | None = None,
        budget: MemoryBudget | None = None,
        z_range: tuple[float, float] | None = None,
        colors: Tensor | None = None,
        bounds: Tensor | None = None,
    ) -> None:
        """Project."""
        if not isinstance(gaussians, Gaussians):
            raise TypeError(f"gaussians is a {type(gaussians).__name__}, not Gaussians, such as those of a model")
        for name, tensor in (("background", background), ("viewmat", viewmat), ("filter_3d", filter_3d)):
            if tensor is not None and not isinstance(tensor, Tensor):
                raise TypeError(f"{name} is a {type(tensor).__name__}, not a torch.Tensor")
        if filter_3d is not None and filter_3d.shape != (len(gaussians),):
            raise ValueError(f"filter_3d has shape {tuple(filter_3d.shape)}, not ({len(gaussians)},)")
        if sh_degree is None:
            sh_degree = gaussians.sh_degree
        if not 0 <= sh_degree <= gaussians.sh_degree:
            raise ValueError(f"sh_degree is {sh_degree}, the Gaussians hold 0 to {gaussians.sh_degree}")
        dtype = torch.float64 if gaussians.means.dtype == torch.float64 else torch.float32

        def prepare(tensor: Tensor) -> Tensor:
            return tensor.to(dtype).contiguous()

        self.colors = None if colors is None else prepare(colors)
        channels = 3 if self.colors is None else self.colors.shape[1]
        self.background = prepare(gaussians.means.new_zeros(channels) if background is None else background)
        if self.background.shape != (channels,):
            raise ValueError(f"background has shape {tuple(self.background.shape)}, not ({channels},)")
        self.count = len(gaussians)
        self.projected: Projected | None = None
        #: Of the visible Gaussians, once they are projected; see RasterContext.visible_slots().
        self.visible: tuple[Tensor, Tensor] | None = None
        self._plain: Render | None = None
        try:
            backend = backend or backend_for(gaussians.device, dtype)
        except NoCompilerError as error:
            _log.warning("%s\nRendering in plain torch instead: right, but hundreds of times slower.", error)
            filtered = gaussians if filter_3d is None else apply_filter_3d(gaussians, filter_3d)
            with torch.autocast(gaussians.device.type, enabled=False):
                self._plain = Render(
                    *render_reference(
                        filtered.map(lambda t: t.to(dtype)),
                        camera,
                        sh_degree=sh_degree,
                        background=self.background,
                        viewmat=None if viewmat is None else viewmat.to(dtype),
                        antialiased=antialiased,
                        colors=self.colors,
                        z_range=z_range,
                    )
                )
            return
        pose = torch.from_numpy(camera.viewmat) if viewmat is None else viewmat
        if pose.shape != (4, 4):
            raise ValueError(f"viewmat has shape {tuple(pose.shape)}, not (4, 4)")
        self.has_pose = viewmat is not None
        self.viewmat = prepare(pose)
        self.parameters = [prepare(tensor) for _, tensor in gaussians.items()]
        inputs = [*self.parameters, self.background, self.viewmat, *([] if self.colors is None else [self.colors])]
        self.with_gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
        self._filter_3d = None if filter_3d is None else prepare(filter_3d.detach())
        self.context = RasterContext(backend, budget, slack=0.0)
        if self.colors is not None:
            self.context.set_channels(self.colors.detach())
        self.view = view_of(
            camera,
            sh_degree=sh_degree,
            antialiased=antialiased,
            with_depth=True,
            # float64 poses stay exact; a trained pose has its own dtype.
            viewmat=self.viewmat.detach() if self.has_pose else None,
            z_range=z_range,
        )
        if self._filter_3d is not None:
            self.view.filter_3d = backend.pointer(self._filter_3d, len(gaussians))
        self._bounds = None if bounds is None or backend.device.type != "cpu" else prepare(bounds)
        if self._bounds is not None:
            chunks = -(-len(gaussians) // abi.CHUNK)
            self.view.bounds = backend.pointer(self._bounds, chunks, abi.BOUNDS)
        self.arrays = self.context.project(self.view, Gaussians(*(tensor.detach() for tensor in self.parameters)))

    def project(self) -> Projected:
        """Return the projected Gaussians; all zeros in plain torch."""
        if self.projected is None:
            self.projected = self._empty()
            if self._plain is None:
                self.visible = self.context.visible_slots()
                _unpack(self.context, self.visible, self.projected)
        return self.projected

    def blend(self, means2d: Tensor | None = None, shares: Tensor | None = None) -> Render:
        """Return the images.

        means2d, shares: [N, 2] tensors of a graph, both of which get dL/d means2d as their gradient. The gradients of
            the parameters include the path through the projected means all the same.
        """
        if self._plain is not None:
            return self._plain
        if means2d is not None:
            self.project()
        # torch leaves Function.apply without types.
        image, alpha, depth = _Rasterize.apply(  # type: ignore[no-untyped-call]
            self, self.background, self.viewmat, means2d, shares, self.colors, *self.parameters
        )
        return Render(image, alpha, depth)

    def blend_weights(self) -> Tensor:
        """Return [N] the sum of each Gaussian's blend weights over the pixels, for ``colors`` of one channel."""
        assert self.colors is not None
        assert self.colors.shape[1] == 1
        if self._plain is not None:
            (weights,) = torch.autograd.grad(self._plain.image.sum(), self.colors)
            return weights[:, 0]
        context, view, weights = self.context, self.view, torch.zeros_like(self.colors)
        context.bin(view, self.arrays, with_grads=True)
        image = self.background.new_empty(view.height, view.width, 1)
        alpha, depth = torch.empty_like(image[..., 0]), torch.empty_like(image[..., 0])
        context.blend(view, self.background, image, alpha, depth)
        images, gradients = context.images(view, image, alpha, depth), torch.ones_like(image)
        context.blend_vjp(
            view, self.background, images, context.images(view, gradients, None, None), None, weights, False
        )
        return weights[:, 0]

    def _empty(self) -> Projected:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(self.count, *shape, device=self.background.device, dtype=self.background.dtype)

        radii = torch.zeros(self.count, 2, device=self.background.device, dtype=torch.int32)
        return Projected(zeros(2), zeros(), zeros(3), radii, zeros(), zeros(2))


def backend_for(device: torch.device, dtype: torch.dtype = torch.float32) -> Backend:
    """Return the native library for tensors on ``device``; a GPU computes in float32 only.

    Raises as Backend.cpu and Backend.cuda do, and TypeError for float64 on a GPU.
    """
    if device.type != "cuda":
        return Backend.cpu(dtype)
    if dtype != torch.float32:
        raise TypeError(f"the CUDA rasterizer computes in float32, not {dtype}; on the CPU float64 works")
    return Backend.cuda(device)


class _Rasterize(torch.autograd.Function):
    """The native stages as one node of the graph. No torch arithmetic happens inside, so autocast finds nothing."""

    @staticmethod
    def forward(
        ctx: Any,
        view_render: ViewRender,
        background: Tensor,
        viewmat: Tensor,
        means2d: Tensor | None,
        shares: Tensor | None,
        colors: Tensor | None,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        context, view = view_render.context, view_render.view
        context.bin(view, view_render.arrays, with_grads=view_render.with_gradients)
        size = (view.height, view.width)
        image = background.new_empty(*size, context.num_channels)
        alpha = background.new_empty(size)
        depth = background.new_empty(size)
        context.blend(view, background, image, alpha, depth)
        ctx.view_render, ctx.with_means2d = view_render, means2d is not None
        ctx.save_for_backward(background, viewmat, image, alpha, depth, colors, *parameters)
        return image, alpha, depth

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        background, viewmat, image, alpha, depth, colors, *parameters = ctx.saved_tensors
        context: RasterContext = ctx.view_render.context
        view: abi.View = ctx.view_render.view
        v_image, v_alpha, v_depth = (None if g is None else g.contiguous() for g in grads)
        if v_image is None:
            v_image = torch.zeros_like(image)
        needs_pose = ctx.view_render.has_pose and ctx.needs_input_grad[2]
        v_background = torch.empty_like(background) if ctx.needs_input_grad[1] else None
        v_colors = torch.zeros_like(colors) if ctx.needs_input_grad[5] else None
        v_viewmat = viewmat.new_empty(4, 4, device=context.backend.device) if needs_pose else None
        gaussians = Gaussians(*parameters)
        gradients = gaussians.map(torch.empty_like)
        # Colours alone, as of features of a model that stays as it is, need no geometry.
        with_geometry = colors is None or any((*ctx.needs_input_grad[2:5], *ctx.needs_input_grad[6:]))
        context.native.with_abs = ctx.with_means2d
        context.blend_vjp(
            view,
            background,
            context.images(view, image, alpha, depth),
            context.images(view, v_image, v_alpha, v_depth),
            v_background,
            v_colors,
            with_geometry,
        )
        if not with_geometry:
            return None, v_background, None, None, None, v_colors, *(None for _ in GROUPS)
        v_means2d = None
        if ctx.with_means2d:
            projected = ctx.view_render.project()
            v_means2d = _means2d_vjp(context, ctx.view_render.visible, projected)
            context.native.with_abs = False
        context.project_vjp(
            view,
            context.backend.arrays(gaussians),
            gradients=context.backend.arrays(gradients),
            with_pose=v_viewmat is not None,
        )
        if v_viewmat is not None:
            context.pose_vjp(view, context.pose_partials(len(gaussians)), v_viewmat)
            v_viewmat = v_viewmat.to(viewmat.device)
        by_group = [getattr(gradients, name) for name in GROUPS]
        v_shares = v_means2d if ctx.needs_input_grad[4] else None
        return None, v_background, v_viewmat, v_means2d, v_shares, v_colors, *by_group


def _unpack(context: RasterContext, visible: tuple[Tensor, Tensor], out: Projected) -> None:
    """Fill ``out`` from the projected Gaussians of a view."""
    ids, slots = visible
    projected = context.arena.take("projected", 0, context.backend.dtype).view(-1, abi.PROJECTED)[slots]
    out.means2d[ids] = projected[:, :2]
    conics = projected[:, 2:5] * math.log(2.0)
    conics[:, ::2] *= 2.0
    out.conics[ids] = conics
    out.opacities[ids] = torch.exp2(projected[:, 5])
    out.depths[ids] = projected[:, 9]
    out.radii[ids] = projected[:, 10:12].ceil().int()


def _means2d_vjp(context: RasterContext, visible: tuple[Tensor, Tensor], out: Projected) -> Tensor:
    """Return [N, 2] dL/d means2d from the sums of intersection gradients; docs/math.md 6.2 and 6.3."""
    ids, slots = visible
    sums = context.summed_isect_grads()[slots]
    a, b, c = out.conics[ids].unbind(dim=1)
    vx, vy = sums[:, 1], sums[:, 2]
    gradient = torch.zeros_like(out.means2d)
    gradient[ids] = torch.stack([a * vx + b * vy, b * vx + c * vy], dim=1)
    out.absgrad[ids] += sums[:, 10:12] * math.log(2.0)  # accumulates, as grad does
    return gradient


#: Gaussians that chunk_bounds() takes at once: some megabytes.
_AT_ONCE = 1 << 18


@torch.no_grad()
def chunk_bounds(gaussians: Gaussians, filter_3d: Tensor | None = None) -> Tensor:
    """Return [ceil(N / 256), 8]: least and largest mean x y z (world units), largest log-scale and 3D filter of each.

    They hold as long as means and log-scales stay as they are. filter_3d: [N], as of StepInputs; None: zeros.
    A Gaussian that is not finite makes the bounds of its chunk NaN, and the chunk is never skipped.
    """
    means, scales = gaussians.means, gaussians.log_scales
    bounds = means.new_zeros(-(-len(means) // abi.CHUNK), abi.BOUNDS)
    for first in range(0, len(means), _AT_ONCE):
        rows = slice(first, first + _AT_ONCE)
        parts = [_chunks(means[rows]), _chunks(scales[rows].amax(1, keepdim=True))]
        out = bounds[first // abi.CHUNK : first // abi.CHUNK + len(parts[0])]
        torch.amin(parts[0], 1, out=out[:, :3])
        out[:, 3:6] = parts[0].amax(1)
        out[:, 6:7] = parts[1].amax(1)
        if filter_3d is not None:
            out[:, 7:8] = _chunks(filter_3d[rows, None].abs()).amax(1)
    return bounds


def _chunks(rows: Tensor) -> Tensor:
    """Return [chunks, 256, C] of rows [N, C]; the last chunk is filled up with the last row."""
    missing = -len(rows) % abi.CHUNK
    if missing:
        rows = torch.cat([rows, rows[-1:].expand(missing, -1)])
    return rows.view(-1, abi.CHUNK, rows.shape[1])
