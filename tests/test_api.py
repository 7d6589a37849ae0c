"""The Python interface: Scene, Model and Camera against the parts that they are faces of."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import math
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

import splatcli
from splatcli.checkpoint.file import load_checkpoint, save_checkpoint
from splatcli.checkpoint.run_dir import RunDir
from splatcli.cli.commands import run
from splatcli.config import build_config
from splatcli.errors import DivergedError, ResourceError, SceneError, SplatError, UsageError
from splatcli.gaussians import Gaussians
from splatcli.mesh.build import MeshOptions, build_mesh
from splatcli.rasterizer.rendering import render
from splatcli.rasterizer.step_inputs import DensifyStats, Regularisation
from splatcli.render.images import RenderSettings
from splatcli.scene.camera import CameraModel
from splatcli.scene.points import PointCloud
from splatcli.train.densify import Refinement
from splatcli.train.densify.default import AdcStrategy
from splatcli.train.events import Evaluated, Refined, Stepped
from tests.cli.tiny import QUICK, add_points, write_scene
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
    half = splatcli.Scene.open(COURTYARD, resolution=2, test_every=0, images=Path("images"))
    assert half.cameras[0].width == camera.width // 2
    assert half.test == []


def test_home_folders_have_their_sign_in_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell reads ~ in a string of Python, nor in a file of settings."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "here").symlink_to(COURTYARD, target_is_directory=True)
    scene = splatcli.Scene.open("~/here", images=Path("~/here/images"))
    assert scene.data.images == str(tmp_path / "here/images")
    splatcli.Model(random_gaussians(50)).export("~/model.ply")
    assert len(splatcli.Model.load("~/model.ply")) == 50
    trainer = splatcli.Trainer(scene, output=Path("~/run"), init="~/model.ply", device="cpu")
    assert (trainer.output, trainer.config.model.init) == (tmp_path / "run", str(tmp_path / "model.ply"))
    (tmp_path / "run.toml").write_text('[data]\nmasks = "~/masks"')
    assert build_config(file=tmp_path / "run.toml").data.masks == str(tmp_path / "masks")


def test_a_scene_takes_its_own_settings_only() -> None:
    with pytest.raises(UsageError, match=r"train\.iterations is no setting of a scene"):
        splatcli.Scene.open(COURTYARD, iterations=3)
    with pytest.raises(UsageError, match="the folder is named twice"):
        splatcli.Scene.open(COURTYARD, scene="elsewhere")
    with pytest.raises(UsageError, match="no setting 'resolutoin'") as caught:
        splatcli.Scene.open(COURTYARD, resolutoin=3)
    assert "resolution" in str(caught.value.remedy)
    with pytest.raises(UsageError, match="max_points = -1: expected a number above 0") as caught:
        splatcli.Scene.open(COURTYARD, max_points=-1)
    assert "--" not in str(caught.value)  # flags are of the command line


@pytest.mark.parametrize("model", ["ortho", "fisheye"])
def test_who_cannot_take_a_camera_of_another_model_says_so(trained: Path, tmp_path: Path, model: CameraModel) -> None:
    """None of them takes the numbers of such a camera for those of a pinhole; renders take them as they are."""
    loaded, scene = splatcli.Model.load(trained), splatcli.Scene.open(COURTYARD)
    camera = dataclasses.replace(loaded.cameras[0], model=model)
    checkpoint = load_checkpoint(trained / "ckpts" / "ckpt_000030.pt")
    gaussians, first, photo = loaded.gaussians, loaded.cameras[0].name, scene.cameras[0].name
    named = dataclasses.replace(camera, name=photo)
    uses: dict[str, Callable[[], object]] = {
        rf"'{photo}' has the model '{model}', and its image has not": lambda: loaded.compare(scene, [named]),
    }
    if model == "ortho":
        uses |= {
            "a scene has pinhole and fisheye cameras": lambda: dataclasses.replace(scene, cameras=[camera]),
            f"a checkpoint has pinholes and fisheyes, and '{first}' is orthographic": lambda: save_checkpoint(
                tmp_path / "x.pt", dataclasses.replace(checkpoint, cameras=[camera, *checkpoint.cameras[1:]])
            ),
            f"'{first}' is orthographic, and no pinhole shows": lambda: build_mesh(
                gaussians, [camera], RenderSettings(), MeshOptions()
            ),
        }
    for message, use in uses.items():
        with pytest.raises(UsageError, match=message):
            use()
    assert not (tmp_path / "x.pt").exists()
    shown = loaded.render(camera).image
    assert torch.equal(shown, render(gaussians, camera, background=torch.ones(3)).image)
    assert not torch.equal(shown, loaded.render(loaded.cameras[0]).image)


def test_errors_name_the_argument_and_not_a_flag(tmp_path: Path) -> None:
    model = splatcli.Model(random_gaussians(5))
    camera = splatcli.Camera("a", 8, 6, 8.0, 8.0, 4.0, 3.0, np.eye(4))
    for argument, call in {
        "format": lambda: splatcli.Scene.open(COURTYARD, format="nope"),
        "device": lambda: model.to("gpu"),
        "background": lambda: model.render(camera, background="whitish"),
        "path": lambda: model.export(tmp_path / "x.nope"),
        "min_opacity": lambda: model.export(tmp_path / "x.spz", min_opacity=1.0),
    }.items():
        with pytest.raises(UsageError) as caught:
            call()
        assert caught.value.where == argument
        assert str(caught.value).startswith(f"{argument}: ")


def test_remedies_name_arguments_and_not_flags(ball: Path, tmp_path: Path) -> None:
    (tmp_path / "ckpts").mkdir()
    (tmp_path / "notes").touch()
    for remedy, call in {
        'masks="none" uses no masks': lambda: splatcli.Scene.open(COURTYARD, masks="nowhere"),
        "or depths=DIR": lambda: splatcli.Trainer(ball, output=tmp_path / "a", depths="auto", device="cpu").run(),
        "overwrite=True moves the run": lambda: splatcli.Trainer(COURTYARD, output=tmp_path, device="cpu").run(),
        # What is a whole command stays one.
        "splat train --test-every (0": lambda: splatcli.Scene.open(COURTYARD, test_every=1),
    }.items():
        with pytest.raises(SplatError) as caught:
            call()
        assert remedy in str(caught.value.remedy)
        assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("iteration", "did you mean iterations?"),
        ("max_steps", "did you mean iterations?"),
        ("vram_budget", "did you mean budget?"),
        ("white_background", "did you mean background='white'?"),
        ("max_time", "splat train --max-time has one"),
        ("ranks", "splat train --ranks"),
        ("stop_at", "give it to run()"),
        ("downscale_factor", "did you mean resolution?"),
        ("data_factor", "did you mean resolution?"),
        ("result_dir", "did you mean output?"),
        ("llffhold", "did you mean test_every?"),
        ("lambda_dssim", "did you mean ssim_lambda?"),
    ],
)
def test_unknown_names_have_hints(name: str, hint: str) -> None:
    with pytest.raises(UsageError, match=f"no setting '{name}'") as caught:
        splatcli.Trainer(COURTYARD, device="cpu", **{name: 1})  # type: ignore[arg-type]
    assert hint in str(caught.value.remedy)


def test_names_that_mean_something_else_here_have_hints() -> None:
    with pytest.raises(UsageError, match="did you mean resolution") as caught:
        splatcli.Scene.open(COURTYARD, downscale=4)
    assert "num_downscales" not in str(caught.value)
    with pytest.raises(UsageError, match="did you mean iterations"):
        splatcli.Trainer(COURTYARD, device="cpu", steps=100)


def test_no_maximum_has_a_word_and_none_is_the_default() -> None:
    caps = [splatcli.Trainer(COURTYARD, device="cpu", cap_max=cap).config.strategy.cap_max for cap in (None, "none")]
    assert caps == ["auto", None]


@pytest.mark.parametrize(
    "given", [{"sh_degree": -1}, {"sh_degree": 5}, {"min_opacity": math.nan}, {"min_opacity": -0.1}], ids=str
)
def test_an_export_out_of_range_is_refused(given: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        splatcli.Model(random_gaussians(5)).export(tmp_path / "x.ply", **given)
    assert [caught.value.where] == list(given)
    assert not any(tmp_path.iterdir())


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
    expected = render(model.gaussians, model.cameras[0], background=white)
    for name in ("image", "alpha", "depth"):
        assert torch.equal(getattr(shown, name), getattr(expected, name))
    small = model.render(model.cameras[0], size=(20, 15), background="#ff0000")
    assert small.image.shape == (15, 20, 3)
    black = model.render(model.cameras[0], size=(20, 15), background="black")
    behind = (1.0 - small.alpha)[..., None] * torch.tensor([1.0, 0.0, 0.0])
    torch.testing.assert_close(small.image, black.image + behind)


@NEEDS_COMPILER
def test_a_run_with_ppisp_renders_as_the_command_does(ball: Path, tmp_path: Path) -> None:
    trained = splatcli.train(ball, output=tmp_path / "run", iterations=30, ppisp=True, ppisp_lr=0.1, **TINY)
    assert run(["render", str(trained.path), "--views", "all", "-o", str(tmp_path / "views"), "-q"]) == 0
    model = splatcli.Model.load(trained.path)
    for camera in model.cameras:
        shown = model.render(camera).image
        file = next((tmp_path / "views").rglob(f"{Path(camera.name).stem}.png"))
        levels = (shown.clamp(0.0, 1.0) * 255.0).round()
        assert torch.equal(levels, torch.from_numpy(np.array(Image.open(file))).float()), camera.name
    plain = dataclasses.replace(model, settings=RenderSettings(model.settings.background)).render(model.cameras[0])
    assert float((model.render(model.cameras[0]).image - plain.image).abs().max()) > 0.01
    # Vignetting is that of the camera at any size; and it has a gradient.
    first = model.cameras[0]
    half = model.render(first, size=(first.width // 2, first.height // 2), background="white").image
    whole = model.render(first, background="white").image
    assert_close(half[0, 0], whole[0, 0], atol=0.01, rtol=0)
    model.gaussians.sh0.requires_grad_()
    model.render(first).image.sum().backward()
    assert model.gaussians.sh0.grad is not None
    assert float(model.gaussians.sh0.grad.abs().sum()) > 0


@NEEDS_COMPILER
@pytest.mark.parametrize("name", ["scene.ply", "scene.splat", "scene.spz", "scene.glb", "scene.html"])
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


@pytest.mark.parametrize(("name", "most"), [("a.splat", 0), ("a.spz", 3), ("a.ply", 4)])
def test_an_export_says_which_harmonics_a_format_does_not_hold(tmp_path: Path, name: str, most: int) -> None:
    gaussians = random_gaussians(20)
    gaussians.shN = torch.full((20, 24, 3), 0.1)
    model = splatcli.Model(gaussians)
    said = [note for note in model.export(tmp_path / name) if note.startswith("SH degree 4 -> ")]
    assert [note.split(",")[0] for note in said] == ([f"SH degree 4 -> {most}"] if most < 4 else [])
    assert not any("SH degree" in note for note in model.export(tmp_path / name, sh_degree=0))
    assert splatcli.Model.load(tmp_path / name).gaussians.sh_degree == 0


@NEEDS_COMPILER
@NEEDS_COMPILER
def test_a_comparison_is_that_of_the_command(trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def figures(*words: object) -> dict[str, dict[str, float]]:
        capfd.readouterr()
        assert run(["compare", *map(str, words), "--device", "cpu", "--json"]) == 0
        found = json.loads(capfd.readouterr().out.splitlines()[-1])
        side = "a" if found["b"] is None else "ab"
        return {one["name"]: {name: one[f"{name}_{side}"] for name in ("psnr", "ssim")} for one in found["views"]}

    model, scene = splatcli.Model.load(trained), splatcli.Scene.open(trained.parent / "scene")
    assert model.compare(scene) == figures(trained)
    every = model.compare(scene, scene.cameras)
    assert every == figures(trained, "--views", "all")
    assert len(every) == len(scene) > len(scene.test) > 0
    model.export(tmp_path / "small.spz", sh_degree=0)
    small = splatcli.Model.load(tmp_path / "small.spz")
    views = [scene.cameras[index] for index in scene.test]
    assert model.compare(small, views) == figures(trained, tmp_path / "small.spz")
    same = model.compare(model)
    assert same.keys() == every.keys()
    assert all(one == {"psnr": 100.0, "ssim": pytest.approx(1.0)} for one in same.values())
    far = dataclasses.replace(model, offset=(0.0, 0.0, 5.0), cameras=())
    assert model.compare(far, views) != model.compare(model, views)
    with pytest.raises(UsageError, match="no view to compare"):
        model.compare(small)


@NEEDS_COMPILER
@pytest.mark.parametrize("background", ["white", "#804020", "random"])
def test_transparent_images_are_compared_over_the_background_of_the_model(
    tmp_path: Path, background: str, capfd: pytest.CaptureFixture[str]
) -> None:
    place = write_scene(tmp_path / "scene")
    for file in (place / "images").iterdir():
        image = Image.open(file).convert("RGB")
        image.putalpha(Image.fromarray((np.asarray(image).max(axis=2) > 100).astype(np.uint8) * np.uint8(255)))
        image.save(file)
    trained = splatcli.train(place, output=tmp_path / "run", iterations=20, **{**TINY, "background": background})
    scene = splatcli.Scene.open(place)
    found = trained.model.compare(scene)
    assert scene.images.background == (0, 0, 0), "the scene stays as it is"
    capfd.readouterr()
    assert run(["eval", str(trained.path), "--json", "-q"]) == 0
    views = json.loads(capfd.readouterr().out.splitlines()[-1])["views"]
    assert found == {view["name"]: {"psnr": view["psnr"], "ssim": view["ssim"]} for view in views}


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


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("width", 2**32 + 8, "width is 4294967304, more than 2,147,483,647 pixels"),
        ("fx", 0.0, "fx is 0.0; a focal length is positive"),
        ("fy", math.nan, "fy is nan"),
        ("fy", -35.0, "fy is -35.0"),
        ("cx", math.inf, "cx is inf, not a finite number"),
        ("near", math.nan, "near is nan, not a finite number"),
        ("near", math.inf, "near is inf, not a finite number"),
        ("viewmat", np.full((4, 4), np.nan), "viewmat has numbers that are not finite"),
    ],
)
def test_a_camera_that_cannot_be_is_refused(name: str, value: Any, said: str) -> None:
    camera = splatcli.Camera("a", 40, 30, 35.0, 35.0, 20.0, 15.0, np.eye(4))
    gaussians = random_gaussians(5)
    with pytest.raises(ValueError, match=said):
        render(gaussians, dataclasses.replace(camera, **{name: value}))


def test_a_depth_range_of_nan_is_refused() -> None:
    camera = splatcli.Camera("a", 40, 30, 35.0, 35.0, 20.0, 15.0, np.eye(4))
    with pytest.raises(ValueError, match="NaN is no limit"):
        render(random_gaussians(5), camera, z_range=(0.1, math.nan))


TINY = {
    "init": "random",
    "random_points": 200,
    "sh_degree": 1,
    "prune_scale3d": 100,
    "prune_opacity": 1e-4,
    "refine_every": 10,
    "device": "cpu",
}


@pytest.fixture
def ball(tmp_path: Path) -> Path:
    return write_scene(tmp_path / "ball")


class Recorder:
    """Keeps the events that it receives."""

    def __init__(self) -> None:
        self.steps: list[Stepped] = []
        self.refined: list[Refined] = []
        self.scores: list[Evaluated] = []

    def on_step(self, event: Stepped) -> None:
        self.steps.append(event)

    def on_refine(self, event: Refined) -> None:
        self.refined.append(event)

    def on_eval(self, event: Evaluated) -> None:
        self.scores.append(event)


@NEEDS_COMPILER
def test_train_is_bit_identical_to_the_command(trained: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    scene = trained.parent / "scene"
    done = splatcli.train(
        scene, output=tmp_path / "run", iterations=30, background="white", callbacks=[recorder], **TINY
    )
    ours, theirs = splatcli.Model.load(done.path).gaussians, splatcli.Model.load(trained).gaussians
    for (name, mine), (_, other) in zip(ours.items(), theirs.items(), strict=True):
        assert torch.equal(mine, other), name
    assert (done.step, done.reason, done.checkpoint.name) == (30, "finished", "ckpt_000030.pt")
    assert [event.step for event in recorder.steps] == list(range(1, 31))
    assert recorder.refined
    (score,) = recorder.scores
    assert done.metrics["psnr"] == score.psnr
    assert done.history()[-1]["step"] == 30
    assert "finished after step 30" in repr(done)
    shown = done.model.render(done.model.cameras[0]).image
    assert torch.equal(shown, splatcli.Model.load(trained).render(done.model.cameras[0]).image)


@NEEDS_COMPILER
def test_a_run_in_parts_is_that_in_one(ball: Path, tmp_path: Path) -> None:
    scene = splatcli.Scene.open(ball)
    whole = splatcli.train(scene, output=tmp_path / "whole", iterations=30, **TINY)
    trainer = splatcli.Trainer(scene, output=tmp_path / "parts", iterations=30, **TINY)
    first = trainer.run(stop_at=7)
    assert (first.step, first.reason, first.metrics, first.history()) == (7, "stop-at", {}, [])
    assert trainer.run(stop_at=20).step == 20
    last = splatcli.Trainer.resume(tmp_path / "parts", device="cpu").run()
    for (name, mine), (_, other) in zip(last.model.gaussians.items(), whole.model.gaussians.items(), strict=True):
        assert torch.equal(mine, other), name
    assert last.metrics == whole.metrics


@NEEDS_COMPILER
def test_a_resumed_run_takes_none_and_other_values_of_python(ball: Path, tmp_path: Path) -> None:
    options = {"iterations": 6, "cap_max": 300, "cache_bytes": 1_000_000, **TINY}
    splatcli.Trainer(ball, output=tmp_path / "run", **options).run(stop_at=2)
    changed = {"cap_max": None, "cache_bytes": None, "iterations": "8", "save.steps": (4,), "optim.beta1": 0.5}
    config = splatcli.Trainer.resume(tmp_path / "run", device="cpu", **changed).config
    assert (config.strategy.cap_max, config.data.cache_bytes, config.train.iterations) == (None, None, 8)
    assert (config.save.steps, config.optim.beta1) == ((4,), 0.5)
    with pytest.raises(UsageError, match="iterations = None: expected a whole number"):
        splatcli.Trainer.resume(tmp_path / "run", device="cpu", iterations=None)


@NEEDS_COMPILER
def test_a_resumed_run_does_without_the_points_that_it_began_with(ball: Path, tmp_path: Path) -> None:
    points = add_points(write_scene(tmp_path / "pointed")) / "points.ply"
    trainer = splatcli.Trainer(ball, output=tmp_path / "run", **{**TINY, "init": "sfm"}, iterations=6, points=points)
    trainer.run(stop_at=2)
    points.unlink()
    with pytest.raises(SceneError, match="no points here"):
        splatcli.Trainer.resume(tmp_path / "run", device="cpu", points=points)
    resumed = splatcli.Trainer.resume(tmp_path / "run", device="cpu")
    resumed.run()
    assert resumed.step == 6


@NEEDS_COMPILER
@pytest.mark.parametrize("kind", ["on_step", "on_refine", "on_eval"])
def test_an_error_in_a_callback_stops_the_run_with_its_state_saved(ball: Path, tmp_path: Path, kind: str) -> None:
    class Broken:
        calls = 0

    def fail(self: Broken, event: Stepped | Refined | Evaluated) -> None:
        self.calls += 1
        raise ZeroDivisionError(f"at {event.step}")

    setattr(Broken, kind, fail)
    callback = Broken()
    trainer = splatcli.Trainer(ball, output=tmp_path / "run", iterations=30, eval_every=5, callbacks=[callback], **TINY)
    with pytest.raises(ZeroDivisionError) as caught:
        trainer.run()
    step = int(str(caught.value).split()[1])
    assert 0 < step < 30
    assert callback.calls == 1
    assert splatcli.Model.load(tmp_path / "run").step == step


@NEEDS_COMPILER
def test_a_callback_may_look_at_the_model_change_folder_and_stop_the_run(
    ball: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    class Looks:
        seen: torch.Tensor | None = None

        def on_step(self, event: Stepped) -> None:
            monkeypatch.chdir("/")  # the run folder stays where it is
            if event.step == 4:
                self.seen = trainer.model.render(trainer.scene.cameras[0]).image
                trainer.stop()

    looks = Looks()
    trainer = splatcli.Trainer(ball, output="run", iterations=30, callbacks=[looks], **TINY)
    with pytest.raises(UsageError, match="before run"):
        _ = trainer.model
    done = trainer.run()
    assert (done.step, done.reason, done.path) == (4, "stopped", tmp_path / "run")
    assert looks.seen is not None
    assert torch.equal(looks.seen, done.model.render(trainer.scene.cameras[0]).image)


def plain_loss(image: torch.Tensor, target: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
    """The training loss, by its public function."""
    stacks = (one.permute(2, 0, 1)[None] for one in (image, target))
    return splatcli.l1_ssim_loss(*stacks, 0.2)


@NEEDS_COMPILER
def test_the_training_loss_as_a_loss_of_ones_own_trains_alike(ball: Path, tmp_path: Path) -> None:
    """Over a few steps, for rounding grows; tests/rasterizer/test_loss_engine.py compares gradients."""
    losses, counts = [], []
    for name, more in (("fused", {}), ("own", {"loss": plain_loss})):
        recorder = Recorder()
        options = {**TINY, "refine_every": 100, "callbacks": [recorder], **more}
        done = splatcli.train(ball, output=tmp_path / name, iterations=8, **options)
        losses.append(torch.tensor([event.loss for event in recorder.steps]))
        counts.append(load_checkpoint(done.checkpoint).strategy["count"])
    assert_close(*losses, rtol=1e-3, atol=0)
    assert float(counts[0].max()) > 0
    assert_close(*counts, rtol=0, atol=1.0)


@NEEDS_COMPILER
def test_another_loss_is_minimised(ball: Path, tmp_path: Path) -> None:
    seen = []

    def red(image: torch.Tensor, target: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
        assert (target >= 0).all()
        assert (target <= 1).all()
        assert counts is None
        seen.append(image.shape)
        return (image - torch.tensor([1.0, 0.0, 0.0])).square().mean()

    recorder = Recorder()
    done = splatcli.train(ball, output=tmp_path / "run", iterations=60, loss=red, callbacks=[recorder], **TINY)
    assert len(seen) == 60
    assert recorder.steps[-1].loss < 0.5 * recorder.steps[0].loss
    image = done.model.render(done.model.cameras[0]).image
    assert float(image[..., 0].mean()) > 2 * float(image[..., 1:].mean())


@NEEDS_COMPILER
def test_a_loss_with_a_regulariser_of_the_gaussians_resumes_to_the_same_bits(ball: Path, tmp_path: Path) -> None:

    def regularised(image: torch.Tensor, target: torch.Tensor, counts: Any, *, gaussians: Gaussians) -> torch.Tensor:
        return plain_loss(image, target, counts) + 0.1 * gaussians.logit_opacities.sigmoid().mean()

    options: dict[str, Any] = {"iterations": 12, "loss": regularised, **TINY}
    whole = splatcli.train(ball, output=tmp_path / "whole", **options)
    splatcli.Trainer(ball, output=tmp_path / "parts", **options).run(stop_at=5)
    done = splatcli.Trainer.resume(tmp_path / "parts", loss=regularised).run()
    plain = splatcli.train(ball, output=tmp_path / "plain", **{**options, "loss": plain_loss})
    for name, tensor in done.model.gaussians.items():
        assert torch.equal(tensor, dict(whole.model.gaussians.items())[name]), name
    opacity, other = (run.model.gaussians.logit_opacities.mean() for run in (whole, plain))
    assert float(opacity) < float(other)


class Tints(torch.nn.Module):
    """The training loss, with a factor and an offset of the colours for each image."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.rows = {name: row for row, name in enumerate(names)}
        self.tints = torch.nn.Embedding(len(names), 6)
        torch.nn.init.zeros_(self.tints.weight)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.01)

    def forward(self, image: torch.Tensor, target: torch.Tensor, counts: Any, *, camera: Any) -> torch.Tensor:
        tint = self.tints(torch.tensor(self.rows[camera.name]))
        return plain_loss(image * (1 + tint[:3]) + tint[3:], target, counts)

    def on_step(self, event: Stepped) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


