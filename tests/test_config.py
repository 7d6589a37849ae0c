"""Config: frozen at every level, resolved once, and stored settings of earlier versions load."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
from pydantic import ValidationError

from splatcli.config import (
    COLOUR_MAPS,
    Config,
    build_config,
    read_settings,
    resolve,
    setting_fields,
    unused_settings,
    with_settings,
)
from splatcli.config.unused import _UNUSED
from splatcli.errors import UsageError
from splatcli.train.changed_settings import changed_config


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
    assert resolve(auto, {"strategy.cap_max": 70}).max_gaussians() == 70
    assert resolve(given, {"strategy.cap_max": 70}).max_gaussians() == 500
    assert resolve(given, {"strategy.cap_max": 70, "memory.cap": 60}).max_gaussians() == 60


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbf[optim]\r\nsh0_lr = 0.01\r\n")
    assert build_config(file=tmp_path / "a.toml").optim.sh0_lr == 0.01


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("optim.sh0_lr=true", "optim.sh0_lr = True: takes neither true nor false"),
        ("train.iterations=false", "train.iterations = False: takes neither true nor false"),
        ("optim=5", "optim is a section, whose settings are optim.NAME"),
        ("optim.sh0_lr=0.1\nx = 2", "optim.sh0_lr = '0.1\\nx = 2': expected a number, e.g. 0.0025"),
        ("optim.sh0_lr=0", "optim.sh0_lr = 0: expected a number above 0, e.g. 0.0025"),
        ("train.batch_size=5000", "train.batch_size = 5000: expected a number of at most 4096, e.g. 1"),
        ("train.batch_size=1.5", "train.batch_size = 1.5: expected a whole number, e.g. 1"),
        ("data.strict=perhaps", "data.strict = 'perhaps': expected true or false"),
        ("data.mask_mode=x", "data.mask_mode = 'x': expected ignore or transparent\n"),
        ("save.steps=5", "save.steps = 5: expected a list, e.g. [7000, 30000]"),
        ("model.random_points=18446744073709551615", "expected a number of at most 1e+09"),
        ("model.sky_points=18446744073709551615", "expected a number of at most 1e+06"),
        ("optim.eps=1e-300", "optim.eps = 1e-300: expected a number of at least 1e-37, e.g. 1e-15"),
        ("strategy.grow_factor=1e308", "strategy.grow_factor = 1e+308: expected a number of at most 100, e.g. 1.05"),
        ("views.pose_lr=1e300", "views.pose_lr = 1e+300: expected a number of at most 1, e.g. 0.0005"),
        ("data.scene_extent=1e300", "data.scene_extent = 1e+300: expected a number of at most 1e+12"),
        (f"strategy.name={'x' * 101}", "expected a text of at most 100 characters, e.g. absgrad"),
    ],
)
def test_what_is_no_value_of_a_setting_is_refused(assignment: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        build_config(assignments=[assignment])
    assert said in str(caught.value)
    assert build_config(assignments=["train.antialiased=true"]).train.antialiased


@pytest.mark.parametrize(
    ("assignments", "said"),
    [
        (
            ["views.exposure=true", "views.ppisp=true"],
            "not valid: views.exposure, views.bilateral_grid and views.ppisp",
        ),
        (["memory.offload=true", "train.batch_size=2"], "not valid: memory.offload and train.batch_size > 1 exclude"),
    ],
)
def test_settings_that_exclude_each_other_are_named_without_all_others(assignments: list[str], said: str) -> None:
    for make in (build_config, partial(changed_config, Config())):
        with pytest.raises(UsageError) as caught:
            make(assignments=assignments)
        assert f"these settings are {said}" in str(caught.value)
        assert "{" not in str(caught.value)


@pytest.mark.parametrize("key", setting_fields())
def test_no_setting_is_refused_in_the_words_of_pydantic(key: str) -> None:
    """Whatever the value: numbers, texts, switches, lists and tables."""
    said = []
    for value in ("abc", "igs+", "", "x" * 200, -1e9, 1e9, 1.5, float("nan"), True, [], [-1], ["a"], {"a": 1}):
        try:
            build_config({key: value})
        except UsageError as error:
            said.append(error.what)
    assert said
    assert not [text for text in said if re.search(r"Input|should|valid (int|num|str|bool)|Value error", text)]


def test_none_is_a_value_where_a_number_may_be_missing(tmp_path: Path) -> None:
    """TOML has no null, and a preset in a file may hold what an assignment takes back."""
    file = tmp_path / "a.toml"
    file.write_text('[train]\ndropout = 0.1\n[strategy]\ncap_max = "none"\ngrow_grad2d = "none"\n')
    taken = build_config(file=file, assignments=["train.dropout=none", "memory.cap=none", "data.depth_type=none"])
    assert taken.train.dropout is taken.memory.cap is taken.strategy.grow_grad2d is taken.data.depth_type is None
    assert build_config(file=file).train.dropout == 0.1
    named = build_config(assignments=["data.masks=none", "data.images=none", "data.format=none"]).data
    assert (named.masks, named.images, named.format) == ("none",) * 3, "names of folders, and of no masks"
    with pytest.raises(UsageError, match=r"optim\.sh0_lr = 'none'"):
        build_config(assignments=["optim.sh0_lr=none"])


@pytest.mark.parametrize(
    ("assignments", "said"),
    [
        (["strategy.name=adc", "strategy.noise_lr=1"], "strategy.noise_lr has no effect with --strategy adc"),
        (["strategy.noise_lr=1"], "strategy.noise_lr has no effect with --strategy absgrad"),
        (["strategy.name=mcmc", "schedule.reset_every=9"], "schedule.reset_every has no effect with --strategy mcmc"),
        (["strategy.grow_scale3d=0.1"], "strategy.grow_scale3d has no effect with strategy.long_axis_split = true"),
        (["train.depth_lambda=1"], "train.depth_lambda has no effect without --depth-loss"),
        (["data.depth_scale=2"], "--depth-scale has no effect without --depth-loss"),
        (["views.pose_lr=1", "views.exposure=true"], "views.pose_lr has no effect without --pose-opt"),
        (["model.init=x.ply", "model.init_opacity=0.3"], "model.init_opacity has no effect with --init x.ply"),
        (
            ["train.background=white", "train.alpha_lambda=1"],
            "train.alpha_lambda has no effect with --white-background",
        ),
        (["train.sh_views=0", "train.sh_prior=1"], "train.sh_prior has no effect with train.sh_views = 0.0"),
        (["model.sh_degree=2", "train.sh_views=1"], "train.sh_views has no effect with --sh-degree 2"),
        (["guard.probe_every=0", "guard.psnr_drop=9"], "guard.psnr_drop has no effect with guard.probe_every = 0"),
    ],
)
def test_a_given_setting_without_effect_is_named(assignments: list[str], said: str) -> None:
    config = build_config(assignments=assignments)
    assert unused_settings(config, read_settings(assignments=assignments)) == [said]
    assert unused_settings(config, []) == [], "what nobody gave is not named"


@pytest.mark.parametrize(
    "assignments",
    [
        ["strategy.name=mcmc", "strategy.noise_lr=1", "strategy.opacity_reg=0.1"],
        ["strategy.name=adc", "strategy.grow_scale3d=0.1"],
        ["strategy.name=mcmc", "strategy.revised_opacity=true"],  # the default
        ["strategy.name=another", "strategy.noise_lr=1", "strategy.grow_grad2d=1"],  # of a plug-in
        ["data.depths=auto", "train.depth_lambda=1", "data.depth_type=relative"],
        ["views.pose_opt=true", "views.pose_lr=1"],
        ["model.random_points=9"],  # counts for a scene without points
        ["model.init=random", "model.random_points=9", "model.init_opacity=0.3"],
    ],
)
def test_a_setting_with_effect_is_not_named(assignments: list[str]) -> None:
    assert unused_settings(build_config(assignments=assignments), read_settings(assignments=assignments)) == []


@pytest.mark.parametrize("switch", ["pose_opt", *COLOUR_MAPS])
def test_what_is_not_trained_leaves_its_own_settings_without_effect(switch: str) -> None:
    own = f"views.{switch.removesuffix('_opt')}_"
    numbers = [key for key in setting_fields() if key.startswith(own) and key != f"views.{switch}"]
    assert f"{own}lr" in numbers
    config = build_config(dict.fromkeys(numbers, 0.123))
    assert len(unused_settings(config, numbers)) == len(numbers)
    assert unused_settings(with_settings(config, {f"views.{switch}": True}), numbers) == []


def test_settings_without_effect_are_settings() -> None:
    assert {key for by, _, keys in _UNUSED for key in (by, *keys)} <= setting_fields().keys()
