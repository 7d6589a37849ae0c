"""The native loss against the plain torch one: its value and its gradient, for every size of strip and border.

Tolerances. float64: 1e-12. float32: 2e-6 for the value; for a gradient 1e-5 of the largest one, and for its SSIM part
another 5e-4 of lambda / (3 W H): where an image is flat, terms of the size 1 / C2 = 1,111 cancel there, each with the
rounding of a few operations. For the same reason the SSIM of two flat images is known to 5e-5 only.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from splatcli.rasterizer.reference import loss_reference, ssim_reference
from splatcli.rasterizer.train_step import NativeEngine
from tests.native.cases import ISAS, NEEDS_COMPILER, bits, float32, float64, native_loss
from tests.rasterizer.scenes import random_image

pytestmark = NEEDS_COMPILER
F64 = torch.float64
BUILDS = [*ISAS, "float64"]
SIZES = [(1, 1), (11, 11), (97, 5), (5, 97), (64, 33), (3, 100), (100, 3), (32, 64), (33, 65), (129, 2)]


def engine(build: str, threads: int = 1) -> NativeEngine:
    return NativeEngine(float64(threads) if build == "float64" else float32(build, threads))


def compare(build: str, image: Tensor, target: Tensor, ssim_lambda: float, *, flat: bool = False) -> None:
    """Value and gradient, the reference in float64 from the same numbers."""
    exact = image.double().clone().requires_grad_()
    wanted = target.double() / 255.0 if target.dtype == torch.uint8 else target.double()
    expected = loss_reference(exact, wanted, ssim_lambda)
    torch.autograd.backward(expected)
    assert exact.grad is not None

    v_image = torch.full_like(image, np.nan)
    native = engine(build)
    value = native_loss(native, image, target, v_image, ssim_lambda)
    assert native_loss(native, image, target, None, ssim_lambda) == value
    bound, largest, cancelling = (1e-12, 1e-12, 5e-12) if build == "float64" else (2e-6, 1e-5, 5e-4)
    if flat and build != "float64":
        bound += 5e-5 * ssim_lambda
    assert_close(value, float(expected.detach()), rtol=0, atol=bound)
    rounding = largest * float(exact.grad.abs().max()) + cancelling * ssim_lambda / image.numel()
    assert_close(v_image.double(), exact.grad, rtol=0, atol=rounding)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_sizes(build: str, width: int, height: int) -> None:
    dtype = engine(build).context.backend.dtype
    image = random_image(1, width, height, F64).to(dtype)
    target = random_image(2, width, height, F64)
    for ssim_lambda in (0.0, 0.2, 1.0):
        compare(build, image, target.to(dtype), ssim_lambda)
    compare(build, image, (target * 255).round().to(torch.uint8), 0.2)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(("x", "y"), [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0), (0.3, 0.7), (1e-8, 0.0)])
def test_constant_images(build: str, x: float, y: float) -> None:
    dtype = engine(build).context.backend.dtype
    image, target = torch.full((21, 30, 3), x, dtype=dtype), torch.full((21, 30, 3), y, dtype=dtype)
    compare(build, image, target, 0.2, flat=True)


@pytest.mark.parametrize("build", BUILDS)
def test_colours_beyond_one(build: str) -> None:
    # A render is not clamped above.
    dtype = engine(build).context.backend.dtype
    image = 3.0 * random_image(3, 40, 30, F64).to(dtype)
    compare(build, image, random_image(4, 40, 30, F64).to(dtype), 0.2)


@pytest.mark.parametrize("build", BUILDS)
def test_equal_images_have_no_loss_and_no_gradient_of_l1(build: str) -> None:
    native = engine(build)
    dtype = native.context.backend.dtype
    image = random_image(5, 50, 41, F64).to(dtype)
    v_image = torch.full_like(image, np.nan)
    assert native_loss(native, image, image.clone(), v_image, 0.0) == 0.0
    assert torch.equal(v_image, torch.zeros_like(image)), "the corner of |x - y| has gradient 0"
    rounding = 1e-13 if dtype == F64 else 1e-6
    assert_close(native_loss(native, image, image.clone(), v_image, 1.0), 0.0, rtol=0, atol=rounding)
    # SSIM is at its greatest there: what is left of its gradient is rounding.
    assert_close(v_image * image.numel(), torch.zeros_like(image), rtol=0, atol=1e4 * rounding)


@pytest.mark.parametrize("build", BUILDS)
def test_ssim_lies_between_minus_one_and_one(build: str) -> None:
    native = engine(build)
    dtype = native.context.backend.dtype
    stripes = (torch.arange(48) % 2).to(dtype)[None, :, None].expand(40, 48, 3).contiguous()
    for x, y in [(stripes, 1 - stripes), (stripes, stripes), (stripes * 0, stripes)]:
        ssim = 1.0 - native_loss(native, x.contiguous(), y.contiguous(), None, 1.0)
        assert -1.0 - 1e-6 <= ssim <= 1.0 + 1e-6
        assert_close(ssim, float(ssim_reference(x.double(), y.double())), rtol=0, atol=1e-6)


@pytest.mark.parametrize("build", BUILDS)
def test_bytes_are_divided_by_255(build: str) -> None:
    native = engine(build)
    dtype = native.context.backend.dtype
    target = torch.arange(256, dtype=torch.uint8).reshape(16, 16, 1).expand(16, 16, 3).contiguous()
    v_image = torch.empty(16, 16, 3, dtype=dtype)
    assert_close(native_loss(native, target.to(dtype) / 255, target, v_image, 0.0), 0.0, rtol=0, atol=1e-7)


@pytest.mark.parametrize("build", BUILDS)
def test_a_pixel_that_is_no_number_makes_a_loss_that_is_none(build: str) -> None:
    native = engine(build)
    image = random_image(6, 20, 20, F64).to(native.context.backend.dtype)
    image[7, 9, 1] = np.nan
    assert np.isnan(native_loss(native, image, torch.zeros(20, 20, 3, dtype=torch.uint8), None, 0.2))


@pytest.mark.parametrize("build", BUILDS)
def test_any_number_of_threads_and_any_memory_give_the_same_bits(build: str) -> None:
    dtype = engine(build).context.backend.dtype
    image, target = random_image(7, 150, 140, F64).to(dtype), random_image(8, 150, 140, F64)
    target = (target * 255).round().to(torch.uint8)
    seen = set()
    for threads in (1, 2, 3):
        native = engine(build, threads)
        # The workspace of a larger image, full of other numbers, serves the smaller one too.
        native_loss(native, torch.rand(170, 160, 3).to(dtype), torch.rand(170, 160, 3).to(dtype), None, 0.2)
        v_image = torch.full_like(image, np.nan)
        value = native_loss(native, image, target, v_image, 0.2)
        seen.add((value, bits(v_image)[0]))
    assert len(seen) == 1


def test_what_does_not_fit_is_refused() -> None:
    native = engine("portable")
    image = torch.zeros(4, 5, 3)
    for target in (torch.zeros(5, 4, 3), torch.zeros(4, 5, 1), torch.zeros(4, 5, 3, dtype=torch.uint8)[:, :4]):
        with pytest.raises((ValueError, TypeError)):
            native_loss(native, image, target, None, 0.2)
    for target in (torch.zeros(4, 5, 3, dtype=F64), torch.zeros(4, 5, 3, dtype=torch.float16)):
        with pytest.raises(TypeError):
            native_loss(native, image, target, None, 0.2)
    with pytest.raises((ValueError, TypeError)):
        native_loss(native, torch.zeros(4, 5, 4), torch.zeros(4, 5, 4), None, 0.2)
    with pytest.raises((ValueError, TypeError)):
        native_loss(native, torch.zeros(4, 5), torch.zeros(4, 5), None, 0.2)
