"""The native engines: one training step without autograd, on the CPU at once, on a GPU without waiting for it."""

from __future__ import annotations

import ctypes
import logging
import math
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from splatcli.errors import ResourceError
from splatcli.gaussians import GROUPS, Gaussians
from splatcli.native import abi
from splatcli.native.backend import Backend, address
from splatcli.native.build import NoCompilerError
from splatcli.rasterizer.adam import AdamState, decay_table
from splatcli.rasterizer.alpha_loss import alpha_loss_vjp
from splatcli.rasterizer.context import RasterContext, view_of
from splatcli.rasterizer.depth_loss import depth_loss
from splatcli.rasterizer.memory_budget import Arena, MemoryBudget, round_capacity
from splatcli.rasterizer.recolour import recolour, recolour_vjp
from splatcli.rasterizer.reference_engine import ReferenceEngine
from splatcli.rasterizer.step_inputs import (
    NOISE_STEEPNESS,
    NOISE_THRESHOLD,
    StepEngine,
    StepInputs,
    SyncEngine,
    ViewParams,
)
from splatcli.scene.camera import Camera

_log = logging.getLogger(__name__)

#: Numbers of the pose in v_params, before those of its colours.
_POSE = 16


class TrainStepPipeline:
    """The stages of a training step in their order, and the images between them.

    Projection and the update by Adam: run(). Rasterization, loss and back: rasterize_with_loss().
    Memory beside the parameters and moments: see rasterizer/context.py. Nothing is allocated after the largest view.
    """

    def __init__(self, backend: Backend, budget: MemoryBudget | None) -> None:
        self.backend = backend
        self.context = RasterContext(backend, budget=budget)
        self.arena = Arena(backend.device)
        self._decay_table: Tensor | None = None
        self._decay_betas = (0.0, 0.0)
        #: Gradient of the last step's per-view parameters, see _v_params_size().
        self.v_params = torch.zeros(0, dtype=backend.dtype, device=backend.device)
        #: Mean L1 and SSIM of the last step, where the backend defers them.
        self.l1_ssim = torch.zeros(2, dtype=torch.float64, device=backend.device)
        #: The depth term of the last step's loss, where there is one.
        self.depth_term = torch.zeros((), dtype=torch.float64, device=backend.device)
        self._stream: torch.cuda.Stream | None = None

    def run(
        self,
        gaussians: Gaussians,
        adam: AdamState,
        step: int,
        inputs: StepInputs,
        *,
        capacity: int | None = None,
        gradients: Gaussians | None = None,
    ) -> abi.Loss:
        """Do one step, Adam's ``step``-th, and return the native loss job, see step_loss().

        capacity: see RasterContext.bin().
        gradients: filled with those of the loss; then no parameter changes, and the caller applies the regularisation.
        """
        self.follow_stream()
        context, stats, view_params = self.context, inputs.stats, inputs.view_params
        view = self.view(gaussians, inputs.camera, inputs)
        update = self._adam_update(adam, step, inputs) if gradients is None else None
        arrays = context.project(view, gaussians, update)
        loss = self.rasterize_with_loss(view, arrays, inputs, capacity=capacity)
        with_pose = view_params is not None and view_params.pose
        context.project_vjp(
            view,
            arrays,
            gradients=None if gradients is None else self.backend.arrays(gradients),
            adam=update,
            with_pose=with_pose,
            grad2d=None if stats is None else stats.grad2d,
            count=None if stats is None else stats.count,
        )
        if with_pose:
            self.pose_vjp(view, context.pose_partials(arrays.n))
        if inputs.regularisation.noise > 0.0 and gradients is None:
            self.noise(gaussians, step, inputs)
        return loss

    def pose_vjp(self, view: abi.View, partials: Tensor) -> None:
        """Fill the pose's part of v_params from RasterContext.pose_partials() of all Gaussians."""
        self.context.pose_vjp(view, partials, self.v_params[:_POSE].view(4, 4))

    def view(self, gaussians: Gaussians, camera: Camera, inputs: StepInputs) -> abi.View:
        """Return ``camera`` for the native side, for a step with ``inputs``."""
        view = view_of(
            camera,
            sh_degree=inputs.sh_degree,
            antialiased=inputs.antialiased,
            with_depth=inputs.depth is not None,
        )
        if inputs.filter_3d is not None:
            view.filter_3d = self.backend.pointer(inputs.filter_3d, len(gaussians))
        return view

    def rasterize_with_loss(
        self,
        view: abi.View,
        arrays: abi.GaussianArrays,
        inputs: StepInputs,
        *,
        capacity: int | None = None,
    ) -> abi.Loss:
        """Bin and blend the projected view, compute its loss, and leave its per-intersection gradients in the context.

        capacity: see RasterContext.bin().
        """
        context, camera, depth_target = self.context, inputs.camera, inputs.depth
        context.bin(view, arrays, capacity=capacity)
        image, v_image, alpha = self._images(camera)
        depth = None if depth_target is None else self._plane("depth", camera)
        context.blend(view, inputs.background, image, alpha, depth)
        view_params = inputs.view_params
        colours = None if view_params is None else view_params.colours
        recoloured = image if colours is None else recolour(image, colours, self._pixels("recoloured", camera))
        self._resize_v_params(view_params)
        mask = None if inputs.mask is None else inputs.mask[..., None]
        if mask is not None:
            # Black in both images, and without a gradient: the loss does not depend on these pixels.
            recoloured.masked_fill_(mask, 0.0)
        loss = self.loss(recoloured, inputs.target, v_image, inputs.ssim_lambda)
        if mask is not None:
            v_image.masked_fill_(mask, 0.0)
        if colours is not None:
            # The recoloured image is not needed any more; its memory takes the gradient of the rendered image.
            recolour_vjp(image, colours, v_image, recoloured, self.v_params[_POSE:].view(colours.shape))
            v_image = recoloured
        context.native.with_abs = inputs.absgrad and inputs.stats is not None
        v_alpha = v_depth = None
        if depth_target is not None and depth is not None:
            v_alpha, v_depth = self._plane("v_alpha", camera), self._plane("v_depth", camera)
            self.depth_term.copy_(depth_loss(alpha, depth, depth_target, v_alpha, v_depth))
        if inputs.has_alpha_term:
            by_term = self._plane("v_alpha" if v_alpha is None else "by_alpha", camera)
            alpha_loss_vjp(alpha, inputs.target, inputs.mask, inputs.alpha_lambda, inputs.mask_lambda, by_term)
            v_alpha = by_term if v_alpha is None else v_alpha.add_(by_term)
        out, v_out = context.images(view, image, alpha, depth), context.images(view, v_image, v_alpha, v_depth)
        context.blend_vjp(view, inputs.background, out, v_out)
        return loss

    def loss(self, image: Tensor, target: Tensor, v_image: Tensor | None, ssim_lambda: float) -> abi.Loss:
        """Compute mean L1 and SSIM of image [H, W, 3] against target, uint8 or of the image's dtype.

        v_image: [H, W, 3], filled with the gradient of the loss, or None.
        A deferred backend fills ``l1_ssim``; others return both in the job.
        """
        height, width, _ = image.shape
        is_u8 = target.dtype == torch.uint8
        pointer = self.backend.pointer
        job = abi.Loss(
            width=width,
            height=height,
            target_is_u8=is_u8,
            channels=3,
            images=1,
            ssim_lambda=ssim_lambda,
            image=pointer(image, height, width, 3),
            target=pointer(target, height, width, 3, dtype=torch.uint8 if is_u8 else None),
            v_image=None if v_image is None else pointer(v_image, height, width, 3),
        )
        if self.backend.deferred:
            job.means = pointer(self.l1_ssim, 2, dtype=torch.float64)
            job.counters = self.context.native.counters
        size = self.backend.call("loss_bytes", job)
        job.workspace = address(self.arena.take("loss", size, torch.uint8))
        self.backend.call("loss", job)
        return job

    def step_loss(self, job: abi.Loss, inputs: StepInputs) -> float:
        """Return the loss of the last step, whose native job is ``job``; waits for a deferred backend."""
        l1, ssim = self.l1_ssim.tolist() if self.backend.deferred else (job.l1, job.ssim)
        return total_loss(inputs.ssim_lambda, l1, ssim) + (0.0 if inputs.depth is None else float(self.depth_term))

    def apply_gradients(self, gaussians: Gaussians, gradients: Gaussians, adam: AdamState, inputs: StepInputs) -> None:
        """Take a step of Adam along ``gradients`` on all rows, with the regularisation and the noise of ``inputs``."""
        adam.flush(gaussians, inputs.lrs["shN"])
        update = self._adam_update(adam, adam.step + 1, inputs)
        self.backend.call("adam", self.backend.arrays(gaussians), self.backend.arrays(gradients), update)
        adam.step += 1
        adam.sh_last_step.fill_(adam.step)
        if inputs.regularisation.noise > 0.0:
            self.noise(gaussians, adam.step, inputs)

    def noise(self, gaussians: Gaussians, step: int, inputs: StepInputs) -> None:
        """Add the exploration noise of step number ``step`` to the means."""
        regularisation = inputs.regularisation
        job = abi.Noise(
            seed=regularisation.seed,
            step=step,
            scale=regularisation.noise,
            threshold=NOISE_THRESHOLD,
            steepness=NOISE_STEEPNESS,
            counters=self.context.native.counters,
            first=0 if inputs.shard is None else inputs.shard.first,
        )
        self.backend.call("noise", self.backend.arrays(gaussians), job)

    def follow_stream(self, *more: Tensor) -> None:
        """Let the current stream wait for the work of this pipeline, which may be on another stream of torch's.

        Buffers are reused from step to step. torch gives memory back on the stream on which it was allocated, so the
        others are recorded in the buffers. more: further tensors of the engine's own.
        """
        if self.backend.device.type != "cuda" or self.backend.stream is not None:
            return
        if torch.cuda.is_current_stream_capturing():  # the one who replays a graph orders it
            return
        stream, before = torch.cuda.current_stream(self.backend.device), self._stream
        self._stream = stream
        if before is None or before == stream:
            return
        stream.wait_stream(before)
        own = (self.v_params, self.l1_ssim, self.depth_term)
        for tensor in [*self.context.tensors(), *self.arena.buffers(), *own, *more]:
            tensor.record_stream(stream)

    def _adam_update(self, adam: AdamState, step: int, inputs: StepInputs) -> abi.Adam:
        """Return the settings, moments and regularisers of Adam's ``step``-th update for the native side."""
        update = abi.Adam(
            step=step,
            beta1=adam.beta1,
            beta2=adam.beta2,
            eps=adam.eps,
            lr=(ctypes.c_double * 6)(*(inputs.lrs[name] for name in GROUPS)),
            exp_avg=self.backend.arrays(adam.exp_avg),
            exp_avg_sq=self.backend.arrays(adam.exp_avg_sq),
            opacity_reg=inputs.regularisation.opacity_reg,
            scale_reg=inputs.regularisation.scale_reg,
            total=0 if inputs.shard is None else inputs.shard.total,
            size_power=adam.size_power,
            log_size=adam.log_size,
        )
        if adam.lazy:
            if self._decay_table is None or self._decay_betas != (adam.beta1, adam.beta2):
                self._decay_table = decay_table(adam.beta1, adam.beta2).to(self.backend.device)
                self._decay_betas = (adam.beta1, adam.beta2)
            update.sh_last_step = self.backend.pointer(adam.sh_last_step, len(adam.exp_avg), dtype=torch.int32)
            update.decay_table = self.backend.pointer(self._decay_table, len(self._decay_table), 2, dtype=torch.float64)
            update.decay_rows = len(self._decay_table)
        return update

    def _resize_v_params(self, view_params: ViewParams | None) -> None:
        """Allocate the gradient of per-view parameters; their number is the same in all steps of a run."""
        size = _v_params_size(view_params)
        if len(self.v_params) != size and size:
            self.v_params = self.v_params.new_zeros(size)

    def _images(self, camera: Camera) -> tuple[Tensor, Tensor, Tensor]:
        """Return image, its gradient, and alpha, in memory that the next step uses again."""
        return self._pixels("image", camera), self._pixels("v_image", camera), self._plane("alpha", camera)

    def _plane(self, name: str, camera: Camera) -> Tensor:
        """Return a buffer [H, W], kept from step to step."""
        shape = (camera.height, camera.width)
        return self.arena.take(name, math.prod(shape), self.backend.dtype).as_strided(shape, (camera.width, 1))

    def _pixels(self, name: str, camera: Camera) -> Tensor:
        """Return a buffer [H, W, 3], kept from step to step."""
        shape = (camera.height, camera.width, 3)
        return self.arena.take(name, math.prod(shape), self.backend.dtype).as_strided(shape, (3 * camera.width, 3, 1))


