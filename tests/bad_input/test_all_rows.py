"""Every row of the table of bad inputs has a case."""

from __future__ import annotations

from tests.bad_input import test_image_rows, test_model_rows, test_run_rows, test_scene_rows

CASES = [
    *test_scene_rows.CASES,
    *test_image_rows.CASES,
    *test_model_rows.CASES,
    *test_model_rows.VARIANT_CASES,
    *test_run_rows.CASES,
    *test_run_rows.PROCESSES,
]


def test_every_row_has_a_case() -> None:
    assert {case.row for case in CASES} == set(range(1, 73))


def test_no_two_cases_have_one_name() -> None:
    names = [str(case) for case in CASES]
    assert sorted(set(names)) == sorted(names)
