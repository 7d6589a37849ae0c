"""Colour maps: depths in Turbo, and error maps of a render against the image of its view.

Error maps show the difference of render and training image, pixel by pixel, in colours whose lightness grows with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splatcli.scene.hdr import srgb_encoded

#: Turbo, A. Mikhailov's colour map: R, G, B as polynomials in the position, lowest power first, as published with it.
_TURBO = np.array(
    [
        [0.13572138, 0.09140261, 0.10667330],
        [4.61539260, 2.19418839, 12.64194608],
        [-42.66032258, 4.84296658, -60.58204836],
        [132.13108234, -14.18503333, 110.36276771],
        [-152.94239396, 4.27729857, -89.90310912],
        [59.28637943, 2.82956604, 27.34824973],
    ]
)

Floats = NDArray[np.float32]
ByteImage = NDArray[np.uint8]

#: Pixels that by_rows() takes at a time, at least one row.
_STRIP = 1 << 18


def by_rows(make: Callable[..., NDArray[Any]], *maps: NDArray[Any]) -> NDArray[Any]:
    """Return ``make(*maps)`` of maps [H, W, ...], which takes pixel by pixel, with intermediate results of a strip.

    Of a whole image of 8192 x 8192 each takes 0.3 to 1.6 GB.
    """
    height, width = maps[0].shape[:2]
    rows = max(1, _STRIP // max(1, width))
    first = make(*(one[:rows] for one in maps))
    made = np.empty((height, *first.shape[1:]), first.dtype)
    made[:rows] = first
    for begin in range(rows, height, rows):
        made[begin : begin + rows] = make(*(one[begin : begin + rows] for one in maps))
    return made


def depth_image(depth: Floats, near_far: tuple[float, float]) -> ByteImage:
    """Return [..., 3] uint8: Turbo over 1 / depth, red at ``near`` and nearer, violet at ``far`` and farther."""
    near, far = near_far
    if not far > near:
        return turbo(np.full(depth.shape, 0.5))
    with np.errstate(divide="ignore"):
        return turbo((1 / np.maximum(depth, 1e-12) - 1 / far) / (1 / near - 1 / far))


def turbo(position: NDArray[np.floating]) -> ByteImage:
    """Return [..., 3] uint8 sRGB of values 0 (violet) ... 1 (red), clamped."""
    x = np.clip(np.asarray(position, np.float64), 0.0, 1.0)[..., None]
    value = np.zeros((*x.shape[:-1], 3))
    for coefficients in _TURBO[::-1]:
        value = value * x + coefficients
    return to_bytes(value)


def to_bytes(values: NDArray[np.floating]) -> ByteImage:
    """Round 0...1 to the nearest of 256 levels."""
    levels: ByteImage = np.round(np.clip(values, 0.0, 1.0) * 255.0).astype(np.uint8)
    return levels


#: Ticks of the error scale (mean of |R|, |G|, |B| differences, 1 = full range). All sheets have one scale, so that they
#: can be compared; values above the last tick are clamped.
TICKS = (0.0, 0.01, 0.05, 0.1, 0.2, 0.4)

#: The colour of masked pixels, which have no error; the map has no grey.
MASKED_COLOUR = (128, 128, 128)

#: CIELAB lightness, chroma and hue in degrees along the map: black, violet, red, orange, pale yellow. Lightness grows
#: evenly, so that equal steps look equal, also to the colour-blind and on paper.
_PATH = (
    (0.0, 0.0, 300.0),
    (24.0, 45.0, 310.0),
    (48.0, 66.0, 378.0),
    (72.0, 66.0, 425.0),
    (96.0, 30.0, 465.0),
)

#: White of sRGB (D65) in XYZ, and XYZ to linear sRGB (IEC 61966-2-1).
_WHITE = np.array([0.9505, 1.0, 1.089])
_TO_RGB = np.array([[3.2406, -1.5372, -0.4986], [-0.9689, 1.8758, 0.0415], [0.0557, -0.2040, 1.0570]])


def heat(fraction: NDArray[np.floating]) -> NDArray[np.uint8]:
    """Return [..., 3] uint8 sRGB of values 0...1, clamped."""
    levels = np.nan_to_num(np.clip(fraction, 0.0, 1.0), nan=1.0) * 255.0
    image: NDArray[np.uint8] = _TABLE[np.round(levels).astype(np.int64)]
    return image


def position(error: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the position of an error on the map, 0...1: its square root, which spreads the small errors."""
    return np.sqrt(np.clip(np.asarray(error, np.float64) / TICKS[-1], 0.0, 1.0))


def error_map(
    truth: NDArray[np.uint8], render: NDArray[np.uint8], masked: NDArray[np.bool_] | None = None
) -> NDArray[np.uint8]:
    """Return [H, W, 3] uint8: the absolute error of ``render`` against ``truth``, both [H, W, 3] uint8.

    masked: [H, W] bool, pixels that take no part; they are grey.
    """
    error = np.abs(truth.astype(np.int16) - render.astype(np.int16)).mean(-1) / 255.0
    return mask_grey(heat(position(error)), masked)


def mask_grey(photo: NDArray[np.uint8], masked: NDArray[np.bool_] | None) -> NDArray[np.uint8]:
    """Return an image [H, W, 3] with grey in place of the pixels that are masked, [H, W]."""
    if masked is None:
        return photo
    shown = photo.copy()
    shown[masked] = MASKED_COLOUR
    return shown


def _table() -> NDArray[np.uint8]:
    """Return [256, 3], ``_PATH`` in sRGB."""
    at, knots = np.linspace(0.0, 1.0, 256), np.linspace(0.0, 1.0, len(_PATH))
    lightness, chroma, hue = (np.interp(at, knots, column) for column in zip(*_PATH, strict=True))
    y = (lightness + 16.0) / 116.0
    x = y + chroma * np.cos(np.radians(hue)) / 500.0
    z = y - chroma * np.sin(np.radians(hue)) / 200.0
    compressed = np.stack([x, y, z], axis=-1)
    xyz = _WHITE * np.where(compressed > 6 / 29, compressed**3, 3 * (6 / 29) ** 2 * (compressed - 4 / 29))
    table: NDArray[np.uint8] = np.round(srgb_encoded((xyz @ _TO_RGB.T).clip(0.0, 1.0)) * 255.0).astype(np.uint8)
    return table


_TABLE = _table()
