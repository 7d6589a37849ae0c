"""Morton order: what is near in space becomes near in memory, which then is read in longer pieces and packs better."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: Cells along an axis: 2**21 three times fit into 63 bits.
_BITS = 21


def morton_order(means: NDArray[np.floating]) -> NDArray[np.int64]:
    """[N] the order of positions [N, 3] along a Z curve through their bounds."""
    if not len(means):
        return np.zeros(0, np.int64)
    low = means.min(axis=0).astype(np.float64)
    extent = means.max(axis=0) - low
    cells = (means - low) / np.where(extent > 0, extent, 1.0) * (2**_BITS - 1)
    code = np.zeros(len(means), np.uint64)
    for axis in range(3):
        code |= _spread(cells[:, axis].astype(np.uint64)) << np.uint64(axis)
    return np.argsort(code, kind="stable")


def _spread(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each of the 21 lowest bits moved to three times its place."""
    for shift, mask in (
        (32, 0x001F00000000FFFF),
        (16, 0x001F0000FF0000FF),
        (8, 0x100F00F00F00F00F),
        (4, 0x10C30C30C30C30C3),
        (2, 0x1249249249249249),
    ):
        bits = (bits | bits << np.uint64(shift)) & np.uint64(mask)
    return bits
