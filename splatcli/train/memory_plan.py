"""MemoryPlan: the memory that a run needs, before it allocates any: the cap of the Gaussians, or an early refusal.

Tile intersections are counted in the fullest view of the present Gaussians. Later there are more and smaller Gaussians;
the number of intersections grows with a power below one of theirs (_ISECTS_POWER). A view whose intersections do not
fit is rendered in bands, so that they never need more than a part of the memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from splatcli.config import Config, resolve
from splatcli.errors import ResourceError
from splatcli.gaussians import SHN_COUNTS, Gaussians
from splatcli.native import abi
from splatcli.native.backend import Backend
from splatcli.native.build import NoCompilerError
from splatcli.rasterizer.context import tile_rows_of
from splatcli.rasterizer.memory_budget import (
    ABSURD_COUNT,
    ABSURD_SHARE,
    ISECTS_SHARE,
    NAMED,
    SHARE,
    IntersectionOverflow,
    Largest,
    free_memory,
    held_memory,
)
from splatcli.rasterizer.memory_estimate import (
    IsectCount,
    MemoryEstimate,
    Workload,
    predict_boxes,
    predict_isects,
    render_memory,
    shared_memory_estimate,
    shN_bytes,
    state_bytes,
    step_memory,
    tile_row_bytes,
    tiles_of_each,
)
from splatcli.rasterizer.offload import DEVICE_STORAGE, ROWS, TensorStorage
from splatcli.rasterizer.rendering import backend_for
from splatcli.scene.camera import Camera
from splatcli.scene.scene import Scene
from splatcli.sizes import gib
from splatcli.train.state import Placement
from splatcli.train.training_images import IMAGE_MEMORY_SHARE, training_image_bytes

#: Tile intersections of the fullest view grow with this power of the number of Gaussians. It is 0.68 from the points of
#: a scene to ten times as many (docs/memory.md).
_ISECTS_POWER = 0.75

#: While a view is scored, its intersections may need this part of what those of a step may need.
_SCORE_ISECTS = 0.25

#: Bytes of a pixel while a held-out view is scored: both images, and their differences in float64; 108 to 132 measured.
_SCORE_PIXEL = 150
#: The same with a mask on a GPU, where plain torch filters all moments of the images.
_TORCH_SSIM_PIXEL = 420

#: Bytes of a row while a refinement is computed, beside the new state.
_REFINE_ROW = 64

#: Pieces of shN in memory at once while missed steps are caught up on.
_PIECES = 6
#: Bytes of a row of the columns that a refinement reads where processes hold shards: all but colours, and statistics.
_GEOMETRY_ROW = 4 * (3 + 4 + 3 + 1 + 2)

#: What a process holds is rounded up to this, so that two runs find the same cap.
_GRAIN = 256 << 20

#: Gaussians that are projected: in all cameras together to find the fullest view, and in that view.
_SAMPLED = 400_000
_SAMPLED_IN_FULLEST = 500_000
#: Cameras that are compared, spread over all: each takes two milliseconds.
_CAMERAS = 1_000


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of a run as a function of its number of Gaussians.

    held: bytes of everything else; on the CPU of the process itself. images: bytes that training images may take.
    work: the largest image, and the intersections of the fullest view, for the present Gaussians. camera: of that view.
    densifies: whether the count can still grow. limit: bytes that the run may take in all. batched: whether gradients
    of several views are summed. storage: of shN. score_pixel: bytes of a pixel while a view is scored.
    """

    backend: Backend
    held: int
    images: int
    work: Workload
    camera: Camera
    densifies: bool
    limit: int
    batched: bool = False
    storage: TensorStorage = DEVICE_STORAGE
    score_pixel: int = _SCORE_PIXEL

    def min_bytes(self) -> int:
        """Return the bytes without which not even a step in bands is possible."""
        step = self._step(self.work)
        row = min(step.isects, tile_row_bytes(self.backend, self.work))
        return self.held + self._batch_bytes(self.work.gaussians) + step.total - step.isects + row

    def start_bytes(self) -> int:
        """Return the bytes of the first steps, in bands if necessary."""
        return self.held + self.images + self._batch_bytes(self.work.gaussians) + self._banded(self._step(self.work))

    def peak_bytes(self, count: int) -> int:
        """Return the bytes at the worst moment with ``count`` Gaussians."""
        work = self._work_at(count)
        step = self._step(work)
        sums = self._band_rows(work) * (4 * abi.ISECT_GRAD + 4) if step.isects > self._max_isect_bytes() else 0
        beside = self.held + self.images + self._batch_bytes(count)
        return beside + self._banded(step) + sums + self._between_steps(work)

    def max_gaussians(self) -> int:
        """Return the most Gaussians that fit, rounded down to three digits."""
        return _largest(lambda count: self.peak_bytes(count) <= self.limit)

    def offloaded_bytes(self, count: int) -> int:
        """Return the bytes that are offloaded at the worst moment with ``count`` Gaussians."""
        one = self.storage.nbytes(shN_bytes(count, self.work.sh_degree))
        # Coefficients and two moments; twice that while rows are replaced, or the coefficients while a view is scored.
        return (6 if self.densifies else 4) * one

    def max_offloaded(self, free: int) -> int:
        """Return the most Gaussians that can be offloaded into ``free`` bytes, rounded down to three digits."""
        return _largest(lambda count: self.offloaded_bytes(count) <= free)

    def overflow(self, gaussians: Gaussians) -> IntersectionOverflow:
        """Return the report on the fullest view, whose intersections do not fit."""
        tiles, scales = tiles_of_each(gaussians, self.camera), gaussians.log_scales.detach().amax(dim=1)
        # Those with most tiles, the largest first among equals.
        by_scale = scales.argsort(descending=True, stable=True)
        worst = by_scale[tiles[by_scale].argsort(descending=True, stable=True)[:NAMED]]
        step = step_memory(self.backend, self.work)
        return IntersectionOverflow(
            width=self.camera.width,
            height=self.camera.height,
            tiles=_tiles(self.camera),
            visible=self.work.isects.visible,
            isects=self.work.isects.boxes,
            wanted=step.isects,
            tile_row_wanted=None,
            left=max(0, self.limit - self.held - (step.total - step.isects)),
            largest=Largest(worst.tolist(), tiles[worst].tolist(), scales[worst].double().exp().tolist()),
        )

    def is_absurd(self) -> bool:
        """Return whether these cannot be the Gaussians of a scene, and their intersections do not fit."""
        isects = self.work.isects
        covers = isects.boxes >= ABSURD_SHARE * _tiles(self.camera) * isects.visible
        step = step_memory(self.backend, self.work)
        return isects.visible >= ABSURD_COUNT and covers and self.held + step.total > self.limit

    def _step(self, work: Workload) -> MemoryEstimate:
        return step_memory(self.backend, work)

    def _banded(self, step: MemoryEstimate) -> int:
        """Return the bytes of a step, in bands if its intersections take more than their part of the memory."""
        return step.total - step.isects + min(step.isects, self._max_isect_bytes())

    def _max_isect_bytes(self) -> int:
        return int(ISECTS_SHARE * self.limit)

    def _batch_bytes(self, count: int) -> int:
        """Return the bytes of a view's gradients, their sum, and those of other ranks, where steps have batches."""
        return 3 * 4 * (16 + 3 * SHN_COUNTS[self.work.sh_degree]) * count if self.batched else 0

    def _work_at(self, count: int) -> Workload:
        """Return the workload of a step with ``count`` Gaussians."""
        factor = math.pow(count / max(1, self.work.gaussians), _ISECTS_POWER)
        return replace(self.work, gaussians=count, isects=self.work.isects.times(factor))

    def _band_rows(self, work: Workload) -> int:
        """Return the Gaussians whose gradients are summed from band to band."""
        return work.gaussians

    def _scoring(self, work: Workload) -> int:
        """Return the bytes of scoring a view, beside the Gaussians that it renders."""
        isects = min(render_memory(self.backend, work).isects, int(_SCORE_ISECTS * self._max_isect_bytes()))
        return isects + work.width * work.height * self.score_pixel

    def _between_steps(self, work: Workload) -> int:
        """Return the bytes of scoring a view, or of replacing rows by new ones, beside a step's buffers."""
        count, degree = work.gaussians, work.sh_degree
        # shN flushed: all of it, or that which is offloaded piece by piece.
        pieces = _PIECES * shN_bytes(min(count, ROWS), degree) if work.offloads else 0
        scoring = 0 if work.offloads else shN_bytes(count, degree)
        scoring += render_memory(self.backend, work).projected + self._scoring(work)
        refining = state_bytes(count, degree, offloads=work.offloads) + _REFINE_ROW * count if self.densifies else 0
        return max(scoring, refining) + pieces


