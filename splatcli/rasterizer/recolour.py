"""Recolouring: what a view's trained colours do between the rendered image and the loss, and its gradient.

The shape of the parameters tells which kind they are: an exposure [3, 4] (exposure.py), a bilateral grid [12, L, Y, X]
(bilateral_grid.py), or those of PPISP [36] (ppisp.py).
"""

from __future__ import annotations

from torch import Tensor

from splatcli.rasterizer.bilateral_grid import slice_grid, slice_grid_vjp
from splatcli.rasterizer.exposure import expose, expose_vjp
from splatcli.rasterizer.ppisp import ppisp, ppisp_vjp

_KINDS = {1: (ppisp, ppisp_vjp), 2: (expose, expose_vjp), 4: (slice_grid, slice_grid_vjp)}


def recolour(image: Tensor, colours: Tensor, out: Tensor) -> Tensor:
    """Fill ``out`` [H, W, 3] with the colours of image after the trained ``colours`` of its view; return it."""
    return _KINDS[colours.dim()][0](image, colours, out)


def recolour_vjp(image: Tensor, colours: Tensor, v_out: Tensor, v_image: Tensor, v_colours: Tensor) -> None:
    """Fill v_image [H, W, 3] and v_colours, shaped as colours, from the gradient of recolour(), v_out [H, W, 3]."""
    _KINDS[colours.dim()][1](image, colours, v_out, v_image, v_colours)
