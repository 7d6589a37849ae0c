"""The half turn to glTF's frame: a camera that turns along sees the same image, harmonics included."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from splatcli.checkpoint.foreign.imported import Columns
from splatcli.formats.transform import half_turn, sh_rotation, sh_signs, transformed
from splatcli.gaussians import SHN_COUNTS, Gaussians
from splatcli.rasterizer import render
from splatcli.scene.camera import Camera
from tests.formats.made import rotation_errors, scene

ABOUT_Z = np.diag([-1.0, -1.0, 1.0, 1.0])


def view() -> Camera:
    """From four units in front, a little off the axes, so that no symmetry hides a wrong sign."""
    viewmat = np.eye(4)
    c, s = np.cos(0.4), np.sin(0.4)
    viewmat[:3, :3] = np.array([[c, 0, s], [0, 1, 0], [-s, 0, c]]) @ np.array([[1, 0, 0], [0, c, -s], [0, s, c]])
    viewmat[:3, 3] = [0.1, -0.2, 4.0]
    return Camera(name="a", width=96, height=80, fx=110.0, fy=110.0, cx=48.0, cy=40.0, viewmat=viewmat)


def seen(gaussians: Gaussians, camera: Camera) -> torch.Tensor:
    with torch.no_grad():
        return render(gaussians, camera).image


def turned(gaussians: Gaussians) -> Gaussians:
    return gaussians_of(half_turn(Columns.of(gaussians)))


def gaussians_of(made: Columns) -> Gaussians:
    return Gaussians(*Columns.tensors(**made._asdict()))


@pytest.mark.parametrize("degree", range(5))
def test_the_picture_is_the_same_for_a_camera_that_turns_along(degree: int) -> None:
    gaussians = scene(200, degree)
    camera = view()
    along = dataclasses.replace(camera, viewmat=camera.viewmat @ ABOUT_Z)
    picture = seen(gaussians, camera)
    assert picture.std() > 0.05  # something is there to be seen
    assert (seen(turned(gaussians), along) - picture).abs().max() < 1e-4
    assert (seen(gaussians, along) - picture).abs().max() > 0.1


def test_two_half_turns_are_none() -> None:
    gaussians = scene(50)
    again = turned(turned(gaussians))
    assert torch.equal(again.means, gaussians.means)
    assert torch.equal(again.shN, gaussians.shN)
    assert rotation_errors(again.quats, gaussians.quats).max() < 1e-3


def moving(scale: float) -> np.ndarray:
    """About no axis of the frame."""
    matrix = np.eye(4)
    matrix[:3, :3] = scale * Rotation.from_rotvec([0.7, -1.1, 0.5]).as_matrix()
    matrix[:3, 3] = [0.5, -0.25, 2.0]
    return matrix


@pytest.mark.parametrize("degree", range(5))
def test_the_picture_is_the_same_for_a_camera_that_moves_along(degree: int) -> None:
    gaussians = scene(150, degree)
    camera, scale = view(), 1.7
    matrix = moving(scale)
    # A scene that is larger looks the same from as much farther away.
    viewmat = camera.viewmat @ np.linalg.inv(matrix)
    viewmat[:3] *= scale
    picture = seen(gaussians, camera)
    after = gaussians_of(transformed(Columns.of(gaussians), matrix))
    assert (seen(after, dataclasses.replace(camera, viewmat=viewmat)) - picture).abs().max() < 1e-4


def test_a_zero_quaternion_turns_as_the_identity_that_it_is() -> None:
    columns = Columns.of(scene(2))
    one = columns._replace(quats=np.array([[1.0, 0.0, 0.0, 0.0]] * 2, np.float32))
    zero = columns._replace(quats=np.zeros((2, 4), np.float32))
    found, expected = (transformed(each, moving(1.0)).quats for each in (zero, one))
    np.testing.assert_array_equal(found, expected)


def test_the_half_turn_is_one_of_all_rotations() -> None:
    for coefficients in SHN_COUNTS:
        found = sh_rotation(ABOUT_Z[:3, :3], coefficients)
        np.testing.assert_allclose(found, np.diag(sh_signs(coefficients)), atol=1e-12)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda m: m.__setitem__((0, slice(3)), -m[0, :3]), "mirrors"),
        (lambda m: m.__setitem__((0, slice(3)), 2 * m[0, :3]), "scales its axes differently"),
        (lambda m: m.__setitem__((0, 1), m[0, 1] + 0.01), "shears"),
        (lambda m: m.__setitem__(slice(3), 0.0), "is not one of"),
        (lambda m: m.__setitem__((3, 0), 0.5), "is not one of"),
        (lambda m: m.__setitem__((0, 3), np.nan), "is not one of"),
    ],
)
def test_what_no_gaussians_can_follow_is_reported(edit: Any, said: str) -> None:
    matrix = moving(1.0)
    edit(matrix)
    with pytest.raises(ValueError, match=said):
        transformed(Columns.of(scene(3)), matrix)
