"""Training in blocks from the command line: in one go, as jobs of an array, and what is not merged."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from splatcli.checkpoint.file import load_checkpoint
from splatcli.config import DataConfig
from splatcli.gaussians import GROUPS
from splatcli.scene.partition import make_grid
from splatcli.scene.read import read_scene
from splatcli.train.merge import own_rows
from tests.cli.tiny import add_points
from tests.forked import splat_command
from tests.formats.made import read_ply
from tests.native.cases import NEEDS_COMPILER
from tests.running import Splat

#: So few and so large Gaussians would all be pruned by the rules for real scenes.
QUICK = (
    *("--set", "schedule.sh_degree_interval=5", "--filter-3d"),
    *("--set", "strategy.prune_scale3d=100", "--set", "strategy.prune_opacity=0.0001"),
)
#: Every view of the ball shows all of it, so that blocks of it save nothing.
ANYWAY = ("--set", "data.block_share=1")
STEPS = 20

pytestmark = NEEDS_COMPILER


@pytest.fixture(scope="module")
def ball(tiny_scene: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny scene with 400 points on its ball."""
    root = tmp_path_factory.mktemp("blocks") / "ball"
    shutil.copytree(tiny_scene, root)
    return add_points(root)


@pytest.fixture(scope="module")
def merged_run(ball: Path, tmp_path_factory: pytest.TempPathFactory, splat_once: Splat) -> Path:
    place = tmp_path_factory.mktemp("merged") / "run"
    done = splat_once("train", ball, "--blocks", "2x1", "-n", STEPS, "-o", place, *QUICK, *ANYWAY)
    assert done.code == 0, done.err
    assert done.out.splitlines() == [str(place / f"ckpts/ckpt_{STEPS:06d}.pt")], "one path, that of the merged model"
    return place


def own(place: Path, ball: Path) -> list[int]:
    """How many Gaussians of each block lie in its column."""
    grid = make_grid(read_scene(ball, DataConfig()), (2, 1))
    counts = []
    for block in range(2):
        means = load_checkpoint(place / f"blocks/{block:03d}/ckpts/ckpt_{STEPS:06d}.pt").gaussians.means.numpy()
        counts.append(int((grid.block_of(means) == block).sum()))
    return counts


def test_blocks_are_trained_and_merged_into_one_run(merged_run: Path, ball: Path, splat: Splat, tmp_path: Path) -> None:
    merged = load_checkpoint(merged_run / f"ckpts/ckpt_{STEPS:06d}.pt")
    counts = own(merged_run, ball)
    assert len(merged.gaussians) == sum(counts)
    assert min(counts) > 50
    grid = make_grid(read_scene(ball, DataConfig()), (2, 1))
    where = grid.block_of(merged.gaussians.means.numpy())
    assert where.tolist() == [0] * counts[0] + [1] * counts[1], "each Gaussian lies in the column that it is from"
    parts = [load_checkpoint(merged_run / f"blocks/{block:03d}/ckpts/ckpt_{STEPS:06d}.pt") for block in range(2)]
    rows = [own_rows(part, grid, block) for block, part in enumerate(parts)]
    assert merged.columns.present().keys() == {"filter_3d", "sh_change"}
    for name, column in merged.columns.present().items():
        assert torch.equal(
            column, torch.cat([part.columns.present()[name][its] for part, its in zip(parts, rows, strict=True)])
        )
    assert (merged.config.data.blocks, merged.config.data.block) == (None, None)
    assert len(merged.train) == 8, "the merged run has all training views"
    for command in (["eval"], ["render", "--views", "-o", tmp_path / "views"], ["export", "-o", tmp_path / "x.ply"]):
        done = splat(command[0], merged_run, *command[1:])
        assert done.code == 0, done.err
    assert splat("resume", merged_run, "--iterations", STEPS + 5).code == 0
    again = splat("merge", merged_run)
    last = merged_run / f"ckpts/ckpt_{STEPS + 5:06d}.pt"
    assert (again.code, f"{last}: this later checkpoint was there before" in again.err) == (0, True)
    assert (merged_run / "latest").read_text() == f"ckpts/{last.name}\n", "the newest, as docs/checkpoint.md says"
    assert load_checkpoint(merged_run / f"ckpts/ckpt_{STEPS + 5:06d}.pt").step == STEPS + 5


