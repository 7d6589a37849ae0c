"""TrainState: everything that changes while a run trains, and its conversion to and from a Checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import torch
from torch import Tensor

from splatcli.checkpoint.state import Checkpoint, DatasetInfo, RenderColumns, Scalar
from splatcli.config import Config, OptimConfig, with_settings
from splatcli.errors import ModelFileError
from splatcli.gaussians import GROUPS, Gaussians
from splatcli.native import abi
from splatcli.rasterizer.adam import AdamState, sum_of_log_sizes
from splatcli.rasterizer.filter_3d import apply_filter_3d, filter_sizes
from splatcli.rasterizer.offload import DEVICE_STORAGE, TensorStorage, storage_for
from splatcli.rasterizer.step_inputs import DensifyStats, Shard
from splatcli.scene.camera import Camera
from splatcli.train.densify.contribution import BlendWeights
from splatcli.train.dropout import dropout_rate, mean_opacities
from splatcli.train.per_view_params import PerViewParams, trained_tables
from splatcli.train.sampler import ViewSampler
from splatcli.train.schedule import active_sh_degree
from splatcli.train.view_dependence import DEGREE, ViewWeights, damp, effective_views, shrinkage

if TYPE_CHECKING:
    from splatcli.distributed.process_group import ProcessGroup

#: The random streams of a run and the keys of their seeds. Each has a generator of its own, so that one more draw in
#: one changes none of the others. The order of the views has no generator (see ViewSampler).
STREAMS = {"init": 0, "splits": 1, "background": 2}

#: Key, among the strategy's, of the mean logarithm of the Gaussians' sizes at the last refinement.
LOG_SIZE = "log_size"

#: The streams that training draws from.
TRAINING_STREAMS = ("splits", "background")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the Gaussians of a run lie.

    device: of all that is not offloaded. storage: of shN and its moments.
    shards: the processes that hold an equal part of the rows each; rank: this one's place among them.
    unit: rows that stay together, see Shard.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    storage: TensorStorage = DEVICE_STORAGE
    shards: int = 1
    rank: int = 0
    unit: int = 1

    @classmethod
    def of(
        cls,
        config: Config,
        device: str,
        folder: Path | None = None,
        group: ProcessGroup | None = None,
        *,
        sharded: bool = False,
    ) -> Placement:
        """Return the placement of a run with these settings.

        folder: of the file of a run that offloads on the CPU, see storage_for().
        sharded: each process of the group holds a part of the rows; otherwise each holds all.
        """
        storage = storage_for(config.memory.offload, device, folder)
        if group is None or not sharded:
            return cls(torch.device(device), storage)
        # The gradient of a pose is a sum over chunks, and then over all.
        unit = abi.CHUNK if config.views.pose_opt else 1
        return cls(torch.device(device), storage, group.size, group.rank, unit)

    def shard(self, count: int) -> Shard | None:
        """Return the rows of this process when there are ``count`` Gaussians; None where it holds all."""
        return None if self.shards == 1 else Shard(self.rank, self.shards, count, self.unit)


@dataclass(slots=True)
class TrainState:
    """A run between two steps; after saving and loading it continues bit-identically.

    step: completed steps.
    generators: one for each of TRAINING_STREAMS, on the CPU.
    cameras, train, test: the scene's, as the run started with them; train and test index into cameras.
    per_view_params: trained parameters of the training views, a row for each of ``train``.
    comparisons: how many times the training views were compared (train/outlier_views.py).
    loss: the name of the caller's loss function; None: that of the settings.
    shard: the rows of the run that these are, where each process holds a shard; None: all.
    origin: digest of all rows when the shards were cut; it has to be the same in all processes.
    """

    config: Config
    step: int
    gaussians: Gaussians
    adam: AdamState
    stats: DensifyStats
    sampler: ViewSampler
    generators: dict[str, torch.Generator]
    cameras: list[Camera]
    train: list[int]
    test: list[int]
    dataset: DatasetInfo
    per_view_params: PerViewParams = field(default_factory=PerViewParams)
    columns: RenderColumns = field(default_factory=RenderColumns)
    comparisons: int = 0
    loss: str | None = None
    shard: Shard | None = None
    origin: int = 0

    @property
    def placement(self) -> Placement:
        """Where the Gaussians lie."""
        here = Placement(self.gaussians.device, self.adam.storage)
        shard = self.shard
        return here if shard is None else replace(here, shards=shard.size, rank=shard.rank, unit=shard.unit)

    @property
    def count(self) -> int:
        """Gaussians of the run, in all processes."""
        return len(self.gaussians) if self.shard is None else self.shard.total

    def sh_degree(self) -> int:
        """Return the SH degree that the last step used."""
        return active_sh_degree(self.config.schedule, self.gaussians.sh_degree, self.step)

    def gaussians_to_render(self) -> Gaussians:
        """Return the Gaussians to render: shN of this step, damped, opacities as in the mean of dropout, 3D filter
        applied. The state stays as it is.
        """
        return _to_render(self, self.adam)

    def estimate_view_dependence(
        self, geometry: Gaussians | None = None, sizes: Tensor | None = None, group: ProcessGroup | None = None
    ) -> None:
        """Estimate how far the views determine view-dependent colour (train/view_dependence.py).

        gaussians_to_render() applies it. No step may be pending.
        geometry, sizes: the Gaussians of all processes and the sizes of their 3D filter, where this state holds a part.
        group: the processes of the run, all of which call it.
        """
        train = self.config.train
        if train.sh_views == 0.0 or self.sh_degree() < DEGREE:
            return
        self.discard_view_dependence()
        cameras, rows = self.training_cameras(), None if self.shard is None else self.shard.rows
        if geometry is None:
            geometry, sizes = self.gaussians, self.columns.filter_3d
        weights = BlendWeights(geometry, cameras, train.antialiased, sizes, group)
        if not train.sh_prior:
            views = effective_views(weights)
            self.columns = replace(self.columns, effective_views=views if rows is None else views[rows].clone())
            return
        in_views = ViewWeights.of(weights)
        trained, others = self.adam.flushed(self.gaussians, self.config.optim.shN_lr), None if rows is None else group
        change = shrinkage(trained, in_views, train, rows=rows, group=others)
        self.columns = replace(self.columns, sh_change=change)

    def discard_view_dependence(self) -> None:
        """Drop what estimate_view_dependence() found: after another step it is out of date."""
        self.columns = replace(self.columns, effective_views=None, sh_change=None)

    def update_filter_3d(self, largest_of_all: Callable[[float], float] = float) -> None:
        """Compute the sizes of the 3D filter anew; no step may be pending. largest_of_all: see filter_sizes()."""
        sizes = filter_sizes(self.gaussians.means, self.training_cameras(), largest_of_all)
        self.columns = replace(self.columns, filter_3d=sizes)

    def refined_cameras(self) -> list[Camera]:
        """Return the cameras, those of training views with their trained poses."""
        cameras = list(self.cameras)
        for row, view in enumerate(self.train):
            cameras[view] = self.per_view_params.camera(row, cameras[view])
        return cameras

    def training_cameras(self) -> list[Camera]:
        """Return the cameras of the training views that are not left out, with their trained poses."""
        cameras = self.refined_cameras()
        return [cameras[view] for row, view in enumerate(self.train) if row not in self.sampler.skipped]

    def to_checkpoint(self) -> Checkpoint:
        """Return the state on the CPU. Tensors may be shared with the state: write it before the next step."""
        strategy: dict[str, Tensor | Scalar] = {
            "grad2d": self.stats.grad2d.cpu(),  # and waits for the device: then host memory that it shares is complete
            "count": self.stats.count.cpu(),
        }
        if self.adam.size_power > 0.0:
            strategy[LOG_SIZE] = self.adam.log_size
        first, second = self.adam.exp_avg.to("cpu"), self.adam.exp_avg_sq.to("cpu")
        return Checkpoint(
            step=self.step,
            gaussians=self.gaussians.map(lambda t: t.detach().cpu()),
            moments={name: (getattr(first, name), getattr(second, name)) for name in GROUPS},
            adam_step=self.adam.step,
            sh_last_step=self.adam.sh_last_step.cpu(),
            active_sh_degree=self.sh_degree(),
            strategy=strategy,
            rng={name: generator.get_state() for name, generator in self.generators.items()},
            sampler=self.sampler.state(),
            skipped=tuple(sorted(self.sampler.skipped)),
            config=self.config,
            cameras=self.cameras,
            train=self.train,
            test=self.test,
            dataset=self.dataset,
            views=self.per_view_params.stored(),
            columns=self.columns.map(Tensor.cpu),
            comparisons=self.comparisons,
            loss=self.loss,
        )

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, placement: Placement | None = None) -> TrainState:
        """Return the saved state with all its rows, on the CPU by default; it shares no tensor with ``checkpoint``.

        Raises ModelFileError, listing what is missing, when the checkpoint holds no state of a training run.
        """
        check_resumable(checkpoint)
        assert checkpoint.moments is not None
        placement = placement or Placement()
        seed, device, stored = checkpoint.config.train.seed, placement.device, _adam(checkpoint)
        adam = replace(
            stored,
            exp_avg=_copy(stored.exp_avg, placement),
            exp_avg_sq=_copy(stored.exp_avg_sq, placement),
            sh_last_step=stored.sh_last_step.to(device, copy=True),
            storage=placement.storage,
            log_size=log_size_of(checkpoint),
        )
        stats = DensifyStats(*(_tensor(checkpoint, name).to(device, copy=True) for name in ("grad2d", "count")))
        return cls(
            config=checkpoint.config,
            step=checkpoint.step,
            gaussians=_copy(checkpoint.gaussians, placement),
            adam=adam,
            stats=stats,
            sampler=ViewSampler(len(checkpoint.train), seed, **checkpoint.sampler, skipped=checkpoint.skipped),
            generators={name: _generator(name, checkpoint.rng[name]) for name in TRAINING_STREAMS},
            cameras=list(checkpoint.cameras),
            train=list(checkpoint.train),
            test=list(checkpoint.test),
            dataset=checkpoint.dataset,
            per_view_params=PerViewParams.from_checkpoint(checkpoint),
            columns=checkpoint.columns.map(lambda column: column.to(device, copy=True)),
            comparisons=checkpoint.comparisons,
            loss=checkpoint.loss,
        )


def log_size_of(checkpoint: Checkpoint) -> float:
    """Return the mean logarithm of the Gaussians' sizes that rates of means are relative to.

    A merged run and one with one rate for all store none: then it is that of the checkpoint's Gaussians.
    """
    stored, log_scales = checkpoint.strategy.get(LOG_SIZE), checkpoint.gaussians.log_scales
    if isinstance(stored, int | float):
        return float(stored)
    return sum_of_log_sizes(log_scales) / max(1, len(log_scales))


def check_resumable(checkpoint: Checkpoint) -> None:
    """Raise ModelFileError, listing what is missing, unless a checkpoint holds the state of a training run."""
    problems = list(_problems(checkpoint))
    if problems:
        raise ModelFileError(
            "this checkpoint cannot be resumed: " + "; ".join(problems),
            remedy="start a new run from its Gaussians: splat train SCENE --init CKPT",
        )


def stream_generator(seed: int, name: str) -> torch.Generator:
    """Return the generator, on the CPU, that stream ``name`` of STREAMS starts with in a run with ``seed``."""
    sequence = np.random.SeedSequence(seed & 0xFFFF_FFFF_FFFF_FFFF, spawn_key=(STREAMS[name],))
    # torch's CPU generator reads 32 bits of its seed.
    return torch.Generator().manual_seed(int(sequence.generate_state(1, np.uint32)[0]))


def _generator(name: str, state: Tensor) -> torch.Generator:
    try:
        return torch.Generator().set_state(state.cpu())
    except RuntimeError as error:
        raise ModelFileError(f"the random state of {name!r} is not one of torch's: {error}") from None


class AdamSettings(TypedDict):
    """The fields of AdamState that are settings."""

    beta1: float
    beta2: float
    eps: float
    size_power: float


def adam_settings(optim: OptimConfig) -> AdamSettings:
    """Return the fields of AdamState that follow from the settings."""
    return AdamSettings(beta1=optim.beta1, beta2=optim.beta2, eps=optim.eps, size_power=optim.means_size_power or 0.0)


def _adam(checkpoint: Checkpoint) -> AdamState:
    """Return the optimiser's state; it shares tensors with ``checkpoint``."""
    steps, moments = checkpoint.sh_last_step, checkpoint.moments
    assert moments is not None
    first, second = (Gaussians(**{name: moments[name][i] for name in GROUPS}) for i in (0, 1))
    if steps is None:
        steps = torch.full((len(checkpoint.gaussians),), checkpoint.adam_step, dtype=torch.int32)
    return AdamState(first, second, checkpoint.adam_step, sh_last_step=steps, **adam_settings(checkpoint.config.optim))


