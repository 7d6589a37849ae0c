"""Training and scores with masks: what is hidden makes no difference to a single bit of either."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from splatcli.config import Config, DataConfig
from splatcli.gaussians import GROUPS, Gaussians
from splatcli.rasterizer.reference import ssim_map_reference
from splatcli.scene.camera import Camera
from splatcli.scene.images import AHEAD
from splatcli.scene.read import read_scene
from splatcli.scene.scene import Scene
from splatcli.train.evaluate import load_image, protocol, score_views
from splatcli.train.events import Evaluated, Stepped
from splatcli.train.image_metrics import psnr, ssim
from splatcli.train.sampler import ViewSampler
from splatcli.train.trainer import Trainer
from splatcli.train.training_images import TrainingImages
from tests.native.cases import NEEDS_COMPILER
from tests.scene import made
from tests.train.worlds import MemoryRun, short_config

STEPS = 12


def hidden_half() -> NDArray[np.bool_]:
    hidden = np.zeros((made.HEIGHT, made.WIDTH), bool)
    hidden[:, : made.WIDTH // 3] = True
    hidden[10:20, 30:50] = True
    return hidden


def masked_scene(root: Path, under: int, *, masked: bool = True) -> Path:
    """A scene whose photos show the grey level ``under`` where their masks hide them."""
    made.colmap_scene(root)
    (root / "masks").mkdir()
    for i, name in enumerate(made.names()):
        pixels = made.picture(i)
        pixels[hidden_half()] = under
        Image.fromarray(pixels).save(root / "images" / name)
        if masked:
            Image.fromarray(255 * (~hidden_half()).astype(np.uint8)).save(root / "masks" / f"{name}.png")
    return root


def train(scene: Scene) -> tuple[Gaussians, list[float], Evaluated]:
    config = short_config(STEPS, schedule={"refine_start": 2, "refine_stop": 9, "refine_every": 3})
    trainer = Trainer.start(config, scene, run_dir=MemoryRun())  # type: ignore[arg-type]
    events = list(trainer.run())
    (score,) = [event for event in events if isinstance(event, Evaluated)]
    return trainer.state.gaussians, [event.loss for event in events if isinstance(event, Stepped)], score


@NEEDS_COMPILER
def test_what_a_mask_hides_changes_no_bit_of_the_model_and_no_score(tmp_path: Path) -> None:
    runs = [train(read_scene(masked_scene(tmp_path / str(under), under), DataConfig())) for under in (0, 255)]
    (black, black_losses, black_score), (white, white_losses, white_score) = runs
    assert black_losses == white_losses
    assert len(black_losses) == STEPS
    for name in GROUPS:
        assert torch.equal(getattr(black, name), getattr(white, name)), name
    assert black_score.views == white_score.views
    seen = train(read_scene(masked_scene(tmp_path / "seen", 255, masked=False), DataConfig()))
    assert seen[1] != white_losses


def test_psnr_and_ssim_leave_hidden_pixels_out() -> None:
    random = torch.Generator().manual_seed(0)
    x, y = (torch.rand(20, 30, 3, generator=random) for _ in range(2))
    hidden = torch.zeros(20, 30, dtype=torch.bool)
    hidden[:, :13] = True
    squares = ((x - y)[:, 13:] ** 2).double().mean()
    assert psnr(x, y, hidden) == pytest.approx(-10 * math.log10(float(squares)))
    changed = x.clone()
    changed[hidden] = 0.7
    assert psnr(changed, y, hidden) == psnr(x, y, hidden)
    assert ssim(changed, y, hidden) == ssim(x, y, hidden)
    dark = [image.double() for image in (x, y)]
    for image in dark:
        image[:, :13] = 0
    assert ssim(x, y, hidden) == pytest.approx(float(ssim_map_reference(*dark)[:, :, 13:].mean()))
    assert math.isnan(ssim(x, y, torch.ones_like(hidden)))
    nothing = torch.zeros_like(hidden)
    assert psnr(x, y, nothing) == pytest.approx(psnr(x, y))
    assert ssim(x, y, nothing) == pytest.approx(ssim(x, y))
    assert math.isnan(psnr(x, y, ~nothing))


def test_a_view_that_is_hidden_altogether_has_no_score(tmp_path: Path) -> None:
    masked_scene(tmp_path, 9)
    Image.fromarray(np.zeros((made.HEIGHT, made.WIDTH), np.uint8)).save(tmp_path / "masks/0002.png.png")
    scene = read_scene(tmp_path, DataConfig())

    def render(camera: Camera) -> Tensor:
        return torch.full((camera.height, camera.width, 3), 0.5)

    assert [score.name for score in score_views(render, scene, [1, 2, 3])] == ["0001.png", "0003.png"]
    assert protocol(Config(), scene, [1, 2, 3])["masks"] == "masked pixels do not count"


def test_targets_bring_what_is_hidden(tmp_path: Path) -> None:
    scene = read_scene(masked_scene(tmp_path, 200), DataConfig())
    target = TrainingImages(scene, torch.device("cpu")).load(4)
    assert target.masked is not None
    assert torch.equal(target.masked, torch.from_numpy(hidden_half()))
    assert not target.pixels[target.masked].any()
    pixels, hidden = load_image(scene, 4, "cpu")
    assert torch.equal(pixels, target.pixels)
    assert hidden is not None


@pytest.mark.parametrize("count", [1, 3, 7, 20])
def test_the_sampler_tells_what_comes_next_in_this_pass(count: int) -> None:
    sampler = ViewSampler(7, 3)
    for position in range(14):
        reported = sampler.upcoming(count)
        assert len(reported) == min(count, 7 - position % 7)
        ahead = ViewSampler(7, 3, **sampler.state())
        assert reported == [ahead.next() for _ in reported]
        sampler.next()


@NEEDS_COMPILER
def test_photos_are_decoded_ahead_once_each_and_the_bits_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made.colmap_scene(tmp_path)
    scene = read_scene(tmp_path, DataConfig(cache_bytes=1))
    asked: list[int] = []
    decoded: list[int] = []
    prefetch, decode = scene.images.prefetch, scene.images._decode
    monkeypatch.setattr(scene.images, "prefetch", lambda i: (asked.append(i), prefetch(i)))
    monkeypatch.setattr(scene.images, "_decode", lambda i: (decoded.append(i), decode(i))[1])
    ahead, losses, _ = train(scene)
    assert len(set(asked)) == len(scene.train)
    # Of the training views: one decoding for each step, and those that were still ahead at the end.
    assert STEPS <= sum(decoded.count(i) for i in scene.train) <= STEPS + AHEAD + 3
    plain = read_scene(tmp_path, DataConfig())
    monkeypatch.setattr(plain.images, "prefetch", lambda i: None)
    behind, expected, _ = train(plain)
    assert losses == expected
    for name in GROUPS:
        assert torch.equal(getattr(ahead, name), getattr(behind, name)), name
