"""The memory of scoring a view, against what plans count on: a whole process, its peak of resident memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from splatcli.train.memory_plan import _SCORE_PIXEL
from tests.native.cases import NEEDS_COMPILER

ROOT = Path(__file__).resolve().parents[2]

#: Scores two views, a small one first, and prints the bytes a pixel that the second took.
SCORE = """
import sys, types
from pathlib import Path
import numpy as np, torch
from splatcli.rasterizer import render
from splatcli.train.evaluate import score_view
from tests.rasterizer.scenes import random_camera, random_gaussians

torch.set_num_threads(1)

def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))

def taken(width, height, masked):
    gaussians, camera = random_gaussians(1, 100, dtype=torch.float32), random_camera(1, width, height)
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
    photo = types.SimpleNamespace(pixels=pixels, masked=random.random((height, width)) < 0.3 if masked else None)
    scene = types.SimpleNamespace(images=types.SimpleNamespace(image=lambda index: photo))
    held = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    score_view(render(gaussians, camera, sh_degree=0, background=torch.zeros(3)).image, scene, 0)
    return (memory("VmHWM") - held) / (width * height)

masked = sys.argv[1] == "masked"
taken(120, 80, masked)
print(taken(2000, 1500, masked))
"""


@NEEDS_COMPILER
@pytest.mark.parametrize("mask", ["masked", "whole"])
def test_scoring_a_view_takes_what_plans_count_on(mask: str) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of resident memory cannot be reset here")
    done = subprocess.run([sys.executable, "-c", SCORE, mask], check=True, capture_output=True, text=True, cwd=ROOT)
    assert 1.0 <= _SCORE_PIXEL / float(done.stdout) <= 1.6
