"""Tests and measures the CUDA backend on this machine's GPU, within a time limit.

    scripts/gpu_check --out DIR [--seconds 500] [--only SECTION,SECTION]

Every section is a process of its own, with a share of the time, so that a fault or a hang in one loses no other.
DIR/gpu_check.json is complete after every section, DIR/SECTION.log holds what it printed, and a short table comes last.
Exit code: 0 when no section failed, 1 when one did, 2 for wrong arguments or without a GPU.

The scenes are made up, with the statistics of trained ones: of N Gaussians three fifths are in view, on four wavy
surfaces, each within a few pixels of its neighbours. At 1 M and 2 megapixels a visible Gaussian covers about four tiles
(the report says how many it was). The views are eight cameras that turn and shift a little.
Only torch, numpy and the rasterizer's own parts of the package are needed, so that it runs where the rest is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

#: Bytes a second that a device-to-device copy moves on an H200, reads and writes counted.
H200_BYTES = 4.3e12
MEGAPIXEL = {"1": (1248, 832), "2": (1920, 1080)}
#: Gaussians and megapixels, what matters most first.
CASES = [(1_000_000, "2"), (300_000, "1"), (1_000_000, "1"), (3_000_000, "2"), (3_000_000, "1"), (300_000, "2")]
SSIM_LAMBDA = 0.2

# --- sections and their report ---------------------------------------------------------------------------------------


class Report:
    """What a section found so far, on disk after every new number."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self.until = path, time.monotonic() + seconds
        self.found: dict[str, Any] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        self.found[name] = value
        write_json(self.path, self.found)

    def left(self) -> float:
        return self.until - time.monotonic()


class Skipped(Exception):
    """The section cannot run here, which is nobody's fault."""


@dataclass(frozen=True)
class Section:
    run: Callable[[Report], None]
    seconds: float  # at most, of whatever time is left


def write_json(path: Path, value: Any) -> None:
    """Another process never sees half a file."""
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(scratch, path)