@dataclass(frozen=True, slots=True)
class ShardedMemoryPlan(MemoryPlan):
    """The same of a process that holds one of ``shards`` shards; ``work`` and counts are of all Gaussians."""

    shards: int = 1

    def _step(self, work: Workload) -> MemoryEstimate:
        return shared_memory_estimate(self.backend, work, self.shards)

    def _batch_bytes(self, count: int) -> int:
        return 0  # shared_memory_estimate() has the sums

    def _work_at(self, count: int) -> Workload:
        work = MemoryPlan._work_at(self, count)
        # More Gaussians are smaller, but the same part of them is visible.
        visible = self.work.isects.times(count / max(1, self.work.gaussians)).visible
        return replace(work, isects=replace(work.isects, visible=visible))

    def _band_rows(self, work: Workload) -> int:
        return work.isects.visible

    def _between_steps(self, work: Workload) -> int:
        count, degree = work.gaussians, work.sh_degree
        own = -(-count // self.shards)
        column = 4 * 3 * max(1, SHN_COUNTS[degree])  # the widest one
        scoring = column * own + self._scoring(work)
        saving = column * (count + own)
        refining = 0
        if self.densifies:
            # The geometry before, after and sorted, the refinement, the new state, and columns in transit.
            refining = (3 * _GEOMETRY_ROW + _REFINE_ROW) * count + state_bytes(own, degree) + 3 * column * own
        return max(scoring, refining, saving)


def plan_memory(
    config: Config, scene: Scene, gaussians: Gaussians, placement: Placement, *, own: int
) -> tuple[int | None, list[str]]:
    """Return the cap that the memory allows a run that starts with ``gaussians``, and sentences for the user.

    own: bytes of this state that the process holds already. The cap is ``config.memory.cap`` where that is set, and
    None without a budget. Raises ResourceError, before any large allocation, when the state and a step on it cannot
    fit.
    """
    budget, device, storage = config.memory.budget, placement.device, placement.storage
    try:
        backend = backend_for(device)
    except NoCompilerError:
        return config.memory.cap, []  # plain torch is far too slow for runs that fill a memory
    held = max(0, held_memory(device, offloads=storage.offloads) - own)
    if budget is None:
        limit = held + own + int(SHARE * free_memory(device))
    else:
        limit, held = budget, -(-held // _GRAIN) * _GRAIN
    if device.type == "cpu" and (budget is not None or config.data.cache_bytes is None):
        scene.images.limit(int(IMAGE_MEMORY_SHARE * limit))
    camera, isects = fullest_view(gaussians, [scene.cameras[i] for i in scene.train])
    largest = max((scene.cameras[i] for i in (*scene.train, *scene.test)), key=lambda c: c.width * c.height)
    plan = (MemoryPlan if placement.shards == 1 else partial(ShardedMemoryPlan, shards=placement.shards))(
        backend=backend,
        held=held,
        images=training_image_bytes(scene, device, limit, reduced=bool(config.schedule.num_downscales)),
        work=Workload(
            len(gaussians),
            gaussians.sh_degree,
            largest.width,
            largest.height,
            isects,
            colour_map=config.views.colour_map,
            depths=config.depth_lambda > 0.0,
            alpha=(config.train.alpha_lambda > 0.0 and config.train.background == "black")
            or (config.train.mask_lambda > 0.0 and scene.images.masked),
            offloads=storage.offloads,
        ),
        camera=camera,
        densifies=config.schedule.refine_start < min(config.schedule.refine_stop, config.train.iterations),
        limit=limit,
        batched=config.train.batch_size > 1,
        storage=storage,
        score_pixel=_TORCH_SSIM_PIXEL if backend.deferred and scene.images.masked else _SCORE_PIXEL,
    )
    if plan.is_absurd():
        raise plan.overflow(gaussians).refusal()
    if (needed := plan.min_bytes()) > limit:
        raise _refusal(plan, needed, budget is not None)
    if budget is not None:
        config = resolve(config, {"memory.cap": max(len(gaussians), plan.max_gaussians())})
    return config.memory.cap, _memory_notes(config, plan) + _offload_notes(config, plan)


def fullest_view(gaussians: Gaussians, cameras: Sequence[Camera]) -> tuple[Camera, IsectCount]:
    """Return the camera with most intersections, and their number; of many Gaussians and cameras a sample is taken."""
    cameras = cameras[:: -(-len(cameras) // _CAMERAS)]
    step = -(-len(gaussians) * len(cameras) // _SAMPLED) or 1
    sample = gaussians.map(lambda t: t[::step].detach().cpu())
    boxes = [predict_boxes(sample, camera) for camera in cameras]
    fullest = cameras[boxes.index(max(boxes))]
    step = -(-len(gaussians) // _SAMPLED_IN_FULLEST) or 1
    sample = gaussians.map(lambda t: t[::step].detach().cpu())
    return fullest, predict_isects(sample, fullest).times(len(gaussians) / len(sample))


def _memory_notes(config: Config, plan: MemoryPlan) -> list[str]:
    """Return sentences about the memory for the user."""
    memory, count = config.memory, plan.work.gaussians
    text = f"memory: about {gib(plan.start_bytes())} now"
    cap = config.max_gaussians() if plan.densifies else None
    limit = f"the budget is {gib(plan.limit)}" if memory.budget else f"{gib(plan.limit)} available"
    if cap is None or cap <= count:
        more = f", enough for about {plan.max_gaussians():,} Gaussians" if plan.densifies and cap is None else ""
        return [f"{text}; {limit}{more}"]
    at_cap = plan.peak_bytes(cap)
    notes = [f"{text}, {gib(at_cap)} at the cap of {cap:,} Gaussians; {limit}"]
    if cap == memory.cap:
        notes.append(f"growth stops at {cap:,} Gaussians, for which the memory suffices")
    elif at_cap > plan.limit:
        notes.append(f"the memory suffices for about {plan.max_gaussians():,} Gaussians; --cap-max {cap} is more")
    return notes


def _offload_notes(config: Config, plan: MemoryPlan) -> list[str]:
    """Return sentences about offloaded tensors. Raises ResourceError where there is no room for them."""
    storage, count, degree = plan.storage, plan.work.gaussians, plan.work.sh_degree
    if not storage.offloads:
        return []
    if degree == 0:
        return ["nothing is offloaded: at SH degree 0 there are no coefficients but the constant one"]
    now, free = 3 * storage.nbytes(shN_bytes(count, degree)), storage.free()
    if now > free:
        raise ResourceError(
            f"the SH coefficients of {count:,} Gaussians and their moments take {gib(now)} {storage.place()}; "
            f"{gib(free)} are free there",
            remedy=f"free some space there, --sh-degree {degree - 1}, or --cap-max {plan.max_offloaded(free)}",
        )
    text = f"offloaded {storage.place()}: {gib(now)} now"
    cap = config.max_gaussians() if plan.densifies else None
    peak = plan.offloaded_bytes(max(count, cap or 0))
    text += f", {gib(peak)} at most" if cap is not None or not plan.densifies else ""
    notes = [f"{text}; {gib(free)} are free there"]
    if peak > free:
        notes.append(f"that suffices for about {plan.max_offloaded(free):,} Gaussians; --cap-max takes a number")
    return notes + storage.notes()


def _largest(fits: Callable[[int], bool]) -> int:
    """Return the largest count that fits, rounded down to three digits; if a count fits, all below it do."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    grain = 10 ** max(0, len(str(low)) - 3)
    return int(low // grain * grain)


def _refusal(plan: MemoryPlan, needed: int, has_budget: bool) -> ResourceError:
    work = plan.work
    limit = "the budget is" if has_budget else "there are"
    fits = plan.max_gaussians()
    fewer = f"--cap-max {fits} starts with fewer points, " if fits else ""
    larger = "a larger --vram-budget allows more" if has_budget else "or a device with more memory"
    return ResourceError(
        f"{work.gaussians:,} Gaussians and a training step on a {work.width}x{work.height} view take at least "
        f"{gib(needed)}; {limit} {gib(plan.limit)}",
        remedy=f"-r 2, 4 or 8 for smaller images, {fewer}{larger}",
    )


def _tiles(camera: Camera) -> int:
    return -(-camera.width // abi.TILE) * tile_rows_of(camera.height)
