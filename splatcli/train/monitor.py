"""Monitors of a run: losses, finiteness of the state, densification, and quality on fixed views.

Checks raise StepDivergedError, after which the run rolls back. Alarms only report. A run recovers from divergence and
exhausted memory (is_recoverable).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from splatcli.config import GuardConfig
from splatcli.errors import DivergedError, is_out_of_memory
from splatcli.gaussians import Gaussians
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.offload import ROWS
from splatcli.rasterizer.step_inputs import Shard
from splatcli.train.events import Alarmed, Probed, Refined

#: Quality has to stay low for this many steps before an alarm: a single low figure must not raise one.
LOW_FOR = 300

#: The fullest view of this many steps is compared with that of as many steps before. An alarm needs this ratio of tile
#: intersections per Gaussian.
INTERSECTION_WINDOW = 100
INTERSECTION_JUMP = 20.0


class StepDivergedError(DivergedError):
    """A divergence that is found at one step.

    view: the view of that step; None where no single one is the cause. loss: None where it is finite.
    """

    def __init__(self, what: str, *, step: int, view: str | None = None, loss: float | None = None) -> None:
        super().__init__(what, where=f"step {step}")
        self.step = step
        self.view = view
        self.loss = loss


def is_recoverable(error: BaseException) -> bool:
    """Return whether a rollback to an older state may help."""
    return isinstance(error, DivergedError) or is_out_of_memory(error)


def check_loss(step: int, view: str, loss: float, gaussians: Gaussians, shard: Shard | None) -> None:
    """Raise StepDivergedError when ``loss`` is NaN or infinite; its message names the parameters that are not finite.

    shard: the rows of all that ``gaussians`` are.
    """
    if not math.isfinite(loss):
        raise StepDivergedError(
            f"the loss is {loss} at step {step} on view {view!r}; {_broken(gaussians, shard)}",
            step=step,
            view=view,
            loss=loss,
        )


def check_count(step: int, count: int) -> None:
    """Raise StepDivergedError when density control has left no Gaussian."""
    if count == 0:
        raise StepDivergedError("no Gaussian is left: all became transparent or huge", step=step)


class IntersectionMonitor:
    """Detects exploding scales by the tile intersections per Gaussian in the fullest views of a window of steps."""

    def __init__(self) -> None:
        self._before = 0.0
        self._now = 0.0
        self._window_end = INTERSECTION_WINDOW

    def check(self, step: int, isects: int, count: int) -> Alarmed | None:
        """Return an alarm when a window has many times the intersections per Gaussian of the window before.

        isects: tile intersections of the step, 0 where the engine does not report them. count: Gaussians.
        """
        self._now = max(self._now, isects / max(1, count))
        if step < self._window_end:
            return None
        before, now = self._before, self._now
        self._before, self._now, self._window_end = now, 0.0, step + INTERSECTION_WINDOW
        if not 0.0 < INTERSECTION_JUMP * before < now:
            return None
        text = f"a Gaussian covers {now:.0f} tiles of the fullest view on average, {before:.1f} before: scales explode"
        return Alarmed(
            step, "intersections", f"{text}; smaller steps may help (optim.log_scales_lr), and memory will run out"
        )


class FiniteMonitor:
    """Checks at intervals that parameters and moments are finite, without a wait for a GPU.

    A check is one pass over the numbers: the extremes of each tensor, which are NaN if any value is. Its result is read
    at the next check on a GPU, at once elsewhere. No engine keeps gradients; one that is not finite shows in the
    moments after its step.
    """

    def __init__(self) -> None:
        self._pending: tuple[int, Tensor, torch.cuda.Event | None] | None = None

    def check(self, step: int, gaussians: Gaussians, adam: AdamState) -> None:
        """Start a check of the state after ``step``. Raises StepDivergedError when the check before it failed."""
        self.finish()
        device = gaussians.device
        extremes = [_extremes(t.detach(), device) for _, t in state_tensors(gaussians, adam) if t.numel()]
        if not extremes:
            return
        stacked = torch.stack(extremes)
        if stacked.device.type == "cuda":
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            stacked = torch.empty_like(stacked, device="cpu", pin_memory=True).copy_(stacked, non_blocking=True)
            done.record(torch.cuda.current_stream(device))
            self._pending = (step, stacked, done)
        else:
            self._pending = (step, stacked, None)
            self.finish()

    def finish(self) -> None:
        """Read the result of the last check. Raises StepDivergedError when a number was NaN or infinite."""
        if self._pending is None:
            return
        (step, extremes, done), self._pending = self._pending, None
        if done is not None:
            done.synchronize()
        if not bool(extremes.isfinite().all()):
            raise StepDivergedError(f"parameters or moments are not finite after step {step}", step=step)


def _extremes(tensor: Tensor, device: torch.device) -> Tensor:
    """Return [2], the least and the largest number of a tensor, on ``device``; a tensor elsewhere is copied in pieces.

    Pending steps may change it. Copies to a GPU are ordered after them; reads of the host are not.
    """
    if tensor.device == device:
        return torch.stack(torch.aminmax(tensor))
    pieces = [torch.stack(torch.aminmax(piece.to(device, non_blocking=True))) for piece in torch.split(tensor, ROWS)]
    return torch.stack(torch.aminmax(torch.stack(pieces)))


def state_tensors(gaussians: Gaussians, adam: AdamState) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of parameters and moments; the moments' names are ``exp_avg.means`` and the like."""
    yield from gaussians.items()
    for moment in ("exp_avg", "exp_avg_sq"):
        yield from ((f"{moment}.{name}", tensor) for name, tensor in getattr(adam, moment).items())


