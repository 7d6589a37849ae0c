"""Readers of scenes in other packages: found by what a folder holds, or by --format; named when they do not work."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from splatcli.config import DataConfig
from splatcli.errors import UsageError
from splatcli.plugins import READERS
from splatcli.scene.read import has_images_only, read_scene
from tests.forked import splat_command
from tests.plugin_packages import install
from tests.scene import made

POINT = {READERS: {"csvposes": "splat_csv:READER"}}
#: Image names, intrinsics and the twelve numbers of a camera's pose, a line each.
READER = """
import csv
from pathlib import Path

import numpy as np
import pycolmap

from splatcli.config import DataConfig
from splatcli.scene.source import FixedLens, Problems, Reader, SceneSource, View


def read(root: Path, data: DataConfig, problems: Problems) -> SceneSource:
    file, views = root / "poses.csv", []
    for number, (name, *rest) in enumerate(csv.reader(file.read_text().splitlines()), 1):
        width, height, fx, fy, cx, cy, *pose = map(float, rest)
        size = {"width": int(width), "height": int(height)}
        camera = pycolmap.Camera(model="PINHOLE", params=[fx, fy, cx, cy], **size)
        viewmat = np.vstack([np.reshape(pose, (3, 4)), [0, 0, 0, 1]])
        label = f"line {number} {name!r}"
        views.append(View(name, FixedLens(file, label, camera), viewmat, label))
    return SceneSource(root, file, views, image_folders=[root / "pictures"])


READER = Reader("csvposes", "poses.csv", lambda root: (root / "poses.csv").is_file(), read)
"""


@pytest.fixture
def scene(tmp_path: Path) -> Path:
    root = tmp_path / "scene"
    made.write_images(root / "pictures")
    lines = []
    for i, name in enumerate(made.names()):
        numbers = [made.WIDTH, made.HEIGHT, 60.0, 61.0, 32.0, 24.0, *made.w2c(i)[:3].ravel()]
        lines.append(",".join([name, *map(str, numbers)]))
    (root / "poses.csv").write_text("\n".join(lines))
    return root


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on sys.path."""
    for name in ("splat_csv", "splat_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.mark.parametrize("name", [None, "csvposes"])
def test_a_folder_is_read_by_the_reader_of_another_package(place: Path, scene: Path, name: str | None) -> None:
    install(place, "splat_csv", READER, POINT)
    read = read_scene(scene, DataConfig(format=name))
    assert read.kind == "csvposes"
    assert [camera.name for camera in read.cameras] == made.names()
    np.testing.assert_allclose(read.cameras[3].viewmat, made.w2c(3), atol=1e-12)
    np.testing.assert_array_equal(read.images.load(3), made.picture(3))
    assert not has_images_only(scene)


def test_own_readers_come_first_and_import_no_other(place: Path, scene: Path) -> None:
    install(place, "splat_csv", READER, POINT)
    made.write_model(scene / "sparse/0", made.reconstruction())
    assert read_scene(scene, DataConfig(images="pictures")).kind == "colmap"
    assert "splat_csv" not in sys.modules
    assert read_scene(scene, DataConfig(format="csvposes")).kind == "csvposes"


def test_an_unknown_format_lists_what_exists(place: Path, scene: Path) -> None:
    install(place, "splat_csv", READER, POINT)
    with pytest.raises(UsageError, match=r"no format 'bundler'.*\n.*colmap, blender, nerfstudio, .*, csvposes"):
        read_scene(scene, DataConfig(format="bundler"))


@pytest.mark.parametrize(
    ("module", "fault"),
    [
        ("READER = 5", "5 is no splatcli.scene.source.Reader"),
        (READER.replace("return SceneSource", "return 5 or SceneSource"), "int, not SceneSource"),
        (
            READER.replace("csv.reader(file.read_text().splitlines())", "[('a', '1')]"),
            "ValueError: not enough values to unpack",
        ),
    ],
)
def test_a_broken_reader_is_named_with_its_package(place: Path, scene: Path, module: str, fault: str) -> None:
    install(place, "splat_broken", module, {READERS: {"broken": "splat_broken:READER"}})
    with pytest.raises(UsageError, match=fault) as caught:
        read_scene(scene, DataConfig(format="broken"))
    assert caught.value.where == "splat_broken (splatcli.readers: broken = splat_broken:READER)"


def test_a_broken_reader_keeps_no_other_from_its_scene(
    place: Path, scene: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install(place, "splat_broken", "import nowhere_at_all", {READERS: {"broken": "splat_broken:READER"}})
    install(place, "splat_csv", READER, POINT)
    with caplog.at_level(logging.WARNING):
        assert read_scene(scene, DataConfig()).kind == "csvposes"
    assert "No module named 'nowhere_at_all'" in caplog.text


def test_splat_trains_on_such_a_scene(place: Path, scene: Path, tmp_path: Path) -> None:
    """In a process of its own, as a user would: only the installed package makes the folder a scene."""
    install(place, "splat_csv", READER, POINT)
    command = [*splat_command(), "train", str(scene), "-o", str(tmp_path / "run"), "--iterations", "2"]
    command += ["--device", "cpu", "--init", "random", "--json"]
    repository = Path(__file__).resolve().parents[2]
    for paths, code in (([repository, place], 0), ([repository], 3)):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == code, done.stderr
        command[command.index("-o") + 1] = str(tmp_path / "other")
    assert (tmp_path / "run").is_dir()
    assert "poses.csv" not in done.stderr
