"""Recolouring: what a view's trained colours do between the rendered image and the loss, and its gradient.

The shape of the parameters tells which kind they are: an exposure [3, 4] (exposure.py), a bilateral grid [12, L, Y, X]
(bilateral_grid.py), or those of PPISP [36] (ppisp.py).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from splatcli.rasterizer.bilateral_grid import slice_grid, slice_grid_vjp
from splatcli.rasterizer.exposure import expose, expose_vjp
from splatcli.rasterizer.ppisp import CAMERA_NUMBERS, VIEW_NUMBERS, ppisp, ppisp_vjp

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
