"""Settings: a Config from a preset, a TOML file, flags and ``key=value`` texts, and the keys of all of them."""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from splatcli.config import Config, OptimConfig, Schedule
from splatcli.errors import UsageError
from splatcli.recipes import MADE_STARTS, preset_recipe, strategy_recipe

#: What tomllib raises: bytes that are no UTF-8, bad grammar, numbers of thousands of digits, brackets in thousands.
_UNREADABLE = (ValueError, RecursionError)


def build_config(
    flags: dict[str, Any] | None = None,
    *,
    file: Path | None = None,
    assignments: list[str] | None = None,
    preset: str | None = None,
) -> Config:
    """The settings of a new run.

    preset: a name in recipes.PRESETS, whose settings everything given wins over.
    flags: dotted key -> value; a value of None means that the flag was not given.
    file: a TOML file with the sections above.
    assignments: ``a.b=value`` strings; the value is read as TOML, else taken as a string.
    Later sources win. Schedule and learning rates are scaled to ``train.iterations``, ``train.batch_size`` and what
    ``model.init`` starts from; keys given explicitly are not. Where the iterations are not given, larger batches make
    fewer steps, on as many views.
    Raises UsageError for unknown keys (with the nearest known one) and for values out of range.
    """
    given = read_settings(flags, file=file, assignments=assignments)
    values = preset_recipe(preset) | given
    try:
        config = Config.model_validate(_nest(values))
        batch = config.train.batch_size
        if "train.iterations" not in given:
            config.train.iterations = values["train.iterations"] = math.ceil(config.train.iterations / batch)
        steps = config.train.iterations
        schedule = Schedule.scaled(steps)
        recipe = {
            "schedule": schedule.model_dump(),
            "optim": OptimConfig.scaled(steps, batch, made_points=config.model.init in MADE_STARTS).model_dump(),
        }
        strategy = strategy_recipe(config.strategy.name, steps, schedule, batch)
        merged = {**_flatten(config.model_dump()), **_flatten(recipe), **strategy, **values}
        config = Config.model_validate(_nest(merged))
    except ValidationError as error:
        raise _out_of_range(error, file) from None
    return config


def read_settings(
    flags: dict[str, Any] | None = None, *, file: Path | None = None, assignments: list[str] | None = None
) -> dict[str, Any]:
    """Dotted key -> value of all that is given, later sources winning; arguments as in ``build_config``.

    Raises UsageError for unknown keys.
    """
    values: dict[str, Any] = {}
    if file is not None:
        values.update(_flatten(_read_toml(file)))
    values.update({key: value for key, value in (flags or {}).items() if value is not None})
    for text in assignments or []:
        key, equals, raw = text.partition("=")
        if not equals:
            raise UsageError(f"--set wants key=value, got {text!r}", remedy="e.g. --set optim.means_lr=1e-4")
        values[key.strip()] = _parse_value(raw.strip())
    known = set(_flatten(Config().model_dump()))
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see docs/settings.md for the keys"
            raise UsageError(f"unknown setting {key!r}", where=file, remedy=hint)
    return values


def flat_settings(config: Config, *, as_json: bool = False) -> dict[str, Any]:
    """Dotted key -> value of every setting. as_json: as it is read back from JSON, infinities as None."""
    return _flatten(json.loads(config.model_dump_json()) if as_json else config.model_dump())


def with_settings(config: Config, values: dict[str, Any]) -> Config:
    """``config`` with other values under dotted keys. Raises UsageError for those out of range."""
    try:
        return Config.model_validate(_nest({**flat_settings(config), **values}))
    except ValidationError as error:
        raise _out_of_range(error, None) from None


def parse_config(data: dict[str, Any]) -> Config:
    """Settings stored with a run, validated again. Raises pydantic.ValidationError."""
    return Config.model_validate(data)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read the settings: {error.strerror}", where=path, remedy="--config names a TOML file"
        ) from None
    except _UNREADABLE as error:
        raise UsageError(
            f"not valid TOML: {error}",
            where=path,
            remedy="a section and a setting look like this: [optim] sh0_lr = 0.01",
        ) from None


def _parse_value(raw: str) -> Any:
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except _UNREADABLE:
        return raw


def _flatten(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _nest(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def _out_of_range(error: ValidationError, file: Path | None) -> UsageError:
    """What pydantic found, for people."""
    problems = [f"{'.'.join(map(str, e['loc']))} = {_brief(e['input'])}: {e['msg']}" for e in error.errors()]
    return UsageError(
        "settings out of range: " + "; ".join(problems), where=file, remedy="docs/settings.md has what each one takes"
    )


def _brief(value: object) -> str:
    """A value that someone gave, in at most 100 letters."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 100 else f"{text[:97]}..."
