"""Models of other programs: the six columns of a file come in, raw Gaussians come out, and nothing is activated twice.

Every format and every checkpoint of another program ends in an ImportedModel, whose parameter space is not known yet.
``to_gaussians`` is the one way from there to Gaussians.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splatcli.checkpoint.activation_check import (
    Space,
    SpaceCheck,
    activation_cost,
    check_opacities,
    check_scales,
    check_space,
)
from splatcli.checkpoint.schema import dtype_name, nonfinite, problem_list
from splatcli.errors import DivergedError, ModelFileError, SplatError
from splatcli.gaussians import SHN_COUNTS, Gaussians
from splatcli.progress import report
from splatcli.scene.camera import Camera

#: Quaternions are normalised when their lengths differ from 1 by less.
_UNIT = 1e-4
#: Fewer Gaussians say nothing about their columns; nor do components whose means differ by less than this ratio.
_MIN_TELLING, _SWAPPED_RATIO = 100, 1.5
#: Opacities are moved this far from 0 and 1, whose logits are infinite: the step of float32 above 1.
_EDGE = 2.0**-23
#: Characters of a file of settings that are read; some kilobytes are usual.
_MAX_SETTINGS = 1 << 20
#: A standard deviation of 0 is where exp() has underflown; it becomes the smallest normal float32.
_SMALLEST = float(torch.finfo(torch.float32).tiny)

#: column -> shapes that a file may give it, -1 standing for N; the first is that of Columns.
_SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "means": ((-1, 3),),
    "quats": ((-1, 4),),
    "scales": ((-1, 3),),
    "opacities": ((-1,), (-1, 1)),
    "sh0": ((-1, 3), (-1, 1, 3)),
    **{"shN": tuple((-1, size, 3) for size in SHN_COUNTS)},
}

Floats = NDArray[np.float32]
_Column = TypeVar("_Column", Tensor, Floats)


class Columns(NamedTuple, Generic[_Column]):
    """The six columns of N Gaussians in a file: float32 on the host, tensors on the way in and arrays on the way out.

    means, sh0 [N, 3]; quats [N, 4], w x y z; scales [N, 3]; opacities [N]; shN [N, K, 3]. In what splat writes, scales
    are logarithms and opacities logits, as the names in files of INRIA and gsplat mean them. In what it reads they may
    be activated; the activation check finds out.
    """

    means: _Column
    quats: _Column
    scales: _Column
    opacities: _Column
    sh0: _Column
    shN: _Column

    @staticmethod
    def of(gaussians: Gaussians) -> Columns[Floats]:
        """Return the raw parameters as arrays. Raises DivergedError when a value is not finite: no reader takes it."""
        check_finite(gaussians)
        return Columns(*(tensor.detach().float().cpu().numpy() for _, tensor in gaussians.items()))

    @staticmethod
    def tensors(
        *,
        means: NDArray[np.floating],
        quats: NDArray[np.floating],
        scales: NDArray[np.floating],
        opacities: NDArray[np.floating],
        sh0: NDArray[np.floating],
        shN: NDArray[np.floating],
    ) -> Columns[Tensor]:
        """Return contiguous float32 tensors of arrays; a number beyond float32 becomes infinite."""
        with np.errstate(over="ignore", invalid="ignore"):
            return Columns(
                *(
                    torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
                    for array in (means, quats, scales, opacities, sh0, shN)
                )
            )


def check_finite(gaussians: Gaussians) -> None:
    """Raise DivergedError when a value is not finite."""
    for name, tensor in gaussians.items():
        if (found := nonfinite(tensor)) is not None:
            raise DivergedError(f"{name} has {found[0]} NaN or infinite values, the first at {list(found[1])}")


def finite_rows(columns: Sequence[Tensor]) -> Tensor:
    """Return [N] bool: the rows of tensors [N, ...], at least one, in which every value is finite."""
    return torch.stack(
        [torch.isfinite(column).reshape(len(column), math.prod(column.shape[1:])).all(dim=1) for column in columns]
    ).all(dim=0)


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """How a file of another program is read.

    space: RAW or ACTIVATED when the user says so; None checks the values and refuses in doubt.
    lenient: bytes behind the data are ignored.
    drop_nonfinite: Gaussians with NaN or infinite values are left out.
    """

    space: Space | None = None
    lenient: bool = False
    drop_nonfinite: bool = False


def at_index(name: str, index: tuple[int, ...]) -> str:
    """Return the words for a place in a tensor."""
    return f"{name}, the first at {list(index)}"


@dataclass(slots=True)
class ImportedModel:
    """A model as a file holds it; it becomes Gaussians once its parameter space is known.

    origin: the kind of file, for messages.
    columns: its numbers.
    parts: numbers of Gaussians that were stored together; each part is checked by itself.
    names: column -> the file's name for it. place: the words for a place in the file.
    declared: the file says that its values are raw.
    sealed: it also proves it, by a digest or by the way that its format encodes them: no part of them was activated.
    antialiased: the file says that it was trained with opacity compensation, or another one of its run, ``source``.
    notes: remarks for the user.
    """

    origin: str
    columns: Columns[Tensor]
    parts: list[int] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    place: Callable[[str, tuple[int, ...]], str] = at_index
    declared: bool = False
    sealed: bool = False
    antialiased: bool = False
    source: str = "the file"
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parts = self.parts or [len(self)]

    def __len__(self) -> int:
        return len(self.columns.means)

    @property
    def sh_degree(self) -> int:
        return SHN_COUNTS.index(self.columns.shN.shape[1])

    def nonfinite(self) -> list[str]:
        """Return a sentence for each column with NaN or infinite values: how many, and where the first is."""
        return [
            f"{found[0]} NaN or infinite values in {self.place(self.names.get(name, name), found[1])}"
            for name, column in self.columns._asdict().items()
            if (found := nonfinite(column)) is not None
        ]

    def without_nonfinite(self) -> ImportedModel:
        """Return the model without the Gaussians that have NaN or infinite values."""
        rows = finite_rows(self.columns)
        columns = Columns(*(column[rows] for column in self.columns))
        parts = [int(part.sum()) for part in torch.split(rows, self.parts)]
        note = f"dropped {len(self) - len(columns.means):,} of {len(self):,} Gaussians with NaN or infinite values"
        return replace(self, columns=columns, parts=parts, notes=[*self.notes, note])

    def split(self) -> list[Columns[Tensor]]:
        """Return the columns of each part."""
        return [Columns(*some) for some in zip(*(torch.split(c, self.parts) for c in self.columns), strict=True)]

    def space_checks(self) -> list[SpaceCheck]:
        """Return the activation check of each part; the values must be finite."""
        return [
            check_space(
                part.means.numpy(),
                part.scales.numpy(),
                part.opacities.numpy(),
                declared=self.declared,
                parts=not self.sealed,
            )
            for part in self.split()
        ]

    def remarks(self) -> list[str]:
        """Return remarks on opacity compensation, and on columns that look odd but prove nothing."""
        said = f"it was trained antialiased, as {self.source} says, and is rendered so"
        found = [said] if self.antialiased else []
        if len(self) < _MIN_TELLING:
            return found
        first, last = (float(self.columns.quats[:, i].abs().mean()) for i in (0, 3))
        if last > _SWAPPED_RATIO * first:
            found.append("the last component of the quaternions is the largest: are they x y z w instead of w x y z?")
        colours = self.columns.sh0
        if bool(((colours >= 0) & (colours <= 1)).all()) and bool(colours.any()):
            found.append("all constant SH coefficients are between 0 and 1: are they plain RGB colours?")
        return found

    def quats_are_unit(self) -> bool:
        """Return whether every quaternion is normalised, which does no harm: the rasterizer normalises them anyway."""
        return len(self) > 0 and bool(((self.columns.quats.norm(dim=1) - 1).abs() < _UNIT).all())


#: Return the cameras that a command is going to render with.
CameraSource = Callable[[], Sequence[Camera]]


def to_gaussians(
    model: ImportedModel, options: ImportOptions, where: Path, cameras: CameraSource | None = None
) -> tuple[Gaussians, list[str]]:
    """Return the raw Gaussians of a file, and notes for the user.

    cameras: called only when the file is refused; the message says what one of their views would cost.
    Raises ModelFileError for NaN and infinite values, and in doubt about the space; nothing is converted unasked.
    """
    task, parts = f"checking {where.name}", 3
    report(task, 0, parts)
    if bad := model.nonfinite():
        if not options.drop_nonfinite:
            raise ModelFileError(
                "; ".join(bad), where=where, remedy="--drop-nonfinite leaves the Gaussians out that have them"
            )
        model = model.without_nonfinite()
    report(task, 1, parts)
    notes = [*model.notes, *model.remarks()]
    report(task, 2, parts)
    scales, opacities = _raw(model, options, where, cameras, notes)
    report(task, parts, parts)
    columns = model.columns
    gaussians = Gaussians(
        means=columns.means,
        quats=columns.quats,
        log_scales=scales,
        logit_opacities=opacities,
        sh0=columns.sh0,
        shN=columns.shN,
    )
    return gaussians, notes


def _raw(
    model: ImportedModel, options: ImportOptions, where: Path, cameras: CameraSource | None, notes: list[str]
) -> tuple[Tensor, Tensor]:
    """Return log-scales and logit opacities; add a note where they are not the file's own values."""
    if options.space is Space.ACTIVATED:
        converted = [_inverted(part, where) for part in model.split()]
        notes.extend(dict.fromkeys(said for _, _, said in converted))
        return torch.cat([part[0] for part in converted]), torch.cat([part[1] for part in converted])
    checks = model.space_checks()
    faults = [found.problem for found in checks if found.problem is not None]
    if faults and options.space is Space.RAW:
        notes.append(f"taken for raw, as --param-space says, although {faults[0]}")
    elif faults:
        raise ModelFileError(
            _refusal(model, faults[0], cameras),
            where=where,
            remedy="export the model again from the program that made it; --param-space raw takes it as it is"
            if any(found.partly for found in checks)
            else "--param-space activated takes logarithms and logits of them; --param-space raw takes them as "
            "they are, for those who know",
        )
    return model.columns.scales, model.columns.opacities


