"""Whole steps and renders on the CUDA kernels, run by the emulator, against the CPU twin; overflow and its replay."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from splatcli.gaussians import GROUPS, Gaussians
from splatcli.native import abi
from splatcli.native.backend import Backend
from splatcli.rasterizer import AdamState, AsyncEngine, DensifyStats, NativeEngine, StepInputs
from splatcli.scene.camera import Camera
from tests.kernels.simt import simulated
from tests.native.cases import NEEDS_COMPILER, assert_images_and_gradients, images_and_gradients
from tests.rasterizer.fixed_budget import FixedBudget
from tests.rasterizer.scenes import random_camera, random_image, random_scene

pytestmark = [NEEDS_COMPILER, pytest.mark.usefixtures("simulation")]
LRS = {"means": 1e-3, "quats": 2e-3, "log_scales": 5e-3, "logit_opacities": 2e-2, "sh0": 3e-3, "shN": 2e-4}


class Run:
    """Gaussians, moments and statistics of one training, and the steps to do."""

    def __init__(self, gaussians: Gaussians) -> None:
        self.gaussians = gaussians.detach_clone()
        self.adam = AdamState.zeros_like(self.gaussians)
        self.stats = DensifyStats.zeros(len(gaussians))

    def inputs(self, camera: Camera, seed: int, absgrad: bool = False) -> StepInputs:
        photo = (random_image(seed, camera.width, camera.height) * 255).round().to(torch.uint8)
        background = torch.tensor([0.1, 0.2, 0.3])
        return StepInputs(camera, photo, LRS, 2, background, 0.2, False, self.stats, absgrad=absgrad)

    def tensors(self) -> dict[str, Tensor]:
        moments = {"m": self.adam.exp_avg, "v": self.adam.exp_avg_sq}
        named = {name: getattr(self.gaussians, name) for name in GROUPS}
        named |= {f"{kind}.{name}": getattr(rows, name) for kind, rows in moments.items() for name in GROUPS}
        return named | {
            "grad2d": self.stats.grad2d,
            "count": self.stats.count,
            "rest_steps": self.adam.sh_last_step,
        }


def train(engine: Any, run: Run, steps: int = 3, absgrad: bool = False) -> list[float]:
    cameras = [random_camera(seed, 37, 29) for seed in range(3)]
    losses: list[float] = []
    for k in range(steps):
        losses += engine.submit(run.gaussians, run.adam, run.inputs(cameras[k % 3], k, absgrad))
    return losses + engine.drain()


@pytest.fixture(scope="module")
def gaussians() -> Gaussians:
    return random_scene(5, 80, sh_degree=2)[0]


@pytest.mark.parametrize("absgrad", [False, True])
def test_training_follows_the_cpu_twin(gaussians: Gaussians, absgrad: bool) -> None:
    ours, twin = Run(gaussians), Run(gaussians)
    losses = train(AsyncEngine(simulated()), ours, absgrad=absgrad)
    expected = train(NativeEngine(Backend.cpu(isa="portable")), twin, absgrad=absgrad)
    assert len(losses) == 3
    assert losses == pytest.approx(expected, rel=1e-5)
    assert ours.adam.step == twin.adam.step == 3
    assert torch.equal(ours.stats.count, twin.stats.count)
    assert_close(ours.stats.grad2d, twin.stats.grad2d, rtol=1e-3, atol=1e-6)
    for name in GROUPS:
        # Adam divides a gradient by its own size: where it is nearly nothing its rounding becomes a whole step.
        apart = (getattr(ours.gaussians, name) - getattr(twin.gaussians, name)).abs()
        assert float(apart.max()) <= 10 * LRS[name], name
        assert float(apart.mean()) <= 0.02 * LRS[name], name


@pytest.fixture(scope="module")
def free(simulation: None, gaussians: Gaussians) -> tuple[Run, list[float]]:
    """A run that had room from the start, and its losses."""
    run = Run(gaussians)
    return run, train(AsyncEngine(simulated()), run)


def assert_same_bits(run: Run, other: Run) -> None:
    for (name, ours), theirs in zip(run.tensors().items(), other.tensors().values(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("capacity", [1, 100])
def test_a_view_with_too_little_room_is_asked_again_and_gives_the_same_bits(
    gaussians: Gaussians, free: tuple[Run, list[float]], capacity: int
) -> None:
    tight, (round_capacity, expected) = Run(gaussians), free
    engine = AsyncEngine(simulated(), capacity=capacity)
    assert train(engine, tight) == expected
    assert engine.context.native.max_isects > capacity, "the room has to grow for this test to say anything"
    assert_same_bits(tight, round_capacity)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_changes_no_bit(gaussians: Gaussians, free: tuple[Run, list[float]], dtype: torch.dtype) -> None:
    run, (plain, expected) = Run(gaussians), free
    with torch.autocast("cpu", dtype=dtype):
        assert train(AsyncEngine(simulated()), run) == expected
    assert_same_bits(run, plain)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e38, 1e-41])
def test_a_sick_parameter_poisons_neither_image_nor_neighbours(gaussians: Gaussians, poison: float) -> None:
    run = Run(gaussians)
    for k, (_, tensor) in enumerate(run.gaussians.items()):
        tensor[k * 7 :: 41] = poison
    sick = torch.zeros(len(gaussians), dtype=torch.bool)
    for k in range(len(GROUPS)):
        sick[k * 7 :: 41] = True
    (loss,) = train(AsyncEngine(simulated()), run, steps=1)
    assert math.isfinite(loss)
    for name, tensor in run.tensors().items():
        assert bool(tensor[~sick].isfinite().all()), name


def test_losses_come_two_steps_later_and_in_order(gaussians: Gaussians) -> None:
    run, engine = Run(gaussians), AsyncEngine(simulated())
    camera = random_camera(1, 20, 20)
    reported = [len(engine.submit(run.gaussians, run.adam, run.inputs(camera, k))) for k in range(4)]
    assert reported == [0, 0, 1, 1]
    assert len(engine.drain()) == 2
    assert engine.drain() == []


def test_render_and_its_gradients(gaussians: Gaussians) -> None:
    camera = random_camera(2, 37, 29)
    ours, twin = (
        images_and_gradients(backend, gaussians, camera) for backend in (simulated(), Backend.cpu(isa="portable"))
    )
    assert len(ours) == 3 + 2 + len(GROUPS)
    assert_images_and_gradients(ours, twin)


class Recorder:
    """A library that notes what it is called with and does nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        def entry(call: abi.Call, *rest: object) -> int:
            self.calls.append((name, call.device))
            return 64 if name.endswith("_bytes") else 0

        return entry


