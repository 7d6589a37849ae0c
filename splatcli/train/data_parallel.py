"""Crew: the processes that train one run together, as the trainer sees them; and what those beside the first one do.

Every process does the same things in the same order, and holds all Gaussians, or a part of them (sharding.py). What a
single one of them knows (a signal, the time, a disk) is told to all before anyone acts on it, and only the first one
writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol
from zlib import crc32

import torch
from torch import Tensor

from splatcli import __version__
from splatcli.checkpoint.run_dir import RunDir
from splatcli.config import with_settings
from splatcli.rasterizer.sharded import ShardTeam
from splatcli.scene.scene import Scene
from splatcli.train.checkpointer import Checkpointer
from splatcli.train.events import Event, Saved
from splatcli.train.monitor import state_tensors
from splatcli.train.state import TrainState

#: Steps between two comparisons of all numbers of the state.
COMPARE_EVERY = 10

#: Why a run stops, in the order in which one reason goes before another; "asked" is any that is not listed.
REASONS = ("", "SIGINT", "SIGTERM", "SIGHUP", "asked", "max-time", "finished", "stop-at")

#: Rows that a digest looks at together: torch makes a wider copy of them.
_ROWS = 1 << 13

#: A digest has as many bits as a float64 holds exactly.
_DIGEST_BITS = (1 << 52) - 1


class Crew(ShardTeam, Protocol):
    """The processes of a run (splatcli.distributed.World is one)."""

    def collect(self, own: Tensor, *, everywhere: bool) -> Tensor | None:
        """The rows of all ranks, one after another: on every rank, or on the first one, and None on the others."""
        ...

    def agree(self, what: str, **facts: int) -> None:
        """Raises DistributedError on every rank, naming those that differ, unless all give the same numbers."""
        ...

    def apart(self, doing: str) -> AbstractContextManager[None]:
        """While this rank does something alone that takes its time, the others wait for it without complaint."""
        ...

    def check(self) -> None:
        """Raises DistributedError when another rank is known to have failed."""
        ...


def place_of(crew: Crew | None, sharded: bool) -> tuple[int, int] | None:
    """(rank, size) where processes hold a part of the Gaussians each; a single one holds all."""
    return (crew.rank, crew.size) if crew is not None and sharded and crew.size > 1 else None


def agreed_wish(crew: Crew | None, reason: str | None, save: bool) -> tuple[str | None, bool]:
    """Why to stop, if at all, and whether to save: what any process wishes. A crew compares states before a save."""
    if crew is None:
        return reason, save
    known = (reason or "") if (reason or "") in REASONS else "asked"
    told = crew.tell("wishes", [REASONS.index(known), save])
    wished = sorted(int(number) for number, _ in told if number)
    return (REASONS[wished[0]] if wished else None), any(flag for _, flag in told)


def most_of_all(crew: Crew, number: float) -> float:
    """The largest of the numbers of all processes."""
    return max(other for (other,) in crew.tell("the numbers", [number]))


def found_together(crew: Crew | None, look: Callable[[], None]) -> None:
    """Does ``look`` in every process; what it raises in one is raised in all."""
    problem = None
    try:
        look()
    except Exception as error:
        if crew is None:
            raise
        problem = error
    if crew is not None:
        crew.tell("the numbers", [], problem)


def begin_together(crew: Crew | None, state: TrainState, scene: Scene) -> None:
    """Settles what each process finds by itself: all take the cap of the one that has room for least.

    Raises DistributedError, naming the odd ones, when programs, settings or photos are not the same everywhere.
    """
    if crew is None:
        return
    caps = [int(cap) for (cap,) in crew.tell("the settings", [state.config.memory.cap or 0]) if cap]
    state.config = with_settings(state.config, {"memory.cap": min(caps, default=None)})
    settings = with_settings(state.config, {"data.scene": ""})
    crew.agree(
        "the run",
        program=_sum_of([__version__, torch.__version__]),
        settings=_sum_of(settings.model_dump(mode="json")),
        Gaussians=state.count,
        parts=1 if state.shard is None else state.shard.size,
        photos=_sum_of(scene.fingerprint()),
        cameras=_sum_of([repr((camera.name, camera.viewmat.tolist())) for camera in state.cameras]),
    )


def _sum_of(facts: object) -> int:
    return crc32(json.dumps(facts, sort_keys=True).encode())


def compare(crew: Crew | None, state: TrainState) -> None:
    """Raises DistributedError, naming the odd ones, unless the states of all processes are the same.

    Of Gaussians that are shared out nobody else has the numbers: there it is the rest that is compared, and what the
    parts were cut out of.
    """
    if crew is None:
        return
    of_rows, of_rest = digests(state)
    digest = of_rest if state.shard is not None else joint_digest([of_rows], of_rest)
    crew.agree("the state", step=state.step, Gaussians=state.count, origin=state.origin, digest=digest)


def state_digest(state: TrainState) -> int:
    """52 bits of all parameters, moments and statistics, and of the places in the random streams."""
    of_rows, of_rest = digests(state)
    return joint_digest([of_rows], of_rest)


def joint_digest(of_rows: Sequence[int], of_rest: int) -> int:
    """The state_digest() of one process with all rows, from the digests() of those that have a part each."""
    return (sum(of_rows) + of_rest) & _DIGEST_BITS


@torch.no_grad()
def digests(state: TrainState) -> tuple[int, int]:
    """52 bits each: of the rows, weighted by their places among those of all processes; and of all else."""
    first, device = 0 if state.shard is None else state.shard.first, state.gaussians.device
    rows = [tensor for _, tensor in state_tensors(state.gaussians, state.adam)]
    rows += [state.adam.rest_steps, state.stats.grad2d, state.stats.count]
    of_rows: list[int] = torch.stack([_row_sum(tensor, first).to(device) for tensor in rows]).tolist()
    rest = [int(_row_sum(tensor)) for tensor in state.per_view_params.stored().values()]
    rest += [int(_row_sum(generator.get_state())) for generator in state.generators.values()]
    rest += [state.sampler.epoch, state.sampler.position]
    return _weighted(of_rows, 0), _weighted(rest, len(rows))


@torch.no_grad()
def digest_of(columns: Iterable[Tensor]) -> int:
    """52 bits of all numbers of some tensors."""
    return _weighted([int(_row_sum(column)) for column in columns], 0)


def _weighted(sums: Sequence[int], place: int) -> int:
    return sum(number * (2 * (place + i) + 1) for i, number in enumerate(sums)) & _DIGEST_BITS


def _row_sum(tensor: Tensor, first: int = 0) -> Tensor:
    """[] int64, the bits of all numbers, each row with a weight of its own; overflow wraps and harms nothing.

    first: the place of the first row.
    """
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    words = tensor.detach().reshape(len(tensor), -1)
    words = words if words.dtype == torch.uint8 else words.contiguous().view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(words), _ROWS):
        rows = words[start : start + _ROWS]
        places = torch.arange(first + start, first + start + len(rows), device=tensor.device)
        total += (rows.sum(dim=1, dtype=torch.int64) * (2 * places + 1)).sum()
    return total


class ReadOnlyCheckpointer(Checkpointer):
    """Keeps the books of a process that writes nothing: what the first one has saved counts for all."""

    def begin(self, state: TrainState) -> Iterator[Event]:
        self._note(state)
        yield from ()

    def due(self, state: TrainState) -> bool:
        return False

    def save(self, state: TrainState) -> Saved:
        return self._note(state)

    def finish(self, state: TrainState, *, patient: Callable[[], bool]) -> Iterator[Event]:
        self._note(state)
        yield from ()

    def _note(self, state: TrainState) -> Saved:
        self.saved = Saved(state.step, self.run_dir.checkpoint_path(state.step))
        return self.saved


class ReadRunDir(RunDir):
    """The run folder of the first process as the others see it: they read in it, and write nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = None
        self._undo = None

    def write_config(self, config: object) -> None:
        return None

    def write_report(self, name: str, record: object) -> Path:
        return self.path / name

    def append_metrics(self, record: object) -> None:
        return None

    def rewind(self, step: int) -> None:
        return None
