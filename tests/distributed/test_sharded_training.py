"""Training with the Gaussians shared out: the bits of one process that holds all, in every step, file and figure."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from splatcli.checkpoint.state import Checkpoint
from splatcli.distributed.world import World
from tests.distributed.ranks import results
from tests.distributed.training import STEPS, batch_config, go_on, train
from tests.native.cases import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER

#: What a step may carry along, in as few runs as possible; each refines, some reset opacities or look at probe views.
RUNS = {
    "default": batch_config(4, guard={"probe_every": 6, "probe_views": 3}),
    "mcmc": batch_config(4, strategy={"name": "mcmc", "opacity_reg": 0.01, "scale_reg": 0.01, "cap_max": 60}),
    "filtered": batch_config(4, views={"exposure": True}, train={"filter_3d": True, "antialiased": True}),
    "absgrad": batch_config(5, strategy={"name": "absgrad"}, views={"bilateral_grid": True}),
}
Runs = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def alone() -> Runs:
    return {name: train(None, config, renderer=None) for name, config in RUNS.items()}


def several(world: World, names: list[str]) -> Runs:
    return {name: train(world, RUNS[name], sharded=True) for name in names}


def assert_same_file(got: Checkpoint, expected: Checkpoint) -> None:
    """All that is written."""
    for name, tensor in expected.gaussians.items():
        assert torch.equal(getattr(got.gaussians, name), tensor), name
    assert got.moments is not None
    assert expected.moments is not None
    for name, moments in expected.moments.items():
        assert all(torch.equal(a, b) for a, b in zip(got.moments[name], moments, strict=True)), name
    assert got.rest_steps is not None
    assert expected.rest_steps is not None
    assert torch.equal(got.rest_steps, expected.rest_steps)
    for values, wanted in [(got.strategy, expected.strategy), (got.rng, expected.rng), (got.views, expected.views)]:
        assert values.keys() == wanted.keys()
        for key, tensor in wanted.items():
            assert torch.equal(values[key], tensor), key  # type: ignore[arg-type]
    assert (got.smoothing is None) == (expected.smoothing is None)
    assert got.smoothing is None or torch.equal(got.smoothing, expected.smoothing)  # type: ignore[arg-type]
    for name in ("step", "adam_step", "active_sh_degree", "sampler", "config", "train", "test", "dataset"):
        assert getattr(got, name) == getattr(expected, name), name


@pytest.mark.parametrize(
    ("size", "names"), [(2, ["default", "filtered"]), (3, ["mcmc", "absgrad"]), (4, ["default", "mcmc"])]
)
def test_shares_have_the_bits_of_the_whole(size: int, names: list[str], alone: Runs) -> None:
    found = results(several, size, names)
    for name in names:
        expected = alone[name]
        assert expected["refined"] > 0
        assert len(set(expected["digests"].values())) == STEPS  # every step changes something
        for rank in found:
            for what in ("losses", "digests", "reason", "scores"):
                assert rank[name][what] == expected[what], (name, what)
        rows = [rank[name]["rows"] for rank in found]
        assert sum(rows) == expected["rows"]
        assert max(rows) - min(rows) <= 1
        assert_same_file(found[0][name]["checkpoint"], expected["checkpoint"])
    assert any(alone[name]["scores"] for name in names)


def part(world: World | None, checkpoint: Checkpoint | None, stop_at: int | None, sharded: bool) -> dict[str, Any]:
    """A run on its way: it begins without a checkpoint."""
    if checkpoint is None:
        return train(world, RUNS["default"], stop_at=stop_at, sharded=sharded)
    return go_on(world, checkpoint, stop_at=stop_at, sharded=sharded)


def test_a_run_goes_from_shares_to_copies_to_one_and_back_without_losing_a_bit(alone: Runs) -> None:
    checkpoint, digests = None, {}
    for size, stop_at, sharded in [(4, 4, True), (3, 7, False), (3, 11, True), (2, 13, True)]:
        first, *others = results(part, size, checkpoint, stop_at, sharded)
        assert all(other["digests"] == first["digests"] and other["checkpoint"] is None for other in others)
        checkpoint = first["checkpoint"]
        assert checkpoint.step == stop_at
        digests |= first["digests"]
    last = part(None, checkpoint, None, False)
    assert {**digests, **last["digests"]} == alone["default"]["digests"]
