"""Gradients of the native core against finite differences, in float64: each input, each output, each branch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from splatcli.gaussians import GROUPS, Gaussians
from splatcli.rasterizer.reference import JACOBIAN_MARGIN
from splatcli.rasterizer.rendering import render
from splatcli.rasterizer.train_step import NativeEngine
from splatcli.scene.camera import Camera
from tests.native.cases import NEEDS_COMPILER, float64, native_loss, rows_of
from tests.rasterizer.reference_projection import project_reference
from tests.rasterizer.scenes import random_image, random_scene

pytestmark = NEEDS_COMPILER
F64 = torch.float64


def scene(seed: int, n: int = 4, *, width: int = 7, height: int = 5, sh_degree: int = 1) -> tuple[Gaussians, Camera]:
    """A few big Gaussians in a frame that is smaller than they are, so that each pixel sees most of them."""
    gaussians, camera = random_scene(seed, n, width=width, height=height, sh_degree=sh_degree, scale=0.5, dtype=F64)
    gaussians.logit_opacities.clamp_(-2.0, 3.0)
    return gaussians, camera


def check(gaussians: Gaussians, camera: Camera, *, antialiased: bool = False, **settings: int) -> None:
    """gradcheck of image, alpha and depth by every parameter, the background and the pose."""
    background = torch.tensor([0.2, 0.5, 0.7], dtype=F64)
    viewmat = torch.from_numpy(camera.viewmat).clone()

    def run(background: Tensor, rows: Tensor, *groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        bundle = Gaussians(**dict(zip(GROUPS, groups, strict=True)))
        pose = torch.cat([rows, viewmat[3:]])
        out = render(
            bundle,
            camera,
            background=background,
            viewmat=pose,
            antialiased=antialiased,
            backend=float64(),
            **settings,
        )
        return out.image, out.alpha, out.depth

    inputs = [background, viewmat[:3].clone(), *(tensor for _, tensor in gaussians.items())]
    inputs = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    _, alpha, _ = run(*inputs)
    assert alpha.max() > 0.3, "the scene has to be in view"
    assert torch.autograd.gradcheck(run, inputs, eps=1e-6, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("antialiased", [False, True])
@pytest.mark.parametrize(("seed", "sh_degree"), [(21, 0), (27, 1), (24, 2), (26, 3), (25, 4)])
def test_gradcheck_by_everything(seed: int, sh_degree: int, antialiased: bool) -> None:
    gaussians, camera = scene(seed, 3, width=6, height=5, sh_degree=sh_degree)
    check(gaussians, camera, antialiased=antialiased)


def test_gradcheck_with_fewer_degrees_than_there_are() -> None:
    gaussians, camera = scene(26, 3, width=6, height=5, sh_degree=3)
    check(gaussians, camera, sh_degree=1)


@pytest.mark.parametrize(("width", "height"), [(19, 3), (2, 18), (1, 1)])
def test_gradcheck_of_images_that_are_not_square_or_fill_no_tile(width: int, height: int) -> None:
    gaussians, camera = scene(27, 3, width=width, height=height)
    check(gaussians, replace(camera, fx=6.0, fy=7.0))


@pytest.mark.parametrize("antialiased", [False, True])
def test_gradcheck_off_the_centre_with_the_jacobian_clamped(antialiased: bool) -> None:
    gaussians, camera = scene(23, 5)
    camera = replace(camera, cx=0.1 * camera.width, cy=0.95 * camera.height)
    # Large Gaussians whose means lie far outside the frame, one beyond each of its sides.
    viewmat = torch.from_numpy(camera.viewmat)
    in_camera = torch.tensor(
        [[0.0, 0.0, 4.0], [6.0, 0.2, 4.1], [-3.0, -0.2, 4.4], [0.3, 2.6, 4.2], [0.1, -6.0, 3.9]], dtype=F64
    )
    gaussians.means[:] = (in_camera - viewmat[:3, 3]) @ viewmat[:3, :3]
    gaussians.log_scales[1:] = 0.9 + 0.3 * (gaussians.log_scales[1:] - gaussians.log_scales[1:].mean())
    gaussians.logit_opacities[:] = torch.tensor([0.5, 1.5, 1.0, 1.2, 2.0], dtype=F64)
    x, y, z = in_camera.T
    u, v = camera.fx * x / z + camera.cx, camera.fy * y / z + camera.cy
    beyond = [
        u > (1 + JACOBIAN_MARGIN) * camera.width,
        u < -JACOBIAN_MARGIN * camera.width,
        v > (1 + JACOBIAN_MARGIN) * camera.height,
        v < -JACOBIAN_MARGIN * camera.height,
    ]
    assert all(bool(side.any()) for side in beyond), "the clamp has to hold on each side"
    alone = [render(rows_of(gaussians, slice(i, i + 1)), camera, backend=float64()).alpha for i in range(5)]
    assert all(float(alpha.max()) > 0.01 for alpha in alone), "each of them reaches the frame"
    check(gaussians, camera, antialiased=antialiased)


def opacity_field(gaussians: Gaussians, camera: Camera, index: int) -> Tensor:
    """[H, W] alpha of one Gaussian at each pixel, before its clamp."""
    view = project_reference(gaussians, camera)
    xs = torch.arange(camera.width, dtype=F64)[None] + 0.5 - view.means2d[index, 0]
    ys = torch.arange(camera.height, dtype=F64)[:, None] + 0.5 - view.means2d[index, 1]
    a, b, c = view.conics[index]
    return view.opacities[index] * torch.exp(-0.5 * (a * xs * xs + c * ys * ys) - b * xs * ys)


def test_gradcheck_where_alpha_is_clamped() -> None:
    gaussians, camera = scene(21, 3)
    gaussians.logit_opacities[:] = torch.tensor([9.5, 8.0, 0.3], dtype=F64)
    gaussians.log_scales[:2] += 2.5
    raw = [opacity_field(gaussians, camera, i) for i in range(2)]
    assert all(bool((alpha > 0.999).any()) for alpha in raw), "there are pixels where the clamp holds"
    assert all(bool((alpha < 0.999).any()) for alpha in raw), "and pixels where it does not"
    check(gaussians, camera)


def test_gradcheck_through_many_layers_and_stopped_pixels() -> None:
    gaussians, camera = scene(22, 12, sh_degree=0)
    gaussians.logit_opacities[:] = 2.0
    gaussians.means *= 0.5
    out = render(gaussians, camera, backend=float64())
    assert out.alpha.max() > 0.998
    check(gaussians, camera)


def test_gradcheck_with_black_colours() -> None:
    gaussians, camera = scene(24, 4, sh_degree=2)
    gaussians.sh0[0] = -4.0
    gaussians.sh0[1, 1] = -4.0
    colors = project_reference(gaussians, camera).colors
    assert int((colors == 0).sum()) >= 4, "some colours have to be clamped"
    check(gaussians, camera)


@pytest.mark.parametrize("length", [1e-2, 30.0])
def test_gradcheck_with_quaternions_of_any_length(length: float) -> None:
    gaussians, camera = scene(23, 3)
    gaussians.quats *= length / gaussians.quats.norm(dim=1, keepdim=True)
    # Small differences in a short quaternion turn it far: finite differences need steps of its own size.
    weights = torch.randn(camera.height, camera.width, 3, generator=torch.Generator().manual_seed(0), dtype=F64)

    def loss(quats: Tensor) -> Tensor:
        bundle = Gaussians(**{**dict(gaussians.items()), "quats": quats})
        return (render(bundle, camera, backend=float64()).image * weights).sum()

    quats = gaussians.quats.clone().requires_grad_()
    torch.autograd.backward(loss(quats))
    assert quats.grad is not None
    numeric = central_differences(lambda q: float(loss(q)), gaussians.quats, 1e-5 * length)
    assert_close(quats.grad * length, numeric * length, rtol=1e-6, atol=1e-7)
    assert_close(
        (quats.grad * quats).sum(1).detach() * length, torch.zeros(3, dtype=F64), rtol=0, atol=1e-12 * length**2
    )


@pytest.mark.parametrize("output", ["image", "alpha", "depth"])
def test_each_output_alone_leads_back(output: str) -> None:
    gaussians, camera = scene(25, 4)

    def run(*groups: Tensor) -> Tensor:
        bundle = Gaussians(**dict(zip(GROUPS, groups, strict=True)))
        result: Tensor = getattr(render(bundle, camera, backend=float64()), output)
        return result

    inputs = [tensor.clone().requires_grad_() for _, tensor in gaussians.items()]
    assert torch.autograd.gradcheck(run, inputs, eps=1e-6, atol=1e-6, rtol=1e-5)


def test_the_last_row_of_the_pose_is_not_read() -> None:
    gaussians, camera = scene(21)
    viewmat = torch.from_numpy(camera.viewmat).clone().requires_grad_()
    out = render(gaussians, camera, viewmat=viewmat, backend=float64())
    torch.autograd.backward(out.image.sum())
    assert viewmat.grad is not None
    assert viewmat.grad[:3].any()
    assert not viewmat.grad[3].any()


def test_only_what_asks_for_a_gradient_gets_one() -> None:
    gaussians, camera = scene(21)
    gaussians.means.requires_grad_()
    background = torch.zeros(3, dtype=F64)
    out = render(gaussians, camera, background=background, backend=float64())
    torch.autograd.backward(out.image.sum())
    assert gaussians.means.grad is not None
    assert [name for name, tensor in gaussians.items() if tensor.grad is not None] == ["means"]
    assert background.grad is None
    with torch.no_grad():
        assert not render(gaussians, camera, backend=float64()).image.requires_grad


def test_a_second_backward_pass_adds_the_same_again() -> None:
    gaussians, camera = scene(22)
    sh0 = gaussians.sh0.requires_grad_()
    image = render(gaussians, camera, backend=float64()).image
    torch.autograd.backward(image.sum(), retain_graph=True)
    assert sh0.grad is not None
    first = sh0.grad.clone()
    torch.autograd.backward(image.sum())
    assert torch.equal(sh0.grad, 2 * first)


def test_parameters_changed_between_the_passes_are_an_error() -> None:
    gaussians, camera = scene(22)
    gaussians.means.requires_grad_()
    image = render(gaussians, camera, backend=float64()).image
    with torch.no_grad():
        gaussians.means += 1.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(image.sum())


# --- loss ------------------------------------------------------------------------------------------------------------


def central_differences(f: Callable[[Tensor], float], at: Tensor, step: float) -> Tensor:
    """The gradient of a scalar function of a tensor, by (f(x + h) - f(x - h)) / 2h for each number."""
    out = torch.empty(at.numel(), dtype=F64)
    for i in range(at.numel()):
        moved = at.clone()
        moved.view(-1)[i] += step
        above = f(moved)
        moved.view(-1)[i] -= 2 * step
        out[i] = (above - f(moved)) / (2 * step)
    return out.view(at.shape)


@pytest.mark.parametrize("ssim_lambda", [0.0, 0.2, 1.0])
@pytest.mark.parametrize(("width", "height"), [(1, 1), (9, 6), (3, 13)])
def test_loss_gradient_is_that_of_the_loss(width: int, height: int, ssim_lambda: float) -> None:
    engine = NativeEngine(float64())
    image, target = random_image(1, width, height, F64), random_image(2, width, height, F64)
    assert (image - target).abs().min() > 1e-4, "away from the corner of |x - y|"
    v_image = torch.full_like(image, np.nan)
    value = native_loss(engine, image, target, v_image, ssim_lambda)
    assert value == native_loss(engine, image, target, None, ssim_lambda)
    numeric = central_differences(lambda x: native_loss(engine, x, target, None, ssim_lambda), image, 1e-6)
    assert_close(v_image, numeric, rtol=1e-6, atol=1e-9)


def test_loss_gradient_against_bytes() -> None:
    engine = NativeEngine(float64())
    image = random_image(3, 8, 7, F64)
    target = (random_image(4, 8, 7, F64) * 255).round().to(torch.uint8)
    v_image = torch.full_like(image, np.nan)
    native_loss(engine, image, target, v_image, 0.2)
    numeric = central_differences(lambda x: native_loss(engine, x, target, None, 0.2), image, 1e-6)
    assert_close(v_image, numeric, rtol=1e-6, atol=1e-9)
