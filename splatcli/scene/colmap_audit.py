"""Checks the binary files of a COLMAP model before pycolmap sees them.

pycolmap trusts counts: a file that ends early is read as whatever follows, asks for any amount of memory, or never
returns. The files are therefore walked record by record first, which touches headers and lengths only; what passes
can make pycolmap allocate no more than the file's own size.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from splatcli.errors import SceneError

#: Parameters of each camera model by COLMAP's model id.
MODEL_PARAMS = {
    **{0: 3, 1: 4, 2: 4, 3: 5, 4: 8, 5: 8, 6: 12, 7: 5, 8: 4, 9: 5},
    **{10: 12, 11: 16, 12: 4, 13: 5, 14: 3, 15: 4, 16: 6, 17: 2},
}
#: What to do about a camera model that nobody knows.
UNKNOWN_MODEL_REMEDY = "undistort the photos with `colmap image_undistorter`, which writes PINHOLE cameras"
#: Longest image name in bytes; longer ones mean that the file is not what it seems.
MAX_NAME = 4096

REMEDY = "copy the file again from where the model was made, or run COLMAP's mapper again"


@dataclass(slots=True)
class Cursor:
    """A position in a file that cannot leave it; ``record`` is where it stands, for messages."""

    path: Path
    data: mmap.mmap
    offset: int = 0
    record: str = field(default="header")

    @classmethod
    @contextmanager
    def over(cls, path: Path) -> Iterator[Cursor]:
        """A cursor at the start of a file. Raises SceneError for one too short to hold a count."""
        with path.open("rb") as file:
            if path.stat().st_size < _U64.size:
                raise SceneError(f"is only {path.stat().st_size} bytes long", where=path, remedy=REMEDY)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                yield cls(path, data)

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
                remedy=REMEDY,
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
                remedy=REMEDY,
            )
        return n

    def end(self) -> None:
        if self.offset != len(self.data):
            raise SceneError(
                f"has {len(self.data) - self.offset:,} bytes after its last record, at byte {self.offset:,}",
                where=self.path,
                remedy=REMEDY,
            )


_U64 = struct.Struct("<Q")
_CAMERA = struct.Struct("<IiQQ")
_IMAGE = struct.Struct("<I7dI")
POINT = struct.Struct("<Q3d3BdQ")
TRACK_LENGTH = _U64
_RIG = struct.Struct("<II")
_SENSOR = struct.Struct("<iI")
_FLAG = struct.Struct("<B")
_FRAME = struct.Struct("<II7dI")
_POSE_SIZE = 56
_OBSERVATION_SIZE = 24
_DATA_SIZE = 16


@dataclass(slots=True)
class _Ids:
    """The ids met so far, by kind of record."""

    cameras: set[int] = field(default_factory=set)
    images: set[int] = field(default_factory=set)


def _walk_cameras(cursor: Cursor, ids: _Ids) -> None:
    n = cursor.count(_CAMERA.size, "cameras")
    for i in range(n):
        cursor.record = f"camera {i + 1} of {n}"
        camera_id, model, _, _ = (int(value) for value in cursor.take(_CAMERA))
        if model not in MODEL_PARAMS:
            raise SceneError(
                f"camera {camera_id} has the unknown model id {model}", where=cursor.path, remedy=UNKNOWN_MODEL_REMEDY
            )
        if camera_id in ids.cameras:
            raise SceneError(f"camera {camera_id} is there twice", where=cursor.path, remedy=REMEDY)
        ids.cameras.add(camera_id)
        cursor.skip(8 * MODEL_PARAMS[model])


def _walk_images(cursor: Cursor, ids: _Ids) -> None:
    n = cursor.count(_IMAGE.size + 1 + _U64.size, "images")
    for i in range(n):
        cursor.record = f"image {i + 1} of {n}"
        values = cursor.take(_IMAGE)
        image_id, camera_id = int(values[0]), int(values[-1])
        if image_id in ids.images:
            raise SceneError(f"image {image_id} is there twice", where=cursor.path, remedy=REMEDY)
        ids.images.add(image_id)
        if camera_id not in ids.cameras:
            raise SceneError(
                f"image {image_id} wants camera {camera_id}, which is not in {cursor.path.with_stem('cameras').name}",
                where=cursor.path,
                remedy=REMEDY,
            )
        stop = cursor.data.find(b"\0", cursor.offset, cursor.offset + MAX_NAME)
        if stop < 0:
            raise SceneError(f"the name of {cursor.record} has no end", where=cursor.path, remedy=REMEDY)
        cursor.offset = stop + 1
        cursor.skip(_OBSERVATION_SIZE * cursor.count(_OBSERVATION_SIZE, "observations"))


def _walk_rigs(cursor: Cursor, _ids: _Ids) -> None:
    n = cursor.count(_RIG.size, "rigs")
    for i in range(n):
        cursor.record = f"rig {i + 1} of {n}"
        sensors = int(cursor.take(_RIG)[1])
        for j in range(sensors):
            cursor.skip(_SENSOR.size)
            if j > 0 and cursor.take(_FLAG)[0]:
                cursor.skip(_POSE_SIZE)


def _walk_frames(cursor: Cursor, _ids: _Ids) -> None:
    n = cursor.count(_FRAME.size, "frames")
    for i in range(n):
        cursor.record = f"frame {i + 1} of {n}"
        cursor.skip(_DATA_SIZE * int(cursor.take(_FRAME)[-1]))


_WALKS: dict[str, Callable[[Cursor, _Ids], None]] = {
    "cameras": _walk_cameras,
    "images": _walk_images,
    "rigs": _walk_rigs,
    "frames": _walk_frames,
}


def audit_binary(folder: Path) -> None:
    """Walks every .bin file of the model that pycolmap is to read.

    Raises SceneError with file, record and byte when a file is shorter or longer than its counts say, and with the id
    of a camera that is unknown, missing or there twice.
    """
    ids = _Ids()
    for kind, walk in _WALKS.items():
        path = folder / f"{kind}.bin"
        if path.is_file():
            with Cursor.over(path) as cursor:
                walk(cursor, ids)
                cursor.end()


def count_binary_images(path: Path) -> int:
    """The number of images that the header of images.bin claims."""
    with path.open("rb") as file:
        head = file.read(_U64.size)
    return int(_U64.unpack(head)[0]) if len(head) == _U64.size else 0
