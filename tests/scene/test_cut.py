"""``data.mask_mode`` "transparent", and alpha under a background that is new each step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from splatcli.config import Config, DataConfig
from splatcli.scene.inspect import mask_notes, masked_share
from splatcli.scene.read import read_scene
from splatcli.train.evaluate import protocol
from splatcli.train.training_images import TrainingImages
from tests.scene import made
from tests.scene.test_masks import kept, write_masks

CPU = torch.device("cpu")
COLOUR = (0.7, 0.2, 0.45)


def exactly(rgb: NDArray[np.uint8], opacity: NDArray[np.float64], colour: tuple[float, ...]) -> NDArray[np.float64]:
    """[H, W, 3] in 0...255, not rounded."""
    return rgb * opacity[..., None] + 255.0 * np.array(colour) * (1.0 - opacity[..., None])


def masked_scene(root: Path) -> Path:
    made.colmap_scene(root)
    write_masks(root / "masks")
    return root


@pytest.mark.parametrize("background", [(0, 0, 0), (255, 255, 255)])
def test_what_a_mask_cuts_away_shows_the_background_and_counts(tmp_path: Path, background: tuple[int, ...]) -> None:
    data = DataConfig(mask_mode="transparent")
    scene = read_scene(masked_scene(tmp_path), data, background=background)  # type: ignore[arg-type]
    assert any("8 images have masks; what they hide is empty" in note for note in scene.notes)
    assert not scene.images.masked
    assert protocol(Config(), scene, [0])["masks"] == "masked pixels show the background in images"
    for i in range(made.COUNT):
        image = scene.images.image(i)
        assert image.masked is None
        assert image.alpha is None
        expected = np.where(kept(i)[..., None], made.picture(i), np.array(background, np.uint8))
        np.testing.assert_array_equal(image.pixels, expected)


def test_what_is_cut_away_shows_each_step_s_own_background(tmp_path: Path) -> None:
    scene = read_scene(masked_scene(tmp_path), DataConfig(mask_mode="transparent"), background=None)
    target = TrainingImages(scene, CPU).load(2)
    for colour in (COLOUR, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)):
        shown = target.over(torch.tensor(colour)).numpy()
        assert shown.dtype == np.uint8
        expected = exactly(made.picture(2), kept(2).astype(np.float64), colour)
        np.testing.assert_array_equal(shown, np.round(expected.astype(np.float32)).astype(np.uint8))


@pytest.mark.parametrize("resolution", [1, 2])
def test_alpha_is_laid_over_each_step_s_background_to_one_level(tmp_path: Path, resolution: int) -> None:
    """Also where an image is reduced: what is in part transparent is so in the mean."""
    random = np.random.default_rng(4)
    made.colmap_scene(tmp_path)
    waves = made.picture(9)[..., 0] if resolution > 1 else random.integers(0, 256, (made.HEIGHT, made.WIDTH))
    alpha = waves.astype(np.uint8)
    Image.fromarray(np.dstack([made.picture(0), alpha])).save(tmp_path / "images/0000.png")
    scene = read_scene(tmp_path, DataConfig(resolution=resolution), background=None)
    target = TrainingImages(scene, CPU).load(0)
    assert target.alpha is not None
    assert TrainingImages(scene, CPU).load(1).alpha is None
    shown = target.over(torch.tensor(COLOUR)).numpy().astype(np.float64)
    expected = exactly(made.picture(0), alpha / 255.0, COLOUR)
    if resolution == 1:
        assert np.abs(shown - expected).max() <= 1.0 + 1e-3
        return
    # The same filter on the composed picture, which is linear; another rounding.
    composed = Image.fromarray(np.round(expected).astype(np.uint8)).resize((32, 24), Image.Resampling.LANCZOS)
    assert np.abs(shown - np.asarray(composed, dtype=np.float64)).max() <= 2.0


def test_under_a_fixed_background_alpha_is_composed_once_with_the_same_bits(tmp_path: Path) -> None:
    root = made.blender_scene(tmp_path)
    for background, colour in (((0, 0, 0), 0.0), ((255, 255, 255), 1.0)):
        once = read_scene(root, DataConfig(), background=background).images.image(0)  # type: ignore[arg-type]
        assert once.alpha is None
        each = TrainingImages(read_scene(root, DataConfig(), background=None), CPU).load(0)
        np.testing.assert_array_equal(each.over(torch.full((3,), colour)).numpy(), once.pixels)


def test_a_mask_and_alpha_multiply(tmp_path: Path) -> None:
    masked_scene(tmp_path)
    alpha = np.full((made.HEIGHT, made.WIDTH), 51, np.uint8)
    Image.fromarray(np.dstack([made.picture(3), alpha])).save(tmp_path / "images/0003.png")
    scene = read_scene(tmp_path, DataConfig(mask_mode="transparent"), background=None)
    np.testing.assert_array_equal(scene.images.image(3).alpha, np.where(kept(3), 51, 0))
    hidden = read_scene(tmp_path, DataConfig(), background=None)
    target = TrainingImages(hidden, CPU).load(3)
    shown = target.over(torch.ones(3))
    assert target.masked is not None
    assert not shown[target.masked].any(), "what is hidden stays black, whatever the background"
    assert (shown[~target.masked] >= 204).all()


def test_masks_cut_before_images_are_reduced_and_undistorted(tmp_path: Path) -> None:
    """So that nothing of what is hidden gets into the edge: as if it had been painted over in the image."""
    lens = made.lens("OPENCV", [60.0, 61.0, 32.0, 24.0, 0.1, -0.02, 0.001, 0.002])
    data = DataConfig(mask_mode="transparent", resolution=2)
    made.colmap_scene(tmp_path / "cut", camera=lens)
    write_masks(tmp_path / "cut/masks")
    image = read_scene(tmp_path / "cut", data, background=None).images.image(1)
    for name, paint in (
        ("colours", made.picture(1)),
        ("opacity", np.full((made.HEIGHT, made.WIDTH, 3), 255, np.uint8)),
    ):
        made.colmap_scene(tmp_path / name, camera=lens)
        Image.fromarray(paint * kept(1)[..., None]).save(tmp_path / name / "images/0001.png")
    painted, white = (read_scene(tmp_path / name, data).images.load(1) for name in ("colours", "opacity"))
    np.testing.assert_array_equal(image.pixels, painted)
    assert image.alpha is not None
    np.testing.assert_array_equal(image.alpha, white[..., 0])
    assert ((image.alpha > 20) & (image.alpha < 235)).any()


def test_alpha_that_is_called_a_mask_is_a_part_of_the_picture_when_masks_cut(tmp_path: Path) -> None:
    root = made.blender_scene(tmp_path)
    cut = read_scene(root, DataConfig(masks="alpha", mask_mode="transparent"), background=(255, 255, 255))
    plain = read_scene(root, DataConfig(), background=(255, 255, 255))
    np.testing.assert_array_equal(cut.images.image(0).pixels, plain.images.image(0).pixels)
    assert cut.notes == plain.notes


@pytest.mark.parametrize(
    ("value", "share", "reported"),
    [(255, 0.0, "hide 0 %"), (0, 1.0, "are they inverted?"), (None, 0.25, "hide 25 % of the images on average")],
)
def test_how_much_masks_hide_is_reported(tmp_path: Path, value: int | None, share: float, reported: str) -> None:
    made.colmap_scene(tmp_path)
    (tmp_path / "masks").mkdir()
    mask = np.full((made.HEIGHT, made.WIDTH), 255 if value is None else value, np.uint8)
    if value is None:
        mask[: made.HEIGHT // 4] = 0
    for name in made.names():
        Image.fromarray(mask).save(tmp_path / "masks" / f"{name}.png")
    store = read_scene(tmp_path, DataConfig()).images
    assert masked_share(store) == (share, made.COUNT)
    (note,) = mask_notes(store)
    assert reported in note
    (tmp_path / "masks/0001.png.png").write_bytes(b"no picture")
    assert masked_share(store) == (share, made.COUNT - 1), "the one that needs a damaged mask tells of it"


def test_of_images_without_masks_nothing_is_reported(tmp_path: Path) -> None:
    assert mask_notes(read_scene(made.colmap_scene(tmp_path), DataConfig()).images) == []


def test_alpha_that_hides_is_counted(tmp_path: Path) -> None:
    made.colmap_scene(tmp_path)
    alpha = np.where(kept(0), 255, 0).astype(np.uint8)
    for i, name in enumerate(made.names()):
        Image.fromarray(np.dstack([made.picture(i), alpha])).save(tmp_path / "images" / name)
    found = masked_share(read_scene(tmp_path, DataConfig(masks="alpha")).images)
    assert found == (pytest.approx((~kept(0)).mean()), made.COUNT)


def test_a_mode_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    from splatcli.config import build_config
    from splatcli.errors import UsageError

    with pytest.raises(UsageError, match=r"data\.mask_mode = 'cut': expected ignore or transparent"):
        build_config({"data.mask_mode": "cut"})
    assert json.loads(build_config({"data.mask_mode": "transparent"}).model_dump_json())["data"]["mask_mode"]
