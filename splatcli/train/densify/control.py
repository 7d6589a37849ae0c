"""DensityControl: apply a strategy's refinement between two steps, and report it as events."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splatcli.gaussians import Gaussians
from splatcli.rasterizer.adam import sum_of_log_sizes
from splatcli.rasterizer.filter_3d import filter_sizes, opacity_shares
from splatcli.reproducible import log
from splatcli.train.densify import Refinement, Strategy, apply_refinement, refinement_of
from splatcli.train.densify.contribution import BlendWeights, largest_weights
from splatcli.train.densify.free_space import FreeSpace
from splatcli.train.events import Capped, Event, OpacityReset, Refined
from splatcli.train.monitor import check_count, check_refinement
from splatcli.train.sharding import Gathered, gather_geometry, redistribute, shard_group
from splatcli.train.state import TrainState

if TYPE_CHECKING:
    from splatcli.distributed.process_group import ProcessGroup


#: A count above this part of the cap has reached it: pruning always leaves a few rows free.
FULL = 0.99


class DensityControl:
    """Refines the Gaussians of a state, in one process or in all that hold shards of them.

    group: the processes that train the run together, if there are several.

    Whatever the strategy, no new row lies in the space around the training cameras (``strategy.prune_near``), and
    scales have a limit (``strategy.max_scale3d``).
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group
        self._capped_reported = False
        self._free_space: FreeSpace | None = None
        self._free_space_known = False
        self._camera_centroid: NDArray[np.float64] | None = None

    def refine(self, state: TrainState, strategy: Strategy, step: int) -> list[Event]:
        """Refine ``state`` after ``step`` and return the events. Raises StepDivergedError when no Gaussian is left."""
        before = state.count
        # A new row copies coefficients but no moments, so it could not catch up on steps that its source missed.
        state.adam.flush(state.gaussians, state.config.optim.shN_lr)
        refinement = self._apply(state, strategy, step)
        if refinement is None:
            return []
        self._update_log_size(state)
        if state.columns.filter_3d is not None:
            self.update_filter_3d(state)
        check_count(step, state.count)
        events: list[Event] = []
        if refinement.clear_stats:
            counts = (refinement.cloned, refinement.split, refinement.pruned, state.count, refinement.relocated)
            refined = Refined(step, *counts)
            alarm = check_refinement(refined, before, state.config.guard)
            events += [refined] if alarm is None else [refined, alarm]
            events += self._report_cap(state, step)
        if refinement.opacity_ceiling is not None:
            events.append(OpacityReset(step))
        return events

    def _apply(self, state: TrainState, strategy: Strategy, step: int) -> Refinement | None:
        """Apply the strategy's refinement after ``step`` and return it; None where it changes nothing."""
        group = shard_group(state, self._group)
        gathered = Gathered(state.gaussians, state.stats) if group is None else gather_geometry(state, group)
        uses_weights = getattr(strategy, "uses_weights", None)  # which a strategy need not have
        if uses_weights is not None and uses_weights(step):
            gathered = self._with_weights(state, gathered, step)
        gaussians, stats = gathered.gaussians, gathered.stats
        refinement = refinement_of(strategy, step, gaussians, stats, state.generators["splits"])
        if refinement is None:
            return None
        if refinement.clear_stats:
            refinement = self._without_free_space(refinement, gaussians, state)
        refinement = refinement.sorted_by_source()

        def filter_shares(rows: Gaussians) -> Tensor:
            """Return [M], the part of the opacities of ``rows`` that the 3D filter leaves."""
            return opacity_shares(rows, filter_sizes(rows.means, state.training_cameras()))

        shares = None if state.columns.filter_3d is None else filter_shares
        if group is not None:
            redistribute(state, group, refinement, gathered, shares)
        else:
            state.gaussians, state.adam, state.stats = apply_refinement(
                refinement, gaussians, state.adam, stats, shares
            )
        return refinement

    @torch.no_grad()
    def limit_scales(self, state: TrainState) -> None:
        """Reduce the scales of ``state`` to ``strategy.max_scale3d`` where they are larger; no step may be pending.

        Adam lets scales grow where few views see them, and a sheet of many times the scene's size veils the views from
        which it is not seen edge-on (docs/quality.md). Moments stay.
        """
        share, extent = state.config.strategy.max_scale3d, state.dataset.extent
        if share == 0.0 or not extent > 0.0:
            return
        if self._camera_centroid is None:
            self._camera_centroid = np.stack([state.cameras[view].center for view in state.train]).mean(axis=0)
        log_scales = state.gaussians.log_scales
        rows = (log_scales.amax(dim=1) > math.log(share * extent)).nonzero().squeeze(1)
        if not len(rows):
            return
        x, y, z = (
            state.gaussians.means[rows].double() - torch.tensor(self._camera_centroid, device=rows.device)
        ).unbind(dim=1)
        distance = (x * x + y * y + z * z).sqrt().clamp(min=extent)
        limit = (log(distance) + math.log(share)).to(log_scales.dtype)
        log_scales[rows] = torch.minimum(log_scales[rows], limit[:, None])

    def update_filter_3d(self, state: TrainState) -> None:
        """Compute the sizes of the 3D filter anew; no step may be pending."""
        group = shard_group(state, self._group)
        state.update_filter_3d(float if group is None else group.all_reduce_max)

    def _with_weights(self, state: TrainState, gathered: Gathered, step: int) -> Gathered:
        """Return all rows of a run with their blend weights in some views among the statistics."""
        group, sizes = shard_group(state, self._group), state.columns.filter_3d
        if sizes is not None and group is not None:
            sizes = group.all_gather_rows(sizes)
        train, cameras = state.config.train, state.training_cameras()
        weights = BlendWeights(gathered.gaussians, cameras, train.antialiased, sizes, self._group)
        largest = largest_weights(weights, step // state.config.schedule.refine_every)
        return replace(gathered, stats=replace(gathered.stats, weights=largest))

    def _without_free_space(self, refinement: Refinement, gaussians: Gaussians, state: TrainState) -> Refinement:
        """Return ``refinement`` of ``gaussians`` without the rows that lie in the free space around the cameras."""
        if not self._free_space_known:
            centers = np.stack([state.cameras[view].center for view in state.train])
            distances, share = state.dataset.clearances, state.config.strategy.prune_near
            self._free_space = FreeSpace.of(centers, distances, share, gaussians.device)
            self._free_space_known = True
        if self._free_space is None:
            return refinement
        means = refinement.values.get("means")
        return refinement.without(
            self._free_space.contains(gaussians.means[refinement.source] if means is None else means)
        )

    def _update_log_size(self, state: TrainState) -> None:
        """Update the mean logarithm of the sizes, which learning rates of means are relative to."""
        if state.adam.size_power == 0.0:
            return
        total, group = sum_of_log_sizes(state.gaussians.log_scales), shard_group(state, self._group)
        if group is not None:
            total = math.fsum(part for (part,) in group.all_gather_scalars("sizes of the Gaussians", [total]))
        state.adam.log_size = total / max(1, state.count)

    def _report_cap(self, state: TrainState, step: int) -> list[Event]:
        cap = state.config.memory.cap
        if self._capped_reported or cap is None or cap != state.config.max_gaussians() or state.count < FULL * cap:
            return []
        self._capped_reported = True
        return [Capped(step, state.count, cap)]
