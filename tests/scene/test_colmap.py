"""COLMAP scenes: where models are found, what is read from them, which images belong to them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from splatcli.config import DataConfig
from splatcli.errors import SceneError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.inspect import scene_notes
from splatcli.scene.read import read_scene
from tests.scene import made


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("place", ["sparse/0", "sparse", "colmap/sparse/0", "distorted/sparse", ".", "a/b/sparse/0"])
def test_models_are_found_in_every_usual_place(tmp_path: Path, place: str, text: bool) -> None:
    scene = read_scene(made.colmap_scene(tmp_path, place, text), DataConfig())
    assert scene.kind == "colmap"
    assert [camera.name for camera in scene.cameras] == made.names()
    assert scene.root == tmp_path


def test_cameras_and_points_are_those_of_the_model(tmp_path: Path) -> None:
    reconstruction = made.reconstruction()
    scene = read_scene(made.colmap_scene(tmp_path), DataConfig())
    for i, camera in enumerate(scene.cameras):
        assert (camera.width, camera.height) == (made.WIDTH, made.HEIGHT)
        np.testing.assert_allclose([camera.fx, camera.fy, camera.cx, camera.cy], [60, 61, 32, 24], rtol=1e-12)
        np.testing.assert_allclose(camera.viewmat, made.w2c(i), atol=1e-12)
    assert scene.points is not None
    assert scene.points.xyz.dtype == np.float32
    assert scene.points.rgb.dtype == np.uint8
    wanted = [reconstruction.points3D[key] for key in sorted(reconstruction.points3D)]
    np.testing.assert_array_equal(scene.points.xyz, np.array([p.xyz for p in wanted], np.float32))
    np.testing.assert_array_equal(scene.points.rgb, [p.color for p in wanted])


@pytest.mark.parametrize("text", [False, True])
def test_poses_of_a_rigs_cameras_are_those_that_pycolmap_gives(tmp_path: Path, text: bool) -> None:
    """The second camera of the rig stands beside the first, turned; its pose is that of the two together."""
    model, names = pycolmap.Reconstruction(), []
    for number in (1, 2):
        model.add_camera(made.lens(number=number))
    rig = pycolmap.Rig(rig_id=1)
    rig.add_ref_sensor(model.camera(1).sensor_id)
    beside = pycolmap.Rigid3d(pycolmap.Rotation3d(np.array([0.1, 0.2, 0.05])), np.array([0.3, 0.1, 0.2]))
    rig.add_sensor(model.camera(2).sensor_id, beside)
    model.add_rig(rig)
    for i in range(4):
        frame = pycolmap.Frame(frame_id=i + 1, rig_id=1, rig_from_world=pycolmap.Rigid3d(made.w2c(i)[:3]))
        images = [
            pycolmap.Image(name=f"{number}/{i}.png", camera_id=number, image_id=2 * i + number, frame_id=i + 1)
            for number in (1, 2)
        ]
        for image in images:
            frame.add_data_id(image.data_id)
        model.add_frame(frame)
        for image in images:
            model.add_image(image)
            names.append(image.name)
    made.write_images(tmp_path / "images", names)
    folder = made.write_model(tmp_path / "sparse/0", model, text)
    poses = {image.name: image.cam_from_world() for image in pycolmap.Reconstruction(str(folder)).images.values()}
    for camera in read_scene(tmp_path, DataConfig()).cameras:
        np.testing.assert_allclose(camera.viewmat[:3], poses[camera.name].matrix(), atol=1e-12)


@pytest.mark.parametrize("text", [False, True])
def test_models_whose_points_and_images_disagree_are_read(tmp_path: Path, text: bool) -> None:
    """Scripts leave observations out, or images, and keep the points' tracks; pycolmap refuses such models."""
    whole = made.reconstruction()
    for image in whole.images.values():
        image.points2D = pycolmap.Point2DList([pycolmap.Point2D(np.array([10.0, 20.0]))])
    for number in range(1, made.COUNT + 1):
        whole.add_observation(number, pycolmap.TrackElement(number, 0))
    folder = made.write_model(tmp_path / "sparse/0", made.reconstruction(image_names=made.names()[:5], points=0), text)
    points = made.write_model(tmp_path / "other", whole, text) / f"points3D{'.txt' if text else '.bin'}"
    points.replace(folder / points.name)
    with pytest.raises(Exception, match=r"Image with ID \d does not exist|_M_range_check"):
        pycolmap.Reconstruction(str(folder))
    made.write_images(tmp_path / "images")
    scene = read_scene(tmp_path, DataConfig())
    assert [camera.name for camera in scene.cameras] == made.names()[:5]
    assert scene.points is not None
    assert len(scene.points) == made.NUM_POINTS


