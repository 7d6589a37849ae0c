"""Finding the images of views on disk: folders, names, and names that differ only by case, ending or Unicode form."""

from __future__ import annotations

import errno
import os
import shlex
import stat
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from splatcli.config import DataConfig
from splatcli.errors import SceneError
from splatcli.scene import heif
from splatcli.scene.decode import RAW_SUFFIXES, conversion
from splatcli.scene.source import Problems, SceneSource, View
from splatcli.sizes import counted, listed

#: File name endings that are taken for images, when an ending has to be guessed.
SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".tif", ".tiff", ".webp", ".bmp", ".avif", *heif.SUFFIXES),
    *(".ppm", ".pgm", ".pnm", ".jp2", ".j2k"),
)
#: Endings of images that are not looked for: what needs another program, and kinds that hold more often something else.
UNREAD_SUFFIXES = (
    *RAW_SUFFIXES,
    *(".gif", ".jxl", ".exr", ".hdr", ".psd", ".mpo", ".insp", ".tga", ".svg"),
)

#: File name endings that are taken for videos.
VIDEO_SUFFIXES = (".mp4", ".mov", ".m4v", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".mts", ".m2ts", ".3gp", ".wmv")

#: These resolutions divide; any other number is a width in pixels.
DIVISORS = (1, 2, 4, 8)
#: Missing images that are named in a message.
SHOWN = 5


@dataclass(slots=True)
class Found:
    """Images of one folder.

    paths: view name -> file.
    missing: names without a file, in the order asked.
    inexact: (name, file name) of those found under another case, ending or Unicode form.
    ambiguous: (name, file names) of those for which several files could be meant.
    originals: view name -> full-size file, where the images are reduced copies; else empty.
    """

    folder: Path
    paths: dict[str, Path] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    inexact: list[tuple[str, str]] = field(default_factory=list)
    ambiguous: list[tuple[str, list[str]]] = field(default_factory=list)
    originals: dict[str, Path] = field(default_factory=dict)


def find_images(source: SceneSource, data: DataConfig, problems: Problems) -> Found:
    """Find the files of the views; copies already reduced by the resolution asked for, where all views have one."""
    views, notes, folders = source.views, source.notes, source.image_folders
    if data.images is not None:
        folders = [source.root / data.images]
        if not folders[0].is_dir():
            problems.add(_no_folder(data.images, source))
            return Found(folders[0])
    found = _choose_folder(folders, views)
    if found.missing:
        skip = data.skip_missing or (source.tolerant and len(found.paths) > len(found.missing))
        if not (skip and found.paths):
            problems.add(_missing(found, len(views), folders, source.root))
        else:
            what = "has no image and is" if len(found.missing) == 1 else "have no image and are"
            notes.append(f"{len(found.missing)} of {len(views)} views {what} left out")
    for name, candidates in found.ambiguous:
        problems.add(ambiguous_error(found.folder, name, candidates))
    if found.inexact:
        name, file = found.inexact[0]
        were = counted(len(found.inexact), "image was", "images were")
        notes.append(
            f"{were} found under another ending, case or Unicode form, or in another folder, e.g. {file} for {name}"
        )
    if moved := [view.name for view in views if view.moved and view.name in found.paths]:
        notes.append(
            f"{counted(len(moved), 'image')} that {source.file.name} places outside the scene "
            f"{'was' if len(moved) == 1 else 'were'} found in its folder, e.g. {moved[0]}"
        )
    _note_links(found, source.root, notes)
    # Of images in the scene's own folder, a folder DIR_2 beside it is another scene.
    own = found.folder.resolve() == source.root.resolve()
    if source.resized_folders and not own and data.resolution in DIVISORS and data.resolution != 1:
        smaller = found.folder.with_name(f"{found.folder.name}_{int(data.resolution or 1)}")
        if smaller.is_dir():
            copies = find_in(smaller, _files([view for view in views if view.name in found.paths]))
            lacking = len(found.paths) - len(copies.paths)
            if not lacking:
                notes.append(f"the images of {smaller.name}/ are used")
                copies.originals = found.paths
                return copies
            notes.append(f"{smaller.name}/ lacks {counted(lacking, 'image')} and is not used")
    return found


