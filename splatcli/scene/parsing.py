"""Parts of the readers of cameras: poses, paths of files, names of images, points beside them, JSON, XML and text."""

from __future__ import annotations

import codecs
import io
import json
import os
import re
import unicodedata
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from splatcli.config import DataConfig
from splatcli.errors import SceneError
from splatcli.progress import report
from splatcli.scene.camera import product
from splatcli.scene.find_images import SUFFIXES, UNREAD_SUFFIXES, images_below, is_file
from splatcli.scene.points import RawPoints, read_points_ply
from splatcli.scene.source import Entry

#: How far R^T R may be from the identity, and a quaternion's length from one: printed digits, not a mistake.
ROTATION_TOLERANCE = 1e-3
#: Folders of a scene that images are searched in.
IMAGE_FOLDERS = ("", "images", "input")
#: Longest name of a file or folder in bytes, on every file system in use.
_MAX_NAME = 255
#: Stands for the folder above in the names of images outside the scene: names become paths of renders.
_UP = "__"
#: OpenGL camera axes (x right, y up, z back) to OpenCV's (x right, y down, z forward).
_FLIP = np.array([1.0, -1.0, -1.0])
#: Newton's iteration for the polar factor of a matrix, which is its nearest rotation: each step squares the distance,
#: from ROTATION_TOLERANCE to less than rounding. Unlike a library's SVD it has the same bits on every processor.
_POLAR_STEPS = 5
_POSE_REMEDY = "correct the pose, or take the view out of the file"
#: Larger files are refused: 100,000 frames of a transforms.json take about 60 MB, and as Python objects up to thirty
#: times that.
MAX_BYTES = 128 << 20
#: The same, of files that hold points as well.
MAX_BYTES_WITH_POINTS = 512 << 20
#: Bytes between two reports.
_REPORT_BYTES = 4_000_000
_Kind = TypeVar("_Kind", dict[str, Any], list[Any])
#: Folders of a scene whose images are none of its views.
_NO_IMAGES = re.compile(r"(masks(_\d+)?|depths?)/")
#: Stems of point clouds beside a file of cameras, after that file's own.
_POINTS = ("points", "sparse", "sparse_pc", "points3D", "tie_points", "pointcloud")


def rigid_pose(rotation: NDArray[np.float64], translation: NDArray[np.float64], entry: Entry) -> NDArray[np.float64]:
    """Return [4, 4], the pose of R [3, 3] and t [3], R replaced by the nearest exact rotation.

    Raises SceneError when a number is not finite, or R is scaled, sheared or mirrored beyond printed digits.
    """
    with np.errstate(all="ignore"):
        # The renderer works in float32, where 1e39 is infinite.
        finite = np.isfinite([*rotation.ravel(), *translation.astype(np.float32)]).all()
        skew = np.abs(rotation.T @ rotation - np.eye(3)).max()
    if not finite:
        raise entry.error("its pose has numbers that are not finite", _POSE_REMEDY)
    if not skew <= ROTATION_TOLERANCE:
        with np.errstate(all="ignore"):
            lengths = ", ".join(f"{length:.4g}" for length in np.linalg.norm(rotation, axis=0))
        raise entry.error(
            f"the 3x3 part of its pose is not a rotation (its columns are {lengths} long, expected 1, 1, 1 and at "
            "right angles)",
            f"scale the camera positions, not the matrix; {_POSE_REMEDY}",
        )
    if np.linalg.det(rotation) < 0:
        raise entry.error("its pose is mirrored (determinant -1)", _POSE_REMEDY)
    for _ in range(_POLAR_STEPS):
        rotation = product(rotation, 1.5 * np.eye(3) - 0.5 * product(rotation.T, rotation))
    pose = np.eye(4)
    pose[:3, :3] = rotation
    pose[:3, 3] = translation
    return pose


def viewmat_of(
    rotation: NDArray[np.float64], center: NDArray[np.float64], entry: Entry, *, opengl: bool
) -> NDArray[np.float64]:
    """Return [4, 4], world to camera, OpenCV axes, of camera to world [3, 3] and a position [3]. Raises SceneError."""
    pose = rigid_pose(rotation * _FLIP if opengl else rotation, center, entry)
    viewmat = np.eye(4)
    viewmat[:3, :3] = pose[:3, :3].T
    viewmat[:3, 3] = -pose[:3, :3].T @ center
    return viewmat


