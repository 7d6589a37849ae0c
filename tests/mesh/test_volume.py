"""The volume from inside: known distances give the right surface, closed and without seams; depths fuse to it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from splatcli.gaussians import SH_C0, Gaussians
from splatcli.mesh.depth import points_of, surface_depth
from splatcli.mesh.surface import Mesh, largest_components
from splatcli.mesh.volume import SIDE, TRUNCATION, Region, Volume
from splatcli.scene.camera import Camera
from tests.native.cases import NEEDS_COMPILER

RADIUS, VOXEL = 0.8, 0.05
CPU = torch.device("cpu")


def camera(eye: np.ndarray, size: int = 160) -> Camera:
    """One that looks at the origin with a field of view of 53 degrees."""
    forward = -eye / np.linalg.norm(eye)
    right = np.cross(forward, [0.0, 0.6, 0.8] if abs(forward[1]) < 0.9 else [1.0, 0.0, 0.0])
    right /= np.linalg.norm(right)
    viewmat = np.eye(4)
    viewmat[:3, :3] = np.stack([right, np.cross(forward, right), forward])
    viewmat[:3, 3] = -viewmat[:3, :3] @ eye
    return Camera("", size, size, size, size, size / 2, size / 2, viewmat)


def rays(view: Camera) -> np.ndarray:
    """[H, W, 3] directions in the camera, with z = 1."""
    x = (np.arange(view.width) + 0.5 - view.cx) / view.fx
    y = (np.arange(view.height) + 0.5 - view.cy) / view.fy
    return np.stack([*np.meshgrid(x, y), np.ones((view.height, view.width))], axis=-1)


def ball_depth(view: Camera, radius: float = RADIUS) -> torch.Tensor:
    """[H, W] camera z of a ball around the origin; infinite beside it."""
    d = rays(view)
    middle = view.viewmat[:3, 3]
    along, square = d @ middle, (d * d).sum(axis=-1)
    inside = along**2 - square * (middle @ middle - radius**2)
    return torch.from_numpy(np.where(inside > 0, (along - np.sqrt(np.maximum(inside, 0))) / square, np.inf)).float()


def around() -> list[Camera]:
    eyes = [np.array(v, float) for v in np.ndindex(3, 3, 3) if v != (1, 1, 1)]
    return [camera(2.4 * (eye - 1) / np.linalg.norm(eye - 1)) for eye in eyes]


def fused(cameras: list[Camera], *, watertight: bool) -> Mesh:
    region = Region.around(np.full(3, -1.0), np.full(3, 1.0), VOXEL)
    points = np.concatenate([points_of(ball_depth(view), view).numpy() for view in cameras])
    volume = Volume(region, region.occupied(points), CPU, carved=watertight)
    for view in cameras:
        volume.integrate(ball_depth(view), view)
    return volume.mesh(watertight=watertight)


def volume_of(mesh: Mesh) -> float:
    a, b, c = (mesh.vertices[mesh.faces[:, k]] for k in range(3))
    return float((a * np.cross(b, c)).sum() / 6)


def area_of(mesh: Mesh) -> float:
    a, b, c = (mesh.vertices[mesh.faces[:, k]] for k in range(3))
    return float(np.linalg.norm(np.cross(b - a, c - a), axis=1).sum() / 2)


def test_a_ball_seen_from_all_sides_is_one_closed_surface_of_its_area_and_volume() -> None:
    cameras = around()
    for watertight in (False, True):
        mesh = fused(cameras, watertight=watertight)
        assert len(mesh.faces) > 2000
        assert mesh.open_edges() == 0
        mesh, kept, _ = largest_components(mesh, 1, 0.0)
        assert kept == 1
        # One piece with Euler characteristic 2, over several blocks: no seams, no doubled vertices.
        edges = 3 * len(mesh.faces) // 2
        assert len(mesh.vertices) - edges + len(mesh.faces) == 2
        assert len(np.unique(mesh.vertices, axis=0)) == len(mesh.vertices)
        assert volume_of(mesh) == pytest.approx(4 / 3 * math.pi * RADIUS**3, rel=0.04)
        assert area_of(mesh) == pytest.approx(4 * math.pi * RADIUS**2, rel=0.06)
        assert np.percentile(np.abs(np.linalg.norm(mesh.vertices, axis=1) - RADIUS), 90) < VOXEL / 2
        outward = (mesh.normals() * mesh.vertices).sum(axis=1) / np.linalg.norm(mesh.vertices, axis=1)
        assert np.median(outward) > 0.99


def test_a_ball_seen_from_one_side_is_open_or_closed_behind() -> None:
    cameras = [camera(np.array([x, y, -2.4])) for x in (-0.2, 0, 0.2) for y in (-0.2, 0, 0.2)]
    half = fused(cameras, watertight=False)
    assert half.open_edges() > 50
    whole = fused(cameras, watertight=True)
    assert len(whole.faces) > len(half.faces)
    assert whole.open_edges() == 0
    # What no view sees is solid: the ball and its shadow, up to the end of the region.
    assert volume_of(whole) > 0.75 * 4 / 3 * math.pi * RADIUS**3
    assert whole.vertices[:, 2].max() > 1.0


@pytest.mark.parametrize("watertight", [False, True])
def test_noise_has_closed_surfaces_as_well(watertight: bool) -> None:
    region = Region(np.zeros(3), 1.0, (2, 3, 2))
    volume = Volume(region, np.argwhere(np.ones(region.blocks, bool)), CPU, carved=True)
    seed = torch.Generator().manual_seed(0)
    volume._sums[:] = torch.randn(volume._sums.shape, generator=seed)
    volume._weights[:] = 1.0
    volume._views = 1
    mesh = volume.mesh(watertight=watertight)
    assert len(mesh.faces) > 50_000
    if watertight:
        assert mesh.open_edges() == 0
    else:
        # Open along the sides of the region alone: every edge that is not shared lies in one of them.
        ends = np.concatenate([mesh.faces[:, [k, (k + 1) % 3]] for k in range(3)])
        shared, counts = np.unique(np.sort(ends, axis=1), axis=0, return_counts=True)
        assert counts.max() == 2
        border = mesh.vertices[shared[counts == 1]]
        sides = (border == 0) | (border == np.array(region.blocks) * SIDE - 1)
        assert (sides.all(axis=1)).any(axis=1).all()


def test_pixels_without_surface_say_that_all_in_front_is_empty() -> None:
    region = Region.around(np.full(3, -1.0), np.full(3, 1.0), VOXEL)
    cameras = around()
    points = points_of(ball_depth(cameras[0]), cameras[0]).numpy()
    volume = Volume(region, region.occupied(points), CPU, carved=True)
    for view in cameras:
        volume.integrate(torch.full((view.height, view.width), torch.inf), view)
    assert not len(volume.mesh(watertight=True).faces)


def test_blocks_hold_all_voxels_within_the_truncation() -> None:
    region = Region.around(np.zeros(3), np.ones(3), 0.01)
    points = np.random.default_rng(0).uniform(0, 1, (50, 3)).astype(np.float32)
    blocks = {tuple(block) for block in region.occupied(points).tolist()}
    assert len(blocks) < np.prod(region.blocks)
    for shift in np.ndindex(3, 3, 3):
        moved = points + (np.array(shift) - 1) * TRUNCATION * region.voxel * 0.999
        for at in np.floor((moved - region.low) / (SIDE * region.voxel)).astype(int).tolist():
            assert tuple(at) in blocks


def test_components_are_ranked_by_size() -> None:
    region = Region(np.zeros(3), 1.0, (3, 1, 1))
    volume = Volume(region, np.argwhere(np.ones(region.blocks, bool)), CPU, carved=True)
    place = np.stack(np.meshgrid(*[np.arange(SIDE)] * 3, indexing="ij"), -1).reshape(-1, 3)
    lattice = torch.from_numpy(np.concatenate([place + np.array([block * SIDE, 0, 0]) for block in range(3)])).float()
    balls = [(torch.tensor([x, 8.0, 8.0]), radius) for x, radius in ((8.0, 3.0), (24.0, 6.0), (40.0, 1.5))]
    volume._sums[:] = torch.stack([(lattice - at).norm(dim=1) - r for at, r in balls]).amin(0).view(3, -1)
    volume._weights[:] = 1.0
    volume._views = 1
    mesh = volume.mesh(watertight=True)
    sizes = np.bincount(mesh.components())
    assert len(sizes) == 3
    assert (np.diff(sizes) < 0).all()
    largest, kept, found = largest_components(mesh, 1, 0.0)
    assert (kept, found) == (1, 3)
    assert np.abs(largest.vertices - [24, 8, 8]).max() < 6.2
    most, kept, _ = largest_components(mesh, None, 0.15)
    assert kept == int((sizes >= 0.15 * sizes[0]).sum()) == 2
    assert len(most.faces) == sizes[:2].sum()


def wall(z: float, opacity: float, side: float) -> Gaussians:
    """Flat Gaussians on a square across the z axis."""
    steps = torch.arange(-side, side + 1e-6, 0.08)
    x, y = (part.reshape(-1) for part in torch.meshgrid(steps, steps, indexing="ij"))
    count = len(x)
    return Gaussians(
        means=torch.stack([x, y, torch.full_like(x, z)], dim=1),
        quats=torch.tensor([1.0, 0, 0, 0]).repeat(count, 1),
        log_scales=torch.tensor([0.06, 0.06, 0.002]).log().repeat(count, 1),
        logit_opacities=torch.full((count,), math.log(opacity / (1 - opacity))),
        sh0=torch.full((count, 3), 0.3 / SH_C0),
        shN=torch.zeros(count, 0, 3),
    )


@NEEDS_COMPILER
@pytest.mark.parametrize(("opacity", "depth"), [(0.9, 2.0), (0.04, 4.0)])
def test_the_surface_is_where_the_transmittance_falls_through_one_half(opacity: float, depth: float) -> None:
    parts = [wall(0.0, opacity, 0.8), wall(2.0, 0.95, 2.0)]
    both = Gaussians(*(torch.cat(pair) for pair in zip(*(dict(part.items()).values() for part in parts), strict=True)))
    view = camera(np.array([0.0, 0.0, -2.0]), 96)
    found = surface_depth(both, view)
    middle = found[30:66, 30:66]
    assert float((middle - depth).abs().quantile(0.9)) < 0.02 * depth
    # Nowhere, not even at the border of the nearer wall, between the two; a mean is.
    known = found[torch.isfinite(found)]
    assert len(known) > 0.7 * found.numel()
    assert float(((known > 2.15) & (known < 3.8)).float().mean()) < 0.01


@NEEDS_COMPILER
def test_there_is_no_surface_where_little_is_blended() -> None:
    found = surface_depth(wall(0.0, 0.02, 0.5), camera(np.array([0.0, 0.0, -2.0]), 64))
    assert torch.isinf(found).all()
