"""Exposure: a map of a view's colours between the rendered image and the loss, and its gradient; one map, or a grid."""

from __future__ import annotations

from torch import Tensor

from splatcli.rasterizer.bilateral_grid import slice_grid, slice_grid_vjp
from splatcli.reproducible import tree_sum


def recolour(image: Tensor, colours: Tensor, out: Tensor) -> Tensor:
    """Fill ``out`` [H, W, 3] with the colours of image after an exposure [3, 4] or a grid [12, L, Y, X]; return it."""
    return (expose if colours.dim() == 2 else slice_grid)(image, colours, out)


def recolour_vjp(image: Tensor, colours: Tensor, v_out: Tensor, v_image: Tensor, v_colours: Tensor) -> None:
    """Fill v_image [H, W, 3] and v_colours, shaped as colours, from the gradient of recolour(), v_out [H, W, 3]."""
    (expose_vjp if colours.dim() == 2 else slice_grid_vjp)(image, colours, v_out, v_image, v_colours)


def expose(image: Tensor, exposure: Tensor, out: Tensor) -> Tensor:
    """Fill ``out`` [H, W, 3] with A c + b for each colour c of image; exposure [3, 4] is (A, b). Return it."""
    matrix, shift = _parts(exposure, image)
    out.copy_((_mapped(matrix, _planes(image)) + shift).movedim(0, 2))
    return out


def expose_vjp(image: Tensor, exposure: Tensor, v_out: Tensor, v_image: Tensor, v_exposure: Tensor) -> None:
    """Fill v_image [H, W, 3] and v_exposure [3, 4] from the gradient of the exposed image, v_out [H, W, 3].

    image: before the exposure. The bits depend neither on threads nor on the instruction set, unlike those of torch's
    matrix products.
    """
    matrix, _ = _parts(exposure, image)
    colours, v_planes = _planes(image), _planes(v_out)
    v_image.copy_(_mapped(matrix.T, v_planes).movedim(0, 2))
    for v_plane, v_row in zip(v_planes, v_exposure, strict=True):
        v_row[:3] = tree_sum((colours * v_plane).flatten(1))
        v_row[3] = tree_sum(v_plane.flatten())


def _planes(image: Tensor) -> Tensor:
    """Return [3, H, W]: torch is slow where the innermost dimension of a broadcast has three numbers."""
    return image.movedim(2, 0).contiguous()


def _mapped(matrix: Tensor, planes: Tensor) -> Tensor:
    """Return [3, H, W] the product of matrix [3, 3] with each colour of planes [3, H, W]."""
    columns = matrix.T[:, :, None, None]
    return columns[0] * planes[0] + columns[1] * planes[1] + columns[2] * planes[2]


def _parts(exposure: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
    exposure = exposure.to(image)
    return exposure[:, :3], exposure[:, 3, None, None]
