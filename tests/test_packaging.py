"""The built package can be installed elsewhere: the native sources travel along."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.cli.tiny import QUICK, write_scene

ROOT = Path(__file__).resolve().parents[1]


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
    assert "include/splat.h" in native_sources()
    assert {f"splatcli/_native_src/{name}" for name in native_sources()} <= names
    assert {"splatcli/py.typed", "splatcli/viewer/live.html", "splatcli/formats/viewer/index.js"} <= names
    assert not {name for name in names if not name.startswith(("splatcli/", "splatcli-"))}


def test_the_sdist_is_the_whole_project(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {f"cuda/{name}" for name in native_sources()} <= names
    assert {"pyproject.toml", "LICENSE", "README.md", "Makefile", "tests/conftest.py", "docs/math.md"} <= names


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
