"""Forecast: the memory of a run before it takes any; how many Gaussians fit, and what cannot fit is refused.

Pairs are counted in the fullest view as the Gaussians are now. Later there are more and smaller Gaussians: their number
goes into that of the pairs by a power below one (_PAIRS_GROW). A view whose pairs do not fit is made in bands, so that
they never need more than a part of the memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from splatcli.config import Config, resolve
from splatcli.errors import ResourceError
from splatcli.gaussians import SH_REST, Gaussians
from splatcli.native import abi
from splatcli.native.backend import Backend
from splatcli.native.build import NoCompilerError
from splatcli.rasterizer.context import lines_of
from splatcli.rasterizer.memory import (
    ABSURD_COUNT,
    ABSURD_SHARE,
    NAMED,
    PAIRS_SHARE,
    SHARE,
    IntersectionOverflow,
    Largest,
    free_memory,
    held_memory,
)
from splatcli.rasterizer.memory_estimate import (
    PairCount,
    Workload,
    line_bytes,
    predict_boxes,
    predict_pairs,
    render_memory,
    rest_bytes,
    shared_memory_estimate,
    state_bytes,
    step_memory,
    tiles_of_each,
)
from splatcli.rasterizer.offload import DEVICE_STORAGE, ROWS, TensorStorage
from splatcli.rasterizer.rendering import backend_for
from splatcli.scene.camera import Camera
from splatcli.scene.scene import Scene
from splatcli.sizes import gib
from splatcli.train.training_images import IMAGE_MEMORY_SHARE, training_image_bytes

#: Pairs of the fullest view go with this power of the number of Gaussians. It is 0.68 from the points of a scene to ten
#: times as many (docs/memory.md).
_PAIRS_GROW = 0.75

#: Of what pairs may need in a step, this part may be needed beside them while a view is scored.
_SCORE_PAIRS = 0.25

#: Bytes of a pixel while a held-out view is scored: both images, their moments, and windows of them.
_SCORE_PIXEL = 420

#: Bytes of a row while density control works out an edit, beside the new state.
_EDIT_ROW = 64

#: Pieces of SH rest that are worked on at once, when steps that were missed are made up for.
_PIECES = 6
#: Bytes of a row as decisions look at it where processes hold a part of the rows each: all but colours, and statistics.
_LOOKED_AT = 4 * (3 + 4 + 3 + 1 + 2)

#: What a process holds is rounded up to this, so that two runs find the same cap.
_GRAIN = 256 << 20

#: Gaussians that are looked at: in all cameras together to find the fullest view, and in that view.
_LOOKS = 400_000
_IN_FULL = 500_000
#: Cameras that are looked at, spread over all: it takes two milliseconds for each.
_VIEWS = 1_000


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How a run's memory goes with the number of its Gaussians.

    held: bytes of everything else: on the CPU the process itself. photos: bytes that they may take beside. work: the
    largest image, and the pairs of the fullest view, now. camera: of that view. grows: whether density control is still
    to come. room: bytes that there may be in all. batched: whether gradients of several views are summed up. store: of
    the SH rest.
    """

    backend: Backend
    held: int
    photos: int
    work: Workload
    camera: Camera
    grows: bool
    room: int
    batched: bool = False
    store: TensorStorage = DEVICE_STORAGE

    def least(self) -> int:
        """Bytes without which not even a step in bands can be done."""
        step = step_memory(self.backend, self.work)
        pairs = min(step.pairs, line_bytes(self.backend, self.work))
        return self.held + self._sums(self.work.gaussians) + step.total - step.pairs + pairs

    def now(self) -> int:
        """Bytes of the first steps, in bands if need be."""
        step = step_memory(self.backend, self.work)
        sums = self._sums(self.work.gaussians)
        return self.held + self.photos + sums + step.total - step.pairs + min(step.pairs, self._most_pairs())

    def at(self, count: int) -> int:
        """Bytes at the worst moment with ``count`` Gaussians: scoring a view, or replacing rows by new ones."""
        factor = math.pow(count / max(1, self.work.gaussians), _PAIRS_GROW)
        work = replace(self.work, gaussians=count, pairs=self.work.pairs.times(factor))
        step = step_memory(self.backend, work)
        shown = render_memory(self.backend, work)
        most = self._most_pairs()
        sums = count * (4 * abi.ROW + 4) if step.pairs > most else 0
        # SH coefficients brought up to date, all of them or those that lie elsewhere piece by piece.
        late = rest_bytes(count, work.sh_degree)
        pieces = _PIECES * rest_bytes(min(count, ROWS), work.sh_degree) if work.offloads else 0
        scoring = (0 if work.offloads else late) + shown.frame + min(shown.pairs, int(_SCORE_PAIRS * most))
        scoring += work.width * work.height * _SCORE_PIXEL
        growing = state_bytes(count, work.sh_degree, offloads=work.offloads) + _EDIT_ROW * count if self.grows else 0
        banded = step.total - step.pairs + min(step.pairs, most) + sums
        return self.held + self.photos + self._sums(count) + banded + max(scoring, growing) + pieces

    def most(self) -> int:
        """The most Gaussians that fit; rounded down to three digits."""
        return _most(lambda count: self.at(count) <= self.room)

    def elsewhere(self, count: int) -> int:
        """Bytes that are offloaded at the worst moment with ``count`` Gaussians."""
        one = self.store.nbytes(rest_bytes(count, self.work.sh_degree))
        # Coefficients and two moments; twice that while rows are replaced, or the coefficients while a view is scored.
        return (6 if self.grows else 4) * one

    def most_elsewhere(self, free: int) -> int:
        """The most Gaussians for which ``free`` bytes there are enough; rounded down to three digits."""
        return _most(lambda count: self.elsewhere(count) <= free)

    def crowd(self, gaussians: Gaussians) -> IntersectionOverflow:
        """The fullest view, in words."""
        tiles, scales = tiles_of_each(gaussians, self.camera), gaussians.log_scales.detach().amax(dim=1)
        # Those with most tiles, the largest first among equals.
        by_scale = scales.argsort(descending=True, stable=True)
        worst = by_scale[tiles[by_scale].argsort(descending=True, stable=True)[:NAMED]]
        step = step_memory(self.backend, self.work)
        return IntersectionOverflow(
            width=self.camera.width,
            height=self.camera.height,
            tiles=_tiles(self.camera),
            visible=self.work.pairs.visible,
            pairs=self.work.pairs.boxes,
            wanted=step.pairs,
            line_wanted=None,
            left=max(0, self.room - self.held - (step.total - step.pairs)),
            largest=Largest(worst.tolist(), tiles[worst].tolist(), scales[worst].double().exp().tolist()),
        )

    def is_absurd(self) -> bool:
        """Whether these cannot be the Gaussians of a scene, and their pairs do not fit."""
        pairs = self.work.pairs
        covers = pairs.boxes >= ABSURD_SHARE * _tiles(self.camera) * pairs.visible
        step = step_memory(self.backend, self.work)
        return pairs.visible >= ABSURD_COUNT and covers and self.held + step.total > self.room

    def _sums(self, count: int) -> int:
        """Bytes of a view's gradients, of their sum, and of what comes from other ranks, where steps have batches."""
        return 3 * 4 * (16 + 3 * SH_REST[self.work.sh_degree]) * count if self.batched else 0

    def _most_pairs(self) -> int:
        return int(PAIRS_SHARE * self.room)


