"""Sides of an object that look alike: images of one are not registered as images of the other."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from splatcli import machine
from splatcli.cli.commands import run
from splatcli.scene._pycolmap import pycolmap
from splatcli.sfm.matching import name_order, neighbours, sequences
from splatcli.sfm.report import doubts, lines
from tests.sfm import box


def turn_of(folder: Path, count: int) -> Path:
    """Write images of a whole turn of the box, named by their numbers: 10.png comes after 9.png."""
    folder.mkdir()
    for index in range(count):
        box.image(360.0 / count * index).save(folder / f"{index}.png")
    return folder


def rotation_errors(folder: Path, count: int) -> list[float]:
    """Degrees between the relative rotation of each two cameras of a model of turn_of() and the true one."""
    model = pycolmap.Reconstruction(folder / "sparse/0")
    images = [model.image(image_id) for image_id in model.reg_image_ids()]
    found = {int(Path(image.name).stem): image.cam_from_world().rotation.matrix() for image in images}
    true = {index: box.pose(360.0 / count * index)[:3, :3] for index in found}
    errors = []
    for first, second in combinations(found, 2):
        between = (true[second] @ true[first].T).T @ found[second] @ found[first].T
        errors.append(float(np.degrees(np.arccos(np.clip((np.trace(between) - 1.0) / 2.0, -1.0, 1.0)))))
    return errors


def test_a_turn_of_an_object_with_two_alike_sides_is_a_whole_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of all pairs alone mapping makes half a turn of it, with reprojection errors of half a pixel and no doubt."""
    monkeypatch.setattr(machine, "cores", lambda: 1)  # mapping of one thread is the same from run to run
    images = turn_of(tmp_path / "turn", 24)
    assert run(["sfm", str(images), "-o", str(tmp_path / "scene")]) == 0
    said = capfd.readouterr().err
    assert "left out that only look alike: matches contradicted the cameras at 2 of 23 steps between" in said
    assert "warning" not in said
    facts = json.loads((tmp_path / "scene/sfm.json").read_text())
    assert facts["registered"] == 24
    assert facts["ambiguous"]["used"]
    assert facts["ambiguous"]["contradicted_before"] > 0 == facts["ambiguous"]["contradicted_after"]
    assert facts["ambiguous"]["left_out"] > 0
    errors = rotation_errors(tmp_path / "scene", 24)
    assert len(errors) == 24 * 23 // 2
    assert max(errors) < 5.0, "up to 180 where one side is taken for the other"


def test_a_turn_in_steps_that_are_too_large_is_doubted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neighbours alone do not suffice to map it: the model of all pairs is kept."""
    monkeypatch.setattr(machine, "cores", lambda: 1)
    images = turn_of(tmp_path / "turn", 20)
    assert run(["sfm", str(images), "-o", str(tmp_path / "scene")]) == 0
    said = capfd.readouterr().err
    assert "warning: the matches of neighbours in name order contradict the cameras at 2 of 19 steps" in said
    facts = json.loads((tmp_path / "scene/sfm.json").read_text())
    assert facts["registered"] == 20
    assert not facts["ambiguous"]["used"]
    assert facts["ambiguous"]["after"] < 18
    assert max(rotation_errors(tmp_path / "scene", 20)) > 90.0


@pytest.mark.parametrize(("used", "row"), [(True, "58 left out that only look alike"), (False, "are not used")])
def test_neighbours_that_still_contradict_are_a_doubt(used: bool, row: str) -> None:
    ambiguous = {"steps": 23, "contradicted_before": 2, "contradicted_after": 0, "before": 24, "after": 9}
    facts = {"registered": 24, "total": 24, "points": 900, "track_length": 4.0, "reprojection_error_px": 0.5}
    facts |= {"unregistered": [], "unreadable": {}, "cameras": [], "matching": "exhaustive", "pairs": 276, "threads": 2}
    facts |= {"verified_pairs": 120, "seconds": {}, "ambiguous": {**ambiguous, "left_out": 58, "used": used}}
    assert any(line.startswith("ambiguous pairs") and row in line for line in lines(facts))
    said = [
        line for line in doubts(facts) if "neighbours in name order contradict the cameras at 2 of 23 steps" in line
    ]
    assert bool(said) != used


def test_neighbours_are_those_by_the_numbers_in_names() -> None:
    names = ["b/1.jpg", "a/10.jpg", "a/9.jpg", "a/09b.jpg", "A/11.jpg", "a2/x.jpg", "a10/x.jpg", "top.jpg"]
    assert [names[index] for index in name_order(names)] == [
        *("top.jpg", "a/9.jpg", "a/09b.jpg", "a/10.jpg", "A/11.jpg", "a2/x.jpg", "a10/x.jpg", "b/1.jpg")
    ]
    assert [[names[index] for index in folder] for folder in sequences(names)][1] == [
        "a/9.jpg",
        "a/09b.jpg",
        "a/10.jpg",
    ]
    assert neighbours([4, 0, 2], 1) == [(4, 0), (0, 2)]
    assert neighbours([4, 0, 2], 5) == [(4, 0), (4, 2), (0, 2)]
    assert sequences([]) == neighbours([], 1) == []
