"""The interpreter runs what nvcc makes of the kernels, and small PTX of its own."""

from __future__ import annotations

import pytest
import torch

from splatcli.native.backend import Backend
from splatcli.rasterizer.memory_budget import Arena
from tests.native.cases import images_and_gradients
from tests.ptx.machine import NEEDS_NVCC, Fault, kernel_library, load, machine
from tests.rasterizer.scenes import random_scene

pytestmark = NEEDS_NVCC

SEVENS = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry sevens(.param .u64 out)
{
  .reg .b64 %rd<3>; .reg .b32 %r<3>;
  ld.param.u64 %rd1, [out];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd2, %r1, 4;
  add.s64 %rd1, %rd1, %rd2;
  mov.u32 %r2, 7;
  st.global.u32 [%rd1], %r2;
  ret;
}
"""


def test_a_kernel_of_its_own_runs() -> None:
    module, out = machine().module(SEVENS), torch.zeros(40, dtype=torch.int32)
    module.run("sevens", [1], [37], out)
    assert out.tolist() == [7] * 37 + [0] * 3


def test_an_access_out_of_bounds_is_a_fault() -> None:
    module, out = machine().module(SEVENS), torch.zeros(40, dtype=torch.int32)
    with machine().bounds():
        module.run("sevens", [1], [40], out)
        with pytest.raises(Fault, match=r"out of bounds of 4 bytes.*st\.global\.u32, PTX line 13"):
            module.run("sevens", [1], [41], out)
    with pytest.raises(Fault, match="null pointer"):
        module.run("sevens", [1], [1], None)


def test_an_access_behind_what_was_asked_of_a_buffer_is_a_fault() -> None:
    module = machine().module(SEVENS)
    with machine().bounds():
        out = Arena(torch.device("cpu")).take("numbers", 320, torch.int32)
        module.run("sevens", [1], [320], out)
        with pytest.raises(Fault, match=r"out of bounds of 4 bytes"):
            module.run("sevens", [1], [321], out)
    assert Arena(torch.device("cpu")).take("numbers", 320, torch.int32).numel() == 400


def test_shipped_kernels_draw_the_cpus_picture() -> None:
    scene = random_scene(3, 280, width=37, height=29, sh_degree=1, scale=0.2)
    expected = images_and_gradients(Backend.cpu(isa="portable", threads=1), *scene)
    library = load(kernel_library())
    backend = Backend(library, torch.float32, 0, ordinal=1, stream=0x51, deferred=True)
    with machine().profile(), machine().bounds(), machine().races():
        ours = images_and_gradients(backend, *scene)
        assert machine().hazards() == []
    for got, want in zip(ours, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-4)
    assert machine().unknown("splat") == {}
    blends = [kernel for kernel in machine().counts() if "blend_fast" in kernel.name]
    assert sum(kernel.launches for kernel in blends) == 1
    assert sum(instruction.warps for instruction in blends[0].instructions) > 0


def test_a_profile_counts_a_sector_once_a_launch() -> None:
    module, out = machine().module(SEVENS), torch.zeros(64, dtype=torch.int32)
    with machine().profile():
        for _ in range(2):
            module.run("sevens", [2], [40], out)  # both blocks write the same 160 bytes
    (kernel,) = [kernel for kernel in machine().counts() if kernel.name == "sevens"]
    stores = next(one for one in kernel.instructions if one.opcode == "st.global.u32")
    assert (kernel.launches, kernel.blocks, stores.warps, stores.traffic) == (2, 4, 8, 20)
    assert (kernel.sectors_read, kernel.sectors_written) == (0, 10)
