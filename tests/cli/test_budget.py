"""``--vram-budget`` on the command line, and models whose memory would explode."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import imageio.v3 as imageio
import numpy as np
import pytest

from tests.checkpoint.foreign.made import activated, write
from tests.checkpoint.foreign.test_space import tables_of
from tests.cli.tiny import QUICK, add_points, look_at_origin, write_scene
from tests.native.cases import NEEDS_COMPILER
from tests.running import Splat

ROOT = Path(__file__).resolve().parents[2]


@NEEDS_COMPILER
def test_a_run_reports_its_memory_and_stays_within_its_budget(splat: Splat, tiny_scene: Path, tmp_path: Path) -> None:
    done = splat(
        "train", tiny_scene, "-o", tmp_path / "run", "-n", "10", *QUICK, "--vram-budget", "6GiB", "--cap-max", "none"
    )
    assert done.code == 0, done.err
    assert "note: memory: about" in done.err
    assert "the budget is 6.0 GiB" in done.err
    reported = json.loads((tmp_path / "run" / "config.json").read_text())
    assert reported["memory"]["budget"] == 6 << 30
    assert reported["memory"]["cap"] > 1_000_000
    again = splat("resume", tmp_path / "run", "-n", "12")
    assert again.code == 0, again.err
    assert f"at the cap of {reported['memory']['cap']:,} Gaussians" in again.err
    less = splat("resume", tmp_path / "run", "-n", "14", "--vram-budget", "5GiB")
    assert less.code == 0, less.err
    assert "changed: memory.budget was 6442450944, is 5368709120" in less.err
    assert json.loads((tmp_path / "run" / "config.json").read_text())["memory"]["cap"] < reported["memory"]["cap"]


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("flags", "cap"),
    [
        (("--cap-max", 1), 1),
        (("--cap-max", 3, "--strategy", "mcmc"), 3),
        (("--set", "memory.cap=50"), 50),
        (("--cap-max", 900, "--set", "model.sky_points=20000"), 900),
    ],
)
def test_no_run_begins_above_its_cap(flags: tuple[object, ...], cap: int, splat: Splat, tmp_path: Path) -> None:
    scene = add_points(write_scene(tmp_path / "scene"), 1000)
    done = splat("train", scene, "-n", 2, "-o", tmp_path / "run", "--json", *flags)
    assert done.code == 0, done.err
    (started,) = [event for event in done.objects if event["event"] == "started"]
    assert started["num_gaussians"] <= cap
    assert any(f"under the cap of {cap} Gaussians" in note for note in started["notes"])


@NEEDS_COMPILER
def test_a_budget_that_is_too_small_is_refused_and_leaves_nothing(
    splat: Splat, tiny_scene: Path, tmp_path: Path
) -> None:
    done = splat("train", tiny_scene, "-o", tmp_path / "run", *QUICK, "--vram-budget", "50M")
    assert done.code == 4
    assert "the budget is 50.0 MiB" in done.err
    assert "a larger --vram-budget allows more" in done.err
    assert not (tmp_path / "run" / "ckpts").exists() or not list((tmp_path / "run" / "ckpts").iterdir())


@pytest.mark.parametrize("size", ["8", "much", "-3GiB"])
def test_a_size_that_is_none_is_refused_with_an_example(
    size: str, splat: Splat, tiny_scene: Path, tmp_path: Path
) -> None:
    done = splat("train", tiny_scene, "-o", tmp_path / "run", f"--vram-budget={size}")
    assert done.code == 2
    assert "8GiB" in done.err
    assert not (tmp_path / "run").exists()


def large_scene(root: Path) -> Path:
    """Three dark photos of 1600x1063 pixels around the origin."""
    (root / "images").mkdir(parents=True)
    frames = []
    for index in range(3):
        name = f"images/{index}.png"
        imageio.imwrite(root / name, np.zeros((1063, 1600, 3), np.uint8), compress_level=1)
        frames.append({"file_path": name, "transform_matrix": look_at_origin(2.0 * index).tolist()})
    lens = {"fl_x": 1400.0, "fl_y": 1400.0, "cx": 800.0, "cy": 531.5, "w": 1600, "h": 1063}
    (root / "transforms.json").write_text(json.dumps({**lens, "frames": frames}))
    return root


#: The address space is bounded, so that whatever large is asked for fails instead of being used a little.
_CHILD = """
import contextlib, io, json, resource, sys, torch
# a GiB beyond what torch occupies, which differs from build to build
limit = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + (1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
from splatcli.cli.commands import run
with contextlib.redirect_stderr(io.StringIO()) as said:
    code = run(sys.argv[1:])
# what getrusage tells counts the process that started this one
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([code, said.getvalue(), peak]))
"""


@NEEDS_COMPILER
def test_a_model_activated_twice_that_is_called_raw_is_refused_before_its_pairs_take_memory(tmp_path: Path) -> None:
    """The wrong word for the case that this project began with: 40,000 Gaussians that almost fill the image each."""
    model = write("inria", activated(tables_of(40_000, 0), scales=1, quats=1), tmp_path)
    scene = large_scene(tmp_path / "scene")
    words = ["train", scene, "--init", model, "--param-space", "raw", "--test-every", "0", "-o", tmp_path / "run"]
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, *map(str, words)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    code, said, peak = json.loads(done.stdout)
    assert code == 4, said
    found = re.search(
        r"([\d,]+) visible Gaussians would cover ([\d,]+) tiles .* of the 1600x1063 image: ([\d.]+) GiB wanted", said
    )
    assert found is not None, said
    visible, tiles, wanted = (float(text.replace(",", "")) for text in found.groups())
    assert 38_000 < visible <= 40_000
    assert 6_000 * visible < tiles <= 6_700 * visible
    assert 15 < wanted < 25
    assert "the largest: #" in said
    assert "already activated ones look like this" in said
    assert "Traceback" not in said
    assert peak < 1000 << 10  # kilobytes, most of which is torch itself
