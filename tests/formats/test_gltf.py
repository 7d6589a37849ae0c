"""GLB: what KHR_gaussian_splatting asks for is there, and what it does not allow is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from splatcli.checkpoint.foreign.imported import Columns
from splatcli.errors import ModelFileError
from splatcli.formats.format import ExportMetadata
from splatcli.formats.gltf import encode_gltf, import_gltf
from splatcli.formats.transform import half_turn, transformed
from tests.formats.made import scene
from tests.formats.made_gltf import glb, parts_of

PREFIX = "KHR_gaussian_splatting:"


@pytest.fixture
def good() -> bytes:
    return encode_gltf(scene(20, 2), ExportMetadata(comments=["add 1 2 3"])).payload


def test_the_layout_is_the_extensions(good: bytes) -> None:
    document, binary = parts_of(good)
    assert document["extensionsUsed"] == ["KHR_gaussian_splatting"]
    (primitive,) = document["meshes"][0]["primitives"]
    assert primitive["mode"] == 0
    reported = primitive["extensions"]["KHR_gaussian_splatting"]
    assert (reported["kernel"], reported["colorSpace"]) == ("ellipse", "srgb_rec709_display")
    bands = [f"{PREFIX}SH_DEGREE_{d}_COEF_{n}" for d in range(3) for n in range(2 * d + 1)]
    assert set(primitive["attributes"]) == {
        *("POSITION", "COLOR_0", f"{PREFIX}ROTATION", f"{PREFIX}SCALE", f"{PREFIX}OPACITY", *bands)
    }

    def table(name: str) -> np.ndarray:
        accessor = document["accessors"][primitive["attributes"][name]]
        view = document["bufferViews"][accessor["bufferView"]]
        return np.frombuffer(binary[view["byteOffset"] : view["byteOffset"] + view["byteLength"]], "<f4")

    np.testing.assert_allclose(np.linalg.norm(table(f"{PREFIX}ROTATION").reshape(-1, 4), axis=1), 1, atol=1e-6)
    assert (table(f"{PREFIX}SCALE") > 0).all()
    assert ((table(f"{PREFIX}OPACITY") >= 0) & (table(f"{PREFIX}OPACITY") <= 1)).all()
    position = document["accessors"][primitive["attributes"]["POSITION"]]
    means = scene(20, 2).means.numpy() * [-1, -1, 1]
    np.testing.assert_allclose(position["min"], means.min(axis=0))
    np.testing.assert_allclose(position["max"], means.max(axis=0))
    assert len(good) % 4 == 0
    assert all(view["byteOffset"] % 4 == 0 for view in document["bufferViews"])


def test_pygltflib_reads_it(good: bytes, tmp_path: Path) -> None:
    pygltflib = pytest.importorskip("pygltflib", reason="pygltflib is not installed")
    (tmp_path / "a.glb").write_bytes(good)
    found = pygltflib.GLTF2().load(str(tmp_path / "a.glb"))
    accessor = found.accessors[found.meshes[0].primitives[0].attributes.POSITION]
    assert accessor.count == 20
    found.save(str(tmp_path / "b.glb"))
    a, b = (import_gltf(tmp_path / name) for name in ("a.glb", "b.glb"))
    for x, y in zip(a.columns, b.columns, strict=True):
        assert x.numpy().tobytes() == y.numpy().tobytes()


def accessor_of(document: dict[str, Any], name: str) -> dict[str, Any]:
    return document["accessors"][document["meshes"][0]["primitives"][0]["attributes"][name]]


def extension_of(document: dict[str, Any]) -> dict[str, Any]:
    return document["meshes"][0]["primitives"][0]["extensions"]["KHR_gaussian_splatting"]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda d: accessor_of(d, "POSITION").update(count=10**9), "do not lie inside"),
        (lambda d: accessor_of(d, "POSITION").update(count=19), "POSITION has 19"),
        (lambda d: accessor_of(d, "POSITION").update(byteOffset=8), "do not lie inside"),
        (lambda d: accessor_of(d, "POSITION").update(bufferView=99), "view 99 of"),
        (lambda d: accessor_of(d, "POSITION").update(componentType=5125), "normalised integers"),
        (lambda d: accessor_of(d, "POSITION").update(type="VEC4"), "VEC4"),
        (lambda d: accessor_of(d, "POSITION").update(sparse={}), "sparse"),
        (lambda d: accessor_of(d, "POSITION").pop("bufferView"), "not in a view of the file"),
        (lambda d: d["bufferViews"][0].update(buffer=1), "in buffer 1, outside the file"),
        (lambda d: d["bufferViews"][0].update(extensions={"EXT_meshopt_compression": {}}), "EXT_meshopt_compression"),
        (lambda d: extension_of(d).update(extensions={"KHR_gaussian_splatting_compression_other": {}}), "_other"),
        (lambda d: extension_of(d).pop("kernel"), "kernel is 'None'"),
        (lambda d: d["bufferViews"][0].update(byteOffset=-4), "byteOffset"),
        (lambda d: d["bufferViews"][0].update(byteLength=10**6), "do not lie inside"),
        (lambda d: d["meshes"][0]["primitives"][0].update(mode=4), "mode 4"),
        (lambda d: d["meshes"][0]["primitives"][0].update(extensions={}), "no Gaussians"),
        (lambda d: d["meshes"].append(d["meshes"][0]), "2 sets of Gaussians"),
        (lambda d: d["meshes"][0]["primitives"][0]["attributes"].pop(f"{PREFIX}SCALE"), "have no KHR"),
        (lambda d: d["meshes"][0]["primitives"][0]["attributes"].pop(f"{PREFIX}SH_DEGREE_2_COEF_3"), "DEGREE_2_COEF_3"),
        (lambda d: d["nodes"][0].update(scale=[1, 1, 2]), "shears, or scales its axes differently"),
        (lambda d: d["nodes"][0].update(scale=[-1, 1, 1]), "mirrors"),
        (lambda d: d["nodes"][0].update(rotation=[0, 0, 0, 0]), "node 0: "),
        (lambda d: d["nodes"][0].update(children=[0]), "node 0 hangs under itself"),
        (lambda d: d["nodes"][0].update(children=[7]), "child 7, which there is not"),
        (lambda d: d["nodes"][0].update(matrix=[1.0]), "matrix"),
        (lambda d: d["nodes"].append({"mesh": 0}), "2 nodes show the Gaussians"),
        (lambda d: d.update(accessors=3), "accessors"),
    ],
)
def test_what_does_not_fit_is_refused(
    good: bytes, edit: Callable[[dict[str, Any]], object], said: str, tmp_path: Path
) -> None:
    document, binary = parts_of(good)
    edit(document)
    (tmp_path / "a.glb").write_bytes(glb(document, binary))
    with pytest.raises(ModelFileError, match=said):
        import_gltf(tmp_path / "a.glb")


@pytest.mark.parametrize("as_matrix", [False, True])
def test_gaussians_are_where_the_nodes_show_them(good: bytes, as_matrix: bool, tmp_path: Path) -> None:
    """A node under another: both transforms count, the parent's last, and harmonics turn along."""
    document, binary = parts_of(good)
    child = {"mesh": 0, "translation": [1, 2, 3], "rotation": [0, 0, 0.6, 0.8], "scale": [2, 2, 2]}
    parent = {"children": [0], "translation": [0, 5, 0], "rotation": [0.5, 0.5, 0.5, 0.5]}
    matrices = []
    for reported in (parent, child):
        matrix = np.eye(4)
        matrix[:3, :3] = Rotation.from_quat(reported["rotation"]).as_matrix() * np.array(reported.get("scale", 1))
        matrix[:3, 3] = reported["translation"]
        matrices.append(matrix)
    nodes = [child, parent]
    if as_matrix:
        nodes = [{"mesh": 0, "matrix": matrices[1].T.reshape(-1).tolist()}, {"children": [0]}]
        nodes[1]["matrix"] = matrices[0].T.reshape(-1).tolist()
    document["nodes"] = nodes
    (tmp_path / "a.glb").write_bytes(glb(document, binary))
    found, still = import_gltf(tmp_path / "a.glb").columns, scene(20, 2)
    columns = Columns(
        *(getattr(still, name).numpy() for name in ("means", "quats", "log_scales", "logit_opacities", "sh0", "shN"))
    )
    expected = half_turn(transformed(half_turn(columns), matrices[0] @ matrices[1]))
    np.testing.assert_allclose(found.means, expected.means, atol=1e-5)
    np.testing.assert_allclose(found.shN, expected.shN, atol=1e-5)
    np.testing.assert_allclose(found.scales, expected.scales, atol=1e-5)


