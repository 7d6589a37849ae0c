"""The sparse points of a COLMAP model: positions and colours, and on request the tracks that join them to photos.

pycolmap reads a million points in six seconds and 540 MB, and refuses a model whose tracks and photos contradict each
other, although few runs look at either. Here a million takes half a second, and no more are kept than are wanted.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splatcli.errors import SceneError
from splatcli.scene.colmap_audit import POINT, REMEDY, TRACK_LENGTH, Cursor
from splatcli.scene.colmap_text import data_lines, point_fault
from splatcli.scene.points import RawPoints, Tracks, stride

#: The beginning of a point's record: what is read of it.
_HEAD = np.dtype([("id", "<u8"), ("xyz", "<f8", 3), ("rgb", "u1", 3)])
#: A track is a list of photos, each with the number of an observation in it.
_TRACK_SIZE = 8
#: Columns of points3D.txt that are read: the same.
_COLUMNS = 7
#: Where the track begins, after the point's error.
_TRACK_COLUMN = 8


def read_points(path: Path, limit: int, *, with_tracks: bool = False) -> RawPoints | None:
    """The points of points3D.bin or .txt in the order of their ids; None when there are none.

    limit: at most so many, spread evenly over the file.
    with_tracks: also which photos see them.
    Raises SceneError, with the byte or the line, for a damaged file.
    """
    read = _read_binary if path.suffix == ".bin" else _read_text
    return read(path, limit, with_tracks)


def _read_binary(path: Path, limit: int, with_tracks: bool) -> RawPoints | None:
    heads, tracks = bytearray(), bytearray()
    lengths: list[int] = []
    with Cursor.over(path) as cursor:
        total = cursor.count(POINT.size, "points")
        step = stride(total, limit)
        length_of, before_length = TRACK_LENGTH.unpack_from, POINT.size - TRACK_LENGTH.size
        data, size, offset = cursor.data, len(cursor.data), cursor.offset
        for i in range(total):
            following = offset + POINT.size
            if following <= size:
                following += _TRACK_SIZE * length_of(data, offset + before_length)[0]
            if following > size:
                cursor.offset, cursor.record = offset, f"point {i + 1} of {total}"
                cursor.skip(following - offset)
            if i % step == 0:
                heads += data[offset : offset + _HEAD.itemsize]
                if with_tracks:
                    tracks += data[offset + POINT.size : following]
                    lengths.append((following - offset - POINT.size) // _TRACK_SIZE)
            offset = following
        cursor.offset = offset
        cursor.end()
    table = np.frombuffer(heads, dtype=_HEAD)
    photos = np.frombuffer(tracks, dtype="<u4")[::2].astype(np.int64)
    return _in_order(table["id"], table["xyz"], table["rgb"], path, total, photos, lengths)


def _read_text(path: Path, limit: int, with_tracks: bool) -> RawPoints | None:
    total = sum(1 for _ in data_lines(path))
    kept = islice(data_lines(path), 0, None, stride(total, limit))
    if total == 0:
        return None
    photos: list[NDArray[np.int64]] = []

    def columns() -> Iterator[str]:
        # Tracks can be much longer than the rest of a line.
        for _, line in kept:
            if with_tracks:
                photos.append(np.array(line.split()[_TRACK_COLUMN::2], dtype=np.int64))
            yield " ".join(line.split(maxsplit=_COLUMNS)[:_COLUMNS])

    try:
        table = np.loadtxt(columns(), dtype=np.float64, ndmin=2)
        if table.shape[1] != _COLUMNS:
            raise ValueError(f"{table.shape[1]} columns")
    except (ValueError, OverflowError) as error:
        raise point_fault(path) or SceneError(f"cannot be read: {error}", where=path, remedy=REMEDY) from None
    rgb = np.clip(np.nan_to_num(table[:, 4:]), 0, 255)
    numbers = np.concatenate(photos) if photos else np.zeros(0, np.int64)
    return _in_order(table[:, 0], table[:, 1:4], rgb, path, total, numbers, list(map(len, photos)))


def _in_order(
    ids: NDArray[Any],
    xyz: NDArray[np.float64],
    rgb: NDArray[Any],
    path: Path,
    total: int,
    photos: NDArray[np.int64],
    lengths: list[int],
) -> RawPoints | None:
    """photos: those of all tracks, one track after another, so long each as ``lengths`` says; empty without any."""
    if not total:
        return None
    order = np.argsort(ids, kind="stable")
    tracks = None
    if len(photos):
        rows = np.repeat(np.arange(len(order)), lengths)
        tracks = Tracks(photos, rows).moved(np.argsort(order, kind="stable"))
    return RawPoints(xyz[order], rgb[order].astype(np.uint8), path, total, tracks)
