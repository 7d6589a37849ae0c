"""The checkpoint file as a container: open it without trusting it, and check every byte that matters.

A .pt file is a zip of stored members around a pickle, and torch.load allows views that pretend to be huge; so the zip
is examined first, the pickle is read for the names it would import, and each tensor is compared with its digest before
anyone sees it.
"""

from __future__ import annotations

import hashlib
import io
import pickletools
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from splatcli.checkpoint.archive import DAMAGED, examine, pickle_of
from splatcli.checkpoint.schema import (
    DTYPES,
    STORED_NAMES,
    Manifest,
    digests_of,
    dtype_name,
    listed,
    name_problems,
    parse_manifest,
    shape_problems,
    space_of,
)
from splatcli.errors import ModelFileError, UnreadableError, from_os_error, system_error

#: Keys of the stored dictionary beside the tensors: JSON text, and the sha256 of its UTF-8 bytes.
MANIFEST_KEY = "manifest"
DIGEST_KEY = "manifest_sha256"

_IMPORTING_OPCODES = {"INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4"}
_PLAIN_GLOBALS = {"torch._utils _rebuild_tensor_v2", "collections OrderedDict"}
_STORAGES = {f"torch {kind}Storage" for kind in ("Float", "Double", "Int", "Long", "Byte", "Bool")}


@dataclass(frozen=True, slots=True)
class Container:
    """What a checkpoint file holds, checked."""

    manifest: Manifest
    tensors: dict[str, Tensor]


def read_container(path: Path, *, digests: bool = True, mmap: bool = False) -> Container:
    """Manifest and tensors (CPU) of a checkpoint file.

    digests: also compare every tensor with its sha256; without it, only the structure and the manifest are checked,
        in milliseconds.
    mmap: map the tensors instead of reading them; only while nobody truncates the file.
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
    """Whether a torch file is one of ours, sound or not, rather than another program's. Raises ModelFileError."""
    words: list[bytes] = []
    examine(path, lambda archive: words.append(archive.read(pickle_of(archive))))
    # The second name is for a file of ours that has lost its manifest.
    return any(word.encode() in words[0] for word in (DIGEST_KEY, STORED_NAMES["sh0"]))


def preflight(path: Path) -> None:
    """Refuse whatever is not a plain torch zip of ours, before torch sees it."""
    examine(path, lambda archive: _check_small_members(archive, path))


def _check_small_members(archive: zipfile.ZipFile, path: Path) -> None:
    """CRC of every member that is no tensor (those have a sha256), then a look at what the pickle would import."""
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


def _unpickle(path: Path, mmap: bool) -> dict[object, object]:
    try:
        stored = torch.load(str(path), map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # RuntimeError, ValueError, UnpicklingError, EOFError, ... by the kind of damage
        if (refused := system_error(error)) is not None:
            raise from_os_error(refused, UnreadableError, path) from None
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise ModelFileError(f"torch cannot read it ({reason})", where=path, remedy=DAMAGED) from None
    if not isinstance(stored, dict) or MANIFEST_KEY not in stored:
        raise ModelFileError(
            f"not a splatcli checkpoint: no manifest inside{_guess_origin(stored)}",
            where=path,
            remedy="only files written by splat train hold a state to resume from",
        )
    return stored


def _manifest_of(stored: dict[object, object], path: Path) -> Manifest:
    text, digest = stored.pop(MANIFEST_KEY), stored.pop(DIGEST_KEY, None)
    if not isinstance(text, str) or hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest() != digest:
        raise ModelFileError("the manifest does not match its own digest", where=path, remedy=DAMAGED)
    return parse_manifest(text, path)


def _tensors_of(stored: dict[object, object], manifest: Manifest, path: Path) -> dict[str, Tensor]:
    """The tensors, once names, dtypes, shapes, spaces and storage agree with the manifest and the format."""
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
        raise ModelFileError(listed("tensors and format disagree", problems), where=path)
    return tensors


def _storage_problems(name: str, tensor: Tensor, nbytes: int, seen: set[int]) -> list[str]:
    """A tensor must own exactly the bytes that it shows: no expanded stride, no window, no alias, no graph."""
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
    found = digests_of(tensors)
    for spec in manifest.tensors:
        if found[spec.name] != spec.sha256:
            guess = _guess_activation(spec.name, tensors[spec.name])
            raise ModelFileError(
                f"{spec.name} does not match its digest: damaged, or changed after it was written{guess}",
                where=path,
                remedy="use the file as splatcli wrote it" if guess else DAMAGED,
            )


def _guess_activation(name: str, tensor: Tensor) -> str:
    """The likely reason why a tensor is not the one that was written, when its values give it away."""
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
