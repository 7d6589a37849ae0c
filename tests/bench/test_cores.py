"""Instruction sets and cores: how jobs are dealt, a whole measurement, and its tables in the documentation."""

from __future__ import annotations

import json
import os
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import cores
from splatcli.native import build
from tests.cli.tiny import QUICK, add_points, write_scene
from tests.forked import splat_command
from tests.native.cases import NEEDS_COMPILER

ROOT = Path(__file__).resolve().parents[2]


def test_jobs_go_to_the_core_that_is_free_first() -> None:
    jobs = [3.0, 1.0, 1.0, 1.0, 2.0]
    assert cores.dealt(jobs, 1) == 8.0
    assert cores.dealt(jobs, 2) == 5.0  # 3 + 2, 1 + 1 + 1
    assert cores.dealt(jobs, 64) == 3.0
    assert cores.dealt([], 4) == 0.0


@NEEDS_COMPILER
@pytest.mark.skipif(build.machine_name() != "x86_64", reason="the timed pool is for x86-64")
def test_a_measurement_has_each_instruction_set_and_number_of_cores(tmp_path: Path) -> None:
    scene, run, out = add_points(write_scene(tmp_path / "ball")), tmp_path / "run", tmp_path / "cores.json"
    train = ["train", scene, "-n", "10", "-o", run, "-q", *QUICK]
    subprocess.run([*splat_command(), *map(str, train)], check=True, capture_output=True)
    words = ["-m", "benchmarks.cores", next(run.glob("ckpts/*10.pt")), "-r", "1", "2", "--rounds", "2", "--out", out]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*splat_command(), *map(str, words)], check=False, capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    first, second = json.loads(out.read_text())["sizes"]
    assert (first["size"], second["size"]) == ("40x30", "20x15")
    assert "portable" in first["isas"]
    for name, stage in first["cores"].items():
        times = [stage[str(n)] for n in cores.CORES]
        assert stage["serial"] <= times[0] + 1e-6, name
        assert all(more <= less + 1e-6 for less, more in pairwise(times)), name
    assert cores.isa_table(first) in done.stdout
    assert cores.core_table(second) in done.stdout


def test_the_documentation_shows_the_stored_result() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "cores.json").read_text(encoding="utf-8"))
    text = (ROOT / "docs" / "cpu.md").read_text(encoding="utf-8")
    for size in result["sizes"]:
        assert cores.isa_table(size) in text
        assert cores.core_table(size) in text
        assert size["isas"]["avx2"]["step"] < 1.6 * size["isas"]["avx512"]["step"]