def gaussians_to_render(checkpoint: Checkpoint) -> Gaussians:
    """Return the Gaussians of a checkpoint to render or to export, as TrainState.gaussians_to_render()."""
    known = checkpoint.moments is not None and checkpoint.sh_last_step is not None
    return _to_render(checkpoint, _adam(checkpoint) if known else None)


def _to_render(run: TrainState | Checkpoint, adam: AdamState | None) -> Gaussians:
    """Return the Gaussians to render of a run, which stays as it is. adam: None where every step is applied.

    A rule that is new here belongs in rendered_alike(), too, where blocks of a scene may differ in it.
    """
    trained, config, views, change = run.gaussians, run.config, run.columns.effective_views, run.columns.sh_change
    gaussians = trained if adam is None else adam.flushed(trained, config.optim.shN_lr)
    if (views is not None or change is not None) and config.train.sh_views > 0.0:
        shN = gaussians.shN
        if shN is trained.shN:
            shN = (DEVICE_STORAGE if adam is None else adam.storage).copy(shN, gaussians.device)
        if change is not None:
            shN += change[:, 1:].to(shN.device)
            gaussians = replace(gaussians, sh0=gaussians.sh0 + change[:, 0].to(gaussians.device))
        elif views is not None:
            damp(shN, views, config.train.sh_views)
        gaussians = replace(gaussians, shN=shN)
    if (rate := dropout_rate(config, run.step)) > 0.0:
        gaussians = replace(gaussians, logit_opacities=mean_opacities(gaussians.logit_opacities, rate))
    return gaussians if run.columns.filter_3d is None else apply_filter_3d(gaussians, run.columns.filter_3d)


