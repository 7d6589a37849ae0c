"""Keyframes of nerfstudio camera paths: rows or columns, text or lists, and the frames between them."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from splatcli.errors import SceneError
from splatcli.render.camera_files import read_camera_file, read_cameras
from tests.cli.tiny import look_at_origin


def document(**changes: Any) -> dict[str, Any]:
    """A path of ten frames between three keyframes; without ``changes`` that are None."""
    keys = [look_at_origin(angle).reshape(-1).tolist() for angle in (0.0, 0.4, 0.8)]
    frames = [{"matrix": key, "fov": fov, "aspect": 1.5} for key, fov in zip(keys, (40.0, 50.0, 40.0), strict=True)]
    size = {"render_width": 48, "render_height": 32, "fps": 5, "seconds": 2.0, "is_cycle": False}
    return {key: value for key, value in {"keyframes": frames, **size, **changes}.items() if value is not None}


def write(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / "path.json"
    path.write_text(json.dumps(content))
    return path


def test_frames_go_from_the_first_keyframe_to_the_last(tmp_path: Path) -> None:
    file = read_camera_file(write(tmp_path, document()))
    assert (len(file.cameras), file.fps) == (10, 5.0)
    flip = np.diag([1.0, -1.0, -1.0, 1.0])
    assert_allclose(np.linalg.inv(file.cameras[0].viewmat), look_at_origin(0.0) @ flip, atol=1e-9)
    assert_allclose(np.linalg.inv(file.cameras[-1].viewmat), look_at_origin(0.8) @ flip, atol=1e-9)
    # The field of view is vertical, in degrees, and changes along with the pose.
    fovs = [math.degrees(2 * math.atan(16 / camera.fy)) for camera in file.cameras]
    assert_allclose(fovs[0], 40.0)
    assert 48.0 < max(fovs) <= 50.0
    assert {(camera.width, camera.height, camera.cx, camera.cy) for camera in file.cameras} == {(48, 32, 24.0, 16.0)}


def test_a_cycle_comes_back(tmp_path: Path) -> None:
    cameras = read_cameras(write(tmp_path, document(is_cycle=True, seconds=20.0)))
    steps = [np.linalg.norm(b.center - a.center) for a, b in zip(cameras, [*cameras[1:], cameras[0]], strict=True)]
    assert max(steps) < 1.5 * float(np.median(steps))


def test_one_keyframe_is_one_image(tmp_path: Path) -> None:
    keys = document()["keyframes"]
    (camera,) = read_cameras(write(tmp_path, document(keyframes=keys[1:2], is_cycle=True)))
    assert_allclose(np.linalg.inv(camera.viewmat), look_at_origin(0.4) @ np.diag([1.0, -1.0, -1.0, 1.0]), atol=1e-12)
    assert_allclose(math.degrees(2 * math.atan(16 / camera.fy)), 50.0)


@pytest.mark.parametrize(("loop", "expected"), [(False, [40, 50, 60, 50, 40]), (True, [40, 52, 56, 44, 40])])
def test_keyframes_of_one_pose_zoom(loop: bool, expected: list[float], tmp_path: Path) -> None:
    matrix = look_at_origin(0.3).reshape(-1).tolist()
    keys = [{"matrix": matrix, "fov": fov} for fov in (40, 60, 40)]
    cameras = read_cameras(write(tmp_path, document(keyframes=keys, fps=5, seconds=1, is_cycle=loop)))
    assert_allclose([math.degrees(2 * math.atan(16 / camera.fy)) for camera in cameras], expected)
    assert len({camera.viewmat.tobytes() for camera in cameras}) == 1


def with_times(*times: float | None, **changes: Any) -> dict[str, Any]:
    """The path with times of transitions as nerfstudio's viewer has them: each is that of the way to a keyframe."""
    made = document(**changes)
    for key, time in zip(made["keyframes"], times, strict=True):
        key |= {"override_transition_enabled": time is not None, "override_transition_sec": time}
    return made


def views_at(path: Path, *frames: int) -> list[Any]:
    cameras = read_cameras(path)
    return [np.linalg.inv(cameras[frame].viewmat) for frame in frames]


@pytest.mark.parametrize(
    ("changes", "times", "total", "frames"),
    [
        ({"seconds": 77}, (None, 0.5, 2.5), 3.0, (0, 5, 30)),
        ({"seconds": 2}, (9.0, 0.5, None), 2.0, (0, 5, 20)),  # the rest of the seconds; the first's is that of a cycle
        ({"seconds": 77, "default_transition_sec": 1.0}, (None, None, None), 2.0, (0, 10, 20)),
        ({"seconds": 77, "default_transition_sec": 1.0}, (None, 0.3, None), 1.3, (0, 3, 13)),
        ({"seconds": 77, "default_transition_sec": 1.0, "is_cycle": True}, (0.6, 0.3, None), 1.9, (0, 3, 13)),
    ],
)
def test_keyframes_have_times(
    changes: dict[str, Any],
    times: tuple[float | None, ...],
    total: float,
    frames: tuple[int, ...],
    tmp_path: Path,
) -> None:
    """Frames are a tenth of a second apart. A path that is open has one at either end, and so one more."""
    length = round(10 * total) + (not changes.get("is_cycle"))
    path = write(tmp_path, with_times(*times, **changes, fps=length / total))
    assert len(read_cameras(path)) == length
    flip = np.diag([1.0, -1.0, -1.0, 1.0])
    for found, angle in zip(views_at(path, *frames), (0.0, 0.4, 0.8), strict=True):
        assert_allclose(found, look_at_origin(angle) @ flip, atol=1e-5)


