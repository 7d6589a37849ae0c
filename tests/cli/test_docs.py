"""splat docs: the manual's pages, as a person and a pipe get them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from splatcli.cli.docs import pages
from tests.cli.terminal import on_terminal
from tests.running import Splat

ROOT = Path(__file__).resolve().parents[2]


def test_the_pages_are_listed_with_their_titles(splat: Splat) -> None:
    done = splat("docs")
    assert done.code == 0
    assert done.err == ""
    listed = dict(line.split(maxsplit=1) for line in done.out.splitlines())
    assert listed.keys() == {str(p.relative_to(ROOT / "docs").with_suffix("")) for p in (ROOT / "docs").rglob("*.md")}
    assert listed["settings"] == "Settings"
    assert splat("docs", "--json").objects[-1]["pages"] == listed


@pytest.mark.parametrize("name", ["guides/city", "city", "docs/guides/city.md"])
def test_a_pipe_gets_the_page_as_it_is(splat: Splat, name: str) -> None:
    done = splat("docs", name)
    assert done.code == 0
    assert done.out == (ROOT / "docs" / "guides" / "city.md").read_text(encoding="utf-8")


def test_an_unknown_page_has_a_remedy(splat: Splat) -> None:
    done = splat("docs", "setings")
    assert done.code == 2
    assert "did you mean settings?" in done.err
    assert "splat docs lists the pages" in splat("docs", "xyz").err


def test_a_terminal_gets_it_rendered() -> None:
    screen = on_terminal("docs", "guides/city", PAGER="cat")
    assert screen.code == 0
    assert "A city in blocks" in screen.text
    assert "# A city" not in screen.text
    assert ".md)" not in screen.text
    assert max(map(len, screen.text.splitlines())) <= 80
    assert "\x1b[" in screen.raw
    plain = on_terminal("docs", "guides/city", "--plain")
    assert plain.text == (ROOT / "docs" / "guides" / "city.md").read_text(encoding="utf-8")


def test_messages_and_help_name_pages_that_are_there() -> None:
    named = {
        name
        for path in (ROOT / "splatcli").rglob("*.py")
        for name in re.findall(r"`?splat docs ([a-z][a-z/-]+)", path.read_text(encoding="utf-8"))
    }
    assert named - {"lists"} <= pages().keys()
    assert len(named) > 5
