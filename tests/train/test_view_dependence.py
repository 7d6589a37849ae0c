"""Damping of view-dependent colour: the count of views against plain torch, and what of a run knows of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from splatcli.checkpoint.file import load_checkpoint, save_checkpoint
from splatcli.config import Config, parse_config
from splatcli.errors import SplatError
from splatcli.gaussians import GROUPS, Gaussians
from splatcli.rasterizer.reference import render_reference
from splatcli.scene.camera import Camera
from splatcli.train.changed_settings import changed_config
from splatcli.train.densify.contribution import VIEWS
from splatcli.train.events import Saved
from splatcli.train.state import TrainState, flushed
from splatcli.train.view_dependence import damp, effective_views
from tests.rasterizer.scenes import random_camera
from tests.rasterizer.scenes import random_gaussians as gaussians_around
from tests.train.worlds import (
    MemoryRun,
    random_gaussians,
    resume_plain,
    ring_cameras,
    short_config,
    start_plain,
)


def config(steps: int = 40, degree: int = 3, **train: object) -> Config:
    return short_config(steps, model={"sh_degree": degree}, train=train)


def finished(run: MemoryRun, config: Config) -> TrainState:
    trainer = start_plain(config, run)
    list(trainer.run())
    return trainer.state


def plain_count(gaussians: Gaussians, cameras: list[Camera]) -> tuple[Tensor, Tensor]:
    """Kish's number by the reference renderer in float64, each weight as what a colour adds to the image; its sum."""
    gaussians = gaussians.map(lambda tensor: tensor.double())
    rows = []
    for camera in cameras:
        colors = torch.zeros(len(gaussians), 1, dtype=torch.float64, requires_grad=True)
        image, _, _ = render_reference(
            gaussians, camera, sh_degree=0, background=torch.zeros(1, dtype=torch.float64), colors=colors
        )
        (weights,) = torch.autograd.grad(image.sum(), colors)
        rows.append(weights[:, 0])
    weights = torch.stack(rows)
    total = weights.sum(dim=0)
    return total**2 / (weights**2).sum(dim=0).clamp(min=1e-12), total


def test_the_count_is_that_of_plain_torch() -> None:
    gaussians, cameras = gaussians_around(3, 30), [random_camera(seed, 64, 48) for seed in range(5)]
    wanted, pixels = plain_count(gaussians, [camera.resized(32, 24) for camera in cameras])
    found = effective_views(gaussians, cameras)
    assert found.dtype == torch.float32
    seen = pixels > 1.0  # weights are rounded to 1/512 of a pixel
    assert int(seen.sum()) > 15
    assert_close(found[seen].double(), wanted[seen], rtol=2e-3, atol=0)
    assert float(found.max()) > 2.0


def test_equal_views_count_one_each_and_what_no_view_shows_none() -> None:
    gaussians = random_gaussians(2, degree=0)
    gaussians.means[:] = torch.tensor([[0.0, 0.0, 0.0], [0.0, 50.0, 0.0]])
    cameras = ring_cameras(7, 64)
    gaussians.log_scales[:] = -2.0  # a ball, which looks the same from everywhere
    assert_close(effective_views(gaussians, cameras), torch.tensor([7.0, 0.0]), rtol=1e-3, atol=0)
    near = ring_cameras(1, 64, radius=1.0)
    assert 1.0 < float(effective_views(gaussians, [*near, *cameras])[0]) < 4.0


def test_of_many_views_some_are_rendered_and_stand_for_all() -> None:
    gaussians = random_gaussians(1, degree=0)
    gaussians.means.zero_()
    gaussians.log_scales[:] = -2.0
    count = 3 * VIEWS + 5
    assert_close(effective_views(gaussians, ring_cameras(count)), torch.tensor([float(count)]), rtol=1e-3, atol=0)


def test_ranks_share_the_views_and_have_the_bits_of_one_process() -> None:
    gaussians, cameras = gaussians_around(3, 30), [random_camera(seed, 64, 48) for seed in range(5)]
    parts: list[Tensor] = []

    class Rank:
        def __init__(self, rank: int) -> None:
            self.rank, self.size = rank, 3

        def all_gather(self, own: Tensor) -> list[Tensor]:
            parts.append(own)
            return parts

    groups: list[Any] = [Rank(rank) for rank in (2, 0, 1)]
    *_, all_of_them = [effective_views(gaussians, cameras, group=group) for group in groups]
    assert torch.equal(all_of_them, effective_views(gaussians, cameras))


@pytest.mark.parametrize("degree", [0, 1, 2, 3, 4])
def test_coefficients_of_degree_three_and_above_are_damped(degree: int) -> None:
    shN = random_gaussians(4, degree=degree).shN
    views = torch.tensor([0.0, 3.0, 6.0, 1e9])
    after = shN.clone()
    damp(after, views, 3.0)
    wanted = shN.clone()
    wanted[:, 8:] *= torch.tensor([0.0, 0.5, 0.8, 1.0])[:, None, None]
    assert_close(after, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("half", "kept"), [(1e-200, 1.0), (1e200, 0.0)])
def test_no_setting_is_too_small_or_too_large_to_square(half: float, kept: float) -> None:
    shN = random_gaussians(3, degree=3).shN
    after = shN.clone()
    damp(after, torch.tensor([0.0, 1.0, 1e9]), half)
    assert torch.equal(after[1:, 8:], kept * shN[1:, 8:])
    assert torch.equal(after[0, 8:], torch.zeros_like(after[0, 8:]))


