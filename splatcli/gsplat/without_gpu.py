"""Programs that ask torch for a GPU run on the CPU where there is none.

While the mode below is entered, every torch function gets "cpu" for "cuda", ``torch.device`` included, and the names of
torch.cuda that would fail have replacements. torch.cuda.is_available() stays False. What is copied between CPU and GPU
is one tensor then, as in a program that says "cpu".
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from splatcli import machine

_log = logging.getLogger(__name__)

_CUDA, _CPU = re.compile(r"cuda(:\d+)?"), torch.device("cpu")


@functools.cache
def _tell() -> None:
    """Say once what "cuda" means."""
    _log.warning('the program asks torch for a GPU, and there is none: "cuda" is the CPU')


def _cpu_for_cuda(value: Any) -> Any:
    """Return the CPU for a name or an object of a CUDA device, and anything else as it is."""
    if isinstance(value, str):
        is_cuda = _CUDA.fullmatch(value) is not None
    else:
        is_cuda = isinstance(value, torch.device) and value.type == "cuda"
    if not is_cuda:
        return value
    _tell()
    return _CPU


class _CpuForCuda(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            _tell()
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.device:
            named = [_cpu_for_cuda(value) for value in (*args[:1], *kwargs.values())]
            return _CPU if _CPU in named else func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) > 1 and isinstance(args[1], str):
            return func(args[0], args[1].replace("torch.cuda.", "torch."), *args[2:], **kwargs)
        if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:  # the number of a GPU
            args = (args[0], _CPU, *args[2:])
        args = tuple(map(_cpu_for_cuda, args))
        if "device" in kwargs:
            device = kwargs["device"]
            kwargs = {**kwargs, "device": _CPU if type(device) is int else _cpu_for_cuda(device)}
        return func(*args, **kwargs)


class _Event:
    """torch.cuda.Event, of work that is done when it is called."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._recorded = time.perf_counter()

    def record(self, *_: Any) -> None:
        self._recorded = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        """Return the milliseconds from this event to ``end``."""
        return 1e3 * (end._recorded - self._recorded)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def wait(self, *_: Any) -> None:
        pass


class _Stream:
    """torch.cuda.Stream, and the context of a stream or a device."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event

    def synchronize(self) -> None:
        pass

    wait_event = wait_stream = _Event.wait


class _GeneratorType(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch._C.Generator)


class _Generator(torch.Generator, metaclass=_GeneratorType):
    """torch.Generator, which the mode does not reach."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, device=_cpu_for_cuda(device))  # type: ignore[call-arg]


def _replacements() -> dict[str, Any]:
    """Return what stands for the names of torch.cuda that raise without a GPU: an object of its own for each.

    The properties of a device are not among them: torch.compile() asks for them, and takes the error for no GPU.
    """
    nothing = ("synchronize", "set_device", "ipc_collect", "reset_peak_memory_stats", "reset_max_memory_allocated")
    streams = ("current_stream", "default_stream", "stream", "device", "Stream")
    types = ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Byte", "Bool")
    return {
        "current_device": lambda: 0,
        "get_device_name": lambda *_: "CPU",
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "memory_summary": lambda *_, **__: "",
        "mem_get_info": lambda *_: (machine.free_memory(), machine.total_memory()),
        "Event": _Event,
        **{name: _no_operation() for name in nothing},
        **{name: type(name, (_Stream,), {}) for name in streams},
        **{f"{name}Tensor": getattr(torch, f"{name}Tensor") for name in types},
    }


def _no_operation() -> Callable[..., None]:
    def nothing(*_: Any, **__: Any) -> None:
        pass

    return nothing


@contextlib.contextmanager
def cpu_in_place() -> Iterator[None]:
    """Within, "cuda" is the CPU, in this thread and in those that begin. Other processes are left as they are."""
    load, set_default_device, run = torch.load, torch.set_default_device, threading.Thread.run

    def load_on_cpu(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(map_location, dict):
            map_location = {name: _cpu_for_cuda(device) for name, device in map_location.items()}
        return load(f, "cpu" if map_location is None else _cpu_for_cuda(map_location), *args, **kwargs)

    def run_in_mode(thread: threading.Thread) -> None:
        with _CpuForCuda():
            run(thread)

    replaced: list[tuple[Any, str, Any]] = [(torch.cuda, name, value) for name, value in _replacements().items()]
    replaced += [(torch.cuda.nvtx, name, _no_operation()) for name in ("range_push", "range_pop", "mark")]
    replaced += [
        (torch, "load", load_on_cpu),
        (torch, "set_default_device", lambda device: set_default_device(_cpu_for_cuda(device))),
        (torch, "Generator", _Generator),
        (threading.Thread, "run", run_in_mode),
    ]
    before = [(place, name, getattr(place, name)) for place, name, _ in replaced]
    for place, name, value in replaced:
        setattr(place, name, value)
    try:
        with _CpuForCuda():
            yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)
