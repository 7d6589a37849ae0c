"""Corrections: what of each training view is trained along with the Gaussians, its pose and its exposure.

They are some numbers a view, kept on the CPU in double precision: a GPU gets the values with a step and gives back
gradients, which are learnt from when the step's loss is known. So nothing waits, and a step that an engine had to do
twice is learnt from once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from splatcli.checkpoint.schema import VIEW_TABLES
from splatcli.checkpoint.state import Checkpoint
from splatcli.config import Config, ViewsConfig
from splatcli.raster.stepping import Correction
from splatcli.scene.camera import Camera
from splatcli.scene.pose import delta_gradient, moved
from splatcli.train.lr import log_linear
from splatcli.train.targets import to_device

BETA1, BETA2, EPS = 0.9, 0.999, 1e-15


@dataclass(slots=True)
class ViewTable:
    """A row of numbers for each training view, and an Adam for each row: only steps on its view count for it.

    values, exp_avg, exp_avg_sq: [T, ...] float64. steps: [T] int64, updates of each row.
    """

    values: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    steps: Tensor

    @classmethod
    def starting_from(cls, values: Tensor) -> ViewTable:
        """Before the first update of ``values``, which it takes."""
        steps = torch.zeros(len(values), dtype=torch.int64)
        return cls(values, torch.zeros_like(values), torch.zeros_like(values), steps)

    def learn(self, row: int, grad: Tensor, lr: float | Tensor) -> None:
        """One step of Adam on a row; grad, and lr unless it is one for all, shaped as the row."""
        self.steps[row] += 1
        step = int(self.steps[row])
        first, second = self.exp_avg[row], self.exp_avg_sq[row]
        first.lerp_(grad, 1.0 - BETA1)
        second.mul_(BETA2).addcmul_(grad, grad, value=1.0 - BETA2)
        size = (second / (1.0 - BETA2**step)).sqrt() + EPS
        self.values[row] -= lr * (first / (1.0 - BETA1**step)) / size

    def stored(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Its tensors by their names in a checkpoint."""
        yield name, self.values
        yield f"{name}.exp_avg", self.exp_avg
        yield f"{name}.exp_avg_sq", self.exp_avg_sq
        yield f"{name}.steps", self.steps

    @classmethod
    def loaded(cls, name: str, views: dict[str, Tensor]) -> ViewTable:
        parts = ("", ".exp_avg", ".exp_avg_sq", ".steps")
        return cls(*(views[name + part].clone() for part in parts))


@dataclass(slots=True)
class Corrections:
    """The tables of a run; None is what its settings do not train.

    pose: [T, 6] motions of the cameras, see scene/pose.py. exposure: [T, 3, 4], see raster/exposure.py.
    """

    pose: ViewTable | None = None
    exposure: ViewTable | None = None

    @classmethod
    def new(cls, config: ViewsConfig, count: int) -> Corrections:
        """Those of ``count`` training views that change nothing yet."""
        pose = torch.zeros(count, *VIEW_TABLES["pose"], dtype=torch.float64)
        exposure = torch.eye(*VIEW_TABLES["exposure"], dtype=torch.float64).repeat(count, 1, 1)
        return cls(
            ViewTable.starting_from(pose) if config.pose_opt else None,
            ViewTable.starting_from(exposure) if config.exposure else None,
        )

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Corrections:
        """Those that were stored, sharing no tensor with ``checkpoint``."""
        views = checkpoint.views
        return cls(*(ViewTable.loaded(name, views) if name in views else None for name in ("pose", "exposure")))

    def stored(self) -> dict[str, Tensor]:
        """The tensors of all tables by their names in a checkpoint, shared with them."""
        tables = (("pose", self.pose), ("exposure", self.exposure))
        return {key: tensor for name, table in tables if table is not None for key, tensor in table.stored(name)}

    def camera(self, row: int, given: Camera) -> Camera:
        """The camera of training view ``row`` as far as it is refined; ``given`` is the scene's."""
        return given if self.pose is None else moved(given, self.pose.values[row].numpy())

    def shown(self, row: int, image: Tensor) -> Tensor:
        """What training view ``row`` makes of a rendered image [H, W, 3]."""
        if self.exposure is None:
            return image
        exposure = to_device(self.exposure.values[row].to(image.dtype), image.device)
        return image @ exposure[:, :3].T + exposure[:, 3]

    def of(
        self, row: int, given: Camera, config: Config, extent: float, step: int, device: torch.device
    ) -> Correction | None:
        """What step number ``step`` on training view ``row`` is asked for; None where nothing is trained.

        extent: of the scene, world units. device: the Gaussians'.
        """
        if self.pose is None and self.exposure is None:
            return None

        def learn(v_viewmat: Tensor | None, v_exposure: Tensor | None) -> None:
            if v_viewmat is not None:
                self._learn_pose(row, given, v_viewmat, config, extent, step)
            if v_exposure is not None:
                self._learn_exposure(row, v_exposure, config, step)

        exposure = None
        if self.exposure is not None:
            exposure = to_device(self.exposure.values[row].float(), device)
        return Correction(learn, self.pose is not None, exposure)

    def _learn_pose(self, row: int, given: Camera, v_viewmat: Tensor, config: Config, extent: float, step: int) -> None:
        assert self.pose is not None
        views = config.views
        delta = self.pose.values[row]
        grad = torch.from_numpy(delta_gradient(given, delta.numpy(), v_viewmat.double().numpy()))
        rate = _rate(views.pose_lr, views.pose_lr_final, config, step)
        lr = torch.tensor([rate] * 3 + [rate * extent] * 3, dtype=torch.float64)
        self.pose.learn(row, grad + views.pose_reg * delta, lr)

    def _learn_exposure(self, row: int, v_exposure: Tensor, config: Config, step: int) -> None:
        assert self.exposure is not None
        views = config.views
        rate = _rate(views.exposure_lr, views.exposure_lr_final, config, step)
        self.exposure.learn(row, v_exposure.double(), rate)


def _rate(first: float, last: float, config: Config, step: int) -> float:
    """The learning rate at ``step``, one for each visit of a view."""
    return log_linear(first, last, step / config.schedule.lr_steps)
