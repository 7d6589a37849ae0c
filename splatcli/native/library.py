"""Loading a native library: the right one for this processor, checked before its first use."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from pathlib import Path
from typing import Any

from splatcli.errors import ResourceError, UsageError
from splatcli.native import abi
from splatcli.native.build import cpu_library

#: Flags of /proc/cpuinfo that each x86 build needs.
_NEEDED = {
    "avx512": {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512cd"},
    "avx2": {"avx2", "fma"},
}


#: An environment variable that names the CPU library's instruction set, a key of build.ISA_FLAGS.
ISA_VARIABLE = "SPLATCLI_CPU_ISA"

#: Instruction sets whose libraries round alike: those with fused multiply-add, and the portable one.
_ROUNDING = {"avx512": "fused", "avx2": "fused", "portable": "portable"}


def chosen_isa() -> str:
    """The instruction set of the CPU library: the one that SPLATCLI_CPU_ISA names, else the best of this processor.

    Raises UsageError when the variable names no instruction set.
    """
    asked = os.environ.get(ISA_VARIABLE)
    if not asked:
        return best_isa()
    if asked not in abi.ISAS:
        raise UsageError(
            f"{ISA_VARIABLE}={asked!r} names no instruction set", remedy=f"set it to {', '.join(reversed(abi.ISAS))}"
        )
    return asked


def same_rounding(isa: str, other: str) -> bool:
    """Whether the libraries for two instruction sets give the same bits."""
    return _ROUNDING.get(isa, isa) == _ROUNDING.get(other, other)


def best_isa() -> str:
    """The best instruction set that this processor is known to run; "portable" where nothing is known."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return "portable"
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return "portable"
    for line in text.splitlines():
        if line.startswith("flags"):
            flags = set(line.split(":", 1)[1].split())
            return next((isa for isa, needed in _NEEDED.items() if needed <= flags), "portable")
    return "portable"


@functools.cache
def load_cpu(isa: str) -> ctypes.CDLL:
    """The CPU library for ``isa``, with the signatures of splat.h set.

    Raises ResourceError when it cannot be built or loaded, speaks another version of the ABI, or was built for an
    instruction set that this processor lacks.
    """
    if abi.ISAS.index(isa) > abi.ISAS.index(best_isa()):
        raise ResourceError(f"this processor is not known to run {isa} code", remedy="use the portable build")
    path = cpu_library(isa)
    library = _load(path)
    if abi.ISAS.index(isa) > library.splat_best_isa():
        raise ResourceError(f"this processor does not run {isa} code", where=path, remedy="use the portable build")
    return library


@functools.cache
def load_cuda(ordinal: int) -> ctypes.CDLL:
    """The CUDA library for GPU number ``ordinal``.

    Raises ResourceError when there is neither a ready-made library nor a working nvcc, when it cannot be loaded, or
    when the driver is too old for it.
    """
    import torch

    from splatcli.native.build_cuda import cuda_library

    return _load(cuda_library(torch.cuda.get_device_capability(ordinal)))


@functools.cache
def load_simt() -> ctypes.CDLL:
    """The CUDA kernels under the emulator; for tests."""
    from splatcli.native.build_simt import simt_library

    return _load(simt_library())


def _load(path: Path) -> ctypes.CDLL:
    """The library at ``path`` with the signatures of splat.h set. Raises ResourceError."""
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
