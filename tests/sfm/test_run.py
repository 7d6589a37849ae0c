"""Structure from motion end to end on images whose cameras are known, and the folder that it makes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from splatcli.cli.commands import run as cli
from splatcli.config import DataConfig
from splatcli.errors import OutputError
from splatcli.scene.read import read_scene
from splatcli.sfm import run
from splatcli.sfm.images import find_input
from splatcli.sfm.options import SfmOptions
from splatcli.sfm.run import SfmResult
from tests.sfm import corner
from tests.sfm.conftest import NUM_IMAGES, TURNED, find_cameras_of, name_of


def true_centers() -> NDArray[np.float64]:
    """[N, 3] where the images were taken."""
    poses = [corner.pose(index) for index in range(NUM_IMAGES)]
    return np.stack([-pose[:3, :3].T @ pose[:3, 3] for pose in poses])


def find_cameras(root: Path) -> tuple[list[str], NDArray[np.float64], NDArray[np.float64]]:
    """Names, positions [N, 3] and rotations world to camera [N, 3, 3] of a scene's cameras."""
    cameras = read_scene(root, DataConfig()).cameras
    rotations = np.stack([camera.viewmat[:3, :3] for camera in cameras])
    return [camera.name for camera in cameras], np.stack([camera.center for camera in cameras]), rotations


