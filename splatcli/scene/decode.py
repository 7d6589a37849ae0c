"""Image files to 8-bit sRGB, whatever they hold: headers first, pixels when they are wanted."""

from __future__ import annotations

import errno
import io
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageFile, UnidentifiedImageError
from PIL.ExifTags import IFD, Base

from splatcli.errors import ResourceError, SceneError, SplatError, system_error
from splatcli.scene import heif
from splatcli.scene.hdr import ADOBE_RGB, Colour, coded, srgb_encoded, to_srgb

# Pillow's own bound on pixels warns or raises by a number that knows nothing of this machine; ours is max_pixels.
Image.MAX_IMAGE_PIXELS = None

#: A TIFF with this tag is a DNG, whose first picture is a thumbnail.
_DNG_VERSION_TAG = 0xC612

#: Bytes a pixel while an image is decoded: Pillow's picture, its copy in another mode, and the array.
DECODE_BYTES = 12


@dataclass(frozen=True, slots=True)
class Header:
    """The header of an image file, as stored (EXIF not applied).

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
    """Read size, mode, orientation and colours of an image without decoding it.

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
                # Phones put depth or a preview behind an image, which is no animation (MPO).
                several=bool(getattr(image, "is_animated", False)) and image.format not in ("MPO", "HEIF"),
            )


def decode(path: Path, background: Rgb | None, orientation: int = 1, size: tuple[int, int] | None = None) -> Decoded:
    """Decode an image to sRGB.

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
                remedy="start again; do not change images during a run",
            )
        # Pillow turns TIFFs, and nothing else, as their orientation says; that is undone here.
        undo = _orientation(image) if image.format == "TIFF" else 1
        colours = colours_of(image)
        with _decoding(path):
            wide = deep(image, path, colours)
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
        reorient(decoded.rgb, undo, orientation),
        None if alpha is None else reorient(alpha, undo, orientation),
    )


#: The least bright level of a JPEG that is not black.
_MIDDLE = 128


def decode_nonzero(path: Path, orientation: int = 1) -> NDArray[np.bool_]:
    """Return [H, W], whether a pixel is neither black nor transparent, EXIF's ``orientation`` applied.

    Numbers are taken as stored: 1 is not 0, whatever the number of bits. Those of a JPEG, which blurs black, count from
    the middle of their range. Raises SceneError.
    """
    with _opened(path) as image, _decoding(path):
        undo = _orientation(image) if image.format == "TIFF" else 1
        if image.format in ("JPEG", "MPO"):
            return reorient(np.asarray(image.convert("L")) >= _MIDDLE, undo, orientation)
        if image.mode[0] not in "IF":
            image = image.convert("RGBA") if image.has_transparency_data else image.convert("RGB")
        values = np.asarray(image)
        nonzero = values != 0 if values.ndim == 2 else values[..., :3].any(axis=2)
        if image.mode == "RGBA":
            nonzero &= values[..., 3] != 0
    return reorient(np.asarray(nonzero, dtype=np.bool_), undo, orientation)


def decode_numbers(path: Path, orientation: int) -> NDArray[Any]:
    """Return [H, W], the numbers of an image of one channel as stored, EXIF's ``orientation`` applied.

    Raises SceneError.
    """
    with _opened(path) as image, _decoding(path):
        undo = _orientation(image) if image.format == "TIFF" else 1
        values = np.asarray(image)
    return reorient(values, undo, orientation)


def decode_rgb(path: Path, background: Rgb, orientation: int = 1) -> NDArray[np.uint8]:
    """Return the colours of ``decode`` only, [H, W, 3] uint8."""
    return decode(path, background, orientation).rgb


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """Open the file with Pillow, which decodes no pixels yet."""
    refuse_raw(path)
    try:
        image = open_image(path)
    except SceneError:
        raise
    except UnidentifiedImageError:
        raise unreadable_error(path) from None
    except Exception as error:
        raise _damaged(error, path) from None
    with image:
        if _DNG_VERSION_TAG in getattr(image, "tag_v2", ()):
            raise raw_error(path)
        yield image


def open_image(path: Path) -> ImageFile.ImageFile:
    """Open the file with Pillow, as one of the formats that are read. Raises what Pillow raises, and SceneError."""
    formats: tuple[str, ...] = FORMATS
    if heif.is_heif(_start(path)):
        if not heif.can_read():
            raise SceneError(
                f"is a HEIF image, which needs {heif.INSTALL}",
                where=path,
                remedy=f"{heif.INSTALL}; or {conversion(path, known=False)}",
            )
        formats = ("HEIF",)
    image = Image.open(path, formats=formats)
    if image.format == "TIFF":
        # Pillow maps uncompressed files into memory by their names, with the size that they have when they are upright.
        image.filename = ""
    return image


def _start(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_START)


@contextmanager
def _decoding(path: Path) -> Iterator[None]:
    """Turn what a decoder raises at damaged bytes into a message: Pillow's decoders raise nearly everything."""
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
        remedy="copy the file again from its source, or leave damaged images out: splat train --skip-bad-images",
    )


