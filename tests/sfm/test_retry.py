"""The second try for images that mapping leaves out: looser matching around them, and never fewer images."""

from __future__ import annotations

import json
import shutil
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from splatcli import machine
from splatcli.cli.commands import run
from splatcli.scene._pycolmap import pycolmap
from splatcli.sfm import matching
from splatcli.sfm.consistency import contradicted_share
from splatcli.sfm.execution import Execution
from splatcli.sfm.features import SfmImage, Stored, extract
from splatcli.sfm.images import find_input, readable
from splatcli.sfm.job import reconstruct
from splatcli.sfm.mapping import centers_of
from splatcli.sfm.options import SfmOptions
from splatcli.sfm.report import CONTRADICTED, lines
from splatcli.similarity import Similarity
from tests.sfm import corner
from tests.sfm.conftest import find_cameras_of, write_noise

COURTYARD = Path(__file__).parents[2] / "data/samples/courtyard"
#: Poses so far apart, 24 degrees, that the usual ratio test leaves too few matches.
FAR = (0, 4, 8)


def write_corner(folder: Path, poses: tuple[int, ...]) -> Path:
    folder.mkdir(exist_ok=True)
    for index in poses:
        Image.fromarray(corner.image(index)).save(folder / f"{index}.png")
    return folder


def center(index: int) -> np.ndarray:
    pose = corner.pose(index)
    return -pose[:3, :3].T @ pose[:3, 3]


def test_images_far_apart_are_registered_by_the_second_try(tmp_path: Path) -> None:
    solved = find_cameras_of(write_corner(tmp_path / "photos", FAR))
    assert solved.facts["registered"] == 3
    assert solved.facts["retried"] == {"images": 3, "verified_pairs": 3, "before": 0, "after": 3}
    assert any(line.startswith("second try") and "3 instead of 0 registered" in line for line in lines(solved.facts))
    centers = centers_of(pycolmap.Reconstruction(solved.folder / "sparse/0"))
    found = np.stack([centers[f"{index}.png"] for index in FAR])
    true = np.stack([center(index) for index in FAR])
    away = np.linalg.norm(Similarity.of_pairs(found, true)(found) - true, axis=1)
    assert away.max() < 0.02 * np.linalg.norm(true[0] - true[2])


def test_a_second_try_without_gain_changes_nothing(tmp_path: Path) -> None:
    photos = write_corner(tmp_path / "photos", (0, 1, 2, 3))
    alone = find_cameras_of(photos, place=tmp_path / "alone")
    assert alone.facts["retried"] is None
    write_noise(tmp_path / "noise", 1, size=(corner.WIDTH, corner.HEIGHT))
    (tmp_path / "noise/0.png").rename(photos / "9.png")
    solved = find_cameras_of(photos, place=tmp_path / "both")
    assert solved.facts["registered"] == 4
    assert solved.facts["retried"] == {"images": 1, "verified_pairs": 0, "before": 4, "after": 0}
    assert "mapping again" not in solved.facts["seconds"]  # nothing could have changed
    assert any("no more registered" in line for line in lines(solved.facts))


def test_a_second_try_whose_cameras_most_matches_contradict_is_not_used(tmp_path: Path, monkeypatch, capfd) -> None:
    """Every fourth image of a courtyard whose pavement and walls repeat: looser matching joins what looks alike."""
    monkeypatch.chdir(tmp_path)
    # The mapper of several threads finds another model each time, and sometimes none at first.
    monkeypatch.setattr(machine, "cores", lambda: 1)
    Path("photos").mkdir()
    for path in sorted((COURTYARD / "images").iterdir())[::4]:
        shutil.copy(path, "photos")
    flags = ["--camera-model", "SIMPLE_RADIAL", "--max-features", "1500"]
    assert run(["sfm", "photos", "-o", "made", "--json", *flags]) == 0
    said = capfd.readouterr()
    facts = json.loads(said.out.splitlines()[-1])
    retried = facts["retried"]
    assert retried["after"] > retried["before"] == facts["registered"]
    assert retried["contradicted_matches"] > CONTRADICTED
    assert facts["contradicted_matches"] < CONTRADICTED
    assert f"only {facts['registered']} of 13 images could be registered" in said.err
    row = next(line for line in lines(facts) if line.startswith("second try"))
    assert f"not used, {100 * retried['contradicted_matches']:.0f} % of the matches contradict its cameras" in row


def test_cameras_in_wrong_places_contradict_the_matches(tmp_path: Path) -> None:
    inputs = find_input(write_corner(tmp_path / "photos", (0, 1, 2, 3, 4)))
    options = SfmOptions(camera_model="SIMPLE_RADIAL")
    (tmp_path / "made").mkdir()
    facts = reconstruct(inputs, options, tmp_path / "made", Execution())
    assert facts["contradicted_matches"] == 0.0
    database, model = tmp_path / "made/work/database.db", pycolmap.Reconstruction(tmp_path / "made/sparse/0")
    assert contradicted_share(database, model) == 0.0
    turn = pycolmap.Rigid3d(pycolmap.Rotation3d(np.array([0.0, 0.0, 0.3])), np.zeros(3))
    for number in sorted(model.reg_image_ids())[:2]:
        frame = model.frame(model.image(number).frame_id)
        frame.rig_from_world = turn * frame.rig_from_world
    assert contradicted_share(database, model) > CONTRADICTED


