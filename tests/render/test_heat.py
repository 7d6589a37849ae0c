"""Error maps: the picture says where the error is and how large, with lightness that grows evenly."""

from __future__ import annotations

import numpy as np
import pytest

from splatcli.render.colour_maps import MASKED_COLOUR, TICKS, error_map, heat, position


def lightness(colours: np.ndarray) -> np.ndarray:
    """CIE L* of sRGB colours [..., 3] uint8, 0...100."""
    encoded = colours / 255.0
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    luminance = linear @ np.array([0.2126, 0.7152, 0.0722])
    return np.where(luminance > 216 / 24389, 116 * np.cbrt(luminance) - 16, luminance * 24389 / 27)


def test_lightness_grows_along_the_map_without_leaps() -> None:
    shade = lightness(heat(np.linspace(0, 1, 256)))
    coarse = np.diff(shade[::15])
    assert shade[0] == 0
    assert shade[-1] > 90
    assert (np.diff(shade) > -0.5).all()  # 8 bits a channel are not finer
    assert (coarse > 2).all()
    assert coarse.max() < 3 * coarse.min()


def test_values_are_clamped_and_nan_is_the_largest() -> None:
    shown = heat(np.array([-1.0, 0.0, 1.0, 7.0, np.nan]))
    assert (shown[0] == shown[1]).all()
    assert (shown[2:] == shown[2]).all()


def test_ticks_ascend_along_the_map_and_span_it() -> None:
    at = position(np.array(TICKS))
    assert at[0] == 0
    assert at[-1] == 1
    assert (np.diff(at) > 0).all()


@pytest.mark.parametrize(("render", "level"), [(100, 0.0), (110, 10 / 255), (90, 10 / 255), (255, 1.0)])
def test_a_pixel_shows_its_mean_absolute_error(render: int, level: float) -> None:
    truth = np.full((2, 3, 3), 100, np.uint8)
    picture = error_map(truth, np.full_like(truth, render))
    assert (picture == heat(position(np.array(level)))).all()


def test_the_error_is_where_it_is_and_what_is_masked_is_grey() -> None:
    truth, render = np.zeros((4, 5, 3), np.uint8), np.zeros((4, 5, 3), np.uint8)
    render[1, 2] = render[3, 4] = 60
    hidden = np.zeros((4, 5), bool)
    hidden[3, 4] = True
    picture = error_map(truth, render, hidden)
    assert tuple(picture[3, 4]) == MASKED_COLOUR
    assert np.argwhere((picture != picture[0, 0]).any(-1)).tolist() == [[1, 2], [3, 4]]
