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
from splatcli.native.build import NoCompilerError
from splatcli.native.call import Backend
from splatcli.raster.allowance import PairBudget
from splatcli.raster.frame import Frame
from splatcli.raster.reference import render_reference
from splatcli.raster.smoothing import smoothed
from splatcli.raster.view import Z_FAR, Z_NEAR, view_of
from splatcli.scene.camera import Camera

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Render:
    """What a camera sees.

    image [H, W, 3]  colour over the background, as trained (display space), not clamped above
    alpha [H, W]     1 - transmittance
    depth [H, W]     sum of blending weight times camera z, in world units; divide by alpha for the mean depth
    """

    image: Tensor
    alpha: Tensor
    depth: Tensor


@dataclass(slots=True, eq=False)
class Projected:
    """Where the Gaussians of a render lie in the image, and what pulls at them there; for those who ask.

    means2d  [N, 2]  pixels, 0 where a Gaussian is not seen. A leaf: backward() leaves dL/d means2d in its ``grad``
    absgrad  [N, 2]  added to by backward(): the pixels' shares of that gradient by their magnitudes, docs/math.md 6.3
    depths   [N]     camera z, world units
    conics   [N, 3]  inverse 2D covariance: xx, xy, yy, per square pixel
    radii    [N, 2]  int32, half the sides of the box in which a Gaussian reaches 1/255, pixels; 0 where not seen
    """

    means2d: Tensor
    absgrad: Tensor
    depths: Tensor
    conics: Tensor
    radii: Tensor

    @classmethod
    def empty(cls, n: int, device: torch.device, dtype: torch.dtype, *, with_gradient: bool) -> Projected:
        """Nothing seen yet, of ``n`` Gaussians."""
        zeros = torch.zeros(n, 2, device=device, dtype=dtype)
        conics = torch.zeros(n, 3, device=device, dtype=dtype)
        radii = torch.zeros(n, 2, device=device, dtype=torch.int32)
        return cls(zeros.clone().requires_grad_(with_gradient), zeros, conics[:, 0].clone(), conics, radii)


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """What a render is made with, beside the tensors that have gradients."""

    backend: Backend
    camera: Camera
    sh_degree: int
    antialiased: bool
    smoothing: Tensor | None
    has_viewmat: bool
    budget: PairBudget | None
    with_gradients: bool
    z_range: tuple[float, float]
    projected: Projected | None


def render(
    gaussians: Gaussians,
    camera: Camera,
    *,
    sh_degree: int | None = None,
    background: Tensor | None = None,
    viewmat: Tensor | None = None,
    antialiased: bool = False,
    smoothing: Tensor | None = None,
    backend: Backend | None = None,
    budget: PairBudget | None = None,
    z_range: tuple[float, float] = (Z_NEAR, Z_FAR),
    projected: Projected | None = None,
) -> Render:
    """Renders one view, differentiably in all parameters, the background and the pose.

    sh_degree: how many SH degrees to use; by default all that are there.
    background: [3], black by default.
    viewmat: [4, 4] world to camera; replaces the camera's pose and gets a gradient.
    antialiased: scale opacities by the area that the 0.3 px^2 blur added.
    smoothing: [N] sizes of a 3D filter (raster/smoothing.py), which get no gradient; smoothed() Gaussians need none.
    backend: where to run; by default the library of the parameters' device and dtype.
    budget: bytes for tile pairs; by default nine tenths of what is free. What does not fit at once is rendered in bands
        of lines of tiles, with the same bits.
    z_range: camera z, world units, between which a mean has to lie for its Gaussian to be seen.
    projected: filled with the image plane's side of it; native libraries only.

    Autocast does not reach in here: half-precision inputs are computed in float32 and get gradients in their own
    dtype; float64 is computed in float64. Results are the same bits for any number of threads.
    Without a compiler the plain torch reference renders, with a warning.
    Raises ValueError for shapes that do not fit, ResourceError when memory would not suffice.
    """
    if sh_degree is None:
        sh_degree = gaussians.sh_degree
    if not 0 <= sh_degree <= gaussians.sh_degree:
        raise ValueError(f"sh_degree is {sh_degree}, the Gaussians hold 0 to {gaussians.sh_degree}")
    dtype = torch.float64 if gaussians.means.dtype == torch.float64 else torch.float32
    try:
        backend = backend or backend_for(gaussians.device, dtype)
    except NoCompilerError as error:
        _log.warning("%s\nRendering in plain torch instead: right, but hundreds of times slower.", error)
        shown = gaussians if smoothing is None else smoothed(gaussians, smoothing)
        with torch.autocast(gaussians.device.type, enabled=False):
            return Render(
                *render_reference(
                    shown.map(lambda t: t.to(dtype)),
                    camera,
                    sh_degree=sh_degree,
                    background=None if background is None else background.to(dtype),
                    viewmat=None if viewmat is None else viewmat.to(dtype),
                    antialiased=antialiased,
                )
            )

    def prepare(tensor: Tensor) -> Tensor:
        return tensor.to(dtype).contiguous()

    if background is None:
        background = gaussians.means.new_zeros(3)
    pose = torch.from_numpy(camera.viewmat) if viewmat is None else viewmat
    if pose.shape != (4, 4):
        raise ValueError(f"viewmat has shape {tuple(pose.shape)}, not (4, 4)")
    parameters = [prepare(tensor) for _, tensor in gaussians.items()]
    means2d = None if projected is None else projected.means2d
    inputs = [*parameters, background, pose, *([] if means2d is None else [means2d])]
    with_gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    sizes = None if smoothing is None else prepare(smoothing.detach())
    has_pose = viewmat is not None
    job = _Job(backend, camera, sh_degree, antialiased, sizes, has_pose, budget, with_gradients, z_range, projected)
    # torch leaves Function.apply without types.
    image, alpha, depth = _Rasterize.apply(  # type: ignore[no-untyped-call]
        job, prepare(background), prepare(pose), means2d, *parameters
    )
    return Render(image, alpha, depth)