def similarity(source: NDArray[np.float64], target: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
    """Scale and rotation that bring points [N, 3] onto others, least squares (Umeyama)."""
    a, b = source - source.mean(0), target - target.mean(0)
    left, singular, right = np.linalg.svd(b.T @ a)
    signs = np.array([1.0, 1.0, np.sign(np.linalg.det(left @ right))])
    return float((singular * signs).sum() / (a**2).sum()), left @ np.diag(signs) @ right


def test_all_images_are_placed_where_they_were_taken(solved: SfmResult) -> None:
    assert (solved.facts["registered"], solved.facts["unregistered"]) == (NUM_IMAGES, [])
    assert solved.facts["reprojection_error_px"] < 0.3
    names, found, rotations = find_cameras(solved.folder)
    assert names == [name_of(index) for index in range(NUM_IMAGES)]
    truth, true_rotations = true_centers(), np.stack([corner.pose(index)[:3, :3] for index in range(NUM_IMAGES)])
    scale, rotation = similarity(found, truth)
    error = np.linalg.norm(scale * (found - found.mean(0)) @ rotation.T - (truth - truth.mean(0)), axis=1)
    path = np.linalg.norm(truth - truth.mean(0), axis=1).max()
    # Measured: 0.06 % and 0.05 degrees.
    assert error.max() < 0.003 * path
    turns = np.einsum("nij,nkj->nik", rotations @ rotation.T, true_rotations)
    angles = np.degrees(np.arccos(np.clip((np.trace(turns, axis1=1, axis2=2) - 1) / 2, -1, 1)))
    assert angles.max() < 0.25


def test_the_global_mapper_places_the_same_cameras(images: Path, tmp_path: Path, solved: SfmResult) -> None:
    place = tmp_path / "scene"
    assert cli(["sfm", str(images), "-o", str(place), "--mapper", "global", "-q"]) == 0
    names, found, _ = find_cameras(place)
    _, wanted, _ = find_cameras(solved.folder)
    assert names == [name_of(index) for index in range(NUM_IMAGES)]
    scale, rotation = similarity(found, wanted)
    error = np.linalg.norm(scale * (found - found.mean(0)) @ rotation.T - (wanted - wanted.mean(0)), axis=1)
    assert error.max() < 0.003 * np.linalg.norm(wanted - wanted.mean(0), axis=1).max()


def test_a_backslash_in_a_name_is_no_folder(images: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As where a program unpacked an archive of Windows without its folders."""
    photos, scene = tmp_path / "photos", tmp_path / "scene"
    photos.mkdir()
    for path in images.iterdir():
        os.link(path, photos / rf"dcim\{path.name}")
    assert cli(["sfm", str(photos), "-o", str(scene), "-q"]) == 0
    assert cli(["info", str(scene), "--json"]) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["num_cameras"] == NUM_IMAGES
    assert find_cameras(scene)[0] == [rf"dcim\{name_of(index)}" for index in range(NUM_IMAGES)]


def test_the_lens_is_found(solved: SfmResult) -> None:
    (camera,) = solved.facts["cameras"]
    assert (camera["model"], camera["width"], camera["height"]) == ("SIMPLE_RADIAL", corner.WIDTH, corner.HEIGHT)
    assert camera["focal_px"] == [pytest.approx(corner.FOCAL, rel=0.005)]


def test_the_scene_can_be_moved_away_from_the_images(solved: SfmResult, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(solved.folder, moved, copy_function=os.link)
    scene = read_scene(moved, DataConfig(max_point_error=0))
    assert len(scene.cameras) == NUM_IMAGES
    assert scene.points is not None
    assert len(scene.points.xyz) == solved.facts["points"]
    turned = scene.images.sources[TURNED]
    assert (turned.orientation, turned.stored) == (6, (corner.WIDTH, corner.HEIGHT))
    assert {source.orientation for source in scene.images.sources} == {1, 6}


def test_points_have_the_colours_of_the_images(solved: SfmResult) -> None:
    points = read_scene(solved.folder, DataConfig()).points
    assert points is not None
    found, truth = find_cameras(solved.folder)[1], true_centers()
    scale, rotation = similarity(found, truth)
    placed = scale * (points.xyz - found.mean(0)) @ rotation.T + truth.mean(0)
    assert np.median(np.abs(placed).min(axis=1)) < 0.01, "points lie on the walls"
    expected = corner.colours_at(placed)
    for channel in range(3):
        # A pixel is the mean of several texels, and a point lies between pixels.
        assert np.corrcoef(points.rgb[:, channel], expected[:, channel])[0, 1] > 0.7


def test_the_same_images_and_options_are_solved_once(solved: SfmResult, images: Path, monkeypatch) -> None:
    monkeypatch.setattr(run, "run_worker", lambda *_, **__: pytest.fail("was solved again"))
    again = find_cameras_of(images)
    assert (again.reused, again.folder) == (True, solved.folder)
    assert again.facts == json.loads((solved.folder / run.REPORT).read_text())


@pytest.fixture
def fake(monkeypatch) -> list[Path]:
    """A worker that makes an empty model at once; the folders it was given."""
    given: list[Path] = []

    def work(inputs, options, folder, execution):
        given.append(folder)
        for place in ("work", "images", "sparse/0"):
            (folder / place).mkdir(parents=True)
        for kind in ("cameras", "images", "points3D"):
            (folder / f"sparse/0/{kind}.bin").write_bytes(bytes(8))  # none of them
        (folder / "sparse/0/mark").write_bytes(b"new")
        return {"total": 0}

    monkeypatch.setattr(run, "run_worker", work)
    return given


def test_other_options_get_a_place_of_their_own(images: Path, tmp_path: Path, fake: list[Path]) -> None:
    places = [find_cameras_of(images, SfmOptions(seed=seed), beside=tmp_path).folder.name for seed in (1, 2, 1)]
    assert places == ["photos-sfm", "photos-sfm-2", "photos-sfm"]
    assert len(fake) == 2


def test_changed_images_are_solved_again(images: Path, tmp_path: Path, fake: list[Path]) -> None:
    copy = Path(shutil.copytree(images, tmp_path / "photos"))
    assert not find_cameras_of(copy).reused
    assert find_cameras_of(copy).reused
    (copy / name_of(0)).write_bytes((copy / name_of(1)).read_bytes())
    assert not find_cameras_of(copy).reused


def test_a_named_place_is_replaced_only_when_asked(images: Path, tmp_path: Path, fake: list[Path]) -> None:
    place = tmp_path / "scene"
    find_cameras_of(images, place=place)
    mark = place / "sparse/0/mark"
    mark.write_bytes(b"old")
    with pytest.raises(OutputError, match="other images, or made with other options"):
        find_cameras_of(images, SfmOptions(seed=1), place=place)
    assert mark.read_bytes() == b"old"
    find_cameras_of(images, SfmOptions(seed=1), place=place, overwrite=True)
    assert mark.read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["scene"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_not_ours_is_never_replaced(images: Path, tmp_path: Path, fake: list[Path], overwrite: bool) -> None:
    (tmp_path / "diary.txt").write_text("x")
    with pytest.raises(OutputError, match="other content"):
        find_cameras_of(images, place=tmp_path, overwrite=overwrite)
    with pytest.raises(OutputError, match="lies in it"):
        find_cameras_of(images, place=images.parent, overwrite=overwrite)
    with pytest.raises(OutputError, match="is a file"):
        find_cameras_of(images, place=tmp_path / "diary.txt", overwrite=overwrite)
    assert not fake


def test_a_link_stays_and_an_empty_folder_is_kept(images: Path, tmp_path: Path, fake: list[Path]) -> None:
    target, empty = tmp_path / "large disk" / "scene", tmp_path / "empty"
    (tmp_path / "link").symlink_to(target)
    empty.mkdir()
    number = empty.stat().st_ino
    for place, real in ((tmp_path / "link", target), (empty, empty)):
        assert find_cameras_of(images, place=place).folder == real
        assert sorted(path.name for path in real.iterdir()) == ["images", "sfm.json", "sparse"]
        assert fake[-1].parent == real.parent, "the work is done on the disk of the result"
    assert (tmp_path / "link").is_symlink()
    assert empty.stat().st_ino == number, "it may be somebody's current folder"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "large disk", "link"]
    assert find_cameras_of(images, place=tmp_path / "link").reused


def test_a_mounted_disk_is_refused_before_the_work(
    images: Path, tmp_path: Path, fake: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path)
    with pytest.raises(OutputError, match="another disk is mounted here") as caught:
        find_cameras_of(images, place=tmp_path)
    assert str(tmp_path / "scene") in str(caught.value.remedy)
    assert not fake


def test_a_scene_that_is_not_whole_any_more(images: Path, tmp_path: Path, fake: list[Path]) -> None:
    shutil.rmtree(find_cameras_of(images, beside=tmp_path).folder / "sparse")
    assert find_cameras_of(images, beside=tmp_path).folder.name == "photos-sfm-2"
    with pytest.raises(
        OutputError, match="made of these images, and files of the model, images or masks in it are gone"
    ):
        find_cameras_of(images, place=tmp_path / "photos-sfm")


def test_a_model_that_was_cut_is_not_used_again(solved: SfmResult, images: Path, tmp_path: Path, capfd) -> None:
    scene = tmp_path / "scene"
    shutil.copytree(solved.folder, scene, copy_function=os.link)
    assert cli(["sfm", str(images), "-o", str(scene), "-q"]) == 0
    points = scene / "sparse/0/points3D.bin"
    whole = points.read_bytes()
    points.unlink()
    points.write_bytes(whole[: len(whole) // 2])
    assert cli(["sfm", str(images), "-o", str(scene), "-q"]) == 8
    assert "gone or damaged" in capfd.readouterr().err


def test_pixels_of_an_uncompressed_image_count_in_the_middle_too(tmp_path: Path) -> None:
    """Size and both ends are the same."""
    pictures = np.random.default_rng(0).integers(0, 256, (3, 400, 500, 3), dtype=np.uint8)
    for index, picture in enumerate(pictures):
        Image.fromarray(picture).save(tmp_path / f"{index}.tif")
    before, size = find_input(tmp_path).fingerprint(), (tmp_path / "1.tif").stat().st_size
    pictures[1, 200] = 0
    Image.fromarray(pictures[1]).save(tmp_path / "1.tif")
    assert (tmp_path / "1.tif").stat().st_size == size
    assert find_input(tmp_path).fingerprint() != before


def test_scenes_and_runs_among_the_images_are_no_images(images: Path, tmp_path: Path, fake: list[Path]) -> None:
    """As after `cd photos; splat sfm .`, whose output lies below the folder."""
    copy = Path(shutil.copytree(images, tmp_path / "photos"))
    whole = find_input(copy)
    made = find_cameras_of(copy, beside=copy / "output").folder
    shutil.copy(images / name_of(0), made / "images")
    shutil.copytree(made, copy / "output" / "other-sfm.tmp.99.0123abcd").joinpath("sfm.json").unlink()
    run_of_ours = copy / "output" / "run"
    shutil.copytree(images, run_of_ours / "renders")
    (run_of_ours / "ckpts").mkdir()
    (run_of_ours / "config.json").write_text("{}")
    assert find_input(copy) == whole
    assert find_cameras_of(copy, beside=copy / "output").reused


def test_another_call_that_was_faster_is_used(images: Path, tmp_path: Path, fake: list[Path], monkeypatch) -> None:
    work, place = run.run_worker, tmp_path / "scene"

    def overtaken(*given, **more):
        monkeypatch.setattr(run, "run_worker", work)
        find_cameras_of(images, place=place)
        (place / "sparse/0/mark").write_bytes(b"first")
        return work(*given, **more)

    monkeypatch.setattr(run, "run_worker", overtaken)
    assert find_cameras_of(images, place=place).reused
    assert (place / "sparse/0/mark").read_bytes() == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["scene"]


def test_the_work_of_another_machine_is_left_alone(images: Path, tmp_path: Path, fake: list[Path], monkeypatch) -> None:
    """Its process ids say nothing here, and a lock is what tells that it goes on; without locks nothing does."""
    beyond_the_last_pid = 2**22 + 1
    folders = [tmp_path / f"photos-sfm.tmp.{beyond_the_last_pid}.{number:08x}" for number in range(3)]
    for folder, machine in zip(folders, ("here", "elsewhere", "here"), strict=True):
        folder.mkdir()
        (folder / run.LOCK).write_text(machine)
    monkeypatch.setattr("platform.node", lambda: "here")
    with (folders[0] / run.LOCK).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        find_cameras_of(images, beside=tmp_path)
        assert [folder.exists() for folder in folders] == [True, False, False]
    folders[1].mkdir()
    (folders[1] / run.LOCK).write_text("elsewhere")

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    find_cameras_of(images, SfmOptions(seed=2), place=tmp_path / "photos-sfm", overwrite=True)
    assert [folder.exists() for folder in folders] == [False, True, False]


@pytest.mark.parametrize(("renames", "found"), [(1, "new"), (1, "old"), (2, "new")])
def test_a_kill_while_a_scene_is_replaced_loses_none(
    images: Path, tmp_path: Path, fake: list[Path], renames: int, found: str
) -> None:
    """Between the two renames neither the old scene nor the new one is in the place."""
    place = find_cameras_of(images, beside=tmp_path).folder
    replacing = SfmOptions(seed=2)
    child = os.fork()
    if child == 0:
        real, done = Path.rename, iter(range(1, 10))

        def rename(path: Path, target: Path) -> None:
            real(path, target)
            if next(done) == renames:
                os._exit(0)

        Path.rename = rename  # type: ignore[method-assign, assignment]
        try:
            find_cameras_of(images, replacing, place=place, overwrite=True)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    (old,) = tmp_path.glob("photos-sfm.tmp.*.old")
    if found == "old":
        shutil.rmtree(old.with_suffix(""))
    assert find_cameras_of(images, replacing if found == "new" else None, beside=tmp_path).reused
    assert [path.name for path in tmp_path.iterdir()] == ["photos-sfm"]


def test_what_a_killed_process_left_goes_with_the_next_run(images: Path, tmp_path: Path, fake: list[Path]) -> None:
    beyond_the_last_pid = 2**22 + 1
    stale = tmp_path / f"photos-sfm.tmp.{beyond_the_last_pid}.0123abcd"
    living = tmp_path / f"photos-sfm.tmp.{os.getppid()}.0123abcd"
    for folder in (stale, living):
        folder.mkdir()
    find_cameras_of(images, beside=tmp_path)
    assert (stale.exists(), living.exists()) == (False, True)
