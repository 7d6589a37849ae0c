"""Registers, spills and shared memory of every CUDA kernel, as ptxas reports them; no GPU is needed.

python scripts/kernel_table.py [--out benchmarks/results/kernels-ptxas.md] [sm_75 ... sm_120]
"""

from __future__ import annotations

import argparse
import datetime
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from splatcli.native.build import source_root
from splatcli.native.build_cuda import find_toolkit

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_120")


@dataclass(frozen=True, slots=True)
class Kernel:
    """The resources of one kernel on one architecture; bytes of spill stores and loads, and of shared memory."""

    source: str
    name: str
    architecture: str
    registers: int
    spills: int
    shared: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """One source: what nvcc said beside ptxas' figures, and the kernels in it."""

    source: str
    returncode: int
    words: str
    kernels: list[Kernel]


def compile_all(architectures: tuple[str, ...] = ARCHITECTURES, jobs: int = 2) -> list[Compiled]:
    """Each cuda/src/cuda/*.cu for all architectures. Raises NoToolkitError without nvcc."""
    nvcc = find_toolkit().nvcc
    sources = sorted((source_root() / "src" / "cuda").glob("*.cu"))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda source: _compile(nvcc, source, architectures, Path(folder)), sources))


def _compile(nvcc: Path, source: Path, architectures: tuple[str, ...], folder: Path) -> Compiled:
    targets = [f"-gencode=arch={name.replace('sm', 'compute')},code={name}" for name in architectures]
    command = [str(nvcc), "-std=c++17", "-O3", *targets, "-Xptxas", "-v", "-c", str(source)]
    done = subprocess.run(
        [*command, "-o", str(folder / f"{source.stem}.o")], capture_output=True, text=True, check=False
    )
    figures, words = [], []
    for line in done.stderr.splitlines():
        (figures if line.startswith("ptxas info") or "bytes stack frame" in line else words).append(line)
    kernels = _parse(source.name, "\n".join(figures))
    return Compiled(source.name, done.returncode, "\n".join(line for line in words if line.strip()), kernels)


def _parse(source: str, text: str) -> list[Kernel]:
    pattern = re.compile(
        r"Compiling entry function '(\w+)' for '(sm_\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers([^\n]*)",
        re.DOTALL,
    )
    found = []
    for mangled, architecture, stores, loads, registers, rest in pattern.findall(text):
        shared = re.search(r"(\d+) bytes smem", rest)
        found.append(
            Kernel(
                source, _plain(mangled), architecture, int(registers), int(stores) + int(loads),
                int(shared[1]) if shared else 0,
            )
        )  # fmt: skip
    return found


def _plain(mangled: str) -> str:
    """The kernel's name and template arguments; the mangled name where binutils are missing."""
    if shutil.which("c++filt") is None:
        return mangled
    name = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True).stdout.strip()
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    depth, end = 0, len(name)
    for at in reversed(range(len(name))):  # back to the parenthesis that opens the arguments
        depth += {")": 1, "(": -1}.get(name[at], 0)
        if depth == 0:
            end = at if name[at] == "(" else end
            break
    return re.sub(r"^(\w+::)+", "", name[:end])


def table(compiled: list[Compiled], version: str) -> str:
    architectures = sorted({k.architecture for c in compiled for k in c.kernels}, key=lambda name: int(name[3:]))
    lines = [
        "# What the CUDA kernels take",
        "",
        f"By `python scripts/kernel_table.py`, {datetime.date.today().isoformat()}, nvcc {version}. For each "
        "architecture: registers a thread, bytes spilled (stores and loads) where there are any. Shared memory in "
        "bytes a block.",
        "",
        "| kernel | shared | " + " | ".join(architectures) + " |",
        "|---|---|" + "---|" * len(architectures),
    ]
    for one in compiled:
        for name in dict.fromkeys(k.name for k in one.kernels):
            rows = {k.architecture: k for k in one.kernels if k.name == name}
            cells = [
                f"{rows[a].registers}" + (f" (spills {rows[a].spills})" if rows[a].spills else "") if a in rows else ""
                for a in architectures
            ]
            shared = max(k.shared for k in rows.values())
            lines.append(f"| {one.source}: {name} | {shared} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", default=list(ARCHITECTURES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    compiled = compile_all(tuple(options.architectures))
    for one in compiled:
        if one.returncode != 0 or one.words:
            print(f"{one.source}: {one.words}")
    text = table(compiled, find_toolkit().version)
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
