"""The CUDA library: ready-made in the package, or compiled by nvcc at first use for the GPU at hand."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import util
from pathlib import Path

from splatcli.errors import ResourceError
from splatcli.native import abi, build
from splatcli.native.build import source_root

NAME = "libsplat_cuda.so"
FOLDERS = ("include", "math", "kernels", "src", "src/cuda")

#: Architectures of a ready-made library's machine code; newer GPUs run the PTX of the last one.
FAT_ARCHITECTURES = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))

#: Beside a ready-made library: the digest of the sources that it was made from, the ABI, its machine code and CUDA.
READY_MADE = build.READY_MADE

#: Environment variables that nvcc reads, beside its arguments.
_NVCC_ENVIRONMENT = ("NVCC_CCBIN", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")

#: Linux drivers that know a CUDA of this major version.
_DRIVERS = {12: "525", 13: "580"}

#: The CUDA of `splatcli[cuda]`. PyPI has no nvcc for CUDA 12: nvidia-cuda-nvcc-cu12 has ptxas and libnvvm alone.
EXTRA_CUDA = 13


class NoToolkitError(ResourceError):
    """There is no nvcc, and no ready-made library that fits."""


@dataclass(frozen=True, slots=True)
class Toolkit:
    """An nvcc: its path, release such as (13, 0), version line and origin."""

    nvcc: Path
    release: tuple[int, int]
    version: str
    origin: str


def find_toolkit() -> Toolkit:
    """Return the first of toolkits(). Raises NoToolkitError when there is none."""
    for toolkit in toolkits():
        return toolkit
    raise _no_toolkit()


def toolkits() -> Iterator[Toolkit]:
    """Yield each working nvcc: $CUDA_HOME, $CUDA_PATH, the PATH, /usr/local/cuda, the nvidia-cuda-nvcc wheel."""
    for origin, path in _candidates():
        try:
            answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        except OSError:
            continue
        found = re.search(r"release (\d+)\.(\d+).*", answer.stdout)
        if answer.returncode == 0 and found:
            yield Toolkit(path, (int(found[1]), int(found[2])), found[0].strip(), origin)


def _no_toolkit() -> NoToolkitError:
    return NoToolkitError("no nvcc was found; the CUDA rasterizer is built on first use", remedy=_toolkit_remedy())


def _toolkit_remedy() -> str:
    """Return how to get an nvcc whose libraries the driver knows."""
    driver = driver_cuda()
    if driver is None or driver[0] >= EXTRA_CUDA:
        return (
            "install the CUDA toolkit (nvcc 12 or newer) and set CUDA_HOME, or: pip install 'splatcli[cuda]'; splat "
            "doctor says what was found"
        )
    version = f"{driver[0]}.{driver[1]}"
    return (
        f"install the CUDA toolkit {version}, which the driver knows, and set CUDA_HOME to it (without root: conda "
        f"install -c nvidia/label/cuda-{version}.0 cuda-toolkit); or update the NVIDIA driver to "
        f"{_DRIVERS[EXTRA_CUDA]} or newer, and pip install 'splatcli[cuda]'"
    )


def _candidates() -> list[tuple[str, Path]]:
    found: list[tuple[str, Path]] = []
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            found.append((f"${variable}", Path(os.environ[variable]) / "bin" / "nvcc"))
    on_path = shutil.which("nvcc")
    if on_path:
        found.append(("PATH", Path(on_path)))
    found.append(("/usr/local/cuda", Path("/usr/local/cuda/bin/nvcc")))
    spec = util.find_spec("nvidia")
    for base in spec.submodule_search_locations or [] if spec else []:
        found += [("the nvidia-cuda-nvcc wheel", path) for path in sorted(Path(base).glob("*/bin/nvcc"))]
    return [(origin, path) for origin, path in found if path.is_file()]


def cuda_library(capability: tuple[int, int]) -> Path:
    """Return the CUDA library for a GPU of compute ``capability``: ready-made, from the cache, or built now.

    The first nvcc that serves both the GPU and the driver is taken.
    Raises NoToolkitError, NoCompilerError, or ResourceError when no nvcc serves or when it fails (with its message).
    """
    if not_ready_made(capability) is None:
        return READY_MADE / NAME
    refusal: ResourceError | None = None
    for toolkit in toolkits():
        try:
            check_driver(toolkit)
            architecture = supported(toolkit, capability)
        except ResourceError as error:
            refusal = refusal or error
            continue
        return _build(toolkit, (architecture,))
    raise refusal or _no_toolkit()


def not_ready_made(capability: tuple[int, int]) -> str | None:
    """Return why the ready-made library does not serve a GPU of ``capability`` here; None when it does."""
    try:
        facts = json.loads((READY_MADE / "libsplat_cuda.json").read_text(encoding="utf-8"))
        architectures = [tuple(one) for one in facts["architectures"]]
        sources, version, major = facts["sources"], facts["abi"], facts["release"][0]
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return "no ready-made library came with this package"
    if not (READY_MADE / NAME).is_file():
        return "no ready-made library came with this package"
    if sources != build.source_digest(FOLDERS) or version != abi.ABI_VERSION:
        return "the ready-made library is of other sources"
    # Machine code runs on later minor versions of its architecture, the PTX of the last one on everything later.
    runs = any(code[0] == capability[0] and code <= capability for code in architectures)
    if not runs and capability < architectures[-1]:
        return f"the ready-made library has no code for capability {capability[0]}.{capability[1]}"
    driver = driver_cuda()
    if driver is not None and major > driver[0]:
        return f"the ready-made library is of CUDA {major}, the driver knows {driver[0]}.{driver[1]}"
    return None


def driver_cuda() -> tuple[int, int] | None:
    """Return the newest CUDA that the driver knows, such as (12, 4); None without a driver."""
    version = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed or not version.value else (version.value // 1000, version.value % 1000 // 10)


def check_driver(toolkit: Toolkit) -> None:
    """Raise ResourceError when the driver is too old for libraries of ``toolkit``; minor versions do not matter."""
    driver, major = driver_cuda(), toolkit.release[0]
    if driver is None or major <= driver[0]:
        return
    raise ResourceError(
        f"nvcc {major}.{toolkit.release[1]} makes libraries of CUDA {major}, but the driver knows no more than CUDA "
        f"{driver[0]}.{driver[1]}",
        where=toolkit.nvcc,
        remedy=_toolkit_remedy(),
    )


#: Names of cudaError_t where the library has no code that the GPU runs, and where it needs a newer driver.
_NO_CODE = (
    "cudaErrorInvalidDeviceFunction",
    "cudaErrorInvalidKernelImage",
    "cudaErrorNoKernelImageForDevice",
    "cudaErrorJitCompilerNotFound",
    "cudaErrorJitCompilationDisabled",
)
_OLD_DRIVER = (
    "cudaErrorInsufficientDriver",
    "cudaErrorCallRequiresNewerDriver",
    "cudaErrorUnsupportedPtxVersion",
    "cudaErrorSystemDriverMismatch",
    "cudaErrorCompatNotSupportedOnDevice",
)
#: Where a kernel asks for more than the GPU has.
_OUR_BUG = ("cudaErrorInvalidConfiguration", "cudaErrorInvalidValue", "cudaErrorLaunchOutOfResources")


def launch_remedy(message: str, library: Path) -> str:
    """Return the remedy where CUDA refuses to run ``library``, by the name of the cudaError_t in ``message``."""
    found = re.search(r"\bcudaError\w+", message)
    name = found[0] if found else ""
    if name in _NO_CODE:
        remedy = f"delete {library} and run again: nvcc then builds it for this GPU (splat doctor says which nvcc)"
    elif name in _OLD_DRIVER:
        remedy = (
            f"update the NVIDIA driver; or set CUDA_HOME to a toolkit no newer than the CUDA that the driver knows, "
            f"delete {library} and run again"
        )
    elif name in _OUR_BUG:
        remedy = "report this with the output of splat doctor --json: a kernel asks for more than this GPU has"
    else:
        remedy = "see what nvidia-smi and splat doctor say"
    return f"{remedy}; --device cpu works meanwhile"


def supported(toolkit: Toolkit, capability: tuple[int, int]) -> tuple[int, int]:
    """Return the newest architecture that ``toolkit`` can compile for and a GPU of ``capability`` can run.

    An older nvcc than the GPU gives PTX of the newest it knows, which the driver compiles for the GPU.
    Raises ResourceError for a GPU that this nvcc no longer serves.
    """
    answer = subprocess.run([toolkit.nvcc, "--list-gpu-code"], capture_output=True, text=True, check=False)
    known = [(int(code[:-1]), int(code[-1])) for code in re.findall(r"sm_(\d+)\b", answer.stdout)]
    usable = [one for one in known if one <= capability]
    if not usable:
        raise ResourceError(
            f"nvcc {toolkit.release[0]}.{toolkit.release[1]} cannot compile for compute capability "
            f"{capability[0]}.{capability[1]}",
            where=toolkit.nvcc,
            remedy="use a toolkit of the GPU's time, through CUDA_HOME, or --device cpu",
        )
    return max(usable)


def fat_library(folder: Path) -> Path:
    """Build the library that a wheel carries into ``folder``, with a JSON file of its sources and architectures."""
    toolkit = find_toolkit()
    answer = subprocess.run([toolkit.nvcc, "--list-gpu-code"], capture_output=True, text=True, check=False)
    known = set(re.findall(r"sm_(\d+)\b", answer.stdout))
    architectures = tuple(one for one in FAT_ARCHITECTURES if f"{one[0]}{one[1]}" in known)
    built = _build(toolkit, architectures)
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "sources": build.source_digest(FOLDERS),
        "abi": abi.ABI_VERSION,
        "architectures": architectures,
        "release": toolkit.release,
        "nvcc": toolkit.version,
    }
    shutil.copy2(built, folder / NAME)
    (folder / "libsplat_cuda.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return folder / NAME


def nvcc_flags(architectures: tuple[tuple[int, int], ...]) -> tuple[str, ...]:
    """Return the machine code for each of ``architectures``, and PTX of the last one."""
    codes = [f"{major}{minor}" for major, minor in architectures]
    targets = [f"-gencode=arch=compute_{code},code=sm_{code}" for code in codes]
    targets.append(f"-gencode=arch=compute_{codes[-1]},code=compute_{codes[-1]}")
    return ("-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden", *targets)


def _build(toolkit: Toolkit, architectures: tuple[tuple[int, int], ...]) -> Path:
    host = build.find_compiler()
    environment = " ".join(f"{name}={os.environ.get(name, '')}" for name in _NVCC_ENVIRONMENT)
    recipe = build.Recipe(
        build.Toolchain(str(toolkit.nvcc), f"{toolkit.version} with {host.version} {environment}"),
        nvcc_flags(architectures),
        # The runtime is linked in, so that none has to be found beside torch's own.
        link_flags=("-cudart", "static"),
        depfile_flags="-MD -MF $out.d",
        remedy="nvcc may refuse a host compiler newer than itself: its own words are above; set NVCC_CCBIN to an "
        "older g++, or use --device cpu",
    )
    names = "-".join(f"sm{major}{minor}" for major, minor in architectures)
    sources = sorted((source_root() / "src" / "cuda").glob("*.cu"))
    return build.build_library(f"cuda-{names}", NAME, sources, recipe, FOLDERS)
