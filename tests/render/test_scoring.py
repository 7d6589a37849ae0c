"""Figures beside PSNR and SSIM: what colour correction forgives, and that masks hold for all of them."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import numpy as np
import pytest
from torch import Tensor

from splatcli.render.scoring import GroundTruth, Lpips, means
from splatcli.scene.images import LoadedImage
from tests.train.worlds import MadeImages, made_scene

RNG = np.random.default_rng(3)
PHOTO = RNG.integers(60, 200, (16, 16, 3)).astype(np.uint8)


class MeanDifference:
    """In LPIPS's place."""

    def __call__(self, x: Tensor, y: Tensor) -> float:
        return float((x - y).abs().mean())

    def protocol(self) -> dict[str, str]:
        return {"net": "none"}


def photos(**options: Any) -> GroundTruth:
    return GroundTruth(made_scene(pixels=[PHOTO, PHOTO]), **options)


def name() -> str:
    return made_scene(pixels=[PHOTO, PHOTO]).cameras[0].name


def darker() -> np.ndarray:
    return np.round(PHOTO * np.array([0.5, 0.6, 0.7]) + 10).astype(np.uint8)


def test_only_what_was_asked_for_is_measured() -> None:
    one = photos().compare(name(), PHOTO)
    assert one is not None
    assert list(one.figures) == ["psnr", "ssim"]
    assert photos().protocol() == {}


def test_another_exposure_costs_psnr_and_no_corrected_psnr() -> None:
    one = photos(color_corrected=True).compare(name(), darker())
    assert one is not None
    assert one.figures["psnr"] < 15
    assert one.figures["cc_psnr"] > 45  # what rounding to 8 bits leaves
    assert one.figures["cc_ssim"] > 0.99 > one.figures["ssim"]


def test_lpips_is_measured_before_and_after_correction() -> None:
    lpips = cast(Lpips, MeanDifference())
    measured = photos(color_corrected=True, lpips=lpips)
    one = measured.compare(name(), darker())
    assert one is not None
    assert list(one.figures) == ["psnr", "ssim", "cc_psnr", "cc_ssim", "lpips", "cc_lpips"]
    assert one.figures["lpips"] == pytest.approx(np.abs(PHOTO / 255.0 - darker() / 255.0).mean(), rel=1e-5)
    assert one.figures["cc_lpips"] < 0.01
    assert measured.protocol().keys() == {"color_correction", "lpips"}


def test_masked_junk_changes_no_figure() -> None:
    hidden = np.zeros((16, 16), bool)
    hidden[:6] = True

    class Masked(MadeImages):
        def image(self, i: int) -> LoadedImage:
            return LoadedImage(np.where(hidden[..., None], 0, self.pixels[i]).astype(np.uint8), hidden)

    scene = dataclasses.replace(made_scene(), images=Masked([PHOTO] * 6))
    masked = GroundTruth(scene, color_corrected=True, lpips=cast(Lpips, MeanDifference()))
    render = darker()
    junk = np.where(hidden[..., None], 255 - render, render).astype(np.uint8)
    clean, dirty = (masked.compare(name(), pixels) for pixels in (render, junk))
    assert clean is not None
    assert dirty is not None
    assert clean.figures == dirty.figures
    assert clean.figures["cc_psnr"] > 45
    assert dirty.masked is hidden


def test_means_are_over_views() -> None:
    assert means([{"psnr": 20.0, "lpips": 0.5}, {"psnr": 30.0, "lpips": 0.25}]) == {"psnr": 25.0, "lpips": 0.375}
