"""One training step: choose the views, build their StepInputs, run the engine, and report the losses."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from splatcli.config import Config
from splatcli.rasterizer.batch import BatchEngine
from splatcli.rasterizer.memory_budget import MemoryBudget
from splatcli.rasterizer.rendering import backend_for
from splatcli.rasterizer.sharded import ShardedEngine
from splatcli.rasterizer.step_inputs import StepEngine, StepInputs, ViewParams
from splatcli.rasterizer.train_step import apply_view_grads, engine_for
from splatcli.scene.camera import Camera
from splatcli.scene.images import AHEAD
from splatcli.scene.scene import Scene
from splatcli.train.backgrounds import parse_background
from splatcli.train.densify import Strategy
from splatcli.train.dropout import dropout_filter, dropout_rate, dropped
from splatcli.train.events import Stepped
from splatcli.train.monitor import check_loss
from splatcli.train.per_view_params import ViewRates
from splatcli.train.sampler import ViewSampler
from splatcli.train.schedule import active_sh_degree, image_divisor, learning_rates
from splatcli.train.state import TrainState
from splatcli.train.training_images import TrainingImage, TrainingImages, to_device

if TYPE_CHECKING:
    from splatcli.distributed.process_group import ProcessGroup


@dataclass(frozen=True, slots=True, eq=False)
class TrainingView:
    """A training view in a step.

    row: of the run's training views. camera: the scene's, at the image's size. image: what the step is compared with.
    background: [3], the colour behind the Gaussians, on their device.
    """

    row: int
    camera: Camera
    image: TrainingImage
    background: Tensor


class Stepper:
    """Trains the Gaussians of one state, one step at a time.

    images: the training images of the scene, on the state's device.
    engine: for steps on one view; None makes one for the state's device within ``budget``.
    group: the processes that train the run together, if there are several.

    batch_engine: for steps on several views; None where a step has one view.
    most_gaussians: that a step was done with.
    """

    def __init__(
        self,
        state: TrainState,
        images: TrainingImages,
        budget: MemoryBudget,
        *,
        group: ProcessGroup | None = None,
        engine: StepEngine | None = None,
    ) -> None:
        self.engine = engine or engine_for(state.gaussians.device, budget)
        self.batch_engine = _batch_engine(state, budget, group)
        self.images = images
        self.most_gaussians = 0
        #: The newest loss of each training view, by name.
        self.view_losses: dict[str, float] = {}
        self._batch_isects = 0
        #: Steps whose loss is not known yet: number, view, Gaussians, SH degree.
        self._pending: deque[tuple[int, str, int, int]] = deque()

    @property
    def isects(self) -> int:
        """Tile intersections of the last reported step, at most; with several views those of the fullest one."""
        return self.engine.isects if self.batch_engine is None else self._batch_isects

    def step(self, state: TrainState, strategy: Strategy, step: int) -> list[Stepped]:
        """Submit step number ``step`` and return the steps whose losses are known now.

        An engine may still be at work on the step when this returns; drain() waits for it. Raises SceneError when a
        training image is damaged, and UsageError when the strategy is that of a plug-in and fails; then ``state`` is
        the one before the step.
        """
        if self.batch_engine is not None:
            return self._step_on_batch(state, strategy, step, self.batch_engine)
        row = state.sampler.peek()
        camera, image = self._view(state, step, row)
        reported: list[Stepped] = []
        with _draws_undone_on_error(state):
            state.sampler.next()
            self.images.prefetch(state.train[i] for i in state.sampler.upcoming(AHEAD))
            view = TrainingView(row, camera, image, training_background(state))
            views = state.config.views
            if views.ppisp or (views.trained and any(name == camera.name for _, name, _, _ in self._pending)):
                reported = self.drain(state)  # this view's or camera's parameters are updated before their use
            inputs = step_inputs(state, strategy, step, view)
        self._pending.append((step, camera.name, len(state.gaussians), inputs.sh_degree))
        return reported + self._report(state, self.engine.submit(state.gaussians, state.adam, inputs))

    def drain(self, state: TrainState) -> list[Stepped]:
        """Finish all pending steps and return those that are not reported yet."""
        return self._report(state, self.engine.drain())

    def abandon(self) -> None:
        """Wait for pending steps and drop their results: the state has failed."""
        self._pending.clear()
        with contextlib.suppress(Exception):
            self.engine.drain()

    def _report(self, state: TrainState, losses: list[float]) -> list[Stepped]:
        """Check the losses of the oldest pending steps, and return these steps."""
        events = []
        for loss in losses:
            step, view, count, degree = self._pending.popleft()
            check_loss(step, view, loss, state.gaussians, state.shard)
            self.most_gaussians = max(self.most_gaussians, count)
            self.view_losses[view] = loss
            events.append(Stepped(step, loss, count, degree))
        return events

    def _step_on_batch(self, state: TrainState, strategy: Strategy, step: int, engine: BatchEngine) -> list[Stepped]:
        """Step on several views, done when this returns. Each process of a group reads and renders its share of them.

        Every process draws all random numbers, so that all draw the same.
        """
        scene, group = self.images.scene, engine.group
        rank, size = (0, 1) if group is None else (group.rank, group.size)

        def inputs_of(i: int) -> StepInputs:
            camera, image = self._view(state, step, rows[i])
            return step_inputs(state, strategy, step, TrainingView(rows[i], camera, image, backgrounds[i]))

        with _draws_undone_on_error(state):
            rows = [state.sampler.next() for _ in range(state.config.train.batch_size)]
            backgrounds = [training_background(state) for _ in rows]
            self.images.prefetch(state.train[i] for i in _own_upcoming(state, rank, size))
            cameras = [scene_camera(state, scene, step, row) for row in rows]
            refined = [state.per_view_params.camera(row, camera) for row, camera in zip(rows, cameras, strict=True)]
            result = engine.step(state.gaussians, state.adam, refined, inputs_of)
        self._batch_isects = result.isects
        for row, camera, v_params in zip(rows, cameras, result.v_params or [], strict=False):
            apply_view_grads(_view_params(state, step, row, camera), v_params)
        for row, loss in zip(rows, result.losses, strict=True):
            view = scene.cameras[state.train[row]].name
            check_loss(step, view, loss, state.gaussians, state.shard)
            self.view_losses[view] = loss
        self.most_gaussians = max(self.most_gaussians, state.count)
        degree = active_sh_degree(state.config.schedule, state.gaussians.sh_degree, step)
        return [Stepped(step, sum(result.losses) / len(result.losses), state.count, degree)]

    def _view(self, state: TrainState, step: int, row: int) -> tuple[Camera, TrainingImage]:
        """Return the scene's camera and the image of training view ``row`` at the size that step ``step`` has."""
        return self.images.reduced(state.train[row], image_divisor(state.config.schedule, step))


