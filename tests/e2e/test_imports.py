"""Cameras of other programs: each reader gives back those that its file was written from, and errors name files."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from scipy.spatial.transform import Rotation

from splatcli.cli.commands import run
from splatcli.config import DataConfig
from splatcli.errors import SceneError
from splatcli.progress import listening
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.geodesy import enu_axes, from_geocentric, to_enu, to_geocentric
from splatcli.scene.inspect import compare_observations
from splatcli.scene.read import NoCamerasError, has_images_only, read_scene
from tests.native.cases import NEEDS_COMPILER
from tests.scene import made
from tests.scene import other_programs as write

SAMPLE = Path(__file__).parents[2] / "data/samples/courtyard"
#: Views of the sample that are used.
COUNT = 12

TURN = Rotation.from_euler("XYZ", [20, -35, 110], degrees=True).as_matrix()
PLACED = (TURN, np.array([3.0, -2.0, 0.5]), 4.5)

Writer = Callable[..., None]
PROGRAMS: dict[str, Writer] = {
    "metashape": write.metashape,
    "metashape in a chunk": lambda *a, **k: write.metashape(*a, **k, placement=PLACED, placed_by="chunk"),
    "metashape in a component": lambda *a, **k: write.metashape(*a, **k, placement=PLACED),
    "realitycapture": write.realitycapture,
    "realityscan": lambda *a, **k: write.realitycapture(*a, **k, newer=True),
    "realitycapture for OpenCV": write.realitycapture_opencv,
    "realitycapture by XMP": write.realitycapture_xmp,
    "opf": write.opf,
    "opf with a list in a folder": lambda *a, **k: write.opf(
        *a, **k, uri=lambda name: f"../photos/{name}", list_file="meta/camera-list.json"
    ),
    "opf of another machine": lambda *a, **k: (
        write.opf(*a, **k, uri=lambda name: f"file:///C:/jobs/my%20photos/{name}"),
        (a[0] / "photos").rename(a[0] / "images"),
    ),
    "opensfm": write.opensfm,
    "opensfm of OpenDroneMap": lambda *a, **k: write.opensfm(*a, **k, place="opensfm/reconstruction.json"),
    "openmvg": write.openmvg,
    "polycam": write.polycam,
    "polycam as tracked": lambda *a, **k: write.polycam(*a, **k, corrected=False),
    "record3d": write.record3d,
    "record3d, unpacked and counted anew": lambda *a, **k: (write.record3d(*a, **k), written_again(a[0])),
    "record3d with own lenses": lambda *a, **k: write.record3d(*a, **k, own=True),
}


def written_again(root: Path) -> None:
    """K row by row, images from 1 on, and the name of the file inside an .r3d archive."""
    facts = json.loads((root / "metadata.json").read_text())
    facts["K"] = np.reshape(facts["K"], (3, 3)).T.ravel().tolist()
    (root / "metadata.json").unlink()
    (root / "metadata").write_text(json.dumps(facts))
    for number in reversed(range(len(facts["poses"]))):
        (root / f"rgb/{number}.jpg").rename(root / f"rgb/{number + 1}.jpg")


@pytest.fixture(scope="session")
def sample() -> list[write.Known]:
    return write.of_colmap(pycolmap.Reconstruction(SAMPLE / "sparse/0"))[:COUNT]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, sample: list[write.Known]) -> Path:
    """The sample's first views as a COLMAP scene, a model of it, and its renders; not to be changed."""
    root = tmp_path_factory.mktemp("reference")
    shutil.copytree(SAMPLE / "sparse", root / "scene/sparse")
    write.copy_images(SAMPLE / "images", root / "scene/images", sample, lambda _, name: name)
    model = pycolmap.Reconstruction(root / "scene/sparse/0")
    for image in list(model.images.values()):
        if image.name not in {camera.name for camera in sample}:
            model.deregister_frame(image.frame_id)
    model.write(root / "scene/sparse/0")
    words = ["-n", "1", "--sh-degree", "0", "--device", "cpu", "-r", "2", "-q", "-o", str(root / "run")]
    assert run(["train", str(root / "scene"), *words]) == 0
    assert run(["export", str(root / "run"), "-o", str(root / "model.ply"), "-q"]) == 0
    for point in list(model.point3D_ids()):  # the other programs' scenes have no points, hence no near planes by them
        model.delete_point3D(point)
    model.write(root / "scene/sparse/0")
    render(root / "model.ply", root / "scene", root / "renders")
    return root


def render(model: Path, scene: Path, to: Path) -> list[NDArray[np.uint8]]:
    words = ["--data", str(scene), "--views", "all", "--what", "rgb", "-o", str(to), "-q", "--device", "cpu"]
    assert run(["render", str(model), *words]) == 0
    return [np.asarray(Image.open(path)) for path in sorted(to.rglob("*.png"))]


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_cameras_come_back(program: str, sample: list[write.Known], tmp_path: Path) -> None:
    PROGRAMS[program](tmp_path, SAMPLE / "images", sample)
    assert not has_images_only(tmp_path)
    scene = read_scene(tmp_path, DataConfig())
    assert len(scene.cameras) == COUNT
    first = int("anew" in program)
    for camera, known in (
        zip(scene.cameras, sample, strict=True) if "record" not in program else numbered(scene, sample, first)
    ):
        assert (camera.width, camera.height) == (known.width, known.height)
        np.testing.assert_allclose(
            [camera.fx, camera.fy, camera.cx, camera.cy], [known.focal, known.focal, known.cx, known.cy], rtol=1e-9
        )
        np.testing.assert_allclose(camera.viewmat[:3, :3].T, known.rotation, atol=1e-9)
        np.testing.assert_allclose(camera.center, known.center, atol=1e-9)


def numbered(scene, sample, first):
    return ((camera, sample[int(Path(camera.name).stem) - first]) for camera in scene.cameras)


@NEEDS_COMPILER
@pytest.mark.parametrize(
    "program", ["metashape in a chunk", "realitycapture", "opensfm", "openmvg", "opf", "polycam", "record3d"]
)
def test_a_render_through_the_import_is_that_of_the_sample(
    program: str, sample: list[write.Known], reference: Path, tmp_path: Path
) -> None:
    some = sample[:10]  # record3d's images are numbered, and 10 comes before 2
    PROGRAMS[program](tmp_path / "scene", SAMPLE / "images", some)
    wanted = [np.asarray(Image.open(path)) for path in sorted((reference / "renders").rglob("*.png"))]
    found = render(reference / "model.ply", tmp_path / "scene", tmp_path / "renders")
    assert len(found) == len(some)
    for one, other in zip(found, wanted, strict=False):
        assert np.abs(one.astype(int) - other).max() <= 1
    assert max(image.std() for image in found) > 10


@NEEDS_COMPILER
@pytest.mark.parametrize("program", ["metashape", "realitycapture", "opensfm", "openmvg", "opf", "polycam", "record3d"])
def test_a_scene_is_trained_on(program: str, sample: list[write.Known], tmp_path: Path, capfd) -> None:
    PROGRAMS[program](tmp_path / "scene", SAMPLE / "images", sample)
    words = ["-n", "1", "--sh-degree", "0", "--device", "cpu", "-r", "4", "--init", "random", "--json"]
    code = run(["train", str(tmp_path / "scene"), "-o", str(tmp_path / "run"), *words])
    said = capfd.readouterr()
    assert code == 0, said.err
    assert json.loads(said.out.splitlines()[-1])["reason"] == "finished"
    assert run(["info", str(tmp_path / "scene"), "--json"]) == 0
    facts = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert facts["scene_kind"] == program


# --- lenses -----------------------------------------------------------------------------------------------------------

K3 = write.Distortion((-0.12, 0.05, -0.01, 0.0), (0.0013, -0.0008))
K4 = write.Distortion((-0.12, 0.05, -0.02, 0.004), (0.0013, -0.0008))


def polynomial(x, y, lens: write.Distortion):
    """Metashape's manual (appendix D), with its p1 and p2; x and y are normalised, or angles of a fisheye lens."""
    k1, k2, k3, k4 = lens.radial
    p2, p1 = lens.tangential
    r2 = x * x + y * y
    radial = 1 + k1 * r2 + k2 * r2**2 + k3 * r2**3 + k4 * r2**4
    return (
        x * radial + p1 * (r2 + 2 * x * x) + 2 * p2 * x * y,
        y * radial + p2 * (r2 + 2 * y * y) + 2 * p1 * x * y,
    )


