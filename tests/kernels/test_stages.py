"""Projection, binning and their adjoints on the CUDA kernels, under the emulator: bit-identical to the CPU twin."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from splatcli.errors import ResourceError
from splatcli.gaussians import GROUPS, Gaussians
from splatcli.native import abi
from splatcli.native.backend import Backend
from splatcli.rasterizer import AdamState
from splatcli.rasterizer.adam import decay_table
from splatcli.rasterizer.context import RasterContext, view_of
from splatcli.scene.camera import Camera, CameraModel
from tests.kernels.simt import Emulator, simulated
from tests.native.cases import NEEDS_COMPILER, adam_update
from tests.rasterizer.scenes import front_camera, of_model, random_gaussians, random_scene

pytestmark = [NEEDS_COMPILER, pytest.mark.usefixtures("simulation")]
LRS = (1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 6e-3)


class TrainStepPipeline:
    """A frame of one backend, its view and arrays, and what lies in its buffers."""

    def __init__(
        self, backend: Backend, gaussians: Gaussians, camera: Camera, degree: int = 1, *, antialiased: bool = False
    ) -> None:
        self.gaussians, self.context = gaussians, RasterContext(backend)
        self.view = view_of(camera, sh_degree=degree, antialiased=antialiased, with_depth=True)
        self.arrays = self.context.project(self.view, gaussians)

    def buffer(self, name: str) -> Tensor:
        return self.context.arena._buffers[name]

    def chunks(self) -> Iterator[tuple[int, int]]:
        """First slot and visible Gaussians of each chunk."""
        counts = self.buffer("chunk_counts").view(-1, 2)
        for chunk in range(-(-len(self.gaussians) // abi.CHUNK)):
            yield chunk * abi.CHUNK, int(counts[chunk, 0])

    def slots(self, name: str, width: int = 1) -> Tensor:
        """A buffer's numbers of the visible Gaussians."""
        rows = self.buffer(name)[: -(-len(self.gaussians) // abi.CHUNK) * abi.CHUNK * width].view(-1, width)
        return torch.cat([rows[:0], *(rows[first : first + visible] for first, visible in self.chunks())])

    def projected(self) -> dict[str, Tensor]:
        chunks = -(-len(self.gaussians) // abi.CHUNK)
        return {
            # Bits, for a colour that is no number leaves a NaN on purpose.
            "projected": self.slots("projected", abi.PROJECTED)[:, :12].contiguous().view(torch.int32),
            "ids": self.slots("ids"),
            "tiles_per_gauss": self.slots("tiles_per_gauss"),
            "chunk_counts": self.buffer("chunk_counts")[: 2 * chunks],
        }

    def bin(self, capacity: int | None = None) -> None:
        self.context.bin(self.view, self.arrays, capacity=capacity)

    def isects(self) -> int:
        counters = self.context.counters
        return int(self.context.native.isects if counters is None else counters[abi.COUNT_ISECTS])

    def grad_rows(self) -> Tensor:
        """Rows of isect_grads, Gaussian by Gaussian in index order and in the order in which their gradients are added.

        A backend may give the Gaussians' rows any order; every row must belong to one of them.
        """
        counts, starts = (self.slots(name).flatten().long() for name in ("tiles_per_gauss", "isect_grad_starts"))
        number = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        rows = starts.repeat_interleave(counts) + number
        assert torch.equal(rows.sort().values, torch.arange(self.isects()))
        return rows

    def binned(self) -> dict[str, Tensor]:
        tiles = -(-self.view.width // abi.TILE) * -(-self.view.height // abi.TILE)
        gaussians, rows, masks = (
            self.buffer(name)[: self.isects()] for name in ("isect_gaussians", "isect_grad_rows", "isect_masks")
        )
        place = torch.empty(self.isects(), dtype=torch.int64)
        place[self.grad_rows()] = torch.arange(self.isects())
        return {
            "isect_gaussians": gaussians,
            "isect_masks": masks,
            "grad_rows_by_gaussian": place[rows.long()],
            "tile_starts": self.buffer("tile_starts")[: tiles + 1],
            "tiles_per_gauss": self.slots("tiles_per_gauss"),
        }


def both(
    gaussians: Gaussians, camera: Camera, degree: int = 1, *, antialiased: bool = False
) -> tuple[TrainStepPipeline, TrainStepPipeline]:
    return (
        TrainStepPipeline(simulated(), gaussians, camera, degree, antialiased=antialiased),
        TrainStepPipeline(Backend.cpu(isa="portable", threads=1), gaussians, camera, degree, antialiased=antialiased),
    )


def assert_same(ours: dict[str, Tensor], twin: dict[str, Tensor]) -> None:
    assert ours.keys() == twin.keys()
    for name in ours:
        assert torch.equal(ours[name], twin[name]), name


@pytest.mark.parametrize("n", [0, 1, 255, 257, 600])
def test_projection_of_any_number(n: int) -> None:
    gaussians, camera = random_scene(n, max(n, 8), sh_degree=1)
    ours, twin = both(gaussians.map(lambda t: t[:n].contiguous()), camera)
    assert_same(ours.projected(), twin.projected())
    counters = ours.context.counters
    assert counters is not None
    assert counters.tolist() == [twin.context.native.visible, twin.context.native.max_isects, 0, 0]


@pytest.mark.parametrize("antialiased", [False, True])
@pytest.mark.parametrize("degree", range(5))
def test_projection_of_every_degree(degree: int, antialiased: bool) -> None:
    gaussians, camera = random_scene(degree, 90, sh_degree=4)
    ours, twin = both(gaussians, camera, degree, antialiased=antialiased)
    assert_same(ours.projected(), twin.projected())


#: Each instance of the kernels once, and each model at two degrees at least.
MODELS: list[tuple[int, CameraModel]] = [
    (0, "fisheye"), (1, "ortho"), (2, "fisheye"), (3, "ortho"), (3, "fisheye"), (4, "ortho"),
]  # fmt: skip


@pytest.mark.parametrize(("degree", "model"), MODELS)
def test_projection_of_other_models(degree: int, model: CameraModel) -> None:
    gaussians, camera = random_scene(degree, 90, sh_degree=4)
    gaussians.means[:20] = torch.from_numpy(camera.center).float() + 0.05 * gaussians.means[:20]  # all round the camera
    ours, twin = both(gaussians, of_model(camera, model), degree, antialiased=degree % 2 == 0)
    assert len(ours.projected()["ids"]) > 50
    assert_same(ours.projected(), twin.projected())


@pytest.mark.parametrize("skipped", range(4))
@pytest.mark.parametrize("degree", [1, 3])
def test_projection_of_rows_that_begin_anywhere(degree: int, skipped: int) -> None:
    """Coefficients are read 16 bytes at a time, from arrays that need not begin at a multiple of 16."""
    gaussians, camera = random_scene(degree, 61, sh_degree=degree)
    rows = gaussians.map(lambda tensor: tensor[skipped:])
    assert rows.shN.data_ptr() % 16 == skipped * rows.shN[0].numel() * 4 % 16
    ours = TrainStepPipeline(simulated(), rows, camera, degree)
    twin = TrainStepPipeline(Backend.cpu(isa="portable", threads=1), rows, camera, degree)
    assert_same(ours.projected(), twin.projected())
    assert int(ours.slots("tiles_per_gauss").min()) > 0


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 3e38, -3e38, 1e-41])
def test_projection_and_lists_of_sick_parameters(poison: float) -> None:
    gaussians, camera = random_scene(4, 200, sh_degree=1)
    for k, (_, tensor) in enumerate(gaussians.items()):
        tensor.view(len(gaussians), -1)[k * 5 :: 31, -1] = poison
    ours, twin = both(gaussians, camera)
    assert_same(ours.projected(), twin.projected())
    ours.bin()
    twin.bin()
    assert_same(ours.binned(), twin.binned())


def lists_agree(gaussians: Gaussians, camera: Camera) -> TrainStepPipeline:
    ours, twin = both(gaussians, camera)
    ours.bin()
    twin.bin()
    assert ours.isects() == twin.isects()
    assert_same(ours.binned(), twin.binned())
    assert torch.equal(*orders(ours))
    return ours


def orders(stages: TrainStepPipeline) -> tuple[Tensor, Tensor]:
    """The order of the tiles, and what it has to be: 64 levels of length, the longest lists first, else row by row."""
    view = stages.view
    across = -(-view.width // abi.TILE)
    first, end = view.tile_row_begin * across, view.tile_row_end * across
    lengths = stages.buffer("tile_starts")[first : end + 1].diff().float()
    level = (lengths * (64.0 / (lengths.max() + 1.0))).int().clamp(max=63)
    return stages.buffer("tile_order")[: end - first], first + level.argsort(descending=True, stable=True).int()


@pytest.mark.parametrize("rows", [(0, 9), (2, 7), (5, 9)])
def test_tiles_with_long_lists_come_first(rows: tuple[int, int]) -> None:
    gaussians = random_gaussians(9, 500, sh_degree=1, spread=0.15, scale=0.05)
    gaussians.means[:, 2] += 3.0
    stages = TrainStepPipeline(simulated(), gaussians, front_camera(150, 140, 60.0))
    stages.view.tile_row_begin, stages.view.tile_row_end = rows
    stages.bin()
    ours, expected = orders(stages)
    assert torch.equal(ours, expected)
    lengths = stages.buffer("tile_starts")[: 10 * 9 + 1].diff()[ours.long()]
    assert len(ours) == 10 * (rows[1] - rows[0])
    assert int(lengths[0]) > 5 * int(lengths[-1]), "lengths differ"


@pytest.mark.parametrize(
    ("n", "width", "height"), [(300, 37, 29), (600, 64, 48), (120, 5, 47), (0, 20, 20), (40, 1, 1)]
)
def test_lists_of_random_scenes(n: int, width: int, height: int) -> None:
    gaussians, camera = random_scene(n, max(n, 8), width=width, height=height, sh_degree=1)
    lists_agree(gaussians.map(lambda t: t[:n].contiguous()), camera)


def test_lists_of_equal_depths_keep_the_order_of_the_gaussians() -> None:
    gaussians = random_gaussians(1, 290, sh_degree=1, spread=0.4)
    gaussians.means[:, 2] = 3.0
    ours = lists_agree(gaussians, front_camera(48, 48, 40.0))
    starts, records = ours.buffer("tile_starts"), ours.buffer("isect_gaussians")
    for tile in range(9):
        listed = records[int(starts[tile]) : int(starts[tile + 1])]
        assert len(listed) > 1
        assert bool((listed.diff() > 0).all())


def test_lists_of_one_gaussian_over_everything_and_of_nothing() -> None:
    gaussians = random_gaussians(1, 3, sh_degree=1)
    gaussians.means[:] = torch.tensor([[0.0, 0.0, 3.0], [0.0, 0.0, -3.0], [900.0, 0.0, 3.0]])
    gaussians.log_scales[0] = 3.0
    gaussians.logit_opacities[0] = 4.0
    assert lists_agree(gaussians, front_camera(100, 60, 50.0)).isects() == 7 * 4
    assert lists_agree(gaussians.map(lambda t: t[1:].contiguous()), front_camera(100, 60, 50.0)).isects() == 0


def test_lists_of_an_image_with_more_tiles_than_sixteen_bits_count() -> None:
    width = 16 * 66_000
    gaussians = random_gaussians(2, 40, sh_degree=1, scale=0.02)
    gaussians.means[:, 2] = 3.0
    gaussians.means[:, :2] = torch.stack([torch.linspace(-1.49, 1.49, 40), torch.zeros(40)], 1)
    camera = Camera("long.png", width, 16, float(width), 400.0, width / 2, 8.0, np.eye(4))
    ours = lists_agree(gaussians, camera)
    assert int(ours.buffer("tile_starts")[65_536]) < ours.isects()


def needles(n: int) -> Gaussians:
    """Long and thin across the diagonal: they reach a small part of their rectangles' tiles."""
    gaussians = random_gaussians(3, n, sh_degree=1, spread=0.3)
    gaussians.means[:, 2] = 3.0 + 0.01 * torch.arange(n)
    gaussians.log_scales[:] = torch.tensor([1.5, -6.0, -6.0])
    gaussians.quats[:] = torch.tensor([math.cos(math.pi / 8), 0.0, 0.0, math.sin(math.pi / 8)])
    gaussians.logit_opacities[:] = 2.0
    return gaussians


@pytest.mark.parametrize(("n", "size"), [(2, 1200), (30, 300), (1, 700)])
def test_lists_of_far_more_candidates_than_intersections(n: int, size: int) -> None:
    """Masks are kept for three candidates an intersection; with more, candidates are tested twice."""
    gaussians, camera = needles(n), front_camera(size, size, 0.8 * size)
    ours, twin = both(gaussians, camera)
    candidates = int(ours.slots("tiles_per_gauss").sum())
    twin.bin()
    assert candidates > 4 * twin.isects() + 1024
    ours.bin(twin.isects())
    assert_same(ours.binned(), twin.binned())


def test_lists_of_gaussians_over_several_windows() -> None:
    """Windows of 512 candidates that begin within a Gaussian, hold only a part of one, or hold hundreds."""
    gaussians = random_gaussians(5, 900, sh_degree=1, spread=0.5, scale=0.01)
    gaussians.means[:, 2] = 3.0 + 0.001 * torch.arange(900)
    for k, size in ((0, 1.5), (1, 0.5), (400, 2.0), (899, 0.8)):
        gaussians.log_scales[k] = size
        gaussians.logit_opacities[k] = 3.0
    ours, twin = both(gaussians, front_camera(500, 460, 300.0))
    counts = ours.slots("tiles_per_gauss").flatten()
    assert int((counts > 512).sum()) >= 2
    assert int((counts == 1).sum()) > 100
    ours.bin()
    twin.bin()
    assert_same(ours.binned(), twin.binned())


def test_too_little_room_raises_the_flag_and_writes_nothing_beyond_it() -> None:
    gaussians, camera = random_scene(3, 200, sh_degree=1)
    exact = lists_agree(gaussians, camera).isects()
    stages = TrainStepPipeline(simulated(), gaussians, camera)
    capacity = exact - 1
    for name, dtype in (
        ("isect_gaussians", torch.int32),
        ("isect_grad_rows", torch.int32),
        ("isect_masks", torch.int16),
    ):
        stages.context.arena.take(name, capacity + 64, dtype).fill_(77)
    stages.context.arena.take("workspace", 1 << 20, torch.uint8)
    stages.bin(capacity)
    counters = stages.context.counters
    assert counters is not None
    assert counters.tolist()[2:] == [exact, 1]
    for name in ("isect_gaussians", "isect_grad_rows", "isect_masks"):
        assert bool((stages.buffer(name) == 77).all()), name
    # The flag stays: another view of the same counters does nothing.
    before = stages.buffer("projected").clone()
    stages.context.project(stages.view, gaussians.map(lambda t: t + 1.0))
    assert torch.equal(stages.buffer("projected").view(torch.int32), before.view(torch.int32))
    assert counters.tolist()[2:] == [exact, 1]


def test_room_that_the_sorts_cannot_count_is_refused() -> None:
    gaussians, camera = random_scene(3, 30, sh_degree=0)
    stages = TrainStepPipeline(simulated(), gaussians, camera, 0)
    native = stages.context.native
    native.max_isects = 2**31
    native.workspace_bytes = 1 << 50
    with pytest.raises(ResourceError, match=r"splat_bin: more than 2\^31 - 1 tile intersections"):
        stages.context.backend.call("bin", stages.view, stages.arrays, native)


def test_no_schedule_changes_a_bit_of_the_lists() -> None:
    gaussians, camera = random_scene(6, 520, sh_degree=1)
    found = []
    for seed in (0, 1, 2):
        backend = simulated()
        with Emulator(backend.library).schedule(seed):
            stages = TrainStepPipeline(backend, gaussians, camera)
            stages.bin()
            found.append(stages.binned() | stages.projected())
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


def with_grads(stages: TrainStepPipeline, grads: Tensor) -> None:
    """Hands the backward pass of projection these gradients, given Gaussian by Gaussian."""
    taken = stages.context.arena.take("isect_grads", grads.numel(), torch.float32)[: grads.numel()]
    taken.view(-1, abi.ISECT_GRAD)[stages.grad_rows()] = grads
    stages.context.native.isect_grads = stages.buffer("isect_grads").data_ptr()


def backward(stages: TrainStepPipeline, stored: Gaussians, *, steps: int = 3) -> dict[str, Tensor]:
    """Gradients, then Adam at once for some steps on the same rows; everything that it writes."""
    backend = stages.context.backend
    n = len(stored)
    gradients = stored.map(torch.empty_like)
    v_viewmat = torch.empty(4, 4)
    stages.context.project_vjp(stages.view, stages.arrays, gradients=backend.arrays(gradients), with_pose=True)
    stages.context.pose_vjp(stages.view, stages.context.pose_partials(n), v_viewmat)
    adam = AdamState.zeros_like(stored)
    grad2d, count = torch.zeros(n), torch.zeros(n)
    for step in range(1, steps + 1):
        update = adam_update(backend, adam, step, LRS, size_power=0.4, log_size=-2.5)
        stages.context.project_vjp(stages.view, stages.arrays, adam=update, grad2d=grad2d, count=count)
    out = {"grad2d": grad2d, "count": count, "pose": v_viewmat}
    for name in GROUPS:
        out |= {f"gradient {name}": getattr(gradients, name), name: getattr(stages.gaussians, name)}
        out |= {f"first {name}": getattr(adam.exp_avg, name), f"second {name}": getattr(adam.exp_avg_sq, name)}
    return out


@pytest.mark.parametrize(
    ("degree", "stored", "antialiased"), [(0, 0, False), (1, 3, True), (2, 2, False), (3, 3, True), (4, 4, False)]
)
def test_backward_and_adam_of_every_degree(degree: int, stored: int, antialiased: bool) -> None:
    gaussians, camera = random_scene(degree + 10, 290, width=112, height=80, sh_degree=stored)
    gaussians.log_scales[:2] = 1.0  # many rows, which a warp sums together
    gaussians.logit_opacities[:2] = 3.0
    results = []
    for backend in (simulated(), Backend.cpu(isa="portable", threads=1)):
        stages = TrainStepPipeline(backend, gaussians.detach_clone(), camera, degree, antialiased=antialiased)
        stages.bin()
        assert int(stages.slots("tiles_per_gauss").max()) > 32
        rows = torch.randn(stages.isects(), abi.ISECT_GRAD, generator=torch.Generator().manual_seed(7))
        rows[:, 10:] = 0.0
        with_grads(stages, rows)
        results.append(backward(stages, stages.gaussians))
    ours, twin = results
    # The pose sums over all Gaussians, in another order.
    pose, expected = ours.pop("pose"), twin.pop("pose")
    torch.testing.assert_close(pose, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    assert float(ours["count"].max()) == 3.0
    assert_same(ours, twin)


@pytest.mark.parametrize(("degree", "model"), MODELS)
def test_backward_of_other_models(degree: int, model: CameraModel) -> None:
    gaussians, camera = random_scene(degree + 10, 60, sh_degree=degree)
    gaussians.means[:20] = torch.from_numpy(camera.center).float() + 0.05 * gaussians.means[:20]
    results = []
    for backend in (simulated(), Backend.cpu(isa="portable", threads=1)):
        stages = TrainStepPipeline(backend, gaussians.detach_clone(), of_model(camera, model), degree)
        stages.bin()
        rows = torch.randn(stages.isects(), abi.ISECT_GRAD, generator=torch.Generator().manual_seed(7))
        with_grads(stages, rows)
        results.append(backward(stages, stages.gaussians, steps=1))
    ours, twin = results
    pose, expected = ours.pop("pose"), twin.pop("pose")
    torch.testing.assert_close(pose, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    assert_same(ours, twin)


def test_gradients_of_gaussians_over_the_whole_image() -> None:
    """A block sums the gradients of a chunk's first eight such Gaussians, warps those of the others."""
    gaussians, camera = random_scene(12, 290, width=544, height=528, sh_degree=1)
    everywhere = torch.tensor([*range(40, 140, 9), 280])
    gaussians.means[everywhere] = (
        torch.from_numpy(camera.center).float() + 4.0 * torch.from_numpy(camera.viewmat[2, :3]).float()
    )
    gaussians.log_scales[everywhere], gaussians.logit_opacities[everywhere] = 2.0, 4.0
    results = []
    for backend in (simulated(), Backend.cpu(isa="portable", threads=1)):
        stages = TrainStepPipeline(backend, gaussians.detach_clone(), camera, 1)
        stages.bin()
        counts, ids = stages.slots("tiles_per_gauss").flatten(), stages.slots("ids").flatten()
        assert ids[counts >= 1024].tolist() == everywhere.tolist()
        rows = torch.randn(stages.isects(), abi.ISECT_GRAD, generator=torch.Generator().manual_seed(7))
        with_grads(stages, rows)
        results.append(backward(stages, stages.gaussians, steps=1))
    ours, twin = ({name: tensor for name, tensor in result.items() if name != "pose"} for result in results)
    assert_same(ours, twin)


@pytest.mark.parametrize(
    ("degree", "more"), [(3, {}), (0, {"opacity_reg": 50.0, "scale_reg": 700.0}), (1, {"size_power": 0.5})]
)
def test_adam_alone(degree: int, more: dict[str, float]) -> None:
    results = []
    for backend in (simulated(), Backend.cpu(isa="portable", threads=1)):
        params, grads = (random_gaussians(seed, 270, sh_degree=degree) for seed in (1, 2))
        adam = AdamState.zeros_like(params)
        for step in (1, 2):
            update = adam_update(backend, adam, step, **more)
            backend.call("adam", backend.arrays(params), backend.arrays(grads), update)
        results.append(
            {f"{k}{name}": t for k, g in enumerate([params, adam.exp_avg, adam.exp_avg_sq]) for name, t in g.items()}
        )
    assert_same(*results)


@pytest.mark.parametrize("degree", [0, 1, 3])
def test_missed_steps_are_made_up_for_as_on_the_cpu(degree: int) -> None:
    """Projection with an Adam whose Gaussians stand at different steps, then the step itself; several chunks."""
    gaussians, camera = random_scene(31, 600, width=112, height=80, sh_degree=3)
    gaussians.means[100:400, 0] += 50.0  # a chunk of which nothing is seen, and one of which little is
    generator = torch.Generator().manual_seed(5)
    stands = torch.randint(0, 60, (600,), generator=generator, dtype=torch.int32)
    table = decay_table(0.9, 0.999)
    results = []
    for backend in (simulated(), Backend.cpu(isa="portable", threads=1)):
        stored = gaussians.detach_clone()
        adam = AdamState.zeros_like(stored)
        for moment in (adam.exp_avg, adam.exp_avg_sq):
            moment.shN.copy_(torch.rand(stored.shN.shape, generator=torch.Generator().manual_seed(6)) * 1e-6)
        adam.sh_last_step.copy_(stands)
        update = adam_update(
            backend,
            adam,
            60,
            LRS,
            sh_last_step=adam.sh_last_step.data_ptr(),
            decay_table=table.data_ptr(),
            decay_rows=len(table),
        )
        stages = TrainStepPipeline(backend, stored, camera, degree)
        backend.call("project", stages.view, stages.arrays, stages.context.native, update)
        caught_up = adam.sh_last_step.clone()
        stages.bin()
        rows = torch.randn(stages.isects(), abi.ISECT_GRAD, generator=torch.Generator().manual_seed(7))
        rows[:, 10:] = 0.0
        with_grads(stages, rows)
        stages.context.project_vjp(stages.view, stages.arrays, adam=update)
        results.append(
            stages.projected()
            | {"caught up": caught_up, "stands": adam.sh_last_step, "shN": stages.gaussians.shN}
            | {"m": adam.exp_avg.shN, "v": adam.exp_avg_sq.shN}
        )
    ours, twin = results
    seen = twin["stands"] == 60
    assert 0 < int(seen.sum()) < 450
    assert torch.equal(twin["stands"][~seen], stands[~seen])
    assert torch.equal(twin["caught up"][seen], torch.full_like(stands[seen], 59))
    assert_same(ours, twin)
