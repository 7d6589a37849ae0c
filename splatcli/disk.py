"""Room on a disk and data that stays on it, where systems and file systems differ."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

#: Errors of a file system that cannot do what was asked. Linux has one number for the last two, macOS has two.
UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})

#: Errors of a file system without locks.
NO_LOCKS = UNSUPPORTED | {errno.ENOLCK}


def is_there(path: str | os.PathLike[str]) -> bool:
    """Return whether a file or folder is there. Raises OSError where the system cannot say, for lack of permission.

    Path.exists() does so up to Python 3.13, and returns False from then on.
    """
    try:
        os.stat(path)
    except ValueError:  # a NUL in the name
        return False
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise
    return True


def reserve(descriptor: int, size: int) -> bool:
    """Reserve the first ``size`` bytes of a file, and return whether that is possible there.

    Where it is not possible, a lack of room may show when the bytes are written. Where the system has no call for it
    (macOS), free bytes are compared, which no quota limits and other programs may take. Raises OSError.
    """
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            return False
        return True
    if free_bytes(descriptor) < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return False


def sync(descriptor: int) -> None:
    """Bring a file onto the disk. On macOS fsync leaves data in the drive's cache. Raises OSError."""
    command = getattr(fcntl, "F_FULLFSYNC", None)
    if command is not None:
        with contextlib.suppress(OSError):  # a network's file system: fsync answers for it
            fcntl.fcntl(descriptor, command)
            return
    os.fsync(descriptor)


def free_bytes(place: Path | int) -> int:
    """Return the bytes that a file system has free for this user; quotas do not count. place: a path, a descriptor."""
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize
