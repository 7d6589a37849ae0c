"""Damaged and hostile files of each format are refused with the reason, and allocate nothing for their claims."""

from __future__ import annotations

import gzip
import io
import json
import resource
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.spatial.transform import Rotation

from splatcli.errors import ModelFileError, SplatError, UsageError, VersionError
from splatcli.formats.format import ExportMetadata
from splatcli.formats.registry import FORMATS, import_model, newest_import
from splatcli.gaussians import Gaussians
from tests.formats.made import scene


def written(name: str, gaussians: Gaussians | None = None) -> bytes:
    known = next(known for known in FORMATS if known.name == name)
    assert known.write is not None
    made = scene(30, min(1, known.sh_degree)) if gaussians is None else gaussians
    return known.write(made, ExportMetadata()).payload


def refusal(content: bytes, path: Path, *, lenient: bool = False) -> SplatError:
    path.write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((ModelFileError, VersionError)) as caught:
        import_model(path, lenient=lenient)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # kilobytes
    assert str(path) in str(caught.value)
    error: SplatError = caught.value
    return error


def spz(edit: Callable[[bytearray], object]) -> bytes:
    inside = bytearray(gzip.decompress(written("spz")))
    edit(inside)
    return gzip.compress(bytes(inside))


def at(place: int, kind: str, value: float) -> Callable[[bytearray], object]:
    return lambda data: struct.pack_into(kind, data, place, value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (lambda: spz(at(0, "<I", 0)), "not an SPZ"),
        (lambda: spz(at(4, "<I", 99)), "SPZ version 99"),
        (lambda: spz(at(8, "<I", 31)), "truncated: 31 Gaussians"),
        (lambda: spz(at(8, "<I", 29)), "bytes follow the data"),
        (lambda: spz(at(8, "<I", 2**32 - 1)), "it claims 4,294,967,295 Gaussians"),
        (lambda: spz(at(12, "<B", 9)), "SH degree 9"),
        (lambda: spz(at(13, "<B", 99)), "99 fractional bits"),
        (lambda: spz(at(14, "<B", 0x80)), "Spark's levels of detail"),
        (lambda: written("spz")[:-3], "truncated"),
        (lambda: written("spz")[:30], "truncated"),
        (lambda: written("spz")[:-8] + bytes(8), "damaged"),
        (lambda: gzip.compress(b"hello"), "not an SPZ"),
        (lambda: b"NGSP", "not an SPZ"),
        (lambda: spz_in_frame(17), "its frame has the number 17"),
        (lambda: spz_in_frame(4, 2), "its frame has the number"),
        (lambda: spz_in_frame(9), "its frame is LFD, which programs read in two ways"),
        (lambda: gzip.compress(gzip.decompress(written("spz")) + bytes(2 << 20), 1), "more than the"),
    ],
)
def test_an_spz_that_is_none(content: Callable[[], bytes], said: str, tmp_path: Path) -> None:
    assert said in refusal(content(), tmp_path / "x.spz").what


def spz_in_frame(number: int, length: int = 4, *, four: bool = False) -> bytes:
    """An SPZ with the extension that names its frame, behind one that is not known."""
    records = struct.pack("<III", 0xADBE0002, 4, 0) + struct.pack("<III", 0xADBE0003, length, number)
    if not four:
        return spz(lambda data: (data.__setitem__(14, 2), data.extend(records)))
    pytest.importorskip("zstandard", reason="SPZ version 4 needs splatcli[spz]")
    data = bytearray(written("spz4"))
    data[14] = 2
    struct.pack_into("<I", data, 16, len(data[:32]) + len(records))
    return bytes(data[:32] + records + data[32:])


