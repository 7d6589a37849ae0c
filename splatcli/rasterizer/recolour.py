"""Recolouring: a view's trained map of colours, between the rendered image and the loss, and its gradient.

The shape of the parameters tells which kind they are: an exposure [3, 4], an affine map of colours; a bilateral grid
[12, L, Y, X] (bilateral_grid.py); or those of PPISP [36] (ppisp.py).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from splatcli.rasterizer.bilateral_grid import slice_grid, slice_grid_vjp
from splatcli.rasterizer.colour_planes import colour_planes, mapped
from splatcli.rasterizer.ppisp import CAMERA_NUMBERS, VIEW_NUMBERS, ppisp, ppisp_vjp
from splatcli.reproducible import tree_sum

#: A map of an image's colours, and its gradient.
Map = tuple[Callable[[Tensor, Tensor, Tensor], Tensor], Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]]


def recolour(image: Tensor, colours: Tensor, out: Tensor) -> Tensor:
    """Fill ``out`` [H, W, 3] with the colours of image after the trained ``colours`` of its view; return it."""
    return _map_of(colours)[0](image, colours, out)


def recolour_vjp(image: Tensor, colours: Tensor, v_out: Tensor, v_image: Tensor, v_colours: Tensor) -> None:
    """Fill v_image [H, W, 3] and v_colours, shaped as colours, from the gradient of recolour(), v_out [H, W, 3]."""
    _map_of(colours)[1](image, colours, v_out, v_image, v_colours)


def _map_of(colours: Tensor) -> Map:
    """Return the map that has parameters of this shape. Raises ValueError where none has."""
    if colours.shape == (VIEW_NUMBERS + CAMERA_NUMBERS,):
        return ppisp, ppisp_vjp
    if colours.shape == (3, 4):
        return expose, expose_vjp
    if colours.dim() == 4 and len(colours) == 12:
        return slice_grid, slice_grid_vjp
    raise ValueError(f"no map of colours has parameters of shape {tuple(colours.shape)}")


def expose(image: Tensor, exposure: Tensor, out: Tensor) -> Tensor:
    """Fill ``out`` [H, W, 3] with A c + b for each colour c of image; exposure [3, 4] is (A, b). Return it."""
    matrix, shift = _parts(exposure, image)
    out.copy_((mapped(matrix, colour_planes(image)) + shift).movedim(0, 2))
    return out


def expose_vjp(image: Tensor, exposure: Tensor, v_out: Tensor, v_image: Tensor, v_exposure: Tensor) -> None:
    """Fill v_image [H, W, 3] and v_exposure [3, 4] from the gradient of the exposed image, v_out [H, W, 3].

    image: before the exposure. The bits depend neither on threads nor on the instruction set, unlike those of torch's
    matrix products.
    """
    matrix, _ = _parts(exposure, image)
    colours, v_planes = colour_planes(image), colour_planes(v_out)
    v_image.copy_(mapped(matrix.T, v_planes).movedim(0, 2))
    for v_plane, v_row in zip(v_planes, v_exposure, strict=True):
        v_row[:3] = tree_sum((colours * v_plane).flatten(1))
        v_row[3] = tree_sum(v_plane.flatten())


def _parts(exposure: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
    exposure = exposure.to(image)
    return exposure[:, :3], exposure[:, 3, None, None]
