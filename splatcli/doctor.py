"""The facts of ``splat doctor``: compilers, GPUs, libraries, and a test render on each backend."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from splatcli import __version__, machine
from splatcli.errors import SplatError
from splatcli.gaussians import Gaussians
from splatcli.native import backend, build, build_cuda
from splatcli.native.backend import Backend
from splatcli.rasterizer.reference import render_reference
from splatcli.rasterizer.rendering import render
from splatcli.scene.camera import Camera
from splatcli.scene.pinholes import install_remedy

#: Tolerated difference of a test image, in 0...1, from the plain torch reference. A Gaussian at the edge of its support
#: may be in one image and not in the other, which is 1/255 of its colour.
TOLERANCE = 5e-3


def examine() -> dict[str, Any]:
    """Return all facts as JSON. Nothing is raised: a failure is a fact with a remedy."""
    driver_cuda = build_cuda.driver_cuda()
    facts: dict[str, Any] = {
        "splatcli": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "driver": _driver(),
        "driver_cuda": None if driver_cuda is None else "{}.{}".format(*driver_cuda),
        "gpus": [_gpu(i) for i in range(torch.cuda.device_count())],
        "compiler": _attempt(_compiler),
        "nvcc": _attempt(_nvcc),
        "cache": _cache(),
        "memory_bytes": machine.total_memory(),
        "cores": os.cpu_count() or 1,
        "threads": machine.cores(),
        "isa": backend.chosen_isa(),
        "best_isa": backend.best_isa(),
        "pycolmap": _pycolmap(),
        "extras": {extra.name: _extra(extra) for extra in EXTRAS},
    }
    backends = {"cpu": _attempt(partial(_check, Backend.cpu, _cpu_reason(), "cpu"))}
    for gpu in range(torch.cuda.device_count()):
        device = f"cuda:{gpu}"
        backends[device] = _attempt(partial(_check_gpu, gpu))
    if not facts["gpus"]:
        backends["cuda"] = _no_gpu(bool(facts["driver"] or facts["driver_cuda"]))
    facts["backends"] = backends
    facts["ok"] = bool(backends["cpu"].get("works"))
    facts["fix"] = fixes(facts)
    return facts


def _cache() -> str | None:
    """Return the folder of libraries that are built; None without one, which the check of the CPU explains."""
    try:
        return str(build.cache_root())
    except SplatError:
        return None


@dataclass(frozen=True)
class Extra:
    """A package that some commands need. name: of the extra. program: a program that does as well."""

    name: str
    module: str
    package: str
    used_for: str
    program: str | None = None


#: Extras of pyproject.toml that commands use, beside cuda.
EXTRAS = (
    Extra("video", "imageio_ffmpeg", "imageio-ffmpeg", "videos, in and out", program="ffmpeg"),
    Extra("heic", "pillow_heif", "pillow-heif", "HEIC images"),
    Extra("geo", "pyproj", "pyproj", "coordinate systems of ground control points"),
    Extra("exr", "OpenEXR", "OpenEXR", "splat render --format exr"),
    Extra("usd", "pxr", "usd-core", "USD files"),
    Extra("spz", "zstandard", "zstandard", "SPZ files of version 4"),
    Extra("tensorboard", "tensorboard", "tensorboard", "splat train --tensorboard"),
    Extra("lpips", "lpips", "lpips", "splat eval --lpips"),
    Extra("lightning", "lightning", "lightning", "runs as a LightningModule"),
)


def _extra(extra: Extra) -> dict[str, Any]:
    """Return whether an extra is there, by its name alone: some of these packages take seconds to load."""
    facts: dict[str, Any] = {"used_for": extra.used_for}
    program = extra.program and shutil.which(extra.program)
    if importlib.util.find_spec(extra.module) is not None:
        try:
            version = importlib.metadata.version(extra.package)
        except importlib.metadata.PackageNotFoundError:
            version = None
        return {"works": True, **facts, "version": version, "found": extra.package}
    if program:
        return {"works": True, **facts, "version": None, "found": program}
    if extra.name == "spz" and sys.version_info >= (3, 14):
        return {"works": True, **facts, "version": None, "found": "Python's compression.zstd"}
    remedy = f"pip install 'splatcli[{extra.name}]'"
    return {"works": False, **facts, "problem": "not installed", "remedy": remedy}


def _pycolmap() -> dict[str, Any]:
    """Return whether pycolmap is there: it has no wheels for Linux on aarch64."""
    facts = _extra(Extra("pycolmap", "pycolmap", "pycolmap", "structure from motion, all lens models"))
    return facts if facts["works"] else {**facts, "remedy": install_remedy()}


def fixes(facts: dict[str, Any]) -> list[str]:
    """Return the commands that mend what is missing; lines that begin with # are for people to act on."""
    wanted = [name for name, one in facts["extras"].items() if not one["works"]]
    has_gpu = bool(facts["driver"] or facts["driver_cuda"])
    # Without a compiler that is the first thing to mend, unless there are ready-made libraries.
    works = [one["works"] for name, one in facts["backends"].items() if name != "cuda" or has_gpu]
    lines = [] if facts["compiler"]["works"] or all(works) else [_compiler_command()]
    if has_gpu and not facts["nvcc"]["works"]:
        if facts["driver_cuda"] and int(facts["driver_cuda"].partition(".")[0]) < build_cuda.EXTRA_CUDA:
            lines.append(f"# nvcc: {facts['nvcc']['remedy']}")
        else:
            wanted.insert(0, "cuda")
    if wanted:
        lines.append(f"{shlex.quote(sys.executable)} -m pip install 'splatcli[{','.join(wanted)}]'")
    broken = {name: one for name, one in facts["backends"].items() if not one["works"]}
    for name, one in broken.items():
        if one.get("remedy") and (name != "cuda" or has_gpu) and (name != "cpu" or facts["compiler"]["works"]):
            lines.append(f"# {name}: {one['remedy']}")
    return lines


