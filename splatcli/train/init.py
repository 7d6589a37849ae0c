"""Initialisation: the Gaussians before the first step, from SfM points, silhouettes, random points, or a model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy
import torch
from numpy.typing import NDArray

from splatcli import machine
from splatcli.config import HULL, NAMED_STARTS, RANDOM, SFM, Config
from splatcli.errors import SceneError, UsageError
from splatcli.gaussians import SH_C0, SHN_COUNTS, Gaussians
from splatcli.reproducible import log, logit_of
from splatcli.scene.camera import focus_point
from splatcli.scene.points import PointCloud, morton_order
from splatcli.scene.scene import Scene
from splatcli.sizes import counted, evenly
from splatcli.train.resolve import auto_cap
from splatcli.train.sky import sky_points
from splatcli.train.visual_hull import hull_points, shows_silhouettes

#: Least mean squared distance to neighbours (INRIA), so that no scale starts at log(0).
MIN_SQUARED_DISTANCE = 1e-7

#: With fewer distinct points, none has three neighbours.
MIN_POINTS = 4

#: A point nearer to a camera's centre, in scene extents, is noise that would fill that camera's view.
MIN_CAMERA_DISTANCE = 1e-4

#: Points of a scene above this part of the cap are thinned. At the cap, densification could only replace what fades:
#: where the points are is where the Gaussians stay (docs/quality.md).
START_SHARE = 0.6

#: Directions that are tried for points of the sky: this part of the cap, and the most of them.
SKY_SHARE, SKY_DIRECTIONS = 0.2, 20_000

#: Random points of a run whose cap leaves room for them (INRIA), and their minimum.
RANDOM_POINTS, LEAST_RANDOM_POINTS = 100_000, 1_000

#: Half the edge of the cube of random points: in a Blender scene, and elsewhere in scene extents.
BLENDER_HALF_EDGE = 1.3
RANDOM_HALF_EDGE = 3.0
#: How far the cameras of the usual Blender scenes are from the origin, and the factor from which on one is of another
#: size: in millimetres, or of a building.
BLENDER_DISTANCE, OTHER_SIZE = 4.03, 2.0


@dataclass(frozen=True, slots=True, eq=False)
class StartPoints:
    """The points that a run starts from: positions [P, 3] in world units, and colours [P, 3] in 0..1."""

    xyz: NDArray[np.float32]
    rgb: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.xyz)

    def __getitem__(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> StartPoints:
        return StartPoints(self.xyz[rows], self.rgb[rows])

    def __add__(self, other: StartPoints) -> StartPoints:
        return StartPoints(np.concatenate([self.xyz, other.xyz]), np.concatenate([self.rgb, other.rgb]))


def resolve_init(config: Config, scene: Scene) -> str:
    """Return the init for ``scene``: without points it is a visual hull, or random points."""
    if config.model.init != SFM or (scene.points is not None and len(scene.points.xyz)):
        return config.model.init
    return HULL if shows_silhouettes(scene) else RANDOM


def initial_gaussians(
    config: Config, scene: Scene, generator: torch.Generator, init_model: Gaussians | None = None
) -> tuple[Gaussians, list[str]]:
    """Return the Gaussians that ``config.model.init`` requests, on the CPU, and notes for the user.

    generator: on the CPU; for random points.
    init_model: the model that ``config.model.init`` names, read by the caller; only its SH degree is adapted.
    Raises SceneError for points that are not finite, UsageError for a model above the cap.
    """
    if init_model is not None:
        return _from_model(config, init_model)
    if config.model.init not in NAMED_STARTS:
        raise ValueError(f"the caller has to read {config.model.init!r}")

    points, notes = _scene_points(config, scene) if config.model.init == SFM else (None, [])
    if points is None:
        points, more = _new_points(config, scene, generator)
        notes = notes + more
    # What a view reaches then lies together in memory, and stays so: new rows are put beside their sources.
    points = points[morton_order(points.xyz)]
    return gaussians_from_points(points.xyz, points.rgb, config), notes


def gaussians_from_points(xyz: NDArray[np.float32], rgb: NDArray[np.float32], config: Config) -> Gaussians:
    """Return isotropic Gaussians at ``xyz`` [P, 3] (world units) with colours ``rgb`` [P, 3] in 0..1; shN is zero."""
    model = config.model
    n = len(xyz)
    log_scale = 0.5 * log(torch.from_numpy(mean_squared_distance(xyz))) + math.log(model.init_scale)
    return Gaussians(
        means=torch.tensor(xyz, dtype=torch.float32),
        quats=torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float32).repeat(n, 1),
        log_scales=log_scale.float()[:, None].repeat(1, 3),
        logit_opacities=torch.full((n,), logit_of(model.init_opacity), dtype=torch.float32),
        sh0=torch.tensor((rgb - 0.5) / SH_C0, dtype=torch.float32),
        shN=torch.zeros(n, SHN_COUNTS[model.sh_degree], 3, dtype=torch.float32),
    )


def mean_squared_distance(xyz: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return [P], the mean squared distance to the three nearest other points, at least MIN_SQUARED_DISTANCE.

    With fewer than four points, to all others; a single point has MIN_SQUARED_DISTANCE. The least is less for points
    whose median distance from their middle is below 1, in proportion: scenes may be in any unit.
    """
    neighbours = min(3, len(xyz) - 1)
    if neighbours < 1:
        return np.full(len(xyz), MIN_SQUARED_DISTANCE)
    order = morton_order(xyz)  # so that one query finds in the cache what the one before has read: three times as fast
    points = xyz[order].astype(np.float64)
    threads = machine.cores() if len(points) > 50_000 else 1  # -1 takes every core of the machine
    distances, _ = scipy.spatial.cKDTree(points).query(points, k=neighbours + 1, workers=threads)
    mean = np.empty(len(xyz))
    mean[order] = (distances[:, 1:] ** 2).mean(axis=1)
    spread = float(np.median(np.linalg.norm(points - np.median(points, axis=0), axis=1)))
    return np.maximum(mean, MIN_SQUARED_DISTANCE * (min(1.0, spread) ** 2 or 1.0))


