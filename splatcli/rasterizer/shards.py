"""Shards: a view whose Gaussians lie in several processes. Each projects its own, and one blends the records of all.

The image is that of all Gaussians in one process, in the order of the processes: equal depths go by that order, and a
Gaussian's gradient rows are summed where they are made, in the order of its tiles as ever. So the bits are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from splatcli.gaussians import Gaussians
from splatcli.native import abi
from splatcli.native.backend import address
from splatcli.rasterizer.context import RasterContext

#: Numbers of a visible Gaussian on its way to who blends it: its record, and the tiles of its box as bits.
SENT = abi.RECORD + 1

#: Numbers on the way back: the sum of its gradient rows, and whether there was any.
RETURNED = abi.ROW + 1


@dataclass(frozen=True, slots=True)
class Shard:
    """The rows of all Gaussians that one of several processes holds: the ``rank``-th of ``size`` equal parts.

    total: Gaussians of all processes.
    """

    rank: int
    size: int
    total: int

    @property
    def first(self) -> int:
        """The row of all Gaussians that is the first one here."""
        return self.start(self.rank)

    @property
    def rows(self) -> slice:
        """Those of this process."""
        return slice(self.first, self.start(self.rank + 1))

    def __len__(self) -> int:
        return self.start(self.rank + 1) - self.first

    def start(self, rank: int) -> int:
        """The first row of ``rank``; of ``size``, how many there are."""
        return rank * self.total // self.size

    def counts(self) -> list[int]:
        """How many rows each process has, by rank."""
        return [self.start(rank + 1) - self.start(rank) for rank in range(self.size)]

    def of(self, total: int) -> Shard:
        """The part of the same process when there are ``total`` Gaussians."""
        return Shard(self.rank, self.size, total)


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What is kept of a projected view until its gradients come back, while the frame projects others.

    slots, ids: [V] of its records and their Gaussians. chunk_counts: as in the frame.
    """

    view: abi.View
    arrays: abi.GaussianArrays
    slots: Tensor
    ids: Tensor
    chunk_counts: Tensor

    @classmethod
    def of(cls, frame: RasterContext, view: abi.View, arrays: abi.GaussianArrays, slots: Tensor) -> Seen:
        """Of the view that ``frame`` has just projected; slots: those of visible_records()."""
        counts = frame.arena.take("chunk_counts", 0, torch.int64)[: 2 * -(-arrays.n // abi.CHUNK)]
        return cls(view, arrays, slots, frame.arena.take("ids", 0, torch.int32)[slots], counts.clone())

    def recall(self, frame: RasterContext, returned: Tensor) -> None:
        """Brings ``frame`` back to this view, with what came back for it [V, RETURNED]."""
        frame.arena.take("chunk_counts", 0, torch.int64)[: len(self.chunk_counts)] = self.chunk_counts
        frame.arena.take("ids", 0, torch.int32)[self.slots] = self.ids
        frame.hold(self.arrays)
        take_sums(frame, self.slots, returned)


def visible_records(frame: RasterContext, arrays: abi.GaussianArrays) -> tuple[Tensor, Tensor]:
    """([V, SENT] of the Gaussians that a projected view sees, in their order; [V] the slots of their records)."""
    frame.hold(arrays)
    _, slots = frame.seen()
    records = frame.arena.take("records", 0, frame.backend.dtype)
    records = records[: records.numel() // abi.RECORD * abi.RECORD].view(-1, abi.RECORD)[slots]
    tiles = frame.arena.take("row_counts", 0, torch.int32)[slots]
    return torch.cat([records, tiles.view(torch.float32)[:, None]], dim=1), slots


def fill_frame(frame: RasterContext, sent: Tensor) -> abi.GaussianArrays:
    """Makes ``frame`` what it is after project(), of the records [V, SENT] of several processes, one after another."""
    count, chunk, device = len(sent), abi.CHUNK, frame.backend.device
    padded = -(-count // chunk) * chunk
    records, ids, tiles, starts, counts = (
        frame.arena.take(name, numel, dtype)
        for name, numel, dtype in (
            ("records", padded * abi.RECORD, frame.backend.dtype),
            ("ids", padded, torch.int32),
            ("row_counts", padded, torch.int32),
            ("row_starts", padded, torch.int32),
            ("chunk_counts", 2 * (padded // chunk), torch.int64),
        )
    )
    records[: count * abi.RECORD].view(count, abi.RECORD).copy_(sent[:, : abi.RECORD])
    ids[:count] = torch.arange(count, dtype=torch.int32, device=device)
    tiles[:padded] = 0
    tiles[:count] = sent[:, abi.RECORD].contiguous().view(torch.int32)
    per_chunk = counts[: 2 * (padded // chunk)].view(padded // chunk, 2)
    per_chunk[:, 0] = (count - torch.arange(0, padded, chunk, device=device)).clamp(max=chunk)
    per_chunk[:, 1] = tiles[:padded].view(padded // chunk, chunk).sum(dim=1, dtype=torch.int64)
    native = frame.native
    native.records, native.ids, native.chunk_counts = address(records), address(ids), address(counts)
    native.row_counts, native.row_starts = address(tiles), address(starts)
    native.visible, native.pair_bound = count, int(per_chunk[:, 1].sum())
    if frame.counters is not None:
        native.visible = padded
        frame.counters.copy_(torch.tensor([count, native.pair_bound, 0, 0]))
    # Nobody reads the parameters of what is projected; they are there to be counted.
    blank = Gaussians(*(sent.new_empty(count, *shape) for shape in ((3,), (4,), (3,), (), (3,), (0, 3))))
    arrays = frame.backend.arrays(blank)
    frame.hold(arrays)
    return arrays


def returned_sums(frame: RasterContext, count: int) -> Tensor:
    """[count, RETURNED] what blend_vjp has left for each record of fill_frame()."""
    sums = frame.summed_rows()[:count]
    reached = frame.arena.take("reached", 0, torch.int32)[:count]
    return torch.cat([sums, reached.view(torch.float32)[:, None]], dim=1)


def take_sums(frame: RasterContext, slots: Tensor, returned: Tensor) -> None:
    """Puts what came back [V, RETURNED] for the records in ``slots`` where project_vjp looks for it."""
    frame.take_sums(slots, returned[:, : abi.ROW], returned[:, abi.ROW].contiguous().view(torch.int32))
