"""What it would cost to activate scales that are activated already: the tiles that one view would list, in bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from splatcli.native import abi
from splatcli.rasterizer.context import PAIR_BYTES
from splatcli.rasterizer.view import Z_NEAR
from splatcli.scene.camera import Camera

#: A training step also keeps a row of gradients for each pair.
STEP_PAIR_BYTES = PAIR_BYTES + 4 * abi.ROW
#: More cameras or Gaussians than these are sampled evenly: a message needs the size, not the digits.
_CAMERAS = 8
_GAUSSIANS = 200_000
#: The rasterizer's low-pass filter, px^2, and the radius, in standard deviations, at which an opaque Gaussian falls to
#: the least alpha that counts, 1/255. With a radius of 3, tiny Gaussians reach 3 percent more tiles than predicted.
_BLUR = 0.3
_CUTOFF = math.sqrt(2 * math.log(255))
#: exp() of more is no float32 and covers every tile anyway.
_LARGEST_LOG = 80.0

Array = NDArray[np.float32]


def predicted_pairs(means: Array, log_scales: Array, camera: Camera) -> tuple[int, int]:
    """(pairs of a Gaussian and a tile that a view would list at most, visible Gaussians).

    means: [N, 3] world units. log_scales: [N, 3] as they would be activated. Both finite.
    Each Gaussian is taken for a ball of its largest axis, whose box of tiles is clipped to the image.
    """
    step = -(-len(means) // _GAUSSIANS) or 1
    rotation, translation = camera.viewmat[:3, :3], camera.viewmat[:3, 3]
    seen = means[::step].astype(np.float64) @ rotation.T + translation
    in_front = seen[:, 2] > Z_NEAR
    x, y, z = seen[in_front].T
    largest = log_scales[::step][in_front].astype(np.float64).max(axis=1, initial=-np.inf)
    sigma = np.exp(np.minimum(largest, _LARGEST_LOG))
    tiles, visible = np.ones(len(z)), np.ones(len(z), dtype=bool)
    for focal, centre, size, along in (
        (camera.fx, camera.cx, camera.width, x),
        (camera.fy, camera.cy, camera.height, y),
    ):
        radius = _CUTOFF * np.sqrt((focal * sigma / z) ** 2 + _BLUR)
        middle = focal * along / z + centre
        last = -(-size // abi.TILE)
        first = np.clip(np.floor((middle - radius) / abi.TILE), 0, last)
        behind = np.clip(np.ceil((middle + radius) / abi.TILE), 0, last)
        tiles *= behind - first
        visible &= behind > first
    return round(float(tiles.sum())) * step, int(visible.sum()) * step


def cost_sentence(means: Array, scales: Array, cameras: Sequence[Camera] = ()) -> str:
    """How large one view would be if ``scales`` [N, 3], as stored, were taken for logarithms.

    cameras: those that are known; of up to eight of them the worst counts. Without any, a nominal camera looks at the
    point cloud from outside.
    """
    if not len(means):
        return "there is nothing to activate"
    chosen = [*cameras[:: -(-len(cameras) // _CAMERAS)]] if cameras else [_nominal_camera(means)]
    counted = [(*predicted_pairs(means, scales, camera), camera) for camera in chosen]
    pairs, visible, camera = max(counted, key=lambda entry: entry[0])
    return (
        f"taken for logarithms they would have {visible:,} Gaussians cover {pairs:,} tiles "
        f"({pairs / max(1, visible):,.0f} each) of {camera.name}, {camera.width}x{camera.height} pixels: "
        f"{pairs * STEP_PAIR_BYTES / 2**30:,.1f} GiB for one training step"
    )


def _nominal_camera(means: Array) -> Camera:
    """A 1600x1200 view with a 60 degree lens that has nine tenths of the points in the middle of the image."""
    points = means[:: -(-len(means) // _GAUSSIANS)].astype(np.float64)
    centre = np.median(points, axis=0)
    radius = float(np.quantile(np.linalg.norm(points - centre, axis=1), 0.9))
    viewmat = np.eye(4)
    viewmat[:3, 3] = -centre
    viewmat[2, 3] += max(2.5 * radius, 2 * Z_NEAR)
    width, height = 1600, 1200
    focal = width / 2 / np.tan(np.radians(30.0))
    return Camera("a nominal view", width, height, focal, focal, width / 2, height / 2, viewmat)
