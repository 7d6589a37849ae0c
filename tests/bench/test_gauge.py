"""The gauge's model of machine code: what is read from nvdisasm, how counts are spread over it, what a change is."""

from __future__ import annotations

import ctypes
import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gauge, gsplat_kernels, roofline, sass
from benchmarks.sass import Machine, Ran

#: A kernel with a loop that ptxas has doubled and a tail, a square root with its slow path, and its subroutine.
LISTING = """
.text.kernel:
\t//## File ".nv_debug_ptx_txt", line 10
        /*0000*/                   LDC R1, c[0x0][0x28] ;
\t//## File ".nv_debug_ptx_txt", line 21
        /*0010*/                   ULDC.64 UR4, c[0x0][0x208] ;
.L_x_1:
\t//## File ".nv_debug_ptx_txt", line 20
        /*0020*/                   LDG.E R2, desc[UR4][R4.64] ;
\t//## File ".nv_debug_ptx_txt", line 22
        /*0030*/                   FFMA R6, R2, R2, R6 ;
\t//## File ".nv_debug_ptx_txt", line 20
        /*0040*/                   LDG.E R2, desc[UR4][R4.64+0x4] ;
\t//## File ".nv_debug_ptx_txt", line 22
        /*0050*/                   FFMA R6, R2, R2, R6 ;
\t//## File ".nv_debug_ptx_txt", line 23
        /*0060*/                   ISETP.NE.AND P0, PT, R0, RZ, PT ;
        /*0070*/               @P0 BRA `(.L_x_1) ;
\t//## File ".nv_debug_ptx_txt", line 30
        /*0080*/                   MUFU.RSQ R7, R6 ;
        /*0090*/                   IADD3 R0, R6, -0xd000000, RZ ;
        /*00a0*/              @!P0 BRA `(.L_x_2) ;
        /*00b0*/                   MOV R78, 0x2220 ;
        /*00c0*/                   CALL.REL.NOINC `($__internal_1_$__cuda_sm20_sqrt_rn_f32_slowpath) ;
        /*00d0*/                   MOV R0, R8 ;
        /*00e0*/                   BRA `(.L_x_3) ;
.L_x_2:
        /*00f0*/                   FMUL.FTZ R0, R6, R7 ;
.L_x_3:
\t//## File ".nv_debug_ptx_txt", line 31
        /*0100*/                   STG.E desc[UR4][R2.64], R0 ;
        /*0110*/                   EXIT ;
$__internal_1_$__cuda_sm20_sqrt_rn_f32_slowpath:
        /*0120*/                   LOP3.LUT P0, RZ, R7, 0x7fffffff, RZ, 0xc0, !PT ;
.L_x_4:
        /*0130*/                   RET.REL.NODEC R2 `(kernel) ;
"""
#: Its PTX: only labels and branches matter.
PTX = "\n".join(
    [
        *["//"] * 18,
        "$L__BB0_1:",
        "ld",
        "param",
        "fma",
        "@%p1 bra $L__BB0_1;",
        *["//"] * 6,
        "sqrt",
        "st",
        "st",
        "st",
        "ret;",
    ]
)
RAN = [
    Ran("ld.global.nc.f32", 20, 64, 2048, 256),
    Ran("fma.rn.f32", 22, 64, 2048, 0),
    Ran("bra", 23, 64, 2048, 0),
    Ran("sqrt.rn.f32", 30, 8, 256, 0),
    Ran("st.global.f32", 31, 8, 256, 32),
]


def counted(listing: str = LISTING, ran: list[Ran] = RAN) -> Counter[str]:
    return sass.issued(sass.parse(listing)["kernel"], ran, sass.ptx_blocks(PTX))


def unexplained(ran: list[Ran], listing: str = LISTING) -> float:
    return sass.checked(sass.parse(listing)["kernel"], ran, sass.ptx_blocks(PTX))


def test_blocks_end_at_branches_and_labels_and_know_their_lines() -> None:
    blocks = sass.parse(LISTING)["kernel"]
    assert [len(block.instructions) for block in blocks] == [2, 6, 3, 2, 2, 1, 2, 1, 1]
    assert blocks[1].instructions[1] == Machine("FFMA", 22)
    assert [block.slow for block in blocks] == [False, False, False, True, True, False, False, True, True]


def test_copies_of_a_loop_share_its_count() -> None:
    found = counted()
    assert found["LDG.E"] == 64
    assert found["FFMA"] == 64
    assert found["BRA"] == 32 + 8  # the doubled loop branches half as often


def test_what_was_moved_out_of_a_loop_counts_as_often_as_its_new_place() -> None:
    found = counted(
        LISTING.replace("/*00f0*/", "/*00f0*/                   ULDC.64 UR6, c[0x0][0x210] ;\n        /*00f8*/")
    )
    assert found["MUFU.RSQ"] == 8
    assert found["FMUL.FTZ"] == 8
    # Its PTX stands in the loop, which ran 64 times.
    assert found["ULDC.64"] == 8


