"""The one gate for models of other programs: numbers whose space nobody vouches for come in, raw Gaussians go out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from splatcli.checkpoint.blowup import cost_sentence
from splatcli.checkpoint.foreign.convert import to_raw
from splatcli.checkpoint.foreign.tensors import RawTables
from splatcli.checkpoint.schema import nonfinite
from splatcli.checkpoint.space import Space, SpaceCheck, judge
from splatcli.errors import ModelFileError, SplatError
from splatcli.gaussians import SH_REST, Gaussians
from splatcli.scene.camera import Camera

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
