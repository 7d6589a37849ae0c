"""The CUDA library: which nvcc is taken, for which GPU, when a ready-made library stands in, and what is said."""

from __future__ import annotations

import ctypes
import json
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from splatcli.errors import ResourceError
from splatcli.native import abi, build, build_cuda
from splatcli.native.build_cuda import NoToolkitError, Toolkit, cuda_library, find_toolkit, nvcc_flags, supported
from tests.native.cases import NEEDS_COMPILER

#: Stands in for nvcc: a version, a list of architectures, and a library that is a note of the flags.
FAKE_NVCC = """\
#!/bin/sh
case "$1" in
  --version) echo "nvcc: a compiler driver"; echo "Cuda compilation tools, release {release}, V{release}.1" ;;
  --list-gpu-code) printf 'sm_75\\nsm_80\\nsm_90\\nsm_90a\\n' ;;
  *) for word; do [ "$last" = -o ] && out="$word"; last="$word"; done; echo "$@" > "$out" ;;
esac
"""


def fake(folder: Path, release: str = "12.8") -> Path:
    path = folder / "bin" / "nvcc"
    path.parent.mkdir(parents=True)
    path.write_text(FAKE_NVCC.replace("{release}", release), encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No toolkit but those of the test, an empty cache, no ready-made library."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(build_cuda.shutil, "which", lambda name: None if name == "nvcc" else f"/usr/bin/{name}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build_cuda, "READY_MADE", tmp_path / "ready")
    monkeypatch.setattr(build_cuda, "driver_cuda", lambda: (13, 0))


def test_cuda_home_comes_before_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = fake(tmp_path / "home", "12.8"), fake(tmp_path / "path", "13.0")
    monkeypatch.setattr(build_cuda.shutil, "which", lambda name: str(other) if name == "nvcc" else f"/usr/bin/{name}")
    found = find_toolkit()
    assert (found.nvcc, found.release, found.origin) == (other, (13, 0), "PATH")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    found = find_toolkit()
    assert (found.nvcc, found.release, found.origin) == (mine, (12, 8), "$CUDA_HOME")


def test_no_toolkit_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_cuda, "_candidates", lambda: [])
    with pytest.raises(NoToolkitError, match="no nvcc") as caught:
        find_toolkit()
    assert "CUDA_HOME" in str(caught.value)


def test_the_advice_is_for_a_cuda_that_the_driver_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_cuda, "_candidates", lambda: [])
    with pytest.raises(NoToolkitError, match=re.escape("pip install 'splatcli[cuda]'; splat doctor")):
        cuda_library((9, 0))
    monkeypatch.setattr(build_cuda, "driver_cuda", lambda: (12, 8))
    with pytest.raises(NoToolkitError, match="no nvcc") as caught:
        cuda_library((9, 0))
    remedy = caught.value.remedy or ""
    assert remedy.startswith("install the CUDA toolkit 12.8")
    assert "driver to 580 or newer, and pip install 'splatcli[cuda]'" in remedy


@pytest.mark.parametrize(
    ("capability", "code"), [((8, 0), (8, 0)), ((8, 9), (8, 0)), ((9, 0), (9, 0)), ((12, 0), (9, 0))]
)
def test_the_newest_code_that_the_gpu_runs(tmp_path: Path, capability: tuple[int, int], code: tuple[int, int]) -> None:
    toolkit = Toolkit(fake(tmp_path), (12, 8), "release 12.8", "here")
    assert supported(toolkit, capability) == code


def test_a_gpu_older_than_the_toolkit_is_refused_by_name(tmp_path: Path) -> None:
    toolkit = Toolkit(fake(tmp_path), (12, 8), "release 12.8", "here")
    with pytest.raises(ResourceError, match=r"12\.8 cannot compile for compute capability 6\.1"):
        supported(toolkit, (6, 1))


def test_machine_code_and_ptx_of_the_last() -> None:
    flags = nvcc_flags(((8, 0), (9, 0)))
    assert [flag for flag in flags if "gencode" in flag] == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
    ]
    assert not any("fast" in flag for flag in flags)


def test_the_library_is_built_for_the_gpu_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path / "home")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    library = cuda_library((8, 6))
    assert "sm80" in library.parent.name
    assert "-cudart static" in library.read_text(encoding="utf-8")
    before = library.stat().st_mtime_ns
    assert cuda_library((8, 6)).stat().st_mtime_ns == before
    assert cuda_library((9, 0)).parent != library.parent


