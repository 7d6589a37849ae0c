"""Do the checks notice? Typical mistakes are made in a copy of the kernels, one at a time, and each must be caught."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from splatcli.errors import DeviceFaultError, ResourceError
from splatcli.native import abi
from splatcli.native.backend import Backend
from splatcli.rasterizer.adam import AdamState, decay_table
from splatcli.rasterizer.context import RasterContext, view_of
from splatcli.rasterizer.memory_budget import Arena
from splatcli.rasterizer.rendering import render
from tests.kernels.build_emulator import emulator_library
from tests.kernels.simt import Emulator, copy_sources
from tests.native.cases import (
    NEEDS_COMPILER,
    adam_update,
    assert_images_and_gradients,
    channels_and_gradients,
    images_and_gradients,
)
from tests.rasterizer.fixed_budget import FixedBudget
from tests.rasterizer.scenes import leaves, of_model, random_image, random_scene

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
    return images_and_gradients(backend, *random_scene(3, 280, width=37, height=29, sh_degree=1, scale=0.2))


def check_picture(library: Path) -> None:
    """A view and its gradients are the CPU's, in any order of threads, by either variant of a kernel."""
    expected = everything(Backend.cpu(isa="portable", threads=1))
    for threads in (0, 1):
        backend = backend_of(library, threads)
        for seed in SEEDS:
            with Emulator(backend.library).schedule(seed):
                ours = everything(backend)
            assert_images_and_gradients(ours, expected)


def check_models(library: Path) -> None:
    """A fisheye's view and an orthographic one, and their gradients, are the CPU's."""
    gaussians, camera = random_scene(3, 280, width=37, height=29, sh_degree=1, scale=0.2)
    backend = backend_of(library)
    for model in ("fisheye", "ortho"):
        scene = gaussians, of_model(camera, model)
        expected = images_and_gradients(Backend.cpu(isa="portable", threads=1), *scene)
        assert_images_and_gradients(images_and_gradients(backend, *scene), expected)


def check_channels(library: Path) -> None:
    """Images of many channels and their gradients are the CPU's, in any order of threads, in one pass or two."""
    scene = random_scene(3, 120, width=37, height=29, sh_degree=0, scale=0.2)
    scene[0].means[-1] = 0.0  # in view: nothing lies behind its colours
    for channels in (19, 67):
        expected = channels_and_gradients(Backend.cpu(isa="portable", threads=1), *scene, channels)
        backend = backend_of(library)
        for seed in SEEDS if channels == 19 else SEEDS[1:2]:
            with Emulator(backend.library).schedule(seed):
                ours = channels_and_gradients(backend, *scene, channels)
            assert_images_and_gradients(ours, expected)


