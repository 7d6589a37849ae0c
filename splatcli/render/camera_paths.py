"""Camera paths for videos: orbit, spiral, ellipse, and through given poses.

Poses are [F, 4, 4] float64 camera to world in the scene's frame, with OpenCV axes: x right, y down, z forward. All
paths have constant speed, but for an orbit that swings. Closed ones end one step before their beginning, so that a
video of them loops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

from splatcli.errors import UsageError
from splatcli.scene.camera import focus_point, mean_direction

Doubles = NDArray[np.float64]
Indices = NDArray[np.int64]

#: Samples that a curve's length is measured by; a chord of 1/4096 turn is shorter than its arc by one part in 10^7.
_SAMPLES = 4096
#: Least total of a path's movement, as a share of its coordinates, and of its rotation, radians.
_LEAST_MOVE, _LEAST_TURN = 1e-9, 1e-6
#: Least ratio of an ellipse's half axes; with cameras in a line it would pass through the focus.
_LEAST_AXIS = 0.1
#: Percentile of the cameras' distances that an ellipse or spiral spans.
_INSIDE = 90.0

#: Cameras that leave out so much of a circle, radians, cover an arc, which an orbit does not leave.
_LEAST_GAP = np.radians(100.0)
#: Least width of an arc, radians: an orbit moves, even if the cameras stand in one direction.
_LEAST_ARC = np.radians(10.0)

#: For up as the normal of the cameras' horizontal axes: the least mean of sin^2 of their angles in the plane that they
#: fit best (28 degrees from end to end); the largest part of that across the plane; the least cosine to the mean up.
_LEAST_SPREAD, _MOST_ROLL, _ALIKE = 0.02, 0.1, 0.5

_FOCUS_REMEDY = "give a point with --focus X,Y,Z, or use --views interpolate"


@dataclass(frozen=True, slots=True, eq=False)
class Rig:
    """The input of paths: the poses of the scene's cameras, their common up direction and focus.

    poses [N, 4, 4]; up [3] unit; focus [3], the point that they look at, None if their axes are parallel.
    """

    poses: Doubles
    up: Doubles
    focus: Doubles | None

    @classmethod
    def of(cls, poses: Doubles, focus: Doubles | None = None, up: Doubles | None = None) -> Rig:
        """Return the rig of these poses, at least one. Raise UsageError if they have no common up direction.

        focus, up: [3], where they are known; up is unit.
        """
        return cls(
            poses,
            common_vertical(poses) if up is None else np.asarray(up, np.float64),
            focus_point(poses) if focus is None else np.asarray(focus, np.float64),
        )

    @property
    def centers(self) -> Doubles:
        return self.poses[:, :3, 3]

    def require_focus(self) -> Doubles:
        """Return the focus [3]. Raise UsageError if there is none."""
        if self.focus is None:
            raise UsageError(
                "the cameras look in parallel directions and have no focus",
                where="--views",
                remedy=_FOCUS_REMEDY,
            )
        return self.focus


def mean_up(poses: Doubles) -> Doubles:
    """Return [3] unit: the mean up direction of the cameras. Raise UsageError if they cancel out."""
    up = mean_direction(-poses[:, :3, 1])
    if up is None:
        raise UsageError(
            "the cameras have no common up direction",
            where="--views",
            remedy="use --views interpolate, which keeps the poses of the cameras",
        )
    return up


def common_vertical(poses: Doubles) -> Doubles:
    """Return [3] unit: up, to which the cameras' horizontal axes are perpendicular. Raise UsageError as mean_up().

    The mean of the up directions is the fallback where the horizontal axes hardly turn, and where the two differ much,
    as for cameras that roll. Of cameras that look down in an arc it leans to the middle of the arc.
    """
    mean = mean_up(poses)
    values, vectors = np.linalg.eigh(np.einsum("ni,nj->ij", poses[:, :3, 0], poses[:, :3, 0]) / len(poses))
    vertical = vectors[:, 0] * np.sign(vectors[:, 0] @ mean)
    good = values[1] > _LEAST_SPREAD and values[0] < _MOST_ROLL * values[1] and vertical @ mean > _ALIKE
    return np.asarray(vertical if good else mean)


def look_at(centers: Doubles, target: Doubles, up: Doubles) -> Doubles:
    """Return [F, 4, 4]: poses at ``centers`` [F, 3] that look at ``target`` [3]. Raise UsageError.

    Image rows are level: x is perpendicular to ``up``.
    """
    forward = target - centers
    right = np.cross(forward, up)
    if not (np.linalg.norm(right, axis=1) > 1e-6 * np.linalg.norm(forward, axis=1)).all():
        raise UsageError("the path passes straight above or below its focus", where="--views", remedy=_FOCUS_REMEDY)
    forward = forward / np.linalg.norm(forward, axis=1, keepdims=True)
    right = right / np.linalg.norm(right, axis=1, keepdims=True)
    poses = np.tile(np.eye(4), (len(centers), 1, 1))
    poses[:, :3, :3] = np.stack([right, np.cross(forward, right), forward], axis=2)
    poses[:, :3, 3] = centers
    return poses


@dataclass(frozen=True, slots=True, eq=False)
class Circle:
    """The circle of an orbit around ``center`` [3], in the plane of ``x`` and ``y`` [3], unit.

    The first camera stands in the direction x.
    arc: radians between which cameras stand, where they leave out more than a quarter of the circle; 0 is the first
    camera. None where they stand all around.
    """

    center: Doubles
    x: Doubles
    y: Doubles
    radius: float
    arc: tuple[float, float] | None


def circle(rig: Rig) -> Circle:
    """Return the circle around the axis ``up`` through the focus, at the cameras' mean height and distance from it."""
    focus = rig.require_focus()
    offsets = rig.centers - focus
    heights = offsets @ rig.up
    level = offsets - heights[:, None] * rig.up
    distances = np.linalg.norm(level, axis=1)
    radius = float(distances.mean())
    if not radius > 1e-6 * float(np.linalg.norm(offsets, axis=1).mean()):
        raise UsageError("the cameras are straight above what they look at", where="--views", remedy=_FOCUS_REMEDY)
    beside = level[distances > 1e-3 * radius]
    x = beside[0] / np.linalg.norm(beside[0])
    y = np.cross(rig.up, x)
    return Circle(focus + heights.mean() * rig.up, x, y, radius, _arc(np.arctan2(beside @ y, beside @ x)))


