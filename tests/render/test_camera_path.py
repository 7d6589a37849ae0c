"""Camera paths that are written are those that are read, and hold what nerfstudio asks of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.spatial.transform import Rotation

from splatcli.errors import UsageError
from splatcli.render.camera_files import camera_path_json, read_camera_file
from splatcli.scene.camera import Camera


def views(count: int) -> list[Camera]:
    rng = np.random.default_rng(3)
    cameras = []
    for index in range(count):
        viewmat = np.eye(4)
        viewmat[:3, :3] = Rotation.from_rotvec(rng.normal(size=3)).as_matrix()
        viewmat[:3, 3] = rng.normal(size=3)
        cameras.append(Camera(f"{index:05d}", 64, 48, 50.0 + index, 50.0 + index, 32.0, 24.0, viewmat))
    return cameras


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    cameras = views(7)
    text, notes = camera_path_json(cameras, 24.0)
    assert notes == []
    path = tmp_path / "camera_path.json"
    path.write_text(text)
    found = read_camera_file(path)
    assert found.fps == 24.0
    assert len(found.cameras) == 7
    for before, after in zip(cameras, found.cameras, strict=True):
        assert (before.name, before.width, before.height) == (after.name, after.width, after.height)
        assert_allclose([after.fx, after.fy, after.cx, after.cy], [before.fx, before.fy, 32.0, 24.0], rtol=1e-12)
        assert_allclose(after.viewmat, before.viewmat, atol=1e-12)


def test_poses_are_camera_to_world_with_y_up_and_z_back() -> None:
    """A camera at (1, 2, 3) that looks along +z of the world, whose y points down."""
    viewmat = np.eye(4)
    viewmat[:3, 3] = [-1.0, -2.0, -3.0]
    camera = Camera("a", 200, 100, 50.0, 50.0, 100.0, 50.0, viewmat)
    document = json.loads(camera_path_json([camera], 30.0)[0])
    entry = document["camera_path"][0]
    assert entry["camera_to_world"] == [1, 0, 0, 1, 0, -1, 0, 2, 0, 0, -1, 3, 0, 0, 0, 1]
    assert math.isclose(entry["fov"], 90.0)  # 100 pixels high at a focal length of 50
    assert entry["aspect"] == 2.0
    assert (document["render_width"], document["render_height"]) == (200, 100)
    assert math.isclose(document["seconds"], 1 / 30)
    assert document["camera_type"] == "perspective"


def test_a_fisheyes_path_has_its_type_and_other_models_are_refused(tmp_path: Path) -> None:
    cameras = [replace(camera, model="fisheye") for camera in views(2)]
    text, notes = camera_path_json(cameras, 24.0)
    assert (json.loads(text)["camera_type"], notes) == ("fisheye", [])
    (tmp_path / "camera_path.json").write_text(text)
    for before, after in zip(cameras, read_camera_file(tmp_path / "camera_path.json").cameras, strict=True):
        assert (after.model, after.fx) == ("fisheye", pytest.approx(before.fx))
    for model, said in (("ortho", "views are fisheye and ortho"), ("pinhole", "views are fisheye and pinhole")):
        with pytest.raises(UsageError, match=said):
            camera_path_json([cameras[0], replace(cameras[1], model=model)], 24.0)
    with pytest.raises(UsageError, match="perspective or fisheye, and the views are ortho"):
        camera_path_json([replace(cameras[0], model="ortho")], 24.0)


def test_a_note_counts_cameras_that_a_path_cannot_hold() -> None:
    cameras = views(3)
    cameras[1] = replace(cameras[1], cx=35.0)
    cameras[2] = replace(cameras[2], fx=60.0)
    (note,) = camera_path_json(cameras, 30.0)[1]
    assert "unlike 2 of the views" in note
    cameras[0] = replace(cameras[0], width=65)
    with pytest.raises(UsageError, match="views have 2") as caught:
        camera_path_json(cameras, 30.0)
    assert "--size 65x48" in str(caught.value.remedy)
