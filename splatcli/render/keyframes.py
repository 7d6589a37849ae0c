"""Keyframes of a nerfstudio camera path: the frames between them, for files that do not hold the frames themselves.

A keyframe is a camera-to-world matrix with OpenGL axes and a vertical field of view in degrees. Older files have the
matrix as JSON in a string, and column by column, as three.js does; newer ones row by row. The column that has to be
0 0 0 1 tells the two apart.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splatcli.errors import UsageError
from splatcli.render.paths import through

#: Seconds and frames a second of a path that does not say.
_SECONDS, _FPS = 4.0, 30.0
#: An hour at 30 frames a second; more is a mistake in the file, and each frame is a camera in memory.
MOST_FRAMES = 108_000

#: No number of seconds or of frames a second is as large.
_MOST = 1e9

_KEYS = ("matrix", "camera_to_world")


def frames_between(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Entries of a ``camera_path``, evenly spaced along the ``keyframes`` of ``document``.

    Raises ValueError for what is no keyframe, and when they make no path.
    """
    keys = [_matrix(entry, index) for index, entry in enumerate(document["keyframes"])]
    fovs = [_fov(entry, document, index) for index, entry in enumerate(document["keyframes"])]
    frames = round(_positive(document, "seconds", _SECONDS) * _positive(document, "fps", _FPS))
    if not 1 <= frames <= MOST_FRAMES:
        raise ValueError(f"seconds times fps are {frames} frames, not 1 to {MOST_FRAMES}")
    if not keys:
        raise ValueError("keyframes is empty")
    loop = document.get("is_cycle") is True
    try:
        poses, at = through(np.stack(keys), frames, loop=loop)
    except UsageError:
        raise ValueError("the keyframes do not move: two different ones or more make a path") from None
    between = np.interp(at, np.arange(len(fovs) + loop), fovs + fovs[:loop])
    return [
        {"camera_to_world": pose.reshape(-1).tolist(), "fov": float(fov)}
        for pose, fov in zip(poses, between, strict=True)
    ]


def _matrix(entry: Any, index: int) -> NDArray[np.float64]:
    value = next((entry[key] for key in _KEYS if key in entry), None) if isinstance(entry, dict) else None
    try:
        matrix = np.asarray(json.loads(value) if isinstance(value, str) else value, dtype=np.float64).reshape(4, 4)
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise ValueError(f"keyframe {index} has no 4x4 matrix") from None
    if not matrix[:3, 3].any() and matrix[3, :3].any():
        matrix = matrix.T
    rotation = matrix[:3, :3]
    rigid = np.isfinite(matrix).all() and np.allclose(rotation @ rotation.T, np.eye(3), atol=1e-3)
    if not rigid or not np.linalg.det(rotation) > 0 or not np.allclose(matrix[3], (0.0, 0.0, 0.0, 1.0), atol=1e-6):
        raise ValueError(f"the matrix of keyframe {index} is no camera's pose: it scales, shears or mirrors")
    return matrix


def _fov(entry: dict[str, Any], document: dict[str, Any], index: int) -> float:
    value = entry.get("fov", document.get("default_fov"))
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 180:
        raise ValueError(f"the fov of keyframe {index} is {value!r:.40}, not between 0 and 180 degrees")
    return float(value)


def _positive(document: dict[str, Any], key: str, default: float) -> float:
    value = document.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MOST:
        raise ValueError(f"{key} is {value!r:.40}, not a number above 0 and below {_MOST:g}")
    return float(value)
