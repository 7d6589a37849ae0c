"""HEIC photos: from a phone's file to upright pixels, and what is said of files that are not read."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from splatcli.cli.commands import run
from splatcli.errors import SceneError
from splatcli.scene import hdr, heif
from splatcli.scene.decode import decode_rgb, open_image, read_header
from splatcli.scene.find_images import images_below
from splatcli.sfm.features import focal_share
from tests.scene import made
from tests.sfm import corner

REAL = Path(__file__).parents[3] / "shared/data/heic"
HAS_HEIC = importlib.util.find_spec("pillow_heif") is not None
NEEDS_HEIC = pytest.mark.skipif(not HAS_HEIC, reason="pillow-heif is not installed: pip install 'splatcli[heic]'")
NEEDS_REAL = pytest.mark.skipif(not REAL.is_dir(), reason="../shared/data/heic is not there")
BLACK = (0, 0, 0)
#: The file type box that HEIC files start with.
START = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(60)


def write_heic(path: Path, rgb: np.ndarray, *, orientation: int = 1) -> None:
    """pillow-heif writes EXIF's orientation as a turn of the container, as phones do."""
    assert heif.can_read()
    image = Image.fromarray(rgb)
    image.getexif()[0x0112] = orientation
    image.save(path, "HEIF", quality=95)


@NEEDS_HEIC
@pytest.mark.parametrize(
    ("codes", "name"), [((12, 13), "Display P3"), ((9, 18), "BT.2020 HLG"), ((9, 16), "BT.2020 PQ")]
)
def test_colours_that_a_file_names_by_codes_become_srgb(codes: tuple[int, int], name: str, tmp_path: Path) -> None:
    """10 bits, as cameras write their .HIF files."""
    plugin = importlib.import_module("pillow_heif")
    values = np.kron(np.random.default_rng(0).integers(64, 640, (3, 4, 1)), np.ones((16, 16, 3), np.int64))  # grey
    file = plugin.from_bytes("RGB;16", (64, 48), (values << 6).astype(np.uint16).tobytes())
    primaries, transfer = codes
    words = {"color_primaries": primaries, "transfer_characteristics": transfer, "matrix_coefficients": 1}
    file.save(tmp_path / "A.HIF", quality=-1, chroma=444, format="HEIF", full_range_flag=1, **words)
    assert read_header(tmp_path / "A.HIF").colours == name
    wanted = hdr.to_srgb((values << 6).astype(np.uint16), hdr.coded(*codes))
    np.testing.assert_allclose(decode_rgb(tmp_path / "A.HIF", BLACK), wanted, atol=3)
    assert list(images_below(tmp_path)) == ["A.HIF"]


@NEEDS_HEIC
@NEEDS_REAL
@pytest.mark.parametrize(
    ("name", "size", "mean", "share"),
    [
        ("iphone8_rotated.heic", (3024, 4032), None, 28 / 43.267 * 1.25),
        ("xiaomi_gps.heic", (2592, 1944), (182.9, 195.0, 199.8), 48 / 43.267 * 1.25),
        ("two_images.heic", (1280, 854), (122.7, 126.5, 121.1), 0.0),
    ],
)
def test_real_photos(name: str, size: tuple[int, int], mean: tuple[float, ...] | None, share: float) -> None:
    header = read_header(REAL / name)
    assert ((header.width, header.height), header.orientation, header.several) == (size, 1, False)
    rgb = decode_rgb(REAL / name, BLACK)
    assert rgb.shape == (size[1], size[0], 3)
    if mean is not None:
        np.testing.assert_allclose(rgb.mean(axis=(0, 1)), mean, atol=0.1)
    assert focal_share(REAL / name) == pytest.approx(share, rel=1e-4)


@NEEDS_HEIC
@NEEDS_REAL
def test_a_photo_that_says_twice_how_to_turn_it_is_turned_once() -> None:
    """The drawn arrow points up: dark ink is narrow near the top, and wide in the middle."""
    rgb = decode_rgb(REAL / "iphone8_rotated.heic", BLACK)
    ink = rgb[::8, ::8].max(axis=2) < 70
    widths = [np.ptp(np.flatnonzero(row)) if row.any() else 0 for row in ink]
    rows = np.flatnonzero(widths)
    first, last = rows[0], rows[-1]
    assert widths[first + 3] < 40
    assert max(widths) > 200
    assert np.argmax(widths) < (first + last) / 2 + 20
    assert read_header(REAL / "iphone8_rotated.heic").colours == "Display P3"


@NEEDS_HEIC
@NEEDS_REAL
def test_gps_is_kept() -> None:
    with open_image(REAL / "xiaomi_gps.heic") as image:
        gps = image.getexif().get_ifd(0x8825)
    assert (gps[1], gps[3], gps[6]) == ("N", "E", 95.8)


@NEEDS_HEIC
@NEEDS_REAL
def test_a_cut_file_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.heic"
    path.write_bytes((REAL / "xiaomi_gps.heic").read_bytes()[:100_000])
    with pytest.raises(SceneError, match=r"damaged"):
        decode_rgb(path, BLACK)


@NEEDS_HEIC
def test_a_scene_of_heic_photos_is_trained_on(tmp_path: Path, capfd) -> None:
    """Cameras name the images, which are stored turned by a quarter."""
    names = [f"{i}.heic" for i in range(made.COUNT)]
    made.write_model(tmp_path / "sparse/0", made.reconstruction(image_names=names))
    (tmp_path / "images").mkdir()
    for i, name in enumerate(names):
        stored = np.ascontiguousarray(np.rot90(made.picture(i)))
        write_heic(tmp_path / "images" / name, stored, orientation=6)
        assert np.abs(decode_rgb(tmp_path / "images" / name, BLACK).astype(int) - made.picture(i)).mean() < 5
    Image.fromarray(made.picture(0)).save(tmp_path / "images/extra.gif")
    assert run(["info", str(tmp_path), "--json"]) == 0
    facts = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert facts["num_train"] + facts["num_test"] == made.COUNT
    assert "1 file is an image of a kind that is not read, and left out: extra.gif" in facts["notes"]


