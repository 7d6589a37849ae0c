"""Simulated GPUs: the CUDA kernels on tensors of the CPU, by one of two ways, and hooks into both.

"emulator" compiles the sources by a C++ compiler (tests/kernels/emulator/). It needs no nvcc, names the line of a
mistake, and runs under sanitizers. "ptx" compiles them by nvcc and interprets the PTX (tests/ptx/).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from splatcli.native.backend import Backend, load_library
from splatcli.native.build import source_root
from tests.kernels.build_emulator import emulator_library
from tests.ptx import machine

#: What simulated() runs the kernels on; see simulator().
_simulator = "emulator"


@contextlib.contextmanager
def simulator(kind: str) -> Iterator[None]:
    """Inside the block simulated() is on "ptx", or on the "emulator"."""
    global _simulator
    before, _simulator = _simulator, kind
    try:
        yield
    finally:
        _simulator = before


@functools.cache
def _library(kind: str) -> ctypes.CDLL:
    if kind == "ptx":
        return machine.load(machine.kernel_library(flags=machine.TWIN_FLAGS))
    return load_library(emulator_library())


def simulated(ordinal: int = 0, *, stream: int = 0x51, threads: int = 0) -> Backend:
    """Return the CUDA kernels on a simulated GPU; they round as the portable CPU library.

    threads: 1 asks for the simple variants of kernels that have two.
    """
    return Backend(_library(_simulator), torch.float32, threads, ordinal=ordinal, stream=stream, deferred=True)


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel as written in SPLAT_LAUNCH (of PTX its bare name), the current device, the stream."""

    kernel: str
    device: int
    stream: int


def _bare_name(kernel: str) -> str:
    """Return a mangled name's last part, such as "blend_fast" of "_ZN5splat3gpu10blend_fastILb1EE..."."""
    rest = kernel.removeprefix("_ZN")
    while rest != kernel and (length := re.match(r"\d+", rest)):
        begin, end = length.end(), length.end() + int(length[0])
        name, rest = rest[begin:end], rest[end:]
        kernel = name if not re.match(r"\d", rest) else kernel
    return kernel


class Emulator:
    """The hooks that both ways have (the end of emulator/emulator.cpp)."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.simt_set_schedule.argtypes = [ctypes.c_uint64]
        library.simt_fail_launch.argtypes = [ctypes.c_int64, ctypes.c_int32]
        library.simt_trace.argtypes = [ctypes.c_char_p, ctypes.c_int64]
        library.simt_trace.restype = ctypes.c_int64

    @contextlib.contextmanager
    def schedule(self, seed: int) -> Iterator[None]:
        """Threads and blocks in the order that ``seed`` gives; 0 is in order."""
        self.library.simt_set_schedule(seed)
        try:
            yield
        finally:
            self.library.simt_set_schedule(0)

    @contextlib.contextmanager
    def current_device(self, device: int) -> Iterator[None]:
        """As under torch.cuda.device."""
        before = self.device
        assert self.library.simt_set_device(device) == 0
        try:
            yield
        finally:
            self.library.simt_set_device(before)

    @property
    def device(self) -> int:
        return int(self.library.simt_get_device())

    def forget_contexts(self) -> None:
        """No device has a context, as when the process began."""
        self.library.simt_forget_contexts()

    @property
    def contexts(self) -> set[int]:
        """The devices that have a context."""
        return {device for device in range(4) if self.library.simt_has_context(device)}

    @property
    def last_error(self) -> int:
        return int(self.library.simt_last_error())

    @last_error.setter
    def last_error(self, error: int) -> None:
        self.library.simt_set_last_error(error)

    def fail_launch(self, n: int, error: int = 719) -> None:
        """The n-th launch from now fails with a number of cudaError_t, by default cudaErrorLaunchFailure; 0: none."""
        self.library.simt_fail_launch(n, error)

    def clear_trace(self) -> None:
        self.library.simt_clear_trace()

    def trace(self) -> list[Launch]:
        size = self.library.simt_trace(None, 0)
        buffer = ctypes.create_string_buffer(size)
        self.library.simt_trace(buffer, size)
        rows = [line.split("|") for line in buffer.value.decode().splitlines()]
        return [Launch(_bare_name(kernel), int(device), int(stream)) for kernel, device, stream in rows]


def copy_sources(target: Path, *, stages: bool = True) -> Path:
    """A copy of cuda/ with the times of its files, without its .cu files unless ``stages``; where it is."""
    skip = shutil.ignore_patterns() if stages else shutil.ignore_patterns("*.cu")
    for folder in ("include", "math", "kernels", "src"):
        shutil.copytree(source_root() / folder, target / folder, ignore=skip)
    return target
