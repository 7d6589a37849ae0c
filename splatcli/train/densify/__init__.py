"""Density control: strategies decide where Gaussians are added, removed or reset; one module each, and the registry."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable
from pathlib import Path

import torch

from splatcli import plugins
from splatcli.config import Config
from splatcli.errors import UsageError
from splatcli.gaussians import Gaussians
from splatcli.rasterizer.step_inputs import DensifyStats, Regularisation
from splatcli.train.densify.base import Refinement, Strategy, apply_refinement
from splatcli.train.densify.default import AdcStrategy
from splatcli.train.densify.mcmc import McmcStrategy

__all__ = [
    "STRATEGIES",
    "AdcStrategy",
    "McmcStrategy",
    "Refinement",
    "Strategy",
    "StrategyFactory",
    "apply_refinement",
    "check_strategy",
    "make_strategy",
    "refinement_of",
]

#: Makes a strategy of a run's settings and the scene's extent in world units.
StrategyFactory = Callable[[Config, float], Strategy]

#: ``strategy.name`` -> what makes the strategy.
STRATEGIES: dict[str, StrategyFactory] = {
    "absgrad": AdcStrategy,
    "adc": AdcStrategy,
    "mcmc": McmcStrategy,
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
    return PluginStrategy(strategy, plugin)


def check_strategy(config: Config, run: Path | None = None) -> None:
    """Raise UsageError when ``config.strategy.name`` names no strategy, or a plug-in that cannot be imported.

    run: the run that is to continue, which an object of the caller's may have trained; None for a new one.
    """
    if config.strategy.name not in STRATEGIES:
        _plugin(config.strategy.name, run).load()


class PluginStrategy:
    """The strategy of a plug-in, where what its code raises is an error that names plug-in, class and method."""

    def __init__(self, strategy: Strategy, plugin: plugins.Plugin) -> None:
        self._strategy = strategy
        self._plugin = plugin

    def _running(self, method: str) -> contextlib.AbstractContextManager[None]:
        return self._plugin.running(f"{type(self._strategy).__name__}.{method}")

    def _check(self, method: str, result: object, kind: type) -> None:
        if not isinstance(result, kind):
            name = f"{type(self._strategy).__name__}.{method}"
            raise self._plugin.fault(f"{name}() returned {type(result).__name__}, no {kind.__name__}")

    @property
    def absgrad(self) -> bool:
        with self._running("absgrad"):
            return self._strategy.absgrad

    def collects_stats(self, step: int) -> bool:
        with self._running("collects_stats"):
            return self._strategy.collects_stats(step)

    def regularisation(self, step: int, means_lr: float) -> Regularisation:
        with self._running("regularisation"):
            regularisation = self._strategy.regularisation(step, means_lr)
        self._check("regularisation", regularisation, Regularisation)
        return regularisation

    def refines_at(self, step: int) -> bool:
        with self._running("refines_at"):
            return self._strategy.refines_at(step)

    def uses_weights(self, step: int) -> bool:
        uses = getattr(self._strategy, "uses_weights", None)
        with self._running("uses_weights"):
            return uses is not None and uses(step)

    def refine(
        self, step: int, gaussians: Gaussians, stats: DensifyStats, generator: torch.Generator
    ) -> Refinement | None:
        with self._running("refine"):
            refinement = self._strategy.refine(step, gaussians, stats, generator)
        if refinement is not None:
            self._check("refine", refinement, Refinement)
            try:
                refinement.check(gaussians)
            except ValueError as error:
                name = f"{type(self._strategy).__name__}.refine"
                raise self._plugin.fault(f"{name}() returned a refinement whose {error}") from None
        return refinement


def refinement_of(
    strategy: Strategy, step: int, gaussians: Gaussians, stats: DensifyStats, generator: torch.Generator
) -> Refinement | None:
    """Return what ``strategy.refine()`` does; that of the caller's strategies is checked. Raises UsageError."""
    refinement = strategy.refine(step, gaussians, stats, generator)
    if refinement is None or type(strategy) in (AdcStrategy, McmcStrategy, PluginStrategy):
        return refinement
    try:
        if not isinstance(refinement, Refinement):
            raise ValueError(f"type is {type(refinement).__name__}")
        refinement.check(gaussians)
    except ValueError as error:
        raise UsageError(
            f"{type(strategy).__name__}.refine() returned a refinement whose {error}",
            where="strategy",
            remedy="splatcli/train/densify/base.py, class Refinement, describes it",
        ) from None
    return refinement


def _plugin(name: str, run: Path | None = None) -> plugins.Plugin:
    """Return the plug-in of a name. Raises UsageError. run: see check_strategy()."""
    found = plugins.plugins(plugins.STRATEGIES)
    if name in found:
        return found[name]
    if run is not None:
        raise UsageError(
            f"this run was trained with the strategy {name!r}, which is not here: it is an object in Python, or of a "
            "package that is not installed",
            where=run,
            remedy=f"continue in Python: splatcli.Trainer.resume({str(run)!r}, strategy=...).run(); or install the "
            "package",
        )
    names = [*STRATEGIES, *found]
    near = difflib.get_close_matches(name.lower(), names, n=1)
    raise UsageError(
        f"strategy.name = {name!r}: there is no such strategy",
        remedy=(f"did you mean {near[0]}? " if near else "")
        + f"one of {', '.join(names)}; a package that brings another has to be installed",
    )
