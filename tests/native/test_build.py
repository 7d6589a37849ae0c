"""Building and loading: the cache key, builders at once, failing and missing compilers, the wrong processor."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from splatcli.doctor import examine
from splatcli.errors import ResourceError
from splatcli.native import abi, backend, build
from splatcli.native.build import cpu_library, find_compiler, source_root
from splatcli.progress import listening
from splatcli.rasterizer.reference import render_reference
from splatcli.rasterizer.reference_engine import ReferenceEngine
from splatcli.rasterizer.rendering import render
from splatcli.rasterizer.train_step import NativeEngine, engine_for
from tests.native.cases import ISAS, NEEDS_COMPILER
from tests.rasterizer.scenes import random_scene

#: Stands in for a compiler: says its version, writes what -o names after a while, and notes each link it makes.
FAKE_COMPILER = """\
#!/bin/sh
if [ "$1" = --version ]; then echo "fake 1.0"; exit 0; fi
link=no
while [ $# -gt 0 ]; do
  case "$1" in
    -o) out="$2"; shift ;;
    -shared) link=yes ;;
  esac
  shift
done
if [ $link = yes ]; then sleep 0.2; echo linked >> "$FAKE_LOG"; fi
echo made > "$out"
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, in a folder whose name has a space."""
    folder = tmp_path / "a cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def script(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The fake as $CXX; its log of links."""
    monkeypatch.setenv("CXX", str(script(tmp_path / "fake-cxx", FAKE_COMPILER)))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "links"))
    return tmp_path / "links"


@pytest.fixture
def uncached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading starts from nothing, whatever this process loaded before."""
    monkeypatch.setattr(backend, "load_cpu", backend.load_cpu.__wrapped__)


# --- the key ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the native sources that a test may edit."""
    copy = tmp_path / "native sources"
    shutil.copytree(source_root(), copy)
    monkeypatch.setattr(build, "source_root", lambda: copy)
    return copy


def test_nothing_changed_is_the_same_library_without_a_build(cache: Path, fake_compiler: Path, sources: Path) -> None:
    first = cpu_library("portable")
    assert first.is_file()
    assert first.is_relative_to(cache)
    assert cpu_library("portable") == first
    assert fake_compiler.read_text() == "linked\n"


