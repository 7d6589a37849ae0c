"""Damaged COLMAP models: every one ends in a SceneError that names the file; the interpreter survives."""

from __future__ import annotations

import math
import random
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from splatcli.config import DataConfig
from splatcli.errors import SceneError
from splatcli.scene.colmap import read_colmap
from splatcli.scene.read import read_scene
from splatcli.scene.source import Problems
from tests.scene import made

KINDS = ["cameras", "images", "points3D", "rigs", "frames"]


def _refused(root: Path, file: str) -> SceneError:
    with pytest.raises(SceneError) as caught:
        read_scene(root, DataConfig())
    assert caught.value.exit_code == 3
    assert file in str(caught.value.where)
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize("count", [10**18, 2**64 - 1, 10**6])
@pytest.mark.parametrize("kind", KINDS)
def test_a_count_that_the_file_cannot_hold_is_refused(tmp_path: Path, kind: str, count: int) -> None:
    made.colmap_scene(tmp_path)
    path = tmp_path / f"sparse/0/{kind}.bin"
    path.write_bytes(struct.pack("<Q", count) + path.read_bytes()[8:])
    assert f"claims {count:,}" in _refused(tmp_path, path.name).what


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path, kind: str) -> None:
    made.colmap_scene(tmp_path)
    path = tmp_path / f"sparse/0/{kind}.bin"
    data = path.read_bytes()
    for size in [0, 1, 7, *range(8, len(data), max(1, len(data) // 40))]:
        path.write_bytes(data[:size])
        _refused(tmp_path, path.name)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_after_the_last_record_are_refused(tmp_path: Path, kind: str) -> None:
    made.colmap_scene(tmp_path)
    path = tmp_path / f"sparse/0/{kind}.bin"
    path.write_bytes(path.read_bytes() + b"x")
    assert "after its last record" in _refused(tmp_path, path.name).what


@pytest.mark.parametrize(
    ("file", "old", "new", "line"),
    [
        ("cameras.txt", "PINHOLE 64", "PINHOLE 6,4", 4),
        ("cameras.txt", "1 PINHOLE", "hello", 4),
        ("images.txt", " 0001.png", "", 7),
        ("points3D.txt", "\n3 ", "\n3 x ", 6),
    ],
)
def test_a_bad_line_of_text_is_named(tmp_path: Path, file: str, old: str, new: str, line: int) -> None:
    made.colmap_scene(tmp_path, text=True)
    path = tmp_path / "sparse/0" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    _refused(tmp_path, f"{file}:{line}")


def _with_pose(root: Path, quat: tuple[float, ...], offset: float = 0.0) -> None:
    made.colmap_scene(root)
    for name in ("rigs.bin", "frames.bin"):
        (root / "sparse/0" / name).unlink()
    path = root / "sparse/0/images.bin"
    data = bytearray(path.read_bytes())
    struct.pack_into("<5d", data, 12, *quat, offset)
    path.write_bytes(data)


@pytest.mark.parametrize("quat", [(0, 0, 0, 0), (math.nan, 0, 0, 0), (1e200, 1e200, 0, 0)])
def test_a_quaternion_that_is_no_rotation_is_refused(tmp_path: Path, quat: tuple[float, ...]) -> None:
    _with_pose(tmp_path, quat)
    assert "quaternion" in _refused(tmp_path, "images.bin").what


@pytest.mark.parametrize("offset", [math.inf, math.nan, 1e60])
def test_a_position_that_is_not_finite_is_refused(tmp_path: Path, offset: float) -> None:
    _with_pose(tmp_path, (1, 0, 0, 0), offset)
    assert "not finite" in _refused(tmp_path, "images.bin").what


def test_a_nearly_normalised_quaternion_is_normalised(tmp_path: Path) -> None:
    _with_pose(tmp_path, (1.0005, 0, 0, 0))
    camera = read_scene(tmp_path, DataConfig()).cameras[0]
    assert abs(camera.viewmat[0, 0] - 1) < 1e-12


def test_two_images_of_one_name_are_refused(tmp_path: Path) -> None:
    made.write_images(tmp_path / "images")
    made.write_model(tmp_path / "sparse/0", made.reconstruction(image_names=["0001.png", "0002.png", "./0001.png"]))
    error = _refused(tmp_path, "images.bin")
    assert "image 1" in error.what
    assert "image 3" in error.what


@pytest.mark.parametrize("text", [False, True])
def test_random_damage_gives_an_answer_or_a_scene_error(tmp_path: Path, text: bool) -> None:
    rng, nameless = random.Random(7), 0
    folder = made.write_model(tmp_path / "sparse/0", made.reconstruction(), text)
    originals = {path: path.read_bytes() for path in folder.iterdir()}
    for _ in range(300):
        path = rng.choice(sorted(originals))
        data = bytearray(originals[path])
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(len(data))
            kind = rng.randrange(4)
            if kind == 0:
                data[at] = rng.randrange(256)
            elif kind == 1 and len(data) > 100:
                del data[at : at + rng.randrange(1, 40)]
            elif kind == 2:
                data[at:at] = bytes(rng.choice(b"0123456789 -.en\n") for _ in range(rng.randrange(1, 9)))
            else:
                data[at : at + 8] = struct.pack("<Q", rng.choice((0, 1, 2**32 - 1, 2**63, 2**64 - 1, 10**18)))
        path.write_bytes(data)
        try:
            read_colmap(tmp_path, DataConfig(), Problems(tmp_path))
        except SceneError as error:
            nameless += not error.where
        path.write_bytes(originals[path])
    assert nameless == 0


def test_pycolmap_leaves_zlib_unharmed() -> None:
    """Imported before Python's zlib, pycolmap makes the next compression abort the process."""
    code = "import splatcli.scene._pycolmap, zlib; zlib.compress(bytes(1000))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
