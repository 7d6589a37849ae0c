"""All kernels compile for GPUs, without a warning and without spilling where it matters."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from splatcli.native.build import source_root
from tests.ptx.machine import no_nvcc

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "kernel_table.py"

#: Bytes that a kernel may spill, stores and loads together. Below degree 3 the compiler trades a handful of spills for
#: a third block on each multiprocessor; on sm_86 and sm_89 for a sixth of blend_channels, which no training step has.
SPILLS = {"project_vjp_chunks": 64, "blend_channels": 24}

#: No source tells architectures apart, so that one has the front end's messages of all. What ptxas does with registers
#: differs, and --slow has the others.
ARCHITECTURES = (
    ("sm_90",),
    pytest.param(("sm_75", "sm_80", "sm_86", "sm_89", "sm_120"), marks=pytest.mark.slow),
)


@pytest.fixture(scope="module", params=ARCHITECTURES, ids="-".join)
def compiled(request: pytest.FixtureRequest) -> dict[str, Any]:
    if (reason := no_nvcc()) is not None:
        pytest.skip(reason)
    table = runpy.run_path(str(SCRIPT))
    return {one.source: one for one in table["compile_all"](request.param)}


SOURCES = sorted(path.name for path in (source_root() / "src" / "cuda").glob("*.cu"))


@pytest.mark.parametrize("source", SOURCES)
def test_a_source_compiles_without_a_word(
    source: str, compiled: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    assert compiled[source].returncode == 0, compiled[source].words
    assert compiled[source].words == ""
    launched = "SPLAT_LAUNCH(" in (source_root() / "src" / "cuda" / source).read_text(encoding="utf-8")
    found = {kernel.architecture for kernel in compiled[source].kernels}
    assert found == (set(request.node.callspec.params["compiled"]) if launched else set())


@pytest.mark.parametrize("source", SOURCES)
def test_no_kernel_spills_more_than_it_may(source: str, compiled: dict[str, Any]) -> None:
    spilling = {
        (kernel.name, kernel.architecture): kernel.spills
        for kernel in compiled[source].kernels
        if kernel.spills > SPILLS.get(kernel.name.partition("<")[0], 0)
    }
    assert spilling == {}
