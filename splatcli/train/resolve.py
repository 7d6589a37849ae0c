"""The settings that a run decides when it begins, by its scene and its first Gaussians: UNDECIDED of config/build.py.

What the memory decides is in memory_plan.py. A decided value is stored with the run, and a resumed one keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import scipy
from numpy.typing import NDArray

from splatcli.config import MADE_STARTS, NAMED_STARTS, Config, resolve
from splatcli.gaussians import SHN_COUNTS, Gaussians
from splatcli.scene.camera import Camera
from splatcli.scene.depth_maps import AUTO
from splatcli.scene.scene import Scene

#: Gaussians per pixel of an image: more brought no improvement in benchmarks (benchmarks/README.md).
PER_PIXEL = 0.5

#: This many views show about one side of a scene. More views show more of it and overlap: the cap grows by the root.
VIEWS = 40

#: Views are far apart from so many degrees on, see view_spacing(). Steps of such a scene leave out this part of the
#: Gaussians at most (train/dropout.py).
FAR_APART, DROPOUT = 20.0, 0.2

#: Effective views that the mean view-dependent colour counts as in the trained model of such a scene.
SH_PRIOR = 1.0

#: Power of the size in the learning rates of means (docs/math.md 8.7) where views are closer.
MEANS_SIZE_POWER = 0.5

#: Sparse points that view_spacing() looks at, and the quantile of the angles that it takes.
_POINTS, _QUANTILE = 500, 0.8

#: Mean number of pixels of the training images from which on a run begins with images of half their sides.
LARGE_IMAGE = 400_000


def resolve_settings(config: Config, scene: Scene, gaussians: Gaussians) -> tuple[Config, list[str]]:
    """Return the settings of a new run on ``scene`` with what it decides, and notes for the user.

    gaussians: the first ones.
    """
    config, notes = resolve_cap(config, scene, len(gaussians))
    config, more = resolve_by_spacing(config, scene)
    decided = {"data.depth_type": _depth_type(config, scene), "schedule.sh_degree_start": _used_sh_degree(gaussians)}
    return resolve_downscales(resolve(config, decided), scene), [*notes, *more]


def mean_pixels(cameras: Sequence[Camera]) -> float:
    """Return the mean number of pixels of the cameras' images."""
    return sum(camera.width * camera.height for camera in cameras) / max(1, len(cameras))


def auto_cap(scene: Scene, start: int) -> int:
    """Return the cap of a run on ``scene``, rounded to two digits; at least ``start``, the initial count."""
    cameras = [scene.cameras[i] for i in scene.train]
    cap = PER_PIXEL * mean_pixels(cameras) * math.sqrt(max(1.0, len(cameras) / VIEWS))
    grain: int = 10 ** max(0, int(math.log10(max(1.0, cap))) - 1)
    return max(start, grain, grain * math.floor(cap / grain + 0.5))


def resolve_cap(config: Config, scene: Scene, start: int) -> tuple[Config, list[str]]:
    """Return the settings with a number in place of "auto", and a note about it for the user."""
    if config.strategy.cap_max != "auto":
        return config, []
    cap = auto_cap(scene, start)
    note = f"growth stops at {cap:,} Gaussians, from the size and number of images; --cap-max sets another number"
    return resolve(config, {"strategy.cap_max": cap}), [note]


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
    far = spacing >= FAR_APART
    made = config.model.init in MADE_STARTS
    decided = {
        "optim.means_size_power": 0.0 if far or made else MEANS_SIZE_POWER,
        "train.sh_prior": SH_PRIOR if far else 0.0,
        "train.dropout": DROPOUT if far else 0.0,
    }
    note = (
        f"training views are up to {spacing:.0f} degrees apart: steps leave out up to {100 * DROPOUT:.0f} % of the "
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


def resolve_downscales(config: Config, scene: Scene) -> Config:
    """Return the settings of a run on ``scene`` with a number in place of ``schedule.num_downscales = None``.

    A run from a model does not begin with smaller images by itself, which would take detail from it.
    """
    pixels = mean_pixels([scene.cameras[view] for view in scene.train])
    halvings = int(config.model.init in NAMED_STARTS and pixels >= LARGE_IMAGE)
    return resolve(config, {"schedule.num_downscales": halvings})


def _depth_type(config: Config, scene: Scene) -> str | None:
    """Return the type of the depth maps of the settings; None without maps."""
    if config.data.depths in (None, AUTO):
        return None
    relative = any(source.depth is not None and source.depth.relative for source in scene.images.sources)
    return "relative" if relative else "metric"


def _used_sh_degree(gaussians: Gaussians) -> int:
    """Return the highest SH degree of which a coefficient is not zero."""
    for degree in range(gaussians.sh_degree, 0, -1):
        if bool(gaussians.shN[:, SHN_COUNTS[degree - 1] : SHN_COUNTS[degree]].any()):
            return degree
    return 0
