"""A run with its SH coefficients in a file gives the same bits as one that has them in memory."""

from __future__ import annotations

import importlib
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from splatcli.checkpoint.file import load_checkpoint
from splatcli.checkpoint.run_dir import RunDir
from splatcli.checkpoint.state import Checkpoint
from splatcli.config import Config, with_settings
from splatcli.errors import ResourceError, UsageError, as_splat_error, is_out_of_memory
from splatcli.rasterizer import AsyncEngine, NativeEngine
from splatcli.rasterizer.memory_budget import MemoryBudget
from splatcli.rasterizer.memory_estimate import (
    IsectCount,
    Workload,
    parameter_bytes,
    shN_bytes,
    state_bytes,
    step_memory,
)
from splatcli.rasterizer.offload import DEVICE_STORAGE, MemoryMapped, Pinned, TensorStorage
from splatcli.scene.points import PointCloud
from splatcli.scene.scene import Scene
from splatcli.train import memory_plan
from splatcli.train.changed_settings import changed_config
from splatcli.train.data_parallel import state_digest
from splatcli.train.events import Event, OpacityReset, Probed, Refined, RolledBack, Stepped
from splatcli.train.memory_plan import MemoryPlan, plan_memory
from splatcli.train.state import Placement, TrainState
from splatcli.train.trainer import Trainer
from tests.kernels.simt import simulated
from tests.native.cases import NEEDS_COMPILER, float32
from tests.train.test_oom import SmallMachine
from tests.train.worlds import PlainEngine, made_scene, plain_renderer, random_gaussians, ring_cameras, short_config

Make = Callable[[], NativeEngine | AsyncEngine]
ENGINES: dict[str, Make] = {
    "cpu": lambda: NativeEngine(float32("portable")),
    "simt": lambda: AsyncEngine(simulated()),
}
#: Everything that takes hold of whole tensors: refinements, resets, both looks at views, saves in between.
STRATEGIES: dict[str, dict[str, object]] = {
    "default": {"grow_grad2d": 1e-5, "prune_opacity": 0.002, "prune_scale3d": 100.0, "cap_max": 260},
    "mcmc": {"name": "mcmc", "cap_max": 260},
}


def wide_scene() -> Scene:
    """Points that no view sees all of."""
    scene = made_scene(7, size=16, points=120)
    random = np.random.default_rng(5)
    xyz = random.normal(0.0, 2.5, (120, 3)).astype(np.float32)
    scene.points = PointCloud(xyz, random.integers(0, 256, (120, 3), dtype=np.uint8))
    return scene


def config_of(strategy: str, *, offload: bool) -> Config:
    return short_config(
        26,
        strategy=STRATEGIES[strategy],
        memory={"offload": offload},
        guard={"probe_every": 7, "finite_every": 3},
        train={"eval_every": 9},
        save={"steps": (8, 16), "keep_last": 5},
    )


def start(folder: RunDir, make: Make, strategy: str, *, offload: bool) -> Trainer:
    config = config_of(strategy, offload=offload)
    return Trainer.start(config, wide_scene(), run_dir=folder, engine=make(), renderer=plain_renderer)


def story(events: Iterator[Event]) -> list[str]:
    """What happened, without times and places."""
    return [repr(event) for event in events if isinstance(event, Stepped | Refined | OpacityReset | Probed)]


