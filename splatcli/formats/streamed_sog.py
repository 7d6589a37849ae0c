"""Streamed SOG version 1, PlayCanvas' folder of chunks in levels of detail, of which a viewer loads what it sees.

``lod-meta.json`` has a binary tree of space. A leaf has bounds and, for each level of detail, a range of Gaussians in a
chunk: an unbundled SOG in a folder of its own. Level 0 is the whole model; each further one has half the Gaussians of
the one before. A viewer draws a leaf in the level that suits its distance, and loads a chunk when a leaf needs it.
Coordinates are those of a PLY.

The model is divided at medians into blocks, which are simplified and encoded one after the other: a block and a chunk a
level are in memory beside the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from splatcli import __version__
from splatcli.checkpoint.atomic import write_folder_atomically
from splatcli.checkpoint.foreign.imported import Columns, ImportedModel, check_finite
from splatcli.config import first_fault
from splatcli.errors import ModelFileError, OutputError, VersionError, first_line
from splatcli.formats.format import ExportMetadata, Format, file_size
from splatcli.formats.quantisation import LOG_SCALE_RANGE
from splatcli.formats.sog import STREAMED, import_sog, sog_files
from splatcli.gaussians import Gaussians
from splatcli.progress import track
from splatcli.rotation import rotation_matrices
from splatcli.scene.points import morton_order

INDEX = STREAMED
SUFFIX = ".lod"
VERSION = 1
SH_DEGREE = 3
#: Gaussians of level 0 in a leaf at most: a leaf has one level at a time.
LEAF = 1 << 15
#: Gaussians in a chunk at most: a chunk is loaded as a whole, and has a palette of harmonics of its own.
CHUNK = 1 << 19
#: Gaussians of level 0 that are simplified at once.
BLOCK = 1 << 19
#: Of positions along an axis, the share at either end that does not decide which axis is divided.
_STRAYS = 0.01

#: Name of a chunk's folder: level and number.
_CHUNK = re.compile(r"\d+_\d+")

Indices = NDArray[np.int64]
#: Yields levels 1, 2, ... of some of the Gaussians. They get the rows of these, [M].
Coarser = Callable[[Gaussians, Tensor], Iterator[Gaussians]]


# --- the tree


@dataclass(slots=True, eq=False)
class _Node:
    """A part of space.

    rows: of the Gaussians of level 0 in it, [N]; for an inner node those of its children.
    axis, cut: what is below the cut belongs to the first child, everything else to the second. Leaves have no children.
    low, high: [3], bounds of the Gaussians of all levels, of leaves.
    lods: by level the entry of a leaf.
    """

    rows: Indices
    axis: int = 0
    cut: float = 0.0
    children: tuple[_Node, ...] = ()
    low: NDArray[np.float64] = field(default_factory=lambda: np.full(3, np.inf))
    high: NDArray[np.float64] = field(default_factory=lambda: np.full(3, -np.inf))
    lods: dict[str, dict[str, int]] = field(default_factory=dict)

    @classmethod
    def divided(cls, means: NDArray[np.float32], rows: Indices, leaf: int) -> _Node:
        """Return the tree whose leaves hold at most ``leaf`` of the rows of ``means`` [N, 3], or more at one place."""
        if len(rows) <= leaf:
            return cls(rows)
        inside = means[rows]
        extent = np.ptp(np.quantile(inside, [_STRAYS, 1 - _STRAYS], axis=0), axis=0)
        if not extent.any():
            return cls(rows)
        axis = int(extent.argmax())
        along = inside[:, axis]
        cut = float(np.partition(along, len(rows) // 2)[len(rows) // 2])
        if not (along < cut).any():  # at least half of them share the least coordinate
            cut = float(along[along > cut].min())
        parts = rows[along < cut], rows[along >= cut]
        return cls(rows, axis, cut, tuple(cls.divided(means, part, leaf) for part in parts))

    def parts(self, most: int) -> Iterator[_Node]:
        """Yield the largest nodes of at most ``most`` Gaussians, and leaves."""
        if len(self.rows) <= most or not self.children:
            yield self
        else:
            for child in self.children:
                yield from child.parts(most)

    def located(self, means: NDArray[np.float32], rows: Indices) -> Iterator[tuple[_Node, Indices]]:
        """Yield each leaf with the rows of ``means`` [N, 3] that lie in it."""
        if not self.children:
            yield self, rows
            return
        below = means[rows, self.axis] < self.cut
        for child, part in zip(self.children, (rows[below], rows[~below]), strict=True):
            yield from child.located(means, part)

    def entry(self) -> dict[str, Any]:
        """Return the node as lod-meta.json has it."""
        entries = [child.entry() for child in self.children]
        if not entries:
            return {"bound": {"min": _rounded(self.low), "max": _rounded(self.high)}, "lods": self.lods}
        low, high = ([entry["bound"][end] for entry in entries] for end in ("min", "max"))
        bound = {"min": np.min(low, axis=0).tolist(), "max": np.max(high, axis=0).tolist()}
        return {"bound": bound, "children": entries}

    def include(self, gaussians: Gaussians) -> None:
        """Extend the bounds of a leaf to the Gaussians, each as large as one standard deviation."""
        scales = gaussians.log_scales.double().clamp(*LOG_SCALE_RANGE).exp()
        reach = (rotation_matrices(gaussians.quats.double()) * scales[:, None, :]).norm(dim=2)
        means = gaussians.means.double()
        self.low = np.minimum(self.low, (means - reach).amin(dim=0).numpy())
        self.high = np.maximum(self.high, (means + reach).amax(dim=0).numpy())


def _rounded(values: NDArray[np.float64]) -> list[float]:
    """Return numbers with the digits of float32."""
    return [float(f"{value:.7g}") for value in values]


def level_counts(count: int, levels: int) -> list[int]:
    """Return the Gaussians of each level of ``count``: half as many each time, and at least one."""
    return [max(1, count >> level) for level in range(levels)]


# --- writing


@dataclass(slots=True, eq=False)
class _Chunks:
    """The chunks of a folder. Gaussians of a level are written when they fill a chunk."""

    folder: Path
    antialiased: bool
    names: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    bytes: int = 0
    waiting: dict[int, list[Gaussians]] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)
    made: dict[int, int] = field(default_factory=dict)

    def add(self, level: int, gaussians: Gaussians) -> dict[str, int]:
        """Return the entry of Gaussians that lie in one leaf."""
        held = sum(map(len, self.waiting.get(level, [])))
        if held and held + len(gaussians) > CHUNK:
            self._write(level)
            held = 0
        if not held:
            self.places[level] = len(self.names)
            self.names.append(f"{level}_{self.made.get(level, 0)}/meta.json")
            self.made[level] = self.made.get(level, 0) + 1
        self.waiting.setdefault(level, []).append(gaussians)
        self.counts += [0] * (level + 1 - len(self.counts))
        self.counts[level] += len(gaussians)
        return {"file": self.places[level], "offset": held, "count": len(gaussians)}

    def finish(self) -> None:
        """Write the chunks that are not full."""
        for level in sorted(self.waiting):
            self._write(level)

    def _write(self, level: int) -> None:
        parts = self.waiting.pop(level)
        columns = {name: torch.cat([getattr(part, name) for part in parts]) for name, _ in parts[0].items()}
        folder = (self.folder / self.names[self.places[level]]).parent
        folder.mkdir()
        for name, content in sog_files(Gaussians(**columns), antialiased=self.antialiased).items():
            (folder / name).write_bytes(content)
            self.bytes += len(content)


@dataclass(frozen=True, slots=True)
class Written:
    """The content of a folder: Gaussians by level, number of chunks, bytes of all files."""

    counts: list[int]
    chunks: int
    bytes: int


def write_streamed(gaussians: Gaussians, folder: Path, metadata: ExportMetadata, coarser: Coarser) -> Written:
    """Write a folder of chunks and its index, or nothing. gaussians: on the CPU, N > 0.

    What is at ``folder`` is replaced: check_folder() tells whether it may be.
    Raises OutputError; DivergedError for values that are not finite.
    """
    check_finite(gaussians)
    written: list[Written] = []
    write_folder_atomically(folder, lambda place: written.append(_fill(gaussians, place, metadata, coarser)))
    return written[0]


def _fill(gaussians: Gaussians, folder: Path, metadata: ExportMetadata, coarser: Coarser) -> Written:
    means = gaussians.means.numpy()
    tree = _Node.divided(means, np.arange(len(means)), LEAF)
    chunks = _Chunks(folder, metadata.antialiased)
    for block in track(list(tree.parts(BLOCK)), "levels of detail"):
        rows = torch.from_numpy(block.rows)
        part = gaussians.map(lambda tensor, rows=rows: tensor[rows])  # type: ignore[misc]
        _add(chunks, 0, block, part)
        for level, fewer in enumerate(coarser(part, rows), 1):
            _add(chunks, level, block, fewer)
    chunks.finish()
    index = {
        "version": VERSION,
        "asset": {"generator": f"splatcli {__version__}"},
        "count": sum(chunks.counts),
        "counts": chunks.counts,
        "lodLevels": len(chunks.counts),
        "filenames": chunks.names,
        "tree": tree.entry(),
    }
    content = json.dumps(index, allow_nan=False, separators=(",", ":")).encode()
    (folder / INDEX).write_bytes(content)
    return Written(chunks.counts, len(chunks.names), chunks.bytes + len(content))


def _add(chunks: _Chunks, level: int, block: _Node, gaussians: Gaussians) -> None:
    """Add the Gaussians of one level of a block, leaf by leaf, each in Morton order."""
    means = gaussians.means.numpy()
    for leaf, rows in block.located(means, np.arange(len(means))):
        if len(rows):
            order = torch.from_numpy(rows[morton_order(means[rows])])
            inside = gaussians.map(lambda tensor, order=order: tensor[order])  # type: ignore[misc]
            leaf.include(inside)
            leaf.lods[str(level)] = chunks.add(level, inside)


def folder_to_write(output: Path, name: str | None) -> Path | None:
    """Return the folder that a path names for a streamed SOG; None where it names something else.

    output: NAME.lod, or the index in a folder of any name. name: the format where one is given.
    """
    if output.name == INDEX and name in (None, "lod"):
        return output.parent
    return output if name == "lod" or (name is None and output.suffix.lower() == SUFFIX) else None


def check_index(folder: Path) -> None:
    """Raise ModelFileError for a folder of chunks without an index, and for an empty one named like a streamed SOG."""
    if (folder / INDEX).exists():
        return
    chunks = sorted(path.parent.name for path in folder.glob("*_*/meta.json") if _CHUNK.fullmatch(path.parent.name))
    empty = folder.suffix.lower() == SUFFIX and not any(folder.iterdir())
    if not chunks and not empty:
        return
    alone = f"; each chunk is a SOG of its own, such as {chunks[0]}/meta.json" if chunks else ""
    raise ModelFileError(
        f"this is the folder of a streamed SOG without its index {INDEX}",
        where=folder,
        remedy=f"copy all of the folder again, or export the model again{alone}",
    )


def check_folder(folder: Path, *, overwrite: bool) -> None:
    """Raise OutputError where something is at ``folder`` that a streamed SOG must not replace.

    Nothing but an empty folder is replaced without ``overwrite``, and with it only a folder of write_streamed().
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise OutputError("this is a file, and a streamed SOG is a folder", where=folder, remedy="name another place")
    if not any(folder.iterdir()):
        return
    if (stranger := _stranger(folder)) is not None:
        raise OutputError(
            f"the folder holds {stranger!r}, which splat export did not write", where=folder, remedy="name a new folder"
        )
    if not overwrite:
        raise OutputError("the folder is already there", where=folder, remedy="-w replaces it")


