"""Data-parallel training: agreement of the processes of a run, digests of their states, and the ranks beside rank 0.

Every process does the same in the same order, and holds all Gaussians, or a shard of them (train/sharding.py). What a
single process knows (a signal, the time, a full disk) is sent to all before any acts on it. Only rank 0 writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

import torch
from torch import Tensor

from splatcli import __version__
from splatcli.checkpoint.run_dir import RunDir
from splatcli.config import with_settings
from splatcli.scene.scene import Scene
from splatcli.train.checkpointer import Checkpointer
from splatcli.train.events import Event, Saved
from splatcli.train.monitor import state_tensors
from splatcli.train.state import TrainState

if TYPE_CHECKING:
    from splatcli.distributed.process_group import ProcessGroup

#: Steps between two comparisons of all numbers of the state.
COMPARE_EVERY = 10

#: Reasons to stop a run; an earlier one prevails over a later one. "asked" is any that is not listed.
REASONS = ("", "SIGINT", "SIGTERM", "SIGHUP", "asked", "max-time", "finished", "stop-at")

#: Rows that are summed at once for a digest: torch makes a wider copy of them.
_ROWS = 1 << 13

#: A digest has as many bits as a float64 holds exactly.
_DIGEST_BITS = (1 << 52) - 1


def sync_stop_request(group: ProcessGroup | None, reason: str | None, save: bool) -> tuple[str | None, bool]:
    """Return (why to stop, if at all, whether to save): the requests of any process."""
    if group is None:
        return reason, save
    known = (reason or "") if (reason or "") in REASONS else "asked"
    requests = group.all_gather_scalars("stop and save requests", [REASONS.index(known), save])
    reasons = sorted(int(number) for number, _ in requests if number)
    return (REASONS[reasons[0]] if reasons else None), any(flag for _, flag in requests)


def raise_on_all(group: ProcessGroup | None, check: Callable[[], None]) -> None:
    """Run ``check`` in every process; what it raises in one is raised in all."""
    if group is None:
        check()
    else:
        group.raise_on_all(check)


def rows_of_rank0(group: ProcessGroup, rows: Collection[int], count: int) -> frozenset[int]:
    """Return the ``rows``, of ``count``, of rank 0, whatever the other ranks have. Every process calls it."""
    own = torch.zeros(count, dtype=torch.uint8)
    own[sorted(rows)] = 1
    return frozenset(group.all_gather(own)[0].nonzero().flatten().tolist())


def check_same_run(group: ProcessGroup | None, state: TrainState, scene: Scene) -> None:
    """Take the smallest cap of all processes, and check that they agree on everything else.

    Raises DistributedError, naming the ranks that differ, when programs, settings or images are not the same.
    """
    if group is None:
        return
    caps = [int(cap) for (cap,) in group.all_gather_scalars("the settings", [state.config.memory.cap or 0]) if cap]
    state.config = with_settings(state.config, {"memory.cap": min(caps, default=None)})
    settings = with_settings(state.config, {"data.scene": "", "data.points": None})
    group.check_agreement(
        "the run",
        program=_sum_of([__version__, torch.__version__]),
        settings=_sum_of(settings.model_dump(mode="json")),
        Gaussians=state.count,
        parts=1 if state.shard is None else state.shard.size,
        photos=_sum_of(scene.fingerprint()),
        cameras=_sum_of([asdict(camera) | {"viewmat": camera.viewmat.tolist()} for camera in state.cameras]),
    )


def _sum_of(facts: object) -> int:
    return crc32(json.dumps(facts, sort_keys=True).encode())


def check_same_state(group: ProcessGroup | None, state: TrainState) -> None:
    """Raise DistributedError, naming the ranks that differ, unless the states of all processes are the same.

    Only one process has the numbers of a shard: with shards, the rest of the state is compared, and the Gaussians that
    the shards were cut from.
    """
    if group is None:
        return
    digest = digests(state)[1] if state.shard is not None else state_digest(state)
    group.check_agreement("the state", step=state.step, Gaussians=state.count, origin=state.origin, digest=digest)


def state_digest(state: TrainState) -> int:
    """Return 52 bits of all parameters, moments and statistics, and of the positions in the random streams."""
    of_rows, of_rest = digests(state)
    return joint_digest([of_rows], of_rest)


def joint_digest(of_rows: Sequence[int], of_rest: int) -> int:
    """Return the state_digest() of one process with all rows, from the digests() of all shards."""
    return (sum(of_rows) + of_rest) & _DIGEST_BITS


@torch.no_grad()
def digests(state: TrainState) -> tuple[int, int]:
    """Return 52 bits each: of the rows, weighted by their indices in the whole; and of all else."""
    first, device = 0 if state.shard is None else state.shard.first, state.gaussians.device
    rows = [tensor for _, tensor in state_tensors(state.gaussians, state.adam)]
    rows += [state.adam.sh_last_step, state.stats.grad2d, state.stats.count]
    of_rows: list[int] = torch.stack([_row_sum(tensor, first).to(device) for tensor in rows]).tolist()
    rest = [int(_row_sum(tensor)) for tensor in state.per_view_params.stored().values()]
    rest += [int(_row_sum(generator.get_state())) for generator in state.generators.values()]
    rest += [state.sampler.epoch, state.sampler.position, state.comparisons, *sorted(state.sampler.skipped)]
    return _weighted(of_rows, 0), _weighted(rest, len(rows))


@torch.no_grad()
def digest_of(columns: Iterable[Tensor]) -> int:
    """Return 52 bits of all numbers of some tensors."""
    return _weighted([int(_row_sum(column)) for column in columns], 0)


def _weighted(sums: Sequence[int], place: int) -> int:
    return sum(number * (2 * (place + i) + 1) for i, number in enumerate(sums)) & _DIGEST_BITS


def _row_sum(tensor: Tensor, first: int = 0) -> Tensor:
    """Return [] int64, a digest of all bits, each row with a weight of its own; overflow wraps.

    first: the index of the first row in the whole.
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
    """The checkpointer of a rank beside rank 0: it writes nothing, and what rank 0 has saved counts for all."""

    def start(self, state: TrainState) -> Iterator[Event]:
        self._note(state)
        yield from ()

    def due(self, state: TrainState) -> bool:
        return False

    def save(self, state: TrainState) -> Saved:
        return self._note(state)

    def finish(self, state: TrainState, *, keep_trying: Callable[[], bool]) -> Iterator[Event]:
        self._note(state)
        yield from ()

    def _note(self, state: TrainState) -> Saved:
        self.saved = Saved(state.step, self.run_dir.checkpoint_path(state.step))
        return self.saved


class ReadOnlyRunDir(RunDir):
    """The run folder for ranks beside rank 0, which read in it and write nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = None
        self._undo = None
        self.moved_aside = None

    def write_config(self, config: object) -> None:
        return None

    def write_report(self, name: str, record: object) -> Path:
        return self.path / name

    def append_metrics(self, record: object, *, again: bool = False) -> None:
        return None

    def rewind(self, step: int) -> None:
        return None
