"""What follows from how far apart views are, from the command line: ``train.dropout``, ``optim.means_size_power``."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from splatcli.checkpoint.file import load_checkpoint
from splatcli.gaussians import GROUPS
from tests.cli.tiny import QUICK, add_points, write_scene
from tests.formats.made import read_ply
from tests.running import Splat

COURTYARD = Path(__file__).resolve().parents[2] / "data/samples/courtyard"


def test_whole_runs_resume_with_the_same_gaussians_left_out(splat: Splat, tiny_scene: Path, tmp_path: Path) -> None:
    words = ("train", tiny_scene, "-n", 40, "-q", *QUICK)
    dropout = ("--set", "train.dropout=0.3", "--set", "optim.means_size_power=0.5")
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
    for run, checkpoint, kept in ((tmp_path / "whole", one, 0.7), (tmp_path / "plain", without, 1.0)):
        assert splat("export", run, "-o", tmp_path / "shown.ply", "-q").code == 0
        shown, trained = (g.logit_opacities.sigmoid() for g in (read_ply(tmp_path / "shown.ply"), checkpoint.gaussians))
        torch.testing.assert_close(shown, kept * trained, rtol=1e-5, atol=0)


def test_views_far_apart_have_dropout_by_default(splat: Splat, tmp_path: Path) -> None:
    scene = add_points(write_scene(tmp_path / "scene"))  # eight of ten views around a ball
    ran = splat("train", scene, "-n", 3, *QUICK, "-o", tmp_path / "run")
    assert ran.code == 0, ran.err
    assert "43 degrees apart: steps leave out up to 20 % of the Gaussians" in " ".join(ran.err.split())
    checkpoint = load_checkpoint(Path(ran.lines[0]))
    assert (checkpoint.config.train.dropout, checkpoint.config.optim.means_size_power) == (0.2, 0.0)
    without = splat("train", scene, "-n", 3, *QUICK, "--set", "train.dropout=0", "-o", tmp_path / "without")
    assert (without.code, "degrees apart" in without.err) == (0, False)
    assert load_checkpoint(Path(without.lines[0])).config.train.dropout == 0.0


def test_large_gaussians_move_faster_by_default_where_views_are_close(splat: Splat, tmp_path: Path) -> None:
    runs = {}
    for name, more in {"default": (), "same": ("0.5",), "none": ("0",)}.items():
        power = [f"optim.means_size_power={value}" for value in more]
        words = ("train", COURTYARD, "-r", 8, "-n", 12, "-q", "-o", tmp_path / name)
        ran = splat(*words, *(word for setting in power for word in ("--set", setting)))
        assert ran.code == 0, ran.err
        runs[name] = load_checkpoint(Path(ran.lines[0]))
    assert [run.config.optim.means_size_power for run in runs.values()] == [0.5, 0.5, 0.0]
    means = {name: run.gaussians.means for name, run in runs.items()}
    assert torch.equal(means["default"], means["same"])
    assert not torch.equal(means["default"], means["none"])
    ends = []
    for power in ("0", "0.5"):  # of a run without, which goes on with or without
        shutil.copytree(tmp_path / "none", tmp_path / f"none{power}")
        changed = ("-n", 20, "--set", f"optim.means_size_power={power}")
        resumed = splat("resume", tmp_path / f"none{power}", *changed, "-q")
        assert resumed.code == 0, resumed.err
        ends.append(load_checkpoint(Path(resumed.lines[0])).gaussians.means)
    assert not torch.equal(*ends)
