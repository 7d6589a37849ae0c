"""SPZ inside a GLB: found under the names of its drafts, placed by the nodes, and refused where it does not fit."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from splatcli.checkpoint.foreign.imported import Columns, Floats, ImportedModel
from splatcli.cli.commands import run
from splatcli.errors import VersionError
from splatcli.formats.format import ExportMetadata
from splatcli.formats.registry import import_model
from splatcli.formats.spz import encode_spz, encode_spz4, import_spz
from splatcli.formats.transform import half_turn, transformed
from tests.formats.made import scene
from tests.formats.made_gltf import SPZ, glb, parts_of, spz_glb
from tests.formats.test_refusals import refusal

COUNT = 50


@pytest.fixture(scope="module")
def content() -> bytes:
    return encode_spz(scene(COUNT, 2), ExportMetadata(antialiased=True)).payload


def arrays(model: ImportedModel) -> Columns[Floats]:
    return Columns(*(column.numpy() for column in model.columns))


def stored_in(content: bytes, path: Path) -> Columns[Floats]:
    """The numbers of an SPZ file as they are there."""
    path.write_bytes(content)
    return arrays(import_spz(path))


def assert_alike(found: Columns[Floats], expected: Columns[Floats]) -> None:
    for name in ("means", "scales", "opacities", "sh0", "shN"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), atol=2e-6, err_msg=name)
    aligned = np.abs((found.quats * expected.quats).sum(axis=1))  # a quaternion and its negative are one rotation
    np.testing.assert_allclose(aligned, 1, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        (SPZ, True),
        ("KHR_gaussian_splatting_compression_spz", True),
        ("KHR_gaussian_splatting_spz_compression", False),
        ("KHR_spz_gaussian_splats_compression", False),
        ("KHR_spz_compression", False),
    ],
)
def test_the_stored_numbers_are_those_of_the_mesh(content: bytes, name: str, inside: bool, tmp_path: Path) -> None:
    """With y up, as in any glTF: a PLY has them half a turn about z away."""
    (tmp_path / "a.glb").write_bytes(spz_glb(content, COUNT, name=name, inside=inside))
    found = import_model(tmp_path / "a.glb")
    assert found.origin == "glTF with SPZ version 3"
    assert found.antialiased
    assert found.notes == []
    assert_alike(arrays(found), half_turn(stored_in(content, tmp_path / "a.spz")))


def test_the_node_places_them(content: bytes, tmp_path: Path) -> None:
    """By the matrix that tiles of Cesium have, which brings z up to y up, and a shift."""
    matrix = np.array([[1.0, 0, 0, 3], [0, 0, 1, -2], [0, -1, 0, 5], [0, 0, 0, 1]])
    (tmp_path / "a.glb").write_bytes(spz_glb(content, COUNT, matrix=matrix.T.reshape(-1).tolist()))
    expected = half_turn(transformed(stored_in(content, tmp_path / "a.spz"), matrix))
    assert_alike(arrays(import_model(tmp_path / "a.glb")), expected)
    # One Gaussian by hand: (x, y, z) is at (x + 3, z - 2, 5 - y) in the scene, whose x and y a PLY reverses.
    x, y, z = stored_in(content, tmp_path / "a.spz").means[0]
    found = arrays(import_model(tmp_path / "a.glb")).means[0]
    np.testing.assert_allclose(found, [-x - 3, 2 - z, 5 - y], atol=1e-5)


def test_a_frame_that_the_spz_names_wins(content: bytes, tmp_path: Path) -> None:
    """RDF, that of a PLY: glTF's x points left and its y up, so that the file is read as the SPZ alone."""
    inside = bytearray(gzip.decompress(content))
    inside[14] |= 0x2
    named = gzip.compress(bytes(inside) + struct.pack("<III", 0xADBE0003, 4, 6))
    (tmp_path / "a.glb").write_bytes(spz_glb(named, COUNT))
    assert_alike(arrays(import_model(tmp_path / "a.glb")), stored_in(named, tmp_path / "a.spz"))


