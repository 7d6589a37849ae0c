"""Train with density control of your own: python examples/own_strategy.py SCENE OUTPUT [STEPS].

At intervals this strategy removes the faintest Gaussians and clones as many of those with the largest gradients.
"""

from __future__ import annotations

import sys

import torch

import splatcli
from splatcli.gaussians import Gaussians
from splatcli.rasterizer.step_inputs import DensifyStats, Regularisation
from splatcli.train.densify import Refinement
from splatcli.train.events import Refined


class Exchange:
    """Exchanges a share of the Gaussians. splatcli/train/densify/base.py describes each member."""

    absgrad = True

    def __init__(self, every: int, until: int, share: float = 0.05) -> None:
        self.every, self.until, self.share = every, until, share

    def collects_stats(self, step: int) -> bool:
        return step < self.until

    def regularisation(self, step: int, means_lr: float) -> Regularisation:
        return Regularisation(opacity_reg=0.001)

    def refines_at(self, step: int) -> bool:
        return 0 < step < self.until and step % self.every == 0

    def refine(
        self, step: int, gaussians: Gaussians, stats: DensifyStats, generator: torch.Generator
    ) -> Refinement | None:
        count = int(self.share * len(gaussians))
        by_opacity = gaussians.logit_opacities.argsort(stable=True)
        wanted = stats.mean_grad2d().clone()
        wanted[by_opacity[:count]] = -1.0
        cloned = wanted.argsort(descending=True, stable=True)[:count]
        source = torch.cat([by_opacity[count:], cloned])
        fresh = torch.zeros(len(source), dtype=torch.bool, device=source.device)
        fresh[-count:] = True
        return Refinement(source, fresh, cloned=count, pruned=count)


class Printer:
    """Prints each refinement."""

    def on_refine(self, event: Refined) -> None:
        print(f"step {event.step}: {event.pruned} removed, {event.cloned} cloned")


def main(scene: str, output: str, steps: str = "2000") -> None:
    iterations = int(steps)
    strategy = Exchange(every=max(1, iterations // 20), until=iterations)
    print(splatcli.train(scene, output=output, iterations=iterations, strategy=strategy, callbacks=[Printer()]))


if __name__ == "__main__":
    main(*sys.argv[1:])
