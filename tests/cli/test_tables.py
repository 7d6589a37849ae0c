"""Results on a terminal are tables; pipes, files, --plain and NO_COLOR get the same facts as plain lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from splatcli.cli.tables import Table, draw, of_lines, of_markdown
from tests.cli.terminal import on_terminal
from tests.native.cases import NEEDS_COMPILER


@NEEDS_COMPILER
def test_a_terminal_gets_a_table_and_a_pipe_lines(finished_run: Path) -> None:
    terminal = on_terminal("eval", finished_run)
    assert "\x1b[" in terminal.raw
    heads = next(line for line in terminal.drawn if "metric" in line)
    assert [word.strip() for word in heads.strip("│").split("│")] == ["metric", "mean", "worst view", "best view"]
    psnr = next(line for line in terminal.drawn if line.startswith("│ PSNR")).strip("│").split("│")
    worst, best = (float(cell.split()[0]) for cell in psnr[2:])
    assert worst < float(psnr[1]) < best
    assert all(len(line) <= 80 for line in terminal.drawn if line[0] in "│╭╰")

    plain = on_terminal("--plain", "eval", finished_run)
    assert f"psnr {psnr[1].strip()}" in plain.drawn
    assert "│" not in plain.text
    assert on_terminal("eval", finished_run, piped=True).stdout.splitlines()[0] == f"psnr {psnr[1].strip()}"


def test_a_scene_and_a_machine_fit_a_narrow_terminal(tiny_scene: Path) -> None:
    screen = on_terminal("info", tiny_scene, columns=60)
    assert max(map(len, screen.drawn)) <= 60
    assert "│ cameras " in screen.text
    assert "│ found │ cameras" in screen.text
    without = on_terminal("info", tiny_scene, columns=60, NO_COLOR="1")
    assert "scene kind  " in without.text
    assert "│" not in without.text


@NEEDS_COMPILER
def test_a_part_that_works_is_green() -> None:
    screen = on_terminal("doctor", columns=60)
    assert max(map(len, screen.drawn)) <= 60
    assert "\x1b[32mworks" in screen.raw


def test_lines_become_rows() -> None:
    assert of_lines(["cpu   works", "      help: none", "gpu   no"], 6).rows == [
        ["cpu", "works\nhelp: none"],
        ["gpu", "no"],
    ]
    assert of_markdown(["| a | b |", "|---|---|", "| 1 | 2 ± 1 |"]) == Table([["1", "2 ± 1"]], ["a", "b"])


@pytest.mark.parametrize("width", [40, 80])
def test_text_is_wrapped_not_cut(width: int) -> None:
    words = [f"word{index}" for index in range(40)]
    drawn = draw([Table([("name", " ".join(words)), ("path", "/x" * 60)])], width)
    assert all(word in drawn for word in words)
    assert drawn.count("/x") + drawn.count("/\n") >= 55
