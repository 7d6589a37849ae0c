"""The files in images/ that features are looked for in, and what is known of them before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from splatcli.errors import SceneError
from splatcli.sfm.execution import Execution
from splatcli.sfm.images import find_input, readable
from splatcli.sfm.options import PANORAMAS, SfmOptions
from splatcli.sfm.prepare import Prepared, prepare
from tests.sfm import corner
from tests.sfm.conftest import write_noise


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Six images: the second is upside down by EXIF, the third is damaged."""
    folder = write_noise(tmp_path / "photos", 6)
    exif = Image.Exif()
    exif[0x0112] = 3
    Image.open(folder / "1.png").save(folder / "1.png", exif=exif)
    (folder / "2.png").write_bytes(b"no image")
    return folder


def prepared(photos: Path, folder: Path, options: SfmOptions | None = None) -> tuple[Prepared, list[str]]:
    """What is prepared, and the phases that were reported."""
    folder.mkdir(exist_ok=True)
    reported: dict[str, int] = {}
    execution = Execution(num_threads=2, listener=lambda name, done, total: reported.update({name: done}))
    found = prepare(find_input(photos), options or SfmOptions(), folder, execution)
    assert list(execution.seconds) == list(reported)
    return found, list(reported)


def test_images_are_linked_copied_upright_or_left_out(photos: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    for _ in range(2):  # a second call makes the same of what the first one left
        found, reported = prepared(photos, folder)
        assert [image.name for image in found.images] == ["0.png", "1.png", "3.png", "4.png", "5.png"]
        assert (found.upright_copies, found.panoramas, dict(found.videos)) == (["1.png"], [], {})
        assert list(found.unreadable) == ["2.png"]
        assert reported == ["upright copies"]
        assert sorted(path.name for path in (folder / "images").iterdir()) == [image.name for image in found.images]
        assert (folder / "images/0.png").samefile(photos / "0.png")
        upright = Image.open(photos / "1.png").transpose(Image.Transpose.ROTATE_180)
        assert Image.open(folder / "images/1.png").convert("RGB").tobytes() == upright.convert("RGB").tobytes()


def test_only_features_matches_and_frames_of_an_earlier_call_stay(photos: Path, tmp_path: Path) -> None:
    work = tmp_path / "made/work"
    (work / "models").mkdir(parents=True)
    (work / PANORAMAS).mkdir()
    (tmp_path / "made/sparse/0").mkdir(parents=True)
    for name in ("database.db", "retry.db", "frames.json"):
        (work / name).write_text(json.dumps(["lost.png"]))
    prepared(photos, tmp_path / "made")
    assert sorted(path.name for path in work.iterdir()) == ["database.db", "frames.json", PANORAMAS]
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["images", "work"]


def test_the_sharpest_images_are_chosen(photos: Path, tmp_path: Path) -> None:
    found, reported = prepared(photos, tmp_path / "made", SfmOptions(frames=3))
    assert len(found.images) == 3
    assert reported[0] == "frames"
    assert sorted(path.name for path in (tmp_path / "made/images").iterdir()) == [image.name for image in found.images]


def test_too_few_images_that_can_be_read_are_an_error(photos: Path, tmp_path: Path) -> None:
    for index in (0, 3, 4):
        (photos / f"{index}.png").write_bytes(b"no image" * (2 + index))
    with pytest.raises(SceneError, match=r"only 2 of 6 images can be used, .* 4 cannot be read, 0\.png: ") as caught:
        prepared(photos, tmp_path / "made")
    assert (caught.value.where, caught.value.remedy) == (str(photos), "add images that can be read")


def test_pnm_and_jpeg_2000_are_found_by_their_endings_and_a_gif_is_not(tmp_path: Path) -> None:
    names, picture = ("a.pgm", "b.ppm", "c.jp2", "d.gif"), Image.fromarray(corner.image(0))
    for name in names:
        (picture.convert("L") if name == "a.pgm" else picture).save(tmp_path / name)
    found = find_input(tmp_path)
    assert (found.names, found.unread) == (names[:3], names[3:])
    headers, bad = readable(found, 10_000_000)
    assert {name: (header.width, header.height) for name, header in headers.items()} == dict.fromkeys(
        names[:3], picture.size
    )
    assert not bad
