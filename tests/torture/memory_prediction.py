"""Memory: what training steps and renders really take, against what was predicted from counts.

``python -m tests.torture.memory_prediction --json FILE`` measures the whole grid. On the CPU each case runs in a
process of its own, whose peak of resident memory counts; where SH coefficients lie in a file, that of its own memory,
read after each step. Then, where there is a GPU, torch's peak of allocated memory on it. A case fails when the
prediction is below what was taken, or more than 1.6 times above.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from splatcli.config import Config, DataConfig
from splatcli.gaussians import GROUPS, SHN_COUNTS, Gaussians
from splatcli.native.backend import Backend
from splatcli.rasterizer import AdamState, AsyncEngine, DensifyStats, NativeEngine, StepInputs, render
from splatcli.rasterizer.memory_budget import held_memory
from splatcli.rasterizer.memory_estimate import Workload, predict_isects, render_memory, step_memory
from splatcli.rasterizer.offload import TensorStorage, storage_for
from splatcli.scene.camera import Camera
from splatcli.scene.read import read_scene
from splatcli.train.init import gaussians_from_points
from tests.rasterizer.scenes import random_camera
from tests.torture.harness import Figure, fork, main

DATA = Path(__file__).resolve().parents[2] / "../shared/data"

#: A prediction may be this much above what is taken, and not at all below.
MOST = 1.6

#: Steps of a case, each on another view.
STEPS = 4


@dataclass(frozen=True)
class Case:
    """One measurement.

    work: "step" or "render". scene: "random", or a folder of the data, with its own image sizes. size: median standard
    deviation of the Gaussians, in world units; of real scenes, against the distance to the nearest points. offload:
    with shN and its moments elsewhere.
    """

    work: str
    scene: str
    gaussians: int
    sh_degree: int
    width: int
    height: int
    size: float = 0.01
    offload: bool = False

    @property
    def name(self) -> str:
        shape = f"{self.width}x{self.height}"
        return (
            f"{self.work} {self.scene} N={self.gaussians} SH{self.sh_degree} {shape} size={self.size:g}"
            + self.offload * " offload"
        )


@dataclass(frozen=True)
class Measured:
    """Bytes; pairs and visible are those of the fullest view, predicted."""

    name: str
    predicted: int
    actual: int
    isects: int
    visible: int

    @property
    def ratio(self) -> float:
        return self.predicted / self.actual

    @property
    def holds(self) -> bool:
        return 1.0 <= self.ratio <= MOST


def grid() -> Iterator[Case]:
    """Counts from 100,000 to a million, small and large images, all kinds of colour, few intersections and many."""
    for work in ("step", "render"):
        for degree in (0, 1, 3, 4):
            yield Case(work, "random", 200_000, degree, 640, 480)
        for count in (100_000, 400_000, 1_000_000):
            yield Case(work, "random", count, 3, 800, 600)
        for width, height in ((320, 240), (1600, 1063), (3840, 2160)):
            yield Case(work, "random", 100_000, 2, width, height)
        for size in (0.002, 0.03, 0.1):
            yield Case(work, "random", 100_000, 3, 960, 540, size)
        if work == "step":
            yield Case(work, "random", 100_000, 4, 640, 480, offload=True)
            yield Case(work, "random", 400_000, 3, 800, 600, offload=True)
            yield Case(work, "random", 1_000_000, 3, 800, 600, offload=True)
        for scene in ("fox", "miku"):
            if (DATA / scene).is_dir():
                yield Case(work, scene, 100_000, 3, 0, 0, 0.5)
                yield Case(work, scene, 300_000, 1, 0, 0, 0.5)


def quick_grid() -> Iterator[Case]:
    """A few of them, small."""
    yield Case("step", "random", 60_000, 3, 320, 240)
    yield Case("step", "random", 100_000, 3, 320, 240, offload=True)
    yield Case("step", "random", 10_000, 0, 1280, 720)
    yield Case("step", "random", 30_000, 1, 640, 480, 0.1)
    yield Case("render", "random", 100_000, 3, 640, 480)
    yield Case("render", "random", 30_000, 0, 640, 480, 0.1)


def measure(case: Case, device: str) -> Measured:
    """The case in a child process, so that nothing was there before."""
    reader, writer = os.pipe()
    child = fork() if device == "cpu" else 0
    if device != "cpu":
        return _measured(case, torch.device(device))
    if child == 0:
        status = 1
        try:
            os.close(reader)
            torch.set_num_threads(1)  # the parent's threads did not survive the fork
            answer = asdict(_measured(case, torch.device("cpu")))
            os.write(writer, json.dumps(answer).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as answers:
        text = answers.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"{case.name}: the process ended with {status}")
    return Measured(**json.loads(text))


def _measured(case: Case, device: torch.device) -> Measured:
    backend = Backend.cuda(device) if device.type == "cuda" else Backend.cpu()
    _work(replace(case, gaussians=300, scene="random", width=64, height=64), backend)  # threads, tables, libraries
    if case.scene != "random":
        _scene(replace(case, gaussians=300))  # its readers
    _give_back()
    before = held_memory(device, offloads=case.offload)
    own = _work(case, backend)
    actual = (own if case.offload and device.type == "cpu" else _peak(device)) - before
    model, cameras = _scene(case)
    counts = [predict_isects(model, camera) for camera in cameras]
    fullest = max(range(len(cameras)), key=lambda i: counts[i].boxes)
    camera = cameras[fullest]
    size = (camera.width, camera.height)
    work = Workload(case.gaussians, case.sh_degree, *size, counts[fullest], alpha=True, offloads=case.offload)
    footprint = (step_memory if case.work == "step" else render_memory)(backend, work)
    return Measured(case.name, footprint.total, actual, counts[fullest].isects, counts[fullest].visible)


def _work(case: Case, backend: Backend) -> int:
    """The case itself; memory that only making the scene takes is gone before the peak comes.

    Returns the most memory that was the process's own after a step.
    """
    with tempfile.TemporaryDirectory() as folder:
        return _work_in(case, backend, storage_for(case.offload, backend.device, Path(folder)))


def _work_in(case: Case, backend: Backend, store: TensorStorage) -> int:
    gaussians, cameras = _scene(case)
    rest = (lambda tensor: store.copy(tensor, backend.device)) if store.offloads else None
    gaussians = gaussians.map(lambda tensor: tensor.to(backend.device), rest)
    if case.work == "render":
        _forget_peak(backend.device)
        with torch.no_grad():
            for camera in cameras:
                render(gaussians, camera, backend=backend)
        return 0
    adam, stats = AdamState.zeros_like(gaussians, storage=store), DensifyStats.zeros(len(gaussians), backend.device)
    for group in (adam.exp_avg, adam.exp_avg_sq):
        for _, moments in group.items():
            moments.zero_()  # pages of zeros that were never written to take no memory, and do once a view has come
    engine = AsyncEngine(backend) if backend.deferred else NativeEngine(backend)
    _forget_peak(backend.device)
    own = 0
    for camera in cameras:
        target = torch.full((camera.height, camera.width, 3), 128, dtype=torch.uint8, device=backend.device)
        background = torch.zeros(3, device=backend.device)
        lrs = dict.fromkeys(GROUPS, 0.0)  # so that all views are those that the pairs were counted for
        engine.submit(
            gaussians,
            adam,
            StepInputs(camera, target, lrs, case.sh_degree, background, 0.2, False, stats, alpha_lambda=0.1),
        )
        own = max(own, held_memory(backend.device, offloads=True))
    engine.drain()
    return own


def _scene(case: Case) -> tuple[Gaussians, list[Camera]]:
    """Made in float32 and in place, on the CPU: what is not kept is small."""
    if case.scene == "random":
        rng = torch.Generator().manual_seed(case.gaussians)
        count = case.gaussians
        gaussians = Gaussians(
            means=torch.randn(count, 3, generator=rng),
            quats=torch.randn(count, 4, generator=rng),
            log_scales=torch.randn(count, 3, generator=rng).mul_(0.6).add_(float(np.log(case.size))),
            logit_opacities=torch.randn(count, generator=rng).mul_(2.0),
            sh0=torch.randn(count, 3, generator=rng),
            shN=torch.randn(count, SHN_COUNTS[case.sh_degree], 3, generator=rng).mul_(0.2),
        )
        return gaussians, [random_camera(k, case.width, case.height) for k in range(STEPS)]
    scene = read_scene(DATA / case.scene, DataConfig())
    assert scene.points is not None
    xyz = np.unique(scene.points.xyz, axis=0)
    start = gaussians_from_points(xyz, np.full(xyz.shape, 0.4, np.float32), Config())
    # As many as asked for: points of the scene again and again, a little beside themselves.
    rows = torch.arange(case.gaussians) % len(xyz)
    jitter = torch.randn(case.gaussians, 3, generator=torch.Generator().manual_seed(0))
    log_scales = start.log_scales[rows] + float(np.log(case.size))
    return (
        Gaussians(
            means=jitter.mul_(log_scales.exp()).add_(start.means[rows]),
            quats=start.quats[rows],
            log_scales=log_scales,
            logit_opacities=torch.full((case.gaussians,), 1.0),
            sh0=start.sh0[rows],
            shN=torch.zeros(case.gaussians, SHN_COUNTS[case.sh_degree], 3).add_(0.01),
        ),
        scene.cameras[:: max(1, len(scene.cameras) // STEPS)][:STEPS],
    )


def _give_back() -> None:
    """Give freed memory back to the system; used again, it would not be seen to be taken."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _forget_peak(device: torch.device) -> None:
    _give_back()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def figures(count: int, seed: int) -> dict[str, Figure]:
    """The first ``count`` cases on each device that there is; they are the same for every seed."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return {f"memory_prediction_{device}": _figure(device, list(grid())[:count]) for device in devices}


def _figure(device: str, cases: list[Case]) -> Figure:
    start = time.monotonic()
    found = [measure(case, device) for case in cases]
    failed = [measured for measured in found if not measured.holds]
    ratios = [measured.ratio for measured in found]
    return Figure(
        "peak memory of a training step or render against its prediction; it fails below it, or 1.6 times above",
        len(found),
        len(failed),
        round(time.monotonic() - start, 1),
        {"least": round(min(ratios), 3), "most": round(max(ratios), 3)}
        | {measured.name: round(measured.ratio, 3) for measured in found},
        [f"{measured.name}: {measured.predicted:,} predicted, {measured.actual:,} taken" for measured in failed],
    )


if __name__ == "__main__":
    main(figures, 37)
