"""``splat mesh`` from outside: each format of a coloured ball, regions, closed meshes, and what it refuses."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from plyfile import PlyData

from splatcli.checkpoint.file import load_checkpoint, save_checkpoint
from splatcli.checkpoint.state import RenderColumns
from splatcli.config import with_settings
from splatcli.formats.ply import write_ply_file
from splatcli.gaussians import SH_C0, Gaussians
from splatcli.render.camera_files import cameras_json
from splatcli.render.outside import views_from_all_sides
from tests.formats.made import read_ply
from tests.native.cases import NEEDS_COMPILER
from tests.running import Splat

COUNT, MIDDLE = 4000, np.array([0.5, -1.0, 2.0])
QUICK = ("--resolution", "40")


def ball() -> Gaussians:
    """Opaque Gaussians on a unit sphere around MIDDLE: red where x is large, blue where z is."""
    height = 1 - (2 * np.arange(COUNT) + 1) / COUNT
    angle = math.pi * (3 - 5**0.5) * np.arange(COUNT)
    level = np.sqrt(1 - height**2)
    at = np.stack([level * np.cos(angle), height, level * np.sin(angle)], axis=1)
    colour = np.stack([0.5 + 0.4 * at[:, 0], np.full(COUNT, 0.2), 0.5 + 0.4 * at[:, 2]], axis=1)
    return Gaussians(
        means=torch.from_numpy(at + MIDDLE).float(),
        quats=torch.tensor([1.0, 0, 0, 0]).repeat(COUNT, 1),
        log_scales=torch.full((COUNT, 3), math.log(0.03)),
        logit_opacities=torch.full((COUNT,), 3.0),
        sh0=torch.from_numpy((colour - 0.5) / SH_C0).float(),
        shN=torch.zeros(COUNT, 0, 3),
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mesh") / "ball.ply"
    write_ply_file(ball(), path)
    return path


@pytest.fixture(scope="module")
def seen(model: Path) -> tuple[str, ...]:
    """Flags for few voxels and half of the cameras of the shell."""
    path = model.with_name("few.json")
    path.write_text(cameras_json(views_from_all_sides(ball(), 64)[::2], (0.0, 0.0, 0.0)))
    return (*QUICK, "--views", str(path))


def read_ply_mesh(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    data = PlyData.read(str(path))
    vertex = data["vertex"]
    at, colour = (np.stack([vertex[n] for n in names], 1) for names in (("x", "y", "z"), ("red", "green", "blue")))
    return at.astype(float), np.stack(data["face"]["vertex_indices"]), colour / 255.0


def read_obj_mesh(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows = [line.split() for line in path.read_text().splitlines()]
    vertices = np.array([[float(x) for x in row[1:]] for row in rows if row[0] == "v"])
    return vertices[:, :3], np.array([[int(x) - 1 for x in row[1:]] for row in rows if row[0] == "f"]), vertices[:, 3:]


def read_glb_mesh(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The mesh in the frame of a PLY."""
    data = path.read_bytes()
    magic, version, total, length = struct.unpack_from("<4sIII", data)
    assert (magic, version, total) == (b"glTF", 2, len(data))
    document = json.loads(data[20 : 20 + length])
    binary = data[28 + length :]
    kinds = {5126: "<f4", 5123: "<u2", 5125: "<u4"}

    def table(number: int) -> np.ndarray:
        accessor = document["accessors"][number]
        view = document["bufferViews"][accessor["bufferView"]]
        width = {"SCALAR": 1, "VEC3": 3, "VEC4": 4}[accessor["type"]]
        dtype = kinds[accessor["componentType"]]
        rows = np.frombuffer(binary, dtype, accessor["count"] * width, view["byteOffset"])
        return rows.reshape(-1, width)

    (primitive,) = document["meshes"][0]["primitives"]
    assert primitive.get("mode", 4) == 4
    at = table(primitive["attributes"]["POSITION"]).astype(float)
    assert np.array_equal(at.min(axis=0), document["accessors"][0]["min"])
    normals = table(primitive["attributes"]["NORMAL"])
    assert np.abs(np.linalg.norm(normals, axis=1) - 1).max() < 1e-5
    linear = table(primitive["attributes"]["COLOR_0"])[:, :3] / 65535
    shown = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return at * [-1, -1, 1], table(primitive["indices"]).reshape(-1, 3).astype(int), shown


