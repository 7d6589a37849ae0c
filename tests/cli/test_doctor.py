"""splat doctor: facts of the machine, a test render, and an exit code that scripts can use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from splatcli import doctor
from splatcli.native import backend
from splatcli.native.backend import Backend
from tests.kernels.simt import simulated
from tests.native.cases import NEEDS_COMPILER
from tests.running import Splat


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
def test_the_lines_have_the_same_facts(splat: Splat) -> None:
    done = splat("doctor")
    assert done.code == 0
    assert "cpu        works: " in done.out
    assert "largest difference from the reference" in done.out


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
