"""How long a training step takes on this machine, stage by stage, beside plain torch doing the same work.

    python -m benchmarks.step MODEL [-r F] [--steps 100] [--threads N] [--isa avx512|avx2|portable] [--out FILE]

MODEL is a run or its checkpoint (its scene must still be where it was): the Gaussians are used as they are, and steps
run on copies; -r takes the images at another size than the run did. Times are medians and 10 % quantiles in
milliseconds of wall clock. The peers run in the same process: torch.optim.Adam(fused=True) on the same parameters,
L1 + SSIM in torch (separable convolutions of all five maps at once, the fastest of four forms that were tried), and a
matrix product that says what the machine gives at this moment.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import conv2d

from benchmarks.origin import origin
from splatcli import machine
from splatcli.checkpoint.file import load_checkpoint
from splatcli.cli.model import find_model
from splatcli.errors import SplatError
from splatcli.native.backend import Backend, best_isa, load_cpu
from splatcli.rasterizer import AdamState, DensifyStats, NativeEngine
from splatcli.rasterizer.step_inputs import StepInputs
from splatcli.scene.read import read_scene
from splatcli.train.schedule import learning_rates

_times: dict[str, list[float]] = defaultdict(list)


@dataclass(frozen=True)
class TimedBackend(Backend):
    """A backend that notes how long each call takes."""

    def call(self, name: str, *arguments: Any) -> int:
        started = time.perf_counter()
        result = super().call(name, *arguments)
        _times[name].append(1e3 * (time.perf_counter() - started))
        return result


def timed(function: Callable[[], object], repeats: int) -> list[float]:
    """Milliseconds of each of ``repeats`` calls, after one that does not count."""
    function()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(1e3 * (time.perf_counter() - started))
    return times


def summary(times: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(times), 3),
        "p10": round(sorted(times)[len(times) // 10], 3),
    }


def torch_loss(image: torch.Tensor, target: torch.Tensor, ssim_lambda: float) -> torch.Tensor:
    """The training loss of image and target [1, 3, H, W] in torch, as fast as convolutions make it."""
    taps = torch.exp(-((torch.arange(11.0) - 5.0) ** 2) / (2 * 1.5**2))
    taps /= taps.sum()
    maps = torch.cat([image, target, image * image, target * target, image * target], 1)
    channels = maps.shape[1]
    across, down = taps.view(1, 1, 1, 11).repeat(channels, 1, 1, 1), taps.view(1, 1, 11, 1).repeat(channels, 1, 1, 1)
    maps = conv2d(conv2d(maps, across, padding=(0, 5), groups=channels), down, padding=(5, 0), groups=channels)
    x, y, xx, yy, xy = maps.chunk(5, 1)
    numerator = (2 * x * y + 0.01**2) * (2 * (xy - x * y) + 0.03**2)
    ssim = numerator / ((x * x + y * y + 0.01**2) * (xx - x * x + yy - y * y + 0.03**2))
    return (1 - ssim_lambda) * (image - target).abs().mean() + ssim_lambda * (1 - ssim.mean())


def peers(gaussians: Any, targets: list[torch.Tensor], repeats: int) -> dict[str, Any]:
    """The same loss and the same Adam in torch, and the machine's speed at a matrix product."""
    leaves = [t.clone().requires_grad_(True) for _, t in gaussians.items()]
    for leaf in leaves:
        leaf.grad = torch.randn_like(leaf)
    adam = torch.optim.Adam([{"params": [leaf], "lr": 1e-3} for leaf in leaves], eps=1e-15, fused=True)
    target = (targets[0].float() / 255.0).permute(2, 0, 1)[None].contiguous()
    image = torch.rand_like(target).requires_grad_(True)

    def loss() -> None:
        image.grad = None
        torch_loss(image, target, 0.2).backward()

    a = torch.rand(1024, 1024)
    product = timed(lambda: a @ a, repeats)
    return {
        "torch_adam_fused": summary(timed(adam.step, repeats)),
        "torch_l1_ssim": summary(timed(loss, repeats)),
        "matmul_gflops": round(2 * 1024**3 / (min(product) * 1e6), 1),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the result as JSON. Raises SplatError without a checkpoint, or its scene."""
    torch.set_num_threads(options.threads)
    checkpoint = load_checkpoint(find_model(options.model))
    data = checkpoint.config.data
    if options.resolution is not None:
        data = data.model_copy(update={"resolution": options.resolution})
    scene = read_scene(Path(checkpoint.dataset.root), data)
    views = checkpoint.train
    targets = {i: torch.from_numpy(scene.images.load(i)) for i in views}
    gaussians = checkpoint.gaussians.detach_clone()
    adam = AdamState.zeros_like(gaussians)
    stats = DensifyStats.zeros(len(gaussians))
    backend = TimedBackend(load_cpu(options.isa), torch.float32, options.threads)
    engine = NativeEngine(backend)
    # Tiny steps: the Gaussians stay those of the checkpoint, so that all steps do the same work.
    rates = learning_rates(checkpoint.config.optim, checkpoint.config.schedule, checkpoint.dataset.extent, 10**9)
    rates = {name: rate * 1e-3 for name, rate in rates.items()}
    background = torch.zeros(3)

    counts = defaultdict(list)
    total = []
    for k in range(-10, options.steps):
        view = views[k % len(views)]
        if k == 0:
            _times.clear()
        started = time.perf_counter()
        engine.step(
            gaussians,
            adam,
            StepInputs(
                scene.cameras[view],
                targets[view],
                lrs=rates,
                sh_degree=gaussians.sh_degree,
                background=background,
                ssim_lambda=0.2,
                antialiased=False,
                stats=stats,
            ),
        )
        if k >= 0:
            total.append(1e3 * (time.perf_counter() - started))
            counts["visible"].append(engine.context.native.visible)
            counts["pairs"].append(engine.context.native.isects)

    camera = scene.cameras[views[0]]
    return {
        "command": " ".join(["python", *sys.argv]),
        **origin(),
        "threads": options.threads,
        "isa": options.isa,
        "scene": Path(checkpoint.dataset.root).name,
        "size": f"{camera.width}x{camera.height}",
        "gaussians": len(gaussians),
        "visible": round(statistics.mean(counts["visible"])),
        "pairs": round(statistics.mean(counts["pairs"])),
        "step_ms": summary(total),
        "stages_ms": {name: summary(times) for name, times in _times.items() if not name.endswith("bytes")},
        "peers_ms": peers(gaussians, list(targets.values()), 20),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("-r", "--resolution", type=float)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=machine.cores())
    parser.add_argument("--isa", default=best_isa())
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    try:
        result = measure(options)
    except SplatError as error:
        parser.exit(error.exit_code, "\n".join(error.lines()) + "\n")
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
