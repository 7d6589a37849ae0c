"""Blocks: columns that tile the ground, the views and points of each, and cuts that cannot be made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from splatcli.config import DataConfig, parse_blocks
from splatcli.errors import SceneError, UsageError
from splatcli.scene.camera import Camera
from splatcli.scene.partition import block_contents, check_blocks, make_grid, restrict_to_block
from splatcli.scene.points import PointCloud
from splatcli.scene.read import read_scene
from splatcli.scene.scene import Scene
from tests.scene import made

#: A street along x, 40 long and 4 wide, with z up; cameras above it look across and down.
LENGTH, CAMERAS, POINTS = 40.0, 40, 4_000


def street(tmp_path: Path) -> Scene:
    scene = read_scene(made.colmap_scene(tmp_path), DataConfig())
    rng = np.random.default_rng(0)
    xyz = rng.uniform((0, 0, 0), (LENGTH, 4, 0.5), (POINTS, 3)).astype(np.float32)
    # x right, y down, z forward: along the street, and down onto it by 45 degrees from y = -3.
    s = np.sqrt(0.5)
    rotation = np.array([[1, 0, 0], [0, -s, -s], [0, s, -s]])
    cameras = []
    for i in range(CAMERAS):
        viewmat = np.eye(4)
        viewmat[:3, :3] = rotation
        viewmat[:3, 3] = -rotation @ (LENGTH * (i + 0.5) / CAMERAS, -3.0, 5.0)
        cameras.append(Camera(f"{i:03d}.png", 64, 48, 60.0, 60.0, 32.0, 24.0, viewmat))
    held_out = list(range(0, CAMERAS, 8))
    return replace(
        scene,
        cameras=cameras,
        points=PointCloud(xyz, np.zeros((POINTS, 3), np.uint8)),
        train=[i for i in range(CAMERAS) if i not in held_out],
        test=held_out,
    )


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 3), (4, 2)])
def test_columns_tile_the_ground_and_hold_equally_many_points(tmp_path: Path, shape: tuple[int, int]) -> None:
    scene = street(tmp_path)
    grid = make_grid(scene, shape)
    assert len(grid) == shape[0] * shape[1]
    assert scene.points is not None
    xyz = scene.points.xyz
    counts = np.bincount(grid.block_of(xyz), minlength=len(grid))
    assert counts.sum() == POINTS
    np.testing.assert_allclose(counts, POINTS / len(grid), atol=2)
    anywhere = np.random.default_rng(1).normal(0, 100, (1000, 3))
    exact = [grid.near(anywhere, block, (0.0, 0.0)) for block in range(len(grid))]
    assert (np.sum(exact, axis=0) == 1).all(), "each point of the world lies in exactly one column"
    for block, inside in enumerate(exact):
        assert (grid.block_of(anywhere[inside]) == block).all()
        assert (grid.near(anywhere, block, (1.0, 1.0)) >= inside).all(), "a margin only adds"


def test_strips_cut_the_long_way_of_the_ground(tmp_path: Path) -> None:
    grid = make_grid(street(tmp_path), (4, 1))
    np.testing.assert_allclose(np.abs(grid.axes @ (1, 0, 0)), [1, 0], atol=0.01)
    np.testing.assert_allclose(grid.axes @ (0, 0, 1), [0, 0], atol=0.01, err_msg="the axes are level")
    np.testing.assert_allclose(np.sort(np.abs(grid.strips)), [10, 20, 30], atol=1.0)


def test_a_block_has_the_views_that_show_it_and_the_size_of_the_whole(tmp_path: Path) -> None:
    scene = street(tmp_path)
    blocks = [restrict_to_block(scene, (4, 1), block) for block in range(4)]
    assert sorted({i for one in blocks for i in one.train}) == scene.train, "no view is lost"
    for one in blocks:
        assert one.extent == scene.extent
        assert one.cameras is scene.cameras
        middle = np.mean([scene.cameras[i].center[0] for i in one.train])
        reach = [abs(scene.cameras[i].center[0] - middle) for i in one.train]
        assert max(reach) < 0.3 * LENGTH, "a view from the other end of the street shows nothing of it"
        assert len(one.train) < 0.6 * len(scene.train)
        assert set(one.test) <= set(scene.test)
        assert "training views" in one.notes[-1]


def test_points_around_a_block_are_thinned_and_those_in_it_are_not(tmp_path: Path) -> None:
    scene = street(tmp_path)
    assert scene.points is not None
    grid = make_grid(scene, (4, 1))
    seen = [np.flatnonzero(grid.block_of(scene.points.xyz) == i % 4) for i in range(CAMERAS)]
    one = restrict_to_block(replace(scene, seen=seen), (4, 1), 1)
    assert one.points is not None
    assert one.seen is not None
    own = scene.points.xyz[grid.block_of(scene.points.xyz) == 1]
    kept = {tuple(row) for row in one.points.xyz.tolist()}
    assert {tuple(row) for row in own.tolist()} <= kept
    assert len(own) < len(kept) <= 3 * len(own)
    for i in range(4):
        there = {tuple(row) for row in scene.points.xyz[seen[i]].tolist()} & kept
        assert {tuple(row) for row in one.points.xyz[one.seen[i]].tolist()} == there


def test_the_settings_name_the_block_that_is_read(tmp_path: Path) -> None:
    made.write_model(tmp_path / "sparse/0", made.reconstruction(points=1000))
    made.write_images(tmp_path / "images")
    whole = read_scene(tmp_path, DataConfig())
    one = read_scene(tmp_path, DataConfig(blocks="5x1", block=1))
    assert whole.points is not None
    assert one.points is not None
    assert 200 <= len(one.points.xyz) < 1000
    assert len(read_scene(tmp_path, DataConfig(blocks="2x1")).train) == len(whole.train), "no block: all of it"


@pytest.mark.parametrize("text", ["", "2", "2x", "x2", "0x2", "2x0", "-1x2", "2x2x2", "2.5x1", "99999x1", "100x11"])
def test_what_is_no_number_of_blocks_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"blocks|columns"):
        parse_blocks(text)


def test_cuts_that_cannot_be_made_say_why(tmp_path: Path) -> None:
    scene = street(tmp_path)
    with pytest.raises(UsageError, match="no block 4 of 2x2"):
        restrict_to_block(scene, (2, 2), 4)
    with pytest.raises(SceneError, match="too few"):
        make_grid(scene, (7, 7))
    with pytest.raises(SceneError, match="0 points are too few"):
        make_grid(replace(scene, points=None), (1, 2))
    with pytest.raises(SceneError, match=r"is shown by 2 training views"):
        restrict_to_block(replace(scene, train=[1, 2, 38, 39]), (2, 1), 0)


@pytest.mark.parametrize("shape", [(2, 1), (4, 1), (3, 2)])
def test_what_blocks_will_hold_is_what_they_hold(tmp_path: Path, shape: tuple[int, int]) -> None:
    scene = street(tmp_path)
    held = block_contents(scene, shape)
    assert len(held) == shape[0] * shape[1]
    for block, one in enumerate(held):
        cut = restrict_to_block(scene, shape, block)
        assert cut.points is not None
        assert one.views == len(cut.train)
        assert round(one.share * POINTS) == pytest.approx(len(cut.points.xyz), abs=2)
    check_blocks(scene, (4, 1), block_contents(scene, (4, 1)), 0.8)


def test_blocks_that_few_views_show_are_named_before_any_is_trained(tmp_path: Path) -> None:
    scene = replace(street(tmp_path), train=[0, 1, 2, 3, 4, 5])
    with pytest.raises(SceneError, match=r"of 4x1 blocks 1, 2, 3 are shown by fewer than 3"):
        check_blocks(scene, (4, 1), block_contents(scene, (4, 1)), 1.0)
