"""`make roofline`: what it counts, and what it says without a model."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest

from splatcli.cli.commands import run as splat
from tests.cli.tiny import QUICK, write_scene
from tests.forked import splat_command
from tests.native.cases import NEEDS_COMPILER


def roofline(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*splat_command(), "-m", "benchmarks.cpu_roofline", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@NEEDS_COMPILER
def test_it_measures_the_stages_of_a_run(tmp_path: Path) -> None:
    scene, run, out = write_scene(tmp_path / "scene"), tmp_path / "run", tmp_path / "roofline.json"
    assert splat(["train", str(scene), "-n", "20", *QUICK, "-o", str(run), "--device", "cpu", "-q"]) == 0
    done = roofline(str(run), "--rounds", "1", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "| blend, backward |" in done.stdout
    (result,) = json.loads(out.read_text())
    assert 0 < result["visible"] <= result["gaussians"]
    assert 0 < result["touched"] <= result["lanes"] <= 256 * result["isects"]
    for name, stage in result["stages"].items():
        assert 0.0 < stage["of_operations"] < math.inf, name
        assert 0.0 < stage["of_bandwidth"] < math.inf, name


@pytest.mark.parametrize("name", ["nowhere", "notes.txt"])
def test_it_names_what_is_no_model(name: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    done = roofline(str(tmp_path / name))
    assert done.returncode in (2, 5)
    assert done.stderr.startswith("error[")
    assert str(tmp_path / name) in done.stderr
