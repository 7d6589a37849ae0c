"""Bad model files (rows 45 to 60): every command ends with the same code, says what is wrong, and changes nothing."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import plyfile
import pytest
import torch

from tests.bad_input.harms import Harm, both, nothing, trained
from tests.bad_input.table import QUICK, Case, Expect
from tests.checkpoint.foreign.made import activated, tables_of, write, write_gsplat, write_inria, write_ply
from tests.formats.made import store_ply

Make = Callable[[Path], Path]
TABLES = tables_of(60)


def numpy_archive(folder: Path) -> Path:
    np.savez(folder / "a.npz", means=np.zeros((4, 3)), scales=np.zeros((4, 3)))
    return folder / "a.npz"


def in_given(make: Make) -> Harm:
    """A model made in the folder ``given``."""

    def harm(folder: Path) -> None:
        (folder / "given").mkdir(exist_ok=True)
        make(folder / "given")

    return harm


def commands(path: str) -> dict[str, tuple[str, ...]]:
    """Each command that takes a model, by its name."""
    return {
        "info": ("info", path),
        "export": ("export", path, "-o", "output/out.ply"),
        "render": ("render", path, "--data", "scene", "-o", "output/pictures"),
        "train": ("train", "scene", "--init", path, "-o", "out", *QUICK),
        "eval": ("eval", path, "--data", "scene"),
    }


@dataclass(frozen=True)
class Row:
    """One bad file, for every command.

    file: its name. make: puts it into a folder. said: in the message.
    reported: info describes the file instead of refusing it, since its structure is sound.
    flag: with it the file is taken, where there is one. code: of the refusal. points: train starts from its points.
    """

    row: int
    name: str
    file: str
    make: Make
    said: str
    reported: bool = False
    flag: tuple[str, ...] = ()
    code: int = 5
    points: bool = False

    def cases(self) -> Iterator[Case]:
        path, harm = f"given/{self.file}", in_given(self.make)
        says = (self.said, "given", *self.flag[:1])
        for command, words in commands(path).items():
            if command == "train" and self.points:
                said = f"holds points, no Gaussians: --init is taken as --points {path}"
                yield Case(self.row, f"{self.name}, train", harm, 0, (said,), command=words)
                continue
            code = 0 if command == "info" and self.reported else self.code
            yield Case(self.row, f"{self.name}, {command}", harm, code, says, command=words)
            if self.flag:
                yield Case(self.row, f"{self.name}, {command} all the same", harm, 0, (), self.flag, words)
        yield Case(self.row, f"{self.name}, resume", harm, self.code, command=("resume", path))


def edited(old: str, new: str) -> Make:
    """A PLY with a change in its header."""

    def make(folder: Path) -> Path:
        path = write_ply(TABLES, folder / "a.ply")
        path.write_bytes(path.read_bytes().replace(old.encode(), new.encode(), 1))
        return path

    return make


def content(name: str, data: bytes) -> Make:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return make


def columns(edit: Callable[[dict[str, Any]], object]) -> Make:
    return lambda folder: write_ply(TABLES, folder / "a.ply", edit)


def changed(change: Callable[[bytes], bytes], kind: str = "ply") -> Make:
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


def without(*names: str) -> Make:
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


def shards_of_two_steps(folder: Path) -> Path:
    write_gsplat(TABLES, folder / "ckpt_6999_rank0.pt")
    return write_gsplat(TABLES, folder / "ckpt_6999_rank1.pt", step=7)


def few(count: int) -> Make:
    """A PLY of 0 or 1 Gaussians that no camera sees."""

    def make(folder: Path) -> Path:
        tables = TABLES._make(column[:count] for column in TABLES)
        return write_ply(tables._replace(means=torch.full((count, 3), 100.0)), folder / "a.ply")

    return make


def rewritten(rewrite: Callable[[Any, Path], None]) -> Make:
    """A sound PLY that says the same in another form; ``rewrite`` is given its rows and its path."""

    def make(folder: Path) -> Path:
        path = write_ply(TABLES, folder / "a.ply")
        rewrite(np.array(plyfile.PlyData.read(str(path))["vertex"].data), path)
        return path

    return make


def with_crlf(rows: Any, path: Path) -> None:
    head, _, body = path.read_bytes().partition(b"end_header\n")
    path.write_bytes(head.replace(b"\n", b"\r\n") + b"end_header\r\n" + body)


def as_double_with_colours(rows: Any, path: Path) -> None:
    names = list(rows.dtype.names)
    wide = np.zeros(len(rows), dtype=[("red", "u1"), *[(name, "f8") for name in names], ("confidence", "i2")])
    for name in names:
        wide[name] = rows[name]
    store_ply(wide, path)


def in_another_order(rows: Any, path: Path) -> None:
    names = list(rows.dtype.names)[::-1]
    store_ply(rows[names].astype([(name, "f4") for name in names]), path)


def with_faces(rows: Any, path: Path) -> None:
    faces = np.array([([0, 1, 2],)], dtype=[("vertex_indices", "O")])
    elements = [plyfile.PlyElement.describe(rows, "vertex"), plyfile.PlyElement.describe(faces, "face")]
    plyfile.PlyData(elements).write(str(path))


#: Forms of one PLY that are read like the plain one.
VARIANTS = {
    "ascii": rewritten(partial(store_ply, text=True)),
    "big endian": rewritten(partial(store_ply, byte_order=">")),
    "CRLF header": rewritten(with_crlf),
    "double, colours and more": rewritten(as_double_with_colours),
    "faces": rewritten(with_faces),
    "another order": rewritten(in_another_order),
}

ROWS = [
    Row(
        45,
        "not a PLY",
        "a.ply",
        content("a.ply", b"solid cube\n"),
        "neither a checkpoint nor a file of splats: it starts with b'solid cube",
    ),
    Row(45, "empty", "a.ply", content("a.ply", b""), "the file is empty (0 bytes)"),
    Row(
        45,
        "no end_header",
        "a.ply",
        content("a.ply", b"ply\nformat ascii 1.0\nelement vertex 3\n"),
        "no end_header",
    ),
    Row(46, "a trillion vertices", "a.ply", edited("vertex 60", "vertex 1000000000000"), "truncated"),
    Row(47, "fewer than none", "a.ply", edited("vertex 60", "vertex -60"), "count of 0 or more"),
    Row(48, "short", "point_cloud.ply", changed(lambda data: data[:-1]), "truncated"),
    Row(
        48,
        "trailing",
        "point_cloud.ply",
        changed(lambda data: data + b"more"),
        "4 bytes follow",
        reported=True,
        flag=("--lenient",),
    ),
    Row(
        49,
        "nan in ascii",
        "a.ply",
        ascii_nan,
        "2 NaN or infinite values in scale_0...scale_2, the first in scale_1 of vertex 7",
        reported=True,
        flag=("--drop-nonfinite",),
    ),
    Row(51, "a scale missing", "a.ply", without("scale_0", "scale_1"), "it has no scale_0, scale_1", reported=True),
    Row(
        51,
        "no opacity",
        "a.ply",
        without("opacity"),
        "no opacity; it looks like a splat export without all",
        reported=True,
    ),
    Row(
        51,
        "a point cloud",
        "a.ply",
        without(*[f"{n}_{i}" for n, k in (("scale", 3), ("rot", 4), ("f_dc", 3)) for i in range(k)], "opacity"),
        "training starts from points with splat train SCENE --points FILE",
        reported=True,
        points=True,
    ),
    Row(51, "a NumPy archive", "a.npz", numpy_archive, "it holds means.npy, scales.npy"),
    Row(51, "rgb colours", "a.ply", rgb_export, "an export with plain rgb colours", reported=True),
    Row(
        52,
        "odd f_rest",
        "a.ply",
        without("f_rest_8"),
        "8 f_rest columns; 0, 9, 24, 45 or 72 are known",
        reported=True,
    ),
    Row(53, "2DGS", "a.ply", without("scale_2"), "2D Gaussian (2DGS) model", reported=True),
    Row(
        53,
        "mip filter",
        "a.ply",
        columns(lambda c: c.update(filter_3D=c["x"])),
        "filter_3D column (Mip-Splatting)",
        reported=True,
    ),
    Row(53, "compressed", "a.compressed.ply", compressed, "a compressed PLY without the element chunk"),
    Row(54, "twice the same", "a.ply", edited("float nx", "float x"), "'x' of 'vertex' is there twice"),
    Row(
        56,
        "activated scales",
        "point_cloud.ply",
        lambda folder: write("ply", activated(tables_of(), scales=1), folder),
        "scales look already activated",
        reported=True,
        flag=("--param-space", "activated"),
    ),
    Row(
        56,
        "activated opacities",
        "chkpnt7000.pth",
        lambda folder: write("inria", activated(tables_of(), opacities=1), folder),
        "opacities look already activated",
        reported=True,
        flag=("--param-space", "activated"),
    ),
    Row(57, "truncated", "chkpnt7000.pth", changed(lambda data: data[:-500], "inria"), "truncated or extended"),
    Row(57, "flipped", "a.pth", flipped, "Bad CRC-32"),
    Row(57, "zip bomb", "a.pt", deflated, "compressed"),
    Row(57, "evil pickle", "a.pt", evil, "nothing was run"),
    Row(57, "expand bomb", "a.pt", expanded, "splats.means shows 12,000,000,000,000 bytes of a storage of 720"),
    Row(60, "a lone shard", "ckpt_6999_rank1.pt", lone_shard, "1 is missing: ckpt_6999_rank0.pt"),
    Row(
        60,
        "shards of two steps",
        "ckpt_6999_rank1.pt",
        shards_of_two_steps,
        "ckpt_6999_rank0.pt of step 6999; ckpt_6999_rank1.pt of step 7",
    ),
]

#: A checkpoint of ours, after one step.
OWN = "out/ckpts/ckpt_000001.pt"


def own(name: str, edit: Callable[[Path], object], code: int, *says: str, row: int = 57) -> Iterator[Case]:
    """Every command on a checkpoint of ours that ``edit`` damaged."""
    harm = both(trained, lambda folder: edit(folder / OWN))
    for command, words in {**commands(OWN), "resume": ("resume", OWN)}.items():
        if command != "train":  # its output is the run that the checkpoint lies in
            yield Case(row, f"{name}, {command}", harm, code, says, command=words)


def bit_flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b"PK", len(data) // 3) - 40] ^= 1
    path.write_bytes(data)


def signed(edit: Callable[[dict[str, Any], dict[str, Any]], object]) -> Callable[[Path], None]:
    """A checkpoint with another manifest and other tensors, and the digest that belongs to the manifest."""

    def rewrite(path: Path) -> None:
        stored = torch.load(path, weights_only=True)
        manifest = json.loads(stored["manifest"])
        edit(manifest, stored)
        stored["manifest"] = json.dumps(manifest)
        stored["manifest_sha256"] = hashlib.sha256(stored["manifest"].encode()).hexdigest()
        torch.save(stored, path)

    return rewrite


def as_first_version(manifest: dict[str, Any], stored: dict[str, Any]) -> None:
    manifest.update(format_version=[1, 0], min_reader=[1, 0])
    del stored["adam.rest_steps"]
    manifest["tensors"] = [spec for spec in manifest["tensors"] if spec["name"] != "adam.rest_steps"]


CASES = [
    *(case for row in ROWS for case in row.cases()),
    Case(
        52,
        "a higher degree than asked",
        in_given(lambda folder: write_ply(tables_of(60, degree=3), folder / "a.ply")),
        0,
        ("SH degree 3 -> 1: the difference is dropped",),
        command=commands("given/a.ply")["train"],
    ),
    *(
        Case(55, f"{count} Gaussians, {command}", in_given(few(count)), 0, command=commands("given/a.ply")[command])
        for count in (0, 1)
        for command in ("info", "export", "render", "eval")
    ),
    *(
        Case(55, f"{count} Gaussians, resume", in_given(few(count)), 5, command=("resume", "given/a.ply"))
        for count in (0, 1)
    ),
    Case(
        55,
        "a run from nothing",
        in_given(few(0)),
        2,
        ("no Gaussians to start from",),
        command=commands("given/a.ply")["train"],
    ),
    *own("own, truncated", lambda path: path.write_bytes(path.read_bytes()[:-500]), 5, "truncated"),
    *own("own, a bit flipped", bit_flipped, 5, "ckpt_000001.pt"),
    Case(
        58,
        "a PLY to resume",
        in_given(lambda folder: write_ply(TABLES, folder / "a.ply")),
        5,
        ("this is a PLY (no optimizer state)", "splat train SCENE --init given/a.ply"),
        command=("resume", "given/a.ply"),
    ),
    *(
        Case(
            58, f"a checkpoint for a scene, {words[0]}", trained, 3, ("is a file, not a scene's folder",), command=words
        )
        for words in (("eval", "out", "--data", OWN), ("resume", "out", "-n", "2", "--data", OWN))
    ),
    Case(
        58,
        "a checkpoint to train on",
        trained,
        2,
        ("splat resume", "--init"),
        command=("train", OWN, "-o", "output", *QUICK),
    ),
    *(
        Case(58, f"a scene for a model, {words[0]}", nothing, 2, ("holds no run",), command=words)
        for words in (("export", "scene", "-o", "output/x.ply"), ("resume", "scene"))
    ),
    *own(
        "of a newer major version",
        signed(lambda manifest, _: manifest.update(format_version=[2, 0], min_reader=[2, 0])),
        6,
        "format 2.0; this is splatcli",
        row=59,
    ),
    Case(
        59,
        "of the first version",
        both(trained, lambda folder: signed(as_first_version)(folder / OWN)),
        0,
        command=("resume", "out", "-n", "2"),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case, expect: Expect) -> None:
    expect(case)


EXPORT = commands("given/a.ply")["export"]
#: These are run by the test below.
VARIANT_CASES = [Case(50, name, in_given(variant), 0, command=EXPORT) for name, variant in VARIANTS.items()]


@pytest.mark.parametrize("case", VARIANT_CASES, ids=str)
def test_lawful_variants_hold_the_same_bits(case: Case, expect: Expect) -> None:
    expect(Case(50, "plain", in_given(lambda folder: write_ply(TABLES, folder / "a.ply")), 0, command=EXPORT))
    plain = Path("output/out.ply").read_bytes()
    assert plain.startswith(b"ply\nformat binary_little_endian 1.0\n")
    expect(case)
    assert Path("output/out.ply").read_bytes() == plain


@pytest.mark.parametrize("count", [0, 1])
def test_where_nothing_is_the_background_shows(count: int, expect: Expect) -> None:
    render = commands("given/a.ply")["render"]
    expect(Case(55, "render", in_given(few(count)), 0, command=(*render, "--background", "#204060")))
    pictures = list(Path("output/pictures").iterdir())
    assert pictures
    for picture in pictures:
        assert (imageio.imread(picture) == [0x20, 0x40, 0x60]).all()
