"""--ranks and --distributed: one run by several processes, started here or by another launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from splatcli.cli.console import Output
from splatcli.cli.options import MODES, RANKS, REPLICATED, RankOptions
from splatcli.errors import DistributedError, SplatError, UsageError
from splatcli.sizes import counted, gib

if TYPE_CHECKING:
    from splatcli.distributed.process_group import ProcessGroup

#: Memory of a process that has loaded torch and has no scene yet: 300 MB measured, of which files are shared.
_RANK_BYTES = 200 << 20


def start_ranks(processes: RankOptions, words: list[str], *, device: str, out: Output) -> int:
    """Run the command line ``words`` as the processes of this machine that it asks for; return one exit code.

    device: as on the command line; each rank needs a GPU of its own.
    """
    from splatcli import machine
    from splatcli.distributed.launch import launch

    own = check_ranks(processes, words, device=device)
    ranks = processes.ranks
    assert ranks is not None, "checked"
    if own == "cpu" and ranks > (cores := machine.cores()):
        out.warn(f"{ranks} processes share {counted(cores, 'core')}; one process uses all cores by itself")
    end = words.index("--") if "--" in words else len(words)
    command = [*_without_ranks(words[:end]), "--distributed", processes.distributed or REPLICATED, "--device", own]
    return launch([sys.executable, "-m", "splatcli", *command, *words[end:]], ranks, share_cores=own == "cpu")


def _without_ranks(words: list[str]) -> list[str]:
    """Return a command line without --ranks and --distributed."""
    kept = []
    pending = iter(words)
    for word in pending:
        if word in (*RANKS, "--distributed"):
            next(pending, None)
        elif not word.startswith(tuple(f"{name}=" for name in (*RANKS, "--distributed"))):
            kept.append(word)
    return kept


def check_ranks(processes: RankOptions, words: Sequence[str], *, device: str) -> str:
    """Return the kind of device of the processes, cuda or cpu. Raises UsageError where they cannot be started.

    words: the command line, for the alias of --ranks that it uses.
    """
    from splatcli.native.backend import resolve_device

    ranks, mode = processes.ranks, processes.distributed
    assert ranks is not None, "--ranks is given"
    asked = next((name for name in RANKS for word in words if word.split("=")[0] == name), RANKS[0])
    if mode is not None and "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError(
            f"a launcher has started {os.environ['WORLD_SIZE']} ranks, of which this is one, and {asked} starts others",
            where=asked,
            remedy=f"leave out {asked}",
        )
    _check_mode(mode or REPLICATED)
    on_gpus = resolve_device(device).startswith("cuda")
    if on_gpus or (asked == "--gpus" and device != "cpu"):
        import torch

        count = torch.cuda.device_count() if on_gpus else 0
        if count < ranks:
            raise UsageError(
                f"{ranks} ranks want as many GPUs, and there are {count} that can be used",
                where=asked,
                remedy="--device cpu shares the processors instead; splat doctor says what a GPU here lacks"
                if not count
                else f"{asked} {count}, or --device cpu",
            )
    if not on_gpus:
        _check_memory(ranks, asked)
    return "cuda" if on_gpus else "cpu"


def _check_memory(ranks: int, asked: str) -> None:
    """Raise UsageError for more processes than the memory that is free can hold before any of them has a scene."""
    from splatcli import machine

    free = machine.free_memory()
    if ranks * _RANK_BYTES > free:
        raise UsageError(
            f"{ranks} processes take at least {gib(ranks * _RANK_BYTES)} of memory, and {gib(free)} are available",
            where=asked,
            remedy=f"{asked} {machine.cores()} gives each core a process; one process uses all cores by itself",
        )


def check_sharded(*, viewer: bool) -> None:
    """Raise UsageError for options that need all Gaussians in one process."""
    if viewer:
        raise UsageError(
            "a page shows what one process holds, and with sharded Gaussians that is a part of them",
            where="--viewer",
            remedy="leave out --viewer, or use --distributed replicated",
        )


def _check_mode(mode: str) -> None:
    if mode not in MODES:
        raise UsageError(f"{mode!r} is no way to share a run", where="--distributed", remedy=" or ".join(MODES))


@contextmanager
def joined_group(mode: str | None, device: str, out: Output) -> Iterator[tuple[ProcessGroup | None, str]]:
    """Join the ranks of a launcher; yield (the group, this process' device), without a mode (None, device).

    Ranks beside rank 0 print nothing. An error inside ends this process at once, with its exit code, and one of the
    ranks reports it: threads that wait for other ranks would keep the process from ending.
    """
    from splatcli.native.backend import resolve_device

    if mode is None:
        ranks = os.environ.get("WORLD_SIZE", "1")
        if ranks != "1" and "RANK" in os.environ:
            out.warn(f"WORLD_SIZE is {ranks}, but this process works alone; --distributed replicated lets ranks share")
        yield None, resolve_device(device)
        return
    _check_mode(mode)
    import torch

    from splatcli.distributed.process_group import Place, join

    place = Place.of(os.environ)
    own = resolve_device(f"cuda:{place.local}" if device in ("auto", "cuda") and torch.cuda.is_available() else device)
    if own.startswith("cuda"):
        torch.cuda.set_device(own)
    if place.rank:
        out.muted = True
    group = join(place, torch.device(own))
    try:
        yield group, own
        group.close()
        group.destroy()
    except BaseException as error:
        group.fail(error)
        _end(error, group, out)


def _end(error: BaseException, group: ProcessGroup, out: Output) -> None:
    """End this process for ``error``."""
    from splatcli.cli.error_report import problem_of

    code = 130 if isinstance(error, KeyboardInterrupt) else 1
    if isinstance(error, Exception):
        out.muted = not group.monitor.reports
        problem = problem_of(error, sys.argv[1:])
        if type(problem) is SplatError:  # a bug, which the other ranks saw as the loss of this one
            problem = DistributedError(f"rank {group.rank} failed: {problem.what}", remedy=problem.remedy)
        out.error(problem)
        code = problem.exit_code
    out.close()
    os._exit(code)
