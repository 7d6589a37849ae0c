"""Which training views are outliers, and when they are looked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from splatcli.cli.console import describe_event
from splatcli.config import Config, with_settings
from splatcli.train.events import Stepped, ViewsCompared
from splatcli.train.image_metrics import ssim
from splatcli.train.outlier_views import (
    ViewError,
    blurred,
    compared_divisor,
    comparisons_due,
    exposure_note,
    outliers,
    view_error,
)
from splatcli.train.trainer import Trainer
from tests.train.worlds import MemoryRun, PlainEngine, made_scene, plain_renderer, short_config

GOOD = (0.1, 0.5, 1.0)


@pytest.mark.parametrize(
    ("figures", "found"),
    [
        ([GOOD] * 6 + [(0.9, 0.5, 1.0)], []),  # too few to tell
        ([GOOD] * 7 + [(0.39, 0.5, 1.0)], []),  # below the limit of 0.8
        ([GOOD] * 7 + [(0.41, 0.5, 1.0)], [7]),
        ([GOOD] * 8 + [(0.5, 0.5, 1.0), (0.9, 0.5, 1.0)], [9, 8]),
        ([GOOD] * 6 + [(0.9, 0.5, 1.0)] * 2, [6, 7]),
        ([GOOD] * 5 + [(0.9, 0.5, 1.0)] * 3, []),  # more than a quarter
        ([(0.24, 0.5, 1.0)] * 7 + [(0.45, 0.5, 1.0)], [7]),
        ([(0.26, 0.5, 1.0)] * 7 + [(0.45, 0.5, 1.0), (0.2, 0.5, 0.5)], []),  # the median error is above 0.5
        ([(0.01, 0.5, 1.0)] * 7 + [(0.19, 0.05, 1.0)], []),  # an image without structure
        ([GOOD] * 7 + [(0.9, 0.0, 1.0)], [7]),
        ([GOOD] * 7 + [(0.1, 0.5, 1.29), (0.1, 0.5, 0.78)], []),  # exposures that vary
        ([GOOD] * 7 + [(0.1, 0.5, 1.31), (0.2, 0.5, 0.76)], [8, 7]),
    ],
)
def test_outliers_are_judged_by_error_median_difference_and_gain(
    figures: list[tuple[float, float, float]], found: list[int]
) -> None:
    views = {row: ViewError(*view) for row, view in enumerate(figures)}
    named = outliers(views, 0.8)
    assert [*named] == found
    assert named == {row: views[row] for row in found}


@pytest.mark.parametrize(
    ("gains", "varies"),
    [
        ([1.0] * 20, None),
        ([0.94, 1.06] * 3, None),  # too few to tell
        ([0.97, 1.03] * 10, None),
        ([0.94, 1.06] * 10, "9 %"),
        ([1.2, 1.3] * 4 + [1.25] * 2, "6 %"),
        ([1.0] * 17 + [0.5, 0.4, 2.0], None),  # these are outliers
        ([0.94, 1.06] * 10 + [0.0], "9 %"),  # black images have no logarithm
    ],
)
def test_exposures_vary_by_the_median_deviation_of_gains(gains: list[float], varies: str | None) -> None:
    note = exposure_note({row: ViewError(0.1, 0.5, gain) for row, gain in enumerate(gains)})
    assert (note is None) == (varies is None)
    assert f"by {varies} (standard" in (note or f"by {varies} (standard")


def config(**settings: Any) -> Config:
    return with_settings(Config(), {name.replace("__", "."): value for name, value in settings.items()})


@pytest.mark.parametrize(
    ("settings", "views", "steps"),
    [
        ({}, 100, [12000, 21000]),
        ({"schedule__lr_steps": 3000}, 100, [1200, 2100]),
        ({"schedule__lr_steps": 3000}, 300, [1500, 2100]),  # after five passes
        ({"schedule__lr_steps": 3000}, 500, [2500]),
        ({"schedule__lr_steps": 3000, "train__batch_size": 2}, 300, [1200, 2100]),
        ({"schedule__lr_steps": 3000}, 7, []),
        ({"schedule__lr_steps": 3000, "train__max_view_error": 0.0}, 100, []),
        ({"schedule__lr_steps": 3000, "views__pose_opt": True}, 100, []),
        ({"schedule__lr_steps": 3000, "data__blocks": "2x1", "data__block": 0}, 100, []),
    ],
)
def test_views_are_compared_twice(settings: dict[str, Any], views: int, steps: list[int]) -> None:
    chosen = config(**settings)
    due = [comparisons_due(chosen, views, step) for step in range(chosen.schedule.lr_steps + 1)]
    assert [step for step in range(1, len(due)) if due[step] > due[step - 1]] == steps


def test_a_shorter_schedule_brings_the_comparisons_forward() -> None:
    long, short = config(schedule__lr_steps=3000), config(schedule__lr_steps=2000)
    assert comparisons_due(long, 100, 1000) == 0
    assert comparisons_due(short, 100, 1000) == 1


def textured(seed: int) -> torch.Tensor:
    noise = torch.rand(3, 12, 16, generator=torch.Generator().manual_seed(seed))
    return (
        torch.nn.functional.interpolate(noise[None], size=(90, 120), mode="bilinear")[0].permute(1, 2, 0).contiguous()
    )


def test_the_error_is_measured_in_that_of_a_shifted_image() -> None:
    image, other = textured(1), textured(2)
    one = view_error(image, image, None)
    assert one is not None
    assert one.difference == pytest.approx(0.0, abs=1e-6)
    assert one.gain == pytest.approx(1.0)
    assert one.error == pytest.approx(0.0, abs=1e-5)
    across, down = ssim(image[:, 1:].contiguous(), image[:, :-1].contiguous()), ssim(image[1:], image[:-1])
    assert one.of_shift == pytest.approx(1 - (across + down) / 2, abs=1e-6)
    wrong = view_error(other, image, None)
    assert wrong is not None
    assert wrong.of_shift == one.of_shift
    assert wrong.error > 5
    darker = view_error(image, image * 0.7, None)
    assert darker is not None
    assert darker.gain == pytest.approx(0.7)
    assert darker.difference < 0.15 * wrong.difference
    black = view_error(torch.zeros_like(image), image, None)
    assert black is not None
    assert black.gain == 1.0


def test_detail_is_that_of_the_image_over_the_render() -> None:
    image = torch.rand(90, 120, 3, generator=torch.Generator().manual_seed(1))
    soft = (image + image.roll(1, 0) + image.roll(1, 1) + image.roll((1, 1), (0, 1))) / 4
    one, other = view_error(image, soft, None), view_error(soft, image, None)  # of a render and its image
    assert one is not None
    assert other is not None
    assert one.detail < 0.3
    assert one.detail == pytest.approx(1 / other.detail, rel=1e-5)
    doubled = view_error(0.5 * image, image, None)
    assert doubled is not None
    assert doubled.detail == pytest.approx(4.0, rel=1e-5)
    flat = torch.full_like(image, 0.5)
    same = view_error(flat, flat, None)
    assert same is not None
    assert same.detail == 1.0


def test_images_of_little_detail_are_blurred_the_most_blurred_first() -> None:
    details = [1.4, 0.5, 2.0, 0.3, 0.61, 1.0, 1.0, 1.0]
    views = {row: ViewError(0.1, 0.5, 1.0, detail) for row, detail in enumerate(details)}
    assert blurred(views) == [3, 1]
    assert blurred({row: views[row] for row in range(7)}) == []


def test_masked_pixels_do_not_count() -> None:
    image, masked = textured(1), torch.zeros(90, 120, dtype=torch.bool)
    masked[:, 60:] = True
    spoiled = image.clone()
    spoiled[:, 60:] = textured(2)[:, 60:] * 0.5
    assert view_error(spoiled, image, masked) == view_error(image, image, masked)
    assert view_error(image, image, torch.ones_like(masked)) is None
    masked[:, 1:] = True  # nothing is left beside its shifted self
    assert view_error(image, image, masked) is None
    assert view_error(image[:1], image[:1], None) is None


@pytest.mark.parametrize(("size", "divisor"), [((1, 1), 1), ((320, 240), 1), ((321, 240), 2), ((1600, 1200), 8)])
def test_large_images_are_compared_at_a_smaller_size(size: tuple[int, int], divisor: int) -> None:
    assert compared_divisor(*size) == divisor


def test_the_second_comparison_brings_a_view_back() -> None:
    """Between the two, training takes the other views alone; the message at the end of them says so."""
    scene = made_scene(12)
    views = len(scene.train)
    config = short_config(10 * views, schedule={"lr_steps": 10 * views})
    trainer = Trainer.start(
        config,
        scene,
        run_dir=MemoryRun(),  # type: ignore[arg-type]
        engine=PlainEngine(),
        renderer=plain_renderer,
    )
    sound, spoiled = ViewError(*GOOD), ViewError(0.9, 0.5, 1.0)
    found = iter([dict.fromkeys(range(views), sound) | {3: spoiled}, dict.fromkeys(range(views), sound)])
    trainer.scorer.view_errors = lambda state: next(found)  # type: ignore[method-assign]
    compared, used = [], []
    for event in trainer.run():
        if isinstance(event, ViewsCompared):
            compared.append(event)
            trainer.stepper.view_losses.clear()
        elif isinstance(event, Stepped) and event.step == 7 * views - 1:
            used = sorted(trainer.stepper.view_losses)
    names = [scene.cameras[view].name for view in scene.train]
    assert compared == [
        ViewsCompared(5 * views, {names[3]: spoiled}, views),
        ViewsCompared(7 * views, {}, views),
    ]
    assert used == sorted(name for name in names if name != names[3])
    assert sorted(trainer.stepper.view_losses) == sorted(names)
    first, second = (describe_event(event) for event in compared)
    assert first is not None
    assert first.endswith(f"1 of {views} training views does not fit the others, and is left out: {names[3]}")
    assert second == f"step {7 * views}: all {views} training views are used again"
