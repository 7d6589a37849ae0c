"""Pace: how many steps, with how many Gaussians, a given time has room for; measured, and corrected on the way."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from splatcli.config import Config
from splatcli.gaussians import Gaussians
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.step_inputs import DensifyStats, StepEngine, StepInputs
from splatcli.scene.scene import Scene
from splatcli.train.evaluate import make_renderer, score_views
from splatcli.train.schedule import learning_rates
from splatcli.train.training_images import TrainingImages

#: Gaussians a step: a run so short that it has no time to place more is better off with more steps.
GAUSSIANS_PER_STEP = 25

#: Growth is fast first: on average over a run this part of the last Gaussians is there (see AdcStrategy).
MEAN_SHARE = 0.8

#: Of the time that is left, steps are planned for this part: the machine may be slower later.
PLANNED = 0.97

#: Random points to begin with when their number is to be chosen: enough to find what is there, quick to draw.
RANDOM_POINTS = 4_000

#: The first look at how the plan holds is after this part of the time, each further one after another part of what is
#: left of it then, or of the steps. The first steps tell little of the later ones: random points are large and lie one
#: over the other, and what they become is small.
_FIRST_LOOK, _NEXT_LOOK, _HALF_DONE = 0.04, 0.25, 0.5

#: So near to the end, in parts of all the time, the plan stays.
_TOO_LATE = 0.03

#: A plan that is off by less stays.
_TOLERANCE = 0.05

#: A run has at least so many steps, whatever the time; below it nothing can be recognised.
FEWEST_STEPS = 100

#: Steps that are timed for each of two numbers of Gaussians.
_TIMED = 3

#: Images are halved at first, by at most so many times and not below so many pixels: a coarse step takes a fraction of
#: the time, and tells as much while Gaussians are large. Each size has this part of the run's steps.
MOST_HALVINGS = 2
SMALLEST_SIDE = 64
COARSE_PART = 0.2


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Seconds of a step, by how many times the images' sides are halved: a part of their own, and one a Gaussian.

    fixed, each: [H + 1], of whole images first. A run that has it goes through the sizes from the smallest on, each but
    the last for COARSE_PART of its steps.
    """

    fixed: tuple[float, ...]
    each: tuple[float, ...]

    @property
    def halvings(self) -> int:
        """H."""
        return len(self.fixed) - 1

    def step(self, count: float, part: float = 1.0) -> float:
        """Seconds of a step with ``count`` Gaussians when ``part`` of the run is over."""
        halved = max(0, self.halvings - int(part / COARSE_PART))
        return self.fixed[halved] + self.each[halved] * count

    def mean_step(self, count: float, part: float = 0.0) -> float:
        """The same on average over what comes after ``part``."""
        edges = [COARSE_PART * k for k in range(self.halvings + 1)] + [1.0]
        spans = [(max(part, low), high) for low, high in itertools.pairwise(edges) if high > part]
        return sum((high - low) * self.step(count, 0.5 * (low + high)) for low, high in spans) / (1.0 - part)

    def slower(self, factor: float) -> StepTimeModel:
        """The pace of steps that take ``factor`` times as long."""
        return StepTimeModel(tuple(factor * x for x in self.fixed), tuple(factor * x for x in self.each))

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
        return max(FEWEST_STEPS, int(seconds / self.mean_step(MEAN_SHARE * count)))

    def fill(self, seconds: float, step: int, count: float) -> int:
        """The length of a run that has done ``step`` steps and ``seconds`` left for those with ``count`` Gaussians."""
        length = step + seconds / self.step(count)
        for _ in range(50):  # the longer the run, the more of what is left are small images
            length = 0.5 * (length + step + seconds / self.mean_step(count, min(step / length, 0.999)))
        return max(FEWEST_STEPS, step + 1, int(length))


