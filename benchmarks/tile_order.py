"""What the order of tiles is worth on a GPU: a model of its multiprocessors with the tiles of the gauge's scenes.

    PYTHONPATH=.:scripts python -m benchmarks.tile_order        # in the checkout; --scene as in benchmarks/gauge.py

The CPU makes each scene's lists and blends them. A block's work is the intersections that its warps evaluate, counted
from the masks, at the instructions that the gauge counts for the kernel. Blocks go to 132 multiprocessors in the order
of the launch, each to the first that has room; those of a multiprocessor share it evenly, and none is faster alone
than its warps can issue. Printed are the microseconds from the first block's start to the last one's end: row by row,
by descending list length in levels (cuda/kernels/order_tiles.cuh has 64), and by descending work, which no kernel knows
beforehand. Latency, caches and the kernel that orders are left out.
"""

from __future__ import annotations

import argparse
import heapq
import json
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks import roofline
from benchmarks.gauge import DEFAULT_SCENES, SCENES, Scene
from splatcli.native.backend import Backend
from splatcli.rasterizer.context import RasterContext, tiles_of, view_of

MULTIPROCESSORS, SCHEDULERS = 132, 4
#: Shares of a scheduler's issue slots that one warp fills alone: those that are tried.
ALONE = (0.1, 0.2, 0.3)
#: As in cuda/kernels/blend_vjp.cuh.
PARTS, LONG_ISECTS, LONG_SHARE = 4, 512, 2048


@dataclass(frozen=True)
class Kernel:
    """A blending kernel: its name, 4x4 blocks of each warp as bits of a mask, and resident blocks a multiprocessor."""

    name: str
    warps: tuple[int, ...]
    resident: int


FORWARD = Kernel("blend_fast<false>", (0x0033, 0x00CC, 0x3300, 0xCC00), 10)
BACKWARD = Kernel("blend_vjp_fast<false, false>", (0x00FF, 0xFF00), 10)

#: Instructions of a block and of a warp's round over 32 intersections, beside those of each one that it evaluates.
A_BLOCK, A_ROUND = 150.0, 60.0