def test_each_block_is_planned(ball: Path, splat: Splat, tmp_path: Path) -> None:
    place = tmp_path / "city"
    words = ["train", ball, "--blocks", "2x1", "-n", 4, "--device", "cpu", "-o", place, *QUICK, *ANYWAY]
    done = splat(*words, "--dry-run")
    assert done.code == 0, done.err
    assert done.lines[:2] == [f"reads  {ball}", f"makes  {place}: 2 blocks"]
    for number in (0, 1):
        assert done.lines[2 + number].startswith(f"block {number}  8 training views and 2 held out; 4 steps from ")
        assert "; memory: about " in done.lines[2 + number]
    assert done.lines[4].startswith("takes  about ")
    assert not place.exists()
    assert splat(*words, "--block", 1, "--stop-at", 2, "-q").code == 0
    before = sorted(place.rglob("*"))
    (facts,) = splat(*words, "--dry-run", "--json", "-q").objects[-1:]
    assert [plan["block"] for plan in facts["blocks"]] == [0, 1]
    assert facts["blocks"][1]["continues"].endswith("ckpt_000002.pt")
    assert facts["seconds"] == pytest.approx(facts["blocks"][0]["seconds"])
    assert sorted(place.rglob("*")) == before


def test_jobs_of_an_array_come_to_the_same_bits(merged_run: Path, ball: Path, splat: Splat, tmp_path: Path) -> None:
    place = tmp_path / "jobs"
    job = ("train", ball, "--blocks", "2x1", "-n", STEPS, "-o", place, *QUICK, *ANYWAY)
    early = splat("merge", place)
    assert early.code == 5, "there is nothing yet"
    assert splat(*job, "--block", 1).code == 0
    missing = splat("merge", place)
    assert missing.code == 5
    assert "block 0 is not trained" in missing.err
    assert splat(*job, "--block", 0, "--stop-at", 7).code == 0
    unfinished = splat("merge", place)
    assert unfinished.code == 5
    assert f"at step 7 of {STEPS}" in unfinished.err
    assert splat(*job, "--block", 0).code == 0, "a job that is started again goes on"
    again = splat(*job, "--block", 0)
    assert again.code == 0, "and has nothing to do when it is done"
    assert "is finished" in again.err
    for flags, words in ((("-n", STEPS + 5), "train.iterations was 20, is now 25"), (("-r", 2), "data.resolution")):
        other = splat(*job, "--block", 0, *flags)
        assert other.code == 8, "a block of other settings is not taken for the one that is asked for"
        assert words in other.err
        assert "or choose another -o" in other.err
    moved = ball.rename(tmp_path / "moved")
    gone = splat("merge", place)
    done = splat("merge", place, "--data", moved)
    moved.rename(ball)
    assert (gone.code, "--data DIR" in gone.err) == (3, True)
    assert done.code == 0, done.err
    one, other = (load_checkpoint(run / f"ckpts/ckpt_{STEPS:06d}.pt") for run in (place, merged_run))
    assert one.moments is not None
    assert other.moments is not None
    for name in GROUPS:
        assert getattr(one.gaussians, name).equal(getattr(other.gaussians, name))
        assert all(a.equal(b) for a, b in zip(one.moments[name], other.moments[name], strict=True))
    target = tmp_path / "new" / "streamed.ply"
    streamed = splat("merge", place, "-o", target, "--json")
    assert streamed.objects[-1]["num_gaussians"] == len(one.gaussians)
    assert splat("export", place, "-o", tmp_path / "whole.ply").code == 0
    assert read_ply(target).means.equal(read_ply(tmp_path / "whole.ply").means)
    assert target.read_bytes() == (tmp_path / "whole.ply").read_bytes()


