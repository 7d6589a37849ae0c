"""Sharded rasterization: each process holds a shard of the Gaussians, and every view shows all of them.

All processes project their own Gaussians for the views of all. The projected Gaussians that a view sees go to the
process that has the view, which blends them; the sums of their gradients come back. Gaussians do not move. In an image
equal depths are in the order of the processes, and every sum is made in the place and order of a single process: so the
bits are those of one process that holds all Gaussians. ShardedEngine trains so, render_sharded() renders with autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from splatcli.errors import UsageError
from splatcli.gaussians import GROUPS, Gaussians
from splatcli.native import abi
from splatcli.native.backend import Backend
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.batch import BatchEngine, FlatSums
from splatcli.rasterizer.context import RasterContext, view_of
from splatcli.rasterizer.memory_budget import MemoryBudget
from splatcli.rasterizer.opaque import graph_break, once_differentiable
from splatcli.rasterizer.rendering import Render, backend_for
from splatcli.rasterizer.step_inputs import StepInputs
from splatcli.scene.camera import MODELS, Camera

if TYPE_CHECKING:
    from splatcli.distributed.process_group import ProcessGroup

#: Numbers of a projected Gaussian that is sent: its fields, and the tiles of its box as bits.
SENT = abi.PROJECTED + 1

#: Numbers that come back for it: the sum of its per-intersection gradients, and whether there was any.
RETURNED = abi.ISECT_GRAD + 1


@dataclass(frozen=True, slots=True, eq=False)
class ProjectedView:
    """The data of a projected view until its gradients come back, while its context projects other views.

    slots, ids: [V] of its projected Gaussians. chunk_counts: as in the context.
    """

    view: abi.View
    arrays: abi.GaussianArrays
    slots: Tensor
    ids: Tensor
    chunk_counts: Tensor

    @classmethod
    def of(cls, context: RasterContext, view: abi.View, arrays: abi.GaussianArrays, slots: Tensor) -> ProjectedView:
        """Return the view that ``context`` has just projected. slots: of visible_projected()."""
        counts = context.arena.take("chunk_counts", 0, torch.int64)[: 2 * -(-arrays.n // abi.CHUNK)]
        return cls(view, arrays, slots, context.arena.take("ids", 0, torch.int32)[slots], counts.clone())

    def restore(self, context: RasterContext, returned: Tensor) -> None:
        """Restore this view in ``context``, with the gradients that came back for it [V, RETURNED]."""
        context.arena.take("chunk_counts", 0, torch.int64)[: len(self.chunk_counts)] = self.chunk_counts
        context.arena.take("ids", 0, torch.int32)[self.slots] = self.ids
        context.set_arrays(self.arrays)
        take_sums(context, self.slots, returned)


def visible_projected(context: RasterContext, arrays: abi.GaussianArrays) -> tuple[Tensor, Tensor]:
    """Return ([V, SENT] of the Gaussians that a projected view sees, in order; [V] their slots)."""
    context.set_arrays(arrays)
    _, slots = context.visible_slots()
    projected = context.arena.take("projected", 0, context.backend.dtype)
    projected = projected[: projected.numel() // abi.PROJECTED * abi.PROJECTED].view(-1, abi.PROJECTED)[slots]
    tiles = context.arena.take("tiles_per_gauss", 0, torch.int32)[slots]
    return torch.cat([projected, tiles.view(torch.float32)[:, None]], dim=1), slots


def fill_context(context: RasterContext, sent: Tensor) -> abi.GaussianArrays:
    """Fill ``context`` as project() does, from projected Gaussians [V, SENT] of several processes, in order."""
    return context.set_projected(sent[:, : abi.PROJECTED], sent[:, abi.PROJECTED].contiguous().view(torch.int32))


def returned_sums(context: RasterContext, count: int) -> Tensor:
    """Return [count, RETURNED], the sums that blend_vjp has left for each Gaussian of fill_context()."""
    sums = context.summed_isect_grads()[:count]
    reached = context.arena.take("reached", 0, torch.int32)[:count]
    return torch.cat([sums, reached.view(torch.float32)[:, None]], dim=1)


def take_sums(context: RasterContext, slots: Tensor, returned: Tensor) -> None:
    """Put the gradients that came back [V, RETURNED] for ``slots`` where project_vjp reads them."""
    context.take_sums(slots, returned[:, : abi.ISECT_GRAD], returned[:, abi.ISECT_GRAD].contiguous().view(torch.int32))


# --- training ---------------------------------------------------------------------------------------------------------


class ShardedEngine(BatchEngine):
    """Training steps on several views by processes that hold a shard of the Gaussians each.

    gaussians, adam: of step(), this process' rows; whole chunks of abi.CHUNK where poses are trained.
    """

    group: ProcessGroup

    def __init__(self, backend: Backend, group: ProcessGroup, *, budget: MemoryBudget | None = None) -> None:
        super().__init__(backend, budget=budget, group=group)
        self._budget = budget
        #: Projects this process' Gaussians for one view after another.
        self._projection = RasterContext(backend, budget)

    def _round(
        self,
        gaussians: Gaussians,
        adam: AdamState,
        cameras: Sequence[Camera],
        inputs: StepInputs | None,
        shared: StepInputs | None,
        problem: Exception | None,
    ) -> list[list[float]]:
        own, total = self._buffers(gaussians)
        views = [] if shared is None else [self._pipeline.view(gaussians, camera, shared) for camera in cameras]
        seen, projected, counts = self._project(gaussians, views, problem)
        numbers, sums, counts = self._blend(inputs, projected, counts)
        assert shared is not None
        partials = []
        for view, returned in zip(seen, torch.split(sums, counts), strict=False):
            self._gradients(view, returned, shared, own)
            total.flat += own.flat
            if _with_pose(shared):
                partials.append(self._projection.pose_partials(len(gaussians)).clone())
        if _with_pose(shared):
            self._pose_gradient(seen, partials)
        return numbers

    def _gather_sums(self, total: FlatSums) -> None:
        pass  # each process has those of its rows

    def _tensors(self) -> list[Tensor]:
        return self._projection.tensors()

    @torch.no_grad()
    def render(
        self, gaussians: Gaussians, cameras: Sequence[Camera], *, background: Tensor, antialiased: bool
    ) -> tuple[Tensor | None, Exception | None]:
        """Return (image [H, W, 3] of this process' camera, the error of its rendering, which other ranks do not know).

        cameras: one for each of the first processes; the others get no image.
        """
        rank, backend = self.group.rank, self._pipeline.backend
        degree = gaussians.sh_degree
        views = [view_of(camera, sh_degree=degree, antialiased=antialiased, with_depth=False) for camera in cameras]
        _, projected, _ = self._project(gaussians, views, None)
        if rank >= len(views):
            return None, None
        view, context = views[rank], RasterContext(backend, self._budget, slack=0.0)
        image = background.new_empty(view.height, view.width, 3)
        try:
            arrays = fill_context(context, projected)
            context.bin(view, arrays, with_grads=False)
            context.blend(view, background, image, background.new_empty(view.height, view.width), None)
        except Exception as error:
            return None, error
        return image, None

    def _project(
        self, gaussians: Gaussians, views: Sequence[abi.View], problem: Exception | None
    ) -> tuple[list[ProjectedView], Tensor, list[int]]:
        """Project for all views of a round, and exchange the visible Gaussians.

        problem: an earlier error of this process, which is raised in all.
        Returns (the projected views, the projected Gaussians that this process' view sees, how many from each process).
        """
        context, size = self._projection, self.group.size
        seen: list[ProjectedView] = []
        sent = [gaussians.means.new_zeros(0, SENT)]
        try:
            for view in views:
                arrays = context.project(view, gaussians)
                projected, slots = visible_projected(context, arrays)
                seen.append(ProjectedView.of(context, view, arrays, slots))
                sent.append(projected)
            together = torch.cat(sent)
        except Exception as error:
            problem, together = problem or error, sent[0]
        counts = [len(view.slots) for view in seen] + [0] * (size - len(seen))
        del sent
        return seen, *self.group.all_to_all_rows(together, counts, problem)

    def _blend(
        self, inputs: StepInputs | None, projected: Tensor, counts: list[int]
    ) -> tuple[list[list[float]], Tensor, list[int]]:
        """Blend this process' view, if it has one, and exchange the gradients.

        Returns ([loss, isects] of all, the sums that come back for this process' Gaussians, how many for each view).
        """
        numbers, sums, problem = [0.0, 0.0], projected.new_zeros(0, RETURNED), None
        try:
            if inputs is not None:
                numbers, sums = self._rasterize_with_loss(inputs, projected)
        except Exception as error:
            problem = error
        results = self.group.all_gather_scalars("a view", numbers, problem)
        return results, *self.group.all_to_all_rows(sums, counts)

    def _rasterize_with_loss(self, inputs: StepInputs, projected: Tensor) -> tuple[list[float], Tensor]:
        """Return ([loss, isects] of a view; [V, RETURNED] the gradients of ``projected`` [V, SENT])."""
        pipeline, with_depth = self._pipeline, inputs.depth is not None
        view = view_of(inputs.camera, sh_degree=inputs.sh_degree, antialiased=inputs.antialiased, with_depth=with_depth)
        arrays = fill_context(pipeline.context, projected)
        job = pipeline.rasterize_with_loss(view, arrays, inputs)
        numbers = [pipeline.step_loss(job, inputs), float(pipeline.context.native.max_isects)]
        return numbers, returned_sums(pipeline.context, len(projected))

    def _gradients(self, view: ProjectedView, returned: Tensor, shared: StepInputs, own: FlatSums) -> None:
        """Fill ``own`` with the gradients and statistics of this process' Gaussians in a view."""
        context = self._projection
        own.stats.zero_()
        stats = None if shared.stats is None else own.stats
        view.restore(context, returned)
        context.native.with_abs = shared.absgrad and stats is not None
        context.project_vjp(
            view.view,
            view.arrays,
            gradients=context.backend.arrays(own.gradients),
            with_pose=_with_pose(shared),
            grad2d=None if stats is None else stats.grad2d,
            count=None if stats is None else stats.count,
        )

    def _pose_gradient(self, seen: Sequence[ProjectedView], partials: Sequence[Tensor]) -> None:
        """Sum the gradient of the pose of this process' view, if it has one.

        seen: the views of the round. partials: pose_partials() of this process' Gaussians in each.
        """
        counts = [len(chunks) for chunks in partials] + [0] * (self.group.size - len(partials))
        everything, _ = self.group.all_to_all_rows(torch.cat(list(partials)), counts)
        if self.group.rank < len(seen):
            self._pipeline.pose_vjp(seen[self.group.rank].view, everything)


def _with_pose(inputs: StepInputs) -> bool:
    """Return whether a step trains poses."""
    return inputs.view_params is not None and inputs.view_params.pose


# --- rendering --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Rendering:
    """The arguments of a joint render, beside the tensors that have gradients.

    with_pose: of each camera, whether its pose gets a gradient.
    """

    group: ProcessGroup
    backend: Backend
    cameras: Sequence[Camera]
    with_pose: Sequence[bool]
    sh_degree: int
    antialiased: bool
    z_range: tuple[float, float] | None

    def view(self, rank: int) -> abi.View:
        return view_of(
            self.cameras[rank],
            sh_degree=self.sh_degree,
            antialiased=self.antialiased,
            with_depth=True,
            z_range=self.z_range,
        )


@graph_break
def render_sharded(
    group: ProcessGroup,
    gaussians: Gaussians,
    camera: Camera,
    *,
    background: Tensor | None = None,
    viewmat: Tensor | None = None,
    antialiased: bool = False,
    z_range: tuple[float, float] | None = None,
) -> Render:
    """Render ``camera`` of this rank with the Gaussians of all ranks, bit-identical to one process that holds them.

    Both passes are collective: every rank calls this and backward() as often as the others.
    gaussians: this rank's own; there may be none. They get the gradients of the losses of all ranks, added by rank.
    background: [3], of this rank's image.
    viewmat: [4, 4] world to camera; replaces the camera's pose and gets a gradient: a sum over chunks of 256 Gaussians
        of each rank, bit-identical to that of one process where ranks hold whole chunks, and else rounded differently.
    Raises DistributedError on every rank, naming those that differ, when SH degrees, antialiasing or z_range are not
    the same, or when some ranks do not come; UsageError for parameters in float64; ResourceError where there are no
    kernels for the device, or no compiler.
    """
    if gaussians.means.dtype == torch.float64:
        raise UsageError(
            "sharded rendering computes in float32", where="render_sharded()", remedy="give parameters in float32"
        )
    near, far = (int(np.float32(z).view(np.int32)) for z in z_range or (0.0, 0.0))
    group.check_agreement(
        "a rendering",
        **{"SH degree": gaussians.sh_degree, "antialiased": int(antialiased)},
        near=near,
        far=far,
    )
    pose = torch.eye(4) if viewmat is None else viewmat.float()
    if viewmat is not None:
        camera = replace(camera, viewmat=pose.detach().double().cpu().numpy())
    own = _packed(camera, pose.requires_grad and torch.is_grad_enabled())
    cameras, with_pose = zip(*map(_unpacked, group.all_gather(own)), strict=True)
    backend, degree = backend_for(gaussians.device), gaussians.sh_degree
    job = _Rendering(group, backend, cameras, with_pose, degree, antialiased, z_range)
    parameters = [tensor.float().contiguous() for _, tensor in gaussians.items()]
    behind = gaussians.means.new_zeros(3) if background is None else background
    tensors = (behind.float().contiguous(), pose, *parameters)
    image, alpha, depth = _RenderSharded.apply(job, *tensors)  # type: ignore[no-untyped-call]
    return Render(image, alpha, depth)


class _RenderSharded(torch.autograd.Function):
    """Two exchanges as one node of the graph."""

    @staticmethod
    def forward(
        ctx: Any, job: _Rendering, background: Tensor, viewmat: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        group, gaussians = job.group, Gaussians(*parameters)
        contexts: list[tuple[RasterContext, abi.View, abi.GaussianArrays, Tensor]] = []
        sent = []
        for rank in range(group.size):
            context, view = RasterContext(job.backend, slack=0.0), job.view(rank)
            arrays = context.project(view, gaussians)
            projected, slots = visible_projected(context, arrays)
            contexts.append((context, view, arrays, slots))
            sent.append(projected)
        received, counts = group.all_to_all_rows(torch.cat(sent), [len(projected) for projected in sent])
        view = job.view(group.rank)
        context = RasterContext(job.backend, slack=0.0)
        arrays = fill_context(context, received)
        context.bin(view, arrays)
        size = (view.height, view.width)
        image, alpha, depth = background.new_empty(*size, 3), background.new_empty(size), background.new_empty(size)
        context.blend(view, background, image, alpha, depth)
        ctx.job, ctx.contexts, ctx.own = job, contexts, (context, view)
        ctx.counts, ctx.pose_device = counts, viewmat.device
        ctx.save_for_backward(background, image, alpha, depth, *parameters)
        return image, alpha, depth

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        background, image, alpha, depth, *parameters = ctx.saved_tensors
        context, view = ctx.own
        v_image, v_alpha, v_depth = (None if g is None else g.contiguous() for g in grads)
        if v_image is None:
            v_image = torch.zeros_like(image)
        v_background = torch.empty_like(background) if ctx.needs_input_grad[1] else None
        out, v_out = context.images(view, image, alpha, depth), context.images(view, v_image, v_alpha, v_depth)
        context.blend_vjp(view, background, out, v_out, v_background)
        sums = returned_sums(context, sum(ctx.counts))
        returned, counts = ctx.job.group.all_to_all_rows(sums, ctx.counts)
        total = Gaussians(*parameters).map(torch.zeros_like)
        part = total.map(torch.empty_like)
        partials = [total.means.new_zeros(0, abi.POSE)]
        splits = zip(ctx.contexts, torch.split(returned, counts), ctx.job.with_pose, strict=True)
        for (own, own_view, arrays, slots), rows, with_pose in splits:
            take_sums(own, slots, rows)
            own.project_vjp(own_view, arrays, gradients=own.backend.arrays(part), with_pose=with_pose)
            for name in GROUPS:
                getattr(total, name).add_(getattr(part, name))
            if with_pose:
                partials.append(own.pose_partials(arrays.n))
        v_viewmat = None
        if any(ctx.job.with_pose):
            chunks = [-(-len(total) // abi.CHUNK) * with_pose for with_pose in ctx.job.with_pose]
            everything, _ = ctx.job.group.all_to_all_rows(torch.cat(partials), chunks)
            if ctx.needs_input_grad[2]:
                v_viewmat = total.means.new_empty(4, 4)
                context.pose_vjp(view, everything, v_viewmat)
                v_viewmat = v_viewmat.to(ctx.pose_device)
        return None, v_background, v_viewmat, *(getattr(total, name) for name in GROUPS)


def _packed(camera: Camera, with_pose: bool) -> Tensor:
    """Return a camera, and whether its pose gets a gradient, as [25] float64."""
    lens = [camera.width, camera.height, camera.fx, camera.fy, camera.cx, camera.cy, camera.near]
    lens += [MODELS.index(camera.model), with_pose]
    return torch.tensor([*lens, *camera.viewmat.reshape(-1).tolist()], dtype=torch.float64)


def _unpacked(row: Tensor) -> tuple[Camera, bool]:
    width, height, fx, fy, cx, cy, near, model, with_pose, *matrix = row.tolist()
    pose = np.array(matrix).reshape(4, 4)
    return Camera("", int(width), int(height), fx, fy, cx, cy, pose, near, MODELS[int(model)]), bool(with_pose)
