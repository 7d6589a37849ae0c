"""LossEngine: a step with a loss of the caller's is the reference's step with that loss, in every part.

The cases have every input that changes a step; NativeEngine, with its own loss, takes them too.
"""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from splatcli.gaussians import Gaussians
from splatcli.rasterizer import NativeEngine, StepInputs
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.alpha_loss import alpha_loss_reference
from splatcli.rasterizer.depth_loss import DepthTarget, depth_loss_reference
from splatcli.rasterizer.loss_engine import LossEngine
from splatcli.rasterizer.reference import loss_reference
from splatcli.rasterizer.reference_engine import ReferenceEngine
from splatcli.rasterizer.step_inputs import DensifyStats, Regularisation, StepEngine, ViewParams
from splatcli.scene.camera import Camera
from tests.native.cases import NEEDS_COMPILER, float64
from tests.rasterizer.engines import F64, HEIGHT, LRS, WIDTH, masked_corner
from tests.rasterizer.scenes import random_camera, random_gaussians, random_image

pytestmark = NEEDS_COMPILER
#: The background, exposed, is none of the 256 levels of a target, where L1 has no gradient.
EXPOSURE = torch.tensor([[1.1, 0.05, -0.1, 0.0213], [0.03, 0.8, 0.1, -0.0517], [-0.02, 0.04, 1.3, 0.1031]], dtype=F64)


def training_loss(image: Tensor, target: Tensor, counts: Tensor | None) -> Tensor:
    return loss_reference(image, target, 0.2)


class Step:
    """Two steps of an engine, and everything that they changed."""

    def __init__(self, engine: StepEngine, *, posed: bool = False, absgrad: bool = False, **more: Any) -> None:
        self.gaussians = random_gaussians(1, 90, sh_degree=2, dtype=F64).detach_clone()
        self.adam = AdamState.zeros_like(self.gaussians)
        self.stats = DensifyStats(*(torch.zeros(90, dtype=F64) for _ in range(2)))
        self.heard: list[Tensor] = []
        self.losses: list[float] = []
        for step in range(2):
            target = (random_image(50 + step, WIDTH, HEIGHT) * 255).round().to(torch.uint8)
            if "mask" in more:
                target[more["mask"]] = 0
            inputs = StepInputs(
                random_camera(30 + step, WIDTH, HEIGHT),
                target,
                LRS,
                2,
                torch.tensor([0.2, 0.4, 0.6], dtype=F64),
                0.2,
                step == 1,
                self.stats,
                absgrad=absgrad,
                **more,
            )
            if posed:
                inputs = replace(inputs, view_params=ViewParams(self.apply_grad, pose=True, colours=EXPOSURE))
            self.losses += engine.submit(self.gaussians, self.adam, inputs)
        self.adam.flush(self.gaussians, LRS["shN"])

    def apply_grad(self, v_viewmat: Tensor | None, v_exposure: Tensor | None) -> None:
        assert v_viewmat is not None
        assert v_exposure is not None
        self.heard += [v_viewmat[:3].clone(), v_exposure.clone()]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "absgrad": {"absgrad": True},
    "mask": {"mask": masked_corner()},
    "per-view parameters": {"posed": True},
    "regularisation and noise": {"regularisation": Regularisation(0.02, 0.03, noise=1e-3, seed=5)},
    "3D filter": {"filter_3d": torch.linspace(0.0, 0.1, 90, dtype=F64)},
    "depth": {"depth": DepthTarget(torch.arange(0, 900, 7), torch.full((129,), 0.25, dtype=F64), 0.7)},
    "alpha": {"mask": masked_corner(), "alpha_lambda": 0.5, "mask_lambda": 0.5},
}


def test_every_input_that_may_be_left_out_has_a_case() -> None:
    """Else an engine that does not read a new input, such as the weight of another term of the loss, is not noticed."""
    given = {"view_params" if name == "posed" else name for case in CASES.values() for name in case}
    optional = {field.name for field in fields(StepInputs) if field.default is not MISSING}
    assert given == optional - {"shard"}  # which only processes with shards have


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("engine", ["loss", "native"])
def test_a_step_is_that_of_the_reference(engine: str, case: str) -> None:
    own_engine = NativeEngine(float64()) if engine == "native" else LossEngine(training_loss, backend=float64())
    own = Step(own_engine, **CASES[case])
    expected = Step(ReferenceEngine(), **CASES[case])
    assert_close(own.losses, expected.losses, rtol=1e-9, atol=0)
    pairs: list[tuple[Gaussians, Gaussians]] = [
        (own.gaussians, expected.gaussians),
        (own.adam.exp_avg, expected.adam.exp_avg),
        (own.adam.exp_avg_sq, expected.adam.exp_avg_sq),
    ]
    for mine, theirs in pairs:
        for (name, one), (_, other) in zip(mine.items(), theirs.items(), strict=True):
            assert_close(one, other, rtol=1e-6, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
    assert float(expected.stats.grad2d.max()) > 0
    assert_close(own.stats.grad2d, expected.stats.grad2d, rtol=1e-6, atol=1e-12)
    assert_close(own.stats.count, expected.stats.count, rtol=0, atol=0)
    assert len(own.heard) == len(expected.heard)
    for one, other in zip(own.heard, expected.heard, strict=True):
        assert_close(one, other[: len(one)], rtol=1e-6, atol=1e-9)


def test_the_loss_sees_which_pixels_count() -> None:
    seen: list[Tensor] = []

    def loss(image: Tensor, target: Tensor, counts: Tensor | None) -> Tensor:
        assert counts is not None
        seen.append(counts)
        assert float(image.detach()[~counts].abs().max()) == 0.0
        assert float(target[~counts].abs().max()) == 0.0
        assert target.dtype == image.dtype == F64
        return (image - target)[counts].abs().mean()

    Step(LossEngine(loss, backend=float64()), mask=masked_corner())
    assert len(seen) == 2
    assert torch.equal(seen[0], ~masked_corner())


def test_a_loss_may_ask_for_gaussians_alpha_depth_and_camera() -> None:
    """Terms of a step written as parts of a loss train as the engine's own do."""
    case, target = Regularisation(0.02, 0.03), CASES["depth"]["depth"]
    seen: list[str] = []

    def loss(
        image: Tensor,
        truth: Tensor,
        counts: Tensor | None,
        weight: float = 1.0,  # a default is the function's own
        *,
        gaussians: Gaussians,
        alpha: Tensor,
        depth: Tensor,
        camera: Camera,
    ) -> Tensor:
        seen.append(camera.name)
        assert image.shape[:2] == alpha.shape == depth.shape == (camera.height, camera.width)
        opacity, scale = gaussians.logit_opacities.sigmoid().mean(), gaussians.log_scales.exp().mean()
        own = training_loss(image, truth, counts) + depth_loss_reference(alpha, depth, target)
        own = own + alpha_loss_reference(alpha, (truth * 255).round().to(torch.uint8), None, 0.5, 0.0)
        return weight * own + case.opacity_reg * opacity + case.scale_reg * scale

    mine = Step(LossEngine(loss, backend=float64()))
    theirs = Step(ReferenceEngine(), regularisation=case, depth=target, alpha_lambda=0.5)
    assert seen == [random_camera(30 + step, WIDTH, HEIGHT).name for step in range(2)]
    for (name, one), (_, other) in zip(mine.adam.exp_avg.items(), theirs.adam.exp_avg.items(), strict=True):
        assert_close(one, other, rtol=1e-6, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
    assert_close(mine.stats.grad2d, theirs.stats.grad2d, rtol=1e-6, atol=1e-12)
