"""AdamState's plain step is torch's Adam."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.testing import assert_close

from splatcli.gaussians import GROUPS
from splatcli.rasterizer.adam import AdamState, sum_of_log_sizes
from splatcli.rasterizer.step_inputs import DensifyStats
from tests.train.worlds import random_gaussians

LRS = {"means": 1e-3, "quats": 2e-3, "log_scales": 5e-3, "logit_opacities": 5e-2, "sh0": 2.5e-3, "shN": 1.25e-4}


@pytest.mark.parametrize(("beta1", "beta2", "eps"), [(0.9, 0.999, 1e-15), (0.0, 0.5, 1e-8), (0.5, 0.0, 1e-3)])
def test_fifty_steps_equal_torch_s_in_double_precision(beta1: float, beta2: float, eps: float) -> None:
    ours = random_gaussians(9, dtype=torch.float64)
    theirs = ours.detach_clone()
    groups = [{"params": [getattr(theirs, name).requires_grad_()], "lr": LRS[name]} for name in GROUPS]
    optimizer = torch.optim.Adam(groups, betas=(beta1, beta2), eps=eps, foreach=False)
    adam = AdamState.zeros_like(ours, beta1, beta2, eps)
    for step in range(50):
        grads = random_gaussians(9, seed=100 + step, dtype=torch.float64)
        if step % 7 == 3:
            grads.sh0.zero_()
        lrs = {name: rate * 0.97**step for name, rate in LRS.items()}
        for name, group in zip(GROUPS, optimizer.param_groups, strict=True):
            group["lr"] = lrs[name]
            getattr(theirs, name).grad = getattr(grads, name).clone()
        optimizer.step()
        adam.apply_reference(ours, grads, lrs)
    assert adam.step == 50
    for name, tensor in ours.items():
        param = getattr(theirs, name)
        assert_close(tensor, param.detach(), rtol=1e-14, atol=1e-15)
        state = optimizer.state[param]
        assert_close(getattr(adam.exp_avg, name), state["exp_avg"], rtol=1e-14, atol=1e-16)
        assert_close(getattr(adam.exp_avg_sq, name), state["exp_avg_sq"], rtol=1e-14, atol=1e-16)


@pytest.mark.parametrize("eps", [1e-15, 1e-8])
@pytest.mark.parametrize("missed", [1, 2, 13, 150, 1200])
@pytest.mark.parametrize("stands", [1, 40, 3000, 40_000])
def test_missed_steps_at_once_are_the_steps_one_by_one(stands: int, missed: int, eps: float) -> None:
    noise = torch.Generator().manual_seed(30)
    gaussians = random_gaussians(30, dtype=torch.float64)
    adam = AdamState.zeros_like(gaussians, eps=eps)
    # Second moments from where eps is nothing to where it is all, in gradients of any size.
    sizes = torch.logspace(-12, 0, 30, dtype=torch.float64)[:, None, None]
    adam.exp_avg.shN.copy_(torch.randn(gaussians.shN.shape, generator=noise, dtype=torch.float64) * sizes)
    adam.exp_avg_sq.shN.copy_(torch.rand(gaussians.shN.shape, generator=noise, dtype=torch.float64) * sizes**2)
    adam.step = stands
    adam.sh_last_step.fill_(stands)
    dense, dense_adam = gaussians.detach_clone(), copy.deepcopy(adam)
    for _ in range(missed):
        dense_adam.apply_reference(dense, gaussians.map(torch.zeros_like), LRS)
    adam.step += missed
    before = gaussians.shN.clone()
    flushed = adam.flushed(gaussians, LRS["shN"])
    assert torch.equal(gaussians.shN, before), "flushed() changes nothing"
    adam.flush(gaussians, LRS["shN"])
    assert torch.equal(flushed.shN, gaussians.shN)
    assert (adam.sh_last_step == adam.step).all()
    # What is left out is of second order in eps / sqrt(v), and most in the first steps of a run, where v hardly decays
    # but its correction does.
    moved, expected = gaussians.shN - before, dense.shN - before
    apart = 1e-9 if missed == 1 else {1: 0.2, 40: 1e-2}.get(stands, 4e-4)
    assert_close(moved, expected, rtol=apart, atol=1e-15)
    big = (sizes > 1e3 * eps).expand_as(moved)
    assert_close(moved[big], expected[big], rtol=1e-5, atol=1e-15)
    assert_close(adam.exp_avg.shN, dense_adam.exp_avg.shN, rtol=1e-9, atol=1e-300)
    assert_close(adam.exp_avg_sq.shN, dense_adam.exp_avg_sq.shN, rtol=1e-9, atol=1e-300)


def test_without_a_sum_to_catch_up_with_every_step_is_taken() -> None:
    gaussians = random_gaussians(3)
    assert not AdamState.zeros_like(gaussians, beta1=0.9, beta2=0.9).lazy
    assert not AdamState.zeros_like(gaussians, beta1=0.0, beta2=0.99).lazy
    assert not AdamState.zeros_like(gaussians, beta1=0.5, beta2=0.0).lazy
    assert AdamState.zeros_like(gaussians).lazy


def test_a_gaussian_that_never_had_a_gradient_stays() -> None:
    gaussians = random_gaussians(4)
    before = gaussians.detach_clone()
    AdamState.zeros_like(gaussians).apply_reference(gaussians, gaussians.map(torch.zeros_like), LRS)
    for name, tensor in gaussians.items():
        assert torch.equal(tensor, getattr(before, name))


def test_statistics_give_zero_where_nothing_was_seen() -> None:
    stats = DensifyStats(torch.tensor([6.0, 0.0]), torch.tensor([3.0, 0.0]))
    assert stats.mean_grad2d().tolist() == [2.0, 0.0]
    assert len(DensifyStats.zeros(5)) == 5
    with pytest.raises(ValueError, match="N"):
        DensifyStats(torch.zeros(3), torch.zeros(2))


def test_no_gradient_moves_a_number_further_than_its_rate_allows() -> None:
    """Why updates are not clipped: by Cauchy and Schwarz a step of Adam is at most 7.3 learning rates."""
    beta1, beta2 = 0.9, 0.999
    bound = (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2))
    assert bound < 7.28
    gaussians = random_gaussians(4, dtype=torch.float64)
    adam = AdamState.zeros_like(gaussians, beta1, beta2, 1e-15)
    noise = torch.Generator().manual_seed(5)
    largest = 0.0
    for step in range(300):
        # The worst there is, sizes that grow like this; a constant; anything at all; nothing, and suddenly a lot.
        sizes = [(beta2 / beta1) ** step, 1.0, 10 ** float(torch.randn((), generator=noise)), 1e12 * (step == 250)]
        rows = torch.tensor(sizes, dtype=torch.float64)
        before = gaussians.means.clone()
        grads = gaussians.map(torch.zeros_like)
        grads.means += rows[:, None]
        adam.apply_reference(gaussians, grads, LRS)
        moved = float((gaussians.means - before).abs().max()) / LRS["means"]
        largest = max(largest, moved)
    assert 3.0 < largest <= bound


def test_the_sum_of_log_sizes_is_that_of_its_parts_in_any_order() -> None:
    log_scales = random_gaussians(2_000, seed=5).log_scales
    log_scales[7] = math.nan  # such a Gaussian is never rendered
    total = sum_of_log_sizes(log_scales)
    sizes = log_scales.double().sort(dim=1).values[:, 1]
    assert total == pytest.approx(float(sizes.nansum()), rel=1e-6)
    order = torch.randperm(len(log_scales), generator=torch.Generator().manual_seed(3))
    assert sum_of_log_sizes(log_scales[order]) == total
    assert math.fsum(sum_of_log_sizes(part) for part in log_scales.split(311)) == total
    assert sum_of_log_sizes(log_scales[:0]) == 0.0
