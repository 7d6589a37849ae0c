"""How the steps of a reconstruction run: random seed, threads, GPU, and who hears of their progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from splatcli.progress import Listener

#: The phases that are reported.
Phase = Literal[
    "frames",
    "upright copies",
    "features",
    "matching",
    "mapping",
    "more frames",
    "more features",
    "more matching",
    "more mapping",
    "matching more",
    "matching again",
    "mapping again",
    "mapping neighbours",
    "mapping as fisheye",
    "lens",
    "triangulation",
    "masks",
]
#: Gets (done, total) of a phase.
Progress = Callable[[int, int], None]


def _nobody(phase: str, done: int, total: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Execution:
    """How pycolmap runs, in the words of its options; made once, and passed to every step.

    listener: gets the progress of each phase. seconds: that each phase took so far, from its start to its last report.
    """

    random_seed: int = 42
    num_threads: int = 1
    use_gpu: bool = False
    listener: Listener = _nobody
    seconds: dict[str, float] = field(default_factory=dict)

    def start(self, phase: Phase) -> Progress:
        """Start a phase, or go on with it; return the callback that takes its progress."""
        since, before = time.monotonic(), self.seconds.get(phase, 0.0)

        def progress(done: int, total: int) -> None:
            self.seconds[phase] = before + time.monotonic() - since
            self.listener(phase, done, total)

        return progress
