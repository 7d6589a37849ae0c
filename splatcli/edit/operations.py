"""The operations of ``splat edit``: each is parsed from a flag and its value, and applied in the order given."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splatcli.checkpoint.foreign.imported import finite_rows
from splatcli.checkpoint.state import Checkpoint
from splatcli.edit.align import AlignmentError, align
from splatcli.edit.clean import LEVELS, Photos, floaters
from splatcli.edit.level import rotation_between, up_of_cameras, up_of_gaussians
from splatcli.edit.simplify import simplify
from splatcli.edit.transform import move_camera, move_gaussians, move_metadata
from splatcli.errors import UsageError
from splatcli.formats.crop import Crop, parse_floats
from splatcli.formats.format import ExportMetadata
from splatcli.formats.selection import logit_of
from splatcli.gaussians import SHN_COUNTS, Gaussians
from splatcli.scene.camera import Camera
from splatcli.scene.georeference import MIN_POSITIONS, PositionsError, fit_similarity
from splatcli.scene.points import morton_order
from splatcli.scene.scene import Scene
from splatcli.similarity import Similarity
from splatcli.sizes import parse_count

_COMPARISONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_EXPRESSION = re.compile(r"\s*(\w+)\s*(<=|>=|==|!=|<|>)\s*(\S+)\s*")


def _log(value: float) -> float:
    """Return the logarithm; that of 0 and of negative numbers is below every value."""
    return math.log(value) if value > 0 else -math.inf


#: The space of a quantity's raw values: from a number of an expression to it, and from it back.
_Space = tuple[Callable[[float], float], Callable[[Tensor], Tensor]]
_PLAIN: _Space = (float, torch.Tensor.clone)
_LOGIT: _Space = (logit_of, torch.sigmoid)
_LOG: _Space = (_log, torch.exp)
#: Of an ellipsoid; the raw values are logarithms of the product of its half axes.
_VOLUME: _Space = (
    lambda volume: _log(volume) - math.log(4 / 3 * math.pi),
    lambda raw: 4 / 3 * math.pi * torch.exp(raw),
)

#: name -> the raw values of Gaussians, [N] float64, and their space: what is monotonic is compared without being
#: activated.
_QUANTITIES: dict[str, tuple[Callable[[Gaussians], Tensor], _Space]] = {
    "x": (lambda g: g.means[:, 0].double(), _PLAIN),
    "y": (lambda g: g.means[:, 1].double(), _PLAIN),
    "z": (lambda g: g.means[:, 2].double(), _PLAIN),
    "opacity": (lambda g: g.logit_opacities.double(), _LOGIT),
    "scale": (lambda g: g.log_scales.double().amax(dim=1), _LOG),
    "min_scale": (lambda g: g.log_scales.double().amin(dim=1), _LOG),
    "anisotropy": (lambda g: g.log_scales.double().amax(dim=1) - g.log_scales.double().amin(dim=1), _LOG),
    "volume": (lambda g: g.log_scales.double().sum(dim=1), _VOLUME),
}
FILTER_HELP = f"--filter nan, or --filter 'opacity>0.1' with one of {', '.join(_QUANTITIES)} and < <= > >= == !="


@dataclass(frozen=True)
class Move:
    """A similarity transform of everything."""

    label: str
    similarity: Similarity


@dataclass(frozen=True)
class Level:
    """The smallest rotation after which up is along an axis, [3]."""

    label: str
    axis: tuple[float, float, float]


@dataclass(frozen=True)
class AlignTo:
    """The similarity transform onto another model or scene.

    It brings the training cameras onto those of the same names in the other one; where one of the two has no cameras,
    the Gaussians onto its Gaussians. The caller fills in what the other one has.
    path: of the other. places: name of a camera there -> its position [3]. gaussians: None of a scene.
    frame: notes that say where the other's coordinates lie in its input and on the Earth.
    """

    label: str
    path: Path
    places: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    gaussians: Gaussians | None = None
    frame: Sequence[str] = ()


@dataclass(frozen=True)
class Keep:
    """A choice of Gaussians.

    keeps: [N] bool, the ones that stay. range_of: the range of the values that it chooses by, in words.
    """

    label: str
    keeps: Callable[[Gaussians], Tensor]
    range_of: Callable[[Gaussians], str] | None = None


@dataclass(frozen=True)
class KeepFinite(Keep):
    """The choice of Gaussians without NaN and infinite values; the reader of the file makes it, too."""


@dataclass(frozen=True)
class LimitDegree:
    """SH coefficients above a degree are left out."""

    label: str
    degree: int


@dataclass(frozen=True)
class Simplify:
    """Gaussians are merged until few enough are left. count: of the number before, the number after."""

    label: str
    count: Callable[[int], int]


@dataclass(frozen=True)
class Clean:
    """Floaters are dropped. level: one of clean.LEVELS."""

    label: str
    level: str


@dataclass(frozen=True)
class Reorder:
    """Rows along a Z curve."""

    label: str


Operation = Move | Level | AlignTo | Keep | LimitDegree | Simplify | Clean | Reorder


@dataclass(frozen=True)
class Effect:
    """The result of an operation: the number of Gaussians that it touched, and the number after it.

    verb: what happened to them: changed, dropped, or merged into others. detail: what else there is to say.
    """

    label: str
    touched: int
    left: int
    verb: str
    detail: str = ""

    def line(self) -> str:
        return f"{self.label}: {self.touched:,} {self.verb}, {self.left:,} left{self.detail}"


def _numbers(text: str, count: int, flag: str, remedy: str) -> list[float]:
    values = parse_floats(text, flag, remedy)
    if len(values) != count or not all(map(math.isfinite, values)):
        noun = "number" if count == 1 else "numbers"
        raise UsageError(f"it takes {count} finite {noun}, not {text!r}", where=flag, remedy=remedy)
    return values


def _translate(flag: str, text: str) -> Operation:
    shift = _numbers(text, 3, flag, f"{flag} 0,0,1.5")
    return Move(f"{flag} {text}", Similarity(shift=np.array(shift)))


def _rotate(flag: str, text: str) -> Operation:
    degrees = _numbers(text, 3, flag, f"{flag} 0,90,0, in degrees about x, then y, then z")
    return Move(f"{flag} {text}", Similarity.euler(degrees))


def _level(flag: str, text: str) -> Operation:
    match = re.fullmatch(r"([+-]?)([xyz])", text.strip().lower())
    if match is None:
        raise UsageError(
            f"{text!r} is no axis", where=flag, remedy=f"{flag} -y, {flag} y or {flag} z: where up shall be"
        )
    sign, name = -1.0 if match[1] == "-" else 1.0, match[2]
    return Level(f"{flag} {text}", (sign * (name == "x"), sign * (name == "y"), sign * (name == "z")))


def _align_to(flag: str, text: str) -> Operation:
    return AlignTo(f"{flag} {text}", Path(text))


def _scale(flag: str, text: str) -> Operation:
    (factor,) = _numbers(text, 1, flag, f"{flag} 0.5")
    if factor <= 0:
        raise UsageError(f"a factor of {factor:g} leaves no scene", where=flag, remedy=f"{flag} 0.5")
    return Move(f"{flag} {text}", Similarity(scale=factor))


def _scale_from(flag: str, text: str) -> Operation:
    remedy = f"{flag} X0,Y0,Z0,X1,Y1,Z1,LENGTH: two points of the model and their true distance"
    values = _numbers(text, 7, flag, remedy)
    measured, length = math.dist(values[:3], values[3:6]), values[6]
    if measured == 0:
        raise UsageError("both ends are the same point", where=flag, remedy=remedy)
    if not (length > 0 and 0 < length / measured < math.inf):
        raise UsageError(f"a length of {length:g} leaves no scene", where=flag, remedy=remedy)
    return Move(f"{flag} {text}", Similarity(scale=length / measured))


def _crop(flag: str, text: str) -> Operation:
    region = Crop.parse(text, flag)
    return Keep(f"{flag} {text}", lambda gaussians: region.holds(gaussians.means), _range_of_means)


def _crop_out(flag: str, text: str) -> Operation:
    region = Crop.parse(text, flag)
    return Keep(f"{flag} {text}", lambda gaussians: ~region.holds(gaussians.means), _range_of_means)


def _range_of_means(gaussians: Gaussians) -> str:
    low, high = (", ".join(f"{value:.4g}" for value in ends) for ends in gaussians.means.aminmax(dim=0))
    return f"positions are from ({low}) to ({high})"


def _filter(flag: str, text: str) -> Operation:
    if text.strip().lower() == "nan":
        return KeepFinite(f"{flag} {text}", _finite)
    match = _EXPRESSION.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is no condition", where=flag, remedy=FILTER_HELP)
    name, comparison, number = match.groups()
    if name not in _QUANTITIES:
        raise UsageError(f"a Gaussian has no {name!r}", where=flag, remedy=FILTER_HELP)
    (value,) = _numbers(number, 1, flag, FILTER_HELP)
    quantity, (to_raw, from_raw) = _QUANTITIES[name]
    bound, compare = to_raw(value), _COMPARISONS[comparison]

    def range_of(gaussians: Gaussians) -> str:
        low, high = (float(from_raw(end)) for end in quantity(gaussians).aminmax())
        return f"{name} is from {low:.4g} to {high:.4g}"

    return Keep(f"{flag} {text}", lambda gaussians: compare(quantity(gaussians), bound), range_of)


def _finite(gaussians: Gaussians) -> Tensor:
    return finite_rows([tensor for _, tensor in gaussians.items()])


def _sh_degree(flag: str, text: str) -> Operation:
    if text not in [str(degree) for degree in range(len(SHN_COUNTS))]:
        raise UsageError(f"{text!r} is no SH degree", where=flag, remedy=f"{flag} 0 to {len(SHN_COUNTS) - 1}")
    return LimitDegree(f"{flag} {text}", int(text))


def _simplify(flag: str, text: str) -> Operation:
    remedy = f"{flag} 100k, {flag} 0.5 or {flag} 50%"
    share = text.removesuffix("%")
    try:
        value = parse_count(text)
        number = float(share) if isinstance(value, str) else float(value)  # type: ignore[arg-type]
    except ValueError:
        raise UsageError(f"{text!r} is no number of Gaussians", where=flag, remedy=remedy) from None
    if text.endswith("%"):
        number /= 100
    if not 0 < number < math.inf or (number >= 1 and (text.endswith("%") or not number.is_integer())):
        raise UsageError(f"{text!r} leaves no number of Gaussians", where=flag, remedy=remedy)
    if number >= 1:
        return Simplify(f"{flag} {text}", lambda count: min(count, int(number)))
    return Simplify(f"{flag} {text}", lambda count: max(1, round(number * count)))


def _clean(flag: str, text: str) -> Operation:
    if text not in LEVELS:
        raise UsageError(
            f"there is no level {text!r}", where=flag, remedy=f"{flag}, or {flag} with {', '.join(LEVELS)}"
        )
    return Clean(f"{flag} {text}", text)


def _reorder(flag: str, text: str) -> Operation:
    if text != "morton":
        raise UsageError(f"there is no order {text!r}", where=flag, remedy=f"{flag} morton")
    return Reorder(f"{flag} {text}")


_PARSERS: dict[str, Callable[[str, str], Operation]] = {
    "--translate": _translate,
    "--rotate": _rotate,
    "--level": _level,
    "--align-to": _align_to,
    "--scale": _scale,
    "--scale-from": _scale_from,
    "--crop": _crop,
    "--crop-out": _crop_out,
    "--filter": _filter,
    "--sh-degree": _sh_degree,
    "--simplify": _simplify,
    "--clean": _clean,
    "--reorder": _reorder,
}


def parse_operation(flag: str, text: str) -> Operation:
    """Return the operation of a flag in its long form and its value. Raises UsageError."""
    return _PARSERS[flag](flag, text)


@dataclass(frozen=True, eq=False)
class EditedModel:
    """A model before or after operations: Gaussians and what goes with them, all in the same coordinates.

    cameras: of the training images; of all images of the scene of a file. photos: of these cameras, for Clean.
    up: [3] unit, where the scene has a place on the Earth. metadata: for the file.
    rows: [N] int64, for each Gaussian its row in the model as it was read; None where Gaussians were merged.
    dropped: Gaussians that were left out; None collects none.
    """

    gaussians: Gaussians
    metadata: ExportMetadata
    cameras: Sequence[Camera] = ()
    photos: Photos | None = None
    up: NDArray[np.float64] | None = None
    rows: Tensor | None = None
    dropped: Sequence[Gaussians] | None = None

    @classmethod
    def as_read(
        cls,
        gaussians: Gaussians,
        checkpoint: Checkpoint | None,
        *,
        antialiased: bool,
        scene: Scene | None,
    ) -> EditedModel:
        """Return a model before all operations. checkpoint: its own; a file of splats has none.

        antialiased: as of ExportMetadata.of(). scene: with the cameras of a file of splats, in its frame.
        """
        metadata, rows = ExportMetadata.of(checkpoint, antialiased=antialiased), torch.arange(len(gaussians))
        if checkpoint is not None:
            place, cameras = checkpoint.dataset.place, checkpoint.training_cameras()
        elif scene is not None:
            place, cameras = scene.place, scene.cameras
        else:
            return cls(gaussians, metadata, rows=rows)
        up = None if place is None else np.array([0.0, 0.0, 1.0])
        return cls(gaussians, metadata, cameras, up=up, rows=rows)


def apply_operations(
    model: EditedModel, operations: Sequence[Operation], *, nonfinite: int = 0
) -> tuple[EditedModel, list[Effect]]:
    """Return the model after the operations, and the effect of each of them.

    Neighbouring transforms are multiplied first, so that they round once. nonfinite: Gaussians with NaN or infinite
    values that the reader has dropped already, for the first KeepFinite.
    Raises UsageError when no Gaussian is left or a value leaves the range of float32.
    """
    edit = _Edit(model, nonfinite)
    effects = [edit.apply(one) for one in operations]
    return edit.result(), effects


class _Edit:
    """A model while operations are applied to it.

    Gaussians and those that are dropped are moved by all transforms but the last ones, which are pending; cameras, up
    and metadata stay in the model's first coordinates until result().
    """

    def __init__(self, model: EditedModel, nonfinite: int) -> None:
        """nonfinite: as of apply_operations()."""
        self._before = model
        self._gaussians, self._rows = model.gaussians, model.rows
        self._dropped = None if model.dropped is None else [*model.dropped]
        self._nonfinite = nonfinite
        self._done = self._pending = Similarity()

    def apply(self, one: Operation) -> Effect:
        """Apply an operation and return its effect. Raises UsageError."""
        if isinstance(one, Move):
            self._pending = one.similarity.after(self._pending)
            return self._changed(one)
        self._move()
        if isinstance(one, Level):
            self._pending = _levelled(self._gaussians, self._before.cameras, self._before.up, self._done, one)
            return self._changed(one, None if self._pending.turns else 0)
        if isinstance(one, AlignTo):
            self._pending, detail = _aligned(self._gaussians, self._cameras(), one)
            return self._changed(one, detail=detail)
        if isinstance(one, Keep):
            return self._keep(one)
        if isinstance(one, Clean):
            return self._clean(one)
        if isinstance(one, LimitDegree):
            return self._limit_degree(one)
        return self._simplify(one) if isinstance(one, Simplify) else self._reorder(one)

    def result(self) -> EditedModel:
        """Return the model after the operations."""
        self._move()
        before, done = self._before, self._done
        return replace(
            before,
            gaussians=self._gaussians,
            metadata=move_metadata(before.metadata, done),
            cameras=self._cameras(),
            up=None if before.up is None else done.rotation @ before.up,
            rows=self._rows,
            dropped=self._dropped,
        )

    def _move(self) -> None:
        """Move the Gaussians by the pending transforms."""
        self._gaussians, self._done = _moved(self._gaussians, self._pending), self._pending.after(self._done)
        if self._dropped is not None:
            self._dropped = [move_gaussians(part, self._pending) for part in self._dropped]
        self._pending = Similarity()

    def _cameras(self) -> list[Camera]:
        """Return the cameras in the coordinates of the Gaussians."""
        return [move_camera(camera, self._done) for camera in self._before.cameras]

    def _changed(self, one: Operation, touched: int | None = None, detail: str = "") -> Effect:
        """Return the effect of an operation that drops none. touched: None for all."""
        count = len(self._gaussians)
        return Effect(one.label, count if touched is None else touched, count, "changed", detail)

    def _keep(self, one: Keep) -> Effect:
        others = self._drop(one.keeps(self._gaussians), one)
        count = len(others)
        if isinstance(one, KeepFinite):
            count, self._nonfinite = count + self._nonfinite, 0
        elif self._dropped is not None:
            self._dropped.append(others)
        return Effect(one.label, count, len(self._gaussians), "dropped")

    def _clean(self, one: Clean) -> Effect:
        photos, antialiased = self._before.photos, self._before.metadata.antialiased
        found = floaters(self._gaussians, one.level, self._cameras(), photos, antialiased=antialiased)
        others = self._drop(~found, one)
        if self._dropped is not None:
            self._dropped.append(others)
        detail = _evidence(one, self._before.cameras, photos)
        return Effect(one.label, len(others), len(self._gaussians), "dropped", detail)

    def _drop(self, stay: Tensor, one: Keep | Clean) -> Gaussians:
        """Leave out all Gaussians but those of ``stay`` [N] bool, and return them."""
        self._gaussians, others = _split(self._gaussians, stay, one)
        self._rows = None if self._rows is None else self._rows[stay]
        return others

    def _limit_degree(self, one: LimitDegree) -> Effect:
        if one.degree >= self._gaussians.sh_degree:
            return self._changed(one, 0)
        self._gaussians = replace(self._gaussians, shN=self._gaussians.shN[:, : SHN_COUNTS[one.degree]].clone())
        return self._changed(one)

    def _simplify(self, one: Simplify) -> Effect:
        before = len(self._gaussians)
        count = one.count(before)
        if count < before:
            antialiased = self._before.metadata.antialiased
            self._gaussians = simplify(self._gaussians, count, self._cameras(), antialiased=antialiased)
            self._rows = None
        return Effect(one.label, before - count, count, "merged")

    def _reorder(self, one: Reorder) -> Effect:
        order = torch.from_numpy(morton_order(self._gaussians.means.numpy()))
        touched = int((order != torch.arange(len(order))).sum())
        if touched:
            self._gaussians = self._gaussians.map(lambda tensor: tensor[order])
            self._rows = None if self._rows is None else self._rows[order]
        return self._changed(one, touched)


def _evidence(one: Clean, cameras: Sequence[Camera], photos: Photos | None) -> str:
    if not cameras:
        return "; by neighbours alone, since the model has no cameras"
    if one.level == "light":
        known = "blend weights in"
    elif photos is None:
        known = "neighbours, and blend weights in"
    else:
        known = "the photos of"
    if photos is None or not photos.held_out:
        return f"; by {known} {len(cameras)} training views"
    used = "" if one.level == "light" else f"{len(cameras) - photos.held_out} of "
    return f"; by {known} {used}{len(cameras)} views"


def _levelled(
    gaussians: Gaussians, cameras: Sequence[Camera], up: NDArray[np.float64] | None, total: Similarity, one: Level
) -> Similarity:
    """Return the rotation. total: how the Gaussians were moved since they were in the coordinates of the others."""
    known = up if up is not None else up_of_cameras(cameras)
    up = up_of_gaussians(gaussians) if known is None else total.rotation @ known
    if up is None:
        raise UsageError(
            "the model has neither cameras nor a dominant plane to tell where up is",
            where=one.label,
            remedy="turn it by hand: --rotate X,Y,Z",
        )
    return rotation_between(up, np.array(one.axis))


def _aligned(gaussians: Gaussians, cameras: Sequence[Camera], one: AlignTo) -> tuple[Similarity, str]:
    """Return the similarity, and how well both agree then. cameras: in the coordinates of the moment."""
    if cameras and one.places:
        return _aligned_by_cameras(cameras, one)
    if one.gaussians is None:
        raise UsageError(
            "the model has no cameras, and a scene has no Gaussians to align with",
            where=one.label,
            remedy="name a run of that scene, or a file of splats",
        )
    try:
        found = align(gaussians, one.gaussians)
    except AlignmentError as reason:
        raise UsageError(
            str(reason),
            where=one.label,
            remedy="bring the model roughly into place first: --rotate, --scale and --translate before --align-to",
        ) from None
    return found.similarity, f"; {found.share:.0%} of the Gaussians agree, {found.distance:.3g} apart in the median"


def _aligned_by_cameras(cameras: Sequence[Camera], one: AlignTo) -> tuple[Similarity, str]:
    shared = [camera for camera in cameras if camera.name in one.places]
    remedy = "both must be made of the same images, under the same names; files of splats are aligned by Gaussians"
    if len(shared) < MIN_POSITIONS:
        raise UsageError(
            f"{len(shared)} of {len(cameras)} training cameras are in it by name, at least {MIN_POSITIONS} are needed",
            where=one.label,
            remedy=remedy,
        )
    new = np.stack([one.places[camera.name] for camera in shared])
    try:
        fit = fit_similarity(np.stack([camera.center for camera in shared]), new, "cameras of the other")
    except PositionsError as reason:
        raise UsageError(str(reason), where=one.label, remedy=remedy) from None
    return fit.similarity, f"; {int(fit.used.sum())} of {len(shared)} shared cameras agree, off by {fit.sigma:.3g}"


def _moved(gaussians: Gaussians, similarity: Similarity) -> Gaussians:
    done = move_gaussians(gaussians, similarity)
    if not (torch.isfinite(done.means).all() and torch.isfinite(done.log_scales).all()):
        raise UsageError(
            "positions leave the range of float32",
            where="--translate, --scale",
            remedy="choose a smaller shift or factor",
        )
    return done


def _split(gaussians: Gaussians, stay: Tensor, one: Keep | Clean) -> tuple[Gaussians, Gaussians]:
    """Return the Gaussians that ``stay`` [N] bool chooses, and the others. Raises UsageError where none stays."""
    if not stay.any():
        known = one.range_of if isinstance(one, Keep) else None
        raise UsageError(
            f"none of the {len(gaussians):,} Gaussians is left",
            where=one.label,
            remedy="leave it out" if known is None else f"{known(gaussians)} here",
        )
    dropped = gaussians.map(lambda tensor: tensor[~stay])
    return (gaussians.map(lambda tensor: tensor[stay]) if len(dropped) else gaussians), dropped


def merged(parts: Sequence[Gaussians]) -> Gaussians:
    """Return all Gaussians in one model of the highest SH degree among them; coefficients that a part lacks are 0."""
    if len(parts) == 1:
        return parts[0]
    shN_count = max(part.shN.shape[1] for part in parts)
    columns = {
        name: torch.cat([getattr(part, name) for part in parts]) for name, _ in parts[0].items() if name != "shN"
    }
    shN = torch.zeros(sum(map(len, parts)), shN_count, 3)
    start = 0
    for part in parts:
        shN[start : start + len(part), : part.shN.shape[1]] = part.shN
        start += len(part)
    return Gaussians(**columns, shN=shN)
