"""Train with a loss of your own, here a robust one: python examples/own_loss.py SCENE OUTPUT [STEPS]."""

from __future__ import annotations

import sys

from torch import Tensor

import splatcli
from splatcli.train.events import Stepped


def robust(image: Tensor, target: Tensor, counts: Tensor | None) -> Tensor:
    """Charbonnier's loss: squares for small differences, absolute values for large ones. counts: see docs/api.md."""
    differences = ((image - target).square() + 1e-4).sqrt().mean(dim=-1)
    return differences.mean() if counts is None else differences[counts].mean()


class Printer:
    """Prints the loss now and then."""

    def __init__(self, every: int) -> None:
        self.every = every

    def on_step(self, event: Stepped) -> None:
        if event.step % self.every == 0:
            print(f"step {event.step}: loss {event.loss:.4f}, {event.num_gaussians:,} Gaussians")


def main(scene: str, output: str, steps: str = "2000") -> None:
    iterations = int(steps)
    printer = Printer(every=max(1, iterations // 20))
    print(splatcli.train(scene, output=output, iterations=iterations, loss=robust, callbacks=[printer]))


if __name__ == "__main__":
    main(*sys.argv[1:])
