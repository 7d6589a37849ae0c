"""Distorted lenses: the undistorted image shows what a pinhole would have seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from splatcli.config import DataConfig, Projection
from splatcli.errors import SceneError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.camera import MAX_ANGLE, Camera
from splatcli.scene.read import read_scene
from splatcli.scene.undistort import (
    FieldOfView,
    blank,
    camera_of,
    is_fisheye,
    is_pinhole,
    pinhole_of,
    resample,
    sampling_grid,
)
from tests.scene import made

WIDTH, HEIGHT = 160, 120
CENTER = [82.0, 58.0]
LENSES = {
    "SIMPLE_RADIAL": [150.0, *CENTER, -0.12],
    "RADIAL": [150.0, *CENTER, 0.08, -0.02],
    "OPENCV": [150.0, 152.0, *CENTER, -0.1, 0.02, 0.003, -0.002],
    "FULL_OPENCV": [150.0, 152.0, *CENTER, -0.1, 0.02, 0.003, -0.002, 0.01, 0.02, 0.0, 0.0],
    "OPENCV_FISHEYE": [110.0, 111.0, *CENTER, 0.02, -0.01, 0.001, 0.0],
    "SIMPLE_RADIAL_FISHEYE": [110.0, *CENTER, 0.02],
    "RADIAL_FISHEYE": [110.0, *CENTER, 0.02, -0.01],
    "SIMPLE_FISHEYE": [110.0, *CENTER],
    "FISHEYE": [110.0, 111.0, *CENTER],
    "FOV": [150.0, 152.0, *CENTER, 0.7],
    "THIN_PRISM_FISHEYE": [110.0, 111.0, *CENTER, 0.02, 0.0, 0.001, 0.001, 0.0, 0.0, 0.001, 0.0],
    "RAD_TAN_THIN_PRISM_FISHEYE": [110.0, 111.0, *CENTER, 0.02, 0.0, 0.0, 0.0, 0.0, 0.0, 0.002, 0.001, *[0.001] * 4],
    "SIMPLE_DIVISION": [150.0, *CENTER, -0.1],
    "DIVISION": [150.0, 152.0, *CENTER, -0.1],
    "EUCM": [150.0, 152.0, *CENTER, 0.5, 1.0],
}


def _colour(direction: NDArray[np.float64]) -> NDArray[np.float64]:
    """[..., 3] in 0..255: a smooth picture painted on the plane z = 1."""
    x, y = direction[..., 0], direction[..., 1]
    return 127.5 + 120 * np.stack([np.sin(5 * x), np.cos(4 * y + x), np.sin(3 * x + 3 * y)], axis=-1)


def _image(lens: object) -> NDArray[np.uint8]:
    """What the lens sees of that picture, by COLMAP's inverse of its model."""
    y, x = np.mgrid[0 : lens.height, 0 : lens.width] + 0.5
    seen = lens.cam_from_img(np.stack([x.ravel(), y.ravel()], axis=1))
    return np.round(_colour(np.asarray(seen)).reshape(lens.height, lens.width, 3)).astype(np.uint8)


def _scene(root: Path, model: str, data: DataConfig):
    lens = made.lens(model, LENSES[model], WIDTH, HEIGHT)
    made.write_model(root / "sparse/0", made.reconstruction(lens))
    (root / "images").mkdir()
    image = Image.fromarray(_image(lens))
    for name in made.names():
        image.save(root / "images" / name)
    return read_scene(root, data)


@pytest.mark.parametrize("resolution", [1, 2, 100])
@pytest.mark.parametrize("model", LENSES)
def test_every_lens_becomes_the_pinhole_it_is_said_to_be(tmp_path: Path, model: str, resolution: float) -> None:
    scene = _scene(tmp_path, model, DataConfig(resolution=resolution))
    camera, image = scene.cameras[0], scene.images.load(0)
    assert image.shape == (camera.height, camera.width, 3)
    y, x = np.mgrid[0 : camera.height, 0 : camera.width] + 0.5
    exact = _colour(np.stack([(x - camera.cx) / camera.fx, (y - camera.cy) / camera.fy], axis=-1))
    error = np.abs(image - exact)[3:-3, 3:-3]
    # 8-bit rounding twice, and a bicubic kernel on waves of at least 40 pixels.
    assert error.mean() < 1.0
    assert error.max() < 6.0
    assert any(model in note for note in scene.notes)


