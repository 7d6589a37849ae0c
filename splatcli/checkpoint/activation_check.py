"""The activation check: whether scales are still logarithms and opacities logits; in doubt it refuses.

exp(exp(s)) is at least 1 for every s: a model whose scales were activated before they were stored turns into
Gaussians of a whole scene unit and more, which cover every tile and exhaust any memory. The values alone rarely
prove the space; their distribution, the scene's extent and the distance between neighbours do, in any unit of length.

Some rows or one axis may be activated and the rest raw. What is activated then gives itself away by one of these:
- exp() and sigmoid() have bounds. Activated values pile up just inside of them, where a raw density is smooth.
- exp() of a large logarithm, taken for a logarithm, is larger than the whole scene.
- Activated values alone are skewed as no logarithms are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import scipy
from numpy.typing import NDArray

from splatcli.config import Config
from splatcli.gaussians import Gaussians
from splatcli.native import abi
from splatcli.rasterizer.context import ISECT_BYTES
from splatcli.reproducible import logit_of
from splatcli.scene.camera import NEAR, Camera

#: Without a negative scale the two readings are scored, in nats (see _reading_cost): the better one is believed when it
#: is better by this much. Measured on models of several programs in 27 units each: none is read wrongly.
BETTER_BY = 1.0
#: A reading is out of the question when the scales of all Gaussians differ by less than this, in nats, or its typical
#: Gaussian is smaller than the scene by more than this. Trained and initial models: 0.3 to 1.8, and 2 to 9.
MIN_SPREAD, MAX_BELOW_EXTENT = 0.15, 11.0
#: The spread of log-scales that is expected.
USUAL_SPREAD = 0.8
#: A reading is out of the question when its typical Gaussian is larger than the scene by this many nats.
MAX_ABOVE_EXTENT = 1.5
#: A Gaussian is outsized when it exceeds the spacing of its neighbourhood by this many nats, or lies this many times
#: the distance from median to 90 % above the median, and then some. Raw models have less than this share of them.
OUTSIZED, OUTSIZED_TIMES, OUTSIZED_SHARE = 4.5, 5.0, 0.003
#: Piles are also looked for among Gaussians that should, by the spacing, be smaller than these log-scales: few of the
#: raw ones there reach 0.
STRATA = (-0.5, -1.0, -2.0)
#: A part of a raw model is no sample of it: it looks activated when that reading is better by this much.
PART_BETTER_BY = 2.0
#: Programs size initial Gaussians by their three nearest neighbours. They did when, of round ones, such a share is
#: within so many nats of one multiple of that distance.
SIZED_SHARE, SIZED_WITHIN = 0.25, 0.002
#: Widths of the intervals beside a bound in which values are counted. There is a pile when they are this many times as
#: many as a density without a jump would have, by so many standard deviations, and made by so many raw values.
PILE_WIDTHS = (0.02, 0.05, 0.1, 0.2, 0.4)
PILE_RATIO, PILE_SIGMAS, PILE_SOURCES = 1.5, 5.0, 5
#: Fewer Gaussians have no typical neighbour distance.
MIN_COUNT = 100
#: A logit lies in (0, 1) with probability 0.155, so eight of them do with 3e-7.
MIN_OPACITIES = 8
#: And of a file that says its values are raw, such a share of all Gaussians: initial Gaussians far from all others, as
#: a young model has them, can begin at a scale of one unit.
DECLARED_PILE_SHARE = 0.003
#: How far rounding may bring a sigmoid, as a share of it. More would not do: of opacities that were stored in bytes, as
#: in most formats, the logit of 128/255 is 2/255 but for 5e-6 of it.
TWIN_WITHIN = 1e-6
_QUERIES = 20_000
_TREE_POINTS = 1_000_000
#: The spacing around a Gaussian is the distance to this neighbour, times its ratio to the nearest 3 on a surface.
_NEIGHBOURS, _EIGHTH_TO_NEAREST = 8, 0.45

Array = NDArray[np.float32]


class Space(Enum):
    """The parameter space of stored values: raw, as logarithms and logits; activated; or unknown."""

    RAW = "raw"
    ACTIVATED = "activated"
    UNSURE = "unsure"


@dataclass(frozen=True, slots=True)
class ScaleCheck:
    """The result of the check of scales.

    median: of the stored values. neighbour: median distance to the nearest other position, scene units.
    raw_error, activated_error: what speaks against each reading, in nats.
    These three are NaN when they were not needed, or there is no such distance.
    part: of partly activated ones, what gave them away.
    """

    space: Space
    median: float
    neighbour: float = math.nan
    raw_error: float = math.nan
    activated_error: float = math.nan
    part: str = ""


@dataclass(frozen=True, slots=True)
class SpaceCheck:
    """The result of the check of scales and opacities.

    evidence: a sentence on the scales and one on the opacities.
    problem: why they must not be taken for raw ones, as a sentence; None when they may.
    partly: some of one table are activated and others raw, so that it can be taken for neither.
    """

    scales: Space
    opacities: Space
    evidence: tuple[str, str]
    problem: str | None
    partly: bool = False

    @property
    def space(self) -> Space:
        """The space of both together: ACTIVATED when one of them is, RAW when both are."""
        found = {self.scales, self.opacities}
        return next(space for space in (Space.ACTIVATED, Space.UNSURE, Space.RAW) if space in found)


@np.errstate(over="ignore", invalid="ignore")  # sums of numbers at the ends of float32
def check_space(means: Array, scales: Array, opacities: Array, *, declared: bool, parts: bool = True) -> SpaceCheck:
    """Return the space of stored parameters; refuses unless sure.

    means: [N, 3] scene units. scales: [N, 3], opacities: [N], as stored. All finite.
    declared: the file itself says that its values are raw (our manifest, our PLY comment). Doubt then goes to the
        file, since a scene in millimetres may have no log-scale below zero; clear evidence still refuses.
    parts: models of which only a part is activated are looked for as well.
    """
    check = check_scales(means, scales, parts=parts, declared=declared)
    opacity = check_opacities(opacities, parts=parts)
    if declared and parts and check.space is Space.ACTIVATED and not check.part:
        # All are positive, as in millimetres: the file's word counts where sizes as a whole speak for logarithms.
        whole = check_scales(means, scales, parts=False)
        check = whole if whole.raw_error < min(whole.activated_error, math.inf) else check
    evidence = (_scale_evidence(check, scales), _opacity_evidence(opacity, opacities))
    problem = None
    if check.space is Space.ACTIVATED or (check.space is Space.UNSURE and not declared):
        problem = f"{evidence[0]}; log-scales are expected, and activating them twice would give huge Gaussians"
    elif opacity is Space.ACTIVATED or (opacity is Space.UNSURE and not declared):
        problem = f"{evidence[1]}; logits are expected"
    mixed = opacity is Space.ACTIVATED and bool(((opacities < 0) | (opacities > 1)).any())
    return SpaceCheck(check.space, opacity, evidence, problem, partly=bool(check.part) or mixed)


@np.errstate(over="ignore", invalid="ignore")  # sums of numbers at the ends of float32
def check_scales(means: Array, scales: Array, *, parts: bool = True, declared: bool = False) -> ScaleCheck:
    """Return the space of stored scales: RAW = logarithms, ACTIVATED = standard deviations, of all or of some.

    means: [N, 3] scene units. scales: [N, 3] as stored, finite. parts, declared: see check_space(). Deterministic.
    """
    negative = scales.size == 0 or bool((scales < 0).any())
    median = float(np.median(scales)) if scales.size else 0.0
    if negative and (not parts or len(means) < MIN_COUNT):
        return ScaleCheck(Space.RAW, median)
    place = _Neighbourhood.of(means) if len(means) >= MIN_COUNT else None
    if place is None:
        return ScaleCheck(Space.RAW if negative else Space.UNSURE, median)
    if parts and (part := _partly_activated(place, scales, DECLARED_PILE_SHARE if declared else 0.0)):
        return ScaleCheck(Space.ACTIVATED, median, place.neighbour, part=part if negative else "")
    if negative:
        return ScaleCheck(Space.RAW, median)
    if (sized := _sized_by_neighbours(place, scales)) is not None:
        space = Space.ACTIVATED if sized else Space.RAW
        return ScaleCheck(space, median, place.neighbour)
    raw_error, activated_error = _reading_costs(place, scales)
    return ScaleCheck(_better(raw_error, activated_error), median, place.neighbour, raw_error, activated_error)


def check_opacities(opacities: Array, *, parts: bool = True) -> Space:
    """Return the space of stored opacities, [N], finite: RAW = logits, ACTIVATED = values in 0...1, of all or some.

    Both ends count: a sigmoid in float32 reaches them. One constant for all may be an initial logit and proves nothing,
    but for 0, the logit of an initial opacity of a half. parts: see check_space().
    """
    if not opacities.size:
        return Space.RAW
    low, high = float(opacities.min()), float(opacities.max())
    if low < 0 or high > 1:
        return Space.ACTIVATED if parts and opacities.size >= MIN_COUNT and _partly_sigmoids(opacities) else Space.RAW
    if low == high == 0:
        return Space.RAW
    return Space.ACTIVATED if low < high and opacities.size >= MIN_OPACITIES else Space.UNSURE


@dataclass(frozen=True, slots=True)
class _Neighbourhood:
    """The positions of Gaussians.

    radius: logarithm of the radius around the middle that holds nine of ten.
    rows: an even sample of them. log_spacing: logarithm of how far apart others are around each of these.
    log_three: logarithm of the root mean square distance to the nearest three.
    neighbour: the median distance to the nearest other, scene units.
    """

    radius: float
    rows: NDArray[np.int64]
    log_spacing: NDArray[np.float64]
    log_three: NDArray[np.float64]
    neighbour: float

    @classmethod
    def of(cls, means: Array) -> _Neighbourhood | None:
        """Return None for Gaussians that are nearly all at one place."""
        rows, nearest, three, spacing = _neighbour_distances(means)
        away = np.linalg.norm(means.astype(np.float64) - np.median(means, axis=0).astype(np.float64), axis=1)
        radius = float(np.quantile(away, 0.9))
        if len(rows) < MIN_COUNT or not radius > 0:
            return None
        return cls(math.log(radius), rows, np.log(spacing), np.log(three), float(np.median(nearest)))

    def only(self, chosen: NDArray[np.bool_]) -> _Neighbourhood:
        """Return the chosen rows, [N] of all Gaussians, alone."""
        kept = chosen[self.rows]
        return _Neighbourhood(
            self.radius, self.rows[kept], self.log_spacing[kept], self.log_three[kept], self.neighbour
        )


def _partly_activated(place: _Neighbourhood, scales: Array, least_share: float) -> str:
    """Return the evidence that some scales are activated; empty without any.

    least_share: of all Gaussians that a pile must be, to count.
    """
    if sized := _sized_by_neighbours(place, scales):
        return f"{sized:,} of {len(place.rows):,} are not logarithms of their neighbours' distance, but that distance"
    exps = np.exp(np.minimum(scales.astype(np.float64), 88.0))
    for axis, other in ((axis, other) for axis in range(3) for other in range(3) if axis != other):
        same = int((np.abs(scales[:, axis] - exps[:, other]) <= 1e-5 * exps[:, other]).sum())
        if same > max(OUTSIZED_SHARE * len(scales), 2):
            return f"scale_{axis} is exp() of scale_{other} in {same:,} of {len(scales):,} Gaussians"
    every = scales.ravel()
    sizes = scales[place.rows].astype(np.float64).max(axis=1) - place.log_spacing
    middle, high = (float(value) for value in np.quantile(sizes, (0.5, 0.9)))
    outsized = int((sizes > min(OUTSIZED, middle + OUTSIZED_TIMES * (high - middle) + 0.5)).sum())
    if outsized > max(OUTSIZED_SHARE * len(sizes), 2):
        return f"taken for logarithms, {outsized:,} of {len(sizes):,} Gaussians are far larger than their surroundings"
    typical = place.log_spacing + float(np.median(scales[place.rows].mean(axis=1) - place.log_spacing))
    strata = [scales, *(scales[place.rows[typical < limit]] for limit in STRATA)]
    for some in strata:
        for name, values in (("scales", some.min(axis=1, initial=np.inf)), *zip(_AXES, some.T, strict=True)):
            pile = _pile(values, math.log, every)
            if pile > least_share * len(scales):
                return f"{pile:,} {name} pile up just above 0, where exp() puts small ones"
    # What is positive by itself: rows, and axes.
    whole: NDArray[np.bool_] = np.all(scales > 0, axis=1)
    if 0.5 <= whole.mean() < 1 and _looks_exponential(place.only(whole), scales):
        return f"the {int(whole.sum()):,} Gaussians whose scales are all positive are spread as exp() would"
    for axis in range(3):
        column = np.repeat(scales[:, axis : axis + 1], 3, axis=1)
        if bool((column > 0).all()) and _looks_exponential(place, column):
            return f"scale_{axis}, which is positive everywhere, is spread as exp() would"
    return ""


def _sized_by_neighbours(place: _Neighbourhood, scales: Array) -> int | None:
    """Return how many Gaussians that were sized by their neighbours store that size and not its logarithm.

    None when they were not sized so, or when that is uncertain.
    """
    stored = scales[place.rows].astype(np.float64)
    if not len(stored) or float(np.median(stored.max(axis=1) - stored.min(axis=1))) > 0:
        return None
    raw = stored[:, 0] - place.log_three
    linear = np.log(np.maximum(stored[:, 0], np.finfo(np.float32).tiny)) - place.log_three
    # What is not positive is no size; each such value is far from all others.
    linear = np.where(stored[:, 0] > 0, linear, -1e6 - np.arange(len(linear)))
    # The reading under which more of them are one multiple of the distance gives the multiple. When there are many
    # under both, but of another one, the sizes or the distances are all the same.
    found_raw, found_linear = _commonest(raw), _commonest(linear)
    share, multiple = max(found_raw, found_linear)
    both = min(found_raw[0], found_linear[0]) > share / 2
    if share <= SIZED_SHARE or (both and abs(found_raw[1] - found_linear[1]) > 10 * SIZED_WITHIN):
        return None
    found = int((np.abs(linear - multiple) < 2 * SIZED_WITHIN).sum())
    if found > max(OUTSIZED_SHARE * len(linear), 2):
        return found
    return 0 if int((np.abs(raw - multiple) < 2 * SIZED_WITHIN).sum()) > SIZED_SHARE * len(raw) else None


def _commonest(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return (share of the values that lie within SIZED_WITHIN of one value, that value)."""
    ordered = np.sort(values)
    inside = np.searchsorted(ordered, ordered + 2 * SIZED_WITHIN, side="right") - np.arange(len(ordered))
    first = int(inside.argmax())
    return float(inside[first]) / len(ordered), float(ordered[first]) + SIZED_WITHIN


