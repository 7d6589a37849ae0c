"""Engines of every kind on one small view, and the gradients that a first step of theirs leaves in Adam's moments."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.testing import assert_close

from splatcli.gaussians import GROUPS, Gaussians
from splatcli.rasterizer import AsyncEngine, NativeEngine
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.reference_engine import ReferenceEngine
from splatcli.rasterizer.step_inputs import StepEngine
from tests.kernels.simt import simulated
from tests.native.cases import float32, float64, named

F64 = torch.float64
WIDTH, HEIGHT = 37, 29
LRS = dict.fromkeys(GROUPS, 1e-3)
ENGINES = ["reference", "float64", "float32", "simt"]


def make_engine(kind: str, capacity: int = 0) -> tuple[StepEngine, torch.dtype]:
    """Return an engine and the dtype that it trains. capacity: of the emulator at first, in tile intersections."""
    if kind == "reference":
        return ReferenceEngine(), F64
    if kind == "simt":
        return AsyncEngine(simulated(), capacity=capacity), torch.float32
    backend = float64() if kind == "float64" else float32("portable")
    return NativeEngine(backend), backend.dtype


def masked_corner() -> Tensor:
    """[H, W] bool, a mask of the view."""
    masked = torch.zeros(HEIGHT, WIDTH, dtype=torch.bool)
    masked[:9, :15] = True
    return masked


def assert_gradients(adam: AdamState, parameters: Gaussians) -> None:
    """The gradients of ``parameters``, leaves, are those of the one step that ``adam`` has taken."""
    for name in GROUPS:
        gradient = getattr(parameters, name).grad
        got = 10.0 * getattr(adam.exp_avg, name).double()  # the first moment after one step is a tenth of the gradient
        scale = float(gradient.abs().max())
        assert scale > 0
        exact = adam.exp_avg.means.dtype == F64
        assert_close(got, gradient, rtol=0, atol=(1e-9 if exact else 1e-3) * scale, msg=named(name))
