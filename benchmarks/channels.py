"""Time of rasterization() by the number of channels, and of its native stages: python -m benchmarks.channels.

CPU seconds of one thread, the fastest of some calls: other work on the machine does not count.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch

from splatcli import rasterization
from splatcli.native.backend import Backend

GAUSSIANS, WIDTH, HEIGHT, REPEATS = 20_000, 320, 240, 5


def measure(channels: int, *, gradients: bool) -> tuple[float, Counter[str]]:
    """Return milliseconds of a call with its backward pass, and those of each native stage of the fastest call."""
    generator = torch.Generator().manual_seed(0)
    means = (3.0 * (torch.rand(GAUSSIANS, 3, generator=generator) - 0.5)).requires_grad_(gradients)
    quats = torch.randn(GAUSSIANS, 4, generator=generator)
    scales, opacities = torch.full((GAUSSIANS, 3), 0.03), 0.1 + 0.8 * torch.rand(GAUSSIANS, generator=generator)
    colors = torch.rand(GAUSSIANS, channels, generator=generator).requires_grad_(gradients)
    viewmat, K = torch.eye(4), torch.tensor([[300.0, 0.0, 160.0], [0.0, 300.0, 120.0], [0.0, 0.0, 1.0]])
    viewmat[2, 3] = 4.0
    call, stages = Backend.call, Counter[str]()

    def timed(self: Backend, name: str, *arguments: Any) -> int:
        start = time.process_time()
        result = call(self, name, *arguments)
        stages[name] += 1000.0 * (time.process_time() - start)
        return result

    best: tuple[float, Counter[str]] = (float("inf"), Counter())
    Backend.call = timed
    try:
        for _ in range(REPEATS):
            stages.clear()
            start = time.process_time()
            images, _, _ = rasterization(
                means, quats, scales, opacities, colors, viewmat[None], K[None], WIDTH, HEIGHT, packed=False
            )
            if gradients:
                images.sum().backward()
            best = min(best, (1000.0 * (time.process_time() - start), Counter(stages)), key=lambda one: one[0])
    finally:
        Backend.call = call
    return best


def main() -> None:
    torch.set_num_threads(1)
    for gradients in (False, True):
        for channels in (3, 16, 64):
            total, stages = measure(channels, gradients=gradients)
            parts = ", ".join(f"{name} {value:.1f}" for name, value in stages.most_common() if value >= 0.05 * total)
            print(f"{'with' if gradients else 'without'} gradients, {channels} channels: {total:.0f} ms; {parts}")


if __name__ == "__main__":
    main()
