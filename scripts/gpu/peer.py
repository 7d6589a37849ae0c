"""gsplat beside ours: its build, the same steps in one process, and training to equal PSNR."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu import ROOT
from gpu.process import Command
from gpu.report import CARRIED, Report, Skipped, is_tiny
from gpu.scenes import SIZES, SSIM_LAMBDA, Case, cases, make_scene, make_targets, measure, rate_of


class FusedLoss:
    """Our kernels for L1 + SSIM as a loss of autograd, for the peer: the same loss on both sides, as fast."""

    def __init__(self, backend: Any) -> None:
        import torch

        from splatcli.rasterizer.train_step import TrainStepPipeline

        pipeline = TrainStepPipeline(backend, None)

        class Loss(torch.autograd.Function):
            @staticmethod
            def forward(context: Any, image: Any, target: Any) -> Any:
                gradient = torch.empty_like(image)
                pipeline.loss(image, target, gradient, SSIM_LAMBDA)
                context.save_for_backward(gradient)
                l1, ssim = pipeline.l1_ssim
                return ((1 - SSIM_LAMBDA) * l1 + SSIM_LAMBDA * (1 - ssim)).float()

            @staticmethod
            def backward(context: Any, *outer: Any) -> Any:
                (gradient,) = context.saved_tensors
                return gradient * outer[0], None

        self._apply: Any = Loss.apply

    def __call__(self, image: Any, target: Any) -> Any:
        """(1 - lambda) L1 + lambda (1 - SSIM) of image [H, W, 3], contiguous, against target, uint8."""
        return self._apply(image, target)


class Peer:
    """Gaussians that gsplat renders, and torch's fused Adam."""

    def __init__(self, gaussians: Any, cameras: list[Any], rates: dict[str, float]) -> None:
        import gsplat as peer
        import torch

        self.rasterization, self.cameras = peer.rasterization, cameras
        self.leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in gaussians.items()}
        groups = [{"params": [tensor], "lr": rates[name], "name": name} for name, tensor in self.leaves.items()]
        self.adam = torch.optim.Adam(groups, eps=1e-15, fused=True)
        self.poses = [torch.from_numpy(camera.viewmat).float().cuda()[None] for camera in cameras]
        self.lenses = [
            torch.tensor([[[one.fx, 0, one.cx], [0, one.fy, one.cy], [0, 0, 1.0]]], device="cuda") for one in cameras
        ]

    def render(self, view: int) -> Any:
        """[H, W, 3]."""
        import torch

        leaves, camera = self.leaves, self.cameras[view]
        image, _, _ = self.rasterization(
            leaves["means"],
            leaves["quats"],
            torch.exp(leaves["log_scales"]),
            torch.sigmoid(leaves["logit_opacities"]),
            torch.cat([leaves["sh0"][:, None], leaves["shN"]], 1),
            self.poses[view],
            self.lenses[view],
            camera.width,
            camera.height,
            sh_degree=3,
            packed=False,
        )
        return image[0].contiguous()

    def step(self, view: int, loss: Callable[[Any], Any]) -> None:
        import torch

        torch.autograd.backward(loss(self.render(view)))
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)


def gsplat(report: Report) -> None:
    """The same steps of ours and of gsplat, in one process; its loss is ours or, to see what that costs, L1 alone."""
    refusal = await_gsplat(report)
    for case in cases():
        if report.left() < 12:
            report["left_out"] = "the time was up"
            break
        result: dict[str, Any] = {"ours": measure(case, 2.0)}
        report[case.name] = result
        if refusal is None:
            report[case.name] = result | {"gsplat": measure_peer(case, 3.0)}
    if refusal is not None:
        raise Skipped(refusal)


