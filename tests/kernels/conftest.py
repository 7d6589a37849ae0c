"""Set-up of these tests: new buffers hold garbage; what the kernels run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels.simt import simulator
from tests.poisoned import poisoned_buffers as poisoned_buffers
from tests.ptx.machine import NEEDS_NVCC


@pytest.fixture(scope="module", params=["emulator", pytest.param("ptx", marks=NEEDS_NVCC)])
def simulation(request: pytest.FixtureRequest) -> Iterator[None]:
    """simulated() is on the emulator, and then on nvcc's PTX."""
    with simulator(request.param):
        yield