class NativeEngine(SyncEngine):
    """Steps on the CPU, done on return; gradients of parameters stay in the processor's cache."""

    def __init__(self, backend: Backend, *, budget: MemoryBudget | None = None) -> None:
        self._pipeline = TrainStepPipeline(backend, budget)

    @property
    def context(self) -> RasterContext:
        """The context of the last step."""
        return self._pipeline.context

    def step(self, gaussians: Gaussians, adam: AdamState, inputs: StepInputs) -> float:
        job = self._pipeline.run(gaussians, adam, adam.step + 1, inputs)
        adam.step += 1
        self.isects = self.context.native.max_isects
        apply_view_grads(inputs.view_params, self._pipeline.v_params)
        return self._pipeline.step_loss(job, inputs)


@dataclass(slots=True, eq=False)
class _Arrival:
    """Host tensors of a step's results, which a later step uses again when this one's are read."""

    results: Tensor  # [COUNTERS + 2] int64, as AsyncEngine keeps them
    l1_ssim: Tensor  # [2] float64, the last of the results
    depth_term: Tensor  # [] float64, where the step has known depths
    v_params: Tensor  # see _v_params_size()


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """A step in flight: its arguments, to enqueue it again, and where its results arrive."""

    gaussians: Gaussians
    adam: AdamState
    step: int
    inputs: StepInputs
    arrival: _Arrival
    done: torch.cuda.Event | None  # when they are there; None where calls are done on return


