"""Where images see points, compared with where cameras and poses put these: errors, and which points they doubt."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from splatcli.scene.camera import product
from splatcli.scene.points import OFF, Observations, RawPoints, doubt_of, stride
from splatcli.scene.source import View

#: Points whose observations are kept for a comparison, evenly many.
_SAMPLE = 2_000


@dataclass(frozen=True, slots=True, eq=False)
class ImagePoints:
    """Observations of points, as O rows in any order.

    views: [O] int64, indices of the views. points: [O] int64, rows of the points. pixels: [O, 2] float64.
    """

    views: NDArray[np.int64]
    points: NDArray[np.int64]
    pixels: NDArray[np.float64]

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int, float, float]]) -> ImagePoints:
        """Return those of tuples of a view, a point and a pixel. Raises ValueError and TypeError for other tuples."""
        table = np.fromiter(rows, np.dtype((np.float64, 4))).astype(np.float64)
        return cls(table[:, 0].astype(np.int64), table[:, 1].astype(np.int64), table[:, 2:])

    def joined(self, other: ImagePoints, before: int) -> ImagePoints:
        """Return these and those of points that have ``before`` rows before them."""
        return ImagePoints(
            np.concatenate([self.views, other.views]),
            np.concatenate([self.points, before + other.points]),
            np.concatenate([self.pixels, other.pixels]),
        )


def with_doubt(
    raw: RawPoints, views: Sequence[View], seen: ImagePoints, *, outlier: float = math.inf, off: float = OFF
) -> tuple[RawPoints, Observations | None]:
    """Return points with the doubt that their observations cast on them, and some of these; None without any.

    views: with lenses that know their size. outlier: reprojection error in pixels from which the program that wrote
    the points does not count an observation. off: of Observations.
    """
    if not len(seen.views):
        return raw, None
    projected, centers = np.full((2, *seen.pixels.shape), np.nan)
    order = np.argsort(seen.views, kind="stable")
    numbers, starts = np.unique(seen.views[order], return_index=True)
    for number, here in zip(numbers.tolist(), np.split(order, starts[1:]), strict=True):
        view, lens = views[number], views[number].lens(0, 0)
        xyz = raw.xyz[seen.points[here]]
        projected[here] = lens.img_from_cam(product(xyz, view.viewmat[:3, :3].T) + view.viewmat[:3, 3])
        centers[here] = lens.principal_point_x, lens.principal_point_y
    with np.errstate(all="ignore"):
        errors = np.linalg.norm(projected - seen.pixels, axis=1)
    counted = np.isfinite(errors) & (errors <= outlier)
    lengths = np.bincount(seen.points[counted], minlength=len(raw.xyz))
    sums = np.bincount(seen.points[counted], errors[counted], minlength=len(raw.xyz))
    some = seen.points % stride(len(raw.xyz), _SAMPLE) == 0
    kept = Observations(
        seen.pixels[some], projected[some], centers[some], np.zeros(0), len(np.unique(seen.points[some])), off
    )
    doubted = replace(raw, doubt=doubt_of(sums / np.maximum(lengths, 1), lengths))
    return doubted, kept if kept.points else None
