"""Colours of backgrounds: CSS' names and hexadecimal numbers, and R, G, B in 0..1; one reader for every option."""

from __future__ import annotations

from typing import Any

import pytest

from splatcli.config import build_config
from splatcli.errors import UsageError
from splatcli.train.backgrounds import parse_background


@pytest.mark.parametrize(
    ("text", "rgb"),
    [
        ("white", (255, 255, 255)),
        ("Black", (0, 0, 0)),
        ("teal", (0, 128, 128)),
        ("CornflowerBlue", (100, 149, 237)),
        ("#fff", (255, 255, 255)),
        ("#18c", (0x11, 0x88, 0xCC)),
        ("#1088Cc", (0x10, 0x88, 0xCC)),
        ("1088cc", (0x10, 0x88, 0xCC)),  # a shell takes an unquoted # for a comment
        ("0,0.2,1", (0, 51, 255)),
        (" 1, 1 ,1 ", (255, 255, 255)),
    ],
)
def test_a_colour_has_several_forms(text: str, rgb: tuple[int, int, int]) -> None:
    assert parse_background(text) == tuple(value / 255 for value in rgb)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("whiteish", "white"),
        ("255,128,0", "#ff8000"),
        ("#ffff", "#rrggbb"),
        ("#ffffff80", "#rrggbb"),
        ("0.5", "r,g,b"),
        ("255", "r,g,b"),
        ("1,1", "r,g,b"),
        ("nan,0,0", "r,g,b"),
        ("300,0,0", "r,g,b"),
        ("", "r,g,b"),
    ],
)
def test_what_is_no_colour_is_answered_with_the_forms(text: str, hint: str) -> None:
    with pytest.raises(UsageError, match="is not a colour") as caught:
        parse_background(text)
    assert caught.value.remedy is not None
    assert hint in caught.value.remedy


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("black", "black"),
        ("#fff", "white"),
        ("random", "random"),
        ("Random", "random"),
        ("Teal", "#008080"),
        ((0.0, 0.5, 1), "#0080ff"),
        ([1, 1, 1], "white"),
        (808080, "#808080"),
    ],
)
def test_a_run_stores_one_form_of_each_colour(given: Any, stored: str) -> None:
    """So that the same command with another form continues the run."""
    assert build_config({"train.background": given}).train.background == stored


@pytest.mark.parametrize("given", ["", "grays", "255,0,0", (1, 2), True, 0.5])
def test_a_run_refuses_what_is_no_colour(given: Any) -> None:
    with pytest.raises(UsageError, match=r"train\.background"):
        build_config({"train.background": given})


def test_assignments_take_each_form() -> None:
    for text in ("teal", "#008080", "008080", "0,0.502,0.502", "[0, 0.502, 0.502]"):
        assert build_config(assignments=[f"train.background={text}"]).train.background == "#008080", text
