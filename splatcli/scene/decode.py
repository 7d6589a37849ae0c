"""Image files to 8-bit sRGB, whatever they hold: headers first, pixels when they are wanted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from splatcli.errors import ResourceError, SceneError, SplatError
from splatcli.scene.colour import Colours, colours_of
from splatcli.scene.filetypes import FORMATS, raw_error, reduction, refuse_raw, unreadable_error

# Pillow's own bound on pixels warns or raises by a number that knows nothing of this machine; ours is max_pixels.
Image.MAX_IMAGE_PIXELS = None

_Transpose = Image.Transpose
#: EXIF orientation (274) -> the transposition that puts the picture upright.
_UPRIGHT = {
    2: _Transpose.FLIP_LEFT_RIGHT,
    3: _Transpose.ROTATE_180,
    4: _Transpose.FLIP_TOP_BOTTOM,
    5: _Transpose.TRANSPOSE,
    6: _Transpose.ROTATE_270,
    7: _Transpose.TRANSVERSE,
    8: _Transpose.ROTATE_90,
}
_ORIENTATION_TAG = 0x0112
#: A TIFF with this tag is a DNG, whose first picture is a thumbnail.
_DNG_VERSION_TAG = 0xC612

#: Bytes a pixel while a photo is decoded: Pillow's picture, its copy in another mode, and the array.
DECODE_BYTES = 12
#: Rows that are converted at a time where wide numbers are needed; bounds the temporaries.
_ROWS = 64
#: Rounding beyond 0...1 that a floating point image may have.
_FLOAT_SLACK = 1e-3

Rgb = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Header:
    """What an image file says of itself, as stored (EXIF not applied).

    orientation: EXIF's, 1 to 8; 1 when there is none.
    colours: the name of what is converted to sRGB; "sRGB" when nothing is.
    several: whether the file holds more pictures than the first, which is the one that is used.
    """

    width: int
    height: int
    mode: str
    has_alpha: bool
    orientation: int
    colours: str
    several: bool


@dataclass(frozen=True, slots=True)
class Decoded:
    """A picture: rgb [H, W, 3] uint8 in sRGB, and alpha [H, W] uint8 when the file has transparency."""

    rgb: NDArray[np.uint8]
    alpha: NDArray[np.uint8] | None


def read_header(path: Path, max_pixels: int | None = None) -> Header:
    """Size, mode, orientation and colours without decoding.

    max_pixels: more are refused. Raises SceneError when the file is not an image that can be read.
    """
    with _opened(path) as image:
        width, height = _stored_size(image)
        if width < 1 or height < 1:
            raise SceneError(f"is {width}x{height} pixels", where=path, remedy="copy the file again from its source")
        if max_pixels is not None and width * height > max_pixels:
            raise SceneError(
                f"is {width}x{height}, {width * height / 1e6:,.0f} million pixels; "
                f"at most {max_pixels / 1e6:,.0f} million are decoded (--max-pixels)",
                where=path,
                remedy=reduction(path),
            )
        with _decoding(path):
            return Header(
                width=width,
                height=height,
                mode=image.mode,
                has_alpha=image.has_transparency_data,
                orientation=_orientation(image),
                colours=colours_of(image).name,
                # Phones put depth or a preview behind a photo, which is no animation (MPO).
                several=bool(getattr(image, "is_animated", False)) and image.format != "MPO",
            )


def decode(path: Path, background: Rgb | None, orientation: int = 1, size: tuple[int, int] | None = None) -> Decoded:
    """The picture in sRGB.

    background: what straight alpha is composited on; None leaves the colours as they are.
    orientation: EXIF's, 1 to 8, is applied; the file's own is not.
    size: width and height that are expected then; others are an error before anything is decoded.
    16-bit values are divided by 65535 exactly and rounded to nearest. Raises SceneError when the file cannot be
    decoded in full.
    """
    with _opened(path) as image:
        width, height = _stored_size(image) if orientation < 5 else _stored_size(image)[::-1]
        if size is not None and (width, height) != size:
            raise SceneError(
                f"is {width}x{height} pixels now, it was {size[0]}x{size[1]} when the scene was read",
                where=path,
                remedy="start again; do not change photos during a run",
            )
        # Pillow turns TIFFs, and nothing else, as their orientation says; that is undone here.
        turned = _orientation(image) if image.format == "TIFF" else 1
        colours = colours_of(image)
        with _decoding(path):
            deep = _deep(image, path)
            if deep is None:
                image.load()
        if deep is not None:
            decoded = _from_deep(deep, background, colours)
        elif image.mode[0] in "IF":
            decoded = _from_deep(_grey(image, path), background, colours)
        else:
            with _decoding(path):
                decoded = _from_bytes(image, background, colours)
    for way in (_INVERSE.get(turned), _UPRIGHT.get(orientation)):
        if way is not None:
            decoded = Decoded(_transposed(decoded.rgb, way), _transposed(decoded.alpha, way))
    return decoded


def decode_rgb(path: Path, background: Rgb, orientation: int = 1) -> NDArray[np.uint8]:
    """``decode``, the colours only: [H, W, 3] uint8."""
    return decode(path, background, orientation).rgb


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """The file as Pillow sees it before it decodes pixels."""
    refuse_raw(path)
    try:
        image = Image.open(path, formats=FORMATS)
    except UnidentifiedImageError:
        raise unreadable_error(path) from None
    except Exception as error:
        raise _damaged(error, path) from None
    with image:
        if _DNG_VERSION_TAG in getattr(image, "tag_v2", ()):
            raise raw_error(path)
        yield image


@contextmanager
def _decoding(path: Path) -> Iterator[None]:
    """Turns whatever a decoder raises at damaged bytes into a message: Pillow's raise nearly everything."""
    try:
        yield
    except SplatError:
        raise
    except Exception as error:
        raise _damaged(error, path) from None


