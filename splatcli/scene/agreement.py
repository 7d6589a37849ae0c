"""Whether two descriptions of a scene give the same views."""

from __future__ import annotations

from pathlib import PurePosixPath

import numpy as np
from numpy.typing import NDArray

from splatcli.scene.source import SceneSource, View

#: Degrees by which a view may be turned, relative to the first. Two solves of one scene differ by a tenth of that.
TURN = 2.0

#: Part of the cameras' mean distance from their middle by which that of one may differ; two solves: 0.01.
SHIFT = 0.1


def disagreement(one: SceneSource, other: SceneSource) -> str | None:
    """Return the disagreement of the two in words; None when they describe the same views."""
    if len(one.views) != len(other.views):
        return f"{one.file.name} has {len(one.views)} views, {other.file.name} {len(other.views)}"
    pairs = _paired(one.views, other.views)
    if pairs is None:
        return f"{one.file.name} and {other.file.name} name different images"
    first, second = ([pair[side] for pair in pairs] for side in (0, 1))
    turned = _turns(first, second)
    moved = np.abs(_distances(first) - _distances(second))
    worst = int(np.argmax(turned)) if turned.max() > TURN else int(np.argmax(moved))
    if turned[worst] > TURN:
        return f"they turn {first[worst].name} by {turned[worst]:.0f} degrees against each other"
    return f"they have {first[worst].name} at different places" if moved[worst] > SHIFT else None


def _paired(one: list[View], other: list[View]) -> list[tuple[View, View]] | None:
    """Pair the views of both by name, without endings, and without folders if only those differ; else return None."""
    for key in (path_key, _stem):
        first, second = ({key(view.name): view for view in views} for views in (one, other))
        if first.keys() == second.keys() and len(first) == len(one):
            return [(first[name], second[name]) for name in sorted(first)]
    return None


def path_key(name: str) -> str:
    """Return the name of an image as it is compared: without ending and case."""
    return str(PurePosixPath(name).with_suffix("")).casefold()


def _stem(name: str) -> str:
    return PurePosixPath(name).stem.casefold()


def _turns(one: list[View], other: list[View]) -> NDArray[np.float64]:
    """Return [V], degrees between the rotations relative to the first view that both give each; frames cancel out."""
    first, second = (np.stack([view.viewmat[:3, :3] for view in views]) for views in (one, other))
    between = (first @ first[0].T) @ (second @ second[0].T).transpose(0, 2, 1)
    cosines = (np.trace(between, axis1=1, axis2=2) - 1) / 2
    return np.asarray(np.degrees(np.arccos(np.clip(cosines, -1, 1))))


def _distances(views: list[View]) -> NDArray[np.float64]:
    """Return [V], distances of the cameras from their middle, in units of the mean distance."""
    centers = np.stack([view.center for view in views])
    distances = np.linalg.norm(centers - centers.mean(axis=0), axis=1)
    return np.asarray(distances / max(float(distances.mean()), np.finfo(np.float64).tiny))
