"""A disk that refuses does not end a run: the older checkpoints stay, and it is tried again, less and less often."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from splatcli.checkpoint.file import load_checkpoint
from splatcli.checkpoint.run_dir import RunDir
from splatcli.checkpoint.state import Checkpoint
from splatcli.config import Config
from splatcli.errors import OutputError
from splatcli.train.events import Alarmed, Event, Saved, SaveFailed, Stepped, Stopped
from tests.train.worlds import MemoryRun, short_config, start_plain


class Time:
    """Seconds that pass with each step and each sleep, and nothing else."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FullDisk(MemoryRun):
    """Refuses checkpoints, and lines of the metrics, while ``full`` says so."""

    def __init__(self, full: Callable[[], bool], room: int = 1_000) -> None:
        super().__init__()
        self.full = full
        self.room = room
        self.attempts: list[int] = []

    def save(self, checkpoint: Checkpoint) -> Path:
        self.attempts.append(checkpoint.step)
        if self.full():
            raise OutputError("could not write checkpoint (disk full?); the old one is kept", where=self.path)
        return super().save(checkpoint)

    def append_metrics(self, record: dict[str, object], *, again: bool = False) -> None:
        if self.full():
            raise OutputError("could not add to the metrics (disk full?)", where=self.path)
        super().append_metrics(record, again=again)

    def room_for(self, checkpoint: Checkpoint, count: int) -> int:
        return self.room


class Run:
    """A run of 40 steps of 13 seconds each, whose disk is full when ``full`` says so about the time."""

    def __init__(self, full: Callable[[float], bool], config: Config | None = None, room: int = 1_000) -> None:
        self.time = Time()
        self.disk = FullDisk(lambda: full(self.time.now), room)
        self.trainer = start_plain(
            config or short_config(40, save={"every_minutes": 1.0, "steps": ()}), self.disk, clock=self.time
        )
        self.trainer.checkpointer._sleep = self.time.sleep
        self.happened: list[Event] = []

    def train(self, should_stop: Callable[[], str | None] = lambda: None) -> list[Event]:
        for event in self.trainer.run(should_stop=should_stop):
            self.happened.append(event)
            if isinstance(event, Stepped):
                self.time.now += 13.0
        return self.happened

    def of(self, kind: type) -> list[int]:
        return [event.step for event in self.happened if isinstance(event, kind)]


def test_a_disk_that_is_full_for_a_while_costs_checkpoints_and_nothing_else() -> None:
    # Of so few Gaussians a refinement may remove more than half, which is not what this is about.
    config = short_config(40, save={"every_minutes": 1.0, "steps": ()}, guard={"prune_jump": 1.0})
    run = Run(lambda now: 60 <= now < 290, config)
    happened = run.train()
    # Due at 65 s; then after 30, 60 and 120 seconds, at the next step each time. Saved again as ever from then on.
    assert run.of(SaveFailed) == [5, 8, 13]
    assert [event.retry_seconds for event in happened if isinstance(event, SaveFailed)] == [30.0, 60.0, 120.0]
    assert run.of(Saved) == [0, 23, 28, 33, 38, 40]
    assert run.of(Stepped) == list(range(1, 41))
    assert isinstance(happened[-1], Stopped)
    assert run.of(Alarmed) == [5]
    assert run.trainer.checkpointer.missed == []


def test_a_disk_full_from_the_start_ends_the_run_before_its_first_step() -> None:
    run = Run(lambda now: True)
    with pytest.raises(OutputError):
        run.train()
    assert run.of(Stepped) == []


def test_a_run_that_is_done_waits_for_room() -> None:
    run = Run(lambda now: 60 <= now < 700)
    run.train()
    assert run.of(Saved) == [0, 40]
    assert run.disk.saved[40].step == 40
    assert 700 <= run.time.now < 711
    assert all(
        event.retry_seconds == 10.0 for event in run.happened if isinstance(event, SaveFailed) and event.step == 40
    )


