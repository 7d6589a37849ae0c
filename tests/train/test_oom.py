"""A run that runs out of memory goes on smaller, and its end tells the truth."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from splatcli.checkpoint.state import Checkpoint
from splatcli.config import Config
from splatcli.errors import DeviceFaultError, ResourceError
from splatcli.gaussians import Gaussians
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.step_inputs import StepInputs
from splatcli.train.events import Alarmed, Evaluated, Event, RolledBack, Stepped, Stopped
from splatcli.train.recovery import most_opaque_rows
from splatcli.train.sharding import shard_of
from splatcli.train.state import Placement
from splatcli.train.trainer import Trainer
from tests.train.worlds import (
    MemoryRun,
    PlainEngine,
    made_scene,
    random_gaussians,
    short_config,
    start_plain,
)

#: What a lack of memory looks like: the rasterizer's budget, torch on a GPU, its driver, Python, torch on a CPU.
SHORTAGES: tuple[Callable[[], Exception], ...] = (
    lambda: ResourceError("9.1 GiB wanted, 8.0 GiB allowed"),
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    lambda: torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
    MemoryError,
    lambda: RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
)


class SmallMachine(PlainEngine):
    """Has memory for ``most`` Gaussians only."""

    def __init__(self, most: int, error: Callable[[], Exception] = SHORTAGES[0]) -> None:
        super().__init__()
        self.most, self.error = most, error

    def step(self, gaussians: Gaussians, adam: AdamState, inputs: StepInputs) -> float:
        if len(gaussians) > self.most:
            raise self.error()
        return super().step(gaussians, adam, inputs)


def growing(iterations: int = 40, **sections: dict[str, object]) -> Config:
    """20 Gaussians become more than 40."""
    strategy = {"grow_grad2d": 1e-9, "prune_opacity": 1e-6, "grow_scale3d": 0.06}
    return short_config(iterations, **{"strategy": strategy, "save": {"steps": (8, 18, 28)}, **sections})


def counts(happened: list[Event]) -> list[int]:
    return [event.num_gaussians for event in happened if isinstance(event, Stepped)]


def test_the_made_run_grows_beyond_what_the_small_machine_holds() -> None:
    assert max(counts(list(start_plain(growing(), MemoryRun()).run()))) > 40


@pytest.mark.parametrize("error", SHORTAGES, ids=["budget", "cuda", "driver", "python", "cpu"])
def test_a_run_that_outgrows_the_memory_ends_smaller(error: Callable[[], Exception]) -> None:
    run = MemoryRun()
    trainer = start_plain(growing(), run, SmallMachine(30, error))
    happened = list(trainer.run())
    back = [event for event in happened if isinstance(event, RolledBack)]
    assert back
    assert {event.cause for event in back} == {"memory"}
    assert "going on with strategy.cap_max" in back[0].text
    cap = trainer.state.config.strategy.cap_max
    assert cap is not None
    assert len(trainer.state.gaussians) <= min(cap, 30)
    last = happened[-1]
    assert isinstance(last, Stopped)
    assert (last.step, last.reason) == (40, "finished")
    assert run.saved[40].step == run.saved[40].adam_step == 40
    assert run.saved[40].config.strategy.cap_max == run.configs[-1].strategy.cap_max == cap
    assert any(isinstance(event, Evaluated) for event in happened)


def test_a_gpu_that_has_failed_is_no_lack_of_memory() -> None:
    trainer = start_plain(growing(), MemoryRun(), SmallMachine(30, lambda: DeviceFaultError("cuda:0 has failed")))
    happened = []
    with pytest.raises(DeviceFaultError, match="cuda:0 has failed"):
        happened.extend(trainer.run())
    assert not any(isinstance(event, RolledBack) for event in happened)


def test_the_cap_is_nine_tenths_of_what_a_step_was_done_with() -> None:
    run = MemoryRun()
    happened = list(start_plain(growing(12), run, SmallMachine(20)).run())
    (back,) = [event for event in happened if isinstance(event, RolledBack)]
    assert (back.step, back.from_step) == (8, 10)
    assert max(counts(happened)) > 20  # step 11 was the first with so many, and failed
    assert run.saved[12].config.strategy.cap_max == 18
    assert len(run.saved[12].gaussians) == 18


def test_without_a_single_step_the_run_ends_at_once() -> None:
    run = MemoryRun()
    with pytest.raises(ResourceError, match="at step 0, with 20 Gaussians") as caught:
        list(start_plain(growing(), run, SmallMachine(19)).run())
    assert caught.value.exit_code == 4


def test_a_machine_that_shrinks_and_shrinks_ends_the_run_at_its_true_step() -> None:
    class Shrinking(SmallMachine):
        def step(self, gaussians: Gaussians, adam: AdamState, inputs: StepInputs) -> float:
            if adam.step == 20:
                self.most = 0
            return super().step(gaussians, adam, inputs)

    run = MemoryRun()
    happened: list[Event] = []
    with pytest.raises(ResourceError, match=r"at step 18, with \d+ Gaussians"):
        happened.extend(start_plain(growing(), run, Shrinking(99)).run())
    assert max(run.saved) == 18


def test_an_older_state_with_more_than_the_cap_loses_its_most_transparent_ones() -> None:
    class Stubborn(SmallMachine):
        """The count does not matter: the first attempt at step 19 fails."""

        failed = False

        def step(self, gaussians: Gaussians, adam: AdamState, inputs: StepInputs) -> float:
            if adam.step == 18 and not self.failed:
                self.failed = True
                raise MemoryError
            return super().step(gaussians, adam, inputs)

    run = MemoryRun()
    trainer = start_plain(growing(22), run, Stubborn(99))
    happened: list[Event] = []
    for event in trainer.run():
        happened.append(event)
        if isinstance(event, RolledBack):
            before, after = run.saved[18].gaussians.logit_opacities, trainer.state.gaussians.logit_opacities
            assert event.num_gaussians == len(after) == int(0.9 * len(before))
            assert float(after.min()) >= float(before.sort().values[len(before) - len(after)])
            assert "most transparent" in event.text
    assert any(isinstance(event, RolledBack) for event in happened)


def test_the_most_opaque_are_kept_in_their_order() -> None:
    gaussians = random_gaussians(9)
    gaussians.logit_opacities = torch.tensor([3.0, 1.0, 2.0, 2.0, 5.0, 2.0, 0.0, 9.0, 2.0])
    assert most_opaque_rows(gaussians, 5).tolist() == [0, 2, 3, 4, 7]


@pytest.mark.parametrize("placement", [Placement(), Placement(shards=3, rank=0), Placement(shards=3, rank=2)])
def test_rows_that_are_kept_keep_moments_and_statistics(placement: Placement) -> None:
    run = MemoryRun()
    list(Trainer.start(short_config(train={"filter_3d": True}), made_scene(), run_dir=run, engine=PlainEngine()).run(8))  # type: ignore[arg-type]
    whole, kept = run.saved[8], torch.tensor([1, 2, 5, 9, 11, 12, 19])
    state = shard_of(whole, placement, kept)
    rows = kept if state.shard is None else kept[state.shard.rows]
    assert len(state.gaussians) == len(rows) > 0
    assert state.count == 7
    for name, tensor in whole.gaussians.items():
        first, second = whole.moments[name]  # type: ignore[index]
        assert torch.equal(getattr(state.gaussians, name), tensor[rows])
        assert torch.equal(getattr(state.adam.exp_avg, name), first[rows])
        assert torch.equal(getattr(state.adam.exp_avg_sq, name), second[rows])
    assert torch.equal(state.stats.count, whole.strategy["count"][rows])  # type: ignore[index]
    assert torch.equal(state.columns.filter_3d, whole.columns.filter_3d[rows])  # type: ignore[arg-type, index]
    assert torch.equal(state.adam.sh_last_step, whole.sh_last_step[rows])  # type: ignore[index]


def test_what_failed_is_freed_before_the_older_state_is_read() -> None:
    alive: list[bool] = []

    class WatchedRun(MemoryRun):
        lost: weakref.ref[Tensor] | None = None

        def newest(self) -> Checkpoint | None:
            assert self.lost is not None
            alive.append(self.lost() is not None)
            return super().newest()

    run = WatchedRun()
    trainer = start_plain(growing(), run, SmallMachine(30))
    for event in trainer.run():
        if isinstance(event, Stepped):
            run.lost = weakref.ref(trainer.state.gaussians.means)
    assert alive
    assert not any(alive)


def test_another_error_is_not_taken_for_a_lack_of_memory() -> None:
    engine = SmallMachine(30, lambda: RuntimeError("index out of range"))
    with pytest.raises(RuntimeError, match="index out of range"):
        list(start_plain(growing(), MemoryRun(), engine).run())


@pytest.mark.parametrize("error", SHORTAGES, ids=["budget", "cuda", "driver", "python", "cpu"])
def test_a_run_whose_views_cannot_be_scored_is_done_all_the_same(error: Callable[[], Exception]) -> None:
    run = MemoryRun()
    trainer = start_plain(growing(12, guard={"probe_every": 5}), run)

    def draw(*args: object, **rest: object) -> Tensor:
        raise error()

    trainer.scorer.renderer = draw
    happened: list[Event] = []
    with pytest.raises(ResourceError):
        happened.extend(trainer.run())
    assert isinstance(happened[-1], Stopped)
    assert (happened[-1].step, happened[-1].reason) == (12, "finished")
    assert [event.step for event in happened if isinstance(event, Alarmed)] == [5, 10, 12]
    assert run.saved[12].step == 12
