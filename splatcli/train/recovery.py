"""Recovery: a run that diverged or ran out of memory returns to its last checkpoint and continues differently.

The state is read from the disk, not from a copy in memory: nothing is held for a case that may never come, what is read
has been verified, and there is always one, since a run writes a checkpoint before its first step. A divergence is
described in a JSON file for a person to find its cause.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from splatcli.checkpoint.run_dir import RunDir
from splatcli.config import Config, with_settings
from splatcli.errors import DivergedError, OutputError, ResourceError, SplatError, as_splat_error
from splatcli.gaussians import Gaussians
from splatcli.rasterizer.offload import TensorStorage
from splatcli.train.events import RolledBack
from splatcli.train.monitor import StepDivergedError, nonfinite_rows, state_tensors
from splatcli.train.sampler import ViewSampler
from splatcli.train.schedule import learning_rates
from splatcli.train.sharding import shard_of
from splatcli.train.state import TrainState

#: Broken rows that are written out.
ROWS = 5


def divergence_report(problem: DivergedError, state: TrainState) -> dict[str, Any]:
    """Step, view, learning rates, and of each tensor its finite extremes and its first broken rows with their values.

    Numbers that JSON has no word for are the strings "nan", "inf" and "-inf".
    """
    step = problem.step if isinstance(problem, StepDivergedError) else state.step
    view = problem.view if isinstance(problem, StepDivergedError) else None
    loss = problem.loss if isinstance(problem, StepDivergedError) else None
    return {
        "what": problem.what,
        "step": step,
        "view": view,
        "loss": None if loss is None else _number(loss),
        "reached_step": state.step,
        "num_gaussians": state.count,
        "first_row": 0 if state.shard is None else state.shard.first,
        "learning_rates": learning_rates(state.config.optim, state.config.schedule, state.dataset.extent, max(1, step)),
        "tensors": {name: _facts(tensor) for name, tensor in state_tensors(state.gaussians, state.adam)},
    }


def _facts(tensor: Tensor) -> dict[str, Any]:
    flat = tensor.detach().reshape(-1)
    finite = flat[flat.isfinite()]
    rows = nonfinite_rows(tensor)
    shown = [tensor[row].reshape(-1).tolist() for row in rows[:ROWS].tolist()]
    return {
        "min": float(finite.min()) if finite.numel() else None,
        "max": float(finite.max()) if finite.numel() else None,
        "broken_rows": len(rows),
        "first": [
            {"row": int(row), "values": [_number(value) for value in values]}
            for row, values in zip(rows[:ROWS].tolist(), shown, strict=True)
        ],
    }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


_log = logging.getLogger(__name__)

#: After a divergence the means move by so much less.
SLOWER = 0.5

#: After running out of memory there may be so many of the Gaussians that a step was done with: views differ in what
#: they take.
FEWER = 0.9


@dataclass(frozen=True, slots=True)
class Plan:
    """What is needed of the state that is given up, so that its tensors can go before those of the older one come."""

    cause: str
    what: str
    step: int
    count: int
    largest: int
    epoch: int
    config: Config
    device: torch.device
    store: TensorStorage
    #: (rank, size) where processes have a part of the rows each.
    place: tuple[int, int] | None


class Recovery:
    """Counts how often a run went back, and gives up when it was too often.

    rollbacks: so far, by cause: "diverged" and "memory". Each process counts anew.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self.rollbacks = {"diverged": 0, "memory": 0}

    def plan(self, failure: Exception, state: TrainState, *, largest: int) -> Plan:
        """How to go on after ``failure``; writes what is known of a divergence into the run folder.

        largest: the most Gaussians that a step was done with in this process; with none, no growth is to blame for a
            lack of memory, and a person has to decide.
        Raises the final error when the run cannot be brought back.
        """
        problem = as_splat_error(failure)
        cause = "diverged" if isinstance(problem, DivergedError) else "memory"
        report = self._report(problem, state) if isinstance(problem, DivergedError) else None
        allowed = state.config.guard.max_rollbacks
        if self.rollbacks[cause] >= allowed or (cause == "memory" and not largest):
            raise self._final(problem, state, report)
        self.rollbacks[cause] += 1
        return Plan(
            cause=cause,
            what=problem.what,
            step=state.step,
            count=state.count,
            largest=largest,
            epoch=state.sampler.epoch,
            config=state.config,
            device=state.gaussians.device,
            store=state.adam.store,
            place=None if state.shard is None else (state.shard.rank, state.shard.size),
        )

    def carry_out(self, plan: Plan) -> tuple[TrainState, RolledBack]:
        """The state to go on from. Raises ResourceError when not even that one can be had."""
        found = self.run_dir.newest()
        if found is None:
            raise ResourceError(f"{plan.what}; and there is no sound checkpoint to go back to", where=self.run_dir.path)
        # A cap below what has been seen to fit; and if there are more Gaussians already, the most transparent ones go.
        cap = max(1, math.floor(FEWER * min(plan.count, plan.largest))) if plan.cause == "memory" else None
        before = len(found.gaussians)
        try:
            kept = None if cap is None or cap >= before else most_opaque(found.gaussians, cap)
            state = shard_of(found, plan.place, plan.device, kept, plan.store)
        except (RuntimeError, MemoryError) as error:  # a GPU that has failed, or is full for good
            raise ResourceError(
                f"{plan.what}; and the last checkpoint does not fit either: {as_splat_error(error).what}",
                where=self.run_dir.path,
                remedy=f"splat resume {self.run_dir.path} goes on from step {found.step} when the device is free again",
            ) from None
        state.config = plan.config  # with what earlier rollbacks changed since this checkpoint was written
        # Views in an order that has not been, so that nothing comes the same way again.
        state.sampler = ViewSampler(len(state.train), state.config.train.seed, epoch=plan.epoch + 1)
        text = _slow_down(state) if cap is None else _shrink(state, plan, cap, before)
        event = RolledBack(state.step, plan.step, plan.cause, f"{plan.what}; {text}", state.count)
        self._note(state, event)
        return state, event

    def _note(self, state: TrainState, event: RolledBack) -> None:
        """Brings the run folder into line with the older state; a folder that refuses is no reason to end."""
        try:
            self.run_dir.rewind(event.step)
            self.run_dir.write_config(state.config)
        except (OutputError, ResourceError) as error:
            _log.warning("%s", error)

    def _report(self, problem: DivergedError, state: TrainState) -> str | None:
        name = f"diverged_{state.step:06d}.json"
        try:
            return str(self.run_dir.write_report(name, divergence_report(problem, state)))
        except (OutputError, ResourceError) as error:
            _log.warning("%s", error)
            return None

    def _final(self, problem: SplatError, state: TrainState, report: str | None) -> SplatError:
        """The error that ends the run, with what a person can do about it."""
        run = self.run_dir.path
        if isinstance(problem, DivergedError):
            times = self.rollbacks["diverged"]
            again = f" (the run went back {times} times before)" if times else ""
            seen = f"; {report} has the details" if report else ""
            return DivergedError(
                f"{problem.what}{again}",
                where=problem.where,
                remedy=f"splat resume {run} --set optim.means_lr={0.5 * state.config.optim.means_lr:.2g} tries smaller "
                f"steps from the last checkpoint; check the poses and the scene's scale{seen}",
            )
        count = state.count
        return ResourceError(
            f"{problem.what} (at step {state.step}, with {count:,} Gaussians)",
            where=problem.where,
            remedy=problem.remedy or f"--cap-max {math.floor(FEWER * count)}, or smaller images (-r)",
        )


def _slow_down(state: TrainState) -> str:
    optim = state.config.optim
    rate, final = SLOWER * optim.means_lr, SLOWER * optim.means_lr_final
    state.config = with_settings(state.config, {"optim.means_lr": rate, "optim.means_lr_final": final})
    return f"going on with optim.means_lr = {rate:.3g} and the views in another order"


def _shrink(state: TrainState, plan: Plan, cap: int, before: int) -> str:
    state.config = with_settings(state.config, {"strategy.cap_max": cap})
    text = f"{plan.count:,} Gaussians were too many, going on with strategy.cap_max = {cap}"
    gone = before - state.count
    return f"{text} and without the {gone:,} most transparent ones" if gone else text


def most_opaque(gaussians: Gaussians, count: int) -> Tensor:
    """[count] the rows of the most opaque Gaussians, in their order; of equal ones the first."""
    order = torch.sort(gaussians.logit_opacities, descending=True, stable=True).indices[:count]
    return order.sort().values
