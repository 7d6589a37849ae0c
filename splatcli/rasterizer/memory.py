"""Memory: what a device has, what a run may still take of it, and buffers that are used again."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

#: Of what is free on a device this part may be taken: allocators round up, and others live there too.
SHARE = 0.9

#: Of a limit, pairs take no more than this part: the rest is for density control, which makes new rows before it lets
#: go of the old ones. With more pairs, views are made in bands.
PAIRS_SHARE = 0.5

#: Where the machine does not tell what is free.
_UNTOLD = 4 << 30


@dataclass(slots=True)
class Budget:
    """How many bytes a run may hold on its device.

    limit: in all, tensors and (on the CPU) the process itself; None: whatever the device has free.
    offloads: whether what lies in files that are mapped is not counted, see held_memory().
    told: whether the user has heard already that views are made in bands.
    """

    device: torch.device
    limit: int | None = None
    offloads: bool = False
    told: bool = False

    def left(self, reusable: int = 0) -> int:
        """Bytes that pairs may take now, ``reusable`` bytes of ours among them that would be given back first."""
        left = int(SHARE * (free_memory(self.device) + reusable))
        if self.limit is not None:
            left = min(
                left,
                self.limit - held_memory(self.device, offloads=self.offloads) + reusable,
                int(PAIRS_SHARE * self.limit),
            )
        return max(0, left)


@dataclass(slots=True)
class FixedBudget:
    """So many bytes for tile pairs, whatever else is held."""

    pairs: int
    told: bool = False

    def left(self, reusable: int = 0) -> int:
        return self.pairs


class Arena:
    """Named buffers that only grow, so that a training loop stops allocating after its first views.

    slack: a growing buffer becomes this much larger than it has to.
    """

    def __init__(self, device: torch.device, slack: float = 0.25) -> None:
        self.device = device
        self.slack = slack
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """At least ``numel`` uninitialised numbers, the same memory as last time where it suffices."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < numel or buffer.dtype != dtype:
            # Dropped before its successor is made: the two are never alive together.
            self._buffers.pop(name, None)
            del buffer
            buffer = torch.empty(max(numel + int(self.slack * numel), 64), dtype=dtype, device=self.device)
            self._buffers[name] = buffer
        return buffer

    def drop(self, *names: str) -> None:
        """Gives the named buffers back."""
        for name in names:
            self._buffers.pop(name, None)

    def nbytes(self, *names: str) -> int:
        """What the named buffers hold now."""
        return sum(self._buffers[name].nbytes for name in names if name in self._buffers)


def total_memory(device: torch.device) -> int:
    """Bytes of the device; of the CPU, what the machine and the limits of the process allow."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    total = _meminfo("MemTotal")
    limits = [limit for limit, _ in _limits()]
    return min([_UNTOLD if total is None else total, *limits])


def free_memory(device: torch.device) -> int:
    """Bytes that could be had now on the device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    available = _meminfo("MemAvailable")
    return max(0, min([_UNTOLD if available is None else available, *(limit - used for limit, used in _limits())]))


def held_memory(device: torch.device, *, offloads: bool = False) -> int:
    """Bytes that this process holds: tensors on a GPU, all that is resident on the CPU.

    offloads: on the CPU, without pages of files, which the system takes back when it needs them.
    """
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    try:
        _, resident, of_files = (int(word) for word in _words("/proc/self/statm")[:3])
        return (resident - of_files if offloads else resident) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _meminfo(key: str) -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _limits() -> list[tuple[int, int]]:
    """(limit, used) of whatever confines this process: its address space, the control groups that it is in."""
    found = []
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        try:
            found.append((soft, int(_words("/proc/self/statm")[0]) * resource.getpagesize()))
        except (OSError, ValueError, IndexError):
            found.append((soft, 0))
    for group in _control_groups():
        try:
            limit, used = int((group / "memory.max").read_text()), int((group / "memory.current").read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue  # also "max": this one sets no limit
        found.append((limit, used - int(stat.get("inactive_file", 0))))  # the page cache gives way
    return found


def _control_groups() -> list[Path]:
    """The group of this process in the unified hierarchy, and those above it."""
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    if not own:
        return []
    group = root / own[0]
    return [group, *(parent for parent in group.parents if parent == root or root in parent.parents)]


def _words(path: str) -> list[str]:
    return Path(os.fspath(path)).read_text().split()
