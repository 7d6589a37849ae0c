"""The alpha term of the loss: surfaces become opaque that are as dark as the background (docs/math.md 7.5)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

#: A pixel of a photo in which no channel is above this, of 255, may show the background itself: it may stay empty.
EMPTY = 5


def alpha_loss_vjp(alpha: Tensor, target: Tensor, mask: Tensor | None, weight: float, v_alpha: Tensor) -> None:
    """Write the gradient of ``alpha_loss_reference`` to v_alpha.

    alpha, v_alpha: [H, W]. target: [H, W, 3] uint8. mask: [H, W] bool, True where a pixel does not count, or None.
    """
    write = _write_by_numpy if alpha.device.type == "cpu" else _write_by_torch
    write(alpha, target, mask, 2.0 * weight / alpha.numel(), v_alpha)


def _write_by_numpy(alpha: Tensor, target: Tensor, mask: Tensor | None, slope: float, v_alpha: Tensor) -> None:
    """Write the gradient on a CPU: the threads that torch starts wait busily, and take the native library's cores."""
    red, green, blue = np.moveaxis(target.numpy(), 2, 0)
    empty = np.maximum(np.maximum(red, green), blue) <= EMPTY
    if mask is not None:
        empty |= mask.numpy()
    gradient = v_alpha.numpy()
    np.subtract(alpha.numpy(), 1.0, out=gradient)
    gradient *= slope
    gradient[empty] = 0.0


def _write_by_torch(alpha: Tensor, target: Tensor, mask: Tensor | None, slope: float, v_alpha: Tensor) -> None:
    torch.sub(alpha, 1.0, out=v_alpha)
    v_alpha.mul_(slope)
    v_alpha.masked_fill_(_empty(target, mask), 0.0)


def alpha_loss_reference(alpha: Tensor, target: Tensor, mask: Tensor | None, weight: float) -> Tensor:
    """Return ``weight`` times the sum of (1 - alpha)^2 over the pixels that count, over H W; a scalar tensor."""
    counts = ~_empty(target, mask)
    return weight * ((1.0 - alpha).square() * counts).mean()


def _empty(target: Tensor, mask: Tensor | None) -> Tensor:
    """Return [H, W], True in the pixels that do not count."""
    red, green, blue = target.unbind(-1)
    empty = torch.maximum(torch.maximum(red, green), blue) <= EMPTY
    return empty if mask is None else empty.logical_or_(mask)
