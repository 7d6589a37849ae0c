"""Up: from cameras that look down from one side, from a floor with things on it, and what has none."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from splatcli.edit.level import rotation_between, up_of_cameras, up_of_gaussians
from splatcli.edit.transform import move_camera, move_gaussians
from splatcli.gaussians import Gaussians
from splatcli.scene.camera import Camera, common_up
from splatcli.similarity import Similarity
from tests.formats.made import scene
from tests.rasterizer.scenes import look_from

TILT = Similarity.euler((25.0, -40.0, 70.0))


def angle(one: np.ndarray, other: np.ndarray) -> float:
    """Degrees."""
    return float(np.degrees(np.arccos(np.clip(one @ other, -1, 1))))


def cameras(yaws: np.ndarray, height: float) -> list[Camera]:
    """Level cameras on an arc around the z axis that look at the origin; y of the world is down, as COLMAP's."""
    found = []
    for yaw in np.radians(yaws):
        viewmat = look_from([3 * float(np.cos(yaw)), -height, 3 * float(np.sin(yaw))], [0.0, 0.0, 0.0])
        found.append(Camera("a.png", 40, 30, 40.0, 40.0, 20.0, 15.0, viewmat))
    return found


def test_cameras_that_look_down_from_one_side_are_level() -> None:
    some = cameras(np.linspace(0, 120, 13), 3.0)
    up = np.array([0.0, -1.0, 0.0]) if common_up(some)[1] < 0 else np.array([0.0, 1.0, 0.0])
    assert angle(common_up(some), up) > 20, "the mean of the upper edges leans"
    assert angle(up_of_cameras(some), up) < 1e-4
    moved = [move_camera(one, TILT) for one in some]
    assert angle(up_of_cameras(moved), TILT.rotation @ up) < 1e-4
    alike = cameras(np.array([0.0, 2.0, 4.0]), 0.5)  # these do not tell: the mean decides
    assert np.allclose(up_of_cameras(alike), common_up(alike))
    assert up_of_cameras([]) is None


def room() -> Gaussians:
    """A floor of discs at z = 0 with clutter above it."""
    floor, things = scene(1500, 1, seed=1), scene(1500, 1, seed=2)
    floor.means[:] = torch.rand(1500, 3, generator=torch.Generator().manual_seed(0)) * 6 - 3
    floor.means[:, 2] *= 0.002
    floor.quats[:] = torch.tensor([1.0, 0.0, 0.0, 0.0]) + 0.02 * floor.quats
    floor.log_scales[:] = torch.tensor([-2.0, -2.0, -6.0])
    things.means[:, 2] = things.means[:, 2].abs() + 0.3
    return Gaussians(**{name: torch.cat([tensor, dict(things.items())[name]]) for name, tensor in floor.items()})


@pytest.mark.parametrize("turn", [Similarity(), TILT, Similarity.euler((180.0, 0.0, 0.0))], ids=["up", "tilt", "down"])
def test_a_floor_is_below_what_stands_on_it(turn: Similarity) -> None:
    found = up_of_gaussians(move_gaussians(room(), turn))
    assert angle(found, turn.rotation @ [0.0, 0.0, 1.0]) < 1.0


def test_a_cloud_has_no_floor() -> None:
    assert up_of_gaussians(scene(3000, 0)) is None
    round_ones = scene(300, 0)
    round_ones.log_scales[:] = -3.0
    assert up_of_gaussians(round_ones) is None


@pytest.mark.parametrize(
    "other",
    [(0, 0, 1), (0, 0, -1), (1, 0, 0), (0.6, 0, 0.8), (-0.6, 0.0, -0.8)]
    + [(math.sin(off), 0.0, -math.cos(off)) for off in (1e-3, 1e-6, 2e-8)],  # nearly a half turn
)
def test_a_rotation_between_two_directions_is_the_smallest(other: tuple[float, float, float]) -> None:
    one, other = np.array([0.0, 0.0, 1.0]), np.array(other, dtype=float)
    rotation = rotation_between(one, other).rotation
    assert np.allclose(rotation @ one, other, atol=1e-12)
    assert np.allclose(rotation @ rotation.T, np.eye(3), atol=1e-12)
    assert np.linalg.det(rotation) == pytest.approx(1)
    assert np.trace(rotation) == pytest.approx(1 + 2 * float(one @ other), abs=1e-9)


@pytest.mark.parametrize(("mean", "log_scale"), [(1e30, -3.0), (3e38, -3.0), (0.5, 400.0), (0.5, -1e4)])
def test_gaussians_at_the_ends_of_float32_have_a_plane_or_none(mean: float, log_scale: float) -> None:
    """At one place so far away that their heights are one number, and of sizes whose squares leave float64."""
    gaussians = scene(200, 0)
    gaussians.means[:], gaussians.log_scales[:] = mean, log_scale
    gaussians.log_scales[:, 0] -= 3.0
    gaussians.quats[:] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    up = up_of_gaussians(gaussians)
    assert up is None or float(np.linalg.norm(up)) == pytest.approx(1.0)
    assert (up is None) == (abs(log_scale) > 100), "one size, whatever the axes"
