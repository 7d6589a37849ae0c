"""Backgrounds: the colours behind renders and under transparent images, in training and in evaluation."""

from __future__ import annotations

from splatcli.config import Config, parse_colour
from splatcli.errors import UsageError
from splatcli.scene.decode import Rgb


def parse_background(text: str) -> tuple[float, float, float]:
    """Return R, G, B in 0..1 of a colour, as parse_colour(). Raises UsageError."""
    try:
        return parse_colour(text)
    except ValueError as error:
        raise UsageError(f"{text!r} is not a colour", where="--background", remedy=str(error)) from None


def evaluation_background(config: Config) -> str:
    """Return the background of evaluated renders: that of training, black where training draws it at random."""
    return "black" if config.train.background == "random" else config.train.background


def evaluation_colour(config: Config) -> tuple[float, float, float]:
    """Return R, G, B in 0..1 of evaluation_background()."""
    return parse_colour(evaluation_background(config))


def image_background(config: Config) -> Rgb:
    """Return R G B in 0..255 under transparent images in evaluation."""
    r, g, b = (round(255 * value) for value in evaluation_colour(config))
    return r, g, b


def training_image_background(config: Config) -> Rgb | None:
    """Return R G B in 0..255 under transparent images in training; None for random backgrounds."""
    return None if config.train.background == "random" else image_background(config)
