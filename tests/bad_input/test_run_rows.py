"""Faults around a run (rows 61 to 72): settings and scenes that changed, places, machines, command lines."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import splatcli.rasterizer.memory_budget
import splatcli.train.step
from splatcli.checkpoint.file import load_checkpoint
from splatcli.checkpoint.run_dir import take_lock
from splatcli.cli.commands import run
from tests.bad_input.harms import Harm, both, keep_views, move, nothing, poses, trained, write
from tests.bad_input.table import OUTPUTS, QUICK, Case, Expect, copy_scene
from tests.checkpoint.foreign.made import tables_of, write_ply
from tests.running import Done

RESUME = ("resume", "out", "--device", "cpu")
MORE = (*RESUME, "-n", "2")
FIRST, SECOND = "out/ckpts/ckpt_000000.pt", "out/ckpts/ckpt_000001.pt"

#: What harms have changed in this process; undone after each test.
_UNDO = contextlib.ExitStack()


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    with _UNDO:
        yield


def patched(target: Any, name: str, value: Callable[..., Any]) -> None:
    patch = _UNDO.enter_context(pytest.MonkeyPatch.context())
    patch.setattr(target, name, value)


def in_environment(**variables: str | None) -> Harm:
    """Other environment variables; None removes one."""

    def harm(folder: Path) -> None:
        patch = _UNDO.enter_context(pytest.MonkeyPatch.context())
        for name, value in variables.items():
            patch.delenv(name, raising=False) if value is None else patch.setenv(name, value)

    return harm


def went_on(folder: Path) -> None:
    """The run of one step has become one of two."""
    assert run([*MORE, "-q"]) == 0


def another_image(folder: Path) -> None:
    shutil.copy(folder / "scene/images/view_004.jpg", folder / "scene/images/view_008.jpg")


def taken(folder: Path) -> None:
    """Somebody works on the run."""
    _UNDO.callback(os.close, take_lock(folder / "out"))


def disk_refuses(part: str, number: int = errno.ENOSPC) -> Harm:
    """No room for files with ``part`` in their names."""
    real = os.posix_fallocate

    def reserve(file: int, offset: int, size: int) -> None:
        if part in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(number, os.strerror(number))
        real(file, offset, size)

    return lambda folder: patched(os, "posix_fallocate", reserve)


def read_only(folder: Path) -> None:
    """Nothing new can be made in ``out`` and ``output``: a file system that is mounted read-only, also for root."""
    real_open, real_io, real_mkdir = os.open, io.open, os.mkdir
    places = [folder.resolve() / name for name in OUTPUTS]

    def refuse(path: Any) -> None:
        if not isinstance(path, int) and any(Path(os.path.abspath(path)).is_relative_to(place) for place in places):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fspath(path))

    def open_file(path: Any, flags: int, *args: Any, **rest: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            refuse(path)
        return real_open(path, flags, *args, **rest)

    def open_io(path: Any, mode: str = "r", *args: Any, **rest: Any) -> Any:
        if set(mode) & set("wxa+"):
            refuse(path)
        return real_io(path, mode, *args, **rest)

    def mkdir(path: Any, *args: Any, **rest: Any) -> None:
        refuse(path)
        real_mkdir(path, *args, **rest)

    patched(os, "open", open_file)
    patched(io, "open", open_io)
    patched(os, "mkdir", mkdir)


def memory_ends(fails: Callable[[int, int], bool]) -> Harm:
    """A step fails for lack of memory where ``fails`` says so of the steps done and the Gaussians."""
    real = splatcli.train.step.engine_for

    def make(*args: Any, **rest: Any) -> Any:
        engine: Any = real(*args, **rest)
        submit = engine.submit

        def checked(gaussians: Any, adam: Any, inputs: Any) -> Any:
            if fails(adam.step, len(gaussians)):
                raise MemoryError
            return submit(gaussians, adam, inputs)

        engine.submit = checked
        return engine

    return lambda folder: patched(splatcli.train.step, "engine_for", make)


def overflowing(folder: Path) -> None:
    """Nearly 40,000 Gaussians that each cover all 65,536 tiles of a view: too many intersections for 32 bits."""
    tables = tables_of(40_000)
    tables.scales[:] = torch.tensor([6.0, 6.0, -1.0])
    tables.means[:] *= 0.01
    write_ply(tables, folder / "many.ply")
    lens = {"width": 4096, "height": 4096, "fx": 4000, "fy": 4000, "cx": 2048, "cy": 2048}
    viewmat = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 3], [0, 0, 0, 1]]
    (folder / "large.json").write_text(json.dumps({"cameras": [{"name": "a.png", **lens, "viewmat": viewmat}]}))
    patched(splatcli.rasterizer.memory_budget, "free_memory", lambda device: 4 << 30)


def clock_runs_back(folder: Path) -> None:
    now = [time.time()]

    def back() -> float:
        now[0] -= 60.0
        return now[0]

    patched(time, "time", back)


def moved_pose(i: int, pose: Any) -> Any:
    if i == 3:
        pose[:, 3] += 0.25
    return pose


SETTINGS = write("run.toml", "[optim]\nmeans_lr = 0.5\n")

CASES = [
    # A resumed run meets another scene or other settings.
    Case(
        61,
        "another image",
        both(trained, another_image),
        3,
        ("the scene has changed since step 1 was saved: the digest of the photos", "--allow-config-change photos"),
        command=MORE,
    ),
    Case(
        61,
        "another image, with consent",
        both(trained, another_image),
        0,
        flags=("--allow-config-change", "photos"),
        command=MORE,
    ),
    Case(
        61,
        "a view less",
        both(trained, keep_views(11)),
        3,
        ("there were 12 views, there are 11", "splat train SCENE --init CKPT"),
        command=MORE,
    ),
    Case(
        61,
        "a view less, consent to what it is not",
        both(trained, keep_views(11)),
        3,
        ("there were 12 views",),
        ("--allow-config-change", "photos", "--allow-config-change", "cameras"),
        MORE,
    ),
    Case(
        61,
        "another pose",
        both(trained, poses(moved_pose)),
        3,
        ("has another pose", "--allow-config-change cameras"),
        command=MORE,
    ),
    Case(
        61,
        "another pose, with consent",
        both(trained, poses(moved_pose)),
        0,
        flags=("--allow-config-change", "cameras"),
        command=MORE,
    ),
    Case(
        61,
        "other settings in a file",
        both(trained, SETTINGS),
        2,
        ("optim.means_lr was 0.0006369714728855957, is 0.5", "--allow-config-change optim.means_lr goes on"),
        ("--config", "run.toml"),
        MORE,
    ),
    Case(
        61,
        "other settings in a file, with consent",
        both(trained, SETTINGS),
        0,
        ("changed: optim.means_lr was 0.0006369714728855957, is 0.5",),
        ("--config", "run.toml", "--allow-config-change", "optim.means_lr"),
        MORE,
    ),
    Case(61, "a wish", trained, 0, ("changed: optim.sh0_lr was",), ("--set", "optim.sh0_lr=0.01"), MORE),
    Case(
        61,
        "a setting that a run is made with",
        trained,
        2,
        ("fixed when a run is made: model.sh_degree was 1, is 3", "--init CKPT"),
        ("--set", "model.sh_degree=3"),
        MORE,
    ),
    Case(
        61,
        "consent to nothing",
        trained,
        2,
        ("no setting 'optim.mean_lr'", "did you mean optim.means_lr?"),
        ("--allow-config-change", "optim.mean_lr"),
        MORE,
    ),
    Case(
        61,
        "the scene is gone",
        both(trained, move("scene", "elsewhere")),
        3,
        ("does not exist", "--data DIR"),
        command=MORE,
    ),
    Case(
        61,
        "the scene is elsewhere",
        both(trained, move("scene", "elsewhere")),
        0,
        flags=("--data", "elsewhere"),
        command=MORE,
    ),
    Case(62, "a finished run", trained, 0, ("the schedule stays, added steps have the final",), command=MORE),
    Case(62, "a finished run, nothing asked", trained, 0, (SECOND,), command=RESUME),
    Case(
        62,
        "fewer steps than are done",
        both(trained, went_on),
        2,
        ("1 iterations are asked for and 2 are done already", "ask for more than 2"),
        command=(*RESUME, "-n", "1"),
    ),
    Case(
        62,
        "fewer steps than are done, the scene elsewhere",
        both(both(trained, went_on), move("scene", "elsewhere")),
        2,
        ("1 iterations are asked for and 2 are done already",),
        command=(*RESUME, "-n", "1"),
    ),
    Case(
        63,
        "resume",
        both(trained, taken),
        9,
        (f"process {os.getpid()} on {socket.gethostname()} is working on this run", "wait for it"),
        command=MORE,
    ),
    Case(63, "train over it", both(trained, taken), 9, (str(os.getpid()),), ("--overwrite",)),
    # Places for the output.
    Case(
        64,
        "a run of other settings is there",
        trained,
        8,
        ("was 1, is now 2", "--iterations 2, move", "--overwrite"),
        ("-n", "2"),
    ),
    Case(64, "the same run is there", trained, 0, ("continuing the run from",)),
    Case(
        64,
        "a run is there, moved aside",
        both(trained, move("out", "output/run")),
        0,
        flags=("-o", "output/run", "--overwrite"),
    ),
    Case(
        64,
        "no place is named",
        both(trained, move("out", "output/scene")),
        0,
        ("output/scene-2",),
        (),
        ("train", "scene", *QUICK),
    ),
    Case(
        64,
        "something else is there",
        write("out/diary.txt", "mine"),
        8,
        ("has content, but is not a run",),
        ("--overwrite",),
    ),
    Case(65, "a file", write("out", "mine"), 8, ("this is a file; a run needs a folder",)),
    Case(65, "below a file", write("out", "mine"), 8, ("out/run", "choose another"), ("-o", "out/run")),
    Case(65, "missing parents", nothing, 0, flags=("-o", "output/a/b")),
    Case(65, "no permission", nothing, 8, ("cannot make the output folder",), ("-o", "/proc/run")),
    Case(65, "a read-only disk", read_only, 8, ("Read-only file system", "choose another place with -o")),
    Case(
        65,
        "a read-only disk, resume",
        both(trained, read_only),
        8,
        ("cannot write here: Read-only", "copy the run to a place"),
        command=MORE,
    ),
    Case(65, "no quota", disk_refuses("", errno.EDQUOT), 8, ("Disk quota exceeded", "free some space")),
    *(
        Case(65, f"no permission, {words[0]}", trained, 8, (said, words[-1]), command=words)
        for said, words in (
            ("could not write file", ("export", "out", "-o", "/proc/x.ply")),
            ("cannot create the folder", ("render", "out", "-o", "/proc/x")),
            ("could not write file", ("eval", "out", "--sheet", "/proc/x.png")),
        )
    ),
    Case(
        66,
        "in the middle",
        disk_refuses("ckpt_000001"),
        8,
        ("finished and saved, but the checkpoints of save.steps [1] could not be written", "step 1: could not write"),
        ("-n", "3", "--set", "save.steps=[1]"),
        begins=True,
    ),
    Case(
        66,
        "at the end",
        disk_refuses("ckpt_000001"),
        8,
        ("the state after step 1 could not be saved", FIRST, "splat resume out"),
        ("--set", "save.patience_minutes=0"),
        begins=True,
    ),
    # Machines.
    Case(67, "a GPU that is not there", nothing, 4, ("there is no cuda:99", "--device cpu"), ("--device", "cuda:99")),
    Case(67, "no device", nothing, 2, ("'gpu' is no device", "cuda:1"), ("--device", "gpu")),
    Case(67, "the CPU will do", in_environment(CUDA_VISIBLE_DEVICES=""), 0, flags=("--device", "cpu")),
    Case(
        68,
        "once",
        memory_ends(lambda step, count: step == 2 and count > 600),
        0,
        ("going on with strategy.cap_max = 596",),
        ("-n", "3"),
    ),
    Case(
        68,
        "again and again",
        memory_ends(lambda step, count: step >= 1),
        4,
        ("at step 1, with 482 Gaussians", "--cap-max"),
        ("-n", "3"),
        begins=True,
    ),
    Case(68, "from the first step on", memory_ends(lambda step, count: True), 4, ("with 663 Gaussians", "--cap-max")),
    Case(
        69,
        "more than 32 bits number",
        overflowing,
        4,
        ("39,520 visible Gaussians would cover 2,589,982,720 tiles", "already activated ones look like this"),
        command=(
            "render",
            "many.ply",
            "--param-space",
            "raw",
            "--views",
            "large.json",
            "-o",
            "output",
            "--device",
            "cpu",
        ),
    ),
    # Surroundings; those that need a process of their own are below.
    Case(70, "no home, no colour, plain locale", in_environment(HOME=None, NO_COLOR="1", LANG="C", TERM="dumb"), 0),
    Case(70, "the clock runs back", clock_runs_back, 0, flags=("-n", "3")),
    # The command line.
    *(
        Case(71, " ".join(words), nothing, 2, (said,), words)
        for words, said in (
            (("--iteration", "5"), "did you mean --iterations?"),
            (("--itertions", "5"), "did you mean --iterations?"),
            (("-n", "0"), "train.iterations = 0"),
            (("-n", "abc"), "train.iterations = 'abc': expected a whole number, e.g. 30000\n  where: --iterations\n"),
            (
                ("--strategy", "igs+"),
                "expected a name of letters, digits, _, - and ., e.g. absgrad\n  where: --strategy",
            ),
            (("-n", "1e-4"), "--iterations"),
            (("--cap-max", "-1"), "strategy.cap_max = -1"),
            (("--sh-degree", "7"), "sh_degree = 7: expected a number of at most 4"),
            (("--set", "optim.means_lr=nan"), "optim.means_lr = nan"),
            (("--set", "optim.means_lr=-1"), "means_lr = -1: expected a number above 0, e.g. 0.00016"),
            (("--set", "optim.mean_lr=1"), "did you mean optim.means_lr?"),
            (("--set", "save.every_minutes=nan"), "save.every_minutes = nan"),
            (("-r", "nan"), "data.resolution = nan"),
            (("--seed", "x"), "--seed"),
            (("--strategy", "defalt"), "strategy.name = 'defalt'"),
            (("--white-background", "--random-background"), "exclude each other"),
            (("--lenient",), "--init MODEL"),
        )
    ),
    Case(71, "no such command", nothing, 2, ("Did you mean 'train'?",), command=("trian", "scene")),
    Case(71, "views that are none", trained, 2, ("names no views",), command=("render", "out", "--views", "nope")),
    Case(71, "no colour", trained, 2, ("is not a colour",), command=("render", "out", "--background", "inf,0,0")),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case, expect: Expect) -> None:
    expect(case)


@pytest.mark.parametrize("fails_from", [1, 2])
def test_what_is_left_of_a_run_that_found_no_memory_is_of_its_true_step(fails_from: int, expect: Expect) -> None:
    """A run that gives up must not leave a checkpoint that says it got further."""
    harm = memory_ends(lambda step, count: step >= fails_from)
    case = Case(68, "for good", harm, 4, ("--cap-max",), ("-n", "3", "--set", "save.steps=[1]"), begins=True)
    expect(case)
    steps = {path.name: load_checkpoint(path).step for path in Path("out/ckpts").glob("ckpt_*.pt")}
    assert steps == {"ckpt_000000.pt": 0, "ckpt_000001.pt": 1}


def test_a_full_disk_keeps_the_older_checkpoint_whole(expect: Expect) -> None:
    case = Case(66, "", disk_refuses("ckpt_000001"), 8, flags=("--set", "save.patience_minutes=0"), begins=True)
    expect(case)
    assert load_checkpoint(Path(FIRST)).step == 0
    assert [path.name for path in Path("out/ckpts").iterdir()] == ["ckpt_000000.pt"]


@dataclass(frozen=True)
class Surroundings:
    """A shell command in a folder with the good scene, which has to end well and without a word from Python."""

    row: int
    name: str
    text: str
    out: str

    def __str__(self) -> str:
        return f"row {self.row}: {self.name}"


WORDS = " ".join(QUICK)

PROCESSES = [
    Surroundings(
        70,
        "no stdin, no home, a plain locale, 64 files, a scene named ä",
        "mv scene ä; unset HOME; export LC_ALL=C LANG=C NO_COLOR=1; ulimit -n 64; "
        f"splat train ä -o out {WORDS} <&- && cat out/latest",
        "out/ckpts/ckpt_000001.pt\nckpts/ckpt_000001.pt\n",
    ),
    Surroundings(
        70,
        "the folder it stands in was deleted",
        f'here=$PWD; mkdir gone; cd gone; rmdir "$here/gone"; '
        f'splat train "$here/scene" {WORDS} -o "$here/out" 2>&1 | grep -v getcwd; ls "$here"',
        "error[E002]: the working directory has been deleted\n  help: cd to an existing folder\nscene\n",
    ),
    Surroundings(
        72,
        "a reader that goes away",
        "splat info scene | head -1 | wc -l; echo ${PIPESTATUS[0]}",
        "1\n0\n",
    ),
]


@pytest.mark.parametrize("surroundings", PROCESSES, ids=str)
def test_surroundings(
    surroundings: Surroundings, good_scene: Path, tmp_path: Path, fresh_shell: Callable[..., Done]
) -> None:
    copy_scene(good_scene, tmp_path)
    done = fresh_shell(surroundings.text)
    assert done.out == surroundings.out, done.err
    assert "Traceback" not in done.err
    assert "Exception ignored" not in done.err


#: ``splat``, which says first that its own code runs: an interrupt while Python itself starts is not ours to guard.
BEGUN = """\
import sys
from splatcli import cli

open_streams = cli._open_missing_streams
cli._open_missing_streams = lambda: (print("begun", flush=True), open_streams())
sys.exit(cli.main())
"""


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.3, 0.9, 1.5, 2.1])
def test_row_72_ctrl_c_at_any_time(seconds: float, good_scene: Path, tmp_path: Path) -> None:
    """While libraries load, while the scene is read, in the first steps: 130, no traceback, a whole run or none."""
    command = [sys.executable, "-c", BEGUN, "train", str(good_scene), "-o", str(tmp_path / "out"), *QUICK]
    process = subprocess.Popen(
        [*command, "-n", "1000000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "error[" not in err
    if (tmp_path / "out").exists():
        # A signal before the first step leaves the checkpoint of step 0.
        step, path = re.findall(r"step (\d+): saved (\S+)", err)[-1]
        assert Path(out.strip()).name == Path(path).name
        assert load_checkpoint(tmp_path / out.strip()).step == int(step)
