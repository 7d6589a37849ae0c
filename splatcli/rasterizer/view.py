"""Views: cameras as the native side takes them, and how many tiles their images have."""

from __future__ import annotations

import ctypes

from torch import Tensor

from splatcli.native import abi
from splatcli.scene.camera import Camera

Z_NEAR = 0.01
Z_FAR = 1e10


def view_of(
    camera: Camera,
    *,
    sh_degree: int,
    antialiased: bool,
    with_depth: bool,
    viewmat: Tensor | None = None,
    z_range: tuple[float, float] = (Z_NEAR, Z_FAR),
) -> abi.View:
    """A camera for the native side; ``viewmat`` [4, 4] replaces the camera's pose.

    z_range: camera z, world units, between which a mean has to lie for its Gaussian to be seen.
    """
    pose = camera.viewmat if viewmat is None else viewmat.detach().cpu().double().numpy()
    return abi.View(
        width=camera.width,
        height=camera.height,
        sh_degree=sh_degree,
        antialiased=antialiased,
        with_depth=with_depth,
        line_begin=0,
        line_end=lines_of(camera.height),
        viewmat=(ctypes.c_double * 16)(*pose.reshape(16).tolist()),
        fx=camera.fx,
        fy=camera.fy,
        cx=camera.cx,
        cy=camera.cy,
        z_near=z_range[0],
        z_far=z_range[1],
    )


def lines_of(height: int) -> int:
    """Rows of tiles in an image of ``height`` pixels."""
    return -(-height // abi.TILE)


def tiles_of(view: abi.View) -> int:
    """Tiles of the whole image."""
    return -(-int(view.width) // abi.TILE) * lines_of(view.height)
