"""The CPU library for 64-bit ARM, cross-compiled and run under qemu-user: it computes what the one for x86-64 does."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from splatcli.native.build import COMMON_FLAGS, MACHINE_ISA_FLAGS, cpu_library, source_root

CROSS_COMPILER, QEMU = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
NATIVE_COMPILER = shutil.which("g++")
pytestmark = [
    pytest.mark.skipif(
        None in (CROSS_COMPILER, QEMU, NATIVE_COMPILER),
        reason="needs g++, aarch64-linux-gnu-g++ and qemu-aarch64 (Debian: g++-aarch64-linux-gnu, qemu-user)",
    ),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="compares with x86-64"),
]
Outputs = dict[str, np.ndarray]
TYPES = {("isect_masks", 2): np.uint16, ("isect_gaussians", 4): np.uint32, ("tile_starts", 8): np.int64}


def built(folder: Path, machine: str, isa: str) -> Path:
    """cross_check.cpp with the CPU library for an instruction set, as a program."""
    program, source = folder / f"cross-check-{isa}-{machine}", Path(__file__).with_name("cross_check.cpp")
    flags = [*COMMON_FLAGS, *MACHINE_ISA_FLAGS[machine][isa], f"-I{source_root() / 'include'}", "-o", program, source]
    if machine == "x86_64":
        library = cpu_library(isa)
        subprocess.run([str(NATIVE_COMPILER), *flags, library, f"-Wl,-rpath,{library.parent}"], check=True)
    else:  # static, so that qemu-user needs no ARM system beside it
        library_sources = sorted((source_root() / "src" / "cpu").glob("*.cpp"))
        subprocess.run([str(CROSS_COMPILER), *flags, "-static", *library_sources, "-lpthread"], check=True)
    return program


def outputs(program: Path, threads: int) -> Outputs:
    """What the program wrote, by name."""
    emulator = [str(QEMU)] if "aarch64" in program.name else []
    data = subprocess.run([*emulator, program, str(threads)], capture_output=True, check=True).stdout
    found: Outputs = {}
    while data:
        head, _, data = data.partition(b"\n")
        name, size, count = head.decode().split()
        size, count = int(size), int(count)
        numbers = TYPES.get((name, size), np.float32 if size == 4 else np.float64)
        found[name] = np.frombuffer(data[: size * count], numbers)
        data = data[size * count + 1 :]
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outputs]:
    folder = tmp_path_factory.mktemp("aarch64")
    programs: dict[tuple[str, str], Path] = {}

    def of(machine: str, isa: str, threads: int = 1) -> Outputs:
        if (machine, isa) not in programs:
            programs[machine, isa] = built(folder, machine, isa)
        return outputs(programs[machine, isa], threads)

    return of


def test_the_program_computes_something(run: Callable[..., Outputs]) -> None:
    found = run("x86_64", "portable")
    assert len(found) == 22
    assert len(found["isect_gaussians"]) > 1000
    assert all(np.isfinite(numbers).all() for numbers in found.values())
    for name in ("image", "v_image", "gradient.means", "gradient.shN", "v_viewmat", "v_background"):
        assert np.abs(found[name]).max() > 0, name


def test_portable_code_has_the_bits_of_x86(run: Callable[..., Outputs]) -> None:
    arm, x86 = run("aarch64", "portable"), run("x86_64", "portable")
    assert arm.keys() == x86.keys()
    for name in arm:
        assert arm[name].tobytes() == x86[name].tobytes(), name


def test_neon_code_agrees_within_rounding_and_with_any_number_of_threads(run: Callable[..., Outputs]) -> None:
    neon, portable = run("aarch64", "neon"), run("x86_64", "portable")
    again = run("aarch64", "neon", 3)
    assert neon.keys() == portable.keys()
    assert len(neon["isect_gaussians"]) == len(portable["isect_gaussians"])
    for name in neon:
        assert neon[name].tobytes() == again[name].tobytes(), name
        ours, expected = neon[name].astype(np.float64), portable[name].astype(np.float64)
        # A step of Adam is about the learning rate, whatever the gradient: its sign decides, and tiny ones may differ.
        tolerance = 2.1e-3 if name.startswith("stepped.") else 3e-5 * np.abs(expected).max()
        assert (np.abs(ours - expected) <= tolerance).all(), name
