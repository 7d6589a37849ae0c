"""Recovery: a run that diverged or ran out of memory returns to its last checkpoint and continues differently.

The state is read from the disk, not from a copy in memory: no memory is held for a case that may never come, the file
is verified, and there always is one, since a run writes a checkpoint before its first step. A JSON file describes a
divergence, so that a person can find its cause.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from splatcli.checkpoint.run_dir import RunDir
from splatcli.checkpoint.state import DatasetInfo
from splatcli.config import Config, with_settings
from splatcli.errors import DivergedError, OutputError, ResourceError, SplatError, as_splat_error
from splatcli.gaussians import Gaussians
from splatcli.train.changed_settings import apply_config
from splatcli.train.events import RolledBack
from splatcli.train.monitor import StepDivergedError, nonfinite_rows, state_tensors
from splatcli.train.sampler import ViewSampler
from splatcli.train.schedule import learning_rates
from splatcli.train.sharding import shard_of
from splatcli.train.state import Placement, TrainState

_log = logging.getLogger(__name__)

#: Rows with a NaN or infinity that the report shows.
ROWS = 5

#: Factor of the learning rate of the means after a divergence.
SLOWER = 0.5

#: After running out of memory the cap is this part of the Gaussians that a step was done with: views differ in the
#: memory they take.
FEWER = 0.9


@dataclass(frozen=True, slots=True)
class RollbackPlan:
    """The part of the failed state that a rollback needs: its memory is freed before the older state is read."""

    cause: str
    what: str
    step: int
    count: int
    most_gaussians: int
    epoch: int
    config: Config
    dataset: DatasetInfo
    #: The name of the caller's loss, see TrainState.
    loss: str | None
    placement: Placement


class Recovery:
    """Counts the rollbacks of a run, and ends the run when there were too many.

    rollbacks: so far, by cause: "diverged" and "memory". Each process starts at zero.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self.rollbacks = {"diverged": 0, "memory": 0}

    def plan(self, failure: Exception, state: TrainState, *, most_gaussians: int) -> RollbackPlan:
        """Decide on the rollback after ``failure``; write the report of a divergence into the run folder.

        most_gaussians: that a step was done with in this process; with 0, growth is not the cause of a lack of memory,
            and a person has to decide.
        Raises the final error when no rollback can help.
        """
        problem = as_splat_error(failure)
        cause = "diverged" if isinstance(problem, DivergedError) else "memory"
        report = self._report(problem, state) if isinstance(problem, DivergedError) else None
        allowed = state.config.guard.max_rollbacks
        if self.rollbacks[cause] >= allowed or (cause == "memory" and not most_gaussians):
            raise self._final_error(problem, state, report)
        self.rollbacks[cause] += 1
        return RollbackPlan(
            cause=cause,
            what=problem.what,
            step=state.step,
            count=state.count,
            most_gaussians=most_gaussians,
            epoch=state.sampler.epoch,
            config=state.config,
            dataset=state.dataset,
            loss=state.loss,
            placement=state.placement,
        )

    def restore(self, plan: RollbackPlan) -> tuple[TrainState, RolledBack]:
        """Return the state to continue from. Raises ResourceError when that cannot be read or does not fit either."""
        checkpoint = self.run_dir.newest()
        if checkpoint is None:
            raise ResourceError(f"{plan.what}; and there is no sound checkpoint to go back to", where=self.run_dir.path)
        # A cap below a count that did fit. If the checkpoint has more Gaussians, the most transparent ones are removed.
        cap = max(1, math.floor(FEWER * min(plan.count, plan.most_gaussians))) if plan.cause == "memory" else None
        before = len(checkpoint.gaussians)
        try:
            kept = None if cap is None or cap >= before else most_opaque_rows(checkpoint.gaussians, cap)
            state = shard_of(checkpoint, plan.placement, kept)
            apply_config(state, plan.config)  # includes changes since this checkpoint was written
        except (RuntimeError, MemoryError) as error:  # a GPU that has failed, or is full for good
            raise ResourceError(
                f"{plan.what}; and the last checkpoint does not fit either: {as_splat_error(error).what}",
                where=self.run_dir.path,
                remedy=f"splat resume {self.run_dir.path} goes on from step {checkpoint.step} when the device is free",
            ) from None
        state.dataset, state.loss = plan.dataset, plan.loss
        # Another order of views, so that the same steps do not fail again.
        skipped, seed = state.sampler.skipped, state.config.train.seed
        state.sampler = ViewSampler(len(state.train), seed, epoch=plan.epoch + 1, skipped=skipped)
        text = _lower_learning_rate(state) if cap is None else _lower_cap(state, plan, cap, before)
        event = RolledBack(state.step, plan.step, plan.cause, f"{plan.what}; {text}", state.count)
        self._rewind(state, event)
        return state, event

    def _rewind(self, state: TrainState, event: RolledBack) -> None:
        """Rewind the run folder to the older state; a folder that cannot be written only gives a warning."""
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

    def _final_error(self, problem: SplatError, state: TrainState, report: str | None) -> SplatError:
        """Return the error that ends the run, with a remedy."""
        if isinstance(problem, DivergedError):
            times = self.rollbacks["diverged"]
            again = f" (the run went back {times} times before)" if times else ""
            seen = f"; {report} has the details" if report else ""
            return DivergedError(
                f"{problem.what}{again}",
                where=problem.where,
                remedy=f"{self._slower(state)}; check the poses and the scene's scale{seen}",
            )
        count = state.count
        return ResourceError(
            f"{problem.what} (at step {state.step}, with {count:,} Gaussians)",
            where=problem.where,
            remedy=problem.remedy or f"--cap-max {math.floor(FEWER * count)}, or smaller images (-r)",
        )

    def _slower(self, state: TrainState) -> str:
        """Return how to try smaller steps; a run that ends before its first step leaves nothing to resume."""
        run, rate = self.run_dir.path, f"{0.5 * state.config.optim.means_lr:.2g}"
        if state.loss is not None:
            check = f"check that {state.loss}() gives finite numbers"
            again = f"splatcli.Trainer.resume({str(run)!r}, loss=..., means_lr={rate}) tries smaller steps"
            return check if state.step == 0 else f"{check}; {again} from the last checkpoint"
        if state.step == 0:
            return f"--set optim.means_lr={rate} takes smaller steps"
        return f"splat resume {run} --set optim.means_lr={rate} tries smaller steps from the last checkpoint"


