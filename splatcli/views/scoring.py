"""Comparing renders with the photos of the views that they show."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from splatcli.scene.scene import Scene
from splatcli.train.events import ViewScore
from splatcli.train.metrics import psnr, ssim


@dataclass(frozen=True, slots=True)
class Comparison:
    """One render beside its photo, [H, W, 3] uint8 each; index is the view's in its scene."""

    index: int
    score: ViewScore
    truth: NDArray[np.uint8]
    pixels: NDArray[np.uint8]


class Photos:
    """The photos of a scene, by the names of their views."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._index = {camera.name: i for i, camera in enumerate(scene.cameras)}

    def hides_all(self, name: str) -> bool:
        """Whether a mask hides the whole photo of view ``name``, so that nothing of it can be compared."""
        index = self._index.get(name)
        if not self._scene.images.masked or index is None or not self._scene.images.has(index):
            return False
        hidden = self._scene.images.photo(index).hidden
        return hidden is not None and bool(hidden.all())

    def compare(self, name: str, pixels: NDArray[np.uint8]) -> Comparison | None:
        """The render of view ``name`` against its photo; None when there is no photo of that view and size.

        Both are 8-bit, as files are, so that anyone can repeat the figures from the PNG.
        """
        index = self._index.get(name)
        if index is None or not self._scene.images.has(index):
            return None
        photo = self._scene.images.photo(index)
        truth = photo.pixels
        if truth.shape != pixels.shape:
            return None
        hidden = None if photo.hidden is None else torch.from_numpy(photo.hidden)
        shown, seen = (torch.from_numpy(array.astype(np.float32) / 255.0) for array in (pixels, truth))
        return Comparison(index, ViewScore(name, psnr(shown, seen, hidden), ssim(shown, seen, hidden)), truth, pixels)
