"""ViewSampler: which training view comes next; a pure function of seed, epoch and position."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_UINT64 = (1 << 64) - 1


def epoch_order(num_views: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """[num_views] the permutation that one pass over the views follows.

    Views are sorted by the raw words of a Philox counter keyed with (seed, epoch): numpy guarantees those words for
    all versions, which it does not for ``Generator.permutation``.
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
        """The index, 0 to num_views - 1, of the view that ``next`` gives."""
        return int(self._order[self.position])

    def next(self) -> int:
        """The index, 0 to num_views - 1, of the next view."""
        view = self.peek()
        self.position += 1
        if self.position == self.num_views:
            self.epoch, self.position = self.epoch + 1, 0
            self._order = epoch_order(self.num_views, self.seed, self.epoch)
        return view

    def upcoming(self, count: int) -> list[int]:
        """The next views, at most ``count``, as far as this pass goes; at least one."""
        return [int(view) for view in self._order[self.position : self.position + count]]

    def state(self) -> dict[str, int]:
        """What a checkpoint keeps; with the seed it determines all views to come."""
        return {"epoch": self.epoch, "position": self.position}
