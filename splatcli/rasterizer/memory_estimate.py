"""MemoryEstimate: the bytes that a training step or a render takes, from counts alone (docs/memory.md).

The native library states the sizes that it decides on; the others are those of rasterizer/context.py and
rasterizer/train_step.py.
tests/torture/memory_prediction.py holds the sums against what processes really take: never more, and not much less.

On a GPU all that is allocated counts. On the CPU it is what is written to: pages of a buffer's slack do not become
resident; but what is freed does not always go back to the system.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from splatcli.gaussians import SH_REST
from splatcli.native import abi
from splatcli.native.call import Backend
from splatcli.rasterizer.bands import MOST_PAIRS
from splatcli.rasterizer.bilateral_grid import AT_A_TIME, BAND_BYTES
from splatcli.rasterizer.intersection_budget import LIST_BYTES, round_capacity
from splatcli.rasterizer.prediction import PairCount
from splatcli.rasterizer.view import lines_of

_FLOAT = 4

#: Numbers of a Gaussian beside its SH rest: mean, quaternion, log-scale, opacity, constant colour.
_NUMBERS = 3 + 4 + 3 + 1 + 3

#: Of each Gaussian in training: the step of its SH rest, and two statistics.
_TRAINED = 4 + 2 * _FLOAT

#: Of each slot of a frame: its record, id, first row and number of rows; of each chunk, two counts.
_SLOT = abi.RECORD * _FLOAT + 3 * 4
_CHUNK_COUNTS = 2 * 8

#: Of a visible Gaussian whose record goes to another process: as it is made, put in order, sent, and arrived.
_ON_ITS_WAY = 4 * (abi.RECORD + 1) * _FLOAT

#: What exchanges between processes hold, whatever they carry.
_TOGETHER = 16 << 20

#: Of each tile: its first pair and the one after its last, and a sum of background gradients.
_TILE = 8 + 4 + 3 * _FLOAT

#: Of each pixel in training: image and its gradient, alpha; and the photo with its mask.
_STEP_PIXEL = (3 + 3 + 1) * _FLOAT
_PHOTO_PIXEL = 3 + 1
#: And of the image as a view exposes it, where exposures are trained.
_EXPOSED_PIXEL = 3 * _FLOAT
#: And depth with its gradient and that of alpha, where depths are known; and what is known of a pixel, with what is
#: made of it in passing.
_DEPTH_PIXEL = 3 * _FLOAT
_KNOWN_PIXEL = 8 + 8 * _FLOAT

#: And of each line where grids are: the maps at both ends of its pieces, and their gradient, copied once each.
_GRID_LINE = 4 * _FLOAT * 12 * 8 * 2 * 15

#: And in a render: image, alpha, depth.
_RENDER_PIXEL = (3 + 1 + 1) * _FLOAT

#: A growing buffer on a GPU is made this much larger than it has to be (Arena.slack); 0 for a frame of one view.
_SLACK = 0.25

#: On the CPU: what buffers leave behind in the heap when they are freed, against what they take; and at most, for
#: larger buffers go back to the system one by one.
_HOLES = 0.35
_MOST_HOLES = 32 << 20

#: What allocators round up to, buffer by buffer, and all that is small: tables, counters, stacks of threads.
_SMALL = 4 << 20


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes by what they go with.

    state: parameters; in training also moments and statistics. frame: projected Gaussians. pixels: images and what the
    loss needs. pairs: lists of tiles, and rows of gradients. lost: what allocators keep.
    """

    state: int
    frame: int
    pixels: int
    pairs: int
    lost: int

    @property
    def total(self) -> int:
        return self.state + self.frame + self.pixels + self.pairs + self.lost


@dataclass(frozen=True, slots=True)
class Workload:
    """What is to be done: one view of so many Gaussians.

    exposed, gridded: with a trained exposure, or grid. depths: with depths that are known. offloads: with the SH rest
    of what is trained elsewhere, see rasterizer/offload.py.
    """

    gaussians: int
    sh_degree: int
    width: int
    height: int
    pairs: PairCount
    exposed: bool = False
    gridded: bool = False
    depths: bool = False
    offloads: bool = False


def parameter_bytes(sh_degree: int) -> int:
    """Raw parameters of one Gaussian."""
    return _FLOAT * (_NUMBERS + 3 * SH_REST[sh_degree])


def state_bytes(count: int, sh_degree: int, *, offloads: bool = False) -> int:
    """What a run holds of ``count`` Gaussians between two steps: parameters, two moments of each, statistics.

    offloads: without the SH rest and its moments, which are three tensors of rest_bytes().
    """
    away = 3 * rest_bytes(count, sh_degree) if offloads else 0
    return count * (3 * parameter_bytes(sh_degree) + _TRAINED) - away


def rest_bytes(count: int, sh_degree: int) -> int:
    """The SH rest of ``count`` Gaussians, or one moment of it."""
    return _FLOAT * 3 * SH_REST[sh_degree] * count


