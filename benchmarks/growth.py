"""What a training step on the CPU costs as Gaussians, pixels and views grow: time of each stage, and memory.

    python -m benchmarks.growth [--gaussians N ...] [--pixels N ...] [--views N ...] [--out FILE]

Made-up surfaces before the camera, of which a view sees 60 % and the rest lies behind it, in Morton order, SH degree 3
(scripts/gpu/scenes.py). In the first curve Gaussians get smaller as they get more. Each case is a process of its own.
Times are CPU times of one thread, the least of all steps. Memory is the peak of resident memory while stepping (VmHWM),
less what was resident before the Gaussians were made. The exponent of a stage is the slope of log time over log count
between two neighbours: 1 is linear.

--gaussians varies their number at 0.5 MP, --pixels the image of 300,000 Gaussians, --views the views of a batch of
100,000 Gaussians at 0.5 MP.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

GAUSSIANS = (10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000)
PIXELS = (100_000, 250_000, 500_000, 1_000_000, 2_000_000, 4_000_000)
VIEWS = (1, 2, 4, 8)

#: What is held where the others vary.
_PIXELS, _GAUSSIANS, _BATCHED = 500_000, 300_000, 100_000

#: Calls of the library, in the order of a step, and what tables call them.
LABELS = {
    "project": "projection",
    "bin": "binning",
    "blend": "blend",
    "loss": "loss",
    "blend_vjp": "blend, backward",
    "project_vjp": "projection, backward",
    "adam": "Adam",
}
STAGES = tuple(LABELS)

#: From this exponent of a whole curve on a stage grows faster than its count, beyond what caches and noise explain.
SUPERLINEAR = 1.1


@dataclass(frozen=True)
class Case:
    """One point of a curve: ``kind`` is what varies."""

    kind: str
    gaussians: int
    pixels: int
    views: int


def cases(gaussians: list[int], pixels: list[int], views: list[int]) -> list[Case]:
    return [
        *(Case("gaussians", n, _PIXELS, 1) for n in gaussians),
        *(Case("pixels", _GAUSSIANS, n, 1) for n in pixels),
        *(Case("views", _BATCHED, _PIXELS, n) for n in views),
    ]


def memory(key: str) -> int:
    """Bytes of this process now (VmRSS), or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Step ``case`` in this process; return its counts, CPU times in ms by stage and the memory it took."""
    import torch

    from benchmarks.cpu_roofline import TimedBackend, _times
    from splatcli.native.backend import chosen_isa, load_cpu

    torch.set_num_threads(1)
    backend = TimedBackend(load_cpu(chosen_isa()), torch.float32, 1)
    _run(backend, Case(case.kind, 1000, 10_000, case.views), 1)  # loads and builds what every process has
    gc.collect()
    _times.clear()
    held = memory("VmRSS")
    context, seconds = _run(backend, case, rounds)
    taken = memory("VmHWM") - held
    stages = {}
    for name in (name for name in STAGES if name in _times):
        calls = len(_times[name]) // rounds  # of a step: one a view
        sums = [sum(_times[name][k * calls : (k + 1) * calls]) for k in range(rounds)]
        stages[name] = round(1e3 * min(sums), 3)
    return {
        **asdict(case),
        "visible": context.native.visible,
        "isects": context.native.isects,
        "step_ms": round(1e3 * seconds, 2),
        "stages_ms": stages,
        "peak_bytes": taken,
    }


def _run(backend: Any, case: Case, rounds: int) -> tuple[Any, float]:
    """Make ``rounds`` steps; return the context of the last one and the CPU time of the fastest in seconds."""
    import torch
    from gpu.scenes import make_scene

    from splatcli.gaussians import GROUPS
    from splatcli.rasterizer import AdamState, DensifyStats, NativeEngine
    from splatcli.rasterizer.batch import BatchEngine
    from splatcli.rasterizer.step_inputs import StepInputs
    from splatcli.scene.points import morton_order

    width = round(math.sqrt(case.pixels * 4 / 3))
    height = round(case.pixels / width)
    scene, cameras = make_scene(case.gaussians, width, height, "cpu")
    order = torch.from_numpy(morton_order(scene.means.numpy()))
    gaussians = scene.map(lambda tensor: tensor[order].contiguous())
    del scene
    adam, stats = AdamState.zeros_like(gaussians), DensifyStats.zeros(case.gaussians)
    target = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8)
    inputs = [
        StepInputs(
            cameras[view % len(cameras)],
            target,
            lrs=dict.fromkeys(GROUPS, 1e-9),  # so small that all steps do the same work
            sh_degree=3,
            background=torch.zeros(3),
            ssim_lambda=0.2,
            antialiased=False,
            stats=stats,
        )
        for view in range(case.views)
    ]
    batch, single = BatchEngine(backend), NativeEngine(backend)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # forget the peak of making them
    times = []
    for _ in range(rounds):
        started = time.thread_time()
        if case.kind == "views":
            batch.step(gaussians, adam, [one.camera for one in inputs], inputs.__getitem__)
        else:
            single.step(gaussians, adam, inputs[0])
        times.append(time.thread_time() - started)
    return batch._pipeline.context if case.kind == "views" else single.context, min(times)


def exponents(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return for each stage, and for "step", the exponents between neighbouring counts of one curve."""
    found: dict[str, list[float]] = {}
    for before, after in pairwise(rows):
        growth = math.log(after[after["kind"]] / before[before["kind"]])
        for name in (*after["stages_ms"], "step"):
            low, high = (row["step_ms"] if name == "step" else row["stages_ms"][name] for row in (before, after))
            found.setdefault(name, []).append(round(math.log(high / low) / growth, 2))
    return found


