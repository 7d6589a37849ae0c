"""Fast pans: frames are chosen there, and where that does not suffice, more of them are taken around the gaps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import pytest
from PIL import Image, ImageFilter

from splatcli.cli.commands import run
from splatcli.scene._pycolmap import pycolmap
from splatcli.sfm import video
from splatcli.sfm.execution import Execution
from splatcli.sfm.images import find_input
from splatcli.sfm.job import Job, reconstruct
from splatcli.sfm.mapping import centers_of
from splatcli.sfm.options import SfmOptions
from splatcli.sfm.video import find_gaps, stretches_in
from splatcli.similarity import Similarity
from tests.native.cases import NEEDS_COMPILER
from tests.sfm import corner

#: The pose of each frame: slow, 60 degrees within six frames, slow. At equal times, of any three frames one is chosen.
POSES = (*np.repeat([-3, -2.5, -2], 3), -1.5, 0.5, 2.5, 4.5, 6.5, 8.5, *np.repeat([9, 9.5, 10], 3))
CHOSEN = 8
#: Frames that the pan blurs, so that their neighbours are chosen.
PAN = range(10, 14)


def write_video(path: Path, frames: list[Image.Image]) -> Path:
    pytest.importorskip("imageio_ffmpeg", reason="imageio-ffmpeg is not installed: pip install 'splatcli[video]'")
    stacked = np.stack([np.asarray(frame) for frame in frames])
    imageio.imwrite(path, stacked, plugin="FFMPEG", fps=10, codec="libx264", quality=10, macro_block_size=2)
    return path


def pictures(poses: tuple[float, ...]) -> dict[float, Image.Image]:
    return {pose: Image.fromarray(corner.image(pose)) for pose in set(poses)}


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = pictures(POSES)
    blur = ImageFilter.GaussianBlur(0.5)
    frames = [made[pose].filter(blur) if index in PAN else made[pose] for index, pose in enumerate(POSES)]
    return write_video(tmp_path_factory.mktemp("walk") / "walk.mp4", frames)


#: imageio's reader leaves the pipes of ffmpeg to the garbage collector.
pipes_stay_open = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def frames_in(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("frame_")) for path in (folder / "images").iterdir())


@pytest.fixture
def evenly(monkeypatch) -> None:
    """Frames are chosen at equal times, which leaves gaps in shorter videos than choice by motion does."""
    monkeypatch.setattr(video, "stretches", lambda way, most: [i * most // len(way) for i in range(len(way))])


def test_a_fast_pan_gives_enough_frames(walk: Path, tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["--frames", str(CHOSEN), "--max-features", "1000", "--camera-model", "SIMPLE_RADIAL"]
    assert run(["sfm", str(walk), *asked, "-o", "made", "--json"]) == 0
    facts = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (facts["registered"], facts["total"], facts["added_frames"]) == (CHOSEN, CHOSEN, None)
    assert sum(index in range(9, 15) for index in frames_in(Path("made"))) > 2  # equal times give 2


def test_frames_of_a_sudden_pan_join_what_they_lie_between(tmp_path: Path, monkeypatch, capfd) -> None:
    """55 degrees within ten frames count three times the middle speed at most, so that few of them are chosen."""
    monkeypatch.chdir(tmp_path)
    poses = (*np.linspace(-3, -1.5, 24), *np.arange(-0.5, 9), *np.linspace(9, 10.5, 24))
    made = pictures(poses)
    write_video(Path("walk.mp4"), [made[pose] for pose in poses])
    words = ["--frames", "6", "--camera-model", "SIMPLE_RADIAL"]
    assert run(["sfm", "walk.mp4", *words, "-o", "made", "--json"]) == 0
    said = capfd.readouterr()
    facts = json.loads(said.out.splitlines()[-1])
    assert facts["added_frames"] == {"gaps": 1, "frames": 3, "before": 4, "after": 6, "of": 6, "kept": 3}
    assert (facts["registered"], facts["total"], facts["other_models"], facts["retried"]) == (9, 9, [], None)
    assert "3 kept: 6 instead of 4 of the first 6 registered" in said.err
    indices = frames_in(Path("made"))
    assert sum(26 <= index < 38 for index in indices) == 3
    centers = centers_of(pycolmap.Reconstruction("made/sparse/0"))
    found = np.stack([centers[f"frame_{index:06d}.png"] for index in indices])
    matrices = [corner.pose(poses[index]) for index in indices]
    true = np.stack([-matrix[:3, :3].T @ matrix[:3, 3] for matrix in matrices])
    away = np.linalg.norm(Similarity.of_pairs(found, true)(found) - true, axis=1)
    assert away.max() < 0.02 * np.linalg.norm(true[0] - true[-1])


def stop(*_: object) -> None:
    raise KeyboardInterrupt


def reconstructed(source: Path, folder: Path, frames: int, max_features: int = 1000) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    options = SfmOptions(camera_model="SIMPLE_RADIAL", frames=frames, max_features=max_features)
    return reconstruct(find_input(source), options, folder, Execution())


@pipes_stay_open
@pytest.mark.usefixtures("evenly")
def test_gaps_of_several_videos_are_filled_from_their_own(tmp_path: Path) -> None:
    """The first video has the slow part and the pan, the second turns back over the end of it."""
    made, blur = pictures(POSES), ImageFilter.GaussianBlur(0.5)
    first = [made[pose].filter(blur) if index in PAN else made[pose] for index, pose in enumerate(POSES)]
    (tmp_path / "clips").mkdir()
    write_video(tmp_path / "clips" / "a.mp4", first)
    write_video(tmp_path / "clips" / "b.mp4", first[:-10:-1])
    facts = reconstructed(tmp_path / "clips", tmp_path / "scene", 11)
    assert [video["name"] for video in facts["videos"]] == ["a.mp4", "b.mp4"]
    assert facts["added_frames"]["frames"] > 0
    assert facts["registered"] == facts["total"]
    there = [path.relative_to(tmp_path / "scene/images") for path in (tmp_path / "scene/images").rglob("*.png")]
    in_first = [int(path.stem.removeprefix("frame_")) for path in there if path.parent.name == "a"]
    assert set(in_first) & set(PAN)
    assert sum(video["frames"] for video in facts["videos"]) == len(there) == facts["total"]


@NEEDS_COMPILER
@pipes_stay_open
def test_a_folder_of_videos_is_trained_on(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clips").mkdir()
    for name, poses in (("a.mp4", (0, 1, 2)), ("b.mov", (3, 4, 5))):
        made = pictures(poses)
        write_video(tmp_path / "clips" / name, [made[pose] for pose in poses])
    words = ["-n", "2", "--sh-degree", "0", "--device", "cpu", "-r", "2", "--json"]
    assert run(["train", "clips", "-o", "run", *words]) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["reason"] == "finished"
    assert sorted(path.name for path in Path("clips-sfm/images").iterdir()) == ["a", "b"]


@pipes_stay_open
@pytest.mark.usefixtures("evenly")
def test_a_job_that_was_stopped_among_added_frames_goes_on(walk: Path, tmp_path: Path, monkeypatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Job, "_write", stop)
        with pytest.raises(KeyboardInterrupt):
            reconstructed(walk, tmp_path / "scene", CHOSEN)
    added = frames_in(tmp_path / "scene")
    assert len(added) == CHOSEN + 3
    facts = reconstructed(walk, tmp_path / "scene", CHOSEN)
    assert (facts["added_frames"]["of"], facts["registered"], facts["total"]) == (CHOSEN, 11, 11)
    assert frames_in(tmp_path / "scene") == added
    chosen = json.loads((tmp_path / "scene/work/frames.json").read_text())
    assert len(chosen) == CHOSEN


@pipes_stay_open
@pytest.mark.usefixtures("evenly")
def test_frames_that_join_nothing_are_left_out(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(Job, "_retry", lambda _, mapped: mapped)  # it takes longer than all else
    made = pictures((-3, -2.5, -2, 9, 9.5, 10))
    grey = Image.new("RGB", (corner.WIDTH, corner.HEIGHT), (90, 90, 90))
    sides = [[made[pose] for pose in np.repeat(part, 3)] for part in ([-3, -2.5, -2], [9, 9.5, 10])]
    film = write_video(tmp_path / "cut.mp4", [*sides[0][:-1], grey, grey, *sides[1][1:]])
    facts = reconstructed(film, tmp_path / "scene", 6)
    assert facts["added_frames"] == {"gaps": 1, "frames": 3, "before": 3, "after": 3, "of": 6, "kept": 0}
    assert (facts["registered"], facts["total"], facts["other_models"]) == (3, 6, [3])
    assert len(frames_in(tmp_path / "scene")) == 6


def test_gaps_lie_between_neighbours_that_share_no_model() -> None:
    names = list("abcdef")
    assert find_gaps(names, [{"a", "b", "d"}, {"e", "f"}]) == [("b", "c"), ("c", "d"), ("d", "e")]
    assert find_gaps(names, [set(names)]) == []
    assert find_gaps(names[:3], []) == [("a", "b"), ("b", "c")]
    assert find_gaps(["x/a", "x/b", "y/a", "y/b"], []) == [("x/a", "x/b"), ("y/a", "y/b")]


def test_stretches_leave_out_what_was_chosen_and_are_as_many_as_asked() -> None:
    gap = ("frame_000010.png", "frame_000020.png")
    assert stretches_in([gap], 9) == {"": [range(11, 14), range(14, 17), range(17, 20)]}
    assert stretches_in([gap, ("frame_000020.png", "frame_000022.png")], 5) == {
        "": [range(11, 15), range(15, 20), range(21, 22)]
    }
    second = ("b/frame_000010.png", "b/frame_000012.png")
    assert stretches_in([gap, second], 4) == {"": [range(11, 15), range(15, 20)], "b": [range(11, 12)]}
    assert stretches_in([("frame_000003.png", "frame_000004.png")], 9) == {}
    assert stretches_in([], 9) == {}
