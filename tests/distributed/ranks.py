"""Ranks of a ProcessGroup as processes, quickly: forked from one that has torch loaded and has started nothing."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from splatcli.distributed.process_group import PATIENCE, Place, ProcessGroup, join
from splatcli.errors import SplatError

#: Modules that every rank needs; the process that ranks are forked from loads them once.
PRELOADED = ["tests.distributed.ranks", "splatcli.train.trainer", "splatcli.distributed.process_group"]


#: Seconds for which the last of several ranks is waited for when another has failed, and for a process to end.
LAST_ONE = 5.0


@dataclass(frozen=True)
class Ended:
    """How a rank ended: exit code, what its function returned, or the error that it raised in words.

    seconds: from when it had met the others.
    """

    code: int | None
    value: Any = None
    error: str | None = None
    seconds: float = 0.0


def gloo_threads() -> int:
    """How many threads of gloo this process has; 0 without /proc.

    One that still drops its last collective while Python shuts down aborts the process, once in a while.
    """
    return sum("gloo" in path.read_text() for path in Path("/proc/self/task").glob("*/comm"))


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *arguments: Any,
    patience: float = PATIENCE,
    limit: float = 300.0,
    store_at_rank_0: bool = False,
) -> list[Ended]:
    """``function(group, *arguments)`` on every rank; they and results are pickled. Ranks that hang are killed.

    store_at_rank_0: the ranks meet at the first of them, as without a launcher, and not in this process.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    if store_at_rank_0:
        del store  # its port is free again
    ranks: list[tuple[BaseProcess, Connection]] = []
    began = time.monotonic()
    for rank in range(size):
        place = Place(rank, size, rank, "127.0.0.1", port, not store_at_rank_0)
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(place, patience, theirs, function, arguments), daemon=True)
        process.start()
        theirs.close()
        ranks.append((process, ours))
    return _gathered(ranks, began + limit)


def _gathered(ranks: list[tuple[BaseProcess, Connection]], deadline: float) -> list[Ended]:
    """How the ranks end. A last one that is silent, for it was stopped, is not waited for much longer."""
    received: dict[int, tuple[Any, str | None, float]] = {}
    pending = {pipe: rank for rank, (_, pipe) in enumerate(ranks)}
    while pending and time.monotonic() < deadline:
        for pipe in wait(list(pending), timeout=0.5):
            assert isinstance(pipe, Connection)
            rank = pending.pop(pipe)
            with contextlib.suppress(EOFError, OSError):
                received[rank] = pickle.loads(pipe.recv_bytes())
            if len(pending) == 1 and any(error is not None for _, error, _ in received.values()):
                deadline = min(deadline, time.monotonic() + LAST_ONE)
    ended = []
    for rank, (process, _) in enumerate(ranks):
        process.join(LAST_ONE if rank in received else 0.1)
        code = process.exitcode
        if code is None:
            process.kill()
            process.join()
        ended.append(Ended(code, *received.get(rank, (None, None, 0.0))))
    return ended


def results(
    function: Callable[..., Any], size: int, *arguments: Any, patience: float = PATIENCE, limit: float = 300.0
) -> list[Any]:
    """What ``function`` returned on every rank; AssertionError when one failed."""
    ended = run_ranks(function, size, *arguments, patience=patience, limit=limit)
    assert all(one.code == 0 for one in ended), [(one.code, one.error) for one in ended]
    return [one.value for one in ended]


def _work(
    place: Place, patience: float, pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    group: ProcessGroup | None = None
    began = time.monotonic()
    try:
        group = join(place, torch.device("cpu"), patience=patience)
        began = time.monotonic()
        value = function(group, *arguments)
        if not group.monitor.failed:
            group.close()
        # By value: tensors of a process that ends cannot be shared.
        pipe.send_bytes(pickle.dumps((value, None, time.monotonic() - began)))
        code = 0
    except BaseException as error:
        if group is not None:
            group.fail(error)
        words = error.what if isinstance(error, SplatError) else traceback.format_exc()
        pipe.send_bytes(pickle.dumps((None, words, time.monotonic() - began)))
        code = error.exit_code if isinstance(error, SplatError) else 1
    os._exit(code)
