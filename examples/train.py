"""Train a scene: python examples/train.py SCENE OUTPUT [STEPS]."""

from __future__ import annotations

import sys

import splatcli


def main(scene: str, output: str, steps: str = "2000") -> None:
    run = splatcli.train(scene, output=output, iterations=int(steps))
    print(run)
    print(f"{len(run.model):,} Gaussians in {run.checkpoint}")
    run.model.export(f"{output}/scene.ply")


if __name__ == "__main__":
    main(*sys.argv[1:])
