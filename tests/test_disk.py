"""splatcli.disk, on systems and file systems that lack a call."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from splatcli import disk


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    with (tmp_path / "file").open("w+b") as file:
        yield file.fileno()


def test_what_is_there_and_what_the_system_hides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dead").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    assert [disk.is_there(path) for path in (tmp_path, tmp_path / "file")] == [True, True]
    gone = ["none", "dead", "loop", "file/below", "a\0b"]
    assert not any(disk.is_there(tmp_path / name) for name in gone)

    def refuse(path: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(PermissionError):
        disk.is_there(tmp_path)


def test_room_is_reserved_where_the_system_can(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disk.reserve(descriptor, 50_000)
    assert os.fstat(descriptor).st_blocks * 512 >= 50_000
    monkeypatch.delattr(os, "posix_fallocate")  # as on macOS
    assert not disk.reserve(descriptor, 50_000)
    free = disk.free_bytes(descriptor)
    with pytest.raises(OSError, match="No space left") as caught:
        disk.reserve(descriptor, 2 * free)
    assert caught.value.errno == errno.ENOSPC


def test_the_drive_flushes_its_cache_where_fsync_alone_leaves_it(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    def command(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) > 1:
            raise OSError(errno.ENOTSUP, "a network's file system")

    monkeypatch.setattr(os, "fsync", lambda number: calls.append(number))
    disk.sync(descriptor)
    assert calls == [descriptor]
    calls.clear()
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)  # as on macOS
    monkeypatch.setattr(fcntl, "fcntl", command)
    disk.sync(descriptor)
    assert calls == [(descriptor, 51)]
    disk.sync(descriptor)
    assert calls == [(descriptor, 51), (descriptor, 51), descriptor]
