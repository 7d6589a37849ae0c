"""Regularisers and exploration noise: native against plain torch, published numbers, and the effect of the noise."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from splatcli.gaussians import GROUPS, Gaussians
from splatcli.native import abi
from splatcli.native.backend import Backend
from splatcli.rasterizer import AdamState, NativeEngine, Regularisation, StepInputs
from splatcli.rasterizer.reference import noise_reference, normals, philox, regularise_reference, rotation_matrices
from splatcli.rasterizer.reference_engine import ReferenceEngine
from tests.native.cases import ISAS, NEEDS_COMPILER, float32, float64
from tests.rasterizer.scenes import random_gaussians, random_image, random_scene

F64 = torch.float64
LRS = {"means": 1e-3, "quats": 2e-3, "log_scales": 5e-3, "logit_opacities": 2e-2, "sh0": 3e-3, "shN": 2e-4}


def noise(backend: Backend, gaussians: Gaussians, *, step: int = 7, scale: float = 40.0, seed: int = 3) -> None:
    job = abi.Noise(seed=seed, step=step, scale=scale, threshold=0.005, steepness=100.0)
    backend.call("noise", backend.arrays(gaussians), job)


def thin(n: int, dtype: torch.dtype = F64) -> Gaussians:
    """Gaussians of all opacities, most of them nearly transparent."""
    gaussians = random_gaussians(4, n, sh_degree=0).map(lambda t: t.to(dtype))
    gaussians.logit_opacities = torch.linspace(-9.0, 3.0, n, dtype=dtype)
    return gaussians


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    """Random123's known-answer tests of philox4x32-10."""
    words = philox([torch.tensor([word]) for word in counter], *key)
    assert tuple(int(word) for word in words) == expected


def test_normals_are_normal() -> None:
    drawn = normals(11, 5, 200_000)
    assert_close(drawn.mean(dim=0), torch.zeros(3, dtype=F64), rtol=0, atol=0.01)
    assert_close(drawn.T.cov(), torch.eye(3, dtype=F64), rtol=0, atol=0.015)
    assert_close((drawn**4).mean(dim=0), torch.full((3,), 3.0, dtype=F64), rtol=0, atol=0.1)
    assert not torch.equal(drawn, normals(11, 6, 200_000))
    assert not torch.equal(drawn, normals(12, 5, 200_000))
    assert torch.equal(drawn[:10], normals(11, 5, 10)), "each row stands for itself"


@NEEDS_COMPILER
@pytest.mark.parametrize("step", [1, 2**33 + 5])
@pytest.mark.parametrize("build", ["float64", *ISAS])
def test_noise_is_that_of_the_reference(build: str, step: int) -> None:
    backend = float64() if build == "float64" else float32(build)
    ours, theirs = thin(700, backend.dtype), thin(700)
    before = ours.means.clone()
    noise(backend, ours, step=step, seed=2**40 + 9)
    noise_reference(theirs, step, Regularisation(noise=40.0, seed=2**40 + 9))
    pushed = (theirs.means - before).abs()
    assert float(pushed.max()) > 0.1
    # The polynomials of sine and cosine are good to 1e-7 in any arithmetic.
    rtol, atol = (1e-6, 1e-6 * float(pushed.max())) if build == "float64" else (1e-5, 1e-5)
    assert_close(ours.means.to(F64), theirs.means, rtol=rtol, atol=atol)
    for name in set(GROUPS) - {"means"}:
        assert torch.equal(getattr(ours, name), getattr(thin(700, backend.dtype), name))


@NEEDS_COMPILER
def test_noise_is_the_same_whatever_the_threads_and_the_build() -> None:
    results = []
    for isa in ISAS:
        for threads in (1, 3):
            gaussians = thin(1001, torch.float32)
            noise(float32(isa, threads), gaussians)
            results.append(gaussians.means)
    assert all(torch.equal(results[0], other) for other in results[1:2])
    for other in results[2:]:
        assert_close(other, results[0], rtol=1e-5, atol=1e-5)


@NEEDS_COMPILER
def test_opaque_gaussians_stay_and_thin_ones_move_along_themselves() -> None:
    gaussians = thin(4000)
    gaussians.log_scales[:] = torch.tensor([-6.0, -6.0, 0.0], dtype=F64)  # needles
    before = gaussians.means.clone()
    noise(float64(), gaussians, scale=1.0)
    moved = gaussians.means - before
    opacity = gaussians.logit_opacities.sigmoid()
    assert float(moved[opacity > 0.4].abs().max()) < 1e-14
    along = (rotation_matrices(gaussians.quats).mT @ moved[:, :, None]).squeeze(2)[opacity < 0.002]
    assert float(along[:, 2].std()) > 0.3
    assert float(along[:, :2].std()) < 1e-4 * float(along[:, 2].std())


