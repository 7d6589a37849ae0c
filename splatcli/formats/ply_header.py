"""The header of a PLY file, read with suspicion: its claims are compared with the file's size before any allocation."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from splatcli.errors import ModelFileError, UnreadableError, from_os_error

#: Longer headers than this belong to no PLY that anyone writes.
_MAX_HEADER = 1 << 20
#: PLY's names of number types -> numpy's.
_TYPES = {
    **dict.fromkeys(("char", "int8"), "i1"),
    **dict.fromkeys(("uchar", "uint8"), "u1"),
    **dict.fromkeys(("short", "int16"), "i2"),
    **dict.fromkeys(("ushort", "uint16"), "u2"),
    **dict.fromkeys(("int", "int32"), "i4"),
    **dict.fromkeys(("uint", "uint32"), "u4"),
    **dict.fromkeys(("float", "float32"), "f4"),
    **dict.fromkeys(("double", "float64"), "f8"),
}


@dataclass(slots=True)
class PlyElement:
    """name, number of rows, property -> numpy's name of its type, in order.

    stride: bytes per row, a lower bound where has_list is set; a list stands with the type of its length.
    """

    name: str
    count: int
    properties: dict[str, str] = field(default_factory=dict)
    has_list: bool = False

    @property
    def stride(self) -> int:
        return sum(int(kind[1]) for kind in self.properties.values())


@dataclass(slots=True)
class PlyHeader:
    """What a PLY file says of itself.

    format: ascii, binary_little_endian or binary_big_endian. size: bytes up to the data, lines: their number.
    trailing: bytes behind the data, as far as that can be told without reading them.
    """

    format: str = ""
    elements: list[PlyElement] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    size: int = 0
    lines: int = 0
    trailing: int = 0

    def before(self, name: str) -> list[PlyElement]:
        """The elements whose rows come before those of element ``name``."""
        return self.elements[: [element.name for element in self.elements].index(name)]


def read_ply_header(path: Path, *, lenient: bool = False) -> PlyHeader:
    """The header of a PLY file whose claims fit the size of the file.

    lenient: more bytes than promised are counted in ``trailing`` instead of refused.
    Raises ModelFileError: not a PLY, broken header, impossible counts, data short or followed by more.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(_MAX_HEADER)
    except OSError as error:
        raise from_os_error(error, UnreadableError, path) from None
    if size == 0:
        raise ModelFileError("the file is empty (0 bytes)", where=path)
    if not head.startswith((b"ply\n", b"ply\r\n")):
        raise ModelFileError(f"not a PLY: it starts with {head[:16]!r}", where=path)
    header = _parse(head, path)
    _check_size(header, size, path, lenient=lenient)
    return header


def _parse(head: bytes, path: Path) -> PlyHeader:
    header = PlyHeader()
    position = 0
    number = 0
    while (end := head.find(b"\n", position)) >= 0:
        line = head[position:end].decode("ascii", "replace").strip()
        position, number = end + 1, number + 1
        if line == "end_header":
            header.size, header.lines = position, number
            if not header.format:
                raise ModelFileError("the PLY header names no format", where=path)
            return header
        try:
            _parse_line(line, header, first=number == 1)
        except ValueError as error:
            raise ModelFileError(f"line {number} of the PLY header: {error}", where=path) from None
    raise ModelFileError("the PLY header has no end_header: truncated", where=path)


def _parse_line(line: str, header: PlyHeader, *, first: bool) -> None:
    """Add one line to the header. Raises ValueError with the fault."""
    keyword, _, rest = line.partition(" ")
    words = rest.split()
    if first or keyword in ("obj_info", ""):
        return
    if keyword == "comment":
        header.comments.append(rest)
    elif keyword == "format":
        if words not in (["ascii", "1.0"], ["binary_little_endian", "1.0"], ["binary_big_endian", "1.0"]):
            raise ValueError(f"unknown format {rest!r}")
        header.format = words[0]
    elif keyword == "element":
        if len(words) != 2 or not words[1].isascii() or not words[1].isdigit() or len(words[1]) > 18:
            raise ValueError(f"{line!r} is not 'element NAME COUNT' with a count of 0 or more")
        if any(element.name == words[0] for element in header.elements):
            raise ValueError(f"element {words[0]!r} is there twice")
        header.elements.append(PlyElement(words[0], int(words[1])))
    elif keyword == "property":
        if not header.elements:
            raise ValueError("a property before the first element")
        _add_property(header.elements[-1], words)
    else:
        raise ValueError(f"unknown keyword {keyword[:40]!r}")


def _add_property(element: PlyElement, words: list[str]) -> None:
    is_list = len(words) == 4 and words[0] == "list"
    if not is_list and len(words) != 2:
        raise ValueError(f"'property {' '.join(words)}' is not 'property TYPE NAME'")
    kind, name = words[1 if is_list else 0], words[-1]
    if kind not in _TYPES or (is_list and words[2] not in _TYPES):
        raise ValueError(f"unknown type in 'property {' '.join(words)}'")
    if name in element.properties:
        raise ValueError(f"property {name!r} of {element.name!r} is there twice")
    element.properties[name] = _TYPES[kind]
    element.has_list |= is_list


def _check_size(header: PlyHeader, size: int, path: Path, *, lenient: bool) -> None:
    """Compare the counts with the bytes that follow the header, before anything of that size is allocated."""
    hollow = [element.name for element in header.elements if element.count and not element.properties]
    if hollow:
        raise ModelFileError(f"element {hollow[0]!r} has rows, but no properties", where=path)
    rest = size - header.size
    if header.format == "ascii":  # a value takes at least a digit and a separator; the last newline may be missing
        claimed = sum(element.count * 2 * max(1, len(element.properties)) for element in header.elements) - 1
    else:
        claimed = sum(element.count * element.stride for element in header.elements)
    counts = ", ".join(f"{element.count} x {element.name}" for element in header.elements)
    if claimed > rest:
        raise ModelFileError(f"the header promises {counts}: {claimed} bytes; {rest} follow it: truncated", where=path)
    exact = header.format != "ascii" and not any(element.has_list for element in header.elements)
    if exact and claimed < rest:
        if not lenient:
            raise ModelFileError(
                f"{rest - claimed} bytes follow the {counts} that the header promises",
                where=path,
                remedy="export it again, or ignore them with --lenient",
            )
        header.trailing = rest - claimed
