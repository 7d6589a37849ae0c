"""Overlap: where several models fill the same space, the one that has most Gaussians there stays.

Space is cut into cubic cells, and each cell belongs to one model. So no place is empty that a model fills, and none
is filled twice, except where a Gaussian reaches beyond its cell.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from splatcli.edit.operations import Effect
from splatcli.gaussians import Gaussians

#: A cell is as wide as the median distance to this neighbour within a model: it holds some hundred Gaussians.
NEIGHBOUR = 64
#: Gaussians of a model whose neighbours are searched.
SAMPLE = 4096


def resolve_overlap(
    parts: Sequence[Gaussians], dropped: list[Gaussians] | None = None
) -> tuple[list[Gaussians], list[Effect]]:
    """Return of each model the Gaussians in its own cells, and the effect on it. The first of equals has a cell.

    parts: with finite means, in one frame. One that loses all its cells is empty. dropped: takes what is left out.
    """
    means = [part.means.double().cpu().numpy() for part in parts]
    side = max(map(cell_side, means), default=0.0)
    if len(parts) < 2 or side <= 0.0:
        return list(parts), [Effect("--overlap densest", 0, len(part), "dropped") for part in parts]
    # Far-away Gaussians would leave the range of integers; they share the cells at its ends.
    cells = [np.clip(np.floor(place / side), -(2**40), 2**40).astype(np.int64) for place in means]
    known, place = np.unique(np.concatenate(cells), axis=0, return_inverse=True)
    per_part = np.split(place.reshape(-1), np.cumsum([len(part) for part in parts])[:-1])
    counts = np.stack([np.bincount(of_part, minlength=len(known)) for of_part in per_part])
    owner = counts.argmax(axis=0)
    left, effects = [], []
    for number, (part, of_part) in enumerate(zip(parts, per_part, strict=True)):
        own = torch.from_numpy(owner[of_part] == number).to(part.device)
        left.append(part.map(lambda tensor, own=own: tensor[own]))  # type: ignore[misc]
        if dropped is not None:
            dropped.append(part.map(lambda tensor, own=own: tensor[~own]))  # type: ignore[misc]
        effects.append(Effect("--overlap densest", int((~own).sum()), int(own.sum()), "dropped"))
    return left, effects


def cell_side(means: NDArray[np.float64]) -> float:
    """Return the side of the cells that suit a model, world units; 0 for fewer than two places. means: [N, 3]."""
    if len(means) < 2:
        return 0.0
    sample = means[:: max(1, len(means) // SAMPLE)]
    distances, _ = cKDTree(means).query(sample, k=[min(NEIGHBOUR, len(means) - 1) + 1])
    return float(np.median(distances))
