"""Observations of points by images, as other programs' files have them, and the doubt that they cast on points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.camera import product
from splatcli.scene.panorama import places_of
from splatcli.scene.points import OFF, RawPoints, Reprojections, doubt_of, stride
from splatcli.scene.source import View

#: Points whose observations are kept for a comparison, evenly many.
_SAMPLE = 2_000


@dataclass(frozen=True, slots=True, eq=False)
class Observations:
    """Where images see points, as O rows in any order.

    views: [O] int64, indices of the views. points: [O] int64, rows of the points. pixels: [O, 2] float64.
    """

    views: NDArray[np.int64]
    points: NDArray[np.int64]
    pixels: NDArray[np.float64]

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int, float, float]]) -> Observations:
        """Return the observations of tuples: view, point, pixel. Raises ValueError and TypeError for other tuples."""
        table = np.fromiter(rows, np.dtype((np.float64, 4))).astype(np.float64)
        return cls(table[:, 0].astype(np.int64), table[:, 1].astype(np.int64), table[:, 2:])

    def joined(self, other: Observations, before: int) -> Observations:
        """Return these observations and ``other``, whose points come after ``before`` rows."""
        return Observations(
            np.concatenate([self.views, other.views]),
            np.concatenate([self.points, before + other.points]),
            np.concatenate([self.pixels, other.pixels]),
        )


def seen_through(lens: pycolmap.Camera, rays: NDArray[np.float64]) -> tuple[NDArray[np.float64], tuple[float, float]]:
    """Return the pixels [N, 2] where a lens shows ``rays`` [N, 3] of its camera frame, and its principal point.

    A panorama has no principal point; its middle stands for it.
    """
    if lens.is_spherical():
        return places_of(rays, lens.width, lens.height), (lens.width / 2, lens.height / 2)
    return np.asarray(lens.img_from_cam(rays)), (lens.principal_point_x, lens.principal_point_y)


def with_doubt(
    raw: RawPoints, views: Sequence[View], seen: Observations, *, outlier: float = math.inf, off: float = OFF
) -> tuple[RawPoints, Reprojections | None]:
    """Return points with the doubt that their observations cast on them, and some of these; None without any.

    views: with lenses that know their size. outlier: reprojection error in pixels from which the program that wrote
    the points does not count an observation. off: of Reprojections.
    """
    if not len(seen.views):
        return raw, None
    projected, centers = np.full((2, *seen.pixels.shape), np.nan)
    order = np.argsort(seen.views, kind="stable")
    numbers, starts = np.unique(seen.views[order], return_index=True)
    for number, here in zip(numbers.tolist(), np.split(order, starts[1:]), strict=True):
        view, lens = views[number], views[number].lens(0, 0)
        xyz = raw.xyz[seen.points[here]]
        rays = product(xyz, view.viewmat[:3, :3].T) + view.viewmat[:3, 3]
        projected[here], centers[here] = seen_through(lens, rays)
    with np.errstate(all="ignore"):
        errors = np.linalg.norm(projected - seen.pixels, axis=1)
    used = np.isfinite(errors) & (errors <= outlier)
    lengths = np.bincount(seen.points[used], minlength=len(raw.xyz))
    sums = np.bincount(seen.points[used], errors[used], minlength=len(raw.xyz))
    some = seen.points % stride(len(raw.xyz), _SAMPLE) == 0
    kept = Reprojections(
        seen.pixels[some], projected[some], centers[some], np.zeros(0), len(np.unique(seen.points[some])), off
    )
    doubted = replace(raw, doubt=doubt_of(sums / np.maximum(lengths, 1), lengths))
    return doubted, kept if kept.points else None
