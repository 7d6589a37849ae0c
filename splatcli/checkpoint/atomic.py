"""Write files and folders atomically: after any failure, a path holds the old content or the new one, complete."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import secrets
import shutil
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from splatcli import disk
from splatcli.errors import (
    ALLOW_LARGER,
    DivergedError,
    OutputError,
    first_line,
    from_os_error,
    is_without_temporary_folder,
    system_error,
)

#: Temporary files lie beside their target: ``<name>.tmp.<pid>.<random>``.
TEMPORARY = re.compile(r".+\.tmp\.(?P<pid>\d+)\.[0-9a-f]{8}")

#: Errors of a file system that cannot sync a folder; they are ignored.
_NO_SYNC = disk.UNSUPPORTED | {errno.EBADF}

#: Errors that do not come from a full disk.
_NOT_FULL = {errno.EACCES, errno.EFBIG, errno.EISDIR, errno.ENOENT, errno.ENOTDIR, errno.EPERM, errno.EROFS}

#: Seconds to wait for a reader of a named pipe.
READER_PATIENCE = 30.0

#: Kinds of paths that are neither a file nor a folder.
_SPECIAL = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISSOCK, "a socket"),
)


def write_atomically(
    path: Path,
    write: Callable[[BinaryIO], object],
    *,
    what: str,
    reserve: int = 0,
    verify: Callable[[Path], object] | None = None,
    stream: bool = False,
) -> None:
    """Write a file through ``write`` and put it at ``path`` when it is complete, verified and on the disk.

    what: a name of the content, for messages.
    reserve: bytes to reserve beforehand, so that a full disk is found before minutes of work; 0 reserves nothing.
    verify: reads the temporary file and raises when it is wrong.
    stream: ``write`` writes from front to back, so that it can write to a pipe or a character device; otherwise they
        are refused. They are never replaced; of a link, the target is.
    Order: reserve, write, fsync, verify, rename, fsync the folder. Raises OutputError for every failure, ResourceError
    for a lack of memory (a DivergedError of ``write`` passes); the old file is then untouched and no temporary file is
    left, as after Ctrl-C and SIGTERM.
    """
    try:
        target, kind = _target_of(path)
    except OSError as error:
        raise OutputError(
            f"could not write {what}: {_reason(error)}",
            where=path,
            remedy="check the permissions of the folder, or name another place",
        ) from error
    if kind is not None:
        if not stream or kind in ("a block device", "a socket"):
            raise OutputError(
                f"this is {kind}, not a file, and {what} is not written there",
                where=path,
                remedy="name a file; `splat export -o -` and `splat render -o -` write to stdout",
            )
        _write_special(path, write, what)
        return
    # Of a long name only so much that the temporary one, in UTF-8, is none too long.
    temporary = target.with_name(f"{target.name[:50]}.tmp.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with ended_by_signals():
            with temporary.open("xb") as file:
                if reserve:
                    disk.reserve(file.fileno(), reserve)
                write(file)
                file.flush()
                file.truncate(file.tell())  # frees what was reserved in excess
                disk.sync(file.fileno())
            if verify is not None:
                verify(temporary)
            os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if not isinstance(error, Exception) or isinstance(error, DivergedError):
            raise  # Ctrl-C and the like, and content that must not be written
        refused = system_error(error)
        if refused is not None and (refused.errno == errno.ENOMEM or is_without_temporary_folder(refused)):
            raise from_os_error(refused, OutputError, path) from error
        # torch turns a full disk into a RuntimeError of its own, so the exception's type does not tell.
        kept = "; the old one is kept" if os.path.exists(target) else ""
        full = "" if refused is not None and refused.errno in _NOT_FULL else " (disk full?)"
        too_large = refused is not None and refused.errno == errno.EFBIG
        raise OutputError(
            f"could not write {what}{full}{kept}: {_reason(error)}",
            where=path,
            remedy=ALLOW_LARGER if too_large else "free some space, or check the permissions of the folder",
        ) from error
    try:
        sync_folder(target.parent)
    except OSError as error:
        raise OutputError(
            f"{what} is written, but the disk does not confirm it: {_reason(error)}", where=path
        ) from error


def write_folder_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a folder through ``write``, which fills an empty one beside it, and put it at ``path`` when it is complete.

    A folder that is at ``path`` is replaced with all that is in it: the caller has checked that it may be. Those that
    a killed process left beside it are removed afterwards.
    Raises OutputError; the old folder is then untouched and no temporary one is left, as after Ctrl-C and SIGTERM.
    """
    target = Path(os.path.realpath(path))
    stem = target.name[:50]
    temporary, old = (target.with_name(f"{stem}.tmp.{os.getpid()}.{secrets.token_hex(4)}") for _ in "ab")
    try:
        with ended_by_signals():
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            write(temporary)
            for file in temporary.rglob("*"):
                sync(file)
            if target.exists():
                target.rename(old)
            temporary.rename(target)
    except BaseException as error:
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            if str(error.filename).startswith(str(temporary)):
                error.filename = None  # the folder that was asked for is named
            raise from_os_error(error, OutputError, path) from error
        raise
    shutil.rmtree(old, ignore_errors=True)
    for left in target.parent.glob(f"{glob.escape(stem)}.tmp.*"):
        match = TEMPORARY.fullmatch(left.name)
        if match is not None and left.is_dir() and not left.is_symlink() and not other_process_lives(int(match["pid"])):
            shutil.rmtree(left, ignore_errors=True)
    sync_folder(target.parent)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit meanwhile, as SIGINT raises KeyboardInterrupt: nothing is left."""
    before = {}

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                before[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def other_process_lives(pid: int) -> bool:
    """Return whether a process of this machine, and not this one, has the id."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def sync(path: Path) -> None:
    """Bring a file or a folder onto the disk. Raises OSError."""
    if path.is_dir():
        sync_folder(path)
        return
    with path.open("rb") as file:
        disk.sync(file.fileno())