def rays() -> NDArray[np.float64]:
    x, y = np.meshgrid(np.linspace(-0.5, 0.5, 21), np.linspace(-0.4, 0.4, 17))
    return np.stack([x.ravel(), y.ravel(), np.ones(x.size)], axis=1)


def known_camera(i: int) -> write.Known:
    pose = np.linalg.inv(made.w2c(i))
    return write.Known(f"{i:04d}.png", 64, 48, 60.0, 33.5, 22.75, pose[:3, :3], pose[:3, 3])


@pytest.mark.parametrize(
    ("program", "lens"),
    [
        ("metashape", K3),
        ("metashape", K4),
        ("realitycapture", K3),
        ("realitycapture", K4),
        ("realitycapture for OpenCV", K3),
        ("realitycapture for OpenCV", K4),
        ("realitycapture by XMP", K3),
        ("realitycapture by XMP", K4),
        ("opf", K3),
        ("opensfm", K3),
        ("openmvg", K3),
    ],
)
def test_a_distorted_lens_projects_as_the_program_says(program: str, lens: write.Distortion, tmp_path: Path) -> None:
    PROGRAMS[program](tmp_path, None, [known_camera(i) for i in range(made.COUNT)], lens)
    found = lens_of(tmp_path, program)
    xyz = rays()
    x, y = polynomial(xyz[:, 0], xyz[:, 1], lens)
    wanted = np.stack([60.0 * x + 33.5, 60.0 * y + 22.75], axis=1)
    off = np.abs(found.img_from_cam(xyz) - wanted).max()
    assert off <= (1e-9 if lens is K3 else 0.05)


def lens_of(root: Path, program: str) -> Any:
    from splatcli.scene.read import READERS
    from splatcli.scene.source import Problems

    (reader,) = [reader for reader in READERS if reader.name == program.split()[0]]
    problems = Problems(root)
    source = reader.read(root, DataConfig(), problems)
    problems.raise_any()
    return source.views[0].lens(64, 48)


def test_nerfstudios_k4_is_of_degree_eight(tmp_path: Path) -> None:
    """Its tools write those of Metashape and RealityCapture, the latter's as strings."""
    k1, k2, k3, k4 = K4.radial
    p1, p2 = K4.tangential
    names = {"k1": k1, "k2": k2, "k3": str(k3), "k4": str(k4), "p1": p1, "p2": p2}
    made.nerfstudio_scene(tmp_path)
    file = tmp_path / "transforms.json"
    document = json.loads(file.read_text())
    size = {"w": 64, "h": 48, "fl_x": 60.0, "fl_y": 60.0, "cx": 33.5, "cy": 22.75, "camera_model": "OPENCV"}
    file.write_text(json.dumps({**document, **size, **names}))
    xyz = rays()
    x, y = polynomial(xyz[:, 0], xyz[:, 1], K4)
    wanted = np.stack([60.0 * x + 33.5, 60.0 * y + 22.75], axis=1)
    assert np.abs(lens_of(tmp_path, "nerfstudio").img_from_cam(xyz) - wanted).max() <= 0.05


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        ("metashape", "fisheye"),
        ("metashape", "equidistant_fisheye"),
        ("opensfm", "fisheye_opencv"),
        ("openmvg", "fisheye"),
    ],
)
def test_a_fisheye_lens(program: str, kind: str, tmp_path: Path) -> None:
    lens = K4 if program == "metashape" else write.Distortion(K4.radial)
    PROGRAMS[program](tmp_path, None, [known_camera(i) for i in range(made.COUNT)], lens, kind=kind)
    xyz = rays()
    radius = np.hypot(xyz[:, 0], xyz[:, 1])
    factor = np.divide(np.arctan(radius), radius, out=np.ones_like(radius), where=radius > 0)
    x, y = polynomial(xyz[:, 0] * factor, xyz[:, 1] * factor, lens)
    wanted = np.stack([60.0 * x + 33.5, 60.0 * y + 22.75], axis=1)
    np.testing.assert_allclose(lens_of(tmp_path, program).img_from_cam(xyz), wanted, atol=1e-9)


#: Coefficients of OpenSfM's richer fisheye lenses, and how near the nearest lens of COLMAP is, in pixels.
RICH = {
    "fisheye62": ({}, 1e-9),
    "fisheye62, all terms": ({"k5": 0.02, "k6": -0.004}, 0.1),
    "fisheye624": ({"s0": 0.0007, "s2": -0.0004}, 1e-9),
    "fisheye624, all terms": ({"k5": 0.02, "k6": -0.004, "s0": 7e-4, "s1": -2e-4, "s2": -4e-4, "s3": 3e-4}, 0.1),
}


@pytest.mark.parametrize("name", RICH)
def test_a_rich_fisheye_lens_of_opensfm(name: str, tmp_path: Path) -> None:
    """Radial, tangential and thin prism terms, all of the undistorted angles; hundreds of pixels to a radian."""
    extra, near = RICH[name]
    kind = name.split(",")[0]
    cameras = [write.Known("0.png", 640, 480, 400.0, 323.5, 237.75, np.eye(3), np.zeros(3))]
    write.opensfm(tmp_path, None, cameras, K4, kind=kind, extra=extra)
    xyz = np.concatenate([rays() * [2.0, 2.0, 1.0], [[0.0, 0.0, 1.0]]])
    x, y = np.arctan(np.hypot(xyz[:, 0], xyz[:, 1])) / np.hypot(*(xyz[:, :2] + 1e-300).T) * xyz[:, :2].T
    r2 = x * x + y * y
    s0, s1, s2, s3 = (extra.get(f"s{i}", 0.0) for i in range(4))
    more = extra.get("k5", 0.0) * r2**5 + extra.get("k6", 0.0) * r2**6
    wanted = np.stack(polynomial(x, y, K4)) + more * np.stack([x, y])
    wanted += np.stack([s0 * r2 + s1 * r2**2, s2 * r2 + s3 * r2**2])
    off = lens_of(tmp_path, "opensfm").img_from_cam(xyz) - (400.0 * wanted.T + [323.5, 237.75])
    assert np.abs(off).max() <= near


@pytest.mark.parametrize("transition", [None, 0.2, 1.0])
def test_a_dual_lens_of_opensfm(transition: float | None, tmp_path: Path) -> None:
    """A mixture of perspective and fisheye, half and half where the file does not say."""
    cameras = [write.Known("0.png", 640, 480, 500.0, 320.0, 240.0, np.eye(3), np.zeros(3))]
    extra = {} if transition is None else {"transition": transition}
    write.opensfm(tmp_path, None, cameras, K4, kind="dual", extra=extra)
    xyz = rays() * [1.2, 1.2, 1.0]
    radius = np.hypot(xyz[:, 0], xyz[:, 1])
    mix = 0.5 if transition is None else transition
    factor = mix + (1 - mix) * np.divide(np.arctan(radius), radius, out=np.ones_like(radius), where=radius > 0)
    k1, k2, *_ = K4.radial
    r = radius * factor
    wanted = 500.0 * xyz[:, :2] * (factor * (1 + k1 * r**2 + k2 * r**4))[:, None] + [320.0, 240.0]
    assert np.abs(lens_of(tmp_path, "opensfm").img_from_cam(xyz) - wanted).max() <= 0.1


def opf_fisheye(root: Path, polynomial: list[float], affine: list[float]) -> None:
    camera = write.Known("0.png", 1280, 960, 0.0, 0.0, 0.0, np.eye(3), np.zeros(3))
    internals = {"type": "fisheye", "principal_point_px": [634.45, 481.23], "polynomial": polynomial, "affine": affine}
    internals |= {"is_p0_zero": True, "is_symmetric_affine": True}
    write.opf(root, None, [camera], internals=internals)


