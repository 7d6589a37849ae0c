"""The fused step equals its parts: render(), the loss, their gradients by autograd, and Adam, one after another."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from splatcli.gaussians import GROUPS, Gaussians
from splatcli.native import abi
from splatcli.native.backend import Backend
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.reference import loss_reference
from splatcli.rasterizer.reference_engine import ReferenceEngine
from splatcli.rasterizer.rendering import render
from splatcli.rasterizer.step_inputs import DensifyStats, StepInputs
from splatcli.rasterizer.train_step import NativeEngine, StepEngine
from splatcli.scene.camera import Camera
from tests.native.cases import ISAS, NEEDS_COMPILER, float32, float64, named
from tests.rasterizer.scenes import leaves, random_camera, random_gaussians, random_image, random_scene

pytestmark = NEEDS_COMPILER
F64 = torch.float64
LRS = {"means": 2e-3, "quats": 1e-3, "log_scales": 5e-3, "logit_opacities": 5e-2, "sh0": 2.5e-3, "shN": 1.25e-4}
BACKGROUND = [0.2, 0.4, 0.6]


def backend_of(build: str, threads: int = 1) -> Backend:
    return float64(threads) if build == "float64" else float32(build, threads)


def views(count: int, width: int = 37, height: int = 29) -> list[tuple[Camera, Tensor]]:
    """Cameras around one scene, each with a picture to be reached."""
    pictures = [(random_image(50 + i, width, height) * 255).round().to(torch.uint8) for i in range(count)]
    return [(random_camera(30 + i, width, height), picture) for i, picture in enumerate(pictures)]


def settings(dtype: torch.dtype, **changes: Any) -> dict[str, Any]:
    plain = {
        "lrs": LRS,
        "sh_degree": 2,
        "background": torch.tensor(BACKGROUND, dtype=dtype),
        "ssim_lambda": 0.2,
        "antialiased": False,
        "stats": None,
    }
    return {**plain, **changes}


def assert_same(got: Gaussians, expected: Gaussians, atol: float, what: str) -> None:
    for name in GROUPS:
        assert_close(
            getattr(got, name),
            getattr(expected, name),
            rtol=0,
            atol=atol,
            msg=named(f"{what} {name}"),
        )


@pytest.mark.parametrize("antialiased", [False, True])
@pytest.mark.parametrize("sh_degree", [0, 2])
def test_steps_are_render_loss_backward_and_adam(sh_degree: int, antialiased: bool) -> None:
    gaussians = random_gaussians(1, 90, sh_degree=2, dtype=F64)
    backend = float64()
    engine = NativeEngine(backend)
    fused, parted = gaussians.detach_clone(), gaussians.detach_clone()
    # With the usual 1e-15, gradients that are nothing but rounding would move parameters by whole learning rates.
    rates = {"size_power": 0.5, "log_size": -2.0}
    fused_adam = AdamState.zeros_like(gaussians, eps=1e-10, **rates)
    parted_adam = AdamState.zeros_like(gaussians, eps=1e-10, **rates)
    how = settings(F64, sh_degree=sh_degree, antialiased=antialiased)
    for step, (camera, target) in enumerate(views(5)):
        loss = engine.step(fused, fused_adam, StepInputs(camera, target, **how))
        parameters = leaves(parted)
        out = render(
            parameters,
            camera,
            sh_degree=sh_degree,
            background=how["background"],
            antialiased=antialiased,
            backend=backend,
        )
        expected = loss_reference(out.image, target.to(F64) / 255.0, how["ssim_lambda"])
        torch.autograd.backward(expected)
        parted_adam.apply_reference(parted, parameters.map(lambda t: t.grad), LRS)  # type: ignore[arg-type, return-value]
        assert_close(loss, float(expected.detach()), rtol=0, atol=1e-12)
        assert fused_adam.step == parted_adam.step == step + 1
        now, now_adam = fused.detach_clone(), copy.deepcopy(fused_adam)
        now_adam.flush(now, LRS["shN"])
        assert_same(now, parted, 1e-9, f"step {step}")
        assert_same(now_adam.exp_avg, parted_adam.exp_avg, 1e-12, f"step {step}, first moment of")
        assert_same(now_adam.exp_avg_sq, parted_adam.exp_avg_sq, 1e-14, f"step {step}, second moment of")
    moved = [name for name in GROUPS if not torch.equal(getattr(fused, name), getattr(gaussians, name))]
    assert moved == [name for name in GROUPS if sh_degree > 0 or name != "shN"]


@pytest.mark.parametrize("isa", ISAS)
def test_float32_steps_follow_float64(isa: str) -> None:
    gaussians = random_gaussians(2, 300, sh_degree=2)
    engine, exact_engine = NativeEngine(float32(isa)), NativeEngine(float64())
    single, double = gaussians.detach_clone(), gaussians.map(Tensor.double)
    adam = AdamState.zeros_like(single, eps=1e-6)
    exact_adam = AdamState.zeros_like(double, eps=1e-6)
    for camera, target in views(4):
        loss = engine.step(single, adam, StepInputs(camera, target, **settings(torch.float32)))
        exact = exact_engine.step(double, exact_adam, StepInputs(camera, target, **settings(F64)))
        assert_close(loss, exact, rtol=0, atol=1e-5)
    for name in GROUPS:
        # A learning rate is about the most that a number moves in a step. A pixel that falls on the other side of a
        # cut-off shows in a few Gaussians; rounding alone stays under a hundredth.
        apart = (getattr(single, name).double() - getattr(double, name)).abs() / LRS[name]
        assert float(apart.max()) < 1.0, name
        assert float(apart.flatten().quantile(0.99)) < 1e-2, name


@pytest.mark.parametrize(("antialiased", "absgrad"), [(False, False), (True, False), (False, True), (True, True)])
def test_growth_stats_are_those_of_the_reference_engine(antialiased: bool, absgrad: bool) -> None:
    gaussians, _ = random_scene(3, 300, sh_degree=1)
    gaussians = gaussians.map(Tensor.double)
    stats = [DensifyStats(torch.zeros(300, dtype=F64), torch.zeros(300, dtype=F64)) for _ in range(2)]
    seen = torch.zeros(300, dtype=torch.bool)
    for camera, target in views(3, 70, 45):
        before = stats[0].count.clone()
        engines: list[StepEngine] = [NativeEngine(float64()), ReferenceEngine()]
        for engine, own in zip(engines, stats, strict=True):
            engine.step(
                gaussians.detach_clone(),
                AdamState.zeros_like(gaussians),
                StepInputs(
                    camera,
                    target,
                    **settings(F64, sh_degree=1, antialiased=antialiased, stats=own),
                    absgrad=absgrad,
                ),
            )
        visible = stats[0].count - before
        assert set(visible.tolist()) == {0.0, 1.0}, "one view counts once"
        seen |= visible > 0
    assert 20 < int(seen.sum()) < 300, "some are in view and some are not"
    native, reference = stats
    assert_close(native.grad2d, reference.grad2d, rtol=1e-9, atol=1e-12)
    # The native test is the exact one of an ellipse against blocks of pixels, the other a box: it may count more.
    assert bool((native.count <= reference.count).all())
    only_the_box = native.count < reference.count
    assert int(only_the_box.sum()) <= 9
    assert not native.grad2d[(native.count == 0)].any()
    assert_close(native.mean_grad2d()[~only_the_box], reference.mean_grad2d()[~only_the_box], rtol=1e-9, atol=1e-12)


def test_growth_stats_add_up_and_are_not_needed() -> None:
    gaussians, camera = random_scene(4, 80, sh_degree=1)
    target = torch.zeros(camera.height, camera.width, 3, dtype=torch.uint8)
    engine, stats = NativeEngine(float32()), DensifyStats.zeros(80)
    results = []
    for own in (stats, stats, None):
        fused, adam = gaussians.detach_clone(), AdamState.zeros_like(gaussians)
        results.append(
            engine.step(fused, adam, StepInputs(camera, target, **settings(torch.float32, sh_degree=1, stats=own)))
        )
    assert results[0] == results[1] == results[2]
    once = DensifyStats.zeros(80)
    engine.step(
        gaussians.detach_clone(),
        AdamState.zeros_like(gaussians),
        StepInputs(camera, target, **settings(torch.float32, sh_degree=1, stats=once)),
    )
    assert torch.equal(stats.count, 2 * once.count)
    assert torch.equal(stats.grad2d, 2 * once.grad2d)
    assert once.grad2d.any()


@pytest.mark.parametrize("build", [*ISAS, "float64"])
def test_the_unseen_take_the_step_of_a_zero_gradient(build: str) -> None:
    backend = backend_of(build)
    gaussians, camera = random_scene(5, 40, sh_degree=2)
    gaussians = gaussians.map(lambda t: t.to(backend.dtype))
    # Behind the camera, broken, out of the frame, transparent.
    toward = torch.from_numpy(camera.viewmat[2, :3]).to(backend.dtype)
    unseen = torch.tensor([0, 9, 17, 39])
    gaussians.means[0] = torch.from_numpy(camera.center).to(backend.dtype) - 2 * toward
    gaussians.quats[9] = 0.0
    gaussians.means[17, 0] += 1e4
    gaussians.logit_opacities[39] = -30.0
    generator = torch.Generator().manual_seed(0)
    adam = AdamState.zeros_like(gaussians)
    adam.step = 41
    adam.sh_last_step.fill_(41)
    for name in GROUPS:
        for moment, least in ((adam.exp_avg, -1.0), (adam.exp_avg_sq, 0.0)):
            tensor = getattr(moment, name)
            tensor.copy_(torch.rand(tensor.shape, generator=generator, dtype=F64) * (1 - least) + least)
    expected = gaussians.detach_clone()
    other = copy.deepcopy(adam)
    other.apply_reference(expected, gaussians.map(torch.zeros_like), LRS)
    before = gaussians.detach_clone()
    target = torch.zeros(camera.height, camera.width, 3, dtype=torch.uint8)
    NativeEngine(backend).step(gaussians, adam, StepInputs(camera, target, **settings(backend.dtype)))
    assert torch.equal(gaussians.shN[unseen], before.shN[unseen]), "SH coefficients wait"
    assert adam.sh_last_step[unseen].tolist() == [41] * 4
    adam.flush(gaussians, LRS["shN"])
    rtol, atol = (1e-12, 1e-14) if backend.dtype == F64 else (1e-6, 1e-8)
    for name in GROUPS:
        for got, wanted in ((gaussians, expected), (adam.exp_avg, other.exp_avg), (adam.exp_avg_sq, other.exp_avg_sq)):
            assert_close(getattr(got, name)[unseen], getattr(wanted, name)[unseen], rtol=rtol, atol=atol)
        moved = (getattr(gaussians, name)[unseen] != getattr(before, name)[unseen]).any()
        assert bool(moved), "momentum goes on"


@pytest.mark.parametrize("build", [*ISAS, "float64"])
@pytest.mark.parametrize("stored", [1, 2, 3])
def test_a_view_makes_up_for_the_steps_that_others_missed(stored: int, build: str) -> None:
    """Cameras that see different Gaussians: the images of every step and the end are those of dense steps."""
    backend = backend_of(build)
    gaussians, camera = random_scene(8, 300, sh_degree=stored)
    gaussians = gaussians.map(lambda t: t.to(backend.dtype))
    shifted = camera.viewmat.copy()
    shifted[0, 3] += 2.0
    other = dataclasses.replace(camera, viewmat=shifted)
    target = (random_image(9, camera.width, camera.height) * 255).round().to(torch.uint8)
    lazy, dense = gaussians.detach_clone(), gaussians.detach_clone()
    lazy_adam, dense_adam = AdamState.zeros_like(lazy), AdamState.zeros_like(dense)
    engine, parts = NativeEngine(backend), NativeEngine(backend)
    how = settings(backend.dtype, sh_degree=1)
    missed = 0
    for step in range(12):
        view = other if step % 4 else camera
        loss = engine.step(lazy, lazy_adam, StepInputs(view, target, **how))
        # Dense: nothing is ever missed when all catch up after each step.
        expected = parts.step(dense, dense_adam, StepInputs(view, target, **how))
        dense_adam.flush(dense, LRS["shN"])
        assert_close(loss, expected, rtol=0, atol=1e-12 if backend.dtype == F64 else 1e-6)
        missed = max(missed, step + 1 - int(lazy_adam.sh_last_step.min()))
    assert missed > 2
    lazy_adam.flush(lazy, LRS["shN"])
    assert (lazy_adam.sh_last_step == 12).all()
    rtol, atol = (1e-9, 1e-12) if backend.dtype == F64 else (1e-4, 2e-6)
    for name, got, wanted in (("shN", lazy, dense), ("m", lazy_adam.exp_avg, dense_adam.exp_avg)):
        assert_close(got.shN, wanted.shN, rtol=rtol, atol=atol, msg=named(name))


# --- Adam by itself --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [*ISAS, "float64"])
@pytest.mark.parametrize(("n", "sh_degree", "power"), [(1, 0, 0), (5, 4, 0.5), (255, 1, 0), (257, 0, 0.7), (600, 3, 1)])
def test_adam_is_torchs(n: int, sh_degree: int, power: float, build: str) -> None:
    """... where the rate of a mean grows with its Gaussian's second-longest axis too, a tenth to ten times."""
    backend = backend_of(build)
    start = random_gaussians(6, n, sh_degree=sh_degree).map(lambda t: t.to(backend.dtype))
    start.log_scales[::3] *= 3.0  # some factors are at their limits
    ours, theirs = start.detach_clone(), leaves(start.map(Tensor.double))
    adam = AdamState.zeros_like(start, beta1=0.85, beta2=0.99, eps=1e-12)
    optimizer = torch.optim.Adam(
        [{"params": [tensor], "lr": LRS[name]} for name, tensor in theirs.items()], betas=(0.85, 0.99), eps=1e-12
    )
    for step in range(1, 6):
        grads = random_gaussians(60 + step, n, sh_degree=sh_degree).map(lambda t: t.to(backend.dtype))
        grads.means *= 1e-6
        grads.sh0[::2] = 0.0
        backend.call(
            "adam",
            backend.arrays(ours),
            backend.arrays(grads),
            abi.Adam(
                step=step,
                beta1=adam.beta1,
                beta2=adam.beta2,
                eps=adam.eps,
                lr=(ctypes.c_double * 6)(*(LRS[name] for name in GROUPS)),
                exp_avg=backend.arrays(adam.exp_avg),
                exp_avg_sq=backend.arrays(adam.exp_avg_sq),
                size_power=power,
                log_size=-2.0,
            ),
        )
        for name, tensor in theirs.items():
            tensor.grad = getattr(grads, name).double().clone()
        before = theirs.means.detach().clone()
        sizes = theirs.log_scales.detach().sort(dim=1).values[:, 1:2].exp()
        factor = (sizes / math.exp(-2.0)).pow(power).clamp(0.1, 10.0)
        optimizer.step()
        with torch.no_grad():
            theirs.means.copy_(before + factor * (theirs.means - before))
    # A few roundings of each number, five times; where terms of both signs meet, of the largest one.
    rounding = 8 * torch.finfo(backend.dtype).eps
    for name, tensor in theirs.items():
        if tensor.numel() == 0:
            continue
        state = optimizer.state[tensor]
        for got, wanted in (
            (getattr(ours, name), tensor.detach()),
            (getattr(adam.exp_avg, name), state["exp_avg"]),
            (getattr(adam.exp_avg_sq, name), state["exp_avg_sq"]),
        ):
            assert_close(got.double(), wanted, rtol=rounding, atol=rounding * float(wanted.abs().max()))
