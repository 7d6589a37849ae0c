"""kill -9 at random moments of saving: no save that had returned may be lost.

Each victim opens the run, goes on from the newest checkpoint and acknowledges every step whose save returned. After
each kill the newest checkpoint must load in full and be at or after the last acknowledged step. Every second victim
is killed while it writes a file.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import torch

from splatcli.checkpoint.file import load_checkpoint
from splatcli.checkpoint.run_dir import RunDir, find_latest_sound
from splatcli.errors import SplatError
from tests.torture.harness import WAITING, Figure, Tally, fork, main, workplace
from tests.torture.states import small_checkpoint


def figures(count: int, seed: int) -> dict[str, Figure]:
    start = time.monotonic()
    tally = Tally()
    # On a disk, where a sync takes its time and a kill may come in the middle of it.
    with workplace(memory=False) as folder:
        acknowledged = _kill(folder / "run", count, seed, tally)
    what = "a process that saves without pause is killed: the newest checkpoint loads, and no acknowledged one is lost"
    return {"kill_saves": tally.figure(what, time.monotonic() - start, acknowledged=acknowledged)}


def _kill(run: Path, count: int, seed: int, tally: Tally) -> int:
    """Kills ``count`` victims; the last step that was acknowledged."""
    rng = random.Random(seed)
    RunDir.create(run).close()
    first, each = _pace(run)
    newest = 2
    for trial in range(count):
        saves = trial % 3
        newest = _one_victim(run, saves, rng.uniform(0, 1.5 * (each if saves else first)), trial % 2 == 1) or newest
        try:
            latest = find_latest_sound(run).path
            found = 0 if latest is None else load_checkpoint(latest).step
        except SplatError as error:
            tally.failures.append((trial, f"the newest checkpoint does not load: {error}"))
            continue
        if found < newest:
            tally.failures.append((trial, f"step {newest} was acknowledged, {found} is there"))
        else:
            tally.words["killed_in_mid_write" if _temporary(run) else "killed_elsewhere"] += 1
    RunDir.open(run).close()
    if left := _temporary(run):
        tally.failures.append((count, f"temporary files are left: {left}"))
    return newest


def _temporary(run: Path) -> list[str]:
    return [path.name for path in [*run.iterdir(), *(run / "ckpts").iterdir()] if ".tmp." in path.name]


def _pace(run: Path) -> tuple[float, float]:
    """Seconds from the start of a victim to its first acknowledgement, and from there to the next."""
    child, reader = _start(run)
    times = [time.monotonic()]
    for _ in range(2):
        os.read(reader, 8)
        times.append(time.monotonic())
    _finish(child, reader)
    return times[1] - times[0], times[2] - times[1]


def _one_victim(run: Path, saves: int, seconds: float, writing: bool) -> int:
    """Kills a process ``seconds`` after it has acknowledged ``saves`` saves; the last step acknowledged, 0 for none.

    writing: it is killed at the next moment at which a temporary file is there.
    """
    child, reader = _start(run)
    acknowledged = b"".join(os.read(reader, 8) for _ in range(saves))
    time.sleep(seconds)
    if writing:
        _stop_in_mid_write(run, child)
    acknowledged += _finish(child, reader)
    return int.from_bytes(acknowledged[-8:], "little")


def _stop_in_mid_write(run: Path, child: int) -> None:
    """Stops the process while a temporary file of its own is there."""
    until = time.monotonic() + WAITING
    while time.monotonic() < until:
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
        if any(f".tmp.{child}." in name for name in _temporary(run)):
            return
        os.kill(child, signal.SIGCONT)
        time.sleep(1e-3)
    raise TimeoutError(f"no temporary file in {run} for {WAITING:.0f} s")


def _start(run: Path) -> tuple[int, int]:
    """A victim, and where it acknowledges."""
    reader, writer = os.pipe()
    child = fork()
    if child == 0:
        os.close(reader)
        _save_forever(run, writer)
    os.close(writer)
    return child, reader


def _finish(child: int, reader: int) -> bytes:
    """Kills the victim; what it had acknowledged by then and was not read yet."""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    rest = b""
    while piece := os.read(reader, 1 << 16):
        rest += piece
    os.close(reader)
    return rest


def _save_forever(run: Path, acknowledge: int) -> None:
    torch.set_num_threads(1)
    try:
        with RunDir.open(run) as folder:
            latest = find_latest_sound(run).path
            state = small_checkpoint(400, step=0) if latest is None else load_checkpoint(latest)
            while True:
                state.step += 1
                state.gaussians.means.add_(1.0)
                folder.save(state)
                os.write(acknowledge, state.step.to_bytes(8, "little"))
    finally:
        os._exit(1)


if __name__ == "__main__":
    main(figures, 1000)
