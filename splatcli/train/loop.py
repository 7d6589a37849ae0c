"""Trainer: the loop from step to step, told as a stream of events; it neither prints nor decides when to show what."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from splatcli.checkpoint.rundir import RunDir
from splatcli.checkpoint.state import Checkpoint, DatasetInfo
from splatcli.config import Config
from splatcli.errors import SceneError, UsageError
from splatcli.gaussians import Gaussians
from splatcli.raster import render
from splatcli.raster.adam import AdamState
from splatcli.raster.engine import engine_for
from splatcli.raster.stats import GrowthStats
from splatcli.raster.stepping import StepEngine, StepInputs
from splatcli.scene.camera import Camera
from splatcli.scene.images import AHEAD
from splatcli.scene.scene import Scene
from splatcli.train.events import Evaluated, Event, OpacityReset, Refined, Saved, Started, Stepped, Stopped
from splatcli.train.init import initial_gaussians
from splatcli.train.lr import active_sh_degree, learning_rates
from splatcli.train.metrics import evaluation_background, mean_scores, protocol, score_views
from splatcli.train.monitor import LossGuard
from splatcli.train.resume import check_same_scene
from splatcli.train.sampler import ViewSampler
from splatcli.train.state import TRAINING_STREAMS, TrainState, stream_generator
from splatcli.train.strategies import apply_edit, make_strategy
from splatcli.train.targets import Targets, to_device

#: Steps between two records of the loss in metrics.jsonl.
LOG_EVERY = 10

BACKGROUNDS = {"black": (0.0, 0.0, 0.0), "white": (1.0, 1.0, 1.0)}


class Renderer(Protocol):
    """Gives the float image [H, W, 3] of a view; used for evaluation only."""

    def __call__(
        self, gaussians: Gaussians, camera: Camera, *, sh_degree: int, background: Tensor, antialiased: bool
    ) -> Tensor: ...


def render_image(
    gaussians: Gaussians, camera: Camera, *, sh_degree: int, background: Tensor, antialiased: bool
) -> Tensor:
    """The Renderer of the state's device."""
    return render(gaussians, camera, sh_degree=sh_degree, background=background, antialiased=antialiased).image


