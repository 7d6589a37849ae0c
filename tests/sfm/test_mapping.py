"""Mapping by itself: matches that the geometry of two views allows, and that of three does not."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from splatcli.scene._pycolmap import pycolmap
from splatcli.sfm.execution import Execution
from splatcli.sfm.mapping import run_mapper

SIZE, FOCAL, POINTS, CAMERAS = 500, 600.0, 250, 6


def poses() -> list[NDArray[np.float64]]:
    """[3, 4] world to camera, of both places, on arcs round the origin."""
    made = []
    for place in range(2):
        for index in range(CAMERAS):
            angle = 0.12 * index + 1.2 * place
            center = np.array([4 * np.sin(angle), 0.4 * (index % 3 + place), -4 * np.cos(angle)])
            forward = -center / np.linalg.norm(center)
            right = np.cross([0.0, 1.0, 0.0], forward)
            right /= np.linalg.norm(right)
            rotation = np.stack([right, np.cross(forward, right), forward])
            made.append(np.column_stack([rotation, -rotation @ center]))
    return made


def along_epipolar_lines(first: int, second: int, xy: list[NDArray[np.float64]]) -> NDArray[np.uint32]:
    """Match features of different points that lie on each other's epipolar line within a pixel."""
    a, b = (np.vstack([poses()[index], [0, 0, 0, 1]]) for index in (first, second))
    relative = b @ np.linalg.inv(a)
    x, y, z = relative[:3, 3]
    essential = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]]) @ relative[:3, :3]
    rays = [np.column_stack([(xy[index] - SIZE / 2) / FOCAL, np.ones(POINTS)]) for index in (first, second)]
    lines = rays[0] @ essential.T
    lines /= np.linalg.norm(lines[:, :2], axis=1, keepdims=True)
    distance = np.abs(lines @ rays[1].T) * FOCAL
    matches, taken = [], set()
    for row in range(POINTS):
        column = int(distance[row].argmin())
        if distance[row, column] < 1.0 and column not in taken:
            taken.add(column)
            matches.append((row, column))
    return np.array(matches, dtype=np.uint32)


def write_two_places(path: Path) -> None:
    """Write features and matches of two places that have nothing in common but matches along epipolar lines."""
    generator = np.random.default_rng(3)
    points = generator.uniform(-1, 1, (2, POINTS, 3))
    xy = []
    for index, pose in enumerate(poses()):
        seen = points[index // CAMERAS] @ pose[:, :3].T + pose[:, 3]
        xy.append(seen[:, :2] / seen[:, 2:] * FOCAL + SIZE / 2 + generator.normal(0, 0.3, (POINTS, 2)))
    with pycolmap.Database.open(path) as store:
        camera = pycolmap.Camera.create_from_model_name(0, "SIMPLE_RADIAL", FOCAL, SIZE, SIZE)
        camera.camera_id = int(store.write_camera(camera))
        rig = pycolmap.Rig(rig_id=camera.camera_id)
        rig.add_ref_sensor(camera.sensor_id)
        store.write_rig(rig, use_rig_id=True)
        numbers = []
        for index, features in enumerate(xy):
            number = int(store.write_image(pycolmap.Image(name=str(index), camera_id=camera.camera_id)))
            frame = pycolmap.Frame(rig_id=camera.camera_id)
            frame.add_data_id(store.read_image(number).data_id)
            store.write_frame(frame)
            store.write_keypoints(number, features.astype(np.float32))
            numbers.append(number)
        same = np.repeat(np.arange(POINTS, dtype=np.uint32)[:, None], 2, axis=1)
        for i, j in combinations(range(2 * CAMERAS), 2):
            matches = (
                same if i // CAMERAS == j // CAMERAS else generator.permutation(along_epipolar_lines(i, j, xy))[:40]
            )
            store.write_matches(numbers[i], numbers[j], matches)
            geometry = pycolmap.TwoViewGeometry()
            geometry.config = pycolmap.TwoViewGeometryConfiguration.UNCALIBRATED
            geometry.inlier_matches = matches
            store.write_two_view_geometry(numbers[i], numbers[j], geometry)


def test_matches_along_epipolar_lines_join_no_two_places(tmp_path: Path) -> None:
    write_two_places(tmp_path / "database.db")
    models = run_mapper(tmp_path / "database.db", tmp_path / "models", 12, Execution())
    places = [{int(model.image(number).name) // CAMERAS for number in model.reg_image_ids()} for model in models]
    assert sorted(places, key=str) == [{0}, {1}]
    assert [model.num_reg_images() for model in models] == [CAMERAS, CAMERAS]
