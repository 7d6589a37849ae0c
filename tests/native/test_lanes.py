"""Each vector function of cuda/src/cpu/lanes.h is, bit for bit, what a loop over single numbers gives."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from splatcli.native.backend import best_isa
from splatcli.native.build import COMMON_FLAGS, MACHINE_ISA_FLAGS, machine_name, source_root

CASES = [(machine, isa) for machine, isas in MACHINE_ISA_FLAGS.items() for isa in isas]


@pytest.mark.parametrize(("machine", "isa"), CASES, ids=[f"{machine}-{isa}" for machine, isa in CASES])
def test_vector_functions_are_those_of_single_numbers(machine: str, isa: str, tmp_path: Path) -> None:
    native = machine == machine_name()
    compiler = shutil.which("g++" if native else f"{machine}-linux-gnu-g++")
    emulator = None if native else shutil.which(f"qemu-{machine}")
    if compiler is None or not (native or emulator):
        pytest.skip(
            f"no compiler or emulator for {machine} (Debian: g++-{machine}-linux-gnu, qemu-user)".replace("_", "-")
        )
    isas = list(MACHINE_ISA_FLAGS[machine])
    if native and isas.index(isa) < isas.index(best_isa()):
        pytest.skip(f"this processor has no {isa}")
    program, source = tmp_path / "lanes-check", Path(__file__).with_name("lanes_check.cpp")
    flags = [*COMMON_FLAGS, *MACHINE_ISA_FLAGS[machine][isa], f"-I{source_root() / 'src' / 'cpu'}", "-static"]
    subprocess.run([compiler, *flags, "-o", program, source], check=True)
    done = subprocess.run([*filter(None, [emulator]), program], capture_output=True, text=True, check=False)
    assert (done.returncode, sorted(set(done.stdout.split()))) == (0, [])
