"""The sections of the part check: build, tests, determinism, training, compute-sanitizer."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu import ROOT
from gpu.prepare import version_of
from gpu.process import Command, result_of, run_child, splat, this_program, tool
from gpu.report import CARRIED, NO_GPU, REHEARSE, Report, Skipped, is_tiny
from gpu.scenes import SIZES, Case, Training, make_scene


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
    """Return the line with a program's version, or an empty text where the program is missing."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return next(
            (line for line in lines if re.search(r"release \d|[Vv]ersion \d|\) \d+\.", line)), "".join(lines[:1])
        )
    return ""


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
TEST_FILES = {
    "tests/gpu/test_gpu.py": 0.6,
    "tests/gpu/test_offload.py": 0.4,
    "tests/gpu/test_ranks.py": 0.5,
    "tests/gpu/test_distributed_call.py": 0.6,
}


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
    for name, engine in {"first": {}, "second": {}, "overflowing": {"capacity": 200 if is_tiny() else 20_000}}.items():
        training = Training(Case(300 if is_tiny() else 100_000, "determinism", "orbit"), rate=1e-3, **engine)
        for _ in range(4 if is_tiny() else 30):
            training.step()
        training.finish()
        digests[name] = training.digest()
        report["digests"] = dict(digests)
    report["same_bits"] = len(set(digests.values())) == 1
    if not report.found["same_bits"]:
        raise AssertionError("the same training left other bits")


def parameters_digest(run: Path) -> str:
    """Return a digest of the Gaussians in a run's last checkpoint."""
    from splatcli.checkpoint.file import load_checkpoint
    from splatcli.checkpoint.run_dir import find_latest_sound

    path = find_latest_sound(run).path
    assert path is not None, f"{run} has no checkpoint"
    digest = hashlib.sha256()
    for _, tensor in load_checkpoint(path).gaussians.items():
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def training(report: Report) -> None:
    """splat train on images: PSNR beside the CPU's, the same bits again, resumed and with --offload.

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
    """Return the faults of training on this scene; figures go to the report."""
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
    """Run steps and a render under the sanitizer, with all gradients, in the smallest interesting sizes."""
    import torch

    from splatcli.rasterizer import render

    SIZES["step"] = (90, 50)
    training = Training(Case(700, "step", "front"), rate=1e-3, capacity=300)
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
    program = tool("compute-sanitizer")
    bad = []
    tools = {"memcheck": 0.5, "racecheck": 0.6, "synccheck": 0.9}
    for name, share in tools.items():
        if report.left() < 10:
            report[name] = {"status": None, "summary": "the time was up"}
            continue
        log = report.log(name)
        # Torch's caching allocator hands out pieces of large blocks: only without it does each tensor have an end.
        # --kernel-name was --kernel-regex until 2023.3, of CUDA 12.3.
        options = ["--tool", name, "--error-exitcode", "9", "--kernel-name", "kns=splat"]
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