def _arc(angles: Doubles) -> tuple[float, float] | None:
    """Return the arc without the largest gap between angles [N], the first of which is 0; None for a small gap."""
    around = np.sort(angles % (2 * np.pi))
    gaps = np.diff(around, append=around[0] + 2 * np.pi)
    widest = int(np.argmax(gaps))
    if gaps[widest] < _LEAST_GAP:
        return None
    end = float(around[widest])
    width = 2 * np.pi - float(gaps[widest])
    more = max(0.0, 0.5 * (_LEAST_ARC - width))
    return end - width - more, end + more


def orbit(rig: Rig, frames: int) -> Doubles:
    """Return poses on the circle of the cameras that look at the focus.

    The path begins at the first camera and turns counter-clockwise seen from above (right-handed about ``up``). Where
    the cameras cover only an arc it swings to its end, back to its beginning, and on to the first camera.
    """
    around = circle(rig)
    turn = 2 * np.pi * np.arange(frames)[:, None] / frames
    angle = turn
    if around.arc is not None:
        middle, half = 0.5 * sum(around.arc), 0.5 * (around.arc[1] - around.arc[0])
        angle = middle + half * np.sin(turn - np.arcsin(np.clip(middle / half, -1.0, 1.0)))
    centers = around.center + around.radius * (np.cos(angle) * around.x + np.sin(angle) * around.y)
    return look_at(centers, rig.require_focus(), rig.up)


def ellipse(rig: Rig, frames: int) -> Doubles:
    """Return a level ellipse around the focus at the cameras' median height; each half axis spans 90 % of them.

    Its axes are the directions in which the cameras spread most and least.
    """
    focus = rig.require_focus()
    offsets = rig.centers - focus
    heights = offsets @ rig.up
    level = offsets - heights[:, None] * rig.up
    # The third singular vector is the normal of the plane.
    x = np.linalg.svd(level - level.mean(axis=0))[2][0]
    x = x - (x @ rig.up) * rig.up
    x = x / np.linalg.norm(x) if np.linalg.norm(x) > 0.5 else _any_level(rig.up)
    y = np.cross(rig.up, x)
    axes = np.percentile(np.abs([level @ x, level @ y]), _INSIDE, axis=1)
    axes = np.maximum(axes, _LEAST_AXIS * axes.max())
    if not axes.max() > 1e-6 * float(np.linalg.norm(offsets, axis=1).mean()):
        raise UsageError("the cameras are straight above what they look at", where="--views", remedy=_FOCUS_REMEDY)
    start = np.arctan2((level[0] @ y) / axes[1], (level[0] @ x) / axes[0])
    height = np.median(heights) * rig.up

    def at(u: Doubles) -> Doubles:
        angle = start + 2 * np.pi * u[:, None]
        return np.asarray(focus + height + axes[0] * np.cos(angle) * x + axes[1] * np.sin(angle) * y)

    return look_at(at(_evenly(at, frames)), focus, rig.up)


