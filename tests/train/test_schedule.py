"""Learning rates and SH degrees by step."""

from __future__ import annotations

import dataclasses
import math

import pytest

from splatcli.config import OptimConfig, Schedule, build_config
from splatcli.gaussians import GROUPS
from splatcli.train.resolve import resolve_downscales
from splatcli.train.schedule import active_sh_degree, image_divisor, learning_rates, log_linear
from splatcli.train.start import first_gaussians, planned_config
from splatcli.train.state import Placement
from tests.train.worlds import made_scene, ring_cameras

OPTIM, SCHEDULE = OptimConfig(), Schedule()


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (0, 1.6e-4),
        (7_500, 1.6e-4 / math.sqrt(10)),
        (15_000, 1.6e-5),
        (22_500, 1.6e-5 / math.sqrt(10)),
        (30_000, 1.6e-6),
        (45_000, 1.6e-6),
    ],
)
def test_the_rate_of_the_means_falls_log_linearly_times_the_extent_and_then_stays(step: int, rate: float) -> None:
    assert learning_rates(OPTIM, SCHEDULE, 5.0, step)["means"] == pytest.approx(5.0 * rate, rel=1e-12)


def test_the_rates_of_the_other_groups_are_constant() -> None:
    first, last = (learning_rates(OPTIM, SCHEDULE, 5.0, step) for step in (1, 30_000))
    assert tuple(first) == GROUPS
    del first["means"], last["means"]
    assert first == last
    assert first == {"quats": 1e-3, "log_scales": 5e-3, "logit_opacities": 2.5e-2, "sh0": 2.5e-3, "shN": 1.25e-4}


def test_a_shorter_run_is_fast_first_and_slow_in_the_end() -> None:
    short = OptimConfig.scaled(3_000)
    rates = [learning_rates(short, Schedule(lr_steps=3_000), 1.0, step) for step in (1, 1_500, 3_000)]
    usual = learning_rates(OPTIM, SCHEDULE, 1.0, 1)
    for name in ("quats", "log_scales", "logit_opacities", "sh0"):
        first, middle, last = (rate[name] for rate in rates)
        assert first > 3.9 * usual[name], name
        assert last == pytest.approx(first * 10**-0.9, rel=1e-2), name
        assert middle == pytest.approx(math.sqrt(first * last), rel=1e-2), name
    (shN,) = {rate["shN"] for rate in rates}  # coefficients out of view catch up with one rate
    assert shN > 3.9 * usual["shN"]
    assert OptimConfig.scaled(30_000) == OptimConfig.scaled(60_000) == OptimConfig()
    assert OptimConfig.scaled(300) == short, "no further than a tenth of the recipe's length"


def test_sizes_of_points_that_a_short_run_makes_itself_are_twice_as_fast() -> None:
    usual, made = OptimConfig.scaled(3_000), OptimConfig.scaled(3_000, made_points=True)
    assert made.log_scales_lr == pytest.approx(2.0 * usual.log_scales_lr, rel=1e-2)
    assert made.model_copy(update={"log_scales_lr": usual.log_scales_lr}) == usual
    assert OptimConfig.scaled(30_000, made_points=True) == OptimConfig()


def test_the_end_of_the_line_is_exact() -> None:
    assert log_linear(0.3, 0.007, 1.0) == 0.007
    assert log_linear(0.3, 0.007, 1.5) == 0.007


def test_the_sh_degree_rises_every_interval_up_to_its_limit() -> None:
    degrees = [active_sh_degree(SCHEDULE, 3, step) for step in (1, 999, 1_000, 1_999, 2_000, 3_000, 4_000, 30_000)]
    assert degrees == [0, 0, 1, 1, 2, 3, 3, 3]
    assert active_sh_degree(SCHEDULE, 0, 30_000) == 0
    started = Schedule(sh_degree_start=2)
    assert [active_sh_degree(started, 3, step) for step in (1, 999, 1_000, 30_000)] == [2, 2, 3, 3]
    assert active_sh_degree(started, 1, 1) == 1


@pytest.mark.parametrize(
    ("size", "given", "halved"), [(632, None, 0), (633, None, 1), (633, 0, 0), (16, 2, 2), (16, None, 0)]
)
def test_a_run_on_large_images_begins_with_half_their_size(size: int, given: int | None, halved: int) -> None:
    scene = made_scene(size=size, pixels=[])
    scene = dataclasses.replace(scene, cameras=ring_cameras(6, size), train=[1, 2, 3], test=[0])
    config = build_config({"train.iterations": 1_000, "schedule.num_downscales": given})
    assert [image_divisor(config.schedule, step) for step in (1, 300)] == [1 << (given or 0)] * 2
    schedule = resolve_downscales(config, scene).schedule
    assert schedule.num_downscales == halved
    assert [image_divisor(schedule, step) for step in (1, 300, 301, 601, 1_000)] == [
        1 << halved,
        1 << halved,
        1 << max(0, halved - 1),
        *(1, 1),
    ]
    from_model = build_config({"model.init": "model.ply", "schedule.num_downscales": given})
    assert resolve_downscales(from_model, scene).schedule.num_downscales == (given or 0)
    gaussians, _ = first_gaussians(config, scene, None)
    assert planned_config(config, scene, gaussians, Placement(), planned=False)[0].schedule.num_downscales == halved
