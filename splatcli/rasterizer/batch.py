"""BatchEngine: a step on several views; gradients are summed in the views' order, then Adam moves everything once.

With a team, views are dealt out to its processes in turn: in round j, process r makes view j * size + r, and what the
round brought is added in that order everywhere. So the sum has the same bits for any number of processes, one included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from splatcli.gaussians import Gaussians
from splatcli.native.backend import Backend
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.memory import MemoryBudget
from splatcli.rasterizer.rendering import backend_for
from splatcli.rasterizer.step_inputs import DensifyStats, StepInputs
from splatcli.rasterizer.train_step import TrainStepPipeline, total_loss

#: Numbers that the gradient of each group begins at a multiple of: what vector loads ask of the memory, 64 bytes.
_ALIGNED = 16


class Team(Protocol):
    """Processes that make one step together, as the engine sees them (splatcli.distributed.World is one).

    rank: this process, 0 to size - 1.
    """

    rank: int
    size: int

    def tell(self, what: str, numbers: Sequence[float], problem: Exception | None = None) -> list[list[float]]:
        """The ``numbers`` of every rank, by rank. Raises on all of them when one has a ``problem`` or does not come."""
        ...

    def gather(self, own: Tensor) -> list[Tensor]:
        """The tensors of every rank, all of one shape, by rank."""
        ...

    def add_in_order(self, total: Tensor, own: Tensor, count: int) -> None:
        """Adds the ``own`` [L] of the first ``count`` ranks to ``total`` [L], one after the other; L divides by size.

        Each rank gets a part of the sum; complete() brings the parts together.
        """
        ...

    def complete(self, total: Tensor) -> None:
        """Fills ``total`` [L] on every rank with the parts of all."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step on several views tells, view by view in their order.

    losses: of each view. pairs: (Gaussian, tile) pairs of the fullest one.
    slopes: gradients of each view's parameters, see apply_view_grads(); None where nothing is asked for.
    """

    losses: list[float]
    pairs: int
    slopes: list[Tensor] | None


class BatchEngine:
    """Makes steps on several views, on any device that has kernels; each is done when step() returns.

    team: the processes that share the views; None: this one makes them all.
    """

    def __init__(self, backend: Backend, *, budget: MemoryBudget | None = None, team: Team | None = None) -> None:
        self._stages = TrainStepPipeline(backend, budget)
        self.team = team
        self._means = torch.zeros(2, dtype=torch.float64, device=backend.device)
        self._own: FlatSums | None = None
        self._total: FlatSums | None = None

    def step(
        self, gaussians: Gaussians, adam: AdamState, views: int, inputs_of: Callable[[int], StepInputs]
    ) -> Outcome:
        """One step of Adam along the mean gradient of ``views`` views, and the sum of their statistics.

        views: at least as many as the team has processes.
        inputs_of: what to make of view i, 0 to ``views`` - 1; asked for this process' views only. Everything but
            camera, target and what belongs to them must be the same in all.
        """
        rank, size = (0, 1) if self.team is None else (self.team.rank, self.team.size)
        if views < size:
            raise ValueError(f"{views} views are too few for {size} processes")
        own, total = self._buffers(gaussians)
        total.flat.zero_()
        told: list[list[float]] = []
        slopes: list[Tensor] = []
        shared: StepInputs | None = None
        for first in range(0, views, size):
            present = min(size, views - first)
            numbers, problem = [0.0, 0.0], None
            try:
                if rank < present:
                    inputs = inputs_of(first + rank)
                    shared = shared or inputs
                    numbers = self._make(gaussians, adam, inputs, own)
            except Exception as error:
                if self.team is None:
                    raise
                problem = error
            told += self._told(numbers, problem)[:present]
            self._add(total, own, present)
            if shared is not None and shared.view_params is not None:
                slopes += self._gathered(self._stages.slopes)[:present]
        assert shared is not None
        if self.team is not None:
            self.team.complete(total.flat)
        move(self._stages, gaussians, adam, total, views, shared)
        return Outcome([loss for loss, _ in told], int(max(pairs for _, pairs in told)), slopes or None)

    def _make(self, gaussians: Gaussians, adam: AdamState, inputs: StepInputs, own: FlatSums) -> list[float]:
        """Loss and pairs of a view, whose gradients and statistics fill ``own``."""
        own.stats.grad2d.zero_()
        own.stats.count.zero_()
        seen = replace(inputs, stats=None if inputs.stats is None else own.stats)
        stages = self._stages
        deferred = stages.backend.deferred
        means = self._means if deferred else None
        job = stages.run(gaussians, adam, adam.step + 1, seen, means=means, gradients=own.gradients)
        l1, ssim = self._means.tolist() if deferred else (job.l1, job.ssim)
        depth = 0.0 if inputs.depth is None else float(stages.depth_term)
        return [total_loss(inputs.ssim_lambda, l1, ssim) + depth, float(stages.frame.native.pair_bound)]

    def _told(self, numbers: list[float], problem: Exception | None) -> list[list[float]]:
        return [numbers] if self.team is None else self.team.tell("a view", numbers, problem)

    def _add(self, total: FlatSums, own: FlatSums, present: int) -> None:
        if self.team is None:
            total.flat += own.flat
        else:
            self.team.add_in_order(total.flat, own.flat, present)

    def _gathered(self, own: Tensor) -> list[Tensor]:
        return [own.cpu().clone()] if self.team is None else self.team.gather(own.cpu())

    def _buffers(self, gaussians: Gaussians) -> tuple[FlatSums, FlatSums]:
        """Room for a view's gradients and for their sum; the same as in the last step unless rows came or went."""
        if self._own is None or self._total is None or not self._own.fits(gaussians):
            self._own = self._total = None  # before their successors are made
            shares = 1 if self.team is None else self.team.size
            self._own, self._total = FlatSums(gaussians, shares), FlatSums(gaussians, shares)
        return self._own, self._total


class FlatSums:
    """Gradients of all groups and growth statistics in one tensor ``flat`` [L], to be exchanged in one go."""

    def __init__(self, like: Gaussians, shares: int = 1) -> None:
        """shares: L is a multiple of so many."""
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
        """Whether it was made for as many numbers."""
        return self.gradients.shN.shape == gaussians.shN.shape and self.flat.device == gaussians.device


def move(
    stages: TrainStepPipeline, gaussians: Gaussians, adam: AdamState, total: FlatSums, views: int, shared: StepInputs
) -> None:
    """Adam along the mean of ``views`` gradients, whose sum is ``total``; the statistics are those of as many steps.

    shared: the inputs of any of the views, which differ in nothing that matters here.
    """
    if shared.stats is not None:
        shared.stats.grad2d += total.stats.grad2d
        shared.stats.count += total.stats.count
    for _, gradient in total.gradients.items():
        gradient /= views
    adam.flush(gaussians, shared.lrs["shN"])
    stages.apply(gaussians, total.gradients, adam, shared)
    adam.step += 1
    adam.rest_steps.fill_(adam.step)
    if shared.regularisation.noise > 0.0:
        stages.noise(gaussians, adam.step, shared)


def batch_engine_for(device: torch.device, budget: MemoryBudget | None = None, team: Team | None = None) -> BatchEngine:
    """The engine of a device. Raises ResourceError where there are no kernels for it, or no compiler."""
    return BatchEngine(backend_for(device), budget=budget, team=team)
