"""Black borders that all images have are found, darkness that fades is not."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from splatcli.scene.borders import black_borders, sure_borders
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


@pytest.mark.parametrize("borders", [(0, 0, 0, 0), (11, 12, 0, 0), (0, 0, 45, 40), (20, 20, 30, 30), (3, 0, 40, 40)])
def test_borders_that_are_sure_are_those_measured_also_all_around(borders: tuple[int, int, int, int]) -> None:
    assert sure_borders(framed(*borders)) == borders


def test_the_dark_is_never_a_sure_border() -> None:
    """Objects and lamps before a black wall, round or with straight edges."""
    y, x = np.mgrid[:90, :120]
    for move in (0, 5):
        images = framed(90, 0, 0, 0, count=8, black=1)
        for index, image in enumerate(images):
            seen = (y - 45) ** 2 + (x - 40 - move * index) ** 2 < 35**2
            image[seen] = picture(index, 120, 90)[seen]
        assert sure_borders(images) == (0, 0, 0, 0)
    boxes = framed(90, 0, 0, 0, count=8, black=1)
    for index, image in enumerate(boxes):
        image[30:70, 20 + 5 * index : 80 + 5 * index] = picture(index, 60, 40)
    assert sure_borders(boxes) == (0, 0, 0, 0)
    night = framed(count=8)
    for index, image in enumerate(night):
        image[: 20 + 5 * index] = 2  # the sky, as the camera turns up
    assert sure_borders(night) == (0, 0, 0, 0)
    for image in night:
        image[:] = (image * 0.08).astype(np.uint8)
    assert sure_borders(night) == (0, 0, 0, 0)
    bars = framed(12, 12, 0, 0)
    bars[1][:] = picture(5, 120, 90)  # one that has none
    assert sure_borders(bars) == (0, 0, 0, 0)