def _stranger(folder: Path) -> str | None:
    """Return something in a folder that write_streamed() did not put there; None where all is its own."""
    try:
        index = _Index.read(folder / INDEX)
    except (ModelFileError, VersionError):
        index = None
    if index is None or not index.asset.generator.startswith("splatcli "):
        return next(iter(sorted(path.name for path in folder.iterdir())))
    chunks = {PurePosixPath(name).parent for name in index.filenames}
    for path in sorted(folder.rglob("*")):
        place = PurePosixPath(path.relative_to(folder).as_posix())
        known = place in chunks or str(place) == INDEX
        if not known and not (place.parent in chunks and place.suffix in (".webp", ".json")):
            return str(place)
    return None


# --- reading: the finest level


Count = Annotated[int, Field(ge=0, le=1 << 32)]
Name = Annotated[str, Field(min_length=1, max_length=1024)]


class _Asset(BaseModel):
    generator: str = ""


class _Range(BaseModel):
    """A range of Gaussians in a chunk."""

    file: Count
    offset: Count = 0
    count: Count


class _Index(BaseModel):
    """lod-meta.json, as far as it is needed; its tree is walked by ranges()."""

    model_config = ConfigDict(extra="ignore")
    version: int = VERSION
    asset: _Asset = _Asset()
    levels: Annotated[int, Field(alias="lodLevels", ge=1, le=1000)]
    environment: Name | None = None
    filenames: list[Name]
    tree: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> _Index:
        """Return the index at ``path``. Raises ModelFileError, VersionError."""
        file_size(path)
        try:
            found = cls.model_validate(json.loads(path.read_bytes()))
        except ValidationError as error:
            reason = first_fault(error, "the text")
            raise ModelFileError(f"not the index of a streamed SOG: {reason}", where=path) from None
        except (ValueError, RecursionError) as error:
            reason = first_line(error)[:200]
            raise ModelFileError(f"not the index of a streamed SOG ({reason})", where=path) from None
        if found.version != VERSION:
            raise VersionError(
                f"streamed SOG version {found.version}; {VERSION} is read",
                where=path,
                remedy="export it again with another program",
            )
        return found

    def ranges(self, path: Path) -> list[_Range]:
        """Return the range of each leaf's finest level. Raises ModelFileError."""
        found = []
        pending: list[Any] = [self.tree]
        while pending:
            node = pending.pop()
            children, lods = (node.get(key) for key in ("children", "lods")) if isinstance(node, dict) else (None, None)
            if isinstance(lods, dict):
                levels = _levels(lods, path)
                filled = [level for level, entry in levels.items() if entry.count]
                found += [levels[min(filled)]] if filled else []
            elif isinstance(children, list):
                pending += reversed(children)
            else:
                raise ModelFileError("a node of the tree has neither levels nor children", where=path)
        if not found:
            raise ModelFileError("no leaf of the tree has Gaussians", where=path)
        return found


