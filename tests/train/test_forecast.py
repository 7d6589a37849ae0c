"""The steps left: the sum over a run that grows as a strategy allows, step by step, in units of the present step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from splatcli.config import Config, Schedule, StrategyConfig, TrainConfig, with_settings
from splatcli.train.densify import AdcStrategy, McmcStrategy
from splatcli.train.events import Stepped
from splatcli.train.forecast import PIXELS_PER_GAUSSIAN, Forecast, GrowingStrategy
from splatcli.train.schedule import image_divisor
from tests.train.worlds import MemoryRun, short_config, start_plain

PIXELS, ITERATIONS, CAP = 10_000.0, 3_000, 8_000
SCHEDULE = Schedule(refine_start=50, refine_stop=1_500, refine_every=30, num_downscales=2, resolution_schedule=250)


def strategy(name: str) -> AdcStrategy | McmcStrategy:
    settings, train = StrategyConfig(name=name, cap_max=CAP), TrainConfig(iterations=ITERATIONS)
    config = Config(strategy=settings, schedule=SCHEDULE, train=train)
    return McmcStrategy(config, 1.0) if name == "mcmc" else AdcStrategy(config, 1.0)


def cost(step: int, count: int) -> float:
    return PIXELS / image_divisor(SCHEDULE, step) ** 2 + PIXELS_PER_GAUSSIAN * count


@pytest.mark.parametrize("name", ["absgrad", "mcmc"])
def test_the_steps_left_are_those_of_a_run_that_grows_as_it_may(name: str) -> None:
    grows, forecast = strategy(name), Forecast(PIXELS)
    assert isinstance(grows, GrowingStrategy)
    counts = [1_000]
    for step in range(1, ITERATIONS + 1):
        counts.append(max(counts[-1], grows.grown(step, counts[-1])))
    assert counts[0] < counts[400] < counts[1_000] <= counts[1_600] == counts[-1] == CAP
    for step in (0, 1, 299, 749, 750, 1_470, 2_999):
        rest = sum(cost(later, counts[later - 1]) for later in range(step + 1, ITERATIONS + 1))
        left = forecast.steps_left(grows, SCHEDULE, ITERATIONS, step, counts[step])
        assert left == pytest.approx(rest / cost(step + 1, counts[step]), rel=1e-9)
    assert forecast.steps_left(grows, SCHEDULE, ITERATIONS, ITERATIONS, CAP) == 0.0


def test_between_two_forecasts_each_step_takes_one_off() -> None:
    grows, forecast = strategy("absgrad"), Forecast(PIXELS)
    left = [forecast.steps_left(grows, SCHEDULE, ITERATIONS, step, 1_000) for step in range(600, 610)]
    assert all(before - after == pytest.approx(1.0) for before, after in pairwise(left))
    assert left[0] > 1.3 * (ITERATIONS - 600)


def test_a_strategy_of_unknown_growth_stays_as_it_is() -> None:
    schedule = SCHEDULE.model_copy(update={"num_downscales": 0})
    unknown: Any = object()
    assert not isinstance(unknown, GrowingStrategy)
    assert Forecast(PIXELS).steps_left(unknown, schedule, ITERATIONS, 100, 1_000) == ITERATIONS - 100


class Doubling:
    """A strategy that knows no cap, as far as a forecast asks."""

    def __init__(self) -> None:
        self.asked = 0

    def grown(self, step: int, count: int) -> int:
        self.asked += 1
        return 2 * count


def test_a_forecast_of_a_run_without_an_end_in_sight_takes_no_more_work() -> None:
    grows: Any = Doubling()
    schedule = Schedule(refine_every=1, num_downscales=2, resolution_schedule=1)
    left = Forecast(PIXELS).steps_left(grows, schedule, 10**12, 5, 1_000)
    assert 0 < grows.asked <= 20_000
    assert 10**12 < left < float("inf")


def test_a_trainer_knows_what_is_left_of_its_run() -> None:
    config = with_settings(short_config(20), {"strategy.cap_max": 400})
    trainer = start_plain(config, MemoryRun())
    left = {0: trainer.steps_left()}
    for event in trainer.run():
        if isinstance(event, Stepped):
            left[event.step] = trainer.steps_left()
    assert left[20] == 0.0
    assert list(left.values()) == sorted(left.values(), reverse=True)
    assert all(found >= 20 - step for step, found in left.items())
    assert left[0] > 20
