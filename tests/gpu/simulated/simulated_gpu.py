"""What sitecustomize.py puts in the place of torch's GPU."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode

from splatcli.native import backend
from splatcli.native.backend import Backend

HOST = torch.device("cpu")
STREAM = 0x51  # not the default stream, which the kernels' launches must not use
_call = Backend.call


def on_host(value: Any) -> Any:
    """A device of the host in the place of a GPU; everything else as it is."""
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return "cpu"
    return HOST if isinstance(value, torch.device) and value.type == "cuda" else value


class OnHost(TorchFunctionMode):
    """Makes every tensor on the host, pinned or not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: on_host(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if func is torch.Tensor.is_pinned:
            return True
        if func in (torch.Tensor.pin_memory, torch.Tensor.cuda):
            return args[0]
        return func(*[on_host(value) for value in args], **kwargs)


class Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, on_host(device))


class Event:
    """The host's clock; a step that was enqueued has not been waited for."""

    def __init__(self, **_: Any) -> None:
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return max(1e-6, 1e3 * (end.at - self.at))

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return False


class Stream:
    cuda_stream = STREAM

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


class Graph:
    """Calls of the rasterizer, with their arguments as they were."""

    recording: Graph | None = None

    def __init__(self) -> None:
        self.calls: list[tuple[Backend, str, list[Any], Any]] = []

    def replay(self) -> None:
        for native, name, arguments, _ in self.calls:
            _call(native, name, *arguments)


@contextlib.contextmanager
def capture(graph: Graph) -> Iterator[None]:
    Graph.recording = graph
    try:
        yield
    finally:
        Graph.recording = None


class Profile:
    """Counts the rasterizer's calls and takes them for kernels."""

    counts: ClassVar[Counter[str]] = Counter()

    def __init__(self, **_: Any) -> None:
        Profile.counts.clear()

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def key_averages(self) -> list[Any]:
        rows = [
            SimpleNamespace(
                key=f"void splat::gpu::{name}_chunks<3>(splat::gpu::Job)", count=n, device_time_total=9.0 * n
            )
            for name, n in Profile.counts.items()
        ]
        return [*rows, SimpleNamespace(key="aten::empty", count=1, device_time_total=0.0)]


def call(self: Backend, name: str, *arguments: Any) -> int:
    Profile.counts[name] += 1
    if Graph.recording is None or name.endswith("_bytes"):
        return _call(self, name, *arguments)
    copies = [type(one).from_buffer_copy(one) if isinstance(one, ctypes.Structure) else one for one in arguments]
    # The originals own what the copies point to.
    Graph.recording.calls.append((self, name, copies, arguments))
    return 0


def install(path: str) -> None:
    # A torch with CUDA has brought the real runtime along: the library has to find the simulated one before it.
    ctypes.CDLL(path, mode=os.RTLD_LOCAL | os.RTLD_DEEPBIND)
    loaded = backend.load_library(Path(path))

    def cuda(cls: type[Backend], device: Any = "cuda") -> Backend:
        return Backend(loaded, torch.float32, 0, HOST, 0, STREAM, True)

    Backend.cuda = classmethod(cuda)  # type: ignore[assignment,method-assign]
    Backend.call = call  # type: ignore[method-assign]
    torch.Generator = Generator  # type: ignore[misc]
    torch.profiler.profile = Profile  # type: ignore[assignment,misc]
    properties = SimpleNamespace(name="simulated", multi_processor_count=1, total_memory=8 << 30, major=8, minor=0)
    nothing = ("synchronize", "empty_cache", "reset_peak_memory_stats", "set_sync_debug_mode", "_sleep", "set_device")
    values: dict[str, Any] = {
        **{name: lambda *_, **__: None for name in nothing},
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "current_stream": lambda *_: Stream(),
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (8, 0),
        "get_device_name": lambda *_: properties.name,
        "mem_get_info": lambda *_: (4 << 30, 8 << 30),
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 1 << 20,
        "memory_reserved": lambda *_: 0,
        "memory_stats": lambda *_: {"allocation.all.allocated": 0},
        "Event": Event,
        "Stream": Stream,
        "stream": lambda _: contextlib.nullcontext(),
        "device": lambda _: contextlib.nullcontext(),
        "CUDAGraph": Graph,
        "graph": capture,
        "profiler": SimpleNamespace(start=lambda: None, stop=lambda: None),
    }
    for name, value in values.items():
        setattr(torch.cuda, name, value)
    OnHost().__enter__()
