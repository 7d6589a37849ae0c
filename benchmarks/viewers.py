"""Measure a run whose page (--viewer) has no viewer, a viewer that watches, and one that flies through the scene.

    python benchmarks/viewers.py SCENE [-r 2] [--steps 150] [--rounds 3] [--size 960x600]

Prints a row a round: milliseconds of a step by the training thread's own processor time, which other programs on the
machine do not touch, and by the clock; pictures a second. Each round has all four runs, so that a slow hour hits all.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path

from splatcli.checkpoint.run_dir import RunDir
from splatcli.config import build_config
from splatcli.scene.read import read_scene
from splatcli.train.events import Stepped
from splatcli.train.trainer import Trainer
from splatcli.viewer.http_server import Request
from splatcli.viewer.live_viewer import LiveRun

#: Steps that are not counted: caches fill.
WARM_UP = 20

#: Neither growth nor saves, so that all runs have the same steps.
SETTINGS = ["schedule.refine_start=100000000", "save.steps=[]", "guard.probe_every=0"]


class SimulatedViewer(threading.Thread):
    """A browser that asks for the next picture as soon as it has one. moving: it flies."""

    def __init__(self, live: LiveRun, size: tuple[int, int], *, moving: bool) -> None:
        super().__init__(daemon=True)
        self.live, self.moving, self.pictures = live, moving, 0
        self.query = {"me": "a", "kind": "rgb", "urgent": str(int(moving)), "seen": "-1", "fov": "60"}
        self.query |= {"width": str(size[0]), "height": str(size[1])}

    def run(self) -> None:
        while (stage := self.live(Request("GET", "/stage", {}, own=True))) is None or stage.status != 200:
            time.sleep(0.05)
        self.query["pose"] = ",".join(map(str, json.loads(stage.content)["first"]["pose"]))
        while True:
            answer = self.live(Request("GET", "/picture", self.query, own=True))
            assert answer is not None
            if answer.status == 200:
                self.pictures += 1
                self.query["seen"] = str(json.loads(answer.headers["X-Splat-Facts"])["step"])


def measure(arguments: argparse.Namespace, mode: str) -> tuple[float, float, float]:
    """(ms of processor time a step, ms a step, pictures a second) with a viewer of kind ``mode``."""
    flags = {"data.scene": str(arguments.scene), "data.resolution": arguments.resolution}
    steps = arguments.steps + WARM_UP
    config = build_config({**flags, "train.iterations": steps + 1, "data.test_every": 0}, assignments=SETTINGS)
    scene = read_scene(arguments.scene, config.data)
    with tempfile.TemporaryDirectory() as folder, RunDir.create(Path(folder) / "run") as run_dir:
        trainer = Trainer.start(config, scene, run_dir=run_dir)
        live = None if mode == "no page" else LiveRun()
        viewer = None
        if live is not None and mode != "nobody":
            viewer = SimulatedViewer(live, arguments.size, moving=mode == "flying")
            viewer.start()
        marks = {}
        for event in trainer.run(stop_at=steps):
            if isinstance(event, Stepped) and event.step in (WARM_UP, steps):
                marks[event.step] = time.thread_time(), time.monotonic(), viewer.pictures if viewer else 0
            if live is not None:
                live.report(event, trainer.state)
    processor, seconds, pictures = (b - a for a, b in zip(marks[WARM_UP], marks[steps], strict=True))
    return 1e3 * processor / arguments.steps, 1e3 * seconds / arguments.steps, pictures / seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scene", type=Path)
    parser.add_argument("-r", dest="resolution", type=int, default=2)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", type=lambda text: tuple(map(int, text.split("x"))), default=(960, 600))
    arguments = parser.parse_args()
    print(f"{'round':<6} {'viewer':<9} {'ms, processor':>14} {'ms, clock':>10} {'pictures/s':>11}")
    for number in range(arguments.rounds):
        for mode in ("no page", "nobody", "looking", "flying"):
            processor, clock, pictures = measure(arguments, mode)
            print(f"{number:<6} {mode:<9} {processor:>14.1f} {clock:>10.1f} {pictures:>11.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
