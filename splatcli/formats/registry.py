"""The registry of file formats: one line each; formats of other packages are found through entry points."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from splatcli.checkpoint.container import is_own
from splatcli.checkpoint.foreign.gsplat import shards_of
from splatcli.checkpoint.foreign.imported import ImportedModel
from splatcli.checkpoint.foreign.read import newest_foreign, read_foreign
from splatcli.errors import ModelFileError, UnreadableError, UsageError, from_os_error, os_errors
from splatcli.formats import compressed_ply, gltf, html, ksplat, ply, sog, splat, spz, streamed_sog, usd
from splatcli.formats.format import HEAD_BYTES, Encoded, ExportMetadata, Format
from splatcli.gaussians import Gaussians
from splatcli.plugins import FORMATS as GROUP
from splatcli.plugins import Plugin, plugins

FORMATS = (
    ply.FORMAT,
    compressed_ply.FORMAT,
    splat.FORMAT,
    ksplat.FORMAT,
    spz.FORMAT,
    spz.FORMAT_4,
    sog.FORMAT,
    streamed_sog.FORMAT,
    gltf.FORMAT,
    html.FORMAT,
    usd.FORMAT,
    usd.FORMAT_STAGE,
)


def _read_torch(path: Path, *, lenient: bool = False) -> ImportedModel:
    return read_foreign(path)


#: A zip of torch or a bare pickle: a checkpoint of splat, or of another program, which is what its reader reads.
CHECKPOINT = Format("checkpoint", "", "a checkpoint", 4, read=_read_torch)

#: How a file begins that Git LFS has not replaced by its content yet.
_LFS = b"version https://git-lfs."
#: How Spark's files of levels of detail begin.
_RAD = b"RAD0"
#: What is beside the .lcc of an LCC scene.
_LCC_PARTS = ("data.bin", "index.bin")
#: Files of splats that are not read: end of the name -> (what they are, what to do).
_NOT_READ = {
    "tileset.json": ("the index of 3D Tiles", "name one of its tiles, a .glb; each holds a part of the scene"),
    ".psht": ("a project of Postshot", "export the splats from Postshot as a PLY"),
    ".gltf": ("glTF in text", "save it as one binary file, a .glb"),
    ".rad": (
        "Spark's RAD, levels of detail of a model",
        "name the file that Spark made it from, such as a PLY, SPZ or SOG",
    ),
    **dict.fromkeys(
        (".lcc", ".lcc2"),
        (
            "XGRIDS' LCC, levels of detail of a model",
            "convert it, with all of its folder there: splat-transform scene.lcc -L 0 scene.ply (npm package "
            "@playcanvas/splat-transform); or export a PLY from the program that made it",
        ),
    ),
}


def format_to_write(
    output: Path, name: str | None, *, others: Sequence[str] = (), by_name: str | None = None
) -> Format:
    """Return the format called ``name`` where it is given, else that of the longest suffix. Raises UsageError.

    others: the suffixes of what the caller writes beside these formats. by_name: how the caller is given a name.
    """
    writable = {known.name: known for known in FORMATS if known.write is not None}
    found = plugins(GROUP)
    if name is not None:
        wanted = name.lower().removeprefix(".")
        if wanted in writable:
            return writable[wanted]
        if wanted in found:
            return _loaded(found[wanted], writable=True)
        names = ", ".join([*writable, *found, *(other.removeprefix(".") for other in others)])
        raise UsageError(f"there is no format {name!r} to write", where="--format", remedy=f"one of {names}")
    suffixes = {known.suffix: known.name for known in writable.values() if known.suffix}
    suffixes = {f".{name}": name for name in found} | suffixes
    ends = [suffix for suffix in suffixes if output.name.lower().endswith(suffix)]
    if not ends:
        raise UsageError(
            f"cannot tell a format from {output.name!r}",
            where="-o",
            remedy=f"let the name end in one of {', '.join([*suffixes, *others])}"
            + (f"; or name the format: {by_name}" if by_name is not None else ""),
        )
    chosen = suffixes[max(ends, key=len)]
    return writable[chosen] if chosen in writable else _loaded(found[chosen], writable=True)


def format_of(path: Path) -> Format:
    """Return the format of a file, or CHECKPOINT, by its first bytes; by its name where a format has no mark.

    Raises ModelFileError for a file of no known format.
    """
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise from_os_error(error, UnreadableError, path) from None
    if not head:
        raise ModelFileError("the file is empty (0 bytes)", where=path)
    if head.startswith(_LFS):
        raise ModelFileError("a pointer of Git LFS in place of the file", where=path, remedy="git lfs pull fetches it")
    for known in FORMATS:
        if known.recognises is not None and known.recognises(head):
            return known
    name = path.name.lower()
    for known in FORMATS:
        if any(fnmatchcase(name, pattern) for pattern in known.names):
            return known
    for plugin in plugins(GROUP).values():
        if name.endswith(f".{plugin.name}"):
            return _loaded(plugin, writable=False)
    if head.startswith((b"PK", b"\x80")):
        return _zipped(path) or CHECKPOINT
    known_end = ".rad" if head.startswith(_RAD) else next((end for end in _NOT_READ if name.endswith(end)), None)
    if known_end is not None:
        raise _not_read(known_end, path)
    suffixes = ", ".join(known.suffix for known in FORMATS if known.read is not None and known.suffix)
    remedy = f"name a checkpoint, a run folder, or a file of splats ({suffixes})"
    # nerfstudio's commands take config.yml, which lies in the run folder.
    if newest_foreign(path.parent) is not None:
        remedy = f"name the run folder that it lies in: {path.parent}"
    raise ModelFileError(
        f"neither a checkpoint nor a file of splats: it starts with {head[:16]!r}", where=path, remedy=remedy
    )


def _not_read(end: str, path: Path) -> ModelFileError:
    what, remedy = _NOT_READ[end]
    return ModelFileError(f"this is {what}, which is not read", where=path, remedy=remedy)


def _zipped(path: Path) -> Format | None:
    """Return SOG for a zip of one in a folder; None for a checkpoint. Raises ModelFileError where files are zipped."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if not name.startswith("__MACOSX/")]
    except Exception:  # zipfile lets many through; the reader of checkpoints names the fault
        return None
    if any(name.rpartition("/")[2] in sog.INDICES for name in names):
        return sog.FORMAT
    suffixes = tuple(known.suffix for known in FORMATS if known.suffix)
    held = next((name for name in names if name.lower().endswith(suffixes)), None)
    if held is None:
        return None
    raise ModelFileError(f"a zip that holds {held[:100]!r}", where=path, remedy="unpack it, and name the file inside")


