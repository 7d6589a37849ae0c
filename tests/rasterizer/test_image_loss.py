"""fused_ssim() and l1_ssim_loss() against plain torch written from the published formula, and as programs call them.

Tolerances are those of test_native_loss.py: float64 1e-12; float32 2e-6 for a value, and for a gradient 1e-5 of the
largest one plus 5e-4 of a pixel's share.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import splatcli
from splatcli import fused_ssim, l1_ssim_loss
from splatcli.native.backend import Backend
from splatcli.native.build import NoCompilerError
from splatcli.rasterizer import image_loss
from splatcli.rasterizer.image_loss import _image_loss
from tests.kernels.simt import simulated
from tests.native.cases import ISAS, NEEDS_COMPILER, bits, float32, float64
from tests.rasterizer.scenes import random_image

pytestmark = NEEDS_COMPILER
F64 = torch.float64
BUILDS = [*ISAS, "float64", "emulator"]
SHAPES = [(1, 1, 1, 1), (1, 1, 11, 11), (2, 3, 12, 40), (1, 4, 46, 13), (3, 2, 70, 11), (1, 1, 30, 200), (2, 1, 5, 97)]
PADDINGS = ("same", "valid")


def backend_of(build: str, threads: int = 1) -> Backend:
    if build == "emulator":
        return simulated()
    return float64(threads) if build == "float64" else float32(build, threads)


def stack(seed: int, shape: tuple[int, ...], dtype: torch.dtype = F64) -> Tensor:
    """[B, C, H, W] planes that differ from each other."""
    batch, channels, height, width = shape
    planes = [random_image(seed + 10 * k, width, height, F64)[..., 0] for k in range(batch * channels)]
    return torch.stack(planes).view(shape).to(dtype)


def plain_ssim(x: Tensor, y: Tensor, padding: str) -> Tensor:
    """Mean SSIM from its definition: a Gaussian window that is not separated, one plane at a time."""
    offsets = torch.arange(11, dtype=x.dtype) - 5
    window = torch.exp(-(offsets[:, None] ** 2 + offsets[None, :] ** 2) / (2 * 1.5**2))
    window = (window / window.sum())[None, None]

    def mean(planes: Tensor) -> Tensor:
        return torch.nn.functional.conv2d(planes, window, padding=5 if padding == "same" else 0)

    maps = []
    for a, b in zip(x.flatten(0, 1), y.flatten(0, 1), strict=True):
        a, b = a[None, None], b[None, None]
        u, v = mean(a), mean(b)
        variances, covariance = mean(a * a) - u * u + mean(b * b) - v * v, mean(a * b) - u * v
        maps.append(
            (2 * u * v + 0.01**2) * (2 * covariance + 0.03**2) / ((u * u + v * v + 0.01**2) * (variances + 0.03**2))
        )
    return torch.stack(maps).mean()


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_both_gradients_are_those_of_the_formula(build: str, shape: tuple[int, ...]) -> None:
    backend = backend_of(build)
    dtype = backend.dtype
    value_bound, largest, cancelling = (1e-12, 1e-12, 5e-12) if dtype == F64 else (2e-6, 1e-5, 5e-4)
    for padding, ssim_lambda in itertools.product(PADDINGS, (0.2, 1.0)):
        if padding == "valid" and min(shape[2:]) < 11:
            continue
        x, y = (stack(seed, shape, dtype).requires_grad_() for seed in (1, 2))
        loss = _image_loss(x, y, ssim_lambda, padding, train=True, backend=backend)
        assert loss.shape == ()
        assert loss.dtype == dtype
        (3.0 * loss).backward()
        exact_x, exact_y = (t.detach().double().requires_grad_() for t in (x, y))
        expected = (1 - ssim_lambda) * (exact_x - exact_y).abs().mean()
        expected = expected + ssim_lambda * (1 - plain_ssim(exact_x, exact_y, padding))
        (3.0 * expected).backward()
        # A mean over few windows does not average the rounding of each.
        counted = x.numel() if padding == "same" else math.prod(shape[:2]) * (shape[2] - 10) * (shape[3] - 10)
        few = 0.0 if dtype == F64 else 1e-5 / math.sqrt(counted)
        assert_close(loss.double(), expected, rtol=0, atol=value_bound + few)
        for got, want in ((x.grad, exact_x.grad), (y.grad, exact_y.grad)):
            assert got is not None
            assert want is not None
            assert bool(want.any())
            bound = 3 * (largest * float(want.abs().max()) + cancelling * ssim_lambda / counted)
            assert_close(got.double(), want, rtol=0, atol=bound)


@pytest.mark.parametrize("padding", PADDINGS)
def test_gradcheck(padding: str) -> None:
    x, y = (stack(seed, (2, 2, 13, 12)).requires_grad_() for seed in (3, 4))
    assert torch.autograd.gradcheck(lambda a, b: fused_ssim(a, b, padding), (x, y), fast_mode=False)  # type: ignore[arg-type]
    assert torch.autograd.gradcheck(lambda a, b: l1_ssim_loss(a, b, 0.3, padding), (x, y), fast_mode=True)  # type: ignore[arg-type]


def test_ssim_is_one_for_equal_images_and_the_loss_is_its_two_parts() -> None:
    x, y = stack(5, (2, 3, 30, 20), torch.float32), stack(6, (2, 3, 30, 20), torch.float32)
    assert_close(fused_ssim(x, x), torch.tensor(1.0), rtol=0, atol=1e-6)
    for padding in PADDINGS:
        parts = 0.7 * (x - y).abs().mean() + 0.3 * (1 - fused_ssim(x, y, padding))
        assert_close(l1_ssim_loss(x, y, 0.3, padding), parts, rtol=0, atol=1e-6)
    assert_close(l1_ssim_loss(x, y, ssim_lambda=0.0), (x - y).abs().mean(), rtol=1e-6, atol=0)


def test_only_what_needs_a_gradient_gets_one() -> None:
    x, y = stack(7, (1, 3, 20, 20), torch.float32), stack(8, (1, 3, 20, 20), torch.float32)
    assert not fused_ssim(x, y).requires_grad
    x.requires_grad_()
    assert not fused_ssim(x, y, train=False).requires_grad
    with torch.no_grad():
        assert not fused_ssim(x, y).requires_grad
    value = fused_ssim(x, y, "same", True)
    assert torch.equal(value, fused_ssim(x, y, train=False))
    value.backward()
    assert x.grad is not None
    assert y.grad is None
    leaf = y.clone().requires_grad_()
    fused_ssim(x.detach(), leaf).backward()
    assert leaf.grad is not None
    assert bool(leaf.grad.any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    x, y = stack(9, (1, 3, 24, 17), dtype).requires_grad_(), stack(10, (1, 3, 24, 17), torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        value = l1_ssim_loss(x, y)
    value.backward()
    full = x.detach().float().requires_grad_()
    expected = l1_ssim_loss(full, y)
    expected.backward()
    assert value.dtype == torch.float32
    assert torch.equal(value, expected)
    assert x.grad is not None
    assert full.grad is not None
    assert x.grad.dtype == dtype
    assert torch.equal(x.grad, full.grad.to(dtype))


def test_layouts_and_threads_change_no_bit() -> None:
    x, y = stack(11, (2, 3, 70, 120), torch.float32), stack(12, (2, 3, 70, 120), torch.float32)
    results = []
    images = (x, x.contiguous(memory_format=torch.channels_last), x.transpose(2, 3).contiguous().transpose(2, 3))
    for image, threads in itertools.product(images, (1, 2)):
        leaf = image.detach().requires_grad_()
        loss = _image_loss(leaf, y, 0.2, "valid", train=True, backend=float32(threads=threads))
        loss.backward()
        assert leaf.grad is not None
        results.append(bits(loss.detach(), leaf.grad.contiguous()))
    assert all(one == results[0] for one in results)


def test_a_pixel_that_is_no_number_shows_in_its_plane_alone() -> None:
    x, y = stack(13, (2, 2, 40, 40), torch.float32), stack(14, (2, 2, 40, 40), torch.float32)
    for number in (math.nan, math.inf):
        x[1, 0, 20, 20] = number
        leaf = x.clone().requires_grad_()
        value = fused_ssim(leaf, y)
        value.backward()
        assert math.isnan(float(value.detach()))
        assert leaf.grad is not None
        assert bool(leaf.grad[1, 0, 10:31, 10:31].isnan().all())
        leaf.grad[1, 0, 10:31, 10:31] = 0
        assert bool(leaf.grad.isfinite().all())


@pytest.mark.parametrize(
    ("x", "y", "error", "words"),
    [
        (torch.zeros(3, 8, 8), torch.zeros(3, 8, 8), ValueError, r"\[B, C, H, W\]"),
        (torch.zeros(1, 3, 8, 8), torch.zeros(1, 1, 8, 8), ValueError, r"\[B, C, H, W\]"),
        (torch.zeros(0, 3, 8, 8), torch.zeros(0, 3, 8, 8), ValueError, "no pixel"),
        (torch.zeros(1, 3, 0, 8), torch.zeros(1, 3, 0, 8), ValueError, "no pixel"),
        (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), torch.zeros(1, 3, 8, 8), TypeError, "divide bytes by 255"),
        (torch.zeros(1, 3, 8, 8), torch.zeros(1, 3, 8, 8, device="meta"), ValueError, "on cpu, img2 on meta"),
    ],
)
def test_what_does_not_fit_is_refused(x: Tensor, y: Tensor, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        fused_ssim(x, y)


def test_paddings_and_weights_that_do_not_exist_are_refused() -> None:
    x = torch.zeros(1, 3, 10, 40)
    with pytest.raises(ValueError, match="needs 11x11"):
        fused_ssim(x, x, padding="valid")
    with pytest.raises(ValueError, match="'same' or 'valid'"):
        fused_ssim(x, x, padding="full")  # type: ignore[arg-type]
    for number in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="ssim_lambda"):
            l1_ssim_loss(x, x, number)


def test_without_a_compiler_plain_torch_computes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = (stack(seed, (2, 3, 20, 30), torch.float32).requires_grad_() for seed in (15, 16))

    def missing(*_: object) -> Backend:
        raise NoCompilerError("there is no compiler")

    native = [l1_ssim_loss(x, y, 0.2, padding) for padding in PADDINGS]
    monkeypatch.setattr(image_loss, "backend_for", missing)
    for padding, want in zip(PADDINGS, native, strict=True):
        got = l1_ssim_loss(x, y, 0.2, padding)
        assert_close(got, want, rtol=0, atol=2e-6)
        assert_close(torch.autograd.grad(got, y)[0], torch.autograd.grad(want, y)[0], rtol=1e-3, atol=1e-7)
    assert not fused_ssim(x, y, train=False).requires_grad
    assert "plain torch" in caplog.text


def test_they_are_found_at_the_top() -> None:
    assert splatcli.fused_ssim is fused_ssim is image_loss.fused_ssim
    assert splatcli.l1_ssim_loss is l1_ssim_loss is image_loss.l1_ssim_loss
