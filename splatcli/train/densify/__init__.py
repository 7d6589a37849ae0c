"""Density control: where Gaussians are added, removed or reset; one module a strategy."""

from __future__ import annotations

from splatcli.config import Config
from splatcli.train.densify.adc import AdcStrategy
from splatcli.train.densify.base import Strategy
from splatcli.train.densify.edit import Edit, apply_edit
from splatcli.train.densify.mcmc import McmcStrategy

__all__ = ["AdcStrategy", "Edit", "McmcStrategy", "Strategy", "apply_edit", "make_strategy"]


def make_strategy(config: Config, extent: float) -> Strategy:
    """The strategy that ``config.strategy.name`` names, for a scene of ``extent`` world units."""
    settings, iterations, cap = config.strategy, config.train.iterations, config.most_gaussians()
    match config.strategy.name:
        case "adc" | "absgrad":
            return AdcStrategy(settings, config.schedule, iterations, extent, cap)
        case "mcmc":
            return McmcStrategy(settings, config.schedule, iterations, config.train.seed, cap)