def step_memory(backend: Backend, work: Workload) -> MemoryEstimate:
    """A training step, with the buffers that stay for the next one."""
    pixels = work.width * work.height
    size = abi.Loss(width=work.width, height=work.height, target_is_u8=True, channels=3, images=1)
    frame = _frame_bytes(backend, work)
    image = _STEP_PIXEL + (_EXPOSED_PIXEL if work.exposed or work.gridded else 0)
    image += _DEPTH_PIXEL if work.depths else 0
    images = pixels * image + backend.call("loss_bytes", size)
    if work.gridded:
        at_a_time = min(pixels, AT_A_TIME["cuda" if backend.deferred else "cpu"])
        images += work.height * _GRID_LINE + at_a_time * BAND_BYTES
    pairs = _pair_bytes(backend, work, round_capacity(work.pairs.boxes), with_rows=True)
    slack = 1.0 + (_SLACK if backend.deferred else 0.0)
    return MemoryEstimate(
        state=state_bytes(work.gaussians, work.sh_degree, offloads=work.offloads),
        frame=int(slack * frame),
        pixels=int(slack * images) + pixels * (_PHOTO_PIXEL + (_KNOWN_PIXEL if work.depths else 0)),
        pairs=int(slack * pairs),
        lost=_lost(backend, frame + images + pairs),
    )


def sums_bytes(sh_degree: int) -> int:
    """Of a Gaussian whose gradients of several views are added: one sum of them, and of what is told of it."""
    return parameter_bytes(sh_degree) + 2 * _FLOAT


def shared_memory_estimate(backend: Backend, work: Workload, parts: int) -> MemoryEstimate:
    """A training step of a process that holds one of ``parts`` parts of the Gaussians; ``work`` is of all of them.

    Its own Gaussians are projected, and keep the sums of their gradients; the view is drawn of what it sees of all.
    """
    own, seen = -(-work.gaussians // parts), min(work.pairs.visible, work.gaussians)
    step = step_memory(backend, replace(work, gaussians=seen))
    slots = -(-own // abi.CHUNK) * abi.CHUNK
    projected = slots * (_SLOT + abi.ROW * _FLOAT + 4) + slots // abi.CHUNK * _CHUNK_COUNTS
    frame = step.frame + projected + seen * _ON_ITS_WAY + 2 * sums_bytes(work.sh_degree) * own
    return replace(step, state=state_bytes(own, work.sh_degree), frame=frame, lost=step.lost + _TOGETHER)


def render_memory(backend: Backend, work: Workload) -> MemoryEstimate:
    """A render without gradients, with the model that is shown."""
    frame = _frame_bytes(backend, work)
    images = work.width * work.height * _RENDER_PIXEL
    pairs = _pair_bytes(backend, work, work.pairs.boxes, with_rows=False)
    away = rest_bytes(work.gaussians, work.sh_degree) if work.offloads else 0
    state = work.gaussians * parameter_bytes(work.sh_degree) - away
    return MemoryEstimate(state, frame, images, pairs, _lost(backend, frame + images + pairs))


def line_bytes(backend: Backend, work: Workload) -> int:
    """What the fullest line of tiles takes in training at least, without which there is no step: that of the mean."""
    lines = lines_of(work.height)
    line = PairCount(-(-work.pairs.pairs // lines), -(-work.pairs.boxes // lines), work.pairs.visible)
    return _pair_bytes(backend, replace(work, pairs=line), line.boxes, with_rows=True)


def _lost(backend: Backend, buffers: int) -> int:
    """What nobody uses and nobody gets back: holes in the heap, roundings, and all that is small."""
    return _SMALL + (0 if backend.deferred else min(int(_HOLES * buffers), _MOST_HOLES))


def _frame_bytes(backend: Backend, work: Workload) -> int:
    slots = -(-work.gaussians // abi.CHUNK) * abi.CHUNK
    tiles = -(-work.width // abi.TILE) * lines_of(work.height)
    return slots * _SLOT + slots // abi.CHUNK * _CHUNK_COUNTS + tiles * _TILE + _workspace(backend, work, 0)


def _pair_bytes(backend: Backend, work: Workload, room: int, *, with_rows: bool) -> int:
    """room: pairs that a GPU makes room for; a CPU writes only what there are, but for the workspace, which is cut up
    by their bound."""
    bound = room if backend.deferred else work.pairs.boxes
    pairs = room if backend.deferred else work.pairs.pairs
    row = abi.ROW * backend.dtype.itemsize if with_rows else 0
    numbered = min(bound, MOST_PAIRS)
    workspace = _workspace(backend, work, numbered) - _workspace(backend, work, 0)
    # Beyond what can be numbered, in a straight line.
    return workspace * bound // max(1, numbered) + pairs * (LIST_BYTES + row)


def _workspace(backend: Backend, work: Workload, pairs: int) -> int:
    slots = -(-(work.gaussians if backend.deferred else work.pairs.visible) // abi.CHUNK) * abi.CHUNK
    view = abi.View(width=work.width, height=work.height, line_begin=0, line_end=lines_of(work.height))
    return backend.call("bin_bytes", view, abi.Frame(visible=slots, pair_bound=pairs))
