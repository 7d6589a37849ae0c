"""Two GPUs whose tensors know their device, and lie in the memory of the host: for what Python gets wrong with devices.

    with simulated_gpus() as gpus:
        run(["train", scene, "--device", "cuda:1", ...])
    assert not gpus.faults
    assert len(gpus.waits) < 20

As on real GPUs, tensors of two devices do not mix, and cuda:0 is current unless someone changes that. Kernels are
those of the CPU library, so that results are bit-identical to a run on the CPU. What a real GPU lets pass is recorded:

  waits   each operation for which the host waits for a device, with the line of splatcli that asks for it
  faults  pointers of another device, of the host's pageable memory or of memory that is freed; another stream than the
          current one; copies that claim not to wait and do; pinned memory that the host uses before a device is done

A copy to the host that is not waited for brings its numbers when someone waits for an event behind it; until then there
are NaN and -1. It says nothing of kernels and of time, and work of two streams never overlaps.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import hashlib
import math
import mmap
import os
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from splatcli.native import abi, backend, build

aten = torch.ops.aten
HOST = torch.device("cpu")
COUNT = 2
#: Bytes of address space for pinned memory, of which none is used twice.
PINNED = 1 << 28
PACKAGE = str(Path(backend.__file__).resolve().parents[1])


class Fault(AssertionError):
    """What a real GPU punishes late, or not at all."""


@dataclass(frozen=True)
class Wait:
    """The host waits for a device.

    kind: "read" a number or a size that depends on numbers, "copy" to or from a device, "event", or "synchronize".
    operation: of torch. stack: the lines of splatcli that led there, innermost first.
    idle: whether no kernel of ours is left to do then, so that the device waits for the host next.
    """

    kind: str
    operation: str
    stack: tuple[str, ...]
    idle: bool

    def __str__(self) -> str:
        return f"{self.kind} {self.operation} at {' < '.join(self.stack[:3])}"


class DeviceTensor(Tensor):
    """A tensor that says it is on a GPU; its numbers are those of ``host``."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor, device: torch.device) -> DeviceTensor:
        made = Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=device,
        )
        made.host = host
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _gpus().dispatch(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return _gpus().address_of(self)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
            "memory first."
        )

    __array__ = numpy

    def record_stream(self, stream: Stream) -> None:
        if stream.device != self.device:
            _gpus().fault(f"a tensor of {self.device} was recorded on a stream of {stream.device}")

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({self.host}, device={self.device})"


# --- streams and events ----------------------------------------------------------------------------------------------


class Stream:
    """Work that a device does in its order: so much is enqueued, and so much is known to be done."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        gpus = _gpus()
        self.device = gpus.device(device)
        self.cuda_stream = gpus.new_stream(self)
        self.enqueued = 0
        #: Of what is enqueued, the calls of the native library.
        self.calls = 0
        self.done = 0
        #: Work of other streams that this one's waits for.
        self.after: list[tuple[Stream, int]] = []

    def wait_stream(self, other: Stream) -> None:
        self.after.append((other, other.enqueued))

    def wait_event(self, event: Event) -> None:
        if event.stream is not None:
            self.after.append((event.stream, event.number))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _gpus().waited("synchronize", "Stream.synchronize", self, self.enqueued)


class Event:
    """A place in a stream, which an event has from its first record() on, and with it a device."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream: Stream | None = None
        self.number = self.calls = 0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or _gpus().current_stream()
        if self.stream is not None and self.stream.device != stream.device:
            raise RuntimeError(
                f"Event device {self.stream.device} does not match recording stream's device {stream.device}."
            )
        self.stream, self.number, self.calls = stream, stream.enqueued, stream.calls

    def synchronize(self) -> None:
        if self.stream is not None:
            _gpus().waited("event", "Event.synchronize", self.stream, self.number, self.calls)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or _gpus().current_stream()).wait_event(self)

    def query(self) -> bool:
        return self.stream is None or self.stream.done >= self.number

    def elapsed_time(self, end: Event) -> float:
        return 1.0