def rendered_alike(parts: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return checkpoints whose Gaussians are rendered as those of ``parts``, by settings that are the same in all.

    parts: of blocks of a scene. The views of some may be far apart and those of others not.
    """
    if any(part.columns.sh_change is not None for part in parts):
        parts = [replace(part, columns=_with_sh_change(part)) for part in parts]
    least = min(part.config.train.dropout or 0.0 for part in parts)
    return [_with_dropout(part, least) for part in parts]


def _with_sh_change(checkpoint: Checkpoint) -> RenderColumns:
    """Return the columns of a checkpoint with the ``sh_change`` that has the effect of its ``effective_views``."""
    columns = checkpoint.columns
    if columns.sh_change is not None:
        return columns
    raw = replace(columns, effective_views=None)
    trained, shown = gaussians_to_render(replace(checkpoint, columns=raw)), gaussians_to_render(checkpoint)
    change = torch.cat([(shown.sh0 - trained.sh0)[:, None], shown.shN - trained.shN], dim=1)
    return replace(raw, sh_change=change)


def _with_dropout(checkpoint: Checkpoint, dropout: float) -> Checkpoint:
    """Return a checkpoint with another ``train.dropout``, no more than its own, and the opacities that go with it."""
    config, step = with_settings(checkpoint.config, {"train.dropout": dropout}), checkpoint.step
    before, after = (1.0 - dropout_rate(each, step) for each in (checkpoint.config, config))
    logits = mean_opacities(checkpoint.gaussians.logit_opacities, 1.0 - before / after)
    return replace(checkpoint, config=config, gaussians=replace(checkpoint.gaussians, logit_opacities=logits))


def _copy(gaussians: Gaussians, placement: Placement) -> Gaussians:
    device, storage = placement.device, placement.storage
    return gaussians.map(lambda t: DEVICE_STORAGE.copy(t, device), shN=lambda t: storage.copy(t, device))


def _tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    value = checkpoint.strategy[name]
    assert isinstance(value, Tensor)
    return value


def _number(value: Tensor | Scalar) -> float:
    """Return a number of the strategy; NaN for anything else."""
    return float(value) if isinstance(value, (int, float)) else math.nan


def _problems(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the reasons why a checkpoint cannot be resumed."""
    n = len(checkpoint.gaussians)
    if checkpoint.moments is None:
        yield "it holds no optimiser state"
    elif set(checkpoint.moments) != set(GROUPS):
        yield f"its optimiser state is of {sorted(checkpoint.moments)}"
    for name in ("grad2d", "count"):
        value = checkpoint.strategy.get(name)
        if not isinstance(value, Tensor) or value.shape != (n,) or value.dtype != torch.float32:
            yield f"strategy.{name} is not a float32 tensor of {n} numbers"
    if not math.isfinite(_number(checkpoint.strategy.get(LOG_SIZE, 0.0))):
        yield f"strategy.{LOG_SIZE} is not a finite number"
    yield from (f"the random state of {name!r} is missing" for name in TRAINING_STREAMS if name not in checkpoint.rng)
    epoch, position = checkpoint.sampler.get("epoch", -1), checkpoint.sampler.get("position", -1)
    if set(checkpoint.sampler) != {"epoch", "position"} or epoch < 0 or not 0 <= position < len(checkpoint.train):
        yield f"its position in the order of views, {checkpoint.sampler}, is not valid"
    if checkpoint.config.train.filter_3d and checkpoint.columns.filter_3d is None:
        yield "the sizes of its 3D filter are missing"
    if not set(checkpoint.skipped) < set(range(len(checkpoint.train))):
        yield f"the views that it leaves out, {list(checkpoint.skipped)}, are not some of its {len(checkpoint.train)}"
    views = checkpoint.config.views
    for name, trained in trained_tables(views).items():
        if trained and name not in checkpoint.views:
            yield f"views.{name} is trained by its settings and missing"
    cameras = len(checkpoint.cameras)
    if not all(0 <= i < cameras for i in (*checkpoint.train, *checkpoint.test)):
        yield f"its views are not among its {cameras} cameras"
