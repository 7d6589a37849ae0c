"""Models in metres and at their place: GPS of images, known distances, and when these do not suffice."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy.spatial.transform import Rotation

from splatcli.api import Model
from splatcli.cli.commands import run
from splatcli.config import DataConfig
from splatcli.errors import SceneError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.geodesy import enu_axes, from_geocentric, median_place, to_enu, to_geocentric
from splatcli.scene.georeference import (
    FILE,
    PositionsError,
    fit_similarity,
    georeference,
    position_of,
    read_sidecar,
    write_sidecar,
)
from splatcli.scene.read import read_scene
from splatcli.sfm.flight_log import read_flight_log
from splatcli.similarity import Similarity
from tests.cli.tiny import QUICK, write_scene
from tests.native.cases import NEEDS_COMPILER
from tests.scene import made
from tests.sfm import corner
from tests.sfm.test_gaps import pipes_stay_open, write_video

DATA = Path(__file__).parents[3] / "shared/data"
PLACE = np.array([47.2501, 8.5499, 430.0])
TURN = Rotation.from_euler("XYZ", [100, -20, 65], degrees=True).as_matrix()


def with_gps(place: NDArray[np.float64]) -> Image.Exif:
    """EXIF with a position to a hundred-thousandth of a second and a millimetre."""

    def parts(value: float) -> tuple[float, float, float]:
        minutes, degrees = np.modf(abs(value))[0] * 60, int(abs(value))
        return degrees, int(minutes), round(float(np.modf(minutes)[0]) * 60, 5)

    exif = Image.Exif()
    lat, lon, height = map(float, place)
    exif[0x8825] = {
        **{1: "N" if lat >= 0 else "S", 2: parts(lat), 3: "E" if lon >= 0 else "W", 4: parts(lon)},
        **{5: b"\x00" if height >= 0 else b"\x01", 6: abs(round(height, 3))},
    }
    return exif


def places_of(east_north_up: NDArray[np.float64]) -> NDArray[np.float64]:
    """Latitudes, longitudes and heights [N, 3] of metres about PLACE."""
    points = to_geocentric(PLACE) + east_north_up @ enu_axes(*PLACE[:2])
    return np.array([from_geocentric(point) for point in points])


def true_centers() -> NDArray[np.float64]:
    poses = [corner.pose(i) for i in range(7)]
    return np.array([-pose[:3, :3].T @ pose[:3, 3] for pose in poses])


def write_walk(folder: Path, noise: float = 0.0) -> NDArray[np.float64]:
    """Seven images with GPS, a corner of a room z up; returns where the cameras were in metres about PLACE."""
    folder.mkdir()
    there = true_centers()
    seen = there + np.random.default_rng(4).normal(size=there.shape) * noise
    for i, place in enumerate(places_of(seen)):
        Image.fromarray(corner.image(i)).save(folder / f"{i}.jpg", quality=95, exif=with_gps(place))
    return there


@pytest.mark.parametrize("place", [[47.25, 8.55, 430.0], [-33.9, -70.7, -3.5], [0.001, 179.9999, 8000.0]])
def test_positions_are_read_from_exif(place: list[float], tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.jpg", exif=with_gps(np.array(place)))
    found = position_of(tmp_path / "a.jpg")
    assert found is not None
    np.testing.assert_allclose(found, place, atol=2e-8)


@pytest.mark.parametrize("tags", [{}, {2: (91.0, 0, 0)}, {2: (0, 0, 0), 4: (0, 0, 0)}, {6: None}])
def test_what_is_no_position_is_none(tags: dict, tmp_path: Path) -> None:
    exif = with_gps(PLACE)
    exif[0x8825] = {**exif[0x8825], **tags} if tags else {}
    if tags.get(6, 0) is None:
        exif[0x8825].pop(6)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.jpg", exif=exif)
    assert position_of(tmp_path / "a.jpg") is None
    (tmp_path / "b.jpg").write_bytes(b"no image")
    assert position_of(tmp_path / "b.jpg") is None


def test_heights_below_the_sea_are_negative_in_every_version_of_exif(tmp_path: Path) -> None:
    heights = []
    for ref in range(4):
        exif = with_gps(PLACE)
        exif[0x8825] = {**exif[0x8825], 5: bytes([ref])}
        Image.new("RGB", (8, 8)).save(tmp_path / "a.jpg", exif=exif)
        place = position_of(tmp_path / "a.jpg")
        assert place is not None
        heights.append(np.sign(place[2]))
    assert heights == [1, -1, 1, -1]


def test_the_middle_of_places_around_the_180th_meridian_is_there() -> None:
    places = np.array([[48.0, lon, 5.0] for lon in (179.9, -179.9, 179.8, -179.7, -179.6)])
    np.testing.assert_allclose(median_place(places), [48.0, -179.9, 5.0], atol=1e-9)
    np.testing.assert_allclose(median_place(places[[0, 2]]), [48.0, 179.85, 5.0], atol=1e-9)


def test_outliers_are_left_out_and_the_rest_gives_scale_and_turn() -> None:
    rng = np.random.default_rng(0)
    old = rng.normal(size=(40, 3))
    new = 12.5 * old @ TURN.T + [100.0, -50.0, 7.0]
    new += rng.normal(size=new.shape) * 0.3
    new[[3, 11, 25, 30]] += [[60, 0, 0], [0, -80, 0], [0, 0, 200], [30, 30, 30]]
    fit = fit_similarity(old, new)
    assert np.flatnonzero(~fit.used).tolist() == [3, 11, 25, 30]
    assert fit.similarity.scale == pytest.approx(12.5, rel=0.01)
    np.testing.assert_allclose(fit.similarity.rotation, TURN, atol=0.01)
    assert fit.sigma == pytest.approx(0.3, rel=0.2)
    assert fit.is_good


def test_standard_errors_are_those_of_many_trials() -> None:
    """Scale and tilt scatter over repeated noise as the fit says they will."""
    rng = np.random.default_rng(5)
    old = rng.normal(size=(20, 3)) * [30, 20, 2]
    scales, tilts, said = [], [], []
    for _ in range(60):
        fit = fit_similarity(old, old + rng.normal(size=old.shape) * 1.5)
        scales.append(fit.similarity.scale - 1)
        tilts.append(np.abs(Rotation.from_matrix(fit.similarity.rotation).as_rotvec(degrees=True)[0]))
        said.append((fit.scale_error, fit.tilt_error))
    scale_error, tilt_error = np.mean(said, axis=0)
    assert np.std(scales) == pytest.approx(scale_error, rel=0.25)
    assert np.sqrt(np.mean(np.square(tilts))) == pytest.approx(tilt_error, rel=0.25)


@pytest.mark.parametrize(
    ("points", "says"),
    [
        (np.eye(3), "3 images with a position are in the model, at least 5 are needed"),
        (np.outer(np.arange(9.0), [1, 2, 3]), "on one line"),
        (np.ones((9, 3)), "all at one place"),
    ],
)
def test_too_few_and_collinear_positions_say_so(points: NDArray[np.float64], says: str) -> None:
    with pytest.raises(PositionsError, match=says):
        fit_similarity(points, points + 5)


def test_positions_of_which_half_are_anywhere_are_not_used_unasked() -> None:
    rng = np.random.default_rng(1)
    old = rng.normal(size=(30, 3))
    new = old.copy()
    new[:16] = rng.normal(size=(16, 3)) * 50
    assert not fit_similarity(old, new).is_good


def test_a_mirrored_walk_is_not_mirrored_back() -> None:
    old = np.random.default_rng(2).normal(size=(12, 3))
    assert np.linalg.det(Similarity.of_pairs(old, old * [1, 1, -1]).rotation) == pytest.approx(1)


# --- whole commands ---------------------------------------------------------------------------------------------------


def result(words: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[dict, str]:
    code = run([*words, "--json"])
    said = capfd.readouterr()
    assert code == 0, said.err
    return json.loads(said.out.splitlines()[-1]), said.out + said.err


def centers_in(scene: Path) -> dict[str, NDArray[np.float64]]:
    model = pycolmap.Reconstruction(scene / "sparse/0")
    return {image.name: image.projection_center() for image in model.images.values()}


def test_sfm_aligns_with_gps_or_a_distance(tmp_path: Path, capfd) -> None:
    there = write_walk(tmp_path / "walk")
    facts, _ = result(["sfm", str(tmp_path / "walk"), "-o", str(tmp_path / "scene")], capfd)
    placed = facts["georeference"]
    assert placed["applied"]
    assert placed["left_out"] == []
    sidecar = json.loads((tmp_path / "scene" / FILE).read_text())
    origin = [sidecar["origin"][key] for key in ("latitude", "longitude", "height")]
    np.testing.assert_allclose(origin, placed["origin"])
    # The scene is metres about its own origin: back to the Earth, and to where the cameras were.
    matrix = np.array(sidecar["scene_to_geocentric"]["matrix"])
    centers = centers_in(tmp_path / "scene")
    for i, wanted in enumerate(there):
        earth = matrix[:3, :3] @ centers[f"{i}.jpg"] + matrix[:3, 3]
        found = to_enu(np.array([from_geocentric(earth)]), PLACE)[0]
        # The model itself is off by some 0.05 % of 3.5 m, the positions by the last digit of their seconds.
        np.testing.assert_allclose(found, wanted, atol=0.01)
    # Up is up: the corner's floor is z = 0, which lies 430 m high.
    points = pycolmap.Reconstruction(tmp_path / "scene/sparse/0").points3D.values()
    heights = np.array([point.xyz[2] for point in points]) + origin[2] - PLACE[2]
    assert np.percentile(heights, 1) > -0.05
    info, said = result(["info", str(tmp_path / "scene")], capfd)
    assert "metres east, north and up of" in said
    assert info["scene_kind"] == "colmap"
    words = ["sfm", str(tmp_path / "walk"), "-o", str(tmp_path / "scaled"), "--scale-from", "0.JPG,5.jpg,2"]
    facts, said = result(words, capfd)
    assert facts["georeference"]["unused_positions"] == len(there)
    assert f"the GPS positions of {len(there)} images are not used" in said
    assert facts["georeference"]["applied"]
    centers = centers_in(tmp_path / "scaled")
    assert np.linalg.norm(centers["0.jpg"] - centers["5.jpg"]) == pytest.approx(2)
    assert json.loads((tmp_path / "scaled" / FILE).read_text())["frame"] == "metres, axes as they came"


#: How DJI's drones have written positions beside their videos: of two years and of an FPV drone.
ENTRIES = (
    '<font size="28">FrameCnt: 1, DiffTime: 33ms\n2026-04-27 15:22:26.853\n[iso: 100] [focal_len: 24.00] '
    "[latitude: {0:.8f}] [longitude: {1:.8f}] [rel_alt: 1.500 abs_alt: {2:.3f}] [ct: 5660] </font>",
    "SrtCnt : 1, DiffTime : 33ms\n[iso : 110] [latitude : {0:.8f}] [longtitude : {1:.8f}] [altitude: {2:.3f}] </font>",
)


def write_flight_log(path: Path, places: NDArray[np.float64], every: float, entry: str = ENTRIES[0]) -> None:
    times = [f"00:00:{int(i * every):02},{round(i * every % 1 * 1000):03}" for i in range(len(places) + 1)]
    blocks = [f"{i + 1}\n{times[i]} --> {times[i + 1]}\n{entry.format(*place)}\n" for i, place in enumerate(places)]
    path.write_text("\n".join(blocks))


@pytest.mark.parametrize("entry", ENTRIES)
def test_flight_logs_give_positions_between_their_entries(entry: str, tmp_path: Path) -> None:
    places = PLACE + np.array([[0, 0, 0], [0, 0, 0], [1e-4, 2e-4, 3], [2e-4, -1e-4, 4]])  # the second: no news yet
    write_flight_log(tmp_path / "a.SRT", places, 0.5, entry)
    log = read_flight_log(tmp_path / "a.SRT")
    assert log is not None
    np.testing.assert_allclose(log.at(0.5), PLACE + np.array([0.5e-4, 1e-4, 1.5]), atol=2e-8)
    np.testing.assert_allclose(log.at(1.75), places[3], atol=2e-8)
    assert (log.at(-1.5), log.at(2.6)) == (None, None)


def test_a_flight_over_the_180th_meridian_has_its_positions_there(tmp_path: Path) -> None:
    places = np.array([[-17.0, 179.9998, 30], [-17.0, -179.9998, 30], [-17.0, -179.9990, 30], [-17.0, 179.9992, 30]])
    write_flight_log(tmp_path / "a.SRT", places, 1.0)
    log = read_flight_log(tmp_path / "a.SRT")
    assert log is not None
    found = [log.at(seconds) for seconds in (0.25, 0.75, 1.5, 2.25)]
    expected = np.array([179.9999, -179.9999, -179.9994, -179.99945])
    np.testing.assert_allclose([place[1] for place in found if place], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1\n00:00:01,000 --> 00:00:02,000\nHello there\n",
        "1\n00:00:01,000 --> 00:00:02,000\n[latitude: 0.0] [longitude: 0.0] [rel_alt: 1.0 abs_alt: 2.0]\n",
        "1\n00:00:01,000 --> 00:00:02,000\n[latitude: 95.0] [longitude: 8.0] [rel_alt: 1.0 abs_alt: 2.0]\n",
        "1\n00:00:01,000 --> 00:00:02,000\n[latitude: 45.0] [longitude: 8.0]\n",
        "[latitude: 45.0] [longitude: 8.0] [abs_alt: 2.0]",
        "\x00\xff --> [latitude: 1e9999]",
    ],
)
def test_subtitles_without_positions_have_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.srt").write_bytes(text.encode("latin-1"))
    assert read_flight_log(tmp_path / "a.srt") is None


@pipes_stay_open
def test_sfm_aligns_a_video_with_its_flight_log(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    there = true_centers()
    write_video(tmp_path / "DJI_0001.MP4", [Image.fromarray(corner.image(i)) for i in range(7)])
    words = ["sfm", "DJI_0001.MP4", "--georeference", "on"]
    assert run(words) == 2
    assert "no .SRT with those of a drone lies beside it" in capfd.readouterr().err
    write_flight_log(tmp_path / "DJI_0001.SRT", places_of(there), 0.1, "FrameCnt: 1, no position")
    assert run(words) == 3
    assert "no image has a GPS position" in capfd.readouterr().err
    write_flight_log(tmp_path / "DJI_0001.SRT", places_of(there), 0.1)
    facts, said = result(["sfm", "DJI_0001.MP4", "-o", "scene"], capfd)
    assert facts["georeference"]["applied"], facts["georeference"]
    assert "metres east, north, up of 47.2501" in said
    centers = centers_in(tmp_path / "scene")
    matrix = np.array(json.loads((tmp_path / "scene" / FILE).read_text())["scene_to_geocentric"]["matrix"])
    for i, wanted in enumerate(there):
        earth = matrix[:3, :3] @ centers[f"frame_{i:06d}.png"] + matrix[:3, 3]
        np.testing.assert_allclose(to_enu(np.array([from_geocentric(earth)]), PLACE)[0], wanted, atol=0.03)


@NEEDS_COMPILER
def test_exports_carry_the_origin(tmp_path: Path, capfd) -> None:
    write_scene(tmp_path / "scene")
    origin = {"latitude": 47.2501234, "longitude": -8.5, "height": 430.25}
    (tmp_path / "scene" / FILE).write_text(json.dumps({"version": 1, "origin": origin}))
    words = ["-n", "1", "-q", "--device", "cpu", *QUICK]
    assert run(["train", str(tmp_path / "scene"), "-o", str(tmp_path / "run"), *words]) == 0
    capfd.readouterr()
    (tmp_path / "scene" / FILE).unlink()  # the checkpoint has it
    wanted = "latitude, longitude, height 47.2501234 -8.5 430.25 (EPSG:4979)"
    for name in ("a.ply", "a.compressed.ply", "a.glb", "a.spz"):
        assert run(["export", str(tmp_path / "run"), "-o", str(tmp_path / name)]) == 0
        said = capfd.readouterr().err
        content = (tmp_path / name).read_bytes()
        assert (wanted.encode() in content) is not name.endswith("spz")
        assert (wanted in said) is name.endswith("spz")
    # glTF has y up: the model's z is up there, and is down in the frame of a PLY when it is read again.
    model, upright = Model.load(tmp_path / "run"), Model.load(tmp_path / "a.glb")
    assert model.place == (47.2501234, -8.5, 430.25)
    x, y, z = model.gaussians.means.T
    torch.testing.assert_close(upright.gaussians.means, torch.stack((-x, -z, -y), dim=1), rtol=1e-5, atol=1e-5)
    model.export(tmp_path / "b.glb")
    assert (tmp_path / "b.glb").read_bytes() == (tmp_path / "a.glb").read_bytes()


def test_gps_too_coarse_for_the_scene_is_left_alone(tmp_path: Path, capfd) -> None:
    write_walk(tmp_path / "walk", noise=3.0)
    words = ["sfm", str(tmp_path / "walk"), "-o", str(tmp_path / "scene")]
    facts, _ = result(words, capfd)
    assert not facts["georeference"]["applied"]
    assert not (tmp_path / "scene" / FILE).exists()
    reason = facts["georeference"]["reason"]
    assert "too coarse" in reason or "agree with the cameras" in reason


def test_without_gps_on_is_an_error(images: Path, tmp_path: Path, capfd) -> None:
    scene = tmp_path / "scene"
    assert run(["sfm", str(images), "-o", str(scene), "--georeference", "on"]) == 3
    said = capfd.readouterr().err
    assert "no image has a GPS position" in said
    assert "--scale-from" in said
    assert not scene.exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--scale-from", "a.jpg,b.jpg"], "is not A,B,LENGTH"),
        (["--scale-from", "a.jpg,b.jpg,-3"], "is not A,B,LENGTH"),
        (["--scale-from", "a.jpg,a.jpg,3"], "is not A,B,LENGTH"),
        (["--scale-from", "a.jpg,b.jpg,3", "--georeference", "on"], "either from GPS positions or from a distance"),
        (["--georeference", "maybe"], "there is no 'maybe'"),
    ],
)
def test_flags_that_cannot_be_followed(words: list[str], says: str, tmp_path: Path, capfd) -> None:
    assert run(["sfm", str(tmp_path), *words]) == 2
    assert says in capfd.readouterr().err


def test_a_distance_between_images_that_are_not_there_is_refused_at_once(
    images: Path, tmp_path: Path, capfd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splatcli.sfm.run.run_worker", lambda *words, **more: pytest.fail("mapping began"))
    assert run(["sfm", str(images), "-o", str(tmp_path / "scene"), "--scale-from", "view 000.jpg,viev 005.jpg,2"]) == 3
    said = capfd.readouterr().err
    assert "'viev 005.jpg' is not among the" in said
    assert "such as view 005.jpg" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("latitude", ['"north"', "1e400", "1" + 400 * "0", "90.1", "NaN"])
def test_a_damaged_sidecar_is_named(latitude: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(f'{{"origin": {{"latitude": {latitude}, "longitude": 7, "height": 5}}}}')
    with pytest.raises(SceneError, match=FILE):
        read_sidecar(tmp_path)
    assert read_sidecar(tmp_path / "nowhere") is None


def test_a_sidecar_with_numbers_in_quotes_is_read(tmp_path: Path) -> None:
    made.colmap_scene(tmp_path)
    write_sidecar(tmp_path, {"origin": {"latitude": "46.0", "longitude": "7.0", "height": "500.0"}})
    scene = read_scene(tmp_path, DataConfig())
    assert scene.place == (46.0, 7.0, 500.0)
    assert any("up of 46.0000000, 7.0000000, 500.00 m" in note for note in scene.notes)


def test_only_the_largest_model_is_aligned(tmp_path: Path) -> None:
    write_sidecar(tmp_path, {"origin": {"latitude": 46.0, "longitude": 7.0, "height": 500.0}})
    assert read_sidecar(tmp_path, "sparse/0") == read_sidecar(tmp_path) is not None
    assert read_sidecar(tmp_path, "sparse/1") is None


# --- real captures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "residual", "metres"), [("drone", (0.23, 0.37, 0.44), 8.75), ("drone_nir", (2.7, 3.3, 0.8), 17.9)]
)
def test_real_flights(name: str, residual: tuple[float, ...], metres: float) -> None:
    """The residuals are those of an independent fit of all positions."""
    folder = DATA / name
    if not folder.is_dir():
        pytest.skip(f"../shared/data/{name} is not there")
    model = pycolmap.Reconstruction(folder / "sparse/0")
    centers = {image.name: image.projection_center() for image in model.images.values()}
    known = {name: position_of(folder / "images" / name) for name in centers}
    found = georeference(centers, {name: place for name, place in known.items() if place is not None})
    facts = found.facts()
    assert found.fit.is_good
    assert facts["left_out"] == []
    np.testing.assert_allclose(list(facts["residual_m"].values()), residual, atol=0.06)
    assert facts["metres_per_unit"] == pytest.approx(metres, rel=0.01)
    moved = found.fit.similarity
    up = np.mean([moved.rotation @ image.viewing_direction() for image in model.images.values()], axis=0)
    assert up[2] < -0.9, "the flights look down"
