"""Similarity transforms of models: a camera that moves along sees the same image."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from splatcli.edit.transform import move_camera, move_gaussians
from splatcli.formats.transform import sh_rotation
from splatcli.gaussians import SHN_COUNTS, Gaussians
from splatcli.rasterizer import render
from splatcli.rasterizer.reference import sh_basis
from splatcli.scene.camera import Camera, CameraModel
from splatcli.similarity import Similarity
from tests.formats.made import rotation_errors, scene
from tests.rasterizer.scenes import of_model

TURN = Similarity.euler((40.0, -70.0, 15.0))
MOVE = Similarity(1.7, TURN.rotation, np.array([0.5, -0.25, 2.0]))


def view() -> Camera:
    viewmat = np.eye(4)
    viewmat[:3, :3] = Rotation.from_rotvec([0.3, -0.4, 0.1]).as_matrix()
    viewmat[:3, 3] = [0.1, -0.2, 4.0]
    return Camera(name="a", width=64, height=48, fx=70.0, fy=75.0, cx=31.0, cy=25.0, viewmat=viewmat)


def seen(gaussians: Gaussians, camera: Camera) -> torch.Tensor:
    with torch.no_grad():
        return render(gaussians, camera).image


@pytest.mark.parametrize(
    ("degree", "model"), [*((degree, "pinhole") for degree in range(5)), (1, "ortho"), (0, "fisheye")]
)
def test_the_image_is_the_same_for_a_camera_that_moves_along(degree: int, model: CameraModel) -> None:
    gaussians, camera = scene(150, degree), of_model(view(), model)
    image = seen(gaussians, camera)
    moved = move_gaussians(gaussians, MOVE)
    assert image.std() > 0.05
    assert (seen(moved, move_camera(camera, MOVE)) - image).abs().max() < 2e-4
    assert (seen(moved, camera) - image).abs().max() > 0.1


def test_the_near_plane_of_a_camera_scales_with_the_model() -> None:
    assert move_camera(replace(view(), near=0.5), MOVE).near == pytest.approx(0.85)


@pytest.mark.parametrize("degree", range(1, 5))
def test_harmonics_become_the_rotated_function_and_keep_their_length(degree: int) -> None:
    count = SHN_COUNTS[degree]
    mixing = sh_rotation(TURN.rotation, count)
    assert np.abs(mixing @ mixing.T - np.eye(count)).max() < 1e-12
    rng = np.random.default_rng(7)
    directions = rng.normal(size=(50, 3))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    coefficients = rng.normal(size=(count, 3))
    after, before = (
        sh_basis(torch.from_numpy(d), degree).numpy()[:, 1:] for d in (directions, directions @ TURN.rotation)
    )
    assert np.abs(after @ (mixing @ coefficients) - before @ coefficients).max() < 1e-12


def test_euler_angles_turn_about_fixed_axes_x_then_y_then_z() -> None:
    angles = (40.0, -70.0, 15.0)
    expected = Rotation.from_euler("xyz", angles, degrees=True).as_matrix()
    assert np.abs(Similarity.euler(angles).rotation - expected).max() < 1e-15
    # Quarter turns are exact: z becomes -y about x, and a full turn is none.
    assert np.array_equal(Similarity.euler((90, 0, 0)).rotation @ [0, 0, 1], [0, -1, 0])
    assert Similarity.euler((360, -720, 0)).is_identity


def test_a_product_applies_its_parts_one_after_another() -> None:
    other = Similarity(0.5, Similarity.euler((0, 0, 30)).rotation, np.array([1.0, 2.0, 3.0]))
    gaussians = scene(100, 2)
    once, twice = move_gaussians(gaussians, other.after(MOVE)), move_gaussians(move_gaussians(gaussians, MOVE), other)
    for name in ("means", "log_scales", "shN"):
        assert (getattr(once, name) - getattr(twice, name)).abs().max() < 2e-6, name
    assert rotation_errors(once.quats, twice.quats).max() < 0.05
    assert torch.equal(once.sh0, gaussians.sh0)


def test_what_a_shift_or_a_factor_leaves_alone_keeps_its_bits() -> None:
    gaussians = scene(100, 3)
    shifted = move_gaussians(gaussians, Similarity(shift=np.array([1.0, 0.0, -2.0])))
    assert torch.equal(shifted.means, (gaussians.means.double() + torch.tensor([1.0, 0.0, -2.0])).float())
    scaled = move_gaussians(gaussians, Similarity(scale=2.0))
    assert torch.equal(scaled.means, 2 * gaussians.means)
    assert (scaled.log_scales.double().exp() / gaussians.log_scales.double().exp() - 2).abs().max() < 2e-6
    for name in ("quats", "logit_opacities", "sh0", "shN"):
        assert torch.equal(getattr(shifted, name), getattr(gaussians, name))
        assert torch.equal(getattr(scaled, name), getattr(gaussians, name))
    assert torch.equal(shifted.log_scales, gaussians.log_scales)
