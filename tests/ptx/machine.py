"""The PTX interpreter as tests see it: it is built here, and so are the CUDA libraries whose PTX it runs.

    library = kernel_library(flags=("-fmad=false",))
    backend = Backend(load(library), torch.float32, 0, ordinal=1, stream=0x51, deferred=True)
    with machine().races(), machine().schedule(3):
        ...
    assert machine().hazards() == []

A library of nvcc's that is linked to the interpreter, in place of the CUDA runtime, runs as it is: host code, launch
stubs and the layout of arguments are its own, and kernels are the PTX in its fat binary. tests/ptx/interpreter/
describes what is executed and what is checked.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from splatcli.errors import ResourceError
from splatcli.native import build
from splatcli.native.backend import load_library
from splatcli.native.build_cuda import NoToolkitError, find_toolkit
from splatcli.rasterizer.memory_budget import Arena

SOURCES = Path(__file__).resolve().parent / "interpreter"

#: No contraction: what is written as two operations rounds twice.
INTERPRETER_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-Wall",
    "-Wextra",
)
#: With the CPU's exp, log and 1/x in kernels, and every operation rounded by itself: the portable CPU library's bits.
TWIN_FLAGS = ("-DSPLAT_TWIN_MATH", "-fmad=false")
#: As in a normal build (splatcli/native/build_cuda.py), but with PTX alone, which stays readable.
KERNEL_FLAGS = ("-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-no-compress", "-cudart", "none")


#: With 1 in this environment variable a missing nvcc is a failure, so that no job is green by skipping.
REQUIRE_NVCC = "SPLATCLI_REQUIRE_NVCC"


def no_nvcc() -> str | None:
    """Return why a test that needs nvcc is skipped; None where there is one, or where the test shall fail without."""
    if os.environ.get(REQUIRE_NVCC) == "1":
        return None
    try:
        find_toolkit()
    except NoToolkitError:
        return "no nvcc on this machine"
    return None


def missing() -> str | None:
    """Return why no PTX can be made or run here; None where both are possible, see no_nvcc()."""
    if "-fsanitize" in os.environ.get("CXX", ""):
        return "the PTX interpreter is not run under sanitizers"
    if (reason := no_nvcc()) is not None:
        return reason
    try:
        build.find_compiler()
    except ResourceError:
        return "no C++ compiler on this machine"
    return None


#: For a whole module: `pytestmark = NEEDS_NVCC`.
NEEDS_NVCC = pytest.mark.skipif(missing() is not None, reason=missing() or "")


# ---- building --------------------------------------------------------------------------------------------------------


def interpreter() -> Path:
    """Return the interpreter's library, built now if it is not in the cache."""
    compiler = build.find_compiler()
    units = sorted(SOURCES.glob("*.cpp"))
    command = f"{compiler.command} {' '.join(INTERPRETER_FLAGS)} -MMD -MF $out.d"
    objects = _compile(units, command, (compiler.version, _processor()))
    # A CUDA build of torch loads another CUDA runtime for all to see: the interpreter calls its own.
    link = f"{compiler.command} -shared -Wl,-Bsymbolic -o $out $in"
    return _link(objects, link, "libptxinterpreter.so", ())


def kernel_library(
    root: Path | None = None,
    *,
    architecture: str = "80",
    units: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
) -> Path:
    """Return the CUDA library of a source tree, linked to the interpreter; built now if it is not in the cache.

    root: a tree like cuda/, the checkout's own by default.
    architecture: of the PTX, such as "80" or "90a". units: of single units, such as {"blend.cu": "75"}.
    flags: more for nvcc.
    Object files are cached by the contents of all that they include, so that a changed header costs the units that
    include it. Safe to call from several processes at once. Raises ResourceError with the compiler's message.
    """
    folder = (build.source_root() if root is None else root) / "src" / "cuda"
    return cuda_library(sorted(folder.glob("*.cu")), architecture=architecture, others=units, flags=flags)


def mutated_library(root: Path, unit: str, *, flags: Sequence[str] = ()) -> Path:
    """Return the library of the checkout's cuda/ with one unit, such as "blend.cu", from another tree."""
    units = sorted((build.source_root() / "src" / "cuda").glob("*.cu"))
    assert unit in [one.name for one in units]
    chosen = [root / "src" / "cuda" / unit if one.name == unit else one for one in units]
    return cuda_library(chosen, flags=flags)


