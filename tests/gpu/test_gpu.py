"""The CUDA backend on a GPU: its numbers against the CPU twin's, and what a GPU alone can break.

Tolerances are relative to the largest number of an image or of a gradient tensor. The twins differ in contraction
(a * b + c rounds once on the GPU), in exp2 and the reciprocal (two units in the last place) and in the order of some
sums: 1e-5 for images, ten times that for a thousandth of the pixels (Gaussians like needles), and 1e-4 for gradients,
where no cut-off is so near that rounding could decide it (tests.native.cases.away_from_cutoffs, wider). In the other
pixels, which are few, a Gaussian of alpha 1/255 or one behind a transmittance of 1e-4 comes or goes: a hundredth.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from splatcli import fused_ssim
from splatcli.gaussians import GROUPS, Gaussians
from splatcli.native.backend import Backend
from splatcli.rasterizer import AdamState, AsyncEngine, DensifyStats, NativeEngine, StepInputs, render
from splatcli.rasterizer.step_inputs import ViewParams
from splatcli.rasterizer.train_step import TrainStepPipeline
from splatcli.scene.camera import Camera, CameraModel
from tests.native.cases import Outcome, Weights, away_from_cutoffs, float32, matmul_precision, named, rows_of
from tests.rasterizer.scenes import (
    front_camera,
    leaves,
    of_model,
    random_camera,
    random_gaussians,
    random_image,
    random_scene,
)

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"
IMAGES, GRADIENTS, CUT_OFF = 1e-5, 1e-4, 1e-2
LRS = {"means": 2e-3, "quats": 1e-3, "log_scales": 5e-3, "logit_opacities": 5e-2, "sh0": 2.5e-3, "shN": 1.25e-4}


@pytest.fixture(scope="module")
def backend() -> Backend:
    return Backend.cuda(DEVICE)


def synchronize() -> None:
    if DEVICE != "cpu":
        torch.cuda.synchronize()


def outcome(
    backend: Backend, gaussians: Gaussians, camera: Camera, weights: Weights, *, antialiased: bool = False
) -> Outcome:
    """Images and gradients, computed on the backend's device and brought to the CPU."""
    device = backend.device
    parameters = leaves(gaussians.to(device))
    background = torch.tensor([0.3, 0.6, 0.1], device=device).requires_grad_()
    viewmat = torch.from_numpy(camera.viewmat).float().to(device).requires_grad_()
    out = render(parameters, camera, background=background, viewmat=viewmat, antialiased=antialiased, backend=backend)
    Weights(weights.image.to(device), weights.alpha.to(device), weights.depth.to(device)).backward(
        out.image, out.alpha, out.depth
    )
    inputs = {**dict(parameters.items()), "background": background, "viewmat": viewmat}
    gradients = {}
    for name, tensor in inputs.items():
        assert tensor.grad is not None, name
        gradients[name] = tensor.grad.cpu()
    images = {"image": out.image, "alpha": out.alpha, "depth": out.depth}
    return Outcome({name: image.detach().cpu() for name, image in images.items()}, gradients)


def assert_twins(backend: Backend, gaussians: Gaussians, camera: Camera, *, antialiased: bool = False) -> None:
    weights = Weights.random(3, camera)
    keep = away_from_cutoffs(gaussians, camera, antialiased=antialiased, reach=1e-4)
    assert float((~keep).float().mean()) < 0.05, "the scene sits on its cut-offs"
    got = outcome(backend, gaussians, camera, weights.where(keep), antialiased=antialiased)
    want = outcome(float32("portable"), gaussians, camera, weights.where(keep), antialiased=antialiased)
    for name, image in want.images.items():
        scale = max(1.0, float(image.abs().max()))
        apart = (got.images[name] - image).abs()
        assert torch.isfinite(apart).all(), name
        if keep.any():
            assert float(apart[keep].quantile(0.999)) <= IMAGES * scale, name
            assert float(apart[keep].max()) <= 10 * IMAGES * scale, name
        assert float(apart.max()) <= CUT_OFF * scale, name
    for name, gradient in want.gradients.items():
        if gradient.numel():
            scale = max(1.0, float(gradient.abs().max()))
            assert_close(got.gradients[name], gradient, rtol=0, atol=GRADIENTS * scale, msg=named(name))


