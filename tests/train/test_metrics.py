"""PSNR, SSIM and what is evaluated."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from splatcli.native.build import NoCompilerError
from splatcli.rasterizer import image_loss
from splatcli.rasterizer.reference import ssim_map_reference
from splatcli.scene.camera import Camera
from splatcli.train.evaluate import load_image, mean_scores, protocol, score_views
from splatcli.train.image_metrics import color_corrected, mask_out, psnr, quantised, ssim
from tests.rasterizer.scenes import random_image
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


@pytest.mark.parametrize("size", [(1, 1), (9, 14), (61, 70), (130, 97)])
def test_ssim_is_that_of_plain_torch(size: tuple[int, int]) -> None:
    x, y = (quantised(random_image(seed, *size)) for seed in (1, 2))
    for one, other in ((x, y), (x, (x + 0.02).clamp(max=1.0)), (x, x)):
        expected = float(ssim_map_reference(one.double(), other.double()).mean())
        assert ssim(one, other) == pytest.approx(expected, abs=5e-7)
        assert ssim(one.double(), other.double()) == pytest.approx(expected, abs=1e-12)
    assert math.isnan(ssim(x * math.nan, y))
    masked = random_image(3, *size)[..., 0] > 0.5
    masked[0, 0] = False
    dark = (mask_out(image.double(), masked) for image in (x, y))
    expected = float(ssim_map_reference(*dark)[:, ~masked].mean())
    assert ssim(x, y, masked) == pytest.approx(expected, abs=5e-7)
    assert ssim(x.double(), y.double(), masked) == pytest.approx(expected, abs=1e-12)


def test_ssim_without_a_compiler_is_that_of_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise NoCompilerError("there is no C++ compiler")

    x, y = (quantised(random_image(seed, 40, 30)) for seed in (1, 2))
    compiled = ssim(x, y)
    monkeypatch.setattr(image_loss, "backend_for", refuse)
    plain, masked = ssim(x, y), x[..., 0] > 0.5
    assert ssim(x, y, masked) == float(ssim_map_reference(mask_out(x, masked), mask_out(y, masked))[:, ~masked].mean())
    assert plain == float(ssim_map_reference(x, y).mean())
    assert plain == pytest.approx(compiled, abs=5e-6)


def test_quantised_is_what_a_png_holds() -> None:
    values = torch.tensor([-1.0, 0.0, 0.4 / 255, 0.6 / 255, 1.0, 7.0])
    assert (quantised(values) * 255).round().tolist() == [0, 0, 0, 1, 255, 255]


def test_a_perfect_render_scores_perfectly_and_in_order() -> None:
    scene = made_scene()
    by_name = {camera.name: i for i, camera in enumerate(scene.cameras)}

    def render(camera: Camera) -> Tensor:
        return load_image(scene, by_name[camera.name], "cpu")[0].float() / 255.0 + 0.001

    scores = list(score_views(render, scene, [3, 0]))
    assert [score.name for score in scores] == ["view_03.png", "view_00.png"]
    assert list(mean_scores(scores)) == pytest.approx([100.0, 1.0], abs=1e-6)


def test_the_mean_is_over_views() -> None:
    scene = made_scene(pixels=[np.full((16, 16, 3), value, np.uint8) for value in (0, 51)])
    scores = list(score_views(lambda camera: torch.full((16, 16, 3), 0.1), scene, [0, 1]))
    each = [-20 * math.log10(26 / 255), -20 * math.log10(25 / 255)]
    assert [score.psnr for score in scores] == pytest.approx(each, abs=1e-4)
    assert mean_scores(scores)[0] == pytest.approx(sum(each) / 2, abs=1e-4)
    with pytest.raises(ValueError, match="no view"):
        mean_scores([])


def test_a_read_only_photo_can_be_used() -> None:
    scene = made_scene()
    pixels = scene.images.load(2)
    pixels.flags.writeable = False
    target, _ = load_image(scene, 2, "cpu")
    np.testing.assert_array_equal(target.numpy(), pixels)


def test_the_protocol_is_json() -> None:
    scene = made_scene()
    record = json.loads(json.dumps(protocol(short_config(), scene, scene.test), allow_nan=False))
    assert record["views"] == 2
    assert record["sizes"] == ["16x16"]
    assert record["background"] == "black"


@pytest.mark.parametrize(
    ("every", "test", "words"),
    [
        (2, [0, 2], "those whose index 2 divides are held out"),
        (2, [1, 2], "the scene's own test views"),
        (0, [1], "the scene's own test views"),
        (2, [], "nothing is held out"),
    ],
)
def test_the_protocol_says_how_views_were_held_out(every: int, test: list[int], words: str) -> None:
    made = made_scene(views=4)
    scene = dataclasses.replace(made, test=test, train=[i for i in range(4) if i not in test])
    config = short_config()
    config = config.model_copy(update={"data": config.data.model_copy(update={"test_every": every})})
    assert words in str(protocol(config, scene, test)["split"])


def random_pair(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two unlike images [12, 14, 3], with values well inside 0..1."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (0.2 + 0.6 * torch.rand(12, 14, 3, generator=generator) for _ in range(2))
    return x, 0.7 * x + 0.3 * y


def test_colour_correction_undoes_any_affine_change_of_colour() -> None:
    photo, _ = random_pair()
    mix = torch.tensor([[0.7, 0.1, 0.0], [0.0, 0.5, 0.2], [0.1, 0.0, 0.6]])
    torch.testing.assert_close(color_corrected(photo @ mix + 0.05, photo), photo, atol=1e-6, rtol=0)


def test_colour_correction_is_the_least_squares_solution() -> None:
    x, y = random_pair()
    columns = torch.cat([x.reshape(-1, 3), torch.ones(12 * 14, 1)], 1).double()
    fit = torch.linalg.lstsq(columns, y.reshape(-1, 3).double()).solution
    torch.testing.assert_close(color_corrected(x, y), (columns @ fit).float().reshape(x.shape), atol=1e-6, rtol=0)
    assert psnr(color_corrected(x, y), y) > psnr(x, y) + 0.1


@pytest.mark.parametrize("hidden", [False, True])
def test_colour_correction_is_that_of_its_definition(hidden: bool) -> None:
    """cov(x, x)^+ cov(x, y) of centred colours, for more pixels than are summed at once."""
    x = quantised(random_image(1, 211, 190)).double()
    y = quantised(0.2 + 0.5 * x + 0.2 * random_image(2, 211, 190).double())
    masked = random_image(3, 211, 190)[..., 0] > 0.7 if hidden else None
    seen = torch.ones(190, 211, dtype=torch.bool) if masked is None else ~masked
    source, target = x[seen], y[seen]
    centred = source - source.mean(0)
    transform = torch.linalg.pinv(centred.T @ centred) @ (centred.T @ (target - target.mean(0)))
    expected = ((x - source.mean(0)) @ transform + target.mean(0)).clamp(0.0, 1.0)
    # In float64; the sums have another order.
    torch.testing.assert_close(color_corrected(x, y, masked), expected, atol=1e-11, rtol=0)


def test_hidden_pixels_take_no_part_in_the_fit() -> None:
    x, y = random_pair()
    hidden = torch.zeros(12, 14, dtype=torch.bool)
    hidden[:5] = True
    junk = y.clone()
    junk[:5] = 1.0 - junk[:5]
    fitted = color_corrected(x, junk, hidden)
    torch.testing.assert_close(fitted[5:], color_corrected(x[5:], y[5:]), atol=1e-7, rtol=0)
    assert not torch.allclose(fitted[5:], color_corrected(x, junk)[5:], atol=1e-3)


def test_renders_without_colour_can_be_corrected() -> None:
    _, photo = random_pair()
    flat = torch.full_like(photo, 0.3)
    torch.testing.assert_close(color_corrected(flat, photo), photo.mean((0, 1)).expand_as(photo), atol=1e-6, rtol=0)
    grey = photo.mean(-1, keepdim=True).expand_as(photo)
    twice = color_corrected(grey, 0.5 * grey + 0.1)
    torch.testing.assert_close(twice, 0.5 * grey + 0.1, atol=1e-6, rtol=0)


def test_corrected_colours_stay_within_the_range() -> None:
    x = torch.tensor([0.0, 0.5, 1.0]).reshape(1, 3, 1).expand(1, 3, 3)
    y = torch.tensor([0.0, 1.0, 1.0]).reshape(1, 3, 1).expand(1, 3, 3)
    fitted = color_corrected(x, y)
    assert fitted.min() >= 0.0
    assert fitted.max() == 1.0
