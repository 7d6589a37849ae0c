"""Many photos: the made-up scene, a small run of the whole measurement, and its figures in the documentation."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np

from benchmarks import many
from splatcli.config import DataConfig
from splatcli.scene.read import read_scene
from tests.forked import splat_command
from tests.native.cases import NEEDS_COMPILER

ROOT = Path(__file__).resolve().parents[2]


def test_the_scene_is_as_it_says(tmp_path: Path) -> None:
    root = many.make_scene(tmp_path / "scene", 6, 600, (64, 48))
    scene = read_scene(root, DataConfig())
    assert len(scene.cameras) == 6
    assert scene.points is not None
    assert len(scene.points.xyz) == 600
    assert (root / "images" / "0000.jpg").samefile(root / "images" / "0004.jpg")
    # A third of a turn's sixth on either side: each camera sees its own part of the wall.
    for camera in scene.cameras:
        seen = scene.points.xyz @ camera.viewmat[:3, :3].T + camera.viewmat[:3, 3]
        u = camera.fx * seen[:, 0] / seen[:, 2] + camera.cx
        inside = (seen[:, 2] > 0) & (u > 0) & (u < camera.width)
        assert 60 < inside.sum() < 300
    before = (root / "facts.json").stat().st_mtime_ns
    many.make_scene(root, 6, 600, (64, 48))
    assert (root / "facts.json").stat().st_mtime_ns == before, "made once"


@NEEDS_COMPILER
def test_whole_commands_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "many.json"
    words = [tmp_path, "--views", 6, "--points", 600, "--rendered", 500, "--steps", 2, "--size", 64, 48, "--out", out]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*splat_command(), "-m", "benchmarks.many", *map(str, words)],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    train = result["train"]
    assert 0 < train["first_step_begins_cpu_s"] <= train["first_step_ends_cpu_s"] <= train["cpu_s"] + 0.1
    assert 0.1 < train["peak_gib"] < 4
    assert "first_step_begins_s" not in result["render"]
    assert len(list((tmp_path / "pictures").glob("*.png"))) == 2
    with (tmp_path / "wall_500.ply").open("rb") as file:
        header = file.read(4000).partition(b"end_header\n")[0].decode()
    assert "element vertex 500" in header
    means = many.wall(500)
    assert np.abs(np.hypot(means[:, 0], means[:, 2]) - 4.0).max() < 0.6


def test_the_documentation_shows_the_stored_figures() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "many.json").read_text(encoding="utf-8"))
    text = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    for result in results:
        assert many.row(result) in text