def run_child(command: list[str], log: Path, seconds: float, **environment: str) -> int | None:
    """The exit status of a command, or None when it ran out of time; then it and its children are killed."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_section(name: str, out: Path, seconds: float) -> dict[str, Any]:
    """Runs a section in a process of its own; what it found, also when it did not come to its end."""
    partial, log = out / f".{name}.json", out / f"{name}.log"
    partial.unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__).resolve()), "--section", name, "--out", str(out)]
    # A little more than the section knows of, so that it can end by itself.
    status = run_child([*command, "--seconds", str(max(1.0, seconds - 5.0))], log, seconds)
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(partial.read_text(encoding="utf-8"))
    partial.unlink(missing_ok=True)
    if status is None:
        return {"status": "failed", "error": f"not done after {seconds:.0f} s", **found}
    if status != 0:
        lines = log.read_text(errors="replace").splitlines()
        return {"status": "failed", "error": "\n".join(lines[-15:]) or f"exit status {status}", **found}
    return {"status": "skipped" if "skipped" in found else "ok", **found}


Runner = Callable[[str, Path, float], dict[str, Any]]


def check(out: Path, seconds: float, names: list[str], runner: Runner = run_section) -> dict[str, Any]:
    """Runs sections one after the other within the time; writes the report after each and returns it."""
    started = time.monotonic()
    report: dict[str, Any] = {
        "format": 1,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "sections": {},
    }
    for name in names:
        begun = time.monotonic()
        share = min(SECTIONS[name].seconds, seconds - (begun - started))
        try:
            result = runner(name, out, share) if share >= 2 else {"status": "skipped", "skipped": "no time was left"}
        except Exception as error:
            result = {"status": "failed", "error": f"{type(error).__name__}: {error}"}
        report["sections"][name] = {**result, "seconds": round(time.monotonic() - begun, 1)}
        report["seconds"] = round(time.monotonic() - started, 1)
        write_json(out / "gpu_check.json", report)
        print(f"{name}: {result['status']}, {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    return report


# --- scenes ----------------------------------------------------------------------------------------------------------


def make_scene(n: int, width: int, height: int, device: str, seed: int = 0) -> tuple[Any, list[Any]]:
    """(Gaussians, cameras); see the top of this file."""
    import numpy as np
    import torch

    from splatcli.gaussians import Gaussians
    from splatcli.scene.camera import Camera

    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    focal, seen = 0.9 * width, int(0.6 * n)
    uv = (torch.rand(n, 2, generator=generator, device=device) * 1.04 - 0.52) * torch.tensor(
        [width, height], device=device
    )
    surface = torch.randint(0, 4, (n,), generator=generator, device=device)
    waves = 0.15 * torch.sin(uv[:, 0] / width * 9 + surface) * torch.cos(uv[:, 1] / height * 7 - surface)
    z = torch.tensor([2.0, 3.0, 5.0, 9.0], device=device)[surface] * (1 + waves + 0.02 * normal(n))
    z[seen:] *= -1.0  # behind the camera
    # In pixels: apart from each other as the visible are dense, some much larger, one axis thin.
    sigma = math.sqrt(width * height / seen) * torch.exp(normal(n, 1) + 0.4 * normal(n, 3))
    sigma[:, 2] *= 0.2
    order = torch.randperm(n, generator=generator, device=device)
    gaussians = Gaussians(
        means=torch.stack([uv[:, 0] / focal * z, uv[:, 1] / focal * z, z], 1)[order].contiguous(),
        quats=normal(n, 4),
        log_scales=torch.log(sigma * z.abs()[:, None] / focal)[order].contiguous(),
        logit_opacities=-0.5 + 1.7 * normal(n),
        sh0=0.5 * normal(n, 3),
        shN=0.1 * normal(n, 15, 3),
    )
    cameras = []
    for i in range(8):
        yaw, pitch = math.radians(2.0 * math.sin(i)), math.radians(1.5 * math.cos(2 * i))
        turn = np.array([[math.cos(yaw), 0, math.sin(yaw)], [0, 1, 0], [-math.sin(yaw), 0, math.cos(yaw)]])
        tilt = np.array([[1, 0, 0], [0, math.cos(pitch), -math.sin(pitch)], [0, math.sin(pitch), math.cos(pitch)]])
        viewmat = np.eye(4)
        viewmat[:3, :3] = tilt @ turn
        viewmat[:3, 3] = [0.02 * math.cos(i), 0.02 * math.sin(3 * i), 0.0]
        cameras.append(Camera(f"{i}.png", width, height, focal, focal, width / 2, height / 2, viewmat))
    return gaussians, cameras


def make_targets(cameras: list[Any], device: str) -> list[Any]:
    """Smooth pictures with a little noise, [H, W, 3] uint8."""
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

    def __init__(
        self, n: int, width: int, height: int, *, rate: float = 1e-7, backend: Any = None, **engine: Any
    ) -> None:
        import torch

        from splatcli.gaussians import GROUPS
        from splatcli.native.call import Backend
        from splatcli.raster import AdamState, DeferredEngine, GrowthStats

        self.backend = backend or Backend.cuda("cuda:0")
        device = str(self.backend.device)
        self.gaussians, self.cameras = make_scene(n, width, height, device)
        self.targets = make_targets(self.cameras, device)
        self.adam = AdamState.zeros_like(self.gaussians)
        self.stats = GrowthStats.zeros(n, device)
        self.background = torch.zeros(3, device=device)
        self.lrs = dict.fromkeys(GROUPS, rate)
        self.engine = DeferredEngine(self.backend, **engine)
        self.taken = 0

    def step(self) -> None:
        from splatcli.raster import StepInputs

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
        if self.backend.device.type == "cuda":
            torch.cuda.synchronize()

    def counts(self) -> dict[str, float]:
        """Of the last view: Gaussians, the visible, tile pairs."""
        visible, _, pairs, overflow = self.engine.frame.counters.tolist()
        return {
            "visible": visible,
            "pairs": pairs,
            "pairs_per_visible": round(pairs / max(1, visible), 2),
            "overflow": overflow,
        }

    def digest(self) -> str:
        digest = hashlib.sha256()
        for bundle in (self.gaussians, self.adam.exp_avg, self.adam.exp_avg_sq):
            for _, tensor in bundle.items():
                digest.update(tensor.cpu().numpy().tobytes())
        for tensor in (self.stats.grad2d, self.stats.count):
            digest.update(tensor.cpu().numpy().tobytes())
        return digest.hexdigest()


def rate_of(step: Callable[[], None], finish: Callable[[], None], seconds: float) -> dict[str, float]:
    """Steps a second by the wall clock: the median of rounds, after some that do not count."""
    for _ in range(10):
        step()
    finish()
    started = time.perf_counter()
    for _ in range(10):
        step()
    finish()
    steps = max(5, min(400, int(seconds / 4 * 10 / (time.perf_counter() - started))))
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


# --- the sections ----------------------------------------------------------------------------------------------------


def environment(report: Report) -> None:
    """The machine, and what it copies a second."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    report["gpu"] = properties.name
    report["multiprocessors"] = properties.multi_processor_count
    report["capability"] = list(torch.cuda.get_device_capability(0))
    report["memory_gib"] = round(properties.total_memory / 2**30, 1)
    report["torch"], report["torch_cuda"] = torch.__version__, torch.version.cuda
    for name, command in {
        "driver": ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"],
        "nvcc": ["nvcc", "--version"],
        "compute_sanitizer": ["compute-sanitizer", "--version"],
    }.items():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.strip()
            report[name] = text.splitlines()[-1] if text else ""
    a = torch.rand(1 << 28, device="cuda")
    b = torch.empty_like(a)
    times = []
    for _ in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        b.copy_(a)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    report["copy_tb_per_second"] = round(2 * a.numel() * 4 / statistics.median(times[2:]) / 1e12, 3)


