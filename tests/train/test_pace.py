"""A given time: what is planned for it, how the plan is measured, and that the run keeps to it."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from splatcli.gaussians import GROUPS
from splatcli.train.events import Evaluated, Stepped, Stopped
from splatcli.train.loop import Trainer
from splatcli.train.pace import FEWEST_STEPS, GAUSSIANS_PER_STEP, MEAN_SHARE, Pace, measure_pace, seconds_of
from tests.train.worlds import MemoryRun, PlainEngine, made_scene, plain_renderer, random_gaussians, short_config


@pytest.mark.parametrize("seconds", [20.0, 60.0, 3600.0])
@pytest.mark.parametrize(("fixed", "each"), [(0.02, 3e-7), (0.002, 1e-9), (0.1, 1e-5)])
def test_a_plan_fills_its_time(fixed: float, each: float, seconds: float) -> None:
    steps, gaussians = Pace(fixed, each).plan(seconds, start=5_000, cap=None)
    spent = steps * (fixed + MEAN_SHARE * each * gaussians)
    assert spent <= seconds * 1.001
    assert spent > seconds * 0.99 - (fixed + each * gaussians)
    assert gaussians >= 5_000
    assert gaussians == 5_000 or gaussians == pytest.approx(GAUSSIANS_PER_STEP * steps, rel=0.01)


def test_a_cap_is_kept_and_leaves_more_time_for_steps() -> None:
    free, capped = (Pace(0.01, 1e-6).plan(100.0, 1_000, cap) for cap in (None, 3_000))
    assert capped[1] == 3_000
    assert capped[0] > free[0]


def test_no_time_is_a_plan_for_few_steps() -> None:
    assert Pace(10.0, 0.0).plan(1.0, 50, None)[0] == FEWEST_STEPS
    assert Pace(10.0, 0.0).plan(-5.0, 50, None)[0] == FEWEST_STEPS


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
    pace = measure_pace(short_config(), made_scene(), gaussians, engine, clock)
    assert pace.fixed == pytest.approx(0.002)
    assert pace.each == pytest.approx(0.001)
    assert {call["count"] for call in calls} == {30, 120}
    for name in GROUPS:
        assert torch.equal(getattr(gaussians, name), getattr(before, name))


def test_a_run_ends_at_its_deadline_saved_and_scored() -> None:
    ticks = count()
    run = MemoryRun()
    trainer = Trainer.start(
        short_config(40),
        made_scene(),
        run_dir=run,  # type: ignore[arg-type]
        engine=PlainEngine(),
        renderer=plain_renderer,
        clock=lambda: float(next(ticks)),
    )
    events = list(trainer.run(deadline=60.0))
    done = [event.step for event in events if isinstance(event, Stepped)]
    last = events[-1]
    assert isinstance(last, Stopped)
    assert last.reason == "max-time"
    assert 0 < last.step == done[-1] < 40
    assert any(isinstance(event, Evaluated) for event in events)
    assert max(run.saved) == last.step


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("60s", 60), ("5m", 300), ("1.5h", 5400), ("2D", 172800)])
def test_lengths_of_time(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "x", "-5s", "0", "nan", "inf", "1e999", "5 minutes"])
def test_what_is_no_length_of_time(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        seconds_of(text)
