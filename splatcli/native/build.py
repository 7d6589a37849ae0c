"""Build the native libraries at first use, into a cache whose key covers everything that decides the result."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
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

from splatcli import disk, machine, progress
from splatcli.errors import ResourceError, SplatError, from_os_error

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
        try:
            program, *arguments = shlex.split(name) or [""]  # CXX may be "ccache g++"
        except ValueError:  # a quotation without its end
            continue
        path = shutil.which(program)
        if path is None:
            continue
        command = shlex.join([path, *arguments])
        try:
            answer = subprocess.run(
                [path, *arguments, "--version"], capture_output=True, text=True, errors="replace", check=False
            )
        except OSError:  # a script without its interpreter, a program for another machine
            continue
        if answer.returncode == 0:
            return Toolchain(command, answer.stdout.splitlines()[0] if answer.stdout else "unknown")
    what = f"CXX names {asked!r}, which cannot be run" if asked else "no C++ compiler was found"
    raise NoCompilerError(f"{what}; the rasterizer is built on first use", remedy=_REMEDY)


def cache_root() -> Path:
    """Return the folder of built libraries: $XDG_CACHE_HOME/splatcli, ~/.cache/splatcli, or the temporary folder.

    A relative XDG_CACHE_HOME or HOME counts as unset. A folder is passed over where every user may write, and none such
    is made, whatever the umask: code is loaded from it. So is one on a file system that no code is loaded from.
    Raises ResourceError when there is none.
    """
    root = _home_cache()
    if root is not None:
        with contextlib.suppress(OSError):
            for folder in (root.parent.parent, root.parent, root):
                folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            if os.access(root, os.W_OK) and not _is_open_to_all(root) and not _bars_code(root):
                return root
    try:
        shared = Path(tempfile.gettempdir())
    except FileNotFoundError:
        raise ResourceError(
            "there is no folder that the rasterizer can be built in: neither the cache nor a temporary folder can be "
            "written",
            where=root,
            remedy=_OTHER_CACHE,
        ) from None
    root = shared / f"splatcli-native-{os.getuid() if hasattr(os, 'getuid') else 'user'}"
    _own_folder(root)
    if _bars_code(root):
        raise ResourceError(
            "libraries that are built here cannot be loaded: the file system is mounted noexec",
            where=root,
            remedy=_OTHER_CACHE,
        )
    return root


_OTHER_CACHE = "set XDG_CACHE_HOME to a folder where you can write and run programs"


def _home_cache() -> Path | None:
    """Return where the user's own cache is, or would be; None where the environment names no absolute folder."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        base = Path(os.path.expanduser("~/.cache"))
    return base / "splatcli" / "native" if base.is_absolute() else None


def _is_open_to_all(root: Path) -> bool:
    """Return whether every user may write into a cache. Raises OSError."""
    return bool((root.parent.stat().st_mode | root.stat().st_mode) & stat.S_IWOTH)


def _bars_code(folder: Path) -> bool:
    """Return whether no code is loaded from a folder's file system. Raises OSError."""
    return bool(os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0))


