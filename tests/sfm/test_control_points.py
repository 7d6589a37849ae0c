"""Models aligned with ground control points, and cameras for nerfstudio, by whole commands."""

from __future__ import annotations

import json
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from splatcli.api import Scene
from splatcli.cli.commands import run
from splatcli.errors import SceneError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.control_points import ControlPoints, _fit, _same_image, nearest_to_rays, read_control_points
from splatcli.scene.geodesy import to_enu
from splatcli.scene.georeference import FILE
from splatcli.sfm.mapping import centers_of
from tests.sfm import corner
from tests.sfm.test_georeference import places_of, true_centers

#: Points on the walls of the corner, metres.
POINTS = np.array(
    [[0.0, 0.4, 0.5], [0.5, 0.0, 0.9], [0.6, 0.7, 0.0], [0.0, 1.0, 0.2], [0.2, 0.3, 0.0], [0.9, 0.0, 0.3]]
)

#: The image that EXIF turns by half: pixels are those of the image as it is shown.
TURNED = 4


def pixel(index: int, point: np.ndarray) -> np.ndarray:
    x, y, z = corner.pose(index)[:3] @ np.append(point, 1.0)
    return np.array([x / z * corner.FOCAL + corner.WIDTH / 2, y / z * corner.FOCAL + corner.HEIGHT / 2])


def rows(places: np.ndarray, *, views=range(6), separator: str = " ", named: bool = True) -> str:
    lines = []
    for i, place in enumerate(places):
        for view in views:
            x, y = pixel(view, POINTS[i])
            if 0 <= x <= corner.WIDTH and 0 <= y <= corner.HEIGHT:
                if view == TURNED:
                    x, y = corner.WIDTH - x, corner.HEIGHT - y
                numbers = [repr(float(value)) for value in (*place, x, y)]
                lines.append(separator.join([*numbers, f"{view}.png", *([f"p{i}"] if named else [])]))
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("control") / "photos"
    folder.mkdir()
    for index in range(6):
        exif = Image.Exif()
        exif[0x0112] = 3 if index == TURNED else 1
        Image.fromarray(corner.image(index)).save(folder / f"{index}.png", exif=exif)
    return folder


def positions(folder: Path) -> np.ndarray:
    centers = centers_of(pycolmap.Reconstruction(folder / "sparse/0"))
    return np.stack([centers[f"{i}.png"] for i in range(6)])


