"""Image files of every kind become the right 8-bit RGB."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from splatcli.errors import SceneError
from splatcli.scene.decode import decode_rgb, read_header
from tests.scene import made

BLACK = (0, 0, 0)


def _png16(path: Path, values: NDArray[np.uint16]) -> None:
    """A 16-bit PNG of [H, W, C], written by hand since Pillow writes no such file with colour."""
    height, width, channels = values.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 16, {1: 0, 2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_sixteen_bits_are_divided_exactly(tmp_path: Path, channels: int) -> None:
    values = np.random.default_rng(0).integers(0, 65536, (37, 41, channels)).astype(np.uint16)
    _png16(tmp_path / "a.png", values)
    background = (10, 20, 30)
    unit = values.astype(np.float64) / 65535
    colour = unit[..., : 1 if channels < 3 else 3]
    if channels in (2, 4):
        colour = colour * unit[..., -1:] + np.array(background) / 255 * (1 - unit[..., -1:])
    wanted = np.broadcast_to(np.round(colour * 255), (37, 41, 3))
    np.testing.assert_array_equal(decode_rgb(tmp_path / "a.png", background), wanted)


@pytest.mark.parametrize("mode", ["L", "P", "1", "RGB", "I", "F"])
def test_modes_without_alpha_expand_to_rgb(tmp_path: Path, mode: str) -> None:
    levels = made.picture(3)
    image = Image.fromarray(levels)
    if mode == "L":
        image, wanted = image.convert("L"), np.asarray(image.convert("L"))[..., None]
    elif mode == "P":
        image = image.quantize(16)
        wanted = np.asarray(image.convert("RGB"))
    elif mode == "1":
        image = image.convert("1")
        wanted = np.asarray(image)[..., None] * np.uint8(255)
    elif mode == "I":
        image, wanted = Image.fromarray(levels[..., 0].astype(np.int32) * 257), levels[..., :1]
    elif mode == "F":
        image, wanted = Image.fromarray(levels[..., 0].astype(np.float32) / 255), levels[..., :1]
    else:
        wanted = levels
    path = tmp_path / ("a.tiff" if mode in "IF" else "a.png")
    image.save(path)
    assert read_header(path).mode == mode
    np.testing.assert_array_equal(decode_rgb(path, BLACK), np.broadcast_to(wanted, levels.shape))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_straight_alpha_is_composited_on_the_background(tmp_path: Path, mode: str) -> None:
    rgb, background = made.picture(1), (200, 100, 50)
    alpha = np.random.default_rng(0).integers(0, 256, rgb.shape[:2]).astype(np.uint8)
    image = Image.fromarray(np.dstack([rgb, alpha]))
    if mode != "RGBA":
        image = image.convert("LA") if mode == "LA" else image.quantize(32)
    image.save(tmp_path / "a.png")
    assert read_header(tmp_path / "a.png").has_alpha
    rgba = np.asarray(image.convert("RGBA")).astype(np.float64)
    opacity = rgba[..., 3:] / 255
    exact = rgba[..., :3] * opacity + np.array(background) * (1 - opacity)
    np.testing.assert_allclose(decode_rgb(tmp_path / "a.png", background), exact, atol=0.5 + 1e-9)


def test_cmyk_is_converted(tmp_path: Path) -> None:
    rgb = made.picture(2)
    Image.fromarray(rgb).convert("CMYK").save(tmp_path / "a.tiff")
    assert read_header(tmp_path / "a.tiff").mode == "CMYK"
    np.testing.assert_allclose(decode_rgb(tmp_path / "a.tiff", BLACK), rgb, atol=1)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_exif_orientation_is_put_upright(tmp_path: Path, orientation: int) -> None:
    upright = made.picture(0)
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: np.rot90(upright, 2).transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(np.ascontiguousarray(stored)).save(tmp_path / "a.png", exif=exif)
    assert read_header(tmp_path / "a.png").orientation == orientation
    np.testing.assert_array_equal(decode_rgb(tmp_path / "a.png", BLACK, orientation), upright)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is empty"),
        (b"<html><body>not found", "starts with '<html>"),
        (b"\x89PNG\r\n\x1a\n", "not an image|open"),
    ],
)
def test_files_that_are_no_images_say_how_they_start(tmp_path: Path, data: bytes, why: str) -> None:
    (tmp_path / "a.jpg").write_bytes(data)
    with pytest.raises(SceneError, match=why) as caught:
        read_header(tmp_path / "a.jpg")
    assert "a.jpg" in str(caught.value.where)


@pytest.mark.parametrize("ending", ["jpg", "png", "webp"])
def test_truncated_images_are_an_error_when_decoded(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a.{ending}"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    with pytest.raises(SceneError) as caught:
        decode_rgb(path, BLACK)
    assert path.name in str(caught.value.where)
    assert caught.value.exit_code == 3