@pytest.mark.parametrize("four", [False, True])
def test_an_spz_is_read_in_the_frame_that_it_names(tmp_path: Path, *, four: bool) -> None:
    """As the library of the format does, of which the signs are: of positions, and of SH m = -1, 0, 1."""
    path = tmp_path / "x.spz"
    path.write_bytes(spz_in_frame(0, four=four))
    plain = import_model(path)
    assert plain.notes == ["ignored 1 of its extensions"]
    for number, positions, harmonics, (i, j, k) in (
        (6, (1, 1, 1), (1, 1, 1), (0, 1, 2)),  # RDF, a PLY's
        (4, (1, -1, -1), (-1, -1, 1), (0, 1, 2)),  # RUB
        (8, (1, -1, 1), (-1, 1, 1), (0, 1, 2)),  # RUF mirrors
        (12, (1, -1, 1), (1, -1, 1), (0, 2, 1)),  # RFU: y is forward, z is up
    ):
        path.write_bytes(spz_in_frame(number, four=four))
        found = import_model(path)
        assert torch.equal(found.columns.means, torch.tensor(positions) * plain.columns.means[:, [i, j, k]])
        order = [1 if number == 12 else 0, 0 if number == 12 else 1, 2]  # of the coefficients that go with y, z, x
        expected = torch.tensor(harmonics)[:, None] * plain.columns.shN[:, order]
        assert (found.columns.shN - expected).abs().max() < 1e-6, number
    quats = torch.nn.functional.normalize(plain.columns.quats, dim=1)
    turned = torch.nn.functional.normalize(found.columns.quats, dim=1)
    quarter = Rotation.from_euler("x", 90, degrees=True).as_matrix()
    for before, after in zip(quats, turned, strict=True):
        matrices = [Rotation.from_quat(q[[1, 2, 3, 0]].numpy()).as_matrix() for q in (before, after)]
        assert np.allclose(quarter @ matrices[0], matrices[1], atol=1e-5)


def spz4(edit: Callable[[bytearray], object]) -> bytes:
    data = bytearray(written("spz4"))
    edit(data)
    return bytes(data)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (at(8, "<I", 2**31), "its streams are to unpack to"),
        (at(15, "<B", 3), "3 streams"),
        (at(16, "<I", 2**31), "is said to begin at byte"),
        (at(32, "<Q", 2**62), "truncated"),
        (at(40, "<Q", 2**62), "its streams are to unpack to"),
        (lambda data: data.__setitem__(slice(-20, None), bytes(20)), "damaged"),
        (lambda data: data.extend(b"more"), "are promised"),
        (lambda data: data.__delitem__(slice(20, None)), "truncated: 20 bytes"),
    ],
)
def test_an_spz_of_version_4_that_is_none(edit: Callable[[bytearray], object], said: str, tmp_path: Path) -> None:
    pytest.importorskip("zstandard", reason="SPZ version 4 needs splatcli[spz]")
    assert said in refusal(spz4(edit), tmp_path / "x.spz").what


def sog(edit: Callable[[dict[str, bytes], dict[str, Any]], object]) -> bytes:
    with zipfile.ZipFile(io.BytesIO(written("sog"))) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    meta = json.loads(members.pop("meta.json"))
    edit(members, meta)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in {"meta.json": json.dumps(meta).encode(), **members}.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def webp(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.zeros((height, width, 4), np.uint8)).save(buffer, "WEBP", lossless=True)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda members, meta: meta.update(version=3), "SOG version 3; 1 and 2 are read"),
        (lambda members, meta: meta.pop("version"), "means.shape: it is missing"),  # of version 1, which it is then
        (lambda members, meta: meta.update(model="2dgs"), "2D Gaussian (2DGS) model"),
        (lambda members, meta: meta.update(count=0), "count: "),
        (lambda members, meta: meta.update(count=10**9), "count: "),
        (lambda members, meta: meta.update(count=10**8), "100,000,000 are needed"),
        (lambda members, meta: meta.update(count=65), "65 are needed"),
        (lambda members, meta: meta.pop("quats"), "quats: it is missing"),
        (lambda members, meta: meta["means"].update(mins=[0, 0]), "means.mins"),
        (lambda members, meta: meta["scales"].update(codebook=[0.0] * 255), "scales.codebook"),
        (lambda members, meta: meta["quats"].update(files=["../../etc/passwd"]), "quats.files"),
        (lambda members, meta: meta["quats"].update(files=["absent.webp"]), "absent.webp"),
        (lambda members, meta: meta["shN"].update(count=5), "a label of"),
        (lambda members, meta: meta["shN"].update(bands=3), "shN_centroids.webp has"),
        (lambda members, meta: meta["shN"].update(bands=4), "shN.bands"),
        (lambda members, meta: members.update({"quats.webp": members["sh0.webp"]}), "are known"),
        (lambda members, meta: members.update({"quats.webp": b"RIFF"}), "is no WebP image"),
        (lambda members, meta: members.update({"quats.webp": webp(2100, 2100)}), "it claims quats.webp"),
    ],
)
def test_a_sog_that_is_none(
    edit: Callable[[dict[str, bytes], dict[str, Any]], object], said: str, tmp_path: Path
) -> None:
    assert said in refusal(sog(edit), tmp_path / "x.sog").what


