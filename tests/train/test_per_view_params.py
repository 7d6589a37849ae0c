"""Poses and exposures that are trained along: what they repair, and that they are resumed in every bit."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from splatcli.checkpoint.file import load_checkpoint, save_checkpoint
from splatcli.checkpoint.run_dir import RunDir
from splatcli.checkpoint.schema import VIEW_TABLES
from splatcli.config import COLOUR_MAPS, Config, ViewsConfig, build_config
from splatcli.errors import ModelFileError, SplatError, UsageError
from splatcli.gaussians import Gaussians
from splatcli.rasterizer import AsyncEngine, NativeEngine, render
from splatcli.rasterizer.bilateral_grid import identity_grid, variation_gradient
from splatcli.rasterizer.reference_engine import ReferenceEngine, recolour_reference
from splatcli.rasterizer.step_inputs import StepEngine
from splatcli.render.images import RenderSettings, render_pixels
from splatcli.scene.camera import Camera, apply_pose_delta
from splatcli.scene.points import PointCloud
from splatcli.scene.scene import Scene
from splatcli.train.changed_settings import changed_config
from splatcli.train.events import Evaluated, Probed, Stepped
from splatcli.train.per_view_params import PerViewParams, ViewRates, ViewTable, trained_tables
from splatcli.train.trainer import Trainer
from tests.kernels.simt import simulated
from tests.native.cases import NEEDS_COMPILER, float32
from tests.rasterizer.scenes import look_from, random_gaussians
from tests.train.test_async_engines import AsyncPlainEngine
from tests.train.worlds import MadeImages, MadeScene, MemoryRun, PlainEngine, made_scene, plain_renderer, short_config

VIEWS, SIZE = 15, 64
#: Every fifth view is held out.
TRAIN, TEST = [i for i in range(VIEWS) if i % 5], [i for i in range(VIEWS) if i % 5 == 0]


def around(count: int, size: int) -> list[Camera]:
    """Cameras all round the origin at several heights."""
    cameras = []
    for i in range(count):
        angle, height = 2.0 * np.pi * i / count, (-0.8, 0.5, 1.1)[i % 3]
        viewmat = look_from([2.2 * np.sin(angle), height, -2.2 * np.cos(angle)], [0.0, 0.0, 0.0])
        cameras.append(Camera(f"view_{i:02d}.png", size, size, 0.6 * size, 0.6 * size, size / 2, size / 2, viewmat))
    return cameras


def truth() -> Gaussians:
    """Opaque coloured blobs, none of them very bright."""
    gaussians = random_gaussians(5, 120, sh_degree=0, spread=1.0, scale=0.12)
    return replace(
        gaussians, logit_opacities=gaussians.logit_opacities.abs() + 1.0, sh0=1.2 * gaussians.sh0.clamp(-1.8, 1.8) - 0.6
    )


def photographed(cameras: list[Camera], gains: NDArray[np.float64] | None = None) -> list[NDArray[np.uint8]]:
    """The photos [H, W, 3] of truth(), each times its gains [3]."""
    photos = []
    for i, camera in enumerate(cameras):
        image = render(truth(), camera, backend=float32("portable")).image.numpy()
        image = image if gains is None else image * gains[i]
        photos.append((image.clip(0.0, 1.0) * 255.0).round().astype(np.uint8))
    return photos


def shaded(photos: list[NDArray[np.uint8]], seed: int = 3) -> list[NDArray[np.uint8]]:
    """Training photos with a slope of brightness across them, each in a direction and with a tint of its own."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[-1.0 : 1.0 : SIZE * 1j, -1.0 : 1.0 : SIZE * 1j]
    result = list(photos)
    for i in TRAIN:
        angle = random.uniform(0.0, 2.0 * np.pi)
        tint = 0.45 + 0.1 * random.uniform(-1.0, 1.0, 3)
        gain = 1.0 + (np.cos(angle) * x + np.sin(angle) * y)[..., None] / np.sqrt(2.0) * tint
        result[i] = (photos[i] * gain).clip(0.0, 255.0).round().astype(np.uint8)
    return result


