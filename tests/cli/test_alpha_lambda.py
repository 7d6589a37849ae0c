"""Terms of alpha, whole commands: dark surfaces become opaque, what may be empty stays so, masks leave less haze."""

from __future__ import annotations

from pathlib import Path

import imageio.v3 as imageio
import numpy as np
import torch

from splatcli.checkpoint.file import load_checkpoint
from splatcli.gaussians import GROUPS
from tests.cli.tiny import QUICK, add_points, write_scene
from tests.running import Splat


def test_dark_surfaces_become_opaque_and_black_stays_empty(splat: Splat, tmp_path: Path) -> None:
    scene = add_points(write_scene(tmp_path / "scene"))
    photos = sorted((scene / "images").glob("*.png"))
    for path in photos:
        pixels = imageio.imread(path).astype(int)  # the ball before black
        imageio.imwrite(path, np.where(pixels.any(axis=2, keepdims=True), 6 + pixels // 30, 0).astype(np.uint8))
    on_ball = np.stack([imageio.imread(path).any(axis=2) for path in photos])
    found = {}
    for name, more in (("on", ("--set", "train.alpha_lambda=2")), ("off", ("--set", "train.alpha_lambda=0"))):
        run, out = tmp_path / name, tmp_path / f"{name}-alpha"
        ran = splat("train", scene, "-n", 300, "-q", *QUICK, "--init", "sfm", *more, "-o", run)
        assert ran.code == 0, ran.err
        assert splat("render", run, "--views", "all", "--what", "alpha", "-o", out, "-q").code == 0
        alpha = np.stack([imageio.imread(path) for path in sorted(out.rglob("*.png"))]) / 255
        found[name] = (alpha[on_ball].mean(), alpha[:, :, :4].mean())  # four columns left of the ball
    assert found["on"][0] > found["off"][0] + 0.2, found
    assert found["on"][1] < 0.05, found


def test_images_with_transparency_say_themselves_what_is_empty(splat: Splat, tmp_path: Path) -> None:
    scene = write_scene(tmp_path / "scene")
    for path in sorted((scene / "images").glob("*.png")):
        pixels = imageio.imread(path)
        imageio.imwrite(path, np.dstack([pixels, 255 * pixels.any(axis=2).astype(np.uint8)]))
    checkpoints = []
    for weight in (0, 5):
        words = ("-n", 20, "-q", *QUICK, "--set", f"train.alpha_lambda={weight}")
        ran = splat("train", scene, *words, "-o", tmp_path / str(weight))
        assert ran.code == 0, ran.err
        checkpoints.append(load_checkpoint(Path(ran.lines[0])))
    for name in GROUPS:
        assert torch.equal(getattr(checkpoints[0].gaussians, name), getattr(checkpoints[1].gaussians, name)), name


def test_what_only_masked_pixels_show_becomes_empty(splat: Splat, tmp_path: Path) -> None:
    """All but the ball is masked. Large Gaussians cover both here, so the weight is larger than the default."""
    scene = write_scene(tmp_path / "scene")
    (scene / "masks").mkdir()
    photos = sorted((scene / "images").glob("*.png"))
    for path in photos:
        imageio.imwrite(scene / "masks" / path.name, 255 * imageio.imread(path).any(axis=2).astype(np.uint8))
    on_ball = np.stack([imageio.imread(path).any(axis=2) for path in photos])
    found = {}
    for weight in ("0", "0.5"):
        run, out = tmp_path / weight, tmp_path / f"{weight}-alpha"
        ran = splat("train", scene, "-n", 400, "-q", *QUICK, "--set", f"train.mask_lambda={weight}", "-o", run)
        assert ran.code == 0, ran.err
        assert splat("render", run, "--views", "all", "--what", "alpha", "-o", out, "-q").code == 0
        alpha = np.stack([imageio.imread(path) for path in sorted(out.rglob("*.png"))]) / 255
        found[weight] = (alpha[on_ball].mean(), alpha[~on_ball].mean())
    assert found["0.5"][1] < 0.6 * found["0"][1], found
    assert found["0.5"][0] > 0.7 * found["0"][0], found
