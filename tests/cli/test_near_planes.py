"""What lies before the near plane of a camera appears in no command's picture of it."""

from __future__ import annotations

import json
from pathlib import Path

import imageio.v3 as imageio
import numpy as np
import pytest
import torch

from splatcli.checkpoint.file import load_checkpoint
from splatcli.formats.ply import write_ply_file
from splatcli.gaussians import GROUPS, Gaussians
from splatcli.scene.camera import NEAR, Camera
from tests.cli.tiny import QUICK, add_points, write_scene
from tests.formats.made import read_ply
from tests.running import Splat


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_points(write_scene(tmp_path_factory.mktemp("near") / "scene"))


def trained(splat: Splat, scene: Path, run: Path, *more: object) -> Path:
    done = splat("train", scene, "-n", 20, "-q", *QUICK, *more, "-o", run)
    assert done.code == 0, done.err
    return Path(done.lines[0])


def pictures(splat: Splat, model: Path, out: Path, *words: object) -> dict[str, np.ndarray]:
    done = splat("render", model, *words, "-o", out, "-q")
    assert done.code == 0, done.err
    return {Path(line).name: imageio.imread(line) for line in done.lines}


def add_fog(model: Path, camera: Camera, z: float, fogged: Path) -> Path:
    """Write ``model`` to ``fogged`` with an opaque white Gaussian at ``z`` before ``camera``, which fills its image."""
    gaussians = read_ply(model)
    mean = np.linalg.inv(camera.viewmat) @ [0.0, 0.0, z, 1.0]
    fog = gaussians.map(lambda tensor: torch.zeros_like(tensor[:1]))
    fog.means[0] = torch.from_numpy(mean[:3])
    fog.quats[:, 0] = 1.0
    fog.log_scales.fill_(float(np.log(z)))
    fog.logit_opacities.fill_(4.0)
    fog.sh0.fill_(1.7)
    both = {name: torch.cat([getattr(gaussians, name), getattr(fog, name)]) for name in GROUPS}
    write_ply_file(Gaussians(**both), fogged)
    return fogged


def test_fog_before_a_near_plane_is_not_rendered(splat: Splat, scene: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(trained(splat, scene, tmp_path / "run"))
    camera = checkpoint.cameras[checkpoint.test[0]]
    assert 0.35 < camera.near < 0.45  # a fifth of the two units between the camera and the ball
    for name in ("model.ply", "cameras.json"):
        assert splat("export", tmp_path / "run", "-o", tmp_path / name, "-q").code == 0
    near = add_fog(tmp_path / "model.ply", camera, 0.9 * camera.near, tmp_path / "near.ply")
    beyond = add_fog(tmp_path / "model.ply", camera, 1.1 * camera.near, tmp_path / "beyond.ply")
    clear = pictures(splat, tmp_path / "run", tmp_path / "a", "--views", "test")[Path(camera.name).name]
    for words in (("--data", scene, "--views", "test"), ("--views", tmp_path / "cameras.json")):
        assert np.array_equal(pictures(splat, near, tmp_path / "b", *words)[Path(camera.name).name], clear)
        assert pictures(splat, beyond, tmp_path / "c", *words)[Path(camera.name).name].mean() > clear.mean() + 50
    # A file of cameras that says nothing of planes, as other programs write it, has the fixed plane.
    document = json.loads((tmp_path / "cameras.json").read_text())
    for entry in document["cameras"]:
        del entry["near"]
    (tmp_path / "plain.json").write_text(json.dumps(document))
    foggy = pictures(splat, near, tmp_path / "d", "--views", tmp_path / "plain.json")
    assert foggy[Path(camera.name).name].mean() > clear.mean() + 50


def test_a_path_keeps_the_nearest_plane_of_its_cameras(splat: Splat, scene: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(trained(splat, scene, tmp_path / "run"))
    nearest = min(camera.near for camera in checkpoint.cameras)
    words = ("--views", "orbit", "--frames", 3, "--size", "32x24")
    path = pictures(splat, tmp_path / "run", tmp_path / "a", *words, "--save-cameras", tmp_path / "ours.json")
    saved = json.loads((tmp_path / "ours.json").read_text())["cameras"]
    assert [entry["near"] for entry in saved] == [nearest] * 3
    # Nerfstudio's layout holds no plane: that of the run is taken.
    theirs = tmp_path / "x.camera_path.json"
    pictures(splat, tmp_path / "run", tmp_path / "b", *words, "--save-cameras", theirs)
    again = pictures(splat, tmp_path / "run", tmp_path / "c", "--views", theirs)
    assert len(path) == 3
    for name, picture in path.items():
        assert np.array_equal(again[name], picture), name


@pytest.mark.parametrize("near", [0, -1, "x", None, True])
def test_a_near_plane_that_is_none_is_refused(splat: Splat, scene: Path, tmp_path: Path, near: object) -> None:
    model = trained(splat, scene, tmp_path / "run")
    assert splat("export", model, "-o", tmp_path / "c.json", "-q").code == 0
    document = json.loads((tmp_path / "c.json").read_text())
    document["cameras"][1]["near"] = near
    (tmp_path / "c.json").write_text(json.dumps(document))
    done = splat("render", model, "--views", tmp_path / "c.json", "-o", tmp_path / "out")
    assert done.code == 3, done.err
    assert "cameras 1" in done.err
    assert "near" in done.err


def test_a_run_without_near_planes_goes_on_without(splat: Splat, scene: Path, tmp_path: Path) -> None:
    """As runs of earlier versions: cameras of the checkpoint count, not those that the scene would have now."""
    off = ("--set", "data.near_share=0")
    whole = load_checkpoint(trained(splat, scene, tmp_path / "whole", *off))
    assert {camera.near for camera in whole.cameras} == {NEAR}
    trained(splat, scene, tmp_path / "run", *off, "--stop-at", 9)
    stored = tmp_path / "run" / "config.json"
    config = json.loads(stored.read_text())
    del config["data"]["near_share"]
    stored.write_text(json.dumps(config))
    done = splat("resume", tmp_path / "run", "-q")
    assert done.code == 0, done.err
    resumed = load_checkpoint(Path(done.lines[0]))
    for name in GROUPS:
        assert torch.equal(getattr(resumed.gaussians, name), getattr(whole.gaussians, name)), name
