"""A disk that fills up under a real run folder: faults are injected into the calls that write."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from splatcli.checkpoint.file import checkpoint_bytes, load_checkpoint
from splatcli.checkpoint.run_dir import RunDir
from splatcli.checkpoint.state import Checkpoint
from splatcli.errors import OutputError
from splatcli.train.events import Alarmed, Event, Saved, SaveFailed, Stopped
from splatcli.train.trainer import Trainer
from tests.train.worlds import PlainEngine, made_scene, plain_renderer, short_config

CheckpointOf = Callable[..., Checkpoint]


class Disk:
    """Fails chosen calls while ``full``."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, code: int) -> None:
        self.full = False
        real = getattr(os, name)

        def call(*args: Any, **rest: Any) -> Any:
            if self.full:
                raise OSError(code, os.strerror(code))
            return real(*args, **rest)

        patch.setattr(os, name, call)


def run_of(folder: RunDir, **sections: dict[str, object]) -> Trainer:
    config = short_config(20, **{"save": {"steps": (4, 8, 12), "patience_minutes": 0.0}, **sections})
    return Trainer.start(config, made_scene(), run_dir=folder, engine=PlainEngine(), renderer=plain_renderer)


@pytest.mark.parametrize("name", ["posix_fallocate", "fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_run_outlives_a_disk_that_fails_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    disk = Disk(monkeypatch, name, code)
    happened: list[Event] = []
    with RunDir.create(tmp_path / "run") as folder:
        for event in run_of(folder).run():
            happened.append(event)
            # Full from just after the save at step 4 until just after the failure at step 8.
            if isinstance(event, Saved | SaveFailed):
                disk.full = event.step == 4
    assert [event.step for event in happened if isinstance(event, Saved)] == [0, 4, 12, 20]
    (failed,) = [event for event in happened if isinstance(event, SaveFailed)]
    assert failed.step == 8
    assert os.strerror(code) in failed.text
    assert isinstance(happened[-1], Stopped)
    for step in (4, 12, 20):
        assert load_checkpoint(tmp_path / "run" / "ckpts" / f"ckpt_{step:06d}.pt").step == step
    left = [path.name for path in (tmp_path / "run").rglob("*.tmp.*")]
    assert left == []


@pytest.mark.parametrize("name", ["posix_fallocate", "fsync", "replace"])
def test_a_run_whose_last_state_finds_no_room_keeps_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    disk = Disk(monkeypatch, name, errno.ENOSPC)
    with RunDir.create(tmp_path / "run") as folder:
        trainer = run_of(folder).run()
        for event in trainer:
            if isinstance(event, Saved) and event.step == 12:
                disk.full = True
                break
        with pytest.raises(OutputError, match=r"the newest checkpoint is .*ckpt_000012\.pt") as caught:
            list(trainer)
        disk.full = False
        found = folder.newest()
    assert caught.value.exit_code == 8
    assert found is not None
    assert found.step == 12


def test_lines_that_find_no_room_are_lost_whole_and_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, happened = Path.open, []
    full = [False]

    def opened(path: Path, *args: Any, **rest: Any) -> Any:
        if full[0] and path.name == "metrics.jsonl":
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, *args, **rest)

    monkeypatch.setattr(Path, "open", opened)
    with RunDir.create(tmp_path / "run") as folder:
        for event in run_of(folder, guard={"probe_every": 2}).run():
            happened.append(event)
            full[0] = 5 <= event.step < 15
    alarms = [event for event in happened if isinstance(event, Alarmed)]
    assert [(alarm.alarm, alarm.step) for alarm in alarms] == [("metrics", 6)]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines} == {2, 4, 16, 18, 20}


