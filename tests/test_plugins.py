"""Strategies of other packages: found by name, imported only when asked for, named when they do not work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from splatcli.config import build_config
from splatcli.errors import UsageError
from splatcli.plugins import STRATEGIES, plugins
from splatcli.train.densify import AdcStrategy, check_strategy, make_strategy
from tests.plugin_packages import install

WORKING = """
from splatcli.train.densify import AdcStrategy

class Mine(AdcStrategy):
    pass
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on sys.path."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_strategy_of_another_package_is_made_by_its_name(place: Path) -> None:
    install(place, "splat_mine", WORKING, {STRATEGIES: {"mine": "splat_mine:Mine.of"}})
    assert "mine" in plugins(STRATEGIES)
    assert "splat_mine" not in sys.modules  # listed, not imported
    config = build_config({"strategy.name": "mine"})
    check_strategy(config)
    strategy = make_strategy(config, 2.0)
    assert isinstance(strategy, AdcStrategy)
    assert type(strategy).__name__ == "Mine"


def test_an_unknown_name_lists_what_exists(place: Path) -> None:
    install(place, "splat_listed", "raise RuntimeError('never imported')", {STRATEGIES: {"listed": "splat_listed:X"}})
    with pytest.raises(UsageError, match=r"no such strategy\n.*absgrad, adc, mcmc, listed"):
        check_strategy(build_config({"strategy.name": "unlisted"}))


@pytest.mark.parametrize(
    ("module", "point", "fault"),
    [
        ("import no_such_package_anywhere", "splat_broken:Mine", "ModuleNotFoundError: No module named 'no_such_pack"),
        ("", "splat_broken:Mine", "has no attribute 'Mine'"),
        ("", "no such target", "AttributeError"),
        ("Mine = 5", "splat_broken:Mine", "5 cannot be called"),
        ("def Mine(config): ...", "splat_broken:Mine", "TypeError: Mine() takes 1 positional argument"),
        ("def Mine(config, extent): return 5", "splat_broken:Mine", "int lacks a method"),
    ],
)
def test_a_broken_plugin_is_named_with_its_package_and_entry_point(
    place: Path, monkeypatch: pytest.MonkeyPatch, module: str, point: str, fault: str
) -> None:
    monkeypatch.delitem(sys.modules, "splat_broken", raising=False)
    install(place, "splat_broken", module, {STRATEGIES: {"broken": point}})
    make_strategy(build_config({"strategy.name": "adc"}), 2.0)  # nobody else is harmed
    with pytest.raises(UsageError) as caught:
        make_strategy(build_config({"strategy.name": "broken"}), 2.0)
    assert fault in caught.value.what
    assert caught.value.where == f"splat_broken (splatcli.strategies: broken = {point})"


def test_two_packages_with_one_name_are_both_named(place: Path) -> None:
    for package in ("splat_one", "splat_two"):
        install(place, package, WORKING, {STRATEGIES: {"twice": f"{package}:Mine.of"}})
    with pytest.raises(UsageError, match=r"several packages .*(splat_one.*splat_two|splat_two.*splat_one)"):
        check_strategy(build_config({"strategy.name": "twice"}))


def test_a_config_with_an_unknown_strategy_can_be_read(place: Path) -> None:
    """A checkpoint of a run with a plug-in is rendered and exported where the plug-in is not installed."""
    assert build_config({"strategy.name": "of_another_machine"}).strategy.name == "of_another_machine"
    with pytest.raises(UsageError, match="settings out of range"):
        build_config({"strategy.name": "../x"})
