"""The near plane of each camera follows its distance to the sparse points."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.spatial.distance import cdist

from splatcli.config import DataConfig
from splatcli.scene.camera import NEAR
from splatcli.scene.read import read_scene
from splatcli.scene.scene import Scene
from tests.scene import made


def scene_of(root: Path, points: np.ndarray, camera: object = None, **data: object) -> Scene:
    """The cameras of tests/scene/made.py, or others in their places, before ``points`` [P, 3]."""
    model = made.reconstruction(camera, points=0)
    for point in points:
        model.add_point3D(point, made.pycolmap.Track(), np.array([90, 120, 150], dtype=np.uint8))
    (root / "sparse" / "0").mkdir(parents=True)
    (root / "images").mkdir()
    model.write(root / "sparse" / "0")
    for seed, name in enumerate(made.names()):
        Image.fromarray(made.picture(seed)).save(root / "images" / name)
    return read_scene(root, DataConfig.model_validate(data))


def distances(scene: Scene, points: np.ndarray) -> np.ndarray:
    """[C, P] ascending for each camera."""
    return np.sort(cdist([camera.center for camera in scene.cameras], points), axis=1)


def planes(scene: Scene) -> list[float]:
    return [camera.near for camera in scene.cameras]


BALL = np.random.default_rng(4).uniform(-1, 1, (40, 3))


@pytest.mark.parametrize("scale", [1.0, 1e-3, 500.0])
def test_a_near_plane_is_a_share_of_the_distance_to_the_fifth_point(tmp_path: Path, scale: float) -> None:
    """In any units; points nearer than that may be stray."""
    points = scale * BALL
    scene = scene_of(tmp_path, points)
    expected = 0.2 * distances(scene, points)[:, 4]
    np.testing.assert_allclose(planes(scene), expected, rtol=1e-5)


def test_near_planes_of_fisheyes_cut_off_no_more_at_their_edge(tmp_path: Path) -> None:
    """At 85 degrees from the axis camera z is the distance times the cosine; a pinhole there has the usual one."""
    scene = scene_of(tmp_path, BALL, camera=made.lens("FISHEYE", [20.0, 20.0, 32.0, 24.0]))
    assert {camera.model for camera in scene.cameras} == {"fisheye"}
    expected = 0.2 * distances(scene, BALL)[:, 4]
    np.testing.assert_allclose(planes(scene), expected * np.cos(np.radians(85.0)), rtol=1e-5)
    np.testing.assert_allclose([camera.as_pinhole().near for camera in scene.cameras], expected, rtol=1e-5)


def test_the_share_is_a_setting_and_zero_is_the_fixed_plane(tmp_path: Path) -> None:
    scene = scene_of(tmp_path / "a", BALL, near_share=0.05, resolution=2)
    np.testing.assert_allclose(planes(scene), 0.05 * distances(scene, BALL)[:, 4], rtol=1e-5)
    assert planes(scene_of(tmp_path / "b", BALL, near_share=0.0)) == [NEAR] * made.COUNT


def test_of_many_points_evenly_chosen_ones_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splatcli.scene.build._MOST_POINTS", 13)
    scene = scene_of(tmp_path, BALL)
    assert scene.points is not None
    np.testing.assert_allclose(planes(scene), 0.2 * distances(scene, scene.points.xyz[::4])[:, 4], rtol=1e-5)


@pytest.mark.parametrize("count", [0, 1, 4])
def test_too_few_points_tell_nothing(tmp_path: Path, count: int) -> None:
    assert planes(scene_of(tmp_path, BALL[:count])) == [NEAR] * made.COUNT


@pytest.mark.parametrize("count", [0, 4])
def test_without_points_the_near_plane_of_a_small_scene_follows_its_extent(tmp_path: Path, count: int) -> None:
    small = {"scene_extent": 0.02}
    np.testing.assert_allclose(planes(scene_of(tmp_path / "a", BALL[:count], **small)), 0.0002)
    assert planes(scene_of(tmp_path / "b", BALL[:count], near_share=0.0, **small)) == [NEAR] * made.COUNT


def test_a_camera_among_points_keeps_a_near_plane_above_zero(tmp_path: Path) -> None:
    center = -made.w2c(0)[:3, :3].T @ made.w2c(0)[:3, 3]
    points = np.concatenate([BALL, np.tile(center, (5, 1))])
    scene = scene_of(tmp_path, points)
    nearest = distances(scene, points)[:, 4]
    assert nearest[0] < 1e-6
    assert planes(scene)[0] == pytest.approx(0.01 * np.median(nearest))
    np.testing.assert_allclose(planes(scene)[1:], 0.2 * nearest[1:], rtol=1e-5)


def test_all_points_at_all_cameras_leave_the_fixed_plane(tmp_path: Path) -> None:
    centers = [-made.w2c(i)[:3, :3].T @ made.w2c(i)[:3, 3] for i in range(made.COUNT)]
    scene = scene_of(tmp_path, np.repeat(np.float32(centers), 5, axis=0).astype(float))
    assert min(planes(scene)) > 0