def overall(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the exponents between the first and the last count of one curve."""
    return {name: each[0] for name, each in exponents([rows[0], rows[-1]]).items()} if len(rows) > 1 else {}


def bytes_of_each(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the bytes of a Gaussian, a tile intersection and a pixel that explain the peaks best (least squares).

    Relative errors count. rows: of curves with one view a step.
    """
    import numpy as np

    names = ("gaussians", "isects", "pixels")
    peaks = np.array([row["peak_bytes"] for row in rows], float)
    counts = np.array([[*(row[name] for name in names), 1.0] for row in rows])
    found, *_ = np.linalg.lstsq(counts / peaks[:, None], np.ones(len(rows)), rcond=None)
    worst = float(np.abs(counts @ found / peaks - 1.0).max())
    return {
        **{name: round(float(n), 1) for name, n in zip(names, found, strict=False)},
        "largest_error": round(worst, 3),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the times of one curve as a Markdown table, in ms."""
    kind, names = rows[0]["kind"], list(rows[0]["stages_ms"])
    head = [kind, *(LABELS[name] for name in names), "step"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        times = [*(row["stages_ms"][name] for name in names), row["step_ms"]]
        lines.append(f"| {' | '.join([f'{row[kind]:,}', *(f'{ms:.1f}' for ms in times)])} |")
    return "\n".join(lines)


def memory_table(rows: list[dict[str, Any]]) -> str:
    """Return the counts and peaks of curves as a Markdown table."""
    head = ["Gaussians", "visible", "pixels", "tile intersections", "peak, MB"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        cells = [f"{row[key]:,}" for key in ("gaussians", "visible", "pixels", "isects")]
        lines.append(f"| {' | '.join([*cells, format(row['peak_bytes'] / 1e6, ',.0f')])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gaussians", type=int, nargs="*", default=GAUSSIANS, metavar="N")
    parser.add_argument("--pixels", type=int, nargs="*", default=PIXELS, metavar="N")
    parser.add_argument("--views", type=int, nargs="*", default=VIEWS, metavar="N")
    parser.add_argument("--rounds", type=int, default=6, help="steps of each case")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(Case(**json.loads(options.case)), options.rounds)))
        return
    rows = []
    for case in cases(options.gaussians, options.pixels, options.views):
        words = ["-m", "benchmarks.growth", "--rounds", str(options.rounds), "--case", json.dumps(asdict(case))]
        path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")])}
        done = subprocess.run([sys.executable, *words], check=True, stdout=subprocess.PIPE, text=True, env=path)
        rows.append(json.loads(done.stdout))
        print(done.stdout, end="", file=sys.stderr, flush=True)
    curves = {}
    for kind in ("gaussians", "pixels", "views"):
        if mine := [row for row in rows if row["kind"] == kind]:
            curves[kind] = {"rows": mine, "exponents": exponents(mine), "overall": overall(mine)}
            print(table(mine), json.dumps(curves[kind]["exponents"]), sep="\n")
    single = [row for row in rows if row["kind"] != "views"]
    bytes_each = bytes_of_each(single) if len(single) > 3 else {}
    if single:
        print(memory_table(single), json.dumps(bytes_each), sep="\n")
    if options.out:
        from splatcli.bench import describe_machine

        result = {**describe_machine(), "threads": 1, "curves": curves, "bytes_of_each": bytes_each}
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
