"""What a look at a scene finds: what is there, what is not, and what cannot be right."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from splatcli.cli.commands import run
from splatcli.config import DataConfig
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.inspect import Finding, inspect_scene, repeated_views, scene_notes, shown_shares
from splatcli.scene.read import read_scene
from tests.scene import made


def found(root: Path, data: DataConfig | None = None) -> dict[tuple[str, str], Finding]:
    """(state, subject) -> finding."""
    return {(one.state, one.subject): one for one in inspect_scene(read_scene(root, data or DataConfig()))}


def edit_frames(root: Path, change: Callable[[list[dict]], None]) -> Path:
    document = json.loads((root / "transforms.json").read_text())
    change(document["frames"])
    (root / "transforms.json").write_text(json.dumps(document))
    return root


def test_a_good_scene_has_what_it_needs_and_no_warning(tmp_path: Path) -> None:
    all_found = found(made.colmap_scene(tmp_path))
    assert {key: one.text for key, one in all_found.items()} == {
        ("found", "cameras"): "sparse/0/images.bin: 8 views (8 pinhole)",
        ("found", "photos"): "images/: 8, stored as 64x48, trained at 64x48",
        ("none", "masks"): "looked for masks/ beside the photos (a.png or a.jpg.png for a.jpg)",
        ("none", "depth maps"): "none named; --depths DIR takes a folder of them",
        ("found", "points"): "20 sparse points",
        ("found", "held out"): "1 view to measure with, 7 to train on",
    }


def test_masks_maps_lenses_and_a_missing_split_are_reported(tmp_path: Path) -> None:
    made.colmap_scene(tmp_path, camera=made.lens("OPENCV", [60.0, 61.0, 32.0, 24.0, -0.1, 0.0, 0.0, 0.0]))
    for folder, value in (("masks", np.full((48, 64), 255, np.uint8)), ("depths", np.ones((48, 64), np.uint16))):
        (tmp_path / folder).mkdir()
        for name in made.names():
            Image.fromarray(value).save(tmp_path / folder / name)
    all_found = found(tmp_path, DataConfig(depths="depths", test_every=0))
    assert all_found["found", "cameras"].text.endswith("8 views (8 OPENCV)")
    assert all_found["found", "masks"].text == all_found["found", "depth maps"].text == "8 of 8 images have one"
    assert ("none", "held out") in all_found


def test_cameras_that_look_away_from_the_points_are_reported(tmp_path: Path) -> None:
    made.nerfstudio_scene(tmp_path, ply_file_path="points.ply")
    rows = [" ".join(map(str, row)) for row in np.random.default_rng(1).uniform(-1, 1, (30, 3))]
    head = ["ply", "format ascii 1.0", "element vertex 30", *(f"property float {axis}" for axis in "xyz")]
    (tmp_path / "points.ply").write_text("\n".join([*head, "end_header", *rows, ""]))
    assert ("warning", "points") not in found(tmp_path)

    def to_opencv(frames: list[dict]) -> None:
        """The mistake that is made most: OpenCV's axes where OpenGL's belong."""
        for frame in frames:
            frame["transform_matrix"] = (np.array(frame["transform_matrix"]) @ np.diag([1.0, -1, -1, 1])).tolist()

    warning = found(edit_frames(tmp_path, to_opencv))["warning", "points"]
    assert warning.text.startswith("100 % of the cameras show none of the points")
    assert "--plot" in str(warning.remedy)


@pytest.mark.parametrize(
    ("index", "center", "text"),
    [
        (3, [500.0, 0.0, 0.0], "1 stand more than 10 times as far out as most: 0003.png"),
        (3, None, "1 stand and look as another one does"),
    ],
)
def test_cameras_out_of_place_are_reported(tmp_path: Path, index: int, center: list[float] | None, text: str) -> None:
    def move(frames: list[dict]) -> None:
        matrix = frames[index]["transform_matrix"] = frames[index + (center is None)]["transform_matrix"]
        for row, value in enumerate(center or []):
            matrix[row][3] = value

    all_found = found(edit_frames(made.nerfstudio_scene(tmp_path), move))
    assert all_found["warning", "cameras"].text == text
    assert list(all_found)[-1] == ("warning", "cameras"), "warnings come last, where they are seen"


@pytest.mark.parametrize(("turned", "repeats"), [(0.0, True), (2e-4, True), (0.01, False)])
def test_held_out_views_that_repeat_a_training_view_are_named(tmp_path: Path, turned: float, repeats: bool) -> None:
    """A copy in another file has the same pose but for the error of structure from motion; half a pixel is no error."""
    made.colmap_scene(tmp_path)
    model = pycolmap.Reconstruction(tmp_path / "sparse/0")
    pose = model.images[4].cam_from_world()
    turn = pycolmap.Rotation3d(np.array([0.0, 0.0, turned]))
    model.images[1].frame.set_cam_from_world(1, pycolmap.Rigid3d(turn, np.zeros(3)) * pose)
    model.write(tmp_path / "sparse/0")
    scene = read_scene(tmp_path, DataConfig())
    assert scene.test == [0]
    assert repeated_views(scene) == ({0: 3} if repeats else {})
    said = "1 held-out view stands and looks as a training view does (0000.png = 0003.png)"
    warnings = [one for one in inspect_scene(scene) if (one.state, one.subject) == ("warning", "held out")]
    assert [one.text.startswith(said) for one in warnings] == [True] * repeats
    assert any(note.startswith(said) and "remove copies" in note for note in scene_notes(scene)) == repeats
    assert repeated_views(replace(scene, points=None)) == {}


def observed_model(factor: float = 1.0, scale: float = 1.0) -> pycolmap.Reconstruction:
    """A model whose focal lengths are ``factor`` times those of its observations, and then its cameras scaled."""
    params = np.array([600.0, 610.0, 320.0, 240.0])
    model = made.reconstruction(made.lens("PINHOLE", params.tolist(), 640, 480), points=0)
    points = np.random.default_rng(1).uniform(-1, 1, (20, 3))
    camera = model.cameras[1]
    for image in model.images.values():
        in_camera = points @ made.w2c(image.image_id - 1)[:3, :3].T + made.w2c(image.image_id - 1)[:3, 3]
        image.points2D = pycolmap.Point2DList([pycolmap.Point2D(xy) for xy in camera.img_from_cam(in_camera)])
    for row, xyz in enumerate(points):
        track = pycolmap.Track([pycolmap.TrackElement(number, row) for number in model.images])
        model.add_point3D(xyz, track, np.zeros(3, np.uint8))
    camera.params = params * np.array([factor, factor, 1.0, 1.0]) * scale
    camera.width, camera.height = round(640 * scale), round(480 * scale)
    return model


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize(
    ("factor", "scale", "remedy"),
    [(1.0, 1.0, None), (2.0, 1.0, "focal lengths 0.5 times"), (0.5, 1.0, "focal lengths 2 times"), (1.0, 0.1, None)],
)
def test_focal_lengths_that_the_points_contradict_are_reported(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, text: bool, factor: float, scale: float, remedy: str | None
) -> None:
    made.colmap_scene(tmp_path)
    shutil.rmtree(tmp_path / "sparse/0")
    made.write_model(tmp_path / "sparse/0", observed_model(factor, scale), text)
    if scale == 1.0:
        made.write_images(tmp_path / "images", size=(640, 480))
    points = [one for one in inspect_scene(read_scene(tmp_path, DataConfig())) if one.subject == "points"]
    about = [one for one in points if "in the median" in one.text]
    assert len(points) == 1 + len(about) == (1 if scale != 1.0 else 2)  # scaled cameras: nothing to compare with
    for one in about:
        assert one.state == ("found" if remedy is None else "warning"), one.text
        assert (one.remedy or "").startswith(remedy or "")
        assert "(20 of them)" in one.text
        assert run(["train", str(tmp_path), "--dry-run", "--device", "cpu"]) == 0
        said = capfd.readouterr().err
        assert ("warning: sparse points are off by" in said) == (remedy is not None)
        assert (remedy or "") in said


def test_shares_are_counts_of_what_is_in_the_picture(tmp_path: Path) -> None:
    camera = read_scene(made.colmap_scene(tmp_path), DataConfig()).cameras[0]
    at = np.array([[0, 0, 1], [0, 0, -1], [0.5, 0, 1], [0.6, 0, 1]], np.float64)  # the edge is at 32 / 60
    xyz = ((at - camera.viewmat[:3, 3]) @ camera.viewmat[:3, :3]).astype(np.float32)
    assert shown_shares(xyz, [camera]).tolist() == [0.5]
