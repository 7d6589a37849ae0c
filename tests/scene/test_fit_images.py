"""Files that are byte for byte the same: found without reading more than it takes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from splatcli.scene import fit_images
from splatcli.scene.fit_images import identical_files


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
