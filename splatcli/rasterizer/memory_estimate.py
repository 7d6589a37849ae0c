"""MemoryEstimate: the bytes that a training step or a render takes, from counts alone (docs/memory.md).

Tile intersections are predicted from the raw parameters alone, without a kernel: written from docs/math.md 3 and 5, in
float64, never too few. The native library states the sizes that it decides on; the others are those of
rasterizer/context.py and rasterizer/train_step.py. tests/torture/memory_prediction.py compares the sums with what
processes really take: never more, and not much less.

On a GPU all that is allocated counts. On the CPU what is written to counts: pages of a buffer's slack do not become
resident; but what is freed does not always return to the system.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from splatcli.gaussians import SHN_COUNTS, Gaussians
from splatcli.native import abi
from splatcli.native.backend import Backend
from splatcli.rasterizer import ppisp
from splatcli.rasterizer.bilateral_grid import AT_A_TIME, BAND_BYTES
from splatcli.rasterizer.context import Z_FAR, tile_rows_of
from splatcli.rasterizer.memory_budget import LIST_BYTES, MAX_ISECTS, round_capacity
from splatcli.rasterizer.reference import BLUR, JACOBIAN_MARGIN, other_pixels
from splatcli.rotation import rotation_matrices
from splatcli.scene.camera import Camera

#: Gaussians, and tile rows of all of them together, that are processed at once: tens of megabytes.
_CHUNK = 1 << 16
_TILE_ROWS = 1 << 19

#: With more tile rows than this among a chunk's Gaussians, which is no normal scene, their boxes are counted instead.
_MAX_TILE_ROWS = 4 * _TILE_ROWS

#: How far the kernel's float32 may move an edge: relative to the coordinates, and in pixels.
_RELATIVE, _PIXELS = 1e-5, 0.01


@dataclass(frozen=True, slots=True)
class IsectCount:
    """Predicted tile intersections of a view.

    isects: upper bound of the tile intersections. boxes: tiles in the boxes around the Gaussians, which the rasterizer
    allocates for. visible: Gaussians with any.
    """

    isects: int
    boxes: int
    visible: int

    def __add__(self, other: IsectCount) -> IsectCount:
        return IsectCount(self.isects + other.isects, self.boxes + other.boxes, self.visible + other.visible)

    def times(self, factor: float) -> IsectCount:
        """Return the counts of ``factor`` times as many Gaussians of the same kind."""
        return IsectCount(*(math.ceil(factor * count) for count in (self.isects, self.boxes, self.visible)))


@torch.no_grad()
def predict_isects(gaussians: Gaussians, camera: Camera) -> IsectCount:
    """Return upper bounds for the view; in usual scenes isects is about a tenth above the true number."""
    total = IsectCount(0, 0, 0)
    for first in range(0, len(gaussians), _CHUNK):
        total += _count(gaussians.map(lambda t: t[first : first + _CHUNK]), camera)  # noqa: B023 (used at once)
    return total


@torch.no_grad()
def predict_boxes(gaussians: Gaussians, camera: Camera) -> int:
    """Return only the boxes of predict_isects(), in half the time."""
    chunks = range(0, len(gaussians), _CHUNK)
    return sum(
        int(tiles_of_each(gaussians.map(lambda t: t[first : first + _CHUNK]), camera).sum())  # noqa: B023 (used at once)
        for first in chunks
    )


@torch.no_grad()
def tiles_of_each(gaussians: Gaussians, camera: Camera) -> Tensor:
    """Return [N] int64: tiles in the box of each Gaussian; 0 for those that the view culls."""
    kept, ellipses = _ellipses(gaussians, camera)
    x0, x1, y0, y1 = _boxes(ellipses, camera)
    tiles = torch.zeros(len(gaussians), dtype=torch.int64, device=gaussians.device)
    tiles[kept] = (x1 - x0) * (y1 - y0)
    return tiles


def _count(gaussians: Gaussians, camera: Camera) -> IsectCount:
    _, ellipses = _ellipses(gaussians, camera)
    x0, x1, y0, y1 = _boxes(ellipses, camera)
    boxes = (x1 - x0) * (y1 - y0)
    # Only boxes of two by two tiles and more have corners that the ellipse may leave out.
    cornered = (x1 - x0 > 1) & (y1 - y0 > 1)
    if int((y1 - y0)[cornered].sum()) > _MAX_TILE_ROWS:
        cornered[:] = False
    isects = int(boxes[~cornered].sum())
    rows = cornered.nonzero().squeeze(1)
    ends = (y1 - y0)[rows].cumsum(0)
    while len(rows):
        count = max(1, int((ends <= ends[0] + _TILE_ROWS).sum()))
        part = rows[:count]
        isects += _row_by_row(ellipses[part], y0[part], y1[part], x0[part], x1[part])
        rows, ends = rows[count:], ends[count:]
    return IsectCount(isects, int(boxes.sum()), int((boxes > 0).sum()))


def _boxes(ellipses: Tensor, camera: Camera) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return first and end column of tiles, first and end tile row; empty outside the image."""
    u, v, a, _, c, tau = ellipses.unbind(1)
    x0, x1 = _tiles(u, (2 * tau * a).sqrt(), camera.width)
    y0, y1 = _tiles(v, (2 * tau * c).sqrt(), camera.height)
    return x0, x1, y0, y1


