"""Make a Config: from preset, file, flags and assignments for a new run, or from the settings stored with a run."""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from splatcli.config.faults import fault
from splatcli.config.settings import (
    MADE_STARTS,
    REFERENCE_ITERATIONS,
    Config,
    OptimConfig,
    Schedule,
    sections,
    setting_flags,
)
from splatcli.errors import UsageError

#: The method of the original program (INRIA, since October 2024), without what later methods and this one add to it.
#: Learning rates are not scaled to the length of a run.
_ORIGINAL: dict[str, Any] = {
    "strategy.name": "adc",
    "strategy.cap_max": None,
    "strategy.revised_opacity": False,
    "strategy.prune_scale3d": 0.1,
    "strategy.max_scale3d": 0.0,
    "strategy.prune_near": 0.0,
    "optim.means_lr": 1.6e-4,
    "optim.means_lr_final": 1.6e-6,
    "optim.means_size_power": 0.0,
    "optim.log_scales_lr": 5e-3,
    "optim.quats_lr": 1e-3,
    "optim.logit_opacities_lr": 0.025,
    "optim.sh0_lr": 2.5e-3,
    "optim.shN_lr": 1.25e-4,
    "optim.final_factor": 1.0,
    "data.near_share": 0.0,
    "data.max_point_error": 0.0,
    "model.random_points": 100_000,
    "model.sky_points": 0,
    "schedule.num_downscales": 0,
    "train.dropout": 0.0,
    "train.sh_views": 0.0,
    "train.sh_prior": 0.0,
    "train.alpha_lambda": 0.0,
    "train.mask_lambda": 0.0,
    "train.max_view_error": 0.0,
}

#: ``--preset``; docs/quality.md has the figures of each.
PRESETS: dict[str, dict[str, Any]] = {
    "fast": {"strategy.cap_max": "auto", "train.iterations": 7_000},
    "default": {"strategy.cap_max": "auto"},
    "quality": {"strategy.cap_max": "auto", "train.antialiased": True},
    "3dgs": _ORIGINAL,
}

#: tomllib raises these: for bytes that are not UTF-8, bad grammar, numbers of thousands of digits, deep nesting.
UNREADABLE_TOML = (ValueError, RecursionError)


def preset_recipe(name: str | None) -> dict[str, Any]:
    """Return the settings of a preset; none for None. Raises UsageError for an unknown name."""
    if name is None:
        return {}
    try:
        return dict(PRESETS[name])
    except KeyError:
        raise UsageError(
            f"there is no preset {name!r}", where="--preset", remedy="one of " + ", ".join(PRESETS)
        ) from None


def strategy_recipe(name: str, iterations: int, schedule: Schedule, batch_size: int) -> dict[str, Any]:
    """Return the settings in which a strategy differs from the defaults, for a run of ``iterations`` steps.

    schedule: that of a run of this length.
    """
    if name == "absgrad":
        recipe: dict[str, Any] = {"strategy.long_axis_split": True}
        if schedule.reset_every >= schedule.refine_stop:  # no reset removes faint Gaussians close to cameras
            recipe["strategy.prune_opacity"] = 0.02
        return recipe
    if name != "mcmc":
        return {}
    scale = min(1.0, iterations / REFERENCE_ITERATIONS)
    # A run that makes its own points begins with a tenth of the cap, and has to reach it before growth ends.
    refinements = max(1.0, (25_000 - 500) * scale / schedule.refine_every)
    return {
        "model.init_opacity": 0.5,
        "model.init_scale": 0.1,
        "optim.logit_opacities_lr": 5e-2 * math.sqrt(batch_size),
        "schedule.refine_stop": max(1, round(25_000 * scale)),
        "strategy.cap_max": 1_000_000,
        "strategy.grow_factor": max(1.05, 10.0 ** (1.0 / (0.8 * refinements))),
        "strategy.opacity_reg": 0.01,
        "strategy.scale_reg": 0.01,
    }


