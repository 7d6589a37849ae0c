"""SPZ, Niantic's compressed splats: about 28 bytes a Gaussian with all harmonics.

Positions are 24-bit fixed point, opacities, colours and log-scales a byte each, rotations the three smallest components
of the quaternion in 10 bits each (before version 3: a byte each of x y z), SH a byte each, coefficient by coefficient,
R G B together. Coordinates are those of a PLY, as Niantic's own converters and SuperSplat write them; files have no
word for their frame but Adobe's extension, which is read.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splatcli.checkpoint.foreign.imported import (
    Columns,
    Floats,
    ImportedModel,
)
from splatcli.errors import ModelFileError, ResourceError, UsageError, VersionError
from splatcli.formats.format import Encoded, ExportMetadata, Format, Write, check_expansion, file_size
from splatcli.formats.quantisation import (
    Doubles,
    from_smallest_three,
    logits_of,
    opacities_of,
    quantised,
    smallest_three,
    unit_quats,
)
from splatcli.formats.transform import reframed
from splatcli.gaussians import SHN_COUNTS, Gaussians

# --- the container: a header and attribute streams, in one gzip (versions 1 to 3) or as zstd frames (4)
#
# Every length is compared with the size of the file before anything of that length is made.

MAGIC = b"NGSP"
GZIP = b"\x1f\x8b"
ANTIALIASED = 0x1
_EXTENDED = 0x2
#: Spark's mark of a tree of Gaussians at all levels of detail, with halved opacities.
_LEVELS = 0x80

_HEADER = struct.Struct("<4sIIBBBB")
#: magic, version, count, degree, fractional bits, flags, number of streams, place of the table of streams.
_HEADER_4 = struct.Struct("<4sIIBBBBI12x")
_STREAM = struct.Struct("<QQ")
#: An extension: its number, and bytes of its content.
_EXTENSION = struct.Struct("<II")
#: Adobe's extension that names the frame, and its frames by number: where x, y and z of the file go. R is right, U up
#: and B back. 0 says nothing.
_FRAME_EXTENSION = 0xADBE0003
_PLY_FRAME = "RDF"
#: Of those with y and z exchanged, the library of the format reads some against their names.
_DISPUTED = ("LFD", "RFD", "LBU", "RBU")
_FRAMES = (
    *("", "LDB", "RDB", "LUB", "RUB", "LDF", "RDF", "LUF", "RUF"),
    *("LFD", "RFD", "LFU", "RFU", "LBD", "RBD", "LBU", "RBU"),
)
#: What extensions may add at the end; those that are known take a few bytes.
_MAX_EXTENSIONS = 1 << 20
_GZIP_WINDOW = 31
#: The official encoder's, and the most memory that a frame may ask for.
_ZSTD_LEVEL = 12
_ZSTD_WINDOW = 1 << 27


@dataclass(frozen=True, slots=True)
class Header:
    """The header of an SPZ file. fractional_bits: of the fixed-point positions."""

    version: int
    count: int
    sh_degree: int
    fractional_bits: int = 12
    flags: int = 0

    def lengths(self) -> list[int]:
        """Return bytes of each stream: positions, opacities, colours, scales, rotations, SH."""
        position = 6 if self.version == 1 else 9
        rotation = 4 if self.version >= 3 else 3
        each = (position, 1, 3, 3, rotation, 3 * SHN_COUNTS[self.sh_degree])
        return [self.count * width for width in each]


def pack(header: Header, streams: Sequence[bytes]) -> bytes:
    """Return the file's content. Raises ResourceError when version 4 is asked for without the package that it needs."""
    if header.version < 4:
        head = _HEADER.pack(
            MAGIC, header.version, header.count, header.sh_degree, header.fractional_bits, header.flags, 0
        )
        return gzip.compress(head + b"".join(streams), compresslevel=6, mtime=0)
    compressor = _zstandard().ZstdCompressor(level=_ZSTD_LEVEL)
    kept = [stream for stream in streams if stream]
    frames = [compressor.compress(stream) for stream in kept]
    head = _HEADER_4.pack(
        MAGIC,
        header.version,
        header.count,
        header.sh_degree,
        header.fractional_bits,
        header.flags,
        len(kept),
        _HEADER_4.size,
    )
    table = b"".join(_STREAM.pack(len(frame), len(stream)) for frame, stream in zip(frames, kept, strict=True))
    return head + table + b"".join(frames)


