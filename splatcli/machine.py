"""Processors and main memory that this process may use, within the limits of containers and jobs.

Docker, Kubernetes, SLURM and systemd limit a process by the control groups that it is in, of version 1 or 2. A group's
limits hold for all below it, so those above count too.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_PROC = Path("/proc")
#: Where control groups are mounted: version 2, version 2 beside version 1, version 1 with a folder for each controller.
_GROUPS = Path("/sys/fs/cgroup")
#: Bytes of main memory where the system does not say.
_UNKNOWN_TOTAL = 8 << 30

#: Of a group's memory in versions 2 and 1: the limit, what is used, and in memory.stat what the system drops first.
_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def cores() -> int:
    """Return the processors that this process may use: those it is bound to, or fewer by its groups' quotas of time.

    Each call of the rasterizer asks; quotas, and limits of memory, are read once in a second.
    """
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([bound, *(math.ceil(quota) for quota in _quotas_in(int(time.monotonic()), _PROC, _GROUPS))]))


def total_memory() -> int:
    """Return the bytes of main memory, or of the least limit of this process where that is less."""
    return min([_installed_memory(), *(limit for limit, _ in _memory_limits())])


def free_memory() -> int:
    """Return the bytes of main memory that this process can allocate now."""
    free = _meminfo("MemAvailable")
    if free is None and sys.platform == "darwin":
        from splatcli import darwin

        free = darwin.free_memory()
    if free is None:
        free = _installed_memory() // 2  # a guess
    return max(0, min([free, *(limit - used for limit, used in _memory_limits())]))


def held_memory(*, without_files: bool = False) -> int:
    """Return the bytes of main memory that this process holds.

    without_files: without pages of files, which the system evicts when it needs the memory.
    """
    try:
        _, resident, of_files = (int(word) for word in (_PROC / "self/statm").read_text().split()[:3])
        return (resident - of_files if without_files else resident) * resource.getpagesize()
    except (OSError, ValueError):
        pass
    if sys.platform == "darwin":
        from splatcli import darwin

        held = darwin.held_memory()
        # Else the most that it has held so far, here in bytes.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if held is None else held
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _installed_memory() -> int:
    total = _meminfo("MemTotal")
    if total is not None:
        return total
    try:
        return os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()
    except (OSError, ValueError):  # a name that the system does not know
        return _UNKNOWN_TOTAL


def _meminfo(key: str) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (_PROC / "meminfo").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return None


def _groups(controller: str) -> Iterator[Path]:
    """Yield where the files of this process's groups, and of those above, may be; inside a container only some exist.

    A line of /proc/self/cgroup is "number:controllers:path", without controllers for version 2.
    """
    try:
        lines = (_PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        roots = (_GROUPS / controller, _GROUPS / controllers) if controllers else (_GROUPS, _GROUPS / "unified")
        own = PurePosixPath(path.lstrip("/"))
        for root in dict.fromkeys(roots):
            yield from (root / group for group in (own, *own.parents))


@functools.lru_cache(maxsize=1)
def _quotas_in(second: int, proc: Path, groups: Path) -> tuple[float, ...]:
    """Return _quotas() as they were when it was first asked in this second; proc, groups: where they are."""
    return tuple(_quotas())


def _quotas() -> Iterator[float]:
    """Yield the processors whose time each limited group of this process may use, such as 1.5."""
    for group in _groups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # also "max": no limit
            quota, period = (group / "cpu.max").read_text().split()
            yield int(quota) / int(period)
        with contextlib.suppress(OSError, ValueError):
            time = int((group / "cpu.cfs_quota_us").read_text())
            if time > 0:
                yield time / int((group / "cpu.cfs_period_us").read_text())


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Yield (limit, used) in bytes of each limit of this process: its address space, the groups that it is in."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        used = 0
        with contextlib.suppress(OSError, ValueError, IndexError):
            used = int((_PROC / "self/statm").read_text().split()[0]) * resource.getpagesize()
        yield soft, used
    for limit, group, used_file, cache in _limits_in(int(time.monotonic()), _PROC, _GROUPS):
        with contextlib.suppress(OSError, ValueError):
            used = int((group / used_file).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            yield limit, used - int(stat.get(cache, 0))


@functools.lru_cache(maxsize=1)
def _limits_in(second: int, proc: Path, groups: Path) -> tuple[tuple[int, Path, str, str], ...]:
    """Return limits of memory as they were when they were first asked for in this second, as _quotas_in().

    Each with its group and that group's names for what is used and for what the system drops first. Numbers that the
    machine does not reach are no limits; version 1 has one where version 2 says "max".
    """
    limits = []
    installed = _installed_memory()
    for group in _groups("memory"):
        for limit_file, used_file, cache in _MEMORY_FILES:
            with contextlib.suppress(OSError, ValueError):
                limit = int((group / limit_file).read_text())
                if limit < installed:
                    limits.append((limit, group, used_file, cache))
    return tuple(limits)
