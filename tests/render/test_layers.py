"""Layers of a view: depths and normals against a plane that is known, and the colours that stand for them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from splatcli.gaussians import Gaussians
from splatcli.render import colour_maps
from splatcli.render.colour_maps import depth_image, turbo
from splatcli.render.images import (
    LAYERS,
    ModelRenderer,
    RenderSettings,
    layer_images,
    median_distance,
    shortest_axes,
    side_by_side,
)
from splatcli.scene.camera import Camera
from splatcli.scene.points import morton_order
from tests.rasterizer.scenes import random_camera, random_gaussians

TILT = math.radians(30)
#: At the origin of the world, looking along +z.
CAMERA = Camera("a", 48, 32, 60.0, 60.0, 24.0, 16.0, np.eye(4))


def plane() -> Gaussians:
    """An opaque wall of flat Gaussians, 5 in front of the camera, turned by TILT about x: its upper edge leans back."""
    steps = torch.linspace(-5, 5, 101)
    x, y = (grid.reshape(-1) for grid in torch.meshgrid(steps, steps, indexing="ij"))
    n = len(x)
    # y is down: what is higher (smaller y) is farther (larger z).
    means = torch.stack([x, y * math.cos(TILT), 5.0 - y * math.sin(TILT)], dim=1)
    # About x by -TILT, and not normalised; thin along the local z.
    quats = 3 * torch.tensor([math.cos(TILT / 2), -math.sin(TILT / 2), 0.0, 0.0]).repeat(n, 1)
    log_scales = torch.tensor([0.1, 0.1, 0.001]).log().repeat(n, 1)
    return Gaussians(means, quats, log_scales, torch.full((n,), 6.0), torch.full((n, 3), 0.4), torch.zeros(n, 3, 3))


def test_shortest_axes_are_the_normals_of_the_wall() -> None:
    axes = shortest_axes(plane())
    expected = torch.tensor([0.0, math.sin(TILT), math.cos(TILT)])
    assert_allclose((axes @ expected).abs().numpy(), 1.0, atol=1e-6)


@pytest.mark.parametrize("turned", [False, True])
def test_normals_are_in_camera_axes_and_face_the_viewer(turned: bool) -> None:
    """y is up and z towards the viewer; rolling the camera by 180 degrees turns x and y around."""
    roll = np.diag([-1.0, -1.0, 1.0, 1.0]) if turned else np.eye(4)
    camera = Camera("a", 48, 32, 60.0, 60.0, 24.0, 16.0, roll)
    maps = ModelRenderer(plane(), RenderSettings(), with_normals=True).render_maps(camera)
    up = math.sin(TILT) if not turned else -math.sin(TILT)
    assert maps.normals is not None
    assert (maps.alpha > 0.98).all()  # blending ends before what would leave less than 1e-4
    assert_allclose(maps.normals, np.broadcast_to([0.0, up, math.cos(TILT)], (32, 48, 3)), atol=0.01)
    assert_allclose(
        layer_images(maps, ["normals"], (1, 2))["normals"][16, 24] / 255, [0.5, 0.5 + up / 2, 0.933], atol=0.01
    )


def test_depth_is_the_mean_camera_z() -> None:
    maps = ModelRenderer(plane(), RenderSettings()).render_maps(CAMERA)
    # What is nearer hides what is behind it, and a Gaussian counts with the depth of its middle: 0.1 is little of 5.
    rows = (np.arange(32) + 0.5 - 16) / 60
    # A ray (0, r, 1) t meets the plane where y sin + z cos = 5 cos.
    expected = 5 * math.cos(TILT) / (rows * math.sin(TILT) + math.cos(TILT))
    assert_allclose(maps.depth, np.repeat(expected[:, None], 48, axis=1), rtol=0.02)
    near, far = ModelRenderer(plane(), RenderSettings()).depth_range([CAMERA] * 3)
    # The range is taken from small pictures, in which the blur of a pixel reaches farther.
    assert 0.95 * expected.min() <= near < far <= expected.max()


def test_where_nothing_is() -> None:
    behind = Camera("a", 48, 32, 60.0, 60.0, 24.0, 16.0, np.diag([1.0, -1.0, -1.0, 1.0]))
    viewer = ModelRenderer(plane(), RenderSettings(background=(1.0, 0.0, 0.0)), with_normals=True)
    maps = viewer.render_maps(behind)
    assert not maps.alpha.any()
    assert np.isinf(maps.depth).all()
    assert maps.normals is not None
    assert not maps.normals.any()
    assert viewer.depth_range([behind]) == (1.0, 1.0)
    made = layer_images(maps, ["depth", "rgb", "normals", "alpha"], (1.0, 1.0))
    assert list(made) == ["depth", "rgb", "normals", "alpha"]
    assert not made["depth"].any()
    assert not made["normals"].any()
    assert (made["rgb"] == [255, 0, 0]).all()


def test_colours_of_depth() -> None:
    colours = depth_image(np.array([0.5, 1.0, 4 / 3, 2.0, 9.0, np.inf], np.float32), (1.0, 2.0)).astype(int)
    assert (colours[0] == colours[1]).all()
    assert (colours[3] == colours[4]).all()
    assert (colours[4] == colours[5]).all()
    red, violet = colours[1], colours[3]
    assert red[0] > 2 * max(red[1:])
    assert violet.sum() < 200
    # 4/3 is halfway between 1/1 and 1/2; turbo is green there.
    assert (colours[2] == turbo(np.array(0.5))).all()
    assert colours[2][1] > 240


def test_turbo_is_near_its_published_table() -> None:
    """Rows 64, 128 and 192 of 256 of the table that the polynomials approximate."""
    table = np.array([[0.15844, 0.73551, 0.92305], [0.64362, 0.98999, 0.23356], [0.97959, 0.49250, 0.12849]])
    shown = turbo(np.array([64, 128, 192]) / 255) / 255
    assert_allclose(shown, table, atol=0.08)


def test_the_median_distance_is_of_what_is_before_the_camera() -> None:
    wall = plane()
    assert median_distance(wall, CAMERA) == pytest.approx(5.0, abs=0.1)
    assert median_distance(wall, Camera("a", 1, 1, 1, 1, 0.5, 0.5, np.diag([1.0, -1, -1, 1]))) < 5.0


def test_images_are_joined_side_by_side() -> None:
    left, right = np.zeros((4, 3, 3), np.uint8), np.ones((4, 5, 3), np.uint8)
    joined = side_by_side([left, right])
    assert joined.shape == (4, 8, 3)
    assert not joined[:, :3].any()
    assert joined[:, 3:].all()


def test_later_views_of_a_renderer_have_the_bits_of_the_first() -> None:
    """From the second view on, chunks outside the view are skipped."""
    gaussians = random_gaussians(0, 3000, dtype=torch.float32)
    order = torch.from_numpy(morton_order(gaussians.means.numpy()))
    gaussians = gaussians.map(lambda tensor: tensor[order])
    renderer = ModelRenderer(gaussians, RenderSettings(), with_normals=True)
    for seed in range(4):
        camera = random_camera(seed, 60, 40)
        camera = replace(camera, fx=6 * camera.fx, fy=6 * camera.fy)
        maps = renderer.render_maps(camera)
        first = ModelRenderer(gaussians, RenderSettings(), with_normals=True).render_maps(camera)
        assert torch.equal(maps.rgb, first.rgb)
        assert np.array_equal(maps.depth, first.depth)
        assert np.array_equal(maps.normals, first.normals)


@pytest.mark.parametrize("height", [1, 5, 7])
def test_maps_by_rows_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch, height: int) -> None:
    """Intermediate results of a large image are of a strip alone."""
    camera = replace(CAMERA.resized(9, height), near=0.1)
    maps = ModelRenderer(plane(), RenderSettings(), with_normals=True).render_maps(camera)
    whole = layer_images(maps, LAYERS, (1.0, 5.0))
    largest = []
    monkeypatch.setattr(colour_maps, "_STRIP", 2 * 9)
    monkeypatch.setattr(colour_maps, "turbo", lambda x: largest.append(x.shape[0]) or turbo(x))
    strips = ModelRenderer(plane(), RenderSettings(), with_normals=True).render_maps(camera)
    for name in ("alpha", "depth", "normals"):
        assert np.array_equal(getattr(strips, name), getattr(maps, name), equal_nan=True), name
    for kind, image in layer_images(strips, LAYERS, (1.0, 5.0)).items():
        assert np.array_equal(image, whole[kind]), kind
    assert len(largest) == -(-height // 2)
    assert max(largest) <= 2