def _refusal(model: ImportedModel, fault: str, cameras: CameraSource | None) -> str:
    """Return the fault, and the memory that it would have taken."""
    if not fault.startswith("scales"):
        return fault
    known: Sequence[Camera] = ()
    if cameras is not None:
        # A fault of the scene is not the fault for which the model is refused.
        with contextlib.suppress(SplatError):
            known = cameras()
    return f"{fault}; {activation_cost(model.columns.means.numpy(), model.columns.scales.numpy(), known)}"


# --- the inverse of an activation, when the user says that values are activated; never otherwise


def _inverted(columns: Columns[Tensor], where: Path) -> tuple[Tensor, Tensor, str]:
    """Return (log-scales [N, 3], logit opacities [N], a note) of finite values of which some are activated.

    A column that is certainly raw stays as it is, since programs that mix the two up do so in one column and not in
    another. Raises ModelFileError when all is raw, when only a part of a column is activated, or when the result looks
    activated still.
    """
    means, scales, opacities = columns.means, columns.scales, columns.opacities
    found = check_space(means.numpy(), scales.numpy(), opacities.numpy(), declared=False)
    if found.partly:
        raise ModelFileError(
            f"{found.problem}; activated values and raw ones cannot be distinguished there",
            where=where,
            remedy="export the model again from the program that made it",
        )
    linear = check_scales(means.numpy(), scales.numpy()).space is not Space.RAW
    alphas = check_opacities(opacities.numpy()) is not Space.RAW
    if not linear and not alphas and len(means):
        raise ModelFileError(
            "nothing here is activated: scales are logarithms and opacities are logits",
            where=where,
            remedy="leave --param-space out",
        )
    done = []
    if linear:
        tiny = int((scales < _SMALLEST).sum())
        scales = scales.clamp_min(_SMALLEST).double().log().float()
        done.append("took logarithms of the scales" + (f" ({tiny:,} were 0)" if tiny else ""))
    else:
        done.append("left the scales, which are logarithms")
    if alphas:
        edge = int(((opacities < _EDGE) | (opacities > 1 - _EDGE)).sum())
        opacities = torch.logit(opacities.double(), eps=_EDGE).float()
        done.append("took logits of the opacities" + (f" ({edge:,} were 0 or 1)" if edge else ""))
    else:
        done.append("left the opacities, which are logits")
    _check_inverted(means, scales if linear else None, opacities if alphas else None, where)
    return scales, opacities, f"{done[0]}, {done[1]} (--param-space activated)"


