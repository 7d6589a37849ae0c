"""Build the native libraries at first use, into a cache whose key covers everything that decides the result."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from splatcli import progress
from splatcli.errors import ResourceError

_log = logging.getLogger(__name__)

_PACKAGE = Path(__file__).resolve().parent.parent

#: Libraries that came with the package, built before: `scripts/build_wheels.py` makes them.
READY_MADE = _PACKAGE / "_native_bin"

#: A file that each copy of the sources has.
_LANDMARK = Path("include", "splat.h")


def source_root() -> Path:
    """Return the folder that holds ``include/``, ``math/`` and ``src/``; absolute.

    A wheel carries a copy; a checkout has none, and its ``cuda/`` is read in place, so that an edit needs no install.
    Raises ResourceError when neither is there.
    """
    candidates = (_PACKAGE / "_native_src", _PACKAGE.parent / "cuda")
    for candidate in candidates:
        if (candidate / _LANDMARK).is_file():
            return candidate
    raise ResourceError(
        "the native sources are missing from this installation",
        where=_PACKAGE,
        remedy="install splatcli again: pip install --force-reinstall --no-deps splatcli",
    )


#: No contraction: every operation rounds as written, which other builds are compared with.
_PORTABLE = ("-ffp-contract=off", "-DSPLAT_WITH_DOUBLE")

#: Instruction sets that the CPU library is built for, by machine, best first. Each build is a library of its own, so
#: that no function compiled for a newer processor can be picked by the linker for an older one.
MACHINE_ISA_FLAGS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "avx512": (
            "-mavx512f",
            "-mavx512dq",
            "-mavx512bw",
            "-mavx512vl",
            "-mavx512cd",
            "-mavx2",
            "-mfma",
            "-mprefer-vector-width=512",
        ),
        "avx2": ("-mavx2", "-mfma"),
        "portable": _PORTABLE,
    },
    "aarch64": {"neon": (), "portable": _PORTABLE},
}


def machine_name() -> str:
    """Return the machine as MACHINE_ISA_FLAGS spells it: x86_64, aarch64, or the platform's own name for another."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


#: Those of this machine.
ISA_FLAGS = MACHINE_ISA_FLAGS.get(machine_name(), {"portable": _PORTABLE})

#: Safe relaxations only. Never -ffast-math: linking with it sets the whole process to flush subnormals.
COMMON_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-Wno-psabi",
)

#: Source folders of the CPU library.
CPU_FOLDERS = ("include", "math", "src", "src/cpu")

_REMEDY = "install a C++17 compiler (Debian: apt install g++; macOS: xcode-select --install), or set CXX to one"


class NoCompilerError(ResourceError):
    """This machine has no C++ compiler; plain torch still serves small work."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A C++ compiler and its version."""

    command: str
    version: str


#: Programs that are tried without $CXX.
COMPILERS = ("g++", "clang++", "c++")


def find_compiler() -> Toolchain:
    """Return the C++ compiler: $CXX, else g++, clang++ or c++ on the PATH. Raises NoCompilerError when none works."""
    asked = os.environ.get("CXX")
    for name in [asked] if asked else COMPILERS:
        program, *arguments = shlex.split(name) or [""]  # CXX may be "ccache g++"
        path = shutil.which(program)
        if path is None:
            continue
        command = shlex.join([path, *arguments])
        try:
            answer = subprocess.run([path, *arguments, "--version"], capture_output=True, text=True, check=False)
        except OSError:  # a script without its interpreter, a program for another machine
            continue
        if answer.returncode == 0:
            return Toolchain(command, answer.stdout.splitlines()[0] if answer.stdout else "unknown")
    what = f"CXX names {asked!r}, which cannot be run" if asked else "no C++ compiler was found"
    raise NoCompilerError(f"{what}; the rasterizer is built on first use", remedy=_REMEDY)


