"""Do the checks notice? Typical mistakes are made in a copy of the kernels, one at a time, and each must be caught."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from splatcli.errors import ResourceError
from splatcli.native import abi
from splatcli.native.build_simt import simt_library
from splatcli.native.call import Backend
from splatcli.raster.frame import Frame, view_of
from splatcli.raster.rendering import render
from tests.kernels.simt import Emulator, copy_sources
from tests.native.cases import NEEDS_COMPILER
from tests.raster.scenes import leaves, random_image, random_scene

pytestmark = NEEDS_COMPILER
DEVICE, STREAM = 1, 0x1234
SEEDS = (0, 1, 2)


def backend_of(library: Path, threads: int = 0) -> Backend:
    """A backend on device 1 and a stream of its own; threads=1 takes the simple variants."""
    loaded = ctypes.CDLL(str(library))
    for name, (result, arguments) in abi.SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return Backend(loaded, torch.float32, threads, ordinal=DEVICE, stream=STREAM, deferred=True)


# ---- quick checks, each of one kind of mistake -----------------------------------------------------------------------


def everything(backend: Backend) -> list[Tensor]:
    """Images of a view and the gradients of a weighted sum of them."""
    gaussians, camera = random_scene(3, 280, width=37, height=29, sh_degree=1, scale=0.2)
    inputs = leaves(gaussians)
    background = torch.tensor([0.3, 0.6, 0.1], requires_grad=True)
    pose = torch.from_numpy(camera.viewmat).float().requires_grad_()
    out = render(inputs, camera, background=background, viewmat=pose, antialiased=True, backend=backend)
    weight = random_image(9, 37, 29)
    torch.autograd.backward((out.image * weight).sum() + (out.alpha * weight[..., 0]).sum() + out.depth.mean())
    gradients = [background.grad, pose.grad, *(tensor.grad for _, tensor in inputs.items())]
    return [out.image.detach(), out.alpha.detach(), out.depth.detach(), *(g for g in gradients if g is not None)]


def check_picture(library: Path) -> None:
    """A view and its gradients are the CPU's, in any order of threads, by either variant of a kernel."""
    expected = everything(Backend.cpu(isa="portable", threads=1))
    for threads in (0, 1):
        backend = backend_of(library, threads)
        for seed in SEEDS:
            with Emulator(backend.library).schedule(seed):
                ours = everything(backend)
            for got, want in zip(ours[:3], expected[:3], strict=True):
                assert torch.equal(got, want)
            for got, want in zip(ours[3:], expected[3:], strict=True):
                assert_close(got, want, rtol=1e-3, atol=1e-5 * float(want.abs().max()))


def check_loss(library: Path) -> None:
    """The loss and its gradient are the CPU's."""
    image, target = random_image(1, 77, 51), random_image(2, 77, 51)
    cpu = Backend.cpu(isa="portable", threads=1)
    values, gradient = loss_of(cpu, image, target)
    backend = backend_of(library)
    for seed in SEEDS:
        with Emulator(backend.library).schedule(seed):
            got, got_gradient = loss_of(backend, image, target)
        assert got == pytest.approx(values, rel=1e-6, nan_ok=False)
        assert torch.equal(got_gradient, gradient)


def loss_of(backend: Backend, image: Tensor, target: Tensor, flag: int = 0) -> tuple[list[float], Tensor]:
    height, width, _ = image.shape
    v_image, means = torch.full_like(image, math.nan), torch.full((2,), math.nan, dtype=torch.float64)
    counters = torch.tensor([0, 0, 0, flag])
    job = abi.Loss(width=width, height=height, ssim_lambda=0.2)
    job.image, job.target, job.v_image = image.data_ptr(), target.data_ptr(), v_image.data_ptr()
    job.means, job.counters = means.data_ptr(), counters.data_ptr()
    workspace = torch.full((backend.call("loss_bytes", job),), 255, dtype=torch.uint8)
    job.workspace = workspace.data_ptr()
    backend.call("loss", job)
    return (means.tolist() if backend.deferred else [job.l1, job.ssim]), v_image


