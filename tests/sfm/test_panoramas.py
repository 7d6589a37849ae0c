"""Equirectangular photos: recognised, cut into faces, and solved as a rig."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from splatcli.cli.commands import run
from splatcli.errors import SceneError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.decode import decode_rgb, read_header
from splatcli.sfm.panorama import FACES, cut, face_camera, face_from_rig, is_panorama, write_masks
from splatcli.sfm.worker import run_worker
from splatcli.similarity import Similarity
from tests.native.cases import NEEDS_COMPILER
from tests.sfm import corner, panoramas
from tests.sfm.test_gaps import pipes_stay_open, write_video

REAL = Path(__file__).parents[3] / "shared/data/pano/images"


def stopped_at_the_end(*args: Any, **named: Any) -> dict[str, Any]:
    run_worker(*args, **named)
    raise KeyboardInterrupt


def taken_for_one(path: Path) -> bool:
    return is_panorama(path, read_header(path))


def test_panoramas_are_known_by_xmp_or_by_seam_and_poles(tmp_path: Path) -> None:
    panoramas.write_panoramas(tmp_path / "xmp")
    assert taken_for_one(tmp_path / "xmp/p0.jpg")
    sky = np.zeros((64, 128, 3), np.uint8)
    sky[:] = (128 + 90 * np.sin(np.arange(128) / 128 * 4 * np.pi))[None, :, None]
    sky[:8], sky[-8:] = 200, 40
    Image.fromarray(sky).save(tmp_path / "whole.png")
    assert taken_for_one(tmp_path / "whole.png")
    sky[8:-8] = np.linspace(0, 255, 128)[None, :, None]
    Image.fromarray(sky).save(tmp_path / "seam.png")
    assert not taken_for_one(tmp_path / "seam.png")
    Image.fromarray(corner.image(0)).resize((256, 128)).save(tmp_path / "wide.png")
    assert not taken_for_one(tmp_path / "wide.png")
    for background in (0, 255):
        sky[:] = background
        sky[20:44, 50:80] = 128
        Image.fromarray(sky).save(tmp_path / "object.png")
        assert not taken_for_one(tmp_path / "object.png")
    Image.fromarray(panoramas.image(0)[:200]).save(tmp_path / "part.jpg", xmp=panoramas.XMP)
    with pytest.raises(SceneError, match="part of a panorama"):
        taken_for_one(tmp_path / "part.jpg")


@pytest.mark.skipif(not REAL.is_dir(), reason="../shared/data/pano is not there")
def test_real_panoramas_are_known(tmp_path: Path) -> None:
    for path in sorted(REAL.glob("*.jpg")):
        assert taken_for_one(path)


@pytest.mark.parametrize("face", range(FACES))
def test_a_face_shows_what_a_camera_there_sees(face: int) -> None:
    """Directions as colours: each pixel of a face has that of its own ray."""
    width = 512
    east = ((np.arange(width) + 0.5) / width - 0.5) * 2 * np.pi
    down = ((np.arange(width // 2) + 0.5) / (width // 2) - 0.5) * np.pi
    east, down = np.meshgrid(east, down)
    rays = np.stack([np.cos(down) * np.sin(east), np.sin(down), np.cos(down) * np.cos(east)], axis=-1)
    found = cut(np.round(127.5 + 127.5 * rays).astype(np.uint8), face)
    camera = face_camera(width)
    assert found.shape == (camera.height, camera.width, 3)
    y, x = np.mgrid[0 : camera.height, 0 : camera.width] + 0.5
    seen = camera.cam_from_img(np.stack([x.ravel(), y.ravel()], axis=1))
    seen = np.concatenate([seen, np.ones((len(seen), 1))], axis=1) @ face_from_rig(face)
    seen /= np.linalg.norm(seen, axis=1, keepdims=True)
    assert np.abs(found.reshape(-1, 3) - (127.5 + 127.5 * seen)).max() <= 1.5


def test_masks_are_cut_as_their_panoramas_are(tmp_path: Path) -> None:
    mask = np.full((128, 256), 255, np.uint8)
    mask[:, 128:] = 0  # all to the right of forward
    Image.fromarray(mask).save(tmp_path / "mask.png")
    first, *_ = write_masks(tmp_path / "mask.png", 256, 128, tmp_path / "out")
    cut_one = np.asarray(Image.open(first)).astype(bool)
    middle = cut_one.shape[1] // 2
    assert cut_one[:, : middle - 1].all()
    assert not cut_one[:, middle + 1 :].any()
    with pytest.raises(SceneError, match=r"mask\.png"):
        write_masks(tmp_path / "mask.png", 512, 256, tmp_path / "other")


@NEEDS_COMPILER
def test_panoramas_are_solved_and_trained_on(tmp_path: Path, capfd) -> None:
    folder, scene = tmp_path / "walk", tmp_path / "scene"
    panoramas.write_panoramas(folder)
    assert run(["sfm", str(folder), "-o", str(scene), "--mapper", "global"]) == 2
    assert "p0.jpg is a panorama, which needs the incremental mapper" in capfd.readouterr().err
    assert not scene.exists()
    assert run(["sfm", str(folder), "-o", str(scene), "--scale-from", "p0.jpg,p1.jpg,2", "--json"]) == 0
    facts = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert facts["panoramas"] == [f"p{i}.jpg" for i in range(panoramas.COUNT)]
    assert facts["registered"] == FACES * panoramas.COUNT
    model = pycolmap.Reconstruction(scene / "sparse/0")
    assert (len(model.rigs), len(model.frames)) == (1, panoramas.COUNT)
    poses = {image.name: image.cam_from_world() for image in model.images.values()}
    assert decode_rgb(scene / "images/p0.jpg/0.jpg", (0, 0, 0)).shape[:2] == (
        face_camera(panoramas.WIDTH).height,
        face_camera(panoramas.WIDTH).width,
    )
    centers, known = [], []
    for i in range(panoramas.COUNT):
        of_faces = [-poses[f"p{i}.jpg/{face}.jpg"].inverse().translation for face in range(FACES)]
        assert np.ptp(of_faces, axis=0).max() < 1e-9
        centers.append(-of_faces[0])
        known.append(-panoramas.pose(i)[:3, :3].T @ panoramas.pose(i)[:3, 3])
    assert np.linalg.norm(centers[0] - centers[1]) == pytest.approx(2)
    similarity = Similarity.of_pairs(np.array(centers), np.array(known))
    assert np.linalg.norm(similarity(np.array(centers)) - known, axis=1).max() < 0.01
    for i in range(panoramas.COUNT):
        for face in (0, 4):
            found = poses[f"p{i}.jpg/{face}.jpg"].rotation.matrix() @ similarity.rotation.T
            turn = found @ (face_from_rig(face) @ panoramas.pose(i)[:3, :3]).T
            assert np.degrees(np.arccos(np.clip((np.trace(turn) - 1) / 2, -1, 1))) < 0.1
    words = ["-n", "2", "--sh-degree", "0", "--device", "cpu", "-r", "2", "--json"]
    assert run(["train", str(scene), "-o", str(tmp_path / "run"), *words]) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["reason"] == "finished"


@pipes_stay_open
def test_frames_of_a_video_of_panoramas_are_solved_as_rigs(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    frames = [panoramas.image(i) for i in range(panoramas.COUNT) for _ in range(2)]
    write_video(tmp_path / "walk.mp4", [Image.fromarray(frame) for frame in frames])
    words = ["sfm", "walk.mp4", "--frames", str(panoramas.COUNT), "--max-features", "1000", "-o", "scene", "--json"]
    with monkeypatch.context() as patched:
        patched.setattr("splatcli.sfm.run.run_worker", stopped_at_the_end)
        assert run(words) == 130
    kept = list(tmp_path.glob("scene.tmp.*/work/panoramas/*.png"))
    assert len(kept) == panoramas.COUNT
    capfd.readouterr()
    assert run(words) == 0  # from the frames that the first call kept
    facts = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert len(facts["panoramas"]) == panoramas.COUNT
    assert facts["registered"] == facts["total"] == FACES * panoramas.COUNT
    assert facts["videos"] == [{"name": "", "frames": panoramas.COUNT, "most": panoramas.COUNT, "hdr": None}]
    model = pycolmap.Reconstruction(tmp_path / "scene/sparse/0")
    assert len(model.frames) == panoramas.COUNT
    there = sorted(path.relative_to("scene/images").as_posix() for path in Path("scene/images").rglob("*.*g"))
    assert there == sorted([*(image.name for image in model.images.values()), *facts["panoramas"]])