class AsyncEngine:
    """Steps on a GPU: the host only enqueues, and reads the counts of a step two steps later.

    The capacity for tile intersections follows from earlier views. When a view has more, the device's overflow flag
    turns it and all steps after it into no-ops; the host reads the flag, allocates more and enqueues the same steps
    again, in order. So no step is lost, and the results are bit-identical to a run with enough capacity from the start.
    """

    #: Steps that may be in flight when submit() returns.
    MAX_IN_FLIGHT = 2

    def __init__(self, backend: Backend, *, budget: MemoryBudget | None = None, capacity: int = 0) -> None:
        """capacity: tile intersections to begin with; 0 counts those of the first view, which waits once."""
        self._pipeline = TrainStepPipeline(backend, budget)
        self._pending: deque[_Pending] = deque()
        self._capacity = capacity
        pinned = torch.cuda.is_available()  # copies to pinned memory do not wait
        slots = self.MAX_IN_FLIGHT + 1
        results = torch.zeros(slots, abi.COUNTERS + 2, dtype=torch.int64, pin_memory=pinned)
        depth_terms = torch.zeros(slots, dtype=torch.float64, pin_memory=pinned)
        l1_ssim = results[:, abi.COUNTERS :].view(torch.float64)
        v_params = [torch.zeros(0, dtype=backend.dtype, pin_memory=pinned)] * slots
        self._arrivals = [_Arrival(*of_slot) for of_slot in zip(results, l1_ssim, depth_terms, v_params, strict=True)]
        #: Counters, then l1 and ssim as float64: one copy takes them to the host.
        self._results = torch.zeros(abi.COUNTERS + 2, dtype=torch.int64, device=backend.device)
        self._pipeline.l1_ssim = self._results.narrow(0, abi.COUNTERS, 2).view(torch.float64)
        self.context.set_counters(self._results.narrow(0, 0, abi.COUNTERS))
        self._submitted = 0
        self.isects = 0

    @property
    def context(self) -> RasterContext:
        """The context of the last step."""
        return self._pipeline.context

    def submit(self, gaussians: Gaussians, adam: AdamState, inputs: StepInputs) -> list[float]:
        arrival = self._arrivals[self._submitted % len(self._arrivals)]
        adam.step += 1
        size = _v_params_size(inputs.view_params)
        if size != len(arrival.v_params):
            arrival.v_params = torch.zeros(size, dtype=arrival.v_params.dtype, pin_memory=torch.cuda.is_available())
        on_gpu = self._pipeline.backend.device.type == "cuda"
        done = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        pending = _Pending(gaussians, adam, adam.step, inputs, arrival, done)
        self._submitted += 1
        self._pending.append(pending)
        self._enqueue(pending)
        return self._collect(self.MAX_IN_FLIGHT)

    def drain(self) -> list[float]:
        return self._collect(0)

    def _collect(self, in_flight: int) -> list[float]:
        """Wait until at most ``in_flight`` steps are in flight; return the losses of the others."""
        losses = []
        while len(self._pending) > in_flight:
            first = self._pending[0]
            arrival = first.arrival
            if first.done is not None:
                first.done.synchronize()
            counts: list[int] = arrival.results.tolist()
            isects = counts[abi.COUNT_ISECTS]
            self._capacity = max(self._capacity, round_capacity(isects))
            if counts[abi.COUNT_OVERFLOW]:
                self._retry()
                continue
            self._pending.popleft()
            self.isects = isects
            apply_view_grads(first.inputs.view_params, arrival.v_params)
            depth = 0.0 if first.inputs.depth is None else float(arrival.depth_term)
            losses.append(total_loss(first.inputs.ssim_lambda, *arrival.l1_ssim.tolist()) + depth)
        return losses

    def _retry(self) -> None:
        """Clear the flag and enqueue all steps in flight again, with the capacity that the first one needs."""
        self._pipeline.follow_stream(self._results)
        self._results.zero_()
        for pending in self._pending:
            self._enqueue(pending)

    def _enqueue(self, pending: _Pending) -> None:
        pipeline = self._pipeline
        pipeline.follow_stream(self._results)
        capacity = self._capacity or None
        pipeline.run(pending.gaussians, pending.adam, pending.step, pending.inputs, capacity=capacity)
        if capacity is None:
            self._capacity = round_capacity(self.context.native.max_isects)
        arrival = pending.arrival
        arrival.results.copy_(self._results, non_blocking=True)
        if pending.inputs.view_params is not None:
            arrival.v_params.copy_(pipeline.v_params, non_blocking=True)
        if pending.inputs.depth is not None:
            arrival.depth_term.copy_(pipeline.depth_term, non_blocking=True)
        if pending.done is not None:
            pending.done.record(torch.cuda.current_stream(pipeline.backend.device))


