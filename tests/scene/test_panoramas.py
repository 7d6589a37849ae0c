"""Panoramas with poses are trained as perspective faces, in whichever layout the poses come."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from scipy.spatial.transform import Rotation

from splatcli.config import DataConfig
from splatcli.errors import SceneError
from splatcli.render.selection import KnownCameras, select_views
from splatcli.scene import images
from splatcli.scene.decode import decode
from splatcli.scene.read import read_scene
from splatcli.scene.scene import Scene, known_depths
from splatcli.scene.source import SceneProblems
from tests.forked import splat_command
from tests.native.cases import NEEDS_COMPILER

WIDTH, HEIGHT, COUNT, FACES = 512, 256, 9, 6
NAMES = [f"{i:02d}.png" for i in range(COUNT)]
#: World to camera of each panorama, OpenCV axes.
TURNS = [Rotation.from_euler("yxz", [40 * i, 5 - i, 3 * i], degrees=True).as_matrix() for i in range(COUNT)]
CENTERS = [np.array([np.cos(0.7 * i), 0.1 * i, np.sin(0.7 * i)]) for i in range(COUNT)]
POINTS = np.random.default_rng(3).uniform(-3, 3, (40, 3))


def colours(directions: NDArray[np.float64]) -> NDArray[np.float64]:
    """[..., 3] levels of a distant world in directions [..., 3]."""
    unit = directions / np.linalg.norm(directions, axis=-1, keepdims=True)
    waves = [np.sin(3 * unit[..., 0] + 2 * unit[..., k] + k) * np.cos(4 * unit[..., 2]) for k in range(3)]
    return 127.5 + 100 * np.stack(waves, axis=-1)


def panorama(turn: NDArray[np.float64]) -> NDArray[np.uint8]:
    """What a camera sees all around: longitude to the right from behind, latitude from above to below."""
    x, y = np.meshgrid(np.arange(WIDTH) + 0.5, np.arange(HEIGHT) + 0.5)
    longitude, down = (x / WIDTH - 0.5) * 2 * np.pi, (y / HEIGHT - 0.5) * np.pi
    ahead = np.cos(down)
    rays = np.stack([ahead * np.sin(longitude), np.sin(down), ahead * np.cos(longitude)], axis=-1)
    return np.round(colours(rays @ turn)).astype(np.uint8)


def poses() -> list[NDArray[np.float64]]:
    """[4, 4] camera to world of each panorama, OpenCV axes."""
    made = []
    for turn, center in zip(TURNS, CENTERS, strict=True):
        pose = np.eye(4)
        pose[:3, :3], pose[:3, 3] = turn.T, center
        made.append(pose)
    return made


def write_colmap(root: Path) -> None:
    model = root / "sparse" / "0"
    model.mkdir(parents=True)
    (model / "cameras.txt").write_text(f"1 EQUIRECTANGULAR {WIDTH} {HEIGHT} {WIDTH} {HEIGHT}\n")
    lines = []
    for i, (turn, center) in enumerate(zip(TURNS, CENTERS, strict=True)):
        x, y, z, w = Rotation.from_matrix(turn).as_quat()
        t = -turn @ center
        lines.append(f"{i + 1} {w} {x} {y} {z} {t[0]} {t[1]} {t[2]} 1 {NAMES[i]}\n\n")
    (model / "images.txt").write_text("".join(lines))
    # Every point is seen by the second panorama.
    rows = (f"{i + 1} {x} {y} {z} 90 120 150 0.5 2 {i}\n" for i, (x, y, z) in enumerate(POINTS))
    (model / "points3D.txt").write_text("".join(rows))


def write_nerfstudio(root: Path) -> None:
    flip = np.diag([1.0, -1.0, -1.0, 1.0])
    frames = [
        {"file_path": f"images/{name}", "transform_matrix": (pose @ flip).tolist()}
        for name, pose in zip(NAMES, poses(), strict=True)
    ]
    head = {"camera_model": "EQUIRECTANGULAR", "fl_x": WIDTH / 2, "fl_y": HEIGHT, "w": WIDTH, "h": HEIGHT}
    (root / "transforms.json").write_text(json.dumps({**head, "frames": frames}))


def write_metashape(root: Path) -> None:
    cameras = "".join(
        f'<camera id="{i}" sensor_id="0" label="{NAMES[i]}">'
        f"<transform>{' '.join(map(str, pose.ravel()))}</transform></camera>"
        for i, pose in enumerate(poses())
    )
    size = f'<resolution width="{WIDTH}" height="{HEIGHT}"/>'
    (root / "cameras.xml").write_text(
        '<?xml version="1.0" encoding="UTF-8"?><document version="2.0.0"><chunk label="Chunk 1" enabled="true">'
        f'<sensors><sensor id="0" label="unknown" type="spherical">{size}'
        f'<calibration type="spherical" class="adjusted">{size}</calibration></sensor></sensors>'
        f"<cameras>{cameras}</cameras></chunk></document>"
    )


def write_opensfm(root: Path) -> None:
    shots = {
        name: {
            "rotation": Rotation.from_matrix(turn).as_rotvec().tolist(),
            "translation": (-turn @ center).tolist(),
            "camera": "v2 all 512 256 spherical 0.85",
        }
        for name, turn, center in zip(NAMES, TURNS, CENTERS, strict=True)
    }
    camera = {"projection_type": "spherical", "width": WIDTH, "height": HEIGHT}
    document = [{"cameras": {"v2 all 512 256 spherical 0.85": camera}, "shots": shots, "points": {}}]
    (root / "reconstruction.json").write_text(json.dumps(document))


def pixels() -> list[NDArray[np.float64]]:
    """[40, 2] for each panorama: where it shows POINTS."""
    made = []
    for turn, center in zip(TURNS, CENTERS, strict=True):
        x, y, z = turn @ (POINTS - center).T
        unit = np.stack([np.arctan2(x, z) / (2 * np.pi), np.arctan2(y, np.hypot(x, z)) / np.pi], axis=1)
        made.append((unit + 0.5) * [WIDTH, HEIGHT])
    return made


def write_observed_colmap(root: Path) -> None:
    """Every panorama sees every point."""
    write_colmap(root)
    model = root / "sparse" / "0"
    poses_only = model.joinpath("images.txt").read_text().split("\n\n")[:COUNT]
    seen = (" ".join(f"{x} {y} {i + 1}" for i, (x, y) in enumerate(places)) for places in pixels())
    model.joinpath("images.txt").write_text(
        "".join(f"{pose}\n{line}\n" for pose, line in zip(poses_only, seen, strict=True))
    )
    track = [" ".join(f"{number + 1} {i}" for number in range(COUNT)) for i in range(len(POINTS))]
    rows = (f"{i + 1} {x} {y} {z} 90 120 150 0.5 {track[i]}\n" for i, (x, y, z) in enumerate(POINTS))
    model.joinpath("points3D.txt").write_text("".join(rows))


def write_observed_opensfm(root: Path) -> None:
    write_opensfm(root)
    document = json.loads((root / "reconstruction.json").read_text())
    document[0]["points"] = {
        str(i): {"coordinates": point.tolist(), "color": [90, 120, 150]} for i, point in enumerate(POINTS)
    }
    (root / "reconstruction.json").write_text(json.dumps(document))
    rows = ["OPENSFM_TRACKS_VERSION_v2"]
    for name, places in zip(NAMES, pixels(), strict=True):
        for i, (x, y) in enumerate((places - [WIDTH / 2, HEIGHT / 2]) / WIDTH):  # in units of the longer side
            rows.append(f"{name}\t{i}\t{i}\t{x}\t{y}\t0.004\t90\t120\t150\t-1\t-1")
    (root / "tracks.csv").write_text("\n".join(rows) + "\n")


def make(root: Path, write: Callable[[Path], None]) -> Path:
    (root / "images").mkdir(parents=True)
    for name, turn in zip(NAMES, TURNS, strict=True):
        Image.fromarray(panorama(turn)).save(root / "images" / name)
    write(root)
    return root


@pytest.fixture(scope="module")
def posed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("panoramas") / "scene", write_colmap)


def off(scene: Scene, number: int) -> float:
    """Largest difference of a view from the world, in levels."""
    camera = scene.cameras[number]
    x, y = np.meshgrid(np.arange(camera.width) + 0.5, np.arange(camera.height) + 0.5)
    rays = np.stack([(x - camera.cx) / camera.fx, (y - camera.cy) / camera.fy, np.ones_like(x)], axis=-1)
    wanted = colours(rays @ camera.viewmat[:3, :3])
    return float(np.abs(scene.images.load(number) - wanted).max())


@pytest.mark.parametrize("write", [write_colmap, write_nerfstudio, write_metashape, write_opensfm])
@pytest.mark.parametrize("resolution", [1, 2])
def test_faces_show_what_a_camera_sees_there(tmp_path: Path, write: Callable[[Path], None], resolution: int) -> None:
    scene = read_scene(make(tmp_path / "scene", write), DataConfig(resolution=resolution))
    assert [camera.name for camera in scene.cameras] == [
        f"{name}/{face}.png" for name in NAMES for face in range(FACES)
    ]
    # 512 pixels around are 81.5 a radian: tan 37.5 and tan 45 degrees on either side.
    assert {(c.width, c.height) for c in scene.cameras} == {(126 // resolution, 162 // resolution)}
    assert scene.cameras[0].fx == pytest.approx(WIDTH / (2 * np.pi) / resolution)
    for number in range(0, len(scene.cameras), 1 if write is write_colmap else 7):
        camera = scene.cameras[number]
        center = -camera.viewmat[:3, :3].T @ camera.viewmat[:3, 3] + scene.offset
        np.testing.assert_allclose(center, CENTERS[number // FACES], atol=1e-9)
        # Half a level of rounding twice, and what sampling misses; at half the size an average over four pixels.
        assert off(scene, number) < (1.6 if resolution == 1 else 4.0), camera.name
    looks = [camera.viewmat[2, :3] @ TURNS[0].T for camera in scene.cameras[:FACES]]
    angles = np.degrees(np.arctan2([look[0] for look in looks], [look[2] for look in looks]))
    np.testing.assert_allclose((angles + 1) % 360, np.arange(FACES) * 60 + 1, atol=1e-9)


def test_panoramas_of_metashape_need_no_calibration(tmp_path: Path) -> None:
    root = make(tmp_path / "scene", write_metashape)
    calibrated = read_scene(root, DataConfig()).cameras
    text = (root / "cameras.xml").read_text()
    before, rest = text.split("<calibration ")
    (root / "cameras.xml").write_text(before + rest.split("</calibration>")[1])
    for one, other in zip(read_scene(root, DataConfig()).cameras, calibrated, strict=True):
        assert (one.name, one.fx, one.width) == (other.name, other.fx, other.width)
        np.testing.assert_array_equal(one.viewmat, other.viewmat)


def test_a_panorama_is_held_out_with_all_its_faces(posed: Path) -> None:
    scene = read_scene(posed, DataConfig())
    held = {scene.cameras[number].name for number in scene.test}
    assert held == {f"{name}/{face}.png" for name in (NAMES[0], NAMES[8]) for face in range(FACES)}
    assert sorted([*scene.train, *scene.test]) == list(range(COUNT * FACES))
    assert any("9 images are cut into 6 perspective faces" in note for note in scene.notes)


def test_faces_know_the_depths_of_the_points_that_their_panorama_sees(posed: Path) -> None:
    scene = read_scene(posed, DataConfig(depths="auto", near_share=0.0, max_point_error=0.0))
    counts = [len(known_depths(scene, number).pixels) for number in range(len(scene.cameras))]
    assert not any(counts[:FACES]), "the first panorama sees none"
    view = TURNS[1] @ (POINTS - CENTERS[1]).T
    around = np.abs(view[1]) < 0.85 * np.hypot(view[0], view[2])
    assert around.sum() <= sum(counts[FACES : 2 * FACES]) <= 2 * len(POINTS), "faces overlap"


@pytest.mark.parametrize("write", [write_observed_colmap, write_observed_opensfm])
def test_points_that_panoramas_see_are_where_they_see_them(tmp_path: Path, write: Callable[[Path], None]) -> None:
    """A model of COLMAP and one of OpenSfM say where each image sees each point."""
    root = make(tmp_path / "scene", write)
    done = splat("info", root)
    assert done.returncode == 0, done.stderr
    assert "40 sparse points" in done.stdout
    off = re.search(r"sparse points are off by ([\d.e-]+) pixels in the median \(40 of them\)", done.stdout)
    assert off is not None, done.stdout
    assert float(off[1]) < 0.01
    points = read_scene(root, DataConfig(resolution=2)).points
    assert points is not None
    assert len(points) == len(POINTS)


def test_masks_are_cut_with_their_panorama(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = make(tmp_path / "scene", write_colmap)
    (root / "masks").mkdir()
    for name in NAMES:
        mask = np.full((HEIGHT, WIDTH), 255, dtype=np.uint8)
        mask[:, WIDTH // 2 :] = 0  # what lies to the right of the middle
        Image.fromarray(mask).save(root / "masks" / name)
    scene = read_scene(root, DataConfig())
    shares = [scene.images.image(number).masked.mean() for number in range(FACES)]
    np.testing.assert_allclose(shares, [0.5, 1, 1, 0.5, 0, 0], atol=0.01)
    assert [message.split("hides all of ")[1].split(":")[0] for message in caplog.messages] == [
        "00.png/1.png",
        "00.png/2.png",
    ]


def test_depth_maps_of_panoramas_are_refused(tmp_path: Path) -> None:
    root = make(tmp_path / "scene", write_colmap)
    (root / "depths").mkdir()
    for name in NAMES:
        np.save(root / "depths" / f"{name}.npy", np.ones((HEIGHT, WIDTH), dtype=np.float32))
    with pytest.raises(SceneProblems) as caught:
        read_scene(root, DataConfig(depths="depths"))
    assert all("depth map of a panorama" in problem.what for problem in caught.value.problems)
    assert caught.value.problems[0].where == str(root / "depths" / f"{NAMES[0]}.npy")


def test_a_panorama_of_another_shape_than_its_camera_is_refused(tmp_path: Path) -> None:
    root = make(tmp_path / "scene", write_colmap)
    Image.fromarray(panorama(TURNS[3])[:200]).save(root / "images" / NAMES[3])
    with pytest.raises(SceneError, match="512x200 pixels, its camera 512x256"):
        read_scene(root, DataConfig())


#: Prints the bytes that one face takes while it is made, for each pixel of the panorama.
_PEAK = """
import sys
from pathlib import Path
import torch
from splatcli.config import DataConfig
from splatcli.scene import images
from splatcli.scene.decode import decode
from splatcli.scene.read import read_scene

