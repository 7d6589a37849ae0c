"""The loss kernels, emulated, against the portable CPU twin: gradients bit for bit, the means to rounding.

The two add up |x - y| and SSIM in different orders, in float over some tens of numbers and in double from there on:
1e-6 relative to a mean of |x - y|, and 1e-6 absolute for SSIM, whose addends are at most about 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from splatcli.errors import DeviceFaultError, LaunchRefusedError, ResourceError, is_out_of_memory
from splatcli.native import abi
from splatcli.native.backend import Backend
from splatcli.rasterizer.image_loss import _image_loss
from tests.kernels.simt import Emulator, simulated
from tests.native.cases import NEEDS_COMPILER, bits, float32
from tests.rasterizer.scenes import random_image

pytestmark = [NEEDS_COMPILER, pytest.mark.usefixtures("simulation")]
GUARD = 64  # numbers around each output that must stay as they are

#: A strip is 64 pixels by 45: within one, its exact size, one more, several; and all that is smaller than the window.
SIZES = [(1, 1), (2, 3), (5, 11), (11, 5), (64, 45), (65, 46), (64, 4), (3, 91), (67, 2), (130, 12), (21, 50)]


@dataclass(frozen=True)
class Loss:
    l1: float
    ssim: float
    v_image: Tensor | None


def cpu_loss(image: Tensor, target: Tensor, ssim_lambda: float, border: int = 0) -> Loss:
    backend = float32("portable")
    job, v_image = job_of(backend, image, target, ssim_lambda, border), torch.full_like(image, math.nan)
    job.v_image = v_image.data_ptr()
    workspace = torch.empty(backend.call("loss_bytes", job), dtype=torch.uint8)
    job.workspace = workspace.data_ptr()
    backend.call("loss", job)
    return Loss(job.l1, job.ssim, v_image)


def job_of(backend: Backend, image: Tensor, target: Tensor, ssim_lambda: float, border: int = 0) -> abi.Loss:
    """Of an image [H, W, 3], or of a stack of images [B, H, W, C]."""
    images, height, width, channels = image.shape if image.dim() == 4 else (1, *image.shape)
    is_u8 = target.dtype == torch.uint8
    return abi.Loss(
        width=width,
        height=height,
        target_is_u8=is_u8,
        channels=channels,
        images=images,
        border=border,
        ssim_lambda=ssim_lambda,
        image=backend.pointer(image, *image.shape),
        target=backend.pointer(target, *image.shape, dtype=torch.uint8 if is_u8 else None),
    )


def simt_loss(
    image: Tensor,
    target: Tensor,
    ssim_lambda: float,
    *,
    border: int = 0,
    gradient: bool = True,
    overflow: int | None = 0,
    fill: float = math.nan,
) -> Loss:
    """Outputs and workspace start as ``fill``, with guards around them. overflow: the flag; None: no counters.

    After an overflow the workspace has to be as it was.
    """
    backend = simulated()
    job = job_of(backend, image, target, ssim_lambda, border)

    def guarded(count: int) -> Tensor:
        return torch.full((count + 2 * GUARD,), fill, dtype=torch.float64)

    def as_it_was(numbers: Tensor) -> bool:
        return torch.equal(numbers, torch.full_like(numbers, fill)) or bool(numbers.isnan().all() and math.isnan(fill))

    v_numbers = torch.full((image.numel() + 2 * GUARD,), fill)
    means = guarded(2)
    counters = torch.tensor([7, 7, 7, overflow or 0])
    if gradient:
        job.v_image = v_numbers[GUARD:].data_ptr()
    size = backend.call("loss_bytes", job)
    workspace = guarded(-(-size // 8))
    job.workspace, job.means = workspace[GUARD:].data_ptr(), means[GUARD:].data_ptr()
    job.counters = None if overflow is None else counters.data_ptr()
    backend.call("loss", job)
    assert counters.tolist() == [7, 7, 7, overflow or 0], "the loss only reads them"
    for numbers in (v_numbers, means, workspace):
        assert as_it_was(numbers[:GUARD]), "nothing is written before the start"
        assert as_it_was(numbers[-GUARD:]), "nor beyond the end"
    assert not overflow or as_it_was(workspace)
    l1, ssim = means[GUARD:-GUARD].tolist()
    return Loss(l1, ssim, v_numbers[GUARD:-GUARD].view_as(image) if gradient else None)


def assert_twins(image: Tensor, target: Tensor, ssim_lambda: float, border: int = 0) -> None:
    want = cpu_loss(image, target, ssim_lambda, border)
    got = simt_loss(image, target, ssim_lambda, border=border)
    assert_close(got.l1, want.l1, rtol=1e-6, atol=0)
    assert_close(got.ssim, want.ssim, rtol=0, atol=1e-6)
    assert got.v_image is not None
    assert want.v_image is not None
    assert torch.isfinite(got.v_image).all()
    assert torch.equal(got.v_image, want.v_image), "the gradient is the CPU's, bit for bit"


def bytes_of(image: Tensor) -> Tensor:
    return (image * 255).round().to(torch.uint8)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_sizes(width: int, height: int) -> None:
    image, target = random_image(1, width, height), random_image(2, width, height)
    assert_twins(image, target, 0.2)
    assert_twins(image, bytes_of(target), 0.2)


def stacked(seed: int, images: int, height: int, width: int, channels: int) -> Tensor:
    """[B, H, W, C] images that differ from each other."""
    each = [random_image(seed + k, width, height)[..., :channels] for k in range(images)]
    return torch.stack(each).contiguous()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("images", "height", "width", "border"),
    [(1, 30, 40, 0), (3, 12, 40, 5), (2, 46, 200, 0), (2, 46, 200, 5), (4, 3, 2, 0), (5, 11, 11, 5), (2, 91, 67, 33)],
)
def test_stacks_of_images_and_borders(channels: int, images: int, height: int, width: int, border: int) -> None:
    image, target = (stacked(seed, images, height, width, channels) for seed in (20, 40))
    assert_twins(image, target, 0.2, border)
    assert_twins(image, bytes_of(target), 1.0, border)
    # Each image as if it were alone, up to the number that the means are over.
    whole = simt_loss(image, target, 0.2, border=border)
    alone = [simt_loss(x, y, 0.2, border=border) for x, y in zip(image.split(1), target.split(1), strict=True)]
    assert_close(whole.l1, sum(one.l1 for one in alone) / images, rtol=1e-6, atol=0)
    assert_close(whole.ssim, sum(one.ssim for one in alone) / images, rtol=0, atol=1e-6)
    assert whole.v_image is not None
    gradients = torch.cat([one.v_image for one in alone if one.v_image is not None]) / images
    assert_close(whole.v_image, gradients, rtol=1e-5, atol=1e-6 * float(gradients.abs().max()))


@pytest.mark.parametrize("ssim_lambda", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("as_bytes", [False, True])
def test_weights_of_the_two_parts(ssim_lambda: float, as_bytes: bool) -> None:
    image, target = 1.5 * random_image(3, 37, 29), random_image(4, 37, 29)
    assert_twins(image, bytes_of(target) if as_bytes else target, ssim_lambda)


def test_equal_and_flat_images() -> None:
    image = random_image(5, 30, 21)
    assert_twins(image, image.clone(), 0.2)
    same = simt_loss(image, image.clone(), 0.0)
    assert same.l1 == 0.0
    assert same.v_image is not None
    assert torch.equal(same.v_image, torch.zeros_like(image)), "the corner of |x - y| has gradient 0"
    for x, y in [(0.0, 0.0), (0.0, 1.0), (1.0, 1.0), (1e-8, 0.0)]:
        assert_twins(torch.full((12, 9, 3), x), torch.full((12, 9, 3), y), 0.2)


def test_forward_only_gives_the_same_means() -> None:
    image, target = random_image(6, 70, 20), bytes_of(random_image(7, 70, 20))
    whole, forward = simt_loss(image, target, 0.2), simt_loss(image, target, 0.2, gradient=False)
    assert (forward.l1, forward.ssim) == (whole.l1, whole.ssim)


@pytest.mark.parametrize("overflow", [0, None])
def test_counters_without_the_flag_or_none_at_all(overflow: int | None) -> None:
    image, target = random_image(8, 13, 12), random_image(9, 13, 12)
    loss = simt_loss(image, target, 0.2, overflow=overflow)
    assert math.isfinite(loss.l1)
    assert math.isfinite(loss.ssim)


@pytest.mark.parametrize("as_bytes", [False, True])
def test_nothing_happens_after_an_overflow(as_bytes: bool) -> None:
    image, target = random_image(8, 13, 12), random_image(9, 13, 12)
    loss = simt_loss(image, bytes_of(target) if as_bytes else target, 0.2, overflow=1, fill=7.0)
    assert (loss.l1, loss.ssim) == (7.0, 7.0)
    assert loss.v_image is not None
    assert torch.equal(loss.v_image, torch.full_like(image, 7.0)), "what was there stays"


def test_any_schedule_gives_the_same_bits() -> None:
    image, target = random_image(10, 66, 47), bytes_of(random_image(11, 66, 47))
    emulator = Emulator(simulated().library)
    seen = set()
    for seed in range(4):
        with emulator.schedule(seed):
            loss = simt_loss(image, target, 0.2)
        assert loss.v_image is not None
        seen.add((loss.l1, loss.ssim, bits(loss.v_image)[0]))
    assert len(seen) == 1


def test_a_pixel_that_is_no_number_shows_in_the_loss_and_only_around_it() -> None:
    image, target = random_image(12, 40, 60), random_image(13, 40, 60)
    clean = simt_loss(image, target, 0.2)
    image[30, 20, 1] = math.nan
    loss, twin = simt_loss(image, target, 0.2), cpu_loss(image, target, 0.2)
    assert math.isnan(loss.l1)
    assert math.isnan(loss.ssim)
    assert loss.v_image is not None
    assert clean.v_image is not None
    assert twin.v_image is not None
    # Two filters of radius five; other channels and pixels are not touched.
    reached = torch.zeros_like(image, dtype=torch.bool)
    reached[20:41, 10:31, 1] = True
    assert torch.equal(loss.v_image[~reached], clean.v_image[~reached])
    assert loss.v_image[reached].isnan().all()
    assert torch.equal(loss.v_image.isnan(), twin.v_image.isnan())


def test_masks_are_refused() -> None:
    backend, image = simulated(), random_image(1, 20, 10)
    job = job_of(backend, image, image, 0.2)
    mask, means = torch.zeros(10, 20, dtype=torch.bool), torch.zeros(2, dtype=torch.float64)
    job.mask, job.means = mask.data_ptr(), means.data_ptr()
    with pytest.raises(ResourceError, match="masks are for the CPU"):
        backend.call("loss", job)


def test_a_launch_that_fails_is_reported() -> None:
    image, target = random_image(1, 8, 8), random_image(2, 8, 8)
    emulator = Emulator(simulated().library)
    for n, kernel in enumerate(["loss_statistics", "loss_gradient", "loss_means"], start=1):
        emulator.fail_launch(n)
        with pytest.raises(ResourceError, match=kernel):
            simt_loss(image, target, 0.2)
        emulator.last_error = 0


#: Numbers of cudaError_t of a launch that does not fit the GPU, with a word of what helps.
REFUSALS = {9: "report this", 35: "update the NVIDIA driver", 98: "delete", 209: "delete", 222: "driver", 701: "report"}


@pytest.mark.parametrize("error", REFUSALS)
def test_a_launch_that_does_not_fit_the_gpu_is_no_fault_of_the_gpu(error: int) -> None:
    backend, image = simulated(), random_image(1, 8, 8)
    emulator = Emulator(backend.library)
    emulator.fail_launch(1, error)
    with pytest.raises(LaunchRefusedError, match=r"does not run the kernels: splat_loss: .*loss_statistics") as caught:
        simt_loss(image, image, 0.2)
    facts = (
        "(cudaError",
        "code for compute capability 8.0",
        "GPU has compute capability 9.0",
        "driver knows CUDA 13.0",
    )
    assert all(fact in caught.value.what for fact in facts)
    remedy = caught.value.remedy or ""
    assert REFUSALS[error] in remedy
    assert "--device cpu" in remedy
    assert "dmesg" not in remedy
    assert (str(backend.library._name) in remedy) == (error in (35, 98, 209, 222))
    assert not is_out_of_memory(caught.value), "fewer Gaussians do not help"
    simt_loss(image, image, 0.2)  # nothing is left behind


@pytest.mark.parametrize("error", [214, 700, 702, 716, 719, 999])
def test_an_error_that_stays_in_the_context_is_a_fault_of_the_gpu(error: int) -> None:
    image = random_image(1, 8, 8)
    emulator = Emulator(simulated().library)
    emulator.fail_launch(1, error)
    with pytest.raises(DeviceFaultError, match=r"cpu has failed: splat_loss: .*loss_statistics") as caught:
        simt_loss(image, image, 0.2)
    assert "dmesg" in (caught.value.remedy or "")


def test_fused_ssim_runs_on_the_device_and_stream_of_its_call() -> None:
    backend = simulated(ordinal=1, stream=0x77)
    emulator = Emulator(backend.library)
    x, y = (stacked(seed, 2, 20, 30, 1).permute(0, 3, 1, 2).contiguous().requires_grad_() for seed in (60, 70))
    emulator.clear_trace()
    with emulator.current_device(0):
        _image_loss(x, y, 1.0, "valid", train=True, backend=backend).backward()  # type: ignore[no-untyped-call]
        assert emulator.device == 0, "the caller's device is current again"
    launches = emulator.trace()
    assert {(launch.device, launch.stream) for launch in launches} == {(1, 0x77)}
    kernels = [launch.kernel.partition("<")[0].strip("(") for launch in launches]
    assert kernels == 2 * ["loss_statistics", "loss_gradient", "loss_means"], "once for each image's gradient"
