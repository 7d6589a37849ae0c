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
from splatcli.render.keyframes import frames_between
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


def keyframe(seed: int, fov: float, time: float | None = None) -> dict[str, Any]:
    matrix = np.eye(4)
    matrix[:3, :3] = Rotation.random(random_state=seed).as_matrix()
    matrix[:3, 3] = np.random.default_rng(seed).normal(size=3) * 4
    return {"matrix": matrix.reshape(-1).tolist(), "fov": fov, "time": time}


def path(keyframes: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    return {"keyframes": keyframes, "seconds": 2.5, "fps": 5, "loop": False, "width": 96, "height": 54, **changes}


KEYS = [keyframe(seed, fov) for seed, fov in enumerate((40.0, 55.0, 30.0, 70.0))]
ALL_FRAMES = """(() => {
    const { at } = pathThrough(given.path);
    const count = frameCount(given.path);
    return Array.from({ length: count }, (_, i) => at(shareOf(i, count, given.path.loop)));
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


def timed(keys: list[dict[str, Any]], times: list[float | None]) -> list[dict[str, Any]]:
    return [{**key, "time": time} for key, time in zip(keys, times, strict=True)]


def as_saved(keys: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Key frames with their times as nerfstudio's viewer writes them."""
    return [
        {
            "matrix": key["matrix"],
            "fov": key["fov"],
            "aspect": 16 / 9,
            "override_transition_enabled": key["time"] is not None,
            "override_transition_sec": key["time"],
        }
        for key in keys
    ]


REST = [KEYS[0], KEYS[0], KEYS[1], {**KEYS[1], "fov": 20.0}, KEYS[2], KEYS[0]]


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize(
    "keys",
    [
        timed(KEYS[:2], [None, 2.1]),
        timed(KEYS, [None, 0.3, None, None]),
        timed(KEYS, [0.7, 0.5, 4.0, 0.25]),
        timed(KEYS, [0.4, None, None, 0.3]),
        timed(REST, [None, 0.5, None, 0.4, None, None]),
        timed(REST, [0.3, None, 0.2, None, 0.6, 0.7]),
        timed([KEYS[0], {**KEYS[0], "fov": 20.0}, KEYS[0]], [None, 0.3, None]),
    ],
    ids=["two", "one", "all", "some", "rests", "repeated", "zoom"],
)
def test_the_preview_keeps_times_as_splat_render(keys: list[dict[str, Any]], loop: bool) -> None:
    made = path(keys, loop=loop, seconds=2.9, fps=12)
    document = {"keyframes": as_saved(keys), "seconds": 2.9, "fps": 12, "is_cycle": loop}
    expected = frames_between(document)
    text = in_node("fileOf(given.path)", path=made)
    assert frames_between(json.loads(text)) == expected
    found = in_node(ALL_FRAMES, path=in_node("pathOf(given.text, [96, 54])", text=text))
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert_allclose(ours["matrix"], theirs["camera_to_world"], atol=1e-7)
        assert ours["fov"] == pytest.approx(theirs["fov"], abs=1e-6)


@pytest.mark.parametrize(
    ("times", "loop", "durations"),
    [
        ([None, 1.0, 1.0, 1.0], False, [1.0, 1.0, 1.0]),
        ([0.5, 1.0, 2.0, 3.0], True, [1.0, 2.0, 3.0, 0.5]),
        ([9.0, 2.0, None, None], False, None),
    ],
)
def test_key_frames_are_at_their_times(times: list[float | None], loop: bool, durations: list[float] | None) -> None:
    """Those without one share the rest of the seconds; the speed of the others has no say in it."""
    made = path(timed(KEYS, times), loop=loop, seconds=10.0)
    value = "(({ at, shares, durations }) => ({ shares, durations, keys: shares.map(at) }))(pathThrough(given.path))"
    found = in_node(value, path=made)
    if durations is None:
        even = in_node("pathThrough(given.path).durations", path=path(KEYS))
        durations = [2.0, *(8.0 * time / (even[1] + even[2]) for time in even[1:])]
    assert_allclose(found["durations"], durations, rtol=1e-9)
    assert_allclose(found["shares"], np.cumsum([0, *durations])[:4] / sum(durations), rtol=1e-9)
    for ours, key in zip(found["keys"], KEYS, strict=True):
        assert_allclose(ours["matrix"], key["matrix"], atol=1e-4)
        assert ours["fov"] == pytest.approx(key["fov"], abs=1e-4)


def edited(expression: str, made: dict[str, Any]) -> tuple[list[float | None], float, list[float]]:
    """(times of the key frames, seconds, durations of the transitions) of the path after an edit."""
    found = in_node(f"((path) => [path, pathThrough(path).durations])({expression})", path=made)
    return [key["time"] for key in found[0]["keyframes"]], found[0]["seconds"], found[1]


def test_a_time_leaves_the_other_transitions_as_they_are() -> None:
    before = in_node("pathThrough(given.path).durations", path=path(KEYS, seconds=6.0))
    times, seconds, durations = edited("withTime(given.path, 2, 5)", path(KEYS, seconds=6.0))
    assert times == [None, None, 5.0, None]
    assert_allclose(durations, [before[0], 5.0, before[2]], rtol=1e-9)
    assert seconds == pytest.approx(6.0 - before[1] + 5.0)
    times, seconds, durations = edited("withTime(withTime(given.path, 2, 5), 2, null)", path(KEYS, seconds=6.0))
    assert times == [None] * 4
    assert seconds == pytest.approx(6.0)
    assert_allclose(durations, before, rtol=1e-9)


def test_a_time_back_to_the_first_counts_in_a_loop_alone() -> None:
    made = path(timed(KEYS, [3.0, 1.0, 1.0, 1.0]), seconds=3.0)
    assert edited("given.path", made)[1] == 3.0
    assert edited("changed(given.path, { loop: true })", made)[1:] == (6.0, [1.0, 1.0, 1.0, 3.0])
    assert edited("withTime(changed(given.path, { loop: true }), 0, 2)", made)[1] == 5.0
    assert edited("changed(changed(given.path, { loop: true }), { loop: false })", made)[1] == 3.0


def test_a_time_between_equal_key_frames_rests() -> None:
    made = path([KEYS[0], KEYS[1], KEYS[1], KEYS[2]], seconds=4.0)
    times, seconds, durations = edited("withTime(given.path, 2, 1.5)", made)
    assert (times, seconds, durations[1]) == ([None, None, 1.5, None], 5.5, 1.5)
    assert durations[0] + durations[2] == pytest.approx(4.0)


def test_key_frames_bring_and_take_their_times() -> None:
    made = path(timed(KEYS[:3], [None, 2.0, 3.0]), seconds=5.0)
    remove = "changed(given.path, { keyframes: given.path.keyframes.slice(0, 2) })"
    assert edited(remove, made)[:2] == ([None, 2.0], 2.0)
    # One more at constant speed takes as long as it would at the mean speed of the others.
    add = "changed(given.path, { keyframes: [...given.path.keyframes, given.more] })"
    found = in_node(f"((path) => [path.seconds, pathThrough(path)])({add})", path=made, more=KEYS[3])
    even = in_node("pathThrough(given.path).durations", path=path(KEYS, seconds=1.0))
    assert found[1]["durations"][:2] == [2.0, 3.0]
    assert found[0] == pytest.approx(5.0 / (1 - even[2]), rel=1e-6)
    alone = edited("changed(given.path, { keyframes: given.path.keyframes.slice(0, 1) })", made)
    assert alone == ([None], 4.0, [])


def test_seconds_are_shared_by_transitions_without_a_time() -> None:
    some, every = timed(KEYS, [None, 2.0, None, None]), timed(KEYS, [None, 2.0, 1.0, 1.0])
    times, seconds, durations = edited("withSeconds(given.path, 9)", path(some, seconds=5.0))
    assert (times, seconds, durations[0]) == ([None, 2.0, None, None], 9.0, 2.0)
    assert sum(durations) == pytest.approx(9.0)
    assert edited("withSeconds(given.path, 8)", path(every, seconds=4.0)) == ([None, 4, 2, 2], 8.0, [4, 2, 2])
    refused = "(() => { try { return withSeconds(given.path, 1.5); } catch (error) { return error.message; } })()"
    assert "take 2 of the 1.5 seconds" in in_node(refused, path=path(some, seconds=5.0))


def test_times_of_nerfstudios_files_are_those_of_the_key_frames() -> None:
    """Its default counts where a key frame has none of its own; seconds are what they sum up to."""
    saved = as_saved(timed(KEYS, [7.0, None, 1.25, None]))
    saved[3]["override_transition_sec"] = 5.0  # not enabled
    text = json.dumps({"keyframes": saved, "default_transition_sec": 2.0, "seconds": 99.0, "fps": 5})
    found = in_node("pathOf(given.text, [96, 54])", text=text)
    assert [key["time"] for key in found["keyframes"]] == [7.0, 2.0, 1.25, 2.0]
    assert found["seconds"] == 5.25
    assert len(frames_between(json.loads(text))) == in_node("frameCount(given.path)", path=found) == 26


def test_key_frames_are_at_their_shares_of_the_way() -> None:
    found = in_node(
        "(({ at, shares }) => ({ shares, keys: shares.map(at) }))(pathThrough(given.path))", path=path(KEYS)
    )
    assert found["shares"][0] == 0
    assert found["shares"][-1] == pytest.approx(1)
    assert found["shares"] == sorted(found["shares"])
    for ours, key in zip(found["keys"], KEYS, strict=True):
        assert_allclose(ours["matrix"], key["matrix"], atol=1e-4)


@pytest.mark.parametrize("keys", [[], [KEYS[0]] * 3])
def test_equal_key_frames_make_no_path(keys: list[dict[str, Any]]) -> None:
    expression = "[false, true].map((loop) => pathThrough({ ...given.path, loop }))"
    assert in_node(expression, path=path(keys)) == [None, None]


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
        (
            json.dumps({"keyframes": as_saved(timed(KEYS, [None, 0, None, None]))}),
            "transition time of key frame 2 is 0",
        ),
        (json.dumps({"keyframes": as_saved(timed(KEYS, [None, 9, None, None]))}), "take 9 of the 4 seconds"),
        (json.dumps({"keyframes": KEYS, "default_transition_sec": "2"}), 'transition time of key frame 1 is "2"'),
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
