"""What is saved is what is loaded, bit for bit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from splatcli.checkpoint.file import load_checkpoint, save_checkpoint
from splatcli.checkpoint.state import Checkpoint
from splatcli.gaussians import GROUPS

CheckpointOf = Callable[..., Checkpoint]
SIZES = [(n, degree) for n in (0, 1, 2) for degree in range(5)] + [(100_000, 3)]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


@pytest.mark.parametrize(("count", "degree"), SIZES)
def test_every_tensor_returns_bit_equal(checkpoint_of: CheckpointOf, tmp_path: Path, count: int, degree: int) -> None:
    before = checkpoint_of(count, degree)
    save_checkpoint(tmp_path / "a.pt", before)
    after = load_checkpoint(tmp_path / "a.pt")
    assert before.moments is not None
    assert after.moments is not None
    for group in GROUPS:
        assert same_bits(getattr(before.gaussians, group), getattr(after.gaussians, group)), group
        for old, new in zip(before.moments[group], after.moments[group], strict=True):
            assert same_bits(old, new), group
    assert same_bits(before.strategy["grad2d"], after.strategy["grad2d"])
    assert same_bits(before.strategy["count"], after.strategy["count"])
    assert same_bits(before.rng["sampler"], after.rng["sampler"])
    save_checkpoint(tmp_path / "b.pt", after)
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()


def test_numbers_keep_value_and_type(checkpoint_of: CheckpointOf, saved: Path) -> None:
    before, after = checkpoint_of(), load_checkpoint(saved)
    for key, value in before.strategy.items():
        if not isinstance(value, torch.Tensor):
            assert after.strategy[key] == value
            assert type(after.strategy[key]) is type(value)
    for name in ("step", "adam_step", "active_sh_degree", "sampler", "config", "train", "test", "dataset"):
        assert getattr(after, name) == getattr(before, name), name


def test_cameras_keep_every_bit_of_their_doubles(checkpoint_of: CheckpointOf, saved: Path) -> None:
    for old, new in zip(checkpoint_of().cameras, load_checkpoint(saved).cameras, strict=True):
        for field in dataclasses.fields(old):
            value, found = getattr(old, field.name), getattr(new, field.name)
            if field.name == "viewmat":
                assert found.dtype == np.float64
                assert value.tobytes() == found.tobytes()
            else:
                assert value == found


def test_a_state_before_training_has_no_moments(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a.pt", dataclasses.replace(checkpoint_of(), moments=None))
    assert load_checkpoint(tmp_path / "a.pt").moments is None


def test_moments_of_the_start_take_no_room(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    drawn = checkpoint_of(20_000, 3, step=0)
    assert drawn.moments is not None
    zeros = {name: (torch.zeros_like(a), torch.zeros_like(b)) for name, (a, b) in drawn.moments.items()}
    save_checkpoint(tmp_path / "a.pt", dataclasses.replace(drawn, moments=zeros))
    assert not [name for name in torch.load(tmp_path / "a.pt", weights_only=True) if name.startswith("adam.exp")]
    of_rows = 20_000 * 4 * (59 + 1 + 1 + 2)  # parameters, last steps, grad2d, count of int64
    assert of_rows < (tmp_path / "a.pt").stat().st_size < of_rows + 40_000
    for mapped in (False, True):
        after = load_checkpoint(tmp_path / "a.pt", mapped=mapped)
        assert after.moments is not None
        for name, pair in zeros.items():
            assert all(same_bits(old, new) for old, new in zip(pair, after.moments[name], strict=True)), name
            after.moments[name][0].fill_(1.0)  # of no other tensor
            assert not after.moments[name][1].any()
    save_checkpoint(tmp_path / "b.pt", load_checkpoint(tmp_path / "a.pt"))
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()


@pytest.mark.parametrize("change", [{"adam_step": 1}, {"sh_last_step": None}, {}])
def test_moments_that_do_not_follow_from_the_step_are_stored(
    checkpoint_of: CheckpointOf, tmp_path: Path, change: dict[str, Any]
) -> None:
    drawn = checkpoint_of(step=0)
    assert drawn.moments is not None
    moments = {name: (torch.zeros_like(a), torch.zeros_like(b)) for name, (a, b) in drawn.moments.items()}
    if not change:
        moments["means"][1][-1, -1] = 1e-30
    save_checkpoint(tmp_path / "a.pt", dataclasses.replace(drawn, moments=moments, **change))
    after = load_checkpoint(tmp_path / "a.pt").moments
    assert after is not None
    assert "adam.exp_avg._features_rest" in torch.load(tmp_path / "a.pt", weights_only=True)
    assert same_bits(moments["means"][1], after["means"][1])


def test_views_aliases_and_graphs_are_stored_as_plain_tensors(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    before = checkpoint_of()
    wide = torch.rand(20, 6)
    before.gaussians.means = wide[:, :3].requires_grad_()
    before.strategy["grad2d"] = wide[:, 4]
    before.strategy["again"] = before.strategy["count"]
    save_checkpoint(tmp_path / "a.pt", before)
    after = load_checkpoint(tmp_path / "a.pt")
    torch.testing.assert_close(after.gaussians.means, before.gaussians.means.detach(), rtol=0, atol=0)
    torch.testing.assert_close(after.strategy["grad2d"], wide[:, 4], rtol=0, atol=0)
    torch.testing.assert_close(after.strategy["again"], before.strategy["count"], rtol=0, atol=0)


def test_plain_torch_opens_it_and_finds_inria_names_and_json(saved: Path) -> None:
    stored = torch.load(saved, weights_only=True)
    shapes = {name: list(stored[name].shape) for name in stored if name.startswith("_")}
    assert shapes == {
        "_xyz": [20, 3],
        "_features_dc": [20, 1, 3],
        "_features_rest": [20, 3, 3],
        "_scaling": [20, 3],
        "_rotation": [20, 4],
        "_opacity": [20, 1],
    }
    assert "adam.exp_avg._xyz" in stored
    spaces = {spec["name"]: spec["space"] for spec in json.loads(stored["manifest"])["tensors"]}
    assert (spaces["_scaling"], spaces["_opacity"], spaces["_rotation"]) == ("log", "logit", "raw_quat_wxyz")
