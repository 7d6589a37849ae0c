"""splat doctor: facts of the machine, a test render, and an exit code that scripts can use."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from splatcli import doctor
from splatcli.native import backend
from splatcli.native.backend import Backend
from splatcli.native.build import NoCompilerError
from tests.cli.terminal import on_terminal
from tests.kernels.simt import simulated
from tests.native.cases import NEEDS_COMPILER
from tests.running import Splat

ROOT = Path(__file__).resolve().parents[2]


@NEEDS_COMPILER
def test_the_facts_of_this_machine(splat: Splat) -> None:
    done = splat("doctor", "--json")
    assert done.code == 0
    (facts,) = done.objects
    assert facts["torch"] == torch.__version__
    assert len(facts["gpus"]) == torch.cuda.device_count()
    assert facts["compiler"]["works"]
    cpu = facts["backends"]["cpu"]
    assert cpu["works"]
    assert 0 <= cpu["largest_difference"] < 1e-4
    assert cpu["library"].endswith(".so")


@NEEDS_COMPILER
def test_the_test_image_needs_no_compiler_of_torch() -> None:
    # It takes seconds to import, and with CUDA builds its libraries end each process with a report of leaks.
    code = (
        "import sys; from splatcli.cli import main\n"
        "sys.argv = ['splat', 'doctor', '--json']\n"
        "try: main()\n"
        "finally: assert not {'torch._dynamo', 'triton'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert json.loads(done.stdout)["backends"]["cpu"]["works"]
    assert "Error" not in done.stderr


@NEEDS_COMPILER
def test_the_lines_have_the_same_facts(splat: Splat) -> None:
    done = splat("doctor")
    assert done.code == 0
    assert "cpu        works: " in done.out
    assert "largest difference from the reference" in done.out


@NEEDS_COMPILER
def test_lines_are_wrapped_between_words_on_a_terminal() -> None:
    screen = on_terminal("--plain", "doctor", columns=60)
    lines = screen.text.rstrip().split("\n")
    assert screen.code == 0
    assert max(len(line) for line in lines if " " in line.strip()) <= 60
    whole = on_terminal("doctor", columns=60, piped=True).stdout
    assert any(len(line) > 60 for line in whole.splitlines())
    assert set(re.sub(r"\d", "", whole).split()) <= set(re.sub(r"\d", "", screen.text).split())


@NEEDS_COMPILER
def test_a_ready_made_library_needs_no_compiler(splat: Splat, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> dict[str, Any]:
        raise NoCompilerError("no C++ compiler was found", remedy="install one")

    monkeypatch.setattr(doctor, "_compiler", none)
    monkeypatch.setattr(doctor, "_driver", lambda: None)
    monkeypatch.setattr(doctor.build_cuda, "driver_cuda", lambda: None)
    assert "compiler   none was found; the library for the CPU needs none\n" in splat("doctor").out
    assert not any("g++" in line or "compiler" in line for line in splat("doctor", "--fix").lines)


def test_without_a_compiler_the_remedy_names_what_to_install(splat: Splat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(backend, "load_cpu", backend.load_cpu.__wrapped__)  # whatever this process loaded before
    done = splat("doctor")
    assert done.code == 4
    assert "DOES NOT WORK" in done.out
    assert "no-such-compiler" in done.out
    assert "help: install a C++17 compiler" in done.out


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("driver", "cuda", "said"),
    [
        (None, None, "unavailable: no NVIDIA driver"),
        ("580.65.06", None, "unavailable: torch is a CPU build"),
        ("580.65.06", "13.0", "unavailable: torch for CUDA 13.0 finds no GPU"),
    ],
)
def test_without_a_gpu_the_cause_is_reported(
    driver: str | None, cuda: str | None, said: str, splat: Splat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(doctor, "_driver", lambda: driver)
    monkeypatch.setattr(doctor.build_cuda, "driver_cuda", lambda: None if driver is None else (13, 0))
    done = splat("doctor")
    assert done.code == 0
    assert said in done.out


@NEEDS_COMPILER
def test_a_gpu_that_torch_cannot_use_is_a_fact(splat: Splat, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old driver counts its GPUs; torch raises at the first use of one."""

    def refuse(*_: object) -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020)")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", refuse)
    monkeypatch.setattr(torch.cuda, "get_device_capability", refuse)
    done = splat("doctor")
    assert done.code == 0
    assert "cuda:0     torch cannot use it" in done.out
    assert "cuda:0     DOES NOT WORK: The NVIDIA driver on your system is too old" in done.out


