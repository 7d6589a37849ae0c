"""Batches: steps on several training views, the next ones in the sampler's order."""

from __future__ import annotations

from splatcli.rasterizer.batch import BatchEngine, batch_engine_for
from splatcli.rasterizer.intersection_budget import MemoryBudget
from splatcli.rasterizer.sharded import ShardedEngine, sharded_engine_for
from splatcli.rasterizer.step_inputs import StepInputs
from splatcli.rasterizer.train_step import apply_view_grads
from splatcli.scene.camera import Camera
from splatcli.scene.images import AHEAD
from splatcli.scene.scene import Scene
from splatcli.train.data_parallel import Crew
from splatcli.train.densify import Strategy
from splatcli.train.inputs import given_camera, step_inputs, training_background, view_of_step
from splatcli.train.sampler import ViewSampler
from splatcli.train.state import TrainState
from splatcli.train.targets import Targets


class Batches:
    """Makes steps on ``views`` views; in a team each process reads and draws its own share of them only.

    pairs: (Gaussian, tile) pairs of the fullest view of the last step.
    """

    def __init__(self, engine: BatchEngine | ShardedEngine, views: int) -> None:
        self.engine = engine
        self.views = views
        self.pairs = 0

    def step(
        self, state: TrainState, scene: Scene, targets: Targets, strategy: Strategy, step: int
    ) -> tuple[list[int], list[float]]:
        """Step number ``step``: (rows of the views among the training views, their losses).

        Raises SceneError when a photo is damaged; then the state is the one before the step.
        """
        sampler, background = state.sampler.state(), state.generators["background"].get_state()
        rows = [state.sampler.next() for _ in range(self.views)]
        colours = [training_background(state) for _ in rows]  # all of them, so that every process draws the same
        self._prefetch(state, targets)

        def inputs_of(i: int) -> StepInputs:
            given, target = view_of_step(state, targets, step, rows[i])
            return step_inputs(state, strategy, step, rows[i], given, target, colours[i])

        try:
            if isinstance(self.engine, ShardedEngine):
                cameras = [self._camera(state, scene, step, row) for row in rows]
                outcome = self.engine.step(state.gaussians, state.adam, cameras, inputs_of)
            else:
                outcome = self.engine.step(state.gaussians, state.adam, self.views, inputs_of)
        except Exception:
            state.sampler = ViewSampler(state.sampler.num_views, state.sampler.seed, **sampler)
            state.generators["background"].set_state(background)
            raise
        self.pairs = outcome.pairs
        for row, slopes in zip(rows, outcome.slopes or [], strict=False):
            given = given_camera(state, scene, step, row)
            extent, device = state.dataset.extent, state.gaussians.device
            apply_view_grads(state.per_view_params.of(row, given, state.config, extent, step, device), slopes)
        return rows, outcome.losses

    @staticmethod
    def _camera(state: TrainState, scene: Scene, step: int, row: int) -> Camera:
        """That of a training view in this step, as whoever has its photo sees it."""
        return state.per_view_params.camera(row, given_camera(state, scene, step, row))

    def _prefetch(self, state: TrainState, targets: Targets) -> None:
        """Starts decoding what this process is going to draw soon."""
        team = self.engine.team
        rank, size = (0, 1) if team is None else (team.rank, team.size)
        targets.prefetch(state.train[i] for i in state.sampler.upcoming(AHEAD * size)[rank::size])


def batches_for(state: TrainState, budget: MemoryBudget, crew: Crew | None) -> Batches | None:
    """What makes steps on several views; None where a step has one, and is fused. Raises as the engines do."""
    views, device = state.config.train.batch_size, state.gaussians.device
    if views == 1 and (crew is None or crew.size == 1):
        return None
    if state.shard is not None and crew is not None:
        return Batches(sharded_engine_for(device, crew, budget), views)
    return Batches(batch_engine_for(device, budget, crew), views)
