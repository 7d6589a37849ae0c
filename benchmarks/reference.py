"""Whether the kernels cost quality: the same short run on them and on the plain-torch reference, at a small size.

    python benchmarks/reference.py SCENE [-r 16] [--steps 100] [--cap 1500] [--seeds 42,43,44] [--grow] [--out FILE]

Both runs have the same settings, seed and order of views, and are scored on the held-out views by the same renderer.
The number of Gaussians stays unless --grow is given: with density control one decision that falls otherwise makes
another run, and the difference says no more than that of two seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from splatcli.bench import describe_machine
from splatcli.checkpoint.run_dir import RunDir
from splatcli.config import build_config
from splatcli.native.backend import Backend
from splatcli.rasterizer import NativeEngine
from splatcli.rasterizer.reference_engine import ReferenceEngine
from splatcli.rasterizer.step_inputs import StepEngine
from splatcli.scene.read import read_scene
from splatcli.train.events import Evaluated
from splatcli.train.trainer import Trainer


def run(scene: Path, engine: StepEngine, arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """PSNR, SSIM, Gaussians and seconds of one run."""
    config = build_config(
        {
            "data.scene": str(scene),
            "data.resolution": arguments.resolution,
            "train.iterations": arguments.steps,
            "train.seed": seed,
            "strategy.cap_max": arguments.cap,
            "data.max_points": arguments.cap // 2,
            "model.random_points": arguments.cap // 2,
            "guard.probe_every": 0,
            "schedule.refine_stop": None if arguments.grow else 0,
        }
    )
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, RunDir.create(Path(folder) / "run") as run_dir:
        trainer = Trainer.start(config, read_scene(scene, config.data), run_dir=run_dir, engine=engine)
        (score,) = (event for event in trainer.run() if isinstance(event, Evaluated))
    return {
        "engine": type(engine).__name__,
        "seed": seed,
        "psnr": score.psnr,
        "ssim": score.ssim,
        "num_gaussians": score.num_gaussians,
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("scene", type=Path)
    parser.add_argument("-r", "--resolution", type=float, default=16)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--cap", type=int, default=1_500)
    parser.add_argument("--seeds", default="42,43,44")
    parser.add_argument("--grow", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    runs = []
    for seed in map(int, arguments.seeds.split(",")):
        for engine in (NativeEngine(Backend.cpu()), ReferenceEngine()):
            runs.append(run(arguments.scene, engine, arguments, seed))
            print(runs[-1], file=sys.stderr)
    gains = [ours["psnr"] - plain["psnr"] for ours, plain in zip(runs[::2], runs[1::2], strict=True)]
    report = {
        **describe_machine(),
        "command": " ".join(["benchmarks/reference.py", *sys.argv[1:]]),
        "mean_gain_db": round(statistics.mean(gains), 3),
        "runs": runs,
    }
    text = json.dumps(report, indent=1) + "\n"
    if arguments.out is None:
        print(text, end="")
    else:
        arguments.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
