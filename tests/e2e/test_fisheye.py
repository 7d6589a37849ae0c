"""A capture with a wide fisheye lens, from training to every command that takes its cameras.

The world is a room with painted walls, traced ray by ray: no projection of ours makes its images.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from splatcli import Model
from splatcli.checkpoint.container import read_container
from splatcli.checkpoint.file import load_checkpoint
from splatcli.checkpoint.schema import CAMERA_MODEL
from splatcli.cli.commands import run
from splatcli.config import DataConfig
from splatcli.gaussians import GROUPS
from splatcli.scene.camera import MAX_ANGLE
from splatcli.scene.read import read_scene
from tests.native.cases import NEEDS_COMPILER
from tests.scene import made

pytestmark = NEEDS_COMPILER

WIDTH, HEIGHT, FOCAL = 96, 72, 34.0
#: COLMAP's OPENCV_FISHEYE: 165 degrees from the left edge to the right, over 180 from corner to corner.
LENS = [FOCAL, FOCAL, WIDTH / 2 + 1.0, HEIGHT / 2 - 0.5, 0.01, -0.006, 0.001, -0.0001]
VIEWS, POINTS = 18, 600
#: Half sides of the room.
ROOM = np.array([3.0, 2.0, 3.0])
TRAIN = ("--iterations", "400", "--cap-max", "3000", "--sh-degree", "0", "--device", "cpu", "--test-every", "6")

Floats = NDArray[np.float64]


def paint(at: Floats) -> Floats:
    """[M, 3] in 0..255 at places on the walls: waves."""
    x, y, z = at.T
    waves = [np.sin(2.1 * x + y) * np.cos(1.7 * z), np.sin(1.9 * y - 1.3 * z + 1), np.cos(1.6 * x - 0.9 * z + y)]
    return 127.5 + 100 * np.stack(waves, axis=-1)


def on_walls(center: Floats, rays: Floats) -> Floats:
    """[M, 3], where rays [M, 3] from a centre inside the room meet its walls."""
    with np.errstate(divide="ignore"):
        steps = np.where(rays > 0, (ROOM - center) / rays, (-ROOM - center) / rays)
    return center + rays * np.abs(steps).min(axis=1, keepdims=True)


def lens_rays(pixels: Floats) -> Floats:
    """[M, 3], rays of a lens that sees beyond 90 degrees, which pycolmap's inverse does not."""
    f, _, cx, cy, *k = LENS
    angles = np.linspace(0.0, 2.0, 20_001)
    radii = angles * (1 + sum(c * angles ** (2 * i) for i, c in enumerate(k, 1)))
    assert (np.diff(radii) > 0).all()
    away = (pixels - [cx, cy]) / f
    radius = np.hypot(*away.T)
    angle = np.interp(radius, radii, angles)
    return np.column_stack([away * (np.sin(angle) / np.maximum(radius, 1e-12))[:, None], np.cos(angle)])


def pose(i: int) -> Floats:
    """[4, 4], world to camera: cameras on a ring in the room, which look outwards and a little up and down."""
    turn = 2 * np.pi * i / VIEWS
    nod = 0.3 * np.sin(2.5 * i)
    forward = np.array([np.cos(nod) * np.sin(turn), np.sin(nod), np.cos(nod) * np.cos(turn)])
    right = np.cross([0.0, 1.0, 0.0], forward)
    right /= np.linalg.norm(right)
    w2c = np.eye(4)
    w2c[:3, :3] = np.stack([right, np.cross(forward, right), forward])
    w2c[:3, 3] = -w2c[:3, :3] @ np.array([0.8 * np.sin(turn + 0.5), 0.3 * np.cos(3 * turn), 0.8 * np.cos(turn + 0.5)])
    return w2c


