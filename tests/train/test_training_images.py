"""Photos at a smaller size: made once for each size, in bounded memory."""

from __future__ import annotations

import numpy as np
import torch

from splatcli.train.training_images import REDUCED_IMAGE_SHARE, TrainingImages, reduced, training_image_bytes
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
