"""One training step: the inputs for a view, steps on one view or several, and their losses as they become known."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from splatcli.rasterizer.batch import BatchEngine, batch_engine_for
from splatcli.rasterizer.memory import Budget, MemoryBudget
from splatcli.rasterizer.sharded import ShardedEngine, sharded_engine_for
from splatcli.rasterizer.step_inputs import StepEngine, StepInputs
from splatcli.rasterizer.train_step import apply_view_grads, engine_for
from splatcli.scene.camera import Camera
from splatcli.scene.images import AHEAD
from splatcli.scene.scene import Scene
from splatcli.train.densify import Strategy
from splatcli.train.evaluate import BACKGROUNDS, Renderer, Scorer, scorer_for
from splatcli.train.events import Stepped
from splatcli.train.monitor import check_loss
from splatcli.train.sampler import ViewSampler
from splatcli.train.schedule import active_sh_degree, image_divisor, learning_rates
from splatcli.train.state import TrainState
from splatcli.train.training_images import Target, Targets, to_device

if TYPE_CHECKING:
    from splatcli.distributed.process_group import ProcessGroup


def view_of_step(state: TrainState, targets: Targets, step: int, row: int) -> tuple[Camera, Target]:
    """Camera and photo of training view ``row``, as large as step number ``step`` has them.

    Raises SceneError when the photo is damaged.
    """
    return targets.reduced(state.train[row], image_divisor(state.config.schedule, step))


def given_camera(state: TrainState, scene: Scene, step: int, row: int) -> Camera:
    """The scene's camera of training view ``row``, as large as step number ``step`` has it."""
    given, divisor = scene.cameras[state.train[row]], image_divisor(state.config.schedule, step)
    return given if divisor == 1 else given.resized(max(1, given.width // divisor), max(1, given.height // divisor))


def step_inputs(
    state: TrainState, strategy: Strategy, step: int, row: int, given: Camera, target: Target, background: Tensor
) -> StepInputs:
    """What step number ``step`` asks of training view ``row``; background [3] on the Gaussians' device."""
    config = state.config
    lrs = learning_rates(config.optim, config.schedule, state.dataset.extent, step)
    return StepInputs(
        state.per_view_params.camera(row, given),
        target.over(background),
        lrs=lrs,
        sh_degree=active_sh_degree(config.schedule, state.gaussians.sh_degree, step),
        background=background,
        ssim_lambda=config.train.ssim_lambda,
        antialiased=config.train.antialiased,
        stats=state.stats if strategy.collects_stats(step) else None,
        hidden=target.hidden,
        regularisation=strategy.regularisation(step, lrs["means"]),
        absgrad=strategy.absgrad,
        view_params=state.per_view_params.of(row, given, config, state.dataset.extent, step, state.gaussians.device),
        depth=target.depth,
        smoothing=state.smoothing,
        shard=state.shard,
    )


def training_background(state: TrainState) -> Tensor:
    """[3] what stands behind the Gaussians of a view, on their device; a random one is drawn."""
    name = state.config.train.background
    if name == "random":
        color = torch.rand(3, generator=state.generators["background"])
    else:
        color = torch.tensor(BACKGROUNDS[name])
    return to_device(color, state.gaussians.device)


class Batches:
    """Makes steps on ``views`` views; in a group each process reads and renders its share of them only.

    pairs: (Gaussian, tile) pairs of the fullest view of the last step.
    """

    def __init__(self, engine: BatchEngine | ShardedEngine, views: int) -> None:
        self.engine = engine
        self.views = views
        self.pairs = 0

    def step(
        self, state: TrainState, scene: Scene, targets: Targets, strategy: Strategy, step: int
    ) -> tuple[list[int], list[float]]:
        """Step number ``step``: (rows of the views among the training views, their losses).

        Raises SceneError when a photo is damaged; then the state is the one before the step.
        """
        sampler, background = state.sampler.state(), state.generators["background"].get_state()
        rows = [state.sampler.next() for _ in range(self.views)]
        colours = [training_background(state) for _ in rows]  # all of them, so that every process draws the same
        self._prefetch(state, targets)

        def inputs_of(i: int) -> StepInputs:
            given, target = view_of_step(state, targets, step, rows[i])
            return step_inputs(state, strategy, step, rows[i], given, target, colours[i])

        try:
            if isinstance(self.engine, ShardedEngine):
                cameras = [self._camera(state, scene, step, row) for row in rows]
                outcome = self.engine.step(state.gaussians, state.adam, cameras, inputs_of)
            else:
                outcome = self.engine.step(state.gaussians, state.adam, self.views, inputs_of)
        except Exception:
            state.sampler = ViewSampler(state.sampler.num_views, state.sampler.seed, **sampler)
            state.generators["background"].set_state(background)
            raise
        self.pairs = outcome.pairs
        for row, v_params in zip(rows, outcome.v_params or [], strict=False):
            given = given_camera(state, scene, step, row)
            extent, device = state.dataset.extent, state.gaussians.device
            apply_view_grads(state.per_view_params.of(row, given, state.config, extent, step, device), v_params)
        return rows, outcome.losses

    @staticmethod
    def _camera(state: TrainState, scene: Scene, step: int, row: int) -> Camera:
        """That of a training view in this step, as whoever has its photo sees it."""
        return state.per_view_params.camera(row, given_camera(state, scene, step, row))

    def _prefetch(self, state: TrainState, targets: Targets) -> None:
        """Starts decoding what this process is going to draw soon."""
        group = self.engine.group
        rank, size = (0, 1) if group is None else (group.rank, group.size)
        targets.prefetch(state.train[i] for i in state.sampler.upcoming(AHEAD * size)[rank::size])


def batches_for(state: TrainState, budget: MemoryBudget, group: ProcessGroup | None) -> Batches | None:
    """What makes steps on several views; None where a step has one, and is fused. Raises as the engines do."""
    views, device = state.config.train.batch_size, state.gaussians.device
    if views == 1 and (group is None or group.size == 1):
        return None
    if state.shard is not None and group is not None:
        return Batches(sharded_engine_for(device, group, budget), views)
    return Batches(batch_engine_for(device, budget, group), views)


class Steps:
    """What moves the Gaussians of one state: an engine, and the photos it compares with.

    engine: None makes one for the state's device within ``budget``.
    group: the processes that train the run together, if there are several.
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
        group: ProcessGroup | None = None,
        engine: StepEngine | None = None,
        limit: int | None = None,
    ) -> None:
        device = state.gaussians.device
        self.engine = engine or engine_for(device, budget)
        self.batches = batches_for(state, budget, group)
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