def test_blocks_that_were_trained_otherwise_are_not_merged(ball: Path, splat: Splat, tmp_path: Path) -> None:
    for block, steps in ((0, 4), (1, 5)):
        flags = ("--blocks", "1x2", "--block", block, "-n", steps, "-o", tmp_path / "run")
        assert splat("train", ball, *flags, *QUICK, *ANYWAY).code == 0
    done = splat("merge", tmp_path / "run")
    assert done.code == 5
    assert "steps is 5, not 4" in done.err


def test_blocks_with_other_dropout_are_merged_as_they_look(ball: Path, splat: Splat, tmp_path: Path) -> None:
    place, rates = tmp_path / "run", (0.4, 0.1)
    for block, rate in enumerate(rates):
        flags = ("--blocks", "2x1", "--block", block, "-n", STEPS, "-o", place, "--set", f"train.dropout={rate}")
        flags += ("--set", f"optim.means_size_power={block / 2}")  # which follows from the views of a block, too
        assert splat("train", ball, *flags, *QUICK, *ANYWAY).code == 0
    target, whole = tmp_path / "streamed.ply", tmp_path / "whole.ply"
    for words in (("merge", place, "-o", target), ("merge", place), ("export", place, "-o", whole)):
        done = splat(*words)
        assert done.code == 0, done.err
    merged = load_checkpoint(place / f"ckpts/ckpt_{STEPS:06d}.pt")
    assert merged.config.train.dropout == min(rates)
    torch.testing.assert_close(read_ply(target).logit_opacities, read_ply(whole).logit_opacities)


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--blocks", "2"), 2, "e.g. --blocks 2x3"),
        (("--blocks", "30x30", "-o", "RUN"), 3, "too few"),
        (("--block", "0"), 2, "of how many blocks"),
        (("--blocks", "2x1", "--block", "0"), 2, "name it with -o"),
        (("--blocks", "2x1", "--block", "2", "-o", "RUN"), 2, "0 to 1"),
        (("--blocks", "2x1", "-o", "RUN", "--overwrite"), 2, "--overwrite"),
        (("--blocks", "2x1", "-o", "RUN", "--max-time", "60s"), 2, "--iterations"),
        (("--blocks", "2x1", "-o", "RUN", "--pose-opt"), 2, "--pose-opt"),
    ],
)
def test_what_does_not_go_with_blocks_is_refused(
    ball: Path, splat: Splat, tmp_path: Path, flags: tuple[str, ...], code: int, words: str
) -> None:
    done = splat("train", ball, *(str(tmp_path / "run") if flag == "RUN" else flag for flag in flags))
    assert done.code == code, done.err
    assert words in done.err


def test_a_folder_is_for_one_cut_of_one_scene(merged_run: Path, ball: Path, splat: Splat, tmp_path: Path) -> None:
    done = splat("train", ball, "--blocks", "1x2", "-o", merged_run, *ANYWAY)
    assert done.code == 8
    assert "belongs to blocks 2x1" in done.err
    (tmp_path / "full").mkdir()
    (tmp_path / "full/photo.jpg").write_text("mine")
    done = splat("train", ball, "--blocks", "1x2", "-o", tmp_path / "full", *ANYWAY)
    assert done.code == 8
    assert sorted(path.name for path in (tmp_path / "full").iterdir()) == ["photo.jpg"]
    link = tmp_path / "link"
    link.symlink_to(ball)
    done = splat("train", link, "--blocks", "2x1", "-n", STEPS, "-o", merged_run, *QUICK, *ANYWAY)
    assert done.code == 0, f"the same scene by another path: {done.err}"


