"""A run that diverges goes back, goes on differently, and gives up after three times with all that is known."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from splatcli.checkpoint.run_dir import RunDir
from splatcli.checkpoint.state import Checkpoint
from splatcli.config import Config, GuardConfig, with_settings
from splatcli.errors import DivergedError, SceneError
from splatcli.gaussians import GROUPS, Gaussians
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.step_inputs import StepInputs
from splatcli.scene.camera import Camera
from splatcli.scene.images import LoadedImage
from splatcli.train import monitor
from splatcli.train.events import Alarmed, Event, Probed, Refined, Rescheduled, RolledBack, Saved, Stepped, Stopped
from splatcli.train.monitor import FiniteMonitor, QualityMonitor, StepDivergedError, check_refinement
from splatcli.train.trainer import Trainer
from tests.train.worlds import (
    MadeImages,
    MemoryRun,
    PlainEngine,
    copied,
    made_scene,
    plain_renderer,
    random_adam,
    random_gaussians,
    resume_plain,
    short_config,
    start_plain,
)


class PoisonedEngine(PlainEngine):
    """Breaks something at chosen steps of Adam, each time ``times`` times; tells ``loss`` of these steps."""

    def __init__(self, poison: Callable[[Gaussians, AdamState], object], at: int, *, times: int = 1) -> None:
        super().__init__()
        self.poison, self.at, self.times = poison, at, times
        self.loss: float | None = None

    def step(self, gaussians: Gaussians, adam: AdamState, inputs: StepInputs) -> float:
        loss = super().step(gaussians, adam, inputs)
        if adam.step == self.at and self.times:
            self.times -= 1
            self.poison(gaussians, adam)
            return loss if self.loss is None else self.loss
        return loss if math.isfinite(loss) else 0.5  # the rasterizer culls what is not finite


def break_mean(gaussians: Gaussians, adam: AdamState) -> None:
    gaussians.means[3, 1] = math.nan


def break_moment(gaussians: Gaussians, adam: AdamState) -> None:
    adam.exp_avg_sq.shN[2, 0, 1] = math.inf


def config_of(iterations: int = 20, **sections: dict[str, object]) -> Config:
    return short_config(iterations, **{"save": {"steps": (5,)}, **sections})


def rollbacks(happened: list[Event]) -> list[RolledBack]:
    return [event for event in happened if isinstance(event, RolledBack)]


def test_a_loss_that_is_no_number_brings_the_run_back_and_it_ends() -> None:
    engine, run = PoisonedEngine(break_mean, 8), MemoryRun()
    engine.loss = math.nan
    happened = list(start_plain(config_of(), run, engine).run())
    (back,) = rollbacks(happened)
    assert (back.step, back.from_step, back.cause) == (5, 7, "diverged")
    assert "loss is nan at step 8 on view 'view_0" in back.text
    assert "means of 1 Gaussians (first: 3)" in back.text
    assert isinstance(happened[-1], Stopped)
    assert (happened[-1].step, happened[-1].reason) == (20, "finished")
    assert [event.step for event in happened if isinstance(event, Stepped)] == [*range(1, 8), *range(6, 21)]
    assert run.rewound == [5]


def test_going_on_is_slower_and_meets_the_views_in_another_order() -> None:
    engine, run = PoisonedEngine(break_mean, 8), MemoryRun()
    engine.loss = math.nan
    config = config_of()
    before = (config.optim.means_lr, config.optim.means_lr_final)
    trainer = start_plain(config, run, engine)
    list(trainer.run())
    extent = trainer.state.dataset.extent
    first, second = engine.calls[:8], engine.calls[8:]
    assert [call["view"] for call in first[5:]] != [call["view"] for call in second[:3]]
    for lrs, step in ((first[6]["lrs"], 7), (second[1]["lrs"], 7)):
        assert lrs["means"] == pytest.approx(  # type: ignore[index]
            (1.0 if lrs is first[6]["lrs"] else 0.5) * extent * before[0] * 0.01 ** (step / 20), rel=1e-9
        )
    stored = run.saved[20].config.optim
    assert (stored.means_lr, stored.means_lr_final) == (0.5 * before[0], 0.5 * before[1])
    assert run.configs[-1] == trainer.state.config
    # A pass over the views that begins at the checkpoint's step holds each of them once.
    assert len({call["view"] for call in second[:4]}) == 4


@pytest.mark.parametrize("poison", [break_mean, break_moment])
def test_a_number_that_is_not_finite_is_found_though_the_loss_is(
    poison: Callable[[Gaussians, AdamState], None],
) -> None:
    engine, run = PoisonedEngine(poison, 8), MemoryRun()
    happened = list(start_plain(config_of(guard={"finite_every": 3}), run, engine).run())
    (back,) = rollbacks(happened)
    assert (back.step, back.from_step) == (5, 9)
    assert "not finite after step 9" in back.text
    (report,) = run.reports.values()
    broken = {name: facts for name, facts in report["tensors"].items() if facts["broken_rows"]}
    assert ("means" if poison is break_mean else "exp_avg_sq.shN") in broken


def test_a_save_that_finds_nan_writes_nothing_and_goes_back(tmp_path: Path) -> None:
    engine = PoisonedEngine(break_moment, 8)
    config = config_of(12, save={"steps": (5, 9)}, guard={"finite_every": 0})
    with RunDir.create(tmp_path / "run") as run:
        happened = list(start_plain(config, run, engine).run())
    (back,) = rollbacks(happened)
    assert (back.step, back.from_step) == (5, 9)
    assert "adam.exp_avg_sq._features_rest has 1 NaN or infinite values" in back.text
    assert [event.step for event in happened if isinstance(event, Saved)] == [0, 5, 9, 12]


def test_nan_in_the_last_steps_is_found_at_the_end() -> None:
    engine, run = PoisonedEngine(break_mean, 20), MemoryRun()
    happened = list(start_plain(config_of(guard={"finite_every": 20}), run, engine).run())
    assert len(rollbacks(happened)) == 1
    assert all(bool(tensor.isfinite().all()) for _, tensor in run.saved[20].gaussians.items())


class RefusingRun(MemoryRun):
    """Finds a state that must not be kept in its first checkpoint of step 7."""

    refused = False

    def save(self, checkpoint: Checkpoint) -> Path:
        if checkpoint.step == 7 and not self.refused:
            self.refused = True
            raise DivergedError("not written")
        return super().save(checkpoint)


def test_a_new_length_that_was_asked_for_before_a_rollback_does_not_undo_it() -> None:
    config, run = config_of(save={"steps": (5, 7)}), RefusingRun()
    trainer = start_plain(config, run)
    happened = []
    for event in trainer.run():
        happened.append(event)
        if isinstance(event, Stepped) and event.step == 7 and not run.refused:
            trainer.reschedule(with_settings(trainer.next_config, {"train.iterations": 25}))
    (back,) = rollbacks(happened)
    assert (back.step, back.from_step) == (5, 7)
    assert [(event.step, event.iterations) for event in happened if isinstance(event, Rescheduled)] == [(5, 25)]
    stored = run.saved[25].config
    assert (stored.train.iterations, stored.optim.means_lr) == (25, 0.5 * config.optim.means_lr)


def test_three_times_is_enough_and_the_error_tells_where_to_look(tmp_path: Path) -> None:
    engine = PoisonedEngine(break_mean, 8, times=99)
    engine.loss = math.inf
    happened: list[Event] = []
    with RunDir.create(tmp_path / "run") as run:
        trainer = start_plain(config_of(), run, engine)
        with pytest.raises(DivergedError) as caught:
            happened.extend(trainer.run())
    assert caught.value.exit_code == 10
    assert "the run went back 3 times before" in caught.value.what
    assert f"splat resume {tmp_path / 'run'} --set optim.means_lr=" in str(caught.value.remedy)
    assert str(tmp_path / "run" / "diverged_000007.json") in str(caught.value.remedy)
    report = json.loads((tmp_path / "run" / "diverged_000007.json").read_text())
    assert (report["step"], report["loss"]) == (8, "inf")
    assert report["view"].startswith("view_0")
    facts = report["tensors"]["means"]
    assert facts["broken_rows"] == 1
    assert facts["first"][0]["row"] == 3
    assert facts["first"][0]["values"][1] == "nan"
    assert facts["min"] < facts["max"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "rollback"] == [5, 5, 5]


def test_each_time_at_the_same_checkpoint_is_slower_than_the_last() -> None:
    engine, run = PoisonedEngine(break_mean, 8, times=3), MemoryRun()
    engine.loss = math.nan
    config = config_of()
    before = config.optim.means_lr
    trainer = start_plain(config, run, engine)
    happened = list(trainer.run())
    assert [back.step for back in rollbacks(happened)] == [5, 5, 5]
    assert trainer.state.config.optim.means_lr == pytest.approx(before / 8, rel=1e-12)
    orders = [[call["view"] for call in engine.calls[i : i + 3]] for i in (5, 8, 11, 14)]
    assert len({tuple(order) for order in orders}) > 1
    assert isinstance(happened[-1], Stopped)


def test_no_rollback_may_be_asked_for() -> None:
    engine, run = PoisonedEngine(break_mean, 8), MemoryRun()
    engine.loss = math.nan
    with pytest.raises(DivergedError, match="loss is nan at step 8"):
        list(start_plain(config_of(guard={"max_rollbacks": 0}), run, engine).run())
    assert sorted(run.saved) == [0, 5]


def test_a_run_resumed_after_a_rollback_has_the_bits_of_one_that_went_on() -> None:
    def poisoned() -> tuple[Trainer, MemoryRun]:
        engine, run = PoisonedEngine(break_mean, 8), MemoryRun()
        engine.loss = math.nan
        return start_plain(config_of(30), run, engine), run

    whole, whole_run = poisoned()
    list(whole.run())
    first, first_run = poisoned()
    list(first.run(stop_at=17))
    second_run = MemoryRun()
    second = resume_plain(first_run.saved[17], second_run)
    list(second.run())
    for name in GROUPS:
        assert torch.equal(getattr(second_run.saved[30].gaussians, name), getattr(whole_run.saved[30].gaussians, name))


def test_a_stop_right_after_a_rollback_saves_what_has_changed() -> None:
    engine, run = PoisonedEngine(break_mean, 8), MemoryRun()
    engine.loss = math.nan
    trainer = start_plain(config_of(), run, engine)
    asked: list[str] = []
    for event in trainer.run(should_stop=lambda: asked[0] if asked else None):
        if isinstance(event, RolledBack):
            asked.append("SIGTERM")
    assert run.saved[5].config.optim.means_lr == trainer.state.config.optim.means_lr
    assert run.saved[5].sampler == {"epoch": 3, "position": 0}


def test_a_rollback_returns_to_the_state_that_the_run_was_resumed_with() -> None:
    """With the settings, the loss and the photos that it has been given since its checkpoint was written."""
    run = MemoryRun()
    list(start_plain(config_of(), run).run(stop_at=8))
    saved = run.saved[8]
    assert saved.sh_last_step is not None
    saved.sh_last_step -= 3  # as of an engine that leaves out steps of shN
    config = with_settings(saved.config, {"optim.beta1": 0.5, "optim.shN_lr": 3 * saved.config.optim.shN_lr})
    scene = made_scene()
    photos: dict[str, str | int] = {"images": len(scene.cameras), "sha256": "other"}
    scene.fingerprint = lambda: photos  # type: ignore[method-assign]
    engine = PoisonedEngine(break_mean, 11)
    engine.loss = math.nan
    parts = {"engine": engine, "renderer": plain_renderer, "clock": lambda: 0.0}
    trainer = Trainer.resume(copied(saved), scene, run_dir=run, config=config, allowed={"photos"}, **parts)  # type: ignore[arg-type]
    trainer.state.loss = "own"
    before = bits(trainer.state.to_checkpoint())
    backs = 0
    for event in trainer.run():
        if isinstance(event, RolledBack):
            backs += 1
            assert event.step == 8
            assert bits(trainer.state.to_checkpoint()) == before
            assert trainer.state.adam.sh_last_step.tolist() == [8] * trainer.state.count
            assert trainer.state.adam.beta1 == trainer.state.config.optim.beta1 == 0.5
    assert backs == 1
    assert (run.saved[20].loss, run.saved[20].dataset.fingerprint) == ("own", photos)


def all_tensors(gaussians: Gaussians, adam: AdamState) -> Iterator[Tensor]:
    for bundle in (gaussians, adam.exp_avg, adam.exp_avg_sq):
        for _, tensor in bundle.items():
            yield tensor


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_broken_number_anywhere_is_seen(value: float) -> None:
    gaussians, adam = random_gaussians(7, degree=2), random_adam(random_gaussians(7, degree=2))
    FiniteMonitor().check(1, gaussians, adam)
    for tensor in all_tensors(gaussians, adam):
        for index in (0, tensor.numel() // 2, tensor.numel() - 1):
            before = float(tensor.view(-1)[index])
            tensor.view(-1)[index] = value
            with pytest.raises(StepDivergedError, match="not finite after step 100"):
                FiniteMonitor().check(100, gaussians, adam)
            tensor.view(-1)[index] = before


def test_huge_numbers_and_empty_tensors_are_no_divergence() -> None:
    gaussians = random_gaussians(4, degree=0)
    gaussians.means.fill_(3e38)
    FiniteMonitor().check(1, gaussians, AdamState.zeros_like(gaussians))
    empty = random_gaussians(0)
    FiniteMonitor().check(1, empty, AdamState.zeros_like(empty))


def test_extremes_of_what_lies_elsewhere_are_found_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "ROWS", 4)
    tensor = torch.randn(11, 3, 3, generator=torch.Generator().manual_seed(2))
    # Of one and the same memory, but another device by its name.
    here, elsewhere = (monitor._extremes(tensor, torch.device(name)) for name in ("cpu", "cpu:0"))
    assert torch.equal(here, torch.stack([tensor.min(), tensor.max()]))
    assert torch.equal(here, elsewhere)
    tensor[9, 1, 2] = math.nan
    assert bool(monitor._extremes(tensor, torch.device("cpu:0")).isnan().any())


def bits(checkpoint: Checkpoint) -> bytes:
    assert checkpoint.moments is not None
    parts = [getattr(checkpoint.gaussians, name) for name in GROUPS]
    parts += [moment for name in GROUPS for moment in checkpoint.moments[name]]
    return b"".join(part.numpy().tobytes() for part in parts)


def test_watching_changes_no_bit() -> None:
    ends = []
    for guard in ({"finite_every": 0, "probe_every": 0}, {"finite_every": 1, "probe_every": 1}):
        run = MemoryRun()
        list(start_plain(config_of(40, guard=guard), run).run())
        ends.append(bits(run.saved[40]))
    assert ends[0] == ends[1]


def test_probes_are_of_the_same_training_views_and_are_recorded() -> None:
    run = MemoryRun()
    trainer = start_plain(config_of(40, guard={"probe_every": 8, "probe_views": 2}), run)
    drawn: list[str] = []

    def draw(gaussians: Gaussians, camera: Camera, **rest: object) -> Tensor:
        drawn.append(camera.name)
        return plain_renderer(gaussians, camera, **rest)  # type: ignore[arg-type]

    trainer.scorer.renderer = draw
    happened = list(trainer.run())
    probes = [event for event in happened if isinstance(event, Probed)]
    assert [event.step for event in probes] == [8, 16, 24, 32]
    names = [trainer.scene.cameras[i].name for i in trainer.state.train]
    assert drawn[:8] == [names[0], names[2]] * 4
    assert [record["step"] for record in run.metrics if record["event"] == "probe"] == [8, 16, 24, 32]


STEADY = [(500, 20.0), (1000, 24.0), (1500, 26.0)]


@pytest.mark.parametrize(
    ("resets", "probes", "alarms"),
    [
        pytest.param([], STEADY, [], id="rising"),
        pytest.param([], [*STEADY, (2000, 23.1), (2500, 23.2)], [], id="a little lower"),
        pytest.param([], [*STEADY, (2000, 22.0), (2500, 25.0)], [], id="low once"),
        pytest.param([], [*STEADY, (2000, 22.0), (2500, 22.0)], [2500], id="low for long"),
        pytest.param([], [*STEADY, (1600, 22.0), (1700, 22.0), (1800, 21.0)], [], id="low for 200 steps"),
        pytest.param([], [*STEADY, (1600, 22.0), (1900, 22.0)], [1900], id="low for 300 steps"),
        pytest.param([], [*STEADY, (2000, math.nan), (2500, math.nan)], [2500], id="nan"),
        pytest.param([], [(s, math.nan) for s in range(500, 4001, 500)], [], id="masks hide all probe views"),
        pytest.param([], [*STEADY, *[(s, 12.0) for s in range(2000, 5001, 500)]], [2500], id="reported once"),
        pytest.param(
            [],
            [*STEADY, (2000, 12.0), (2500, 12.0), (3000, 26.0), (3500, 12.0), (4000, 12.0)],
            [2500, 4000],
            id="reported again after it was well",
        ),
        pytest.param([1500], [*STEADY, (2000, 12.0), (2500, 18.0), (3000, 26.0)], [], id="a reset"),
        pytest.param([1500], [*STEADY, *[(s, 12.0) for s in (2000, 2500, 3000, 3500)]], [3500], id="never recovered"),
        pytest.param(
            [1900], [*STEADY, (1800, 12.0), (2000, 12.0), (2500, 12.0), (3000, 25.0)], [], id="low, then reset"
        ),
    ],
)
def test_quality_that_falls_and_stays_low_is_reported(
    resets: list[int], probes: list[tuple[int, float]], alarms: list[int]
) -> None:
    watch = QualityMonitor(GuardConfig())
    reported = []
    for step, psnr in probes:
        for reset in resets:
            if reset < step and reset not in reported:
                reported.append(reset)
                watch.reset(reset)
        alarm = watch.check(Probed(step, psnr, 100))
        if alarm is not None:
            reported.append(-alarm.step)
            assert "low since step" in alarm.text
    assert [-step for step in reported if step < 0] == alarms


@pytest.mark.parametrize(("pruned", "alarmed"), [(0, False), (50, False), (51, True), (100, True)])
def test_many_gaussians_removed_at_once_are_reported(pruned: int, alarmed: bool) -> None:
    event = Refined(600, 100, 100, pruned, 300 - pruned)
    alarm = check_refinement(event, 100, GuardConfig())
    assert (alarm is not None) is alarmed
    if alarm is not None:
        assert f"{pruned} of 100 Gaussians" in alarm.text


class FailingImages(MadeImages):
    """Photos of which one can be read no more, after ``good`` loads."""

    def __init__(self, pixels: list[NDArray[np.uint8]], good: int) -> None:
        super().__init__(pixels)
        self.good = good

    def image(self, i: int) -> LoadedImage:
        if self.good == 0:
            raise SceneError("cannot read the photo: Stale file handle", where="a.png")
        self.good -= 1
        return super().image(i)


def test_a_photo_that_can_be_read_no_more_ends_the_run_with_its_state_saved() -> None:
    whole = MemoryRun()
    list(start_plain(config_of(20), whole).run())
    run = MemoryRun()
    trainer = start_plain(config_of(20), run)
    trainer.scene.images = FailingImages(trainer.scene.images.pixels, 13)  # type: ignore[attr-defined, assignment]
    with pytest.raises(SceneError, match="Stale file handle"):
        list(trainer.run())
    second_run = MemoryRun()
    second = resume_plain(run.saved[13], second_run)
    list(second.run())
    assert bits(second_run.saved[20]) == bits(whole.saved[20])


def test_a_run_without_gaussians_left_stops() -> None:
    with pytest.raises(DivergedError, match="no Gaussian is left"):
        list(start_plain(config_of(strategy={"prune_opacity": 0.999}), MemoryRun()).run())


def test_an_alarm_is_recorded_and_training_goes_on() -> None:
    run = MemoryRun()
    config = config_of(40, guard={"prune_jump": 0.01})
    happened = list(start_plain(config, run).run())
    alarms = [event for event in happened if isinstance(event, Alarmed)]
    assert alarms
    assert {alarm.alarm for alarm in alarms} == {"count"}
    assert [record["step"] for record in run.metrics if record["event"] == "alarm"] == [a.step for a in alarms]
    assert isinstance(happened[-1], Stopped)
