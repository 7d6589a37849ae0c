"""Resolutions: what size images and cameras get, and that both get the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from splatcli.config import DataConfig
from splatcli.errors import SceneError, UsageError
from splatcli.scene import fit_images
from splatcli.scene.fit_images import training_size
from splatcli.scene.read import read_scene
from tests.scene import made


@pytest.mark.parametrize(
    ("size", "resolution", "wanted"),
    [
        ((1600, 1200), None, (1600, 1200)),
        ((5187, 3361), None, (1600, 1036)),
        ((1000, 9000), None, (1000, 9000)),
        ((5187, 3361), 1, (5187, 3361)),
        ((5187, 3361), 2, (2594, 1680)),
        ((5187, 3361), 4, (1297, 840)),
        ((5187, 3361), 8, (648, 420)),
        ((5187, 3361), 800, (800, 518)),
        ((640, 480), 800, (640, 480)),
        ((3, 2), 8, (1, 1)),
    ],
)
def test_sizes_are_inrias(size: tuple[int, int], resolution: float | None, wanted: tuple[int, int]) -> None:
    assert training_size(*size, resolution) == wanted


def test_a_mistaken_divisor_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="3 pixels wide"):
        read_scene(tmp_path, DataConfig(resolution=3))


@pytest.mark.parametrize(("resolution", "size"), [(2, (32, 24)), (4, (16, 12)), (48, (48, 36)), (30, (30, 22))])
def test_camera_and_image_shrink_together(tmp_path: Path, resolution: float, size: tuple[int, int]) -> None:
    scene = read_scene(made.colmap_scene(tmp_path), DataConfig(resolution=resolution))
    camera = scene.cameras[3]
    assert (camera.width, camera.height) == size
    sx, sy = size[0] / made.WIDTH, size[1] / made.HEIGHT
    np.testing.assert_allclose([camera.fx, camera.fy, camera.cx, camera.cy], [60 * sx, 61 * sy, 32 * sx, 24 * sy])
    image = scene.images.load(3)
    assert image.shape == (size[1], size[0], 3)
    assert image.flags.c_contiguous
    # The waves are slow: the mean of the area that a pixel covers is near what Lanczos finds.
    area = np.asarray(Image.fromarray(made.picture(3)).resize(size, Image.Resampling.BOX)).astype(int)
    assert np.abs(image - area).mean() < 3
    assert not any("reduced" in note for note in scene.notes), "a size that was asked for needs no note"


def test_a_size_that_nobody_asked_for_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_images, "MAX_WIDTH", 40)
    scene = read_scene(made.colmap_scene(tmp_path), DataConfig())
    assert scene.cameras[0].width == 40
    assert any(note.startswith("8 images are reduced to") for note in scene.notes)


def test_a_full_folder_of_smaller_copies_is_used(tmp_path: Path) -> None:
    made.colmap_scene(tmp_path)
    # One row less than half: copies are often cut rather than rounded.
    made.write_images(tmp_path / "images_2", size=(32, 23))
    scene = read_scene(tmp_path, DataConfig(resolution=2))
    np.testing.assert_array_equal(scene.images.load(4), made.picture(4, 32, 23))
    assert scene.cameras[4].height == 23
    np.testing.assert_allclose([scene.cameras[4].fx, scene.cameras[4].fy], [30, 61 * 23 / 48])
    assert any("images_2/ are used" in note for note in scene.notes)


def test_an_incomplete_folder_of_smaller_copies_is_not_used(tmp_path: Path) -> None:
    made.colmap_scene(tmp_path)
    made.write_images(tmp_path / "images_2", made.names()[:7], size=(32, 24))
    scene = read_scene(tmp_path, DataConfig(resolution=2))
    assert scene.images.sources[0].path.parent.name == "images"
    assert any("images_2/ lacks 1 image" in note for note in scene.notes)


def test_the_scene_beside_this_one_holds_no_smaller_copies(tmp_path: Path) -> None:
    for name in ("scan", "scan_2"):
        made.write_model(tmp_path / name / "sparse/0", made.reconstruction())
        made.write_images(tmp_path / name)
    scene = read_scene(tmp_path / "scan", DataConfig(resolution=2))
    assert {source.path.parent.name for source in scene.images.sources} == {"scan"}


@pytest.mark.parametrize("size", [{}, {"w": None, "h": None}, {"h": None}], ids=["size", "no-size", "width-only"])
def test_smaller_copies_serve_transforms_too(tmp_path: Path, size: dict[str, None]) -> None:
    """Intrinsics are those of the full-size images, whose size a file may leave out."""
    made.nerfstudio_scene(tmp_path, **size)
    made.write_images(tmp_path / "images_4", size=(16, 12))
    scene = read_scene(tmp_path, DataConfig(resolution=4))
    np.testing.assert_array_equal(scene.images.load(1), made.picture(1, 16, 12))
    camera = scene.cameras[1]
    np.testing.assert_allclose([camera.fx, camera.fy, camera.cx, camera.cy], [15, 61 / 4, 8, 6])


def test_images_of_another_size_and_the_same_shape_scale_the_intrinsics(tmp_path: Path) -> None:
    made.colmap_scene(tmp_path)
    made.write_images(tmp_path / "images", made.names()[:3], size=(128, 96))
    scene = read_scene(tmp_path, DataConfig())
    assert [camera.width for camera in scene.cameras] == [128] * 3 + [64] * 5
    np.testing.assert_allclose([scene.cameras[0].fx, scene.cameras[0].cy], [120, 48])
    assert any("3 images differ in size" in note for note in scene.notes)


def test_images_of_another_shape_are_an_error_with_both_sizes(tmp_path: Path) -> None:
    made.colmap_scene(tmp_path)
    made.write_images(tmp_path / "images", ["0005.png"], size=(64, 60))
    with pytest.raises(SceneError, match="64x60 pixels, its camera 64x48") as caught:
        read_scene(tmp_path, DataConfig())
    assert "0005.png" in str(caught.value.where)


def test_images_turned_by_exif_are_turned_back(tmp_path: Path) -> None:
    made.colmap_scene(tmp_path)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.rot90(made.picture(5)).copy()).save(tmp_path / "images/0005.png", exif=exif)
    scene = read_scene(tmp_path, DataConfig())
    np.testing.assert_array_equal(scene.images.load(5), made.picture(5))
    assert any("1 image was turned" in note for note in scene.notes)


def test_images_turned_without_exif_are_an_error(tmp_path: Path) -> None:
    made.colmap_scene(tmp_path)
    Image.fromarray(np.rot90(made.picture(5)).copy()).save(tmp_path / "images/0005.png")
    with pytest.raises(SceneError, match=r"48x64 pixels, its camera 64x48.*\n.*quarter"):
        read_scene(tmp_path, DataConfig())
