"""Pixels: what a decoder gives, of any depth and with or without alpha, as 8-bit sRGB."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from splatcli.errors import SceneError
from splatcli.scene.colour import Colours
from splatcli.scene.filetypes import FORMATS

#: Rows that are converted at a time where wide numbers are needed; bounds the temporaries.
_ROWS = 64
#: Rounding beyond 0...1 that a floating point image may have.
_FLOAT_SLACK = 1e-3

Rgb = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Decoded:
    """A picture: rgb [H, W, 3] uint8 in sRGB, and alpha [H, W] uint8 when the file has transparency."""

    rgb: NDArray[np.uint8]
    alpha: NDArray[np.uint8] | None


def from_bytes(image: Image.Image, background: Rgb | None, colours: Colours) -> Decoded:
    """Of an image of 8 bits or fewer a channel."""
    if not image.has_transparency_data:
        return Decoded(np.array(colours.to_rgb(image)), None)
    if image.mode not in ("LA", "RGBA"):
        image = image.convert("RGBA")
    alpha = np.array(image.getchannel("A"))
    rgb = np.array(colours.to_rgb(image.convert(image.mode[:-1])))
    return Decoded(rgb if background is None else composite(rgb, alpha, background), alpha)


def composite(rgb: NDArray[np.uint8], alpha: NDArray[np.uint8], background: tuple[int, ...]) -> NDArray[np.uint8]:
    """Straight alpha [H, W] over a colour [C], in place in rgb [H, W, C], rounded to nearest; products fit 16 bits."""
    ground = np.array(background, dtype=np.uint16)
    for top in range(0, len(rgb), _ROWS):
        rows = slice(top, top + _ROWS)
        opacity = alpha[rows, :, None].astype(np.uint16)
        mixed = rgb[rows] * opacity + ground * (255 - opacity)
        rgb[rows] = (mixed + 127) // 255
    return rgb


def from_deep(values: NDArray[np.uint16] | NDArray[np.float32], background: Rgb | None, colours: Colours) -> Decoded:
    """[H, W, C] 16-bit numbers or floats in 0...1; C = 1 grey, 2 grey and alpha, 3 RGB, 4 RGBA."""
    height, width, channels = values.shape
    has_alpha = channels in (2, 4)
    scale = 65535 if values.dtype == np.uint16 else 1
    rgb = np.empty((height, width, 3), dtype=np.uint8)
    alpha = np.empty((height, width), dtype=np.uint8) if has_alpha else None
    # A profile is applied to 8-bit numbers, so that alpha must wait; without one all is mixed before it is rounded.
    mixes = background is not None and colours.transform is None
    for top in range(0, height, _ROWS):
        rows = slice(top, top + _ROWS)
        unit = np.clip(values[rows].astype(np.float64) / scale, 0, 1)
        colour = colours.encoded(unit[..., : channels - has_alpha])
        if alpha is not None:
            opacity = unit[..., -1:]
            alpha[rows] = np.round(opacity[..., 0] * 255)
            if mixes:
                colour = colour * opacity + np.array(background) / 255 * (1 - opacity)
        rgb[rows] = np.round(colour * 255)
    if colours.transform is not None:
        rgb = np.array(colours.to_rgb(Image.fromarray(rgb)))
        if alpha is not None and background is not None:
            rgb = composite(rgb, alpha, background)
    return Decoded(rgb, alpha)


def grey(image: Image.Image, path: Path) -> NDArray[np.uint16] | NDArray[np.float32]:
    """[H, W, 1] of Pillow's modes for deep grey: 16 bits (also kept as 32-bit integers) and floating point."""
    values = np.asarray(image)[..., None]
    if values.dtype.kind == "f":
        low, high = float(values.min()), float(values.max())
        if not (low >= -_FLOAT_SLACK and high <= 1 + _FLOAT_SLACK):
            raise SceneError(
                f"holds floating point values from {low:g} to {high:g}; expected 0 to 1",
                where=path,
                remedy="save it with 8 or 16 bits a channel",
            )
        return values.astype(np.float32, copy=False)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 65535:
        raise SceneError(
            f"holds integers from {low} to {high}; expected 16 bits, 0 to 65535",
            where=path,
            remedy="save it with 8 or 16 bits a channel",
        )
    return values.astype(np.uint16, copy=False)


def deep(image: Image.Image, path: Path) -> NDArray[np.uint16] | None:
    """[H, W, C] of a PNG or TIFF with 16 bits in each of 2, 3 or 4 channels; None for any other image.

    Pillow keeps the upper byte of such files only, so they are decoded in a way that shows both: RGB and RGBA twice,
    as stored and with the bytes of a number swapped; grey with alpha as four plain bytes.
    """
    tiles = getattr(image, "tile", None)
    if image.format not in ("PNG", "TIFF") or not tiles:
        return None
    args = tiles[0].args
    layout = str(args if isinstance(args, str) else next(iter(args or ()), ""))
    if layout == "LA;16B":
        with Image.open(path, formats=FORMATS) as raw:
            raw._mode = "RGBA"
            raw.tile = [tile._replace(args="RGBA") for tile in raw.tile]
            both = np.asarray(raw).astype(np.uint16)
        return both[..., 0::2] * 256 + both[..., 1::2]
    if layout[:-1] not in ("RGB;16", "RGBA;16"):
        return None
    native = "L" if sys.byteorder == "little" else "B"
    swapped = layout[:-1] + ("B" if layout[-1].replace("N", native) == "L" else "L")
    with Image.open(path, formats=FORMATS) as raw:
        raw.tile = [
            tile._replace(args=swapped if not isinstance(tile.args, tuple) else (swapped, *tile.args[1:]))
            for tile in raw.tile
        ]
        low = np.asarray(raw).astype(np.uint16)
    return np.asarray(image).astype(np.uint16) * 256 + low
