"""--dry-run: the plan of a command, and nothing written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.cli.tiny import QUICK, VIEWS
from tests.running import Splat


def everything(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


def test_train_prints_its_plan_and_writes_nothing(
    splat: Splat, tiny_scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = everything(tiny_scene)
    done = splat("train", tiny_scene, "--dry-run", "-n", "2k", "--cap-max", 900, *QUICK)
    assert done.code == 0, done.err
    reads, makes, needs, takes, *_ = done.lines
    views = f"{VIEWS - 2} training views and 2 held out, 40x30"
    assert reads == f"reads  {tiny_scene}: nerfstudio, {views}, 0 points"
    assert makes == "makes  output/ball: 2,000 steps from 200 Gaussians, at most 900"
    assert needs.startswith("needs  memory: about ")
    assert takes.startswith("takes  about ")
    assert everything(tmp_path) == []
    assert everything(tiny_scene) == before
    (facts,) = splat("train", tiny_scene, "--dry-run", "--json", "-n", 7, "-o", "there", *QUICK).objects
    assert (facts["makes"], facts["iterations"], facts["num_gaussians"]) == ("there", 7, 200)
    assert facts["seconds"] > 0
    assert everything(tmp_path) == []


def test_a_run_that_would_continue_says_so(splat: Splat, tiny_scene: Path, tmp_path: Path) -> None:
    words = ["train", tiny_scene, "-o", tmp_path / "run", "-n", 5, *QUICK]
    assert splat(*words, "--stop-at", 2, "-q").code == 0
    before = {path: os.stat(path).st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    done = splat(*words, "--dry-run")
    assert done.lines == [f"continues the run from {tmp_path / 'run' / 'ckpts' / 'ckpt_000002.pt'}"]
    assert {path: os.stat(path).st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_images_without_cameras_are_said_to_need_them(splat: Splat, tiny_scene: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for image in (tiny_scene / "images").iterdir():
        (tmp_path / "photos" / image.name).symlink_to(image)
    before = everything(tmp_path)
    done = splat("train", tmp_path / "photos", "--dry-run", "-o", tmp_path / "run")
    assert done.code == 0, done.err
    assert done.lines[0] == f"reads  {tmp_path / 'photos'}: images or a video without cameras"
    assert done.lines[1].startswith(f"makes  {tmp_path / 'photos-sfm'}: their cameras, by splat sfm")
    assert everything(tmp_path) == before


def test_what_cannot_be_planned_is_refused(splat: Splat, tiny_scene: Path) -> None:
    done = splat("train", tiny_scene, "--dry-run", "--blocks", "2x2", "--json")
    assert (done.code, done.objects[-1]["where"]) == (2, "--dry-run")


def test_export_prints_what_it_would_write(splat: Splat, finished_run: Path, tmp_path: Path) -> None:
    words = ["export", finished_run, "-o", tmp_path / "x.ply"]
    (facts,) = splat(*words, "--dry-run", "--json").objects
    assert everything(tmp_path) == []
    assert (facts["dry_run"], facts["replaces"]) == (True, False)
    written = json.loads(splat(*words, "--json").out)
    assert (facts["bytes"], facts["num_gaussians"]) == (written["bytes"], written["num_gaussians"])
    before = (tmp_path / "x.ply").stat().st_mtime_ns
    assert "which is there and is replaced" in splat(*words, "--dry-run").lines[1]
    assert (tmp_path / "x.ply").stat().st_mtime_ns == before