def test_a_finished_run_is_shown_damped_and_its_state_stays_raw() -> None:
    run, plain = MemoryRun(), MemoryRun()
    state, undamped = finished(run, config()), finished(plain, config(sh_views=0.0))
    assert state.effective_views is not None
    assert undamped.effective_views is None
    assert torch.equal(
        state.effective_views, effective_views(state.gaussians, state.training_cameras(), antialiased=False)
    )
    for name in GROUPS:
        assert torch.equal(getattr(state.gaussians, name), getattr(undamped.gaussians, name)), name
    checkpoint = run.saved[40]
    wanted = undamped.flushed().shN.clone()
    damp(wanted, state.effective_views, 3.0)
    for shown in (state.flushed(), flushed(checkpoint)):
        assert torch.equal(shown.shN, wanted)
        assert torch.equal(shown.sh0, undamped.gaussians.sh0)
    assert torch.equal(checkpoint.gaussians.shN, undamped.gaussians.shN)
    assert not torch.equal(wanted, undamped.flushed().shN)


def test_a_run_has_no_count_before_its_end_and_none_below_degree_three() -> None:
    run = MemoryRun()
    trainer = start_plain(config(), run)
    list(trainer.run(stop_at=39))
    assert trainer.state.sh_degree() == 3
    assert trainer.state.effective_views is None
    assert run.saved[39].effective_views is None
    list(trainer.run())
    assert trainer.state.effective_views is not None
    assert finished(MemoryRun(), config(degree=2)).effective_views is None


def test_a_deadline_ends_a_run_with_a_count() -> None:
    trainer = start_plain(config(steps=100), MemoryRun())
    events = trainer.run(deadline=-1.0)
    while trainer.state.step < 30:
        trainer.advance()
    list(events)
    assert trainer.state.step == 30
    assert trainer.state.effective_views is not None


def test_a_run_that_was_just_saved_is_saved_with_its_count() -> None:
    """The deadline passes while a checkpoint is written."""
    run, now = MemoryRun(), [0.0]
    trainer = start_plain(config(steps=100), run, clock=lambda: now[0])

    def should_save() -> bool:
        now[0] = 10.0 * (trainer.state.step == 30)
        return trainer.state.step == 30

    events = list(trainer.run(should_save=should_save, deadline=5.0))
    assert [event.step for event in events if isinstance(event, Saved)] == [0, 30, 30]
    stored = run.saved[30].effective_views
    assert stored is not None
    assert trainer.state.effective_views is not None
    assert torch.equal(stored, trainer.state.effective_views)


def test_a_longer_run_forgets_the_count_and_trains_on_raw_coefficients(tmp_path: Path) -> None:
    """The bits after five more steps are those of a run whose end was never damped."""
    ends = []
    for half in (3.0, 0.0):
        run = MemoryRun()
        finished(run, config(sh_views=half))
        save_checkpoint(tmp_path / "ckpt.pt", run.saved[40])
        stored = load_checkpoint(tmp_path / "ckpt.pt")
        assert (stored.effective_views is None) == (half == 0.0)
        longer, _ = changed_config(stored.config, values={"train.iterations": 45})
        trainer = resume_plain(stored, MemoryRun(), config=longer)
        list(trainer.run(stop_at=43))
        assert trainer.state.effective_views is None
        list(trainer.run())
        ends.append(trainer.state)
    for name in GROUPS:
        assert torch.equal(getattr(ends[0].gaussians, name), getattr(ends[1].gaussians, name)), name
    assert ends[0].effective_views is not None


def test_a_resumed_run_ends_with_the_same_count() -> None:
    whole, stopped = finished(MemoryRun(), config()), MemoryRun()
    list(start_plain(config(), stopped).run(stop_at=23))
    resumed = resume_plain(stopped.saved[23], MemoryRun())
    list(resumed.run())
    assert resumed.state.effective_views is not None
    assert whole.effective_views is not None
    assert torch.equal(resumed.state.effective_views, whole.effective_views)
    assert torch.equal(resumed.state.flushed().shN, whole.flushed().shN)


def test_a_checkpoint_keeps_the_count_and_a_reader_has_to_know_it(tmp_path: Path) -> None:
    run = MemoryRun()
    state = finished(run, config())
    path = tmp_path / "ckpt.pt"
    save_checkpoint(path, run.saved[40])
    assert b"effective_views" in path.read_bytes()
    stored = load_checkpoint(path)
    assert torch.equal(stored.effective_views, state.effective_views)  # type: ignore[arg-type]
    some = stored.select_rows(torch.tensor([1, 3]))
    assert torch.equal(flushed(some).shN, flushed(stored).shN[[1, 3]])
    count = len(stored.gaussians)
    for bad in (torch.full((count,), -1.0), torch.full((count,), float("nan")), torch.ones(3)):
        stored.effective_views = bad
        with pytest.raises(SplatError, match=r"below zero|NaN|not float32"):
            save_checkpoint(path, stored)


def test_runs_of_earlier_versions_stay_undamped() -> None:
    stored = config().model_dump(mode="json")
    assert parse_config(stored).train.sh_views == 3.0
    del stored["train"]["sh_views"]
    assert parse_config(stored).train.sh_views == 0.0


def test_a_finished_model_can_be_shown_undamped() -> None:
    """``splat resume --set train.sh_views=0`` of a finished run."""
    run = MemoryRun()
    finished(run, config())
    checkpoint = run.saved[40]
    checkpoint.config, _ = changed_config(checkpoint.config, assignments=["train.sh_views=0"])
    assert torch.equal(flushed(checkpoint).shN, flushed(replace(checkpoint, effective_views=None)).shN)
