"""Takes from a Linux interpreter what macOS lacks, as far as splatcli can see; for processes with this on PYTHONPATH.

Names that Linux alone has leave Python's modules, /proc and /sys cannot be read, limits of memory are refused, and
splatcli's modules see another ``sys.platform``. Libraries still see Linux: they would load files of a Mac. The command
that flushes a Mac's disk has its number, which this system refuses. There is a fork on macOS, but Python's manual calls
it unsafe.
"""

from __future__ import annotations

import builtins
import ctypes
import fcntl
import mmap
import os
import resource
import select
import signal
import sys
import time
import types
from typing import Any

_LINUX_ALONE = {
    os: """
        sched_getaffinity sched_setaffinity sched_getparam sched_getscheduler sched_setparam sched_setscheduler
        fork pidfd_open
        posix_fallocate posix_fadvise copy_file_range memfd_create eventfd splice pipe2 fdatasync getrandom
        getxattr setxattr listxattr removexattr getresuid getresgid setresuid setresgid
        O_DIRECT O_LARGEFILE O_NOATIME O_PATH O_TMPFILE
    """,
    time: "CLOCK_BOOTTIME CLOCK_TAI pthread_getcpuclockid",
    signal: "SIGPWR SIGSTKFLT SIGPOLL SIGRTMIN SIGRTMAX sigtimedwait sigwaitinfo",
    mmap: "MAP_POPULATE MAP_STACK MADV_HUGEPAGE MADV_NOHUGEPAGE MADV_DONTFORK MADV_POPULATE_READ",
    resource: "prlimit RUSAGE_THREAD RLIMIT_MSGQUEUE RLIMIT_NICE RLIMIT_RTPRIO RLIMIT_SIGPENDING",
    fcntl: "F_OFD_GETLK F_OFD_SETLK F_OFD_SETLKW F_ADD_SEALS F_SETPIPE_SZ",
    select: "epoll",
}
for _module, _names in _LINUX_ALONE.items():
    for _name in _names.split():
        if hasattr(_module, _name):
            delattr(_module, _name)

fcntl.F_FULLFSYNC = 51  # type: ignore[attr-defined]

_find = ctypes.CDLL.__getattr__


def _found(library: ctypes.CDLL, name: str) -> Any:
    if name == "prctl":
        raise AttributeError(f"dlsym(RTLD_DEFAULT, {name}): symbol not found")
    return _find(library, name)


ctypes.CDLL.__getattr__ = _found  # type: ignore[method-assign]


def _is_linux(path: object) -> bool:
    return isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith(("/proc/", "/sys/"))


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and _is_linux(arguments[0]):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])
    if event == "resource.setrlimit" and arguments[0] == resource.RLIMIT_AS:
        raise ValueError("current limit exceeds maximum limit")


sys.addaudithook(_refuse)

_readlink = os.readlink


def _read_link(path: Any, *, dir_fd: int | None = None) -> Any:
    if _is_linux(path):
        raise FileNotFoundError(2, "No such file or directory", path)
    return _readlink(path, dir_fd=dir_fd)


os.readlink = _read_link


class _Sys(types.ModuleType):
    """sys as splatcli sees it."""

    platform = "darwin"

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(sys, name, value)


_seen, _import = _Sys("sys"), builtins.__import__


def _imported(name: str, scope: Any = None, *rest: Any, **more: Any) -> Any:
    if name == "sys" and scope is not None and (scope.get("__package__") or "").partition(".")[0] == "splatcli":
        return _seen
    return _import(name, scope, *rest, **more)


builtins.__import__ = _imported
