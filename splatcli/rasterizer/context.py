"""RasterContext: the stages of one view and the memory between them; views as native structs.

Memory, float32, for N Gaussians of which V are visible and I tile intersections (at most B, the tiles of their boxes):
  a Gaussian        projected Gaussian 64 + id 4 + offsets 8 = 76 B, touched only where visible
  a visible one     depth sort 16 B
  an intersection   while binning 12 B x B (on a GPU 26); lists 10 B x B; backward one gradient of 64 B x I
  a pixel           image 12 + alpha 4; with gradients twice that
Where B exceeds the budget, the view is made in bands of tile rows, with the intersections of one band at a time and
bit-identical results; the backward pass then keeps a sum of gradients from band to band, 68 B more for each of N.
"""

from __future__ import annotations

import ctypes
import logging
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from splatcli.gaussians import Gaussians
from splatcli.native import abi
from splatcli.native.backend import Backend, address
from splatcli.rasterizer.memory_budget import (
    LIST_BYTES,
    Arena,
    Band,
    IntersectionBudget,
    IntersectionOverflow,
    Largest,
    MemoryBudget,
    plan_bands,
)
from splatcli.scene.camera import Camera
from splatcli.sizes import gib

_log = logging.getLogger(__name__)

#: The far plane, camera z in world units. The near plane is Camera.near.
Z_FAR = 1e10

#: Bytes of a tile intersection while the CPU bins and lists it.
ISECT_BYTES = 12 + LIST_BYTES


