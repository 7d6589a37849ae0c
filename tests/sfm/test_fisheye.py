"""Images of a wide lens get a fisheye lens by themselves, and cameras at the right places."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from splatcli.cli.commands import run
from splatcli.config import DataConfig
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.read import read_scene
from splatcli.sfm import job
from splatcli.sfm.execution import Execution
from splatcli.sfm.images import SfmInput
from splatcli.sfm.job import Job, Mapped
from splatcli.sfm.lens import LensChoice, remapped_lenses, wide_cameras, with_fisheyes
from splatcli.sfm.options import SfmOptions
from splatcli.sfm.prepare import Prepared
from tests.sfm import corner
from tests.sfm.lenses import reconstruct

#: 138 degrees from the left edge to the right, 172 from corner to corner.
LENS = [98.0, 98.0, corner.WIDTH / 2, corner.HEIGHT / 2, 0.03, -0.012, 0.002, -0.0003]
COUNT = 10


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide") / "photos"
    folder.mkdir()
    lens = pycolmap.Camera(model="OPENCV_FISHEYE", width=corner.WIDTH, height=corner.HEIGHT, params=LENS)
    for index in range(COUNT):
        Image.fromarray(corner.image(0.8 * index, lens)).save(folder / f"{index:02d}.png")
    return folder


def off(scene: Path) -> NDArray[np.float64]:
    """Distances of cameras from their true places after a similarity, in parts of the mean distance to the middle."""
    model = pycolmap.Reconstruction(str(scene / "sparse/0"))
    found = np.array([model.find_image_with_name(f"{i:02d}.png").projection_center() for i in range(COUNT)])
    true = np.array([-corner.pose(0.8 * i)[:3, :3].T @ corner.pose(0.8 * i)[:3, 3] for i in range(COUNT)])
    a, b = found - found.mean(axis=0), true - true.mean(axis=0)
    u, sizes, vt = np.linalg.svd(b.T @ a)
    sign = np.array([1.0, 1.0, np.sign(np.linalg.det(u @ vt))])
    scale = (sizes * sign).sum() / (a**2).sum()
    return np.linalg.norm(b - scale * a @ (u * sign @ vt).T, axis=1) / np.linalg.norm(b, axis=1).mean()


@pytest.mark.parametrize("mapper", ["incremental", "global"])
@pytest.mark.parametrize("model", ["auto", "OPENCV_FISHEYE"])
def test_photos_of_a_wide_lens_get_its_lens_and_places(
    photos: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], model: str, mapper: str
) -> None:
    scene = tmp_path / "scene"
    words = ["--camera-model", model, "--mapper", mapper]
    assert run(["sfm", str(photos), "-o", str(scene), *words, "--json"]) == 0
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    (camera,) = result["cameras"]
    assert camera["model"] == "OPENCV_FISHEYE"
    assert camera["params"][:2] == pytest.approx(LENS[:2], rel=0.02)
    assert result["registered"] == COUNT
    assert result["reprojection_error_px"] < 0.6
    if model == "auto":
        (fact,) = result["lenses"]
        assert (fact["start"], fact["model"], fact["mapped"]) == ("SIMPLE_RADIAL", "OPENCV_FISHEYE", "OPENCV_FISHEYE")
        assert fact["error_px"] < 0.95 * fact["error_px_start"]
    assert off(scene).max() < 0.02
    assert {camera.model for camera in read_scene(scene, DataConfig()).cameras} == {"fisheye"}


def test_cameras_of_a_database_become_fisheyes_of_known_focal_length(tmp_path: Path) -> None:
    """Without that, COLMAP begins no model; the first database stays as it is."""
    database = tmp_path / "database.db"
    with pycolmap.Database.open(database) as store:
        for focal in (500.0, 700.0):
            store.write_camera(pycolmap.Camera.create_from_model_name(0, "SIMPLE_RADIAL", focal, 640, 480))
    before = database.read_bytes()
    copy = with_fisheyes(database, "THIN_PRISM_FISHEYE", {2})
    assert database.read_bytes() == before
    with pycolmap.Database.open(copy) as store:
        first, second = sorted(store.read_all_cameras(), key=lambda camera: camera.camera_id)
    assert (first.model_name, first.has_prior_focal_length) == ("SIMPLE_RADIAL", False)
    assert (second.model_name, second.has_prior_focal_length) == ("THIN_PRISM_FISHEYE", True)
    assert second.params.tolist() == [700.0, 700.0, 320.0, 240.0, *[0.0] * 8]


def test_fisheyes_are_tried_for_lacking_images_and_for_the_lens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First for images that lack, then for the lens: the second try replaces what the first one wrote."""
    database = tmp_path / "database.db"
    with pycolmap.Database.open(database) as store:
        store.write_camera(pycolmap.Camera.create_from_model_name(0, "SIMPLE_RADIAL", 500.0, 640, 480))
    monkeypatch.setattr(job, "run_mapper", lambda database, folder, *_: folder.mkdir() or [])
    prepared = Prepared([], {}, {}, [], [], {})
    fisheye_job = Job(prepared, SfmInput(tmp_path), SfmOptions(), tmp_path, Execution())
    mapped = Mapped(database, [], [], 0, [])
    for cameras in (None, {1}):
        assert fisheye_job._map_fisheyes(mapped, cameras).database == tmp_path / "database-fisheye.db"


def report(*, error: float, fisheye: float, model: str = "SIMPLE_RADIAL") -> dict[str, object]:
    tried = [{"model": "RADIAL", "error_px": 0.1}, {"model": "OPENCV_FISHEYE", "error_px": fisheye}]
    return {"camera": 1, "model": model, "error_px": error, "tried": tried}


@pytest.mark.parametrize(
    ("focal", "error", "fisheye", "expected"),
    [(450.0, 1.0, 0.9, {1}), (450.0, 1.0, 0.97, set()), (700.0, 1.0, 0.2, set())],
)
def test_wide_lenses_that_a_fisheye_fits_better_are_mapped_anew(
    focal: float, error: float, fisheye: float, expected: set[int]
) -> None:
    """960x720 pixels: 53 degrees from the axis to the corner, or 41."""
    model = reconstruct([("SIMPLE_RADIAL", [focal, 480, 360, 0.0])])
    assert wide_cameras(model, [report(error=error, fisheye=fisheye)]) == expected


def test_a_second_mapping_is_kept_where_it_registers_as_many_and_predicts_better() -> None:
    lens = ("OPENCV_FISHEYE", [450.0, 450.0, 480.0, 360.0, 0.01, 0.0, 0.0, 0.0])
    found, fewer = reconstruct([lens]), reconstruct([lens], images=11)

    def remapped(found: pycolmap.Reconstruction, before: pycolmap.Reconstruction, error: float) -> list[dict] | None:
        chosen = LensChoice(before, [report(error=error, fisheye=0.9 * error)], wide={1})
        return remapped_lenses(found, chosen, Execution(random_seed=1))

    (fact,) = remapped(found, found, 1.0) or [{}]
    assert (fact["model"], fact["mapped"]) == ("OPENCV_FISHEYE", "OPENCV_FISHEYE")
    assert 0.2 < fact["error_px"] < 0.6
    assert remapped(found, found, 0.3) is None
    assert remapped(fewer, found, 1.0) is None
    folded = reconstruct([lens])
    folded.camera(1).params = [450.0, 450.0, 480.0, 360.0, -0.9, 0.0, 0.0, 0.0]
    assert remapped(folded, found, 30.0) is None
