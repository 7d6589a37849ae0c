"""Settings of a run that goes on: which may change, and how a state takes them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from splatcli.config import COLOUR_MAPS, UNDECIDED, Config, flat_settings, read_settings, with_settings
from splatcli.errors import UsageError
from splatcli.train.run_scene import CONSENT
from splatcli.train.state import TrainState, adam_settings

#: Settings that affect no trained bit.
_HARMLESS = (
    "save.",
    "guard.",
    "train.eval_every",
    "train.tensorboard",
    "data.cache_bytes",
    "data.points",
    "memory.offload",
)

#: Settings that took effect before the first step.
_FIXED_VIEWS = ("views.pose_opt", *(f"views.{name}" for name in COLOUR_MAPS))
_FIXED = ("model.", "data.", "train.seed", "train.filter_3d", "strategy.name")

#: Settings that a run has decided when it began, and for which none is no value of a resumed one.
_DECIDED = {key for key, value in UNDECIDED.items() if value is None and key != "memory.cap"}

#: Settings with which shN catches up on missed steps (AdamState).
_FLUSH_SETTINGS = {"optim.shN_lr", "optim.beta1", "optim.beta2", "optim.eps"}


def changed_config(
    stored: Config,
    *,
    file: Path | None = None,
    assignments: list[str] | None = None,
    values: dict[str, Any] | None = None,
    allowed: Iterable[str] = (),
) -> tuple[Config, list[str]]:
    """Return the settings to continue with, and a sentence for each changed one.

    file: settings as they were given to the run; differences are refused, unless they are harmless or ``allowed``.
    assignments: ``key=value`` strings, which request a change.
    values: dotted key -> value, which request a change too.
    Raises UsageError, listing the differences that need consent and those that are not possible.
    """
    before = flat_settings(stored)
    allowed = _known_keys(allowed, before)
    requested = read_settings(assignments=assignments) | (values or {})
    given = {
        key: value
        for key, value in (read_settings(file=file) | requested).items()
        if key != "data.scene"  # the flag --data says where the scene is
        and not (key in _DECIDED and value in (None, "none"))
    }
    config = with_settings(stored, given)
    after = flat_settings(config)
    different = [key for key in given if after[key] != before[key]]
    changes = {key: f"{key} was {shown(before[key])}, is {shown(after[key])}" for key in different}
    if "train.iterations" in changes and "schedule.lr_steps" not in changes:
        changes["train.iterations"] += "; the schedule stays, added steps have the final learning rate"
    fixed = [
        key for key in different if key in _FIXED_VIEWS or (key.startswith(_FIXED) and not key.startswith(_HARMLESS))
    ]
    if fixed:
        raise UsageError(
            "these settings are fixed when a run is made: " + "; ".join(changes[key] for key in fixed),
            where=file,
            remedy="leave them out, or start a new run from this one's model: splat train SCENE --init CKPT",
        )
    refused = [key for key in different if key not in requested.keys() | allowed and not key.startswith(_HARMLESS)]
    if refused:
        raise UsageError(
            "these settings are not those of the run: " + "; ".join(changes[key] for key in refused),
            where=file,
            remedy=" ".join(f"--allow-config-change {key}" for key in refused) + " goes on with them",
        )
    return config, [f"changed: {text}" for text in changes.values()]


def differing_settings(config: Config, stored: Config) -> dict[str, Any]:
    """Return dotted key -> value of the settings in which ``config``, of a new run, differs from those of a run.

    What the run has decided when it began is no difference.
    """
    before = flat_settings(stored)
    return {
        key: value
        for key, value in flat_settings(config).items()
        if value != before[key] and not (key in UNDECIDED and value == UNDECIDED[key])
    }


def check_iterations(config: Config, step: int) -> None:
    """Raise UsageError where a run has more steps than ``config`` asks for."""
    if config.train.iterations < step:
        raise UsageError(
            f"{config.train.iterations} iterations are asked for and {step} are done already",
            remedy=f"ask for more than {step}, or resume from an earlier checkpoint",
        )


def apply_config(state: TrainState, config: Config) -> None:
    """Continue ``state`` with ``config``; shN catches up under the old settings first.

    Where no training view may be left out any longer (``train.max_view_error`` = 0), those that were come back.
    """
    before, after = flat_settings(state.config), flat_settings(config)
    if any(before[key] != after[key] for key in _FLUSH_SETTINGS):
        state.adam.flush(state.gaussians, state.config.optim.shN_lr)
    if config.train.max_view_error == 0.0:
        state.sampler.skip(())
    state.config = config
    state.adam = replace(state.adam, **adam_settings(config.optim))


def _known_keys(allowed: Iterable[str], settings: dict[str, Any]) -> set[str]:
    keys = set(allowed)
    names = [*settings, *CONSENT]
    for key in sorted(keys - set(names)):
        near = difflib.get_close_matches(key, names, n=1)
        raise UsageError(
            f"there is no setting {key!r}",
            where="--allow-config-change",
            remedy=f"did you mean {near[0]}?" if near else f"a key of splat docs settings, or {' or '.join(CONSENT)}",
        )
    return keys


def shown(value: Any) -> str:
    """Return a setting's value for a message; the name none, as of a folder of masks, in quotes."""
    return "none" if value is None else '"none"' if value == "none" else str(value)
