"""Recipes: what settings follow from a preset, from a strategy and from the length of a run.

Each gives dotted keys and values, as a settings file would; what a user gives wins over all of them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from splatcli.errors import UsageError

if TYPE_CHECKING:
    from splatcli.config import Schedule

#: The run length that the field's schedules are written for.
REFERENCE_ITERATIONS = 30_000

#: Words that ``model.init`` takes beside a path: the scene's own points; and those of which a run makes its own points.
SFM, HULL, RANDOM = "sfm", "hull", "random"
MADE_STARTS = (HULL, RANDOM)
NAMED_STARTS = (SFM, *MADE_STARTS)

#: ``--preset``: docs/quality.md has what each brings.
PRESETS: dict[str, dict[str, Any]] = {
    "fast": {"strategy.cap_max": "auto", "train.iterations": 7_000},
    "default": {"strategy.cap_max": "auto"},
    "quality": {"strategy.cap_max": "auto", "train.antialiased": True},
}


def preset_recipe(name: str | None) -> dict[str, Any]:
    """What a preset sets; nothing for None. Raises UsageError for a name that there is not."""
    if name is None:
        return {}
    try:
        return dict(PRESETS[name])
    except KeyError:
        raise UsageError(
            f"there is no preset {name!r}", where="--preset", remedy="one of " + ", ".join(PRESETS)
        ) from None


def strategy_recipe(name: str, iterations: int, schedule: Schedule, batch_size: int = 1) -> dict[str, Any]:
    """What a strategy wants otherwise than the settings' own defaults, in a run of so many steps on so many views.

    schedule: of a run of that length.
    """
    if name == "absgrad":
        recipe: dict[str, Any] = {"strategy.long_axis_split": True}
        if schedule.reset_every >= schedule.refine_stop:  # nothing brings down what is faint and in the way
            recipe["strategy.prune_opacity"] = 0.02
        return recipe
    if name != "mcmc":
        return {}
    scale = min(1.0, iterations / REFERENCE_ITERATIONS)
    # A run that makes its own points begins with a tenth of the cap, and is to come to it a while before growth ends.
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
