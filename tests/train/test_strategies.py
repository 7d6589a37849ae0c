"""Adaptive density control, rule by rule, on cases small enough to check by hand."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from splatcli.config import Config, Schedule, StrategyConfig, TrainConfig, build_config, setting_fields, setting_flags
from splatcli.gaussians import Gaussians
from splatcli.rasterizer.step_inputs import DensifyStats
from splatcli.train.densify import STRATEGIES, AdcStrategy, Refinement, apply_refinement, make_strategy
from splatcli.train.densify.default import revised_opacities
from tests.train.worlds import random_adam, random_gaussians

EXTENT = 2.0
STEEP, FLAT = 3e-4, 1e-4
SMALL, LARGE, HUGE = 0.01 * EXTENT * 0.9, 0.01 * EXTENT * 1.1, 0.5 * EXTENT * 1.7
#: The reference schedule's last refinement, which may fill what is left under the cap.
LAST = 14_900
SCHEDULE = Schedule(refine_start=500, refine_stop=15_000, refine_every=100, reset_every=3_000)


def strategy(iterations: int = 30_000, schedule: Schedule = SCHEDULE, **config: Any) -> AdcStrategy:
    settings = StrategyConfig.model_validate({"name": "adc", "revised_opacity": False, **config})
    train = TrainConfig(iterations=iterations)
    return AdcStrategy(Config(strategy=settings, schedule=schedule, train=train), EXTENT)


def world(*rows: tuple[float, float, float]) -> tuple[Gaussians, DensifyStats]:
    """Gaussians of (mean gradient norm, largest scale, opacity)."""
    grad, scale, opacity = torch.tensor(rows).T
    gaussians = random_gaussians(len(rows))
    gaussians.log_scales = torch.stack([scale.log(), scale.log() - 1.0, scale.log() - 2.0], dim=1)
    gaussians.logit_opacities = torch.logit(opacity)
    return gaussians, DensifyStats(grad * 4.0, torch.full((len(rows),), 4.0))


def refine(rows: list[tuple[float, float, float]], step: int = 600, **config: Any) -> tuple[Gaussians, Refinement]:
    gaussians, stats = world(*rows)
    refinement = strategy(**config).refine(step, gaussians, stats, torch.Generator().manual_seed(0))
    assert refinement is not None
    return gaussians, refinement


def counts(refinement: Refinement) -> tuple[int, int, int]:
    return refinement.cloned, refinement.split, refinement.pruned


def test_help_and_settings_name_every_strategy() -> None:
    (flag,) = setting_flags()["strategy.name"]
    for text in (flag.help, setting_fields()["strategy.name"].description):
        named = re.findall(r"\w+", text or "")
        assert [name for name in STRATEGIES if name not in named] == []


def test_the_reference_schedule_refines_and_resets_at_the_field_s_steps() -> None:
    control = strategy()
    refines = [step for step in range(1, 30_001) if control.densifies(step)]
    assert refines == list(range(600, 15_000, 100))
    assert [step for step in range(1, 30_001) if control.resets_opacity(step)] == [3_000, 6_000, 9_000, 12_000]


def test_statistics_are_gathered_until_the_last_refinement_can_use_them() -> None:
    control = strategy()
    assert control.collects_stats(1)
    assert control.collects_stats(14_999)
    assert not control.collects_stats(15_000)


@pytest.mark.parametrize("iterations", [100, 300, 700, 1_000, 2_000, 3_500, 7_000, 14_999, 15_000, 30_000])
@pytest.mark.parametrize("scaled", [True, False])
def test_no_run_ends_in_the_dip_after_a_reset_or_right_after_a_refinement(iterations: int, scaled: bool) -> None:
    schedule = Schedule.scaled(iterations) if scaled else SCHEDULE
    control = strategy(iterations, schedule)
    resets = [step for step in range(1, iterations + 1) if control.resets_opacity(step)]
    assert all(step + schedule.reset_every <= iterations for step in resets)
    assert not control.densifies(iterations)
    assert bool(resets) == (iterations > 6_000)


def test_a_steep_small_gaussian_is_cloned() -> None:
    gaussians, refinement = refine([(FLAT, SMALL, 0.5), (STEEP, SMALL, 0.5)])
    assert counts(refinement) == (1, 0, 0)
    assert refinement.source.tolist() == [0, 1, 1]
    assert refinement.reset_moments.tolist() == [False, False, True]
    assert_close(refinement.values["means"], gaussians.means[refinement.source], rtol=0, atol=0)
    assert_close(refinement.values["log_scales"], gaussians.log_scales[refinement.source], rtol=0, atol=0)


def test_a_steep_large_gaussian_gives_way_to_two_smaller_ones() -> None:
    gaussians, refinement = refine([(STEEP, LARGE, 0.5), (FLAT, LARGE, 0.5)])
    assert counts(refinement) == (0, 1, 0)
    assert refinement.source.tolist() == [1, 0, 0]
    assert refinement.reset_moments.tolist() == [False, True, True]
    expected = gaussians.log_scales[0] - math.log(1.6)
    assert_close(refinement.values["log_scales"][1:], expected.expand(2, 3))
    first, second = refinement.values["means"][1:]
    assert not torch.equal(first, second)


def test_the_gradient_is_a_mean_over_the_views_that_saw_the_gaussian() -> None:
    gaussians, _ = world((STEEP, SMALL, 0.5), (STEEP, SMALL, 0.5), (STEEP, SMALL, 0.5))
    stats = DensifyStats(torch.tensor([9e-4, 9e-4, 0.0]), torch.tensor([3.0, 5.0, 0.0]))
    refinement = strategy().refine(600, gaussians, stats, torch.Generator())
    assert refinement is not None
    assert refinement.source.tolist() == [0, 1, 2, 0]


def test_a_scale_on_the_boundary_is_cloned_and_a_gradient_on_the_threshold_does_not_grow() -> None:
    gaussians, _ = world((1.0, 1.0, 0.5), (1.0, 1.0, 0.5))
    gaussians.log_scales[0] = math.log(0.01 * EXTENT)
    gaussians.log_scales[1] = math.log(0.01 * EXTENT)
    stats = DensifyStats(torch.tensor([1.0, 2e-4]), torch.ones(2))
    refinement = strategy().refine(600, gaussians, stats, torch.Generator())
    assert refinement is not None
    assert counts(refinement) == (1, 0, 0)
    assert refinement.source.tolist() == [0, 1, 0]


def test_faint_gaussians_are_pruned_also_when_they_would_grow() -> None:
    _, refinement = refine([(STEEP, SMALL, 0.004), (FLAT, SMALL, 0.006), (STEEP, LARGE, 0.004), (FLAT, SMALL, 0.004)])
    assert counts(refinement) == (0, 0, 3)
    assert refinement.source.tolist() == [1]


def test_huge_gaussians_are_pruned_only_from_a_step_on() -> None:
    rows = [(FLAT, HUGE, 0.5), (FLAT, LARGE, 0.5)]
    assert refine(rows, step=3_000)[1].source.tolist() == [0, 1]
    assert refine(rows, step=3_100)[1].source.tolist() == [1]


def test_children_of_a_huge_gaussian_live_when_they_are_small_enough() -> None:
    within, beyond = 0.5 * EXTENT * 1.5, 0.5 * EXTENT * 1.7
    _, refinement = refine([(STEEP, within, 0.5), (STEEP, beyond, 0.5)], step=3_100)
    assert counts(refinement) == (0, 1, 1)
    assert refinement.source.tolist() == [0, 0]


@pytest.mark.parametrize("broken", ["logit_opacities", "log_scales"])
def test_a_nan_is_pruned_and_does_not_grow(broken: str) -> None:
    gaussians, stats = world((STEEP, SMALL, 0.5), (STEEP, SMALL, 0.5))
    getattr(gaussians, broken)[0] = math.nan
    refinement = strategy().refine(3_100, gaussians, stats, torch.Generator())
    assert refinement is not None
    assert refinement.source.tolist() == [1, 1]


def test_a_nan_gradient_does_not_grow() -> None:
    gaussians, stats = world((STEEP, SMALL, 0.5), (STEEP, SMALL, 0.5))
    stats.grad2d[0] = math.nan
    refinement = strategy(cap_max=3).refine(600, gaussians, stats, torch.Generator())
    assert refinement is not None
    assert refinement.source.tolist() == [0, 1, 1]


def test_the_cap_takes_the_steepest_first_and_ties_by_index() -> None:
    rows = [(3e-4, SMALL, 0.5), (5e-4, LARGE, 0.5), (3e-4, SMALL, 0.5), (4e-4, SMALL, 0.5), (FLAT, SMALL, 0.5)]
    _, refinement = refine(rows, step=LAST, cap_max=8)
    assert counts(refinement) == (2, 1, 0)
    assert refinement.source.tolist() == [0, 2, 3, 4, 0, 3, 1, 1]


def test_rows_pruned_at_the_same_time_make_room_under_the_cap() -> None:
    _, refinement = refine([(STEEP, SMALL, 0.5), (FLAT, SMALL, 0.001), (STEEP, SMALL, 0.001)], cap_max=3)
    assert refinement.source.tolist() == [0, 0]
    _, refinement = refine([(STEEP, SMALL, 0.5), (STEEP, SMALL, 0.5), (FLAT, SMALL, 0.001)], cap_max=3)
    assert refinement.source.tolist() == [0, 1, 0]


@pytest.mark.parametrize("cap", [1, 2, 5, 17, 40, 60, 61, 80, 200])
def test_the_cap_is_never_exceeded_by_growth(cap: int) -> None:
    generator = torch.Generator().manual_seed(cap)
    n = 60
    gaussians = random_gaussians(n)
    gaussians.log_scales = torch.rand(n, 3, generator=generator) * 8.0 - 7.0
    gaussians.logit_opacities = torch.rand(n, generator=generator) * 4.0 - 6.0
    stats = DensifyStats(torch.rand(n, generator=generator) * 6e-4, torch.ones(n))
    free = strategy().refine(LAST, gaussians, stats, generator)
    capped = strategy(cap_max=cap).refine(LAST, gaussians, stats, generator)
    assert free is not None
    assert capped is not None
    survivors = len(capped) - capped.cloned - 2 * capped.split
    assert len(capped) <= max(cap, survivors)
    assert capped.cloned + capped.split == 0 or len(capped) <= cap
    if cap >= len(free):
        assert capped.source.tolist() == free.source.tolist()


def test_growth_under_a_cap_is_spread_over_the_window() -> None:
    start, cap = 1_000, 8_000
    control = strategy(cap_max=cap)
    steps = [step for step in range(1, 30_001) if control.densifies(step)]
    count = start
    for number, step in enumerate(steps, 1):
        gaussians, stats = random_gaussians(count), DensifyStats(torch.ones(count), torch.ones(count))
        gaussians.log_scales = torch.full((count, 3), math.log(SMALL))
        gaussians.logit_opacities = torch.zeros(count)
        refinement = control.refine(step, gaussians, stats, torch.Generator())
        assert refinement is not None
        count = len(refinement)
        # cap - (cap - start) (1 - t)^2 at the end of each of the window's equal parts; rounding up adds a little.
        t = number / len(steps)
        assert count == pytest.approx(cap - (cap - start) * (1 - t) ** 2, abs=0.01 * cap)
    assert count == cap


def test_rows_are_conserved() -> None:
    generator = torch.Generator().manual_seed(5)
    gaussians = random_gaussians(200)
    gaussians.log_scales = torch.rand(200, 3, generator=generator) * 6.0 - 7.0
    gaussians.logit_opacities = torch.rand(200, generator=generator) * 6.0 - 7.0
    stats = DensifyStats(torch.rand(200, generator=generator) * 5e-4, torch.ones(200))
    refinement = strategy().refine(3_100, gaussians, stats, generator)
    assert refinement is not None
    assert min(counts(refinement)) > 0
    assert len(refinement) == 200 + refinement.cloned + refinement.split - refinement.pruned
    copies = torch.bincount(refinement.source, minlength=200)
    assert int((copies == 2).sum()) == refinement.cloned + refinement.split
    assert int((copies == 0).sum()) == refinement.pruned


def test_offsets_of_split_gaussians_are_distributed_as_the_gaussian_itself() -> None:
    n = 40_000
    gaussians = random_gaussians(1).map(lambda t: t.expand(n, *t.shape[1:]).clone())
    gaussians.log_scales[:] = torch.tensor([-1.0, -2.0, -3.0])
    gaussians.quats[:] = torch.tensor([0.3, -0.5, 0.7, 0.2]) * 2.5
    refinement = strategy().refine(
        600, gaussians, DensifyStats(torch.ones(n), torch.ones(n)), torch.Generator().manual_seed(1)
    )
    assert refinement is not None
    offsets = (refinement.values["means"] - gaussians.means[0]).double()
    assert len(offsets) == 2 * n
    # The rotation matrix of the quaternion, written out independently.
    w, x, y, z = (gaussians.quats[0] / gaussians.quats[0].norm()).double().tolist()
    rotation = torch.tensor(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ],
        dtype=torch.float64,
    )
    whitened = (offsets @ rotation) / torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64).exp()
    # Five standard errors of a mean and of a covariance over 80,000 draws.
    assert_close(whitened.mean(dim=0), torch.zeros(3, dtype=torch.float64), rtol=0, atol=5 / math.sqrt(2 * n))
    assert_close(torch.cov(whitened.T), torch.eye(3, dtype=torch.float64), rtol=0, atol=5 * math.sqrt(2 / (2 * n)))


def test_split_numbers_come_from_the_generator_alone() -> None:
    gaussians, stats = world(*[(STEEP, LARGE, 0.5)] * 3)

    def means(seed: int) -> Tensor:
        torch.manual_seed(seed + 100)
        refinement = strategy().refine(600, gaussians, stats, torch.Generator().manual_seed(seed))
        assert refinement is not None
        return refinement.values["means"]

    assert torch.equal(means(1), means(1))
    assert not torch.equal(means(1), means(2))


def test_a_reset_lowers_opacities_and_clears_their_moments() -> None:
    gaussians, stats = world((FLAT, SMALL, 0.5), (FLAT, SMALL, 0.007))
    adam = random_adam(gaussians)
    schedule = Schedule(refine_start=500, refine_stop=15_000, refine_every=100, reset_every=3_050)
    refinement = strategy(schedule=schedule).refine(3_050, gaussians, stats, torch.Generator())
    assert refinement is not None
    after, moments, kept = apply_refinement(refinement, gaussians, adam, stats)
    assert_close(after.logit_opacities.sigmoid(), torch.tensor([0.01, 0.007]))
    assert float(moments.exp_avg.logit_opacities.abs().max()) == 0.0
    assert float(moments.exp_avg_sq.logit_opacities.abs().max()) == 0.0
    for name in ("means", "quats", "log_scales", "sh0", "shN"):
        assert torch.equal(getattr(after, name), getattr(gaussians, name))
        assert torch.equal(getattr(moments.exp_avg, name), getattr(adam.exp_avg, name))
    assert torch.equal(kept.grad2d, stats.grad2d)
    assert torch.equal(kept.count, stats.count)


def test_a_reset_leaves_opacities_above_the_pruning_bound() -> None:
    gaussians, stats = world((FLAT, SMALL, 0.5), (FLAT, SMALL, 0.03))
    schedule = Schedule(refine_start=500, refine_stop=15_000, refine_every=100, reset_every=3_050)
    for bound, lowered in ((0.02, [0.04, 0.03]), (0.0, [0.01, 0.01]), (0.9, [0.5, 0.03])):
        refinement = strategy(schedule=schedule, prune_opacity=bound).refine(3_050, gaussians, stats, torch.Generator())
        assert refinement is not None
        after, _, _ = apply_refinement(refinement, gaussians, random_adam(gaussians), stats)
        assert_close(after.logit_opacities.sigmoid(), torch.tensor(lowered))


def test_a_reset_that_falls_on_a_refinement_comes_after_pruning() -> None:
    gaussians, stats = world((FLAT, SMALL, 0.5), (STEEP, SMALL, 0.5), (FLAT, SMALL, 0.004))
    refinement = strategy().refine(3_000, gaussians, stats, torch.Generator())
    assert refinement is not None
    after, moments, cleared = apply_refinement(refinement, gaussians, random_adam(gaussians), stats)
    assert counts(refinement) == (1, 0, 1)
    assert_close(after.logit_opacities.sigmoid(), torch.full((3,), 0.01))
    assert float(moments.exp_avg.logit_opacities.abs().max()) == 0.0
    assert float(cleared.count.abs().max()) == 0.0


def test_other_steps_change_nothing() -> None:
    gaussians, stats = world((STEEP, SMALL, 0.5))
    for step in (1, 500, 599, 601, 15_000, 15_100, 18_000, 30_000):
        assert strategy().refine(step, gaussians, stats, torch.Generator()) is None


def test_revised_opacity_lets_two_look_like_the_one_they_come_from() -> None:
    rows = [(STEEP, SMALL, 0.75), (STEEP, LARGE, 0.96), (FLAT, SMALL, 0.5)]
    _, plain = refine(rows)
    assert "logit_opacities" not in plain.values
    _, refinement = refine(rows, revised_opacity=True)
    opacities = refinement.values["logit_opacities"].sigmoid()
    # 1 - sqrt(1 - o): 0.5 for 0.75, 0.8 for 0.96; who does not grow keeps its own.
    assert_close(opacities[refinement.source == 0], torch.tensor([0.5, 0.5]))
    assert_close(opacities[refinement.source == 1], torch.tensor([0.8, 0.8]))
    assert_close(opacities[refinement.source == 2], torch.tensor([0.5]))


def test_halves_are_as_opaque_as_their_length_asks_for() -> None:
    _, refinement = refine([(STEEP, SMALL, 0.75), (FLAT, SMALL, 0.75)], revised_opacity=True, long_axis_split=True)
    opacities = refinement.values["logit_opacities"].sigmoid()
    # Two of 0.6 the length with a depth of log(4) / 1.2 each: 1 - 4^(-1 / 1.2).
    assert_close(opacities, torch.tensor([0.75, 0.6850198, 0.6850198]))


def test_two_in_one_place_are_as_opaque_as_one_from_the_faintest_to_the_most_opaque() -> None:
    logits = torch.tensor([-60.0, -8.0, 0.0, 8.0, 60.0, 2e3], dtype=torch.float64)
    opacity = logits.sigmoid()
    each = revised_opacities(logits, 1.0).sigmoid()
    together = 2.0 * each - each.square()  # of the faintest, 1 - o rounds to 1
    assert_close(together, opacity, rtol=1e-12, atol=0)


@pytest.mark.parametrize("scale", [SMALL, LARGE])
def test_along_the_longest_axis_small_and_large_ones_become_halves_that_spread_as_far(scale: float) -> None:
    gaussians, refinement = refine([(STEEP, scale, 0.5), (FLAT, scale, 0.5)], long_axis_split=True)
    assert counts(refinement) == (0, 1, 0)
    assert refinement.source.tolist() == [1, 0, 0]
    assert refinement.reset_moments.tolist() == [False, True, True]
    parent = gaussians.map(lambda t: t[:1])
    children = gaussians.map(lambda t: t[refinement.source[1:]])
    children.means, children.log_scales = refinement.values["means"][1:], refinement.values["log_scales"][1:]
    assert_close(children.log_scales - parent.log_scales, torch.tensor([[math.log(0.6), 0.0, 0.0]]).expand(2, 3))
    offsets = (children.means - parent.means).double()
    assert float(offsets[0].norm()) == pytest.approx(0.8 * scale, rel=1e-5)
    # The second moment of both together is that of the one: within each, and between their centres.
    together = covariance(children).mean(dim=0) + (offsets.T @ offsets) / 2
    assert_close(offsets.sum(dim=0), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-6 * scale)
    assert_close(together, covariance(parent)[0], rtol=1e-4, atol=1e-6 * scale**2)


def covariance(gaussians: Gaussians) -> Tensor:
    """[N, 3, 3] float64, the rotation written out as in docs/math.md."""
    w, x, y, z = torch.nn.functional.normalize(gaussians.quats.double(), dim=1).unbind(dim=1)
    rows = [
        torch.stack([1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)], dim=1),
        torch.stack([2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)], dim=1),
        torch.stack([2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)], dim=1),
    ]
    axes = torch.stack(rows, dim=1) * gaussians.log_scales.double().exp()[:, None]
    return axes @ axes.transpose(1, 2)


def test_halves_draw_no_numbers() -> None:
    gaussians, stats = world(*[(STEEP, LARGE, 0.5)] * 3)
    first, second = (
        strategy(long_axis_split=True).refine(600, gaussians, stats, torch.Generator().manual_seed(seed))
        for seed in (1, 2)
    )
    assert first is not None
    assert second is not None
    assert torch.equal(first.values["means"], second.values["means"])


def test_halves_of_a_huge_gaussian_live_when_all_of_their_axes_are_small_enough() -> None:
    gaussians, stats = world((STEEP, 0.5 * EXTENT * 1.6, 0.5), (STEEP, 0.5 * EXTENT * 1.7, 0.5), (STEEP, HUGE, 0.5))
    gaussians.log_scales[2, 1] = math.log(0.5 * EXTENT * 1.1)
    gaussians.log_scales[2, 0] = math.log(0.5 * EXTENT * 1.2)
    refinement = strategy(long_axis_split=True).refine(3_100, gaussians, stats, torch.Generator())
    assert refinement is not None
    assert refinement.source.tolist() == [0, 0]
    assert counts(refinement) == (0, 1, 2)


def test_absgrad_splits_along_the_longest_axis_and_adc_does_not() -> None:
    assert build_config({}).strategy.long_axis_split
    assert not build_config({"strategy.name": "adc"}).strategy.long_axis_split
    assert not build_config({}, assignments=["strategy.long_axis_split=false"]).strategy.long_axis_split
    # Settings stored before there was the key name none, and go on as they were.
    assert not StrategyConfig.model_validate({"name": "absgrad"}).long_axis_split


@pytest.mark.parametrize("iterations", [300, 3_000, 6_000, 7_000, 30_000])
def test_a_run_without_resets_prunes_what_is_less_faint(iterations: int) -> None:
    config = build_config({"train.iterations": iterations})
    control = make_strategy(config, EXTENT)
    assert isinstance(control, AdcStrategy)
    resets = any(control.resets_opacity(step) for step in range(1, iterations + 1))
    assert config.strategy.prune_opacity == (0.005 if resets else 0.02)
    assert build_config({"train.iterations": iterations, "strategy.name": "adc"}).strategy.prune_opacity == 0.005


def test_absgrad_asks_for_magnitudes_and_its_own_threshold() -> None:
    assert make_strategy(build_config({}), EXTENT).absgrad
    assert not strategy(name="adc").absgrad
    config = build_config({"strategy.name": "absgrad"})
    assert config.strategy.grow_threshold == 3e-4
    assert make_strategy(config, EXTENT).absgrad
    assert build_config({"strategy.name": "absgrad", "strategy.grow_grad2d": 6e-4}).strategy.grow_threshold == 6e-4
    assert build_config({"strategy.name": "adc"}).strategy.grow_threshold == 2e-4


def test_adc_has_the_name_default_too_by_which_gsplat_knows_it() -> None:
    config = build_config({"strategy.name": "default"})
    assert config.strategy.name == "adc"
    assert not make_strategy(config, EXTENT).absgrad
