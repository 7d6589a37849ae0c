"""Regressions that the harnesses found: inputs that once ended in a traceback, disks that once did too much harm."""

from __future__ import annotations

import errno
import io
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import plyfile
import pytest
import torch

from splatcli.checkpoint.atomic import write_atomically
from splatcli.checkpoint.run_dir import take_lock
from splatcli.cli.commands import run as splat
from splatcli.config import DataConfig, build_config
from splatcli.errors import LockedError, ModelFileError, OutputError, SceneError, UsageError
from splatcli.formats.ply import write_ply_file
from splatcli.output_files import write_bytes
from splatcli.scene.points import read_points_ply
from splatcli.scene.read import read_scene
from tests.formats.made import read_ply
from tests.scene.made import colmap_scene, frames, lens, names, nerfstudio_scene
from tests.torture.states import small_checkpoint


def with_frame(**changes: Any) -> list[dict[str, Any]]:
    made = frames([f"images/{name}" for name in names()])
    made[3].update(changes)
    return made


@pytest.mark.parametrize(
    ("top", "said"),
    [
        ({"frames": with_frame(file_path="images/" + "9" * 300)}, "is not the name of a file"),
        ({"frames": with_frame(file_path="images/\ud800.png")}, "is not the name of a file"),
        ({"frames": with_frame(transform_matrix=[[10**400] * 4] * 4)}, "not a 4x4 matrix of numbers"),
        ({"frames": with_frame(transform_matrix=[[1e300, 0, 0, 0]] * 3)}, "not a rotation"),
        ({"fl_x": 10**400}, "fl_x is 1000"),
        ({"fl_x": 1e300}, "fl_x is 1e+300"),
        ({"fl_x": 1e-300}, "its focal length is 1e-300"),
        ({"w": 10**18}, "w is 1e+18"),
    ],
)
def test_transforms(tmp_path: Path, top: dict[str, Any], said: str) -> None:
    scene = nerfstudio_scene(tmp_path / "scene", **top)
    with pytest.raises(SceneError) as caught:
        read_scene(scene, DataConfig())
    assert said in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_transforms_with_a_number_of_thousands_of_digits(tmp_path: Path) -> None:
    scene = nerfstudio_scene(tmp_path / "scene")
    file = scene / "transforms.json"
    file.write_text(file.read_text().replace('"fl_x": 60.0', f'"fl_x": {"1" * 5000}'))
    with pytest.raises(SceneError, match="cannot be read: Exceeds the limit"):
        read_scene(scene, DataConfig())


def test_colmap_with_a_focal_length_beyond_single_precision(tmp_path: Path) -> None:
    colmap_scene(tmp_path, camera=lens(params=[1e300, 60.0, 32.0, 24.0]))
    with pytest.raises(SceneError, match=r"its focal length is 1e\+300"):
        read_scene(tmp_path, DataConfig())


@pytest.mark.parametrize(
    ("properties", "row", "said"),
    [
        (["short x", "short y", "short z"], "2147483647 0 0", "out of bounds"),
        (["list uchar float x", "float y", "float z"], "1 0 0 0", "its vertices have lists (x)"),
    ],
)
def test_points(tmp_path: Path, properties: list[str], row: str, said: str) -> None:
    lines = ["ply", "format ascii 1.0", "element vertex 1", *(f"property {p}" for p in properties), "end_header", row]
    path = tmp_path / "points.ply"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(SceneError) as caught:
        read_points_ply(path, 100)
    assert said in str(caught.value)


def test_gaussians_with_a_signalling_nan_in_double_precision(tmp_path: Path) -> None:
    path = tmp_path / "model.ply"
    write_ply_file(small_checkpoint(1, degree=0).gaussians, path)
    rows = plyfile.PlyData.read(str(path))["vertex"].data
    wide = rows.astype([(name, "f8") for name in rows.dtype.names])
    content = io.BytesIO()
    plyfile.PlyData([plyfile.PlyElement.describe(wide, "vertex")], byte_order="<").write(content)
    header, data = content.getvalue().split(b"end_header\n", 1)
    path.write_bytes(header + b"end_header\n" + struct.pack("<Q", 0x7FF0_0000_0000_0001) + data[8:])
    with pytest.raises(ModelFileError, match="NaN"):
        read_ply(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"[train]\nseed = {'1' * 5000}", "not valid TOML: Exceeds the limit"),
        (f"[save]\nsteps = {'[' * 5000}", "not valid TOML: maximum recursion depth"),
        (f"[train]\nseed = 0x{'f' * 5000}", "train.seed = a number of thousands of digits"),
        (f"[save]\nsteps = [{10**30}]", "whole numbers of up to 64 bits"),
        (f"[data]\ntest_every = {list(range(3000))}", r"test_every = \[0, 1, 2"),
    ],
)
def test_settings(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=said) as caught:
        build_config(file=file)
    assert len(str(caught.value)) < 1000
    assignment = text.replace("[", "", 1).replace("]\n", ".", 1)
    with pytest.raises(UsageError):
        build_config(assignments=[assignment])


def test_a_name_longer_than_names_can_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert splat(["info", "x" * 3000]) == 2
    said = capsys.readouterr().err
    assert "this file name is too long" in said
    assert len(said) < 1000


def test_a_name_as_long_as_names_can_be(tmp_path: Path) -> None:
    """The temporary file beside it needs a name as well; in UTF-8 each of these letters takes two bytes."""
    path = tmp_path / ("é" * 125 + ".ply")
    gaussians = small_checkpoint(3).gaussians
    write_ply_file(gaussians, path)
    assert torch.equal(read_ply(path).means, gaussians.means)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_full_disk_does_not_keep_anyone_from_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    descriptor = take_lock(tmp_path)
    with pytest.raises(LockedError):
        take_lock(tmp_path)
    os.close(descriptor)


def test_a_first_file_that_fails_leaves_nothing_and_claims_nothing(tmp_path: Path) -> None:
    def fail(_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OutputError) as caught:
        write_atomically(tmp_path / "x", fail, what="file")
    assert "kept" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no files in memory here")
def test_a_model_in_shared_memory_is_written_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "x.ply"
        write_ply_file(small_checkpoint(3, seed=1).gaussians, path)
        before = path.read_bytes()
        monkeypatch.setattr("splatcli.formats.ply.write_ply", lambda gaussians, file: file.write(b"half") and 1 / 0)
        with pytest.raises(OutputError):
            write_ply_file(small_checkpoint(3, seed=2).gaussians, path)
        assert path.read_bytes() == before


def test_a_file_without_a_name() -> None:
    with pytest.raises(OutputError, match="a folder, not a file"):
        write_bytes(Path(""), b"a contact sheet")
