"""What "auto" stands for, and that it is a number in every run."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from splatcli.config import PRESETS, StrategyConfig, build_config
from splatcli.errors import UsageError
from splatcli.gaussians import Gaussians
from splatcli.rasterizer import AdamState, StepInputs
from splatcli.scene.scene import Scene
from splatcli.train.resolve import auto_cap
from splatcli.train.schedule import image_divisor
from splatcli.train.trainer import Trainer
from splatcli.train.training_images import TrainingImage
from tests.train.worlds import MemoryRun, PlainEngine, made_scene, plain_renderer, short_config


def grown(scene: Scene, views: int, width: int, height: int) -> Scene:
    camera = scene.cameras[0].resized(width, height)
    return dataclasses.replace(scene, cameras=[camera] * views, train=list(range(views)), test=[])


def test_the_cap_goes_with_pixels_and_slowly_with_views() -> None:
    scene = made_scene()
    assert auto_cap(grown(scene, 20, 1000, 800), 10) == 400_000
    assert auto_cap(grown(scene, 40, 1000, 800), 10) == 400_000
    assert auto_cap(grown(scene, 160, 1000, 800), 10) == 800_000
    assert auto_cap(grown(scene, 40, 2000, 1600), 10) == 1_600_000
    assert auto_cap(grown(scene, 40, 1000, 800), 900_000) == 900_000, "no run begins above its cap"


def test_presets_give_way_to_everything_that_is_given() -> None:
    assert set(PRESETS) == {"fast", "default", "quality", "3dgs"}
    fast = build_config(preset="fast")
    assert fast.train.iterations < 30_000
    assert fast.strategy.cap_max == "auto"
    assert fast.schedule.lr_steps == fast.train.iterations, "schedules fit the preset's length"
    own = build_config({"train.iterations": 900}, assignments=["strategy.cap_max=77"], preset="fast")
    assert (own.train.iterations, own.strategy.cap_max) == (900, 77)
    assert build_config({"strategy.cap_max": "none"}, preset="fast").strategy.cap_max is None
    with pytest.raises(UsageError, match="no preset 'best'"):
        build_config(preset="best")


def test_the_preset_of_the_original_method_has_its_settings_at_any_length() -> None:
    config = build_config(preset="3dgs")
    optim, schedule, strategy = config.optim, config.schedule, config.strategy
    assert (optim.means_lr, optim.means_lr_final, optim.means_size_power) == (1.6e-4, 1.6e-6, 0.0)
    rates = (optim.sh0_lr, optim.shN_lr, optim.logit_opacities_lr, optim.log_scales_lr, optim.quats_lr)
    assert rates == (2.5e-3, 2.5e-3 / 20, 0.025, 5e-3, 1e-3)
    assert (optim.beta1, optim.beta2, optim.eps, optim.final_factor) == (0.9, 0.999, 1e-15, 1.0)
    steps = (schedule.refine_start, schedule.refine_stop, schedule.refine_every, schedule.reset_every)
    assert steps == (500, 15_000, 100, 3_000)
    assert (schedule.sh_degree_interval, schedule.lr_steps, schedule.num_downscales) == (1_000, 30_000, 0)
    assert (strategy.name, strategy.cap_max, strategy.long_axis_split) == ("adc", None, False)
    assert (strategy.prune_opacity, strategy.grow_scale3d, strategy.prune_scale3d) == (0.005, 0.01, 0.1)
    assert (strategy.revised_opacity, strategy.prune_near, strategy.max_scale3d) == (False, 0.0, 0.0)
    train = config.train
    assert (train.iterations, train.ssim_lambda, train.background) == (30_000, 0.2, "black")
    added = (train.dropout, train.sh_views, train.sh_prior, train.alpha_lambda, train.mask_lambda, train.max_view_error)
    assert not any(added)
    assert (config.model.init_opacity, config.model.random_points, config.model.sky_points) == (0.1, 100_000, 0)
    assert (config.data.near_share, config.data.max_point_error) == (0.0, 0.0)
    short = build_config({"train.iterations": 3_000}, preset="3dgs")
    assert short.optim == optim
    assert (short.schedule.refine_stop, short.schedule.lr_steps) == (1_500, 3_000)
    mcmc = build_config({"strategy.name": "mcmc"}, preset="3dgs")
    assert (mcmc.optim.logit_opacities_lr, mcmc.strategy.cap_max, mcmc.model.init_opacity) == (0.05, 1_000_000, 0.5)


@pytest.mark.parametrize("cap", [0, -3, "many", 1.5])
def test_a_cap_is_a_number_or_auto_or_none(cap: object) -> None:
    with pytest.raises(ValueError, match="cap_max"):
        StrategyConfig.model_validate({"cap_max": cap})


def test_images_begin_coarse_and_end_whole() -> None:
    config = build_config({"schedule.num_downscales": 2, "schedule.resolution_schedule": 10})
    sizes = [image_divisor(config.schedule, step) for step in (1, 10, 11, 20, 21, 30_000)]
    assert sizes == [4, 4, 2, 2, 1, 1]
    assert image_divisor(build_config().schedule, 1) == 1


def test_a_reduced_photo_has_the_means_of_what_it_covers_and_hides_what_is_partly_hidden() -> None:
    pixels = torch.arange(4 * 6 * 3, dtype=torch.uint8).reshape(4, 6, 3)
    hidden = torch.zeros(4, 6, dtype=torch.bool)
    hidden[3, 5] = True
    half = TrainingImage(pixels, None).reduced(2)
    expected = pixels.float().reshape(2, 2, 3, 2, 3).mean(dim=(1, 3)).round().to(torch.uint8)
    assert half.masked is None
    assert torch.equal(half.pixels, expected)
    masked = TrainingImage(pixels, hidden).reduced(2)
    assert masked.masked is not None
    assert masked.masked.nonzero().tolist() == [[1, 2]]
    assert not masked.pixels[1, 2].any(), "black where hidden"
    assert torch.equal(masked.pixels[0], expected[0])


def test_a_coarse_step_is_one_on_the_reduced_photo(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, float, tuple[int, ...]]] = []

    class Looking(PlainEngine):
        def step(self, gaussians: Gaussians, adam: AdamState, inputs: StepInputs) -> float:
            camera = inputs.camera
            seen.append((camera.width, camera.height, camera.fx, tuple(inputs.target.shape)))
            return super().step(gaussians, adam, inputs)

    schedule = {"num_downscales": 1, "resolution_schedule": 2}
    config = short_config(4, schedule=schedule)
    trainer = Trainer.start(
        config,
        made_scene(size=16),
        run_dir=MemoryRun(),  # type: ignore[arg-type]
        engine=Looking(),
        renderer=plain_renderer,
    )
    list(trainer.run())
    fx = made_scene(size=16).cameras[0].fx
    assert seen[0] == (8, 8, fx / 2, (8, 8, 3))
    assert seen[-1] == (16, 16, fx, (16, 16, 3))
    assert [size[0] for size in seen] == [8, 8, 16, 16]
