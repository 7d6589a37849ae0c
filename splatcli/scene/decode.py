"""Image files to 8-bit sRGB, whatever they hold: headers first, pixels when they are wanted."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from splatcli.errors import ResourceError, SceneError, SplatError, system_error
from splatcli.scene.colour import colours_of
from splatcli.scene.exif_orientation import upright
from splatcli.scene.filetypes import FORMATS, raw_error, reduction, refuse_raw, unreadable_error
from splatcli.scene.pixels import Decoded, Rgb, deep, from_bytes, from_deep, grey

# Pillow's own bound on pixels warns or raises by a number that knows nothing of this machine; ours is max_pixels.
Image.MAX_IMAGE_PIXELS = None

_ORIENTATION_TAG = 0x0112
#: A TIFF with this tag is a DNG, whose first picture is a thumbnail.
_DNG_VERSION_TAG = 0xC612

#: Bytes a pixel while a photo is decoded: Pillow's picture, its copy in another mode, and the array.
DECODE_BYTES = 12


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
        undo = _orientation(image) if image.format == "TIFF" else 1
        colours = colours_of(image)
        with _decoding(path):
            wide = deep(image, path)
            if wide is None:
                image.load()
        if wide is not None:
            decoded = from_deep(wide, background, colours)
        elif image.mode[0] in "IF":
            decoded = from_deep(grey(image, path), background, colours)
        else:
            with _decoding(path):
                decoded = from_bytes(image, background, colours)
    alpha = decoded.alpha
    return Decoded(
        upright(decoded.rgb, undo, orientation),
        None if alpha is None else upright(alpha, undo, orientation),
    )


def decode_nonzero(path: Path, orientation: int = 1) -> NDArray[np.bool_]:
    """[H, W] whether a pixel is neither black nor transparent, EXIF's ``orientation`` applied. Raises SceneError.

    Numbers are taken as stored: 1 is not 0, whatever the number of bits.
    """
    with _opened(path) as image, _decoding(path):
        undo = _orientation(image) if image.format == "TIFF" else 1
        if image.mode[0] not in "IF":
            image = image.convert("RGBA") if image.has_transparency_data else image.convert("RGB")
        values = np.asarray(image)
        nonzero = values != 0 if values.ndim == 2 else values[..., :3].any(axis=2)
        if image.mode == "RGBA":
            nonzero &= values[..., 3] != 0
    return upright(np.asarray(nonzero, dtype=np.bool_), undo, orientation)


def decode_numbers(path: Path, orientation: int = 1) -> NDArray[Any]:
    """[H, W] the numbers of an image of one channel as stored, EXIF's ``orientation`` applied. Raises SceneError."""
    with _opened(path) as image, _decoding(path):
        undo = _orientation(image) if image.format == "TIFF" else 1
        values = np.asarray(image)
    return upright(values, undo, orientation)


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
    refused = system_error(error)
    if refused is not None and refused.errno == errno.ENOMEM:
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
    return value if value in range(1, 9) else 1


def _stored_size(image: Image.Image) -> tuple[int, int]:
    """Width and height as stored; of TIFFs Pillow tells them as they are upright."""
    quarter = image.format == "TIFF" and _orientation(image) >= 5
    return (image.height, image.width) if quarter else image.size
