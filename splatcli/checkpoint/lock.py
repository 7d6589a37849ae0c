"""One process at a time in a run folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
from pathlib import Path

from splatcli.errors import LockedError

_log = logging.getLogger(__name__)


def take_lock(run: Path) -> int:
    """The descriptor of the run's lock file, locked; it unlocks when closed, also by a crash."""
    path = run / "lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 200).decode(errors="replace").split()
        os.close(descriptor)
        who = f"process {holder[0]} on {holder[1]}" if len(holder) == 2 else "another process"
        raise LockedError(f"{who} is working on this run", where=run, remedy="wait for it, or stop it first") from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            os.close(descriptor)
            raise
        _log.warning("%s: this file system has no locks; take care to run one process only", run)
    with contextlib.suppress(OSError):  # who holds it is a courtesy: a full disk must not keep anyone from the run
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
    return descriptor
