"""Rasterization: render() with gradients, and the fused training step."""

from splatcli.raster.adam import AdamState
from splatcli.raster.engine import NativeEngine, StepEngine, engine_for
from splatcli.raster.rendering import Render, render
from splatcli.raster.stats import GrowthStats

__all__ = ["AdamState", "GrowthStats", "NativeEngine", "Render", "StepEngine", "engine_for", "render"]
