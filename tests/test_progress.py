"""Progress that the library reports, and those who hear of it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch

from splatcli.config import DataConfig
from splatcli.formats import ply
from splatcli.formats.format import ExportMetadata
from splatcli.progress import listening, report, track
from splatcli.scene import colmap, parsing
from splatcli.scene.read import read_scene
from tests.formats.made import read_ply
from tests.train.worlds import random_gaussians

SAMPLE = Path(__file__).resolve().parents[1] / "data" / "samples" / "courtyard"


def test_each_item_is_reported_when_it_is_done() -> None:
    heard: list[tuple[str, int, int]] = []
    with listening(lambda *one: heard.append(one)):
        assert [(item, len(heard)) for item in track("ab", "letters")] == [("a", 1), ("b", 2)]
        assert list(track(iter("c"), "more", 1)) == ["c"]
    assert heard == [("letters", 0, 2), ("letters", 1, 2), ("letters", 2, 2), ("more", 0, 1), ("more", 1, 1)]


def test_the_last_listener_hears_and_nobody_is_needed() -> None:
    outer: list[int] = []
    inner: list[int] = []
    with listening(lambda _, done, total: outer.append(done)):
        with contextlib.suppress(KeyError), listening(lambda _, done, total: inner.append(done)):
            report("a", 1, 2)
            raise KeyError
        report("a", 2, 2)
    report("a", 3, 3)
    assert (outer, inner) == ([2], [1])


def test_a_large_ply_is_read_in_pieces_that_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gaussians = random_gaussians(25)
    (tmp_path / "a.ply").write_bytes(ply.encode_ply(gaussians, ExportMetadata()).payload)
    monkeypatch.setattr(ply, "_READ_ROWS", 10)
    heard: list[tuple[str, int, int]] = []
    with listening(lambda *one: heard.append(one)):
        again = read_ply(tmp_path / "a.ply")
    for (name, mine), (_, theirs) in zip(gaussians.items(), again.items(), strict=True):
        assert torch.equal(mine, theirs), name
    assert [one for one in heard if one[0] == "reading a.ply"] == [("reading a.ply", at, 25) for at in (0, 10, 20, 25)]
    assert heard[-1] == ("checking a.ply", 3, 3)


def test_large_tables_of_colmap_are_reported_while_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = read_scene(SAMPLE, DataConfig())
    assert whole.points is not None
    total = len(whole.points.xyz)
    monkeypatch.setattr(colmap, "_REPORT_RECORDS", total // 4 + 1)
    heard: list[tuple[str, int, int]] = []
    with listening(lambda *one: heard.append(one)):
        again = read_scene(SAMPLE, DataConfig())
    assert again.points is not None
    assert np.array_equal(again.points.xyz, whole.points.xyz)
    part = total // 4 + 1
    mine = [(done, of) for task, done, of in heard if task == "reading points3D.bin"]
    assert mine == [(part, total), (2 * part, total), (3 * part, total), (total, total)]


def test_large_text_files_of_colmap_are_reported_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "points3D.txt").write_text("1 0 0 0 9 9 9 0.5 1 1\n" * 200_000)
    monkeypatch.setattr(parsing, "_REPORT_BYTES", 1_000_000)
    heard: list[tuple[str, int, int]] = []
    with listening(lambda *one: heard.append(one)):
        assert sum(1 for _ in colmap._lines(tmp_path / "points3D.txt")) == 200_000
    assert heard == [("reading points3D.txt, MB", at, 4) for at in (1, 2, 3, 4, 4)]
