"""A short run under Lightning, a program: ``python -m tests.distributed.lightning_run SCENE OUT STRATEGY PRECISION``.

Each rank writes OUT/rank_R.json. The strategy "one" is a single device.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from splatcli.config import Config, build_config

STEPS = 20


def config_of(scene: str) -> Config:
    """Seven training photos, of which two ranks cannot have as many each; two views a step."""
    return build_config(
        {
            "data.scene": scene,
            "data.test_every": 4,
            "model.init": "random",
            "model.random_points": 100,
            "model.sh_degree": 1,
            "strategy.prune_scale3d": 100.0,
            "strategy.prune_opacity": 1e-4,
            "strategy.grow_grad2d": 1e-6,
            "strategy.cap_max": 150,
            "schedule.refine_start": 3,
            "schedule.refine_every": 5,
            "schedule.refine_stop": 18,
            "train.batch_size": 2,
            "train.iterations": STEPS,
            "train.background": "random",
        }
    )


def main(scene: str, out: str, strategy: str, precision: str) -> None:
    warnings.simplefilter("ignore")  # Lightning's own, about workers and loggers
    import lightning.pytorch as pl

    from splatcli.lightning import SceneData, SplatModule
    from tests.distributed.lightning_callback import WriteResults

    config = config_of(scene)

    devices = {} if strategy == "one" else {"strategy": strategy}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1 if strategy == "one" else 2,
        max_steps=STEPS,
        precision=precision,  # type: ignore[arg-type]
        callbacks=[WriteResults(out)],
        default_root_dir=out,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **devices,  # type: ignore[arg-type]
    )
    trainer.fit(SplatModule(config), datamodule=SceneData(config))
    if strategy != "ddp_spawn":  # there the run has ended with its processes
        trainer.save_checkpoint(Path(out) / "lightning.ckpt")


if __name__ == "__main__":
    main(*sys.argv[1:])
