"""Before a run takes memory it tells what it needs; a budget becomes a cap, and what cannot fit is refused at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from splatcli.checkpoint.state import Checkpoint
from splatcli.config import Config, resolve, with_settings
from splatcli.errors import ResourceError
from splatcli.gaussians import GROUPS, Gaussians
from splatcli.native.build import NoCompilerError
from splatcli.rasterizer import AsyncEngine, NativeEngine, StepInputs
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.memory_budget import MemoryBudget
from splatcli.rasterizer.memory_estimate import IsectCount, predict_isects
from splatcli.train import memory_plan
from splatcli.train.events import Capped, Started, Stepped
from splatcli.train.memory_plan import MemoryPlan, ShardedMemoryPlan, fullest_view, plan_memory
from splatcli.train.monitor import IntersectionMonitor
from splatcli.train.state import Placement
from splatcli.train.trainer import Trainer
from tests.kernels.simt import simulated
from tests.native.cases import NEEDS_COMPILER, float32
from tests.rasterizer.scenes import random_scene
from tests.train.worlds import (
    MemoryRun,
    made_scene,
    random_gaussians,
    ring_cameras,
    short_config,
    start_plain,
)


@pytest.fixture(autouse=True)
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process holds as much as a fresh one, whatever the tests before it have left."""
    monkeypatch.setattr("splatcli.train.memory_plan.held_memory", lambda device, *, offloads=False: 400 << 20)


def memory_plan_of(n: int = 10_000, room: int = 4 << 30, *, densifies: bool = True, isects: int = 40_000) -> MemoryPlan:
    (camera,) = ring_cameras(1, 800)
    work = memory_plan.Workload(n, 3, 800, 800, IsectCount(isects, isects, n))
    return MemoryPlan(float32(), 500 << 20, 100 << 20, work, camera, densifies, room)


@NEEDS_COMPILER
def test_the_cap_is_the_most_that_fits() -> None:
    for room in (1 << 30, 4 << 30, 24 << 30):
        plan = memory_plan_of(room=room)
        assert plan.peak_bytes(plan.max_gaussians()) <= room
        assert plan.peak_bytes(int(1.02 * plan.max_gaussians()) + 10) > room


@NEEDS_COMPILER
def test_more_gaussians_pixels_and_photos_need_more() -> None:
    plan = memory_plan_of()
    assert (
        plan.min_bytes()
        < plan.start_bytes()
        < plan.peak_bytes(10_000)
        < plan.peak_bytes(10_001)
        < plan.peak_bytes(100_000)
    )
    assert replace(plan, images=200 << 20).peak_bytes(10_000) == plan.peak_bytes(10_000) + (100 << 20)
    assert replace(plan, images=200 << 20).min_bytes() == plan.min_bytes(), "photos that do not fit are not kept"
    larger = replace(plan, work=replace(plan.work, width=1600))
    assert larger.peak_bytes(10_000) > plan.peak_bytes(10_000)
    assert memory_plan_of(densifies=False).max_gaussians() > plan.max_gaussians(), (
        "rows are replaced only where there is density control"
    )


@NEEDS_COMPILER
def test_pairs_need_no_more_than_their_part_for_then_there_are_bands() -> None:
    crowded = memory_plan_of(isects=10**9)
    assert crowded.peak_bytes(10_000) < 600 * 2**20 + 1.25 * 2**31 + 10**9
    assert crowded.min_bytes() > memory_plan_of().min_bytes()


@NEEDS_COMPILER
def test_the_fullest_view_is_found_with_a_part_of_the_gaussians(monkeypatch: pytest.MonkeyPatch) -> None:
    gaussians, _ = random_scene(1, 5000, sh_degree=0, scale=0.05)
    cameras = [replace(camera, width=100 + 40 * i) for i, camera in enumerate(ring_cameras(4, 200))]
    exact = [predict_isects(gaussians, camera) for camera in cameras]
    camera, isects = fullest_view(gaussians, cameras)
    assert camera is max(zip(exact, cameras, strict=True), key=lambda both: both[0].boxes)[1]
    assert isects == max(exact, key=lambda count: count.boxes)
    monkeypatch.setattr(memory_plan, "_SAMPLED", 2000)
    monkeypatch.setattr(memory_plan, "_SAMPLED_IN_FULLEST", 2500)
    same, about = fullest_view(gaussians, cameras)
    assert same is camera
    assert about.boxes == pytest.approx(isects.boxes, rel=0.2)


def planned(config: Config, gaussians: Gaussians | None = None, *, size: int = 64) -> tuple[int | None, list[str]]:
    return plan_memory(config, made_scene(size=size), gaussians or random_gaussians(50), Placement(), own=0)


