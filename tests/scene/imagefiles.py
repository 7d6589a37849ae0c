"""Image files that Pillow does not write: deep PNGs and TIFFs, colour profiles, headers without pixels."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

#: x, y of red, green, blue: Display P3's and sRGB's; both have sRGB's white.
P3 = ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060))
BT709 = ((0.640, 0.330), (0.300, 0.600), (0.150, 0.060))
_WHITE = (0.3127, 0.3290)
#: Bradford's adaptation from D65 to D50, the white of ICC profiles.
_TO_D50 = np.array([[1.04788, 0.02292, -0.05022], [0.02959, 0.99048, -0.01707], [-0.00925, 0.01508, 0.75168]])
_D50 = struct.pack(">3i", round(0.9642 * 65536), 65536, round(0.8249 * 65536))


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_header(width: int, height: int, depth: int = 8, colour: int = 2) -> bytes:
    """The signature and IHDR: what a file says before it has shown a pixel."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header)


def png16(values: NDArray[np.uint16], *chunks: bytes) -> bytes:
    """A 16-bit PNG of [H, W, C]; chunks stand before the pixels."""
    height, width, channels = values.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    return b"".join(
        [
            png_header(width, height, 16, {1: 0, 2: 4, 3: 2, 4: 6}[channels]),
            *chunks,
            png_chunk(b"IDAT", zlib.compress(rows)),
            png_chunk(b"IEND", b""),
        ]
    )


def gamma_chunk(gamma: float) -> bytes:
    return png_chunk(b"gAMA", struct.pack(">I", round(gamma * 100_000)))


def tiff16(values: NDArray[np.uint16], compression: int = 1, order: str = "<", orientation: int = 1) -> bytes:
    """A 16-bit TIFF of [H, W, 3 or 4]; compression 1 (none) or 8 (deflate); order "<" or ">"."""
    height, width, channels = values.shape
    data = values.astype(f"{order}u2").tobytes()
    if compression == 8:
        data = zlib.compress(data)
    short, long = 3, 4
    tags = [
        (256, long, 1, width),
        (257, long, 1, height),
        (258, short, channels, None),
        (259, short, 1, compression),
        (262, short, 1, 2),
        (273, long, 1, None),
        (274, short, 1, orientation),
        (277, short, 1, channels),
        (278, long, 1, height),
        (279, long, 1, len(data)),
        (284, short, 1, 1),
    ]
    if channels == 4:
        tags.append((338, short, 1, 2))
    bits_at = 8 + 2 + 12 * len(tags) + 4
    data_at = bits_at + 2 * channels
    entries = b""
    for tag, kind, count, value in tags:
        entries += struct.pack(f"{order}HHI", tag, kind, count)
        if value is None:
            entries += struct.pack(f"{order}I", bits_at if tag == 258 else data_at)
        else:
            entries += struct.pack(f"{order}HH" if kind == short else f"{order}I", *([value, 0][: 3 - kind // 2]))
    start = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}IH", 8, len(tags))
    return start + entries + struct.pack(f"{order}I", 0) + struct.pack(f"{order}{channels}H", *[16] * channels) + data


def profile(primaries: tuple[tuple[float, float], ...], gamma: float, name: str = "a test") -> bytes:
    """An ICC profile (version 2) of a display with these primaries, D65 white, and values to the power ``gamma``."""
    columns = np.array([(x / y, 1, (1 - x - y) / y) for x, y in primaries]).T
    white = np.array([_WHITE[0] / _WHITE[1], 1, (1 - sum(_WHITE)) / _WHITE[1]])
    to_xyz = _TO_D50 @ (columns * np.linalg.solve(columns, white))

    def fixed(values: NDArray[np.float64]) -> bytes:
        return b"XYZ \0\0\0\0" + struct.pack(">3i", *np.round(values * 65536).astype(int))

    curve = b"curv\0\0\0\0" + struct.pack(">IHH", 1, round(gamma * 256), 0)
    tags = {
        b"rXYZ": fixed(to_xyz[:, 0]),
        b"gXYZ": fixed(to_xyz[:, 1]),
        b"bXYZ": fixed(to_xyz[:, 2]),
        b"rTRC": curve,
        b"gTRC": curve,
        b"bTRC": curve,
    }
    return _profile(name, b"mntr", b"RGB ", b"XYZ ", tags)


def cmyk_profile(name: str = "a press") -> bytes:
    """An ICC profile of a press on which every ink is grey: L* falls from 100 to 0 as any one ink rises."""
    nodes = np.indices((2,) * 4).reshape(4, -1).T
    lab = np.array([(255 * (not node.any()), 128, 128) for node in nodes], dtype=np.uint8)
    ramp = bytes(range(256))
    identity = struct.pack(">9i", *(np.eye(3).ravel() * 65536).astype(int))
    table = b"mft1\0\0\0\0" + bytes([4, 3, 2, 0]) + identity + ramp * 4 + lab.tobytes() + ramp * 3
    return _profile(name, b"prtr", b"CMYK", b"Lab ", {b"A2B0": table})


def _profile(name: str, kind: bytes, space: bytes, connection: bytes, tags: dict[bytes, bytes]) -> bytes:
    text = name.encode() + b"\0"
    tags = {
        b"desc": b"desc\0\0\0\0" + struct.pack(">I", len(text)) + text + bytes(8 + 3 + 67),
        b"cprt": b"text\0\0\0\0none\0",
        b"wtpt": b"XYZ \0\0\0\0" + _D50,
        **tags,
    }
    table, body, at = b"", b"", 128 + 4 + 12 * len(tags)
    for tag, data in tags.items():
        data += bytes(-len(data) % 4)
        table += tag + struct.pack(">II", at + len(body), len(data))
        body += data
    head = struct.pack(">I4sI4s4s4s", at + len(body), b"none", 0x02400000, kind, space, connection)
    head += struct.pack(">6H", 2026, 1, 1, 0, 0, 0) + b"acsp" + bytes(28) + _D50
    return head + bytes(128 - len(head)) + struct.pack(">I", len(tags)) + table + body


def to_srgb(rgb: NDArray[np.float64], primaries: tuple[tuple[float, float], ...], gamma: float) -> NDArray[np.float64]:
    """What colours in 0...1 of such a display are in sRGB, from the definitions."""

    def matrix(points: tuple[tuple[float, float], ...]) -> NDArray[np.float64]:
        columns = np.array([(x / y, 1, (1 - x - y) / y) for x, y in points]).T
        white = np.array([_WHITE[0] / _WHITE[1], 1, (1 - sum(_WHITE)) / _WHITE[1]])
        return np.asarray(columns * np.linalg.solve(columns, white))

    light = (rgb**gamma) @ (np.linalg.inv(matrix(BT709)) @ matrix(primaries)).T
    light = np.clip(light, 0, 1)
    return np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)
