"""StepInputs: the inputs of one step; StepEngine: the interface of engines; DensifyStats: sums over steps.

Engines may enqueue a step and report its loss later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from splatcli.gaussians import Gaussians
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.depth_loss import DepthTarget
from splatcli.scene.camera import Camera


@dataclass(slots=True)
class DensifyStats:
    """Sums over the views since the last refinement.

    grad2d  [N] float32  sum of ||(W/2, H/2) * dL/d mean2d||, mean2d in pixels; with absgrad of the pixels' magnitudes
    count   [N] float32  views in which the Gaussian was visible: its support reached a block of pixels
    weights [N] float32  largest sum of blend weights in a view, of some views as they are now; no sum over steps, made
                         for the refinements that use it (train/densify/contribution.py), else None
    """

    grad2d: Tensor
    count: Tensor
    weights: Tensor | None = None

    def __post_init__(self) -> None:
        if self.grad2d.dim() != 1 or self.grad2d.shape != self.count.shape:
            raise ValueError(f"grad2d is {tuple(self.grad2d.shape)} and count {tuple(self.count.shape)}, not [N] both")

    @classmethod
    def zeros(cls, n: int, device: torch.device | str = "cpu") -> DensifyStats:
        """Return empty statistics for ``n`` Gaussians."""
        grad2d, count = (torch.zeros(n, dtype=torch.float32, device=device) for _ in range(2))
        return cls(grad2d, count)

    def __len__(self) -> int:
        return self.grad2d.shape[0]

    def zero_(self) -> None:
        """Begin anew, in the same memory."""
        self.grad2d.zero_()
        self.count.zero_()

    def mean_grad2d(self) -> Tensor:
        """Return [N] the mean gradient norm over the views that saw the Gaussian; 0 where none did."""
        return self.grad2d / self.count.clamp(min=1.0)


#: Noise fades out around this opacity, by a logistic curve so steep (3DGS-MCMC, gsplat).
NOISE_THRESHOLD = 0.005
NOISE_STEEPNESS = 100.0


@dataclass(frozen=True, slots=True)
class Regularisation:
    """Regularisers and noise beside the image loss (docs/math.md 8.2 and 9); 0 switches one off.

    opacity_reg, scale_reg: weights of mean opacity and of mean standard deviation (world units) in the loss.
    noise: scale of the exploration noise on means, world units for a covariance of 1.
    seed: of that noise; the number of the step varies it.
    """

    opacity_reg: float = 0.0
    scale_reg: float = 0.0
    noise: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class ViewParams:
    """Per-view parameters of a step, which the caller trains.

    apply_grad: receives the gradients (v_viewmat [4, 4] of the camera's matrix, and of colours, shaped as they
        are), each None where it is not requested, on the CPU; once for the step, when its loss is known, in the order
        of the steps. The tensors are the engine's: copy what must stay. A view must not be submitted again before its
        apply_grad is called.
    pose: whether the gradient of the pose is requested.
    colours: on the Gaussians' device, what changes the image's colours before the loss: an exposure, a bilateral grid,
        or PPISP's parameters, see rasterizer/recolour.py. None leaves them as they are.
    """

    apply_grad: Callable[[Tensor | None, Tensor | None], None]
    pose: bool = False
    colours: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Shard:
    """The rows of all Gaussians that one of several processes holds: the ``rank``-th of ``size`` equal parts.

    total: Gaussians of all processes.
    unit: rows that stay together; parts are equal up to as many. Sums over the chunks of a part are those of the whole
        where it is a multiple of abi.CHUNK.
    """

    rank: int
    size: int
    total: int
    unit: int = 1

    @property
    def first(self) -> int:
        """The row of all Gaussians that is the first one here."""
        return self.start(self.rank)

    @property
    def rows(self) -> slice:
        """The rows of this process."""
        return slice(self.first, self.start(self.rank + 1))

    def __len__(self) -> int:
        return self.start(self.rank + 1) - self.first

    def start(self, rank: int) -> int:
        """Return the first row of ``rank``; of ``size``, how many there are."""
        units = -(-self.total // self.unit)
        return min(rank * units // self.size * self.unit, self.total)

    def counts(self) -> list[int]:
        """Return the rows of each process, by rank."""
        return [self.start(rank + 1) - self.start(rank) for rank in range(self.size)]

    def of(self, total: int) -> Shard:
        """Return the part of the same process when there are ``total`` Gaussians."""
        return replace(self, total=total)


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """One training step on one view.

    target: [H, W, 3] uint8, on the Gaussians' device.
    lrs: learning rate of each group, by its name in GROUPS.
    background: [3].
    stats: statistics to add to, or None.
    mask: [H, W] bool, True where a pixel is left out of the loss; the target must be black there. None: all count.
    regularisation: of the Gaussians beside the image loss; the reported loss is without it.
    absgrad: the statistics take each pixel's share of the gradient by its magnitude (AbsGS), docs/math.md 6.3.
    view_params: per-view parameters that are trained; None: none.
    filter_3d: [N] sizes of the Gaussians' 3D filter, see rasterizer/filter_3d.py; None: there is none.
    shard: the part of all Gaussians that this process holds; None: all.
    depth: known depths of the view; their term is part of the reported loss. None: no depth is rendered.
    alpha_lambda, mask_lambda: weights of the alpha term of the loss, in pixels that count and in masked ones, see
        rasterizer/alpha_loss.py; the reported loss is without it.
    """

    camera: Camera
    target: Tensor
    lrs: dict[str, float]
    sh_degree: int
    background: Tensor
    ssim_lambda: float
    antialiased: bool
    stats: DensifyStats | None
    mask: Tensor | None = None
    regularisation: Regularisation = Regularisation()
    absgrad: bool = False
    view_params: ViewParams | None = None
    depth: DepthTarget | None = None
    alpha_lambda: float = 0.0
    mask_lambda: float = 0.0
    filter_3d: Tensor | None = None
    shard: Shard | None = None

    @property
    def has_alpha_term(self) -> bool:
        """Whether the loss has a term of alpha."""
        return self.alpha_lambda > 0.0 or (self.mask_lambda > 0.0 and self.mask is not None)


class StepEngine(Protocol):
    """Updates Gaussians and moments in place, view by view, in the order of the calls.

    isects: upper bound of the tile intersections of the last step whose loss was reported; 0 where none are counted.
    """

    isects: int

    def submit(self, gaussians: Gaussians, adam: AdamState, inputs: StepInputs) -> list[float]:
        """Submit a step; return the losses that are known since the last call, in the order of the steps.

        Some steps may be in flight on return. Until drain(), the engine owns the given tensors.
        """
        ...

    def drain(self) -> list[float]:
        """Finish every submitted step; return the losses that were not reported yet."""
        ...


class SyncEngine:
    """An engine whose steps are done on return; subclasses define ``step``."""

    isects: int = 0

    def step(self, gaussians: Gaussians, adam: AdamState, inputs: StepInputs) -> float:
        """Update ``gaussians`` and ``adam`` in place by one view; return its loss."""
        raise NotImplementedError

    def submit(self, gaussians: Gaussians, adam: AdamState, inputs: StepInputs) -> list[float]:
        return [self.step(gaussians, adam, inputs)]

    def drain(self) -> list[float]:
        return []