def distinct_rows(xyz: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the rows of finite points [P, 3] that repeat no earlier one, ascending."""
    order = np.argsort(xyz[:, 0], kind="stable")
    along = xyz[order, 0]
    alike = along[1:] == along[:-1]
    # Only points with an x that another has can repeat it.
    shared = np.zeros(len(xyz), np.bool_)
    shared[1:] = alike
    shared[:-1] |= alike
    rows = np.sort(order[shared])
    kept = np.ones(len(xyz), np.bool_)
    kept[rows] = False
    if len(rows):
        kept[rows[np.unique(xyz[rows], axis=0, return_index=True)[1]]] = True
    return np.flatnonzero(kept)


def thinned(xyz: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Return ``count`` rows of points ``xyz`` [P, 3], P >= count, ascending: dense regions lose more than sparse ones.

    A point is kept with a probability in proportion to the square of the distance to its neighbours, which evens the
    density on surfaces; where that exceeds 1 it is certain. The sample is systematic along a Z curve: each stretch of
    the curve keeps as many points as it should, up to one, and nothing is drawn.
    """
    order = morton_order(xyz)
    weights = mean_squared_distance(xyz)[order]
    # With the k largest weights certain, the others share what is left of the count.
    descending = np.sort(weights)[::-1]
    rest = np.cumsum(descending[::-1])[::-1]
    scales = (count - np.arange(len(weights))) / rest
    certain = int(np.argmax(scales * descending <= 1.0))
    through = np.cumsum(np.minimum(1.0, weights * scales[certain]))
    ticks = np.floor(through * (count / through[-1]) + 0.5)
    kept = np.diff(ticks, prepend=0.0) > 0.0
    rows: NDArray[np.int64] = np.sort(order[kept])
    return rows


def _growth_cap(config: Config, scene: Scene) -> int | None:
    """Return the number of Gaussians that a run on ``scene`` may grow to; None without a limit."""
    caps = [config.max_gaussians(), auto_cap(scene, 0) if config.strategy.cap_max == "auto" else None]
    return min((cap for cap in caps if cap is not None), default=None)


def _scene_points(config: Config, scene: Scene) -> tuple[StartPoints | None, list[str]]:
    """Return the points of the scene to start from, with those of its sky, and notes; None where there are too few."""
    if scene.points is None or len(scene.points.xyz) == 0:
        return None, ["the scene has no points"]
    points, left_out = _usable_points(scene, scene.points)
    if len(points) < MIN_POINTS:
        few = f"the scene has only {counted(len(points), 'usable point')}"
        return None, [*_use_of_points(scene.points, len(points), left_out), few]
    cap = _growth_cap(config, scene)
    start = len(points) if cap is None else min(cap, max(MIN_POINTS, int(START_SHARE * cap)))
    if len(points) > start:
        thinner = f"{len(points) - start:,} thinned out, for densification under the cap of {cap:,} Gaussians"
        points, left_out = points[thinned(points.xyz, start)], [*left_out, thinner]
    notes = _use_of_points(scene.points, len(points), left_out)
    sky = _sky(config, scene, points.xyz, cap)
    if len(sky):
        notes.append(f"added {counted(len(sky), 'point')} far away, for the sky and far background")
    return points + sky, notes


def _use_of_points(cloud: PointCloud, used: int, left_out: list[str]) -> list[str]:
    """Return a note of how many points of the scene are used, where some are not; left_out: which."""
    if not left_out:
        return []
    return [f"{used:,} of {counted(len(cloud), 'point')} {'is' if used == 1 else 'are'} used: {', '.join(left_out)}"]


def _usable_points(scene: Scene, cloud: PointCloud) -> tuple[StartPoints, list[str]]:
    """Return the distinct points of ``cloud`` that are not at a camera, in file order, and which ones are left out."""
    xyz, left_out = cloud.xyz, []
    broken = ~np.isfinite(xyz).all(axis=1)
    if broken.any():
        raise SceneError(
            f"{int(broken.sum())} of {len(xyz)} points are not finite, the first is point {int(broken.argmax())}",
            where=scene.root,
            remedy="repair the reconstruction, or start with --init random",
        )
    rows = distinct_rows(xyz)
    if len(rows) < len(xyz):
        left_out.append(counted(len(xyz) - len(rows), "repeats another", "repeat others"))
    centers = np.stack([scene.cameras[i].center for i in scene.train])
    to_camera, _ = scipy.spatial.cKDTree(centers).query(xyz[rows].astype(np.float64))
    clear = to_camera >= MIN_CAMERA_DISTANCE * scene.extent
    if not clear.all():
        left_out.append(f"{int((~clear).sum()):,} at a camera's centre")
        rows = rows[clear]
    return StartPoints(xyz[rows], cloud.rgb[rows].astype(np.float32) / 255.0), left_out


def _sky(config: Config, scene: Scene, xyz: NDArray[np.float32], cap: int | None) -> StartPoints:
    """Return the points of sky and far background, see sky.py; with ``xyz`` [P, 3] they are no more than a given cap.

    cap: the number of Gaussians that the run may grow to, or None.
    """
    directions = config.model.sky_points
    if directions is None:
        directions = SKY_DIRECTIONS if cap is None else min(SKY_DIRECTIONS, int(SKY_SHARE * cap))
    if config.data.blocks is not None:
        directions = 0  # the points of blocks are those of their own region
    sky, most = StartPoints(*sky_points(scene, xyz, directions)), config.max_gaussians()
    if most is not None and len(xyz) + len(sky) > most:
        sky = sky[np.array(evenly(range(len(sky)), most - len(xyz)), np.int64)]
    return sky


def _cube_to_fill(scene: Scene) -> tuple[NDArray[np.float64], float]:
    """Return centre [3] and half the edge of the cube of random points: Blender's usual one, or around the cameras.

    A Blender scene of another size has the usual cube in proportion, where the cameras look.
    """
    cameras = [scene.cameras[i] for i in scene.train]
    centers = np.stack([camera.center for camera in cameras])
    if scene.kind == "blender":
        distance = float(np.median(np.linalg.norm(centers, axis=1)))
        if not scene.offset.any() and 1.0 / OTHER_SIZE <= distance / BLENDER_DISTANCE <= OTHER_SIZE:
            return np.zeros(3), BLENDER_HALF_EDGE
        focus = focus_point(np.linalg.inv(np.stack([camera.viewmat for camera in cameras])))
        if focus is not None and np.mean([camera.pixels_of(focus[None])[2].item() for camera in cameras]) >= 0.5:
            distance = float(np.median(np.linalg.norm(centers - focus, axis=1)))
            half = float(f"{BLENDER_HALF_EDGE / BLENDER_DISTANCE * distance:.4g}")
            # Rounded: every process of a run starts from the same points.
            return np.round(focus / half, 3) * half, half
    return np.mean(centers, axis=0), RANDOM_HALF_EDGE * scene.extent


def _new_points(config: Config, scene: Scene, generator: torch.Generator) -> tuple[StartPoints, list[str]]:
    """Return points for a scene that has none, or whose own are not used, and notes.

    They are on the visual hull if the images have transparency, unless ``init`` is "random"; otherwise at random in
    a cube.
    """
    center, half = _cube_to_fill(scene)
    count, notes = _new_point_count(config, scene), []
    if config.model.init != RANDOM and shows_silhouettes(scene):
        hull = hull_points(scene, center, half, count, generator)
        if hull is not None:
            return StartPoints(*hull), [f"started from {count} points on the hull of what is opaque in the images"]
        notes.append("the images' transparency leaves no hull: poses or masks are off, or the scene is elsewhere")
    elif config.model.init == HULL:
        notes.append("too few images have transparency for a hull")
    cube = torch.rand(count, 3, generator=generator, dtype=torch.float64).numpy() * 2.0 - 1.0
    rgb = torch.rand(count, 3, generator=generator, dtype=torch.float32).numpy()
    return StartPoints((center + half * cube).astype(np.float32), rgb), [*notes, f"started from {count} random points"]


def _new_point_count(config: Config, scene: Scene) -> int:
    """Return the number of points that a run makes for itself.

    At the cap there would be no room for growth until most of them, which are in empty space, are pruned.
    """
    count, most = config.model.random_points, config.max_gaussians()
    if count is None:
        cap = _growth_cap(config, scene)
        count = RANDOM_POINTS if cap is None else min(RANDOM_POINTS, max(LEAST_RANDOM_POINTS, cap // 10))
    return count if most is None else min(count, most)


def _from_model(config: Config, init_model: Gaussians) -> tuple[Gaussians, list[str]]:
    cap, degree = config.max_gaussians(), config.model.sh_degree
    if cap is not None and len(init_model) > cap:
        raise UsageError(
            f"the model has {len(init_model)} Gaussians, more than the cap of {cap}",
            where=config.model.init,
            remedy=f"raise the cap to at least {len(init_model)}, or leave it out",
        )
    if len(init_model) == 0:
        raise UsageError(
            "the model has no Gaussians to start from",
            where=config.model.init,
            remedy="name another, or leave --init out to start from the scene's points",
        )
    gaussians = init_model.to("cpu").detach_clone()
    notes = [f"started from {len(init_model)} Gaussians of {config.model.init}"]
    if init_model.sh_degree != degree:
        coefficients = gaussians.shN.new_zeros(len(init_model), SHN_COUNTS[degree], 3)
        shared = min(SHN_COUNTS[degree], init_model.shN.shape[1])
        coefficients[:, :shared] = gaussians.shN[:, :shared]
        gaussians.shN = coefficients
        verb = "dropped" if degree < init_model.sh_degree else "added as zeros"
        notes.append(f"SH degree {init_model.sh_degree} -> {degree}: the difference is {verb}")
    return gaussians, notes
