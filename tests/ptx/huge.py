"""Rows and offsets of more than 32 bits: the last blocks of launches over hundreds of millions of Gaussians.

Their memory is only address space, of which the last rows are touched. The results have to be those of a launch over
these rows alone.
"""

from __future__ import annotations

import math
import mmap
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from splatcli.native import abi
from splatcli.native.backend import Backend
from splatcli.rasterizer.adam import decay_table
from splatcli.rasterizer.context import RasterContext, view_of
from splatcli.rasterizer.memory_budget import Arena
from tests.native.cases import adam_update
from tests.ptx.machine import load, machine
from tests.rasterizer.fixed_budget import FixedBudget
from tests.rasterizer.scenes import random_camera, random_gaussians

#: The last two chunks, of which one is not full.
ROWS = abi.CHUNK + 44
#: 45 coefficients and 16 projected numbers of each have places beyond 2^32 and 2^31.
MANY = 550_000 * abi.CHUNK + 44
#: 3 numbers of each have places beyond 2^31.
VERY_MANY = 2_800_000 * abi.CHUNK + 44
#: A row of intersection gradients whose 16 numbers have places beyond 2^32.
FIRST_GRAD = 300_000_000
_NORESERVE = 0x4000


def reserved(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return zeros in address space that takes memory only where it is touched. Skips the test where there is none."""
    size = math.prod(shape)
    if size == 0:
        return torch.zeros(shape, dtype=dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    try:
        memory = mmap.mmap(-1, size * dtype.itemsize, flags=flags)
    except (OSError, ValueError, OverflowError) as error:
        pytest.skip(f"no address space for huge tensors: {error}")
    return torch.frombuffer(memory, dtype=dtype, count=size).view(shape)


def at_the_end(of: Tensor, rows: int) -> Tensor:
    """Return a tensor of that many rows whose last ones are those of another."""
    tensor = reserved(rows, *of.shape[1:], dtype=of.dtype)
    tensor[rows - len(of) :] = of
    return tensor


def on(library: Path) -> Backend:
    return Backend(load(library), torch.float32, 0, ordinal=1, stream=0x1234, deferred=True)


def noise(library: Path, rows: int) -> list[Tensor]:
    """Return the last positions after noise. The index of a Gaussian is the same in all runs: `first` makes up."""
    gaussians = random_gaussians(6, ROWS, sh_degree=0)
    gaussians.logit_opacities -= 6.0
    gaussians = gaussians.map(lambda t: at_the_end(t, rows))
    job = abi.Noise(seed=5, step=7, scale=30.0, threshold=0.005, steepness=100.0, first=VERY_MANY - rows)
    backend = on(library)
    backend.call("noise", backend.arrays(gaussians), job)
    return [gaussians.means[-ROWS:].clone()]


def adam(library: Path, rows: int) -> list[Tensor]:
    """Return the last numbers of each group after a dense step."""
    params, grads, first, second = (
        random_gaussians(k, ROWS, sh_degree=3).map(lambda t: at_the_end(t.abs(), rows)) for k in range(4)
    )
    backend, state = on(library), types.SimpleNamespace(exp_avg=first, exp_avg_sq=second)
    backend.call("adam", backend.arrays(params), backend.arrays(grads), adam_update(backend, state, 3))  # type: ignore[arg-type]
    return [t.flatten()[-44 * t[0].numel() :].clone() for g in (params, first, second) for _, t in g.items()]


def step(library: Path, rows: int) -> list[Tensor]:
    """Return what projection and its adjoint with Adam leave of the last rows; gradients are made up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arena, "take", take)
        return _step(on(library), rows)


def _step(backend: Backend, rows: int) -> list[Tensor]:
    params = random_gaussians(0, ROWS, sh_degree=3).map(lambda t: at_the_end(t, rows))
    first, second = (random_gaussians(k, ROWS, sh_degree=3).map(lambda t: at_the_end(t.abs(), rows)) for k in (1, 2))
    table, stands = decay_table(0.9, 0.999), at_the_end(torch.arange(ROWS, dtype=torch.int32) % 30, rows)
    update = adam_update(
        backend,
        types.SimpleNamespace(exp_avg=first, exp_avg_sq=second),  # type: ignore[arg-type]
        40,
        sh_last_step=stands.data_ptr(),
        decay_table=table.data_ptr(),
        decay_rows=len(table),
    )
    view = view_of(random_camera(1, 64, 48), sh_degree=3, antialiased=False, with_depth=False)
    context = RasterContext(backend, FixedBudget(1 << 40))
    arrays = context.project(view, params, update)
    begin = (rows - 1) // abi.CHUNK * abi.CHUNK - abi.CHUNK  # slots of the last two chunks
    chunks = context.arena.take("chunk_counts", 0, torch.int64)[2 * (begin // abi.CHUNK) :]
    visible = [int(count) for count in chunks[[0, 2]]]
    assert sum(visible) > 100
    slots = torch.cat([torch.arange(n) + k * abi.CHUNK for k, n in enumerate(visible)]) + begin
    projected = context.arena.take("projected", 0, torch.float32).view(-1, abi.PROJECTED)[slots]
    ids = context.arena.take("ids", 0, torch.int32)[slots].long() - (rows - ROWS)
    tiles = context.arena.take("tiles_per_gauss", 0, torch.int32)
    out = [chunks[:4].clone(), projected, ids, tiles[slots]]

    row = FIRST_GRAD if rows > ROWS else 0
    grads = reserved(row + 3 * ROWS, abi.ISECT_GRAD)
    grads[row:, :12] = torch.randn(3 * ROWS, 12, generator=torch.Generator().manual_seed(3))
    tiles[slots] = torch.arange(len(slots), dtype=torch.int32) % 4
    starts = context.arena.take("isect_grad_starts", 0, torch.int32)
    starts[slots] = row + tiles[slots].cumsum(0, dtype=torch.int32) - tiles[slots]
    context.native.isect_grads = grads.data_ptr()
    count, grad2d = reserved(rows), reserved(rows)
    context.project_vjp(view, arrays, adam=update, grad2d=grad2d, count=count)
    out += [t[-ROWS:].clone() for g in (params, first, second) for _, t in g.items()]
    return [*out, stands[-ROWS:].clone(), grad2d[-ROWS:].clone(), count[-ROWS:].clone()]


def take(arena: Arena, name: str, numel: int, dtype: torch.dtype) -> Tensor:
    """As Arena.take(), in address space."""
    if numel > 0:
        arena._buffers[name] = reserved(numel, dtype=dtype)
    return arena._buffers[name]


def check_huge(library: Path) -> None:
    """The last rows of huge launches are those of small ones."""
    jobs: list[tuple[Any, int, int]] = [(noise, VERY_MANY, 2), (adam, MANY, 2), (step, MANY, 2)]
    for job, rows, blocks in jobs:
        want = job(library, ROWS)
        with machine().last_blocks(blocks):
            got = job(library, rows)
        assert len(got) == len(want)
        for k, (ours, small) in enumerate(zip(got, want, strict=True)):
            assert torch.equal(ours, small), k