def test_slow_paths_never_run() -> None:
    found = counted()
    assert found["CALL.REL.NOINC"] == 0
    assert found["RET.REL.NODEC"] == 0
    assert found["LOP3.LUT"] == 0
    assert found["STG.E"] == 8
    assert found["EXIT"] == 8


def test_what_is_unexplained_is_a_share() -> None:
    assert unexplained(RAN) == 0.0
    # Three roots of one block, of which the counts say that one ran less often: 24 are modelled, 18 were counted.
    line = '\t//## File ".nv_debug_ptx_txt", line {}\n        /*0110*/                   MUFU.RSQ R8, R6 ;\n'
    listing = LISTING.replace("        /*0090*/", line.format(32) + line.format(33) + "        /*0098*/")
    more = [*RAN, Ran("rsqrt.approx.f32", 32, 8, 256, 0), Ran("rsqrt.approx.f32", 33, 2, 64, 0)]
    assert unexplained(more, listing) == pytest.approx(1 / 3)


def test_a_block_runs_as_often_as_its_stores_and_guards_spare_no_issue() -> None:
    # A store of line 33 that a branch skips six of eight times, made a guard by ptxas; a sum of line 32 likewise.
    line = '\t//## File ".nv_debug_ptx_txt", line {}\n        /*0110*/                   {} ;\n'
    guarded = line.format(32, "@P1 FADD R1, R2, R3") + line.format(33, "@P1 STG.E desc[UR4][R2.64], R0")
    listing = LISTING.replace("        /*0110*/", guarded + "        /*0118*/")
    found = counted(listing, [*RAN, Ran("add.rn.f32", 32, 2, 64, 0), Ran("st.global.f32", 33, 2, 64, 8)])
    assert found["STG.E"] == 16
    assert found["FADD"] == found["EXIT"] == 8


def test_every_instruction_has_a_kind_and_takes_an_issue() -> None:
    found = counted()
    assert sum(sass.kinds(found).values()) == sum(found.values()) == sass.pipes(found, 288, 0)["issue"]
    assert sass.kinds(found)["global memory"] == 72
    assert sass.kinds(found)["special functions"] == 8


def test_memory_takes_the_more_of_its_instructions_and_its_passes() -> None:
    loads = Counter({"LDG.E": 10, "LDS.128": 5, "SHFL.BFLY": 3})
    assert sass.pipes(loads, sectors=4, passes=5)["memory"] == 4 * (10 + 5 + 3)
    assert sass.pipes(loads, sectors=320, passes=20)["memory"] == 4 * (80 + 20 + 3)


@pytest.mark.parametrize(
    ("opcode", "pipe", "cycles"),
    [("FFMA", "float", 1), ("IMAD", "float", 2), ("IMAD.WIDE.U32", "float", 4), ("MUFU.EX2", "special", 8),
     ("DFMA", "double", 2), ("IADD3", "integer", 2), ("SHF.L.U32", "integer", 2), ("SHFL.BFLY", "memory", 4),
     ("UIADD3", "uniform", 2), ("LEA.HI.X", "integer", 2), ("VOTE.ANY", "integer", 2)],
)  # fmt: skip
def test_an_instruction_takes_its_pipe(opcode: str, pipe: str, cycles: float) -> None:
    assert sass.pipes(Counter({opcode: 1}), 0, 0) == {"issue": 1, "memory": 0, pipe: cycles} | (
        {"memory": cycles} if pipe == "memory" else {}
    )


def result(**kernel: int) -> dict[str, Any]:
    whole = {"instructions": 1000, "sectors": 100, "passes": 0, "atomics": 0, "cycles": 1000}
    return {"scenes": {"courtyard": {"ours": {"blend": whole | kernel}}}}


def test_changes_above_two_percent_are_reported_the_worst_first() -> None:
    found = gauge.changes(result(), result(instructions=1030, sectors=50, cycles=1019, passes=7))
    assert [words.split(": ")[-1] for _, words in found] == [
        "passes 0 -> 7 (+100.0%)", "instructions 1,000 -> 1,030 (+3.0%)", "sectors 100 -> 50 (-50.0%)",
    ]  # fmt: skip
    assert gauge.changes(result(), result(instructions=1019)) == []


def test_kernels_that_come_and_go_are_reported() -> None:
    other = result()
    other["scenes"]["courtyard"]["ours"]["blend_fast"] = other["scenes"]["courtyard"]["ours"].pop("blend")
    assert [words for _, words in gauge.changes(result(), other)] == [
        "courtyard: blend is gone", "courtyard: blend_fast is new",
    ]  # fmt: skip


