"""The first Gaussians: from points, at random, or from a model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.testing import assert_close

from splatcli.config import Config
from splatcli.errors import SceneError, UsageError
from splatcli.scene.points import PointCloud, morton_order
from splatcli.scene.scene import Scene
from splatcli.train.init import (
    BLENDER_DISTANCE,
    START_SHARE,
    distinct_rows,
    initial_gaussians,
    mean_squared_distance,
    thinned,
)
from splatcli.train.resolve import auto_cap
from tests.train.worlds import made_scene, random_gaussians


def config(**sections: dict[str, object]) -> Config:
    return Config.model_validate(sections)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def scene_with(xyz: NDArray[np.float32], rgb: NDArray[np.uint8] | None = None) -> Scene:
    scene = made_scene()
    rgb = np.zeros((len(xyz), 3), np.uint8) if rgb is None else rgb
    object.__setattr__(scene, "points", PointCloud(xyz.astype(np.float32), rgb))
    return scene


def cloud(n: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0.0, 0.4, (n, 3)).astype(np.float32)


def ordered(xyz: NDArray[np.float32]) -> NDArray[np.float32]:
    """In the order in which a run takes them."""
    return xyz[morton_order(xyz)]


@pytest.mark.parametrize("init", ["sfm", "random"])
def test_neighbours_in_space_begin_as_neighbours_in_memory(init: str) -> None:
    random = np.random.default_rng(4)
    xyz = random.permutation(np.stack(np.meshgrid(*[np.arange(8.0)] * 3), axis=-1).reshape(-1, 3)).astype(np.float32)
    scene = scene_with(xyz, random.integers(0, 256, xyz.shape, dtype=np.uint8))
    gaussians, _ = initial_gaussians(config(model={"init": init, "random_points": 512}), scene, generator())
    steps = gaussians.means.diff(dim=0).norm(dim=1)
    shuffled = gaussians.means[torch.randperm(len(gaussians), generator=generator())].diff(dim=0).norm(dim=1)
    assert float(steps.mean()) < 0.4 * float(shuffled.mean())
    assert scene.points is not None
    if init == "sfm":
        places = {tuple(place): tuple(colour) for place, colour in zip(xyz, scene.points.rgb, strict=True)}
        colours = ((0.5 + 0.28209479 * gaussians.sh0) * 255.0).round().int()
        assert all(
            places[tuple(mean)] == tuple(colour)
            for mean, colour in zip(gaussians.means.numpy(), colours.tolist(), strict=True)
        )


@pytest.mark.parametrize("n", [2, 3, 4, 5, 200])
def test_neighbour_distances_equal_brute_force(n: int) -> None:
    points = cloud(n)
    squared = ((points[:, None].astype(np.float64) - points[None]) ** 2).sum(axis=2)
    np.fill_diagonal(squared, np.inf)
    nearest = np.sort(squared, axis=1)[:, : min(3, n - 1)]
    np.testing.assert_allclose(mean_squared_distance(points), nearest.mean(axis=1), rtol=1e-12)


def test_neighbour_distances_have_a_floor() -> None:
    assert mean_squared_distance(np.zeros((1, 3), np.float32)).tolist() == [1e-7]
    assert mean_squared_distance(np.ones((5, 3), np.float32)).tolist() == [1e-7] * 5
    near = np.concatenate([cloud(5) * np.float32(1e-6), 5.0 * cloud(20)])
    assert mean_squared_distance(near)[:5].tolist() == [1e-7] * 5


@pytest.mark.parametrize("scale", [2.0**-10, 2.0**-30])
def test_distances_of_points_in_small_units_are_theirs(scale: float) -> None:
    points = np.concatenate([cloud(200), cloud(5) * np.float32(1e-5)])
    large = mean_squared_distance(points)
    np.testing.assert_allclose(mean_squared_distance(points * np.float32(scale)), large * scale**2, rtol=1e-6)


def test_points_become_round_gaussians_of_their_neighbours_size_and_colour() -> None:
    xyz = ordered(cloud(30))
    rgb = np.random.default_rng(1).integers(0, 256, (30, 3), dtype=np.uint8)
    gaussians, notes = initial_gaussians(
        config(model={"sh_degree": 2, "init_scale": 0.5, "init_opacity": 0.2}), scene_with(xyz, rgb), generator()
    )
    assert notes == []
    assert_close(gaussians.means, torch.from_numpy(xyz), rtol=0, atol=0)
    assert_close(gaussians.quats, torch.tensor([[1.0, 0.0, 0.0, 0.0]] * 30))
    expected = torch.from_numpy(0.5 * np.sqrt(mean_squared_distance(xyz))).float()
    assert_close(gaussians.log_scales.exp(), expected[:, None].repeat(1, 3))
    assert_close(gaussians.logit_opacities.sigmoid(), torch.full((30,), 0.2))
    assert_close(0.5 + 0.28209479 * gaussians.sh0, torch.from_numpy(rgb / np.float32(255.0)))
    assert gaussians.shN.shape == (30, 8, 3)
    assert not gaussians.shN.any()
    assert all(tensor.dtype == torch.float32 for _, tensor in gaussians.items())


def test_repeated_points_count_once() -> None:
    xyz = ordered(cloud(20))
    gaussians, notes = initial_gaussians(config(), scene_with(np.concatenate([xyz, xyz[3:8]])), generator())
    assert_close(gaussians.means, torch.from_numpy(xyz), rtol=0, atol=0)
    assert notes == ["20 of 25 points are used: 5 repeat others"]
    assert bool(gaussians.log_scales.isfinite().all())


def test_points_at_a_camera_are_dropped() -> None:
    xyz = cloud(20)
    scene = scene_with(xyz)
    xyz[4] = scene.cameras[1].center
    gaussians, notes = initial_gaussians(config(), scene_with(xyz), generator())
    assert len(gaussians) == 19
    assert notes == ["19 of 20 points are used: 1 at a camera's centre"]


def test_points_that_are_not_finite_are_refused() -> None:
    xyz = cloud(20)
    xyz[7, 1] = np.nan
    with pytest.raises(SceneError, match=r"1 of 20 points .* point 7"):
        initial_gaussians(config(), scene_with(xyz), generator())


@pytest.mark.parametrize("n", [0, 1, 3])
def test_too_few_points_make_a_random_start_and_a_note(n: int) -> None:
    gaussians, notes = initial_gaussians(config(model={"random_points": 50}), scene_with(cloud(n)), generator())
    assert len(gaussians) == 50
    assert notes[-1] == "started from 50 random points"
    assert len(notes) == 2


def test_random_points_fill_a_box_around_the_cameras() -> None:
    scene = made_scene()
    settings = config(model={"init": "random", "random_points": 5_000})
    means = initial_gaussians(settings, scene, generator())[0].means.double().numpy()
    center = np.mean([scene.cameras[i].center for i in scene.train], axis=0)
    inside = np.abs(means - center) / (3.0 * scene.extent)
    assert inside.max() <= 1.0 + 1e-6
    assert inside.max(axis=0).min() > 0.99


def test_random_points_of_a_blender_scene_fill_its_usual_cube() -> None:
    settings = config(model={"init": "random"})
    means = initial_gaussians(settings, made_scene(kind="blender"), generator())[0].means
    assert len(means) == 100_000
    assert 1.29 < float(means.abs().max()) <= 1.3


@pytest.mark.parametrize("scale", [1e-3, 10.0])
@pytest.mark.parametrize("away", [0.0, 20.0])
def test_random_points_of_a_blender_scene_of_another_size_fill_that_cube_in_proportion(
    scale: float, away: float
) -> None:
    """Where the cameras look, though that is not the origin."""
    scene = made_scene(kind="blender")
    turned = []
    for camera in scene.cameras:
        viewmat = camera.viewmat.copy()
        viewmat[:3, 3] *= scale * BLENDER_DISTANCE / np.linalg.norm(camera.center)
        viewmat[:3, 3] -= viewmat[:3, :3] @ np.full(3, away * scale)
        turned.append(replace(camera, viewmat=viewmat))
    means = initial_gaussians(config(model={"init": "random"}), replace(scene, cameras=turned), generator())[0].means
    off = (means.double() / scale - away).abs().amax(dim=0)
    assert float(off.min()) > 1.28
    assert float(off.max()) < 1.32


@pytest.mark.parametrize(
    ("asked", "cap", "count"),
    [
        (None, None, 100_000),
        (None, 2_000_000, 100_000),
        (None, 30_000, 3_000),
        (None, 5_000, 1_000),
        (None, 600, 600),
        (200, 30_000, 200),
        (9_000, 5_000, 5_000),
    ],
)
def test_random_points_leave_room_under_the_cap(asked: int | None, cap: int | None, count: int) -> None:
    settings = config(model={"init": "random", "random_points": asked}, strategy={"cap_max": cap})
    assert len(initial_gaussians(settings, made_scene(), generator())[0]) == count


def test_random_points_leave_room_under_a_cap_that_is_yet_to_be_chosen() -> None:
    scene = made_scene()
    settings = config(model={"init": "random"}, strategy={"cap_max": "auto"})
    assert len(initial_gaussians(settings, scene, generator())[0]) == max(1_000, auto_cap(scene, 0) // 10)


def test_points_are_thinned_where_they_are_dense() -> None:
    random = np.random.default_rng(3)
    dense, sparse = random.random((20_000, 3)) * [1, 1, 0], 3 + random.random((1_000, 3)) * [30, 30, 0]
    points = random.permutation(np.concatenate([dense, sparse])).astype(np.float32)
    for count in (12_000, 6_000, 1_500):
        rows = thinned(points, count)
        assert len(np.unique(rows)) == count
        assert (np.diff(rows) > 0).all()
        kept = points[rows]
        far = kept[:, 0] > 2
        assert far.sum() >= 990, "points far from others stay"
        quarters = np.histogram2d(kept[~far, 0], kept[~far, 1], bins=2, range=[[0, 1], [0, 1]])[0]
        assert quarters.min() > 0.8 * quarters.max(), "what is kept of the dense ones is even"
    for count in (len(points), len(points) - 1, 4):
        assert len(np.unique(thinned(points, count))) == count


def test_points_are_thinned_under_an_automatic_cap() -> None:
    scene = made_scene(points=40)
    pixels = scene.cameras[0].width * scene.cameras[0].height
    settings = config(strategy={"cap_max": "auto"})
    cap = auto_cap(scene, 0)
    assert cap <= max(10, pixels)
    count = int(START_SHARE * cap) + 30
    gaussians, notes = initial_gaussians(settings, made_scene(points=count), generator())
    assert len(gaussians) == int(START_SHARE * cap)
    assert f"under the cap of {cap:,} Gaussians" in notes[0]


def test_random_points_come_from_the_generator_alone() -> None:
    settings = config(model={"init": "random", "random_points": 10})

    def means(seed: int) -> torch.Tensor:
        return initial_gaussians(settings, made_scene(), generator(seed))[0].means

    assert torch.equal(means(1), means(1))
    assert not torch.equal(means(1), means(2))


def test_the_cap_holds_from_the_start() -> None:
    capped = config(strategy={"cap_max": 12})
    gaussians, notes = initial_gaussians(capped, made_scene(points=40), generator())
    assert len(gaussians) == 7, "three fifths of the cap: the rest is for densification"
    assert notes == ["7 of 40 points are used: 33 thinned out, for densification under the cap of 12 Gaussians"]
    assert len(torch.unique(gaussians.means, dim=0)) == 7
    few, notes = initial_gaussians(config(strategy={"cap_max": 67}), made_scene(points=40), generator())
    assert (len(few), notes) == (40, []), "two fifths of the cap are free"
    random = config(strategy={"cap_max": 12}, model={"init": "random"})
    assert len(initial_gaussians(random, made_scene(), generator())[0]) == 12


@pytest.mark.parametrize(("has", "wanted"), [(2, 2), (1, 3), (3, 1), (3, 0)])
def test_a_given_model_keeps_its_values_and_takes_the_sh_degree(has: int, wanted: int) -> None:
    given = random_gaussians(7, degree=has)
    settings = config(model={"init": "model.ply", "sh_degree": wanted})
    gaussians, notes = initial_gaussians(settings, made_scene(), generator(), given)
    assert gaussians.sh_degree == wanted
    shared = min(gaussians.shN.shape[1], given.shN.shape[1])
    assert torch.equal(gaussians.shN[:, :shared], given.shN[:, :shared])
    assert not gaussians.shN[:, shared:].any()
    assert torch.equal(gaussians.quats, given.quats)
    assert gaussians.means.data_ptr() != given.means.data_ptr()
    assert len(notes) == (1 if has == wanted else 2)


def test_a_given_model_above_the_cap_or_empty_is_refused() -> None:
    settings = config(model={"init": "model.ply"}, strategy={"cap_max": 6})
    with pytest.raises(UsageError, match="7 Gaussians, more than the cap of 6"):
        initial_gaussians(settings, made_scene(), generator(), random_gaussians(7))
    with pytest.raises(UsageError, match="no Gaussians"):
        initial_gaussians(settings, made_scene(), generator(), random_gaussians(0))


@pytest.mark.parametrize("count", [1, 2, 5, 300, 5000])
@pytest.mark.parametrize("values", [1, 4, 60])
def test_distinct_rows_are_the_first_of_each_point(count: int, values: int) -> None:
    random = np.random.default_rng(count + values)
    points = random.integers(-values, values + 1, (count, 3)).astype(np.float32)
    points[random.random((count, 3)) < 0.2] *= -1.0  # zeros of both signs are one
    points[::7] += random.random((len(points[::7]), 3)).astype(np.float32)
    seen: set[tuple[float, ...]] = set()
    first = [row for row, point in enumerate(map(tuple, points)) if not (point in seen or seen.add(point))]
    assert distinct_rows(points).tolist() == first
