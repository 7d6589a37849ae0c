"""Shards: a view whose Gaussians lie in several processes. Each projects its own, and one blends the records of all.

The image is that of all Gaussians in one process, in the order of the processes: equal depths go by that order, and a
Gaussian's gradient rows are summed where they are made, in the order of its tiles as ever. So the bits are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from splatcli.gaussians import Gaussians
from splatcli.native import abi
from splatcli.native.call import Backend, address
from splatcli.raster.allowance import PairBudget
from splatcli.raster.frame import Frame

#: Numbers of a visible Gaussian on its way to who blends it: its record, and the tiles of its box as bits.
SENT = abi.RECORD + 1

#: Numbers on the way back: the sum of its gradient rows, and whether there was any.
RETURNED = abi.ROW + 1


def visible_records(frame: Frame, arrays: abi.GaussianArrays) -> tuple[Tensor, Tensor]:
    """([V, SENT] of the Gaussians that a projected view sees, in their order; [V] the slots of their records)."""
    frame.hold(arrays)
    _, slots = frame.seen()
    records = frame.arena.take("records", 0, frame.backend.dtype)
    records = records[: records.numel() // abi.RECORD * abi.RECORD].view(-1, abi.RECORD)[slots]
    tiles = frame.arena.take("row_counts", 0, torch.int32)[slots]
    return torch.cat([records, tiles.view(torch.float32)[:, None]], dim=1), slots


def frame_of(backend: Backend, sent: Tensor, budget: PairBudget | None) -> tuple[Frame, abi.GaussianArrays]:
    """A frame as after project(), of the records [V, SENT] of several processes, one after another."""
    frame = Frame(backend, budget, slack=0.0)
    count, chunk = len(sent), abi.CHUNK
    padded = -(-count // chunk) * chunk
    records, ids, tiles, starts, counts = (
        frame.arena.take(name, numel, dtype)
        for name, numel, dtype in (
            ("records", padded * abi.RECORD, backend.dtype),
            ("ids", padded, torch.int32),
            ("row_counts", padded, torch.int32),
            ("row_starts", padded, torch.int32),
            ("chunk_counts", 2 * (padded // chunk), torch.int64),
        )
    )
    records[: count * abi.RECORD].view(count, abi.RECORD).copy_(sent[:, : abi.RECORD])
    ids[:count] = torch.arange(count, dtype=torch.int32)
    tiles[:padded] = 0
    tiles[:count] = sent[:, abi.RECORD].contiguous().view(torch.int32)
    per_chunk = counts[: 2 * (padded // chunk)].view(padded // chunk, 2)
    per_chunk[:, 0] = (count - torch.arange(0, padded, chunk)).clamp(max=chunk)
    per_chunk[:, 1] = tiles[:padded].view(padded // chunk, chunk).sum(dim=1, dtype=torch.int64)
    native = frame.native
    native.records, native.ids, native.chunk_counts = address(records), address(ids), address(counts)
    native.row_counts, native.row_starts = address(tiles), address(starts)
    native.visible, native.pair_bound = count, int(per_chunk[:, 1].sum())
    # Nobody reads the parameters of what is projected; they are there to be counted.
    blank = Gaussians(*(sent.new_zeros(count, *shape) for shape in ((3,), (4,), (3,), (), (3,), (0, 3))))
    frame.stand_for(blank)
    return frame, backend.arrays(blank)


def returned_sums(frame: Frame, count: int) -> Tensor:
    """[count, RETURNED] what blend_vjp has left for each record of frame_of()."""
    sums = frame.summed_rows()[:count]
    reached = frame.arena.take("reached", 0, torch.int32)[:count]
    return torch.cat([sums, reached.view(torch.float32)[:, None]], dim=1)


def take_sums(frame: Frame, slots: Tensor, returned: Tensor) -> None:
    """Puts what came back [V, RETURNED] for the records in ``slots`` where project_vjp looks for it."""
    frame.take_sums(slots, returned[:, : abi.ROW], returned[:, abi.ROW].contiguous().view(torch.int32))
