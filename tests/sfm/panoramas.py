"""Panoramas of the textured corner, cast ray by ray from known places, each turned about the vertical."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tests.sfm import corner

WIDTH, HEIGHT = 768, 384
COUNT = 4


def pose(index: int) -> NDArray[np.float64]:
    """[4, 4] world to camera, OpenCV axes, z of the world up."""
    yaw = np.radians(200 + 37 * index)
    forward = np.array([np.cos(yaw), np.sin(yaw), 0.0])
    right = np.array([np.sin(yaw), -np.cos(yaw), 0.0])
    center = np.array([1.1 + 0.22 * index, 1.9 - 0.2 * index, 1.0 + 0.12 * (index % 2)])
    made = np.eye(4)
    made[:3, :3] = np.stack([right, [0.0, 0.0, -1.0], forward])
    made[:3, 3] = -made[:3, :3] @ center
    return made


def image(index: int) -> NDArray[np.uint8]:
    """[HEIGHT, WIDTH, 3]: longitude to the right about the forward direction, latitude down."""
    east = ((np.arange(WIDTH) + 0.5) / WIDTH - 0.5) * 2 * np.pi
    down = ((np.arange(HEIGHT) + 0.5) / HEIGHT - 0.5) * np.pi
    east, down = np.meshgrid(east, down)
    rays = np.stack([np.cos(down) * np.sin(east), np.sin(down), np.cos(down) * np.cos(east)], axis=-1)
    matrix = pose(index)
    center = -matrix[:3, :3].T @ matrix[:3, 3]
    rays = rays @ matrix[:3, :3]
    # A room: the corner's walls, and the same again on the other sides, 4 m away.
    with np.errstate(divide="ignore"):
        depth = np.where(rays < 0, -center / rays, (4.0 - center) / rays)
    wall = depth.argmin(axis=-1)
    far = np.take_along_axis(rays, wall[..., None], axis=-1)[..., 0] > 0
    hit = center + depth.min(axis=-1, keepdims=True) * rays
    picture = np.zeros(hit.shape)
    for axis in range(3):
        at = np.delete(hit, axis, axis=-1)
        for side in (False, True):
            mine = (wall == axis) & (far == side)
            # The other sides have their textures turned, so that they do not look like those opposite.
            place = at[mine][:, ::-1] + 0.37 if side else at[mine]
            picture[mine] = corner.lookup(corner.texture((axis + side) % 3), place / corner._SIDE * corner._TEXELS)
    return np.round(picture).astype(np.uint8)


XMP = b"""<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
<rdf:Description xmlns:GPano="http://ns.google.com/photos/1.0/panorama/" GPano:ProjectionType="equirectangular"/>
</rdf:RDF></x:xmpmeta>"""


def write_panoramas(folder: Path, *, xmp: bool = True) -> None:
    folder.mkdir()
    for index in range(COUNT):
        more = {"xmp": XMP} if xmp else {}
        Image.fromarray(image(index)).save(folder / f"p{index}.jpg", quality=95, **more)