def capture(root: Path) -> Path:
    """A COLMAP scene of the room in ``root``."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH] + 0.5
    rays = lens_rays(np.stack([x.ravel(), y.ravel()], axis=1))
    model = made.pycolmap.Reconstruction()
    model.add_camera_with_trivial_rig(made.lens("OPENCV_FISHEYE", LENS, WIDTH, HEIGHT))
    (root / "images").mkdir(parents=True)
    for i in range(VIEWS):
        w2c = pose(i)
        center, name = -w2c[:3, :3].T @ w2c[:3, 3], f"{i:02d}.png"
        pixels = paint(on_walls(center, rays @ w2c[:3, :3])).reshape(HEIGHT, WIDTH, 3)
        Image.fromarray(np.round(pixels).astype(np.uint8)).save(root / "images" / name)
        model.add_image_with_trivial_frame(
            made.pycolmap.Image(name=name, camera_id=1, image_id=i + 1), made.pycolmap.Rigid3d(w2c[:3])
        )
    directions = np.random.default_rng(3).normal(size=(POINTS, 3))
    walls = on_walls(np.zeros(3), directions)
    for at, colour in zip(walls, paint(walls), strict=True):
        model.add_point3D(at, made.pycolmap.Track(), np.round(colour).astype(np.uint8))
    made.write_model(root / "sparse/0", model)
    return root


@dataclass(frozen=True)
class Trained:
    scene: Path
    fisheye: Path
    pinhole: Path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    root = tmp_path_factory.mktemp("fisheye")
    scene = capture(root / "room")
    for name, flags in (("fisheye", ()), ("pinhole", ("--projection", "pinhole"))):
        assert run(["train", str(scene), *TRAIN, *flags, "-q", "-o", str(root / name)]) == 0
    return Trained(scene, root / "fisheye", root / "pinhole")


def figures(model: Model, scene: Path, projection: str) -> list[float]:
    """PSNR of the held-out views of the scene, read with that projection."""
    read = read_scene(scene, DataConfig(projection=projection, test_every=6))
    return [found["psnr"] for found in model.compare(read).values()]


def test_the_images_are_what_the_rays_of_a_fisheye_meet(tmp_path: Path) -> None:
    """Pixel by pixel, by the definition: the angle to the axis goes with the distance from the principal point."""
    scene = read_scene(capture(tmp_path), DataConfig())
    for index in (0, 5):
        camera, image = scene.cameras[index], scene.images.image(index)
        assert camera.model == "fisheye"
        assert (camera.fx, camera.fy) == (FOCAL, FOCAL)
        y, x = np.mgrid[0 : camera.height, 0 : camera.width] + 0.5
        away = np.stack([(x - camera.cx) / camera.fx, (y - camera.cy) / camera.fy], axis=-1).reshape(-1, 2)
        angle = np.hypot(*away.T)
        rays = np.column_stack([away * np.sinc(angle / np.pi)[:, None], np.cos(angle)])
        expected = paint(on_walls(camera.center, rays @ camera.viewmat[:3, :3]))
        assert image.masked is not None
        seen = ~image.masked.ravel()
        assert not seen[angle > MAX_ANGLE].any()
        assert 0.75 < seen.mean() < 0.99
        assert angle[seen].max() > 0.98 * MAX_ANGLE
        # The bicubic kernel repeats the images' edges, and walls meet in edges.
        error = np.abs(image.pixels.reshape(-1, 3) - expected).max(axis=1)[seen]
        assert np.quantile(error, 0.98) < 3.0
        assert not image.pixels.reshape(-1, 3)[~seen].any()


def test_a_fisheye_run_shows_what_a_pinhole_run_has_not_seen(trained: Trained) -> None:
    wide, narrow = Model.load(trained.fisheye), Model.load(trained.pinhole)
    assert {camera.model for camera in wide.cameras} == {"fisheye"}
    assert {camera.model for camera in narrow.cameras} == {"pinhole"}
    of_all = figures(wide, trained.scene, "fisheye")
    assert min(of_all) > 27.0
    assert np.mean(of_all) > np.mean(figures(narrow, trained.scene, "fisheye")) + 1.0


def test_a_checkpoint_requires_a_reader_that_knows_fisheyes(trained: Trained) -> None:
    for folder, expected in ((trained.fisheye, [CAMERA_MODEL]), (trained.pinhole, [])):
        path = folder / "ckpts" / "ckpt_000400.pt"
        assert read_container(path, mmap=True).manifest.requires == expected
    scene = read_scene(trained.scene, DataConfig())
    stored = load_checkpoint(trained.fisheye / "ckpts" / "ckpt_000400.pt").cameras
    for camera, own in zip(stored, scene.cameras, strict=True):
        assert (camera.model, camera.near, camera.width, camera.fx, camera.cx) == (
            *(own.model, own.near, own.width, own.fx, own.cx),
        )


def test_a_run_that_stops_is_resumed_to_the_same_bits(trained: Trained, tmp_path: Path) -> None:
    again = tmp_path / "again"
    assert run(["train", str(trained.scene), *TRAIN, "-q", "-o", str(again), "--stop-at", "170"]) == 0
    assert run(["resume", str(again), "-q"]) == 0
    whole, parts = (load_checkpoint(path / "ckpts" / "ckpt_000400.pt") for path in (trained.fisheye, again))
    for name in GROUPS:
        assert getattr(whole.gaussians, name).equal(getattr(parts.gaussians, name)), name


def test_a_run_does_not_go_on_with_other_cameras(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["resume", str(trained.pinhole), "--iterations", "410", "--set", "data.projection=fisheye"]) != 0
    assert "projection" in capsys.readouterr().err


def test_renders_are_compared_with_the_images_of_the_lens(trained: Trained, tmp_path: Path) -> None:
    words = ["render", str(trained.fisheye), "--views", "--what", "rgb,photo,error,depth,normals", "-o", str(tmp_path)]
    assert run([*words, "-q"]) == 0
    shown, photo = (np.asarray(Image.open(tmp_path / kind / "00.png"), dtype=np.float64) for kind in ("rgb", "photo"))
    scene = read_scene(trained.scene, DataConfig(test_every=6))
    image = scene.images.image(scene.test[0])
    assert image.masked is not None
    assert shown.shape == photo.shape == image.pixels.shape
    assert np.array_equal(photo[~image.masked], image.pixels[~image.masked])
    assert np.abs(shown - photo)[~image.masked].mean() < 8.0


def test_paths_and_changed_views_are_pinholes(trained: Trained, tmp_path: Path) -> None:
    """A video has straight lines; --projection pinhole shows the middle of held-out views."""
    for words in (["--views", "orbit", "--frames", "2"], ["--views", "test", "--projection", "pinhole"]):
        saved = tmp_path / f"{words[1]}.json"
        assert (
            run(
                [
                    "render",
                    str(trained.fisheye),
                    *words,
                    "-q",
                    "-o",
                    str(tmp_path / words[1]),
                    "--save-cameras",
                    str(saved),
                ]
            )
            == 0
        )
        cameras = json.loads(saved.read_text())["cameras"]
        assert all("model" not in camera for camera in cameras)
        own = Model.load(trained.fisheye).cameras[0]
        assert all((camera["width"], camera["fx"]) == (own.width, own.fx) for camera in cameras)
    wide = ["render", str(trained.fisheye), "--views", "orbit", "--frames", "1", "--fov", "120"]
    assert run([*wide, "-q", "-o", str(tmp_path / "wide"), "--save-cameras", str(saved)]) == 0
    (camera,) = json.loads(saved.read_text())["cameras"]
    assert "model" not in camera
    assert camera["fy"] == pytest.approx(0.5 * camera["height"] / np.tan(np.radians(60)))


def test_exported_cameras_are_fisheyes_and_render_the_same(trained: Trained, tmp_path: Path) -> None:
    for name in ("room.ply", "cameras.json"):
        assert run(["export", str(trained.fisheye), "-q", "-o", str(tmp_path / name)]) == 0
    cameras = json.loads((tmp_path / "cameras.json").read_text())["cameras"]
    assert {camera["model"] for camera in cameras} == {"fisheye"}
    assert run(["render", str(trained.fisheye), "--views", "all", "-q", "-o", str(tmp_path / "a")]) == 0
    words = ["render", str(tmp_path / "room.ply"), "--views", str(tmp_path / "cameras.json")]
    assert run([*words, "-q", "-o", str(tmp_path / "b")]) == 0
    for path in sorted((tmp_path / "a").rglob("*.png")):
        assert np.array_equal(Image.open(path), Image.open(tmp_path / "b" / path.relative_to(tmp_path / "a"))), (
            path.name
        )


def test_an_export_is_scored_as_its_run_was(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file does not say by which cameras it was trained; --projection does."""

    def psnr(*words: object) -> float:
        assert run(["eval", *map(str, words), "--json", "-q"]) == 0
        return float(json.loads(capsys.readouterr().out)["psnr"])

    assert run(["export", str(trained.pinhole), "-q", "-o", str(tmp_path / "room.ply")]) == 0
    capsys.readouterr()
    of_file = tmp_path / "room.ply", "--data", trained.scene
    assert psnr(*of_file, "--projection", "pinhole") > psnr(*of_file) + 0.5
    for words, says in (
        ([*of_file, "--projection", "panorama"], "auto"),
        ([trained.pinhole, "--projection", "fisheye"], "a run is evaluated"),
    ):
        assert run(["eval", *map(str, words)]) == 2
        assert says in capsys.readouterr().err


def test_other_commands_take_a_fisheye_run(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder, mesh = str(trained.fisheye), tmp_path / "room.ply"
    assert run(["eval", run_folder, "--json"]) == 0
    assert min(view["psnr"] for view in json.loads(capsys.readouterr().out)["views"]) > 27.0
    assert run(["compare", run_folder, str(trained.pinhole), "--json"]) == 0
    assert {"psnr_ab"} <= set(json.loads(capsys.readouterr().out)["views"][0])
    assert run(["mesh", run_folder, "-q", "-o", str(mesh), "--resolution", "60"]) == 0
    assert run(["edit", run_folder, "--clean", "-q", "-o", str(tmp_path / "clean.ply")]) == 0
    assert run(["export", run_folder, "-q", "-o", str(tmp_path / "room.html")]) == 0
    assert run(["info", str(trained.scene)]) == 0
    assert "fisheye" in capsys.readouterr().out
