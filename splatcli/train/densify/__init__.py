"""Density control: strategies decide where Gaussians are added, removed or reset; one module each, and the registry."""

from __future__ import annotations

from collections.abc import Callable

from splatcli import plugins
from splatcli.config import Config
from splatcli.errors import UsageError
from splatcli.train.densify.base import Refinement, Strategy, apply_refinement
from splatcli.train.densify.default import AdcStrategy
from splatcli.train.densify.mcmc import McmcStrategy

__all__ = [
    "STRATEGIES",
    "AdcStrategy",
    "McmcStrategy",
    "Refinement",
    "Strategy",
    "apply_refinement",
    "check_strategy",
    "make_strategy",
]

#: ``strategy.name`` -> what makes the strategy from a run's settings and the scene's extent in world units.
STRATEGIES: dict[str, Callable[[Config, float], Strategy]] = {
    "absgrad": AdcStrategy.of,
    "adc": AdcStrategy.of,
    "mcmc": McmcStrategy.of,
}


def make_strategy(config: Config, extent: float) -> Strategy:
    """Return the strategy that ``config.strategy.name`` names, for a scene of ``extent`` world units.

    Raises UsageError for an unknown name, and for a plug-in that does not work.
    """
    name = config.strategy.name
    if name in STRATEGIES:
        return STRATEGIES[name](config, extent)
    plugin = _plugin(name)
    factory = plugin.load()
    if not callable(factory):
        raise plugin.fault(f"{factory!r} cannot be called with (config, extent)")
    with plugin.running():
        strategy = factory(config, extent)
    if not isinstance(strategy, Strategy):
        raise plugin.fault(f"{type(strategy).__name__} lacks a method of splatcli.train.densify.Strategy")
    return strategy


def check_strategy(config: Config) -> None:
    """Raise UsageError when ``config.strategy.name`` names no strategy, or a plug-in that cannot be imported."""
    if config.strategy.name not in STRATEGIES:
        _plugin(config.strategy.name).load()


def _plugin(name: str) -> plugins.Plugin:
    found = plugins.plugins(plugins.STRATEGIES)
    if name not in found:
        raise UsageError(
            f"strategy.name = {name!r}: there is no such strategy",
            remedy=f"one of {', '.join([*STRATEGIES, *found])}; a package that brings another has to be "
            "installed, and an object of one's own given to splatcli.Trainer.resume(RUN, strategy=...)",
        )
    return found[name]
