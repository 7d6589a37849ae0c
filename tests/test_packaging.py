"""The built package can be installed elsewhere: the native sources travel along."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch

import splatcli
from tests.cli.tiny import QUICK, write_scene

ROOT = Path(__file__).resolve().parents[1]
#: With the one sample scene that travels.
SAMPLES = ROOT / "data" / "samples"
NEEDS_X86 = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("g++") is None, reason="builds the CPU library for x86-64 by g++"
)


def native_sources() -> set[str]:
    """Relative to cuda/."""
    return {str(path.relative_to(ROOT / "cuda")) for path in (ROOT / "cuda").rglob("*") if path.is_file()}


def build(kind: str, folder: Path) -> Path:
    """A fresh wheel or sdist of this checkout, made without the network."""
    command = [sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.iterdir()
    return path


def test_the_wheel_carries_the_native_sources(tmp_path: Path) -> None:
    with zipfile.ZipFile(build("wheel", tmp_path)) as wheel:
        names = set(wheel.namelist())
        (entry_points,) = [name for name in names if name.endswith("entry_points.txt")]
        assert "splat = splatcli.cli:main" in wheel.read(entry_points).decode()
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        (torch_wanted,) = re.findall(r"^Requires-Dist: (torch\b.*)$", wheel.read(metadata).decode(), re.M)
    # With a bound, pip would replace a newer CPU build by an older one with CUDA.
    assert torch_wanted == "torch>=2.10"
    assert "include/splat.h" in native_sources()
    assert {f"splatcli/_native_src/{name}" for name in native_sources()} <= names
    sample = {
        f"splatcli/_samples/{path.relative_to(SAMPLES)}"
        for path in (SAMPLES / "courtyard").rglob("*")
        if path.is_file()
    }
    assert sample <= names
    assert len(sample) > 50
    assert {"splatcli/py.typed", "splatcli/viewer/live.html", "splatcli/formats/viewer/index.js"} <= names
    editor = ("path_editor.js", "supersplat_view.js", "live_view.js", "camera_path.js", "path_editor.css")
    assert {f"splatcli/viewer/{name}" for name in editor} <= names
    docs = ROOT / "docs"
    assert {f"splatcli/_docs/{path.relative_to(docs)}" for path in docs.rglob("*.md")} <= names
    assert not {name for name in names if not name.startswith(("splatcli/", "splatcli-"))}


def test_the_sdist_is_the_whole_project(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {f"cuda/{name}" for name in native_sources()} <= names
    assert {
        "pyproject.toml",
        "LICENSE",
        "README.md",
        "Makefile",
        "tests/conftest.py",
        "docs/math.md",
        "examples/train.py",
    } <= names


def test_a_checkout_reads_its_sources_in_place() -> None:
    from splatcli.native.build import source_root

    assert source_root() == ROOT / "cuda"


def test_an_installed_package_reads_its_own_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from splatcli.native import build

    header = tmp_path / "splatcli" / "_native_src" / "include" / "splat.h"
    header.parent.mkdir(parents=True)
    header.touch()
    monkeypatch.setattr(build, "_PACKAGE", tmp_path / "splatcli")
    assert build.source_root() == tmp_path / "splatcli" / "_native_src"


def test_missing_sources_are_an_error_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from splatcli.errors import ResourceError
    from splatcli.native import build

    monkeypatch.setattr(build, "_PACKAGE", tmp_path / "splatcli")
    with pytest.raises(ResourceError, match="missing") as caught:
        build.source_root()
    assert "pip install" in str(caught.value.remedy)


@pytest.fixture(scope="module")
def ready_made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package that carries a CPU library, as a wheel of scripts/build_wheels.py does: its folder's parent."""
    from splatcli.native import build

    root = tmp_path_factory.mktemp("installed")
    package = root / "splatcli"
    shutil.copytree(ROOT / "splatcli", package, ignore=shutil.ignore_patterns("__pycache__", "_native_bin"))
    shutil.copytree(ROOT / "cuda", package / "_native_src")
    with pytest.MonkeyPatch.context() as patched:
        # Unoptimised: it is loaded, and computes nothing.
        patched.setitem(build.MACHINE_ISA_FLAGS, "x86_64", {"portable": (*build.ISA_FLAGS["portable"], "-O0")})
        build.ready_made_cpu_libraries(package / "_native_bin", "x86_64", build.find_compiler())
    return root


