"""The checkpoint file as a zip archive: it is examined before torch opens it, and every byte is checked."""

from __future__ import annotations

import hashlib
import io
import pickletools
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from splatcli.checkpoint.schema import (
    DTYPES,
    STORED_NAMES,
    Manifest,
    digests_of,
    dtype_name,
    name_problems,
    parse_manifest,
    problem_list,
    shape_problems,
    space_of,
)
from splatcli.errors import ModelFileError, SplatError, UnreadableError, first_line, from_os_error, system_error
from splatcli.sizes import listed

DAMAGED = "the file is damaged: fall back on an older checkpoint of the run, or restore the file from a copy"

_MAX_MEMBERS = 10_000
_END_OF_ZIP = b"PK\x05\x06"
_END_OF_ZIP_SIZE = 22
#: Bytes of a block when a member is read for its checksum only.
_BLOCK = 1 << 20


def examine(path: Path, read: Callable[[zipfile.ZipFile], None]) -> None:
    """Refuse what is not a plain torch zip, then let ``read`` read members of the opened archive.

    Raises ModelFileError, also for what zipfile raises while ``read`` reads; UnreadableError or ResourceError where the
    system refuses, which says nothing about the file's content.
    """
    try:
        size = path.stat().st_size
        if path.is_dir():
            raise ModelFileError("this is a folder, not a checkpoint file", where=path, remedy=_folder_hint(path))
        with path.open("rb") as file:
            head = file.read(16)
            file.seek(max(0, size - _END_OF_ZIP_SIZE))
            tail = file.read(_END_OF_ZIP_SIZE)
    except OSError as error:
        raise from_os_error(error, UnreadableError, path) from None
    if not head.startswith(b"PK\x03\x04"):
        _refuse_other_file(head, size, path)
    # With the end record exactly at the end and no comment, all zip readers find the same directory.
    if not tail.startswith(_END_OF_ZIP) or tail[-2:] != b"\0\0":
        raise ModelFileError(f"truncated or extended: {size} bytes do not end as a zip", where=path, remedy=DAMAGED)
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if names and all(name.endswith(".npy") for name in names):
                raise ModelFileError(
                    f"a NumPy archive (.npz), not a model: it holds {listed(names, 3)}",
                    where=path,
                    remedy="name a checkpoint or a file of splats; splatcli.Model(Gaussians(...)) makes one of arrays",
                )
            problems = _member_problems(archive, size)
            if not problems:
                read(archive)
    except ModelFileError:
        raise
    except Exception as error:  # zipfile raises struct.error, ValueError, NotImplementedError and others
        if (refused := system_error(error)) is not None:
            raise from_os_error(refused, UnreadableError, path) from None
        raise ModelFileError(f"not a readable zip ({error})", where=path, remedy=DAMAGED) from None
    if problems:
        raise ModelFileError(f"not a plain torch checkpoint: {'; '.join(problems)}", where=path)


