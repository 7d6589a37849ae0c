"""The published figures: where they come from, how they are kept, and that the page shows those that are stored."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.torture import all as runner


def test_the_page_shows_the_figures_that_are_stored() -> None:
    figures = json.loads(runner.FIGURES.read_text())
    page = runner.PAGE.read_text()
    shown = page.partition(runner.BEGIN)[2].partition(runner.END)[0].strip()
    assert shown == runner.table(figures), "python -m tests.torture.all --take FOLDER writes it anew"
    for name, figure in figures.items():
        assert figure["trials"] > 0, name
        assert figure["failures"] == 0, name


def test_every_module_that_runs_by_itself_is_a_harness() -> None:
    names = runner.harnesses()
    assert {"kill_saves", "kill_runs", "faults", "power_cuts", "bit_flips", "fuzz_ply", "space_matrix"} <= set(names)
    assert not {"all", "harness", "mutate", "states", "calls"} & set(names)


def test_figures_replace_those_of_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "FIGURES", tmp_path / "figures.json")
    monkeypatch.setattr(runner, "PAGE", tmp_path / "page.md")
    runner.PAGE.write_text(f"before\n{runner.BEGIN}\nstale\n{runner.END}\nafter\n")
    run = {"date": "2026-01-02", "commit": "abc"}
    one: dict[str, Any] = {"what": "a trial", "trials": 1000, "failures": 0, "run": run}
    (tmp_path / "fuzz_ply.json").write_text(json.dumps({"fuzz_ply": one}))
    # A harness may leave out its name and the circumstances.
    (tmp_path / "kill_runs.json").write_text(json.dumps({"what": "a kill", "trials": 2, "failures": 1}))
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["all", "--take", str(tmp_path)])
        assert runner.main() == 0
    assert json.loads(runner.FIGURES.read_text())["fuzz_ply"] == one
    text = runner.PAGE.read_text()
    assert "| `fuzz_ply` | a trial | 1,000 | 0 | 2026-01-02 abc |\n| `kill_runs` | a kill | 2 | 1 |  |" in text
    assert text.startswith("before\n")
    assert text.endswith(f"{runner.END}\nafter\n")
    assert "stale" not in text


def test_a_harness_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["all", "nothing"])
    with pytest.raises(SystemExit):
        runner.main()
