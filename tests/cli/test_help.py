"""Help, versions and command lines that cannot be followed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from splatcli import __version__
from splatcli.cli.commands import app
from splatcli.cli.help import GUIDE
from splatcli.cli.typer_command import SettingFlags
from splatcli.config import setting_flags
from tests.cli.terminal import on_terminal
from tests.running import Done, Splat

COMMANDS = ("train", "sfm", "resume", "render", "export", "view", "eval", "compare", "info")


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


@pytest.mark.parametrize("flag", ["--version", "-V", "version"])
def test_version(flag: str, splat: Splat) -> None:
    done = splat(flag)
    assert (done.code, done.out) == (0, f"splat {__version__}\n")


@pytest.mark.parametrize("words", [[], ["train"], ["edit", "--plain"]])
def test_help_is_a_word_too(words: list[str], splat: Splat) -> None:
    done, flagged = splat("help", *words), splat(*words, "--help")
    assert (done.code, done.out) == (0, flagged.out)
    assert splat("help", "trian").code == 2


@pytest.mark.parametrize("words", [[], ["--plain"]])
def test_without_a_command_there_is_a_guide(words: list[str], splat: Splat) -> None:
    done = splat(*words)
    assert (done.code, done.out, done.err) == (0, GUIDE, "")
    assert max(len(line) for line in done.lines) <= 80
    session = re.findall(r"^  splat (\w+)", GUIDE.partition("Where to go next")[0], re.MULTILINE)
    assert session == ["demo", "doctor", "train", "view", "render", "export"]


@pytest.mark.parametrize("command", [None, *COMMANDS, "merge", "check", "bench", "doctor"])
def test_every_command_takes_h_and_help_all(command: str | None, splat: Splat) -> None:
    words = [] if command is None else [command]
    text = splat(*words, "--help")
    assert text.code == 0
    assert splat(*words, "-h") == text
    if command is not None:
        every = splat(command, "--help-all")
        assert every.code == 0
        group = typer.main.get_command(app)
        flags = group.commands[command].get_params(typer.Context(group.commands[command]))  # type: ignore[attr-defined]
        options = [one for one in flags if one.param_type_name == "option" and one.name != "help_all"]
        assert all(name in every.out for one in options for name in one.opts)


def test_help_shows_the_everyday_flags_and_where_the_others_are() -> None:
    text = CliRunner().invoke(app, ["train", "--help"]).output
    assert all(flag in text for flag in ("--iterations", "--resolution", "--cap-max", "--viewer"))
    assert "--pose-opt" not in text
    assert "more flags: splat train --help-all" in text


@pytest.mark.parametrize("command", ["train", "resume", "render", "export", "info", "sfm"])
def test_the_help_of_a_command_with_many_flags_is_short(command: str, splat: Splat) -> None:
    short, every = splat(command, "--help"), splat(command, "--help-all")
    names = [set(re.findall(r"(?<![\w`-])--[a-z0-9-]+", text.out)) for text in (short, every)]
    assert names[0] < names[1]
    assert f"more flags: splat {command} --help-all" in short.out
    assert len(short.lines) < 0.85 * len(every.lines)


def test_help_fits_80_columns_and_cuts_nothing_off(splat: Splat, monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer example is continued on the next line, and still is the command of docs/cli.md."""
    monkeypatch.setenv("COLUMNS", "80")
    group = typer.main.get_command(app)
    continued = 0
    assert splat("--help").out.count("...") == 1  # [ARGS]...
    for words in [(), *((name,) for name in group.commands)]:  # type: ignore[attr-defined]
        for flag in ("--help", "--help-all")[: 1 + len(words)]:
            text = splat(*words, flag).out
            assert max(map(len, text.splitlines())) <= 80, words
        page = splat("docs", "cli").out
        for example in text.replace("\\\n", "\\").partition("Examples:\n")[2].partition("\n\n")[0].splitlines():
            continued += "\\" in example
            whole = re.sub(r" *\\ *", " ", example.strip())
            assert f"\n{whole}\n" in page
    assert continued > 8


def test_help_is_in_boxes_on_a_terminal() -> None:
    screen = on_terminal("train", "--help", columns=80)
    assert screen.code == 0
    assert "╭─ Essentials ─" in screen.text
    assert "\x1b[1;36m-o, --output DIR\x1b[0m" in screen.raw
    assert max(len(line) for line in screen.drawn if line[0] in "╭│╰") <= 80

    names = re.findall(r"--[a-z-]+", CliRunner().invoke(app, ["train", "--help"]).output)
    assert len(names) > 10
    assert set(re.findall(r"--[a-z-]+", screen.text)) == set(names)


@pytest.mark.parametrize(
    ("words", "columns", "variables"),
    [
        (["--plain", "export", "-h"], 80, {}),
        (["export", "-h", "--plain"], 80, {}),
        (["export", "-h"], 80, {"NO_COLOR": "1"}),
        (["export", "-h"], 80, {"TERM": "dumb"}),
        (["export", "-h"], 80, {"SPLATCLI_PLAIN": "1"}),
        (["export", "-h"], 40, {}),
    ],
)
def test_help_is_plain_where_that_is_asked_for(words: list[str], columns: int, variables: dict[str, str]) -> None:
    screen = on_terminal(*words, columns=columns, **variables)
    assert screen.code == 0
    assert "Essentials:\n" in screen.text
    assert "\x1b" not in screen.raw
    assert "╭" not in screen.raw