@NEEDS_COMPILER
def test_without_a_budget_it_tells_and_sets_nothing() -> None:
    cap, (note,) = planned(short_config())
    assert "memory: about" in note
    assert "available, enough for about" in note
    assert cap is None


@NEEDS_COMPILER
def test_a_budget_becomes_a_cap_that_two_runs_agree_on() -> None:
    caps = []
    for ballast in (0, 8 << 20):
        held = bytearray(ballast)
        cap, (first, second) = planned(short_config(memory={"budget": "3GiB"}))
        assert "the budget is 3.0 GiB" in first
        assert f"at the cap of {cap:,} Gaussians" in first
        assert "growth stops at" in second
        caps.append(cap)
        del held
    assert caps[0] == caps[1]
    assert caps[0] is not None
    assert 100_000 < caps[0] < 3 * 2**30 / 720


@NEEDS_COMPILER
def test_the_lower_of_two_caps_holds() -> None:
    config = short_config(memory={"budget": "3GiB"}, strategy={"cap_max": 500})
    cap, (note,) = planned(config)
    assert "at the cap of 500 Gaussians" in note
    assert resolve(config, {"memory.cap": cap}).max_gaussians() == 500


@NEEDS_COMPILER
def test_a_cap_that_the_memory_does_not_hold_is_remarked_upon() -> None:
    _, (_, note) = planned(short_config(strategy={"cap_max": 10**9}))
    assert "the memory suffices for about" in note
    assert "--cap-max 1000000000 is more" in note


@NEEDS_COMPILER
def test_what_cannot_fit_is_refused_with_remedies() -> None:
    with pytest.raises(ResourceError, match=r"take at least .*; the budget is 100.0 MiB") as caught:
        planned(short_config(memory={"budget": "100M"}))
    assert "50 Gaussians and a training step on a 64x64 view" in caught.value.what
    assert caught.value.exit_code == 4
    assert caught.value.remedy is not None
    assert "-r 2, 4 or 8" in caught.value.remedy
    assert "a larger --vram-budget" in caught.value.remedy


def doubled(n: int = 3000) -> Gaussians:
    """Their scales were activated before: exp() makes each larger than the scene. One is larger still."""
    gaussians = random_gaussians(n)
    gaussians.means *= 0.2
    gaussians.log_scales.exp_()
    gaussians.log_scales[7] += 1.0
    gaussians.logit_opacities[:] = 2.0
    return gaussians


@NEEDS_COMPILER
def test_scales_that_were_activated_are_refused_before_the_moments_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*args: object) -> AdamState:
        raise AssertionError("moments were asked for")

    monkeypatch.setattr(AdamState, "zeros_like", make)
    config = short_config(memory={"budget": "2GiB"})
    with pytest.raises(ResourceError) as caught:
        Trainer.start(config, made_scene(size=1600), run_dir=MemoryRun(), init_model=doubled())  # type: ignore[arg-type]
    assert "3,000 visible Gaussians would cover 30,000,000 tiles (10,000 each, of 10,000)" in caught.value.what
    assert "2.4 GiB wanted" in caught.value.what
    assert "the largest: #7: 10,000 tiles, scale 3.19;" in caught.value.what
    assert caught.value.remedy is not None
    assert "already activated ones look like this" in caught.value.remedy


def trained(config: Config, steps: int = 40) -> tuple[Trainer, MemoryRun]:
    run = MemoryRun()
    trainer = start_plain(config, run)
    return trainer, run


@NEEDS_COMPILER
def test_a_resumed_run_is_refused_as_a_new_one_is() -> None:
    trainer, run = trained(short_config(8))
    list(trainer.run())
    checkpoint: Checkpoint = run.saved[8]
    checkpoint.gaussians = doubled(len(checkpoint.gaussians))
    config = with_settings(checkpoint.config, {"memory.budget": 100 << 20})
    with pytest.raises(ResourceError, match="take at least"):
        Trainer.resume(checkpoint, trainer.scene, run_dir=run, config=config)  # type: ignore[arg-type]


@NEEDS_COMPILER
def test_a_resumed_run_keeps_its_cap_until_it_is_given_another_budget() -> None:
    trainer, run = trained(short_config(8, memory={"budget": "2GiB", "cap": 1234}))
    list(trainer.run())
    checkpoint = run.saved[8]
    assert checkpoint.config.memory.cap == 1234

    def resumed(budget: int | None) -> Trainer:
        config = with_settings(checkpoint.config, {"memory.budget": budget})
        return Trainer.resume(checkpoint, trainer.scene, run_dir=run, config=config)  # type: ignore[arg-type]

    assert resumed(2 << 30).state.config.memory.cap == 1234
    other = resumed(3 << 30).state.config.memory.cap
    assert other is not None
    assert other > 100_000
    assert resumed(None).state.config.memory.cap is None


