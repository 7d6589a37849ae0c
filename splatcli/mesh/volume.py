"""A truncated signed distance of the surface, averaged over views, on the voxels near the surface.

Voxels come in blocks of 16^3, and only blocks that the surface passes through or near have any. A grid over the region
holds the number of each block. A voxel has the mean over the views of the distance along the optical axis to the
surface that the view shows at its pixel: positive in front, at most the truncation; a view tells nothing of a voxel
that lies farther behind. A pixel without a surface says that all in front of it is empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splatcli.mesh.cubes import triangulate
from splatcli.mesh.depth import project
from splatcli.mesh.surface import Mesh
from splatcli.scene.camera import Camera

#: Voxels along a side of a block.
SIDE = 16
#: Truncation in voxels: as far as that in front of and behind the surface a distance counts.
TRUNCATION = 6.0
#: Numbers in the grid of blocks without voxels: unknown or empty, and solid.
_NONE, _SOLID = -1, -2
#: Bytes of a block: distances, weights, and what the surface in it takes while triangles are made.
BLOCK_BYTES = SIDE**3 * (4 + 4) + 48 * 1024
#: Blocks along an axis at most.
_MOST_BLOCKS = 1 << 31
#: Blocks that are worked on at a time.
_AT_ONCE = 64
#: Views that have to see a voxel, where there are many.
_LEAST_VIEWS = 2


@dataclass(frozen=True, slots=True)
class Region:
    """A box in the world that blocks cover: its corner, the size of a voxel, and the number of blocks along each axis.

    Voxel i of an axis is the point low + i * voxel.
    """

    low: NDArray[np.float64]
    voxel: float
    blocks: tuple[int, int, int]

    @classmethod
    def around(cls, low: NDArray[np.float64], high: NDArray[np.float64], voxel: float) -> Region:
        """Return the region of whole blocks that holds a box and the truncation around it."""
        # As many as this take more memory than there is; an integer of more would overflow.
        blocks = np.ceil((high - low) / voxel / SIDE + 2 * TRUNCATION / SIDE).clip(1, _MOST_BLOCKS).astype(int)
        middle = (low + high) / 2
        return cls(middle - blocks * SIDE * voxel / 2, voxel, (int(blocks[0]), int(blocks[1]), int(blocks[2])))

    @property
    def grid_bytes(self) -> int:
        """Return the bytes of the grid of blocks and of the counts per block, which watertight meshes take."""
        x, y, z = self.blocks
        return 8 * (x + 1) * (y + 1) * (z + 1)

    def occupied(self, points: NDArray[np.float32]) -> NDArray[np.int64]:
        """Return [K, 3]: the blocks within the truncation of points [N, 3]."""
        found = np.zeros(self.blocks, bool)
        at = (points - self.low) / (self.voxel * SIDE)
        for corner in np.ndindex(2, 2, 2):
            block = np.floor(at + (np.array(corner) * 2 - 1) * TRUNCATION / SIDE).astype(np.int64)
            found[tuple(block[((block >= 0) & (block < self.blocks)).all(axis=1)].T)] = True
        return np.argwhere(found)


class Volume:
    """The distances in a region.

    blocks: [K, 3], those that have voxels. carved: count the views that see through the others, for closed meshes.
    """

    def __init__(self, region: Region, blocks: NDArray[np.int64], device: torch.device, *, carved: bool) -> None:
        self.region = region
        self.blocks = blocks
        self._grid = np.full(region.blocks, _NONE, np.int32)
        self._grid[tuple(blocks.T)] = np.arange(len(blocks))
        self._sums = torch.zeros(len(blocks), SIDE**3, device=device)
        self._weights = torch.zeros(len(blocks), SIDE**3, device=device)
        steps = torch.arange(SIDE, dtype=torch.float32, device=device) * region.voxel
        self._offsets = torch.stack(torch.meshgrid(steps, steps, steps, indexing="ij"), dim=-1).view(-1, 3)
        self._corners = self._place(blocks * SIDE).to(device)
        self._seen_through = np.zeros(region.blocks, np.int32) if carved else None
        self._views = 0

    def _place(self, lattice: NDArray[np.integer] | NDArray[np.floating]) -> Tensor:
        return torch.from_numpy(self.region.low + lattice * self.region.voxel).float()

    def integrate(self, depth: Tensor, camera: Camera) -> None:
        """Add a view. depth: [H, W] camera z of the surface, as of surface_depth()."""
        self._views += 1
        near = self._in_view(self._corners + self._offsets[-1] / 2, SIDE * 3**0.5 / 2 * self.region.voxel, camera)
        rotation = torch.from_numpy(camera.viewmat[:3, :3]).to(self._offsets)
        turned = self._offsets @ rotation.T
        shift = torch.from_numpy(camera.viewmat[:3, 3]).to(self._offsets)
        reach = TRUNCATION * self.region.voxel
        for chunk in torch.split(near, _AT_ONCE):
            local = (self._corners[chunk] @ rotation.T + shift)[:, None] + turned
            distance = _sampled(depth, camera, local.view(-1, 3)).view(len(chunk), SIDE**3)
            known = distance > -reach
            self._sums[chunk] += torch.where(known, (distance / reach).clamp(max=1.0), 0.0)
            self._weights[chunk] += known
        if self._seen_through is not None:
            self._carve(depth, camera, rotation, shift)

    def _carve(self, depth: Tensor, camera: Camera, rotation: Tensor, shift: Tensor) -> None:
        """Count the view for blocks whose middle it sees in front of the surface."""
        assert self._seen_through is not None
        counts = self._seen_through.reshape(-1)
        for begin in range(0, counts.size, _AT_ONCE * SIDE**3):
            part = np.arange(begin, min(begin + _AT_ONCE * SIDE**3, counts.size))
            block = np.stack(np.unravel_index(part, self.region.blocks), axis=1)
            middles = self._place(block * SIDE + (SIDE - 1) / 2).to(depth.device)
            counts[part] += (_sampled(depth, camera, middles @ rotation.T + shift) > 0).cpu().numpy()

    def _in_view(self, middles: Tensor, radius: float, camera: Camera) -> Tensor:
        """Return the numbers of the blocks whose ball of ``radius`` may show in the image."""
        u, v, front = project(middles, camera)
        matrix = torch.from_numpy(camera.viewmat[2]).to(middles)
        z = middles @ matrix[:3] + matrix[3]
        close = (z > -radius) & (z < 2 * radius)  # its image may be anywhere
        margin = radius / z.clamp(min=radius) * max(camera.fx, camera.fy) * 2
        inside = (u > -margin) & (v > -margin) & (u < camera.width + margin) & (v < camera.height + margin)
        return torch.nonzero(close | (front & inside))[:, 0]

    def mesh(self, *, watertight: bool) -> Mesh:
        """Return the surface.

        watertight: voxels that no view tells of are solid, and all outside of the region is empty.
        """
        unknown = 1.0 if watertight else np.nan
        values = self._values(watertight)
        if watertight:
            self._fill_blocks()
        keys: list[NDArray[np.int64]] = []
        places: list[NDArray[np.float64]] = []
        faces: list[NDArray[np.int64]] = []
        count = 0
        shape = [(n + 1) * SIDE + 1 for n in self.region.blocks]
        for blocks in self._mixed_blocks(watertight):
            edges, corners = triangulate(self._lattices(blocks, values, unknown))
            if not len(edges):
                continue
            start = blocks[edges[..., 0]] * SIDE + SIDE  # blocks begin at -1
            place = start + edges[..., 1:4]
            key = np.ravel_multi_index((*np.moveaxis(place, -1, 0), edges[..., 4]), (*shape, 3))
            found, first, index = np.unique(key, return_index=True, return_inverse=True)
            keys.append(found)
            places.append((corners + start).reshape(-1, 3)[first])
            faces.append(index.reshape(-1, 3) + count)
            count += len(found)
        if not count:
            return Mesh.empty()
        # A vertex on the border of two batches has one key and the same place in both.
        _, first, index = np.unique(np.concatenate(keys), return_index=True, return_inverse=True)
        vertices = np.concatenate(places)[first]
        return Mesh((vertices - SIDE) * self.region.voxel + self.region.low, index[np.concatenate(faces)])

    def _values(self, watertight: bool) -> NDArray[np.float32]:
        """Return [K + 1, 16, 16, 16] mean distances in truncations; the last block is unknown."""
        least = min(_LEAST_VIEWS, -(-self._views // 4))
        unseen = -1.0 if watertight else torch.nan
        known = self._weights >= least
        values = torch.where(known, self._sums / self._weights.clamp(min=1), unseen)
        return values.view(-1, SIDE, SIDE, SIDE).cpu().numpy()

    def _fill_blocks(self) -> None:
        """Make blocks without voxels solid where no view sees through."""
        assert self._seen_through is not None
        self._grid[(self._grid == _NONE) & (self._seen_through == 0)] = _SOLID

    def _mixed_blocks(self, watertight: bool) -> Iterator[NDArray[np.int64]]:
        """Yield batches [b, 3] of blocks whose cubes may hold surface; they begin at -1 where meshes are closed."""
        if not watertight:
            found = self.blocks
        else:
            padded = np.pad(self._grid, 1, constant_values=_NONE)
            parts = [
                padded[tuple(slice(o, n + 1 + o) for o, n in zip(offset, self.region.blocks, strict=True))]
                for offset in np.ndindex(2, 2, 2)
            ]
            first = parts[0]
            mixed = np.zeros(first.shape, bool)
            for part in parts:
                mixed |= (part >= 0) | (part != first)
            found = np.argwhere(mixed) - 1
        for begin in range(0, len(found), _AT_ONCE):
            yield found[begin : begin + _AT_ONCE]

    def _lattices(self, blocks: NDArray[np.int64], values: NDArray[np.float32], unknown: float) -> NDArray[np.float32]:
        """Return [b, 17, 17, 17]: the values of blocks and of the first voxels of the blocks that follow."""
        lattices = np.empty((len(blocks), SIDE + 1, SIDE + 1, SIDE + 1), np.float32)
        for offset in np.ndindex(2, 2, 2):
            at = blocks + offset
            inside = ((at >= 0) & (at < self.region.blocks)).all(axis=1)
            number = np.full(len(at), _NONE)
            number[inside] = self._grid[tuple(at[inside].T)]
            x, y, z = (slice(SIDE, None) if o else slice(SIDE) for o in offset)
            i, j, k = (slice(1) if o else slice(SIDE) for o in offset)
            part = np.where(number == _SOLID, np.float32(-1), np.float32(unknown))[:, None, None, None]
            has = number >= 0
            lattices[:, x, y, z] = part
            lattices[has, x, y, z] = values[number[has], i, j, k]
        return lattices


def _sampled(depth: Tensor, camera: Camera, local: Tensor) -> Tensor:
    """Return [N] the surface's camera z less that of points in the camera's frame, [N, 3].

    Infinite where the pixel shows no surface; -inf where the view tells nothing.
    """
    x, y, z = local.unbind(-1)
    ahead = z > camera.near
    safe = torch.where(ahead, z, 1.0)
    u = (x / safe * camera.fx + camera.cx).floor()
    v = (y / safe * camera.fy + camera.cy).floor()
    inside = ahead & (u >= 0) & (v >= 0) & (u < camera.width) & (v < camera.height)
    pixel = torch.where(inside, v * camera.width + u, 0.0).long()
    found = depth.view(-1)[pixel] - z
    return torch.where(inside & ~found.isnan(), found, -torch.inf)
