"""Load a native library and call it: the only place where tensors become pointers; and the choice of a device."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from splatcli import machine
from splatcli.errors import DeviceFaultError, LaunchRefusedError, ResourceError, UsageError
from splatcli.gaussians import Gaussians, reachable
from splatcli.native import abi, build
from splatcli.native.build import cpu_library

_log = logging.getLogger(__name__)

#: Flags of /proc/cpuinfo that each x86 build needs.
_NEEDED = {
    "avx512": {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512cd"},
    "avx2": {"avx2", "fma"},
}


#: An environment variable that names the CPU library's instruction set, a key of build.ISA_FLAGS.
ISA_VARIABLE = "SPLATCLI_CPU_ISA"

#: Instruction sets whose libraries round alike: the x86 ones with fused multiply-add. Others are alone.
_ROUNDING = {"avx512": "fused", "avx2": "fused"}


def chosen_isa() -> str:
    """Return the instruction set of the CPU library: that of SPLATCLI_CPU_ISA, else the best of this processor.

    Raises UsageError when the variable names no instruction set.
    """
    asked = os.environ.get(ISA_VARIABLE)
    if not asked:
        return best_isa()
    if asked not in abi.ISAS:
        raise UsageError(
            f"{ISA_VARIABLE}={asked!r} names no instruction set", remedy=f"set it to {', '.join(build.ISA_FLAGS)}"
        )
    return asked


def same_rounding(isa: str, other: str) -> bool:
    """Return whether the libraries for two instruction sets give the same bits."""
    return _ROUNDING.get(isa, isa) == _ROUNDING.get(other, other)


def best_isa() -> str:
    """Return the best instruction set that this processor is known to run; "portable" for an unknown one."""
    if build.machine_name() == "aarch64":
        return "neon"
    if build.machine_name() != "x86_64":
        return "portable"
    flags = _processor_flags()
    return next((isa for isa, needed in _NEEDED.items() if needed <= flags), "portable")


@functools.cache
def _processor_flags() -> frozenset[str]:
    """Return the flags in /proc/cpuinfo, none where it is not there.

    The system makes the file anew for each reader, which takes long with many processors.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("flags"):
                return frozenset(line.split(":", 1)[1].split())
    return frozenset()


@functools.cache
def load_cpu(isa: str) -> ctypes.CDLL:
    """Return the CPU library for ``isa``, with the signatures of splat.h set.

    Raises ResourceError when it cannot be built or loaded, has another version of the ABI, or was built for an
    instruction set that this processor lacks.
    """
    best = list(build.ISA_FLAGS).index(best_isa())
    if isa not in list(build.ISA_FLAGS)[best:]:
        raise ResourceError(f"this processor is not known to run {isa} code", remedy="use the portable build")
    path = cpu_library(isa)
    library = load_library(path)
    if abi.ISAS.index(isa) > library.splat_best_isa():
        raise ResourceError(f"this processor does not run {isa} code", where=path, remedy="use the portable build")
    return library


@functools.cache
def load_cuda(ordinal: int) -> ctypes.CDLL:
    """Return the CUDA library for GPU number ``ordinal``.

    Raises ResourceError when there is neither a ready-made library nor a working nvcc, when it cannot be loaded, or
    when the driver is too old for it.
    """
    from splatcli.native.build_cuda import cuda_library

    return load_library(cuda_library(torch.cuda.get_device_capability(ordinal)))


