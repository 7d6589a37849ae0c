"""A given time: what is planned for it, how the plan is measured, and that the run keeps to it."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from splatcli.config import Config
from splatcli.errors import OutputError
from splatcli.gaussians import GROUPS
from splatcli.scene.camera import Camera
from splatcli.train.events import Evaluated, Rescheduled, Stepped, Stopped
from splatcli.train.step_time import (
    GAUSSIANS_PER_STEP,
    MEAN_SHARE,
    MIN_STEPS,
    StepTimeModel,
    TimePlanner,
    halvings_for,
    measure_scoring_time,
    measure_step_time,
    seconds_of,
)
from splatcli.train.trainer import Trainer
from splatcli.train.training_images import TrainingImage, TrainingImages, reduced
from tests.train.worlds import (
    MemoryRun,
    PlainEngine,
    made_scene,
    plain_renderer,
    random_gaussians,
    short_config,
    start_plain,
)


@pytest.mark.parametrize("seconds", [20.0, 60.0, 3600.0])
@pytest.mark.parametrize(("fixed", "each"), [(0.02, 3e-7), (0.002, 1e-9), (0.1, 1e-5)])
def test_a_plan_fills_its_time(fixed: float, each: float, seconds: float) -> None:
    steps, gaussians = StepTimeModel((fixed,), (each,)).plan(seconds, start=5_000, cap=None)
    spent = steps * (fixed + MEAN_SHARE * each * gaussians)
    assert spent <= seconds * 1.001
    assert spent > seconds * 0.99 - (fixed + each * gaussians)
    assert gaussians >= 5_000
    assert gaussians == 5_000 or gaussians == pytest.approx(GAUSSIANS_PER_STEP * steps, rel=0.01)


def test_a_cap_is_kept_and_leaves_more_time_for_steps() -> None:
    free, capped = (StepTimeModel((0.01,), (1e-6,)).plan(100.0, 1_000, cap) for cap in (None, 3_000))
    assert capped[1] == 3_000
    assert capped[0] > free[0]


def test_no_time_is_a_plan_for_few_steps() -> None:
    assert StepTimeModel((10.0,), (0.0,)).plan(1.0, 50, None)[0] == MIN_STEPS
    assert StepTimeModel((10.0,), (0.0,)).plan(-5.0, 50, None)[0] == MIN_STEPS


def test_the_pace_is_measured_with_few_and_with_many_and_changes_nothing() -> None:
    gaussians, engine = random_gaussians(30), PlainEngine()
    before = gaussians.detach_clone()
    ticks = count()

    def clock() -> float:
        """A step takes 2 ms and 1 ms more for each Gaussian."""
        next(ticks)
        return sum(0.002 + 0.001 * call["count"] for call in calls)

    calls: list[dict[str, int]] = []

    class Counting(PlainEngine):
        def step(self, gaussians, adam, inputs):  # type: ignore[no-untyped-def]
            calls.append({"count": len(gaussians)})
            return super().step(gaussians, adam, inputs)

    engine = Counting()
    pace = measure_step_time(short_config(), made_scene(), gaussians, engine, clock)
    assert pace.fixed == pytest.approx((0.002,))
    assert pace.each == pytest.approx((0.001,))
    assert {call["count"] for call in calls} == {30, 120}
    for name in GROUPS:
        assert torch.equal(getattr(gaussians, name), getattr(before, name))


COARSE = StepTimeModel((0.01, 0.004, 0.002), (1e-6, 3e-7, 1e-7))


def test_steps_of_halved_images_come_first_and_count_as_long_as_they_take() -> None:
    assert [COARSE.step(0, part) for part in (0.0, 0.19, 0.21, 0.39, 0.41, 1.0)] == [
        0.002, 0.002, 0.004, 0.004, 0.01, 0.01
    ]  # fmt: skip
    assert COARSE.mean_step(0) == pytest.approx(0.2 * 0.002 + 0.2 * 0.004 + 0.6 * 0.01)
    assert COARSE.mean_step(0, 0.3) == pytest.approx((0.1 * 0.004 + 0.6 * 0.01) / 0.7)
    steps, _ = COARSE.plan(60.0, 1_000, 1_000)
    spent = sum(COARSE.step(MEAN_SHARE * 1_000, step / steps) for step in range(steps))
    assert spent == pytest.approx(60.0, rel=0.01)
    for done in (0, steps // 10, steps // 2):
        left = sum(COARSE.step(500, step / steps) for step in range(done, steps))
        assert COARSE.fill(left, done, 500) == pytest.approx(steps, rel=0.01)


@pytest.mark.parametrize(("sides", "halvings"), [((60, 500), 0), ((130, 236), 1), ((400, 400), 2), ((4000, 6000), 2)])
def test_images_are_halved_while_something_is_left_to_be_seen(sides: tuple[int, int], halvings: int) -> None:
    scene = made_scene()
    scene.cameras = [camera.resized(*sides) for camera in scene.cameras]
    assert halvings_for(scene) == halvings


@pytest.mark.parametrize(
    ("early", "late"),
    [(1.0, 1.0), (4.0, 4.0), (0.2, 0.2), (5.0, 0.5), (0.5, 2.0)],
    ids=["as measured", "slower", "faster", "slow only at first", "fast only at first"],
)
@pytest.mark.parametrize("guess", [StepTimeModel((0.01,), (1e-6,)), COARSE], ids=["one size", "coarse to fine"])
def test_a_run_fills_its_time_whatever_its_steps_turn_out_to_take(
    guess: StepTimeModel, early: float, late: float
) -> None:
    """early, late: how many times the measured seconds steps take in the first tenth of the time, and after it."""
    deadline, cap = 100.0, 20_000
    now, step, count = 0.0, 0, 5_000
    planned, _ = guess.plan(deadline, count, cap)
    planner = TimePlanner(guess, deadline, lambda: now)
    plans = [planned]
    while step < planned and now < deadline:
        now += (early if now < 0.1 * deadline else late) * guess.step(count, step / planned)
        step += 1
        count = min(cap, count + 5)
        planned = planner.replan(step, planned, count, cap) or planned
        plans.append(planned)
    assert step == planned, "the last step of the plan is done, not cut off"
    assert 0.9 * deadline < now <= deadline
    assert len(set(plans)) <= 16, "a few corrections, not one at every step"


@pytest.mark.parametrize("decoding", [0.01, 0.5], ids=["over soon", "long"])
def test_steps_that_decode_photos_tell_nothing_of_later_ones_unless_they_take_long(decoding: float) -> None:
    """decoding: seconds that each of the first 100 steps takes more than the planned 2 ms (COARSE)."""
    now, planned = 0.0, 5_000
    planner = TimePlanner(COARSE, 60.0, lambda: now, views=100)
    plans = []
    for step in range(1, 400):
        now += COARSE.step(5_000, step / planned) + (decoding if step <= 100 else 0.0)
        plans.append(planner.replan(step, planned, 5_000, 5_000))
    shorter = [plan for plan in plans if plan is not None and plan < 0.9 * planned]
    assert bool(shorter) == (decoding > 0.1)


def test_the_pace_counts_what_a_step_does_beside_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def slowly(targets: TrainingImages, view: int, divisor: int) -> tuple[Camera, TrainingImage]:
        now[0] += 0.003 * divisor
        return reduced(targets.scene.cameras[view], targets.load(view), divisor)

    monkeypatch.setattr(TrainingImages, "reduced", slowly)
    config = short_config(schedule={"num_downscales": 1})
    pace = measure_step_time(config, made_scene(size=32), random_gaussians(30), PlainEngine(), lambda: now[0])
    assert pace.fixed == pytest.approx((0.003, 0.006))


def test_a_plan_that_holds_changes_only_to_use_what_was_kept_back() -> None:
    now, planned = 0.0, 9_700
    planner = TimePlanner(StepTimeModel((0.01,), (0.0,)), 100.0, lambda: now)
    for step in range(1, 10_001):
        now += 0.01
        wanted = planner.replan(step, planned, 1_000, 1_000) or planned
        assert planned <= wanted < 10_000
        planned = wanted
        if step == planned:
            break
    assert step == planned > 9_850


def test_scoring_is_measured_with_a_held_out_view_the_second_time() -> None:
    ticks = iter([0.0, 50.0, 100.0, 102.0])
    assert measure_scoring_time(short_config(), made_scene(), random_gaussians(30), lambda: next(ticks)) == 2.0


def test_a_run_goes_on_with_another_length_and_tells_so() -> None:
    def refuse(config: Config) -> None:
        raise OutputError("could not write settings (disk full?)", where=run.path)

    run = MemoryRun()
    trainer = Trainer.start(
        short_config(40),
        made_scene(),
        run_dir=run,  # type: ignore[arg-type]
        engine=PlainEngine(),
        renderer=plain_renderer,
    )
    steps, rescheduled = [], []
    for event in trainer.run():
        if isinstance(event, Rescheduled):
            rescheduled.append(event)
        if isinstance(event, Stepped):
            steps.append(event.step)
            if event.step == 10:
                run.write_config = refuse  # type: ignore[method-assign]  # a full disk costs config.json, not the run
                trainer.reschedule(short_config(15))
    assert rescheduled == [Rescheduled(10, 15)]
    assert steps == list(range(1, 16))
    assert event == Stopped(15, "finished", event.path)  # type: ignore[union-attr]
    assert trainer.state.config.train.iterations == 15
    assert trainer.strategy.collects_stats(14)
    assert not trainer.strategy.collects_stats(15), "density control knows the new length"


def test_a_run_ends_at_its_deadline_saved_and_scored() -> None:
    ticks = count()
    run = MemoryRun()
    trainer = start_plain(short_config(40), run, clock=lambda: float(next(ticks)))
    events = list(trainer.run(deadline=60.0))
    done = [event.step for event in events if isinstance(event, Stepped)]
    last = events[-1]
    assert isinstance(last, Stopped)
    assert last.reason == "max-time"
    assert 0 < last.step == done[-1] < 40
    assert any(isinstance(event, Evaluated) for event in events)
    assert max(run.saved) == last.step


def test_the_last_scores_replace_those_of_the_same_step_before_it_was_refined() -> None:
    now, run = 0.0, MemoryRun()
    config = short_config(40, train={"eval_every": 5})
    trainer = start_plain(config, run, clock=lambda: now)
    for event in trainer.run(deadline=60.0):
        if isinstance(event, Evaluated) and event.step == 10:
            now = 99.0
    assert event == Stopped(10, "max-time", event.path)  # type: ignore[union-attr]
    assert [line["step"] for line in run.metrics if line["event"] == "eval"] == [5, 10]


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("60s", 60), ("5m", 300), ("1.5h", 5400), ("2D", 172800)])
def test_lengths_of_time(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "x", "-5s", "0", "nan", "inf", "1e999", "5 minutes"])
def test_what_is_no_length_of_time(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        seconds_of(text)