def _levels(lods: dict[str, Any], path: Path) -> dict[int, _Range]:
    """Return the ranges of a leaf by level. Raises ModelFileError."""
    try:
        return {int(level): _Range.model_validate(entry) for level, entry in lods.items()}
    except ValidationError as error:
        reason = first_fault(error, "a level")
    except ValueError as error:
        reason = str(error)
    raise ModelFileError(f"a leaf of the tree has no readable levels: {reason}", where=path)


def import_streamed(path: Path, *, lenient: bool = False) -> ImportedModel:
    """Return the finest level of the streamed SOG with the index ``path``, and its environment.

    Raises ModelFileError, VersionError.
    """
    index = _Index.read(path)
    by_file: dict[int, list[_Range]] = {}
    for one in index.ranges(path):
        by_file.setdefault(one.file, []).append(one)
    if max(by_file) >= len(index.filenames):
        raise ModelFileError(f"a leaf names chunk {max(by_file)}; there are {len(index.filenames)}", where=path)
    if len(set(index.filenames)) < len(index.filenames):
        raise ModelFileError("a chunk is listed twice", where=path)
    parts, notes = [], [f"level 0 of {index.levels} levels of detail is read"]
    antialiased = False
    for file, ranges in track(sorted(by_file.items()), "chunks", len(by_file)):
        chunk = _chunk(path, index.filenames[file], notes)
        antialiased |= chunk.antialiased
        parts.append(_rows(chunk.columns, ranges, index.filenames[file], path))
    if index.environment is not None:
        parts.append(_chunk(path, index.environment, notes).columns)
        notes.append(f"{len(parts[-1].means):,} Gaussians of it are its environment")
    return ImportedModel(
        "streamed SOG", _joined(parts), declared=True, sealed=True, antialiased=antialiased, notes=notes
    )


