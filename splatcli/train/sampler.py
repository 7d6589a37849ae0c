"""ViewSampler: the order of the training views, a pure function of seed, epoch and position."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_UINT64 = (1 << 64) - 1


def epoch_order(num_views: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return [num_views], the order of the views in one pass.

    Views are sorted by the raw words of a Philox counter keyed with (seed, epoch). numpy guarantees these words for all
    versions, but not the result of ``Generator.permutation``.
    """
    key = np.array([seed & _UINT64, epoch], dtype=np.uint64)
    words = np.random.Philox(key=key).random_raw(num_views)
    return np.argsort(words, kind="stable").astype(np.int64)


class ViewSampler:
    """Shuffled passes over ``num_views`` views without replacement; the whole state is (epoch, position)."""

    def __init__(self, num_views: int, seed: int, *, epoch: int = 0, position: int = 0) -> None:
        if num_views < 1:
            raise ValueError("a sampler needs at least one view")
        if epoch < 0 or not 0 <= position < num_views:
            raise ValueError(f"position {position} of epoch {epoch} is not among {num_views} views")
        self.num_views = num_views
        self.seed = seed
        self.epoch = epoch
        self.position = position
        self._order = epoch_order(num_views, seed, epoch)

    def peek(self) -> int:
        """Return the index, 0 to num_views - 1, of the view that next() returns."""
        return int(self._order[self.position])

    def next(self) -> int:
        """Return the index, 0 to num_views - 1, of the next view, and advance."""
        view = self.peek()
        self.position += 1
        if self.position == self.num_views:
            self.epoch, self.position = self.epoch + 1, 0
            self._order = epoch_order(self.num_views, self.seed, self.epoch)
        return view

    def upcoming(self, count: int) -> list[int]:
        """Return the next views of this pass, at most ``count`` and at least one."""
        return [int(view) for view in self._order[self.position : self.position + count]]

    def state(self) -> dict[str, int]:
        """Return the state for a checkpoint; with the seed it determines all later views."""
        return {"epoch": self.epoch, "position": self.position}
