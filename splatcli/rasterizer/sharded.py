"""ShardedEngine: steps and pictures by processes of which each holds some of the Gaussians.

A round has a view for each process. All project their own Gaussians for all views of the round; the records of what a
view sees go to the process that has it, which blends them and takes the loss; the sums of their gradients come back.
Everybody adds what its own Gaussians get in the order of the views and moves them: with the bits of one process that
holds all (rasterizer/shards.py), for whatever is summed, each sum is made where it always was, in its order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from splatcli.gaussians import Gaussians
from splatcli.native import abi
from splatcli.native.backend import Backend
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.batch import FlatSums, Outcome, Team, move
from splatcli.rasterizer.context import RasterContext, view_of
from splatcli.rasterizer.memory import MemoryBudget
from splatcli.rasterizer.rendering import backend_for
from splatcli.rasterizer.shards import RETURNED, SENT, Seen, fill_frame, returned_sums, visible_records
from splatcli.rasterizer.step_inputs import StepInputs
from splatcli.rasterizer.train_step import TrainStepPipeline, total_loss
from splatcli.scene.camera import Camera


class ShardTeam(Team, Protocol):
    """Processes of which each holds some of the Gaussians."""

    def exchange_rows(
        self, rows: Tensor, counts: Sequence[int], problem: Exception | None = None
    ) -> tuple[Tensor, list[int]]:
        """The first ``counts[0]`` of ``rows`` [V, width] go to process 0, and so on; (what came, how much from each).

        Raises on all of them when one has a ``problem``, sends what does not arrive, or does not come.
        """
        ...


class ShardedEngine:
    """Makes steps on several views, on any device that has kernels; each is done when step() returns.

    team: the processes; each hands in its own rows, and calls the methods as often as the others.
    """

    def __init__(self, backend: Backend, team: ShardTeam, *, budget: MemoryBudget | None = None) -> None:
        self.team = team
        self._budget = budget
        self._stages = TrainStepPipeline(backend, budget)
        #: The frame that this process' Gaussians are projected with, for one view after another.
        self._projection = RasterContext(backend, budget)
        self._means = torch.zeros(2, dtype=torch.float64, device=backend.device)
        self._own: FlatSums | None = None
        self._total: FlatSums | None = None

    def step(
        self,
        gaussians: Gaussians,
        adam: AdamState,
        cameras: Sequence[Camera],
        inputs_of: Callable[[int], StepInputs],
    ) -> Outcome:
        """One step of Adam along the mean gradient of the views of ``cameras``, and the sum of their statistics.

        gaussians, adam: this process' rows. cameras: at least as many as there are processes, the same in all.
        inputs_of: what to make of view i; asked for this process' views only, which process r has at r, r + size, ...
            Everything but camera, target and what belongs to them must be the same in all; no pose is trained.
        """
        rank, size = self.team.rank, self.team.size
        if len(cameras) < size:
            raise ValueError(f"{len(cameras)} views are too few for {size} processes")
        own, total = self._buffers(gaussians)
        total.flat.zero_()
        told: list[list[float]] = []
        slopes: list[Tensor] = []
        shared: StepInputs | None = None
        for first in range(0, len(cameras), size):
            group = cameras[first : first + size]
            inputs: StepInputs | None = None
            problem: Exception | None = None
            try:
                if rank < len(group):
                    inputs = inputs_of(first + rank)
            except Exception as error:
                problem = error
            shared = shared or inputs
            seen, records, counts = self._meet(gaussians, self._views(gaussians, group, shared), problem)
            numbers, sums, counts = self._answer(inputs, records, counts)
            told += numbers[: len(group)]
            assert shared is not None
            for view, returned in zip(seen, torch.split(sums, counts), strict=False):
                self._gradients(view, returned, gaussians, shared, own)
                total.flat += own.flat
            del records, sums
            if shared.view_params is not None:
                slopes += self.team.gather(self._stages.slopes.cpu())[: len(group)]
        assert shared is not None
        move(self._stages, gaussians, adam, total, len(cameras), shared)
        return Outcome([loss for loss, _ in told], int(max(pairs for _, pairs in told)), slopes or None)

    @torch.no_grad()
    def render(
        self, gaussians: Gaussians, cameras: Sequence[Camera], *, sh_degree: int, background: Tensor, antialiased: bool
    ) -> tuple[Tensor | None, Exception | None]:
        """(image [H, W, 3] of this process' camera, what went wrong with it and is not known elsewhere).

        cameras: for the first so many processes; the others get no image.
        """
        rank, backend = self.team.rank, self._stages.backend
        views = [view_of(camera, sh_degree=sh_degree, antialiased=antialiased, with_depth=False) for camera in cameras]
        _, records, _ = self._meet(gaussians, views, None)
        if rank >= len(views):
            return None, None
        view, frame = views[rank], RasterContext(backend, self._budget, slack=0.0)
        image = background.new_empty(view.height, view.width, 3)
        try:
            arrays = fill_frame(frame, records)
            frame.bin(view, arrays, with_rows=False)
            frame.blend(view, background, image, background.new_empty(view.height, view.width), None)
        except Exception as error:
            return None, error
        return image, None

    def _views(self, gaussians: Gaussians, cameras: Sequence[Camera], shared: StepInputs | None) -> list[abi.View]:
        """The views of a round, whoever has them; none where this process has failed before its first one."""
        return [] if shared is None else [self._stages.view(gaussians, camera, shared) for camera in cameras]

    def _meet(
        self, gaussians: Gaussians, views: Sequence[abi.View], problem: Exception | None
    ) -> tuple[list[Seen], Tensor, list[int]]:
        """Projects for all views of a round; (what is left to know of each, what this process' view sees, from whom).

        problem: what has gone wrong in this process before; then it is raised in all.
        """
        frame, size = self._projection, self.team.size
        seen: list[Seen] = []
        sent = [gaussians.means.new_zeros(0, SENT)]
        try:
            for view in views:
                arrays = frame.project(view, gaussians)
                records, slots = visible_records(frame, arrays)
                seen.append(Seen.of(frame, view, arrays, slots))
                sent.append(records)
            together = torch.cat(sent)
        except Exception as error:
            problem, together = problem or error, sent[0]
        counts = [len(view.slots) for view in seen] + [0] * (size - len(seen))
        del sent
        return seen, *self.team.exchange_rows(together, counts, problem)

    def _answer(
        self, inputs: StepInputs | None, records: Tensor, counts: list[int]
    ) -> tuple[list[list[float]], Tensor, list[int]]:
        """Draws this process' view, if it has one; ([loss, pairs] of all; what comes back for own records; by view)."""
        numbers, sums, problem = [0.0, 0.0], records.new_zeros(0, RETURNED), None
        try:
            if inputs is not None:
                numbers, sums = self._compared(inputs, records)
        except Exception as error:
            problem = error
        told = self.team.tell("a view", numbers, problem)
        return told, *self.team.exchange_rows(sums, counts)

    def _compared(self, inputs: StepInputs, records: Tensor) -> tuple[list[float], Tensor]:
        """([loss, pairs] of a view; [V, RETURNED] what goes back for its ``records`` [V, SENT])."""
        stages, camera = self._stages, inputs.camera
        known = inputs.depth is not None
        view = view_of(camera, sh_degree=inputs.sh_degree, antialiased=inputs.antialiased, with_depth=known)
        arrays = fill_frame(stages.frame, records)
        deferred = stages.backend.deferred
        job = stages.compare(view, arrays, inputs, means=self._means if deferred else None)
        l1, ssim = self._means.tolist() if deferred else (job.l1, job.ssim)
        depth = float(stages.depth_term) if known else 0.0
        loss = total_loss(inputs.ssim_lambda, l1, ssim) + depth
        return [loss, float(stages.frame.native.pair_bound)], returned_sums(stages.frame, len(records))

    def _gradients(self, view: Seen, returned: Tensor, gaussians: Gaussians, shared: StepInputs, own: FlatSums) -> None:
        """Fills ``own`` with what a view wants of this process' Gaussians, and what it tells of them."""
        frame = self._projection
        own.stats.grad2d.zero_()
        own.stats.count.zero_()
        stats = None if shared.stats is None else own.stats
        view.recall(frame, returned)
        frame.native.with_abs = shared.absgrad and stats is not None
        frame.project_vjp(
            view.view,
            view.arrays,
            gradients=frame.backend.arrays(own.gradients),
            grad2d=None if stats is None else stats.grad2d,
            count=None if stats is None else stats.count,
        )

    def _buffers(self, gaussians: Gaussians) -> tuple[FlatSums, FlatSums]:
        """Room for a view's gradients and for their sum; the same as in the last step unless rows came or went."""
        if self._own is None or self._total is None or not self._own.fits(gaussians):
            self._own = self._total = None  # before their successors are made
            self._own, self._total = FlatSums(gaussians), FlatSums(gaussians)
        return self._own, self._total


def sharded_engine_for(device: torch.device, team: ShardTeam, budget: MemoryBudget | None = None) -> ShardedEngine:
    """The engine of a device. Raises ResourceError where there are no kernels for it, or no compiler."""
    return ShardedEngine(backend_for(device), team, budget=budget)
