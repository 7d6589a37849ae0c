"""The zip around a torch file, examined before torch sees it.

torch.load checks neither lengths nor checksums, accepts compressed members (a bomb), and finds members without regard
to case; so whatever is not a plain archive of stored members under one root is refused here. Nothing is allocated
beyond the small members.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from splatcli.errors import ModelFileError, UnreadableError, from_os_error, system_error

DAMAGED = "the file is damaged: fall back on an older checkpoint of the run, or restore the file from a copy"

_MAX_MEMBERS = 10_000
_END_OF_ZIP = b"PK\x05\x06"
_END_OF_ZIP_SIZE = 22
#: Bytes at a time when a member is read for its checksum only.
_BLOCK = 1 << 20


def examine(path: Path, look_inside: Callable[[zipfile.ZipFile], None]) -> None:
    """Refuse what is not a plain torch zip, then let ``look_inside`` read members of the opened archive.

    Raises ModelFileError, also for whatever zipfile raises while ``look_inside`` reads; UnreadableError or
    ResourceError where the system refuses, which says nothing of the file's content.
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
    # With the end record exactly at the end and no comment, every zip reader agrees on the same directory.
    if not tail.startswith(_END_OF_ZIP) or tail[-2:] != b"\0\0":
        raise ModelFileError(f"truncated or extended: {size} bytes do not end as a zip", where=path, remedy=DAMAGED)
    try:
        with zipfile.ZipFile(path) as archive:
            problems = _member_problems(archive, size)
            if not problems:
                look_inside(archive)
    except ModelFileError:
        raise
    except Exception as error:  # zipfile lets struct.error, ValueError, NotImplementedError and others through
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
    """The member that torch unpickles; there is one, in an archive that passed ``examine``."""
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
    # torch looks members up without regard to case: two spellings of one name could show it another pickle than us.
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
