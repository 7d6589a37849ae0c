"""The emulator as tests see it: its hooks, and copies of the sources to build it from."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from splatcli.native.build import source_root


@dataclass(frozen=True)
class Launch:
    """One launch that the emulator saw: the kernel as written in SPLAT_LAUNCH, the current device, the stream."""

    kernel: str
    device: int
    stream: int


class Emulator:
    """The hooks of an emulator library (the end of cuda/src/simt/simt.cpp)."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.simt_set_schedule.argtypes = [ctypes.c_uint64]
        library.simt_fail_launch.argtypes = [ctypes.c_int64]
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

    @property
    def last_error(self) -> int:
        return int(self.library.simt_last_error())

    @last_error.setter
    def last_error(self, error: int) -> None:
        self.library.simt_set_last_error(error)

    def fail_launch(self, n: int) -> None:
        """The n-th launch from now is refused; 0: none."""
        self.library.simt_fail_launch(n)

    def clear_trace(self) -> None:
        self.library.simt_clear_trace()

    def trace(self) -> list[Launch]:
        size = self.library.simt_trace(None, 0)
        buffer = ctypes.create_string_buffer(size)
        self.library.simt_trace(buffer, size)
        rows = [line.split("|") for line in buffer.value.decode().splitlines()]
        return [Launch(kernel, int(device), int(stream)) for kernel, device, stream in rows]


def copy_sources(target: Path, *, stages: bool = True) -> Path:
    """A copy of cuda/ with the times of its files, without its .cu files unless ``stages``; where it is."""
    skip = shutil.ignore_patterns() if stages else shutil.ignore_patterns("*.cu")
    for folder in ("include", "math", "kernels", "src"):
        shutil.copytree(source_root() / folder, target / folder, ignore=skip)
    return target
