"""Backgrounds: the colours behind renders and under transparent images, in training and in evaluation."""

from __future__ import annotations

import re

from splatcli.config import Config
from splatcli.errors import UsageError
from splatcli.scene.decode import Rgb

#: R, G, B in 0..1 of the backgrounds that have names.
BACKGROUNDS = {"black": (0.0, 0.0, 0.0), "white": (1.0, 1.0, 1.0)}


def parse_background(text: str) -> tuple[float, float, float]:
    """Return R, G, B in 0...1 of ``black``, ``white``, ``#rrggbb`` or ``r,g,b``. Raises UsageError."""
    if text in BACKGROUNDS:
        return BACKGROUNDS[text]
    if re.fullmatch(r"#[0-9a-fA-F]{6}", text):
        r, g, b = (int(text[i : i + 2], 16) / 255 for i in (1, 3, 5))
        return r, g, b
    try:
        r, g, b = (float(part) for part in text.split(","))
    except ValueError:
        r = g = b = -1.0
    if not all(0.0 <= value <= 1.0 for value in (r, g, b)):
        raise UsageError(
            f"{text!r} is not a colour", where="--background", remedy="black, white, #rrggbb, or r,g,b from 0 to 1"
        )
    return r, g, b


def evaluation_background(config: Config) -> str:
    """Return the background of evaluated renders: that of training, black where training draws it at random."""
    return "white" if config.train.background == "white" else "black"


def image_background(config: Config) -> Rgb:
    """Return R G B in 0..255 under transparent images in evaluation: white for a white run, else black."""
    return (255, 255, 255) if config.train.background == "white" else (0, 0, 0)


def training_image_background(config: Config) -> Rgb | None:
    """Return R G B in 0..255 under transparent images in training; None for random backgrounds."""
    return None if config.train.background == "random" else image_background(config)
