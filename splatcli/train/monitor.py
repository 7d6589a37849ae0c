"""Monitors of a run: losses, finiteness of the state, densification, and quality on fixed views.

Checks raise StepDivergedError, after which the run goes back. Alarms only report. A run survives divergence and
exhausted memory (is_survivable).
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


class StepDivergedError(DivergedError):
    """A divergence that shows at one step.

    view: the photo of that step, None where no single one is to blame. loss: None where it is a number.
    """

    def __init__(self, what: str, *, step: int, view: str | None = None, loss: float | None = None) -> None:
        super().__init__(what, where=f"step {step}")
        self.step = step
        self.view = view
        self.loss = loss


def is_survivable(error: BaseException) -> bool:
    """Whether going back to an older state may help."""
    return isinstance(error, DivergedError) or is_out_of_memory(error)


#: Quality has to stay low for so many steps: one view more or less must not raise an alarm.
LOW_FOR = 300


#: The fullest view of so many steps is compared with that of as many before, and has to have so many times the pairs.
PAIRS_WINDOW = 100
PAIRS_JUMP = 20.0


def check_loss(step: int, view: str, loss: float, gaussians: Gaussians, shard: Shard | None = None) -> None:
    """Raises StepDivergedError when ``loss`` is NaN or infinite; its message names the broken groups.

    shard: which of all these Gaussians are.
    """
    if not math.isfinite(loss):
        raise StepDivergedError(
            f"the loss is {loss} at step {step} on view {view!r}; {_broken(gaussians, shard)}",
            step=step,
            view=view,
            loss=loss,
        )


def check_count(step: int, count: int) -> None:
    """Raises StepDivergedError when density control has left nothing to train."""
    if count == 0:
        raise StepDivergedError("no Gaussian is left: all became transparent or huge", step=step)


class PairsWatch:
    """Knows scales that explode by the tiles that Gaussians cover on average in the fullest of the last views."""

    def __init__(self) -> None:
        self._before = 0.0
        self._now = 0.0
        self._until = PAIRS_WINDOW

    def judge(self, step: int, pairs: int, count: int) -> Alarmed | None:
        """An alarm when a window of steps has many times the pairs a Gaussian of the window before.

        pairs: of the step, 0 where the engine does not tell. count: Gaussians.
        """
        self._now = max(self._now, pairs / max(1, count))
        if step < self._until:
            return None
        before, now = self._before, self._now
        self._before, self._now, self._until = now, 0.0, step + PAIRS_WINDOW
        if not 0.0 < PAIRS_JUMP * before < now:
            return None
        text = f"a Gaussian covers {now:.0f} tiles of the fullest view on average, {before:.1f} before: scales explode"
        return Alarmed(step, "pairs", f"{text}; smaller steps may help (optim.log_scales_lr), and memory will run out")


class FiniteWatch:
    """Looks at parameters and moments now and then, without making a GPU wait.

    A look is one pass over the numbers (the extremes of each tensor, which are NaN if any value is); the answer is
    read at the next look on a GPU, at once elsewhere. Gradients are not kept by any engine: one that is not finite
    shows in the moments after its step.
    """

    def __init__(self) -> None:
        self._asked: tuple[int, Tensor, torch.cuda.Event | None] | None = None

    def look(self, step: int, gaussians: Gaussians, adam: AdamState) -> None:
        """Asks about the state after ``step``. Raises StepDivergedError for what is known by now."""
        self.read()
        device = gaussians.device
        extremes = [_extremes(t.detach(), device) for _, t in state_tensors(gaussians, adam) if t.numel()]
        if not extremes:
            return
        found = torch.stack(extremes)
        if found.device.type == "cuda":
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            found = torch.empty_like(found, device="cpu", pin_memory=True).copy_(found, non_blocking=True)
            done.record()
            self._asked = (step, found, done)
        else:
            self._asked = (step, found, None)
            self.read()

    def read(self) -> None:
        """The answer to the last look. Raises StepDivergedError when a number was NaN or infinite."""
        if self._asked is None:
            return
        (step, extremes, done), self._asked = self._asked, None
        if done is not None:
            done.synchronize()
        if not bool(extremes.isfinite().all()):
            raise StepDivergedError(f"parameters or moments are not finite after step {step}", step=step)


def _extremes(tensor: Tensor, device: torch.device) -> Tensor:
    """[2] the least and the largest number of a tensor, on ``device``; what lies elsewhere comes there in pieces.

    Steps may be on their way that change it. Copies to a GPU come after them, what the host reads does not.
    """
    if tensor.device == device:
        return torch.stack(torch.aminmax(tensor))
    pieces = [torch.stack(torch.aminmax(piece.to(device, non_blocking=True))) for piece in torch.split(tensor, ROWS)]
    return torch.stack(torch.aminmax(torch.stack(pieces)))


def state_tensors(gaussians: Gaussians, adam: AdamState) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of parameters and moments; the moments' names are ``exp_avg.means`` and the like."""
    yield from gaussians.items()
    for moment in ("exp_avg", "exp_avg_sq"):
        yield from ((f"{moment}.{name}", tensor) for name, tensor in getattr(adam, moment).items())


def nonfinite_rows(tensor: Tensor) -> Tensor:
    """[R] the indices of rows with a NaN or infinity."""
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
class QualityWatch:
    """Raises an alarm when the probe views' PSNR falls far below the best seen, stays there, and no reset explains it.

    It starts anew with each process: nothing of it is in a checkpoint.
    """

    config: GuardConfig
    best: float = -math.inf
    low_since: int | None = None
    _reset_at: int | None = None
    _alarmed: bool = False

    def reset(self, step: int) -> None:
        """All opacities were lowered after ``step``; what is measured soon after means nothing."""
        self._reset_at, self.low_since = step, None

    def judge(self, probe: Probed) -> Alarmed | None:
        """An alarm, once for each time that quality falls and stays low."""
        if self._reset_at is not None and probe.step <= self._reset_at + self.config.reset_window:
            return None
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
            f"PSNR on the probe views is {probe.psnr:.2f} dB, it was {self.best:.2f} dB; low since step "
            f"{self.low_since}; a lower learning rate may help: splat resume --set optim.means_lr=...",
        )


def judge_refinement(event: Refined, before: int, config: GuardConfig) -> Alarmed | None:
    """An alarm when one refinement removed more than a part ``prune_jump`` of the ``before`` Gaussians.

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
