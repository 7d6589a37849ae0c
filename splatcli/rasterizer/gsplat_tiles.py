"""isect_tiles(), rasterize_to_pixels() and more: gsplat's stages behind fully_fused_projection().

They are for programs that change something between the stages, and for what rasterization() does not have in its one
pass: another blur, and covariances. Lists are made in torch; the blending is that of the kernels, on CPU and CUDA.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor

from splatcli.native import abi
from splatcli.rasterizer.context import RasterContext, tile_rows_of
from splatcli.rasterizer.gsplat_ops import refuse
from splatcli.rasterizer.opaque import graph_break, once_differentiable
from splatcli.rasterizer.reference import ALPHA_MAX, ALPHA_MIN, TRANSMITTANCE_MIN
from splatcli.rasterizer.rendering import backend_for

#: Pixels a side of the tiles that rasterize_to_pixels() takes lists of.
TILE_SIZES = (4, 8, 16)

#: Bits of a depth in an intersection's id.
_DEPTH_BITS = 32

#: 4x4 blocks along a side of a tile.
_BLOCKS = 4


@graph_break
@torch.no_grad()
def isect_tiles(
    means2d: Tensor,
    radii: Tensor,
    depths: Tensor,
    tile_size: int,
    tile_width: int,
    tile_height: int,
    sort: bool = True,
    segmented: bool = False,
    packed: bool = False,
    n_images: int | None = None,
    image_ids: Tensor | None = None,
    gaussian_ids: Tensor | None = None,
    conics: Tensor | None = None,
    opacities: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """List the tiles that each projected Gaussian's box meets, as fully_fused_projection() returns them.

    means2d, radii: [..., N, 2], or [nnz, 2] where ``packed``. depths: [..., N] or [nnz].
    n_images, image_ids: with ``packed``, the number of images and [nnz] the image of each row.
    segmented, gaussian_ids, conics, opacities: accepted, without effect.

    Returns tiles_per_gauss [..., N] or [nnz] int32; isect_ids [I] int64, from the highest bits on the image, the tile
    and 32 bits of depth; flatten_ids [I] int32, the rows of means2d, seen as [-1, 2]. With ``sort`` by isect_ids.
    """
    rows, tiles = radii.reshape(-1, 2), tile_width * tile_height
    if not packed:
        per_image = max(1, means2d.shape[-2])
        image_ids = torch.arange(len(rows), device=rows.device) // per_image
    elif image_ids is None or n_images is None:
        raise ValueError("isect_tiles(): packed rows need n_images and image_ids")
    centre, half = means2d.reshape(-1, 2) / tile_size, rows / tile_size
    limit = torch.tensor([tile_width, tile_height], device=centre.device)
    low = torch.minimum((centre - half).floor().long().clamp(min=0), limit)
    high = torch.minimum((centre + half).ceil().long().clamp(min=0), limit)
    sides = (high - low) * (rows > 0).all(dim=-1, keepdim=True)
    per = sides.prod(dim=-1)
    row = torch.repeat_interleave(torch.arange(len(per), device=per.device), per)
    place = torch.arange(len(row), device=per.device) - (per.cumsum(0) - per)[row]
    wide = sides[row, 0]
    tile = (low[row, 1] + place // wide) * tile_width + low[row, 0] + place % wide
    depth = depths.reshape(-1)[row].float().view(torch.int32).long() & 0xFFFFFFFF
    ids = (((image_ids.long()[row] << tiles.bit_length()) | tile) << _DEPTH_BITS) | depth
    if sort:
        ids, order = torch.sort(ids, stable=True)
        row = row[order]
    return per.int().view(radii.shape[:-1]), ids, row.int()


@torch.no_grad()
def isect_offset_encode(isect_ids: Tensor, n_images: int, tile_width: int, tile_height: int) -> Tensor:
    """Return [n_images, tile_height, tile_width] int32, where each tile's intersections begin in the sorted ids."""
    tiles = tile_width * tile_height
    key = isect_ids >> _DEPTH_BITS
    bits = tiles.bit_length()
    listed = (key >> bits) * tiles + (key & ((1 << bits) - 1))
    begins = torch.searchsorted(listed, torch.arange(n_images * tiles, device=listed.device))
    return begins.int().view(n_images, tile_height, tile_width)


