"""Settings without effect: those that change nothing in a run, because of the value that another one has."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from splatcli.config.build import flat_settings
from splatcli.config.settings import MADE_STARTS, NAMED_STARTS, Config, setting_flags


def _is_one_of(*values: object) -> Callable[[object], bool]:
    return lambda value: value in values


#: Settings without effect: a setting, whether its value makes it so, and the others that then change nothing. Only
#: those that are certain; a plug-in may use any setting of its strategy.
_UNUSED: tuple[tuple[str, Callable[[object], bool], tuple[str, ...]], ...] = (
    ("strategy.name", _is_one_of("adc", "absgrad"), ("strategy.grow_factor", "strategy.noise_lr")),
    (
        "strategy.name",
        _is_one_of("mcmc"),
        (
            *("strategy.grow_grad2d", "strategy.grow_scale3d", "strategy.prune_scale3d", "strategy.prune_weakest"),
            *("strategy.revised_opacity", "strategy.long_axis_split"),
            *("schedule.reset_every", "schedule.prune_huge_start", "guard.reset_window"),
        ),
    ),
    ("strategy.long_axis_split", _is_one_of(True), ("strategy.grow_scale3d",)),
    ("data.depths", _is_one_of(None), ("train.depth_lambda", "data.depth_scale", "data.depth_type")),
    ("data.masks", _is_one_of("none"), ("data.mask_mode",)),
    ("data.blocks", _is_one_of(None), ("data.block_share",)),
    ("model.init", _is_one_of(*MADE_STARTS), ("model.sky_points",)),
    (
        "model.init",
        lambda value: value not in NAMED_STARTS,
        ("model.sky_points", "model.random_points", "model.init_opacity", "model.init_scale"),
    ),
    ("model.sh_degree", _is_one_of(0), ("optim.shN_lr", "schedule.sh_degree_start", "schedule.sh_degree_interval")),
    ("model.sh_degree", _is_one_of(0, 1, 2), ("train.sh_views", "train.sh_prior")),
    ("train.sh_views", _is_one_of(0.0), ("train.sh_prior",)),
    ("schedule.num_downscales", _is_one_of(0), ("schedule.resolution_schedule",)),
    ("train.background", lambda value: value != "black", ("train.alpha_lambda",)),
    ("views.pose_opt", _is_one_of(True), ("train.max_view_error",)),
    ("data.blocks", lambda value: value is not None, ("train.max_view_error",)),
    (
        "views.pose_opt",
        _is_one_of(False),
        ("views.pose_lr", "views.pose_lr_final", "views.pose_start", "views.pose_reg"),
    ),
    ("views.exposure", _is_one_of(False), ("views.exposure_lr", "views.exposure_lr_final")),
    (
        "views.bilateral_grid",
        _is_one_of(False),
        ("views.bilateral_grid_lr", "views.bilateral_grid_lr_final", "views.bilateral_grid_tv"),
    ),
    ("views.ppisp", _is_one_of(False), ("views.ppisp_lr", "views.ppisp_lr_final", "views.ppisp_reg")),
    ("guard.probe_every", _is_one_of(0), ("guard.probe_views", "guard.psnr_drop", "guard.reset_window")),
)


def unused_settings(config: Config, given: Iterable[str]) -> list[str]:
    """Return a sentence for each of the settings ``given`` that differs from its default and has no effect."""
    values, defaults = flat_settings(config), flat_settings(Config())
    found = []
    for key in dict.fromkeys(given):
        because = next((by for by, holds, keys in _UNUSED if key in keys and holds(values[by])), None)
        if because is not None and values[key] != defaults[key]:
            found.append(f"{_flag_of(key) or key} has no effect {_as_given(because, values[because])}")
    return found


def _flag_of(key: str, value: object = None) -> str | None:
    """Return the flag of a setting, of several switches the one that sets ``value``; None without a flag."""
    flags = setting_flags().get(key, [])
    return next((flag.names[0] for flag in flags if len(flags) == 1 or value in (None, flag.value)), None)


def _as_given(key: str, value: object) -> str:
    """Return ``with --flag VALUE`` or ``without --flag``: how a command line gives a setting a value."""
    flag = _flag_of(key, value)
    if value is None or value is False:
        return f"without {flag or key}"
    is_switch = flag is not None and all(one.metavar is None for one in setting_flags()[key])
    if is_switch:
        return f"with {flag}"
    return f"with {flag} {value}" if flag is not None else f"with {key} = {json.dumps(value)}"