def outcome_bits(found: Outcome) -> dict[str, bytes]:
    tensors = {**{f"{name} itself": t for name, t in found.images.items()}, **found.gradients}
    return {name: tensor.contiguous().numpy().tobytes() for name, tensor in tensors.items()}


# --- the numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("antialiased", [False, True])
@pytest.mark.parametrize(("seed", "sh_degree"), [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4)])
def test_random_scenes(backend: Backend, seed: int, sh_degree: int, antialiased: bool) -> None:
    gaussians, camera = random_scene(seed, 200, sh_degree=sh_degree, scale=0.05 * seed, width=75, height=50)
    assert_twins(backend, gaussians, camera, antialiased=antialiased)


@pytest.mark.parametrize("model", ["fisheye", "ortho"])
@pytest.mark.parametrize(("seed", "sh_degree"), [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4)])
def test_other_camera_models(backend: Backend, seed: int, sh_degree: int, model: CameraModel) -> None:
    gaussians, camera = random_scene(seed, 200, sh_degree=sh_degree, scale=0.05 * seed, width=75, height=50)
    assert_twins(backend, gaussians, of_model(camera, model))


def test_a_large_random_scene(backend: Backend) -> None:
    gaussians, camera = random_scene(6, 20_000, width=401, height=303, scale=0.02)
    assert_twins(backend, gaussians, camera)


@pytest.mark.parametrize("n", [0, 1, 255, 256, 257])
def test_any_number_of_gaussians(backend: Backend, n: int) -> None:
    gaussians, camera = random_scene(7, 300)
    assert_twins(backend, rows_of(gaussians, slice(0, n)), camera)


@pytest.mark.parametrize(("width", "height"), [(1, 1), (16, 16), (17, 15), (3, 200), (200, 3)])
def test_any_size_of_image(backend: Backend, width: int, height: int) -> None:
    gaussians, camera = random_scene(8, 100, width=width, height=height)
    assert_twins(backend, gaussians, camera)


def test_more_tiles_than_sixteen_bits_can_number(backend: Backend) -> None:
    camera = front_camera(4112, 4096, 3000.0)
    gaussians = random_gaussians(9, 300, sh_degree=0, spread=0.6, scale=0.002)
    gaussians.means[:, 2] = 2.0 + gaussians.means[:, 2].abs()
    gaussians.means[0] = torch.tensor([2048.0 / 1500.0, 2040.0 / 1500.0, 2.0])  # eight pixels from the last corner
    gaussians.logit_opacities[0] = 3.0
    with torch.no_grad():
        got = render(gaussians.to(DEVICE), camera, backend=backend)
        want = render(gaussians, camera, backend=Backend.cpu(isa="portable"))
    apart = (got.image.cpu() - want.image).abs()
    assert float(want.alpha[-16:, -16:].max()) > 0.5, "something is in the last tile"
    assert float((apart > 1e-4).float().mean()) < 1e-5
    assert float(apart.max()) < CUT_OFF * max(1.0, float(want.image.abs().max()))


def test_nothing_in_view_is_the_background(backend: Backend) -> None:
    gaussians, camera = random_scene(10, 50)
    gaussians.means += torch.from_numpy(camera.center - 9.0 * camera.viewmat[2, :3]).float()
    background = torch.tensor([0.25, 0.5, 0.75], device=DEVICE)
    out = render(gaussians.to(DEVICE), camera, background=background, backend=backend)
    assert torch.equal(out.image, background.expand_as(out.image))
    assert not out.alpha.any()
    assert not out.depth.any()