def scene_with_cameras(cameras: list[Camera], photos: list[NDArray[np.uint8]]) -> Scene:
    gaussians = truth()
    colors = ((0.5 + 0.2820948 * gaussians.sh0).clamp(0.0, 1.0) * 255.0).to(torch.uint8)
    return MadeScene(
        root=Path("/nowhere"),
        kind="colmap",
        cameras=cameras,
        images=MadeImages(photos),  # type: ignore[arg-type]
        points=PointCloud(gaussians.means.numpy(), colors.numpy()),
        train=TRAIN,
        test=TEST,
        notes=[],
    )


def trained(scene: Scene, steps: int, given: Gaussians | None = None, **views: object) -> tuple[Trainer, float, float]:
    """The trainer after a run without density control, the mean loss of its last 60 steps, and the held-out PSNR.

    given: what to start from instead of the scene's points.
    """
    config = Config.model_validate(
        {
            "model": {"sh_degree": 0},
            "schedule": {"refine_start": steps, "refine_stop": steps, "reset_every": 10 * steps, "lr_steps": steps},
            "train": {"iterations": steps, "dropout": 0.0, "alpha_lambda": 0.0},  # truth() is translucent
            "save": {"steps": ()},
            "views": views,
        }
    )
    engine = NativeEngine(float32("portable"))
    trainer = Trainer.start(config, scene, run_dir=MemoryRun(), engine=engine, init_model=given)  # type: ignore[arg-type]
    events = list(trainer.run())
    losses = [event.loss for event in events if isinstance(event, Stepped)]
    (score,) = [event for event in events if isinstance(event, Evaluated)]
    return trainer, sum(losses[-60:]) / 60, score.psnr


def pose_errors(cameras: list[Camera], true: list[Camera]) -> NDArray[np.float64]:
    """[2]: degrees and world units, means over the training views."""
    errors = []
    for i in TRAIN:
        turn = Rotation.from_matrix(cameras[i].viewmat[:3, :3] @ true[i].viewmat[:3, :3].T)
        errors.append((np.degrees(turn.magnitude()), float(np.linalg.norm(cameras[i].center - true[i].center))))
    return np.mean(errors, axis=0)


def misplaced(cameras: list[Camera], extent: float) -> list[Camera]:
    """Training cameras turned by one degree and shifted by a hundredth of the extent, each its own way."""
    random = np.random.default_rng(1)

    def off(camera: Camera) -> Camera:
        turn, shift = random.normal(size=(2, 3))
        turn *= np.radians(1.0) / np.linalg.norm(turn)
        return apply_pose_delta(camera, np.concatenate([turn, 0.01 * extent * shift / np.linalg.norm(shift)]))

    return [off(camera) if i in TRAIN else camera for i, camera in enumerate(cameras)]


@NEEDS_COMPILER
def test_poses_that_are_off_come_back_to_a_model_that_is_right() -> None:
    true = around(VIEWS, SIZE)
    photos = photographed(true)
    wrong = misplaced(true, scene_with_cameras(true, photos).extent)
    before = pose_errors(wrong, true)
    assert before == pytest.approx([1.0, 0.01 * scene_with_cameras(true, photos).extent], rel=1e-3)
    _, loss, psnr = trained(scene_with_cameras(wrong, photos), 900, truth())
    refined, refined_loss, refined_psnr = trained(
        scene_with_cameras(wrong, photos), 900, truth(), pose_opt=True, pose_start=0.0, pose_lr=1e-3, pose_lr_final=1e-4
    )
    checkpoint = refined.state.to_checkpoint()
    after = pose_errors(checkpoint.refined_cameras(), true)
    assert (after < 0.5 * before).all(), after
    assert refined_loss < 0.5 * loss
    assert refined_psnr > psnr + 3.0
    # What the scene gave is kept, and held-out views stay where they are.
    assert all(camera is given for camera, given in zip(checkpoint.cameras, wrong, strict=True))
    assert all(checkpoint.refined_cameras()[i] is true[i] for i in TEST)


