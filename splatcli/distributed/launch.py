"""Launcher: one command as N processes of this machine, each with a rank; signals in, one exit code out.

torch's launcher ends the other ranks as soon as one has failed, so that none of them can name it. It sends a Ctrl-C
again that they have already had, and returns 1 whatever they return. This launcher sets the variables that torch's
sets, so that ranks are the same under either.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType

import torch.distributed as dist

from splatcli.distributed.heartbeat import REMEDY, Failure, first_of
from splatcli.errors import DistributedError

#: Passed on to all ranks; the first that asks for a stop counts for all of them.
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

#: Seconds between two polls of the ranks.
_POLL = 0.1

#: Seconds in which the other ranks may end by themselves: from the first failure on, and from the first end in good
#: order on.
_LAST_WORDS, _LAST_END = 3.0, 30.0


def launch(command: Sequence[str], ranks: int, *, share_cores: bool) -> int:
    """Run ``command`` as ``ranks`` processes, which read their ranks in the environment; return one exit code.

    share_cores: each gets its share of the processors, for ranks that compute on them.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = dist.PrefixStore("splat", dist.PrefixStore("splat-0", store))
    shares = _core_shares(ranks) if share_cores else []
    processes: list[subprocess.Popen[bytes]] = []
    found: Failure | None = None
    with _passing_on(processes):
        for rank in range(ranks):
            # A session of its own: a Ctrl-C reaches the ranks through us, and once.
            environment = _environment(rank, ranks, store.port, len(shares[rank]) if shares else None)
            processes.append(subprocess.Popen(command, env=environment, start_new_session=True))
            if shares and hasattr(os, "sched_setaffinity"):
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(processes[rank].pid, shares[rank])
        try:
            found = _wait(processes, meeting)
        finally:
            for process in processes:
                process.kill()  # SIGKILL also ends a process that was stopped, and one that waits for ever
                process.wait()
    codes = [process.returncode for process in processes]
    code = joint_code(codes)
    if code == DistributedError.exit_code and found is not None and codes[found.reporter(ranks)] < 0:
        raise DistributedError(found.what, where=f"{ranks} ranks", remedy=REMEDY)  # its reporter is dead
    return code


def joint_code(codes: Sequence[int]) -> int:
    """Return one exit code for those of all ranks: a rank's own failure, rather than that the others lost it."""
    asked = {-number: 128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}
    failed = [asked.get(code, DistributedError.exit_code) if code < 0 else code for code in codes if code]
    return min(failed, key=lambda code: (code == DistributedError.exit_code, code), default=0)


def _wait(processes: list[subprocess.Popen[bytes]], meeting: dist.Store) -> Failure | None:
    """Wait until all ranks have ended, or the rest can be killed; return the failure, if there is one.

    The rest are ranks that do not react after one has failed, or after the others have found it silent.
    """
    found: Failure | None = None
    deadline = math.inf
    while True:
        codes = [process.poll() for process in processes]  # of all, so that each is reaped
        living = [rank for rank, code in enumerate(codes) if code is None]
        killed = [rank for rank, code in enumerate(codes) if code is not None and code < 0]
        if found is None:
            found = _failure_of(codes, killed, meeting)
        if not living:
            return found
        failed = any(codes) or (found is not None and not found.reported)
        if failed or len(living) < len(codes):
            deadline = min(deadline, time.monotonic() + (_LAST_WORDS if failed else _LAST_END))
        if found is not None and found.reporter(len(codes)) not in living and set(living) <= set(found.ranks):
            return found  # it is printed, and only the failed ranks are left
        if time.monotonic() > deadline:
            names = first_of([f"rank {rank}" for rank in living], " and ")
            return found or Failure(living, f"{names} did not end when the others had")
        time.sleep(_POLL)


def _failure_of(codes: list[int | None], killed: list[int], meeting: dist.Store) -> Failure | None:
    """Return the failure that the ranks have declared, or declare here that one of them was killed."""
    if killed:
        names = [f"rank {rank} was killed by {signal.Signals(-(codes[rank] or 0)).name}" for rank in killed]
        return Failure(killed, first_of(names, " and ")).publish(meeting)
    return Failure.read(meeting)


@contextlib.contextmanager
def _passing_on(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Pass signals that this process gets on to the ranks."""

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
    """Return the processors of each rank; where there are fewer than ranks, some share one."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    cores = sorted(os.sched_getaffinity(0))
    return [set(cores[rank::ranks]) or {cores[rank % len(cores)]} for rank in range(ranks)]


def _environment(rank: int, ranks: int, port: int, threads: int | None) -> dict[str, str]:
    """Return the variables that torchrun sets on one machine, with the network that always exists."""
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    # torch would print pages about a lost connection.
    defaults = {"GLOO_SOCKET_IFNAME": loopback, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if threads is not None:
        defaults["OMP_NUM_THREADS"] = str(threads)
    return {**defaults, **os.environ, **{name: str(value) for name, value in variables.items()}}
