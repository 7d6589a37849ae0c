"""Checks the files of a COLMAP model before pycolmap sees them, and finds the faulty line when it refuses them.

pycolmap trusts counts: a file that ends early is read as whatever follows, asks for any amount of memory, or never
returns. Binary files are therefore walked record by record first, which touches headers and lengths only; what passes
can make pycolmap allocate no more than the file's own size. Text files cannot do that harm: they are looked at only
to count images, and to name the line after a failure.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from splatcli.errors import SceneError

#: Parameters of each camera model by COLMAP's model id.
MODEL_PARAMS = {
    **{0: 3, 1: 4, 2: 4, 3: 5, 4: 8, 5: 8, 6: 12, 7: 5, 8: 4, 9: 5},
    **{10: 12, 11: 16, 12: 4, 13: 5, 14: 3, 15: 4, 16: 6, 17: 2},
}
#: Longest image name in bytes; longer ones mean that the file is not what it seems.
MAX_NAME = 4096

_REMEDY = "copy the file again from where the model was made, or run COLMAP's mapper again"


@dataclass(slots=True)
class _Cursor:
    """A position in a file that cannot leave it."""

    path: Path
    data: bytes | mmap.mmap
    offset: int = 0
    record: str = field(default="header")

    def take(self, layout: struct.Struct) -> tuple[int | float, ...]:
        start = self.offset
        self.skip(layout.size)
        return layout.unpack_from(self.data, start)

    def skip(self, size: int) -> None:
        if self.offset + size > len(self.data):
            raise SceneError(
                f"ends in the middle of {self.record}: byte {self.offset + size:,} is needed, "
                f"the file has {len(self.data):,}",
                where=self.path,
                remedy=_REMEDY,
            )
        self.offset += size

    def count(self, smallest: int, what: str) -> int:
        """A 64-bit count of records that take at least ``smallest`` bytes each."""
        start = self.offset
        n = int(self.take(_U64)[0])
        if n * smallest > len(self.data) - self.offset:
            raise SceneError(
                f"claims {n:,} {what} at byte {start:,}, but only {len(self.data) - self.offset:,} bytes follow",
                where=self.path,
                remedy=_REMEDY,
            )
        return n

    def end(self) -> None:
        if self.offset != len(self.data):
            raise SceneError(
                f"has {len(self.data) - self.offset:,} bytes after its last record, at byte {self.offset:,}",
                where=self.path,
                remedy=_REMEDY,
            )


_U64 = struct.Struct("<Q")
_CAMERA = struct.Struct("<IiQQ")
_IMAGE = struct.Struct("<I7dI")
_POINT = struct.Struct("<Q3d3BdQ")
_RIG = struct.Struct("<II")
_SENSOR = struct.Struct("<iI")
_FLAG = struct.Struct("<B")
_FRAME = struct.Struct("<II7dI")
_POSE_SIZE = 56
_OBSERVATION_SIZE = 24
_TRACK_SIZE = 8
_DATA_SIZE = 16


def _walk_cameras(cursor: _Cursor) -> int:
    n = cursor.count(_CAMERA.size, "cameras")
    for i in range(n):
        cursor.record = f"camera {i + 1} of {n}"
        camera_id, model, _, _ = cursor.take(_CAMERA)
        if model not in MODEL_PARAMS:
            raise SceneError(
                f"camera {camera_id} has the unknown model id {model}",
                where=cursor.path,
                remedy="undistort the photos with `colmap image_undistorter`, which writes PINHOLE cameras",
            )
        cursor.skip(8 * MODEL_PARAMS[int(model)])
    return n


def _walk_images(cursor: _Cursor) -> int:
    n = cursor.count(_IMAGE.size + 1 + _U64.size, "images")
    for i in range(n):
        cursor.record = f"image {i + 1} of {n}"
        cursor.skip(_IMAGE.size)
        stop = cursor.data.find(b"\0", cursor.offset, cursor.offset + MAX_NAME)
        if stop < 0:
            raise SceneError(f"the name of {cursor.record} has no end", where=cursor.path, remedy=_REMEDY)
        cursor.offset = stop + 1
        cursor.skip(_OBSERVATION_SIZE * cursor.count(_OBSERVATION_SIZE, "observations"))
    return n


def _walk_points(cursor: _Cursor) -> int:
    n = cursor.count(_POINT.size, "points")
    take, before_length = _U64.unpack_from, _POINT.size - _U64.size
    data, size, offset = cursor.data, len(cursor.data), cursor.offset
    for i in range(n):
        following = offset + _POINT.size
        if following <= size:
            following += _TRACK_SIZE * take(data, offset + before_length)[0]
        if following > size:
            cursor.offset, cursor.record = offset, f"point {i + 1} of {n}"
            cursor.skip(following - offset)
        offset = following
    cursor.offset = offset
    return n


def _walk_rigs(cursor: _Cursor) -> int:
    n = cursor.count(_RIG.size, "rigs")
    for i in range(n):
        cursor.record = f"rig {i + 1} of {n}"
        sensors = int(cursor.take(_RIG)[1])
        for j in range(sensors):
            cursor.skip(_SENSOR.size)
            if j > 0 and cursor.take(_FLAG)[0]:
                cursor.skip(_POSE_SIZE)
    return n


def _walk_frames(cursor: _Cursor) -> int:
    n = cursor.count(_FRAME.size, "frames")
    for i in range(n):
        cursor.record = f"frame {i + 1} of {n}"
        cursor.skip(_DATA_SIZE * int(cursor.take(_FRAME)[-1]))
    return n


_WALKS: dict[str, Callable[[_Cursor], int]] = {
    "cameras": _walk_cameras,
    "images": _walk_images,
    "points3D": _walk_points,
    "rigs": _walk_rigs,
    "frames": _walk_frames,
}


def audit_binary(folder: Path) -> dict[str, int]:
    """Walks every .bin file of the model and returns the number of records by kind ("cameras", "images", ...).

    Raises SceneError with file, record and byte when a file is shorter or longer than its counts say.
    """
    counts = {}
    for kind, walk in _WALKS.items():
        path = folder / f"{kind}.bin"
        if not path.is_file():
            continue
        with path.open("rb") as file:
            if path.stat().st_size < _U64.size:
                raise SceneError(f"is only {path.stat().st_size} bytes long", where=path, remedy=_REMEDY)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                cursor = _Cursor(path, data)
                counts[kind] = walk(cursor)
                cursor.end()
    return counts


def count_images(folder: Path, suffix: str) -> int:
    """The number of images in a model, from the header (".bin") or by counting lines (".txt")."""
    path = folder / f"images{suffix}"
    if suffix == ".bin":
        with path.open("rb") as file:
            head = file.read(_U64.size)
        return int(_U64.unpack(head)[0]) if len(head) == _U64.size else 0
    return sum(1 for _ in _image_lines(path))


def text_names(folder: Path) -> dict[int, str]:
    """Image id -> name in a text model; pycolmap cuts names at the first space."""
    rows = (line.split(maxsplit=9) for _, line, _ in _image_lines(folder / "images.txt"))
    return {int(row[0]): row[9] for row in rows if len(row) == 10 and row[0].isdecimal()}


def _lines(path: Path) -> list[tuple[int, str]]:
    text = path.read_bytes().decode("utf-8-sig", "replace")
    return [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1)]


def _image_lines(path: Path) -> list[tuple[int, str, str]]:
    """(line number, pose line, observation line) of each image in images.txt."""
    found = []
    lines = iter(_lines(path))
    for number, line in lines:
        if line and not line.startswith("#"):
            found.append((number, line, next(lines, (0, ""))[1]))
    return found


def faulty_text_line(folder: Path) -> tuple[Path, int, str] | None:
    """The first line of a text model that does not have COLMAP's form: (file, line number, why); None if all have."""
    cameras, images, points = (folder / f"{kind}.txt" for kind in ("cameras", "images", "points3D"))
    for number, line in _data_lines(cameras):
        fields = line.split()
        if len(fields) < 5 or not _all(int, fields[0:1] + fields[2:4]) or not _all(float, fields[4:]):
            return cameras, number, "expected CAMERA_ID MODEL WIDTH HEIGHT PARAMS..."
    for number, line, observations in _image_lines(images):
        fields = line.split(maxsplit=9)
        if len(fields) < 10 or not _all(int, [fields[0], fields[8]]) or not _all(float, fields[1:8]):
            return images, number, "expected IMAGE_ID QW QX QY QZ TX TY TZ CAMERA_ID NAME"
        triples = observations.split()
        if len(triples) % 3 or not _all(float, triples):
            return images, number + 1, "expected X Y POINT3D_ID for each observation (or an empty line)"
    for number, line in _data_lines(points):
        fields = line.split()
        if len(fields) < 8 or len(fields) % 2 or not _all(float, fields):
            return points, number, "expected POINT3D_ID X Y Z R G B ERROR TRACK..."
    return None


def _data_lines(path: Path) -> list[tuple[int, str]]:
    if not path.is_file():
        return []
    return [(number, line) for number, line in _lines(path) if line and not line.startswith("#")]


def _all(kind: type[int] | type[float], fields: list[str]) -> bool:
    try:
        for text in fields:
            kind(text)
    except ValueError:
        return False
    return True
