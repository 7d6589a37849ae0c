"""A whole run from the command line: wall time, peak memory, and quality on the held-out views.

    python benchmarks/run.py --out FILE -- SCENE -r 2 --iterations 3000 --cap-max 50000

Everything behind -- goes to ``splat train``; the time includes start, reading, training, saving and the evaluation at
the end.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from splatcli import __version__
from splatcli.native.call import default_threads
from splatcli.native.library import best_isa


def matmul_gflops() -> float:
    """What a matrix product reaches now: says how fast the machine is at the moment of the run."""
    a = torch.rand(1024, 1024)
    best = float("inf")
    for _ in range(10):
        started = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - started)
    return round(2 * 1024**3 / best / 1e9, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("arguments", nargs="+")
    options = parser.parse_args()
    speed = matmul_gflops()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "splatcli", "train", *options.arguments, "-o", str(run), "-q"]
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - started
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    evaluation = next(r for r in reversed(records) if r["event"] == "eval")
    result = {
        "command": "splat train " + " ".join(options.arguments),
        "date": datetime.date.today().isoformat(),
        "version": __version__,
        "machine": f"{platform.processor() or platform.machine()}, {default_threads()} threads, {best_isa()}",
        "matmul_gflops": speed,
        "seconds": round(seconds, 1),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024),
        "step": evaluation["step"],
        "psnr": round(evaluation["psnr"], 3),
        "ssim": round(evaluation["ssim"], 4),
        "num_gaussians": evaluation["num_gaussians"],
        "views": [
            {"name": v["name"], "psnr": round(v["psnr"], 2), "ssim": round(v["ssim"], 4)} for v in evaluation["views"]
        ],
        "protocol": evaluation["protocol"],
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
