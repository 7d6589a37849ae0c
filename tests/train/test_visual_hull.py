"""Points on the hull of what is opaque in the images, on a ball before nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from splatcli import Model
from splatcli.cli.commands import run
from splatcli.config import Config, DataConfig, build_config
from splatcli.gaussians import Gaussians
from splatcli.scene.read import read_scene
from splatcli.scene.scene import Scene
from splatcli.train.init import initial_gaussians, resolve_init
from splatcli.train.visual_hull import FINE, Silhouette, carve, hull_points, silhouettes
from tests.train.worlds import made_scene, ring_cameras

RADIUS, DISTANCE, FIELD_OF_VIEW, SIDE = 0.5, 3.0, 0.6, 96

#: As Blender does it: x right, y up, z backward.
Pose = NDArray[np.float64]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def poses(count: int) -> list[Pose]:
    """Cameras all around the origin, on a spiral over a sphere."""
    made = []
    for k in range(count):
        height = 1.0 - (2.0 * k + 1.0) / count
        turn = k * math.pi * (3.0 - math.sqrt(5.0))
        ring = math.sqrt(1.0 - height * height)
        back = np.array([ring * math.cos(turn), ring * math.sin(turn), height])
        right = np.cross([0.0, 0.0, 1.0], back)
        right /= np.linalg.norm(right)
        pose = np.eye(4)
        pose[:3, :3] = np.stack([right, np.cross(back, right), back], axis=1)
        pose[:3, 3] = DISTANCE * back
        made.append(pose)
    return made


def photo_of_ball(pose: Pose, center: NDArray[np.float64]) -> NDArray[np.uint8]:
    """[S, S, 4]: a ball, red where its surface has x above the centre's and blue below, before nothing."""
    focal = 0.5 * SIDE / math.tan(0.5 * FIELD_OF_VIEW)
    x = (np.arange(SIDE) + 0.5 - 0.5 * SIDE) / focal
    rays = np.stack(np.broadcast_arrays(x[None, :], -x[:, None], -1.0), axis=-1) @ pose[:3, :3].T
    rays /= np.linalg.norm(rays, axis=-1, keepdims=True)
    origin = pose[:3, 3] - center
    along = rays @ origin
    inner = along**2 - (origin @ origin - RADIUS**2)
    hit = inner > 0.0
    surface = origin + rays * (-along - np.sqrt(np.where(hit, inner, 0.0)))[..., None]
    image = np.zeros((SIDE, SIDE, 4), np.uint8)
    image[hit & (surface[..., 0] >= 0.0)] = (255, 0, 0, 255)
    image[hit & (surface[..., 0] < 0.0)] = (0, 0, 255, 255)
    return image


def ball_folder(
    folder: Path, *, views: int = 24, center: tuple[float, float, float] = (0.0, 0.0, 0.0), opaque: bool = False
) -> Path:
    """A Blender scene of the ball; the cameras look at the origin. opaque: over grey, without alpha."""
    (folder / "train").mkdir(parents=True)
    frames = []
    for k, pose in enumerate(poses(views)):
        picture = Image.fromarray(photo_of_ball(pose, np.array(center)))
        if opaque:
            below = Image.new("RGBA", picture.size, (128, 128, 128, 255))
            picture = Image.alpha_composite(below, picture).convert("RGB")
        picture.save(folder / f"train/r_{k:02d}.png")
        frames.append({"file_path": f"./train/r_{k:02d}", "transform_matrix": pose.tolist()})
    text = json.dumps({"camera_angle_x": FIELD_OF_VIEW, "frames": frames})
    (folder / "transforms_train.json").write_text(text)
    return folder


def ball(folder: Path, data: DataConfig | None = None, **options: object) -> Scene:
    made = ball_folder(folder / "ball", **options)  # type: ignore[arg-type]
    return read_scene(made, data or DataConfig(test_every=0), background=(255, 255, 255))


