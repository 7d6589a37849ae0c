"""Config: frozen at every level, resolved once, and stored settings of earlier versions load."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from splatcli.config import Config, resolve, with_settings


def test_a_config_is_frozen_at_every_level() -> None:
    config = Config()
    with pytest.raises(ValidationError, match="frozen"):
        config.train = config.train  # type: ignore[misc]
    for name in Config.model_fields:
        section = getattr(config, name)
        for key in type(section).model_fields:
            with pytest.raises(ValidationError, match="frozen"):
                setattr(section, key, getattr(section, key))


def test_other_settings_make_another_config() -> None:
    config = Config()
    other = with_settings(config, {"optim.means_lr": 1e-3})
    assert (config.optim.means_lr, other.optim.means_lr) == (1.6e-4, 1e-3)
    assert other.train == config.train


def test_resolve_replaces_auto_and_leaves_a_given_cap() -> None:
    auto, given = (with_settings(Config(), {"strategy.cap_max": cap}) for cap in ("auto", 500))
    assert resolve(auto, auto_cap=70).max_gaussians() == 70
    assert resolve(given, auto_cap=70).max_gaussians() == 500
    assert resolve(given, auto_cap=70, memory_cap=60).max_gaussians() == 60