def build(report: Report) -> None:
    """Builds the CUDA library, and renders with it once."""
    import torch

    from splatcli.native.call import Backend
    from splatcli.raster import render

    started = time.monotonic()
    backend = Backend.cuda("cuda:0")
    report["seconds_to_build_and_load"] = round(time.monotonic() - started, 1)
    gaussians, cameras = make_scene(20_000, 320, 200, "cuda:0")
    out = render(gaussians, cameras[0], backend=backend)
    torch.cuda.synchronize()
    report["mean_alpha"] = float(out.alpha.mean())
    exact = render(gaussians.to("cpu"), cameras[0], backend=Backend.cpu(isa="portable"))
    apart = (out.image.cpu() - exact.image).abs()
    # A pixel at a cut-off may fall on the other side of it.
    report["image_against_cpu"] = {
        "median": float(apart.median()),
        "p999": float(apart.flatten().quantile(0.999)),
        "max": float(apart.max()),
    }
    if not float(apart.flatten().quantile(0.999)) < 1e-4:
        raise AssertionError("the GPU's image is not the CPU's")


def tests(report: Report) -> None:
    """The tests that need a GPU."""
    out = report.path.parent
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "--durations=8"]
    # Whatever the tests leave at a time limit would be lost with a buffered pipe; a file keeps it.
    status = run_child(
        [*command, "tests/gpu", "tests/kernels"], out / "pytest.log", report.left() - 2, SPLATCLI_REQUIRE_GPU="1"
    )
    text = (out / "pytest.log").read_text(errors="replace")
    report["summary"] = (text.strip().splitlines() or [""])[-1]
    report["failed"] = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.M)
    if status != 0:
        print(text[-3000:])
        raise AssertionError("pytest ran out of time" if status is None else f"pytest: exit status {status}")


