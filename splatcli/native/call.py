"""THE boundary: the only place where tensors turn into pointers and native code is called.

Everything is checked here: device, dtype, layout, shape. The native side trusts what it gets.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from splatcli.errors import ResourceError
from splatcli.gaussians import Gaussians
from splatcli.native import abi
from splatcli.native.library import best_isa, load_cpu

_DTYPES = {torch.float32: abi.FLOAT32, torch.float64: abi.FLOAT64}


def default_threads() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return max(1, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class Backend:
    """A loaded library and how to call it.

    threads: CPU threads; results do not depend on it.
    """

    library: ctypes.CDLL
    dtype: torch.dtype
    threads: int

    @classmethod
    def cpu(cls, dtype: torch.dtype = torch.float32, *, isa: str | None = None, threads: int | None = None) -> Backend:
        """The CPU library: float32 at full speed, float64 in the portable build (for gradient checks).

        isa: a key of native.build.ISA_FLAGS; by default the best for this processor.
        Raises NoCompilerError, ResourceError when it cannot be built or loaded, TypeError for another dtype.
        """
        if dtype not in _DTYPES:
            raise TypeError(f"the rasterizer computes in float32 or float64, not {dtype}")
        if dtype == torch.float64:
            isa = "portable"
        return cls(load_cpu(isa or best_isa()), dtype, threads or default_threads())

    def call(self, name: str, *arguments: Any) -> int:
        """Runs ``splat_<name>`` with this backend's SplatCall in front; its result, or ResourceError with its words."""
        header = abi.Call(device=0, stream=None, dtype=_DTYPES[self.dtype], threads=self.threads)
        result: int = getattr(self.library, f"splat_{name}")(header, *arguments)
        if result < 0:
            message = (self.library.splat_last_error() or b"").decode(errors="replace")
            raise ResourceError(f"the rasterizer refused: {message}")
        return result

    def pointer(self, tensor: Tensor, *shape: int, dtype: torch.dtype | None = None) -> int:
        """The address of a contiguous CPU tensor of the given shape.

        dtype: by default the backend's.
        Raises TypeError for another device, dtype or layout, ValueError for another shape.
        """
        wanted = self.dtype if dtype is None else dtype
        if tensor.device.type != "cpu":
            raise TypeError(f"the CPU rasterizer was given a tensor on {tensor.device}")
        if tensor.dtype != wanted:
            raise TypeError(f"the rasterizer wants {wanted}, was given {tensor.dtype}")
        if not tensor.is_contiguous():
            raise TypeError(f"the rasterizer wants contiguous tensors, was given strides {tensor.stride()}")
        if tensor.shape != shape:
            raise ValueError(f"the rasterizer wants shape {shape}, was given {tuple(tensor.shape)}")
        return tensor.data_ptr()

    def arrays(self, gaussians: Gaussians) -> abi.GaussianArrays:
        """Pointers to raw parameters, or to anything of their shapes."""
        n, rest = len(gaussians), gaussians.shN.shape[1]
        return abi.GaussianArrays(
            n=n,
            sh_rest=rest,
            means=self.pointer(gaussians.means, n, 3),
            quats=self.pointer(gaussians.quats, n, 4),
            log_scales=self.pointer(gaussians.log_scales, n, 3),
            logit_opacities=self.pointer(gaussians.logit_opacities, n),
            sh0=self.pointer(gaussians.sh0, n, 3),
            shN=self.pointer(gaussians.shN, n, rest, 3),
        )
