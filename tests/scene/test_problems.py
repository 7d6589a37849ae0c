"""Everything that is wrong with a scene is reported at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from splatcli.cli.console import Output
from splatcli.config import DataConfig
from splatcli.errors import SceneError
from splatcli.scene.read import read_scene
from splatcli.scene.source import LISTED, Problems, SceneProblems
from tests.scene import made


def _collected(harm: Callable[[Problems], None]) -> SceneProblems:
    problems = Problems(Path("/scene"))
    harm(problems)
    with pytest.raises(SceneProblems) as caught:
        problems.raise_any()
    return caught.value


def test_no_problem_is_none_and_one_is_reported_as_it_is() -> None:
    problems = Problems(Path("/scene"))
    problems.raise_any()
    only = SceneError("is empty", where="/scene/a.jpg", remedy="copy it again")
    with problems.collect():
        raise only
    with pytest.raises(SceneError) as caught:
        problems.raise_any()
    assert caught.value is only


def test_problems_are_reported_with_their_places_and_a_shared_remedy_once() -> None:
    def harm(problems: Problems) -> None:
        problems.add(SceneError("is empty", where="/scene/images/a.jpg", remedy="copy it again"))
        problems.add(SceneError("is empty", where="/scene/images/b.jpg", remedy="copy it again"))
        problems.add(SceneError("is odd", where="/elsewhere/c.jpg", remedy="look at it"))

    assert _collected(harm).lines() == [
        "error[E003]: 3 problems in /scene:",
        "  1. images/a.jpg: is empty",
        "  2. images/b.jpg: is empty",
        "     help: copy it again",
        "  3. /elsewhere/c.jpg: is odd",
        "     help: look at it",
    ]


def test_the_first_twenty_are_listed_and_all_are_counted() -> None:
    def harm(problems: Problems) -> None:
        for i in range(LISTED + 7):
            problems.add(SceneError("is empty", where=f"/scene/{i}.jpg"))

    error = _collected(harm)
    assert len(error.problems) == LISTED
    lines = error.lines()
    assert lines[0] == "error[E003]: 27 problems in /scene, the first 20:"
    assert lines[-1] == "  ... and 7 more"


def test_the_same_problem_is_reported_once() -> None:
    def harm(problems: Problems) -> None:
        for what in ("is empty", "is empty", "is odd"):
            problems.add(SceneError(what, where="/scene/a.jpg"))

    assert _collected(harm).total == 2


def test_json_has_them_as_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    def harm(problems: Problems) -> None:
        problems.add(SceneError("is empty", where="/scene/a.jpg", remedy="copy it again"))
        problems.add(SceneError("is odd", where="/scene/b.jpg"))

    Output(json=True).error(_collected(harm))
    reported = json.loads(capsys.readouterr().out)
    assert (reported["event"], reported["error"], reported["exit_code"], reported["num_problems"]) == (
        "error",
        "E003",
        3,
        2,
    )
    assert reported["problems"] == [
        {"what": "is empty", "where": "/scene/a.jpg", "help": "copy it again"},
        {"what": "is odd", "where": "/scene/b.jpg", "help": None},
    ]


def test_images_names_and_missing_files_are_reported_together(tmp_path: Path) -> None:
    names = [*made.names(6), "../out.png", "gone.png", "0001.png"]
    made.write_model(tmp_path / "sparse/0", made.reconstruction(image_names=names))
    made.write_images(tmp_path / "images", made.names(6))
    (tmp_path / "images/0002.png").write_bytes(b"")
    (tmp_path / "images/0003.png").write_bytes(b"<html>")
    Image.new("RGB", (10, 40)).save(tmp_path / "images/0004.png")
    with pytest.raises(SceneProblems) as caught:
        read_scene(tmp_path, DataConfig())
    reported = "\n".join(caught.value.lines())
    assert caught.value.total == 6
    wanted = ("outside", "same image 0001.png", "1 of 7 images are missing: gone.png", "0002.png", "<html>", "10x40")
    for text in wanted:
        assert text in reported


def test_a_lens_that_all_images_share_is_one_problem(tmp_path: Path) -> None:
    made.colmap_scene(tmp_path, camera=made.lens(params=[float("nan"), 61.0, 32.0, 24.0]))
    with pytest.raises(SceneError, match="camera 1: its parameters are not finite") as caught:
        read_scene(tmp_path, DataConfig())
    assert not isinstance(caught.value, SceneProblems)
