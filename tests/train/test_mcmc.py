"""Relocation: what copies must be to look like one, what moves where, and how the count grows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from splatcli.config import Config, Schedule, StrategyConfig, TrainConfig, build_config
from splatcli.gaussians import Gaussians
from splatcli.rasterizer.step_inputs import DensifyStats, Regularisation
from splatcli.train.densify import McmcStrategy, Refinement, apply_refinement, make_strategy
from splatcli.train.densify.mcmc import MAX_COPIES, compute_relocation, sample_rows
from splatcli.train.events import Refined
from splatcli.train.trainer import Trainer
from tests.train.worlds import (
    MemoryRun,
    PlainEngine,
    made_scene,
    plain_renderer,
    random_adam,
    random_gaussians,
    short_config,
)

SCHEDULE = Schedule(refine_start=500, refine_stop=25_000, refine_every=100)
F64 = torch.float64


def strategy(iterations: int = 30_000, **config: Any) -> McmcStrategy:
    settings = StrategyConfig.model_validate({"name": "mcmc", **config})
    train = TrainConfig(iterations=iterations, seed=5)
    return McmcStrategy(Config(strategy=settings, schedule=SCHEDULE, train=train), 1.0)


def world(*opacities: float) -> Gaussians:
    gaussians = random_gaussians(len(opacities))
    gaussians.logit_opacities = torch.logit(torch.tensor(opacities))
    return gaussians


def refine(gaussians: Gaussians, seed: int = 0, **config: Any) -> Refinement | None:
    stats = DensifyStats.zeros(len(gaussians))
    return strategy(**config).refine(600, gaussians, stats, torch.Generator().manual_seed(seed))


# ---- what copies are -------------------------------------------------------------------------------------------------


def profile(opacity: float, scale: float, copies: int, at: Tensor) -> Tensor:
    """What ``copies`` equal Gaussians along a line of sight hide, at distances ``at`` from their centre."""
    return 1.0 - (1.0 - opacity * torch.exp(-0.5 * (at / scale) ** 2)) ** copies


@pytest.mark.parametrize("copies", [1, 2, 3, 10, MAX_COPIES])
@pytest.mark.parametrize("opacity", [0.01, 0.3, 0.9, 0.999])
def test_copies_hide_as_much_as_the_one_they_replace(opacity: float, copies: int) -> None:
    """In the centre exactly; and in sum over a line through it, which is what the paper's equation asks for."""
    logit = torch.logit(torch.tensor([opacity], dtype=F64))
    logits, shrink = compute_relocation(logit, torch.tensor([copies]))
    each, scale = float(logits.sigmoid()), float(shrink.exp())
    assert 1.0 - (1.0 - each) ** copies == pytest.approx(opacity, rel=1e-9)
    at = torch.linspace(-12.0, 12.0, 200_001, dtype=F64)
    assert_close(profile(each, scale, copies, at).sum(), profile(opacity, 1.0, 1, at).sum(), rtol=1e-6, atol=0)
    assert scale <= 1.0 + 1e-12


def test_one_of_one_stays() -> None:
    logits = torch.tensor([-6.0, 0.0, 3.0])
    same, shrink = compute_relocation(logits, torch.ones(3, dtype=torch.int64))
    assert_close(same, logits, rtol=1e-5, atol=1e-6)
    assert_close(shrink, torch.zeros(3), rtol=0, atol=1e-6)


@pytest.mark.parametrize("logit", [15.0, 20.0, 60.0, math.inf])
def test_fully_opaque_gaussians_can_be_shared(logit: float) -> None:
    logits, shrink = compute_relocation(torch.tensor([logit]), torch.tensor([MAX_COPIES]))
    assert bool(logits.isfinite().all())
    assert bool(shrink.isfinite().all())


# ---- who is drawn ----------------------------------------------------------------------------------------------------


def test_rows_are_drawn_in_proportion() -> None:
    weights = torch.tensor([0.1, 0.0, 0.4, math.nan, 0.5])
    drawn = sample_rows(weights, 100_000, torch.Generator().manual_seed(1))
    share = torch.bincount(drawn, minlength=5) / 100_000
    assert_close(share, torch.tensor([0.1, 0.0, 0.4, 0.0, 0.5]), rtol=0, atol=0.01)


def test_nothing_is_drawn_of_nothing() -> None:
    for weights, count in ((torch.zeros(4), 3), (torch.empty(0), 3), (torch.ones(4), 0)):
        assert len(sample_rows(weights, count, torch.Generator())) == 0


def test_more_rows_than_multinomial_takes_can_be_drawn_from() -> None:
    """torch.multinomial ends at 2^24 categories."""
    weights = torch.zeros(2**24 + 9)
    weights[-1] = 1e-6
    weights[2**24 + 1] = 1e-6
    drawn = sample_rows(weights, 64, torch.Generator().manual_seed(0))
    assert set(drawn.tolist()) == {2**24 + 1, 2**24 + 8}


# ---- what a refinement does -----------------------------------------------------------------------------------------