def _ellipses(gaussians: Gaussians, camera: Camera) -> tuple[Tensor, Tensor]:
    """Return ([K] int64, [K, 6] float64): Gaussians that are not culled; their mean u v, covariance a b c, and tau."""
    means = gaussians.means.double()
    view = torch.from_numpy(camera.viewmat).to(means)
    in_camera = means @ view[:3, :3].T + view[:3, 3]
    tau = math.log(255.0) + torch.nn.functional.logsigmoid(gaussians.logit_opacities.double())
    # Written so that NaN is culled.
    seen = (in_camera[:, 2] > camera.near * (1 - 1e-6)) & (in_camera[:, 2] < Z_FAR) & (tau > -1e-5)
    x, y, z = in_camera[seen].unbind(1)
    root = rotation_matrices(gaussians.quats[seen].double()) * gaussians.log_scales[seen].double().exp()[:, None, :]
    root = view[:3, :3] @ root
    if camera.model == "pinhole":
        u, v = camera.fx * x / z + camera.cx, camera.fy * y / z + camera.cy
        tx = (x / z).clamp(*_clamp(camera.width, camera.cx, camera.fx))[:, None]
        ty = (y / z).clamp(*_clamp(camera.height, camera.cy, camera.fy))[:, None]
        u0 = (root[:, 0] - tx * root[:, 2]) * (camera.fx / z)[:, None]
        u1 = (root[:, 1] - ty * root[:, 2]) * (camera.fy / z)[:, None]
    else:
        fx, fy, cx, cy = (z.new_tensor(number) for number in (camera.fx, camera.fy, camera.cx, camera.cy))
        pixels, jacobians = other_pixels(camera.model, (x, y, z), (fx, fy, cx, cy))
        (u, v), (u0, u1) = pixels.unbind(1), (jacobians @ root).unbind(1)
    a, b, c = (u0 * u0).sum(1) + BLUR, (u0 * u1).sum(1), (u1 * u1).sum(1) + BLUR
    # The exact test is generous by a ten-thousandth, and where terms cancel float32 decides: 5.3.
    cancelling = (a + c) * (a + c) / (a * c - b * b).clamp(min=BLUR * BLUR)
    tau = tau[seen].clamp(min=0) * (1 + 2e-4 + 1e-6 * cancelling) + 2e-4
    ellipses = torch.stack([u, v, a, b, c, tau], 1)
    finite = ellipses.isfinite().all(1)
    return seen.nonzero().squeeze(1)[finite], ellipses[finite]


def _clamp(size: int, center: float, focal: float) -> tuple[float, float]:
    return (-JACOBIAN_MARGIN * size - center) / focal, ((1 + JACOBIAN_MARGIN) * size - center) / focal