def _check_inverted(means: Tensor, logs: Tensor | None, logits: Tensor | None, where: Path) -> None:
    """Raise ModelFileError when inverted values are better explained as activated."""
    twice = []
    if logs is not None:
        check = check_scales(means.numpy(), logs.numpy())
        if check.space is Space.ACTIVATED or check.activated_error < check.raw_error:
            twice.append("scales")
    if logits is not None and check_opacities(logits.numpy()) is Space.ACTIVATED:
        twice.append("opacities")
    if twice:
        raise ModelFileError(
            f"after one inversion the {' and '.join(twice)} still look activated: they were activated twice",
            where=where,
            remedy="export the model again from the program that made it",
        )


# --- the columns of a torch checkpoint


def columns_of_tensors(found: dict[str, object], names: dict[str, str], where: Path) -> Columns[Tensor]:
    """Return the columns of a checkpoint, each in a storage of its own.

    found: column -> what the file has in its place; None where it has nothing. names: column -> the file's name for it.
    Raises ModelFileError for a missing column, one that is no tensor or has another shape, and one that shows more
    bytes than it stores.
    """
    missing = [names[name] for name in _SHAPES if found.get(name) is None]
    if missing:
        raise ModelFileError(f"it has no {', '.join(missing)}", where=where)
    tensors = {name: value.detach() for name in _SHAPES if isinstance(value := found[name], Tensor)}
    problems = [
        f"{names[name]} is {type(found[name]).__name__}, not a tensor" for name in _SHAPES if name not in tensors
    ]
    if problems:
        raise ModelFileError(problem_list("not the tensors of a model", problems), where=where)
    count = tensors["means"].shape[0] if tensors["means"].dim() else 0
    for name, tensor in tensors.items():
        fits = [tuple(count if size < 0 else size for size in shape) for shape in _SHAPES[name]]
        if not tensor.is_floating_point() or tensor.layout != torch.strided:
            problems.append(f"{names[name]} is {dtype_name(tensor)} {tensor.layout}")
        elif tuple(tensor.shape) not in fits:
            discs = " (a 2D Gaussian model, 2DGS?)" if name == "scales" and tensor.shape[1:] == (2,) else ""
            problems.append(f"{names[name]} has shape {list(tensor.shape)}{discs}, not {list(fits[0])}")
    problems = problems or _oversized_views(tensors, names)
    if problems:
        raise ModelFileError(problem_list("not the tensors of a model", problems), where=where)
    return Columns(**{name: _own(name, tensor) for name, tensor in tensors.items()})