def nonfinite_rows(tensor: Tensor) -> Tensor:
    """Return [R], the indices of rows with a NaN or infinity."""
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.int64)
    bad = ~tensor.detach().reshape(len(tensor), -1).isfinite().all(dim=1)
    return bad.nonzero().squeeze(1)


def _broken(gaussians: Gaussians, shard: Shard | None) -> str:
    before, of = (0, "") if shard is None else (shard.first, f" of rank {shard.rank}")
    rows = {name: nonfinite_rows(tensor) for name, tensor in gaussians.items()}
    found = [f"{name} of {len(r)} Gaussians (first: {before + int(r[0])})" for name, r in rows.items() if len(r)]
    return f"not finite: {', '.join(found)}" if found else f"all {len(gaussians)} Gaussians{of} are finite"


@dataclass(slots=True)
class QualityMonitor:
    """Raises an alarm when the probe views' PSNR falls far below its best value and stays there without a reset.

    It starts anew with each process: no checkpoint holds it.
    """

    config: GuardConfig
    best: float = -math.inf
    low_since: int | None = None
    _reset_at: int | None = None
    _alarmed: bool = False

    def reset(self, step: int) -> None:
        """Ignore the figures soon after ``step``, in which all opacities were lowered."""
        self._reset_at, self.low_since = step, None

    def check(self, probe: Probed) -> Alarmed | None:
        """Return an alarm, once for each time that quality falls and stays low."""
        if self._reset_at is not None and probe.step <= self._reset_at + self.config.reset_window:
            return None
        if math.isnan(probe.psnr) and self.best == -math.inf:
            return None  # masks hide all probe views
        # Written so that NaN counts as low.
        if probe.psnr >= self.best - self.config.psnr_drop:
            self.best, self.low_since, self._alarmed = max(self.best, probe.psnr), None, False
            return None
        if self.low_since is None:
            self.low_since = probe.step
        if self._alarmed or probe.step - self.low_since < LOW_FOR:
            return None
        self._alarmed = True
        return Alarmed(
            probe.step,
            "psnr",
            f"train PSNR is {probe.psnr:.2f} dB on the probe views, it was {self.best:.2f} dB; low since step "
            f"{self.low_since}; a lower learning rate may help: splat resume --set optim.means_lr=...",
        )


def check_refinement(event: Refined, before: int, config: GuardConfig) -> Alarmed | None:
    """Return an alarm when one refinement removed more than a part ``prune_jump`` of the ``before`` Gaussians.

    Growth raises none: early refinements may double a small model, and never do more.
    """
    if not event.pruned > config.prune_jump * before:
        return None
    return Alarmed(
        event.step,
        "count",
        f"{event.pruned:,} of {before:,} Gaussians were removed at once; check the scene's scale and poses, or lower "
        "strategy.prune_opacity",
    )