#: Distance between known points on the lens's image, and the spread of the blobs that mark them, in pixels. A lens
#: distorts blobs too, which moves their middles by an amount that goes with the square of the spread.
_STEP, _BLOB = 25, 1.2
#: Colmap's models that are pinholes already, and those that no pinhole can stand for.
_STRAIGHT, _PANORAMA = {"SIMPLE_PINHOLE", "PINHOLE"}, {"EQUIRECTANGULAR"}


def test_every_model_that_pycolmap_knows_is_tried() -> None:
    known = set(pycolmap.CameraModelId.__members__) - {"INVALID"}
    assert known == {*LENSES, *_STRAIGHT, *_PANORAMA}


@pytest.mark.parametrize("projection", ["pinhole", "fisheye"])
@pytest.mark.parametrize("model", LENSES)
def test_known_points_are_where_the_camera_sees_them(model: str, projection: Projection) -> None:
    """Points are marked where pycolmap's camera sees them, and looked for in the undistorted image: 0.1 pixels."""
    lens = made.lens(model, LENSES[model], WIDTH, HEIGHT)
    target = camera_of(lens, projection, "here", "camera 1")
    assert is_fisheye(target) == (projection == "fisheye")
    camera = Camera("a", target.width, target.height, *target.params[:4], np.eye(4), model=projection)
    at = np.stack(np.meshgrid(np.arange(20, camera.width - 15, _STEP), np.arange(20, camera.height - 15, _STEP)), -1)
    at = at.reshape(-1, 2) + 0.3
    rays = np.concatenate([(at - [camera.cx, camera.cy]) / [camera.fx, camera.fy], np.ones((len(at), 1))], axis=1)
    if projection == "fisheye":  # what is so far from the middle is at so many radians from the axis
        angle = np.hypot(*rays[:, :2].T)
        rays[:, :2] *= (np.tan(angle) / angle)[:, None]
    seen = np.asarray(lens.img_from_cam(rays))
    shown = ((seen > 15) & (seen < [WIDTH - 15, HEIGHT - 15])).all(axis=1)
    at, seen = at[shown], seen[shown]
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH] + 0.5
    blobs = sum(np.exp(-((x - u) ** 2 + (y - v) ** 2) / (2 * _BLOB**2)) for u, v in seen)
    image = np.repeat(np.round(250 * blobs).astype(np.uint8)[..., None], 3, axis=2)
    shown = resample(image, sampling_grid(lens, camera))[..., 0].astype(np.float64)
    y, x = np.mgrid[0 : camera.height, 0 : camera.width] + 0.5
    errors = []
    for u, v in at:
        weight = shown * ((np.abs(x - u) < 9) & (np.abs(y - v) < 9))
        errors.append(np.hypot((weight * x).sum() / weight.sum() - u, (weight * y).sum() / weight.sum() - v))
    assert len(errors) >= 12
    assert max(errors) < 0.1, max(errors)


@pytest.mark.parametrize("model", LENSES)
def test_the_picture_is_the_one_that_pycolmap_makes(model: str) -> None:
    lens = made.lens(model, LENSES[model], WIDTH, HEIGHT)
    image = _image(lens)
    theirs, pinhole = pycolmap.undistort_image(
        pycolmap.UndistortCameraOptions(), pycolmap.Bitmap.from_array(image), lens
    )
    camera = Camera("a", pinhole.width, pinhole.height, *pinhole.params[:4], np.eye(4))
    ours = resample(image, sampling_grid(lens, camera)).astype(np.float64)
    expected = np.asarray(theirs.to_array()).astype(np.float64)
    difference = np.abs(ours - expected)[3:-3, 3:-3]
    # Theirs is bilinear, ours bicubic. Measured: 0.06 to 0.14 in the mean.
    assert difference.max() <= 1.0
    assert difference.mean() < 0.2
    aside = np.abs(ours[:, 1:] - expected[:, :-1])[3:-3, 3:-3].mean()
    assert aside > 1.2, "one pixel aside would be seen"