def _tiles(center: Tensor, half: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the first and the end tile that an interval of pixels reaches; empty outside the image."""
    margin = _PIXELS + _RELATIVE * (center.abs() + half)
    low, high = center - half - 0.5 - margin, center + half - 0.5 + margin
    inside = (high >= 0) & (low <= size - 1)
    first = (low.clamp(0, size - 1) / abi.TILE).long()
    last = (high.clamp(0, size - 1) / abi.TILE).long()
    return first, torch.where(inside, last + 1, first)


def _row_by_row(ellipses: Tensor, y0: Tensor, y1: Tensor, x0: Tensor, x1: Tensor) -> int:
    """Return the tiles of the ellipses, tile row by tile row, each by the widest place among the row's pixels."""
    counts = y1 - y0
    owner = torch.repeat_interleave(counts)
    tile_row = y0[owner] + torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[owner]
    u, v, a, b, c, tau = ellipses[owner].unbind(1)
    half_y = (2 * tau * c).sqrt()
    margin = _PIXELS + _RELATIVE * (v.abs() + half_y)
    top = torch.maximum(tile_row * abi.TILE + 0.5 - margin - v, -half_y)
    bottom = torch.minimum((tile_row + 1) * abi.TILE - 0.5 + margin - v, half_y).maximum(top)
    # The rightmost point lies this far below the centre, the leftmost as far above it.
    extreme = b / a * (2 * tau * a).sqrt()

    def chord(dy: Tensor) -> Tensor:
        return ((2 * tau - dy * dy / c).clamp(min=0) * (a - b * b / c)).clamp(min=0).sqrt()

    lowest, highest = extreme.clamp(top, bottom), (-extreme).clamp(top, bottom)
    right, left = b / c * lowest + chord(lowest), b / c * highest - chord(highest)
    slack = _PIXELS + _RELATIVE * (u.abs() + (2 * tau * a).sqrt())
    first = ((u + left - 0.5 - slack) / abi.TILE).floor().maximum(x0[owner].double())
    last = ((u + right - 0.5 + slack) / abi.TILE).floor().minimum(x1[owner].double() - 1)
    return int((last - first + 1).clamp(min=0).sum())


_FLOAT = 4

#: Numbers of a Gaussian beside shN: mean, quaternion, log-scale, opacity, constant colour.
_NUMBERS = 3 + 4 + 3 + 1 + 3

#: Bytes of each Gaussian in training beside the moments: sh_last_step and two statistics.
_TRAINED = 4 + 2 * _FLOAT

#: Bytes of each slot: projected Gaussian, id, start and number of its intersections; of each chunk, two counts.
_SLOT = abi.PROJECTED * _FLOAT + 3 * 4
_CHUNK_COUNTS = 2 * 8

#: Bytes of a projected Gaussian that is sent to another process: as made, sorted, sent and received.
_ON_ITS_WAY = 4 * (abi.PROJECTED + 1) * _FLOAT

#: Bytes that collectives between processes hold, whatever they carry.
_TOGETHER = 16 << 20

#: Bytes of each tile: its start and its end in the list, a place in the order, and a sum of background gradients.
_TILE = 8 + 4 + 4 + 3 * _FLOAT

#: Bytes of each pixel in training: image and its gradient, alpha; and the training image with its mask.
_STEP_PIXEL = (3 + 3 + 1) * _FLOAT
_TARGET_PIXEL = 3 + 1
#: Bytes of each pixel of the recoloured image, where a map of its colours is trained.
_RECOLOURED_PIXEL = 3 * _FLOAT
#: Bytes of each pixel where depths are known: depth, its gradient and that of alpha; and the known depth with its
#: temporaries.
_DEPTH_PIXEL = 3 * _FLOAT
_KNOWN_PIXEL = 8 + 8 * _FLOAT

#: Bytes of each pixel with the alpha term: the gradient of alpha; and which pixels count, with its temporaries.
_ALPHA_PIXEL = _FLOAT
_COUNTS_PIXEL = 4

#: Bytes of each row of pixels with bilateral grids: the maps at both ends of its pieces and their gradient, twice.
_GRID_LINE = 4 * _FLOAT * 12 * 8 * 2 * 15

#: Bytes of each pixel in a render: image, alpha, depth.
_RENDER_PIXEL = (3 + 1 + 1) * _FLOAT

#: The part by which a growing buffer on a GPU exceeds the requested size (Arena.slack); 0 for a context of one view.
_SLACK = 0.25

#: On the CPU: the part of freed buffers that stays in the heap, and its maximum, since larger buffers go back to the
#: system one by one.
_HOLES = 0.35
_MOST_HOLES = 32 << 20

#: The rounding of allocators, buffer by buffer, and small things: tables, counters, stacks of threads.
_SMALL = 4 << 20


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes by the count that they scale with.

    state: parameters; in training also moments and statistics. projected: Gaussians of a view. pixels: images, buffers
    of the loss. isects: tile intersections and their gradients. lost: memory that allocators keep.
    """

    state: int
    projected: int
    pixels: int
    isects: int
    lost: int

    @property
    def total(self) -> int:
        return self.state + self.projected + self.pixels + self.isects + self.lost


@dataclass(frozen=True, slots=True)
class Workload:
    """One view of so many Gaussians, to be rendered or trained.

    colour_map: that of the view that is trained, one of config.COLOUR_MAPS, or None. depths: with known depths. alpha:
    with the alpha term of the loss. offloads: with shN and its moments outside the device, see rasterizer/offload.py.
    """

    gaussians: int
    sh_degree: int
    width: int
    height: int
    isects: IsectCount
    colour_map: str | None = None
    depths: bool = False
    alpha: bool = False
    offloads: bool = False


def parameter_bytes(sh_degree: int) -> int:
    """Return the bytes of the raw parameters of one Gaussian."""
    return _FLOAT * (_NUMBERS + 3 * SHN_COUNTS[sh_degree])


def state_bytes(count: int, sh_degree: int, *, offloads: bool = False) -> int:
    """Return the bytes of ``count`` Gaussians between two steps: parameters, two moments of each, statistics.

    offloads: without shN and its moments, which are three tensors of shN_bytes().
    """
    away = 3 * shN_bytes(count, sh_degree) if offloads else 0
    return count * (3 * parameter_bytes(sh_degree) + _TRAINED) - away


def shN_bytes(count: int, sh_degree: int) -> int:
    """Return the bytes of shN of ``count`` Gaussians, or of one moment of it."""
    return _FLOAT * 3 * SHN_COUNTS[sh_degree] * count


def step_memory(backend: Backend, work: Workload) -> MemoryEstimate:
    """Estimate a training step, with the buffers that stay for the next one."""
    pixels = work.width * work.height
    size = abi.Loss(width=work.width, height=work.height, target_is_u8=True, channels=3, images=1)
    projected = _projected_bytes(backend, work)
    image = _STEP_PIXEL + (_RECOLOURED_PIXEL if work.colour_map is not None else 0)
    image += (_DEPTH_PIXEL if work.depths else 0) + (_ALPHA_PIXEL if work.alpha else 0)
    images = pixels * image + backend.call("loss_bytes", size)
    if work.colour_map == "bilateral_grid":
        at_a_time = min(pixels, AT_A_TIME["cuda" if backend.deferred else "cpu"])
        images += work.height * _GRID_LINE + at_a_time * BAND_BYTES
    if work.colour_map == "ppisp":
        images += min(pixels, ppisp.AT_A_TIME["cuda" if backend.deferred else "cpu"]) * ppisp.BAND_BYTES
    isects = _isect_bytes(backend, work, round_capacity(work.isects.boxes), with_grads=True)
    slack = 1.0 + (_SLACK if backend.deferred else 0.0)
    target = _TARGET_PIXEL + (_KNOWN_PIXEL if work.depths else 0) + (_COUNTS_PIXEL if work.alpha else 0)
    return MemoryEstimate(
        state=state_bytes(work.gaussians, work.sh_degree, offloads=work.offloads),
        projected=int(slack * projected),
        pixels=int(slack * images) + pixels * target,
        isects=isects,  # a capacity, which has the only slack
        lost=_lost(backend, projected + images + isects),
    )


def sums_bytes(sh_degree: int) -> int:
    """Return the bytes of one Gaussian's sums over several views: of its gradients and of its statistics."""
    return parameter_bytes(sh_degree) + 2 * _FLOAT


def shared_memory_estimate(backend: Backend, work: Workload, parts: int) -> MemoryEstimate:
    """Estimate a step of a process that holds one of ``parts`` shards of the Gaussians; ``work`` is of all of them.

    The process projects its own Gaussians and keeps the sums of their gradients; its view is blended from the visible
    ones of all processes.
    """
    own, seen = -(-work.gaussians // parts), min(work.isects.visible, work.gaussians)
    step = step_memory(backend, replace(work, gaussians=seen))
    slots = -(-own // abi.CHUNK) * abi.CHUNK
    own_projected = slots * (_SLOT + abi.ISECT_GRAD * _FLOAT + 4) + slots // abi.CHUNK * _CHUNK_COUNTS
    projected = step.projected + own_projected + seen * _ON_ITS_WAY + 2 * sums_bytes(work.sh_degree) * own
    return replace(step, state=state_bytes(own, work.sh_degree), projected=projected, lost=step.lost + _TOGETHER)


def render_memory(backend: Backend, work: Workload) -> MemoryEstimate:
    """Estimate a render without gradients, with its model."""
    projected = _projected_bytes(backend, work)
    images = work.width * work.height * _RENDER_PIXEL
    isects = _isect_bytes(backend, work, work.isects.boxes, with_grads=False)
    away = shN_bytes(work.gaussians, work.sh_degree) if work.offloads else 0
    state = work.gaussians * parameter_bytes(work.sh_degree) - away
    return MemoryEstimate(state, projected, images, isects, _lost(backend, projected + images + isects))


def tile_row_bytes(backend: Backend, work: Workload) -> int:
    """Return a lower bound of the bytes of the fullest tile row in training, which every step needs: the mean row."""
    rows = tile_rows_of(work.height)
    row = IsectCount(-(-work.isects.isects // rows), -(-work.isects.boxes // rows), work.isects.visible)
    return _isect_bytes(backend, replace(work, isects=row), row.boxes, with_grads=True)


def _lost(backend: Backend, buffers: int) -> int:
    """Return the bytes that no buffer uses: holes in the heap, rounding, and small things."""
    return _SMALL + (0 if backend.deferred else min(int(_HOLES * buffers), _MOST_HOLES))


def _projected_bytes(backend: Backend, work: Workload) -> int:
    slots = -(-work.gaussians // abi.CHUNK) * abi.CHUNK
    tiles = -(-work.width // abi.TILE) * tile_rows_of(work.height)
    return slots * _SLOT + slots // abi.CHUNK * _CHUNK_COUNTS + tiles * _TILE + _workspace(backend, work, 0)


def _isect_bytes(backend: Backend, work: Workload, capacity: int, *, with_grads: bool) -> int:
    """Return the bytes of tile intersections.

    capacity: intersections that a GPU allocates for. A CPU writes only the true ones, except in the workspace, which is
    laid out by their upper bound.
    """
    bound = capacity if backend.deferred else work.isects.boxes
    isects = capacity if backend.deferred else work.isects.isects
    row = abi.ISECT_GRAD * backend.dtype.itemsize if with_grads else 0
    numbered = min(bound, MAX_ISECTS)
    workspace = _workspace(backend, work, numbered) - _workspace(backend, work, 0)
    # Beyond what can be numbered: linear.
    return workspace * bound // max(1, numbered) + isects * (LIST_BYTES + row)


def _workspace(backend: Backend, work: Workload, isects: int) -> int:
    slots = -(-(work.gaussians if backend.deferred else work.isects.visible) // abi.CHUNK) * abi.CHUNK
    view = abi.View(width=work.width, height=work.height, tile_row_begin=0, tile_row_end=tile_rows_of(work.height))
    return backend.call("bin_bytes", view, abi.Frame(visible=slots, max_isects=isects))
