"""Measure what --offload saves and costs on the CPU: the process's own memory, processor time, bytes read from disk.

    python -m benchmarks.offload FOLDER [--gaussians 500000] [--seen 0.03] [--steps 60] [--rounds 3] [--out FILE]

FOLDER, on the disk in question, takes the files. A plain of Gaussians is trained on views from above that each see a
part of it, in a process of its own for each kind of run: "resident", "offloaded"; "evicted", offloaded with all pages
put out before each step, as if others wanted the memory all the time; and "evicted, unordered", the same with Gaussians
in random order. All of them must end with the same bits, but for the last.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.origin import origin
from splatcli import machine
from splatcli.config import Config
from splatcli.gaussians import GROUPS, Gaussians
from splatcli.native.backend import Backend
from splatcli.rasterizer import AdamState, DensifyStats, NativeEngine, StepInputs
from splatcli.rasterizer.memory_estimate import state_bytes
from splatcli.rasterizer.offload import storage_for
from splatcli.scene.camera import Camera
from splatcli.scene.points import morton_order
from splatcli.train.init import gaussians_from_points

KINDS = ("resident", "offloaded", "evicted", "evicted, unordered")

#: The plain's edge, and how high above it the cameras are, in world units; edge of the images in pixels.
SIDE, HEIGHT, SIZE = 100.0, 20.0, 128
VIEWS = 60
#: Steps that are not counted: buffers grow.
WARM_UP = 5
#: <sys/mman.h>, <linux/mman.h>
MS_SYNC, MADV_PAGEOUT = 4, 21


def plain(count: int, *, ordered: bool) -> Gaussians:
    random = np.random.default_rng(1)
    xyz = np.c_[random.uniform(0, SIDE, (count, 2)), random.uniform(0, 3, count)].astype(np.float32)
    xyz = xyz[morton_order(xyz)] if ordered else xyz
    rgb = random.uniform(0, 1, (count, 3)).astype(np.float32)
    return gaussians_from_points(xyz, rgb, Config.model_validate({"model": {"sh_degree": 3}}))


def cameras(seen: float) -> list[Camera]:
    """Looking down on squares that are the part ``seen`` of the plain."""
    random, half = np.random.default_rng(2), SIDE * np.sqrt(seen) / 2
    focal = SIZE / 2 / (half / HEIGHT)
    found = []
    for index in range(VIEWS):
        viewmat = np.eye(4)
        viewmat[:3, :3] = np.diag([1.0, -1.0, -1.0])
        viewmat[:3, 3] = -viewmat[:3, :3] @ np.array([*random.uniform(half, SIDE - half, 2), HEIGHT])
        found.append(Camera(f"{index}.png", SIZE, SIZE, focal, focal, SIZE / 2, SIZE / 2, viewmat))
    return found


def measure(kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run of one kind, in this process."""
    Backend.cpu()
    before, offload = status(), kind != "resident"
    store = storage_for(offload, "cpu", arguments.folder)
    gaussians = plain(arguments.gaussians, ordered="unordered" not in kind)
    gaussians = gaussians.map(lambda tensor: tensor, shN=lambda tensor: store.copy(tensor, "cpu"))
    adam, stats = AdamState.zeros_like(gaussians, storage=store), DensifyStats.zeros(len(gaussians))
    engine = NativeEngine(Backend.cpu())
    random = np.random.default_rng(3)
    views = cameras(arguments.seen)
    images = [torch.from_numpy(random.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)) for _ in views]
    ctypes.CDLL(None).malloc_trim(0)
    peak, seconds, clock, read = status(), 0.0, 0.0, 0
    for step in range(WARM_UP + arguments.steps):
        if kind.startswith("evicted"):
            evict(gaussians, adam)
        inputs = StepInputs(
            views[step % VIEWS], images[step % VIEWS], dict.fromkeys(GROUPS, 1e-3), 3, torch.zeros(3), 0.2, False, stats
        )
        started = time.process_time(), time.monotonic(), bytes_read()
        engine.step(gaussians, adam, inputs)
        if step >= WARM_UP:
            seconds += time.process_time() - started[0]
            clock += time.monotonic() - started[1]
            read += bytes_read() - started[2]
        peak = {name: max(most, now) for (name, most), now in zip(peak.items(), status().values(), strict=True)}
    digest = hashlib.sha256()
    for _, tensor in gaussians.items():
        digest.update(tensor.numpy().tobytes())
    return {
        "kind": kind,
        "own_mib": mib(peak["RssAnon"] - before["RssAnon"]),
        "files_mib": mib(peak["RssFile"] - before["RssFile"]),
        "state_mib": mib(state_bytes(arguments.gaussians, 3, offloads=offload)),
        "cpu_ms": round(1e3 * seconds / arguments.steps, 1),
        "clock_ms": round(1e3 * clock / arguments.steps, 1),
        "read_mib": mib(read / arguments.steps),
        "digest": digest.hexdigest()[:16],
    }


def evict(gaussians: Gaussians, adam: AdamState) -> None:
    """Writes all offloaded pages to the disk and lets go of them."""
    libc = ctypes.CDLL(None, use_errno=True)
    for tensor in (gaussians.shN, adam.exp_avg.shN, adam.exp_avg_sq.shN):
        place = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
        if libc.msync(*place, MS_SYNC) or libc.madvise(*place, MADV_PAGEOUT):
            raise OSError(ctypes.get_errno(), "the pages would not go")


def status() -> dict[str, int]:
    """Resident bytes of this process: its own, and pages of files."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0][:-1]: 1024 * int(words[1]) for words in lines if words[0] in ("RssAnon:", "RssFile:")}


def bytes_read() -> int:
    """From disks, by this process."""
    lines = (line.split() for line in Path("/proc/self/io").read_text().splitlines())
    return next(int(words[1]) for words in lines if words[0] == "read_bytes:")


def mib(nbytes: float) -> float:
    return round(nbytes / 2**20, 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gaussians", type=int, default=500_000)
    parser.add_argument("--seen", type=float, default=0.03)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.kind:
        print(json.dumps(measure(arguments.kind, arguments)))
        return
    arguments.folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for _ in range(arguments.rounds):
        for kind in KINDS:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.offload", *sys.argv[1:], "--kind", kind],
                stdout=subprocess.PIPE,
                check=True,
            )
            rows.append(json.loads(done.stdout))
            print(rows[-1], flush=True)
    assert len({row["digest"] for row in rows if "unordered" not in row["kind"]}) == 1, "the bits differ"
    run = {
        "command": " ".join(["python -m benchmarks.offload", "FOLDER", *sys.argv[2:]]),
        **origin(),
        "threads": machine.cores(),
    }
    if arguments.out:
        arguments.out.write_text(json.dumps({**run, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
