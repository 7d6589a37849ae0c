"""Captures that only half succeed, by whole commands: pieces, images left out, few images, no parallax."""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image

from splatcli.cli.commands import run
from tests.cli.tiny import QUICK
from tests.sfm import corner
from tests.sfm.conftest import write_noise


def write(path: Path, pose: float, *, room: int = 0) -> None:
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(corner.image(pose, room=room)).save(path, quality=95)


def test_pieces_are_kept_and_named_by_every_command(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    for index in range(6):
        write(Path(f"photos/a{index}.jpg"), index)
    for index in range(4):
        write(Path(f"photos/b{index}.jpg"), index, room=1)
    write_noise(Path("photos"), 1)
    assert run(["sfm", "photos", "-o", "made", "--json"]) == 0
    said = capfd.readouterr()
    facts = json.loads(said.out.splitlines()[-1])
    others = [f"b{index}.jpg" for index in range(4)]
    assert (facts["registered"], facts["total"], facts["other_images"]) == (6, 11, [others])
    assert facts["unregistered"] == ["0.png", *others]
    for _ in range(2):  # when it is made, and when it is used again
        assert "6 of 11 images are registered; left out: 0.png, b0.jpg, b1.jpg, b2.jpg, b3.jpg" in said.err
        assert "4 images form a model of their own, kept as sparse/1: b0.jpg, b1.jpg, b2.jpg, b3.jpg" in said.err
        assert "fall into 2 models that nothing connects: take images that lead from one to another" in said.err
        assert "--matching exhaustive" not in said.err
        assert run(["sfm", "photos", "-o", "made"]) == 0
        said = capfd.readouterr()
    notes = (
        "of 2 COLMAP models sparse/0 with 6 images is used; splat train --model sparse/1 has 4 images",
        "registers 6 of the 11 images in images/; left out: 0.png, b0.jpg, b1.jpg, b2.jpg, b3.jpg",
    )
    assert run(["info", "made"]) == 0
    reported = capfd.readouterr().out
    assert all(note in reported for note in notes)
    assert run(["train", "made", "-o", "run", "-n", "2", "-r", "4", "--device", "cpu", *QUICK]) == 0
    reported = capfd.readouterr().err
    assert all(note in reported for note in notes)
    assert run(["info", "made", "--model", "sparse/1"]) == 0
    assert "sparse/1/images.bin: 4 views" in capfd.readouterr().out


def test_few_images_and_little_parallax_are_doubted(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    for index in range(3):
        write(Path(f"photos/{index}.jpg"), 0.2 * index)
    assert run(["sfm", "photos", "-o", "made", "--json"]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out.splitlines()[-1])["parallax_degrees"] < 4.5
    assert "degrees of parallax in the median" in said.err
    assert "only 3 views, from which surfaces are guesses: take more images" in said.err
    assert run(["info", "made"]) == 0
    assert "only 3 views" in capfd.readouterr().out
    assert run(["train", "made", "-o", "run", "-n", "2", "-r", "4", "--device", "cpu", *QUICK]) == 0
    assert "only 3 views" in capfd.readouterr().err
