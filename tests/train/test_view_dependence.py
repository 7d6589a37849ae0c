"""View-dependent colour of a finished model: counts and shrinkage against plain torch, and what runs know of it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from splatcli.checkpoint.file import load_checkpoint, save_checkpoint
from splatcli.checkpoint.state import RenderColumns
from splatcli.config import Config, TrainConfig, parse_config
from splatcli.errors import SplatError
from splatcli.gaussians import GROUPS, Gaussians
from splatcli.rasterizer.reference import render_reference
from splatcli.scene.camera import Camera
from splatcli.sh import sh_basis
from splatcli.train.changed_settings import changed_config
from splatcli.train.densify.contribution import VIEWS, BlendWeights
from splatcli.train.events import Saved
from splatcli.train.state import TrainState, gaussians_to_render, rendered_alike
from splatcli.train.view_dependence import ViewWeights, damp, effective_views, shrinkage
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

PRIOR = TrainConfig(sh_views=3.0, sh_prior=1.0)


def config(steps: int = 40, degree: int = 3, **train: object) -> Config:
    return short_config(steps, model={"sh_degree": degree}, train={"sh_prior": 0.0, **train})


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
    found = effective_views(BlendWeights(gaussians, cameras))
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
    assert_close(effective_views(BlendWeights(gaussians, cameras)), torch.tensor([7.0, 0.0]), rtol=1e-3, atol=0)
    near = ring_cameras(1, 64, radius=1.0)
    assert 1.0 < float(effective_views(BlendWeights(gaussians, [*near, *cameras]))[0]) < 4.0


def test_of_many_views_some_are_rendered_and_stand_for_all() -> None:
    gaussians = random_gaussians(1, degree=0)
    gaussians.means.zero_()
    gaussians.log_scales[:] = -2.0
    count = 3 * VIEWS + 5
    assert_close(
        effective_views(BlendWeights(gaussians, ring_cameras(count))), torch.tensor([float(count)]), rtol=1e-3, atol=0
    )


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
    *_, all_of_them = [effective_views(BlendWeights(gaussians, cameras, group=group)) for group in groups]
    assert torch.equal(all_of_them, effective_views(BlendWeights(gaussians, cameras)))


def plain_shrinkage(
    gaussians: Gaussians, cameras: list[Camera], weights: Tensor, half: float, prior: float
) -> tuple[Tensor, Tensor]:
    """The mean coefficients and the change of each Gaussian, by least squares in float64, one after another."""
    size = gaussians.shN.shape[1]
    shN, sh0 = gaussians.shN.double(), gaussians.sh0.double()
    colour = (0.5 + sh0 / (4 * torch.pi) ** 0.5).clamp(min=0.05)
    centers = torch.stack([torch.as_tensor(camera.center, dtype=torch.float64) for camera in cameras])
    rows, sides, found = [], [], []
    for index, mean in enumerate(gaussians.means.double()):
        shares = weights[:, index].double()
        total, squares = shares.sum(), (shares**2).sum()
        directions = torch.nn.functional.normalize(mean - centers, dim=1)
        basis = sh_basis(directions, gaussians.sh_degree)[:, 1:] * (4 * torch.pi) ** 0.5
        shares = shares / total.clamp(min=1e-300)
        middle = shares @ basis
        root = shares.sqrt()[:, None] * (basis - middle)
        views = total**2 / squares.clamp(min=1e-300)
        trust = (views**2 / (views + half) * total / weights.sum()).sqrt()
        rows += [trust * root, trust * 0.1**0.5 * torch.eye(size, dtype=torch.float64)]
        sides += [trust * root @ (shN[index] / colour[index]), torch.zeros(size, 3, dtype=torch.float64)]
        found.append((views, middle, root))
    common = torch.linalg.lstsq(torch.cat(rows), torch.cat(sides), driver="gelsd").solution
    changes = []
    for index, (views, middle, root) in enumerate(found):
        guess, trust = common * colour[index], (views**2 / half).sqrt()
        matrix = torch.cat([trust * root, prior**0.5 * torch.eye(size, dtype=torch.float64)])
        side = torch.cat([trust * root @ shN[index], prior**0.5 * guess])
        likely = torch.linalg.lstsq(matrix, side, driver="gelsd").solution
        kept = middle @ (shN[index] - likely)
        likely[8:] = guess[8:] + views**2 / (views**2 + half**2) * (likely[8:] - guess[8:])
        changes.append(torch.cat([kept[None], likely - shN[index]]))
    return common, torch.stack(changes)


@pytest.mark.parametrize("degree", [1, 3, 4])
def test_shrinkage_is_least_squares_towards_the_mean_of_all(degree: int) -> None:
    cameras = [random_camera(seed, 64, 48) for seed in range(6)]
    gaussians = gaussians_around(3, 40, sh_degree=degree)
    weights = ViewWeights.of(BlendWeights(gaussians, cameras))
    assert int((weights.sums > 0).any(dim=0).sum()) > 20
    assert bool((weights.sums == 0).all(dim=0).any()), "some are in no view"
    common, wanted = plain_shrinkage(gaussians, cameras, weights.sums, 3.0, 0.7)
    found = shrinkage(gaussians, weights, TrainConfig(sh_views=3.0, sh_prior=0.7))
    assert found.dtype == torch.float32
    assert float(common.abs().max()) > 1e-3
    assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    half = float((wanted[:, 1:] + gaussians.shN.double()).norm() / gaussians.shN.double().norm())
    assert 0.0 < half < 0.9, "coefficients get smaller"


def test_no_gaussians_have_no_change() -> None:
    gaussians = random_gaussians(0, degree=3)
    weights = ViewWeights(torch.zeros(4, 0, dtype=torch.int32), torch.zeros(4, 3, dtype=torch.float64), 1.0)
    assert shrinkage(gaussians, weights, PRIOR).shape == (0, 16, 3)


def test_what_views_show_keeps_its_mean_colour() -> None:
    """Below degree three, whose coefficients are damped besides, the mean over the views of each Gaussian stays."""
    cameras = [random_camera(seed, 64, 48) for seed in range(6)]
    gaussians = gaussians_around(3, 40, sh_degree=2)
    weights = ViewWeights.of(BlendWeights(gaussians, cameras))
    change = shrinkage(gaussians, weights, PRIOR).double()
    assert float(change[:, 1:].abs().max()) > 1e-2
    for index, mean in enumerate(gaussians.means.double()):
        shares = weights.sums[:, index].double()
        if shares.sum() > 0:
            rays = torch.stack([mean - torch.as_tensor(camera.center, dtype=torch.float64) for camera in cameras])
            basis = sh_basis(torch.nn.functional.normalize(rays, dim=1), 2)
            shift = shares @ (basis @ change[index]) / shares.sum()
            assert_close(shift, torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-6)


def test_processes_that_hold_parts_have_the_shrinkage_of_one() -> None:
    cameras = [random_camera(seed, 64, 48) for seed in range(5)]
    gaussians = gaussians_around(3, 31)
    whole = ViewWeights.of(BlendWeights(gaussians, cameras))
    wanted = shrinkage(gaussians, whole, PRIOR)
    for size in (2, 3):
        parts: list[Tensor] = []

        class Rank:
            def __init__(self, rank: int, size: int = size, parts: list[Tensor] = parts) -> None:
                self.rank, self.size, self.parts = rank, size, parts

            def all_gather(self, own: Tensor) -> list[Tensor]:
                self.parts[self.rank : self.rank + 1] = [own]
                return self.parts

        groups: list[Any] = [Rank(rank) for rank in range(size)]
        *_, weights = [ViewWeights.of(BlendWeights(gaussians, cameras, group=group)) for group in groups]
        assert torch.equal(weights.sums, whole.sums)
        cuts = [round(31 * rank / size) for rank in range(size + 1)]
        slices = [slice(*pair) for pair in itertools.pairwise(cuts)]
        own = [gaussians.map(lambda column, rows=rows: column[rows]) for rows in slices]
        parts.clear()
        for group, part, rows in zip(groups, own, slices, strict=True):  # fills parts; the last one has all
            last = shrinkage(part, whole, PRIOR, rows=rows, group=group)
        assert torch.equal(last, wanted[slices[-1]])


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
    assert state.columns.effective_views is not None
    assert undamped.columns.effective_views is None
    assert torch.equal(
        state.columns.effective_views, effective_views(BlendWeights(state.gaussians, state.training_cameras()))
    )
    for name in GROUPS:
        assert torch.equal(getattr(state.gaussians, name), getattr(undamped.gaussians, name)), name
    checkpoint = run.saved[40]
    wanted = undamped.gaussians_to_render().shN.clone()
    damp(wanted, state.columns.effective_views, 3.0)
    for shown in (state.gaussians_to_render(), gaussians_to_render(checkpoint)):
        assert torch.equal(shown.shN, wanted)
        assert torch.equal(shown.sh0, undamped.gaussians.sh0)
    assert torch.equal(checkpoint.gaussians.shN, undamped.gaussians.shN)
    assert not torch.equal(wanted, undamped.gaussians_to_render().shN)


def test_a_run_has_no_count_before_its_end_and_none_below_degree_three() -> None:
    run = MemoryRun()
    trainer = start_plain(config(), run)
    list(trainer.run(stop_at=39))
    assert trainer.state.sh_degree() == 3
    assert trainer.state.columns.effective_views is None
    assert run.saved[39].columns.effective_views is None
    list(trainer.run())
    assert trainer.state.columns.effective_views is not None
    assert finished(MemoryRun(), config(degree=2)).columns.effective_views is None


def test_a_deadline_ends_a_run_with_a_count() -> None:
    trainer = start_plain(config(steps=100), MemoryRun())
    events = trainer.run(deadline=-1.0)
    while trainer.state.step < 30:
        trainer.advance()
    list(events)
    assert trainer.state.step == 30
    assert trainer.state.columns.effective_views is not None


def test_a_run_that_was_just_saved_is_saved_with_its_count() -> None:
    """The deadline passes while a checkpoint is written."""
    run, now = MemoryRun(), [0.0]
    trainer = start_plain(config(steps=100), run, clock=lambda: now[0])

    def should_save() -> bool:
        now[0] = 10.0 * (trainer.state.step == 30)
        return trainer.state.step == 30

    events = list(trainer.run(should_save=should_save, deadline=5.0))
    assert [event.step for event in events if isinstance(event, Saved)] == [0, 30, 30]
    stored = run.saved[30].columns.effective_views
    assert stored is not None
    assert trainer.state.columns.effective_views is not None
    assert torch.equal(stored, trainer.state.columns.effective_views)


def test_a_longer_run_forgets_the_count_and_trains_on_raw_coefficients(tmp_path: Path) -> None:
    """The bits after five more steps are those of a run whose end was never damped."""
    ends = []
    for half in (3.0, 0.0):
        run = MemoryRun()
        finished(run, config(sh_views=half))
        save_checkpoint(tmp_path / "ckpt.pt", run.saved[40])
        stored = load_checkpoint(tmp_path / "ckpt.pt")
        assert (stored.columns.effective_views is None) == (half == 0.0)
        longer, _ = changed_config(stored.config, values={"train.iterations": 45})
        trainer = resume_plain(stored, MemoryRun(), config=longer)
        list(trainer.run(stop_at=43))
        assert trainer.state.columns.effective_views is None
        list(trainer.run())
        ends.append(trainer.state)
    for name in GROUPS:
        assert torch.equal(getattr(ends[0].gaussians, name), getattr(ends[1].gaussians, name)), name
    assert ends[0].columns.effective_views is not None


def test_a_resumed_run_ends_with_the_same_count() -> None:
    whole, stopped = finished(MemoryRun(), config()), MemoryRun()
    list(start_plain(config(), stopped).run(stop_at=23))
    resumed = resume_plain(stopped.saved[23], MemoryRun())
    list(resumed.run())
    assert resumed.state.columns.effective_views is not None
    assert whole.columns.effective_views is not None
    assert torch.equal(resumed.state.columns.effective_views, whole.columns.effective_views)
    assert torch.equal(resumed.state.gaussians_to_render().shN, whole.gaussians_to_render().shN)


def test_a_checkpoint_keeps_the_count_and_a_reader_has_to_know_it(tmp_path: Path) -> None:
    run = MemoryRun()
    state = finished(run, config())
    path = tmp_path / "ckpt.pt"
    save_checkpoint(path, run.saved[40])
    assert b"effective_views" in path.read_bytes()
    stored = load_checkpoint(path)
    assert torch.equal(stored.columns.effective_views, state.columns.effective_views)  # type: ignore[arg-type]
    some = stored.select_rows(torch.tensor([1, 3]))
    assert torch.equal(gaussians_to_render(some).shN, gaussians_to_render(stored).shN[[1, 3]])
    count = len(stored.gaussians)
    for bad in (torch.full((count,), -1.0), torch.full((count,), float("nan")), torch.ones(3)):
        stored.columns = RenderColumns(effective_views=bad)
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
    undamped = replace(checkpoint, columns=RenderColumns())
    assert torch.equal(gaussians_to_render(checkpoint).shN, gaussians_to_render(undamped).shN)


def test_a_run_of_views_far_apart_ends_with_a_change_and_its_state_stays_raw(tmp_path: Path) -> None:
    run, plain = MemoryRun(), MemoryRun()
    state, raw = finished(run, config(sh_prior=1.0)), finished(plain, config(sh_views=0.0))
    assert state.columns.sh_change is not None
    assert (state.columns.effective_views, raw.columns.sh_change) == (None, None)
    for name in GROUPS:
        assert torch.equal(getattr(state.gaussians, name), getattr(raw.gaussians, name)), name
    cameras, trained = state.training_cameras(), raw.gaussians_to_render()
    change = shrinkage(trained, ViewWeights.of(BlendWeights(trained, cameras)), PRIOR)
    assert torch.equal(state.columns.sh_change, change)
    path = tmp_path / "ckpt.pt"
    save_checkpoint(path, run.saved[40])
    stored = load_checkpoint(path)
    assert b'"sh_change"' in path.read_bytes()
    for shown in (state.gaussians_to_render(), gaussians_to_render(run.saved[40]), gaussians_to_render(stored)):
        assert torch.equal(shown.sh0, trained.sh0 + change[:, 0])
        assert torch.equal(shown.shN, trained.shN + change[:, 1:])
    rows = torch.tensor([3, 1])
    assert torch.equal(gaussians_to_render(stored.select_rows(rows)).shN, gaussians_to_render(stored).shN[rows])
    longer, _ = changed_config(stored.config, values={"train.iterations": 45})
    trainer = resume_plain(stored, MemoryRun(), config=longer)
    list(trainer.run(stop_at=43))
    assert trainer.state.columns.sh_change is None, "the next step forgets it"
    damped = replace(stored, config=changed_config(stored.config, assignments=["train.sh_prior=0"])[0])
    other = MemoryRun()
    list(resume_plain(damped, other).run())
    kinds = [*other.saved[40].columns.present()]
    assert kinds == ["effective_views"], "the finished run is saved with the other kind"
    shown_raw = replace(stored, config=changed_config(stored.config, assignments=["train.sh_views=0"])[0])
    assert torch.equal(gaussians_to_render(shown_raw).sh0, trained.sh0)
    stored.columns = RenderColumns(sh_change=change[:, :-1].contiguous())
    with pytest.raises(SplatError, match=r"sh_change is float32 \[\d+, 15, 3\], not float32 \[\d+, 16, 3\]"):
        save_checkpoint(path, stored)


def test_parts_of_a_merged_run_that_are_damped_become_changes() -> None:
    """Where the views of some blocks are far apart and of others not."""
    run = MemoryRun()
    finished(run, config())
    damped = run.saved[40]
    far_apart = replace(damped, columns=RenderColumns(sh_change=torch.ones(len(damped.gaussians), 16, 3)))
    as_change, unchanged = rendered_alike([damped, far_apart])
    change = as_change.columns.sh_change
    assert change is not None
    assert as_change.columns.effective_views is None
    assert torch.equal(unchanged.columns.sh_change, far_apart.columns.sh_change)  # type: ignore[arg-type]
    assert_close(gaussians_to_render(as_change).shN, gaussians_to_render(damped).shN, rtol=0, atol=1e-7)
    assert torch.equal(change[:, :9], torch.zeros_like(change[:, :9]))
    assert float(change.abs().max()) > 1e-4


def test_runs_without_a_prior_stay_without() -> None:
    stored = config(sh_prior=1.0).model_dump(mode="json")
    assert parse_config(stored).train.sh_prior == 1.0
    del stored["train"]["sh_prior"]
    assert parse_config(stored).train.sh_prior == 0.0
