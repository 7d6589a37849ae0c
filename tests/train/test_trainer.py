"""The loop: what happens in which order, what stops it, and that going on is the same as never having stopped."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from splatcli.checkpoint.state import Checkpoint
from splatcli.config import Config, with_settings
from splatcli.errors import SceneError, UsageError
from splatcli.gaussians import Gaussians
from splatcli.rasterizer.step_inputs import DensifyStats, Regularisation
from splatcli.scene.camera import Camera
from splatcli.scene.inspect import few_notes
from splatcli.scene.scene import Scene
from splatcli.train import events
from splatcli.train.densify import Refinement
from splatcli.train.evaluate import Renderer
from splatcli.train.events import Evaluated, Event, OpacityReset, Probed, Refined, Saved, Started, Stepped, Stopped
from splatcli.train.sharding import shard_of
from splatcli.train.state import Placement
from splatcli.train.trainer import Trainer
from tests.train.worlds import MemoryRun, PlainEngine, copied, made_scene, plain_renderer, short_config


class Clock:
    """Seconds that pass when advanced, or by a fixed amount at each reading."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def started(
    config: Config | None = None,
    scene: Scene | None = None,
    *,
    clock: Callable[[], float] | None = None,
    renderer: Renderer = plain_renderer,
) -> tuple[Trainer, MemoryRun, PlainEngine]:
    run, engine = MemoryRun(), PlainEngine()
    trainer = Trainer.start(
        config or short_config(),
        scene or made_scene(),
        run_dir=run,  # type: ignore[arg-type]
        engine=engine,
        renderer=renderer,
        clock=clock or Clock(),
    )
    return trainer, run, engine


def resumed(
    checkpoint: Checkpoint, scene: Scene | None = None, *, iterations: int | None = None
) -> tuple[Trainer, MemoryRun]:
    run = MemoryRun()
    trainer = Trainer.resume(
        checkpoint,
        scene or made_scene(),
        run_dir=run,  # type: ignore[arg-type]
        engine=PlainEngine(),
        renderer=plain_renderer,
        clock=Clock(),
        config=None if iterations is None else with_settings(checkpoint.config, {"train.iterations": iterations}),
    )
    return trainer, run


