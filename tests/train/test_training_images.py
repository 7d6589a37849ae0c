"""Photos at a smaller size: made once for each size, in bounded memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from splatcli.scene.camera import Camera
from splatcli.train.training_images import (
    REDUCED_IMAGE_SHARE,
    TrainingImage,
    TrainingImages,
    reduced,
    training_image_bytes,
)
from tests.train.worlds import MadeImages, made_scene

CPU = torch.device("cpu")


def loads(targets: TrainingImages) -> int:
    images = targets.scene.images
    assert isinstance(images, MadeImages)
    return len(images.loaded)


def test_a_reduced_photo_is_the_mean_of_the_pixels_and_is_made_once_for_each_size() -> None:
    scene = made_scene(size=16)
    targets = TrainingImages(scene, CPU)
    for divisor in (4, 2):
        before = loads(targets)
        for _ in range(3):
            for view in scene.train:
                camera, target = targets.reduced(view, divisor)
                side = 16 // divisor
                blocks = scene.images.load(view).astype(np.float64).reshape(side, divisor, side, divisor, 3)
                assert (camera.width, camera.height) == (side, side)
                assert np.abs(target.pixels.numpy() - blocks.mean(axis=(1, 3))).max() <= 0.5
        looked = 3 * len(scene.train)  # by this test itself
        assert loads(targets) - before - looked == len(scene.train)
    assert targets.reduced(0, 1)[1].pixels.shape == (16, 16, 3)


@pytest.mark.parametrize("divisor", [2, 4, 8, 32])
@pytest.mark.parametrize(("width", "height"), [(37, 30), (36, 41), (31, 29)])
def test_a_reduced_image_of_any_size_shows_what_its_camera_sees(width: int, height: int, divisor: int) -> None:
    """Each pixel of a ramp is that of the whole image in the same direction, and as many steps apart as pixels."""
    camera = Camera("", width, height, 50.0, 60.0, 17.3, 14.1, np.eye(4))
    x, y = np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5)
    ramps = np.stack([6 * x, 6 * y, 3 * x + 3 * y], axis=2)
    small, image = reduced(camera, TrainingImage(torch.from_numpy(ramps).to(torch.uint8), None), divisor)
    assert image.pixels.shape == (small.height, small.width, 3)
    u, v = np.meshgrid(np.arange(small.width) + 0.5, np.arange(small.height) + 0.5)
    u, v = ((u - small.cx) / small.fx * camera.fx + camera.cx, (v - small.cy) / small.fy * camera.fy + camera.cy)
    assert np.abs(image.pixels.numpy() - np.stack([6 * u, 6 * v, 3 * u + 3 * v], axis=2)).max() <= 1.0


def test_whole_photos_are_fetched_ahead_again_when_the_reduced_ones_are_done_with() -> None:
    scene = made_scene(size=16)
    targets, fetched = TrainingImages(scene, CPU), []
    scene.images.prefetch = fetched.append  # type: ignore[method-assign]
    view, other = scene.train[:2]
    targets.reduced(view, 2)
    targets.prefetch([view, other])
    assert fetched == [other]
    targets.reduced(other, 1)
    targets.prefetch([view])
    assert fetched == [other, view]
    assert not targets._reduced


def test_reduced_photos_take_no_more_than_their_share() -> None:
    scene = made_scene(size=16)
    targets = TrainingImages(scene, CPU)
    whole = scene.images.max_bytes()
    for view in (*scene.train, *scene.test):
        targets.reduced(view, 2)
    kept = sum(target.nbytes for _, target in targets._reduced.values())
    assert 0 < kept <= REDUCED_IMAGE_SHARE * whole
    assert training_image_bytes(scene, CPU, None, reduced=True) == int((1.0 + REDUCED_IMAGE_SHARE) * whole)
    assert training_image_bytes(scene, CPU, None) == whole

    scene.images.max_bytes = lambda kept=None: whole // 3  # type: ignore[method-assign]  # as of a small cache
    targets = TrainingImages(scene, CPU)
    before = loads(targets)
    for _ in range(2):
        for view in scene.train:
            again = targets.reduced(view, 2)[1].pixels
            assert torch.equal(again, reduced(scene.cameras[view], targets.load(view), 2)[1].pixels)
    kept = sum(target.nbytes for _, target in targets._reduced.values())
    assert 0 < kept <= REDUCED_IMAGE_SHARE * whole / 3
    assert loads(targets) - before > 3 * len(scene.train)