def _v_params_size(view_params: ViewParams | None) -> int:
    """Return the length of v_params: 16 numbers of the pose, and those of its colours."""
    if view_params is None:
        return 0
    return _POSE + (0 if view_params.colours is None else view_params.colours.numel())


def apply_view_grads(view_params: ViewParams | None, v_params: Tensor) -> None:
    """Pass the gradient of a step's per-view parameters to their apply_grad; v_params on the host."""
    if view_params is None:
        return
    colours = view_params.colours
    v_colours = None if colours is None else v_params[_POSE:].view(colours.shape)
    view_params.apply_grad(v_params[:_POSE].view(4, 4) if view_params.pose else None, v_colours)


def total_loss(ssim_lambda: float, l1: float, ssim: float) -> float:
    """Return (1 - lambda) L1 + lambda (1 - SSIM)."""
    return float((1.0 - ssim_lambda) * l1 + ssim_lambda * (1.0 - ssim))


def engine_for(device: str | torch.device = "cpu", budget: MemoryBudget | None = None) -> StepEngine:
    """Return the engine of a device: native, or plain torch with a warning where there is no compiler.

    budget: bytes for tile intersections; None takes the free memory of the device.
    Raises ResourceError for a device without kernels, and when building them fails.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return AsyncEngine(Backend.cuda(device), budget=budget)
    if device.type != "cpu":
        raise ResourceError(f"there is no engine for {device}", remedy="use --device cpu or cuda")
    try:
        return NativeEngine(Backend.cpu(), budget=budget)
    except NoCompilerError as error:
        _log.warning("%s\nTraining in plain torch instead: right, but hundreds of times slower.", error)
        return ReferenceEngine()
