"""Tests and measures the CUDA backend on this machine's GPU, within a time limit.

    scripts/gpu_check --part check --out DIR     what is right: build, tests, training, compute-sanitizer
    scripts/gpu_check --part speed --out DIR     how fast it is: stages, steps a second, ncu, beside gsplat
    scripts/gpu_check --prepare .wheels          on a machine with a network: fetches what the two parts need elsewhere

Each part ends within --seconds (540) and is useful without the other. Every section is a process of its own, with a
share of the time, so that a fault or a hang in one loses no other; time that one leaves over goes to the next.
DIR gets three files: PART.json has every number as soon as it is known, PART.log what the sections printed, PART.txt
the summary, which is also the last that is printed and fits 12,000 characters.
Exit code: 0 when no section failed, 1 when one did, 2 for wrong arguments or without a GPU.

--prepare fetches wheels for CPython 3.12 on x86-64 and cuts a small scene; what it made is found in --carried
(.wheels). --rehearse runs every section as far as it comes without a GPU; --tiny takes the smallest sizes.

The scenes of the measurements are made up, with the statistics of trained ones. "front": of N Gaussians three fifths
are in view, on four wavy surfaces, each within a few pixels of its neighbours; eight cameras that turn and shift a
little. "orbit": surfaces all around and twelve cameras that look outward, each of which sees a quarter. At 1 M and
2 megapixels a visible Gaussian covers about four tiles in front, eight in orbits (the report says how many it was).
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import functools
import hashlib
import importlib.util
import io
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

#: Bytes a second that a device-to-device copy moves on an H200, reads and writes counted.
H200_BYTES = 4.3e12
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
#: Set from the command line, for sections through the environment.
TINY, REHEARSE, CARRIED = "GPU_CHECK_TINY", "GPU_CHECK_REHEARSE", "GPU_CHECK_CARRIED"
#: Of the summary, which has to fit what is kept of a program's output (12,000 characters).
SUMMARY_CHARACTERS = 11_500
#: Of a section's log, in PART.log.
LOG_CHARACTERS = 700_000
#: How a missing GPU shows, in torch's words and in ours.
NO_GPU = (
    "torch sees none",
    "torch sees 0 GPUs",
    "Found no NVIDIA driver",
    "No CUDA GPUs are available",
    "not compiled with CUDA",
    "No CUDA devices",
)

# --- sections and their report ---------------------------------------------------------------------------------------


def is_tiny() -> bool:
    return os.environ.get(TINY) == "1"


def cases() -> list[Case]:
    return [Case(400, "tiny", "front"), Case(400, "tiny", "orbit")] if is_tiny() else CASES


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

    def log(self, name: str) -> Path:
        """A file for what a command prints; it becomes a part of the section's log."""
        return self.path.with_name(f"{self.path.stem}-{name}.log")


class Skipped(Exception):
    """The section cannot run here, which is nobody's fault."""


@dataclass(frozen=True)
class Section:
    run: Callable[[Report], None]
    seconds: float  # reserved; a section may also take what earlier ones have left over


def write_json(path: Path, value: Any) -> None:
    """Another process never sees half a file."""
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(scratch, path)


def read_json(path: Path) -> dict[str, Any]:
    """A section's numbers so far; nothing where there are none yet."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}


class Command:
    """A program in the background, with its own log, killed with its children when its time is up."""

    def __init__(self, command: list[str], log: Path, *, nice: int = 0, **environment: str) -> None:
        self.log, self.started = log, time.monotonic()
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=(lambda: os.nice(nice)) if nice else None,  # type: ignore[arg-type,return-value]
            )

    def wait(self, seconds: float, every: Callable[[], None] | None = None) -> int | None:
        """The exit status, or None when the time was up; ``every`` is called once a second."""
        until = time.monotonic() + max(1.0, seconds)
        try:
            while (left := until - time.monotonic()) > 0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return self.process.wait(timeout=min(1.0, left))
                if every is not None:
                    every()
            return None
        finally:
            self.kill()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def text(self) -> str:
        return self.log.read_text(errors="replace")


def run_child(
    command: list[str], log: Path, seconds: float, every: Callable[[], None] | None = None, **environment: str
) -> int | None:
    """The exit status of a command, or None when it ran out of time; then it and its children are killed."""
    return Command(command, log, **environment).wait(seconds, every)


#: Runs a section in a folder within seconds, telling what was found so far.
Runner = Callable[[str, Path, float, Callable[[dict[str, Any]], None]], dict[str, Any]]


def run_section(name: str, work: Path, seconds: float, tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Runs a section in a process of its own; what it found, also when it did not come to its end."""
    partial, log = work / f"{name}.json", work / f"{name}.log"
    partial.unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__).resolve()), "--section", name, "--out", str(work)]
    # A little more than the section knows of, so that it can end by itself.
    command += ["--seconds", str(max(1.0, seconds - 5.0))]
    status = run_child(command, log, seconds, lambda: tell(read_json(partial)))
    found = read_json(partial)
    if status is None:
        return {"status": "failed", "error": f"not done after {seconds:.0f} s", **found}
    if status != 0:
        lines = log.read_text(errors="replace").splitlines()
        return {"status": "failed", "error": "\n".join(lines[-15:]) or f"exit status {status}", **found}
    return {"status": "no GPU" if "no_gpu" in found else "skipped" if "skipped" in found else "ok", **found}


