"""The half turn to glTF's frame: whoever turns along sees the same picture, harmonics and all."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from splatcli.formats.turn import half_turn
from splatcli.formats.units import columns_of
from splatcli.gaussians import Gaussians
from splatcli.raster import render
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
    columns: dict[str, Any] = half_turn(columns_of(gaussians))._asdict()
    return Gaussians(**{name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in columns.items()})


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
