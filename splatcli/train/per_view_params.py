"""PerViewParams: parameters of each training view that are trained with the Gaussians: its pose and its colours.

A view has some numbers, or thousands in a bilateral grid. They are on the CPU: a GPU receives the values with a step
and returns gradients, which are applied when the step's loss is known. So nothing waits, and the gradients of a step
that an engine had to do twice are applied once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from splatcli.checkpoint.schema import CAMERA_TABLES, VIEW_DTYPES, VIEW_TABLES
from splatcli.checkpoint.state import Checkpoint
from splatcli.config import COLOUR_MAPS, Config, ViewsConfig
from splatcli.rasterizer.bilateral_grid import identity_grid, variation_gradient
from splatcli.rasterizer.ppisp import CAMERA_NUMBERS, RESPONSE_NUMBERS, VIEW_NUMBERS, in_unit, prior_gradient
from splatcli.rasterizer.recolour import recolour
from splatcli.rasterizer.step_inputs import ViewParams
from splatcli.reproducible import sqrt, tree_sum
from splatcli.scene.camera import Camera, apply_pose_delta, lens_at_size, lens_rows, pose_delta_vjp
from splatcli.train.schedule import log_linear
from splatcli.train.training_images import to_device

BETA1, BETA2, EPS = 0.9, 0.999, 1e-15

#: Learning rates of PPISP's numbers of a view as parts of that of its exposure: a chromaticity moves less than a stop.
PPISP_RATES = torch.tensor([1.0] + [0.1] * 8, dtype=torch.float64)
#: That of a camera's numbers, which all its views move.
PPISP_CAMERA_RATE = 0.2


@dataclass(slots=True)
class ViewTable:
    """A row of parameters for each training view, and Adam for each row, which counts only the steps on its view.

    values, exp_avg, exp_avg_sq: [T, ...] of the dtype in VIEW_DTYPES. steps: [T] int64, updates of each row.
    """

    values: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    steps: Tensor

    @classmethod
    def starting_from(cls, values: Tensor) -> ViewTable:
        """Return the table before the first update of ``values``; it keeps this tensor."""
        steps = torch.zeros(len(values), dtype=torch.int64)
        return cls(values, torch.zeros_like(values), torch.zeros_like(values), steps)

    def apply_grad(self, row: int, grad: Tensor, lr: float | Tensor, *, shared: bool = False) -> None:
        """Do one step of Adam on a row. grad, and lr unless it is one number, have the row's shape.

        shared: the gradient is divided by the root of the mean second moment of all rows that were updated, [T, P], so
        that a row moves as far as its gradient is larger than that of the others.
        """
        self.steps[row] += 1
        step = int(self.steps[row])
        first, second = self.exp_avg[row], self.exp_avg_sq[row]
        # Single operations: fused ones round differently on another instruction set.
        first.mul_(BETA1).add_(grad * (1.0 - BETA1))
        second.mul_(BETA2).add_(grad * grad * (1.0 - BETA2))
        moment = self._mean_second_moment() if shared else second / (1.0 - BETA2**step)
        size = sqrt(moment) + EPS
        self.values[row] -= lr * (first / (1.0 - BETA1**step)) / size

    def _mean_second_moment(self) -> Tensor:
        """Return [P], the mean over the rows that were updated of their second moments, each without its bias."""
        updated = self.steps > 0
        # Few counts differ. The power is Python's, whose bits are the same on every machine.
        counts, row = self.steps[updated].unique(return_inverse=True)  # type: ignore[no-untyped-call]
        corrections = torch.tensor([1.0 - BETA2**count for count in counts.tolist()], dtype=torch.float64)
        moments = self.exp_avg_sq[updated] / corrections[row, None]
        return tree_sum(moments.T.contiguous()) / len(moments)

    def stored(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield its tensors with their names in a checkpoint."""
        yield name, self.values
        yield f"{name}.exp_avg", self.exp_avg
        yield f"{name}.exp_avg_sq", self.exp_avg_sq
        yield f"{name}.steps", self.steps

    @classmethod
    def from_tensors(cls, name: str, views: dict[str, Tensor]) -> ViewTable:
        """Return the table ``name`` from the tensors of a checkpoint, copied."""
        parts = ("", ".exp_avg", ".exp_avg_sq", ".steps")
        return cls(*(views[name + part].clone() for part in parts))


