"""Relative depth maps: the output of a network for single images, brought to scene units by the SfM points.

Such a network (MiDaS, Depth Anything, Marigold) knows depth, or inverse depth, up to a scale and a shift of each image.
Both are fitted here, to the depths of the points whose tracks name the image. No file has to say which of the two a map
holds: the kind that fits more images is taken for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from splatcli.errors import SceneError
from splatcli.progress import track
from splatcli.reproducible import tree_sum
from splatcli.scene.depth_maps import KnownDepths, RelativeFit
from splatcli.scene.images import ImageStore
from splatcli.scene.points import WITH_TRACKS
from splatcli.sizes import listed

#: Points that an image needs for a fit of two numbers that a few wrong points do not decide.
MIN_POINTS = 16
#: A map whose median relative error at the points is larger says nothing about its image.
MAX_ERROR = 0.3
#: ... and so does one whose error is a larger part of that of one depth for the whole image.
MAX_SHARE = 0.7
#: Rounds of the reweighted fit; the largest change after them is far below the noise of any map.
_ROUNDS = 30
#: Fitted depths below this part of the median depth of the points weigh no more than it.
_LEAST_DEPTH = 0.01


class NoTracksError(SceneError):
    """A scene with relative depth maps has no points with tracks."""


@dataclass(frozen=True, slots=True)
class _Fit:
    """One image's fit, and the median over its points of |fitted depth / depth - 1|."""

    fit: RelativeFit
    error: float


def fit_relative_depths(
    store: ImageStore, known: Sequence[KnownDepths] | None, file: Path, notes: list[str]
) -> ImageStore:
    """Return the store with relative maps in scene units; maps that do not fit their image's points are left out.

    known: the depths of points that each image of the store sees, if they have tracks.
    file: the file that describes the views.

    Raises NoTracksError without ``known``, SceneError for a map that cannot be read, and where none fits.
    """
    if known is None:
        raise NoTracksError(
            "has no points with tracks, to which relative depth maps could be fitted",
            where=file,
            remedy=f"use {WITH_TRACKS}; or depth maps in scene units",
        )
    with_map = [i for i, source in enumerate(store.sources) if source.depth is not None]
    fits: list[list[_Fit | None]] = [[], []]
    for i in track(with_map, "fitting depth maps", len(with_map)):
        values = store.relative_depth(i).reshape(-1)[known[i].pixels].astype(np.float64)
        there = np.isfinite(values)
        for inverse in (True, False):
            fits[inverse].append(_fit(values[there], known[i].depths[there], inverse=inverse))
    counts = [sum(fit is not None for fit in kind) for kind in fits]
    if not any(counts):
        fewest = min((len(known[i].pixels) for i in with_map), default=0)
        raise SceneError(
            f"none of {len(with_map)} relative depth maps fits the SfM points of its image",
            where=file,
            remedy=f"an image needs {MIN_POINTS} points with tracks (the fewest here: {fewest}), and a map that grows "
            "with depth or with inverse depth; colour pictures of depth do not",
        )
    errors = [_median([fit.error for fit in kind if fit is not None]) for kind in fits]
    inverse = counts[1] > counts[0] or (counts[1] == counts[0] and errors[1] <= errors[0])
    sources = list(store.sources)
    without = []
    for i, fit in zip(with_map, fits[inverse], strict=True):
        depth = sources[i].depth
        assert depth is not None
        if fit is None:
            without.append(sources[i].camera.name)
        sources[i] = replace(sources[i], depth=None if fit is None else replace(depth, fit=fit.fit))
    notes.append(
        f"{counts[inverse]} of {len(with_map)} relative depth maps hold {'inverse depth' if inverse else 'depth'}, and "
        f"are fitted to the SfM points: median error {errors[inverse]:.1%}"
    )
    if without:
        notes.append(
            f"{len(without)} depth maps do not fit the points of their images and are not used: {listed(without, 3)}"
        )
    return store.of(sources)


def _fit(values: NDArray[np.float64], depths: NDArray[np.float64], *, inverse: bool) -> _Fit | None:
    """Fit scale and shift of one image by least absolute deviations of inverse depth; None where they do not fit.

    values, depths: [S] the map, and camera-space z, at S pixels.
    """
    if len(values) < MIN_POINTS:
        return None
    x, z = torch.from_numpy(values), torch.from_numpy(depths)
    y = 1.0 / z if inverse else z
    floor = 1e-6 * float(tree_sum(y.abs())) / len(y)
    least = _LEAST_DEPTH * float(z.median())
    unit = weight = torch.ones_like(y)
    scale = shift = 0.0
    fitted = y
    for number in range(_ROUNDS if inverse else 2 * _ROUNDS):
        total, sx, sy = (float(tree_sum(weight * part)) for part in (torch.ones_like(x), x, y))
        dx = x - sx / total
        square = float(tree_sum(weight * dx * dx))
        if not square > 0.0:
            return None  # a map of one value
        scale = float(tree_sum(weight * dx * y)) / square
        shift = (sy - scale * sx) / total
        fitted = scale * x + shift
        if number + 1 >= _ROUNDS and not inverse:
            # What an error of depth is in inverse depth. By the fitted depth, since a point that is much too near would
            # decide by its own; so the rounds before have to know it.
            unit = 1.0 / fitted.clamp_min(least).square()
        weight = unit / (fitted - y).abs().clamp_min(floor)
    fit = RelativeFit(inverse, scale, shift, 0.5 / float(z.max()) if inverse else 2.0 * float(z.max()))
    error = float(((y / fitted if inverse else fitted / y) - 1.0).abs().median())
    alone = float((z / z.median() - 1.0).abs().median())
    return _Fit(fit, error) if scale > 0.0 and error <= min(MAX_ERROR, MAX_SHARE * alone) else None


def _median(values: list[float]) -> float:
    return float(np.median(values)) if values else float("inf")
