"""--antialiased and --filter-3d: what a model shows holds at other resolutions than that of its photos."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from splatcli.config import Config
from splatcli.rasterizer import NativeEngine, render
from splatcli.scene.camera import Camera
from splatcli.scene.points import PointCloud
from splatcli.train.image_metrics import psnr
from splatcli.train.trainer import Trainer
from tests.native.cases import NEEDS_COMPILER, float32
from tests.rasterizer.scenes import look_from
from tests.train.worlds import MadeImages, MadeScene, MemoryRun

VIEWS, SIZE, STEPS = 6, 48, 120
#: The wall is the plane z = 2; points lie on it in a grid, 1.4 pixels of a photo apart.
WALL, HALF, SIDE = 2.0, 1.4, 60
#: A pixel is the mean of so many rays a side.
RAYS = 4

CAMERAS = [
    Camera(f"{i}.png", SIZE, SIZE, 1.2 * SIZE, 1.2 * SIZE, SIZE / 2, SIZE / 2, viewmat)
    for i in range(VIEWS)
    for viewmat in [look_from([0.4 * np.cos(i), 0.4 * np.sin(i), -0.1 * i], [0.0, 0.0, WALL])]
]


def colours(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.stack([0.5 + 0.3 * np.sin(7 * x + k) * np.cos(5 * y - k) for k in range(3)], axis=-1)


def picture(camera: Camera) -> NDArray[np.float64]:
    """[H, W, 3] what the camera sees of the wall, each pixel the mean of its area."""
    side = RAYS * camera.width
    x, y = np.meshgrid(*2 * [((np.arange(side) + 0.5) / RAYS - camera.cx) / camera.fx])
    rays = np.stack([x, y, np.ones_like(x)], axis=-1) @ camera.viewmat[:3, :3]
    far = (WALL - camera.center[2]) / rays[..., 2]
    seen = camera.center + far[..., None] * rays
    fine = colours(seen[..., 0], seen[..., 1])
    return fine.reshape(camera.height, RAYS, camera.width, RAYS, 3).mean(axis=(1, 3))


@cache
def scores(antialiased: bool, filter_3d: bool) -> dict[float, float]:
    """PSNR of the held-out view at its size times 8, 4, 1, 1/2 and 1/4, after a run from Gaussians that are small."""
    grid = np.stack(np.meshgrid(*2 * [np.linspace(-HALF, HALF, SIDE)]), axis=-1).reshape(-1, 2)
    xyz = np.concatenate([grid, np.full((len(grid), 1), WALL)], axis=1).astype(np.float32)
    scene = MadeScene(
        root=Path("/nowhere"),
        kind="colmap",
        cameras=CAMERAS,
        images=MadeImages([(255.0 * picture(camera)).round().astype(np.uint8) for camera in CAMERAS]),  # type: ignore[arg-type]
        points=PointCloud(xyz, (255.0 * colours(grid[:, 0], grid[:, 1])).astype(np.uint8)),
        train=list(range(1, VIEWS)),
        test=[],
    )
    config = Config.model_validate(
        {
            "model": {"sh_degree": 0, "init_scale": 0.4, "init_opacity": 0.5},
            "schedule": {"refine_start": STEPS, "refine_stop": STEPS, "reset_every": 10 * STEPS, "lr_steps": STEPS},
            "train": {"iterations": STEPS, "antialiased": antialiased, "filter_3d": filter_3d},
            "save": {"steps": ()},
            "guard": {"probe_every": 0},
        }
    )
    engine = NativeEngine(float32("portable"))
    trainer = Trainer.start(config, scene, run_dir=MemoryRun(), engine=engine)  # type: ignore[arg-type]
    list(trainer.run())
    found = {}
    for factor in (8.0, 4.0, 1.0, 0.5, 0.25):
        camera = CAMERAS[0].resized(int(SIZE * factor), int(SIZE * factor))
        shown = render(
            trainer.state.gaussians_to_render(), camera, antialiased=antialiased, backend=float32("portable")
        ).image
        found[factor] = psnr(shown.clamp(0.0, 1.0), torch.from_numpy(picture(camera)).float())
    return found


@NEEDS_COMPILER
def test_with_both_filters_a_model_holds_closer_and_farther_where_without_it_falls() -> None:
    plain, both = scores(False, False), scores(True, True)
    for factor in (8.0, 4.0):
        assert plain[factor] < plain[1.0] - 6.0
        assert both[factor] > both[1.0] - 1.0
    assert plain[0.25] < plain[1.0] - 6.0
    assert both[0.25] > plain[0.25] + 5.0


@NEEDS_COMPILER
def test_it_is_the_3d_filter_that_holds_close_up_and_the_2d_filter_from_afar() -> None:
    plain, flat, solid, both = scores(False, False), scores(True, False), scores(False, True), scores(True, True)
    for factor in (8.0, 4.0):
        assert solid[factor] > plain[factor] + 2.0
        assert both[factor] > flat[factor] + 0.3
    assert flat[0.25] > plain[0.25] + 5.0
