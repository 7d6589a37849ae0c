"""Build the wheels: native libraries inside, so that users need no compiler.

    python scripts/build_wheels.py [--dist dist] [--no-cuda] [--machine x86_64] [--machine aarch64]

x86_64 carries the CPU library for three instruction sets, and the CUDA library where nvcc is found. aarch64 carries the
CPU library, cross-compiled by aarch64-linux-gnu-g++ where this machine is another; it is left out, with a line that
says so, when there is no such compiler and --machine does not ask for it. A wheel without libraries, which builds them
at first use, serves every other system.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from splatcli.errors import SplatError
from splatcli.native import build
from splatcli.native.build_cuda import NoToolkitError, fat_library

ROOT = Path(__file__).resolve().parents[1]
#: The oldest C library that torch's wheels run with, and ours have to; CUDA's runtime takes what it is linked beside.
GLIBC, GLIBC_WITH_CUDA = (2, 28), (2, 34)


def compiler_for(machine: str) -> build.Toolchain | None:
    """A compiler for the machine: this one's own, else the cross compiler of Debian's name; None without one."""
    if machine == build.machine_name():
        return build.find_compiler()
    program = shutil.which(f"{machine}-linux-gnu-g++")
    if program is None:
        return None
    answer = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    return build.Toolchain(program, answer.stdout.splitlines()[0])


def needed_glibc(libraries: list[Path]) -> tuple[int, int]:
    """The newest C library whose symbols the libraries name; (2, 17), the oldest there is for manylinux, at least."""
    named = [re.findall(rb"\0GLIBC_(\d+)\.(\d+)(?=[.\0])", library.read_bytes()) for library in libraries]
    return max([(2, 17), *((int(major), int(minor)) for found in named for major, minor in found)])


def package(dist: Path) -> None:
    """A wheel of the checkout, with the libraries that lie in it now."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(dist), str(ROOT)]
    subprocess.run(command, check=True)


def build_wheel(machine: str, compiler: build.Toolchain, dist: Path, *, cuda: bool) -> None:
    folder = ROOT / "splatcli" / "_native_bin"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        libraries = build.ready_made_cpu_libraries(folder, machine, compiler)
        if cuda:
            libraries.append(fat_library(folder))
        glibc = needed_glibc(libraries)
        if glibc > (GLIBC_WITH_CUDA if cuda else GLIBC):
            raise SystemExit(f"build_wheels: {machine}: the libraries need glibc {glibc[0]}.{glibc[1]}")
        (folder / "tag").write_text(f"py3-none-manylinux_{glibc[0]}_{glibc[1]}_{machine}\n", encoding="utf-8")
        package(dist)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    parser.add_argument("--machine", action="append", choices=list(build.MACHINE_ISA_FLAGS))
    parser.add_argument("--no-cuda", action="store_true", help="leave the CUDA library out")
    options = parser.parse_args()
    if not options.machine:
        package(options.dist)
    for machine in options.machine or list(build.MACHINE_ISA_FLAGS):
        compiler = compiler_for(machine)
        if compiler is None:
            debian = f"g++-{machine.replace('_', '-')}-linux-gnu"
            message = f"build_wheels: no compiler for {machine} (Debian: apt install {debian})"
            if options.machine:
                raise SystemExit(message)
            print(message, file=sys.stderr)
            continue
        cuda = machine == "x86_64" == platform.machine() and not options.no_cuda
        try:
            build_wheel(machine, compiler, options.dist, cuda=cuda)
        except NoToolkitError as error:
            raise SystemExit(f"build_wheels: {error}; --no-cuda builds without") from None
        except SplatError as error:
            raise SystemExit(f"build_wheels: {error}") from None


if __name__ == "__main__":
    main()
