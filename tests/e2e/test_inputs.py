"""Every kind of input, from the command line: ``splat info`` and a step of ``splat train`` take it, and its pixels are
what they should be.

What each reader does with its odd cases is tested where the reader is (tests/scene/); this table is the promise that
docs/inputs.md makes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from splatcli.cli.commands import run
from splatcli.config import DataConfig
from splatcli.scene.read import read_scene
from tests.native.cases import NEEDS_COMPILER
from tests.scene import imagefiles, made

Pixels = NDArray[np.uint8]
Expected = Callable[[int], NDArray[Any]]

#: What makes a step on these scenes quick.
QUICK = ("-n", "1", "--sh-degree", "0", "--init", "random", "--set", "model.random_points=50", "--device", "cpu")


@dataclass(frozen=True)
class Kind:
    """One kind of input.

    make: writes it; returns what each photo's picture is to be, by the number of its camera.
    flags: of the command line. exact: levels of 255 that a pixel may be off by. note: what has to be reported.
    warning: what has to be warned of.
    """

    make: Callable[[Path], Expected]
    flags: tuple[str, ...] = ()
    exact: float = 0.0
    note: str = ""
    warning: str = ""


def colmap(place: str = "sparse/0", *, text: bool = False, images: str = "images") -> Callable[[Path], Expected]:
    def make(root: Path) -> Expected:
        made.write_model(root / place, made.reconstruction(), text)
        made.write_images(root / images)
        return made.picture

    return make


def photos(write: Callable[[Path, Pixels], object], expected: Callable[[Pixels], NDArray[Any]] = lambda rgb: rgb):
    """A COLMAP scene whose photos are written in another way."""

    def make(root: Path) -> Expected:
        made.write_model(root / "sparse/0", made.reconstruction())
        (root / "images").mkdir()
        for i, name in enumerate(made.names()):
            write(root / "images" / name, made.picture(i))
        return lambda i: expected(made.picture(i))

    return make


def in_folders(root: Path) -> Expected:
    names = sorted(f"cam{i % 2}/day one/{name}" for i, name in enumerate(made.names()))
    made.write_model(root / "sparse/0", made.reconstruction(image_names=names))
    made.write_images(root / "images", names)
    return made.picture


def several_cameras(root: Path) -> Expected:
    """Four photos of one lens and size, four of another."""
    model = made.reconstruction(image_names=made.names()[:4])
    second = made.lens("SIMPLE_PINHOLE", [50.0, 24.0, 16.0], 48, 32)
    second.camera_id = 2
    model.add_camera_with_trivial_rig(second)
    from splatcli.scene._pycolmap import pycolmap

    for i in range(4, 8):
        image = pycolmap.Image(name=made.names()[i], camera_id=2, image_id=i + 1)
        model.add_image_with_trivial_frame(image, pycolmap.Rigid3d(made.w2c(2 * i + 1, 16)[:3]))
    made.write_model(root / "sparse/0", model)
    for i, name in enumerate(made.names()):
        size = (made.WIDTH, made.HEIGHT) if i < 4 else (48, 32)
        (root / "images").mkdir(exist_ok=True)
        Image.fromarray(made.picture(i, *size)).save(root / "images" / name)
    return lambda i: made.picture(i) if i < 4 else made.picture(i, 48, 32)


def turned(path: Path, rgb: Pixels) -> None:
    """As a phone that is held upright stores it."""
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(rgb).transpose(Image.Transpose.ROTATE_90).save(path, exif=exif)


def with_orientation(path: Path, rgb: Pixels) -> None:
    """The tag is there, but the cameras belong to the pixels as they are stored: COLMAP ignores the tag."""
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(rgb).save(path, exif=exif)


def rgba(path: Path, rgb: Pixels) -> None:
    alpha = np.full(rgb.shape[:2], 255, np.uint8)
    alpha[:, :20] = 0
    Image.fromarray(np.dstack([rgb, alpha])).save(path)


def cut(rgb: Pixels) -> Pixels:
    rgb = rgb.copy()
    rgb[:, :20] = 0
    return rgb


def display_p3(path: Path, rgb: Pixels) -> None:
    Image.fromarray(rgb).save(path, icc_profile=imagefiles.profile(imagefiles.P3, 2.2, "P3"))


def masks(name: str) -> Callable[[Path], Expected]:
    def make(root: Path) -> Expected:
        made.colmap_scene(root)
        (root / "masks").mkdir()
        mask = np.full((made.HEIGHT, made.WIDTH), 255, np.uint8)
        mask[:, :20] = 0
        for photo in made.names():
            stem = Path(photo).stem
            Image.fromarray(mask).save(root / "masks" / name.format(photo=photo, stem=stem))
        return lambda i: cut(made.picture(i))

    return make


def nerfstudio(**top: Any) -> Callable[[Path], Expected]:
    def make(root: Path) -> Expected:
        made.nerfstudio_scene(root, **top)
        return made.picture

    return make


def own_lenses(root: Path) -> Expected:
    """Intrinsics, mask and depth map of each frame; photos of two sizes."""
    made.nerfstudio_scene(root, fl_x=None, fl_y=None, cx=None, cy=None, w=None, h=None)
    document = json.loads((root / "transforms.json").read_text())
    for folder in ("masks", "depths"):
        (root / folder).mkdir()
    for i, frame in enumerate(document["frames"]):
        width, height = (64, 48) if i % 2 else (32, 40)
        name = made.names()[i]
        Image.fromarray(made.picture(i, width, height)).save(root / "images" / name)
        mask = np.full((height, width), 255, np.uint8)
        mask[:, :20] = 0
        Image.fromarray(mask).save(root / "masks" / name)
        Image.fromarray(np.full((height, width), 4000, np.uint16)).save(root / "depths" / name)
        frame |= {"fl_x": 50.0 + i, "cx": width / 2, "cy": height / 2, "w": width, "h": height}
        frame |= {"mask_path": f"masks/{name}", "depth_file_path": f"depths/{name}"}
    (root / "transforms.json").write_text(json.dumps(document))
    return lambda i: cut(made.picture(i, *((64, 48) if i % 2 else (32, 40))))


def blender(root: Path) -> Expected:
    made.blender_scene(root)
    order = [*(("test", i) for i in range(3)), *(("train", i) for i in range(6))]
    return lambda i: made.picture(order[i][1]) * (128 / 255)


def far_away(root: Path) -> Expected:
    """A scene in UTM coordinates, half a million metres from the origin."""
    model = made.reconstruction()
    from splatcli.scene._pycolmap import pycolmap

    model.transform(pycolmap.Sim3d(1.0, pycolmap.Rotation3d(), np.array([500_000.0, 4_649_776.0, 120.0])))
    made.write_model(root / "sparse/0", model)
    made.write_images(root / "images")
    return made.picture


def below(make: Callable[[Path], Expected], place: str) -> Callable[[Path], Expected]:
    return lambda root: make(root / place)


def grey_of(rgb: Pixels) -> Pixels:
    return np.asarray(Image.fromarray(rgb).convert("L"))


KINDS = {
    "colmap binary": Kind(colmap()),
    "colmap text": Kind(colmap(text=True)),
    "colmap sparse": Kind(colmap("sparse")),
    "colmap flat": Kind(colmap(".", images=".")),
    "colmap colmap/sparse/0": Kind(colmap("colmap/sparse/0"), note="colmap/sparse/0/ is used"),
    "colmap distorted": Kind(colmap("distorted/sparse/0", images="input"), note="distorted/sparse/0/ is used"),
    "colmap two down": Kind(below(colmap(), "one/two"), note="one/two/sparse/0/ is used"),
    "sub-folders": Kind(in_folders),
    "several cameras and sizes": Kind(several_cameras),
    "far from the origin": Kind(far_away, note="too far for float32"),
    "jpeg": Kind(photos(lambda p, rgb: Image.fromarray(rgb).save(p, "JPEG", quality=98, subsampling=0)), exact=8.0),
    "webp": Kind(photos(lambda p, rgb: Image.fromarray(rgb).save(p, "WEBP", lossless=True))),
    "png of 16 bits": Kind(photos(lambda p, rgb: p.write_bytes(imagefiles.png16(rgb.astype(np.uint16) * 257)))),
    "tiff of 8 bits": Kind(photos(lambda p, rgb: Image.fromarray(rgb).save(p, "TIFF"))),
    "tiff of 16 bits": Kind(photos(lambda p, rgb: p.write_bytes(imagefiles.tiff16(rgb.astype(np.uint16) * 257, 8)))),
    "grey": Kind(photos(lambda p, rgb: Image.fromarray(grey_of(rgb)).save(p), lambda rgb: grey_of(rgb)[..., None])),
    "grey of 16 bits": Kind(
        photos(
            lambda p, rgb: Image.fromarray(grey_of(rgb).astype(np.uint16) * 257).save(p),
            lambda rgb: grey_of(rgb)[..., None],
        )
    ),
    "palette": Kind(
        photos(
            lambda p, rgb: Image.fromarray(rgb).quantize(64).save(p),
            lambda rgb: np.asarray(Image.fromarray(rgb).quantize(64).convert("RGB")),
        )
    ),
    "rgba": Kind(photos(rgba, cut), note="composited on the background"),
    "cmyk": Kind(
        photos(lambda p, rgb: Image.fromarray(255 - rgb).convert("CMYK").save(p, "TIFF"), lambda rgb: 255 - rgb),
        note="CMYK without a profile",
    ),
    "display p3": Kind(
        photos(display_p3, lambda rgb: 255 * imagefiles.to_srgb(rgb / 255, imagefiles.P3, 2.2)), exact=3.0, note="P3"
    ),
    "turned by exif": Kind(photos(turned), note="turned as their EXIF orientation says"),
    "exif that does not apply": Kind(photos(with_orientation), note="EXIF orientation that is not applied"),
    "masks a.png": Kind(masks("{stem}.png"), note="8 images have masks"),
    "masks a.jpg.png": Kind(masks("{photo}.png"), note="8 images have masks"),
    "alpha as masks": Kind(photos(rgba, cut), ("--masks", "alpha"), note="takes no part"),
    "nerfstudio": Kind(nerfstudio()),
    "instant-ngp": Kind(nerfstudio(camera_angle_x=0.98, fl_x=None, fl_y=None, aabb_scale=4, k1=0.0)),
    "nerfstudio two down": Kind(below(nerfstudio(), "one/two"), note="one/two/ is used"),
    "frames with lens, mask and depth": Kind(own_lenses, ("--depth-loss",), note="8 of 8 images have depth maps"),
    "blender": Kind(blender, exact=0.51, note="have transparency", warning="look as another one does"),
}


def result(words: list[str], capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The final object of a command that has to succeed."""
    code = run([*words, "--json"])
    said = capfd.readouterr()
    assert code == 0, said.err
    return json.loads(said.out.splitlines()[-1])


