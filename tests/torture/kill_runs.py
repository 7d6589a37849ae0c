"""kill -9 of whole training runs at random moments: a resumed run is bit-identical to one left alone.

One run is left alone and gives the trajectory: a digest of the state at every fourth step, and the losses. Others are
killed and resumed, again and again, until they end. After each kill the newest checkpoint must have the digest of its
step, and what ends must have every digest and every loss. A victim is forked with its modules loaded and then runs the
command line ``splat train`` or ``splat resume``, on one processor or on all.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from splatcli.checkpoint.container import read_container
from splatcli.checkpoint.run_dir import find_latest_sound
from splatcli.cli.commands import run as splat
from splatcli.errors import SplatError
from splatcli.native.backend import best_isa, load_cpu
from tests.cli.tiny import QUICK, write_scene
from tests.torture.harness import Figure, Tally, fork, main, quiet_streams, workplace

#: Refines every 10 steps up to 60, resets opacities every 15, saves every 4: everything that can go wrong comes often.
STEPS = 120
SETTINGS = (
    *("--iterations", str(STEPS), "--cap-max", "400", "-q", *QUICK),
    *("--set", "train.background=random", "--set", f"save.steps={list(range(0, STEPS, 4))}"),
    *("--set", "schedule.refine_every=10", "--set", "schedule.reset_every=15"),
)

Trajectory = dict[int, str]


def figures(count: int, seed: int) -> dict[str, Figure]:
    """count: kills under each strategy."""
    load_cpu(best_isa())  # building it is no part of a run
    return {f"kill_runs_{name}": _figure(name, count, seed) for name in ("default", "mcmc")}


def _figure(strategy: str, count: int, seed: int) -> Figure:
    start = time.monotonic()
    tally = Tally()
    with workplace(memory=False) as folder:
        train = ["train", str(write_scene(folder / "scene")), *SETTINGS, "--strategy", strategy]
        _wait(_start([*train, "-o", str(folder / "left_alone")], cores=1))
        seconds = time.monotonic() - start
        reference = Outcome.of(folder / "left_alone")
        if len(reference.trajectory) != STEPS // 4 + 1 or not reference.losses:
            raise RuntimeError("the run that is left alone does not end")
        ended = _kill(train, folder, reference, count, seconds, random.Random(seed), tally)
    what = (
        f"a training run (strategy {strategy}) is killed and resumed: it continues and ends bit-identical to a run "
        "that was left alone"
    )
    return tally.figure(what, time.monotonic() - start, runs_to_the_end=ended)


@dataclass(frozen=True)
class Outcome:
    """The content of a run folder: digests of the states by step, and (step, loss) pairs."""

    trajectory: Trajectory
    losses: list[tuple[int, float]]

    @classmethod
    def of(cls, run: Path) -> Outcome:
        states = {int(path.stem.removeprefix("ckpt_")): state_digest(path) for path in run.glob("ckpts/ckpt_*.pt")}
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return cls(states, [(line["step"], line["loss"]) for line in lines if line["event"] == "step"])


def state_digest(path: Path) -> str:
    """Return a digest of all tensors, which are verified, and of all numbers of the training state."""
    manifest = read_container(path).manifest
    facts = {spec.name: spec.sha256 for spec in manifest.tensors} | manifest.train.model_dump()
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _kill(
    train: list[str], folder: Path, reference: Outcome, count: int, seconds: float, rng: random.Random, tally: Tally
) -> int:
    """Kills ``count`` times; how many runs came to their end in between."""
    ended = number = trial = 0
    run = folder / "run-0"
    while trial < count:
        latest = find_latest_sound(run).path
        command = [*train, "-o", str(run)] if latest is None else ["resume", str(latest), "-q"]
        if latest is None and run.exists():
            command.append("--overwrite")
        child = _start(command, cores=rng.choice([1, 64]))
        time.sleep(rng.uniform(0, 0.7 * seconds))
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            fault = None if Outcome.of(run) == reference else "a run ended with other bits"
            number, ended, trial = number + 1, ended + 1, trial + (fault is not None)
            run = folder / f"run-{number}"
        else:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            fault = _newest_fault(run, reference)
            saved = find_latest_sound(run).path is not None
            tally.words["killed_with_a_save" if saved else "killed_before_a_save"] += fault is None
            trial += 1
        if fault is not None:
            tally.failures.append((trial, fault))
    return ended


def _newest_fault(run: Path, reference: Outcome) -> str | None:
    """Return what is wrong with the newest checkpoint of a run that was killed."""
    latest = find_latest_sound(run).path
    if latest is None:
        saved = list(run.glob("ckpts/ckpt_*.pt"))
        return f"{len(saved)} checkpoints, none of them sound" if saved else None
    step = int(latest.stem.removeprefix("ckpt_"))
    try:
        same = state_digest(latest) == reference.trajectory.get(step)
    except SplatError as error:
        return f"the newest checkpoint does not load: {error}"
    return None if same else f"the state of step {step} has other bits"


def _start(command: list[str], cores: int) -> int:
    """A process that runs a ``splat`` command on at most ``cores`` processors; its id."""
    child = fork()
    if child == 0:
        code = 1
        try:
            quiet_streams()
            torch.set_num_threads(1)
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
            code = splat(command)
        finally:
            os._exit(code)
    return child


def _wait(child: int) -> None:
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        raise RuntimeError(f"the run that is left alone ended with {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main(figures, 100)