def backend_for(device: torch.device, dtype: torch.dtype = torch.float32) -> Backend:
    """The native library that serves tensors on ``device``; a GPU computes in float32 only.

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
        ctx: Any, job: _Job, background: Tensor, viewmat: Tensor, means2d: Tensor | None, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        gaussians = Gaussians(*parameters)
        frame = Frame(job.backend, job.budget, slack=0.0)
        view = view_of(
            job.camera,
            sh_degree=job.sh_degree,
            antialiased=job.antialiased,
            with_depth=True,
            # float64 poses come through exactly; a pose that is trained has its own dtype.
            viewmat=viewmat if job.has_viewmat else None,
            z_range=job.z_range,
        )
        if job.smoothing is not None:
            view.smoothing = job.backend.pointer(job.smoothing, len(gaussians))
        arrays = frame.project(view, gaussians)
        frame.bin(view, arrays, with_rows=job.with_gradients)
        size = (view.height, view.width)
        image = background.new_empty(*size, 3)
        alpha = background.new_empty(size)
        depth = background.new_empty(size)
        frame.blend(view, background, image, alpha, depth)
        if job.projected is not None:
            _tell_projected(frame, view, job.projected)
            frame.native.with_abs = True
        ctx.job, ctx.frame, ctx.view = job, frame, view
        ctx.save_for_backward(background, viewmat, image, alpha, depth, *parameters)
        return image, alpha, depth

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        background, viewmat, image, alpha, depth, *parameters = ctx.saved_tensors
        frame: Frame = ctx.frame
        view: abi.View = ctx.view
        v_image, v_alpha, v_depth = (None if g is None else g.contiguous() for g in grads)
        if v_image is None:
            v_image = torch.zeros_like(image)
        needs_pose = ctx.job.has_viewmat and ctx.needs_input_grad[2]
        v_background = torch.empty_like(background) if ctx.needs_input_grad[1] else None
        v_viewmat = viewmat.new_empty(4, 4, device=frame.backend.device) if needs_pose else None
        gaussians = Gaussians(*parameters)
        gradients = gaussians.map(torch.empty_like)
        frame.blend_vjp(
            view,
            background,
            frame.images(view, image, alpha, depth),
            frame.images(view, v_image, v_alpha, v_depth),
            v_background,
        )
        v_means2d = None
        if ctx.job.projected is not None:
            v_means2d = _means2d_vjp(frame, ctx.job.projected)
            frame.native.with_abs = False
        frame.project_vjp(
            view,
            frame.backend.arrays(gaussians),
            gradients=frame.backend.arrays(gradients),
            v_viewmat=v_viewmat,
        )
        if v_viewmat is not None:
            v_viewmat = v_viewmat.to(viewmat.device)
        by_group = [getattr(gradients, name) for name in GROUPS]
        return None, v_background, v_viewmat, v_means2d, *by_group


def _tell_projected(frame: Frame, view: abi.View, out: Projected) -> None:
    """Unpacks the records of a view."""
    ids, rows = frame.seen()
    records = frame.arena.take("records", 0, frame.backend.dtype).view(-1, abi.RECORD)[rows]
    with torch.no_grad():
        out.means2d[ids] = records[:, :2]
        out.conics[ids] = records[:, 2:5] * records.new_tensor([2.0, 1.0, 2.0]) * math.log(2.0)
        out.depths[ids] = records[:, 9]
        out.radii[ids] = records[:, 10:12].ceil().int()


def _means2d_vjp(frame: Frame, out: Projected) -> Tensor:
    """[N, 2] dL/d means2d from the sums of the gradient rows; docs/math.md 6.2 and 6.3."""
    ids, rows = frame.seen()
    sums = frame.summed_rows()[rows]
    a, b, c = out.conics[ids].unbind(dim=1)
    vx, vy = sums[:, 1], sums[:, 2]
    gradient = torch.zeros_like(out.means2d)
    gradient[ids] = torch.stack([a * vx + b * vy, b * vx + c * vy], dim=1)
    out.absgrad[ids] += sums[:, 10:12] * math.log(2.0)  # as grad, which adds up too
    return gradient