def test_the_stored_results_are_of_every_kernel_of_a_step_and_explained() -> None:
    stored = json.loads(roofline.RESULTS.read_text(encoding="utf-8"))
    assert set(gauge.DEFAULT_SCENES) <= stored["scenes"].keys()
    for scene in stored["scenes"].values():
        names = {name.partition("<")[0] for name in scene["ours"]}
        assert {"project_chunks", "blend_fast", "blend_vjp_fast", "loss_gradient", "project_vjp_chunks"} <= names
        for kernel in scene["ours"].values():
            assert kernel["cycles"] == max(kernel["pipes"].values()) == kernel["pipes"][kernel["busiest"]]
            assert sum(kernel["kinds"].values()) == pytest.approx(kernel["instructions"], abs=len(kernel["kinds"]))
            assert kernel["unexplained"] < 0.02
            assert 0 < kernel["lanes"] <= 32


def test_the_documents_block_is_of_the_stored_results() -> None:
    stored, document = (
        json.loads(roofline.RESULTS.read_text(encoding="utf-8")),
        roofline.DOCUMENT.read_text(encoding="utf-8"),
    )
    assert roofline.with_block(document, stored) == document, "run python -m benchmarks.roofline"


def test_a_kernel_takes_what_binds_it() -> None:
    kernel = {"sectors_read": 100_000, "sectors_written": 34_375, "cycles": roofline.QUARTERS * 99}
    memory, pipe, estimate = roofline.seconds(kernel)
    assert memory == pytest.approx(134_375 * 32 / 4.3e12) == pytest.approx(1e-6)
    assert pipe == pytest.approx(99 / 1.98e9) == pytest.approx(5e-8)
    assert estimate == memory
    assert roofline.seconds(kernel | {"sectors_read": 0, "sectors_written": 0})[2] == pytest.approx(5e-8 / 0.6)


def test_every_kernel_has_a_stage() -> None:
    assert roofline.stage_of("blend_vjp_fast<false, false>", 0) == "blend, backward"
    assert roofline.stage_of("project_vjp_chunks<3, false>", 0) == "projection, backward, Adam"
    assert roofline.stage_of("sort_scatter", 0) == roofline.stage_of("DeviceRadixSortOnesweepKernel", 1) == "binning"
    assert roofline.stage_of("adam_kernel<float>", 1) == "projection, backward, Adam"


HOST_AND_DEVICE = """
#include <ATen/Dispatch.h>
#include "Common.h"
#include "Utils.cuh"
#include <cooperative_groups.h>
template <typename T>
__global__ void kept(const T *x) {
}

template <typename T>
void launch_kept(at::Tensor x) {
    if (x.size(0)) {
    }
}
void launch_other(
    const at::Tensor x
) {
}
"""


def test_host_functions_are_cut_out_and_kernels_stay() -> None:
    text = gsplat_kernels.without_host(HOST_AND_DEVICE)
    assert "__global__ void kept(const T *x) {\n}" in text
    assert "#include <cooperative_groups.h>" in text
    assert "at::Tensor" not in text
    assert "ATen" not in text
    assert "Common.h" not in text


# ---- compiled --------------------------------------------------------------------------------------------------------

MICRO = """
extern "C" __global__ void micro(const float* in, float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  float sum = 0.0f;
  for (int k = 0; k < n; ++k) sum += in[k * 64 + i] / in[i];
  for (int k = 16; k > 0; k /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, k);
  unsigned long long whole = (unsigned long long)(sum);
  out[i] = sqrtf(sum) + exp2f(sum) + float(whole / (unsigned long long)(n));
}
"""


def test_a_compiled_kernel_comes_out_as_it_was_counted(tmp_path: Path) -> None:
    from tests.ptx.machine import machine, missing

    reason = missing() or (None if gauge.local_nvdisasm() else "no nvdisasm on this machine")
    if reason is not None:
        pytest.skip(reason)
    source, target = tmp_path / "micro.cu", tmp_path / "micro.ptx"
    source.write_text(MICRO, encoding="utf-8")
    command = [str(gauge.find_toolkit().nvcc), "-O3", "-arch=compute_90", "-ptx", str(source), "-o", str(target)]
    subprocess.run(command, check=True)
    ptx = target.read_text(encoding="utf-8")
    numbers, out = torch.rand(9 * 64, generator=torch.Generator().manual_seed(1)) + 0.5, torch.empty(64)
    with machine().profile():
        machine().module(ptx).run("micro", [1], [64], numbers, out, ctypes.c_int(9))
    (kernel,) = [one for one in machine().counts() if one.name == "micro"]
    found = gauge.kernel_summary(gauge.machine_code(ptx)["micro"], gauge.ran_of(kernel), sass.ptx_blocks(ptx))
    assert found["unexplained"] == 0.0
    # 9 divisions, a root and an exponential in each of two warps.
    assert 2 * (9 + 1 + 1) <= found["kinds"]["special functions"] <= 2 * (9 + 1 + 1) + 4
    assert found["kinds"]["warp"] == 2 * 5
    # A division is eight instructions or more, an integer division of 64 bits dozens; so PTX counts too few.
    assert found["instructions"] > found["ptx_instructions"] + 2 * 9 * 7
    assert found["sectors"] == 2 * (9 + 9 + 1) * 4 or found["sectors"] == 2 * (9 + 1 + 1) * 4
