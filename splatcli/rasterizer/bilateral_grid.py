"""Bilateral grid: an affine map of colours that varies with place and brightness, before the loss; and its gradient.

A grid [12, L, Y, X] holds an affine map (A, b) of colours, row by row, at each of L levels of brightness and Y x X
places of the image, its corners included. A pixel has the map that lies between the eight nearest, by its place and by
the luminance of its rendered colour (Wang et al. 2024, docs/math.md 8.5).

torch's ``grid_sample`` does the same, on one thread, and on a GPU adds gradients in an order that is never the same.
Here lines of pixels are cut where columns of the grid stand, so that the maps of a piece are a small matrix product:
the maps at both its ends, at all levels, times the weights that its pixels give them. Sums have one order for any
number of threads, but the library of matrix products may choose another on another instruction set.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from splatcli.rasterizer.colour_planes import constant, row_bands

#: Brightness is Rec. 601 luma of the rendered colour, as in the original.
LUMA = (0.299, 0.587, 0.114)

#: Pixels that are processed at once, at about BAND_BYTES each beside the images; a GPU needs more work than a CPU.
AT_A_TIME = {"cpu": 1 << 15, "cuda": 1 << 19}
BAND_BYTES = 400


def identity_grid(levels: int, rows: int, columns: int) -> Tensor:
    """Return [12, L, Y, X] float32 that changes no colour."""
    return torch.eye(3, 4).reshape(12, 1, 1, 1).repeat(1, levels, rows, columns)


def slice_grid(image: Tensor, grid: Tensor, out: Tensor) -> Tensor:
    """Fill ``out`` [H, W, 3] with A c + b for each colour c of image, by the pixel's map (A, b). Return it."""
    cut = _cut(image, grid)
    with torch.autocast(image.device.type, enabled=False):
        maps = cut.maps(grid)
        for lines in row_bands(image, AT_A_TIME):
            colours = cut.pieces(image[lines])
            affine = _between(maps[lines], cut.weights(colours))
            out[lines] = cut.joined(_mapped(affine, colours))
    return out


def slice_grid_vjp(image: Tensor, grid: Tensor, v_out: Tensor, v_image: Tensor, v_grid: Tensor) -> None:
    """Fill v_image [H, W, 3] and v_grid, shaped as grid, from the gradient of slice_grid()'s result, v_out."""
    cut = _cut(image, grid)
    with torch.autocast(image.device.type, enabled=False):
        maps = cut.maps(grid)
        v_maps = torch.empty_like(maps)
        for lines in row_bands(image, AT_A_TIME):
            colours, v_colours = cut.pieces(image[lines]), cut.pieces(v_out[lines])
            weights, slopes = cut.weights(colours), cut.slopes(colours)
            affine = _between(maps[lines], weights)
            v_affine = _v_affine(v_colours, colours)
            v_maps[lines] = torch.bmm(v_affine.flatten(0, 1), weights.flatten(0, 1).mT).view_as(v_maps[lines])
            v_weights = torch.bmm(maps[lines].flatten(0, 1).mT, v_affine.flatten(0, 1)).view_as(slopes)
            v_luma = (v_weights * slopes).sum(dim=2)
            through = (_rows(affine)[:, :, :, :3] * v_colours.unsqueeze(3)).sum(dim=2)
            through += v_luma.unsqueeze(2) * constant(LUMA, image)[:, None]
            v_image[lines] = cut.joined(through)
        v_grid.copy_(cut.maps_vjp(v_maps))


