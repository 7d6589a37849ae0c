"""Launching: the same command as N processes of this machine, each with a place; signals in, one exit code out.

torch's own launcher ends the other ranks the moment that one has failed, so that nobody learns who it was, passes on a
Ctrl-C that they have had already, and returns 1 whatever they return. What it tells its processes is told here too, so
that under either they are the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from types import FrameType

import torch.distributed as dist

from splatcli.distributed.watch import GRACE, SILENCE, verdict
from splatcli.errors import DistributedError

#: Passed on to all ranks; the first that asks for a stop counts for all of them.
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

#: Seconds from the first failure on in which the other ranks find out and end by themselves.
_LAST_WORDS = SILENCE + GRACE + 4.0


def launch(command: Sequence[str], ranks: int, *, share_cores: bool) -> int:
    """Runs ``command`` as ``ranks`` processes, which find their places in the environment; the exit code of all.

    share_cores: each gets its share of the processors, as ranks that compute on them want.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = dist.PrefixStore("splat", dist.PrefixStore("splat-0", store))
    shares = _core_shares(ranks) if share_cores else []
    processes: list[subprocess.Popen[bytes]] = []
    with _passing_on(processes):
        for rank in range(ranks):
            # A session of its own: a Ctrl-C reaches the ranks through us, and once.
            environment = _environment(rank, ranks, store.port, len(shares[rank]) if shares else None)
            processes.append(subprocess.Popen(command, env=environment, start_new_session=True))
            if shares:
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(processes[rank].pid, shares[rank])
        try:
            _wait(processes, meeting)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return joint_code([process.returncode for process in processes])


def joint_code(codes: Sequence[int]) -> int:
    """One exit code for those of all ranks: what a rank met by itself says more than that the others missed it."""
    asked = {-number: 128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}
    failed = [asked.get(code, DistributedError.exit_code) if code < 0 else code for code in codes if code]
    return min(failed, key=lambda code: (code == DistributedError.exit_code, code), default=0)


def _wait(processes: list[subprocess.Popen[bytes]], meeting: dist.Store) -> None:
    """Until all have ended; those that do not hear of another's failure are left to their fate after a while."""
    deadline = None
    while any(process.poll() is None for process in processes):
        killed = [rank for rank, process in enumerate(processes) if (process.returncode or 0) < 0]
        failed = [process for process in processes if process.returncode]
        if deadline is None and failed:
            deadline = time.monotonic() + _LAST_WORDS
            if killed:
                name = signal.Signals(-processes[killed[0]].returncode).name
                found = verdict(killed, f"rank {killed[0]} was killed by {name}")
                meeting.compare_set("verdict", "", json.dumps(found))
        if deadline is not None and time.monotonic() > deadline:
            return
        time.sleep(0.05)


@contextlib.contextmanager
def _passing_on(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """While open, signals that are sent to this process go to the ranks."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _core_shares(ranks: int) -> list[set[int]]:
    """The processors of this process, dealt out; where there are fewer than ranks, some share one."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    cores = sorted(os.sched_getaffinity(0))
    return [set(cores[rank::ranks]) or {cores[rank % len(cores)]} for rank in range(ranks)]


def _environment(rank: int, ranks: int, port: int, threads: int | None) -> dict[str, str]:
    """What torchrun tells the processes of one machine, with the network that is sure to be there."""
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    # torch would tell of a lost connection in pages.
    wishes = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if threads is not None:
        wishes["OMP_NUM_THREADS"] = str(threads)
    return {**wishes, **os.environ, **{name: str(value) for name, value in place.items()}}
