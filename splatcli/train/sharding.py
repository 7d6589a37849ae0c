"""Sharding: a state of which each process holds some rows: cut, redistributed after a refinement, gathered to be saved.

Every process decides a refinement, on all rows. For that it gathers the columns that the decision reads: 52 bytes of a
Gaussian's 720. Whole rows move only to the process that holds them afterwards; all processes hold equally many, in
whole chunks of abi.CHUNK rows where poses are optimised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from splatcli.checkpoint.state import Checkpoint
from splatcli.errors import ResourceError
from splatcli.gaussians import Gaussians
from splatcli.rasterizer.offload import MemoryMapped
from splatcli.rasterizer.step_inputs import DensifyStats, Shard
from splatcli.train.data_parallel import digest_of
from splatcli.train.densify.base import Refinement, apply_refinement, as_column, refined_rows
from splatcli.train.state import Placement, TrainState, check_resumable, log_size_of

if TYPE_CHECKING:
    from splatcli.distributed.process_group import ProcessGroup

#: The columns that a refinement reads of all Gaussians.
GEOMETRY = ("means", "quats", "log_scales", "logit_opacities")


def shard_group(state: TrainState, group: ProcessGroup | None) -> ProcessGroup | None:
    """Return the processes of a run where each holds a shard of its Gaussians; None where each holds all."""
    return None if state.shard is None else group


def shard_of(checkpoint: Checkpoint, placement: Placement, kept: Tensor | None = None) -> TrainState:
    """Return the state that was saved, or the shard of this process; raises as from_checkpoint().

    kept: the rows that are left; None: all.
    """
    shard = placement.shard(len(checkpoint.gaussians) if kept is None else len(kept))
    if shard is None:
        return _all_of(checkpoint, placement, kept)
    check_resumable(checkpoint)
    rows: slice | Tensor = shard.rows if kept is None else kept[shard.rows]
    state = TrainState.from_checkpoint(checkpoint.select_rows(rows), placement)
    state.shard = shard
    state.adam.log_size = log_size_of(checkpoint)  # of all rows, where none is stored
    state.origin = digest_of(_columns_of(checkpoint))
    return state


def _all_of(checkpoint: Checkpoint, placement: Placement, kept: Tensor | None) -> TrainState:
    state = TrainState.from_checkpoint(checkpoint, placement)
    if kept is not None:
        source = kept.to(placement.device)
        refinement = Refinement(source, torch.zeros_like(source, dtype=torch.bool), clear_stats=False)
        state.gaussians, state.adam, state.stats = apply_refinement(
            refinement, state.gaussians, state.adam, state.stats
        )
        state.columns = state.columns.map(lambda column: column[source])
    return state


def _columns_of(checkpoint: Checkpoint) -> Iterator[Tensor]:
    yield from (column for _, column in checkpoint.gaussians.items())
    yield from (moment for pair in (checkpoint.moments or {}).values() for moment in pair)
    others = (checkpoint.sh_last_step, *checkpoint.columns.present().values(), *checkpoint.strategy.values())
    yield from (column for column in others if isinstance(column, Tensor))


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """All rows of a run, for a refinement to read; colours may be left out."""

    gaussians: Gaussians
    stats: DensifyStats


def gather_geometry(state: TrainState, group: ProcessGroup) -> Gathered:
    """Return the columns of all processes that a refinement reads, on every process."""
    assert state.shard is not None
    columns = {name: group.all_gather_rows(getattr(state.gaussians, name).detach()) for name in GEOMETRY}
    means = columns["means"]
    colours = {"sh0": means.new_zeros(1, 3).expand(len(means), 3), "shN": means.new_zeros(len(means), 0, 3)}
    stats = DensifyStats(group.all_gather_rows(state.stats.grad2d), group.all_gather_rows(state.stats.count))
    return Gathered(Gaussians(**columns, **colours), stats)


@torch.no_grad()
def redistribute(
    state: TrainState,
    group: ProcessGroup,
    refinement: Refinement,
    gathered: Gathered,
    shares: Callable[[Gaussians], Tensor] | None,
) -> None:
    """Apply ``refinement`` to the state of which this process holds a shard; the new shards are of equal size again.

    gathered: what the refinement was made of. shares: see apply_refinement().
    """
    assert state.shard is not None
    if set(refinement.values) - set(GEOMETRY):
        raise ValueError(f"a refinement sets columns that are not gathered: {sorted(refinement.values)}")
    moves = _Moves(refinement, state.shard, group)
    own = moves.after.rows
    changed, stats = refined_rows(refinement, gathered.gaussians, shares), gathered.stats
    gaussians = Gaussians(
        **{name: getattr(changed, name)[own].clone() for name in GEOMETRY},
        sh0=moves.carry(state.gaussians.sh0),
        shN=moves.carry(state.gaussians.shN),
    )
    reset_moments = refinement.reset_moments[own]
    first, second = (
        old.map(lambda column: moves.carry(column).masked_fill_(as_column(reset_moments, column), 0.0))
        for old in (state.adam.exp_avg, state.adam.exp_avg_sq)
    )
    if refinement.opacity_ceiling is not None:
        first.logit_opacities.zero_()
        second.logit_opacities.zero_()
    steps = moves.carry(state.adam.sh_last_step)
    state.gaussians = gaussians
    state.adam = replace(state.adam, exp_avg=first, exp_avg_sq=second, sh_last_step=steps)
    state.shard = moves.after
    if refinement.clear_stats:
        state.stats = DensifyStats.zeros(len(moves.after), gaussians.device)
    else:
        source = refinement.source[own]
        state.stats = DensifyStats(stats.grad2d[source], stats.count[source])


class _Moves:
    """Which rows move where in a refinement.

    after: this process' shard of the new rows.
    """

    def __init__(self, refinement: Refinement, before: Shard, group: ProcessGroup) -> None:
        self._group = group
        self.after = after = before.of(len(refinement))
        ends = torch.tensor([before.start(rank + 1) for rank in range(before.size)], device=refinement.source.device)
        wanted = []
        for rank in range(after.size):
            source = refinement.source[after.start(rank) : after.start(rank + 1)] - before.first
            wanted.append(source[(source >= 0) & (source < len(before))])
        #: The rows of this process that each process needs, one process after another, in the order of its new rows.
        self._wanted, self._counts = torch.cat(wanted), [len(rows) for rows in wanted]
        holder = torch.bucketize(refinement.source[after.rows], ends, right=True)
        #: The indices, among this process' new rows, of those that come from one process after another.
        self._places = torch.cat([(holder == rank).nonzero().squeeze(1) for rank in range(before.size)])

    def carry(self, column: Tensor) -> Tensor:
        """Return the new rows [m, ...] of a column of which this process holds the old ones [n, ...]."""
        rows = column[self._wanted].reshape(len(self._wanted), math.prod(column.shape[1:]))
        arrived, _ = self._group.all_to_all_rows(rows, self._counts)
        del rows
        made = column.new_empty(len(self.after), *column.shape[1:])
        made[self._places] = arrived.view_as(made)
        return made


def gather_state(state: TrainState, group: ProcessGroup, folder: Path) -> TrainState | None:
    """Return the state with the rows of all processes on rank 0, and None on the others; every process must call it.

    Each column lies in an unnamed file of ``folder``, whose pages the system may write out; in memory where the disk
    has no room.
    """

    def gathered(column: Tensor) -> Tensor | None:
        found = group.gather_rows(column.detach())
        return None if found is None else _on_disk(found, folder)

    def bundle(columns: Gaussians) -> list[Tensor | None]:
        return [gathered(column) for _, column in columns.items()]

    adam, stats = state.adam, state.stats
    bundles = [bundle(columns) for columns in (state.gaussians, adam.exp_avg, adam.exp_avg_sq)]
    others = [gathered(column) for column in (adam.sh_last_step, stats.grad2d, stats.count)]
    columns = state.columns.map(gathered)
    if group.rank:
        return None
    parameters, first, second = (Gaussians(*columns) for columns in bundles)  # type: ignore[arg-type]
    steps, grad2d, count = others
    assert steps is not None
    assert grad2d is not None
    assert count is not None
    return replace(
        state,
        gaussians=parameters,
        adam=replace(adam, exp_avg=first, exp_avg_sq=second, sh_last_step=steps),
        stats=DensifyStats(grad2d, count),
        columns=columns,
        shard=None,
    )


def _on_disk(column: Tensor, folder: Path) -> Tensor:
    """Return ``column`` in the pages of an unnamed file, in memory where the disk has no room."""
    try:
        return MemoryMapped(folder).copy(column, "cpu")
    except ResourceError:
        return column.cpu()
