"""One process a run; old checkpoints go, the sound newest never."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from splatcli.checkpoint.run_dir import METRICS, RunDir, RunMovedError, find_latest_sound, newest_run, run_of, take_lock
from splatcli.checkpoint.state import Checkpoint
from splatcli.config import Config, parse_config, with_settings
from splatcli.errors import LockedError, OutputError

CheckpointOf = Callable[..., Checkpoint]

HOLD_LOCK = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
file.write("4711 elsewhere\\n")
file.flush()
print("locked", flush=True)
sys.stdin.read()
"""


def steps(run: RunDir) -> list[int]:
    return [int(path.stem.split("_")[1]) for path in run.checkpoints()]


def save_steps(run: RunDir, checkpoint_of: CheckpointOf, *wanted: int, keep_last: int = 2) -> None:
    for step in wanted:
        state = checkpoint_of(2, 0, step=step)
        state.config = with_settings(state.config, {"save.keep_last": keep_last})
        run.save(state)


def test_a_saved_checkpoint_is_found_again(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    with RunDir.create(tmp_path / "out" / "run") as run:
        path = run.save(checkpoint_of(step=300))
    assert path == tmp_path / "out" / "run" / "ckpts" / "ckpt_000300.pt"
    assert (run.path / "latest").read_text() == "ckpts/ckpt_000300.pt\n"
    assert find_latest_sound(run.path).path == path
    assert newest_run(tmp_path / "out") == run.path
    assert run_of(path) == run.path
    assert run_of(tmp_path / "ckpt_000300.pt") is None


def test_only_the_newest_and_the_named_are_kept(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    with RunDir.create(tmp_path / "run") as run:
        save_steps(run, checkpoint_of, 1, 2, 3, 7_000, 7_001, 7_002)
        assert steps(run) == [7_000, 7_001, 7_002]
        save_steps(run, checkpoint_of, 7_003, keep_last=1)
        assert steps(run) == [7_000, 7_003]


def test_the_one_just_written_stays_even_below_older_ones(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    with RunDir.create(tmp_path / "run") as run:
        save_steps(run, checkpoint_of, 500, 600)
        save_steps(run, checkpoint_of, 400)
        assert steps(run) == [400, 500, 600]


def test_a_failed_save_deletes_nothing(
    checkpoint_of: CheckpointOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with RunDir.create(tmp_path / "run") as run:
        save_steps(run, checkpoint_of, 1, 2)
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OutputError):
            save_steps(run, checkpoint_of, 3)
        assert steps(run) == [1, 2]
        assert (run.path / "latest").read_text() == "ckpts/ckpt_000002.pt\n"


def test_find_latest_passes_over_broken_files_and_mistrusts_the_pointer(
    checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    with RunDir.create(tmp_path / "run") as run:
        assert find_latest_sound(run.path).path is None
        save_steps(run, checkpoint_of, 1, 2, 3, keep_last=9)
    broken = run.checkpoint_path(3)
    broken.write_bytes(broken.read_bytes()[:-100])
    run.checkpoint_path(4).write_bytes(b"")
    assert find_latest_sound(run.path).path == run.checkpoint_path(2)
    (run.path / "latest").unlink()
    assert find_latest_sound(run.path).path == run.checkpoint_path(2)


def test_newest_run_is_the_one_that_saved_last(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    assert newest_run(tmp_path / "nothing") is None
    for number, name in enumerate(["b", "a", "c.old-1", "empty"]):
        with RunDir.create(tmp_path / name) as run:
            if name != "empty":
                path = run.save(checkpoint_of(2, 0))
                os.utime(path, (1_000 + number, 1_000 + number))
    (tmp_path / "file").write_text("")
    assert newest_run(tmp_path) == tmp_path / "a"


def test_a_used_folder_is_refused_or_moved_aside(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    for _ in range(2):
        with RunDir.create(tmp_path / "run", overwrite=True) as run:
            run.save(checkpoint_of(2, 0))
    with pytest.raises(OutputError, match="not empty"):
        RunDir.create(tmp_path / "run")
    with RunDir.create(tmp_path / "run", overwrite=True) as run:
        assert steps(run) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.old-1", "run.old-2"]
    assert find_latest_sound(tmp_path / "run.old-1").path is not None


def test_what_a_failed_start_could_not_remove_does_not_bar_the_next(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / f".probe.tmp.{os.getpid()}.0123abcd").write_bytes(b"x")
    RunDir.create(tmp_path / "run").close()
    assert (tmp_path / "run" / "ckpts").is_dir()


def test_overwrite_never_moves_a_folder_that_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(OutputError, match="not a run"):
        RunDir.create(tmp_path / "home", overwrite=True)
    assert (tmp_path / "home" / "letter.txt").exists()


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/run"])
def test_a_place_that_cannot_be_written_shows_at_the_start(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        RunDir.create(tmp_path / place)


def test_a_full_disk_shows_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left"):
        RunDir.create(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_second_process_is_reported_who_holds_the_run(tmp_path: Path) -> None:
    RunDir.create(tmp_path / "run").close()
    lock = str(tmp_path / "run" / "lock")
    command = [sys.executable, "-c", HOLD_LOCK, lock]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        for attempt in (
            lambda: RunDir.open(tmp_path / "run"),
            lambda: RunDir.create(tmp_path / "run"),
            lambda: RunDir.create(tmp_path / "run", overwrite=True),
        ):
            with pytest.raises((LockedError, OutputError)) as caught:
                attempt()
        assert isinstance(caught.value, LockedError)
        assert "process 4711 on elsewhere" in str(caught.value)
        holder.kill()
    RunDir.open(tmp_path / "run").close()


def test_a_start_beside_another_leaves_its_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both find no folder; one is first to take the lock, and the other may have made the folders."""
    held: list[int] = []

    def probe(folder: Path, _: str) -> None:
        (folder / "ckpts").mkdir()
        held.append(take_lock(folder))

    monkeypatch.setattr("splatcli.checkpoint.run_dir.probe_folder", probe)
    with pytest.raises(LockedError):
        RunDir.create(tmp_path / "output" / "run")
    assert (tmp_path / "output" / "run" / "ckpts").is_dir()
    os.close(held[0])


def test_the_lock_ends_with_the_run(tmp_path: Path) -> None:
    with RunDir.create(tmp_path / "run"), pytest.raises(LockedError, match=f"process {os.getpid()} on"):
        RunDir.open(tmp_path / "run")
    with RunDir.open(tmp_path / "run") as run:
        run.close()


def test_open_wants_a_run(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="not a run folder"):
        RunDir.open(tmp_path)


def test_a_stale_handle_of_the_lock_costs_no_save(
    checkpoint_of: CheckpointOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a server of a share was started anew: the folder is at its place, only the open file is gone."""

    def stale(descriptor: int) -> os.stat_result:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with RunDir.create(tmp_path / "run") as run:
        with monkeypatch.context() as patch:
            patch.setattr("splatcli.checkpoint.run_dir.os.fstat", stale)
            run._require_place()
            run.append_metrics({"event": "step", "step": 3})
        path = run.save(checkpoint_of(3))
    assert path.exists()


def test_temporary_files_of_dead_writers_are_removed(tmp_path: Path) -> None:
    RunDir.create(tmp_path / "run").close()
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    folder = tmp_path / "run" / "ckpts"
    dead = folder / f"ckpt_000300.pt.tmp.{gone.pid}.0123abcd"
    alive = folder / f"ckpt_000300.pt.tmp.{os.getppid()}.0123abcd"
    user = folder / "notes.tmp.txt"
    for path in (dead, alive, user):
        path.write_text("")
    RunDir.open(tmp_path / "run").close()
    assert (dead.exists(), alive.exists(), user.exists()) == (False, True, True)


def test_settings_are_stored(tmp_path: Path) -> None:
    with RunDir.create(tmp_path / "run") as run:
        run.write_config(Config())
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert parse_config(stored) == Config()
    del (
        stored["train"]["alpha_lambda"],
        stored["train"]["mask_lambda"],
    )  # a run of an earlier version goes on as it began
    assert parse_config(stored).train.alpha_lambda == parse_config(stored).train.mask_lambda == 0.0
    del stored["data"]["near_share"], stored["data"]["max_point_error"], stored["strategy"]["max_scale3d"]
    del stored["optim"]["means_size_power"], stored["data"]["projection"]
    assert parse_config(stored).data.near_share == parse_config(stored).optim.means_size_power == 0.0
    assert parse_config(stored).data.projection == "pinhole"
    assert parse_config(stored).data.max_point_error == parse_config(stored).strategy.max_scale3d == 0.0


def test_a_file_system_whose_inode_numbers_change_is_no_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock's name says that the folder is where it was; of a folder that was moved it says another one."""
    monkeypatch.setattr(os.path, "samestat", lambda *_: False)
    with RunDir.create(tmp_path / "run") as run:
        run.append_metrics({"step": 1})
        (tmp_path / "run").rename(tmp_path / "moved")
        (tmp_path / "run").mkdir()
        (tmp_path / "run/lock").touch()
        with pytest.raises(RunMovedError, match="was moved or removed"):
            run.append_metrics({"step": 2})
    assert (tmp_path / "moved" / METRICS).read_text().count("\n") == 1


def test_metrics_are_lines_of_json(tmp_path: Path) -> None:
    with RunDir.create(tmp_path / "run") as run:
        run.append_metrics({"step": 1, "loss": 0.5})
        run.append_metrics({"step": 2, "loss": float("nan"), "views": [{"psnr": float("inf")}]})
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "loss": 0.5},
        {"step": 2, "loss": None, "views": [{"psnr": None}]},
    ]


def test_rewind_sets_later_steps_aside(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    with RunDir.create(tmp_path / "run") as run:
        for step in (1, 2, 3):
            run.append_metrics({"step": step})
        with (run.path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "lo')
        save_steps(run, checkpoint_of, 1, 2, 3, keep_last=9)
        run.rewind(2)
        assert steps(run) == [1, 2]
        assert (run.path / "ckpts" / "ckpt_000003.pt.old-1").exists()
        assert (run.path / "latest").read_text() == "ckpts/ckpt_000002.pt\n"
        assert (run.path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_run_that_has_saved_stays_whatever_the_caller_does(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    def save_and_fail() -> None:
        with RunDir.create(tmp_path / "run") as folder:
            folder.save(checkpoint_of())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        save_and_fail()
    assert find_latest_sound(tmp_path / "run").path == tmp_path / "run" / "ckpts" / "ckpt_000300.pt"
