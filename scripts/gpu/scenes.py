"""The scenes that are measured, and training on them."""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpu.report import is_tiny

#: Width and height by what they are called in megapixels.
SIZES = {"0.1": (400, 256), "1": (1248, 832), "2": (1920, 1080), "tiny": (64, 48)}


@dataclass(frozen=True)
class Case:
    """A scene that is measured: Gaussians, a key of SIZES, and where the cameras look."""

    n: int
    size: str
    views: str

    @property
    def name(self) -> str:
        return f"{self.n / 1e6:g}M {self.size}MP {self.views}"


#: What matters most first.
CASES = [
    Case(1_000_000, "2", "front"),
    Case(1_000_000, "1", "orbit"),
    Case(300_000, "1", "front"),
    Case(3_000_000, "2", "orbit"),
    Case(50_000, "0.1", "front"),
    Case(3_000_000, "2", "front"),
    Case(300_000, "2", "orbit"),
    Case(1_000_000, "0.1", "front"),
    Case(50_000, "1", "orbit"),
    Case(300_000, "0.1", "orbit"),
]

SSIM_LAMBDA = 0.2


def cases() -> list[Case]:
    return [Case(400, "tiny", "front"), Case(400, "tiny", "orbit")] if is_tiny() else CASES


def make_scene(
    n: int, width: int, height: int, device: str, views: str = "front", seed: int = 0
) -> tuple[Any, list[Any]]:
    """(Gaussians, cameras); see the top of this file."""
    import torch

    from splatcli.gaussians import Gaussians

    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    surface = torch.randint(0, 4, (n,), generator=generator, device=device)
    depths = torch.tensor([2.0, 3.0, 5.0, 9.0], device=device)[surface]
    uv = torch.rand(n, 2, generator=generator, device=device) * 1.04 - 0.52
    waves = 0.15 * torch.sin(uv[:, 0] * 9 + surface) * torch.cos(uv[:, 1] * 7 - surface)
    z = depths * (1 + waves + 0.02 * normal(n))
    if views == "front":
        focal, seen = 0.9 * width, int(0.6 * n)
        z[seen:] *= -1.0  # behind the camera
        means = torch.stack([uv[:, 0] * width / focal * z, uv[:, 1] * height / focal * z, z], 1)
    else:
        # A camera with a focal length of half its width sees a quarter of the circle.
        focal, seen = 0.5 * width, int(0.25 * n)
        angle = 2 * math.pi * torch.rand(n, generator=generator, device=device)
        means = torch.stack([torch.sin(angle) * z, uv[:, 1] * height / focal * z, torch.cos(angle) * z], 1)
    # In pixels: apart from each other as the visible are dense, some much larger, one axis thin.
    sigma = math.sqrt(width * height / seen) * torch.exp(normal(n, 1) + 0.4 * normal(n, 3))
    sigma[:, 2] *= 0.2
    order = torch.randperm(n, generator=generator, device=device)
    gaussians = Gaussians(
        means=means[order].contiguous(),
        quats=normal(n, 4),
        log_scales=torch.log(sigma * z.abs()[:, None] / focal)[order].contiguous(),
        logit_opacities=-0.5 + 1.7 * normal(n),
        sh0=0.5 * normal(n, 3),
        shN=0.1 * normal(n, 15, 3),
    )
    return gaussians, make_cameras(width, height, focal, views)


def make_cameras(width: int, height: int, focal: float, views: str) -> list[Any]:
    """Eight that hardly differ, or twelve that look outward all around."""
    import numpy as np

    from splatcli.scene.camera import Camera

    cameras = []
    for i in range(8 if views == "front" else 12):
        yaw = math.radians(2.0 * math.sin(i) if views == "front" else 30.0 * i)
        pitch = math.radians(1.5 * math.cos(2 * i))
        turn = np.array([[math.cos(yaw), 0, math.sin(yaw)], [0, 1, 0], [-math.sin(yaw), 0, math.cos(yaw)]])
        tilt = np.array([[1, 0, 0], [0, math.cos(pitch), -math.sin(pitch)], [0, math.sin(pitch), math.cos(pitch)]])
        viewmat = np.eye(4)
        viewmat[:3, :3] = tilt @ turn
        viewmat[:3, 3] = [0.02 * math.cos(i), 0.02 * math.sin(3 * i), 0.0]
        cameras.append(Camera(f"{i}.png", width, height, focal, focal, width / 2, height / 2, viewmat))
    return cameras