def test_a_build_is_announced_and_reports_its_steps(
    cache: Path, fake_compiler: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps: list[tuple[str, int, int]] = []
    with caplog.at_level("INFO", "splatcli"), listening(lambda *one: steps.append(one)):
        cpu_library("portable")
        cpu_library("portable")
    count = len(sorted((source_root() / "src" / "cpu").glob("*.cpp"))) + 1
    assert sorted(steps) == [("building libsplat_cpu.so", step, count) for step in range(1, count + 1)]
    assert [record.getMessage()[:30] for record in caplog.records] == ["building libsplat_cpu.so with "]


@pytest.mark.parametrize("name", ["include/splat.h", "math/blend.h", "src/cpu/bin.cpp", "src/cpu/lanes.h"])
def test_an_edited_source_is_another_library(cache: Path, fake_compiler: Path, sources: Path, name: str) -> None:
    first = cpu_library("portable")
    with (sources / name).open("a") as file:
        file.write("\n")
    assert cpu_library("portable") != first


def test_a_new_source_file_is_compiled_and_another_library(cache: Path, fake_compiler: Path, sources: Path) -> None:
    first = cpu_library("portable")
    (sources / "src" / "cpu" / "more.cpp").write_text("")
    second = cpu_library("portable")
    assert second != first
    assert "more.o" in (second.parent / "build.ninja").read_text()


def test_flags_isa_and_compiler_are_in_the_key(
    cache: Path, fake_compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {cpu_library(isa) for isa in build.ISA_FLAGS}
    assert len(seen) == len(build.ISA_FLAGS) == 3
    assert {isa for flags in build.MACHINE_ISA_FLAGS.values() for isa in flags} == set(abi.ISAS)
    with monkeypatch.context() as changed:
        changed.setattr(build, "COMMON_FLAGS", (*build.COMMON_FLAGS, "-g"))
        seen.add(cpu_library("portable"))
    assert len(seen) == 4
    script(tmp_path / "fake-cxx", FAKE_COMPILER.replace("fake 1.0", "fake 2.0"))
    seen.add(cpu_library("portable"))
    assert len(seen) == 5, "another version of the compiler is another library"
    monkeypatch.setenv("CXX", str(script(tmp_path / "other-cxx", FAKE_COMPILER)))
    seen.add(cpu_library("portable"))
    assert len(seen) == 6, "another compiler is another library"


def test_no_flag_changes_what_numbers_mean() -> None:
    flags = [*build.COMMON_FLAGS, *(flag for flags in build.ISA_FLAGS.values() for flag in flags)]
    forbidden = ("fast-math", "-Ofast", "finite-math", "unsafe-math", "-march=native", "associative")
    assert not [flag for flag in flags if any(word in flag for word in forbidden)]
    assert "-ffp-contract=off" in build.ISA_FLAGS["portable"]


@NEEDS_COMPILER
def test_no_name_in_the_cpu_library_hides_another() -> None:
    flags = [*build.COMMON_FLAGS, *build.ISA_FLAGS["portable"], "-fsyntax-only", "-Werror=shadow"]
    sources = sorted((source_root() / "src" / "cpu").glob("*.cpp"))
    command = [*shlex.split(find_compiler().command), *flags, *map(str, sources)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- builders --------------------------------------------------------------------------------------------------------


def test_builders_at_the_same_time_make_one_library(cache: Path, fake_compiler: Path) -> None:
    program = "from splatcli.native.build import cpu_library; print(cpu_library('portable'))"

    def build_in_another_process(_: int) -> str:
        return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(build_in_another_process, range(4)))
    assert len(paths) == 1
    assert Path(paths.pop().strip()).read_text() == "made\n"
    assert fake_compiler.read_text() == "linked\n", "one of them built, the others waited"
    left = {path.name for path in (cache / "splatcli" / "native").iterdir() if path.suffix != ".lock"}
    assert len(left) == 1, f"no temporary folder stays: {left}"


def test_a_failing_compiler_speaks_through_the_error(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = FAKE_COMPILER.replace("link=no\n", 'echo "blend.cpp:7: error: such a thing is not known" >&2; exit 1\n')
    monkeypatch.setenv("CXX", str(script(tmp_path / "failing-cxx", text)))
    with pytest.raises(ResourceError, match=r"blend\.cpp:7: error: such a thing is not known") as caught:
        cpu_library("portable")
    assert caught.value.where == str(tmp_path / "failing-cxx")
    assert caught.value.remedy
    assert "C++17" in caught.value.remedy
    left = [path.name for path in (cache / "splatcli" / "native").iterdir() if path.suffix != ".lock"]
    assert left == [], "a failed build leaves nothing that looks like a library"


def test_after_a_failed_build_the_next_one_starts_afresh(
    cache: Path, fake_compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path / "fake-cxx", FAKE_COMPILER.replace("link=no\n", "exit 3\n"))
    with pytest.raises(ResourceError):
        cpu_library("portable")
    script(tmp_path / "fake-cxx", FAKE_COMPILER)
    assert cpu_library("portable").is_file()


@pytest.mark.parametrize(
    ("words", "what", "remedy"),
    [
        ("blend.cpp:9:1: fatal error: error writing to /x.s: No space left on device", "a disk is full", "free disk"),
        ("g++: fatal error: Killed signal terminated program cc1plus", "memory does not suffice", "more memory"),
        ("ninja: fatal: posix_spawn: Resource temporarily unavailable", "no further", "ulimit -u"),
        ("cc1plus: out of memory allocating 65536 bytes", "memory does not suffice", "more memory"),
    ],
)
def test_a_compiler_without_room_is_no_bad_compiler(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, what: str, remedy: str
) -> None:
    text = FAKE_COMPILER.replace("link=no\n", f'echo "{words}" >&2; exit 1\n')
    monkeypatch.setenv("CXX", str(script(tmp_path / "failing-cxx", text)))
    with pytest.raises(ResourceError) as caught:
        cpu_library("portable")
    assert what in caught.value.what
    assert remedy in str(caught.value.remedy)
    assert "C++17" not in str(caught.value.remedy)


def test_a_compiler_writes_where_its_results_are(
    cache: Path, fake_compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a temporary folder that is full, or is not there, does not matter."""
    script(tmp_path / "fake-cxx", FAKE_COMPILER.replace("link=no\n", 'echo "$TMPDIR" >> "$FAKE_LOG"\nlink=no\n'))
    monkeypatch.setenv("TMPDIR", "/no/such/folder")
    root = cpu_library("portable").parents[1]
    places = {line for line in fake_compiler.read_text().splitlines() if line != "linked"}
    assert {Path(place).parent for place in places} == {root}


def test_a_place_that_takes_no_file_is_no_bug(cache: Path, fake_compiler: Path) -> None:
    root = build.cache_root()
    lock = root / f"{cpu_library('portable').parent.name}.lock"
    shutil.rmtree(lock.with_suffix(""))
    lock.unlink()
    lock.mkdir()
    with pytest.raises(ResourceError, match="the rasterizer cannot be built") as caught:
        cpu_library("portable")
    assert caught.value.where == str(lock)


def test_what_a_killed_build_leaves_is_removed_by_the_next(cache: Path, fake_compiler: Path, tmp_path: Path) -> None:
    script(tmp_path / "fake-cxx", FAKE_COMPILER.replace("link=no\n", "sleep 5; exit 1\n"))
    program = "from splatcli.native.build import cpu_library; cpu_library('portable')"
    with subprocess.Popen([sys.executable, "-c", program], start_new_session=True) as process:
        while not list(cache.glob("splatcli/native/.*/build.ninja")):
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    script(tmp_path / "fake-cxx", FAKE_COMPILER)
    folder = cpu_library("portable").parent
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, f"{folder.name}.lock"}


def test_a_cache_entry_without_its_library_is_built_again(cache: Path, fake_compiler: Path) -> None:
    path = cpu_library("portable")
    path.unlink()
    assert cpu_library("portable") == path
    assert path.is_file()


# --- no compiler -----------------------------------------------------------------------------------------------------


def test_without_a_compiler_the_error_says_what_to_install(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ResourceError, match=r"no C\+\+ compiler was found") as caught:
        cpu_library("portable")
    assert caught.value.remedy
    assert "apt install g++" in caught.value.remedy
    assert caught.value.exit_code == 4


def test_a_cxx_that_is_not_there_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ResourceError, match="CXX names 'no-such-compiler', which cannot be run"):
        find_compiler()
    monkeypatch.setenv("CXX", "g++ '-O2")
    with pytest.raises(ResourceError, match="""CXX names "g\\+\\+ '-O2", which cannot be run"""):
        find_compiler()


def test_a_build_has_a_path_where_the_caller_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler is found without PATH, and finds no linker without it."""
    (tmp_path / "build.ninja").write_text("rule show\n command = printenv PATH > out\nbuild out: show\n")
    monkeypatch.delenv("PATH")
    assert build._run_ninja(tmp_path, "building")[0] == 0
    assert (tmp_path / "out").read_text().strip() == os.defpath


def test_a_compiler_that_cannot_even_start_is_not_taken(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = script(tmp_path / "g++", "#!/bin/sh\nexit 1\n")
    script(tmp_path / "clang++", FAKE_COMPILER)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    assert find_compiler().command == str(tmp_path / "clang++")
    assert find_compiler().version == "fake 1.0"
    broken.write_text("#!/no/such/interpreter\n")
    assert find_compiler().command == str(tmp_path / "clang++")


@pytest.mark.usefixtures("uncached")
def test_without_a_compiler_the_reference_serves_with_a_warning(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        engine = engine_for("cpu")
    assert isinstance(engine, ReferenceEngine)
    assert len(caplog.records) == 1
    assert "no-such-compiler" in caplog.text
    assert "slower" in caplog.text


@pytest.mark.usefixtures("uncached")
def test_without_a_compiler_render_serves_too_with_a_warning(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    gaussians, camera = random_scene(1, 10)
    with caplog.at_level(logging.WARNING):
        out = render(gaussians, camera)
    image, alpha, depth = render_reference(gaussians, camera)
    assert torch.equal(out.image, image)
    assert torch.equal(out.alpha, alpha)
    assert torch.equal(out.depth, depth)
    assert "no-such-compiler" in caplog.text


@pytest.mark.usefixtures("uncached")
def test_a_compiler_that_fails_is_an_error_and_no_reason_to_be_slow(
    cache: Path, fake_compiler: Path, tmp_path: Path
) -> None:
    script(tmp_path / "fake-cxx", FAKE_COMPILER.replace("link=no\n", "echo it broke >&2; exit 1\n"))
    gaussians, camera = random_scene(1, 10)
    with pytest.raises(ResourceError, match="it broke"):
        engine_for("cpu")
    with pytest.raises(ResourceError, match="it broke"):
        render(gaussians, camera)


def test_a_device_without_kernels_is_refused() -> None:
    with pytest.raises(ResourceError, match="no engine for mps"):
        engine_for("mps")


# --- loading ---------------------------------------------------------------------------------------------------------


class FakeLibrary:
    """Exports everything; its processor and version are the test's choice."""

    def __init__(self, isa: int, version: int = abi.ABI_VERSION) -> None:
        self._isa, self._version = isa, version

    def __getattr__(self, name: str) -> Any:
        def entry() -> int:
            return {"splat_best_isa": self._isa, "splat_abi_version": self._version}[name]

        return entry


@pytest.mark.parametrize("runs", [0, 1, 2])
@pytest.mark.parametrize("isa", build.ISA_FLAGS)
def test_a_library_for_a_better_processor_is_refused(isa: str, runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "cpu_library", lambda isa: Path("/some/folder/libsplat_cpu.so"))
    monkeypatch.setattr(ctypes, "CDLL", lambda path: FakeLibrary(runs))
    monkeypatch.setattr(backend, "best_isa", lambda: next(iter(build.ISA_FLAGS)))
    if abi.ISAS.index(isa) <= runs:
        backend.load_cpu.__wrapped__(isa)
    else:
        with pytest.raises(ResourceError, match=f"does not run {isa} code"):
            backend.load_cpu.__wrapped__(isa)


def test_a_library_of_another_abi_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "cpu_library", lambda isa: Path("/some/folder/libsplat_cpu.so"))
    monkeypatch.setattr(ctypes, "CDLL", lambda path: FakeLibrary(2, version=abi.ABI_VERSION + 1))
    with pytest.raises(ResourceError, match=f"ABI {abi.ABI_VERSION + 1}, this package {abi.ABI_VERSION}"):
        backend.load_cpu.__wrapped__("portable")


def test_a_damaged_library_is_an_error_with_a_remedy(cache: Path, fake_compiler: Path) -> None:
    with pytest.raises(ResourceError, match="cannot be loaded") as caught:
        backend.load_cpu.__wrapped__("portable")
    assert caught.value.remedy
    assert caught.value.remedy.startswith("delete ")


FLAGS = {
    "avx512": "fpu sse2 avx2 fma avx512f avx512dq avx512bw avx512vl avx512cd",
    "avx2": "fpu sse2 avx2 fma avx512f avx512dq",
    "portable": "fpu sse2 avx2",
}


@pytest.mark.parametrize("expected", FLAGS)
def test_the_instruction_set_is_the_best_that_the_processor_names(
    expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(backend, "_processor_flags", backend._processor_flags.__wrapped__)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: f"processor : 0\nflags\t\t: {FLAGS[expected]}\n")
    assert backend.best_isa() == expected
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert backend.best_isa() == "neon"
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert backend.best_isa() == "portable"


@NEEDS_COMPILER
def test_python_and_the_library_agree_on_the_processor() -> None:
    engine = engine_for("cpu")
    assert isinstance(engine, NativeEngine)
    assert abi.ISAS[backend.load_cpu("portable").splat_best_isa()] == backend.best_isa() == ISAS[-1]


SUBNORMAL_PROGRAM = """
    import sys, threading
    import numpy as np
    import torch

    def alive(when):
        # Products that are subnormal, made by numpy, by torch and by a thread that did not exist before.
        tiny = np.full(64, 1e-39, np.float32) * np.float32(1)
        assert (tiny != 0).all(), f"numpy flushes {when}"
        tensor = torch.full((64,), 1e-39) * 1
        assert bool((tensor != 0).all()), f"torch flushes {when}"
        wide = torch.full((1 << 16,), 1e-39) * 1
        assert bool((wide != 0).all()), f"torch's threads flush {when}"
        double = np.full(8, 1e-310) * 1.0
        assert (double != 0).all(), f"float64 flushes {when}"

    alive("before")
    from splatcli.gaussians import GROUPS
    from splatcli.native.backend import Backend
    from splatcli.rasterizer import AdamState, NativeEngine, StepInputs, render
    from tests.rasterizer.scenes import leaves, random_scene

    gaussians, camera = random_scene(1, 600)
    for isa in sys.argv[1:]:
        backend = Backend.cpu(isa=isa, threads=3)
        alive(f"after loading {isa}")
        parameters = leaves(gaussians)
        out = render(parameters, camera, backend=backend)
        alive(f"after a forward pass of {isa}")
        torch.autograd.backward(out.image.sum())
        alive(f"after a backward pass of {isa}")
        target = torch.zeros(camera.height, camera.width, 3, dtype=torch.uint8)
        NativeEngine(backend).step(
            gaussians.detach_clone(), AdamState.zeros_like(gaussians),
            StepInputs(camera, target, lrs=dict.fromkeys(GROUPS, 1e-3), sh_degree=3, background=torch.zeros(3),
                       ssim_lambda=0.2, antialiased=False, stats=None))
        alive(f"after a step of {isa}")
        other = threading.Thread(target=alive, args=(f"in a new thread after {isa}",))
        other.start()
        other.join()
    print("alive")
"""


@NEEDS_COMPILER
def test_subnormal_numbers_of_the_process_survive() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SUBNORMAL_PROGRAM), *ISAS],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "alive\n", done.stderr
    assert torch.full((4,), 1e-39).mul(1).ne(0).all()


def test_the_cache_is_writable_by_its_user_alone_whatever_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "cache" / "splatcli" / "native"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
    before = os.umask(0)
    try:
        assert build.cache_root() == root
    finally:
        os.umask(before)
    assert {folder.stat().st_mode & 0o022 for folder in (root, root.parent, root.parent.parent)} == {0}
    for folder in (root, root.parent):  # as versions before made them under umask 000
        folder.chmod(0o777)
        assert build.cache_root() == tmp_path / f"splatcli-native-{os.getuid()}"
        folder.chmod(0o755)
    assert build.cache_root() == root


def test_relative_places_of_a_cache_are_unset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the XDG specification has it; they would make a cache in each folder that a command runs in."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert build.cache_root() == tmp_path / "home" / ".cache" / "splatcli" / "native"
    monkeypatch.setenv("HOME", "home")
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
    assert build.cache_root() == tmp_path / f"splatcli-native-{os.getuid()}"
    assert list((tmp_path / "here").iterdir()) == []


def test_a_library_in_a_cache_that_cannot_be_written_is_used(
    cache: Path, fake_compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an image that was built with one and runs read-only."""
    path, real = cpu_library("portable"), os.access
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(build.os, "access", lambda place, mode: mode != os.W_OK and real(place, mode))
    assert cpu_library("portable") == path
    assert fake_compiler.read_text() == "linked\n"
    path.parents[1].chmod(0o777)
    assert cpu_library("portable").parents[1] == tmp_path / f"splatcli-native-{os.getuid()}"


def test_nothing_is_built_where_no_code_is_loaded_from(tmp_path: Path) -> None:
    """A home that is mounted noexec is passed over, and a temporary folder that is so is an error, not a build."""
    (tmp_path / "home").mkdir()
    (tmp_path / "tmp").mkdir()
    mount = 'mount -t tmpfs -o noexec none "$1"'
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount, "sh", tmp_path / "home"], check=False).returncode != 0:
        pytest.skip("no file system can be mounted in a name space of one's own")
    program = "from splatcli.native.build import cache_root; print(cache_root())"

    def root(*places: Path) -> str:
        code = f'{"; ".join(f"mount -t tmpfs -o noexec,mode=1777 none {place}" for place in places)}; exec "$@"'
        command = ["unshare", "-rm", "sh", "-c", code, "sh", sys.executable, "-c", program]
        places_given = {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp"), "XDG_CACHE_HOME": ""}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **places_given})
        return (done.stdout or done.stderr).strip()

    assert root(tmp_path / "home") == f"{tmp_path}/tmp/splatcli-native-0"
    refusal = root(tmp_path / "home", tmp_path / "tmp")
    assert "splatcli-native-0: libraries that are built here cannot be loaded" in refusal
    assert "mounted noexec" in refusal
    assert "XDG_CACHE_HOME" in refusal


def test_without_any_folder_the_error_names_one_to_make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(build.tempfile, "gettempdir", none)
    with pytest.raises(ResourceError, match="set XDG_CACHE_HOME to a folder"):
        build.cache_root()
    assert examine()["cache"] is None


class TestFolderWhereOthersWrite:
    """Without a cache of one's own, libraries are built below the temporary folder, and loaded from there."""

    @pytest.fixture
    def root(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no folder can be made there
        monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
        return tmp_path / f"splatcli-native-{os.getuid()}"

    def test_is_made_for_its_user_alone(self, root: Path) -> None:
        before = os.umask(0)
        try:
            assert build.cache_root() == build.cache_root() == root
        finally:
            os.umask(before)
        assert root.stat().st_mode & 0o777 == 0o700

    @pytest.mark.parametrize("fault", ["link", "file", "writable by the group", "writable by all", "of another user"])
    def test_is_not_trusted_when_others_could_have_put_something_there(
        self, root: Path, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if fault == "link":
            (tmp_path / "elsewhere").mkdir(mode=0o700)
            root.symlink_to(tmp_path / "elsewhere")
        elif fault == "file":
            root.touch()
        else:
            root.mkdir(mode=0o700)
            root.chmod({"writable by the group": 0o770, "writable by all": 0o777}.get(fault, 0o700))
        if fault == "of another user":
            uid = os.getuid()
            if uid != 0:
                pytest.skip("needs root, to give a folder away")
            os.chown(root, 12345, 12345)
        with pytest.raises(ResourceError, match="code is not loaded from such a place") as caught:
            build.cache_root()
        assert caught.value.where == str(root)
        assert "XDG_CACHE_HOME" in str(caught.value.remedy)