@NEEDS_COMPILER
@pytest.mark.parametrize(("suffix", "read"), [("ply", read_ply_mesh), ("obj", read_obj_mesh), ("glb", read_glb_mesh)])
def test_a_ball_has_its_place_size_and_colours(
    suffix: str, read: object, splat: Splat, model: Path, seen: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / f"ball.{suffix}"
    done = splat("mesh", model, "-o", path, *seen, "--json")
    assert done.code == 0, done.err
    facts = done.objects[-1]
    assert facts["path"] == str(path)
    vertices, faces, colours = read(path)  # type: ignore[operator]
    assert (len(vertices), len(faces)) == (facts["num_vertices"], facts["num_triangles"])
    assert facts["open_edges"] == 0
    assert faces.max() == len(vertices) - 1
    own = vertices - MIDDLE
    away = np.linalg.norm(own, axis=1)
    assert np.abs(np.median(away) - 1) < 0.02
    assert np.percentile(np.abs(away - 1), 90) < 0.04
    a, b, c = (own[faces[:, k]] for k in range(3))
    assert (a * np.cross(b, c)).sum() / 6 == pytest.approx(4 / 3 * math.pi, rel=0.06)  # and faces look outwards
    wanted = np.stack([0.5 + 0.4 * own[:, 0], np.full(len(own), 0.2), 0.5 + 0.4 * own[:, 2]], axis=1)
    assert np.median(np.abs(colours - wanted)) < 0.02
    assert np.percentile(np.abs(colours - wanted), 95) < 0.08


@NEEDS_COMPILER
def test_a_model_without_cameras_is_seen_from_all_sides(splat: Splat, model: Path, tmp_path: Path) -> None:
    done = splat("mesh", model, "-o", tmp_path / "x.ply", *QUICK)
    assert done.code == 0, done.err
    assert "the model has no cameras, 64 around it are used" in done.err
    assert "closed; voxels" in done.err


@NEEDS_COMPILER
def test_crop_and_watertight(splat: Splat, model: Path, seen: tuple[str, ...], tmp_path: Path) -> None:
    x, y, z = MIDDLE
    crop = ("--crop", f"box:{x - 2},{y - 2},{z - 2},{x + 2},{y + 0.3},{z + 2}")
    bowl = splat("mesh", model, "-o", tmp_path / "bowl.ply", *seen, *crop, "--json").objects[-1]
    assert bowl["num_triangles"] > 1000
    vertices, _, _ = read_ply_mesh(tmp_path / "bowl.ply")
    assert vertices[:, 1].max() < y + 0.45
    closed = splat("mesh", model, "-o", tmp_path / "x.ply", *seen, *crop, "--watertight", "--json").objects[-1]
    assert closed["open_edges"] == 0


@NEEDS_COMPILER
def test_a_checkpoint_is_seen_by_its_training_cameras(splat: Splat, finished_run: Path, tmp_path: Path) -> None:
    words = ("--voxel", "0.5", "--max-depth", "30")
    done = splat("mesh", finished_run, "-o", tmp_path / "a.ply", *words, "--watertight", "--json")
    assert done.code == 0, done.err
    facts = done.objects[-1]
    assert facts["voxel"] == pytest.approx(0.5)
    assert facts["open_edges"] == 0
    assert splat("mesh", finished_run, "-o", tmp_path / "b.ply", *words, "--views", "train", "--watertight").code == 0
    assert (tmp_path / "a.ply").read_bytes() == (tmp_path / "b.ply").read_bytes()


@NEEDS_COMPILER
def test_views_of_a_file(splat: Splat, model: Path, cameras: Path, tmp_path: Path) -> None:
    done = splat("mesh", model, "-o", tmp_path / "x.ply", *QUICK, "--views", cameras)
    assert done.code == 0, done.err
    assert "has no cameras" not in done.err
    assert "open; voxels" in done.err or "closed; voxels" in done.err


@pytest.fixture(scope="module")
def two_balls(model: Path) -> Path:
    """The ball, and beside it one of a third of its size, and a tiny one."""
    parts = [ball()]
    for scale, place in ((0.33, 2.0), (0.12, -1.6)):
        small = ball()
        middle = torch.from_numpy(MIDDLE).float()
        small.means = middle + scale * (small.means - middle) + torch.tensor([place, 0, 0])
        small.log_scales = small.log_scales + math.log(scale)
        parts.append(small)
    path = model.with_name("balls.ply")
    columns = zip(*(part.items() for part in parts), strict=True)
    write_ply_file(Gaussians(**{row[0][0]: torch.cat([tensor for _, tensor in row]) for row in columns}), path)
    return path


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("words", "kept", "farthest"),
    [
        (("--keep-components", "1"), 1, 1.0),
        (("--keep-components", "2"), 2, 2.33),
        (("--keep-components", "3"), 3, 2.33),
        (("--keep-components", "0%"), None, 2.33),
        (("--keep-components", "5000"), None, 2.33),
        (("--keep-components", "4%"), 2, 2.33),
        (("--keep-components", "50%"), 1, 1.0),
        ((), 3, 2.33),
    ],
)
def test_small_parts_are_dropped(
    words: tuple[str, ...], kept: int | None, farthest: float, splat: Splat, two_balls: Path, tmp_path: Path
) -> None:
    shown = ("--resolution", "96", "--views", tmp_path / "views.json")
    (tmp_path / "views.json").write_text(cameras_json(views_from_all_sides(read_ply(two_balls), 22), (0.0, 0.0, 0.0)))
    done = splat("mesh", two_balls, "-o", tmp_path / "x.ply", *shown, *words, "--json")
    assert done.code == 0, done.err
    facts = done.objects[-1]
    assert facts["components_found"] > 3  # specks, too
    assert facts["components"] == (kept or facts["components_found"])
    vertices, _, _ = read_ply_mesh(tmp_path / "x.ply")
    assert (vertices - MIDDLE)[:, 0].max() == pytest.approx(farthest, abs=0.06)


