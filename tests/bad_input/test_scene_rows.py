"""Bad scenes: folders, COLMAP models, transforms files, poses and points (rows 1 to 22 and 38 to 44)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.bad_input.table import Case, Expect


def nothing(folder: Path) -> None:
    """The good scene as it is."""


def remove_scene(folder: Path) -> None:
    shutil.rmtree(folder / "scene")


CASES = [
    Case(1, "no such folder", remove_scene, says=("no such folder", "scene")),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case, expect: Expect) -> None:
    expect(case)


def test_the_good_scene_is_trained_without_a_word_of_doubt(expect: Expect) -> None:
    err = expect(Case(0, "nothing is wrong", nothing, code=0))
    assert "warning" not in err
    assert "note" not in err
