"""The 3D filter: its sizes, its effect on Gaussians, and the same with gradients in the kernels."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from splatcli.gaussians import GROUPS, Gaussians
from splatcli.native.backend import Backend
from splatcli.rasterizer import StepInputs, render
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.filter_3d import MARGIN, VARIANCE, apply_filter_3d, filter_sizes, opacity_shares
from splatcli.rasterizer.reference import loss_reference, render_reference
from splatcli.scene.camera import MODELS, Camera, CameraModel
from tests.kernels.simt import simulated
from tests.native.cases import NEEDS_COMPILER, float32, float64
from tests.rasterizer.engines import ENGINES, F64, HEIGHT, LRS, WIDTH, assert_gradients, make_engine
from tests.rasterizer.scenes import leaves, of_model, random_camera, random_gaussians, random_image, random_scene


def sizes_for(n: int, dtype: torch.dtype = F64) -> Tensor:
    """From much smaller than the Gaussians of a test to larger."""
    return (0.02 * 30.0 ** torch.rand(n, generator=torch.Generator().manual_seed(8), dtype=F64)).to(dtype)


def world_covariances(gaussians: Gaussians) -> Tensor:
    w, x, y, z = (gaussians.quats / gaussians.quats.norm(dim=1, keepdim=True)).unbind(1)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    turned = torch.stack([torch.stack(row, -1) for row in rows], 1)
    return turned @ torch.diag_embed((2 * gaussians.log_scales).exp()) @ turned.transpose(1, 2)


def test_filtered_gaussians_have_the_covariance_and_opacity_of_the_paper() -> None:
    gaussians, sizes = random_gaussians(1, 50, dtype=F64), sizes_for(50)
    after = apply_filter_3d(gaussians, sizes)
    before = world_covariances(gaussians)
    wanted = before + torch.eye(3, dtype=F64) * sizes.square()[:, None, None]
    assert_close(world_covariances(after), wanted, rtol=1e-10, atol=1e-14)
    share = (before.det() / wanted.det()).sqrt()
    assert float(share.min()) < 0.05 < 0.9 < float(share.max())
    assert_close(after.logit_opacities.sigmoid(), gaussians.logit_opacities.sigmoid() * share)
    assert_close(opacity_shares(gaussians, sizes), share)
    assert after.means is gaussians.means
    assert after.shN is gaussians.shN


@pytest.mark.parametrize(("log_scale", "logit", "size"), [(-40.0, 5.0, 1.0), (3.0, 20.0, 1e-6), (0.0, -30.0, 0.0)])
def test_filtered_gaussians_stay_finite_numbers(log_scale: float, logit: float, size: float) -> None:
    one = random_gaussians(1, 1)
    one = replace(one, log_scales=torch.full((1, 3), log_scale), logit_opacities=torch.tensor([logit]))
    after = apply_filter_3d(one, torch.tensor([size]))
    assert bool(after.log_scales.isfinite().all())
    assert bool(after.logit_opacities.isfinite().all())
    if size < 1e-3:
        assert_close(after.logit_opacities, one.logit_opacities, rtol=0, atol=1e-3)


@pytest.mark.parametrize("model", MODELS)
def test_sizes_are_those_of_the_view_with_most_pixels_to_a_unit(model: CameraModel) -> None:
    cameras = [of_model(random_camera(seed, 40 * (seed + 1), 30), model) for seed in range(4)]
    means = 4.0 * torch.randn(500, 3, generator=torch.Generator().manual_seed(2))
    expected, best = [], []
    for mean in means.double():
        rates = [0.0]
        for camera in cameras:
            viewmat = torch.from_numpy(camera.viewmat)
            x, y, z = (viewmat[:3, :3] @ mean + viewmat[:3, 3]).tolist()
            # A fisheye has fewer pixels to a unit along the radius than across it.
            away = {"pinhole": z, "ortho": 1.0, "fisheye": math.hypot(x, y, z)}[model]
            if model == "fisheye":
                scale = math.atan2(math.hypot(x, y), z) / math.hypot(x, y)
                u, v = camera.fx * x * scale + camera.cx, camera.fy * y * scale + camera.cy
            else:
                u, v = camera.fx * x / away + camera.cx, camera.fy * y / away + camera.cy
            wide, high = MARGIN * camera.width, MARGIN * camera.height
            if z > 0.01 and -wide <= u <= camera.width + wide and -high <= v <= camera.height + high:
                rates.append(max(camera.fx, camera.fy) / away)
        best.append(max(rates))
        expected.append(math.sqrt(VARIANCE) / best[-1] if best[-1] else 0.0)
    unseen = torch.tensor(best) == 0
    assert 20 < int(unseen.sum()) < 480
    wanted = torch.tensor(expected)
    wanted[unseen] = wanted.max()
    assert_close(filter_sizes(means, cameras), wanted, rtol=1e-4, atol=0)


def test_sizes_without_views_or_gaussians() -> None:
    away = random_camera(1)
    behind = torch.from_numpy(away.center)[None] - torch.from_numpy(away.viewmat[2, :3])[None]
    assert filter_sizes(behind, [away]).tolist() == [0.0]
    assert filter_sizes(torch.zeros(0, 3), [away]).shape == (0,)


def test_sizes_have_the_same_bits_with_any_number_of_threads_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    means = torch.randn(100_003, 3, generator=torch.Generator().manual_seed(2))
    cameras = [random_camera(seed) for seed in range(3)]
    torch.set_num_threads(1)
    one = filter_sizes(means, cameras)
    torch.set_num_threads(3)
    assert torch.equal(filter_sizes(means, cameras), one)
    monkeypatch.setattr("splatcli.rasterizer.filter_3d._ROWS", 777)
    assert torch.equal(filter_sizes(means, cameras), one)


def drawn(backend: Backend, antialiased: bool, *, inside: bool) -> tuple[Tensor, Tensor, Tensor]:
    """A scene by the kernels, with the filter applied by them or by apply_filter_3d()."""
    gaussians, camera = random_scene(3, 80, width=WIDTH, height=HEIGHT, sh_degree=1, scale=0.1, dtype=F64)
    sizes = sizes_for(80, backend.dtype)
    gaussians = gaussians.map(lambda t: t.to(backend.dtype))
    out = render(
        gaussians if inside else apply_filter_3d(gaussians, sizes),
        camera,
        antialiased=antialiased,
        filter_3d=sizes if inside else None,
        backend=backend,
    )
    return out.image, out.alpha, out.depth


@NEEDS_COMPILER
@pytest.mark.parametrize("antialiased", [False, True])
@pytest.mark.parametrize("kind", ["float64", "portable", "simt"])
def test_the_kernels_render_filtered_gaussians(kind: str, antialiased: bool) -> None:
    backend = {"float64": float64, "portable": lambda: float32("portable"), "simt": simulated}[kind]()
    tolerance = 1e-12 if kind == "float64" else 2e-3  # at the cut-off of alpha single precision decides otherwise
    found, wanted = drawn(backend, antialiased, inside=True), drawn(backend, antialiased, inside=False)
    for ours, theirs in zip(found, wanted, strict=True):
        assert_close(ours, theirs, rtol=0, atol=tolerance)
    gaussians, camera = random_scene(3, 80, width=WIDTH, height=HEIGHT, sh_degree=1, scale=0.1, dtype=F64)
    reference = render_reference(apply_filter_3d(gaussians, sizes_for(80)), camera, antialiased=antialiased)
    for ours, theirs in zip(found, reference, strict=True):
        assert_close(ours.double(), theirs, rtol=0, atol=max(tolerance, 1e-9) * float(theirs.abs().max()))
    plain = render(gaussians, camera, antialiased=antialiased, backend=float64()).image
    assert float((plain - reference[0]).abs().max()) > 0.05


@NEEDS_COMPILER
@pytest.mark.parametrize("antialiased", [False, True])
@pytest.mark.parametrize("seed", [21, 27])
def test_gradcheck_of_the_filter_in_the_kernels(seed: int, antialiased: bool) -> None:
    gaussians, camera = random_scene(seed, 3, width=6, height=5, sh_degree=1, scale=0.5, dtype=F64)
    gaussians.logit_opacities.clamp_(-1.0, 3.0)
    sizes = torch.tensor([0.1, 0.4, 0.9], dtype=F64)

    def run(*groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        bundle = Gaussians(**dict(zip(GROUPS, groups, strict=True)))
        out = render(bundle, camera, antialiased=antialiased, filter_3d=sizes, backend=float64())
        return out.image, out.alpha, out.depth

    inputs = [tensor.detach().clone().requires_grad_() for _, tensor in gaussians.items()]
    assert run(*inputs)[1].max() > 0.2, "the scene has to be in view"
    assert torch.autograd.gradcheck(run, inputs, eps=1e-6, atol=1e-6, rtol=1e-5)


def one_step(kind: str, camera: Camera, target: Tensor) -> tuple[Gaussians, AdamState]:
    engine, dtype = make_engine(kind)
    gaussians = random_gaussians(1, 90, sh_degree=1, dtype=F64).map(lambda t: t.to(dtype)).detach_clone()
    adam = AdamState.zeros_like(gaussians)
    background, sizes = torch.zeros(3, dtype=dtype), sizes_for(90, dtype)
    inputs = StepInputs(camera, target, LRS, 1, background, 0.2, True, None, filter_3d=sizes)
    [*engine.submit(gaussians, adam, inputs), *engine.drain()]
    return gaussians, adam


@NEEDS_COMPILER
@pytest.mark.parametrize("kind", ENGINES)
def test_a_step_has_the_gradients_of_autograd_through_the_filter(kind: str) -> None:
    camera = random_camera(30, WIDTH, HEIGHT)
    target = (random_image(50, WIDTH, HEIGHT) * 255).round().to(torch.uint8)
    _, adam = one_step(kind, camera, target)
    parameters = leaves(random_gaussians(1, 90, sh_degree=1, dtype=F64))
    out = render(apply_filter_3d(parameters, sizes_for(90)), camera, antialiased=True, backend=float64())
    torch.autograd.backward(loss_reference(out.image, target.double() / 255.0, 0.2))
    assert_gradients(adam, parameters)
