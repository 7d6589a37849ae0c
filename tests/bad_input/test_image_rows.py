"""Bad images and masks (rows 23 to 37): no images, damaged, turned, deep, coloured ones; sizes; masks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.bad_input.table import HEIGHT, VIEWS, WIDTH, Case, Expect
from tests.scene.imagefiles import P3, gamma_chunk, png16, png_chunk, png_header, profile, tiff16

Harm = Callable[[Path], object]


def image_files(folder: Path) -> list[Path]:
    return sorted((folder / "scene/images").iterdir())


def replaced(data: bytes, ending: str = ".jpg") -> Harm:
    """The third image is a file of these bytes."""

    def harm(folder: Path) -> None:
        path = image_files(folder)[2]
        path.unlink()
        path.with_suffix(ending).write_bytes(data)

    return harm


def saved(change: Callable[[Image.Image], Image.Image], ending: str = ".png", **how: object) -> Harm:
    """The third image is saved anew: changed, under another ending, with Pillow's options."""

    def harm(folder: Path) -> None:
        path = image_files(folder)[2]
        with Image.open(path) as image:
            image = change(image.copy())
        path.unlink()
        image.save(path.with_suffix(ending), **how)

    return harm


def same(image: Image.Image) -> Image.Image:
    return image


def converted(mode: str) -> Callable[[Image.Image], Image.Image]:
    return lambda image: image.convert(mode)


def transparent(image: Image.Image) -> Image.Image:
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


def numbers(kind: type[np.generic], scale: float) -> Callable[[Image.Image], Image.Image]:
    return lambda image: Image.fromarray((np.asarray(image.convert("L"), float) * scale).astype(kind))


def exif(orientation: int) -> Image.Exif:
    found = Image.Exif()
    found[0x0112] = orientation
    return found


def deep(layout: Callable[..., bytes], ending: str) -> Harm:
    values = np.random.default_rng(0).integers(0, 65536, (HEIGHT, WIDTH, 3)).astype(np.uint16)
    return replaced(layout(values), ending)


def truncate(count: int) -> Harm:
    def harm(folder: Path) -> None:
        for path in image_files(folder)[:count]:
            path.write_bytes(path.read_bytes()[:1200])

    return harm


def grown(size: tuple[int, int], count: int = VIEWS) -> Harm:
    def harm(folder: Path) -> None:
        for path in image_files(folder)[:count]:
            with Image.open(path) as image:
                larger = image.resize(size)
            larger.save(path)

    return harm


def masked(count: int = VIEWS, size: tuple[int, int] = (WIDTH, HEIGHT), name: str = "{}.png", white: int = 40) -> Harm:
    """Masks beside the images, the left ``white`` columns of which count."""

    def harm(folder: Path) -> None:
        (folder / "scene/masks").mkdir()
        mask = np.zeros((size[1], size[0]), np.uint8)
        mask[:, :white] = 255
        for path in image_files(folder)[:count]:
            stem = path.name if name == "{}.png" else path.stem
            Image.fromarray(mask).save(folder / "scene/masks" / name.format(stem))

    return harm


def masked_badly(folder: Path) -> None:
    masked()(folder)
    (folder / "scene/masks" / f"{image_files(folder)[0].name}.png").write_bytes(b"<html>")


def copied(folder: Path) -> None:
    first, *_, last = image_files(folder)
    shutil.copy(first, last)


def nothing(folder: Path) -> None:
    """The good scene as it is."""


CONVERT = ("magick mogrify", "--images images_png")
STRICT = ("--strict",)
SKIP = ("--skip-bad-images",)

