"""Options of training that concern background, regularisers and the degree of colours: each does what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from splatcli.checkpoint.file import load_checkpoint
from splatcli.checkpoint.run_dir import RunDir
from splatcli.config import Config
from splatcli.formats.ply import write_ply_file
from splatcli.gaussians import SHN_COUNTS, Gaussians
from splatcli.rasterizer import NativeEngine, render
from splatcli.scene.camera import Camera
from splatcli.scene.images import LoadedImage
from splatcli.scene.scene import Scene
from splatcli.train.events import Stepped
from splatcli.train.trainer import Trainer
from tests.formats.made import read_ply
from tests.native.cases import NEEDS_COMPILER, float32
from tests.rasterizer.scenes import random_gaussians
from tests.train.test_per_view_params import TRAIN, around, photographed, scene_with_cameras, truth
from tests.train.worlds import MadeImages, MemoryRun, plain_renderer

pytestmark = NEEDS_COMPILER
SIZE = 48


def config_of(steps: int, **sections: dict[str, object]) -> Config:
    """A run without density control."""
    values: dict[str, dict[str, object]] = {
        "model": {"sh_degree": 0},
        "schedule": {"refine_start": steps, "refine_stop": steps, "reset_every": 10 * steps, "lr_steps": steps},
        "train": {"iterations": steps},
        "save": {"steps": ()},
    }
    for name, section in sections.items():
        values.setdefault(name, {}).update(section)
    return Config.model_validate(values)


def trained(config: Config, scene: Scene, given: Gaussians | None = None) -> Gaussians:
    engine = NativeEngine(float32("portable"))
    trainer = Trainer.start(
        config, scene, run_dir=MemoryRun(), engine=engine, renderer=plain_renderer, init_model=given  # type: ignore[arg-type]
    )  # fmt: skip
    list(trainer.run())
    return trainer.state.gaussians


def joined(first: Gaussians, second: Gaussians) -> Gaussians:
    return Gaussians(**{name: torch.cat([tensor, getattr(second, name)]) for name, tensor in first.items()})


class CutImages(MadeImages):
    """Photos of an object alone: over black, with their alpha."""

    def __init__(self, cameras: list[Camera]) -> None:
        renders = [render(truth(), camera, backend=float32("portable")) for camera in cameras]
        super().__init__([_bytes(one.image) for one in renders])
        self.alphas = [_bytes(one.alpha) for one in renders]

    def image(self, i: int) -> LoadedImage:
        return replace(super().image(i), alpha=self.alphas[i])


def _bytes(values: Tensor) -> NDArray[np.uint8]:
    return (values.clamp(0.0, 1.0) * 255.0).round().to(torch.uint8).numpy()


def junk() -> Gaussians:
    """A black shell beyond the cameras, which none of them sees before the object."""
    blobs = random_gaussians(8, 150, sh_degree=0, spread=1.0, scale=0.5)
    return replace(
        blobs,
        means=4.0 * torch.nn.functional.normalize(blobs.means, dim=1),
        logit_opacities=torch.full_like(blobs.logit_opacities, 2.0),
        sh0=torch.full_like(blobs.sh0, -0.5 / 0.2820948),
    )


def mean_alpha_beside_the_object(gaussians: Gaussians, cameras: list[Camera], images: CutImages) -> float:
    """Of training views, where photos are empty."""
    alphas = [
        render(gaussians, cameras[i], backend=float32("portable")).alpha[torch.from_numpy(images.alphas[i] == 0)]
        for i in TRAIN
    ]
    return float(torch.cat(alphas).mean())


def test_nothing_hides_before_a_random_background_and_black_hides_before_black() -> None:
    cameras = around(15, SIZE)
    images = CutImages(cameras)
    scene = scene_with_cameras(cameras, images.pixels)
    scene.images = images  # type: ignore[assignment]
    start = joined(truth(), junk())
    before = mean_alpha_beside_the_object(start, cameras, images)
    left = {
        name: mean_alpha_beside_the_object(
            trained(config_of(400, train={"background": name}), scene, start), cameras, images
        )
        for name in ("black", "random")
    }
    assert before > 0.2
    assert left["black"] > 0.5 * before, "nothing tells black junk from a black background"
    assert left["random"] < 0.25 * before


@pytest.mark.parametrize(
    ("setting", "figure"),
    [
        ("opacity_reg", lambda g: float(g.logit_opacities.sigmoid().mean())),
        ("scale_reg", lambda g: float(g.log_scales.exp().mean())),
    ],
)
def test_a_regulariser_lowers_what_it_weighs(setting: str, figure: Callable[[Gaussians], float]) -> None:
    cameras = around(15, SIZE)
    scene = scene_with_cameras(cameras, photographed(cameras))
    found = [figure(trained(config_of(150, strategy={setting: weight}), scene, truth())) for weight in (0.0, 0.5, 5.0)]
    assert found[0] > 1.05 * found[1] > 1.05 * 1.05 * found[2]


@pytest.mark.parametrize("degree", range(5))
def test_colours_of_each_degree_are_trained_saved_resumed_and_exported(degree: int, tmp_path: Path) -> None:
    cameras = around(15, SIZE)
    scene = scene_with_cameras(cameras, photographed(cameras))
    config = config_of(24, model={"sh_degree": degree}, schedule={"sh_degree_interval": 4})

    def engine() -> NativeEngine:
        return NativeEngine(float32("portable"))

    with RunDir.create(tmp_path / "whole") as run_dir:
        whole = Trainer.start(config, scene, run_dir=run_dir, engine=engine(), renderer=plain_renderer)
        steps = [event for event in whole.run() if isinstance(event, Stepped)]
    assert [step.sh_degree for step in steps] == [min(degree, step // 4) for step in range(1, 25)]
    with RunDir.create(tmp_path / "parts") as run_dir:
        list(Trainer.start(config, scene, run_dir=run_dir, engine=engine(), renderer=plain_renderer).run(stop_at=11))
        stored = load_checkpoint(run_dir.checkpoint_path(11))
        second = Trainer.resume(stored, scene, run_dir=run_dir, engine=engine(), renderer=plain_renderer)
        list(second.run())
    shown = whole.state.gaussians_to_render()
    assert shown.shN.shape[1] == SHN_COUNTS[degree]
    for name, tensor in shown.items():
        assert torch.equal(tensor, getattr(second.state.gaussians_to_render(), name)), name
    # The last degree's coefficients have left zero, where there are any.
    last = shown.shN[:, SHN_COUNTS[degree - 1] if degree else 0 :]
    assert last.numel() == 0 or bool((last != 0).any())
    write_ply_file(shown, tmp_path / "x.ply")
    for name, tensor in read_ply(tmp_path / "x.ply").items():
        assert torch.equal(tensor, getattr(shown, name)), name