def test_an_unknown_flag_with_the_name_of_a_setting_names_it(splat: Splat) -> None:
    done = splat("train", "scene", "--eval-every", "50")
    assert done.code == 2
    assert "train.eval_every is a setting without one" in done.err
    assert "--set train.eval_every=VALUE" in done.err
    assert "did you mean --quiet?" in splat("train", "scene", "--quite").err
    assert "--set" not in splat("view", "--eval-every", "50").err


def test_words_after_two_dashes_are_no_flags(shell: Callable[..., Done]) -> None:
    done = shell("splat info -- --plain")
    assert done.code == 2
    assert "where: --plain" in done.err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("splat tr", ["train"]),
        ("splat train --cap", ["--cap-max"]),
        ("splat export --min-o", ["--min-opacity"]),
    ],
)
def test_shells_complete_commands_and_flags_without_torch(line: str, expected: list[str]) -> None:
    words = line.split()
    code = (
        "import sys, splatcli.cli.commands as b\n"
        "code = b.run([])\n"
        "heavy = sorted({'torch', 'numpy', 'rich'} & set(sys.modules))\n"
        "sys.exit(f'{code} {heavy}' if code or heavy else 0)"
    )
    asked = {"_SPLAT_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ | asked
    )
    assert (done.returncode, done.stdout.split()) == (0, expected), done.stderr


def test_the_completion_of_a_shell_is_printed() -> None:
    command = f"{sys.executable} -m splatcli --show-completion; exit $?"  # by a shell that waits, which is looked for
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "_SPLAT_COMPLETE=complete_bash" in done.stdout
    assert "complete -o default -F _splat_completion splat" in done.stdout


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
        (["eval", "x.ply", "--sheet", "sheet.jpg"], "pictures are PNG files"),
        (["info", "x", "--plot"], "see splat info --help"),
        (["docs", "renders"], "splat docs lists the pages"),
        (["docs", "render"], "perhaps cameras or distributed; splat docs lists"),
        (["info", "x", "--plot", "plot.svg"], "--plot plot.png"),
        (["train", ""], "the name is empty"),
        (["train", "x", "-o", ""], "the name is empty"),
        (["edit", "x.ply", "", "-o", "y.ply"], "the name is empty"),
        (["render", "x.ply", "--data="], "the name is empty"),
        (["train", "x", "--points", ""], "the name is empty"),
        (["train", "x", "--set", "model.init="], "the name is empty"),
        (["export", "x.ply", "-o", "y.ply", "--output=y.spz"], "it is given twice"),
        (["edit", "x.ply", "-o", "y.ply", "--scale", "2", "-o", "y.spz"], "it is given twice"),
    ],
)
def test_bad_usage_exits_2_with_a_remedy(
    splat: Splat, words: list[str], help_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x").mkdir()
    Path("x.ply").touch()
    done = splat(*words)
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("error[E002]: ")
    assert help_text in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    "words",
    [
        ["train", "nosuch/"],
        ["render", "nosuch.pt", "--views"],
        ["export", "nosuch", "-o", "x.ply"],
        ["edit", "x.ply", "nosuch.ply", "-o", "y.ply"],
        ["eval", "x.ply", "--data", "nosuch"],
        ["compare", "x.ply", "nosuch"],
        ["info", "nosuch"],
        ["check", "nosuch"],
        ["mesh", "nosuch", "-o", "x.glb"],
        ["resume", "nosuch"],
    ],
)
def test_a_path_that_is_not_there_is_named_before_libraries_are_loaded(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "x.ply").touch()
    code = (
        "import sys, splatcli.cli.commands as b\n"
        "code = b.run(sys.argv[1:])\n"
        "sys.exit('torch is loaded' if 'torch' in sys.modules else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode in (2, 3), done.stderr
    assert re.match(r"error\[E00[23]\]: .*\n  where: nosuch\S*\n  help: name ", done.stderr), done.stderr


def test_a_gpu_that_is_not_there_is_refused(splat: Splat, tmp_path: Path) -> None:
    done = splat("train", tmp_path, "--device", "cuda:97")
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
    monkeypatch.setattr("splatcli.cli.typer_command._parse_with", lambda function: pytest.fail("flags are made"))
    assert CliRunner().invoke(app, ["--help"]).exit_code == 0


def test_flags_are_listed_under_headings() -> None:
    text = CliRunner().invoke(app, ["train", "--help-all"]).output
    headings = ("Arguments", "Essentials", "Data", "Quality", "Memory", "Several processes", "Viewer", "Expert")
    places = [text.index(f"\n{heading}:") for heading in headings]
    assert places == sorted(places)
    assert text.index("\nMemory:") < text.index("--cache-budget") < text.index("\nSeveral processes:")


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
        (["--bilateral-grid", "--ppisp"], "--bilateral-grid"),
        (["--max-time", "soon"], "--max-time"),
        (["--offload", "--batch-size", "2"], "--offload"),
    ],
)
def test_an_error_names_the_flag(splat: Splat, words: list[str], where: str, tmp_path: Path) -> None:
    done = splat("train", tmp_path, *words, "--json")
    assert done.code == 2
    assert done.objects[-1]["where"] == where


def test_flags_of_resume_turn_settings_off() -> None:
    flags = SettingFlags(("memory.offload", "train.iterations"), negatable=True)
    names = [parameter.name for parameter in flags.parameters()]
    assert flags.given(dict.fromkeys(names)) == {}
    assert flags.given(dict(zip(names, (False, 7), strict=True))) == {"memory.offload": False, "train.iterations": 7}
