"""Density control: where Gaussians are added, removed or reset; one module a strategy."""

from __future__ import annotations

from splatcli.config import Config
from splatcli.train.strategies.base import Strategy
from splatcli.train.strategies.default import DefaultStrategy
from splatcli.train.strategies.edit import Edit, apply_edit
from splatcli.train.strategies.mcmc import McmcStrategy

__all__ = ["DefaultStrategy", "Edit", "McmcStrategy", "Strategy", "apply_edit", "make_strategy"]


def make_strategy(config: Config, extent: float) -> Strategy:
    """The strategy that ``config.strategy.name`` names, for a scene of ``extent`` world units."""
    settings, iterations, cap = config.strategy, config.train.iterations, config.most_gaussians()
    match config.strategy.name:
        case "default" | "absgrad":
            return DefaultStrategy(settings, config.schedule, iterations, extent, cap)
        case "mcmc":
            return McmcStrategy(settings, config.schedule, iterations, config.train.seed, cap)
