"""StepEngine: what the trainer drives, one view a step; engines may run behind and tell losses later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from splatcli.gaussians import Gaussians
from splatcli.raster.adam import AdamState
from splatcli.raster.stats import GrowthStats
from splatcli.scene.camera import Camera


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """One training step on one view.

    target: [H, W, 3] uint8, on the Gaussians' device.
    lrs: learning rate of each group, by its name in GROUPS.
    background: [3].
    stats: is added to, unless None.
    hidden: [H, W] bool, True where a pixel takes no part in the loss; the target must be black there. None: all do.
    """

    camera: Camera
    target: Tensor
    lrs: dict[str, float]
    sh_degree: int
    background: Tensor
    ssim_lambda: float
    antialiased: bool
    stats: GrowthStats | None
    hidden: Tensor | None = None


class StepEngine(Protocol):
    """Moves Gaussians and moments in place, view by view, in the order of the calls."""

    def submit(self, gaussians: Gaussians, adam: AdamState, inputs: StepInputs) -> list[float]:
        """Takes a step on; the losses that are known since the last call, in the order of the steps.

        An engine may run some steps behind. Until drain(), the tensors handed in belong to it.
        """
        ...

    def drain(self) -> list[float]:
        """Finishes every step that was taken on; the losses that were not told yet."""
        ...


class ImmediateEngine:
    """An engine that is done when it returns: only ``step`` is its own."""

    def step(
        self,
        gaussians: Gaussians,
        adam: AdamState,
        camera: Camera,
        target: Tensor,
        *,
        lrs: dict[str, float],
        sh_degree: int,
        background: Tensor,
        ssim_lambda: float,
        antialiased: bool,
        stats: GrowthStats | None,
        hidden: Tensor | None = None,
    ) -> float:
        """One view's loss, after its gradient has moved ``gaussians`` and ``adam``; arguments as in StepInputs."""
        raise NotImplementedError

    def submit(self, gaussians: Gaussians, adam: AdamState, inputs: StepInputs) -> list[float]:
        loss = self.step(
            gaussians,
            adam,
            inputs.camera,
            inputs.target,
            lrs=inputs.lrs,
            sh_degree=inputs.sh_degree,
            background=inputs.background,
            ssim_lambda=inputs.ssim_lambda,
            antialiased=inputs.antialiased,
            stats=inputs.stats,
            hidden=inputs.hidden,
        )
        return [loss]

    def drain(self) -> list[float]:
        return []