def unpack(content: bytes, path: Path, *, lenient: bool) -> tuple[Header, list[bytes], str, list[str]]:
    """Return (header, the six streams, the frame where the content names it, notes). path: of messages.

    Raises ModelFileError, VersionError, ResourceError as pack().
    """
    if content.startswith(GZIP):
        return _unpack_gzip(content, path, lenient)
    if len(content) < 8 or not content.startswith(MAGIC):
        raise ModelFileError(f"not an SPZ: it starts with {content[:8]!r}", where=path)
    if struct.unpack_from("<I", content, 4)[0] >= 4:
        return _unpack_zstd(content, path, lenient)
    header = _header(content, path)
    return header, *_split(content[_HEADER.size :], header, path, lenient)


def _unpack_gzip(content: bytes, path: Path, lenient: bool) -> tuple[Header, list[bytes], str, list[str]]:
    try:
        beginning = zlib.decompressobj(_GZIP_WINDOW)
        start = beginning.decompress(content, _HEADER.size)
        if len(start) < _HEADER.size and not beginning.eof:
            raise ModelFileError(f"truncated: {len(content)} bytes do not hold the header", where=path)
        header = _header(start, path)
        needed = sum(header.lengths())
        check_expansion(needed, len(content), path, f"{header.count:,} Gaussians of SH degree {header.sh_degree}")
        most = _HEADER.size + needed + _MAX_EXTENSIONS
        inflater = zlib.decompressobj(_GZIP_WINDOW)
        whole = inflater.decompress(content, most)
        if not inflater.eof:  # there is more, or the end with its checksum is missing
            whole += inflater.decompress(inflater.unconsumed_tail, 1)
    except zlib.error as error:
        raise ModelFileError(f"damaged: {error}", where=path) from None
    if not inflater.eof:
        fault = "truncated" if len(whole) <= most else f"more than the {most:,} bytes that it should unpack to"
        raise ModelFileError(f"damaged: {fault}", where=path)
    return header, *_split(whole[_HEADER.size :], header, path, lenient)


def _unpack_zstd(content: bytes, path: Path, lenient: bool) -> tuple[Header, list[bytes], str, list[str]]:
    size = len(content)
    if size < _HEADER_4.size:
        raise ModelFileError(f"truncated: {size} bytes, the header alone takes {_HEADER_4.size}", where=path)
    _, _, _, _, _, _, streams, table = _HEADER_4.unpack_from(content)
    header = _header(content, path)
    lengths = header.lengths()
    expected = [length for length in lengths if length]
    if streams != len(expected):
        raise ModelFileError(f"{streams} streams; {len(expected)} are expected", where=path)
    first = table + streams * _STREAM.size
    if table < _HEADER_4.size or first > size:
        raise ModelFileError(f"its table of streams is said to begin at byte {table} of {size}", where=path)
    sizes = [_STREAM.unpack_from(content, table + i * _STREAM.size) for i in range(streams)]
    if [unpacked for _, unpacked in sizes] != expected:
        raise ModelFileError(
            f"its streams are to unpack to {[unpacked for _, unpacked in sizes]} bytes; {header.count:,} Gaussians of "
            f"SH degree {header.sh_degree} take {expected}",
            where=path,
        )
    end = first + sum(packed for packed, _ in sizes)
    if end > size or (end < size and not lenient):
        raise ModelFileError(
            f"{end:,} bytes are promised, {size:,} are there" + (": truncated" if end > size else ""), where=path
        )
    check_expansion(sum(expected), size, path, f"{header.count:,} Gaussians of SH degree {header.sh_degree}")
    found, position = [], first
    for packed, unpacked in sizes:
        found.append(_inflate(content[position : position + packed], unpacked, path))
        position += packed
    kept = iter(found)
    frame, notes = _extensions(content[_HEADER_4.size : table], path) if header.flags & _EXTENDED else ("", [])
    notes += [f"ignored {size - end} bytes behind the data"] if end < size else []
    return header, [next(kept) if length else b"" for length in lengths], frame, notes


def _inflate(frame: bytes, length: int, path: Path) -> bytes:
    """Return a zstd frame of exactly so many bytes."""
    zstandard = _zstandard()
    try:
        reader = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).stream_reader(frame)
        found: bytes = reader.read(length + 1)
    except zstandard.ZstdError as error:
        raise ModelFileError(f"damaged: {error}", where=path) from None
    if len(found) != length:
        raise ModelFileError(f"damaged: a stream of {length:,} bytes has another length", where=path)
    return found


