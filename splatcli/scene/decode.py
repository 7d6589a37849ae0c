"""Image files to 8-bit RGB, whatever they hold: headers first, pixels when they are wanted."""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms, UnidentifiedImageError

from splatcli.errors import SceneError

#: File name endings that are taken for images, when an ending has to be guessed.
SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".webp", ".bmp", ".avif")

#: EXIF orientation (274) -> the transposition that puts the picture upright.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ORIENTATION_TAG = 0x0112

#: What Pillow raises for files that are damaged in one way or another.
_DAMAGE = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombWarning)


@dataclass(frozen=True, slots=True)
class Header:
    """What an image file says of itself, as stored (EXIF not applied)."""

    width: int
    height: int
    mode: str
    has_alpha: bool
    #: EXIF orientation, 1 to 8; 1 when there is none.
    orientation: int


def read_header(path: Path) -> Header:
    """Size, mode and orientation without decoding. Raises SceneError when the file is not an image."""
    with _open(path) as image:
        try:
            orientation = image.getexif().get(_ORIENTATION_TAG, 1) if "exif" in image.info else 1
        except _DAMAGE:
            # The picture can be whole although its metadata is not.
            orientation = 1
        return Header(
            width=image.width,
            height=image.height,
            mode=image.mode,
            has_alpha=image.has_transparency_data,
            orientation=orientation if orientation in _UPRIGHT else 1,
        )


def decode_rgb(path: Path, background: tuple[int, int, int], orientation: int = 1) -> NDArray[np.uint8]:
    """The picture as [H, W, 3] uint8.

    Straight alpha is composited on ``background``; 16-bit values are divided by 65535 exactly and rounded;
    CMYK goes through its profile when it has one. ``orientation`` (EXIF, 1 to 8) is applied; the file's own is not.
    Raises SceneError when the file cannot be decoded in full.
    """
    with _open(path) as image:
        try:
            rgb = _to_rgb(image, background, path)
        except SceneError:
            raise
        except _DAMAGE as error:
            raise SceneError(
                f"the image is damaged: {error}", where=path, remedy="copy the file again from its source"
            ) from None
    if orientation in _UPRIGHT:
        rgb = np.ascontiguousarray(Image.fromarray(rgb).transpose(_UPRIGHT[orientation]))
    return rgb


def _open(path: Path) -> Image.Image:
    try:
        return Image.open(path)
    except UnidentifiedImageError:
        with path.open("rb") as file:
            start = file.read(16)
        raise SceneError(
            "is empty" if not start else f"is not an image that can be read (it starts with {start!r})",
            where=path,
            remedy=f"supported: {' '.join(SUFFIXES)}",
        ) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise SceneError(f"is too large: {error}", where=path, remedy="scale the photos down first") from None
    except _DAMAGE as error:
        raise SceneError(
            f"cannot be opened: {getattr(error, 'strerror', None) or error}",
            where=path,
            remedy="copy the file again from its source",
        ) from None


def _to_rgb(image: Image.Image, background: tuple[int, int, int], path: Path) -> NDArray[np.uint8]:
    deep = _deep_png(image, path)
    if deep is not None:
        return _from_float(deep.astype(np.float64) / 65535, background)
    if image.mode.startswith("I"):
        # Pillow's modes for 16-bit grey; a 32-bit "I" comes from 16-bit PGM and old TIFF writers.
        return _from_float(np.asarray(image).astype(np.float64)[..., None] / 65535, background)
    if image.mode == "F":
        return _from_float(np.nan_to_num(np.asarray(image, dtype=np.float64))[..., None], background)
    if image.mode == "CMYK":
        return np.array(_from_cmyk(image))
    if image.has_transparency_data:
        return _composite(np.asarray(image.convert("RGBA")), background)
    return np.array(image.convert("RGB"))


def _composite(rgba: NDArray[np.uint8], background: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Straight alpha over a colour, rounded to nearest; every product fits 16 bits."""
    alpha = rgba[..., 3:].astype(np.uint16)
    ground = np.array(background, dtype=np.uint16)
    mixed = rgba[..., :3] * alpha + ground * (255 - alpha)
    return ((mixed + 127) // 255).astype(np.uint8)


def _from_float(values: NDArray[np.float64], background: tuple[int, int, int]) -> NDArray[np.uint8]:
    """[H, W, C] values in 0..1, C = 1 grey, 2 grey and alpha, 3 RGB, 4 RGBA, to [H, W, 3] uint8."""
    channels = values.shape[2]
    colour = values[..., : channels - 1 + channels % 2]
    if channels in (2, 4):
        alpha = values[..., -1:]
        colour = colour * alpha + np.array(background) / 255 * (1 - alpha)
    levels = np.round(np.clip(colour, 0, 1) * 255).astype(np.uint8)
    return np.ascontiguousarray(np.broadcast_to(levels, (*levels.shape[:2], 3)))


def _deep_png(image: Image.Image, path: Path) -> NDArray[np.uint16] | None:
    """[H, W, C] of a 16-bit PNG with 2, 3 or 4 channels; None for any other image.

    Pillow keeps the upper byte of such files only, so they are decoded in a way that shows both: RGB and RGBA twice,
    once as big-endian and once as if little-endian (which takes the lower byte); grey with alpha as four plain bytes.
    """
    tiles = getattr(image, "tile", None)
    layout = str(tiles[0][3]) if image.format == "PNG" and tiles else ""
    if layout == "LA;16B":
        with Image.open(path) as raw:
            raw._mode = "RGBA"
            raw.tile = [tile._replace(args="RGBA") for tile in raw.tile]
            both = np.asarray(raw).astype(np.uint16)
        return both[..., 0::2] * 256 + both[..., 1::2]
    if layout in ("RGB;16B", "RGBA;16B"):
        with Image.open(path) as raw:
            raw.tile = [tile._replace(args=layout.replace("16B", "16L")) for tile in raw.tile]
            low = np.asarray(raw).astype(np.uint16)
        return np.asarray(image).astype(np.uint16) * 256 + low
    return None


def _from_cmyk(image: Image.Image) -> Image.Image:
    profile = image.info.get("icc_profile")
    if profile:
        try:
            source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            converted = ImageCms.profileToProfile(image, source, ImageCms.createProfile("sRGB"), outputMode="RGB")
            if converted is not None:
                return converted
        except (ImageCms.PyCMSError, OSError):
            # A broken profile is no reason to refuse the photo; the plain conversion is what others show.
            pass
    return image.convert("RGB")
