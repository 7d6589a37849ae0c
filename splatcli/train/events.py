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
    """Density control changed the rows; ``num_gaussians`` is the count afterwards."""

    step: int
    cloned: int
    split: int
    pruned: int
    num_gaussians: int


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
class Saved:
    """A checkpoint is on disk, complete."""

    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class Stopped:
    """The last event of a run; ``path`` is the checkpoint that holds its state.

    reason: "finished", "stop-at", or what asked for the stop: "SIGINT" or "SIGTERM".
    """

    step: int
    reason: str
    path: Path


Event = Started | Stepped | Refined | OpacityReset | Evaluated | Saved | Stopped
