"""Masks of what stands still: made images of a patch that moves before something that does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from splatcli.scene.decode import read_header
from splatcli.scene.masks import read_mask
from splatcli.sfm.execution import Execution
from splatcli.sfm.features import SfmImage
from splatcli.sfm.static_masks import find_borders, find_overlays, write_static_masks

WIDTH, HEIGHT, SIDE, COUNT = 200, 150, 60, 12

Pixels = NDArray[np.uint8]


def texture(seed: int, width: int, height: int, cell: int = 5) -> Pixels:
    random = np.random.default_rng(seed).integers(0, 256, (-(-height // cell), -(-width // cell), 3), dtype=np.uint8)
    return np.kron(random, np.ones((cell, cell, 1), np.uint8))[:height, :width]


def frames() -> list[tuple[Pixels, NDArray[np.bool_]]]:
    """Images, and where each shows the patch, whose texture is another one in each."""
    background, made = texture(0, WIDTH, HEIGHT), []
    for index in range(COUNT):
        pixels, patch = background.copy(), np.zeros((HEIGHT, WIDTH), np.bool_)
        left, top = 10 + index * (WIDTH - SIDE - 20) // (COUNT - 1), 20 + 4 * index
        pixels[top : top + SIDE, left : left + SIDE] = texture(1 + index, SIDE, SIDE)
        patch[top : top + SIDE, left : left + SIDE] = True
        made.append((pixels, patch))
    return made


def saved(folder: Path, images: list[Pixels], orientation: int = 1) -> list[SfmImage]:
    """The images as PNG files that are upright by EXIF's ``orientation``."""
    undo = {1: lambda p: p, 6: lambda p: np.rot90(p), 5: lambda p: p.transpose(1, 0, 2)}
    exif = Image.Exif()
    exif[0x0112] = orientation
    folder.mkdir()
    found = []
    for index, pixels in enumerate(images):
        name = f"{index:02d}.png"
        Image.fromarray(np.ascontiguousarray(undo[orientation](pixels))).save(folder / name, exif=exif)
        found.append(SfmImage.of(name, folder, read_header(folder / name)))
    return found


def places(*boxes: tuple[int, int, int, int]) -> NDArray[np.float32]:
    """Features in boxes of left, top, right, bottom: nine each."""
    grids = [
        np.stack(np.meshgrid(np.linspace(a, c, 3), np.linspace(b, d, 3)), axis=-1).reshape(-1, 2)
        for a, b, c, d in boxes
    ]
    return np.concatenate(grids).astype(np.float32)


def reports(phase: str, done: int, total: int) -> None:
    assert phase == "masks"
    assert 0 < done <= total


EXECUTION, ONE_THREAD = Execution(num_threads=2, listener=reports), Execution(listener=reports)


@pytest.mark.parametrize("orientation", [1, 5, 6])
def test_the_background_is_hidden_and_what_moves_is_not(tmp_path: Path, orientation: int) -> None:
    made = frames()
    images = saved(tmp_path / "images", [pixels for pixels, _ in made], orientation)
    assert {(image.width, image.height) for image in images} == {(WIDTH, HEIGHT)}
    where = {(WIDTH, HEIGHT): places((2, 2, WIDTH - 3, HEIGHT - 3))}
    assert write_static_masks(images, where, tmp_path / "masks", EXECUTION) == COUNT
    for image, (_, patch) in zip(images, made, strict=True):
        mask = tmp_path / "masks" / f"{image.name}.png"
        again = SfmImage.of(image.name, tmp_path / "images", read_header(image.path), mask)
        hidden = read_mask(mask, again.mask_orientation)
        assert hidden.shape == patch.shape
        assert hidden[~patch].mean() > 0.97
        assert hidden[patch].mean() < 0.03


def test_only_regions_with_features_that_do_not_move_are_hidden(tmp_path: Path) -> None:
    """The same white above in all images is a sky, until features say otherwise."""
    logo = texture(99, 40, 30)
    pixels = [texture(index, WIDTH, HEIGHT) for index in range(COUNT)]
    for one in pixels:
        one[:40], one[100:130, 20:60] = 250, logo
    images = saved(tmp_path / "images", pixels)
    logo_place = {(WIDTH, HEIGHT): places((24, 104, 55, 125))}
    assert write_static_masks(images, logo_place, tmp_path / "masks", ONE_THREAD) == COUNT
    for image in images:
        hidden = read_mask(tmp_path / "masks" / f"{image.name}.png", 1)
        assert hidden[100:130, 20:60].mean() > 0.9
        hidden[98:132, 18:62] = False
        assert not hidden.any()