def await_gsplat(report: Report) -> str | None:
    """Wait for the build in the background and import it; return why it cannot be used, or None.

    gsplat removes the folder of a build that has not ended when it is imported a second time.
    """
    ending, started = Path(os.environ.get(GSPLAT_ENDED, os.devnull)), time.monotonic()
    while not (text := ending.read_text() if ending.is_file() else ""):
        if os.environ.get(GSPLAT_ENDED) is None or report.left() < 45:
            return f"gsplat's build had not ended after {time.monotonic() - started:.0f} s more"
        time.sleep(0.5)
    report["waited"] = round(time.monotonic() - started, 1)
    report["build"] = text.strip()
    if not text.startswith("0 "):
        return f"gsplat cannot be built: {text.strip()}; see gsplat-build in the log"
    try:
        import gsplat as peer
        from gsplat.cuda import _backend

        if _backend._C is None:
            return "gsplat has found no CUDA toolkit"
    except Exception as error:
        return f"gsplat cannot be imported: {error}"
    report["version"] = getattr(peer, "__version__", "unknown")
    return None


def measure_peer(case: Case, seconds: float) -> dict[str, Any]:
    """Measure gsplat's steps a second, and the memory they take."""
    import torch

    from splatcli.gaussians import GROUPS
    from splatcli.native.backend import Backend

    fused = FusedLoss(Backend.cuda("cuda:0"))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gaussians, cameras = make_scene(case.n, *SIZES[case.size], "cuda", case.views)
    targets = make_targets(cameras, "cuda")
    floats = [target.float() / 255 for target in targets[:1]]
    peer = Peer(gaussians, cameras, dict.fromkeys(GROUPS, 1e-7))
    del gaussians
    taken = [0]

    def step(plain: bool = False) -> None:
        view = taken[0] % len(cameras)
        taken[0] += 1
        peer.step(view, lambda image: (image - floats[0]).abs().mean() if plain else fused(image, targets[view]))

    result: dict[str, Any] = rate_of(step, torch.cuda.synchronize, seconds)
    result["peak_mib"] = round((torch.cuda.max_memory_allocated() - before) / 2**20)
    result["l1_only"] = rate_of(functools.partial(step, True), torch.cuda.synchronize, 1.5)
    return result


#: Where the ending of gsplat's build is written: exit status and seconds.
GSPLAT_ENDED = "GPU_CHECK_GSPLAT_ENDED"


def toolkit_environment(work: Path) -> dict[str, str]:
    """Variables by which torch builds extensions with the nvcc on the PATH, be that the toolkit's or a script for it.

    Torch takes the folder above nvcc's for the toolkit; where that has no headers, only nvcc itself finds them.
    """
    source = work / "nothing.cu"
    source.write_text("")
    try:
        command = ["nvcc", "--dryrun", "-c", str(source), "-o", str(work / "nothing.o")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError):
        return {}
    top = re.search(r"^#\$ TOP=(.+)$", done.stderr, re.M)
    if top is None:
        return {}
    home = Path(top[1].strip()).resolve()
    spec = importlib.util.find_spec("nvidia")
    wheels = [Path(base) for base in (spec.submodule_search_locations or [] if spec else [])]
    headers = [home / "include", *(path for base in wheels for path in sorted(base.glob("*/include")))]
    libraries = [home / "lib64", home / "lib", home / "targets" / "x86_64-linux" / "lib"]
    found = {"CPLUS_INCLUDE_PATH": headers, "LIBRARY_PATH": libraries}
    result = {
        name: os.pathsep.join([*filter(None, [os.environ.get(name)]), *(str(path) for path in paths if path.is_dir())])
        for name, paths in found.items()
    }
    if (home / "include" / "cuda_runtime.h").is_file():
        result["CUDA_HOME"] = str(home)
    return result


@contextlib.contextmanager
def gsplat_building(work: Path) -> Iterator[None]:
    """gsplat compiles itself for minutes at its first use: started first, it is ready when its section comes."""
    import torch

    capability = torch.cuda.get_device_capability(0) if torch.cuda.device_count() else (9, 0)
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", f"{capability[0]}.{capability[1]}")
    os.environ.setdefault("MAX_JOBS", str(max(1, (os.cpu_count() or 2) - 4)))
    # The same folder and flags as in the sections, which find it built.
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(work / "extensions"))
    os.environ["VERBOSE"] = "1"
    os.environ.update(toolkit_environment(work))
    ending = work / "gsplat.ended"
    os.environ[GSPLAT_ENDED] = str(ending)
    if not torch.cuda.device_count():
        ending.write_text("1 not built: no GPU")
        yield
        return
    program = (
        "import pathlib, sys, time; started = time.monotonic(); status = 1\n"
        "try:\n    import gsplat.cuda._backend as backend\n    status = int(backend._C is None)\n"
        "finally:\n    pathlib.Path(sys.argv[1]).write_text(f'{status} {time.monotonic() - started:.0f} s')\n"
    )
    building = Command([sys.executable, "-c", program, str(ending)], work / "gsplat-build.log", nice=15)
    try:
        yield
    finally:
        building.kill()


