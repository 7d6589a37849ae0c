"""The kernels' PTX under further checks: races, bounds of every tensor, warps torn apart, coarser approximations.

Two builds run. The twin build (SPLAT_TWIN_MATH, no fused multiply-add) has the portable CPU library's bits, whatever is
checked meanwhile. The shipped build, with the flags that users get, agrees with the CPU within stated tolerances.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from splatcli.native import abi
from splatcli.native.backend import Backend
from splatcli.native.build import source_root
from splatcli.rasterizer.adam import AdamState, decay_table
from splatcli.rasterizer.context import RasterContext, view_of
from splatcli.rasterizer.rendering import render
from tests.kernels import test_stages
from tests.kernels.simt import Emulator, simulator
from tests.kernels.test_mutants import CHECKS, DEVICE, STREAM, backend_of, everything, total_loss
from tests.native.cases import adam_update, images_and_gradients
from tests.ptx.every_kernel import check_every_kernel, entries
from tests.ptx.huge import check_huge
from tests.ptx.machine import NEEDS_NVCC, TWIN_FLAGS, kernel_library, load, machine
from tests.rasterizer.fixed_budget import FixedBudget
from tests.rasterizer.scenes import leaves, of_model, random_gaussians, random_image, random_scene

pytestmark = NEEDS_NVCC

#: PTX of these too, the oldest and the newest that is shipped, of the one unit whose source asks for the architecture.
OTHER_ARCHITECTURES = ("75", "120")


def check_adam(library: Path) -> None:
    """Adam and noise have the CPU's bits, for numbers that fill no block."""
    cpu = Backend.cpu(isa="portable", threads=1)
    for got, want in zip(adam(on(library)) + noise(on(library)), adam(cpu) + noise(cpu), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("skipped", range(4))
def test_rows_that_begin_anywhere_are_read_within_their_array(skipped: int) -> None:
    with simulator("ptx"), machine().bounds():
        test_stages.test_projection_of_rows_that_begin_anywhere(3, skipped)


def check_streams(library: Path) -> None:
    """All that any entry enqueues is on the device and stream of its call."""
    backend = backend_of(library)
    emulator = Emulator(backend.library)
    emulator.clear_trace()
    everything(backend)
    gaussians, camera = random_scene(3, 250, width=30, height=85, sh_degree=0, scale=0.3)
    inputs, budget = leaves(gaussians), FixedBudget(67_000)
    render(inputs, camera, backend=backend, budget=budget).image.sum().backward()
    assert budget.reported, "this makes bands"
    total_loss(backend, random_image(1, 20, 20), random_image(2, 20, 20))
    adam(backend)
    noise(backend)
    launches = emulator.trace()
    assert {(launch.device, launch.stream) for launch in launches} == {(DEVICE, STREAM)}
    kernels = {launch.kernel for launch in launches}
    assert {"sum_band_isect_grads", "adam_dense", "push_means", "loss_means", "blend_fast"} <= kernels


def check_counts(library: Path) -> None:
    """What the host reads of a view, visible Gaussians and a bound of their intersections, are sums over all chunks."""
    gaussians, camera = random_scene(7, 700, width=64, height=48, sh_degree=0)
    context = RasterContext(on(library))
    context.project(view_of(camera, sh_degree=0, antialiased=False, with_depth=False), gaussians)
    chunks = context.arena.take("chunk_counts", 0, torch.int64)[:6].view(3, 2)
    assert context.counters is not None
    assert (chunks > 0).all()
    counted = context.counters[[abi.COUNT_VISIBLE, abi.COUNT_MAX_ISECTS]]
    assert torch.equal(counted, chunks.sum(0))


def check_order(library: Path) -> None:
    """The order of more tiles than a block has threads is the one that their lists ask for."""
    gaussians, camera = random_scene(8, 60, width=16 * 2100, height=32, sh_degree=0, scale=0.3)
    stages = test_stages.TrainStepPipeline(on(library), gaussians, camera, 0)
    stages.bin()
    ours, expected = test_stages.orders(stages)
    assert len(ours) == 2 * 2100
    assert torch.equal(ours, expected)


def check_rows(library: Path) -> None:
    """No block or warp reads a coefficient that another one changes, at every degree; all Gaussians are stepped."""
    table = decay_table(0.9, 0.999)
    for degree in range(5):
        gaussians, camera = random_scene(31, 300, width=64, height=48, sh_degree=degree)
        forward = torch.from_numpy(camera.viewmat[2, :3]).float()
        gaussians.means.mul_(0.05).add_(torch.from_numpy(camera.center).float() + 4.0 * forward)
        gaussians.logit_opacities.fill_(1.0)
        backend, adam = on(library), AdamState.zeros_like(gaussians)
        update = adam_update(
            backend,
            adam,
            60,
            sh_last_step=adam.sh_last_step.data_ptr(),
            decay_table=table.data_ptr(),
            decay_rows=len(table),
        )
        stages = test_stages.TrainStepPipeline(backend, gaussians, camera, degree)
        backend.call("project", stages.view, stages.arrays, stages.context.native, update)
        assert stages.buffer("chunk_counts")[[0, 2]].tolist() == [256, 44], "rows beside each other are all changed"
        stages.bin()
        test_stages.with_grads(stages, torch.zeros(stages.isects(), abi.ISECT_GRAD))
        stages.context.project_vjp(stages.view, stages.arrays, adam=update)
        assert (adam.sh_last_step == 60).all()


def check_all(library: Path) -> None:
    """Every instance of every kernel runs, with the CPU's numbers; a new one that no check runs fails here."""
    machine().clear_counts()
    check_every_kernel(library)
    check_streams(library)
    ran = {kernel.name for kernel in machine().counts()}
    assert len(entries(library)) > 50
    assert entries(library) - ran == set()


ALL_CHECKS: dict[str, Callable[[Path], None]] = {
    **CHECKS,
    "order": check_order,
    "adam": check_adam,
    "rows": check_rows,
    "streams": check_streams,
    "counts": check_counts,
    "huge": check_huge,
    "every kernel": check_all,
}


def run_check(name: str, library: Path) -> None:
    """Run a check under the race detector and with the bounds of every tensor."""
    load(library)
    with machine().races(), machine().bounds(), machine().patience(1 << 22):
        ALL_CHECKS[name](library)
        assert machine().hazards() == []


@pytest.mark.parametrize("check", ALL_CHECKS)
def test_nothing_races_or_leaves_its_tensor(check: str) -> None:
    run_check(check, kernel_library(flags=TWIN_FLAGS))


@pytest.mark.parametrize("architecture", OTHER_ARCHITECTURES)
def test_another_architecture_draws_the_cpus_picture(architecture: str) -> None:
    headers = source_root().rglob("*.*")
    asking = {path.name for path in headers if re.search(r"__CUDA_ARCH__ *[<>=]", path.read_text(encoding="utf-8"))}
    assert asking == {"blend.cuh"}, "no other unit needs to be tried"
    run_check("picture", kernel_library(units={"blend.cu": architecture}, flags=TWIN_FLAGS))
    assert machine().unknown("splat") == {}


# ---- the shipped build -----------------------------------------------------------------------------------------------

#: Largest differences from the CPU, of the largest number of a tensor. Measured, with approximations as exact as they
#: can be and off by two units in the last place: 7e-7 of images, 1.2e-6 of gradients, 4.4e-6 of the loss's gradient,
#: 2.2e-7 of parameters, moments and positions.
IMAGE, GRADIENT, LOSS_GRADIENT, PARAMETER = 2e-6, 5e-6, 2e-5, 1e-6


@pytest.mark.parametrize("ulps", [0, 2])
def test_shipped_kernels_agree_with_the_cpu(ulps: int) -> None:
    backend, cpu = on(kernel_library()), Backend.cpu(isa="portable", threads=1)
    with machine().approximations(ulps):
        ours, (_, v_image) = everything(backend), total_loss(backend, random_image(1, 77, 51), random_image(2, 77, 51))
        moved = adam(backend) + noise(backend)
        gaussians, camera = random_scene(3, 280, width=37, height=29, sh_degree=1, scale=0.2)
        fisheye = gaussians, of_model(camera, "fisheye")
        ours += images_and_gradients(backend, *fisheye)
    twins = everything(cpu) + images_and_gradients(cpu, *fisheye)
    for k, (got, want) in enumerate(zip(ours, twins, strict=True)):
        assert apart(got, want) < (IMAGE if k % (len(ours) // 2) < 3 else GRADIENT), k
    assert apart(v_image, total_loss(cpu, random_image(1, 77, 51), random_image(2, 77, 51))[1]) < LOSS_GRADIENT
    for got, want in zip(moved, adam(cpu) + noise(cpu), strict=True):
        assert apart(got, want) < PARAMETER
    assert machine().unknown("splat") == {}


#: Root and quotient of Adam's step are approximations: its update is off by this share, five units in the last place,
#: or by this share of the learning rate where the second moment is subnormal and taken for 0.
UPDATE, SUBNORMAL_UPDATE = 6e-7, 2e-5


@pytest.mark.parametrize("ulps", [0, 1])
def test_shipped_adam_is_off_by_a_few_units_in_the_last_place(ulps: int) -> None:
    powers = torch.linspace(-24.0, 3.0, 1000 * 4, dtype=torch.float64)
    moved = []
    for backend in (on(kernel_library()), Backend.cpu(isa="portable", threads=1)):
        params, grads = (random_gaussians(seed, 1000, sh_degree=0).map(torch.zeros_like) for seed in (1, 2))
        grads.quats.copy_((10.0**powers).float().view(1000, 4))
        state = AdamState.zeros_like(params)
        with machine().approximations(ulps):
            backend.call("adam", backend.arrays(params), backend.arrays(grads), adam_update(backend, state, 1))
        moved.append(params.quats.double().flatten())
    allowed = torch.where(powers < -17.0, SUBNORMAL_UPDATE * 1e-3, 0.0) + UPDATE * moved[1].abs()
    assert float(moved[1].abs().min()) > 0.0
    assert bool(((moved[0] - moved[1]).abs() <= allowed).all())
    assert not torch.equal(*moved)


# ---- work ------------------------------------------------------------------------------------------------------------


def on(library: Path) -> Backend:
    return Backend(load(library), torch.float32, 0, ordinal=1, stream=0x1234, deferred=True)


def apart(got: Tensor, want: Tensor) -> float:
    """Return the largest difference as a share of the largest number; of NaN it is NaN."""
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


def adam(backend: Backend) -> list[Tensor]:
    """Return parameters and moments after two steps with made-up gradients."""
    params, grads = random_gaussians(1, 1000, sh_degree=2), random_gaussians(2, 1000, sh_degree=2)
    state = AdamState.zeros_like(params)
    for step in (1, 2):
        backend.call("adam", backend.arrays(params), backend.arrays(grads), adam_update(backend, state, step))
    return [tensor for group in (params, state.exp_avg, state.exp_avg_sq) for _, tensor in group.items()]


def noise(backend: Backend) -> list[Tensor]:
    """Return positions that noise has moved."""
    gaussians = random_gaussians(6, 300, sh_degree=0)
    gaussians.logit_opacities -= 6.0
    job = abi.Noise(seed=2**63 + 5, step=7, scale=30.0, threshold=0.005, steepness=100.0)
    backend.call("noise", backend.arrays(gaussians), job)
    return [gaussians.means]
