"""How torch treats functions whose work is in the native library.

torch.compile() of a program that renders gives the same figures and gradients, and traces nothing of the renderer:
warnings are errors in these tests, and dynamo warns of most of what it would find there. Gradients of gradients are an
error.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from splatcli.gaussians import Gaussians
from splatcli.gsplat import rasterization, spherical_harmonics
from splatcli.rasterizer import render
from splatcli.rasterizer.image_loss import fused_ssim
from splatcli.rasterizer.opaque import graph_break
from tests.rasterizer.scenes import front_camera

Program = Callable[[Tensor, Tensor], Tensor]
WIDTH, HEIGHT, FOCAL = 32, 24, 30.0


def gsplat_program(means: Tensor, colours: Tensor) -> Tensor:
    """Colours by harmonics, an image, and its likeness to another; something of torch before, between and after."""
    count = len(means)
    colours = spherical_harmonics(1, means * 2.0, colours.tanh())
    intrinsics = torch.tensor([[[FOCAL, 0.0, WIDTH / 2], [0.0, FOCAL, HEIGHT / 2], [0.0, 0.0, 1.0]]])
    image, alpha, _ = rasterization(
        means * 1.01,
        torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(count, 4),
        torch.full((count, 3), 0.1),
        torch.full((count,), 0.7),
        colours.sigmoid(),
        torch.eye(4)[None],
        intrinsics,
        WIDTH,
        HEIGHT,
    )
    image = image.movedim(-1, 1).square()
    return 1.0 - fused_ssim(image, 0.5 * torch.ones_like(image)) + alpha.mean()


def program_of_raw_parameters(means: Tensor, colours: Tensor) -> Tensor:
    count = len(means)
    gaussians = Gaussians(
        means=means * 1.01,
        log_scales=torch.full((count, 3), -2.0),
        quats=torch.tensor([[1.0, 0.0, 0.0, 0.0]]).repeat(count, 1),
        logit_opacities=torch.full((count,), 1.0),
        sh0=colours[:, 0].tanh(),
        shN=colours[:, 1:] * 0.1,
    )
    return render(gaussians, front_camera(WIDTH, HEIGHT, FOCAL)).image.square().mean()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # which dynamo looks at
@pytest.mark.parametrize(("program", "breaks"), [(gsplat_program, 3), (program_of_raw_parameters, 2)])
def test_a_compiled_program_has_the_same_gradients(program: Program, breaks: int) -> None:
    generator = torch.Generator().manual_seed(1)
    means = torch.randn(50, 3, generator=generator) * 0.5 + torch.tensor([0.0, 0.0, 4.0])
    colours = torch.randn(50, 4, 3, generator=generator)
    program(means, colours)  # the first call loads the library
    explained = torch._dynamo.explain(program)(means, colours)
    assert explained.graph_break_count == breaks, explained.break_reasons
    results = []
    for called in (program, torch.compile(program, backend="eager")):
        inputs = means.clone().requires_grad_(), colours.clone().requires_grad_()
        value = called(*inputs)
        value.backward()
        results.append((value.detach(), *(one.grad for one in inputs)))
    for got, expected in zip(*results, strict=True):
        assert expected is not None
        assert expected.abs().max() > 0
        torch.testing.assert_close(got, expected)


def test_a_torch_without_these_marks_disables_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy")
    called = graph_break(lambda value: value + 1.0)
    assert called._torchdynamo_disable
    assert called(torch.ones(())) == 2.0


def test_a_program_that_compiles_nothing_does_not_import_dynamo() -> None:
    lines = (
        "import sys, torch",
        "from splatcli.gsplat import spherical_harmonics",
        "spherical_harmonics(0, torch.ones(2, 3), torch.ones(2, 1, 3))",
        "sys.exit('torch._dynamo' in sys.modules)",
    )
    assert subprocess.run([sys.executable, "-c", "\n".join(lines)], check=False).returncode == 0


def image_of(means: Tensor, colours: Tensor) -> Tensor:
    count = len(means)
    return rasterization(
        means,
        torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(count, 4),
        torch.full((count, 3), 0.1),
        torch.full((count,), 0.7),
        colours[:, 0],
        torch.eye(4)[None],
        torch.tensor([[[FOCAL, 0.0, WIDTH / 2], [0.0, FOCAL, HEIGHT / 2], [0.0, 0.0, 1.0]]]),
        WIDTH,
        HEIGHT,
    )[0]


def likeness_of(means: Tensor, colours: Tensor) -> Tensor:
    return fused_ssim(means[None, None], colours[None, None, :, 0])


@pytest.mark.parametrize("program", [image_of, program_of_raw_parameters, likeness_of])
@pytest.mark.parametrize("loss", [torch.sum, lambda values: values.square().sum()], ids=["sum", "squares"])
def test_gradients_of_gradients_are_an_error(program: Program, loss: Callable[[Tensor], Tensor]) -> None:
    """A penalty on a gradient would have no effect where the incoming gradients are constants, as those of a sum."""
    generator = torch.Generator().manual_seed(1)
    means = (torch.randn(50, 3, generator=generator) * 0.5 + torch.tensor([0.0, 0.0, 4.0])).requires_grad_()
    value = loss(program(means, torch.randn(50, 4, 3, generator=generator)))
    (gradient,) = torch.autograd.grad(value, means, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (value + gradient.square().sum()).backward()