def step_inputs(state: TrainState, strategy: Strategy, step: int, view: TrainingView) -> StepInputs:
    """Return the inputs of step number ``step`` on a training view."""
    config, image = state.config, view.image
    lrs = learning_rates(config.optim, config.schedule, state.dataset.extent, step)
    return StepInputs(
        state.per_view_params.camera(view.row, view.camera),
        image.over(view.background),
        lrs=lrs,
        sh_degree=active_sh_degree(config.schedule, state.gaussians.sh_degree, step),
        background=view.background,
        ssim_lambda=config.train.ssim_lambda,
        antialiased=config.train.antialiased,
        stats=state.stats if strategy.collects_stats(step) else None,
        mask=image.masked,
        regularisation=strategy.regularisation(step, lrs["means"]),
        absgrad=strategy.absgrad,
        view_params=_view_params(state, step, view.row, view.camera),
        depth=image.depth,
        alpha_lambda=_alpha_lambda(config, step) if image.opaque else 0.0,
        mask_lambda=config.train.mask_lambda if _is_late(config, step) else 0.0,
        filter_3d=_filter_3d(state, step),
        shard=state.shard,
    )


def _view_params(state: TrainState, step: int, row: int, camera: Camera) -> ViewParams | None:
    """Return the trained parameters of training view ``row`` in step number ``step``; None where none are trained."""
    rates = ViewRates(state.config, state.dataset.extent, step)
    return state.per_view_params.of(row, camera, rates, state.gaussians.device)


