"""Neighbours outside the view are rejected by bounds, of sixteen or of a chunk; what is seen stays the same."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from splatcli.gaussians import Gaussians
from splatcli.native import abi
from splatcli.rasterizer.context import RasterContext, view_of
from splatcli.rasterizer.rendering import chunk_bounds, render
from splatcli.scene.camera import MODELS, Camera, CameraModel
from tests.native.cases import ISAS, NEEDS_COMPILER, float32, float64

pytestmark = NEEDS_COMPILER
LANES = 16
COUNT = 1024
#: Focal length, principal point as a part of the size, factor of the pose, distance of the world's origin.
CAMERAS = {
    "narrow": (900.0, 0.5, 1.0, 0.0),
    "wide": (60.0, 0.5, 1.0, 0.0),
    "off-centre": (300.0, -1.5, 1.0, 0.0),
    "scaled pose": (300.0, 0.5, 7.0, 0.0),
    "far from the origin": (300.0, 0.5, 1.0, 1e5),
    "ortho": (40.0, 0.3, 1.0, 2.0),
    "fisheye": (60.0, 0.5, 1.0, 0.0),
}


def camera_of(name: str) -> Camera:
    focal, centre, factor, distance = CAMERAS[name]
    c, s = math.cos(0.7), math.sin(0.7)
    viewmat = np.eye(4)
    viewmat[:3, :3] = factor * np.array([[c, 0, -s], [0, 1, 0], [s, 0, c]])
    viewmat[:3, 3] = -viewmat[:3, :3] @ np.full(3, distance)
    model: CameraModel = "pinhole"
    if name in MODELS:
        model = name
    return Camera("view", 200, 120, focal, focal, centre * 200, centre * 120, viewmat, model=model)


def gaussians_about(camera: Camera) -> Gaussians:
    """Return Gaussians in all directions and sizes about a camera, many of them with their border near the image's."""
    random = torch.Generator().manual_seed(5)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(COUNT, *shape, generator=random)

    depth = torch.exp(uniform(-6.0, 4.0)) * torch.where(uniform(0, 1) < 0.2, -1.0, 1.0)
    size = torch.ones(COUNT) if camera.model == "ortho" else depth
    seen = torch.stack(
        [
            (uniform(-300, 500) - camera.cx) / camera.fx * size,
            (uniform(-200, 320) - camera.cy) / camera.fy * size,
            depth,
        ],
        dim=1,
    )
    rotation, translation = (torch.from_numpy(camera.viewmat[:3, part]) for part in (slice(0, 3), 3))
    means = torch.linalg.solve(rotation, (seen.double() - translation).T).T.float()
    log_scales = size.abs().log()[:, None] + uniform(-9.0, 0.0)[:, None] + uniform(-3.0, 0.0, 3)
    odd = torch.arange(COUNT)
    means[odd % 97 == 0] *= 1e20
    means[odd % 101 == 0] = math.nan
    log_scales[odd % 103 == 0] = math.nan
    log_scales[odd % 107 == 0] = 300.0
    return Gaussians(means, uniform(-1, 1, 4), log_scales, uniform(-2, 12), uniform(-1, 1, 3), uniform(-1, 1, 0, 3))


