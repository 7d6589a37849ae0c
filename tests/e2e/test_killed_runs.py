"""A run that is killed and resumed ends bit-identical to one that was left alone: as processes, on the sample."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.forked import splat_command

SAMPLE = Path(__file__).parents[2] / "data" / "samples" / "courtyard"

#: A 300-step run that refines every 10 steps up to 150 and resets opacities at 30, 60, 90 and 120.
STEPS = 300
SETTINGS = (
    *(str(SAMPLE), "-r", "4", "--iterations", str(STEPS), "--cap-max", "6500", "-q"),
    *("--set", "train.background=random", "--set", "save.keep_last=20"),
    *("--set", "schedule.refine_every=10", "--set", "schedule.reset_every=30"),
)
EDGES = (29, 30, 31, 140, 200)


def splat(*arguments: str, threads: int = 1, killed: bool = False) -> subprocess.Popen[str]:
    """killed: it will be; a forked process ends a moment after the one that is killed."""
    # One core or two: the number of threads must not show in the bits.
    code = "import runpy; runpy.run_module('splatcli', run_name='__main__')"
    if hasattr(os, "sched_setaffinity"):
        code = f"import os; os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[:threads]}); {code}"
    command = [*((sys.executable,) if killed else splat_command()), "-c", code, *arguments]
    variables = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables)


def finish(process: subprocess.Popen[str]) -> Path:
    """The checkpoint that a command prints."""
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return Path(out.strip())


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return {k: v for k, v in torch.load(path, weights_only=True).items() if isinstance(v, torch.Tensor)}


def assert_same_bits(path: Path, reference: Path) -> None:
    mine, theirs = tensors(path), tensors(reference)
    assert mine.keys() == theirs.keys()
    different = [name for name in mine if not torch.equal(mine[name], theirs[name])]
    assert not different, different


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("left_alone") / "run"
    return finish(splat("train", *SETTINGS, "-o", str(run), threads=2))


def test_a_run_killed_at_any_moment_ends_with_the_same_bits(uninterrupted: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    saves = f"save.steps=[{', '.join(map(str, EDGES))}]"
    process = splat("train", *SETTINGS, "--set", saves, "-o", str(run), killed=True)
    for k in EDGES:
        wait_for(run / "ckpts" / f"ckpt_{k:06d}.pt", process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        # Resuming from step k itself repeats what the killed process may have done after it.
        process = splat("resume", str(run / "ckpts" / f"ckpt_{k:06d}.pt"), "-q", killed=k != EDGES[-1])
    assert_same_bits(finish(process), uninterrupted)


def test_stopping_early_and_going_on_is_the_same_run(uninterrupted: Path, tmp_path: Path) -> None:
    stopped = finish(splat("train", *SETTINGS, "--stop-at", "65", "-o", str(tmp_path / "run"), threads=2))
    assert stopped.name == "ckpt_000065.pt"
    assert_same_bits(finish(splat("resume", str(stopped), "-q")), uninterrupted)


def test_a_signal_saves_and_the_run_goes_on(uninterrupted: Path, tmp_path: Path) -> None:
    """tests/cli/test_pipes.py tries the other signal."""
    run = tmp_path / "run"
    process = splat("train", *SETTINGS, "--set", "save.steps=[40]", "-o", str(run))
    wait_for(run / "ckpts" / "ckpt_000040.pt", process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 143, err
    assert "Traceback" not in err
    assert_same_bits(finish(splat("resume", out.strip(), "-q")), uninterrupted)


def wait_for(path: Path, process: subprocess.Popen[str], seconds: float = 300.0) -> None:
    """Until the file is there; fails when the process ends before."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None or path.exists(), process.communicate()[1]
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.01)
