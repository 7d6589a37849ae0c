"""A callback that writes the results of a rank from within it: with ddp_spawn a rank ends with the fit."""

from __future__ import annotations

import atexit
import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from splatcli.train.data_parallel import state_digest
from tests.distributed.ranks import gloo_threads


class WriteResults(pl.Callback):
    """Writes OUT/rank_R.json when the training of a SplatModule ends, OUT/threads_R when Python does."""

    def __init__(self, out: str) -> None:
        self.out = out
        self.losses: list[float] = []

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Come before the module, so that what it does at the end of Python is done before."""
        if stage == "fit":
            left = Path(self.out).resolve() / f"threads_{trainer.global_rank}"
            atexit.register(lambda: left.write_text(str(gloo_threads())))

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss"]))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        results = {
            "losses": self.losses,
            "digest": state_digest(module.run.state),
            "steps": module.run.state.step,
            "global_step": trainer.global_step,
            "psnr": float(trainer.callback_metrics.get("val_psnr", float("nan"))),
            "parameters": [name for name, _ in module.named_parameters()],
        }
        (Path(self.out) / f"rank_{trainer.global_rank}.json").write_text(json.dumps(results))
