"""Gaps of a video: neighbouring frames that mapping did not join, where to take further ones, and what to match.

Names of frames are relative to images/, with the folder of their video where there are several.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import PurePosixPath

#: Frames that are added between two neighbours, at most.
_MORE = 3


def frame_name(index: int) -> str:
    """Return the file name of a frame of a video, which sorts as its index, from 0."""
    return f"frame_{index:06d}.png"


def frame_index(name: str) -> int:
    """Return the index that ``frame_name`` was given."""
    return int(PurePosixPath(name).name.removeprefix("frame_").removesuffix(".png"))


def folder_of(name: str) -> str:
    """Return the folder of a frame within images/, empty where frames lie in it."""
    folder = str(PurePosixPath(name).parent)
    return "" if folder == "." else folder


def find_gaps(names: Sequence[str], models: Iterable[set[str]]) -> list[tuple[str, str]]:
    """Return the neighbours among ``names``, in order of time, that no model of ``models`` has both of.

    Frames of different videos are no neighbours.
    """
    owner = {name: number for number, model in enumerate(models) for name in model}
    return [
        (first, second)
        for first, second in pairwise(names)
        if folder_of(first) == folder_of(second) and (first not in owner or owner[first] != owner.get(second))
    ]


def stretches_in(gaps: Sequence[tuple[str, str]], most: int) -> dict[str, list[range]]:
    """Return disjoint ranges of frame indices by folder, ascending, of which each is to give a frame; at most ``most``.

    A gap is cut into up to ``_MORE`` equal ranges, which leave out its ends.
    """
    found: dict[str, list[range]] = defaultdict(list)
    for first, second in gaps:
        start, stop = frame_index(first) + 1, frame_index(second)
        pieces = min(_MORE, most // len(gaps), stop - start)
        cuts = [start + (stop - start) * piece // max(1, pieces) for piece in range(pieces + 1)]
        found[folder_of(first)] += [range(low, high) for low, high in pairwise(cuts)]
    return {folder: stretches for folder, stretches in found.items() if stretches}
