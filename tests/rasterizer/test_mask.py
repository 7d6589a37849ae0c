"""Masked pixels take no part in a step, on every backend: neither in its loss nor in any gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from splatcli.gaussians import GROUPS, Gaussians
from splatcli.rasterizer import DensifyStats, StepInputs, render
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.reference import loss_reference
from splatcli.scene.camera import Camera
from tests.native.cases import NEEDS_COMPILER, float64
from tests.rasterizer.engines import ENGINES, F64, HEIGHT, LRS, WIDTH, assert_gradients, make_engine
from tests.rasterizer.scenes import leaves, random_camera, random_gaussians, random_image

pytestmark = NEEDS_COMPILER


def blocks() -> Tensor:
    """[H, W] bool: some of the blocks of four pixels are hidden."""
    generator = torch.Generator().manual_seed(3)
    coarse = torch.rand(HEIGHT // 4 + 1, WIDTH // 4 + 1, generator=generator) < 0.4
    return coarse.repeat_interleave(4, 0).repeat_interleave(4, 1)[:HEIGHT, :WIDTH].contiguous()


class Step:
    """One step of an engine on one view, and everything that it changed."""

    def __init__(self, kind: str, hidden: Tensor | None, *, gaussians: Gaussians | None = None) -> None:
        engine, dtype = make_engine(kind)
        given = random_gaussians(1, 90, sh_degree=2, dtype=F64) if gaussians is None else gaussians
        self.camera: Camera = random_camera(30, WIDTH, HEIGHT)
        self.target = (random_image(50, WIDTH, HEIGHT) * 255).round().to(torch.uint8)
        if hidden is not None:
            self.target[hidden] = 0
        self.background = torch.tensor([0.2, 0.4, 0.6], dtype=dtype)
        self.before = given.map(lambda t: t.to(dtype)).detach_clone()
        self.after = self.before.detach_clone()
        self.adam = AdamState.zeros_like(self.after)
        self.stats = DensifyStats(torch.zeros(len(given), dtype=dtype), torch.zeros(len(given), dtype=dtype))
        inputs = StepInputs(self.camera, self.target, LRS, 2, self.background, 0.2, False, self.stats, hidden)
        (self.loss,) = [*engine.submit(self.after, self.adam, inputs), *engine.drain()]

    def tensors(self) -> dict[str, Any]:
        moved = {name: getattr(self.after, name) for name in GROUPS}
        first = {f"exp_avg.{name}": getattr(self.adam.exp_avg, name) for name in GROUPS}
        return {**moved, **first, "grad2d": self.stats.grad2d, "count": self.stats.count}


@pytest.mark.parametrize("kind", ENGINES)
def test_nothing_hidden_changes_no_bit(kind: str) -> None:
    plain, open_ = Step(kind, None), Step(kind, torch.zeros(HEIGHT, WIDTH, dtype=torch.bool))
    assert open_.loss == plain.loss
    for (name, tensor), other in zip(plain.tensors().items(), open_.tensors().values(), strict=True):
        assert torch.equal(tensor, other), name


@pytest.mark.parametrize("kind", ENGINES)
def test_loss_and_gradients_are_those_of_the_pixels_that_count(kind: str) -> None:
    hidden = blocks()
    step = Step(kind, hidden)
    parameters = leaves(random_gaussians(1, 90, sh_degree=2, dtype=F64))
    out = render(parameters, step.camera, sh_degree=2, background=step.background.double(), backend=float64())
    shown = out.image.masked_fill(hidden[..., None], 0.0)
    expected = loss_reference(shown, step.target.double() / 255.0, 0.2)
    torch.autograd.backward(expected)
    exact = step.before.means.dtype == F64
    assert_close(step.loss, float(expected.detach()), rtol=0, atol=1e-12 if exact else 1e-5)
    assert_gradients(step.adam, parameters)


@pytest.mark.parametrize("kind", ENGINES)
def test_a_gaussian_that_only_hidden_pixels_see_does_not_move(kind: str) -> None:
    gaussians = random_gaussians(1, 90, sh_degree=2, dtype=F64)
    everything = torch.ones(HEIGHT, WIDTH, dtype=torch.bool)
    step = Step(kind, everything, gaussians=gaussians)
    assert step.loss == pytest.approx(0.0, abs=1e-6)
    for name in GROUPS:
        assert torch.equal(getattr(step.after, name), getattr(step.before, name)), name
    assert not step.stats.grad2d.any()
    assert Step(kind, None, gaussians=gaussians).stats.grad2d.any()


@pytest.mark.parametrize("kind", ENGINES)
def test_what_is_drawn_under_a_mask_makes_no_difference(kind: str) -> None:
    """A Gaussian under the mask is made bright, or taken away: the loss and the others' steps keep their bits."""
    hidden = torch.zeros(HEIGHT, WIDTH, dtype=torch.bool)
    hidden[:, : WIDTH // 2] = True
    gaussians = random_gaussians(1, 90, sh_degree=2, dtype=F64)
    camera = random_camera(30, WIDTH, HEIGHT)
    in_camera = gaussians.means @ torch.from_numpy(camera.viewmat[:3, :3]).T + torch.from_numpy(camera.viewmat[:3, 3])
    x = camera.fx * in_camera[:, 0] / in_camera[:, 2] + camera.cx
    small = gaussians.log_scales.clone().fill_(-6.0)
    gaussians = Gaussians(**{**dict(gaussians.items()), "log_scales": small})
    under = (in_camera[:, 2] > 0.1) & (x > 3) & (x < WIDTH // 2 - 3)
    assert 3 < int(under.sum()) < 87
    brighter = gaussians.detach_clone()
    brighter.sh0[under] += 3.0
    before, after = Step(kind, hidden, gaussians=gaussians), Step(kind, hidden, gaussians=brighter)
    assert after.loss == before.loss
    for name in GROUPS:
        assert torch.equal(getattr(after.after, name)[~under], getattr(before.after, name)[~under]), name