#: The words for columns of scales.
_AXES = ("values of scale_0", "values of scale_1", "values of scale_2")


def _looks_exponential(place: _Neighbourhood, scales: Array) -> bool:
    if len(place.rows) < MIN_COUNT:
        return False
    raw_error, activated_error = _reading_costs(place, scales)
    return raw_error - activated_error > PART_BETTER_BY


def _better(raw_error: float, activated_error: float) -> Space:
    if activated_error - raw_error > BETTER_BY:
        return Space.RAW
    return Space.ACTIVATED if raw_error - activated_error > BETTER_BY else Space.UNSURE


def _reading_costs(place: _Neighbourhood, scales: Array) -> tuple[float, float]:
    """Return the costs of reading positive scales as logarithms, and as standard deviations, in nats."""
    stored = scales[place.rows].astype(np.float64)
    logs = np.log(np.maximum(stored, np.finfo(np.float32).tiny))
    round_ones = float(np.median(stored.max(axis=1) - stored.min(axis=1))) == 0
    return _reading_cost(place, stored, round_ones), _reading_cost(place, logs, round_ones)


def _reading_cost(place: _Neighbourhood, logs: NDArray[np.float64], round_ones: bool) -> float:
    """Return the cost of ``logs``, [M, 3] of the rows of ``place``, as log-scales: their distance from the neighbours'
    distances, twice for Gaussians that are round and so were sized by these; their spread; and their skewness."""
    miss = abs(float(np.median(logs.mean(axis=1) - place.log_spacing)))
    low, middle, high = (float(value) for value in np.quantile(logs, (0.05, 0.5, 0.95)))
    spread = (high - low) / 3.29
    constant = float(logs.min()) == float(logs.max())
    if not constant and (spread < MIN_SPREAD or place.radius - middle > MAX_BELOW_EXTENT):
        return math.inf
    if middle > place.radius + MAX_ABOVE_EXTENT:
        return math.inf
    if constant:
        return 2 * miss
    skew = (high - middle + MIN_SPREAD) / (middle - low + MIN_SPREAD)
    return (2 if round_ones else 1) * miss + abs(math.log(spread / USUAL_SPREAD)) + abs(math.log(skew))


