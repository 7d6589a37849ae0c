"""The container of SPZ: a header and attribute streams, in one gzip (versions 1 to 3) or as zstd frames (4).

Every length is compared with the size of the file before anything of that length is made.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splatcli.errors import ModelFileError, ResourceError, VersionError
from splatcli.formats.bounds import check_expansion, file_size
from splatcli.gaussians import SH_REST

MAGIC = b"NGSP"
GZIP = b"\x1f\x8b"
ANTIALIASED = 0x1
_EXTENDED = 0x2

_HEADER = struct.Struct("<4sIIBBBB")
#: magic, version, count, degree, fractional bits, flags, number of streams, place of the table of streams.
_HEADER_4 = struct.Struct("<4sIIBBBBI12x")
_STREAM = struct.Struct("<QQ")
#: What extensions may add at the end; those that are known take a few bytes.
_MAX_EXTENSIONS = 1 << 20
_GZIP_WINDOW = 31
#: The official encoder's, and the most memory that a frame may ask for.
_ZSTD_LEVEL = 12
_ZSTD_WINDOW = 1 << 27


@dataclass(frozen=True, slots=True)
class Header:
    """What an SPZ file says of itself. fractional_bits: of the fixed-point positions."""

    version: int
    count: int
    sh_degree: int
    fractional_bits: int = 12
    flags: int = 0

    def lengths(self) -> list[int]:
        """Bytes of each stream: positions, opacities, colours, scales, rotations, SH."""
        position = 6 if self.version == 1 else 9
        rotation = 4 if self.version >= 3 else 3
        each = (position, 1, 3, 3, rotation, 3 * SH_REST[self.sh_degree])
        return [self.count * width for width in each]


def pack(header: Header, streams: Sequence[bytes]) -> bytes:
    """The file's content. Raises ResourceError when version 4 is asked for without the package that it needs."""
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


def unpack(path: Path, *, lenient: bool) -> tuple[Header, list[bytes], list[str]]:
    """(header, the six streams, notes). Raises ModelFileError, VersionError, and ResourceError as pack() does."""
    size = file_size(path)
    content = path.read_bytes()
    if content.startswith(GZIP):
        return _unpack_gzip(content, path, lenient)
    if len(content) < 8 or not content.startswith(MAGIC):
        raise ModelFileError(f"not an SPZ: it starts with {content[:8]!r}", where=path)
    if struct.unpack_from("<I", content, 4)[0] >= 4:
        return _unpack_zstd(content, size, path, lenient)
    header = _header(content, path)
    return header, *_split(content[_HEADER.size :], header, path, lenient)


def _unpack_gzip(content: bytes, path: Path, lenient: bool) -> tuple[Header, list[bytes], list[str]]:
    try:
        start = zlib.decompressobj(_GZIP_WINDOW).decompress(content, _HEADER.size)
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


def _unpack_zstd(content: bytes, size: int, path: Path, lenient: bool) -> tuple[Header, list[bytes], list[str]]:
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
    notes = [f"ignored {size - end} bytes behind the data"] if end < size else []
    return header, [next(kept) if length else b"" for length in lengths], notes


def _inflate(frame: bytes, length: int, path: Path) -> bytes:
    """A zstd frame of exactly so many bytes."""
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
    """The fields that all versions share."""
    if len(start) < _HEADER.size or not start.startswith(MAGIC):
        raise ModelFileError(f"not an SPZ: it unpacks to {start[:8]!r}", where=path)
    _, version, count, degree, bits, flags, _ = _HEADER.unpack_from(start)
    if not 1 <= version <= 4:
        raise VersionError(
            f"SPZ version {version}; 1 to 4 are read", where=path, remedy="export it again as version 3, or as a PLY"
        )
    if degree >= len(SH_REST):
        raise ModelFileError(f"SH degree {degree}; 0 to {len(SH_REST) - 1} are known", where=path)
    if bits > 24:
        raise ModelFileError(f"{bits} fractional bits in positions of 24", where=path)
    return Header(version, count, degree, bits, flags)


def _split(body: bytes, header: Header, path: Path, lenient: bool) -> tuple[list[bytes], list[str]]:
    """The streams that stand one after the other, and notes."""
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
    return streams, [f"ignored {surplus} bytes behind the data"] if surplus else []


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise ResourceError(
            "SPZ version 4 is compressed with zstd, which needs the package zstandard",
            remedy="pip install 'splatcli[spz]', or use SPZ version 3",
        ) from None
    return zstandard
