"""Ranks from the command line: started, interrupted, resumed by another number of them, refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from splatcli.checkpoint.file import load_checkpoint
from splatcli.checkpoint.run_dir import find_latest_sound
from splatcli.cli.commands import run as splat
from splatcli.cli.ranks import check_sharded
from splatcli.distributed.launch import joint_code
from splatcli.errors import UsageError
from splatcli.native import abi
from tests.cli.test_suspicious_views import with_negatives
from tests.cli.tiny import QUICK, write_scene
from tests.forked import splat_command
from tests.native.cases import NEEDS_COMPILER
from tests.running import Done

#: Refinement begins at once: its event, unlike that of a step, comes before a second has passed.
SOON = (*QUICK, "--set", "schedule.refine_start=0")
SETTINGS = (*SOON, "--batch-size", "2", "--iterations", "400", "--set", "train.background=random")


def parameters(run: Path) -> dict[str, torch.Tensor]:
    path = find_latest_sound(run).path
    assert path is not None
    return dict(load_checkpoint(path).gaussians.items())


@NEEDS_COMPILER
@pytest.mark.parametrize("mode", ["replicated", "sharded"])
def test_a_run_of_two_ranks_is_interrupted_and_goes_on_alone(mode: str, tmp_path: Path) -> None:
    scene = str(write_scene(tmp_path / "scene"))
    train = ["train", scene, *SETTINGS, "--device", "cpu"]
    ranks = ["--ranks", "2", "--distributed", mode]
    command = [*splat_command(), *train, "-o", str(tmp_path / "two"), *ranks, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:  # one rank speaks
            lines.append(json.loads(line))
            if lines[-1]["event"] == "refined":
                process.send_signal(signal.SIGINT)
                break
        lines += map(json.loads, process.stdout)
        assert process.wait(60) == 130
    assert lines[0]["event"] == "started"
    assert [line["reason"] for line in lines if line["event"] == "result"] == ["SIGINT"]
    step = lines[-1]["step"]
    assert 0 < step < 400
    assert load_checkpoint(tmp_path / "two" / "ckpts" / f"ckpt_{step:06d}.pt").config.train.batch_size == 2

    end = str(step + 3)
    assert splat(["resume", str(tmp_path / "two"), "--stop-at", end, "--device", "cpu", "-q"]) == 0
    assert splat([*train, "-o", str(tmp_path / "one"), "--stop-at", end, "-q"]) == 0
    expected = parameters(tmp_path / "one")
    for name, tensor in parameters(tmp_path / "two").items():
        assert torch.equal(tensor, expected[name]), name


@NEEDS_COMPILER
def test_ranks_leave_out_the_views_that_one_process_does(tmp_path: Path, shell: Callable[..., Done]) -> None:
    names = with_negatives(tmp_path / "scene")
    train = ["train", str(tmp_path / "scene"), "-r", "8", "-n", "260", "--cap-max", "5000", "--device", "cpu", "-q"]
    assert splat([*train, "--batch-size", "2", "-o", str(tmp_path / "one")]) == 0
    expected = parameters(tmp_path / "one")
    for mode in ("replicated", "sharded"):
        run = tmp_path / mode
        assert shell(" ".join(["splat", *train, "--ranks", "2", "--distributed", mode, "-o", str(run)])).code == 0
        path = find_latest_sound(run).path
        assert path is not None
        checkpoint = load_checkpoint(path)
        assert [checkpoint.cameras[checkpoint.train[row]].name for row in checkpoint.skipped] == names
        for name, tensor in parameters(run).items():
            assert torch.equal(tensor, expected[name]), (mode, name)


@NEEDS_COMPILER
def test_poses_of_a_sharded_run_are_those_of_one_process(tmp_path: Path, shell: Callable[..., Done]) -> None:
    """Also where a run goes on with another number of ranks."""
    scene = write_scene(tmp_path / "scene")
    words = [*SOON, "--set", "model.random_points=900", "--set", "views.pose_start=0", "--pose-opt", "--device", "cpu"]
    train = ["train", str(scene), *words, "-n", "40", "--batch-size", "3", "-q"]
    assert splat([*train, "-o", str(tmp_path / "one")]) == 0
    ranks = f"--ranks 3 --distributed sharded -o {tmp_path / 'run'}"
    assert shell(" ".join(["splat", *train, ranks, "--stop-at", "25"])).code == 0
    assert shell(f"splat resume {tmp_path / 'run'} --ranks 2 --distributed sharded --device cpu -q").code == 0
    one, several = (load_checkpoint(tmp_path / name / "ckpts/ckpt_000040.pt") for name in ("one", "run"))
    assert len(one.gaussians) > 2 * abi.CHUNK
    assert one.views["pose"].any()
    for name, tensor in one.views.items():
        assert torch.equal(several.views[name], tensor), name
    for name, tensor in one.gaussians.items():
        assert torch.equal(getattr(several.gaussians, name), tensor), name


#: What a rank does on SIGUSR2 in these tests: it raises an unexpected error.
CRASH = """
import signal


