"""Depth maps: found by name, checked before they are read, and laid on the image's pixels without mixing any."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from splatcli.config import DataConfig
from splatcli.errors import SceneError
from splatcli.scene.decode import apply_orientation, nearest
from splatcli.scene.depth_maps import DepthFile, check_depth_map, depths_of_map, read_depth_map
from splatcli.scene.read import read_scene
from splatcli.scene.scene import check_depths
from splatcli.scene.undistort import sampling_grid
from tests.scene import made

Write = Callable[[Path, NDArray[np.float64]], None]


def depth_of(i: int, width: int = made.WIDTH, height: int = made.HEIGHT) -> NDArray[np.float64]:
    """[H, W] whole millimetres between 1 and 9 units, with a hole; other numbers for each i."""
    depths = np.random.default_rng(i).integers(1000, 9000, (height, width)) / 1000
    depths[3:7, 5:20] = 0.0
    return depths


def write_png(path: Path, depths: NDArray[np.float64]) -> None:
    Image.fromarray(np.round(depths * 1000).astype(np.uint16)).save(path)


def write_npy(path: Path, depths: NDArray[np.float64]) -> None:
    np.save(path, np.where(depths > 0, depths, np.nan))


def write_half(path: Path, depths: NDArray[np.float64]) -> None:
    np.save(path, np.where(depths > 0, depths, np.inf).astype(np.float16)[..., None])


def write_npz(path: Path, depths: NDArray[np.float64]) -> None:
    np.savez_compressed(path, depth=np.asfortranarray(depths), confidence=np.ones(3))


def write_tiff(path: Path, depths: NDArray[np.float64]) -> None:
    Image.fromarray(np.where(depths > 0, depths, -1).astype(np.float32)).save(path)


KINDS: list[tuple[str, Write, float]] = [
    (".png", write_png, 1e-6),
    (".npy", write_npy, 1e-6),
    (".npy", write_half, 5e-3),
    (".npz", write_npz, 1e-6),
    (".tiff", write_tiff, 1e-6),
]


def with_maps(root: Path, write: Write, suffix: str, **changes: Any) -> Path:
    for i, name in enumerate(made.names()):
        path = root / "depths" / f"{name}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, depth_of(i, **changes))
    return root


def nerfstudio_maps(
    root: Path, write: Write = write_png, suffix: str = ".png", key: str = "depth_file_path", **top: Any
) -> Path:
    made.nerfstudio_scene(root, **top)
    with_maps(root, write, suffix)
    document = json.loads((root / "transforms.json").read_text())
    for frame in document["frames"]:
        frame[key] = f"depths/{Path(frame['file_path']).name}{suffix}"
    (root / "transforms.json").write_text(json.dumps(document))
    return root


@pytest.mark.parametrize(("suffix", "write", "exact"), KINDS, ids=lambda value: getattr(value, "__name__", value))
def test_each_kind_of_map_gives_its_depths_and_no_others(
    tmp_path: Path, suffix: str, write: Write, exact: float
) -> None:
    scene = read_scene(with_maps(made.colmap_scene(tmp_path), write, suffix), DataConfig(depths="depths"))
    assert "8 of 8 images have depth maps" in scene.notes
    for i in range(made.COUNT):
        depth = scene.images.image(i).depth
        assert depth is not None
        assert depth.dtype == np.float32
        np.testing.assert_array_equal(depth == 0, depth_of(i) == 0)
        np.testing.assert_allclose(depth, depth_of(i), rtol=exact)
    known = depths_of_map(scene.images.image(2).depth)
    assert len(known.pixels) == (depth_of(2) > 0).sum()
    np.testing.assert_allclose(known.depths, depth_of(2).ravel()[known.pixels], rtol=exact)
    check_depths(scene)


@pytest.mark.parametrize(
    ("top", "data", "factor"),
    [
        ({}, {}, 1.0),
        ({"depth_unit_scale_factor": 0.01}, {}, 10.0),
        ({"depth_unit_scale_factor": 0.01}, {"depth_scale": 0.002}, 2.0),
    ],
)
def test_maps_that_transforms_name_have_its_unit(
    tmp_path: Path, top: dict[str, float], data: dict[str, float], factor: float
) -> None:
    scene = read_scene(nerfstudio_maps(tmp_path, **top), DataConfig(depths="auto", **data))
    np.testing.assert_allclose(scene.images.image(3).depth, factor * depth_of(3), rtol=1e-6)


@pytest.mark.parametrize(
    ("top", "factor"),
    [
        ({"integer_depth_scale": 0.01, "enable_depth_loading": True}, 10.0),
        ({"integer_depth_scale": 0.01, "depth_unit_scale_factor": 0.002}, 2.0),
        ({"integer_depth_scale": 0.0}, 1.0),
    ],
)
def test_maps_of_instant_ngp_have_its_names_and_unit(tmp_path: Path, top: dict[str, float], factor: float) -> None:
    """As NeRFCapture and others write them: whole numbers of 1/65535 of the greatest depth."""
    scene = read_scene(nerfstudio_maps(tmp_path, key="depth_path", **top), DataConfig(depths="auto"))
    np.testing.assert_allclose(scene.images.image(3).depth, factor * depth_of(3), rtol=1e-6)


def test_maps_are_not_read_unless_asked_for_and_then_reported(tmp_path: Path) -> None:
    nerfstudio_maps(tmp_path)
    (tmp_path / "depths/0000.png.png").unlink()
    scene = read_scene(tmp_path, DataConfig())
    assert not scene.images.has_depths
    assert any("8 images have depth maps, which splat train --depth-loss uses" in note for note in scene.notes)
    assert read_scene(tmp_path, DataConfig(depths="auto").images_only()).images.image(1).depth is None


def test_a_map_of_another_size_is_resized_to_the_nearest(tmp_path: Path) -> None:
    made.colmap_scene(tmp_path)
    with_maps(tmp_path, write_npy, ".npy", width=16, height=12)
    depth = read_scene(tmp_path, DataConfig(depths="depths")).images.image(1).depth
    np.testing.assert_allclose(depth, depth_of(1, 16, 12).repeat(4, axis=0).repeat(4, axis=1), rtol=1e-6)
    smaller = read_scene(tmp_path, DataConfig(depths="depths", resolution=2)).images.image(1).depth
    np.testing.assert_allclose(smaller, depth_of(1, 16, 12).repeat(2, axis=0).repeat(2, axis=1), rtol=1e-6)
    assert nearest(np.arange(9).reshape(1, 9), (3, 1)).tolist() == [[1, 4, 7]], "the value under the middle"


@pytest.mark.parametrize("model", ["OPENCV", "OPENCV_FISHEYE"])
@pytest.mark.parametrize("scale", [1, 2])
def test_depths_are_seen_through_the_lens_as_the_image_is(tmp_path: Path, model: str, scale: int) -> None:
    params = {"OPENCV": [60.0, 61.0, 31.0, 25.0, -0.1, 0.02, 0.003, -0.002]}
    params["OPENCV_FISHEYE"] = [50.0, 50.5, 31.0, 25.0, 0.02, -0.01, 0.001, 0.0]
    lens = made.lens(model, params[model])
    made.colmap_scene(tmp_path, camera=lens)
    # A slanted plane: z = 5 + 2 x, where x is the ray's; what the lens sees of it, by COLMAP's inverse of its model.
    y, x = np.mgrid[0 : made.HEIGHT * scale, 0 : made.WIDTH * scale] / scale + 0.5 / scale
    rays = np.asarray(lens.cam_from_img(np.stack([x.ravel(), y.ravel()], axis=1)))
    (tmp_path / "depths").mkdir()
    for name in made.names():
        np.save(tmp_path / "depths" / f"{name}.npy", 5 + 2 * rays[:, 0].reshape(x.shape))
    scene = read_scene(tmp_path, DataConfig(depths="depths"))
    camera, depth = scene.cameras[0], scene.images.image(0).depth
    assert depth is not None
    columns = np.arange(camera.width) + 0.5
    expected = np.broadcast_to(5 + 2 * (columns - camera.cx) / camera.fx, depth.shape)
    # The nearest stored pixel is half a pixel away at most, in both axes of the image.
    assert np.abs(depth - expected).max() <= 0.75 * 2 / camera.fx / scale + 0.02
    assert np.abs(depth - expected).mean() < 0.3 * 2 / camera.fx / scale + 0.005
    assert sampling_grid(lens, camera).shape[1:3] == depth.shape


@pytest.mark.parametrize("upright", [False, True])
def test_an_image_that_is_turned_turns_its_map_along(tmp_path: Path, upright: bool) -> None:
    made.colmap_scene(tmp_path)
    with_maps(tmp_path, write_npy, ".npy")
    for i, name in enumerate(made.names()):
        stored = Image.fromarray(made.picture(i)).transpose(Image.Transpose.ROTATE_90)
        exif = Image.Exif()
        exif[0x0112] = 6
        stored.save(tmp_path / "images" / name, exif=exif)
        if not upright:
            write_npy(tmp_path / "depths" / f"{name}.npy", np.rot90(depth_of(i)))
    scene = read_scene(tmp_path, DataConfig(depths="depths"))
    for i in (0, 5):
        np.testing.assert_array_equal(scene.images.load(i), made.picture(i))
        np.testing.assert_allclose(scene.images.image(i).depth, depth_of(i), rtol=1e-6)


def test_orientations_are_those_of_exif() -> None:
    """As the standard says it: where row 0 and column 0 of what is stored are seen."""
    stored = np.arange(6).reshape(2, 3)
    upright = {
        1: [[0, 1, 2], [3, 4, 5]],
        2: [[2, 1, 0], [5, 4, 3]],
        3: [[5, 4, 3], [2, 1, 0]],
        4: [[3, 4, 5], [0, 1, 2]],
        5: [[0, 3], [1, 4], [2, 5]],
        6: [[3, 0], [4, 1], [5, 2]],
        7: [[5, 2], [4, 1], [3, 0]],
        8: [[2, 5], [1, 4], [0, 3]],
    }
    for orientation, expected in upright.items():
        assert apply_orientation(stored, orientation).tolist() == expected, orientation


def test_a_cached_image_counts_the_bytes_of_its_depths(tmp_path: Path) -> None:
    with_maps(made.colmap_scene(tmp_path), write_npy, ".npy")
    images = read_scene(tmp_path, DataConfig(depths="depths")).images
    pixels = made.WIDTH * made.HEIGHT
    assert images.image(0).nbytes == 7 * pixels
    of_all = images.max_bytes()
    images.limit(0)
    assert of_all - images.max_bytes() == 7 * pixels * made.COUNT


def _bomb(path: Path) -> None:
    """A header that claims a hundred times what is there."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f8", "fortran_order": False, "shape": (480, 640)})
    path.write_bytes(head.getvalue() + bytes(100))