#: exp() of more than this and some leaves float64.
_LARGEST_EXPONENT = 700.0


def _partly_sigmoids(opacities: Array) -> bool:
    """Return whether some values are sigmoids: piled up inside of 0 or 1, or half in between and the rest far away."""
    if _pile(opacities, logit_of, opacities) or _pile(1 - opacities, logit_of, -opacities):
        return True
    # An initial opacity is one number, and its sigmoid is another one.
    values, counts = np.unique(opacities, return_counts=True)
    often = float(values[counts.argmax()])
    if counts.max() >= MIN_COUNT:
        twins = [1 / (1 + math.exp(min(-often, _LARGEST_EXPONENT)))] + ([logit_of(often)] if 0 < often < 1 else [])
        if any(bool((np.abs(opacities - twin) <= TWIN_WITHIN * abs(twin)).any()) for twin in twins):
            return True
    inside = (opacities >= 0) & (opacities <= 1)
    outside = opacities[~inside]
    away = np.maximum(outside - 1, -outside)
    return len(outside) >= PILE_SOURCES and inside.mean() > 0.5 and float(np.median(away)) > 1.5


def _pile(values: Array, inverse: Callable[[float], float], sources: Array) -> int:
    """Return the surplus of values just above 0, where an activation puts what ``inverse`` takes to below 0.

    sources: raw values, and others, that the activated ones may have come from. Equal values count once. A density
    without a jump, log-concave or flat, has in [0, c) no more than it would by its course in [-2c, 0).
    """
    values, sources = np.unique(values), np.unique(sources)

    def count(of: Array, low: float, high: float) -> int:
        first, last = np.searchsorted(of, np.array([low, high], of.dtype))
        return int(last - first)

    for width in PILE_WIDTHS:
        above = count(values, float(np.finfo(np.float32).tiny), width)
        near, far = count(values, -width, 0.0), count(values, -2 * width, -width)
        expected = max(near, near * near / max(far, 1), 1.0)
        made_of = int(np.searchsorted(sources, inverse(width)))
        deviation = math.sqrt(above + near * max(1.0, near / max(far, 1)) ** 2)
        if made_of >= PILE_SOURCES and above > PILE_RATIO * expected and above - expected > PILE_SIGMAS * deviation:
            return int(above - expected)
    return 0


