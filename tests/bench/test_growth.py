"""Growth: a small sweep in whole processes, the fits of its figures, and its tables in the documentation."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import growth
from tests.forked import splat_command
from tests.native.cases import NEEDS_COMPILER

ROOT = Path(__file__).resolve().parents[2]


@NEEDS_COMPILER
def test_a_sweep_measures_each_curve(tmp_path: Path) -> None:
    out = tmp_path / "growth.json"
    words = ["-m", "benchmarks.growth", "--gaussians", "500", "1000", "4000", "8000", "--pixels", "--views", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*splat_command(), *words, "--rounds", "2", "--out", str(out)],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    curves = json.loads(out.read_text())["curves"]
    assert curves.keys() == {"gaussians", "views"}
    rows = curves["gaussians"]["rows"]
    assert [row["gaussians"] for row in rows] == [500, 1000, 4000, 8000]
    assert all(row["visible"] < row["isects"] for row in rows)
    assert all(set(row["stages_ms"]) == {*growth.STAGES} - {"adam"} for row in rows)
    (batch,) = curves["views"]["rows"]
    assert set(batch["stages_ms"]) == set(growth.STAGES)
    assert batch["peak_bytes"] > 720 * batch["gaussians"]
    assert len(curves["gaussians"]["exponents"]["step"]) == 3
    assert growth.table(rows) in done.stdout


def row(kind: str, gaussians: int, isects: int, pixels: int, ms: float) -> dict[str, Any]:
    peak = 700 * gaussians + 90 * isects + 60 * pixels + 5000
    return {
        **{"kind": kind, "gaussians": gaussians, "isects": isects, "pixels": pixels},
        **{"stages_ms": {"bin": ms}, "step_ms": 2 * ms, "peak_bytes": peak},
    }


def test_exponents_are_slopes_of_logarithms() -> None:
    rows = [row("pixels", 10, 10, n, ms) for n, ms in ((100, 1.0), (200, 2.0), (400, 8.0))]
    assert growth.exponents(rows) == {"bin": [1.0, 2.0], "step": [1.0, 2.0]}
    assert growth.overall(rows) == {"bin": 1.5, "step": 1.5}


def test_bytes_of_each_count_are_found() -> None:
    counts = [(1000, 5000, 10_000), (9000, 8000, 10_000), (3000, 90_000, 20_000), (3000, 20_000, 90_000), (1, 1, 1)]
    found = growth.bytes_of_each([row("pixels", *count, 1.0) for count in counts])
    assert [found[name] for name in ("gaussians", "isects", "pixels")] == pytest.approx([700, 90, 60], abs=0.1)
    assert found["largest_error"] == 0


def test_the_documentation_shows_the_stored_result_and_nothing_grows_faster_than_its_count() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "growth.json").read_text(encoding="utf-8"))
    times, memory = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("cpu.md", "memory.md"))
    for curve in result["curves"].values():
        assert growth.table(curve["rows"]) in times
        assert curve["exponents"] == growth.exponents(curve["rows"])
        assert curve["overall"] == growth.overall(curve["rows"])
    largest = max(max(curve["overall"].values()) for curve in result["curves"].values())
    assert largest < growth.SUPERLINEAR
    steepest = max(max(each) for curve in result["curves"].values() for each in curve["exponents"].values())
    words = f"largest exponent of a whole curve is {largest}, and between neighbours {steepest} "
    assert words in " ".join(times.split())
    single = [row for kind in ("gaussians", "pixels") for row in result["curves"][kind]["rows"]]
    assert growth.memory_table(single) in memory
    assert result["bytes_of_each"] == growth.bytes_of_each(single)
    for name in ("gaussians", "isects", "pixels"):
        assert f"{result['bytes_of_each'][name]:.0f}" in memory
