"""Sharding: a state of which each process holds some rows: cut up, shared out anew after an edit, put together.

Edits are decided by every process on all rows, of which it gets for that time what decisions look at: 52 bytes of a
Gaussian's 720. Whole rows travel only to where they belong afterwards, each process having as many as the others.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from splatcli.checkpoint.state import Checkpoint
from splatcli.gaussians import Gaussians
from splatcli.rasterizer.offload import DEVICE_STORAGE, TensorStorage
from splatcli.rasterizer.shards import Shard
from splatcli.rasterizer.step_inputs import DensifyStats
from splatcli.train.data_parallel import Crew, digest_of
from splatcli.train.densify.base import Edit, apply_edit, as_column, edited_rows
from splatcli.train.state import TrainState, check_resumable

#: What an edit looks at of all Gaussians.
LOOKED_AT = ("means", "quats", "log_scales", "logit_opacities")


def rows_of(checkpoint: Checkpoint, rows: slice | Tensor) -> Checkpoint:
    """Some rows of a checkpoint as a checkpoint; a slice shares its memory."""
    moments, steps, sizes = checkpoint.moments, checkpoint.rest_steps, checkpoint.smoothing
    return replace(
        checkpoint,
        gaussians=checkpoint.gaussians.map(lambda column: column[rows]),
        moments=None if moments is None else {name: (a[rows], b[rows]) for name, (a, b) in moments.items()},
        rest_steps=None if steps is None else steps[rows],
        strategy={k: v[rows] if isinstance(v, Tensor) else v for k, v in checkpoint.strategy.items()},
        smoothing=None if sizes is None else sizes[rows],
    )


def shard_of(
    checkpoint: Checkpoint,
    place: tuple[int, int] | None,
    device: str | torch.device,
    kept: Tensor | None = None,
    store: TensorStorage = DEVICE_STORAGE,
) -> TrainState:
    """The state that was saved, or of process ``place`` = (rank, size) its part; raises as from_checkpoint().

    kept: the rows that are left; None: all. store: where the SH rest goes.
    """
    if place is None:
        return _all_of(checkpoint, device, kept, store)
    check_resumable(checkpoint)
    shard = Shard(*place, len(checkpoint.gaussians) if kept is None else len(kept))
    rows: slice | Tensor = shard.rows if kept is None else kept[shard.rows]
    state = TrainState.from_checkpoint(rows_of(checkpoint, rows), device, store)
    state.shard = shard
    state.origin = digest_of(_columns_of(checkpoint))
    return state


def _all_of(
    checkpoint: Checkpoint, device: str | torch.device, kept: Tensor | None, store: TensorStorage
) -> TrainState:
    state = TrainState.from_checkpoint(checkpoint, device, store)
    if kept is not None:
        source = kept.to(device)
        edit = Edit(source, torch.zeros_like(source, dtype=torch.bool), clear_stats=False)
        state.gaussians, state.adam, state.stats = apply_edit(edit, state.gaussians, state.adam, state.stats)
        state.smoothing = None if state.smoothing is None else state.smoothing[source]
    return state


def _columns_of(checkpoint: Checkpoint) -> Iterator[Tensor]:
    yield from (column for _, column in checkpoint.gaussians.items())
    yield from (moment for pair in (checkpoint.moments or {}).values() for moment in pair)
    others = (checkpoint.rest_steps, checkpoint.smoothing, *checkpoint.strategy.values())
    yield from (column for column in others if isinstance(column, Tensor))


def gather_geometry(state: TrainState, crew: Crew) -> tuple[Gaussians, DensifyStats]:
    """All rows as far as an edit looks at them, on every process; colours are left out."""
    assert state.shard is not None
    columns = {name: _everywhere(crew, getattr(state.gaussians, name)) for name in LOOKED_AT}
    means = columns["means"]
    colours = {"sh0": means.new_zeros(1, 3).expand(len(means), 3), "shN": means.new_zeros(len(means), 0, 3)}
    stats = DensifyStats(_everywhere(crew, state.stats.grad2d), _everywhere(crew, state.stats.count))
    return Gaussians(**columns, **colours), stats


@torch.no_grad()
def redistribute(
    edit: Edit,
    everything: Gaussians,
    stats: DensifyStats,
    state: TrainState,
    crew: Crew,
    shares: Callable[[Gaussians], Tensor] | None = None,
) -> None:
    """Applies ``edit`` to the state of which this process holds a part; it holds as large a part afterwards.

    everything, stats: of looked_at(). shares: see apply_edit().
    """
    assert state.shard is not None
    if set(edit.values) - set(LOOKED_AT):
        raise ValueError(f"an edit of what is not looked at: {sorted(edit.values)}")
    moves = _Moves(edit, state.shard, crew)
    own = moves.after.rows
    changed = edited_rows(edit, everything, shares)
    gaussians = Gaussians(
        **{name: getattr(changed, name)[own].clone() for name in LOOKED_AT},
        sh0=moves.carry(state.gaussians.sh0),
        shN=moves.carry(state.gaussians.shN),
    )
    reset_moments = edit.reset_moments[own]
    first, second = (
        old.map(lambda column: moves.carry(column).masked_fill_(as_column(reset_moments, column), 0.0))
        for old in (state.adam.exp_avg, state.adam.exp_avg_sq)
    )
    if edit.opacity_ceiling is not None:
        first.logit_opacities.zero_()
        second.logit_opacities.zero_()
    steps = moves.carry(state.adam.rest_steps)
    state.gaussians = gaussians
    state.adam = replace(state.adam, exp_avg=first, exp_avg_sq=second, rest_steps=steps)
    state.shard = moves.after
    if edit.clear_stats:
        state.stats = DensifyStats.zeros(len(moves.after), gaussians.device)
    else:
        source = edit.source[own]
        state.stats = DensifyStats(stats.grad2d[source], stats.count[source])


class _Moves:
    """Which rows go where in an edit; every process finds the same from the edit.

    after: this process' part of the new rows.
    """

    def __init__(self, edit: Edit, before: Shard, crew: Crew) -> None:
        self._crew = crew
        self.after = after = before.of(len(edit))
        ends = torch.tensor([before.start(rank + 1) for rank in range(before.size)], device=edit.source.device)
        wanted = []
        for rank in range(after.size):
            source = edit.source[after.start(rank) : after.start(rank + 1)] - before.first
            wanted.append(source[(source >= 0) & (source < len(before))])
        #: The rows of ours that each process wants, one process after another, in the order of its new rows.
        self._wanted, self._counts = torch.cat(wanted), [len(rows) for rows in wanted]
        holder = torch.bucketize(edit.source[after.rows], ends, right=True)
        #: Where among our new rows those belong that come from one process after another.
        self._places = torch.cat([(holder == rank).nonzero().squeeze(1) for rank in range(before.size)])

    def carry(self, column: Tensor) -> Tensor:
        """The new rows [m, ...] of a column of which this process holds the old ones [n, ...]."""
        rows = column[self._wanted].reshape(len(self._wanted), math.prod(column.shape[1:]))
        arrived, _ = self._crew.exchange_rows(rows, self._counts)
        del rows
        made = column.new_empty(len(self.after), *column.shape[1:])
        made[self._places] = arrived.view_as(made)
        return made


def whole_state(state: TrainState, crew: Crew, folder: Path) -> TrainState | None:
    """The state with the rows of all processes, on the first one; None on the others. All have to ask for it.

    Column by column, each of which lies in a file of ``folder`` that has no name, so that the memory that it takes is
    the system's to give away; where the disk has no room for it, in memory.
    """

    def gathered(column: Tensor) -> Tensor | None:
        found = crew.collect(column.detach(), everywhere=False)
        return None if found is None else _on_disk(found, folder)

    def bundle(columns: Gaussians) -> list[Tensor | None]:
        return [gathered(column) for _, column in columns.items()]

    adam, stats, sizes = state.adam, state.stats, state.smoothing
    bundles = [bundle(columns) for columns in (state.gaussians, adam.exp_avg, adam.exp_avg_sq)]
    others = [gathered(column) for column in (adam.rest_steps, stats.grad2d, stats.count)]
    sizes = None if sizes is None else gathered(sizes)
    if crew.rank:
        return None
    parameters, first, second = (Gaussians(*columns) for columns in bundles)  # type: ignore[arg-type]
    steps, grad2d, count = others
    assert steps is not None
    assert grad2d is not None
    assert count is not None
    return replace(
        state,
        gaussians=parameters,
        adam=replace(adam, exp_avg=first, exp_avg_sq=second, rest_steps=steps),
        stats=DensifyStats(grad2d, count),
        smoothing=sizes,
        shard=None,
    )


def _everywhere(crew: Crew, column: Tensor) -> Tensor:
    found = crew.collect(column.detach(), everywhere=True)
    assert found is not None
    return found


def _on_disk(column: Tensor, folder: Path) -> Tensor:
    """``column`` in pages of a file that nobody else sees."""
    if column.numel() == 0:
        return column.cpu()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, column.nbytes)  # a page without a place on the disk would end us
            path = f"/proc/self/fd/{file.fileno()}"
            mapped = torch.from_file(path, shared=True, size=column.numel(), dtype=column.dtype)
    except (OSError, RuntimeError):
        return column.cpu()
    return mapped.view(column.shape).copy_(column)