def load_library(path: Path) -> ctypes.CDLL:
    """Return the library at ``path`` with the signatures of splat.h set. Raises ResourceError."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ResourceError(
            f"the rasterizer library cannot be loaded: {error}",
            where=path,
            remedy=f"delete {path.parent} and run again",
        ) from None
    for name, (result, arguments) in abi.SIGNATURES.items():
        function: Any = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    if library.splat_abi_version() != abi.ABI_VERSION:
        raise ResourceError(
            f"the library speaks ABI {library.splat_abi_version()}, this package {abi.ABI_VERSION}",
            where=path,
            remedy=f"delete {path.parent} and run again",
        )
    return library


_DTYPES = {torch.float32: abi.FLOAT32, torch.float64: abi.FLOAT64}


def address(tensor: Tensor) -> int:
    """Return data_ptr(), or 0 for a fake tensor, so that a whole step can be traced without memory."""
    return 0 if isinstance(tensor, FakeTensor) else tensor.data_ptr()


@functools.lru_cache(maxsize=64)
def _header(ordinal: int, stream: int | None, dtype: torch.dtype, threads: int) -> abi.Call:
    """Return the first argument of an entry, which no library changes."""
    return abi.Call(device=ordinal, stream=stream, dtype=_DTYPES[dtype], threads=threads)


@dataclass(frozen=True, slots=True)
class Backend:
    """A loaded library and the settings of its calls.

    dtype: of all real numbers: float32, or float64 on the CPU.
    threads: CPU threads; results do not depend on it.
    device: of its tensors.
    ordinal: the device's number for the native side.
    stream: the stream to enqueue on; None takes torch's current one of ``device``.
    deferred: calls only enqueue, and counts stay in device memory (see splat.h); else calls are done on return.
    """

    library: ctypes.CDLL
    dtype: torch.dtype
    threads: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    ordinal: int = 0
    stream: int | None = None
    deferred: bool = False

    @classmethod
    def cpu(cls, dtype: torch.dtype = torch.float32, *, isa: str | None = None, threads: int | None = None) -> Backend:
        """Return the CPU library: float32 at full speed, float64 in the portable build (for gradient checks).

        isa: a key of native.build.ISA_FLAGS; by default chosen_isa().
        Raises NoCompilerError, ResourceError when it cannot be built or loaded, TypeError for another dtype.
        """
        if dtype not in _DTYPES:
            raise TypeError(f"the rasterizer computes in float32 or float64, not {dtype}")
        if dtype == torch.float64:
            isa = "portable"
        return cls(load_cpu(isa or chosen_isa()), dtype, threads or machine.cores())

    @classmethod
    def cuda(cls, device: str | torch.device = "cuda") -> Backend:
        """Return the CUDA library on one GPU, float32, on torch's current stream of each call.

        Raises ResourceError when there is no such GPU, or when the library cannot be built or loaded for it.
        """
        device = torch.device(device)
        if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
            raise ResourceError(
                f"there is no {device}: torch sees {torch.cuda.device_count()} GPUs",
                remedy="use --device cpu, or see what splat doctor says",
            )
        try:
            ordinal = torch.cuda.current_device() if device.index is None else device.index
            library = load_cuda(ordinal)
        except RuntimeError as error:  # the driver counts it, and torch cannot start it
            raise ResourceError(
                f"torch cannot use {device}: {(str(error).splitlines() or [''])[0]}",
                remedy="use --device cpu, or see what splat doctor and nvidia-smi say",
            ) from None
        return cls(library, torch.float32, 0, torch.device("cuda", ordinal), ordinal, deferred=True)

    def call(self, name: str, *arguments: Any) -> int:
        """Run ``splat_<name>`` with this backend's SplatCall in front and return its result.

        Raises ResourceError with the library's message; DeviceFaultError where the GPU or its driver has failed,
        LaunchRefusedError where CUDA refuses a launch on a sound GPU.
        """
        stream = self.stream
        if stream is None and self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device).cuda_stream
        header = _header(self.ordinal, stream, self.dtype, self.threads)
        result: int = getattr(self.library, f"splat_{name}")(header, *arguments)
        if result < 0:
            message = (self.library.splat_last_error() or b"").decode(errors="replace")
            if result == abi.DEVICE_FAULT:
                raise DeviceFaultError(f"{self.device} has failed: {message}")
            if result == abi.LAUNCH_REFUSED:
                from splatcli.native.build_cuda import launch_remedy

                raise LaunchRefusedError(
                    f"{self.device} does not run the kernels: {message}",
                    remedy=launch_remedy(message, Path(self.library._name)),
                )
            raise ResourceError(f"the rasterizer refused: {message}")
        return result

    def pointer(self, tensor: Tensor, *shape: int, dtype: torch.dtype | None = None, from_host: bool = False) -> int:
        """Return the address of a contiguous tensor of the given shape on this backend's device.

        dtype: by default the backend's.
        from_host: whether a GPU also accepts pinned memory of the host.
        Raises TypeError for another device, dtype or layout, ValueError for another shape.
        """
        wanted = self.dtype if dtype is None else dtype
        if tensor.device != self.device and not (from_host and reachable(tensor, self.device)):
            raise TypeError(f"the {self.device} rasterizer was given a tensor on {tensor.device}")
        if tensor.dtype != wanted:
            raise TypeError(f"the rasterizer wants {wanted}, was given {tensor.dtype}")
        if not tensor.is_contiguous():
            raise TypeError(f"the rasterizer wants contiguous tensors, was given strides {tensor.stride()}")
        if tensor.shape != shape:
            raise ValueError(f"the rasterizer wants shape {shape}, was given {tuple(tensor.shape)}")
        return address(tensor)

    def arrays(self, gaussians: Gaussians) -> abi.GaussianArrays:
        """Return pointers to raw parameters, or to anything of their shapes."""
        n, shN_count = len(gaussians), gaussians.shN.shape[1]
        return abi.GaussianArrays(
            n=n,
            shN_count=shN_count,
            means=self.pointer(gaussians.means, n, 3),
            quats=self.pointer(gaussians.quats, n, 4),
            log_scales=self.pointer(gaussians.log_scales, n, 3),
            logit_opacities=self.pointer(gaussians.logit_opacities, n),
            sh0=self.pointer(gaussians.sh0, n, 3),
            shN=self.pointer(gaussians.shN, n, shN_count, 3, from_host=True),  # of a run that offloads
        )


def resolve_device(text: str) -> str:
    """Return the device that ``text`` names: for ``auto`` the best one of this machine, for ``cuda`` ``cuda:0``.

    With ``auto``, a GPU whose library cannot be built or loaded is skipped with a warning.
    Raises UsageError for a text that names no device and ResourceError for a device that is missing.
    """
    if text == "cpu":
        return "cpu"
    if text == "auto":
        if not torch.cuda.is_available():
            return "cpu"
        try:
            return str(Backend.cuda("cuda").device)
        except ResourceError as error:
            _log.warning("%s\nThere is a GPU, but it cannot be used; going on with the CPU.", error)
            return "cpu"
    if re.fullmatch(r"cuda(:\d+)?", text):
        return str(Backend.cuda(text).device)
    raise UsageError(f"{text!r} is no device", where="--device", remedy="auto, cpu, cuda or cuda:1")
