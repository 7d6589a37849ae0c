"""Frame: the stages of one view and the memory between them.

Memory, float32, for N Gaussians of which V are visible and I tile pairs (bounded by B, the tiles of their boxes):
  a Gaussian        records 64 + id 4 + rows 8 = 76 B, touched only where visible
  a visible one     depth sort 16 B
  a pair            while binning 12 B x B; lists 10 B x B; in the backward pass one row of 64 B x I
  a pixel           image 12 + alpha 4; with gradients twice that
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass, field

import torch
from torch import Tensor

from splatcli.errors import ResourceError
from splatcli.gaussians import Gaussians
from splatcli.native import abi
from splatcli.native.call import Backend, address
from splatcli.scene.camera import Camera

Z_NEAR = 0.01
Z_FAR = 1e10

#: Bytes of a tile pair while it is binned and listed. Its row comes to it; rows are counted exactly only later, so the
#: budget takes the bound for them too.
PAIR_BYTES = 12 + 10


def view_of(
    camera: Camera, *, sh_degree: int, antialiased: bool, with_depth: bool, viewmat: Tensor | None = None
) -> abi.View:
    """A camera for the native side; ``viewmat`` [4, 4] replaces the camera's pose."""
    pose = camera.viewmat if viewmat is None else viewmat.detach().cpu().double().numpy()
    return abi.View(
        width=camera.width,
        height=camera.height,
        sh_degree=sh_degree,
        antialiased=antialiased,
        with_depth=with_depth,
        viewmat=(ctypes.c_double * 16)(*pose.reshape(16).tolist()),
        fx=camera.fx,
        fy=camera.fy,
        cx=camera.cx,
        cy=camera.cy,
        z_near=Z_NEAR,
        z_far=Z_FAR,
    )


