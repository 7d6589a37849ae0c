"""Train under Lightning (splatcli[lightning]): python examples/with_lightning.py SCENE OUTPUT [STEPS]."""

from __future__ import annotations

import sys

from lightning.pytorch import Trainer

import splatcli
from splatcli.config import build_config
from splatcli.lightning import SceneData, SplatModule


def main(scene: str, output: str, steps: str = "2000") -> None:
    config = build_config({"data.scene": scene, "train.iterations": int(steps)}, preset="default")
    module = SplatModule(config)
    trainer = Trainer(
        accelerator="auto",
        devices=1,
        max_steps=int(steps),
        default_root_dir=output,
        logger=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, datamodule=SceneData(config))
    splatcli.Model(module.gaussians).export(f"{output}/scene.ply")
    print(f"{len(module.gaussians):,} Gaussians")


if __name__ == "__main__":
    main(*sys.argv[1:])
