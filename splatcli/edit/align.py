"""The similarity that brings one set of Gaussians onto another one of the same place, without cameras.

It is an iterative closest point method. Gaussians are paired where each is the nearest of the other in position and
colour; a robust least squares step on their distances across the surface moves the source; and this repeats while the
distance up to which a pair counts shrinks. No start is known, so many are tried with few Gaussians, and the best go on
with more: the source as it lies, its principal axes on those of the target in 24 ways, and 60 rotations spread over all
that there are, at three scales. The best fit counts if enough pairs agree, and if no different fit is about as good.

Inside, the middle of a cloud is at 0, and the median distance from it is 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree
from scipy.spatial.transform import Rotation

from splatcli.gaussians import SH_C0, Gaussians
from splatcli.progress import track
from splatcli.similarity import Similarity

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

#: Gaussians of a lower opacity are left out, unless fewer than the least number that can be aligned would be left.
OPAQUE, FEWEST = 0.1, 100
#: Score of a fit that counts, and of a different one as a part of it that makes it ambiguous. Of two trainings of one
#: scene, cropped alike or differently, the best has 0.14 to 0.51 and the next at most 0.62 times that; of different
#: scenes the best has at most 0.01.
LEAST_SCORE, AMBIGUOUS = 0.1, 0.65
#: Each stage: points of a cloud at most, the distances up to which pairs count, and different fits that go on.
_STAGES = (
    (1_000, np.geomspace(0.7, 0.1, 8), 24),
    (1_500, np.geomspace(0.3, 0.08, 12), 6),
    (6_000, np.geomspace(0.15, 0.03, 12), 3),
)
#: The last stage: points of a cloud at most, and the distances up to which pairs count, in spacings of the points.
_LAST, _REACHES = 40_000, np.array([3.0] * 5 + [1.5] * 10)
#: Points of a cloud that are kept at most.
_MOST = 200_000
#: Factors of the ratio of the spreads: those of starts, and bounds of all fits.
_SCALES = (1.0, 0.6, 1.6)
_LEAST_SCALE, _MOST_SCALE = 0.15, 7.0
#: A difference of 1 in a colour is as far as so much distance, or so many times that up to which pairs count.
_COLOUR, _COLOUR_FAR = 0.5, 3.0
#: Fits that differ by less are the same: degrees, factor of the scale, shift. And: a small step from where both lie.
_SAME, _STEP = (10.0, 1.1, 0.1), (30.0, 1.5, 0.5)
#: A fit that is one of several has to come back after a turn by so many degrees, as near as that.
_NUDGE, _BACK = 8.0, (3.0, 1.05, 0.05)
#: Extent of a cloud across its longest axis below which it is a line, as a part of that along it.
_LINE = 0.02
#: Neighbours that show a surface, and the weight of a distance along it, beside 1 across it.
_NEIGHBOURS, _ALONG = 12, 0.1
#: Pairs that agree are so many spacings of the points apart at most.
_AGREE = 3.0
#: Turns the rotations that are spread over all there are away from those between principal axes.
_OBLIQUE = Rotation.from_rotvec([0.5, 0.4, 0.2])


class AlignmentError(ValueError):
    """Two models cannot be aligned; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Alignment:
    """similarity: from the source to the target.

    share: part of the smaller of the two samples that agrees. distance: the median between Gaussians that agree, in
    units of the target.
    """

    similarity: Similarity
    share: float
    distance: float


