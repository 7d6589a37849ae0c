"""Images of any number of channels: against plain torch, finite differences, and themselves in other ways."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from splatcli import rasterization
from splatcli.gaussians import Gaussians
from splatcli.native import abi
from splatcli.native.backend import Backend
from splatcli.native.build import NoCompilerError
from splatcli.rasterizer import rendering
from splatcli.rasterizer.context import RasterContext, view_of
from splatcli.rasterizer.reference import render_reference
from splatcli.rasterizer.rendering import ViewRender
from splatcli.scene.camera import Camera
from tests.kernels.simt import simulated
from tests.native.cases import (
    ISAS,
    NEEDS_COMPILER,
    assert_images_and_gradients,
    away_from_cutoffs,
    bits,
    channels_and_gradients,
    float32,
    float64,
)
from tests.rasterizer.fixed_budget import FixedBudget
from tests.rasterizer.scenes import leaves, random_scene
from tests.rasterizer.test_rasterization import activated, seen_by

pytestmark = [NEEDS_COMPILER, pytest.mark.usefixtures("poisoned_buffers")]
F64 = torch.float64
BACKENDS: dict[str, Callable[[], Backend]] = {
    **{isa: (lambda isa=isa: float32(isa, threads=2)) for isa in ISAS},
    "float64": float64,
    "simt": simulated,
}


def scene(seed: int = 3, n: int = 90) -> tuple[Gaussians, Camera]:
    """Nine tiles, of which six are cut by the image's edge."""
    return random_scene(seed, n, width=37, height=41, sh_degree=0, scale=0.2)