def _filter_3d(state: TrainState, step: int) -> Tensor | None:
    """Return the sizes of the 3D filter in step number ``step``, which has the Gaussians that dropout leaves out.

    All views of a step have the same; all processes draw for all rows.
    """
    rate = dropout_rate(state.config, step)
    if rate == 0.0:
        return state.columns.filter_3d
    rows = dropped(state.config.train.seed, step, state.count, rate)
    if state.shard is not None:
        rows = rows[state.shard.rows]
    return dropout_filter(state.columns.filter_3d, to_device(rows, state.gaussians.device))


def _alpha_lambda(config: Config, step: int) -> float:
    """Return the weight of the alpha term in step number ``step`` on an opaque image."""
    train = config.train
    return train.alpha_lambda if _is_late(config, step) and train.background == "black" else 0.0


def _is_late(config: Config, step: int) -> bool:
    """Return whether step number ``step`` is in the second half of a run, where terms of alpha add no Gaussians."""
    return 2 * step > config.schedule.lr_steps


def training_background(state: TrainState) -> Tensor:
    """Return the colour [3] behind the Gaussians of a view, on their device; a random one is drawn."""
    name, device = state.config.train.background, state.gaussians.device
    if name == "random":
        return to_device(torch.rand(3, generator=state.generators["background"], dtype=torch.float32), device)
    return _named_background(name, device)


@functools.cache
def _named_background(name: str, device: torch.device) -> Tensor:
    """Return the colour [3] of that name on ``device``, where it is copied once."""
    return to_device(torch.tensor(parse_background(name), dtype=torch.float32), device)


def scene_camera(state: TrainState, scene: Scene, step: int, row: int) -> Camera:
    """Return the scene's camera of training view ``row`` at the size that step number ``step`` has."""
    return scene.cameras[state.train[row]].downscaled(image_divisor(state.config.schedule, step))


@contextlib.contextmanager
def _draws_undone_on_error(state: TrainState) -> Iterator[None]:
    """Put sampler and background generator back where the block, which draws from them, raises."""
    sampler, skipped = state.sampler.state(), state.sampler.skipped
    generator = state.generators["background"].get_state()
    try:
        yield
    except Exception:
        state.sampler = ViewSampler(state.sampler.num_views, state.sampler.seed, **sampler, skipped=skipped)
        state.generators["background"].set_state(generator)
        raise


def _batch_engine(state: TrainState, budget: MemoryBudget, group: ProcessGroup | None) -> BatchEngine | None:
    """Return the engine for steps on several views; None where a step has one. Raises as backend_for()."""
    if state.config.train.batch_size == 1 and (group is None or group.size == 1):
        return None
    backend = backend_for(state.gaussians.device)
    if state.shard is not None and group is not None:
        return ShardedEngine(backend, group, budget=budget)
    return BatchEngine(backend, budget=budget, group=group)


def _own_upcoming(state: TrainState, rank: int, size: int) -> list[int]:
    """Return the training views of the next batches of this pass that process ``rank`` of ``size`` renders, a few.

    View i of a batch belongs to process i % size, and the next batch begins with the sampler's next view.
    """
    batch, upcoming = state.config.train.batch_size, state.sampler.upcoming(AHEAD * size)
    return [row for i, row in enumerate(upcoming) if i % batch % size == rank][:AHEAD]
