"""What instruction sets and cores are worth to a training step on the CPU.

    python -m benchmarks.cores CHECKPOINT [-r F [F ...]] [--rounds 20] [--out FILE]

CHECKPOINT is a trained run's (its scene must still be where it was); the first training view is stepped again and again
with learning rates of nearly 0.

Instruction sets: the library of each one that this processor runs, in turn; CPU times of one thread, the least of all
rounds.

Cores: nothing runs in parallel for it, so a busy machine does not matter. The library is built once more with a pool
that notes the CPU time of each job of each loop. Jobs are then dealt to 1 to 64 cores as the real pool deals them, the
next one to the core that is free first; what lies outside loops, Python included, is serial. The result is the most
that cores can give: it knows nothing of the memory's bandwidth, which cores share, nor of waking threads.
"""

from __future__ import annotations

import argparse
import ctypes
import heapq
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu_roofline import STAGES
from splatcli.bench import describe_machine
from splatcli.checkpoint.file import load_checkpoint
from splatcli.gaussians import Gaussians
from splatcli.native import build
from splatcli.native.backend import Backend, best_isa, load_cpu, load_library
from splatcli.rasterizer import AdamState, NativeEngine
from splatcli.rasterizer.step_inputs import StepInputs
from splatcli.scene.read import read_scene
from splatcli.train.schedule import learning_rates

CORES = (1, 2, 4, 8, 16, 32, 64)

#: Takes the place of cuda/src/cpu/pool.cpp: one thread, and the CPU time of each job in `times`, -1 between loops.
POOL = r"""
#include "%s"
#include <time.h>
#include <vector>
#include <xmmintrin.h>
namespace splat {
static std::vector<double> times;
static double now() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}
void run_jobs(int, int64_t count, void (*job)(void*, int64_t), void* context) {
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(mode | 0x8040);
  double before = now();
  for (int64_t i = 0; i < count; ++i) {
    job(context, i);
    const double after = now();
    times.push_back(after - before);
    before = after;
  }
  times.push_back(-1);
  _mm_setcsr(mode);
}
extern "C" __attribute__((visibility("default"))) int64_t job_times(double* out) {
  const int64_t count = int64_t(times.size());
  if (out != nullptr) {
    for (int64_t i = 0; i < count; ++i) out[i] = times[size_t(i)];
    times.clear();
  }
  return count;
}
}  // namespace splat
"""


@dataclass(frozen=True)
class WatchedBackend(Backend):
    """A backend that tells ``watch`` the name and the CPU time of each call, in seconds."""

    watch: Callable[[str, float], None] = field(default=lambda name, seconds: None)

    def call(self, name: str, *arguments: Any) -> int:
        started = time.thread_time()
        result = super().call(name, *arguments)
        self.watch(name, time.thread_time() - started)
        return result


@dataclass
class Step:
    """A training step that can be repeated: with its own copy of the Gaussians."""

    gaussians: Gaussians
    inputs: StepInputs

    @classmethod
    def of(cls, path: Path, resolution: float | None) -> Step:
        checkpoint = load_checkpoint(path)
        data = checkpoint.config.data
        if resolution is not None:
            data = data.model_copy(update={"resolution": resolution})
        scene = read_scene(Path(checkpoint.dataset.root), data)
        index = checkpoint.train[0]
        rates = learning_rates(checkpoint.config.optim, checkpoint.config.schedule, checkpoint.dataset.extent, 10**9)
        inputs = StepInputs(
            scene.cameras[index],
            torch.from_numpy(scene.images.load(index)),
            lrs={name: rate * 1e-3 for name, rate in rates.items()},
            sh_degree=checkpoint.gaussians.sh_degree,
            background=torch.zeros(3),
            ssim_lambda=0.2,
            antialiased=False,
            stats=None,
        )
        return cls(checkpoint.gaussians, inputs)

    def runner(self, backend: Backend) -> Callable[[], object]:
        """Return a function that makes one step."""
        engine, gaussians = NativeEngine(backend), self.gaussians.detach_clone()
        adam = AdamState.zeros_like(gaussians)
        return lambda: engine.step(gaussians, adam, self.inputs)


def by_isa(step: Step, isas: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """Return for each instruction set the CPU time in ms of each stage and of the whole step."""
    times: dict[str, dict[str, list[float]]] = {isa: defaultdict(list) for isa in isas}
    runs = {}
    for isa in isas:
        note = times[isa]
        backend = WatchedBackend(
            load_cpu(isa), torch.float32, 1, watch=lambda name, seconds, note=note: note[name].append(seconds)
        )
        runs[isa] = step.runner(backend)
        runs[isa]()
        note.clear()
    for _ in range(rounds):
        for isa, run in runs.items():
            started = time.thread_time()
            run()
            times[isa]["step"].append(time.thread_time() - started)
    return {isa: {name: round(1e3 * min(times[isa][name]), 3) for name in (*STAGES, "step")} for isa in isas}


def timed_library(isa: str) -> ctypes.CDLL:
    """Return the CPU library for ``isa`` with POOL as its pool."""
    folder = build.source_root() / "src" / "cpu"
    with tempfile.TemporaryDirectory() as scratch:
        pool = Path(scratch) / "timed_pool.cpp"
        pool.write_text(POOL % (folder / "pool.h"), encoding="utf-8")
        sources = [*(path for path in sorted(folder.glob("*.cpp")) if path.name != "pool.cpp"), pool]
        flags = (*build.COMMON_FLAGS, *build.ISA_FLAGS[isa])
        recipe = build.Recipe(build.find_compiler(), flags, link_flags=("-lpthread",))
        library = load_library(
            build.build_library(f"cores-{isa}", "libsplat_cores.so", sources, recipe, build.CPU_FOLDERS)
        )
    library.job_times.restype, library.job_times.argtypes = ctypes.c_int64, [ctypes.c_void_p]
    return library


def dealt(jobs: list[float], cores: int) -> float:
    """Return when the last of ``jobs`` ends on ``cores``, each taken by the core that is free first."""
    free = [0.0] * min(cores, len(jobs))
    for seconds in jobs:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free, default=0.0)


