"""Comparing renders with the photos of the views that they show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splatcli.render.perceptual import Lpips
from splatcli.scene.scene import Scene
from splatcli.train.events import ViewScore
from splatcli.train.metrics import blackened, color_corrected, psnr, ssim


@dataclass(frozen=True, slots=True)
class Comparison:
    """One render beside its photo, [H, W, 3] uint8 each; index is the view's in its scene.

    hidden: [H, W] bool, what a mask hides; None where nothing is.
    extra: the figures that were asked for beside PSNR and SSIM, by their names.
    """

    index: int
    score: ViewScore
    truth: NDArray[np.uint8]
    pixels: NDArray[np.uint8]
    hidden: NDArray[np.bool_] | None = None
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def figures(self) -> dict[str, float]:
        """All figures by name."""
        return {"psnr": self.score.psnr, "ssim": self.score.ssim, **self.extra}


def means(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean over views, at least one, of each figure."""
    return {name: sum(one[name] for one in figures) / len(figures) for name in figures[0]}


class Photos:
    """The photos of a scene, by the names of their views.

    color_corrected: also compare after the render's colours were fitted to the photo's.
    lpips: also measure with this network.
    """

    def __init__(self, scene: Scene, *, color_corrected: bool = False, lpips: Lpips | None = None) -> None:
        self._scene = scene
        self._index = {camera.name: i for i, camera in enumerate(scene.cameras)}
        self._color_corrected = color_corrected
        self._lpips = lpips

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
        score = ViewScore(name, psnr(shown, seen, hidden), ssim(shown, seen, hidden))
        return Comparison(index, score, truth, pixels, photo.hidden, self._extra(shown, seen, hidden))

    def _extra(self, shown: Tensor, seen: Tensor, hidden: Tensor | None) -> dict[str, float]:
        """What was asked for beside PSNR and SSIM, of two images [H, W, 3] in 0...1."""
        fitted = color_corrected(shown, seen, hidden) if self._color_corrected else None
        extra: dict[str, float] = {}
        if fitted is not None:
            extra |= {"cc_psnr": psnr(fitted, seen, hidden), "cc_ssim": ssim(fitted, seen, hidden)}
        if self._lpips is not None:
            black = blackened(seen, hidden)
            extra["lpips"] = self._lpips(blackened(shown, hidden), black)
            if fitted is not None:
                extra["cc_lpips"] = self._lpips(blackened(fitted, hidden), black)
        return extra

    def protocol(self) -> dict[str, object]:
        """How the extra figures are obtained, in the form of ``train.metrics.protocol``."""
        facts: dict[str, object] = {}
        if self._color_corrected:
            facts["color_correction"] = (
                "cc_*: each view's render, rounded to 8 bits, mapped by the affine 3x4 colour transform that fits its "
                "photo best (least squares over visible pixels), clamped to 0..1, not rounded again"
            )
        if self._lpips is not None:
            facts["lpips"] = self._lpips.protocol()
        return facts
