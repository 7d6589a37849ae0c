"""PSNR, SSIM and what is evaluated."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from splatcli.scene.camera import Camera
from splatcli.train.metrics import evaluate, load_photo, mean_scores, protocol, psnr, quantised, ssim
from tests.train.worlds import made_scene, short_config


def test_psnr_by_hand() -> None:
    zero = torch.zeros(4, 5, 3)
    assert psnr(zero, zero + 0.1) == pytest.approx(20.0, abs=1e-5)
    assert psnr(zero, zero + 1.0) == 0.0
    assert psnr(zero, zero) == 100.0
    assert math.isnan(psnr(zero, zero * math.nan))


def test_ssim_of_an_image_with_itself_is_one_and_with_another_less() -> None:
    image = torch.rand(20, 24, 3, generator=torch.Generator().manual_seed(0))
    assert ssim(image, image) == pytest.approx(1.0, abs=1e-6)
    assert ssim(image, image.flip(0)) < 0.5


def test_quantised_is_what_a_png_holds() -> None:
    values = torch.tensor([-1.0, 0.0, 0.4 / 255, 0.6 / 255, 1.0, 7.0])
    assert (quantised(values) * 255).round().tolist() == [0, 0, 0, 1, 255, 255]


def test_a_perfect_render_scores_perfectly_and_in_order() -> None:
    scene = made_scene()
    by_name = {camera.name: i for i, camera in enumerate(scene.cameras)}

    def render(camera: Camera) -> Tensor:
        return load_photo(scene, by_name[camera.name], "cpu")[0].float() / 255.0 + 0.001

    scores = evaluate(render, scene, [3, 0])
    assert [score.name for score in scores] == ["view_03.png", "view_00.png"]
    assert list(mean_scores(scores)) == pytest.approx([100.0, 1.0], abs=1e-6)


def test_the_mean_is_over_views() -> None:
    scene = made_scene(pixels=[np.full((16, 16, 3), value, np.uint8) for value in (0, 51)])
    scores = evaluate(lambda camera: torch.full((16, 16, 3), 0.1), scene, [0, 1])
    each = [-20 * math.log10(26 / 255), -20 * math.log10(25 / 255)]
    assert [score.psnr for score in scores] == pytest.approx(each, abs=1e-4)
    assert mean_scores(scores)[0] == pytest.approx(sum(each) / 2, abs=1e-4)
    with pytest.raises(ValueError, match="no view"):
        mean_scores([])


def test_a_read_only_photo_can_be_used() -> None:
    scene = made_scene()
    pixels = scene.images.load(2)
    pixels.flags.writeable = False
    target, _ = load_photo(scene, 2, "cpu")
    np.testing.assert_array_equal(target.numpy(), pixels)


def test_the_protocol_is_json() -> None:
    scene = made_scene()
    record = json.loads(json.dumps(protocol(short_config(), scene, scene.test), allow_nan=False))
    assert record["views"] == 2
    assert record["sizes"] == ["16x16"]
    assert record["background"] == "black"
