"""Models that fill the same space: each place belongs to one of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from splatcli.cli.commands import run
from splatcli.edit.overlap import cell_side, resolve_overlap
from splatcli.formats.ply import write_ply_file
from splatcli.gaussians import Gaussians
from tests.formats.made import read_ply
from tests.train.worlds import random_gaussians


def sheet(count: int, *, seed: int = 0) -> Gaussians:
    """Gaussians whose means are random in a flat square of side 4 about the origin."""
    gaussians = random_gaussians(count, seed=seed)
    gaussians.means = torch.rand(count, 3, generator=torch.Generator().manual_seed(seed)) * 4 - 2
    gaussians.means[:, 2] *= 0.01
    return gaussians


def rows(gaussians: Gaussians, keep: torch.Tensor) -> Gaussians:
    return gaussians.map(lambda tensor: tensor[keep])


def sorted_rows(gaussians: Gaussians) -> torch.Tensor:
    flat = torch.cat([tensor.reshape(len(gaussians), -1) for _, tensor in gaussians.items()], dim=1)
    return flat.unique(dim=0)


def test_two_cuts_of_a_model_give_it_back() -> None:
    whole = sheet(20_000)
    x = whole.means[:, 0]
    parts = [rows(whole, x < 1.0), rows(whole, x > -1.0)]
    left, effects = resolve_overlap(parts)
    assert sum(map(len, left)) == len(whole)
    assert [effect.touched for effect in effects] == [len(a) - len(b) for a, b in zip(parts, left, strict=True)]
    both = Gaussians(**{name: torch.cat([getattr(part, name) for part in left]) for name, _ in whole.items()})
    assert torch.equal(sorted_rows(both), sorted_rows(whole))


def test_the_denser_model_has_the_place() -> None:
    coarse, fine = sheet(2_000), sheet(20_000, seed=1)
    inner = rows(fine, fine.means[:, :2].abs().amax(dim=1) < 1.0)
    dropped: list[Gaussians] = []
    (outer, kept), _ = resolve_overlap([coarse, inner], dropped)
    side = max(cell_side(coarse.means.double().numpy()), cell_side(inner.means.double().numpy()))
    assert float(outer.means[:, :2].abs().amax(dim=1).min()) > 1.0 - side
    assert len(kept) > 0.9 * len(inner)
    assert len(dropped[0]) + len(outer) == len(coarse)


def test_a_model_apart_stays_whole() -> None:
    near, far = sheet(500), sheet(500, seed=1)
    far.means += 1e12
    left, effects = resolve_overlap([near, far])
    assert [len(part) for part in left] == [500, 500]
    assert [effect.touched for effect in effects] == [0, 0]


def test_the_command_puts_two_cuts_together(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole = tmp_path / "whole.ply"
    write_ply_file(sheet(5_000), whole)
    (tmp_path / "west.txt").write_text("# two boxes\nbox:-9,-9,-9,0,9,9\nbox:0,-9,-9,1,9,9  # and a strip\n")
    for name, region in (("west", f"file:{tmp_path / 'west.txt'}"), ("east", "box:-1,-9,-9,9,9,9")):
        assert run(["edit", str(whole), "-o", str(tmp_path / f"{name}.ply"), "--crop", region, "-q"]) == 0
    words = ["edit", str(tmp_path / "west.ply"), str(tmp_path / "east.ply"), "-o", str(tmp_path / "both.ply")]
    assert run([*words, "--overlap", "densest"]) == 0
    assert "east.ply: --overlap densest: " in capfd.readouterr().err
    found, wanted = (read_ply(path) for path in (tmp_path / "both.ply", whole))
    assert torch.equal(sorted_rows(found), sorted_rows(wanted))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["a.ply", "--overlap", "densest"], "one model overlaps no other"),
        (["a.ply", "a.ply", "--overlap", "merge"], "keep or densest"),
        (["a.ply", "--crop", "file:nowhere.txt"], "--crop nowhere.txt"),
        (["a.ply", "--crop", "file:bad.txt"], "bad.txt, line 2"),
        (["a.ply", "--crop", "file:empty.txt"], "the file has no region"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_ply_file(sheet(10), tmp_path / "a.ply")
    (tmp_path / "bad.txt").write_text("sphere:0,0,0,1\ncube:1\n")
    (tmp_path / "empty.txt").write_text("# nothing\n")
    assert run(["edit", *words, "-o", "b.ply"]) == 2
    assert says in capfd.readouterr().err
    assert not (tmp_path / "b.ply").exists()
