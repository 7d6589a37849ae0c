"""``--views``: with and without a value, by name and from files of four layouts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.spatial.transform import Rotation

from splatcli.cli.render import _complete_views
from splatcli.errors import SceneError, UsageError
from splatcli.render.camera_files import cameras_json, read_cameras
from splatcli.render.selection import KnownCameras, PathOptions, Views, select_views
from splatcli.scene.camera import Camera
from splatcli.scene.georeference import write_sidecar
from tests.cli.tiny import QUICK, look_at_origin, write_scene
from tests.running import Splat


def camera(name: str = "a/b.png", angle: float = 0.3) -> Camera:
    c2w = look_at_origin(angle) @ np.diag([1.0, -1.0, -1.0, 1.0])
    return Camera(name, 40, 30, 41.5, 40.25, 19.5, 15.25, np.linalg.inv(c2w))


def assert_same(left: Camera, right: Camera) -> None:
    assert (left.width, left.height) == (right.width, right.height)
    assert_allclose([left.fx, left.fy, left.cx, left.cy], [right.fx, right.fy, right.cx, right.cy], rtol=1e-12)
    assert_allclose(left.viewmat, right.viewmat, atol=1e-12)


@pytest.mark.parametrize(
    ("words", "full"),
    [
        (["--views"], ["--views", "test"]),
        (["--views", "-o", "x"], ["--views", "test", "-o", "x"]),
        (["--views", "train"], ["--views", "train"]),
        (["--views=all", "m"], ["--views=all", "m"]),
        (["--views", "tset"], ["--views", "tset"]),
        (["--", "--views"], ["--", "--views"]),
        (["m", "--views", "--json"], ["m", "--views", "test", "--json"]),
        (["m", "--views", ""], ["m", "--views", ""]),
    ],
)
def test_views_may_stand_alone(words: list[str], full: list[str]) -> None:
    assert _complete_views(words) == full


def test_a_model_behind_bare_views_is_the_model(tmp_path: Path) -> None:
    path = tmp_path / "x.ply"
    path.touch()
    assert _complete_views(["--views", str(path)]) == ["--views", "test", str(path)]
    for name in ("x.json", "x.JPG", "x.heic"):
        file = tmp_path / name
        file.touch()
        assert _complete_views(["--views", str(file)]) == ["--views", str(file)]


def test_names_choose_from_the_run() -> None:
    cameras = [camera(str(i)) for i in range(4)]
    assert select_views("all", KnownCameras(cameras, [1, 2, 3], [0])).cameras == cameras
    assert select_views("test", KnownCameras(cameras, [1, 2, 3], [0])).cameras == [cameras[0]]
    assert select_views("train", KnownCameras(cameras, [1, 2, 3], [0])).from_run


@pytest.mark.parametrize(
    ("text", "cameras", "message"),
    [("test", [], "no cameras"), ("test", [camera()], "no held-out views"), ("tset", [camera()], "names no views")],
)
def test_views_that_are_not_there_are_an_error(text: str, cameras: list[Camera], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        select_views(text, KnownCameras(cameras, [0] if cameras else []))


FOLDERS = ("left/0001.jpg", "left/0002.jpg", "right/0001.jpg", "right/0003.png", "a,b.jpg")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("right/0001.jpg", ["right/0001.jpg"]),
        ("left/0001", ["left/0001.jpg"]),
        ("0003.png, 0002,left/0002.jpg", ["right/0003.png", "left/0002.jpg"]),
        ("/data/scene/images/right/0001.jpg", ["right/0001.jpg"]),
        ("a,b.jpg", ["a,b.jpg"]),
    ],
)
def test_images_choose_views_in_the_order_given(text: str, names: list[str]) -> None:
    views = select_views(text, KnownCameras([camera(name) for name in FOLDERS], [1, 2, 3], [0]))
    assert [one.name for one in views.cameras] == names
    assert views.from_run


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0001.jpg", "names 2 views.*name one with its folder: left/0001.jpg, right/0001.jpg"),
        ("0001", "names 2 views"),
        ("right/0003.jpg", "names no views.*did you mean right/0003.png or"),
        ("0002.jpeg", "did you mean left/0002.jpg"),
        ("left/0002.jpg,tset", "'tset' names no views, and no image of one of the 5.*did you mean test"),
        ("left/0002.jpg,", "'' names no views"),
        ("test,train", "test stands alone.*all has test and train"),
        ("left/0002.jpg,orbit", "orbit stands alone"),
        ("xyz", "images with commas: left/0001.jpg, left/0002.jpg, right/0001.jpg, right/0003.png, a,b.jpg$"),
    ],
)
def test_images_of_no_view_are_an_error_with_near_names(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"(?s){message}"):
        select_views(text, KnownCameras([camera(name) for name in FOLDERS], [1, 2, 3], [0]))


def test_our_own_cameras_come_back_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "cameras.json"
    before = [camera("a.png", 0.1), replace(camera("ä ö.png", 2.0), model="ortho")]
    path.write_text(cameras_json(before), encoding="utf-8")
    after = read_cameras(path)
    assert [(c.name, c.model) for c in after] == [("a.png", "pinhole"), ("ä ö.png", "ortho")]
    assert "model" not in json.loads(path.read_text(encoding="utf-8"))["cameras"][0], "older versions wrote none"
    for left, right in zip(before, after, strict=True):
        assert (left.fx, left.fy, left.cx, left.cy) == (right.fx, right.fy, right.cx, right.cy)
        assert np.array_equal(left.viewmat, right.viewmat)


def test_inria_cameras(tmp_path: Path) -> None:
    expected = Camera("DSC0", 40, 30, 41.5, 40.25, 20.0, 15.0, camera().viewmat)
    c2w = np.linalg.inv(expected.viewmat)
    entry = {"id": 0, "img_name": "DSC0", "width": 40, "height": 30, "fx": 41.5, "fy": 40.25}
    entry |= {"position": c2w[:3, 3].tolist(), "rotation": c2w[:3, :3].tolist()}
    path = tmp_path / "cameras.json"
    path.write_text(json.dumps([entry]))
    (found,) = read_cameras(path)
    assert found.name == "DSC0"
    assert_same(found, expected)


def test_transforms(tmp_path: Path) -> None:
    path = tmp_path / "transforms.json"
    frames = [
        {"file_path": "./images/0.png", "transform_matrix": look_at_origin(0.3).tolist()},
        {"file_path": "images/1.png", "transform_matrix": look_at_origin(0.3).tolist(), "fl_x": 50.0, "cx": 7.0},
    ]
    path.write_text(
        json.dumps({"w": 40, "h": 30, "fl_x": 41.5, "fl_y": 40.25, "cx": 19.5, "cy": 15.25, "frames": frames})
    )
    first, second = read_cameras(path)
    assert first.name == "images/0.png"
    assert_same(first, camera())
    assert (second.fx, second.cx) == (50.0, 7.0)


@pytest.mark.parametrize(
    ("keys", "model"),
    [
        ({"camera_model": "OPENCV"}, "pinhole"),
        ({"camera_model": "OPENCV_FISHEYE", "k1": 0.1}, "fisheye"),
        ({"is_fisheye": True}, "fisheye"),
        ({"camera_model": "ORTHOPHOTO"}, "ortho"),
    ],
)
def test_transforms_name_the_model(tmp_path: Path, keys: dict[str, object], model: str) -> None:
    path = tmp_path / "transforms.json"
    frames = [{"file_path": "0.png", "transform_matrix": look_at_origin(0.3).tolist()}]
    path.write_text(json.dumps({"w": 40, "h": 30, "fl_x": 41.5, "frames": frames, **keys}))
    (found,) = read_cameras(path)
    assert (found.model, found.fx) == (model, 41.5)


def test_blender_transforms_with_a_size(tmp_path: Path) -> None:
    path = tmp_path / "transforms.json"
    angle = 2 * math.atan(40 / 2 / 41.5)
    frames = [{"file_path": "r_0", "transform_matrix": look_at_origin(0.3).tolist()}]
    expected = Camera("r_0", 40, 30, 41.5, 41.5, 20.0, 15.0, camera().viewmat)
    path.write_text(json.dumps({"w": 40, "h": 30, "camera_angle_x": angle, "frames": frames}))
    assert_same(read_cameras(path, (8, 6))[0], expected)
    # Blender's scripts write no size.
    path.write_text(json.dumps({"camera_angle_x": angle, "frames": frames}))
    assert_same(read_cameras(path, (40, 30))[0], expected)
    with pytest.raises(SceneError, match="'w' is missing") as error:
        read_cameras(path)
    assert "--size 800x800" in str(error.value.remedy)


@pytest.mark.parametrize(
    "shared", [{"fl_x": 50.0}, {"fl_x": 50.0, "fl_y": 60.0}, {"fl_y": 60.0}, {"camera_angle_y": 1}]
)
def test_an_angle_of_a_frame_replaces_all_focal_lengths_of_the_file(shared: dict[str, float], tmp_path: Path) -> None:
    path = tmp_path / "transforms.json"
    angle = 2 * math.atan(40 / 2 / 41.5)
    frames = [{"file_path": "r_0", "transform_matrix": look_at_origin(0.3).tolist(), "camera_angle_x": angle}]
    path.write_text(json.dumps({"w": 40, "h": 30, **shared, "frames": frames}))
    (found,) = read_cameras(path)
    assert_same(found, Camera("r_0", 40, 30, 41.5, 41.5, 20.0, 15.0, camera().viewmat))


def test_nerfstudio_camera_path(tmp_path: Path) -> None:
    path = tmp_path / "path.json"
    fov = math.degrees(2 * math.atan(30 / 2 / 41.5))
    poses = [{"camera_to_world": look_at_origin(0.3).reshape(-1).tolist(), "fov": fov, "aspect": 4 / 3}]
    path.write_text(json.dumps({"render_width": 40, "render_height": 30, "camera_path": poses}))
    (found,) = read_cameras(path)
    assert_same(found, Camera("", 40, 30, 41.5, 41.5, 20.0, 15.0, camera().viewmat))
    assert found.model == "pinhole"
    document = {"render_width": 40, "render_height": 30, "camera_path": poses, "camera_type": "fisheye"}
    path.write_text(json.dumps(document))
    (fisheye,) = read_cameras(path)
    assert (fisheye.model, fisheye.fx) == ("fisheye", found.fx)


@pytest.mark.parametrize("keys", ["camera_path", "keyframes"])
def test_a_camera_path_of_a_scaled_scene_is_the_same_path(tmp_path: Path, keys: str) -> None:
    """nerfstudio's add-on for Blender divides the axes by the size of the scene in Blender."""
    found = []
    for scale in (1.0, 0.125, 40.0):
        entries = []
        for angle in (0.3, 0.5):
            pose = look_at_origin(angle).copy()
            pose[:3, :3] *= scale
            entries.append({"camera_to_world": pose.ravel().tolist(), "matrix": pose.ravel().tolist(), "fov": 50.0})
        path = tmp_path / f"{scale}.json"
        size = {"render_width": 40, "render_height": 30, "seconds": 1.0, "fps": 3}
        path.write_text(json.dumps({**size, keys: entries}))
        found.append(read_cameras(path))
    for same in found[1:]:
        for one, other in zip(found[0], same, strict=True):
            assert_same(one, other)