def exif_of(image: Image.Image) -> Image.Exif:
    """Return the EXIF of an open image, but not what a PNG has behind its pixels: it would be decoded to look for it.

    Damaged EXIF raises any exception, though the picture can be whole.
    """
    return Image.Exif() if image.format == "PNG" and "exif" not in image.info else image.getexif()


def _orientation(image: Image.Image) -> int:
    # A HEIF image is upright when it is decoded: its container says how, and repeats that in its EXIF or not.
    if image.format == "HEIF":
        return 1
    try:
        value = exif_of(image).get(Base.Orientation, 1)
    except Exception:
        # The picture can be whole although its metadata is not.
        return 1
    return value if value in range(1, 9) else 1


def _stored_size(image: Image.Image) -> tuple[int, int]:
    """Return width and height as stored; Pillow gives those of a TIFF as they are upright."""
    quarter = image.format == "TIFF" and _orientation(image) >= 5
    return (image.height, image.width) if quarter else image.size


#: Pillow's names of the formats that are read. Its others stay closed: some start programs, some know no signature.
FORMATS = ("PNG", "JPEG", "TIFF", "WEBP", "AVIF", "BMP", "GIF", "JPEG2000", "PPM")
SUPPORTED = "PNG, JPEG, TIFF, WebP, HEIC, AVIF, BMP, JPEG 2000 and PNM"

#: Endings of camera raw files. Many are TIFF inside, with a thumbnail where an image would be.
RAW_SUFFIXES = (
    *(".3fr", ".arw", ".cr2", ".cr3", ".crw", ".dcr", ".dng", ".erf", ".iiq", ".kdc", ".mef", ".mos", ".mrw"),
    *(".nef", ".nrw", ".orf", ".pef", ".raf", ".raw", ".rw2", ".rwl", ".sr2", ".srf", ".srw", ".x3f"),
)

#: What a file starts with -> what it is; all of them need another program.
_SIGNATURES = (
    (b"\x76\x2f\x31\x01", "an OpenEXR image"),
    (b"#?RADIANCE", "a Radiance HDR image"),
    (b"#?RGBE", "a Radiance HDR image"),
    (b"\xff\x0a", "a JPEG XL image"),
    (b"\0\0\0\x0cJXL ", "a JPEG XL image"),
    (b"8BPS", "a Photoshop document"),
    (b"PF\n", "a floating point image in colour"),
)
#: What the formats that are read start with.
_READ = (
    (b"\x89PNG", "a PNG"),
    (b"\xff\xd8\xff", "a JPEG"),
    (b"II*\0", "a TIFF"),
    (b"MM\0*", "a TIFF"),
    (b"GIF8", "a GIF"),
    (b"BM", "a BMP"),
)
#: Bytes that identify a file.
_START = 64


def refuse_raw(path: Path) -> None:
    """Raise SceneError for a camera's raw file, by its name."""
    if path.suffix.lower() in RAW_SUFFIXES:
        raise raw_error(path)


