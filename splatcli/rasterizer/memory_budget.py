"""Memory of a device: free bytes, reused buffers, the budget of tile intersections, and bands of tile rows.

A view whose tile intersections do not fit at once is made in bands of tile rows, or refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from splatcli import machine
from splatcli.errors import ResourceError
from splatcli.native import abi
from splatcli.native.backend import Backend
from splatcli.sizes import gib

#: The part of a device's free memory that a run may take: allocators round up, and other processes use it too.
SHARE = 0.9

#: The part of a limit that tile intersections may take: densification needs the rest, since it makes new rows before it
#: frees the old ones. A view with more intersections is made in bands.
ISECTS_SHARE = 0.5


@dataclass(slots=True)
class MemoryBudget:
    """How many bytes a run may hold on its device.

    limit: in all, tensors and (on the CPU) the process itself; None: whatever the device has free.
    offloads: whether what lies in files that are mapped is not counted, see held_memory().
    reported: whether the user has been warned already that views are made in bands.
    """

    device: torch.device
    limit: int | None = None
    offloads: bool = False
    reported: bool = False

    def left(self, reusable: int = 0) -> int:
        """Return the bytes that tile intersections may take now, with ``reusable`` bytes that would be freed first."""
        left = int(SHARE * (free_memory(self.device) + reusable))
        if self.limit is not None:
            left = min(
                left,
                self.limit - held_memory(self.device, offloads=self.offloads) + reusable,
                int(ISECTS_SHARE * self.limit),
            )
        return max(0, left)


class Arena:
    """Named buffers that only grow, so that a training loop stops allocating after its first views.

    slack: the part by which a growing buffer exceeds the requested size.
    isect_slack: the same for ISECT_BUFFERS; IntersectionBudget changes it.
    """

    def __init__(self, device: torch.device, slack: float = 0.25) -> None:
        self.device = device
        self.slack = self.isect_slack = slack
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Return at least ``numel`` uninitialised numbers, in the same memory as last time where it suffices."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < numel or buffer.dtype != dtype:
            # Freed before the new one is made: the two never exist together.
            self._buffers.pop(name, None)
            del buffer
            slack = self.isect_slack if name in ISECT_BUFFERS else self.slack
            buffer = torch.empty(max(numel + int(slack * numel), 64), dtype=dtype, device=self.device)
            self._buffers[name] = buffer
        return buffer

    def drop(self, *names: str) -> None:
        """Free the named buffers."""
        for name in names:
            self._buffers.pop(name, None)

    def buffers(self) -> list[Tensor]:
        """Return all buffers."""
        return list(self._buffers.values())

    def nbytes(self, *names: str) -> int:
        """Return the bytes of the named buffers."""
        return sum(self._buffers[name].nbytes for name in names if name in self._buffers)


def free_memory(device: torch.device) -> int:
    """Return the bytes that can be allocated now on the device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return machine.free_memory()


def held_memory(device: torch.device, *, offloads: bool = False) -> int:
    """Return the bytes that this process holds: tensors on a GPU, all resident memory on the CPU.

    offloads: on the CPU, without pages of files, which the system evicts when it needs the memory.
    """
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return machine.held_memory(without_files=offloads)


#: Most tile intersections of a band: the native side numbers them in 32 bits.
MAX_ISECTS = 2**31 - 1

#: A view beyond the budget whose Gaussians cover this part of the image on average is an error. It needs this many
#: Gaussians to be one: a few walls close to the camera may be that large.
ABSURD_SHARE = 0.5
ABSURD_COUNT = 1000

#: The number of largest Gaussians that a message names.
NAMED = 3


@dataclass(frozen=True, slots=True)
class Band:
    """Tile rows [begin, end), and an upper bound of their tile intersections."""

    begin: int
    end: int
    isects: int


def plan_bands(tile_row_isects: Sequence[int], most: int) -> list[Band]:
    """Return as few bands as possible of at most ``most`` tile intersections, top to bottom.

    Raises ValueError when a tile row has more.
    """
    bands: list[Band] = []
    begin, isects = 0, 0
    for tile_row, more in enumerate(tile_row_isects):
        if more > most:
            raise ValueError(f"tile row {tile_row} has {more} tile intersections, {most} fit")
        if isects + more > most:
            bands.append(Band(begin, tile_row, isects))
            begin, isects = tile_row, 0
        isects += more
    return [*bands, Band(begin, len(tile_row_isects), isects)]