def test_images_come_as_they_are_when_nothing_has_to_change(tmp_path: Path) -> None:
    scene = read_scene(made.colmap_scene(tmp_path), DataConfig())
    for i in range(made.COUNT):
        np.testing.assert_array_equal(scene.images.load(i), made.picture(i))


def test_models_without_rigs_and_frames_are_read(tmp_path: Path) -> None:
    made.colmap_scene(tmp_path)
    for name in ("rigs.bin", "frames.bin"):
        (tmp_path / "sparse/0" / name).unlink()
    scene = read_scene(tmp_path, DataConfig())
    np.testing.assert_allclose(scene.cameras[5].viewmat, made.w2c(5), atol=1e-12)


@pytest.mark.parametrize("text", [False, True])
def test_a_model_without_points_has_none(tmp_path: Path, text: bool) -> None:
    made.colmap_scene(tmp_path, text=text)
    (tmp_path / f"sparse/0/points3D.{'txt' if text else 'bin'}").unlink()
    scene = read_scene(tmp_path, DataConfig())
    assert scene.points is None
    assert "the scene has no points: training makes its own" in scene_notes(scene)


@pytest.mark.parametrize("change", ["crlf", "bom"])
def test_text_models_may_come_from_other_editors(tmp_path: Path, change: str) -> None:
    made.colmap_scene(tmp_path, text=True)
    for path in (tmp_path / "sparse/0").iterdir():
        data = path.read_bytes()
        path.write_bytes(data.replace(b"\n", b"\r\n") if change == "crlf" else b"\xef\xbb\xbf" + data)
    scene = read_scene(tmp_path, DataConfig())
    assert [camera.name for camera in scene.cameras] == made.names()
    assert scene.points is not None
    assert len(scene.points) == made.NUM_POINTS


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("name", ["cam1/a b.png", "a.b.png", "-x.png", "größe 🦊.png", "n" * 240 + ".png"])
def test_unusual_names_work(tmp_path: Path, name: str, text: bool) -> None:
    image_names = [name, "cam1/0001.png", "cam2/0001.png"]
    made.write_images(tmp_path / "images", image_names)
    made.write_model(tmp_path / "sparse/0", made.reconstruction(image_names=image_names), text)
    scene = read_scene(tmp_path, DataConfig())
    assert sorted(image_names) == [camera.name for camera in scene.cameras]
    np.testing.assert_array_equal(
        scene.images.load(sorted(image_names).index(name)), made.picture(0, made.WIDTH, made.HEIGHT)
    )


def test_missing_images_are_counted_and_named(tmp_path: Path) -> None:
    made.colmap_scene(tmp_path)
    for name in made.names()[:6]:
        (tmp_path / "images" / name).unlink()
    with pytest.raises(SceneError, match=r"6 of 8 images are missing: 0000.png, .*0004.png, and 1 more"):
        read_scene(tmp_path, DataConfig())
    scene = read_scene(tmp_path, DataConfig(skip_missing=True))
    assert [camera.name for camera in scene.cameras] == made.names()[6:]
    assert any("6 of 8 views have no image" in note for note in scene.notes)


def test_no_image_at_all_is_an_error_even_when_missing_ones_are_skipped(tmp_path: Path) -> None:
    made.colmap_scene(tmp_path)
    shutil.rmtree(tmp_path / "images")
    with pytest.raises(SceneError, match="none of the 8 images was found"):
        read_scene(tmp_path, DataConfig(skip_missing=True))