def test_points_lie_on_the_ball_and_have_its_colours(tmp_path: Path) -> None:
    found = hull_points(ball(tmp_path), np.zeros(3), 1.3, 3_000, generator())
    assert found is not None
    points, colours = found
    distance = np.linalg.norm(points, axis=1)
    cell = 2.0 * RADIUS / FINE
    assert abs(float(np.median(distance)) - RADIUS) < 2.0 * cell
    assert distance.min() > RADIUS - 3.0 * cell
    assert distance.max() < 1.25 * RADIUS  # what two dozen silhouettes cannot tell from the ball
    assert np.abs(points.mean(axis=0)).max() < 0.1 * RADIUS  # on all sides of it
    clear = np.abs(points[:, 0]) > 0.3 * RADIUS  # every view agrees on the colour there
    red = np.array([1.0, 0.0, 0.0], np.float32)
    wanted = np.where(points[clear, :1] > 0.0, red, red[::-1])
    assert np.abs(colours[clear] - wanted).mean() < 0.02


def test_a_large_box_is_inspected_twice(tmp_path: Path) -> None:
    scene = ball(tmp_path, center=(0.2, -0.1, 0.15))
    found = hull_points(scene, np.array([1.0, 1.0, 0.0]), 9.0, 2_000, generator())
    assert found is not None
    offset = found[0] - np.array([0.2, -0.1, 0.15], np.float32)
    assert abs(float(np.median(np.linalg.norm(offset, axis=1))) - RADIUS) < 0.05 * RADIUS


def test_a_cell_is_full_as_long_as_no_photo_sees_through_it(tmp_path: Path) -> None:
    views = silhouettes(ball(tmp_path))
    assert len(views) == 24
    places = np.array([[0.0, 0.0, 0.0], [0.0, 0.4, 0.0], [0.0, 0.9, 0.0], [0.0, 0.0, 40.0]], np.float32)
    assert carve(views, places, 0.01).tolist() == [True, True, False, False]  # the last is in nobody's sight
    assert carve(views[:1], places, 0.01).tolist() == [False] * 4