def check(
    part: str, out: Path, work: Path, seconds: float, names: list[str], runner: Runner = run_section
) -> dict[str, Any]:
    """Runs sections one after the other within the time; the report is on disk after every number."""
    started = time.monotonic()
    report: dict[str, Any] = {
        "format": 2,
        "part": part,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "sections": {},
    }
    sections, known = report["sections"], PARTS[part]
    (out / f"{part}.log").write_text("")
    # Without the whole time, every section has its part of what there is.
    scale = min(1.0, seconds / sum(known[name].seconds for name in names))
    for i, name in enumerate(names):
        begun = time.monotonic()
        share = seconds - (begun - started) - scale * sum(known[later].seconds for later in names[i + 1 :])

        def tell(found: dict[str, Any], name: str = name, begun: float = begun) -> None:
            sections[name] = {"status": "running", **found, "seconds": round(time.monotonic() - begun, 1)}
            write_json(out / f"{part}.json", report)

        try:
            result = runner(name, work, share, tell) if share >= 2 else {"status": "skipped", "skipped": "no time left"}
        except Exception as error:
            result = {"status": "failed", "error": f"{type(error).__name__}: {error}"}
        sections[name] = {**result, "seconds": round(time.monotonic() - begun, 1)}
        report["seconds"] = round(time.monotonic() - started, 1)
        write_json(out / f"{part}.json", report)
        append_logs(out / f"{part}.log", work, name)
        print(f"{name}: {result['status']}, {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    return report


def append_logs(merged: Path, work: Path, name: str) -> None:
    """Adds what a section and its commands printed to the one log that is kept."""
    with merged.open("a", encoding="utf-8") as file:
        for log in [work / f"{name}.log", *sorted(work.glob(f"{name}-*.log"))]:
            if log.is_file():
                text = log.read_text(encoding="utf-8", errors="replace")
                file.write(f"\n===== {log.stem} =====\n{text[-LOG_CHARACTERS:]}")


# --- scenes ----------------------------------------------------------------------------------------------------------


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
        """Of the last view: Gaussians, the visible, tile pairs."""
        visible, _, pairs, overflow = self.engine.frame.counters.tolist()
        return {
            "visible": visible,
            "visible_share": round(visible / max(1, len(self.gaussians)), 3),
            "pairs": pairs,
            "pairs_per_visible": round(pairs / max(1, visible), 2),
            "overflow": overflow,
        }

    def digest(self) -> str:
        digest = hashlib.sha256()
        for bundle in (self.gaussians, self.adam.exp_avg, self.adam.exp_avg_sq):
            for _, tensor in bundle.items():
                digest.update(tensor.cpu().numpy().tobytes())
        for tensor in (self.adam.rest_steps, self.stats.grad2d, self.stats.count):
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


# --- the sections: what is right -------------------------------------------------------------------------------------


def environment(report: Report) -> None:
    """The machine, what it copies a second, and which packages it has."""
    import torch

    report["python"] = sys.version.split()[0]
    report["torch"], report["torch_cuda"] = torch.__version__, torch.version.cuda
    report["processors"] = os.cpu_count()
    for name, command in {
        "driver": ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"],
        "nvcc": ["nvcc", "--version"],
        "compute_sanitizer": ["compute-sanitizer", "--version"],
        "ncu": ["ncu", "--version"],
        "compiler": ["g++", "--version"],
    }.items():
        report[name] = first_words(command)
    packages = ("numpy", "scipy", "ninja", "pytest", "hypothesis", "typer", "pydantic", "plyfile", "pycolmap", "gsplat")
    report["packages"] = {name: version_of(name) for name in packages}
    properties = torch.cuda.get_device_properties(0)
    report["gpu"] = properties.name
    report["multiprocessors"] = properties.multi_processor_count
    report["capability"] = list(torch.cuda.get_device_capability(0))
    report["memory_gib"] = round(properties.total_memory / 2**30, 1)
    a = torch.rand(1 << (16 if is_tiny() else 28), device="cuda")
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


def first_words(command: list[str]) -> str:
    """The telling line of what a program says about itself; nothing where it is not there."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return next(
            (line for line in lines if re.search(r"release \d|[Vv]ersion \d|\) \d+\.", line)), "".join(lines[:1])
        )
    return ""


def version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def build(report: Report) -> None:
    """Builds the CUDA library, and renders with it once."""
    import torch

    from splatcli.native.backend import Backend
    from splatcli.rasterizer import render

    started = time.monotonic()
    backend = Backend.cuda("cuda:0")
    report["seconds_to_build_and_load"] = round(time.monotonic() - started, 1)
    started = time.monotonic()
    portable = Backend.cpu(isa="portable")
    report["seconds_to_build_the_cpu_library"] = round(time.monotonic() - started, 1)
    gaussians, cameras = make_scene(300 if is_tiny() else 20_000, 320, 200, "cuda:0")
    out = render(gaussians, cameras[0], backend=backend)
    torch.cuda.synchronize()
    report["mean_alpha"] = float(out.alpha.mean())
    exact = render(gaussians.to("cpu"), cameras[0], backend=portable)
    apart = (out.image.cpu() - exact.image).abs()
    # A pixel at a cut-off may fall on the other side of it.
    report["image_against_cpu"] = {
        "median": float(apart.median()),
        "p999": float(apart.flatten().quantile(0.999)),
        "max": float(apart.max()),
    }
    if not float(apart.flatten().quantile(0.999)) < 1e-4:
        raise AssertionError("the GPU's image is not the CPU's")


#: Files of the tests that need a GPU, and the part of the section's time that each gets at most.
TEST_FILES = {"tests/gpu/test_gpu.py": 0.6, "tests/gpu/test_offload.py": 0.4, "tests/gpu/test_ranks.py": 0.6}


def tests(report: Report) -> None:
    """The tests that need a GPU, each file in a process of its own; those that fail once more alone.

    After a fault on the GPU every later test of the process fails too; alone, only the guilty ones do.
    """
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu and not multigpu", "-v", "-rfEs", "--tb=short"]
    # Warnings are errors where the project is developed; other versions of other packages have other warnings.
    pytest += ["-W", "default", "-p", "no:cacheprovider", "--continue-on-collection-errors", "--durations=5"]
    pytest += ["-o", "faulthandler_timeout=40"]
    settings = {"COLUMNS": "300"}  # else pytest leaves the words of failures out
    if os.environ.get(REHEARSE) != "1":
        settings["SPLATCLI_REQUIRE_GPU"] = "1"
    failed: dict[str, str] = {}
    trouble = []
    for file, share in TEST_FILES.items():
        name = Path(file).stem
        log = report.log(name)
        status = run_child([*pytest, file], log, share * (report.left() - 2), **settings)
        text = log.read_text(errors="replace")
        endings = re.findall(r"^=+ (.*\bin [\d.]+s.*?) =+$", text, re.M)
        result: dict[str, Any] = {"status": status, "summary": endings[-1] if endings else "it did not end"}
        if status is None:
            begun = re.findall(r"^(tests/\S+::.*?)(?: (?:PASSED|FAILED|ERROR|SKIPPED).*)?$", text, re.M)
            result["while"] = begun[-1] if begun else ""
        found = dict(re.findall(r"^(?:FAILED|ERROR) (\S+)(?: - (.*))?$", text, re.M))
        result["failed"] = {test: words[:300] for test, words in found.items()}
        report[name] = result
        failed |= result["failed"]
        # 5: every test of the file is deselected.
        if status not in (0, 5):
            trouble.append(f"{name} ran out of time" if status is None else f"{name}: exit status {status}")
    alone: dict[str, str] = {}
    for test in list(failed)[:24]:
        if report.left() < 20:
            break
        log = report.log("alone")
        status = run_child([*pytest, test], log, min(60.0, report.left() - 5), **settings)
        alone[test] = "passes" if status == 0 else "hangs" if status is None else "fails"
        report["alone"] = alone
    if trouble:
        raise AssertionError("; ".join(trouble))


def determinism(report: Report) -> None:
    """Two runs, and one whose lists overflow on the way, leave the same bits; in views that see a quarter."""
    digests = {}
    SIZES["determinism"] = SIZES["tiny"] if is_tiny() else (640, 400)
    for name, engine in {"first": {}, "second": {}, "overflowing": {"room": 200 if is_tiny() else 20_000}}.items():
        training = Training(Case(300 if is_tiny() else 100_000, "determinism", "orbit"), rate=1e-3, **engine)
        for _ in range(4 if is_tiny() else 30):
            training.step()
        training.finish()
        digests[name] = training.digest()
        report["digests"] = dict(digests)
    report["same_bits"] = len(set(digests.values())) == 1
    if not report.found["same_bits"]:
        raise AssertionError("the same training left other bits")


def splat(*words: str) -> list[str]:
    return [sys.executable, "-m", "splatcli", *words]


def result_of(command: Command, seconds: float) -> dict[str, Any]:
    """The object that ``--json`` printed last. Raises AssertionError with the program's own words."""
    status = command.wait(seconds)
    if status != 0:
        ending = " / ".join(command.text().strip().splitlines()[-4:])
        raise AssertionError(f"{command.log.stem}: {'ran out of time' if status is None else status}: {ending[-600:]}")
    objects = [json.loads(line) for line in command.text().splitlines() if line.startswith("{")]
    return objects[-1] if objects else {}


def parameters_digest(run: Path) -> str:
    """Of the Gaussians in a run's last checkpoint."""
    from splatcli.checkpoint.file import load_checkpoint
    from splatcli.checkpoint.run_dir import find_latest

    path = find_latest(run)
    assert path is not None, f"{run} has no checkpoint"
    digest = hashlib.sha256()
    for _, tensor in load_checkpoint(path).gaussians.items():
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def training(report: Report) -> None:
    """splat train on pictures: PSNR beside the CPU's, the same bits again, resumed and with --offload.

    The CPU trains in the background meanwhile, and renders the GPU's checkpoint.
    """
    missing = [name for name in ("pydantic", "plyfile", "pycolmap") if version_of(name) == "missing"]
    if missing:
        raise Skipped(f"{', '.join(missing)} not installed: see --prepare")
    scenes = {"courtyard": ROOT / "data" / "samples" / "courtyard"}
    fox = Path(os.environ.get(CARRIED, "")) / "scene" / "fox"
    if fox.is_dir():
        scenes["fox"] = fox
    faults: list[str] = []
    for i, (name, scene) in enumerate(scenes.items()):
        if report.left() < 30:
            report[name] = {"left_out": "the time was up"}
            continue
        share = report.left() / (len(scenes) - i) - 5
        with tempfile.TemporaryDirectory(prefix="gpu_check-") as folder:
            faults += train_scene(report, name, scene, Path(folder), time.monotonic() + share)
    if faults:
        raise AssertionError("; ".join(faults))


def train_scene(report: Report, name: str, scene: Path, runs: Path, until: float) -> list[str]:
    """What is wrong with training on this scene; figures go to the report."""
    steps = 20 if is_tiny() else 2000
    few = ("--set", "data.resolution=8") if is_tiny() else ()
    faults: list[str] = []
    result: dict[str, Any] = {"steps": steps}
    commands: list[Command] = []

    def start(label: str, *words: str, nice: int = 0) -> Command:
        commands.append(Command(splat(*words), report.log(f"{name}-{label}"), nice=nice))
        return commands[-1]

    def train(label: str, device: str, *flags: str, nice: int = 0) -> Command:
        words = ("train", str(scene), "-n", str(steps), "--device", device, "-o", str(runs / label), "-q", *few)
        return start(label, *words, *flags, nice=nice)

    def left() -> float:
        return until - time.monotonic()

    def keep(**values: Any) -> None:
        result.update(values)
        report[name] = dict(result)

    try:
        cpu = train("cpu", "cpu", nice=10)
        started = time.monotonic()
        result_of(train("gpu", "cuda"), left())
        keep(seconds=round(time.monotonic() - started, 1))
        figures = result_of(start("eval", "eval", str(runs / "gpu"), "--device", "cuda", "--json", "-q"), left())
        keep(psnr=round(figures["psnr"], 3), ssim=round(figures["ssim"], 4), gaussians=figures["num_gaussians"])
        digest = parameters_digest(runs / "gpu")
        others = {
            "again": train("again", "cuda"),
            "offload": train("offload", "cuda", "--offload"),
            "resumed": train("resumed", "cuda", "--stop-at", str(steps // 2)),
        }
        figures = result_of(start("eval-cpu", "eval", str(runs / "gpu"), "--device", "cpu", "--json", "-q"), left())
        keep(psnr_rendered_by_the_cpu=round(figures["psnr"], 3))
        if not abs(figures["psnr"] - result["psnr"]) < 0.01:
            faults.append(f"{name}: the CPU renders the GPU's model to {figures['psnr']:.3f} dB")
        for label, command in others.items():
            try:
                result_of(command, left())
                if label == "resumed":
                    result_of(start("resume", "resume", str(runs / label), "--device", "cuda", "-q"), left())
                same = parameters_digest(runs / label) == digest
                keep(**{label: "same bits" if same else "other bits"})
                if not same:
                    faults.append(f"{name}: {label} has other bits")
            except AssertionError as error:
                keep(**{label: str(error)})
                faults.append(f"{name}: {error}")
        result_of(cpu, left())
        figures = result_of(start("eval-of-cpu", "eval", str(runs / "cpu"), "--device", "cpu", "--json", "-q"), left())
        keep(cpu_psnr=round(figures["psnr"], 3), cpu_gaussians=figures["num_gaussians"])
        if not result["psnr"] > figures["psnr"] - 0.5:
            faults.append(f"{name}: {result['psnr']:.2f} dB, by the CPU {figures['psnr']:.2f}")
    except AssertionError as error:
        faults.append(f"{name}: {error}")
        keep(error=str(error))
    finally:
        for command in commands:
            command.kill()
    return faults


def tiny_step() -> None:
    """What runs under the sanitizer: steps and a render with all gradients, in the smallest interesting sizes."""
    import torch

    from splatcli.rasterizer import render

    SIZES["step"] = (90, 50)
    training = Training(Case(700, "step", "front"), rate=1e-3, room=300)
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


def this_program(*words: str) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), "--part", "check", "--out", os.devnull, *words]


def tool(name: str) -> str:
    """A program of the CUDA toolkit. Raises Skipped."""
    found = shutil.which(name) or shutil.which(f"/usr/local/cuda/bin/{name}")
    if found is None:
        raise Skipped(f"{name} is not installed")
    return found


def sanitizer(report: Report) -> None:
    """compute-sanitizer over one tiny step: accesses outside of memory, and races in shared memory."""
    program = tool("compute-sanitizer")
    bad = []
    tools = {"memcheck": 0.5, "racecheck": 0.6, "synccheck": 0.9}
    for name, share in tools.items():
        if report.left() < 10:
            report[name] = {"status": None, "summary": "the time was up"}
            continue
        log = report.log(name)
        # Torch's caching allocator hands out pieces of large blocks: only without it does each tensor have an end.
        options = ["--tool", name, "--error-exitcode", "9", "--kernel-regex", "kns=splat"]
        command = [program, *options, *this_program("--tiny-step")]
        status = run_child(command, log, share * (report.left() - 3), PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        text = log.read_text(errors="replace")
        summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY:.*", text)
        report[name] = {"status": status, "summary": summary[-1] if summary else text[-400:]}
        if any(words in text for words in NO_GPU):
            raise AssertionError(text[-400:])
        if status == 0 and "tiny step done" in text:
            continue
        if "not supported" in text:
            raise Skipped("compute-sanitizer does not work on this machine")
        bad.append(name if status is not None else f"{name} (out of time)")
    if bad:
        raise AssertionError(f"{' and '.join(bad)} did not come out clean; see the log")


# --- the sections: how fast it is ------------------------------------------------------------------------------------


def speed(report: Report) -> None:
    """Training steps a second, memory, and what the scenes are like."""
    for case in cases():
        if report.left() < 8:
            report["left_out"] = "the time was up"
            return
        report[case.name] = measure(case, 4.0)


def measure(case: Case, seconds: float) -> dict[str, float]:
    """Steps a second of ours, and the memory they take."""
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

    from splatcli.native.backend import Backend

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
    for case in cases()[:6]:
        if report.left() < 8:
            return
        width, height = SIZES[case.size]
        training = Training(case, backend=timed)
        for _ in range(2 if is_tiny() else 24):
            training.step()
        training.finish()
        Timed.events.clear()
        for _ in range(2 if is_tiny() else 48):
            training.step()
        training.finish()
        counts = training.counts()
        floors = least_bytes(case.n, int(counts["visible"]), int(counts["pairs"]), width * height)
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
        report[case.name] = result
        with contextlib.suppress(Exception):  # the profiler may not work where all else does
            result["kernels"] = kernel_times(training)
            report[case.name] = result
        del training


def kernel_times(training: Training, steps: int = 12) -> dict[str, dict[str, float]]:
    """Microseconds a step of each kernel, and its launches a step; the slowest first."""
    import torch

    steps = 2 if is_tiny() else steps
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


#: By guess; where the stages were measured before, their five slowest kernels are taken.
LARGEST = ("blend_fast", "blend_vjp_fast", "project_chunks", "project_vjp_chunks", "loss_statistics")
#: Metrics of ncu that are kept, by section and name.
METRICS = {
    "Duration": "duration",
    "Compute (SM) Throughput": "compute",
    "Memory Throughput": "memory",
    "DRAM Throughput": "dram",
    "L2 Cache Throughput": "l2",
    "L1/TEX Hit Rate": "l1_hits",
    "L2 Hit Rate": "l2_hits",
    "Achieved Occupancy": "occupancy",
    "Registers Per Thread": "registers",
    "No Eligible": "no_eligible",
}


def bare_name(kernel: str) -> str:
    """``void splat::gpu::blend_fast<3>(splat::Job)`` -> ``blend_fast<3>``."""
    signature = kernel.replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    return re.sub(r"<.*", "", signature.split("(")[0]).split("::")[-1].split()[-1] + "".join(
        re.findall(r"<[^()]*>", signature.split("(")[0])[:1]
    )


def largest_kernels(stages_found: dict[str, Any]) -> list[str]:
    """Names, without namespaces and template arguments, of the five slowest kernels of ours that were seen."""
    for row in stages_found.values():
        if isinstance(row, dict) and row.get("kernels"):
            names = [re.sub("<.*", "", bare_name(key)) for key in row["kernels"] if "splat::" in key]
            if names:
                return list(dict.fromkeys(names))[:5]
    return list(LARGEST)


def counters(report: Report) -> None:
    """ncu over one step: what bounds the five largest kernels. Machines may refuse their hardware counters."""
    program = tool("ncu")
    names = largest_kernels(read_json(report.path.with_name("stages.json")))
    report["asked"] = names
    log = report.log("ncu")
    options = ["--clock-control", "none", "--profile-from-start", "off", "--target-processes", "all"]
    for section in ("SpeedOfLight", "MemoryWorkloadAnalysis", "Occupancy", "LaunchStats", "SchedulerStats"):
        options += ["--section", section]
    options += ["--kernel-name", f"regex:^({'|'.join(names)})", "--launch-count", "10", "--csv", "--page", "details"]
    command = [program, *options, *this_program("--profiled-step")]
    status = run_child(command, log, report.left() - 3)
    text = log.read_text(errors="replace")
    if any(words in text for words in NO_GPU):
        raise AssertionError(text[-400:])
    for words in ("ERR_NVGPUCTRPERM", "Failed to initialize the profiler", "LibraryNotLoaded"):
        if words in text:
            raise Skipped(f"the hardware counters are refused: {words}")
    found = parse_counters(text)
    report["kernels"] = found
    if not found:
        ending = " / ".join(text.strip().splitlines()[-3:])[-400:]
        raise AssertionError(f"ncu: {'out of time' if status is None else f'exit status {status}'}: {ending}")


def parse_counters(text: str) -> dict[str, dict[str, str]]:
    """{kernel and launch: {metric: value and unit}} of what ``ncu --csv --page details`` prints."""
    start = text.find('"ID","Process ID"')
    if start < 0:
        return {}
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for row in csv.DictReader(io.StringIO(text[start:])):
        metric = METRICS.get(row.get("Metric Name") or "")
        if metric is not None and row.get("Metric Value"):
            found[f"{row['ID']} {bare_name(row['Kernel Name'])}"].setdefault(
                metric, f"{row['Metric Value']} {row.get('Metric Unit', '')}".strip()
            )
    return dict(found)


def profiled_step() -> None:
    """What runs under ncu: one step of the first case, after some that are not looked at."""
    import torch

    training = Training(cases()[0])
    for _ in range(2 if is_tiny() else 10):
        training.step()
    training.finish()
    torch.cuda.profiler.start()
    training.step()
    training.finish()
    torch.cuda.profiler.stop()
    print("profiled step done")


class FusedLoss:
    """Our kernels for L1 + SSIM as a loss of autograd, for the peer: the same loss on both sides, as fast."""

    def __init__(self, backend: Any) -> None:
        import torch

        from splatcli.rasterizer.train_step import TrainStepPipeline

        stages = TrainStepPipeline(backend, None)
        means = torch.zeros(2, dtype=torch.float64, device=backend.device)

        class Loss(torch.autograd.Function):
            @staticmethod
            def forward(context: Any, image: Any, target: Any) -> Any:
                gradient = torch.empty_like(image)
                stages.loss(image, target, gradient, SSIM_LAMBDA, means)
                context.save_for_backward(gradient)
                return ((1 - SSIM_LAMBDA) * means[0] + SSIM_LAMBDA * (1 - means[1])).float()

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
    """Waits for the build in the background, then imports it; why it cannot be used, or None.

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
    """Steps a second of gsplat, and the memory they take."""
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


# --- training beside gsplat ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Views:
    """A carried scene: cameras, their pictures [H, W, 3] uint8 on the GPU, and points [P, 3] with colours [0, 1]."""

    cameras: list[Any]
    targets: list[Any]
    train: list[int]
    test: list[int]
    points: Any
    colours: Any


def load_views(folder: Path) -> Views:
    """What write_views() has made; nothing but numpy and Pillow is needed."""
    import numpy as np
    import torch
    from PIL import Image

    from splatcli.scene.camera import Camera

    told = json.loads((folder / "views.json").read_text(encoding="utf-8"))
    cameras, targets = [], []
    for view in told["views"]:
        numbers = {name: float(view[name]) for name in ("fx", "fy", "cx", "cy")}
        viewmat = np.array(view["viewmat"], dtype=np.float64)
        cameras.append(Camera(view["name"], view["width"], view["height"], **numbers, viewmat=viewmat))
        with Image.open(
            ROOT / told["images"] / view["name"] if told["images"] else folder / "images" / view["name"]
        ) as im:
            targets.append(torch.from_numpy(np.array(im.convert("RGB"))).cuda())
    with np.load(folder / "points.npz") as points:
        xyz, rgb = torch.from_numpy(points["xyz"]).float().cuda(), torch.from_numpy(points["rgb"]).float().cuda()
    return Views(cameras, targets, told["train"], told["test"], xyz, rgb)


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
    """When a series first reaches a PSNR, between its points by a straight line."""
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


#: In the order in which they run; the seconds of a part sum up to less than --seconds.
PARTS = {
    "check": {
        "environment": Section(environment, 25),
        "build": Section(build, 100),
        "tests": Section(tests, 130),
        "determinism": Section(determinism, 25),
        "training": Section(training, 160),
        "sanitizer": Section(sanitizer, 90),
    },
    "speed": {
        "environment": Section(environment, 20),
        "build": Section(build, 100),
        "stages": Section(stages, 55),
        "speed": Section(speed, 80),
        "counters": Section(counters, 55),
        "gsplat": Section(gsplat, 140),
        "beside": Section(beside, 80),
    },
}
SECTIONS = {name: section for part in PARTS.values() for name, section in part.items()}

# --- what is carried to a machine without a network ------------------------------------------------------------------

#: What the machine runs: CPython and the manylinux names that pip knows wheels by.
TARGET = ("3.12", ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"))
#: Wheels by the part that needs them. pydantic-core is of the version that pydantic asks for.
WHEELS = {
    "check": ("pydantic", "annotated-types", "typing-inspection", "typing-extensions", "plyfile", "pycolmap"),
    "speed": ("gsplat==1.5.3",),
}
#: MiB of all that travels: it has to stay well below 64.
MOST_MIB = 56.0


def prepare(folder: Path) -> int:
    """Fetches wheels, cuts scenes, and says what to run."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, names in WHEELS.items():
        shutil.rmtree(folder / part, ignore_errors=True)
        fetch([name if "==" in name else pinned(name) for name in names], folder / part)
    core = required(next((folder / "check").glob("pydantic-[0-9]*.whl")), "pydantic-core")
    fetch([core], folder / "check")
    shutil.rmtree(folder / "scene", ignore_errors=True)
    write_scenes(folder / "scene")
    tree = tracked_mib()
    for part in PARTS:
        carried = [path for path in (folder / part, folder / "scene") if path.is_dir()]
        total = tree + sum(mib(path) for path in carried)
        print(f"\n{part}: {total:.1f} MiB, of which {tree:.1f} are the checkout; take along, in the same places:")
        print("".join(f"    {os.path.relpath(path, ROOT)}  {mib(path):.1f} MiB\n" for path in carried), end="")
        if total > MOST_MIB:
            print(f"gpu_check: this is more than {MOST_MIB:.0f} MiB", file=sys.stderr)
            return 1
        print(f"and run there, in the root of the checkout:\n    {call(part, folder)}")
    return 0


def call(part: str, carried: Path) -> str:
    """The command line on the machine with the GPU."""
    where = os.path.relpath(carried, ROOT)
    return f'python3 scripts/gpu_check.py --part {part} --carried {where} --out "$OUT"'


def pinned(name: str) -> str:
    """The version that is installed here, and so is tested; any where it is not."""
    version = version_of(name)
    return name if version == "missing" else f"{name}=={version}"


def fetch(requirements: list[str], folder: Path) -> None:
    python, platforms = TARGET
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    command += [word for platform in platforms for word in ("--platform", platform)]
    done = subprocess.run([*command, "--dest", str(folder), *requirements], check=False)
    if done.returncode != 0:
        raise SystemExit(f"gpu_check: pip could not download {' '.join(requirements)}")


def required(wheel: Path, name: str) -> str:
    """The version of another package that a wheel asks for, as ``name==version``."""
    with zipfile.ZipFile(wheel) as archive:
        path = next(path for path in archive.namelist() if path.endswith(".dist-info/METADATA"))
        found = re.search(rf"^Requires-Dist: {name}\s*==\s*(\S+)$", archive.read(path).decode(), re.M)
    if found is None:
        raise SystemExit(f"gpu_check: {wheel.name} does not say which {name} it needs")
    return f"{name}=={found[1]}"


def write_scenes(folder: Path) -> None:
    """The sample scene's cameras, and a real scene at half its size where there is one beside the project."""
    write_views(ROOT / "data" / "samples" / "courtyard", folder / "courtyard", copy=False)
    real = ROOT.parent / "shared" / "data" / "fox"
    if real.is_dir():
        halve(real, folder / "fox")
        write_views(folder / "fox", folder / "fox", copy=True)
    else:
        print(f"gpu_check: {real} is not there: training is measured on the sample scene alone", file=sys.stderr)


def halve(scene: Path, folder: Path) -> None:
    """A COLMAP scene of PINHOLE cameras with photos and cameras at half the size, as text and without tracks."""
    from PIL import Image

    from splatcli.scene._pycolmap import pycolmap

    reconstruction = pycolmap.Reconstruction(str(scene / "sparse" / "0"))
    model = folder / "sparse" / "0"
    model.mkdir(parents=True)
    (folder / "images").mkdir()
    for camera in reconstruction.cameras.values():
        camera.rescale(camera.width // 2, camera.height // 2)
    lines = []
    for number, image in reconstruction.images.items():
        camera, pose = reconstruction.cameras[image.camera_id], image.cam_from_world()
        x, y, z, w = pose.rotation.quat
        place = " ".join(repr(float(value)) for value in (w, x, y, z, *pose.translation))
        lines += [f"{number} {place} {image.camera_id} {image.name}", ""]
        with Image.open(scene / "images" / image.name) as photo:
            small = photo.convert("RGB").resize((camera.width, camera.height), Image.Resampling.LANCZOS)
            small.save(folder / "images" / image.name, quality=92)
    (model / "images.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    lines = [
        f"{number} PINHOLE {camera.width} {camera.height} {' '.join(repr(float(p)) for p in camera.params)}"
        for number, camera in reconstruction.cameras.items()
    ]
    (model / "cameras.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    lines = []
    for number, point in reconstruction.points3D.items():
        place = " ".join(f"{value:.6g}" for value in point.xyz)
        lines.append(f"{number} {place} {' '.join(map(str, point.color))} {point.error:.3g}")
    (model / "points3D.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_views(scene: Path, folder: Path, *, copy: bool) -> None:
    """The scene for load_views(). copy: the pictures travel beside it; else they are where they are in the checkout."""
    import numpy as np

    from splatcli.config import DataConfig
    from splatcli.scene.read import read_scene

    found = read_scene(scene, DataConfig())
    assert found.points is not None, f"{scene} has no points"
    views = [
        {**{name: getattr(camera, name) for name in ("name", "width", "height", "fx", "fy", "cx", "cy")},
         "viewmat": camera.viewmat.tolist()}
        for camera in found.cameras
    ]  # fmt: skip
    images = "" if copy else (scene / "images").relative_to(ROOT).as_posix()
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "views.json", {"images": images, "views": views, "train": found.train, "test": found.test})
    rgb = np.asarray(found.points.rgb, dtype=np.float64) / 255
    np.savez(folder / "points.npz", xyz=np.asarray(found.points.xyz, dtype=np.float32), rgb=rgb.astype(np.float32))


def mib(path: Path) -> float:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / 2**20


def tracked_mib() -> float:
    """What a checkout weighs without what git ignores."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    return sum((ROOT / name).stat().st_size for name in names if name and (ROOT / name).is_file()) / 2**20


def unpack(part: str, carried: Path, site: Path) -> list[str]:
    """Puts the wheels of a part where Python finds them, before what is installed; their names."""
    names = []
    for wheel in sorted((carried / part).glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:  # none of them has scripts or data beside its packages
            archive.extractall(site)
        names.append(wheel.name)
    return names


# --- command line ----------------------------------------------------------------------------------------------------


def table(report: dict[str, Any]) -> list[str]:
    """A line for each section."""
    lines = [f"{report.get('part', '')} {report.get('started', '')}, {report.get('seconds', 0):.0f} s"]
    for name, section in report["sections"].items():
        words = str(section.get("error") or section.get("skipped") or section.get("no_gpu") or "").strip().splitlines()
        lines.append(f"{name:12} {section['status']:8} {section['seconds']:5.0f} s  {words[-1][:110] if words else ''}")
    return lines


def brief(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), default=str)


def summary(report: dict[str, Any]) -> str:
    """The report for a person, with all that is needed to act on it, in no more than SUMMARY_CHARACTERS."""
    sections: dict[str, Any] = report["sections"]

    def found(name: str) -> dict[str, Any]:
        hidden = ("status", "seconds", "error", "skipped", "no_gpu")
        return {key: value for key, value in sections.get(name, {}).items() if key not in hidden}

    blocks: list[tuple[int, list[str]]] = []  # what may be cut to so many characters, the first lines last
    for name in ("environment", "build", "determinism"):
        if found(name):
            blocks.append((900, [f"{name}: {brief(found(name))}"]))
    if found("tests"):
        blocks.append((3500, test_lines(found("tests"))))
    for name in ("training", "sanitizer"):
        blocks.append((1500, [f"{name} {key}: {brief(value)}" for key, value in found(name).items()]))
    blocks.append((2200, speed_lines(found("speed"), found("gsplat"))))
    blocks.append((2600, stage_lines(found("stages"))))
    blocks.append((1800, [f"ncu {key}: {brief(value)}" for key, value in found("counters").get("kernels", {}).items()]))
    blocks.append((1500, [f"beside {key}: {brief(value)}" for key, value in found("beside").items()]))
    for name, section in sections.items():
        if section.get("error"):
            lines = str(section["error"]).strip().splitlines()[-6:]
            blocks.append((700, [f"--- {name} failed:", *(line[:200] for line in lines)]))
    head = "\n".join(table(report))[:2000]
    text = [head]
    for most, lines in blocks:
        if lines:
            text.append("\n".join(lines)[:most])
    whole = "\n\n".join(text)
    # Errors come last and matter most: what is over the limit is cut out of the middle.
    return (
        whole
        if len(whole) <= SUMMARY_CHARACTERS
        else whole[:8500] + "\n[...]\n" + whole[-(SUMMARY_CHARACTERS - 8510) :]
    )


def test_lines(found: dict[str, Any]) -> list[str]:
    lines = []
    for name, result in found.items():
        if name != "alone":
            ending = f", in {result['while']}" if result.get("while") else ""
            lines.append(f"{name}: {result['summary']}{ending}")
    alone = found.get("alone", {})
    for name, result in found.items():
        if name != "alone":
            lines += [
                f"  {test.split('::')[-1]}{f' (alone: {alone[test]})' if test in alone else ''}: {words[:160]}"
                for test, words in result["failed"].items()
            ]
    return lines


def speed_lines(speeds: dict[str, Any], beside: dict[str, Any]) -> list[str]:
    """Ours of the section where gsplat was measured too, where there is one."""
    rows = []
    for name in dict.fromkeys([*beside, *speeds]):
        pair = beside.get(name)
        ours = pair["ours"] if isinstance(pair, dict) and "ours" in pair else speeds.get(name)
        if not isinstance(ours, dict) or "steps_per_second" not in ours:
            continue
        theirs = ""
        if isinstance(pair, dict) and "gsplat" in pair:
            peer = pair["gsplat"]
            theirs = (
                f"{peer['steps_per_second']:8.1f} {peer['ms'] / ours['ms']:6.2f} {peer['peak_mib']:6d} "
                f"{peer['l1_only']['ms'] / ours['ms']:6.2f}"
            )
        rows.append(
            f"{name:18} {ours['steps_per_second']:8.1f} {ours['ms']:8.3f} {ours['spread']:6.3f} {ours['peak_mib']:6d} "
            f"{ours['visible_share']:5.2f} {ours['pairs_per_visible']:7.2f} {theirs}"
        )
    if not rows:
        return []
    head = f"{'training':18} {'steps/s':>8} {'ms':>8} {'spread':>6} {'MiB':>6} {'seen':>5} {'pairs/V':>7} "
    extra = {key: beside[key] for key in ("version", "build", "waited") if key in beside}
    return [
        f"{head}{'gsplat/s':>8} {'ratio':>6} {'MiB':>6} {'L1':>6}",
        *rows,
        f"gsplat: {brief(extra)}" if extra else "",
    ]


def stage_lines(found: dict[str, Any]) -> list[str]:
    lines = []
    for name, row in found.items():
        if isinstance(row, dict) and "sum" in row:
            each = "  ".join(
                f"{stage} {values['ms']:.3f} ({values['times_floor']:.1f}x)"
                for stage, values in row.items()
                if "times_floor" in values
            )
            lines.append(f"{name}: ms and times the floor: {each}; sum {row['sum']['ms']:.3f}")
            for kernel, times in list(row.get("kernels", {}).items())[:4]:
                lines.append(f"    {times['us']:9.1f} us x{times['launches']:g}  {kernel.split('(')[0][-70:]}")
    return lines


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
    parser.add_argument("--part", choices=list(PARTS), help="what is right, or how fast it is")
    parser.add_argument("--out", type=Path, help="folder for the report, the log and the summary")
    parser.add_argument("--seconds", type=float, default=540.0, help="time limit (540)")
    parser.add_argument("--only", help="comma-separated sections of the part")
    parser.add_argument("--carried", type=Path, default=ROOT / ".wheels", help="what --prepare has made (.wheels)")
    parser.add_argument("--prepare", type=Path, metavar="DIR", help="fetch wheels and cut a scene, and end")
    parser.add_argument("--rehearse", action="store_true", help="run every section as far as it comes without a GPU")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to try the script itself")
    parser.add_argument("--section", choices=list(SECTIONS), help=argparse.SUPPRESS)
    parser.add_argument("--tiny-step", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--profiled-step", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.prepare is not None:
        return options
    if options.out is None:
        parser.error("--out is needed: a folder for the report")
    if options.section is None and options.part is None:
        parser.error(f"--part is needed: {' or '.join(PARTS)}")
    known = PARTS[options.part] if options.part else SECTIONS
    options.names = options.only.split(",") if options.only else list(known)
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"there is no section {', '.join(unknown)}; there are {', '.join(known)}")
    if not options.seconds > 0:
        parser.error("--seconds must be more than 0")
    return options


def child(name: str, out: Path, seconds: float) -> int:
    """A section in this process."""
    report = Report(out / f"{name}.json", seconds)
    try:
        SECTIONS[name].run(report)
    except Skipped as reason:
        report["skipped"] = str(reason)
    except Exception as error:
        told = [line for line in str(error).splitlines() if any(words in line for words in NO_GPU)]
        if os.environ.get(REHEARSE) == "1" and told:
            report["no_gpu"] = told[0].strip()[:200]
            return 0
        traceback.print_exc()
        return 1
    return 0


def stop(number: int, frame: Any) -> None:
    """Whoever stops the program still gets the summary."""
    raise SystemExit(128 + number)


def main(argv: list[str], runner: Runner = run_section) -> int:
    options = arguments(argv)
    if options.prepare is not None:
        return prepare(options.prepare.resolve())
    if options.rehearse:
        os.environ[REHEARSE] = "1"
    if options.tiny:
        os.environ[TINY] = "1"
    if os.environ.get(REHEARSE) != "1" and (reason := no_gpu()) is not None:
        print(f"gpu_check: {reason}", file=sys.stderr)
        return 2
    if options.tiny_step or options.profiled_step:
        tiny_step() if options.tiny_step else profiled_step()
        return 0
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if options.section:
        return child(options.section, out, options.seconds)
    signal.signal(signal.SIGTERM, stop)
    os.environ[CARRIED] = str(options.carried.resolve())
    with tempfile.TemporaryDirectory(prefix="gpu_check-", ignore_cleanup_errors=True) as folder:
        return run_part(options, out, Path(folder), runner)


def run_part(options: argparse.Namespace, out: Path, work: Path, runner: Runner) -> int:
    """Runs the sections of a part; the summary comes last, whatever happens on the way."""
    started = time.monotonic()
    wheels = unpack(options.part, options.carried, work / "site")
    print(f"carried: {', '.join(wheels) or 'no wheels'}", file=sys.stderr)
    # ninja lies beside this Python, which may have been started through a link or a script elsewhere.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    paths = [str(work / "site"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    building = gsplat_building(work) if {"gsplat", "beside"} & set(options.names) else contextlib.nullcontext()
    try:
        with building:
            seconds = options.seconds - (time.monotonic() - started)
            report = check(options.part, out, work, seconds, options.names, runner)
    finally:
        append_logs(out / f"{options.part}.log", work, "gsplat-build")
        report = read_json(out / f"{options.part}.json") or {"part": options.part, "sections": {}}
        text = summary(report)
        (out / f"{options.part}.txt").write_text(text + "\n", encoding="utf-8")
        print(text, flush=True)
    return int(any(section["status"] == "failed" for section in report["sections"].values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
