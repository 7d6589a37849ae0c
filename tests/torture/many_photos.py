"""Many images: ``splat train`` on more than memory could hold keeps to a bound that does not grow with their number.

``python -m tests.torture.many_photos --n 10000`` trains on so many images of 12 megapixels, names of one JPEG. A trial
is a run; it fails when its peak of resident memory is above what the cache, the images that are being decoded and a
step may take. The time until the first step is recorded; nothing is asserted of it.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from splatcli.scene.decode import DECODE_BYTES
from splatcli.scene.images import AHEAD
from tests.torture.harness import Figure, main

#: Pixels of an image: 12 million.
WIDTH, HEIGHT = 4000, 3000
#: Images are halved for training, so that decoding 12 bytes a pixel and a step 68 of a quarter are of one order.
HALVED = 2
#: Bytes that decoded images may keep: that of three images.
CACHE = 32 << 20
#: Bytes of the process itself, mostly torch; and of an image that is only known by name, camera and size.
PROCESS, NAMED = 600 << 20, 8 << 10
#: What a thread gives back after decoding stays in its part of the heap for a while, beside what the next one takes.
_GIVEN_BACK = 2
#: Bytes of a training step: a pixel, and a tile intersection (docs/memory.md). Random Gaussians are large:
#: each may touch every tile.
STEP, PAIR = 68, 86
GAUSSIANS, TILE = 500, 16
#: Images of a folder: file systems get slow with more.
_IN_FOLDER = 1000


@dataclass(frozen=True)
class Ran:
    """A run: bytes of its peak, seconds until it was ready for the first step and in all, steps done."""

    peak: int
    until_first: float
    seconds: float
    steps: int


def write_scene(root: Path, count: int, width: int = WIDTH, height: int = HEIGHT) -> Path:
    """``count`` images on circles around the origin, all of them names of one file."""
    image = root / "photo.jpg"
    y, x = np.mgrid[0:height, 0:width] / width
    waves = [np.sin(20 * x + k) * np.cos(15 * y - k) for k in range(3)]
    Image.fromarray(np.round(127.5 + 120 * np.stack(waves, axis=-1)).astype(np.uint8)).save(image, quality=90)
    frames = []
    for index in range(count):
        name = f"images/{index // _IN_FOLDER:03d}/{index:06d}.jpg"
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        os.link(image, path)
        frames.append({"file_path": name, "transform_matrix": _pose(index)})
    lens = {"fl_x": width, "fl_y": width, "cx": width / 2, "cy": height / 2, "w": width, "h": height}
    (root / "transforms.json").write_text(json.dumps({**lens, "frames": frames}))
    return root


def _pose(index: int) -> list[list[float]]:
    """Camera to world, OpenGL axes: three units from the origin, which it looks at."""
    angle, rise = 2.4 * index, 0.8 * math.sin(0.01 * index)
    back = np.array([math.cos(angle), math.sin(angle), rise])
    back /= np.linalg.norm(back)
    right = np.cross([0.0, 0.0, 1.0], back)
    right /= np.linalg.norm(right)
    c2w = np.eye(4)
    c2w[:3] = np.stack([right, np.cross(back, right), back, 3.0 * back], axis=1)
    return c2w.tolist()


#: Starts a command and prints its peak in kilobytes. A process inherits the peak of the one that starts it, so that
#: tests, which hold gigabytes by then, must not do so themselves.
_LAUNCHER = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:])
_, status, used = os.wait4(process.pid, 0)
print(used.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def train(scene: Path, output: Path, steps: int) -> Ran:
    """``splat train`` in a process of its own, few Gaussians, no held-out views."""
    settings = (f"model.random_points={GAUSSIANS}", "strategy.prune_scale3d=100", "strategy.prune_opacity=0.0001")
    words = ["train", str(scene), "-o", str(output), "-n", str(steps), "-r", str(HALVED), "--test-every", "0"]
    words += ["--init", "random", "--sh-degree", "0", "--cache-budget", f"{CACHE >> 20}M", "--device", "cpu", "--json"]
    words += [word for setting in settings for word in ("--set", setting)]
    began, ready, done = time.monotonic(), math.nan, -1
    command = [sys.executable, "-c", _LAUNCHER, sys.executable, "-m", "splatcli", *words]
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("{"):
                peak = 1024 * int(line)
                continue
            event = json.loads(line)
            if event["event"] == "started":
                ready = time.monotonic() - began
            done = event.get("step", done)
    if process.returncode:
        raise RuntimeError(f"splat train ended with {process.returncode}")
    return Ran(peak, ready, time.monotonic() - began, done)


def allowed(count: int) -> int:
    """Bytes that a run may take at its worst moment."""
    pixels = WIDTH * HEIGHT
    decoding = _GIVEN_BACK * min(AHEAD, os.cpu_count() or 1) * DECODE_BYTES * pixels
    waiting = (AHEAD + 1) * 3 * pixels // HALVED**2  # asked for ahead, and not in the cache
    isects = GAUSSIANS * math.ceil(WIDTH / HALVED / TILE) * math.ceil(HEIGHT / HALVED / TILE)
    return PROCESS + count * NAMED + CACHE + decoding + waiting + STEP * pixels // HALVED**2 + PAIR * isects


def figures(count: int, seed: int) -> dict[str, Figure]:
    """One run on ``count`` images; the seed changes nothing."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        ran = train(write_scene(Path(name), count), Path(name) / "run", 30)
    details: dict[str, int | float | str] = {
        "photos": count,
        "megapixels": WIDTH * HEIGHT // 10**6,
        "peak_mib": ran.peak >> 20,
        "allowed_mib": allowed(count) >> 20,
        "decoded_mib": 3 * count * WIDTH * HEIGHT >> 20,
        "seconds_to_first_step": round(ran.until_first, 1),
    }
    failed = ran.peak > allowed(count)
    what = "training on many photos of 12 megapixels, in one run; it fails when its peak memory is above a bound"
    shown = [f"{ran.peak >> 20} MiB"] if failed else []
    return {"many_photos": Figure(what, 1, int(failed), round(time.monotonic() - began, 1), details, shown)}


if __name__ == "__main__":
    main(figures, 10_000)