def build_config(
    flags: dict[str, Any] | None = None,
    *,
    file: Path | None = None,
    assignments: list[str] | None = None,
    preset: str | None = None,
    by_flags: bool = True,
) -> Config:
    """Return the settings of a new run.

    preset: a name in PRESETS; every other source overrides it.
    flags: dotted key -> value; None means that the flag was not given.
    by_flags: whether errors call them by their flags, which Python's caller has not.
    file: a TOML file with the sections above; flags override it.
    assignments: ``a.b=value`` strings, which override all; the value is read as TOML, else taken as a string.
    Schedule and learning rates are scaled to ``train.iterations``, ``train.batch_size`` and the points that
    ``model.init`` starts from; keys that are given are not scaled. The default of ``train.iterations`` is divided by
    the batch size.
    Raises UsageError for unknown keys (with the nearest known one) and for values out of range.
    """
    given = read_settings(flags, file=file, assignments=assignments)
    values = preset_recipe(preset) | given
    try:
        config = Config.model_validate(_nest(values))
        batch, steps = config.train.batch_size, config.train.iterations
        if "train.iterations" not in given:
            values["train.iterations"] = steps = math.ceil(steps / batch)
        schedule = Schedule.scaled(steps)
        recipe = {
            "schedule": schedule.model_dump(),
            "optim": OptimConfig.scaled(steps, batch, made_points=config.model.init in MADE_STARTS).model_dump(),
        }
        strategy = strategy_recipe(config.strategy.name, steps, schedule, batch)
        if config.strategy.name != preset_recipe(preset).get("strategy.name", config.strategy.name):
            # Another strategy than the preset's is given: its own recipe counts.
            values = {key: value for key, value in values.items() if key in given or key not in strategy}
        merged = {**_flatten(config.model_dump()), **_flatten(recipe), **strategy, **values}
        config = Config.model_validate(_nest(merged))
    except ValidationError as error:
        flagged = [key for key, value in (flags or {}).items() if value is not None and by_flags]
        raise _invalid(error, file, flagged) from None
    return config


#: Settings that may be paths. A shell leaves ~ as it is in --masks=~/masks, and a TOML file and Python have none.
_PATHS = {"data.scene", "data.model", "data.images", "data.masks", "data.depths", "data.points", "model.init"}


def read_settings(
    flags: dict[str, Any] | None = None, *, file: Path | None = None, assignments: list[str] | None = None
) -> dict[str, Any]:
    """Return dotted key -> value of all settings that are given; the arguments are those of ``build_config``.

    Raises UsageError for unknown keys.
    """
    values: dict[str, Any] = {}
    if file is not None:
        values.update(_flatten(_read_toml(file)))
    values.update({key: value for key, value in (flags or {}).items() if value is not None})
    for text in assignments or []:
        key, equals, raw = text.partition("=")
        if not equals:
            raise UsageError(f"--set needs key=value, not {text!r}", remedy="e.g. --set optim.means_lr=1e-4")
        values[key.strip()] = _parse_value(raw.strip())
    known = set(_flatten(Config().model_dump()))
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "splat docs settings lists the keys"
            if key in sections():
                hint = f"{key} is a section, whose settings are {key}.NAME; splat docs settings lists them"
            raise UsageError(f"unknown setting {key!r}", where=file, remedy=hint)
    for key in sorted(_PATHS & values.keys()):
        if values[key] == "":
            raise UsageError("the name is empty", where=key, remedy="perhaps a variable of the shell is not set")
        if isinstance(values[key], str):
            values[key] = os.path.expanduser(values[key])
    if isinstance(values.get("data.points"), str):
        values["data.points"] = os.path.abspath(values["data.points"])  # a resumed run reads it again, from anywhere
    return values


def flat_settings(config: Config, *, as_json: bool = False) -> dict[str, Any]:
    """Return dotted key -> value of every setting. as_json: with the values that JSON has, infinities as None."""
    return _flatten(json.loads(config.model_dump_json()) if as_json else config.model_dump())


