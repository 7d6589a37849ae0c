"""Density control: where Gaussians are added, removed or reset; one module a strategy."""

from __future__ import annotations

from splatcli.config import Config
from splatcli.train.strategies.base import Strategy
from splatcli.train.strategies.default import DefaultStrategy
from splatcli.train.strategies.edit import Edit, apply_edit

__all__ = ["DefaultStrategy", "Edit", "Strategy", "apply_edit", "make_strategy"]


def make_strategy(config: Config, extent: float) -> Strategy:
    """The strategy that ``config.strategy.name`` names, for a scene of ``extent`` world units."""
    strategies = {"default": DefaultStrategy}
    capped = config.strategy.model_copy(update={"cap_max": config.most_gaussians()})
    return strategies[config.strategy.name](capped, config.schedule, config.train.iterations, extent)
