"""What the tests of the native core share: the builds that run here, whole gradients, and where cut-offs are near."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from splatcli.errors import ResourceError
from splatcli.gaussians import Gaussians
from splatcli.native import abi, build
from splatcli.native.backend import Backend, best_isa
from splatcli.native.build import find_compiler
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.reference import render_reference
from splatcli.rasterizer.rendering import ViewRender, render
from splatcli.rasterizer.train_step import NativeEngine, total_loss
from splatcli.scene.camera import Camera
from tests.rasterizer.fixed_budget import FixedBudget
from tests.rasterizer.scenes import leaves, random_image


def _has_compiler() -> bool:
    try:
        find_compiler()
    except ResourceError:
        return False
    return True


#: For a whole module: `pytestmark = NEEDS_COMPILER`.
NEEDS_COMPILER = pytest.mark.skipif(not _has_compiler(), reason="no C++ compiler: the native core cannot be built")
#: The builds that this processor runs, plainest first.
ISAS = tuple(reversed(list(build.ISA_FLAGS)[list(build.ISA_FLAGS).index(best_isa()) :]))


def float32(isa: str | None = None, threads: int = 1) -> Backend:
    return Backend.cpu(isa=isa, threads=threads)


def float64(threads: int = 1) -> Backend:
    return Backend.cpu(torch.float64, threads=threads)


@dataclass(frozen=True)
class Weights:
    """What a scalar loss weighs the images with: [H, W, 3], [H, W] and [H, W], float64."""

    image: Tensor
    alpha: Tensor
    depth: Tensor

    @classmethod
    def random(cls, seed: int, camera: Camera) -> Weights:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(camera.height, camera.width, *shape, generator=generator, dtype=torch.float64)

        return cls(normal(3), normal(), normal())

    def where(self, keep: Tensor) -> Weights:
        """Zero where ``keep`` [H, W] is False."""
        return Weights(self.image * keep[..., None], self.alpha * keep, self.depth * keep)

    def backward(self, image: Tensor, alpha: Tensor, depth: Tensor, *, retain_graph: bool = False) -> None:
        weights = [w.to(image.dtype) for w in (self.image, self.alpha, self.depth)]
        torch.autograd.backward([image, alpha, depth], weights, retain_graph=retain_graph)


@dataclass(frozen=True)
class Outcome:
    """Images, and the gradients of a weighted sum of them, by name: the groups, background and viewmat."""

    images: dict[str, Tensor]
    gradients: dict[str, Tensor]


def _outcome(out: tuple[Tensor, Tensor, Tensor], weights: Weights, inputs: dict[str, Tensor]) -> Outcome:
    weights.backward(*out)
    gradients = {name: tensor.grad for name, tensor in inputs.items() if tensor.grad is not None}
    assert gradients.keys() == inputs.keys(), "every input gets a gradient"
    names = ("image", "alpha", "depth")
    return Outcome({name: image.detach() for name, image in zip(names, out, strict=True)}, gradients)


def _inputs(gaussians: Gaussians, camera: Camera, dtype: torch.dtype) -> tuple[Gaussians, dict[str, Tensor]]:
    parameters = leaves(gaussians.map(lambda t: t.to(dtype)))
    background = torch.tensor([0.3, 0.6, 0.1], dtype=torch.float64).to(dtype).requires_grad_()
    viewmat = torch.from_numpy(camera.viewmat).to(dtype).requires_grad_()
    return parameters, {**dict(parameters.items()), "background": background, "viewmat": viewmat}


def native_outcome(
    backend: Backend, gaussians: Gaussians, camera: Camera, weights: Weights, **settings: Any
) -> Outcome:
    """Render with the kernels and go backward. settings: sh_degree and antialiased, as render() takes them."""
    parameters, inputs = _inputs(gaussians, camera, backend.dtype)
    view = {name: inputs[name] for name in ("background", "viewmat")}
    out = render(parameters, camera, **view, **settings, backend=backend)
    return _outcome((out.image, out.alpha, out.depth), weights, inputs)


def reference_outcome(gaussians: Gaussians, camera: Camera, weights: Weights, **settings: Any) -> Outcome:
    """The same in float64 by the plain torch renderer, from the very numbers that the native side was given."""
    parameters, inputs = _inputs(gaussians, camera, torch.float64)
    view = {name: inputs[name] for name in ("background", "viewmat")}
    return _outcome(render_reference(parameters, camera, **view, **settings), weights, inputs)


def assert_outcome(got: Outcome, expected: Outcome, *, images: float, gradients: float) -> None:
    """Both within a tolerance relative to the largest number of their kind: a gradient sums over many pixels."""
    for bound, have, want in ((images, got.images, expected.images), (gradients, got.gradients, expected.gradients)):
        for name, tensor in want.items():
            scale = max(1.0, float(tensor.abs().max())) if tensor.numel() else 1.0
            torch.testing.assert_close(have[name].double(), tensor, rtol=0, atol=bound * scale, msg=named(name))


@torch.no_grad()
def away_from_cutoffs(
    gaussians: Gaussians, camera: Camera, *, antialiased: bool = False, reach: float = 3e-5
) -> Tensor:
    """[H, W] bool: no alpha and no transmittance is so near a cut-off that rounding could decide.

    Opacities move by a relative ``reach`` to either side. What is smooth in them changes on a line, up to the square
    of that; what is not on it has jumped.
    """
    parameters = gaussians.map(Tensor.double)

    def image(shift: float) -> Tensor:
        opacity = parameters.logit_opacities.sigmoid() * (1.0 + shift)
        moved = Gaussians(**{**dict(parameters.items()), "logit_opacities": opacity.logit(1e-9)})
        out = render(moved, camera, antialiased=antialiased, backend=float64())
        return torch.cat([out.image, out.alpha[..., None], out.depth[..., None]], 2)

    return ((image(reach) - 2.0 * image(0.0) + image(-reach)).abs() < 1e-7).all(2)


def bits(*tensors: Tensor) -> list[bytes]:
    """The exact bytes, for comparisons that mean equal and not close."""
    return [tensor.detach().contiguous().numpy().tobytes() for tensor in tensors]


def in_dtype(gaussians: Gaussians, dtype: torch.dtype) -> Gaussians:
    return gaussians.map(lambda t: t.to(dtype))


def rows_of(gaussians: Gaussians, index: slice | Tensor) -> Gaussians:
    return gaussians.map(lambda t: t[index])


def named(name: str) -> Callable[[str], str]:
    """For assert_close's msg: what was compared, before what it says."""
    return lambda message: f"{name}: {message}"


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def images_and_gradients(backend: Backend, gaussians: Gaussians, camera: Camera) -> list[Tensor]:
    """Image, alpha and depth, then the gradients of a weighted sum of them by background, pose and each group."""
    inputs = leaves(gaussians)
    background = torch.tensor([0.3, 0.6, 0.1], requires_grad=True)
    pose = torch.from_numpy(camera.viewmat).float().requires_grad_()
    out = render(inputs, camera, background=background, viewmat=pose, antialiased=True, backend=backend)
    weight = random_image(9, camera.width, camera.height)
    torch.autograd.backward((out.image * weight).sum() + (out.alpha * weight[..., 0]).sum() + out.depth.mean())
    gradients = [background.grad, pose.grad, *(tensor.grad for _, tensor in inputs.items())]
    return [out.image.detach(), out.alpha.detach(), out.depth.detach(), *(g for g in gradients if g is not None)]