CASES = [
    Case(23, "zero bytes", replaced(b""), says=("view_", ".jpg", "is empty")),
    Case(23, "HTML", replaced(b"<html><body>404"), says=("is not an image (it starts with '<html><body>404')",)),
    Case(23, "HTML, left out", replaced(b"<html>"), 0, ("1 image cannot be read and is left out",), SKIP),
    Case(23, "a placeholder of Git LFS", replaced(b"version https://git-lfs.github.com/spec/v1"), says=("lfs pull",)),
    Case(24, "a PNG of width 0", replaced(png_header(0, 60), ".png"), says=("is damaged or of a kind",)),
    Case(25, "all images truncated", truncate(VIEWS), says=("the image is damaged", "--skip-bad-images")),
    Case(25, "truncated, strict", truncate(3), 3, ("3 problems", "view_", "truncated"), STRICT),
    Case(25, "truncated, left out", truncate(3), 0, ("3 images cannot be read and are left out: view_",), SKIP),
    Case(25, "all truncated, none left out", truncate(VIEWS), 3, ("12 problems", "truncated"), SKIP),
    *[
        Case(
            26,
            f"EXIF {turn}, turned against its camera",
            saved(lambda image: image.transpose(Image.Transpose.ROTATE_90), ".jpg", exif=exif(turn)),
            0,
            ("1 image was turned as its EXIF orientation says",),
        )
        for turn in (6, 8)
    ],
    *[
        Case(
            26,
            f"EXIF {turn}, stored like its camera",
            saved(same, ".jpg", exif=exif(turn)),
            0,
            ("1 image has an EXIF orientation that is not applied",),
        )
        for turn in (3, 6)
    ],
    Case(
        26,
        "turned without EXIF",
        saved(lambda image: image.transpose(Image.Transpose.ROTATE_90), ".jpg"),
        says=("60x80 pixels, its camera 80x60", "turned by a quarter"),
    ),
    Case(27, "16-bit PNG", deep(png16, ".png"), 0, ("found under another ending",)),
    Case(27, "16-bit TIFF", deep(tiff16, ".tiff"), 0, ("found under another ending",)),
    Case(28, "RGBA", saved(transparent), 0, ("1 image has transparency and is composited",)),
    Case(28, "RGBA as mask", saved(transparent), 0, ("what is transparent takes no part",), ("--masks", "alpha")),
    *[Case(29, f"mode {mode}", saved(converted(mode)), 0) for mode in ("1", "P", "LA")],
    Case(29, "mode I", saved(numbers(np.int32, 257), ".tiff"), 0),
    Case(29, "mode I;16", saved(numbers(np.uint16, 257)), 0),
    Case(29, "mode F", saved(numbers(np.float32, 1 / 255), ".tiff"), 0),
    Case(29, "mode F beyond 1", saved(numbers(np.float32, 1), ".tiff"), 3, ("expected 0 to 1",), STRICT),
    Case(30, "CMYK", saved(converted("CMYK"), ".jpg"), 0, ("from CMYK without a profile", "approximate colours")),
    Case(31, "Display P3", saved(same, ".jpg", icc_profile=profile(P3, 2.2, "Display P3")), 0, ("from Display P3",)),
    Case(31, "broken ICC", saved(same, ".jpg", icc_profile=b"broken"), 0),
    Case(
        31,
        "gamma chunk",
        replaced(png16(np.zeros((HEIGHT, WIDTH, 3), np.uint16), gamma_chunk(1.0)), ".png"),
        0,
        ("converted to sRGB, from gamma 1",),
    ),
    Case(
        31,
        "a frame of an HDR video",
        replaced(
            png16(np.zeros((HEIGHT, WIDTH, 3), np.uint16), png_chunk(b"cICP", bytes((9, 18, 0, 1)))),
            ".png",
        ),
        0,
        ("converted to sRGB, from BT.2020 HLG",),
    ),
    Case(31, "OpenEXR", replaced(b"\x76\x2f\x31\x01" + bytes(60), ".exr"), says=("images are missing",)),
    Case(31, "OpenEXR by another name", replaced(b"\x76\x2f\x31\x01" + bytes(60)), says=("an OpenEXR image", *CONVERT)),
    Case(31, "Radiance HDR", replaced(b"#?RADIANCE\n"), says=("a Radiance HDR image", *CONVERT)),
    Case(31, "HEIC", replaced(b"\0\0\0\x18ftypheic"), says=("a HEIF image", "PNG, JPEG, TIFF", *CONVERT)),
    Case(31, "raw", replaced(b"\0\0\0\x18ftypcrx "), says=("a camera's raw file", *CONVERT)),
    Case(31, "AVIF", saved(same, ".avif"), 0),
    Case(
        31,
        "animated WebP",
        saved(same, ".webp", save_all=True, append_images=[Image.new("RGB", (WIDTH, HEIGHT))]),
        0,
        ("1 file holds several pictures, of which the first is used",),
    ),
    Case(32, "twice the size", grown((160, 120)), 0, ("12 images differ in size from their cameras",)),
    Case(32, "another shape", grown((80, 80)), 3, ("12 problems", "80x80 pixels, its camera 80x60")),
    Case(33, "mixed sizes", grown((160, 120), 3), 0, ("3 images differ in size",)),
    Case(
        34,
        "60,000 x 45,000 pixels",
        replaced(png_header(60_000, 45_000) + b"\0\0\0\0IEND", ".png"),
        says=("2,700 million pixels", "--max-pixels", "-resize 25%", "--images images_small"),
        flags=("--max-pixels", "100000000"),
    ),
    Case(35, "no room for one image", nothing, 0, flags=("--set", "data.cache_bytes=1")),
    Case(36, "masks as COLMAP names them", masked(), 0, ("12 images have masks",)),
    Case(36, "masks of nothing", masked(name="x{}.png"), 3, ("12 of 12 images have no mask",), ("--masks", "masks")),
    Case(36, "masks of other images", masked(name="x{}.png"), 0, ("holds no mask of these images",)),
    Case(
        36,
        "masks for some",
        masked(7),
        says=("5 of 12 images have no mask", "splat train and splat sfm use no masks with"),
    ),
    Case(36, "masks for some, unused", masked(7), 0, flags=("--masks", "none")),
    Case(36, "no such folder of masks", nothing, says=("folder of masks is not there",), flags=("--masks", "nowhere")),
    Case(36, "masks of another size", masked(size=(40, 30)), says=("12 problems", "the mask is 40x30 pixels")),
    Case(36, "a mask that is none", masked_badly, says=("is not an image", ".jpg.png")),
    Case(36, "all black", masked(white=0), says=("masks hide every pixel of the", "invert the masks")),
    Case(37, "identical images", copied, 0, ("2 images are identical files", "one of them is not what its camera saw")),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case, expect: Expect) -> None:
    expect(case)


def test_all_bad_images_are_reported_at_once(expect: Expect) -> None:
    def harm(folder: Path) -> None:
        replaced(b"")(folder)
        image_files(folder)[5].write_bytes(b"<html>")

    err = expect(Case(23, "two at once", harm, says=("2 problems", "is empty", "is not an image")))
    assert err.count("images/view_") == 2


def test_info_inspects_images_too(expect: Expect) -> None:
    expect(Case(23, "info", replaced(b""), says=("is empty",), command=("info", "scene")))