def _zipped(path: Path, data: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("depth.npy", data)


BAD: list[tuple[str, Callable[[Path], object], str]] = [
    (".npy", lambda p: np.save(p, depth_of(0)[:, :30]), "30x48 pixels, its image 0002.png 64x48: not the same shape"),
    (".png", lambda p: Image.fromarray(made.picture(0)).save(p), r"holds a picture \(RGB\)"),
    (".png", lambda p: Image.fromarray(made.picture(0)[..., 0]).save(p), r"holds a picture \(L\)"),
    (".npy", lambda p: np.save(p, depth_of(0).astype(np.uint8)), "type uint8 and shape"),
    (".npy", lambda p: np.save(p, depth_of(0) > 0), "type bool"),
    (".npy", lambda p: np.save(p, np.ones((48, 64, 3))), r"shape \(48, 64, 3\)"),
    (".npy", lambda p: np.save(p, np.array({"a": 1}, dtype=object), allow_pickle=True), "type object"),
    (".npy", lambda p: p.write_bytes(b"\x93NUMPY\x01\x00"), "no .npy that can be read"),
    (".npy", lambda p: p.write_bytes(b""), "no .npy that can be read"),
    (".npy", _bomb, "claims 2,457,600 bytes of numbers, the file has 100"),
    (".npz", lambda p: np.savez(p, a=depth_of(0), b=depth_of(0)), r"holds 2 arrays \(a, b\)"),
    (".npz", lambda p: p.write_bytes(b"PK"), "no .npz that can be read"),
    (".npz", lambda p: _zipped(p, b"nothing"), "no .npz that can be read"),
    (".tiff", lambda p: p.write_bytes(b"<html>"), "not an image"),
]


@pytest.mark.parametrize(("suffix", "write", "match"), BAD, ids=[f"{row[0]} {row[2][:20]}" for row in BAD])
def test_a_map_that_cannot_be_right_is_refused_when_the_scene_is_read(
    tmp_path: Path, suffix: str, write: Callable[[Path], object], match: str
) -> None:
    with_maps(made.colmap_scene(tmp_path), write_npy, ".npy")
    (tmp_path / "depths/0002.png.npy").unlink()
    path = tmp_path / f"depths/0002{suffix}"
    write(path)
    with pytest.raises(SceneError, match=match) as caught:
        read_scene(tmp_path, DataConfig(depths="depths"))
    assert caught.value.where == str(path)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("write", "match"),
    [
        (lambda p: np.save(p, -depth_of(0)), "0 or negative, down to -8"),
        (lambda p: p.write_bytes(p.read_bytes()[:-9]), "has .* bytes|claims"),
    ],
)
def test_numbers_that_cannot_be_right_are_refused_when_they_are_read(
    tmp_path: Path, write: Callable[[Path], object], match: str
) -> None:
    path = tmp_path / "a.npy"
    write_npy(path, depth_of(0))
    file = check_depth_map(DepthFile(path), Path("a.png"), (64, 48), 1, 10_000)
    write(path)
    with pytest.raises(SceneError, match=match):
        read_depth_map(file)