def speed(report: Report) -> None:
    """Training steps a second, memory, and what the scenes are like."""
    import torch

    for n, size in CASES:
        if report.left() < 8:
            report["left_out"] = "the time was up"
            return
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        training = Training(n, *MEGAPIXEL[size])
        fixed = torch.cuda.memory_allocated() - before
        result: dict[str, Any] = rate_of(training.step, training.finish, 5.0)
        # From here on the numbers of one view, the last.
        result.update(training.counts())
        result["peak_mib"] = round((torch.cuda.max_memory_allocated() - before) / 2**20)
        result["parameters_moments_targets_mib"] = round(fixed / 2**20)
        report[case_name(n, size)] = result
        del training


def case_name(n: int, size: str) -> str:
    return f"{n / 1e6:g}M {size}MP"


def least_bytes(n: int, visible: int, pairs: int, pixels: int) -> dict[str, float]:
    """What each stage cannot but move through device memory, with the layouts that are there and SH degree 3.

    project      44 B geometry of all; of the visible 192 B SH read, 76 B record, id and rows written, and SH that
                 missed a step brought up to it: moments read, all three written
    bin          depth sort: 4 passes over 8 B, read and written; pairs: 12 B written, 2 passes over them, lists of 10 B
    blend        a list's records once, of the three fifths of pairs before a pixel stops; image and alpha
    loss         cuda/src/cuda/loss.cu
    blend_vjp    as blend, and 64 B written a pair; image, alpha and gradient read
    project_vjp  64 B rows; parameters and both moments read and written, of SH only where visible
    """
    return {
        "project": 44.0 * n + (268.0 + 45 * 20 * (1 - visible / n)) * visible,
        "bin": 64.0 * visible + (12 + 48 + 10) * pairs,
        "blend": 0.6 * pairs * 70 + 16.0 * pixels,
        "loss": 114.0 * pixels,
        "blend_vjp": 0.6 * pairs * 70 + 64.0 * pairs + 28.0 * pixels,
        "project_vjp": 64.0 * pairs + 24.0 * (14 * n + 45 * visible),
    }


def stages(report: Report) -> None:
    """Milliseconds of each stage (events around its call) and of each kernel (torch's profiler), beside the floor."""
    import torch

    from splatcli.native.call import Backend

    class Timed(Backend):
        """Puts events around each call."""

        events: dict[str, list[Any]] = defaultdict(list)  # noqa: RUF012

        def call(self, name: str, *arguments: Any) -> int:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            result = Backend.call(self, name, *arguments)
            end.record()
            Timed.events[name].append((begin, end))
            return result

    plain = Backend.cuda("cuda:0")
    timed = Timed(**{field.name: getattr(plain, field.name) for field in dataclasses.fields(Backend)})
    for n, size in CASES[:3]:
        if report.left() < 10:
            return
        width, height = MEGAPIXEL[size]
        training = Training(n, width, height, backend=timed)
        for _ in range(16):
            training.step()
        training.finish()
        Timed.events.clear()
        for _ in range(40):
            training.step()
        training.finish()
        counts = training.counts()
        floors = least_bytes(n, int(counts["visible"]), int(counts["pairs"]), width * height)
        result: dict[str, Any] = {}
        for name, events in Timed.events.items():
            if name in floors:
                ms = statistics.median(begin.elapsed_time(end) for begin, end in events)
                floor = 1e3 * floors[name] / H200_BYTES
                result[name] = {"ms": round(ms, 4), "floor_ms": round(floor, 4), "times_floor": round(ms / floor, 2)}
        result["sum"] = {
            "ms": round(sum(row["ms"] for row in result.values()), 4),
            "floor_ms": round(1e3 * sum(floors.values()) / H200_BYTES, 4),
        }
        with contextlib.suppress(Exception):  # the profiler may not work where all else does
            result["kernels"] = kernel_times(training)
        report[case_name(n, size)] = result
        del training