def checkpoint_space_problem(gaussians: Gaussians, config: Config) -> str | None:
    """Return why the state of a run must not be taken for raw; its space is declared, its initial opacity known.

    Logits that start inside (0, 1), as they do for an initial opacity between 0.5 and 0.73, prove nothing. Parts are
    not judged: digests guard them, and whatever becomes of a model in training has to be saved.
    """
    opacity = config.model.init_opacity
    tell_tale = not 0 < math.log(opacity / (1 - opacity)) < 1
    means, scales, opacities = (
        tensor.detach().cpu().numpy() for tensor in (gaussians.means, gaussians.log_scales, gaussians.logit_opacities)
    )
    return check_space(means, scales, opacities if tell_tale else opacities[:0], declared=True, parts=False).problem


def _scale_evidence(check: ScaleCheck, scales: Array) -> str:
    if check.part:
        return f"scales look partly activated ({check.part})"
    negative = int((scales < 0).sum())
    if negative:
        return f"scales are logarithms ({negative:,} of {scales.size:,} values are below 0)"
    if not scales.size:
        return "there are no scales"
    near = "" if np.isnan(check.neighbour) else f"; nearest-neighbour distance {check.neighbour:.4g}"
    look = {
        Space.RAW: "look like logarithms",
        Space.ACTIVATED: "look already activated",
        Space.UNSURE: "may be activated already",
    }[check.space]
    return f"scales {look} (all {scales.size:,} values >= 0, median {check.median:.4g}{near})"