@pytest.mark.parametrize("channels", [1, 4, 16, 21, 70])
def test_images_and_gradients_are_those_of_plain_torch(channels: int) -> None:
    gaussians, camera = scene()
    gaussians = gaussians.map(Tensor.double)
    generator = torch.Generator().manual_seed(5)
    colors, background = (torch.randn(*shape, channels, generator=generator, dtype=F64) for shape in ((90,), ()))
    keep = away_from_cutoffs(gaussians, camera)
    weights = [torch.randn(41, 37, k, generator=generator, dtype=F64) * keep[..., None] for k in (channels, 1, 1)]

    def outcome(native: bool) -> tuple[list[Tensor], list[Tensor]]:
        inputs, pose = leaves(gaussians), torch.from_numpy(camera.viewmat).clone().requires_grad_()
        mine, behind = colors.clone().requires_grad_(), background.clone().requires_grad_()
        if native:
            view = ViewRender(inputs, camera, background=behind, viewmat=pose, colors=mine, backend=float64(2))
            rendered = view.blend()
            images = [rendered.image, rendered.alpha, rendered.depth]
        else:
            images = list(render_reference(inputs, camera, background=behind, viewmat=pose, colors=mine))
        torch.autograd.backward(images, [w.view_as(image) for w, image in zip(weights, images, strict=True)])
        named = [inputs.means, inputs.quats, inputs.log_scales, inputs.logit_opacities, mine, behind, pose]
        return [image.detach() for image in images], [tensor.grad for tensor in named]

    (images, gradients), (want_images, want_gradients) = outcome(True), outcome(False)
    for got, want in zip(images, want_images, strict=True):
        assert_close(got[keep], want[keep], rtol=1e-9, atol=1e-11)
    for got, want in zip(gradients, want_gradients, strict=True):
        assert want.any()
        assert_close(got, want, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("channels", [4, 66])
def test_gradcheck(channels: int) -> None:
    gaussians, camera = random_scene(27, 3, width=5, height=4, sh_degree=0, scale=0.5, dtype=F64)
    gaussians.logit_opacities.clamp_(-2.0, 3.0)
    generator = torch.Generator().manual_seed(5)
    colors, background = (torch.randn(*shape, channels, generator=generator, dtype=F64) for shape in ((3,), ()))

    def run(colors: Tensor, background: Tensor, *geometry: Tensor) -> tuple[Tensor, ...]:
        inputs = Gaussians(*geometry, gaussians.sh0, gaussians.shN)
        out = ViewRender(inputs, camera, background=background, colors=colors, backend=float64()).blend()
        return out.image, out.alpha, out.depth

    geometry = [gaussians.means, gaussians.quats, gaussians.log_scales, gaussians.logit_opacities]
    inputs = [tensor.detach().clone().requires_grad_() for tensor in (colors, background, *geometry)]
    assert run(*inputs)[1].max() > 0.3
    assert torch.autograd.gradcheck(run, inputs, eps=1e-6, atol=1e-6, rtol=1e-5, fast_mode=channels > 4)


@pytest.mark.parametrize("isa", ISAS)
def test_no_number_of_threads_changes_a_bit(isa: str) -> None:
    one = bits(*channels_and_gradients(float32(isa, threads=1), *scene(), 67))
    for threads in (2, 5):
        assert bits(*channels_and_gradients(float32(isa, threads=threads), *scene(), 67)) == one


@pytest.mark.parametrize("backend", BACKENDS)
def test_bands_change_no_bit(backend: str) -> None:
    gaussians, camera = random_scene(3, 250, width=30, height=165, sh_degree=0, scale=0.2)
    mine = BACKENDS[backend]()
    view = ViewRender(gaussians.map(lambda t: t.to(mine.dtype)), camera, colors=torch.zeros(250, 67), backend=mine)
    isects = view.context.max_isects()
    half, all_of_them = (
        view.context.isect_budget.nbytes(view.view, view.context.native, count, with_grads=True)
        for count in (isects // 2, isects)
    )
    budget = FixedBudget((half + all_of_them) // 2)
    whole = channels_and_gradients(mine, gaussians, camera, 67, FixedBudget(all_of_them))
    parts = channels_and_gradients(mine, gaussians, camera, 67, budget)
    assert budget.reported, "this makes bands"
    assert bits(*parts) == bits(*whole)


def test_a_channel_does_not_depend_on_the_others() -> None:
    gaussians, camera = scene()
    colors = torch.randn(90, 40, generator=torch.Generator().manual_seed(5))

    def image(colors: Tensor) -> Tensor:
        return ViewRender(gaussians, camera, colors=colors, backend=float32()).blend().image

    whole = image(colors)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(6))
    assert bits(image(colors[:, order])) == bits(whole[..., order])
    assert bits(image(colors[:, 7:12])) == bits(whole[..., 7:12])


@pytest.mark.parametrize("isa", ISAS)
def test_three_channels_have_the_bits_of_the_training_kernels(isa: str) -> None:
    gaussians, camera = scene()
    trained = ViewRender(gaussians, camera, backend=float32(isa))
    slots = trained.context.visible_slots()
    projected = trained.context.arena.take("projected", 0, torch.float32).view(-1, abi.PROJECTED)[slots[1]]
    colors = torch.zeros(90, 3)
    colors[slots[0]] = projected[:, 6:9]
    three = trained.blend()
    channels = ViewRender(gaussians, camera, colors=colors, backend=float32(isa)).blend()
    assert bits(channels.image, channels.alpha, channels.depth) == bits(three.image, three.alpha, three.depth)


@pytest.mark.parametrize("channels", [5, 70])
def test_the_gpus_kernels_agree_with_the_cpus(channels: int) -> None:
    expected = channels_and_gradients(float32("portable"), *scene(), channels)
    assert_images_and_gradients(channels_and_gradients(simulated(), *scene(), channels), expected)


def test_nothing_is_written_after_an_overflow() -> None:
    gaussians, camera = scene()
    context, view = RasterContext(simulated()), view_of(camera, sh_degree=0, antialiased=False, with_depth=True)
    context.set_channels(torch.ones(90, 6))
    context.bin(view, context.project(view, gaussians))
    image, alpha, depth = (torch.full((41, 37, *tail), float("nan")) for tail in ((6,), (), ()))
    context.counters[abi.COUNT_OVERFLOW] = 1
    context.blend(view, torch.zeros(6), image, alpha, depth)
    v_background, v_colors = torch.full((6,), float("nan")), torch.full((90, 6), float("nan"))
    out, v_out = (
        context.images(view, *images) for images in ((image, alpha, depth), (torch.ones(41, 37, 6), None, None))
    )
    context.blend_vjp(view, torch.zeros(6), out, v_out, v_background, v_colors)
    for tensor in (image, alpha, depth, v_background, v_colors):
        assert bool(tensor.isnan().all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gaussian_whose_colours_are_no_numbers_is_left_out(bad: float) -> None:
    gaussians, camera = scene()
    views = seen_by(camera, dtype=torch.float32)
    colors = torch.randn(90, 8, generator=torch.Generator().manual_seed(5))
    without = {**activated(gaussians), "colors": colors, "opacities": gaussians.logit_opacities.sigmoid().clone()}
    without["opacities"][:7] = 0.0
    colors_bad = colors.clone()
    colors_bad[:7, 5] = bad
    got = rasterization(**{**activated(gaussians), "colors": colors_bad}, **views)[0]
    assert bool(got.isfinite().all())
    assert torch.equal(got, rasterization(**without, **views)[0])


def test_without_a_compiler_plain_torch_renders_the_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    gaussians, camera = scene()
    call = {**activated(gaussians), "colors": torch.randn(90, 8, generator=torch.Generator().manual_seed(5))}
    views = {**seen_by(camera, dtype=torch.float32), "backgrounds": torch.rand(1, 8)}
    native = rasterization(**call, **views)[0]

    def missing(*_: object) -> Backend:
        raise NoCompilerError("no compiler")

    monkeypatch.setattr(rendering, "backend_for", missing)
    assert_close(rasterization(**call, **views)[0], native, rtol=0, atol=5e-3)
    planes = {"near_plane": 3.5, "far_plane": 4.5}
    cut = rasterization(**call, **views, **planes)[0]
    assert (cut - native).abs().max() > 0.1
    monkeypatch.undo()
    assert_close(cut, rasterization(**call, **views, **planes)[0], rtol=0, atol=5e-3)


def test_only_what_needs_a_gradient_gets_one() -> None:
    gaussians, camera = scene()
    colors = torch.randn(90, 9, generator=torch.Generator().manual_seed(5), requires_grad=True)
    call = activated(gaussians)
    views = seen_by(camera, dtype=torch.float32)
    images, _, _ = rasterization(**{**call, "colors": colors}, **views)
    images.square().sum().backward()
    alone = colors.grad.clone()
    means = gaussians.means.clone().requires_grad_()
    images, _, _ = rasterization(**{**call, "colors": colors.detach(), "means": means}, **views)
    images.square().sum().backward()
    moved = means.grad.clone()
    colors.grad = means.grad = None
    images, _, _ = rasterization(**{**call, "colors": colors, "means": means}, **views)
    images.square().sum().backward()
    assert torch.equal(colors.grad, alone)
    assert torch.equal(means.grad, moved)
