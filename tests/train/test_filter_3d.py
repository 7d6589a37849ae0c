"""--filter-3d in a run: sizes follow the Gaussians, are stored and resumed in every bit, and are in what is shown."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from splatcli.checkpoint.file import load_checkpoint, save_checkpoint
from splatcli.checkpoint.state import RenderColumns
from splatcli.config import Config
from splatcli.errors import ModelFileError, SplatError, UsageError
from splatcli.gaussians import GROUPS, Gaussians
from splatcli.rasterizer import NativeEngine
from splatcli.rasterizer.filter_3d import apply_filter_3d, filter_sizes
from splatcli.rasterizer.step_inputs import DensifyStats
from splatcli.train.changed_settings import changed_config
from splatcli.train.densify import apply_refinement
from splatcli.train.densify.base import Refinement
from splatcli.train.events import OpacityReset, Refined
from splatcli.train.state import TrainState, gaussians_to_render
from splatcli.train.trainer import FILTER_3D_EVERY, Trainer
from tests.native.cases import NEEDS_COMPILER, float32
from tests.train.test_async_engines import AsyncPlainEngine
from tests.train.worlds import (
    MemoryRun,
    PlainEngine,
    made_scene,
    plain_renderer,
    random_adam,
    random_gaussians,
    short_config,
)


def config(steps: int = 40, **train: object) -> Config:
    return short_config(steps, train={"filter_3d": True, **train})


def new(config: Config, run: MemoryRun | None = None) -> Trainer:
    return Trainer.start(
        config, made_scene(), run_dir=run or MemoryRun(), engine=PlainEngine(), renderer=plain_renderer  # type: ignore[arg-type]
    )  # fmt: skip


def sizes_now(state: TrainState) -> torch.Tensor:
    return filter_sizes(state.gaussians.means, state.training_cameras())


def test_sizes_are_those_of_the_gaussians_after_each_edit() -> None:
    trainer = new(config())
    assert trainer.state.columns.filter_3d is not None
    assert torch.equal(trainer.state.columns.filter_3d, sizes_now(trainer.state))
    edits = 0
    for event in trainer.run():
        state = trainer.state
        assert state.columns.filter_3d is not None
        assert len(state.columns.filter_3d) == len(state.gaussians)
        if isinstance(event, Refined | OpacityReset):
            edits += 1
            assert torch.equal(state.columns.filter_3d, sizes_now(state))
    assert edits > 5


@pytest.mark.parametrize(
    ("schedule", "strategy"),
    [
        ({"refine_start": 1000, "refine_stop": 1000, "reset_every": 1000}, {}),
        # Refinements at steps of a measurement, which find nothing to do.
        (
            {"refine_start": 1, "refine_stop": 1000, "refine_every": 100},
            {"name": "mcmc", "cap_max": 1, "prune_opacity": 0},
        ),
    ],
    ids=["no-refinements", "refinements-that-change-nothing"],
)
def test_without_edits_sizes_are_measured_every_hundred_steps_and_not_between(
    schedule: dict[str, object], strategy: dict[str, object]
) -> None:
    settings = short_config(2 * FILTER_3D_EVERY, schedule=schedule, strategy=strategy, train={"filter_3d": True})
    trainer = new(settings)
    before = trainer.state.columns.filter_3d
    list(trainer.run(stop_at=FILTER_3D_EVERY - 1))
    assert trainer.state.columns.filter_3d is before
    list(trainer.run(stop_at=FILTER_3D_EVERY))
    assert trainer.state.columns.filter_3d is not None
    assert torch.equal(trainer.state.columns.filter_3d, sizes_now(trainer.state))
    assert before is not None
    assert not torch.equal(trainer.state.columns.filter_3d, before)


@NEEDS_COMPILER
@pytest.mark.parametrize("behind", [False, True])
def test_a_run_is_resumed_with_the_same_bits(behind: bool, tmp_path: Path) -> None:
    """Stopped between two measurements, where the means are not those that the sizes were measured for."""
    settings = config(40, antialiased=True)

    def engine() -> AsyncPlainEngine | NativeEngine:
        native = NativeEngine(float32("portable"))
        return AsyncPlainEngine(native) if behind else native

    whole = Trainer.start(settings, made_scene(), run_dir=MemoryRun(), engine=engine())  # type: ignore[arg-type]
    list(whole.run())
    first = Trainer.start(settings, made_scene(), run_dir=MemoryRun(), engine=engine())  # type: ignore[arg-type]
    list(first.run(stop_at=23))
    state = first.state
    assert state.columns.filter_3d is not None
    assert not torch.equal(state.columns.filter_3d, sizes_now(state))
    save_checkpoint(tmp_path / "ckpt.pt", state.to_checkpoint())
    stored = load_checkpoint(tmp_path / "ckpt.pt")
    assert stored.columns.filter_3d is not None
    assert torch.equal(stored.columns.filter_3d, state.columns.filter_3d)
    second = Trainer.resume(stored, made_scene(), run_dir=MemoryRun(), engine=engine())  # type: ignore[arg-type]
    list(second.run())
    for name in GROUPS:
        assert torch.equal(getattr(second.state.gaussians, name), getattr(whole.state.gaussians, name)), name
    assert torch.equal(second.state.columns.filter_3d, whole.state.columns.filter_3d)  # type: ignore[arg-type]


def test_what_is_shown_has_the_filter_in_it_and_the_state_stays_raw() -> None:
    trainer = new(config())
    list(trainer.run(stop_at=23))
    state = trainer.state
    checkpoint = state.to_checkpoint()
    assert torch.equal(checkpoint.gaussians.log_scales, state.gaussians.log_scales)
    assert state.columns.filter_3d is not None
    wanted = apply_filter_3d(state.gaussians, state.columns.filter_3d)
    for shown in (state.gaussians_to_render(), gaussians_to_render(checkpoint)):
        for name in ("means", "log_scales", "logit_opacities"):
            assert torch.equal(getattr(shown, name), getattr(wanted, name)), name
    assert bool((wanted.log_scales > state.gaussians.log_scales).all())


def test_a_reset_leaves_thin_gaussians_as_visible_as_thick_ones() -> None:
    gaussians = random_gaussians(9)
    gaussians.logit_opacities[:] = torch.tensor([3.0] * 8 + [-6.0])
    shares = torch.tensor([1.0, 0.9, 0.5, 0.3, 0.1, 0.02, 0.01, 1e-6, 0.5], dtype=torch.float64)
    refinement = Refinement.same_rows(9, gaussians.device, opacity_ceiling=math.log(0.01 / 0.99))
    after, _, _ = apply_refinement(
        refinement, gaussians, random_adam(gaussians), DensifyStats.zeros(9), lambda rows: shares
    )
    left = after.logit_opacities.double().sigmoid() * shares
    assert_close(left[:6], torch.full((6,), 0.01, dtype=torch.float64), rtol=1e-5, atol=0)
    raw = after.logit_opacities[6:8].sigmoid()
    assert float(raw.max()) < 0.9526  # they were below what the ceiling allows them
    assert float(after.logit_opacities[8]) == -6.0
    plain, _, _ = apply_refinement(refinement, gaussians, random_adam(gaussians), DensifyStats.zeros(9))
    assert_close(plain.logit_opacities[:8].sigmoid(), torch.full((8,), 0.01), rtol=1e-5, atol=0)


def test_a_checkpoint_without_its_sizes_is_not_resumed_and_bad_sizes_are_not_loaded(tmp_path: Path) -> None:
    trainer = new(config())
    checkpoint = trainer.state.to_checkpoint()
    checkpoint.columns = RenderColumns()
    with pytest.raises(ModelFileError, match="3D filter are missing"):
        TrainState.from_checkpoint(checkpoint)
    for bad, match in ((torch.full((20,), -1.0), "below zero"), (torch.ones(3), r"not float32 \[20\]")):
        checkpoint.columns = RenderColumns(filter_3d=bad)
        with pytest.raises(SplatError, match=match):
            save_checkpoint(tmp_path / "bad.pt", checkpoint)  # which verifies what it wrote


def test_the_filter_is_fixed_when_a_run_is_made() -> None:
    with pytest.raises(UsageError, match="fixed when a run is made"):
        changed_config(config(), assignments=["train.filter_3d=false"])


def test_a_run_without_the_filter_has_no_sizes() -> None:
    trainer = new(short_config())
    assert trainer.state.columns.filter_3d is None
    assert trainer.state.to_checkpoint().columns.filter_3d is None
    assert isinstance(trainer.state.gaussians_to_render(), Gaussians)
