"""Refinement of an edited model: training steps against the images of its run at a fixed number of Gaussians.

No Gaussian is added or removed and no opacity is reset, all SH degrees are active from the first step, and poses and
colours of views stay as the run trained them. Nothing is written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from splatcli.checkpoint.state import Checkpoint
from splatcli.config import Config, OptimConfig, Schedule, with_settings
from splatcli.edit.operations import AlignTo, Keep, Level, Move, Operation
from splatcli.errors import UsageError
from splatcli.gaussians import Gaussians
from splatcli.progress import track
from splatcli.rasterizer.memory_budget import MemoryBudget
from splatcli.rasterizer.step_inputs import DensifyStats, Regularisation, ViewParams
from splatcli.scene.camera import Camera
from splatcli.scene.scene import Scene
from splatcli.train.backgrounds import training_image_background
from splatcli.train.densify.base import Refinement
from splatcli.train.monitor import FiniteMonitor
from splatcli.train.per_view_params import PerViewParams, ViewRates
from splatcli.train.run_scene import run_scene
from splatcli.train.start import first_gaussians, new_state
from splatcli.train.state import Placement
from splatcli.train.step import Stepper
from splatcli.train.training_images import TrainingImages

#: Operations after which photos show what the model lacks, by the start of their labels: training would make it anew
#: from Gaussians beside it.
_CUTS = ("--crop", "--filter x", "--filter y", "--filter z")


def check_refinable(operations: Sequence[Operation]) -> None:
    """Raise UsageError for an operation after which the model no longer fits the photos."""
    for one in operations:
        if isinstance(one, Move | Level | AlignTo):
            what = "moves the model away from the photos"
        elif isinstance(one, Keep) and " ".join(one.label.split()).startswith(_CUTS):
            what = "removes what the photos show"
        else:
            continue
        raise UsageError(
            f"it {what}, and --refine trains on them afterwards",
            where=one.label,
            remedy="two commands: --refine into a file first, then edit that file",
        )


def scene_of(checkpoint: Checkpoint, data: Path | None) -> Scene:
    """Return the scene of a run with the images of its training views, and the cameras that the run stored.

    data, and what it raises: as of run_scene().
    """
    scene = run_scene(checkpoint, data, training_image_background(checkpoint.config))
    return dataclasses.replace(scene, cameras=list(checkpoint.cameras))


def refine(gaussians: Gaussians, checkpoint: Checkpoint, scene: Scene, steps: int, device: str) -> Gaussians:
    """Return the Gaussians, on the CPU, after ``steps`` steps on the training views, one view a step.

    gaussians: on the CPU, finite, in the coordinates of the checkpoint. scene: of scene_of().
    Raises StepDivergedError where a number becomes infinite or NaN, SceneError for a damaged image.
    """
    config = _settings(checkpoint.config, gaussians.sh_degree, steps)
    placement = Placement(torch.device(device))
    state, _ = new_state(config, scene, first_gaussians(config, scene, gaussians), placement)
    state.per_view_params = _FixedViews.from_checkpoint(checkpoint)
    images = TrainingImages(scene, state.gaussians.device, depth_lambda=config.depth_lambda)
    stepper = Stepper(state, images, MemoryBudget(state.gaussians.device, config.memory.budget))
    strategy, monitor = FixedCount(), FiniteMonitor()
    for step in track(range(1, steps + 1), "refining"):
        stepper.step(state, strategy, step)
        state.step = step
    stepper.drain(state)
    monitor.check(state.step, state.gaussians, state.adam)
    monitor.finish()
    state.estimate_view_dependence()
    return state.gaussians_to_render().map(torch.Tensor.detach).to("cpu")


def _settings(config: Config, sh_degree: int, steps: int) -> Config:
    """Return the settings of a run with those of its refinement.

    Learning rates are those of a run of that length (OptimConfig.scaled): after --simplify they gain more than lower
    ones do (docs/edit.md).
    """
    values = {
        "data.depths": None,
        "model.init": "the edited model",
        "model.sh_degree": sh_degree,
        "strategy.cap_max": None,
        "memory.cap": None,
        "memory.offload": False,
        "train.batch_size": 1,
        "train.filter_3d": False,
    }
    config = with_settings(config, values)
    schedule = Schedule(sh_degree_start=sh_degree, num_downscales=0, lr_steps=steps)
    return config.model_copy(update={"optim": OptimConfig.scaled(steps), "schedule": schedule})


class _FixedViews(PerViewParams):
    """Parameters of views that stay as they are."""

    def of(self, row: int, camera: Camera, rates: ViewRates, device: torch.device) -> ViewParams | None:
        found = super().of(row, camera, rates, device)
        if found is None or found.colours is None:
            return None
        return ViewParams(lambda v_viewmat, v_colours: None, colours=found.colours)


class FixedCount:
    """The strategy that adds and removes nothing."""

    absgrad = False

    def collects_stats(self, step: int) -> bool:
        return False

    def regularisation(self, step: int, means_lr: float) -> Regularisation:
        return Regularisation()

    def refines_at(self, step: int) -> bool:
        return False

    def refine(
        self, step: int, gaussians: Gaussians, stats: DensifyStats, generator: torch.Generator
    ) -> Refinement | None:
        return None