@dataclass(frozen=True, slots=True)
class ViewRates:
    """The learning rates of per-view parameters in step number ``step`` of a run.

    config: the settings of the run. extent: of the scene, world units.
    """

    config: Config
    extent: float
    step: int

    def of(self, table: str) -> float:
        """Return the rate of one of the settings ``views.{table}_lr``, which falls log-linearly."""
        views, done = self.config.views, self.step / self.config.schedule.lr_steps
        return log_linear(getattr(views, f"{table}_lr"), getattr(views, f"{table}_lr_final"), done)

    @property
    def moves_poses(self) -> bool:
        """Whether poses have begun to change."""
        return self.step > self.config.views.pose_start * self.config.schedule.lr_steps


@dataclass(slots=True)
class PerViewParams:
    """The tables of a run; None where its settings train no such parameter.

    pose: [T, 6] changes of the cameras' poses, see scene/camera.py. exposure: [T, 3, 4], see rasterizer/recolour.py.
    bilateral_grid: [T, 12, L, Y, X], see rasterizer/bilateral_grid.py. ppisp, ppisp_camera: [T, 9] and [C, 27] for C
    cameras of other intrinsics, see rasterizer/ppisp.py. At most one of exposure, grid and PPISP is trained.
    cameras: those of the training views, whose rows in ppisp_camera are ``lenses`` [T].
    """

    pose: ViewTable | None = None
    exposure: ViewTable | None = None
    bilateral_grid: ViewTable | None = None
    ppisp: ViewTable | None = None
    ppisp_camera: ViewTable | None = None
    cameras: list[Camera] = field(default_factory=list)
    lenses: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.lenses = lens_rows(self.cameras)

    @classmethod
    def new(cls, config: ViewsConfig, cameras: list[Camera]) -> PerViewParams:
        """Return the parameters of training views with these ``cameras`` at their start, where they change nothing."""
        identity = {
            "pose": torch.zeros(VIEW_TABLES["pose"]),
            "exposure": torch.eye(*VIEW_TABLES["exposure"]),
            "bilateral_grid": identity_grid(*VIEW_TABLES["bilateral_grid"][1:]),
            "ppisp": torch.zeros(VIEW_NUMBERS),
            "ppisp_camera": torch.zeros(CAMERA_NUMBERS),
        }
        lenses = len(set(lens_rows(cameras)))

        def table(name: str) -> ViewTable:
            row = identity[name].to(VIEW_DTYPES[name])
            return ViewTable.starting_from(
                row.repeat(lenses if name in CAMERA_TABLES else len(cameras), *[1] * row.dim())
            )

        return cls(
            cameras=cameras, **{name: table(name) for name, trained in trained_tables(config).items() if trained}
        )

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> PerViewParams:
        """Return the stored parameters; they share no tensor with ``checkpoint``."""
        views = checkpoint.views
        tables = {name: ViewTable.from_tensors(name, views) for name in VIEW_TABLES if name in views}
        return cls(cameras=[checkpoint.cameras[view] for view in checkpoint.train], **tables)

    def stored(self) -> dict[str, Tensor]:
        """Return the tensors of all tables by their names in a checkpoint, shared with them."""
        tables = ((name, getattr(self, name)) for name in VIEW_TABLES)
        return {key: tensor for name, table in tables if table is not None for key, tensor in table.stored(name)}

    def camera(self, row: int, camera: Camera) -> Camera:
        """Return the scene's ``camera`` of training view ``row`` with its trained pose."""
        return camera if self.pose is None else apply_pose_delta(camera, self.pose.values[row].numpy())

    def recolour(self, row: int, image: Tensor) -> Tensor:
        """Return a rendered image [H, W, 3] with the trained colours of training view ``row``."""
        return _recoloured(image, self._colours(row))

    def recolour_unseen(self, camera: Camera, image: Tensor) -> Tensor:
        """Return a rendered image [H, W, 3] of no training view, with the trained parameters of its camera, if any.

        That is PPISP's vignetting and response. A camera whose intrinsics no training view has, at the size of its
        images or another one, shows the response of the first one, and no vignetting.
        """
        if self.ppisp_camera is None:
            return image
        params = torch.zeros(VIEW_NUMBERS + CAMERA_NUMBERS, dtype=torch.float64)
        lenses = [self.cameras[self.lenses.index(lens)] for lens in range(len(self.ppisp_camera.values))]
        lens = lens_at_size(lenses, camera)
        if lens is not None:
            unit = max(lenses[lens].width / lenses[lens].height, 1.0) / max(camera.width / camera.height, 1.0)
            params[VIEW_NUMBERS:] = in_unit(self.ppisp_camera.values[lens], unit)
        else:
            params[-RESPONSE_NUMBERS:] = self.ppisp_camera.values[0, -RESPONSE_NUMBERS:]
        return _recoloured(image, params)

    def of(self, row: int, camera: Camera, rates: ViewRates, device: torch.device) -> ViewParams | None:
        """Return the parameters of training view ``row`` for the step of ``rates``; None where none are trained.

        camera: the scene's. device: the Gaussians'.
        """
        colours = self._colours(row)
        if self.pose is None and colours is None:
            return None

        def apply_grad(v_viewmat: Tensor | None, v_colours: Tensor | None) -> None:
            if v_viewmat is not None:
                self._apply_pose_grad(row, camera, v_viewmat, rates)
            if v_colours is not None:
                self._apply_colour_grad(row, v_colours, rates)

        # A copy, since gradients may be applied to the table while its step is still pending.
        colours = None if colours is None else to_device(colours.to(torch.float32, copy=True), device)
        return ViewParams(apply_grad, self.pose is not None and rates.moves_poses, colours)

    def _colours(self, row: int) -> Tensor | None:
        """Return what changes the colours of training view ``row``: exposure, grid or PPISP's numbers, if any."""
        if self.ppisp is not None and self.ppisp_camera is not None:
            return torch.cat([self.ppisp.values[row], self.ppisp_camera.values[self.lenses[row]]])
        table = self.exposure if self.bilateral_grid is None else self.bilateral_grid
        return None if table is None else table.values[row]

    def _apply_pose_grad(self, row: int, camera: Camera, v_viewmat: Tensor, rates: ViewRates) -> None:
        assert self.pose is not None
        delta, rate = self.pose.values[row], rates.of("pose")
        grad = torch.from_numpy(pose_delta_vjp(camera, delta.numpy(), v_viewmat.double().numpy()))
        lr = torch.tensor([rate] * 3 + [rate * rates.extent] * 3, dtype=torch.float64)
        self.pose.apply_grad(row, grad + rates.config.views.pose_reg * delta, lr, shared=True)

    def _apply_colour_grad(self, row: int, v_colours: Tensor, rates: ViewRates) -> None:
        views = rates.config.views
        if self.bilateral_grid is not None:
            smooth = views.bilateral_grid_tv * variation_gradient(self.bilateral_grid.values[row])
            self.bilateral_grid.apply_grad(row, v_colours.float() + smooth, rates.of("bilateral_grid"))
        if self.exposure is not None:
            self.exposure.apply_grad(row, v_colours.double(), rates.of("exposure"))
        if self.ppisp is not None and self.ppisp_camera is not None:
            params, rate = self._colours(row), rates.of("ppisp")
            assert params is not None
            mean = tree_sum(self.ppisp.values.T.contiguous()) / len(self.ppisp.values)
            grad = v_colours.double() + views.ppisp_reg * prior_gradient(params, mean)
            self.ppisp.apply_grad(row, grad[:VIEW_NUMBERS], rate * PPISP_RATES)
            self.ppisp_camera.apply_grad(self.lenses[row], grad[VIEW_NUMBERS:], rate * PPISP_CAMERA_RATE)


def trained_tables(config: ViewsConfig) -> dict[str, bool]:
    """Return for each of VIEW_TABLES whether these settings train it."""
    maps: dict[str, bool] = {name: getattr(config, name) for name in COLOUR_MAPS}
    return {"pose": config.pose_opt, **maps, "ppisp_camera": config.ppisp}


def _recoloured(image: Tensor, colours: Tensor | None) -> Tensor:
    if colours is None:
        return image
    return recolour(image.contiguous(), to_device(colours.to(image.dtype), image.device), torch.empty_like(image))