def test_another_folder_of_images_can_be_named(tmp_path: Path) -> None:
    made.colmap_scene(tmp_path)
    (tmp_path / "images").rename(tmp_path / "photos")
    assert len(read_scene(tmp_path, DataConfig(images="photos")).cameras) == made.COUNT
    with pytest.raises(SceneError, match="folder of images"):
        read_scene(tmp_path, DataConfig(images="nowhere"))


def test_every_eighth_view_is_held_out(tmp_path: Path) -> None:
    image_names = made.names(17)
    made.write_images(tmp_path / "images", image_names)
    made.write_model(tmp_path / "sparse/0", made.reconstruction(image_names=image_names[::-1]))
    scene = read_scene(tmp_path, DataConfig())
    assert scene.test == [0, 8, 16]
    assert scene.train == [i for i in range(17) if i % 8]
    assert read_scene(tmp_path, DataConfig(test_every=0)).test == []
    with pytest.raises(SceneError, match="no view is left"):
        read_scene(tmp_path, DataConfig(test_every=1))


def test_few_views_hold_none_out(tmp_path: Path) -> None:
    made.write_images(tmp_path / "images")
    made.write_model(tmp_path / "sparse/0", made.reconstruction(image_names=made.names()[:7]))
    scene = read_scene(tmp_path, DataConfig())
    assert scene.test == []
    assert scene.train == list(range(7))
    assert any("none is held out" in note for note in scene.notes)


def test_extent_is_inrias(tmp_path: Path) -> None:
    scene = read_scene(made.colmap_scene(tmp_path), DataConfig())
    centers = np.array([np.linalg.inv(made.w2c(i))[:3, 3] for i in scene.train])
    distances = np.linalg.norm(centers - centers.mean(axis=0), axis=1)
    np.testing.assert_allclose(scene.extent, 1.1 * distances.max(), rtol=1e-9)


def test_the_fingerprint_tells_images_apart(tmp_path: Path) -> None:
    made.colmap_scene(tmp_path)
    first = read_scene(tmp_path, DataConfig()).fingerprint()
    assert first["count"] == made.COUNT
    assert read_scene(tmp_path, DataConfig()).fingerprint() == first
    path = tmp_path / "images/0002.png"
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    scene = read_scene(tmp_path, DataConfig())
    assert scene.fingerprint() != first
    path.unlink()
    assert not scene.images.has(2)
    with pytest.raises(SceneError, match="cannot read the image"):
        scene.fingerprint()


def test_undistorted_images_beside_their_model_come_before_the_originals(tmp_path: Path) -> None:
    """COLMAP's image_undistorter writes dense/images and dense/sparse; the originals stay in images/."""
    made.write_images(tmp_path / "images")
    made.colmap_scene(tmp_path / "dense", "sparse")
    scene = read_scene(tmp_path, DataConfig())
    assert {source.path.parent for source in scene.images.sources} == {tmp_path / "dense/images"}


def test_names_with_spaces_are_no_observations(tmp_path: Path) -> None:
    """Without the lines of observations, the pose of every second image would be taken for one."""
    names = [f"IMG 00{i} (1).png" for i in range(made.COUNT)]
    made.write_model(tmp_path / "sparse/0", made.reconstruction(image_names=names), text=True)
    made.write_images(tmp_path / "images", names)
    assert [camera.name for camera in read_scene(tmp_path, DataConfig()).cameras] == names
    file = tmp_path / "sparse/0/images.txt"
    file.write_text("".join(line for line in file.read_text().splitlines(keepends=True) if line.strip()))
    with pytest.raises(SceneError, match="expected X Y POINT3D_ID for each observation"):
        read_scene(tmp_path, DataConfig())


def test_a_file_is_the_image_of_one_view(tmp_path: Path) -> None:
    names = ["a.png", "a.jpg", "b.png"]
    made.write_model(tmp_path / "sparse/0", made.reconstruction(image_names=names))
    made.write_images(tmp_path / "images", ["a.png", "b.png"])
    with pytest.raises(SceneError, match=r"1 of 3 images .*a\.jpg"):
        read_scene(tmp_path, DataConfig())


