"""The comparison with other programs: its stand-ins, another program's log, a whole measurement, the documentation."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import peers
from splatcli.rasterizer.rendering import render
from tests.cli.tiny import QUICK, add_points, write_scene
from tests.forked import splat_command
from tests.native.cases import NEEDS_COMPILER, float32
from tests.rasterizer.scenes import random_camera, random_gaussians

ROOT = Path(__file__).resolve().parents[2]

#: Stands for OpenSplat: reads the scene for long, then burns a tenth of a second of CPU time for each step.
PROGRAM = """#!{python}
import sys, time
assert sys.argv[2:] == ["-n", "6", "--cpu", "-d", "2", "--num-downscales", "0", "-o", sys.argv[-1]], sys.argv
def burn(seconds):
    began = time.process_time()
    while time.process_time() - began < seconds: pass
burn(0.4)
print("Reading 10 points", flush=True)
for step in range({first}, 7):
    burn(0.1)
    print(f"Step {{step}}: 0.1234 (0%)", flush=True)
burn(0.4)
sys.exit({code})
"""


def program(folder: Path, first: int = 1, code: int = 0) -> Path:
    file = folder / f"opensplat_{first}_{code}"
    file.write_text(PROGRAM.format(python=sys.executable, first=first, code=code))
    file.chmod(0o755)
    return file


def test_transmittances_are_those_of_each_pixel() -> None:
    alphas, rays = torch.tensor([0.5, 0.25, 0.9, 0.1, 0.2]), torch.tensor([0, 0, 2, 2, 3])
    weights, light = peers.render_weight_from_alpha(alphas, rays, 5)
    torch.testing.assert_close(light, torch.tensor([1.0, 0.5, 1.0, 0.1, 1.0]))
    torch.testing.assert_close(weights, alphas * light)
    values = torch.arange(10.0).view(5, 2)
    sums = peers.accumulate_along_rays(weights, values, rays, 5)
    torch.testing.assert_close(sums[2], weights[2] * values[2] + weights[3] * values[3])
    assert sums[1].tolist() == sums[4].tolist() == [0, 0]
    torch.testing.assert_close(peers.accumulate_along_rays(weights, None, rays, 5)[0, 0], weights[0] + weights[1])


@NEEDS_COMPILER
def test_the_listed_pairs_are_all_that_make_the_image() -> None:
    camera, backend, gaussians = random_camera(4, 70, 50), float32(), random_gaussians(3, 60, dtype=torch.float32)
    which, pixels = peers.pairs_of(backend, gaussians, camera, 0)
    assert (pixels[1:] >= pixels[:-1]).all()
    rendered = render(gaussians, camera, sh_degree=0, backend=backend)
    assert sorted(set(pixels.tolist())) == (rendered.alpha.flatten() > 0).nonzero().flatten().tolist()
    assert len(which.unique()) > 10


def test_a_step_of_the_other_program_is_without_its_start_and_end(tmp_path: Path) -> None:
    measured = peers.opensplat_step(program(tmp_path), tmp_path, 6, 2.0)
    assert measured["steps"] == 5
    assert measured["step_ms"] > 0


def test_another_program_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"opensplat_1_3 .* ended with 3: Step 6: "):
        peers.opensplat_step(program(tmp_path, code=3), tmp_path, 6, 2.0)
    with pytest.raises(SystemExit, match="reported fewer than two steps: raise --opensplat-steps"):
        peers.opensplat_step(program(tmp_path, first=6), tmp_path, 6, 2.0)
    with pytest.raises(SystemExit, match=r"absent cannot be run: No such file or directory"):
        peers.opensplat_step(tmp_path / "absent", tmp_path, 6, 2.0)


def test_a_folder_without_gsplat_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"_torch_impl\.py does not exist: give the folder .* with --gsplat"):
        peers.load_gsplat(tmp_path)


@NEEDS_COMPILER
def test_a_measurement_has_each_program(tmp_path: Path) -> None:
    scene, run, out = add_points(write_scene(tmp_path / "ball")), tmp_path / "run", tmp_path / "peers.json"
    train = ["train", scene, "-r", "2", "-n", "20", "-o", run, "-q", *QUICK]
    subprocess.run([*splat_command(), *map(str, train)], check=True, capture_output=True)
    checkpoint = next(run.glob("ckpts/*20.pt"))
    words = ["-m", "benchmarks.peers", checkpoint, "--rounds", "1", "--out", out]
    words += ["--opensplat", program(tmp_path), "--opensplat-steps", "6"]
    done = subprocess.run(
        [*splat_command(), *map(str, words)],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    found = {entry["program"]: entry for entry in result["programs"]}
    wanted = {peers.OURS, peers.REFERENCE, peers.OURS_FROM_POINTS, peers.OPENSPLAT}
    if importlib.util.find_spec("gsplat"):
        wanted.add(peers.GSPLAT)
        assert found[peers.GSPLAT]["image_difference"] < peers.SAME_IMAGE
    assert found.keys() == wanted
    assert all(entry["step_ms"] > 0 for entry in found.values())
    assert found[peers.OURS_FROM_POINTS]["gaussians"] == 400
    assert result["size"] == "20x15"
    assert peers.sentence(result) in done.stdout


def test_the_documentation_has_the_stored_ratios() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "peers.json").read_text(encoding="utf-8"))
    text = " ".join((ROOT / "docs" / "cpu.md").read_text(encoding="utf-8").split())
    assert peers.sentence(result) in text
    assert f"{result['gaussians']:,} Gaussians" in text
    ratios = {entry["program"]: entry["ratio"] for entry in result["programs"]}
    assert f"{ratios[peers.GSPLAT]:.0f} times as long" in (ROOT / "README.md").read_text(encoding="utf-8")
