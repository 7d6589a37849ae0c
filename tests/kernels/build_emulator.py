"""Building the emulator: the CUDA kernels as ordinary C++, for the tests of machines without a GPU."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from splatcli.errors import ResourceError
from splatcli.native import build

#: As the portable CPU build, with which results are compared bit for bit: no contraction, every operation rounds.
FLAGS = (
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-Wno-psabi",
    "-Werror=shadow",
    "-DSPLAT_TWIN_MATH",
)
#: The emulator's own sources; its cuda_runtime.h is found in place of CUDA's.
_EMULATOR = Path(__file__).resolve().parent / "emulator"
_FOLDERS = ("include", "math", "kernels", "src", "src/cuda")


def emulator_library(*, extra_flags: tuple[str, ...] = (), source_root: Path | None = None) -> Path:
    """Return the emulator's library, built now if it is not in the cache.

    extra_flags: more for the compiler and the linker (sanitizers).
    source_root: another tree than the package's own cuda/ (a mutated copy); its libraries stay in it.
    Raises NoCompilerError, or ResourceError with the compiler's message.

    Object files are kept: after an edit only the files that include it are compiled again.
    """
    root = build.source_root() if source_root is None else source_root
    compiler = build.find_compiler()
    flags = (*FLAGS, f"-I{_EMULATOR}", *extra_flags)
    units = sorted(_EMULATOR.glob("*.cpp")) + sorted((root / "src" / "cuda").glob("*.cu"))
    cache = build.cache_root() if source_root is None else root / ".build"
    cache.mkdir(exist_ok=True)
    workshop = cache / f"simt-objects-{_digest(str(root), compiler.command, compiler.version, *flags)}"
    with build._lock(workshop.with_suffix(".lock")):
        folder = cache / f"simt-{_source_digest(root, units, (compiler.version, *flags))}"
        library = folder / "libsplat_simt.so"
        if not library.is_file():
            workshop.mkdir(exist_ok=True)
            (workshop / "build.ninja").write_text(_ninja_file(units, compiler, flags), encoding="utf-8")
            result = subprocess.run([*build._ninja(), "-C", str(workshop)], capture_output=True, text=True, check=False)
            if result.returncode != 0:
                tail = "\n".join((result.stdout + result.stderr).splitlines()[-40:])
                raise ResourceError(f"building the emulator failed:\n{tail}", where=compiler.command)
            folder.mkdir(exist_ok=True)
            finished = folder / f".{os.getpid()}.so"
            shutil.copy2(workshop / "libsplat_simt.so", finished)
            os.replace(finished, library)
    return library


def _digest(*texts: str) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:16]


def _source_digest(root: Path, units: list[Path], settings: tuple[str, ...]) -> str:
    """Return a digest of every source and header, of the list of compiled ones, and of their flags."""
    digest = hashlib.sha256()
    for text in (*settings, *(unit.name for unit in units)):
        digest.update(text.encode() + b"\0")
    for folder in (_EMULATOR, *(root / folder for folder in _FOLDERS)):
        for path in sorted(folder.iterdir()) if folder.is_dir() else []:
            if path.is_file():
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _ninja_file(units: list[Path], compiler: build.Toolchain, flags: tuple[str, ...]) -> str:
    def escape(path: Path) -> str:
        return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

    lines = [
        f"cxx = {compiler.command}",
        f"flags = {' '.join(flags)}",
        "rule compile",
        "  command = $cxx $flags -MMD -MF $out.d -c -x c++ $in -o $out",
        "  depfile = $out.d",
        "rule link",
        "  command = $cxx $flags -shared -o $out $in -lpthread",
    ]
    objects = [f"{unit.parent.name}-{unit.stem}.o" for unit in units]
    lines += [f"build {name}: compile {escape(unit)}" for name, unit in zip(objects, units, strict=True)]
    lines.append(f"build libsplat_simt.so: link {' '.join(objects)}")
    lines.append("default libsplat_simt.so")
    return "\n".join(lines) + "\n"
