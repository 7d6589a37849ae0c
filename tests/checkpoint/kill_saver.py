"""Kill a process that saves without pause, many times, and count what is lost: kill_saver.py RUN KILLS.

Each victim opens the run, goes on from the newest checkpoint and acknowledges every step whose save returned.
After each kill the newest checkpoint must load in full and be at or after the last acknowledged step.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from conftest import random_checkpoint

from splatcli.checkpoint.load import load_checkpoint
from splatcli.checkpoint.rundir import RunDir, find_latest


def victim(run: Path, acknowledge: int) -> None:
    with RunDir.open(run) as folder:
        latest = find_latest(run)
        state = random_checkpoint(400) if latest is None else load_checkpoint(latest)
        if latest is None:
            state.step = 0
        while True:
            state.step += 1
            state.gaussians.means.add_(1.0)
            folder.save(state)
            os.write(acknowledge, state.step.to_bytes(8, "little"))


def main(run: Path, kills: int) -> None:
    torch.set_num_threads(1)  # the victims are forked
    rng = random.Random(0)
    RunDir.create(run).close()
    newest = 0
    for trial in range(kills):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            victim(run, writer)
        os.close(writer)
        acknowledged = b"".join(os.read(reader, 8) for _ in range(trial % 3))  # waits for 0, 1 or 2 saves
        time.sleep(rng.uniform(0, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while piece := os.read(reader, 1 << 16):
            acknowledged += piece
        os.close(reader)
        if acknowledged:
            newest = int.from_bytes(acknowledged[-8:], "little")
        latest = find_latest(run)
        found = 0 if latest is None else load_checkpoint(latest).step
        assert found >= newest, f"kill {trial}: step {newest} was acknowledged, {found} is there"
    with RunDir.open(run):
        left = [path.name for path in [*run.iterdir(), *(run / "ckpts").iterdir()] if ".tmp." in path.name]
    assert not left, f"temporary files are left: {left}"
    assert newest >= kills - 2, f"only {newest} saves in {kills} kills: this proves nothing"
    print(f"{kills} kills, {newest} saves acknowledged, none lost")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