def kernel_times(training: Training, steps: int = 10) -> dict[str, dict[str, float]]:
    """Microseconds a step of each kernel, and its launches a step; the slowest first."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            training.step()
        training.finish()
    rows = {}
    for event in profile.key_averages():
        if event.device_time_total <= 0:
            continue
        rows[event.key] = {"us": round(event.device_time_total / steps, 2), "launches": event.count / steps}
    return dict(sorted(rows.items(), key=lambda row: -row[1]["us"]))


def determinism(report: Report) -> None:
    """Two runs, and one whose lists overflow on the way, leave the same bits."""
    digests = {}
    for name, engine in {"first": {}, "second": {}, "overflowing": {"room": 20_000}}.items():
        training = Training(100_000, 640, 400, rate=1e-3, **engine)
        for _ in range(24):
            training.step()
        training.finish()
        digests[name] = training.digest()
    report["digests"] = digests
    report["same_bits"] = len(set(digests.values())) == 1
    if not report.found["same_bits"]:
        raise AssertionError("the same training left other bits")


def tiny_step() -> None:
    """What runs under the sanitizer: steps and a render with all gradients, in the smallest interesting sizes."""
    import torch

    from splatcli.raster import render

    training = Training(700, 90, 50, rate=1e-3, room=300)
    for _ in range(2):
        training.step()
    training.finish()
    leaves = training.gaussians.map(lambda t: t.detach().clone().requires_grad_())
    viewmat = torch.eye(4, device="cuda").requires_grad_()
    background = torch.zeros(3, device="cuda").requires_grad_()
    out = render(leaves, training.cameras[0], background=background, viewmat=viewmat, backend=training.backend)
    torch.autograd.backward(out.image.sum() + out.alpha.sum() + out.depth.sum())
    torch.cuda.synchronize()
    print("tiny step done")


def sanitizer(report: Report) -> None:
    """compute-sanitizer over one tiny step: accesses outside of memory, and races in shared memory."""
    program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if program is None:
        raise Skipped("compute-sanitizer is not installed")
    this = [sys.executable, str(Path(__file__).resolve()), "--tiny-step", "--out", str(report.path.parent)]
    bad = []
    for tool in ("memcheck", "racecheck"):
        if report.left() < 10:
            report[tool] = "the time was up"
            continue
        log = report.path.parent / f"sanitizer-{tool}.log"
        share = report.left() - 3 if tool == "racecheck" else 0.6 * report.left()
        # Torch's caching allocator hands out pieces of large blocks: only without it does each tensor have an end.
        options = ["--tool", tool, "--error-exitcode", "9", "--kernel-regex", "kns=splat"]
        status = run_child([program, *options, *this], log, share, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        text = log.read_text(errors="replace")
        summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY:.*", text)
        report[tool] = {"status": status, "summary": summary[-1] if summary else text[-400:]}
        if status == 0 and "tiny step done" in text:
            continue
        if "not supported" in text:
            raise Skipped("compute-sanitizer does not work on this machine")
        bad.append(tool)
    if bad:
        raise AssertionError(f"{' and '.join(bad)} did not come out clean; see sanitizer-*.log")


def peer_loss(image: Any, target: Any) -> Any:
    """L1 + SSIM of [1, 3, H, W] in torch: five maps in one pair of separable convolutions, the fastest simple form."""
    import torch
    from torch.nn.functional import conv2d

    taps = torch.exp(-((torch.arange(11.0, device=image.device) - 5.0) ** 2) / (2 * 1.5**2))
    taps /= taps.sum()
    maps = torch.cat([image, target, image * image, target * target, image * target], 1)
    channels = maps.shape[1]
    across, down = taps.view(1, 1, 1, 11).repeat(channels, 1, 1, 1), taps.view(1, 1, 11, 1).repeat(channels, 1, 1, 1)
    maps = conv2d(conv2d(maps, across, padding=(0, 5), groups=channels), down, padding=(5, 0), groups=channels)
    x, y, xx, yy, xy = maps.chunk(5, 1)
    numerator = (2 * x * y + 0.01**2) * (2 * (xy - x * y) + 0.03**2)
    ssim = numerator / ((x * x + y * y + 0.01**2) * (xx - x * x + yy - y * y + 0.03**2))
    return (1 - SSIM_LAMBDA) * (image - target).abs().mean() + SSIM_LAMBDA * (1 - ssim.mean())


class PeerTraining:
    """The same scene and steps with gsplat."""

    def __init__(self, n: int, width: int, height: int) -> None:
        import gsplat as peer
        import torch

        self.rasterization, self.size = peer.rasterization, (width, height)
        gaussians, cameras = make_scene(n, width, height, "cuda")
        self.targets = [(t.float() / 255).permute(2, 0, 1)[None].contiguous() for t in make_targets(cameras, "cuda")]
        self.leaves = {name: tensor.requires_grad_() for name, tensor in gaussians.items()}
        groups = [{"params": [tensor], "lr": 1e-7} for tensor in self.leaves.values()]
        self.adam = torch.optim.Adam(groups, eps=1e-15, fused=True)
        self.poses = [torch.from_numpy(camera.viewmat).float().cuda()[None] for camera in cameras]
        one = cameras[0]
        self.intrinsics = torch.tensor([[[one.fx, 0, one.cx], [0, one.fy, one.cy], [0, 0, 1.0]]], device="cuda")
        self.taken = 0

    def step(self, with_ssim: bool = True) -> None:
        import torch

        view, leaves = self.taken % len(self.poses), self.leaves
        self.taken += 1
        image, _, _ = self.rasterization(
            leaves["means"],
            leaves["quats"],
            torch.exp(leaves["log_scales"]),
            torch.sigmoid(leaves["logit_opacities"]),
            torch.cat([leaves["sh0"][:, None], leaves["shN"]], 1),
            self.poses[view],
            self.intrinsics,
            *self.size,
            sh_degree=3,
            packed=False,
        )
        planar, target = image.permute(0, 3, 1, 2), self.targets[view]
        torch.autograd.backward(peer_loss(planar, target) if with_ssim else (planar - target).abs().mean())
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)


def gsplat(report: Report) -> None:
    """The same steps with gsplat, the loss above and torch's fused Adam; and with L1 alone, the loss being ours."""
    import torch

    try:
        import gsplat as peer
    except ImportError as error:
        raise Skipped(f"gsplat cannot be imported: {error}") from None
    report["version"] = getattr(peer, "__version__", "unknown")
    started = time.monotonic()
    for n, size in CASES:
        if report.left() < 10:
            report["left_out"] = "the time was up"
            return
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        training = PeerTraining(n, *MEGAPIXEL[size])
        training.step()  # builds gsplat's kernels, the first time
        torch.cuda.synchronize()
        if "seconds_to_build" not in report.found:
            report["seconds_to_build"] = round(time.monotonic() - started, 1)
        result: dict[str, Any] = rate_of(training.step, torch.cuda.synchronize, 4.0)
        result["peak_mib"] = round((torch.cuda.max_memory_allocated() - before) / 2**20)
        result["l1_only"] = rate_of(functools.partial(training.step, False), torch.cuda.synchronize, 3.0)
        report[case_name(n, size)] = result
        del training