EXECUTION = Execution(random_seed=1)


@pytest.fixture
def extracted(tmp_path: Path) -> tuple[Path, list[Stored]]:
    """Features and matches of four images six degrees apart, and one of something else."""
    photos = write_corner(tmp_path / "photos", (0, 1, 2, 3))
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (180, 240, 3), dtype=np.uint8)).save(photos / "9.png")
    inputs = find_input(photos)
    headers, _ = readable(inputs, 1 << 30)
    images = [SfmImage.of(name, photos, header) for name, header in headers.items()]
    path = tmp_path / "database.db"
    return path, extract(path, images, SfmOptions(), EXECUTION)[0]


def inliers(database: Path) -> dict[tuple[int, int], int]:
    with pycolmap.Database.open(database) as store:
        numbers = {int(image.name): image.image_id for image in store.read_all_images()}
        return {
            (i, j): len(store.read_two_view_geometry(numbers[i], numbers[j]).inlier_matches)
            for i, j in combinations(sorted(numbers), 2)
            if store.exists_two_view_geometry(numbers[i], numbers[j])
        }


def test_loose_matches_are_more_and_the_database_is_left(extracted: tuple[Path, list[Stored]]) -> None:
    (database, stored), pairs = extracted, list(combinations(range(5), 2))
    assert matching.match(database, stored, pairs, EXECUTION) == 6
    before = inliers(database)
    copy = database.with_name("copy.db")
    copy.write_bytes(database.read_bytes())
    held = matching.match_again(copy, stored, pairs, EXECUTION)
    assert held == [pair for pair in pairs if 4 not in pair]
    assert inliers(database) == before
    after = inliers(copy)
    assert all(after[pair] >= before[pair] for pair in held)
    assert sum(after[pair] for pair in held) > 1.1 * sum(before[pair] for pair in held)


def test_pairs_that_would_be_lost_keep_their_matches(extracted: tuple[Path, list[Stored]], monkeypatch) -> None:
    (database, stored), pairs = extracted, list(combinations(range(4), 2))
    matching.match(database, stored, pairs, EXECUTION)
    before = inliers(database)
    copy = database.with_name("copy.db")
    copy.write_bytes(database.read_bytes())
    monkeypatch.setattr(matching, "_LOOSE_INLIERS", 1.0)  # no geometry explains every match
    assert matching.match_again(copy, stored, pairs[:3], EXECUTION) == pairs[:3]
    assert inliers(copy) == before


def test_pairs_that_were_never_matched_can_be_retried(extracted: tuple[Path, list[Stored]]) -> None:
    database, stored = extracted
    matching.match(database, stored, [(0, 1), (1, 2)], EXECUTION)
    copy = database.with_name("copy.db")
    copy.write_bytes(database.read_bytes())
    retried = matching.pairs_to_retry([(0, 1), (1, 2)], {3, 4}, [None] * 5)
    assert matching.match_again(copy, stored, retried, EXECUTION) == [(0, 3), (1, 3), (2, 3)]
    holding = [pair for pair, count in sorted(inliers(copy).items()) if count]
    assert holding == [(0, 1), (0, 3), (1, 2), (1, 3), (2, 3)]


def test_only_pairs_whose_descriptors_match_are_worth_a_second_try(extracted: tuple[Path, list[Stored]]) -> None:
    (database, stored), pairs = extracted, list(combinations(range(5), 2))
    matching.match(database, stored, pairs[:-1], EXECUTION)
    assert matching.pairs_with_matches(database, stored, pairs) == [pair for pair in pairs if 4 not in pair]
    with pycolmap.Database.open(database) as store:
        numbers = {image.name: image.image_id for image in store.read_all_images()}
        store.clear_two_view_geometries()
        held = {(numbers[str(i)], numbers[str(j)]) for i, j in pairs if 4 not in (i, j)}
    # Matches without a geometry count too, and are no pairs that hold.
    assert matching.pairs_with_matches(database, stored, pairs) == [pair for pair in pairs if 4 not in pair]
    assert matching.verified_pairs(database) == {}
    matching.match(database, stored, pairs, EXECUTION)
    assert matching.verified_pairs(database).keys() == held


def test_the_most_similar_pairs_are_matched_first() -> None:
    generator = np.random.default_rng(0)
    looks = generator.integers(0, 256, (2, 300, 128))
    images = [np.clip(looks[i % 2] + generator.integers(-9, 9, (300, 128)), 0, 255).astype(np.uint8) for i in range(6)]
    pairs = list(combinations(range(6), 2))
    assert matching.most_alike(pairs, images, 6, 1) == [(i, j) for i, j in pairs if (i - j) % 2 == 0]
    assert matching.most_alike(pairs[::-1], images, 99, 1) == pairs


def test_chains_of_pairs_join_images() -> None:
    pairs = [(1, 2), (5, 6), (3, 2), (4, 3)]
    assert matching.joined(pairs, {1}) == {1, 2, 3, 4}
    assert matching.joined(pairs, {7}) == {7}
    assert matching.joined(pairs, set()) == {1, 2, 3, 4, 5, 6}
