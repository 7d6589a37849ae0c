"""Error maps: how far a render is from its photo, pixel by pixel, in colours whose lightness grows with the error."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: Errors (mean of |R|, |G|, |B| differences, 1 = full range) that a legend marks. One scale for all sheets, so that two
#: can be laid side by side; the last value and all above look alike.
TICKS = (0.0, 0.01, 0.05, 0.1, 0.2, 0.4)

#: What a mask hides has no error; a grey is no colour of the map.
HIDDEN = (128, 128, 128)

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
    """[..., 3] uint8 sRGB of values 0...1 [...]; what lies outside is clamped."""
    levels = np.nan_to_num(np.clip(fraction, 0.0, 1.0), nan=1.0) * 255.0
    picture: NDArray[np.uint8] = _TABLE[np.round(levels).astype(np.int64)]
    return picture


def position(error: NDArray[np.floating]) -> NDArray[np.float64]:
    """Where an error lies on the map, 0...1: by its square root, which spreads the small ones that good models have."""
    return np.sqrt(np.clip(np.asarray(error, np.float64) / TICKS[-1], 0.0, 1.0))


def error_map(
    truth: NDArray[np.uint8], render: NDArray[np.uint8], hidden: NDArray[np.bool_] | None = None
) -> NDArray[np.uint8]:
    """[H, W, 3] uint8: the absolute error of ``render`` against ``truth``, both [H, W, 3] uint8.

    hidden: [H, W] bool, pixels that take no part; they are grey.
    """
    error = np.abs(truth.astype(np.int16) - render.astype(np.int16)).mean(-1) / 255.0
    picture = heat(position(error))
    if hidden is not None:
        picture[hidden] = HIDDEN
    return picture


def _table() -> NDArray[np.uint8]:
    """[256, 3]: ``_PATH`` in sRGB."""
    at, knots = np.linspace(0.0, 1.0, 256), np.linspace(0.0, 1.0, len(_PATH))
    lightness, chroma, hue = (np.interp(at, knots, column) for column in zip(*_PATH, strict=True))
    y = (lightness + 16.0) / 116.0
    x = y + chroma * np.cos(np.radians(hue)) / 500.0
    z = y - chroma * np.sin(np.radians(hue)) / 200.0
    compressed = np.stack([x, y, z], axis=-1)
    xyz = _WHITE * np.where(compressed > 6 / 29, compressed**3, 3 * (6 / 29) ** 2 * (compressed - 4 / 29))
    linear = (xyz @ _TO_RGB.T).clip(0.0, 1.0)
    curved = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    table: NDArray[np.uint8] = np.round(curved * 255.0).astype(np.uint8)
    return table


_TABLE = _table()