@dataclass(frozen=True)
class Views:
    """A carried scene: cameras, their images [H, W, 3] uint8 on the GPU, and points [P, 3] with colours [0, 1]."""

    cameras: list[Any]
    targets: list[Any]
    train: list[int]
    test: list[int]
    points: Any
    colours: Any


def load_views(folder: Path) -> Views:
    """Load what write_views() has written; needs nothing but numpy and Pillow."""
    import numpy as np
    import torch
    from PIL import Image

    from splatcli.scene.camera import Camera

    stored = json.loads((folder / "views.json").read_text(encoding="utf-8"))
    cameras, targets = [], []
    for view in stored["views"]:
        numbers = {name: float(view[name]) for name in ("fx", "fy", "cx", "cy")}
        viewmat = np.array(view["viewmat"], dtype=np.float64)
        cameras.append(Camera(view["name"], view["width"], view["height"], **numbers, viewmat=viewmat))
        with Image.open(
            ROOT / stored["images"] / view["name"] if stored["images"] else folder / "images" / view["name"]
        ) as im:
            targets.append(torch.from_numpy(np.array(im.convert("RGB"))).cuda())
    with np.load(folder / "points.npz") as points:
        xyz, rgb = torch.from_numpy(points["xyz"]).float().cuda(), torch.from_numpy(points["rgb"]).float().cuda()
    return Views(cameras, targets, stored["train"], stored["test"], xyz, rgb)


def first_gaussians(views: Views, n: int) -> Any:
    """n Gaussians around the points, as large as their neighbours are apart."""
    import torch

    from splatcli.gaussians import Gaussians

    generator = torch.Generator("cpu").manual_seed(5)
    apart = torch.cat(
        [torch.cdist(part, views.points).topk(min(4, len(views.points)), largest=False).values[:, 1:].mean(1)
         for part in views.points.split(2048)]
    ).clamp(min=1e-6)  # fmt: skip
    rows = torch.randint(0, len(views.points), (n,), generator=generator).to(views.points.device)
    jitter = torch.randn(n, 3, generator=generator).to(views.points.device)
    shrink = (len(views.points) / n) ** (1 / 3)
    return Gaussians(
        means=(views.points[rows] + 0.5 * apart[rows, None] * jitter).contiguous(),
        quats=torch.tensor([1.0, 0, 0, 0]).repeat(n, 1).to(rows.device),
        log_scales=torch.log(min(1.0, shrink) * apart[rows])[:, None].repeat(1, 3).contiguous(),
        logit_opacities=torch.full((n,), math.log(0.1 / 0.9)).to(rows.device),
        sh0=((views.colours[rows] - 0.5) / 0.28209479177387814).contiguous(),
        shN=torch.zeros(n, 15, 3).to(rows.device),
    )