@NEEDS_COMPILER
def test_parameters_of_a_loss_are_trained_by_the_optimizer_of_the_caller(ball: Path, tmp_path: Path) -> None:
    """The images of every second view are brighter; what the loss learns of them shows it."""
    scene = splatcli.Scene.open(ball)
    bright = scene.train[::2]
    for view in bright:
        path = scene.images.sources[view].path
        Image.fromarray(np.minimum(scene.images.image(view).pixels * 1.5 + 20, 255).astype(np.uint8)).save(path)
    scene = splatcli.Scene.open(ball)
    loss = Tints([scene.cameras[view].name for view in scene.train])
    splatcli.train(scene, output=tmp_path / "run", iterations=120, loss=loss, callbacks=[loss], **TINY)
    learnt = loss.tints.weight.detach().mean(dim=1)
    assert float(learnt[::2].mean()) > float(learnt[1::2].mean()) + 0.02


@NEEDS_COMPILER
def test_a_run_with_its_own_loss_continues_only_with_one(
    ball: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder = tmp_path / "run"
    whole = splatcli.train(ball, output=tmp_path / "whole", iterations=12, loss=plain_loss, **TINY)
    splatcli.Trainer(ball, output=run_folder, iterations=12, loss=plain_loss, **TINY).run(stop_at=5)
    before = sorted(path.name for path in (run_folder / "ckpts").iterdir())
    assert run(["resume", str(run_folder), "--device", "cpu", "-q"]) == UsageError.exit_code
    message = capsys.readouterr().err
    assert "'plain_loss'" in message
    assert f"splatcli.Trainer.resume({str(run_folder)!r}, loss=...)" in message
    with pytest.raises(UsageError, match="loss function of its own, 'plain_loss'"):
        splatcli.Trainer.resume(run_folder, device="cpu")
    assert sorted(path.name for path in (run_folder / "ckpts").iterdir()) == before
    assert run(["info", str(run_folder)]) == 0
    assert "plain_loss" in capsys.readouterr().out
    last = splatcli.Trainer.resume(run_folder, device="cpu", loss=plain_loss).run()
    assert load_checkpoint(last.checkpoint).loss == "plain_loss"
    for (name, mine), (_, other) in zip(last.model.gaussians.items(), whole.model.gaussians.items(), strict=True):
        assert torch.equal(mine, other), name
    # A new run from its model has the standard loss, and says nothing of another.
    assert (
        run(["train", str(ball), *QUICK, "-n", "2", "--init", str(run_folder), "-o", str(tmp_path / "new"), "-q"]) == 0
    )
    assert load_checkpoint(tmp_path / "new" / "ckpts" / "ckpt_000002.pt").loss is None


@NEEDS_COMPILER
def test_a_start_from_a_run_heeds_the_offsets_of_both_scenes(ball: Path, tmp_path: Path) -> None:
    first = splatcli.train(ball, output=tmp_path / "run", **{**TINY, "iterations": 1})
    checkpoint = load_checkpoint(first.checkpoint)
    checkpoint.dataset = dataclasses.replace(checkpoint.dataset, offset=(0.25, -0.5, 0.0))
    save_checkpoint(tmp_path / "far.pt", checkpoint)
    expected = checkpoint.gaussians.means + torch.tensor([0.25, -0.5, 0.0])
    words = ["--init", str(tmp_path / "far.pt"), "-n", "1000", "--stop-at", "1", "-o", str(tmp_path / "new"), "-q"]
    assert run(["train", str(ball), *QUICK, *words]) == 0
    found = load_checkpoint(tmp_path / "new" / "ckpts" / "ckpt_000001.pt").gaussians.means
    assert_close(found, expected, rtol=0.0, atol=0.05)
    for init in (str(tmp_path / "far.pt"), splatcli.Model.load(tmp_path / "far.pt")):
        settings = {name: value for name, value in TINY.items() if name != "init"}
        given = splatcli.Trainer(ball, output=tmp_path / "x", init=init, **settings)._given
        assert given is not None
        assert_close(given.means, expected)


@NEEDS_COMPILER
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_loss_trains_where_gradients_are_off(mode: Any, ball: Path, tmp_path: Path) -> None:
    """Those of the caller's code; the model that it starts from was read there, too."""
    first = splatcli.train(ball, output=tmp_path / "first", iterations=2, **TINY)
    settings = {name: value for name, value in TINY.items() if name not in ("init", "random_points")}
    settings |= {"output": tmp_path / "with", "iterations": 6, "loss": plain_loss}
    with mode():
        done = splatcli.train(ball, init=splatcli.Model.load(first.path), **settings)
    expected = splatcli.train(ball, init=splatcli.Model.load(first.path), **settings | {"output": tmp_path / "without"})
    for name, tensor in done.model.gaussians.items():
        assert torch.equal(tensor, dict(expected.model.gaussians.items())[name]), name


@NEEDS_COMPILER
@pytest.mark.parametrize("result", [1.0, torch.zeros(2, requires_grad=True), torch.zeros(())])
def test_a_loss_has_to_be_a_scalar_with_a_gradient(ball: Path, tmp_path: Path, result: object) -> None:
    with pytest.raises(UsageError, match=r"loss\(image, target, counts\): the loss is"):
        splatcli.train(ball, output=tmp_path / "run", iterations=2, loss=lambda *_: result, **TINY)  # type: ignore[arg-type, return-value]
    assert not (tmp_path / "run").exists()


class Doubles:
    """A strategy that clones every Gaussian once, after step 3."""

    absgrad = False

    def collects_stats(self, step: int) -> bool:
        return step <= 3

    def regularisation(self, step: int, means_lr: float) -> Regularisation:
        return Regularisation()

    def refines_at(self, step: int) -> bool:
        return step == 3

    def refine(
        self, step: int, gaussians: Gaussians, stats: DensifyStats, generator: torch.Generator
    ) -> Refinement | None:
        assert float(stats.count.max()) > 0
        rows = torch.arange(len(gaussians), device=gaussians.device)
        fresh = torch.ones(2 * len(rows), dtype=torch.bool, device=rows.device)
        return Refinement(torch.cat([rows, rows]), fresh, cloned=len(rows))


@NEEDS_COMPILER
def test_a_strategy_of_ones_own_needs_no_entry_point(
    ball: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder()
    options = {**TINY, "strategy": Doubles(), "callbacks": [recorder]}
    trainer = splatcli.Trainer(ball, output=tmp_path / "run", iterations=6, **options)
    assert len(trainer.run(stop_at=4).model) == 400
    assert [(event.step, event.cloned, event.num_gaussians) for event in recorder.refined] == [(3, 200, 400)]
    with pytest.raises(UsageError, match="trained with the strategy 'Doubles', which is not here"):
        splatcli.Trainer.resume(tmp_path / "run", device="cpu")
    assert run(["resume", str(tmp_path / "run"), "--device", "cpu", "-q"]) == UsageError.exit_code
    said = " ".join(capsys.readouterr().err.split())
    assert f"splatcli.Trainer.resume({str(tmp_path / 'run')!r}, strategy=...)" in said
    with pytest.raises(UsageError, match=r"strategy\.name was Doubles, is mcmc"):
        splatcli.Trainer.resume(tmp_path / "run", device="cpu", strategy="mcmc")
    again = splatcli.Trainer.resume(tmp_path / "run", device="cpu", strategy=Doubles())
    assert len(again.run().model) == 400


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda rows: Refinement(rows + 1, rows < 0), r"source has rows 1 to 200 of 200"),
        (lambda rows: Refinement(rows, rows < 0, {"scales": rows}), r"values has no group 'scales'"),
        (lambda rows: rows, r"type is Tensor"),
    ],
)
def test_a_refinement_that_does_not_fit_is_refused_with_the_class_that_made_it(
    ball: Path, tmp_path: Path, changed: Callable[[torch.Tensor], Any], said: str
) -> None:
    class Misfit(Doubles):
        def refine(self, step: int, gaussians: Gaussians, *rest: Any) -> Any:
            return changed(torch.arange(len(gaussians)))

    trainer = splatcli.Trainer(ball, output=tmp_path / "run", iterations=6, strategy=Misfit(), **TINY)
    with pytest.raises(UsageError, match=r"Misfit\.refine\(\) returned a refinement whose " + said):
        trainer.run()


