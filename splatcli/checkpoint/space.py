"""Are these numbers still logarithms and logits? Tell activated parameters from raw ones, and refuse in doubt.

exp(exp(s)) is at least 1 for every s: a model whose scales were activated before they were stored turns into
Gaussians of a whole scene unit and more, which cover every tile and exhaust any memory. The values alone rarely
prove the space; their relation to the distance between neighbours does, in any unit of length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from splatcli.config import Config
from splatcli.gaussians import Gaussians

#: Raw is certain when it explains the neighbours' distances within one nat and better than activated by two.
#: Measured on 320 synthetic scenes: no activated model passes; looser margins let 15 to 24 of them through.
RAW_ERROR_BELOW = 1.0
RAW_BETTER_BY = 2.0
#: Activated is clear when it explains them better by a nat. Half a nat would refuse raw scenes whose Gaussians are all
#: several times larger than the distances between them, in units in which all of these exceed 1.
ACTIVATED_BETTER_BY = 1.0
#: Fewer Gaussians have no typical neighbour distance.
MIN_COUNT = 100
#: A logit lies in (0, 1) with probability 0.155, so eight of them do with 3e-7.
MIN_OPACITIES = 8
_QUERIES = 20_000
_TREE_POINTS = 1_000_000

Array = NDArray[np.float32]


class Space(Enum):
    RAW = "raw"
    ACTIVATED = "activated"
    UNSURE = "unsure"


@dataclass(frozen=True, slots=True)
class ScaleVerdict:
    """What the stored scales seem to be.

    median: of the stored values. neighbour: median distance to the nearest other position, scene units.
    raw_error, activated_error: by how many nats each reading misses that distance.
    The last three are NaN when they were not needed, or there is no such distance.
    """

    space: Space
    median: float
    neighbour: float = math.nan
    raw_error: float = math.nan
    activated_error: float = math.nan


@dataclass(frozen=True, slots=True)
class Judgement:
    """What stored parameters seem to be, and on what grounds.

    evidence: a sentence on the scales and one on the opacities.
    problem: why they must not be taken for raw ones, as a sentence; None when they may.
    """

    scales: Space
    opacities: Space
    evidence: tuple[str, str]
    problem: str | None

    @property
    def space(self) -> Space:
        """Of the two together: ACTIVATED when one of them is, RAW when both are."""
        found = {self.scales, self.opacities}
        return next(space for space in (Space.ACTIVATED, Space.UNSURE, Space.RAW) if space in found)


def judge(means: Array, scales: Array, opacities: Array, *, declared: bool) -> Judgement:
    """The space of stored parameters; refuses unless sure.

    means: [N, 3] scene units. scales: [N, 3], opacities: [N], as stored. All finite.
    declared: the file itself says that its values are raw (our manifest, our PLY comment). Doubt then goes to the
        file, since a scene in millimetres may have no log-scale below zero; clear evidence still refuses.
    """
    verdict, opacity = judge_scales(means, scales), judge_opacities(opacities)
    evidence = (_scale_evidence(verdict, scales), _opacity_evidence(opacity, opacities))
    problem = None
    if verdict.space is Space.ACTIVATED or (verdict.space is Space.UNSURE and not declared):
        problem = f"{evidence[0]}; log-scales are expected, and activating them twice would give huge Gaussians"
    elif opacity is Space.ACTIVATED or (opacity is Space.UNSURE and not declared):
        problem = f"{evidence[1]}; logits are expected"
    return Judgement(verdict.space, opacity, evidence, problem)


def judge_scales(means: Array, scales: Array) -> ScaleVerdict:
    """The space of stored scales: RAW = logarithms, ACTIVATED = standard deviations.

    means: [N, 3] scene units. scales: [N, 3] as stored, finite.
    One negative value proves logarithms. Else each hypothesis predicts the size of a Gaussian, and sizes follow
    the distance to the nearest neighbour; the errors are medians, in nats. Deterministic.
    """
    if scales.size == 0 or bool((scales < 0).any()):
        return ScaleVerdict(Space.RAW, float(np.median(scales)) if scales.size else 0.0)
    median = float(np.median(scales))
    distances = _neighbour_distances(means) if len(means) >= MIN_COUNT else np.empty((0, 2))
    if len(distances) < MIN_COUNT:
        return ScaleVerdict(Space.UNSURE, median)
    rows, log_distance = distances[:, 0].astype(np.int64), np.log(distances[:, 1])
    stored = scales[rows].astype(np.float64)
    raw_error = abs(float(np.median(stored.mean(axis=1) - log_distance)))
    logs = np.log(np.maximum(stored, np.finfo(np.float32).tiny))
    activated_error = abs(float(np.median(logs.mean(axis=1) - log_distance)))
    if raw_error < RAW_ERROR_BELOW and activated_error - raw_error > RAW_BETTER_BY:
        space = Space.RAW
    elif raw_error - activated_error > ACTIVATED_BETTER_BY:
        space = Space.ACTIVATED
    else:
        space = Space.UNSURE
    return ScaleVerdict(space, median, float(np.exp(np.median(log_distance))), raw_error, activated_error)


def judge_opacities(opacities: Array) -> Space:
    """The space of stored opacities, [N], finite: RAW = logits, ACTIVATED = values from 0 to 1.

    Both ends count: a sigmoid in float32 reaches them. One constant for all may be an initial logit and proves nothing,
    but for 0, the logit of an initial opacity of a half.
    """
    if not opacities.size:
        return Space.RAW
    low, high = float(opacities.min()), float(opacities.max())
    if low < 0 or high > 1 or low == high == 0:
        return Space.RAW
    return Space.ACTIVATED if low < high and opacities.size >= MIN_OPACITIES else Space.UNSURE


def space_problem(means: Array, scales: Array, opacities: Array, *, declared: bool) -> str | None:
    """Why the parameters must not be taken for raw ones, as a sentence; None when they may. See ``judge``."""
    return judge(means, scales, opacities, declared=declared).problem


def checkpoint_space_problem(gaussians: Gaussians, config: Config) -> str | None:
    """``space_problem`` for the state of a run, whose space is declared and whose initial opacity is known.

    Logits that start inside (0, 1), as they do for an initial opacity between 0.5 and 0.73, prove nothing.
    """
    opacity = config.model.init_opacity
    tell_tale = not 0 < math.log(opacity / (1 - opacity)) < 1
    means, scales, opacities = (
        tensor.detach().cpu().numpy() for tensor in (gaussians.means, gaussians.log_scales, gaussians.logit_opacities)
    )
    return space_problem(means, scales, opacities if tell_tale else opacities[:0], declared=True)


def _scale_evidence(verdict: ScaleVerdict, scales: Array) -> str:
    negative = int((scales < 0).sum())
    if negative:
        return f"scales are logarithms ({negative:,} of {scales.size:,} values are below 0)"
    if not scales.size:
        return "there are no scales"
    near = "" if np.isnan(verdict.neighbour) else f"; nearest-neighbour distance {verdict.neighbour:.4g}"
    look = {
        Space.RAW: "look like logarithms",
        Space.ACTIVATED: "look already activated",
        Space.UNSURE: "may be activated already",
    }[verdict.space]
    return f"scales {look} (all {scales.size:,} values >= 0, median {verdict.median:.4g}{near})"


def _opacity_evidence(space: Space, opacities: Array) -> str:
    if not opacities.size:
        return "there are no opacities"
    low, high = float(opacities.min()), float(opacities.max())
    if space is Space.RAW:
        return f"opacities are logits ({low:.4g} to {high:.4g})"
    look = "look already activated" if space is Space.ACTIVATED else "may be activated already"
    spread = f"median {float(np.median(opacities)):.4g}" if low < high else f"each {low:.4g}"
    return f"opacities {look} (all {opacities.size:,} values between 0 and 1, {spread})"


def _neighbour_distances(means: Array) -> NDArray[np.float64]:
    """[M, 2] rows of (index, distance to the nearest other position) for an even sample of the Gaussians.

    Clones sit exactly on their origin, hence the nearest *other* position; rows without one are left out.
    """
    count = len(means)
    # An even stride keeps it deterministic; a thinned tree stretches distances, by its cube root for a volume.
    thinning = -(-count // _TREE_POINTS)
    points = np.unique(means[::thinning].astype(np.float64), axis=0)
    if len(points) < 2:
        return np.empty((0, 2))
    rows = np.unique(np.linspace(0, count - 1, min(count, _QUERIES)).astype(np.int64))
    distance, _ = cKDTree(points).query(means[rows].astype(np.float64), k=2)
    # On a tree point the first neighbour is the point itself; off it (thinned away) the first is already another.
    nearest = np.where(distance[:, 0] > 0, distance[:, 0], distance[:, 1]) * thinning ** (-1 / 3)
    kept = np.isfinite(nearest) & (nearest > 0)
    return np.column_stack([rows[kept].astype(np.float64), nearest[kept]])