def turn_about(axis: int, angle: float) -> NDArray[np.float64]:
    """Return [3, 3], the rotation about x (0), y (1) or z (2) by an angle in radians."""
    turn = np.eye(3)
    i, j = (axis + 1) % 3, (axis + 2) % 3
    turn[i, i] = turn[j, j] = np.cos(angle)
    turn[j, i] = np.sin(angle)
    turn[i, j] = -turn[j, i]
    return turn


def path_in_scene(name: str, root: Path, entry: Entry, *, allow_outside: bool) -> tuple[str, str | None]:
    """Return a file name from a scene file as a clean path relative to ``root``, forward slashes, and None.

    A path that leads out of ``root`` to no file, as those of another machine, becomes its longest end that lies below.
    A backslash separates folders, unless a file has it in its name.
    allow_outside: for a file that is not below ``root`` return a safe name and the path as it was given.
    entry: that names the file. Raises SceneError for a file outside that is not allowed, and always for URLs, drive
    letters and what is no file name; nothing is ever downloaded.
    """
    literal = "\\" in name and any(os.path.isfile(root / folder / name) for folder in IMAGE_FOLDERS)
    text = name if literal else name.replace("\\", "/")
    parts = _parts_below(text, root)
    if parts is None:
        parts = _end_below(text, root)
    if parts is None:
        return _outside(name, text, entry, allow_outside)
    if not parts or "\0" in text or not all(_is_short(part) for part in parts):
        shown = name if len(name) <= 100 else f"{name[:100]}..."
        raise entry.error(f"{shown!r} is not the name of a file", "correct the name")
    return "/".join(parts), None


def leads_outside(name: str, root: Path) -> bool:
    """Return whether a file name from a scene file leads out of ``root``."""
    return _parts_below(name.replace("\\", "/"), root) is None


def _parts_below(text: str, root: Path) -> list[str] | None:
    """Return the folders and the name of a path below ``root``; None for one that leads out of it."""
    path = Path(text)
    if path.is_absolute() and path.is_relative_to(root):
        path = path.relative_to(root)
    if path.is_absolute() or _is_foreign(text):
        return None
    parts: list[str] = []
    for part in path.parts:
        if part != "..":
            parts.append(part)
        elif parts:
            parts.pop()
        else:
            return None
    return parts


def _is_foreign(text: str) -> bool:
    """Return whether a name is a URL or begins with a drive letter."""
    return "://" in text or (len(text) > 1 and text[1] == ":" and text[0].isalpha())


def _end_below(text: str, root: Path) -> list[str] | None:
    """Return the longest end of a path that leads to no file whose folder is below ``root``, else the file of its name.

    That is in one of IMAGE_FOLDERS. None without either.
    """
    path = Path(os.path.normpath(text))
    if "://" in text or "\0" in text or not all(_is_short(part) for part in path.parts):
        return None
    if not _is_foreign(text) and os.path.lexists(root / path):
        return None
    parts = [part for part in path.parts if part not in ("..", path.anchor)]
    for start in range(1 if _is_foreign(text) else 0, len(parts) - 1):
        if (root / Path(*parts[start:-1])).is_dir():
            return parts[start:]
    holders = [Path(folder).parts for folder in IMAGE_FOLDERS if parts and (root / folder / parts[-1]).is_file()]
    return [*holders[0], parts[-1]] if holders else None


def _is_short(part: str) -> bool:
    """Return whether file systems can have such a name; asking them for a longer one is an error, not a no."""
    try:
        return len(os.fsencode(part)) <= _MAX_NAME
    except UnicodeEncodeError:
        return False


def _outside(name: str, text: str, entry: Entry, allowed: bool) -> tuple[str, str]:
    remedy = "put the file into the scene's folder and name it relative to that; "
    if _is_foreign(text):
        what = f"{name!r} lies outside the scene's folder, and on no disk of this machine"
        raise entry.error(what, f"{remedy}nothing is downloaded")
    if not allowed:
        what = f"{name!r} lies outside the scene's folder"
        raise entry.error(what, f"{remedy}or let it be read where it is: splat train --allow-outside")
    path = Path(text)
    return "/".join(_UP if part == ".." else part for part in path.parts if part != path.anchor), text


