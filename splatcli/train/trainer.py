"""Trainer: the loop over the steps of a run, as a stream of events. It prints nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import math
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypedDict, Unpack

import torch

from splatcli.checkpoint.run_dir import RunDir
from splatcli.checkpoint.state import Checkpoint
from splatcli.config import Config
from splatcli.errors import OutputError, ResourceError, SceneError, UsageError
from splatcli.gaussians import Gaussians
from splatcli.rasterizer.loss_engine import LossEngine
from splatcli.rasterizer.memory_budget import MemoryBudget
from splatcli.rasterizer.sharded import ShardedEngine
from splatcli.rasterizer.step_inputs import StepEngine
from splatcli.scene.scene import Scene
from splatcli.train.changed_settings import apply_config, check_iterations
from splatcli.train.checkpointer import Checkpointer
from splatcli.train.data_parallel import (
    COMPARE_EVERY,
    ReadOnlyCheckpointer,
    check_same_run,
    check_same_state,
    raise_on_all,
    rows_of_rank0,
    sync_stop_request,
)
from splatcli.train.densify import StrategyFactory, make_strategy
from splatcli.train.densify.control import DensityControl
from splatcli.train.evaluate import Renderer, Scorer, ShardedScorer, make_renderer
from splatcli.train.events import (
    Alarmed,
    Event,
    OpacityReset,
    Probed,
    Rescheduled,
    Started,
    Stepped,
    Stopped,
    ViewsCompared,
)
from splatcli.train.forecast import Forecast
from splatcli.train.metrics_logger import MetricsLogger
from splatcli.train.monitor import FiniteMonitor, IntersectionMonitor, QualityMonitor, is_recoverable
from splatcli.train.outlier_views import ViewError, blur_note, blurred, comparisons_due, exposure_note, outliers
from splatcli.train.recovery import Recovery
from splatcli.train.resolve import mean_pixels
from splatcli.train.run_scene import check_same_scene, fingerprint_differences
from splatcli.train.sharding import gather_geometry, gather_state, shard_group
from splatcli.train.start import check_loss_given, first_gaussians, new_state, resumed_state
from splatcli.train.state import Placement, TrainState
from splatcli.train.step import Stepper
from splatcli.train.tensorboard import check_tensorboard
from splatcli.train.training_images import TrainingImages

if TYPE_CHECKING:
    from splatcli.distributed.process_group import ProcessGroup

_log = logging.getLogger(__name__)

#: Steps between two updates of the 3D filter (Mip-Splatting); each refinement makes one, too.
FILTER_3D_EVERY = 100
#: Steps between two reductions of the scales that are too large.
LIMIT_SCALES_EVERY = 100


class TrainerOptions(TypedDict, total=False):
    """Arguments of Trainer() that Trainer.start() and Trainer.resume() take and pass on."""

    engine: StepEngine | None
    renderer: Renderer | None
    clock: Callable[[], float]
    group: ProcessGroup | None
    strategy: StrategyFactory | None


class Trainer:
    """One run over one scene.

    state: where the run stands.
    run_dir: takes checkpoints and metrics.
    engine, renderer: None takes those of the state's device.
    clock: seconds; decides when to save and is written into the metrics, and affects no trained number.
    notes: sentences for the user, in the Started event.
    group: the processes that train this run together; None: this one alone, whatever the environment says.
    strategy: makes density control; None makes the one that the settings name.
    """

    @classmethod
    def start(
        cls,
        config: Config,
        scene: Scene,
        *,
        run_dir: RunDir,
        device: str = "cpu",
        init_model: Gaussians | None = None,
        initial: tuple[Gaussians, list[str]] | None = None,
        sharded: bool = False,
        **options: Unpack[TrainerOptions],
    ) -> Trainer:
        """Return a new run; raises as first_gaussians() and new_state().

        init_model: the model that ``config.model.init`` names. initial: of first_gaussians(), if it is known already.
        sharded: each process of the group holds a shard.
        """
        placement = Placement.of(config, device, run_dir.path, options.get("group"), sharded=sharded)
        # No name here holds on to the first Gaussians, whose memory a run that offloads frees.
        state, notes = new_state(
            config,
            scene,
            initial or first_gaussians(config, scene, init_model),
            placement,
            planned=options.get("engine") is None,
        )
        return cls(state, scene, run_dir=run_dir, notes=notes, **options)

    @classmethod
    def resume(
        cls,
        checkpoint: Checkpoint,
        scene: Scene,
        *,
        run_dir: RunDir,
        device: str = "cpu",
        config: Config | None = None,
        allowed: Collection[str] = (),
        notes: Iterable[str] = (),
        sharded: bool = False,
        **options: Unpack[TrainerOptions],
    ) -> Trainer:
        """Return the run of ``checkpoint``, bit-identical to one without a stop.

        config: settings to continue with in place of the stored ones. A new length leaves the schedule as it was
            stored, in absolute steps; added steps have the final learning rate.
        allowed: accepted differences of the scene, see check_same_scene().
        sharded: as for start(), whatever the run was before.
        Raises SceneError when the scene is not the one that was trained on, UsageError for a length already passed and
        without the ``engine`` of a run that has a loss of its own; else as resumed_state().
        """
        has_engine = options.get("engine") is not None
        check_loss_given(checkpoint, run_dir.path, given=has_engine)
        check_same_scene(checkpoint, scene, allowed)
        if config is not None:
            check_iterations(config, checkpoint.step)
        config = config or checkpoint.config
        placement = Placement.of(config, device, run_dir.path, options.get("group"), sharded=sharded)
        state, scene, more = resumed_state(checkpoint, scene, placement, config, planned=not has_engine)
        return cls(state, scene, run_dir=run_dir, notes=(*more, *notes), **options)

    def __init__(
        self,
        state: TrainState,
        scene: Scene,
        *,
        run_dir: RunDir,
        engine: StepEngine | None = None,
        renderer: Renderer | None = None,
        clock: Callable[[], float] = time.monotonic,
        notes: Iterable[str] = (),
        group: ProcessGroup | None = None,
        strategy: StrategyFactory | None = None,
    ) -> None:
        check_same_run(group, state, scene)
        check_tensorboard(state.config)
        if isinstance(engine, LossEngine):
            state.loss = engine.loss_name
        self.state = state
        self.scene = scene
        self.run_dir = run_dir
        self.group = group
        self.notes = tuple(notes)
        self.is_rank0 = group is None or group.rank == 0
        #: Shared by engine and renderer, so that rendering in bands is reported once.
        self._budget = MemoryBudget(state.gaussians.device, state.config.memory.budget, state.adam.storage.offloads)
        self._clock = clock
        #: The caller's; they stay through a rollback.
        self._engine = engine
        self._make_strategy = make_strategy if strategy is None else strategy
        self._next_config: Config | None = None
        self._renderer = renderer or make_renderer(self._budget)
        self._build(state.config.memory.budget)
        self.checkpointer = Checkpointer(run_dir, clock) if self.is_rank0 else ReadOnlyCheckpointer(run_dir, clock)
        curves = self.is_rank0 and state.config.train.tensorboard
        self.metrics_logger = MetricsLogger(run_dir, scene, clock, curves=curves)
        self.density = DensityControl(group)
        self.forecast = Forecast(mean_pixels([state.cameras[view] for view in state.train]))
        self.recovery = Recovery(run_dir)

    def _build(self, image_limit: int | None) -> None:
        """Make strategy, stepper, scorer and monitors of the current state. image_limit: of TrainingImages."""
        config, device = self.state.config, self.state.gaussians.device
        self.strategy = self._make_strategy(config, self.state.dataset.extent)
        images = TrainingImages(self.scene, device, limit=image_limit, depth_lambda=config.depth_lambda)
        self.stepper = Stepper(self.state, images, self._budget, group=self.group, engine=self._engine)
        engine = self.stepper.batch_engine
        self.scorer = (
            ShardedScorer(self.scene, self._renderer, engine)
            if isinstance(engine, ShardedEngine)
            else Scorer(self.scene, self._renderer)
        )
        self.finite_monitor = FiniteMonitor()
        self.intersection_monitor = IntersectionMonitor()
        self.quality_monitor = QualityMonitor(config.guard)

    def run(
        self,
        stop_at: int | None = None,
        should_stop: Callable[[], str | None] = lambda: None,
        should_save: Callable[[], bool] = lambda: False,
        deadline: float = math.inf,
    ) -> Iterator[Event]:
        """Train to the end, to step ``stop_at``, or until ``should_stop`` gives a reason; Stopped comes last.

        should_stop: asked between steps, and between the views of the last evaluation; one before lets it finish. The
            state is saved before Stopped.
        should_save: asked between steps; True saves, and training goes on.
        deadline: by the trainer's clock; the first step that ends after it is the last, reason "max-time".
        A state that diverged or did not fit the memory is replaced by the last checkpoint's, a few times. Raises
        DivergedError or ResourceError when that does not help, OutputError when the last state cannot be written.
        """

        def stop_reason() -> str | None:
            if self.group is not None:
                self.group.check_heartbeats()
            return should_stop() or ("max-time" if self._clock() >= deadline else None)

        self.metrics_logger.start(self.state.step)
        state, views = self.state, (len(self.state.train), len(self.state.test))
        device = str(state.gaussians.device)
        yield Started(state.step, state.config.train.iterations, state.count, *views, device, self.notes)
        check_same_state(self.group, state)
        gathered = self._gathered_state()
        with self._rank0_section("the first checkpoint"):
            yield from self._log(self.checkpointer.start(gathered))
        del state, gathered
        while True:
            try:
                reason = yield from self._train(stop_at, stop_reason, should_save)
                break
            except Exception as error:
                if not is_recoverable(error):
                    raise
                # Its traceback holds on to tensors whose memory the older state may need.
                failure = error.with_traceback(None)
                failure.__context__ = None
            yield from self._roll_back(failure)
        if reason in ("finished", "max-time") and self._scores_views:
            with self._evaluation_section("the evaluation"):
                events, stopped_by = self._evaluate(self.state.step, should_stop)
                yield from self._log([*self._image_changes(), *events])
                reason = stopped_by or reason
        assert self.checkpointer.saved is not None
        yield Stopped(self.state.step, reason, self.checkpointer.saved.path)
        if reason == "finished" and self.scorer.problem is not None:
            raise self.scorer.problem

    def reschedule(self, config: Config) -> None:
        """Continue with other settings from the next step on; to be called between two events of run()."""
        self._next_config = config

    @property
    def next_config(self) -> Config:
        """The settings from the next step on."""
        return self._next_config or self.state.config

    def steps_left(self) -> float:
        """Return how many steps like the present one the rest of the run is worth, see Forecast."""
        config, step = self.state.config, self.state.step
        return self.forecast.steps_left(self.strategy, config.schedule, config.train.iterations, step, self.state.count)

    def advance(self) -> list[Event]:
        """Do one step, for a caller with a loop of its own, which handles checkpoints and failures.

        On a GPU the events of a step come up to two calls later; see drain().
        """
        events = self._complete(*self._submit())
        if self.state.step % COMPARE_EVERY == 0:
            check_same_state(self.group, self.state)
        return events

    def drain(self) -> list[Stepped]:
        """Finish all pending steps and checks, and return what is not reported yet; ``state`` is then up to date.

        A caller of advance() drains before the state is rendered, scored, saved or exported.
        """
        events = self.stepper.drain(self.state)
        raise_on_all(self._shard_group, self.finite_monitor.finish)
        return events

    def estimate_view_dependence(self) -> None:
        """Estimate how far the views determine the view-dependent colour of the finished model.

        Renders and exports apply it. Training goes on without it, and the next step discards it. No step may be
        pending. All processes of a group call it.
        """
        state, group = self.state, self._shard_group
        before = state.columns.present().keys()
        gaussians, sizes = None, None
        if group is not None:
            gaussians = gather_geometry(state, group).gaussians
            sizes = state.columns.filter_3d
            sizes = None if sizes is None else group.all_gather_rows(sizes)
        state.estimate_view_dependence(gaussians, sizes, self.group)
        if before != state.columns.present().keys():
            self.checkpointer.saved = None  # a checkpoint of this step lacks it

    def _train(
        self, stop_at: int | None, should_stop: Callable[[], str | None], should_save: Callable[[], bool]
    ) -> Generator[Event, None, str]:
        """Do steps until there is a reason to stop, save the state and return the reason."""
        while True:
            yield from self._apply_next_config()
            reason = should_stop()
            if reason is None and self.state.step >= self.state.config.train.iterations:
                reason = "finished"
            if reason is None and stop_at is not None and self.state.step >= stop_at:
                reason = "stop-at"
            reason, _ = sync_stop_request(self.group, reason, False)
            if reason is not None:
                break
            try:
                submitted = self._submit()
            except (SceneError, UsageError):  # of an image or a plug-in; the state before this step is complete
                yield from self._save_last(lambda: False)
                raise
            scored = self._score(submitted[1], should_stop)
            yield from self._log([*self._complete(*submitted), *scored])
            step = self.state.step
            if step >= self.state.config.train.iterations:
                continue
            _, save = sync_stop_request(self.group, None, should_save() or self.checkpointer.due(self.state))
            if save or step % COMPARE_EVERY == 0:
                check_same_state(self.group, self.state)
            if save:
                yield from self._drain_and_log()
                yield from self._log(self._save())
        check_same_state(self.group, self.state)
        if reason in ("finished", "max-time"):
            yield from self._drain_and_log()
            self.estimate_view_dependence()
        yield from self._save_last(lambda: reason in ("finished", "stop-at") and should_stop() is None)
        return reason

    def _submit(self) -> tuple[bool, list[Stepped]]:
        """Submit the next step; return whether a refinement follows, and the steps whose losses are known now.

        After a SceneError or UsageError the state is the one before the step.
        """
        step = self.state.step + 1
        reported = self.stepper.step(self.state, self.strategy, step)
        self.state.discard_view_dependence()
        return self.strategy.refines_at(step), reported

    def _score(self, reported: list[Stepped], should_stop: Callable[[], str | None]) -> list[Event]:
        """Score the views that are due after the step that _submit() submitted, and return the events.

        A refinement of the same step comes later: it may lower all opacities, and no figure would tell of the model.
        reported: of _submit(); gets the steps that were pending.
        should_stop: asked between the held-out views. Only the end of the time cuts an evaluation short, since the last
            one follows: after any other stop the run continues with the next step, and no line would tell of this one.
        """
        step, train, guard = self.state.step + 1, self.state.config.train, self.state.config.guard
        if not self._scores_views or step >= train.iterations:
            return []
        events: list[Event] = []
        if guard.probe_every and step % guard.probe_every == 0:
            reported += self.drain()
            with self._evaluation_section("the probe views"):
                events += self._probe(step)
        if train.eval_every and step % train.eval_every == 0:
            reported += self.drain()
            with self._evaluation_section("an evaluation"):
                events += self._evaluate(step, lambda: "max-time" if should_stop() == "max-time" else None)[0]
        return events

    def _complete(self, refines: bool, reported: list[Stepped]) -> list[Event]:
        """Refine after the step that _submit() submitted, and return the events that are known since the last one."""
        state, guard = self.state, self.state.config.guard
        step = state.step + 1
        events: list[Event] = []
        filter_due = state.columns.filter_3d is not None and step % FILTER_3D_EVERY == 0
        limit_due = step % LIMIT_SCALES_EVERY == 0
        due = comparisons_due(state.config, len(state.train), step) if state.loss is None else 0
        views_due = due > state.comparisons
        if refines or filter_due or limit_due or views_due:
            reported += self.stepper.drain(state)
        compared = self._compare_views(step) if views_due else []  # before the refinement, which may lower opacities
        state.comparisons = max(due, state.comparisons)
        if limit_due:
            self.density.limit_scales(state)
        if refines:
            events = self.density.refine(state, self.strategy, step)
            if any(isinstance(event, OpacityReset) for event in events):
                self.quality_monitor.reset(step)
            # The step is reported with the count after its refinement.
            reported[-1] = dataclasses.replace(reported[-1], num_gaussians=state.count)
        if filter_due and not events:  # a refinement has updated it already
            self.density.update_filter_3d(state)
        state.step = step
        if guard.finite_every and step % guard.finite_every == 0:
            raise_on_all(self._shard_group, lambda: self.finite_monitor.check(step, state.gaussians, state.adam))
        alarm = self.intersection_monitor.check(step, self.stepper.isects, state.count)
        return [*reported, *compared, *events, *([] if alarm is None else [alarm])]

    def _compare_views(self, step: int) -> list[Event]:
        """Leave out the training views that do not fit the others after ``step``, and no others any longer.

        Every process of a group renders all views, unless each holds a shard; what rank 0 finds holds for all.
        """
        state, before = self.state, self.state.sampler.skipped
        figures = self.scorer.view_errors(state)
        if isinstance(figures, Alarmed):
            errors, skipped, alarms = {}, before, [dataclasses.replace(figures, step=step)]
        else:
            errors = outliers(figures, state.config.train.max_view_error)
            skipped = frozenset(errors)
            alarms = [] if state.comparisons else self._image_alarms(step, figures, skipped)
        if self.group is not None:
            skipped = rows_of_rank0(self.group, skipped, len(state.train))
        if skipped == before:
            return [*alarms]
        state.sampler.skip(skipped)
        names = {state.cameras[state.train[row]].name: error for row, error in errors.items()}
        return [*alarms, ViewsCompared(step, names, len(state.train))]

    def _image_alarms(self, step: int, errors: Mapping[int, ViewError], skipped: Collection[int]) -> list[Alarmed]:
        """Return what is suspicious in the training images of the views that are not ``skipped``."""
        state = self.state
        names = [state.cameras[state.train[row]].name for row in blurred(errors) if row not in skipped]
        notes = {"exposure": exposure_note(errors), "blur": blur_note(names, len(errors))}
        return [Alarmed(step, alarm, note) for alarm, note in notes.items() if note is not None]

    def _apply_next_config(self) -> Iterator[Event]:
        """Continue with the settings of reschedule(), if there are any."""
        config, self._next_config = self._next_config, None
        if config is None:
            return
        yield from self._log(self.stepper.drain(self.state))
        apply_config(self.state, config)
        self.strategy = self._make_strategy(config, self.state.dataset.extent)
        try:
            self.run_dir.write_config(config)
        except (OutputError, ResourceError) as error:  # checkpoints have the settings too
            _log.warning("%s", error)
        yield from self._log([Rescheduled(self.state.step, config.train.iterations)])

    def _drain_and_log(self) -> Iterator[Event]:
        yield from self._log(self.drain())

    def _save(self) -> list[Event]:
        saved: list[Event] = []
        gathered = self._gathered_state()
        with self._rank0_section("a save"):
            # Rank 0 finds a state that must not be kept, and all roll back with it.
            raise_on_all(self.group, lambda: saved.append(self.checkpointer.save(gathered)))
        return saved

    def _save_last(self, keep_trying: Callable[[], bool]) -> Iterator[Event]:
        """Save the last state of the run, unless it is saved. keep_trying: see Checkpointer.finish()."""
        yield from self._drain_and_log()
        saved = self.checkpointer.saved is not None and self.checkpointer.saved.step == self.state.step
        if self._shard_group is not None and not sync_stop_request(self.group, None, self.is_rank0 and not saved)[1]:
            return
        gathered = self._gathered_state()
        with self._rank0_section("the last save"):
            yield from self._log(self.checkpointer.finish(gathered, keep_trying=keep_trying))

    def _gathered_state(self) -> TrainState:
        """Return the state to save: on rank 0 with the rows of all shards."""
        if self._shard_group is None:
            return self.state
        return gather_state(self.state, self._shard_group, self.run_dir.path) or self.state

    def _probe(self, step: int) -> list[Event]:
        """Measure the probe views after ``step``."""
        probe = dataclasses.replace(self.scorer.probe(self.state), step=step)
        alarm = self.quality_monitor.check(probe) if isinstance(probe, Probed) else None
        return [probe] if alarm is None else [probe, alarm]

    def _evaluate(self, step: int, should_stop: Callable[[], str | None]) -> tuple[list[Event], str | None]:
        """Score the held-out views after ``step``; return the event, and the reason for a stop in between."""
        event, reason = self.scorer.evaluate(
            self.state, lambda: sync_stop_request(self._shard_group, should_stop(), False)[0]
        )
        return [] if event is None else [dataclasses.replace(event, step=step)], reason

    def _image_changes(self) -> list[Event]:
        """Return an alarm where the images are not those that the run began or was resumed with."""
        try:
            changes = fingerprint_differences(self.state.dataset.fingerprint, self.scene.fingerprint())
            texts = [text for _, text in changes]
        except SceneError as error:
            texts = [f"{error.where}: {error.what}"]
        text = f"the scene has changed while the run trained: {'; '.join(texts)}; it may have used either"
        return [Alarmed(self.state.step, "images", text)] if texts else []

    def _roll_back(self, failure: Exception) -> Iterator[Event]:
        """Replace a state that failed by that of the last checkpoint."""
        most_gaussians = self.stepper.most_gaussians
        plan = self.recovery.plan(failure, self.state, most_gaussians=most_gaussians)
        rescheduled, self._next_config = self._next_config, None
        if rescheduled is not None:  # and slower than that from now on, not as fast again
            plan = dataclasses.replace(plan, config=rescheduled)
        self.stepper.abandon()
        # First everything goes that takes memory. If memory was short, no training image stays on a GPU.
        image_limit = 0 if plan.cause == "memory" else plan.config.memory.budget
        del self.state, self.stepper, self.scorer, self.finite_monitor
        gc.collect()
        if plan.placement.device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # a GPU that has failed raises again soon enough
                torch.cuda.synchronize(
                    plan.placement.device
                )  # pinned memory is given out anew, whatever a kernel does to it
            torch.cuda.empty_cache()
        self.state, event = self.recovery.restore(plan)
        self._build(image_limit)
        self.stepper.most_gaussians = most_gaussians
        self.checkpointer.saved = None  # the state that ends the run may have this step, and is another
        yield from self._log([event])
        if rescheduled is not None:
            yield from self._log([Rescheduled(self.state.step, rescheduled.train.iterations)])

    def _log(self, events: Iterable[Event]) -> Iterator[Event]:
        return self.metrics_logger.log(events, lambda: self.state)

    @property
    def _shard_group(self) -> ProcessGroup | None:
        """The processes, where each holds a shard of the Gaussians."""
        return shard_group(self.state, self.group)

    @property
    def _scores_views(self) -> bool:
        """Whether this process takes part where views are scored: rank 0 does, and all ranks that hold shards."""
        return self.is_rank0 or self._shard_group is not None

    def _rank0_section(self, doing: str) -> contextlib.AbstractContextManager[None]:
        """Return a section for work of rank 0, while the other ranks wait."""
        return contextlib.nullcontext() if self.group is None else self.group.rank0_section(doing)

    def _evaluation_section(self, doing: str) -> contextlib.AbstractContextManager[None]:
        """Return a section for scoring views; see _scores_views."""
        return self._rank0_section(doing) if self._shard_group is None else contextlib.nullcontext()