@contextlib.contextmanager
def gsplat_building(out: Path) -> Iterator[None]:
    """gsplat compiles itself for minutes at its first use: started first, it is ready when its section comes."""
    import torch

    major, minor = torch.cuda.get_device_capability(0)
    jobs = max(1, (os.cpu_count() or 2) - 4)
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", f"{major}.{minor}")
    os.environ.setdefault("MAX_JOBS", str(jobs))
    with (out / "gsplat-build.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", "import gsplat.cuda._backend"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: os.nice(15),
        )
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


#: In the order in which they run.
SECTIONS = {
    "environment": Section(environment, 60),
    "build": Section(build, 150),
    "tests": Section(tests, 150),
    "determinism": Section(determinism, 60),
    "speed": Section(speed, 120),
    "stages": Section(stages, 60),
    "sanitizer": Section(sanitizer, 90),
    "gsplat": Section(gsplat, 200),
}

# --- command line ----------------------------------------------------------------------------------------------------


def table(report: dict[str, Any]) -> str:
    """The report for a person, short."""
    sections = report["sections"]
    lines = [f"{'section':12} {'status':8} {'s':>5}"]
    for name, section in sections.items():
        error = (section.get("error") or section.get("skipped") or "").strip().splitlines()
        lines.append(f"{name:12} {section['status']:8} {section['seconds']:5.0f}  {error[-1][:80] if error else ''}")
    speeds, peers = sections.get("speed", {}), sections.get("gsplat", {})
    rows = [case_name(n, size) for n, size in CASES if case_name(n, size) in speeds]
    if rows:
        lines += ["", f"{'training':12} {'steps/s':>8} {'ms':>7} {'MiB':>6} {'pairs/V':>8} {'gsplat':>8} {'ratio':>6}"]
    for name in rows:
        row, peer = speeds[name], peers.get(name)
        theirs = f"{peer['steps_per_second']:8.1f} {peer['ms'] / row['ms']:6.2f}" if peer else ""
        lines.append(
            f"{name:12} {row['steps_per_second']:8.1f} {row['ms']:7.3f} {row['peak_mib']:6d} "
            f"{row['pairs_per_visible']:8.2f} {theirs}"
        )
    for name, row in sections.get("stages", {}).items():
        if isinstance(row, dict) and "sum" in row:
            each = "  ".join(
                f"{stage} {values['ms']:.3f} ({values['times_floor']:.1f}x)"
                for stage, values in row.items()
                if "times_floor" in values
            )
            lines.append(f"{name}: ms and times the floor: {each}")
    return "\n".join(lines)


