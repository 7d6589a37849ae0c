"""Checks before anything heavy is imported: what they find could not be reported afterwards."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Sequence

from splatcli.errors import ResourceError

#: Bytes of address space without which torch does not even load, on Linux with one thread; measured with ulimit -v.
_ADDRESS_SPACE = 1 << 30
#: Of them, for each further thread: its stack, and its heap.
_OF_A_THREAD, _MOST_THREADS = 128 << 20, 64

#: Options that print about a command and do nothing else.
_WORDS = {"--help", "-h", "--version"}


class PipeError(OSError):
    """A pipe stands where a file is to be read."""


def refuse_pipes() -> None:
    """From here on, opening a named pipe for reading raises PipeError, instead of waiting for a writer for ever.

    Inputs are read from any place and more than once, which no pipe allows. Descriptors, stdin among them, are not
    concerned. It holds for this process until its end.
    """
    sys.addaudithook(_audit_open)


def _audit_open(event: str, arguments: tuple[object, ...]) -> None:
    if event != "open":
        return
    path, mode, flags = arguments[:3]
    if isinstance(path, int) or (isinstance(mode, str) and mode[:1] in "wax"):
        return
    if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_NONBLOCK):
        return
    try:
        found = os.stat(path)  # type: ignore[arg-type]  # a path of some kind
    except (OSError, TypeError, ValueError):
        return
    if stat.S_ISFIFO(found.st_mode):
        said = "this is a pipe, and files are read more than once; write its content into a file first"
        raise PipeError(errno.ESPIPE, said, path)


def require_address_space(argv: Sequence[str]) -> None:
    """Raises ResourceError where ``ulimit -v`` leaves too little for torch, whose libraries end the process then."""
    if not argv or _WORDS.intersection(argv):
        return
    try:
        import resource
    except ImportError:  # no such limits on this system
        return
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    needed = _ADDRESS_SPACE + _OF_A_THREAD * min(os.cpu_count() or 1, _MOST_THREADS)
    if limit not in (resource.RLIM_INFINITY, -1) and limit < needed:
        raise ResourceError(
            f"the limit of address space is {limit >> 20:,} MiB; torch and its threads take {needed >> 20:,} MiB",
            where="ulimit -v",
            remedy="raise the limit, or limit the memory in use instead (systemd-run -p MemoryMax=..., --mem of a job)",
        )