@NEEDS_COMPILER
def test_a_model_without_cameras_takes_those_of_a_scene(
    splat: Splat, finished_run: Path, exported_ply: Path, tiny_scene: Path, tmp_path: Path
) -> None:
    words = ("--voxel", "0.5", "--max-depth", "30")
    for name, given in (("a.ply", (finished_run,)), ("b.ply", (exported_ply, "--data", tiny_scene))):
        done = splat("mesh", *given, "-o", tmp_path / name, *words)
        assert done.code == 0, done.err
        assert "has no cameras" not in done.err
    one, other = (read_ply_mesh(tmp_path / name)[0] for name in ("a.ply", "b.ply"))
    assert one.shape == other.shape
    assert np.abs(one - other).max() < 1e-3
    refused = splat("mesh", exported_ply, "--data", tmp_path / "none", "-o", tmp_path / "c.ply", *words)
    assert refused.code == 3
    assert not (tmp_path / "c.ply").exists()


@NEEDS_COMPILER
def test_colours_are_those_of_the_surface_whatever_is_behind_it(
    splat: Splat, finished_run: Path, seen: tuple[str, ...], tmp_path: Path
) -> None:
    checkpoint = load_checkpoint(next((finished_run / "ckpts").glob("*.pt")))
    thin = replace(
        ball(), logit_opacities=torch.zeros(COUNT), shN=torch.zeros(COUNT, *checkpoint.gaussians.shN.shape[1:])
    )
    colours = {}
    for background in ("black", "white"):
        config = with_settings(checkpoint.config, {"train.background": background})
        model, mesh = tmp_path / f"{background}.pt", tmp_path / f"{background}.ply"
        other = replace(checkpoint, gaussians=thin, config=config, moments=None, sh_last_step=None, strategy={})
        save_checkpoint(model, replace(other, columns=RenderColumns()))
        done = splat("mesh", model, "-o", mesh, *seen)
        assert done.code == 0, done.err
        colours[background] = read_ply_mesh(mesh)[2]
    assert len(colours["white"]) > 100
    assert np.abs(colours["white"] - colours["black"]).max() <= 1.01 / 255