def _lower_learning_rate(state: TrainState) -> str:
    optim = state.config.optim
    rate, final = SLOWER * optim.means_lr, SLOWER * optim.means_lr_final
    state.config = with_settings(state.config, {"optim.means_lr": rate, "optim.means_lr_final": final})
    return f"going on with optim.means_lr = {rate:.3g} and the views in another order"


def _lower_cap(state: TrainState, plan: RollbackPlan, cap: int, before: int) -> str:
    state.config = with_settings(state.config, {"strategy.cap_max": cap})
    text = f"{plan.count:,} Gaussians were too many, going on with strategy.cap_max = {cap}"
    gone = before - state.count
    return f"{text} and without the {gone:,} most transparent ones" if gone else text


def most_opaque_rows(gaussians: Gaussians, count: int) -> Tensor:
    """Return [count], the rows of the most opaque Gaussians in ascending order; of equal ones the first."""
    order = torch.sort(gaussians.logit_opacities, descending=True, stable=True).indices[:count]
    return order.sort().values


def divergence_report(problem: DivergedError, state: TrainState) -> dict[str, Any]:
    """Return step, view, learning rates, and of each tensor its finite extremes and first rows that are not finite.

    NaN and infinities are the strings "nan", "inf" and "-inf".
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
        "tensors": {name: _tensor_report(tensor) for name, tensor in state_tensors(state.gaussians, state.adam)},
    }


def _tensor_report(tensor: Tensor) -> dict[str, Any]:
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
