"""Masks of images without cameras: what they hide gives no features, and they go along into the scene."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from splatcli.cli.commands import run as command
from splatcli.config import DataConfig
from splatcli.errors import OutputError, SceneError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.decode import read_header
from splatcli.scene.read import read_scene
from splatcli.sfm.execution import Execution
from splatcli.sfm.features import SfmImage, extract
from splatcli.sfm.images import find_input
from splatcli.sfm.options import SfmOptions
from splatcli.sfm.run import SfmResult
from tests.cli.tiny import QUICK
from tests.sfm import corner
from tests.sfm.conftest import NUM_IMAGES, TURNED, find_cameras_of, name_of

#: What is masked: the left part of every image, upright.
EDGE = 60


def write_masks(folder: Path, name: str = "{stem}.png", *, skip: int | None = None) -> None:
    folder.mkdir(parents=True)
    for index in range(NUM_IMAGES):
        mask = np.full((corner.HEIGHT, corner.WIDTH), 255, np.uint8)
        mask[:, :EDGE] = 0
        image = Image.fromarray(mask)
        if index == TURNED:  # as the image is stored
            image = image.transpose(Image.Transpose.ROTATE_90)
        if index != skip:
            of = name_of(index)
            image.save(folder / name.format(stem=Path(of).stem, image=of))


@pytest.fixture
def masked(images: Path, tmp_path: Path) -> Path:
    """A copy of the images with masks/ beside their folder."""
    return make_masked(images, tmp_path)


def make_masked(images: Path, root: Path) -> Path:
    shutil.copytree(images, root / "photos", copy_function=os.link)
    write_masks(root / "masks")
    return root / "photos"


@pytest.fixture(scope="module")
def masked_scene(images: Path, tmp_path_factory: pytest.TempPathFactory) -> SfmResult:
    """The scene that was made of them; not to be changed."""
    return find_cameras_of(make_masked(images, tmp_path_factory.mktemp("masked")))


def test_what_masks_hide_gives_no_features(masked: Path, tmp_path: Path) -> None:
    inputs = find_input(masked)
    for names in (inputs, find_input(masked, "none")):
        images = [
            SfmImage.of(n, masked, read_header(masked / n), names.mask(n)) for n in inputs.names[TURNED - 1 :][:2]
        ]
        database = tmp_path / f"{len(names.masks)}.db"
        stored, bad = extract(database, images, SfmOptions(), Execution())
        assert not bad
        with pycolmap.Database.open(database) as store:
            for item in stored:
                left = [point[0] < EDGE for point in store.read_keypoints(item.image_id)[:, :2]]
                assert len(left) == len(item.colours) > 30
                assert any(left) == (not names.masks)


def test_masks_go_along_and_the_scene_has_them(masked_scene: SfmResult) -> None:
    facts, folder = masked_scene.facts, masked_scene.folder
    assert (facts["registered"], facts["masks"]) == (NUM_IMAGES, NUM_IMAGES)
    names = [f"{Path(name_of(index)).stem}.png" for index in range(NUM_IMAGES)]
    assert sorted(path.name for path in (folder / "masks").iterdir()) == names
    scene = read_scene(folder, DataConfig())
    for index in (0, TURNED):
        pixels = scene.images.image(index).masked
        assert pixels is not None
        assert pixels.mean() == pytest.approx(EDGE / corner.WIDTH, abs=0.05)
        assert pixels[:, : EDGE // 2].all()


def test_a_scene_is_used_again_while_its_masks_are_the_same(
    masked: Path, masked_scene: SfmResult, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(masked_scene.folder, tmp_path / "photos-sfm", copy_function=os.link))
    assert find_cameras_of(masked).reused
    # Another place for the same masks is another name, not another scene.
    shutil.move(tmp_path / "masks", masked / "masks")
    again = find_cameras_of(masked)
    assert (again.reused, again.folder) == (True, folder)
    (folder / "masks" / f"{Path(name_of(2)).stem}.png").unlink()
    with pytest.raises(OutputError, match="images or masks in it are gone"):
        find_cameras_of(masked, place=folder)


@pytest.mark.parametrize("name", ["{stem}.png", "{image}.png"])
def test_masks_are_found_in_the_folder_beside_it_or_where_it_is_said(images: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(images, tmp_path / "scene/images", copy_function=os.link)
    assert not find_input(tmp_path / "scene").masks
    write_masks(tmp_path / "scene/cut-outs", name)
    assert not find_input(tmp_path / "scene").masks
    for root, masks in (("scene", "cut-outs"), ("scene/images", "../cut-outs")):
        found = find_input(tmp_path / root, masks)
        assert len(found.masks) == NUM_IMAGES == len(found.names)
        assert found.mask(name_of(1)).samefile(
            tmp_path / "scene/cut-outs" / name.format(stem="view 001", image=name_of(1))
        )
    (tmp_path / "scene/cut-outs").rename(tmp_path / "scene/masks")
    for root in ("scene", "scene/images"):
        assert len(find_input(tmp_path / root).masks) == NUM_IMAGES
    # Beside a project they are those of another.
    (tmp_path / "scene/masks").rename(tmp_path / "masks")
    assert not find_input(tmp_path / "scene").masks


def test_masks_that_cannot_be_right_are_refused(images: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(images, tmp_path / "photos", copy_function=os.link))
    with pytest.raises(SceneError, match="folder of masks is not there"):
        find_input(root, "nowhere")
    write_masks(root / "masks", skip=3)
    with pytest.raises(SceneError, match=r"1 of 7 images have no mask: view 003.jpg"):
        find_input(root)
    shutil.rmtree(root / "masks")
    write_masks(root / "masks")
    Image.new("L", (10, 10)).save(root / "masks/view 001.png")
    inputs = find_input(root)
    name = name_of(1)
    with pytest.raises(SceneError, match=r"the mask is 10x10 pixels, its image view 001.jpg 240x180"):
        SfmImage.of(name, root, read_header(root / name), inputs.mask(name))


def test_a_folder_of_masks_of_something_else_is_left_alone(images: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(images, tmp_path / "photos", copy_function=os.link))
    (tmp_path / "masks").mkdir()
    Image.new("L", (10, 10)).save(tmp_path / "masks/something.png")
    assert not find_input(root).masks


@pytest.mark.parametrize("flags", [["--masks", "cut-outs"], ["--set", "data.masks=cut-outs"]])
def test_train_takes_the_masks_of_images_without_cameras(
    masked: Path, masked_scene: SfmResult, capfd: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    shutil.copytree(masked_scene.folder, masked.parent / "photos-sfm", copy_function=os.link)
    shutil.move(masked.parent / "masks", masked / "cut-outs")
    words = ["train", str(masked), *flags, "-n", "2", "-r", "4", "--device", "cpu", *QUICK]
    assert command([*words, "-o", str(masked.parent / "run")]) == 0
    said = capfd.readouterr().err
    assert "cameras found before are used" in said
    assert "7 images have masks" in said
    assert json.loads((masked.parent / "run/config.json").read_text())["data"]["masks"] == "masks"