def test_images_of_another_size_and_without_regions_show_all(tmp_path: Path) -> None:
    still, moving = frames(), [texture(50 + index, 90, 120) for index in range(4)]
    images = saved(tmp_path / "still", [pixels for pixels, _ in still])
    others = [
        SfmImage(f"more/{one.name}", one.path, 1, one.width, one.height) for one in saved(tmp_path / "moving", moving)
    ]
    where = {(WIDTH, HEIGHT): places((2, 2, WIDTH - 3, HEIGHT - 3))}
    assert write_static_masks([*images, *others], where, tmp_path / "masks", ONE_THREAD) == COUNT + 4
    for one in others:
        assert not read_mask(tmp_path / "masks" / f"{one.name}.png", 1).any()
    assert write_static_masks(others, {(90, 120): places((2, 2, 80, 100))}, tmp_path / "none", ONE_THREAD) == 0
    assert not (tmp_path / "none").exists()


def test_borders_that_only_some_images_have_are_found(tmp_path: Path) -> None:
    """Portraits among landscapes on one canvas: bars at the sides of every second image; one is dark at an edge."""
    pixels = [texture(index, WIDTH, HEIGHT) for index in range(18)]
    for index, one in enumerate(pixels):
        if index % 2:
            one[:, :20] = one[:, -20:] = 0
    pixels[4][:50] = 0
    images = saved(tmp_path / "images", pixels)
    found = find_borders(images, 2)
    assert set(found) == {image.name for image in images[1::2]}
    for border in found.values():
        assert border[:2] == (0, 0)
        assert 20 <= border[2] <= 24
        assert 20 <= border[3] <= 24
    # Seven are too few to be sure, and so are groups of borders that differ.
    assert find_borders(images[:14], 2) == {}
    for index, one in enumerate(pixels):
        one[:, : 5 * index] = 0
    assert find_borders(saved(tmp_path / "others", pixels)) == {}


def dated(pixels: Pixels, text: str, *, size: int = 12) -> Pixels:
    """A picture with small letters at the bottom, as cameras draw a date."""
    picture = Image.fromarray(pixels)
    font = ImageFont.load_default(size=size)
    ImageDraw.Draw(picture).text((WIDTH - 8 * size, HEIGHT - 1.5 * size), text, (255, 150, 40), font)
    return np.asarray(picture)


def test_a_date_before_what_moves_is_found_and_hidden_with_the_seconds_that_change(tmp_path: Path) -> None:
    smooth = [texture(index, WIDTH, HEIGHT, 20) for index in range(14)]
    letters = [dated(np.zeros((HEIGHT, WIDTH, 3), np.uint8), f"5/12 10:{index:02d}") for index in range(14)]
    images = saved(tmp_path / "images", [dated(one, f"5/12 10:{index:02d}") for index, one in enumerate(smooth)])
    found = find_overlays(images, {}, 2)
    assert set(found) == {(WIDTH, HEIGHT)}
    assert write_static_masks(images, {}, tmp_path / "masks", EXECUTION, found) == 14
    for image, drawn in zip(images, letters, strict=True):
        hidden = read_mask(tmp_path / "masks" / f"{image.name}.png", 1)
        assert hidden[drawn.max(axis=2) > 0].all()
        assert hidden.mean() < 0.15
    # Fewer images may have as much in common because they are near each other.
    assert find_overlays(images[:11], {}) == {}


def test_what_is_alike_in_all_images_and_not_drawn_on_them_is_no_overlay(tmp_path: Path) -> None:
    """A horizon below a white sky, the edge of a table, a camera that stands, and the background of a turntable."""
    moving = [texture(index, WIDTH, HEIGHT, 20) for index in range(24)]
    horizon, table, turntable = ([one.copy() for one in moving] for _ in range(3))
    for index in range(24):
        horizon[index] //= 4
        horizon[index][: HEIGHT // 2] = 250
        table[index] //= 4
        table[index][-10:] += 150
        turntable[index] = texture(99, WIDTH, HEIGHT)
        turntable[index][40:110, 60:140] = moving[index][40:110, 60:140]
    captures = {"moving": moving, "horizon": horizon, "table": table, "stands": moving[:1] * 24, "turntable": turntable}
    everywhere = {(WIDTH, HEIGHT): places((2, 2, 40, 140))}
    for name, pixels in captures.items():
        images = saved(tmp_path / name, pixels)
        assert find_overlays(images, {}) == {}, name
        assert find_overlays(images, everywhere) == {}, name


def test_a_border_of_one_colour_with_text_is_hidden_whole(tmp_path: Path) -> None:
    """As phones frame photos with their model and the exposure."""
    pixels = [texture(index, WIDTH, HEIGHT, 20) // 2 for index in range(14)]
    for index, one in enumerate(pixels):
        one[-24:] = 255
        one[-24:] = 255 - dated(np.zeros_like(one), f"1/{60 + index} ISO", size=10)[-24:]
    images = saved(tmp_path / "images", pixels)
    (hidden,) = find_overlays(images, {}).values()
    assert hidden[-24:].all()
    assert not hidden[: HEIGHT - 30].any()
