"""A view that does not fit into memory at once is made in bands of tile rows, with the same bits."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from scipy.spatial.transform import Rotation
from torch import Tensor

from splatcli.errors import ResourceError
from splatcli.gaussians import GROUPS, Gaussians
from splatcli.native import abi
from splatcli.native.backend import Backend
from splatcli.rasterizer import AdamState, AsyncEngine, DensifyStats, NativeEngine, StepInputs
from splatcli.rasterizer.context import RasterContext, view_of
from splatcli.rasterizer.memory_budget import ISECT_BUFFERS, Arena, Band, plan_bands
from splatcli.rasterizer.rendering import render
from splatcli.scene.camera import Camera
from tests.kernels.simt import simulated
from tests.native.cases import ISAS, NEEDS_COMPILER, Weights, bits, float32, float64
from tests.poisoned import take
from tests.rasterizer.fixed_budget import FixedBudget
from tests.rasterizer.scenes import leaves, random_camera, random_gaussians, random_image, random_scene

BACKENDS: dict[str, Callable[[], Backend]] = {
    **{f"cpu-{isa}": (lambda isa=isa: float32(isa, threads=2)) for isa in ISAS},
    "cpu-float64": float64,
    "simt": simulated,
    "simt-simple": lambda: simulated(threads=1),
}


@pytest.mark.parametrize(
    ("lines", "most", "expected"),
    [
        ([3, 3, 3], 9, [Band(0, 3, 9)]),
        ([3, 3, 3], 8, [Band(0, 2, 6), Band(2, 3, 3)]),
        ([3, 3, 3], 3, [Band(0, 1, 3), Band(1, 2, 3), Band(2, 3, 3)]),
        ([0, 9, 0, 0], 9, [Band(0, 4, 9)]),
        ([9, 0, 1], 9, [Band(0, 2, 9), Band(2, 3, 1)]),
        ([2**40, 2**40], 2**41, [Band(0, 2, 2**41)]),
        ([0], 0, [Band(0, 1, 0)]),
    ],
)
def test_bands_hold_as_many_lines_as_fit(lines: list[int], most: int, expected: list[Band]) -> None:
    assert plan_bands(lines, most) == expected


def test_a_line_that_does_not_fit_is_no_band() -> None:
    with pytest.raises(ValueError, match="tile row 1 has 5 tile intersections, 4 fit"):
        plan_bands([1, 5, 1], 4)


@dataclass
class Peak:
    """The most bytes that buffers for pairs ever held together, slack included."""

    nbytes: int = 0


@pytest.fixture
def peak(monkeypatch: pytest.MonkeyPatch) -> Peak:
    found = Peak()
    plain = Arena.take

    def take(self: Arena, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        buffer = plain(self, name, numel, dtype)
        found.nbytes = max(found.nbytes, self.nbytes(*ISECT_BUFFERS))
        return buffer

    monkeypatch.setattr(Arena, "take", take)
    return found


def bytes_of(gaussians: Gaussians, camera: Camera, backend: Backend, *, with_grads: bool) -> tuple[int, int]:
    """What the pairs of the whole view take, and those of its fullest line alone."""
    context = RasterContext(backend, FixedBudget(1 << 40))
    view = view_of(camera, sh_degree=0, antialiased=False, with_depth=True)
    arrays = context.project(view, gaussians)
    context._arrays = arrays
    lines = torch.zeros(view.tile_row_end, dtype=torch.int64)
    backend.call("tile_row_isects", view, arrays, context.native, lines.data_ptr())
    assert int(lines.sum()) == context.max_isects(), "the tile rows have the intersections of the image"
    assert int(lines.min()) >= 0
    return tuple(
        context.isect_budget.nbytes(view, context.native, int(n), with_grads) for n in (lines.sum(), lines.max())
    )


def outcome(
    gaussians: Gaussians, camera: Camera, backend: Backend, budget: FixedBudget, *, antialiased: bool = False
) -> list[bytes]:
    """Images and every gradient, bit by bit; those of a second backward pass are the same."""
    parameters = leaves(gaussians.map(lambda t: t.to(backend.dtype)))
    background = torch.tensor([0.3, 0.6, 0.1], dtype=backend.dtype, requires_grad=True)
    pose = torch.from_numpy(camera.viewmat).to(backend.dtype).requires_grad_()
    out = render(
        parameters,
        camera,
        background=background,
        viewmat=pose,
        antialiased=antialiased,
        backend=backend,
        budget=budget,
    )
    inputs = [*(tensor for _, tensor in parameters.items()), background, pose]
    weights = Weights.random(1, camera)
    weights.backward(out.image, out.alpha, out.depth, retain_graph=True)
    first = bits(*(tensor.grad for tensor in inputs if tensor.grad is not None))
    assert len(first) == len(inputs)
    for tensor in inputs:
        tensor.grad = None
    weights.backward(out.image, out.alpha, out.depth)
    assert bits(*(tensor.grad for tensor in inputs if tensor.grad is not None)) == first
    return [*bits(out.image, out.alpha, out.depth), *first]


@pytest.mark.parametrize(
    ("name", "part", "antialiased"),
    [(name, 0.3, True) for name in BACKENDS] + [(name, 0.0, False) for name in BACKENDS if name != "simt-simple"],
)
@NEEDS_COMPILER
def test_bands_change_no_bit_of_images_and_gradients(name: str, part: float, antialiased: bool, peak: Peak) -> None:
    backend = BACKENDS[name]()
    n, width, height = (250, 30, 85) if backend.deferred else (330, 70, 101)  # the emulator takes its time
    gaussians, camera = random_scene(5, n, width=width, height=height, sh_degree=2, scale=0.3)
    gaussians.log_scales[0] = 2.0  # all lines of the image
    whole, line = bytes_of(gaussians.map(lambda t: t.to(backend.dtype)), camera, backend, with_grads=True)
    sums = -(-n // abi.CHUNK) * abi.CHUNK * (abi.ISECT_GRAD * backend.dtype.itemsize + 4)
    expected = outcome(gaussians, camera, backend, FixedBudget(1 << 40), antialiased=antialiased)
    peak.nbytes = 0
    budget = FixedBudget(int(line + sums + part * (whole - line - sums)))
    assert outcome(gaussians, camera, backend, budget, antialiased=antialiased) == expected
    assert budget.reported, "the bands are reported"
    assert 0 < peak.nbytes <= budget.nbytes


@NEEDS_COMPILER
def test_no_gradients_no_memory_for_them(peak: Peak) -> None:
    gaussians, camera = random_scene(5, 330, width=70, height=101, sh_degree=0, scale=0.3)
    backend = float32()
    whole, _ = bytes_of(gaussians, camera, backend, with_grads=False)
    budget = FixedBudget(whole)
    with torch.no_grad():
        fits = render(leaves(gaussians), camera, backend=backend, budget=budget)
    assert not budget.reported
    assert 0 < peak.nbytes <= whole
    budget = FixedBudget(whole - 1)
    banded = render(gaussians, camera, backend=backend, budget=budget)
    assert budget.reported
    assert bits(fits.image, fits.depth) == bits(banded.image, banded.depth)


@NEEDS_COMPILER
def test_a_crowded_tile_in_any_band_has_the_same_gradient() -> None:
    gaussians, camera = random_scene(7, 612, width=17, height=70, sh_degree=0, scale=0.02)
    gaussians.means[:590] *= 0.05  # more pairs in a tile than the fast kernel walks in one go
    gaussians.logit_opacities[:590] = -3.0
    gaussians.log_scales[590:] = 0.0
    for backend in (simulated(), float32("portable")):
        _, line = bytes_of(gaussians, camera, backend, with_grads=True)
        budget = FixedBudget(line + 768 * 68)
        assert outcome(gaussians, camera, backend, budget) == outcome(gaussians, camera, backend, FixedBudget(1 << 40))
        assert budget.reported


def trained(engine: NativeEngine | AsyncEngine, gaussians: Gaussians, cameras: list[Camera]) -> list[bytes]:
    """Parameters, moments, statistics and losses after a step on each camera."""
    gaussians, stats = gaussians.detach_clone(), DensifyStats.zeros(len(gaussians))
    adam = AdamState.zeros_like(gaussians)
    losses = []
    for k, camera in enumerate(cameras):
        target = (255 * random_image(k, camera.width, camera.height)).to(torch.uint8)
        lrs = dict.fromkeys(GROUPS, 1e-2)
        losses += engine.submit(
            gaussians, adam, StepInputs(camera, target, lrs, 1, torch.full((3,), 0.2), 0.2, False, stats)
        )
    losses += engine.drain()
    assert len(losses) == len(cameras)
    assert all(map(math.isfinite, losses))
    tensors = [t for g in (gaussians, adam.exp_avg, adam.exp_avg_sq) for _, t in g.items()]
    return [*bits(*tensors, stats.grad2d, stats.count), repr(losses).encode()]


def tightest(work: Callable[[FixedBudget], list[bytes]]) -> list[bytes]:
    """Return the result of ``work`` under about the smallest memory budget that it accepts, so in bands."""
    nbytes = 30_000
    while True:
        budget = FixedBudget(nbytes := int(1.1 * nbytes))
        with contextlib.suppress(ResourceError):
            done = work(budget)
            assert budget.reported
            return done


def passing_by(camera: Camera, like: Gaussians) -> Gaussians:
    """Thin Gaussians that pass outside the corners of the image: their rectangles overlap it, they reach no pixel."""
    passing = like.detach_clone()
    sides = torch.tensor([(1.0, -1.0), (-1.0, -1.0), (1.0, 1.0), (-1.0, 1.0)])[torch.arange(len(like)) % 4]
    corner = torch.tensor([camera.width, camera.height]) / 2 * (1 + sides) + 6 * sides
    depth = 4.0
    rays = (corner - torch.tensor([camera.cx, camera.cy])) / torch.tensor([camera.fx, camera.fy])
    points = torch.cat([rays * depth, torch.full((len(like), 1), depth)], 1).double()
    view = torch.from_numpy(camera.viewmat).double()
    passing.means.copy_((points - view[:3, 3]) @ view[:3, :3])
    # Long along the diagonal that passes the corner by, in the camera's axes and then in the world's.
    angle = torch.where(sides[:, 0] * sides[:, 1] < 0, math.pi / 4, -math.pi / 4).double()
    turned = torch.zeros(len(like), 3, 3, dtype=torch.float64)
    turned[:, 0, 0], turned[:, 0, 1] = angle.cos(), -angle.sin()
    turned[:, 1, 0], turned[:, 1, 1], turned[:, 2, 2] = angle.sin(), angle.cos(), 1.0
    attitudes = Rotation.from_matrix((view[:3, :3].T @ turned).numpy()).as_quat()
    passing.quats.copy_(torch.from_numpy(attitudes)[:, [3, 0, 1, 2]])
    passing.log_scales.copy_(torch.tensor([0.5, 0.01, 0.01]).log().expand(len(like), 3))
    passing.logit_opacities.fill_(2.0)
    return passing


@NEEDS_COMPILER
def test_gaussians_that_no_band_reaches_take_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where the flags of Gaussians of the view before, which reached it, were in the same place."""
    made: set[int] = set()

    def zeroed(arena: Arena, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        buffer = take(arena, name, numel, dtype)
        if id(buffer) not in made:
            made.add(id(buffer.zero_()))
            kept.append(buffer)
        return buffer

    kept: list[Tensor] = []
    monkeypatch.setattr(Arena, "take", zeroed)  # a flag that is left over is to count, and not to crash
    scene, camera = random_scene(11, 120, width=40, height=140, sh_degree=1, scale=0.2)
    passing = passing_by(camera, scene.map(lambda t: t[:40].clone()))
    mixed = Gaussians(**{n: torch.cat([t, getattr(passing, n)]) for n, t in scene.items()})
    context = RasterContext(simulated())
    context.project(view_of(camera, sh_degree=1, antialiased=False, with_depth=False), mixed)
    visible = context.visible_slots()[0]
    assert (visible >= 120).sum() > 20, "they are listed as visible"
    cameras = [replace(camera, fx=camera.fx / 2, fy=camera.fy / 2), camera]
    whole = trained(AsyncEngine(simulated()), mixed, cameras)
    assert tightest(lambda budget: trained(AsyncEngine(simulated(), budget=budget), mixed, cameras)) == whole
    counts = torch.frombuffer(bytearray(whole[-2]), dtype=torch.float32)
    first = trained(AsyncEngine(simulated()), mixed, cameras[:1])
    assert torch.equal(counts[120:], torch.frombuffer(bytearray(first[-2]), dtype=torch.float32)[120:])


@NEEDS_COMPILER
def test_training_in_bands_is_training(peak: Peak) -> None:
    gaussians, _ = random_scene(11, 300, sh_degree=1, scale=0.2)
    cameras = [random_camera(k, 64, 40 + 30 * (k % 3)) for k in range(5)]
    expected = trained(NativeEngine(float32(threads=2)), gaussians, cameras)
    backend = float32(threads=2)
    line = max(bytes_of(gaussians, camera, backend, with_grads=True)[1] for camera in cameras)
    peak.nbytes = 0
    budget = FixedBudget(int(1.2 * line) + 512 * 68)
    assert trained(NativeEngine(backend, budget=budget), gaussians, cameras) == expected
    assert budget.reported
    assert 0 < peak.nbytes <= budget.nbytes


@NEEDS_COMPILER
@pytest.mark.parametrize("capacity", [0, 10])
def test_training_behind_in_bands_is_training(capacity: int, peak: Peak) -> None:
    """room: asked of the first view, or too little for any, so that they overflow and come again."""
    gaussians, _ = random_scene(12, 60, sh_degree=1, scale=1.0)
    cameras = [random_camera(k, 20, height) for k, height in enumerate((66, 97))]
    backend = simulated()
    expected = trained(AsyncEngine(backend), gaussians, cameras)
    line = max(bytes_of(gaussians, camera, backend, with_grads=True)[1] for camera in cameras)
    peak.nbytes = 0
    budget = FixedBudget(int(1.2 * line) + 256 * 68)
    assert trained(AsyncEngine(backend, budget=budget, capacity=capacity), gaussians, cameras) == expected
    assert budget.reported
    assert 0 < peak.nbytes <= budget.nbytes


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.fixture
def speechless(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "splatcli")
    return caplog


@NEEDS_COMPILER
@pytest.mark.parametrize("backend", [lambda: float32(), simulated], ids=["cpu", "simt"])
def test_one_that_has_exploded_is_named(backend: Callable[[], Backend], peak: Peak) -> None:
    gaussians = random_gaussians(3, 300, sh_degree=0, scale=0.01)
    gaussians.log_scales[[17, 254]] = torch.tensor([[6.0, 0.0, 0.0], [5.0, 5.0, 5.0]])
    camera = random_camera(3, 160, 120)
    with pytest.raises(ResourceError) as caught:
        render(gaussians, camera, backend=backend(), budget=FixedBudget(1000))
    message = str(caught.value)
    assert "#17: 80 tiles, scale 403" in message
    assert "#254: 80 tiles, scale 148" in message
    assert "160x120" in message
    assert "for the fullest row of tiles alone" in message
    assert "1000 B" not in message
    assert "largest --vram-budget" not in message
    assert caught.value.exit_code == 4
    assert peak.nbytes == 0, "nothing was allocated for intersections"


@NEEDS_COMPILER
def test_what_is_only_too_much_asks_for_less() -> None:
    gaussians, camera = random_scene(5, 330, width=70, height=101, sh_degree=0, scale=0.1)
    with pytest.raises(ResourceError, match=r"smaller --resolution or --cap-max needs less, a larger --vram-budget"):
        render(gaussians, camera, backend=float32(), budget=FixedBudget(10_000))


@NEEDS_COMPILER
def test_a_scene_that_fits_comes_after_one_that_does_not(speechless: pytest.LogCaptureFixture) -> None:
    gaussians, camera = random_scene(5, 330, width=70, height=101, sh_degree=1, scale=0.3)
    budget = FixedBudget(3000)
    engine = NativeEngine(float32(), budget=budget)
    with pytest.raises(ResourceError):
        trained(engine, gaussians, [camera])
    budget.nbytes = 1 << 30
    assert trained(engine, gaussians, [camera]) == trained(NativeEngine(float32()), gaussians, [camera])
    assert not speechless.messages


@NEEDS_COMPILER
def test_bands_are_reported_once(speechless: pytest.LogCaptureFixture) -> None:
    gaussians, camera = random_scene(5, 330, width=70, height=101, sh_degree=0, scale=0.3)
    whole, line = bytes_of(gaussians, camera, float32(), with_grads=False)
    budget = FixedBudget((whole + line) // 2)
    for _ in range(3):
        render(gaussians, camera, backend=float32(), budget=budget)
    (message,) = speechless.messages
    assert "70x101 view" in message
    assert "bands, with the same bits but slower" in message


# --- the entries behind them -----------------------------------------------------------------------------------------


@NEEDS_COMPILER
@pytest.mark.parametrize("lines", [(-1, 2), (0, 0), (2, 2), (3, 2), (0, 8)])
def test_lines_outside_the_image_are_refused(lines: tuple[int, int]) -> None:
    gaussians, camera = random_scene(5, 20, width=70, height=101, sh_degree=0)
    view = view_of(camera, sh_degree=0, antialiased=False, with_depth=False)
    view.tile_row_begin, view.tile_row_end = lines
    for backend in (float32(), simulated()):
        with pytest.raises(ResourceError, match="tile rows"):
            RasterContext(backend).project(view, gaussians)


@NEEDS_COMPILER
def test_the_cpu_refuses_a_band_with_more_pairs_than_it_was_reported() -> None:
    gaussians, camera = random_scene(5, 330, width=70, height=101, sh_degree=0, scale=0.3)
    context = RasterContext(float32())
    view = view_of(camera, sh_degree=0, antialiased=False, with_depth=False)
    context.bin(view, context.project(view, gaussians))
    view.tile_row_begin = 3
    context.project(view, gaussians)
    context.native.max_isects = 7
    with pytest.raises(ResourceError, match="more tile intersections than max_isects"):
        context._bin(view)