@pytest.mark.parametrize(
    ("polynomial", "affine", "skew"),
    [
        # As of the specification's example: a lens of 94 by 76 degrees. And one whose circle fills the image.
        ([0.0, 1.0, 0.0152646, -0.161096], [1676.296432, 0.0, 0.0, 1676.296432], None),
        ([0.0, 1.0, -0.03, 0.05, -0.02], [640.0, 0.0, 0.0, 641.5], None),
        ([0.0, 1.0, 0.0152646, -0.161096], [1676.296432, 0.3, -0.2, 1676.296432], 0.13),
    ],
)
def test_a_fisheye_lens_of_opf(
    polynomial: list[float], affine: list[float], skew: float | None, tmp_path: Path
) -> None:
    """Pix4D's model: angles in units of a right angle, a polynomial of them, and an affine map to pixels."""
    opf_fisheye(tmp_path, polynomial, affine)
    made.write_images(tmp_path / "images")
    xyz = rays() * [1.6, 1.6, 1.0]
    radius = np.maximum(np.hypot(xyz[:, 0], xyz[:, 1]), 1e-12)
    theta = 2 / np.pi * np.arctan(radius)
    rho = sum(coefficient * theta**power for power, coefficient in enumerate(polynomial))
    wanted = (rho / radius)[:, None] * xyz[:, :2] @ np.reshape(affine, (2, 2)).T + [634.45, 481.23]
    inside = ((wanted >= 0) & (wanted <= [1280, 960])).all(axis=1)
    assert inside.sum() > 100
    off = np.abs(lens_of(tmp_path, "opf").img_from_cam(xyz) - wanted)[inside].max()
    assert off <= 0.1 + (skew or 0.0)


@pytest.mark.parametrize(
    ("polynomial", "affine", "says"),
    [
        ([0.01, 1.0], [1676.0, 0.0, 0.0, 1676.0], "pixels away from the nearest one of COLMAP's models"),
        ([0.0, 1.0], [1676.0, 3.0, 0.0, 1676.0], "skews the image by 0.86 pixels"),
        ([0.0, 1.0], [1676.0, 0.0, 0.0, -1676.0], "focal length is not positive"),
        ([0.0], [1676.0, 0.0, 0.0, 1676.0], "polynomial is not 2 numbers"),
        ([0.0, 1.0, 1e300], [1676.0, 0.0, 0.0, 1676.0], "inf pixels away"),
    ],
)
def test_a_fisheye_lens_of_opf_that_is_refused(
    polynomial: list[float], affine: list[float], says: str, tmp_path: Path
) -> None:
    opf_fisheye(tmp_path, polynomial, affine)
    with pytest.raises(SceneError, match=says) as caught:
        lens_of(tmp_path, "opf")
    assert "calibrated-cameras.json" in str(caught.value)


@pytest.mark.parametrize(
    ("program", "kind", "count"),
    [
        ("opensfm", "perspective", 2),
        ("opensfm", "fisheye", 2),
        ("openmvg", "pinhole", 0),
        ("openmvg", "pinhole_radial_k1", 1),
        ("openmvg", "pinhole_radial_k3", 3),
    ],
)
def test_a_lens_with_fewer_coefficients(program: str, kind: str, count: int, tmp_path: Path) -> None:
    """OpenSfM's have their principal point in the middle."""
    lens = write.Distortion((*K4.radial[:count], *[0.0] * (4 - count)))
    cx, cy = (32.0, 24.0) if program == "opensfm" else (33.5, 22.75)
    PROGRAMS[program](tmp_path, None, [known_camera(i) for i in range(made.COUNT)], lens, kind=kind)
    xyz = rays()
    radius = np.hypot(xyz[:, 0], xyz[:, 1])
    factor = (
        np.divide(np.arctan(radius), radius, out=np.ones_like(radius), where=radius > 0) if kind == "fisheye" else 1
    )
    x, y = polynomial(xyz[:, 0] * factor, xyz[:, 1] * factor, lens)
    wanted = np.stack([60.0 * x + cx, 60.0 * y + cy], axis=1)
    np.testing.assert_allclose(lens_of(tmp_path, program).img_from_cam(xyz), wanted, atol=1e-9)


def test_a_lens_of_photoscan_before_version_1_2(tmp_path: Path) -> None:
    """Agisoft Lens' manual: u = cx + x' fx + y' skew, with p1 and p2 as OpenCV has them."""
    write.metashape(tmp_path, None, [known_camera(i) for i in range(made.COUNT)], K3)
    text = (tmp_path / "project.xml").read_text()
    old = "<fx>61.0</fx><fy>60.0</fy><cx>33.5</cx><cy>22.75</cy><skew>0</skew>"
    text = re.sub("<f>60.*</cy>", old, text).replace("p1>", "p3>").replace("p2>", "p1>").replace("p3>", "p2>")
    (tmp_path / "project.xml").write_text(text)
    xyz = rays()
    x, y = polynomial(xyz[:, 0], xyz[:, 1], K3)
    wanted = np.stack([61.0 * x + 33.5, 60.0 * y + 22.75], axis=1)
    np.testing.assert_allclose(lens_of(tmp_path, "metashape").img_from_cam(xyz), wanted, atol=1e-9)


def uncalibrated(root: Path, properties: dict[str, float]) -> None:
    """Write a chunk whose sensor has no calibration, as one of a film's frames whose lens was known and held."""
    made.write_images(root / "images")
    write.metashape(root, None, [known_camera(i) for i in range(made.COUNT)])
    rows = "".join(f'<property name="{name}" value="{value}"/>' for name, value in properties.items())
    file = root / "project.xml"
    file.write_text(re.sub("<calibration.*</calibration>", rows, file.read_text(), flags=re.DOTALL))


def test_a_sensor_of_metashape_without_a_calibration_has_the_lens_of_its_pixels(tmp_path: Path) -> None:
    uncalibrated(tmp_path, {"pixel_width": 0.1, "pixel_height": 0.125, "focal_length": 6.0, "fixed": "true"})
    scene = read_scene(tmp_path, DataConfig())
    assert {(c.fx, c.fy, c.cx, c.cy, c.width, c.height) for c in scene.cameras} == {(60.0, 48.0, 32.0, 24.0, 64, 48)}
    assert any("it is not calibrated: its focal length, 60 pixels" in note for note in scene.notes)


@pytest.mark.parametrize(
    ("properties", "says"),
    [
        ({"pixel_width": 0.1, "pixel_height": 0.1}, "it is not calibrated"),
        ({"pixel_width": 0.0, "pixel_height": 0.1, "focal_length": 6.0}, "its pixels' size is not positive"),
        ({"pixel_width": "wide", "pixel_height": 0.1, "focal_length": 6.0}, "pixel_width is 'wide', not a number"),
    ],
)
def test_a_sensor_of_metashape_whose_lens_is_not_known_is_an_error(
    properties: dict[str, float], says: str, tmp_path: Path
) -> None:
    uncalibrated(tmp_path, properties)
    with pytest.raises(SceneError, match=says) as caught:
        read_scene(tmp_path, DataConfig())
    assert caught.value.where == str(tmp_path / "project.xml")
    assert caught.value.remedy is not None


def test_b1_stretches_the_width_and_a_small_skew_is_reported(tmp_path: Path) -> None:
    cameras = [known_camera(i) for i in range(made.COUNT)]
    made.write_images(tmp_path / "images")
    write.metashape(tmp_path, None, cameras, extra="<b1>1.5</b1><b2>-0.3</b2>")
    scene = read_scene(tmp_path, DataConfig())
    assert (scene.cameras[0].fx, scene.cameras[0].fy) == pytest.approx((61.5, 60.0))
    assert any("skew b2 is left out, which shifts the edge of the image by 0.13 pixels" in note for note in scene.notes)
    assert "1 camera of the Metashape chunk is not aligned" in scene.notes