def raw_error(path: Path) -> SceneError:
    """Return the error for a camera's raw file."""
    return SceneError("is a camera's raw file, which has to be developed first", where=path, remedy=conversion(path))


def unreadable_error(path: Path) -> SceneError:
    """Return the error for a file that no decoder knows: what it is, by its first bytes, and the remedy."""
    try:
        start = _start(path)
    except OSError as error:
        return SceneError(f"cannot be read: {error.strerror}", where=path, remedy="check the file and its permissions")
    if not start:
        return SceneError("is empty", where=path, remedy="copy the file again from its source")
    if start.startswith(b"version https://git-lfs"):
        return SceneError(
            "is not an image: it is a placeholder of Git LFS", where=path, remedy="fetch the files with: git lfs pull"
        )
    kind = _kind(start)
    if kind is not None:
        return SceneError(f"is {kind}, which is not read here", where=path, remedy=conversion(path))
    for signature, kind in ((start, "a HEIF image"),) if heif.is_heif(start) else _READ:
        if start.startswith(signature):
            return SceneError(
                f"starts as {kind}, but its header is damaged or of a kind that is not read here",
                where=path,
                remedy=f"copy the file again from its source; if it opens elsewhere: {conversion(path)}",
            )
    return SceneError(
        f"is not an image (it starts with {_shown(start)})",
        where=path,
        remedy=f"copy or download the file again; {SUPPORTED} are read",
    )


def conversion(path: Path, then: str | None = None, *, known: bool = True) -> str:
    """Return the remedy for an image that another program can read: a command that makes PNG copies, and their use.

    then: what to do with the copies; None for the images of a scene with cameras.
    known: begin with the formats that are read.
    """
    folder = shlex.quote(path.parent.name or ".")
    copies = shlex.quote(f"{path.parent.name}_png")
    begin = f"{SUPPORTED} are read; convert the others" if known else "convert them"
    return (
        f"{begin}, beside their folder: mkdir {copies} && magick mogrify "
        f"-path {copies} -format png {folder}/*{path.suffix}, and {then or f'add --images {copies}'}"
    )


def reduction(path: Path) -> str:
    """Return the remedy for images that are too large: a command that makes smaller copies, and their use."""
    folder = shlex.quote(path.parent.name or ".")
    copies = shlex.quote(f"{path.parent.name}_small")
    return (
        f"make smaller copies, beside their folder: mkdir {copies} && magick mogrify -path {copies} -resize 25% "
        f"{folder}/*{path.suffix}, and add --images {copies}"
    )


def _kind(start: bytes) -> str | None:
    for signature, kind in _SIGNATURES:
        if start.startswith(signature):
            return kind
    if start[4:8] == b"ftyp":
        if start[8:12] == b"crx ":
            return "a camera's raw file"
        return None if heif.is_heif(start) or start[8:11] == b"avi" else "a video"
    return None


def _shown(start: bytes) -> str:
    """Return the first bytes as text where they are text, else as hexadecimal numbers."""
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n")[:16]
    if text and all(32 <= byte < 127 or byte in b"\t\r\n" for byte in text):
        return repr(text.split(b"\n")[0].decode("ascii").rstrip())
    return start[:8].hex(" ")


#: Of quarter turns the one that undoes them; other orientations undo themselves.
_UNDO = {6: 8, 8: 6}