class Weighted(AdcStrategy):
    """That of splat, with gradients times ``factor``."""

    absgrad = True
    factor = 1.0

    def refine(
        self, step: int, gaussians: Gaussians, stats: DensifyStats, generator: torch.Generator
    ) -> Refinement | None:
        weighted = dataclasses.replace(stats, grad2d=stats.grad2d * self.factor)
        return super().refine(step, gaussians, weighted, generator)


class Bolder(Weighted):
    factor = 100.0


@NEEDS_COMPILER
def test_a_strategy_is_made_of_the_settings_of_the_run(ball: Path, tmp_path: Path) -> None:
    """A subclass of splat's own trains to its bits, and one with another rule heeds the cap."""
    options: dict[str, Any] = {**TINY, "iterations": 40, "refine_every": 4, "refine_start": 2}
    same: dict[str, Any] = {**options, "long_axis_split": True, "grow_grad2d": 3e-4}
    plain = splatcli.train(ball, output=tmp_path / "plain", **options)
    own = splatcli.train(ball, output=tmp_path / "own", strategy=Weighted, **same)
    assert len(own.model) > 200
    for (name, tensor), (_, expected) in zip(own.model.gaussians.items(), plain.model.gaussians.items(), strict=True):
        assert torch.equal(tensor, expected), name
    bold = splatcli.Trainer(ball, output=tmp_path / "bold", strategy=Bolder, cap_max=300, **same)
    bold.run(stop_at=20)
    done = splatcli.Trainer.resume(tmp_path / "bold", device="cpu", strategy=Bolder).run()
    assert len(own.model) != len(done.model) == 300
    assert load_checkpoint(done.checkpoint).config.strategy.name == "Bolder"


