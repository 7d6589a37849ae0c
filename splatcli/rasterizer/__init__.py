"""Rasterization: render() with gradients, and the fused training step."""

from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.rendering import Render, render
from splatcli.rasterizer.step_inputs import DensifyStats, Regularisation, StepEngine, StepInputs
from splatcli.rasterizer.train_step import AsyncEngine, NativeEngine, engine_for

__all__ = [
    "AdamState",
    "AsyncEngine",
    "DensifyStats",
    "NativeEngine",
    "Regularisation",
    "Render",
    "StepEngine",
    "StepInputs",
    "engine_for",
    "render",
]
