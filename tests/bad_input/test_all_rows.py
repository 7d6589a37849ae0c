"""Every row of the table of bad inputs has a case."""

from __future__ import annotations

import importlib
import importlib.util

import pytest

from tests.bad_input.table import Case

MODULES = ("test_scene_rows", "test_image_rows", "test_model_rows", "test_run_rows")
ROWS = range(1, 73)


def test_every_row_has_a_case() -> None:
    names = [f"{__package__}.{name}" for name in MODULES]
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    cases: list[Case] = [case for name in names if name not in absent for case in importlib.import_module(name).CASES]
    missing = sorted(set(ROWS) - {case.row for case in cases})
    if absent:
        pytest.skip(f"there is no {', '.join(absent)} yet; rows without a case: {missing}")
    assert missing == []
