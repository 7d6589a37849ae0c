"""The CPU rasterizer against the plain torch one, which shares no line with it: images and every gradient.

Tolerances are relative to the largest number of an image or of a gradient tensor, and stated once, here:
  float64  1e-12, for both: the two differ in the order of their sums only.
  float32  3e-6 for images and 2e-5 for gradients, against float64 from the same numbers. Pixels in which rounding may
           decide a cut-off (tests.native.cases.away_from_cutoffs) are few, counted, and left out of both.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from splatcli.gaussians import GROUPS, Gaussians
from splatcli.native.backend import Backend
from splatcli.rasterizer.reference import render_reference
from splatcli.rasterizer.rendering import render
from splatcli.scene.camera import Camera
from tests.native.cases import (
    ISAS,
    NEEDS_COMPILER,
    Weights,
    assert_outcome,
    away_from_cutoffs,
    bits,
    float32,
    float64,
    in_dtype,
    named,
    native_outcome,
    reference_outcome,
    rows_of,
)
from tests.rasterizer.reference_projection import project_reference
from tests.rasterizer.scenes import CONFORMANCE, front_camera, leaves, random_gaussians, random_scene

pytestmark = NEEDS_COMPILER
F64 = torch.float64


def compare(
    gaussians: Gaussians,
    camera: Camera,
    *,
    antialiased: bool = False,
    sh_degree: int | None = None,
    unsettled: float = 0.01,
    gradients: float = 2e-5,
) -> None:
    """Every build against the reference, which renders twice: with and without the unsettled pixels in the loss."""
    gaussians = gaussians.map(Tensor.float)
    weights = Weights.random(7, camera)
    exact = reference_outcome(gaussians, camera, weights, antialiased=antialiased, sh_degree=sh_degree)
    got = native_outcome(float64(), gaussians, camera, weights, antialiased=antialiased, sh_degree=sh_degree)
    assert_outcome(got, exact, images=1e-12, gradients=1e-12)

    keep = away_from_cutoffs(gaussians, camera, antialiased=antialiased)
    assert int((~keep).sum()) <= max(1, unsettled * keep.numel()), "the scene sits on its cut-offs"
    weights = weights.where(keep)
    if not bool(keep.all()):
        exact = reference_outcome(gaussians, camera, weights, antialiased=antialiased, sh_degree=sh_degree)
    for isa in ISAS:
        got = native_outcome(float32(isa), gaussians, camera, weights, antialiased=antialiased, sh_degree=sh_degree)
        for images in (got.images, exact.images):
            for image in images.values():
                image[~keep] = 0.0
        assert_outcome(got, exact, images=3e-6, gradients=gradients)


# --- random scenes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("antialiased", [False, True])
@pytest.mark.parametrize(("seed", "sh_degree"), [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4)])
def test_random_scenes(seed: int, sh_degree: int, antialiased: bool) -> None:
    gaussians, camera = random_scene(seed, 50, sh_degree=sh_degree, scale=0.1 * seed)
    compare(gaussians, camera, antialiased=antialiased)


def test_a_large_random_scene() -> None:
    gaussians, camera = random_scene(6, 600, width=120, height=90, sh_degree=2, scale=0.1)
    compare(gaussians, camera)


@pytest.mark.parametrize("sh_degree", [0, 2])
def test_fewer_sh_degrees_than_there_are(sh_degree: int) -> None:
    gaussians, camera = random_scene(7, 40, sh_degree=3)
    compare(gaussians, camera, sh_degree=sh_degree)
    parameters = leaves(gaussians)
    torch.autograd.backward(render(parameters, camera, sh_degree=sh_degree, backend=float32()).image.sum())
    assert parameters.shN.grad is not None
    used = (sh_degree + 1) ** 2 - 1
    assert not parameters.shN.grad[:, used:].any(), "coefficients that are not in use have no gradient"


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 255, 256, 257])
def test_counts_around_the_units_of_work(n: int) -> None:
    gaussians, camera = random_scene(8, n, width=21, height=18, sh_degree=1, scale=0.1)
    compare(gaussians, camera)


@pytest.mark.parametrize(
    ("width", "height"), [(1, 1), (1, 40), (40, 1), (3, 5), (4, 4), (15, 17), (16, 16), (17, 15), (33, 31), (48, 32)]
)
def test_sizes_around_blocks_and_tiles(width: int, height: int) -> None:
    gaussians, camera = random_scene(9, 40, width=width, height=height, sh_degree=1, scale=0.2)
    compare(gaussians, replace(camera, fx=20.0, fy=22.0))


def test_no_image_depends_on_what_is_not_asked_for() -> None:
    gaussians, camera = random_scene(10, 60)
    plain = render(gaussians, camera, backend=float32())
    assert_close(plain.image, render_reference(gaussians.map(Tensor.double), camera)[0].float(), rtol=0, atol=1e-5)
    parameters = leaves(gaussians)
    tracked = render(parameters, camera, viewmat=torch.from_numpy(camera.viewmat).requires_grad_(), backend=float32())
    assert bits(plain.image, plain.alpha, plain.depth) == bits(tracked.image, tracked.alpha, tracked.depth)


# --- special scenes --------------------------------------------------------------------------------------------------


def front_scene(n: int, *, seed: int = 0, opacity: float = 2.0, sh_degree: int = 0) -> Gaussians:
    """Gaussians scattered before a camera at the origin, from z = 2 on."""
    gaussians = random_gaussians(seed, n, sh_degree=sh_degree, spread=0.5, scale=0.3, dtype=F64)
    gaussians.means[:, 2] = 2.0 + gaussians.means[:, 2].abs()
    gaussians.logit_opacities[:] = opacity
    return gaussians


def test_equal_depths_are_blended_in_index_order() -> None:
    camera = front_camera(20, 18, 16.0)
    gaussians = front_scene(40)
    gaussians.means[:, 2] = 3.0
    # Two depths, interleaved: the order is by depth first.
    gaussians.means[1::3, 2] = 2.5
    compare(gaussians, camera)
    turned = gaussians.map(lambda rows: rows.flip(0))
    for backend in (float32(), float64()):
        forward = render(in_dtype(gaussians, backend.dtype), camera, backend=backend).image
        backward = render(in_dtype(turned, backend.dtype), camera, backend=backend).image
        assert (forward - backward).abs().max() > 0.01, "the order has to show in the image"


def test_depths_that_float32_cannot_tell_apart_have_an_order_in_float64() -> None:
    camera = front_camera(20, 18, 16.0)
    gaussians = front_scene(12)
    gaussians.means[:, 2] = 3.0 - 1e-12 * torch.arange(12, dtype=F64)
    weights = Weights.random(3, camera)
    exact = reference_outcome(gaussians, camera, weights)
    assert_outcome(native_outcome(float64(), gaussians, camera, weights), exact, images=1e-12, gradients=1e-12)


@pytest.mark.parametrize("sh_degree", [0, 1])
def test_pixels_that_stop_behind_a_few_of_many_opaque_layers(sh_degree: int) -> None:
    camera = front_camera(37, 21, 20.0)
    gaussians = front_scene(600, opacity=3.0, sh_degree=sh_degree)
    gaussians.log_scales[:] = math.log(0.6)
    # Everything in the left half ends early; on the right some pixels see through to the end.
    gaussians.means[300:, 0] -= 1.5
    # What lies behind a Gaussian is the difference of two sums over 1 - alpha: layer on layer costs digits.
    compare(gaussians, camera, unsettled=0.05, gradients=1e-4)


def test_what_lies_behind_a_wall_has_no_gradient() -> None:
    camera = front_camera(32, 32, 24.0)
    gaussians = front_scene(300)
    gaussians.means[:5] = torch.tensor([0.0, 0.0, 0.5], dtype=F64)
    gaussians.log_scales[:5] = 2.0
    gaussians.logit_opacities[:5] = 3.0
    for backend in (float64(), *(float32(isa) for isa in ISAS)):
        parameters = leaves(in_dtype(gaussians, backend.dtype))
        out = render(parameters, camera, backend=backend)
        assert out.alpha.min() > 0.999
        Weights.random(1, camera).backward(out.image, out.alpha, out.depth)
        for name, leaf in parameters.items():
            assert leaf.grad is not None
            assert not leaf.grad[5:].any(), name
            assert name == "shN" or leaf.grad[:4].any(), name


def test_one_gaussian_over_all_tiles() -> None:
    camera = front_camera(100, 70, 40.0)
    gaussians = front_scene(1)
    gaussians.log_scales[:] = 3.0
    compare(gaussians, camera)
    assert render(gaussians, camera).alpha.min() > 0.5


@pytest.mark.parametrize("log_scale", [-40.0, -12.0, 5.0, 9.0])
def test_scales_from_nothing_to_everything(log_scale: float) -> None:
    camera = front_camera(24, 20, 18.0)
    gaussians = front_scene(12)
    gaussians.log_scales[::2] = log_scale
    compare(gaussians, camera)


@pytest.mark.parametrize("antialiased", [False, True])
def test_needles_and_sheets(antialiased: bool) -> None:
    camera = front_camera(24, 20, 18.0)
    gaussians = front_scene(30)
    gaussians.log_scales[:15, 0] = -7.0
    gaussians.log_scales[15:, :2] = -7.0
    compare(gaussians, camera, antialiased=antialiased)


@pytest.mark.parametrize("near", [0.01, 0.3])
def test_the_bounds_of_depth(near: float) -> None:
    camera = replace(front_camera(8, 8, 8.0), near=near)
    gaussians = front_scene(9)
    gaussians.means[:, :2] = 0.0
    depths = [-1.0, -0.0, 0.0, 0.99 * near, 1.01 * near, 1.0, 9e9, 1e10, 2e10]
    gaussians.means[:, 2] = torch.tensor(depths, dtype=F64)
    gaussians.log_scales[:] = gaussians.means[:, 2:].abs().clamp(min=1e-3).log() - 1.0
    gaussians.logit_opacities[:] = -1.0
    for backend in (float64(), *(float32(isa) for isa in ISAS)):
        for i, seen in enumerate([False] * 4 + [True] * 3 + [False] * 2):
            alone = in_dtype(rows_of(gaussians, slice(i, i + 1)), backend.dtype)
            assert bool(render(alone, camera, backend=backend).alpha.any()) == seen, i
    assert project_reference(gaussians, camera).valid.tolist() == [False] * 4 + [True] * 3 + [False] * 2


# --- broken numbers --------------------------------------------------------------------------------------------------

BROKEN = {
    "means": [math.nan, math.inf, -math.inf, 1e38],
    "quats": [math.nan, math.inf, -math.inf, 0.0, 1e-5],
    "log_scales": [math.nan, math.inf, 500.0, 80.0],
    "logit_opacities": [math.nan, -math.inf, -20.0, -1e30],
    "sh0": [math.nan, math.inf, -math.inf],
    "shN": [math.nan, math.inf, -math.inf],
}
BACKENDS = [*ISAS, "float64"]


def backend_of(name: str) -> Backend:
    return float64() if name == "float64" else float32(name)


@pytest.mark.parametrize("build", BACKENDS)
@pytest.mark.parametrize(("name", "value"), [(name, value) for name in GROUPS for value in BROKEN[name]])
def test_a_broken_gaussian_is_culled_and_poisons_nothing(name: str, value: float, build: str) -> None:
    backend = backend_of(build)
    whole, camera = random_scene(8, 40)
    whole = whole.map(lambda t: t.to(backend.dtype))
    without = torch.tensor([i for i in range(40) if i not in (4, 5, 38)])
    weights = Weights.random(2, camera)
    for antialiased in (False, True):
        broken = whole.detach_clone()
        getattr(broken, name)[4] = value
        # One number of a row is enough to break it.
        getattr(broken, name).view(40, -1)[5, -1] = 0.0 if name == "quats" else value
        getattr(broken, name)[38] = value
        if name == "quats":
            broken.quats[5] = 0.0
        good = native_outcome(backend, whole.map(lambda t: t[without]), camera, weights, antialiased=antialiased)
        got = native_outcome(backend, broken, camera, weights, antialiased=antialiased)
        for key, image in good.images.items():
            assert torch.equal(got.images[key], image), key
        for key, gradient in good.gradients.items():
            here = got.gradients[key]
            assert bool(here.isfinite().all()), key
            if key in GROUPS:
                assert torch.equal(here[without], gradient), key
                assert not here[[4, 5, 38]].any(), key
            else:
                assert_close(here, gradient, rtol=1e-5, atol=1e-4)


def test_an_infinite_opacity_is_an_opaque_gaussian() -> None:
    gaussians, camera = random_scene(11, 20)
    gaussians.logit_opacities[3] = math.inf
    weights = Weights.random(4, camera)
    exact = reference_outcome(gaussians, camera, weights)
    for build in BACKENDS:
        got = native_outcome(backend_of(build), gaussians, camera, weights)
        assert_outcome(got, exact, images=3e-6, gradients=2e-5)


@pytest.mark.parametrize("build", BACKENDS)
def test_everything_broken_is_the_background(build: str) -> None:
    backend = backend_of(build)
    gaussians, camera = random_scene(12, 70)
    parameters = leaves(gaussians.map(lambda t: torch.full_like(t, math.nan).to(backend.dtype)))
    background = torch.tensor([0.1, 0.5, 0.9], dtype=backend.dtype, requires_grad=True)
    out = render(parameters, camera, background=background, backend=backend)
    assert torch.equal(out.image, background.detach().expand_as(out.image))
    assert not out.alpha.any()
    assert not out.depth.any()
    torch.autograd.backward(out.image.sum() + out.alpha.sum() + out.depth.sum())
    assert_close(background.grad, torch.full_like(background, camera.width * camera.height))
    for name, leaf in parameters.items():
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, torch.zeros_like(leaf)), name


@pytest.mark.parametrize("build", BACKENDS)
def test_a_pose_that_is_no_number_shows_the_background(build: str) -> None:
    backend = backend_of(build)
    gaussians, camera = random_scene(12, 30)
    pose = torch.from_numpy(camera.viewmat.copy())  # one that is optimised; a camera's own is refused
    pose[0, 3] = np.nan
    out = render(gaussians.map(lambda t: t.to(backend.dtype)), camera, viewmat=pose, backend=backend)
    assert not out.image.any()
    assert not out.alpha.any()


# --- against gsplat on CUDA ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", BACKENDS)
def test_conformance_case(build: str) -> None:
    backend = backend_of(build)
    with np.load(CONFORMANCE) as archive:
        data = {name: torch.from_numpy(archive[name]) for name in archive}
    gaussians = Gaussians(
        means=data["means"],
        quats=data["quats"],
        log_scales=data["scales"],
        logit_opacities=data["opacities"],
        sh0=data["coeffs"][:, 0].contiguous(),
        shN=data["coeffs"][:, 1:].contiguous(),
    )
    viewmat = np.eye(4)
    viewmat[:3, 3] = [-0.123, -0.456, 8.0]
    camera = Camera("conformance", 123, 82, 61.5, 61.5, 61.5, 41.0, viewmat)
    v_image, v_alpha = data["v_out_img"][..., :3], data["v_out_img"][..., 3]
    parameters = leaves(gaussians.map(lambda t: t.to(backend.dtype)))
    out = render(parameters, camera, backend=backend)
    # The other side computed in float32 as well: 1.3e-6 is what separates it from float64.
    assert_close(out.image.double(), data["out_img"][..., :3].double(), rtol=0, atol=2e-6)
    assert_close(out.alpha.double(), data["out_img"][..., 3].double(), rtol=0, atol=2e-6)

    torch.autograd.backward([out.image, out.alpha], [v_image.to(out.image), v_alpha.to(out.alpha)])
    # The gradients were made with view directions held fixed: what passes through them is added from the reference.
    paths = []
    for detached in (False, True):
        double = leaves(gaussians.map(Tensor.double))
        image, alpha, _ = render_reference(double, camera, detach_directions=detached)
        torch.autograd.backward([image, alpha], [v_image.double(), v_alpha.double()])
        assert double.means.grad is not None
        paths.append(double.means.grad)
    expected = {
        "means": data["v_means"].double() + paths[0] - paths[1],
        "quats": data["v_quats"],
        "log_scales": data["v_scales"],
        "logit_opacities": data["v_opacities"],
        "sh0": data["v_coeffs"][:, 0],
        "shN": data["v_coeffs"][:, 1:],
    }
    for name, leaf in parameters.items():
        assert leaf.grad is not None
        assert_close(leaf.grad.double(), expected[name].double(), rtol=0, atol=6e-8, msg=named(name))