@NEEDS_COMPILER
def test_a_scene_with_a_place_stands_upright_in_a_glb(splat: Splat, finished_run: Path, tmp_path: Path) -> None:
    """Its z is up; that of any other model is thought to be down y, as in a PLY."""
    checkpoint = load_checkpoint(next((finished_run / "ckpts").glob("*.pt")))
    checkpoint.dataset = replace(checkpoint.dataset, offset=(1000.0, 2000.5, 0.0), place=(47.25, -8.5, 430.25))
    save_checkpoint(tmp_path / "placed.pt", checkpoint)
    words = ("--voxel", "0.5", "--max-depth", "30")
    for name in ("x.ply", "x.glb", "x.obj"):
        done = splat("mesh", tmp_path / "placed.pt", "-o", tmp_path / name, *words)
        assert done.code == 0, done.err
        assert "add 1000 2000.5 0 to positions" in done.err
        content = (tmp_path / name).read_bytes()
        assert b"add 1000 2000.5 0 to positions" in content
        assert b"47.25 -8.5 430.25" in content
    assert splat("mesh", finished_run, "-o", tmp_path / "plain.glb", *words).code == 0
    own, _, _ = read_ply_mesh(tmp_path / "x.ply")
    up = read_glb_mesh(tmp_path / "x.glb")[0] * [-1, -1, 1]  # as the file has it
    assert np.abs(up - np.stack([own[:, 0], own[:, 2], -own[:, 1]], axis=1)).max() < 1e-5
    assert np.abs(read_glb_mesh(tmp_path / "plain.glb")[0] - own).max() < 1e-5
    assert np.abs(read_obj_mesh(tmp_path / "x.obj")[0] - own).max() < 1e-4


