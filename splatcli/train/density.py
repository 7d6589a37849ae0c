"""Density control between two steps: a strategy's edit is applied, and what it did is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from splatcli.gaussians import Gaussians
from splatcli.rasterizer.filter_3d import filter_sizes, opacity_shares
from splatcli.train.densify import Strategy, apply_edit
from splatcli.train.events import Capped, Event, OpacityReset, Refined
from splatcli.train.monitor import check_count, judge_refinement
from splatcli.train.sharding import gather_geometry, redistribute
from splatcli.train.state import TrainState

if TYPE_CHECKING:
    from splatcli.distributed.process_group import ProcessGroup

#: From this part of a cap on, growth has come to it: pruning always leaves a few places free.
FULL = 0.99


class Density:
    """Changes rows where a strategy wants it, in one process or in all that hold a part of them.

    group: the processes that train the run together, if there are several.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group
        self._capped_told = False

    def edit(self, state: TrainState, strategy: Strategy, step: int) -> list[Event]:
        """Density control after ``step``, and what it did. Raises StepDivergedError when nothing is left."""
        before, generator = state.count, state.generators["splits"]
        # A new row copies coefficients but no moments, so it could not make up for steps that its source missed.
        state.adam.flush(state.gaussians, state.config.optim.shN_lr)
        whole, stats = state.gaussians, state.stats
        if state.shard is not None:
            assert self._group is not None
            whole, stats = gather_geometry(state, self._group)
        edit = strategy.edit(step, whole, stats, generator)
        if edit is None:
            return []
        edit = edit.in_order()

        def shares(rows: Gaussians) -> Tensor:
            """[M] what the 3D filter is going to leave of the opacities of ``rows``."""
            return opacity_shares(rows, filter_sizes(rows.means, state.training_cameras()))

        left = None if state.smoothing is None else shares
        if state.shard is not None:
            assert self._group is not None
            redistribute(edit, whole, stats, state, self._group, left)
        else:
            state.gaussians, state.adam, state.stats = apply_edit(edit, whole, state.adam, stats, left)
        del whole, stats
        if state.smoothing is not None:
            self.update_filter_3d(state)
        check_count(step, state.count)
        events: list[Event] = []
        if edit.clear_stats:
            refined = Refined(step, edit.cloned, edit.split, edit.pruned, state.count, edit.relocated)
            alarm = judge_refinement(refined, before, state.config.guard)
            events += [refined] if alarm is None else [refined, alarm]
            events += self._capped(state, step)
        if edit.opacity_ceiling is not None:
            events.append(OpacityReset(step))
        return events

    def update_filter_3d(self, state: TrainState) -> None:
        """Measures the sizes of the 3D filter anew; no step may be on its way."""
        group = self._group
        if state.shard is None or group is None:
            state.update_filter_3d()
        else:
            state.update_filter_3d(group.all_reduce_max)

    def _capped(self, state: TrainState, step: int) -> list[Event]:
        cap = state.config.memory.cap
        if self._capped_told or cap is None or cap != state.config.most_gaussians() or state.count < FULL * cap:
            return []
        self._capped_told = True
        return [Capped(step, state.count, cap)]
