"""Lightning: a run of splatcli as a LightningModule, its scene as a LightningDataModule. docs/distributed.md

Each rank renders its own views, locally. Gaussians are no parameters of the module: densification replaces them, and
DDP would keep buckets of tensors that are gone. A ProcessGroup, made of the process group that Lightning has started,
adds their gradients, so that a run on several devices is bit-identical to one by ``splat train --ranks``, or on one
device. torch's autograd computes nothing, so that ``precision`` does not change the result.
"""

from __future__ import annotations

import atexit
import logging
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from splatcli.checkpoint.file import load_checkpoint, save_checkpoint
from splatcli.checkpoint.run_dir import RunDir
from splatcli.checkpoint.state import Checkpoint
from splatcli.config import Config
from splatcli.distributed.process_group import ProcessGroup, destroy_default_group, wrap_default_group
from splatcli.errors import ResourceError, UsageError
from splatcli.gaussians import Gaussians
from splatcli.scene.read import read_scene
from splatcli.scene.scene import Scene
from splatcli.train.backgrounds import training_image_background
from splatcli.train.changed_settings import changed_config, differing_settings
from splatcli.train.data_parallel import ReadOnlyRunDir
from splatcli.train.events import Evaluated, Event, Stepped
from splatcli.train.trainer import Trainer

try:
    import lightning.pytorch as pl
except ImportError:
    raise ResourceError("Lightning is not installed", remedy="pip install 'splatcli[lightning]'") from None

_log = logging.getLogger(__name__)

#: The key of a run's state in Lightning's checkpoints: the bytes of a checkpoint of splatcli, as uint8.
KEY = "splatcli"


class SceneData(pl.LightningDataModule):
    """The scene that ``config.data`` names; an epoch is a whole run, a batch the number of a step.

    The number of a step determines its views, so that ranks need no sampler, and all ranks have equally many steps
    whatever the number of images.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.scene: Scene | None = None

    def setup(self, stage: str) -> None:
        """Read the scene, once in each process. Raises SceneError."""
        if self.scene is None:
            background = training_image_background(self.config)
            self.scene = read_scene(Path(self.config.data.scene), self.config.data, background=background)

    def train_dataloader(self) -> DataLoader[int]:
        module = None if self.trainer is None else self.trainer.lightning_module
        run = module.run if isinstance(module, SplatModule) else None
        config = self.config if run is None else run.state.config
        return DataLoader(_Steps(config.train.iterations), batch_size=None)

    def val_dataloader(self) -> DataLoader[int]:
        return DataLoader(_Steps(1), batch_size=None)


class _Steps(IterableDataset[int]):
    """Step numbers, the same on every rank, so that Lightning distributes nothing."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))

    def __len__(self) -> int:
        return self.count


