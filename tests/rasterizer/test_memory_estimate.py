"""The memory estimate of a step or render covers every buffer that it makes; on a GPU, slack included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from splatcli.gaussians import GROUPS
from splatcli.rasterizer import AdamState, AsyncEngine, DensifyStats, StepInputs, render
from splatcli.rasterizer.memory_budget import (
    MAX_ISECTS,
    Arena,
    MemoryBudget,
    free_memory,
    held_memory,
    round_capacity,
)
from splatcli.rasterizer.memory_estimate import (
    IsectCount,
    MemoryEstimate,
    Workload,
    predict_isects,
    render_memory,
    state_bytes,
    step_memory,
    tile_row_bytes,
)
from tests.kernels.simt import simulated
from tests.native.cases import NEEDS_COMPILER, float32
from tests.rasterizer.fixed_budget import FixedBudget
from tests.rasterizer.scenes import random_scene


@pytest.fixture
def arenas(monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, int]]:
    """Bytes of every buffer of every arena, as they were largest."""
    taken: dict[int, dict[str, int]] = {}
    plain = Arena.take

    def take(self: Arena, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        buffer = plain(self, name, numel, dtype)
        held = taken.setdefault(id(self), {})
        held[name] = max(held.get(name, 0), buffer.nbytes)
        return buffer

    monkeypatch.setattr(Arena, "take", take)
    return taken


def allocated(arenas: dict[int, dict[str, int]]) -> int:
    return sum(sum(buffers.values()) for buffers in arenas.values())


@NEEDS_COMPILER
@pytest.mark.parametrize(("n", "scale"), [(60, 1.0), (500, 0.05)])
def test_a_step_on_a_gpu_has_no_buffer_that_was_not_predicted(
    n: int, scale: float, arenas: dict[int, dict[str, int]]
) -> None:
    gaussians, camera = random_scene(3, n, width=70, height=50, sh_degree=1, scale=scale)
    isects = predict_isects(gaussians, camera)
    backend = simulated()
    adam, stats = AdamState.zeros_like(gaussians), DensifyStats.zeros(n)
    target = torch.zeros(50, 70, 3, dtype=torch.uint8)
    state = sum(t.nbytes for g in (gaussians, adam.exp_avg, adam.exp_avg_sq) for _, t in g.items())
    state += adam.sh_last_step.nbytes + stats.grad2d.nbytes + stats.count.nbytes
    assert state == state_bytes(n, 1)
    engine = AsyncEngine(backend, budget=FixedBudget(1 << 40))
    engine.submit(
        gaussians,
        adam,
        StepInputs(camera, target, dict.fromkeys(GROUPS, 0.0), 1, torch.zeros(3), 0.2, False, stats, alpha_lambda=0.1),
    )
    engine.drain()
    reported = step_memory(backend, Workload(n, 1, 70, 50, isects, alpha=True))
    beside = reported.projected + reported.pixels + reported.isects
    # The photo, and which of its pixels count, are no buffers, and take 8 bytes a pixel of it.
    assert allocated(arenas) <= beside - 8 * 70 * 50 <= 1.6 * allocated(arenas)


@NEEDS_COMPILER
def test_buffers_of_tile_intersections_on_a_gpu_have_their_slack_once() -> None:
    gaussians, camera = random_scene(3, 500, width=70, height=50, sh_degree=1, scale=0.05)
    adam, stats = AdamState.zeros_like(gaussians), DensifyStats.zeros(500)
    inputs = StepInputs(
        camera,
        torch.zeros(50, 70, 3, dtype=torch.uint8),
        dict.fromkeys(GROUPS, 0.0),
        1,
        torch.zeros(3),
        0.2,
        False,
        stats,
    )
    engine = AsyncEngine(simulated(), budget=FixedBudget(1 << 40))
    for _ in range(3):
        engine.submit(gaussians, adam, inputs)
    engine.drain()
    capacity = round_capacity(predict_isects(gaussians, camera).boxes)
    arena = engine.context.arena
    held = {name: arena.nbytes(name) for name in ("isect_gaussians", "isect_grad_rows", "isect_masks", "isect_grads")}
    assert held == {
        "isect_gaussians": 4 * capacity,
        "isect_grad_rows": 4 * capacity,
        "isect_masks": 2 * capacity,
        "isect_grads": 64 * capacity,
    }
    # Of the first view, whose count is no capacity yet, it may have a slack that suffices.
    assert arena.nbytes("workspace") < 1.1 * engine.context.native.workspace_bytes


@NEEDS_COMPILER
@pytest.mark.parametrize("backend", [lambda: float32(), simulated], ids=["cpu", "simt"])
def test_a_render_has_no_buffer_that_was_not_predicted(backend: object, arenas: dict[int, dict[str, int]]) -> None:
    gaussians, camera = random_scene(4, 400, width=120, height=90, sh_degree=0, scale=0.1)
    library = backend()  # type: ignore[operator]
    with torch.no_grad():
        render(gaussians, camera, backend=library, budget=FixedBudget(1 << 40))
    reported = render_memory(library, Workload(400, 0, 120, 90, predict_isects(gaussians, camera)))
    roundings = 64 * 8
    assert allocated(arenas) - roundings <= reported.projected + reported.isects <= 1.6 * allocated(arenas)


@NEEDS_COMPILER
def test_the_parts_go_with_what_they_are_named_after() -> None:
    backend = float32()
    work = Workload(1000, 3, 160, 96, IsectCount(30_000, 36_000, 900))
    one = step_memory(backend, work)
    assert one.state == state_bytes(1000, 3) == 1000 * (3 * 236 + 12)
    more = step_memory(backend, Workload(1000, 3, 160, 96, IsectCount(60_000, 72_000, 900)))
    assert (more.state, more.projected, more.pixels) == (one.state, one.projected, one.pixels)
    assert more.isects == pytest.approx(2 * one.isects, rel=1e-3)
    assert tile_row_bytes(backend, work) == pytest.approx(one.isects / 6, rel=1e-2)
    assert one.total > one.state + one.projected + one.pixels + one.isects
    assert isinstance(one, MemoryEstimate)


@NEEDS_COMPILER
def test_more_pairs_than_can_be_numbered_have_a_size_all_the_same() -> None:
    backend = float32()
    many = 16 * MAX_ISECTS
    reported = step_memory(backend, Workload(1_000_000, 0, 1600, 1063, IsectCount(many, many, 1_000_000)))
    assert reported.isects == pytest.approx(many * 86, rel=1e-3)


def test_room_has_a_quarter_more_and_not_half() -> None:
    for isects in (0, 1, 7, 1000, 123_456_789):
        assert 1.25 * isects <= round_capacity(isects) <= 1.25 * 1.125 * isects + 2


def test_pairs_leave_room_for_the_rest_of_a_budget() -> None:
    cpu = torch.device("cpu")
    held = held_memory(cpu)
    assert MemoryBudget(cpu, held + (64 << 20)).left() <= 64 << 20
    assert 0 < MemoryBudget(cpu, 1 << 60).left() <= free_memory(cpu)
    large = 4 * held
    assert MemoryBudget(cpu, large).left() <= large // 2
    assert MemoryBudget(cpu, held // 2).left() == 0