def _opacity_evidence(space: Space, opacities: Array) -> str:
    if not opacities.size:
        return "there are no opacities"
    low, high = float(opacities.min()), float(opacities.max())
    if space is Space.RAW:
        return f"opacities are logits ({low:.4g} to {high:.4g})"
    if low < 0 or high > 1:
        inside = int(((opacities >= 0) & (opacities <= 1)).sum())
        return f"opacities look partly activated ({inside:,} of {opacities.size:,} values between 0 and 1)"
    look = "look already activated" if space is Space.ACTIVATED else "may be activated already"
    spread = f"median {float(np.median(opacities)):.4g}" if low < high else f"each {low:.4g}"
    return f"opacities {look} (all {opacities.size:,} values between 0 and 1, {spread})"


def _neighbour_distances(
    means: Array,
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return (rows, distance to the nearest other position, that to the nearest three, spacing), of an even sample.

    Clones sit exactly on their origin, hence the nearest *other* position, and near it, hence the spacing: the distance
    to the eighth, scaled so that it is about that to the nearest three. Rows without one are left out.
    """
    count = len(means)
    # An even stride keeps it deterministic; a thinned tree stretches distances, by its cube root for a volume.
    thinning = -(-count // _TREE_POINTS)
    points = np.unique(means[::thinning].astype(np.float64), axis=0)
    if len(points) < 2:
        return np.empty(0, np.int64), np.empty(0), np.empty(0), np.empty(0)
    rows = np.unique(np.linspace(0, count - 1, min(count, _QUERIES)).astype(np.int64))
    distance, _ = scipy.spatial.cKDTree(points).query(
        means[rows].astype(np.float64), k=min(_NEIGHBOURS + 1, len(points))
    )
    # On a tree point the first neighbour is the point itself; off it (thinned away) the first is already another.
    distance = np.where(distance[:, :1] > 0, distance[:, :-1], distance[:, 1:])
    nearest, spacing = distance[:, 0], distance[:, -1] * _EIGHTH_TO_NEAREST
    three = np.sqrt((distance[:, :3] ** 2).mean(axis=1))
    kept = np.isfinite(nearest) & (nearest > 0) & np.isfinite(spacing) & (spacing > 0)
    scale = thinning ** (-1 / 3)
    return rows[kept], nearest[kept] * scale, three[kept] * scale, spacing[kept] * scale


# --- the memory that scales would cost that are activated twice: the tile intersections of one view, in bytes

#: A training step also keeps gradients for each tile intersection.
STEP_ISECT_BYTES = ISECT_BYTES + 4 * abi.ISECT_GRAD
#: More cameras or Gaussians than these are sampled evenly: a message needs the size, not the digits.
_CAMERAS = 8
_GAUSSIANS = 200_000
#: The rasterizer's low-pass filter, px^2, and the radius, in standard deviations, at which an opaque Gaussian falls to
#: the least alpha that counts, 1/255. With a radius of 3, tiny Gaussians reach 3 percent more tiles than predicted.
_BLUR = 0.3
_CUTOFF = math.sqrt(2 * math.log(255))
#: exp() of more is no float32 and covers every tile anyway.
_LARGEST_LOG = 80.0


def predicted_isects(means: Array, log_scales: Array, camera: Camera) -> tuple[int, int]:
    """Return (the most tile intersections of a view, visible Gaussians).

    means: [N, 3] world units. log_scales: [N, 3] as they would be activated. Both finite.
    Each Gaussian is taken for a ball of its largest axis, whose box of tiles is clipped to the image.
    """
    step = -(-len(means) // _GAUSSIANS) or 1
    rotation, translation = camera.viewmat[:3, :3], camera.viewmat[:3, 3]
    seen = means[::step].astype(np.float64) @ rotation.T + translation
    in_front = seen[:, 2] > camera.near
    x, y, z = seen[in_front].T
    largest = log_scales[::step][in_front].astype(np.float64).max(axis=1, initial=-np.inf)
    sigma = np.exp(np.minimum(largest, _LARGEST_LOG))
    tiles, visible = np.ones(len(z)), np.ones(len(z), dtype=bool)
    for focal, centre, size, along in (
        (camera.fx, camera.cx, camera.width, x),
        (camera.fy, camera.cy, camera.height, y),
    ):
        radius = _CUTOFF * np.sqrt((focal * sigma / z) ** 2 + _BLUR)
        middle = focal * along / z + centre
        last = -(-size // abi.TILE)
        first = np.clip(np.floor((middle - radius) / abi.TILE), 0, last)
        behind = np.clip(np.ceil((middle + radius) / abi.TILE), 0, last)
        tiles *= behind - first
        visible &= behind > first
    return round(float(tiles.sum())) * step, int(visible.sum()) * step


def activation_cost(means: Array, scales: Array, cameras: Sequence[Camera] = ()) -> str:
    """Return how large one view would be if ``scales`` [N, 3], as stored, were taken for logarithms.

    cameras: those that are known; of up to eight pinholes of them the worst counts. Without any, a nominal camera sees
    the point cloud from outside.
    """
    if not len(means):
        return "there is nothing to activate"
    cameras = [camera for camera in cameras if camera.model == "pinhole"]
    chosen = cameras[:: -(-len(cameras) // _CAMERAS)] if cameras else [_nominal_camera(means)]
    counted = [(*predicted_isects(means, scales, camera), camera) for camera in chosen]
    isects, visible, camera = max(counted, key=lambda entry: entry[0])
    return (
        f"taken for logarithms they would have {visible:,} Gaussians cover {isects:,} tiles "
        f"({isects / max(1, visible):,.0f} each) of {camera.name}, {camera.width}x{camera.height} pixels: "
        f"{isects * STEP_ISECT_BYTES / 2**30:,.1f} GiB for one training step"
    )


def _nominal_camera(means: Array) -> Camera:
    """Return a 1600x1200 view with a 60 degree lens that has nine tenths of the points in the middle of the image."""
    points = means[:: -(-len(means) // _GAUSSIANS)].astype(np.float64)
    centre = np.median(points, axis=0)
    radius = float(np.quantile(np.linalg.norm(points - centre, axis=1), 0.9))
    viewmat = np.eye(4)
    viewmat[:3, 3] = -centre
    viewmat[2, 3] += max(2.5 * radius, 2 * NEAR)
    width, height = 1600, 1200
    focal = width / 2 / np.tan(np.radians(30.0))
    return Camera("a nominal view", width, height, focal, focal, width / 2, height / 2, viewmat)
