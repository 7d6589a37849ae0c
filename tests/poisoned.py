"""New buffers hold garbage, not the zeros of fresh pages: nothing may depend on what nobody has written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from splatcli.rasterizer.memory_budget import Arena

take = Arena.take


def take_poisoned(arena: Arena, name: str, numel: int, dtype: torch.dtype) -> Tensor:
    """Return the buffer, filled with NaN or with large numbers when it is new."""
    before = arena._buffers.get(name)
    buffer = take(arena, name, numel, dtype)
    if buffer is not before:
        if dtype.is_floating_point:
            buffer.fill_(torch.nan)
        else:
            buffer.view(torch.uint8).fill_(0xC7)
    return buffer


@pytest.fixture(autouse=True)
def poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arena, "take", take_poisoned)
