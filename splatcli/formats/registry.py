"""The formats of Gaussians: their names, what tells one from the others, what reads and what writes each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from splatcli.checkpoint.foreign.stored import ImportedModel
from splatcli.errors import ModelFileError, UnreadableError, UsageError, from_os_error
from splatcli.formats.compressed_ply import encode_compressed_ply, read_stored_compressed_ply
from splatcli.formats.gltf import MAGIC as GLTF
from splatcli.formats.gltf import encode_gltf, read_stored_gltf
from splatcli.formats.html import encode_html, read_stored_html
from splatcli.formats.ksplat import read_stored_ksplat
from splatcli.formats.ply import encode_ply, read_stored_ply
from splatcli.formats.quantisation import Encoded, ExportMetadata
from splatcli.formats.sog import encode_sog, read_stored_sog
from splatcli.formats.splat import encode_splat, read_stored_splat
from splatcli.formats.spz import GZIP, encode_spz, encode_spz4, read_stored_spz
from splatcli.formats.spz import MAGIC as SPZ
from splatcli.formats.usd import encode_usdz, read_stored_usd
from splatcli.gaussians import Gaussians

#: What a zip of torch and a bare pickle are called: anyone's checkpoints, which no format here reads.
CHECKPOINT = "checkpoint"

_HTML = b"<!doctype html"
#: What the first member of a zip is called, by format; one of torch holds none of these.
_MEMBERS = {"sog": (".webp", "meta.json"), "usdz": (".usdc", ".usda", ".usd")}
#: USD as text, and in binary.
_USD = (b"#usda ", b"PXR-USDC")
_ZIP = b"PK\x03\x04"
#: Where the first member of a zip has its name.
_ZIP_NAME_LENGTH, _ZIP_NAME = 26, 30
#: The header of a compressed PLY names its packed properties within so many bytes.
_HEAD = 4096


class Read(Protocol):
    """Reads a file without judging it. Raises ModelFileError."""

    def __call__(self, path: Path, *, lenient: bool = False) -> ImportedModel: ...


@dataclass(frozen=True, slots=True)
class Format:
    """A format of files.

    name: as ``--format`` takes it. suffix: of its files; "" for a variant that is only chosen by name.
    title: what a file of it is, for messages. sh_degree: the highest that it holds.
    write: the file's content; None where it is only read. read: None for a variant, which the
    reader of the other one takes.
    """

    name: str
    suffix: str
    title: str
    sh_degree: int
    write: Callable[[Gaussians, ExportMetadata], Encoded] | None = None
    read: Read | None = None


FORMATS = (
    Format("ply", ".ply", "a PLY", 4, encode_ply, read_stored_ply),
    Format(
        "compressed.ply",
        ".compressed.ply",
        "a compressed PLY",
        3,
        encode_compressed_ply,
        read_stored_compressed_ply,
    ),
    Format("splat", ".splat", "a .splat file", 0, encode_splat, read_stored_splat),
    Format("ksplat", ".ksplat", "a .ksplat file", 2, read=read_stored_ksplat),
    Format("spz", ".spz", "an SPZ file", 3, encode_spz, read_stored_spz),
    Format("spz4", "", "an SPZ file", 3, encode_spz4),
    Format("sog", ".sog", "a SOG", 3, encode_sog, read_stored_sog),
    Format("glb", ".glb", "a binary glTF", 3, encode_gltf, read_stored_gltf),
    Format("html", ".html", "a page with a viewer", 3, encode_html, read_stored_html),
    Format("usdz", ".usdz", "a packed USD stage", 3, encode_usdz, read_stored_usd),
    Format("usd", ".usd", "a USD stage", 3, read=read_stored_usd),
)
_BY_NAME = {known.name: known for known in FORMATS}


def format_for(output: Path, name: str | None) -> Format:
    """The format to write: ``name`` where it is given, else by the end of the file's name. Raises UsageError."""
    writable = [known for known in FORMATS if known.write is not None]
    if name is not None:
        found = [known for known in writable if known.name == name.lower().removeprefix(".")]
        if not found:
            names = ", ".join([*(known.name for known in writable), "json"])
            raise UsageError(f"there is no format {name!r} to write", where="--format", remedy=f"one of {names}")
        return found[0]
    ends = [known for known in writable if known.suffix and output.name.lower().endswith(known.suffix)]
    if not ends:
        suffixes = ", ".join([*(known.suffix for known in writable if known.suffix), ".json"])
        raise UsageError(
            f"cannot tell a format from {output.name!r}",
            where="-o",
            remedy=f"let the name end in one of {suffixes}; or name the format: --format ply",
        )
    return max(ends, key=lambda known: len(known.suffix))


def read_stored(path: Path, kind: str, *, lenient: bool = False) -> ImportedModel:
    """What a file of the format ``kind`` holds, its space not judged yet. Raises ModelFileError."""
    reader = _BY_NAME[kind].read
    assert reader is not None, "file_kind() gives formats that are read"
    return reader(path, lenient=lenient)


def title_of(kind: str) -> str:
    """What a file of this kind is, for messages."""
    return "a checkpoint" if kind == CHECKPOINT else _BY_NAME[kind].title


def file_kind(path: Path) -> str:
    """CHECKPOINT (anyone's) or the name of a format, from the first bytes; from the name where a format has no mark.

    Raises ModelFileError for anything else.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except OSError as error:
        raise from_os_error(error, UnreadableError, path) from None
    if not head:
        raise ModelFileError("the file is empty (0 bytes)", where=path)
    kind = _marked(head) or _named(path) or (CHECKPOINT if head.startswith((b"PK", b"\x80")) else None)
    if kind is None:
        raise ModelFileError(
            f"neither a checkpoint nor a file of splats: it starts with {head[:16]!r}",
            where=path,
            remedy=f"name a checkpoint, a run folder, or a file of splats ({_suffixes()})",
        )
    return kind


def _suffixes() -> str:
    return ", ".join(known.suffix for known in FORMATS if known.read is not None and known.suffix)


def _marked(head: bytes) -> str | None:
    """The format that starts like this; None without a mark, or for a checkpoint."""
    if head.startswith(b"ply"):
        return "compressed.ply" if b"packed_position" in head else "ply"
    if head.startswith((SPZ, GZIP)):
        return "spz"
    if head.startswith(GLTF):
        return "glb"
    if head.startswith(_USD):
        return "usd"
    if head.startswith(_ZIP):
        first = _first_member(head)
        return next((kind for kind, ends in _MEMBERS.items() if first.endswith(ends)), None)
    return "html" if head.lower().startswith(_HTML) else None


def _first_member(head: bytes) -> str:
    """The name of the first member of a zip."""
    length = int.from_bytes(head[_ZIP_NAME_LENGTH : _ZIP_NAME_LENGTH + 2], "little")
    return head[_ZIP_NAME : _ZIP_NAME + length].decode("ascii", "replace")


def _named(path: Path) -> str | None:
    """The format without a mark that the name tells."""
    name = path.name.lower()
    if name == "meta.json":
        return "sog"
    return next((kind for kind in ("splat", "ksplat", "sog") if name.endswith(f".{kind}")), None)
