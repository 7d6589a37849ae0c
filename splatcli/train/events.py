"""What a trainer tells its caller: one frozen record an event; printing them is the caller's business."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Started:
    """Training begins, or goes on, after ``step`` completed steps."""

    step: int
    iterations: int
    num_gaussians: int
    num_train: int
    num_test: int
    device: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stepped:
    """Step number ``step``, counted from 1, is done."""

    step: int
    loss: float
    num_gaussians: int
    sh_degree: int


@dataclass(frozen=True, slots=True)
class Refined:
    """Density control changed the rows; ``num_gaussians`` is the count afterwards.

    relocated: faded Gaussians that moved onto others.
    """

    step: int
    cloned: int
    split: int
    pruned: int
    num_gaussians: int
    relocated: int = 0


@dataclass(frozen=True, slots=True)
class Capped:
    """Density control has come to the number of Gaussians that the memory has room for; told once."""

    step: int
    num_gaussians: int
    cap: int


@dataclass(frozen=True, slots=True)
class Rescheduled:
    """The run has another length from now on, so that it fills its time."""

    step: int
    iterations: int


@dataclass(frozen=True, slots=True)
class OpacityReset:
    """All opacities were lowered; quality dips and comes back within some hundred steps."""

    step: int


@dataclass(frozen=True, slots=True)
class ViewScore:
    """Quality of one view: PSNR in dB, mean SSIM."""

    name: str
    psnr: float
    ssim: float


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Quality on the held-out views: means over the views, and each view."""

    step: int
    psnr: float
    ssim: float
    num_gaussians: int
    views: list[ViewScore]


@dataclass(frozen=True, slots=True)
class Probed:
    """Quality, PSNR in dB, on the few training views that a run is watched by."""

    step: int
    psnr: float
    num_gaussians: int


@dataclass(frozen=True, slots=True)
class Alarmed:
    """Something looks wrong, and training goes on; ``text`` is a sentence.

    alarm: "psnr" (quality fell and stayed low), "count" (density control changed too much at once), "pairs" (Gaussians
    cover far more tiles than before), "evaluation" (the views could not be scored), "metrics" (lines of metrics.jsonl
    are lost), "space" (the disk may get full).
    """

    step: int
    alarm: str
    text: str


@dataclass(frozen=True, slots=True)
class RolledBack:
    """Training goes on from an older state; ``step`` is that state's, ``from_step`` the one that was reached.

    cause: "diverged" or "memory". text: what happened, and what is different from now on.
    """

    step: int
    from_step: int
    cause: str
    text: str
    num_gaussians: int


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint is on disk, complete."""

    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """A checkpoint could not be written; the older ones are untouched, and training goes on.

    retry_seconds: when the next attempt is made.
    """

    step: int
    text: str
    retry_seconds: float


@dataclass(frozen=True, slots=True)
class Stopped:
    """The last event of a run; ``path`` is the checkpoint that holds its state.

    reason: "finished", "stop-at", "max-time", or what asked for the stop, as "SIGINT" or "SIGTERM".
    """

    step: int
    reason: str
    path: Path


Event = (
    Started
    | Stepped
    | Refined
    | Capped
    | Rescheduled
    | OpacityReset
    | Evaluated
    | Probed
    | Alarmed
    | RolledBack
    | Saved
    | SaveFailed
    | Stopped
)
