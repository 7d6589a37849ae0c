"""``.ksplat``, the compressed scenes of the GaussianSplats3D viewer; read, not written.

A header of 4096 bytes, 1024 for each section that there is room for, then section after section: the sizes of buckets
that are not full, the centres of all buckets, and the Gaussians, bucket by bucket. Level 0 is float32; level 1 has
positions as whole numbers around the bucket's centre, and halves; level 2 also has harmonics as bytes.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from splatcli.checkpoint.foreign.imported import (
    Columns,
    ImportedModel,
)
from splatcli.errors import ModelFileError, VersionError
from splatcli.formats.format import Format, file_size
from splatcli.formats.quantisation import Doubles, log_scales_of, logits_of, negative_row, sh0_of
from splatcli.gaussians import SHN_COUNTS

_HEADER_SIZE, _SECTION_SIZE = 4096, 1024
_LEVELS = (0, 1, 2)
#: The format's writer knows no higher harmonics.
_MAX_DEGREE = 2
#: Three floats: where a bucket is.
_BUCKET_BYTES = 12
#: Of harmonics in bytes where the header does not say.
_SH_RANGE = (-1.5, 1.5)
#: What stands for half a bucket's side where a section does not say.
_QUANTA = 32767


@dataclass(frozen=True, slots=True)
class _Section:
    """A section as its header describes it, compared with the file; start: its first byte, rows: that of its Gaussians.

    count: Gaussians to read, of the ``room`` that there is for them. capacity: of a bucket; full, partial: buckets.
    middle: what stands for the centre of a bucket; quantum: what a step of a position is, in units.
    """

    number: int
    count: int
    room: int
    capacity: int
    buckets: int
    full: int
    partial: int
    middle: int
    quantum: float
    degree: int
    start: int
    rows: int


class _Rows(NamedTuple):
    """N Gaussians as the file has them: standard deviations, not logarithms; colours and opacity in 0...1."""

    means: Doubles
    scales: NDArray[Any]
    quats: NDArray[Any]
    rgba: Doubles
    shN: Doubles


def import_ksplat(path: Path, *, lenient: bool = False) -> ImportedModel:
    """Return the model in a ``.ksplat`` file of version 0.1 or a later 0. Raises ModelFileError; VersionError."""
    file = _File.opened(path)
    sections, end = file.sections()
    total = sum(section.count for section in sections)
    if not total or total != file.count:
        raise file.fault(16, f"{file.count:,} Gaussians are promised; the sections hold {total:,}")
    surplus = len(file.content) - end
    if surplus and not lenient:
        raise ModelFileError(
            f"{surplus:,} bytes follow the data",
            where=f"{path}, byte {end}",
            remedy="get the file anew, or take what is there with --lenient",
        )
    low, high = file.sh_range
    if file.level == 2 and not (math.isfinite(low) and math.isfinite(high)):
        raise file.fault(36, f"harmonics from {low} to {high}; finite numbers are wanted")
    degree = max(section.degree for section in sections)
    with np.errstate(all="ignore"):  # NaN of a damaged file; they are refused later, with their place
        parts = [file.gaussians(section, SHN_COUNTS[degree]) for section in sections]
        rows = _Rows(*(np.concatenate(part) for part in zip(*parts, strict=True)))
    return ImportedModel(
        f"ksplat, compression level {file.level}",
        Columns.tensors(
            means=rows.means,
            quats=rows.quats,
            scales=log_scales_of(rows.scales),
            opacities=logits_of(rows.rgba[:, 3], 1 / 255),
            sh0=sh0_of(rows.rgba[:, :3]),
            shN=rows.shN,
        ),
        declared=True,
        sealed=True,
        notes=[f"ignored {surplus} bytes behind the data"] if surplus else [],
    )


@dataclass(frozen=True, slots=True, eq=False)
class _File:
    """An opened file: its bytes, its path for messages, and what its header says.

    room: sections that there is room for. count: Gaussians of all. level: of compression.
    sh_range: the values of the bytes 0 and 255 of harmonics.
    """

    content: bytes
    path: Path
    room: int
    count: int
    level: int
    sh_range: tuple[float, float]

    @classmethod
    def opened(cls, path: Path) -> _File:
        """Return the file at ``path``. Raises ModelFileError, VersionError."""
        file_size(path)
        content = path.read_bytes()
        if len(content) < _HEADER_SIZE:
            raise _fault(
                path, len(content), f"truncated: {len(content):,} bytes; the header alone takes {_HEADER_SIZE:,}"
            )
        if content[0] != 0 or content[1] < 1:
            raise VersionError(
                f"ksplat version {content[0]}.{content[1]}; 0.1 is read",
                where=f"{path}, byte 0",
                remedy="export it again with a current GaussianSplats3D; or it is no .ksplat, and has the wrong name",
            )
        (room,) = struct.unpack_from("<I", content, 4)
        count, level = struct.unpack_from("<IH", content, 16)
        if level not in _LEVELS:
            raise _fault(path, 20, f"compression level {level}; 0, 1 and 2 are known")
        low, high = struct.unpack_from("<2f", content, 36)
        return cls(content, path, room, count, level, (low or _SH_RANGE[0], high or _SH_RANGE[1]))

    def fault(self, byte: int, what: str) -> ModelFileError:
        """Return the error for what is at a byte of the file."""
        return _fault(self.path, byte, what)

    def sections(self) -> tuple[list[_Section], int]:
        """Return (the sections that hold Gaussians, the byte behind the last one). Raises ModelFileError."""
        size, place = len(self.content), _HEADER_SIZE + self.room * _SECTION_SIZE
        if place > size:
            raise self.fault(4, f"{self.room:,} sections are promised, which {size:,} bytes cannot hold")
        found = []
        for number in range(self.room):
            section = self._section(number, place)
            place = section.rows + section.room * _row(self.level, section.degree).itemsize
            if place > size:
                raise self.fault(
                    section.start,
                    f"truncated: section {number} of {section.room:,} Gaussians and {section.buckets:,} buckets ends "
                    f"at byte {place:,}, and the file at {size:,}",
                )
            if section.count:
                found.append(section)
        return found, place

    def _section(self, number: int, start: int) -> _Section:
        """Return section ``number``, whose data begin at byte ``start``; only its own numbers are compared."""
        header = _HEADER_SIZE + number * _SECTION_SIZE
        count, room, capacity, buckets, side, storage = struct.unpack_from("<4IfH", self.content, header)
        (quanta,) = struct.unpack_from("<I", self.content, header + 24)
        full, partial, degree = struct.unpack_from("<IIH", self.content, header + 32)
        if count > room:
            raise self.fault(header, f"section {number} holds {count:,} Gaussians in room for {room:,}")
        if degree > _MAX_DEGREE:
            raise self.fault(header + 40, f"section {number} has SH degree {degree}; 0 to {_MAX_DEGREE} are known")
        if self.level and count:
            if buckets and storage != _BUCKET_BYTES:
                raise self.fault(
                    header + 20, f"buckets of {storage} bytes in section {number}; {_BUCKET_BYTES} are known"
                )
            if full + partial > buckets or full * capacity > room:
                raise self.fault(
                    header + 32,
                    f"{full:,} full buckets of {capacity:,} and {partial:,} others in section {number}, which has "
                    f"{buckets:,} buckets and room for {room:,} Gaussians",
                )
            if not (math.isfinite(side) and side > 0):
                raise self.fault(
                    header + 16, f"buckets with sides of {side} in section {number}; more than 0 is wanted"
                )
        quanta = quanta or _QUANTA
        return _Section(
            number=number,
            count=count,
            room=room,
            capacity=capacity,
            buckets=buckets,
            full=full,
            partial=partial,
            middle=quanta,
            quantum=side / 2 / quanta,
            degree=degree,
            start=start,
            rows=start + 4 * partial + storage * buckets,
        )

    def gaussians(self, section: _Section, shN_count: int) -> _Rows:
        """Return the Gaussians of a section that lies inside the file, with so many harmonics beside the constant."""
        kind = _row(self.level, section.degree)
        rows = np.frombuffer(self.content, kind, section.count, section.rows)
        if (row := negative_row(rows["scales"])) is not None:
            raise self.fault(
                section.rows + row * kind.itemsize + rows["means"][row].nbytes,
                f"the scales of Gaussian {row} in section {section.number} are {rows['scales'][row].tolist()}; "
                "standard deviations are above 0",
            )
        means = rows["means"].astype(np.float64)
        if self.level:
            means = (means - section.middle) * section.quantum + self._centres(section)
        harmonics = rows["shN"].astype(np.float64)
        if self.level == 2:
            low, high = self.sh_range
            harmonics = harmonics / 255 * (high - low) + low
        shN = np.zeros((section.count, shN_count, 3))
        for band in range(1, section.degree + 1):
            first, last = SHN_COUNTS[band - 1], SHN_COUNTS[band]
            # Band by band, and in each the reds before the greens before the blues.
            shN[:, first:last] = harmonics[:, 3 * first : 3 * last].reshape(-1, 3, last - first).transpose(0, 2, 1)
        return _Rows(means, rows["scales"], rows["quats"], rows["rgba"] / 255.0, shN)

    def _centres(self, section: _Section) -> Doubles:
        """Return [N, 3]: the centre of each Gaussian's bucket; full buckets come first."""
        others = np.frombuffer(self.content, "<u4", section.partial, section.start)
        sizes = np.concatenate([np.full(section.full, section.capacity, np.int64), others.astype(np.int64)])
        ends = np.cumsum(sizes)
        held = int(ends[-1]) if len(ends) else 0
        if held < section.count:
            raise self.fault(
                section.start,
                f"the buckets of section {section.number} hold {held:,} Gaussians, and it has {section.count:,}",
            )
        first = section.start + 4 * section.partial
        centres = np.frombuffer(self.content, "<f4", 3 * section.buckets, first).reshape(-1, 3)
        chosen: Doubles = centres[np.searchsorted(ends, np.arange(section.count), side="right")].astype(np.float64)
        return chosen


def _fault(path: Path, byte: int, what: str) -> ModelFileError:
    return ModelFileError(what, where=f"{path}, byte {byte}")


def _row(level: int, degree: int) -> np.dtype[Any]:
    """Return a Gaussian: position, standard deviations, w x y z, R G B and opacity, harmonics."""
    real, position = ("<f4", "<f4") if level == 0 else ("<f2", "<u2")
    return np.dtype(
        [
            ("means", position, 3),
            ("scales", real, 3),
            ("quats", real, 4),
            ("rgba", "u1", 4),
            ("shN", "u1" if level == 2 else real, 3 * SHN_COUNTS[degree]),
        ]
    )


FORMAT = Format("ksplat", ".ksplat", "a .ksplat file", 2, read=import_ksplat, names=("*.ksplat",))