@graph_break
def rasterize_to_pixels(
    means2d: Tensor,
    conics: Tensor,
    colors: Tensor,
    opacities: Tensor,
    image_width: int,
    image_height: int,
    tile_size: int,
    isect_offsets: Tensor,
    flatten_ids: Tensor,
    backgrounds: Tensor | None = None,
    masks: Tensor | None = None,
    packed: bool = False,
    absgrad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Blend projected Gaussians in the order of their lists; differentiable in all but the lists.

    means2d [..., N, 2], conics [..., N, 3], colors [..., N, D] of any D and sign, opacities [..., N]; with ``packed``
        [nnz, ...]. backgrounds: [..., D].
    isect_offsets [..., tile_height, tile_width], flatten_ids [I]: from isect_offset_encode() and isect_tiles().
    masks: [..., tile_height, tile_width] bool; tiles with False show the background alone.
    absgrad: backward() leaves the sums of the pixels' magnitudes in ``means2d.absgrad``.

    Returns images [..., image_height, image_width, D] and alphas [..., image_height, image_width, 1].
    Raises NotImplementedError for tiles of other than 4, 8 or 16 pixels, ValueError for shapes that do not fit.
    """
    call = "rasterize_to_pixels()"
    if tile_size not in TILE_SIZES:
        remedy = f"give isect_tiles() and this call {', '.join(map(str, TILE_SIZES))}"
        raise refuse(call, "tile_size", tile_size, remedy)
    channels, images = colors.shape[-1], isect_offsets.shape[:-2]
    grid = (-(-image_height // tile_size), -(-image_width // tile_size))
    tail = means2d.shape[:-1]
    wanted = {
        "conics": (conics, (*tail, 3)),
        "colors": (colors, (*tail, channels)),
        "opacities": (opacities, tail),
        "isect_offsets": (isect_offsets, (*images, *grid)),
    }
    if not packed:
        wanted["means2d"] = (means2d, (*images, *means2d.shape[-2:-1], 2))
    if backgrounds is not None:
        wanted["backgrounds"] = (backgrounds, (*images, channels))
    if masks is not None:
        wanted["masks"] = (masks, (*images, *grid))
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{call}: {name} has shape {tuple(tensor.shape)}, not {tuple(shape)}")
    if channels == 0:
        raise ValueError(f"{call}: colors has no channels")
    dtype = torch.float64 if means2d.dtype == torch.float64 else torch.float32
    with torch.autocast(means2d.device.type, enabled=False):
        rows = [
            tensor.reshape(-1, *tensor.shape[len(tail) :]).to(dtype) for tensor in (means2d, conics, opacities, colors)
        ]
        size = (image_height, image_width)
        lists = _Lists(isect_offsets, flatten_ids, masks, abi.TILE // tile_size)
        behind = None if backgrounds is None else backgrounds.reshape(-1, channels).to(dtype)
        blended, magnitudes = [], []
        for index in range(math.prod(images)):
            used, *listed = lists.of(index)
            background = rows[3].new_zeros(channels) if behind is None else behind[index]
            own = _ImageLists(size, *listed)
            blended.append(_BlendLists.apply(own, background, *(tensor[used] for tensor in rows)))  # type: ignore[no-untyped-call]
            magnitudes.append((used, own))
        if absgrad and means2d.requires_grad:
            _fill_absgrad(means2d, magnitudes)
        if not blended:
            # Empty, but part of the graph, so that backward() works.
            nothing = sum(tensor.flatten()[:0].sum() for tensor in rows)
            return tuple(rows[3].new_zeros(*images, *size, width) + nothing for width in (channels, 1))  # type: ignore[return-value]
        image, alpha = (torch.stack(parts) for parts in zip(*blended, strict=True))
    return image.view(*images, *size, channels), alpha.view(*images, *size, 1)


class _Lists:
    """The intersections of all images, by image.

    parts: of the kernels' tiles along a side, of which each has a list. Lists of smaller tiles follow one another in
    the list of the kernels' tile, each for the 4x4 blocks of its own: these have no pixel in common, so that the order
    within each is all that matters.
    """

    def __init__(self, isect_offsets: Tensor, flatten_ids: Tensor, masks: Tensor | None, parts: int) -> None:
        grid = isect_offsets.shape[-2:]
        begins = isect_offsets.reshape(-1, *grid).long()
        self.rows = flatten_ids.long()
        flat = torch.cat([begins.flatten(), begins.new_tensor([len(self.rows)])])
        counts = flat[1:].view_as(begins) - begins
        if masks is not None:
            counts = counts * masks.reshape(-1, *grid)
        down, across = (-(-side // parts) for side in grid)
        missing = (0, across * parts - grid[1], 0, down * parts - grid[0])
        self.begins, self.counts = (
            torch.nn.functional.pad(values, missing)
            .view(-1, down, parts, across, parts)
            .transpose(2, 3)
            .reshape(len(values), down * across * parts * parts)
            for values in (begins, counts)
        )
        side = _BLOCKS // parts
        blocks = torch.arange(_BLOCKS * _BLOCKS, device=begins.device)
        part = blocks // _BLOCKS // side * parts + blocks % _BLOCKS // side
        #: [parts^2] int32, the blocks of each part of a tile.
        self.blocks = torch.zeros(parts * parts, dtype=torch.int32, device=begins.device).index_add_(
            0, part, (1 << blocks).int()
        )

    def of(self, image: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (rows [V] that are used; starts [T + 1] of the tiles, [I] indices into these rows, [I] blocks)."""
        counts = self.counts[image]
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        shift = torch.repeat_interleave(self.begins[image] - starts[:-1], counts)
        rows = self.rows[torch.arange(len(shift), device=shift.device) + shift]
        used, gaussians = torch.unique(rows, return_inverse=True)
        parts = len(self.blocks)
        blocks = torch.repeat_interleave(self.blocks.repeat(len(counts) // parts), counts)
        return used, starts[::parts], gaussians, blocks


class _ImageLists:
    """The lists of one image, and the magnitudes that its backward pass leaves."""

    def __init__(self, size: tuple[int, int], starts: Tensor, gaussians: Tensor, blocks: Tensor) -> None:
        self.height, self.width = size
        self.starts, self.gaussians, self.blocks = starts, gaussians, blocks
        self.absgrad: Tensor | None = None

    def view(self) -> abi.View:
        """Return the image for the native side; projection is done, so its camera does not matter."""
        return abi.View(
            width=self.width,
            height=self.height,
            tile_row_begin=0,
            tile_row_end=tile_rows_of(self.height),
            fx=1.0,
            fy=1.0,
            z_far=1.0,
        )

    def masks(self, means2d: Tensor, conics: Tensor, opacities: Tensor) -> Tensor:
        """Return [I] int32, the blocks of each intersection that the box of its Gaussian meets."""
        a, b, c = conics.unbind(dim=-1)
        # Where the box has no numbers, or the conic is no ellipse, all blocks are read.
        reach = 2.0 * (opacities / ALPHA_MIN).clamp(min=1.0).log() / (a * c - b * b)
        half = torch.stack([c * reach, a * reach], dim=-1).sqrt()
        half = torch.where(half.isfinite(), 1.001 * half + 0.01, math.inf)[self.gaussians]
        counts = self.starts[1:] - self.starts[:-1]
        tile = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        across = tile_rows_of(self.width)
        corner = torch.stack([tile % across, tile // across], dim=-1) * abi.TILE
        centre = means2d[self.gaussians] - corner
        side = abi.TILE // _BLOCKS
        # A block's first and last pixel centres are half a pixel inside it.
        low = ((centre - half + 0.5) / side).floor().clamp(min=0, max=_BLOCKS).nan_to_num(0.0).int()
        high = ((centre + half - 0.5) / side).floor().clamp(min=-1, max=_BLOCKS - 1).nan_to_num(_BLOCKS - 1.0).int()
        bits = torch.where(high >= low, (2 << high) - (1 << low), 0)
        row, column = bits[:, 1], bits[:, 0]
        met = torch.zeros_like(row)
        for k in range(_BLOCKS):
            met |= (((row >> k) & 1) * column) << (_BLOCKS * k)
        return met & self.blocks


class _BlendLists(torch.autograd.Function):
    """The native blending of listed Gaussians as a node of the graph."""

    @staticmethod
    def forward(
        ctx: Any,
        own: _ImageLists,
        background: Tensor,
        means2d: Tensor,
        conics: Tensor,
        opacities: Tensor,
        colors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        backend = backend_for(means2d.device, means2d.dtype)
        context, view = RasterContext(backend, slack=0.0), own.view()
        projected = means2d.new_zeros(len(means2d), abi.PROJECTED)
        projected[:, :2] = means2d
        projected[:, 2:5] = conics / (conics.new_tensor([2.0, 1.0, 2.0]) * math.log(2.0))
        projected[:, 5] = opacities.log2()
        colors, background = colors.contiguous(), background.contiguous()
        context.set_projected(projected, torch.zeros_like(means2d[:, 0], dtype=torch.int32))
        context.set_lists(view, own.starts, own.gaussians, own.masks(means2d, conics, opacities))
        context.set_channels(colors)
        image = means2d.new_empty(own.height, own.width, colors.shape[1])
        alpha = means2d.new_empty(own.height, own.width)
        context.blend(view, background, image, alpha, None)
        ctx.own, ctx.context = own, context
        ctx.save_for_backward(background, image, alpha, conics, opacities, colors)
        return image, alpha

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v_image: Tensor | None, v_alpha: Tensor | None) -> tuple[Tensor | None, ...]:
        background, image, alpha, conics, opacities, colors = ctx.saved_tensors
        context, own = ctx.context, ctx.own
        view = own.view()
        v_image = torch.zeros_like(image) if v_image is None else v_image.contiguous()
        v_alpha = None if v_alpha is None else v_alpha.contiguous()
        v_background = torch.empty_like(background) if ctx.needs_input_grad[1] else None
        v_colors = torch.zeros_like(colors)
        out, v_out = context.images(view, image, alpha, None), context.images(view, v_image, v_alpha, None)
        context.native.with_abs = True
        context.blend_vjp(view, background, out, v_out, v_background, v_colors)
        sums = context.summed_isect_grads()[: len(conics)]
        a, b, c = conics.unbind(dim=1)
        v, vx, vy, vxx, vxy, vyy = sums[:, :6].unbind(dim=1)
        own.absgrad = sums[:, 10:12] * math.log(2.0)
        v_means2d = torch.stack([a * vx + b * vy, b * vx + c * vy], dim=1)
        v_conics = torch.stack([-0.5 * vxx, -vxy, -0.5 * vyy], dim=1)
        v_opacities = torch.where(opacities > 0, v / opacities, 0.0)
        return None, v_background, v_means2d, v_conics, v_opacities, v_colors


def _fill_absgrad(means2d: Tensor, images: list[tuple[Tensor, _ImageLists]]) -> None:
    """Have backward() leave the pixels' magnitudes in ``means2d.absgrad``."""
    known = weakref.ref(means2d)  # means2d holds the hook

    def fill(_: Tensor) -> None:
        tensor = known()
        if tensor is None:
            return
        total = torch.zeros_like(tensor).reshape(-1, 2)
        for used, own in images:
            if own.absgrad is not None:
                total.index_add_(0, used, own.absgrad.to(total))
        tensor.absgrad = total.view_as(tensor)  # type: ignore[attr-defined]

    means2d.register_hook(fill)  # type: ignore[no-untyped-call]


@graph_break
@torch.no_grad()
def rasterize_to_indices_in_range(
    range_start: int,
    range_end: int,
    transmittances: Tensor,
    means2d: Tensor,
    conics: Tensor,
    opacities: Tensor,
    image_width: int,
    image_height: int,
    tile_size: int,
    isect_offsets: Tensor,
    flatten_ids: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """List which Gaussians each pixel shows, front to back, without blending them; in torch, tile by tile.

    range_start, range_end: of each tile's list, in steps of ``tile_size ** 2`` intersections, the end left out.
    transmittances: [..., image_height, image_width], what is left of the light before range_start; 1 from 0 on.
    The other arguments are those of rasterize_to_pixels(), not packed, with tiles of any size.

    Returns gaussian_ids [M], pixel_ids [M], row by row of the image, and image_ids [M], int64, by image and pixel.
    """
    count, width = means2d.shape[-2], isect_offsets.shape[-1]
    begins = isect_offsets.reshape(-1, isect_offsets.shape[-2] * width).long()
    ends = torch.cat([begins.flatten()[1:], begins.new_tensor([len(flatten_ids)])]).view_as(begins)
    points, shapes, opaque = means2d.reshape(-1, 2), conics.reshape(-1, 3), opacities.reshape(-1)
    left = transmittances.reshape(-1, image_height, image_width)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for image, (tile_begins, tile_ends) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        for tile, (begin, end) in enumerate(zip(tile_begins, tile_ends, strict=True)):
            first = begin + int(range_start) * tile_size * tile_size
            rows = flatten_ids[first : min(end, begin + int(range_end) * tile_size * tile_size)].long()
            if first >= end or len(rows) == 0:
                continue
            y = torch.arange(tile // width * tile_size, min((tile // width + 1) * tile_size, image_height))
            x = torch.arange(tile % width * tile_size, min((tile % width + 1) * tile_size, image_width))
            pixels = (y[:, None] * image_width + x).flatten().to(points.device)
            alphas = _alphas(points[rows], shapes[rows], opaque[rows], pixels[:, None], image_width)
            after = left[image].flatten()[pixels][:, None] * (1.0 - alphas).cumprod(dim=1)
            pixel, listed = ((alphas > 0) & (after > TRANSMITTANCE_MIN)).nonzero().unbind(dim=1)
            found.append((rows[listed] % max(1, count), pixels[pixel], torch.full_like(pixel, image)))
    if not found:
        nothing = flatten_ids.new_zeros(0, dtype=torch.int64)
        return nothing, nothing, nothing
    gaussian_ids, pixel_ids, image_ids = (torch.cat(parts) for parts in zip(*found, strict=True))
    order = torch.argsort(image_ids * (image_height * image_width) + pixel_ids, stable=True)
    return gaussian_ids[order], pixel_ids[order], image_ids[order]


def accumulate(
    means2d: Tensor,
    conics: Tensor,
    opacities: Tensor,
    colors: Tensor,
    gaussian_ids: Tensor,
    pixel_ids: Tensor,
    image_ids: Tensor,
    image_width: int,
    image_height: int,
) -> tuple[Tensor, Tensor]:
    """Blend the lists of rasterize_to_indices_in_range(), in torch, differentiably in all but the lists.

    means2d [..., N, 2], conics [..., N, 3], opacities [..., N], colors [..., N, D].
    Returns images [..., image_height, image_width, D] and alphas [..., image_height, image_width, 1].
    """
    images, count, channels = means2d.shape[:-2], means2d.shape[-2], colors.shape[-1]
    key = image_ids * (image_height * image_width) + pixel_ids
    order = torch.argsort(key, stable=True)
    key, pixels, rows = key[order], pixel_ids[order], (image_ids * count + gaussian_ids)[order]
    points, shapes = means2d.reshape(-1, 2)[rows], conics.reshape(-1, 3)[rows]
    alphas = _alphas(points, shapes, opacities.reshape(-1)[rows], pixels, image_width)
    # What is left before each: the logarithms summed from the pixel's first on, in double for long lists.
    through = torch.log1p(-alphas.double()).cumsum(dim=0)
    before = torch.cat([through.new_zeros(1), through[:-1]]) if len(through) else through
    weights = alphas * (before - before[torch.searchsorted(key, key)]).exp().to(alphas)
    whole = math.prod(images) * image_height * image_width
    shown = weights[:, None] * colors.reshape(-1, channels)[rows]
    image = shown.new_zeros(whole, channels).index_add(0, key, shown)
    alpha = weights.new_zeros(whole).index_add(0, key, weights)
    size = (*images, image_height, image_width)
    return image.view(*size, channels), alpha.view(*size, 1)


def _alphas(points: Tensor, conics: Tensor, opacities: Tensor, pixels: Tensor, width: int) -> Tensor:
    """Return the alphas of Gaussians in pixels, 0 below 1/255; docs/math.md 6.1. pixels: of a shape that broadcasts."""
    dx, dy = (pixels % width + 0.5) - points[:, 0], (pixels // width + 0.5) - points[:, 1]
    a, b, c = conics.unbind(dim=-1)
    sigma = 0.5 * (a * dx * dx + c * dy * dy) + b * dx * dy
    alphas = (opacities * (-sigma).exp()).clamp(max=ALPHA_MAX)
    return torch.where((alphas >= ALPHA_MIN) & (sigma >= 0), alphas, 0.0)
