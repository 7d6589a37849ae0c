"""apply_refinement: parameters, moments and statistics change together."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from splatcli.gaussians import GROUPS
from splatcli.rasterizer.step_inputs import DensifyStats
from splatcli.train.densify import Refinement, apply_refinement
from tests.train.worlds import random_adam, random_gaussians

SOURCE = torch.tensor([4, 0, 2, 2])
FRESH = torch.tensor([False, False, False, True])


def test_all_groups_moments_and_statistics_follow_their_source() -> None:
    gaussians = random_gaussians(5)
    adam, stats = random_adam(gaussians), DensifyStats(torch.arange(5.0), torch.arange(5.0) + 10)
    rows, moments, kept = apply_refinement(Refinement(SOURCE, FRESH, clear_stats=False), gaussians, adam, stats)
    for name in GROUPS:
        assert torch.equal(getattr(rows, name), getattr(gaussians, name)[SOURCE])
        for new, old in ((moments.exp_avg, adam.exp_avg), (moments.exp_avg_sq, adam.exp_avg_sq)):
            assert torch.equal(getattr(new, name)[:3], getattr(old, name)[SOURCE[:3]])
            assert not getattr(new, name)[3].any()
    assert torch.equal(kept.grad2d, torch.tensor([4.0, 0.0, 2.0, 2.0]))
    assert torch.equal(kept.count, torch.tensor([14.0, 10.0, 12.0, 12.0]))
    assert (moments.step, moments.beta1, moments.beta2, moments.eps) == (7, 0.9, 0.999, 1e-15)


def test_new_rows_come_to_lie_beside_those_that_they_come_from() -> None:
    source, reset_moments = torch.tensor([0, 1, 3, 1, 3, 3]), torch.tensor([False, False, False, True, True, True])
    means = torch.arange(18.0).reshape(6, 3)
    gaussians = random_gaussians(5)
    adam, stats = random_adam(gaussians), DensifyStats(torch.arange(5.0), torch.arange(5.0))
    refinement = Refinement(source, reset_moments, {"means": means}, clear_stats=False, cloned=3)
    plain, sorted_rows = (
        apply_refinement(e, gaussians, adam, stats) for e in (refinement, refinement.sorted_by_source())
    )
    order = [0, 1, 3, 2, 4, 5]
    assert refinement.sorted_by_source().source.tolist() == [0, 1, 1, 3, 3, 3]
    assert (refinement.sorted_by_source().cloned, refinement.sorted_by_source().clear_stats) == (3, False)
    for name in GROUPS:
        assert torch.equal(getattr(sorted_rows[0], name), getattr(plain[0], name)[order])
        assert torch.equal(getattr(sorted_rows[1].exp_avg_sq, name), getattr(plain[1].exp_avg_sq, name)[order])
    assert torch.equal(sorted_rows[2].grad2d, plain[2].grad2d[order])


def test_statistics_start_anew_when_asked() -> None:
    gaussians = random_gaussians(5)
    stats = DensifyStats(torch.ones(5), torch.ones(5))
    _, _, cleared = apply_refinement(Refinement(SOURCE, FRESH), gaussians, random_adam(gaussians), stats)
    assert len(cleared) == 4
    assert not cleared.grad2d.any()
    assert not cleared.count.any()


def test_given_values_replace_the_copied_ones() -> None:
    gaussians = random_gaussians(5)
    means = torch.randn(4, 3)
    stats = DensifyStats.zeros(5)
    rows, _, _ = apply_refinement(Refinement(SOURCE, FRESH, {"means": means}), gaussians, random_adam(gaussians), stats)
    assert torch.equal(rows.means, means)
    assert rows.means.data_ptr() != means.data_ptr()
    assert torch.equal(rows.sh0, gaussians.sh0[SOURCE])


def test_the_arguments_stay_as_they_were() -> None:
    gaussians = random_gaussians(5)
    adam = random_adam(gaussians)
    before, moments_before = gaussians.detach_clone(), adam.exp_avg.detach_clone()
    refinement = Refinement.same_rows(5, gaussians.device, opacity_ceiling=-3.0)
    rows, moments, _ = apply_refinement(refinement, gaussians, adam, DensifyStats.zeros(5))
    for name, tensor in gaussians.items():
        assert torch.equal(tensor, getattr(before, name))
        assert torch.equal(getattr(adam.exp_avg, name), getattr(moments_before, name))
        assert getattr(rows, name).data_ptr() != tensor.data_ptr()
        assert getattr(moments.exp_avg, name).data_ptr() != getattr(adam.exp_avg, name).data_ptr()


def test_everything_can_go() -> None:
    gaussians = random_gaussians(5)
    none = Refinement(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool))
    rows, moments, stats = apply_refinement(none, gaussians, random_adam(gaussians), DensifyStats.zeros(5))
    assert (len(rows), len(moments.exp_avg), len(stats)) == (0, 0, 0)
    assert rows.shN.shape == (0, 3, 3)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"source": SOURCE - 5}, "source has rows -5 to "),
        ({"source": SOURCE + 1}, "of 5"),
        ({"source": SOURCE.float()}, "source is float32 [4], not int64 [4]"),
        ({"source": SOURCE[:, None]}, "source is int64 [4, 1], not int64 [4]"),
        ({"source": SOURCE.tolist()}, "source is list, not int64 [4]"),
        ({"reset_moments": FRESH[:3]}, "reset_moments is bool [3], not bool [4]"),
        ({"reset_moments": FRESH.float()}, "reset_moments is float32 [4], not bool [4]"),
        ({"values": {"scales": torch.zeros(4, 3)}}, "values has no group 'scales': one of means, "),
        ({"values": {"means": torch.zeros(5, 3)}}, "values['means'] is float32 [5, 3], not float32 [4, 3]"),
        ({"values": {"shN": torch.zeros(4, 3, 3).double()}}, "values['shN'] is float64 [4, 3, 3], not float32"),
    ],
)
def test_a_malformed_refinement_names_the_field(changed: dict[str, Any], said: str) -> None:
    sound = Refinement(SOURCE, FRESH, {"means": torch.zeros(4, 3)})
    sound.check(random_gaussians(5))
    with pytest.raises(ValueError, match=re.escape(said)):
        replace(sound, **changed).check(random_gaussians(5))
