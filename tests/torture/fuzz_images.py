"""Malformed images: chunks, segments and directories with absurd contents under valid checksums, and spoiled bytes."""

from __future__ import annotations

import io
import os
import random
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageCms

from splatcli.scene.decode import Header, decode, decode_nonzero, read_header
from tests.scene.imagefiles import P3, cmyk_profile, gamma_chunk, png16, png_chunk, profile, tiff16
from tests.torture.harness import Case, Figure, fuzz, main, refused, rng_of
from tests.torture.mutate import INTEGERS, spoil_bytes

#: Images with more pixels are refused, as they are where memory is short: a header may claim anything.
MAX_PIXELS = 4_000_000
WIDTH, HEIGHT = 33, 21


def figures(count: int, seed: int) -> dict[str, Figure]:
    what = (
        "a malformed image is measured, decoded, and read as a mask; it must be refused with a message, or have the "
        "size that its header states"
    )
    return fuzz("fuzz_images", what, case_of, count, seed)


def case_of(seed: int, folder: Path) -> Case:
    path = folder / "fuzz.img"
    originals = sound_files()
    process = os.getpid()

    def case(index: int) -> str:
        if os.getpid() != process:  # once would do: libtiff writes to stderr; and Pillow's warnings are not shown
            warnings.filterwarnings("ignore", module=r"PIL\.")
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 2)
            os.close(null)
        rng = rng_of(seed, index)
        path.write_bytes(malformed(rng, rng.choice(originals)))
        return "refused" if refused(lambda: _read(path)) else "read"

    return case


def _read(path: Path) -> None:
    header = read_header(path, MAX_PIXELS)
    _read_pixels(path, header)
    kept = decode_nonzero(path, header.orientation)
    size = (header.width, header.height)
    assert (kept.shape[1], kept.shape[0]) == (size if header.orientation < 5 else size[::-1])


def _read_pixels(path: Path, header: Header) -> None:
    size = (header.width, header.height)
    assert 0 < size[0] * size[1] <= MAX_PIXELS
    upright = size if header.orientation < 5 else size[::-1]
    decoded = decode(path, (10, 20, 30), header.orientation, upright)
    assert decoded.rgb.shape == (upright[1], upright[0], 3)
    assert decoded.rgb.dtype == np.uint8
    assert decoded.alpha is None or decoded.alpha.shape == decoded.rgb.shape[:2]


@cache
def sound_files() -> list[bytes]:
    """Small images in every format and layout that is read."""
    random_numbers = np.random.default_rng(0)
    rgb = Image.fromarray(random_numbers.integers(0, 256, (HEIGHT, WIDTH, 3)).astype(np.uint8))
    deep = random_numbers.integers(0, 65536, (HEIGHT, WIDTH, 4)).astype(np.uint16)
    rgba = rgb.copy()
    rgba.putalpha(rgb.getchannel(0))
    turned = Image.Exif()
    turned[0x0112] = 6
    wide = profile(P3, 2.2)
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()

    def saved(image: Image.Image, kind: str, **how: object) -> bytes:
        buffer = io.BytesIO()
        image.copy().save(buffer, kind, **how)  # saving leaves marks on an image that spoil the next saving
        return buffer.getvalue()

    def animated(image: Image.Image, kind: str) -> bytes:
        return saved(image, kind, save_all=True, append_images=[rgba.convert("RGB")])

    return [
        *(saved(rgb.convert(mode), "PNG") for mode in ("RGB", "L", "LA", "P", "1", "RGBA")),
        saved(rgba, "PNG", icc_profile=wide, exif=turned),
        animated(rgb, "PNG"),
        *(png16(deep[..., :channels], gamma_chunk(1.0)) for channels in (1, 2, 3, 4)),
        saved(rgb, "JPEG"),
        saved(rgb, "JPEG", progressive=True, exif=turned, icc_profile=srgb),
        saved(rgb.convert("L"), "JPEG", icc_profile=wide),
        saved(rgb.convert("CMYK"), "JPEG", icc_profile=cmyk_profile()),
        animated(rgb, "MPO"),
        *(saved(rgb, "TIFF", compression=kind, exif=turned) for kind in ("raw", "tiff_lzw", "tiff_deflate", "jpeg")),
        saved(rgba, "TIFF", icc_profile=wide),
        saved(rgb.convert("CMYK"), "TIFF"),
        saved(Image.fromarray(np.linspace(0, 1, 400, dtype=np.float32).reshape(20, 20)), "TIFF"),
        animated(Image.fromarray(deep[..., 0]), "TIFF"),
        *(tiff16(deep, compression, order) for compression in (1, 8) for order in "<>"),
        saved(rgba, "WEBP", exif=turned, icc_profile=wide),
        saved(rgb, "WEBP", lossless=True),
        animated(rgb, "WEBP"),
        saved(rgba, "AVIF", exif=turned),
        saved(rgb, "BMP"),
        saved(rgb.quantize(8), "BMP"),
        animated(rgb, "GIF"),
        saved(rgba, "JPEG2000"),
        saved(rgb, "PPM"),
        saved(rgb.convert("1"), "PPM"),
    ]


def malformed(rng: random.Random, data: bytes) -> bytes:
    """A sound file with faults that keep to its format's grammar, in its bytes, or both."""
    way = rng.random()
    spoil = next((spoil for start, spoil in _GRAMMARS if data.startswith(start)), None)
    if spoil is not None and way < 0.6:
        data = spoil(rng, data)
    return data if spoil is not None and way < 0.5 else spoil_bytes(rng, data)