def without_compiler(root: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with the package in ``root``, where no compiler and no cache is."""
    environment = {"PYTHONPATH": str(root), "PATH": "", "HOME": str(root), "XDG_CACHE_HOME": str(root / "cache")}
    environment |= {"SPLATCLI_CPU_ISA": "portable"}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=root)


@NEEDS_X86
def test_a_library_in_the_package_needs_no_compiler(ready_made: Path) -> None:
    program = "from splatcli.native.backend import Backend; print(Backend.cpu().library._name)"
    done = without_compiler(ready_made, program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(ready_made / "splatcli" / "_native_bin" / "libsplat_cpu_portable.so")
    assert not list((ready_made / "cache").rglob("*.so"))
    doctor = without_compiler(
        ready_made, "import sys; from splatcli.cli import main; sys.argv = ['splat', 'doctor']; main()"
    )
    assert "ready-made, from this package" in doctor.stdout


@NEEDS_X86
def test_a_library_in_the_package_computes_the_same_bits(ready_made: Path, tmp_path: Path) -> None:
    """Its exp, pow and the like are other versions of the C library's than those of a library that is built here."""
    train = "import sys; from splatcli.cli import main; sys.argv = ['splat', 'train', *{}]; main()"
    flags = [str(ROOT / "data" / "samples" / "courtyard"), "-r", "8", "--iterations", "5", "-o"]
    done = without_compiler(ready_made, train.format([*flags, str(tmp_path / "ready-made")]))
    assert done.returncode == 0, done.stderr
    environment = os.environ | {"PYTHONPATH": str(ROOT), "SPLATCLI_CPU_ISA": "portable"}
    subprocess.run([sys.executable, "-c", train.format([*flags, str(tmp_path / "built")])], check=True, env=environment)
    models = [splatcli.Model.load(tmp_path / name).gaussians for name in ("ready-made", "built")]
    for name in ("means", "quats", "log_scales", "logit_opacities", "sh0", "shN"):
        ready, built = (getattr(model, name) for model in models)
        assert torch.equal(ready, built), name


@NEEDS_X86
@pytest.mark.parametrize("change", ["sources", "machine", "system", "json"])
def test_a_library_of_something_else_is_not_taken(
    ready_made: Path, tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from splatcli.native import build

    package = tmp_path / "splatcli"
    for folder in ("_native_src", "_native_bin"):
        shutil.copytree(ready_made / "splatcli" / folder, package / folder)
    monkeypatch.setattr(build, "_PACKAGE", package)
    monkeypatch.setattr(build, "READY_MADE", package / "_native_bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert build.cpu_library("portable") == package / "_native_bin" / "libsplat_cpu_portable.so"
    facts = package / "_native_bin" / "libsplat_cpu.json"
    if change == "sources":
        with (package / "_native_src" / "src" / "cpu" / "bin.cpp").open("a") as file:
            file.write("\n")
    elif change == "system":
        monkeypatch.setattr(sys, "platform", "darwin")
    else:
        facts.write_text(facts.read_text().replace("x86_64", "riscv") if change == "machine" else "{")
    with pytest.raises(build.NoCompilerError, match="no C\\+\\+ compiler was found"):
        build.cpu_library("portable")


@NEEDS_X86
def test_a_wheel_names_the_c_library_that_it_needs(ready_made: Path) -> None:
    from build_wheels import needed_glibc

    library = ready_made / "splatcli" / "_native_bin" / "libsplat_cpu_portable.so"
    named = subprocess.run(["objdump", "-T", library], capture_output=True, text=True, check=True).stdout
    versions = [tuple(map(int, text.split("."))) for text in re.findall(r"GLIBC_(\d+\.\d+)", named)]
    assert needed_glibc([library]) == max(versions)
    assert max(versions) <= (2, 28), "torch's wheels run with this one, so that ours have to"
    assert "GLIBCXX" not in named, "the C++ library is linked in"


@pytest.mark.slow
def test_wheels_for_both_machines_carry_their_libraries(tmp_path: Path) -> None:
    if shutil.which("aarch64-linux-gnu-g++") is None:
        pytest.skip("needs aarch64-linux-gnu-g++")
    script = [sys.executable, str(ROOT / "scripts" / "build_wheels.py"), "--no-cuda", "--dist", str(tmp_path)]
    subprocess.run(script, check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    wheels = {path.stem.rpartition("_")[2].rpartition("-")[2]: path for path in tmp_path.glob("*.whl")}
    for name, path in wheels.items():
        with zipfile.ZipFile(path) as wheel:
            carried = {Path(one).name for one in wheel.namelist() if one.endswith(".so")}
            isas = {"64": ("avx512", "avx2", "portable"), "aarch64": ("neon", "portable"), "any": ()}[name]
            assert carried == {f"libsplat_cpu_{isa}.so" for isa in isas}
    assert len(wheels) == 3
    assert not (ROOT / "splatcli" / "_native_bin").exists()


@pytest.mark.slow
def test_an_installed_wheel_trains_elsewhere(tmp_path: Path) -> None:
    wheel = build("wheel", tmp_path / "dist")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), str(wheel)]
    subprocess.run(pip, check=True)
    scene = write_scene(tmp_path / "scene")
    done = subprocess.run(
        [str(tmp_path / "venv" / "bin" / "splat"), "train", str(scene), "-n", "20", *QUICK],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / done.stdout.strip()).is_file()
    assert "slow" not in done.stderr, "the native library was not built"