@pytest.mark.parametrize("focal", [350.0, 280.0])
def test_a_fisheye_that_sees_sideways_and_behind_is_cut_to_what_a_pinhole_can_see(focal: float) -> None:
    """1000 x 1000 pixels, 164 and 205 degrees across: the middle is kept, and each ray is where it belongs."""
    lens = made.lens("OPENCV_FISHEYE", [focal, focal, 500.0, 500.0, 0.0, 0.0, 0.0, 0.0], 1000, 1000)
    pinhole = pinhole_of(lens, "here", "camera 1")
    assert 60 < np.degrees(2 * np.arctan(0.5 * pinhole.width / pinhole.focal_length_x)) < 160
    ray = np.array([[0.4, -0.3, 1.0]])
    angle = np.arctan(0.5)
    np.testing.assert_allclose(lens.img_from_cam(ray)[0], 500 + focal * angle * np.array([0.8, -0.6]), atol=1e-9)


def test_models_without_coefficients_are_not_pinholes_for_that() -> None:
    assert not is_pinhole(made.lens("SIMPLE_FISHEYE", [60.0, 32.0, 24.0]))
    assert is_pinhole(made.lens("SIMPLE_PINHOLE", [60.0, 32.0, 24.0]))
    assert is_pinhole(made.lens("OPENCV", [60.0, 60.0, 32.0, 24.0, 0, 0, 0, 0]))
    assert not is_pinhole(made.lens("OPENCV", [60.0, 60.0, 32.0, 24.0, 0, 0, 0, 0.001]))


@pytest.mark.parametrize(("focal", "k"), [(60.0, -0.9), (30.0, -0.9), (60.0, 1e9), (60.0, -1e300)])
def test_coefficients_that_fold_the_picture_are_refused(focal: float, k: float) -> None:
    with pytest.raises(SceneError, match="cannot be undone"):
        pinhole_of(made.lens("SIMPLE_RADIAL", [focal, 32.0, 24.0, k]), "cameras.bin", "camera 1")


@pytest.mark.parametrize("projection", ["auto", "fisheye"])
@pytest.mark.parametrize(("focal", "k"), [(60.0, -0.9), (30.0, -0.9), (60.0, 1e9), (60.0, -1e300)])
def test_they_are_refused_for_a_fisheye_too(focal: float, k: float, projection: Projection) -> None:
    for model in ("SIMPLE_RADIAL", "SIMPLE_RADIAL_FISHEYE"):
        with pytest.raises(SceneError, match="cannot be undone"):
            camera_of(made.lens(model, [focal, 32.0, 24.0, k]), projection, "cameras.bin", "camera 1")


