"""The CUDA library: which nvcc is taken, for which GPU, when a ready-made library stands in, and what is said."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from splatcli.errors import ResourceError
from splatcli.native import abi, build, build_cuda
from splatcli.native.build_cuda import NoToolkitError, Toolkit, cuda_library, find_toolkit, nvcc_flags, supported

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


def test_a_ready_made_library_is_taken_only_if_it_is_of_these_sources(tmp_path: Path) -> None:
    folder = tmp_path / "ready"
    folder.mkdir()
    (folder / build_cuda.NAME).write_text("code", encoding="utf-8")
    facts = {"sources": build.source_digest(build_cuda.FOLDERS), "abi": abi.ABI_VERSION}
    note = folder / "libsplat_cuda.json"
    for changed, taken in [({}, True), ({"sources": "other"}, False), ({"abi": -1}, False)]:
        note.write_text(json.dumps(facts | changed), encoding="utf-8")
        assert (build_cuda.ready_made() is not None) is taken
    note.write_text("no json", encoding="utf-8")
    assert build_cuda.ready_made() is None


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
