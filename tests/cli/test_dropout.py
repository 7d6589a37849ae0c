"""``train.dropout`` from the command line: it changes a run, and a resumed run leaves out the same Gaussians."""

from __future__ import annotations

from pathlib import Path

import torch

from splatcli.checkpoint.file import load_checkpoint
from splatcli.gaussians import GROUPS
from tests.cli.conftest import Splat
from tests.cli.tiny import QUICK


def test_whole_runs_resume_with_the_same_gaussians_left_out(splat: Splat, tiny_scene: Path, tmp_path: Path) -> None:
    words = ("train", tiny_scene, "-n", 40, "-q", *QUICK)
    dropout = ("--set", "train.dropout=0.3")
    whole = splat(*words, *dropout, "-o", tmp_path / "whole")
    parts = splat(*words, *dropout, "-o", tmp_path / "parts", "--stop-at", 17)
    assert (whole.code, parts.code) == (0, 0), whole.err + parts.err
    resumed = splat("resume", tmp_path / "parts", "-q")
    one, two = load_checkpoint(Path(whole.lines[0])), load_checkpoint(Path(resumed.lines[0]))
    assert one.step == two.step == 40
    for name in GROUPS:
        assert torch.equal(getattr(one.gaussians, name), getattr(two.gaussians, name)), name
    plain = splat(*words, "-o", tmp_path / "plain")
    without = load_checkpoint(Path(plain.lines[0]))
    assert not torch.equal(without.gaussians.means[:5], one.gaussians.means[:5])
    assert splat(*words, "--set", "train.dropout=1", "-o", tmp_path / "all").code == 2