class Broken(Exception):
    pass


def crash(number, frame):
    raise Broken("something broke")


signal.signal(signal.SIGUSR2, crash)
"""


def ranks_of(launcher: int) -> dict[int, int]:
    """The processes that a launcher has started, by rank."""
    found = {}
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        found[next(int(entry[5:]) for entry in environment if entry.startswith(b"RANK="))] = int(child)
    return found


def started(scene: Path, place: Path) -> tuple[subprocess.Popen[bytes], dict[int, int]]:
    """A command that trains with two ranks, after its first steps; and its ranks. It writes to out and err."""
    place.mkdir()
    (place / "sitecustomize.py").write_text(CRASH)
    words = ["train", str(scene), *SOON, "--iterations", "100000", "--ranks", "2", "--device", "cpu", "--json"]
    command = [sys.executable, "-m", "splatcli", *words, "-o", str(place / "run")]
    paths = os.pathsep.join([str(place), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "TMPDIR": str(place), "PYTHONPATH": paths}
    with (place / "out").open("w") as out, (place / "err").open("w") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment)
    deadline = time.monotonic() + 300.0
    while '"refined"' not in (place / "out").read_text():
        assert process.poll() is None, (place / "err").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return process, ranks_of(process.pid)


def end_of(rank: int, fault: signal.Signals, scene: Path, place: Path) -> tuple[int | None, float, str, list[int]]:
    """A run of which one rank meets a fault ends: (exit code, after how many seconds, stderr, ranks still there)."""
    process, ranks = started(scene, place)
    began = time.monotonic()
    os.kill(ranks[rank], fault)
    try:
        code = process.wait(60.0)
    except subprocess.TimeoutExpired:
        code = None
        for pid in (process.pid, *ranks.values()):
            os.kill(pid, signal.SIGKILL)
        process.wait()
    seconds = time.monotonic() - began
    return code, seconds, (place / "err").read_text(), [pid for pid in ranks.values() if Path(f"/proc/{pid}").exists()]


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (signal.SIGKILL, "rank {} was killed by SIGKILL"),
        (signal.SIGSTOP, "rank {} (last in "),
        (signal.SIGUSR2, "rank {} failed: internal error: Broken: something broke"),
    ],
)
def test_whichever_rank_fails_the_command_ends_in_seconds_and_names_it(
    fault: signal.Signals, said: str, tmp_path: Path
) -> None:
    """Whole commands, and signals from outside; one for each rank, at the same time."""
    scene = write_scene(tmp_path / "scene")
    places = [tmp_path / "0", tmp_path / "1"]
    with ThreadPoolExecutor() as pool:
        ends = list(pool.map(end_of, [0, 1], [fault] * 2, [scene] * 2, places))
    load = max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))  # processes for each core, these included
    for rank, (code, seconds, words, left) in enumerate(ends):
        assert code == 7, words
        assert seconds < 15.0 * load, (rank, seconds, words)  # docs/distributed.md says so
        assert words.count("error[") == 1, words
        assert said.format(rank) in words
        assert left == []


@pytest.mark.slow
@NEEDS_COMPILER
def test_a_run_that_is_suspended_goes_on_when_it_is_continued(tmp_path: Path) -> None:
    process, ranks = started(write_scene(tmp_path / "scene"), tmp_path / "run")
    for number, seconds in ((signal.SIGSTOP, 20.0), (signal.SIGCONT, 5.0)):
        for pid in ranks.values():
            os.kill(pid, number)
        before = (tmp_path / "run/out").stat().st_size
        time.sleep(seconds)
        assert process.poll() is None, (tmp_path / "run/err").read_text()
    assert (tmp_path / "run/out").stat().st_size > before, "it trains"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60.0) == 143, (tmp_path / "run/err").read_text()


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.parametrize("mode", ["replicated", "sharded"])
def test_torchruns_ranks_are_the_same(mode: str, tmp_path: Path) -> None:
    scene = str(write_scene(tmp_path / "scene"))
    train = ["train", scene, *QUICK, "--iterations", "12", "--device", "cpu", "-q"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "splatcli"]
    subprocess.run([*launcher, *train, "-o", str(tmp_path / "two"), "--distributed", mode], check=True, timeout=300)
    assert splat([*train, "-o", str(tmp_path / "one"), "--batch-size", "2"]) == 0
    expected = parameters(tmp_path / "one")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in parameters(tmp_path / "two").items())


@pytest.mark.slow
@NEEDS_COMPILER
def test_torchrun_restarts_a_run_of_which_a_rank_was_killed(tmp_path: Path) -> None:
    """The second attempt goes on from the first one's checkpoint, bit-identical to an undisturbed run."""
    words = ["train", str(write_scene(tmp_path / "scene")), *QUICK, "--iterations", "2000", "--device", "cpu"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    ranks = ["--distributed", "replicated", "--json", "--set", "save.every_minutes=0.01"]
    command = [*launcher, "-m", "splatcli", *words, "-o", str(tmp_path / "two"), *ranks]
    with (
        (tmp_path / "err").open("w") as err,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if '"saved"' in line and json.loads(line)["step"] > 100:
                os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
                break
        rest = [json.loads(line) for line in process.stdout if line.startswith("{")]
        assert process.wait(300) == 0, (tmp_path / "err").read_text()
    begun = [event for event in rest if event["event"] == "started"]
    assert len(begun) == 1, "a second attempt"
    assert begun[0]["step"] > 100, "that goes on"
    done = [*words, "-o", str(tmp_path / "one"), "--batch-size", "2", "-q", "--set", "save.every_minutes=0.01"]
    assert splat(done) == 0
    expected = parameters(tmp_path / "one")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in parameters(tmp_path / "two").items())


@pytest.mark.parametrize(
    ("flags", "environment", "code", "said"),
    [
        (["--distributed", "replicated"], {}, 2, "no launcher has given this process a rank"),
        (["--distributed", "replicated"], {"RANK": "0", "WORLD_SIZE": "2"}, 7, "LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        (["--distributed", "shared"], {}, 2, "'shared' is no way to share a run"),
        (["--ranks", "2", "--distributed", "shared"], {}, 2, "replicated or sharded"),
        (["--ranks", "2", "--distributed", "sharded"], {"RANK": "0", "WORLD_SIZE": "2"}, 2, "of which this is one"),
        (["--ranks", "0"], {}, 2, "--ranks"),
        (["--ranks", "2", "--max-time", "60s"], {}, 2, "--max-time plans for one process"),
        (["--batch-size", "0"], {}, 2, "train.batch_size = 0"),
    ],
)
def test_what_cannot_be_is_refused_at_once(
    flags: list[str],
    environment: dict[str, str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert splat(["train", str(tmp_path), "--device", "cpu", *flags]) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "resume"])
@pytest.mark.parametrize("name", ["--gpus", "--ranks"])
def test_gpus_that_are_not_there_are_not_replaced_by_processors(
    command: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asked for under the name of GPUs; asked for as ranks, they share whatever there is."""
    started: list[tuple[list[str], int, bool]] = []

    def launch(command: list[str], ranks: int, *, share_cores: bool) -> int:
        started.append((command, ranks, share_cores))
        return 0

    monkeypatch.setattr("splatcli.distributed.launch.launch", launch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    model = tmp_path / "ckpt.pt"
    model.touch()
    arguments = [command, str(model), f"{name}=3", "--distributed", "sharded"]

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["splat", *arguments])
        return splat(list(arguments))

    assert run(*arguments) == (2 if name == "--gpus" else 0)
    said = capsys.readouterr().err
    if name == "--gpus":
        assert "3 ranks want as many GPUs, and there are 0" in said
        assert "--device cpu" in said
        assert started == []
        assert run(*arguments, "--device", "cpu") == 0
    launched, ranks, share_cores = started[0]
    assert (ranks, share_cores) == (3, True)
    assert launched.count("--distributed") == 1
    assert launched[-4:] == ["--distributed", "sharded", "--device", "cpu"]
    assert not any(word.startswith(name) for word in launched)


def test_what_wants_all_gaussians_in_one_process_is_refused() -> None:
    check_sharded(viewer=False)
    with pytest.raises(UsageError, match="a page shows what one process holds"):
        check_sharded(viewer=True)


def test_variables_of_a_launcher_change_nothing_but_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert splat(["train", str(tmp_path), "--device", "cpu"]) == 3  # as alone: the folder is empty
    assert "WORLD_SIZE is 4, but this process works alone" in capsys.readouterr().err


def test_an_exception_in_one_rank_gives_the_exit_code() -> None:
    assert joint_code([0, 0]) == 0
    assert joint_code([130, 130]) == 130
    assert joint_code([7, 3, 7]) == 3
    assert joint_code([7, -9, 7]) == 7
    assert joint_code([-11]) == 7
    assert joint_code([-2, -2]) == 130  # before there was anything to save


@NEEDS_COMPILER
def test_words_after_two_hyphens_are_no_flags_of_ranks(tmp_path: Path, shell: Callable[..., Done]) -> None:
    write_scene(tmp_path / "-scene")
    flags = "--ranks 2 --device cpu -n 2 --set data.resolution=1 -q -o run"
    done = shell(f"cd {tmp_path} && splat train {flags} -- -scene")
    assert (done.code, done.lines) == (0, ["run/ckpts/ckpt_000002.pt"]), done.err


def test_a_rank_that_cannot_read_the_scene_is_the_one_to_say_so(tmp_path: Path, shell: Callable[..., Done]) -> None:
    done = shell(f"splat train {tmp_path}/nothing --ranks 2 --device cpu")
    assert done.code == 3, done.err
    assert done.err.count("error[") == 1, done.err
    assert os.linesep.join(done.lines) == ""
