"""Replace a file in one step: whatever happens, its place holds the whole old content or the whole new one."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from splatcli.errors import DivergedError, OutputError

#: Temporary files lie beside their target: ``<name>.tmp.<pid>.<random>``.
TEMPORARY = re.compile(r".+\.tmp\.(?P<pid>\d+)\.[0-9a-f]{8}")

#: A file system that cannot reserve space or sync a folder says so in one of these ways; it is no fault.
_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EBADF}


def write_atomically(
    path: Path,
    write: Callable[[BinaryIO], object],
    *,
    what: str,
    reserve: int = 0,
    verify: Callable[[Path], object] | None = None,
) -> None:
    """Write a file through ``write`` and put it at ``path`` when it is complete, verified and on the disk.

    what: what is being written, for the message.
    reserve: bytes to claim beforehand, so that a full disk shows before minutes of work; 0 claims nothing.
    verify: reads the temporary file and raises when it is not what was meant.
    Order: reserve, write, fsync, verify, rename, fsync the folder. Raises OutputError for every failure (a
    DivergedError of ``write`` passes); the old file is then untouched and no temporary file is left.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OutputError(
            f"this is a device or a pipe, and {what} would take its place",
            where=path,
            remedy="name a file; `splat export -o -` and `splat render -o -` write to stdout",
        )
    # Of a long name only so much that the temporary one, in UTF-8, is none too long.
    temporary = path.with_name(f"{path.name[:50]}.tmp.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            if reserve:
                _reserve(file.fileno(), reserve)
            write(file)
            file.flush()
            file.truncate(file.tell())  # gives back what was reserved in excess
            os.fsync(file.fileno())
        if verify is not None:
            verify(temporary)
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if not isinstance(error, Exception) or isinstance(error, DivergedError):
            raise  # Ctrl-C and the like, and content that must not be written
        # torch turns a full disk into a RuntimeError of its own, so the kind of the exception says little.
        kept = "; the old one is kept" if path.exists() else ""
        raise OutputError(
            f"could not write {what} (disk full?){kept}: {_reason(error)}",
            where=path,
            remedy="free some space, or check the permissions of the folder",
        ) from error
    try:
        sync_folder(path.parent)
    except OSError as error:
        raise OutputError(
            f"{what} is written, but the disk does not confirm it: {_reason(error)}", where=path
        ) from error


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a folder survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
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
            os.fsync(file.fileno())
        probe.unlink()
    except OSError as error:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
        raise OutputError(f"cannot write here: {_reason(error)}", where=folder, remedy=remedy) from None


def probe_room(folder: Path, size: int) -> None:
    """Raise OutputError unless ``size`` bytes can be reserved in ``folder`` now; quotas count."""
    probe = folder / f".room.tmp.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        with probe.open("xb") as file:
            _reserve(file.fileno(), size)
    except OSError as error:
        raise OutputError(
            f"there is no room for a checkpoint of {size / 2**20:,.0f} MiB: {_reason(error)}",
            where=folder,
            remedy="free some space",
        ) from None
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)


def free_bytes(folder: Path) -> int:
    """What the file system says is left for this user; quotas do not count."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _reserve(descriptor: int, size: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip() or type(error).__name__).splitlines()[0]