@NEEDS_HEIC
def test_sfm_finds_the_cameras_of_heic_photos(tmp_path: Path, capfd) -> None:
    folder = tmp_path / "phone"
    folder.mkdir()
    for i in range(5):
        write_heic(folder / f"IMG {i}.HEIC", corner.image(i))
    (folder / "IMG 0.DNG").write_bytes(b"raw of a photo that is there")
    (folder / "IMG 9.DNG").write_bytes(b"raw alone")
    assert run(["sfm", str(folder), "-o", str(tmp_path / "scene"), "--json"]) == 0
    said = capfd.readouterr()
    facts = json.loads(said.out.splitlines()[-1])
    assert (facts["registered"], facts["not_read"]) == (5, ["IMG 9.DNG"])
    assert "IMG 9.DNG" in said.out
    assert run(["info", str(tmp_path / "scene"), "--json"]) == 0


@pytest.fixture
def without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """pillow-heif is not installed, here and in processes that are started, until this is undone."""
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone/pillow_heif.py").write_text("raise ImportError('not here')\n")
    monkeypatch.delitem(sys.modules, "pillow_heif", raising=False)
    monkeypatch.syspath_prepend(tmp_path / "gone")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "gone"), prepend=os.pathsep)
    heif.can_read.cache_clear()
    yield monkeypatch
    heif.can_read.cache_clear()


@pytest.mark.usefixtures("without_the_extra")
@pytest.mark.parametrize("command", ["sfm", "train", "info"])
def test_heic_alone_without_the_extra_names_it(command: str, tmp_path: Path, capfd) -> None:
    (tmp_path / "phone").mkdir()
    for i in range(4):
        (tmp_path / f"phone/IMG_{i}.HEIC").write_bytes(START + bytes([i]))
    code = run([command, str(tmp_path / "phone")])
    said = capfd.readouterr()
    text = said.out + said.err
    if command == "info":
        assert code == 0
        assert "IMG_0.HEIC" in text
    else:
        assert code == 3
        assert (
            "none of the 4 images can be used, at least 3 are needed; 4 cannot be read, IMG_0.HEIC: is a HEIF image"
            in text
        )
        assert "pip install 'splatcli[heic]'" in text


def test_a_mixed_folder_without_the_extra_says_what_is_left_out(
    tmp_path: Path, without_the_extra: pytest.MonkeyPatch, capfd
) -> None:
    (tmp_path / "phone").mkdir()
    for i in range(5):
        Image.fromarray(corner.image(i)).save(tmp_path / f"phone/{i}.jpg", quality=95)
    (tmp_path / "phone/late.heic").write_bytes(START)
    (tmp_path / "phone/b.cr2").write_bytes(b"raw")
    command = ["sfm", str(tmp_path / "phone"), "-o", str(tmp_path / "scene")]
    assert run(command) == 0
    said = capfd.readouterr().err
    assert "1 image cannot be read and is left out: late.heic is a HEIF image" in said
    assert "1 file is an image of a kind that is not read, and left out: b.cr2" in said
    assert "pip install 'splatcli[heic]'" in said
    assert run(command) == 0
    assert "cameras found before are used" in capfd.readouterr().err
    if HAS_HEIC:
        without_the_extra.undo()
        heif.can_read.cache_clear()
        assert run(command) == 0
        assert "cameras found before" not in capfd.readouterr().err


@pytest.mark.usefixtures("without_the_extra")
def test_a_heic_photo_of_a_scene_without_the_extra(tmp_path: Path, capfd) -> None:
    names = [f"{i}.png" for i in range(7)] + ["7.heic"]
    made.write_model(tmp_path / "sparse/0", made.reconstruction(image_names=names))
    made.write_images(tmp_path / "images", names[:7])
    (tmp_path / "images/7.heic").write_bytes(START)
    assert run(["info", str(tmp_path)]) == 3
    said = capfd.readouterr()
    assert "7.heic" in said.err
    assert "pip install 'splatcli[heic]'" in said.err


@pytest.mark.parametrize("command", ["sfm", "train"])
@pytest.mark.parametrize("name", ["a.dng", "a.CR2", "a.gif"])
def test_a_folder_of_what_is_not_read_says_so(command: str, name: str, tmp_path: Path, capfd) -> None:
    for i in range(3):
        (tmp_path / f"{i}{name}").write_bytes(b"x")
    assert run([command, str(tmp_path)]) == 3
    said = capfd.readouterr().err
    assert f"3 files are images of a kind that is not read, and left out: 0{name}, 1{name}, 2{name}" in said
    assert "magick mogrify" in said
    assert "splat sfm" not in said.split("help:")[1]


def test_avif_under_the_general_brand_is_no_heif() -> None:
    assert heif.is_heif(START)
    assert heif.is_heif(b"\0\0\0\x1cftypmif1\0\0\0\0mif1heichevc" + bytes(40))
    assert not heif.is_heif(b"\0\0\0\x1cftypmif1\0\0\0\0mif1avifmiaf" + bytes(40))
    assert not heif.is_heif(b"\0\0\0\x1cftypavif\0\0\0\0mif1avifmiaf" + bytes(40))
    assert not heif.is_heif(b"")
