"""The reference loss against its definition, evaluated pixel by pixel, and against the adjoint in docs/math.md 7.3."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from splatcli.rasterizer.reference import loss_reference, ssim_reference
from tests.rasterizer.scenes import random_image

C1, C2 = 0.0001, 0.0009


def ssim_at(x: np.ndarray, y: np.ndarray, row: int, column: int) -> float:
    """SSIM of one channel at one pixel by the sums of its definition; what lies outside the image is zero."""
    weights = [math.exp(-(k * k) / (2 * 1.5 * 1.5)) for k in range(-5, 6)]
    total = sum(weights)
    sums = dict.fromkeys(("x", "y", "xx", "yy", "xy"), 0.0)
    for i in range(-5, 6):
        for j in range(-5, 6):
            r, c = row + i, column + j
            if not (0 <= r < x.shape[0] and 0 <= c < x.shape[1]):
                continue
            w = weights[i + 5] * weights[j + 5] / total**2
            for name, value in zip(
                sums, (x[r, c], y[r, c], x[r, c] ** 2, y[r, c] ** 2, x[r, c] * y[r, c]), strict=True
            ):
                sums[name] += w * value
    mx, my = sums["x"], sums["y"]
    vx, vy, cov = sums["xx"] - mx * mx, sums["yy"] - my * my, sums["xy"] - mx * my
    return (2 * mx * my + C1) * (2 * cov + C2) / ((mx * mx + my * my + C1) * (vx + vy + C2))


def test_ssim_is_the_mean_of_the_definition() -> None:
    # An image smaller than the window in one direction: borders, corners and the inside all count.
    x, y = random_image(1, 14, 9, torch.float64), random_image(2, 14, 9, torch.float64)
    values = [
        ssim_at(x[..., channel].numpy(), y[..., channel].numpy(), row, column)
        for channel in range(3)
        for row in range(9)
        for column in range(14)
    ]
    assert_close(ssim_reference(x, y).item(), float(np.mean(values)), rtol=0, atol=1e-13)


def test_one_pixel_changed_moves_ssim_by_the_definition() -> None:
    x = random_image(3, 30, 26, torch.float64)
    y = x.clone()
    y[12, 14, 1] += 0.25
    mean = ssim_reference(x, y).item() * 30 * 26 * 3
    # Only the 11 x 11 pixels of one channel whose window holds the changed one differ from 1.
    patch = [ssim_at(x[..., 1].numpy(), y[..., 1].numpy(), r, c) for r in range(7, 18) for c in range(9, 20)]
    assert_close(mean, 30 * 26 * 3 - 121 + float(np.sum(patch)), rtol=0, atol=1e-9)


def test_ssim_of_equal_images_is_one_and_it_is_symmetric() -> None:
    x, y = random_image(4, 20, 17, torch.float64), random_image(5, 20, 17, torch.float64)
    assert_close(ssim_reference(x, x).item(), 1.0, rtol=0, atol=1e-12)
    assert_close(ssim_reference(x, y), ssim_reference(y, x), rtol=0, atol=1e-14)


def test_ssim_of_two_constants_far_from_the_border() -> None:
    # Constant a and b: variances are zero, only (2ab + C1) / (a^2 + b^2 + C1) is left wherever the window is inside.
    a, b = 0.3, 0.7
    x, y = torch.full((31, 31, 3), a, dtype=torch.float64), torch.full((31, 31, 3), b, dtype=torch.float64)
    inside = ssim_at(x[..., 0].numpy(), y[..., 0].numpy(), 15, 15)
    assert_close(inside, (2 * a * b + C1) / (a * a + b * b + C1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("ssim_lambda", [0.0, 0.2, 1.0])
def test_loss_mixes_l1_and_ssim(ssim_lambda: float) -> None:
    x, y = random_image(6, 16, 12, torch.float64), random_image(7, 16, 12, torch.float64)
    expected = (1 - ssim_lambda) * float(np.abs(x.numpy() - y.numpy()).mean()) + ssim_lambda * (
        1 - ssim_reference(x, y).item()
    )
    assert_close(loss_reference(x, y, ssim_lambda).item(), expected, rtol=0, atol=1e-14)


def test_loss_gradient_is_the_written_adjoint() -> None:
    lam, height, width = 0.2, 13, 18
    x, y = random_image(8, width, height, torch.float64), random_image(9, width, height, torch.float64)
    image = x.clone().requires_grad_()
    torch.autograd.backward(loss_reference(image, y, lam))
    # The window as a dense symmetric matrix per axis, zero padding included.
    offsets = np.arange(-5, 6)
    taps = np.exp(-(offsets**2) / 4.5)
    taps /= taps.sum()

    def matrix(n: int) -> np.ndarray:
        return np.asarray(sum(w * np.eye(n, k=int(k)) for k, w in zip(offsets, taps, strict=True)))

    rows, columns = matrix(height), matrix(width)
    expected = np.zeros((height, width, 3))
    for channel in range(3):
        a, b = x[..., channel].numpy(), y[..., channel].numpy()

        def window(field: np.ndarray) -> np.ndarray:
            return np.asarray(rows @ field @ columns)

        mx, my = window(a), window(b)
        l1, l2 = 2 * mx * my + C1, mx**2 + my**2 + C1
        s1, s2 = 2 * (window(a * b) - mx * my) + C2, window(a * a) - mx**2 + window(b * b) - my**2 + C2
        m = l1 * s1 / (l2 * s2)
        by_mean = 2 * my * (s1 - l1) / (l2 * s2) - 2 * mx * m * (1 / l2 - 1 / s2)
        by_square, by_product = -m / s2, 2 * l1 / (l2 * s2)
        scale = -lam / (3 * height * width)
        expected[..., channel] = scale * (window(by_mean) + 2 * a * window(by_square) + b * window(by_product))
        expected[..., channel] += (1 - lam) * np.sign(a - b) / (3 * height * width)
    assert_close(image.grad, torch.from_numpy(expected), rtol=0, atol=1e-15)


def test_loss_passes_gradcheck() -> None:
    x, y = random_image(10, 7, 6, torch.float64).requires_grad_(), random_image(11, 7, 6, torch.float64)
    assert torch.autograd.gradcheck(lambda image: loss_reference(image, y, 0.2), (x,))
