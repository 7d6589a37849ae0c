"""What is known of a divergence, as JSON for a person to find out why."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from splatcli.errors import DivergedError
from splatcli.train.failures import StepDivergedError
from splatcli.train.lr import learning_rates
from splatcli.train.monitor import nonfinite_rows, state_tensors
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
