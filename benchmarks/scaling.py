"""Bytes a step, memory and seconds of 1, 2 and 4 ranks of one machine: ``python benchmarks/scaling.py --json FILE``.

A made scene, a batch of four views over gloo, with a copy of the Gaussians on each rank and with a part of them. Ranks
share the processors: with fewer processors than ranks the seconds say what the exchange costs, and nothing of a gain.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from splatcli.config import Config, build_config
from splatcli.distributed.process_group import ProcessGroup
from splatcli.rasterizer.batch import FlatSums
from splatcli.rasterizer.sharded import SENT
from splatcli.rasterizer.step_inputs import Shard
from splatcli.scene.scene import Scene
from splatcli.train.data_parallel import ReadOnlyRunDir
from splatcli.train.densify import Refinement
from splatcli.train.trainer import Trainer
from tests.distributed.ranks import results
from tests.torture.harness import circumstances
from tests.train.worlds import made_scene

VIEWS, SIZE, WARM, STEPS = 12, 256, 2, 8


class Staying:
    """A strategy whose edit leaves everything as it is, and takes the memory that edits take."""

    absgrad = False

    def refine(self, step: int, gaussians: Any, stats: Any, generator: Any) -> Refinement:
        return Refinement.same_rows(len(gaussians), gaussians.device)


def config_of(points: int) -> Config:
    """No refinement in these steps, SH degree 3 from the first one on."""
    return build_config({
        "train.batch_size": 4, "train.iterations": 1000, "schedule.refine_start": 999, "model.init": "random",
        "model.random_points": points, "schedule.sh_degree_interval": 1, "strategy.prune_scale3d": 100.0,
    })  # fmt: skip


def scene() -> Scene:
    random = np.random.default_rng(0)
    pixels = [random.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8) for _ in range(VIEWS)]
    return made_scene(VIEWS, size=SIZE, pixels=pixels)


def measure(group: ProcessGroup | None, points: int, sharded: bool) -> dict[str, Any]:
    """A rank's seconds and bytes sent of a step; MiB that steps, and then an edit too, took at most."""
    run(group, 1000, sharded, 1)  # loads and builds what every process has
    gc.collect()
    return run(group, points, sharded, STEPS)


def run(group: ProcessGroup | None, points: int, sharded: bool, steps: int) -> dict[str, Any]:
    made, held = scene(), memory("VmRSS")
    trainer = Trainer.start(config_of(points), made, run_dir=ReadOnlyRunDir(Path("run")), group=group, sharded=sharded)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of building it
    for _ in range(WARM):
        trainer.advance()
    before, start = dict(group.sent) if group else {}, time.perf_counter()
    for _ in range(steps):
        trainer.advance()
    seconds = (time.perf_counter() - start) / steps
    sent = {what: (n - before.get(what, 0)) / steps for what, n in group.sent.items()} if group else {}
    stepping = memory("VmHWM") - held
    trainer.density.refine(trainer.state, Staying(), trainer.state.step)  # type: ignore[arg-type]
    rows, editing = len(trainer.state.gaussians), memory("VmHWM") - held
    return {"seconds": seconds, "sent": sent, "rows": rows, "stepping": stepping, "editing": editing}


def by_the_formula(points: int) -> dict[tuple[int, bool], list[float]]:
    """Bytes of sums or rows that each rank has to send in one of these steps, by (ranks, sharded)."""
    trainer = Trainer.start(config_of(points), scene(), run_dir=ReadOnlyRunDir(Path("run")))
    assert trainer.stepper.batch_engine is not None
    engine: Any = trainer.stepper.batch_engine
    make, seen = engine._gradients, []

    def watched(*arguments: Any) -> Any:
        result = make(*arguments)
        seen.append(engine._pipeline.context.visible_slots()[0].clone())
        return result

    engine._gradients = watched
    for _ in range(WARM + STEPS):
        trainer.advance()
    found = {}
    for ranks in (1, 2, 4):
        sums = 4 * len(FlatSums(trainer.state.gaussians, ranks).flat) * (4 // ranks + 1) * (ranks - 1) / ranks
        rows = [0.0] * ranks
        for i, ids in enumerate(seen[4 * WARM :]):
            for rank in range(ranks):
                part = Shard(rank, ranks, points).rows
                if rank != i % 4 % ranks:
                    there = 4 * SENT * int(((ids >= part.start) & (ids < part.stop)).sum())
                    rows[rank] += there / STEPS
                    rows[i % 4 % ranks] += there / STEPS
        found |= {(ranks, False): [sums] * ranks, (ranks, True): rows}
    return found


def memory(key: str) -> float:
    """MiB of this process now (VmRSS), or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{key}:"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=int, nargs="*", default=[20_000, 300_000])
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    for points in options.points:
        formula = by_the_formula(points)
        for ranks, sharded in [(1, False), (2, False), (4, False), (2, True), (4, True)]:
            found = results(measure, ranks, points, sharded, limit=3000.0)
            row = {key: max(rank[key] for rank in found) for key in ("seconds", "rows", "stepping", "editing")}
            sent = [rank["sent"] for rank in found]
            rows.append({"gaussians": points, "ranks": ranks, "sharded": sharded, **row, "sent": sent})
            rows[-1]["by_the_formula"] = formula[ranks, sharded]
            print(rows[-1], flush=True)
    result = {"views": [SIZE, SIZE], "batch": 4, "rows": rows, "run": circumstances()}
    options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