def spiral(rig: Rig, frames: int, distance: float | None = None) -> Doubles:
    """Return the spiral of forward-facing scenes: twice around the mean camera, once back and forth, as in LLFF.

    Its half axes span 90 % of the cameras; all frames look at the point on the mean optical axis at the distance of the
    focus.
    distance: of that point, if the cameras have no focus.
    """
    forward = rig.poses[:, :3, 2].mean(axis=0)
    if not np.linalg.norm(forward) > 0.5:
        raise UsageError(
            "the cameras look in all directions; a spiral needs a forward-facing scene",
            where="--views",
            remedy="--views orbit or --views ellipse",
        )
    middle = rig.centers.mean(axis=0)
    forward = forward / np.linalg.norm(forward)
    mean = look_at(middle[None], middle + forward, rig.up)[0]
    if distance is None or rig.focus is not None:
        distance = float((rig.require_focus() - middle) @ forward)
    if not distance > 0:
        raise UsageError("the focus of the cameras is behind them", where="--views", remedy=_FOCUS_REMEDY)
    radii = np.percentile(np.abs((rig.centers - middle) @ mean[:3, :3]), _INSIDE, axis=0)
    if not radii.max() > 1e-6 * distance:
        raise UsageError("all cameras have one position", where="--views", remedy="use --views orbit")

    def at(u: Doubles) -> Doubles:
        angle = 4 * np.pi * u[:, None]
        local = np.concatenate([np.cos(angle), -np.sin(angle), -np.sin(angle / 2)], axis=1) * radii
        return np.asarray(middle + local @ mean[:3, :3].T)

    return look_at(at(_evenly(at, frames)), middle + distance * forward, rig.up)


def through(poses: Doubles, frames: int, *, loop: bool = False) -> tuple[Doubles, Doubles]:
    """Return ([F, 4, 4], [F]): a path through ``poses`` in order, and each frame's position among them, 0...N - 1 (N).

    Centres follow a Catmull-Rom curve over the distance travelled, which does not depend on the world frame; rotations
    are interpolated from pose to pose (slerp). Poses equal to the one before are skipped.
    loop: return to the first pose. Raises UsageError if fewer than two poses differ.
    """
    kept, _ = distinct(poses, loop)
    if len(kept) < 2:
        raise UsageError("a path needs at least two different cameras", where="--views", remedy="use --views orbit")
    found, places = curve_through(poses[kept], loop).at(np.linspace(0.0, 1.0, frames, endpoint=not loop))
    ids = np.append(kept, len(poses)) if loop else kept
    return found, np.interp(places, np.arange(len(ids)), ids)


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """A smooth path through K poses, all different from the one before, and back to the first in a loop.

    marks: [K], in a loop [K + 1]: the share of the length at each pose, 0...1.
    at: of shares of the length [F] returns ([F, 4, 4], [F] the place among the poses, 0...K - 1 (K)).
    """

    marks: Doubles
    at: Callable[[Doubles], tuple[Doubles, Doubles]]


def curve_through(keys: Doubles, loop: bool) -> Curve:
    """Return the curve through poses [K, 4, 4], K >= 2."""
    places = np.arange(len(keys), dtype=np.float64)
    if loop:
        # Three poses beyond each end, so that the curve is smooth where it closes.
        places = np.arange(-3.0, len(keys) + 4)
        keys = keys[places.astype(np.int64) % len(keys)]
    way = np.concatenate([[0.0], np.cumsum(_ways(keys))])
    inside = slice(3, -3) if loop else slice(None)
    begin, end = way[inside][[0, -1]]
    rotations = scipy.spatial.transform.Rotation.from_matrix(keys[:, :3, :3])
    centers, turns = _catmull_rom(way, keys[:, :3, 3]), scipy.spatial.transform.Slerp(way, rotations)

    def posed(u: Doubles) -> Doubles:
        return _posed(centers(begin + u * (end - begin)), turns(begin + u * (end - begin)))

    samples = np.linspace(0.0, 1.0, max(_SAMPLES, 8 * len(keys)) + 1)
    lengths = np.concatenate([[0.0], np.cumsum(_ways(posed(samples)))])

    def at(shares: Doubles) -> tuple[Doubles, Doubles]:
        u = np.interp(shares * lengths[-1], lengths, samples)
        return posed(u), np.interp(begin + u * (end - begin), way, places)

    return Curve(np.interp((way[inside] - begin) / (end - begin), samples, lengths) / lengths[-1], at)