def test_a_zip_that_is_no_sog_is_refused(tmp_path: Path) -> None:
    assert "not a readable SOG" in refusal(written("sog")[:-40], tmp_path / "x.sog").what
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.webp", b"x")
    assert "without meta.json" in refusal(buffer.getvalue(), tmp_path / "x.sog").what


def zipped(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "name", "said", "remedy"),
    [
        (lambda: zipped(**{"scene.ply": written("ply")}), "x.zip", "a zip that holds 'scene.ply'", "unpack it"),
        (
            lambda: zipped(**{"a/": b"", "a/lod-meta.json": b"{}", "a/0_0/meta.json": b"{}"}),
            "x.zip",
            "streamed",
            "unpack",
        ),
        (lambda: zipped(**{"lod-meta.json": b"{}", "0_0/meta.json": b"{}"}), "x.zip", "streamed SOG", "lod-meta.json"),
        (lambda: zipped(**{"a/meta.json": b"{}", "b/meta.json": b"{}"}), "x.sog", "a zip of 2 SOGs", "one meta.json"),
        (lambda: gzip.compress(written("ply")), "x.ply.gz", "it unpacks to b'ply", "gunzip"),
        (lambda: b"version https://git-lfs.github.com/spec/v1\n".ljust(96), "x.splat", "Git LFS", "git lfs pull"),
        (lambda: b'{"asset": {"version": "2.0"}}', "x.gltf", "glTF in text, which is not read", ".glb"),
        (lambda: b"RAD0", "x.rad", "Spark's RAD", "name the file that Spark made it from"),
        (lambda: b"RAD0\x10\0\0\0{}", "renamed.bin", "Spark's RAD", "name the file that Spark made it from"),
        (lambda: b'{"version": "5.0"}', "x.lcc", "XGRIDS' LCC", "splat-transform"),
        (lambda: b'{"version": "5.0"}', "x.LCC2", "XGRIDS' LCC", "splat-transform"),
        (lambda: b'{"asset": {"version": "1.1"}, "root": {}}', "tileset.json", "3D Tiles", "one of its tiles"),
        (lambda: b"\x01\x00\x00\x00", "x.psht", "a project of Postshot", "export the splats from Postshot as a PLY"),
    ],
)
def test_a_file_that_holds_or_names_another_is_refused_with_the_way_to_it(
    content: Callable[[], bytes], name: str, said: str, remedy: str, tmp_path: Path
) -> None:
    found = refusal(content(), tmp_path / name)
    assert said in found.what
    assert remedy in (found.remedy or "")


