"""Settings that a resumed run is given anew: which may change, which need consent, and what they change at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from splatcli.config import Config, flat_settings, read_settings, with_settings
from splatcli.errors import UsageError
from splatcli.train.resume import CONSENT
from splatcli.train.state import TrainState

#: They touch no bit that is trained.
_HARMLESS = ("save.", "guard.", "train.eval_every", "data.cache_bytes", "memory.offload")

#: They were used up before the first step.
_FIXED_VIEWS = ("views.pose_opt", "views.exposure", "views.bilateral_grid")
_FIXED = ("model.", "data.", "train.seed", "train.filter_3d", "strategy.name")

#: What the moments of SH coefficients that are behind are made up for with (AdamState.rest_steps).
_CATCHING_UP = {"optim.shN_lr", "optim.beta1", "optim.beta2", "optim.eps"}


def changed_config(
    stored: Config, *, file: Path | None = None, assignments: list[str] | None = None, allowed: Iterable[str] = ()
) -> tuple[Config, list[str]]:
    """The settings to go on with, and a sentence for each that is another now.

    file: settings as they were given to the run; differences are refused, unless they are harmless or ``allowed``.
    assignments: ``key=value`` strings, which state a wish.
    Raises UsageError, listing the differences that need consent and those that cannot be.
    """
    before = flat_settings(stored)
    allowed = _known_keys(allowed, before)
    wished = set(read_settings(assignments=assignments))
    values = {
        key: value
        for key, value in read_settings(file=file, assignments=assignments).items()
        if key != "data.scene"  # the flag --data says where the scene is
    }
    config = with_settings(stored, values)
    after = flat_settings(config)
    different = [key for key in values if after[key] != before[key]]
    told = {key: f"{key} was {shown(before[key])}, is {shown(after[key])}" for key in different}
    if "train.iterations" in told:
        told["train.iterations"] += "; the schedule stays, added steps have the final learning rate"
    fixed = [
        key for key in different if key in _FIXED_VIEWS or (key.startswith(_FIXED) and not key.startswith(_HARMLESS))
    ]
    if fixed:
        raise UsageError(
            "these settings are fixed when a run is made: " + "; ".join(told[key] for key in fixed),
            where=file,
            remedy="leave them out, or start a new run from this one's model: splat train SCENE --init CKPT",
        )
    refused = [key for key in different if key not in wished | allowed and not key.startswith(_HARMLESS)]
    if refused:
        raise UsageError(
            "these settings are not those of the run: " + "; ".join(told[key] for key in refused),
            where=file,
            remedy=" ".join(f"--allow-config-change {key}" for key in refused) + " goes on with them",
        )
    return config, [f"changed: {text}" for text in told.values()]


def apply_config(state: TrainState, config: Config) -> None:
    """``state`` goes on with ``config``; what was left to be done under the old settings is done first."""
    before, after = flat_settings(state.config), flat_settings(config)
    if any(before[key] != after[key] for key in _CATCHING_UP):
        state.adam.flush(state.gaussians, state.config.optim.shN_lr)
    state.config = config
    optim = config.optim
    state.adam.beta1, state.adam.beta2, state.adam.eps = optim.beta1, optim.beta2, optim.eps


def _known_keys(allowed: Iterable[str], settings: dict[str, Any]) -> set[str]:
    keys = set(allowed)
    names = [*settings, *CONSENT]
    for key in sorted(keys - set(names)):
        near = difflib.get_close_matches(key, names, n=1)
        raise UsageError(
            f"there is no setting {key!r}",
            where="--allow-config-change",
            remedy=f"did you mean {near[0]}?" if near else f"a key of docs/settings.md, or {' or '.join(CONSENT)}",
        )
    return keys


def shown(value: Any) -> str:
    """A setting's value in a message."""
    return "none" if value is None else str(value)