def _header(start: bytes, path: Path) -> Header:
    """Return the fields that all versions share."""
    if len(start) < _HEADER.size or not start.startswith(MAGIC):
        raise ModelFileError(
            f"not an SPZ: it unpacks to {start[:8]!r}",
            where=path,
            remedy="if another file was compressed with gzip, unpack it: gunzip FILE",
        )
    _, version, count, degree, bits, flags, _ = _HEADER.unpack_from(start)
    if not 1 <= version <= 4:
        raise VersionError(
            f"SPZ version {version}; 1 to 4 are read", where=path, remedy="export it again as version 3, or as a PLY"
        )
    if degree >= len(SHN_COUNTS):
        raise ModelFileError(f"SH degree {degree}; 0 to {len(SHN_COUNTS) - 1} are known", where=path)
    if flags & _LEVELS:
        raise ModelFileError(
            "an SPZ with Spark's levels of detail, which hold each surface several times",
            where=path,
            remedy="name the file that Spark made it from",
        )
    if bits > 24:
        raise ModelFileError(f"{bits} fractional bits in positions of 24", where=path)
    return Header(version, count, degree, bits, flags)


def _extensions(content: bytes, path: Path) -> tuple[str, list[str]]:
    """Return (the frame that an extension names, notes on others)."""
    frame, place, others = "", 0, 0
    while place + _EXTENSION.size <= len(content):
        kind, length = _EXTENSION.unpack_from(content, place)
        start = place + _EXTENSION.size
        place = start + length
        if kind != _FRAME_EXTENSION:
            others += 1
            continue
        number = int.from_bytes(content[start : start + 4], "little")
        if length != 4 or place > len(content) or number >= len(_FRAMES):
            raise ModelFileError(
                f"its frame has the number {number} in {length} bytes; 0 to {len(_FRAMES) - 1} in 4 are known",
                where=path,
            )
        frame = _FRAMES[number]
        if frame in _DISPUTED:
            raise ModelFileError(
                f"its frame is {frame}, which programs read in two ways",
                where=path,
                remedy="export it again in another frame, such as RDF or RUB",
            )
    return frame, [f"ignored {others} of its extensions"] if others else []


def _split(body: bytes, header: Header, path: Path, lenient: bool) -> tuple[list[bytes], str, list[str]]:
    """Return (the streams that stand one after the other, the frame where the file names it, notes)."""
    lengths = header.lengths()
    surplus = len(body) - sum(lengths)
    if surplus < 0:
        raise ModelFileError(
            f"truncated: {header.count:,} Gaussians of SH degree {header.sh_degree} take {sum(lengths):,} bytes, "
            f"{len(body):,} are there",
            where=path,
        )
    if surplus and not (lenient or header.flags & _EXTENDED):
        raise ModelFileError(
            f"{surplus:,} bytes follow the data",
            where=path,
            remedy="export it again, or ignore them with --lenient",
        )
    streams, position = [], 0
    for length in lengths:
        streams.append(body[position : position + length])
        position += length
    if header.flags & _EXTENDED:
        return streams, *_extensions(body[position:], path)
    return streams, "", [f"ignored {surplus} bytes behind the data"] if surplus else []


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise ResourceError(
            "SPZ version 4 is compressed with zstd, which needs the package zstandard",
            remedy="pip install 'splatcli[spz]', or use SPZ version 3",
        ) from None
    return zstandard


_FRACTIONAL_BITS = 12
_LARGEST_POSITION = (1 << 23) - 1
#: What the library of the format's makers reads at most, and programs that follow it.
_MOST_READ = 10_000_000
#: The mean of two log-scales that are larger may leave the range of float32.
_HUGE = 1e38
#: The largest step of positions, as a share of the usual Gaussian's largest standard deviation.
_STEP_SHARE = 0.25
#: Colours are stored as sh0 * 0.15 + 0.5, log-scales as 16 (s + 10), components of quaternions in steps of
#: sqrt(1/2) / 511.
_COLOUR_SCALE = 0.15
_SCALE_STEPS, _SCALE_SHIFT = 16.0, 10.0
_ROTATION_STEPS = 511.0 * math.sqrt(2.0)
#: Steps of the bytes of SH of degree 1 and of higher ones: 6 bits each. Rounded bytes compress better.
_SH_STEPS = (4, 4)
#: The same for files that have to be smaller, down to the 5 and 4 bits of the official encoder. A file takes 0.9 times
#: what the one before takes, or a little more.
_COARSER_SH_STEPS = ((4, 6), (6, 6), (8, 8), (8, 12), (8, 16))


def encode_spz(gaussians: Gaussians, metadata: ExportMetadata) -> Encoded:
    """Return version 3, which all readers know. Raises DivergedError for values that are not finite, and UsageError for
    positions beyond what fits.
    """
    return _encode(gaussians, metadata, 3, _SH_STEPS)