# ---- work ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lists:
    """Of each tile: list length and intersections up to the last that is evaluated [T]; all masks; their tiles."""

    lengths: Tensor
    ends: Tensor
    masks: Tensor
    tiles: Tensor

    @classmethod
    def of(cls, scene: Scene) -> Lists:
        camera, gaussians = scene.cameras[-1], scene.gaussians
        context = RasterContext(Backend.cpu())
        view = view_of(camera, sh_degree=gaussians.sh_degree, antialiased=False, with_depth=False)
        context.bin(view, context.project(view, gaussians))
        image, alpha = torch.empty(camera.height, camera.width, 3), torch.empty(camera.height, camera.width)
        context.blend(view, torch.zeros(3), image, alpha, None)
        count = tiles_of(view)
        starts = context.arena.take("tile_starts", 0, torch.int64)[: count + 1]
        ends = context.arena.take("tile_ends", 0, torch.int32)[:count].long()
        masks = context.arena.take("isect_masks", 0, torch.int16)[: int(starts[-1])].int() & 0xFFFF
        lengths = starts.diff()
        tiles = torch.repeat_interleave(torch.arange(count), lengths)
        evaluated = torch.arange(len(masks)) - starts[:-1][tiles] < ends[tiles]
        return cls(lengths, ends, masks[evaluated], tiles[evaluated])

    def work(self, kernel: Kernel, instructions: float) -> Tensor:
        """Return [T] instructions of each tile, which add up to ``instructions``."""
        fixed = A_BLOCK + A_ROUND * len(kernel.warps) * ((self.ends + 31) // 32)
        hits = torch.zeros(len(self.lengths))
        for bits in kernel.warps:
            hits.index_add_(0, self.tiles, (self.masks & bits != 0).float())
        return fixed + hits * ((instructions - float(fixed.sum())) / float(hits.sum()))


def by_length(lengths: list[int], levels: int) -> list[int]:
    """Return the tiles by descending list length, in ``levels`` equal steps of the longest, else in their order."""
    most = max(lengths) + 1
    return sorted(range(len(lengths)), key=lambda t: -(lengths[t] * levels // most))


def launch_order(lists: Lists, order: list[int], work: list[float], backward: bool) -> list[float]:
    """Return the work of each block in the order of the launch; backward a long tile is cut, its later parts first."""
    if not backward:
        return [work[tile] for tile in order]
    ends, total = lists.ends.tolist(), int(lists.lengths.sum())
    is_long = [end > LONG_ISECTS and end * LONG_SHARE > total for end in ends]
    scouts = -(-len(order) // 32)
    blocks: list[float] = []
    # Replaying an intersection is a third of its work here.
    for part in range(1, PARTS):
        for scout in range(scouts):
            mine = [tile for tile in order[scout::scouts] if is_long[tile]]
            blocks.append(A_BLOCK + sum(work[tile] / PARTS * (1 + part / 3) for tile in mine))
    return blocks + [work[tile] / PARTS if is_long[tile] else work[tile] for tile in order]


# ---- multiprocessors -------------------------------------------------------------------------------------------------


def makespan(blocks: list[float], kernel: Kernel, alone: float) -> float:
    """Return the cycles from the first block's start to the last one's end."""
    most, each = SCHEDULERS * roofline.EFFICIENCY, len(kernel.warps) * alone
    # By multiprocessor: work that each of its blocks has got so far, when that was, and the amounts at which they end.
    got, at = [0.0] * MULTIPROCESSORS, [0.0] * MULTIPROCESSORS
    ends: list[list[float]] = [[] for _ in range(MULTIPROCESSORS)]

    def rate(m: int) -> float:
        return min(each, most / len(ends[m]))

    queue = iter(blocks)
    for k, block in zip(range(MULTIPROCESSORS * kernel.resident), queue, strict=False):
        heapq.heappush(ends[k % MULTIPROCESSORS], block)
    events = [(ends[m][0] / rate(m), m) for m in range(MULTIPROCESSORS) if ends[m]]
    heapq.heapify(events)
    now = 0.0
    while events:
        now, m = heapq.heappop(events)
        got[m], at[m] = ends[m][0], now
        heapq.heappop(ends[m])
        block = next(queue, None)
        if block is not None:
            heapq.heappush(ends[m], got[m] + block)
        if ends[m]:
            heapq.heappush(events, (now + (ends[m][0] - got[m]) / rate(m), m))
    return now


def microseconds(lists: Lists, kernel: Kernel, work: list[float], order: list[int], alone: float) -> float:
    """Return the time of a launch in this order of tiles."""
    blocks = launch_order(lists, order, work, kernel is BACKWARD)
    return makespan(blocks, kernel, alone) / roofline.CLOCK * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scene", action="append", choices=list(SCENES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    counted = json.loads(roofline.RESULTS.read_text(encoding="utf-8"))["scenes"]
    for name in options.scene or DEFAULT_SCENES:
        lists = Lists.of(SCENES[name]())
        lengths = lists.lengths.tolist()
        print(f"{name}: {len(lengths)} tiles, median list {int(lists.lengths.median())}, longest {max(lengths)}")
        for kernel in (FORWARD, BACKWARD):
            work = lists.work(kernel, counted[name]["ours"][kernel.name]["instructions"]).tolist()
            orders = {
                "row by row": list(range(len(work))),
                **{f"{levels} levels": by_length(lengths, levels) for levels in (16, 32, 64, 256)},
                "by work": sorted(range(len(work)), key=lambda tile: -work[tile]),
            }
            for alone in ALONE:
                times = {label: microseconds(lists, kernel, work, order, alone) for label, order in orders.items()}
                words = [f"{label} {took:.1f} ({took / times['row by row'] - 1:+.1%})" for label, took in times.items()]
                print(f"  {kernel.name}, a warp alone {alone:.1f}, us: {', '.join(words)}")


if __name__ == "__main__":
    main()