def digest(checkpoint: Checkpoint) -> str:
    """Of every bit that training goes on from."""
    assert checkpoint.moments is not None
    tensors: dict[str, Tensor] = dict(checkpoint.gaussians.items())
    for name, (first, second) in checkpoint.moments.items():
        tensors |= {f"{name}.first": first, f"{name}.second": second}
    tensors |= {f"strategy.{k}": v for k, v in checkpoint.strategy.items() if isinstance(v, Tensor)}
    tensors |= {f"rng.{k}": v for k, v in checkpoint.rng.items()}
    numbers = (checkpoint.step, checkpoint.adam_step, checkpoint.active_sh_degree, sorted(checkpoint.sampler.items()))
    scalars = sorted((k, v) for k, v in checkpoint.strategy.items() if not isinstance(v, Tensor))
    digest = hashlib.sha256(repr((numbers, scalars)).encode())
    for name in sorted(tensors):
        digest.update(f"{name}{tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


def trajectory(trainer: Trainer, happened: Iterable[Event]) -> dict[int, str]:
    """The digest of the state after each step."""
    return {
        event.step: digest(trainer.state.to_checkpoint()) for event in happened if isinstance(event, Started | Stepped)
    }


def kinds(happened: Iterable[Event], *wanted: type) -> list[tuple[str, int]]:
    return [(type(e).__name__, e.step) for e in happened if not wanted or isinstance(e, wanted)]


def test_the_whole_story_of_a_run() -> None:
    trainer, run, _ = started(short_config(20, train={"eval_every": 8}, save={"steps": (7, 20)}))
    happened = list(trainer.run())
    reported = [entry for entry in kinds(happened) if entry[0] != "Stepped"]
    assert reported == [
        ("Started", 0),
        ("Saved", 0),
        ("Saved", 7),
        ("Evaluated", 8),
        ("Refined", 10),
        ("Refined", 15),
        ("Evaluated", 16),
        ("Saved", 20),
        ("Evaluated", 20),
        ("Stopped", 20),
    ]
    assert [step for _, step in kinds(happened, Stepped)] == list(range(1, 21))
    first, last = happened[0], happened[-1]
    assert first == Started(0, 20, 20, 4, 2, "cpu", notes=tuple(few_notes(6, 20)))
    assert isinstance(last, Stopped)
    assert (last.reason, last.path.name) == ("finished", "ckpt_000020.pt")
    assert sorted(run.saved) == [0, 7, 20]


def test_events_of_one_step_come_in_order_and_agree_on_the_count() -> None:
    trainer, _, _ = started(short_config(40))
    happened = list(trainer.run())
    assert kinds(happened, OpacityReset) == [("OpacityReset", 12), ("OpacityReset", 24)]
    for before, event in pairwise(happened):
        if isinstance(event, Refined):
            assert isinstance(before, Stepped)
            assert (before.step, before.num_gaussians) == (event.step, event.num_gaussians)
    refined = [event for event in happened if isinstance(event, Refined)]
    assert [event.step for event in refined] == [10, 15, 20, 25, 30, 35]
    assert sum(event.cloned + event.split for event in refined) > 0
    assert sum(event.pruned for event in refined) > 0


def test_each_step_is_given_what_the_schedule_says() -> None:
    trainer, _, engine = started(short_config(40))
    list(trainer.run())
    assert [call["sh_degree"] for call in engine.calls] == [min(2, step // 9) for step in range(1, 41)]
    extent = trainer.state.dataset.extent
    rates = [call["lrs"]["means"] for call in engine.calls]  # type: ignore[index]
    expected = [extent * 1.6e-4 * 0.01 ** (step / 40) for step in range(1, 41)]
    assert rates == pytest.approx(expected, rel=1e-9)
    views = [call["view"] for call in engine.calls]
    train = {trainer.scene.cameras[i].name for i in trainer.state.train}
    assert all(set(views[i : i + 4]) == train for i in range(0, 40, 4))


@pytest.mark.parametrize(("name", "color"), [("black", 0.0), ("white", 1.0)])
def test_a_plain_background_is_that_colour_each_step(name: str, color: float) -> None:
    trainer, _, engine = started(short_config(3, train={"background": name}))
    list(trainer.run())
    assert all(call["background"].tolist() == [color] * 3 for call in engine.calls)  # type: ignore[attr-defined]


def test_a_random_background_is_new_each_step() -> None:
    trainer, _, engine = started(short_config(12))
    list(trainer.run())
    assert len({tuple(call["background"].tolist()) for call in engine.calls}) == 12  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "late"), [("black", 0.2), ("white", 0.0), ("random", 0.0)])
def test_the_alpha_term_comes_in_the_second_half_over_black(name: str, late: float) -> None:
    trainer, _, engine = started(short_config(12, train={"background": name}))
    list(trainer.run())
    assert [call["alpha_lambda"] for call in engine.calls] == [0.0] * 6 + [late] * 6  # type: ignore[attr-defined]
    # In masked pixels over any background.
    assert [call["mask_lambda"] for call in engine.calls] == [0.0] * 6 + [0.01] * 6  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def uninterrupted() -> dict[int, str]:
    """The digests of a run that nothing stops."""
    trainer, _, _ = started()
    return trajectory(trainer, trainer.run())


# Around a refinement (10), a reset (12, 24), an SH step (9, 18), an epoch's end (4), and in between.
@pytest.mark.parametrize("stop", [0, 1, 4, 8, 9, 10, 11, 12, 13, 17, 18, 23, 24, 25, 35, 39])
def test_a_resumed_run_has_the_same_bits_at_each_step(stop: int, uninterrupted: dict[int, str]) -> None:
    first, run, _ = started()
    before = trajectory(first, first.run(stop_at=stop))
    second, _ = resumed(run.saved[stop])
    after = trajectory(second, second.run())
    assert set(before) | set(after) == set(range(41))
    assert {**before, **after} == uninterrupted


def test_a_run_stopped_after_every_step_has_the_same_bits() -> None:
    whole, _, _ = started()
    list(whole.run())
    trainer, run, _ = started()
    for step in range(1, 41):
        list(trainer.run(stop_at=step))
        trainer, run = resumed(run.saved[step])
    assert digest(trainer.state.to_checkpoint()) == digest(whole.state.to_checkpoint())


def test_another_seed_gives_another_run() -> None:
    ends = set()
    for seed in (1, 2):
        trainer, _, _ = started(short_config(12, train={"seed": seed}))
        list(trainer.run())
        ends.add(digest(trainer.state.to_checkpoint()))
    assert len(ends) == 2


@pytest.mark.parametrize("every", [1, 7])
def test_evaluating_and_saving_change_no_bit(every: int) -> None:
    quiet, _, _ = started(short_config(40))
    busy, run, _ = started(short_config(40, train={"eval_every": every}), clock=Clock(tick=1e3))
    torch.manual_seed(1)
    list(quiet.run())
    torch.manual_seed(2)
    list(busy.run())
    assert len(run.saved) > 30
    assert digest(quiet.state.to_checkpoint()) == digest(busy.state.to_checkpoint())


def test_a_checkpoint_is_a_snapshot_that_training_does_not_reach() -> None:
    trainer, run, _ = started()
    list(trainer.run(stop_at=11))
    kept = digest(run.saved[11])
    second, _ = resumed(run.saved[11])
    list(second.run())
    assert digest(run.saved[11]) == kept


def test_stop_at_saves_and_does_not_evaluate() -> None:
    trainer, run, _ = started()
    happened = list(trainer.run(stop_at=5))
    assert kinds(happened)[-2:] == [("Saved", 5), ("Stopped", 5)]
    assert isinstance(happened[-1], Stopped)
    assert happened[-1].reason == "stop-at"
    assert not kinds(happened, Evaluated)
    assert sorted(run.saved) == [0, 5]


def test_stop_at_beyond_the_end_ends_at_the_end() -> None:
    trainer, _, _ = started(short_config(6))
    last = list(trainer.run(stop_at=99))[-1]
    assert isinstance(last, Stopped)
    assert (last.step, last.reason) == (6, "finished")


@pytest.mark.parametrize("signal", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_the_run_at_the_next_step_after_a_save(signal: str) -> None:
    trainer, run, _ = started()
    asked: list[str] = []
    happened: list[Event] = []
    for event in trainer.run(should_stop=lambda: asked[0] if asked else None):
        happened.append(event)
        if isinstance(event, Stepped) and event.step == 13:
            asked.append(signal)
    assert kinds(happened)[-3:] == [("Stepped", 13), ("Saved", 13), ("Stopped", 13)]
    assert isinstance(happened[-1], Stopped)
    assert happened[-1].reason == signal
    assert sorted(run.saved) == [0, 13]


def test_a_signal_before_the_first_step_saves_step_zero() -> None:
    trainer, run, _ = started()
    assert kinds(trainer.run(should_stop=lambda: "SIGTERM")) == [("Started", 0), ("Saved", 0), ("Stopped", 0)]
    expected, _, _ = started()
    assert digest(run.saved[0]) == digest(expected.state.to_checkpoint())


def test_a_signal_during_the_final_evaluation_ends_it() -> None:
    trainer, _, _ = started(short_config(3))
    answers = iter([None, None, None, None, "SIGINT"])
    happened = list(trainer.run(should_stop=lambda: next(answers)))
    assert kinds(happened)[-2:] == [("Saved", 3), ("Stopped", 3)]
    assert isinstance(happened[-1], Stopped)
    assert happened[-1].reason == "SIGINT"


def test_time_decides_when_to_save() -> None:
    clock = Clock()
    trainer, _, _ = started(short_config(30, save={"every_minutes": 1.0, "steps": ()}), clock=clock)
    happened = []
    for event in trainer.run():
        happened.append(event)
        if isinstance(event, Stepped):
            clock.now += 13.0
    # Five steps of 13 seconds pass a minute, and the count starts anew with each save.
    assert [step for _, step in kinds(happened, Saved)] == [0, 5, 10, 15, 20, 25, 30]


def test_extending_keeps_the_schedule_and_goes_on_with_the_final_rate() -> None:
    trainer, run, _ = started(short_config(40))
    list(trainer.run())
    longer, longer_run = resumed(run.saved[40], iterations=55)
    happened = list(longer.run())
    assert isinstance(longer.stepper.engine, PlainEngine)
    rates = {call["lrs"]["means"] for call in longer.stepper.engine.calls}  # type: ignore[index]
    assert rates == {1.6e-6 * longer.state.dataset.extent}
    assert len(longer.stepper.engine.calls) == 15
    assert not kinds(happened, Refined, OpacityReset)
    assert longer_run.saved[55].config.schedule == run.saved[40].config.schedule
    assert longer_run.saved[55].config.train.iterations == 55
    assert run.saved[40].config.train.iterations == 40


def test_a_finished_run_resumes_to_its_end() -> None:
    trainer, run, _ = started(short_config(6))
    list(trainer.run())
    again, again_run = resumed(run.saved[6])
    assert kinds(again.run()) == [("Started", 6), ("Saved", 6), ("Evaluated", 6), ("Stopped", 6)]
    assert digest(again_run.saved[6]) == digest(run.saved[6])


def test_a_length_already_passed_is_refused() -> None:
    trainer, run, _ = started()
    list(trainer.run(stop_at=9))
    with pytest.raises(UsageError, match="8 iterations are asked for and 9 are done"):
        resumed(run.saved[9], iterations=8)


def test_a_changed_scene_is_refused_with_the_differences() -> None:
    trainer, run, _ = started()
    list(trainer.run(stop_at=2))
    checkpoint = run.saved[2]
    with pytest.raises(SceneError, match=r"there were 6 views, there are 7"):
        resumed(checkpoint, made_scene(7))
    with pytest.raises(SceneError, match=r"view_00.png was 16x16, is 8x8"):
        resumed(checkpoint, made_scene(size=8))

    def changed(**camera: object) -> Scene:
        scene = made_scene()
        cameras = [replace(scene.cameras[0], **camera), *scene.cameras[1:]]  # type: ignore[arg-type]
        return replace(scene, cameras=cameras)

    with pytest.raises(SceneError, match=r"'view_00.png' is now 'other.png'"):
        resumed(checkpoint, changed(name="other.png"))
    with pytest.raises(SceneError, match="focal length"):
        resumed(checkpoint, changed(fx=19.3))
    with pytest.raises(SceneError, match="another pose"):
        resumed(checkpoint, changed(viewmat=np.eye(4)))
    with pytest.raises(SceneError, match="another pose"):
        resumed(checkpoint, changed(viewmat=np.full((4, 4), np.nan)))
    with pytest.raises(SceneError, match="held out"):
        resumed(checkpoint, replace(made_scene(), train=[0, 1, 2], test=[3, 4, 5]))


def test_rounding_in_the_reader_is_not_a_change_and_the_stored_cameras_are_used() -> None:
    trainer, run, _ = started()
    list(trainer.run(stop_at=2))
    scene = made_scene()
    nudged = [replace(c, fx=c.fx * (1 + 1e-12), viewmat=c.viewmat + 1e-13) for c in scene.cameras]
    second, _ = resumed(run.saved[2], replace(scene, cameras=nudged))
    for used, stored in zip(second.scene.cameras, run.saved[2].cameras, strict=True):
        assert used.fx == stored.fx
        assert (used.viewmat == stored.viewmat).all()


def test_metrics_are_recorded() -> None:
    trainer, run, _ = started(short_config(25, train={"eval_every": 12}))
    list(trainer.run())
    steps = [record for record in run.metrics if record["event"] == "step"]
    assert [record["step"] for record in steps] == [10, 20]
    assert set(steps[0]) == {"event", "step", "loss", "num_gaussians", "sh_degree", "seconds"}
    scores = [record for record in run.metrics if record["event"] == "eval"]
    assert [record["step"] for record in scores] == [12, 24, 25]
    assert len(scores[0]["views"]) == 2  # type: ignore[arg-type]
    assert scores[0]["protocol"]["views"] == 2  # type: ignore[index]


def opacity_renderer(gaussians: Gaussians, camera: Camera, *, background: Tensor, antialiased: bool) -> Tensor:
    return gaussians.logit_opacities.sigmoid().mean().expand(camera.height, camera.width, 3).clone()


def test_views_are_scored_before_the_opacities_of_the_same_step_are_reset() -> None:
    scores = {}
    for reset_every, resets in ((12, [("OpacityReset", 12)]), (1000, [])):
        schedule = {"refine_start": 0, "refine_every": 4, "refine_stop": 30, "reset_every": reset_every}
        config = short_config(30, train={"eval_every": 1}, guard={"probe_every": 1}, schedule=schedule)
        trainer, run, _ = started(config, renderer=opacity_renderer)
        happened = list(trainer.run(stop_at=14))
        assert kinds(happened, OpacityReset) == resets
        scores[reset_every] = {(type(e), e.step): e.psnr for e in happened if isinstance(e, Evaluated | Probed)}
        assert [record["step"] for record in run.metrics if record["event"] == "probe"] == list(range(1, 15))
    for kind in (Evaluated, Probed):
        assert scores[12][kind, 12] == scores[1000][kind, 12], "the reset of step 12 lowers no figure of step 12"
        assert scores[12][kind, 13] != scores[1000][kind, 13]


def test_a_scene_with_nothing_held_out_trains_and_is_not_scored() -> None:
    scene = replace(made_scene(), train=list(range(6)), test=[])
    trainer, _, _ = started(short_config(4, train={"eval_every": 1}), scene)
    assert not kinds(trainer.run(), Evaluated)


def test_a_scene_without_extent_or_views_is_refused() -> None:
    scene = made_scene()
    with pytest.raises(SceneError, match="one point"):
        started(scene=replace(scene, cameras=[scene.cameras[0]] * 6))
    with pytest.raises(SceneError, match="no view"):
        started(scene=replace(scene, train=[], test=list(range(6))))


def add_one(tensor: Tensor) -> None:
    tensor.view(-1)[0].add_(1.0)


def test_the_state_that_is_trained_is_in_the_checkpoint() -> None:
    """Each number that a step may change is perturbed alone, and the checkpoint must show it."""
    trainer, run, _ = started()
    list(trainer.run(stop_at=13))
    checkpoint = run.saved[13]

    def perturbations(trainer: Trainer) -> Iterator[Callable[[], object]]:
        state = trainer.state
        for bundle in (state.gaussians, state.adam.exp_avg, state.adam.exp_avg_sq):
            for _, tensor in bundle.items():
                yield partial(add_one, tensor)
        yield partial(add_one, state.stats.grad2d)
        yield partial(add_one, state.stats.count)
        for generator in state.generators.values():
            yield partial(torch.rand, 1, generator=generator)
        yield state.sampler.next
        yield lambda: setattr(state.adam, "step", state.adam.step + 1)
        yield lambda: setattr(state, "step", state.step + 1)
        yield lambda: setattr(state.adam, "log_size", state.adam.log_size + 1.0)

    total = len(list(perturbations(resumed(checkpoint)[0])))
    assert total == 18 + 2 + 2 + 1 + 3
    for i in range(total):
        second, _ = resumed(checkpoint)
        assert digest(second.state.to_checkpoint()) == digest(checkpoint)
        list(perturbations(second))[i]()
        assert digest(second.state.to_checkpoint()) != digest(checkpoint)


def test_rates_of_means_are_relative_to_the_sizes_after_the_last_refinement() -> None:
    trainer, _, _ = started()

    def mean_log_size() -> float:
        return float(trainer.state.gaussians.log_scales.double().sort(dim=1).values[:, 1].mean())

    first = trainer.state.adam.log_size
    assert first == pytest.approx(mean_log_size(), abs=1e-5)
    list(trainer.run(stop_at=9))
    assert trainer.state.adam.log_size == first
    list(trainer.run(stop_at=10))
    assert trainer.state.adam.log_size == pytest.approx(mean_log_size(), abs=1e-5)
    assert trainer.state.adam.log_size != pytest.approx(first, abs=1e-3)
    assert trainer.state.adam.size_power == 0.5

    # Where a checkpoint holds none, as one of a merged run, all shards have the size of all rows.
    checkpoint = trainer.state.to_checkpoint()
    del checkpoint.strategy["log_size"]
    placements = [Placement(), *(Placement(shards=3, rank=rank) for rank in range(3))]
    sizes = {shard_of(checkpoint, placement).adam.log_size for placement in placements}
    assert sizes == {trainer.state.adam.log_size}


@pytest.mark.parametrize("share", [0.3, 0.0])
def test_scales_have_a_limit_by_the_distance_from_the_cameras(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splatcli.train.trainer.LIMIT_SCALES_EVERY", 7)
    scene = made_scene()
    trainer, _, _ = started(with_settings(short_config(), {"strategy.max_scale3d": share}), scene)
    list(trainer.run(stop_at=6))
    gaussians, middle = trainer.state.gaussians, np.stack([scene.cameras[i].center for i in scene.train]).mean(axis=0)
    gaussians.means[:2] = torch.tensor([[100.0, 0.0, 0.0], [0.1, 0.0, 0.0]])
    gaussians.log_scales[:3] = torch.tensor([[7.0, -9.0, 2.0], [9.0, 1.0, -2.0], [-3.0, -4.0, -5.0]])
    list(trainer.run(stop_at=7))
    scales = trainer.state.gaussians.log_scales[:3].exp().numpy()
    if share == 0.0:
        assert scales.max() > 1000
        return
    far = np.linalg.norm(trainer.state.gaussians.means[0].numpy() - middle)
    assert far > 10 * scene.extent
    np.testing.assert_allclose(scales[0, [0, 2]], [0.3 * far, np.exp(2.0)], rtol=0.1)  # the second had a step of Adam
    np.testing.assert_allclose(scales[:2].max(axis=1), [0.3 * far, 0.3 * scene.extent], rtol=1e-5)
    np.testing.assert_allclose(scales[2], np.exp([-3.0, -4.0, -5.0]), rtol=0.1)


def test_all_events_are_frozen() -> None:
    for kind in (*get_args(events.Event), events.ViewScore):
        assert kind.__dataclass_params__.frozen, kind


def test_a_checkpoint_without_learning_state_cannot_be_resumed() -> None:
    trainer, run, _ = started()
    list(trainer.run(stop_at=3))
    for broken in ("moments", "strategy", "rng", "sampler"):
        checkpoint = copied(run.saved[3])
        setattr(checkpoint, broken, None if broken == "moments" else {})
        with pytest.raises(Exception, match="cannot be resumed") as caught:
            resumed(checkpoint)
        assert type(caught.value).__name__ == "ModelFileError"


class Doubling:
    """A strategy that copies every Gaussian after step 5."""

    absgrad = False

    def collects_stats(self, step: int) -> bool:
        return False

    def regularisation(self, step: int, means_lr: float) -> Regularisation:
        return Regularisation()

    def refines_at(self, step: int) -> bool:
        return step == 5

    def refine(self, step: int, gaussians: Gaussians, stats: DensifyStats, generator: torch.Generator) -> Refinement:
        rows = torch.arange(len(gaussians))
        return Refinement(torch.cat([rows, rows]), torch.cat([torch.zeros_like(rows), torch.ones_like(rows)]).bool())


def test_a_new_gaussian_copies_coefficients_that_miss_no_step() -> None:
    trainer, _, _ = started()
    trainer.strategy = Doubling()
    list(trainer.run(stop_at=4))
    state = trainer.state
    before, count = state.gaussians.shN.clone(), len(state.gaussians)
    state.adam.exp_avg.shN.normal_(std=1e-4, generator=torch.Generator().manual_seed(1))
    state.adam.step, state.adam.sh_last_step = 5, torch.full((count,), 2, dtype=torch.int32)
    dense = state.adam.flushed(state.gaussians, state.config.optim.shN_lr).shN
    assert not torch.equal(dense, before)
    list(trainer.density.refine(trainer.state, trainer.strategy, 5))
    assert torch.equal(trainer.state.gaussians.shN, dense.repeat_interleave(2, dim=0))
    assert (trainer.state.adam.sh_last_step == 5).all()