def _built_before(entry: str, name: str) -> Path | None:
    """Return the library of a cache that cannot be written, as in an image that runs read-only; None without one."""
    root = _home_cache()
    with contextlib.suppress(OSError):
        if root is None or not (root / entry / name).is_file() or _is_open_to_all(root) or _bars_code(root):
            return None
        if {place.stat().st_uid for place in (root.parent, root)} <= {0, os.getuid()}:
            return root / entry / name
    return None


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
            remedy=f"remove it, or {_OTHER_CACHE}",
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

    machine: a key of MACHINE_ISA_FLAGS. compiler: one that compiles for it. They load where torch does: the C++ library
    is linked in, and of the C library they take old versions (``src/wheel/glibc.cpp``). Raises ResourceError when the
    compiler fails.
    """
    old_glibc = source_root() / "src" / "wheel" / "glibc.cpp"
    wrapped = re.findall(r"^SPLAT_OLD\(\w+, (\w+),", old_glibc.read_text(encoding="utf-8"), re.MULTILINE)
    sources = [*sorted((source_root() / "src" / "cpu").glob("*.cpp")), old_glibc]
    link_flags = (
        *("-static-libstdc++", "-lpthread", "-Wl,-s,--exclude-libs,ALL,--gc-sections"),
        *(f"-Wl,--wrap={name}" for name in wrapped),
    )
    libraries = []
    folder.mkdir(parents=True, exist_ok=True)
    for isa, flags in MACHINE_ISA_FLAGS[machine].items():
        recipe = Recipe(compiler, (*COMMON_FLAGS, *flags), link_flags)
        built = build_library(f"cpu-{machine}-{isa}", "libsplat_cpu.so", sources, recipe, (*CPU_FOLDERS, "src/wheel"))
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
    entry = f"{kind}-{_key(recipe, folders)}"
    before = _built_before(entry, name)
    if before is not None:
        return before
    folder = cache_root() / entry
    library = folder / name
    if library.is_file():
        return library
    try:
        with _lock(folder.with_suffix(".lock")) as alone:
            if not library.is_file():
                if alone:
                    _remove_killed_builds(folder)
                _build(folder, name, sources, recipe)
    except OSError as error:
        raise ResourceError(
            f"the rasterizer cannot be built: {error.strerror}", where=error.filename or folder, remedy=_MAKE_ROOM
        ) from None
    return library


#: What helps where a build finds no room.
_MAKE_ROOM = "free disk space there, or set XDG_CACHE_HOME to another folder"

#: Words of compilers, and of the shell for them, that find no room on a disk or no memory; in English.
_NO_SPACE = ("No space left on device", "Disk quota exceeded", "File size limit exceeded")
_NO_MEMORY = ("Killed", "Cannot allocate memory", "out of memory allocating", "virtual memory exhausted")


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


def _remove_killed_builds(folder: Path) -> None:
    """Remove what killed builds of an entry have left. Its lock is held."""
    for left in folder.parent.glob(f".{glob.escape(folder.name)}.*"):
        shutil.rmtree(left, ignore_errors=True)


def _build(folder: Path, name: str, sources: list[Path], recipe: Recipe) -> None:
    """Compile into a temporary folder and rename it: a killed build leaves nothing that seems finished."""
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        text = _ninja_file(name, sources, recipe)
        (work / "build.ninja").write_text(text, encoding="utf-8", errors="surrogateescape")
        _log.info(f"building {name} with {recipe.compiler.command}, once; it is kept in {folder}")
        code, output = _run_ninja(work, f"building {name}")
        if code != 0:
            raise _build_error(output, folder, recipe)
        for leftover in work.glob("*.o"):
            leftover.unlink()
        shutil.rmtree(folder, ignore_errors=True)  # remains of an entry that has lost its library
        os.replace(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _build_error(output: list[str], folder: Path, recipe: Recipe) -> SplatError:
    """Return the error of a build whose compiler or linker has failed, from their messages."""
    for line in output:
        if any(words in line for words in _NO_SPACE):
            return ResourceError(
                f"the rasterizer cannot be built, because a disk is full: {line.strip()}",
                where=folder.parent,
                remedy=_MAKE_ROOM,
            )
        if any(words in line for words in _NO_MEMORY):
            return ResourceError(
                f"memory does not suffice to build the rasterizer: {line.strip()}",
                where=recipe.compiler.command,
                remedy="end other programs, or allow the job or container more memory; one file takes 250 MiB",
            )
        if "Resource temporarily unavailable" in line:  # ninja's, or the shell's, of a process that cannot be started
            return from_os_error(OSError(errno.EAGAIN, line.strip()), ResourceError)
    tail = "\n".join(output[-25:])
    return ResourceError(
        f"building the rasterizer failed:\n{tail}", where=recipe.compiler.command, remedy=recipe.remedy
    )


#: Memory that a compiler takes for one file: 206 MB with g++ 12 and AVX-512.
_JOB_BYTES = 256 << 20


def _run_ninja(work: Path, task: str) -> tuple[int, list[str]]:
    """Run ninja in a folder, and report its steps as those of ``task``; return its exit code and lines."""
    lines: list[str] = []
    # shutil.which() has found the compiler without a PATH; the compiler finds its linker only by one. Its own files are
    # where its results are, whatever room the temporary folder has; and _build_error() reads English.
    environment = {"PATH": os.defpath, **os.environ, "TMPDIR": str(work), "LC_ALL": "C"}
    jobs = max(1, min(machine.cores() + 1, machine.free_memory() // _JOB_BYTES))
    with subprocess.Popen(
        [*_ninja(), "-j", str(jobs), "-C", str(work)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
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
def _lock(path: Path) -> Iterator[bool]:
    """Hold a lock, so that other builders wait and then find the result. Yield False on a file system without locks."""
    with path.open("w") as file:
        alone = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in disk.NO_LOCKS:
                raise
            alone = False  # two builders do the same work, the rename decides
        yield alone
