"""Known depths: which points each image sees, and at which of its pixels and how deep they lie."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from splatcli.config import DataConfig
from splatcli.errors import SceneError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.depth_maps import depths_of_points
from splatcli.scene.points import PointCloud, Tracks
from splatcli.scene.read import read_scene
from splatcli.scene.scene import Scene, check_depths, known_depths
from tests.scene import made

#: Images, counted from 0, that see point number i.
SEEN_BY = [[i % made.COUNT, (3 * i + 1) % made.COUNT] for i in range(made.NUM_POINTS)]


def tracked_scene(root: Path, *, text: bool = False) -> Path:
    """A COLMAP scene whose points have tracks; each pair of a track is of two different images."""
    model = made.reconstruction(points=0)
    rng = np.random.default_rng(1)
    counts = [0] * made.COUNT
    tracks = []
    for images in SEEN_BY:
        track = pycolmap.Track()
        for image in dict.fromkeys(images):
            track.add_element(image + 1, counts[image])
            counts[image] += 1
        tracks.append(track)
    for image_id, image in model.images.items():
        image.points2D = [pycolmap.Point2D(rng.uniform(1, 40, 2)) for _ in range(counts[image_id - 1])]
    for track in tracks:
        model.add_point3D(rng.uniform(-1, 1, 3), track, rng.integers(0, 256, 3).astype(np.uint8))
    made.write_model(root / "sparse/0", model, text)
    made.write_images(root / "images")
    return root


def seen_positions(scene: Scene, view: int) -> set[tuple[float, ...]]:
    assert scene.points is not None
    assert scene.seen is not None
    return {tuple(row) for row in scene.points.xyz[scene.seen[view]].tolist()}


@pytest.mark.parametrize("text", [False, True])
def test_each_image_sees_the_points_whose_tracks_name_it(tmp_path: Path, text: bool) -> None:
    scene = read_scene(tracked_scene(tmp_path, text=text), DataConfig(depths="auto"))
    assert scene.points is not None
    assert scene.seen is not None
    for view in range(made.COUNT):
        expected = [i for i, images in enumerate(SEEN_BY) if view in images]
        np.testing.assert_array_equal(scene.seen[view], expected)
    check_depths(scene)


@pytest.mark.parametrize("text", [False, True])
def test_tracks_stay_with_their_points_where_points_are_left_out(tmp_path: Path, text: bool) -> None:
    scene = read_scene(tracked_scene(tmp_path, text=text), DataConfig(depths="auto"))
    fewer = read_scene(tmp_path, DataConfig(depths="auto", max_points=7))
    assert scene.points is not None
    assert fewer.points is not None
    kept = {tuple(row) for row in fewer.points.xyz.tolist()}
    assert 3 < len(kept) < made.NUM_POINTS
    for view in range(made.COUNT):
        assert seen_positions(fewer, view) == seen_positions(scene, view) & kept


def test_bad_points_that_are_dropped_take_their_tracks_along() -> None:
    tracks = Tracks(np.array([5, 5, 7, 7, 7]), np.array([0, 1, 1, 2, 3]))
    good = np.array([True, False, True, True])
    moved = tracks.moved(np.where(good, np.cumsum(good) - 1, -1))
    found = moved.by_image([7, 6, 5])
    assert [rows.tolist() for rows in found] == [[1, 2], [], [0]]


def test_nothing_is_read_that_is_not_asked_for(tmp_path: Path) -> None:
    scene = read_scene(tracked_scene(tmp_path), DataConfig())
    assert scene.seen is None
    assert scene.points is not None
    assert scene.points.tracks is None


def test_a_point_lies_in_the_pixel_that_its_view_shows_it_in(tmp_path: Path) -> None:
    scene = read_scene(tracked_scene(tmp_path), DataConfig(depths="auto"))
    assert scene.points is not None
    assert scene.seen is not None
    for view, camera in enumerate(scene.cameras):
        known = known_depths(scene, view)
        depths = dict(zip(known.pixels.tolist(), known.depths.tolist(), strict=True))
        assert depths
        for point in scene.points.xyz[scene.seen[view]].astype(np.float64):
            x, y, z = camera.viewmat[:3, :3] @ point + camera.viewmat[:3, 3]
            u, v = int(camera.fx * x / z + camera.cx), int(camera.fy * y / z + camera.cy)
            assert depths[v * camera.width + u] <= z + 1e-9


def test_of_several_points_in_a_pixel_the_nearest_counts_and_none_outside_or_behind(tmp_path: Path) -> None:
    made.colmap_scene(tmp_path)
    camera = read_scene(tmp_path, DataConfig()).cameras[0]
    at = np.array([[0, 0, 2], [0, 0, 1], [0.01, 0, 3], [9, 0, 1], [0, 0, -1], [0, 0, 0], [-0.5, 0.2, 1.5]])
    center, turned = camera.center, camera.viewmat[:3, :3]
    known = depths_of_points(camera, (at @ turned + center).astype(np.float32))
    middle = camera.height // 2 * camera.width + camera.width // 2
    side = int(60 * -0.5 / 1.5 + 32) + int(61 * 0.2 / 1.5 + 24) * camera.width
    # Exactly on the border between two pixels, rounding decides; both neighbours are right.
    near = {int(p): float(z) for p, z in zip(known.pixels, known.depths, strict=True)}
    assert near.pop(side) == pytest.approx(1.5, abs=1e-5)
    assert all(abs(pixel % camera.width - 32) <= 1 and abs(pixel // camera.width - 24) <= 1 for pixel in near)
    assert min(near.values()) == pytest.approx(1.0, abs=1e-5)
    assert middle > 0
    beyond = depths_of_points(replace(camera, near=1.25), (at @ turned + center).astype(np.float32))
    assert min(beyond.depths) == pytest.approx(1.5, abs=1e-5)
    masked = np.zeros((camera.height, camera.width), bool)
    masked[side // camera.width, side % camera.width] = True
    assert known.without(masked).pixels.tolist() == sorted(near)


@pytest.mark.parametrize("kind", ["no tracks", "no points"])
def test_a_scene_that_knows_no_depths_is_refused_with_what_would_help(tmp_path: Path, kind: str) -> None:
    made.colmap_scene(tmp_path) if kind == "no tracks" else made.nerfstudio_scene(tmp_path)
    scene = read_scene(tmp_path, DataConfig(depths="auto"))
    with pytest.raises(SceneError, match="no depth is known") as caught:
        check_depths(scene)
    assert "tracks" in caught.value.remedy


def test_points_without_tracks_are_points() -> None:
    assert PointCloud(np.zeros((1, 3), np.float32), np.zeros((1, 3), np.uint8)).tracks is None