@dataclass(frozen=True)
class _Copy:
    """A copy that is enqueued: at which place of a stream, from and to which memory of the host, and its numbers."""

    stream: Stream
    number: int
    source: Tensor | None
    target: Tensor | None
    values: Tensor


# --- the simulation --------------------------------------------------------------------------------------------------

#: Operations that copy, in which devices may differ.
_TO_COPY, _COPY = aten._to_copy.default, aten.copy_.default
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
#: Beside pointwise operations, those that take a number of the host, a tensor without dimensions.
_FILLS = {aten.fill.Tensor, aten.fill_.Tensor, aten.index_fill.int_Tensor, aten.index_fill_.int_Tensor}
#: Their results have sizes, or are numbers, that depend on numbers.
_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@dataclass(eq=False)
class Gpus:
    """The simulated GPUs, and what was seen of them."""

    waits: list[Wait] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    #: What each device has done: operations of torch, and calls of the native library.
    operations: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._guard = ctypes.CDLL(str(guard_library()))
        self._arena = mmap.mmap(-1, PINNED, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes = torch.frombuffer(self._arena, dtype=torch.uint8)
        #: Where pinned tensors begin in it, and how much they take.
        self._blocks: list[int] = []
        self._used = 0
        #: Of pinned memory from one address up to another, until when a device may use it.
        self._busy: dict[tuple[int, int], tuple[Stream, int]] = {}
        self._copies: list[_Copy] = []
        #: Of each address that was asked for its device, and the memory that it lies in.
        self._addresses: dict[int, tuple[torch.device, weakref.ref[Any]]] = {}
        self._streams: dict[int, Stream] = {}
        self._current: list[Stream] = []
        self._is_unseen = False

    def start(self) -> None:
        self._guard.install()
        self._guard.set_device(0)
        self._current = [Stream(torch.device("cuda", index)) for index in range(COUNT)]

    def end(self) -> None:
        self._guard.uninstall()

    # Devices and streams.

    def device(self, device: Any = None) -> torch.device:
        """Return the GPU that ``device`` names; the current one by default."""
        if isinstance(device, int):
            device = torch.device("cuda", device)
        named = torch.device("cuda" if device is None else device)
        index = self._guard.get_device() if named.index is None else named.index
        if not 0 <= index < COUNT:
            raise RuntimeError("CUDA error: invalid device ordinal")
        return torch.device("cuda", index)

    def set_device(self, device: Any) -> None:
        self._guard.set_device(self.device(device).index)

    @contextlib.contextmanager
    def with_device(self, device: Any) -> Iterator[None]:
        before = self.device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    def new_stream(self, stream: Stream) -> int:
        """Return the handle of a new stream; none is the default stream's, which is 0."""
        handle = 0x1000 * (1 + stream.device.index) + len(self._streams)
        self._streams[handle] = stream
        return handle

    def current_stream(self, device: Any = None) -> Stream:
        return self._current[self.device(device).index]

    @contextlib.contextmanager
    def with_stream(self, stream: Stream) -> Iterator[None]:
        before, self._current[stream.device.index] = self._current[stream.device.index], stream
        try:
            with self.with_device(stream.device):
                yield
        finally:
            self._current[stream.device.index] = before

    def synchronize(self, device: Any = None) -> None:
        for stream in [each for each in self._streams.values() if each.device == self.device(device)]:
            self.waited("synchronize", "torch.cuda.synchronize", stream, stream.enqueued)

    # What is seen.

    def fault(self, what: str) -> None:
        self.faults.append(f"{what} at {' < '.join(_stack()[:3])}")
        raise Fault(self.faults[-1])

    def waited(self, kind: str, operation: str, stream: Stream, number: int, calls: int | None = None) -> None:
        """The host has waited for the work of ``stream`` up to ``number``, with so many calls of the native library."""
        self.waits.append(Wait(kind, operation, _stack(), calls is None or calls == stream.calls))
        self._finish(stream, number)

    @contextlib.contextmanager
    def _unseen(self) -> Iterator[None]:
        """Operations inside are the simulation's own."""
        before, self._is_unseen = self._is_unseen, True
        try:
            yield
        finally:
            self._is_unseen = before

    def _finish(self, stream: Stream, number: int) -> None:
        stream.done = max(stream.done, number)
        while stream.after:
            self._finish(*stream.after.pop())
        self._busy = {place: use for place, use in self._busy.items() if use[0].done < use[1]}
        arrived = [copy for copy in self._copies if copy.number <= copy.stream.done]
        self._copies = [copy for copy in self._copies if copy.number > copy.stream.done]
        for copy in arrived:
            if copy.target is not None:
                with self._unseen():
                    copy.target.copy_(copy.values)
            if copy.source is not None and not _same_bits(copy.source, copy.values):
                self.fault("pinned memory was changed before its copy to a GPU was done")

    # Memory.

    def pinned(self, like: Tensor, values: Tensor | None = None) -> Tensor:
        """Return new pinned memory for the shape of ``like``, with ``values``."""
        start = -(-self._used // 64) * 64
        end = start + like.numel() * like.dtype.itemsize
        if end > PINNED:
            raise RuntimeError("CUDA error: out of memory")
        self._blocks.append(start)
        self._used = end
        made = self._bytes[start:end].view(like.dtype).view(like.shape)
        return made if values is None else made.copy_(values)

    def _block(self, address: int) -> tuple[int, int] | None:
        """Return the addresses of the pinned tensor in which this one lies; None where it is not pinned."""
        base = self._bytes.data_ptr()
        if not base <= address < base + self._used:
            return None
        place = bisect.bisect_right(self._blocks, address - base)
        end = self._blocks[place] if place < len(self._blocks) else self._used
        return base + self._blocks[place - 1], base + end

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.numel() > 0 and tensor.device == HOST and self._block(tensor.data_ptr()) is not None

    def check_idle(self, func: Any, tensors: Iterable[Tensor]) -> None:
        """The host is about to use memory that may be pinned."""
        for tensor in tensors:
            if not self.is_pinned(tensor):
                continue
            begin, end = _extent(tensor)
            for (first, last), (stream, number) in self._busy.items():
                if begin < last and first < end and stream.done < number:
                    self.fault(f"{func} of the host uses pinned memory before {stream.device} is done with it")

    def address_of(self, tensor: DeviceTensor) -> int:
        address = tensor.host.data_ptr()
        if address:
            self._addresses[address] = (tensor.device, weakref.ref(tensor.host.untyped_storage()))
        return address

    def check_pointer(self, name: str, address: int, stream: Stream) -> None:
        """Check that kernels on ``stream`` can use what ``name`` points to."""
        if self._block(address) is not None:
            if not name.endswith(": shN"):
                self.fault(f"{name} points to pinned memory of the host")
            block = self._block(address)
            assert block is not None
            self._busy[block] = (stream, stream.enqueued)
            # It may be written to after the copies from it that are enqueued.
            self._copies = [copy for copy in self._copies if copy.source is None or not _within(copy.source, block)]
            return
        device, memory = self._addresses.get(address, (HOST, None))
        if device != stream.device:
            self.fault(f"{name} points to memory of {device}, the call is for {stream.device}")
        if memory is not None and memory() is None:
            self.fault(f"{name} points to memory that is freed")

    # Operations.

    def _enqueue(self, device: torch.device) -> None:
        self.operations[str(device)] += 1
        self.current_stream(device).enqueued += 1

    def dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Do an operation of torch."""
        if self._is_unseen:
            return func(*args, **kwargs)
        leaves = _tensors(args) + _tensors(kwargs.values())
        ours = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
        named = None if kwargs.get("device") is None else torch.device(kwargs["device"])
        if named is not None and named.type == "cuda":
            named = self.device(named)
        if func is aten.is_pinned.default:
            return self.is_pinned(args[0])
        if func is aten._pin_memory.default:
            if ours:
                raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
            return self.pinned(args[0], args[0])
        if not ours and (named is None or named.type != "cuda"):
            if not func.is_view:
                self.check_idle(func, leaves)
            if kwargs.pop("pin_memory", None):
                made = func(*args, **kwargs)
                return self.pinned(made, made)
            return func(*args, **kwargs)
        if func is _TO_COPY:
            return self._to_copy(args[0], named or args[0].device, kwargs)
        if func is _COPY:
            return self._copy(*args, **kwargs)
        device = self._device_of(func, args, kwargs, leaves, ours, named)
        if device.type == "cuda":
            self._enqueue(device)
        pins = kwargs.pop("pin_memory", False)
        if "device" in kwargs:
            kwargs["device"] = HOST
        result = _compute(func, _on_host(args), {name: _on_host(value) for name, value in kwargs.items()})
        if named is not None and named.type == "cpu":
            return self.pinned(result, result) if pins else result
        return self._wrapped(result, device, ours)

    def _wrapped(self, result: Any, device: torch.device, ours: list[DeviceTensor]) -> Any:
        """Return the tensors of a result as those of ``device``; an argument that was written to as it is."""
        if isinstance(result, (list, tuple)):
            return type(result)(self._wrapped(part, device, ours) for part in result)
        if not isinstance(result, Tensor):
            return result
        same = [tensor for tensor in ours if tensor.host is result]
        return same[0] if same else DeviceTensor(result, device)

    def _device_of(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        leaves: list[Tensor],
        ours: list[DeviceTensor],
        named: torch.device | None,
    ) -> torch.device:
        """Return the device of an operation, and log the wait for it. Raises RuntimeError where devices are mixed."""
        if not ours:
            assert named is not None
            return named
        device = ours[0].device
        others = [tensor.device for tensor in ours if tensor.device != device]
        guests = [leaf for leaf in leaves if not isinstance(leaf, DeviceTensor)]
        copied: list[Tensor] = []
        if func in _INDEXED:
            into, indices, *values = args
            if not isinstance(into, DeviceTensor):
                raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
            copied = [index for index in indices if index is not None and not isinstance(index, DeviceTensor)]
            masks = [index for index in indices if index is not None and index.dtype in (torch.bool, torch.uint8)]
            fills = values and values[0].numel() == 1 and values[0].device == HOST and len(masks) == len(indices) == 1
            if not fills:  # a mask and a number are masked_fill_()
                copied += [value for value in values[:1] if value.device == HOST and value.dim() == 0]
                if masks:
                    self._read(func, device)
            allowed = {id(tensor) for tensor in [*copied, *(values[:1] if fills else [])]}
            guests = [guest for guest in guests if id(guest) not in allowed]
        elif guests and (torch.Tag.pointwise in func.tags or func in _FILLS):
            written = _written(func, args, kwargs)
            guests = [guest for guest in guests if guest.dim() or id(guest) in written]
        if others := [*others, *(guest.device for guest in guests)]:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {device} and "
                f"{others[0]}! ({func})"
            )
        for tensor in copied:
            self._transfer(tensor, device, False, str(func))
        if func not in _INDEXED and _reads(func) and not _size_is_given(func, kwargs):
            self._read(func, device)
        return device

    def _read(self, func: Any, device: torch.device) -> None:
        stream = self.current_stream(device)
        self.waited("read", str(func), stream, stream.enqueued)

    def _transfer(self, host: Tensor, device: torch.device, non_blocking: bool, operation: str) -> None:
        """Copy from or to tensor ``host``; the host waits unless it is pinned and the copy is non-blocking."""
        if host.numel() == 0:
            return
        stream = self.current_stream(device)
        if non_blocking and not self.is_pinned(host):
            self.fault(f"{operation} claims not to wait, with pageable memory of the host")
        if not non_blocking:
            self.waited("copy", operation, stream, stream.enqueued)

    def _to_copy(self, source: Tensor, target: torch.device, kwargs: dict[str, Any]) -> Tensor:
        settings = {key: kwargs[key] for key in ("dtype", "layout", "memory_format") if key in kwargs}
        non_blocking = bool(kwargs.get("non_blocking"))
        places = [device for device in (source.device, target) if device.type == "cuda"]
        for device in places:
            self._enqueue(device)
        made = _TO_COPY(_host(source), **settings)
        if target == HOST:
            if non_blocking:  # torch pins the target then
                return self._enqueue_to_host(self.pinned(made), made, places[0])
            self._transfer(made, places[0], False, "to a host tensor")
            return self.pinned(made, made) if kwargs.get("pin_memory") else made
        if source.device == HOST:
            self._transfer(source, target, non_blocking, "to a device tensor")
            if non_blocking:
                self._enqueue_to_device(source, target)
        return DeviceTensor(made, target)

    def _copy(self, into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        places = [tensor.device for tensor in (into, source) if tensor.device != HOST]
        for device in places:
            self._enqueue(device)
        if into.device == HOST:
            self._transfer(into, places[0], non_blocking, "copy_() to the host")
            if non_blocking:
                values = torch.empty_like(into).copy_(_host(source))
                return self._enqueue_to_host(into, values, places[0])
        elif source.device == HOST:
            self._transfer(source, into.device, non_blocking, "copy_() to a device")
            if non_blocking:
                self._enqueue_to_device(source, into.device)
        _host(into).copy_(_host(source))
        return into

    def _enqueue_to_host(self, target: Tensor, values: Tensor, device: torch.device) -> Tensor:
        if target.numel():
            stream = self.current_stream(device)
            target.fill_(math.nan if target.is_floating_point() else True if target.dtype == torch.bool else -1)
            self._busy[_extent(target)] = (stream, stream.enqueued)
            self._copies.append(_Copy(stream, stream.enqueued, None, target, values))
        return target

    def _enqueue_to_device(self, source: Tensor, device: torch.device) -> None:
        if source.numel():
            stream = self.current_stream(device)
            self._copies.append(_Copy(stream, stream.enqueued, source, None, source.clone()))


def _host(tensor: Tensor) -> Tensor:
    return tensor.host if isinstance(tensor, DeviceTensor) else tensor


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among ``values`` and in lists of them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


def _on_host(value: Any) -> Any:
    """Return an argument with the host's tensors in the place of a device's."""
    if isinstance(value, (list, tuple)):
        return type(value)(_on_host(part) for part in value)
    return value.host if isinstance(value, DeviceTensor) else value


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses from the first to behind the last number of a tensor of the host."""
    begin = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.dtype.itemsize


def _within(tensor: Tensor, block: tuple[int, int]) -> bool:
    return block[0] <= tensor.data_ptr() < block[1]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.numpy().tobytes() == other.numpy().tobytes()


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> set[int]:
    """Return the identities of the arguments that an operation writes to."""
    places = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    return {
        id(places[argument.name])
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in places
    }


@functools.cache
def _reads(func: Any) -> bool:
    return bool(_READS & set(func.tags))


def _size_is_given(func: Any, kwargs: dict[str, Any]) -> bool:
    return func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do an operation on the host; its square root rounds as a GPU's, unlike torch's own there."""
    if func is aten.sqrt.default:
        with np.errstate(invalid="ignore"):
            return torch.from_numpy(np.asarray(np.sqrt(args[0].numpy())))
    return func(*args, **kwargs)


def _stack() -> tuple[str, ...]:
    """Return the lines of splatcli that are being run, innermost first."""
    lines, frame = [], sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE):
            lines.append(f"{name.removeprefix(PACKAGE).lstrip('/')}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(lines)


# --- the native library ----------------------------------------------------------------------------------------------


class CudaLibrary:
    """The CUDA library by the CPU's: it checks pointers and streams, and counts in the memory of the device.

    As the real one it keeps to the capacity for tile intersections: a view with more raises the overflow flag, and then
    nothing happens until it is cleared.
    """

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._cpu = backend.load_cpu(backend.chosen_isa())
        self._name = self._cpu._name
        self._call = abi.Call(dtype=abi.FLOAT32, threads=1)

    def splat_last_error(self) -> bytes:
        return bytes(self._cpu.splat_last_error() or b"")

    def _enter(self, name: str, call: abi.Call, *arguments: Any) -> None:
        gpus = self._gpus
        gpus.calls[f"cuda:{call.device}"] += 1
        stream = gpus.current_stream(call.device)
        if call.stream != stream.cuda_stream:
            gpus.fault(f"{name} on stream {call.stream}, the current one of cuda:{call.device} is {stream.cuda_stream}")
        stream.enqueued += 1
        stream.calls += 1
        for argument in arguments:
            for field_name, address in _pointers(argument):
                gpus.check_pointer(f"{name}: {field_name}", address, stream)

    def _flags(self, counters: int | None) -> Any:
        """Return the counters at an address, an array to write to."""
        return (ctypes.c_int64 * abi.COUNTERS).from_address(counters) if counters else [0] * abi.COUNTERS

    def _skips(self, counters: int | None) -> bool:
        return bool(self._flags(counters)[abi.COUNT_OVERFLOW])

    def _frame(self, frame: abi.Frame) -> abi.Frame:
        """Return a frame for the CPU library, with the counts that the device has."""
        copy, counts = abi.Frame.from_buffer_copy(frame), self._flags(frame.counters)
        copy.visible, copy.isects = counts[abi.COUNT_VISIBLE], counts[abi.COUNT_ISECTS]
        return copy

    def splat_project(self, call: abi.Call, view: Any, arrays: Any, frame: abi.Frame, adam: Any) -> int:
        self._enter("project", call, view, arrays, frame, adam)
        if self._skips(frame.counters):
            return 0
        copy = abi.Frame.from_buffer_copy(frame)
        result = self._cpu.splat_project(self._call, view, arrays, copy, adam)
        flags = self._flags(frame.counters)
        flags[abi.COUNT_VISIBLE], flags[abi.COUNT_MAX_ISECTS] = copy.visible, copy.max_isects
        return int(result)

    def splat_tile_row_isects(self, call: abi.Call, view: Any, arrays: Any, frame: abi.Frame, out: int) -> int:
        self._enter("tile_row_isects", call, view, arrays, frame, out)
        return int(self._cpu.splat_tile_row_isects(self._call, view, arrays, self._frame(frame), out))

    def splat_bin_bytes(self, call: abi.Call, view: Any, frame: abi.Frame) -> int:
        return int(self._cpu.splat_bin_bytes(self._call, view, frame))

    def splat_bin(self, call: abi.Call, view: Any, arrays: Any, frame: abi.Frame) -> int:
        self._enter("bin", call, view, arrays, frame)
        if self._skips(frame.counters):
            return 0
        copy, flags = self._frame(frame), self._flags(frame.counters)
        copy.max_isects = max(1, flags[abi.COUNT_MAX_ISECTS])
        # The lists are made beside the device's memory, which may be too small for them.
        lists = {"isect_gaussians": 4, "isect_grad_rows": 4, "isect_masks": 2}
        beside = {name: torch.empty(copy.max_isects * size, dtype=torch.uint8) for name, size in lists.items()}
        copy.workspace_bytes = self._cpu.splat_bin_bytes(self._call, view, copy)
        workspace = torch.empty(copy.workspace_bytes, dtype=torch.uint8)
        copy.workspace = workspace.data_ptr()
        for name, memory in beside.items():
            setattr(copy, name, memory.data_ptr())
        result = self._cpu.splat_bin(self._call, view, arrays, copy)
        flags[abi.COUNT_ISECTS] = copy.isects
        if copy.isects > frame.max_isects:
            flags[abi.COUNT_OVERFLOW] = 1
            return int(result)
        for name, size in lists.items():
            ctypes.memmove(getattr(frame, name), getattr(copy, name), copy.isects * size)
        return int(result)

    def splat_blend(self, call: abi.Call, view: Any, frame: abi.Frame, background: int, out: Any) -> int:
        self._enter("blend", call, view, frame, background, out)
        if self._skips(frame.counters):
            return 0
        return int(self._cpu.splat_blend(self._call, view, self._frame(frame), background, out))

    def splat_blend_vjp(self, call: abi.Call, view: Any, frame: abi.Frame, *arguments: Any) -> int:
        self._enter("blend_vjp", call, view, frame, *arguments)
        if self._skips(frame.counters):
            return 0
        return int(self._cpu.splat_blend_vjp(self._call, view, self._frame(frame), *arguments))

    def splat_sum_isect_grads(self, call: abi.Call, arrays: Any, frame: abi.Frame, sums: int, reached: int) -> int:
        self._enter("sum_isect_grads", call, arrays, frame, sums, reached)
        if self._skips(frame.counters):
            return 0
        return int(self._cpu.splat_sum_isect_grads(self._call, arrays, self._frame(frame), sums, reached))

    def splat_project_vjp(self, call: abi.Call, view: Any, arrays: Any, frame: abi.Frame, out: Any) -> int:
        self._enter("project_vjp", call, view, arrays, frame, out)
        if self._skips(frame.counters):
            return 0
        return int(self._cpu.splat_project_vjp(self._call, view, arrays, self._frame(frame), out))

    def splat_pose_vjp(
        self, call: abi.Call, view: Any, frame: abi.Frame, partials: int, chunks: int, v_viewmat: int
    ) -> int:
        self._enter("pose_vjp", call, view, frame, partials, v_viewmat)
        if self._skips(frame.counters):
            return 0
        return int(self._cpu.splat_pose_vjp(self._call, view, self._frame(frame), partials, chunks, v_viewmat))

    def splat_loss_bytes(self, call: abi.Call, job: abi.Loss) -> int:
        return int(self._cpu.splat_loss_bytes(self._call, job))

    def splat_loss(self, call: abi.Call, job: abi.Loss) -> int:
        self._enter("loss", call, job)
        if self._skips(job.counters):
            return 0
        copy = abi.Loss.from_buffer_copy(job)
        result = self._cpu.splat_loss(self._call, copy)
        if job.means:
            means = (ctypes.c_double * 2).from_address(job.means)
            means[0], means[1] = copy.l1, copy.ssim
        return int(result)

    def splat_adam(self, call: abi.Call, arrays: Any, gradients: Any, adam: Any) -> int:
        self._enter("adam", call, arrays, gradients, adam)
        return int(self._cpu.splat_adam(self._call, arrays, gradients, adam))

    def splat_noise(self, call: abi.Call, arrays: Any, job: abi.Noise) -> int:
        self._enter("noise", call, arrays, job)
        return 0 if self._skips(job.counters) else int(self._cpu.splat_noise(self._call, arrays, job))


def _pointers(argument: Any, name: str = "an argument") -> Iterator[tuple[str, int]]:
    """Yield names and values of the pointers to a device's memory in an argument of an entry."""
    if isinstance(argument, int):
        yield name, argument
    elif isinstance(argument, ctypes.Structure):
        for field_name, kind, *_ in argument._fields_:
            value = getattr(argument, field_name)
            if kind is ctypes.c_void_p:
                if value:
                    yield field_name, value
            elif isinstance(value, ctypes.Structure):
                yield from _pointers(value)
            elif isinstance(value, ctypes._Pointer) and value:
                yield from _pointers(value.contents)


# --- installation ----------------------------------------------------------------------------------------------------

_active: Gpus | None = None


def _gpus() -> Gpus:
    if _active is None:
        raise RuntimeError("a tensor of a simulated GPU is used outside simulated_gpus()")
    return _active


class _Mode(TorchDispatchMode):
    """Sends all operations to the simulation, those that make a tensor of nothing included."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _gpus().dispatch(func, args, dict(kwargs or {}))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which is imported otherwise, for seconds


class _HostReads(TorchFunctionMode):
    """Sees how the host gets at the numbers of its own tensors beside operations."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            _gpus().check_idle(func.__name__, args[:1])
        return func(*args, **(kwargs or {}))


def missing() -> str | None:
    """Return why GPUs cannot be simulated here; None where they can."""
    if torch.cuda.is_available():
        return "there is a real GPU"
    try:
        build.find_compiler()
    except build.NoCompilerError as error:
        return str(error)
    return None


def guard_library() -> Path:
    """Return device_guard.cpp as a library, built now if it is not in the cache."""
    source, root = Path(__file__).with_name("device_guard.cpp"), Path(torch.__file__).parent
    compiler = build.find_compiler()
    recipe = f"{source.read_text()}\0{torch.__version__}\0{root}\0{compiler.command}\0{compiler.version}"
    library = build.cache_root() / f"device-guard-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}.so"
    if not library.is_file():
        made = library.with_suffix(f".{os.getpid()}")
        flags = ["-std=c++20", "-O1", "-shared", "-fPIC", f"-I{root / 'include'}"]
        libraries = [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root / 'lib'}"]
        subprocess.run([compiler.command, *flags, str(source), "-o", str(made), *libraries], check=True)
        os.replace(made, library)
    return library


def _forget_tables() -> None:
    """Clear the caches of splatcli whose keys have a device, since what they keep is a simulated GPU's."""
    modules = [module for name, module in sys.modules.items() if name.startswith("splatcli.")]
    for cached in [value for module in modules for value in vars(module).values() if hasattr(value, "cache_clear")]:
        if "torch.device" in cached.__wrapped__.__annotations__.values():
            cached.cache_clear()


@contextlib.contextmanager
def simulated_gpus() -> Iterator[Gpus]:
    """Inside the block torch and splatcli find two GPUs."""
    global _active
    assert _active is None
    _active = gpus = Gpus()
    library = CudaLibrary(gpus)
    properties = SimpleNamespace(name="simulated", multi_processor_count=1, total_memory=8 << 30, major=8, minor=0)

    def nothing(*_: Any, **__: Any) -> None:
        pass

    def value(result: Any) -> Callable[..., Any]:
        return lambda *_, **__: result

    cuda: dict[str, Any] = {
        "_lazy_init": nothing,
        "is_available": value(True),
        "device_count": value(COUNT),
        "current_device": lambda: gpus.device().index,
        "set_device": gpus.set_device,
        "device": gpus.with_device,
        "current_stream": gpus.current_stream,
        "stream": gpus.with_stream,
        "synchronize": gpus.synchronize,
        "Stream": Stream,
        "Event": Event,
        "is_current_stream_capturing": value(False),
        "empty_cache": nothing,
        "reset_peak_memory_stats": nothing,
        "mem_get_info": value((4 << 30, 8 << 30)),
        "memory_allocated": value(0),
        "max_memory_allocated": value(0),
        "memory_reserved": value(0),
        "get_device_properties": value(properties),
        "get_device_capability": value((8, 0)),
        "get_device_name": value(properties.name),
    }
    before = {name: getattr(torch.cuda, name) for name in cuda}
    load_cuda = backend.load_cuda
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") copies where the mode sees it
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # `data` of a tensor takes no DeviceTensor
    gpus.start()
    try:
        for name, replacement in cuda.items():
            setattr(torch.cuda, name, replacement)
        backend.load_cuda = value(library)  # type: ignore[assignment]
        with _HostReads(), _Mode():
            yield gpus
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
        torch.__future__.set_overwrite_module_params_on_conversion(overwrites)
        backend.load_cuda = load_cuda
        for name, original in before.items():
            setattr(torch.cuda, name, original)
        _forget_tables()
        gpus.end()
        _active = None
