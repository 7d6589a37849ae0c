"""Panoramas of a model: where a direction appears, and that nothing shows of the faces which they are made of."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from splatcli.errors import UsageError
from splatcli.gaussians import SH_C0, Gaussians
from splatcli.render.images import ModelRenderer, RenderedMaps, RenderSettings
from splatcli.render.panorama import MAX_WIDTH, panorama_of
from splatcli.scene.camera import Camera
from tests.native.cases import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER

POSE = np.eye(4)
POSE[:3, :3] = Rotation.from_euler("yxz", [30, -20, 10], degrees=True).as_matrix()
POSE[:3, 3] = [0.4, -0.2, 0.7]
#: Looks along POSE; what it sees says how large a panorama is that nobody gave a size.
CAMERA = Camera("a.png", 60, 40, 50.0, 50.0, 30.0, 20.0, POSE)
SIZE = (512, 256)


def rays_of(width: int, height: int) -> NDArray[np.float64]:
    """[H, W, 3] unit vectors of the pixels of a panorama, by longitude from behind and latitude from above."""
    longitude = ((np.arange(width) + 0.5) / width - 0.5) * 2 * np.pi
    down = ((np.arange(height) + 0.5) / height - 0.5) * np.pi
    down, longitude = np.meshgrid(down, longitude, indexing="ij")
    return np.stack([np.cos(down) * np.sin(longitude), np.sin(down), np.cos(down) * np.cos(longitude)], axis=-1)


def seen_from(pose: NDArray[np.float64], directions: NDArray[np.float64], distance: float) -> NDArray[np.float64]:
    """[N, 3] in the world: what a camera of a pose sees in ``directions`` of its frame, so far away."""
    return (distance * directions - pose[:3, 3]) @ pose[:3, :3]


def shell(count: int = 30_000, distance: float = 5.0, size: float = 0.07) -> Gaussians:
    """A closed shell of flat opaque Gaussians around the camera's position, its colours slow waves of the direction."""
    steps = np.arange(count) + 0.5
    y, turn = 1 - 2 * steps / count, np.pi * (1 + 5**0.5) * steps
    around = np.sqrt(1 - y * y)
    directions = np.stack([around * np.cos(turn), y, around * np.sin(turn)], axis=-1)
    colours = 0.5 + 0.35 * np.sin(3 * directions + np.arange(3))
    x, y, z = (directions @ POSE[:3, :3]).T
    quats = np.stack([1 + z, -y, x, np.zeros(count)], axis=1)  # turn the z axis, the thin one, to x y z
    return Gaussians(
        means=torch.tensor(seen_from(POSE, directions, distance), dtype=torch.float32),
        quats=torch.tensor(quats, dtype=torch.float32),
        log_scales=torch.tensor([size, size, 0.01]).log().expand(count, 3).contiguous(),
        logit_opacities=torch.full((count,), 5.0),
        sh0=torch.tensor((colours - 0.5) / SH_C0, dtype=torch.float32),
        shN=torch.zeros(count, 0, 3),
    )


def dots(directions: NDArray[np.float64], distance: float) -> Gaussians:
    """Small white Gaussians in ``directions`` [N, 3] of the camera's frame."""
    count = len(directions)
    return Gaussians(
        means=torch.tensor(seen_from(POSE, directions, distance), dtype=torch.float32),
        quats=torch.tensor([[1.0, 0.0, 0.0, 0.0]]).repeat(count, 1),
        log_scales=torch.full((count, 3), math.log(0.02 * distance)),
        logit_opacities=torch.full((count,), 6.0),
        sh0=torch.full((count, 3), 0.5 / SH_C0),
        shN=torch.zeros(count, 0, 3),
    )


def rendered(model: Gaussians, camera: Camera, size: tuple[int, int] = SIZE) -> RenderedMaps:
    return ModelRenderer(model, RenderSettings(), with_normals=True).render_maps(panorama_of(camera, size))


