"""Set-up of these tests: new buffers hold garbage; what the kernels run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels.simt import simulator
from tests.poisoned import poisoned_buffers as poisoned_buffers
from tests.ptx.machine import NEEDS_NVCC, machine


@pytest.fixture(scope="module", params=["emulator", pytest.param("ptx", marks=NEEDS_NVCC)])
def simulation(request: pytest.FixtureRequest) -> Iterator[None]:
    """simulated() is on the emulator, and then on nvcc's PTX."""
    with simulator(request.param):
        yield


@pytest.fixture(autouse=True)
def watched(request: pytest.FixtureRequest) -> Iterator[None]:
    """On nvcc's PTX every test runs under the race detector, and no kernel leaves the tensors that it was given."""
    if "simulation" not in request.fixturenames or "ptx" not in request.node.callspec.params.values():
        yield
        return
    with machine().races(), machine().bounds():
        yield
        assert machine().hazards() == []
