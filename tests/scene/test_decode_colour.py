"""Colours of files become sRGB by the definitions of their spaces, and sRGB is left alone to the last bit."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms, PngImagePlugin

from splatcli.scene import hdr
from splatcli.scene.decode import decode, decode_rgb, read_header
from tests.scene import made
from tests.scene.imagefiles import BT709, P3, cmyk_profile, gamma_chunk, png16, png_chunk, profile, to_srgb

BLACK = (0, 0, 0)


@pytest.mark.parametrize(
    ("primaries", "gamma"), [(P3, 2.2), (BT709, 1.8), (BT709, 1.0)], ids=["wide", "brighter", "linear"]
)
def test_a_profile_is_applied(tmp_path: Path, primaries: tuple[tuple[float, float], ...], gamma: float) -> None:
    rgb = made.picture(2)
    Image.fromarray(rgb).save(tmp_path / "a.png", icc_profile=profile(primaries, gamma, "my screen"))
    assert read_header(tmp_path / "a.png").colours == "my screen"
    wanted = 255 * to_srgb(rgb / 255, primaries, gamma)
    # Little CMS works with 16 bits and tables: a level, two in the steep shadows of linear values.
    np.testing.assert_allclose(decode_rgb(tmp_path / "a.png", BLACK), wanted, atol=2)


@pytest.mark.parametrize(
    "data", [ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes(), b"not a profile", b"", None]
)
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P"])
def test_srgb_and_broken_profiles_change_nothing(tmp_path: Path, data: bytes | None, mode: str) -> None:
    image = Image.fromarray(made.picture(2)).convert(mode)
    image.save(tmp_path / "plain.png")
    image.save(tmp_path / "a.png", icc_profile=data)
    assert read_header(tmp_path / "a.png").colours == "sRGB"
    np.testing.assert_array_equal(decode_rgb(tmp_path / "a.png", BLACK), decode_rgb(tmp_path / "plain.png", BLACK))


def test_a_profile_and_alpha(tmp_path: Path) -> None:
    rgb = made.picture(1)
    alpha = np.random.default_rng(0).integers(0, 256, rgb.shape[:2]).astype(np.uint8)
    Image.fromarray(np.dstack([rgb, alpha])).save(tmp_path / "a.png", icc_profile=profile(P3, 2.2))
    opacity = alpha[..., None] / 255
    wanted = 255 * to_srgb(rgb / 255, P3, 2.2) * opacity + np.array([200, 100, 50]) * (1 - opacity)
    np.testing.assert_allclose(decode_rgb(tmp_path / "a.png", (200, 100, 50)), wanted, atol=2)


def test_a_profile_for_deep_colours(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 65536, (9, 13, 3)).astype(np.uint16)
    (tmp_path / "plain.png").write_bytes(png16(values))
    Image.fromarray(decode_rgb(tmp_path / "plain.png", BLACK)).save(tmp_path / "a.png", icc_profile=profile(P3, 2.2))
    deep = tmp_path / "deep.png"
    with Image.open(tmp_path / "a.png") as image:
        data = image.info["icc_profile"]
    deep.write_bytes(png16(values, png_chunk(b"iCCP", b"a\0\0" + zlib.compress(data))))
    np.testing.assert_array_equal(decode_rgb(deep, BLACK), decode_rgb(tmp_path / "a.png", BLACK))


@pytest.mark.parametrize("gamma", [1.0, 0.55, 0.3])
def test_the_gamma_of_a_png_is_undone(tmp_path: Path, gamma: float) -> None:
    rgb = made.picture(4)
    info = PngImagePlugin.PngInfo()
    info.add(b"gAMA", gamma_chunk(gamma)[8:-4])
    Image.fromarray(rgb).save(tmp_path / "a.png", pnginfo=info)
    assert read_header(tmp_path / "a.png").colours.startswith("gamma")
    wanted = 255 * to_srgb(rgb / 255, BT709, 1 / gamma)
    np.testing.assert_allclose(decode_rgb(tmp_path / "a.png", BLACK), wanted, atol=0.5 + 1e-6)
    values = rgb.astype(np.uint16) * 257
    (tmp_path / "deep.png").write_bytes(png16(values, gamma_chunk(gamma)))
    np.testing.assert_allclose(decode_rgb(tmp_path / "deep.png", BLACK), wanted, atol=0.5 + 1e-6)


def test_the_usual_gamma_and_an_srgb_chunk_change_nothing(tmp_path: Path) -> None:
    values = made.picture(4).astype(np.uint16) * 257
    for chunks in ([gamma_chunk(0.45455)], [png_chunk(b"sRGB", b"\0"), gamma_chunk(1.0)]):
        (tmp_path / "a.png").write_bytes(png16(values, *chunks))
        assert read_header(tmp_path / "a.png").colours == "sRGB"
        np.testing.assert_array_equal(decode_rgb(tmp_path / "a.png", BLACK), made.picture(4))


def test_cmyk_goes_through_its_profile(tmp_path: Path) -> None:
    levels = np.zeros((4, 256, 4), dtype=np.uint8)
    for ink in range(4):
        levels[ink, :, ink] = np.arange(256)
    Image.fromarray(levels, "CMYK").save(tmp_path / "a.tiff", icc_profile=cmyk_profile())
    assert read_header(tmp_path / "a.tiff").colours == "a press"
    lightness = 1 - np.arange(256) / 255
    light = np.where(lightness > 0.08, ((lightness + 0.16) / 1.16) ** 3, lightness / 9.033)
    grey = 255 * to_srgb(np.stack([light] * 3, axis=-1), BT709, 1.0)
    np.testing.assert_allclose(decode_rgb(tmp_path / "a.tiff", BLACK), np.stack([grey] * 4), atol=2)


def test_cmyk_says_when_it_has_no_profile(tmp_path: Path) -> None:
    rgb = made.picture(2)
    Image.fromarray(rgb).convert("CMYK").save(tmp_path / "a.jpg", quality=100)
    assert read_header(tmp_path / "a.jpg").colours == "CMYK without a profile"
    # JPEG at its best: a few levels.
    np.testing.assert_allclose(decode_rgb(tmp_path / "a.jpg", BLACK), rgb, atol=6)


def test_lab_is_converted(tmp_path: Path) -> None:
    rgb = made.picture(3)
    to_lab = ImageCms.buildTransform(ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), "RGB", "LAB")
    lab = ImageCms.applyTransform(Image.fromarray(rgb), to_lab)
    assert lab is not None
    lab.save(tmp_path / "a.tiff")
    assert read_header(tmp_path / "a.tiff").colours == "CIE Lab"
    # 8-bit Lab has fewer blues and greens than RGB.
    assert np.abs(decode(tmp_path / "a.tiff", BLACK).rgb.astype(int) - rgb).mean() < 2


#: x, y of red, green, blue of Adobe RGB (1998), and its exponent.
ADOBE, ADOBE_GAMMA = ((0.640, 0.330), (0.210, 0.710), (0.150, 0.060)), 563 / 256


def exif_of(colour_space: int, index: str) -> Image.Exif:
    exif = Image.Exif()
    exif[0x8769] = {0xA001: colour_space, 0xA005: {1: index}}
    return exif


def test_adobe_rgb_that_exif_alone_names_is_converted(tmp_path: Path) -> None:
    """Cameras write it without a profile."""
    rgb = np.repeat(np.repeat(made.picture(2), 16, axis=0), 16, axis=1)
    Image.fromarray(rgb).save(tmp_path / "a.jpg", quality=100, subsampling=0, exif=exif_of(0xFFFF, "R03"))
    assert read_header(tmp_path / "a.jpg").colours == "Adobe RGB"
    with Image.open(tmp_path / "a.jpg") as image:
        stored = np.asarray(image)
    wanted = 255 * to_srgb(stored / 255, ADOBE, ADOBE_GAMMA)
    np.testing.assert_allclose(decode_rgb(tmp_path / "a.jpg", BLACK), wanted, atol=1)
    for name, kind in (("R98", 1), ("R98", 0xFFFF), ("R03", 1)):
        Image.fromarray(rgb).save(tmp_path / "b.jpg", quality=100, subsampling=0, exif=exif_of(kind, name))
        assert read_header(tmp_path / "b.jpg").colours == "sRGB"
        np.testing.assert_array_equal(decode_rgb(tmp_path / "b.jpg", BLACK), stored)
    to_its_own = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    exif = exif_of(0xFFFF, "R03")
    Image.fromarray(rgb).save(tmp_path / "c.jpg", quality=100, subsampling=0, exif=exif, icc_profile=to_its_own)
    np.testing.assert_array_equal(decode_rgb(tmp_path / "c.jpg", BLACK), stored)


@pytest.mark.parametrize(
    ("codes", "name"), [((9, 18, 0, 1), "BT.2020 HLG"), ((9, 16, 0, 1), "BT.2020 PQ"), ((12, 13, 0, 1), "Display P3")]
)
def test_the_codes_of_a_png_are_heeded(tmp_path: Path, codes: tuple[int, ...], name: str) -> None:
    """ffmpeg writes them into frames of HDR videos, 16 bits deep; those of splat sfm have the same colours."""
    values = np.random.default_rng(0).integers(0, 65536, (9, 13, 4)).astype(np.uint16)
    chunk = png_chunk(b"cICP", bytes(codes))
    wanted = hdr.to_srgb(values[..., :3], hdr.coded(codes[0], codes[1]))
    (tmp_path / "a.png").write_bytes(png16(values[..., :3], chunk))
    assert read_header(tmp_path / "a.png").colours == name
    np.testing.assert_array_equal(decode_rgb(tmp_path / "a.png", BLACK), wanted)
    (tmp_path / "alpha.png").write_bytes(png16(values, png_chunk(b"iCCP", b"a\0\0" + zlib.compress(b"none")), chunk))
    clear = decode(tmp_path / "alpha.png", None)
    np.testing.assert_array_equal(clear.rgb, wanted)
    assert clear.alpha is not None
    np.testing.assert_allclose(clear.alpha, values[..., 3] / 257, atol=0.5)
    levels = made.picture(1)
    Image.fromarray(levels).save(tmp_path / "plain.png")
    plain = (tmp_path / "plain.png").read_bytes()
    (tmp_path / "eight.png").write_bytes(plain[:33] + chunk + plain[33:])  # behind the header
    wanted = hdr.to_srgb(levels.astype(np.uint16) * np.uint16(257), hdr.coded(codes[0], codes[1]))
    np.testing.assert_array_equal(decode_rgb(tmp_path / "eight.png", BLACK), wanted)


@pytest.mark.parametrize("codes", [(1, 13, 0, 1), (1, 1, 0, 1), (2, 2, 0, 1)])
def test_codes_of_srgb_and_of_sd_and_hd_video_change_nothing(tmp_path: Path, codes: tuple[int, ...]) -> None:
    values = made.picture(4).astype(np.uint16) * 257
    (tmp_path / "a.png").write_bytes(png16(values, png_chunk(b"cICP", bytes(codes))))
    assert read_header(tmp_path / "a.png").colours == "sRGB"
    np.testing.assert_array_equal(decode_rgb(tmp_path / "a.png", BLACK), made.picture(4))
