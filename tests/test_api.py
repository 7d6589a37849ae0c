"""The Python interface: Scene, Model and Camera against the parts that they are faces of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import splatcli
from splatcli.cli.commands import run
from splatcli.errors import SceneError, SplatError, UsageError
from splatcli.rasterizer.rendering import render
from tests.cli.tiny import QUICK, write_scene
from tests.native.cases import NEEDS_COMPILER
from tests.train.worlds import random_gaussians, ring_cameras

COURTYARD = Path(__file__).resolve().parents[1] / "data" / "samples" / "courtyard"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the command line."""
    place = tmp_path_factory.mktemp("trained")
    scene = write_scene(place / "scene")
    arguments = ["train", str(scene), *QUICK, "-n", "30", "-o", str(place / "run"), "--device", "cpu", "-q"]
    assert run([*arguments, "--set", "train.background=white"]) == 0
    return place / "run"


def test_import_is_light_and_every_public_name_is_there() -> None:
    code = (
        "import sys, splatcli\n"
        "heavy = {'torch', 'numpy', 'pydantic'} & set(sys.modules)\n"
        "missing = [name for name in splatcli._PUBLIC if getattr(splatcli, name, None) is None]\n"
        "sys.exit(f'{heavy} {missing}' if heavy or missing else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {"Scene", "Model", "Camera", "rasterization"} <= set(dir(splatcli))


def test_a_scene_says_what_it_is() -> None:
    scene = splatcli.Scene.open(COURTYARD)
    assert len(scene) == len(scene.cameras) == len(scene.train) + len(scene.test) > 0
    assert scene.points is not None
    assert repr(scene).startswith("<Scene courtyard: colmap, ")
    assert f"{len(scene.points.xyz):,} points" in repr(scene)
    camera = scene.cameras[0]
    assert isinstance(camera, splatcli.Camera)
    assert scene.images.image(0).pixels.shape == (camera.height, camera.width, 3)
    half = splatcli.Scene.open(COURTYARD, resolution=2, test_every=0)
    assert half.cameras[0].width == camera.width // 2
    assert half.test == []


def test_a_scene_takes_its_own_settings_only() -> None:
    with pytest.raises(UsageError, match=r"train\.iterations is no setting of a scene"):
        splatcli.Scene.open(COURTYARD, iterations=3)
    with pytest.raises(UsageError, match="no setting 'resolutoin'") as caught:
        splatcli.Scene.open(COURTYARD, resolutoin=3)
    assert "resolution" in str(caught.value.remedy)


def test_a_folder_without_a_scene_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SceneError):
        splatcli.Scene.open(tmp_path)


@NEEDS_COMPILER
def test_a_run_folder_renders_as_trained(trained: Path) -> None:
    model = splatcli.Model.load(trained)
    assert (model.step, len(model), model.origin) == (30, len(model.gaussians), "checkpoint")
    assert "of step 30" in repr(model)
    shown = model.render(model.cameras[0])
    white = torch.ones(3)
    expected = render(model.gaussians, model.cameras[0], background=white, sh_degree=model.settings.sh_degree)
    for name in ("image", "alpha", "depth"):
        assert torch.equal(getattr(shown, name), getattr(expected, name))
    small = model.render(model.cameras[0], size=(20, 15), background="#ff0000")
    assert small.image.shape == (15, 20, 3)
    black = model.render(model.cameras[0], size=(20, 15), background="black")
    behind = (1.0 - small.alpha)[..., None] * torch.tensor([1.0, 0.0, 0.0])
    torch.testing.assert_close(small.image, black.image + behind)


@NEEDS_COMPILER
@pytest.mark.parametrize("name", ["scene.ply", "scene.splat", "scene.spz", "scene.glb"])
def test_an_export_is_that_of_the_command(trained: Path, tmp_path: Path, name: str) -> None:
    assert run(["export", str(trained), "-o", str(tmp_path / "command" / name), "-q"]) == 0
    model = splatcli.Model.load(trained)
    model.export(tmp_path / "api" / name)
    assert (tmp_path / "api" / name).read_bytes() == (tmp_path / "command" / name).read_bytes()
    again = splatcli.Model.load(tmp_path / "api" / name)
    assert len(again) == len(model)
    assert again.cameras == ()


def test_a_ply_comes_back_exactly(tmp_path: Path) -> None:
    gaussians = random_gaussians(20)
    model = splatcli.Model(gaussians)
    assert model.export(tmp_path / "a.ply", min_opacity=0.0, sh_degree=1) == []
    again = splatcli.Model.load(tmp_path / "a.ply")
    for (name, mine), (_, theirs) in zip(gaussians.items(), again.gaussians.items(), strict=True):
        assert torch.equal(mine, theirs), name


@NEEDS_COMPILER
def test_a_model_of_tensors_renders_with_gradients() -> None:
    gaussians = random_gaussians(20)
    gaussians.means.requires_grad_()
    splatcli.Model(gaussians).render(ring_cameras(2)[0]).image.sum().backward()
    assert gaussians.means.grad is not None
    assert float(gaussians.means.grad.abs().sum()) > 0


@pytest.mark.parametrize("kind", ["nothing", "an empty folder", "a text"])
def test_what_is_no_model_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.txt"
    if kind == "an empty folder":
        path.mkdir()
    elif kind == "a text":
        path.write_text("no model")
    with pytest.raises(SplatError):
        splatcli.Model.load(path)


def test_cameras_are_made_of_numbers() -> None:
    camera = splatcli.Camera("a", 40, 30, 35.0, 35.0, 20.0, 15.0, np.eye(4))
    assert camera.center.tolist() == [0, 0, 0]
