"""Bad model files, a row each: every command ends with the same code, says what is wrong, and writes nothing."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import plyfile
import pytest
import torch

from tests.checkpoint.foreign.made import activated, tables_of, write, write_gsplat, write_inria, write_ply
from tests.running import Done

Splat = Callable[..., Done]
COMMANDS = ("info", "export", "render", "train", "eval")
TABLES = tables_of(60)


@dataclass(frozen=True)
class Row:
    """make: puts the file into a folder. said: in the message. flag: with it the file is taken, where there is one.

    told: info describes the file instead of refusing it, since its structure is sound.
    """

    name: str
    make: Callable[[Path], Path]
    said: str
    told: bool = False
    flag: list[str] = field(default_factory=list)


def edited(old: str, new: str) -> Callable[[Path], Path]:
    """A PLY with a change in its header."""

    def make(folder: Path) -> Path:
        path = write_ply(TABLES, folder / "a.ply")
        path.write_bytes(path.read_bytes().replace(old.encode(), new.encode(), 1))
        return path

    return make


def content(name: str, data: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return make


def columns(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], Path]:
    return lambda folder: write_ply(TABLES, folder / "a.ply", edit)


def changed(change: Callable[[bytes], bytes], kind: str = "ply") -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = write(kind, TABLES, folder)
        path.write_bytes(change(path.read_bytes()))
        return path

    return make


def ascii_nan(folder: Path) -> Path:
    path = write_ply(TABLES, folder / "a.ply")
    rows = np.array(plyfile.PlyData.read(str(path))["vertex"].data)
    rows["scale_1"][[7, 9]] = np.nan
    plyfile.PlyData([plyfile.PlyElement.describe(rows, "vertex")], text=True).write(str(path))
    return path


def flipped(folder: Path) -> Path:
    path = write_inria(TABLES, folder / "a.pth")
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda member: member.file_size)
        place = path.read_bytes().index(archive.read(largest))
    damaged = bytearray(path.read_bytes())
    damaged[place + 100] ^= 1
    path.write_bytes(damaged)
    return path


def deflated(folder: Path) -> Path:
    path = write_gsplat(TABLES, folder / "a.pt")
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression=zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def evil(folder: Path) -> Path:
    torch.save({"step": 1, "splats": {"means": Evil(folder / "was_run")}}, folder / "a.pt")
    return folder / "a.pt"


def expanded(folder: Path) -> Path:
    def expand(stored: dict[str, Any]) -> None:
        stored["splats"] = {
            name: table[:1].expand(10**12, *table.shape[1:]) for name, table in stored["splats"].items()
        }

    return write_gsplat(TABLES, folder / "a.pt", expand)


def lone_shard(folder: Path) -> Path:
    return write_gsplat(TABLES, folder / "ckpt_6999_rank1.pt")


def without(*names: str) -> Callable[[Path], Path]:
    return columns(lambda found: [found.pop(name) for name in names])


def rgb_export(folder: Path) -> Path:
    def edit(found: dict[str, Any]) -> None:
        for i, name in enumerate(("red", "green", "blue")):
            del found[f"f_dc_{i}"]
            found[name] = np.zeros(60, np.uint8)

    return write_ply(TABLES, folder / "a.ply", edit)


def compressed(folder: Path) -> Path:
    rows = np.zeros(60, dtype=[(f"packed_{name}", "u4") for name in ("position", "rotation", "scale", "color")])
    plyfile.PlyData([plyfile.PlyElement.describe(rows, "vertex")]).write(str(folder / "a.compressed.ply"))
    return folder / "a.compressed.ply"


ROWS = [
    Row(
        "45 not a PLY", content("a.ply", b"solid cube\n"), "neither a checkpoint nor a PLY: it starts with b'solid cube"
    ),
    Row("45 empty", content("a.ply", b""), "the file is empty (0 bytes)"),
    Row("45 no end_header", content("a.ply", b"ply\nformat ascii 1.0\nelement vertex 3\n"), "no end_header"),
    Row("46 a trillion vertices", edited("vertex 60", "vertex 1000000000000"), "truncated"),
    Row("47 fewer than none", edited("vertex 60", "vertex -60"), "count of 0 or more"),
    Row("48 short", changed(lambda data: data[:-1]), "truncated"),
    Row("48 trailing", changed(lambda data: data + b"more"), "4 bytes follow", told=True, flag=["--lenient"]),
    Row(
        "49 nan in ascii",
        ascii_nan,
        "2 NaN or infinite values in scale_0...scale_2, the first in scale_1 of vertex 7",
        told=True,
        flag=["--drop-nonfinite"],
    ),
    Row("51 a scale missing", without("scale_0", "scale_1"), "it has no scale_0, scale_1", told=True),
    Row("51 no opacity", without("opacity"), "no opacity; it looks like a splat export without all", told=True),
    Row(
        "51 a point cloud",
        without(*[f"{n}_{i}" for n, k in (("scale", 3), ("rot", 4), ("f_dc", 3)) for i in range(k)], "opacity"),
        "it looks like a point cloud",
        told=True,
    ),
    Row("51 rgb colours", rgb_export, "an export with plain rgb colours", told=True),
    Row("52 odd f_rest", without("f_rest_8"), "8 f_rest columns; 0, 9, 24, 45 or 72 are known", told=True),
    Row("53 2DGS", without("scale_2"), "2D Gaussian (2DGS) model", told=True),
    Row("53 mip filter", columns(lambda c: c.update(filter_3D=c["x"])), "filter_3D column (Mip-Splatting)", told=True),
    Row("53 compressed", compressed, "PlayCanvas compressed PLY", told=True),
    Row("54 twice the same", edited("float nx", "float x"), "'x' of 'vertex' is there twice"),
    Row(
        "56 activated scales",
        lambda folder: write("ply", activated(tables_of(), scales=1), folder),
        "scales look already activated",
        told=True,
        flag=["--param-space", "activated"],
    ),
    Row(
        "56 activated opacities",
        lambda folder: write("inria", activated(tables_of(), opacities=1), folder),
        "opacities look already activated",
        told=True,
        flag=["--param-space", "activated"],
    ),
    Row("57 truncated", changed(lambda data: data[:-500], "inria"), "truncated or extended"),
    Row("57 flipped", flipped, "Bad CRC-32"),
    Row("57 zip bomb", deflated, "compressed"),
    Row("57 evil pickle", evil, "nothing was run"),
    Row("57 expand bomb", expanded, "splats.means shows 12,000,000,000,000 bytes of a storage of 720"),
    Row("60 a lone shard", lone_shard, "1 are missing: ckpt_6999_rank0.pt"),
]


@pytest.fixture(scope="session")
def cameras(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from splatcli.cli.boundary import run

    path = tmp_path_factory.mktemp("cameras") / "cameras.json"
    assert run(["export", str(finished_run), "-o", str(path), "-q"]) == 0
    return path


def command_line(command: str, path: Path, scene: Path, cameras: Path, out: Path) -> list[object]:
    return {
        "info": ["info", path],
        "export": ["export", path, "-o", out / "out.ply"],
        "render": ["render", path, "--views", cameras, "-o", out / "pictures"],
        "train": ["train", scene, "--init", path, "-o", out / "run", "--stop-at", 1, "--sh-degree", 1],
        "eval": ["eval", path, "--data", scene],
    }[command]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_bad_model_is_refused_by_every_command(
    row: Row, splat: Splat, tiny_scene: Path, cameras: Path, tmp_path: Path
) -> None:
    given, out = tmp_path / "given", tmp_path / "out"
    given.mkdir()
    path = row.make(given)
    before = {entry: entry.read_bytes() for entry in given.iterdir()}
    for command in COMMANDS:
        words = command_line(command, path, tiny_scene, cameras, out)
        done = splat(*words)
        text = done.out if command == "info" and row.told else done.err
        assert done.code == (0 if command == "info" and row.told else 5), (command, done.err)
        assert row.said in text, command
        assert str(path.parent) in text
        assert "Traceback" not in done.err
        assert not out.exists()
        if row.flag:
            assert row.flag[0] in text, command
            assert splat(*words, *row.flag).code == 0, command
            out.rename(tmp_path / f"taken by {command}") if out.exists() else None
    done = splat("resume", path)
    assert done.code == 5
    assert "Traceback" not in done.err
    assert {entry: entry.read_bytes() for entry in given.iterdir()} == before


def as_ascii(rows: Any, path: Path) -> None:
    plyfile.PlyData([plyfile.PlyElement.describe(rows, "vertex")], text=True).write(str(path))


def as_big_endian(rows: Any, path: Path) -> None:
    plyfile.PlyData([plyfile.PlyElement.describe(rows, "vertex")], byte_order=">").write(str(path))


def with_crlf(rows: Any, path: Path) -> None:
    head, _, body = path.read_bytes().partition(b"end_header\n")
    path.write_bytes(head.replace(b"\n", b"\r\n") + b"end_header\r\n" + body)


def as_double_with_colours(rows: Any, path: Path) -> None:
    names = list(rows.dtype.names)
    wide = np.zeros(len(rows), dtype=[("red", "u1"), *[(name, "f8") for name in names], ("confidence", "i2")])
    for name in names:
        wide[name] = rows[name]
    plyfile.PlyData([plyfile.PlyElement.describe(wide, "vertex")]).write(str(path))


def with_faces(rows: Any, path: Path) -> None:
    faces = np.array([([0, 1, 2],)], dtype=[("vertex_indices", "O")])
    elements = [plyfile.PlyElement.describe(rows, "vertex"), plyfile.PlyElement.describe(faces, "face")]
    plyfile.PlyData(elements).write(str(path))


@pytest.mark.parametrize("variant", [as_ascii, as_big_endian, with_crlf, as_double_with_colours, with_faces])
def test_50_lawful_variants_are_taken_and_written_plain(
    variant: Callable[[Any, Path], None], splat: Splat, tmp_path: Path
) -> None:
    path = write_ply(TABLES, tmp_path / "a.ply")
    assert splat("export", path, "-o", tmp_path / "plain.ply").code == 0
    variant(np.array(plyfile.PlyData.read(str(path))["vertex"].data), path)
    done = splat("export", path, "-o", tmp_path / "out.ply")
    assert done.code == 0, done.err
    assert (tmp_path / "out.ply").read_bytes() == (tmp_path / "plain.ply").read_bytes()
    assert (tmp_path / "out.ply").read_bytes().startswith(b"ply\nformat binary_little_endian 1.0\n")


def test_52_a_higher_degree_than_asked_is_cut_with_a_note(splat: Splat, tiny_scene: Path, tmp_path: Path) -> None:
    path = write_ply(tables_of(60, degree=3), tmp_path / "a.ply")
    done = splat("train", tiny_scene, "--init", path, "--sh-degree", 1, "-o", tmp_path / "run", "--stop-at", 1)
    assert done.code == 0
    assert "SH degree 3 -> 1: the difference is dropped" in done.err


@pytest.mark.parametrize("count", [0, 1])
def test_55_nothing_and_a_single_gaussian_are_shown_and_exported(
    count: int, splat: Splat, cameras: Path, tmp_path: Path
) -> None:
    tables = tables_of(60).parts([count, 60 - count])[0]
    path = write_ply(tables._replace(means=torch.full((count, 3), 100.0)), tmp_path / "a.ply")  # out of sight
    done = splat("render", path, "--views", cameras, "-o", tmp_path / "a", "--background", "#204060")
    assert done.code == 0
    for line in done.lines:
        assert (imageio.imread(line) == [0x20, 0x40, 0x60]).all()
    assert splat("export", path, "-o", tmp_path / "out.ply").code == 0
    assert splat("info", path).code == 0
    assert splat("resume", path).code == 5


def test_55_a_run_cannot_start_from_nothing(splat: Splat, tiny_scene: Path, tmp_path: Path) -> None:
    path = write_ply(tables_of(0), tmp_path / "a.ply")
    done = splat("train", tiny_scene, "--init", path, "-o", tmp_path / "run", "--stop-at", 1)
    assert done.code == 2
    assert "no Gaussians to start from" in done.err


def test_58_a_ply_to_resume_is_told_the_way_round(splat: Splat, tmp_path: Path) -> None:
    path = write_ply(TABLES, tmp_path / "a.ply")
    done = splat("resume", path)
    assert done.code == 5
    assert "this is a PLY (no optimizer state)" in done.err
    assert f"splat train SCENE --init {path}" in done.err


def test_58_a_checkpoint_where_a_scene_is_wanted(splat: Splat, finished_run: Path) -> None:
    latest = finished_run / "ckpts" / "ckpt_000040.pt"
    for words in (["eval", finished_run, "--data", latest], ["resume", finished_run, "-n", 50, "--data", latest]):
        done = splat(*words)
        assert done.code == 3
        assert "is a file, not a scene's folder" in done.err


def test_58_a_folder_where_a_file_is_wanted(splat: Splat, tiny_scene: Path, tmp_path: Path) -> None:
    for words in (["export", tiny_scene, "-o", tmp_path / "x.ply"], ["resume", tiny_scene]):
        done = splat(*words)
        assert done.code == 2
        assert "holds no run" in done.err


def test_60_shards_of_different_steps_are_listed(splat: Splat, tmp_path: Path) -> None:
    write_gsplat(TABLES, tmp_path / "ckpt_6999_rank0.pt")
    path = write_gsplat(TABLES, tmp_path / "ckpt_6999_rank1.pt", step=7)
    done = splat("export", path, "-o", tmp_path / "x.ply")
    assert done.code == 5
    assert "ckpt_6999_rank0.pt of step 6999; ckpt_6999_rank1.pt of step 7" in done.err