def encode_spz4(gaussians: Gaussians, metadata: ExportMetadata) -> Encoded:
    """Return version 4, a tenth smaller and not read everywhere yet; needs the package zstandard."""
    return _encode(gaussians, metadata, 4, _SH_STEPS)


def _encode(gaussians: Gaussians, metadata: ExportMetadata, version: int, sh_steps: tuple[int, int]) -> Encoded:
    columns = Columns.of(gaussians)
    notes = _losses(columns)
    if len(gaussians) > _MOST_READ:
        notes.append(f"{len(gaussians):,} Gaussians; Niantic's library and programs with it read up to {_MOST_READ:,}")
    bits = _fractional_bits(columns.means, columns.scales)
    if bits < _FRACTIONAL_BITS:
        notes.append(f"positions are rounded to steps of {2.0**-bits:g}: 24 bits hold no more of so large a scene")
    largest, others = smallest_three(unit_quats(columns.quats)[:, [1, 2, 3, 0]])
    magnitude = quantised(np.abs(others) * _ROTATION_STEPS, 511)
    parts = (others < 0).astype(np.int64) << 9 | magnitude
    packed = largest << 30 | parts[:, 0] << 20 | parts[:, 1] << 10 | parts[:, 2]
    streams = [
        _fixed_point(columns.means, bits),
        _bytes(opacities_of(columns.opacities) * 255.0),
        _bytes(columns.sh0.astype(np.float64) * (_COLOUR_SCALE * 255.0) + 127.5),
        _bytes((columns.scales.astype(np.float64) + _SCALE_SHIFT) * _SCALE_STEPS),
        packed.astype("<u4").tobytes(),
        _harmonics(columns.shN, *sh_steps),
    ]
    flags = ANTIALIASED if metadata.antialiased else 0
    return Encoded(pack(Header(version, len(gaussians), gaussians.sh_degree, bits, flags), streams), notes)


def import_spz(path: Path, *, lenient: bool = False) -> ImportedModel:
    """Return the model in an SPZ file of version 1 to 4.

    Raises ModelFileError: damaged, not SPZ, or impossible counts; VersionError; ResourceError as pack() does.
    """
    file_size(path)
    header, columns, _, notes = decode_spz(path.read_bytes(), path, lenient=lenient)
    return ImportedModel(
        f"SPZ version {header.version}",
        Columns.tensors(**columns._asdict()),
        declared=True,
        sealed=True,
        antialiased=bool(header.flags & ANTIALIASED),
        notes=notes,
    )


def decode_spz(content: bytes, path: Path, *, lenient: bool) -> tuple[Header, Columns[Floats], bool, list[str]]:
    """Return (header, the Gaussians, whether the content names its frame, notes). path: of messages.

    The Gaussians are in the frame of a PLY where the content names its own, else as stored. Raises as unpack().
    """
    header, streams, frame, notes = unpack(content, path, lenient=lenient)
    count = header.count
    alphas, colours, scales = (np.frombuffer(stream, np.uint8) for stream in streams[1:4])
    harmonics = np.frombuffer(streams[5], np.uint8).reshape(count, SHN_COUNTS[header.sh_degree], 3)
    stored = (
        _positions(streams[0], header),
        _rotations(streams[4], header),
        scales.reshape(count, 3) / _SCALE_STEPS - _SCALE_SHIFT,
        logits_of(alphas / 255.0, 1 / 255),
        (colours.reshape(count, 3) / 255.0 - 0.5) / _COLOUR_SCALE,
        (harmonics.astype(np.float32) - 128) / 128,
    )
    columns = Columns(*(column.astype(np.float32) for column in stored))
    if frame not in ("", _PLY_FRAME):
        with np.errstate(all="ignore"):  # NaN of halves in a damaged file; they are refused later, with their place
            columns = reframed(columns, _axes(frame))
        notes.append(f"its frame is {frame}; it was brought into that of a PLY, {_PLY_FRAME}")
    return header, columns, bool(frame), notes


def _axes(frame: str) -> Doubles:
    """Return [3, 3] for column vectors, from a frame to that of a PLY: right, down, forward."""
    axes = np.zeros((3, 3))
    for column, letter in enumerate(frame):
        row = next(i for i, pair in enumerate(("RL", "DU", "FB")) if letter in pair)
        axes[row, column] = 1.0 if letter == _PLY_FRAME[row] else -1.0
    return axes


