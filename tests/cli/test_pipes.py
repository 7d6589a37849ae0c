"""Commands in a shell: pipes, signals, and readers that go away."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from splatcli.checkpoint.file import load_checkpoint
from splatcli.render.camera_files import cameras_json
from tests.cli.tiny import QUICK
from tests.running import Done, Splat

Shell = Callable[..., Done]
WORDS = " ".join(QUICK)


def test_train_into_render(fresh_shell: Shell, tiny_scene: Path, tmp_path: Path) -> None:
    done = fresh_shell(f"splat train {tiny_scene} -n 5 {WORDS} | splat render --views")
    assert done.code == 0, done.err
    assert len(done.lines) == 2
    assert all((tmp_path / line).is_file() for line in done.lines)


def test_a_path_with_spaces_at_its_ends_goes_through_a_pipe(shell: Shell, made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / " run")
    done = shell("splat export ' run' -o ' a.ply' -q | splat info --json")
    assert done.code == 0, done.err
    assert done.objects[-1]["path"] == " a.ply"


def test_json_into_eval(shell: Shell, tiny_scene: Path) -> None:
    done = shell(f"splat train {tiny_scene} -n 5 {WORDS} --json | splat eval --json")
    assert done.code == 0, done.err
    assert done.objects[0]["num_gaussians"] > 0


def test_stop_resume_export_to_stdout(shell: Shell, tiny_scene: Path, tmp_path: Path) -> None:
    done = shell(
        f"set -o pipefail; splat train {tiny_scene} -n 6 --stop-at 3 -q {WORDS} | splat resume -q"
        " | splat export -o - > x.ply && splat info x.ply"
    )
    assert done.code == 0, done.err
    assert (tmp_path / "x.ply").read_bytes().startswith(b"ply\nformat binary_little_endian")


@pytest.fixture
def made(finished_run: Path, tmp_path: Path) -> Path:
    """A finished run as output/ball of the folder that shells start in."""
    return shutil.copytree(finished_run, tmp_path / "output" / "ball")


def test_the_newest_run_is_the_default(shell: Shell, made: Path) -> None:
    done = shell("splat render -q < /dev/null")
    assert done.code == 0, done.err
    assert done.lines == [f"output/ball/renders/000040_test/{name}.png" for name in ("view_00", "view_08")]


def test_a_failure_upstream_renders_no_other_run(shell: Shell, made: Path) -> None:
    done = shell("false | splat render -q")
    assert done.code == 2
    assert done.out == ""
    assert "no path came through the pipe" in done.err


def test_one_view_goes_to_stdout_as_png(shell: Shell, made: Path, tmp_path: Path) -> None:
    one = json.loads(cameras_json(load_checkpoint(made / "ckpts" / "ckpt_000040.pt").cameras[:1]))
    (tmp_path / "one.json").write_text(json.dumps(one))
    done = shell("splat render --views one.json -q -o - < /dev/null > one.png")
    assert done.code == 0, done.err
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("command", ["info output/ball -q", "export output/ball -q -o -", "--help", "edit --help"])
def test_a_closed_pipe_is_not_an_error(shell: Shell, made: Path, command: str) -> None:
    done = shell(f"splat {command} | true; echo ${{PIPESTATUS[0]}}")
    assert done.out == "0\n"
    assert done.err == ""


def test_a_name_of_stdout_is_stdout(shell: Shell, made: Path, tmp_path: Path) -> None:
    """By a link of our own that leads through /dev/stdout; the system's stays what it is."""
    (tmp_path / "out.ply").symlink_to("/dev/stdout")
    before = os.readlink("/dev/stdout")
    assert shell("splat export output/ball -o - > y.ply").code == 0
    for name, sink in (
        ("out.ply", "| cat > x.ply"),
        ("out.ply", "> x.ply"),
        ("out.ply", ">> x.ply"),
        ("/dev/stdout", "> x.ply"),
    ):
        done = shell(f"rm -f x.ply; splat export output/ball -q -o {name} {sink}")
        assert done.code == 0, done.err
        assert (tmp_path / "x.ply").read_bytes() == (tmp_path / "y.ply").read_bytes(), (name, sink)
    assert os.readlink("/dev/stdout") == before
    assert os.readlink(tmp_path / "out.ply") == "/dev/stdout"


def test_training_outlives_the_reader_of_its_events(shell: Shell, tiny_scene: Path, tmp_path: Path) -> None:
    done = shell(f"splat train {tiny_scene} -n 30 -o run -q --json {WORDS} | head -1; echo ${{PIPESTATUS[0]}}")
    assert done.lines[-1] == "0"
    assert load_checkpoint(tmp_path / "run" / "ckpts" / "ckpt_000030.pt").step == 30


