"""Captures that only half succeed, by whole commands: pieces, images left out, few images, no parallax."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont
from scipy.ndimage import map_coordinates

from splatcli.cli.commands import run
from splatcli.config import DataConfig
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.read import read_scene
from splatcli.sfm.consistency import share_of_most
from splatcli.sfm.mapping import centers_of
from splatcli.similarity import Similarity
from tests.cli.tiny import QUICK
from tests.sfm import corner, panoramas
from tests.sfm.conftest import write_noise


def write(path: Path, pose: float, *, room: int = 0) -> None:
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(corner.image(pose, room=room)).save(path, quality=95)


def test_pieces_are_kept_and_named_by_every_command(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    for index in range(6):
        write(Path(f"photos/a{index}.jpg"), index)
    for index in range(4):
        write(Path(f"photos/b{index}.jpg"), index, room=1)
    write_noise(Path("photos"), 1)
    assert run(["sfm", "photos", "-o", "made", "--json"]) == 0
    said = capfd.readouterr()
    facts = json.loads(said.out.splitlines()[-1])
    others = [f"b{index}.jpg" for index in range(4)]
    assert (facts["registered"], facts["total"], facts["other_images"]) == (6, 11, [others])
    assert facts["unregistered"] == ["0.png", *others]
    # The images of the other place have matches with each other alone, which join nothing.
    assert facts["retried"] == {"images": 5, "verified_pairs": 0, "before": 6, "after": 0}
    assert not {"mapping again", "mapping as fisheye"} & facts["seconds"].keys()
    for _ in range(2):  # when it is made, and when it is used again
        assert "6 of 11 images are registered; left out: 0.png, b0.jpg, b1.jpg, b2.jpg, b3.jpg" in said.err
        assert "4 images form a model of their own, kept as sparse/1: b0.jpg, b1.jpg, b2.jpg, b3.jpg" in said.err
        assert "fall into 2 models that nothing connects: take images that lead from one to another" in said.err
        assert "--matching exhaustive" not in said.err
        assert run(["sfm", "photos", "-o", "made"]) == 0
        said = capfd.readouterr()
    notes = (
        "of 2 COLMAP models sparse/0 with 6 images is used; splat train --model sparse/1 has 4 images",
        "registers 6 of the 11 images in images/; left out: 0.png, b0.jpg, b1.jpg, b2.jpg, b3.jpg",
    )
    assert run(["info", "made"]) == 0
    reported = capfd.readouterr().out
    assert all(note in reported for note in notes)
    assert run(["train", "made", "-o", "run", "-n", "2", "-r", "4", "--device", "cpu", *QUICK]) == 0
    reported = capfd.readouterr().err
    assert all(note in reported for note in notes)
    assert run(["info", "made", "--model", "sparse/1"]) == 0
    assert "sparse/1/images.bin: 4 views" in capfd.readouterr().out


def test_few_images_are_doubted(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    for index in range(3):
        write(Path(f"photos/{index}.jpg"), 0.3 * index)
    assert run(["sfm", "photos", "-o", "made", "--json"]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out.splitlines()[-1])["parallax_degrees"] > 4.5
    assert "degrees of parallax in the median" not in said.err
    assert "only 3 views, from which surfaces are guesses: take more images" in said.err
    assert run(["info", "made"]) == 0
    assert "only 3 views" in capfd.readouterr().out
    assert run(["train", "made", "-o", "run", "-n", "2", "-r", "4", "--device", "cpu", *QUICK]) == 0
    assert "only 3 views" in capfd.readouterr().err


def test_a_watermark_does_not_hold_the_camera(tmp_path: Path, monkeypatch, capfd) -> None:
    """What stays at one place of all images is left out, and the warning says where it is."""
    monkeypatch.chdir(tmp_path)
    mark = np.random.default_rng(0).integers(0, 256, (10, 24, 3), dtype=np.uint8)
    logo = Image.fromarray(mark).resize((120, 50), Image.Resampling.NEAREST)
    for index in range(8):
        picture = Image.fromarray(corner.image(index))
        picture.paste(logo, (110, 120))
        Path("photos").mkdir(exist_ok=True)
        picture.save(f"photos/{index}.jpg", quality=95)
    assert run(["sfm", "photos", "-o", "made", "--json"]) == 0
    said = capfd.readouterr()
    facts = json.loads(said.out.splitlines()[-1])
    assert facts["registered"] == 8
    (fact,) = facts["stationary"]
    assert fact["images"] == 8
    (left, top, right, bottom) = fact["boxes"][0]
    assert 70 <= left < 150 < 200 < right <= 240
    assert 80 <= top < 140 < 150 < bottom <= 180
    where = f"x {left} to {right}, y {top} to {bottom}"
    assert f"features do not move in the 8 images of 240x180 pixels, mostly at {where}" in said.err
    model = pycolmap.Reconstruction("made/sparse/0")
    turns = [model.image(number).cam_from_world().rotation.matrix() for number in sorted(model.reg_image_ids())]
    names = [int(Path(model.image(number).name).stem) for number in sorted(model.reg_image_ids())]
    for (one, i), (other, j) in pairwise(zip(turns, names, strict=True)):
        known = corner.pose(j)[:3, :3] @ corner.pose(i)[:3, :3].T
        assert np.trace(other @ one.T @ known.T) > 1 + 2 * np.cos(np.radians(0.5))
    points = [point.xy for number in model.reg_image_ids() for point in model.image(number).get_observation_points2D()]
    assert not any(112 < x < 228 and 122 < y < 168 for x, y in points)
    # The mark is hidden from training, and the rest is not.
    assert (facts["masks"], facts["static_masks"]) == (8, True)
    assert "masks/ hides such regions from training" in said.err
    for index in range(8):
        mask = np.asarray(Image.open(f"made/masks/{index}.jpg.png")) > 0
        assert mask.shape == (180, 240)
        assert mask[120:170, 110:230].mean() < 0.05
        assert (mask.sum() - mask[120:170, 110:230].sum()) / (mask.size - 6000) > 0.97
    assert run(["info", "made"]) == 0
    assert "8 of 8 images have one" in capfd.readouterr().out
    for words, hides in (((), True), (("--masks", "none"), False)):
        made = ["train", "made", "-o", "run", "--overwrite", "-n", "2", "-r", "4", "--device", "cpu", *QUICK, *words]
        assert run(made) == 0
        assert ("8 images have masks; what they hide takes no part in training" in capfd.readouterr().err) == hides
    # With --masks none there are none.
    assert run(["sfm", "photos", "-o", "without", "--masks", "none", "--json"]) == 0
    said = capfd.readouterr()
    assert (json.loads(said.out.splitlines()[-1])["masks"], Path("without/masks").exists()) == (0, False)
    assert "hide these pixels with masks, or training puts them into the scene" in said.err


def test_other_forms_of_a_photo_are_left_out_and_named(tmp_path: Path, monkeypatch, capfd) -> None:
    """As phones and their programs leave them beside the photo: filtered, cropped, in a second format."""
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()

    def save(name: str, index: int, second: int | None, crop: int = 0) -> None:
        exif = Image.Exif()
        if second is not None:
            exif.get_ifd(0x8769)[0x9003] = f"2024:05:01 10:00:{second:02d}"
        picture = Image.fromarray(corner.image(index)[crop : corner.HEIGHT - crop])
        picture.save(Path("photos", name), exif=exif, quality=90)

    photos = ["IMG_0001.JPG", "IMG_0002.JPG", "PXL_1.jpg", "g.jpg", "PXL_2.PORTRAIT-02.ORIGINAL.jpg", "a.jpg", "b.jfif"]
    for index, name in enumerate(photos):
        save(name, index, None if name == "g.jpg" else index)
    for name, index, second, crop in (
        ("IMG_E0001.JPG", 0, 0, 20),
        ("PXL_1~2.jpg", 2, 2, 2),
        ("g-edited.jpg", 3, None, 2),
        ("PXL_2.PORTRAIT-01.COVER.jpg", 4, 4, 2),
        ("a.webp", 5, 5, 0),
        # Photos of their own: taken at another time, in a format that does not say when, and without the photo.
        ("IMG_E0002.JPG", 7, 7, 0),
        ("b.png", 8, None, 0),
        ("IMG_E0009.JPG", 9, 9, 0),
    ):
        save(name, index, second, crop)
    for film in ("IMG_0001.MOV", "IMG_E0001.MOV", "IMG_0002_HEVC.MOV"):
        Path("photos", film).write_bytes(b"a Live Photo's")
    assert run(["sfm", "photos", "-o", "made", "--json"]) == 0
    said = capfd.readouterr()
    facts = json.loads(said.out.splitlines()[-1])
    assert facts["edits"] == {
        "IMG_E0001.JPG": "IMG_0001.JPG",
        "PXL_1~2.jpg": "PXL_1.jpg",
        "PXL_2.PORTRAIT-01.COVER.jpg": "PXL_2.PORTRAIT-02.ORIGINAL.jpg",
        "a.webp": "a.jpg",
        "g-edited.jpg": "g.jpg",
    }
    assert (facts["registered"], facts["total"], facts["videos_left_out"]) == (10, 10, [])
    assert (
        "5 images are other forms of the same photo, edited or of another format, and left out: IMG_E0001.JPG of IMG_"
        in said.err
    )
    assert not Path("made/images/IMG_E0001.JPG").exists()


def test_a_date_on_all_photos_is_hidden_from_features_and_training(tmp_path: Path, monkeypatch, capfd) -> None:
    """Small orange letters, in which no feature stays: the seconds change, and the background does."""
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    font = ImageFont.load_default(size=12)
    for index in range(14):
        picture = Image.fromarray(corner.image(index))
        ImageDraw.Draw(picture).text((120, 160), f"2024/5/12 10:00:{3 * index:02d}", (255, 140, 30), font)
        picture.save(f"photos/{index:02d}.jpg", quality=95)
    assert run(["sfm", "photos", "-o", "made", "--json"]) == 0
    said = capfd.readouterr()
    facts = json.loads(said.out.splitlines()[-1])
    (fact,) = facts["overlays"]
    ((left, top, right, bottom),) = fact["boxes"]
    assert 90 <= left <= 120 < 220 < right <= 240
    assert 150 <= top <= 163 < 171 < bottom <= 180
    where = f"14 images of 240x180 pixels show the same at x {left} to {right}, y {top} to {bottom}, as a date"
    assert where in said.err
    assert "features do not move" not in said.err
    assert (facts["registered"], facts["masks"], facts["static_masks"]) == (14, 14, True)
    for index in range(14):
        mask = np.asarray(Image.open(f"made/masks/{index:02d}.jpg.png")) > 0
        letters = Image.new("L", (240, 180))
        ImageDraw.Draw(letters).text((120, 160), f"2024/5/12 10:00:{3 * index:02d}", 255, font)
        assert not mask[np.asarray(letters) > 0].any()
        assert mask[:140].all()
    model = pycolmap.Reconstruction("made/sparse/0")
    points = [point.xy for number in model.reg_image_ids() for point in model.image(number).get_observation_points2D()]
    assert not any(120 < x < 222 and 162 < y < 173 for x, y in points)
    assert run(["train", "made", "-o", "run", "-n", "2", "-r", "4", "--device", "cpu", *QUICK]) == 0
    assert "14 images have masks; what they hide takes no part in training" in capfd.readouterr().err
    assert run(["sfm", "photos", "-o", "without", "--masks", "none", "--json"]) == 0
    facts = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (facts["masks"], facts["overlays"], Path("without/masks").exists()) == (0, [], False)


def test_black_bars_are_hidden_from_features_and_training(tmp_path: Path, monkeypatch, capfd) -> None:
    """As of a film of 21:9 in 16:9; one photo shows a dark room."""
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    for index in range(9):
        pixels = np.zeros((230, corner.WIDTH, 3), np.uint8)
        pixels[25:205] = corner.image(index)
        if index == 4:
            pixels[25:205] //= 12
        Image.fromarray(pixels).save(f"photos/{index}.jpg", quality=90)
    assert run(["sfm", "photos", "-o", "made", "--json"]) == 0
    said = capfd.readouterr()
    facts = json.loads(said.out.splitlines()[-1])
    ((top, bottom, left, right),) = (fact["pixels"] for fact in facts["borders"])
    assert (left, right) == (0, 0)
    assert 25 <= top <= 29
    assert 25 <= bottom <= 29
    assert (facts["masks"], facts["registered"] >= 8) == (9, True)
    assert "9 images of 240x230 pixels have black borders (top" in said.err
    mask = np.asarray(Image.open("made/masks/0.jpg.png"))
    assert not mask[:25].any()
    assert not mask[-25:].any()
    assert mask[30:200].all()
    model = pycolmap.Reconstruction("made/sparse/0")
    rows = [point.xy[1] for number in model.reg_image_ids() for point in model.image(number).points2D]
    assert min(rows) >= 25
    assert max(rows) <= 205
    assert run(["train", "made", "-o", "run", "-n", "2", "-r", "4", "--device", "cpu", *QUICK]) == 0
    assert "images have masks; what they hide takes no part in training" in capfd.readouterr().err
    assert run(["sfm", "photos", "-o", "without", "--masks", "none", "--json"]) == 0
    facts = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (facts["masks"], facts["borders"], Path("without/masks").exists()) == (0, [], False)


def test_a_zoom_without_exif_gives_each_image_its_own_focal_length(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    size = np.array([corner.WIDTH, corner.HEIGHT])
    parts = [1 - 0.15 * (index % 3) for index in range(9)]
    for index, part in enumerate(parts):
        box = np.concatenate([size * (1 - part), size * (1 + part)]) / 2
        picture = Image.fromarray(corner.image(0.7 * index))
        picture.resize(tuple(size), Image.Resampling.LANCZOS, box=tuple(box)).save(f"photos/{index}.jpg", quality=95)
    assert run(["sfm", "photos", "-o", "made", "--json"]) == 0
    said = capfd.readouterr()
    *events, facts = map(json.loads, said.out.splitlines())
    assert events[-1] == {"event": "sfm", "phase": "lens", "done": 8, "total": 8}  # with that of a lens for each image
    assert (facts["registered"], [fact["images"] for fact in facts["zoomed"]]) == (9, [9])
    assert "the focal length changes from image to image" in said.err
    model = pycolmap.Reconstruction("made/sparse/0")
    for number in model.reg_image_ids():
        image = model.image(number)
        known = corner.FOCAL / parts[int(Path(image.name).stem)]
        assert abs(model.camera(image.camera_id).mean_focal_length() / known - 1) < 0.05


def test_photos_taken_in_the_dark_are_registered(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    for index in range(6):
        dark = (corner.image(index) * 0.1).astype(np.uint8)
        Image.fromarray(dark).save(f"photos/{index}.png")
    assert run(["sfm", "photos", "-o", "made", "--json"]) == 0
    facts = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert facts["registered"] == 6
    assert facts["points"] > 300


def test_photos_that_exif_turns_are_worked_on_as_viewers_show_them(tmp_path: Path, monkeypatch, capfd) -> None:
    """As front cameras, scanning programs and phones held the other way write them; a mask lies as it is stored."""
    monkeypatch.chdir(tmp_path)
    photos, upright = Path("photos"), [corner.image(index) for index in range(6)]
    (photos / "masks").mkdir(parents=True)
    stored = {
        2: lambda pixels: pixels[:, ::-1],
        3: lambda pixels: pixels[::-1, ::-1],
        4: lambda pixels: pixels[::-1],
        7: lambda p: p[::-1, ::-1].swapaxes(0, 1),
    }
    orientations = [2, 4, 7, 3, 1, 3]
    for index, orientation in enumerate(orientations):
        exif, turn = Image.Exif(), stored.get(orientation, lambda pixels: pixels)
        exif[0x0112] = orientation
        exif[0x8769] = {0xA405: 36}
        Image.fromarray(turn(upright[index])).save(photos / f"{index}.jpg", quality=95, exif=exif)
        mask = np.full(upright[index].shape[:2], 255, np.uint8)
        mask[:, :40] = 0
        Image.fromarray(turn(mask)).save(photos / f"masks/{index}.png")
    assert run(["sfm", "photos", "-o", "made", "--camera-model", "SIMPLE_PINHOLE", "--json"]) == 0
    said = capfd.readouterr()
    facts = json.loads(said.out.splitlines()[-1])
    assert (facts["registered"], facts["upright_copies"]) == (6, ["0.jpg", "1.jpg", "3.jpg", "5.jpg"])
    assert "EXIF turns or mirrors 4 images" in said.err
    assert "images/ has upright copies of 0.jpg, 1.jpg, 3.jpg, 5.jpg" in said.err
    assert len(facts["cameras"]) == 1  # the copies keep the focal length of EXIF
    model = pycolmap.Reconstruction("made/sparse/0")
    centers = centers_of(model)
    matrices = [corner.pose(index) for index in range(6)]
    true = np.stack([-matrix[:3, :3].T @ matrix[:3, 3] for matrix in matrices])
    found = np.stack([centers[f"{index}.jpg"] for index in range(6)])
    away = np.linalg.norm(Similarity.of_pairs(found, true)(found) - true, axis=1)
    assert away.max() < 0.02 * np.linalg.norm(true[0] - true[-1])
    # All cameras agree on what is up, which paths and viewers take it from.
    down = np.stack([model.image(number).cam_from_world().rotation.matrix()[1] for number in model.reg_image_ids()])
    assert (down @ down.T).min() > 0.5
    scene = read_scene(Path("made"), DataConfig())
    for index in range(6):
        assert np.abs(scene.images.load(index).astype(int) - upright[index])[:, 42:].mean() < 20
        assert scene.images.image(index).masked[:, :38].all()
        assert not scene.images.image(index).masked[:, 42:].any()
    assert [np.asarray(Image.open(photos / f"{i}.jpg")).shape[:2] == (180, 240) for i in range(6)].count(False) == 1


@pytest.mark.parametrize(
    ("shares", "share"),
    [
        ([(0.8, 0.2), (0.7, 0.3), (0.9, 0.1), (0.8, 0.2), (0.7, 0.25)], 0.2),
        # Repeated patterns: pairs that agree with the cameras have none, others much.
        ([(0.9, 0.0), (0.8, 0.0), (0.6, 0.25), (0.1, 0.6), (0.0, 0.8), (0.2, 0.5)], 0.0),
        ([(0.4, 0.6)] * 9, 0.0),
        ([], 0.0),
    ],
)
def test_a_second_motion_is_in_pairs_that_agree_with_the_cameras(
    shares: list[tuple[float, float]], share: float
) -> None:
    assert share_of_most(shares) == pytest.approx(share)


def test_a_figure_that_stands_elsewhere_in_each_photo_is_doubted(tmp_path: Path, monkeypatch, capfd) -> None:
    """It fills 11 % of the photos, and has as many features as the room."""
    monkeypatch.chdir(tmp_path)
    pattern = np.random.default_rng(0).integers(0, 256, (25, 12, 3), dtype=np.uint8)
    figure = Image.fromarray(np.kron(pattern, np.ones((4, 4, 1), np.uint8)))
    for name in ("with", "without"):
        Path(name).mkdir()
        for index in range(8):
            picture = Image.fromarray(corner.image(0.7 * index))
            if name == "with":
                picture.paste(figure, (5 + (index * 53) % 185, 60))
            picture.save(f"{name}/{index}.jpg", quality=95)
        assert run(["sfm", name, "-o", f"{name}-made", "--camera-model", "SIMPLE_RADIAL", "--json"]) == 0
        said = capfd.readouterr()
        share = json.loads(said.out.splitlines()[-1])["second_motion"]
        if name == "with":
            assert share > 0.1
            assert f"{100 * share:.0f} % or more of the matches of most image pairs follow another motion" in said.err
        else:
            assert share < 0.05
            assert "another motion" not in said.err


def test_a_camera_that_turns_on_the_spot_is_said_to_stay_at_one_place(tmp_path: Path, monkeypatch, capfd) -> None:
    """Views of a full turn, whose focal length is not known, become a ring of cameras with small errors."""
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    whole, (width, height), focal = panoramas.image(0), (200, 150), 150.0
    x, y = np.meshgrid(np.arange(width) + 0.5 - width / 2, np.arange(height) + 0.5 - height / 2)
    for index in range(30):
        east = np.arctan2(x, focal) + index * np.radians(12)
        down = np.arctan2(y, np.hypot(x, focal))
        column = (east / (2 * np.pi) + 0.5) % 1 * panoramas.WIDTH
        row = (down / np.pi + 0.5) * panoramas.HEIGHT
        at = [row - 0.5, column - 0.5]
        layers = [map_coordinates(whole[..., k], at, order=1, mode="grid-wrap") for k in range(3)]
        Image.fromarray(np.stack(layers, axis=-1)).save(f"photos/{index:02}.jpg", quality=95)
    assert run(["sfm", "photos", "-o", "made", "--json"]) == 0
    said = capfd.readouterr()
    facts = json.loads(said.out.splitlines()[-1])
    assert facts["rotation"] > 0.95
    assert "so the camera stayed at one place" in said.err
    assert "take more images in between" not in said.err
    assert not {"matching again", "mapping again", "mapping as fisheye"} & facts["seconds"].keys()
