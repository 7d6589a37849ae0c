"""The one gate for models of other programs: numbers whose space nobody vouches for come in, raw Gaussians go out."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from splatcli.checkpoint.activation_check import Space, SpaceCheck, cost_sentence, judge, judge_opacities, judge_scales
from splatcli.checkpoint.schema import dtype_name, listed, nonfinite
from splatcli.errors import ModelFileError, SplatError
from splatcli.gaussians import SH_REST, Gaussians
from splatcli.scene.camera import Camera

# --- The six tables of a model, out of tensors from a file: of the right shapes, and no larger than the file can hold

#: group -> shapes it may have, -1 standing for N; the first is ours.
_SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "means": ((-1, 3),),
    "quats": ((-1, 4),),
    "scales": ((-1, 3),),
    "opacities": ((-1,), (-1, 1)),
    "sh0": ((-1, 3), (-1, 1, 3)),
    **{"shN": tuple((-1, size, 3) for size in SH_REST)},
}


class RawTables(NamedTuple):
    """Numbers of N Gaussians as a file stores them, float32 on the CPU; which space they are in is not known.

    means, scales, sh0 [N, 3]; quats [N, 4], w x y z; opacities [N]; shN [N, K, 3].
    """

    means: Tensor
    quats: Tensor
    scales: Tensor
    opacities: Tensor
    sh0: Tensor
    shN: Tensor

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """(group, table) of each."""
        return zip(self._fields, self, strict=True)

    def parts(self, counts: list[int]) -> list[RawTables]:
        """The same numbers as consecutive blocks of ``counts`` Gaussians."""
        return [RawTables(*blocks) for blocks in zip(*(torch.split(table, counts) for table in self), strict=True)]


def take_tables(found: dict[str, object], names: dict[str, str], where: Path) -> RawTables:
    """The tables of a model, each in a storage of its own.

    found: group -> what the file has in its place; None where it has nothing. names: group -> the file's name for it.
    Raises ModelFileError for what is missing, is no tensor, has another shape, or shows more bytes than it stores.
    """
    missing = [names[group] for group in _SHAPES if found.get(group) is None]
    if missing:
        raise ModelFileError(f"it has no {', '.join(missing)}", where=where)
    tensors = {group: found[group] for group in _SHAPES}
    problems = [
        f"{names[group]} is {type(value).__name__}, not a tensor"
        for group, value in tensors.items()
        if not isinstance(value, Tensor)
    ]
    if problems:
        raise ModelFileError(listed("not the tensors of a model", problems), where=where)
    tables = {group: value.detach() for group, value in tensors.items() if isinstance(value, Tensor)}
    count = tables["means"].shape[0] if tables["means"].dim() else 0
    for group, table in tables.items():
        fits = [tuple(count if size < 0 else size for size in shape) for shape in _SHAPES[group]]
        if not table.is_floating_point() or table.layout != torch.strided:
            problems.append(f"{names[group]} is {dtype_name(table)} {table.layout}")
        elif tuple(table.shape) not in fits:
            problems.append(
                f"{names[group]} has shape {list(table.shape)}{_two_scales(group, table)}, not {list(fits[0])}"
            )
    problems = problems or _hollow(tables, names)
    if problems:
        raise ModelFileError(listed("not the tensors of a model", problems), where=where)
    return RawTables(**{group: _own(group, table) for group, table in tables.items()})


def _two_scales(group: str, table: Tensor) -> str:
    return " (a 2D Gaussian model, 2DGS?)" if group == "scales" and table.shape[1:] == (2,) else ""


def _hollow(tables: dict[str, Tensor], names: dict[str, str]) -> list[str]:
    """Tensors that together show more bytes of a storage than it has: expanded ones, and several over one storage.

    Slices are fine: sh0 and shN of an untrained model are often the two halves of one tensor.
    """
    held: dict[int, int] = {}
    shown: dict[int, int] = defaultdict(int)
    sharing: dict[int, list[str]] = defaultdict(list)
    for group, table in tables.items():
        storage = table.untyped_storage()
        place = storage.data_ptr()
        held[place] = storage.nbytes()
        shown[place] += table.numel() * table.itemsize
        sharing[place].append(names[group])
    return [
        f"{' and '.join(sharing[place])} {'show' if len(sharing[place]) > 1 else 'shows'} {shown[place]:,} bytes of a "
        f"storage of {held[place]:,}"
        for place in held
        if shown[place] > held[place]
    ]


def _own(group: str, table: Tensor) -> Tensor:
    """The same numbers as contiguous float32 without axes of 1, copied where they are not that already."""
    if group in ("opacities", "sh0"):
        table = table.reshape(len(table), *_SHAPES[group][0][1:])
    plain = table.to(torch.float32).contiguous()
    return plain if plain.untyped_storage().nbytes() == plain.nbytes else plain.clone()


# --- Activated parameters back to raw ones, when the user says that they are activated; never otherwise

#: Opacities are moved this far from 0 and 1, whose logits are infinite: the step of float32 above 1.
_EDGE = 2.0**-23
#: A standard deviation of 0 is where exp() has underflown; it becomes the smallest normal float32.
_SMALLEST = float(torch.finfo(torch.float32).tiny)


def to_raw(tables: RawTables, where: Path) -> tuple[Tensor, Tensor, str]:
    """(log-scales [N, 3], logit opacities [N], what was done) from finite stored values, of which some are activated.

    What is certainly raw is left as it is, for programs that mix the two up do so in one table and not in another.
    Raises ModelFileError when all is raw, when only some of one table is activated, or when what comes out looks
    activated still.
    """
    means, scales, opacities = tables.means, tables.scales, tables.opacities
    found = judge(means.numpy(), scales.numpy(), opacities.numpy(), declared=False)
    if found.partly:
        raise ModelFileError(
            f"{found.problem}; what is activated there and what is not cannot be told apart",
            where=where,
            remedy="export the model again from the program that made it",
        )
    linear = judge_scales(means.numpy(), scales.numpy()).space is not Space.RAW
    alphas = judge_opacities(opacities.numpy()) is not Space.RAW
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
    _check_once(means, scales if linear else None, opacities if alphas else None, where)
    return scales, opacities, f"{done[0]}, {done[1]} (--param-space activated)"


def _check_once(means: Tensor, logs: Tensor | None, logits: Tensor | None, where: Path) -> None:
    """Raises when what is raw now is better explained as activated."""
    twice = []
    if logs is not None:
        verdict = judge_scales(means.numpy(), logs.numpy())
        if verdict.space is Space.ACTIVATED or verdict.activated_error < verdict.raw_error:
            twice.append("scales")
    if logits is not None and judge_opacities(logits.numpy()) is Space.ACTIVATED:
        twice.append("opacities")
    if twice:
        raise ModelFileError(
            f"after one inversion the {' and '.join(twice)} still look activated: they were activated twice",
            where=where,
            remedy="export the model again from the program that made it",
        )


#: Unit quaternions are told by this much; below these counts or ratios nothing is said about a table.
_UNIT = 1e-4
_MIN_TELLING = 100
_SWAPPED_RATIO = 1.5


#: Gives the cameras that a command is going to render with.
CameraSource = Callable[[], Sequence[Camera]]


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """How a file of another program is to be taken.

    space: RAW or ACTIVATED when the user says so; None looks at the values and refuses in doubt.
    lenient: bytes behind the data of a PLY are ignored.
    drop_nonfinite: Gaussians with NaN or infinite values are left out.
    """

    space: Space | None = None
    lenient: bool = False
    drop_nonfinite: bool = False


def at_index(name: str, index: tuple[int, ...]) -> str:
    """How a place in a tensor is told."""
    return f"{name}, the first at {list(index)}"


@dataclass(slots=True)
class ImportedModel:
    """A model as a file holds it: not Gaussians before their space is decided.

    origin: what the file is, for messages.
    tables: its numbers.
    parts: numbers of Gaussians that were stored together; each part is judged for itself.
    names: group -> what the file calls it. place: tells where in the file a value is.
    declared: the file says that its values are raw.
    notes: what the user should know of the file.
    """

    origin: str
    tables: RawTables
    parts: list[int] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    place: Callable[[str, tuple[int, ...]], str] = at_index
    declared: bool = False
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parts = self.parts or [len(self)]

    def __len__(self) -> int:
        return len(self.tables.means)

    @property
    def sh_degree(self) -> int:
        return SH_REST.index(self.tables.shN.shape[1])

    def broken(self) -> list[str]:
        """A sentence for each table with NaN or infinite values: how many, and where the first is."""
        return [
            f"{found[0]} NaN or infinite values in {self.place(self.names.get(group, group), found[1])}"
            for group, table in self.tables.named()
            if (found := nonfinite(table)) is not None
        ]

    def without_broken(self) -> ImportedModel:
        """The same model without the Gaussians that have NaN or infinite values."""
        rows = torch.ones(len(self), dtype=torch.bool)
        for table in self.tables:
            rows &= torch.isfinite(table).reshape(len(self), -1).all(dim=1)
        tables = RawTables(*(table[rows] for table in self.tables))
        parts = [int(part.sum()) for part in torch.split(rows, self.parts)]
        note = f"dropped {len(self) - len(tables.means):,} of {len(self):,} Gaussians with NaN or infinite values"
        return replace(self, tables=tables, parts=parts, notes=[*self.notes, note])

    def judgements(self) -> list[SpaceCheck]:
        """One for each part; the values must be finite."""
        return [
            judge(part.means.numpy(), part.scales.numpy(), part.opacities.numpy(), declared=self.declared)
            for part in self.tables.parts(self.parts)
        ]

    def remarks(self) -> list[str]:
        """What looks odd, but proves nothing and harms nobody."""
        if len(self) < _MIN_TELLING:
            return []
        found = []
        first, last = (float(self.tables.quats[:, i].abs().mean()) for i in (0, 3))
        if last > _SWAPPED_RATIO * first:
            found.append("the last component of the quaternions is the largest: are they x y z w instead of w x y z?")
        colours = self.tables.sh0
        if bool(((colours >= 0) & (colours <= 1)).all()) and bool(colours.any()):
            found.append("all constant SH coefficients are between 0 and 1: are they plain RGB colours?")
        return found

    def quats_are_unit(self) -> bool:
        """Whether every quaternion is normalised, which does no harm: the rasterizer normalises them anyway."""
        return len(self) > 0 and bool(((self.tables.quats.norm(dim=1) - 1).abs() < _UNIT).all())


def to_gaussians(
    stored: ImportedModel, reading: ImportOptions, where: Path, cameras: CameraSource | None = None
) -> tuple[Gaussians, list[str]]:
    """The raw Gaussians of a file, and notes for the user.

    cameras: asked only when the file is refused: the message says what a view of theirs would cost.
    Raises ModelFileError for NaN and infinite values, and in doubt about the space; nothing is converted unasked.
    """
    if broken := stored.broken():
        if not reading.drop_nonfinite:
            raise ModelFileError(
                "; ".join(broken), where=where, remedy="--drop-nonfinite leaves the Gaussians out that have them"
            )
        stored = stored.without_broken()
    notes = [*stored.notes, *stored.remarks()]
    scales, opacities = _raw(stored, reading, where, cameras, notes)
    tables = stored.tables
    gaussians = Gaussians(
        means=tables.means,
        quats=tables.quats,
        log_scales=scales,
        logit_opacities=opacities,
        sh0=tables.sh0,
        shN=tables.shN,
    )
    return gaussians, notes


def _raw(
    stored: ImportedModel, reading: ImportOptions, where: Path, cameras: CameraSource | None, notes: list[str]
) -> tuple[Tensor, Tensor]:
    """Log-scales and logit opacities; what was done about them is added to ``notes``."""
    if reading.space is Space.ACTIVATED:
        converted = [to_raw(part, where) for part in stored.tables.parts(stored.parts)]
        notes.extend(dict.fromkeys(said for _, _, said in converted))
        return torch.cat([part[0] for part in converted]), torch.cat([part[1] for part in converted])
    judgements = stored.judgements()
    faults = [found.problem for found in judgements if found.problem is not None]
    if faults and reading.space is Space.RAW:
        notes.append(f"taken for raw, as --param-space says, although {faults[0]}")
    elif faults:
        raise ModelFileError(
            _refusal(stored, faults[0], cameras),
            where=where,
            remedy="export the model again from the program that made it; --param-space raw takes it as it is"
            if any(found.partly for found in judgements)
            else "--param-space activated takes logarithms and logits of them; --param-space raw takes them as "
            "they are, for those who know",
        )
    return stored.tables.scales, stored.tables.opacities


def _refusal(stored: ImportedModel, fault: str, cameras: CameraSource | None) -> str:
    """The fault, and what it would have led to."""
    if not fault.startswith("scales"):
        return fault
    known: Sequence[Camera] = ()
    if cameras is not None:
        with contextlib.suppress(
            SplatError
        ):  # whatever is wrong with the scene, the model is refused for its own fault
            known = cameras()
    return f"{fault}; {cost_sentence(stored.tables.means.numpy(), stored.tables.scales.numpy(), known)}"
