"""Checkpoint: the complete state of a training run between two steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

from torch import Tensor

from splatcli.config import Config
from splatcli.gaussians import Gaussians
from splatcli.scene.camera import Camera, apply_pose_delta

#: Values of a strategy beside tensors.
Scalar = int | float | str | bool


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """The source of the images, and enough facts to detect that they have changed.

    root: the scene's absolute path when the run started.
    kind: the layout, as named by the scene reader.
    extent: world units; scales the means' learning rate.
    fingerprint: counts and digests of the images, from ``Scene.fingerprint()``.
    offset: the Gaussians' coordinates plus this are those of the input (``Scene.offset``).
    place: latitude and longitude in degrees, height in metres (EPSG:4979) of the point that the input's origin is; the
        input is in metres then, x east, y north, z up. None where nobody knows.
    clearances: distance of each training view's camera to the nearest sparse point, world units; empty without points.
    """

    root: str
    kind: str
    extent: float
    fingerprint: dict[str, str | int] = field(default_factory=dict)
    offset: tuple[float, ...] = (0.0, 0.0, 0.0)
    clearances: tuple[float, ...] = ()
    place: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class RenderColumns:
    """Columns beside the raw parameters that change how Gaussians are rendered; None where there is none.

    filter_3d: [N] float32, sizes of the 3D filter in world units, as of its last update (FILTER_3D_EVERY).
    effective_views: [N] float32, effective numbers of training views that show each Gaussian, in a finished run
        (train/view_dependence.py); None without damping.
    sh_change: [N, 1 + K, 3] float32, what is added to sh0 and shN of a finished run whose views are far apart, in place
        of damping.
    """

    filter_3d: Tensor | None = None
    effective_views: Tensor | None = None
    sh_change: Tensor | None = None

    def present(self) -> dict[str, Tensor]:
        """Return the columns that there are, by name."""
        columns = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: column for name, column in columns.items() if column is not None}

    def map(self, fn: Callable[[Tensor], Tensor | None]) -> RenderColumns:
        """Return new columns with ``fn`` applied to each that there is."""
        return RenderColumns(**{name: fn(column) for name, column in self.present().items()})


@dataclass(slots=True)
class Checkpoint:
    """The state of a run after ``step`` steps; a run that continues from it is bit-identical to one without a stop.

    gaussians: raw parameters, float32.
    moments: parameter group -> Adam's (exp_avg, exp_avg_sq), each of the group's shape; None before training.
    adam_step: steps of Adam.
    sh_last_step: [N] int32, the last step in which Adam updated shN of each Gaussian; None: adam_step for all.
    active_sh_degree: SH degree in use, at most ``gaussians.sh_degree``.
    strategy: the strategy's accumulators and numbers, by name.
    rng: states of torch generators, uint8 [S], by name.
    sampler: the position of the ViewSampler.
    skipped: rows of ``train`` that training leaves out (train/outlier_views.py).
    comparisons: how many times the training views were compared to find them.
    cameras: every camera at the training resolution, as the scene gave it; train and test index into them.
    views: per-view parameters, [T, ...] with a row for each training view (VIEW_TABLES of the schema).
    loss: the name of the caller's loss function (splatcli.Trainer); None: that of the settings.
    writer: version and machine that wrote the file; empty before it is written.
    """

    step: int
    gaussians: Gaussians
    moments: dict[str, tuple[Tensor, Tensor]] | None
    adam_step: int
    sh_last_step: Tensor | None
    active_sh_degree: int
    strategy: dict[str, Tensor | Scalar]
    rng: dict[str, Tensor]
    sampler: dict[str, int]
    config: Config
    cameras: list[Camera]
    train: list[int]
    test: list[int]
    dataset: DatasetInfo
    skipped: tuple[int, ...] = ()
    comparisons: int = 0
    views: dict[str, Tensor] = field(default_factory=dict)
    columns: RenderColumns = field(default_factory=RenderColumns)
    loss: str | None = None
    writer: dict[str, str] = field(default_factory=dict)

    def select_rows(self, rows: slice | Tensor) -> Checkpoint:
        """Return the checkpoint of some of the Gaussians, which keep their bits; with a slice it shares the memory.

        rows: [M] int64 or a slice. What a run knows of each Gaussian goes with it: raw parameters, moments, the step of
        the last update of its SH coefficients, the tensors of the strategy and ``columns``.
        """
        moments, steps = self.moments, self.sh_last_step
        return replace(
            self,
            gaussians=self.gaussians.map(lambda column: column[rows]),
            moments=None if moments is None else {name: (a[rows], b[rows]) for name, (a, b) in moments.items()},
            sh_last_step=None if steps is None else steps[rows],
            strategy={k: v[rows] if isinstance(v, Tensor) else v for k, v in self.strategy.items()},
            columns=self.columns.map(lambda column: column[rows]),
        )

    def refined_cameras(self) -> list[Camera]:
        """Return the cameras, those of training views with their trained poses."""
        cameras, poses = list(self.cameras), self.views.get("pose")
        if poses is not None:
            for row, index in enumerate(self.train):
                cameras[index] = apply_pose_delta(cameras[index], poses[row].double().numpy())
        return cameras

    def training_cameras(self) -> list[Camera]:
        """Return the cameras of the training views that are not left out, with their trained poses."""
        cameras = self.refined_cameras()
        return [cameras[index] for row, index in enumerate(self.train) if row not in self.skipped]
