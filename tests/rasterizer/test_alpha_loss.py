"""The alpha term of a step on every backend: its gradient is plain torch's, and the reported loss is without it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.testing import assert_close

from splatcli.rasterizer import StepInputs, render
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.alpha_loss import _write_by_torch, alpha_loss_reference, alpha_loss_vjp
from splatcli.rasterizer.depth_loss import DepthTarget, depth_loss_reference
from splatcli.rasterizer.reference import loss_reference
from tests.native.cases import NEEDS_COMPILER, float64
from tests.rasterizer.engines import ENGINES, F64, HEIGHT, LRS, WIDTH, assert_gradients, make_engine
from tests.rasterizer.scenes import leaves, random_camera, random_gaussians, random_image

CAMERA = random_camera(30, WIDTH, HEIGHT)
DEPTH = DepthTarget(torch.arange(40, 90), torch.full((50,), 0.3, dtype=F64), 0.7)


def photo() -> tuple[torch.Tensor, torch.Tensor]:
    """(target, mask): columns 0 to 4 are as dark as an empty pixel may be, rows 0 to 3 are masked."""
    target = (random_image(50, WIDTH, HEIGHT) * 249).round().to(torch.uint8) + 6
    target[:, :5] = torch.tensor([5, 0, 5], dtype=torch.uint8)
    mask = torch.zeros(HEIGHT, WIDTH, dtype=torch.bool)
    mask[:4] = True
    target[mask] = 0
    return target, mask


@NEEDS_COMPILER
@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("depth", [None, DEPTH], ids=["colours", "depths"])
@pytest.mark.parametrize("weight", [3.0, 0.0])
def test_gradients_are_those_of_autograd_and_the_loss_is_without_it(
    kind: str, depth: DepthTarget | None, weight: float
) -> None:
    target, mask = photo()
    engine, dtype = make_engine(kind)
    gaussians = random_gaussians(1, 60, sh_degree=1, dtype=F64).map(lambda t: t.to(dtype)).detach_clone()
    adam = AdamState.zeros_like(gaussians)
    known = None if depth is None else dataclasses.replace(depth, inverse=depth.inverse.to(dtype))
    inputs = StepInputs(
        *(CAMERA, target, LRS, 1, torch.zeros(3, dtype=dtype), 0.2, True, None),
        mask=mask,
        depth=known,
        alpha_lambda=weight,
        mask_lambda=8.0,
    )
    (loss,) = [*engine.submit(gaussians, adam, inputs), *engine.drain()]

    parameters = leaves(random_gaussians(1, 60, sh_degree=1, dtype=F64))
    out = render(parameters, CAMERA, background=torch.zeros(3, dtype=F64), antialiased=True, backend=float64())
    plain = loss_reference(out.image.masked_fill(mask[..., None], 0.0), target.double() / 255.0, 0.2)
    if depth is not None:
        plain = plain + depth_loss_reference(out.alpha, out.depth, depth)
    term = (weight * (1.0 - out.alpha)[4:, 5:].square().sum() + 8.0 * out.alpha[:4].sum()) / (WIDTH * HEIGHT)
    torch.autograd.backward(plain + term)
    exact = dtype == F64
    assert float(term.detach()) > 0.1
    assert_close(loss, float(plain.detach()), rtol=0, atol=1e-12 if exact else 1e-5)
    assert_gradients(adam, parameters)


@pytest.mark.parametrize("weight", [0.1, 0.0])
def test_the_gradient_has_the_same_bits_with_any_number_of_threads_and_on_a_gpu_as_on_a_cpu(weight: float) -> None:
    generator = torch.Generator().manual_seed(1)
    alpha = torch.rand(301, 997, generator=generator)
    target = torch.randint(0, 12, (301, 997, 3), generator=generator).to(torch.uint8)
    mask = torch.rand(301, 997, generator=generator) < 0.2
    found = [torch.full_like(alpha, float("nan")) for _ in range(4)]
    alpha_loss_vjp(alpha, target, mask, weight, 0.3, found[0])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        _write_by_torch(alpha, target, mask, 2 * weight / alpha.numel(), 0.3 / alpha.numel(), found[threads])
    assert all(torch.equal(found[0], other) for other in found[1:])
    leaf = alpha.double().requires_grad_(True)
    alpha_loss_reference(leaf, target, mask, weight, 0.3).backward()
    assert leaf.grad is not None
    assert_close(found[0].double(), leaf.grad, rtol=1e-6, atol=0)