@NEEDS_COMPILER
def test_machine_and_extras_are_described(splat: Splat, monkeypatch: pytest.MonkeyPatch) -> None:
    (facts,) = splat("doctor", "--json").objects
    assert facts["memory_bytes"] > 2**28
    assert 1 <= facts["threads"] <= facts["cores"]
    assert facts["isa"] in ("avx512", "avx2", "neon", "portable")
    assert list(facts["extras"]) == ["video", "heic", "geo", "exr", "usd", "spz", "tensorboard", "lpips", "lightning"]
    text = splat("doctor").out
    for name, extra in {"pycolmap": facts["pycolmap"], **facts["extras"]}.items():
        line = next(line for line in text.splitlines() if line.startswith(f"{name:<9}  "))
        assert extra["used_for"] in line
        assert ("not installed" in line) is not extra["works"]


@NEEDS_COMPILER
def test_fix_prints_the_commands_that_mend(splat: Splat, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = ["imageio_ffmpeg", "OpenEXR"]
    modules = {extra.module for extra in doctor.EXTRAS}
    find_spec, which = importlib.util.find_spec, shutil.which

    def found(name: str, package: str | None = None) -> Any:
        return None if name in gone else find_spec("json" if name in modules else name, package)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    monkeypatch.setattr(shutil, "which", lambda name, **more: None if name == "ffmpeg" else which(name, **more))
    monkeypatch.setattr(doctor, "_driver", lambda: None)
    monkeypatch.setattr(doctor.build_cuda, "driver_cuda", lambda: None)
    done = splat("doctor", "--fix")
    assert (done.code, done.lines) == (0, [f"{shlex.quote(sys.executable)} -m pip install 'splatcli[video,exr]'"])
    gone.clear()
    done = splat("doctor", "--fix")
    assert (done.code, done.out) == (0, "")
    assert "nothing is missing" in done.err


def test_fix_names_what_people_have_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    broken = {"works": False, "problem": "none", "remedy": "check nvidia-smi"}
    facts: dict[str, Any] = {
        "extras": {"video": {"works": True}},
        "driver": "580.65",
        "driver_cuda": None,
        "compiler": broken,
        "nvcc": broken,
        "backends": {"cpu": broken, "cuda": broken},
    }
    compiler, packages, gpu = doctor.fixes(facts)
    assert "g++" in compiler or "gcc" in compiler or "CXX" in compiler
    assert packages == f"{shlex.quote(sys.executable)} -m pip install 'splatcli[cuda]'"
    assert gpu == "# cuda: check nvidia-smi"
    assert doctor.fixes(facts | {"driver_cuda": "13.0"}) == [compiler, packages, gpu]
    assert doctor.fixes(facts | {"driver_cuda": "12.8"}) == [compiler, "# nvcc: check nvidia-smi", gpu], (
        "that driver does not know what nvcc of the extra makes"
    )
    facts["driver"] = None
    assert doctor.fixes(facts) == [compiler]
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert doctor.fixes(facts) == ["unset CXX"], "a compiler is there, and CXX names another one"
    monkeypatch.delenv("CXX")
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}" if name in ("xcode-select", "brew") else None)
    assert doctor.fixes(facts) == ["xcode-select --install"], "Homebrew's gcc has other names"


def test_extras_are_those_of_the_package() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {extra.name for extra in doctor.EXTRAS} == set(declared) - {"cuda", "dev", "docs"}
    for extra in doctor.EXTRAS:
        assert any(line.startswith(extra.package) for line in declared[extra.name]), extra


@NEEDS_COMPILER
def test_the_self_test_detects_a_wrong_image(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.render_reference

    def shifted(*args: Any, **kwargs: Any) -> Any:
        image, alpha, depth = real(*args, **kwargs)
        return image.roll(1, 0), alpha, depth

    assert doctor.self_test(Backend.cpu(), "cpu") < 1e-4
    monkeypatch.setattr(doctor, "render_reference", shifted)
    assert doctor.self_test(Backend.cpu(), "cpu") > doctor.TOLERANCE


@NEEDS_COMPILER
def test_the_self_test_runs_on_the_cuda_kernels() -> None:
    assert doctor.self_test(simulated(), "cpu") < 1e-4
