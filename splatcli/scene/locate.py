"""Finding the photos of views on disk: folders, names, and names that differ only by case or ending."""

from __future__ import annotations

import os
import unicodedata
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from splatcli.errors import SceneError
from splatcli.scene.decode import SUFFIXES

#: Missing photos that are named in a message.
SHOWN = 5


@dataclass(slots=True)
class Found:
    """Photos of one folder.

    paths: view name -> file.
    missing: names without a file, in the order asked.
    loose: (name, file name) of those found under another case or ending.
    doubtful: (name, file names) of those for which several files could be meant.
    """

    folder: Path
    paths: dict[str, Path] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    loose: list[tuple[str, str]] = field(default_factory=list)
    doubtful: list[tuple[str, list[str]]] = field(default_factory=list)


def find_images(folder: Path, names: list[str]) -> Found:
    """The files of ``names`` under ``folder``: the exact name, else the only image equal but for case and ending."""
    found = Found(folder)
    index: dict[str, list[str]] | None = None
    for name in names:
        if (folder / name).is_file():
            found.paths[name] = folder / name
            continue
        if index is None:
            index = _index(folder)
        candidates = index.get(_stem(name), [])
        if len(candidates) > 1:
            found.doubtful.append((name, candidates))
        elif candidates:
            found.paths[name] = folder / candidates[0]
            found.loose.append((name, candidates[0]))
        else:
            found.missing.append(name)
    return found


def choose_folder(folders: list[Path], names: list[str]) -> Found:
    """The first folder that has every photo, else the one that has most (the first among equals)."""
    best: Found | None = None
    for folder in folders:
        if not folder.is_dir():
            continue
        found = find_images(folder, names)
        if len(found.paths) == len(names):
            return found
        if best is None or len(found.paths) > len(best.paths):
            best = found
    return best or Found(folders[0], missing=list(names))


def doubtful_error(folder: Path, name: str, candidates: list[str]) -> SceneError:
    """The error for a photo that several files could be."""
    return SceneError(
        f"{name} is not there, and {len(candidates)} files could be meant: {', '.join(candidates[:SHOWN])}",
        where=folder,
        remedy="keep one of them",
    )


def missing_error(found: Found, total: int, looked: list[Path]) -> SceneError:
    """The error for photos that views name and the disk lacks: how many, which, and where they were looked for."""
    shown = ", ".join(found.missing[:SHOWN]) + (", ..." if len(found.missing) > SHOWN else "")
    if found.paths:
        return SceneError(
            f"{len(found.missing)} of {total} photos are missing: {shown}",
            where=found.folder,
            remedy="put them back, or go on without them: --skip-missing",
        )
    places = ", ".join(str(folder) for folder in looked[:SHOWN])
    return SceneError(
        f"none of the {total} photos was found: {shown}; looked in {places}",
        where=found.folder,
        remedy="name their folder with --images, or compare the names and endings with the files",
    )


def _index(folder: Path) -> dict[str, list[str]]:
    """Stem -> image files below ``folder``, as relative paths with forward slashes."""
    index = defaultdict(list)
    for base, _, files in os.walk(folder):
        for file in sorted(files):
            if file.lower().endswith(SUFFIXES):
                relative = Path(base, file).relative_to(folder).as_posix()
                index[_stem(relative)].append(relative)
    return index


def _stem(name: str) -> str:
    path = PurePosixPath(name)
    # Only image endings are cut: "a.b" names "a.b.jpg", not "a.jpg".
    stem = str(path.with_suffix("")) if path.suffix.lower() in SUFFIXES else str(path)
    return unicodedata.normalize("NFC", stem).casefold()
