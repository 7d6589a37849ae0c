"""A save either succeeds whole or leaves everything as it was."""

from __future__ import annotations

import dataclasses
import errno
import os
import resource
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from splatcli.checkpoint import atomic
from splatcli.checkpoint.atomic import write_atomically, write_folder_atomically
from splatcli.checkpoint.file import load_checkpoint, save_checkpoint
from splatcli.checkpoint.state import Checkpoint
from splatcli.errors import DivergedError, OutputError, SplatError

CheckpointOf = Callable[..., Checkpoint]


def assert_untouched(path: Path, before: bytes) -> None:
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name], "a temporary file is left"


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writes beyond ``size`` bytes fail in the kernel, as they do on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("name", ["posix_fallocate", "fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_failing_call_keeps_the_old_one(
    checkpoint_of: CheckpointOf, saved: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    def fail(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    before = saved.read_bytes()
    monkeypatch.setattr(os, name, fail)
    with pytest.raises(OutputError, match=r"could not write checkpoint \(disk full\?\); the old one is kept"):
        save_checkpoint(saved, checkpoint_of(step=400))
    assert_untouched(saved, before)


@pytest.mark.parametrize("size", [0, 1, 5_000, 12_000, 20_000])
def test_a_disk_that_fills_up_in_mid_write_keeps_the_old_one(
    checkpoint_of: CheckpointOf, saved: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    before = saved.read_bytes()
    assert len(before) > 20_000
    monkeypatch.setattr(os, "posix_fallocate", lambda *args: None)  # the reservation would notice at once
    with largest_file(size), pytest.raises(OutputError, match="the old one is kept"):
        save_checkpoint(saved, checkpoint_of(step=400))
    assert_untouched(saved, before)


def test_a_lack_of_space_shows_before_anything_is_written(
    checkpoint_of: CheckpointOf, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object) -> None:
        raise AssertionError("written although the space was not there")

    before = saved.read_bytes()
    monkeypatch.setattr(torch, "save", never)
    with largest_file(30_000), pytest.raises(OutputError, match="File too large") as caught:
        save_checkpoint(saved, checkpoint_of(step=400))
    assert "ulimit -f" in str(caught.value.remedy)
    assert_untouched(saved, before)


def test_a_file_system_without_reservation_will_do(
    checkpoint_of: CheckpointOf, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*args: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    save_checkpoint(saved, checkpoint_of(step=400))
    assert load_checkpoint(saved).step == 400


def test_bytes_that_read_back_differently_are_not_put_in_place(
    checkpoint_of: CheckpointOf, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.read_bytes()
    honest = torch.save

    def corrupt(stored: dict[str, Any], file: Any) -> None:
        honest({**stored, "_xyz": stored["_xyz"] + 1}, file)

    monkeypatch.setattr(torch, "save", corrupt)
    with pytest.raises(OutputError, match="_xyz does not match its digest"):
        save_checkpoint(saved, checkpoint_of(step=400))
    assert_untouched(saved, before)


def test_ctrl_c_in_a_save_leaves_nothing_behind(
    checkpoint_of: CheckpointOf, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    before = saved.read_bytes()
    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(saved, checkpoint_of(step=400))
    assert_untouched(saved, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_a_write_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    """As in the minutes that a video takes."""

    def write(file: object) -> None:
        assert signal.getsignal(number) != signal.SIG_DFL, "it would end the process at once"
        signal.raise_signal(number)

    with pytest.raises(SystemExit) as caught:
        write_atomically(tmp_path / "x.mp4", write, what="the video")
    assert caught.value.code == 128 + number
    assert not any(tmp_path.iterdir())
    assert signal.getsignal(number) == signal.SIG_DFL


def test_the_order_is_write_sync_verify_rename_sync_folder(
    checkpoint_of: CheckpointOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def watch(owner: Any, name: str, label: Callable[..., str]) -> None:
        original = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls.append(label(*args))
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapper)

    watch(torch, "save", lambda *args: "write")
    watch(torch, "load", lambda *args: "verify")
    watch(os, "replace", lambda *args: "rename")
    watch(os, "fsync", lambda fd: "sync folder" if Path(f"/proc/self/fd/{fd}").is_dir() else "sync")
    save_checkpoint(tmp_path / "a.pt", checkpoint_of())
    assert calls == ["write", "sync", "verify", "rename", "sync folder"]


@pytest.mark.parametrize("target", ["no/such/folder/a.pt", "file/a.pt", "folder"])
def test_an_impossible_place_is_an_output_error(checkpoint_of: CheckpointOf, tmp_path: Path, target: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError) as caught:
        save_checkpoint(tmp_path / target, checkpoint_of())
    assert "disk full" not in caught.value.what
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_parameter_that_is_not_finite_is_never_written(
    checkpoint_of: CheckpointOf, saved: Path, value: float
) -> None:
    before, state = saved.read_bytes(), checkpoint_of()
    state.gaussians.quats[4, 2] = value
    with pytest.raises(DivergedError, match=r"_rotation has 1 NaN or infinite values, the first at \[4, 2\]"):
        save_checkpoint(saved, state)
    assert_untouched(saved, before)


def test_a_number_that_is_not_finite_is_named(checkpoint_of: CheckpointOf, saved: Path) -> None:
    state = checkpoint_of()
    state.strategy["ratio"] = float("inf")
    with pytest.raises(DivergedError, match=r"train\.strategy\.ratio"):
        save_checkpoint(saved, state)
    state = checkpoint_of()
    state.cameras[1].viewmat[0, 3] = float("nan")
    with pytest.raises(DivergedError, match=r"cameras\[1\]\.viewmat\[0\]\[3\]"):
        save_checkpoint(saved, state)


@pytest.mark.parametrize(
    "changes",
    [
        {"active_sh_degree": 4},
        {"step": -1},
        {"train": [5]},
        {"strategy": {"opacities": torch.zeros(3)}},
        {"strategy": {"bad name": torch.zeros(3)}},
        {"strategy": {"half": torch.zeros(3, dtype=torch.float16)}},
        {"rng": {"a": torch.zeros(3)}},
    ],
)
def test_a_state_that_could_not_be_loaded_is_not_written(
    checkpoint_of: CheckpointOf, saved: Path, changes: dict[str, Any]
) -> None:
    before = saved.read_bytes()
    with pytest.raises(SplatError, match="not a checkpoint"):
        save_checkpoint(saved, dataclasses.replace(checkpoint_of(), **changes))
    assert_untouched(saved, before)


def test_activated_scales_are_not_written(checkpoint_of: CheckpointOf, saved: Path) -> None:
    before, state = saved.read_bytes(), checkpoint_of(500)
    state.gaussians.means *= 0.1  # neighbours about as far apart as the Gaussians are large
    state.gaussians.log_scales = state.gaussians.log_scales.exp()
    with pytest.raises(DivergedError, match="scales look already activated"):
        save_checkpoint(saved, state)
    assert_untouched(saved, before)


# --- what is no file, and links to it ---------------------------------------------------------------------------------


@pytest.fixture(params=["pipe", "device"])
def special(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A named pipe, or a device of our own that swallows all, as /dev/null does; nothing of the system's is touched."""
    path = tmp_path / "special"
    if request.param == "pipe":
        os.mkfifo(path)
        return path
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.stat("/dev/null").st_rdev)
        path.write_bytes(b"")
    except OSError as error:
        pytest.skip(f"devices cannot be made or opened here: {error.strerror}")
    return path


@contextmanager
def reading(path: Path) -> Iterator[list[bytes]]:
    """Reads what comes out of a pipe meanwhile."""
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(path.read_bytes()), daemon=True)
    if path.is_fifo():
        reader.start()
    yield found
    if path.is_fifo():
        reader.join(60)


@pytest.mark.parametrize("linked", [False, True], ids=["named", "linked"])
def test_a_pipe_and_a_device_are_written_to_and_never_replaced(special: Path, tmp_path: Path, linked: bool) -> None:
    kind = stat.S_IFMT(special.stat().st_mode)
    target = special
    if linked:  # as /dev/stdout leads to a device, by two links
        (tmp_path / "inner").symlink_to(special.name)
        target = tmp_path / "outer"
        target.symlink_to(tmp_path / "inner")
    names = sorted(path.name for path in tmp_path.iterdir())
    content = b"ply" * 100_000
    with reading(special) as found:
        write_atomically(target, lambda file: file.write(content), what="file", stream=True)
    assert found == ([content] if special.is_fifo() else [])
    with pytest.raises(OutputError, match=r"this is a (pipe|device), not a file, and checkpoint is not written there"):
        write_atomically(target, lambda file: file.write(content), what="checkpoint")
    assert stat.S_IFMT(special.stat().st_mode) == kind
    assert target.is_symlink() == linked
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_checkpoint_never_takes_the_place_of_a_device(special: Path, checkpoint_of: CheckpointOf) -> None:
    link = special.with_name("ckpt.pt")
    link.symlink_to(special)
    for path in (special, link):
        with pytest.raises(OutputError, match="not a file"):
            save_checkpoint(path, checkpoint_of())
    assert not special.is_file()
    assert link.is_symlink()


def test_a_pipe_that_nobody_reads_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "READER_PATIENCE", 0.1)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputError, match="nobody reads it"):
        write_atomically(tmp_path / "pipe", lambda file: file.write(b"x"), what="file", stream=True)
    assert (tmp_path / "pipe").is_fifo()


def test_of_a_link_the_file_that_it_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    link, broken = tmp_path / "link", tmp_path / "broken"
    link.symlink_to("data/old")
    broken.symlink_to("data/new")
    (tmp_path / "data" / "old").write_bytes(b"old")
    for path in (link, broken):
        write_atomically(path, lambda file: file.write(b"new"), what="file")
        assert path.is_symlink()
        assert path.read_bytes() == b"new"
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["new", "old"]
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    with pytest.raises(OutputError, match="symbolic links"):
        write_atomically(circle, lambda file: file.write(b"new"), what="file")
    assert circle.is_symlink()


def test_a_folder_that_cannot_be_written_is_named_by_its_own_name(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        with largest_file(10):
            (folder / "chunk.webp").write_bytes(bytes(100))

    for place, says in (
        (tmp_path / "model.lod", "ulimit -f"),
        (tmp_path / "file" / "model.lod", "check its permissions"),
    ):
        (tmp_path / "file").touch()
        with pytest.raises(OutputError) as caught:
            write_folder_atomically(place, write)
        assert ".tmp." not in str(caught.value)
        assert says in str(caught.value.remedy)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