def check_bands(library: Path) -> None:
    """A view made in bands is the view, whatever the order of threads; gradients of the emulator's own, bit by bit."""
    backend = backend_of(library)
    gaussians, camera = random_scene(3, 250, width=30, height=85, sh_degree=0, scale=0.3)

    def outcome(budget: FixedBudget) -> list[Tensor]:
        inputs = leaves(gaussians)
        out = render(inputs, camera, backend=backend, budget=budget)
        torch.autograd.backward((out.image * random_image(9, 30, 85)).sum() + out.depth.mean())
        return [out.image.detach(), out.depth.detach(), *(t.grad for _, t in inputs.items() if t.grad is not None)]

    def tile_rows(backend: Backend) -> list[int]:
        view = view_of(camera, sh_degree=0, antialiased=False, with_depth=False)
        context, found = RasterContext(backend), torch.zeros(-(-camera.height // abi.TILE), dtype=torch.int64)
        arrays = context.project(view, gaussians)
        backend.call("tile_row_isects", view, arrays, context.native, found.data_ptr())
        return found.tolist()

    assert tile_rows(backend) == tile_rows(Backend.cpu(isa="portable", threads=1))
    whole = outcome(FixedBudget(1 << 40))
    for seed in SEEDS:
        budget = FixedBudget(67_000)
        with Emulator(backend.library).schedule(seed):
            parts = outcome(budget)
        assert budget.reported
        assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def check_loss(library: Path) -> None:
    """The loss and its gradient are the CPU's."""
    image, target = random_image(1, 77, 51), random_image(2, 77, 51)
    cpu = Backend.cpu(isa="portable", threads=1)
    values, gradient = total_loss(cpu, image, target)
    backend = backend_of(library)
    # Many, since one thread's sum alone is used: few orders overwrite what it has yet to read.
    for seed in range(60):
        with Emulator(backend.library).schedule(seed):
            got, got_gradient = total_loss(backend, image, target)
        assert got == pytest.approx(values, rel=1e-6, nan_ok=False)
        assert torch.equal(got_gradient, gradient)


def check_stack(library: Path) -> None:
    """The loss of a stack of planes is the CPU's, with and without a border."""
    image, target = (torch.stack([random_image(k, 30, 70)[..., :1] for k in first]) for first in ((1, 2, 3), (4, 5, 6)))
    for border in (0, 5):
        values, gradient = total_loss(Backend.cpu(isa="portable", threads=1), image, target, border=border)
        got, got_gradient = total_loss(backend_of(library), image, target, border=border)
        assert got == pytest.approx(values, rel=1e-5, nan_ok=False)
        assert torch.equal(got_gradient, gradient)


def check_lazy(library: Path) -> None:
    """Projection makes up for the steps that Gaussians missed, each once, as the CPU's does."""
    gaussians, camera = random_scene(31, 300, width=64, height=48, sh_degree=2)
    stands = torch.randint(0, 60, (300,), generator=torch.Generator().manual_seed(5), dtype=torch.int32)
    table = decay_table(0.9, 0.999)

    def outcome(backend: Backend) -> list[Tensor]:
        stored = gaussians.detach_clone()
        adam = AdamState.zeros_like(stored)
        for moment in (adam.exp_avg, adam.exp_avg_sq):
            moment.shN.copy_(torch.rand(stored.shN.shape, generator=torch.Generator().manual_seed(6)) * 1e-6)
        adam.sh_last_step.copy_(stands)
        update = adam_update(
            backend,
            adam,
            60,
            sh_last_step=adam.sh_last_step.data_ptr(),
            decay_table=table.data_ptr(),
            decay_rows=len(table),
        )
        context, view = RasterContext(backend), view_of(camera, sh_degree=2, antialiased=False, with_depth=False)
        arrays = context.project(view, stored, update)
        context.bin(view, arrays)
        image = torch.empty(camera.height, camera.width, 3)
        context.blend(view, torch.zeros(3), image, torch.empty(camera.height, camera.width), None)
        return [adam.sh_last_step, stored.shN, adam.exp_avg.shN, adam.exp_avg_sq.shN, image]

    expected = outcome(Backend.cpu(isa="portable", threads=1))
    assert bool((expected[0] != stands).any())
    backend = backend_of(library)
    for seed in SEEDS:
        with Emulator(backend.library).schedule(seed):
            ours = outcome(backend)
        assert all(torch.equal(got, want) for got, want in zip(ours, expected, strict=True))


def total_loss(
    backend: Backend, image: Tensor, target: Tensor, flag: int = 0, border: int = 0
) -> tuple[list[float], Tensor]:
    images, height, width, channels = image.shape if image.dim() == 4 else (1, *image.shape)
    v_image, means = torch.full_like(image, math.nan), torch.full((2,), math.nan, dtype=torch.float64)
    counters = torch.tensor([0, 0, 0, flag])
    job = abi.Loss(width=width, height=height, channels=channels, images=images, border=border, ssim_lambda=0.2)
    job.image, job.target, job.v_image = image.data_ptr(), target.data_ptr(), v_image.data_ptr()
    job.means, job.counters = means.data_ptr(), counters.data_ptr()
    workspace = torch.full((backend.call("loss_bytes", job),), 255, dtype=torch.uint8)
    job.workspace = workspace.data_ptr()
    backend.call("loss", job)
    return (means.tolist() if backend.deferred else [job.l1, job.ssim]), v_image


def check_overflow(library: Path) -> None:
    """A view with too many intersections raises the flag, and then nothing is written any more."""
    for threads in (0, 1):
        backend = backend_of(library, threads)
        gaussians, camera = random_scene(3, 60, sh_degree=0)
        view = view_of(camera, sh_degree=0, antialiased=False, with_depth=False)
        context = RasterContext(backend)
        assert context.counters is not None
        context.bin(view, context.project(view, gaussians))
        assert int(context.counters[abi.COUNT_OVERFLOW]) == 0
        isects = int(context.counters[abi.COUNT_ISECTS])
        context.bin(view, context.project(view, gaussians), capacity=isects - 1)
        assert int(context.counters[abi.COUNT_OVERFLOW]) != 0

        size = (camera.height, camera.width)
        image, alpha, background = torch.full((*size, 3), -7.0), torch.full(size, -7.0), torch.zeros(3)
        context.blend(view, background, image, alpha, None)
        assert (image == -7).all()
        assert (alpha == -7).all()
        rows = context.arena.take("isect_grads", isects * abi.ISECT_GRAD, torch.float32).fill_(-7.0)
        out = context.images(view, image, alpha, None)
        v_background = torch.full((3,), -7.0)
        context.blend_vjp(view, background, out, context.images(view, torch.ones(*size, 3), None, None), v_background)
        assert (rows == -7).all()
        assert (v_background == -7).all()
        gradients = gaussians.map(lambda t: torch.full_like(t, -7.0))
        count = torch.full((len(gaussians),), -7.0)
        arrays = backend.arrays(gaussians)
        context.project_vjp(view, arrays, gradients=backend.arrays(gradients), grad2d=count.clone(), count=count)
        assert all(bool((tensor == -7).all()) for _, tensor in gradients.items())
        assert (count == -7).all()
        means, v_image = total_loss(backend, random_image(1, 20, 20), random_image(2, 20, 20), flag=1)
        assert all(math.isnan(mean) for mean in means)
        assert v_image.isnan().all()


def check_devices(library: Path) -> None:
    """All that a call launches is on its device and stream, and the caller's device is current again."""
    backend = backend_of(library)
    emulator = Emulator(backend.library)
    emulator.forget_contexts()
    everything(backend)
    assert (emulator.device, emulator.contexts) == (0, {DEVICE}), "device 0 is current, and nothing is made on it"
    with emulator.current_device(2):
        emulator.clear_trace()
        everything(backend)
        total_loss(backend, random_image(1, 20, 20), random_image(2, 20, 20))
        assert emulator.device == 2
    assert len(emulator.trace()) > 6
    assert {(launch.device, launch.stream) for launch in emulator.trace()} == {(DEVICE, STREAM)}
    with emulator.current_device(2):
        emulator.fail_launch(2)
        with pytest.raises(
            DeviceFaultError, match=r"has failed: splat_project: project_totals: unspecified launch failure"
        ):
            everything(backend)
        assert emulator.device == 2
        emulator.fail_launch(0)


CHECKS: dict[str, Callable[[Path], None]] = {
    "picture": check_picture,
    "models": check_models,
    "channels": check_channels,
    "bands": check_bands,
    "lazy": check_lazy,
    "loss": check_loss,
    "stack": check_stack,
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
    crashes: bool = False  # it may write anywhere, so that it needs a process of its own
    quick: bool = True  # else only with --slow: another one of the same kind fails the same check


OVERFLOW_CHECK = "  if (overflowed(lists.counters)) return;\n"
MUTANTS = {
    # Barriers and masks.
    "a sum over the block that reuses its memory too early": Mutant(
        "loss",
        "kernels/device.cuh",
        "  const T mine = warp_sum(value);\n  __syncthreads();",
        "  const T mine = warp_sum(value);\n",
    ),
    "a scan that does not wait for the warps' totals": Mutant(
        "picture",
        "kernels/device.cuh",
        "  if (lane_id() == kWarp - 1) warp_totals[warp_id()] = through;\n  __syncthreads();",
        "  if (lane_id() == kWarp - 1) warp_totals[warp_id()] = through;\n",
        quick=False,
    ),
    "a loss that does not wait for its row": Mutant(
        "loss",
        "kernels/loss.cuh",
        "      fetch.store(reinterpret_cast<float2*>(buffer));\n      __syncthreads();",
        "      fetch.store(reinterpret_cast<float2*>(buffer));\n",
    ),
    "a gradient of the loss that does not wait for its row": Mutant(
        "loss",
        "kernels/loss.cuh",
        "+ kRow) + side_here);\n      __syncthreads();",
        "+ kRow) + side_here);\n",
        quick=False,
    ),
    "a sort that does not wait for the warps' counts": Mutant(
        "picture",
        "kernels/radix_sort.cuh",
        "  __syncthreads();\n\n  // Where each warp's pairs of each digit value begin",
        "  // Where each warp's pairs of each digit value begin",
        crashes=True,
    ),
    "a sort that counts peers before all have read": Mutant(
        "picture",
        "kernels/radix_sort.cuh",
        "    __syncwarp();  // all have read before the first lane of each digit counts its peers\n",
        "",
        crashes=True,
        quick=False,
    ),
    "a sort that leaves before its pairs are in order": Mutant(
        "picture",
        "kernels/radix_sort.cuh",
        "    sorted_values[place] = pass.values[block_first + i];\n  }\n  __syncthreads();",
        "    sorted_values[place] = pass.values[block_first + i];\n  }",
        crashes=True,
        quick=False,
    ),
    "a sort that asks half a warp": Mutant(
        "picture", "kernels/radix_sort.cuh", "__match_any_sync(kFullWarp,", "__match_any_sync(0xffffu,"
    ),
    "blending that reads projected Gaussians on their way": Mutant(
        "picture",
        "kernels/blend.cuh",
        "    wait_for_copies();\n    __syncthreads();\n    for (int32_t group = 0;",
        "    wait_for_copies();\n    for (int32_t group = 0;",
    ),
    "blending with two blocks of a mask exchanged": Mutant(
        "picture",
        "kernels/blend.cuh",
        "return 1u << (2 * warp_id() + slot);",
        "return 1u << (2 * warp_id() + 1 - slot);",
    ),
    "channels that are staged before the last have been read": Mutant(
        "channels",
        "kernels/blend_channels.cuh",
        "    __syncthreads();  // the last sixteen channels have been read\n",
        "",
    ),
    "weights that are summed before all warps have theirs": Mutant(
        "channels",
        "kernels/blend_channels.cuh",
        "    if (lane_id() == 0) touched[warp_id()] = hits.any;\n    __syncthreads();\n",
        "    if (lane_id() == 0) touched[warp_id()] = hits.any;\n",
        quick=False,
    ),
    "a second pass with the channels of the first": Mutant(
        "channels",
        "kernels/blend_channels.cuh",
        "channels.count + channels.first + channel];",
        "channels.count + channel];",
    ),
    "gradients that are written before they are summed": Mutant(
        "picture",
        "kernels/blend_vjp.cuh",
        "    if (base < first) continue;\n    __syncthreads();\n",
        "    if (base < first) continue;\n",
    ),
    "gradients used before they are there": Mutant(
        "picture",
        "kernels/project_vjp.cuh",
        "  __syncthreads();  // parameters have been read by all before any is changed\n",
        "",
        quick=False,
    ),
    "colours made before the missed steps": Mutant(
        "lazy", "kernels/project.cuh", "  __syncwarp();  // rows are read by the threads of their Gaussians\n", ""
    ),
    # Lazy steps.
    "a fisheye with the gradients of a pinhole": Mutant(
        "models",
        "src/cuda/project_vjp.cu",
        "pinhole ? launch_chunks<true, true> : launch_chunks<true, false>",
        "launch_chunks<true, true>",
    ),
    "missed steps of another Gaussian": Mutant(
        "lazy", "kernels/project.cuh", "__shfl_sync(kFullWarp, mine.decay1, owner)", "mine.decay1"
    ),
    "steps that are made up for again and again": Mutant(
        "lazy", "kernels/project.cuh", "      lazy.steps[i] = int32_t(lazy.now);\n", ""
    ),
    "a row whose last lane is left behind": Mutant(
        "lazy", "kernels/project.cuh", "e < kUsed; e += kWarp) catch_up_at", "e < kUsed - 1; e += kWarp) catch_up_at"
    ),
    # Off by one.
    "a tile that begins a tile too early": Mutant(
        "picture",
        "kernels/bin.cuh",
        "tile_of(job, i - 1) + 1;",
        "tile_of(job, i - 1);",
    ),
    "a tile twice in the order, and its neighbour not": Mutant(
        "picture", "kernels/order_tiles.cuh", "= int32_t(job.first_tile + k);", "= int32_t(job.first_tile + (k & ~1));"
    ),
    "an order that begins at the image's first tile": Mutant(
        "bands", "kernels/order_tiles.cuh", "= int32_t(job.first_tile + k);", "= int32_t(k);"
    ),
    "an intersection placed one lane too late": Mutant(
        "picture",
        "kernels/bin.cuh",
        "__popc(votes & ((1u << lane_id()) - 1u))",
        "__popc(votes & ((2u << lane_id()) - 1u))",
        quick=False,
    ),
    "a window that ends a candidate too early": Mutant(
        "picture",
        "kernels/bin.cuh",
        "if (start >= count) break;",
        "if (start >= count / 2) break;",
        quick=False,
    ),
    "a window read before it is loaded": Mutant(
        "picture", "kernels/bin.cuh", "  __syncthreads();\n  return first_rank;", "  return first_rank;"
    ),
    "a Gaussian whose last tile is not counted": Mutant(
        "picture", "kernels/bin.cuh", "place + (masks[r] != 0 ? 1 : 0)", "place"
    ),
    "a Gaussian whose last intersection is left out": Mutant(
        "picture",
        "kernels/project_vjp.cuh",
        "  for (uint32_t k = 0; k < count; ++k) {\n    const float4* grad",
        "  for (uint32_t k = 0; k + 1 < count; ++k) {\n    const float4* grad",
    ),
    "SSIM with a row too few": Mutant(
        "loss",
        "kernels/loss.cuh",
        "k <= kSsimRadius; ++k) {\n      const float above",
        "k < kSsimRadius; ++k) {\n      const float above",
    ),
    "a strip that lacks the maps to its right": Mutant(
        "loss",
        "kernels/loss.cuh",
        "brings = thread < 2 * kSide;",
        "brings = thread < kSide;",
        quick=False,
    ),
    "maps that go on beyond an odd width": Mutant(
        "loss", "kernels/loss.cuh", "pixel + 1 >= a.border && pixel + 1 < end", "pixel + 1 >= a.border"
    ),
    # Stacks of images.
    "a window that reaches into the next image": Mutant(
        "stack",
        "kernels/loss.cuh",
        "end = from + a.height;",
        "end = from + a.height * a.images - (y0 - above);",
    ),
    "a border that counts": Mutant(
        "stack", "kernels/loss.cuh", "row_counts = counted_rows.have(i);", "row_counts = true;"
    ),
    # Bands.
    "a band that lists the tile row after it": Mutant(
        "bands",
        "kernels/bin.cuh",
        "r.y1 < job.tile_row_end ? r.y1 : job.tile_row_end;",
        "r.y1 <= job.tile_row_end ? r.y1 : job.tile_row_end + 1;",
    ),
    "sums that forget the bands before": Mutant(
        "bands", "kernels/bands.cuh", "float total = job.sums[slot * kIsectGradSize + field];", "float total = 0.0f;"
    ),
    "tile rows that count a Gaussian to the end of the image": Mutant(
        "bands", "kernels/bands.cuh", "0ull - columns", "0ull"
    ),
    # Overflow.
    "a capacity of one intersection too many": Mutant(
        "overflow", "kernels/bin.cuh", "if (isects > job.isect_capacity)", "if (isects > job.isect_capacity + 1)"
    ),
    "blending of a view that overflowed": Mutant(
        "overflow",
        "kernels/blend.cuh",
        "  SPLAT_SHARED(int32_t, ends, kFastThreads / kWarp);\n" + OVERFLOW_CHECK,
        "  SPLAT_SHARED(int32_t, ends, kFastThreads / kWarp);\n",
    ),
    "gradients of a view that overflowed": Mutant(
        "overflow",
        "kernels/blend_vjp.cuh",
        "  SPLAT_SHARED(uint32_t, touched, kVjpWarps * kFastGroups);\n" + OVERFLOW_CHECK,
        "  SPLAT_SHARED(uint32_t, touched, kVjpWarps * kFastGroups);\n",
    ),
    "parameters after a view that overflowed": Mutant(
        "overflow",
        "kernels/project_vjp.cuh",
        "  if (overflowed(job.counters)) return;\n  constexpr int kRoom",
        "  constexpr int kRoom",
    ),
    # Devices and streams.
    "no device guard": Mutant("devices", "src/cuda/enter.h", "  const DeviceGuard guard(call);\n", ""),
    "a device guard that does not go back": Mutant(
        "devices", "src/cuda/enter.h", "      Contexts::get().pop();\n    } else if", "    } else if"
    ),
    "a device guard that makes a context on the caller's device": Mutant(
        "devices",
        "src/cuda/enter.h",
        "if (wanted_ == previous_ || push()) return;",
        "if (wanted_ == previous_) return;",
    ),
    "the default stream": Mutant(
        "devices",
        "src/cuda/bin.cu",
        "  const cudaStream_t stream = stream_of(call);\n  SPLAT_LAUNCH(count_listed,",
        "  const cudaStream_t stream = nullptr;\n  SPLAT_LAUNCH(count_listed,",
    ),
    "a launch that nobody checks": Mutant(
        "devices",
        "src/cuda/launch.h",
        "  const cudaError_t error = cudaPeekAtLastError();\n",
        "  const cudaError_t error = cudaSuccess;\n",
    ),
}


@pytest.fixture(autouse=True)
def _zeros_for_uninitialised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake that leaves holes in a list shall give a wrong picture, and not end the test process."""
    take = Arena.take

    def cleared(arena: Arena, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        before = arena._buffers.get(name)
        buffer = take(arena, name, numel, dtype)
        return buffer if buffer is before else buffer.zero_()

    monkeypatch.setattr(Arena, "take", cleared)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The copy of cuda/ that mistakes are made in, compiled as it is."""
    root = copy_sources(tmp_path_factory.mktemp("mutants"))
    build(root)
    return root


def build(sources: Path) -> Path:
    return emulator_library(source_root=sources, extra_flags=("-O1",))


@contextlib.contextmanager
def mistaken(sources: Path, mutant: Mutant) -> Iterator[None]:
    """The mistake is in the sources; afterwards they, and what is compiled of them, are as before, times included."""
    path, built, kept = sources / mutant.file, sources / ".build", sources / ".kept"
    text, times = path.read_text(encoding="utf-8"), path.stat()
    assert text.count(mutant.original) == 1, f"{mutant.file} has changed: this mistake needs to be made elsewhere"
    shutil.copytree(built, kept)
    path.write_text(text.replace(mutant.original, mutant.mutated), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(text, encoding="utf-8")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        shutil.rmtree(built)
        kept.rename(built)


def check_apart(check: str, library: Path) -> bool:
    """Runs a check in a process of its own; returns whether it failed, or the process was killed by a signal."""
    caught = 42
    program = f"""
import pathlib, sys
from splatcli.errors import ResourceError
from tests.kernels.test_mutants import CHECKS
try:
    CHECKS[{check!r}](pathlib.Path({str(library)!r}))
except (AssertionError, ResourceError):
    sys.exit({caught})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    return done.returncode == caught or done.returncode < 0


@pytest.mark.parametrize("check", CHECKS)
def test_the_kernels_as_they_are_pass(sources: Path, check: str) -> None:
    CHECKS[check](build(sources))


@pytest.mark.parametrize(
    "name", [name if mutant.quick else pytest.param(name, marks=pytest.mark.slow) for name, mutant in MUTANTS.items()]
)
def test_a_mistake_is_caught(sources: Path, name: str) -> None:
    with mistaken(sources, MUTANTS[name]):
        library, mutant = build(sources), MUTANTS[name]
        if mutant.crashes:
            assert check_apart(mutant.check, library), "neither a failed check nor a crash"
            return
        try:
            with pytest.raises((AssertionError, ResourceError)):
                CHECKS[mutant.check](library)
        finally:
            ctypes.CDLL(str(library)).simt_free_stacks()