def test_blocks_go_on_where_their_scene_has_moved(merged_run: Path, ball: Path, splat: Splat, tmp_path: Path) -> None:
    before, after, place = tmp_path / "before", tmp_path / "after", tmp_path / "run"
    shutil.copytree(ball, before)
    words = ("--blocks", "2x1", "-n", STEPS, "-o", place, *QUICK, *ANYWAY)
    assert splat("train", before, *words, "--block", 1).code == 0
    assert splat("train", before, *words, "--block", 0, "--stop-at", 7).code == 0
    before.rename(after)
    assert splat("train", after, *words, "--block", 0, "--dry-run").lines[-1].endswith("ckpt_000007.pt")
    done = splat("train", after, *words, "--block", 0, "--stop-at", 9)
    assert (done.code, done.lines) == (0, [str(place / "blocks/000/ckpts/ckpt_000009.pt")]), done.err
    done = splat("train", after, *words)
    assert (done.code, done.lines) == (0, [str(place / f"ckpts/ckpt_{STEPS:06d}.pt")]), done.err
    merged, expected = (load_checkpoint(run / f"ckpts/ckpt_{STEPS:06d}.pt") for run in (place, merged_run))
    assert merged.dataset.root == str(after)
    for name in GROUPS:
        assert getattr(merged.gaussians, name).equal(getattr(expected.gaussians, name))
    streamed = splat("merge", place, "-o", tmp_path / "streamed.ply")
    assert streamed.code == 0, f"the record names the scene's new place: {streamed.err}"


def test_blocks_whose_points_have_moved_are_merged(ball: Path, splat: Splat, tmp_path: Path) -> None:
    points, place = tmp_path / "points.ply", tmp_path / "run"
    shutil.copy(ball / "points.ply", points)
    words = ("--blocks", "2x1", "-n", 4, "-o", place, *QUICK, *ANYWAY, "--points")
    assert splat("train", ball, *words, points, "--block", 0).code == 0
    assert splat("train", ball, *words, points, "--block", 1, "--stop-at", 2).code == 0
    elsewhere = points.rename(tmp_path / "elsewhere.ply")
    gone = splat("merge", place)
    assert (gone.code, f"--blocks 2x1 --points PATH -o {place}" in gone.err) == (3, True), gone.err
    done = splat("train", ball, *words, elsewhere)
    assert (done.code, done.lines) == (0, [str(place / "ckpts/ckpt_000004.pt")]), done.err


def test_a_scene_that_has_changed_since_its_blocks_began_is_refused(ball: Path, splat: Splat, tmp_path: Path) -> None:
    scene, place = tmp_path / "scene", tmp_path / "run"
    shutil.copytree(ball, scene)
    words = ("--blocks", "2x1", "-n", 4, "-o", place, *QUICK, *ANYWAY)
    assert splat("train", scene, *words, "--block", 0).code == 0
    photo, points = (scene / "images/view_03.png").read_bytes(), (scene / "points.ply").read_text()
    (scene / "images/view_03.png").write_bytes((scene / "images/view_04.png").read_bytes())
    done = splat("train", scene, *words, "--block", 1)
    assert (done.code, "the digest of the photos was" in done.err) == (3, True), done.err
    (scene / "images/view_03.png").write_bytes(photo)
    head, rows = points.split("end_header\n")
    shifted = "".join(f"{float(x) + 0.2} {rest}\n" for x, rest in (row.split(" ", 1) for row in rows.splitlines()))
    (scene / "points.ply").write_text(f"{head}end_header\n{shifted}")
    for flags in (("--block", 1), ("--block", 1, "--dry-run")):
        done = splat("train", scene, *words, *flags)
        assert (done.code, "its points cut it in other places" in done.err) == (3, True), done.err
    other = splat("train", scene.rename(tmp_path / "other"), *words, "--block", 1)
    assert (other.code, "belongs to blocks 2x1 of" in other.err) == (8, True), "a folder that is none of its own"
    (tmp_path / "other").rename(scene)
    (scene / "points.ply").write_text(points)
    assert splat("train", scene, *words, "--block", 1).code == 0
    (scene / "points.ply").write_text(f"{head}end_header\n{shifted}")
    assert splat("merge", place).code == 3
    (scene / "points.ply").write_text(points)
    (scene / "images/extra.png").write_bytes(photo)
    transforms = json.loads((scene / "transforms.json").read_text())
    frame = {**transforms["frames"][0], "file_path": "images/extra.png"}
    (scene / "transforms.json").write_text(json.dumps({**transforms, "frames": [frame, *transforms["frames"]]}))
    done = splat("merge", place)
    assert (done.code, "the number of photos was 10, is 11" in done.err) == (3, True), done.err
    assert not (place / "ckpts").exists()


