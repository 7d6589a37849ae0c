"""Masks: found by COLMAP's and nerfstudio's names, checked, and laid on the image exactly."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from splatcli.config import DataConfig
from splatcli.errors import SceneError, SplatError
from splatcli.scene.camera import Camera
from splatcli.scene.images import ImageSource
from splatcli.scene.masks import reduce_mask, resample_mask
from splatcli.scene.read import read_scene
from splatcli.scene.scene import Scene
from splatcli.scene.undistort import sampling_grid
from tests.scene import made


def kept(i: int, width: int = made.WIDTH, height: int = made.HEIGHT) -> NDArray[np.bool_]:
    """[H, W] what the i-th mask lets count: blocks of four pixels, at random."""
    blocks = np.random.default_rng(i).integers(0, 2, (height // 4, width // 4)).astype(bool)
    return blocks.repeat(4, axis=0).repeat(4, axis=1)


def write_masks(folder: Path, name: str = "{}.png", count: int = made.COUNT) -> None:
    for i, image in enumerate(made.names()[:count]):
        path = folder / name.format(image)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(kept(i).astype(np.uint8) * np.uint8(255)).save(path)


def assert_masked(scene: Scene, i: int, visible: NDArray[np.bool_]) -> None:
    image = scene.images.image(i)
    assert image.masked is not None
    np.testing.assert_array_equal(image.masked, ~visible)
    np.testing.assert_array_equal(image.pixels, made.picture(i) * visible[..., None])


@pytest.mark.parametrize("name", ["{}.png", "{}", "sub/{}.png"])
def test_masks_beside_the_images_are_found_by_name(tmp_path: Path, name: str) -> None:
    made.colmap_scene(tmp_path)
    write_masks(tmp_path / ("masks" if name != "sub/{}.png" else "elsewhere"), name)
    masks = None if name != "sub/{}.png" else "elsewhere/sub"
    scene = read_scene(tmp_path, DataConfig(masks=masks))
    assert scene.images.masked
    assert any("8 images have masks" in note for note in scene.notes)
    for i in range(made.COUNT):
        assert_masked(scene, i, kept(i))


def test_names_that_are_too_long_for_another_ending_have_masks(tmp_path: Path) -> None:
    names = [f"{i}{'x' * 250}.png" for i in range(made.COUNT)]
    made.write_model(tmp_path / "sparse/0", made.reconstruction(image_names=names))
    for folder in ("images", "masks"):
        made.write_images(tmp_path / folder, names)
    scene = read_scene(tmp_path, DataConfig())
    assert [source.mask for source in scene.images.sources] == [tmp_path / "masks" / name for name in sorted(names)]


def test_a_store_knows_what_it_has_without_a_look_at_each_source(tmp_path: Path) -> None:
    """Scores ask for every view: a thousand views must not be a million looks."""

    class Sources(list[ImageSource]):
        looks = 0

        def __iter__(self) -> Iterator[ImageSource]:
            Sources.looks += 1
            return super().__iter__()

    made.colmap_scene(tmp_path)
    write_masks(tmp_path / "masks")
    images = read_scene(tmp_path, DataConfig()).images
    store = images.of(Sources(images.sources))
    before = Sources.looks
    for _ in range(5):
        assert (store.masked, store.has_masks, store.has_depths) == (True, True, False)
    assert Sources.looks == before


@pytest.mark.parametrize("name", ["{}_mask.png", "{}.mask.png", "{}_mask.jpg"])
@pytest.mark.parametrize("ending", ["", ".png"])
def test_masks_that_their_names_call_so_are_found(tmp_path: Path, name: str, ending: str) -> None:
    made.colmap_scene(tmp_path)
    (tmp_path / "masks").mkdir()
    for i, image in enumerate(made.names()):
        mask = Image.fromarray(kept(i).astype(np.uint8) * np.uint8(255))
        mask.save(tmp_path / "masks" / name.format(Path(image).stem + ending), quality=95)
    scene = read_scene(tmp_path, DataConfig())
    for i in range(made.COUNT):
        assert_masked(scene, i, kept(i))


def test_a_folder_without_masks_of_these_images_says_how_they_are_named(tmp_path: Path) -> None:
    made.colmap_scene(tmp_path)
    write_masks(tmp_path / "masks", "mask-of-{}.png")
    notes = read_scene(tmp_path, DataConfig()).notes
    assert any("that of 0000.png would be 0000.png.png, 0000.png or 0000_mask.png" in note for note in notes)


@pytest.mark.parametrize(("name", "noted"), [("mask", True), ("Masks", True), ("masquerade", False)])
def test_a_folder_named_almost_as_that_of_masks_is_noted(tmp_path: Path, name: str, noted: bool) -> None:
    made.colmap_scene(tmp_path)
    write_masks(tmp_path / name)
    note = f"{name}/ is not used; masks lie in masks/, or in --masks {name}"
    assert (note in read_scene(tmp_path, DataConfig()).notes) == noted
    assert note not in read_scene(tmp_path, DataConfig(masks="none")).notes
    assert read_scene(tmp_path, DataConfig(masks=name)).images.masked


def test_masks_of_images_in_folders(tmp_path: Path) -> None:
    names = [f"cam{i % 2}/{name}" for i, name in enumerate(made.names())]
    made.write_model(tmp_path / "sparse/0", made.reconstruction(image_names=names))
    made.write_images(tmp_path / "images", names)
    for i, name in enumerate(names):
        path = tmp_path / "masks" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(kept(i).astype(np.uint8)).save(path)
    scene = read_scene(tmp_path, DataConfig())
    for view, camera in enumerate(scene.cameras):
        masked = scene.images.image(view).masked
        assert masked is not None
        np.testing.assert_array_equal(masked, ~kept(names.index(camera.name)))


def test_without_masks_nothing_is_hidden(tmp_path: Path) -> None:
    made.colmap_scene(tmp_path)
    assert read_scene(tmp_path, DataConfig()).images.image(0).masked is None
    write_masks(tmp_path / "masks")
    scene = read_scene(tmp_path, DataConfig(masks="none"))
    assert not scene.images.masked
    assert scene.images.image(0).masked is None


def nerfstudio_masks(root: Path, count: int = made.COUNT) -> Path:
    made.nerfstudio_scene(root)
    write_masks(root / "masks")
    document = json.loads((root / "transforms.json").read_text())
    for i, frame in enumerate(document["frames"][:count]):
        frame["mask_path"] = f"masks/{made.names()[i]}.png"
    (root / "transforms.json").write_text(json.dumps(document))
    return root


def test_masks_that_transforms_name(tmp_path: Path) -> None:
    scene = read_scene(nerfstudio_masks(tmp_path), DataConfig())
    for i in range(made.COUNT):
        assert_masked(scene, i, kept(i))


def test_masks_that_transforms_name_for_some_frames_only(tmp_path: Path) -> None:
    with pytest.raises(SceneError, match=r"2 problems"):
        read_scene(nerfstudio_masks(tmp_path, 6), DataConfig())


def test_masks_that_transforms_name_and_the_disk_lacks(tmp_path: Path) -> None:
    nerfstudio_masks(tmp_path)
    (tmp_path / "masks/0002.png.png").unlink()
    with pytest.raises(SceneError, match=r"frame 2 .*its mask masks/0002.png.png is not there"):
        read_scene(tmp_path, DataConfig())


def test_a_mask_outside_the_scene_is_refused(tmp_path: Path) -> None:
    nerfstudio_masks(tmp_path)
    text = (tmp_path / "transforms.json").read_text()
    (tmp_path / "transforms.json").write_text(text.replace("masks/0002.png.png", "../../secret.png"))
    with pytest.raises(SceneError, match="outside"):
        read_scene(tmp_path, DataConfig())


def test_a_reduced_pixel_is_hidden_when_any_of_its_area_is(tmp_path: Path) -> None:
    made.colmap_scene(tmp_path)
    write_masks(tmp_path / "masks")
    scene = read_scene(tmp_path, DataConfig(resolution=8))
    for i in range(3):
        areas = kept(i).reshape(made.HEIGHT // 8, 8, made.WIDTH // 8, 8).all(axis=(1, 3))
        image = scene.images.image(i)
        assert image.masked is not None
        np.testing.assert_array_equal(image.masked, ~areas)
        assert not image.pixels[image.masked].any()


def test_one_hidden_pixel_hides_the_pixel_that_it_is_reduced_to() -> None:
    masked = np.zeros((1000, 1500), bool)
    masked[499, 777] = True
    reduced = reduce_mask(masked, (150, 100))
    assert reduced.sum() == 1
    assert reduced[49, 77]


def test_masks_of_smaller_copies(tmp_path: Path) -> None:
    made.colmap_scene(tmp_path)
    made.write_images(tmp_path / "images_2", size=(32, 24))
    write_masks(tmp_path / "masks")
    halves = kept(3)[::2, ::2]
    scene = read_scene(tmp_path, DataConfig(resolution=2))
    np.testing.assert_array_equal(scene.images.image(3).masked, ~halves)
    (tmp_path / "masks_2").mkdir()
    for name in made.names():
        Image.fromarray(np.zeros((24, 32), np.uint8)).save(tmp_path / "masks_2" / f"{name}.png")
    masked = read_scene(tmp_path, DataConfig(resolution=2)).images.image(3).masked
    assert masked is not None
    assert masked.all()


@pytest.mark.parametrize("stored", [True, False], ids=["mask as stored", "mask upright"])
def test_masks_turn_with_their_images(tmp_path: Path, stored: bool) -> None:
    made.colmap_scene(tmp_path)
    write_masks(tmp_path / "masks")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.rot90(made.picture(5)).copy()).save(tmp_path / "images/0005.png", exif=exif)
    if stored:
        turned = np.rot90(kept(5)).astype(np.uint8)
        Image.fromarray(np.ascontiguousarray(turned)).save(tmp_path / "masks/0005.png.png")
    assert_masked(read_scene(tmp_path, DataConfig()), 5, kept(5))


def test_masks_go_through_the_lens_with_their_images(tmp_path: Path) -> None:
    lens = made.lens("OPENCV", [60.0, 61.0, 32.0, 24.0, 0.1, -0.02, 0.001, 0.002])
    made.colmap_scene(tmp_path, camera=lens)
    white, half = np.full((made.HEIGHT, made.WIDTH), 255, np.uint8), np.zeros((made.HEIGHT, made.WIDTH), np.uint8)
    half[:, : made.WIDTH // 2] = 255
    (tmp_path / "masks").mkdir()
    for i, name in enumerate(made.names()):
        Image.fromarray(half if i else white).save(tmp_path / "masks" / f"{name}.png")
    scene = read_scene(tmp_path, DataConfig())
    open_view, half_view = scene.images.image(0), scene.images.image(1)
    assert open_view.masked is not None
    assert not open_view.masked.any()
    assert half_view.masked is not None
    assert half_view.pixels.shape[:2] == half_view.masked.shape
    # Where the lens looks left of its middle by more than half a pixel, all that it mixes counts.
    x = (sampling_grid(lens, scene.cameras[1])[0, ..., 0].numpy() + 1) * made.WIDTH / 2
    np.testing.assert_array_equal(half_view.masked, x > made.WIDTH / 2 - 0.5 + 1e-3)
    assert 0.3 < half_view.masked.mean() < 0.7


def test_a_resampled_pixel_is_hidden_when_a_hidden_one_touches_it() -> None:
    lens = made.lens("OPENCV", [60.0, 61.0, 32.0, 24.0, 0.1, 0.0, 0.0, 0.0])
    masked = np.zeros((made.HEIGHT, made.WIDTH), bool)
    masked[10, 20] = True
    camera = Camera("a", made.WIDTH, made.HEIGHT, 60.0, 61.0, 32.0, 24.0, np.eye(4))
    seen = resample_mask(masked, sampling_grid(lens, camera))
    assert 1 <= seen.sum() <= 9


def test_alpha_as_the_mask(tmp_path: Path) -> None:
    made.colmap_scene(tmp_path)
    for i, name in enumerate(made.names()[:4]):
        alpha = np.where(kept(i), 128, 127).astype(np.uint8)
        Image.fromarray(np.dstack([made.picture(i), alpha])).save(tmp_path / "images" / name)
    scene = read_scene(tmp_path, DataConfig(masks="alpha"))
    assert any("4 images have transparency; what is transparent takes no part" in note for note in scene.notes)
    for i in range(4):
        assert_masked(scene, i, kept(i))
    assert scene.images.image(5).masked is None
    blended = read_scene(tmp_path, DataConfig()).images.image(0)
    assert blended.masked is None


def test_masks_count_in_the_fingerprint(tmp_path: Path) -> None:
    made.colmap_scene(tmp_path)
    plain = read_scene(tmp_path, DataConfig()).fingerprint()
    write_masks(tmp_path / "masks")
    masked = read_scene(tmp_path, DataConfig()).fingerprint()
    assert "masks" not in plain
    assert {**masked, "masks": None} == {**plain, "masks": None}
    Image.fromarray(np.zeros((made.HEIGHT, made.WIDTH), np.uint8)).save(tmp_path / "masks/0001.png.png")
    assert read_scene(tmp_path, DataConfig()).fingerprint()["masks"] != masked["masks"]


def test_images_hidden_altogether_are_reported_once_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made.colmap_scene(tmp_path)
    (tmp_path / "masks").mkdir()
    for name in made.names():
        Image.fromarray(np.zeros((made.HEIGHT, made.WIDTH), np.uint8)).save(tmp_path / "masks" / f"{name}.png")
    scene = read_scene(tmp_path, DataConfig(cache_bytes=1))
    with caplog.at_level(logging.WARNING, logger="splatcli"):
        for i in [0, 0, *range(made.COUNT)]:
            scene.images.load(i)
    assert [record.getMessage().count("none of its pixels counts") for record in caplog.records] == [1] * 5
    assert "0000.png" in caplog.records[0].getMessage()


def test_a_damaged_mask_is_an_error(tmp_path: Path) -> None:
    made.colmap_scene(tmp_path)
    write_masks(tmp_path / "masks")
    path = tmp_path / "masks/0002.png.png"
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(SplatError, match=r"0002.png.png: the image is damaged"):
        read_scene(tmp_path, DataConfig(strict=True))
    with pytest.raises(SceneError, match="damaged"):
        read_scene(tmp_path, DataConfig()).images.load(2)