@dataclass(frozen=True, slots=True)
class Largest:
    """The Gaussians with most tiles: indices, tiles, and the largest standard deviation of each, in world units."""

    ids: list[int]
    tiles: list[int]
    scales: list[float]

    @classmethod
    def of(cls, slot_ids: Tensor, slot_tiles: Tensor, chunk_visible: Tensor, log_scales: Tensor) -> Largest:
        """Find them in projection's arrays.

        slot_ids, slot_tiles: [chunks, C]. chunk_visible: [chunks]. log_scales: [N, 3].
        """
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
    """The tile intersections of a view that is over its budget, for the error message.

    isects: upper bound for the whole image. wanted: bytes for them; tile_row_wanted: bytes for the fullest tile row
    alone, None when it was not counted. left: bytes that are available.
    """

    width: int
    height: int
    tiles: int
    visible: int
    isects: int
    wanted: int
    tile_row_wanted: int | None
    left: int
    largest: Largest

    def is_absurd(self) -> bool:
        """Return whether these cannot be the Gaussians of a scene."""
        return self.visible >= ABSURD_COUNT and self.isects >= ABSURD_SHARE * self.tiles * self.visible

    def refusal(self) -> ResourceError:
        """Return the error with the counts, the largest Gaussians and the likely cause."""
        each = self.isects / max(1, self.visible)
        row = self.tile_row_wanted
        alone = "" if row is None else f" ({gib(row)} for the fullest row of tiles alone)"
        largest = f"; the largest: {self.largest}" if self.largest.ids else ""
        return ResourceError(
            f"{self.visible:,} visible Gaussians would cover {self.isects:,} tiles ({each:,.0f} each, of "
            f"{self.tiles:,}) of the {self.width}x{self.height} image: {gib(self.wanted)} wanted{alone}, "
            f"{gib(self.left)} allowed{largest}",
            remedy=self._remedy(each),
        )

    def _remedy(self, each: float) -> str:
        if each >= ABSURD_SHARE * self.tiles:
            return (
                "Gaussians of a scene are not that large. If they come from a file of another program, check that its "
                "scales are logarithms (already activated ones look like this) and that the cameras are in its units"
            )
        if sum(self.largest.tiles) > 0.5 * self.isects:
            return "these few have grown out of all proportion: remove them, or resume from an earlier checkpoint"
        return "a smaller --resolution or --cap-max needs less, a larger --vram-budget allows more"


#: Bytes of a tile intersection in the lists: Gaussian, row of its gradient, mask.
LIST_BYTES = 4 + 4 + 2

#: Buffers that the budget bounds: those that scale with a view's tile intersections, and the sums from band to band.
ISECT_BUFFERS = (
    "workspace",
    "isect_gaussians",
    "isect_grad_rows",
    "isect_masks",
    "isect_grads",
    "channel_grads",
    "isect_grad_sums",
    "reached",
)


class IntersectionBudget:
    """Memory for tile intersections out of a budget; what was granted once is not checked again."""

    def __init__(self, backend: Backend, budget: MemoryBudget, arena: Arena) -> None:
        self.budget = budget
        self._backend = backend
        self._arena = arena
        self._slack = arena.slack
        self._row = abi.ISECT_GRAD * backend.dtype.itemsize
        self._gaussians = 0
        #: Granted intersections by (with gradients, of a band).
        self._granted: dict[tuple[bool, bool], int] = {}

    def left(self) -> int:
        """Return the bytes that tile intersections may take in all."""
        return self.budget.left(self._arena.nbytes(*ISECT_BUFFERS))

    def nbytes(self, view: abi.View, native: abi.Frame, isects: int, with_grads: bool) -> int:
        """Return the bytes for ``isects`` tile intersections, and set native.max_isects to them."""
        native.max_isects = isects
        workspace = self._backend.call("bin_bytes", view, native)
        channels = min(native.channels.contents.count, abi.CHANNELS_AT_ONCE) if native.channels else 0
        row = self._row + channels * self._backend.dtype.itemsize
        return workspace + isects * (LIST_BYTES + (row if with_grads else 0))

    def grants(
        self, gaussians: int, view: abi.View, native: abi.Frame, isects: int, *, with_grads: bool, has_slack: bool
    ) -> bool:
        """Return whether the whole view may be listed at once; if so, the next buffers have the right slack.

        has_slack: ``isects`` is a capacity that exceeds the count by a slack already, see round_capacity().
        """
        if gaussians != self._gaussians:
            # All other memory of the run has changed with their number.
            self._gaussians, self._granted = gaussians, {}
        if isects <= self._granted.get((with_grads, False), 0):
            return True
        left, wanted = self.left(), self.nbytes(view, native, isects, with_grads)
        if wanted > left or isects > MAX_ISECTS:
            return False
        # Where slack does not fit, buffers have exactly the needed size.
        exact = has_slack or (1 + self._slack) * wanted > left
        self._grant((with_grads, False), isects, wanted, left, 0.0 if exact else self._slack)
        return True

    def max_isects(self, view: abi.View, native: abi.Frame, with_grads: bool) -> int:
        """Return the largest number of tile intersections that a band may have."""
        left = self.left() - self._sums(with_grads)
        low, high = 0, MAX_ISECTS
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.nbytes(view, native, middle, with_grads) <= left else (low, middle - 1)
        return low

    def grant_bands(self, view: abi.View, native: abi.Frame, isects: int, with_grads: bool) -> None:
        """Grant bands of up to ``isects`` tile intersections, which fit, to be listed one after another."""
        if isects > self._granted.get((with_grads, True), 0):
            wanted = self.nbytes(view, native, isects, with_grads) + self._sums(with_grads)
            self._grant((with_grads, True), isects, wanted, self.left(), 0.0)

    def _sums(self, with_grads: bool) -> int:
        padded = -(-self._gaussians // abi.CHUNK) * abi.CHUNK
        return padded * (self._row + 4) if with_grads else 0

    def _grant(self, kind: tuple[bool, bool], isects: int, wanted: int, left: int, slack: float) -> None:
        """Record the grant, and free the old buffers where they and the new ones do not fit together."""
        self._arena.isect_slack = slack
        if self._arena.nbytes(*ISECT_BUFFERS) + (1 + slack) * wanted > left:
            self._arena.drop(*ISECT_BUFFERS)
            self._granted = {}
        self._granted[kind] = isects


def round_capacity(isects: int) -> int:
    """Return a quarter more, rounded up to an eighth of a power of two, so that buffers grow in few steps."""
    wanted = isects + isects // 4 + 1
    grain = max(1, 1 << max(0, wanted.bit_length() - 4))
    return -(-wanted // grain) * grain