class ImageNames:
    """Finds the images that programs name by labels without ending, or by paths of the machine that they ran on.

    It searches ``data.images``, else images/ or, where that holds no image, the scene's folder; with folders below.
    """

    def __init__(self, root: Path, data: DataConfig) -> None:
        self._folders = [root / data.images] if data.images else [root / "images", root]
        self.folder = self._folders[0]
        self._found: dict[str, list[str]] | None = None

    def __call__(self, label: str) -> str:
        """Return the name of the image relative to its folder; a likely one where it is not there.

        Of several images of that name it is the one whose last folders agree most with the label's. Raises SceneError
        where several do.
        """
        parts = [part for part in label.replace("\\", "/").split("/") if part not in ("", ".", "..")]
        if not parts:
            return label
        name = parts[-1]
        candidates = self._index().get(_key(name)) or self._index().get(_key(_without_raw(name))) or []
        scores = [_common_tail(parts[:-1], candidate.split("/")[:-1]) for candidate in candidates]
        best = [one for one, score in zip(candidates, scores, strict=True) if score == max(scores)]
        if len(best) > 1:
            # In the folder itself rather than below it; a.jpg as it is called rather than a.png.
            best = [one for one in best if "/" not in one] or best
            if len({PurePosixPath(one).parent for one in best}) == 1:
                best = [one for one in best if PurePosixPath(one).name == name] or best
        if len(best) > 1:
            raise SceneError(
                f"{label!r} could be {len(best)} images: {', '.join(best)}",
                where=self.folder,
                remedy="keep one of them, or give the images different names and export the cameras again",
            )
        if best:
            return best[0]
        return name if PurePosixPath(name).suffix.lower() in SUFFIXES else f"{name}{SUFFIXES[0]}"

    def _index(self) -> dict[str, list[str]]:
        """Return the images of the folder by the keys of their names."""
        if self._found is None:
            self._found = defaultdict(list)
            for folder in self._folders:
                names = [name for name in images_below(folder) if not _NO_IMAGES.match(name)]
                if names:
                    self.folder = folder
                    for name in names:
                        self._found[_key(PurePosixPath(name).name)].append(name)
                    break
        return self._found


def _key(name: str) -> str:
    """Return a name without an image's ending, and without case."""
    stem = PurePosixPath(name).stem if PurePosixPath(name).suffix.lower() in SUFFIXES else name
    return unicodedata.normalize("NFC", stem).casefold()


def _without_raw(name: str) -> str:
    """Return a name without the ending of a kind of image that is not read: the photos were developed since."""
    return PurePosixPath(name).stem if PurePosixPath(name).suffix.lower() in UNREAD_SUFFIXES else name


def _common_tail(one: list[str], other: list[str]) -> int:
    """Return how many of the last folders are the same in both."""
    count = 0
    for a, b in zip(reversed(one), reversed(other), strict=False):
        if a.casefold() != b.casefold():
            break
        count += 1
    return count


def points_beside(file: Path, limit: int) -> RawPoints | None:
    """Read the point cloud beside a file of cameras: ``<its stem>.ply``, else points.ply, sparse.ply and the like."""
    for stem in (file.stem, *_POINTS):
        path = file.with_name(f"{stem}.ply")
        if is_file(path):
            points = read_points_ply(path, limit)
            return points if points.total else None
    return None


def only_one(files: list[Path], what: str) -> Path:
    """Return the file that describes a scene. Raises SceneError for several."""
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise SceneError(
            f"has several files of {what}: {names}", where=files[0].parent, remedy="keep one of them in the folder"
        )
    return files[0]


def check_size(file: Path, limit: int = MAX_BYTES) -> None:
    """Raise SceneError for a file that is too large to be a list of cameras."""
    size = file.stat().st_size
    if size > limit:
        remedy = "export the cameras alone, without points" if limit == MAX_BYTES else "export fewer points"
        raise SceneError(f"is {size >> 20} MB large, more than {limit >> 20} MB", where=file, remedy=remedy)


