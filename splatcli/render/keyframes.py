"""Keyframes of nerfstudio camera paths, and the frames between them.

A keyframe is a camera-to-world matrix with OpenGL axes and a vertical field of view in degrees. Older files have the
matrix as JSON in a string, and column by column, as three.js does; newer ones row by row. The column that has to be
0 0 0 1 distinguishes the two. viewer/camera_path.js does the same in a browser.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy

from splatcli.render.camera_paths import Doubles, Indices, curve_through, distinct, through
from splatcli.similarity import rigid, uniform_scale

#: How far R R^T of a camera file's rotation may be from the identity.
TOLERANCE = 1e-3

#: Default length in seconds and frame rate of a camera path.
_SECONDS, _FPS = 4.0, 30.0
#: An hour at 30 fps; more is a mistake in the file, and each frame is a camera in memory.
MOST_FRAMES = 108_000

#: Upper limit of seconds and of frame rates.
_MOST = 1e9

#: Names of a keyframe's matrix.
_MATRIX_KEYS = ("matrix", "camera_to_world")


def frames_between(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of a ``camera_path`` along the ``keyframes`` of ``document``.

    Raises ValueError for an invalid keyframe or path.
    """
    poses, fovs = Keyframes.of(document).frames()
    return [
        {"camera_to_world": pose.reshape(-1).tolist(), "fov": float(fov)} for pose, fov in zip(poses, fovs, strict=True)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Keyframes:
    """The keyframes of a path, N > 0, and how fast it passes them.

    poses: [N, 4, 4] camera to world, OpenGL axes. fovs: [N] vertical fields of view, degrees.
    loop: the path returns to the first keyframe.
    times: [N - 1], in a loop [N], the seconds of each transition; None for one at constant speed in what ``seconds``
        leaves to all such. Without any, ``seconds`` does not count.
    seconds, fps: length and frame rate of the path.
    """

    poses: Doubles
    fovs: Doubles
    loop: bool
    times: Sequence[float | None]
    seconds: float
    fps: float

    @classmethod
    def of(cls, document: dict[str, Any]) -> Keyframes:
        """Return the keyframes of a camera path as nerfstudio writes it. Raises ValueError."""
        entries = document["keyframes"]
        poses = [_matrix(entry, index) for index, entry in enumerate(entries)]
        fovs = [_fov(entry, document, index) for index, entry in enumerate(entries)]
        seconds, fps = _positive(document, "seconds", _SECONDS), _positive(document, "fps", _FPS)
        if not poses:
            raise ValueError("keyframes is empty")
        loop = document.get("is_cycle") is True
        return cls(np.stack(poses), np.array(fovs), loop, _transition_times(document, loop), seconds, fps)

    def frames(self) -> tuple[Doubles, Doubles]:
        """Return ([F, 4, 4] poses, [F] fields of view) of the path's frames.

        They are evenly spaced, unless transitions have times of their own, which are kept. One keyframe is one frame.
        Keyframes of one pose and several fields of view are a zoom.
        Raises ValueError where all keyframes are equal, where the times leave none to the other transitions, and for
        too many frames.
        """
        if len(self.poses) == 1:
            _frame_count(self.seconds, self.fps)
            return self.poses, self.fovs
        kept, places = distinct(self.poses, self.loop)
        if len(kept) == 1 and (self.fovs == self.fovs[0]).all():
            raise ValueError("all keyframes are equal; a path needs at least two different ones")
        if any(time is not None for time in self.times):
            return self._timed(kept, places)
        return self._evenly(is_zoom=len(kept) == 1)

    def _evenly(self, *, is_zoom: bool) -> tuple[Doubles, Doubles]:
        """Return the frames at constant speed."""
        frames, last = _frame_count(self.seconds, self.fps), len(self.poses) - 1 + self.loop
        if is_zoom:
            poses = np.tile(self.poses[0], (frames, 1, 1))
            at = np.linspace(0.0, last, frames, endpoint=not self.loop)
        else:
            poses, at = through(self.poses, frames, loop=self.loop)
        return poses, np.interp(at, np.arange(last + 1), self._closed(self.fovs))

    def _timed(self, kept: Indices, places: Indices) -> tuple[Doubles, Doubles]:
        """Return the frames of a path that takes ``times`` from keyframe to keyframe.

        The speed changes smoothly from transition to transition. A transition between equal poses rests, or zooms;
        without a time it is none, and its keyframe is skipped.
        kept, places: as of distinct().
        """
        curve = curve_through(self.poses[kept], self.loop) if len(kept) > 1 else None
        if curve is None:  # a zoom, along which each transition is as long
            places = np.arange(len(self.poses))
        if self.loop:
            places = np.append(places, places[-1] + 1 if curve is None else len(kept))
        marks = np.linspace(0.0, 1.0, places[-1] + 1) if curve is None else curve.marks
        durations = _durations(np.diff(marks[places]), self.times, self.seconds)
        ends = np.concatenate([[0.0], np.cumsum(durations)])
        total = float(ends[-1])
        frames = _frame_count(self.seconds if abs(total - self.seconds) <= 1e-9 * total else total, self.fps)
        at = np.linspace(0.0, total, frames, endpoint=not self.loop)
        there = np.concatenate([[True], durations > 1e-9 * total])  # the keyframes that are not skipped
        ends, places, fovs = ends[there], places[there], self._closed(self.fovs)[there]
        shares = np.clip(_monotone(ends, marks[places], self.loop)(at), 0.0, 1.0)
        if curve is None:
            poses, reached = np.tile(self.poses[0], (frames, 1, 1)), shares * (len(marks) - 1)
        else:
            poses, reached = curve.at(shares)
        i = np.clip(np.searchsorted(ends, at, side="right") - 1, 0, len(ends) - 2)
        steps, since = np.diff(places)[i], (at - ends[i]) / np.diff(ends)[i]
        along = np.clip(np.where(steps > 0, (reached - places[i]) / np.maximum(steps, 1), since), 0.0, 1.0)
        return poses, fovs[i] + along * np.diff(fovs)[i]

    def _closed(self, values: Doubles) -> Doubles:
        """Return the values of the keyframes, in a loop with the first one at the end again."""
        return np.append(values, values[: int(self.loop)])


def _durations(lengths: Doubles, times: Sequence[float | None], seconds: float) -> Doubles:
    """Return the seconds of each transition. lengths: their shares of the way. Raises ValueError."""
    free = np.array([time is None for time in times])
    fixed = np.array([time or 0.0 for time in times])
    rest, way = seconds - float(np.cumsum(fixed)[-1]), float(lengths[free].sum())
    if way > 0 and not rest > 0:
        raise ValueError(
            f"the transitions with a time of their own take {seconds - rest:g} of the {seconds:g} seconds, and leave "
            "none to the others"
        )
    return np.where(free, lengths * (rest / way if way > 0 else 0.0), fixed)


def _monotone(at: Doubles, values: Doubles, loop: bool) -> scipy.interpolate.PchipInterpolator:
    """Return the smooth monotonic function through rising ``values`` from 0 to 1."""
    if loop:  # a lap before and one after, so that it is smooth where it closes
        at = np.concatenate([at[:-1] - at[-1], at, at[1:] + at[-1]])
        values = np.concatenate([values[:-1] - 1.0, values, values[1:] + 1.0])
    return scipy.interpolate.PchipInterpolator(at, values)


def _frame_count(seconds: float, fps: float) -> int:
    frames = round(seconds * fps)
    if not 1 <= frames <= MOST_FRAMES:
        raise ValueError(f"seconds times fps are {frames} frames, not 1 to {MOST_FRAMES}")
    return frames


def _transition_times(document: dict[str, Any], loop: bool) -> list[float | None]:
    """Return the seconds to the second keyframe, to each after it and, in a loop, to the first; None for no time.

    As nerfstudio has them: a keyframe's own is that of the way to it.
    """
    default = None
    if document.get("default_transition_sec") is not None:
        default = _positive(document, "default_transition_sec", 0.0)
    times = []
    for index, entry in enumerate(document["keyframes"]):
        own = entry.get("override_transition_sec") if entry.get("override_transition_enabled") is True else None
        times.append(default if own is None else _checked(own, f"override_transition_sec of keyframe {index}"))
    return times[1:] + times[: int(loop)]


def _matrix(entry: Any, index: int) -> Doubles:
    """Return [4, 4] camera to world, without a scale of its axes. Raises ValueError."""
    value = next((entry[key] for key in _MATRIX_KEYS if key in entry), None) if isinstance(entry, dict) else None
    try:
        matrix = np.asarray(json.loads(value) if isinstance(value, str) else value, dtype=np.float64).reshape(4, 4)
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise ValueError(f"keyframe {index} has no 4x4 matrix") from None
    if not matrix[:3, 3].any() and matrix[3, :3].any():
        matrix = matrix.T
    matrix[:3, :3] /= uniform_scale(matrix[:3, :3], TOLERANCE)
    try:
        return rigid(matrix, TOLERANCE)
    except ValueError:
        raise ValueError(f"the matrix of keyframe {index} is not a camera pose: it scales, shears or mirrors") from None


def _fov(entry: dict[str, Any], document: dict[str, Any], index: int) -> float:
    value = entry.get("fov", document.get("default_fov"))
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 180:
        raise ValueError(f"the fov of keyframe {index} is {value!r:.40}, not between 0 and 180 degrees")
    return float(value)


def _positive(document: dict[str, Any], key: str, default: float) -> float:
    return _checked(document.get(key, default), key)


def _checked(value: object, name: str) -> float:
    """Return a number of seconds or frames a second, which ``name`` has. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MOST:
        raise ValueError(f"{name} is {value!r:.40}, not a number above 0 and below {_MOST:g}")
    return float(value)