class Trainer:
    """One run over one scene.

    state: where the run stands.
    run_dir: takes checkpoints and metrics.
    engine, renderer: None takes those of the state's device.
    clock: seconds; decides when to save and is written into the metrics, and touches nothing that is trained.
    notes: things worth telling the user, in the Started event.
    """

    def __init__(
        self,
        state: TrainState,
        scene: Scene,
        *,
        run_dir: RunDir,
        engine: StepEngine | None = None,
        renderer: Renderer | None = None,
        clock: Callable[[], float] = time.monotonic,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.state = state
        self.scene = scene
        self.run_dir = run_dir
        self.engine = engine or engine_for(state.gaussians.device)
        self.renderer = renderer or render_image
        self.clock = clock
        self.notes = notes
        self.strategy = make_strategy(state.config, state.dataset.extent)
        self.targets = Targets(scene, state.gaussians.device)
        self.guard = LossGuard()
        #: Steps whose loss is not known yet: number, view, Gaussians, SH degree.
        self._untold: deque[tuple[int, str, int, int]] = deque()

    @classmethod
    def start(
        cls,
        config: Config,
        scene: Scene,
        *,
        run_dir: RunDir,
        device: str = "cpu",
        engine: StepEngine | None = None,
        renderer: Renderer | None = None,
        given: Gaussians | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> Trainer:
        """A new run. given: the model that ``config.model.init`` names. Raises SceneError where there is no scale."""
        if not scene.train:
            raise SceneError("no view is left to train on", where=scene.root, remedy="hold out fewer: --test-every 8")
        if not scene.extent > 0:
            raise SceneError(
                "all training cameras stand at one point, so that the scene has no scale",
                where=scene.root,
                remedy="add photos from other places; one place shows no depth",
            )
        seed = config.train.seed
        gaussians, notes = initial_gaussians(config, scene, stream_generator(seed, "init"), given)
        gaussians = gaussians.to(device)
        state = TrainState(
            config=config,
            step=0,
            gaussians=gaussians,
            adam=AdamState.zeros_like(gaussians, config.optim.beta1, config.optim.beta2, config.optim.eps),
            stats=GrowthStats.zeros(len(gaussians), gaussians.device),
            sampler=ViewSampler(len(scene.train), seed),
            generators={name: stream_generator(seed, name) for name in TRAINING_STREAMS},
            cameras=list(scene.cameras),
            train=list(scene.train),
            test=list(scene.test),
            dataset=DatasetInfo(
                str(scene.root), scene.kind, scene.extent, scene.fingerprint(), tuple(scene.offset.tolist())
            ),
        )
        notes = [*scene.notes, *notes]
        return cls(state, scene, run_dir=run_dir, engine=engine, renderer=renderer, clock=clock, notes=tuple(notes))

    @classmethod
    def resume(
        cls,
        checkpoint: Checkpoint,
        scene: Scene,
        *,
        run_dir: RunDir,
        device: str = "cpu",
        engine: StepEngine | None = None,
        renderer: Renderer | None = None,
        iterations: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> Trainer:
        """The run that ``checkpoint`` was saved from, going on with the same bits.

        iterations: a new length. The schedule stays as it was stored, in absolute steps; added steps have the final
            learning rate.
        Raises SceneError when the scene is not the one that was trained on, UsageError for a length already passed.
        """
        check_same_scene(checkpoint, scene)
        state = TrainState.from_checkpoint(checkpoint, device)
        if iterations is not None:
            if iterations < state.step:
                raise UsageError(
                    f"{iterations} iterations are asked for and {state.step} are done already",
                    remedy=f"ask for more than {state.step}, or resume from an earlier checkpoint",
                )
            state.config.train.iterations = iterations
        # The stored cameras are the ones trained on, to the last bit, whatever read the scene this time.
        scene = dataclasses.replace(scene, cameras=state.cameras)
        notes = tuple(scene.notes)
        return cls(state, scene, run_dir=run_dir, engine=engine, renderer=renderer, clock=clock, notes=notes)

    def run(self, stop_at: int | None = None, should_stop: Callable[[], str | None] = lambda: None) -> Iterator[Event]:
        """Train to the end, to step ``stop_at``, or until ``should_stop`` gives a reason; Stopped comes last.

        should_stop: asked between steps and between evaluated views. The state is saved before Stopped, except that
        DivergedError leaves the last good checkpoint the newest.
        """
        state, config = self.state, self.state.config
        yield Started(
            state.step,
            config.train.iterations,
            len(state.gaussians),
            len(state.train),
            len(state.test),
            str(state.gaussians.device),
            self.notes,
        )
        started = saved_at = self.clock()
        saved: Saved | None = None
        while (reason := self._reason(stop_at, should_stop)) is None:
            yield from self._logged(self._step(), started)
            due = self.clock() - saved_at >= 60.0 * config.save.every_minutes
            if (due or state.step in config.save.steps) and state.step < config.train.iterations:
                yield from self._logged(self._told(self.engine.drain()), started)
                yield (saved := self._save())
                saved_at = self.clock()
            every = config.train.eval_every
            if every and state.step % every == 0 and state.step < config.train.iterations:
                yield from self._logged(self._told(self.engine.drain()), started)
                yield from self._evaluate(should_stop)
        yield from self._logged(self._told(self.engine.drain()), started)
        if saved is None or saved.step != state.step:
            yield (saved := self._save())
        if reason == "finished":
            reason = (yield from self._evaluate(should_stop)) or reason
        yield Stopped(state.step, reason, saved.path)

    def _reason(self, stop_at: int | None, should_stop: Callable[[], str | None]) -> str | None:
        asked = should_stop()
        if asked is not None:
            return asked
        if self.state.step >= self.state.config.train.iterations:
            return "finished"
        return "stop-at" if stop_at is not None and self.state.step >= stop_at else None

    def _step(self) -> list[Event]:
        """One step and the edit after it; what is known to have happened since the last one."""
        state, config = self.state, self.state.config
        step = state.step + 1
        view = state.train[state.sampler.next()]
        camera = self.scene.cameras[view]
        target = self.targets.load(view)
        self.targets.prefetch(state.train[i] for i in state.sampler.upcoming(AHEAD))
        degree = active_sh_degree(config.schedule, state.gaussians.sh_degree, step)
        inputs = StepInputs(
            camera,
            target.pixels,
            lrs=learning_rates(config.optim, config.schedule, state.dataset.extent, step),
            sh_degree=degree,
            background=self._training_background(),
            ssim_lambda=config.train.ssim_lambda,
            antialiased=config.train.antialiased,
            stats=state.stats if self.strategy.observes(step) else None,
            hidden=target.hidden,
        )
        self._untold.append((step, camera.name, len(state.gaussians), degree))
        told = self._told(self.engine.submit(state.gaussians, state.adam, inputs))
        edits: list[Event] = []
        if self.strategy.edits(step):
            told += self._told(self.engine.drain())
            edits = self._edit(step)
            # The step is told with the count that it leaves behind.
            told[-1] = dataclasses.replace(told[-1], num_gaussians=len(state.gaussians))
        state.step = step
        return [*told, *edits]

    def _told(self, losses: list[float]) -> list[Stepped]:
        """The steps whose losses have become known, each checked."""
        events = []
        for loss in losses:
            step, view, count, degree = self._untold.popleft()
            self.guard.check(step, view, loss, self.state.gaussians)
            events.append(Stepped(step, loss, count, degree))
        return events

    def _logged(self, events: Sequence[Event], started: float) -> Iterator[Event]:
        for event in events:
            if isinstance(event, Stepped) and event.step % LOG_EVERY == 0:
                self._log(event, self.clock() - started)
            yield event

    def _edit(self, step: int) -> list[Event]:
        """Density control after ``step``, and what it did."""
        state = self.state
        edit = self.strategy.edit(step, state.gaussians, state.stats, state.generators["splits"])
        if edit is None:
            return []
        state.gaussians, state.adam, state.stats = apply_edit(edit, state.gaussians, state.adam, state.stats)
        self.guard.check_count(step, state.gaussians)
        events: list[Event] = []
        if edit.clear_stats:
            events.append(Refined(step, edit.cloned, edit.split, edit.pruned, len(state.gaussians)))
        if edit.opacity_ceiling is not None:
            events.append(OpacityReset(step))
        return events

    def _training_background(self) -> Tensor:
        name = self.state.config.train.background
        if name == "random":
            color = torch.rand(3, generator=self.state.generators["background"])
        else:
            color = torch.tensor(BACKGROUNDS[name])
        return to_device(color, self.state.gaussians.device)

    def _save(self) -> Saved:
        return Saved(self.state.step, self.run_dir.save(self.state.to_checkpoint()))

    def _evaluate(self, should_stop: Callable[[], str | None]) -> Generator[Event, None, str | None]:
        """Scores of the held-out views, if there are any; returns the reason when a stop is asked for in between.

        No random number is drawn and nothing of the state is touched: a run ends with the same bits without it.
        """
        state, config = self.state, self.state.config
        if not state.test:
            return None
        background = torch.tensor(BACKGROUNDS[evaluation_background(config)], device=state.gaussians.device)

        gaussians = state.settled()

        def draw(camera: Camera) -> Tensor:
            with torch.no_grad():
                return self.renderer(
                    gaussians,
                    camera,
                    sh_degree=state.sh_degree(),
                    background=background,
                    antialiased=config.train.antialiased,
                )

        scores = []
        for score in score_views(draw, self.scene, state.test):
            scores.append(score)
            if (reason := should_stop()) is not None:
                return reason
        if not scores:
            return None
        psnr, ssim = mean_scores(scores)
        event = Evaluated(state.step, psnr, ssim, len(state.gaussians), scores)
        self.run_dir.append_metrics(
            {"event": "eval", **dataclasses.asdict(event), "protocol": protocol(config, self.scene, state.test)}
        )
        yield event
        return None

    def _log(self, event: Event, seconds: float) -> None:
        self.run_dir.append_metrics({"event": "step", **dataclasses.asdict(event), "seconds": round(seconds, 3)})