def load_json(file: Path, kind: type[_Kind], remedy: str, limit: int = MAX_BYTES) -> _Kind:
    """Return the object (kind dict) or the list that a JSON file holds; ``remedy`` is for a file that holds the other.

    Raises SceneError, with line and column where they are known, for any other file.
    """
    text = ""
    try:
        check_size(file, limit)
        text = read_text(file)
        document = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise SceneError(
            f"not valid JSON: {error.msg}", where=f"{file}:{error.lineno}:{error.colno}", remedy="correct the file"
        ) from None
    except _ConstantError as error:
        place = _place_of_constant(text)
        raise SceneError(
            f"has {error} in place of a number",
            where=f"{file}:{place}",
            remedy="correct it, or remove its frame",
        ) from None
    except RecursionError:
        raise SceneError("is nested too deeply", where=file, remedy="write it again") from None
    except ValueError as error:
        # Python refuses to read integers of more than some thousand digits.
        raise SceneError(f"cannot be read: {error}", where=file, remedy="correct the file") from None
    except OSError as error:
        raise SceneError(
            f"cannot be read: {error.strerror}", where=file, remedy="check that it is a file, and its permissions"
        ) from None
    if not isinstance(document, kind):
        raise SceneError(f"holds no JSON {'object' if kind is dict else 'list'}", where=file, remedy=remedy)
    return document


class _ConstantError(ValueError):
    """NaN or Infinity, which JSON does not have but Python's reader accepts."""


def _refuse_constant(text: str) -> float:
    raise _ConstantError(text)


def _place_of_constant(text: str) -> str:
    """Return line:column of the first NaN or Infinity that is not inside a string."""
    found = re.search(r'(?:[^"NI]|"(?:[^"\\]|\\.)*+")*+(NaN|Infinity)', text)
    start = found.start(1) if found else 0
    return f"{text.count(chr(10), 0, start) + 1}:{start - text.rfind(chr(10), 0, start)}"


def parse_xml(file: Path, remedy: str) -> ET.Element:
    """Return the root of an XML file. Raises SceneError, with line and column, for any other file."""
    content = file.read_bytes()
    if "<!DOCTYPE" in (start := head(file)) or "<!ENTITY" in start:
        raise SceneError("has a document type, which no file of cameras has", where=file, remedy=remedy)
    try:
        if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return ET.fromstring(read_text(file))  # whatever encoding its declaration names
        return ET.fromstring(content)
    except ET.ParseError as error:
        line, column = error.position
        raise SceneError(f"not valid XML: {error}", where=f"{file}:{line}:{column + 1}", remedy=remedy) from None
    except (LookupError, ValueError) as error:  # an encoding that its declaration names
        raise SceneError(f"cannot be read: {error}", where=file, remedy="write it again as UTF-8") from None


def read_text(file: Path) -> str:
    """Return the text of a file in UTF-8, or in UTF-16 with a byte order mark. Raises SceneError for another."""
    content = file.read_bytes()
    try:
        return content.decode(_encoding(content))
    except UnicodeDecodeError as error:
        raise SceneError(f"not UTF-8 text: {error}", where=file, remedy="write it again as UTF-8") from None


def _encoding(content: bytes) -> str:
    return "utf-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"


def lines_of(path: Path) -> Iterator[str]:
    """Yield each line of a file with its end.

    Bytes that are no UTF-8 become surrogates, so that they do not end the search for a faulty line; a byte order mark
    is no part of the text.
    """
    with (
        path.open("rb") as raw,
        io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="\n") as file,
    ):
        size, reported = path.stat().st_size, 0
        for line in file:
            yield line
            if raw.tell() - reported > _REPORT_BYTES:
                reported = raw.tell()
                report(f"reading {path.name}, MB", reported // 1_000_000, size // 1_000_000)
        if reported:
            report(f"reading {path.name}, MB", size // 1_000_000, size // 1_000_000)


def head(file: Path) -> str:
    """Return the text of the first 4,096 bytes of a file, with marks in place of what is no text."""
    with file.open("rb") as stream:
        start = stream.read(4096)
    return start.decode(_encoding(start), "replace")


def with_suffix(root: Path, suffix: str) -> list[Path]:
    """Return the files of a folder with an ending, in the order of their names."""
    return sorted(path for path in root.iterdir() if path.suffix.lower() == suffix and path.is_file())