def test_every_direction_appears_at_its_longitude_and_latitude() -> None:
    rng = np.random.default_rng(5)
    for direction in [*np.eye(3), *-np.eye(3), *rng.normal(size=(30, 3))]:
        unit = direction / np.linalg.norm(direction)
        maps = rendered(dots(unit[None], 4.0), CAMERA)
        rays = rays_of(*SIZE)
        light = np.asarray(maps.rgb)[..., :1] * np.cos(np.arcsin(rays[..., 1:2]))  # rows near the poles are repeated
        middle = (light * rays).sum(axis=(0, 1))
        off = np.degrees(np.arccos(np.clip(middle @ unit / np.linalg.norm(middle), -1, 1)))
        assert off < 0.15, unit  # a pixel is 0.7 degrees wide
        shown = maps.alpha > 0.5
        assert 0 < shown.mean() < 0.05
        # One camera z for all pixels of a Gaussian, which is up to 4 degrees wide: 4 % of the distance at 45 degrees.
        np.testing.assert_allclose(maps.depth[shown], 4.0, rtol=0.05)
        assert np.median(maps.depth[shown]) == pytest.approx(4.0, rel=0.02)
        assert np.isinf(maps.depth[maps.alpha == 0]).all()


def test_maps_are_those_of_a_shell_around_the_camera() -> None:
    maps = rendered(shell(), CAMERA)
    rays = rays_of(*SIZE)
    wanted = 0.5 + 0.35 * np.sin(3 * rays + np.arange(3))
    assert np.abs(np.asarray(maps.rgb) - wanted).max() < 0.04
    assert maps.alpha.min() > 0.98
    np.testing.assert_allclose(maps.depth, 5.0, rtol=0.03)
    # The shell faces the camera: x right, y up, z towards the viewer who looks at the middle.
    towards = -rays * [1, -1, -1]
    assert maps.normals is not None
    assert (maps.normals * towards).sum(axis=-1).min() > 0.99


def test_a_camera_that_turns_shows_the_same_elsewhere() -> None:
    """Faces meet in other directions then: what they show of one direction agrees."""
    turned = POSE.copy()
    turn = Rotation.from_euler("y", -45, degrees=True).as_matrix()
    turned[:3] = turn @ POSE[:3]
    before, after = rendered(shell(), CAMERA), rendered(shell(), replace(CAMERA, viewmat=turned))
    shift = SIZE[0] // 8
    off = np.abs(np.roll(np.asarray(after.rgb), shift, axis=1) - np.asarray(before.rgb))
    # The order of Gaussians goes by z: another one of two at the same distance is in front, up to 0.04 radians away.
    assert off.max() < 0.04
    assert off.mean() < 0.005
    np.testing.assert_allclose(np.roll(after.depth, shift, axis=1), before.depth, rtol=0.02)


def test_the_middle_agrees_with_a_pinhole() -> None:
    model = shell()
    maps = rendered(model, CAMERA, (1024, 512))
    flat = ModelRenderer(model, RenderSettings()).render_maps(CAMERA)
    x, y = np.meshgrid(np.arange(60) + 0.5 - 30, np.arange(40) + 0.5 - 20)
    longitude, down = np.arctan2(x, 50.0), np.arctan2(y, np.hypot(x, 50.0))
    column = np.floor((longitude / (2 * np.pi) + 0.5) * 1024).astype(int)
    row = np.floor((down / np.pi + 0.5) * 512).astype(int)
    assert np.abs(np.asarray(maps.rgb)[row, column] - np.asarray(flat.rgb)).max() < 0.02
    distances = flat.depth * np.sqrt(1 + (x / 50) ** 2 + (y / 50) ** 2)
    np.testing.assert_allclose(maps.depth[row, column], distances, rtol=0.02)


def test_sizes() -> None:
    assert (panorama_of(CAMERA, None).width, panorama_of(CAMERA, None).height) == (314, 157)
    fine = panorama_of(replace(CAMERA, fx=9_000.0, fy=9_000.0), None)
    assert (fine.width, fine.height) == (MAX_WIDTH, MAX_WIDTH // 2)
    with pytest.raises(UsageError, match="twice as wide as high, and 100x100 is not") as caught:
        panorama_of(CAMERA, (100, 100))
    assert caught.value.remedy == "--size 200x100"
    with pytest.raises(UsageError, match="ortho cameras"):
        panorama_of(replace(CAMERA, model="ortho"), None)
    odd = rendered(dots(np.eye(3)[2:], 3.0), CAMERA, (2, 1))
    assert odd.rgb.shape == (1, 2, 3)
