"""Memory as the kernel of macOS counts it, asked of the C library: Python has no call for it, and there is no /proc."""

from __future__ import annotations

import ctypes
import functools
import os
import resource
from typing import Any

#: host_statistics64(): pages of the machine.
HOST_VM_INFO64 = 4
#: proc_pid_rusage(): the oldest of its structs.
RUSAGE_INFO_V0 = 0


class VmStatistics(ctypes.Structure):
    """vm_statistics64 of <mach/vm_statistics.h> in its first revision. Counts are in pages of this process' size."""

    _fields_ = (
        ("free_count", ctypes.c_uint32),
        ("active_count", ctypes.c_uint32),
        ("inactive_count", ctypes.c_uint32),
        ("wire_count", ctypes.c_uint32),
        ("zero_fill_count", ctypes.c_uint64),
        ("reactivations", ctypes.c_uint64),
        ("pageins", ctypes.c_uint64),
        ("pageouts", ctypes.c_uint64),
        ("faults", ctypes.c_uint64),
        ("cow_faults", ctypes.c_uint64),
        ("lookups", ctypes.c_uint64),
        ("hits", ctypes.c_uint64),
        ("purges", ctypes.c_uint64),
        ("purgeable_count", ctypes.c_uint32),
        ("speculative_count", ctypes.c_uint32),
    )


class ProcessUsage(ctypes.Structure):
    """rusage_info_v0 of <sys/resource.h>."""

    _fields_ = (
        ("ri_uuid", ctypes.c_uint8 * 16),
        ("ri_user_time", ctypes.c_uint64),
        ("ri_system_time", ctypes.c_uint64),
        ("ri_pkg_idle_wkups", ctypes.c_uint64),
        ("ri_interrupt_wkups", ctypes.c_uint64),
        ("ri_pageins", ctypes.c_uint64),
        ("ri_wired_size", ctypes.c_uint64),
        ("ri_resident_size", ctypes.c_uint64),
        ("ri_phys_footprint", ctypes.c_uint64),
        ("ri_proc_start_abstime", ctypes.c_uint64),
        ("ri_proc_exit_abstime", ctypes.c_uint64),
    )


def free_memory() -> int | None:
    """Return the bytes that are free or were not used lately; None when the system does not say."""
    found = VmStatistics()
    count = ctypes.c_uint32(ctypes.sizeof(found) // ctypes.sizeof(ctypes.c_int32))
    try:
        library, host = _library()
        failed = library.host_statistics64(host, HOST_VM_INFO64, ctypes.byref(found), ctypes.byref(count))
    except (AttributeError, OSError):
        return None
    return None if failed else (found.free_count + found.inactive_count) * resource.getpagesize()


def held_memory() -> int | None:
    """Return the bytes that this process holds, compressed ones too, pages of files not; None when it is not said."""
    found = ProcessUsage()
    try:
        library, _ = _library()
        failed = library.proc_pid_rusage(os.getpid(), RUSAGE_INFO_V0, ctypes.byref(found))
    except (AttributeError, OSError):
        return None
    return None if failed else int(found.ri_phys_footprint)


@functools.cache
def _library() -> tuple[Any, int]:
    """Return the C library, and the right to ask about the machine, of which each request makes a new one."""
    library: Any = ctypes.CDLL(None)
    library.mach_host_self.restype = ctypes.c_uint32
    library.host_statistics64.argtypes = (ctypes.c_uint32, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    library.proc_pid_rusage.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
    return library, library.mach_host_self()