def test_every_tensor_of_a_step_on_the_second_gpu_is_on_the_second_gpu() -> None:
    made: set[torch.device] = set()
    library = Recorder()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        device = torch.device("cuda", 1)
        backend = Backend(library, torch.float32, 0, device, 1, stream=7, deferred=True)  # type: ignore[arg-type]
        run = Run(random_scene(5, 80, sh_degree=2)[0].to(device))
        run.stats = DensifyStats.zeros(80, device)
        camera = random_camera(2, 37, 29)
        given = run.inputs(camera, 1)
        inputs = StepInputs(camera, given.target.to(device), LRS, 2, given.background.to(device), 0.2, False, run.stats)
        engine = AsyncEngine(backend, budget=FixedBudget(1 << 40), capacity=1000)
        engine._pipeline.run(run.gaussians, run.adam, 1, inputs, capacity=1000)
        arenas = [*engine.context.arena._buffers.values(), *engine._pipeline.arena._buffers.values()]
        made = {tensor.device for tensor in [*arenas, engine.context.counters, engine._pipeline.l1_ssim]}  # type: ignore[union-attr]
        assert len(arenas) > 10
    assert mode is not None
    assert made == {device}
    assert {number for _, number in library.calls} == {1}
    assert [name for name, _ in library.calls if not name.endswith("_bytes")] == [
        f"splat_{stage}" for stage in ("project", "bin", "blend", "loss", "blend_vjp", "project_vjp")
    ]
