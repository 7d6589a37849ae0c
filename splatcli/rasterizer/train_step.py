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
from splatcli.rasterizer.context import RasterContext, view_of
from splatcli.rasterizer.depth_loss import depth_loss
from splatcli.rasterizer.exposure import recolour, recolour_vjp
from splatcli.rasterizer.memory import Arena, MemoryBudget, round_capacity
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

#: Numbers of the gradient of a view's correction: those of the pose, then those of exposure or grid.
_POSE = 16


class TrainStepPipeline:
    """The stages of a step in their order, and the images between them.

    Memory beyond the parameters and moments: see rasterizer/context.py. Nothing is allocated after the largest view.
    """

    def __init__(self, backend: Backend, budget: MemoryBudget | None) -> None:
        self.backend = backend
        self.frame = RasterContext(backend, budget=budget)
        self.arena = Arena(backend.device)
        self._gaps: Tensor | None = None
        self._gaps_of = (0.0, 0.0)
        #: Gradient of the last step's correction, see _slopes_of().
        self.slopes = torch.zeros(0, dtype=backend.dtype, device=backend.device)
        #: The depth term of the last step's loss, where there is one.
        self.depth_term = torch.zeros((), dtype=torch.float64, device=backend.device)

    def run(
        self,
        gaussians: Gaussians,
        adam: AdamState,
        number: int,
        inputs: StepInputs,
        *,
        room: int | None = None,
        means: Tensor | None = None,
        gradients: Gaussians | None = None,
    ) -> abi.Loss:
        """One step, which is Adam's ``number``-th. room, means: see compare().

        gradients: filled with those of the loss; then nothing moves, and the regularisation is left to the caller.
        """
        frame, stats, view_params = self.frame, inputs.stats, inputs.view_params
        view = self.view(gaussians, inputs.camera, inputs)
        update = self._update(adam, number, inputs) if gradients is None else None
        arrays = frame.project(view, gaussians, update)
        loss = self.compare(view, arrays, inputs, room=room, means=means)
        frame.project_vjp(
            view,
            arrays,
            gradients=None if gradients is None else self.backend.arrays(gradients),
            adam=update,
            v_viewmat=self.slopes[:_POSE].view(4, 4) if view_params is not None and view_params.pose else None,
            grad2d=None if stats is None else stats.grad2d,
            count=None if stats is None else stats.count,
        )
        if inputs.regularisation.noise > 0.0 and gradients is None:
            self.noise(gaussians, number, inputs)
        return loss

    def view(self, gaussians: Gaussians, camera: Camera, inputs: StepInputs) -> abi.View:
        """What ``camera`` is to the native side in a step with ``inputs``."""
        known = inputs.depth is not None
        view = view_of(camera, sh_degree=inputs.sh_degree, antialiased=inputs.antialiased, with_depth=known)
        if inputs.smoothing is not None:
            view.filter_3d = self.backend.pointer(inputs.smoothing, len(gaussians))
        return view

    def compare(
        self,
        view: abi.View,
        arrays: abi.GaussianArrays,
        inputs: StepInputs,
        *,
        room: int | None = None,
        means: Tensor | None = None,
    ) -> abi.Loss:
        """Draws the view that the frame has projected, and leaves the gradient rows of its loss there.

        room: see Frame.bin. means: see ``loss``.
        """
        frame, camera, known = self.frame, inputs.camera, inputs.depth
        frame.bin(view, arrays, room=room)
        image, v_image, alpha = self._images(camera)
        depth = None if known is None else self._plane("depth", camera)
        frame.blend(view, inputs.background, image, alpha, depth)
        view_params = inputs.view_params
        colours = None if view_params is None else view_params.colours
        shown = image if colours is None else recolour(image, colours, self._pixels("shown", camera))
        self._make_slopes(view_params)
        hidden = None if inputs.hidden is None else inputs.hidden[..., None]
        if hidden is not None:
            # Black in both images, and without a gradient: whatever is drawn there, the loss cannot tell.
            shown.masked_fill_(hidden, 0.0)
        loss = self.loss(shown, inputs.target, v_image, inputs.ssim_lambda, means)
        if hidden is not None:
            v_image.masked_fill_(hidden, 0.0)
        if colours is not None:
            # The image that was shown is done with; its memory takes the gradient of what is below the exposure.
            recolour_vjp(image, colours, v_image, shown, self.slopes[_POSE:].view(colours.shape))
            v_image = shown
        frame.native.with_abs = inputs.absgrad and inputs.stats is not None
        v_alpha = v_depth = None
        if known is not None and depth is not None:
            v_alpha, v_depth = self._plane("v_alpha", camera), self._plane("v_depth", camera)
            self.depth_term.copy_(depth_loss(alpha, depth, known, v_alpha, v_depth))
        out, v_out = frame.images(view, image, alpha, depth), frame.images(view, v_image, v_alpha, v_depth)
        frame.blend_vjp(view, inputs.background, out, v_out)
        return loss

    def loss(
        self, image: Tensor, target: Tensor, v_image: Tensor | None, ssim_lambda: float, means: Tensor | None = None
    ) -> abi.Loss:
        """Mean L1 and SSIM of image [H, W, 3] against target, uint8 or of the image's dtype.

        v_image: [H, W, 3], filled with the gradient of the loss, or None.
        means: [2] float64, where a deferred backend puts l1 and ssim; others return them.
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
        if means is not None:
            job.means = pointer(means, 2, dtype=torch.float64)
            job.counters = self.frame.native.counters
        size = self.backend.call("loss_bytes", job)
        job.workspace = address(self.arena.take("loss", size, torch.uint8))
        self.backend.call("loss", job)
        return job

    def apply(self, gaussians: Gaussians, gradients: Gaussians, adam: AdamState, inputs: StepInputs) -> None:
        """Adam's next step along ``gradients``, in place on parameters and moments; adam.step is the caller's."""
        update = self._update(adam, adam.step + 1, inputs)
        self.backend.call("adam", self.backend.arrays(gaussians), self.backend.arrays(gradients), update)

    def noise(self, gaussians: Gaussians, number: int, inputs: StepInputs) -> None:
        """Pushes the means at random, as step ``number`` does."""
        regularisation = inputs.regularisation
        job = abi.Noise(
            seed=regularisation.seed,
            step=number,
            scale=regularisation.noise,
            threshold=NOISE_THRESHOLD,
            steepness=NOISE_STEEPNESS,
            counters=self.frame.native.counters,
            first=0 if inputs.shard is None else inputs.shard.first,
        )
        self.backend.call("noise", self.backend.arrays(gaussians), job)

    def _make_slopes(self, view_params: ViewParams | None) -> None:
        """Room for the gradient of a correction; a run has one size of them."""
        size = _slopes_of(view_params)
        if len(self.slopes) != size and size:
            self.slopes = self.slopes.new_zeros(size)

    def _images(self, camera: Camera) -> tuple[Tensor, Tensor, Tensor]:
        """Image, its gradient, and alpha, in memory that the next step uses again."""
        return self._pixels("image", camera), self._pixels("v_image", camera), self._plane("alpha", camera)

    def _plane(self, name: str, camera: Camera) -> Tensor:
        """[H, W], kept from step to step."""
        return self._pixels(name, camera, 1).squeeze(2)

    def _pixels(self, name: str, camera: Camera, channels: int = 3) -> Tensor:
        """[H, W, channels], kept from step to step."""
        shape = (camera.height, camera.width, channels)
        numel = math.prod(shape)
        return self.arena.take(name, numel, self.backend.dtype).narrow(0, 0, numel).view(shape)

    def _update(self, adam: AdamState, number: int, inputs: StepInputs) -> abi.Adam:
        update = abi.Adam(
            step=number,
            beta1=adam.beta1,
            beta2=adam.beta2,
            eps=adam.eps,
            lr=(ctypes.c_double * 6)(*(inputs.lrs[name] for name in GROUPS)),
            exp_avg=self.backend.arrays(adam.exp_avg),
            exp_avg_sq=self.backend.arrays(adam.exp_avg_sq),
            opacity_reg=inputs.regularisation.opacity_reg,
            scale_reg=inputs.regularisation.scale_reg,
            total=0 if inputs.shard is None else inputs.shard.total,
        )
        if adam.lazy:
            if self._gaps is None or self._gaps_of != (adam.beta1, adam.beta2):
                self._gaps = decay_table(adam.beta1, adam.beta2).to(self.backend.device)
                self._gaps_of = (adam.beta1, adam.beta2)
            update.sh_last_step = self.backend.pointer(adam.rest_steps, len(adam.exp_avg), dtype=torch.int32)
            update.decay_table = self.backend.pointer(self._gaps, len(self._gaps), 2, dtype=torch.float64)
            update.decay_rows = len(self._gaps)
        return update


class NativeEngine(SyncEngine):
    """Project, blend, loss, backward and Adam on the CPU, the gradients never leaving the cache."""

    def __init__(self, backend: Backend, *, budget: MemoryBudget | None = None) -> None:
        self._stages = TrainStepPipeline(backend, budget)

    @property
    def frame(self) -> RasterContext:
        """The frame of the last step."""
        return self._stages.frame

    def step(self, gaussians: Gaussians, adam: AdamState, inputs: StepInputs) -> float:
        job = self._stages.run(gaussians, adam, adam.step + 1, inputs)
        adam.step += 1
        self.isects = self.frame.native.max_isects
        apply_view_grads(inputs.view_params, self._stages.slopes)
        depth = 0.0 if inputs.depth is None else float(self._stages.depth_term)
        return total_loss(inputs.ssim_lambda, job.l1, job.ssim) + depth

    def loss(self, image: Tensor, target: Tensor, v_image: Tensor | None, ssim_lambda: float) -> float:
        """(1 - lambda) L1 + lambda (1 - SSIM) of image [H, W, 3] against target, uint8 or of the image's dtype.

        v_image: [H, W, 3], filled with the gradient, or None.
        """
        job = self._stages.loss(image, target, v_image, ssim_lambda)
        return total_loss(ssim_lambda, job.l1, job.ssim)


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """A step on its way: what to ask again with, and where its results arrive."""

    gaussians: Gaussians
    adam: AdamState
    number: int
    inputs: StepInputs
    means: Tensor  # [2] float64 on the host: l1, ssim
    counters: Tensor  # [COUNTERS] int64 on the host
    slopes: Tensor  # on the host, see _slopes_of()
    depth_term: Tensor  # [] float64 on the host, where the step knows depths
    done: torch.cuda.Event | None  # None where calls are done on return


class AsyncEngine:
    """Steps on a GPU: the host only enqueues, and reads what a step counted two steps later.

    Tile pairs get room by what earlier views needed. When a view has more, the device's overflow flag turns it and all
    steps after it into no-ops; the host finds the flag, makes more room and asks for the same steps again, in order.
    So nothing is dropped, and the results are the bits of a run that had the room from the start.
    """

    #: Steps that may be on their way when submit() returns.
    MAX_IN_FLIGHT = 2

    def __init__(self, backend: Backend, *, budget: MemoryBudget | None = None, room: int = 0) -> None:
        """room: pairs to begin with; 0 asks the first view, which waits once."""
        self._stages = TrainStepPipeline(backend, budget)
        self._pending: deque[_Pending] = deque()
        self._room = room
        pinned = torch.cuda.is_available()  # copies to pinned memory do not wait
        slots = self.MAX_IN_FLIGHT + 1
        self._host_means = torch.zeros(slots, 2, dtype=torch.float64, pin_memory=pinned)
        self._host_counters = torch.zeros(slots, abi.COUNTERS, dtype=torch.int64, pin_memory=pinned)
        self._host_slopes = torch.zeros(slots, 0, dtype=backend.dtype)
        self._host_depth_terms = torch.zeros(slots, dtype=torch.float64, pin_memory=pinned)
        self._means = torch.zeros(2, dtype=torch.float64, device=backend.device)
        self._submitted = 0
        self.isects = 0

    @property
    def frame(self) -> RasterContext:
        """The frame of the last step."""
        return self._stages.frame

    def submit(self, gaussians: Gaussians, adam: AdamState, inputs: StepInputs) -> list[float]:
        slot = self._submitted % len(self._host_means)
        on_gpu = self._stages.backend.device.type == "cuda"
        event = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        adam.step += 1
        size = _slopes_of(inputs.view_params)
        if size != self._host_slopes.shape[1]:  # steps on their way keep what they have
            like = self._host_slopes
            self._host_slopes = torch.zeros(len(like), size, dtype=like.dtype, pin_memory=self._host_means.is_pinned())
        arrivals = (self._host_means[slot], self._host_counters[slot])
        more = (self._host_slopes[slot], self._host_depth_terms[slot])
        step = _Pending(gaussians, adam, adam.step, inputs, *arrivals, *more, event)
        self._submitted += 1
        self._pending.append(step)
        self._enqueue(step)
        return self._settle(self.MAX_IN_FLIGHT)

    def drain(self) -> list[float]:
        return self._settle(0)

    def _settle(self, behind: int) -> list[float]:
        """Waits until at most ``behind`` steps are on their way; the losses of the others."""
        losses = []
        while len(self._pending) > behind:
            first = self._pending[0]
            if first.done is not None:
                first.done.synchronize()
            isects, overflow = first.counters[[abi.COUNT_ISECTS, abi.COUNT_OVERFLOW]].tolist()
            self._room = max(self._room, round_capacity(isects))
            if overflow:
                self._again()
                continue
            self._pending.popleft()
            self.isects = isects
            apply_view_grads(first.inputs.view_params, first.slopes)
            depth = 0.0 if first.inputs.depth is None else float(first.depth_term)
            losses.append(total_loss(first.inputs.ssim_lambda, *first.means.tolist()) + depth)
        return losses

    def _again(self) -> None:
        """Clears the flag and enqueues all steps on their way once more, with the room that the first one needs."""
        assert self.frame.counters is not None
        self.frame.counters.zero_()
        for step in self._pending:
            self._enqueue(step)

    def _enqueue(self, step: _Pending) -> None:
        stages = self._stages
        room = self._room or None
        stages.run(step.gaussians, step.adam, step.number, step.inputs, room=room, means=self._means)
        if room is None:
            self._room = round_capacity(self.frame.native.max_isects)
        assert self.frame.counters is not None
        step.means.copy_(self._means, non_blocking=True)
        step.counters.copy_(self.frame.counters, non_blocking=True)
        if step.inputs.view_params is not None:
            step.slopes.copy_(stages.slopes, non_blocking=True)
        if step.inputs.depth is not None:
            step.depth_term.copy_(stages.depth_term, non_blocking=True)
        if step.done is not None:
            step.done.record(torch.cuda.current_stream(stages.backend.device))


def _slopes_of(view_params: ViewParams | None) -> int:
    """How many numbers the gradient of a correction has: 16 of the pose, and those of exposure or grid."""
    if view_params is None:
        return 0
    return _POSE + (0 if view_params.colours is None else view_params.colours.numel())


def apply_view_grads(view_params: ViewParams | None, slopes: Tensor) -> None:
    """Tells the gradient of a step's correction; slopes on the host."""
    if view_params is None:
        return
    colours = view_params.colours
    v_colours = None if colours is None else slopes[_POSE:].view(colours.shape)
    view_params.apply_grad(slopes[:_POSE].view(4, 4) if view_params.pose else None, v_colours)


def total_loss(ssim_lambda: float, l1: float, ssim: float) -> float:
    """(1 - lambda) L1 + lambda (1 - SSIM)."""
    return float((1.0 - ssim_lambda) * l1 + ssim_lambda * (1.0 - ssim))


def engine_for(device: str | torch.device = "cpu", budget: MemoryBudget | None = None) -> StepEngine:
    """The engine of a device: native, or plain torch with a warning where no compiler is.

    budget: bytes for tile pairs; None takes what the device has free.
    Raises ResourceError for a device that there are no kernels for, and when building them fails.
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