@NEEDS_COMPILER
def test_what_a_function_makes_has_to_be_a_strategy(ball: Path, tmp_path: Path) -> None:
    made = []

    def make(config: Any, extent: float) -> Any:
        made.append((config.strategy.name, config.train.iterations, extent))
        return object()

    trainer = splatcli.Trainer(ball, output=tmp_path / "run", strategy=make, iterations=6, **TINY)
    with pytest.raises(UsageError, match="object lacks a method of a strategy: absgrad"):
        trainer.run()
    assert made == [("make", 6, trainer.scene.extent)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"iterationz": 3}, "no setting 'iterationz'"),
        ({"iterations": -3}, "iterations = -3: expected a number"),
        ({"callbacks": [object()]}, "has no hook"),
        ({"strategy": object()}, "lacks a method of a strategy: absgrad, collects_stats, regularisation, refines_at"),
        ({"strategy": "no-such"}, r"there is no such strategy\n  help: one of absgrad, adc, mcmc;"),
        ({"strategy": "MCMC"}, r"did you mean mcmc\?"),
        ({"blocks": "2x2"}, "blocks are trained by splat train"),
        ({"loss": plain_loss, "batch_size": 2}, "one view a step"),
        ({"loss": plain_loss, "budget": "1GiB"}, "budget: a loss of one's own takes memory that is not known"),
        ({"device": "tpu"}, "is no device"),
        (
            {"strategy": Doubles},
            r"Doubles cannot be called with a run's settings.*\n  help: .*extent: Doubles\(\.\.\.\)",
        ),
        ({"strategy": lambda config: None}, "<lambda> cannot be called with a run's settings"),
        ({"init": random_gaussians(3).map(torch.Tensor.log)}, r"init: \w+ has \d+ NaN or infinite values"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    ball: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        splatcli.Trainer(ball, output=tmp_path / "run", **{**TINY, **options})
    assert not (tmp_path / "run").exists()


@NEEDS_COMPILER
def test_a_run_starts_from_a_model(ball: Path, tmp_path: Path, trained: Path) -> None:
    model = splatcli.Model.load(trained)
    options = {**TINY, "init": model, "refine_every": 100}
    done = splatcli.train(ball, output=tmp_path / "run", iterations=1, **options)
    assert len(done.model) == len(model)
    assert_close(done.model.gaussians.means, model.gaussians.means, rtol=0, atol=0.05)


@NEEDS_COMPILER
def test_an_open_scene_gets_another_background_and_stays_as_it_is(
    ball: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ball.parent)
    scene = splatcli.Scene.open(ball.name, resolution=2)
    monkeypatch.chdir("/")
    with pytest.raises(UsageError, match="open already"):
        splatcli.Trainer(scene, output=tmp_path / "run", test_every=4, **TINY)
    scene.train = scene.train[:3]
    xyz = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    scene.points = PointCloud(xyz, np.full((50, 3), 128, np.uint8))
    trainer = splatcli.Trainer(scene, output=tmp_path / "run", background="white", **{**TINY, "init": "sfm"})
    assert trainer.scene.images.background == (255, 255, 255)
    assert trainer.scene.cameras[0].width == scene.cameras[0].width
    assert trainer.config.data.resolution == 2
    assert trainer.scene.train == scene.train  # what the program has changed of the scene stays
    assert len(trainer.run(1).model) == 50
    random = splatcli.Trainer(scene, output=tmp_path / "random", background="random", **TINY)
    assert (random.scene.images.background, random.scene.points) == (None, scene.points)


def test_a_scene_without_points_is_said_to_start_at_random_ones(
    ball: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {key: value for key, value in TINY.items() if key != "init"}
    splatcli.Trainer(ball, output=tmp_path / "run", **TINY)
    splatcli.Trainer(add_points(write_scene(tmp_path / "points")), output=tmp_path / "run", **options)
    assert caplog.messages == []
    trainer = splatcli.Trainer(ball, output=tmp_path / "run", **options)
    assert trainer.config.model.init == "random"
    (said,) = caplog.messages
    assert f"splat sfm {ball} --cameras {ball}" in said


def test_the_package_of_training_can_be_called_whatever_was_imported_first() -> None:
    code = "import splatcli.train.trainer, splatcli, inspect; assert callable(splatcli.train)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_trainers_without_a_name_get_a_folder_each(ball: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainers = [splatcli.Trainer(ball, iterations=3, **TINY) for _ in range(3)]
    with RunDir.create(Path("output") / ball.name):  # held by a program that has started at once
        runs = [trainer.run() for trainer in trainers]
    assert [run.path for run in runs] == [tmp_path / "output" / f"{ball.name}-{number}" for number in (2, 3, 4)]
    assert [trainer.output for trainer in trainers] == [run.path for run in runs]


@NEEDS_COMPILER
def test_ctrl_c_saves_and_another_call_continues(ball: Path, tmp_path: Path) -> None:
    presses: list[int] = []

    def loss(image: torch.Tensor, target: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
        if presses and trainer.step == presses[0]:
            presses.pop(0)
            signal.raise_signal(signal.SIGINT)
        return plain_loss(image, target, counts)

    options: dict[str, Any] = {"iterations": 20, "loss": loss, **TINY}
    trainer = splatcli.Trainer(ball, output=tmp_path / "whole", **options)
    whole = trainer.run()
    before = signal.getsignal(signal.SIGINT)
    presses += [6, 9]
    trainer = splatcli.Trainer(ball, output=tmp_path / "run", **options)
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert signal.getsignal(signal.SIGINT) is before
    assert splatcli.Model.load(tmp_path / "run").step == 7

    async def program() -> None:
        handler = signal.getsignal(signal.SIGINT)
        try:
            trainer.run()
        finally:
            assert signal.getsignal(signal.SIGINT) is handler

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(program())
    assert splatcli.Model.load(tmp_path / "run").step == 10
    assert signal.getsignal(signal.SIGINT) is before
    done = trainer.run()
    assert (done.step, done.reason) == (20, "finished")
    for (name, mine), (_, other) in zip(done.model.gaussians.items(), whole.model.gaussians.items(), strict=True):
        assert torch.equal(mine, other), name


@NEEDS_COMPILER
def test_after_an_error_of_a_loss_another_call_continues_from_the_last_checkpoint(ball: Path, tmp_path: Path) -> None:
    steps = {"left": 12}

    def loss(image: torch.Tensor, target: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
        steps["left"] -= 1
        if steps["left"] == 0:
            raise ZeroDivisionError
        return plain_loss(image, target, counts)

    options: dict[str, Any] = {"iterations": 20, "loss": loss, "save.steps": (10,), **TINY}
    trainer = splatcli.Trainer(ball, output=tmp_path / "run", **options)
    with pytest.raises(ZeroDivisionError):
        trainer.run()
    assert splatcli.Model.load(tmp_path / "run").step == 10
    assert trainer.run().step == 20
    steps["left"] = 1
    early = splatcli.Trainer(ball, output=tmp_path / "early", **options)
    with pytest.raises(ZeroDivisionError):
        early.run()
    assert early.run().step == 20


@NEEDS_COMPILER
def test_a_run_is_not_started_from_its_own_callback(ball: Path, tmp_path: Path) -> None:
    class Again:
        def on_step(self, event: Stepped) -> None:
            trainer.run()

    trainer = splatcli.Trainer(ball, output=tmp_path / "run", iterations=5, callbacks=[Again()], **TINY)
    with pytest.raises(UsageError, match="under way"):
        trainer.run()


@NEEDS_COMPILER
def test_metrics_are_those_of_the_last_evaluation_of_any_call(ball: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = splatcli.Trainer(ball, output=tmp_path / "run", iterations=20, eval_every=5, callbacks=[recorder], **TINY)
    assert trainer.run(stop_at=3).metrics == {}
    assert trainer.run(stop_at=6).metrics["step"] == 5
    assert trainer.run(stop_at=7).metrics["psnr"] == recorder.scores[0].psnr


def test_gaussians_are_compared_as_objects_and_say_what_they_are() -> None:
    gaussians = random_gaussians(20, 1)
    other = copy.deepcopy(gaussians)
    assert gaussians == gaussians
    assert gaussians != other
    assert gaussians in [other, gaussians]
    assert repr(other) == "<Gaussians: 20, SH degree 1, torch.float32, cpu>"


def test_scenes_cameras_and_models_can_be_pickled_and_copied(tmp_path: Path) -> None:
    scene = splatcli.Scene.open(write_scene(tmp_path / "ball"))
    pixels = scene.images.image(3).pixels
    for other in (pickle.loads(pickle.dumps(scene)), copy.deepcopy(scene)):
        assert repr(other) == repr(scene)
        assert other.data == scene.data
        assert np.array_equal(other.images.image(3).pixels, pixels)
        assert other.images.max_bytes() == scene.images.max_bytes()
    model = splatcli.Model(random_gaussians(20, 1), cameras=tuple(scene.cameras))
    image = model.render(scene.cameras[0]).image
    for same in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(same.render(same.cameras[0]).image, image)


def test_a_pickled_camera_of_an_older_version_has_the_near_plane_and_the_model_of_then() -> None:
    camera = dataclasses.replace(ring_cameras(1)[0], near=0.5, model="ortho")
    for made in (pickle.loads(pickle.dumps(camera)), copy.copy(camera)):
        assert (made.near, made.model) == (0.5, "ortho")
    fields = [getattr(camera, field.name) for field in dataclasses.fields(camera)]
    for missing, near in ((2, 0.01), (1, 0.5)):
        old = splatcli.Camera.__new__(splatcli.Camera)
        old.__setstate__(fields[:-missing])
        assert (old.name, old.near, old.model) == (camera.name, near, "pinhole")
        assert np.array_equal(old.viewmat, camera.viewmat)
    with pytest.raises(ValueError, match="no camera model 'equirect'; there are pinhole, ortho, fisheye"):
        dataclasses.replace(camera, model="equirect")  # type: ignore[arg-type]


def test_gaussians_of_other_kinds_are_exported_and_trained_on(ball: Path, tmp_path: Path) -> None:
    single = random_gaussians(20, 1)
    splatcli.Model(single).export(tmp_path / "single.ply")
    for name, other in (
        ("double", single.map(lambda tensor: tensor.double().requires_grad_())),
        ("strided", single.map(lambda tensor: tensor.repeat_interleave(2, 0)[::2])),
    ):
        splatcli.Model(other).export(tmp_path / f"{name}.ply")
        assert (tmp_path / f"{name}.ply").read_bytes() == (tmp_path / "single.ply").read_bytes()
    half = single.map(lambda tensor: tensor.half())
    splatcli.Model(half).export(tmp_path / "half.ply")
    assert torch.equal(splatcli.Model.load(tmp_path / "half.ply").gaussians.means, half.means.float())
    run = splatcli.train(ball, output=tmp_path / "run", **{**TINY, "init": half, "iterations": 2})
    assert run.model.gaussians.means.dtype == torch.float32


@pytest.mark.parametrize("end", ["sog", "spz", "splat", "glb", "usdz", "html", "compressed.ply"])
def test_an_empty_model_is_exported_as_a_ply_alone(tmp_path: Path, end: str) -> None:
    empty = splatcli.Model(random_gaussians(0))
    empty.export(tmp_path / "empty.ply")
    assert len(splatcli.Model.load(tmp_path / "empty.ply")) == 0
    with pytest.raises(UsageError, match="only a PLY"):
        empty.export(tmp_path / f"empty.{end}")


def test_objects_of_another_kind_are_named() -> None:
    model, camera = splatcli.Model(random_gaussians(3)), ring_cameras(1)[0]
    with pytest.raises(UsageError, match="other cannot be 'scene/'"):
        model.compare("scene/")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="'gpu' is no device"):
        model.to("gpu")
    assert model.to("auto").to(torch.device("cpu:0")).gaussians.device == torch.device("cpu")
    with pytest.raises(TypeError, match=r"means is a ndarray, not a torch\.Tensor"):
        dataclasses.replace(model.gaussians, means=model.gaussians.means.numpy())
    with pytest.raises(ValueError, match=r"means has shape \(\)"):
        dataclasses.replace(model.gaussians, means=torch.tensor(0.0))
    with pytest.raises(UsageError, match=r"size cannot be \(8, 8\.0\)"):
        model.render(camera, size=(8, 8.0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not a pair"):
        render(model.gaussians, camera, z_range=(1.0,))  # type: ignore[arg-type]


@NEEDS_COMPILER
def test_a_camera_has_the_matrices_that_gsplat_takes() -> None:
    scene = splatcli.Scene.open(COURTYARD, resolution=4)
    assert scene.points is not None
    camera, gaussians = scene.cameras[0], random_gaussians(30, 1)
    assert camera.K.shape == (3, 3)
    assert_close(camera.camtoworld @ camera.viewmat, np.eye(4), rtol=0, atol=1e-12)
    inside = scene.points.xyz @ camera.viewmat[:3, :3].T + camera.viewmat[:3, 3]
    x, y, z = camera.project(scene.points.xyz)
    pixels = inside @ camera.K.T
    assert_close((pixels[:, :2] / pixels[:, 2:])[z > 0], np.stack([x, y], axis=1)[z > 0], rtol=1e-6, atol=1e-6)
    images, _, _ = splatcli.rasterization(
        gaussians.means,
        gaussians.quats,
        gaussians.log_scales.exp(),
        gaussians.logit_opacities.sigmoid(),
        torch.cat([gaussians.sh0[:, None], gaussians.shN], dim=1),
        torch.tensor(camera.viewmat, dtype=torch.float32)[None],
        torch.tensor(camera.K, dtype=torch.float32)[None],
        camera.width,
        camera.height,
        near_plane=camera.near,
        sh_degree=gaussians.sh_degree,
    )
    assert_close(images[0], splatcli.Model(gaussians).render(camera).image, rtol=0, atol=1e-4)


def test_a_camera_takes_a_pose_of_any_kind() -> None:
    model, camera = splatcli.Model(random_gaussians(30)), ring_cameras(1)[0]
    image = model.render(camera).image
    for pose in (camera.viewmat.tolist(), torch.from_numpy(camera.viewmat), np.asfortranarray(camera.viewmat)):
        other = dataclasses.replace(camera, viewmat=pose)
        assert (type(other.viewmat), other.viewmat.dtype) == (np.ndarray, np.float64)
        assert torch.equal(model.render(other).image, image)


def test_a_trainer_takes_a_device_of_torch_and_no_loss_that_is_not_called(ball: Path, tmp_path: Path) -> None:
    trainer = splatcli.Trainer(ball, output=tmp_path / "run", device=torch.device("cpu"))
    assert trainer.device == "cpu"
    with pytest.raises(UsageError, match="'l1' cannot be called"):
        splatcli.Trainer(ball, output=tmp_path / "run", loss="l1")  # type: ignore[arg-type]


def wants_scales(image: torch.Tensor, target: torch.Tensor, counts: Any, *, scales: torch.Tensor) -> torch.Tensor:
    return image.sum() + scales.sum()


@pytest.mark.parametrize(
    "loss", [torch.nn.MSELoss(), torch.nn.functional.tanh, lambda image, target: image.sum(), wants_scales]
)
def test_a_loss_takes_image_target_and_counts(ball: Path, tmp_path: Path, loss: Any) -> None:
    """Another function, such as a loss of torch, is refused before the run has a folder."""
    with pytest.raises(UsageError, match="cannot be called with image, target and counts") as caught:
        splatcli.Trainer(ball, output=tmp_path / "run", loss=loss)
    assert "gaussians, alpha, depth, camera" in str(caught.value.remedy)
    assert not (tmp_path / "run").exists()


def test_a_pose_that_no_camera_has_is_refused() -> None:
    one = ("a", 8, 6, 5.0, 5.0, 4.0, 3.0)
    with pytest.raises(ValueError, match=r"requires a gradient.*render\(gaussians, camera, viewmat=pose\)"):
        splatcli.Camera(*one, torch.eye(4, requires_grad=True))
    with pytest.raises(ValueError, match=r"viewmat has shape \(3, 4\), not \(4, 4\)"):
        splatcli.Camera(*one, np.eye(4)[:3])


@NEEDS_COMPILER
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"background": "random", "init": "random"},
        {"dropout": 0.2, "pose_opt": True, "exposure": True},
        {"ppisp": True},
        {"bilateral_grid": True, "strategy": "mcmc"},
    ],
)
def test_a_program_of_doubles_trains_to_the_same_bits(ball: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    single = splatcli.train(ball, output=tmp_path / "single", iterations=20, **{**TINY, **more})
    torch.set_default_dtype(torch.float64)
    try:
        double = splatcli.train(ball, output=tmp_path / "double", iterations=20, **{**TINY, **more})
    finally:
        torch.set_default_dtype(torch.float32)
    for (name, mine), (_, other) in zip(double.model.gaussians.items(), single.model.gaussians.items(), strict=True):
        assert torch.equal(mine, other), name
    assert double.metrics == single.metrics
    views, expected = load_checkpoint(double.checkpoint).views, load_checkpoint(single.checkpoint).views
    assert views.keys() == expected.keys()
    assert not [name for name in views if not torch.equal(views[name], expected[name])]


@NEEDS_COMPILER
def test_a_run_that_diverged_at_once_can_be_started_again(ball: Path, tmp_path: Path) -> None:
    def loss(image: torch.Tensor, target: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
        return plain_loss(image, target, counts) * factor

    factor = float("nan")
    trainer = splatcli.Trainer(ball, output=tmp_path / "run", iterations=3, loss=loss, **TINY)
    with pytest.raises(DivergedError, match=r"check that .*loss\(\) gives finite numbers") as caught:
        trainer.run()
    assert "resume" not in str(caught.value), "nothing is left to resume"
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["diverged_000000.json"]
    factor = 1.0
    assert trainer.run().step == 3


@NEEDS_COMPILER
def test_another_call_keeps_what_a_rollback_changed(ball: Path, tmp_path: Path) -> None:
    calls: list[int] = []

    def loss(image: torch.Tensor, target: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 25:
            raise ZeroDivisionError
        return plain_loss(image, target, counts) * (float("nan") if len(calls) == 8 else 1.0)

    options: dict[str, Any] = {"iterations": 30, "loss": loss, "save.steps": (5,), **TINY}
    trainer = splatcli.Trainer(ball, output=tmp_path / "run", **options)
    before = trainer.config.optim.means_lr
    for stop_at in (10, 12):
        done = trainer.run(stop_at)
        assert load_checkpoint(done.checkpoint).config.optim.means_lr == trainer.config.optim.means_lr == 0.5 * before
    with pytest.raises(ZeroDivisionError):
        trainer.run()
    assert load_checkpoint(trainer.run().checkpoint).config.optim.means_lr == 0.5 * before


@NEEDS_COMPILER
def test_a_rollback_that_fails_leaves_a_clear_error(
    ball: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise MemoryError

    def loss(image: torch.Tensor, target: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
        return plain_loss(image, target, counts) * (float("nan") if trainer.step == 7 and not failed else 1.0)

    failed: list[str] = []
    trainer = splatcli.Trainer(ball, output=tmp_path / "run", iterations=10, loss=loss, **{"save.steps": (5,)}, **TINY)
    with monkeypatch.context() as patch:
        patch.setattr("splatcli.train.recovery.shard_of", full)
        with pytest.raises(ResourceError, match="does not fit either"):
            trainer.run()
    for name in ("step", "model"):
        with pytest.raises(ResourceError, match="no state is left"):
            getattr(trainer, name)
    failed.append("once")
    assert trainer.run().step == trainer.step == 10


@NEEDS_COMPILER
def test_a_default_device_of_torch_is_refused_or_has_no_effect(trained: Path, ball: Path, tmp_path: Path) -> None:
    """As programs for a GPU set it; the meta device stands for one."""
    trainer = splatcli.Trainer(ball, output=tmp_path / "run", iterations=3, **TINY)
    model = splatcli.Model.load(trained)
    for name in ("a.ply", "a.sog", "a.glb"):
        model.export(tmp_path / name)
    torch.set_default_device("meta")
    try:
        for begin in (lambda: splatcli.Trainer(ball, output=tmp_path / "b", **TINY), trainer.run):
            with pytest.raises(UsageError, match=r"set_default_device.*'meta'"):
                begin()
        again = splatcli.Model.load(trained)
        for name in ("a.ply", "a.sog", "a.glb"):
            again.export(tmp_path / f"b{name}")
        shown = again.render(again.cameras[0]).image
    finally:
        torch.set_default_device("cpu")
    assert torch.equal(shown, model.render(model.cameras[0]).image)
    for name in ("a.ply", "a.sog", "a.glb"):
        assert (tmp_path / f"b{name}").read_bytes() == (tmp_path / name).read_bytes(), name
    assert trainer.run().step == 3


@NEEDS_COMPILER
def test_arguments_of_another_type_are_named(trained: Path, ball: Path, tmp_path: Path) -> None:
    model, wrong = splatcli.Model.load(trained), np.zeros((1, 3, 16, 16), np.float32)
    with pytest.raises(UsageError, match="init is a int"):
        splatcli.Trainer(ball, output=tmp_path / "run", init=5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="crop is a tuple"):
        model.export(tmp_path / "a.ply", crop=(0, 0, 0, 1, 1, 1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="background is a list"):
        render(model.gaussians, model.cameras[0], background=[1.0, 1.0, 1.0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="viewmat is a ndarray, not"):
        render(model.gaussians, model.cameras[0], viewmat=np.eye(4))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="gaussians is a Model, not Gaussians, such as those of a model"):
        render(model, model.cameras[0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"filter_3d has shape \(3,\), not \({len(model)},\)"):
        render(model.gaussians, model.cameras[0], filter_3d=torch.zeros(3))
    with pytest.raises(TypeError, match="img2 is a ndarray"):
        splatcli.fused_ssim(torch.from_numpy(wrong), wrong)  # type: ignore[arg-type]


@NEEDS_COMPILER
def test_what_the_engine_cannot_take_is_a_usage_error(trained: Path, ball: Path, tmp_path: Path) -> None:
    model = splatcli.Model.load(trained)
    camera, trainer = model.cameras[0], splatcli.Trainer(ball, output=tmp_path / "run", iterations=3, **TINY)
    degree = model.gaussians.sh_degree
    calls: dict[str, Any] = {
        "camera cannot be": lambda: model.render(model.cameras),  # type: ignore[arg-type]
        "size cannot be 64": lambda: model.render(camera, size=64),  # type: ignore[arg-type]
        "size cannot be '64x48'": lambda: model.render(camera, size="64x48"),  # type: ignore[arg-type]
        r"size cannot be \(0, 0\)": lambda: model.render(camera, size=(0, 0)),
        f"sh_degree cannot be {degree + 1}": lambda: model.render(camera, sh_degree=degree + 1),
        "sh_degree cannot be '2'": lambda: model.render(camera, sh_degree="2"),  # type: ignore[arg-type]
        "antialiased cannot be 'yes'": lambda: model.render(camera, antialiased="yes"),  # type: ignore[arg-type]
        r"background cannot be \(255, 255, 255\)": lambda: model.render(camera, background=(255, 255, 255)),
        r"background cannot be \(nan": lambda: model.render(camera, background=(math.nan, 0.0, 0.0)),
        r"background cannot be \(1, 1\)": lambda: model.render(camera, background=(1, 1)),  # type: ignore[arg-type]
        "gaussians cannot be None": lambda: splatcli.Model(None),  # type: ignore[arg-type]
        "the path cannot be None": lambda: splatcli.Model.load(None),  # type: ignore[arg-type]
        "other cannot be a Gaussians": lambda: model.compare(model.gaussians),  # type: ignore[arg-type]
        "cameras cannot be a Camera": lambda: model.compare(model, cameras=camera),  # type: ignore[arg-type]
        "one of cameras cannot be 0": lambda: model.compare(model, cameras=[0]),  # type: ignore[list-item]
        "Model.export.*the path cannot be None": lambda: model.export(None),  # type: ignore[arg-type]
        "format cannot be 5": lambda: model.export("x", format=5),  # type: ignore[arg-type]
        r"there is no SH degree 1\.0": lambda: model.export("x.ply", sh_degree=1.0),  # type: ignore[arg-type]
        "'x' is no opacity": lambda: model.export("x.ply", min_opacity="x"),  # type: ignore[arg-type]
        "'meta' is no device": lambda: model.to(torch.device("meta")),
        "'0' is no device": lambda: splatcli.Model.load(trained, device=0),  # type: ignore[arg-type]
        "Scene.open.*the path is empty": lambda: splatcli.Scene.open(""),
        "Scene.open.*the path cannot be None": lambda: splatcli.Scene.open(None),  # type: ignore[arg-type]
        "scene: the path cannot be a Model": lambda: splatcli.Trainer(model),  # type: ignore[arg-type]
        "the path cannot be 3": lambda: splatcli.Trainer(ball, output=3),  # type: ignore[arg-type]
        "callbacks cannot be": lambda: splatcli.Trainer(ball, callbacks=None, **TINY),  # type: ignore[arg-type]
        "stop_at cannot be 'x'": lambda: trainer.run(stop_at="x"),  # type: ignore[arg-type]
        "stop_at cannot be 1.5": lambda: trainer.run(stop_at=1.5),  # type: ignore[arg-type]
        "cannot tell a format from 'x.json'": lambda: model.export("x.json"),
    }
    for said, call in calls.items():
        with pytest.raises(UsageError, match=said) as caught:
            call()
        assert caught.value.remedy is not None
        assert "--" not in caught.value.remedy
        assert ".json" not in caught.value.remedy
    assert model.render(camera, background=torch.ones(3), size=(np.int64(8), 6)).image.shape == (6, 8, 3)  # type: ignore[arg-type]


def test_a_file_of_an_antialiased_model_is_rendered_and_exported_so(tmp_path: Path) -> None:
    model = splatcli.Model(random_gaussians(5), settings=RenderSettings(antialiased=True))
    model.export(tmp_path / "x.spz")
    again = splatcli.Model.load(tmp_path / "x.spz")
    assert again.settings.antialiased
    again.export(tmp_path / "y.ply")
    assert splatcli.Model.load(tmp_path / "y.ply").settings.antialiased