@pytest.mark.parametrize(("version", "turned"), [("1.10.1", False), ("2.3.1", True)])
def test_what_older_versions_of_splat_transform_wrote_is_read(version: str, turned: bool, tmp_path: Path) -> None:
    """Logarithms of scales, quaternions of any length, and before version 2 the axes of a PLY."""
    gaussians = scene(20, 2)
    before = Columns.of(gaussians)
    columns = half_turn(before) if turned else before
    document, binary = parts_of(encode_gltf(gaussians, ExportMetadata()).payload)
    content = bytearray(binary)
    for name, values in (
        ("POSITION", columns.means),
        (f"{PREFIX}ROTATION", columns.quats[:, [1, 2, 3, 0]]),
        (f"{PREFIX}SCALE", columns.scales),
        *((f"{PREFIX}SH_DEGREE_1_COEF_{place}", columns.shN[:, place]) for place in range(3)),
        *((f"{PREFIX}SH_DEGREE_2_COEF_{place}", columns.shN[:, 3 + place]) for place in range(5)),
    ):
        accessor = document["accessors"][document["meshes"][0]["primitives"][0]["attributes"][name]]
        start = document["bufferViews"][accessor["bufferView"]]["byteOffset"]
        content[start : start + values.size * 4] = np.ascontiguousarray(values, "<f4").tobytes()
    path = tmp_path / "a.glb"
    for generator in (f"splat-transform {version}", "another program"):
        document["asset"]["generator"] = generator
        path.write_bytes(glb(document, bytes(content)))
        if generator == "another program":
            with pytest.raises(ModelFileError, match="a standard deviation below 0"):
                import_gltf(path)
            continue
        found = import_gltf(path)
        for name in ("means", "scales", "shN"):
            np.testing.assert_allclose(getattr(found.columns, name).numpy(), getattr(before, name), atol=1e-6)
        np.testing.assert_allclose(-found.columns.quats.numpy(), before.quats, atol=1e-6)  # the same rotation
        assert any("logarithms, as splat-transform" in note for note in found.notes)
        assert any("axes are those of a PLY" in note for note in found.notes) != turned


