"""Trainer: the loop from step to step, told as a stream of events; it neither prints nor decides when to show what."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from splatcli.checkpoint.run_dir import RunDir
from splatcli.checkpoint.state import Checkpoint
from splatcli.config import Config
from splatcli.errors import SceneError
from splatcli.gaussians import Gaussians
from splatcli.rasterizer.memory import Budget
from splatcli.rasterizer.step_inputs import StepEngine
from splatcli.scene.scene import Scene
from splatcli.train.checkpointer import Checkpointer
from splatcli.train.data_parallel import (
    COMPARE_EVERY,
    ReadOnlyCheckpointer,
    check_same_run,
    check_same_state,
    place_of,
    raise_on_all,
    sync_stop_request,
)
from splatcli.train.densify import make_strategy
from splatcli.train.density import Density
from splatcli.train.evaluate import Renderer, renderer_within
from splatcli.train.events import Event, OpacityReset, Probed, Rescheduled, Started, Stopped
from splatcli.train.metrics_logger import MetricsLogger
from splatcli.train.monitor import FiniteWatch, PairsWatch, QualityWatch, is_survivable
from splatcli.train.recovery import Recovery
from splatcli.train.sharding import gather_state
from splatcli.train.start import apply_config, new_state, resumed_state
from splatcli.train.state import TrainState
from splatcli.train.step import Steps

if TYPE_CHECKING:
    from splatcli.distributed.process_group import ProcessGroup

#: Steps between two measurements of the 3D filter (Mip-Splatting); each edit of the Gaussians makes one too.
REFILTER_EVERY = 100


class Trainer:
    """One run over one scene.

    state: where the run stands.
    run_dir: takes checkpoints and metrics.
    engine, renderer: None takes those of the state's device.
    clock: seconds; decides when to save and is written into the metrics, and touches nothing that is trained.
    notes: things worth telling the user, in the Started event.
    group: the processes that train this run together; None: this one alone, whatever the environment says.
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
        notes: Iterable[str] = (),
        group: ProcessGroup | None = None,
    ) -> None:
        check_same_run(group, state, scene)
        self.state = state
        self.scene = scene
        self.run_dir = run_dir
        #: One for engine and renderer, so that bands are told of once.
        self._budget = Budget(state.gaussians.device, state.config.memory.budget, state.adam.store.offloads)
        self.group = group
        self.is_rank0 = group is None or group.rank == 0
        self.steps = self._steps(engine, state.config.memory.budget)
        self.notes = tuple(notes)
        self.strategy = make_strategy(state.config, state.dataset.extent)
        self._clock = clock
        self.keeper = Checkpointer(run_dir, clock) if self.is_rank0 else ReadOnlyCheckpointer(run_dir, clock)
        self.journal = MetricsLogger(run_dir, scene, clock)
        self._renderer = renderer or renderer_within(self._budget)
        self.scorer = self.steps.scorer(self._renderer)
        self.density = Density(group)
        self.recovery = Recovery(run_dir)
        self.finite = FiniteWatch()
        self.crowding = PairsWatch()
        self.quality = QualityWatch(state.config.guard)
        #: One that was handed in stays, whatever fails.
        self._engine_is_ours = engine is None

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
        first: tuple[Gaussians, list[str]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        group: ProcessGroup | None = None,
        sharded: bool = False,
    ) -> Trainer:
        """A new run; arguments as in new_state(). sharded: each process of the group holds a shard of the Gaussians."""
        place, folder = place_of(group, sharded), run_dir.path
        state, notes = new_state(
            config, scene, device, given, first=first, planned=engine is None, folder=folder, place=place
        )
        return cls(
            state, scene, run_dir=run_dir, engine=engine, renderer=renderer, clock=clock, notes=notes, group=group
        )

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
        config: Config | None = None,
        allowed: Collection[str] = (),
        notes: Iterable[str] = (),
        clock: Callable[[], float] = time.monotonic,
        group: ProcessGroup | None = None,
        sharded: bool = False,
    ) -> Trainer:
        """The run that ``checkpoint`` was saved from, going on with the same bits; arguments as in resumed_state().

        A new length leaves the schedule as it was stored, in absolute steps; added steps have the final learning rate.
        sharded: as for start(), whatever the run has been before.
        """
        place, folder = place_of(group, sharded), run_dir.path
        state, scene, found = resumed_state(
            checkpoint,
            scene,
            device,
            config=config,
            allowed=allowed,
            planned=engine is None,
            folder=folder,
            place=place,
        )
        notes = (*found, *notes)
        return cls(
            state, scene, run_dir=run_dir, engine=engine, renderer=renderer, clock=clock, notes=notes, group=group
        )

    def run(
        self,
        stop_at: int | None = None,
        should_stop: Callable[[], str | None] = lambda: None,
        should_save: Callable[[], bool] = lambda: False,
        deadline: float = math.inf,
    ) -> Iterator[Event]:
        """Train to the end, to step ``stop_at``, or until ``should_stop`` gives a reason; Stopped comes last.

        should_stop: asked between steps and between evaluated views. The state is saved before Stopped.
        should_save: asked between steps; True saves, and training goes on.
        deadline: by the trainer's clock; the first step that ends after it is the last, reason "max-time".
        A state that diverged or did not fit the memory is given up for the last checkpoint, a few times. Raises
        DivergedError or ResourceError when that does not help, OutputError when the last state cannot be written.
        """

        def ends() -> str | None:
            if self.group is not None:
                self.group.check_heartbeats()
            return should_stop() or ("max-time" if self._clock() >= deadline else None)

        self.journal.begin()
        yield self._start_event()
        check_same_state(self.group, self.state)
        whole = self._gathered_state()
        with self._rank0_section("the first checkpoint"):
            yield from self._logged(self.keeper.begin(whole))
        del whole
        while True:
            try:
                reason = yield from self._train(stop_at, ends, should_save)
                break
            except Exception as error:
                if not is_survivable(error):
                    raise
                # Its traceback holds on to tensors whose memory may be what the older state needs.
                failure = error.with_traceback(None)
                failure.__context__ = None
            yield from self._go_back(failure)
        if reason in ("finished", "max-time") and self._evaluates:
            with self._evaluation_section("the evaluation"):
                reason = (yield from self._evaluate(should_stop)) or reason
        assert self.keeper.saved is not None
        yield Stopped(self.state.step, reason, self.keeper.saved.path)
        if reason == "finished" and self.scorer.problem is not None:
            raise self.scorer.problem

    def reschedule(self, config: Config) -> Event:
        """Goes on with other settings from the next step on; to be called between two events of run()."""
        apply_config(self.state, config)
        self.strategy = make_strategy(config, self.state.dataset.extent)
        self.run_dir.write_config(config)
        (event,) = self._logged([Rescheduled(self.state.step, config.train.iterations)])
        return event

    def advance(self) -> list[Event]:
        """One step, for a caller with a loop of its own, who sees to checkpoints and to what goes wrong."""
        events = self._step()
        if self.state.step % COMPARE_EVERY == 0:
            check_same_state(self.group, self.state)
        return events

    def _start_event(self) -> Started:
        state, device = self.state, str(self.state.gaussians.device)
        steps, views = state.config.train.iterations, (len(state.train), len(state.test))
        return Started(state.step, steps, state.count, *views, device, self.notes)

    def _train(
        self, stop_at: int | None, should_stop: Callable[[], str | None], should_save: Callable[[], bool]
    ) -> Generator[Event, None, str]:
        """Steps until there is a reason to stop, which is returned when the state is saved."""
        while (reason := sync_stop_request(self.group, self._reason(stop_at, should_stop), False)[0]) is None:
            try:
                yield from self._logged(self._step())
            except SceneError:  # a photo can be read no more; the state before this step is whole
                yield from self._finish(lambda: False)
                raise
            step, train, guard = self.state.step, self.state.config.train, self.state.config.guard
            if step >= train.iterations:
                continue
            _, save = sync_stop_request(self.group, None, should_save() or self.keeper.due(self.state))
            if save or step % COMPARE_EVERY == 0:
                check_same_state(self.group, self.state)
            if save:
                yield from self._settled()
                yield from self._logged(self._save())
            if self._evaluates and guard.probe_every and step % guard.probe_every == 0:
                yield from self._settled()
                with self._evaluation_section("the probe views"):
                    yield from self._logged(self._probe())
            if self._evaluates and train.eval_every and step % train.eval_every == 0:
                yield from self._settled()
                with self._evaluation_section("an evaluation"):
                    yield from self._evaluate(should_stop)
        check_same_state(self.group, self.state)
        yield from self._finish(lambda: reason in ("finished", "stop-at") and should_stop() is None)
        return reason

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
        told = self.steps.take(state, self.strategy, step)
        edits: list[Event] = []
        if self.strategy.edits(step):
            told += self.steps.drain(state)
            edits = self.density.edit(state, self.strategy, step)
            if any(isinstance(edit, OpacityReset) for edit in edits):
                self.quality.reset(step)
            # The step is told with the count that it leaves behind.
            told[-1] = dataclasses.replace(told[-1], num_gaussians=state.count)
        elif state.smoothing is not None and step % REFILTER_EVERY == 0:
            told += self.steps.drain(state)
            self.density.update_filter_3d(state)
        state.step = step
        if config.guard.finite_every and step % config.guard.finite_every == 0:
            raise_on_all(self._shard_group, lambda: self.finite.look(step, state.gaussians, state.adam))
        alarm = self.crowding.judge(step, self.steps.pairs, state.count)
        return [*told, *edits, *([] if alarm is None else [alarm])]

    def _settled(self) -> Iterator[Event]:
        """Nothing is on its way any more, and all that is known of the state has been looked at."""
        yield from self._logged(self.steps.drain(self.state))
        raise_on_all(self._shard_group, self.finite.read)

    def _finish(self, patient: Callable[[], bool]) -> Iterator[Event]:
        yield from self._settled()
        saved = self.keeper.saved is not None and self.keeper.saved.step == self.state.step
        if self._shard_group is not None and not sync_stop_request(self.group, None, self.is_rank0 and not saved)[1]:
            return
        whole = self._gathered_state()
        with self._rank0_section("the last save"):
            yield from self._logged(self.keeper.finish(whole, patient=patient))

    def _save(self) -> list[Event]:
        saved: list[Event] = []
        whole = self._gathered_state()
        with self._rank0_section("a save"):
            # Rank 0 finds a state that must not be kept, and all roll back with it.
            raise_on_all(self.group, lambda: saved.append(self.keeper.save(whole)))
        return saved

    def _gathered_state(self) -> TrainState:
        """Return the state as it is saved: on rank 0 with the rows of all shards."""
        if self._shard_group is None:
            return self.state
        return gather_state(self.state, self._shard_group, self.run_dir.path) or self.state

    @property
    def _shard_group(self) -> ProcessGroup | None:
        """The processes, where each holds a shard of the Gaussians; None where each holds all."""
        return None if self.state.shard is None else self.group

    @property
    def _evaluates(self) -> bool:
        """Whether this process takes part in evaluations."""
        return self.is_rank0 or self._shard_group is not None

    def _rank0_section(self, doing: str) -> contextlib.AbstractContextManager[None]:
        """A section in which the other ranks wait for rank 0."""
        return contextlib.nullcontext() if self.group is None else self.group.rank0_section(doing)

    def _evaluation_section(self, doing: str) -> contextlib.AbstractContextManager[None]:
        """The same, unless the ranks evaluate together, since each holds a shard."""
        return self._rank0_section(doing) if self._shard_group is None else contextlib.nullcontext()

    def _steps(self, engine: StepEngine | None, limit: int | None) -> Steps:
        return Steps(self.state, self.scene, self._budget, group=self.group, engine=engine, limit=limit)

    def _go_back(self, failure: Exception) -> Iterator[Event]:
        """The last checkpoint's state takes the place of one that failed."""
        largest, engine = self.steps.largest, None if self._engine_is_ours else self.steps.engine
        plan = self.recovery.plan(failure, self.state, largest=largest)
        self.finite, self.crowding = FiniteWatch(), PairsWatch()
        self.steps.abandon()
        # First everything goes that takes memory, photos on a GPU included, if it was memory that was short.
        limit = 0 if plan.cause == "memory" else plan.config.memory.budget
        del self.state, self.steps, self.scorer
        gc.collect()
        if plan.device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # a GPU that has failed tells so again soon enough
                torch.cuda.synchronize(plan.device)  # pinned memory is given out anew, whatever a kernel does to it
            torch.cuda.empty_cache()
        self.state, event = self.recovery.carry_out(plan)
        self.steps = self._steps(engine, limit)
        self.steps.largest = largest
        self.scorer = self.steps.scorer(self._renderer)
        self.strategy = make_strategy(self.state.config, self.state.dataset.extent)
        self.quality = QualityWatch(self.state.config.guard)
        self.keeper.saved = None  # the state that ends the run may have this step, and is another
        yield from self._logged([event])

    def _probe(self) -> list[Event]:
        probe = self.scorer.probe(self.state)
        alarm = self.quality.judge(probe) if isinstance(probe, Probed) else None
        return [probe] if alarm is None else [probe, alarm]

    def _evaluate(self, should_stop: Callable[[], str | None]) -> Generator[Event, None, str | None]:
        event, reason = self.scorer.evaluate(
            self.state, lambda: sync_stop_request(self._shard_group, should_stop(), False)[0]
        )
        yield from self._logged([] if event is None else [event])
        return reason

    def _logged(self, events: Iterable[Event]) -> Iterator[Event]:
        return self.journal.log(events, lambda: self.state)