@pytest.mark.parametrize("model", LENSES)
def test_lenses_that_see_less_to_the_side_become_pinholes(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """73 degrees across, and less. Nine rays tell: a thousand images may have a lens each."""
    monkeypatch.setattr(FieldOfView, "of", None)
    assert not is_fisheye(camera_of(made.lens(model, LENSES[model], WIDTH, HEIGHT), "auto", "here", "camera 1"))


@pytest.mark.parametrize(
    ("degrees", "expected"), [(70.0, False), (90.0, False), (100.0, True), (130.0, True), (180.0, True), (220.0, True)]
)
def test_wide_lenses_become_fisheyes(degrees: float, expected: bool) -> None:
    """By the angle from the left edge to the right, 5/4 of it from corner to corner; beyond 85 degrees none sees."""
    focal = 500.0 / np.radians(degrees / 2)
    lens = made.lens("OPENCV_FISHEYE", [focal, focal, 500.0, 375.0, 0.004, -0.002, 0.0, 0.0], 1000, 750)
    target = camera_of(lens, "auto", "here", "camera 1")
    assert is_fisheye(target) == expected
    if expected:
        assert target.focal_length_x == focal
        across = target.width / focal
        assert across == pytest.approx(min(np.radians(degrees), 2 * MAX_ANGLE), rel=0.01)


def test_what_folds_back_into_the_image_from_outside_is_blank() -> None:
    """The polynomial of a real calibration holds inside the image; here it turns round at 65 degrees, 1.02 radians."""
    k = [0.0, 0.05, -0.12, 0.0]
    angles = np.radians(np.linspace(0.0, 85.0, 86))
    radii = angles * (1 + k[1] * angles**4 + k[2] * angles**6)
    top = int(radii.argmax())
    assert 60 < top < 80
    assert radii[-1] < 0.75
    lens = made.lens("OPENCV_FISHEYE", [60.0, 60.0, 48.0, 36.0, *k], 96, 72)  # 46 degrees to the left and right
    target = camera_of(lens, "fisheye", "here", "camera 1")
    assert 96 <= target.width < 2 * 60.0 * angles[top]
    wide = Camera("a", 180, 180, 60.0, 60.0, 90.0, 90.0, np.eye(4), model="fisheye")
    unseen = blank(sampling_grid(lens, wide))
    assert unseen is not None
    y, x = np.mgrid[0:180, 0:180] + 0.5
    angle = np.hypot(x - 90.0, y - 90.0) / 60.0
    assert unseen[angle > angles[top] + 0.02].all()
    assert not unseen[angle < np.radians(30.0)].any()


def test_blank_pixels_are_masked_and_have_no_depth(tmp_path: Path) -> None:
    """Beside the scene's own masks, and where what they hide is transparent."""
    lens = made.lens("FISHEYE", [60.0, 60.0, 80.0, 60.0], WIDTH, HEIGHT)  # 153 degrees, 191 from corner to corner
    made.write_model(tmp_path / "sparse/0", made.reconstruction(lens))
    for folder in ("images", "masks", "depths"):
        (tmp_path / folder).mkdir()
    white, mask = np.full((HEIGHT, WIDTH, 3), 255, np.uint8), np.full((HEIGHT, WIDTH), 255, np.uint8)
    mask[40:60, 30:50] = 0
    for name in made.names():
        Image.fromarray(white).save(tmp_path / "images" / name)
        Image.fromarray(mask).save(tmp_path / "masks" / name)
        np.save(tmp_path / "depths" / f"{name}.npy", np.full((HEIGHT, WIDTH), 2.0, np.float32))
    for mode in ("ignore", "transparent"):
        scene = read_scene(tmp_path, DataConfig(depths="depths", mask_mode=mode))
        camera, image = scene.cameras[0], scene.images.image(0)
        assert (camera.model, camera.width, camera.height) == ("fisheye", WIDTH, HEIGHT)
        y, x = np.mgrid[0 : camera.height, 0 : camera.width] + 0.5
        angle = np.hypot((x - camera.cx) / camera.fx, (y - camera.cy) / camera.fy)
        assert image.masked is not None
        assert image.depth is not None
        assert scene.images.masked
        beyond = angle > MAX_ANGLE
        assert 0 < beyond.sum() < 0.2 * beyond.size
        assert image.masked[beyond].all()
        assert not image.depth[beyond].any()
        hidden = image.masked & ~beyond
        assert bool(hidden.any()) == (mode == "ignore")
        assert (image.depth[angle < MAX_ANGLE - 0.05] == 2.0).all()
        assert not image.pixels[45:55, 35:45].any()
        assert (image.pixels[45:55, 60:100] == 255).all()


def test_the_map_of_a_camera_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import splatcli.scene.images as images

    calls = []
    plain = images.sampling_grid
    monkeypatch.setattr(images, "sampling_grid", lambda *args: calls.append(args) or plain(*args))
    scene = _scene(tmp_path, "OPENCV", DataConfig(cache_bytes=1))
    for i in range(made.COUNT):
        scene.images.load(i)
    assert len(calls) == 1