def test_integers_are_read(tmp_path: Path) -> None:
    """Opacities and whole scales in bytes, positions and rotations in 16 bits are lawful, also interleaved."""
    document, binary = parts_of(encode_gltf(scene(20, 0), ExportMetadata()).payload)
    plain = tmp_path / "plain.glb"
    plain.write_bytes(glb(document, binary))
    expected = import_gltf(plain).columns
    primitive = document["meshes"][0]["primitives"][0]["attributes"]
    view = document["bufferViews"][primitive[f"{PREFIX}ROTATION"]]
    rotation = np.frombuffer(binary[view["byteOffset"] : view["byteOffset"] + view["byteLength"]], "<f4").reshape(20, 4)
    rows = np.zeros(20, [("rotation", "<i2", 4), ("opacity", "u1"), ("scale", "u1", 3), ("position", "<u2", 4)])
    rows["scale"] = 1 + np.arange(60).reshape(20, 3)
    rows["position"][:, :3] = 1000 * np.arange(60).reshape(20, 3)
    rows["rotation"] = np.round(rotation * 32767)
    rows["opacity"] = np.round(expected.opacities.double().sigmoid().numpy() * 255)
    document["bufferViews"].append(
        {"buffer": 0, "byteOffset": len(binary), "byteLength": rows.nbytes, "byteStride": rows.itemsize}
    )
    packed = {"bufferView": len(document["bufferViews"]) - 1, "count": 20, "normalized": True}
    document["accessors"] += [
        {**packed, "componentType": 5122, "type": "VEC4"},
        {**packed, "componentType": 5121, "type": "SCALAR", "byteOffset": 8},
        {**packed, "componentType": 5121, "type": "VEC3", "byteOffset": 9, "normalized": False},
        {**packed, "componentType": 5123, "type": "VEC3", "byteOffset": 12, "normalized": False},
        {"componentType": 5126, "type": "VEC3", "count": 3, "sparse": {}},  # another mesh's
    ]
    for place, name in enumerate((f"{PREFIX}ROTATION", f"{PREFIX}OPACITY", f"{PREFIX}SCALE", "POSITION")):
        primitive[name] = len(document["accessors"]) - 5 + place
    (tmp_path / "a.glb").write_bytes(glb(document, binary + rows.tobytes()))
    found = import_gltf(tmp_path / "a.glb").columns
    assert (found.quats / found.quats.norm(dim=1, keepdim=True) - expected.quats).abs().max() < 1e-4
    assert (found.opacities.sigmoid() - expected.opacities.sigmoid()).abs().max() <= 0.5 / 255 + 1e-6
    np.testing.assert_allclose(found.scales.exp().reshape(-1), 1 + np.arange(60), rtol=1e-6)
    np.testing.assert_array_equal(found.means.numpy() * [-1, -1, 1], 1000.0 * np.arange(60).reshape(20, 3))


@pytest.mark.parametrize(
    ("name", "raw", "said"),
    [
        ("SCALE", np.log, "a standard deviation below 0"),
        ("OPACITY", lambda a: np.log(a / (1 - a)), "an opacity outside 0 to 1"),
    ],
)
def test_raw_values_in_place_of_activated_ones_are_named(
    good: bytes, name: str, raw: Callable[[np.ndarray], np.ndarray], said: str, tmp_path: Path
) -> None:
    """Writers of the extension's drafts stored them."""
    document, binary = parts_of(good)
    view = document["bufferViews"][accessor_of(document, f"{PREFIX}{name}")["bufferView"]]
    begin, end = view["byteOffset"], view["byteOffset"] + view["byteLength"]
    written = binary[:begin] + raw(np.frombuffer(binary[begin:end], "<f4")).astype("<f4").tobytes() + binary[end:]
    (tmp_path / "a.glb").write_bytes(glb(document, written))
    with pytest.raises(ModelFileError, match=said) as caught:
        import_gltf(tmp_path / "a.glb")
    assert caught.value.remedy is not None
    assert "drafts stored other values" in caught.value.remedy
