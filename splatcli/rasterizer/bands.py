"""Bands: how a view is cut into bands of lines of tiles when its pairs do not fit into memory at once, or refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from splatcli.errors import ResourceError
from splatcli.sizes import gib

#: Pairs that one band may have: the native side numbers them in 32 bits.
MOST_PAIRS = 2**31 - 1

#: Beyond the budget, Gaussians that on average cover this part of the image are no picture but a mistake; from so many
#: on, since a few walls close to the camera may well be that large.
ABSURD_SHARE = 0.5
ABSURD_COUNT = 1000

#: How many of the largest Gaussians a message names.
NAMED = 3


@dataclass(frozen=True, slots=True)
class Band:
    """Lines [begin, end) of tiles, and at least the number of pairs in them."""

    begin: int
    end: int
    pairs: int


def plan_bands(line_pairs: Sequence[int], most: int) -> list[Band]:
    """As few bands as possible of at most ``most`` pairs, top to bottom. Raises ValueError when a line has more."""
    bands: list[Band] = []
    begin, pairs = 0, 0
    for line, more in enumerate(line_pairs):
        if more > most:
            raise ValueError(f"line {line} has {more} pairs, {most} fit")
        if pairs + more > most:
            bands.append(Band(begin, line, pairs))
            begin, pairs = line, 0
        pairs += more
    return [*bands, Band(begin, len(line_pairs), pairs)]


@dataclass(frozen=True, slots=True)
class Largest:
    """The Gaussians with most tiles: which, how many, and the largest standard deviation of each, in world units."""

    ids: list[int]
    tiles: list[int]
    scales: list[float]

    @classmethod
    def of(cls, slot_ids: Tensor, slot_tiles: Tensor, chunk_visible: Tensor, log_scales: Tensor) -> Largest:
        """From projection's arrays: slot_ids, slot_tiles [chunks, C]; chunk_visible [chunks]; log_scales [N, 3]."""
        columns = torch.arange(slot_ids.shape[1], device=slot_ids.device)
        tiles = slot_tiles.long() * (columns < chunk_visible[:, None])
        best = tiles.flatten().topk(min(NAMED, tiles.numel()))
        found = best.values > 0
        ids = slot_ids.flatten()[best.indices[found]].long()
        scales = log_scales[ids].detach().amax(dim=1).double().exp()
        return cls(ids.tolist(), best.values[found].tolist(), scales.tolist())

    def __str__(self) -> str:
        each = zip(self.ids, self.tiles, self.scales, strict=True)
        return "; ".join(f"#{i}: {tiles:,} tiles, scale {scale:.3g}" for i, tiles, scale in each)


@dataclass(frozen=True, slots=True)
class IntersectionOverflow:
    """What a view that is over its budget would take.

    pairs: upper bound for the whole image. wanted: bytes for them; line_wanted: for the fullest line of tiles alone,
    None when it was not looked at. left: bytes that there are.
    """

    width: int
    height: int
    tiles: int
    visible: int
    pairs: int
    wanted: int
    line_wanted: int | None
    left: int
    largest: Largest

    def is_absurd(self) -> bool:
        """Whether these cannot be the Gaussians of a scene."""
        return self.visible >= ABSURD_COUNT and self.pairs >= ABSURD_SHARE * self.tiles * self.visible

    def refusal(self) -> ResourceError:
        each = self.pairs / max(1, self.visible)
        line = "" if self.line_wanted is None else f" ({gib(self.line_wanted)} for the fullest row of tiles alone)"
        largest = f"; the largest: {self.largest}" if self.largest.ids else ""
        return ResourceError(
            f"{self.visible:,} visible Gaussians would cover {self.pairs:,} tiles ({each:,.0f} each, of "
            f"{self.tiles:,}) of the {self.width}x{self.height} image: {gib(self.wanted)} wanted{line}, "
            f"{gib(self.left)} allowed{largest}",
            remedy=self._remedy(each),
        )

    def _remedy(self, each: float) -> str:
        if each >= ABSURD_SHARE * self.tiles:
            return (
                "Gaussians of a scene are not that large. If they come from a file of another program, check that its "
                "scales are logarithms (already activated ones look like this) and that the cameras are in its units"
            )
        if sum(self.largest.tiles) > 0.5 * self.pairs:
            return "these few have grown out of all proportion: remove them, or resume from an earlier checkpoint"
        return "a smaller --resolution or --cap-max needs less, a larger --vram-budget allows more"
