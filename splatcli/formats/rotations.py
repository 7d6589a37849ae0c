"""Quaternions as their three smallest components: the largest follows from the length, made positive by a sign."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from splatcli.formats.quantisation import Doubles

#: For each place of the largest component, the others in order.
_OTHERS = np.array([[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]])


def largest_and_rest(quats: Doubles) -> tuple[NDArray[np.int64], Doubles]:
    """([N] place of the largest component, [N, 3] the others in order) of unit quaternions [N, 4].

    The others are those of q or -q, whichever has a positive largest component; each is within sqrt(1/2) of 0.
    """
    place = np.abs(quats).argmax(axis=1)
    rows = np.arange(len(quats))
    positive = np.where(quats[rows, place] < 0, -1.0, 1.0)[:, None] * quats
    return place, positive[rows[:, None], _OTHERS[place]]


def with_largest(place: NDArray[Any], rest: NDArray[np.floating]) -> Doubles:
    """[N, 4] unit quaternions again; the largest is 0 where the others alone are longer than 1, as junk may be."""
    place = place.astype(np.int64)
    wide = rest.astype(np.float64)
    quats = np.empty((len(wide), 4))
    rows = np.arange(len(wide))
    quats[rows[:, None], _OTHERS[place]] = wide
    quats[rows, place] = np.sqrt(np.maximum(0.0, 1.0 - (wide**2).sum(axis=1)))
    return quats
