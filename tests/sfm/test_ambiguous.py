"""Sides of an object that look alike: images of one are not registered as images of the other."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from splatcli.cli.commands import run
from splatcli.scene._pycolmap import pycolmap
from splatcli.sfm.matching import name_order, neighbours, sequences
from splatcli.sfm.report import doubts, lines
from tests.sfm import box

NUM_IMAGES = 24
STEP = 360.0 / NUM_IMAGES


def rotation_errors(folder: Path) -> list[float]:
    """Degrees between the relative rotation of each two cameras of a model and the true one; images have numbers."""
    model = pycolmap.Reconstruction(folder / "sparse/0")
    images = [model.image(image_id) for image_id in model.reg_image_ids()]
    found = {int(Path(image.name).stem): image.cam_from_world().rotation.matrix() for image in images}
    errors = []
    for first in found:
        for second in found:
            if first < second:
                true = box.pose(STEP * second)[:3, :3] @ box.pose(STEP * first)[:3, :3].T
                between = true.T @ found[second] @ found[first].T
                errors.append(float(np.degrees(np.arccos(np.clip((np.trace(between) - 1.0) / 2.0, -1.0, 1.0)))))
    return errors


def test_a_turn_of_an_object_with_two_alike_sides_is_a_whole_turn(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of all pairs alone mapping makes half a turn of it, with reprojection errors of half a pixel and no doubt."""
    images = tmp_path / "turn"
    images.mkdir()
    for index in range(NUM_IMAGES):
        box.image(STEP * index).save(images / f"{index}.png")  # 10.png comes after 9.png
    assert run(["sfm", str(images), "-o", str(tmp_path / "scene")]) == 0
    said = capfd.readouterr().err
    assert "left out that only look alike: matches contradicted the cameras at 2 of 23 steps between" in said
    assert "warning" not in said
    facts = json.loads((tmp_path / "scene/sfm.json").read_text())
    assert facts["registered"] == NUM_IMAGES
    assert facts["ambiguous"]["used"]
    assert facts["ambiguous"]["contradicted_before"] > 0 == facts["ambiguous"]["contradicted_after"]
    assert facts["ambiguous"]["left_out"] > 0
    errors = rotation_errors(tmp_path / "scene")
    assert len(errors) == NUM_IMAGES * (NUM_IMAGES - 1) // 2
    assert max(errors) < 3.0


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
