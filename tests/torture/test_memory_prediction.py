"""The predicted memory holds for a process that really takes it: never less than it takes, and not much more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native.cases import NEEDS_COMPILER
from tests.torture.memory_prediction import Case, Measured, grid, quick_grid

MEASURE = """
import json
from dataclasses import asdict
from tests.torture.memory_prediction import measure, quick_grid
print(json.dumps([asdict(measure(case, "cpu")) for case in quick_grid()]))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Measured]:
    """By name of the case. Measured by a process that did nothing else: in the heap of one that has run other tests,
    what is freed leaves other holes each time."""
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run([sys.executable, "-c", MEASURE], cwd=root, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return {row["name"]: Measured(**row) for row in json.loads(run.stdout)}


@NEEDS_COMPILER
@pytest.mark.skipif(sys.platform != "linux", reason="peaks of memory are read from /proc")
@pytest.mark.parametrize("case", list(quick_grid()), ids=lambda case: case.name)
def test_a_prediction_holds(case: Case, found: dict[str, Measured]) -> None:
    measured = found[case.name]
    assert measured.actual > 30 << 20, "large enough to stand out from what a process does anyway"
    assert measured.holds, measured


def test_a_prediction_that_does_not_hold_would_be_seen() -> None:
    assert not Measured("", 99, 100, 0, 0).holds
    assert not Measured("", 161, 100, 0, 0).holds
    assert Measured("", 100, 100, 0, 0).holds
    assert Measured("", 160, 100, 0, 0).holds


def test_the_long_form_is_a_grid() -> None:
    cases = list(grid())
    assert len(cases) >= 26
    assert {case.sh_degree for case in cases} == {0, 1, 2, 3, 4}
    assert {case.work for case in cases} == {"step", "render"}