def _losses(columns: Columns[Floats]) -> list[str]:
    """Return a note for each column with values beyond the format's range."""
    notes = []
    low, high = -_SCALE_SHIFT, 255 / _SCALE_STEPS - _SCALE_SHIFT
    for what, outside in (
        (
            f"log-scales outside {low:g} to {high:.4g}",
            (columns.scales < low - 0.5) | (columns.scales > high + 0.5),
        ),
        ("SH coefficients beyond 1", np.abs(columns.shN) > 1.0 + 1 / 128),
        ("colours beyond what a byte holds", np.abs(columns.sh0) > 0.5 / _COLOUR_SCALE),
    ):
        if found := int(outside.sum()):
            notes.append(f"clamped {found:,} {what}, the range of SPZ")
    return notes


def _fractional_bits(means: Floats, log_scales: Floats) -> int:
    """Return the official encoder's number, more for small Gaussians, or as many as fit. Raises UsageError."""
    farthest = float(np.abs(means).max(initial=0.0))
    wanted = _FRACTIONAL_BITS
    if len(log_scales):
        # Of sizes as they are stored, so that the same file is written again.
        largest = np.clip(log_scales.max(axis=1), -_HUGE, _HUGE)
        usual = math.floor(float(np.median(largest)) * _SCALE_STEPS + 0.5) / _SCALE_STEPS
        size = math.exp(min(0.0, max(-_SCALE_SHIFT, usual)))
        wanted = max(wanted, math.ceil(-math.log2(_STEP_SHARE * size)))
    for bits in range(wanted, -1, -1):
        if farthest * 2.0**bits <= _LARGEST_POSITION:
            return bits
    raise UsageError(
        f"positions of up to {farthest:.4g} are beyond the {_LARGEST_POSITION:,} units that SPZ holds",
        remedy="leave far Gaussians out with --crop, or write a PLY",
    )


def _fixed_point(means: Floats, bits: int) -> bytes:
    whole = np.floor(means.astype(np.float64) * 2.0**bits + 0.5).astype("<i4")
    return whole.view(np.uint8).reshape(len(means), 3, 4)[:, :, :3].tobytes()


def _positions(stream: bytes, header: Header) -> NDArray[np.floating]:
    if header.version == 1:
        return np.frombuffer(stream, "<f2").reshape(header.count, 3).astype(np.float64)
    parts = np.frombuffer(stream, np.uint8).reshape(header.count, 3, 3)
    wide = np.zeros((header.count, 3, 4), np.uint8)
    wide[:, :, 1:] = parts  # the sign lands in the highest bit of 32
    return (wide.view("<i4")[:, :, 0] >> 8) / 2.0**header.fractional_bits


def _rotations(stream: bytes, header: Header) -> Doubles:
    """Return [N, 4] w x y z."""
    if header.version < 3:
        xyz = np.frombuffer(stream, np.uint8).reshape(header.count, 3) / 127.5 - 1.0
        return from_smallest_three(np.zeros(header.count, np.int64), xyz)
    packed = np.frombuffer(stream, "<u4").astype(np.int64)
    parts = np.stack([packed >> shift & 1023 for shift in (20, 10, 0)], axis=1)
    others = np.where(parts & 512, -1.0, 1.0) * (parts & 511) / _ROTATION_STEPS
    return from_smallest_three(packed >> 30, others)[:, [3, 0, 1, 2]]


def _harmonics(shN: Floats, first: int, others: int) -> bytes:
    """Return [N, K, 3] as they lie: coefficient by coefficient, R G B together, in steps of degree 1 and of others."""
    steps = np.full((1, shN.shape[1], 1), others)
    steps[:, : SHN_COUNTS[1]] = first
    fine = np.floor(np.clip(shN, -2.0, 2.0) * 128 + 0.5) + 128
    return _bytes(np.floor((fine + steps // 2) / steps) * steps)


def _bytes(values: NDArray[np.floating]) -> bytes:
    return quantised(values, 255).astype(np.uint8).tobytes()


def is_spz(head: bytes) -> bool:
    """Return whether a file begins as SPZ does; no other format here is a gzip."""
    return head.startswith((MAGIC, GZIP))


def _coarser(version: int) -> tuple[Write, ...]:
    return tuple(partial(_encode, version=version, sh_steps=steps) for steps in _COARSER_SH_STEPS)


FORMAT = Format("spz", ".spz", "an SPZ file", 3, encode_spz, import_spz, is_spz, coarser=_coarser(3))
FORMAT_4 = Format("spz4", "", "an SPZ file", 3, encode_spz4, coarser=_coarser(4))
