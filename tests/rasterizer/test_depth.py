"""The depth term of a step, on every backend: its value, its gradient, and that it costs nothing where it is not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from splatcli.gaussians import GROUPS, Gaussians
from splatcli.rasterizer import NativeEngine, StepInputs, render
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.depth_loss import DepthTarget, depth_loss, depth_loss_reference
from splatcli.rasterizer.reference import loss_reference
from tests.native.cases import NEEDS_COMPILER, float32, float64
from tests.rasterizer.engines import ENGINES, F64, HEIGHT, LRS, WIDTH, assert_gradients, make_engine
from tests.rasterizer.scenes import leaves, random_camera, random_gaussians, random_image

CAMERA = random_camera(30, WIDTH, HEIGHT)


def known(count: int, dtype: torch.dtype, weight: float = 0.7) -> DepthTarget:
    """Depths of ``count`` pixels, some of them of pixels in which nothing is drawn."""
    generator = torch.Generator().manual_seed(4)
    pixels = torch.randperm(WIDTH * HEIGHT, generator=generator)[:count].sort().values
    return DepthTarget(pixels, (0.15 + 0.3 * torch.rand(count, generator=generator, dtype=F64)).to(dtype), weight)


def stepped(kind: str, count: int | None) -> tuple[float, Gaussians, AdamState]:
    """(loss, Gaussians after a step that knows ``count`` depths, Adam's state); None knows of no depths at all."""
    engine, dtype = make_engine(kind)
    gaussians = random_gaussians(1, 60, sh_degree=1, dtype=F64).map(lambda t: t.to(dtype)).detach_clone()
    adam = AdamState.zeros_like(gaussians)
    target = (random_image(50, WIDTH, HEIGHT) * 255).round().to(torch.uint8)
    depth = None if count is None else known(count, dtype)
    background = torch.tensor([0.2, 0.4, 0.6], dtype=dtype)
    inputs = StepInputs(CAMERA, target, LRS, 1, background, 0.2, True, None, depth=depth)
    (loss,) = [*engine.submit(gaussians, adam, inputs), *engine.drain()]
    return loss, gaussians, adam


@NEEDS_COMPILER
@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("count", [1, 300, WIDTH * HEIGHT])
def test_loss_and_gradients_are_those_of_autograd(kind: str, count: int) -> None:
    loss, _, adam = stepped(kind, count)
    parameters = leaves(random_gaussians(1, 60, sh_degree=1, dtype=F64))
    background = torch.tensor([0.2, 0.4, 0.6], dtype=F64)
    out = render(parameters, CAMERA, background=background, antialiased=True, backend=float64())
    assert count == 1 or bool((out.depth == 0).reshape(-1)[known(count, F64).pixels].any())
    target = (random_image(50, WIDTH, HEIGHT) * 255).round().double() / 255.0
    term = depth_loss_reference(out.alpha, out.depth, known(count, F64))
    expected = loss_reference(out.image, target, 0.2) + term
    torch.autograd.backward(expected)
    exact = adam.exp_avg.means.dtype == F64
    assert float(term.detach()) > 0.01
    assert_close(loss, float(expected.detach()), rtol=0, atol=1e-12 if exact else 1e-5)
    assert_gradients(adam, parameters)


@NEEDS_COMPILER
@pytest.mark.parametrize("kind", ENGINES)
def test_a_view_of_which_no_depth_is_known_moves_the_same(kind: str) -> None:
    (loss, moved, _), (plain_loss, plain, _) = stepped(kind, 0), stepped(kind, None)
    assert loss == plain_loss
    for name in GROUPS:
        assert_close(getattr(moved, name), getattr(plain, name), rtol=0, atol=1e-6)


@NEEDS_COMPILER
def test_a_step_without_depths_takes_no_memory_for_them() -> None:
    buffers: list[set[str]] = []
    for depth in (None, known(5, torch.float32)):
        engine = NativeEngine(float32("portable"))
        gaussians = random_gaussians(1, 60, sh_degree=0)
        target = torch.zeros(HEIGHT, WIDTH, 3, dtype=torch.uint8)
        inputs = StepInputs(CAMERA, target, LRS, 0, torch.zeros(3), 0.2, False, None, depth=depth)
        engine.step(gaussians, AdamState.zeros_like(gaussians), inputs)
        buffers.append(set(engine._pipeline.arena._buffers))
    assert buffers[1] - buffers[0] == {"depth", "v_alpha", "v_depth"}


def planes(count: int) -> tuple[Tensor, Tensor, DepthTarget]:
    generator = torch.Generator().manual_seed(1)
    alpha = torch.rand(count, 1, generator=generator) + 0.01
    depth = alpha * (1.0 + 4.0 * torch.rand(count, 1, generator=generator))
    depth[::7] = 0.0
    inverse = 0.2 + torch.rand(count, generator=generator)
    return alpha, depth, DepthTarget(torch.arange(count), inverse, 0.3)


def test_the_term_has_the_same_bits_with_any_number_of_threads() -> None:
    alpha, depth, target = planes(300_001)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        v_alpha, v_depth = torch.empty_like(alpha), torch.empty_like(depth)
        term = depth_loss(alpha, depth, target, v_alpha, v_depth)
        found.append((float(term), v_alpha, v_depth))
    for term, v_alpha, v_depth in found[1:]:
        assert term == found[0][0]
        assert torch.equal(v_alpha, found[0][1])
        assert torch.equal(v_depth, found[0][2])


def test_where_nothing_is_drawn_the_term_counts_and_has_no_gradient() -> None:
    alpha, depth, target = planes(70)
    v_alpha, v_depth = torch.full_like(alpha, 9.0), torch.full_like(depth, 9.0)
    term = depth_loss(alpha, depth, target, v_alpha, v_depth)
    inverse = torch.where(depth > 0, alpha / depth, 0.0).squeeze(1)
    assert float(term) == pytest.approx(0.3 * float((inverse - target.inverse).abs().mean()), rel=1e-6)
    assert not v_alpha[::7].any()
    assert not v_depth[::7].any()
    assert bool((v_depth[1::7] != 0).all())


def test_a_reduced_image_knows_the_nearest_of_the_depths_in_each_pixel() -> None:
    width, height, step, small = 37, 29, (4, 4), (7, 9)
    generator = torch.Generator().manual_seed(6)
    pixels = torch.randperm(width * height, generator=generator)[:300].sort().values
    target = DepthTarget(pixels, torch.rand(300, generator=generator) + 0.1, 0.4)
    expected: dict[int, float] = {}
    for pixel, inverse in zip(pixels.tolist(), target.inverse.tolist(), strict=True):
        y, x = pixel // width // step[0], pixel % width // step[1]
        if y < small[0] and x < small[1]:  # the last row and the last column are cut off
            expected[y * small[1] + x] = max(inverse, expected.get(y * small[1] + x, 0.0))
    assert len(pixels) > int((target.pixels // width < 28).sum()), "some are cut off"
    found = target.reduced((height, width), step)
    assert found.pixels.tolist() == sorted(expected)
    assert found.inverse.tolist() == [expected[place] for place in sorted(expected)]
    assert found.weight == 0.4
