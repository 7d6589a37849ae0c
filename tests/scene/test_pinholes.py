"""Machines without pycolmap: its stand-in computes what it does, and commands say what they cannot do."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from splatcli.errors import ResourceError
from splatcli.scene import pinholes
from splatcli.scene._pycolmap import pycolmap
from tests.cli.tiny import QUICK, write_scene
from tests.native.cases import NEEDS_COMPILER

ROOT = Path(__file__).resolve().parents[2]
#: Sizes of the coefficients of FULL_OPENCV, which are strong but can be undone.
STRENGTHS = np.array([0.08, 0.03, 0.003, 0.003, 0.005, 0.02, 0.01, 0.005])


def lens(name: str, random: np.random.Generator) -> tuple[Any, pinholes.Camera]:
    """A lens by pycolmap and by the stand-in."""
    width, height = map(int, random.integers(40, 400, size=2))
    theirs = pycolmap.Camera.create_from_model_name(pycolmap.INVALID_CAMERA_ID, name, 1.0, width, height)
    focals = len(theirs.focal_length_idxs())
    count = len(theirs.params) - focals - 2
    center = np.array([width, height]) / 2 + random.normal(size=2) * 4
    focal = random.uniform(0.6, 1.5, size=focals) * max(width, height)
    params = [*focal, *center, *(random.normal(size=count) * STRENGTHS[:count])]
    theirs.params = params
    return theirs, pinholes.Camera(name, width, height, params)


@pytest.mark.parametrize("name", pinholes._OPENCV)
@pytest.mark.parametrize("seed", range(8))
def test_perspective_lenses_are_those_of_pycolmap(name: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    theirs, ours = lens(name, random)
    points = random.uniform([-1, -1, 0.2], [1, 1, 2.2], (60, 3))
    points[:2, 2] = 0.0, -1.0
    pixels = random.uniform(0, 1, (60, 2)) * [ours.width, ours.height]
    # Within rounding, which Newton's last step is below too: on the plane z = 1, 1e-9 is a millionth of a pixel.
    assert_allclose(ours.img_from_cam(points), theirs.img_from_cam(points), rtol=1e-12, atol=1e-10)
    assert_allclose(ours.cam_from_img(pixels), theirs.cam_from_img(pixels), rtol=0, atol=1e-9)
    assert_allclose(ours.cam_ray_from_img(pixels), theirs.cam_ray_from_img(pixels), rtol=0, atol=1e-9)
    expected = pycolmap.undistort_camera(pycolmap.UndistortCameraOptions(), theirs)
    made = pinholes.undistort_camera(pinholes.UndistortCameraOptions(), ours)
    assert (made.model_name, made.width, made.height) == (expected.model_name, expected.width, expected.height)
    assert_allclose(made.params, expected.params, rtol=1e-12)
    other, same = copy.copy(theirs), copy.copy(ours)
    other.rescale(31, 77)
    same.rescale(31, 77)
    assert (same.width, same.height, ours.params.tolist()) == (31, 77, theirs.params.tolist())
    assert_allclose(same.params, other.params, rtol=1e-14)


def test_a_distortion_without_a_way_back_is_refused() -> None:
    folded = pinholes.Camera("FULL_OPENCV", 60, 40, [30, 30, 30, 20, 0, 0, 0, 0, 0, 4, 0, 0])
    assert np.isnan(folded.cam_from_img(np.array([[60.0, 40.0]]))).all()
    with pytest.raises(ValueError, match="no inverse at the border"):
        pinholes.undistort_camera(pinholes.UndistortCameraOptions(), folded)


def test_all_models_have_the_names_and_parameters_of_pycolmap() -> None:
    models = pycolmap.CameraModelId.__members__
    assert {name: int(model) for name, model in pinholes.CameraModelId.__members__.items()} == {
        name: int(model) for name, model in models.items()
    }
    for name, model in models.items():
        if name != "INVALID":
            theirs = pycolmap.Camera.create_from_model_id(pycolmap.INVALID_CAMERA_ID, model, 50.0, 64, 48)
            ours = pinholes.Camera.create_from_model_id(pinholes.INVALID_CAMERA_ID, int(model), 50.0, 64, 48)
            assert len(ours.params) == len(theirs.params), name
            assert ours.verify_params()
            assert ours.is_spherical() == theirs.is_spherical(), name
            assert ours.is_perspective_pinhole() == theirs.is_perspective_pinhole(), name
            if name not in pinholes._OPENCV:
                with pytest.raises(ResourceError, match=f"the {name} lens .* pycolmap is not installed"):
                    ours.img_from_cam(np.ones((1, 3)))


def test_other_names_are_missing_with_a_remedy() -> None:
    assert not hasattr(pinholes, "has_cuda"), "what looks through all modules, as inspect does, meets no other error"
    with pytest.raises(ResourceError, match="structure from motion is not possible: pycolmap is not installed"):
        pinholes.has_cuda  # noqa: B018


def test_rotations_are_those_of_pycolmap() -> None:
    for xyzw in np.random.default_rng(3).normal(size=(20, 4)):
        unit = xyzw / np.linalg.norm(xyzw)
        assert_allclose(pinholes.Rotation3d(unit).matrix(), pycolmap.Rotation3d(unit).matrix(), atol=1e-15)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """That of a process in which pycolmap is not installed."""
    (tmp_path / "lacking").mkdir()
    (tmp_path / "lacking" / "sitecustomize.py").write_text("import sys; sys.modules['pycolmap'] = None\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "lacking"), str(ROOT)])}


def splat(environment: dict[str, str] | None, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "splatcli", *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@NEEDS_COMPILER
def test_a_distorted_scene_trains_without_pycolmap(environment: dict[str, str], tmp_path: Path) -> None:
    scene = write_scene(tmp_path / "scene")
    transforms = json.loads((scene / "transforms.json").read_text())
    transforms |= {"camera_model": "OPENCV", "k1": -0.1, "k2": 0.02, "p1": 0.001, "p2": -0.002}
    (scene / "transforms.json").write_text(json.dumps(transforms))
    scores = []
    for name, env in (("with", None), ("without", environment)):
        run = tmp_path / name
        done = splat(env, "train", scene, *QUICK, "--iterations", 20, "-o", run, "-q")
        assert done.returncode == 0, done.stderr
        (line,) = splat(env, "eval", run, "--json").stdout.splitlines()
        scores.append(json.loads(line)["psnr"])
    assert scores[1] == pytest.approx(scores[0], abs=1e-3)  # equal here: their lenses differ by rounding alone


@NEEDS_COMPILER
def test_a_scene_without_points_begins_with_random_ones(environment: dict[str, str], tmp_path: Path) -> None:
    done = splat(environment, "train", write_scene(tmp_path / "scene"), "--iterations", 2, "-o", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "training begins with random points" in done.stderr
    assert "pycolmap is not installed" in done.stderr


def test_commands_say_what_needs_pycolmap(environment: dict[str, str], tmp_path: Path) -> None:
    scene = write_scene(tmp_path / "scene")
    photos = shutil.copytree(scene / "images", tmp_path / "photos")
    found = splat(environment, "sfm", photos, "-o", tmp_path / "made")
    bare = splat(environment, "train", photos, "-o", tmp_path / "bare")
    for done in (found, bare):
        assert done.returncode == 4
        assert "structure from motion is not possible: pycolmap is not installed" in done.stderr
    transforms = json.loads((scene / "transforms.json").read_text())
    (scene / "transforms.json").write_text(json.dumps({**transforms, "camera_model": "OPENCV_FISHEYE", "k1": 0.1}))
    fisheye = splat(environment, "train", scene, "-o", tmp_path / "run")
    assert fisheye.returncode == 4
    assert "the OPENCV_FISHEYE lens" in fisheye.stderr
    assert "cannot be undone: pycolmap is not installed" in fisheye.stderr
    for said in (found.stderr, bare.stderr, fisheye.stderr):
        assert "Traceback" not in said
        assert "pip install pycolmap" in said or "has no wheels for this machine" in said