def _oversized_views(tensors: dict[str, Tensor], names: dict[str, str]) -> list[str]:
    """Return a sentence for each storage of which tensors show more bytes than it has: expanded or overlapping ones.

    Slices are fine: sh0 and shN of an untrained model are often the two halves of one tensor.
    """
    held: dict[int, int] = {}
    shown: dict[int, int] = defaultdict(int)
    sharing: dict[int, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        held[place] = storage.nbytes()
        shown[place] += tensor.numel() * tensor.itemsize
        sharing[place].append(names[name])
    return [
        f"{' and '.join(sharing[place])} {'show' if len(sharing[place]) > 1 else 'shows'} {shown[place]:,} bytes of a "
        f"storage of {held[place]:,}"
        for place in held
        if shown[place] > held[place]
    ]


def _own(name: str, tensor: Tensor) -> Tensor:
    """Return contiguous float32 without axes of 1, copied where the tensor is not that already."""
    if name in ("opacities", "sh0"):
        tensor = tensor.reshape(len(tensor), *_SHAPES[name][0][1:])
    plain = tensor.to(torch.float32).contiguous()
    return plain if plain.untyped_storage().nbytes() == plain.nbytes else plain.clone()


# --- what a program's module offers


def has_line(file: Path, line: str) -> bool:
    """Return whether a run's file of settings (YAML) is there and has this line, however it is indented."""
    try:
        with file.open(encoding="utf-8", errors="replace") as text:
            return any(found.strip() == line for found in text.read(_MAX_SETTINGS).splitlines())
    except OSError:
        return False


#: Opens another torch file, as safely as the first.
Load = Callable[[Path], object]


@dataclass(frozen=True, slots=True)
class Program:
    """A program whose checkpoints are read; checkpoint/foreign/read.py lists them.

    recognises: whether an opened torch file is its checkpoint.
    read: the model in one, its space not checked yet; arguments: the opened file, its path, what opens further files.
    places: patterns of models below a run folder, and a regular expression whose first group is the step.
    """

    recognises: Callable[[object], bool]
    read: Callable[[object, Path, Load], ImportedModel]
    places: tuple[tuple[str, str], ...]