def away(trainer: Trainer) -> bool:
    """Whether shN and its moments are all in files of the run folder."""
    adam = trainer.state.adam
    tensors = (trainer.state.gaussians.shN, adam.exp_avg.shN, adam.exp_avg_sq.shN)
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "/offload.tmp." in line]
    spans = [tuple(int(bound, 16) for bound in line[0].split("-")) for line in lines]
    return all(any(a <= tensor.data_ptr() < b for a, b in spans) for tensor in tensors)


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("engine", "strategy", "last"), [("cpu", "default", 26), ("cpu", "mcmc", 26), ("simt", "default", 12)]
)
def test_a_run_has_the_same_bits_with_and_without(engine: str, strategy: str, last: int, tmp_path: Path) -> None:
    make = ENGINES[engine]
    with RunDir.create(tmp_path / "plain") as folder:
        plain = start(folder, make, strategy, offload=False)
        expected = story(plain.run(stop_at=last))
    assert not away(plain)
    assert any("Refined" in line for line in expected)
    assert any("Probed" in line for line in expected)
    assert strategy != "default" or any("OpacityReset" in line for line in expected)
    with RunDir.create(tmp_path / "away") as folder:
        trainer = start(folder, make, strategy, offload=True)
        late = 0
        events: list[Event] = []
        for event in trainer.run(stop_at=last):
            assert away(trainer), event
            late = max(late, int((trainer.state.adam.sh_last_step < trainer.state.adam.step).sum()))
            events.append(event)
    assert story(iter(events)) == expected
    assert late > 10, "some rows are outside the views"
    assert state_digest(trainer.state) == state_digest(plain.state)
    for step in sorted({8, min(16, last), last}):
        same_checkpoint(*(load_checkpoint(tmp_path / run / f"ckpts/ckpt_{step:06d}.pt") for run in ("plain", "away")))
    assert not list((tmp_path / "away").glob("offload*"))


def same_checkpoint(one: Checkpoint, other: Checkpoint) -> None:
    assert one.moments is not None
    assert other.moments is not None
    for name, tensor in one.gaussians.items():
        assert torch.equal(tensor, getattr(other.gaussians, name)), name
        for mine, theirs in zip(one.moments[name], other.moments[name], strict=True):
            assert torch.equal(mine, theirs), name
    assert one.sh_last_step is not None
    assert other.sh_last_step is not None
    assert torch.equal(one.sh_last_step, other.sh_last_step)


@NEEDS_COMPILER
@pytest.mark.parametrize("first", [False, True], ids=["off then on", "on then off"])
def test_resume_may_switch_it_and_the_bits_stay(first: bool, tmp_path: Path) -> None:
    make = ENGINES["cpu"]
    with RunDir.create(tmp_path / "whole") as folder:
        whole = start(folder, make, "default", offload=first)
        list(whole.run())
    with RunDir.create(tmp_path / "parts") as folder:
        list(start(folder, make, "default", offload=first).run(stop_at=14))
        stored = load_checkpoint(folder.checkpoint_path(14), mapped=not first)
        config, notes = changed_config(stored.config, assignments=[f"memory.offload={str(not first).lower()}"])
        assert len(notes) == 1
        trainer = Trainer.resume(
            stored, wide_scene(), run_dir=folder, engine=make(), renderer=plain_renderer, config=config
        )
        assert away(trainer) is not first
        list(trainer.run())
        assert away(trainer) is not first
    assert state_digest(trainer.state) == state_digest(whole.state)


