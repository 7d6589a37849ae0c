"""The predicted tiles of a view bound those that the rasterizer finds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from splatcli.checkpoint.activation_check import activation_cost, predicted_isects
from splatcli.gaussians import Gaussians
from splatcli.native.backend import Backend
from splatcli.rasterizer.context import RasterContext, view_of
from splatcli.scene.camera import Camera


def scene(count: int, size: float, seed: int) -> Gaussians:
    rng = torch.Generator().manual_seed(seed)
    return Gaussians(
        means=torch.randn(count, 3, generator=rng),
        quats=torch.randn(count, 4, generator=rng),
        log_scales=torch.randn(count, 3, generator=rng) * 0.5 + float(np.log(size)),
        logit_opacities=torch.full((count,), 3.0),
        sh0=torch.zeros(count, 3),
        shN=torch.zeros(count, 0, 3),
    )


def camera_at(distance: float, *, width: int = 320, height: int = 200, focal: float = 300.0) -> Camera:
    viewmat = np.eye(4)
    viewmat[2, 3] = distance
    return Camera("view.jpg", width, height, focal, focal, width / 2 + 3, height / 2 - 7, viewmat)


def counted(gaussians: Gaussians, camera: Camera) -> int:
    """What the rasterizer would make room for."""
    frame = RasterContext(Backend.cpu())
    frame.project(view_of(camera, sh_degree=0, antialiased=False, with_depth=False), gaussians)
    return frame.max_isects()


@pytest.mark.parametrize("size", [1e-4, 1e-2, 0.05, 0.2, 1.0, 100.0])
@pytest.mark.parametrize("distance", [0.5, 2.0, 12.0])
def test_the_prediction_is_never_below_and_not_far_above(size: float, distance: float) -> None:
    gaussians, camera = scene(3_000, size, seed=1), camera_at(distance)
    pairs, visible = predicted_isects(gaussians.means.numpy(), gaussians.log_scales.numpy(), camera)
    actual = counted(gaussians, camera)
    assert actual <= pairs <= 1.75 * actual
    assert visible <= pairs


def test_nothing_behind_the_camera_counts() -> None:
    gaussians = scene(100, 0.1, seed=2)
    assert predicted_isects(gaussians.means.numpy(), gaussians.log_scales.numpy(), camera_at(-30.0)) == (0, 0)


def test_scales_beyond_any_float_cover_every_tile() -> None:
    means = np.zeros((10, 3), np.float32)
    scales = np.full((10, 3), 3e38, np.float32)
    assert predicted_isects(means, scales, camera_at(5.0)) == (10 * 20 * 13, 10)


def test_many_gaussians_are_counted_by_a_sample() -> None:
    gaussians = scene(500_000, 0.02, seed=3)
    means, scales = gaussians.means.numpy(), gaussians.log_scales.numpy()
    pairs, visible = predicted_isects(means, scales, camera_at(6.0))
    quarters = [predicted_isects(means[i::4], scales[i::4], camera_at(6.0)) for i in range(4)]
    assert pairs == pytest.approx(sum(quarter[0] for quarter in quarters), rel=0.01)
    assert visible == pytest.approx(sum(quarter[1] for quarter in quarters), rel=0.01)


def test_of_many_cameras_the_worst_counts() -> None:
    gaussians = scene(500, 0.1, seed=4)
    cameras = [camera_at(float(distance)) for distance in (40, 30, 20, 3)]
    cameras[3] = replace(cameras[3], name="close.jpg")
    assert "of close.jpg, 320x200 pixels" in activation_cost(
        gaussians.means.numpy(), gaussians.log_scales.numpy(), cameras
    )


@pytest.mark.parametrize("means", [np.zeros((0, 3), np.float32), np.zeros((1, 3), np.float32)])
def test_nothing_and_a_single_point_have_a_sentence_too(means: np.ndarray) -> None:
    assert activation_cost(means, means + 1)
