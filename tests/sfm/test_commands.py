"""Images without cameras on the command line: splat sfm, train and info."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import get_args

import pytest

from splatcli.cli.commands import run
from splatcli.cli.sfm import _COUNTED
from splatcli.scene.read import has_images_only
from splatcli.sfm.execution import Phase
from splatcli.sfm.run import SfmResult
from tests.cli.tiny import QUICK
from tests.sfm.conftest import NUM_IMAGES, write_noise


def test_sfm_prints_the_folder_and_says_that_it_was_there(solved: SfmResult, images: Path, monkeypatch, capfd) -> None:
    (images.parent / "output").symlink_to(images.parent)
    monkeypatch.chdir(images.parent)
    assert run(["sfm", str(images)]) == 0
    said = capfd.readouterr()
    assert Path(said.out.strip()).samefile(solved.folder)
    assert "cameras found before are used" in said.err
    assert run(["sfm", str(images), "--json"]) == 0
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (result["registered"], result["reused"]) == (NUM_IMAGES, True)


def test_cameras_that_are_there_are_named_before_others_are_estimated(
    solved: SfmResult, images: Path, tmp_path: Path, monkeypatch, capfd
) -> None:
    monkeypatch.setattr("splatcli.sfm.run.run_sfm", lambda *_, **__: solved)
    scene = shutil.copytree(solved.folder, tmp_path / "my scene")
    (tmp_path / "nerf").mkdir()
    (tmp_path / "nerf" / "transforms.json").write_text("{}")
    shutil.copytree(images, tmp_path / "nerf" / "images")
    for folder, files in ((scene, "a COLMAP model in sparse/0/"), (tmp_path / "nerf", "transforms.json")):
        assert run(["sfm", str(folder)]) == 0
        said, name = capfd.readouterr().err, shlex.quote(str(folder))
        assert f"{folder} has cameras ({files}), and others are estimated here; splat train {name} takes those" in said
        assert f"splat sfm {name} --cameras {name} triangulates points with them" in said
    for plain in (images, scene / "images"):
        assert run(["sfm", str(plain)]) == 0
        assert "has cameras" not in capfd.readouterr().err


def test_the_folder_is_named_before_it_is_searched(images: Path, monkeypatch, capfd) -> None:
    said = []

    def interrupted(*_: object, **__: object) -> None:
        said.append(capfd.readouterr().err)
        raise KeyboardInterrupt

    for module in ("scene.read", "scene.find_images"):
        monkeypatch.setattr(f"splatcli.{module}.walk", interrupted)
    assert run(["sfm", str(images)]) == 130
    assert f"looking for images and videos in {images}" in said[0]


def test_cameras_of_an_earlier_version_are_used_with_a_note(
    solved: SfmResult, images: Path, tmp_path: Path, capfd
) -> None:
    """Their runs and edits have the frame of that model."""
    made = tmp_path / "a scene"
    shutil.copytree(solved.folder, made)
    for revision, says in ((solved.facts["revision"], False), (None, True)):
        facts = {key: value for key, value in solved.facts.items() if key != "revision"}
        facts |= {} if revision is None else {"revision": revision}
        (made / "sfm.json").write_text(json.dumps(facts))
        assert run(["sfm", str(images), "-o", str(made)]) == 0
        said = capfd.readouterr().err
        assert "cameras found before are used" in said
        assert (f"note: an earlier version found them; splat sfm {images} -o '{made}' --overwrite" in said) == says


def test_train_takes_images_without_cameras(solved: SfmResult, images: Path, capfd) -> None:
    place = images.parent / "run"
    words = ["train", str(images), "-o", str(place), "-n", "2", "-r", "4", "--device", "cpu", *QUICK]
    assert run(words) == 0
    said = capfd.readouterr()
    assert "photos has no cameras: splat sfm estimates them first" in said.err
    assert f"training on cpu: {NUM_IMAGES} views" in said.err
    assert json.loads((place / "config.json").read_text())["data"]["scene"] == str(solved.folder)


def test_train_refuses_a_taken_folder_before_it_looks_for_cameras(images: Path, tmp_path: Path, capfd) -> None:
    (tmp_path / "x").write_text("")
    assert run(["train", str(images), "-o", str(tmp_path)]) == 8
    assert "exists and is not empty" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_info_says_that_cameras_are_missing(images: Path, capfd) -> None:
    assert run(["info", str(images), "--json"]) == 0
    (facts,) = map(json.loads, capfd.readouterr().out.splitlines())
    assert (facts["kind"], facts["num_photos"], facts["unreadable"]) == ("photos", NUM_IMAGES, [])
    assert facts["sizes"] == ["180x240", "240x180"]
    assert "splat sfm" in facts["cameras"]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["nowhere"], 3, "there is nothing here"),
        (["few"], 3, "only 2 images here"),
        (["few", "--camera-model", "PINHOL"], 2, "--camera-model"),
        (["few", "--frames", "1"], 2, "--frames"),
        (["few", "--mapper", "hierarchical"], 2, "one of incremental, global"),
        (["few", "--nerfstudio", "--camera-model", "FULL_OPENCV"], 2, "nerfstudio has no lens model FULL_OPENCV"),
        (["clip.mp4"], 4, "splatcli[video]"),
        (["clip.mp4", "--georeference", "on"], 2, "the frames of a video have no GPS positions"),
    ],
)
def test_what_cannot_be_solved_ends_with_its_code(words, code, says, tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    write_noise(tmp_path / "few", 2)
    (tmp_path / "clip.mp4").write_bytes(b"x")
    if words == ["clip.mp4"] and any(map(__import__("importlib.util").util.find_spec, ("imageio_ffmpeg", "av"))):
        pytest.skip("a package for videos is installed, and says something else")
    assert run(["sfm", *words]) == code
    said = capfd.readouterr()
    assert said.out == ""
    assert says in said.err
    assert "Traceback" not in said.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clip.mp4", "few"]


@pytest.mark.parametrize(
    ("file", "only"),
    [
        ("notes.txt", True),
        ("sparse/x", False),
        ("deep/transforms.json", False),
        ("transforms_train.json", False),
        ("colmap/images.txt", False),
        (".hidden/transforms.json", True),
    ],
)
def test_images_beside_a_trace_of_cameras_are_a_scene(file: str, only: bool, tmp_path: Path) -> None:
    write_noise(tmp_path, 1)
    assert has_images_only(tmp_path)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("x")
    assert has_images_only(tmp_path) is only


def test_progress_of_each_phase_says_what_is_counted() -> None:
    assert set(get_args(Phase)) == _COUNTED.keys()
