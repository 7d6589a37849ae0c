"""Reading and writing a PLY of a million Gaussians: formats/ply.py beside plyfile, each in a process of its own.

    python benchmarks/ply.py [--count 1000000]

Wall clock, and peak memory beyond the start. plyfile's columns are gathered as formats/ply.py gathers its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import plyfile
import torch

from splatcli.formats import ply
from splatcli.gaussians import Gaussians


def scene(count: int) -> Gaussians:
    rng = torch.Generator().manual_seed(0)
    shapes = ((3,), (4,), (3,), (), (3,), (15, 3))
    return Gaussians(*(torch.randn(count, *shape, generator=rng) for shape in shapes))


def peak() -> float:
    """Megabytes."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


def by_plyfile(path: Path, mmap: str | bool) -> list[object]:
    rows = plyfile.PlyData.read(str(path), mmap=mmap)["vertex"].data
    flat = rows.view("<f4").reshape(len(rows), -1)
    order = [*ply._MEANS, *ply._QUATS, *ply._SCALES, *ply._OPACITY, *ply._SH0, *ply._rest_names(45)]
    return [flat[:, [rows.dtype.names.index(name) for name in order]].astype(np.float32)]


def write_plyfile(gaussians: Gaussians, path: Path) -> None:
    names = ply.property_names(15)
    rows = ply._table(gaussians, names).view([(name, "<f4") for name in names])[:, 0]
    element = plyfile.PlyElement.describe(rows, "vertex", comments=[ply.RAW_COMMENT])
    plyfile.PlyData([element], byte_order="<").write(str(path))


WAYS = {
    "write, formats/ply.py": lambda path, gaussians: ply.write_ply_file(gaussians, path),
    "write, plyfile": lambda path, gaussians: write_plyfile(gaussians, path),
    "read, formats/ply.py": lambda path, _: ply.import_ply(path),
    "read, plyfile, memory-mapped": lambda path, _: by_plyfile(path, "r"),
    "read, plyfile": lambda path, _: by_plyfile(path, False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way is None:
        with tempfile.TemporaryDirectory() as folder:
            for way in WAYS:
                path = ["--count", str(given.count), "--path", f"{folder}/a.ply"]
                subprocess.run([sys.executable, __file__, "--way", way, *path], check=True)
        return
    gaussians = scene(given.count if given.way.startswith("write") else 1)
    Path("/proc/self/clear_refs").write_text("5")
    before, start = peak(), time.perf_counter()
    kept = WAYS[given.way](given.path, gaussians)
    print(f"{given.way:30} {time.perf_counter() - start:7.2f} s, {peak() - before:5.0f} MB")
    del kept


if __name__ == "__main__":
    main()
