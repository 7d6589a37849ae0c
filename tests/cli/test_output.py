"""What goes to stdout and what to stderr."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from splatcli.cli.commands import run
from splatcli.cli.console import Output, open_output
from tests.cli.tiny import QUICK
from tests.forked import splat_command
from tests.running import Splat


def test_results_are_lines_or_one_object(capfd: pytest.CaptureFixture[str]) -> None:
    Output().result({"path": Path("a")}, [Path("a"), "b"])
    Output(json=True).result({"path": Path("a")}, ["not shown"])
    lines = capfd.readouterr().out.splitlines()
    assert lines[:2] == ["a", "b"]
    assert json.loads(lines[2]) == {"event": "result", "path": "a"}


def test_numbers_that_json_cannot_hold_become_null(capfd: pytest.CaptureFixture[str]) -> None:
    Output(json=True).event("x", {"a": math.nan, "b": [math.inf, 1.5]})
    assert json.loads(capfd.readouterr().out) == {"event": "x", "a": None, "b": [None, 1.5]}


def test_quiet_leaves_errors_only(capfd: pytest.CaptureFixture[str]) -> None:
    from splatcli.errors import SceneError

    out = Output(quiet=True)
    out.message("a")
    out.warn("b")
    out.error(SceneError("c"))
    assert capfd.readouterr().err == "error[E003]: c\n"


def test_warnings_and_log_records_of_the_library_are_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with open_output(json=False, quiet=False):
        warnings.simplefilter("always")
        warnings.warn("slow", stacklevel=1)
        for _ in range(3):
            logging.getLogger("splatcli.somewhere").warning("odd")
    assert capfd.readouterr().err == "warning: slow\nwarning: odd\n"
    logging.getLogger("splatcli.somewhere").warning("not ours any more")
    assert "warning:" not in capfd.readouterr().err


# --- a full disk under stdout ----------------------------------------------------------------------------------------


def test_results_that_a_full_disk_refuses_end_with_8(
    splat: Splat, finished_run: Path, tiny_scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = {
        f"info {finished_run}": None,
        f"info {finished_run} --json": None,
        f"export {finished_run} -o {tmp_path}/x.ply": "x.ply",
        f"export {finished_run} -o -": None,
        f"export {finished_run} -o /dev/stdout": None,
        f"render {finished_run} -o {tmp_path}/views": "views/view_00.png",
        f"render {finished_run} --views train -o -": None,
        f"eval {finished_run}": None,
        f"eval {finished_run} --json": None,
        f"train {tiny_scene} -n 3 -o {tmp_path}/run --json {' '.join(QUICK)}": "run/ckpts/ckpt_000003.pt",
        f"resume {tmp_path}/run -n 4": "run/ckpts/ckpt_000004.pt",
        "--version": None,
        "train --help": None,
    }
    for command, made in commands.items():
        with open("/dev/full", "w") as full, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", full)
            done = splat(*command.split(), *([] if command.startswith(("--", "train --help")) else ["-q"]))
        assert done.code == 8, (command, done)
        assert done.err.startswith("error[E008]: "), (command, done.err)
        assert "cannot write to stdout: No space left on device" in done.err, (command, done.err)
        assert done.err.count("\n") <= 3, (command, done.err)
        assert "help: " in done.err, (command, done.err)
        prints_alone = command in ("--version", "train --help")  # and has neither results nor -o
        assert done.err.endswith("redirect stdout elsewhere\n") == prints_alone, (command, done.err)
        assert made is None or (tmp_path / made).is_file(), command
        assert splat("--version").code == 0, command


@pytest.mark.parametrize("words", ["train {scene} -n 3 -o run --json", "export {run} -o -", "info {run}", "--help"])
def test_a_full_disk_under_stdout_is_one_message_of_a_whole_process(
    finished_run: Path, tiny_scene: Path, tmp_path: Path, words: str
) -> None:
    """Also when the interpreter flushes at its end."""
    flushed = words in ("info {run}", "--help")  # at the end of the interpreter
    command = [*((sys.executable, "-m", "splatcli") if flushed else splat_command())]
    command += words.format(run=finished_run, scene=tiny_scene).split()
    command += [*(QUICK if "train" in words else ()), *([] if words == "--help" else ["-q"])]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 8, done.stderr
    assert done.stderr.startswith("error[E008]: ")
    assert done.stderr.count("error") == 1
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert "train" not in words or (tmp_path / "run" / "ckpts" / "ckpt_000003.pt").is_file()


def test_a_full_disk_under_stderr_is_ignored(finished_run: Path) -> None:
    command = [*splat_command(), "info", str(finished_run), "-q"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, check=False)
        assert done.returncode == 0
        failed = subprocess.run([*command, "--nonsense"], stdout=subprocess.PIPE, stderr=full, check=False)
    assert failed.returncode == 2


def test_a_program_without_streams_runs_commands(
    finished_run: Path, tiny_scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under pythonw, and in daemons: sys.stdout and the others are None. What is written to stdout alone is lost."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    train = ["train", str(tiny_scene), "-n", "3", *QUICK, "-o", str(tmp_path / "run")]
    export = ["export", str(finished_run), "-o", str(tmp_path / "x.ply")]
    assert [run(words) for words in (train, export, ["info", str(finished_run)], ["train", "--help"], [])] == [0] * 5
    assert run(["info", str(tmp_path / "nothing.ply")]) == 2
    assert run([*export[:-1], "-"]) == 8
    assert (tmp_path / "x.ply").is_file()
    assert (tmp_path / "run" / "ckpts" / "ckpt_000003.pt").is_file()