@NEEDS_COMPILER
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_input_is_read_trained_on_and_right(kind: str, tmp_path: Path, capfd) -> None:
    row, root = KINDS[kind], tmp_path / "scene"
    expected = row.make(root)
    facts = result(["info", str(root), *row.flags], capfd)
    assert facts["kind"] == "scene"
    assert row.note in " ".join(facts["notes"])
    assert row.warning in " ".join(one["text"] for one in facts["findings"] if one["state"] == "warning")
    assert row.warning or all(one["state"] != "warning" for one in facts["findings"])
    trained = result(["train", str(root), "-o", str(tmp_path / "run"), *QUICK, *row.flags], capfd)
    assert trained["reason"] == "finished"
    scene = read_scene(root, DataConfig(masks="alpha" if "alpha" in row.flags else None))
    for i in (0, 3, 5, len(scene.cameras) - 1):
        found, wanted = scene.images.load(i), expected(i)
        assert found.shape[:2] == wanted.shape[:2]
        assert np.abs(found.astype(np.float64) - wanted).max() <= row.exact, scene.cameras[i].name


@NEEDS_COMPILER
def test_a_scene_far_from_the_origin_goes_out_where_it_came_from(tmp_path: Path, capfd) -> None:
    """Trained near the origin, exported at its UTM coordinates, cameras too."""
    root = tmp_path / "scene"
    far_away(root)
    near = tmp_path / "near"
    colmap()(near)
    shutil.rmtree(root / "images")
    (near / "images").rename(root / "images")
    run_dir = tmp_path / "run"
    words = [
        "-n",
        "1",
        "--sh-degree",
        "0",
        "--device",
        "cpu",
        "--set",
        "strategy.prune_scale3d=100",
        "-o",
        str(run_dir),
    ]
    result(["train", str(root), *words], capfd)
    result(["export", str(run_dir), "-o", str(tmp_path / "a.ply"), "--frame", "input"], capfd)
    facts = result(["info", str(tmp_path / "a.ply")], capfd)
    low, high = np.array(facts["bounds"])
    # The scene's points are within one unit of the origin; float32 rounds to half a unit at 4.6 million.
    np.testing.assert_array_less([499_990, 4_649_770, 110], low)
    np.testing.assert_array_less(high, [500_010, 4_649_790, 130])