def same_shape(size: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return whether one width and height is the other scaled, but for rounding to whole pixels."""
    return abs(size[0] * other[1] - size[1] * other[0]) <= max(*size, *other)


def reorient(pixels: NDArray[Any], undo: int, orientation: int) -> NDArray[Any]:
    """Undo a decoder's turn by ``undo`` and turn the pixels by ``orientation`` instead; C-contiguous."""
    return np.ascontiguousarray(apply_orientation(apply_orientation(pixels, _UNDO.get(undo, undo)), orientation))


def apply_orientation(pixels: NDArray[Any], orientation: int) -> NDArray[Any]:
    """Return stored pixels [H, W, ...] turned upright by EXIF's ``orientation``, 1 to 8; a view of the same memory."""
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    down = orientation in (3, 4, 7, 8)
    right = orientation in (2, 3, 6, 7)
    return pixels[:: -1 if down else 1, :: -1 if right else 1]


def nearest(values: NDArray[Any], size: tuple[int, int]) -> NDArray[Any]:
    """Return [H, W] values at another width and height: each pixel has the value under its middle."""
    width, height = size
    rows, columns = (
        ((2 * np.arange(now) + 1) * before) // (2 * now)
        for now, before in ((height, values.shape[0]), (width, values.shape[1]))
    )
    return values if size == values.shape[::-1] else values[rows[:, None], columns[None, :]]


#: A profile that moves no colour by more levels than this is sRGB under another name, and is left alone.
_SAME = 2
#: libpng's threshold: a gamma nearer to sRGB's 1/2.2 than this, relatively, is sRGB.
_GAMMA_STEP = 0.05
_SRGB_GAMMA = 1 / 2.2
#: Modes of Pillow's pixels -> the colour space that a profile for them has.
_SPACES = {"RGB": "RGB ", "L": "GRAY", "CMYK": "CMYK"}


@dataclass(frozen=True, slots=True)
class Colours:
    """How the colours of a file become sRGB.

    name: for messages.
    mode: Pillow's mode of the pixels that ``transform`` takes; "RGB" without one.
    transform: to sRGB by an ICC profile, or None.
    gamma: the file's exponent (PNG's gAMA), or None.
    coded: HDR or wide gamut that the file names without a profile, or None.
    """

    name: str
    mode: str = "RGB"
    transform: ImageCms.ImageCmsTransform | None = None
    gamma: float | None = None
    coded: Colour | None = None

    def to_rgb(self, image: Image.Image) -> Image.Image:
        """Return an sRGB image of mode RGB; ``image`` has mode ``self.mode``, or one that Pillow converts to it."""
        if self.transform is not None:
            return self.transform.apply(image if image.mode == self.mode else image.convert(self.mode))
        rgb = image if image.mode == "RGB" else image.convert("RGB")
        if self.coded is not None:
            return Image.fromarray(to_srgb(np.asarray(rgb).astype(np.uint16) * np.uint16(257), self.coded))
        if self.gamma is None:
            return rgb
        levels = np.round(255 * self.encoded(np.arange(256) / 255)).astype(int).tolist()
        return rgb.point(levels * 3)

    def encoded(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return values in 0...1 as sRGB has them, by ``gamma`` alone."""
        if self.gamma is None:
            return values
        return srgb_encoded(values ** (1 / self.gamma))


#: What needs no conversion.
SRGB = Colours("sRGB")


def colours_of(image: Image.Image) -> Colours:
    """Return the colours of an opened image; SRGB too where it does not say, or says something that cannot be used."""
    if image.mode == "LAB":
        return _lab()
    mode = _base_mode(image)
    profile = image.info.get("icc_profile")
    named = _named(image) if mode == "RGB" else None
    # A PNG's codes come before its profile, a HEIF image's after; no camera writes EXIF's beside one.
    if named is not None and (image.format == "PNG" or not profile):
        return Colours(named.name, coded=named)
    if isinstance(profile, bytes) and profile:
        found = _from_profile(profile, mode)
        if found is not None:
            return found
    elif "srgb" not in image.info:
        gamma = image.info.get("gamma")
        if isinstance(gamma, float) and gamma > 0 and abs(gamma / _SRGB_GAMMA - 1) > _GAMMA_STEP:
            return Colours(f"gamma {gamma:.3g}", gamma=gamma)
    return Colours("CMYK without a profile", "CMYK") if mode == "CMYK" else SRGB


def _named(image: Image.Image) -> Colour | None:
    """Return the colours that a file names without a profile, where these are others than sRGB."""
    found = None
    if isinstance(image, ImageFile.ImageFile) and image.format == "PNG":
        codes = _cicp(image)
        found = None if codes is None else coded(codes[0], codes[1])
    elif image.format == "HEIF":
        nclx = image.info.get("nclx_profile") or {}
        found = coded(int(nclx.get("color_primaries", 0)), int(nclx.get("transfer_characteristics", 0)))
    elif image.format in ("JPEG", "MPO") and _is_adobe_rgb(image):
        found = ADOBE_RGB
    return found if found is not None and found.converts else None


def _cicp(image: ImageFile.ImageFile) -> bytes | None:
    """Return the codes of a PNG's colours (its cICP chunk, which Pillow does not read); None without."""
    with Path(os.fsdecode(image.filename)).open("rb") as file:
        file.seek(8)
        while len(head := file.read(8)) == 8:
            length, kind = int.from_bytes(head[:4], "big"), head[4:]
            if kind == b"cICP" and length == 4:
                return file.read(4)
            if kind == b"IDAT":
                break
            file.seek(length + 4, io.SEEK_CUR)
    return None


#: EXIF, tags of interoperability: "R03" is Adobe RGB where the camera's tags do not say 1, sRGB.
_INDEX = 1


def _is_adobe_rgb(image: Image.Image) -> bool:
    """Return whether EXIF says that a photo has the colours of Adobe RGB: cameras write them without a profile."""
    try:
        exif = image.getexif()
        index = str(exif.get_ifd(IFD.Interop).get(_INDEX, "")).strip("\0 ")
        return index == "R03" and exif.get_ifd(IFD.Exif).get(Base.ColorSpace) != 1
    except Exception:
        return False  # the picture can be whole although its metadata is not


def _base_mode(image: Image.Image) -> str:
    if image.mode == "CMYK":
        return "CMYK"
    return "L" if image.mode in ("L", "LA", "La", "1") or image.mode.startswith("I;16") else "RGB"


@lru_cache(maxsize=64)
def _from_profile(data: bytes, mode: str) -> Colours | None:
    """Return the colours of a profile; None for one that is broken or of other pixels, which is no reason to refuse."""
    try:
        profile = ImageCms.ImageCmsProfile(io.BytesIO(data))
        space = profile.profile.xcolor_space
        if mode == "L" and space == "RGB ":
            mode = "RGB"
        if space != _SPACES[mode]:
            return None
        # Print profiles are made for the perceptual intent; between screens it may only brighten or darken.
        intent = ImageCms.Intent.PERCEPTUAL if mode == "CMYK" else ImageCms.Intent.RELATIVE_COLORIMETRIC
        transform = ImageCms.buildTransform(profile, ImageCms.createProfile("sRGB"), mode, "RGB", intent)
        if mode != "CMYK" and _is_identity(transform, mode):
            return SRGB
        name = ImageCms.getProfileDescription(profile).strip()
    except Exception:
        # Little CMS and Pillow have many ways to refuse a profile.
        return None
    return Colours(name or "another colour profile", mode, transform)


def _is_identity(transform: ImageCms.ImageCmsTransform, mode: str) -> bool:
    steps = np.linspace(0, 255, 9).round().astype(np.uint8)
    if mode == "L":
        probe = np.arange(256, dtype=np.uint8)[None]
        wanted = np.broadcast_to(probe[..., None], (1, 256, 3))
    else:
        probe = np.stack(np.meshgrid(steps, steps, steps), axis=-1).reshape(1, -1, 3)
        wanted = probe
    found = np.asarray(transform.apply(Image.fromarray(probe)))
    return bool(np.abs(found.astype(int) - wanted.astype(int)).max() <= _SAME)


@lru_cache(maxsize=1)
def _lab() -> Colours:
    transform = ImageCms.buildTransform(ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"), "LAB", "RGB")
    return Colours("CIE Lab", "LAB", transform)


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
    """Decode an image of 8 bits or fewer a channel."""
    if not image.has_transparency_data:
        return Decoded(np.array(colours.to_rgb(image)), None)
    if image.mode not in ("LA", "RGBA"):
        image = image.convert("RGBA")
    alpha = np.array(image.getchannel("A"))
    rgb = np.array(colours.to_rgb(image.convert(image.mode[:-1])))
    return Decoded(rgb if background is None else composite(rgb, alpha, background), alpha)


def composite(rgb: NDArray[np.uint8], alpha: NDArray[np.uint8], background: tuple[int, ...]) -> NDArray[np.uint8]:
    """Blend straight alpha [H, W] over a colour [C], in place in rgb [H, W, C], to nearest; products fit 16 bits."""
    ground = np.array(background, dtype=np.uint16)
    for top in range(0, len(rgb), _ROWS):
        rows = slice(top, top + _ROWS)
        opacity = alpha[rows, :, None].astype(np.uint16)
        mixed = rgb[rows] * opacity + ground * (255 - opacity)
        rgb[rows] = (mixed + 127) // 255
    return rgb


def from_deep(values: NDArray[np.uint16] | NDArray[np.float32], background: Rgb | None, colours: Colours) -> Decoded:
    """Decode [H, W, C] 16-bit numbers or floats in 0...1; C = 1 grey, 2 grey and alpha, 3 RGB, 4 RGBA."""
    height, width, channels = values.shape
    has_alpha = channels in (2, 4)
    if colours.coded is not None and values.dtype == np.uint16:
        rgb = to_srgb(values[..., :3].astype(np.uint16, copy=False), colours.coded)
        if not has_alpha:
            return Decoded(rgb, None)
        opacity = np.round(values[..., 3] / 257).astype(np.uint8)
        return Decoded(rgb if background is None else composite(rgb, opacity, background), opacity)
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
            share = unit[..., -1:]
            alpha[rows] = np.round(share[..., 0] * 255)
            if mixes:
                colour = colour * share + np.array(background) / 255 * (1 - share)
        rgb[rows] = np.round(colour * 255)
    if colours.transform is not None:
        rgb = np.array(colours.to_rgb(Image.fromarray(rgb)))
        if alpha is not None and background is not None:
            rgb = composite(rgb, alpha, background)
    return Decoded(rgb, alpha)


def grey(image: Image.Image, path: Path) -> NDArray[np.uint16] | NDArray[np.float32]:
    """Return [H, W, 1] of Pillow's modes for deep grey: 16 bits (also kept as 32-bit integers) and floating point."""
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


def deep(image: Image.Image, path: Path, colours: Colours) -> NDArray[np.uint16] | None:
    """Return [H, W, C] of a PNG or TIFF with 16 bits in each of 2, 3 or 4 channels; None for any other image.

    HDR needs the 10 or 12 bits of HEIF images too.

    Pillow keeps the upper byte of such files only, so they are decoded in a way that shows both: RGB and RGBA twice,
    as stored and with the bytes of a number swapped; grey with alpha as four plain bytes.
    """
    if image.format == "HEIF" and colours.coded is not None and int(image.info.get("bit_depth", 8)) > 8:
        return heif.decode_deep(path)
    tiles = getattr(image, "tile", None)
    if image.format not in ("PNG", "TIFF") or not tiles:
        return None
    args = tiles[0].args
    layout = str(args if isinstance(args, str) else next(iter(args or ()), ""))
    if layout == "LA;16B":
        with open_image(path) as raw:
            raw._mode = "RGBA"
            raw.tile = [tile._replace(args="RGBA") for tile in raw.tile]
            both = np.asarray(raw).astype(np.uint16)
        return both[..., 0::2] * 256 + both[..., 1::2]
    if layout[:-1] not in ("RGB;16", "RGBA;16"):
        return None
    native = "L" if sys.byteorder == "little" else "B"
    swapped = layout[:-1] + ("B" if layout[-1].replace("N", native) == "L" else "L")
    with open_image(path) as raw:
        raw.tile = [
            tile._replace(args=swapped if not isinstance(tile.args, tuple) else (swapped, *tile.args[1:]))
            for tile in raw.tile
        ]
        low = np.asarray(raw).astype(np.uint16)
    return np.asarray(image).astype(np.uint16) * 256 + low