def check_crc(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """Read a member to its end, in blocks; zipfile compares the checksum there and raises BadZipFile."""
    with archive.open(member) as file:
        while file.read(_BLOCK):
            pass


def pickle_of(archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    """Return the member that torch unpickles; an archive that passed examine() has one."""
    return archive.getinfo(f"{_root(archive)}/data.pkl")


def _root(archive: zipfile.ZipFile) -> str:
    return archive.namelist()[0].split("/", 1)[0]


def _member_problems(archive: zipfile.ZipFile, size: int) -> list[str]:
    members = archive.infolist()
    if len(members) > _MAX_MEMBERS:
        return [f"{len(members)} members, more than {_MAX_MEMBERS}"]
    names = [member.filename for member in members]
    roots = {name.split("/", 1)[0] for name in names}
    problems = []
    # torch ignores the case of names: with two spellings of one name it could read another pickle than this check.
    if len({name.casefold() for name in names}) != len(names):
        problems.append("a member is there twice")
    if len(roots) != 1 or any("/" not in name or ".." in name.split("/") or "\\" in name for name in names):
        problems.append(f"members under {len(roots)} roots, not one")
    elif f"{_root(archive)}/data.pkl" not in names:
        problems.append("no data.pkl")
    if any(name.endswith("/constants.pkl") or "/code/" in name for name in names):
        problems.append("it is a TorchScript archive")
    packed = [m.filename for m in members if m.compress_type != zipfile.ZIP_STORED or m.compress_size != m.file_size]
    if packed:
        problems.append(f"{len(packed)} members are compressed (first: {packed[0]}); all must be stored")
    total = sum(member.file_size for member in members)
    if total > size:
        problems.append(f"members claim {total} bytes, the file has {size}")
    return problems


def _refuse_other_file(head: bytes, size: int, path: Path) -> NoReturn:
    if head.startswith((b"ply\n", b"ply\r")):
        raise ModelFileError(
            "this is a PLY (no optimizer state), training cannot resume from it",
            where=path,
            remedy=f"start a new run from it: splat train SCENE --init {path}",
        )
    if size == 0:
        raise ModelFileError("the file is empty (0 bytes)", where=path)
    if head.startswith(b"\x80"):
        raise ModelFileError(
            "a bare pickle (torch's old format); such files may run code and are not read",
            where=path,
            remedy="if you trust it, load it in the program that wrote it and torch.save it with torch 1.6 or newer",
        )
    raise ModelFileError(f"not a checkpoint: it starts with {head!r}, not as a zip", where=path)


def _folder_hint(path: Path) -> str | None:
    files = sorted([*path.glob("ckpt_*.pt"), *path.glob("ckpts/ckpt_*.pt")])
    return f"name the file, e.g. {files[-1]}" if files else None


#: Keys of the stored dictionary beside the tensors: JSON text, and the sha256 of its UTF-8 bytes.
MANIFEST_KEY = "manifest"
DIGEST_KEY = "manifest_sha256"

_IMPORTING_OPCODES = {"INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4"}
_PLAIN_GLOBALS = {"torch._utils _rebuild_tensor_v2", "collections OrderedDict"}
_STORAGES = {f"torch {kind}Storage" for kind in ("Float", "Double", "Int", "Long", "Byte", "Bool")}


@dataclass(frozen=True, slots=True)
class Container:
    """The checked content of a checkpoint file."""

    manifest: Manifest
    tensors: dict[str, Tensor]


def read_container(path: Path, *, digests: bool = True, mmap: bool = False) -> Container:
    """Return manifest and tensors (CPU) of a checkpoint file.

    digests: also compare every tensor with its sha256; without it, only the structure and the manifest are checked,
        in milliseconds.
    mmap: map the tensors instead of reading them; the file must not be truncated meanwhile.
    Raises ModelFileError for anything that is not an undamaged checkpoint, VersionError for one of another version,
    UnreadableError or ResourceError where the system refuses to read it.
    """
    preflight(path)
    stored = _unpickle(path, mmap)
    manifest = _manifest_of(stored, path)
    tensors = _tensors_of(stored, manifest, path)
    if digests:
        _check_digests(manifest, tensors, path)
    return Container(manifest, tensors)


def is_own(path: Path) -> bool:
    """Return whether a torch file is a checkpoint of splatcli, sound or not. Raises ModelFileError."""
    words: list[bytes] = []
    examine(path, lambda archive: words.append(archive.read(pickle_of(archive))))
    # The second name is in a file that has lost its manifest.
    return any(word.encode() in words[0] for word in (DIGEST_KEY, STORED_NAMES["sh0"]))


def preflight(path: Path) -> None:
    """Refuse all but a plain torch zip of splatcli, before torch opens it."""
    examine(path, lambda archive: _check_small_members(archive, path))


def _check_small_members(archive: zipfile.ZipFile, path: Path) -> None:
    """Check the CRC of every member that is no tensor (those have a sha256), then the imports of the pickle."""
    for member in archive.infolist():
        parts = member.filename.split("/")
        if parts[1] != "data":
            content = archive.read(member)  # compares the CRC
            if parts[1:] == ["data.pkl"]:
                _check_pickle(content, path)


def _check_pickle(content: bytes, path: Path) -> None:
    for opcode, argument, _ in pickletools.genops(io.BytesIO(content)):
        if opcode.name in _IMPORTING_OPCODES:
            raise ModelFileError(f"the pickle inside builds objects ({opcode.name}); nothing was run", where=path)
        if opcode.name == "GLOBAL" and argument not in _PLAIN_GLOBALS | _STORAGES:
            raise ModelFileError(
                f"the pickle inside names {str(argument).replace(' ', '.')!r}, which no checkpoint of ours does; "
                "nothing was run",
                where=path,
                remedy="only files written by splat train hold a state to resume from",
            )


@contextmanager
def name_for_torch(path: Path) -> Iterator[str]:
    """Yield a name by which torch can open a file: where the path is not UTF-8, that of a descriptor."""
    try:
        name = str(path).encode().decode()
    except UnicodeEncodeError:
        with path.open("rb") as file:
            yield f"/proc/self/fd/{file.fileno()}"
    else:
        yield name


def _unpickle(path: Path, mmap: bool) -> dict[object, object]:
    try:
        with name_for_torch(path) as name:
            stored = torch.load(name, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # RuntimeError, ValueError, UnpicklingError, EOFError, ... by the kind of damage
        raise unreadable(error, path) from None
    if not isinstance(stored, dict) or MANIFEST_KEY not in stored:
        raise ModelFileError(
            f"not a splatcli checkpoint: no manifest inside{_guess_origin(stored)}",
            where=path,
            remedy="only files written by splat train hold a state to resume from",
        )
    return stored


def unreadable(error: Exception, path: Path) -> SplatError:
    """Return the error to raise for one that torch.load() has raised."""
    if (refused := system_error(error)) is not None:
        return from_os_error(refused, UnreadableError, path)
    reason = first_line(error)[:200]
    return ModelFileError(f"torch cannot read it ({reason})", where=path, remedy=DAMAGED)


def _manifest_of(stored: dict[object, object], path: Path) -> Manifest:
    text, digest = stored.pop(MANIFEST_KEY), stored.pop(DIGEST_KEY, None)
    if not isinstance(text, str) or hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest() != digest:
        raise ModelFileError("the manifest does not match its own digest", where=path, remedy=DAMAGED)
    return parse_manifest(text, path)


def _tensors_of(stored: dict[object, object], manifest: Manifest, path: Path) -> dict[str, Tensor]:
    """Return the tensors when names, dtypes, shapes, spaces and storage agree with the manifest and the format."""
    tensors = {key: value for key, value in stored.items() if isinstance(key, str) and type(value) is Tensor}
    problems = [f"{key!r} is not a named tensor" for key in stored if key not in tensors]
    specs = {spec.name: spec for spec in manifest.tensors}
    problems += name_problems([spec.name for spec in manifest.tensors])
    problems += [fault for fault in name_problems(list(tensors)) if fault not in problems]
    problems += [f"{name} is in the file, but not in its manifest" for name in tensors if name not in specs]
    problems += [f"{name} is in the manifest, but not in the file" for name in specs if name not in tensors]
    if not problems:
        seen: set[int] = set()
        for name, tensor in tensors.items():
            spec = specs[name]
            if tensor.dtype != DTYPES[spec.dtype] or list(tensor.shape) != spec.shape:
                problems.append(
                    f"{name} is {dtype_name(tensor)} {list(tensor.shape)}, the manifest says {spec.dtype} {spec.shape}"
                )
            if spec.space != space_of(name)[0]:
                problems.append(f"{name} is declared in space {spec.space!r}; only {space_of(name)[0]!r} is legal")
            problems += _storage_problems(name, tensor, spec.nbytes, seen)
        problems += shape_problems(tensors)
    if problems:
        raise ModelFileError(problem_list("tensors and format disagree", problems), where=path)
    return tensors


def _storage_problems(name: str, tensor: Tensor, nbytes: int, seen: set[int]) -> list[str]:
    """Return the faults of a tensor's storage: it must own exactly its bytes, without strides, views or aliases."""
    if tensor.layout != torch.strided or not tensor.is_contiguous() or tensor.requires_grad:
        return [f"{name} is not a plain contiguous tensor"]
    storage = tensor.untyped_storage()
    held = storage.nbytes()
    if not held == nbytes == tensor.nbytes:
        return [f"{name} holds {held} bytes for {tensor.nbytes} ({nbytes} in the manifest)"]
    if held and storage.data_ptr() in seen:
        return [f"{name} shares its memory with another tensor"]
    seen.add(storage.data_ptr())
    return []


def _check_digests(manifest: Manifest, tensors: dict[str, Tensor], path: Path) -> None:
    digests = digests_of(tensors)
    for spec in manifest.tensors:
        if digests[spec.name] != spec.sha256:
            guess = _guess_activation(spec.name, tensors[spec.name])
            raise ModelFileError(
                f"{spec.name} does not match its digest: damaged, or changed after it was written{guess}",
                where=path,
                remedy="use the file as splatcli wrote it" if guess else DAMAGED,
            )


def _guess_activation(name: str, tensor: Tensor) -> str:
    """Return the likely reason why a tensor has changed, if its values show it."""
    if name == "_scaling" and tensor.numel() and bool((tensor > 0).all()):
        return (
            "; it looks as if exp() had been applied: scales already activated; checkpoints hold log-scales, "
            "which the rasterizer activates once"
        )
    if name == "_opacity" and tensor.numel() and bool(((tensor > 0) & (tensor < 1)).all()):
        return (
            "; it looks as if sigmoid() had been applied: opacities already activated; checkpoints hold logits, "
            "which the rasterizer activates once"
        )
    return ""


def _guess_origin(stored: object) -> str:
    if isinstance(stored, dict):
        if "splats" in stored:
            return " (it looks like gsplat's)"
        if "pipeline" in stored:
            return " (it looks like nerfstudio's)"
        if "_xyz" in stored:
            return " (the names are ours, the manifest is gone)"
    elif isinstance(stored, tuple) and len(stored) == 2:
        return " (it looks like INRIA's)"
    return ""