#: Characters that no path of a result has: paths are printed one a line, and read so by the next command of a pipe.
#: That takes tabs and spaces.
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")


def check_name(path: Path) -> None:
    """Raise OutputError if the path of a new file or folder has a line break or another control character."""
    if _CONTROL.search(str(path)):
        raise OutputError(
            "the name of a result has no line breaks and control characters: its path is one line of a pipe",
            where=repr(str(path)),
            remedy="choose another place with -o",
        )


def names_stdout(path: Path) -> bool:
    """Return whether a path such as /dev/stdout is this process's stdout."""
    try:
        about = os.stat(path)
        same = os.path.samestat(about, os.fstat(1))
    except OSError:
        return False
    return same and (not stat.S_ISREG(about.st_mode) or _is_descriptor(path))


def _target_of(path: Path) -> tuple[Path, str | None]:
    """Return (the file to replace, links resolved; the kind of the path if it is not a file). Raises OSError."""
    target = Path(os.path.realpath(path))
    try:
        about = os.stat(path)
    except FileNotFoundError:
        return target, None
    kind = next((name for is_kind, name in _SPECIAL if is_kind(about.st_mode)), None)
    if kind is None and _is_descriptor(path):
        kind = "stdout" if names_stdout(path) else "an open file"
    return target, kind


def _is_descriptor(path: Path) -> bool:
    """Return whether a path names an open descriptor: its file may have another name by now, or none."""
    parts = Path(os.path.abspath(path)).parts[1:]
    if parts[:1] == ("dev",):
        return parts[1:2] in (("stdin",), ("stdout",), ("stderr",), ("fd",))
    return parts[:1] == ("proc",) and parts[-2:-1] == ("fd",)


def _write_special(path: Path, write: Callable[[BinaryIO], object], what: str) -> None:
    """Write to a pipe or a device; a reader that closes it is no failure. Raises OutputError."""
    try:
        with os.fdopen(_open_special(path), "wb") as file:
            write(file)
    except BrokenPipeError:
        return
    except OSError as error:
        remedy = "read from the pipe, or name a file" if error.errno == errno.ENXIO else None
        raise OutputError(f"could not write {what}: {_reason(error)}", where=path, remedy=remedy) from error


def _open_special(path: Path) -> int:
    """Return a descriptor to write to; wait for the reader of a named pipe, at most READER_PATIENCE."""
    until = time.monotonic() + READER_PATIENCE
    while True:
        try:
            # Without O_CREAT and O_TRUNC: the path itself must not change.
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            if time.monotonic() > until:
                raise OSError(errno.ENXIO, "nobody reads it", str(path)) from None
            time.sleep(0.05)
        else:
            os.set_blocking(descriptor, True)
            return descriptor


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a folder survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        disk.sync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(descriptor)


def probe_folder(folder: Path, remedy: str) -> None:
    """Raise OutputError, with ``remedy``, unless files can be created, synced and removed in an existing folder."""
    probe = folder / f".probe.tmp.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        with probe.open("xb") as file:
            file.write(b"\0")
            file.flush()
            disk.sync(file.fileno())
        probe.unlink()
    except OSError as error:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        free = "free some space, or " if full else ""
        raise OutputError(f"cannot write here: {_reason(error)}", where=folder, remedy=free + remedy) from None


def probe_room(folder: Path, size: int) -> None:
    """Raise OutputError unless ``size`` bytes can be reserved in ``folder`` now; quotas count."""
    probe = folder / f".room.tmp.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        with probe.open("xb") as file:
            disk.reserve(file.fileno(), size)
    except OSError as error:
        raise OutputError(
            f"there is no room for a checkpoint of {size / 2**20:,.0f} MiB: {_reason(error)}",
            where=folder,
            remedy="free some space",
        ) from None
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return first_line(error)