def _chunk(index: Path, name: str, notes: list[str]) -> ImportedModel:
    """Return the model in a chunk; its notes that are not there yet are added."""
    place = PurePosixPath(name)
    if place.is_absolute() or ".." in place.parts or "\\" in name or "\0" in name or place.name != "meta.json":
        raise ModelFileError(f"{name!r} is no chunk inside this folder", where=index)
    model = import_sog(index.parent / place)
    notes += [note for note in model.notes if note not in notes]
    return model


def _rows(columns: Columns[Tensor], ranges: Sequence[_Range], name: str, path: Path) -> Columns[Tensor]:
    """Return the ranges of a chunk in their order; none may reach beyond it or overlap another."""
    count, end = len(columns.means), 0
    for one in sorted(ranges, key=lambda one: one.offset):
        if one.offset < end or one.offset + one.count > count:
            raise ModelFileError(
                f"a leaf takes {one.count:,} Gaussians of {name} from {one.offset:,} on; it has {count:,}, and {end:,} "
                "of them belong to other leaves",
                where=path,
            )
        end = one.offset + one.count
    taken = torch.cat([torch.arange(one.offset, one.offset + one.count) for one in ranges])
    return Columns(*(column[taken] for column in columns))


def _joined(parts: Iterable[Columns[Tensor]]) -> Columns[Tensor]:
    """Return the columns of all parts; those of lower SH degree get zeros."""
    found = list(parts)
    most = max(part.shN.shape[1] for part in found)
    found = [
        part._replace(shN=torch.nn.functional.pad(part.shN, (0, 0, 0, most - part.shN.shape[1]))) for part in found
    ]
    return Columns(*(torch.cat([getattr(part, name) for part in found]) for name in Columns._fields))


FORMAT = Format("lod", "", "a streamed SOG", SH_DEGREE, read=import_streamed, names=(INDEX,))
