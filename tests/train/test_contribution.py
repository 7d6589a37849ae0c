"""What Gaussians contribute to views, and the refinements that prune the weakest."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from splatcli.config import Config, Schedule, StrategyConfig, TrainConfig, build_config
from splatcli.gaussians import Gaussians
from splatcli.native.backend import Backend
from splatcli.native.build import NoCompilerError
from splatcli.rasterizer.reference import render_reference
from splatcli.rasterizer.rendering import blend_weights
from splatcli.rasterizer.step_inputs import DensifyStats
from splatcli.train.densify import AdcStrategy, Refinement
from splatcli.train.densify.contribution import VIEWS, BlendWeights, largest_weights, views_of
from splatcli.train.densify.default import WEAK_PRUNINGS
from tests.rasterizer.scenes import random_camera, random_scene
from tests.rasterizer.scenes import random_gaussians as gaussians_around
from tests.train.worlds import random_gaussians

STEEP, FLAT = 1e-2, 0.0


@pytest.mark.parametrize("antialiased", [False, True])
def test_a_weight_is_what_a_colour_adds_to_the_image(antialiased: bool) -> None:
    gaussians, camera = random_scene(3, 12, dtype=torch.float64)
    found = blend_weights(gaussians, camera, antialiased=antialiased)

    def brightness(colors: Tensor) -> Tensor:
        background = torch.zeros(1, dtype=torch.float64)
        image, _, _ = render_reference(
            gaussians, camera, sh_degree=0, background=background, antialiased=antialiased, colors=colors
        )
        return image.sum()

    each = [brightness(row[:, None]) for row in torch.eye(12, dtype=torch.float64)]
    assert_close(found, torch.stack(each), rtol=1e-9, atol=1e-12)
    assert found.max() > 1.0


def test_without_a_compiler_the_reference_finds_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    gaussians, camera = random_scene(3, 12, dtype=torch.float64)
    expected = blend_weights(gaussians, camera)

    def no_backend(device: torch.device, dtype: torch.dtype) -> Backend:
        raise NoCompilerError("no compiler")

    monkeypatch.setattr("splatcli.rasterizer.rendering.backend_for", no_backend)
    assert_close(blend_weights(gaussians, camera), expected, rtol=1e-9, atol=1e-12)


def test_the_largest_weight_of_any_view_counts() -> None:
    gaussians, cameras = gaussians_around(3, 30), [random_camera(seed, 64, 48) for seed in range(3)]
    each = torch.stack([blend_weights(gaussians, camera.resized(32, 24)) for camera in cameras])
    found = largest_weights(BlendWeights(gaussians, cameras), 5)
    assert_close(found, each.amax(dim=0), rtol=0, atol=0)
    assert len(set(each.argmax(dim=0).tolist())) > 1


def test_ranks_share_the_views_and_know_the_same() -> None:
    gaussians, cameras = gaussians_around(3, 30), [random_camera(seed, 64, 48) for seed in range(3)]
    parts: list[Tensor] = []

    class Rank:
        size = 2

        def __init__(self, rank: int) -> None:
            self.rank = rank

        def all_gather(self, own: Tensor) -> list[Tensor]:
            parts.append(own)
            return parts

    group: Any = Rank(0)
    own = largest_weights(BlendWeights(gaussians, cameras, group=group), 0)
    group = Rank(1)
    both = largest_weights(BlendWeights(gaussians, cameras, group=group), 0)
    assert_close(both, largest_weights(BlendWeights(gaussians, cameras), 0), rtol=0, atol=0)
    assert not torch.equal(own, both)


def test_other_views_have_their_turn() -> None:
    assert views_of(3, 7) == [1, 2, 0]
    first, second = views_of(10 * VIEWS, 0), views_of(10 * VIEWS, 1)
    assert first == list(range(0, 10 * VIEWS, 10))
    assert second == list(range(1, 10 * VIEWS, 10))


def strategy(iterations: int = 3_000, cap: int | None = 100, prune_weakest: float = 0.1) -> AdcStrategy:
    settings = StrategyConfig(name="absgrad", long_axis_split=True, cap_max=cap, prune_weakest=prune_weakest)
    train = TrainConfig(iterations=iterations)
    return AdcStrategy(Config(strategy=settings, schedule=Schedule.scaled(iterations), train=train), 2.0)


@pytest.mark.parametrize("iterations", [3_000, 7_000, 30_000])
def test_seven_refinements_prune_the_weakest(iterations: int) -> None:
    control = strategy(iterations)
    steps = [step for step in range(1, iterations + 1) if control.uses_weights(step)]
    refines = [step for step in range(1, iterations + 1) if control.densifies(step)]
    assert len(steps) == WEAK_PRUNINGS
    assert set(steps) <= set(refines)
    assert steps[-1] == refines[-1]
    gaps = [refines.index(b) - refines.index(a) for a, b in itertools.pairwise(steps)]
    assert max(gaps) - min(gaps) <= 1


def test_runs_from_a_hull_under_a_cap_prune_them() -> None:
    def prunes(**settings: Any) -> bool:
        config = build_config({"train.iterations": 3_000, "strategy.cap_max": 100, "model.init": "hull", **settings})
        return AdcStrategy(config, 2.0).uses_weights(1_400)

    assert prunes()
    assert not prunes(**{"strategy.cap_max": None})
    assert not prunes(**{"model.init": "random"})
    assert prunes(**{"model.init": "random", "strategy.prune_weakest": 0.05})
    assert not prunes(**{"strategy.prune_weakest": 0.0})
    assert not prunes(**{"strategy.name": "adc"})


def refine(weights: list[float], grads: list[float], cap: int, prune_weakest: float) -> Refinement:
    count = len(weights)
    gaussians: Gaussians = random_gaussians(count)
    gaussians.log_scales = torch.full((count, 3), -4.0)
    gaussians.logit_opacities = torch.zeros(count)
    stats = DensifyStats(torch.tensor(grads), torch.ones(count), torch.tensor(weights))
    found = strategy(3_000, cap, prune_weakest).refine(1_400, gaussians, stats, torch.Generator())
    assert found is not None
    return found


def test_the_weakest_give_way_to_those_that_grow() -> None:
    weights = [5.0, 0.2, 7.0, 0.0, 3.0, 0.1, 9.0, 8.0, 6.0, 4.0]
    grads = [STEEP, FLAT, FLAT, FLAT, FLAT, STEEP, STEEP, FLAT, FLAT, STEEP]
    found = refine(weights, grads, 10, 0.25)
    # Rows 5 and 1 are the quarter of nine that contributes least, no view shows row 3, and two of 0, 6 and 9 have room.
    assert found.pruned == 2
    assert not {1, 5} & set(found.source.tolist())
    assert 3 in found.source.tolist()
    assert (found.split, len(found)) == (2, 10)


def test_none_is_pruned_where_all_that_grow_have_room() -> None:
    weights, grads = [5.0, 0.2, 7.0, 0.1], [STEEP, FLAT, FLAT, FLAT]
    found = refine(weights, grads, 100, 0.5)
    assert (found.pruned, found.split, len(found)) == (0, 1, 5)
    # Two grow and one has room: one place is needed.
    found = refine(weights, [STEEP, FLAT, STEEP, FLAT], 5, 0.5)
    assert (found.pruned, found.split, len(found)) == (1, 2, 5)
    assert 3 not in found.source.tolist()