@NEEDS_COMPILER
def test_the_region_holds_the_surface_and_a_margin(
    splat: Splat, model: Path, seen: tuple[str, ...], tmp_path: Path
) -> None:
    """98 % of the surface of a ball is 2 wide, but for the caps of an axis; 3 % at each side make 1.06 of it."""
    done = splat("mesh", model, "-o", tmp_path / "x.ply", *seen, "--json")
    facts = done.objects[-1]
    assert facts["voxel"] * 40 == pytest.approx(2 * 0.98 * 1.06, rel=0.02)


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("-o", "x.stl"), 2, "a mesh is a .glb, a .ply or an .obj"),
        ((), 2, "no file to write is named"),
        (("-o", "x.ply", "--voxel", "0"), 2, "0 is no size"),
        (("-o", "x.ply", "--voxel", "0.1", "--resolution", "64"), 2, "leave one out"),
        (("-o", "x.ply", "--keep-components", "0"), 2, "neither a number nor a share"),
        (("-o", "x.ply", "--crop", "sphere:90,0,0,1"), 2, "none of the 4,000 Gaussians is left"),
        (("-o", "x.ply", "--views", "train"), 2, "name the scene with --data SCENE, or a camera file"),
        (("-o", "x.ply", "--max-depth", "0.01"), 2, "no surface is nearer"),
        (("-o", "x.ply", "--voxel", "1e-7"), 4, "fits; or keep a part with --crop"),
        (("-o", "x.ply", "--voxel", "1e-30"), 4, "fits; or keep a part with --crop"),
    ],
)
def test_what_is_refused_leaves_nothing(
    words: tuple[str, ...],
    code: int,
    text: str,
    splat: Splat,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = splat("mesh", model, *words)
    assert done.code == code, done.err
    assert text in done.err
    assert "Traceback" not in done.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ("mesh", "-o", "mine/x.ply"),
        ("compare", "-o", "mine/x/x.html"),
        ("eval", "--sheet", "mine/x.png"),
        ("render", "-o", "mine/x.mp4"),
        ("edit", "--dry-run", "--picture", "mine/x.png"),
        ("edit", "-o", "mine/x.ply"),
        ("edit", "-o", "mine/x.lod"),
        ("edit", "-o", "mine/x.pt"),
    ],
)
def test_a_place_that_takes_no_file_is_named_before_the_work(
    words: tuple[str, ...], splat: Splat, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").write_text("mine")
    monkeypatch.chdir(tmp_path)
    done = splat(*words, finished_run)
    assert done.code == 8, done.err
    assert f"cannot write here: Not a directory\n  where: {words[-1]}\n" in done.err
    assert "PSNR" not in done.err
    assert words[0] != "edit" or "reading" not in done.err


@pytest.mark.parametrize(
    "words", [("mesh", "-o", "x.ply"), ("edit", "-o", "x.ply"), ("edit", "--dry-run", "--picture", "x.png")]
)
def test_a_folder_in_the_place_of_a_file_is_named_before_the_work(
    words: tuple[str, ...], splat: Splat, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / words[-1]).mkdir()
    monkeypatch.chdir(tmp_path)
    done = splat(*words, finished_run)
    assert done.code == 8, done.err
    assert "this is a folder, not a file" in done.err
    assert "reading" not in done.err


@NEEDS_COMPILER
def test_a_voxel_that_the_message_names_fits(splat: Splat, model: Path, seen: tuple[str, ...], tmp_path: Path) -> None:
    done = splat("mesh", model, "-o", tmp_path / "x.ply", *seen[2:], "--resolution", "60000")
    assert done.code == 4
    assert "GiB are free" in done.err
    voxel = float(done.err.split("--voxel ")[1].split()[0])
    assert 2.2 / 60000 < voxel < 0.1


@NEEDS_COMPILER
def test_an_existing_file_stays_without_overwrite(
    splat: Splat, model: Path, seen: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "x.obj"
    path.write_text("mine")
    done = splat("mesh", model, "-o", path, *seen)
    assert done.code == 8
    assert "-w replaces it" in done.err
    assert path.read_text() == "mine"
    assert splat("mesh", model, "-o", path, *seen, "-w").code == 0
    assert path.read_text().startswith("# splatcli")


@NEEDS_COMPILER
def test_a_view_that_sees_none_of_the_region_changes_nothing(
    splat: Splat, model: Path, seen: tuple[str, ...], tmp_path: Path
) -> None:
    """As of a crop to a small part of a scene."""
    cameras = views_from_all_sides(ball(), 64)[::2]
    turned = cameras[0].viewmat.copy()
    turned[[0, 2]] *= -1  # half a turn about its y axis
    away = tmp_path / "away.json"
    away.write_text(cameras_json([*cameras, replace(cameras[0], name="away", viewmat=turned)], (0.0, 0.0, 0.0)))
    reports = []
    for words in (seen, (*QUICK, "--views", away)):
        done = splat("mesh", model, "-o", tmp_path / "x.ply", *words, "-w", "--json")
        assert done.code == 0, done.err
        reports.append(done.objects[-1])
    assert reports[0]["num_triangles"] == pytest.approx(reports[1]["num_triangles"], rel=0.01)


@NEEDS_COMPILER
def test_views_that_see_nothing_and_files_that_are_no_model(splat: Splat, cameras: Path, tmp_path: Path) -> None:
    far = ball()
    far.means[:] += 1000
    write_ply_file(far, tmp_path / "far.ply")
    done = splat("mesh", tmp_path / "far.ply", "-o", tmp_path / "x.ply", "--views", cameras)
    assert done.code == 2
    assert "the views show no surface" in done.err
    (tmp_path / "broken.ply").write_bytes((tmp_path / "far.ply").read_bytes()[:-100])
    assert splat("mesh", tmp_path / "broken.ply", "-o", tmp_path / "x.ply").code == 5
    assert splat("mesh", tmp_path / "none.ply", "-o", tmp_path / "x.ply").code == 2
    assert not (tmp_path / "x.ply").exists()