def memory(key):
    status = Path("/proc/self/status").read_text().split(key + ":")[1]
    return 1024 * int(status.split()[0])

scene = read_scene(Path(sys.argv[1]), DataConfig(resolution=1))
Path("/proc/self/clear_refs").write_text("5")
held = memory("VmRSS")
scene.images.load(3)
width, height = scene.images.sources[3].stored
kept = scene.images._images.used + scene.images._grids.used  # of all six faces
print((memory("VmHWM") - held - kept) / (width * height))
"""


def test_a_panorama_is_decoded_once_for_all_its_faces(posed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that ask for several faces at once wait for one of them; without room for more, each face decodes."""
    decoded: list[str] = []

    def counted(path: Path, *rest: object) -> object:
        decoded.append(path.name)
        return decode(path, *rest)

    monkeypatch.setattr(images, "decode", counted)
    scene = read_scene(posed, DataConfig())
    alone = scene.images.of(scene.images.sources)
    alone.limit(0)
    for i in range(FACES):
        scene.images.prefetch(i)
    faces = [scene.images.image(i).pixels for i in range(len(scene.cameras))]
    scene.images.close()
    assert sorted(decoded) == NAMES
    decoded.clear()
    for i, pixels in enumerate(faces):
        np.testing.assert_array_equal(alone.image(i).pixels, pixels)
    assert sorted(decoded) == sorted(NAMES * FACES)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells the peak of memory")
