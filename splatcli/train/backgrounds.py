"""Backgrounds: the colours behind renders and under transparent images, in training and in evaluation."""

from __future__ import annotations

import difflib
import re

from PIL import ImageColor

from splatcli.config import Config
from splatcli.errors import UsageError
from splatcli.scene.decode import Rgb

#: R, G, B in 0..1 of the backgrounds that have names.
BACKGROUNDS = {"black": (0.0, 0.0, 0.0), "white": (1.0, 1.0, 1.0)}


#: Hexadecimal digits of a colour, two or one for each of R, G, B; of six the sign, which begins a shell's comment, may
#: lack.
_HEX = re.compile(r"#?[0-9a-f]{6}|#[0-9a-f]{3}")


def parse_background(text: str) -> tuple[float, float, float]:
    """Return R, G, B in 0..1 of one of CSS' colour names, ``#rrggbb``, ``#rgb`` or ``r,g,b``. Raises UsageError."""
    word = text.strip().lower()
    if word in ImageColor.colormap:
        r, g, b = (value / 255 for value in ImageColor.getrgb(word)[:3])
        return r, g, b
    if _HEX.fullmatch(word):
        digits = word.removeprefix("#")
        size = len(digits) // 3
        r, g, b = (int(digits[i : i + size] * (2 // size), 16) / 255 for i in range(0, 3 * size, size))
        return r, g, b
    try:
        values = [float(part) for part in word.split(",")]
    except ValueError:
        values = []
    if len(values) == 3 and all(0.0 <= value <= 1.0 for value in values):
        return values[0], values[1], values[2]
    raise UsageError(f"{text!r} is not a colour", where="--background", remedy=_forms(word, values))


def _forms(word: str, values: list[float]) -> str:
    """Return what a colour looks like, with the one that is meant where that is clear."""
    forms = "black, white or another name of CSS, #rrggbb, or r,g,b from 0 to 1"
    if len(values) == 3 and all(value in range(256) for value in values):
        r, g, b = map(int, values)
        return f"levels of 0 to 255 are #{r:02x}{g:02x}{b:02x}; {forms}"
    near = difflib.get_close_matches(word, ImageColor.colormap, n=1)
    return f"did you mean {near[0]}? {forms}" if near else forms


def evaluation_background(config: Config) -> str:
    """Return the background of evaluated renders: that of training, black where training draws it at random."""
    return "white" if config.train.background == "white" else "black"


def image_background(config: Config) -> Rgb:
    """Return R G B in 0..255 under transparent images in evaluation: white for a white run, else black."""
    return (255, 255, 255) if config.train.background == "white" else (0, 0, 0)


def training_image_background(config: Config) -> Rgb | None:
    """Return R G B in 0..255 under transparent images in training; None for random backgrounds."""
    return None if config.train.background == "random" else image_background(config)