def seen_ids(
    build: str, camera: Camera, gaussians: Gaussians, sizes: Tensor | None, *, bounded: bool = False
) -> Tensor:
    backend = float64() if build == "float64" else float32(build)
    gaussians = gaussians.map(lambda tensor: tensor.to(backend.dtype))
    view = view_of(camera, sh_degree=0, antialiased=False, with_depth=False)
    if sizes is not None:
        sizes = sizes.to(backend.dtype)
        view.filter_3d = backend.pointer(sizes, len(gaussians))
    if bounded:
        bounds = chunk_bounds(gaussians, sizes)
        view.bounds = backend.pointer(bounds, -(-len(gaussians) // abi.CHUNK), abi.BOUNDS)
    context = RasterContext(backend)
    context.project(view, gaussians)
    return context.visible_slots()[0]


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("name", CAMERAS)
@pytest.mark.parametrize("build", [*ISAS, "float64"])
def test_the_bound_rejects_only_what_the_exact_tests_reject(build: str, name: str, filtered: bool) -> None:
    camera = camera_of(name)
    each = gaussians_about(camera)
    sizes = (0.3 * each.log_scales[:, 0].exp()).nan_to_num().clamp(max=1e3) if filtered else None
    # Sixteen copies are under the bound; beside a Gaussian that is in view none is.
    alone = each.map(lambda tensor: tensor.repeat_interleave(LANES, 0))
    ahead = torch.from_numpy(np.linalg.inv(camera.viewmat) @ np.array([*ray(camera), 1.0]))[:3].float()
    first = torch.arange(COUNT * LANES) % LANES == 0
    means = torch.where(first[:, None], ahead, alone.means)
    beside = replace(alone, means=means, log_scales=torch.where(first[:, None], torch.tensor(-5.0), alone.log_scales))
    beside.logit_opacities[first] = 3.0
    blurs = None if sizes is None else sizes.repeat_interleave(LANES, 0)
    found = seen_ids(build, camera, alone, blurs)
    without = seen_ids(build, camera, beside, None if blurs is None else blurs.masked_fill(first, 0.0))
    assert (without % LANES == 0).sum() == COUNT  # the companions are in view
    assert torch.equal(found[found % LANES != 0], without[without % LANES != 0])
    assert 0.03 * COUNT < (found % LANES == 1).sum() < 0.9 * COUNT


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("name", CAMERAS)
@pytest.mark.parametrize("build", [*ISAS, "float64"])
def test_bounds_of_chunks_reject_only_what_the_exact_tests_reject(build: str, name: str, filtered: bool) -> None:
    camera = camera_of(name)
    each = gaussians_about(camera)
    # Copies and near copies fill a chunk each; those of random neighbours are rarely skipped, and the last is not full.
    random = torch.Generator().manual_seed(6)
    spread = torch.exp(3.0 * torch.rand(COUNT, 1, generator=random) - 6.0) * each.log_scales[:, :1].exp()
    near = each.map(lambda tensor: tensor.repeat_interleave(abi.CHUNK // 4, 0))
    shift = torch.randn(len(near), 3, generator=random) * spread.repeat_interleave(abi.CHUNK // 4, 0)
    near = replace(near, means=near.means + shift)
    gaussians = Gaussians(*(torch.cat([a, b[:-7]]) for (_, a), (_, b) in zip(near.items(), each.items(), strict=True)))
    sizes = (0.3 * gaussians.log_scales[:, 0].exp()).nan_to_num().clamp(max=1e3) if filtered else None
    found = seen_ids(build, camera, gaussians, sizes, bounded=True)
    assert torch.equal(found, seen_ids(build, camera, gaussians, sizes))
    assert 0.03 * len(gaussians) < len(found) < 0.9 * len(gaussians)


@pytest.mark.parametrize("name", ["wide", "ortho"])
def test_chunks_outside_the_view_are_not_read(name: str) -> None:
    camera, backend = camera_of(name), float32()
    ahead = torch.from_numpy(np.linalg.inv(camera.viewmat) @ np.array([*ray(camera), 1.0]))[:3].float()
    gaussians = gaussians_about(camera).map(lambda tensor: tensor[1:2].repeat_interleave(3 * abi.CHUNK, 0))
    gaussians = replace(
        gaussians, means=ahead.repeat(3 * abi.CHUNK, 1), log_scales=torch.full((3 * abi.CHUNK, 3), -5.0)
    )
    gaussians.logit_opacities[:] = -4.5  # faint, so that each chunk shows
    bounds = chunk_bounds(gaussians)
    assert torch.equal(bounds[1], torch.tensor([*ahead, *ahead, -5.0, 0.0]))
    # To the side of the image: not so, but the only way to see that a chunk is skipped.
    bounds[1, :6] += 100.0 * torch.from_numpy(camera.viewmat[0, :3]).float().repeat(2)
    images = [render(gaussians, camera, sh_degree=0, backend=backend, bounds=b) for b in (None, bounds)]
    view = view_of(camera, sh_degree=0, antialiased=False, with_depth=False)
    view.bounds = backend.pointer(bounds, 3, abi.BOUNDS)
    context = RasterContext(backend)
    context.project(view, gaussians)
    ids = context.visible_slots()[0]
    assert len(ids) == 2 * abi.CHUNK
    assert not ((ids >= abi.CHUNK) & (ids < 2 * abi.CHUNK)).any()
    assert images[0].alpha.max() > images[1].alpha.max() + 0.01


def ray(camera: Camera) -> tuple[float, float, float]:
    """Return a point in the middle of the view, camera coordinates."""
    return (100 - camera.cx) / camera.fx, (60 - camera.cy) / camera.fy, 1.0
