"""Corrections: what of each training view is trained along with the Gaussians, its pose and its colours.

They are some numbers a view, or thousands in a bilateral grid, kept on the CPU: a GPU gets the values with a step and
gives back gradients, which are learnt from when the step's loss is known. So nothing waits, and a step that an engine
had to do twice is learnt from once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from splatcli.checkpoint.schema import VIEW_DTYPES, VIEW_TABLES
from splatcli.checkpoint.state import Checkpoint
from splatcli.config import Config, ViewsConfig
from splatcli.rasterizer.bilateral_grid import identity_grid, variation_gradient
from splatcli.rasterizer.exposure import recolour
from splatcli.rasterizer.step_inputs import ViewParams
from splatcli.reproducible import sqrt
from splatcli.scene.camera import Camera, delta_gradient, moved
from splatcli.train.schedule import log_linear
from splatcli.train.training_images import to_device

BETA1, BETA2, EPS = 0.9, 0.999, 1e-15


@dataclass(slots=True)
class ViewTable:
    """A row of numbers for each training view, and an Adam for each row: only steps on its view count for it.

    values, exp_avg, exp_avg_sq: [T, ...] of the dtype in VIEW_DTYPES. steps: [T] int64, updates of each row.
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

    def apply_grad(self, row: int, grad: Tensor, lr: float | Tensor) -> None:
        """One step of Adam on a row; grad, and lr unless it is one for all, shaped as the row."""
        self.steps[row] += 1
        step = int(self.steps[row])
        first, second = self.exp_avg[row], self.exp_avg_sq[row]
        # Single operations: a fused one rounds otherwise on another instruction set.
        first.mul_(BETA1).add_(grad * (1.0 - BETA1))
        second.mul_(BETA2).add_(grad * grad * (1.0 - BETA2))
        size = sqrt(second / (1.0 - BETA2**step)) + EPS
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
class PerViewParams:
    """The tables of a run; None is what its settings do not train.

    pose: [T, 6] motions of the cameras, see scene/camera.py. exposure: [T, 3, 4], see rasterizer/exposure.py.
    bilateral_grid: [T, 12, L, Y, X], see rasterizer/bilateral_grid.py; not with an exposure.
    """

    pose: ViewTable | None = None
    exposure: ViewTable | None = None
    bilateral_grid: ViewTable | None = None

    @classmethod
    def new(cls, config: ViewsConfig, count: int) -> PerViewParams:
        """Those of ``count`` training views that change nothing yet."""
        first = {
            "pose": torch.zeros(VIEW_TABLES["pose"]),
            "exposure": torch.eye(*VIEW_TABLES["exposure"]),
            "bilateral_grid": identity_grid(*VIEW_TABLES["bilateral_grid"][1:]),
        }
        wanted = {"pose": config.pose_opt, "exposure": config.exposure, "bilateral_grid": config.bilateral_grid}

        def table(name: str) -> ViewTable:
            row = first[name].to(VIEW_DTYPES[name])
            return ViewTable.starting_from(row.repeat(count, *[1] * row.dim()))

        return cls(**{name: table(name) for name in VIEW_TABLES if wanted[name]})

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> PerViewParams:
        """Those that were stored, sharing no tensor with ``checkpoint``."""
        views = checkpoint.views
        return cls(**{name: ViewTable.loaded(name, views) for name in VIEW_TABLES if name in views})

    def stored(self) -> dict[str, Tensor]:
        """The tensors of all tables by their names in a checkpoint, shared with them."""
        tables = ((name, getattr(self, name)) for name in VIEW_TABLES)
        return {key: tensor for name, table in tables if table is not None for key, tensor in table.stored(name)}

    def camera(self, row: int, given: Camera) -> Camera:
        """The camera of training view ``row`` as far as it is refined; ``given`` is the scene's."""
        return given if self.pose is None else moved(given, self.pose.values[row].numpy())

    def shown(self, row: int, image: Tensor) -> Tensor:
        """What training view ``row`` makes of a rendered image [H, W, 3]."""
        table = self._colours()
        if table is None:
            return image
        colours = to_device(table.values[row].to(image.dtype), image.device)
        return recolour(image.contiguous(), colours, torch.empty_like(image))

    def of(
        self, row: int, given: Camera, config: Config, extent: float, step: int, device: torch.device
    ) -> ViewParams | None:
        """What step number ``step`` on training view ``row`` is asked for; None where nothing is trained.

        extent: of the scene, world units. device: the Gaussians'.
        """
        table = self._colours()
        if self.pose is None and table is None:
            return None

        def apply_grad(v_viewmat: Tensor | None, v_colours: Tensor | None) -> None:
            if v_viewmat is not None:
                self._learn_pose(row, given, v_viewmat, config, extent, step)
            if v_colours is not None:
                self._learn_colours(row, v_colours, config, step)

        # A grid is copied, for it is learnt from while its step may still be on its way.
        colours = None if table is None else to_device(table.values[row].to(torch.float32, copy=True), device)
        as_grid = self.bilateral_grid is not None
        return ViewParams(apply_grad, self.pose is not None, None if as_grid else colours, colours if as_grid else None)

    def _colours(self) -> ViewTable | None:
        """The table of what is done to colours; there is at most one."""
        return self.exposure if self.bilateral_grid is None else self.bilateral_grid

    def _learn_pose(self, row: int, given: Camera, v_viewmat: Tensor, config: Config, extent: float, step: int) -> None:
        assert self.pose is not None
        views = config.views
        delta = self.pose.values[row]
        grad = torch.from_numpy(delta_gradient(given, delta.numpy(), v_viewmat.double().numpy()))
        rate = _rate(views.pose_lr, views.pose_lr_final, config, step)
        lr = torch.tensor([rate] * 3 + [rate * extent] * 3, dtype=torch.float64)
        self.pose.apply_grad(row, grad + views.pose_reg * delta, lr)

    def _learn_colours(self, row: int, v_colours: Tensor, config: Config, step: int) -> None:
        views = config.views
        if self.bilateral_grid is not None:
            rate = _rate(views.bilateral_grid_lr, views.bilateral_grid_lr_final, config, step)
            smooth = views.bilateral_grid_tv * variation_gradient(self.bilateral_grid.values[row])
            self.bilateral_grid.apply_grad(row, v_colours.float() + smooth, rate)
        if self.exposure is not None:
            rate = _rate(views.exposure_lr, views.exposure_lr_final, config, step)
            self.exposure.apply_grad(row, v_colours.double(), rate)


def _rate(first: float, last: float, config: Config, step: int) -> float:
    """The learning rate at ``step``, one for each visit of a view."""
    return log_linear(first, last, step / config.schedule.lr_steps)
