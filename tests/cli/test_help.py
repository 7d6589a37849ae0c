"""Help, versions and command lines that cannot be followed."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from splatcli import __version__
from splatcli.cli import options
from splatcli.cli.commands import app
from splatcli.config import setting_flags
from tests.running import Splat

COMMANDS = ("train", "sfm", "resume", "render", "export", "view", "eval", "info")


def test_help_names_every_command_and_exit_code() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for word in (*COMMANDS, "Exit codes", "130, 143"):
        assert word in result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "Examples:" in result.output
    assert f"splat {command} " in result.output.partition("Examples:")[2]


def test_version(splat: Splat) -> None:
    done = splat("--version")
    assert (done.code, done.out) == (0, f"splat {__version__}\n")


@pytest.mark.parametrize(
    ("words", "help_text"),
    [
        (["trian", "x"], "Did you mean 'train'"),
        (["train", "x", "--iteration", "3"], "did you mean --iterations?"),
        (["train", "x", "--whit"], "did you mean --white-background?"),
        (["train"], "Missing argument 'SCENE'"),
        (["train", "x", "--stop-at", "0"], "--stop-at"),
        (["train", "x", "--iterations", "many"], "--iterations"),
        (["train", "x", "--iterations", "-5"], "iterations"),
        (["train", "x", "--sh-degree", "9"], "sh_degree"),
        (["train", "x", "--strategy", "nosuch"], "strategy"),
        (["train", "x", "--set", "optim.means_lrr=1"], "did you mean optim.means_lr?"),
        (["train", "x", "--set", "optim.means_lr"], "key=value"),
        (["train", "x", "--set", "optim.means_lr=nan"], "means_lr"),
        (["train", "x", "--config", "nosuch.toml"], "nosuch.toml"),
        (["train", "x", "--white-background", "--random-background"], "exclude"),
        (["train", "x", "--device", "tpu"], "no device"),
        (["render", "--device", "tpu"], "no device"),
        (["export"], "no file"),
        (["export", "-o", "x.obj"], "cannot tell a format"),
        (["render", "nosuch.pt"], "no such model"),
        (["info", "nosuch"], "this path does not exist"),
        (["eval", "--views", "path.json"], "--views"),
    ],
)
def test_bad_usage_exits_2_with_a_remedy(splat: Splat, words: list[str], help_text: str) -> None:
    done = splat(*words)
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("error[E002]: ")
    assert help_text in done.err
    assert "Traceback" not in done.err


def test_a_gpu_that_is_not_there_is_refused(splat: Splat) -> None:
    done = splat("train", "x", "--device", "cuda:97")
    assert done.code == 4
    assert "there is no cuda:97" in done.err


def test_an_error_is_an_object_with_json(splat: Splat) -> None:
    done = splat("info", "nosuch", "--json")
    assert done.objects == [
        {
            "event": "error",
            "error": "E002",
            "what": "this path does not exist",
            "where": "nosuch",
            "help": "name a checkpoint, PLY, run folder or scene",
            "exit_code": 2,
        }
    ]


def test_without_model_and_runs_there_is_an_error(splat: Splat, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = splat("render", "--views")
    assert done.code == 2
    assert "no run under output/" in done.err


def test_the_list_of_commands_needs_no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_parse_with", lambda function: pytest.fail("flags are made"))
    assert CliRunner().invoke(app, ["--help"]).exit_code == 0


def test_flags_are_listed_under_headings() -> None:
    text = CliRunner().invoke(app, ["train", "--help"]).output
    places = [text.index(f"\n{heading}:") for heading in ("Arguments", "Options", "Scene", "Memory", "Training")]
    assert places == sorted(places)
    assert text.index("\nMemory:") < text.index("--cache-budget") < text.index("\nTraining:")


def test_every_flag_of_a_setting_is_one_of_train() -> None:
    command = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
    names = {name for parameter in command.get_params(typer.Context(command)) for name in parameter.opts}
    for key, flags in setting_flags().items():
        assert names.issuperset(name for flag in flags for name in flag.names), key


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["--iterations", "-5"], "--iterations"),
        (["--cap-max", "many"], "--cap-max"),
        (["--block", "-1", "--blocks", "2x2"], "--block"),
        (["--blocks", "999x999"], "--blocks"),
        (["--depth-loss", "--depths", "maps"], "--depth-loss"),
        (["--exposure", "--bilateral-grid"], "--exposure"),
        (["--max-time", "soon"], "--max-time"),
        (["--offload", "--batch-size", "2"], "--offload"),
    ],
)
def test_an_error_names_the_flag(splat: Splat, words: list[str], where: str) -> None:
    done = splat("train", "x", *words, "--json")
    assert done.code == 2
    assert done.objects[-1]["where"] == where


def test_flags_of_resume_turn_settings_off() -> None:
    flags = options.SettingFlags(("memory.offload", "train.iterations"), negatable=True)
    names = [parameter.name for parameter in flags.parameters()]
    assert flags.given(dict.fromkeys(names)) == {}
    assert flags.given(dict(zip(names, (False, 7), strict=True))) == {"memory.offload": False, "train.iterations": 7}
