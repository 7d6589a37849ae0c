"""Pace: how many steps, with how many Gaussians, a given time has room for; measured on the scene before the run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from splatcli.config import Config
from splatcli.gaussians import Gaussians
from splatcli.raster.adam import AdamState
from splatcli.raster.stats import GrowthStats
from splatcli.raster.stepping import StepEngine, StepInputs
from splatcli.scene.scene import Scene
from splatcli.train.lr import learning_rates
from splatcli.train.targets import Targets

#: Gaussians a step: a run so short that it has no time to place more is better off with more steps.
GAUSSIANS_PER_STEP = 20

#: Growth is fast first: on average over a run this part of the last Gaussians is there (see DefaultStrategy).
MEAN_SHARE = 0.8

#: Of the time that is left, steps are planned for this part: the machine may be slower later.
PLANNED = 0.93

#: A run has at least so many steps, whatever the time; below it nothing can be recognised.
FEWEST_STEPS = 100

#: Steps that are timed for each of two numbers of Gaussians, after as many that are not.
_TIMED = 5


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of a step: ``fixed`` for the image, and ``each`` for every Gaussian."""

    fixed: float
    each: float

    def plan(self, seconds: float, start: int, cap: int | None) -> tuple[int, int]:
        """(steps, most Gaussians) that fill ``seconds``. start: Gaussians at first. cap: never more than these."""
        count = max(start, 1)
        for _ in range(100):  # steps fall with the count and the count grows with the steps: halfway, until it stands
            steps = self._steps(seconds, count)
            wanted = max(start, GAUSSIANS_PER_STEP * steps)
            if cap is not None:
                wanted = min(wanted, cap)
            if abs(wanted - count) <= 1:
                count = wanted
                break
            count = (count + wanted) // 2
        return self._steps(seconds, count), count

    def _steps(self, seconds: float, count: int) -> int:
        return max(FEWEST_STEPS, int(seconds / (self.fixed + MEAN_SHARE * self.each * count)))


def measure_pace(
    config: Config,
    scene: Scene,
    gaussians: Gaussians,
    engine: StepEngine,
    clock: Callable[[], float] = time.perf_counter,
) -> Pace:
    """Times steps with ``gaussians`` and with four times as many smaller ones, on their device; changes nothing."""
    targets = Targets(scene, gaussians.device, depth_lambda=config.depth_lambda)
    views = [scene.train[round(k * (len(scene.train) - 1) / _TIMED)] for k in range(_TIMED)]

    def seconds(some: Gaussians) -> float:
        adam, stats = AdamState.zeros_like(some), GrowthStats.zeros(len(some), some.device)
        lrs = learning_rates(config.optim, config.schedule, 1e-6, config.schedule.lr_steps)
        background = torch.zeros(3, device=some.device)
        spent = 0.0
        for turn in range(2):
            inputs = [
                StepInputs(
                    scene.cameras[view],
                    target.pixels,
                    lrs,
                    some.sh_degree,
                    background,
                    config.train.ssim_lambda,
                    config.train.antialiased,
                    stats,
                    target.hidden,
                    depth=target.depth,
                )
                for view, target in ((view, targets.load(view)) for view in views)
            ]
            started = clock()
            for one in inputs:
                engine.submit(some, adam, one)
            engine.drain()
            spent = clock() - started if turn else 0.0
        return spent / _TIMED

    few = gaussians.detach_clone()
    many = _crowded(gaussians)
    fast, slow = seconds(few), seconds(many)
    each = max(0.0, (slow - fast) / max(1, len(many) - len(few)))
    return Pace(max(1e-6, fast - each * len(few)), each)


def _crowded(gaussians: Gaussians) -> Gaussians:
    """Four Gaussians for each, half as far across and apart by as much: the same surfaces, more finely covered."""
    offsets = torch.tensor([[1.0, 1.0, 1.0], [1.0, -1.0, -1.0], [-1.0, 1.0, -1.0], [-1.0, -1.0, 1.0]])
    copies = gaussians.map(lambda t: t.detach().repeat(4, *[1] * (t.dim() - 1)))
    shift: Tensor = offsets.to(gaussians.means).repeat_interleave(len(gaussians), dim=0)
    copies.means += 0.5 * shift * copies.log_scales.exp()
    copies.log_scales -= math.log(2.0)
    return copies


def seconds_of(text: str) -> float:
    """Seconds of ``90``, ``60s``, ``5m``, ``1.5h`` or ``2d``. Raises ValueError."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    number, unit = (text[:-1], text[-1:].lower()) if text[-1:].lower() in units else (text, "s")
    value = float(number) * units[unit]
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{text!r} is no length of time")
    return value
