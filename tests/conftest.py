"""What all tests share: which of them run on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

REQUIRE_GPU = "SPLATCLI_REQUIRE_GPU"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what cannot run here.

    With SPLATCLI_REQUIRE_GPU=1 a missing GPU is a failure instead, so that no job is green by skipping.
    """
    gpus = torch.cuda.device_count()
    insist = os.environ.get(REQUIRE_GPU) == "1"
    for item in items:
        needed = 2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0
        if gpus < needed and not insist:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} NVIDIA GPU(s), found {gpus}"))
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow; run with --slow"))


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    """A test that changes torch's thread count changes it for itself only."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
