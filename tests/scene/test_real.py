"""Real scenes, where they are at hand: geometry agrees with the images, and the readers with each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from splatcli.config import DataConfig
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.read import read_scene
from splatcli.scene.scene import Scene

DATA = Path(__file__).parents[3] / "shared/data"


def _scene(name: str, **data: object) -> Scene:
    if not (DATA / name).is_dir():
        pytest.skip(f"the {name} scene is not at hand")
    return read_scene(DATA / name, DataConfig.model_validate(data))


@pytest.mark.parametrize(("name", "count", "points"), [("fox", 50, 10908 - 11), ("miku", 97, 11846 - 23)])
def test_points_project_onto_their_observations(name: str, count: int, points: int) -> None:
    scene = _scene(name, resolution=2)
    assert (len(scene.cameras), len(scene.points or [])) == (count, points)  # without the doubtful ones
    model = pycolmap.Reconstruction()
    model.read_binary(str(DATA / name / "sparse/0"))
    views = {image.name: image for image in model.images.values()}
    errors = []
    for camera in scene.cameras:
        observed = [p for p in views[camera.name].points2D if p.has_point3D()]
        xyz = np.array([model.points3D[p.point3D_id].xyz for p in observed])
        local = xyz @ camera.viewmat[:3, :3].T + camera.viewmat[:3, 3]
        assert (local[:, 2] > 0).all()
        pixels = local[:, :2] / local[:, 2:] * [camera.fx, camera.fy] + [camera.cx, camera.cy]
        errors.append(np.linalg.norm(pixels - np.array([p.xy for p in observed]) / 2, axis=1))
    # Half resolution halves COLMAP's error of 0.56 and 0.86 pixels.
    assert np.median(np.concatenate(errors)) < 0.5


def test_an_undistorted_image_equals_colmaps() -> None:
    ours, theirs = _scene("fox_opencv"), _scene("fox")
    for i in (0, 17, 49):
        a, b = ours.cameras[i], theirs.cameras[i]
        np.testing.assert_allclose([a.fx, a.fy, a.cx, a.cy], [b.fx, b.fy, b.cx, b.cy], rtol=1e-9)
        np.testing.assert_allclose(a.viewmat, b.viewmat, atol=1e-9)
        difference = ours.images.load(i).astype(np.float64) - theirs.images.load(i)
        # Both were through JPEG and another kernel; half a pixel of shift would cost 10 dB.
        assert 10 * np.log10(255**2 / np.mean(difference**2)) > 38


def test_instant_ngp_cameras_agree_with_colmaps() -> None:
    ngp, colmap = _scene("fox_ngp", resolution=8), _scene("fox", resolution=8)
    assert len(ngp.cameras) == 50
    assert any("17 of 67 views have no image" in note for note in ngp.notes)
    assert [camera.name for camera in ngp.cameras] == [camera.name for camera in colmap.cameras]
    a = np.array([camera.center for camera in colmap.cameras])
    b = np.array([camera.center for camera in ngp.cameras])
    a, b = a - a.mean(axis=0), b - b.mean(axis=0)
    left, stretch, right = np.linalg.svd(b.T @ a)
    rotation = left @ np.diag([1, 1, np.linalg.det(left @ right)]) @ right
    residual = a @ rotation.T * stretch.sum() / np.sum(a**2) - b
    # The data's README: 0.19 % of the mean camera distance, a constant 0.67 degrees.
    assert np.sqrt(np.mean(np.sum(residual**2, axis=1))) < 0.002 * np.linalg.norm(b, axis=1).mean()
    turns = [
        m.viewmat[:3, :3] @ rotation @ n.viewmat[:3, :3].T for m, n in zip(ngp.cameras, colmap.cameras, strict=True)
    ]
    angles = np.degrees(np.arccos([(np.trace(turn) - 1) / 2 for turn in turns]))
    np.testing.assert_allclose(angles.mean(), 0.67, atol=0.02)
    assert angles.std() < 0.1


def test_lego_is_read_on_white() -> None:
    if not (DATA / "lego").is_dir():
        pytest.skip("the lego scene is not at hand")
    scene = read_scene(DATA / "lego", DataConfig(), background=(255, 255, 255))
    assert (len(scene.train), len(scene.test), scene.points) == (100, 40, None)
    camera = scene.cameras[scene.train[0]]
    np.testing.assert_allclose([camera.fx, camera.fy, camera.cx, camera.cy], [555.5555] * 2 + [200] * 2, rtol=1e-5)
    image = scene.images.load(scene.train[0])
    assert image.shape == (400, 400, 3)
    assert (image[0, 0] == 255).all()
    # Every camera looks at the model, which lies around the origin.
    for view in scene.cameras:
        x, y, z = view.viewmat[:3, 3]
        assert z > 0
        assert abs(view.fx * x / z) < 100
        assert abs(view.fy * y / z) < 100
