"""Ranks: one run by several processes; started here, or by a launcher that this process is one of the ranks of."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from splatcli.cli.output import Output
from splatcli.errors import UsageError

if TYPE_CHECKING:
    from splatcli.distributed.world import World

#: What ``--distributed`` takes.
MODES = ("replicated",)


def start_ranks(ranks: int, arguments: list[str], *, device: str, distributed: str | None) -> int:
    """Runs ``splat`` with ``arguments`` as ``ranks`` processes of this machine; the exit code of all.

    device: as on the command line; with GPUs there has to be one for each.
    """
    from splatcli.cli.device import resolve_device
    from splatcli.distributed.launch import launch

    if distributed is not None:
        raise UsageError(
            "--ranks starts the ranks, --distributed joins those that a launcher has started", remedy="give one"
        )
    on_gpus = resolve_device(device).startswith("cuda")
    if on_gpus:
        import torch

        if torch.cuda.device_count() < ranks:
            raise UsageError(
                f"{ranks} ranks want as many GPUs, and there are {torch.cuda.device_count()}",
                where="--ranks",
                remedy="fewer ranks, or --device cpu",
            )
    kind = ["--device", "cuda" if on_gpus else "cpu"]
    command = [sys.executable, "-m", "splatcli", *arguments, "--distributed", "replicated", *kind]
    return launch(command, ranks, share_cores=not on_gpus)


@contextmanager
def crew_of(mode: str | None, device: str, out: Output) -> Iterator[tuple[World | None, str]]:
    """(the ranks that this process is one of, the device of this one); without a mode it works alone.

    All ranks but the first say nothing of what they do. An error in here ends this process, with its exit code, and is
    told by one of the ranks: what waits for others in the background would keep the process from ending.
    """
    from splatcli.cli.device import resolve_device

    if mode is None:
        ranks = os.environ.get("WORLD_SIZE", "1")
        if ranks != "1" and "RANK" in os.environ:
            out.warn(f"WORLD_SIZE is {ranks}, but this process works alone; --distributed replicated lets ranks share")
        yield None, resolve_device(device)
        return
    if mode not in MODES:
        raise UsageError(f"{mode!r} is no way to share a run", where="--distributed", remedy=" or ".join(MODES))
    import torch

    from splatcli.distributed.joining import Place, join

    place = Place.of(os.environ)
    own = resolve_device(f"cuda:{place.local}" if device in ("auto", "cuda") and torch.cuda.is_available() else device)
    if own.startswith("cuda"):
        torch.cuda.set_device(own)
    if place.rank:
        out.mute()
    world = join(place, torch.device(own))
    try:
        yield world, own
        world.close()
    except BaseException as error:
        world.fail(error)
        _end(error, world, out)


def _end(error: BaseException, world: World, out: Output) -> None:
    """Ends this process for ``error``."""
    from splatcli.cli.boundary import told

    code = 130 if isinstance(error, KeyboardInterrupt) else 1
    if isinstance(error, Exception):
        out.muted = not world.watch.speaks
        code = told(error, sys.argv[1:], out)
    out.close()
    os._exit(code)