def align(source: Gaussians, target: Gaussians) -> Alignment:
    """Return the similarity that brings ``source`` onto ``target``, by their opaque Gaussians.

    Of more than 200,000 so many at random are used. Raises AlignmentError where it is not determined.
    """
    one, other = _Cloud.of(source, "the model"), _Cloud.of(target, "the other one")
    as_given = Similarity(one.spread / other.spread, shift=(one.centre - other.centre) / other.spread)
    fits = [_Fit(start) for start in _starts(one, other)] + [_Fit(as_given, given=True)]
    for count, reaches, most in _STAGES:
        pairs = _Pairs(one, other, count)
        fits = _best([_fitted(pairs, fit, reaches) for fit in track(fits, "aligning")], most)
    fewer, pairs = pairs, _Pairs(one, other, _LAST)
    fits = [_fitted(pairs, fit, _REACHES * pairs.spacing(fit.similarity)) for fit in track(fits, "aligning")]
    chosen = _chosen(_best(fits, len(fits)), as_given, fewer)
    distances = pairs.distances(chosen.similarity)
    agree = distances < _AGREE * pairs.spacing(chosen.similarity)
    back = Similarity(1 / one.spread, shift=-one.centre / one.spread)
    return Alignment(
        Similarity(other.spread, shift=other.centre).after(chosen.similarity).after(back),
        float(agree.sum()) / pairs.fewest,
        other.spread * float(np.median(distances[agree])),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Cloud:
    """Opaque Gaussians in random order.

    points: [N, 3], normalised. colours: [N, 3], 0 to 1. centre, spread: the middle of the means and the median distance
    from it, world units. axes: [3, 3], the principal axes in columns.
    """

    points: Floats
    colours: Floats
    centre: Floats
    spread: float
    axes: Floats

    @classmethod
    def of(cls, gaussians: Gaussians, what: str) -> _Cloud:
        """Return the cloud of ``what``, for messages. Raises AlignmentError for too few, a place and a line."""
        rows = np.flatnonzero(gaussians.logit_opacities.numpy() > math.log(OPAQUE / (1 - OPAQUE)))
        rows = rows if len(rows) >= FEWEST else np.arange(len(gaussians))
        if len(rows) < FEWEST:
            raise AlignmentError(f"{what} has {len(rows)} Gaussians, and at least {FEWEST} are needed")
        rows = np.random.default_rng(len(rows)).permutation(rows)[:_MOST]
        means = gaussians.means.numpy()[rows].astype(np.float64)
        colours = np.clip(0.5 + SH_C0 * gaussians.sh0.numpy()[rows].astype(np.float64), 0.0, 1.0)
        centre = np.median(means, axis=0)
        for _ in range(30):
            weights = _weights(means - centre)
            centre = weights @ means / weights.sum()
        spread = float(np.median(np.linalg.norm(means - centre, axis=1)))
        if not spread > 1e-6 * float(np.abs(centre).max()):
            raise AlignmentError(f"the Gaussians of {what} are all at one place")
        points = (means - centre) / spread
        extents, axes = np.linalg.eigh((points * _weights(points)[:, None] ** 2).T @ points)
        if extents[1] < _LINE**2 * extents[2]:
            raise AlignmentError(f"the Gaussians of {what} lie on one line, about which it could turn")
        axes[:, 0] *= np.linalg.det(axes)
        return cls(points, colours, centre, spread, axes)


def _weights(offsets: Floats) -> Floats:
    """Return weights [N] of points by their offsets [N, 3] from the middle: what is far away does not decide."""
    distances = np.linalg.norm(offsets, axis=1)
    return np.asarray(1.0 / (1.0 + (distances / max(float(np.median(distances)), 1e-300)) ** 2))


@dataclass(frozen=True, slots=True, eq=False)
class _Fit:
    """A similarity of two normalised clouds. score: see _Pairs. given: it began where both lie."""

    similarity: Similarity
    score: float = 0.0
    given: bool = False


def _alike(one: Similarity, other: Similarity, limits: tuple[float, float, float]) -> bool:
    angle, factor, shift = limits
    turned = math.degrees(Rotation.from_matrix(one.rotation @ other.rotation.T).magnitude())
    scaled = abs(math.log(one.scale / other.scale))
    return turned < angle and scaled < math.log(factor) and bool(np.linalg.norm(one.shift - other.shift) < shift)


def _best(fits: Sequence[_Fit], most: int) -> list[_Fit]:
    """Return the best of different fits, the best one first, and the one that began where both lie."""
    chosen: list[_Fit] = []
    for fit in sorted((fit for fit in fits if fit.score > 0), key=lambda fit: -fit.score):
        alike = [_alike(fit.similarity, other.similarity, _SAME) for other in chosen]
        if not any(alike) and (len(chosen) < most or fit.given):
            chosen.append(fit)
        elif fit.given and any(alike):
            chosen[alike.index(True)] = replace(chosen[alike.index(True)], given=True)
    return chosen


def _chosen(fits: Sequence[_Fit], as_given: Similarity, pairs: _Pairs) -> _Fit:
    """Return the fit that counts; of several that are about as good, the one near to where both lie.

    pairs: of the stage before the last.

    Raises AlignmentError.
    """
    best = fits[0] if fits else _Fit(as_given)
    if best.score < LEAST_SCORE:
        raise AlignmentError("too few of their Gaussians agree in any position that was tried")
    rivals = [fit for fit in fits if fit.score > AMBIGUOUS * best.score]
    if len(rivals) == 1:
        return best
    near = [fit for fit in rivals if fit.given and _alike(fit.similarity, as_given, _STEP)]
    if not near or not _holds(near[0], pairs):
        raise AlignmentError("it is ambiguous: different positions fit about equally well")
    return near[0]


def _holds(fit: _Fit, pairs: _Pairs) -> bool:
    """Return whether a fit comes back after a small turn about each axis; that of two balls would stay anywhere."""
    for turn in Rotation.from_rotvec(_NUDGE * np.eye(3), degrees=True):
        nudged = Similarity(rotation=turn.as_matrix()).after(fit.similarity)
        if not _alike(_fitted(pairs, _Fit(nudged), _STAGES[-1][1]).similarity, fit.similarity, _BACK):
            return False
    return True


class _Pairs:
    """Pairs of points of two clouds of which each is the nearest of the other, by position and colour.

    Its score of a fit says how much of the smaller cloud agrees, 0 to 1; a pair counts less the farther it is apart.
    """

    def __init__(self, source: _Cloud, target: _Cloud, count: int) -> None:
        """count: points of each cloud at most."""
        self.source, self.target = source.points[:count], target.points[:count]
        self.fewest = min(len(self.source), len(self.target))
        self._colours = source.colours[:count], target.colours[:count]
        self._spacings = _spacing(self.source), _spacing(self.target)
        self._trees: dict[float, tuple[cKDTree, Floats]] = {}
        self._metric = _metric(self.target)

    def find(self, similarity: Similarity, reach: float = 0.0) -> tuple[Indices, Indices, Floats]:
        """Return rows of the source and of the target, and their distances, colours included. reach: see _COLOUR."""
        colour = round(max(_COLOUR, _COLOUR_FAR * reach), 3)
        if colour not in self._trees:
            places = np.hstack([self.target, colour * self._colours[1]])
            self._trees[colour] = cKDTree(places), places
        tree, places = self._trees[colour]
        moved = np.hstack([similarity(self.source), colour * self._colours[0]])
        distances, found = tree.query(moved)
        used = np.unique(found)
        back = np.full(len(places), -1)
        _, back[used] = cKDTree(moved).query(places[used])
        rows = np.flatnonzero(back[found] == np.arange(len(moved)))
        return rows, found[rows], distances[rows]

    def step(self, similarity: Similarity, reach: float) -> Similarity | None:
        """Return the similarity after a Gauss-Newton step; None where it leaves all bounds.

        Distances count across the target's surfaces, and a little along them. reach: up to which pairs count.
        """
        rows, found, distances = self.find(similarity, reach)
        if len(rows) < FEWEST // 10:
            return None
        moved = similarity(self.source[rows])
        gaps = moved - self.target[found]
        weights = (1.0 + (distances / reach) ** 2) ** -2
        middle = weights @ moved / weights.sum()
        x, y, z = arms = (moved - middle).T
        # How the gaps change with a small turn about each axis, the logarithm of the scale, and a shift: [3, 7, N].
        change = np.zeros((3, 7, len(rows)))
        change[1, 0], change[2, 0], change[0, 1], change[2, 1], change[0, 2], change[1, 2] = -z, y, z, -x, -y, x
        change[:, 3], change[:, 4:] = arms, np.eye(3)[:, :, None]
        pulled = np.einsum("nij,jan->ian", self._metric[found] * weights[:, None, None], change)
        size = np.tensordot(pulled, change, ((0, 2), (0, 2)))
        way = -np.linalg.lstsq(size, np.einsum("ian,ni->a", pulled, gaps))[0]
        turn = Rotation.from_rotvec(way[:3] / max(1.0, float(np.linalg.norm(way[:3])))).as_matrix()
        factor = math.exp(min(max(way[3], -0.5), 0.5))
        done = Similarity(factor, turn, middle + way[4:] - factor * turn @ middle).after(similarity)
        return done if _LEAST_SCALE < done.scale < _MOST_SCALE else None

    def distances(self, similarity: Similarity) -> Floats:
        """Return the distances of the pairs in space."""
        rows, found, _ = self.find(similarity)
        return np.asarray(np.linalg.norm(similarity(self.source[rows]) - self.target[found], axis=1))

    def spacing(self, similarity: Similarity) -> float:
        """Return the typical distance of neighbours in the sparser one of the two clouds."""
        return max(self._spacings[1], similarity.scale * self._spacings[0])

    def scored(self, fit: _Fit, similarity: Similarity) -> _Fit:
        """Return a fit with another similarity and the score of that."""
        _, _, distances = self.find(similarity)
        agreement = np.exp(-0.5 * (distances / self.spacing(similarity)) ** 2)
        return replace(fit, similarity=similarity, score=float(agreement.sum()) / self.fewest)


def _spacing(points: Floats) -> float:
    distances, _ = cKDTree(points).query(points, k=2)
    return max(float(np.median(distances[:, 1])), 1e-9)


def _metric(points: Floats) -> Floats:
    """Return [N, 3, 3], by which squared distances from points on surfaces count."""
    _, around = cKDTree(points).query(points, k=_NEIGHBOURS)
    near = points[around] - points[around].mean(axis=1, keepdims=True)
    _, axes = np.linalg.eigh(near.transpose(0, 2, 1) @ near)
    normals = axes[:, :, 0]
    return np.asarray(normals[:, :, None] * normals[:, None, :] + _ALONG * np.eye(3))


def _starts(source: _Cloud, target: _Cloud) -> Iterator[Similarity]:
    turns = [*Rotation.create_group("O"), *(turn * _OBLIQUE for turn in Rotation.create_group("I"))]
    for scale in _SCALES:
        for turn in turns:
            yield Similarity(scale, target.axes @ turn.as_matrix() @ source.axes.T)


def _fitted(pairs: _Pairs, fit: _Fit, reaches: Floats) -> _Fit:
    """Return a fit after an iteration with each of the distances up to which pairs count."""
    similarity = fit.similarity
    for reach in reaches:
        step = pairs.step(similarity, reach)
        if step is None:
            return replace(fit, score=0.0)
        similarity = step
    return pairs.scored(fit, similarity)