@dataclass(slots=True)
class RasterContext:
    """The stages of one view and their buffers: project(), bin(), blend(), and backward blend_vjp(), project_vjp().

    native: the pointers and counts that the stages share.
    """

    backend: Backend
    #: None: the free memory of the device.
    budget: MemoryBudget | None = None
    #: The part by which a growing buffer exceeds the requested size; 0 for a context of one view.
    slack: float = 0.25
    arena: Arena = field(init=False)
    isect_budget: IntersectionBudget = field(init=False)
    native: abi.Frame = field(default_factory=abi.Frame)
    #: [COUNTERS] int64, the counts of a deferred backend.
    counters: Tensor | None = None
    #: More than one where the last view did not fit at once.
    bands: list[Band] = field(default_factory=list)
    #: Colours that are blended instead of those of the projected Gaussians; see set_channels().
    channels: abi.Channels | None = None
    #: The projected Gaussians until bin(), whose error names the largest of them.
    _source: Gaussians | None = None
    _arrays: abi.GaussianArrays | None = None

    def __post_init__(self) -> None:
        self.arena = Arena(self.backend.device, self.slack)
        budget = self.budget or MemoryBudget(self.backend.device)
        self.isect_budget = IntersectionBudget(self.backend, budget, self.arena)
        if self.backend.deferred:
            self.set_counters(torch.zeros(abi.COUNTERS, dtype=torch.int64, device=self.backend.device))

    def project(self, view: abi.View, gaussians: Gaussians, adam: abi.Adam | None = None) -> abi.GaussianArrays:
        """Activate, project and colour; count the visible Gaussians and bound their tile intersections.

        adam: applies the steps that shN of visible Gaussians has missed (see AdamState).
        """
        arrays = self.backend.arrays(gaussians)
        padded = -(-len(gaussians) // abi.CHUNK) * abi.CHUNK
        native = self.native
        native.projected = self._take("projected", padded * abi.PROJECTED, self.backend.dtype)
        native.ids = self._take("ids", padded, torch.int32)
        native.chunk_counts = self._take("chunk_counts", 2 * (padded // abi.CHUNK), torch.int64)
        native.isect_grad_starts = self._take("isect_grad_starts", padded, torch.int32)
        native.tiles_per_gauss = self._take("tiles_per_gauss", padded, torch.int32)
        native.visible = padded  # the capacity where counts are deferred; else a result
        self.backend.call("project", view, arrays, native, adam)
        self._arrays = arrays
        self._source = gaussians
        return arrays

    def bin(
        self, view: abi.View, arrays: abi.GaussianArrays, *, capacity: int | None = None, with_grads: bool = True
    ) -> None:
        """List the intersections of each tile, front to back, or choose the bands in which blending will list them.

        capacity: tile intersections to allocate for, without further slack, where the backend defers its counts. With
            None the bound is fetched, which waits for the device. With a number nothing waits unless it is over the
            budget, and the overflow flag is set when it was too small.
        with_grads: whether a backward pass follows, which needs more memory.
        Raises ResourceError, before anything is allocated for them, when not even a tile row fits the budget.
        """
        bound = self.max_isects() if self.counters is None or capacity is None else capacity
        self._arrays = arrays
        try:
            self.bands = self._plan_bands(view, bound, capacity is not None, with_grads)
        finally:
            self._source = None
        self.native.max_isects = sum(band.isects for band in self.bands)
        if len(self.bands) == 1:
            self._bin(view)

    def blend(self, view: abi.View, background: Tensor, image: Tensor, alpha: Tensor, depth: Tensor | None) -> None:
        """Fill image [H, W, D], alpha [H, W] and, with_depth, depth [H, W]; background [D]. D is ``num_channels``."""
        out = self.images(view, image, alpha, depth)
        for part, _ in self._binned_bands(view):
            self.backend.call("blend", part, self.native, self.backend.pointer(background, self.num_channels), out)

    def blend_vjp(
        self,
        view: abi.View,
        background: Tensor,
        out: abi.Images,
        v_out: abi.Images,
        v_background: Tensor | None = None,
        v_colors: Tensor | None = None,
        with_geometry: bool = True,
    ) -> None:
        """Make per-intersection gradients, and that of the background [D], from those of the images.

        v_colors: [N, D] zeros, with set_channels(); filled.
        with_geometry: whether there are per-intersection gradients; may be False with set_channels().
        """
        partials, v_colour = None, None
        if v_background is not None:
            partials = self._take("background_partials", self.num_channels * tiles_of(view), self.backend.dtype)
            v_colour = self.backend.pointer(v_background, self.num_channels)
        colour = self.backend.pointer(background, self.num_channels)
        sums = self._begin_sums() if with_geometry and len(self.bands) > 1 else None
        for part, is_last in self._binned_bands(view):
            isects = self.native.isects if self.counters is None else self.native.max_isects
            self.native.isect_grads = None
            if with_geometry:
                self.native.isect_grads = self._take("isect_grads", isects * abi.ISECT_GRAD, self.backend.dtype)
            if self.channels is not None and v_colors is not None:
                at_once = min(self.num_channels, abi.CHANNELS_AT_ONCE)
                self.channels.isect_grads = self._take("channel_grads", isects * at_once, self.backend.dtype)
                self.channels.v_colors = self.backend.pointer(v_colors, int(self.channels.n), self.num_channels)
            self.backend.call(
                "blend_vjp", part, self.native, colour, out, v_out, partials, v_colour if is_last else None
            )
            if sums is not None:
                self.backend.call("sum_isect_grads", self._arrays, self.native, *sums)
        if sums is not None:
            self._end_sums(*sums)

    def project_vjp(
        self,
        view: abi.View,
        arrays: abi.GaussianArrays,
        *,
        gradients: abi.GaussianArrays | None = None,
        adam: abi.Adam | None = None,
        with_pose: bool = False,
        grad2d: Tensor | None = None,
        count: Tensor | None = None,
    ) -> None:
        """Write gradients of the raw parameters to ``gradients``, or apply them at once through ``adam``.

        with_pose: fill pose_partials(). grad2d, count: [N], added to (see DensifyStats).
        """
        pointer = self.backend.pointer
        out = abi.ProjectGrad()
        if gradients is not None:
            out.gradients = ctypes.pointer(gradients)
        if adam is not None:
            out.adam = ctypes.pointer(adam)
        if with_pose:
            out.pose_partials = address(self.pose_partials(arrays.n))
        if grad2d is not None and count is not None:
            out.grad2d, out.count = pointer(grad2d, arrays.n), pointer(count, arrays.n)
        self.backend.call("project_vjp", view, arrays, self.native, out)

    def pose_partials(self, n: int) -> Tensor:
        """Return [chunks, POSE] the sums of the pose's gradient over each chunk of ``n`` Gaussians."""
        chunks = -(-n // abi.CHUNK)
        numbers = self.arena.take("pose_partials", chunks * abi.POSE, self.backend.dtype)
        return numbers[: chunks * abi.POSE].view(chunks, abi.POSE)

    def pose_vjp(self, view: abi.View, partials: Tensor, v_viewmat: Tensor) -> None:
        """Fill v_viewmat [4, 4] with the gradient of the view's matrix, from pose_partials() of all Gaussians."""
        pointer = self.backend.pointer
        chunks = len(partials)
        self.backend.call(
            "pose_vjp", view, self.native, pointer(partials, chunks, abi.POSE), chunks, pointer(v_viewmat, 4, 4)
        )

    def images(self, view: abi.View, image: Tensor, alpha: Tensor | None, depth: Tensor | None) -> abi.Images:
        """Return pointers to images or to their gradients; None is left out."""
        h, w = view.height, view.width
        pointer = self.backend.pointer
        return abi.Images(
            image=pointer(image, h, w, self.num_channels),
            alpha=None if alpha is None else pointer(alpha, h, w),
            depth=None if depth is None else pointer(depth, h, w),
        )

    def max_isects(self) -> int:
        """Return the upper bound of tile intersections of the last projected view; waits for a deferred backend."""
        if self.counters is None:
            return int(self.native.max_isects)
        return max(1, int(self.counters[abi.COUNT_MAX_ISECTS]))

    def visible_slots(self) -> tuple[Tensor, Tensor]:
        """Return (indices [V] of the visible Gaussians, their slots [V] in projected), int64; waits for a device."""
        slots = self._padded()
        counts = self.arena.take("chunk_counts", 0, torch.int64)[: 2 * (slots // abi.CHUNK) : 2]
        taken = torch.arange(abi.CHUNK, device=counts.device) < counts[:, None]
        rows = taken.flatten().nonzero().squeeze(1)
        return self.arena.take("ids", 0, torch.int32)[rows].long(), rows

    def summed_isect_grads(self) -> Tensor:
        """Return [slots, ISECT_GRAD] the sum of each Gaussian's intersection gradients after blend_vjp."""
        slots = self._padded()
        if len(self.bands) <= 1:
            self.backend.call("sum_isect_grads", self._arrays, self.native, *self._begin_sums())
        return self.arena.take("isect_grad_sums", 0, self.backend.dtype)[: slots * abi.ISECT_GRAD].view(
            slots, abi.ISECT_GRAD
        )

    def set_channels(self, colors: Tensor) -> None:
        """Have blend() and blend_vjp() take ``colors`` [N, D], any D and sign, as those of the projected Gaussians."""
        count, width = colors.shape
        self.channels = abi.Channels(count=width, n=count, colors=self.backend.pointer(colors, count, width))
        self.native.channels = ctypes.pointer(self.channels)

    @property
    def num_channels(self) -> int:
        """The channels of the images."""
        return 3 if self.channels is None else int(self.channels.count)

    def set_counters(self, counters: Tensor) -> None:
        """Have a deferred backend count in ``counters`` [COUNTERS] int64, zeros at first."""
        self.counters = counters
        self.native.counters = self.backend.pointer(counters, abi.COUNTERS, dtype=torch.int64)

    def tensors(self) -> list[Tensor]:
        """Return the memory that is reused from view to view."""
        return [*self.arena.buffers(), *([] if self.counters is None else [self.counters])]

    def set_projected(self, projected: Tensor, tiles: Tensor) -> abi.GaussianArrays:
        """Take Gaussians that were projected elsewhere, all visible and in this order, in place of project().

        projected: [V, PROJECTED], see cuda/math/blend.h. tiles: [V] int32, the tiles of each one's box.
        """
        count, chunk, device = len(projected), abi.CHUNK, self.backend.device
        padded = -(-count // chunk) * chunk
        taken, ids, tiles_per_gauss, starts, counts = (
            self.arena.take(name, numel, dtype)
            for name, numel, dtype in (
                ("projected", padded * abi.PROJECTED, self.backend.dtype),
                ("ids", padded, torch.int32),
                ("tiles_per_gauss", padded, torch.int32),
                ("isect_grad_starts", padded, torch.int32),
                ("chunk_counts", 2 * (padded // chunk), torch.int64),
            )
        )
        taken[: count * abi.PROJECTED].view(count, abi.PROJECTED).copy_(projected)
        ids[:count] = torch.arange(count, dtype=torch.int32, device=device)
        tiles_per_gauss[:padded] = 0
        tiles_per_gauss[:count] = tiles
        per_chunk = counts[: 2 * (padded // chunk)].view(padded // chunk, 2)
        per_chunk[:, 0] = (count - torch.arange(0, padded, chunk, device=device)).clamp(max=chunk)
        per_chunk[:, 1] = tiles_per_gauss[:padded].view(padded // chunk, chunk).sum(dim=1, dtype=torch.int64)
        native = self.native
        native.projected, native.ids, native.chunk_counts = address(taken), address(ids), address(counts)
        native.tiles_per_gauss, native.isect_grad_starts = address(tiles_per_gauss), address(starts)
        native.visible, native.max_isects = count, int(per_chunk[:, 1].sum())
        if self.counters is not None:
            native.visible = padded
            self.counters.copy_(torch.tensor([count, native.max_isects, 0, 0]))
        arrays = abi.GaussianArrays(n=count)  # no code reads parameters after the projection; they are counted
        self.set_arrays(arrays)
        return arrays

    def set_lists(self, view: abi.View, tile_starts: Tensor, gaussians: Tensor, masks: Tensor) -> None:
        """Take the intersections of each tile from elsewhere, in place of bin(), after set_projected().

        tile_starts: [T + 1] int64. gaussians: [I] int64, indices of projected Gaussians, front to back in each tile.
        masks: [I] int32, bits of the 4x4 blocks of the tile that each reaches, row by row.
        """
        native, isects = self.native, len(gaussians)
        tiles, padded = tiles_of(view), self._padded()
        # The gradients of a Gaussian's intersections lie side by side.
        order = torch.argsort(gaussians, stable=True)
        grad_rows = torch.empty_like(order)
        grad_rows[order] = torch.arange(isects, device=order.device)
        per = torch.bincount(gaussians, minlength=padded)
        self.arena.take("tiles_per_gauss", padded, torch.int32)[:padded] = per
        self.arena.take("isect_grad_starts", padded, torch.int32)[:padded] = per.cumsum(0) - per
        lists = (
            ("tile_starts", tiles + 1, torch.int64, tile_starts),
            ("isect_gaussians", isects, torch.int32, gaussians),
            ("isect_grad_rows", isects, torch.int32, grad_rows),
            ("isect_masks", isects, torch.int16, masks),
        )
        for name, numel, dtype, values in lists:
            taken = self.arena.take(name, numel, dtype)
            taken[:numel] = values
            setattr(native, name, address(taken))
        native.tile_ends = self._take("tile_ends", tiles, torch.int32)
        native.tile_order = None  # row by row
        native.isects = native.max_isects = isects
        if self.counters is not None:
            self.counters[abi.COUNT_MAX_ISECTS] = self.counters[abi.COUNT_ISECTS] = isects
        self.bands = []

    def set_arrays(self, arrays: abi.GaussianArrays) -> None:
        """Set the parameters of Gaussians projected here and blended elsewhere, or the reverse (sharded.py)."""
        self._arrays, self._source = arrays, None

    def take_sums(self, slots: Tensor, sums: Tensor, reached: Tensor) -> None:
        """Take sums of intersection gradients [V, ISECT_GRAD] made elsewhere, of ``slots`` [V]; see visible_slots()."""
        starts = self._begin_sums()
        self.arena.take("isect_grad_sums", 0, self.backend.dtype)[: self._padded() * abi.ISECT_GRAD].view(
            -1, abi.ISECT_GRAD
        )[slots] = sums
        self.arena.take("reached", 0, torch.int32)[slots] = reached
        self._end_sums(*starts)

    def _bin(self, view: abi.View) -> None:
        """Bin the view's tile rows; native.max_isects bounds their intersections."""
        native = self.native
        tiles = tiles_of(view)
        native.workspace_bytes = self.backend.call("bin_bytes", view, native)
        native.workspace = self._take("workspace", native.workspace_bytes, torch.uint8)
        native.tile_starts = self._take("tile_starts", tiles + 1, torch.int64)
        native.tile_ends = self._take("tile_ends", tiles, torch.int32)
        if self.backend.deferred:
            native.tile_order = self._take("tile_order", tiles, torch.int32)
        native.isect_gaussians = self._take("isect_gaussians", native.max_isects, torch.int32)
        native.isect_grad_rows = self._take("isect_grad_rows", native.max_isects, torch.int32)
        native.isect_masks = self._take("isect_masks", native.max_isects, torch.int16)
        self.backend.call("bin", view, self._arrays, native)

    def _binned_bands(self, view: abi.View) -> Iterator[tuple[abi.View, bool]]:
        """Yield (view of a band, whether it is the last one), each band binned when it is its turn."""
        if len(self.bands) <= 1:
            yield view, True
            return
        for band in self.bands:
            part = abi.View.from_buffer_copy(view)
            part.tile_row_begin, part.tile_row_end = band.begin, band.end
            self.native.max_isects = max(1, band.isects)
            self._bin(part)
            yield part, band is self.bands[-1]
        self.native.max_isects = sum(band.isects for band in self.bands)

    def _plan_bands(self, view: abi.View, bound: int, is_guess: bool, with_grads: bool) -> list[Band]:
        """Return one band where ``bound`` tile intersections fit the budget, else several.

        is_guess: ``bound`` is a capacity with slack, see bin(); the true bound may be less.
        """
        assert self._arrays is not None
        if self.isect_budget.grants(
            self._arrays.n, view, self.native, bound, with_grads=with_grads, has_slack=is_guess
        ):
            return [Band(0, tile_rows_of(view.height), bound)]
        if is_guess:
            return self._plan_bands(view, self.max_isects(), False, with_grads)
        overflow = self._overflow(view, bound, None, with_grads)
        if overflow.is_absurd():
            raise overflow.refusal()
        tile_row_isects = torch.zeros(tile_rows_of(view.height), dtype=torch.int64, device=self.backend.device)
        self.backend.call("tile_row_isects", view, self._arrays, self.native, address(tile_row_isects))
        counts: list[int] = tile_row_isects.tolist()
        try:
            bands = plan_bands(counts, self.isect_budget.max_isects(view, self.native, with_grads))
        except ValueError:
            raise self._overflow(view, bound, max(counts), with_grads).refusal() from None
        self.isect_budget.grant_bands(view, self.native, max(band.isects for band in bands), with_grads)
        if not self.isect_budget.budget.reported:
            self.isect_budget.budget.reported = True
            wanted, left = self.isect_budget.nbytes(view, self.native, bound, with_grads), self.isect_budget.left()
            _log.warning(
                "the %s tile intersections of a %dx%d view want %s, and %s are left: it is made in %d bands, with the "
                "same bits but slower", f"{bound:,}", view.width, view.height, gib(wanted), gib(left), len(bands),
            )  # fmt: skip
        return bands

    def _overflow(
        self, view: abi.View, bound: int, fullest_tile_row: int | None, with_grads: bool
    ) -> IntersectionOverflow:
        """Return the counts of a view that is over the budget, for the error message."""
        slots = self._padded()

        def chunks(name: str, dtype: torch.dtype, numel: int) -> Tensor:
            return self.arena.take(name, numel, dtype)[:numel].view(slots // abi.CHUNK, -1)

        visible = chunks("chunk_counts", torch.int64, 2 * (slots // abi.CHUNK))[:, 0]
        ids, tiles = (chunks(name, torch.int32, slots) for name in ("ids", "tiles_per_gauss"))
        nbytes = self.isect_budget.nbytes
        return IntersectionOverflow(
            view.width,
            view.height,
            tiles_of(view),
            int(visible.sum()),
            bound,
            nbytes(view, self.native, bound, with_grads),
            None if fullest_tile_row is None else nbytes(view, self.native, fullest_tile_row, with_grads),
            self.isect_budget.left(),
            # Projected Gaussians from another process come without their scales.
            Largest([], [], []) if self._source is None else Largest.of(ids, tiles, visible, self._source.log_scales),
        )

    def _begin_sums(self) -> tuple[int, int]:
        """Return zeros for the sums of intersection gradients, and for the flags of Gaussians that have any."""
        padded = self._padded()
        # An earlier backward pass of this view has left it at its flags (_end_sums).
        self.native.tiles_per_gauss = self._take("tiles_per_gauss", 0, torch.int32)
        sums = self.arena.take("isect_grad_sums", padded * abi.ISECT_GRAD, self.backend.dtype).zero_()
        reached = self.arena.take("reached", padded, torch.int32).zero_()
        return address(sums), address(reached)

    def _end_sums(self, sums: int, reached: int) -> None:
        """Present the sums to project_vjp as one gradient for each Gaussian that has any, in their order."""
        padded = self._padded()
        starts = self.arena.take("isect_grad_starts", padded, torch.int32)
        torch.arange(padded, dtype=torch.int32, out=starts[:padded])
        self.native.isect_grads, self.native.tiles_per_gauss = sums, reached

    def _padded(self) -> int:
        """Return the slots of the arrays over visible Gaussians."""
        assert self._arrays is not None
        return -(-int(self._arrays.n) // abi.CHUNK) * abi.CHUNK

    def _take(self, name: str, numel: int, dtype: torch.dtype) -> int:
        return address(self.arena.take(name, numel, dtype))


def view_of(
    camera: Camera,
    *,
    sh_degree: int,
    antialiased: bool,
    with_depth: bool,
    viewmat: Tensor | None = None,
    z_range: tuple[float, float] | None = None,
) -> abi.View:
    """Return a camera for the native side; ``viewmat`` [4, 4] replaces the camera's pose.

    z_range: camera z, world units, between which a mean has to lie for its Gaussian to be seen; by default from the
        camera's near plane on.
    Raises ValueError for an image without pixels, for focal lengths that are not positive, for numbers of the camera
    that are not finite, for a pose whose last row is not 0 0 0 1, for a ``z_range`` that is no pair, and for a near
    plane below 0 of another model than the pinhole; TypeError for sizes that are no integers.
    """
    width, height = (_pixels(name, size) for name, size in (("width", camera.width), ("height", camera.height)))
    if z_range is not None and (not isinstance(z_range, Sequence) or len(z_range) != 2):
        raise ValueError(f"z_range is {z_range!r}, not a pair of least and greatest camera z")
    near, far = (camera.near, Z_FAR) if z_range is None else z_range
    _check_numbers(camera)
    if math.isnan(near) or math.isnan(far):
        raise ValueError(f"z_range is {z_range!r}; NaN is no limit")
    if near < 0.0 and camera.model != "pinhole":
        raise ValueError(
            f"the near plane of the {camera.model} camera is {near}: what lies behind a camera is not drawn"
        )
    if viewmat is None and not np.isfinite(camera.viewmat).all():
        raise ValueError("the camera's viewmat has numbers that are not finite")
    pose = camera.viewmat if viewmat is None else viewmat.detach().cpu().double().numpy()
    if np.abs(pose[3] - _LAST_ROW).max() > _ROUNDING:  # not where it is NaN: a pose that is trained may diverge
        raise ValueError(
            f"the last row of the camera's viewmat is {pose[3].tolist()}, not [0, 0, 0, 1]; is the matrix transposed, "
            "as INRIA's world_view_transform is?"
        )
    return abi.View(
        width=width,
        height=height,
        sh_degree=sh_degree,
        antialiased=antialiased,
        with_depth=with_depth,
        tile_row_begin=0,
        tile_row_end=tile_rows_of(height),
        viewmat=(ctypes.c_double * 16)(*pose.reshape(16).tolist()),
        fx=camera.fx,
        fy=camera.fy,
        cx=camera.cx,
        cy=camera.cy,
        z_near=near,
        z_far=far,
        camera_model=abi.CAMERA_MODELS[camera.model],
    )


#: The last row of a matrix that moves points rigidly, and how far rounding takes it away, half precision included.
_LAST_ROW, _ROUNDING = np.array([0.0, 0.0, 0.0, 1.0]), 1e-3


def _check_numbers(camera: Camera) -> None:
    for name in ("fx", "fy"):
        if not 0.0 < getattr(camera, name) < math.inf:
            raise ValueError(f"the camera's {name} is {getattr(camera, name)}; a focal length is positive, in pixels")
    for name in ("cx", "cy", "near"):
        if not math.isfinite(getattr(camera, name)):
            raise ValueError(f"the camera's {name} is {getattr(camera, name)}, not a finite number")


#: The largest side of an image that the kernels can count; larger ones would wrap around.
_MAX_SIDE = 2**31 - 1


def _pixels(name: str, size: object) -> int:
    try:
        pixels = operator.index(size)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"the camera's {name} is {size!r}, not an integer") from None
    if pixels < 1:
        raise ValueError(f"the camera's {name} is {pixels}; an image has at least one pixel")
    if pixels > _MAX_SIDE:
        raise ValueError(f"the camera's {name} is {pixels}, more than {_MAX_SIDE:,} pixels")
    return pixels


def tile_rows_of(height: int) -> int:
    """Return the tile rows of an image of ``height`` pixels."""
    return -(-height // abi.TILE)


def tiles_of(view: abi.View) -> int:
    """Return the tiles of the whole image."""
    return -(-int(view.width) // abi.TILE) * tile_rows_of(view.height)
