"""The trainer with an engine that runs some steps behind: the same story, the same bits, nothing saved half done."""

from __future__ import annotations

import math
from collections import deque

import pytest

from splatcli.checkpoint.state import Checkpoint
from splatcli.errors import DivergedError
from splatcli.gaussians import GROUPS, Gaussians
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.step_inputs import StepInputs
from splatcli.train.events import Event, RolledBack, Stepped
from tests.train.worlds import MemoryRun, PlainEngine, short_config, start_plain


class AsyncPlainEngine(PlainEngine):
    """Does each step only when two more have come, or when it is drained."""

    def __init__(self, breaks_at: int = 0) -> None:
        super().__init__()
        self.waiting: deque[tuple[Gaussians, AdamState, StepInputs]] = deque()
        self.breaks_at = breaks_at

    def submit(self, gaussians: Gaussians, adam: AdamState, inputs: StepInputs) -> list[float]:
        self.waiting.append((gaussians, adam, inputs))
        return self._work(2)

    def drain(self) -> list[float]:
        return self._work(0)

    def _work(self, behind: int) -> list[float]:
        losses = []
        while len(self.waiting) > behind:
            losses += super().submit(*self.waiting.popleft())
            if len(self.calls) == self.breaks_at:
                losses[-1] = math.nan
        return losses


def story(
    engine: PlainEngine, stop_at: int | None = None, **sections: dict[str, object]
) -> tuple[list[Event], MemoryRun]:
    run = MemoryRun()
    trainer = start_plain(short_config(30, train={"eval_every": 7}, save={"steps": (4, 17)}, **sections), run, engine)
    return list(trainer.run(stop_at=stop_at)), run


def bits(checkpoint: Checkpoint) -> dict[str, bytes]:
    assert checkpoint.moments is not None
    out = {name: getattr(checkpoint.gaussians, name).numpy().tobytes() for name in GROUPS}
    for name, pair in checkpoint.moments.items():
        out |= {f"{name}.{i}": moment.numpy().tobytes() for i, moment in enumerate(pair)}
    return out


@pytest.mark.parametrize("stop_at", [None, 1, 11])
def test_an_engine_behind_tells_the_same_story_and_saves_the_same_bits(stop_at: int | None) -> None:
    reported, run = story(AsyncPlainEngine(), stop_at)
    expected, twin = story(PlainEngine(), stop_at)
    assert reported == expected
    assert run.metrics == twin.metrics
    assert run.saved.keys() == twin.saved.keys()
    for step, checkpoint in run.saved.items():
        assert checkpoint.step == step
        assert bits(checkpoint) == bits(twin.saved[step])


def test_a_loss_that_is_no_number_is_blamed_on_its_own_step() -> None:
    engine = AsyncPlainEngine(breaks_at=6)
    with pytest.raises(DivergedError, match="loss is nan at step 6"):
        story(engine, guard={"max_rollbacks": 0})
    assert len(engine.calls) <= 8, "training ends as soon as the loss is known"


def test_steps_on_their_way_do_not_reach_the_state_that_a_run_goes_back_to() -> None:
    engine = AsyncPlainEngine(breaks_at=6)
    reported, run = story(engine)
    (back,) = [event for event in reported if isinstance(event, RolledBack)]
    assert (back.step, back.from_step) == (4, 6), "the evaluation after step 7 waits for step 6 first"
    steps = [event.step for event in reported if isinstance(event, Stepped)]
    assert steps[-26:] == list(range(5, 31))
    assert run.saved[30].adam_step == 30


def test_steps_are_reported_once_each_and_in_order() -> None:
    reported, _ = story(AsyncPlainEngine())
    assert [event.step for event in reported if isinstance(event, Stepped)] == list(range(1, 31))
