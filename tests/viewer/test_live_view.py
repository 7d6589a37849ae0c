"""The camera of the page of a run is read as key frames, and key frames are shown by it to the last digit."""

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

from splatcli.render.camera_files import FLIP
from tests.browser import node

NAMES = ("live_view.js", "path_editor.js", "camera_path.js")

#: A page with a window and a camera, and the number of its calls.
PAGE = """
import { LiveView } from './live_view.js';
const calls = { changed: 0, moved: 0 };
const page = { size: given.size, camera: given.camera, picture: null, changed: () => calls.changed++ };
const view = new LiveView(page);
view.onMove = () => calls.moved++;
view.aspect = given.aspect;
const seen = () => {
    const { half, current, drawn } = view;
    return JSON.parse(JSON.stringify({ camera: page.camera, half, current, drawn, calls }));
};
"""

#: A camera at (0, 0, -5) that looks along z, with y down.
CAMERA = {"eye": [0, 0, -5], "axes": [[1, 0, 0], [0, 1, 0], [0, 0, 1]], "half": 0.5, "distance": 5}


@pytest.fixture
def in_page(tmp_path: Path) -> Any:
    """Takes steps with a view; their value."""

    def run(steps: str, **given: Any) -> Any:
        if not node():
            pytest.skip("no node on this machine runs the page's module")
        for name in NAMES:
            (tmp_path / name).write_bytes((files("splatcli.viewer") / name).read_bytes())
        (tmp_path / "package.json").write_text('{"type": "module"}')
        values = {"size": [800, 600], "aspect": 4 / 3, "camera": CAMERA, **given}
        head = f"const given = {json.dumps(values)};\n{PAGE}"
        (tmp_path / "steps.js").write_text(f"{head}console.log(JSON.stringify((() => {{ {steps} }})()));")
        done = subprocess.run(
            [node(), "steps.js"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def keyframe() -> dict[str, Any]:
    """A key frame with a roll, seen from elsewhere."""
    matrix = np.eye(4)
    matrix[:3, :3] = Rotation.from_euler("xyz", [170, 20, 35], degrees=True).as_matrix()
    matrix[:3, 3] = 1.0, 0.5, -4.0
    return {"matrix": matrix.reshape(-1).tolist(), "fov": 40.0}


def world_to_camera(camera: dict[str, Any]) -> np.ndarray:
    """The pose that the page asks the server for."""
    axes, eye = np.array(camera["axes"]), np.array(camera["eye"])
    return np.vstack([np.column_stack([axes, -axes @ eye]), [0, 0, 0, 1]])


def test_the_camera_of_the_page_is_a_key_frame(in_page: Any) -> None:
    current = in_page("return seen().current;")
    assert_allclose(np.reshape(current["matrix"], (4, 4)), np.linalg.inv(world_to_camera(CAMERA)) @ FLIP, atol=1e-12)
    assert current["fov"] == pytest.approx(math.degrees(2 * math.atan(0.5)))


def test_a_key_frame_is_shown_with_its_roll(in_page: Any) -> None:
    key = keyframe()
    seen = in_page("view.show(given.key); return seen();", key=key)
    assert seen["current"] == key, "to the last digit"
    expected = np.linalg.inv(np.reshape(key["matrix"], (4, 4)) @ FLIP)
    assert_allclose(world_to_camera(seen["camera"]), expected, atol=1e-12)
    assert seen["half"] == pytest.approx(math.tan(math.radians(20)))
    assert seen["calls"]["changed"] > 0
    target = expected[:3, :3] @ -np.array(key["matrix"]).reshape(4, 4)[:3, 3]  # the origin was orbited about
    assert seen["camera"]["distance"] == pytest.approx(target[2])


@pytest.mark.parametrize(
    ("size", "aspect", "high"), [([800, 600], 2.0, 400), ([300, 600], 1.5, 200), ([800, 600], 1.0, 600)]
)
def test_the_field_of_view_is_that_of_images_in_windows_of_other_shape(
    in_page: Any, size: list[int], aspect: float, high: int
) -> None:
    seen = in_page("view.fov = 40; return seen();", size=size, aspect=aspect)
    assert seen["half"] * high / size[1] == pytest.approx(math.tan(math.radians(20)))
    own = in_page("return view.fov;", size=size, aspect=aspect)
    assert own == pytest.approx(math.degrees(2 * math.atan(CAMERA["half"] * high / size[1])))  # type: ignore[operator]


def test_a_hand_ends_a_key_frame_and_keeps_its_field_of_view_until_the_editor_is_left(in_page: Any) -> None:
    steps = """
        view.moved();
        view.show(given.key);
        page.camera.eye = [7, 8, 9];
        const before = seen();
        view.moved();
        view.moved();
        const after = seen();
        view.release();
        return [before, after, seen()];"""
    before, after, left = in_page(steps, key=keyframe())
    assert (before["calls"]["moved"], after["calls"]["moved"]) == (0, 1)
    assert [after["current"]["matrix"][i] for i in (3, 7, 11)] == [7, 8, 9]
    assert after["half"] == before["half"]
    assert left["half"] == CAMERA["half"]


def test_lines_are_drawn_for_the_picture_on_the_screen(in_page: Any) -> None:
    seen = in_page(
        "page.picture = { ...given.camera, half: 0.3 }; view.show(given.key); return seen();", key=keyframe()
    )
    assert_allclose(
        np.reshape(seen["drawn"]["matrix"], (4, 4)), np.linalg.inv(world_to_camera(CAMERA)) @ FLIP, atol=1e-12
    )
    assert seen["drawn"]["fov"] == pytest.approx(math.degrees(2 * math.atan(0.3)))
    assert seen["drawn"]["matrix"] != seen["current"]["matrix"]
