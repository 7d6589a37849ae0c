"""Marching cubes: the surface where values on a lattice change their sign, as triangles with shared vertices.

The table of the 256 cases is computed. On each face of a cube the crossings of its edges are joined to segments, by the
signs of the face's corners alone, so that two cubes join those of the face between them alike. The segments of a cube
form loops, and each loop is cut into triangles by diagonals that lie in no face. Every edge of the surface therefore
belongs to two triangles, but for where a cube has a corner without a value: there the surface has a border.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

Loop = tuple[int, ...]

#: Corner c of a cube is at (c & 1, c >> 1 & 1, c >> 2 & 1). An edge runs from its corner along its axis.
CORNERS = np.array([[c & 1, c >> 1 & 1, c >> 2 & 1] for c in range(8)])
EDGES = [(c, axis) for axis in range(3) for c in range(8) if not c >> axis & 1]
_NUMBER = {frozenset((c, c | 1 << axis)): e for e, (c, axis) in enumerate(EDGES)}
#: How near to a lattice point a vertex may be, in edges: vertices of different edges never coincide.
_NEAREST = 1e-3


@cache
def triangle_table() -> tuple[NDArray[np.int8], NDArray[np.int64]]:
    """Return ([256, T, 3], the three edges of each triangle of a case, -1 behind the last; [256] their number).

    Bit c of a case is set where the value of corner c is negative. Seen from the positive side a triangle turns
    counter-clockwise.
    """
    rows = [[t for loop in _loops(case) for t in _cut(loop)] for case in range(256)]
    counts = np.array([len(row) for row in rows])
    table = np.full((256, int(counts.max()), 3), -1, np.int8)
    for case, row in enumerate(rows):
        table[case, : len(row)] = np.array(row).reshape(-1, 3)
    return table, counts


def _faces() -> list[Loop]:
    """Return the corners of each face of the cube, counter-clockwise seen from outside."""
    faces = []
    for axis in range(3):
        u, v = 1 << (axis + 1) % 3, 1 << (axis + 2) % 3
        faces += [(0, v, u | v, u), tuple(c | 1 << axis for c in (0, u, u | v, v))]
    return faces


def _loops(case: int) -> list[Loop]:
    """Return the loops of crossed edges of a case. On a face whose corners alternate each negative one is cut off."""
    following = {}
    for face in _faces():
        inside = [bool(case >> corner & 1) for corner in face]
        for k in range(4):
            if inside[k] and not inside[(k + 1) % 4]:  # the walk leaves here the run that it entered last
                back = next(b for b in range(1, 4) if not inside[(k - b) % 4])
                leaves, enters = ((face[i % 4], face[(i + 1) % 4]) for i in (k, k - back))
                following[_NUMBER[frozenset(enters)]] = _NUMBER[frozenset(leaves)]
    loops = []
    while following:
        loop = [next(iter(following))]
        while (edge := following.pop(loop[-1])) != loop[0]:
            loop.append(edge)
        loops.append(tuple(loop))
    return loops


def _cut(loop: Loop) -> list[Loop]:
    """Return the triangles of a loop. No diagonal lies in a face, where that of a neighbour could coincide with it."""
    found = _cuts(loop)
    assert found is not None, loop
    return found


def _cuts(loop: Loop) -> list[Loop] | None:
    if len(loop) == 3:
        return [loop]
    first, last = loop[0], loop[-1]
    for k in range(1, len(loop) - 1):
        sides = [(first, loop[k], k > 1), (loop[k], last, k < len(loop) - 2)]
        if any(diagonal and _share_a_face(a, b) for a, b, diagonal in sides):
            continue
        parts = [_cuts(part) if len(part) > 2 else [] for part in (loop[: k + 1], loop[k:])]
        if all(part is not None for part in parts):
            return [(first, loop[k], last), *(t for part in parts for t in part or [])]
    return None


def _share_a_face(a: int, b: int) -> bool:
    corners = [{EDGES[e][0], EDGES[e][0] | 1 << EDGES[e][1]} for e in (a, b)]
    return any(corners[0] | corners[1] <= set(face) for face in _faces())


def triangulate(values: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the surface in cubes of lattices [B, S+1, S+1, S+1], NaN where a value is unknown.

    Returns ([T, 3, 5]: the lattice, x, y, z and axis of the edge of each corner of a triangle; [T, 3, 3] the corners in
    lattice units). Corners on one edge are equal to the last bit.
    """
    table, counts = triangle_table()
    size = values.shape[1] - 1
    case = np.zeros((len(values), size, size, size), np.uint8)
    known = np.ones(case.shape, bool)
    for c, (x, y, z) in enumerate(CORNERS):
        part = values[:, x : x + size, y : y + size, z : z + size]
        case |= (part < 0).astype(np.uint8) << np.uint8(c)
        known &= np.isfinite(part)
    cubes = np.argwhere(known & (case != 0) & (case != 255))
    cases = case[tuple(cubes.T)]
    cubes = np.repeat(cubes, counts[cases], axis=0)
    first = np.cumsum(counts[cases]) - counts[cases]
    place = np.arange(len(cubes)) - np.repeat(first, counts[cases])
    edges = np.array(EDGES)[table[np.repeat(cases, counts[cases]), place]]
    starts = cubes[:, None, 1:] + CORNERS[edges[..., 0]]
    axis = edges[..., 1]
    ends = starts + np.eye(3, dtype=np.int64)[axis]
    lattice = np.broadcast_to(cubes[:, None, 0], axis.shape)
    low, high = (values[(lattice, *np.moveaxis(p, -1, 0))].astype(np.float64) for p in (starts, ends))
    share = np.clip(low / (low - high), _NEAREST, 1 - _NEAREST)
    corners = starts + share[..., None] * (ends - starts)
    return np.concatenate([lattice[..., None], starts, axis[..., None]], axis=-1), corners
