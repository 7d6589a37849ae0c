"""What an engine is asked in a step: the photo of a view, and all that the step number says."""

from __future__ import annotations

import torch
from torch import Tensor

from splatcli.rasterizer.step_inputs import StepInputs
from splatcli.scene.camera import Camera
from splatcli.scene.scene import Scene
from splatcli.train.densify import Strategy
from splatcli.train.lr import active_sh_degree, image_divisor, learning_rates
from splatcli.train.scoring import BACKGROUNDS
from splatcli.train.state import TrainState
from splatcli.train.targets import Target, Targets, to_device


def view_of_step(state: TrainState, targets: Targets, step: int, row: int) -> tuple[Camera, Target]:
    """Camera and photo of training view ``row``, as large as step number ``step`` has them.

    Raises SceneError when the photo is damaged.
    """
    return targets.reduced(state.train[row], image_divisor(state.config.schedule, step))


def given_camera(state: TrainState, scene: Scene, step: int, row: int) -> Camera:
    """The scene's camera of training view ``row``, as large as step number ``step`` has it."""
    given, divisor = scene.cameras[state.train[row]], image_divisor(state.config.schedule, step)
    return given if divisor == 1 else given.resized(max(1, given.width // divisor), max(1, given.height // divisor))


def step_inputs(
    state: TrainState, strategy: Strategy, step: int, row: int, given: Camera, target: Target, background: Tensor
) -> StepInputs:
    """What step number ``step`` asks of training view ``row``; background [3] on the Gaussians' device."""
    config = state.config
    lrs = learning_rates(config.optim, config.schedule, state.dataset.extent, step)
    return StepInputs(
        state.per_view_params.camera(row, given),
        target.over(background),
        lrs=lrs,
        sh_degree=active_sh_degree(config.schedule, state.gaussians.sh_degree, step),
        background=background,
        ssim_lambda=config.train.ssim_lambda,
        antialiased=config.train.antialiased,
        stats=state.stats if strategy.collects_stats(step) else None,
        hidden=target.hidden,
        regularisation=strategy.regularisation(step, lrs["means"]),
        absgrad=strategy.absgrad,
        view_params=state.per_view_params.of(row, given, config, state.dataset.extent, step, state.gaussians.device),
        depth=target.depth,
        smoothing=state.smoothing,
        shard=state.shard,
    )


def training_background(state: TrainState) -> Tensor:
    """[3] what stands behind the Gaussians of a view, on their device; a random one is drawn."""
    name = state.config.train.background
    if name == "random":
        color = torch.rand(3, generator=state.generators["background"])
    else:
        color = torch.tensor(BACKGROUNDS[name])
    return to_device(color, state.gaussians.device)
