"""StepTimeModel and TimePlanner: the steps and Gaussians that fill a given time, measured and then corrected."""

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

#: Most Gaussians per step of the run: a short run cannot optimise more and gains from more steps.
GAUSSIANS_PER_STEP = 25

#: Mean count over a run, as a part of the last one; growth is fast first (see AdcStrategy).
MEAN_SHARE = 0.8

#: Part of the remaining time that is planned with: the machine may become slower.
PLANNED = 0.97

#: Random points of a run within a given time: enough to find the scene, and fast to render.
RANDOM_POINTS = 4_000

#: The first correction comes after this part of the time, each further one after a part of the remaining time, or of
#: the remaining steps. The first steps predict later ones badly: random points are large and overlap, and become small.
_FIRST_CHECK, _NEXT_CHECK, _CHECK_STEPS = 0.04, 0.25, 0.5

#: In this last part of the time the plan stays.
_FINAL_PART = 0.03

#: A plan that is wrong by a smaller part stays.
_TOLERANCE = 0.05

#: Least steps of a run, whatever the time; with fewer, nothing can be recognised.
MIN_STEPS = 100

#: Steps that are timed for each of two numbers of Gaussians.
_TIMED = 3

#: Images are halved at first, at most this often and not below this side: a step on a reduced image takes a fraction of
#: the time, and teaches as much while Gaussians are large. Each size has this part of the run's steps.
MAX_HALVINGS = 2
MIN_SIDE = 64
COARSE_PART = 0.2


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Seconds of a step by the number of halvings of the images: a fixed part, and a part per Gaussian.

    fixed, each: [H + 1], from full size down. A run goes through the sizes from the smallest up, each but the last for
    COARSE_PART of its steps.
    """

    fixed: tuple[float, ...]
    each: tuple[float, ...]

    @property
    def halvings(self) -> int:
        """H, the largest number of halvings."""
        return len(self.fixed) - 1

    def step(self, count: float, part: float = 1.0) -> float:
        """Return the seconds of a step with ``count`` Gaussians when ``part`` of the run is done."""
        halved = max(0, self.halvings - int(part / COARSE_PART))
        return self.fixed[halved] + self.each[halved] * count

    def mean_step(self, count: float, part: float = 0.0) -> float:
        """Return the mean seconds of a step after ``part`` of the run."""
        edges = [COARSE_PART * k for k in range(self.halvings + 1)] + [1.0]
        spans = [(max(part, low), high) for low, high in itertools.pairwise(edges) if high > part]
        return sum((high - low) * self.step(count, 0.5 * (low + high)) for low, high in spans) / (1.0 - part)

    def slower(self, factor: float) -> StepTimeModel:
        """Return the model of steps that take ``factor`` times as long."""
        return StepTimeModel(tuple(factor * x for x in self.fixed), tuple(factor * x for x in self.each))

    def plan(self, seconds: float, start: int, cap: int | None) -> tuple[int, int]:
        """Return (steps, most Gaussians) that fill ``seconds``. start: initial Gaussians. cap: of the Gaussians."""
        count = max(start, 1)
        for _ in range(100):  # steps fall with the count and the count grows with the steps: iterate, damped
            steps = self._steps(seconds, count)
            target = max(start, GAUSSIANS_PER_STEP * steps)
            if cap is not None:
                target = min(target, cap)
            if abs(target - count) <= 1:
                count = target
                break
            count = (count + target) // 2
        return self._steps(seconds, count), count

    def _steps(self, seconds: float, count: int) -> int:
        return max(MIN_STEPS, int(seconds / self.mean_step(MEAN_SHARE * count)))

    def fill(self, seconds: float, step: int, count: float) -> int:
        """Return the length of a run after ``step`` steps, with ``seconds`` for more steps with ``count`` Gaussians."""
        length = step + seconds / self.step(count)
        for _ in range(50):  # the longer the run, the more of its remaining images are reduced
            length = 0.5 * (length + step + seconds / self.mean_step(count, min(step / length, 0.999)))
        return max(MIN_STEPS, step + 1, int(length))


class TimePlanner:
    """Corrects the length of a run while it trains, so that it fills its time.

    deadline: when the last step has to be done, in seconds of ``clock``.
    views: steps until each image was used once. These take longer, since images are decoded, and are not measured
        unless they take longer than until the first correction.
    """

    def __init__(
        self, model: StepTimeModel, deadline: float, clock: Callable[[], float] = time.monotonic, *, views: int = 1
    ) -> None:
        self.model = model
        self.deadline = deadline
        self.views = views
        self._clock = clock
        self._started_at = clock()
        self._total = deadline - self._started_at
        #: Time and step of the last correction; the first one only starts the measurement.
        self._then = -math.inf
        self._due = math.inf
        self._step = 0
        #: Seconds predicted for the steps since the last correction.
        self._expected = 0.0

    def left(self) -> float:
        """Return the remaining seconds for steps."""
        return self.deadline - self._clock()

    def replan(self, step: int, planned: int, count: int, cap: int) -> int | None:
        """Return the number of steps that the run should have when the ``planned`` one is wrong; call after each step.

        count: present Gaussians. cap: of the Gaussians.
        """
        now = self._clock()
        if self._then == -math.inf:
            if step < self.views and now < self._started_at + _FIRST_CHECK * self._total:
                return None
            self._then, self._step, self._due = now, step, now + _FIRST_CHECK * self._total
            return None
        self._expected += self.model.step(count, step / planned)
        half_done = step - self._step >= _CHECK_STEPS * (planned - self._step)
        if (now < self._due and not half_done) or self.deadline - now < _FINAL_PART * self._total:
            return None
        self.model = self.model.slower(max(1e-3, (now - self._then) / self._expected))
        self._then, self._step, self._expected = now, step, 0.0
        self._due = now + _NEXT_CHECK * (self.deadline - now)
        mean = count + MEAN_SHARE * max(0, cap - count)
        length = self.model.fill(PLANNED * (self.deadline - now), step, mean)
        return length if abs(length - planned) > _TOLERANCE * (planned - step) else None


def halvings_for(scene: Scene) -> int:
    """Return how many times the images of ``scene`` may be halved."""
    side = min(min(scene.cameras[view].width, scene.cameras[view].height) for view in scene.train)
    return min(MAX_HALVINGS, max(0, int(math.log2(max(1.0, side / MIN_SIDE)))))


def measure_step_time(
    config: Config,
    scene: Scene,
    gaussians: Gaussians,
    engine: StepEngine,
    clock: Callable[[], float] = time.perf_counter,
) -> StepTimeModel:
    """Time steps with ``gaussians`` and with four times as many smaller ones, on their device; nothing is changed.

    Images are halved up to ``config.schedule.num_downscales`` times.
    """
    images = TrainingImages(scene, gaussians.device, depth_lambda=config.depth_lambda)
    timer = _StepTimer(config, images, engine, clock)
    few, many = gaussians.detach_clone(), _quadrupled(gaussians)
    added = max(1, len(many) - len(few))
    fixed, each = [], []
    for halved in range((config.schedule.num_downscales or 0) + 1):
        fast, slow = (timer.mean_step(some, 1 << halved) for some in (few, many))
        each.append(max(0.0, (slow - fast) / added))
        fixed.append(max(1e-6, fast - each[-1] * len(few)))
    return StepTimeModel(tuple(fixed), tuple(each))


@dataclass(frozen=True, slots=True)
class _StepTimer:
    """Times steps with the settings of a run on its training images."""

    config: Config
    images: TrainingImages
    engine: StepEngine
    clock: Callable[[], float]

    def mean_step(self, gaussians: Gaussians, divisor: int) -> float:
        """Return the mean seconds of a few steps with tiny learning rates, after one that is not counted.

        divisor: of the images' sides.
        """
        adam, stats = AdamState.zeros_like(gaussians), DensifyStats.zeros(len(gaussians), gaussians.device)
        config, train = self.config, self.images.scene.train
        lrs = learning_rates(config.optim, config.schedule, 1e-6, config.schedule.lr_steps)
        background = torch.zeros(3, device=gaussians.device)
        views = [train[turn * (len(train) - 1) // _TIMED] for turn in range(_TIMED + 1)]
        for view in views:
            self.images.reduced(view, divisor)  # in a run most steps find them ready, too
        started = 0.0
        for turn, view in enumerate(views):
            if turn == 1:
                self.engine.drain()
                started = self.clock()
            camera, image = self.images.reduced(view, divisor)
            inputs = StepInputs(
                camera,
                image.over(background),
                lrs,
                gaussians.sh_degree,
                background,
                config.train.ssim_lambda,
                config.train.antialiased,
                stats,
                image.masked,
                depth=image.depth,
            )
            self.engine.submit(gaussians, adam, inputs)
        self.engine.drain()
        return (self.clock() - started) / _TIMED


def measure_scoring_time(
    config: Config, scene: Scene, gaussians: Gaussians, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the seconds that scoring a held-out view takes; 0 without one."""
    renderer = make_renderer(None)
    background = torch.zeros(3, device=gaussians.device)
    spent = 0.0
    for view in scene.test[:1] * 2:  # the first time is not counted
        started = clock()
        with torch.no_grad():
            for _ in score_views(
                lambda camera: renderer(gaussians, camera, background=background, antialiased=config.train.antialiased),
                scene,
                [view],
            ):
                spent = clock() - started
    return spent


def _quadrupled(gaussians: Gaussians) -> Gaussians:
    """Return four Gaussians of half the size for each one, apart by as much: the same surfaces, covered more finely."""
    offsets = torch.tensor([[1.0, 1.0, 1.0], [1.0, -1.0, -1.0], [-1.0, 1.0, -1.0], [-1.0, -1.0, 1.0]])
    copies = gaussians.map(lambda t: t.detach().repeat(4, *[1] * (t.dim() - 1)))
    shift: Tensor = offsets.to(gaussians.means).repeat_interleave(len(gaussians), dim=0)
    copies.means += 0.5 * shift * copies.log_scales.exp()
    copies.log_scales -= math.log(2.0)
    return copies


def seconds_of(text: str) -> float:
    """Return the seconds of ``90``, ``60s``, ``5m``, ``1.5h`` or ``2d``. Raises ValueError."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    number, unit = (text[:-1], text[-1:].lower()) if text[-1:].lower() in units else (text, "s")
    value = float(number) * units[unit]
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{text!r} is no length of time")
    return value