class Race:
    """Training from the same Gaussians by the same schedule and order of views; only the rasterizer is another."""

    def __init__(self, views: Views, n: int, steps: int) -> None:
        import torch

        self.views, self.steps = views, steps
        self.first = first_gaussians(views, n)
        centres = torch.tensor([camera.center.tolist() for camera in views.cameras])
        self.extent = float((centres - centres.mean(0)).norm(dim=1).max())
        generator = torch.Generator().manual_seed(11)
        picked = torch.randint(0, len(views.train), (steps,), generator=generator).tolist()
        self.order = [views.train[i] for i in picked]

    def rates(self, k: int) -> dict[str, float]:
        fall = 0.01 ** (k / self.steps)
        return {
            "means": 1.6e-4 * self.extent * fall,
            "quats": 1e-3,
            "log_scales": 5e-3,
            "logit_opacities": 5e-2,
            "sh0": 2.5e-3,
            "shN": 1.25e-4,
        }

    def run(self, step: Callable[[int], None], psnr: Callable[[], float], seconds: float) -> list[tuple[float, float]]:
        """[(seconds of training, PSNR of the views that were held out)], a dozen of them."""
        import torch

        every, spent, found = max(1, self.steps // 12), 0.0, []
        begun = time.monotonic()
        for first in range(0, self.steps, every):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for k in range(first, min(first + every, self.steps)):
                step(k)
            torch.cuda.synchronize()
            spent += time.perf_counter() - started
            found.append((round(spent, 3), round(psnr(), 3)))
            if time.monotonic() - begun > seconds:
                break
        return found

    def psnr(self, render: Callable[[int], Any]) -> float:
        import torch

        with torch.no_grad():
            values = []
            for view in self.views.test:
                error = (render(view).clamp(0, 1) - self.views.targets[view].float() / 255).square().mean()
                values.append(-10 * math.log10(float(error)))
        return statistics.fmean(values)

    def ours(self, seconds: float) -> list[tuple[float, float]]:
        import torch

        from splatcli.native.backend import Backend
        from splatcli.rasterizer import AdamState, AsyncEngine, DensifyStats, StepInputs, render

        backend = Backend.cuda("cuda:0")
        gaussians = self.first.detach_clone()
        adam, stats = AdamState.zeros_like(gaussians), DensifyStats.zeros(len(gaussians), gaussians.device)
        engine, black = AsyncEngine(backend), torch.zeros(3, device=gaussians.device)
        rates: dict[str, float] = {}

        def step(k: int) -> None:
            view = self.order[k]
            camera, target = self.views.cameras[view], self.views.targets[view]
            rates.update(self.rates(k))
            engine.submit(gaussians, adam, StepInputs(camera, target, dict(rates), 3, black, SSIM_LAMBDA, False, stats))

        def psnr() -> float:
            engine.drain()
            now = adam.flushed(gaussians, rates["shN"])
            return self.psnr(lambda view: render(now, self.views.cameras[view], backend=backend).image)

        return self.run(step, psnr, seconds)

    def theirs(self, seconds: float) -> list[tuple[float, float]]:
        from splatcli.native.backend import Backend

        peer = Peer(self.first, self.views.cameras, self.rates(0))
        fused = FusedLoss(Backend.cuda("cuda:0"))

        def step(k: int) -> None:
            rates = self.rates(k)
            for group in peer.adam.param_groups:
                group["lr"] = rates[group["name"]]
            peer.step(self.order[k], lambda image: fused(image, self.views.targets[self.order[k]]))

        return self.run(step, lambda: self.psnr(peer.render), seconds)


def seconds_to(psnr: float, series: list[tuple[float, float]]) -> float | None:
    """Return when a series first reaches a PSNR, between its points by a straight line."""
    before = (0.0, -math.inf)
    for seconds, value in series:
        if value >= psnr:
            if not math.isfinite(before[1]):
                return seconds
            return round(before[0] + (seconds - before[0]) * (psnr - before[1]) / (value - before[1]), 3)
        before = (seconds, value)
    return None


def beside(report: Report) -> None:
    """Training beside gsplat on a carried scene, to equal PSNR."""
    scenes = Path(os.environ.get(CARRIED, "")) / "scene"
    folder = next((scenes / name for name in ("fox", "courtyard") if (scenes / name / "views.json").is_file()), None)
    if folder is None:
        raise Skipped("no scene was carried: see --prepare")
    report["scene"] = folder.name
    n, steps = (600, 24) if is_tiny() else (150_000, 6000)
    course = Race(load_views(folder), n, steps)
    report["gaussians"], report["steps"] = n, steps
    refusal = await_gsplat(report)
    if refusal is None:  # first of all its kernels load
        Race(course.views, 500, 12).theirs(1.0)
    Race(course.views, 500, 12).ours(1.0)
    share = max(4.0, (report.left() - 15) / 2)
    ours = course.ours(share)
    report["ours"] = ours
    if refusal is not None:
        raise Skipped(refusal)
    theirs = course.theirs(share)
    report["gsplat"] = theirs
    goal = round(min(ours[-1][1], theirs[-1][1]) - 0.1, 2)
    report["to_psnr"] = {"psnr": goal, "ours": seconds_to(goal, ours), "gsplat": seconds_to(goal, theirs)}
