"""The events that a trainer yields, as frozen records; the caller prints them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from splatcli.train.outlier_views import ViewError


@dataclass(frozen=True, slots=True)
class Started:
    """Training starts or continues after ``step`` completed steps."""

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
    """A refinement changed the rows; ``num_gaussians`` is the count afterwards.

    relocated: transparent Gaussians that were relocated onto others.
    """

    step: int
    cloned: int
    split: int
    pruned: int
    num_gaussians: int
    relocated: int = 0


@dataclass(frozen=True, slots=True)
class Capped:
    """Densification has reached the number of Gaussians that the memory has room for; reported once."""

    step: int
    num_gaussians: int
    cap: int


@dataclass(frozen=True, slots=True)
class ViewsCompared:
    """The training views were compared, and other ones are left out from now on than before.

    skipped: by name, how the views that are left out differ from their images, (difference, of_shift, gain, detail) of
    train/outlier_views.py, largest first. num_train: all training views.
    """

    step: int
    skipped: dict[str, ViewError]
    num_train: int


@dataclass(frozen=True, slots=True)
class Rescheduled:
    """The run has a new length, so that it fills its time."""

    step: int
    iterations: int


@dataclass(frozen=True, slots=True)
class OpacityReset:
    """All opacities were lowered; quality falls and recovers within some hundred steps."""

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
    """Quality, PSNR in dB, on the probe views: a few training views that a run is monitored by."""

    step: int
    psnr: float
    num_gaussians: int


@dataclass(frozen=True, slots=True)
class Alarmed:
    """Something looks wrong, and training continues; ``text`` is a sentence.

    alarm: "psnr" (quality fell and stayed low), "count" (a refinement removed too many Gaussians), "intersections"
    (Gaussians cover far more tiles than before; "pairs" in metrics.jsonl of older versions), "evaluation" (the views
    could not be scored), "exposure" (the brightness of the training images varies), "blur" (training images are
    blurred), "images" (images have changed since the run began), "metrics" (lines of metrics.jsonl are lost), "space"
    (the disk may get full).
    """

    step: int
    alarm: str
    text: str


@dataclass(frozen=True, slots=True)
class RolledBack:
    """Training continues from an older state; ``step`` is that state's, ``from_step`` the one that was reached.

    cause: "diverged" or "memory". text: what happened, and what is different from now on.
    """

    step: int
    from_step: int
    cause: str
    text: str
    num_gaussians: int


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint is complete and on the disk."""

    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """A checkpoint could not be written; the older ones are untouched, and training continues.

    retry_seconds: seconds until the next attempt.
    """

    step: int
    text: str
    retry_seconds: float


@dataclass(frozen=True, slots=True)
class Stopped:
    """The last event of a run; ``path`` is the checkpoint that holds its state.

    reason: "finished", "stop-at", "max-time", or what requested the stop, as "SIGINT" or "SIGTERM".
    """

    step: int
    reason: str
    path: Path


Event = (
    Started
    | Stepped
    | Refined
    | Capped
    | ViewsCompared
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