def test_version_4_is_read_too(tmp_path: Path) -> None:
    pytest.importorskip("zstandard", reason="SPZ version 4 needs splatcli[spz]")
    content = encode_spz4(scene(COUNT, 3), ExportMetadata()).payload
    (tmp_path / "a.glb").write_bytes(spz_glb(content, COUNT))
    found = import_model(tmp_path / "a.glb")
    assert found.origin == "glTF with SPZ version 4"
    assert_alike(arrays(found), half_turn(stored_in(content, tmp_path / "a.spz")))


def test_commands_take_one(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turn = Rotation.from_euler("x", -90, degrees=True).as_quat().tolist()
    (tmp_path / "a.glb").write_bytes(spz_glb(content, COUNT, rotation=turn))
    assert run(["info", str(tmp_path / "a.glb")]) == 0
    assert "glTF with SPZ version 3" in capsys.readouterr().out
    assert run(["export", str(tmp_path / "a.glb"), "-o", str(tmp_path / "b.ply")]) == 0
    assert len(import_model(tmp_path / "b.ply")) == COUNT


def base_of(document: dict[str, Any]) -> dict[str, Any]:
    base: dict[str, Any] = document["meshes"][0]["primitives"][0]["extensions"]["KHR_gaussian_splatting"]
    return base


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda d: d["bufferViews"][0].update(byteLength=10**9), "1,000,000,000 bytes from byte 0 do not lie inside"),
        (lambda d: d["bufferViews"][0].update(byteOffset=10**9), "do not lie inside"),
        (lambda d: d["bufferViews"][0].update(byteLength=100), "truncated"),
        (lambda d: d["bufferViews"][0].update(byteLength=0), "not an SPZ"),
        (lambda d: d["bufferViews"][0].update(byteOffset=8, byteLength=90), "not an SPZ"),
        (lambda d: d["bufferViews"][0].update(buffer=1), "in buffer 1, outside the file"),
        (lambda d: d["bufferViews"][0].update(extensions={"EXT_meshopt_compression": {}}), "EXT_meshopt_compression"),
        (lambda d: base_of(d)["extensions"][SPZ].update(bufferView=3), "view 3 of 1"),
        (lambda d: base_of(d)["extensions"][SPZ].update(bufferView=-1), "bufferView: "),
        (lambda d: base_of(d)["extensions"][SPZ].pop("bufferView"), "bufferView: it is missing"),
        (lambda d: base_of(d)["extensions"].update({SPZ: 3}), "the extension: "),
        (lambda d: base_of(d).update(extensions=SPZ), "stored by KHR_gaussian_splatting_compression_spz_2"),
        (lambda d: base_of(d).update(extensions={"EXT_other": {}}), "stored by EXT_other, which is not read"),
        (lambda d: base_of(d).update(kernel="cube"), "kernel is 'cube'"),
        (lambda d: d["accessors"][0].update(count=COUNT + 1), "has 50 Gaussians; POSITION has 51"),
        (lambda d: d["meshes"][0]["primitives"][0].update(mode=4), "mode 4"),
        (lambda d: d["meshes"].append(d["meshes"][0]), "2 sets of Gaussians"),
        (lambda d: d["nodes"][0].update(scale=[1, 1, 2]), "shears, or scales its axes differently"),
    ],
)
def test_what_does_not_fit_is_refused(
    content: bytes, edit: Callable[[dict[str, Any]], object], said: str, tmp_path: Path
) -> None:
    document, binary = parts_of(spz_glb(content, COUNT))
    edit(document)
    assert said in refusal(glb(document, binary), tmp_path / "x.glb").what


def test_claims_of_the_spz_inside_are_checked(content: bytes, tmp_path: Path) -> None:
    """As in an SPZ alone: a number of Gaussians that the file cannot hold, and a version that is not known."""
    inside = bytearray(gzip.decompress(content))
    struct.pack_into("<I", inside, 8, 2**32 - 1)
    found = refusal(spz_glb(gzip.compress(bytes(inside)), COUNT), tmp_path / "x.glb")
    assert "it claims 4,294,967,295 Gaussians" in found.what
    struct.pack_into("<II", inside, 4, 7, COUNT)
    assert isinstance(refusal(spz_glb(gzip.compress(bytes(inside)), COUNT), tmp_path / "x.glb"), VersionError)
