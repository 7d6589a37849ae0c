"""Motions of cameras: the gradient in their six numbers is that of autograd through the matrix exponential."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation
from torch.testing import assert_close

from splatcli.scene.camera import apply_pose_delta, pose_delta_vjp
from tests.rasterizer.scenes import random_camera


def moved_by_torch(viewmat: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    x, y, z = delta[:3]
    zero = torch.zeros_like(x)
    cross = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero]).view(3, 3)
    rotation = torch.linalg.matrix_exp(cross)
    top = torch.cat([rotation @ viewmat[:3, :3], (rotation @ viewmat[:3, 3] + delta[3:])[:, None]], dim=1)
    return torch.cat([top, viewmat[3:]])


@pytest.mark.parametrize("size", [0.0, 1e-9, 9e-5, 1.1e-4, 1e-2, 1.0, 3.0])
def test_the_gradient_of_a_motion_is_that_of_autograd(size: float) -> None:
    camera, random = random_camera(4), np.random.default_rng(8)
    direction = random.normal(size=3)
    delta = np.concatenate([size * direction / np.linalg.norm(direction), 0.3 * random.normal(size=3)])
    v_viewmat = np.concatenate([random.normal(size=(3, 4)), np.zeros((1, 4))])
    leaf = torch.tensor(delta, requires_grad=True)
    matrix = moved_by_torch(torch.from_numpy(camera.viewmat), leaf)
    (expected,) = torch.autograd.grad((matrix * torch.from_numpy(v_viewmat)).sum(), leaf)
    rotation = Rotation.from_rotvec(delta[:3]).as_matrix() @ camera.viewmat[:3]
    rotation[:, 3] += delta[3:]
    assert np.allclose(apply_pose_delta(camera, delta).viewmat[:3], rotation, rtol=0, atol=1e-14)
    assert_close(torch.from_numpy(pose_delta_vjp(camera, delta, v_viewmat)), expected, rtol=0, atol=1e-11)


def test_a_camera_turns_about_its_own_centre() -> None:
    camera = random_camera(4)
    turned = apply_pose_delta(camera, np.array([0.1, -0.2, 0.3, 0.0, 0.0, 0.0]))
    assert np.allclose(turned.center, camera.center, rtol=0, atol=1e-14)
    assert np.allclose(turned.viewmat[:3, :3] @ turned.viewmat[:3, :3].T, np.eye(3), rtol=0, atol=1e-14)
    assert apply_pose_delta(camera, np.zeros(6)) is camera
