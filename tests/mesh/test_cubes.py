"""Marching cubes: every case closes against its neighbours, and vertices lie where values are zero."""

from __future__ import annotations

import numpy as np

from splatcli.mesh.cubes import CORNERS, EDGES, triangle_table, triangulate


def test_a_case_crosses_the_edges_whose_corners_differ() -> None:
    table, counts = triangle_table()
    for case in range(256):
        crossed = {e for e, (c, axis) in enumerate(EDGES) if (case >> c & 1) != (case >> (c | 1 << axis) & 1)}
        assert set(table[case, : counts[case]].ravel().tolist()) == crossed
        assert (table[case, counts[case] :] == -1).all()


def test_one_negative_corner_is_cut_off_by_a_triangle_that_faces_away_from_it() -> None:
    for number, corner in enumerate(CORNERS):
        values = np.ones((1, 2, 2, 2), np.float32)
        values[(0, *corner)] = -3.0
        edges, triangles = triangulate(values)
        assert edges.shape == (1, 3, 5), number
        a, b, c = triangles[0]
        assert np.cross(b - a, c - a) @ (a - corner) > 0
        # -3 and 1 are zero at three quarters of the way.
        assert np.allclose(np.abs(triangles[0] - corner).sum(axis=1), 0.75)


def test_a_cube_with_an_unknown_corner_has_no_surface() -> None:
    values = np.linspace(-1, 1, 27, dtype=np.float32).reshape(1, 3, 3, 3)
    whole, _ = triangulate(values)
    values[0, 0, 0, 0] = np.nan
    part, _ = triangulate(values)
    assert 0 < len(part) <= len(whole)
    assert not (part[..., 1:4] == 0).all(axis=-1).any()