def test_points_without_an_end_to_their_errors_are_read(tmp_path: Path) -> None:
    made.colmap_scene(tmp_path, text=True)
    file = tmp_path / "sparse/0/points3D.txt"
    rows = [line.split() for line in file.read_text().splitlines() if not line.startswith("#")]
    file.write_text("\n".join(" ".join([*row[:7], "inf", *row[8:]]) for row in rows))
    points = read_scene(tmp_path, DataConfig()).points
    assert points is not None
    assert len(points) == len(rows)


@pytest.mark.parametrize("tracks", [False, True])
@pytest.mark.parametrize("text", [False, True])
def test_points_that_two_images_see_with_large_errors_are_left_out(tmp_path: Path, text: bool, tracks: bool) -> None:
    made.colmap_scene(tmp_path)
    shutil.rmtree(tmp_path / "sparse")
    model = made.reconstruction(points=0)
    for image in model.images.values():
        image.points2D = pycolmap.Point2DList([pycolmap.Point2D([1.0, 1.0]) for _ in range(6)])
    for row, (error, count) in enumerate([(0.4, 2), (0.5, 3), (0.5, 2), (9.0, 3), (1.5, 2), (1.6, 2)]):
        track = pycolmap.Track([pycolmap.TrackElement(number + 1, row) for number in range(count)])
        number = model.add_point3D(np.full(3, row + 1.0), track, np.zeros(3, np.uint8))
        model.points3D[number].error = error
    made.write_model(tmp_path / "sparse/0", model, text)

    def read(**settings: object) -> tuple[list[float], list[str]]:
        data = DataConfig(depths="auto" if tracks else None, **settings)
        scene = read_scene(tmp_path, data)
        assert scene.points is not None
        if tracks:
            assert scene.seen is not None
            seen = [scene.points.xyz[rows, 0].tolist() for rows in scene.seen]
            assert seen[0] == scene.points.xyz[:, 0].tolist()
            assert 2.0 in seen[2]
            assert 1.0 not in seen[2]
        return scene.points.xyz[:, 0].tolist(), [note for note in scene.notes if "left out" in note]

    assert read(max_point_error=1.55)[0] == [1.0, 2.0, 3.0, 4.0, 5.0]  # the median is 1
    assert read(max_point_error=1.45) == (
        [1.0, 2.0, 3.0, 4.0],
        ["2 points are left out that two images see with over 1.45 times the median reprojection error"],
    )
    assert read() == read(max_point_error=0) == ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [])


@pytest.mark.parametrize(
    ("named", "stored"),
    [
        ("photos/day1/{}", "images/{}"),
        ("{}", "images/cam1/{}"),
        ("/home/me/photos/{}", "images/{}"),
        ("/home/me/fox/images/{}", "images/{}"),
    ],
)
def test_images_are_found_by_their_last_names_where_folders_changed(tmp_path: Path, named: str, stored: str) -> None:
    made.write_model(tmp_path / "sparse/0", made.reconstruction(image_names=[named.format(n) for n in made.names()]))
    made.write_images(tmp_path, [stored.format(name) for name in made.names()])
    scene = read_scene(tmp_path, DataConfig())
    assert [Path(camera.name).name for camera in scene.cameras] == made.names()
    for i in range(made.COUNT):
        np.testing.assert_array_equal(scene.images.load(i), made.picture(i))
    notes = " ".join(scene.notes)
    assert "8 images were found under" in notes or "outside the scene were found in its folder" in notes


def test_last_names_that_several_images_have_are_not_guessed(tmp_path: Path) -> None:
    names = [f"cam{i % 2}/{i // 2}.png" for i in range(made.COUNT)]
    made.write_model(tmp_path / "sparse/0", made.reconstruction(image_names=names))
    made.write_images(tmp_path / "images", [f"left{i % 2}/{i // 2}.png" for i in range(made.COUNT)])
    with pytest.raises(SceneError, match="none of the 8 images was found"):
        read_scene(tmp_path, DataConfig())
