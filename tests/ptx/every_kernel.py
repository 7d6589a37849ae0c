"""Every instance of every kernel once, with the CPU's numbers: SH degrees, camera models, poses, depth, channels.

All Gaussians of a step are visible and in index order, so that rows beside each other are read and changed by
neighbouring warps; whether their coefficients begin at a multiple of 16 bytes differs.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import torch
from torch import Tensor

from splatcli.gaussians import Gaussians
from splatcli.native import abi
from splatcli.native.backend import Backend
from splatcli.rasterizer.adam import AdamState, decay_table
from splatcli.rasterizer.context import RasterContext, view_of
from splatcli.scene.camera import Camera, CameraModel
from tests.kernels import test_stages
from tests.native.cases import adam_update
from tests.ptx.machine import load
from tests.rasterizer.scenes import of_model, random_camera, random_gaussians, random_image, random_scene

#: A chunk and a part of one, whose last warp is not full.
ROWS = abi.CHUNK + 44


def entries(library: Path) -> set[str]:
    """Return the mangled names of all kernels in a library of kernel_library()."""
    return {name.decode() for name in re.findall(rb"\.visible \.entry (\w+)", library.read_bytes())}


def check_every_kernel(library: Path) -> None:
    cpu = Backend.cpu(isa="portable", threads=1)

    def on(threads: int = 0) -> Backend:
        return Backend(load(library), torch.float32, threads, ordinal=1, stream=0x1234, deferred=True)

    models: tuple[tuple[CameraModel, bool], ...] = (
        ("pinhole", False), ("pinhole", True), ("fisheye", False), ("ortho", True)
    )  # fmt: skip
    for degree in range(5):
        for number, (model, pose) in enumerate(models):
            # Each of them with every one of the others over the degrees; lazy ones are as training has them.
            odd = (degree + number) % 2 == 1
            stored, skipped, lazy = 4 if odd else degree, number if odd else 0, number != 1 - odd
            got, want = (
                step(backend, degree, model, pose, stored=stored, skipped=skipped, lazy=lazy) for backend in (on(), cpu)
            )
            for k, (ours, twin) in enumerate(zip(got, want, strict=True)):
                assert torch.equal(ours, twin), (degree, model, k)
    for depth in (False, True):
        for magnitudes in (False, True):
            for channels, threads in ((0, 0), (0, 1), (17, 0), (65, 0)):
                assert_blended(*(blend(b, channels, depth, magnitudes) for b in (on(threads), cpu)), images=2 + depth)
    for colours in (17, 65):
        assert_blended(*(blend(b, colours, True, False, geometry=False) for b in (on(), cpu)), images=3)
    for channels in (1, 3):
        for as_bytes in (False, True):
            for gradient in (False, True):
                (means, v_image), (expected, twin) = (loss(b, channels, as_bytes, gradient) for b in (on(), cpu))
                torch.testing.assert_close(means, expected, rtol=1e-5, atol=1e-6)
                assert torch.equal(v_image, twin)


def side_by_side(camera: Camera, sh_degree: int, skipped: int) -> Gaussians:
    """All in view. skipped: numbers of 4 bytes from a multiple of 64 bytes to the first SH coefficient."""
    gaussians = random_gaussians(31, ROWS, sh_degree=sh_degree)
    forward = torch.from_numpy(camera.viewmat[2, :3]).float()
    gaussians.means.mul_(0.05).add_(torch.from_numpy(camera.center).float() + 4.0 * forward)
    gaussians.logit_opacities.fill_(1.0)
    shN = torch.empty(gaussians.shN.numel() + skipped)[skipped:].view(gaussians.shN.shape).copy_(gaussians.shN)
    return Gaussians(**{**dict(gaussians.items()), "shN": shN})


def step(
    backend: Backend, degree: int, model: CameraModel, pose: bool, *, stored: int, skipped: int, lazy: bool
) -> list[Tensor]:
    """Return parameters, moments and statistics after projection and its adjoint with Adam; gradients are made up."""
    camera = of_model(random_camera(31, 64, 48), model)
    params = side_by_side(camera, stored, skipped)
    adam, table = AdamState.zeros_like(params), decay_table(0.9, 0.999)
    for moment in (adam.exp_avg, adam.exp_avg_sq):
        moment.shN.copy_(torch.rand(moment.shN.shape, generator=torch.Generator().manual_seed(6)) * 1e-6)
    update = adam_update(backend, adam, 60, size_power=0.5 if skipped else 0.0)
    if lazy:
        update.sh_last_step, update.decay_table = adam.sh_last_step.data_ptr(), table.data_ptr()
        update.decay_rows = len(table)
    stages = test_stages.TrainStepPipeline(backend, params, camera, degree, antialiased=bool(skipped))
    filter_3d = torch.full((ROWS,), 0.01)
    if degree % 2 == 1:
        stages.view.filter_3d = filter_3d.data_ptr()
    backend.call("project", stages.view, stages.arrays, stages.context.native, update if lazy else None)
    assert stages.buffer("chunk_counts")[[0, 2]].tolist() == [abi.CHUNK, ROWS - abi.CHUNK]
    stages.bin()
    grads = torch.randn(stages.isects(), abi.ISECT_GRAD, generator=torch.Generator().manual_seed(7))
    test_stages.with_grads(stages, grads)
    stages.context.native.with_abs = pose
    grad2d, count = torch.zeros(ROWS), torch.zeros(ROWS)
    stages.context.project_vjp(
        stages.view,
        stages.arrays,
        adam=update,
        with_pose=pose,
        grad2d=grad2d,
        count=count,
    )
    if pose:  # the chunks' sums are added in another order than on the CPU; tests/kernels/test_stages.py compares
        stages.context.pose_vjp(stages.view, stages.context.pose_partials(ROWS), torch.empty(4, 4))
    groups = (params, adam.exp_avg, adam.exp_avg_sq)
    return [*(tensor for group in groups for _, tensor in group.items()), adam.sh_last_step, grad2d, count]


def blend(backend: Backend, channels: int, depth: bool, magnitudes: bool, *, geometry: bool = True) -> list[Tensor]:
    """Return the images of a view, then gradients: of the background, of ``channels``, of projected Gaussians.

    channels: 0 blends the colours of the projected Gaussians.
    """
    gaussians, camera = random_scene(3, 120, width=37, height=29, sh_degree=0, scale=0.2)
    generator, size = torch.Generator().manual_seed(12), (camera.height, camera.width)
    colors = torch.randn(len(gaussians), channels, generator=generator)
    context = RasterContext(backend)
    if channels:
        context.set_channels(colors)
    width = context.num_channels
    view = view_of(camera, sh_degree=0, antialiased=False, with_depth=depth)
    context.bin(view, context.project(view, gaussians))
    background = torch.randn(width, generator=generator)
    image, planes = torch.full((*size, width), math.nan), [torch.full(size, math.nan) for _ in range(1 + depth)]
    alpha, at_depth = planes[0], planes[1] if depth else None
    context.blend(view, background, image, alpha, at_depth)
    v_image, v_alpha, v_depth = (torch.randn(*size, *more, generator=generator) for more in ((width,), (), ()))
    v_background, v_colors = torch.full((width,), math.nan), torch.zeros_like(colors)
    context.native.with_abs = magnitudes
    context.blend_vjp(
        view,
        background,
        context.images(view, image, alpha, at_depth),
        context.images(view, v_image, v_alpha, v_depth if depth else None),
        v_background,
        v_colors if channels else None,
        geometry,
    )
    out = [image, *planes, v_background, *([v_colors] if channels else [])]
    if geometry:
        ids, slots = context.visible_slots()
        sums = torch.zeros(len(gaussians), abi.ISECT_GRAD)
        sums[ids] = context.summed_isect_grads()[slots]
        out.append(sums[:, : 12 if magnitudes else 10])
    return out


def assert_blended(got: list[Tensor], expected: list[Tensor], *, images: int) -> None:
    """Images to the bit; gradients, whose sums have another order, within rounding."""
    for k, (ours, twin) in enumerate(zip(got, expected, strict=True)):
        if k < images:
            assert torch.equal(ours, twin), k
        else:
            torch.testing.assert_close(ours, twin, rtol=1e-3, atol=1e-5 * float(twin.abs().max()))


def loss(backend: Backend, channels: int, as_bytes: bool, gradient: bool) -> tuple[Tensor, Tensor]:
    """Return mean L1 and SSIM of two images that are more than a strip, and the gradient, or zeros."""
    image, target = (random_image(seed, 67, 47)[..., :channels].contiguous() for seed in (1, 2))
    target = (target * 255).round().to(torch.uint8) if as_bytes else target
    v_image, means = torch.zeros_like(image), torch.full((2,), math.nan, dtype=torch.float64)
    job = abi.Loss(width=67, height=47, channels=channels, images=1, target_is_u8=as_bytes, ssim_lambda=0.2)
    job.image, job.target, job.means = image.data_ptr(), target.data_ptr(), means.data_ptr()
    job.v_image = v_image.data_ptr() if gradient else None
    workspace = torch.empty(backend.call("loss_bytes", job), dtype=torch.uint8)
    job.workspace = workspace.data_ptr()
    backend.call("loss", job)
    return (means if backend.deferred else torch.tensor([job.l1, job.ssim], dtype=torch.float64)), v_image
