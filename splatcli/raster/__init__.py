"""Rasterization: render() with gradients, and the fused training step."""

from splatcli.raster.adam import AdamState
from splatcli.raster.engine import DeferredEngine, NativeEngine, engine_for
from splatcli.raster.rendering import Render, render
from splatcli.raster.stats import GrowthStats
from splatcli.raster.stepping import Pressure, StepEngine, StepInputs

__all__ = [
    "AdamState",
    "DeferredEngine",
    "GrowthStats",
    "NativeEngine",
    "Pressure",
    "Render",
    "StepEngine",
    "StepInputs",
    "engine_for",
    "render",
]
