"""Settings that change when a run is resumed: --set changes them, other differences need consent or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from splatcli.config import Config, DataConfig, with_settings
from splatcli.errors import SceneError, UsageError
from splatcli.rasterizer import NativeEngine
from splatcli.train.changed_settings import apply_config, changed_config
from splatcli.train.events import Stepped
from splatcli.train.run_scene import data_to_resume
from splatcli.train.trainer import Trainer
from tests.native.cases import NEEDS_COMPILER, float32
from tests.train.worlds import MemoryRun, PlainEngine, made_scene, plain_renderer, short_config


def toml(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_without_overrides_nothing_changes() -> None:
    stored = short_config(20)
    config, notes = changed_config(stored)
    assert config == stored
    assert notes == []


def test_an_override_is_applied_and_reported() -> None:
    config, notes = changed_config(short_config(20), assignments=["optim.sh0_lr=0.01", "train.iterations=30"])
    assert (config.optim.sh0_lr, config.train.iterations) == (0.01, 30)
    assert config.schedule == short_config(20).schedule
    assert len(notes) == 2
    assert any("train.iterations was 20, is 30; the schedule stays" in note for note in notes)


@pytest.mark.parametrize(
    ("key", "value"),
    [("train.dropout", 0.25), ("optim.means_size_power", 0.25), ("schedule.sh_degree_start", 2)],
)
@pytest.mark.parametrize("by", ["text", "value"])
def test_none_leaves_what_the_run_decided(key: str, value: float, by: str) -> None:
    stored = with_settings(short_config(20), {key: value})
    asked = {"assignments": [f"{key}=none"]} if by == "text" else {"values": {key: None}}
    assert changed_config(stored, **asked) == (stored, [])  # type: ignore[arg-type]


def test_none_takes_a_memory_cap_away() -> None:
    stored = with_settings(short_config(20), {"memory.cap": 100})
    config, notes = changed_config(stored, assignments=["memory.cap=none"])
    assert config.memory.cap is None
    assert notes == ["changed: memory.cap was 100, is none"]


def test_the_file_that_the_run_was_made_with_is_no_change(tmp_path: Path) -> None:
    stored = with_settings(Config(), {"optim.sh0_lr": 0.01, "data.scene": "/somewhere"})
    file = toml(tmp_path, '[optim]\nsh0_lr = 0.01\n[data]\nscene = "/elsewhere"\n')
    assert changed_config(stored, file=file) == (stored, [])


def test_differences_in_a_file_are_listed_with_the_flags_that_accept_them(tmp_path: Path) -> None:
    file = toml(tmp_path, "[optim]\nsh0_lr = 0.01\n[strategy]\ncap_max = 9\n[save]\nkeep_last = 7\n")
    with pytest.raises(UsageError) as caught:
        changed_config(Config(), file=file)
    assert "optim.sh0_lr was 0.0025, is 0.01" in caught.value.what
    assert "strategy.cap_max was none, is 9" in caught.value.what
    assert "keep_last" not in caught.value.what, "it touches nothing that is trained"
    flags = "--allow-config-change optim.sh0_lr --allow-config-change strategy.cap_max"
    assert caught.value.remedy == f"{flags} goes on with them"
    config, _ = changed_config(Config(), file=file, allowed=["optim.sh0_lr", "strategy.cap_max"])
    assert (config.optim.sh0_lr, config.strategy.cap_max, config.save.keep_last) == (0.01, 9, 7)


@pytest.mark.parametrize(
    "assignment",
    ["model.sh_degree=2", "data.resolution=2", "data.test_every=4", "train.seed=7", "strategy.name=mcmc"],
)
def test_what_a_run_is_made_with_is_fixed_whatever_is_allowed(assignment: str) -> None:
    with pytest.raises(UsageError, match="fixed when a run is made"):
        changed_config(Config(), assignments=[assignment], allowed=[assignment.partition("=")[0]])


def test_consent_to_what_does_not_exist_is_a_mistake() -> None:
    with pytest.raises(UsageError, match="no setting 'photo'") as caught:
        changed_config(Config(), allowed=["photo"])
    assert caught.value.remedy == "did you mean photos?"


def trainer(iterations: int) -> Trainer:
    return Trainer.start(
        short_config(iterations),
        made_scene(),
        run_dir=MemoryRun(),  # type: ignore[arg-type]
        engine=PlainEngine(),
        renderer=plain_renderer,
    )


def test_a_change_acts_from_the_next_step_on_and_not_before() -> None:
    """Coefficients that are behind are made up for with the rates of the steps that they missed."""
    made = trainer(20)
    list(made.run(stop_at=6))
    state = made.state
    state.adam.exp_avg.shN.normal_(std=1e-4, generator=torch.Generator().manual_seed(1))
    state.adam.sh_last_step -= 3
    expected = state.gaussians_to_render().shN.clone()
    assert not torch.equal(state.gaussians.shN, expected)
    apply_config(state, with_settings(state.config, {"optim.shN_lr": 0.5, "optim.beta1": 0.5}))
    assert torch.equal(state.gaussians.shN, expected)
    assert torch.equal(state.gaussians_to_render().shN, expected)
    assert (state.adam.beta1, state.config.optim.shN_lr) == (0.5, 0.5)


@NEEDS_COMPILER
def test_steps_that_could_not_be_lazy_are_not_missed_when_later_ones_can() -> None:
    made = Trainer.start(
        short_config(20, optim={"beta1": 0.0}, schedule={"refine_start": 20, "sh_degree_interval": 2}),
        made_scene(),
        run_dir=MemoryRun(),  # type: ignore[arg-type]
        engine=NativeEngine(float32()),
        renderer=plain_renderer,
    )
    list(made.run(stop_at=6))
    state = made.state
    assert not state.adam.lazy
    assert int(state.adam.sh_last_step.max()) == 0
    expected = state.gaussians.shN.clone()
    assert bool(state.adam.exp_avg.shN.any())
    apply_config(state, with_settings(state.config, {"optim.beta1": 0.9}))
    assert state.adam.lazy
    assert torch.equal(state.gaussians_to_render().shN, expected)


def test_an_extended_run_has_the_bits_of_the_shorter_one_until_there() -> None:
    """A new length in mid-run leaves the schedule alone: up to the old end nothing is different."""
    whole, part = trainer(12), trainer(12)
    losses = [event.loss for event in whole.run() if isinstance(event, Stepped)]
    first = [event.loss for event in part.run(stop_at=5) if isinstance(event, Stepped)]
    config, _ = changed_config(part.state.config, assignments=["train.iterations=15"])
    apply_config(part.state, config)
    second = [event.loss for event in part.run() if isinstance(event, Stepped)]
    assert [*first, *second][:12] == losses
    assert len(second) == 10


@pytest.mark.parametrize(
    ("settings", "use"),
    [
        ({}, None),
        ({"depths": "maps", "depth_type": "metric"}, None),
        ({"depths": "maps", "depth_type": "relative"}, "its depth maps are fitted to them"),
        ({"depths": "auto"}, "its depth term uses their depths"),
        ({"blocks": "1x2", "block": 1}, "its block is cut by them"),
        ({"blocks": "1x2"}, None),  # merged
    ],
    ids=str,
)
def test_points_that_are_gone_are_missed_only_where_they_are_used(
    tmp_path: Path, settings: dict[str, Any], use: str | None
) -> None:
    points = tmp_path / "points.ply"
    data = DataConfig(points=str(points), **settings)
    if use is None:
        assert data_to_resume(data) == (
            DataConfig(**settings),
            [f"the points that the run began with are gone, and not needed any more: {points}"],
        )
    else:
        with pytest.raises(SceneError, match=f"are gone, and {use}") as caught:
            data_to_resume(data)
        assert caught.value.where == str(points)
    points.touch()
    assert data_to_resume(data) == (data, [])
