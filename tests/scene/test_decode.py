"""Image files of every kind become the right 8-bit RGB."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from splatcli.errors import SceneError
from splatcli.scene.decode import decode, decode_nonzero, decode_numbers, decode_rgb, read_header
from tests.scene import made
from tests.scene.imagefiles import png16, png_header, tiff16

BLACK = (0, 0, 0)


def deep_files(values: NDArray[np.uint16]) -> dict[str, bytes]:
    """The same numbers in every deep layout that has this many channels."""
    files = {"a.png": png16(values)}
    if values.shape[2] >= 3:
        for order in "<>":
            for compression in (1, 8):
                files[f"{'little' if order == '<' else 'big'}{compression}.tiff"] = tiff16(values, compression, order)
    return files


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_sixteen_bits_are_divided_exactly(tmp_path: Path, channels: int) -> None:
    values = np.random.default_rng(0).integers(0, 65536, (37, 41, channels)).astype(np.uint16)
    background = (10, 20, 30)
    unit = values.astype(np.float64) / 65535
    colour = unit[..., : 1 if channels < 3 else 3]
    if channels in (2, 4):
        colour = colour * unit[..., -1:] + np.array(background) / 255 * (1 - unit[..., -1:])
    wanted = np.broadcast_to(np.round(colour * 255), (37, 41, 3))
    for name, data in deep_files(values).items():
        (tmp_path / name).write_bytes(data)
        np.testing.assert_array_equal(decode_rgb(tmp_path / name, background), wanted, err_msg=name)


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


def as_stored(upright: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """The rows that a file with this EXIF orientation holds of an upright picture."""
    return np.ascontiguousarray(
        {
            1: upright,
            2: upright[:, ::-1],
            3: upright[::-1, ::-1],
            4: upright[::-1],
            5: upright.transpose(1, 0, 2),
            6: np.rot90(upright, 1),
            7: np.rot90(upright, 2).transpose(1, 0, 2),
            8: np.rot90(upright, -1),
        }[orientation]
    )


@pytest.mark.parametrize("ending", ["png", "tiff", "webp", "deep.tiff"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_exif_orientation_is_applied_when_asked_for_and_only_then(
    tmp_path: Path, orientation: int, ending: str
) -> None:
    upright = made.picture(0)
    stored = as_stored(upright, orientation)
    path = tmp_path / f"a.{ending}"
    if ending == "deep.tiff":
        path.write_bytes(tiff16(stored.astype(np.uint16) * 257, orientation=orientation))
    else:
        exif = Image.Exif()
        exif[0x0112] = orientation
        Image.fromarray(stored).save(path, exif=exif, lossless=True)
    header = read_header(path)
    assert header.orientation == orientation
    assert (header.height, header.width) == stored.shape[:2]
    np.testing.assert_array_equal(decode_rgb(path, BLACK, orientation), upright)
    np.testing.assert_array_equal(decode_rgb(path, BLACK), stored)
    np.testing.assert_array_equal(decode(path, BLACK, orientation, size=(made.WIDTH, made.HEIGHT)).rgb, upright)
    if orientation >= 5:
        with pytest.raises(SceneError, match="now, it was"):
            decode(path, BLACK, 1, size=(made.WIDTH, made.HEIGHT))


@pytest.mark.parametrize("mode", ["L", "RGBA", "I;16"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_uncompressed_tiffs_are_turned_as_others(tmp_path: Path, orientation: int, mode: str) -> None:
    """Pillow would map one strip of these into memory, with the width of the upright image."""
    upright = made.picture(0)
    upright = upright[..., 0] if mode != "RGBA" else np.dstack([upright, upright[..., :1] | 1])
    upright = upright.astype(np.uint16) * 257 if mode == "I;16" else upright
    turned = as_stored(upright if upright.ndim == 3 else upright[..., None], orientation)
    path = tmp_path / "a.tiff"
    Image.fromarray(turned.reshape(turned.shape[:2] if upright.ndim == 2 else turned.shape)).save(
        path, strip_size=1 << 30, tiffinfo={0x0112: orientation}
    )
    grey = (upright // 257 if mode == "I;16" else upright).astype(np.uint8)
    colours = grey[..., :3] if mode == "RGBA" else np.repeat(grey[..., None], 3, axis=2)
    np.testing.assert_array_equal(decode(path, None, orientation).rgb, colours)
    np.testing.assert_array_equal(decode_nonzero(path, orientation), colours.any(axis=2))
    if mode != "RGBA":
        np.testing.assert_array_equal(decode_numbers(path, orientation), upright)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (np.full((4, 5), 254.0, np.float32), "values from 254 to 254; expected 0 to 1"),
        (np.full((4, 5), np.nan, np.float32), "values from nan to nan"),
        (np.full((4, 5), -0.5, np.float32), "from -0.5"),
        (np.full((4, 5), 70_000, np.int32), "integers from 70000"),
        (np.full((4, 5), -1, np.int32), "integers from -1"),
    ],
)
def test_grey_numbers_out_of_range_are_an_error(tmp_path: Path, values: NDArray[np.generic], why: str) -> None:
    Image.fromarray(values).save(tmp_path / "a.tiff")
    with pytest.raises(SceneError, match=why):
        decode_rgb(tmp_path / "a.tiff", BLACK)


def test_alpha_can_be_kept_apart(tmp_path: Path) -> None:
    rgb = made.picture(1)
    alpha = np.random.default_rng(0).integers(0, 256, rgb.shape[:2]).astype(np.uint8)
    Image.fromarray(np.dstack([rgb, alpha])).save(tmp_path / "a.png")
    decoded = decode(tmp_path / "a.png", None)
    np.testing.assert_array_equal(decoded.rgb, rgb)
    assert decoded.alpha is not None
    np.testing.assert_array_equal(decoded.alpha, alpha)


@pytest.mark.parametrize("kind", ["L", "1", "P", "RGB", "LA", "RGBA", "I;16", "F"])
def test_black_and_transparent_are_zero_and_the_faintest_grey_is_not(tmp_path: Path, kind: str) -> None:
    kept = np.random.default_rng(0).integers(0, 2, (7, 9)).astype(bool)
    faint = kept.astype(np.uint8)
    if kind in ("LA", "RGBA"):
        image = Image.fromarray(np.full((7, 9), 255, np.uint8))
        image.putalpha(Image.fromarray(faint))
        image = image.convert(kind)
    elif kind == "I;16":
        image = Image.fromarray(faint.astype(np.uint16))
    elif kind == "F":
        image = Image.fromarray(faint.astype(np.float32))
    elif kind == "P":
        image = Image.fromarray(faint)
        image.putpalette([0, 0, 0, 128, 0, 0])
    else:
        image = Image.fromarray(faint * np.uint8(255 if kind == "1" else 1)).convert(kind)
    path = tmp_path / ("a.tiff" if kind in ("F", "I;16") else "a.png")
    image.save(path)
    np.testing.assert_array_equal(decode_nonzero(path), kept)
    np.testing.assert_array_equal(decode_nonzero(path, 6), np.rot90(kept, -1))


def test_the_first_of_several_pictures_is_used(tmp_path: Path) -> None:
    first, second = (Image.fromarray(made.picture(i)) for i in (0, 1))
    for name in ("a.webp", "a.tiff", "a.png"):
        first.save(tmp_path / name, save_all=True, append_images=[second], lossless=True)
        assert read_header(tmp_path / name).several
        np.testing.assert_array_equal(decode_rgb(tmp_path / name, BLACK), made.picture(0))
    first.save(tmp_path / "a.mpo", save_all=True, append_images=[second])
    assert not read_header(tmp_path / "a.mpo").several


def test_a_bound_on_pixels_is_kept_before_anything_is_decoded(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png_header(60_000, 60_000) + b"\0\0\0\0IEND")
    with pytest.raises(SceneError, match=r"60000x60000, 3,600 million pixels; at most 100 million .*\n.*-resize"):
        read_header(tmp_path / "a.png", 100_000_000)
    with pytest.raises(SceneError, match="is 60000x60000 pixels now"):
        decode(tmp_path / "a.png", BLACK, size=(64, 48))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is empty"),
        (b"<html><body>not found", "starts with '<html>"),
        (b"\xef\xbb\xbf<!DOCTYPE html>", "starts with '<!DOCTYPE html>'"),
        (bytes(200), "starts with 00 00"),
        (b"\x89PNG\r\n\x1a\n", "starts as a PNG"),
        (png_header(0, 48), "starts as a PNG|pixels"),
        (b"\xff\xd8\xff\xe0", "starts as a JPEG|damaged"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "placeholder of Git LFS"),
        (b"\x76\x2f\x31\x01" + bytes(60), "is an OpenEXR image, which is not read"),
        (b"#?RADIANCE\nFORMAT=32-bit_rle_rgbe\n", "is a Radiance HDR image"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "(is|starts as) a HEIF image"),
        (b"\0\0\0\x18ftypcrx ", "is a camera's raw file"),
        (b"\0\0\0\x18ftypisom", "is a video"),
        (b"\xff\x0a\xfa", "is a JPEG XL image"),
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


@pytest.mark.parametrize("name", ["a.NEF", "a.dng", "a.cr2"])
def test_raw_files_are_no_images_although_they_hold_a_thumbnail(tmp_path: Path, name: str) -> None:
    Image.fromarray(made.picture(0)).save(tmp_path / name, format="TIFF")
    with pytest.raises(SceneError, match=r"raw file.*\n.*magick mogrify"):
        read_header(tmp_path / name)


def test_a_dng_under_another_name_is_recognised(tmp_path: Path) -> None:
    Image.fromarray(made.picture(0)).save(tmp_path / "a.tiff", tiffinfo={0xC612: b"\1\4\0\0"})
    with pytest.raises(SceneError, match="raw file"):
        read_header(tmp_path / "a.tiff")


def test_files_that_cannot_be_opened_say_why(tmp_path: Path) -> None:
    (tmp_path / "a.png").mkdir()
    with pytest.raises(SceneError, match="cannot be opened: Is a directory"):
        read_header(tmp_path / "a.png")
    with pytest.raises(SceneError, match="cannot be opened: No such file"):
        decode_rgb(tmp_path / "b.png", BLACK)