def test_a_room_gets_its_surveyed_axes_and_transforms(photos: Path, tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gcp.txt").write_text("LOCAL\n# surveyed\n" + rows(POINTS))
    command = ["sfm", str(photos), "-o", "made", "--gcp", "gcp.txt", "--nerfstudio"]
    assert run(command) == 0
    assert "6 are off by" in capfd.readouterr().err
    assert np.abs(positions(Path("made")) - true_centers()[:6]).max() < 0.01  # of 3.5 m
    sidecar = json.loads((Path("made") / FILE).read_text())
    assert "origin" not in sidecar
    assert max(sidecar["residual_m"].values()) < 0.005
    assert run([*command, "--json"]) == 0  # used again
    facts = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert facts["reused"]
    assert facts["transforms"].endswith("made/transforms.json")
    # Another coordinate is another scene.
    Path("gcp.txt").write_text("LOCAL\n" + rows(POINTS + np.array([1.0, 0.0, 0.0])))
    assert run(command) == 8
    assert "made with other options" in capfd.readouterr().err
    # Read alone, the nerfstudio files are the same scene.
    ours, theirs = (Scene.open("made", format=name) for name in ("colmap", "nerfstudio"))
    assert [camera.name for camera in ours.cameras] == [camera.name for camera in theirs.cameras]
    for one, other in zip(ours.cameras, theirs.cameras, strict=True):
        assert np.allclose(one.viewmat, other.viewmat, atol=1e-9)
        assert np.allclose([one.fx, one.fy, one.cx, one.cy], [other.fx, other.fy, other.cx, other.cy], rtol=1e-9)
    assert run(["info", "made"]) == 0
    assert "the COLMAP model is used, not transforms.json, which describes the same views" in capfd.readouterr().out


@pytest.mark.parametrize(("metres", "kept"), [(0.002, 8), (0.5, 7)])
def test_of_points_that_fit_exactly_none_contradicts_by_millimetres(metres: float, kept: int) -> None:
    surveyed = np.random.default_rng(1).uniform(0.0, 60.0, (8, 3))
    model = 0.1 * surveyed + 3.0
    surveyed[2, 1] += metres
    assert _fit(model, surveyed).used.sum() == kept


def test_a_place_on_the_earth_by_utm_and_a_wrong_coordinate(photos: Path, tmp_path: Path, monkeypatch, capfd) -> None:
    pyproj = pytest.importorskip("pyproj", reason="pip install 'splatcli[geo]'")
    monkeypatch.chdir(tmp_path)
    places = places_of(POINTS)
    convert = pyproj.Transformer.from_crs("EPSG:4979", "EPSG:32632", always_xy=True)
    east, north, height = convert.transform(places[:, 1], places[:, 0], places[:, 2])
    projected = np.stack([east, north, height], axis=1)
    projected[3, 2] += 0.5  # a blunder of the surveyor
    Path("gcp.txt").write_text("WGS84 UTM 32N\n" + rows(projected, separator="\t"))
    assert run(["sfm", str(photos), "-o", "made", "--gcp", "gcp.txt"]) == 0
    said = capfd.readouterr().err
    assert "control points that disagree with the others are left out: p3" in said
    sidecar = json.loads((Path("made") / FILE).read_text())
    assert sidecar["left_out"] == ["p3"]
    assert sidecar["control_points"]["p3"]["residual_m"][2] == pytest.approx(0.5, abs=0.02)
    origin = np.array([sidecar["origin"][key] for key in ("latitude", "longitude", "height")])
    true = to_enu(places_of(true_centers()[:6]), origin)
    assert np.abs(positions(Path("made")) - true).max() < 0.01


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "there are no control points"),
        ("LOCAL\n", "there are no control points"),
        ("LOCAL\n1 2 3 4\n", "is not a control point: '1 2 3 4'"),
        ("LOCAL\n1 2 3 4 nan a.png\n", "is not a control point"),
        ("LOCAL\n1 2 3 4 5 a.png p\n1 2 4 4 5 b.png p\n", "point 'p' has another place in line 2"),
        ("LOCAL\n1 2 3 4 5 a.png p\n1 2 3 4 6 a.png p\n", "a.png shows point 'p' twice"),
        ("EPSG:4326\n8 95 3 4 5 a.png\n", "[8.0, 95.0, 3.0] is no place on the Earth in EPSG:4326"),
        ("EPSG:1\n8 95 3 4 5 a.png\n", "'EPSG:1' is no coordinate system"),
    ],
)
def test_bad_files_are_named_with_the_line(text: str, reason: str, tmp_path: Path) -> None:
    if "EPSG:1\n" in text:
        pytest.importorskip("pyproj", reason="pip install 'splatcli[geo]'")
    file = tmp_path / "gcp.txt"
    file.write_text(text)
    with pytest.raises(SceneError) as caught:
        read_control_points(file)
    assert reason in caught.value.what
    assert str(caught.value.where).startswith(str(file))