def test_jobs_that_begin_at_once_share_their_folder(ball: Path, splat: Splat, tmp_path: Path) -> None:
    """Another job has made the folder, and its record is not in place yet; then one in place that is cut off."""
    place = tmp_path / "jobs"
    place.mkdir()
    (place / "blocks.json.tmp.1.0123abcd").write_text("{")
    job = ("train", ball, "--blocks", "2x1", "--block", 0, "-n", 2, "-o", place, *QUICK, *ANYWAY)
    done = splat(*job)
    assert done.code == 0, done.err
    record = (place / "blocks.json").read_text()
    (place / "blocks.json").write_text(record[:9])
    damaged = splat("merge", place)
    assert (damaged.code, "splat train --blocks again" in damaged.err) == (5, True)
    checked = splat("check", place, "--json")
    states = {one["path"]: one["state"] for one in checked.objects if one["event"] == "checked"}
    assert (checked.code, states[str(place / "blocks.json")]) == (5, "damaged")
    done = splat(*job)
    assert done.code == 0, done.err
    assert (place / "blocks.json").read_text() == record
    assert any("blocks.json" in line and line.startswith("sound") for line in splat("check", place).lines)


def test_blocks_that_are_not_merged_are_the_result(ball: Path, splat: Splat, tmp_path: Path) -> None:
    words = ("train", ball, "--blocks", "2x1", "-n", 4, "-o", tmp_path / "run", *QUICK, *ANYWAY)
    done = splat(*words, "--stop-at", 2)
    paths = [str(tmp_path / f"run/blocks/{block:03d}/ckpts/ckpt_000002.pt") for block in range(2)]
    assert (done.code, done.out.splitlines()) == (0, paths)
    done = splat(*words, "--stop-at", 3, "--json")
    last = done.objects[-1]
    assert (last["event"], last["path"], last["step"]) == ("result", paths[1].replace("2.pt", "3.pt"), 3)


def test_a_signal_stops_blocks_and_names_the_state(ball: Path, tmp_path: Path) -> None:
    words = ("--blocks", "2x1", "-n", "100000", "-o", str(tmp_path / "run"), *QUICK, *ANYWAY)
    command = [*splat_command(), "train", str(ball), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "saved" in line:
                process.send_signal(signal.SIGTERM)
                break
        out, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    (path,) = out.splitlines()
    assert Path(path).parent == tmp_path / "run/blocks/000/ckpts"
    assert Path(path).exists()


COURTYARD = Path(__file__).resolve().parents[2] / "data/samples/courtyard"


def test_a_note_says_that_blocks_round_an_object_save_no_time(splat: Splat, ball: Path, tmp_path: Path) -> None:
    words = ("--blocks", "2x1", "--dry-run", "-o", tmp_path / "run")
    done = splat("train", ball, *words, *ANYWAY)
    assert done.code == 0, done.err
    assert "nearly all views show each block" in done.err
    assert "the time of 2.0 runs" in done.err


def test_blocks_that_save_nothing_are_refused_before_anything_is_trained(splat: Splat, tmp_path: Path) -> None:
    """Every view of the sample scene shows half of it or more."""
    done = splat("train", COURTYARD, "-r", 8, "--blocks", "2x1", "-o", tmp_path / "run", "--json")
    assert done.code == 2
    assert "blocks save next to nothing here" in done.err
    assert "--set data.block_share=1" in done.err
    held = [event for event in done.objects if event["event"] == "block-contents"]
    assert [event["block"] for event in held] == [0, 1]
    assert all(event["train_views"] == event["of"] == 43 for event in held)
    assert not (tmp_path / "run").exists()


def test_the_contents_of_blocks_are_reported_first(ball: Path, splat: Splat, tmp_path: Path) -> None:
    flags = ("--blocks", "2x1", "--block", 1, "-n", 2, *QUICK, *ANYWAY)
    done = splat("train", ball, *flags, "-o", tmp_path / "run")
    assert done.code == 0, done.err
    said = [line for line in done.err.splitlines() if line.startswith("block ")]
    assert said[0].startswith("block 0: 8 of 8 training views, ")
    assert said[1].startswith("block 1: 8 of 8 training views, ")
