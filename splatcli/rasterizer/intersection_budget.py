"""Allowance: what memory a frame may take for its tile pairs, and what it has taken already."""

from __future__ import annotations

from typing import Protocol

from splatcli.native import abi
from splatcli.native.call import Backend
from splatcli.rasterizer.bands import MOST_PAIRS
from splatcli.rasterizer.memory import Arena

#: Bytes of a pair in the lists: record, row, mask.
LIST_BYTES = 4 + 4 + 2

#: Buffers that the budget is for: those whose size goes with the pairs of a view, and the sums from band to band.
PAIR_BUFFERS = ("workspace", "pair_records", "pair_rows", "pair_masks", "rows", "row_sums", "reached")


class MemoryBudget(Protocol):
    """How many bytes there are for tile pairs."""

    #: Whether the user has heard already that views are made in bands.
    told: bool

    def left(self, reusable: int = 0) -> int:
        """Now, counting ``reusable`` bytes that would be given back first."""


class IntersectionBudget:
    """Grants memory for pairs out of a budget; what was granted once is not asked for again."""

    def __init__(self, backend: Backend, budget: MemoryBudget, arena: Arena) -> None:
        self.budget = budget
        self._backend = backend
        self._arena = arena
        self._slack = arena.slack
        self._row = abi.ROW * backend.dtype.itemsize
        self._gaussians = 0
        #: Pairs that there is memory for, by whether there are rows and whether they are those of a band.
        self._granted: dict[tuple[bool, bool], int] = {}

    def left(self) -> int:
        """Bytes that there may be for pairs in all."""
        return self.budget.left(self._arena.nbytes(*PAIR_BUFFERS))

    def nbytes(self, view: abi.View, native: abi.Frame, pairs: int, with_rows: bool) -> int:
        """What is allocated for so many pairs; native.pair_bound is theirs afterwards."""
        native.pair_bound = pairs
        workspace = self._backend.call("bin_bytes", view, native)
        return workspace + pairs * (LIST_BYTES + (self._row if with_rows else 0))

    def grants(self, gaussians: int, view: abi.View, native: abi.Frame, pairs: int, *, with_rows: bool) -> bool:
        """Whether the whole view may be listed at once; if so the next buffers have the right slack."""
        if gaussians != self._gaussians:
            # Everything else that the run holds has changed with them.
            self._gaussians, self._granted = gaussians, {}
        if pairs <= self._granted.get((with_rows, False), 0):
            return True
        left, wanted = self.left(), self.nbytes(view, native, pairs, with_rows)
        if wanted > left or pairs > MOST_PAIRS:
            return False
        # Where there is no room for slack, buffers are as large as they have to be.
        self._grant((with_rows, False), pairs, wanted, left, self._slack if (1 + self._slack) * wanted <= left else 0.0)
        return True

    def most_pairs(self, view: abi.View, native: abi.Frame, with_rows: bool) -> int:
        """How many pairs a band may have."""
        left = self.left() - self._sums(with_rows)
        low, high = 0, MOST_PAIRS
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.nbytes(view, native, middle, with_rows) <= left else (low, middle - 1)
        return low

    def grant_bands(self, view: abi.View, native: abi.Frame, pairs: int, with_rows: bool) -> None:
        """Lets bands of up to ``pairs`` pairs, which fit, be listed one after another."""
        if pairs > self._granted.get((with_rows, True), 0):
            wanted = self.nbytes(view, native, pairs, with_rows) + self._sums(with_rows)
            self._grant((with_rows, True), pairs, wanted, self.left(), 0.0)

    def _sums(self, with_rows: bool) -> int:
        padded = -(-self._gaussians // abi.CHUNK) * abi.CHUNK
        return padded * (self._row + 4) if with_rows else 0

    def _grant(self, kind: tuple[bool, bool], pairs: int, wanted: int, left: int, slack: float) -> None:
        """What was kept for others is given back where it and the new do not fit together."""
        self._arena.slack = slack
        if self._arena.nbytes(*PAIR_BUFFERS) + (1 + slack) * wanted > left:
            self._arena.drop(*PAIR_BUFFERS)
            self._granted = {}
        self._granted[kind] = pairs


def round_capacity(pairs: int) -> int:
    """A quarter more, rounded up to an eighth of a power of two, so that buffers grow in few steps."""
    wanted = pairs + pairs // 4 + 1
    grain = max(1, 1 << max(0, wanted.bit_length() - 4))
    return -(-wanted // grain) * grain