def _ours(**changes: object) -> str:
    entry = {**json.loads(cameras_json([camera()]))["cameras"][0], **changes}
    return json.dumps({"cameras": [{key: value for key, value in entry.items() if value is not None}]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("1" * 5000, "not valid JSON"),
        (_ours(fx=10**400), "int too large"),
        ("[" * 100_000, "not valid JSON"),
        ("{}", "no cameras"),
        ("3", "no cameras"),
        ("[]", "the file has no cameras"),
        ("[3]", "not an object"),
        ('{"cameras": [{}]}', "is missing"),
        (_ours(fx=None), "'fx' is missing"),
        (_ours(fx=0), "above 0"),
        (_ours(fx="wide"), "not a finite number"),
        (_ours(width=1.5), "whole number"),
        (_ours(width=10**12), "whole number"),
        (_ours(viewmat=[[1, 2], [3, 4]]), "4x4"),
        (_ours(viewmat="x"), "not a matrix"),
        (_ours(viewmat=(2 * np.eye(4)).tolist()), "scales or shears"),
        (_ours(viewmat=[[1e200] * 4] * 4), "scales or shears"),
        (_ours(viewmat=np.diag([-1.0, 1, 1, 1]).tolist()), "mirrors"),
        (_ours().replace("41.5", "NaN"), "not a finite number"),
        (_ours(model="panorama"), "no camera model 'panorama'"),
        (_ours(model=["ortho"]), "no camera model"),
        ('{"camera_path": [{"fov": 50}], "camera_type": "equirectangular"}', "add --projection equirectangular"),
        ('{"camera_path": [{"fov": 50}], "camera_type": "omnidirectional"}', "only 'perspective' and 'fisheye'"),
        ('{"camera_path": [{"fov": 50}], "camera_type": {}}', "only 'perspective' and 'fisheye'"),
        (
            '{"w": 4, "h": 3, "fl_x": 5, "camera_model": "EQUIRECTANGULAR", '
            '"frames": [{"transform_matrix": [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]}]}',
            "'EQUIRECTANGULAR', which is not rendered",
        ),
        (
            '{"w": 4, "h": 3, "camera_angle_x": 1, "is_fisheye": true, "frames": [{"transform_matrix": [[1, 0, 0, 0], '
            "[0, 1, 0, 0], [0, 0, 1, 0]]}]}",
            "fl_x is missing",
        ),
    ],
)
def test_invalid_cameras_are_errors_with_their_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cameras.json"
    path.write_text(text)
    with pytest.raises(SceneError, match=message) as caught:
        read_cameras(path)
    assert str(path) in str(caught.value.where)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SceneError, match="cannot read"):
        read_cameras(tmp_path / "absent.json")