def test_the_speed_changes_smoothly_at_a_keyframe(tmp_path: Path) -> None:
    cameras = read_cameras(write(tmp_path, with_times(None, 0.5, 2.0, fps=100)))
    steps = np.array([np.linalg.norm(b.center - a.center) for a, b in pairwise(cameras)])
    assert steps.max() > 2.5 * steps.min()  # four times as fast in the first half of the way
    assert np.abs(np.diff(steps)).max() < 0.06 * steps.max()  # from frame to frame


def test_a_transition_between_equal_poses_rests(tmp_path: Path) -> None:
    made = with_times(None, 1.0, 1.0, default_transition_sec=1.0, fps=10)
    rest = {**made["keyframes"][1], "fov": 30.0, "override_transition_enabled": True, "override_transition_sec": 2.0}
    made["keyframes"].insert(2, rest)
    cameras = read_cameras(write(tmp_path, made))
    resting = [camera for camera in cameras if np.linalg.norm(camera.center - look_at_origin(0.4)[:3, 3]) < 1e-9]
    assert 19 <= len(resting) <= 21
    fovs = [math.degrees(2 * math.atan(16 / camera.fy)) for camera in resting]
    assert max(fovs) > 49.0
    assert min(fovs) < 31.0  # it zooms from 50 to 30 degrees meanwhile
    assert fovs == sorted(fovs, reverse=True)


def test_matrices_of_older_files_are_the_same(tmp_path: Path) -> None:
    """Text in which the numbers go column by column, as three.js writes them."""
    keys = document()["keyframes"]
    for key in keys:
        key["matrix"] = json.dumps(np.reshape(key["matrix"], (4, 4)).T.reshape(-1).tolist())
    for new, old in zip(
        read_cameras(write(tmp_path, document())),
        read_cameras(write(tmp_path, document(keyframes=keys))),
        strict=True,
    ):
        assert_allclose(new.viewmat, old.viewmat, atol=1e-12)


def test_frames_in_the_file_win_over_keyframes(tmp_path: Path) -> None:
    entry = {"camera_to_world": look_at_origin(1.0).reshape(-1).tolist(), "fov": 60.0, "aspect": 1.5}
    assert len(read_cameras(write(tmp_path, document(camera_path=[entry])))) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keyframes": []}, "keyframes is empty"),
        ({"keyframes": [7]}, "keyframe 0 has no 4x4 matrix"),
        ({"keyframes": [{"matrix": "[" * 100_000, "fov": 40}]}, "keyframe 0 has no 4x4 matrix"),
        ({"keyframes": [{"matrix": [2.0] * 16, "fov": 40}]}, "scales, shears or mirrors"),
        ({"keyframes": [{"matrix": [float("nan")] * 16, "fov": 40}]}, "scales, shears or mirrors"),
        ({"keyframes": [{"matrix": np.eye(4).tolist()}]}, "the fov of keyframe 0 is None"),
        ({"keyframes": [{"matrix": np.eye(4).tolist(), "fov": 40}] * 3}, "two different ones"),
        ({"seconds": 1e8}, "not 1 to 108000"),
        ({"seconds": 1e300, "fps": 1e300}, "seconds is 1e[+]300"),
        ({"seconds": 10**400}, "seconds is 1000"),
        ({"keyframes": [{"matrix": [10**400] * 16, "fov": 40}]}, "keyframe 0 has no 4x4 matrix"),
        ({"seconds": "4"}, "seconds is '4'"),
        ({"fps": -1}, "fps is -1"),
        ({"default_transition_sec": "2"}, "default_transition_sec is '2'"),
        (with_times(None, -1, None), "override_transition_sec of keyframe 1 is -1"),
        (with_times(None, True, None), "override_transition_sec of keyframe 1 is True"),
        (with_times(None, 2.5, None), "take 2.5 of the 2 seconds"),
        (with_times(None, 1e8, 1e8), "not 1 to 108000"),
        ({"fps": 1e-6, "seconds": 1e6}, "fps is 1e-06"),
        ({"render_width": None}, "'render_width' is missing"),
    ],
)
def test_broken_paths_are_errors(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SceneError, match=message):
        read_cameras(write(tmp_path, document(**changes)))