class TimePlanner:
    """Corrects the plan of a run while it goes, so that it fills its time whatever its steps turn out to take.

    deadline: when the last step has to be done, in seconds of ``clock``.
    views: steps until each photo has been seen. Those before take longer, since photos are decoded, and tell nothing of
        what comes after, unless that takes longer than up to the first look.
    """

    def __init__(
        self, pace: StepTimeModel, deadline: float, clock: Callable[[], float] = time.monotonic, *, views: int = 1
    ) -> None:
        self.pace = pace
        self.deadline = deadline
        self.views = views
        self._clock = clock
        self._began = clock()
        self._all = deadline - self._began
        #: Time and step of the last look; the first one only starts the clock, whatever came before it.
        self._then = -math.inf
        self._due = math.inf
        self._step = 0
        #: What the steps since the last look should have taken.
        self._expected = 0.0

    def left(self) -> float:
        """Seconds for steps."""
        return self.deadline - self._clock()

    def look(self, step: int, planned: int, count: int, cap: int) -> int | None:
        """Told of every step; the number of steps that the run should have, when that is not the ``planned`` one.

        count: Gaussians now. cap: the most of them.
        """
        now = self._clock()
        if self._then == -math.inf:
            if step < self.views and now < self._began + _FIRST_LOOK * self._all:
                return None
            self._then, self._step, self._due = now, step, now + _FIRST_LOOK * self._all
            return None
        self._expected += self.pace.step(count, step / planned)
        half_done = step - self._step >= _HALF_DONE * (planned - self._step)
        if (now < self._due and not half_done) or self.deadline - now < _TOO_LATE * self._all:
            return None
        self.pace = self.pace.slower(max(1e-3, (now - self._then) / self._expected))
        self._then, self._step, self._expected = now, step, 0.0
        self._due = now + _NEXT_LOOK * (self.deadline - now)
        mean = count + MEAN_SHARE * max(0, cap - count)
        wanted = self.pace.fill(PLANNED * (self.deadline - now), step, mean)
        return wanted if abs(wanted - planned) > _TOLERANCE * (planned - step) else None


def halvings_for(scene: Scene) -> int:
    """How many times images may be halved at first, so that something is left to be seen in them."""
    side = min(min(scene.cameras[view].width, scene.cameras[view].height) for view in scene.train)
    return min(MOST_HALVINGS, max(0, int(math.log2(max(1.0, side / SMALLEST_SIDE)))))


def measure_pace(
    config: Config,
    scene: Scene,
    gaussians: Gaussians,
    engine: StepEngine,
    clock: Callable[[], float] = time.perf_counter,
) -> StepTimeModel:
    """Times steps with ``gaussians`` and with four times as many smaller ones, on their device; changes nothing.

    For images halved up to ``config.schedule.num_downscales`` times.
    """
    targets = TrainingImages(scene, gaussians.device, depth_lambda=config.depth_lambda)
    few, many = gaussians.detach_clone(), _crowded(gaussians)
    added = max(1, len(many) - len(few))
    fixed, each = [], []
    for halved in range(config.schedule.num_downscales + 1):
        fast, slow = (_step_seconds(config, scene, targets, some, halved, engine, clock) for some in (few, many))
        each.append(max(0.0, (slow - fast) / added))
        fixed.append(max(1e-6, fast - each[-1] * len(few)))
    return StepTimeModel(tuple(fixed), tuple(each))


def _step_seconds(
    config: Config,
    scene: Scene,
    targets: TrainingImages,
    gaussians: Gaussians,
    halved: int,
    engine: StepEngine,
    clock: Callable[[], float],
) -> float:
    """Mean of a few steps that move ``gaussians`` by next to nothing, after one that is not counted."""
    adam, stats = AdamState.zeros_like(gaussians), DensifyStats.zeros(len(gaussians), gaussians.device)
    lrs = learning_rates(config.optim, config.schedule, 1e-6, config.schedule.lr_steps)
    background = torch.zeros(3, device=gaussians.device)
    views = [scene.train[turn * (len(scene.train) - 1) // _TIMED] for turn in range(_TIMED + 1)]
    for view in views:
        targets.reduced(view, 1 << halved)  # in a run most steps find them ready, too
    started = 0.0
    for turn, view in enumerate(views):
        if turn == 1:
            engine.drain()
            started = clock()
        camera, target = targets.reduced(view, 1 << halved)
        inputs = StepInputs(
            camera,
            target.over(background),
            lrs,
            gaussians.sh_degree,
            background,
            config.train.ssim_lambda,
            config.train.antialiased,
            stats,
            target.hidden,
            depth=target.depth,
        )
        engine.submit(gaussians, adam, inputs)
    engine.drain()
    return (clock() - started) / _TIMED


def measure_scoring(
    config: Config, scene: Scene, gaussians: Gaussians, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds that a held-out view takes to be scored; 0 where there is none."""
    draw = make_renderer(None)
    background = torch.zeros(3, device=gaussians.device)
    spent = 0.0
    for view in scene.test[:1] * 2:  # the first time is not counted
        started = clock()
        with torch.no_grad():
            for _ in score_views(
                lambda camera: draw(
                    gaussians,
                    camera,
                    sh_degree=gaussians.sh_degree,
                    background=background,
                    antialiased=config.train.antialiased,
                ),
                scene,
                [view],
            ):
                spent = clock() - started
    return spent


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