def test_closed_streams_do_no_harm(fresh_shell: Shell, tiny_scene: Path, tmp_path: Path) -> None:
    """The path of the checkpoint is lost, and it alone."""
    done = fresh_shell(f"splat train {tiny_scene} -n 2 -o run {WORDS} <&- >&- 2>&-; echo $?")
    assert done.out == "8\n"
    assert (tmp_path / "run" / "ckpts" / "ckpt_000002.pt").is_file()


@pytest.mark.parametrize(
    ("words", "made_file"),
    [
        ("export output/ball -q -o -", None),
        ("export output/ball -q -o x.ply", "x.ply"),
        ("info output/ball -q", None),
        ("docs --json", None),
        ("doctor", None),
        ("--version", None),
        ("train --help", None),
    ],
)
def test_what_a_closed_stdout_loses_is_an_error(
    fresh_shell: Shell, made: Path, tmp_path: Path, words: str, made_file: str | None
) -> None:
    done = fresh_shell(f"splat {words} >&-")
    assert done.code == 8, done.err
    has_results = words not in ("--version", "train --help")
    lost = "; the printed results are lost, written files are complete" if has_results else ""
    assert done.err.splitlines()[-3:] == [
        "error[E008]: stdout is closed",
        "  where: stdout",
        f"  help: redirect stdout elsewhere{lost}",
    ]
    assert made_file is None or (tmp_path / made_file).is_file()


def test_a_rank_knows_that_the_shell_closed_stdout(fresh_shell: Shell, tiny_scene: Path, tmp_path: Path) -> None:
    done = fresh_shell(f"splat train {tiny_scene} -n 2 -o run --ranks 2 --device cpu {WORDS} -q >&-")
    assert done.code == 8, done.err
    assert done.err.count("error[E008]: stdout is closed") == 1
    assert (tmp_path / "run" / "ckpts" / "ckpt_000002.pt").is_file()


def test_a_failure_without_a_result_stays_what_it_is(fresh_shell: Shell) -> None:
    done = fresh_shell("splat info nosuch --json >&-")
    assert done.code == 2, done.err
    assert "stdout is closed" not in done.err


def test_files_never_get_the_descriptors_of_closed_streams(fresh_shell: Shell, tmp_path: Path) -> None:
    """Also in a child process."""
    child = "import os; print(*(os.fstat(n).st_rdev for n in (0, 1, 2)), file=open('y', 'w'))"
    (tmp_path / "child.py").write_text(child)
    (tmp_path / "parent.py").write_text(
        "import os, subprocess, sys; from splatcli.cli import main; sys.argv = ['splat', '--version']; main()\n"
        "assert open('x', 'w').fileno() > 2; subprocess.run([sys.executable, 'child.py'], check=True)"
    )
    done = fresh_shell(f"{shlex.quote(sys.executable)} parent.py <&- >&- 2>&- && cat y")
    assert done.out.split() == [str(os.stat(os.devnull).st_rdev)] * 3


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_stops(tiny_scene: Path, tmp_path: Path, number: signal.Signals, code: int) -> None:
    command = [sys.executable, "-m", "splatcli", "train", str(tiny_scene), "-o", str(tmp_path / "run"), "--json"]
    process = subprocess.Popen(
        [*command, "-n", "1000000", *QUICK],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    assert '"started"' in process.stdout.readline()
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    result = Done(code, out, err).objects[-1]
    assert (result["event"], result["reason"]) == ("result", number.name)
    assert load_checkpoint(Path(result["path"])).step == result["step"]


def test_an_edit_goes_to_stdout_past_files_of_that_name(shell: Shell, made: Path, tmp_path: Path) -> None:
    """``-`` is stdout also where a file has that name, and /dev/stdout also where the shell leads it into a file."""
    (tmp_path / "-").write_text("mine")
    assert shell(f"splat export {made} -o m.ply && splat edit m.ply -o expected.ply --scale 2").code == 0
    for name in ("-", "/dev/stdout"):
        done = shell(f"splat edit m.ply -o {name} --scale 2 > x.ply")
        assert done.code == 0, (name, done.err)
        assert (tmp_path / "x.ply").read_bytes() == (tmp_path / "expected.ply").read_bytes(), name
    assert (tmp_path / "-").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (("render", "--views", "orbit", "--frames", "1", "-o", "x.png", "--save-cameras", "-"), "--save-cameras"),
        (("edit", "-o", "x.ply", "--scale", "2", "--picture", "-"), "--picture"),
        (("eval", "--sheet", "-"), "--sheet"),
        (("info", "--plot", "-"), "--plot"),
    ],
)
def test_stdout_has_one_result(
    splat: Splat, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], flag: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = splat(words[0], made, *words[1:])
    assert (done.code, done.out) == (2, ""), done.err
    assert "stdout gets the result of the command" in done.err
    assert f"help: name a file: {flag} " in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["output"]