def test_the_dead_move_onto_the_living() -> None:
    gaussians = world(0.9, 0.004, 0.5, 0.001)
    refinement = refine(gaussians, cap_max=4)
    assert refinement is not None
    assert (refinement.relocated, refinement.cloned, refinement.split, refinement.pruned) == (2, 0, 0, 0)
    source = refinement.source.tolist()
    assert source[0] == 0
    assert source[2] == 2
    assert {source[1], source[3]} <= {0, 2}
    adam = random_adam(gaussians)
    rows, moments, stats = apply_refinement(refinement, gaussians, adam, DensifyStats.zeros(4))
    for place in (1, 3):
        assert torch.equal(rows.means[place], gaussians.means[source[place]])
        assert torch.equal(rows.log_scales[place], rows.log_scales[source[place]]), "all of a place are alike"
        assert torch.equal(rows.logit_opacities[place], rows.logit_opacities[source[place]])
        assert not moments.exp_avg.means[place].any()
        assert not moments.exp_avg.means[source[place]].any(), "who shared begins anew"
        assert rows.logit_opacities[place] < gaussians.logit_opacities[source[place]]
    untouched = ({0, 2} - {source[1], source[3]}) or set()
    for row in untouched:
        assert torch.equal(rows.log_scales[row], gaussians.log_scales[row])
        assert torch.equal(moments.exp_avg.means[row], adam.exp_avg.means[row])
    assert len(stats) == 4


def test_a_gaussian_without_a_number_for_opacity_is_dead_and_nobody_s_model() -> None:
    gaussians = world(0.9, 0.5, 0.7)
    gaussians.logit_opacities[1] = math.nan
    refinement = refine(gaussians, cap_max=3)
    assert refinement is not None
    assert refinement.relocated == 1
    assert refinement.source[1] in (0, 2)
    assert bool(refinement.values["logit_opacities"].isfinite().all())


def test_with_a_threshold_of_zero_nobody_but_a_gaussian_without_a_number_is_dead() -> None:
    gaussians = world(0.9, 1e-6, 0.7)
    assert refine(gaussians, cap_max=3, prune_opacity=0.0) is None
    gaussians.logit_opacities[0] = math.nan
    refinement = refine(gaussians, cap_max=3, prune_opacity=0.0)
    assert refinement is not None
    assert refinement.relocated == 1


def test_when_all_are_dead_nobody_moves() -> None:
    gaussians = world(0.001, 0.002, 0.003)
    refinement = refine(gaussians, cap_max=3)
    assert refinement is None


@pytest.mark.parametrize(
    ("count", "cap", "expected"), [(100, None, 105), (100, 103, 103), (100, 100, 100), (100, 60, 100), (10, None, 10)]
)
def test_the_count_grows_by_a_factor_to_the_cap(count: int, cap: int | None, expected: int) -> None:
    refinement = refine(world(*[0.5] * count), cap_max=cap)
    assert (count if refinement is None else len(refinement)) == expected


def test_refinements_follow_the_schedule_and_the_last_step_is_left_alone() -> None:
    steps = [step for step in range(1, 30_001) if strategy().refines_at(step)]
    assert steps == list(range(600, 25_000, 100))
    assert not strategy(iterations=700).refines_at(700)
    assert not strategy().collects_stats(600), "no statistics are needed"


def test_the_same_generator_gives_the_same_edit() -> None:
    gaussians = random_gaussians(300)
    first, again, other = (refine(gaussians, seed) for seed in (1, 1, 2))
    assert first is not None
    assert again is not None
    assert other is not None
    assert torch.equal(first.source, again.source)
    assert not torch.equal(first.source, other.source)


# ---- in a run --------------------------------------------------------------------------------------------------------


def test_the_recipe_comes_with_the_name_and_gives_way_to_what_is_said() -> None:
    config = build_config({"strategy.name": "mcmc", "strategy.cap_max": 77, "train.iterations": 3_000})
    assert (config.model.init_opacity, config.model.init_scale) == (0.5, 0.1)
    assert (config.strategy.opacity_reg, config.strategy.scale_reg, config.strategy.cap_max) == (0.01, 0.01, 77)
    assert config.schedule.refine_stop == 2_500
    assert build_config().strategy.opacity_reg == 0.0


@pytest.mark.parametrize("iterations", [300, 1_000, 3_000, 7_000, 30_000])
def test_a_short_run_comes_from_a_tenth_of_its_cap_to_all_of_it(iterations: int) -> None:
    config = build_config({"strategy.name": "mcmc", "strategy.cap_max": 20_000, "train.iterations": iterations})
    control = make_strategy(config, 1.0)
    count, reached = 2_000, 0
    for step in range(1, iterations + 1):
        if control.refines_at(step):
            count = min(20_000, int(config.strategy.grow_factor * count))
            reached = reached or (step if count == 20_000 else 0)
    assert 0 < reached < 0.9 * iterations
    assert (config.strategy.grow_factor == 1.05) == (iterations == 30_000)


def test_every_step_is_given_the_regularisers_and_noise_that_falls_with_the_learning_rate() -> None:
    config = short_config(40, strategy={"name": "mcmc", "opacity_reg": 0.02, "scale_reg": 0.03, "cap_max": 60})
    engine = PlainEngine()
    trainer = Trainer.start(
        config,
        made_scene(),
        run_dir=MemoryRun(),  # type: ignore[arg-type]
        engine=engine,
        renderer=plain_renderer,
    )
    refined = [event for event in trainer.run() if isinstance(event, Refined)]
    pressures = [call["regularisation"] for call in engine.calls]
    assert len(pressures) == 40
    noises = []
    for call, regularisation in zip(engine.calls, pressures, strict=True):
        assert isinstance(regularisation, Regularisation)
        assert (regularisation.opacity_reg, regularisation.scale_reg, regularisation.seed) == (0.02, 0.03, 42)
        rates = call["lrs"]
        assert isinstance(rates, dict)
        assert regularisation.noise == 5e5 * rates["means"]
        noises.append(regularisation.noise)
    assert noises == sorted(noises, reverse=True)
    assert refined
    assert trainer.state.gaussians.means.shape[0] <= 60