def test_faces_take_no_more_memory_than_their_panorama(tmp_path: Path) -> None:
    root = make(tmp_path / "scene", write_colmap)
    large = Image.fromarray(panorama(TURNS[0])).resize((12 * WIDTH, 12 * HEIGHT))
    large.save(root / "images" / NAMES[0], compress_level=1)
    done = subprocess.run([sys.executable, "-c", _PEAK, str(root)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Decoding takes up to 12 (DECODE_BYTES), before there is a face; copies of the panorama in float32 take 12 each.
    assert float(done.stdout) < 16


def test_a_panorama_is_one_photo_in_what_the_user_reads(tmp_path: Path) -> None:
    root = make(tmp_path / "scene", write_colmap)
    (root / "masks").mkdir()
    for name in NAMES:
        Image.new("L", (WIDTH, HEIGHT), 255).save(root / "masks" / name)
    (root / "images" / NAMES[5]).write_bytes((root / "images" / NAMES[6]).read_bytes())
    # The panoramas lie one folder deeper, as those of one camera of several.
    for folder in ("images", "masks"):
        (root / folder).rename(root / "moved")
        (root / folder).mkdir()
        (root / "moved").rename(root / folder / "camera a")
    text = (root / "sparse/0/images.txt").read_text()
    for name in NAMES:
        text = text.replace(f" {name}\n", f" camera a/{name}\n")
    (root / "sparse/0/images.txt").write_text(text)
    done = splat("info", root)
    assert done.returncode == 0, done.stderr
    report = done.stdout
    assert "images/: 9, stored as 512x256, trained at 126x162" in report
    assert "9 of 9 images have one" in report
    assert f"2 images are identical files (camera a/{NAMES[5]} = camera a/{NAMES[6]})" in report


def test_a_damaged_panorama_is_decoded_and_reported_once(tmp_path: Path) -> None:
    root = make(tmp_path / "scene", write_colmap)
    damaged = root / "images" / NAMES[3]
    damaged.write_bytes(damaged.read_bytes()[:4000])
    with pytest.raises(SceneError, match="damaged") as caught:
        read_scene(root, DataConfig(strict=True))
    assert caught.value.where == str(damaged), "one error, not a list of six"
    scene = read_scene(root, DataConfig(skip_bad_images=True))
    assert len(scene.cameras) == FACES * (COUNT - 1)
    assert not any(camera.name.startswith(NAMES[3]) for camera in scene.cameras)
    assert any(note.startswith("1 image cannot be read and is left out: 03.png") for note in scene.notes)


def splat(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*splat_command(), *map(str, words)], capture_output=True, text=True, check=False)


@NEEDS_COMPILER
def test_commands_work_on_panoramas(posed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = splat("train", posed, "-n", 6, "--stop-at", 3, "-r", 2, "-o", run, "--set", "strategy.prune_opacity=0.0001")
    assert done.returncode == 0, done.stderr
    done = splat("resume", run)
    assert done.returncode == 0, done.stderr
    figures = json.loads(splat("eval", run, "--json").stdout.splitlines()[-1])
    held = [f"{name}/{face}.png" for name in (NAMES[0], NAMES[8]) for face in range(FACES)]
    assert [view["name"] for view in figures["views"]] == held
    done = splat("render", run, "--views", "test", "-o", tmp_path / "pictures")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "pictures" / NAMES[8] / "5.png").is_file()
    done = splat("render", run, "--views", f"{NAMES[4]},{NAMES[8]}/2.png", "-o", tmp_path / "named")
    assert done.returncode == 0, done.stderr
    shown = {
        path.relative_to(tmp_path / "named").as_posix() for path in (tmp_path / "named").rglob("*") if path.is_file()
    }
    assert shown == {*(f"{NAMES[4]}/{face}.png" for face in range(FACES)), f"{NAMES[8]}/2.png"}
    assert "54 EQUIRECTANGULAR" in splat("info", posed).stdout
    whole = ("--projection", "equirectangular", "--format", "png", "-o")
    for views, names in (("test", {NAMES[0], NAMES[8]}), (f"{NAMES[8]}/2.png", {f"{NAMES[8]}/2.png"})):
        place = tmp_path / f"panoramas-{len(names)}"
        done = splat("render", run, "--views", views, *whole, place)
        assert done.returncode == 0, done.stderr
        assert {path.relative_to(place).as_posix() for path in place.rglob("*.png") if path.is_file()} == names
        with Image.open(place / names.pop()) as picture:
            assert picture.size == (WIDTH // 2, HEIGHT // 2)


def test_a_panorama_is_rendered_from_its_own_pose_and_a_face_from_that_of_the_face(posed: Path) -> None:
    scene = read_scene(posed, DataConfig())
    known = KnownCameras(scene.cameras, scene.train, scene.test)
    panoramas = select_views("all", known).panoramas(None).cameras
    assert [camera.name for camera in panoramas] == NAMES
    for camera, pose in zip(panoramas, poses(), strict=True):
        assert (camera.width, camera.height) == (WIDTH, HEIGHT)
        np.testing.assert_allclose(camera.viewmat, np.linalg.inv(pose), atol=1e-12)
    some = f"{NAMES[3]}/1.png,{NAMES[5]},{NAMES[7]}/0.png"
    named = select_views(some, known).panoramas(None).cameras
    assert [camera.name for camera in named] == [f"{NAMES[3]}/1.png", NAMES[5], f"{NAMES[7]}/0.png"]
    (face,) = (camera for camera in scene.cameras if camera.name == named[0].name)
    np.testing.assert_array_equal(named[0].viewmat, face.viewmat)


@NEEDS_COMPILER
def test_points_are_not_triangulated_from_panoramas(tmp_path: Path) -> None:
    root = make(tmp_path / "scene", write_nerfstudio)
    done = splat("sfm", root / "images", "--cameras", root, "-o", tmp_path / "sfm")
    assert done.returncode == 3, done.stderr
    assert "perspective images and fisheyes only" in done.stderr
    assert "help:" in done.stderr
    done = splat("train", root, "-n", 2, "-r", 2, "-o", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "training begins with random points" in done.stderr