def variation_gradient(grid: Tensor) -> Tensor:
    """Return the gradient of a grid's total variation: the sum over axes of mean squared differences of neighbours."""
    gradient = torch.zeros_like(grid)
    for axis in (1, 2, 3):
        length = grid.shape[axis] - 1
        if length < 1:
            continue
        step = grid.diff(dim=axis)
        step *= 2.0 / step.numel()
        gradient.narrow(axis, 1, length).add_(step)
        gradient.narrow(axis, 0, length).sub_(step)
    return gradient


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """The cut of lines of W pixels into S pieces of at most P between columns of a grid, X = S + 1.

    vertical: [Y, H] what each row of the grid counts in each line. places: [S * P] the column of each place in a piece;
    those that short pieces leave free have any. horizontal: [S, 2, P] what both ends of a piece count there; 0 at free
    places. back: [W] the place of each column.
    """

    levels: int
    vertical: Tensor
    places: Tensor
    horizontal: Tensor
    back: Tensor

    def maps(self, grid: Tensor) -> Tensor:
        """Return [H, S, 12, L * 2]: at the height of each line, the maps at both ends of each piece, at each level."""
        rows = grid.shape[2]
        at_lines = (self.vertical.T @ grid.permute(2, 0, 1, 3).reshape(rows, -1)).view(-1, 12, *grid.shape[1::2])
        ends = torch.stack([at_lines[..., :-1], at_lines[..., 1:]], dim=3)
        return ends.permute(0, 4, 1, 2, 3).flatten(3).contiguous()

    def maps_vjp(self, v_maps: Tensor) -> Tensor:
        """Return [12, L, Y, X] from the gradient of maps()."""
        height, pieces = v_maps.shape[:2]
        ends = v_maps.view(height, pieces, 12, self.levels, 2)
        at_lines = v_maps.new_zeros(12, height, self.levels, pieces + 1)
        at_lines[..., :-1] += ends[..., 0].permute(2, 0, 3, 1)
        at_lines[..., 1:] += ends[..., 1].permute(2, 0, 3, 1)
        # A product for each of the twelve numbers: one product for all would be split between threads.
        vertical = self.vertical.expand(12, -1, -1)
        summed = torch.bmm(vertical, at_lines.flatten(2))
        return summed.view(12, -1, self.levels, pieces + 1).transpose(1, 2)

    def pieces(self, lines: Tensor) -> Tensor:
        """Return [h, S, 3, P] the colours of lines of pixels [h, W, 3]."""
        cut = lines.index_select(1, self.places)
        return cut.view(len(lines), self.horizontal.shape[0], -1, 3).transpose(2, 3).contiguous()

    def joined(self, pieces: Tensor) -> Tensor:
        """Return [h, W, 3] lines of pixels from their pieces [h, S, 3, P]."""
        return pieces.transpose(2, 3).flatten(1, 2).index_select(1, self.back)

    def weights(self, colours: Tensor) -> Tensor:
        """Return [h, S, L * 2, P] what the maps at both ends of a piece, at each level, count for its pixels."""
        return self._at_both_ends((1.0 - self._away(_luma(colours)).abs_()).clamp_(min=0.0))

    def slopes(self, colours: Tensor) -> Tensor:
        """Return [h, S, L * 2, P] how weights() change with luma; not at all where it is beyond 0..1."""
        luma = _luma(colours)
        away = self._away(luma)
        moves = (away.abs() < 1.0) & (luma > 0.0) & (luma < 1.0)
        return self._at_both_ends(away.sign_().mul_(1 - self.levels).mul_(moves))

    def _away(self, luma: Tensor) -> Tensor:
        """Return [h, S, L, P] how far a pixel's luma [h, S, 1, P] is above each level, in levels."""
        levels = torch.arange(self.levels, dtype=luma.dtype, device=luma.device)
        return luma.clamp(0.0, 1.0) * (self.levels - 1) - levels[:, None]

    def _at_both_ends(self, levels: Tensor) -> Tensor:
        return (levels.unsqueeze(3) * self.horizontal.unsqueeze(1)).flatten(2, 3)


def _luma(colours: Tensor) -> Tensor:
    """Return [h, S, 1, P] of colours [h, S, 3, P]."""
    return (colours * constant(LUMA, colours)[:, None]).sum(dim=2, keepdim=True)


def _between(maps: Tensor, weights: Tensor) -> Tensor:
    """Return [h, S, 12, P] the affine map of each pixel."""
    return torch.bmm(maps.flatten(0, 1), weights.flatten(0, 1)).view(*maps.shape[:3], weights.shape[3])


def _rows(affine: Tensor) -> Tensor:
    """Return [h, S, 3, 4, P] the maps [h, S, 12, P] as matrices."""
    height, pieces, _, most = affine.shape
    return affine.view(height, pieces, 3, 4, most)


def _mapped(affine: Tensor, colours: Tensor) -> Tensor:
    """Return [h, S, 3, P] the colours that a map of each pixel makes of its own."""
    rows = _rows(affine)
    return (rows[:, :, :, :3] * colours.unsqueeze(2)).sum(dim=3) + rows[:, :, :, 3]


def _v_affine(v_mapped: Tensor, colours: Tensor) -> Tensor:
    """Return [h, S, 12, P] the gradient of each pixel's map."""
    v_rows = torch.cat([v_mapped.unsqueeze(3) * colours.unsqueeze(2), v_mapped.unsqueeze(3)], dim=3)
    return v_rows.flatten(2, 3)


def _cut(image: Tensor, grid: Tensor) -> _Cut:
    height, width, _ = image.shape
    _, levels, rows, columns = grid.shape
    return _made_cut(height, width, levels, rows, columns, image.dtype, image.device)


@lru_cache(maxsize=16)
def _made_cut(
    height: int, width: int, levels: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device
) -> _Cut:
    across = _positions(width, columns)
    piece = across.long().clamp(max=columns - 2)
    counts = piece.bincount(minlength=columns - 1)
    most = int(counts.max())
    first = counts.cumsum(0) - counts
    place = torch.arange(most)
    used = place < counts[:, None]
    places = (first[:, None] + place.clamp(max=most)).clamp(max=width - 1)
    places = torch.where(used, places, 0)
    right = torch.where(used, across[places] - torch.arange(columns - 1)[:, None], 0.0)
    left = torch.where(used, 1.0 - right, 0.0)
    back = piece * most + torch.arange(width) - first[piece]
    vertical = (1.0 - (_positions(height, rows) - torch.arange(rows)[:, None]).abs()).clamp(min=0.0)
    return _Cut(
        levels=levels,
        vertical=vertical.to(device, dtype),
        places=places.flatten().to(device),
        horizontal=torch.stack([left, right], dim=1).to(device, dtype),
        back=back.to(device),
    )


def _positions(pixels: int, knots: int) -> Tensor:
    """Return [pixels] float64 positions of pixel centres between ``knots``, whose first and last are at the ends."""
    return torch.arange(pixels, dtype=torch.float64).mul_((knots - 1.0) / max(1, pixels - 1)).clamp_(max=knots - 1.0)
