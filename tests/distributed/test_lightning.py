"""Lightning: any strategy and precision has the same bits as a run without it, and its checkpoints hold ours."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import splatcli
from splatcli.checkpoint.file import save_checkpoint
from splatcli.cli.commands import run
from splatcli.config import with_settings
from splatcli.errors import UsageError
from splatcli.scene.read import read_scene
from splatcli.train import step
from splatcli.train.data_parallel import ReadOnlyRunDir, state_digest
from splatcli.train.events import Stepped
from splatcli.train.trainer import Trainer
from tests.cli.tiny import write_scene
from tests.distributed.lightning_run import STEPS, config_of
from tests.gpu.simulated.device_tensors import missing, simulated_gpus
from tests.native.cases import NEEDS_COMPILER
from tests.train.test_async_engines import AsyncPlainEngine
from tests.train.worlds import PlainEngine

pytestmark = [
    NEEDS_COMPILER,
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs Lightning: splatcli[lightning]"),
]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scene(tmp_path_factory.mktemp("lightning") / "scene")


@pytest.fixture(scope="module")
def expected(scene: Path) -> tuple[list[float], int]:
    """Losses and the last digest of the run without Lightning."""
    config = config_of(str(scene))
    trainer = Trainer.start(config, read_scene(scene, config.data), run_dir=ReadOnlyRunDir(scene))
    assert len(trainer.state.train) == 7
    losses = []
    for _ in range(STEPS):
        losses += [event.loss for event in trainer.advance() if isinstance(event, Stepped)]
    assert len(trainer.state.gaussians) == 150  # it has grown
    return losses, state_digest(trainer.state)


@pytest.mark.parametrize(
    ("strategy", "precision", "ranks"),
    [("one", "bf16-mixed", 1), ("ddp", "bf16-mixed", 2), ("ddp_spawn", "32-true", 2)],
)
def test_a_run_under_lightning_has_the_same_bits(
    strategy: str, precision: str, ranks: int, scene: Path, expected: tuple[list[float], int], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.distributed.lightning_run", str(scene), str(tmp_path), strategy, precision]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    ranks_results: list[dict[str, Any]] = [json.loads((tmp_path / f"rank_{r}.json").read_text()) for r in range(ranks)]
    losses, digest = expected
    for rank in ranks_results:
        assert rank["losses"] == pytest.approx(losses, rel=1e-6)  # Lightning keeps what is logged in float32
        assert (rank["digest"], rank["steps"], rank["global_step"]) == (digest, STEPS, STEPS)
        assert rank["parameters"] == ["turn"]  # nothing that grows is in a bucket
    assert ranks_results[0]["psnr"] > 0.0
    assert [(tmp_path / f"threads_{r}").read_text() for r in range(ranks)] == ["0"] * ranks
    if strategy == "ddp_spawn":
        return

    from splatcli.lightning import stored_run

    stored = torch.load(tmp_path / "lightning.ckpt", weights_only=True)
    checkpoint = stored_run(stored)
    assert (checkpoint.step, len(checkpoint.gaussians)) == (STEPS, 150)
    assert float(checkpoint.gaussians.logit_opacities.min()) < 0.0  # raw


def test_a_checkpoint_of_lightning_goes_on_where_it_was(
    scene: Path, expected: tuple[list[float], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    import lightning.pytorch as pl

    from splatcli.lightning import SceneData, SplatModule, stored_run

    config = config_of(str(scene))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "accelerator": "cpu", "devices": 1, "limit_val_batches": 0}
    path = scene.parent / "half.ckpt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own, about workers and loggers
        first = pl.Trainer(max_steps=8, **quiet)  # type: ignore[arg-type]
        first.fit(SplatModule(config), datamodule=SceneData(config))
        first.save_checkpoint(path)
        second, module = pl.Trainer(max_steps=STEPS, **quiet), SplatModule(config)  # type: ignore[arg-type]
        second.fit(module, datamodule=SceneData(config), ckpt_path=path)
    assert module.run is not None
    assert (module.run.state.step, state_digest(module.run.state)) == (STEPS, expected[1])

    # Without Lightning it goes on, too.
    save_checkpoint(scene.parent / "half.pt", stored_run(torch.load(path)))
    monkeypatch.chdir(scene.parent)
    assert run(["resume", "half.pt", "-q", "--device", "cpu"]) == 0
    assert torch.equal(splatcli.Model.load("output/scene").gaussians.means, module.gaussians.means)
    with pytest.raises(UsageError, match="has no 'splatcli'"):
        stored_run(str(path))  # type: ignore[arg-type]

    # The settings of the module that resumes count, as those of splat resume do.
    longer = with_settings(config, {"train.iterations": STEPS + 2, "train.ssim_lambda": 0.5})
    others = {
        key: with_settings(config, {key: value}) for key, value in (("model.sh_degree", 0), ("data.test_every", 2))
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = SplatModule(longer)
        with pytest.raises(UsageError, match="before a fit"):
            _ = module.gaussians
        third = pl.Trainer(max_steps=STEPS + 2, precision="bf16-true", **quiet)  # type: ignore[arg-type]
        third.fit(module, datamodule=SceneData(longer), ckpt_path=path)
        assert third.callback_metrics["num_gaussians"].dtype == torch.float32  # bfloat16 counts to 256
        assert module.run is not None
        assert module.run.state.config.train.ssim_lambda == 0.5
        assert module.run.state.step == STEPS + 2
        for key, other in others.items():  # the scene is read before the checkpoint
            with pytest.raises(UsageError, match=f"fixed when a run is made: {key}"):
                pl.Trainer(max_steps=STEPS, **quiet).fit(  # type: ignore[arg-type]
                    SplatModule(other), datamodule=SceneData(other), ckpt_path=path
                )
        with pytest.raises(UsageError, match="other settings than those of the SplatModule"):
            pl.Trainer(max_steps=STEPS, **quiet).fit(  # type: ignore[arg-type]
                SplatModule(config), datamodule=SceneData(with_settings(config, {"data.test_every": 2}))
            )


def test_steps_in_flight_are_done_before_a_checkpoint_a_score_and_the_end(
    scene: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where losses come two steps late."""
    import lightning.pytorch as pl

    from splatcli.lightning import SceneData, SplatModule, stored_run

    config = with_settings(config_of(str(scene)), {"train.batch_size": 1, "train.iterations": 8})
    whole = Trainer.start(config, read_scene(scene, config.data), run_dir=ReadOnlyRunDir(scene), engine=PlainEngine())
    losses = [event.loss for _ in range(8) for event in whole.advance() if isinstance(event, Stepped)]
    monkeypatch.setattr(step, "engine_for", lambda *_: AsyncPlainEngine())
    scored, logged = [], []

    class Module(SplatModule):
        def validation_step(self, batch: int, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            assert self.run is not None
            scored.append((self.run.state.step, state_digest(self.run.state)))

        def log(self, name: str, value: Any, **options: Any) -> None:
            super().log(name, value, **options)
            if name == "train_loss":
                logged.append(value)

    path, half = scene.parent / "late.ckpt", scene.parent / "late_half.ckpt"
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own, about workers and loggers
        first = pl.Trainer(max_steps=4, limit_val_batches=0, **quiet)  # type: ignore[arg-type]
        module = Module(config)
        first.fit(module, datamodule=SceneData(config))
        first.save_checkpoint(half)
        second, module = pl.Trainer(max_steps=8, **quiet), Module(config)  # type: ignore[arg-type]
        second.fit(module, datamodule=SceneData(config), ckpt_path=half)
    assert scored == [(8, state_digest(whole.state))]
    assert logged[-4:] == pytest.approx(losses[-4:])
    second.save_checkpoint(path)
    stored = stored_run(torch.load(path, weights_only=True))
    assert torch.equal(stored.gaussians.means, whole.state.gaussians.means)


@pytest.mark.skipif(missing() is not None, reason=f"no GPU can be simulated: {missing()}")
def test_a_gpu_is_not_waited_for_to_log_the_figures_of_a_step(scene: Path) -> None:
    import lightning.pytorch as pl

    from splatcli.lightning import SceneData, SplatModule

    config = with_settings(config_of(str(scene)), {"train.batch_size": 1, "train.iterations": 8})
    module = SplatModule(config)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "accelerator": "gpu", "devices": [1], "num_sanity_val_steps": 0}
    with warnings.catch_warnings(), simulated_gpus() as gpus:
        warnings.simplefilter("ignore")
        pl.Trainer(max_steps=8, **quiet).fit(module, datamodule=SceneData(config))  # type: ignore[arg-type]
    assert gpus.faults == []
    assert module.run is not None
    assert module.run.state.step == 8
    steps = [
        wait for wait in gpus.waits if wait.kind != "event" and any("training_step" in line for line in wait.stack)
    ]
    found = [str(wait) for wait in steps if not any(line.endswith(" refine") for line in wait.stack)]
    assert len(found) == 2, f"the first step counts tile intersections and copies a table: {found}"
