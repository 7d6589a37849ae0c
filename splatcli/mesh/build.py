"""From Gaussians and cameras to a mesh: survey, fusion, extraction, colours.

The survey renders the views small and finds the region and the blocks that the surface passes through, so that the
memory is known before the work begins. Views are rendered no finer than a voxel needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial import cKDTree
from torch import Tensor

from splatcli.errors import ResourceError, UsageError
from splatcli.gaussians import Gaussians
from splatcli.mesh.depth import COVERED, camera_z, points_of, project, surface_depth
from splatcli.mesh.surface import Mesh, largest_components
from splatcli.mesh.volume import BLOCK_BYTES, TRUNCATION, Region, Volume
from splatcli.progress import track
from splatcli.rasterizer.memory_budget import free_memory
from splatcli.render.images import ModelRenderer, RenderSettings
from splatcli.scene.camera import Camera
from splatcli.sizes import gib

#: Pixels of the longer side in the survey, and points of it in all.
_SURVEY_SIDE, _SURVEY_POINTS = 192, 1_000_000
#: Surfaces farther than so many times the median depth do not count by default: sky and distant hills.
_FARTHEST = 3.0
#: Percentiles of the surface's points between which the region lies, and the margin, as a share of its sides.
_INSIDE, _MARGIN = (1.0, 99.0), 0.03
#: Pixels that a voxel is worth where the surface is near, and percentile of depth that is near.
_PIXELS, _NEAR = 2.0, 20.0
#: Share of the free memory that a volume may take.
_SHARE = 0.8
#: The factor between the voxels that are tried for one that fits.
_COARSER = 1.25
_GREY = 0.5
#: Voxels along the longest side of the region by default.
RESOLUTION = 256


@dataclass(frozen=True, slots=True)
class MeshOptions:
    """How a mesh is made.

    voxel: scene units; None divides the longest side of the region by ``resolution``.
    max_depth: camera z, scene units, beyond which nothing counts; None is _FARTHEST times the median depth.
    components, least_share: as of largest_components().
    """

    voxel: float | None = None
    resolution: int = RESOLUTION
    max_depth: float | None = None
    watertight: bool = False
    components: int | None = None
    least_share: float = 0.01


@dataclass(frozen=True, slots=True)
class Made:
    """A mesh and how it was made. kept, found: components."""

    mesh: Mesh
    region: Region
    max_depth: float
    blocks: int
    kept: int
    found: int


def build_mesh(gaussians: Gaussians, cameras: Sequence[Camera], settings: RenderSettings, options: MeshOptions) -> Made:
    """Return the mesh of what the cameras see.

    settings: of renders; the colours of the mesh are means over the views.
    Raises UsageError when the views show no surface, ResourceError when the voxels do not fit into the memory.
    """
    cameras = [camera.as_pinhole() for camera in cameras]
    points, max_depth, near = _survey(gaussians, cameras, settings, options.max_depth)
    region, blocks = _region(points, options, gaussians.device)
    volume = Volume(region, blocks, gaussians.device, carved=options.watertight)
    sized = [_sized(camera, near, region.voxel) for camera in cameras]
    for camera in track(sized, "fusing depths"):
        volume.integrate(_depth(gaussians, camera, settings, max_depth), camera)
    mesh, kept, found = largest_components(
        volume.mesh(watertight=options.watertight), options.components, options.least_share
    )
    del volume
    if not len(mesh.faces):
        raise UsageError(
            "the views agree on no surface", where="--voxel", remedy="choose smaller voxels, or more views with --views"
        )
    mesh = _coloured(mesh, gaussians, sized, settings, TRUNCATION * region.voxel)
    return Made(mesh, region, max_depth, len(blocks), kept, found)


def _depth(gaussians: Gaussians, camera: Camera, settings: RenderSettings, max_depth: float) -> Tensor:
    depth = surface_depth(gaussians, camera, antialiased=settings.antialiased)
    depth[depth > max_depth] = torch.inf
    return depth


def _survey(
    gaussians: Gaussians, cameras: Sequence[Camera], settings: RenderSettings, max_depth: float | None
) -> tuple[NDArray[np.float32], float, float]:
    """Return ([N, 3] points of the surface, the depth beyond which nothing counts, the depth of near surfaces)."""
    depths, points = [], []
    most = _SURVEY_POINTS // len(cameras) + 1
    for camera in track(cameras, "looking for surfaces"):
        small = camera.scaled(min(1.0, _SURVEY_SIDE / max(camera.width, camera.height)))
        depth = surface_depth(gaussians, small, antialiased=settings.antialiased)
        step = -(-depth.numel() // most)
        depths.append(depth[torch.isfinite(depth)][::step].cpu().numpy())
        points.append(points_of(depth, small)[::step].cpu().numpy())
    depth_of, found = np.concatenate(depths), np.concatenate(points)
    if not len(found):
        raise UsageError(
            "the views show no surface: nothing in them is as opaque as one half",
            where="--views",
            remedy="name views that see the model; `splat render --what rgb,depth` shows what they see",
        )
    farthest = _FARTHEST * float(np.median(depth_of)) if max_depth is None else max_depth
    kept = depth_of <= farthest
    if not kept.any():
        raise UsageError(
            f"no surface is nearer; the nearest is at {depth_of.min():.4g}",
            where="--max-depth",
            remedy=f"--max-depth {np.median(depth_of):.3g} is the median depth",
        )
    return found[kept], farthest, float(np.percentile(depth_of[kept], _NEAR))


def _region(
    points: NDArray[np.float32], options: MeshOptions, device: torch.device
) -> tuple[Region, NDArray[np.int64]]:
    """Return the region of the points and its blocks with surface. Raises ResourceError."""
    low, high = np.percentile(points.astype(np.float64), _INSIDE, axis=0)
    margin = _MARGIN * float((high - low).max())
    low, high = low - margin, high + margin
    longest = max(float((high - low).max()), 1e-6 * float(np.abs(points).max()))
    voxel = options.voxel or longest / options.resolution
    allowed = int(_SHARE * free_memory(device))
    region = Region.around(low, high, voxel)
    if (need := region.grid_bytes) <= allowed:
        blocks = region.occupied(points)
        if (need := need + len(blocks) * BLOCK_BYTES) <= allowed:
            return region, blocks
    fits = _fitting(low, high, voxel, points, allowed)
    raise ResourceError(
        f"voxels of {voxel:.3g} in a region of {' x '.join(f'{side:.4g}' for side in high - low)} take more than "
        f"{gib(need)}; {gib(allowed)} are free for them",
        where="--voxel" if options.voxel else "--resolution",
        remedy=f"--voxel {_rounded_up(fits)} fits; or keep a part with --crop",
    )


def _fitting(
    low: NDArray[np.float64], high: NDArray[np.float64], voxel: float, points: NDArray[np.float32], allowed: int
) -> float:
    """Return a larger voxel that takes half of the memory allowed: blocks grow with the area of the surface."""
    usual = Region.around(low, high, float((high - low).max()) / RESOLUTION)
    area = len(usual.occupied(points)) * usual.voxel**2
    while True:
        voxel *= _COARSER
        if Region.around(low, high, voxel).grid_bytes + area / voxel**2 * BLOCK_BYTES <= allowed / 2:
            return voxel


def _rounded_up(value: float) -> str:
    """Return a number of two digits that is not smaller."""
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{math.ceil(value / step) * step:.2g}"


def _sized(camera: Camera, near: float, voxel: float) -> Camera:
    """Return the camera at the size at which a voxel takes _PIXELS at the depth ``near``, or as it is if smaller."""
    return camera.scaled(min(1.0, _PIXELS * near / (voxel * max(camera.fx, camera.fy))))


def _coloured(
    mesh: Mesh, gaussians: Gaussians, cameras: Sequence[Camera], settings: RenderSettings, tolerance: float
) -> Mesh:
    """Return the mesh with the mean colours of the views that see a vertex, near and frontal ones before others.

    A vertex that none sees has the colour of the nearest that one sees. tolerance: of the depth, scene units.
    """
    vertices, normals = torch.from_numpy(mesh.vertices).float(), torch.from_numpy(mesh.normals()).float()
    # Over black, colours are those of the surface times alpha; a background would show through its edges.
    renderer = ModelRenderer(gaussians, replace(settings, background=(0.0, 0.0, 0.0), recolour=None))
    summed, weights = torch.zeros(len(vertices), 3), torch.zeros(len(vertices))
    for camera in track(cameras, "colouring"):
        maps = renderer.render_maps(camera)
        rgb = maps.rgb / torch.from_numpy(maps.alpha).to(maps.rgb).clamp(min=COVERED)[..., None]
        rgb = (rgb if settings.recolour is None else settings.recolour(camera, rgb)).cpu()
        u, v, front = project(vertices, camera)
        inside = front & (u >= 0) & (v >= 0) & (u < camera.width) & (v < camera.height)
        rows = torch.nonzero(inside)[:, 0]
        pixel = v[rows].long() * camera.width + u[rows].long()
        ray = vertices[rows] - torch.from_numpy(camera.center).float()
        distance = ray.norm(dim=1)
        facing = -(ray * normals[rows]).sum(dim=1) / distance
        hit = (torch.from_numpy(maps.depth).view(-1)[pixel] - camera_z(vertices[rows], camera)).abs() < tolerance
        hit &= torch.from_numpy(maps.alpha).view(-1)[pixel] >= COVERED
        weight = torch.where(hit, facing.clamp(min=0) / distance.square(), 0.0)
        summed[rows] += weight[:, None] * rgb.view(-1, 3)[pixel]
        weights[rows] += weight
    seen = (weights > 0).numpy()
    colours = (summed / weights.clamp(min=1e-30)[:, None]).clamp(0, 1).double().numpy()
    if not seen.any():
        colours[:] = _GREY
    elif not seen.all():
        _, nearest = cKDTree(mesh.vertices[seen]).query(mesh.vertices[~seen])
        colours[~seen] = colours[seen][nearest]
    return replace(mesh, colours=colours)
