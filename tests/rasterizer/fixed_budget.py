"""A memory budget of a known size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class FixedBudget:
    """A fixed number of bytes for tile intersections, whatever else the process holds."""

    nbytes: int
    reported: bool = False

    def left(self, reusable: int = 0) -> int:
        return self.nbytes
