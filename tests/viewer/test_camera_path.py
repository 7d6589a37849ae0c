"""The camera paths of the page of ``splat view`` are those of ``splat render --views``: geometry, frames and file.

Node runs the page's own module, where there is one.
"""

from __future__ import annotations

import json
import math
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.spatial.transform import Rotation

from splatcli.formats.html import to_viewer
from splatcli.render.camera_files import FLIP, read_camera_file
from splatcli.render.camera_paths import frames_between
from tests.browser import node

MODULE = files("splatcli.viewer") / "camera_path.js"
#: A rotation between the frames of model and page that mixes all axes.
TURN = to_viewer(np.array([0.6, 0.0, -0.8]))


def in_node(expression: str, **values: Any) -> Any:
    """The value of an expression that uses the module's functions and ``given``."""
    if not node():
        pytest.skip("no node on this machine runs the page's module")
    script = (
        f"{MODULE.read_text('utf-8')}\nconst given = {json.dumps(values)};\nconsole.log(JSON.stringify({expression}));"
    )
    done = subprocess.run(
        [node(), "--input-type=module"], input=script, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def keyframe(seed: int, fov: float) -> dict[str, Any]:
    matrix = np.eye(4)
    matrix[:3, :3] = Rotation.random(random_state=seed).as_matrix()
    matrix[:3, 3] = np.random.default_rng(seed).normal(size=3) * 4
    return {"matrix": matrix.reshape(-1).tolist(), "fov": fov}


def path(keyframes: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    return {"keyframes": keyframes, "seconds": 2.5, "fps": 5, "loop": False, "width": 96, "height": 54, **changes}


KEYS = [keyframe(seed, fov) for seed, fov in enumerate((40.0, 55.0, 30.0, 70.0))]
ALL_FRAMES = """(() => {
    const { keyframes, loop } = given.path;
    const { at } = pathThrough(keyframes, loop);
    const count = frameCount(given.path);
    return Array.from({ length: count }, (_, i) => at(shareOf(i, count, loop)));
})()"""


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize(
    "keys",
    [
        KEYS[:1],
        KEYS[:2],
        KEYS,
        [KEYS[0], KEYS[0], KEYS[1], {**KEYS[1], "fov": 20.0}, KEYS[2], KEYS[0]],
        [KEYS[0], {**KEYS[0], "fov": 20.0}, KEYS[0]],
        [KEYS[2], {**KEYS[3], "matrix": [*KEYS[2]["matrix"][:11], 9.0, *KEYS[2]["matrix"][12:]]}],  # no rotation
    ],
    ids=["one", "two", "four", "repeated", "zoom", "straight"],
)
def test_the_preview_shows_the_frames_of_splat_render(keys: list[dict[str, Any]], loop: bool) -> None:
    expected = frames_between({"keyframes": keys, "seconds": 2.5, "fps": 5, "is_cycle": loop})
    found = in_node(ALL_FRAMES, path=path(keys, loop=loop))
    assert len(found) == len(expected) == (1 if len(keys) == 1 else 12)
    for ours, theirs in zip(found, expected, strict=True):
        assert_allclose(ours["matrix"], theirs["camera_to_world"], atol=1e-7)
        assert ours["fov"] == pytest.approx(theirs["fov"], abs=1e-6)


def test_key_frames_are_at_their_shares_of_the_way() -> None:
    found = in_node(
        "(({ at, shares }) => ({ shares, keys: shares.map(at) }))(pathThrough(given.keys, false))", keys=KEYS
    )
    assert found["shares"][0] == 0
    assert found["shares"][-1] == pytest.approx(1)
    assert found["shares"] == sorted(found["shares"])
    for ours, key in zip(found["keys"], KEYS, strict=True):
        assert_allclose(ours["matrix"], key["matrix"], atol=1e-4)


@pytest.mark.parametrize("keys", [[], [KEYS[0]] * 3])
def test_equal_key_frames_make_no_path(keys: list[dict[str, Any]]) -> None:
    assert in_node("[false, true].map((loop) => pathThrough(given.keys, loop))", keys=keys) == [None, None]


def test_the_file_is_read_by_splat_render_with_the_same_poses(tmp_path: Path) -> None:
    text = in_node("fileOf(given.path)", path=path(KEYS, seconds=0.8, loop=True))
    (tmp_path / "camera_path.json").write_text(text)
    file = read_camera_file(tmp_path / "camera_path.json")
    assert (len(file.cameras), file.fps) == (4, 5.0)
    first = file.cameras[0]
    assert (first.width, first.height, first.model) == (96, 54, "pinhole")
    assert_allclose(np.linalg.inv(first.viewmat) @ FLIP, np.reshape(KEYS[0]["matrix"], (4, 4)), atol=1e-12)
    assert math.degrees(2 * math.atan(first.height / 2 / first.fy)) == pytest.approx(40.0)
    assert in_node("pathOf(given.text, [1, 1])", text=text) == path(KEYS, seconds=0.8, loop=True)


def test_matrices_of_older_files_are_read_by_columns() -> None:
    columns = [{**key, "matrix": json.dumps(np.reshape(key["matrix"], (4, 4)).T.reshape(-1).tolist())} for key in KEYS]
    found = in_node("pathOf(given.text, [640, 480])", text=json.dumps({"keyframes": columns}))
    assert found == path(KEYS, seconds=4, fps=30, width=640, height=480)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "it is not JSON"),
        ("[]", 'it has no "keyframes"'),
        ("null", 'it has no "keyframes"'),
        ('{"camera_path": []}', 'it has no "keyframes"'),
        ('{"keyframes": [7]}', "key frame 1 has no 4x4 matrix"),
        (json.dumps({"keyframes": [KEYS[0], {"matrix": "[[[", "fov": 40}]}), "key frame 2 has no 4x4 matrix"),
        (json.dumps({"keyframes": [{"matrix": [2.0] * 16, "fov": 40}]}), "matrix of key frame 1 is not a camera pose"),
        (json.dumps({"keyframes": [{"matrix": KEYS[0]["matrix"]}]}), "fov of key frame 1 is undefined"),
        (json.dumps({"keyframes": KEYS, "seconds": "4"}), 'seconds is "4"'),
        (json.dumps({"keyframes": KEYS, "seconds": 1e8}), "not 1 to 108000"),
        (json.dumps({"keyframes": KEYS, "fps": -1}), "fps is -1"),
        (json.dumps({"keyframes": KEYS, "fps": 2000}), "fps is 2000, not a number from 0.01 to 1000"),
        (json.dumps({"keyframes": KEYS, "render_width": 1.5}), "render_width is 1.5"),
        (json.dumps({"keyframes": KEYS, "camera_type": "equirectangular"}), "camera_type"),
    ],
)
def test_what_is_no_camera_path_is_said(text: str, said: str) -> None:
    attempt = "(() => { try { return pathOf(given.text, [64, 48]); } catch (error) { return error.message; } })()"
    assert said in in_node(attempt, text=text)


