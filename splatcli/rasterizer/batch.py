"""Steps on several views: their gradients are summed in the order of the views, then Adam updates once.

The processes of a group share the views: in round j, process r renders view j * size + r. The gradients of a round are
added in the order of the processes, which is that of the views. So the sum has the same bits for any number of
processes, one included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from splatcli.gaussians import Gaussians
from splatcli.native.backend import Backend
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.memory_budget import MemoryBudget
from splatcli.rasterizer.step_inputs import DensifyStats, StepInputs
from splatcli.rasterizer.train_step import TrainStepPipeline
from splatcli.scene.camera import Camera

if TYPE_CHECKING:
    from splatcli.distributed.process_group import ProcessGroup

#: Each group's gradient begins at a multiple of so many numbers: 64 bytes, for vector loads.
_ALIGNED = 16


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The results of a step on several views, in the order of the views.

    losses: of each view. isects: tile intersections of the fullest one.
    v_params: gradients of each view's parameters, see apply_view_grads(); None where none are requested.
    """

    losses: list[float]
    isects: int
    v_params: list[Tensor] | None


class BatchEngine:
    """Training steps on several views, on any device that has kernels; each is done when step() returns.

    group: the processes that share the views; None: this one renders them all.
    """

    group: ProcessGroup | None

    def __init__(
        self, backend: Backend, *, budget: MemoryBudget | None = None, group: ProcessGroup | None = None
    ) -> None:
        self._pipeline = TrainStepPipeline(backend, budget)
        self.group = group
        self._own: FlatSums | None = None
        self._total: FlatSums | None = None

    def step(
        self,
        gaussians: Gaussians,
        adam: AdamState,
        cameras: Sequence[Camera],
        inputs_of: Callable[[int], StepInputs],
    ) -> BatchResult:
        """Take one step of Adam along the mean gradient of the views of ``cameras``, and sum up their statistics.

        cameras: at least as many as the group has processes, the same in all.
        inputs_of: the inputs of view i, requested for this process' views only: r, r + size, ... in process r. All but
            camera, target and what belongs to them must be the same everywhere.
        """
        rank, size = (0, 1) if self.group is None else (self.group.rank, self.group.size)
        if len(cameras) < size:
            raise ValueError(f"{len(cameras)} views are too few for {size} processes")
        own, total = self._buffers(gaussians)
        self._pipeline.follow_stream(own.flat, total.flat, *self._tensors())
        total.flat.zero_()
        results: list[list[float]] = []
        v_params: list[Tensor] = []
        shared: StepInputs | None = None
        for first in range(0, len(cameras), size):
            batch = cameras[first : first + size]
            inputs: StepInputs | None = None
            problem: Exception | None = None
            try:
                if rank < len(batch):
                    inputs = inputs_of(first + rank)
            except Exception as error:
                if self.group is None:
                    raise
                problem = error
            shared = shared or inputs
            results += self._round(gaussians, adam, batch, inputs, shared, problem)[: len(batch)]
            if shared is not None and shared.view_params is not None:
                v_params += self._all_gather(self._pipeline.v_params)[: len(batch)]
        assert shared is not None
        self._gather_sums(total)
        self._apply_mean(gaussians, adam, total, len(cameras), shared)
        return BatchResult([loss for loss, _ in results], int(max(isects for _, isects in results)), v_params or None)

    def _round(
        self,
        gaussians: Gaussians,
        adam: AdamState,
        cameras: Sequence[Camera],
        inputs: StepInputs | None,
        shared: StepInputs | None,
        problem: Exception | None,
    ) -> list[list[float]]:
        """Add the gradients of one view of each process to the sums; return [loss, isects] of each process' view.

        cameras: of these views. inputs: of this process' view; None without one. shared: the first inputs of this step
            here; None where ``problem``, an error of this process that is raised in all, came before them.
        """
        own, total = self._buffers(gaussians)
        numbers = [0.0, 0.0]
        try:
            if inputs is not None:
                own.stats.zero_()
                own_inputs = replace(inputs, stats=None if inputs.stats is None else own.stats)
                job = self._pipeline.run(gaussians, adam, adam.step + 1, own_inputs, gradients=own.gradients)
                numbers = [self._pipeline.step_loss(job, inputs), float(self._pipeline.context.native.max_isects)]
        except Exception as error:
            if self.group is None:
                raise
            problem = error
        if self.group is None:
            total.flat += own.flat
            return [numbers]
        results = self.group.all_gather_scalars("a view", numbers, problem)
        self.group.reduce_scatter_in_order(total.flat, own.flat, len(cameras))
        return results

    def _gather_sums(self, total: FlatSums) -> None:
        """Bring together the sums, of which each process has a part."""
        if self.group is not None:
            self.group.all_gather_parts(total.flat)

    def _apply_mean(
        self, gaussians: Gaussians, adam: AdamState, total: FlatSums, views: int, shared: StepInputs
    ) -> None:
        """Update by Adam along the mean of ``views`` gradients, whose sum is ``total``; add up their statistics.

        shared: the inputs of any of the views; what differs between them is not used.
        """
        if shared.stats is not None:
            shared.stats.grad2d += total.stats.grad2d
            shared.stats.count += total.stats.count
        for _, gradient in total.gradients.items():
            gradient /= views
        self._pipeline.apply_gradients(gaussians, total.gradients, adam, shared)

    def _all_gather(self, own: Tensor) -> list[Tensor]:
        return [own.cpu().clone()] if self.group is None else self.group.all_gather(own.cpu())

    def _buffers(self, gaussians: Gaussians) -> tuple[FlatSums, FlatSums]:
        """Return memory for a view's gradients and for their sum, the same as in the last step unless N changed."""
        if self._own is None or self._total is None or not self._own.fits(gaussians):
            self._own = self._total = None  # free the old ones first
            shares = 1 if self.group is None else self.group.size
            self._own, self._total = FlatSums(gaussians, shares), FlatSums(gaussians, shares)
        return self._own, self._total

    def _tensors(self) -> list[Tensor]:
        """Return the memory that is reused from step to step, beside the pipeline's and the sums."""
        return []


class FlatSums:
    """Gradients of all groups and densification statistics in one tensor ``flat`` [L], for one collective."""

    def __init__(self, like: Gaussians, shares: int = 1) -> None:
        """shares: L is a multiple of it."""
        shapes = [tuple(tensor.shape) for _, tensor in like.items()] + [(len(like),)] * 2
        places = [0]
        for shape in shapes:
            places.append(places[-1] + -(-math.prod(shape) // _ALIGNED) * _ALIGNED)
        length = -(-places[-1] // shares) * shares
        self.flat = torch.zeros(length, dtype=like.means.dtype, device=like.device)
        parts = [
            self.flat[place : place + math.prod(shape)].view(shape)
            for place, shape in zip(places, shapes, strict=False)
        ]
        self.gradients = Gaussians(*parts[:6])
        self.stats = DensifyStats(*parts[6:])

    def fits(self, gaussians: Gaussians) -> bool:
        """Return whether it has the shapes and the device of ``gaussians``."""
        return self.gradients.shN.shape == gaussians.shN.shape and self.flat.device == gaussians.device