def test_the_folder_of_an_lcc_scene_is_named(tmp_path: Path) -> None:
    for name in ("meta.lcc", "data.bin", "index.bin"):
        (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(ModelFileError, match="XGRIDS' LCC") as caught:
        newest_import(tmp_path)
    assert caught.value.where == str(tmp_path / "meta.lcc")
    assert "splat-transform" in (caught.value.remedy or "")
    (tmp_path / "index.bin").unlink()  # then it is some folder
    assert newest_import(tmp_path) is None


def test_a_sog_is_read_from_a_zip_of_its_folder(tmp_path: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(written("sog"))) as archive:
        members = {f"a/{name}": archive.read(name) for name in archive.namelist()}
    (tmp_path / "x.zip").write_bytes(zipped(**{"a/": b"", "__MACOSX/a/meta.json": b"x"}, **members))
    assert len(import_model(tmp_path / "x.zip")) == 30


def test_a_compressed_ply_with_impossible_claims_is_refused(tmp_path: Path) -> None:
    whole = written("compressed.ply")
    for old, new, said in (
        (b"vertex 30", b"vertex 999999999", "truncated"),
        (b"element sh 30", b"element sh 29", "bytes follow"),
        (b"uint packed_scale", b"float packed_scale", "has no packed_scale"),
        (b"float max_scale_z", b"float mux_scale_z", "has no max_scale_z"),
        (b"float max_b", b"float mux_b", "some of the ranges"),
        (b"f_rest_8", b"f_rest_9", "columns"),
        (b"binary_little_endian", b"binary_big_endian", "binary_big_endian"),
    ):
        assert old in whole
        assert said in refusal(whole.replace(old, new), tmp_path / "x.ply").what, new
    few = whole.replace(b"element chunk 1", b"element chunk 0")
    assert "0 chunks of 256 cannot hold 30" in refusal(few, tmp_path / "x.ply", lenient=True).what


def test_a_splat_file_of_another_length_is_refused_or_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "x.splat"
    assert "no multiple of the 32" in refusal(written("splat") + b"abc", path).what
    stored = import_model(path, lenient=True)
    assert len(stored) == 30
    assert stored.notes == ["ignored 3 bytes behind the data"]
    negative = bytearray(written("splat"))
    struct.pack_into("<f", negative, 32 * 4 + 12, -1.0)
    assert "the scales of Gaussian 4" in refusal(bytes(negative), path).what
    infinite = bytearray(written("splat"))
    struct.pack_into("<f", infinite, 0, float("inf"))
    path.write_bytes(infinite)
    assert import_model(path).nonfinite() == ["1 NaN or infinite values in means, the first at [0, 0]"]


def test_what_does_not_fit_a_format_is_reported() -> None:
    gaussians = scene(30, 1)
    gaussians.means[3] = 3000.0
    gaussians.log_scales[2, 1] = -12.0
    gaussians.shN[5, 0, 0] = 2.0
    gaussians.sh0[6, 1] = -9.0
    known = {known.name: known for known in FORMATS}
    spz_writer, ply_writer, splat_writer = (known[name].write for name in ("spz", "compressed.ply", "splat"))
    assert spz_writer is not None
    assert splat_writer is not None
    assert ply_writer is not None
    notes = "\n".join(spz_writer(gaussians, ExportMetadata()).notes)
    for said in ("1 log-scales", "1 SH coefficients", "1 colours", "steps of 0.000488281"):
        assert said in notes
    gaussians.shN[5, 0, 0] = 5.0
    gaussians.log_scales[7, 2] = 21.0
    assert ply_writer(gaussians, ExportMetadata()).notes == [
        "clamped 1 log-scales beyond 20, the range of a compressed PLY",
        "clamped 1 SH coefficients beyond 4, the range of a compressed PLY",
    ]
    gaussians.sh0.clamp_(-1.77, 1.77)  # within 0 to 1, as far as bytes tell
    gaussians.sh0[6, :2] = 1.9
    assert splat_writer(gaussians, ExportMetadata()).notes == [
        "clamped 2 colours outside 0 to 1, the range of a .splat file"
    ]
    gaussians.means[3] = 1e9
    with pytest.raises(UsageError, match="beyond the 8,388,607 units"):
        spz_writer(gaussians, ExportMetadata())


def test_a_checksum_is_kept(tmp_path: Path) -> None:
    """One flipped bit anywhere in the compressed data of an SPZ is noticed."""
    whole = written("spz")
    for place in range(12, len(whole), 97):
        flipped = bytearray(whole)
        flipped[place] ^= 1
        (tmp_path / "x.spz").write_bytes(flipped)
        with pytest.raises((ModelFileError, VersionError)):
            import_model(tmp_path / "x.spz")
    assert zlib.crc32(gzip.decompress(whole)) == struct.unpack_from("<I", whole, len(whole) - 8)[0]


@pytest.mark.parametrize("name", ["ply", "compressed.ply"])
def test_a_ply_of_discs_with_a_third_scale_is_refused_by_its_comment(name: str, tmp_path: Path) -> None:
    """splat-transform writes the comment, and a compressed PLY has three scales always."""
    writer = next(known for known in FORMATS if known.name == name).write
    assert writer is not None
    content = writer(scene(9, 0), ExportMetadata(["SplatRenderMode: 2dgs"])).payload
    assert "2D Gaussian (2DGS) model" in refusal(content, tmp_path / "x.ply").what