def images_below(folder: Path) -> Iterator[str]:
    """Yield the image files below a folder, by their endings, as relative paths with forward slashes."""
    return files_below(folder, SUFFIXES)


def files_below(folder: Path, suffixes: tuple[str, ...]) -> Iterator[str]:
    """Yield the files below a folder whose names end so, as relative paths with forward slashes."""
    for base, folders, files in walk(folder, links=True):
        folders.sort()
        for file in sorted(files):
            if file.lower().endswith(suffixes):
                yield Path(base, file).relative_to(folder).as_posix()


def unread_below(folder: Path) -> list[str]:
    """Return the files below a folder that are images by their endings but are not looked for, as relative paths.

    A camera's raw file beside an image of the same name is that image, and does not count.
    """
    found = []
    for base, folders, files in walk(folder, links=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        stems = {Path(file).stem for file in files if file.lower().endswith(SUFFIXES)}
        found += [
            Path(base, file).relative_to(folder).as_posix()
            for file in sorted(files)
            if file.lower().endswith(UNREAD_SUFFIXES) and not file.startswith(".") and Path(file).stem not in stems
        ]
    return found


#: Endings of archives, and of files of 360 degree cameras that their makers' programs alone read.
_ARCHIVES = (".zip", ".tar", ".tgz", ".gz", ".xz", ".zst", ".7z", ".rar")
_SPHERICAL = (".insv", ".360")


def file_remedy(path: Path) -> str | None:
    """Return what to do with a file in place of a folder of images, where its ending says it."""
    name = path.name.lower()
    if name.endswith(_ARCHIVES):
        with_name = {".zip": "unzip {0} -d {1}", ".7z": "7z x {0} -o{1}", ".rar": "unrar x {0} {1}/"}
        command = with_name.get(path.suffix.lower(), "mkdir {1} && tar -xf {0} -C {1}")
        file = Path(os.path.abspath(path))
        file = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
        folder = file.with_name(path.name.split(".")[0] or "scene")
        return f"unpack it, and name the folder: {command.format(shlex.quote(str(file)), shlex.quote(str(folder)))}"
    if name.endswith(_SPHERICAL):
        return "export it as an equirectangular video (.mp4) with the program of the camera's maker"
    return None


def file_with_remedy(folder: Path) -> tuple[Path, str] | None:
    """Return the first file of a folder for which there is a ``file_remedy``, and this; None without such a file."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return next(((file, remedy) for file in files if (remedy := file_remedy(file)) is not None), None)


def unread_note(names: Sequence[str]) -> str:
    """Return the sentence that names images which ``unread_below`` found."""
    return (
        f"{len(names)} {'file is an image' if len(names) == 1 else 'files are images'} of a kind that is not read, "
        f"and left out: {listed(names, SHOWN)}"
    )


def unread_error(folder: Path, names: Sequence[str]) -> SceneError:
    """Return the error for a folder whose only images are those that ``unread_below`` found."""
    what = f"there are no images here that can be read; {unread_note(names)}"
    return SceneError(what, where=folder, remedy=conversion(folder / names[0], "name that folder"))


def find_in(folder: Path, files: Mapping[str, str]) -> Found:
    """Find the files of views under ``folder``: the exact name, else the only image with the same ``_stem``.

    A file found for one view by its stem, or of another view's exact name, is no candidate.

    files: names of the views -> the paths asked for.
    """
    found = Found(folder)
    exact = {name: file for name, file in files.items() if is_file(folder / file)}
    taken = set(exact.values())
    index: dict[str, list[str]] = defaultdict(list)
    for other in images_below(folder) if len(exact) < len(files) else ():
        index[_stem(other)].append(other)
    for name in files:
        if name in exact:
            found.paths[name] = folder / exact[name]
            continue
        candidates = [
            other for other in index.get(_stem(name), []) if other not in taken and not _is_dead_link(folder / other)
        ]
        if len(candidates) > 1:
            found.ambiguous.append((name, candidates))
        elif candidates:
            found.paths[name] = folder / candidates[0]
            found.inexact.append((name, candidates[0]))
            taken.add(candidates[0])
        else:
            found.missing.append(name)
    return found


def _files(views: list[View]) -> dict[str, str]:
    return {view.name: view.outside or view.name for view in views}


def _choose_folder(folders: list[Path], views: list[View]) -> Found:
    """Find the images in the first folder that has all, else in the one that has most (the first among equals)."""
    best: Found | None = None
    for folder in folders:
        if not folder.is_dir():
            continue
        found = find_in(folder, _files(views))
        if len(found.paths) == len(views):
            return found
        if best is None or len(found.paths) > len(best.paths):
            best = found
    if best is not None and not best.paths:
        best = next(filter(None, (_by_last_names(folder, views) for folder in folders)), best)
    return best or Found(folders[0], missing=[view.name for view in views])


def _by_last_names(folder: Path, views: list[View]) -> Found | None:
    """Find the images below ``folder`` by their names alone, where these tell all views and files apart; else None.

    A model may name folders that its images were in once, or leave out those that they are in now.
    """
    files: dict[str, list[str]] = defaultdict(list)
    for file in images_below(folder) if folder.is_dir() else ():
        files[PurePosixPath(file).name].append(file)
    names = {view.name: PurePosixPath(view.name).name for view in views}
    if len(set(names.values())) < len(views) or not all(len(files.get(name, ())) == 1 for name in names.values()):
        return None
    found = Found(folder)
    found.paths = {name: folder / files[last][0] for name, last in names.items()}
    found.inexact = [(name, files[last][0]) for name, last in names.items()]
    return found


def ambiguous_error(folder: Path, name: str, candidates: list[str]) -> SceneError:
    """Return the error for a view that several files could belong to."""
    return SceneError(
        f"{name} is not there, and {len(candidates)} files could be meant: {', '.join(candidates[:SHOWN])}",
        where=folder,
        remedy="keep one of them",
    )


def _missing(found: Found, total: int, looked: list[Path], root: Path) -> SceneError:
    """Return the error for images that views name and the disk lacks: how many, which, and what is there instead."""
    first = [f"{name}{_in_place_of(found.folder / name)}" for name in found.missing[:SHOWN]]
    shown = listed([*first, *found.missing[SHOWN:]], SHOWN)
    if found.paths:
        return SceneError(
            f"{len(found.missing)} of {total} images are missing: {shown}",
            where=found.folder,
            remedy="put them back; splat train --skip-missing goes on without them",
        )
    inside = dict.fromkeys(path.relative_to(root) for path in looked if path.is_relative_to(root))
    places = ", ".join(f"{path}/" for path in sorted(inside, key=lambda path: len(path.parts) or len(inside)))
    others = list(images_below(root))
    there = f"the scene has {len(others)} others, such as {others[0]}" if others else "the scene has no image file"
    return SceneError(
        f"none of the {total} images was found: {shown}; looked in {places or found.folder}; {there}",
        where=root,
        remedy="name the folder of the images with splat train --images DIR, or rename the files to "
        "the names that the scene gives its views",
    )


def _no_folder(named: str, source: SceneSource) -> SceneError:
    """Return the error for the folder of ``data.images`` that is not there: what to give instead."""
    place, root = source.root / named, source.root
    base, _, divisor = place.name.rpartition("_")
    whole = place.with_name(base) if base and divisor in [str(one) for one in DIVISORS[1:]] else None
    if whole is not None and whole.is_dir():
        usual = whole in source.image_folders
        instead = "leave out --images" if usual else f"--images {shlex.quote(whole.relative_to(root).as_posix())}"
        remedy = f"{instead}; splat train -r {divisor} divides the sides of the images in {base}/ by {divisor}"
    else:
        there = sorted({PurePosixPath(image).parent.as_posix() for image in images_below(root)})
        flags = listed([f"--images {shlex.quote(folder)}" for folder in there], SHOWN, " or ")
        remedy = f"name a folder of the scene that holds images: {flags}" if there else "the scene has no image file"
    return SceneError("there is no such folder of images", where=place, remedy=remedy)


def _in_place_of(path: Path) -> str:
    """Return what there is in place of a missing image, as `` (a folder)``; empty without anything."""
    try:
        if _is_dead_link(path) and path.is_symlink():
            return f" (a link to {os.readlink(path)}, which is not there)"
        return " (a folder)" if path.is_dir() else ""
    except (OSError, ValueError):
        return ""


def _note_links(found: Found, root: Path, notes: list[str]) -> None:
    """Add a note on links that lead out of the scene. They are followed: data stores use them for every image."""
    away = {path for path in {found.folder, *found.paths.values()} if path.is_symlink()}
    # A link that leads to itself stays as it is, where Path.resolve() would raise: opening it names the fault.
    led = {path: Path(os.path.realpath(path)) for path in away}
    away = {path for path in away if not led[path].is_relative_to(root.resolve())}
    if away:
        example = min(away)
        lead = "1 link leads" if len(away) == 1 else f"{len(away)} links lead"
        notes.append(
            f"{lead} out of the scene's folder, e.g. {example.relative_to(root)} to {led[example]}"
            if example.is_relative_to(root)
            else f"{lead} out of the scene's folder"
        )


def _stem(name: str) -> str:
    path = PurePosixPath(name)
    # Only image endings are cut: "a.b" names "a.b.jpg", not "a.jpg".
    stem = str(path.with_suffix("")) if path.suffix.lower() in SUFFIXES else str(path)
    return unicodedata.normalize("NFC", stem).casefold()


#: A name that is not there, or that no disk takes.
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)


def is_file(path: Path) -> bool:
    """Return whether a file is there. Raises OSError when the system cannot say."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except ValueError:  # a NUL in the name
        return False
    except OSError as error:
        if error.errno in _ABSENT:
            return False
        raise


def _is_dead_link(path: Path) -> bool:
    """Return whether nothing is behind a name that a folder lists. A link to itself is not dead: opening it fails."""
    try:
        os.stat(path)
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ENOTDIR)
    except ValueError:  # a NUL in the name
        return False
    return False


