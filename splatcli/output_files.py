"""Where results go: names of runs and files, whether they can be written, and writing them in one step."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from splatcli.checkpoint.atomic import check_name, write_atomically
from splatcli.errors import OutputError, os_errors

#: The folder of runs for which none is named.
OUTPUT = Path("output")

#: Bytes of a file's name at most, on common systems.
_MAX_NAME = 255
#: Characters that no name of an image has: those of drives, those that check_name() refuses, and halves of surrogate
#: pairs, which JSON can name and no file system takes.
_UNUSABLE = re.compile("[:\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ud800-\udc7f\udd00-\udfff]")

#: Endings that a view's name loses.
_PICTURE_SUFFIXES = {".jpg", ".jpeg", ".png", ".tif", ".tiff", ".bmp", ".webp", ".exr"}


def scene_name(scene: Path) -> str:
    """Return the name of a scene's folder as it was given, also of a link; of a file that without its ending."""
    return scene.stem if scene.is_file() else os.path.basename(os.path.abspath(scene))


def free_folder(scene: Path) -> Path:
    """Return output/<scene>, with the first free number appended if that folder exists. Raises OutputError."""
    path = OUTPUT / (scene_name(scene) or "scene")
    candidate, number = path, 2
    with os_errors(OutputError, OUTPUT):
        while candidate.exists():
            candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate


def write_bytes(path: Path, payload: bytes) -> None:
    """Write a file atomically, and create its folders. Raise OutputError."""
    make_parent_folder(path)
    write_atomically(path, lambda file: file.write(payload), what="file", stream=True)


def make_parent_folder(path: Path) -> None:
    """Create the folders of a file. Raise OutputError, also if the path is a folder."""
    try:
        _check_no_folder(path)
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        in_the_way = error.errno in (errno.EEXIST, errno.ENOTDIR)
        remedy = "a file is in its way: name another place" if in_the_way else "write elsewhere, or free disk space"
        raise OutputError(f"cannot create the folder: {error.strerror}", where=path.parent, remedy=remedy) from None


def _check_no_folder(path: Path) -> None:
    if path.is_dir():  # also the empty name
        raise OutputError("this is a folder, not a file", where=path, remedy="name a file")


def check_file_place(path: Path) -> None:
    """Raise OutputError as check_place(), and where a folder is."""
    _check_no_folder(path)
    check_place(path)


def refuse_existing(path: Path, *, overwrite: bool) -> None:
    """Raise OutputError for a file that is there already, unless it is to be replaced."""
    if path.is_file() and not overwrite:
        raise OutputError("the file is already there", where=path, remedy="-w replaces it")


def check_place(path: Path, named: Path | None = None) -> None:
    """Raise OutputError where a file or a folder can surely not be written, before hours of work; change nothing.

    named: the place that the error names; None: ``path``. Raises it as check_name(), too.
    """
    check_name(path)
    if os.path.exists(path):  # also a pipe, or a name of an open file
        return
    place = Path(os.path.realpath(path))
    while not os.path.lexists(folder := place.parent):
        place = folder
    fault = errno.ENOTDIR if not folder.is_dir() else 0 if os.access(folder, os.W_OK | os.X_OK) else errno.EACCES
    if fault == errno.EACCES and os.statvfs(folder).f_flag & os.ST_RDONLY:
        fault = errno.EROFS
    if fault:
        raise OutputError(
            f"cannot write here: {os.strerror(fault)}",
            where=named or path,
            remedy="name a place where files can be written",
        )


def image_paths(names: Iterable[str], folder: Path, suffix: str = ".png") -> list[Path]:
    """Return the image file of each view: its name with ``suffix``, always inside ``folder``, all distinct.

    No file has the name of another one's folder. Names come from untrusted files: drives, roots and ``..`` in them are
    dropped, what no file's name may have becomes _, and names that are too long are shortened.
    """
    paths_of_names = [_inner_path(name) for name in names]
    folders = {str(parent).casefold() for named in paths_of_names for parent in named.parents}
    taken = {name.removesuffix(suffix.casefold()) for name in folders if name.endswith(suffix.casefold())}
    paths = []
    for named in paths_of_names:
        stem = named.with_suffix("") if named.suffix.lower() in _PICTURE_SUFFIXES else named
        ending, count = "", 2
        while (candidate := _with_ending(stem, ending, suffix)).casefold() in taken:
            ending, count = f"_{count}", count + 1
        taken.add(candidate.casefold())
        paths.append(folder / f"{candidate}{suffix}")
    return paths


def _inner_path(name: str) -> PurePosixPath:
    parts = [part for part in PurePosixPath(name.replace("\\", "/")).parts if part not in ("/", "..", ".")]
    return PurePosixPath(*([_shortened(_UNUSABLE.sub("_", part), _MAX_NAME) for part in parts] or ["view"]))


def _with_ending(stem: PurePosixPath, ending: str, suffix: str) -> str:
    """Return the path with ``ending`` at its name, shortened so that ``suffix`` fits behind it."""
    return str(stem.with_name(_shortened(stem.name, _MAX_NAME - len(ending) - len(suffix)) + ending))


def _shortened(name: str, most: int) -> str:
    """Return the beginning of a name that takes at most so many bytes."""
    name = name[:most]
    while len(os.fsencode(name)) > most:
        name = name[:-1]
    return name
