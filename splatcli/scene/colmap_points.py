"""The sparse points of a COLMAP model: positions and colours only, without the tracks that join them to photos.

pycolmap reads a million points in six seconds and 540 MB, and refuses a model whose tracks and photos contradict each
other, although training looks at neither. Here a million takes half a second, and no more are kept than are wanted.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splatcli.errors import SceneError
from splatcli.scene.colmap_audit import POINT, REMEDY, TRACK_LENGTH, Cursor
from splatcli.scene.colmap_text import data_lines, point_fault
from splatcli.scene.points import RawPoints, stride

#: The beginning of a point's record: what is read of it.
_HEAD = np.dtype([("id", "<u8"), ("xyz", "<f8", 3), ("rgb", "u1", 3)])
_TRACK_SIZE = 8
#: Columns of points3D.txt that are read: the same.
_COLUMNS = 7


def read_points(path: Path, limit: int) -> RawPoints | None:
    """The points of points3D.bin or .txt in the order of their ids; None when there are none.

    limit: at most so many, spread evenly over the file.
    Raises SceneError, with the byte or the line, for a damaged file.
    """
    return _read_binary(path, limit) if path.suffix == ".bin" else _read_text(path, limit)


def _read_binary(path: Path, limit: int) -> RawPoints | None:
    heads = bytearray()
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
            offset = following
        cursor.offset = offset
        cursor.end()
    table = np.frombuffer(heads, dtype=_HEAD)
    return _in_order(table["id"], table["xyz"], table["rgb"], path, total)


def _read_text(path: Path, limit: int) -> RawPoints | None:
    total = sum(1 for _ in data_lines(path))
    kept = islice(data_lines(path), 0, None, stride(total, limit))
    if total == 0:
        return None
    try:
        # Tracks can be much longer than the rest of a line.
        columns = (" ".join(line.split(maxsplit=_COLUMNS)[:_COLUMNS]) for _, line in kept)
        table = np.loadtxt(columns, dtype=np.float64, ndmin=2)
        if table.shape[1] != _COLUMNS:
            raise ValueError(f"{table.shape[1]} columns")
    except ValueError as error:
        raise point_fault(path) or SceneError(f"cannot be read: {error}", where=path, remedy=REMEDY) from None
    return _in_order(table[:, 0], table[:, 1:4], np.clip(np.nan_to_num(table[:, 4:]), 0, 255), path, total)


def _in_order(
    ids: NDArray[Any], xyz: NDArray[np.float64], rgb: NDArray[Any], path: Path, total: int
) -> RawPoints | None:
    order = np.argsort(ids, kind="stable")
    return RawPoints(xyz[order], rgb[order].astype(np.uint8), path, total) if total else None