def cache_root() -> Path:
    """Return the folder of built libraries: $XDG_CACHE_HOME/splatcli, ~/.cache/splatcli, or the temporary folder.

    A folder where every user may write is passed over, and none is made, whatever the umask: code is loaded from it.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    root = base / "splatcli" / "native"
    with contextlib.suppress(OSError):
        for folder in (base, root.parent, root):
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        open_to_all = (root.parent.stat().st_mode | root.stat().st_mode) & stat.S_IWOTH
        if os.access(root, os.W_OK) and not open_to_all:
            return root
    root = Path(tempfile.gettempdir()) / f"splatcli-native-{os.getuid() if hasattr(os, 'getuid') else 'user'}"
    _own_folder(root)
    return root


def _own_folder(root: Path) -> None:
    """Make a folder in a shared place, or check that it belongs to this user alone: code is loaded from it.

    Raises ResourceError when it is a link, another user's, or writable by others.
    """
    fault = None
    try:
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o700)
        found = root.lstat()
        if not stat.S_ISDIR(found.st_mode):
            fault = "is a link or no folder"
        elif hasattr(os, "getuid") and found.st_uid != os.getuid():
            fault = f"belongs to another user ({found.st_uid})"
        elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            fault = "can be written by others"
    except OSError as error:
        fault = f"cannot be made: {error.strerror}"
    if fault is not None:
        raise ResourceError(
            f"the folder for built libraries {fault}, and code is not loaded from such a place",
            where=root,
            remedy="remove it, or set XDG_CACHE_HOME to a folder of yours",
        )


def cpu_library(isa: str) -> Path:
    """Return the CPU library for an instruction set: ready-made, from the cache, or built now.

    isa: a key of ISA_FLAGS. Safe to call from several processes at once.
    Raises NoCompilerError, or ResourceError when the compiler fails (with its message).
    """
    came = ready_made_cpu(isa)
    if came is not None:
        return came
    sources = sorted((source_root() / "src" / "cpu").glob("*.cpp"))
    recipe = Recipe(find_compiler(), (*COMMON_FLAGS, *ISA_FLAGS[isa]), link_flags=("-lpthread",))
    return build_library(f"cpu-{isa}", "libsplat_cpu.so", sources, recipe, CPU_FOLDERS)


def ready_made_cpu(isa: str) -> Path | None:
    """Return the CPU library that came with the package; None without one of these sources for this machine."""
    if sys.platform != "linux":  # that of wheels; a checkout may be copied with what `make wheel` left in it
        return None
    try:
        facts = json.loads((READY_MADE / "libsplat_cpu.json").read_text(encoding="utf-8"))
        fits = facts["machine"] == machine_name() and facts["sources"] == source_digest(CPU_FOLDERS)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    library = READY_MADE / f"libsplat_cpu_{isa}.so"
    return library if fits and library.is_file() else None


def ready_made_cpu_libraries(folder: Path, machine: str, compiler: Toolchain) -> list[Path]:
    """Build the CPU libraries of a wheel for ``machine`` into ``folder``, with a JSON file that says what they are.

    machine: a key of MACHINE_ISA_FLAGS. compiler: one that compiles for it. The C++ library is linked in, so that they
    need no newer one than the C library's age. Raises ResourceError when the compiler fails.
    """
    sources = sorted((source_root() / "src" / "cpu").glob("*.cpp"))
    libraries = []
    folder.mkdir(parents=True, exist_ok=True)
    for isa, flags in MACHINE_ISA_FLAGS[machine].items():
        link_flags = ("-static-libstdc++", "-lpthread", "-Wl,-s,--exclude-libs,ALL,--gc-sections")
        recipe = Recipe(compiler, (*COMMON_FLAGS, *flags), link_flags)
        built = build_library(f"cpu-{machine}-{isa}", "libsplat_cpu.so", sources, recipe, CPU_FOLDERS)
        libraries.append(Path(shutil.copy2(built, folder / f"libsplat_cpu_{isa}.so")))
    facts = {"machine": machine, "sources": source_digest(CPU_FOLDERS), "compiler": compiler.version}
    (folder / "libsplat_cpu.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return libraries


@dataclass(frozen=True, slots=True)
class Recipe:
    """Compiler and flags of a library. depfile_flags: the flags that make the compiler write $out.d."""

    compiler: Toolchain
    flags: tuple[str, ...]
    link_flags: tuple[str, ...] = ()
    depfile_flags: str = "-MMD -MF $out.d"
    remedy: str = "set CXX to another C++17 compiler; if none builds it, please report this with its version"


def build_library(kind: str, name: str, sources: list[Path], recipe: Recipe, folders: tuple[str, ...]) -> Path:
    """Return the library ``name`` made of ``sources``, from the cache or built now.

    kind: begins the name of its folder in the cache. folders: of the source tree, all that may be included.
    Safe to call from several processes at once. Raises ResourceError with the compiler's message.
    """
    folder = cache_root() / f"{kind}-{_key(recipe, folders)}"
    library = folder / name
    if library.is_file():
        return library
    with _lock(folder.with_suffix(".lock")):
        if not library.is_file():
            _build(folder, name, sources, recipe)
    return library


def source_digest(folders: tuple[str, ...]) -> str:
    """Return a digest of the files that lie in ``folders`` of the source tree."""
    root, digest = source_root(), hashlib.sha256()
    for folder in folders:
        for path in sorted((root / folder).iterdir()):
            if path.is_file():
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _key(recipe: Recipe, folders: tuple[str, ...]) -> str:
    """Return a digest of sources, flags, compiler and machine."""
    digest = hashlib.sha256(source_digest(folders).encode())
    compiler = recipe.compiler
    for text in (
        compiler.command,
        compiler.version,
        *recipe.flags,
        *recipe.link_flags,
        platform.machine(),
        sys.platform,
    ):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:16]


def _build(folder: Path, name: str, sources: list[Path], recipe: Recipe) -> None:
    """Compile into a temporary folder and rename it: a killed build leaves nothing that seems finished."""
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        (work / "build.ninja").write_text(_ninja_file(name, sources, recipe), encoding="utf-8")
        _log.info(f"building {name} with {recipe.compiler.command}, once; it is kept in {folder}")
        code, output = _run_ninja(work, f"building {name}")
        if code != 0:
            tail = "\n".join(output[-25:])
            raise ResourceError(
                f"building the rasterizer failed:\n{tail}",
                where=recipe.compiler.command,
                remedy=recipe.remedy,
            )
        for leftover in work.glob("*.o"):
            leftover.unlink()
        shutil.rmtree(folder, ignore_errors=True)  # remains of an entry that has lost its library
        os.replace(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run_ninja(work: Path, task: str) -> tuple[int, list[str]]:
    """Run ninja in a folder, and report its steps as those of ``task``; return its exit code and lines."""
    lines: list[str] = []
    # shutil.which() has found the compiler without a PATH; the compiler finds its linker only by one.
    environment = {"PATH": os.defpath, **os.environ}
    with subprocess.Popen(
        [*_ninja(), "-C", str(work)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(line.rstrip("\n"))
                step = re.match(r"\[(\d+)/(\d+)\]", line)
                if step is not None:
                    progress.report(task, int(step[1]), int(step[2]))
        except BaseException:
            process.kill()
            raise
    return process.returncode, lines


def _ninja() -> list[str]:
    """Return the ninja of this Python, independent of PATH."""
    return [sys.executable, "-m", "ninja"]


def _ninja_file(name: str, sources: list[Path], recipe: Recipe) -> str:
    def escape(path: Path | str) -> str:
        return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

    lines = [
        f"cxx = {recipe.compiler.command}",
        f"flags = {' '.join(recipe.flags)}",
        "rule compile",
        f"  command = $cxx $flags {recipe.depfile_flags} -c $in -o $out",
        "  depfile = $out.d",
        "rule link",
        f"  command = $cxx -shared -o $out $in {' '.join(recipe.link_flags)}",
    ]
    objects = []
    for source in sources:
        objects.append(f"{source.stem}.o")
        lines.append(f"build {source.stem}.o: compile {escape(source)}")
    lines.append(f"build {name}: link {' '.join(objects)}")
    lines.append(f"default {name}")
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock, so that other builders wait and then find the result."""
    try:
        import fcntl
    except ImportError:  # no flock on this system: two builders do the same work, the rename decides
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