def check_overflow(library: Path) -> None:
    """A view with too many pairs raises the flag, and then nothing is written any more."""
    for threads in (0, 1):
        backend = backend_of(library, threads)
        gaussians, camera = random_scene(3, 60, sh_degree=0)
        view = view_of(camera, sh_degree=0, antialiased=False, with_depth=False)
        frame = Frame(backend)
        assert frame.counters is not None
        frame.bin(view, frame.project(view, gaussians))
        assert int(frame.counters[abi.COUNT_OVERFLOW]) == 0
        pairs = int(frame.counters[abi.COUNT_PAIRS])
        frame.bin(view, frame.project(view, gaussians), room=pairs - 1)
        assert int(frame.counters[abi.COUNT_OVERFLOW]) != 0

        size = (camera.height, camera.width)
        image, alpha, background = torch.full((*size, 3), -7.0), torch.full(size, -7.0), torch.zeros(3)
        frame.blend(view, background, image, alpha, None)
        assert (image == -7).all()
        assert (alpha == -7).all()
        rows = frame.arena.take("rows", pairs * abi.ROW, torch.float32).fill_(-7.0)
        out = frame.images(view, image, alpha, None)
        v_background = torch.full((3,), -7.0)
        frame.blend_vjp(view, background, out, frame.images(view, torch.ones(*size, 3), None, None), v_background)
        assert (rows == -7).all()
        assert (v_background == -7).all()
        gradients = gaussians.map(lambda t: torch.full_like(t, -7.0))
        count = torch.full((len(gaussians),), -7.0)
        arrays = backend.arrays(gaussians)
        frame.project_vjp(view, arrays, gradients=backend.arrays(gradients), grad2d=count.clone(), count=count)
        assert all(bool((tensor == -7).all()) for _, tensor in gradients.items())
        assert (count == -7).all()
        means, v_image = loss_of(backend, random_image(1, 20, 20), random_image(2, 20, 20), flag=1)
        assert all(math.isnan(mean) for mean in means)
        assert v_image.isnan().all()


def check_devices(library: Path) -> None:
    """All that a call launches is on its device and stream, and the caller's device is current again."""
    backend = backend_of(library)
    emulator = Emulator(backend.library)
    with emulator.current_device(2):
        emulator.clear_trace()
        everything(backend)
        loss_of(backend, random_image(1, 20, 20), random_image(2, 20, 20))
        assert emulator.device == 2
    assert len(emulator.trace()) > 6
    assert {(launch.device, launch.stream) for launch in emulator.trace()} == {(DEVICE, STREAM)}
    with emulator.current_device(2):
        emulator.fail_launch(2)
        with pytest.raises(ResourceError, match="unspecified launch failure"):
            everything(backend)
        assert emulator.device == 2
        emulator.fail_launch(0)


CHECKS: dict[str, Callable[[Path], None]] = {
    "picture": check_picture,
    "loss": check_loss,
    "overflow": check_overflow,
    "devices": check_devices,
}


# ---- mistakes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """A text in a file of cuda/, found there once; what it becomes; the check that must fail."""

    check: str
    file: str
    original: str
    mutated: str


BARRIER, NO_BARRIER = "__syncthreads();", ";"
MUTANTS = {
    "block_sum without its barrier": Mutant(
        "loss",
        "kernels/device.cuh",
        "  if (lane_id() == 0) warp_totals[warp_id()] = mine;\n  __syncthreads();",
        "  if (lane_id() == 0) warp_totals[warp_id()] = mine;\n",
    ),
    "block_sum that reuses its memory too early": Mutant(
        "loss",
        "kernels/device.cuh",
        "  const T mine = warp_sum(value);\n  __syncthreads();",
        "  const T mine = warp_sum(value);\n",
    ),
    "loss without a barrier": Mutant(
        "loss",
        "kernels/loss.cuh",
        "      t.store(images + kLossInput);\n      __syncthreads();",
        "      t.store(images + kLossInput);\n",
    ),
    "loss with a tap too few": Mutant(
        "loss",
        "kernels/loss.cuh",
        "constexpr int kLossTaps = 2 * kSsimRadius + 1;",
        "constexpr int kLossTaps = 2 * kSsimRadius;",
    ),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The copy of cuda/ that mistakes are made in; what is already compiled of it stays so."""
    return copy_sources(tmp_path_factory.mktemp("mutants"))


def build(sources: Path) -> Path:
    return simt_library(source_root=sources, extra_flags=("-O1",))


@pytest.mark.parametrize("check", CHECKS)
def test_the_kernels_as_they_are_pass(sources: Path, check: str) -> None:
    CHECKS[check](build(sources))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_caught(sources: Path, name: str) -> None:
    mutant = MUTANTS[name]
    path = sources / mutant.file
    text = path.read_text()
    assert text.count(mutant.original) == 1, f"{mutant.file} has changed: this mistake needs to be made elsewhere"
    path.write_text(text.replace(mutant.original, mutant.mutated))
    try:
        library = build(sources)
    finally:
        path.write_text(text)
    with pytest.raises((AssertionError, ResourceError)):
        CHECKS[mutant.check](library)