def test_it_does_not_wait_for_ever_and_the_error_says_what_there_is() -> None:
    run = Run(lambda now: now >= 200)
    with pytest.raises(OutputError, match=r"the state after step 40 could not be saved") as caught:
        run.train()
    assert caught.value.exit_code == 8
    assert "the newest checkpoint is ckpt_000015.pt" in caught.value.what
    assert "splat resume run" in str(caught.value.remedy)
    assert run.time.now == pytest.approx(40 * 13.0 + 600.0, abs=11.0)


def test_a_resumed_run_that_saved_nothing_yet_names_the_checkpoint_that_there_is() -> None:
    run = Run(lambda now: now >= 10)

    def as_resumed() -> None:
        run.trainer.checkpointer.saved = None

    with pytest.raises(OutputError, match=r"the newest checkpoint is ckpt_000000\.pt"):
        run.train(as_resumed)


def test_a_signal_is_not_kept_waiting() -> None:
    run = Run(lambda now: now >= 200)
    with pytest.raises(OutputError, match="the state after step 20 could not be saved"):
        run.train(lambda: "SIGTERM" if run.time.now >= 260 else None)
    assert run.time.now == 260


def test_a_signal_ends_the_wait() -> None:
    run = Run(lambda now: now >= 200)
    with pytest.raises(OutputError, match="after step 40"):
        run.train(lambda: "SIGINT" if run.time.now >= 40 * 13.0 + 25 else None)
    assert run.time.now == 40 * 13.0 + 25


def test_a_named_step_that_was_refused_is_remembered() -> None:
    run = Run(lambda now: 60 <= now < 200, short_config(20, save={"steps": (3, 7, 18)}))
    run.train()
    assert run.of(Saved) == [0, 3, 18, 20]
    assert run.trainer.checkpointer.missed == [7]


def test_a_named_last_step_that_is_saved_in_the_end_is_not_missed() -> None:
    run = Run(lambda now: 60 <= now < 20 * 13.0 + 45, short_config(20, save={"steps": (20,)}))
    run.train()
    assert len([step for step in run.of(SaveFailed) if step == 20]) > 1
    assert run.of(Saved) == [0, 20]
    assert run.trainer.checkpointer.missed == []


def test_a_lack_of_memory_for_the_copy_is_no_reason_to_end() -> None:
    run = Run(lambda now: False)
    real = run.disk.save

    def save(checkpoint: Checkpoint) -> Path:
        if checkpoint.step == 5:
            raise MemoryError
        return real(checkpoint)

    run.disk.save = save  # type: ignore[method-assign]
    run.train()
    assert run.of(SaveFailed) == [5]
    assert run.of(Saved)[:2] == [0, 8]


@pytest.mark.parametrize(("room", "alarmed"), [(3, True), (4, False)])
def test_little_room_is_reported_at_the_start(room: int, alarmed: bool) -> None:
    config = short_config(20, save={"steps": (7, 14, 30), "keep_last": 2}, strategy={"cap_max": 5_000})
    run = Run(lambda now: False, config, room)
    run.train()
    assert run.of(Alarmed) == ([0] if alarmed else [])
    if alarmed:
        (alarm,) = [event for event in run.happened if isinstance(event, Alarmed)]
        assert "room for 3 more checkpoints of 5,000 Gaussians, and the run may keep 4" in alarm.text


@pytest.mark.parametrize("removed", ["run", "run/ckpts"])
def test_a_folder_that_is_removed_is_not_waited_for(tmp_path: Path, removed: str) -> None:
    """No later attempt to save a run whose folder is removed can succeed; its folder of checkpoints is made again."""
    with RunDir.create(tmp_path / "run") as run_dir:
        time = Time()
        trainer = start_plain(short_config(10), run_dir, clock=time)
        trainer.checkpointer._sleep = time.sleep
        events = trainer.run()
        for event in events:
            if isinstance(event, Stepped) and event.step == 5:
                shutil.rmtree(tmp_path / removed)
                break
        if removed == "run":
            with pytest.raises(OutputError, match=r"was removed while the run was writing to it; nothing is saved\n"):
                list(events)
        else:
            list(events)
            assert load_checkpoint(tmp_path / "run/ckpts/ckpt_000010.pt").step == 10
        assert time.now == 0.0