def with_settings(config: Config, values: dict[str, Any]) -> Config:
    """Return ``config`` with other values under dotted keys. Raises UsageError for values out of range."""
    try:
        return Config.model_validate(_nest({**flat_settings(config), **values}))
    except ValidationError as error:
        raise _invalid(error, None, values) from None


#: Settings that a new run decides by its scene, its first Gaussians or the memory where they have these values.
UNDECIDED: dict[str, Any] = {
    "strategy.cap_max": "auto",
    "memory.cap": None,
    "train.dropout": None,
    "train.sh_prior": None,
    "optim.means_size_power": None,
    "data.depth_type": None,
    "schedule.sh_degree_start": None,
    "schedule.num_downscales": None,
}


def resolve(config: Config, decided: Mapping[str, Any]) -> Config:
    """Return the settings with the values of ``decided``, dotted key -> value, where ``config`` leaves them open.

    Its keys are in UNDECIDED.
    """
    settings = flat_settings(config)
    return with_settings(config, {key: value for key, value in decided.items() if settings[key] == UNDECIDED[key]})


#: Settings that runs of earlier versions lack, with the values that they had in effect.
_LATER: dict[str, dict[str, Any]] = {
    "train": {"alpha_lambda": 0.0, "mask_lambda": 0.0, "sh_views": 0.0, "sh_prior": 0.0, "max_view_error": 0.0},
    "data": {"near_share": 0.0, "max_point_error": 0.0, "projection": "pinhole"},
    "optim": {"means_size_power": 0.0},
    "schedule": {"sh_degree_start": 0},
    "strategy": {"max_scale3d": 0.0},
}


def parse_config(data: Any) -> Config:
    """Return the settings that are stored with a run, validated; a run of an earlier version goes on as it began.

    Raises pydantic.ValidationError.
    """
    if isinstance(data, dict):
        for section, values in _LATER.items():
            if isinstance(data.get(section), dict):
                data = {**data, section: {**values, **data[section]}}
    return Config.model_validate(data)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin a file with a byte order mark
    except OSError as error:
        raise UsageError(
            f"cannot read the settings: {error.strerror}", where=path, remedy="--config names a TOML file"
        ) from None
    except UNREADABLE_TOML as error:
        raise UsageError(
            f"not valid TOML: {error}",
            where=path,
            remedy="a section and a setting look like this: [optim] sh0_lr = 0.01",
        ) from None


def _parse_value(raw: str) -> Any:
    try:
        values = tomllib.loads(f"value = {raw}")
    except UNREADABLE_TOML:
        return raw
    return values["value"] if len(values) == 1 else raw  # lines of their own are no part of a value


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


def _invalid(error: ValidationError, file: Path | None, flagged: Iterable[str]) -> UsageError:
    """Return pydantic's errors as a message; it names the flags among them, whose keys are ``flagged``, or the file."""
    defaults = flat_settings(Config())
    problems: dict[str, str] = {}
    joint: list[str] = []  # of several settings, whose names are in the text
    for one in error.errors():
        key, text = ".".join(map(str, one["loc"])), fault(one)
        if len(one["loc"]) < 2:
            joint.append(text)
            continue
        default = defaults.get(key)
        has_example = default not in (None, "") and not isinstance(default, bool)
        if has_example and one["type"] not in ("value_error", "literal_error"):
            text += f", e.g. {list(default) if isinstance(default, tuple) else default}"
        problems[key] = f"{_brief(_as_number(one['input']))}: {text}"
    names = [flags[0].names[0] for key, flags in setting_flags().items() if key in problems and key in flagged]
    listed = "; ".join([*(f"{key} = {text}" for key, text in problems.items()), *joint])
    return UsageError(
        f"{'this setting is' if len(problems) == 1 and not joint else 'these settings are'} not valid: {listed}",
        where=", ".join(names) or file,
        remedy="splat docs settings lists what each setting accepts",
    )


def _as_number(value: object) -> object:
    """Return the whole number that a flag's text stands for; other values as they are."""
    return int(value) if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value) else value


def _brief(value: object) -> str:
    """Return the text of a given value, in at most 100 characters."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 100 else f"{text[:97]}..."