def make_targets(cameras: list[Any], device: str) -> list[Any]:
    """Smooth images with a little noise, [H, W, 3] uint8."""
    import torch

    generator = torch.Generator(device).manual_seed(99)
    targets = []
    for i, camera in enumerate(cameras):
        ys = torch.arange(camera.height, device=device)[:, None, None] / (31.0 + i)
        xs = torch.arange(camera.width, device=device)[None, :, None] / (23.0 + i)
        noise = torch.rand(camera.height, camera.width, 3, generator=generator, device=device)
        image = 0.5 + 0.3 * torch.sin(xs + torch.arange(3, device=device)) * torch.cos(ys) + 0.2 * (noise - 0.5)
        targets.append((image.clamp(0, 1) * 255).to(torch.uint8))
    return targets


class Training:
    """A scene and an engine; steps so small that all do the same work."""

    def __init__(self, case: Case, *, rate: float = 1e-7, backend: Any = None, **engine: Any) -> None:
        import torch

        from splatcli.gaussians import GROUPS
        from splatcli.native.backend import Backend
        from splatcli.rasterizer import AdamState, AsyncEngine, DensifyStats

        self.backend = backend or Backend.cuda("cuda:0")
        device = str(self.backend.device)
        self.gaussians, self.cameras = make_scene(case.n, *SIZES[case.size], device, case.views)
        self.targets = make_targets(self.cameras, device)
        self.adam = AdamState.zeros_like(self.gaussians)
        self.stats = DensifyStats.zeros(case.n, device)
        self.background = torch.zeros(3, device=device)
        self.lrs = dict.fromkeys(GROUPS, rate)
        self.engine = AsyncEngine(self.backend, **engine)
        self.taken = 0

    def step(self) -> None:
        from splatcli.rasterizer import StepInputs

        view = self.taken % len(self.cameras)
        self.taken += 1
        self.engine.submit(
            self.gaussians,
            self.adam,
            StepInputs(
                self.cameras[view],
                self.targets[view],
                self.lrs,
                self.gaussians.sh_degree,
                self.background,
                SSIM_LAMBDA,
                False,
                self.stats,
            ),
        )

    def finish(self) -> None:
        import torch

        self.engine.drain()
        torch.cuda.synchronize()

    def counts(self) -> dict[str, float]:
        """Return the counts of the last view: visible Gaussians and tile intersections."""
        visible, _, isects, overflow = self.engine.context.counters.tolist()
        return {
            "visible": visible,
            "visible_share": round(visible / max(1, len(self.gaussians)), 3),
            "isects": isects,
            "isects_per_visible": round(isects / max(1, visible), 2),
            "overflow": overflow,
        }

    def digest(self) -> str:
        digest = hashlib.sha256()
        for bundle in (self.gaussians, self.adam.exp_avg, self.adam.exp_avg_sq):
            for _, tensor in bundle.items():
                digest.update(tensor.cpu().numpy().tobytes())
        for tensor in (self.adam.sh_last_step, self.stats.grad2d, self.stats.count):
            digest.update(tensor.cpu().numpy().tobytes())
        return digest.hexdigest()


def rate_of(step: Callable[[], None], finish: Callable[[], None], seconds: float) -> dict[str, float]:
    """Steps a second by the wall clock: the median of rounds, after some that do not count."""
    few = 2 if is_tiny() else 12  # every camera once
    for _ in range(few):
        step()
    finish()
    started = time.perf_counter()
    for _ in range(few):
        step()
    finish()
    steps = max(1 if is_tiny() else 5, min(400, int(seconds / 4 * few / (time.perf_counter() - started))))
    times = []
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(steps):
            step()
        finish()
        times.append((time.perf_counter() - started) / steps)
    middle = statistics.median(times)
    return {
        "ms": round(1e3 * middle, 4),
        "steps_per_second": round(1 / middle, 1),
        "spread": round((max(times) - min(times)) / middle, 4),
        "steps": steps,
    }


def measure(case: Case, seconds: float) -> dict[str, float]:
    """Measure our steps a second, and the memory they take."""
    import torch

    from splatcli.native.backend import Backend

    backend = Backend.cuda("cuda:0")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    training = Training(case, backend=backend)
    fixed = torch.cuda.memory_allocated() - before
    result: dict[str, float] = rate_of(training.step, training.finish, seconds)
    # From here on the numbers of one view, the last.
    result.update(training.counts())
    result["peak_mib"] = round((torch.cuda.max_memory_allocated() - before) / 2**20)
    result["parameters_moments_targets_mib"] = round(fixed / 2**20)
    return result