@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize(("width", "height"), [(1, 1), (9, 8), (64, 45), (65, 46), (333, 217)])
def test_loss(backend: Backend, width: int, height: int, as_bytes: bool) -> None:
    image, target = random_image(1, width, height), random_image(2, width, height)
    if as_bytes:
        target = (target * 255).round().to(torch.uint8)
    for ssim_lambda in (0.0, 0.2, 1.0):
        v_want, v_got = torch.empty_like(image), torch.full_like(image, math.nan, device=DEVICE)
        cpu = NativeEngine(float32("portable"))._pipeline.loss(image, target, v_want, ssim_lambda)
        pipeline = TrainStepPipeline(backend, None)
        pipeline.l1_ssim.fill_(math.nan)
        pipeline.loss(image.to(DEVICE), target.to(DEVICE), v_got, ssim_lambda)
        assert_close(pipeline.l1_ssim.tolist(), [cpu.l1, cpu.ssim], rtol=0, atol=2e-6)
        # As in test_native_loss: where an image is flat, terms of the size 1 / C2 cancel.
        rounding = 1e-5 * float(v_want.abs().max()) + 5e-4 * ssim_lambda / image.numel()
        assert_close(v_got.cpu(), v_want, rtol=0, atol=rounding)


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_fused_ssim_of_planes(padding: Literal["same", "valid"]) -> None:
    images = [torch.stack([random_image(k, 67, 91)[..., :2] for k in first]) for first in ((1, 2, 3), (4, 5, 6))]
    results = []
    for device in ("cpu", DEVICE):
        x, y = (image.permute(0, 3, 1, 2).to(device).requires_grad_() for image in images)
        value = fused_ssim(x, y, padding)
        torch.autograd.backward(value)
        assert x.grad is not None
        assert y.grad is not None
        results.append([value.detach().cpu(), x.grad.cpu(), y.grad.cpu()])
    for want, got in zip(*results, strict=True):
        rounding = 1e-5 * float(want.abs().max()) + (5e-4 / images[0].numel() if want.dim() else 0.0)
        assert_close(got, want, rtol=0, atol=rounding)


# --- training --------------------------------------------------------------------------------------------------------


