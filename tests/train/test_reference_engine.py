"""The plain torch training step: it learns, and its gradients and statistics are those of the reference renderer."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from splatcli.gaussians import GROUPS, Gaussians
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.reference import loss_reference, render_reference
from splatcli.rasterizer.reference_engine import ReferenceEngine
from splatcli.rasterizer.step_inputs import DensifyStats, StepInputs
from splatcli.scene.camera import Camera
from tests.train.worlds import random_gaussians, ring_cameras

LRS = {"means": 1e-2, "quats": 1e-2, "log_scales": 2e-2, "logit_opacities": 5e-2, "sh0": 2e-2, "shN": 1e-3}
BLACK = torch.zeros(3)


def front(size: int = 24, z: float = 3.0) -> Camera:
    viewmat = np.eye(4)
    viewmat[2, 3] = z
    return Camera("front.png", size, size, float(size), float(size), size / 2, size / 2, viewmat)


def photo(size: int = 24) -> Tensor:
    """[H, W, 3] uint8: a bright disc on a ramp."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    disc = ((x**2 + y**2) < 0.4).float()
    return (torch.stack([0.2 + 0.6 * disc, 0.3 + 0.2 * x, 0.8 - 0.5 * disc], dim=2) * 255).to(torch.uint8)


def step(
    gaussians: Gaussians,
    adam: AdamState,
    camera: Camera,
    target: Tensor,
    stats: DensifyStats | None = None,
    *,
    background: Tensor = BLACK,
    antialiased: bool = False,
    lrs: dict[str, float] = LRS,
) -> float:
    return ReferenceEngine().step(
        gaussians,
        adam,
        StepInputs(camera, target, lrs, gaussians.sh_degree, background, 0.2, antialiased, stats),
    )


def test_forty_steps_on_one_photo_halve_the_loss() -> None:
    gaussians = random_gaussians(30)
    gaussians.log_scales += 0.7
    adam = AdamState.zeros_like(gaussians)
    losses = [step(gaussians, adam, front(), photo()) for _ in range(40)]
    assert losses[-1] < 0.5 * losses[0]
    assert adam.step == 40


@pytest.mark.parametrize("antialiased", [False, True])
def test_the_first_step_goes_along_the_reference_gradient(antialiased: bool) -> None:
    gaussians = random_gaussians(12, dtype=torch.float64)
    leaves = gaussians.map(lambda t: t.clone().requires_grad_())
    background = torch.tensor([0.1, 0.5, 0.9])
    image, _, _ = render_reference(leaves, front(), background=background, antialiased=antialiased)
    loss = loss_reference(image, photo().double() / 255.0, 0.2)
    loss.backward()

    # beta1 = beta2 = 0 and a large eps turn Adam's step into lr * gradient / eps, to first order in 1 / eps.
    adam = AdamState.zeros_like(gaussians, beta1=0.0, beta2=0.0, eps=1e9)
    before = gaussians.detach_clone()
    value = step(
        gaussians,
        adam,
        front(),
        photo(),
        background=background,
        antialiased=antialiased,
        lrs=dict.fromkeys(GROUPS, 1e9),
    )
    assert value == pytest.approx(float(loss.detach()), rel=1e-12)
    for name, tensor in gaussians.items():
        assert_close(getattr(before, name) - tensor, getattr(leaves, name).grad, rtol=1e-7, atol=1e-14)


def test_the_statistics_are_the_gradient_by_the_projected_mean_in_half_image_units() -> None:
    """A principal point moved by d moves the projected means by d: finite differences of single Gaussians show it."""
    gaussians = random_gaussians(1, dtype=torch.float64)
    gaussians.log_scales += 1.0
    camera, target = front(), photo()
    stats = DensifyStats.zeros(1)
    step(gaussians.detach_clone(), AdamState.zeros_like(gaussians), camera, target, stats)

    def loss(dx: float, dy: float) -> float:
        # The Gaussian shifts in the image by moving sideways; its covariance is kept by moving the camera's
        # principal point, on which only the clamp of the Jacobian, not active here, depends otherwise.
        shifted = Camera("x", 24, 24, camera.fx, camera.fy, camera.cx + dx, camera.cy + dy, camera.viewmat)
        image, _, _ = render_reference(gaussians, shifted)
        return float(loss_reference(image, target.double() / 255.0, 0.2))

    h = 1e-5
    gradient = torch.tensor([(loss(h, 0) - loss(-h, 0)) / (2 * h), (loss(0, h) - loss(0, -h)) / (2 * h)])
    assert_close(stats.grad2d, (12.0 * gradient).norm()[None].float(), rtol=1e-3, atol=1e-9)
    assert stats.count.tolist() == [1.0]


def test_statistics_add_up_over_views_and_count_only_what_is_seen() -> None:
    gaussians = random_gaussians(3)
    gaussians.means[:] = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, -50.0], [300.0, 0.0, 0.0]])
    stats, adam = DensifyStats.zeros(3), AdamState.zeros_like(gaussians)
    step(gaussians, adam, front(), photo(), stats, lrs=dict.fromkeys(GROUPS, 0.0))
    once = stats.grad2d.clone()
    step(gaussians, adam, front(), photo(), stats, lrs=dict.fromkeys(GROUPS, 0.0))
    assert stats.count.tolist() == [2.0, 0.0, 0.0]
    assert_close(stats.grad2d, 2.0 * once)
    assert once[1:].tolist() == [0.0, 0.0]
    assert float(once[0]) > 0.0


def test_a_view_that_sees_nothing_has_a_loss_and_moves_nothing() -> None:
    gaussians = random_gaussians(4)
    before = gaussians.detach_clone()
    stats = DensifyStats.zeros(4)
    loss = step(gaussians, AdamState.zeros_like(gaussians), front(z=-9.0), photo(), stats)
    black = loss_reference(torch.zeros(24, 24, 3), photo().float() / 255.0, 0.2)
    assert loss == pytest.approx(float(black), rel=1e-6)
    for name, tensor in gaussians.items():
        assert torch.equal(tensor, getattr(before, name))
    assert not stats.count.any()


def test_the_same_steps_have_the_same_bits() -> None:
    def run() -> Gaussians:
        gaussians = random_gaussians(10)
        adam = AdamState.zeros_like(gaussians)
        for camera in itertools.islice(itertools.cycle(ring_cameras(3)), 6):
            step(gaussians, adam, camera, photo(16))
        return gaussians

    first, second = run(), run()
    for name, tensor in first.items():
        assert torch.equal(tensor, getattr(second, name))
