"""The CUDA blend kernels under the emulator against the CPU twin, both given the very same lists of pairs."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from splatcli.gaussians import Gaussians
from splatcli.native import abi
from splatcli.native.backend import Backend, address
from splatcli.rasterizer.context import RasterContext, view_of
from splatcli.scene.camera import Camera
from tests.kernels.simt import simulated
from tests.native.cases import NEEDS_COMPILER
from tests.rasterizer.scenes import front_camera, random_gaussians, random_scene

pytestmark = [NEEDS_COMPILER, pytest.mark.usefixtures("simulation")]
#: SplatCall.threads that asks for each variant.
VARIANTS = {"simple": 1, "fast": 0}
#: Sums of a row: nine, depth, and two of magnitudes.
FIELDS, DEPTH, MAGNITUDES = 12, 9, slice(10, 12)


def crowded() -> tuple[Gaussians, Camera]:
    """More than 300 faint Gaussians over a single tile: several batches, none of which ends a pixel."""
    gaussians = random_gaussians(4, 330, sh_degree=0, spread=0.3, scale=0.3)
    gaussians.means[:, 2] += 4.0
    gaussians.logit_opacities.copy_(-4.0 + 0.3 * gaussians.logit_opacities)
    return gaussians, front_camera(16, 16, 20.0)


def opaque() -> tuple[Gaussians, Camera]:
    """Behind the first few Gaussians no pixel is alive: most pairs lie beyond the stop."""
    gaussians = random_gaussians(5, 180, sh_degree=0, spread=0.4, scale=1.5)
    gaussians.means[:, 2] += 4.0
    gaussians.logit_opacities.copy_(7.0 + gaussians.logit_opacities)
    return gaussians, front_camera(33, 18, 20.0)


def corner() -> tuple[Gaussians, Camera]:
    """All in the first tile of twelve; the others are empty."""
    gaussians = random_gaussians(6, 20, sh_degree=0, spread=0.05, scale=0.05)
    gaussians.means[:] += torch.tensor([-2.0, -1.4, 4.0])
    return gaussians, front_camera(64, 48, 50.0)


def clamped() -> tuple[Gaussians, Camera]:
    """So wide and opaque that alpha is clamped in many pixels, behind something that lets light through."""
    gaussians = random_gaussians(10, 24, sh_degree=0, spread=0.4, scale=8.0)
    gaussians.means[:, 2] += 4.0
    gaussians.logit_opacities.copy_(9.0 + gaussians.logit_opacities)
    gaussians.logit_opacities[gaussians.means[:, 2] < 3.9] = -3.0
    return gaussians, front_camera(33, 18, 20.0)


def long_tile(width: int = 48, height: int = 32, column: int = 0, row: int = 0) -> tuple[Gaussians, Camera]:
    """All within one tile, so many that the fast backward kernel cuts it into parts."""
    gaussians = random_gaussians(7, 600, sh_degree=0, spread=0.2, scale=0.1)
    gaussians.means[:, 2] = 4.0 + 0.1 * gaussians.means[:, 2]
    gaussians.logit_opacities.copy_(-4.0 + 0.3 * gaussians.logit_opacities)
    return gaussians, Camera("long.png", width, height, 20.0, 20.0, 16.0 * column + 8.0, 16.0 * row + 8.0, np.eye(4))


SCENES = {
    "odd": lambda: random_scene(1, 100, width=37, height=29, sh_degree=0),
    "narrow": lambda: random_scene(2, 100, width=5, height=47, sh_degree=0, scale=0.4),
    "crowded": crowded,
    "opaque": opaque,
    "corner": corner,
    "clamped": clamped,
    "long": long_tile,
    "nothing": lambda: random_scene(3, 0, width=18, height=17, sh_degree=0),
}


@dataclass
class Images:
    """Colour, alpha and depth, or their gradients; what is None is not asked for."""

    image: Tensor
    alpha: Tensor | None
    depth: Tensor | None

    @classmethod
    def empty(cls, view: abi.View, dtype: torch.dtype, *, depth: bool) -> Images:
        size = (view.height, view.width)
        image, alpha = (torch.full(s, float("nan"), dtype=dtype) for s in ((*size, 3), size))
        return cls(image, alpha, torch.full(size, float("nan"), dtype=dtype) if depth else None)

    @classmethod
    def gradients(cls, seed: int, view: abi.View, *, alpha: bool, depth: bool) -> Images:
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(view.height, view.width, 5, generator=generator)
        return cls(
            values[..., :3].contiguous(),
            values[..., 3].contiguous() if alpha else None,
            values[..., 4].contiguous() if depth else None,
        )

    def tensors(self) -> list[Tensor]:
        return [t for t in (self.image, self.alpha, self.depth) if t is not None]

    def to(self, dtype: torch.dtype) -> Images:
        return Images(*(None if t is None else t.to(dtype) for t in (self.image, self.alpha, self.depth)))

    def native(self) -> abi.Images:
        return abi.Images(
            image=address(self.image),
            alpha=None if self.alpha is None else address(self.alpha),
            depth=None if self.depth is None else address(self.depth),
        )


@dataclass
class Bins:
    """A view projected and binned by the portable CPU library."""

    context: RasterContext
    view: abi.View
    gaussians: Gaussians

    @classmethod
    def of(cls, gaussians: Gaussians, camera: Camera, *, with_depth: bool) -> Bins:
        context = RasterContext(Backend.cpu(isa="portable", threads=1))
        view = view_of(camera, sh_degree=0, antialiased=False, with_depth=with_depth)
        context.bin(view, context.project(view, gaussians))
        return cls(context, view, gaussians)

    @property
    def isects(self) -> int:
        return self.context.native.isects

    @property
    def tiles(self) -> int:
        return -(-self.view.width // abi.TILE) * -(-self.view.height // abi.TILE)


class Blender:
    """Both directions of one backend over given bins, with outputs of its own that start as NaN."""

    def __init__(self, bins: Bins, backend: Backend, *, overflow: bool = False, magnitudes: bool = True) -> None:
        self.bins, self.backend = bins, backend
        native = abi.Frame()
        ctypes.memmove(ctypes.byref(native), ctypes.byref(bins.context.native), ctypes.sizeof(native))
        projected = bins.context.arena.take("projected", 0, torch.float32)
        self.projected = projected.to(backend.dtype)
        self.counters = torch.tensor([0, 0, bins.isects, int(overflow)])
        self.tile_ends = torch.full((bins.tiles,), -7, dtype=torch.int32)
        self.rows = torch.full((bins.isects, abi.ISECT_GRAD), float("nan"), dtype=backend.dtype)
        self.partials = torch.full((bins.tiles, 3), float("nan"), dtype=backend.dtype)
        self.v_background = torch.full((3,), float("nan"), dtype=backend.dtype)
        self.background = torch.tensor([0.3, 0.6, 0.1], dtype=backend.dtype)
        native.projected, native.isect_grads = address(self.projected), address(self.rows)
        native.counters, native.tile_ends = address(self.counters), address(self.tile_ends)
        native.with_abs = magnitudes
        self.native = native

    def blend(self) -> Images:
        view = self.bins.view
        out = Images.empty(view, self.backend.dtype, depth=bool(view.with_depth))
        self.backend.call("blend", view, self.native, address(self.background), out.native())
        return out

    def blend_vjp(self, out: Images, v_out: Images, *, background: bool = True) -> Tensor:
        """[pairs, FIELDS] rows."""
        self.backend.call(
            "blend_vjp",
            self.bins.view,
            self.native,
            address(self.background),
            out.native(),
            v_out.native(),
            address(self.partials) if background else None,
            address(self.v_background) if background else None,
        )
        return self.rows[:, :FIELDS]


def gpu_of(variant: str) -> Backend:
    return simulated(threads=VARIANTS[variant])


def portable() -> Backend:
    return Backend.cpu(isa="portable", threads=1)


def same_bits(got: Tensor, expected: Tensor) -> bool:
    return torch.equal(got.view(torch.int32), expected.view(torch.int32))


def assert_rows(got: Tensor, expected: Tensor, tolerance: float) -> None:
    """Each field within a tolerance of its largest number: a sum rounds as its terms do, and they cancel."""
    scale = expected.abs().amax(dim=0, keepdim=True) if len(expected) else torch.ones(1, FIELDS)
    error = (got.double() - expected.double()).abs()
    assert bool((error <= tolerance * scale).all()), f"{(error / scale).amax(dim=0)} of the largest"


@pytest.mark.parametrize("with_depth", [False, True], ids=["colour", "depth"])
@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_images_have_the_bits_of_the_cpu(variant: str, scene: str, with_depth: bool) -> None:
    bins = Bins.of(*SCENES[scene](), with_depth=with_depth)
    cpu, gpu = Blender(bins, portable()), Blender(bins, gpu_of(variant))
    expected, got = cpu.blend(), gpu.blend()
    for have, want in zip(got.tensors(), expected.tensors(), strict=True):
        assert same_bits(have, want)
    starts = bins.context.arena.take("tile_starts", 0, torch.int64)[: bins.tiles + 1]
    assert bool((gpu.tile_ends >= 0).all())
    assert bool((gpu.tile_ends <= starts.diff()).all())


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_block_that_is_not_in_the_mask_is_not_touched(variant: str) -> None:
    bins = Bins.of(*SCENES["odd"](), with_depth=True)
    masks = bins.context.arena.take("isect_masks", 0, torch.int16)[: bins.isects]
    generator = torch.Generator().manual_seed(1)
    masks &= torch.randint(-(2**15), 2**15, masks.shape, generator=generator, dtype=torch.int16)
    cpu, gpu = Blender(bins, portable()), Blender(bins, gpu_of(variant))
    expected, got = cpu.blend(), gpu.blend()
    for have, want in zip(got.tensors(), expected.tensors(), strict=True):
        assert same_bits(have, want)
    v_out = Images.gradients(9, bins.view, alpha=True, depth=True)
    assert_rows(gpu.blend_vjp(got, v_out), cpu.blend_vjp(expected, v_out), 3e-6)


def test_scenes_reach_what_they_are_for() -> None:
    def tile_isects(name: str) -> tuple[Tensor, Tensor]:
        bins = Bins.of(*SCENES[name](), with_depth=False)
        blender = Blender(bins, portable())
        blender.blend()
        starts = bins.context.arena.take("tile_starts", 0, torch.int64)[: bins.tiles + 1]
        return starts.diff(), blender.tile_ends

    isects, ends = tile_isects("crowded")
    assert isects.tolist() == ends.tolist()
    assert int(isects[0]) > 300
    isects, ends = tile_isects("opaque")
    assert bool((ends < isects - 64).any()), "a batch lies beyond the stop"
    isects, _ = tile_isects("corner")
    assert int((isects == 0).sum()) >= 8
    assert int(isects[0]) > 0


@pytest.mark.parametrize(
    ("alpha", "depth", "background", "magnitudes"),
    [
        (True, True, True, True),
        (False, True, False, False),
        (True, False, True, False),
        (False, False, False, False),
        (False, False, False, True),
    ],
    ids=["all", "depth", "alpha", "colour", "magnitudes"],
)
@pytest.mark.parametrize("scene", ["odd", "narrow"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_match_the_cpu(
    variant: str, scene: str, alpha: bool, depth: bool, background: bool, magnitudes: bool
) -> None:
    check_rows(variant, scene, alpha=alpha, depth=depth, background=background, magnitudes=magnitudes)


@pytest.mark.parametrize("scene", ["crowded", "opaque", "corner", "clamped", "long", "nothing"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_match_the_cpu_where_tiles_are_unusual(variant: str, scene: str) -> None:
    check_rows(variant, scene, alpha=True, depth=True, background=True, magnitudes=True)


def check_rows(variant: str, scene: str, *, alpha: bool, depth: bool, background: bool, magnitudes: bool) -> None:
    bins = Bins.of(*SCENES[scene](), with_depth=True)
    v_out = Images.gradients(9, bins.view, alpha=alpha, depth=depth)
    backends = (portable(), gpu_of(variant), Backend.cpu(torch.float64))
    cpu, gpu, exact = (Blender(bins, backend, magnitudes=magnitudes) for backend in backends)
    out = cpu.blend()
    gpu.blend()
    exact.tile_ends.copy_(cpu.tile_ends)
    expected = cpu.blend_vjp(out, v_out, background=background)
    got = gpu.blend_vjp(out, v_out, background=background)
    truth = exact.blend_vjp(exact.blend(), v_out.to(torch.float64), background=background)
    assert_rows(got, expected, 3e-6)
    assert_rows(got, truth, 1e-4)
    assert torch.equal(got == 0, expected == 0), "the same intersections contribute"
    if not depth:
        assert bool((got[:, DEPTH] == 0).all())
    assert bool((got[:, MAGNITUDES] != 0).any()) == (magnitudes and bins.isects > 0)
    if background:
        torch.testing.assert_close(gpu.v_background, cpu.v_background, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gpu.partials, cpu.partials, rtol=1e-5, atol=1e-5)
    else:
        assert bool(gpu.v_background.isnan().all() and gpu.partials.isnan().all())


def test_cutting_a_long_tile_changes_no_bit() -> None:
    tile = 20  # of 36: two blocks look for long tiles, and this is not the first that either sees
    bins = Bins.of(*long_tile(144, 64, column=tile % 9, row=tile // 9), with_depth=True)
    v_out = Images.gradients(9, bins.view, alpha=True, depth=True)
    gpu = Blender(bins, gpu_of("fast"))
    out = gpu.blend()
    assert int(gpu.tile_ends[tile]) > 512, "else nothing is cut"
    whole = gpu.blend_vjp(out, v_out).clone()
    gpu.tile_ends[tile] = 512  # at which it is not long yet
    front = gpu.blend_vjp(out, v_out)
    isect_grad_rows = bins.context.arena.take("isect_grad_rows", 0, torch.int32)[: int(bins.isects)].long()
    assert same_bits(front[isect_grad_rows[:512]], whole[isect_grad_rows[:512]])
    assert bool((front[isect_grad_rows[512:]] == 0).all())
    assert int((whole[:, 0] != 0).sum()) > 512


@pytest.mark.parametrize("rows", [(0, 4), (1, 4)], ids=["whole", "band"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_order_of_tiles_changes_a_bit(variant: str, rows: tuple[int, int]) -> None:
    bins = Bins.of(*long_tile(144, 64, column=2, row=2), with_depth=True)
    v_out = Images.gradients(9, bins.view, alpha=True, depth=True)
    bins.view.tile_row_begin, bins.view.tile_row_end = rows
    tiles = torch.arange(9 * rows[0], 9 * rows[1], dtype=torch.int32)
    shuffled = tiles[torch.randperm(len(tiles), generator=torch.Generator().manual_seed(3))]
    results = []
    for order in (None, tiles.flip(0), shuffled):
        gpu = Blender(bins, gpu_of(variant))
        gpu.native.tile_order = None if order is None else address(order)
        out = gpu.blend()
        gpu.blend_vjp(out, v_out, background=rows[0] == 0)
        results.append([*out.tensors(), gpu.tile_ends, gpu.rows, gpu.partials, gpu.v_background])
    assert int(results[0][-4][9 * 2 + 2]) > 512, "else nothing is cut"
    for other in results[1:]:
        for have, want in zip(other, results[0], strict=True):
            assert same_bits(have, want)


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_schedule_changes_a_bit(variant: str) -> None:
    bins = Bins.of(*random_scene(8, 60, width=21, height=19, sh_degree=0, scale=0.4), with_depth=True)
    v_out = Images.gradients(9, bins.view, alpha=True, depth=True)
    backend = gpu_of(variant)
    results = []
    try:
        for seed in (0, 1, 2):
            backend.library.simt_set_schedule(ctypes.c_uint64(seed))
            gpu = Blender(bins, backend)
            out = gpu.blend()
            gpu.blend_vjp(out, v_out)
            results.append([*out.tensors(), gpu.rows, gpu.partials, gpu.v_background])
    finally:
        backend.library.simt_set_schedule(ctypes.c_uint64(0))
    for other in results[1:]:
        for have, want in zip(other, results[0], strict=True):
            assert same_bits(have, want)


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_is_written_after_an_overflow(variant: str) -> None:
    bins = Bins.of(*SCENES["odd"](), with_depth=True)
    gpu = Blender(bins, gpu_of(variant), overflow=True)
    out = gpu.blend()
    gpu.blend_vjp(out, Images.gradients(9, bins.view, alpha=True, depth=True))
    for tensor in (*out.tensors(), gpu.rows, gpu.partials, gpu.v_background):
        assert bool(tensor.isnan().all())
    assert bool((gpu.tile_ends == -7).all())