def test_another_size_keeps_the_vertical_field_of_view() -> None:
    (found,) = Views("all", [camera()], from_run=True).sized(100, 60).cameras
    expected = Camera("", 100, 60, 83.0, 80.5, 49.0, 30.5, camera().viewmat)
    assert_same(found, expected)
    assert not Views("all", [camera()], from_run=True).sized(40, 30).from_run


def test_projections_show_what_they_say() -> None:
    views = Views("all", [camera("a"), camera("b", 1.0)], from_run=True)
    fisheyes = views.projected("fisheye", lambda _: math.nan)
    assert not fisheyes.from_run
    assert views.projected("pinhole", lambda _: math.nan) is views
    first = fisheyes.cameras[0]
    corner = math.hypot(max(first.cx, first.width - first.cx), max(first.cy, first.height - first.cy))
    assert corner == pytest.approx(first.fx * math.pi / 2)
    flat = views.projected("ortho", lambda one: {"a": 2.0, "b": 4.0}[one.name])
    for before, after, z in zip(views.cameras, flat.cameras, (2.0, 4.0), strict=True):
        assert after.model == "ortho"
        points = np.linalg.inv(before.viewmat) @ np.array([[0.3, -0.2, z, 1.0], [-0.4, 0.1, z, 1.0]]).T
        assert_allclose(after.project(points[:3].T), before.project(points[:3].T))
    for frames in (replace(views, label="orbit"), replace(views, fps=24.0)):
        path = frames.projected("ortho", lambda one: {"a": 2.0, "b": 4.0}[one.name])
        assert [one.fx for one in path.cameras] == [one.fx / 3.0 for one in views.cameras]
    middle = fisheyes.projected("pinhole", lambda _: math.nan).cameras[0]
    assert (middle.model, middle.fx, middle.width) == ("pinhole", first.fx, first.width)
    assert fisheyes.projected("ortho", lambda _: 2.0).cameras[0].fx == first.fx / 2.0
    assert flat.projected("ortho", lambda _: 1.0).cameras[0].fx == flat.cameras[0].fx
    for model in ("pinhole", "fisheye"):
        with pytest.raises(UsageError, match="the views are ortho cameras"):
            flat.projected(model, lambda _: 1.0)
    with pytest.raises(UsageError, match="have one model, and these have ortho, pinhole"):
        select_views("orbit", KnownCameras([camera("a"), replace(camera("b", 1.0), model="ortho")]))