@pytest.mark.parametrize("seed", range(3))
def test_a_pose_of_the_model_is_a_camera_of_the_page_and_back(seed: int) -> None:
    matrix = keyframe(seed, 40.0)["matrix"]
    camera, back = in_node(
        "[cameraOf(given.matrix, given.turn)].map((c) => [c, poseOf(c.position, c.angles, given.turn)])[0]",
        matrix=matrix,
        turn=TURN.reshape(-1).tolist(),
    )
    assert_allclose(back, matrix, atol=1e-12)
    pose = np.reshape(matrix, (4, 4))
    assert_allclose(camera["position"], TURN @ pose[:3, 3], atol=1e-12)
    # The engine's angles are about the fixed axes x, y and z; level cameras have the same direction and no roll.
    assert_allclose(
        Rotation.from_euler("xyz", camera["angles"], degrees=True).as_matrix(), TURN @ pose[:3, :3], atol=1e-12
    )
    level = Rotation.from_euler("xyz", camera["level"], degrees=True).as_matrix()
    assert_allclose(level[:, 2], TURN @ pose[:3, 2], atol=1e-7)
    assert level[1, 0] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("angles", [(20, 130, 0), (-60, -179, 0), (90, 30, 0), (-90, 200, 0), (0, 90, 0)])
def test_the_angles_of_a_camera_without_roll_stay(angles: tuple[int, int, int]) -> None:
    found = in_node(
        "cameraOf(poseOf([1, 2, 3], given.angles, given.turn), given.turn).angles",
        angles=angles,
        turn=TURN.reshape(-1).tolist(),
    )
    assert_allclose(
        Rotation.from_euler("xyz", found, degrees=True).as_matrix(),
        Rotation.from_euler("xyz", angles, degrees=True).as_matrix(),
        atol=1e-9,
    )
    assert found[2] == 0


def test_the_field_of_view_is_that_of_the_image_inside_the_window() -> None:
    assert in_node("[frameSize(1600, 800, 1.5), frameSize(400, 800, 2)]") == [[1200, 800], [400, 200]]
    # Where 90 degrees fill 400 pixels, half as many show what lies within twice the tangent.
    assert in_node("angleAlong(90, 400, 200)") == pytest.approx(2 * math.degrees(math.atan(0.5)))
