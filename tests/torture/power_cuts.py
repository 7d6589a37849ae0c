"""Loss of power at every moment of saving, played from a record: what had been saved by then is there afterwards.

A run saves, rewinds and saves again in a process whose calls on files are written down (calls.c). Then the power fails
after each call, on paper. A disk that keeps its word has what was synced: of a file the content at its last fsync, of a
folder the names at its last fsync. What happened since may have reached it or not, so that all of these are tried: any
later creations, renames and removals, in any combination (at random where there are too many), and files that were
never synced empty. In each such folder the newest checkpoint must load and be at or after the last acknowledged step.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from splatcli.checkpoint.file import load_checkpoint
from splatcli.checkpoint.run_dir import RunDir, find_latest_sound
from splatcli.errors import SplatError
from tests.torture.calls import Call, armed, read_log, run_under
from tests.torture.harness import Figure, main, workplace
from tests.torture.states import small_checkpoint

#: Combinations of what may have reached the disk that are tried after each call, at most.
COMBINATIONS = 32
#: Made by the recorded process when a save has returned: ack-<number>-<step>.
_ACKNOWLEDGED = "ack-"


def figures(count: int, seed: int) -> dict[str, Figure]:
    """count: at most so many folders as a loss of power may leave them."""
    start = time.monotonic()
    with workplace() as folder:
        calls = record(folder)
        rng = random.Random(seed)
        states = list(dict.fromkeys(states_after(calls, folder / "run", rng)))[:count]
        failures = [text for state in states if (text := fault(state, folder)) is not None]
    what = "the power fails between two calls of a save: the newest checkpoint loads, and no acknowledged one is lost"
    details = {"calls_recorded": len(calls)}
    seconds = round(time.monotonic() - start, 1)
    return {"power_cuts": Figure(what, len(states), len(failures), seconds, details, failures[:10])}


def record(folder: Path) -> list[Call]:
    """The calls of a run at work in ``folder``/run; ``folder``/copies has each file as it was synced."""
    run_under("tests.torture.power_cuts:save_and_rewind", str(folder))
    return read_log(folder / "log")


def save_and_rewind(folder: str) -> None:
    """In a process with the library: three saves of which two are kept, one step back, two more."""
    torch.set_num_threads(1)
    root = Path(folder)
    (root / "copies").mkdir()
    RunDir.create(root / "run").close()
    with armed(root / "run", log=root / "log", copies=root / "copies"), RunDir.open(root / "run") as run:
        for number, step in enumerate((1, 2, 3, -2, 4, 5)):
            if step < 0:  # from here on step 3 may go
                os.mkdir(root / "run" / f"{_ACKNOWLEDGED}{number}-{-step}")
                run.rewind(-step)
            else:
                run.append_metrics({"event": "step", "step": step, "loss": 0.5})
                run.save(small_checkpoint(8, step=step, save={"keep_last": 2}))
                os.mkdir(root / "run" / f"{_ACKNOWLEDGED}{number}-{step}")


@dataclass(frozen=True)
class State:
    """The content of the disk after a loss of power.

    at: the call after which it came. least: the step that was acknowledged last.
    files: (path, number of the copy that is its content; 0 for a file that was never synced).
    """

    at: int
    least: int
    files: frozenset[tuple[str, int]]

    def __hash__(self) -> int:
        return hash((self.least, self.files))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and (self.least, self.files) == (other.least, other.files)


@dataclass
class Disk:
    """Names and contents as a system sees them, and as the disk certainly has them.

    live, safe: path -> the file's number. pending: (folder, path, file or None for a removal) since the folder's sync.
    copies: file -> number of the copy made at its last fsync.
    """

    live: dict[str, int] = field(default_factory=dict)
    safe: dict[str, int] = field(default_factory=dict)
    pending: list[tuple[dict[str, int | None], str]] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)

    def apply(self, call: Call) -> None:
        if call.kind == "create" and call.name not in self.live:
            self.live[call.name] = call.number
            self._later({call.name: call.number}, call.name)
        elif call.kind == "rename" and call.name in self.live:
            moved = self.live.pop(call.name)
            self.live[call.other] = moved
            self._later({call.name: None, call.other: moved}, call.other)
        elif call.kind == "unlink" and call.name in self.live:
            del self.live[call.name]
            self._later({call.name: None}, call.name)
        elif call.kind == "fsync" and call.name in self.live:
            self.copies[self.live[call.name]] = call.number
        elif call.kind == "fsync":  # of a folder
            for change, folder in self.pending:
                if folder == call.name:
                    _change(self.safe, change)
            self.pending = [(change, folder) for change, folder in self.pending if folder != call.name]

    def _later(self, change: dict[str, int | None], path: str) -> None:
        self.pending.append((change, os.path.dirname(path)))

    def after_a_cut(self, rng: random.Random) -> Iterator[frozenset[tuple[str, int]]]:
        """Yield what may be found: all combinations of pending changes, in their order, or some of them."""
        count = len(self.pending)
        if 2**count <= COMBINATIONS:
            chosen = list(itertools.product((False, True), repeat=count))
        else:
            chosen = [(False,) * count, (True,) * count]
            chosen += [tuple(rng.random() < 0.5 for _ in range(count)) for _ in range(COMBINATIONS - 2)]
        for reached in chosen:
            names = dict(self.safe)
            for (change, _), there in zip(self.pending, reached, strict=True):
                if there:
                    _change(names, change)
            yield frozenset((path, self.copies.get(file, 0)) for path, file in names.items())


def _change(names: dict[str, int], change: dict[str, int | None]) -> None:
    for path, file in change.items():
        if file is None:
            names.pop(path, None)
        else:
            names[path] = file


def states_after(calls: list[Call], run: Path, rng: random.Random) -> Iterator[State]:
    disk = Disk()
    least = 0
    for call in calls:
        name = Path(call.name)
        if call.kind == "mkdir" and name.name.startswith(_ACKNOWLEDGED):
            least = int(name.name.rpartition("-")[2])
        else:
            disk.apply(call)
        for files in disk.after_a_cut(rng):
            yield State(call.number, least, frozenset((os.path.relpath(p, run), copy) for p, copy in files))


def fault(state: State, folder: Path) -> str | None:
    """Return what is wrong with a run that a loss of power has left in this state; None when nothing is lost."""
    run = folder / "after"
    shutil.rmtree(run, ignore_errors=True)
    (run / "ckpts").mkdir(parents=True)
    for name, copy in state.files:
        if copy:
            shutil.copyfile(folder / "copies" / str(copy), run / name)
        else:
            (run / name).write_bytes(b"")
    when = f"power fails after call {state.at}"
    try:
        latest = find_latest_sound(run).path
        step = 0 if latest is None else load_checkpoint(latest).step
        with RunDir.open(run):  # it can be gone on with, and what is half written goes
            pass
    except SplatError as error:
        return f"{when}: {error}"
    left: list[Any] = [path.name for path in run.rglob("*.tmp.*")]
    if left:
        return f"{when}: left over are {left}"
    return None if step >= state.least else f"{when}: step {state.least} was acknowledged, {step} is there"


if __name__ == "__main__":
    main(figures, 100_000)