def test_paths_have_the_lens_of_most_cameras() -> None:
    cameras = [camera(str(i), 0.5 * i) for i in range(5)]
    cameras[1] = replace(cameras[1], fx=50.0)
    cameras[3] = cameras[3].resized(80, 60)
    views = select_views("orbit", KnownCameras(cameras), PathOptions(frames=7))
    assert len(views.cameras) == 7
    assert {(c.width, c.height, c.fx, c.fy, c.cx, c.cy) for c in views.cameras} == {(40, 30, 41.5, 40.25, 20.0, 15.0)}


@pytest.mark.parametrize(("loop", "count"), [(False, 120), (True, 130)])
def test_a_path_through_many_cameras_is_longer(loop: bool, count: int) -> None:
    cameras = [camera(f"{i:02d}", 0.3 * i) for i in range(13)]
    assert len(select_views("interpolate", KnownCameras(cameras[::-1]), PathOptions(loop=loop)).cameras) == count


def test_the_order_of_a_path_is_by_name_or_nearest() -> None:
    cameras = [camera(name, angle) for name, angle in (("a", 0.0), ("b", 2.0), ("c", 1.0))]
    named = select_views("interpolate", KnownCameras(cameras), PathOptions(frames=5)).cameras
    nearest = select_views("interpolate", KnownCameras(cameras), PathOptions(frames=5, nearest=True)).cameras
    assert_allclose(named[-1].center, cameras[2].center, atol=1e-9)
    assert_allclose(nearest[-1].center, cameras[1].center, atol=1e-9)
    assert_allclose(named[0].center, nearest[0].center)