@pytest.mark.parametrize("name", ["NVCC_CCBIN", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"])
def test_what_nvcc_reads_from_the_environment_is_in_the_key(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(tmp_path / "home")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(name, raising=False)
    before = cuda_library((9, 0))
    monkeypatch.setenv(name, "other")
    assert cuda_library((9, 0)) != before


@pytest.fixture
def ready(tmp_path: Path) -> dict[str, Any]:
    """A ready-made library that fits; what its note says."""
    folder = tmp_path / "ready"
    folder.mkdir()
    (folder / build_cuda.NAME).write_text("code", encoding="utf-8")
    facts = {
        "sources": build.source_digest(build_cuda.FOLDERS),
        "abi": abi.ABI_VERSION,
        "architectures": [[7, 5], [8, 0], [9, 0]],
        "release": [13, 0],
    }
    (folder / "libsplat_cuda.json").write_text(json.dumps(facts), encoding="utf-8")
    return facts


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"sources": "other"}, "other sources"),
        ({"abi": -1}, "other sources"),
        ({"release": [14, 0]}, "of CUDA 14, the driver knows 13.0"),
        ({"architectures": None}, "no ready-made"),
    ],
)
def test_a_ready_made_library_is_taken_only_if_it_fits(
    changed: dict[str, Any], why: str | None, ready: dict[str, Any], tmp_path: Path
) -> None:
    note = tmp_path / "ready" / "libsplat_cuda.json"
    note.write_text(json.dumps(ready | changed), encoding="utf-8")
    found = build_cuda.not_ready_made((9, 0))
    assert found is None if why is None else re.search(why, found or "")


@pytest.mark.parametrize(
    ("capability", "taken"), [((7, 0), False), ((7, 5), True), ((8, 9), True), ((9, 0), True), ((12, 1), True)]
)
def test_a_ready_made_library_serves_the_gpus_it_has_code_for(
    capability: tuple[int, int], taken: bool, ready: dict[str, Any]
) -> None:
    assert (build_cuda.not_ready_made(capability) is None) is taken


def test_a_note_that_is_no_note_and_a_note_without_its_library(ready: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "ready" / build_cuda.NAME).unlink()
    assert build_cuda.not_ready_made((9, 0)) is not None
    (tmp_path / "ready" / "libsplat_cuda.json").write_text("no json", encoding="utf-8")
    assert build_cuda.not_ready_made((9, 0)) is not None


def test_a_toolkit_too_new_for_the_driver_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new, old = fake(tmp_path / "new", "13.0"), fake(tmp_path / "old", "12.8")
    monkeypatch.setattr(build_cuda, "driver_cuda", lambda: (12, 4))
    monkeypatch.setattr(build_cuda, "_candidates", lambda: [("PATH", new), ("/usr/local/cuda", old)])
    assert str(old) in (cuda_library((9, 0)).parent / "build.ninja").read_text(encoding="utf-8")


def test_a_driver_too_old_for_every_toolkit_is_said_with_what_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(tmp_path / "home", "13.0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(build_cuda, "driver_cuda", lambda: (12, 4))
    with pytest.raises(ResourceError, match=r"nvcc 13\.0 .* the driver knows no more than CUDA 12\.4") as caught:
        cuda_library((9, 0))
    assert "580 or newer" in str(caught.value)
    assert "CUDA toolkit 12.4" in str(caught.value)
    assert "cuda-12.4.0" in str(caught.value)


@NEEDS_COMPILER
@pytest.mark.parametrize(("answer", "known"), [("12040", (12, 4)), ("13000", (13, 0)), ("0", None)])
def test_what_the_driver_says_it_knows(
    answer: str, known: tuple[int, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the real function
    source = tmp_path / "driver.cpp"
    source.write_text(f'extern "C" int cuDriverGetVersion(int* v) {{ *v = {answer}; return 0; }}', encoding="utf-8")
    driver = tmp_path / "libcuda.so.1"
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", driver], check=True)
    real = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name: real(str(driver)))
    assert build_cuda.driver_cuda() == known


def test_what_nvcc_says_reaches_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = fake(tmp_path / "home")
    nvcc.write_text(
        nvcc.read_text(encoding="utf-8").replace("*) for", "*) echo unsupported GNU version; exit 1 ;; x) for"),
        encoding="utf-8",
    )
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    with pytest.raises(ResourceError, match="unsupported GNU version") as caught:
        cuda_library((9, 0))
    assert "NVCC_CCBIN" in str(caught.value)