def _damaged(error: Exception, path: Path) -> SplatError:
    if isinstance(error, MemoryError):
        return ResourceError("there is not enough memory to decode it", where=path, remedy=reduction(path))
    if isinstance(error, OSError) and error.errno is not None:
        return SceneError(
            f"cannot be opened: {error.strerror}", where=path, remedy="check the file and its permissions"
        )
    reason = str(error).removesuffix(f" {str(path)!r}") or type(error).__name__
    return SceneError(
        f"the image is damaged: {reason}",
        where=path,
        remedy="copy the file again from its source, or leave damaged photos out with --skip-bad-images",
    )


def _orientation(image: Image.Image) -> int:
    # A PNG without EXIF would be decoded to look for some behind the pixels.
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    try:
        value = image.getexif().get(_ORIENTATION_TAG, 1)
    except Exception:
        # The picture can be whole although its metadata is not.
        return 1
    return value if value in _UPRIGHT else 1


def _stored_size(image: Image.Image) -> tuple[int, int]:
    """Width and height as stored; of TIFFs Pillow tells them as they are upright."""
    turned = image.format == "TIFF" and _orientation(image) >= 5
    return (image.height, image.width) if turned else image.size


#: Orientation -> the transposition that brings an upright picture back into its file's rows.
_INVERSE = {**_UPRIGHT, 6: _Transpose.ROTATE_90, 8: _Transpose.ROTATE_270}


def _transposed(pixels: NDArray[np.uint8] | None, way: Image.Transpose) -> NDArray[np.uint8] | None:
    return None if pixels is None else np.array(Image.fromarray(pixels).transpose(way))


def _from_bytes(image: Image.Image, background: Rgb | None, colours: Colours) -> Decoded:
    """Of an image of 8 bits or fewer a channel."""
    if not image.has_transparency_data:
        return Decoded(np.array(colours.to_rgb(image)), None)
    if image.mode not in ("LA", "RGBA"):
        image = image.convert("RGBA")
    alpha = np.array(image.getchannel("A"))
    rgb = np.array(colours.to_rgb(image.convert(image.mode[:-1])))
    return Decoded(rgb if background is None else _composite(rgb, alpha, background), alpha)


def _composite(rgb: NDArray[np.uint8], alpha: NDArray[np.uint8], background: Rgb) -> NDArray[np.uint8]:
    """Straight alpha over a colour, rounded to nearest; every product fits 16 bits. Works in place."""
    ground = np.array(background, dtype=np.uint16)
    for top in range(0, len(rgb), _ROWS):
        rows = slice(top, top + _ROWS)
        opacity = alpha[rows, :, None].astype(np.uint16)
        mixed = rgb[rows] * opacity + ground * (255 - opacity)
        rgb[rows] = (mixed + 127) // 255
    return rgb


def _from_deep(values: NDArray[np.uint16] | NDArray[np.float32], background: Rgb | None, colours: Colours) -> Decoded:
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
            rgb = _composite(rgb, alpha, background)
    return Decoded(rgb, alpha)


def _grey(image: Image.Image, path: Path) -> NDArray[np.uint16] | NDArray[np.float32]:
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


def _deep(image: Image.Image, path: Path) -> NDArray[np.uint16] | None:
    """[H, W, C] of a PNG or TIFF with 16 bits in each of 2, 3 or 4 channels; None for any other image.

    Pillow keeps the upper byte of such files only, so they are decoded in a way that shows both: RGB and RGBA twice,
    as stored and with the bytes of a number swapped; grey with alpha as four plain bytes.
    """
    tiles = getattr(image, "tile", None)
    if image.format not in ("PNG", "TIFF") or not tiles:
        return None
    args = tiles[0][3]
    layout = args if isinstance(args, str) else args[0] if isinstance(args, tuple) and args else ""
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
            tile._replace(args=swapped if isinstance(tile.args, str) else (swapped, *tile.args[1:]))
            for tile in raw.tile
        ]
        low = np.asarray(raw).astype(np.uint16)
    return np.asarray(image).astype(np.uint16) * 256 + low