class Run:
    """Gaussians, moments and statistics of one training on a device."""

    def __init__(self, device: str | torch.device, n: int = 500, *, eps: float = 1e-15) -> None:
        self.gaussians = random_gaussians(2, n, sh_degree=2).to(device)
        self.adam = AdamState.zeros_like(self.gaussians, eps=eps)
        self.stats = DensifyStats.zeros(n, device)
        self.views = []
        for i in range(3):
            picture = (random_image(50 + i, 90, 70) * 255).round().to(torch.uint8)
            self.views.append((random_camera(30 + i, 90, 70), picture.to(device)))
        self.background = torch.tensor([0.2, 0.4, 0.6], device=device)

    def inputs(self, k: int) -> StepInputs:
        camera, target = self.views[k % 3]
        return StepInputs(camera, target, LRS, min(2, k // 3), self.background, 0.2, k % 2 == 1, self.stats)

    def tensors(self) -> dict[str, Tensor]:
        bundles = {"": self.gaussians, "m ": self.adam.exp_avg, "v ": self.adam.exp_avg_sq}
        rows = {f"{kind}{name}": tensor for kind, bundle in bundles.items() for name, tensor in bundle.items()}
        # The steps that SH coefficients stand at are state like the moments: a step is only then the same again.
        return {**rows, "grad2d": self.stats.grad2d, "count": self.stats.count, "steps": self.adam.sh_last_step}

    def bits(self) -> dict[str, bytes]:
        return {name: tensor.cpu().numpy().tobytes() for name, tensor in self.tensors().items()}

    def save(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.tensors().items()}

    def restore(self, saved: dict[str, Tensor]) -> None:
        for name, tensor in self.tensors().items():
            tensor.copy_(saved[name])


def train(run: Run, engine: Any, steps: int = 12) -> list[float]:
    losses: list[float] = []
    for k in range(steps):
        losses += engine.submit(run.gaussians, run.adam, run.inputs(k))
    losses += engine.drain()
    assert len(losses) == steps
    assert all(math.isfinite(loss) for loss in losses)
    return losses


def trained_bits(backend: Backend, steps: int = 12, **engine: Any) -> tuple[list[float], dict[str, bytes]]:
    run = Run(backend.device)
    losses = train(run, AsyncEngine(backend, **engine), steps)
    return losses, run.bits()


def test_steps_follow_the_cpu(backend: Backend) -> None:
    # With the usual 1e-15, gradients that are nothing but rounding would move parameters by whole learning rates.
    ours, twin = Run(DEVICE, eps=1e-6), Run("cpu", eps=1e-6)
    losses = train(ours, AsyncEngine(backend), 4)
    assert_close(losses, train(twin, NativeEngine(float32("portable")), 4), rtol=0, atol=1e-5)
    for name in GROUPS:
        # As in test_native_step: a pixel on the other side of a cut-off shows in a few Gaussians.
        apart = (getattr(ours.gaussians, name).cpu() - getattr(twin.gaussians, name)).abs() / LRS[name]
        assert float(apart.max()) < 1.0, name
        assert float(apart.flatten().quantile(0.99)) < 1e-2, name
    assert int((ours.stats.count.cpu() != twin.stats.count).sum()) <= 5
    assert_close(ours.stats.grad2d.cpu(), twin.stats.grad2d, rtol=0.05, atol=1e-4)


def test_two_runs_leave_the_same_bits(backend: Backend) -> None:
    assert trained_bits(backend) == trained_bits(backend)
    weights = Weights.random(1, random_camera(1, 90, 70))
    gaussians, camera = random_scene(1, 3000, width=90, height=70)
    first = outcome_bits(outcome(backend, gaussians, camera, weights))
    for _ in range(3):
        assert outcome_bits(outcome(backend, gaussians, camera, weights)) == first


@pytest.mark.parametrize("capacity", [1, 700])
def test_an_overflow_on_the_way_leaves_the_same_bits(backend: Backend, capacity: int) -> None:
    assert trained_bits(backend, capacity=capacity) == trained_bits(backend, capacity=1 << 18)


# --- no half precision -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_no_bit(backend: Backend, dtype: torch.dtype) -> None:
    gaussians, camera = random_scene(5, 500, width=60, height=45)
    weights = Weights.random(3, camera)
    plain = outcome_bits(outcome(backend, gaussians, camera, weights)), trained_bits(backend, 6)
    with torch.autocast(backend.device.type, dtype=dtype):
        inside = outcome_bits(outcome(backend, gaussians, camera, weights)), trained_bits(backend, 6)
    assert inside == plain


def test_tensor_float_changes_no_bit(backend: Backend) -> None:
    gaussians, camera = random_scene(5, 500, width=60, height=45)
    weights = Weights.random(3, camera)
    plain = outcome_bits(outcome(backend, gaussians, camera, weights)), trained_bits(backend, 6)
    with matmul_precision("medium"):
        assert (outcome_bits(outcome(backend, gaussians, camera, weights)), trained_bits(backend, 6)) == plain


# --- streams, waiting, devices ---------------------------------------------------------------------------------------


#: Steps that warm_pipeline() takes: every view, SH degree and way of antialiasing that later inputs ask for.
WARM = 6


def warm_pipeline(backend: Backend, run: Run) -> TrainStepPipeline:
    """A pipeline that has seen the views, so that nothing is left to allocate or to load."""
    pipeline = TrainStepPipeline(backend, None)
    for k in range(WARM):
        pipeline.run(run.gaussians, run.adam, 1 + k, run.inputs(k), capacity=1 << 16)
    synchronize()
    return pipeline


@contextmanager
def no_waiting() -> Iterator[None]:
    """Torch raises when it would wait for the GPU; that it does not know of all such calls it says in a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_step_never_waits_for_the_gpu(backend: Backend) -> None:
    run = Run(DEVICE)
    engine = AsyncEngine(backend)
    train(run, engine)
    with no_waiting():
        losses = []
        for k in range(6):
            losses += engine.submit(run.gaussians, run.adam, run.inputs(k))
        assert len(losses + engine.drain()) == 6


def corrected(run: Run, capacity: int = 0) -> dict[str, Any]:
    """What six steps teach about poses and exposures, and the state after them; torch raises should one wait."""
    heard: dict[str, Any] = {}
    exposure = torch.tensor([[1.1, 0.05, -0.1, 0.02], [0.03, 0.8, 0.1, -0.05], [-0.02, 0.04, 1.3, 0.1]]).to(DEVICE)
    engine = AsyncEngine(Backend.cuda(DEVICE), capacity=capacity)

    def ask(k: int) -> StepInputs:
        def apply_grad(v_viewmat: Tensor | None, v_exposure: Tensor | None) -> None:
            assert v_viewmat is not None
            assert v_exposure is not None
            assert k not in heard, "a step is learnt from once"
            heard[k] = (v_viewmat.tolist(), v_exposure.tolist())

        return dataclasses.replace(run.inputs(k), view_params=ViewParams(apply_grad, pose=True, colours=exposure))

    for k in range(3):
        engine.submit(run.gaussians, run.adam, ask(k))
    with contextlib.nullcontext() if capacity else no_waiting():
        for k in range(3, 6):
            engine.submit(run.gaussians, run.adam, ask(k))
        engine.drain()
    return {**heard, **run.bits()}


def test_poses_and_exposures_are_learnt_without_waiting_and_once_a_step() -> None:
    free = corrected(Run(DEVICE))
    assert set(range(6)) <= free.keys()
    assert all(math.isfinite(sum(map(sum, part))) for k in range(6) for part in free[k])
    assert corrected(Run(DEVICE), capacity=1) == free


def test_a_step_is_enqueued_while_the_gpu_is_busy(backend: Backend) -> None:
    run = Run(DEVICE)
    pipeline = warm_pipeline(backend, run)
    done = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # about a second
    started = time.perf_counter()
    pipeline.run(run.gaussians, run.adam, WARM + 1, run.inputs(3), capacity=1 << 16)
    done.record()
    assert not done.query(), "the step has waited for what was before it"
    assert time.perf_counter() - started < 0.5
    synchronize()
    assert torch.isfinite(pipeline.l1_ssim).all()


def test_a_step_can_be_captured_in_a_graph(backend: Backend) -> None:
    run = Run(DEVICE)
    pipeline = warm_pipeline(backend, run)
    saved = run.save()
    plain = []
    for _ in range(2):
        pipeline.run(run.gaussians, run.adam, 9, run.inputs(4), capacity=1 << 16)
        plain.append((run.bits(), pipeline.l1_ssim.tolist()))
    run.restore(saved)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pipeline.run(run.gaussians, run.adam, 9, run.inputs(4), capacity=1 << 16)
    synchronize()
    assert run.bits() == {name: tensor.cpu().numpy().tobytes() for name, tensor in saved.items()}, "only recorded"
    for expected in plain:
        graph.replay()
        assert (run.bits(), pipeline.l1_ssim.tolist()) == expected


def test_steps_run_on_the_current_stream(backend: Backend) -> None:
    plain = trained_bits(backend)
    stream = torch.cuda.Stream()
    torch.cuda._sleep(500_000_000)  # whatever lands on the default stream comes late
    with torch.cuda.stream(stream):
        run = Run(DEVICE)
        losses = train(run, AsyncEngine(backend))
        assert (losses, run.bits()) == plain


def test_streams_do_not_disturb_each_other(backend: Backend) -> None:
    plain = trained_bits(backend)
    runs = [Run(DEVICE) for _ in range(3)]
    streams = [torch.cuda.Stream() for _ in runs]
    engines = [AsyncEngine(backend) for _ in runs]
    losses: list[list[float]] = [[] for _ in runs]
    synchronize()
    for k in range(12):
        for run, engine, stream, seen in zip(runs, engines, streams, losses, strict=True):
            with torch.cuda.stream(stream):
                seen += engine.submit(run.gaussians, run.adam, run.inputs(k))
    for run, engine, stream, seen in zip(runs, engines, streams, losses, strict=True):
        with torch.cuda.stream(stream):
            seen += engine.drain()
            assert (seen, run.bits()) == plain


def test_the_current_device_stays(backend: Backend) -> None:
    before = torch.cuda.current_device()
    trained_bits(backend, 2)
    assert torch.cuda.current_device() == before


@pytest.mark.multigpu
def test_another_device_than_the_current_one(backend: Backend) -> None:
    plain = trained_bits(backend)
    with torch.cuda.device(0):
        assert trained_bits(Backend.cuda("cuda:1")) == plain
        assert torch.cuda.current_device() == 0


def test_steps_allocate_nothing_once_warm(backend: Backend) -> None:
    run = Run(DEVICE)
    pipeline = warm_pipeline(backend, run)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for k in range(6):
        pipeline.run(run.gaussians, run.adam, WARM + 1 + k, run.inputs(k), capacity=1 << 16)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


# --- what is refused, and what is broken -----------------------------------------------------------------------------


def test_tensors_on_the_wrong_device_are_a_type_error(backend: Backend) -> None:
    gaussians, camera = random_scene(8, 10)
    with pytest.raises(TypeError, match="cpu"):
        render(gaussians, camera, background=torch.zeros(3, device=DEVICE), backend=backend)
    with pytest.raises(TypeError, match="cpu"):
        render(gaussians.to(DEVICE), camera, background=torch.zeros(3), backend=backend)
    with pytest.raises(TypeError, match="float64"):
        render(gaussians.map(lambda t: t.to(DEVICE, torch.float64)), camera)


@pytest.mark.parametrize("seed", range(int(os.environ.get("SPLATCLI_FUZZ", "6"))))
def test_numbers_that_are_none_harm_nobody_else(backend: Backend, seed: int) -> None:
    """NaN and infinities in a tenth of the Gaussians: as if these were not there."""
    generator = torch.Generator().manual_seed(seed)
    gaussians, camera = random_scene(seed, 300, width=60, height=50)
    broken = torch.rand(300, generator=generator) < 0.1
    bad = gaussians.detach_clone()
    for i in broken.nonzero()[:, 0].tolist():
        # Without a place or a rotation it cannot be drawn.
        target = (bad.means, bad.quats)[int(torch.randint(0, 2, (), generator=generator))]
        column = int(torch.randint(0, target.shape[1], (), generator=generator))
        target[i, column] = (math.nan, math.inf, -math.inf)[int(torch.randint(0, 3, (), generator=generator))]
    with torch.no_grad():
        got = render(bad.to(DEVICE), camera, backend=backend)
        twin = render(bad, camera, backend=Backend.cpu(isa="portable"))
        clean = render(rows_of(gaussians, ~broken).to(DEVICE), camera, backend=backend)
    assert torch.equal(got.image, clean.image)
    assert torch.equal(got.depth, clean.depth)
    assert float((got.image.cpu() - twin.image).abs().max()) < CUT_OFF


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, -1e30, 3e38])
@pytest.mark.parametrize("group", GROUPS)
def test_a_step_with_any_number_anywhere_ends_and_keeps_the_others(backend: Backend, group: str, value: float) -> None:
    run = Run(DEVICE, 300)
    column = getattr(run.gaussians, group).view(300, -1)
    column[::7] = value
    engine = AsyncEngine(backend)
    losses = []
    for k in range(3):
        losses += engine.submit(run.gaussians, run.adam, run.inputs(k))
    losses += engine.drain()
    assert len(losses) == 3
    others = torch.arange(300, device=DEVICE) % 7 != 0
    if not group.startswith("sh"):  # what has no place is not drawn; what has no colour is, and then nobody is safe
        for name in GROUPS:
            assert torch.isfinite(getattr(run.gaussians, name)[others]).all(), name
