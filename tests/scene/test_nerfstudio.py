"""Scenes in transforms.json: nerfstudio, instant-ngp, Blender."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from splatcli.config import DataConfig
from splatcli.errors import SceneError
from splatcli.scene.read import read_scene
from tests.cli.tiny import write_scene
from tests.scene import made


def _edit(root: Path, **top: Any) -> dict[str, Any]:
    path = root / "transforms.json"
    document = json.loads(path.read_text())
    document.update(top)
    path.write_text(json.dumps(document))
    return document


def _refused(root: Path, match: str, data: DataConfig | None = None) -> None:
    with pytest.raises(SceneError, match=match) as caught:
        read_scene(root, data or DataConfig())
    assert "transforms" in str(caught.value.where)
    assert caught.value.remedy


def test_opengl_camera_to_world_becomes_opencv_world_to_camera(tmp_path: Path) -> None:
    scene = read_scene(made.nerfstudio_scene(tmp_path), DataConfig())
    assert scene.kind == "nerfstudio"
    assert [camera.name for camera in scene.cameras] == made.names()
    for i, camera in enumerate(scene.cameras):
        np.testing.assert_allclose(camera.viewmat, made.w2c(i), atol=1e-12)
        np.testing.assert_allclose([camera.fx, camera.fy, camera.cx, camera.cy], [60, 61, 32, 24], rtol=1e-12)
        np.testing.assert_array_equal(scene.images.load(i), made.picture(i))
    assert scene.points is None
    assert scene.test == [0]


def test_a_3x4_matrix_will_do(tmp_path: Path) -> None:
    made.nerfstudio_scene(tmp_path)
    frames = _edit(tmp_path)["frames"]
    for frame in frames:
        frame["transform_matrix"] = frame["transform_matrix"][:3]
    _edit(tmp_path, frames=frames)
    np.testing.assert_allclose(read_scene(tmp_path, DataConfig()).cameras[3].viewmat, made.w2c(3), atol=1e-12)


def test_poses_with_a_scale_are_read_without_it(tmp_path: Path) -> None:
    """Matrices as Blender has them for a camera of another size: its images do not show that."""
    made.nerfstudio_scene(tmp_path)
    frames = _edit(tmp_path)["frames"]
    for frame in frames[2:]:
        matrix = np.array(frame["transform_matrix"])
        matrix[:3, :3] *= 0.2518
        frame["transform_matrix"] = matrix.tolist()
    _edit(tmp_path, frames=frames)
    scene = read_scene(tmp_path, DataConfig())
    for i, camera in enumerate(scene.cameras):
        np.testing.assert_allclose(camera.viewmat, made.w2c(i), atol=1e-12)
    assert sum("6 poses have a scale" in note for note in scene.notes) == 1
    frames[5]["transform_matrix"][0][0] *= 1.5  # the axes differ: no image could be the same
    _edit(tmp_path, frames=frames)
    _refused(tmp_path, "frame 5 .*not a rotation")


def test_the_frame_wins_over_the_top_of_the_file(tmp_path: Path) -> None:
    made.nerfstudio_scene(tmp_path)
    frames = _edit(tmp_path)["frames"]
    frames[2] |= {"fl_x": 70.0, "fl_y": 71.0, "cx": 30.0}
    frames[3] |= {"camera_angle_x": 1.0}
    _edit(tmp_path, frames=frames)
    cameras = read_scene(tmp_path, DataConfig()).cameras
    assert (cameras[1].fx, cameras[2].fx, cameras[2].fy, cameras[2].cx, cameras[2].cy) == (60, 70, 71, 30, 24)
    np.testing.assert_allclose([cameras[3].fx, cameras[3].fy], 32 / math.tan(0.5), rtol=1e-12)


def test_size_and_focal_length_follow_from_image_and_angle(tmp_path: Path) -> None:
    made.nerfstudio_scene(tmp_path, fl_x=None, fl_y=None, cx=None, cy=None, w=None, h=None, camera_angle_x=0.8)
    camera = read_scene(tmp_path, DataConfig()).cameras[0]
    focal = 32 / math.tan(0.4)
    np.testing.assert_allclose([camera.fx, camera.fy, camera.cx, camera.cy], [focal, focal, 32, 24], rtol=1e-12)


def test_an_image_of_half_the_stated_size_halves_the_intrinsics(tmp_path: Path) -> None:
    made.nerfstudio_scene(tmp_path, w=128, h=96, fl_x=120.0, fl_y=122.0, cx=64.0, cy=48.0)
    scene = read_scene(tmp_path, DataConfig())
    camera = scene.cameras[0]
    np.testing.assert_allclose([camera.fx, camera.fy, camera.cx, camera.cy], [60, 61, 32, 24], rtol=1e-12)
    assert any("intrinsics were scaled" in note for note in scene.notes)


@pytest.mark.parametrize(
    ("keys", "model"),
    [
        ({"k1": 0.1, "p1": 0.01}, "OPENCV"),
        ({"k1": 0.1, "k3": 0.01}, "FULL_OPENCV"),
        ({"camera_model": "OPENCV_FISHEYE", "k1": 0.1}, "OPENCV_FISHEYE"),
        ({"is_fisheye": True, "k1": 0.1}, "OPENCV_FISHEYE"),
        ({"distortion_params": [0.1, 0.01, 0.0, 0.0, 0.001, 0.0]}, "OPENCV"),
    ],
)
def test_distortion_is_undone(tmp_path: Path, keys: dict[str, Any], model: str) -> None:
    scene = read_scene(made.nerfstudio_scene(tmp_path, **keys), DataConfig())
    assert any(f"({model})" in note for note in scene.notes)
    camera = scene.cameras[0]
    assert scene.images.load(0).shape == (camera.height, camera.width, 3)


def test_missing_frames_are_left_out_when_most_are_there(tmp_path: Path) -> None:
    made.nerfstudio_scene(tmp_path)
    for name in made.names()[:3]:
        (tmp_path / "images" / name).unlink()
    scene = read_scene(tmp_path, DataConfig())
    assert len(scene.cameras) == 5
    assert any("3 of 8 views have no image" in note for note in scene.notes)
    (tmp_path / "images/0003.png").unlink()
    with pytest.raises(SceneError, match="4 of 8 images are missing"):
        read_scene(tmp_path, DataConfig())


def test_named_splits_are_kept(tmp_path: Path) -> None:
    made.nerfstudio_scene(
        tmp_path,
        train_filenames=[f"images/{name}" for name in made.names()[:4]],
        test_filenames=["images/0006.png", "./images/0007.png"],
    )
    scene = read_scene(tmp_path, DataConfig())
    assert (scene.train, scene.test) == ([0, 1, 2, 3], [6, 7])


def test_views_to_validate_on_are_held_out_where_none_are_to_test_on(tmp_path: Path) -> None:
    files = [f"images/{name}" for name in made.names()]
    made.nerfstudio_scene(tmp_path, train_filenames=files[:4], val_filenames=files[5:7], test_filenames=[])
    scene = read_scene(tmp_path, DataConfig())
    assert (scene.train, scene.test) == ([0, 1, 2, 3], [5, 6])
    unused = made.COUNT - 6
    assert f"{unused} views in neither train_filenames nor test_filenames are left out" in scene.notes


def test_points_of_a_ply_are_read(tmp_path: Path) -> None:
    made.nerfstudio_scene(tmp_path, ply_file_path="points.ply")
    lines = ["ply", "format ascii 1.0", "element vertex 2"]
    lines += [f"property float {axis}" for axis in "xyz"] + [f"property uchar {c}" for c in ("red", "green", "blue")]
    (tmp_path / "points.ply").write_text("\n".join([*lines, "end_header", "1 2 3 4 5 6", "7 8 9 250 251 252", ""]))
    points = read_scene(tmp_path, DataConfig()).points
    assert points is not None
    np.testing.assert_array_equal(points.xyz, np.array([[1, 2, 3], [7, 8, 9]], np.float32))
    np.testing.assert_array_equal(points.rgb, [[4, 5, 6], [250, 251, 252]])


def test_blender_scenes_have_their_own_split_and_background(tmp_path: Path) -> None:
    made.blender_scene(tmp_path)
    scene = read_scene(tmp_path, DataConfig(), background=(255, 255, 255))
    assert scene.kind == "blender"
    assert scene.points is None
    assert [scene.cameras[i].name for i in scene.test] == [f"test/r_{i}.png" for i in range(3)]
    assert [scene.cameras[i].name for i in scene.train] == [f"train/r_{i}.png" for i in range(6)]
    camera = scene.cameras[scene.train[2]]
    np.testing.assert_allclose(camera.viewmat, made.w2c(2, 6), atol=1e-12)
    np.testing.assert_allclose([camera.fx, camera.fy, camera.cx, camera.cy], [*[32 / math.tan(0.35)] * 2, 32, 24])
    exact = (made.picture(2).astype(float) * 128 + 255.0 * 127) / 255
    np.testing.assert_allclose(scene.images.load(scene.train[2]), exact, atol=0.5)
    assert any("transparency" in note for note in scene.notes)


def test_blender_without_a_test_file_holds_views_out(tmp_path: Path) -> None:
    made.blender_scene(tmp_path, train=9)
    (tmp_path / "transforms_test.json").unlink()
    scene = read_scene(tmp_path, DataConfig())
    assert scene.test == [0, 8]
    assert any("transforms_test.json is missing" in note for note in scene.notes)


@pytest.mark.parametrize(
    ("frame", "match"),
    [
        ({"transform_matrix": "x"}, "frame 2 .* not a 4x4"),
        ({"transform_matrix": [[1, 0, 0, 0]]}, "frame 2 .* not a 4x4"),
        ({"transform_matrix": [[1, 0, 0, "a"]] * 4}, "frame 2 .* not a 4x4"),
        ({"transform_matrix": [[1e400, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]}, "Infinity"),
        ({"file_path": 7}, "frame 2 has no 'file_path'"),
        ({"fl_x": "wide"}, "fl_x is 'wide'"),
        ({"camera_model": "LENTICULAR"}, "'LENTICULAR' is not known"),
        ({"camera_model": "PINHOLE", "k1": 0.1}, "PINHOLE has the distortion k1"),
    ],
)
def test_a_bad_frame_is_named(tmp_path: Path, frame: dict[str, Any], match: str) -> None:
    made.nerfstudio_scene(tmp_path)
    frames = _edit(tmp_path)["frames"]
    frames[2] |= frame
    _edit(tmp_path, frames=frames)
    _refused(tmp_path, match)


def test_an_absolute_path_inside_the_scene_is_fine(tmp_path: Path) -> None:
    made.nerfstudio_scene(tmp_path)
    frames = _edit(tmp_path)["frames"]
    frames[2]["file_path"] = str(tmp_path / "images/0002.png")
    _edit(tmp_path, frames=frames)
    assert [camera.name for camera in read_scene(tmp_path, DataConfig()).cameras] == made.names()


@pytest.mark.parametrize(
    "folder", ["C:\\Users\\me\\fox\\images\\", "/home/me/fox/images/", "../fox/images/", "/home/me/fox/"]
)
def test_images_named_by_paths_of_another_machine_are_found_in_the_scene(tmp_path: Path, folder: str) -> None:
    made.nerfstudio_scene(tmp_path)
    (tmp_path / "masks").mkdir()
    frames = _edit(tmp_path)["frames"]
    for frame, name in zip(frames, made.names(), strict=True):
        frame |= {"file_path": folder + name, "mask_path": f"D:\\fox\\masks\\{name}"}
        Image.new("L", (made.WIDTH, made.HEIGHT), 255).save(tmp_path / "masks" / name)
    _edit(tmp_path, frames=frames, test_filenames=[f"{folder}{made.names()[5]}"])
    scene = read_scene(tmp_path, DataConfig())
    assert [camera.name for camera in scene.cameras] == made.names()
    assert scene.images.has_masks
    assert scene.test == [5]
    assert any("8 images that transforms.json places outside the scene were found" in note for note in scene.notes)


@pytest.mark.parametrize("path", ["C:\\Users\\me\\0002.png", "/home/me/other/0002.png", "../other/0002.png"])
def test_one_image_of_another_machine_is_found_beside_those_of_the_scene(tmp_path: Path, path: str) -> None:
    made.nerfstudio_scene(tmp_path)
    frames = _edit(tmp_path)["frames"]
    frames[2]["file_path"] = path
    _edit(tmp_path, frames=frames)
    scene = read_scene(tmp_path, DataConfig())
    assert [camera.name for camera in scene.cameras] == made.names()
    assert any("1 image that transforms.json places outside the scene was found" in note for note in scene.notes)


def test_a_path_of_another_machine_to_nothing_in_the_scene_is_refused(tmp_path: Path) -> None:
    made.nerfstudio_scene(tmp_path)
    frames = _edit(tmp_path)["frames"]
    frames[2]["file_path"] = "/home/me/other/0002.webp"
    _edit(tmp_path, frames=frames)
    _refused(tmp_path, "frame 2 .* lies outside the scene's folder")


def test_an_image_that_is_there_outside_is_not_replaced_by_one_in_the_scene(tmp_path: Path) -> None:
    made.nerfstudio_scene(tmp_path / "scene")
    made.write_images(tmp_path / "images")
    frames = _edit(tmp_path / "scene")["frames"]
    frames[2]["file_path"] = "../images/0002.png"
    _edit(tmp_path / "scene", frames=frames)
    _refused(tmp_path / "scene", "frame 2 .* lies outside the scene's folder")


@pytest.mark.parametrize("folder", [".\\images\\", "./images\\", ""])
def test_backslashes_and_names_without_their_folder_are_fine(tmp_path: Path, folder: str) -> None:
    made.nerfstudio_scene(tmp_path)
    frames = _edit(tmp_path)["frames"]
    for frame, name in zip(frames, made.names(), strict=True):
        frame["file_path"] = folder + name
    _edit(tmp_path, frames=frames, camera_model="pinhole")
    assert [camera.name for camera in read_scene(tmp_path, DataConfig()).cameras] == made.names()


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "not valid JSON"),
        ('{"frames": [}', "not valid JSON"),
        ("[]", "no JSON object"),
        ("{}", "no list 'frames'"),
        ('{"frames": [NaN]}', "json:1:13: has NaN in place"),
    ],
)
def test_a_file_that_is_no_scene_is_refused(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "transforms.json").write_bytes(text.encode("latin-1"))
    _refused(tmp_path, match)


@pytest.mark.parametrize("place", ["inner", "one/two"])
@pytest.mark.parametrize("make", [made.nerfstudio_scene, made.blender_scene], ids=["nerfstudio", "blender"])
def test_a_scene_one_or_two_folders_down_is_found(tmp_path: Path, place: str, make: Any) -> None:
    make(tmp_path / place)
    (tmp_path / ".cache/inner").mkdir(parents=True)
    (tmp_path / ".cache/inner/transforms.json").write_text("{}")
    scene = read_scene(tmp_path, DataConfig())
    assert scene.root == tmp_path / place
    assert scene.notes[0] == f"the scene in {place}/ is used"
    assert scene.images.load(0).shape == (made.HEIGHT, made.WIDTH, 3)


def test_of_several_scenes_below_one_has_to_be_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        made.nerfstudio_scene(tmp_path / name)
    with pytest.raises(SceneError, match="has several scenes: a, b"):
        read_scene(tmp_path, DataConfig())
    made.nerfstudio_scene(tmp_path / "c/d/too_deep")
    assert read_scene(tmp_path / "c", DataConfig()).root == tmp_path / "c/d/too_deep"
    with pytest.raises(SceneError, match=r"has several scenes: a, b\n"):
        read_scene(tmp_path, DataConfig())


@pytest.mark.parametrize("size", [0.0045, 0.0053, 0.05])
def test_a_small_scene_far_from_the_origin_is_moved_before_it_is_float32(tmp_path: Path, size: float) -> None:
    """Also where the spread of all cameras is within rounding of such coordinates, and that of the training views not.

    Smaller ones are refused, unless --scene-extent says that they are no point.
    """
    places = []
    for name, origin in (("here", np.zeros(3)), ("utm", np.array([451_234.5, 5_412_345.25, 120.0]))):
        root = write_scene(tmp_path / name)
        transforms = json.loads((root / "transforms.json").read_text())
        for frame in transforms["frames"]:
            pose = np.array(frame["transform_matrix"])
            pose[:3, 3] = pose[:3, 3] * size / 3 + origin
            frame["transform_matrix"] = pose.tolist()
        (root / "transforms.json").write_text(json.dumps(transforms))
        if size < 0.005 and name == "utm":
            with pytest.raises(SceneError, match=r"one point up to 0.005 units, which may be rounding .* 5e\+06"):
                read_scene(root, DataConfig())
        scene = read_scene(root, DataConfig(scene_extent=1.1 * size))
        assert (np.abs(scene.offset - origin) <= size).all()
        places.append(np.stack([camera.center for camera in scene.cameras]) + (scene.offset - origin))
        if size > 0.005:
            assert read_scene(root, DataConfig()).offset.any() == (name == "utm")
    np.testing.assert_allclose(places[1], places[0], atol=1e-8)
