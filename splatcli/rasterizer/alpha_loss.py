"""The alpha term of the loss: surfaces become opaque that are as dark as the background, and what only masked pixels
show becomes transparent (docs/math.md 7.5).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

#: A pixel of an image in which no channel is above this, of 255, may show the background itself: it may stay empty.
EMPTY = 5


def alpha_loss_vjp(
    alpha: Tensor, target: Tensor, mask: Tensor | None, weight: float, mask_weight: float, v_alpha: Tensor
) -> None:
    """Write the gradient of ``alpha_loss_reference`` to v_alpha.

    alpha, v_alpha: [H, W]. target: [H, W, 3] uint8. mask: [H, W] bool, True where a pixel is masked, or None.
    """
    write = _write_by_numpy if alpha.device.type == "cpu" else _write_by_torch
    write(alpha, target, mask, 2.0 * weight / alpha.numel(), mask_weight / alpha.numel(), v_alpha)


def _write_by_numpy(
    alpha: Tensor, target: Tensor, mask: Tensor | None, slope: float, mask_slope: float, v_alpha: Tensor
) -> None:
    """Write the gradient on a CPU: the threads that torch starts wait busily, and take the native library's cores."""
    gradient = v_alpha.numpy()
    if slope > 0.0:
        red, green, blue = np.moveaxis(target.numpy(), 2, 0)
        np.subtract(alpha.numpy(), 1.0, out=gradient)
        gradient *= slope
        gradient[np.maximum(np.maximum(red, green), blue) <= EMPTY] = 0.0
    else:
        gradient.fill(0.0)
    if mask is not None:
        gradient[mask.numpy()] = mask_slope


def _write_by_torch(
    alpha: Tensor, target: Tensor, mask: Tensor | None, slope: float, mask_slope: float, v_alpha: Tensor
) -> None:
    if slope > 0.0:
        torch.sub(alpha, 1.0, out=v_alpha)
        v_alpha.mul_(slope)
        v_alpha.masked_fill_(_dark(target), 0.0)
    else:
        v_alpha.zero_()
    if mask is not None:
        v_alpha.masked_fill_(mask, mask_slope)


def alpha_loss_reference(
    alpha: Tensor, target: Tensor, mask: Tensor | None, weight: float, mask_weight: float
) -> Tensor:
    """Return ``weight`` times the sum of (1 - alpha)^2 over the pixels that are neither masked nor dark, and
    ``mask_weight`` times the sum of alpha over the masked ones, over H W; a scalar tensor.
    """
    masked = torch.zeros_like(alpha, dtype=torch.bool) if mask is None else mask
    term = (1.0 - alpha).square() * ~(_dark(target) | masked)
    return weight * term.mean() + mask_weight * (alpha * masked).mean()


def _dark(target: Tensor) -> Tensor:
    """Return [H, W], True in the pixels that may show the background itself."""
    red, green, blue = target.unbind(-1)
    return torch.maximum(torch.maximum(red, green), blue) <= EMPTY