def by_cores(step: Step, rounds: int) -> dict[str, dict[str, Any]]:
    """Return for each stage, for Python and for the step ms outside loops ("serial") and ms on each number of CORES."""
    library = timed_library(best_isa())
    calls: list[tuple[str, float, list[list[float]]]] = []

    watching = 0.0

    def take(name: str, seconds: float) -> None:
        nonlocal watching
        began = time.thread_time()
        count = library.job_times(None)
        numbers = torch.empty(count, dtype=torch.float64)
        library.job_times(numbers.data_ptr())
        loops: list[list[float]] = [[]]
        for number in numbers.tolist():
            if number < 0:
                loops.append([])
            else:
                loops[-1].append(number)
        calls.append((name, seconds, loops[:-1]))
        watching += time.thread_time() - began

    run = step.runner(WatchedBackend(library, torch.float32, 1, watch=take))
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for number in range(rounds + 1):
        calls.clear()
        watching, started = 0.0, time.thread_time()
        run()
        whole = time.thread_time() - started - watching
        if number == 0:
            continue
        stages: dict[str, dict[str, float]] = {}
        for name, seconds, loops in calls:
            stage = stages.setdefault(
                name if name in STAGES else "Python", dict.fromkeys(("serial", *map(str, CORES)), 0.0)
            )
            serial = seconds - sum(map(sum, loops))
            stage["serial"] += serial
            for cores in CORES:
                stage[str(cores)] += serial + sum(dealt(loop, cores) for loop in loops)
        rest = stages.setdefault("Python", dict.fromkeys(("serial", *map(str, CORES)), 0.0))
        outside = whole - sum(seconds for _, seconds, _ in calls)
        for key in rest:
            rest[key] += outside
        for name, stage in stages.items():
            found[name].append(stage)
    best = {name: min(all_of_it, key=lambda stage: stage["1"]) for name, all_of_it in found.items()}
    best = {name: best[name] for name in (*STAGES, "Python")}
    best["step"] = {key: sum(stage[key] for stage in best.values()) for key in ("serial", *map(str, CORES))}
    return {name: {key: round(1e3 * seconds, 3) for key, seconds in stage.items()} for name, stage in best.items()}


def measure(path: Path, resolution: float | None, rounds: int) -> dict[str, Any]:
    """Return the result of one image size as JSON."""
    torch.set_num_threads(1)
    step = Step.of(path, resolution)
    camera = step.inputs.camera
    known = list(build.ISA_FLAGS)
    return {
        "size": f"{camera.width}x{camera.height}",
        "gaussians": len(step.gaussians),
        "isas": by_isa(step, known[known.index(best_isa()) :], rounds),
        "cores": by_cores(step, rounds),
    }


_NAMES = {**STAGES, "Python": "Python, between the stages", "step": "step"}


def isa_table(result: dict[str, Any]) -> str:
    """Return the instruction sets of one size as a Markdown table, with the factor to the best one."""
    isas = result["isas"]
    first = next(iter(isas))
    lines = [f"| {result['size']}, ms | {' | '.join(isas)} |", "|---" * (len(isas) + 1) + "|"]
    for name in (*STAGES, "step"):
        cells = [f"{isas[first][name]:.2f}"]
        cells += [f"{ms[name]:.2f} ({ms[name] / isas[first][name]:.2f}x)" for isa, ms in isas.items() if isa != first]
        lines.append(f"| {_NAMES[name]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def core_table(result: dict[str, Any]) -> str:
    """Return the cores of one size as a Markdown table."""
    lines = [f"| {result['size']}, ms | serial | {' | '.join(map(str, CORES))} |", "|---" * (len(CORES) + 2) + "|"]
    for name, stage in result["cores"].items():
        lines.append(f"| {_NAMES[name]} | {' | '.join(f'{ms:.2f}' for ms in stage.values())} |")
    step = result["cores"]["step"]
    gains = [f"{step['1'] / step[str(cores)]:.1f}x" for cores in CORES]
    return "\n".join([*lines, f"| times as fast as one core | | {' | '.join(gains)} |"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("-r", "--resolution", type=float, nargs="+", default=[None])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sizes = [measure(options.checkpoint, resolution, options.rounds) for resolution in options.resolution]
    for size in sizes:
        print(isa_table(size), core_table(size), sep="\n\n", end="\n\n")
    if options.out:
        result = {**describe_machine(), "threads": 1, "sizes": sizes}
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
