"""Steps on several views: the mean of their gradients, one step of Adam, and rates that fit the batch."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.testing import assert_close

from splatcli.config import OptimConfig, build_config
from splatcli.gaussians import GROUPS
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.batch import BatchEngine, FlatSums
from splatcli.rasterizer.reference_engine import ReferenceEngine
from splatcli.rasterizer.step_inputs import DensifyStats, Regularisation, StepInputs
from splatcli.rasterizer.train_step import NativeEngine
from tests.kernels.simt import simulated
from tests.native.cases import NEEDS_COMPILER, float32, float64
from tests.rasterizer.scenes import random_camera, random_image, random_scene

F64 = torch.float64
LRS = {"means": 2e-3, "quats": 1e-3, "log_scales": 5e-3, "logit_opacities": 5e-2, "sh0": 2.5e-3, "shN": 1.25e-4}


def inputs_of(index: int, stats: DensifyStats | None = None, **changes: object) -> StepInputs:
    plain = {
        "lrs": LRS,
        "sh_degree": 2,
        "background": torch.tensor([0.2, 0.4, 0.6], dtype=F64),
        "ssim_lambda": 0.2,
        "antialiased": False,
        "stats": stats,
    }
    picture = (random_image(50 + index, 37, 29) * 255).round().to(torch.uint8)
    return StepInputs(random_camera(30 + index, 37, 29), picture, **{**plain, **changes})  # type: ignore[arg-type]


@NEEDS_COMPILER
def test_a_batch_of_one_view_is_the_fused_step() -> None:
    gaussians, _ = random_scene(1, 40, dtype=F64)
    gaussians = gaussians.detach_clone()
    fused, adam = gaussians.detach_clone(), AdamState.zeros_like(gaussians)
    fused_adam = copy.deepcopy(adam)
    engine, batch = NativeEngine(float64(1)), BatchEngine(float64(1))
    for step in range(3):
        expected = engine.step(fused, fused_adam, inputs_of(step))
        assert batch.step(gaussians, adam, [inputs_of(step).camera], lambda _, step=step: inputs_of(step)).losses == [
            expected
        ]
    shown, expected_shown = adam.flushed(gaussians, LRS["shN"]), fused_adam.flushed(fused, LRS["shN"])
    for name in GROUPS:
        assert_close(getattr(shown, name), getattr(expected_shown, name), rtol=0.0, atol=1e-12)
    assert adam.step == fused_adam.step == 3


@NEEDS_COMPILER
def test_a_batch_moves_along_the_mean_gradient_and_adds_the_statistics() -> None:
    gaussians, _ = random_scene(1, 40, dtype=F64)
    gaussians = gaussians.detach_clone()
    regularisation = Regularisation(opacity_reg=0.01, scale_reg=0.02)
    stats, adam = DensifyStats(torch.ones(40, dtype=F64), torch.ones(40, dtype=F64)), AdamState.zeros_like(gaussians)
    expected_stats = copy.deepcopy(stats)
    singles = [ReferenceEngine._backward(gaussians, inputs_of(index)) for index in range(3)]
    for index in range(3):
        # A step that moves nothing tells what a view has to say.
        still = dict.fromkeys(LRS, 0.0)
        ReferenceEngine().step(
            gaussians.detach_clone(), copy.deepcopy(adam), inputs_of(index, expected_stats, lrs=still)
        )
    outcome = BatchEngine(float64(1)).step(
        gaussians.detach_clone(),
        adam,
        [inputs_of(index).camera for index in range(3)],
        lambda index: inputs_of(index, stats, regularisation=regularisation),
    )
    assert outcome.losses == pytest.approx([loss for loss, *_ in singles], abs=1e-10)
    assert_close(stats.grad2d, expected_stats.grad2d, rtol=1e-7, atol=1e-10)
    assert_close(stats.count, expected_stats.count)
    for name in ("means", "sh0", "quats"):  # the pressure is on the other ones
        mean = torch.stack([getattr(grads, name) for _, grads, *_ in singles]).mean(dim=0)
        assert_close(getattr(adam.exp_avg, name) / 0.1, mean, rtol=1e-6, atol=1e-10)
    assert float((adam.exp_avg.logit_opacities - 0.1 * singles[0][1].logit_opacities).abs().max()) > 0


def test_the_parts_of_a_sum_are_aligned_and_share_no_number() -> None:
    gaussians, _ = random_scene(1, 7, sh_degree=1)
    sums = FlatSums(gaussians, 3)
    parts = [tensor for _, tensor in sums.gradients.items()] + [sums.stats.grad2d, sums.stats.count]
    for number, part in enumerate(parts):
        part.fill_(number + 1.0)
    assert all((part == number + 1.0).all() for number, part in enumerate(parts))
    assert all((part.data_ptr() - sums.flat.data_ptr()) % 64 == 0 for part in parts)
    assert len(sums.flat) % 3 == 0


@pytest.mark.parametrize("batch", [1, 9, 10, 11, 64])
def test_rates_and_moments_fit_the_batch(batch: int) -> None:
    """1 - batch (1 - beta) is zero at ten views, and negative beyond."""
    plain, config = build_config(), build_config({"train.batch_size": batch})
    optim = config.optim
    assert 0.0 < optim.beta1 == 0.9**batch < 1.0
    assert 0.0 < optim.beta2 == 0.999**batch < 1.0
    assert AdamState.zeros_like(random_scene(1, 2)[0], optim.beta1, optim.beta2).lazy
    for name in ("means_lr", "means_lr_final", "quats_lr", "log_scales_lr", "logit_opacities_lr", "sh0_lr", "shN_lr"):
        assert getattr(optim, name) == pytest.approx(math.sqrt(batch) * getattr(plain.optim, name), rel=2e-3), name
    # As many views are seen as ever, and what is said in steps is said for fewer of them.
    assert config.train.iterations == math.ceil(30_000 / batch)
    assert config.schedule.lr_steps == config.train.iterations
    assert config.schedule.refine_stop == pytest.approx(15_000 / batch, abs=1)


def test_what_is_given_is_not_scaled() -> None:
    config = build_config({"train.batch_size": 4, "train.iterations": 100, "optim.means_lr": 1e-4, "optim.beta1": 0.8})
    assert (config.train.iterations, config.optim.means_lr, config.optim.beta1) == (100, 1e-4, 0.8)
    assert build_config({"train.batch_size": 4}, preset="fast").train.iterations == 1750


def test_a_short_run_is_short_by_its_views() -> None:
    assert OptimConfig.scaled(7_500, 4).final_factor == OptimConfig.scaled(30_000).final_factor == 1.0
    assert OptimConfig.scaled(7_500).final_factor < 1.0


@NEEDS_COMPILER
def test_a_backend_that_counts_on_its_device_makes_the_same_steps() -> None:
    """What a GPU does, under the emulator: its counts are waited for, view by view."""
    gaussians, _ = random_scene(1, 40)
    made = []
    for backend in (float32(), simulated()):
        moved, stats = gaussians.detach_clone(), DensifyStats.zeros(40)
        adam, engine = AdamState.zeros_like(moved), BatchEngine(backend)
        background = torch.tensor([0.2, 0.4, 0.6])
        cameras = [inputs_of(index).camera for index in range(2)]
        outcome = engine.step(moved, adam, cameras, lambda index, s=stats: inputs_of(index, s, background=background))  # noqa: B023
        made.append((outcome, moved, adam, stats))
    (cpu, on_cpu, cpu_adam, cpu_stats), (simt, on_simt, simt_adam, simt_stats) = made
    assert simt.losses == pytest.approx(cpu.losses, rel=1e-5)
    assert simt.isects >= cpu.isects > 0
    for name in GROUPS:
        moment, expected = getattr(simt_adam.exp_avg, name), getattr(cpu_adam.exp_avg, name)
        assert_close(moment, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))
        assert not torch.equal(getattr(on_simt, name), getattr(gaussians, name))
    assert_close(simt_stats.count, cpu_stats.count)
    assert_close(simt_stats.grad2d, cpu_stats.grad2d, rtol=1e-3, atol=1e-5)
    assert_close(on_simt.sh0, on_cpu.sh0, rtol=0.0, atol=2.0 * LRS["sh0"])