def test_growth_stops_at_the_cap_of_the_memory_and_says_so_once() -> None:
    config = short_config(40, strategy={"grow_grad2d": 1e-9, "prune_opacity": 1e-6}, memory={"cap": 30})
    trainer, _ = trained(config)
    happened = list(trainer.run())
    assert isinstance(happened[0], Started)
    assert max(event.num_gaussians for event in happened if isinstance(event, Stepped)) == 30
    (capped,) = [event for event in happened if isinstance(event, Capped)]
    assert (capped.num_gaussians, capped.cap) == (30, 30)
    # A cap that the user gave is no news.
    config = short_config(40, strategy={"grow_grad2d": 1e-9, "prune_opacity": 1e-6, "cap_max": 30}, memory={"cap": 31})
    assert not [event for event in trained(config)[0].run() if isinstance(event, Capped)]


@NEEDS_COMPILER
def test_engine_and_renderer_share_the_budget() -> None:
    trainer = Trainer.start(
        short_config(4, memory={"budget": "3GiB"}),
        made_scene(),
        run_dir=MemoryRun(),  # type: ignore[arg-type]
    )
    budget = trainer.stepper.engine.context.isect_budget.budget  # type: ignore[attr-defined]
    assert isinstance(budget, MemoryBudget)
    assert budget.limit == 3 << 30


def test_without_a_compiler_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(device: torch.device) -> None:
        raise NoCompilerError("no g++")

    monkeypatch.setattr(memory_plan, "backend_for", absent)
    assert planned(short_config()) == (None, [])


def test_pairs_that_explode_raise_an_alarm_once() -> None:
    watch = IntersectionMonitor()
    isects = [300] * 100 + [310] * 100 + [9000] * 50 + [300] * 50 + [9000] * 100
    alarms = [alarm for step, n in enumerate(isects, 1) if (alarm := watch.check(step, n, 100)) is not None]
    (alarm,) = alarms
    assert (alarm.step, alarm.alarm) == (300, "intersections")
    assert "90 tiles of the fullest view on average, 3.1 before" in alarm.text


def test_an_engine_without_pairs_raises_none() -> None:
    watch = IntersectionMonitor()
    assert not any(watch.check(step, 0, 100) for step in range(1, 500))


@NEEDS_COMPILER
def test_native_engines_tell_their_pairs() -> None:
    gaussians, camera = random_scene(3, 60, width=40, height=30, sh_degree=1, scale=0.3)
    for engine in (NativeEngine(float32()), AsyncEngine(simulated())):
        own = gaussians.detach_clone()
        inputs = StepInputs(
            camera,
            torch.zeros(30, 40, 3, dtype=torch.uint8),
            dict.fromkeys(GROUPS, 0.0),
            1,
            torch.zeros(3),
            0.2,
            False,
            None,
        )
        assert engine.isects == 0
        engine.submit(own, AdamState.zeros_like(own), inputs)
        engine.drain()
        predicted = predict_isects(own, camera)
        assert predicted.isects / 1.6 <= engine.isects <= predicted.boxes


@NEEDS_COMPILER
def test_parts_of_the_gaussians_take_parts_of_the_memory() -> None:
    work = replace(memory_plan_of(100_000).work, isects=IsectCount(400_000, 400_000, 10_000))  # a view sees a tenth
    whole = replace(memory_plan_of(), work=work, batched=True)
    fields = {name: getattr(whole, name) for name in whole.__dataclass_fields__}
    half, quarter = (ShardedMemoryPlan(**fields, shards=parts) for parts in (2, 4))
    assert quarter.min_bytes() < quarter.start_bytes() < quarter.peak_bytes(100_000) < quarter.peak_bytes(100_001)
    for count in (100_000, 1_000_000):
        assert quarter.peak_bytes(count) < half.peak_bytes(count) < whole.peak_bytes(count)
    assert 1.3 * 1.3 * whole.max_gaussians() < 1.3 * half.max_gaussians() < quarter.max_gaussians()
    for plan in (half, quarter):
        assert (
            plan.peak_bytes(plan.max_gaussians()) <= plan.limit < plan.peak_bytes(int(1.02 * plan.max_gaussians()) + 10)
        )


@NEEDS_COMPILER
def test_ranks_with_parts_plan_for_all() -> None:
    """The cap that a budget allows is that of all ranks together."""
    caps = []
    for parts in (1, 4):
        # Much more than what the process of the tests holds by now, which each part has to leave room for.
        config = short_config(train={"batch_size": 4}, memory={"budget": 32 << 30})
        gaussians = random_gaussians(20, degree=2)
        cap, _ = plan_memory(config, made_scene(size=64), gaussians, Placement(shards=parts), own=0)
        caps.append(cap)
    assert caps[0] is not None
    assert caps[1] is not None
    assert 1.5 * caps[0] < caps[1]  # a view of this scene sees all of them
