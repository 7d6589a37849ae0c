"""splatcli.machine: processors and memory within the limits of control groups, on made-up trees and in real groups."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from splatcli import darwin, machine

GIB = 1 << 30

#: Where control groups of version 1 can be made by root.
_V1 = Path("/sys/fs/cgroup")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 64 GiB, 48 of them free, and 64 processors, without limits."""
    monkeypatch.setattr(machine, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(machine.resource, "getrlimit", lambda kind: (machine.resource.RLIM_INFINITY,) * 2)
    write(tmp_path / "proc/meminfo", f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {48 << 20} kB\n")
    return tmp_path


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def limit_v2(group: Path, memory: str, used: int, cached: int, cpu: str) -> None:
    write(group / "memory.max", f"{memory}\n")
    write(group / "memory.current", f"{used}\n")
    write(group / "memory.stat", f"anon {used - cached}\ninactive_file {cached}\n")
    write(group / "cpu.max", f"{cpu}\n")


def limit_v1(root: Path, group: str, memory: int, used: int, cached: int, quota: int) -> None:
    write(root / "memory" / group / "memory.limit_in_bytes", f"{memory}\n")
    write(root / "memory" / group / "memory.usage_in_bytes", f"{used}\n")
    write(root / "memory" / group / "memory.stat", f"cache 5\ninactive_file 1\ntotal_inactive_file {cached}\n")
    write(root / "cpu,cpuacct" / group / "cpu.cfs_quota_us", f"{quota}\n")
    write(root / "cpu,cpuacct" / group / "cpu.cfs_period_us", "100000\n")


def found() -> tuple[int, float, float]:
    return machine.cores(), machine.total_memory() / GIB, machine.free_memory() / GIB


def test_a_process_without_limits_has_the_machine(system: Path) -> None:
    assert found() == (64, 64, 48)
    limit_v2(system / "cgroup/user.slice", "max", 40 * GIB, 0, "max 100000")
    limit_v1(system / "cgroup", ".", (1 << 63) - 4096, 40 * GIB, 0, -1)
    write(system / "proc/self/cgroup", "5:cpu,cpuacct:/\n4:memory:/\n0::/user.slice\n")
    assert found() == (64, 64, 48)


def test_a_quota_that_changes_is_known_after_a_second(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(machine.time, "monotonic", lambda: clock[0])
    write(system / "proc/self/cgroup", "0::/job\n")
    group = system / "cgroup/job"
    for quota, number in (("250000 100000", 3), ("600000 100000", 6), ("max 100000", 64)):
        write(group / "cpu.max", f"{quota}\n")
        clock[0] += 1.0
        assert machine.cores() == number


@pytest.mark.parametrize("mount", [".", "unified"])
def test_limits_of_a_job_in_version_2_and_of_groups_above(system: Path, mount: str) -> None:
    root = system / "cgroup" / mount
    limit_v2(root / "slurm/job7", "max", 3 * GIB, GIB, "250000 100000")
    limit_v2(root / "slurm", str(16 * GIB), 6 * GIB, 2 * GIB, "max 100000")
    write(system / "proc/self/cgroup", "0::/slurm/job7\n")
    assert found() == (3, 16, 12)


def test_limits_of_a_job_in_version_1(system: Path) -> None:
    limit_v1(system / "cgroup", "slurm/uid_7/job_8", 8 * GIB, 3 * GIB, GIB, 400_000)
    write(
        system / "proc/self/cgroup", "9:name=systemd:/\n5:cpu,cpuacct:/slurm/uid_7/job_8\n4:memory:/slurm/uid_7/job_8\n"
    )
    assert found() == (4, 8, 6)


def test_limits_in_containers_that_show_the_path_outside(system: Path) -> None:
    limit_v1(system / "cgroup", ".", 4 * GIB, GIB, 0, 150_000)
    write(system / "proc/self/cgroup", "5:cpu,cpuacct:/docker/0a1b\n4:memory:/docker/0a1b\n")
    assert found() == (2, 4, 3)


def test_a_full_group_leaves_nothing_and_a_small_quota_one_processor(system: Path) -> None:
    limit_v2(system / "cgroup/job", str(GIB), 2 * GIB, 0, "5000 100000")
    write(system / "proc/self/cgroup", "0::/job\n")
    assert found() == (1, 1, 0)


def test_a_system_that_says_nothing(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (system / "proc/meminfo").unlink()
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    pages = 6 * GIB // machine.resource.getpagesize()
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": pages}.__getitem__)
    assert found() == (1, 6, 3)
    assert machine.held_memory() == 1024 * machine.resource.getrusage(machine.resource.RUSAGE_SELF).ru_maxrss

    def unknown(name: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "sysconf", unknown)
    assert found() == (1, 8, 4)


class MacLibrary:
    """The C library of a Mac with 7 GiB to spare, and 5 GiB in this process."""

    failed = 0

    def host_statistics64(self, host: int, kind: int, found: Any, count: Any) -> int:
        assert (host, kind, count._obj.value) == (77, darwin.HOST_VM_INFO64, 24)
        page = machine.resource.getpagesize()
        found._obj.free_count, found._obj.inactive_count = 3 * GIB // page, 4 * GIB // page
        found._obj.active_count = found._obj.speculative_count = 11
        return self.failed

    def proc_pid_rusage(self, number: int, kind: int, found: Any) -> int:
        assert (number, kind) == (os.getpid(), darwin.RUSAGE_INFO_V0)
        found._obj.ri_phys_footprint, found._obj.ri_resident_size = 5 * GIB, 11
        return self.failed


def test_a_mac_says_it_through_its_c_library(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (system / "proc/meminfo").unlink()
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 16 * GIB // machine.resource.getpagesize()}.__getitem__)
    monkeypatch.setattr(sys, "platform", "darwin")
    library = MacLibrary()
    monkeypatch.setattr(darwin, "_library", lambda: (library, 77))
    assert found() == (64, 16, 7)
    assert machine.held_memory() == 5 * GIB
    library.failed = 1
    assert found() == (64, 16, 8)
    peak = machine.resource.getrusage(machine.resource.RUSAGE_SELF).ru_maxrss
    assert machine.held_memory() == peak, "in bytes there"


@pytest.fixture
def groups() -> Iterator[list[Path]]:
    """Real groups of version 1 with half a processor and 3 GiB."""
    made = []
    try:
        for controller, limit, value in (
            ("cpu", "cpu.cfs_quota_us", 50_000),
            ("memory", "memory.limit_in_bytes", 3 * GIB),
        ):
            group = _V1 / controller / f"splat-{os.getpid()}"
            if not os.access(group.parent / "cgroup.procs", os.W_OK):
                pytest.skip(f"no control group of version 1 can be made in {group.parent}")
            group.mkdir()
            made.append(group)
            (group / limit).write_text(str(value))
        yield made
    finally:
        for group in made:
            group.rmdir()


def test_a_command_keeps_within_real_groups(groups: list[Path]) -> None:
    enter = "".join(f"open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid())); " for group in groups)
    code = f"import os, sys; {enter}os.execv(sys.executable, [sys.executable, '-m', 'splatcli', 'doctor', '--json'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    facts = json.loads(done.stdout)
    assert (facts["threads"], facts["memory_bytes"]) == (1, 3 * GIB)
