"""Merging of Gaussians: moments in float64, pairs against a plain walk, and what must not change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from splatcli.edit.operations import EditedModel, apply_operations, parse_operation
from splatcli.edit.simplify import KEPT_OPACITY, _disjoint, _Mixture, contributions, simplify
from splatcli.formats.format import ExportMetadata
from splatcli.gaussians import Gaussians
from splatcli.rasterizer.rendering import render
from tests.formats.made import covariances, scene
from tests.rasterizer.scenes import front_camera

RED, BLUE = torch.tensor([1.5, -1.5, -1.5]), torch.tensor([-1.5, -1.5, 1.5])


def in_front(gaussians: Gaussians) -> Gaussians:
    gaussians.means[:, 2] += 3.0
    gaussians.log_scales += 1.5
    return gaussians


def covered_areas(gaussians: Gaussians) -> torch.Tensor:
    x, y, z = gaussians.log_scales.double().exp().T
    return x * y + x * z + y * z


def test_two_become_one_with_their_mean_and_covariance() -> None:
    pair = scene(2, 2, seed=3)
    one = simplify(pair, 1)
    areas = covered_areas(pair)
    opacities = pair.logit_opacities.double().sigmoid()
    share = opacities * areas / (opacities * areas).sum()
    mean = (share[:, None] * pair.means.double()).sum(dim=0)
    assert torch.allclose(one.means[0].double(), mean, atol=1e-6)
    assert torch.allclose(one.sh0[0].double(), (share[:, None] * pair.sh0.double()).sum(dim=0), atol=1e-6)
    assert torch.allclose(one.shN[0].double(), (share[:, None, None] * pair.shN.double()).sum(dim=0), atol=1e-6)
    gap = pair.means.double() - mean
    whole = (share[:, None, None] * (covariances(pair) + gap[:, :, None] * gap[:, None, :])).sum(dim=0)
    assert torch.allclose(covariances(one)[0], whole, atol=1e-6 * float(whole.trace()))
    # Between what keeps opacity x area and the mean of the two.
    keeps = float((opacities * areas).sum() / covered_areas(one)[0])
    between = (share * opacities).sum() ** KEPT_OPACITY * keeps ** (1 - KEPT_OPACITY)
    assert keeps < float((share * opacities).sum())
    assert float(one.logit_opacities[0].double().sigmoid()) == pytest.approx(float(between), rel=1e-5)


def test_equal_gaussians_become_the_same_one() -> None:
    single = scene(1, 3, seed=2)
    both = single.map(lambda tensor: torch.cat([tensor, tensor]))
    one = simplify(both, 1)
    assert torch.allclose(one.means, single.means, atol=1e-6)
    assert torch.allclose(covariances(one), covariances(single), rtol=1e-5, atol=1e-9)
    assert torch.allclose(one.sh0, single.sh0, atol=1e-6)


@pytest.mark.parametrize("count", [1, 7, 150, 299, 300])
def test_as_many_are_left_as_wanted_and_others_keep_their_bits(count: int) -> None:
    gaussians = scene(300, 1)
    done = simplify(gaussians, count)
    assert len(done) == count
    assert all(torch.isfinite(tensor).all() for _, tensor in done.items())
    kept = {row.numpy().tobytes() for row in torch.cat([gaussians.means, gaussians.quats], dim=1)}
    same = sum(row.numpy().tobytes() in kept for row in torch.cat([done.means, done.quats], dim=1))
    assert same >= 2 * count - 300
    again = simplify(gaussians, count)
    for (name, one), (_, two) in zip(done.items(), again.items(), strict=True):
        assert one.numpy().tobytes() == two.numpy().tobytes(), name
    with pytest.raises(ValueError, match="of 300"):
        simplify(gaussians, 301)


def test_colours_that_differ_are_merged_last() -> None:
    """Two rows of Gaussians, red and blue, closer to each other than to their own kind."""
    gaussians = scene(40, 0)
    row = torch.arange(40)
    gaussians.means.copy_(torch.stack([(row // 2) * 0.1, (row % 2) * 0.05, torch.zeros(40)], dim=1))
    gaussians.log_scales.fill_(-3.0)
    gaussians.quats.copy_(torch.tensor([1.0, 0, 0, 0]).expand(40, 4))
    gaussians.logit_opacities.fill_(1.0)
    gaussians.sh0.copy_(torch.where((row % 2 == 0)[:, None], RED, BLUE))
    done = simplify(gaussians, 28)
    assert (done.sh0[:, 1] + 1.5).abs().max() < 1e-5
    assert ((done.sh0[:, 0].abs() - 1.5).abs() < 1e-5).all(), "none is of a mixed colour"


def test_pairs_are_those_of_a_walk_from_the_best() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 60, (2, 500))
    first, second = first[first != second], second[first != second]
    taken: set[int] = set()
    expected = []
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        if one not in taken and other not in taken:
            taken |= {one, other}
            expected.append(index)
    assert _disjoint(first, second, 60).tolist() == expected


def test_contributions_are_the_blend_weights_of_the_images() -> None:
    gaussians, view = in_front(scene(60, 2)), front_camera(48, 32, 40.0)
    found = contributions(gaussians, [view, view])
    total = render(gaussians, view).alpha.double().sum()
    assert found.sum() == pytest.approx(2 * float(total), rel=1e-4)
    # Of Gaussians smaller than a pixel that were trained antialiased, too.
    small = replace(gaussians, log_scales=gaussians.log_scales - 4.0)
    plain, compensated = (contributions(small, [view], antialiased=one).sum() for one in (False, True))
    shown = render(small, view, antialiased=True).alpha.double().sum()
    assert compensated == pytest.approx(float(shown), rel=1e-4)
    assert compensated < 0.5 * plain
    wanted = simplify(small, 20, [view], antialiased=True)
    assert not torch.equal(simplify(small, 20, [view]).means, wanted.means)
    model = EditedModel(small, ExportMetadata(antialiased=True), [view])
    assert torch.equal(apply_operations(model, [parse_operation("--simplify", "20")])[0].gaussians.means, wanted.means)
    without = gaussians.map(torch.clone)
    without.logit_opacities[0] = -30.0
    assert contributions(without, [view])[0] == 0.0
    masses = _Mixture.of(without, contributions(without, [view])).masses
    assert masses.min() > 0
    assert masses.argmin() == 0
    assert masses[0] < 1e-6 * masses.max()


def test_what_no_camera_needs_goes_first() -> None:
    gaussians, view = in_front(scene(200, 0, seed=5)), front_camera(64, 48, 50.0)
    behind = scene(200, 0, seed=6)
    behind.means[:, 2] -= 100.0
    both = Gaussians(**{name: torch.cat([tensor, dict(behind.items())[name]]) for name, tensor in gaussians.items()})
    done = simplify(both, 260, [view])
    assert int((done.means[:, 2] > -50).sum()) >= 195
    before, after = render(both, view).image, render(done, view).image
    assert float(((before - after) ** 2).mean()) < 1e-3


@pytest.mark.parametrize("log_scale", [400.0, 1e4, 3e38, -1e4])
@pytest.mark.parametrize("rows", [slice(None), slice(0, 5)])
def test_scales_beyond_float32_are_merged(log_scale: float, rows: slice) -> None:
    """Of a run that has diverged; their squares leave float64, and their eigenvalues did not converge."""
    gaussians = scene(200, 1)
    gaussians.log_scales[rows] = log_scale
    for count in (100, 1):
        fewer = simplify(gaussians, count)
        assert len(fewer) == count
        assert all(bool(tensor.isfinite().all()) for _, tensor in fewer.items())


def test_transparent_gaussians_merge_into_a_transparent_one() -> None:
    gaussians = scene(20, 0)
    gaussians.logit_opacities[:] = -1e4  # whose sigmoid is 0 in float64
    fewer = simplify(gaussians, 3)
    assert all(bool(tensor.isfinite().all()) for _, tensor in fewer.items())
    assert bool((fewer.logit_opacities < -20).all())
