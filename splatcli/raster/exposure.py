"""Exposure: a map of a view's colours between the rendered image and the loss, and its gradient; one map, or a grid."""

from __future__ import annotations

import torch
from torch import Tensor

from splatcli.raster.bilateral import slice_grid, slice_grid_vjp


def recolour(image: Tensor, colours: Tensor, out: Tensor) -> Tensor:
    """``out`` [H, W, 3], filled with the colours of image after an exposure [3, 4] or a grid [12, L, Y, X]."""
    return (expose if colours.dim() == 2 else slice_grid)(image, colours, out)


def recolour_vjp(image: Tensor, colours: Tensor, v_shown: Tensor, v_image: Tensor, v_colours: Tensor) -> None:
    """Fills v_image [H, W, 3] and v_colours, shaped as colours, from the gradient of recolour(), v_shown [H, W, 3]."""
    (expose_vjp if colours.dim() == 2 else slice_grid_vjp)(image, colours, v_shown, v_image, v_colours)


def expose(image: Tensor, exposure: Tensor, out: Tensor) -> Tensor:
    """``out`` [H, W, 3], filled with A c + b for each colour c of image; exposure [3, 4] is (A, b)."""
    matrix, shift = _parts(exposure, image)
    with torch.autocast(image.device.type, enabled=False):
        torch.mm(image.view(-1, 3), matrix.T, out=out.view(-1, 3))
    # By whole lines of pixels: torch is slow where the innermost of a broadcast has three numbers.
    width = image.shape[1]
    out.view(-1, 3 * width).add_(shift.repeat(width))
    return out


def expose_vjp(image: Tensor, exposure: Tensor, v_shown: Tensor, v_image: Tensor, v_exposure: Tensor) -> None:
    """Fills v_image [H, W, 3] and v_exposure [3, 4] from the gradient of the exposed image, v_shown [H, W, 3].

    image: before the exposure. The sums over the pixels are made line by line, or column by column, and then in double
    precision, in an order that no number of threads changes.
    """
    matrix, _ = _parts(exposure, image)
    with torch.autocast(image.device.type, enabled=False):
        torch.mm(v_shown.view(-1, 3), matrix, out=v_image.view(-1, 3))
        lines = torch.bmm(v_shown.transpose(1, 2), image)
    v_exposure[:, :3].copy_(lines.sum(dim=0, dtype=torch.float64))
    columns = v_shown.view(-1, 3 * image.shape[1]).sum(dim=0).view(-1, 3)
    v_exposure[:, 3].copy_(columns.sum(dim=0, dtype=torch.float64))


def _parts(exposure: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
    exposure = exposure.to(image)
    return exposure[:, :3], exposure[:, 3]