def channels_and_gradients(
    backend: Backend, gaussians: Gaussians, camera: Camera, channels: int, budget: FixedBudget | None = None
) -> list[Tensor]:
    """Image of ``channels``, alpha and depth, then the gradients of a weighted sum of them.

    Those by the colours, the background, the projected means (with their magnitudes), the pose, and each group.
    """
    generator = torch.Generator().manual_seed(12)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(backend.dtype)

    inputs, pose = leaves(gaussians.map(lambda t: t.to(backend.dtype))), torch.from_numpy(camera.viewmat).clone()
    colors, background = normal(len(gaussians), channels).requires_grad_(), normal(channels).requires_grad_()
    pose = pose.to(backend.dtype).requires_grad_()
    view = ViewRender(
        inputs, camera, background=background, viewmat=pose, colors=colors, backend=backend, budget=budget
    )
    means2d = view.project().means2d.clone().requires_grad_()
    out = view.blend(means2d)
    weights = [normal(camera.height, camera.width, channels), *(normal(camera.height, camera.width) for _ in range(2))]
    torch.autograd.backward([out.image, out.alpha, out.depth], weights)
    geometry = [getattr(inputs, name).grad for name in ("means", "quats", "log_scales", "logit_opacities")]
    assert not inputs.sh0.grad.any(), "their colours are not blended"
    gradients = [colors.grad, background.grad, means2d.grad, view.project().absgrad, pose.grad, *geometry]
    assert all(gradient.any() for gradient in gradients)
    return [out.image.detach(), out.alpha.detach(), out.depth.detach(), *gradients]


def assert_images_and_gradients(got: list[Tensor], expected: list[Tensor]) -> None:
    """Images to the bit; gradients, whose sums have another order, within rounding."""
    assert len(got) == len(expected) > 3
    for ours, twin in zip(got[:3], expected[:3], strict=True):
        assert torch.equal(ours, twin)
    for ours, twin in zip(got[3:], expected[3:], strict=True):
        torch.testing.assert_close(ours, twin, rtol=1e-3, atol=1e-5 * float(twin.abs().max()))


def adam_update(
    backend: Backend, adam: AdamState, step: int, lrs: tuple[float, ...] = (1e-3,) * 6, **fields: Any
) -> abi.Adam:
    """An update of the parameters that ``adam`` has moments for. fields: further ones of SplatAdam."""
    return abi.Adam(
        step=step, beta1=0.9, beta2=0.999, eps=1e-15, lr=(ctypes.c_double * 6)(*lrs),
        exp_avg=backend.arrays(adam.exp_avg), exp_avg_sq=backend.arrays(adam.exp_avg_sq), **fields,
    )  # fmt: skip


def native_loss(
    engine: NativeEngine, image: Tensor, target: Tensor, v_image: Tensor | None, ssim_lambda: float
) -> float:
    """(1 - lambda) L1 + lambda (1 - SSIM) of image [H, W, 3] against target; its gradient is written to v_image."""
    job = engine._pipeline.loss(image, target, v_image, ssim_lambda)
    return total_loss(ssim_lambda, job.l1, job.ssim)