def walk(folder: Path, *, private: bool = False, links: bool = False) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk a folder as os.walk() does, which passes over folders that cannot be read; here they raise OSError.

    private: folders that belong to somebody else (EACCES) are passed over, for a search that may miss them.
    links: links to folders that lie elsewhere are followed, and each folder is walked once; links with a dot before
    their name or a folder's above them are not followed, nor those to a folder that contains ``folder``.
    """

    def refuse(error: OSError) -> None:
        if error.errno not in _ABSENT and not (private and isinstance(error, PermissionError)):
            raise error

    walked = os.walk(folder, onerror=refuse, followlinks=links)
    return _once(folder, walked) if links else walked


def _once(
    folder: Path, walked: Iterator[tuple[str, list[str], list[str]]]
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield the folders of a walk that follows links, each folder once."""
    root = Path(os.path.realpath(folder))
    followed, walked_already = [root], {root}

    def is_new(place: Path) -> bool:
        target = Path(os.path.realpath(place))
        if place.is_symlink():
            hidden = any(part.startswith(".") for part in place.relative_to(folder).parts)
            # What lies below a folder that is followed is found there; what contains the whole walk is not meant.
            if hidden or root.is_relative_to(target) or any(target.is_relative_to(one) for one in followed):
                return False
            followed.append(target)
        if target in walked_already:
            return False
        walked_already.add(target)
        return True

    for base, folders, files in walked:
        folders[:] = [name for name in sorted(folders) if is_new(Path(base) / name)]
        yield base, folders, files
