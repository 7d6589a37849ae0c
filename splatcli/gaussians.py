"""Gaussians: the raw, pre-activation parameters of a scene, which are their only form.

Nothing in this package holds exp(log_scales), sigmoid(logit_opacities) or normalised quaternions:
rendering activates inside the rasterizer (cuda/math/activation.h) and hands out no activated tensor, so nothing can be
activated twice. Formats that store activated values convert in formats/quantisation.py, on the way into a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

#: The six parameter groups, in the order that every loop over them uses.
GROUPS = ("means", "quats", "log_scales", "logit_opacities", "sh0", "shN")

#: The constant spherical harmonic, 1 / (2 sqrt(pi)): colour = 0.5 + SH_C0 sh0 at degree 0.
SH_C0 = 0.28209479177387814

#: Coefficients that shN has, by SH degree: all but the constant one.
SHN_COUNTS = (0, 3, 8, 15, 24)


@dataclass(slots=True, eq=False, repr=False)
class Gaussians:
    """N Gaussians, all tensors of one dtype on one device: float32 in runs and files, float64 for gradient checks.

    means            [N, 3]    world units, the scene's own frame
    quats            [N, 4]    w x y z, Hamilton, not normalised
    log_scales       [N, 3]    natural logarithm of the standard deviations, world units
    logit_opacities  [N]       logit of the opacity
    sh0              [N, 3]    constant SH coefficient of R G B; colour = 0.5 + 0.2820948 sh0 + ...
    shN              [N, K, 3] the other coefficients, K = 0, 3, 8, 15 or 24 (INRIA's order and signs)

    Raises TypeError for what is no tensor, ValueError for shapes, dtypes or devices that do not fit together.
    Optimisers change the tensors in place. Of Gaussians on a GPU, shN may be in pinned host memory, which kernels
    can read as well (rasterizer/offload.py).
    """

    means: Tensor
    quats: Tensor
    log_scales: Tensor
    logit_opacities: Tensor
    sh0: Tensor
    shN: Tensor

    def __post_init__(self) -> None:
        for name, tensor in self.items():
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name} is a {type(tensor).__name__}, not a torch.Tensor")
        n = self.means.shape[0] if self.means.dim() else 0
        expected = {
            "means": (n, 3),
            "quats": (n, 4),
            "log_scales": (n, 3),
            "logit_opacities": (n,),
            "sh0": (n, 3),
            "shN": (n, self.shN.shape[1] if self.shN.dim() == 3 else -1, 3),
        }
        for name, tensor in self.items():
            if tuple(tensor.shape) != expected[name]:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {expected[name]}")
            if tensor.device != self.means.device and not (name == "shN" and reachable(tensor, self.means.device)):
                raise ValueError(f"{name} is on {tensor.device}, means on {self.means.device}")
            if tensor.dtype != self.means.dtype:
                raise ValueError(f"{name} is {tensor.dtype}, means {self.means.dtype}")
        if self.shN.shape[1] not in SHN_COUNTS:
            raise ValueError(f"shN has {self.shN.shape[1]} coefficients, not one of {SHN_COUNTS}")

    def __len__(self) -> int:
        return self.means.shape[0]

    def __repr__(self) -> str:
        return f"<Gaussians: {len(self):,}, SH degree {self.sh_degree}, {self.means.dtype}, {self.device}>"

    @property
    def device(self) -> torch.device:
        return self.means.device

    @property
    def sh_degree(self) -> int:
        """The SH degree of shN, 0 to 4."""
        return SHN_COUNTS.index(self.shN.shape[1])

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of each group, in the order of GROUPS."""
        for name in GROUPS:
            yield name, getattr(self, name)

    def map(self, fn: Callable[[Tensor], Tensor], shN: Callable[[Tensor], Tensor] | None = None) -> Gaussians:
        """Return new Gaussians with ``fn`` applied to each tensor, ``shN`` to shN where it is given."""
        own = {} if shN is None else {"shN": shN}
        return Gaussians(**{name: own.get(name, fn)(tensor) for name, tensor in self.items()})

    def to(self, device: torch.device | str) -> Gaussians:
        return self.map(lambda t: t.to(device))

    def moved(self, shift: Sequence[float]) -> Gaussians:
        """Return the Gaussians moved by ``shift``, world units; the other tensors are shared."""
        if not any(shift):
            return self
        by = torch.tensor(shift, dtype=torch.float64, device=self.device)
        return replace(self, means=(self.means.detach().double() + by).to(self.means.dtype))

    def detach_clone(self) -> Gaussians:
        return self.map(lambda t: t.detach().clone())


def reachable(tensor: Tensor, device: torch.device) -> bool:
    """Return whether kernels on ``device``, a GPU, can read a host tensor at its address: pinned memory has one address
    for both. Of an empty tensor there is nothing to read, and torch says that it is not pinned."""
    return device.type == "cuda" and tensor.device.type == "cpu" and (tensor.numel() == 0 or tensor.is_pinned())