def _absurd(rng: random.Random, width: int, order: str) -> bytes:
    return struct.pack(f"{order}{ {1: 'B', 2: 'H', 4: 'I'}[width] }", rng.choice(INTEGERS) % (1 << 8 * width))


def _spoil_parts(rng: random.Random, parts: list[tuple[bytes, bytes]], order: str) -> list[tuple[bytes, bytes]]:
    """(kind, contents) of chunks or segments: numbers in them changed, parts moved, repeated, renamed, cut."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(parts))
        kind, body = parts[at]
        match rng.randrange(8):
            case 0:
                del parts[at]
                parts = parts or [(kind, body)]
            case 1:
                parts.insert(rng.randrange(len(parts) + 1), parts[at])
            case 2:
                parts[at] = (rng.choice(parts)[0], body)
            case 3:
                parts[at] = (kind, body[: rng.randrange(len(body) + 1)])
            case 4:
                parts[at] = (kind, body + rng.randbytes(rng.choice([1, 4, 100, 5000])))
            case 5:
                parts[at] = (kind, spoil_bytes(rng, body))
            case _:
                width = rng.choice([1, 2, 4])
                place = rng.randrange(max(1, min(len(body), 32) - width + 1))
                parts[at] = (kind, body[:place] + _absurd(rng, width, order) + body[place + width :])
    return parts


def _spoil_png(rng: random.Random, data: bytes) -> bytes:
    """Chunks with valid checksums; half of the time faults in the rows under the compression."""
    parts, at = [], 8
    while at + 12 <= len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        parts.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + size]))
        at += 12 + size
    if rng.random() < 0.3:
        parts = [(kind, _recompressed(rng, body)) if kind == b"IDAT" else (kind, body) for kind, body in parts]
    else:
        parts = _spoil_parts(rng, parts, ">")
    return data[:8] + b"".join(png_chunk(kind, body) for kind, body in parts)


def _recompressed(rng: random.Random, body: bytes) -> bytes:
    try:
        rows = zlib.decompress(body)
    except zlib.error:
        return body
    return zlib.compress(spoil_bytes(rng, rows) if rng.random() < 0.7 else rows * rng.choice([0, 2, 1000]))


def _spoil_jpeg(rng: random.Random, data: bytes) -> bytes:
    """Segments up to the first scan, with valid lengths."""
    parts, at = [], 2
    while data[at] == 0xFF and data[at + 1] != 0xDA:
        (size,) = struct.unpack(">H", data[at + 2 : at + 4])
        parts.append((data[at : at + 2], data[at + 4 : at + 2 + size]))
        at += 2 + size
    spoiled = [(kind, body[:65000]) for kind, body in _spoil_parts(rng, parts, ">")]
    rest = data[at:] if rng.random() < 0.7 else spoil_bytes(rng, data[at:])
    return data[:2] + b"".join(kind + struct.pack(">H", len(body) + 2) + body for kind, body in spoiled) + rest


def _spoil_tiff(rng: random.Random, data: bytes) -> bytes:
    """Entries of the first directory: tag, type, count, value or place."""
    order = "<" if data[:2] == b"II" else ">"
    (start,) = struct.unpack(f"{order}I", data[4:8])
    (count,) = struct.unpack(f"{order}H", data[start : start + 2])
    spoiled = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = start + 2 + 12 * rng.randrange(count)
        place, width = rng.choice([(0, 2), (2, 2), (4, 4), (8, 4), (8, 2), (8, 4)])
        if place == 2 and rng.random() < 0.7:
            new = struct.pack(f"{order}H", rng.randint(1, 13))
        elif place == 0 and rng.random() < 0.7:
            new = struct.pack(f"{order}H", rng.choice(_TIFF_TAGS))
        else:
            new = _absurd(rng, width, order) if rng.random() < 0.6 else struct.pack(f"{order}I", rng.randint(0, 40))
        spoiled[at + place : at + place + width] = new[:width]
    return bytes(spoiled)


#: Of size, layout, compression, orientation, where the pixels are, tiles, sub-directories.
_TIFF_TAGS = (256, 257, 258, 259, 262, 273, 274, 277, 278, 279, 284, 317, 320, 322, 323, 324, 330, 338, 339, 347)


def _spoil_webp(rng: random.Random, data: bytes) -> bytes:
    """Chunks with valid lengths."""
    parts = [(kind, body) for kind, body in _riff(data[12:])]
    spoiled = _spoil_parts(rng, parts, "<")
    body = b"WEBP" + b"".join(k + struct.pack("<I", len(b)) + b + bytes(len(b) % 2) for k, b in spoiled)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _riff(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 0
    while at + 8 <= len(data):
        (size,) = struct.unpack("<I", data[at + 4 : at + 8])
        yield data[at : at + 4], data[at + 8 : at + 8 + size]
        at += 8 + size + size % 2


_GRAMMARS: tuple[tuple[bytes, Callable[[random.Random, bytes], bytes]], ...] = (
    (b"\x89PNG", _spoil_png),
    (b"\xff\xd8", _spoil_jpeg),
    (b"II*\0", _spoil_tiff),
    (b"MM\0*", _spoil_tiff),
    (b"RIFF", _spoil_webp),
)


if __name__ == "__main__":
    main(figures, 100_000)