@pytest.mark.parametrize("leader", [0, 1])
def test_a_rig_of_two_cameras(leader: int, tmp_path: Path) -> None:
    """A slave has a master and no transform; sensors have their offsets from the rig's frame, in the chunk's unit.

    The master of cameras need not be of the master of sensors: the pose is the frame's all the same.
    """
    cameras = [known_camera(i) for i in range(made.COUNT)]
    made.write_images(tmp_path / "images")
    turn, shift = Rotation.from_euler("XYZ", [5, 80, -3], degrees=True).as_matrix(), np.array([0.3, -0.05, 0.1])
    rigs = [
        write.Known(f"{i:04d}.png", 64, 48, 60.0, 33.5, 22.75, camera.rotation, camera.center)
        for i, camera in enumerate(cameras[: made.COUNT // 2])
    ]
    slaves = "".join(
        f'<camera id="{90 + i}" sensor_id="{1 - leader}" master_id="{i}" label="{len(rigs) + i:04d}"/>'
        for i in range(len(rigs))
    )
    slaves += f'<camera id="80" sensor_id="1" master_id="{len(rigs)}" label="slave"/>'
    slaves += '<camera id="81" sensor_id="2" master_id="0" label="slave"/>'
    write.metashape(tmp_path, None, rigs, placement=PLACED, placed_by="chunk")
    text = (tmp_path / "project.xml").read_text()
    text = text.replace("</group></cameras>", f"{slaves}</group></cameras>")
    text = text.replace('sensor_id="0" component', f'sensor_id="{leader}" component')
    sensor = re.search('<sensor id="0".*</sensor>', text, re.DOTALL)[0]
    offset = f"<rotation>{write.numbers(turn)}</rotation><location>{write.numbers(shift / PLACED[2])}</location>"
    second = sensor.replace('id="0"', 'id="1" master_id="0"', 1).replace("<f>60.0<", "<f>50.0<")
    third = sensor.replace('id="0"', 'id="2" master_id="0"', 1).replace("</sensor>", "<location/></sensor>")
    text = text.replace(sensor, sensor + second.replace("</sensor>", f"{offset}</sensor>") + third)
    (tmp_path / "project.xml").write_text(text)
    scene = read_scene(tmp_path, DataConfig())
    assert len(scene.cameras) == 2 * len(rigs)
    for i, rig in enumerate(rigs):
        pair = [scene.cameras[i], scene.cameras[len(rigs) + i]]
        frame, other = pair[leader], pair[1 - leader]
        assert (frame.fx, other.fx) == (60.0, 50.0)
        np.testing.assert_allclose(frame.center, rig.center, atol=1e-9)
        np.testing.assert_allclose(frame.viewmat[:3, :3].T, rig.rotation, atol=1e-9)
        # A point at the slave's origin, and one a unit before it, by the offset's definition.
        np.testing.assert_allclose(other.center, rig.rotation @ shift + rig.center, atol=1e-9)
        np.testing.assert_allclose(other.viewmat[2, :3], rig.rotation @ turn @ [0, 0, 1], atol=1e-9)
        np.testing.assert_allclose(other.viewmat[0, :3], rig.rotation @ turn @ [1, 0, 0], atol=1e-9)
    assert "2 cameras of the Metashape chunk are not aligned" in scene.notes
    assert (
        "1 camera of the Metashape chunk is part of a multi-camera rig whose slave sensors have no offset from the "
        "master in the file" in scene.notes
    )


# --- names of images, and tables that went through other programs --------------------------------------------------


@pytest.mark.parametrize("program", ["metashape", "realitycapture"])
def test_images_in_folders_below(program: str, tmp_path: Path) -> None:
    """Labels without ending find them; paths of the other machine tell images of one name apart."""
    cameras = [known_camera(i) for i in range(made.COUNT)]
    made.write_images(tmp_path / "images")
    for i, camera in enumerate(cameras):
        (tmp_path / f"images/camera{i % 2}").mkdir(exist_ok=True)
        (tmp_path / "images" / camera.name).rename(
            tmp_path / f"images/camera{i % 2}" / camera.name.replace("png", "PNG")
        )
    PROGRAMS[program](tmp_path, None, cameras)
    wanted = sorted((f"camera{i % 2}/{camera.name}".replace("png", "PNG"), i) for i, camera in enumerate(cameras))
    scene = read_scene(tmp_path, DataConfig())
    assert [camera.name for camera in scene.cameras] == [name for name, _ in wanted]
    np.testing.assert_allclose(scene.cameras[-1].center, cameras[wanted[-1][1]].center, atol=1e-9)
    twin = tmp_path / f"images/camera1/{cameras[0].name}"
    shutil.copy(tmp_path / "images" / wanted[0][0], twin)
    with pytest.raises(SceneError, match=r"could be 2 images: camera0/0000\.PNG, camera1/0000\.png"):
        read_scene(tmp_path, DataConfig())
    if program == "realitycapture":
        file = tmp_path / "registration.csv"
        file.write_text(re.sub(r"^(\d+)", r"D:\\job\\camera0\\\1", file.read_text(), count=1, flags=re.MULTILINE))
        assert len(read_scene(tmp_path, DataConfig()).cameras) == made.COUNT


def test_a_table_that_went_through_a_spreadsheet(tmp_path: Path) -> None:
    cameras = [known_camera(i) for i in range(made.COUNT)]
    made.write_images(tmp_path / "images")
    write.realitycapture(tmp_path, None, cameras)
    file = tmp_path / "registration.csv"
    rows = [line.split(",") for line in file.read_text().splitlines()]
    lines = [";".join(cell if cell.endswith(".png") else cell.replace(".", ",") for cell in row) for row in rows]
    file.write_text("\r\n".join(f"{line};" for line in lines), encoding="utf-16")
    for camera, known in zip(read_scene(tmp_path, DataConfig()).cameras, cameras, strict=True):
        np.testing.assert_allclose(camera.center, known.center, atol=1e-9)
        np.testing.assert_allclose([camera.fx, camera.cx], [known.focal, known.cx], atol=1e-9)


def test_angles_of_a_table_and_the_matrix_of_an_xmp_file_are_one_rotation(tmp_path: Path) -> None:
    """A camera that RealityCapture exported both ways, as published in its forum (thread 710449)."""
    matrix = (
        "0.982594073038806 0.185426733553445 -0.0112166890261935 -0.032113633044729 0.11008102707942 "
        "-0.993403685341366 -0.18296885582437 0.976472781986697 0.114"
    )
    head = "#name,x,y,alt,heading,pitch,roll,f,px,py,k1,k2,k3,k4,t1,t2"
    row = "0000.png,0,0,0,163.736597399311,83.4154313461628,174.386496244756,30,0,0,0,0,0,0,0,0"
    (tmp_path / "table").mkdir()
    (tmp_path / "table/a.csv").write_text(f"{head}\n{row}\n{row.replace('0000', '0001').replace(',0,', ',9,', 1)}\n")
    write.realitycapture_xmp(tmp_path / "xmp", None, [known_camera(0), known_camera(1)])
    for name in ("0000", "0001"):
        file = tmp_path / f"xmp/images/{name}.xmp"
        file.write_text(re.sub(r'(Rotation>|Rotation=")[^<"]*', rf"\g<1>{matrix}", file.read_text()))
    for folder in ("table", "xmp"):
        (tmp_path / folder / "images").mkdir(exist_ok=True)
        made.write_images(tmp_path / folder / "images")
    one, other = (read_scene(tmp_path / folder, DataConfig()).cameras for folder in ("table", "xmp"))
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a.viewmat[:3, :3], b.viewmat[:3, :3], atol=2e-4)  # its last number has three digits


def test_xmp_files_beside_images_are_sorted_out(tmp_path: Path) -> None:
    """Components have frames of their own; a COLMAP model goes before them without having to agree."""
    cameras = [known_camera(i) for i in range(made.COUNT)]
    made.write_images(tmp_path / "images")
    write.realitycapture_xmp(tmp_path, None, cameras)
    for i, camera in enumerate(cameras):
        file = (tmp_path / "images" / camera.name).with_suffix(".xmp")
        text = file.read_text().replace('Skew="0"', f'Skew="1e-6" xcr:ComponentId="{{{i % 3 == 0}}}"')
        file.write_text(text.replace("xcr:Rotation", "xcr:Gravity") if i == 0 else text)
    scene = read_scene(tmp_path, DataConfig())
    assert {camera.name for camera in scene.cameras} == {c.name for i, c in enumerate(cameras) if i % 3}
    kept = len(scene.cameras)
    assert (
        f"the largest component of RealityCapture is used, with {kept} images; others have {made.COUNT - kept - 1}"
        in scene.notes
    )
    assert "1 image without a pose of RealityCapture is left out" in scene.notes
    assert any("the skew and the aspect ratio" in note for note in scene.notes)
    some = tmp_path / "some"
    shutil.copytree(tmp_path / "images", some / "images")
    for camera in cameras[2:]:
        (some / "images" / camera.name).with_suffix(".xmp").unlink()
    with pytest.raises(NoCamerasError):  # one of the images with a pose: remains
        read_scene(some, DataConfig())
    made.write_model(tmp_path / "sparse/0", made.reconstruction())
    scene = read_scene(tmp_path, DataConfig())
    assert (scene.kind, len(scene.cameras)) == ("colmap", made.COUNT)
    assert any("the COLMAP model is used, not cameras of RealityCapture" in note for note in scene.notes)


# --- points, and places on the Earth ----------------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["metashape", "realitycapture", "opf", "opensfm", "openmvg"])
def test_points_come_with_the_cameras(program: str, sample: list[write.Known], tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    xyz, rgb = rng.normal(size=(40, 3)), rng.integers(0, 256, (40, 3)).astype(np.uint8)
    if program in ("opf", "opensfm", "openmvg"):
        PROGRAMS[program](tmp_path, SAMPLE / "images", sample, points=(xyz, rgb))
        if program == "openmvg":  # its points have no colours
            rgb = np.full_like(rgb, 128)
    else:
        PROGRAMS[program](tmp_path, SAMPLE / "images", sample)
        write.write_points(tmp_path / ("project.ply" if program == "metashape" else "points.ply"), xyz, rgb)
    points = read_scene(tmp_path, DataConfig()).points
    assert points is not None
    order, wanted = np.lexsort(points.xyz.T), np.lexsort(xyz.T)
    np.testing.assert_allclose(points.xyz[order], xyz[wanted], atol=1e-6)
    np.testing.assert_array_equal(points.rgb[order], rgb[wanted])


def test_a_geocentric_chunk_is_read_in_metres_east_north_and_up(sample: list[write.Known], tmp_path: Path) -> None:
    place = np.array([47.3, 8.55, 480.0])
    axes = enu_axes(47.3, 8.55)
    placement = (axes.T, to_geocentric(place), 1.0)
    earth = [
        write.Known(
            **{
                **{key: getattr(camera, key) for key in ("name", "width", "height", "focal", "cx", "cy")},
                "rotation": axes.T @ camera.rotation,
                "center": placement[1] + axes.T @ camera.center,
            }
        )
        for camera in sample
    ]
    write.metashape(tmp_path, SAMPLE / "images", earth, placement=placement)
    write.write_points(tmp_path / "points.ply", np.eye(3), np.zeros((3, 3), np.uint8))
    scene = read_scene(tmp_path, DataConfig())
    assert scene.points is None
    assert any(note.startswith("points.ply is not used") for note in scene.notes)
    middle = np.mean([camera.center for camera in sample], axis=0)
    for camera, known in zip(scene.cameras, sample, strict=True):
        np.testing.assert_allclose(camera.center, known.center - middle, atol=1e-5)
        np.testing.assert_allclose(camera.viewmat[:3, :3].T, known.rotation, atol=1e-5)
    assert any(note.startswith("the chunk is geocentric") and "47.30" in note for note in scene.notes)
    assert scene.place is not None
    np.testing.assert_allclose(to_enu(np.array(scene.place), place), middle, atol=1e-5)


ZURICH = {"latitude": 47.3, "longitude": 8.55, "altitude": 0.0}


def flight() -> tuple[list[write.Known], list[NDArray[np.float64]]]:
    """Cameras in metres above 480 m, and their positions by a GPS whose heights are all too large."""
    rng = np.random.default_rng(5)
    cameras = [known_camera(i) for i in range(made.COUNT)]
    cameras = [dataclasses.replace(camera, center=20 * camera.center + [0, 0, 480]) for camera in cameras]
    return cameras, [camera.center + rng.normal(0, 1, 3) + [0, 0, 70] for camera in cameras]


@pytest.mark.parametrize("beside", [False, True])
def test_the_place_of_a_reconstruction_of_opensfm(beside: bool, tmp_path: Path) -> None:
    """In the file, or in reference_lla.json of older versions."""
    cameras, gps = flight()
    made.write_images(tmp_path / "images")
    write.opensfm(tmp_path, None, cameras, gps=gps, reference=None if beside else ZURICH)
    if beside:
        (tmp_path / "reference_lla.json").write_text(json.dumps(ZURICH))
    scene = read_scene(tmp_path, DataConfig())
    assert scene.place == (47.3, 8.55, 0.0)
    file = "reference_lla.json" if beside else "reconstruction.json"
    assert f"the scene is in metres east, north and up of 47.3000000, 8.5500000, 0.00 m ({file})" in scene.notes
    np.testing.assert_allclose(scene.cameras[0].center + scene.offset, cameras[0].center, atol=1e-9)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        ("projected", "OpenDroneMap projected the reconstruction"),
        ("unaligned", "cameras lie [0-9]+ m away from the GPS positions"),
        ("no GPS", "no image has a GPS position"),
        ("GPS beyond the Earth", "no image has a GPS position"),
        ("no position", None),
    ],
)
def test_a_place_that_opensfm_does_not_know(harm: str, says: str | None, tmp_path: Path) -> None:
    cameras, gps = flight()
    made.write_images(tmp_path / "images")
    if harm == "GPS beyond the Earth":
        gps = [np.full(3, 1e300) for _ in cameras]
    reference = ZURICH if harm != "no position" else {"latitude": 0.0, "longitude": 0.0, "altitude": 0.0}
    moved = [dataclasses.replace(camera, center=camera.center / 20) for camera in cameras]
    write.opensfm(
        tmp_path,
        None,
        moved if harm == "unaligned" else cameras,
        gps=None if says is None or harm == "no GPS" else gps,
        reference=reference,
    )
    if harm == "projected":
        shutil.copy(tmp_path / "reconstruction.json", tmp_path / "reconstruction.topocentric.json")
    scene = read_scene(tmp_path, DataConfig())
    assert scene.place is None
    found = [note for note in scene.notes if "the place 47.3000000, 8.5500000, which is not used" in note]
    assert len(found) == (says is not None)
    assert says is None or re.search(says, found[0])


