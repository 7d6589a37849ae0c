"""ViewSampler: the order of the training views, a pure function of seed, epoch and position."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

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
    """Shuffled passes over ``num_views`` views without replacement; the state is (epoch, position) and ``skipped``.

    skipped: views that passes leave out. At least one is not.
    """

    def __init__(
        self, num_views: int, seed: int, *, epoch: int = 0, position: int = 0, skipped: Iterable[int] = ()
    ) -> None:
        if num_views < 1:
            raise ValueError("a sampler needs at least one view")
        if epoch < 0 or not 0 <= position < num_views:
            raise ValueError(f"position {position} of epoch {epoch} is not among {num_views} views")
        self.num_views = num_views
        self.seed = seed
        self.epoch = epoch
        self.position = position
        self._order = epoch_order(num_views, seed, epoch)
        self.skipped: frozenset[int] = frozenset()
        self.skip(skipped)

    def skip(self, views: Iterable[int]) -> None:
        """Leave out ``views`` from now on, and no others. Raises ValueError where they are all or not among them."""
        skipped = frozenset(views)
        if not skipped < frozenset(range(self.num_views)):
            raise ValueError(f"{len(skipped)} views to leave out of {self.num_views}")
        self.skipped = skipped
        self._pass_over_skipped()

    def peek(self) -> int:
        """Return the index, 0 to num_views - 1, of the view that next() returns."""
        return int(self._order[self.position])

    def next(self) -> int:
        """Return the index, 0 to num_views - 1, of the next view, and advance."""
        view = self.peek()
        self._advance()
        self._pass_over_skipped()
        return view

    def _advance(self) -> None:
        self.position += 1
        if self.position == self.num_views:
            self.epoch, self.position = self.epoch + 1, 0
            self._order = epoch_order(self.num_views, self.seed, self.epoch)

    def _pass_over_skipped(self) -> None:
        while self.peek() in self.skipped:
            self._advance()

    def upcoming(self, count: int) -> list[int]:
        """Return the next views of this pass, at most ``count`` and at least one."""
        left = (int(view) for view in self._order[self.position :])
        return list(islice((view for view in left if view not in self.skipped), count))

    def state(self) -> dict[str, int]:
        """Return the position for a checkpoint; with the seed and ``skipped`` it determines all later views."""
        return {"epoch": self.epoch, "position": self.position}
