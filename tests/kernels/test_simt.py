"""The emulator itself: what it computes, and that it lets nothing pass that a GPU would leave to chance."""

from __future__ import annotations

import ctypes
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from splatcli.native.build import source_root
from tests.kernels.build_emulator import emulator_library
from tests.kernels.simt import Emulator, copy_sources

STREAM = 0x1234
SEEDS = [0, 1, 2, 3, 4]

Run = Callable[..., str]


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    """The emulator with the kernels of simt_cases.cu instead of the real ones."""
    root = copy_sources(tmp_path_factory.mktemp("cases"), stages=False)
    shutil.copy2(Path(__file__).with_name("simt_cases.cu"), root / "src" / "cuda")
    return Emulator(ctypes.CDLL(str(emulator_library(source_root=root))))


@pytest.fixture
def run(emulator: Emulator) -> Run:
    """Runs a case of simt_cases.cu; what went wrong, or an empty text."""
    function = emulator.library.run_case
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    function.restype = ctypes.c_char_p
    emulator.clear_trace()
    emulator.last_error = 0
    emulator.fail_launch(0)

    def call(
        case: int,
        given: Tensor | None = None,
        out: Tensor | None = None,
        *,
        device: int = 0,
        stream: int = STREAM,
        guarded: bool = True,
    ) -> str:
        given = torch.zeros(1024) if given is None else given
        out = torch.zeros(1024) if out is None else out
        return str(function(case, device, stream, guarded, given.data_ptr(), out.data_ptr()).decode())

    return call


@pytest.mark.parametrize("seed", SEEDS)
def test_barriers_let_threads_exchange(run: Run, emulator: Emulator, seed: int) -> None:
    numbers, out = torch.arange(256.0), torch.zeros(256)
    with emulator.schedule(seed):
        assert run(0, numbers, out) == ""
    assert torch.equal(out.reshape(4, 64), numbers.reshape(4, 64).flip(1))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_forgotten_barrier_reads_poison(run: Run, emulator: Emulator, seed: int) -> None:
    out = torch.zeros(256)
    with emulator.schedule(seed):
        assert run(1, torch.arange(256.0), out) == ""
    assert out.reshape(4, 64).isnan().any(dim=1).all(), "every block starts with fresh poison"


@pytest.mark.parametrize("seed", SEEDS)
def test_warp_and_block_operations(run: Run, emulator: Emulator, seed: int) -> None:
    x = torch.randint(0, 9, (128,), dtype=torch.int32, generator=torch.Generator().manual_seed(5))
    out = torch.zeros(128, 8, dtype=torch.int64)
    with emulator.schedule(seed):
        assert run(2, x, out) == ""
    wide = x.long()
    warps = wide.reshape(4, 32)
    bits = 1 << torch.arange(32)
    assert torch.equal(out[:, 0], wide.cumsum(0) - wide)
    assert (out[:, 1] == wide.sum()).all()
    assert (out[:, 2] == wide.sum()).all()
    assert torch.equal(out[:, 3], warps.roll(-1, 1).reshape(-1)), "the source lane wraps"
    even = ((warps % 2 == 0) * bits).sum(1, keepdim=True)
    assert torch.equal(out[:, 4], even.expand(4, 32).reshape(-1))
    same = ((warps[:, :, None] == warps[:, None, :]) * bits).sum(2)
    assert torch.equal(out[:, 5], same.reshape(-1))
    assert (out[:, 6] == (wide > 3).sum()).all()
    up = torch.cat([warps[:, :1], warps[:, :-1]], dim=1)
    assert torch.equal(out[:, 7], up.reshape(4, 16, 2).flip(2).reshape(-1))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (3, ["lonely_barrier", "waits for ever at the barrier", "1 of 64 threads have returned"]),
        (4, ["two_barriers", "different barriers"]),
        (5, ["outside_mask", "lane 8", "not in the mask"]),
        (6, ["returned_lane", "waits for ever at the warp operation", "1 of 32 threads"]),
        (7, ["parted_lanes", "lane 0", "waits elsewhere"]),
        (8, ["too_much_shared", "48 KB", "more"]),
        (9, ["beyond_shared", "wrote beyond the shared array few"]),
        (13, ["nothing", "invalid configuration argument"]),
        (15, ["nothing", "more blocks than a grid can have"]),
    ],
)
def test_a_broken_kernel_is_an_error(run: Run, emulator: Emulator, case: int, words: list[str]) -> None:
    message = run(case)
    assert all(word in message for word in words), message
    out = torch.zeros(256)
    assert run(0, torch.arange(256.0), out) == "", "the next launch is as good as new"
    assert out[0] == 63


