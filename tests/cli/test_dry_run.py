"""--dry-run: the plan of a command, and nothing written."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.cli.tiny import QUICK, VIEWS
from tests.native.cases import NEEDS_COMPILER
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
    assert done.lines[0] == f"reads  {tmp_path / 'photos'}: images or videos without cameras"
    assert done.lines[1].startswith(f"makes  {tmp_path / 'photos-sfm'}: their cameras, by splat sfm")
    assert everything(tmp_path) == before


@NEEDS_COMPILER
@pytest.mark.parametrize("mode", ["replicated", "sharded"])
def test_ranks_are_planned_without_starting_them(
    splat: Splat, tiny_scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("splatcli.distributed.launch.launch", lambda *_, **__: pytest.fail("a process was started"))
    words = ["train", tiny_scene, "--dry-run", "--device", "cpu", "-n", 9, *QUICK, "--distributed", mode]
    done = splat(*words, "--ranks", 3)
    assert done.code == 0, done.err
    _, _, needs, takes, *_ = done.lines
    part = ", with 1/3 of the Gaussians" if mode == "sharded" else ""
    assert needs.startswith(f"needs  memory in each of 3 processes{part}: about ")
    assert needs.endswith(" to all together")
    assert takes.endswith(" on cpu with one view a step; not measured with 3 by 3 processes")
    (facts,) = splat(*words, "--ranks", 3, "--batch-size", 6, "--json").objects
    assert (facts["ranks"], facts["batch_size"], facts["sharded"]) == (3, 6, mode == "sharded")
    assert facts["seconds"] is None
    assert facts["seconds_one_view"] > 0
    too_few = splat(*words, "--ranks", 3, "--batch-size", 2)
    assert (too_few.code, "3 ranks want as many views" in too_few.err) == (2, True)
    assert everything(tmp_path) == []


@NEEDS_COMPILER
def test_ranks_take_the_batch_size_of_a_file(splat: Splat, tiny_scene: Path, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("train.batch_size = 6\n")
    words = ["train", tiny_scene, "--dry-run", "--device", "cpu", "-n", 9, *QUICK, "--ranks", 3, "--json"]
    (facts,) = splat(*words, "--config", file).objects
    assert facts["batch_size"] == 6
    (facts,) = splat(*words, "--config", file, "--set", "train.batch_size=9").objects
    assert facts["batch_size"] == 9


@NEEDS_COMPILER
def test_a_shard_needs_less_than_the_whole(splat: Splat, tiny_scene: Path, tmp_path: Path) -> None:
    words = ["train", tiny_scene, "--dry-run", "--device", "cpu", "-n", "2k", "-o", tmp_path / "x", *QUICK, "--json"]
    words += ["--cap-max", "5M", "--ranks", 4]
    needs = {}
    for mode in ("replicated", "sharded"):
        (facts,) = splat(*words, "--distributed", mode).objects
        at_cap = re.search(r", ([0-9.]+) GiB at the cap of 5,000,000 Gaussians", facts["memory"])
        assert at_cap is not None, facts["memory"]
        needs[mode] = float(at_cap[1])
    assert needs["sharded"] < needs["replicated"]


@NEEDS_COMPILER
def test_offloading_is_planned_in_the_folder_above(splat: Splat, tiny_scene: Path, tmp_path: Path) -> None:
    words = ["train", tiny_scene, "--dry-run", "--device", "cpu", "-n", 9, "-o", tmp_path / "a" / "b", *QUICK]
    done = splat(*words, "--offload")
    assert done.code == 0, done.err
    assert any(line.startswith(f"note: offloaded in a file in {tmp_path}: ") for line in done.lines)
    assert any(line.endswith("without --offload, which makes steps longer") for line in done.lines)
    assert everything(tmp_path) == []


def test_what_cannot_be_planned_is_refused(splat: Splat, tiny_scene: Path) -> None:
    done = splat("train", tiny_scene, "--dry-run", "--distributed", "sharded", "--json")
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
