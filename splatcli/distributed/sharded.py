"""Sharded rendering: each rank holds some of the Gaussians and has a camera of its own, and sees all of them.

Every rank projects its Gaussians for the cameras of all. The records of what each camera sees go to the rank that has
it, in one exchange; the sums of their gradients come back in another. Gaussians themselves never travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from splatcli.errors import UsageError
from splatcli.gaussians import GROUPS, Gaussians
from splatcli.native import abi
from splatcli.native.backend import Backend
from splatcli.rasterizer.context import Z_FAR, Z_NEAR, RasterContext, view_of
from splatcli.rasterizer.rendering import Render, backend_for
from splatcli.rasterizer.shards import fill_frame, returned_sums, take_sums, visible_records
from splatcli.scene.camera import Camera

if TYPE_CHECKING:
    from splatcli.distributed.world import World


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """What ranks render together, beside the tensors that have gradients."""

    world: World
    backend: Backend
    cameras: Sequence[Camera]
    sh_degree: int
    antialiased: bool
    z_range: tuple[float, float]

    def view(self, rank: int) -> abi.View:
        return view_of(
            self.cameras[rank],
            sh_degree=self.sh_degree,
            antialiased=self.antialiased,
            with_depth=True,
            z_range=self.z_range,
        )


def render_sharded(
    world: World,
    gaussians: Gaussians,
    camera: Camera,
    *,
    background: Tensor | None = None,
    antialiased: bool = False,
    z_range: tuple[float, float] = (Z_NEAR, Z_FAR),
) -> Render:
    """What ``camera`` of this rank sees of the Gaussians of all ranks, in their order; the bits of one process.

    Every rank has to call it, as often as the others, and so for the backward pass: an exchange waits in both.
    gaussians: this rank's own; none is fine. They get the gradients of the losses of all ranks, added by rank.
    background: [3], of this rank's image.
    Raises DistributedError on every rank, naming those that differ, when SH degrees, antialiasing or z_range are not
    the same, or when some ranks do not come; ResourceError on a GPU.
    """
    dtype = torch.float64 if gaussians.means.dtype == torch.float64 else torch.float32
    if dtype != torch.float32:
        raise UsageError("sharded rendering computes in float32", remedy="give parameters in float32")
    world.agree(
        "a rendering",
        **{"SH degree": gaussians.sh_degree, "antialiased": int(antialiased)},
        near=int(np.float32(z_range[0]).view(np.int32)),
        far=int(np.float32(z_range[1]).view(np.int32)),
    )
    cameras = [_unpacked(row) for row in world.gather(_packed(camera))]
    job = _Job(world, backend_for(gaussians.device), cameras, gaussians.sh_degree, antialiased, z_range)
    parameters = [tensor.to(dtype).contiguous() for _, tensor in gaussians.items()]
    behind = gaussians.means.new_zeros(3) if background is None else background
    image, alpha, depth = _Sharded.apply(job, behind.to(dtype).contiguous(), *parameters)  # type: ignore[no-untyped-call]
    return Render(image, alpha, depth)


class _Sharded(torch.autograd.Function):
    """Two exchanges as one node of the graph."""

    @staticmethod
    def forward(ctx: Any, job: _Job, background: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        world, gaussians = job.world, Gaussians(*parameters)
        frames: list[tuple[RasterContext, abi.View, abi.GaussianArrays, Tensor]] = []
        sent = []
        for rank in range(world.size):
            frame, view = RasterContext(job.backend, slack=0.0), job.view(rank)
            arrays = frame.project(view, gaussians)
            records, slots = visible_records(frame, arrays)
            frames.append((frame, view, arrays, slots))
            sent.append(records)
        received, counts = world.exchange_rows(torch.cat(sent), [len(records) for records in sent])
        view = job.view(world.rank)
        frame = RasterContext(job.backend, slack=0.0)
        arrays = fill_frame(frame, received)
        frame.bin(view, arrays)
        size = (view.height, view.width)
        image, alpha, depth = background.new_empty(*size, 3), background.new_empty(size), background.new_empty(size)
        frame.blend(view, background, image, alpha, depth)
        ctx.job, ctx.frames, ctx.own = job, frames, (frame, view)
        ctx.counts = counts
        ctx.save_for_backward(background, image, alpha, depth, *parameters)
        return image, alpha, depth

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        background, image, alpha, depth, *parameters = ctx.saved_tensors
        frame, view = ctx.own
        v_image, v_alpha, v_depth = (None if g is None else g.contiguous() for g in grads)
        if v_image is None:
            v_image = torch.zeros_like(image)
        v_background = torch.empty_like(background) if ctx.needs_input_grad[1] else None
        out, v_out = frame.images(view, image, alpha, depth), frame.images(view, v_image, v_alpha, v_depth)
        frame.blend_vjp(view, background, out, v_out, v_background)
        sums = returned_sums(frame, sum(ctx.counts))
        returned, counts = ctx.job.world.exchange_rows(sums, ctx.counts)
        total = Gaussians(*parameters).map(torch.zeros_like)
        part = total.map(torch.empty_like)
        for (own, own_view, arrays, slots), rows in zip(ctx.frames, torch.split(returned, counts), strict=True):
            take_sums(own, slots, rows)
            own.project_vjp(own_view, arrays, gradients=own.backend.arrays(part))
            for name in GROUPS:
                getattr(total, name).add_(getattr(part, name))
        return None, v_background, *(getattr(total, name) for name in GROUPS)


def _packed(camera: Camera) -> Tensor:
    """[22] float64."""
    lens = [camera.width, camera.height, camera.fx, camera.fy, camera.cx, camera.cy]
    return torch.tensor([*lens, *camera.viewmat.reshape(-1).tolist()], dtype=torch.float64)


def _unpacked(row: Tensor) -> Camera:
    width, height, fx, fy, cx, cy, *matrix = row.tolist()
    return Camera("", int(width), int(height), fx, fy, cx, cy, np.array(matrix).reshape(4, 4))