def test_z_is_up_in_a_georeferenced_scene(splat: Splat, tmp_path: Path) -> None:
    """Cameras that look down on the ball; their images' up is north."""
    scene = write_scene(tmp_path / "scene")
    document = json.loads((scene / "transforms.json").read_text())
    for i, frame in enumerate(document["frames"]):
        c2w = np.diag([1.0, 1.0, 1.0, 1.0])
        c2w[:3, 3] = [0.5 * (i % 4), 0.5 * (i // 4), 4.0]
        c2w[:3, :3] = Rotation.from_euler("xyz", [-8 + 8 * (i // 4), 4 - 4 * (i % 4), 0], degrees=True).as_matrix()
        frame["transform_matrix"] = c2w.tolist()
    (scene / "transforms.json").write_text(json.dumps(document))
    heights = []
    for placed in (False, True):
        if placed:
            write_sidecar(scene, {"origin": {"latitude": 46.0, "longitude": 7.0, "height": 500.0}})
        run, path = tmp_path / f"run-{placed}", tmp_path / f"{placed}.json"
        assert splat("train", scene, "-n", 1, "-q", *QUICK, "-o", run).code == 0
        words = ("--views", "orbit", "--frames", 6, "--save-cameras", path, "-o", tmp_path / "out", "-q")
        assert splat("render", run, *words).code == 0
        heights.append([np.linalg.inv(camera.viewmat)[2, 3] for camera in read_cameras(path)])
    assert np.ptp(heights[0]) > 0.01
    assert np.ptp(heights[1]) < 1e-6
