"""``splat sfm --cameras``: the cameras of a scene are held, and points come to it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import splatcli
from splatcli.cli.commands import run
from splatcli.config import DataConfig
from splatcli.errors import SceneError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.build import _numbers_of
from splatcli.scene.read import read_scene
from splatcli.scene.scene import Scene, known_depths
from splatcli.scene.source import FixedLens, View
from splatcli.sfm.options import SfmOptions
from splatcli.sfm.points_request import Deadline, TooSlowError, points_request, with_fewer_features
from splatcli.sfm.run import SfmResult
from splatcli.sfm.triangulate import pairs_by_pose
from tests.sfm import corner
from tests.sfm.conftest import NUM_IMAGES, TURNED, name_of

#: Far from the origin, as positions on the Earth are.
SHIFT = np.array([410_000.0, -35.0, 20.0])
LENS = pycolmap.Camera(
    model="OPENCV",
    width=corner.WIDTH,
    height=corner.HEIGHT,
    params=[corner.FOCAL, corner.FOCAL + 4, corner.WIDTH / 2 + 3, corner.HEIGHT / 2 - 2, -0.06, 0.01, 1e-3, -1e-3],
)


#: A PLY of five points.
CLOUD = "\n".join(
    [
        *("ply", "format ascii 1.0", "element vertex 5", *(f"property float {axis}" for axis in "xyz"), "end_header"),
        *("1 2 3" for _ in range(5)),
        "",
    ]
)


@pytest.fixture(scope="module")
def posed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A nerfstudio scene without points, whose lens is distorted and one of whose images EXIF turns."""
    root = tmp_path_factory.mktemp("scan")
    (root / "images").mkdir()
    frames = []
    for index in range(NUM_IMAGES):
        image, exif = Image.fromarray(corner.image(index, LENS)), Image.Exif()
        if index == TURNED:
            image = image.transpose(Image.Transpose.ROTATE_90)
            exif[0x0112] = 6
        image.save(root / "images" / name_of(index), quality=95, exif=exif)
        c2w = np.linalg.inv(corner.pose(index)) @ np.diag([1.0, -1.0, -1.0, 1.0])
        c2w[:3, 3] += SHIFT
        frames.append({"file_path": f"images/{name_of(index)}", "transform_matrix": c2w.tolist()})
    names = ("fl_x", "fl_y", "cx", "cy", "k1", "k2", "p1", "p2")
    lens = dict(zip(names, map(float, LENS.params), strict=True))
    facts = {"camera_model": "OPENCV", "w": corner.WIDTH, "h": corner.HEIGHT, **lens, "frames": frames}
    (root / "transforms.json").write_text(json.dumps(facts))
    return root


