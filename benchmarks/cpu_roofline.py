"""How near each stage of a training step on the CPU is to what one core can do, from its own lists.

    python -m benchmarks.cpu_roofline MODEL [-r F [F ...]] [--rounds 12] [--out FILE]

MODEL is a run or its checkpoint (its scene must still be where it was); -r takes the images at other sizes. The first
training view is stepped again and again, with learning rates of nearly 0, on one thread; times are CPU times of that
thread, the least of all rounds. Each round also measures the peaks, so that both see the same machine: multiply-adds
in registers, and a[i] = b[i] + s c[i] on 64 MiB arrays, 12 bytes an element.

Operations are the useful ones: an addition, multiplication, division or root is one, a multiply-add two. Blending
counts pixels in which a Gaussian has an alpha of at least 1/255 and that still let light through. Bytes are those of
the arrays that a stage has to read or write, once each, whether they come from memory or from a cache.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import shlex
import subprocess
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.origin import origin
from splatcli.checkpoint.file import load_checkpoint
from splatcli.cli.model import find_model
from splatcli.errors import SplatError
from splatcli.native import abi
from splatcli.native.backend import Backend, chosen_isa, load_cpu
from splatcli.native.build import ISA_FLAGS, find_compiler
from splatcli.rasterizer import AdamState, NativeEngine
from splatcli.rasterizer.context import RasterContext
from splatcli.rasterizer.step_inputs import StepInputs
from splatcli.scene.read import read_scene
from splatcli.train.schedule import learning_rates

#: Calls of the library by the stage that they make up.
STAGES = {
    "project": "projection, colours",
    "bin": "binning",
    "blend": "blend",
    "loss": "loss and its gradient",
    "blend_vjp": "blend, backward",
    "project_vjp": "projection, backward, Adam",
}

PEAKS = r"""
#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX2__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
typedef float V __attribute__((vector_size(4 * LANES)));  // one register
extern "C" int lanes() { return LANES; }
#define ALL(F) F(0) F(1) F(2) F(3) F(4) F(5) F(6) F(7) F(8) F(9) F(10) F(11)
extern "C" float multiply_adds(long n) {  // 12 chains, so that no result is waited for
  V a, b;
  for (int k = 0; k < LANES; ++k) a[k] = 0.9999f, b[k] = 1e-4f;
#define BEGIN(i) V x##i = b * float(i);
#define STEP(i) x##i = x##i * a + b;
#define SUM(i) + x##i[0]
  ALL(BEGIN)
  for (long k = 0; k < n; ++k) { ALL(STEP) }
  return 0 ALL(SUM);
}
extern "C" void triad(float* __restrict a, const float* __restrict b, const float* __restrict c, long n) {
  for (long i = 0; i < n; ++i) a[i] = b[i] + 3.0f * c[i];
}
"""

_times: dict[str, list[float]] = defaultdict(list)


@dataclass(frozen=True)
class TimedBackend(Backend):
    """A backend that notes the CPU time of each call."""

    def call(self, name: str, *arguments: Any) -> int:
        started = time.thread_time()
        result = super().call(name, *arguments)
        _times[name].append(time.thread_time() - started)
        return result


class Peaks:
    """Measures what a core does at this moment: operations and bytes a second, the best so far."""

    _ROUNDS, _ELEMENTS = 1_000_000, 1 << 24

    def __init__(self, isa: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder) / "peaks.cpp", Path(folder) / "peaks.so"
            source.write_text(PEAKS, encoding="utf-8")
            flags = ["-O2", "-ftree-vectorize", "-shared", "-fPIC", "-ffp-contract=fast", *ISA_FLAGS[isa]]
            build = [*shlex.split(find_compiler().command), *flags]
            subprocess.run([*build, str(source), "-o", str(library)], check=True)
            self._library = ctypes.CDLL(str(library))
        self._library.multiply_adds.restype = ctypes.c_float
        self._arrays = [torch.ones(self._ELEMENTS) for _ in range(3)]
        self.operations = self.bytes = 0.0

    def measure(self) -> None:
        started = time.thread_time()
        self._library.multiply_adds(ctypes.c_long(self._ROUNDS))
        between = time.thread_time()
        pointers = [ctypes.c_void_p(array.data_ptr()) for array in self._arrays]
        self._library.triad(*pointers, ctypes.c_long(self._ELEMENTS))
        ended = time.thread_time()
        self.operations = max(self.operations, 12 * self._library.lanes() * 2 * self._ROUNDS / (between - started))
        self.bytes = max(self.bytes, 12.0 * self._ELEMENTS / (ended - between))


@dataclass
class Counts:
    """What a step on a view has to do."""

    gaussians: int
    shN_numbers: int  # of a Gaussian
    visible: int
    boxes: int  # tiles of the boxes of visible Gaussians
    isects: int
    pixels: int
    touched: int = 0  # pairs of a Gaussian and a pixel that it contributes to
    lanes: int = 0  # pairs that the blend evaluates for them: 16 pixels at a time

    def work(self) -> dict[str, tuple[float, float]]:
        """Return (operations, bytes) of each call."""
        n, v, i, numbers = self.gaussians, self.visible, self.isects, 3 * self.pixels
        shN = self.shN_numbers
        exp2, alpha = 13, 10
        dense = 14  # numbers of a Gaussian beside shN
        return {
            # Geometry 300, direction and basis 80, two for a coefficient; what is not seen costs the bound.
            "project": (50 * (n - v) + v * (380 + 2 * shN), 24 * n + v * (32 + 4 * shN + 72)),
            # The least q over sixteen blocks for each tile of a box; keys, three passes of the sort, lists.
            "bin": (self.boxes * 16 * 20, v * (64 + 8 + 3 * 16) + 34 * i),
            "blend": (self.touched * (alpha + exp2 + 8), 70 * i + 16 * self.pixels),
            # Seven maps filtered both ways with 16 operations each, squares, SSIM with derivatives, the sum.
            "loss": (numbers * (7 * 2 * 16 + 4 + 40 + 8), numbers * (2 * (4 + 1) + 4)),
            "blend_vjp": (self.touched * (alpha + exp2 + 32), 138 * i + 32 * self.pixels),
            # The sum of gradients, geometry and colours with their adjoints, Adam with 14 a number.
            "project_vjp": (
                10 * i + v * (300 + 700 + (6 + 14) * shN) + 14 * dense * n,
                64 * i + v * (72 + 24 * shN) + 24 * dense * n,
            ),
        }


def count(context: RasterContext, counts: Counts, view: abi.View) -> None:
    """Add the pairs of Gaussians and pixels of the view that ``context`` has listed to ``counts``."""
    across = -(-view.width // abi.TILE)
    tiles = across * -(-view.height // abi.TILE)
    arena = context.arena
    starts = arena.take("tile_starts", 0, torch.int64)[: tiles + 1].tolist()
    listed, masks = arena.take("isect_gaussians", 0, torch.int32), arena.take("isect_masks", 0, torch.int16)
    projected = arena.take("projected", 0, torch.float32)
    projected = projected[: len(projected) // abi.PROJECTED * abi.PROJECTED].view(-1, abi.PROJECTED)
    lane = torch.arange(256)  # blocks of 4x4 row by row, pixels row by row in each
    block, pixel = lane // 16, lane % 16
    x, y = (block % 4) * 4 + pixel % 4, (block // 4) * 4 + pixel // 4
    for tile in range(tiles):
        mine = slice(starts[tile], starts[tile + 1])
        px, py = x + tile % across * abi.TILE, y + tile // across * abi.TILE
        touched, lanes = _count_tile(
            projected[listed[mine].long()], masks[mine], px, py, (px < view.width) & (py < view.height)
        )
        counts.touched += touched
        counts.lanes += lanes


def _count_tile(rows: Tensor, masks: Tensor, x: Tensor, y: Tensor, inside: Tensor) -> tuple[int, int]:
    """Return (contributing pairs, evaluated pairs) of the Gaussians of a tile and its 256 pixels, by lane."""
    dx, dy = x + 0.5 - rows[:, 0:1], y + 0.5 - rows[:, 1:2]
    exponent = rows[:, 5:6] - dx * (dx * rows[:, 2:3] + dy * rows[:, 3:4]) - dy * dy * rows[:, 4:5]
    alpha = torch.where(exponent >= -7.994353436858858, torch.exp2(exponent).clamp(max=0.999), 0.0)
    bits = (masks.int()[:, None] >> torch.arange(16)) & 1
    alpha = alpha * bits.repeat_interleave(16, 1)
    live = (torch.cumprod(1.0 - alpha, 0) > 1e-4) & inside
    before = torch.cat([inside[None], live[:-1]]) if len(rows) else live
    visited = bits.bool() & before.view(-1, 16, 16).any(2)
    return int(((alpha > 0) & live).sum()), 16 * int(visited.sum())


def measure(model: Path, resolution: float | None, rounds: int) -> dict[str, Any]:
    """Return the result as JSON. Raises SplatError without a checkpoint, or its scene."""
    torch.set_num_threads(1)
    checkpoint = load_checkpoint(find_model(model))
    data = checkpoint.config.data
    if resolution is not None:
        data = data.model_copy(update={"resolution": resolution})
    scene = read_scene(Path(checkpoint.dataset.root), data)
    index = checkpoint.train[0]
    camera, target = scene.cameras[index], torch.from_numpy(scene.images.load(index))
    gaussians = checkpoint.gaussians.detach_clone()
    adam = AdamState.zeros_like(gaussians)
    isa = chosen_isa()
    engine = NativeEngine(TimedBackend(load_cpu(isa), torch.float32, 1))
    rates = learning_rates(checkpoint.config.optim, checkpoint.config.schedule, checkpoint.dataset.extent, 10**9)
    inputs = StepInputs(
        camera,
        target,
        lrs={name: rate * 1e-3 for name, rate in rates.items()},
        sh_degree=gaussians.sh_degree,
        background=torch.zeros(3),
        ssim_lambda=0.2,
        antialiased=False,
        stats=None,
    )
    peaks = Peaks(isa)
    for step in range(rounds + 1):
        if step == 1:
            _times.clear()
        peaks.measure()
        for _ in range(3):
            engine.step(gaussians, adam, inputs)
    native = engine.context.native
    counts = Counts(
        len(gaussians),
        gaussians.shN[0].numel(),
        native.visible,
        native.max_isects,
        native.isects,
        camera.width * camera.height,
    )
    count(engine.context, counts, abi.View(width=camera.width, height=camera.height))
    return {
        **origin(),
        "threads": 1,
        "isa": isa,
        "scene": Path(checkpoint.dataset.root).name,
        "size": f"{camera.width}x{camera.height}",
        **vars(counts),
        "peak_gflops": round(peaks.operations / 1e9, 1),
        "peak_gbytes": round(peaks.bytes / 1e9, 1),
        "stages": {name: _shares(min(_times[name]), work, peaks) for name, work in counts.work().items()},
    }


def _shares(seconds: float, work: tuple[float, float], peaks: Peaks) -> dict[str, float]:
    operations, moved = work
    return {
        "ms": round(1e3 * seconds, 3),
        "mflop": round(operations / 1e6, 2),
        "mbyte": round(moved / 1e6, 2),
        "of_operations": round(operations / peaks.operations / seconds, 3),
        "of_bandwidth": round(moved / peaks.bytes / seconds, 3),
    }


def table(result: dict[str, Any]) -> str:
    """Return the stages as a Markdown table."""
    lines = ["| stage | ms | Mflop | MB | of peak operations | of bandwidth |", "|---|---|---|---|---|---|"]
    for name, stage in result["stages"].items():
        shares = f"{stage['of_operations']:.0%} | {stage['of_bandwidth']:.0%}"
        lines.append(f"| {STAGES[name]} | {stage['ms']:.2f} | {stage['mflop']:.0f} | {stage['mbyte']:.1f} | {shares} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("-r", "--resolution", type=float, nargs="+", default=[None])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    try:
        results = [measure(options.model, resolution, options.rounds) for resolution in options.resolution]
    except SplatError as error:
        parser.exit(error.exit_code, "\n".join(error.lines()) + "\n")
    for result in results:
        print("\n".join(f"{name} {value}" for name, value in result.items() if name != "stages"))
        print(table(result))
    if options.out:
        options.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