@dataclass(frozen=True, slots=True)
class ShardedMemoryPlan(MemoryPlan):
    """The same of a process that holds one of ``parts`` parts of the Gaussians; ``work`` and counts are of all."""

    parts: int = 1

    def least(self) -> int:
        step = shared_memory_estimate(self.backend, self.work, self.parts)
        pairs = min(step.pairs, line_bytes(self.backend, self.work))
        return self.held + step.total - step.pairs + pairs

    def now(self) -> int:
        step = shared_memory_estimate(self.backend, self.work, self.parts)
        return self.held + self.photos + step.total - step.pairs + min(step.pairs, self._most_pairs())

    def at(self, count: int) -> int:
        more = count / max(1, self.work.gaussians)
        # More Gaussians are smaller, but as large a part of them is seen.
        pairs = replace(self.work.pairs.times(math.pow(more, _PAIRS_GROW)), visible=self.work.pairs.times(more).visible)
        work = replace(self.work, gaussians=count, pairs=pairs)
        step, shown = shared_memory_estimate(self.backend, work, self.parts), render_memory(self.backend, work)
        most, own, degree = self._most_pairs(), -(-count // self.parts), work.sh_degree
        sums = work.pairs.visible * (4 * abi.ROW + 4) if step.pairs > most else 0
        column = 4 * 3 * max(1, SH_REST[degree])  # the widest one there is
        scoring = column * own + min(shown.pairs, int(_SCORE_PAIRS * most)) + work.width * work.height * _SCORE_PIXEL
        saving = column * (count + own)
        growing = 0
        if self.grows:
            # What decisions look at before, after and in another order, and what they are worked out with; and columns
            # on their way.
            growing = (3 * _LOOKED_AT + _EDIT_ROW) * count + state_bytes(own, degree) + 3 * column * own
        banded = step.total - step.pairs + min(step.pairs, most) + sums
        return self.held + self.photos + banded + max(scoring, growing, saving)


def plan_memory(
    config: Config,
    scene: Scene,
    gaussians: Gaussians,
    device: torch.device,
    *,
    own: int,
    parts: int = 1,
    store: TensorStorage = DEVICE_STORAGE,
) -> tuple[int | None, list[str]]:
    """Return the cap that the memory allows a run that begins with ``gaussians``, and sentences for the user.

    own: bytes that the process holds of this state already. parts: shards of the Gaussians. store: of
    the SH rest. The cap is ``config.memory.cap`` where that is set, and None without a budget. Raises ResourceError,
    before anything large is allocated, when the state and a step on it cannot fit.
    """
    budget = config.memory.budget
    try:
        backend = backend_for(device)
    except NoCompilerError:
        return config.memory.cap, []  # plain torch: whoever waits for it has other worries
    held = max(0, held_memory(device, offloads=store.offloads) - own)
    if budget is None:
        room = held + own + int(SHARE * free_memory(device))
    else:
        room, held = budget, -(-held // _GRAIN) * _GRAIN
    if device.type == "cpu" and (budget is not None or config.data.cache_bytes is None):
        scene.images.limit(int(IMAGE_MEMORY_SHARE * room))
    camera, pairs = fullest_view(gaussians, [scene.cameras[i] for i in scene.train])
    largest = max((scene.cameras[i] for i in (*scene.train, *scene.test)), key=lambda c: c.width * c.height)
    forecast = (MemoryPlan if parts == 1 else partial(ShardedMemoryPlan, parts=parts))(
        backend=backend,
        held=held,
        photos=training_image_bytes(scene, device, room, reduced=config.schedule.num_downscales > 0),
        work=Workload(
            len(gaussians),
            gaussians.sh_degree,
            largest.width,
            largest.height,
            pairs,
            exposed=config.views.exposure,
            gridded=config.views.bilateral_grid,
            depths=config.depth_lambda > 0.0,
            offloads=store.offloads,
        ),
        camera=camera,
        grows=config.schedule.refine_start < min(config.schedule.refine_stop, config.train.iterations),
        room=room,
        batched=config.train.batch_size > 1,
        store=store,
    )
    if forecast.is_absurd():
        raise forecast.crowd(gaussians).refusal()
    if (least := forecast.least()) > room:
        raise _refusal(forecast, least, budget is not None)
    if budget is not None:
        config = resolve(config, memory_cap=config.memory.cap or max(len(gaussians), forecast.most()))
    return config.memory.cap, _sentences(config, forecast) + _offloaded(config, forecast)


def fullest_view(gaussians: Gaussians, cameras: Sequence[Camera]) -> tuple[Camera, PairCount]:
    """The camera with most pairs, and how many: found with a part of Gaussians and cameras where there are many."""
    cameras = cameras[:: -(-len(cameras) // _VIEWS)]
    step = -(-len(gaussians) * len(cameras) // _LOOKS) or 1
    some = gaussians.map(lambda t: t[::step].detach().cpu())
    boxes = [predict_boxes(some, camera) for camera in cameras]
    best = boxes.index(max(boxes))
    finer = -(-len(gaussians) // _IN_FULL) or 1
    most = gaussians.map(lambda t: t[::finer].detach().cpu())
    return cameras[best], predict_pairs(most, cameras[best]).times(len(gaussians) / len(most))


def _sentences(config: Config, forecast: MemoryPlan) -> list[str]:
    """What a person wants to know."""
    memory, count = config.memory, forecast.work.gaussians
    text = f"memory: about {gib(forecast.now())} now"
    cap = config.max_gaussians() if forecast.grows else None
    allowed = f"the budget is {gib(forecast.room)}" if memory.budget else f"{gib(forecast.room)} can be had"
    if cap is None or cap <= count:
        more = f", enough for about {forecast.most():,} Gaussians" if forecast.grows and cap is None else ""
        return [f"{text}; {allowed}{more}"]
    at_cap = forecast.at(cap)
    notes = [f"{text}, {gib(at_cap)} at the cap of {cap:,} Gaussians; {allowed}"]
    if cap == memory.cap:
        notes.append(f"growth stops at {cap:,} Gaussians, for which the memory suffices")
    elif at_cap > forecast.room:
        notes.append(f"the memory suffices for about {forecast.most():,} Gaussians; --cap-max {cap} is more")
    return notes


def _offloaded(config: Config, forecast: MemoryPlan) -> list[str]:
    """The same about what is offloaded. Raises ResourceError where there is no room for it."""
    store, count, degree = forecast.store, forecast.work.gaussians, forecast.work.sh_degree
    if not store.offloads:
        return []
    if degree == 0:
        return ["nothing is offloaded: at SH degree 0 there are no coefficients but the constant one"]
    now, free = 3 * store.nbytes(rest_bytes(count, degree)), store.free()
    if now > free:
        raise ResourceError(
            f"the SH coefficients of {count:,} Gaussians and their moments take {gib(now)} {store.place()}; "
            f"{gib(free)} are free there",
            remedy=f"free some space there, --sh-degree {degree - 1}, or --cap-max {forecast.most_elsewhere(free)}",
        )
    text = f"offloaded {store.place()}: {gib(now)} now"
    cap = config.max_gaussians() if forecast.grows else None
    most = forecast.elsewhere(max(count, cap or 0))
    text += f", {gib(most)} at most" if cap is not None or not forecast.grows else ""
    notes = [f"{text}; {gib(free)} are free there"]
    if most > free:
        notes.append(f"that suffices for about {forecast.most_elsewhere(free):,} Gaussians; --cap-max takes a number")
    return notes + store.notes()


def _most(fits: Callable[[int], bool]) -> int:
    """The largest count that fits, rounded down to three digits; with one that does, all below do."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    grain = 10 ** max(0, len(str(low)) - 3)
    return int(low // grain * grain)


def _refusal(forecast: MemoryPlan, least: int, has_budget: bool) -> ResourceError:
    work = forecast.work
    allowed = "the budget is" if has_budget else "there are"
    fits = forecast.most()
    fewer = f"--cap-max {fits} starts with fewer points, " if fits else ""
    larger = "a larger --vram-budget allows more" if has_budget else "or a device with more memory"
    return ResourceError(
        f"{work.gaussians:,} Gaussians and a training step on a {work.width}x{work.height} view take at least "
        f"{gib(least)}; {allowed} {gib(forecast.room)}",
        remedy=f"-r 2, 4 or 8 for smaller images, {fewer}{larger}",
    )


def _tiles(camera: Camera) -> int:
    return -(-camera.width // abi.TILE) * lines_of(camera.height)
