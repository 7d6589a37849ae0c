"""What nerfstudio reads of a finished folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from splatcli.config import DataConfig
from splatcli.errors import OutputError, SceneError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.read import read_scene
from splatcli.sfm.nerfstudio import write_transforms
from tests.scene import made


def _full(path: Path, payload: bytes) -> None:
    raise OutputError("No space left on device", where=path)


@pytest.mark.parametrize("linked", [False, True])
def test_images_that_exif_turns_become_upright_copies_with_their_masks(
    tmp_path: Path, linked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nerfstudio opens images as they are stored, and takes masks of one channel and of the same size only."""
    names = [f"{i}.{ending}" for i, ending in enumerate(("jpg", "png", "tif", "webp"))]
    photos, folder = tmp_path / "photos", tmp_path / "made"
    made.write_model(folder / "sparse/0", made.reconstruction(image_names=names))
    for place in (photos, folder / "images", folder / "masks"):
        place.mkdir()
    upright = [made.picture(i) for i in range(len(names))]
    for i, name in enumerate(names):
        exif = Image.Exif()
        exif[0x0112] = 1 if i == 0 else 6
        stored = upright[i] if i == 0 else np.rot90(upright[i], 1)
        Image.fromarray(stored).save(photos / name, exif=exif, lossless=True, quality=100)
        mask = np.zeros_like(stored)
        mask[:20, :30] = 255
        Image.fromarray(mask if i == 1 else mask[..., 0]).save(photos / f"{name}.mask.png")
        for source, place in ((name, f"images/{name}"), (f"{name}.mask.png", f"masks/{name}.png")):
            if linked:
                (folder / place).symlink_to(photos / source)
            else:
                (folder / place).hardlink_to(photos / source)
    originals = {path: path.read_bytes() for path in photos.iterdir()}
    with monkeypatch.context() as full:
        full.setattr("splatcli.sfm.upright.write_bytes", _full)
        with pytest.raises(OutputError):
            write_transforms(folder)
    assert all((folder / place).is_file() for place in ("images/1.png", "masks/1.png.png")), "the links stay"
    facts = json.loads(write_transforms(folder).read_text())
    assert {path: path.read_bytes() for path in photos.iterdir()} == originals
    for i, frame in enumerate(facts["frames"]):
        assert frame["file_path"] == f"images/{names[i]}"
        found = np.asarray(Image.open(folder / frame["file_path"]))
        assert found.shape == (frame["h"], frame["w"], 3)
        assert np.abs(found.astype(int) - upright[i]).mean() < 3
        mask = np.asarray(Image.open(folder / frame["mask_path"]))
        assert mask.shape == (frame["h"], frame["w"])
        assert mask.sum() == 600 * 255
        assert mask[0, 0 if i == 0 else -1] == 255
    for reader in ("colmap", "nerfstudio"):
        scene = read_scene(folder, DataConfig(format=reader, masks="none"))
        for i in range(len(names)):
            assert np.abs(scene.images.load(i).astype(int) - upright[i]).mean() < 3
        masked = read_scene(folder, DataConfig(format=reader, masks="masks")).images
        for i in range(len(names)):
            assert (~masked.image(i).masked).sum() == 600
    again = {path: path.stat().st_mtime_ns for path in (folder / "images").iterdir()}
    write_transforms(folder)
    assert {path: path.stat().st_mtime_ns for path in (folder / "images").iterdir()} == again


def test_the_kind_of_camera_is_where_nerfstudio_reads_it(tmp_path: Path) -> None:
    """At the top of the file, for all images."""
    names = ["0.png", "deep/1.png"]
    fisheye = pycolmap.Camera.create_from_model_name(1, "OPENCV_FISHEYE", 60.0, made.WIDTH, made.HEIGHT)
    model = made.reconstruction(fisheye, image_names=names)
    made.write_model(tmp_path / "sparse/0", model)
    made.write_images(tmp_path / "images", names)
    assert json.loads(write_transforms(tmp_path).read_text())["camera_model"] == "OPENCV_FISHEYE"
    pinhole = pycolmap.Camera.create_from_model_name(2, "PINHOLE", 60.0, made.WIDTH, made.HEIGHT)
    model.add_camera_with_trivial_rig(pinhole)
    image = pycolmap.Image(name="2.png", camera_id=2, image_id=3)
    model.add_image_with_trivial_frame(image, pycolmap.Rigid3d())
    made.write_model(tmp_path / "sparse/0", model)
    with pytest.raises(SceneError, match="cameras of OPENCV and OPENCV_FISHEYE, and nerfstudio takes one kind"):
        write_transforms(tmp_path)
