"""The predicted tile intersections of a view are never below the true ones, and not far above."""

from __future__ import annotations

import math

import pytest
import torch

from splatcli.gaussians import Gaussians
from splatcli.native import abi
from splatcli.rasterizer import memory_estimate
from splatcli.rasterizer.context import RasterContext, view_of
from splatcli.rasterizer.memory_estimate import IsectCount, predict_boxes, predict_isects, tiles_of_each
from splatcli.scene.camera import MODELS, Camera, CameraModel
from tests.native.cases import NEEDS_COMPILER, float32
from tests.rasterizer.fixed_budget import FixedBudget
from tests.rasterizer.scenes import front_camera, of_model, random_camera, random_gaussians

#: Where there are so few, one tile more is a large part.
MANY = 500


def found(gaussians: Gaussians, camera: Camera) -> tuple[IsectCount, dict[int, int]]:
    """What the kernels list, and the tiles that they keep room for, of each visible Gaussian."""
    context = RasterContext(float32(), FixedBudget(1 << 40))
    view = view_of(camera, sh_degree=0, antialiased=False, with_depth=False)
    arrays = context.project(view, gaussians)
    slots = -(-len(gaussians) // abi.CHUNK) * abi.CHUNK
    visible = context.arena.take("chunk_counts", 2 * slots // abi.CHUNK, torch.int64)[: 2 * slots // abi.CHUNK : 2]
    ids, tiles = (
        context.arena.take(name, slots, torch.int32)[:slots].view(-1, abi.CHUNK) for name in ("ids", "tiles_per_gauss")
    )
    each = {
        int(i): int(n)
        for chunk, count in enumerate(visible.tolist())
        for i, n in zip(ids[chunk, :count], tiles[chunk, :count], strict=True)
    }
    boxes = context.max_isects()
    context.bin(view, arrays, with_grads=False)
    return IsectCount(int(context.native.isects), boxes if each else 0, len(each)), each


@NEEDS_COMPILER
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("size", [1e-4, 0.003, 0.03, 0.3, 3.0, 1e4])
def test_the_prediction_is_never_below_and_not_far_above(size: float, model: CameraModel) -> None:
    for seed in range(25):
        width, height = 16 + 61 * (seed % 7), 9 + 47 * (seed % 5)
        gaussians = random_gaussians(seed, 400, sh_degree=0, scale=size, spread=(0.3, 1.0, 3.0)[seed % 3])
        camera = of_model(random_camera(seed, width, height), model)
        predicted, (actual, _) = predict_isects(gaussians, camera), found(gaussians, camera)
        for name in ("isects", "boxes", "visible"):
            reported, there = getattr(predicted, name), getattr(actual, name)
            assert reported >= there, (name, seed)
            assert reported <= 1.6 * there or there < MANY, (name, seed)


@NEEDS_COMPILER
def test_each_gaussian_has_at_least_its_tiles() -> None:
    gaussians, camera = random_gaussians(5, 600, sh_degree=0, scale=0.1), random_camera(5, 200, 150)
    tiles = tiles_of_each(gaussians, camera)
    _, each = found(gaussians, camera)
    assert len(each) > 100
    assert all(int(tiles[i]) >= count for i, count in each.items())
    assert int(tiles.sum()) == predict_boxes(gaussians, camera) == predict_isects(gaussians, camera).boxes


def test_too_many_lines_are_not_inspected_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gaussians, camera = random_gaussians(5, 600, sh_degree=0, scale=0.3), random_camera(5, 200, 150)
    looked = predict_isects(gaussians, camera)
    assert looked.isects < looked.boxes
    monkeypatch.setattr(memory_estimate, "_MAX_TILE_ROWS", 100)
    assert predict_isects(gaussians, camera) == IsectCount(looked.boxes, looked.boxes, looked.visible)


def test_what_is_behind_or_broken_has_no_pairs() -> None:
    gaussians, camera = random_gaussians(1, 50, sh_degree=0), front_camera(64, 48, 60.0)
    gaussians.means[:, 2] = -5.0
    assert predict_isects(gaussians, camera) == IsectCount(0, 0, 0)
    gaussians.means[:, 2] = 5.0
    gaussians.log_scales[:] = math.nan
    assert predict_isects(gaussians, camera) == IsectCount(0, 0, 0)


def test_scales_activated_twice_cover_every_tile() -> None:
    gaussians, camera = random_gaussians(2, 5000, sh_degree=0, scale=0.01), front_camera(1600, 1063, 1400.0)
    gaussians.means *= 0.2
    gaussians.means[:, 2] += 2.0
    gaussians.logit_opacities[:] = 1.0
    right = predict_isects(gaussians, camera)
    gaussians.log_scales.exp_()
    tiles = 100 * 67
    assert predict_isects(gaussians, camera) == IsectCount(5000 * tiles, 5000 * tiles, 5000)
    assert predict_boxes(gaussians, camera) == 5000 * tiles
    assert right.isects < 30 * 5000


def test_counts_of_a_part_stand_for_the_whole() -> None:
    assert IsectCount(10, 20, 5).times(2.05) == IsectCount(21, 41, 11)
