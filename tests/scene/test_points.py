"""PLY point clouds of scenes: what is read, and what is refused before memory is asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from plyfile import PlyData, PlyElement

from splatcli.errors import SceneError
from splatcli.scene import points as points_module
from splatcli.scene.points import PointCloud, clean_points


def read_points_ply(path: Path, limit: int = 1000) -> PointCloud:
    raw = points_module.read_points_ply(path, limit)
    cloud = clean_points(raw, np.zeros(3), drop_bad=False, max_doubt=0.0, notes=[])
    assert cloud is not None
    return cloud


def _write(
    path: Path,
    xyz: np.ndarray,
    rgb: np.ndarray | None = None,
    text: bool = False,
    order: str = "<",
    names: tuple[str, ...] = ("red", "green", "blue"),
) -> None:
    columns = [("x", "f4"), ("y", "f4"), ("z", "f4")]
    if rgb is not None:
        columns += [(name, rgb.dtype.str[1:]) for name in names]
    rows = np.empty(len(xyz), dtype=columns)
    for i, axis in enumerate("xyz"):
        rows[axis] = xyz[:, i]
    if rgb is not None:
        for i, name in enumerate(names):
            rows[name] = rgb[:, i]
    PlyData([PlyElement.describe(rows, "vertex")], text=text, byte_order=order).write(str(path))


@pytest.mark.parametrize(("text", "order"), [(False, "<"), (False, ">"), (True, "<")])
@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_points_and_colours_are_read(tmp_path: Path, text: bool, order: str, kind: type) -> None:
    rng = np.random.default_rng(0)
    xyz, rgb = rng.normal(size=(50, 3)).astype(np.float32), rng.integers(0, 256, (50, 3)).astype(np.uint8)
    colours = rgb if kind is np.uint8 else (rgb / 255).astype(np.float32)
    _write(tmp_path / "a.ply", xyz, colours, text, order)
    points = read_points_ply(tmp_path / "a.ply")
    np.testing.assert_allclose(points.xyz, xyz, rtol=1e-6)
    np.testing.assert_array_equal(points.rgb, rgb)


def test_points_without_colours_are_grey(tmp_path: Path) -> None:
    _write(tmp_path / "a.ply", np.zeros((3, 3), np.float32))
    np.testing.assert_array_equal(read_points_ply(tmp_path / "a.ply").rgb, np.full((3, 3), 128))


def test_points_of_gaussians_have_their_base_colours(tmp_path: Path) -> None:
    sh0 = np.array([[0.0, 1.0, -1.0], [9.0, -9.0, np.nan]], np.float32)
    _write(tmp_path / "a.ply", np.zeros((2, 3), np.float32), sh0, names=("f_dc_0", "f_dc_1", "f_dc_2"))
    np.testing.assert_array_equal(read_points_ply(tmp_path / "a.ply").rgb, [[128, 199, 56], [255, 0, 0]])


@pytest.mark.parametrize(
    ("kind", "factor", "offset"),
    [
        ("u2", 257, 0),  # of 16 bits
        ("i4", 257, 0),
        ("u2", 1, 0),  # bytes in a wider type
        ("f4", 1, 0),  # 0..255
        ("f4", 1 / 255, 0.004),  # 0..1, a little exceeded
    ],
)
def test_colours_of_every_number_type_and_range_are_read(
    kind: str, factor: float, offset: float, tmp_path: Path
) -> None:
    rgb = np.array([[10, 20, 30], [40, 150, 160], [255, 0, 255]])
    _write(tmp_path / "a.ply", np.zeros((3, 3), np.float32), (rgb * factor + offset).astype(kind))
    found = read_points_ply(tmp_path / "a.ply").rgb
    assert np.abs(found.astype(int) - rgb).max() <= (1 if offset else 0)


def test_colours_that_are_not_finite_leave_the_range_of_the_others(tmp_path: Path) -> None:
    rgb = np.array([[0.5, np.nan, np.inf], [0.2, 0.4, -np.inf]], np.float32)
    _write(tmp_path / "a.ply", np.zeros((2, 3), np.float32), rgb)
    np.testing.assert_array_equal(read_points_ply(tmp_path / "a.ply").rgb, [[128, 0, 255], [51, 102, 0]])


@pytest.mark.parametrize("names", [("r", "g", "b"), ("diffuse_red", "diffuse_green", "diffuse_blue")])
def test_colours_of_other_names_are_read(names: tuple[str, ...], tmp_path: Path) -> None:
    rgb = np.array([[10, 20, 30], [40, 150, 160]], np.uint8)
    _write(tmp_path / "a.ply", np.zeros((2, 3), np.float32), rgb, names=names)
    np.testing.assert_array_equal(read_points_ply(tmp_path / "a.ply").rgb, rgb)


def test_points_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    xyz = np.zeros((3, 3), np.float32)
    xyz[1, 2] = np.nan
    _write(tmp_path / "a.ply", xyz)
    with pytest.raises(SceneError, match=r"1 of 3 points .* number 1"):
        read_points_ply(tmp_path / "a.ply")


@pytest.mark.parametrize("count", ["1000000000000", "-1", "4", "x"])
def test_a_header_that_claims_what_the_file_lacks_is_refused(tmp_path: Path, count: str) -> None:
    path = tmp_path / "a.ply"
    _write(path, np.zeros((3, 3), np.float32))
    path.write_bytes(path.read_bytes().replace(b"vertex 3", f"vertex {count}".encode()))
    with pytest.raises(SceneError) as caught:
        read_points_ply(path)
    assert str(path) in str(caught.value.where)


@pytest.mark.parametrize("data", [b"", b"hello", b"ply\nend_header\n", b"ply\nformat ascii 1.0\nend_header\n"])
def test_files_that_are_no_point_cloud_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.ply").write_bytes(data)
    with pytest.raises(SceneError, match="PLY"):
        read_points_ply(tmp_path / "a.ply")


def test_missing_files_and_coordinates_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SceneError, match="cannot read"):
        read_points_ply(tmp_path / "none.ply")
    rows = np.zeros(2, dtype=[("x", "f4"), ("y", "f4")])
    PlyData([PlyElement.describe(rows, "vertex")]).write(str(tmp_path / "a.ply"))
    with pytest.raises(SceneError, match="no x, y and z"):
        read_points_ply(tmp_path / "a.ply")