#: A program that installs packages of the system -> its command for a C++ compiler.
_INSTALLERS = {
    "apt-get": "sudo apt-get install g++",
    "dnf": "sudo dnf install gcc-c++",
    "pacman": "sudo pacman -S gcc",
    "zypper": "sudo zypper install gcc-c++",
    "apk": "sudo apk add g++",
    "xcode-select": "xcode-select --install",  # macOS
}


def _compiler_command() -> str:
    if os.environ.get("CXX") and any(map(shutil.which, build.COMPILERS)):
        return "unset CXX"  # which names none; another one is there
    found = next((command for name, command in _INSTALLERS.items() if shutil.which(name)), None)
    return found or "# install a C++17 compiler, or set CXX to one"


def _attempt(check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return check()
    except SplatError as error:
        return {"works": False, "problem": error.what, "remedy": error.remedy}
    except (RuntimeError, OSError) as error:  # e.g. an incompatible driver or a full disk
        return {"works": False, "problem": str(error), "remedy": None}


def _driver() -> str | None:
    """Return the version of the NVIDIA driver from the kernel module; None without one."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return next((word for word in text.split() if word.count(".") >= 1 and word[0].isdigit()), None)


def _gpu(index: int) -> dict[str, Any]:
    try:
        properties = torch.cuda.get_device_properties(index)
    except RuntimeError:  # the driver counts it, but torch cannot use it, as its backend says
        return {"name": None, "capability": None, "memory_bytes": None}
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
    }


def _compiler() -> dict[str, Any]:
    compiler = build.find_compiler()
    return {"works": True, "command": compiler.command, "version": compiler.version}


def _nvcc() -> dict[str, Any]:
    toolkit = build_cuda.find_toolkit()
    return {"works": True, "command": str(toolkit.nvcc), "version": toolkit.version, "found_in": toolkit.origin}


def _cpu_reason() -> str:
    chosen, best = backend.chosen_isa(), backend.best_isa()
    origin = "the best of this processor" if chosen == best else f"from {backend.ISA_VARIABLE}; the best is {best}"
    made = "ready-made, from this package" if build.ready_made_cpu(chosen) is not None else "built by the C++ compiler"
    return f"instruction set {chosen}, {origin}; {made}"


def _cuda_reason(gpu: int) -> str:
    refusal = build_cuda.not_ready_made(torch.cuda.get_device_capability(gpu))
    if refusal is None:
        return "ready-made, from the sources of this package"
    return f"built here by nvcc, for {refusal}"


def _no_gpu(driver: bool) -> dict[str, Any]:
    """Return which of driver, torch and GPU is missing."""
    if not driver:
        problem, remedy = "no NVIDIA driver", "if there is an NVIDIA GPU, install its driver"
    elif torch.version.cuda is None:
        problem, remedy = "torch is a CPU build", "install torch with CUDA, see pytorch.org"
    else:
        problem = f"torch for CUDA {torch.version.cuda} finds no GPU"
        remedy = "check nvidia-smi, CUDA_VISIBLE_DEVICES, and that the driver supports this CUDA version"
    return {"works": False, "problem": problem, "remedy": remedy}


def _check_gpu(gpu: int) -> dict[str, Any]:
    device = f"cuda:{gpu}"
    return _check(partial(Backend.cuda, device), _cuda_reason(gpu), device)


def _check(backend_of: Callable[[], Backend], why: str, device: str) -> dict[str, Any]:
    backend = backend_of()
    difference = self_test(backend, device)
    facts: dict[str, Any] = {
        "works": difference <= TOLERANCE,  # false for NaN too
        "library": backend.library._name,
        "why": why,
        "largest_difference": difference,
    }
    if backend.device.type == "cpu":
        facts["threads"] = machine.cores()
    if not facts["works"]:
        facts["problem"] = f"its test image differs by {difference:g} from the reference"
        facts["remedy"] = f"delete {Path(backend.library._name).parent}, run again, and report this if it remains"
    return facts


def self_test(backend: Backend, device: str) -> float:
    """Return the largest difference between a small image by ``backend`` and by plain torch."""
    generator = torch.Generator().manual_seed(1)
    n = 200
    gaussians = Gaussians(
        means=torch.randn(n, 3, generator=generator) * torch.tensor([0.8, 0.6, 0.3]) + torch.tensor([0.0, 0.0, 3.0]),
        quats=torch.randn(n, 4, generator=generator),
        log_scales=torch.randn(n, 3, generator=generator) * 0.4 - 2.3,
        logit_opacities=torch.randn(n, generator=generator),
        sh0=torch.randn(n, 3, generator=generator),
        shN=torch.randn(n, 15, 3, generator=generator) * 0.2,
    )
    camera = Camera("self-test", 96, 64, 90.0, 90.0, 48.0, 32.0, torch.eye(4, dtype=torch.float64).numpy())
    with torch.no_grad():
        expected, _, _ = render_reference(gaussians, camera, sh_degree=3)
        found = render(gaussians.to(device), camera, backend=backend).image.cpu()
    return float((found - expected).abs().max())