def test_systems_that_need_pyproj_name_the_extra(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pyproj", None)
    file = tmp_path / "gcp.txt"
    file.write_text("EPSG:32632\n1 2 3 4 5 a.png\n")
    with pytest.raises(SceneError, match="which pyproj converts") as caught:
        read_control_points(file)
    assert caught.value.remedy == "pip install 'splatcli[geo]'"
    file.write_text("EPSG:4326\n8.5 47.25 430 4 5 a.png\n8.5 47.25 430 4 5 b.png\n")
    (point,) = read_control_points(file).points
    assert point.place == (47.25, 8.5, 430.0)
    assert set(point.pixels) == {"a.png", "b.png"}


def test_too_few_points_and_other_flags_are_refused(photos: Path, tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gcp.txt").write_text("LOCAL\n" + rows(POINTS[:2]))
    assert run(["sfm", str(photos), "-o", "made", "--gcp", "gcp.txt"]) == 3
    said = capfd.readouterr().err
    assert "2 of 2 control points are marked in 2 of the 6 images or more, at least 3 are needed" in said
    assert "features" not in said, "before any work"
    assert not Path("made").exists()
    Path("gcp.txt").write_text("LOCAL\n" + rows(POINTS).replace(".png", ".b.png"))
    assert run(["sfm", str(photos), "-o", "made", "--gcp", "gcp.txt"]) == 3
    assert "0 of 6 control points are marked" in capfd.readouterr().err
    center = true_centers()[0]
    far = center + 1000.0 * (POINTS[4] - center)  # behind the wall, where all rays are parallel
    seen = [(view, *pixel(view, far)) for view in range(2)]
    lines = [f"0 0 9 {float(x)} {float(y)} {view}.png far" for view, x, y in seen]
    Path("gcp.txt").write_text("LOCAL\n" + rows(POINTS[:2]) + "\n".join(lines) + "\n")
    assert run(["sfm", str(photos), "-o", "made", "--gcp", "gcp.txt"]) == 3
    assert "2 control points can be placed, at least 3 are needed (far: its rays are within" in capfd.readouterr().err
    assert run(["sfm", str(photos), "--gcp", "gcp.txt", "--scale-from", "0.png,1.png,2"]) == 2
    assert "leave out --scale-from" in capfd.readouterr().err
    assert run(["sfm", str(photos), "--gcp", "none.txt"]) == 3
    assert "none.txt" in capfd.readouterr().err
    Path("gcp.txt").write_text("LOCAL\n" + rows(np.linspace([0, 0, 0], [0, 0, 1], 3)))
    assert run(["sfm", str(photos), "-o", "made", "--gcp", "gcp.txt"]) == 3
    assert "lie on one line" in capfd.readouterr().err
    text = rows(POINTS)
    wide = next(part for part in text.split() if part.endswith(".png"))
    x, y = text.split()[3:5]
    Path("gcp.txt").write_text("LOCAL\n" + text.replace(f"{x} {y}", f"{float(x) + 4 * corner.WIDTH} {y}", 1))
    assert run(["sfm", str(photos), "-o", "made", "--gcp", "gcp.txt"]) == 3
    assert f"of {wide}, which is {corner.WIDTH}x{corner.HEIGHT}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("a/1.jpg", "a/1.jpg"),
        ("2.jpg", "b/2.jpg"),  # as some programs write them
        ("flight/b/2.jpg", "b/2.jpg"),
        ("b/1.jpg", None),  # not registered, and not the image of that name in another folder
        ("3.jpg", None),  # two are called so
        ("22.jpg", None),
    ],
)
def test_a_mark_belongs_to_one_image_or_none(name: str, found: str | None) -> None:
    assert _same_image(name, ["a/1.jpg", "b/2.jpg", "a/3.jpg", "b/3.jpg"]) == found


def test_heights_are_in_the_unit_of_the_system_and_need_its_grid(tmp_path: Path) -> None:
    pyproj = pytest.importorskip("pyproj", reason="needs pyproj: splatcli[geo]")
    file = tmp_path / "gcp.txt"
    file.write_text("EPSG:2278\n" + rows(POINTS * 0 + [3.1e6, 1.38e7, 328.083333]))  # US survey feet, in Texas
    for point in read_control_points(file).points:
        assert point.place[2] == pytest.approx(100.0, abs=1e-4)
    file.write_text("EPSG:32614\n" + rows(POINTS * 0 + [3e5, 3.3e6, 100.0]))
    for point in read_control_points(file).points:
        assert point.place[2] == pytest.approx(100.0, abs=1e-4)
    file.write_text("EPSG:32632+5773\n" + rows(POINTS * 0 + [5e5, 5.3e6, 100.0]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        there = pyproj.transformer.TransformerGroup("EPSG:32632+5773", "EPSG:4979").best_available
    with nullcontext() if there else pytest.raises(SceneError, match="lacks the grid for the heights of"):
        assert all(point.place[2] > 130.0 for point in read_control_points(file).points)


def test_rays_meet_and_plain_values_come_back(tmp_path: Path) -> None:
    generator = np.random.default_rng(2)
    point, centers = generator.normal(size=3), generator.normal(size=(4, 3)) + 5
    directions = point - centers
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    assert np.allclose(nearest_to_rays(centers, directions), point, atol=1e-12)
    file = tmp_path / "gcp.txt"
    file.write_text("LOCAL\n" + rows(POINTS, named=False))
    read = read_control_points(file)
    assert len(read.points) == 6
    assert ControlPoints.from_dict(json.loads(json.dumps(read.as_dict()))) == read