def cuda_library(
    units: Sequence[Path],
    *,
    architecture: str = "80",
    others: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
) -> Path:
    """Return a library of these .cu files, as kernel_library() does."""
    toolkit, host = find_toolkit(), build.find_compiler()
    groups: dict[str, list[Path]] = {}
    for unit in units:
        groups.setdefault((others or {}).get(unit.name, architecture), []).append(unit)
    objects = []
    for number, group in sorted(groups.items()):
        target = f"-gencode=arch=compute_{number},code=compute_{number}"
        command = f"{toolkit.nvcc} {' '.join([*KERNEL_FLAGS, *flags, target])} -MD -MF $out.d"
        objects += _compile(group, command, (toolkit.version, host.version))
    runtime = interpreter()
    link = f"{host.command} -shared -o $out $in {runtime} -Wl,-rpath,{runtime.parent}"
    return _link(objects, link, "libsplat_ptx.so", (runtime.parent.name,))


def _processor() -> str:
    """Return what -march=native depends on."""
    with contextlib.suppress(OSError):
        found = re.search(r"^flags.*$", Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace"), re.M)
        return found[0] if found else ""
    return ""


def _digest(texts: Iterable[str | bytes]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update((text.encode() if isinstance(text, str) else text) + b"\0")
    return digest.hexdigest()[:16]


def _contents(unit: Path) -> Iterator[bytes]:
    """Yield a source's text and that of each file that it includes by a relative path, directly or not."""
    pending, seen = [unit.resolve()], set()
    while pending:
        path = pending.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        text = path.read_bytes()
        yield text
        pending += [(path.parent / name.decode()).resolve() for name in re.findall(rb'#include "([^"]+)"', text)]


def _compile(units: Sequence[Path], command: str, versions: tuple[str, ...]) -> list[Path]:
    """Return the units' object files, those not in the cache compiled now, side by side."""
    folder = build.cache_root() / "ptx-objects"
    folder.mkdir(exist_ok=True)
    objects = {unit: folder / f"{unit.stem}-{_digest([command, *versions, *_contents(unit)])}.o" for unit in units}
    with build._lock(folder / ".lock"):
        absent = [unit for unit in units if not objects[unit].is_file()]
        if absent:
            _ninja({unit.stem + ".o": ([unit], f"{command} -c $in -o $out", objects[unit]) for unit in absent}, folder)
    return [objects[unit] for unit in units]


def _link(objects: Sequence[Path], command: str, name: str, versions: tuple[str, ...]) -> Path:
    key = _digest([command, *versions, *(path.name for path in objects)])
    library = build.cache_root() / f"ptx-{key}" / name
    if not library.is_file():
        with build._lock(library.parent.with_suffix(".lock")):
            if not library.is_file():
                library.parent.mkdir(exist_ok=True)
                _ninja({name: (objects, command, library)}, library.parent)
    return library


def _ninja(targets: dict[str, tuple[Sequence[Path], str, Path]], folder: Path) -> None:
    """Make each target in a folder of its own by ninja, then rename it to its place: no half of a file is found."""

    def escape(path: Path) -> str:
        return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

    work = Path(tempfile.mkdtemp(prefix=".", dir=folder))
    try:
        lines = []
        for number, (name, (inputs, command, _)) in enumerate(targets.items()):
            lines += [f"rule make{number}", f"  command = {command}"]
            lines.append(f"build {name}: make{number} {' '.join(map(escape, inputs))}")
        (work / "build.ninja").write_text("\n".join(lines) + "\n", encoding="utf-8")
        done = subprocess.run([*build._ninja(), "-C", str(work)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
            raise ResourceError(f"building for the PTX interpreter failed:\n{tail}", where=next(iter(targets)))
        for name, (_, _, place) in targets.items():
            os.replace(work / name, place)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@functools.cache
def load(library: Path) -> ctypes.CDLL:
    """Return a library of kernel_library() with the signatures of splat.h set."""
    # Its names of the CUDA runtime are the interpreter's, also where torch has loaded another one for all to see.
    ctypes.CDLL(str(library), mode=os.RTLD_NOW | getattr(os, "RTLD_DEEPBIND", 0))
    return load_library(library)


# ---- hooks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hazard:
    """Accesses without a barrier between, or reads of what nobody wrote: how often, and where."""

    times: int
    words: str


@dataclass(frozen=True)
class Instruction:
    """How often one instruction has run.

    line: in the PTX. warps, lanes: that ran it, without those whose guard was false; lanes are added up.
    traffic: sectors of 32 bytes of global memory, or passes over the banks of shared memory; counted under profile().
    """

    opcode: str
    line: int
    warps: int
    lanes: int
    traffic: int


@dataclass(frozen=True)
class Kernel:
    """How often a kernel, by its mangled name, and its instructions have run.

    sectors_read, sectors_written: 32 bytes of global memory, each once a launch; counted under profile().
    """

    name: str
    launches: int
    blocks: int
    sectors_read: int
    sectors_written: int
    instructions: tuple[Instruction, ...]


class Machine:
    """The interpreter's hooks. Its state is that of the process: there is one, machine()."""

    def __init__(self, library: Path) -> None:
        self.path = library
        self.native: Any = ctypes.CDLL(str(library))
        native = self.native
        for name in ("ptx_hazards", "ptx_counts", "ptx_unknown"):
            getattr(native, name).argtypes = [ctypes.c_char_p, ctypes.c_int64]
            getattr(native, name).restype = ctypes.c_int64
        native.simt_set_schedule.argtypes = [ctypes.c_uint64]
        native.ptx_patience.argtypes = native.ptx_last_blocks.argtypes = [ctypes.c_int64]
        native.ptx_allow.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
        native.ptx_load.restype, native.ptx_load.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
        native.ptx_words.restype = ctypes.c_char_p
        native.ptx_launch_nanoseconds.restype = ctypes.c_int64
        native.ptx_run.argtypes = [ctypes.c_void_p, ctypes.c_char_p, *[ctypes.c_void_p] * 3, ctypes.c_int64]

    def _text(self, name: str) -> list[str]:
        function = getattr(self.native, f"ptx_{name}")
        size = function(None, 0)
        buffer = ctypes.create_string_buffer(size)
        function(buffer, size)
        return buffer.value.decode().splitlines()

    # What is checked and how it runs; each ends with its block.

    @contextlib.contextmanager
    def schedule(self, seed: int) -> Iterator[None]:
        """Blocks and warps in the order that ``seed`` gives, warps preempted and torn apart; 0 is in order."""
        self.native.simt_set_schedule(seed)
        try:
            yield
        finally:
            self.native.simt_set_schedule(0)

    @contextlib.contextmanager
    def races(self) -> Iterator[None]:
        """Accesses of shared and global memory are held against each other; see hazards(), which begin empty."""
        self.native.ptx_clear_hazards()
        self.native.ptx_races(1)
        try:
            yield
        finally:
            self.native.ptx_races(0)

    @contextlib.contextmanager
    def approximations(self, ulps: int) -> Iterator[None]:
        """ex2, rcp and other approximations are off by up to ``ulps`` units in the last place, at random."""
        self.native.ptx_approximations(ulps)
        try:
            yield
        finally:
            self.native.ptx_approximations(0)

    @contextlib.contextmanager
    def lenient(self) -> Iterator[None]:
        """Threads that have ended count as there, as on hardware; else a warp operation that names one is a fault."""
        self.native.ptx_lenient(1)
        try:
            yield
        finally:
            self.native.ptx_lenient(0)

    @contextlib.contextmanager
    def patience(self, turns: int) -> Iterator[None]:
        """A block that takes more turns of loops is a fault: it waits for what never comes."""
        self.native.ptx_patience(turns)
        try:
            yield
        finally:
            self.native.ptx_patience(1 << 26)

    @contextlib.contextmanager
    def last_blocks(self, count: int) -> Iterator[None]:
        """Only the last ``count`` blocks of each launch run, so that a launch may be as large as a grid can be."""
        self.native.ptx_last_blocks(count)
        try:
            yield
        finally:
            self.native.ptx_last_blocks(0)

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """Launches are noted and do nothing, so that what is left is the time of the host."""
        self.native.ptx_idle(1)
        try:
            yield
        finally:
            self.native.ptx_idle(0)

    @contextlib.contextmanager
    def profile(self) -> Iterator[None]:
        """Traffic of memory is counted too; see counts(), which begin empty."""
        self.native.ptx_clear_counts()
        self.native.ptx_profile(1)
        try:
            yield
        finally:
            self.native.ptx_profile(0)

    @contextlib.contextmanager
    def bounds(self) -> Iterator[None]:
        """An access of global memory outside every tensor whose data_ptr() was asked for inside the block is a fault.

        The memory of those tensors stays until the end of the block, so that no other one comes to lie there. Buffers
        that an Arena made inside the block have no slack, in which such an access would go unseen.
        """
        kept: dict[int, Any] = {}
        original, begin = torch.Tensor.data_ptr, Arena.__init__

        def data_ptr(tensor: Tensor) -> int:
            pointer: int = original(tensor)
            if tensor.device.type == "cpu" and tensor.numel() > 0:
                storage = tensor.untyped_storage()
                if tensor.is_contiguous():
                    self.native.ptx_allow(pointer, tensor.numel() * tensor.element_size())
                else:
                    self.native.ptx_allow(storage.data_ptr(), storage.nbytes())
                kept[storage.data_ptr()] = storage
            return pointer

        self.native.ptx_forget_memory()
        self.native.ptx_check_memory(1)
        torch.Tensor.data_ptr = data_ptr  # type: ignore[method-assign, assignment]
        Arena.__init__ = lambda arena, device, slack=0.0: begin(arena, device, 0.0)  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.Tensor.data_ptr, Arena.__init__ = original, begin  # type: ignore[method-assign]
            self.native.ptx_check_memory(0)
            self.native.ptx_forget_memory()

    # What was seen.

    def hazards(self) -> list[Hazard]:
        """Return the hazards of the last races() block."""
        return [
            Hazard(int(times), words) for times, _, words in (line.partition("|") for line in self._text("hazards"))
        ]

    def counts(self) -> list[Kernel]:
        """Return how often each kernel and instruction has run since clear_counts()."""
        kernels: list[Kernel] = []
        lines: list[Instruction] = []
        for text in self._text("counts"):
            name, *numbers = text.split("|")
            if name.startswith("  "):
                lines.append(Instruction(name.strip(), *map(int, numbers)))
            else:
                lines = []
                kernels.append(Kernel(name, *map(int, numbers), instructions=()))
            kernels[-1] = replace(kernels[-1], instructions=tuple(lines))
        return kernels

    def clear_counts(self) -> None:
        self.native.ptx_clear_counts()

    def unknown(self, kernels: str = "") -> dict[str, int]:
        """Return the opcodes that are not known, a fault if reached, of loaded kernels with this in their name."""
        found: dict[str, int] = {}
        for kernel, opcode, times in (line.split("|") for line in self._text("unknown")):
            if kernels in kernel:
                found[opcode] = found.get(opcode, 0) + int(times)
        return found

    @property
    def seconds(self) -> float:
        """Spent in kernels so far."""
        return float(self.native.ptx_launch_nanoseconds()) / 1e9

    def module(self, text: str) -> Module:
        """Return PTX that is no library's, to run kernel by kernel. Raises ValueError where it cannot be parsed."""
        pointer = self.native.ptx_load(text.encode())
        if pointer is None:
            raise ValueError(self.native.ptx_words().decode())
        return Module(self, pointer)


class Fault(Exception):
    """A kernel did what it must not do."""


@dataclass(frozen=True)
class Module:
    """PTX on the machine."""

    machine: Machine
    pointer: int

    def run(self, kernel: str, grid: Sequence[int], block: Sequence[int], *arguments: Any, shared: int = 0) -> None:
        """Run a kernel of the module by its name. Raises Fault.

        grid, block: up to three numbers. arguments: tensors, None for a null pointer, or ctypes values.
        shared: bytes of dynamic shared memory.
        """
        values: list[Any] = []
        for argument in arguments:
            if argument is None or isinstance(argument, Tensor):
                values.append(ctypes.c_void_p(None if argument is None else argument.data_ptr()))
            else:
                values.append(argument)
        pointers = (ctypes.c_void_p * max(1, len(values)))(
            *[ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in values]
        )
        sizes = [(ctypes.c_uint * 3)(*[*size, 1, 1][:3]) for size in (grid, block)]
        native = self.machine.native
        if native.ptx_run(self.pointer, kernel.encode(), *sizes, pointers, shared) != 0:
            words = native.ptx_words().decode()
            native.cudaGetLastError()
            raise Fault(words)


@functools.cache
def machine() -> Machine:
    """Return the interpreter of this process."""
    return Machine(interpreter())
