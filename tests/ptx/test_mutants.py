"""Do the checks on PTX notice? Mistakes that another order of threads, or the emulator, would forgive are made in the
kernels, one at a time, compiled by nvcc, and each must be caught.

A mistake costs the compilation of the one unit in which it is looked for. Most run with --slow only.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from splatcli.errors import ResourceError
from splatcli.native.build import source_root
from tests.ptx.machine import NEEDS_NVCC, TWIN_FLAGS, mutated_library
from tests.ptx.test_kernels import run_check

pytestmark = NEEDS_NVCC


# ---- mistakes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """A text in a file of cuda/, found there once; what it becomes; the check that must fail; the unit compiled."""

    check: str
    unit: str
    file: str
    original: str
    mutated: str
    quick: bool = False


MUTANTS = {
    # Copies that run on their own.
    "a forward batch that is read on its way": Mutant(
        "picture",
        "blend.cu",
        "kernels/blend.cuh",
        "    wait_for_copies();\n    if (!__syncthreads_or",
        "    if (!__syncthreads_or",
        True,
    ),
    "a simple batch that is read on its way": Mutant(
        "picture",
        "blend.cu",
        "kernels/blend.cuh",
        "    wait_for_copies();\n    __syncthreads();\n    for",
        "    __syncthreads();\n    for",
    ),
    "a backward batch that is read on its way": Mutant(
        "picture",
        "blend.cu",
        "kernels/blend_vjp.cuh",
        "    wait_for_copies();\n    __syncthreads();  // this batch is there; the last one and its sums",
        "    __syncthreads();  // this batch is there; the last one and its sums",
    ),
    "two batches in one buffer": Mutant(
        "picture",
        "blend.cu",
        "kernels/blend.cuh",
        "copy(lists, base + Batch, buffer ^ 1);",
        "copy(lists, base + Batch, buffer);",
    ),
    # Barriers.
    "a tile's end before all warps have theirs": Mutant(
        "picture",
        "blend.cu",
        "kernels/blend.cuh",
        "shared_ends[warp_id()] = warp_end;\n  __syncthreads();",
        "shared_ends[warp_id()] = warp_end;",
    ),
    "simple gradients before all warps have their sums": Mutant(
        "picture",
        "blend.cu",
        "kernels/blend_vjp.cuh",
        "touched[warp_id()] = hits.any;\n    __syncthreads();",
        "touched[warp_id()] = hits.any;",
    ),
    "a batch of channels before it is there": Mutant(
        "channels",
        "blend.cu",
        "kernels/blend_channels.cuh",
        "    __syncthreads();  // the batch is there; the last one's weights and sums have been read\n",
        "",
        True,
    ),
    "weights of channels before all warps have theirs": Mutant(
        "channels",
        "blend.cu",
        "kernels/blend_channels.cuh",
        "touched[warp_id()] = hits.any;\n    __syncthreads();",
        "touched[warp_id()] = hits.any;",
    ),
    "colours behind the last channel": Mutant(
        "channels",
        "blend.cu",
        "kernels/blend_channels.cuh",
        "isect < count && c < channels.count;",
        "isect < count;",
    ),
    "a loss with one buffer": Mutant("loss", "loss.cu", "kernels/loss.cuh", "input + (i & 1) * kRow;", "input;", True),
    "a loss's gradient with one buffer": Mutant(
        "loss", "loss.cu", "kernels/loss.cuh", "input + (i & 1) * kBuffer;", "input;"
    ),
    "a block's sum that its next one overwrites": Mutant(
        "loss",
        "loss.cu",
        "kernels/device.cuh",
        "const T mine = warp_sum(value);\n  __syncthreads();",
        "const T mine = warp_sum(value);",
    ),
    "a histogram that is not cleared by all": Mutant(
        "picture",
        "bin.cu",
        "kernels/radix_sort.cuh",
        "histogram[threadIdx.x] = 0;\n  __syncthreads();",
        "histogram[threadIdx.x] = 0;",
    ),
    "a sort whose lanes read a round too early": Mutant(
        "picture",
        "bin.cu",
        "kernels/radix_sort.cuh",
        "mine[digit] = uint16_t(before + unsigned(__popc(peers)));\n    __syncwarp();",
        "mine[digit] = uint16_t(before + unsigned(__popc(peers)));",
    ),
    "an order of tiles whose lanes read a round too early": Mutant(
        "order",
        "bin.cu",
        "kernels/order_tiles.cuh",
        "mine[level] = at + uint32_t(__popc(peers));\n    }\n    __syncwarp();",
        "mine[level] = at + uint32_t(__popc(peers));\n    }",
        True,
    ),
    "an order of tiles whose rounds all begin at one place": Mutant(
        "order", "bin.cu", "kernels/order_tiles.cuh", "mine[level] = at + uint32_t(__popc(peers));", "mine[level] = at;"
    ),
    "an order of tiles before all warps have counted theirs": Mutant(
        "order",
        "bin.cu",
        "kernels/order_tiles.cuh",
        "    __syncwarp();\n  }\n  __syncthreads();\n\n  // A thread has",
        "    __syncwarp();\n  }\n\n  // A thread has",
    ),
    "gradients of a chunk that are not cleared by all": Mutant(
        "picture",
        "project_vjp.cu",
        "kernels/project_vjp.cuh",
        "colours[e] = 0.0f;\n  }\n  __syncthreads();\n",
        "colours[e] = 0.0f;\n  }\n",
    ),
    # Atomics.
    "a histogram that is counted without atomics": Mutant(
        "picture",
        "bin.cu",
        "kernels/radix_sort.cuh",
        "atomicAdd(&histogram[digit_of(keys[i], pass.shift)], 1u);",
        "++histogram[digit_of(keys[i], pass.shift)];",
    ),
    "tile rows that are counted without atomics": Mutant(
        "bands",
        "bands.cu",
        "kernels/bands.cuh",
        "atomicAdd(tile_rows + r.y0, columns);",
        "tile_rows[r.y0] += columns;",
        True,
    ),
    # Warps.
    "a sum that names 31 lanes": Mutant(
        "loss",
        "loss.cu",
        "kernels/device.cuh",
        "__shfl_xor_sync(kFullWarp, value, offset)",
        "__shfl_xor_sync(0x7fffffffu, value, offset)",
    ),
    "a scan that adds what is no lane's": Mutant(
        "picture", "project.cu", "kernels/device.cuh", "if (lane_id() >= offset) value += before;", "value += before;"
    ),
    "a transposed sum that keeps what it gives": Mutant(
        "picture",
        "blend.cu",
        "kernels/blend_vjp.cuh",
        "keep = second ? other : values[k];",
        "keep = second ? values[k] : other;",
    ),
    # Bounds and places.
    "Adam one number too far": Mutant(
        "adam", "adam.cu", "kernels/adam.cuh", "if (i >= count) continue;", "if (i > count) continue;", True
    ),
    "noise one Gaussian too far": Mutant(
        "adam", "noise.cu", "kernels/noise.cuh", "if (i >= job.gaussians.n) return;", "if (i > job.gaussians.n) return;"
    ),
    "a Gaussian behind the last one": Mutant(
        "picture",
        "project.cu",
        "kernels/project.cuh",
        "i < job.gaussians.n ? project_one",
        "i <= job.gaussians.n ? project_one",
    ),
    "masks of intersections that are another tile's": Mutant(
        "picture",
        "blend.cu",
        "kernels/blend_vjp.cuh",
        "lane_id() < count ? lists.isect_masks[begin + base + lane_id()] : 0u",
        "lists.isect_masks[begin + base + lane_id()]",
    ),
    "gradients of a batch in one row": Mutant(
        "picture",
        "blend.cu",
        "kernels/blend_vjp.cuh",
        "isect_grad_at(isect_grads, isect_grad_rows[isect])[quad] =",
        "isect_grad_at(isect_grads, isect_grad_rows[0])[quad] =",
    ),
    "totals without the last chunk": Mutant(
        "counts",
        "project.cu",
        "kernels/project.cuh",
        "c = threadIdx.x; c < chunks;",
        "c = threadIdx.x; c < chunks - 1;",
    ),
    "a pose of one chunk": Mutant(
        "picture",
        "project_vjp.cu",
        "kernels/project_vjp.cuh",
        "c < job.chunks; c += kPoseThreads",
        "c < 1; c += kPoseThreads",
    ),
    # Indices of 32 bits.
    "noise on rows of 32 bits": Mutant(
        "huge",
        "noise.cu",
        "kernels/noise.cuh",
        "const int64_t i = int64_t(blockIdx.x) * kNoiseThreads + threadIdx.x;",
        "const int i = int(blockIdx.x) * kNoiseThreads + int(threadIdx.x);",
    ),
    "Adam on numbers of 32 bits": Mutant(
        "huge", "adam.cu", "kernels/adam.cuh", "const int64_t i = first + k", "const int i = int(first) + k", True
    ),
    "missed steps of rows of 32 bits": Mutant(
        "huge",
        "project.cu",
        "kernels/project.cuh",
        "const int64_t row = (i - lane_id() + owner) * width;",
        "const int row = int(i - lane_id() + owner) * width;",
    ),
    "projected Gaussians in places of 32 bits": Mutant(
        "huge",
        "project.cu",
        "kernels/project.cuh",
        "const int64_t slot = chunk * SPLAT_CHUNK + rank;",
        "const int slot = int(chunk) * SPLAT_CHUNK + rank;",
    ),
    "coefficients in places of 32 bits": Mutant(
        "huge",
        "project_vjp.cu",
        "kernels/project_vjp.cuh",
        "group.param += base * width,",
        "group.param += unsigned(base) * unsigned(width),",
    ),
    "gradients of intersections in places of 32 bits": Mutant(
        "huge",
        "project_vjp.cu",
        "kernels/project_vjp.cuh",
        "reinterpret_cast<const float4*>(isect_grads + (first + k) * kIsectGradSize);",
        "reinterpret_cast<const float4*>(isect_grads + int(first + k) * kIsectGradSize);",
    ),
    # Rows of neighbouring warps.
    "coefficients that are read with those of the next row": Mutant(
        "every kernel",
        "project.cu",
        "kernels/geometry.cuh",
        "const bool needed = q < kAlwaysQuads || shift > unsigned(4 * q - kUsed);",
        "const bool needed = true;",
    ),
    # Streams.
    "bands on the default stream": Mutant(
        "streams",
        "bands.cu",
        "src/cuda/bands.cu",
        "kSumIsectGradsThreads, stream_of(call), job);",
        "kSumIsectGradsThreads, nullptr, job);",
        True,
    ),
    "noise on the default stream": Mutant("streams", "noise.cu", "src/cuda/noise.cu", "stream_of(call)", "nullptr"),
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(source_root(), tmp_path_factory.mktemp("mutants") / "cuda"))


@pytest.mark.parametrize(
    "name", [name if mutant.quick else pytest.param(name, marks=pytest.mark.slow) for name, mutant in MUTANTS.items()]
)
def test_a_mistake_is_caught(tree: Path, name: str) -> None:
    mutant = MUTANTS[name]
    path = tree / mutant.file
    text = path.read_text(encoding="utf-8")
    assert text.count(mutant.original) == 1, f"{mutant.file} has changed: this mistake needs to be made elsewhere"
    path.write_text(text.replace(mutant.original, mutant.mutated), encoding="utf-8")
    try:
        library = mutated_library(tree, mutant.unit, flags=TWIN_FLAGS)
    finally:
        path.write_text(text, encoding="utf-8")
    with pytest.raises((AssertionError, ResourceError)) as caught:
        run_check(mutant.check, library)
    print(f"{name}: {str(caught.value)[:300]}")