def test_large_photos_are_inspected_small_and_thin_things_in_them_stay() -> None:
    camera = ring_cameras(1)[0].resized(1_001, 700)
    alpha = np.zeros((700, 1_001), np.uint8)
    alpha[:, 500] = 255  # a pole
    pixels = np.where(alpha[..., None] > 0, np.uint8(200), np.uint8(0)).repeat(3, axis=2)
    small = Silhouette.of(camera, pixels, alpha)
    assert small.opaque.shape == small.alpha.shape == small.pixels.shape[:2] == (234, 334)
    assert (small.camera.width, small.camera.height) == (334, 234)
    assert small.opaque[:, 166].all()
    assert small.opaque.sum() == 234
    assert small.alpha.max() == 85
    places = np.random.default_rng(0).normal(0.0, 0.3, (50, 3)).astype(np.float32)
    whole = Silhouette(camera, pixels, alpha, alpha > 0)
    (u, v, inside), (x, y, seen) = small.at(places), whole.at(places)
    assert inside.any()
    assert (inside == seen).all()
    assert (u == x // 3).all()
    assert (v == y // 3).all()


def test_a_run_without_points_starts_from_the_hull(tmp_path: Path) -> None:
    scene = ball(tmp_path)
    settings = Config.model_validate({"strategy": {"cap_max": 20_000}})
    gaussians, notes = initial_gaussians(settings, scene, generator())
    assert notes[-1] == "started from 2000 points on the hull of what is opaque in the images"
    assert float(gaussians.means.norm(dim=1).max()) < 1.25 * RADIUS
    again, _ = initial_gaussians(settings, scene, generator())
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(gaussians.items(), again.items(), strict=True))
    assert scene.images.load(0)[0, 0].tolist() == [255, 255, 255]  # photos stay over their background


def test_what_a_run_starts_from_is_known_before_its_rates_are(tmp_path: Path) -> None:
    clear, opaque = ball(tmp_path), ball(tmp_path / "opaque", opaque=True)
    settings = build_config({})
    assert (resolve_init(settings, clear), resolve_init(settings, opaque)) == ("hull", "random")
    assert resolve_init(settings, made_scene(points=20)) == "sfm"
    assert resolve_init(settings, made_scene(points=0)) == "random"
    assert resolve_init(build_config({"model.init": "random"}), clear) == "random"
    sizes = [
        build_config({"model.init": start, "train.iterations": 3_000}).optim.log_scales_lr
        for start in ("sfm", "hull", "random")
    ]
    assert sizes == pytest.approx([sizes[0], 2.0 * sizes[0], 2.0 * sizes[0]], rel=1e-2)
    given = {"model.init": "hull", "train.iterations": 3_000, "optim.log_scales_lr": 0.01}
    assert build_config(given).optim.log_scales_lr == 0.01


def test_who_asks_for_a_hull_of_opaque_photos_is_reported(tmp_path: Path) -> None:
    settings = Config.model_validate({"model": {"init": "hull", "random_points": 60}})
    _, notes = initial_gaussians(settings, ball(tmp_path, opaque=True), generator())
    assert notes == ["too few images have transparency for a hull", "started from 60 random points"]


def test_who_asks_for_random_points_gets_them(tmp_path: Path) -> None:
    settings = Config.model_validate({"model": {"init": "random", "random_points": 500}})
    gaussians, notes = initial_gaussians(settings, ball(tmp_path), generator())
    assert notes[-1] == "started from 500 random points"
    assert float(gaussians.means.abs().max()) > 1.2


@pytest.mark.parametrize(
    ("views", "opaque", "masks"),
    [(2, False, None), (24, True, None), (24, False, "alpha")],
    ids=["two photos", "opaque photos", "transparency that hides"],
)
def test_where_photos_tell_nothing_of_emptiness_points_are_random(
    tmp_path: Path, views: int, opaque: bool, masks: str | None
) -> None:
    scene = ball(tmp_path, DataConfig(test_every=0, masks=masks), views=views, opaque=opaque)
    _, notes = initial_gaussians(Config.model_validate({"model": {"random_points": 50}}), scene, generator())
    assert notes[-1] == "started from 50 random points"


def test_a_ball_that_is_elsewhere_for_each_photo_has_no_hull(tmp_path: Path) -> None:
    folder = ball_folder(tmp_path / "ball")
    described = json.loads((folder / "transforms_train.json").read_text())
    for k, frame in enumerate(described["frames"]):
        frame["transform_matrix"][k % 3][3] += 1.2 if k % 2 else -1.2
    (folder / "transforms_train.json").write_text(json.dumps(described))
    scene = read_scene(folder, DataConfig(test_every=0))
    assert hull_points(scene, np.zeros(3), 1.3, 100, generator()) is None


def test_a_photo_in_which_nothing_is_left_is_passed_over(tmp_path: Path) -> None:
    folder = ball_folder(tmp_path / "ball")
    Image.new("RGBA", (SIDE, SIDE)).save(folder / "train/r_07.png")
    scene = read_scene(folder, DataConfig(test_every=0))
    assert len(silhouettes(scene)) == 23
    found = hull_points(scene, np.zeros(3), 1.3, 500, generator())
    assert found is not None
    assert abs(float(np.median(np.linalg.norm(found[0], axis=1))) - RADIUS) < 0.05 * RADIUS


def test_masks_that_cut_make_silhouettes(tmp_path: Path) -> None:
    folder = ball_folder(tmp_path / "ball", opaque=True)
    (folder / "masks/train").mkdir(parents=True)
    for k, pose in enumerate(poses(24)):
        Image.fromarray(photo_of_ball(pose, np.zeros(3))[..., 3]).save(folder / f"masks/train/r_{k:02d}.png")
    scene = read_scene(folder, DataConfig(test_every=0, masks="masks", mask_mode="transparent"))
    found = hull_points(scene, np.zeros(3), 1.3, 1_000, generator())
    assert found is not None
    assert abs(float(np.median(np.linalg.norm(found[0], axis=1))) - RADIUS) < 0.05 * RADIUS
    assert found[1].min() >= 0.0
    assert found[1][:, 1].max() < 0.1  # red or blue, without the grey around


def test_a_command_from_a_hull_replaces_what_contributes_least(tmp_path: Path) -> None:
    folder = tmp_path / "ball"
    ball_folder(folder)
    options = ["-n", "40", "--cap-max", "400", "-q", "--sh-degree", "0", "--set", "strategy.grow_grad2d=1e-9"]
    for setting in ("schedule.refine_start=4", "schedule.refine_every=5", "schedule.refine_stop=36"):
        options += ["--set", setting]

    def trained(name: str, *more: str) -> Gaussians:
        assert run(["train", str(folder), "-o", str(tmp_path / name), *options, *more]) == 0
        return Model.load(tmp_path / name).gaussians

    default = trained("default")
    same, none = (trained(part, "--set", f"strategy.prune_weakest={part}") for part in ("0.1", "0"))
    assert 300 < len(default) <= 400
    assert torch.equal(default.means, same.means)
    assert default.means.shape != none.means.shape or not torch.equal(default.means, none.means)
