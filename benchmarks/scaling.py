"""Steps a second and bytes a step of 1, 2 and 4 ranks of one machine: ``python benchmarks/scaling.py --json FILE``.

A made scene, a batch of four views, replicated over gloo. Ranks share the processors: with fewer processors than ranks
there is nothing to gain, and what is measured is what the exchange costs.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from splatcli.config import Config
from splatcli.distributed.world import World
from splatcli.settings import build_config
from splatcli.train.crew import ReadRunDir
from splatcli.train.loop import Trainer
from tests.distributed.ranks import results
from tests.torture.harness import circumstances
from tests.train.worlds import made_scene

VIEWS, SIZE, WARM, STEPS = 12, 256, 2, 8


def config_of(points: int) -> Config:
    """No refinement in these steps, SH degree 3 from the first one on."""
    return build_config({
        "train.batch_size": 4, "train.iterations": 1000, "schedule.refine_start": 999, "model.init": "random",
        "model.random_points": points, "schedule.sh_degree_interval": 1, "strategy.prune_scale3d": 100.0,
    })  # fmt: skip


def measure(world: World | None, points: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    pixels = [random.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8) for _ in range(VIEWS)]
    scene = made_scene(VIEWS, size=SIZE, pixels=pixels)
    trainer = Trainer.start(config_of(points), scene, run_dir=ReadRunDir(Path("run")), crew=world)
    for _ in range(WARM):
        trainer.advance()
    before, start = dict(world.sent) if world else {}, time.perf_counter()
    for _ in range(STEPS):
        trainer.advance()
    seconds = (time.perf_counter() - start) / STEPS
    sent = {what: (n - before.get(what, 0)) / STEPS for what, n in world.sent.items()} if world else {}
    return {"seconds": seconds, "sent": sent}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=int, default=20_000)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    for ranks in (1, 2, 4):
        found = results(measure, ranks, options.points, limit=3000.0) if ranks > 1 else [measure(None, options.points)]
        rows.append({"ranks": ranks, "seconds": max(r["seconds"] for r in found), "sent": found[0]["sent"]})
        print(rows[-1], flush=True)
    told = {"gaussians": options.points, "views": [SIZE, SIZE], "batch": 4, "rows": rows, "run": circumstances()}
    options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
