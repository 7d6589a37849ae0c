"""A model in a file of at most a given size: which Gaussians, SH coefficients and options lose least.

The rule is that of the comparison in docs/formats.md (benchmarks/target_size.py), at equal bytes on held-out views:

1. A format with a palette of harmonics (SOG) first gets a smaller palette, down to one entry for 32 Gaussians, and one
   that can store them in fewer bits (SPZ) does so.
2. Then neighbours are merged, and such a palette shrinks with their number. The SH degree stays.
3. Where harmonics are stored for each Gaussian and take a quarter of the bytes or more (PLY), a degree is left out
   rather than less than half of the Gaussians kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from splatcli.edit.simplify import simplify_in_steps
from splatcli.errors import UsageError
from splatcli.formats.format import Encoded, ExportMetadata, Format
from splatcli.formats.selection import select
from splatcli.gaussians import Gaussians

#: A smaller palette has an entry for so many Gaussians, and no fewer entries than this.
GAUSSIANS_AN_ENTRY, LEAST_ENTRIES = 32, 128
#: A degree is left out where less than this share of the bytes is asked for ...
LEAST_SHARE = 0.5
#: ... and where that leaves at most this share of them.
WORTHWHILE = 0.75
#: What a file is made to take, times the size that is asked for; the least that it may take, and the attempts at that.
AIM, ENOUGH, ATTEMPTS = 0.98, 0.9, 16


@dataclass(frozen=True, slots=True)
class Fitted:
    """A file's content and what it is made of. entries: of the palette of harmonics; None where it is not smaller."""

    encoded: Encoded
    gaussians: Gaussians
    entries: int | None

    @property
    def size(self) -> int:
        return len(self.encoded.payload)


@dataclass(frozen=True, slots=True)
class SizedFile:
    """A file to make: its format, the facts beside the Gaussians, and the bytes that it may take at most."""

    format: Format
    metadata: ExportMetadata
    most: int

    def encoded(self, gaussians: Gaussians, entries: int | None = None) -> Fitted:
        """Return the file of some Gaussians, with a palette of so many entries where one is asked for and there is one.

        gaussians: N > 0.
        """
        if entries is None or self.format.write_with_palette is None:
            assert self.format.write is not None, "format_to_write() gives formats that are written"
            return Fitted(self.format.write(gaussians, self.metadata), gaussians, None)
        return Fitted(self.format.write_with_palette(gaussians, self.metadata, entries), gaussians, entries)


def fit_size(
    gaussians: Gaussians,
    file: SizedFile,
    masses: Callable[[], NDArray[np.float64] | None],
    *,
    keep_degree: bool = False,
) -> Fitted:
    """Return a file of at most ``file.most`` bytes, and of at least ENOUGH of them where the whole model takes more.

    gaussians: on the CPU, N > 0. masses: returns what simplify_in_steps() takes, and is called where it is needed.
    keep_degree: the SH degree stays. Raises UsageError where one Gaussian takes more than that.
    """
    search = _Search(gaussians, file)
    whole = file.encoded(gaussians)
    if whole.size <= file.most:
        return whole
    one = file.encoded(gaussians.map(lambda tensor: tensor[:1]))
    if one.size > file.most:
        raise UsageError(
            f"{file.format.title} takes {one.size:,} bytes with a single Gaussian, {file.most:,} are asked for",
            where="--target-size",
            remedy=f"--target-size {-(-whole.size // 1000)}kB holds the whole model; or name another format",
        )
    if search.has_palette:
        small = file.encoded(gaussians, _entries(len(gaussians)))
        if small.size <= file.most:
            return search.between(small, whole, lambda fitted: fitted.entries or len(gaussians), search.with_entries)
        whole = small
    elif file.format.coarser and gaussians.sh_degree:
        for write in file.format.coarser:
            coarse = replace(file, format=replace(file.format, write=write))
            whole = coarse.encoded(gaussians)
            if whole.size <= file.most:
                return whole
        search = replace(search, file=coarse)
    elif not keep_degree:
        while (lower := search.degree_below(whole)) is not None:
            whole = lower
    merging = _Merging(whole.gaussians, masses())
    return search.between(one, whole, lambda fitted: len(fitted.gaussians), lambda n: search.merged(merging, n))


def _entries(count: int) -> int:
    return max(LEAST_ENTRIES, count // GAUSSIANS_AN_ENTRY)


@dataclass(frozen=True, slots=True)
class _Search:
    """Attempts at a file of some Gaussians."""

    gaussians: Gaussians
    file: SizedFile

    @property
    def has_palette(self) -> bool:
        return self.file.format.write_with_palette is not None and self.gaussians.sh_degree > 0

    def with_entries(self, entries: int) -> Fitted:
        """Return the file of all Gaussians with a palette of so many entries."""
        return self.file.encoded(self.gaussians, entries)

    def merged(self, merging: _Merging, count: int) -> Fitted:
        """Return the file of so many Gaussians."""
        return self.file.encoded(merging.to(count), _entries(count) if self.has_palette else None)

    def degree_below(self, whole: Fitted) -> Fitted | None:
        """Return the file with one SH degree less; None where it is better to merge Gaussians."""
        degree, most = whole.gaussians.sh_degree, self.file.most
        if not degree or most >= LEAST_SHARE * whole.size:
            return None
        lower = self.file.encoded(select(whole.gaussians, sh_degree=degree - 1)[0])
        return lower if most < lower.size <= WORTHWHILE * whole.size else None

    def between(
        self, fits: Fitted, large: Fitted, measure: Callable[[Fitted], int], make: Callable[[int], Fitted]
    ) -> Fitted:
        """Return a file of a measure between one that fits and one that is too large.

        Sizes are taken as linear in between. From above they come down to the target in few steps, so that Gaussians
        merged for one attempt serve the next one.
        """
        most = self.file.most
        for attempt in range(ATTEMPTS):
            low, high = measure(fits), measure(large)
            if fits.size >= ENOUGH * most or high - low < 2:
                break
            share = (AIM * most - fits.size) / (large.size - fits.size)
            share = share if attempt < ATTEMPTS // 2 else 0.5
            found = make(min(max(low + 1, round(low + share * (high - low))), high - 1))
            fits, large = (found, large) if found.size <= most else (fits, found)
        return fits


class _Merging:
    """Gaussians that become fewer; for more than at last they are merged anew."""

    def __init__(self, gaussians: Gaussians, masses: NDArray[np.float64] | None) -> None:
        self._gaussians = gaussians
        self._masses = masses
        self._count = 0
        self._steps: Iterator[Gaussians] = iter(())

    def to(self, count: int) -> Gaussians:
        """Return so many Gaussians."""
        if count > self._count:
            self._steps = simplify_in_steps(self._gaussians, self._counts(), self._masses)
        self._count = count
        return next(self._steps)

    def _counts(self) -> Iterator[int]:
        while True:
            yield self._count
