"""Black borders that all images have are found, darkness that fades is not."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from splatcli.scene.borders import black_borders
from tests.scene.made import picture


def framed(
    top: int = 0, bottom: int = 0, left: int = 0, right: int = 0, count: int = 4, black: int = 3
) -> list[NDArray[np.uint8]]:
    """Images of 120x90 pixels with borders that are almost black."""
    images = [picture(seed, 120, 90) for seed in range(count)]
    for image in images:
        image[:top] = image[90 - bottom :] = image[:, :left] = image[:, 120 - right :] = black
    return images


@pytest.mark.parametrize("borders", [(0, 0, 0, 0), (11, 0, 0, 0), (11, 12, 0, 0), (0, 0, 15, 16), (4, 5, 6, 7)])
def test_borders_are_measured(borders: tuple[int, int, int, int]) -> None:
    assert black_borders(framed(*borders)) == borders


def test_a_border_is_one_of_all_images() -> None:
    images = framed(top=12)
    images[2][:] = picture(7, 120, 90)
    assert black_borders(images) == (0, 0, 0, 0)


def test_darkness_is_no_border() -> None:
    fading = framed()
    for image in fading:
        image[:30] = (image[:30] * np.linspace(0.0, 1.0, 30)[:, None, None] ** 2).astype(np.uint8)
    assert black_borders(fading) == (0, 0, 0, 0)
    backdrop = framed(90, 0, 0, 0, black=0)
    y, x = np.mgrid[:90, :120]
    for image in backdrop:  # a ball before a black wall
        image[(y - 45) ** 2 + (x - 60) ** 2 < 30**2] = 200
    assert black_borders(backdrop) == (0, 0, 0, 0)
    assert black_borders(framed(90, 0, 0, 0, black=0)) == (0, 0, 0, 0)
    assert black_borders(framed(top=1)) == (0, 0, 0, 0)
