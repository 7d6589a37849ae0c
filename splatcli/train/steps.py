"""Steps: does a run's steps, on one view or several, and tells the loss of each as soon as it is known."""

from __future__ import annotations

import contextlib
from collections import deque

from splatcli.rasterizer.memory import Budget
from splatcli.rasterizer.step_inputs import StepEngine
from splatcli.rasterizer.train_step import engine_for
from splatcli.scene.images import AHEAD
from splatcli.scene.scene import Scene
from splatcli.train.batch import Batches, batches_for
from splatcli.train.data_parallel import Crew
from splatcli.train.densify import Strategy
from splatcli.train.events import Stepped
from splatcli.train.inputs import step_inputs, training_background, view_of_step
from splatcli.train.lr import active_sh_degree
from splatcli.train.monitor import check_loss
from splatcli.train.scoring import Renderer, Scorer, scorer_for
from splatcli.train.state import TrainState
from splatcli.train.targets import Targets


class Steps:
    """What moves the Gaussians of one state: an engine, and the photos it compares with.

    engine: None makes one for the state's device within ``budget``.
    crew: the processes that train the run together, if there are several.
    limit: of the bytes that photos take on a GPU, as Targets has it.

    batches: what makes steps on several views; None where a step has one.
    largest: the most Gaussians that a step was done with.
    """

    def __init__(
        self,
        state: TrainState,
        scene: Scene,
        budget: Budget,
        *,
        crew: Crew | None = None,
        engine: StepEngine | None = None,
        limit: int | None = None,
    ) -> None:
        device = state.gaussians.device
        self.engine = engine or engine_for(device, budget)
        self.batches = batches_for(state, budget, crew)
        self.targets = Targets(scene, device, limit=limit, depth_lambda=state.config.depth_lambda)
        self.largest = 0
        #: Steps whose loss is not known yet: number, view, Gaussians, SH degree.
        self._untold: deque[tuple[int, str, int, int]] = deque()

    @property
    def pairs(self) -> int:
        """(Gaussian, tile) pairs of the last step that was told of, at most; of several views the fullest one's."""
        return self.engine.pairs if self.batches is None else self.batches.pairs

    def take(self, state: TrainState, strategy: Strategy, step: int) -> list[Stepped]:
        """Step number ``step``, which an engine may do later, but not after drain(); those that are known now.

        Raises SceneError when a photo is damaged: then ``state`` is the one before the step.
        """
        if self.batches is None:
            return self._single(state, strategy, step)
        return self._batch(state, strategy, step, self.batches)

    def drain(self, state: TrainState) -> list[Stepped]:
        """Nothing is on its way any more; the steps that were not told yet."""
        return self._told(state, self.engine.drain())

    def scorer(self, renderer: Renderer) -> Scorer:
        """What scores views, on the same engine where that draws several of them."""
        return scorer_for(self.targets.scene, renderer, self.batches and self.batches.engine)

    def abandon(self) -> None:
        """Waits for what is on its way without a look at what comes of it: the state has failed."""
        self._untold.clear()
        with contextlib.suppress(Exception):
            self.engine.drain()

    def _single(self, state: TrainState, strategy: Strategy, step: int) -> list[Stepped]:
        """A step on one view, whose loss the engine may tell later."""
        row = state.sampler.peek()
        given, target = view_of_step(state, self.targets, step, row)
        state.sampler.next()
        self.targets.prefetch(state.train[i] for i in state.sampler.upcoming(AHEAD))
        background = training_background(state)
        told: list[Stepped] = []
        if state.config.views.trained and any(name == given.name for _, name, _, _ in self._untold):
            told = self.drain(state)  # what the step before has taught of this view comes first
        inputs = step_inputs(state, strategy, step, row, given, target, background)
        self._untold.append((step, given.name, len(state.gaussians), inputs.sh_degree))
        return told + self._told(state, self.engine.submit(state.gaussians, state.adam, inputs))

    def _batch(self, state: TrainState, strategy: Strategy, step: int, batches: Batches) -> list[Stepped]:
        """A step on several views, done when this returns."""
        rows, losses = batches.step(state, self.targets.scene, self.targets, strategy, step)
        degree = active_sh_degree(state.config.schedule, state.gaussians.sh_degree, step)
        for row, loss in zip(rows, losses, strict=True):
            check_loss(step, self.targets.scene.cameras[state.train[row]].name, loss, state.gaussians, state.shard)
        self.largest = max(self.largest, state.count)
        return [Stepped(step, sum(losses) / len(losses), state.count, degree)]

    def _told(self, state: TrainState, losses: list[float]) -> list[Stepped]:
        """The steps whose losses have become known, each checked."""
        events = []
        for loss in losses:
            step, view, count, degree = self._untold.popleft()
            check_loss(step, view, loss, state.gaussians, state.shard)
            self.largest = max(self.largest, count)
            events.append(Stepped(step, loss, count, degree))
        return events