@NEEDS_COMPILER
def test_refined_poses_help_a_model_that_is_made_at_the_same_time() -> None:
    """From points, with the settings' own rates."""
    true = around(VIEWS, SIZE)
    photos = photographed(true)
    wrong = misplaced(true, scene_with_cameras(true, photos).extent)
    _, loss, psnr = trained(scene_with_cameras(wrong, photos), 900)
    refined, refined_loss, refined_psnr = trained(scene_with_cameras(wrong, photos), 900, pose_opt=True)
    after = pose_errors(refined.state.to_checkpoint().refined_cameras(), true)
    assert after[0] < 0.85
    assert refined_loss < 0.9 * loss
    assert refined_psnr > psnr + 0.2


@NEEDS_COMPILER
def test_exposure_repairs_photos_of_other_brightness_and_tint() -> None:
    cameras = around(VIEWS, SIZE)
    random = np.random.default_rng(2)
    gains = np.exp(0.25 * random.normal(size=(VIEWS, 1)) + 0.08 * random.normal(size=(VIEWS, 3)))
    gains[TRAIN] /= gains[TRAIN].mean(axis=0)
    gains[TEST] = 1.0
    assert gains.max() > 1.3
    assert gains.min() < 0.75
    scene = scene_with_cameras(cameras, photographed(cameras, gains))
    _, loss, psnr = trained(scene, 900)
    exposed, exposed_loss, exposed_psnr = trained(scene, 900, exposure=True)
    assert exposed_psnr > psnr + 1.0
    assert exposed_loss < 0.85 * loss
    # It is the gains that were found, all but a factor that all views share.
    table = exposed.state.per_view_params.exposure
    assert table is not None
    grey = table.values[:, :, :3].sum(dim=(1, 2)).numpy()
    assert np.corrcoef(grey, gains[TRAIN].sum(axis=1))[0, 1] > 0.9


@NEEDS_COMPILER
def test_a_bilateral_grid_repairs_what_varies_over_a_photo_and_an_exposure_does_not() -> None:
    """With a model that is right: without a grid it takes on what is wrong with the photos."""
    cameras = around(VIEWS, SIZE)
    scene = scene_with_cameras(cameras, shaded(photographed(cameras)))
    _, loss, psnr = trained(scene, 400, truth())
    _, _, exposed = trained(scene, 400, truth(), exposure=True)
    gridded, gridded_loss, gridded_psnr = trained(scene, 400, truth(), bilateral_grid=True, bilateral_grid_lr=5e-3)
    assert gridded_psnr > max(psnr, exposed) + 2.5
    assert gridded_loss < 0.5 * loss
    assert gridded.state.per_view_params.bilateral_grid is not None
    # The probe sees training views through their grids.
    shown = gridded.scorer.probe(gridded.state)
    assert isinstance(shown, Probed)
    assert shown.psnr > psnr


