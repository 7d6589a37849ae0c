"""The choice of a lens model: reconstructions whose lens is known, and images through one on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from splatcli.cli.commands import run
from splatcli.config import DataConfig
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.read import read_scene
from splatcli.sfm import lens
from splatcli.sfm.execution import Execution
from splatcli.sfm.lens import CANDIDATES, choose_lenses, converted, doubt, gain
from tests.sfm import corner
from tests.sfm.lenses import HEIGHT, NOISE, WIDTH, reconstruct

#: Lenses with a distortion that the models with fewer parameters cannot follow.
KNOWN = {
    "RADIAL": [700, 480, 360, -0.2, 0.1],
    "OPENCV": [700, 704, 480, 360, -0.12, 0.05, 0.002, -0.003],
    "OPENCV_FISHEYE": [560, 560, 480, 360, 0.05, 0.02, -0.01, 0.002],
    "FULL_OPENCV": [700, 700, 480, 360, 0.3, 0.1, 0.0005, 0.001, 0.02, 0.6, 0.1, 0.01],
    "THIN_PRISM_FISHEYE": [600, 600, 480, 360, -0.05, 0.02, 0.001, -0.001, 0.01, 0, 0.003, -0.004],
}
#: Mean length of an error whose x and y are normal with NOISE.
MEAN_ERROR = NOISE * np.sqrt(np.pi / 2)


def mapped(
    lenses: list[tuple[str, list[float]]], *, constant: set[int] = frozenset(), **made
) -> pycolmap.Reconstruction:
    """The model that a mapper with SIMPLE_RADIAL ends with, where the lenses are these."""
    model = reconstruct(lenses, **made)
    for number, camera in model.cameras.items():
        if number not in constant:
            focal = (camera.focal_length_x + camera.focal_length_y) / 2
            start = pycolmap.Camera.create_from_model_name(number, "SIMPLE_RADIAL", focal, WIDTH, HEIGHT)
            lens._set_lens(camera, start)
    lens._adjust(model, set(constant), 1, min_track_length=0)
    model.update_point_3d_errors()
    return model


def choose(model: pycolmap.Reconstruction, constant: set[int] = frozenset()):
    chosen = choose_lenses(model, Execution(), constant=constant, each_image=False)
    return chosen.model, chosen.cameras


def camera(model: str, params: list[float]) -> pycolmap.Camera:
    return pycolmap.Camera(camera_id=1, model=model, width=WIDTH, height=HEIGHT, params=params)


@pytest.mark.parametrize("name", KNOWN)
def test_the_lens_that_is_there_is_found(name: str) -> None:
    model = mapped([(name, KNOWN[name])])
    found, (fact,) = choose(model)
    assert (fact["start"], fact["model"]) == ("SIMPLE_RADIAL", name)
    assert [trial["model"] for trial in fact["tried"]] == list(CANDIDATES)
    assert found.camera(1).model_name == name
    assert model.camera(1).model_name == "SIMPLE_RADIAL"
    # Predicted as well as noise allows; points and poses are uncertain too.
    assert fact["error_px"] < 1.3 * MEAN_ERROR < fact["error_px_start"]
    assert found.compute_mean_reprojection_error() < model.compute_mean_reprojection_error()
    truth = camera(name, KNOWN[name])
    pixels = np.stack(np.meshgrid(np.linspace(60, 900, 9), np.linspace(60, 660, 9)), axis=-1).reshape(-1, 2)
    rays = np.column_stack([truth.cam_from_img(pixels), np.ones(len(pixels))])
    # Off by less than a pixel from middle to edge: a lens and poses that shift together see alike.
    assert np.abs(found.camera(1).img_from_cam(rays) - pixels).max() < 1.0


@pytest.mark.parametrize("name", ["OPENCV", "FULL_OPENCV"])
def test_a_lens_that_no_image_zooms_is_shared(name: str) -> None:
    """Also where SIMPLE_RADIAL does not follow it, so that a lens for each image predicts better than one."""
    model = mapped([(name, KNOWN[name])])
    chosen = choose_lenses(model, Execution())
    assert (len(chosen.cameras), chosen.zoomed) == (1, [])
    assert set(chosen.model.cameras) == {1}


@pytest.mark.parametrize(
    ("name", "params"), [("SIMPLE_RADIAL", [700, 480, 360, -0.1]), ("PINHOLE", [700, 700, 480, 360])]
)
def test_a_simple_lens_stays_to_the_bit(name: str, params: list[float], tmp_path: Path) -> None:
    model = mapped([(name, params)])
    for folder in ("before", "after"):
        (tmp_path / folder).mkdir()
    model.write_binary(tmp_path / "before")
    found, (fact,) = choose(model)
    assert found is model
    assert fact["model"] == fact["start"] == "SIMPLE_RADIAL"
    assert fact["error_px"] == fact["error_px_start"] < 1.3 * MEAN_ERROR
    assert max(trial["gain_low"] for trial in fact["tried"]) <= 0
    found.write_binary(tmp_path / "after")
    for file in (tmp_path / "before").iterdir():
        assert file.read_bytes() == (tmp_path / "after" / file.name).read_bytes()


def test_each_camera_gets_its_own_lens() -> None:
    model = mapped([("OPENCV", KNOWN["OPENCV"]), ("SIMPLE_RADIAL", [750, 480, 360, -0.1])], points=3000)
    found, facts = choose(model)
    assert [(fact["camera"], fact["model"]) for fact in facts] == [(1, "OPENCV"), (2, "SIMPLE_RADIAL")]
    assert [found.camera(number).model_name for number in (1, 2)] == ["OPENCV", "SIMPLE_RADIAL"]
    assert found.camera(1).params == pytest.approx(KNOWN["OPENCV"], rel=0.01, abs=0.01)


def test_exact_lenses_and_cameras_of_few_images_are_left_alone() -> None:
    exact = ("PINHOLE", [700.0, 700.0, 480.0, 360.0])
    model = mapped([("OPENCV", KNOWN["OPENCV"]), exact], constant={2}, points=3000)
    found, (fact,) = choose(model, {2})
    assert fact["camera"] == 1
    assert found.camera(1).model_name == "OPENCV"
    assert found.camera(2).params.tolist() == exact[1]
    few = mapped([("OPENCV", KNOWN["OPENCV"])], images=4)
    assert choose(few) == (few, [])


def test_a_model_that_gets_worse_with_all_observations_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mapped([("OPENCV", KNOWN["OPENCV"])])
    adjust = lens._adjust

    def spoil(found: pycolmap.Reconstruction, constant: set[int], threads: int, *, min_track_length: int) -> None:
        adjust(found, constant, threads, min_track_length=min_track_length)
        if min_track_length == 0:
            params = found.camera(1).params
            params[4] += 0.1
            found.camera(1).params = params

    monkeypatch.setattr(lens, "_adjust", spoil)
    found, (fact,) = choose(model)
    assert found is model
    assert fact["model"] == "SIMPLE_RADIAL"
    assert fact["kept"] == "adjusted with all observations, the error is larger"


@pytest.mark.parametrize(
    ("name", "params", "says"),
    [
        ("SIMPLE_RADIAL", [700, 480, 360, -0.1], ""),
        ("OPENCV_FISHEYE", KNOWN["OPENCV_FISHEYE"], ""),
        ("RADIAL", [700, 480, 360, -0.9, 0.0], "folds"),
        ("RADIAL", [700, 480, 360, 0.3, -0.6], "folds"),
        ("FULL_OPENCV", [700, 700, 480, 360, 0, 0, 0, 0, 0, -2.0, 0, 0], "folds"),
        ("PINHOLE", [1500, 1500, 480, 360], "focal length goes from 700 to 1500"),
        ("PINHOLE", [700, 900, 480, 360], "differ"),
        ("PINHOLE", [700, 700, 1480, 360], "principal point"),
        ("PINHOLE", [700, float("nan"), 480, 360], "not finite"),
    ],
)
def test_a_lens_that_cannot_be_right_is_refused(name: str, params: list[float], says: str) -> None:
    reason = doubt(camera(name, params), camera("SIMPLE_RADIAL", [700, 480, 360, 0.0]))
    assert says in reason
    assert bool(reason) is bool(says)


@pytest.mark.parametrize("name", CANDIDATES)
def test_an_adjustment_starts_from_a_lens_that_sees_alike(name: str) -> None:
    start = camera("SIMPLE_RADIAL", [700, 480, 360, -0.1])
    pixels = np.stack(np.meshgrid([0.0, 240, 480, 720, 960], [0.0, 180, 360, 540, 720]), axis=-1).reshape(-1, 2)
    rays = np.column_stack([start.cam_from_img(pixels), np.ones(len(pixels))])
    assert np.abs(converted(start, name).img_from_cam(rays) - pixels).max() < 0.5


def test_a_gain_in_one_image_alone_is_chance() -> None:
    groups = np.repeat(np.arange(10), 50)
    before = np.ones(500)
    total, low = gain(before, np.where(groups == 3, 0.5, 1.0), groups, 1)
    assert (total, low) == (pytest.approx(0.05), 0.0)
    total, low = gain(before, np.full(500, 0.9), groups, 1)
    assert (total, low) == (pytest.approx(0.1), pytest.approx(0.1))


def test_the_lens_of_images_is_found_from_the_command_line(tmp_path: Path, capfd) -> None:
    params = [corner.FOCAL, corner.FOCAL, corner.WIDTH / 2, corner.HEIGHT / 2, -0.25, 0.1, 0.004, -0.006]
    bent = pycolmap.Camera(model="OPENCV", width=corner.WIDTH, height=corner.HEIGHT, params=params)
    (tmp_path / "photos").mkdir()
    for index in range(9):
        Image.fromarray(corner.image(index, bent)).save(tmp_path / "photos" / f"{index}.png")
    scene = tmp_path / "scene"
    assert run(["sfm", str(tmp_path / "photos"), "-o", str(scene), "--json"]) == 0
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    (fact,), (found,) = result["lenses"], result["cameras"]
    assert fact["model"] == found["model"] == "OPENCV"
    assert fact["error_px"] < fact["error_px_start"]
    assert found["params"] == pytest.approx(params, rel=0.01, abs=0.03)
    assert json.loads((scene / "sfm.json").read_text())["lenses"] == [fact]
    # Training reads the scene, through a pinhole.
    assert len(read_scene(scene, DataConfig()).cameras) == 9
    assert (
        run(
            [
                "sfm",
                str(tmp_path / "photos"),
                "-o",
                str(scene),
                "--overwrite",
                "--camera-model",
                "RADIAL",
                "--frames",
                "5",
            ]
        )
        == 0
    )
    said = capfd.readouterr().err
    assert "RADIAL, 240x180" in said
    assert "held-out" not in said
    assert json.loads((scene / "sfm.json").read_text())["lenses"] == []