@pytest.mark.parametrize("case", [3, 4, 5, 6, 7, 9])
@pytest.mark.parametrize("seed", SEEDS[1:])
def test_no_order_hides_a_broken_kernel(run: Run, emulator: Emulator, case: int, seed: int) -> None:
    with emulator.schedule(seed):
        assert run(case) != ""


def test_an_absent_lane_gives_poison(run: Run) -> None:
    out = torch.zeros(32)
    assert run(14, out=out) == ""
    assert out[:16].isnan().all()


def test_the_seed_decides_the_order(run: Run, emulator: Emulator) -> None:
    def order(seed: int) -> list[int]:
        out = torch.zeros(257, dtype=torch.int32)
        with emulator.schedule(seed):
            assert run(10, out=out) == ""
        return list(out[1:].tolist())

    assert order(0) == list(range(256))
    assert order(1) == order(1) != order(0)
    assert sorted(order(2)) == list(range(256))
    assert {position // 64 for position in order(3)[:64]} != {0, 1, 2, 3}, "a block runs alone"
    assert any(order(seed)[0] // 64 > 0 for seed in SEEDS), "blocks are shuffled too"


def test_no_blocks_is_no_launch(run: Run, emulator: Emulator) -> None:
    assert run(11) == ""
    assert emulator.trace() == []


# ---- devices and streams ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("current", [0, 3])
def test_the_guard_goes_to_the_device_and_back(run: Run, emulator: Emulator, current: int) -> None:
    with emulator.current_device(current):
        assert run(0, device=1) == ""
        assert emulator.device == current
    assert [(launch.kernel, launch.device, launch.stream) for launch in emulator.trace()] == [
        ("reverse<true>", 1, STREAM)
    ]


def test_the_guard_makes_no_context_on_a_device_that_is_not_used(run: Run, emulator: Emulator) -> None:
    emulator.forget_contexts()
    assert run(0, device=1) == ""
    assert run(0, device=3) == ""
    assert run(12, device=3) != ""
    assert (emulator.device, emulator.contexts) == (0, {1, 3})


def test_where_the_runtime_does_not_follow_the_context_the_device_is_set(run: Run, emulator: Emulator) -> None:
    emulator.forget_contexts()
    emulator.library.simt_ignore_pushes(1)
    try:
        emulator.clear_trace()
        assert run(0, device=1) == ""
        assert [launch.device for launch in emulator.trace()] == [1]
        assert (emulator.device, emulator.contexts) == (0, {0, 1})
        assert run(0, device=4) == "device 4: invalid device ordinal (cudaErrorInvalidDevice)"
    finally:
        emulator.library.simt_ignore_pushes(0)


@pytest.mark.parametrize("case", [3, 12, 13])
def test_the_guard_goes_back_after_an_error(run: Run, emulator: Emulator, case: int) -> None:
    with emulator.current_device(2):
        assert run(case, device=1) != ""
        assert emulator.device == 2


def test_without_the_guard_the_wrong_device_is_noticed(run: Run, emulator: Emulator) -> None:
    assert "launched on device 0, the call's is 1" in run(0, device=1, guarded=False)


@pytest.mark.parametrize("case", [12, 16])
def test_another_stream_is_noticed(run: Run, case: int) -> None:
    assert "another stream" in run(case)
    assert run(case, stream=0) == "", "unless it is the caller's own"


@pytest.mark.parametrize("device", [-1, 4])
def test_a_device_that_is_not_there(run: Run, emulator: Emulator, device: int) -> None:
    assert run(0, device=device) == f"device {device}: invalid device ordinal (cudaErrorInvalidDevice)"
    assert emulator.last_error == 0, "our own error is not left for others to find"
    assert emulator.trace() == []


def test_a_refused_launch_names_the_kernel(run: Run, emulator: Emulator) -> None:
    emulator.fail_launch(1)
    assert run(0) == "(reverse<true>): unspecified launch failure"
    assert emulator.last_error == 0
    assert run(0) == ""


def test_a_launch_that_does_not_fit_the_gpu_says_what_does_not(run: Run, emulator: Emulator) -> None:
    emulator.fail_launch(1, error=209)
    assert run(0) == (
        "(reverse<true>): no kernel image is available for execution on the device (cudaErrorNoKernelImageForDevice); "
        "the library has code for compute capability 8.0 and CUDA 13.0; the GPU has compute capability 9.0; the driver "
        "knows CUDA 13.0"
    )
    assert emulator.last_error == 0


def test_an_error_of_somebody_else_is_left_alone(run: Run, emulator: Emulator) -> None:
    emulator.last_error = 719
    assert run(0) == "an earlier CUDA call failed: unspecified launch failure"
    assert emulator.last_error == 719
    assert emulator.trace() == []


# ---- what is written in the sources ----------------------------------------------------------------------------------

KERNELS = sorted((source_root() / "kernels").glob("*.cuh"))
HOST = sorted(path for path in (source_root() / "src" / "cuda").iterdir() if path.suffix in (".cu", ".h"))


def code_of(path: Path) -> str:
    """A source without its comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("path", [*KERNELS, *HOST], ids=lambda path: path.name)
def test_sources_launch_and_wait_nowhere_else(path: Path) -> None:
    code = code_of(path)
    if path.name != "launch.h":
        assert "<<<" not in code, "launches go through SPLAT_LAUNCH"
        assert not re.search(r"cudaLaunch\w*|cuLaunch\w*", code)
    forbidden = (
        r"cuda(DeviceSynchronize|StreamSynchronize|EventSynchronize|Memcpy\w*|Memset|Malloc\w*|Free\w*|Stream\w+)\s*\("
    )
    assert not re.search(forbidden, code), "nothing waits, copies to the host or allocates"
    if path.name != "enter.h":
        assert "cudaSetDevice" not in code, "only the guard changes the device"
    if path.name not in ("enter.h", "launch.h"):
        assert "cudaGetLastError" not in code, "only an error of our own is taken out of the runtime"
    assert not re.search(r"\bassert\s*\(|\bprintf\s*\(", code), "kernels say nothing"


def entries_without_the_guard(code: str) -> list[str]:
    """Return the entries of api.cu that take a call and do work outside enter(), which sets the call's device."""
    bodies = re.findall(r"SPLAT_EXPORT int32_t (splat_\w+)\(const SplatCall\*[^{]*\{(.*?)\n\}\n", code, re.DOTALL)
    entered = re.compile(r"\breturn enter\(__func__, call, \[&\] \{.*?\}\);", re.DOTALL)
    return [name for name, body in bodies if not entered.search(body) or "gpu::" in entered.sub("", body)]


def test_every_entry_that_launches_sets_the_device() -> None:
    code = code_of(source_root() / "src" / "cuda" / "api.cu")
    header = code_of(source_root() / "include" / "splat.h")
    declared = set(re.findall(r"\bint32_t (splat_\w+)\(const SplatCall\*", header))
    assert len(declared) >= 9
    assert declared == set(re.findall(r"SPLAT_EXPORT int32_t (splat_\w+)\(const SplatCall\*", code))
    assert entries_without_the_guard(code) == []
    for name in sorted(declared):  # the check sees the guard dropped from any one of them
        start = code.index(f"int32_t {name}(")
        dropped = re.sub(
            r"return enter\(__func__, call, \[&\] \{(.*?)\}\);", r"\1 return 0;", code[start:], count=1, flags=re.S
        )
        assert entries_without_the_guard(code[:start] + dropped) == [name]


@pytest.mark.parametrize("path", HOST, ids=lambda path: path.name)
def test_every_launch_names_the_callers_stream(path: Path) -> None:
    for arguments in re.findall(
        r"SPLAT_LAUNCH\(((?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))*)\)\s*;", code_of(path)
    ):
        assert re.search(r",\s*(stream|stream_of\(call\))\s*,", arguments), arguments
    for arguments in re.findall(r"cudaMemsetAsync\(([^;]*)\)", code_of(path)):
        assert re.search(r",\s*(stream|stream_of\(call\))\)*$", arguments), arguments


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_kernels_run_under_the_emulator_too(path: Path) -> None:
    code = code_of(path)
    if path.name != "device.cuh":
        assert "__shared__" not in code, "SPLAT_SHARED is what the emulator poisons"
        assert not re.search(r"__CUDACC__|SPLAT_TWIN_MATH", code), "one text for both, the seam is in device.cuh"
    assert not re.search(r"\b(expf|exp2f|__expf|logf|log2f|__logf|sqrtf|powf|__fdividef|rsqrtf)\s*\(", code)