def developed(photos: list[NDArray[np.uint8]], seed: int = 4) -> list[NDArray[np.uint8]]:
    """The photos of a camera with a vignette and a response, whose training photos have an exposure each."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[-0.5 : 0.5 : SIZE * 1j, -0.5 : 0.5 : SIZE * 1j]
    falloff = 1.0 - 0.9 * (x * x + y * y)
    stops = 0.35 * random.normal(size=VIEWS)
    stops[TRAIN] -= stops[TRAIN].mean()
    stops[TEST] = 0.0
    result = []
    for photo, stop in zip(photos, stops, strict=True):
        light = photo / 255.0 * falloff[..., None] * 2.0**stop
        result.append((light.clip(0.0, 1.0) ** 0.7 * 255.0).round().astype(np.uint8))
    return result


@NEEDS_COMPILER
def test_ppisp_finds_exposures_a_vignette_and_a_response_and_an_exposure_does_not() -> None:
    """With a model that is right; held-out views are seen through the camera that training views have taught."""
    cameras = around(VIEWS, SIZE)
    scene = scene_with_cameras(cameras, developed(photographed(cameras)))
    exposed = trained(scene, 400, truth(), exposure=True)[2]
    trainer, _, psnr = trained(scene, 400, truth(), ppisp=True, ppisp_lr=2e-2, ppisp_lr_final=5e-3)
    assert psnr > exposed + 2.0
    table = trainer.state.per_view_params.ppisp_camera
    assert table is not None
    assert len(table.values) == 1  # all views are of one camera
    vignetting = table.values[0, :15].view(3, 5)
    assert bool((vignetting[:, 2] < -0.05).all())  # darker from the middle on
    # A checkpoint's renders are through the camera, as evaluation is.
    checkpoint = trainer.state.to_checkpoint()
    settings = RenderSettings.trained(checkpoint)
    shown = render_pixels(checkpoint.gaussians, cameras[0], settings)
    plain = render_pixels(checkpoint.gaussians, cameras[0], replace(settings, recolour=None))
    truth_of = scene.images.image(0).pixels
    assert np.square(shown / 255.0 - truth_of / 255.0).mean() < 0.3 * np.square(plain / 255.0 - truth_of / 255.0).mean()


BOTH = {"pose_opt": True, "exposure": True}
PPISP = {"pose_opt": True, "ppisp": True}
GRIDDED = {"pose_opt": True, "bilateral_grid": True}


def tables(state: object) -> dict[str, torch.Tensor]:
    return state.per_view_params.stored()  # type: ignore[attr-defined,no-any-return]


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("kind", "views"),
    [(kind, views) for kind in ("native", "reference", "simt") for views in (BOTH, GRIDDED)] + [("native", PPISP)],
    ids=lambda value: value if isinstance(value, str) else next(name for name in value if name != "pose_opt"),
)
def test_a_resumed_run_has_the_same_bits(kind: str, views: dict[str, object], tmp_path: Path) -> None:
    def engine() -> StepEngine:
        if kind == "simt":
            return AsyncEngine(simulated(), capacity=1)
        return ReferenceEngine() if kind == "reference" else NativeEngine(float32("portable"))

    scene, config = made_scene(), short_config(14, views=views)
    with RunDir.create(tmp_path / "whole") as run_dir:
        whole = Trainer.start(config, scene, run_dir=run_dir, engine=engine(), renderer=plain_renderer)
        list(whole.run())
    with RunDir.create(tmp_path / "parts") as run_dir:
        part = Trainer.start(config, scene, run_dir=run_dir, engine=engine(), renderer=plain_renderer)
        list(part.run(stop_at=7))
        stored = load_checkpoint(run_dir.checkpoint_path(7))
        second = Trainer.resume(stored, scene, run_dir=run_dir, engine=engine(), renderer=plain_renderer)
        list(second.run())
    expected, got = tables(whole.state), tables(second.state)
    assert list(got) == list(expected)
    assert len(got) == (12 if "ppisp" in views else 8)
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name
    (colours,) = expected.keys() & set(COLOUR_MAPS)
    assert int(expected[f"{colours}.steps"].sum()) == 14
    assert int(expected["pose.steps"].sum()) == 12  # none in the first fifth
    assert bool((expected[colours] != expected[colours].roll(1, 0)).any())
    assert bool((expected["pose"] != 0).any())
    for name, tensor in whole.state.gaussians.items():
        assert torch.equal(tensor, getattr(second.state.gaussians, name)), name


@pytest.mark.parametrize(("views", "trained"), [(3, BOTH), (6, BOTH), (6, PPISP)])
def test_an_engine_that_runs_behind_learns_the_same_of_views_that_come_again_soon(
    views: int, trained: dict[str, object]
) -> None:
    states = []
    for engine in (PlainEngine(), AsyncPlainEngine()):
        run = MemoryRun()
        trainer = Trainer.start(
            short_config(20, views=trained), made_scene(views), run_dir=run, engine=engine, renderer=plain_renderer  # type: ignore[arg-type]
        )  # fmt: skip
        list(trainer.run())
        states.append(tables(trainer.state))
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name


def test_a_row_learns_as_torchs_adam_does() -> None:
    generator = torch.Generator().manual_seed(0)
    table = ViewTable.starting_from(torch.rand(3, 4, generator=generator, dtype=torch.float64))
    others = table.values[[0, 2]].clone()
    leaf = table.values[1].clone().requires_grad_()
    adam = torch.optim.Adam([leaf], lr=0.01, eps=1e-15)
    for _ in range(5):
        leaf.grad = torch.rand(4, generator=generator, dtype=torch.float64) - 0.5
        table.apply_grad(1, leaf.grad.clone(), 0.01)
        adam.step()
    torch.testing.assert_close(table.values[1], leaf.detach(), rtol=0, atol=1e-14)
    assert torch.equal(table.values[[0, 2]], others)
    assert table.steps.tolist() == [0, 5, 0]


def test_the_probe_sees_a_training_view_as_it_is_trained_on() -> None:
    trainer = Trainer.start(
        short_config(views=BOTH), made_scene(), run_dir=MemoryRun(), engine=PlainEngine(), renderer=plain_renderer  # type: ignore[arg-type]
    )  # fmt: skip
    before = trainer.scorer.probe(trainer.state)
    scores = trainer.scorer.evaluate(trainer.state, lambda: None)[0]
    table = trainer.state.per_view_params.exposure
    assert table is not None
    table.values.mul_(0.2)
    after = trainer.scorer.probe(trainer.state)
    assert isinstance(before, Probed)
    assert isinstance(after, Probed)
    assert before.psnr != after.psnr
    assert trainer.scorer.evaluate(trainer.state, lambda: None)[0] == scores, "held-out views have no exposure"


def test_a_run_without_corrections_stores_none_and_cannot_begin_them_later() -> None:
    trainer = Trainer.start(
        short_config(), made_scene(), run_dir=MemoryRun(), engine=PlainEngine(), renderer=plain_renderer  # type: ignore[arg-type]
    )  # fmt: skip
    assert trainer.state.to_checkpoint().views == {}
    for name in ("pose_opt", *COLOUR_MAPS):
        with pytest.raises(UsageError, match="fixed when a run is made"):
            changed_config(trainer.state.config, assignments=[f"views.{name}=true"])


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("pose.steps", None, "views.pose.steps is missing"),
        ("exposure", lambda t: t.float(), r"views.exposure is float32 \[4, 3, 4\], not float64 \[4, 3, 4\]"),
        ("pose", lambda t: t[:, :5], r"views.pose is float64 \[4, 5\], not float64 \[4, 6\]"),
        ("exposure.exp_avg", lambda t: t[:2], r"exposure.exp_avg is float64 \[2, 3, 4\], not float64 \[4, 3, 4\]"),
        ("pose.steps", lambda t: t - 3, "counts below zero"),
        ("colour", lambda _: torch.zeros(4), "views.colour is not a tensor of this format"),
        ("pose.", lambda _: torch.zeros(4), r"views.pose. is not a tensor of this format"),
    ],
)  # fmt: skip
def test_damaged_tables_are_refused(name: str, damage, message: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    trainer = Trainer.start(
        short_config(views=BOTH), made_scene(), run_dir=MemoryRun(), engine=PlainEngine(), renderer=plain_renderer  # type: ignore[arg-type]
    )  # fmt: skip
    checkpoint = trainer.state.to_checkpoint()
    save_checkpoint(tmp_path / "sound.pt", checkpoint)
    assert load_checkpoint(tmp_path / "sound.pt").views.keys() == checkpoint.views.keys()
    if damage is None:
        del checkpoint.views[name]
    else:
        checkpoint.views[name] = damage(checkpoint.views.get(name))
    with pytest.raises(SplatError, match=message):
        save_checkpoint(tmp_path / "damaged.pt", checkpoint)


def test_tables_need_a_row_for_each_training_view_and_must_be_there_to_resume(tmp_path: Path) -> None:
    trainer = Trainer.start(
        short_config(views=BOTH), made_scene(), run_dir=MemoryRun(), engine=PlainEngine(), renderer=plain_renderer  # type: ignore[arg-type]
    )  # fmt: skip
    checkpoint = trainer.state.to_checkpoint()
    whole = dict(checkpoint.views)
    checkpoint.views = {name: tensor[:3] for name, tensor in whole.items()}
    with pytest.raises(SplatError, match="has 3 rows for 4 training views"):
        save_checkpoint(tmp_path / "short.pt", checkpoint)
    checkpoint.views = {name: tensor for name, tensor in whole.items() if name.startswith("pose")}
    with pytest.raises(ModelFileError, match=r"views\.exposure is trained by its settings and missing"):
        Trainer.resume(checkpoint, made_scene(), run_dir=MemoryRun(), engine=PlainEngine(), renderer=plain_renderer)  # type: ignore[arg-type]


def test_the_maps_of_colours_exclude_each_other() -> None:
    for one, other in itertools.combinations(COLOUR_MAPS, 2):
        with pytest.raises(UsageError, match="exclude each other: each maps"):
            build_config({f"views.{one}": True, f"views.{other}": True})


def test_each_switch_of_the_views_is_the_poses_or_a_map_of_colours_and_has_tables_in_checkpoints() -> None:
    switches = {name for name, field in ViewsConfig.model_fields.items() if field.annotation is bool}
    assert switches == {"pose_opt", *COLOUR_MAPS}
    assert not ViewsConfig().trained
    assert trained_tables(ViewsConfig()) == dict.fromkeys(VIEW_TABLES, False)
    for name in switches:
        views = ViewsConfig.model_validate({name: True})
        assert views.trained
        assert views.colour_map == (name if name in COLOUR_MAPS else None)
        assert any(trained_tables(views).values()), name


@NEEDS_COMPILER
@pytest.mark.parametrize("name", COLOUR_MAPS)
def test_a_map_of_colours_begins_with_those_that_are_rendered_and_is_that_of_the_reference(name: str) -> None:
    params = PerViewParams.new(ViewsConfig.model_validate({name: True}), around(2, SIZE))
    image = torch.rand(9, 13, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    torch.testing.assert_close(params.recolour(1, image), image, rtol=0, atol=1e-5)
    generator = torch.Generator().manual_seed(5)
    for key, tensor in params.stored().items():
        if key in VIEW_TABLES:
            tensor += 0.1 * torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype)
    colours = params.of(
        1, around(2, SIZE)[1], ViewRates(build_config({f"views.{name}": True}), 1.0, 1), torch.device("cpu")
    )
    assert colours is not None
    assert colours.colours is not None
    expected = recolour_reference(image, colours.colours.double())
    assert float((expected - image).abs().max()) > 0.01
    torch.testing.assert_close(params.recolour(1, image), expected, rtol=0, atol=1e-4)


def test_a_grid_s_variation_has_the_gradient_of_autograd() -> None:
    grid = torch.rand(12, 8, 16, 16, dtype=torch.float64, requires_grad=True)
    torch.autograd.backward(sum((grid.diff(dim=axis) ** 2).mean() for axis in (1, 2, 3)))
    torch.testing.assert_close(variation_gradient(grid.detach()), grid.grad)
    assert not variation_gradient(identity_grid(8, 16, 16)).any()