def is_own_checkpoint(path: Path) -> bool:
    """Return whether a file is a checkpoint of splat, sound or not. Raises ModelFileError when it cannot be read."""
    return format_of(path) is CHECKPOINT and is_own(path)


def newest_import(folder: Path) -> Path | None:
    """Return the newest model of another program's run folder, or the index of a SOG in a folder; None for neither.

    Raises ModelFileError for the folder of a streamed SOG without its index, and for that of an LCC scene.
    """
    streamed_sog.check_index(folder)
    if all((folder / name).is_file() for name in _LCC_PARTS):
        for path in sorted(folder.glob("*.lcc")):
            raise _not_read(".lcc", path)
    indices = (folder / name for name in (streamed_sog.INDEX, "meta.json"))
    return newest_foreign(folder) or next((path for path in indices if path.is_file()), None)


def bytes_on_disk(path: Path) -> int:
    """Return the size of a model, which may be several files: shards, an unbundled SOG, or a streamed one."""
    if path.name == streamed_sog.INDEX:
        files = [*path.parent.rglob("*")]
    else:
        files = [*path.parent.iterdir()] if path.name == "meta.json" else shards_of(path)
    return sum(file.stat().st_size for file in files if file.is_file())


def import_model(path: Path, *, lenient: bool = False) -> ImportedModel:
    """Return the model in a file of a format or in a checkpoint of another program, its space not checked yet.

    Raises ModelFileError.
    """
    with os_errors(UnreadableError, path):
        known = format_of(path)
        assert known.read is not None, "format_of() returns formats that are read"
        return known.read(path, lenient=lenient)


def _loaded(plugin: Plugin, *, writable: bool) -> Format:
    """Return a plug-in's format under the entry point's name. Its errors name the plug-in."""
    found = plugin.load()
    if not isinstance(found, Format):
        raise plugin.fault(f"{found!r} is not a splatcli.formats.format.Format")
    own_write, own_read = found.write, found.read
    if (own_write if writable else own_read) is None:
        raise UsageError(f"files of the format {plugin.name!r} are not {'written' if writable else 'read'}")

    def write(gaussians: Gaussians, metadata: ExportMetadata) -> Encoded:
        assert own_write is not None
        with plugin.running():
            encoded = own_write(gaussians, metadata)
        if not isinstance(encoded, Encoded):
            raise plugin.fault(f"write() returned {type(encoded).__name__}, not Encoded")
        return encoded

    def read(path: Path, *, lenient: bool = False) -> ImportedModel:
        assert own_read is not None
        with plugin.running():
            model = own_read(path, lenient=lenient)
        if not isinstance(model, ImportedModel):
            raise plugin.fault(f"read() returned {type(model).__name__}, not ImportedModel")
        return model

    return replace(
        found,
        name=plugin.name,
        suffix=f".{plugin.name}",
        write=None if own_write is None else write,
        read=None if own_read is None else read,
    )