def test_missing_maps_are_named_and_may_be_skipped(tmp_path: Path) -> None:
    with_maps(made.colmap_scene(tmp_path), write_npy, ".npy")
    for name in made.names()[2:4]:
        (tmp_path / f"depths/{name}.npy").unlink()
    with pytest.raises(SceneError, match=r"2 of 8 depth maps are missing: 0002.png, 0003.png"):
        read_scene(tmp_path, DataConfig(depths="depths"))
    scene = read_scene(tmp_path, DataConfig(depths="depths", skip_missing=True))
    assert "6 of 8 images have depth maps" in scene.notes
    assert (scene.images.image(2).depth, scene.images.has_depth(2)) == (None, False)
    with pytest.raises(SceneError, match="folder of depth maps is not there"):
        read_scene(tmp_path, DataConfig(depths="nowhere"))
    np.savez(tmp_path / "depths/0001.npz", depth_of(1))
    with pytest.raises(SceneError, match="2 files could be meant"):
        read_scene(tmp_path, DataConfig(depths="depths", skip_missing=True))


def test_a_folder_without_a_map_of_any_image_says_what_was_looked_for(tmp_path: Path) -> None:
    """As with JPEG files, which are not read; to put maps back or to skip them would not help."""
    made.colmap_scene(tmp_path)
    (tmp_path / "depths").mkdir()
    for name in made.names():
        Image.fromarray(made.picture(0)).save(tmp_path / "depths" / f"{Path(name).stem}.jpg")
    with pytest.raises(SceneError, match=r"looked for 0000.png with the ending .npy, .npz, .png, ") as caught:
        read_scene(tmp_path, DataConfig(depths="depths", skip_missing=True))
    assert caught.value.remedy == "name the maps after their images, as PNG, TIFF, .npy or .npz"


def test_maps_that_transforms_name_and_the_disk_lacks_are_named(tmp_path: Path) -> None:
    nerfstudio_maps(tmp_path)
    (tmp_path / "depths/0005.png.png").unlink()
    with pytest.raises(SceneError, match=r"1 of 8 depth maps are missing: depths/0005.png.png"):
        read_scene(tmp_path, DataConfig(depths="auto"))
    text = (tmp_path / "transforms.json").read_text()
    (tmp_path / "transforms.json").write_text(text.replace("depths/0005.png.png", "../secret.npy"))
    with pytest.raises(SceneError, match="outside"):
        read_scene(tmp_path, DataConfig(depths="auto"))


def test_changed_maps_are_another_scene(tmp_path: Path) -> None:
    with_maps(made.colmap_scene(tmp_path), write_npy, ".npy")
    data = DataConfig(depths="depths")
    before = read_scene(tmp_path, data).fingerprint()
    write_npy(tmp_path / "depths/0000.png.npy", depth_of(77))
    after = read_scene(tmp_path, data).fingerprint()
    assert before["sha256"] == after["sha256"]
    assert before["depths"] != after["depths"]
    assert "depths" not in read_scene(tmp_path, DataConfig()).fingerprint()
