"""PSNR of one held-out view over the wall time of a training run.

    PYTHONPATH=. python -m benchmarks.psnr_curve SCENE VIEW [--out FILE] [--at 2 4 8 ...]

The clock starts before torch is imported. VIEW is a file name among the held-out images of SCENE. It is rendered and
compared between two steps, and the time for that is subtracted. The curve replaces the one of the same program in FILE;
curves of other programs stay. ``python -m benchmarks.psnr_plot`` draws the file.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splatcli.train.events import Stepped

START = time.perf_counter()

RESULTS = Path(__file__).resolve().parent / "results" / "psnr_over_time.json"

#: Name of this project's curve.
OURS = "splat train"

#: Seconds after which the view is scored; the last step is scored too.
AT = (2, 4, 6, 8, 10, 13, 16, 20, 25, 30, 40, 50, 60, 80, 100, 120, 150, 200, 300)


class Scorer:
    """Scores one view of a trainer's model when the next of some times has passed: a callback of ``Trainer``."""

    def __init__(self, scene: Any, view: str, at: list[float]) -> None:
        self.camera, self.image = scene_view(scene, view)
        self.model: Any = None  # a function that returns the model in training
        self.left = sorted(at)
        self.points: list[dict[str, float]] = []
        self.lost = 0.0

    def seconds(self) -> float:
        """Wall time of the run itself."""
        return time.perf_counter() - START - self.lost

    def on_step(self, event: Stepped) -> None:
        now = self.seconds()
        if self.left and now >= self.left[0]:
            self.left = [later for later in self.left if later > now]
            self.score(event.step)

    def score(self, step: int) -> None:
        seconds, began = self.seconds(), time.perf_counter()
        error = self.model().render(self.camera).image.clamp(0, 1) - self.image
        psnr = -10 * math.log10(error.square().mean().item())
        self.points.append({"seconds": round(seconds, 2), "step": step, "psnr": round(psnr, 3)})
        print(f"{seconds:8.2f} s  step {step:6d}  {psnr:.2f} dB", file=sys.stderr, flush=True)
        self.lost += time.perf_counter() - began


def scene_view(scene: Any, name: str) -> tuple[Any, Any]:
    """(camera, image [H, W, 3] in 0 to 1) of a held-out view."""
    import torch

    held_out = {scene.cameras[index].name: index for index in scene.test}
    if name not in held_out:
        raise SystemExit(f"{name} is not held out; these are: {', '.join(held_out)}")
    pixels = scene.images.image(held_out[name]).pixels
    return scene.cameras[held_out[name]], torch.from_numpy(pixels).float() / 255


def with_curve(file: Path, facts: dict[str, Any], curve: dict[str, Any]) -> dict[str, Any]:
    """The content of ``file`` with ``curve`` in the place of the one of the same name."""
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {**facts, "curves": []}
    others = {key: known.get(key) for key in facts}
    if others != facts:
        raise SystemExit(f"{file} is of {others}, and this is {facts}: name another file with --out")
    names = [other["program"] for other in known["curves"]]
    position = names.index(curve["program"]) if curve["program"] in names else len(names)
    known["curves"][position : position + 1] = [curve]
    return known


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scene", type=Path)
    parser.add_argument("view", help="file name of a held-out image")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("-r", dest="resolution", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=3000)
    parser.add_argument("--cap-max", type=int, default=50_000)
    parser.add_argument("--at", type=float, nargs="+", default=AT, help="seconds after which the view is scored")
    arguments = parser.parse_args()

    import splatcli

    settings = {"iterations": arguments.iterations, "cap_max": arguments.cap_max}
    scene = splatcli.Scene.open(arguments.scene, resolution=arguments.resolution)
    scorer = Scorer(scene, arguments.view, arguments.at)
    height, width = scorer.image.shape[:2]
    facts = {"scene": arguments.scene.name, "size": f"{width}x{height}", "view": arguments.view}
    with_curve(arguments.out, facts, {"program": OURS})  # refused now rather than after the run
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        trainer = splatcli.Trainer(scene, output=output, device="cpu", callbacks=[scorer], **settings)
        scorer.model = lambda: trainer.model
        run = trainer.run()
        scorer.score(run.step)

    from splatcli.bench import describe_machine

    curve = {"program": OURS, **describe_machine(), "settings": settings, "points": scorer.points}
    curve["metrics"] = run.metrics
    content = json.dumps(with_curve(arguments.out, facts, curve), indent=1)
    arguments.out.write_text(content + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
