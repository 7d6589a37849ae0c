"""Noise on the CUDA kernels, under the emulator: the same bits as the CPU twin."""

from __future__ import annotations

import pytest
import torch

from splatcli.native import abi
from splatcli.native.backend import Backend
from tests.kernels.simt import simulated
from tests.native.cases import NEEDS_COMPILER
from tests.rasterizer.scenes import random_gaussians

pytestmark = [NEEDS_COMPILER, pytest.mark.usefixtures("simulation")]


@pytest.mark.parametrize("n", [1, 255, 600])
def test_noise_has_the_bits_of_the_cpu_twin(n: int) -> None:
    results = []
    for backend in (simulated(), Backend.cpu(isa="portable", threads=1)):
        gaussians = random_gaussians(6, n, sh_degree=0)
        gaussians.logit_opacities -= 6.0
        before = gaussians.means.clone()
        for step in (1, 2**35):
            job = abi.Noise(seed=2**63 + 5, step=step, scale=30.0, threshold=0.005, steepness=100.0)
            backend.call("noise", backend.arrays(gaussians), job)
        assert bool((gaussians.means != before).any())
        results.append(gaussians.means)
    assert torch.equal(*results)


def test_a_view_that_overflowed_is_not_pushed() -> None:
    backend, gaussians = simulated(), random_gaussians(6, 300, sh_degree=0)
    before, counters = gaussians.means.clone(), torch.tensor([0, 0, 0, 1])
    job = abi.Noise(seed=1, step=1, scale=1e9, threshold=0.005, steepness=100.0, counters=counters.data_ptr())
    backend.call("noise", backend.arrays(gaussians), job)
    assert torch.equal(gaussians.means, before)
    counters.zero_()
    backend.call("noise", backend.arrays(gaussians), job)
    assert not torch.equal(gaussians.means, before)
