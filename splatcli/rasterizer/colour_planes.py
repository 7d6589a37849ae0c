"""Images as planes of a colour each, and in bands of pixel rows, as the maps of a view's colours compute with them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def colour_planes(image: Tensor) -> Tensor:
    """Return [3, H, W]: torch is slow where the innermost dimension of a broadcast has three numbers."""
    return image.movedim(2, 0).contiguous()


def mapped(matrix: Tensor, planes: Tensor) -> Tensor:
    """Return [3, H, W] the product of matrix [3, 3] with each colour of planes [3, H, W]."""
    columns = matrix.T[:, :, None, None]
    return columns[0] * planes[0] + columns[1] * planes[1] + columns[2] * planes[2]


def row_bands(image: Tensor, at_a_time: Mapping[str, int]) -> list[slice]:
    """Return bands of all pixel rows of an image [H, W, C]. at_a_time: pixels of a band, by the type of the device."""
    height, width, _ = image.shape
    rows = max(1, at_a_time.get(image.device.type, at_a_time["cpu"]) // width)
    return [slice(top, min(top + rows, height)) for top in range(0, height, rows)]


def constant(values: tuple[Any, ...], like: Tensor) -> Tensor:
    """Return fixed numbers as a tensor of the dtype and on the device of ``like``.

    It is made once: a copy to a GPU waits for all that the GPU has to do.
    """
    return _constant(values, like.dtype, like.device)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _constant(values: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)
