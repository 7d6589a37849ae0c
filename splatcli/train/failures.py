"""Failures that a run can survive, told apart: numbers that ran away, and memory that did not suffice."""

from __future__ import annotations

import torch

from splatcli.errors import DivergedError, ResourceError, SplatError

#: What a step raises when memory is short: the rasterizer's budget, torch on a GPU, Python. torch on a CPU raises a
#: plain RuntimeError, see ``is_out_of_memory``.
OUT_OF_MEMORY = (ResourceError, torch.OutOfMemoryError, MemoryError)


class StepDivergedError(DivergedError):
    """A divergence that shows at one step.

    view: the photo of that step, None where no single one is to blame. loss: None where it is a number.
    """

    def __init__(self, what: str, *, step: int, view: str | None = None, loss: float | None = None) -> None:
        super().__init__(what, where=f"step {step}")
        self.step = step
        self.view = view
        self.loss = loss


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller model might not have met this error."""
    if isinstance(error, OUT_OF_MEMORY):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def is_survivable(error: BaseException) -> bool:
    """Whether going back to an older state may help."""
    return isinstance(error, DivergedError) or is_out_of_memory(error)


def as_splat_error(error: BaseException) -> SplatError:
    """``error`` in the form that users see."""
    if isinstance(error, SplatError):
        return error
    what = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ResourceError(f"memory does not suffice: {what}", remedy="use fewer or smaller images (-r), or --cap-max")