def nearest_order(poses: Doubles) -> Indices:
    """Return [N]: the order from the first pose, each followed by the nearest of the rest."""
    centers = poses[:, :3, 3]
    left = np.ones(len(poses), dtype=np.bool_)
    order = np.zeros(len(poses), dtype=np.int64)
    for i in range(1, len(poses)):
        left[order[i - 1]] = False
        away = np.linalg.norm(centers - centers[order[i - 1]], axis=1)
        order[i] = int(np.argmin(np.where(left, away, np.inf)))
    return order


def _ways(poses: Doubles) -> Doubles:
    """Return [N - 1]: the distance from each pose to the next; translation and rotation have equal totals.

    Rounded numbers are no movement: a total that is as small as their differences has no weight.
    """
    moved = np.linalg.norm(np.diff(poses[:, :3, 3], axis=0), axis=1)
    rotations = scipy.spatial.transform.Rotation.from_matrix(poses[:, :3, :3])
    turned = (rotations[:-1].inv() * rotations[1:]).magnitude()
    moves, turns = moved.sum() > _LEAST_MOVE * np.abs(poses[:, :3, 3]).max(), turned.sum() > _LEAST_TURN
    return np.asarray(np.hypot(moved, moved.sum() / turned.sum() * turned) if moves and turns else moved + turned)


def distinct(poses: Doubles, loop: bool) -> tuple[Indices, Indices]:
    """Return ([K] indices of poses that differ from the one before, [N] the place of each pose among these).

    With a loop, the last also differs from the first; poses at the end that do not have the place K.
    """
    ways = _ways(poses) if len(poses) > 1 else np.zeros(0)
    differs = np.concatenate([[True], ways > 1e-9 * ways.sum()])
    kept, places = np.flatnonzero(differs), np.cumsum(differs) - 1
    if loop and len(kept) > 1 and _ways(poses[[kept[-1], 0]])[0] <= 1e-9 * ways.sum():
        kept = kept[:-1]
    return kept, places


def _catmull_rom(at: Doubles, points: Doubles) -> scipy.interpolate.CubicHermiteSpline:
    """Return the curve through ``points`` [N, 3] at the parameters ``at`` [N], N >= 2, of any spacing.

    The tangent at a point is that of the parabola through it and its neighbours; at the ends it is the chord.
    """
    steps = np.diff(at)[:, None]
    slopes = np.diff(points, axis=0) / steps
    inner = (steps[1:] * slopes[:-1] + steps[:-1] * slopes[1:]) / (steps[:-1] + steps[1:])
    return scipy.interpolate.CubicHermiteSpline(at, points, np.concatenate([slopes[:1], inner, slopes[-1:]]))


def _posed(centers: Doubles, rotations: scipy.spatial.transform.Rotation) -> Doubles:
    poses = np.tile(np.eye(4), (len(centers), 1, 1))
    poses[:, :3, :3] = rotations.as_matrix()
    poses[:, :3, 3] = centers
    return poses


def _evenly(at: Callable[[Doubles], Doubles], frames: int) -> Doubles:
    """Return [F] parameters, 0...1, at which a closed curve of points is traversed at constant speed."""
    samples = np.linspace(0.0, 1.0, _SAMPLES + 1)
    lengths = np.linalg.norm(np.diff(at(samples), axis=0), axis=1)
    way = np.concatenate([[0.0], np.cumsum(lengths)])
    return np.interp(np.linspace(0.0, way[-1], frames, endpoint=False), way, samples)


def _any_level(up: Doubles) -> Doubles:
    """Return [3]: a unit vector perpendicular to ``up``."""
    level = np.cross(up, np.eye(3)[int(np.argmin(np.abs(up)))])
    return np.asarray(level / np.linalg.norm(level))