@pytest.mark.parametrize(
    ("definition", "says"),
    [
        ('PROJCRS["WGS 84 / UTM zone 32N",BASEGEOGCRS["WGS 84"]]', "of WGS 84 / UTM zone 32N, whose axes"),
        ("EPSG:32632+5773", "of EPSG:32632+5773, whose axes"),
        ('ENGINEERINGCRS["Construction site"]', None),
    ],
)
def test_the_map_coordinates_of_an_opf_project(definition: str, says: str | None, tmp_path: Path) -> None:
    made.write_images(tmp_path / "images")
    shift = {"shift": [-465000.25, -5239000.0, -500.0], "scale": [1.0, 1.0, 1.0], "swap_xy": False}
    frame = {"crs": {"definition": definition}, "base_to_canonical": shift}
    write.opf(tmp_path, None, [known_camera(i) for i in range(made.COUNT)], uri=lambda name: name, frame=frame)
    scene = read_scene(tmp_path, DataConfig(images="images"))
    assert scene.place is None
    found = [note for note in scene.notes if "the origin is (465000.250, 5239000.000, 500.000)" in note]
    assert len(found) == (says is not None)
    assert says is None or says in found[0]


@pytest.mark.parametrize("frame", [{}, {"base_to_canonical": None}])
def test_an_opf_project_without_a_way_to_the_map_is_read_in_its_own_frame(
    frame: dict[str, object], tmp_path: Path
) -> None:
    made.write_images(tmp_path / "images")
    cameras = [known_camera(i) for i in range(made.COUNT)]
    frame = {"crs": {"definition": "EPSG:32632"}, **frame}
    write.opf(tmp_path, None, cameras, uri=lambda name: name, frame=frame)
    scene = read_scene(tmp_path, DataConfig(images="images"))
    assert scene.place is None
    centers = [camera.center + scene.offset for camera in scene.cameras]
    np.testing.assert_allclose(centers, [camera.center for camera in cameras], atol=1e-6)
    says = (
        "frame.json does not say where in EPSG:32632 it lies (base_to_canonical), so that the scene has no place on the"
    )
    assert [note for note in scene.notes if says in note]


def test_a_damaged_way_to_the_map_of_an_opf_project_is_an_error(tmp_path: Path) -> None:
    made.write_images(tmp_path / "images")
    frame = {"crs": {"definition": "EPSG:32632"}, "base_to_canonical": {"shift": [1.0, "x", 2.0]}}
    write.opf(tmp_path, None, [known_camera(i) for i in range(made.COUNT)], uri=lambda name: name, frame=frame)
    with pytest.raises(SceneError, match="base_to_canonical: shift"):
        read_scene(tmp_path, DataConfig(images="images"))


