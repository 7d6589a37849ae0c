"""Upright: sizes of one shape, and stored pixels turned as EXIF says."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Of quarter turns the one that undoes them; other orientations undo themselves.
_UNDO = {6: 8, 8: 6}


def same_shape(size: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether one width and height is the other scaled, but for rounding to whole pixels."""
    return abs(size[0] * other[1] - size[1] * other[0]) <= max(*size, *other)


def upright(pixels: NDArray[Any], undo: int, orientation: int) -> NDArray[Any]:
    """Pixels that a decoder turned by ``undo`` as stored, and then turned by ``orientation``; C-contiguous."""
    return np.ascontiguousarray(turned(turned(pixels, _UNDO.get(undo, undo)), orientation))


def turned(pixels: NDArray[Any], orientation: int) -> NDArray[Any]:
    """Stored pixels [H, W, ...] as EXIF's ``orientation``, 1 to 8, puts them upright; a view of the same memory."""
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    down = orientation in (3, 4, 7, 8)
    right = orientation in (2, 3, 6, 7)
    return pixels[:: -1 if down else 1, :: -1 if right else 1]


def nearest(values: NDArray[Any], size: tuple[int, int]) -> NDArray[Any]:
    """[H, W] at another width and height: each pixel has the value under its middle."""
    width, height = size
    rows, columns = (
        ((2 * np.arange(now) + 1) * before) // (2 * now)
        for now, before in ((height, values.shape[0]), (width, values.shape[1]))
    )
    return values if size == values.shape[::-1] else values[rows[:, None], columns[None, :]]
