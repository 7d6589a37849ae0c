"""Runs on large images, which begin with half their sides, from the command line: ``schedule.num_downscales``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from splatcli.checkpoint.file import load_checkpoint
from splatcli.gaussians import GROUPS
from tests.cli.tiny import HEIGHT, QUICK, WIDTH, write_scene
from tests.running import Splat

#: 40x30 pixels become 740x555: 410,700 pixels.
TIMES = 18.5


@pytest.fixture(scope="module")
def large_scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ball in images of over 400,000 pixels."""
    root = write_scene(tmp_path_factory.mktemp("large") / "ball")
    for path in (root / "images").iterdir():
        Image.open(path).resize((round(TIMES * WIDTH), round(TIMES * HEIGHT))).save(path)
    transforms = json.loads((root / "transforms.json").read_text())
    lens = {name: TIMES * transforms[name] for name in ("fl_x", "fl_y", "cx", "cy")}
    lens |= {name: round(TIMES * transforms[name]) for name in ("w", "h")}
    (root / "transforms.json").write_text(json.dumps({**transforms, **lens}))
    return root


def test_a_run_on_large_images_begins_small_and_resumes_with_the_same_bits(
    splat: Splat, large_scene: Path, tmp_path: Path
) -> None:
    words = ("train", large_scene, "-n", 10, "-q", *QUICK)
    whole = splat(*words, "-o", tmp_path / "whole")
    parts = splat(*words, "-o", tmp_path / "parts", "--stop-at", 2)
    full = splat(*words, "-o", tmp_path / "full", "--set", "schedule.num_downscales=0")
    small = splat(*words, "-o", tmp_path / "small", "-r", 2)
    again = splat(*words, "-o", tmp_path / "again", "--init", whole.lines[0])
    for run in (whole, parts, full, small, again):
        assert run.code == 0, run.err
    resumed = splat("resume", tmp_path / "parts", "-q")
    assert resumed.code == 0, resumed.err
    ends = [load_checkpoint(Path(run.lines[0])) for run in (whole, resumed, full, small, again)]
    assert [end.config.schedule.num_downscales for end in ends] == [1, 1, 0, 0, 0]
    assert {end.config.schedule.resolution_schedule for end in ends} == {3}
    assert {end.step for end in ends} == {10}
    for name in GROUPS:
        assert torch.equal(getattr(ends[0].gaussians, name), getattr(ends[1].gaussians, name)), name
    assert not torch.equal(ends[0].gaussians.means[:5], ends[2].gaussians.means[:5])