def memory_budget(device: torch.device) -> int:
    """Bytes that the rasterizer may take for tile pairs: nine tenths of what is free now on ``device``."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(0.9 * (free + unused))
    try:
        return int(0.9 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return 4 << 30


class Arena:
    """Named buffers that only grow, so that a training loop stops allocating after its first views."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """At least ``numel`` uninitialised numbers, the same memory as last time where it suffices."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < numel or buffer.dtype != dtype:
            # Dropped before its successor is made: the two are never alive together.
            self._buffers.pop(name, None)
            del buffer
            buffer = torch.empty(max(numel + numel // 4, 64), dtype=dtype, device=self.device)
            self._buffers[name] = buffer
        return buffer


@dataclass(slots=True)
class Frame:
    """One view in the making: call the stages in the order of the methods."""

    backend: Backend
    arena: Arena = field(init=False)
    #: Bytes for tile pairs; None asks the system for what is free when a view needs more than before.
    budget: int | None = None
    native: abi.Frame = field(default_factory=abi.Frame)
    #: [COUNTERS] int64, where a deferred backend counts.
    counters: Tensor | None = None
    _largest_pairs: int = 0

    def __post_init__(self) -> None:
        self.arena = Arena(self.backend.device)
        if self.backend.deferred:
            self.counters = torch.zeros(abi.COUNTERS, dtype=torch.int64, device=self.backend.device)
            self.native.counters = address(self.counters)

    def _take(self, name: str, numel: int, dtype: torch.dtype) -> int:
        return address(self.arena.take(name, numel, dtype))

    def project(self, view: abi.View, gaussians: Gaussians, adam: abi.Adam | None = None) -> abi.GaussianArrays:
        """Activates, projects and colours; counts the visible and bounds their tile pairs.

        adam: makes up for the steps that the SH rest of visible Gaussians has missed (see AdamState).
        """
        arrays = self.backend.arrays(gaussians)
        padded = -(-len(gaussians) // abi.CHUNK) * abi.CHUNK
        native = self.native
        native.records = self._take("records", padded * abi.RECORD, self.backend.dtype)
        native.ids = self._take("ids", padded, torch.int32)
        native.chunk_counts = self._take("chunk_counts", 2 * (padded // abi.CHUNK), torch.int64)
        native.row_starts = self._take("row_starts", padded, torch.int32)
        native.row_counts = self._take("row_counts", padded, torch.int32)
        native.visible = padded  # where counts are deferred, this is the room; else a result
        self.backend.call("project", view, arrays, native, adam)
        return arrays

    def bin(self, view: abi.View, arrays: abi.GaussianArrays, *, room: int | None = None) -> None:
        """Lists what reaches each tile, front to back. Raises ResourceError, before allocating, beyond the budget.

        room: pairs to make room for, where the backend defers its counts. With None the bound is fetched, which waits
            for the device; with a number nothing waits, and the overflow flag tells when it was too small.
        """
        native = self.native
        if self.counters is not None:
            native.pair_bound = self.pair_bound() if room is None else room
        self._check_budget(view)
        tiles = -(-view.width // abi.TILE) * -(-view.height // abi.TILE)
        native.workspace_bytes = self.backend.call("bin_bytes", view, native)
        native.workspace = self._take("workspace", native.workspace_bytes, torch.uint8)
        native.tile_starts = self._take("tile_starts", tiles + 1, torch.int64)
        native.tile_ends = self._take("tile_ends", tiles, torch.int32)
        native.pair_records = self._take("pair_records", native.pair_bound, torch.int32)
        native.pair_rows = self._take("pair_rows", native.pair_bound, torch.int32)
        native.pair_masks = self._take("pair_masks", native.pair_bound, torch.int16)
        self.backend.call("bin", view, arrays, native)

    def pair_bound(self) -> int:
        """At least the number of pairs of the view that was projected last; waits for a deferred backend."""
        if self.counters is None:
            return int(self.native.pair_bound)
        return max(1, int(self.counters[abi.COUNT_PAIR_BOUND]))

    def blend(self, view: abi.View, background: Tensor, image: Tensor, alpha: Tensor, depth: Tensor | None) -> None:
        """Fills image [H, W, 3], alpha [H, W] and, with_depth, depth [H, W]; background [3]."""
        self.backend.call(
            "blend", view, self.native, self.backend.pointer(background, 3), self.images(view, image, alpha, depth)
        )

    def blend_vjp(
        self,
        view: abi.View,
        background: Tensor,
        out: abi.Images,
        v_out: abi.Images,
        v_background: Tensor | None = None,
    ) -> None:
        """Gradient rows of the pairs, and of the background [3], from those of the images."""
        pairs = self.native.pairs if self.counters is None else self.native.pair_bound
        self.native.rows = self._take("rows", pairs * abi.ROW, self.backend.dtype)
        partials = None
        if v_background is not None:
            tiles = -(-view.width // abi.TILE) * -(-view.height // abi.TILE)
            partials = self._take("background_partials", 3 * tiles, self.backend.dtype)
        self.backend.call(
            "blend_vjp",
            view,
            self.native,
            self.backend.pointer(background, 3),
            out,
            v_out,
            partials,
            None if v_background is None else self.backend.pointer(v_background, 3),
        )

    def project_vjp(
        self,
        view: abi.View,
        arrays: abi.GaussianArrays,
        *,
        gradients: abi.GaussianArrays | None = None,
        adam: abi.Adam | None = None,
        v_viewmat: Tensor | None = None,
        grad2d: Tensor | None = None,
        count: Tensor | None = None,
    ) -> None:
        """Gradients of the raw parameters into ``gradients``, or at once through ``adam`` into the parameters.

        v_viewmat: [4, 4], filled. grad2d, count: [N], added to (see GrowthStats).
        """
        pointer = self.backend.pointer
        out = abi.ProjectGrad()
        if gradients is not None:
            out.gradients = ctypes.pointer(gradients)
        if adam is not None:
            out.adam = ctypes.pointer(adam)
        if v_viewmat is not None:
            chunks = -(-arrays.n // abi.CHUNK)
            out.pose_partials = self._take("pose_partials", chunks * abi.POSE, self.backend.dtype)
            out.v_viewmat = pointer(v_viewmat, 4, 4)
        if grad2d is not None and count is not None:
            out.grad2d, out.count = pointer(grad2d, arrays.n), pointer(count, arrays.n)
        self.backend.call("project_vjp", view, arrays, self.native, out)

    def images(self, view: abi.View, image: Tensor, alpha: Tensor | None, depth: Tensor | None) -> abi.Images:
        """Pointers to images or to their gradients; what is None is left out."""
        h, w = view.height, view.width
        pointer = self.backend.pointer
        return abi.Images(
            image=pointer(image, h, w, 3),
            alpha=None if alpha is None else pointer(alpha, h, w),
            depth=None if depth is None else pointer(depth, h, w),
        )

    def _check_budget(self, view: abi.View) -> None:
        pairs = self.native.pair_bound
        if pairs <= self._largest_pairs:
            return
        need = pairs * (PAIR_BYTES + abi.ROW * self.backend.dtype.itemsize)
        budget = memory_budget(self.backend.device) if self.budget is None else self.budget
        if need > budget:
            visible = self.native.visible if self.counters is None else int(self.counters[abi.COUNT_VISIBLE])
            each = pairs / max(1, visible)
            raise ResourceError(
                f"{visible:,} visible Gaussians would cover {pairs:,} tiles ({each:,.0f} each) of the "
                f"{view.width}x{view.height} image: {need / 2**30:.1f} GiB wanted, {budget / 2**30:.1f} GiB allowed",
                remedy="a smaller --resolution or --cap-max needs less; if the Gaussians come from a file of another "
                "program, check that its scales are logarithms (already activated ones look this big)",
            )
        self._largest_pairs = pairs
