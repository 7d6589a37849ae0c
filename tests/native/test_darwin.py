"""The CPU library cross-compiled for macOS: it compiles, links, and exports what the header declares. It never ran."""

from __future__ import annotations

import ctypes
import importlib.util
import shlex
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from splatcli import darwin
from splatcli.native import abi, build

ZIG = shutil.which("zig") or (importlib.util.find_spec("ziglang") and f"{sys.executable} -m ziglang")
pytestmark = pytest.mark.skipif(not ZIG, reason="needs zig, which has macOS' headers and linker (pip install ziglang)")

#: cputype of <mach/machine.h>.
CPU_TYPES = {"x86_64": 0x01000007, "aarch64": 0x0100000C}
#: Bytes of stack of a thread there, less what the thread's first calls may take.
STACK = 512 << 10


def exported(library: bytes) -> tuple[int, set[str]]:
    """The cputype of a Mach-O library, and the symbols that it defines for others."""
    magic, cpu, _, kind, commands = struct.unpack_from("<5I", library)
    assert (magic, kind) == (0xFEEDFACF, 6), "a dynamic library of 64 bits"
    at, names = 32, set()
    for _ in range(commands):
        command, size = struct.unpack_from("<2I", library, at)
        if command == 2:  # LC_SYMTAB
            symbols, count, texts, _ = struct.unpack_from("<4I", library, at + 8)
            for index in range(count):
                text, flags, _, _, _ = struct.unpack_from("<IBBHQ", library, symbols + 16 * index)
                if flags & 0x1F == 0x0F:  # N_SECT and N_EXT, without N_PEXT
                    start = texts + text
                    names.add(library[start : library.index(b"\0", start)].decode())
        at += size
    return cpu, names


@pytest.mark.parametrize(("machine", "isa"), [("aarch64", "neon"), ("x86_64", "avx2")])
def test_the_library_exports_the_entry_points(
    machine: str, isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = f"-Werror=frame-larger-than={STACK // 4}"
    monkeypatch.setenv("CXX", f"{ZIG} c++ -target {machine}-macos {limit}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)  # zig leaves a file when it is asked for its version
    monkeypatch.setattr(build, "ISA_FLAGS", build.MACHINE_ISA_FLAGS[machine])
    cpu, names = exported(build.cpu_library(isa).read_bytes())
    assert cpu == CPU_TYPES[machine]
    ours = {name for name in names if "splat" in name}  # zig links its own C++ library in
    assert ours == {f"_{name}" for name in abi.SIGNATURES}


def test_structs_are_those_of_the_headers(tmp_path: Path) -> None:
    structs = {"vm_statistics64": darwin.VmStatistics, "rusage_info_v0": darwin.ProcessUsage}
    checks = [
        *(
            f"offsetof({name}, {field}) == {getattr(mirror, field).offset}"
            f" && sizeof({name}::{field}) == {getattr(mirror, field).size}"
            for name, mirror in structs.items()
            for field, *_ in mirror._fields_
        ),
        f"sizeof(rusage_info_v0) == {ctypes.sizeof(darwin.ProcessUsage)}",
        f"HOST_VM_INFO64_REV0_COUNT * sizeof(integer_t) == {ctypes.sizeof(darwin.VmStatistics)}",
        f"HOST_VM_INFO64 == {darwin.HOST_VM_INFO64}",
        f"RUSAGE_INFO_V0 == {darwin.RUSAGE_INFO_V0}",
    ]
    source = tmp_path / "layout.cpp"
    headers = ["cstddef", "libproc.h", "mach/mach.h", "sys/resource.h"]
    lines = [*(f"#include <{name}>" for name in headers), *(f'static_assert({check}, "");' for check in checks)]
    source.write_text("\n".join([*lines, ""]))
    command = [*shlex.split(str(ZIG)), "c++", "-target", "aarch64-macos", "-std=c++17", "-c", source]
    command += ["-o", tmp_path / "layout.o"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
