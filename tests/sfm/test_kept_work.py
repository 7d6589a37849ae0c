"""Structure from motion that is stopped, killed or fails: features and matches are kept, and used by the next call."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from splatcli.errors import SceneError
from splatcli.sfm import features, matching
from splatcli.sfm.execution import Execution
from splatcli.sfm.images import find_input
from splatcli.sfm.job import reconstruct
from splatcli.sfm.options import SfmOptions
from tests.sfm.conftest import NUM_IMAGES, find_cameras_of, write_noise


def model_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "sparse" / "0").iterdir()}


def reconstructed(
    images: Path, folder: Path, stop_at: tuple[str, int] | None = None, options: SfmOptions | None = None
) -> dict[str, Any]:
    """One thread: with several the mapper may begin with another pair of images."""
    folder.mkdir(exist_ok=True)

    def progress(phase: str, done: int, total: int) -> None:
        if stop_at is not None and phase == stop_at[0] and stop_at[1] <= done < total:
            raise KeyboardInterrupt

    options = options or SfmOptions()
    return reconstruct(find_input(images), options, folder, Execution(listener=progress))


@pytest.fixture(scope="module")
def fresh(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was made without a stop."""
    folder = tmp_path_factory.mktemp("fresh") / "scene"
    reconstructed(images, folder)
    return folder


@pytest.mark.parametrize("stop_at", [("features", 5), ("matching", 8), ("mapping", 4)], ids=lambda at: at[0])
@pytest.mark.usefixtures("capfd")  # stderr is a file, as it is for the worker
def test_the_same_bytes_as_without_a_stop(
    stop_at: tuple[str, int], images: Path, fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "_COMMITTED", 3)
    for limit in ("_SMALLEST_BLOCK", "_LARGEST_BLOCK"):
        monkeypatch.setattr(matching, limit, 8)
    monkeypatch.setattr(matching, "_LOOK_EVERY", 0.01)
    folder = tmp_path / "scene"
    with pytest.raises(KeyboardInterrupt):
        reconstructed(images, folder, stop_at)
    decoded: list[str] = []
    found = features._features_of
    monkeypatch.setattr(
        features, "_features_of", lambda image, **more: (decoded.append(image.name), found(image, **more))[1]
    )
    reconstructed(images, folder)
    assert len(decoded) == (NUM_IMAGES - 5 if stop_at[0] == "features" else 0), (
        "what was written is not looked for again"
    )
    assert model_of(folder) == model_of(fresh)


@pytest.mark.parametrize("harm", ["database.db", "colours/3.npy", "stationary.json"])
def test_damaged_work_is_done_again(harm: str, images: Path, fresh: Path, tmp_path: Path) -> None:
    folder = tmp_path / "scene"
    with pytest.raises(KeyboardInterrupt):
        reconstructed(images, folder, ("mapping", 2))
    file = folder / "work" / harm
    file.write_bytes(b"[1]" if file.suffix == ".json" else file.read_bytes()[: file.stat().st_size // 2])
    reconstructed(images, folder)
    assert model_of(folder) == model_of(fresh)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (SfmOptions(), SfmOptions(matching="retrieval")),
        (SfmOptions(mapper="global"), SfmOptions()),
        (SfmOptions(mapper="global"), SfmOptions(mapper="global")),
    ],
    ids=["matching", "mapper", "global twice"],
)
def test_a_call_with_other_options_finds_what_it_finds_alone(
    before: SfmOptions, after: SfmOptions, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other pairs of images, and cameras that the global mapper calibrates, are left in the work folder."""
    monkeypatch.setattr(matching, "NEIGHBOURS", 2)
    alone = reconstructed(images, tmp_path / "alone", options=after)
    with pytest.raises(KeyboardInterrupt):
        reconstructed(images, tmp_path / "scene", ("mapping", 0), before)
    facts = reconstructed(images, tmp_path / "scene", options=after)
    assert facts | {"seconds": {}} == alone | {"seconds": {}}
    assert model_of(tmp_path / "scene") == model_of(tmp_path / "alone")


def stopped(images: Path, place: Path, options: SfmOptions | None = None) -> list[str]:
    """Stops a call while it matches, as Ctrl-C does; returns what lies beside the place."""

    def progress(phase: str, done: int, total: int) -> None:
        if phase == "matching":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find_cameras_of(images, options, place=place, progress=progress)
    return sorted(path.name for path in place.parent.iterdir())


def test_a_stopped_call_says_what_is_kept(images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "splatcli")
    place = tmp_path / "scene"
    (left,) = stopped(images, place)
    assert left.startswith(f"scene.tmp.{os.getpid()}.")
    assert f"features and matches are kept in {tmp_path / left}" in caplog.text
    caplog.clear()
    (other,) = stopped(images, place, SfmOptions(max_features=500))
    assert other != left, "the work of other options is removed"
    assert "used again" not in caplog.text


def test_work_whose_lock_was_deleted_is_continued(images: Path, tmp_path: Path) -> None:
    place = tmp_path / "scene"
    (left,) = stopped(images, place)
    (tmp_path / left / "lock").unlink()
    assert find_cameras_of(images, place=place).facts["registered"] == NUM_IMAGES
    assert [path.name for path in tmp_path.iterdir()] == ["scene"]


def test_an_error_keeps_features_for_another_try(images: Path, tmp_path: Path) -> None:
    with pytest.raises(SceneError, match="GPS"):
        find_cameras_of(images, SfmOptions(georeference="on"), place=tmp_path / "scene")
    assert len(list(tmp_path.glob("scene.tmp.*/work/colours/*.npy"))) == NUM_IMAGES


@pytest.mark.parametrize("pair_holds", [False, True])
def test_images_that_give_no_model_leave_nothing(pair_holds: bool, tmp_path: Path, caplog) -> None:
    """Only other images help, whose features are others."""
    caplog.set_level(logging.INFO, "splatcli")
    photos = write_noise(tmp_path / "photos", 4)
    if pair_holds:  # without any depth
        for index in range(3):
            Image.open(photos / "0.png").resize((480, 320)).save(photos / f"0-{index}.jpg", quality=80 + 5 * index)
    with pytest.raises(SceneError, match=r"images could be registered" if pair_holds else "no two of the 4 images"):
        find_cameras_of(photos, place=tmp_path / "scene")
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]
    assert "are kept" not in caplog.text


def test_a_killed_command_goes_on(images: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "splatcli", "sfm", str(images), "-o", "scene"]
    first = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ends = time.monotonic() + 120
    while len(list(tmp_path.glob("scene.tmp.*/work/colours/*.npy"))) < NUM_IMAGES and time.monotonic() < ends:
        assert first.poll() is None
        time.sleep(0.005)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert len(list(tmp_path.iterdir())) == 1
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "features and matches of the last try are used again" in again.stderr
    assert f"{NUM_IMAGES} of {NUM_IMAGES}" in again.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["scene"]
    assert sorted(path.name for path in (tmp_path / "scene").iterdir()) == ["images", "sfm.json", "sparse"]