class SplatModule(pl.LightningModule):
    """Training as by ``splat train`` with the same settings; use it with a SceneData.

    config: settings, as of splatcli.config.build_config(); ``train.batch_size`` views a step are shared by the
        devices of Lightning's Trainer, and there must be as many as devices. A run that is resumed goes on with them,
        its schedule included, as with ``splat resume --set``; those that are fixed when a run is made must be the same.
    Logs train_loss, num_gaussians, and val_psnr and val_ssim of the held-out views (rank 0 scores them).
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.automatic_optimization = False
        #: Lightning counts the steps of an optimizer: this is its one parameter, which nothing uses.
        self.turn = nn.Parameter(torch.zeros(1))
        self.run: Trainer | None = None
        self.group: ProcessGroup | None = None
        self._checkpoint: Checkpoint | None = None

    @property
    def gaussians(self) -> Gaussians:
        """The current Gaussians, to render or export. Raises UsageError before there are any."""
        if self.run is None:
            raise UsageError(
                "there are no Gaussians before a fit", remedy="call fit() or validate() of Lightning's Trainer"
            )
        self.run.drain()
        return self.run.state.gaussians_to_render()

    def setup(self, stage: str) -> None:
        """Start the run, or resume that of a checkpoint.

        Raises UsageError without a SceneData of the same settings, and where ranks would have no view.
        """
        if self.run is not None:
            return
        # Lightning puts it there without declaring it.
        data, ranks = getattr(self.trainer, "datamodule", None), self.trainer.world_size
        if not isinstance(data, SceneData) or data.scene is None:
            raise UsageError(
                "a SplatModule trains on a SceneData", remedy="trainer.fit(module, datamodule=SceneData(config))"
            )
        read, own = ((one.data, training_image_background(one)) for one in (data.config, self.config))
        if read != own:
            raise UsageError(
                "the SceneData was read with other settings than those of the SplatModule",
                where="data",
                remedy="give both the same config",
            )
        views = self.config.train.batch_size
        if views < ranks:
            raise UsageError(
                f"{ranks} devices want as many views a step, and there are {views}",
                where="train.batch_size",
                remedy=f'build_config({{"train.batch_size": {ranks}, ...}})',
            )
        device = self.trainer.strategy.root_device
        # Ranks communicate because Lightning's Trainer was given several devices, not because a group exists.
        self.group = wrap_default_group(device) if ranks > 1 else None
        folder = ReadOnlyRunDir(Path(self.trainer.default_root_dir))
        with self.group.slow_section("building the model") if self.group is not None else nullcontext():
            if self._checkpoint is None:
                self.run = Trainer.start(self.config, data.scene, run_dir=folder, device=str(device), group=self.group)
            else:
                found, self._checkpoint = self._checkpoint, None
                self.run = self._resumed(found, data.scene, folder, str(device))

    def _resumed(self, found: Checkpoint, scene: Scene, folder: RunDir, device: str) -> Trainer:
        """Return the run of a checkpoint with the settings of this module. Raises as changed_config()."""
        config, notes = changed_config(found.config, values=differing_settings(self.config, found.config))
        for note in notes:
            _log.info(note)
        return Trainer.resume(found, scene, run_dir=folder, device=device, config=config, notes=notes, group=self.group)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.turn], lr=0.0)

    def training_step(self, batch: int, batch_idx: int) -> None:
        assert self.run is not None
        events = self.run.advance()
        if self.run.state.step >= self.run.state.config.train.iterations:
            events += self.run.drain()
            self.run.estimate_view_dependence()
        self._log_steps(events)
        optimizer = self.optimizers()
        assert isinstance(optimizer, pl.core.optimizer.LightningOptimizer)
        optimizer.step()

    def _log_steps(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Stepped):
                self.log("train_loss", _on_host(event.loss), prog_bar=True)
                self.log("num_gaussians", _on_host(event.num_gaussians), prog_bar=True)

    def validation_step(self, batch: int, batch_idx: int) -> None:
        assert self.run is not None
        self.run.drain()
        if self.global_rank:
            return
        event, _ = self.run.scorer.evaluate(self.run.state, lambda: None)
        if isinstance(event, Evaluated):
            self.log("val_psnr", _on_host(event.psnr), rank_zero_only=True, batch_size=1)
            self.log("val_ssim", _on_host(event.ssim), rank_zero_only=True, batch_size=1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert self.run is not None
        self.run.drain()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "ckpt.pt"
            save_checkpoint(path, self.run.state.to_checkpoint())
            checkpoint[KEY] = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the run that is stored, with the settings of this module.

        Raises ModelFileError when it is not a sound checkpoint, UsageError for settings that cannot change.
        """
        found = stored_run(checkpoint)
        if self.run is None:
            self._checkpoint = found
        else:
            self.run = self._resumed(found, self.run.scene, self.run.run_dir, str(self.run.state.gaussians.device))

    def on_exception(self, exception: BaseException) -> None:
        if self.group is not None:
            self.group.fail(exception)

    def teardown(self, stage: str) -> None:
        """Let the ranks leave together after a fit that ended well."""
        if self.group is not None and not self.group.monitor.failed:
            self.group.close()
            self.group.destroy()
            self.group = None
            atexit.register(destroy_default_group)


def _on_host(value: float) -> Tensor:
    """Return a figure to log, whatever the precision is.

    Lightning would copy a number to the GPU, which waits for the steps in flight.
    """
    return torch.tensor(float(value), dtype=torch.float32)


def stored_run(checkpoint: dict[str, Any]) -> Checkpoint:
    """Return the state of a run in a checkpoint of Lightning, verified; ``splat`` reads it once it is saved.

    checkpoint: as torch.load() returns it.
    Raises UsageError for one without a run, ModelFileError for one that is damaged.
    """
    content = checkpoint.get(KEY) if isinstance(checkpoint, dict) else None
    if not isinstance(content, Tensor) or content.dtype != torch.uint8:
        raise UsageError(
            f"this checkpoint of Lightning has no {KEY!r}: it is not of a SplatModule",
            remedy="stored_run(torch.load(path)) of a checkpoint that Lightning's Trainer has saved",
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ckpt.pt"
        path.write_bytes(content.numpy().tobytes())
        return load_checkpoint(path)
