"""Triangle meshes: components, normals, and colours from views."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components


@dataclass(frozen=True, slots=True, eq=False)
class Mesh:
    """Triangles with shared vertices, counter-clockwise seen from outside.

    vertices  [V, 3] float64, world
    faces     [T, 3] int64, numbers of vertices
    colours   [V, 3] float64, 0...1 in display space (sRGB); None before they are known
    """

    vertices: NDArray[np.float64]
    faces: NDArray[np.int64]
    colours: NDArray[np.float64] | None = None

    @classmethod
    def empty(cls) -> Mesh:
        """Return a mesh without triangles."""
        return cls(np.empty((0, 3)), np.empty((0, 3), np.int64))

    def normals(self) -> NDArray[np.float64]:
        """Return [V, 3] unit normals: the mean of those of the triangles around a vertex, weighted by area."""
        a, b, c = (self.vertices[self.faces[:, k]] for k in range(3))
        of_faces = np.cross(b - a, c - a)
        summed = np.zeros_like(self.vertices)
        for corner in self.faces.T:
            for axis in range(3):
                summed[:, axis] += np.bincount(corner, of_faces[:, axis], len(self.vertices))
        length = np.linalg.norm(summed, axis=1, keepdims=True)
        return np.where(length > 0, summed / np.maximum(length, 1e-300), [0.0, 0.0, 1.0])

    def open_edges(self) -> int:
        """Return the number of edges that do not belong to exactly two triangles, which run along them both ways."""
        ends = np.concatenate([self.faces[:, [k, (k + 1) % 3]] for k in range(3)])
        ways = np.where(ends[:, 0] < ends[:, 1], 1, -1)
        key = ends.min(axis=1) * len(self.vertices) + ends.max(axis=1)
        _, index, counts = np.unique(key, return_inverse=True, return_counts=True)
        balance = np.bincount(index, ways)
        return int(((counts != 2) | (balance != 0)).sum())

    def components(self) -> NDArray[np.int64]:
        """Return [T] the component of each triangle; 0 is the one with the most triangles, and so on."""
        ends = self.faces[:, [0, 1, 1, 2]].reshape(-1, 2)
        ones = np.ones(len(ends), np.int8)
        size = len(self.vertices)
        _, label = connected_components(coo_array((ones, (ends[:, 0], ends[:, 1])), shape=(size, size)), directed=False)
        of_faces: NDArray[np.int64] = label[self.faces[:, 0]].astype(np.int64)
        sizes = np.bincount(of_faces)
        rank = np.empty(len(sizes), np.int64)
        rank[np.argsort(-sizes, kind="stable")] = np.arange(len(sizes))
        ranked: NDArray[np.int64] = rank[of_faces]
        return ranked

    def only(self, kept: NDArray[np.bool_]) -> Mesh:
        """Return the mesh of some triangles, [T] bool, without vertices that none of them has."""
        faces = self.faces[kept]
        used = np.zeros(len(self.vertices), bool)
        used[faces] = True
        number = np.cumsum(used) - 1
        colours = None if self.colours is None else self.colours[used]
        return replace(self, vertices=self.vertices[used], faces=number[faces], colours=colours)


def largest_components(mesh: Mesh, count: int | None, share: float) -> tuple[Mesh, int, int]:
    """Return (the mesh of the largest components, how many they are, how many there were).

    count: how many to keep; None keeps those that have at least ``share`` of the triangles of the largest.
    """
    if not len(mesh.faces):
        return mesh, 0, 0
    component = mesh.components()
    sizes = np.bincount(component)
    keep = int((sizes >= share * sizes[0]).sum()) if count is None else min(count, len(sizes))
    return mesh.only(component < keep), keep, len(sizes)
