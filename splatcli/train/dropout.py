"""Dropout of Gaussians (DropGaussian, Park et al., 2025): each step leaves a random part of them out.

Where few images show a place, training can fit each of them with Gaussians that views between them contradict.
Gaussians that are missing in a step make the others explain what they covered. All are there when a view is scored,
rendered or exported. Captures of views close to each other lose by it, so that it is on by default where views are far
apart only (docs/quality.md).

A Gaussian is left out by a 3D filter (docs/math.md 2.4) so wide that no opacity remains: it is culled, has no gradient,
and Adam treats it as one that the view does not see.

Blending is linear in each opacity, and Gaussians are left out independently. So the mean image of a step with the rate
r is that of all Gaussians with 1 - r times their opacities, and these are rendered, scored and exported. DropGaussian
raises the opacities of the others by 1 / (1 - r) in each step instead, which opacities near 1 have no room for.
"""

from __future__ import annotations

import math

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from splatcli.config import MADE_STARTS, Config, resolve
from splatcli.reproducible import softplus
from splatcli.scene.camera import Camera
from splatcli.scene.scene import Scene

#: Scenes whose views are so many degrees apart, see view_spacing(), have this rate by default.
SPACING, RATE = 20.0, 0.2

#: Effective views that the mean view-dependent colour counts as in the trained model of such a scene.
SH_PRIOR = 1.0

#: Power of the size in the learning rates of means (docs/math.md 8.7) where views are closer.
MEANS_SIZE_POWER = 0.5

#: Sparse points that view_spacing() looks at, and the quantile of the angles that it takes.
_POINTS, _QUANTILE = 500, 0.8

#: Size of the 3D filter of a Gaussian that is left out, world units; its square is finite in float32.
_WIDE = 1e18

#: Keeps the random words apart from those of other streams with the same seed.
_STREAM = 0x64726F706F7574

_UINT64 = (1 << 64) - 1
_LEVELS = 256


def resolve_by_spacing(config: Config, scene: Scene) -> tuple[Config, list[str]]:
    """Return the settings of a run on ``scene``, with those that follow from the spacing of its views, and notes.

    That is ``train.dropout``, ``train.sh_prior``, and ``optim.means_size_power``: where few views show a place, large
    Gaussians that move faster fit each of them the better, and views in between the worse (docs/quality.md).
    """
    if None not in (config.train.dropout, config.train.sh_prior, config.optim.means_size_power):
        return config, []
    spacing = 0.0
    if scene.points is not None:
        spacing = view_spacing([scene.cameras[view] for view in scene.train], scene.points.xyz)
    far = spacing >= SPACING
    made = config.model.init in MADE_STARTS
    decided = {
        "optim.means_size_power": 0.0 if far or made else MEANS_SIZE_POWER,
        "train.sh_prior": SH_PRIOR if far else 0.0,
        "train.dropout": RATE if far else 0.0,
    }
    note = (
        f"training views are up to {spacing:.0f} degrees apart: steps leave out up to {100 * RATE:.0f} % of the "
        "Gaussians, so that none fits one view alone; --set train.dropout=0 keeps all"
    )
    return resolve(config, decided), [note] if far and config.train.dropout is None else []


def view_spacing(cameras: list[Camera], xyz: NDArray[np.float32]) -> float:
    """Return how far apart views are, in degrees: the angle at a point between the rays to a camera and the next one.

    xyz: [P, 3] sparse points, of which some are used, evenly spread in their order. The result is the 80 %
    quantile over all points and the cameras in whose images they lie; a point in a single image has no angle. NaN
    without any.
    """
    if not cameras or not len(xyz):
        return math.nan
    points = xyz[:: max(1, len(xyz) // _POINTS)].astype(np.float64)
    centers = np.stack([camera.center for camera in cameras])
    shown = np.stack([camera.pixels_of(points)[2] for camera in cameras])
    angles = []
    for point, showing in zip(points, shown.T, strict=True):
        rays = centers[showing] - point
        if len(rays) < 2:
            continue
        rays /= np.maximum(np.linalg.norm(rays, axis=1, keepdims=True), 1e-300)
        apart, _ = scipy.spatial.cKDTree(rays).query(rays, k=2)
        angles.append(np.degrees(2.0 * np.arcsin(np.minimum(0.5 * apart[:, 1], 1.0))))
    return float(np.quantile(np.concatenate(angles), _QUANTILE)) if angles else math.nan


def dropout_rate(config: Config, step: int) -> float:
    """Return the part of the Gaussians that step number ``step`` leaves out.

    It rises linearly from 0 to ``train.dropout`` at step ``schedule.lr_steps``, and stays there. None is that of a run
    that began before there was dropout: 0.
    """
    return (config.train.dropout or 0.0) * min(1.0, step / config.schedule.lr_steps)


def dropped(seed: int, step: int, count: int, rate: float) -> Tensor:
    """Return [count] bool, the Gaussians that step number ``step`` leaves out: a pure function, on the CPU.

    rate: 0 to 1, rounded to 1/256.
    """
    key = np.array([(seed ^ _STREAM) & _UINT64, step], dtype=np.uint64)
    # numpy guarantees these words for all versions; a byte of a word decides on a Gaussian.
    words = np.random.Philox(key=key).random_raw(-(-count // 8)).astype("<u8")
    return torch.from_numpy(words.view(np.uint8)[:count] < round(_LEVELS * rate))


def mean_opacities(logits: Tensor, rate: float) -> Tensor:
    """Return logits [N] of the opacities that Gaussians have in the mean of steps with that ``rate``, 0 to below 1."""
    if rate == 0.0:
        return logits
    # The logit of (1 - rate) o in logarithms: no opacity near 1 loses digits.
    known = logits.double()
    return (known + math.log1p(-rate) - softplus(known + math.log(rate))).to(logits)


def dropout_filter(sizes: Tensor | None, rows: Tensor) -> Tensor:
    """Return [N] float32 sizes of a 3D filter that leaves out ``rows`` [N] bool.

    sizes: [N], of the filter of the others; None: they have none.
    """
    others = torch.zeros(len(rows), dtype=torch.float32, device=rows.device) if sizes is None else sizes
    return others.masked_fill(rows, _WIDE)
