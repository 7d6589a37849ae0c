"""Points of the sky: where they are, which colours they have, and where there are none."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from splatcli.cli.commands import run
from splatcli.config import Config, DataConfig
from splatcli.scene.points import PointCloud
from splatcli.scene.read import read_scene
from splatcli.scene.scene import Scene
from splatcli.train.init import initial_gaussians
from splatcli.train.sky import LEAST_POINTS, RADIUS, even_directions, sky_points

WIDTH, HEIGHT, FOCAL = 96, 72, 80.0
SKY, GROUND = (90, 140, 230), (60, 50, 40)


def pose(turn: float) -> NDArray[np.float64]:
    """[4, 4] camera to world, OpenGL axes, of a level camera one above the origin: y is up."""
    back = np.array([math.sin(turn), 0.0, math.cos(turn)])
    made = np.eye(4)
    made[:3, :3] = np.stack([np.cross([0.0, 1.0, 0.0], back), [0.0, 1.0, 0.0], back], axis=1)
    made[:3, 3] = (0.3 * math.cos(5.0 * turn), 1.0, 0.3 * math.sin(5.0 * turn))
    return made


def plain(
    folder: Path, *, views: int = 16, masked: bool = False, transparent: bool = False, clear_corners: int = 0
) -> Scene:
    """A plain with points up to a distance of 40, below a sky of one colour above the horizon, row HEIGHT / 2.

    clear_corners: images of which the lower right corner is transparent.
    """
    (folder / "images").mkdir(parents=True)
    picture = np.full((HEIGHT, WIDTH, 4), 255, np.uint8)
    picture[: HEIGHT // 2, :, :3], picture[HEIGHT // 2 :, :, :3] = SKY, GROUND
    if transparent:
        picture[: HEIGHT // 2, :, 3] = 0
    frames = []
    for k in range(views):
        name = f"images/{k:02d}.png"
        picture[-9:, -9:, 3] = 0 if k < clear_corners else 255
        Image.fromarray(picture).save(folder / name)
        frames.append({"file_path": name, "transform_matrix": pose(2.0 * math.pi * k / views).tolist()})
        if masked:
            (folder / "masks").mkdir(exist_ok=True)
            mask = np.where(np.arange(HEIGHT) < HEIGHT // 2, 0, 255).astype(np.uint8)
            Image.fromarray(np.repeat(mask[:, None], WIDTH, axis=1)).save(folder / f"masks/{k:02d}.png")
    lens = {"fl_x": FOCAL, "fl_y": FOCAL, "cx": WIDTH / 2, "cy": HEIGHT / 2, "w": WIDTH, "h": HEIGHT}
    (folder / "transforms.json").write_text(json.dumps({**lens, "frames": frames}), encoding="utf-8")
    scene = read_scene(folder, DataConfig(test_every=0))
    # Even in the images: on rays through every third pixel below the horizon.
    turns = np.linspace(0.0, 2.0 * math.pi, 240, endpoint=False)
    down = np.tan(np.arange(2.0, 28.0, 1.5) * math.pi / 180.0)
    turn, slope = (each.ravel() for each in np.meshgrid(turns, down))
    far = 1.0 / slope
    xyz = np.stack([far * np.sin(turn), np.zeros(len(far)), far * np.cos(turn)], axis=1).astype(np.float32)
    scene.points = PointCloud(xyz, np.full((len(xyz), 3), GROUND, np.uint8))
    return scene


def points_of(scene: Scene) -> NDArray[np.float32]:
    assert scene.points is not None
    return scene.points.xyz


def test_directions_are_even() -> None:
    found = even_directions(1_000)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-12)
    turns = np.arange(1_000) * math.pi * (3.0 - math.sqrt(5.0))
    ring = np.sqrt(1.0 - found[:, 2] ** 2)
    np.testing.assert_allclose(found[:, :2], np.stack([ring * np.cos(turns), ring * np.sin(turns)], axis=1), atol=1e-9)
    cosines = found @ found.T - 2.0 * np.eye(1_000)
    nearest = np.arccos(cosines.max(axis=1))
    assert nearest.min() > 0.6 * math.sqrt(4.0 * math.pi / 1_000)


def test_points_are_in_the_sky_and_have_its_colour(tmp_path: Path) -> None:
    scene = plain(tmp_path / "plain")
    xyz = points_of(scene)
    found, rgb = sky_points(scene, xyz, 4_000)
    apart = found - np.array([0.0, 1.0, 0.0])
    heights = np.degrees(np.arcsin(apart[:, 1] / np.linalg.norm(apart, axis=1)))
    # Level cameras of 48 degrees see 24 degrees up; nothing nearer than 4 % of the image to the points counts as sky.
    assert heights.min() > 0.0
    assert heights.max() < 26.0
    band = 0.5 * (math.sin(math.radians(24.0)) - math.sin(math.radians(3.0)))
    assert 0.7 * band < len(found) / 4_000 < 1.1 * band, "the whole band above the horizon has points"
    distances = np.linalg.norm(xyz - np.array([0.0, 1.0, 0.0]), axis=1)
    assert np.linalg.norm(apart, axis=1).min() > 0.95 * RADIUS * np.quantile(distances, 0.98)
    np.testing.assert_allclose(rgb, np.broadcast_to(np.array(SKY) / 255.0, rgb.shape), atol=1e-6)


@pytest.mark.parametrize("hidden", ["masked", "transparent"])
def test_hidden_sky_has_no_points(hidden: str, tmp_path: Path) -> None:
    scene = plain(tmp_path / "plain", **{hidden: True})
    found, _ = sky_points(scene, points_of(scene), 4_000)
    assert len(found) == 0


@pytest.mark.parametrize("clear_corners", [7, 8])
def test_images_with_transparency_have_no_sky(clear_corners: int, tmp_path: Path) -> None:
    """Where half of them or more have some: what they show is an object, and untextured parts of it are no sky."""
    scene = plain(tmp_path / "plain", clear_corners=clear_corners)
    found, _ = sky_points(scene, points_of(scene), 4_000)
    assert bool(len(found)) == (clear_corners < 8)


def test_points_are_behind_an_object_that_cameras_are_around(tmp_path: Path) -> None:
    scene = plain(tmp_path / "plain")
    centers = np.stack([scene.cameras[view].center for view in scene.train])
    middle = np.median(centers, axis=0)
    distances = np.linalg.norm(centers - middle, axis=1)
    object_points = (middle + 0.002 * (points_of(scene) - middle)).astype(np.float32)
    found, _ = sky_points(scene, object_points, 1_000)
    assert len(found) > 0
    np.testing.assert_allclose(np.linalg.norm(found - middle, axis=1), RADIUS * np.median(distances), rtol=1e-5)


def test_few_points_or_one_view_tell_nothing_of_the_sky(tmp_path: Path) -> None:
    scene = plain(tmp_path / "plain")
    xyz = points_of(scene)
    assert len(sky_points(scene, xyz[: LEAST_POINTS - 1], 4_000)[0]) == 0
    alone = plain(tmp_path / "alone", views=2)
    assert len(sky_points(alone, xyz, 4_000)[0]) == 0, "no direction is in both of the opposite images"


def test_a_fifth_of_the_cap_are_tried_and_0_adds_none(tmp_path: Path) -> None:
    scene = plain(tmp_path / "plain")
    sparse = len(points_of(scene))

    def start(blocks: str | None = None, **model: object) -> tuple[int, list[str]]:
        config = Config.model_validate({"data": {"blocks": blocks}, "model": model, "strategy": {"cap_max": 20_000}})
        gaussians, notes = initial_gaussians(config, scene, torch.Generator().manual_seed(0))
        return len(gaussians), notes

    count, notes = start()
    assert count == sparse + len(sky_points(scene, points_of(scene), 4_000)[0])
    assert any("sky" in note for note in notes)
    assert start(sky_points=0) == (sparse, [])
    assert start(blocks="2x1") == (sparse, []), "the points of a block are those of its region"


def test_train_says_how_many_points_of_the_sky_it_adds(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    scene = Path(__file__).parents[2] / "data/samples/courtyard"
    words = ["train", str(scene), "-n", "1", "-r", "4", "--cap-max", "20000", "--device", "cpu"]
    assert run([*words, "-o", str(tmp_path / "run")]) == 0
    assert "points far away, for the sky and far background" in capfd.readouterr().err
    assert run([*words, "-o", str(tmp_path / "without"), "--set", "model.sky_points=0"]) == 0
    assert "far away" not in capfd.readouterr().err