@pytest.fixture(scope="module")
def made(posed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scene with points."""
    out = tmp_path_factory.mktemp("made") / "scene"
    assert run(["sfm", str(posed), "--cameras", str(posed), "-o", str(out), "--quiet"]) == 0
    return out


def test_images_are_views_of_the_scene_that_was_made_of_them(
    images: Path, solved: SfmResult, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its images are other links to the same files."""
    scene = tmp_path / "scene"
    assert run(["sfm", str(images), "--cameras", str(solved.folder), "-o", str(scene), "--json", "-q"]) == 0
    facts = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (facts["registered"], facts["cameras_held"]) == (NUM_IMAGES, True)
    before, after = in_the_world(read_scene(solved.folder, DataConfig())), in_the_world(read_scene(scene, DataConfig()))
    for name, (rotation, center, _) in before.items():
        np.testing.assert_allclose(after[name][0], rotation, atol=1e-9)
        np.testing.assert_allclose(after[name][1], center, atol=1e-6)


def in_the_world(scene: Scene) -> dict[str, tuple[np.ndarray, np.ndarray, list[float]]]:
    """Rotation, position and intrinsics of each camera."""
    return {
        camera.name: (
            camera.viewmat[:3, :3],
            camera.center + np.asarray(scene.offset),
            [camera.fx, camera.fy, camera.cx, camera.cy, camera.width, camera.height],
        )
        for camera in scene.cameras
    }


def test_cameras_stay_and_points_lie_on_the_walls(posed: Path, made: Path) -> None:
    before, after = read_scene(posed, DataConfig()), read_scene(made, DataConfig())
    assert (before.points, after.kind) == (None, "colmap")
    cameras, kept = in_the_world(before), in_the_world(after)
    assert kept.keys() == cameras.keys()
    for name, (rotation, center, intrinsics) in cameras.items():
        np.testing.assert_allclose(kept[name][0], rotation, atol=1e-9)
        np.testing.assert_allclose(kept[name][1], center, atol=1e-6)
        np.testing.assert_allclose(kept[name][2], intrinsics, rtol=1e-9)
    assert after.points is not None
    xyz = after.points.xyz + np.asarray(after.offset) - SHIFT
    distance = np.abs(xyz).min(axis=1)  # of the nearest wall
    assert len(xyz) > 200
    assert np.median(distance) < 0.01
    facts = json.loads((made / "sfm.json").read_text())
    assert facts["registered"] == NUM_IMAGES
    assert facts["reprojection_error_px"] < 0.5
    assert "triangulation" in facts["seconds"]


def test_a_second_call_uses_the_first_and_other_cameras_do_not(
    posed: Path, made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["sfm", str(posed), "--cameras", str(posed), "-o", str(made)]) == 0
    assert "points found before are used" in capfd.readouterr().err
    moved = json.loads((posed / "transforms.json").read_text())
    moved["fl_x"] += 1
    moved["frames"].pop()
    (tmp_path / "images").symlink_to(posed / "images")
    (tmp_path / "transforms.json").write_text(json.dumps(moved))
    assert run(["sfm", str(posed), "--cameras", str(tmp_path), "-o", str(made)]) == 8
    said = capfd.readouterr().err
    assert f"1 image is not among the views of {tmp_path}, and left out" in said
    assert "the cameras of other images, or made with other options" in said


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--gcp", "gcp.txt"], 2, "known cameras are held as they are\n  where: --gcp"),
        (["--mapper", "global"], 2, "known cameras are held as they are"),
        (["--cameras", "elsewhere"], 3, "only 0 of the 7 images are views of"),
    ],
)
def test_what_cannot_be_is_refused(
    posed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gcp.txt").write_text("EPSG:4326\n1 2 3 4 5 view\n")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/images").mkdir()
    for name in (name_of(index) for index in range(NUM_IMAGES)):
        (tmp_path / "elsewhere/images" / name).write_bytes((posed / "images" / name).read_bytes())
    (tmp_path / "elsewhere/transforms.json").write_text((posed / "transforms.json").read_text())
    assert run(["sfm", str(posed), "--cameras", str(posed), *words]) == code
    assert says in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--blocks", "1x1"], "splat sfm {scene} --cameras {scene} -o DIR triangulates points, and --points DIR"),
        (["--dry-run"], "the scene has no points; splat train triangulates them first"),
        (["--init", "random", "--iterations", "1"], "started from 1000 random points"),
        (["--max-time", "10h", "--dry-run"], "splat train triangulates them first, if the time suffices"),
    ],
)
def test_training_does_not_wait_for_points(
    posed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    command = ["train", str(posed), *words, "--cap-max", "10000", "--device", "cpu", "-o", str(tmp_path / "run")]
    assert run(command) == (3 if "--blocks" in words else 0)
    assert says.format(scene=posed) in capfd.readouterr().err
    assert not list(tmp_path.glob(f"{posed.name}-sfm*"))


def test_a_run_by_the_clock_waits_a_part_of_its_time_for_points(
    posed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for module in ("run_training", "time_budget"):  # that of the tests
        monkeypatch.setattr(f"splatcli.cli.{module}.process_age", lambda: 0.0)
    words = ["train", str(posed), "--device", "cpu", "--cap-max", "2000", "--stop-at", "1", "--max-time", "2h"]
    with monkeypatch.context() as patch:
        patch.setattr("splatcli.sfm.points_request.time", SlowClock())
        assert run([*words, "-o", "slow/run"]) == 0
    said = capfd.readouterr().err
    assert "training begins with random points, because no others can be triangulated: that takes more than" in said
    with monkeypatch.context() as patch:
        patch.setattr("splatcli.sfm.points_request._START_SECONDS", 7200.0)
        assert run([*words, "-o", "slow/again"]) == 0
    said = capfd.readouterr().err
    assert f"the time is too short for others; splat sfm {posed} --cameras {posed} triangulates better ones" in said
    assert sorted(path.name for path in (tmp_path / "slow").iterdir()) == ["again", "run"], "nothing is left of them"

    assert run([*words, "-o", "out/run"]) == 0
    assert "the scene has no points: splat sfm triangulates them first" in capfd.readouterr().err
    points = tmp_path / "out" / f"{posed.name}-sfm"
    config = json.loads((tmp_path / "out/run/config.json").read_text())
    assert (config["data"]["points"], config["model"]["init"]) == (str(points), "sfm")
    made = points.stat().st_mtime_ns
    monkeypatch.setattr("splatcli.sfm.points_request._START_SECONDS", 7200.0)
    assert run([*words, "-o", "out/again"]) == 0
    assert "points found before are used" in capfd.readouterr().err, "whatever time there is"
    assert points.stat().st_mtime_ns == made


def test_features_that_are_bound_to_take_too_long_end_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """And smaller images are tried, at the speed that is known then."""
    heard: list[tuple[str, int, int]] = []
    monkeypatch.setattr("splatcli.sfm.points_request.time", SlowClock())

    def of(images: int) -> TooSlowError | None:
        deadline = Deadline(100 * 3600.0, lambda *words: heard.append(words))
        try:
            for done in range(images + 1):
                deadline("features", done, images)
            deadline("matching", 0, 1000)
        except TooSlowError as error:
            return error
        return None

    assert of(20) is None
    assert len(heard) == 22
    heard.clear()
    slow = of(200)
    assert slow is not None
    assert heard == [("features", done, 200) for done in range(4)]
    assert slow.needed == pytest.approx(3600.0 * (1 + 200 * (1 + Deadline._REST)))
    options = SfmOptions(max_image_size=960)
    for seconds, size in ((400, 640), (200, 480), (100, 320), (60, 240), (30, None)):
        fewer = with_fewer_features(options, slow, 3600.0 * seconds)
        assert (None if fewer is None else fewer.max_image_size) == size
    assert with_fewer_features(options, TooSlowError(10.0), 1e9) is None, "nothing is known"


class SlowClock:
    """A clock by which each image takes an hour."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 3600.0
        return self.now


def test_features_are_fewer_where_time_is_short(posed: Path) -> None:
    scene = read_scene(posed, DataConfig())
    pixels = sum(camera.width * camera.height for camera in read_scene(posed, DataConfig(resolution=1)).cameras)
    assert points_request(scene, DataConfig())[1].max_image_size == 1600
    for seconds, size, suffices in ((1e9, 1600, True), (8.0, 240, True), (1.0, 240, False)):
        _, options, enough = points_request(scene, DataConfig(), seconds)
        assert (options.max_image_size, enough) == (size, suffices), pixels


def test_points_are_triangulated_from_python(
    posed: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bare = splatcli.Scene.open(posed, resolution=2)
    assert bare.points is None
    scene = bare.triangulated()
    assert (scene.root, scene.data.resolution, len(scene)) == (bare.root, 2, len(bare))
    assert scene.data.points == str(tmp_path / "output" / f"{posed.name}-sfm")
    expected = splatcli.Scene.open(posed, resolution=2, points=made)
    assert scene.points is not None
    assert expected.points is not None
    assert np.array_equal(scene.points.xyz, expected.points.xyz), "those of splat sfm --cameras"
    stored = (Path(scene.data.points) / "sfm.json").stat().st_mtime_ns
    assert bare.triangulated().data.points == scene.data.points
    assert (Path(scene.data.points) / "sfm.json").stat().st_mtime_ns == stored, "they are made once"
    elsewhere = bare.triangulated(tmp_path / "elsewhere")
    assert elsewhere.data.points == str(tmp_path / "elsewhere")
    assert splatcli.Trainer(scene, iterations=1, output=tmp_path / "run").config.model.init == "sfm"


def test_training_goes_on_without_a_folder_for_points(
    posed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The folder of a run may be there in one that takes no others, as in a container; here a name is too long."""
    scene = tmp_path / ("scan" * 62)
    scene.symlink_to(posed)
    words = ["train", str(scene), "--device", "cpu", "-o", str(tmp_path / "run"), "--cap-max", "2000"]
    assert run([*words, "--iterations", "1"]) == 0
    assert "training begins with random points, because no others can be triangulated" in capfd.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", scene.name]


def test_training_triangulates_points_that_are_missing(
    posed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", str(posed), "--device", "cpu", "-o", "out/run", "--cap-max", "2000"]
    assert run([*words, "--iterations", "3", "--stop-at", "2"]) == 0
    said = capfd.readouterr().err
    points = tmp_path / "out" / f"{posed.name}-sfm"
    assert "splat sfm triangulates them first, and keeps them beside the run for later ones" in said
    assert "; --init random starts without\n" in said
    assert "random" not in said.replace("--init random", "")
    config = json.loads((tmp_path / "out/run/config.json").read_text())
    assert (config["data"]["points"], config["data"]["scene"]) == (str(points), str(posed))
    assert config["model"]["init"] == "sfm"
    # The same command goes on, also without the points, which are read wherever they are now.
    moved = points.rename(tmp_path / "points")
    assert run(["eval", "out/run", "--views", "train", "--device", "cpu"]) == 0
    copy = shutil.copytree("out/run", "out/copy")
    assert run([*words, "--iterations", "3"]) == 0
    said = capfd.readouterr().err
    assert f"the points that the run began with are gone, and not needed any more: {points}" in said
    assert "training makes its own" not in said
    assert run(["resume", str(copy), "--set", "data.points=nowhere"]) == 3
    assert "there are no points here" in capfd.readouterr().err
    assert run(["resume", str(copy), "--set", f"data.points={moved}"]) == 0
    assert run(["resume", "out/run", "-n", "4", "-q"]) == 0, "nor are they read again"
    # Another run uses them again, and their frame is that of the cameras, far from the origin.
    moved.rename(points)
    assert run([*words[:-3], "out/again", "--cap-max", "2000", "--iterations", "1"]) == 0
    assert "points found before are used" in capfd.readouterr().err
    scene = read_scene(posed, DataConfig(points=str(points)))
    assert scene.points is not None
    distance = np.abs(scene.points.xyz.astype(np.float64) + np.asarray(scene.offset) - SHIFT).min(axis=1)
    assert np.median(distance) < 0.01


def test_features_follow_the_size_of_the_training_images(
    posed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Points of a coarser run are found in less time; those of a finer one, or of splat sfm, serve it, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("splatcli.sfm.points_request._LEAST_SIDE", 60)
    monkeypatch.setattr("splatcli.cli.sfm._PLAIN_EVERY", 0.0)
    words = ["train", str(posed), "--device", "cpu", "--cap-max", "2000", "--iterations", "1"]
    reports = Path("out").glob

    def sizes() -> list[int]:
        found = sorted(reports("*-sfm*/sfm.json"))
        return [json.loads(path.read_text())["key"]["options"]["max_image_size"] for path in found]

    assert run([*words, "-r", "8", "-o", "out/a"]) == 0
    said = capfd.readouterr().err
    (coarse,) = sizes()
    assert 3 * corner.WIDTH // 8 - 10 < coarse <= 3 * corner.WIDTH // 8  # undistorting leaves a part of an image
    assert f"features were found at {coarse} pixels, for training images of this size; splat sfm {posed} --cam" in said
    assert re.search(r"^features: \d of \d images  0:0\d left$", said, re.MULTILINE)
    for factor, made in (("8", 1), ("4", 2), ("1", 3)):
        assert run([*words, "-r", factor, "-o", f"out/{factor}"]) == 0
        said = capfd.readouterr().err
        assert ("points found before are used" in said) == (factor == "8")
        assert ("features were found at" in said) == (factor == "4")
        assert len(sizes()) == made
    assert sizes()[0] == coarse < sizes()[1] < corner.WIDTH
    assert sizes()[2] == 1600
    shutil.rmtree(f"out/{posed.name}-sfm")
    shutil.rmtree(f"out/{posed.name}-sfm-2")
    Path(f"out/{posed.name}-sfm-3").rename(f"out/{posed.name}-sfm")
    assert run([*words, "-r", "8", "-o", "out/b"]) == 0
    assert "points found before are used" in capfd.readouterr().err
    assert sizes() == [1600]


@pytest.mark.parametrize(("patch", "kept"), [(None, False), ((100, 70, 135, 100), True)], ids=["none", "few"])
def test_a_run_that_began_without_points_goes_on_without(
    posed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    patch: tuple[int, int, int, int] | None,
    kept: bool,
) -> None:
    """Where images lack texture, a run tries once, and another run again, unless a few points were found."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(posed, "scan")
    for path in (tmp_path / "scan/images").iterdir():
        with Image.open(path) as image:
            plain = Image.new("RGB", image.size, (90, 120, 90))
            if patch is not None:
                plain.paste(image.crop(patch), patch[:2])
            plain.save(path, exif=image.getexif())
    words = ["train", "scan", "--device", "cpu", "--cap-max", "2000", "--iterations", "2", "-o"]
    assert run([*words, "out/run", "--stop-at", "1"]) == 0
    said = capfd.readouterr().err
    assert "splat sfm triangulates them first" in said
    assert "training begins with random points" in said
    assert (tmp_path / "out/scan-sfm").exists() == kept
    for again in ([*words, "out/run"], ["resume", "out/run", "--iterations", "3"]):
        assert run(again) == 0
        said = capfd.readouterr().err
        assert "triangulate" not in said
        assert "matching:" not in said
    assert run([*words, "out/other", "--stop-at", "1"]) == 0
    said = capfd.readouterr().err
    assert ("matching:" in said) != kept
    assert ("points found before are used" in said) == kept


def relative_maps(root: Path) -> None:
    """Maps of the scene in ``root``, upright: 0.3 times the inverse depth of the walls, plus 0.1."""
    (root / "depths").mkdir()
    x, y = np.meshgrid(np.arange(corner.WIDTH) + 0.5, np.arange(corner.HEIGHT) + 0.5)
    rays = np.c_[LENS.cam_from_img(np.c_[x.ravel(), y.ravel()]), np.ones(x.size)]
    for index in range(NUM_IMAGES):
        viewmat = corner.pose(index)
        center = -viewmat[:3, :3].T @ viewmat[:3, 3]
        with np.errstate(divide="ignore"):
            depths = -center / (rays @ viewmat[:3, :3])
        z = np.where(depths > 0, depths, np.inf).min(axis=1).reshape(x.shape)
        np.save(root / "depths" / Path(name_of(index)).with_suffix(".npy"), (0.3 / z + 0.1).astype(np.float32))


def test_depths_come_from_points_that_are_triangulated_first(
    posed: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Those of the points, by their tracks, and relative maps that are fitted to the points."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(posed, "scan")
    relative_maps(tmp_path / "scan")
    words = ["train", "scan", "--device", "cpu", "--cap-max", "2000", "--iterations", "2"]
    relative = ["--depths", "depths", "--depth-type", "relative"]
    assert run([*words, *relative, "--dry-run"]) == 0
    assert "splat train triangulates them first" in capfd.readouterr().err
    assert run([*words[:-2], *relative, "--max-time", "1m"]) == 3
    assert "has no points with tracks, to which relative depth maps could be fitted" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()
    assert run([*words, *relative, "-o", "out/relative"]) == 0
    said = capfd.readouterr().err
    assert "splat sfm triangulates them first" in said
    assert (
        f"{NUM_IMAGES} of {NUM_IMAGES} relative depth maps hold inverse depth, and are fitted to the SfM points" in said
    )
    assert run([*words, "--depth-loss", "-o", "out/points", "--stop-at", "1"]) == 0
    assert "points found before are used" in capfd.readouterr().err
    assert run(["resume", "out/points"]) == 0
    moved = Path("out/scan-sfm").rename("points")
    for name, use in (
        ("points", "its depth term uses their depths"),
        ("relative", "its depth maps are fitted to them"),
    ):
        capfd.readouterr()
        assert run(["resume", f"out/{name}", "--iterations", "3"]) == 3
        said = capfd.readouterr().err
        assert f"the points that the run began with are gone, and {use}" in said
        assert f"where: {tmp_path / 'out/scan-sfm'}" in said
        assert "--set data.points=PATH" in said
    moved.rename("out/scan-sfm")
    # Of 1,600 points an image sees more than half, at their distances from it.
    for points in (made, tmp_path / "out/scan-sfm"):
        scene = read_scene(posed, DataConfig(points=str(points), depths="auto"))
        known = [known_depths(scene, view) for view in range(NUM_IMAGES)]
        assert all(len(one.pixels) > 500 for one in known)
        own = read_scene(made, DataConfig(depths="auto"))
        assert scene.seen is not None
        assert own.seen is not None
        assert [rows.tolist() for rows in scene.seen] == [rows.tolist() for rows in own.seen]


def test_points_without_tracks_give_no_depths(
    posed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cloud.ply").write_text(CLOUD)
    words = ["train", str(posed), "--device", "cpu", "-o", str(tmp_path / "run"), "--depth-loss"]
    assert run([*words, "--points", str(tmp_path / "cloud.ply")]) == 3
    said = capfd.readouterr().err
    assert "has points, but not which images see them: no depth is known of any training view" in said
    assert "a PLY has no tracks, and splat sfm SCENE --cameras SCENE triangulates points that have" in said
    monkeypatch.setattr("splatcli.sfm.points_request._START_SECONDS", 7200.0)  # too long for points
    assert run([*words, "--max-time", "1m"]) == 3
    assert "has no points: no depth is known of any training view" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_few_points_say_nothing_of_poses_that_were_given(
    posed: Path, made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cloud.ply").write_text(CLOUD)
    few = shutil.copytree(made, tmp_path / "few")
    model = pycolmap.Reconstruction(few / "sparse" / "0")
    for number in list(model.points3D)[20:]:
        model.delete_point3D(number)
    model.write(few / "sparse" / "0")
    for scene, words, said in (
        (posed, ("--points", str(tmp_path / "cloud.ply")), "only 5 sparse points, so the start is weak: take sharper"),
        (few, (), "only 20 sparse points, so the start is weak: take sharper"),
    ):
        capfd.readouterr()
        assert run(["info", str(scene), *words]) == 0
        out, err = capfd.readouterr()
        assert said in out + err
        assert "poses and the start" not in out + err


@pytest.mark.parametrize(
    ("images", "numbers"),
    [
        ({"left/1.jpg": 4, "right/1.jpg": 5}, {"left/1.png": 4, "right/1.png": 5}),
        ({"photos/left/1.JPG": 4, "photos/right/1.JPG": 5}, {"left/1.png": 4, "right/1.png": 5}),
        ({"1.jpg": 4}, {}),
        ({"other/1.jpg": 4}, {}),
        ({"a/left/1.jpg": 4, "b/left/1.jpg": 5}, {}),
    ],
)
def test_views_are_found_among_the_images_of_another_model(images: dict[str, int], numbers: dict[str, int]) -> None:
    views = [View(name, FixedLens(Path(), "", LENS), np.eye(4), name) for name in ("left/1.png", "right/1.png")]
    assert _numbers_of(views, images) == numbers


def test_points_of_a_file_take_the_place_of_the_scenes(
    posed: Path, made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cloud.ply").write_text(CLOUD)
    for scene in (made, posed):
        points = read_scene(scene, DataConfig(points=str(tmp_path / "cloud.ply"))).points
        assert points is not None
        assert len(points) == 5
    assert run(["info", str(made), "--points", str(tmp_path / "cloud.ply")]) == 0
    assert "5 sparse points" in capfd.readouterr().out
    (tmp_path / "empty").mkdir()
    with pytest.raises(SceneError, match="there is no COLMAP model"):
        read_scene(posed, DataConfig(points=str(tmp_path / "empty")))
    (tmp_path / "cloud.ply").write_text("no")
    with pytest.raises(SceneError, match="--points names a PLY"):
        read_scene(posed, DataConfig(points=str(tmp_path / "cloud.ply")))


def test_points_below_a_folder_are_no_scene_beside_the_one_they_came_to(
    posed: Path, made: Path, tmp_path: Path
) -> None:
    """As when training runs twice in the folder that the scene lies in, with the default output."""
    shutil.copytree(posed, tmp_path / "capture")
    for name in ("capture-sfm", "capture-sfm-2"):
        shutil.copytree(made, tmp_path / "output" / name, symlinks=True)
    assert read_scene(tmp_path, DataConfig()).root == tmp_path / "capture"
    shutil.rmtree(tmp_path / "output/capture-sfm-2")
    shutil.rmtree(tmp_path / "capture")
    assert read_scene(tmp_path, DataConfig()).kind == "colmap"


def test_images_of_near_poses_are_pairs() -> None:
    """A row of cameras that look the same way, one of them turned away, and one far away."""
    centers = [0.0, 1.0, 2.0, 3.0, 4.0, 100.0]
    cameras = [{"viewmat": [[1, 0, 0, -x], [0, 1, 0, 0], [0, 0, 1, 0]]} for x in centers]
    cameras[2] = {"viewmat": [[-1, 0, 0, 2], [0, 1, 0, 0], [0, 0, -1, 0]]}
    assert pairs_by_pose(cameras, 2) == [(0, 1), (0, 3), (1, 3), (1, 4), (3, 4), (3, 5), (4, 5)]
