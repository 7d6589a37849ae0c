"""Gaps of a video: neighbouring frames that mapping did not join, where to take further ones, and what to match."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

#: Frames that are added between two neighbours, at most.
_MORE = 3


def frame_name(index: int) -> str:
    """Return the file name of a frame of a video, which sorts as its index, from 0."""
    return f"frame_{index:06d}.png"


def frame_index(name: str) -> int:
    """Return the index that ``frame_name`` was given."""
    return int(name.removeprefix("frame_").removesuffix(".png"))


def find_gaps(names: Sequence[str], models: Iterable[set[str]]) -> list[tuple[str, str]]:
    """Return the neighbours among ``names``, in order of time, that no model of ``models`` has both of."""
    owner = {name: number for number, model in enumerate(models) for name in model}
    return [
        (first, second) for first, second in pairwise(names) if first not in owner or owner[first] != owner.get(second)
    ]


def stretches_in(gaps: Sequence[tuple[str, str]], most: int) -> list[range]:
    """Return disjoint ranges of frame indices, ascending, of which each is to give a frame; at most ``most``.

    A gap is cut into up to ``_MORE`` equal ranges, which leave out its ends.
    """
    found = []
    for first, second in gaps:
        start, stop = frame_index(first) + 1, frame_index(second)
        pieces = min(_MORE, most // len(gaps), stop - start)
        cuts = [start + (stop - start) * piece // max(1, pieces) for piece in range(pieces + 1)]
        found += [range(low, high) for low, high in pairwise(cuts)]
    return found
