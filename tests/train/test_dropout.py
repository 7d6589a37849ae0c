"""``train.dropout``: which Gaussians a step leaves out, and that no kernel sees them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from splatcli.config import build_config
from splatcli.gaussians import GROUPS, Gaussians
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.filter_3d import apply_filter_3d
from splatcli.rasterizer.reference import render_reference
from splatcli.rasterizer.rendering import render
from splatcli.rasterizer.step_inputs import StepInputs
from splatcli.train.dropout import (
    dropout_filter,
    dropout_rate,
    dropped,
    mean_opacities,
)
from splatcli.train.resolve import resolve_by_spacing, view_spacing
from splatcli.train.state import gaussians_to_render
from tests.kernels.simt import simulated
from tests.native.cases import NEEDS_COMPILER, float32, float64
from tests.rasterizer.scenes import random_scene
from tests.train.worlds import MemoryRun, PlainEngine, made_scene, ring_cameras, short_config, start_plain

COUNT = 80


def test_a_step_leaves_out_its_share_of_gaussians_by_seed_and_number() -> None:
    rows = dropped(42, 7, 100_003, 0.3)
    assert rows.dtype == torch.bool
    assert rows.shape == (100_003,)
    assert abs(float(rows.double().mean()) - 0.3) < 0.01
    assert torch.equal(dropped(42, 7, 100_003, 0.3), rows)
    assert torch.equal(dropped(42, 7, 10, 0.3), rows[:10]), "a row's fate does not depend on how many there are"
    for other in (dropped(42, 8, 100_003, 0.3), dropped(43, 7, 100_003, 0.3)):
        both = float((rows & other).double().mean())
        assert abs(both - 0.09) < 0.01, "steps and seeds are independent"
    assert not dropped(42, 7, 100, 0.0).any()
    assert dropped(-1, 7, 0, 0.5).shape == (0,)


def test_the_rate_rises_from_zero_to_the_end_of_the_schedule() -> None:
    config = build_config({"train.dropout": 0.4, "train.iterations": 1_000})
    assert [dropout_rate(config, step) for step in (0, 250, 500, 1_000, 1_500)] == pytest.approx(
        [0, 0.1, 0.2, 0.4, 0.4]
    )
    assert dropout_rate(build_config({}), 30_000) == 0.0


def test_the_spacing_of_views_is_the_angle_to_the_next_one() -> None:
    points = np.random.default_rng(1).normal(size=(1_200, 3)).astype(np.float32) * 0.1
    for views in (6, 12, 40):
        assert view_spacing(ring_cameras(views), points) == pytest.approx(360.0 / views, rel=0.1)
    twice = [camera for camera in ring_cameras(6) for _ in range(2)]
    assert view_spacing(twice, points) == pytest.approx(0.0, abs=1e-6)
    behind = points + np.float32([0.0, 0.0, 500.0])
    assert math.isnan(view_spacing(ring_cameras(6), behind))  # no image has them
    assert math.isnan(view_spacing(ring_cameras(1), points))
    assert math.isnan(view_spacing([], points))
    assert math.isnan(view_spacing(ring_cameras(6), points[:0]))


@pytest.mark.parametrize(("views", "given", "rate"), [(8, None, 0.2), (40, None, 0.0), (8, 0.0, 0.0), (40, 0.3, 0.3)])
def test_the_rate_of_a_run_follows_the_spacing_unless_it_is_given(views: int, given: float | None, rate: float) -> None:
    scene = made_scene(views)
    config, notes = resolve_by_spacing(build_config({"train.dropout": given}), scene)
    assert config.train.dropout == rate
    assert config.optim.means_size_power == (0.0 if views == 8 else 0.5)
    assert config.train.sh_prior == (1.0 if views == 8 else 0.0)
    assert len(notes) == (given is None and views == 8)
    assert all("degrees apart: steps leave out up to 20 % of the Gaussians" in note for note in notes)
    config, notes = resolve_by_spacing(build_config({}), dataclasses.replace(scene, points=None))
    assert (config.train.dropout, notes) == (0.0, [])
    config, _ = resolve_by_spacing(build_config({"optim.means_size_power": 0.3, "train.sh_prior": 2.5}), scene)
    assert (config.optim.means_size_power, config.train.sh_prior) == (0.3, 2.5)
    config, _ = resolve_by_spacing(build_config({"model.init": "random"}), scene)
    assert config.optim.means_size_power == 0.0


@NEEDS_COMPILER
@pytest.mark.parametrize("kind", ["float64", "portable", "avx2", "simt", "reference"])
def test_gaussians_that_are_left_out_are_not_there(kind: str) -> None:
    gaussians, camera = random_scene(3, COUNT, width=40, height=30, sh_degree=1, scale=0.1, dtype=torch.float64)
    rows = dropped(1, 1, COUNT, 0.4)
    rest = gaussians.map(lambda t: t[~rows])
    if kind == "reference":
        backend = None
    else:
        backend = {"float64": float64, "simt": simulated}.get(kind, lambda: float32(kind))()
    dtype = torch.float64 if backend is None else backend.dtype
    gaussians = gaussians.map(lambda t: t.to(dtype).detach().requires_grad_())
    rest = rest.map(lambda t: t.to(dtype))
    sizes = dropout_filter(None, rows).to(dtype)
    if backend is None:
        found, wanted = render_reference(apply_filter_3d(gaussians, sizes), camera), render_reference(rest, camera)
        image, without = found[0], wanted[0]
    else:
        image = render(gaussians, camera, filter_3d=sizes, backend=backend).image
        without = render(rest, camera, backend=backend).image
    whole = render(gaussians.map(lambda t: t.detach().double()), camera, backend=float64()).image
    assert float((whole - without.double()).abs().max()) > 0.05, "the others show"
    assert_close(image.detach(), without, rtol=0, atol=1e-9 if dtype == torch.float64 else 2e-3)
    image.square().sum().backward()
    for name in GROUPS:
        gradient = getattr(gaussians, name).grad
        assert bool(gradient.isfinite().all()), name
        assert not gradient[rows].any(), name
        assert gradient[~rows].any(), name


def test_the_mean_image_of_dropout_is_that_of_lower_opacities() -> None:
    """Blending is linear in each opacity, so that the mean over all 64 choices of six Gaussians is exact."""
    gaussians, camera = random_scene(4, 6, width=24, height=20, sh_degree=1, scale=0.3, dtype=torch.float64)
    gaussians.logit_opacities.clamp_(-1.0, 3.0)
    rate, mean = 0.3, torch.zeros(20, 24, 3, dtype=torch.float64)
    for choice in range(64):
        rows = torch.tensor([choice >> row & 1 for row in range(6)], dtype=torch.bool)
        gone = int(rows.sum())
        image, _ = render_reference(gaussians.map(lambda t, rows=rows: t[~rows]), camera)[:2]
        mean += rate**gone * (1.0 - rate) ** (6 - gone) * image
    lowered = dataclasses.replace(gaussians, logit_opacities=mean_opacities(gaussians.logit_opacities, rate))
    # Where a Gaussian is fainter than 1/255 it is not drawn, and lowered ones are a little sooner.
    assert_close(render_reference(lowered, camera)[0], mean, rtol=0, atol=3 / 255)
    assert float((render_reference(gaussians, camera)[0] - mean).abs().max()) > 0.1
    opacities = torch.tensor([1e-6, 0.2, 0.9, 1.0 - 1e-12], dtype=torch.float64)
    assert_close(mean_opacities(opacities.logit(), rate).sigmoid(), 0.7 * opacities, rtol=1e-9, atol=0)
    assert mean_opacities(opacities, 0.0) is opacities


def test_a_model_is_rendered_and_exported_as_the_mean_of_its_steps() -> None:
    trainer = start_plain(short_config(40, train={"dropout": 0.5}), MemoryRun(), PlainEngine())
    list(trainer.run(stop_at=20))
    state = trainer.state
    trained = state.gaussians.logit_opacities.double().sigmoid()
    rate = dropout_rate(state.config, 20)
    assert 0.0 < rate < 0.5
    for shown in (state.gaussians_to_render(), gaussians_to_render(state.to_checkpoint())):
        assert_close(shown.logit_opacities.double().sigmoid(), (1.0 - rate) * trained, rtol=1e-5, atol=0)
    assert torch.equal(state.gaussians.logit_opacities.double().sigmoid(), trained), "training goes on with its own"


def test_a_filter_of_others_stays() -> None:
    sizes = torch.tensor([0.1, 0.2, 0.3])
    filtered = dropout_filter(sizes, torch.tensor([False, True, False]))
    assert filtered[0] == sizes[0]
    assert filtered[2] == sizes[2]
    assert filtered[1] > 1e15
    assert sizes[1] == torch.tensor(0.2), "the state's sizes are not written to"


class Recorder(PlainEngine):
    """Keeps the 3D filter of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor | None] = []

    def step(self, gaussians: Gaussians, adam: AdamState, inputs: StepInputs) -> float:
        self.seen.append(inputs.filter_3d)
        return super().step(gaussians, adam, inputs)


def test_steps_of_a_run_leave_out_more_and_more() -> None:
    engine = Recorder()
    trainer = start_plain(short_config(40, train={"dropout": 0.5}), MemoryRun(), engine)
    list(trainer.run())
    shares = [float((sizes > 0).double().mean()) for sizes in engine.seen if sizes is not None]
    assert len(shares) == 40
    assert sum(shares[:10]) / 10 < 0.15 < 0.35 < sum(shares[-10:]) / 10 < 0.65
