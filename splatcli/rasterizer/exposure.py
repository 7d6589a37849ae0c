"""Exposure: an affine map of a view's colours between the rendered image and the loss, and its gradient."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from splatcli.reproducible import tree_sum


def expose(image: Tensor, exposure: Tensor, out: Tensor) -> Tensor:
    """Fill ``out`` [H, W, 3] with A c + b for each colour c of image; exposure [3, 4] is (A, b). Return it."""
    matrix, shift = _parts(exposure, image)
    out.copy_((mapped(matrix, colour_planes(image)) + shift).movedim(0, 2))
    return out


def expose_vjp(image: Tensor, exposure: Tensor, v_out: Tensor, v_image: Tensor, v_exposure: Tensor) -> None:
    """Fill v_image [H, W, 3] and v_exposure [3, 4] from the gradient of the exposed image, v_out [H, W, 3].

    image: before the exposure. The bits depend neither on threads nor on the instruction set, unlike those of torch's
    matrix products.
    """
    matrix, _ = _parts(exposure, image)
    colours, v_planes = colour_planes(image), colour_planes(v_out)
    v_image.copy_(mapped(matrix.T, v_planes).movedim(0, 2))
    for v_plane, v_row in zip(v_planes, v_exposure, strict=True):
        v_row[:3] = tree_sum((colours * v_plane).flatten(1))
        v_row[3] = tree_sum(v_plane.flatten())


def colour_planes(image: Tensor) -> Tensor:
    """Return [3, H, W]: torch is slow where the innermost dimension of a broadcast has three numbers."""
    return image.movedim(2, 0).contiguous()


def mapped(matrix: Tensor, planes: Tensor) -> Tensor:
    """Return [3, H, W] the product of matrix [3, 3] with each colour of planes [3, H, W]."""
    columns = matrix.T[:, :, None, None]
    return columns[0] * planes[0] + columns[1] * planes[1] + columns[2] * planes[2]


def line_bands(image: Tensor, at_a_time: Mapping[str, int]) -> list[slice]:
    """Return bands of all pixel rows of an image [H, W, C]. at_a_time: pixels of a band, by the type of the device."""
    height, width, _ = image.shape
    lines = max(1, at_a_time.get(image.device.type, at_a_time["cpu"]) // width)
    return [slice(top, min(top + lines, height)) for top in range(0, height, lines)]


def constant(values: tuple[Any, ...], like: Tensor) -> Tensor:
    """Return fixed numbers as a tensor of the dtype and on the device of ``like``.

    It is made once: a copy to a GPU waits for all that the GPU has to do.
    """
    return _constant(values, like.dtype, like.device)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _constant(values: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def _parts(exposure: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
    exposure = exposure.to(image)
    return exposure[:, :3], exposure[:, 3, None, None]