def test_a_pointer_that_cannot_be_written_is_no_failure(
    checkpoint_of: CheckpointOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        if Path(target).name == "latest":
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with RunDir.create(tmp_path / "run") as folder:
        path = folder.save(checkpoint_of())
        assert path.is_file()
        assert folder.newest() is not None


def test_a_resumed_run_finds_out_at_once_that_there_is_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunDir.create(tmp_path / "run") as folder:
        list(run_of(folder).run(stop_at=12))
    disk = Disk(monkeypatch, "posix_fallocate", errno.ENOSPC)
    disk.full = True
    with RunDir.open(tmp_path / "run") as folder:
        checkpoint = folder.newest()
        assert checkpoint is not None
        trainer = Trainer.resume(
            checkpoint, made_scene(), run_dir=folder, engine=PlainEngine(), renderer=plain_renderer
        )
        with pytest.raises(OutputError, match="there is no room for a checkpoint of 1 MiB"):
            list(trainer.run())
    assert not list((tmp_path / "run").rglob("*.tmp.*"))


@pytest.mark.parametrize("count", [0, 1, 1_000, 20_000])
@pytest.mark.parametrize("degree", [0, 3])
def test_the_size_of_a_checkpoint_is_known_beforehand(
    checkpoint_of: CheckpointOf, tmp_path: Path, count: int, degree: int
) -> None:
    state = checkpoint_of(count, degree)
    with RunDir.create(tmp_path / "run") as folder:
        size = folder.save(state).stat().st_size
    known = checkpoint_bytes(state)
    assert size <= known <= 1.03 * size + (1 << 20)
    if count:
        assert checkpoint_bytes(checkpoint_of(count, degree), 0) < known
        assert checkpoint_bytes(checkpoint_of(1, degree), count) == known


def start(path: Path, then: Callable[[RunDir], object], *, overwrite: bool = False) -> None:
    """A new run folder in which ``then`` happens."""
    with RunDir.create(path, overwrite=overwrite) as folder:
        folder.write_config(short_config())
        folder.append_metrics({"step": 0})
        then(folder)


def fail(folder: RunDir) -> None:
    raise ZeroDivisionError


def test_a_start_that_fails_leaves_nothing_behind(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    def save_and_fail(folder: RunDir) -> None:
        folder.save(replace(checkpoint_of(), step=0, adam_step=0, sh_last_step=None))
        fail(folder)

    with pytest.raises(ZeroDivisionError):
        start(tmp_path / "a" / "b" / "run", save_and_fail)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_the_run_s_stays(tmp_path: Path) -> None:
    def put_and_fail(folder: RunDir) -> None:
        (folder.path / "mine.txt").write_text("put here while it ran")
        fail(folder)

    (tmp_path / "runs" / "empty").mkdir(parents=True)
    for name in ("empty", "new"):
        with pytest.raises(ZeroDivisionError):
            start(tmp_path / "runs" / name, put_and_fail)
        assert [path.name for path in (tmp_path / "runs" / name).iterdir()] == ["mine.txt"]


def test_a_run_of_which_something_has_come_stays(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    def keep_and_fail(folder: RunDir) -> None:
        folder.save(replace(checkpoint_of(), step=0, adam_step=0, sh_last_step=None))
        folder.keep()
        fail(folder)

    with pytest.raises(ZeroDivisionError):
        start(tmp_path / "run", keep_and_fail)
    assert load_checkpoint(tmp_path / "run" / "ckpts" / "ckpt_000000.pt").step == 0


def test_a_run_moved_aside_for_a_start_that_fails_comes_back(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    def look_and_fail(folder: RunDir) -> None:
        assert (tmp_path / "run.old-1").is_dir()
        fail(folder)

    start(tmp_path / "run", lambda folder: folder.save(checkpoint_of()))
    with pytest.raises(ZeroDivisionError):
        start(tmp_path / "run", look_and_fail, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert load_checkpoint(tmp_path / "run" / "ckpts" / "ckpt_000300.pt").step == 300


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.EDQUOT, errno.ENOSPC])
@pytest.mark.parametrize("name", ["mkdir", "fsync", "open"])
def test_a_place_that_refuses_shows_at_the_start_and_nothing_has_changed(
    checkpoint_of: CheckpointOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    start(tmp_path / "run", lambda folder: folder.save(checkpoint_of()))
    disk = Disk(monkeypatch, name, code)
    disk.full = True
    with pytest.raises(OutputError, match=os.strerror(code)) as caught:
        RunDir.create(tmp_path / "run", overwrite=True)
    disk.full = False
    assert caught.value.remedy is not None
    if name == "fsync":  # of the file that tries the folder
        assert ("free some space" in caught.value.remedy) == (code in (errno.ENOSPC, errno.EDQUOT))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert load_checkpoint(tmp_path / "run" / "ckpts" / "ckpt_000300.pt").step == 300