def no_gpu() -> str | None:
    """Why nothing can be measured here, or None."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    count = torch.cuda.device_count()
    return None if count else "an NVIDIA GPU is needed, and torch sees none"


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the report and the logs")
    parser.add_argument("--seconds", type=float, default=500.0, help="time limit (500)")
    parser.add_argument("--only", help=f"comma-separated, of: {', '.join(SECTIONS)}")
    parser.add_argument("--section", choices=list(SECTIONS), help=argparse.SUPPRESS)
    parser.add_argument("--tiny-step", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.names = options.only.split(",") if options.only else list(SECTIONS)
    unknown = [name for name in options.names if name not in SECTIONS]
    if unknown:
        parser.error(f"there is no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    if not options.seconds > 0:
        parser.error("--seconds must be more than 0")
    return options


def child(name: str, out: Path, seconds: float) -> int:
    """A section in this process."""
    report = Report(out / f".{name}.json", seconds)
    try:
        SECTIONS[name].run(report)
    except Skipped as reason:
        report["skipped"] = str(reason)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def main(argv: list[str], runner: Runner = run_section) -> int:
    options = arguments(argv)
    if (reason := no_gpu()) is not None:
        print(f"gpu_check: {reason}", file=sys.stderr)
        return 2
    if options.tiny_step:
        tiny_step()
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    out = options.out.resolve()
    if options.section:
        return child(options.section, out, options.seconds)
    building = gsplat_building(out) if "gsplat" in options.names else contextlib.nullcontext()
    with building:
        report = check(out, options.seconds, options.names, runner)
    print(table(report))
    return int(any(section["status"] == "failed" for section in report["sections"].values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
