"""``train.random_background_start`` from the command line: dark surfaces become opaque, and runs resume alike."""

from __future__ import annotations

from pathlib import Path

import imageio.v3 as imageio
import numpy as np
import pytest
import torch

from splatcli.checkpoint.file import load_checkpoint
from splatcli.gaussians import GROUPS
from tests.cli.tiny import QUICK, add_points, write_scene
from tests.running import Splat

START = ("--set", "train.random_background_start=0.4")


@pytest.fixture
def dark_scene(tmp_path: Path) -> Path:
    """The ball, almost black, in photos without transparency."""
    scene = add_points(write_scene(tmp_path / "scene"))
    for path in sorted((scene / "images").glob("*.png")):
        pixels = imageio.imread(path)[..., :3]
        imageio.imwrite(path, (pixels // 40).astype(np.uint8))
    return scene


def alpha_of(splat: Splat, run: Path, out: Path) -> float:
    assert splat("render", run, "--views", "all", "--what", "alpha", "-o", out, "-q").code == 0
    return float(np.mean([imageio.imread(path) for path in sorted(out.rglob("*.png"))])) / 255


def test_dark_surfaces_become_opaque(splat: Splat, dark_scene: Path, tmp_path: Path) -> None:
    words = ("train", dark_scene, "-n", 200, "-q", *QUICK)
    for name, more in (("plain", ()), ("random", START)):
        ran = splat(*words, *more, "-o", tmp_path / name)
        assert ran.code == 0, ran.err
    plain, random = (alpha_of(splat, tmp_path / name, tmp_path / f"{name}-alpha") for name in ("plain", "random"))
    assert random > plain + 0.2


def test_a_resumed_run_draws_the_same_colours(splat: Splat, tiny_scene: Path, tmp_path: Path) -> None:
    words = ("train", tiny_scene, "-n", 40, "-q", *QUICK, *START)
    whole = splat(*words, "-o", tmp_path / "whole")
    parts = splat(*words, "-o", tmp_path / "parts", "--stop-at", 25)
    assert (whole.code, parts.code) == (0, 0), whole.err + parts.err
    resumed = splat("resume", tmp_path / "parts", "-q")
    one, two = load_checkpoint(Path(whole.lines[0])), load_checkpoint(Path(resumed.lines[0]))
    assert one.step == two.step == 40
    for name in GROUPS:
        assert torch.equal(getattr(one.gaussians, name), getattr(two.gaussians, name)), name


def test_a_white_background_is_refused(splat: Splat, tiny_scene: Path, tmp_path: Path) -> None:
    ran = splat("train", tiny_scene, "--white-background", *START, "-o", tmp_path / "run")
    assert ran.code == 2
    assert "takes a black background" in " ".join(ran.err.split())