def test_a_file_of_settings_that_says_otherwise_is_no_other_run(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[memory]\noffload = true\n")
    config, (note,) = changed_config(Config(), file=file)
    assert config.memory.offload
    assert "memory.offload was False, is True" in note


def test_a_rollback_finds_its_state_and_its_place_again(tmp_path: Path) -> None:
    """Out of memory above 30 Gaussians: back to the last checkpoint, and on with fewer."""
    digests = []
    for offload in (False, True):
        config = short_config(22, strategy={"grow_grad2d": 1e-5}, memory={"offload": offload}, save={"steps": (8,)})
        with RunDir.create(tmp_path / str(offload)) as folder:
            engine = SmallMachine(30)
            trainer = Trainer.start(config, made_scene(), run_dir=folder, engine=engine, renderer=plain_renderer)
            events = list(trainer.run())
        assert [event.cause for event in events if isinstance(event, RolledBack)] == ["memory"]
        assert trainer.state.step == 22
        assert away(trainer) is offload
        digests.append(state_digest(trainer.state))
    assert digests[0] == digests[1]


def test_a_disk_that_fills_up_during_growth_is_survived_with_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, most = os.posix_fallocate, 40 * 8 * 3 * 4
    full: list[int] = []

    def reserve(descriptor: int, offset: int, nbytes: int) -> None:
        if "offload.tmp" in os.readlink(f"/proc/self/fd/{descriptor}") and nbytes > most:
            full.append(nbytes)
            raise OSError(28, "No space left on device")
        plain(descriptor, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    config = short_config(22, strategy={"grow_grad2d": 1e-5}, memory={"offload": True}, save={"steps": (8,)})
    with RunDir.create(tmp_path / "run") as folder:
        trainer = Trainer.start(config, made_scene(), run_dir=folder, engine=PlainEngine(), renderer=plain_renderer)
        events = list(trainer.run())
    assert full
    (back,) = (event for event in events if isinstance(event, RolledBack))
    assert "of offloaded SH coefficients: No space left on device" in back.text
    assert trainer.state.step == 22
    assert len(trainer.state.gaussians) <= 40


def test_a_state_that_was_saved_goes_into_a_file_and_comes_back(tmp_path: Path) -> None:
    with RunDir.create(tmp_path / "run") as folder:
        trainer = Trainer.start(
            short_config(8), made_scene(), run_dir=folder, engine=PlainEngine(), renderer=plain_renderer
        )
        list(trainer.run())
        stored = load_checkpoint(folder.checkpoint_path(8), mapped=True)
    state = TrainState.from_checkpoint(stored, Placement(storage=MemoryMapped(tmp_path)))
    assert state.adam.storage == MemoryMapped(tmp_path)
    assert state_digest(state) == state_digest(trainer.state)
    again = state.to_checkpoint()
    assert again.gaussians.shN.data_ptr() == state.gaussians.shN.data_ptr(), "saving copies nothing"
    same_checkpoint(again, stored)


def test_batches_are_refused_for_their_gradients_take_what_is_saved() -> None:
    with pytest.raises(UsageError, match=r"memory\.offload and train\.batch_size > 1 exclude each other"):
        with_settings(Config(), {"memory.offload": True, "train.batch_size": 2})


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_a_gaussian_s_state_is_split_between_here_and_there() -> None:
    for degree, rest in enumerate((0, 3, 8, 15, 24)):
        here, there = state_bytes(100, degree, offloads=True), 3 * shN_bytes(100, degree)
        assert here == 100 * (3 * 56 + 12)
        assert there == 100 * 3 * 12 * rest
        assert here + there == state_bytes(100, degree)
        assert parameter_bytes(degree) == 56 + shN_bytes(1, degree)


def memory_plan_of(storage: TensorStorage, *, densifies: bool = True) -> MemoryPlan:
    (camera,) = ring_cameras(1, 160)
    work = Workload(1_000_000, 3, 160, 160, IsectCount(400_000, 500_000, 200_000), offloads=storage.offloads)
    return MemoryPlan(float32(), 500 << 20, 100 << 20, work, camera, densifies, 4 << 30, storage=storage)


@NEEDS_COMPILER
def test_what_is_offloaded_is_not_counted_here_and_all_of_it_there(tmp_path: Path) -> None:
    plain, mapped, pinned = (memory_plan_of(storage) for storage in (DEVICE_STORAGE, MemoryMapped(tmp_path), Pinned()))
    count = 1_000_000
    assert plain.start_bytes() - mapped.start_bytes() == plain.min_bytes() - mapped.min_bytes() == 540 * count
    # While rows are replaced, both of them; beside it some pieces.
    pieces = 6 * shN_bytes(1 << 16, 3)
    assert plain.peak_bytes(count) - mapped.peak_bytes(count) == 2 * 540 * count - pieces
    assert mapped.max_gaussians() > 2 * plain.max_gaussians()
    assert mapped.offloaded_bytes(count) == 6 * 180 * count
    assert memory_plan_of(MemoryMapped(tmp_path), densifies=False).offloaded_bytes(count) == 4 * 180 * count
    assert pinned.offloaded_bytes(count) == 6 << 28
    assert mapped.max_offloaded(6 * 180 * count) == count
    assert step_memory(float32(), mapped.work).state == 180 * count


def planned(storage: TensorStorage, **sections: dict[str, object]) -> list[str]:
    config = short_config(memory={"offload": True}, **{"model": {"sh_degree": 3}, **sections})
    gaussians = random_gaussians(5000, degree=config.model.sh_degree)
    return plan_memory(config, made_scene(size=64), gaussians, Placement(storage=storage), own=0)[1]


@NEEDS_COMPILER
def test_a_run_is_reported_what_goes_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryMapped, "free", lambda self: 64 << 20)
    monkeypatch.setattr(MemoryMapped, "notes", lambda self: [])
    _, capped = planned(MemoryMapped(tmp_path), strategy={"cap_max": 20_000})
    assert capped == f"offloaded in a file in {tmp_path}: 2.6 MiB now, 20.6 MiB at most; 64.0 MiB are free there"
    *_, warning = planned(MemoryMapped(tmp_path), strategy={"cap_max": 100_000})
    assert warning == "that suffices for about 62,100 Gaussians; --cap-max takes a number"
    _, none = planned(MemoryMapped(tmp_path), model={"sh_degree": 0})
    assert "nothing is offloaded" in none
    monkeypatch.setattr(MemoryMapped, "free", lambda self: 1 << 20)
    with pytest.raises(ResourceError) as caught:
        planned(MemoryMapped(tmp_path))
    assert "the SH coefficients of 5,000 Gaussians and their moments take 2.6 MiB in a file in" in caught.value.what
    assert caught.value.remedy is not None
    assert "--cap-max 970" in caught.value.remedy


@NEEDS_COMPILER
def test_a_budget_is_for_what_the_system_cannot_take_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, counted = torch.device("cpu"), 100 << 20
    monkeypatch.setattr(
        "splatcli.rasterizer.memory_budget.held_memory", lambda device, *, offloads=False: counted * (2 - offloads)
    )
    assert MemoryBudget(cpu, 2 * counted).left() == 0
    assert MemoryBudget(cpu, 2 * counted, offloads=True).left() == counted
    monkeypatch.setattr(memory_plan, "held_memory", lambda device, *, offloads=False: (1 << 30) * (2 - offloads))
    caps = []
    for storage in (DEVICE_STORAGE, MemoryMapped(tmp_path)):
        config = short_config(memory={"offload": storage.offloads, "budget": "4GiB"})
        gaussians, placement = random_gaussians(50, degree=3), Placement(storage=storage)
        cap, _ = plan_memory(config, made_scene(size=64), gaussians, placement, own=0)
        caps.append(cap or 0)
    assert caps[1] > 3 * caps[0] > 0


@NEEDS_COMPILER
@pytest.mark.parametrize("offload", [False, True])
def test_a_run_larger_than_the_memory_of_its_process_trains(offload: bool, tmp_path: Path) -> None:
    """The memory that is its own is bounded to less than the state takes, which pages of files are no part of.

    In a new process: one that has run other tests has room in its heap that no limit counts.
    """
    code = f"from tests.train.test_offload import train_within as t; raise SystemExit(t({str(tmp_path)!r}, {offload}))"
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert run.returncode == (0 if offload else 4), run.stderr


def train_within(folder: str, offload: bool) -> int:
    """What the child of the test above ends with."""
    torch.set_num_threads(1)
    return _train_within(0.75 * state_bytes(200_000, 3), Path(folder), offload=offload)


def _train_within(more: float, folder: Path, *, offload: bool) -> int:
    """Three steps on 200,000 Gaussians with ``more`` bytes than the process has; the exit code."""
    importlib.import_module("scipy.spatial")  # which a start loads: libraries are no part of the limit
    random = np.random.default_rng(5)
    scene = made_scene(5, size=64)
    xyz = random.uniform(-20.0, 20.0, (200_000, 3)).astype(np.float32)
    scene.points = PointCloud(xyz, random.integers(0, 256, xyz.shape, dtype=np.uint8))
    config = short_config(3, model={"sh_degree": 3}, memory={"offload": offload}, guard={"finite_every": 1})
    config = with_settings(config, {"schedule.sh_degree_interval": 1})
    engine = NativeEngine(float32())
    words = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    limit = int(words["VmData"].split()[0]) * 1024 + int(more)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with RunDir.create(folder / "run") as run_dir:
        try:
            trainer = Trainer.start(config, scene, run_dir=run_dir, engine=engine, renderer=plain_renderer)
            for _ in range(3):  # saving maps the file that was written once more, which counts here
                trainer.advance()
        except Exception as error:
            return as_splat_error(error).exit_code if is_out_of_memory(error) else 1
    return 0 if away(trainer) and trainer.state.step == 3 else 2
