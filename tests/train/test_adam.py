"""AdamState's plain step is torch's Adam."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from splatcli.gaussians import GROUPS
from splatcli.raster.adam import AdamState
from splatcli.raster.stats import GrowthStats
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


def test_a_gaussian_that_never_had_a_gradient_stays() -> None:
    gaussians = random_gaussians(4)
    before = gaussians.detach_clone()
    AdamState.zeros_like(gaussians).apply_reference(gaussians, gaussians.map(torch.zeros_like), LRS)
    for name, tensor in gaussians.items():
        assert torch.equal(tensor, getattr(before, name))


def test_statistics_give_zero_where_nothing_was_seen() -> None:
    stats = GrowthStats(torch.tensor([6.0, 0.0]), torch.tensor([3.0, 0.0]))
    assert stats.mean_grad2d().tolist() == [2.0, 0.0]
    assert len(GrowthStats.zeros(5)) == 5
    with pytest.raises(ValueError, match="N"):
        GrowthStats(torch.zeros(3), torch.zeros(2))
