"""Comparison of two models, or of a model and photos, view by view.

Views are rendered one at a time. Their figures are kept, their images are not: the views that are shown are rendered
again once all figures are known.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from splatcli.gaussians import Gaussians
from splatcli.render.colour_maps import error_map, mask_grey
from splatcli.render.images import RenderSettings, render_pixels
from splatcli.render.scoring import GroundTruth
from splatcli.scene.camera import Camera
from splatcli.train.image_metrics import psnr, ssim

#: Names of the figures, in their order: of A against the photo, of B against the photo, of A against B.
FIGURES = ("psnr_a", "ssim_a", "psnr_b", "ssim_b", "psnr_ab", "ssim_ab")


@dataclass(frozen=True, slots=True, eq=False)
class Rendered:
    """A model to compare, as it is rendered.

    camera: returns the camera of a view in the model's own frame.
    """

    gaussians: Gaussians
    settings: RenderSettings
    camera: Callable[[Camera], Camera] = field(default=lambda camera: camera)

    def pixels(self, view: Camera) -> NDArray[np.uint8]:
        """Render a view to [H, W, 3] uint8."""
        return render_pixels(self.gaussians, self.camera(view), self.settings)


@dataclass(frozen=True, slots=True)
class ViewFigures:
    """The figures of one view, by their names in FIGURES; those that do not exist are absent."""

    camera: Camera
    figures: dict[str, float]

    @property
    def alike(self) -> float:
        """Return the PSNR of the two images at the slider: A against B, or the one model against the photo."""
        return self.figures["psnr_ab"] if "psnr_ab" in self.figures else self.figures["psnr_a"]

    @property
    def worst(self) -> float:
        """Return the lowest PSNR of a model against the photo; without a photo ``alike``."""
        found = [self.figures[name] for name in ("psnr_a", "psnr_b") if name in self.figures]
        return min(found) if found else self.alike


@dataclass(frozen=True, slots=True, eq=False)
class ViewImages:
    """The images of one view, [H, W, 3] uint8 each, by kind: a, b, difference, photo; those that exist.

    masked: [H, W] bool, the masked pixels of the photo, which are grey there; None without a mask.
    """

    images: dict[str, NDArray[np.uint8]]
    masked: NDArray[np.bool_] | None = None


class Comparer:
    """Compares two models with each other and with the photos, or one model with the photos.

    b: None for one model. ground_truth: None without photos. One of the two is there.
    """

    def __init__(self, a: Rendered, b: Rendered | None, ground_truth: GroundTruth | None) -> None:
        self._models = {"a": a} if b is None else {"a": a, "b": b}
        self._ground_truth = ground_truth

    def images(self, view: Camera) -> ViewImages | None:
        """Return the images of a view; None for one without a photo where there is one model."""
        images = {name: model.pixels(view) for name, model in self._models.items()}
        truth = self._ground_truth
        found = None
        if truth is not None and not truth.is_fully_masked(view.name):
            found = truth.photo(view.name, images["a"].shape)
        if "b" in images:
            images["difference"] = error_map(images["b"], images["a"])
        elif found is None:
            return None
        else:
            images["difference"] = error_map(found.pixels, images["a"], found.masked)
        if found is None:
            return ViewImages(images)
        images["photo"] = mask_grey(found.pixels, found.masked)
        return ViewImages(images, found.masked)


def score(view: Camera, shown: ViewImages) -> ViewFigures:
    """Return the figures of a view.

    Images are 8-bit, so the figures can be recomputed from files. Masked pixels of a photo take no part in the figures
    against it, and do in those of A against B.
    """
    shades = {kind: torch.from_numpy(image.astype(np.float32) / 255.0) for kind, image in shown.images.items()}
    masked = None if shown.masked is None else torch.from_numpy(shown.masked)
    figures: dict[str, float] = {}
    for name, (x, y, mask) in {"a": ("a", "photo", masked), "b": ("b", "photo", masked), "ab": (*"ab", None)}.items():
        if x in shades and y in shades:
            figures[f"psnr_{name}"] = psnr(shades[x], shades[y], mask)
            figures[f"ssim_{name}"] = ssim(shades[x], shades[y], mask)
    return ViewFigures(view, figures)


def mean_figures(views: Sequence[ViewFigures]) -> dict[str, float]:
    """Return the mean of each figure over the views that have it."""
    found = {name: [view.figures[name] for view in views if name in view.figures] for name in FIGURES}
    return {name: sum(values) / len(values) for name, values in found.items() if values}


def choose(views: Sequence[ViewFigures], most: int) -> list[tuple[ViewFigures, str]]:
    """Return at most ``most`` of the views to show, the least alike first, each with the reason.

    Of more views they are the median, and in turn the least alike and the worst against the photos.
    """
    by_likeness = sorted(views, key=lambda view: (view.alike, view.camera.name))
    if len(views) <= most:
        return [(view, "") for view in by_likeness]
    middle = statistics.median_low(view.alike for view in views)
    median = next(view for view in by_likeness if view.alike == middle)
    by_photo = sorted(views, key=lambda view: (view.worst, view.camera.name))
    rankings = {"largest difference": by_likeness, "worst": by_photo}
    reasons = {median.camera.name: "median"} if most > 1 else {}
    for rank in range(len(views)):
        for reason, ranking in rankings.items():
            if len(reasons) < most:
                reasons.setdefault(ranking[rank].camera.name, reason)
    return [(view, reasons[view.camera.name]) for view in by_likeness if view.camera.name in reasons]


def own_cameras(cameras: Iterable[Camera], shift: NDArray[np.float64]) -> Callable[[Camera], Camera]:
    """Return the function from a view to the camera of that name in the frame of another run, at the view's size.

    Where that is of another model, only its pose counts.

    cameras: of the other run. shift: [3], what is added to coordinates of the view's frame for those of the other one,
    which applies to views that the other run does not have.
    """
    known: Mapping[str, Camera] = {camera.name: camera for camera in cameras}

    def camera_of(view: Camera) -> Camera:
        own = known.get(view.name)
        if own is not None and own.model != view.model:
            return replace(view, viewmat=own.viewmat, near=own.near)
        if own is not None:
            return own if (own.width, own.height) == (view.width, view.height) else own.resized(view.width, view.height)
        viewmat = view.viewmat.copy()
        viewmat[:3, 3] -= viewmat[:3, :3] @ shift
        return replace(view, viewmat=viewmat)

    return camera_of
