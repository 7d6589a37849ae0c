"""The k-th call that reads a file fails, or the k-th large allocation, during a whole command.

Each command runs in a process forked with its modules loaded, on a scene and a run of its own. It
must end with the code of the place that was refused (scene 3, model 5, output 8), of a lack of descriptors or memory
(4), or well, and then with the result of a run left alone. It must name what it could not read, call nothing damaged
that is not, and leave every checkpoint where it is.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import random
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from splatcli.checkpoint.container import read_container
from splatcli.checkpoint.run_dir import find_latest_sound
from splatcli.cli.commands import run as splat
from splatcli.native.backend import best_isa, load_cpu
from tests.cli.tiny import QUICK, write_scene
from tests.torture import harness
from tests.torture.calls import MEMORY, READING, armed, run_under
from tests.torture.harness import Case, Figure, main, run_cases, workplace

#: What may be wrong with each kind of call.
FAULTS = {
    "open": ("EACCES", "EIO", "ESTALE", "EMFILE", "ENOMEM"),
    "read": ("EIO", "ESTALE", "ENOMEM"),
    "stat": ("EACCES", "EIO", "ESTALE"),
    "readdir": ("EIO", "ESTALE"),
    "close": ("EIO",),
    MEMORY: ("ENOMEM",),
}

#: Exit codes of a call that is refused: scene, memory and descriptors, model, output. No 11: nothing is damaged.
REFUSED = (3, 4, 5, 8)

#: The run has the checkpoints of steps 2 and 4, and goes on to 6.
_SETTINGS = ("-q", *QUICK, "--set", "save.steps=[2]", "--set", "save.patience_minutes=0")


def figures(count: int, seed: int) -> dict[str, Figure]:
    """count: faults of either figure, drawn at random of all that there are."""
    load_cpu(best_isa())  # building it is no part of a command
    what = {
        "faults_reading": "a call that reads a file fails during a whole command: it ends well, with the same result, "
        "or with the code and the name of what was refused; nothing is called damaged, or moved",
        "faults_memory": "a large allocation fails during a whole command: it ends well, or with exit code 4 and a "
        "message",
    }
    names = [name for name in what if harness.wanted(name)]
    found = run_under("tests.torture.faults_reading:tried", names, count, seed, harness.minutes())
    return {name: Figure(what[name], **figure) for name, figure in found.items()}


def tried(names: list[str], count: int, seed: int, minutes: float | None) -> dict[str, dict[str, Any]]:
    """In a process with the library: the figures, but for what they say. minutes: for each of them."""
    torch.set_num_threads(1)  # before a thread is there that a fork would lose
    harness.stop_after(minutes)
    found = {}
    with workplace() as folder:
        stage = Stage(folder)
        possible = stage.cases()
        for name in names:
            start = time.monotonic()
            cases = [fault for fault in possible if (fault.kind == MEMORY) == (name == "faults_memory")]
            random.Random(seed).shuffle(cases)
            # The rasterizer's threads keep what they have allocated: only a process of its own meets all failures.
            apart = name == "faults_memory"
            tally = run_cases(stage.case_of(cases), min(count, len(cases)), memory=2 << 30, apart=apart)
            figure = tally.figure("", time.monotonic() - start, possible=len(cases))
            found[name] = {
                "trials": figure.trials,
                "failures": figure.failures,
                "seconds": figure.seconds,
                "details": figure.details,
                "shown": figure.shown,
            }
    return found


@dataclass(frozen=True)
class Command:
    """A command line in the folder whose calls fail, and what has come of it when it ended well.

    words: {place} stands for the folder. result: (folder, stdout) -> something to compare.
    """

    words: str
    result: Callable[[Path, str], object]


@dataclass(frozen=True)
class Fault:
    """The ``k``-th call of ``kind`` fails with ``error`` during ``command``; and those after it, if ``lasting``."""

    command: str
    kind: str
    error: str
    k: int
    lasting: bool


class Stage:
    """The folder in which commands run, and what they make when nothing fails."""

    def __init__(self, folder: Path) -> None:
        self.kept, self.place = folder / "kept", folder / "place"
        scene = write_scene(self.place / "scene")
        train = ("train", str(scene), "-o", str(self.kept), "-n", "6", "--stop-at", "4", *_SETTINGS)
        if splat(train) != 0:
            raise RuntimeError("the run that the faults are to meet does not come about")
        self.reference = {name: self.attempt(name)[1] for name in COMMANDS}

    def cases(self) -> list[Fault]:
        """All there are: every call of every kind that each command makes."""
        found = []
        for name in COMMANDS:
            calls: dict[str, int] = {}
            for kinds in (READING, (MEMORY,)):  # allocations are counted only where they are to fail
                self._clear()
                with armed(self.place, kinds[-1], 1 << 40) as library:
                    self._run(name)
                    calls |= {kind: library.calls_seen(kind.encode()) for kind in kinds}
            found += [
                Fault(name, kind, error, k, lasting)
                for kind in calls
                for k in range(1, calls[kind] + 1)
                for error in FAULTS[kind]
                for lasting in (False, True)
            ]
        return found

    def case_of(self, cases: list[Fault]) -> Case:
        def case(index: int) -> str:
            fault = cases[index]
            try:
                return self.attempt(fault.command, fault)[0]
            except AssertionError as error:
                raise AssertionError(f"{fault}: {' | '.join(str(error).splitlines()[-8:])}") from None

        return case

    def attempt(self, name: str, fault: Fault | None = None) -> tuple[str, object]:
        """(a word for how a command ended, its result if it ended well). Raises AssertionError."""
        self._clear()
        fired = False
        if fault is None:
            code, out, err = self._run(name)
            assert code == 0, err
        else:
            number = getattr(errno, fault.error)
            with armed(self.place, fault.kind, fault.k, number, lasting=fault.lasting) as library:
                code, out, err = self._run(name)
                fired = library.calls_fired() > 0
        assert "Traceback" not in err, err[-1500:]
        if code == 0:
            result = COMMANDS[name].result(self.place, out)
            if fault is not None and result != self.reference[name]:
                # Training that has no memory goes back to a checkpoint, and on with fewer Gaussians, and says so.
                assert fault.error == "ENOMEM", f"other result: {err}"
                assert _facts(self.place, out).get("rollbacks"), f"other result: {err}"
            self._check_kept(name)
            return ("ended well" if fired else "did not come about"), result
        assert fired, f"exit {code} without a fault: {err}"
        # A run that is done, but for a checkpoint in between that was to be kept, says so with 8.
        done = code == 8 and "the run is finished and saved" in err
        allowed = (4,) if fault is not None and fault.kind == MEMORY else REFUSED
        assert done or code in allowed, f"exit {code}: {err[-1500:]}"
        assert err.startswith(("error[", "warning:", "splat ", "reading ")), err[:300]
        message = err[err.index("error[") :]
        named = code == 4 or str(self.place) in message
        assert named, f"names no place: {message}"
        assert "damaged" not in message.replace("that the file is damaged", ""), f"calls it damaged: {message}"
        assert "help: " in message, message
        self._check_kept(name)
        return f"exit_{code}", None

    def _run(self, name: str) -> tuple[int, str, str]:
        words = [word.format(place=self.place) for word in COMMANDS[name].words.split()]
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # a file that an error has left to be closed by itself
            code = splat(words)
        return code, out.getvalue(), err.getvalue()

    def _clear(self) -> None:
        """The folder as it is before a command."""
        for name in ("run", "out", "out.ply"):
            path = self.place / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        shutil.copytree(self.kept, self.place / "run")
        if not (self.place / "model.ply").exists():
            assert splat(["export", str(self.kept), "-o", str(self.place / "model.ply"), "-q"]) == 0

    def _check_kept(self, name: str) -> None:
        """No checkpoint is lost or put aside."""
        names = {path.name for path in (self.place / "run" / "ckpts").iterdir()}
        assert not any(".old" in other for other in names), sorted(names)
        for step in (2, 4):
            path = self.place / "run" / "ckpts" / f"ckpt_{step:06d}.pt"
            # A run keeps the two newest, and those of save.steps.
            assert name == "resume" or path.read_bytes() == (self.kept / "ckpts" / path.name).read_bytes(), path
        assert (self.place / "run" / "ckpts" / "ckpt_000004.pt").exists()


def _digests(run: Path) -> object:
    latest = find_latest_sound(run).path
    assert latest is not None
    manifest = read_container(latest).manifest
    return manifest.train.step, {tensor.name: tensor.sha256 for tensor in manifest.tensors}


def _pictures(place: Path, out: str) -> object:
    return {path.name: path.read_bytes() for path in (place / "out").iterdir()}


def _facts(place: Path, out: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(out.splitlines()[-1])
    return facts


COMMANDS: dict[str, Command] = {
    "train": Command(
        f"train {{place}}/scene -o {{place}}/out -n 4 --json {' '.join(_SETTINGS)}",
        lambda place, out: _digests(place / "out"),
    ),
    "resume": Command("resume {place}/run --json -q", lambda place, out: _digests(place / "run")),
    "render": Command("render {place}/run -o {place}/out -q", _pictures),
    "eval": Command("eval {place}/run -q --json", _facts),
    "export": Command("export {place}/run -o {place}/out.ply -q", lambda place, out: (place / "out.ply").read_bytes()),
    "export PLY": Command(
        "export {place}/model.ply -o {place}/out.ply -q", lambda place, out: (place / "out.ply").read_bytes()
    ),
    "info": Command("info {place}/run --json -q", _facts),
    "info scene": Command("info {place}/scene --json -q", _facts),
    "check": Command("check {place}/run --json -q", _facts),
}


if __name__ == "__main__":
    main(figures, 100_000)
