"""Files that are byte for byte the same: found without reading more than it takes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from splatcli.config import DataConfig
from splatcli.scene import fit_images
from splatcli.scene.fit_images import identical_files
from splatcli.scene.read import read_scene
from tests.scene import made


def test_same_bytes_are_found_whatever_the_name(tmp_path: Path) -> None:
    start = bytes(fit_images._START)
    for name, data in {"a": start + b"1", "b": start + b"2", "c": start + b"1", "d": b"x", "e": b"y"}.items():
        (tmp_path / name).write_bytes(data)
    paths = [tmp_path / name for name in ("a", "b", "c", "d", "e", "gone")]
    assert identical_files(paths) == [[tmp_path / "a", tmp_path / "c"]]


def test_names_of_one_file_are_the_same_and_it_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    plain = fit_images._digest
    monkeypatch.setattr(fit_images, "_digest", lambda path: read.append(path.name) or plain(path))
    (tmp_path / "a").write_bytes(b"image")
    paths = [tmp_path / name for name in "abcd"]
    for path in paths[1:3]:
        os.link(paths[0], path)
    paths[3].symlink_to(paths[0])
    assert identical_files(paths) == [paths]
    assert read == ["a"]


@pytest.mark.parametrize(
    ("pose", "says"), [(1, "trained by another name"), (5, "one of them is not what its camera saw")]
)
def test_copies_are_one_view_twice_or_one_view_in_two_places(tmp_path: Path, pose: int, says: str) -> None:
    file = made.nerfstudio_scene(tmp_path) / "transforms.json"
    document = json.loads(file.read_text())
    images = [tmp_path / frame["file_path"] for frame in document["frames"]]
    shutil.copy(images[1], images[5])
    nudged = np.array(document["frames"][pose]["transform_matrix"])
    nudged[0][3] += 0.001
    document["frames"][5]["transform_matrix"] = nudged.tolist()
    file.write_text(json.dumps(document))
    (note,) = [note for note in read_scene(tmp_path, DataConfig()).notes if "identical" in note]
    assert says in note
    assert f"{images[1].name} = {images[5].name}" in note