def test_places_there_and_back() -> None:
    """Known points: the equator, a pole, and a quarter of the meridian (10,001,966 m on WGS 84)."""
    np.testing.assert_allclose(to_geocentric(np.array([0.0, 0.0, 0.0])), [6378137.0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(to_geocentric(np.array([90.0, 0.0, 10.0])), [0, 0, 6356752.314245 + 10], atol=1e-5)
    for place in ([47.3, 8.55, 480.0], [-33.9, 151.2, -20.0], [89.99, -179.0, 5000.0], [0.0, 90.0, 0.0]):
        np.testing.assert_allclose(from_geocentric(to_geocentric(np.array(place))), place, atol=1e-7)
    origin = np.array([40.0, -80.0, 100.0])
    # A second of latitude there is 30.843 m, one of longitude 23.722 m.
    second = to_enu(origin + np.array([[1 / 3600, 0, 0], [0, 1 / 3600, 0], [0, 0, 7]]), origin)
    np.testing.assert_allclose(second, [[0, 30.843, 0], [23.722, 0, 0], [0, 0, 7]], atol=2e-3)


# --- errors -----------------------------------------------------------------------------------------------------------


#: A point of OpenMVG that an image sees at three numbers.
BLIND = {"key": 1, "value": {"X": [0.0, 0.0, 0.0], "observations": [{"key": 0, "value": {"x": [1.0, 2.0, 3.0]}}]}}


def replaced(path: str, old: str, new: str) -> Callable[[Path], None]:
    def harm(root: Path) -> None:
        text = (root / path).read_text()
        assert old in text
        (root / path).write_text(text.replace(old, new, 1))

    return harm


HARMS: dict[str, tuple[str, Callable[[Path], None], tuple[str, ...]]] = {
    "a chunk turned by what is no rotation": (
        "metashape in a chunk",
        lambda root: (path := root / "project.xml").write_text(
            re.sub(r'<rotation locked="true">\S+', '<rotation locked="true">1e300', path.read_text())
        ),
        ("project.xml", "the chunk: its transform is no rotation with a scale"),
    ),
    "a chunk moved by a matrix of huge numbers": (
        "metashape",
        replaced("project.xml", "<sensors", "<transform>" + 3 * "1e300 0 0 0 0 " + "1</transform><sensors"),
        ("project.xml", "the chunk: its transform is no rotation with a scale"),
    ),
    "no focal length beside k4": (
        "metashape",
        lambda root: [
            replaced("project.xml", "<f>272.0<", "<f>0<")(root),
            replaced("project.xml", "<k4>0.0<", "<k4>1e-3<")(root),
        ],
        ("project.xml", "sensor 0 'camera': its focal length is 0, 0"),
    ),
    "next to no focal length beside k4": (
        "metashape",
        lambda root: [
            replaced("project.xml", "<f>272.0<", "<f>1e-300<")(root),
            replaced("project.xml", "<k4>0.0<", "<k4>1e-3<")(root),
        ],
        ("project.xml", "sensor 0 'camera': its lens has a term of degree 8"),
    ),
    "a huge quaternion": (
        "record3d",
        lambda root: (path := root / "metadata.json").write_text(
            re.sub(r'("poses": \[\s*\[\s*)[^,]+', r"\g<1>1e300", path.read_text())
        ),
        ("metadata.json", "frame 0: the quaternion of its pose is inf long"),
    ),
    "cut XML": ("metashape", replaced("project.xml", "</chunk>", ""), ("project.xml:", "not valid XML")),
    "entities": (
        "metashape",
        replaced("project.xml", "<document", '<!DOCTYPE a [<!ENTITY b "c">]><document'),
        ("project.xml", "document type"),
    ),
    "no focal number": ("metashape", replaced("project.xml", "<f>272.0<", "<f>wide<"), ("project.xml", "f is 'wide'")),
    "cylindrical": (
        "metashape",
        lambda root: (root / "project.xml").write_text(
            (root / "project.xml").read_text().replace("frame", "cylindrical")
        ),
        ("project.xml", "cameras of the type 'cylindrical' are not read", "perspective views"),
    ),
    "p3": ("metashape", replaced("project.xml", "</p2>", "</p2><p3>0.1</p3>"), ("project.xml", "p3 and p4")),
    "skew": ("metashape", replaced("project.xml", "</p2>", "</p2><b2>5</b2>"), ("project.xml", "b2 = 5")),
    "two chunks": (
        "metashape",
        lambda root: (root / "project.xml").write_text(
            (text := (root / "project.xml").read_text()).replace("</document>", text[text.index("<chunk") :])
        ),
        ("project.xml", "several chunks with aligned cameras: Chunk 1, Chunk 1"),
    ),
    "two XML files": (
        "metashape",
        lambda root: shutil.copy(root / "project.xml", root / "second.xml"),
        ("several files of Metashape cameras: project.xml, second.xml",),
    ),
    "an angle": (
        "realitycapture",
        replaced("registration.csv", "view_000.jpg,", "view_000.jpg,x"),
        (":2", "not a number"),
    ),
    "a name with a comma": (
        "realitycapture",
        replaced("registration.csv", "view_000.jpg,", "view,000.jpg,"),
        (":2", "has 17 cells, the header 16", "quotation marks"),
    ),
    "degrees": (
        "realitycapture",
        lambda root: (root / "registration.csv").write_text(
            re.sub(
                r"(view_0(\d+)\.jpg),[^,]+,[^,]+",
                r"\1,8.5410\2,47.3770\2",
                (root / "registration.csv").read_text(),
            )
        ),
        ("registration.csv", "are degrees of longitude and latitude", "metric coordinate system"),
    ),
    "a matrix that is none": (
        "realitycapture for OpenCV",
        lambda root: (root / "opencv.csv").write_text(
            re.sub(r"(view_000\.jpg(,[^,]+){3}),[^,]+", r"\1,2", (root / "opencv.csv").read_text())
        ),
        ("opencv.csv:8", "camera 'view_000.jpg'", "is not a rotation"),
    ),
    "images of half the size": (
        "realitycapture for OpenCV",
        lambda root: [Image.open(path).reduce(2).save(path) for path in (root / "images").iterdir()],
        ("opencv.csv", "images of about 320x240", "at their size"),
    ),
    "the division model": (
        "realitycapture by XMP",
        replaced("images/view_003.xmp", "brown4t2", "division"),
        ("view_003.xmp", "the distortion model 'division' is not read", "Brown3"),
    ),
    "a stretched pixel grid": (
        "realitycapture by XMP",
        replaced("images/view_003.xmp", 'AspectRatio="1"', 'AspectRatio="1.01"'),
        ("view_003.xmp", "skewed or stretched", "without K+"),
    ),
    "a cut XMP file": (
        "realitycapture by XMP",
        replaced("images/view_003.xmp", "</x:xmpmeta>", ""),
        ("view_003.xmp:", "not valid XML"),
    ),
    "a word among the numbers of an XMP file": (
        "realitycapture by XMP",
        lambda root: (path := root / "images/view_003.xmp").write_text(
            re.sub(r'Position="\S+', 'Position="east', path.read_text())
        ),
        ("view_003.xmp", "Position is 'east', not a number", "help: export the XMP files again"),
    ),
    "words in all cells of a row": (
        "realitycapture",
        lambda root: (path := root / "registration.csv").write_text(
            "\n".join([path.read_text().splitlines()[0], "view_003.jpg" + 15 * ",a"])
        ),
        ("registration.csv:2", "camera 'view_003.jpg': x is 'a', not a number", "correct or remove that line"),
    ),
    "eight numbers": (
        "realitycapture by XMP",
        replaced("images/view_003.xmp", 'Position="', 'Position="0 '),
        ("view_003.xmp", "Position has 4 numbers, expected 3"),
    ),
    "no rows": (
        "realitycapture",
        lambda root: (root / "registration.csv").write_text((root / "registration.csv").read_text().split("\n")[0]),
        ("registration.csv", "has no camera"),
    ),
    "a panorama of OPF": (
        "opf",
        replaced("calibration/calibrated-cameras.json", '"perspective"', '"spherical"'),
        ("calibrated-cameras.json", "'spherical' are not read", "undistorted"),
    ),
    "a page of a TIFF": (
        "opf",
        replaced("camera-list.json", "view_003.jpg", "view_003.jpg#page=2"),
        ("camera-list.json", "page=2", "separate files"),
    ),
    "no calibration": (
        "opf",
        replaced("project.opf", "opf-calibrated-cameras", "opf-other"),
        ("project.opf", "has no calibrated cameras"),
    ),
    "no position": (
        "opf",
        replaced("calibration/calibrated-cameras.json", '"position"', '"place"'),
        ("calibrated-cameras.json", "position is not 3 numbers"),
    ),
    "a cut list": (
        "opensfm",
        replaced("reconstruction.json", '"points": {}}]', ""),
        ("reconstruction.json:1:", "not valid JSON"),
    ),
    "an object": (
        "opensfm",
        lambda root: (root / "reconstruction.json").write_text("{}"),
        ("reconstruction.json", "holds no JSON list", "export_colmap"),
    ),
    "an empty list": (
        "opensfm",
        lambda root: (root / "reconstruction.json").write_text("[]"),
        ("reconstruction.json", "has no reconstruction"),
    ),
    "a new kind of camera": (
        "opensfm",
        lambda root: (root / "reconstruction.json").write_text(
            (root / "reconstruction.json").read_text().replace('"brown"', '"cylinder"')
        ),
        ("reconstruction.json", "'cylinder' are not read", "opensfm undistort"),
    ),
    "no translation": (
        "opensfm",
        lambda root: (root / "reconstruction.json").write_text(
            (root / "reconstruction.json").read_text().replace('"translation"', '"shift"')
        ),
        ("reconstruction.json", "shot 'view_000.jpg': translation is not 3 numbers"),
    ),
    "no camera": (
        "opensfm",
        lambda root: (root / "reconstruction.json").write_text(
            (root / "reconstruction.json").read_text().replace('"camera": "v2', '"camera": "v3')
        ),
        ("reconstruction.json", "its camera 'v3 maker model' is not in the file"),
    ),
    "no poses": (
        "openmvg",
        lambda root: (root / "sfm_data_expanded.json").unlink(),
        ("sfm_data.json", "has no poses", "openMVG_main_ConvertSfM_DataFormat"),
    ),
    "two with poses": (
        "openmvg",
        lambda root: shutil.copy(root / "sfm_data_expanded.json", root / "sfm_data_robust.json"),
        ("several files of OpenMVG cameras with poses: sfm_data_expanded.json, sfm_data_robust.json",),
    ),
    "an unknown lens": (
        "openmvg",
        replaced("sfm_data_expanded.json", "pinhole_brown_t2", "spherical"),
        ("sfm_data_expanded.json", "intrinsics 0", "'spherical' are not read", "openMVG_main_openMVG2Colmap"),
    ),
    "no centre": (
        "openmvg",
        replaced("sfm_data_expanded.json", '"center"', '"middle"'),
        ("sfm_data_expanded.json", "center is not 3 numbers"),
    ),
    "an observation without a place": (
        "openmvg",
        replaced("sfm_data_expanded.json", '"structure": []', '"structure": [' + json.dumps(BLIND) + "]"),
        ("sfm_data_expanded.json", "an observation no x of two"),
    ),
    "a pointer to nothing": (
        "openmvg",
        replaced("sfm_data_expanded.json", '"ptr_wrapper"', '"pointer"'),
        ("sfm_data_expanded.json", "has no data"),
    ),
    "a number of a keyframe": (
        "polycam",
        replaced("keyframes/corrected_cameras/5003.json", '"t_12"', '"t"'),
        ("5003.json", "t_00 to t_23 is not 12 numbers"),
    ),
    "a size below zero": (
        "polycam",
        replaced("keyframes/corrected_cameras/5003.json", '"width": ', '"width": -'),
        ("5003.json", "keyframe 5003: its images are -320 by "),
    ),
    "a list for a pose": (
        "openmvg",
        lambda root: (root / "sfm_data_expanded.json").write_text(
            re.sub(r'"id_pose": \d+', '"id_pose": []', (root / "sfm_data_expanded.json").read_text())
        ),
        ("sfm_data_expanded.json", "describes no views"),
    ),
    "a long quaternion": (
        "record3d",
        replaced("metadata.json", '"poses": [[', '"poses": [[9'),
        ("metadata.json", "the quaternion of its pose is"),
    ),
    "no images": (
        "record3d",
        lambda root: shutil.rmtree(root / "rgb") or (root / "rgbd").mkdir(),
        ("metadata.json", "rgbd/"),
    ),
}


@pytest.mark.parametrize("name", HARMS)
def test_a_broken_file_is_named(name: str, sample: list[write.Known], tmp_path: Path, capfd) -> None:
    program, harm, says = HARMS[name]
    PROGRAMS[program](tmp_path, SAMPLE / "images", sample)
    harm(tmp_path)
    assert run(["info", str(tmp_path)]) == 3
    said = capfd.readouterr().err
    for words in says:
        assert words in said
    assert "help:" in said
    assert "Traceback" not in said


def test_a_folder_below_is_found(sample: list[write.Known], tmp_path: Path) -> None:
    write.polycam(tmp_path / "scan", SAMPLE / "images", sample)
    scene = read_scene(tmp_path, DataConfig())
    assert (scene.kind, len(scene.cameras)) == ("polycam", COUNT)
    assert "the scene in scan/ is used" in scene.notes


def test_the_largest_reconstruction_of_opensfm_is_used(sample: list[write.Known], tmp_path: Path) -> None:
    write.opensfm(tmp_path / "flight", SAMPLE / "images", sample, place="opensfm/reconstruction.json")
    scene = read_scene(tmp_path, DataConfig())
    assert (scene.kind, len(scene.cameras)) == ("opensfm", COUNT)
    assert "the scene in flight/ is used" in scene.notes
    assert f"the largest reconstruction is used, with {COUNT} shots; others have 1" in scene.notes


def test_views_of_openmvg_without_a_pose_are_counted(sample: list[write.Known], tmp_path: Path) -> None:
    write.openmvg(tmp_path, SAMPLE / "images", sample)
    assert "1 view of the OpenMVG file has no pose or no intrinsics" in read_scene(tmp_path, DataConfig()).notes


def test_an_opf_project_of_a_phone_that_was_moved(tmp_path: Path) -> None:
    """Its images lay beside its folder; the points are those of a point_cloud item; the shutter was rolling."""
    cameras = [known_camera(i) for i in range(made.COUNT)]
    made.write_images(tmp_path / "images")
    xyz, rgb = np.random.default_rng(3).normal(size=(40, 3)), np.zeros((40, 3), np.uint8)
    write.opf(tmp_path, None, cameras, points=(xyz, rgb), uri=lambda name: f"../capture/{name}")
    project = json.loads((tmp_path / "project.opf").read_text())
    *_, calibration = project["items"]
    cloud = {"id": "c", "type": "point_cloud", "sources": [], "resources": [calibration["resources"].pop()]}
    depth = {"id": "d", "type": "point_cloud", "resources": [{"format": "model/gltf+json", "uri": "none.gltf"}]}
    (tmp_path / "project.opf").write_text(json.dumps({**project, "items": [cloud, depth, *project["items"]]}))
    file = tmp_path / "calibration/calibrated-cameras.json"
    file.write_text(file.read_text().replace('"position"', '"rolling_shutter": [0.1, 0, 0], "position"', 3))
    scene = read_scene(tmp_path, DataConfig(max_points=10))
    assert [camera.name for camera in scene.cameras] == [camera.name for camera in cameras]
    assert scene.points is not None
    assert len(scene.points) == 10
    assert "1 image of the project is not calibrated" in scene.notes
    assert "the rolling shutter of 3 images is known to the project, and is not corrected" in scene.notes


@dataclasses.dataclass
class Tracked:
    """Points and where images see them."""

    cameras: list[write.Known]
    points: tuple[NDArray[np.float64], NDArray[np.uint8]]
    seen: list[tuple[int, int, NDArray[np.float64]]]

    @classmethod
    def of(cls, lengths: dict[int, int], spoilt: dict[int, float], observed_focal: float = 60.0) -> Tracked:
        """lengths: of the tracks of some points; four images see the others. spoilt: pixels by which some are off."""
        rng = np.random.default_rng(2)
        cameras = [known_camera(i) for i in range(made.COUNT)]
        xyz = rng.uniform(-0.5, 0.5, (40, 3))
        seen = []
        for point, position in enumerate(xyz):
            for number in range(lengths.get(point, 4)):
                camera = cameras[number]
                x, y, z = camera.rotation.T @ (position - camera.center)
                pixel = np.array([observed_focal * x / z + camera.cx, observed_focal * y / z + camera.cy])
                sign = 1 if number % 2 else -1
                seen.append((number, point, pixel + rng.uniform(0.03, 0.05, 2) + sign * spoilt.get(point, 0.0)))
        return cls(cameras, (xyz, np.full((40, 3), 128, np.uint8)), seen)

    def write(self, program: str, root: Path) -> Path:
        made.write_images(root / "images")
        extra = {"uri": lambda name: f"images/{name}"} if program == "opf" else {}
        PROGRAMS[program](root, None, self.cameras, points=self.points, seen=self.seen, **extra)
        return root


def test_reading_many_tracks_shows_progress(tmp_path: Path) -> None:
    """A million rows take seconds."""
    tracked = Tracked.of({}, {})
    tracked.write("opensfm", tmp_path)
    (before,) = compare_observations(read_scene(tmp_path, DataConfig()))
    with (tmp_path / "tracks.csv").open("a") as file:
        file.write(
            "".join(
                f"elsewhere_{i % 100:03d}.jpg\t{i}\t{i}\t0.1234567890\t0.0987654321\t0.01\n" for i in range(100_000)
            )
        )
    reports: list[tuple[str, int, int]] = []
    with listening(lambda *one: reports.append(one)):
        (after,) = compare_observations(read_scene(tmp_path, DataConfig()))
    of_tracks = [(done, total) for task, done, total in reports if task == "reading tracks.csv, MB"]
    assert of_tracks == [(4, 6), (6, 6)]
    assert after == before


@pytest.mark.parametrize("program", ["opensfm", "openmvg", "opf"])
def test_doubtful_points_are_left_out(program: str, tmp_path: Path) -> None:
    """Of two images, and with an error of several times the median: point 7, and not 8 of three images or 9."""
    tracked = Tracked.of({7: 2, 8: 3, 9: 2}, {7: 0.2, 8: 0.2})
    tracked.write(program, tmp_path)
    scene = read_scene(tmp_path, DataConfig())
    assert scene.points is not None
    near = [np.abs(scene.points.xyz - xyz).max(axis=1).min() < 1e-6 for xyz in tracked.points[0]]
    assert [index for index, there in enumerate(near) if not there] == [7]
    assert any(note.startswith("1 point is left out that two images see") for note in scene.notes)
    (found,) = compare_observations(scene)
    assert found.state == "found"
    assert re.fullmatch(r"sparse points are off by 0\.05\d* pixels in the median \(40 of them\)", found.text)
    assert len(read_scene(tmp_path, DataConfig(max_point_error=0)).points or []) == 40


def test_a_rejected_observation_of_opensfm_is_none(tmp_path: Path) -> None:
    """tracks.csv has all that was matched: by those that are not far off, two images see point 7."""
    tracked = Tracked.of({7: 2, 9: 2}, {7: 0.2})
    tracked.seen += [(4, 7, np.array([1.0, 1.0])), (4, 9, np.array([60.0, 40.0]))]
    scene = read_scene(tracked.write("opensfm", tmp_path), DataConfig())
    assert any(note.startswith("1 point is left out that two images see") for note in scene.notes)


@pytest.mark.parametrize("shift", ["[0.1, 0, 0]", "0.1"])
def test_observations_through_a_rolling_shutter_are_not_used(shift: str, tmp_path: Path) -> None:
    root = Tracked.of({7: 2}, {7: 0.2}).write("opf", tmp_path)
    replaced("calibration/calibrated-cameras.json", '"position"', f'"rolling_shutter": {shift}, "position"')(root)
    scene = read_scene(root, DataConfig())
    assert (len(scene.points or []), scene.reprojections) == (40, None)


def points_instead(root: Path, value: object) -> None:
    parts = json.loads((root / "reconstruction.json").read_text())
    (root / "reconstruction.json").write_text(json.dumps([{**part, "points": value} for part in parts]))


#: A number that JSON may have and no double holds.
HUGE = 10**400
OPENSFM, OPENMVG = "reconstruction.json", "sfm_data_expanded.json"


def changed(root: Path, name: str, value: float, *keys: str | int) -> None:
    """Change a number of a JSON file whose name ends so; infinity is written as 1e400."""
    (file,) = (path for path in root.rglob("*") if path.name.endswith(name))
    document = json.loads(file.read_text())
    inside = document
    for key in keys[:-1]:
        inside = inside[key]
    inside[keys[-1]] = value
    file.write_text(json.dumps(document).replace("Infinity", "1e400"))


def longest_ranges(root: Path) -> None:
    """Give each point 2^24 - 1 matches, 300 million together, of the few that there are."""
    (file,) = root.rglob("ranges0.bin")
    (np.fromfile(file, "<u8") | np.uint64(0xFFFFFF << 40)).tofile(file)


@pytest.mark.parametrize(
    ("program", "harm", "file"),
    [
        ("opensfm", lambda root: points_instead(root, 5), "reconstruction.json"),
        ("opf", longest_ranges, "tracks.gltf"),
        # Numbers that no double holds, that are infinite, and that lead out of a file.
        ("opensfm", lambda root: points_instead(root, {"1": {"coordinates": 3 * [HUGE], "color": [0, 0, 0]}}), OPENSFM),
        ("openmvg", lambda root: changed(root, "_expanded.json", HUGE, "structure", 0, "value", "X", 0), OPENMVG),
        ("opf", lambda root: changed(root, "tracks.gltf", HUGE, "nodes", 0, "matrix", 0), "tracks.gltf"),
        ("opf", lambda root: changed(root, "tracks.gltf", math.inf, "accessors", 0, "count"), "tracks.gltf"),
        ("opf", lambda root: changed(root, "tracks.gltf", -1, "accessors", 0, "count"), "tracks.gltf"),
        ("opf", lambda root: changed(root, "tracks.gltf", -8, "bufferViews", 0, "byteOffset"), "tracks.gltf"),
    ],
)
def test_broken_points_are_named(
    program: str, harm: Callable[[Path], object], file: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = Tracked.of({}, {}).write(program, tmp_path)
    harm(root)
    assert run(["info", str(root)]) == 3
    said = capfd.readouterr().err
    assert f"{file}\n  help: " in said
    assert "Traceback" not in said


@pytest.mark.parametrize("program", ["opensfm", "openmvg", "opf"])
def test_cameras_that_do_not_fit_their_observations(program: str, tmp_path: Path, capfd) -> None:
    """The focal length was changed after the reconstruction."""
    root = Tracked.of({}, {}, observed_focal=150.0).write(program, tmp_path)
    assert run(["info", str(root)]) == 0
    said = capfd.readouterr().out
    assert "cameras and poses do not belong to the observations" in said
    assert "focal lengths 2.5 times as long fit" in said


def test_depth_maps_of_polycam_are_known(sample: list[write.Known], tmp_path: Path) -> None:
    write.polycam(tmp_path, SAMPLE / "images", sample)
    (tmp_path / "keyframes/depth").mkdir()
    for i in range(COUNT):
        Image.fromarray(np.full((60, 80), 2500, np.uint16)).save(tmp_path / f"keyframes/depth/{5000 + i}.png")
    scene = read_scene(tmp_path, DataConfig())
    assert any("12 images have depth maps" in note for note in scene.notes), scene.notes


def test_a_lens_of_degree_eight_that_no_model_follows_is_refused() -> None:
    from splatcli.scene.foreign_lenses import Brown
    from splatcli.scene.source import Entry

    with pytest.raises(SceneError, match="k4") as caught:
        Brown(600, 600, 320, 240, (0.0, 0.0, 0.0, 9.0)).camera(640, 480, Entry(Path("a.xml"), "sensor 0"))
    assert "a.xml" in str(caught.value)
