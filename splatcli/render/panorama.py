"""Equirectangular panoramas of a model: the faces of a cube, rendered by pinholes and blended where they overlap."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from splatcli.errors import UsageError
from splatcli.scene.camera import Camera

if TYPE_CHECKING:
    from splatcli.render.images import RenderedMaps

#: Pixels across, at most, unless a size is given.
MAX_WIDTH = 8192
#: Pixels of a face for each of the panorama in its middle, where a face is coarsest.
_FINER = 1.5
#: Tangents of the angles from a face's axis where its share begins to fall, and where it ends: 40 and 50 degrees.
_INNER, _OUTER = math.tan(math.radians(40.0)), math.tan(math.radians(50.0))
#: Pixels of the panorama that are filled at a time.
_CHUNK = 1 << 20
#: From OpenCV's axes to OpenGL's, which normals have, and back.
_OPENGL = torch.tensor([1.0, -1.0, -1.0])


@dataclass(frozen=True, slots=True, eq=False)
class Panorama(Camera):
    """A camera that sees all around: column and row are longitude and latitude, as COLMAP's EQUIRECTANGULAR.

    The middle of the image is the direction of the optical axis. The focal lengths are pixels a radian in the middle.
    """


def panorama_of(camera: Camera, size: tuple[int, int] | None) -> Panorama:
    """Return the panorama of a view's position, as fine as the view in its middle, at most MAX_WIDTH pixels wide.

    size: width and height, where they are given. Raises UsageError where they are not two to one, and for orthographic
    cameras.
    """
    if camera.model == "ortho":
        raise UsageError(
            "the views are ortho cameras, which have no position", where="--projection", remedy="leave it out"
        )
    camera = camera.as_pinhole()
    height = min(max(1, round(math.pi * camera.fx)), MAX_WIDTH // 2)
    width, height = size or (2 * height, height)
    if width != 2 * height:
        raise UsageError(
            f"a panorama is twice as wide as high, and {width}x{height} is not",
            where="--size",
            remedy=f"--size {2 * height}x{height}",
        )
    focal = width / (2 * math.pi)
    return Panorama(camera.name, width, height, focal, focal, width / 2, height / 2, camera.viewmat, camera.near)


def render_panorama(panorama: Panorama, render_face: Callable[[Camera], RenderedMaps]) -> RenderedMaps:
    """Return the maps of a panorama. Depth is the distance from its position; normals are in its camera frame.

    render_face: renders a pinhole.
    """
    height, width = panorama.height, panorama.width
    rgb, normals = torch.zeros(height, width, 3), None
    alpha, shares = torch.zeros(height, width), torch.zeros(height, width)
    depth, largest = torch.full((height, width), math.inf), torch.zeros(height, width)
    focal = _FINER * panorama.fx
    side = 2 * math.ceil(_OUTER * focal)
    for turn in _turns():
        pose = np.eye(4)
        pose[:3, :3] = turn.numpy().astype(np.float64)
        lens = Camera(panorama.name, side, side, focal, focal, side / 2, side / 2, pose @ panorama.viewmat)
        maps = render_face(replace(lens, near=panorama.near))
        layers = [maps.rgb.cpu(), torch.from_numpy(maps.alpha)[..., None]]
        if maps.normals is not None:
            normals = torch.zeros(height, width, 3) if normals is None else normals
            layers.append(torch.from_numpy(maps.normals) * _OPENGL @ turn * _OPENGL)
        smooth = torch.cat(layers, dim=-1).permute(2, 0, 1)[None]
        far = torch.from_numpy(maps.depth)[None, None]
        rows = max(1, _CHUNK // width)
        for top in range(0, height, rows):
            here = slice(top, min(height, top + rows))
            x, y, z = (_rays(panorama, here) @ turn.T).unbind(-1)
            off = torch.maximum(x.abs(), y.abs())
            share = torch.where(z > 0, ((_OUTER - off / z) / (_OUTER - _INNER)).clamp(0.0, 1.0), 0.0)
            seen = share > 0
            if not bool(seen.any()):
                continue
            x, y, z, part = x[seen], y[seen], z[seen], share[seen]
            grid = (2 * focal / side * torch.stack([x / z, y / z], dim=-1))[None, None]
            found = torch.nn.functional.grid_sample(smooth, grid, align_corners=False, padding_mode="border")[0, :, 0]
            found = found.T * part[:, None]
            rgb[here][seen] += found[:, :3]
            alpha[here][seen] += found[:, 3]
            if normals is not None:
                normals[here][seen] += found[:, 4:]
            shares[here] += share
            nearer = share > largest[here]
            across = torch.nn.functional.grid_sample(
                far, grid, mode="nearest", align_corners=False, padding_mode="border"
            )[0, 0, 0]
            distances = torch.full_like(share, math.inf)
            distances[seen] = across / z  # rays have length 1
            depth[here] = torch.where(nearer, distances, depth[here])
            largest[here] = torch.where(nearer, share, largest[here])
    if normals is not None:
        length = normals.norm(dim=-1, keepdim=True)
        normals = torch.where(length > 1e-4, normals / length.clamp(min=1e-4), 0.0)
    return replace(
        maps,
        rgb=rgb / shares[..., None],
        alpha=(alpha / shares).numpy(),
        depth=depth.numpy(),
        normals=None if normals is None else normals.numpy(),
    )


def _turns() -> list[Tensor]:
    """Return [3, 3] from the panorama's camera frame to that of each face: ahead, right, behind, left, up, down."""
    made = []
    for yaw, pitch in ((0, 0), (90, 0), (180, 0), (270, 0), (0, 90), (0, -90)):
        cos_yaw, sin_yaw = round(math.cos(math.radians(yaw))), round(math.sin(math.radians(yaw)))
        cos_pitch, sin_pitch = round(math.cos(math.radians(pitch))), round(math.sin(math.radians(pitch)))
        about_y = torch.tensor([[cos_yaw, 0, -sin_yaw], [0, 1, 0], [sin_yaw, 0, cos_yaw]])
        about_x = torch.tensor([[1, 0, 0], [0, cos_pitch, sin_pitch], [0, -sin_pitch, cos_pitch]])
        made.append((about_x @ about_y).float())
    return made


def _rays(panorama: Panorama, rows: slice) -> Tensor:
    """Return [rows, W, 3], unit rays through the centres of pixels, in the panorama's camera frame."""
    east = (torch.arange(panorama.width) + 0.5 - panorama.cx) / panorama.fx
    down = (torch.arange(rows.start, rows.stop) + 0.5 - panorama.cy) / panorama.fy
    down, east = torch.meshgrid(down, east, indexing="ij")
    return torch.stack([down.cos() * east.sin(), down.sin(), down.cos() * east.cos()], dim=-1)