@NEEDS_COMPILER
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e38, 200.0])
def test_noise_poisons_nobody(poison: float) -> None:
    gaussians = thin(64, torch.float32)
    clean = thin(64, torch.float32)
    noise(float32(), clean)
    gaussians.log_scales[5, 1] = poison
    gaussians.quats[9] = 0.0
    noise(float32(), gaussians)
    assert bool(gaussians.means.isfinite().all())
    others = torch.ones(64, dtype=torch.bool)
    others[[5, 9]] = False
    assert torch.equal(gaussians.means[others], clean.means[others])


# --- a whole step -----------------------------------------------------------------------------------------------------


def inputs_of(dtype: torch.dtype, regularisation: Regularisation, seed: int = 8) -> tuple[Gaussians, StepInputs]:
    gaussians, camera = random_scene(seed, 300, sh_degree=1)
    photo = (random_image(seed, camera.width, camera.height) * 255).round().to(torch.uint8)
    background = torch.tensor([0.1, 0.2, 0.3], dtype=dtype)
    inputs = StepInputs(camera, photo, LRS, 1, background, 0.2, False, None, regularisation=regularisation)
    return gaussians.map(lambda t: t.to(dtype)), inputs


@NEEDS_COMPILER
@pytest.mark.parametrize(
    "regularisation",
    [
        Regularisation(opacity_reg=0.3),
        Regularisation(scale_reg=0.2),
        Regularisation(opacity_reg=0.01, scale_reg=0.01, noise=80.0, seed=42),
    ],
)
def test_regularisers_are_those_of_the_reference(regularisation: Regularisation) -> None:
    start, inputs = inputs_of(F64, regularisation)
    ours, theirs = start.detach_clone(), start.detach_clone()
    our_adam, their_adam = AdamState.zeros_like(ours), AdamState.zeros_like(theirs)
    plain = start.detach_clone()
    NativeEngine(float64()).step(
        plain, AdamState.zeros_like(plain), dataclasses.replace(inputs, regularisation=Regularisation())
    )
    engine, reference = NativeEngine(float64()), ReferenceEngine()
    for _ in range(3):
        loss = engine.step(ours, our_adam, inputs)
        assert_close(loss, reference.step(theirs, their_adam, inputs), rtol=1e-9, atol=0)
    our_adam.flush(ours, LRS["shN"])
    their_adam.flush(theirs, LRS["shN"])
    for name in GROUPS:
        got, wanted = getattr(ours, name), getattr(theirs, name)
        # Adam makes a whole step of a gradient that is only rounding: a few numbers may differ by that.
        apart = (got - wanted).abs() > 1e-6 * LRS[name] + 1e-7 * wanted.abs()
        assert float(apart.double().mean()) < 0.01, name
    assert not torch.equal(ours.logit_opacities, plain.logit_opacities) or regularisation.opacity_reg == 0.0


@NEEDS_COMPILER
def test_a_gaussian_that_no_view_reaches_shrinks_and_fades() -> None:
    gaussians, inputs = inputs_of(torch.float32, Regularisation(opacity_reg=0.01, scale_reg=0.01))
    gaussians.means[:5] += 1000.0
    before = gaussians.detach_clone()
    NativeEngine(float32()).step(gaussians, AdamState.zeros_like(gaussians), inputs)
    assert_close(before.logit_opacities[:5] - gaussians.logit_opacities[:5], torch.full((5,), 2e-2), rtol=1e-3, atol=0)
    assert_close(before.log_scales[:5] - gaussians.log_scales[:5], torch.full((5, 3), 5e-3), rtol=1e-3, atol=0)
    assert torch.equal(before.means[:5], gaussians.means[:5])


def test_the_reference_gradient_is_that_of_the_means() -> None:
    gaussians = thin(50)
    grads = gaussians.map(torch.zeros_like)
    regularise_reference(gaussians, grads, Regularisation(opacity_reg=0.5, scale_reg=2.0))

    def mean(logits: Tensor, log_scales: Tensor) -> Tensor:
        return 0.5 / 50 * (1 / (1 + torch.exp(-logits))).sum() + 2.0 / 150 * torch.exp(log_scales).sum()

    step = 1e-4
    for name, places in (("logit_opacities", (7,)), ("log_scales", (3, 1))):
        up, down = (gaussians.detach_clone() for _ in range(2))
        getattr(up, name)[places] += step
        getattr(down, name)[places] -= step
        slope = (mean(up.logit_opacities, up.log_scales) - mean(down.logit_opacities, down.log_scales)) / (2 * step)
        assert_close(getattr(grads, name)[places], slope, rtol=1e-6, atol=1e-12)
