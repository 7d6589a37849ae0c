"""Metrics of two images: PSNR, SSIM, and the fit of colours that takes exposure and white balance out of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from splatcli.rasterizer.image_loss import mean_ssim

#: Least mean squared error: equal images have a PSNR of 100 dB, which JSON can hold.
MIN_MSE = 1e-10

#: A smaller variance is rounding: one pixel in ten million that differs by one of 256 levels has more.
MIN_SPREAD = 1e-13

#: Pixels that color_corrected() takes at once, so that their numbers in float64 stay in a cache.
_AT_ONCE = 1 << 14

#: Colours are summed relative to this, so that squares and products cancel less.
_PIVOT = 0.5


def psnr(x: Tensor, y: Tensor, masked: Tensor | None = None) -> float:
    """Return the peak signal-to-noise ratio in dB of two images [H, W, 3] with values in 0..1; at most 100.

    masked: [H, W] bool, the masked pixels, which do not count; NaN when all are masked.
    """
    squares = (x.double() - y.double()).square()
    mse = float((squares if masked is None else squares[~masked]).mean())
    return -10.0 * math.log10(mse if mse > MIN_MSE or math.isnan(mse) else MIN_MSE)


@torch.no_grad()
def ssim(x: Tensor, y: Tensor, masked: Tensor | None = None) -> float:
    """Return the mean structural similarity of two images [H, W, 3] in 0..1, with the loss's window and zero padding.

    masked: [H, W] bool, the masked pixels: black in both images and no window's centre; NaN when all are masked.
    """
    return mean_ssim(mask_out(x, masked), mask_out(y, masked), masked)


def mask_out(image: Tensor, masked: Tensor | None) -> Tensor:
    """Return ``image`` [H, W, 3] with its masked pixels [H, W] black; the image itself without a mask."""
    return image if masked is None else image.masked_fill(masked[..., None], 0.0)


@torch.no_grad()
def color_corrected(x: Tensor, y: Tensor, masked: Tensor | None = None) -> Tensor:
    """Return [H, W, 3] ``clamp(A x + b, 0, 1)``, with A [3, 3] and b [3] fitted to ``y`` by least squares.

    An image differs from others of its scene by exposure and white balance, which no model of the scene can predict.
    This removes from a render x what such a linear change explains. masked: [H, W] bool, the masked pixels, which take
    no part in the fit; the transform is applied to all. Where x does not vary in a colour, A is the smallest of the
    best fits.
    """
    source, target = x.reshape(-1, 3), y.reshape(-1, 3)
    sums = _colour_sums(source, target, None if masked is None else masked.reshape(-1, 1))
    means = sums[6, :6] / sums[6, 6]
    moments = sums[:3, :6] / sums[6, 6] - means[:3, None] * means
    transform = torch.linalg.pinv(moments[:, :3], atol=MIN_SPREAD, rtol=1e-10, hermitian=True) @ moments[:, 3:]
    offset = means[3:] + _PIVOT - (means[:3] + _PIVOT) @ transform
    fitted = torch.empty_like(source)
    for first in range(0, len(source), _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        fitted[part] = torch.addmm(offset, source[part].double(), transform).clamp_(0.0, 1.0)
    return fitted.view(x.shape)


def _colour_sums(x: Tensor, y: Tensor, masked: Tensor | None) -> Tensor:
    """Return [7, 7] float64, the sums over pixels of all products of (x, y, 1), both colours less _PIVOT.

    x, y: [N, 3]. masked: [N, 1] bool, the pixels that are left out.
    """
    sums = torch.zeros(7, 7, dtype=torch.float64, device=x.device)
    columns = torch.empty(7, min(_AT_ONCE, len(x)), dtype=torch.float64, device=x.device)
    for first in range(0, len(x), _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        both = columns[:, : len(x[part])]
        both[:3], both[3:6] = x[part].T, y[part].T
        both[:6] -= _PIVOT
        both[6] = 1.0
        if masked is not None:
            both.masked_fill_(masked[part].T, 0.0)
        sums.addmm_(both, both.T)
    return sums


def quantised(image: Tensor) -> Tensor:
    """Return ``image`` clamped to 0..1 and rounded to 8 bits."""
    return (image.clamp(0.0, 1.0) * 255.0).round() / 255.0
