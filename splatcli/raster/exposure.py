"""Exposure: an affine map of a view's colours between the rendered image and the loss, and its gradient."""

from __future__ import annotations

import torch
from torch import Tensor


def expose(image: Tensor, exposure: Tensor, out: Tensor) -> Tensor:
    """``out`` [H, W, 3], filled with A c + b for each colour c of image; exposure [3, 4] is (A, b)."""
    matrix, shift = _parts(exposure, image)
    with torch.autocast(image.device.type, enabled=False):
        torch.addmm(shift, image.view(-1, 3), matrix.T, out=out.view(-1, 3))
    return out


def expose_vjp(image: Tensor, exposure: Tensor, v_shown: Tensor, v_image: Tensor, v_exposure: Tensor) -> None:
    """Fills v_image [H, W, 3] and v_exposure [3, 4] from the gradient of the exposed image, v_shown [H, W, 3].

    image: before the exposure. The sum over the pixels is made line by line and then in double precision, in an order
    that no number of threads changes.
    """
    matrix, _ = _parts(exposure, image)
    with torch.autocast(image.device.type, enabled=False):
        torch.mm(v_shown.view(-1, 3), matrix, out=v_image.view(-1, 3))
        lines = torch.bmm(v_shown.transpose(1, 2), image)
    v_exposure[:, :3].copy_(lines.sum(dim=0, dtype=torch.float64))
    v_exposure[:, 3].copy_(v_shown.sum(dim=1).sum(dim=0, dtype=torch.float64))


def _parts(exposure: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
    exposure = exposure.to(image)
    return exposure[:, :3], exposure[:, 3]
