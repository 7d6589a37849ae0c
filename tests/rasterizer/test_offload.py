"""shN outside the device's memory: reserved to the last byte, without a name, and accessed row by row."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from splatcli.checkpoint.atomic import TEMPORARY
from splatcli.errors import ResourceError
from splatcli.gaussians import GROUPS, Gaussians, reachable
from splatcli.native.backend import Backend
from splatcli.rasterizer import AsyncEngine, DensifyStats, NativeEngine, StepInputs
from splatcli.rasterizer import offload as stores
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.memory_budget import held_memory
from splatcli.rasterizer.offload import DEVICE_STORAGE, ROWS, MemoryMapped, Pinned, file_system, storage_for
from tests.kernels.simt import simulated
from tests.native.cases import NEEDS_COMPILER, float32
from tests.rasterizer.scenes import random_scene
from tests.torture.harness import fork

CPU = torch.device("cpu")
PAGE = os.sysconf("SC_PAGESIZE")


def mappings(folder: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if f"{folder}/offload.tmp." in line]


# --- files that are mapped --------------------------------------------------------------------------------------------


def test_a_mapped_tensor_has_a_file_without_a_name_that_goes_with_it(tmp_path: Path) -> None:
    like = torch.zeros(7, 3, 3)
    tensor = MemoryMapped(tmp_path).zeros(like)
    assert torch.equal(tensor, like)
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % PAGE == 0
    assert tensor.untyped_storage().nbytes() == tensor.nbytes, "a checkpoint stores nothing that is not shown"
    assert list(tmp_path.iterdir()) == []
    view = tensor[1:3]
    tensor += 1.0
    del tensor
    gc.collect()
    assert len(mappings(tmp_path)) == 1
    assert (view == 1.0).all()
    del view
    gc.collect()
    assert mappings(tmp_path) == []


def test_all_of_its_room_is_reserved_before_anything_is_written(tmp_path: Path) -> None:
    kept: list[int] = []
    nbytes = 5 * PAGE + 12
    plain = os.close

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "close", lambda descriptor: (kept.append(os.fstat(descriptor).st_blocks), plain(descriptor)))
        MemoryMapped(tmp_path).empty(nbytes // 4, torch.zeros(1))
    assert kept
    assert kept[-1] * 512 >= nbytes


def test_a_file_system_that_cannot_reserve_room_is_filled_with_zeros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    monkeypatch.setattr(stores, "_BLOCK", PAGE)
    path = tmp_path / "x"
    with path.open("w+b") as file:
        stores._reserve(file.fileno(), 3 * PAGE + 5)
        found = os.fstat(file.fileno())
    assert found.st_size == 3 * PAGE + 5
    assert found.st_blocks * 512 >= found.st_size
    assert path.read_bytes() == bytes(3 * PAGE + 5)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_a_full_disk_is_an_error_with_the_bytes_and_leaves_nothing(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ResourceError) as caught:
        MemoryMapped(tmp_path).empty(1 << 18, torch.zeros(1))
    assert "no room for 1.0 MiB of offloaded SH coefficients" in caught.value.what
    assert os.strerror(code) in caught.value.what
    assert caught.value.where == str(tmp_path)
    assert caught.value.remedy is not None
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_is_an_error_too(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="No such file"):
        MemoryMapped(tmp_path / "none").empty(4, torch.zeros(1))


def test_a_process_that_is_killed_in_between_leaves_what_the_next_one_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    plain = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda self, **rest: (names.append(self.name), plain(self, **rest)))
    MemoryMapped(tmp_path).empty(4, torch.zeros(1))
    assert len(names) == 1
    assert TEMPORARY.fullmatch(names[0])


@pytest.mark.parametrize("rows", [0, 5, ROWS + 3])
@pytest.mark.parametrize("coefficients", [0, 3])
def test_rows_and_copies_are_those_of_a_plain_tensor(rows: int, coefficients: int, tmp_path: Path) -> None:
    noise = torch.Generator().manual_seed(rows)
    tensor = torch.randn(rows, coefficients, 3, generator=noise)
    store = MemoryMapped(tmp_path)
    copy = store.copy(tensor, CPU)
    assert torch.equal(copy, tensor)
    assert copy.data_ptr() != tensor.data_ptr() or tensor.numel() == 0
    source = torch.randint(0, max(1, rows), (rows + rows // 2,), generator=noise)
    assert torch.equal(store.rows(copy, source), DEVICE_STORAGE.rows(tensor, source))
    assert torch.equal(store.zeros(tensor), DEVICE_STORAGE.zeros(tensor))
    assert store.empty(9, tensor).shape == (9, coefficients, 3)


def test_pages_of_files_are_not_the_process_s_own(tmp_path: Path) -> None:
    size = 32 << 20
    before, own = held_memory(CPU), held_memory(CPU, offloads=True)
    tensor = MemoryMapped(tmp_path).empty(size // 4, torch.zeros(1)).fill_(1.0)
    assert held_memory(CPU) - before > 0.9 * size
    assert held_memory(CPU, offloads=True) - own < 0.1 * size
    assert float(tensor.sum()) == size / 4


def test_a_folder_in_memory_saves_none_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {line.split(" - ")[1].split()[0] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    assert file_system(tmp_path) in kinds
    assert file_system(tmp_path / "none") is None
    monkeypatch.setattr(stores, "file_system", lambda folder: "ext4")
    assert MemoryMapped(tmp_path).notes() == []
    monkeypatch.setattr(stores, "file_system", lambda folder: "tmpfs")
    (note,) = MemoryMapped(tmp_path).notes()
    assert "tmpfs, which is memory itself" in note


def test_the_place_follows_from_the_device(tmp_path: Path) -> None:
    assert storage_for(False, "cuda", tmp_path) is DEVICE_STORAGE
    assert storage_for(True, "cpu", tmp_path) == MemoryMapped(tmp_path)
    assert isinstance(storage_for(True, "cuda:1", None), Pinned)
    with pytest.raises(ValueError, match="folder"):
        storage_for(True, "cpu", None)


def test_pinned_memory_is_planned_by_the_powers_of_two_that_it_comes_in() -> None:
    assert [Pinned().nbytes(n) for n in (1, 4096, 4097, 3 << 30)] == [1, 4096, 8192, 4 << 30]


@pytest.mark.parametrize(
    ("said", "line"), [("CUDA error: out of memory\nmore", "CUDA error: out of memory"), ("", "RuntimeError")]
)
def test_a_host_that_pins_no_more_is_an_error_with_the_bytes(
    monkeypatch: pytest.MonkeyPatch, said: str, line: str
) -> None:
    def refuse(*_: object, **__: object) -> Tensor:
        raise RuntimeError(said)

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(ResourceError, match=rf"no room for 1\.0 MiB .* pinned memory of the host: {line}(\n|$)"):
        Pinned().empty((1 << 18) - 5, torch.zeros(1))


# --- what native code is given ----------------------------------------------------------------------------------------


def on_gpu(gaussians: Gaussians, **own: Tensor) -> dict[str, Tensor]:
    """Tensors of a GPU that there need not be, but for ``own``."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = {name: torch.empty(tensor.shape, device="cuda:1") for name, tensor in gaussians.items()}
    return {**fake, **own}


def test_a_gpu_takes_pinned_memory_for_shN_and_for_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    gaussians, _ = random_scene(8, 10, sh_degree=1)
    backend = Backend(None, torch.float32, 0, torch.device("cuda:1"), 1, deferred=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shN is on cpu"):
        Gaussians(**on_gpu(gaussians, shN=gaussians.shN))
    monkeypatch.setattr(Tensor, "is_pinned", lambda self: True)
    mixed = Gaussians(**on_gpu(gaussians, shN=gaussians.shN))
    assert mixed.device == torch.device("cuda:1")
    assert backend.arrays(mixed).shN == gaussians.shN.data_ptr()
    for name in GROUPS[:-1]:
        with pytest.raises(ValueError, match="is on"):
            Gaussians(**on_gpu(gaussians, **{name: getattr(gaussians, name)}))
    with pytest.raises(TypeError, match="given a tensor on cpu"):
        backend.pointer(gaussians.means, 10, 3)
    with pytest.raises(TypeError, match="contiguous"):
        backend.arrays(Gaussians(**on_gpu(gaussians, shN=gaussians.shN.transpose(0, 1).contiguous().transpose(0, 1))))


def test_no_other_device_reaches_the_host() -> None:
    assert not reachable(torch.zeros(3), CPU)
    assert not reachable(torch.zeros(3, device="meta"), torch.device("cuda"))
    assert not reachable(torch.zeros(3), torch.device("cuda")), "memory that is not pinned"
    assert reachable(torch.zeros(0, 0, 3), torch.device("cuda")), "nothing to read; torch does not call it pinned"


@NEEDS_COMPILER
@pytest.mark.parametrize("kind", ["cpu", "simt"])
def test_a_step_touches_no_row_that_its_view_does_not_reach(kind: str, tmp_path: Path) -> None:
    """Pages of the others are forbidden: a read or a write of one ends the process."""
    child = fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            status = 0 if _steps_with_forbidden_pages(kind, tmp_path) else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def _steps_with_forbidden_pages(kind: str, folder: Path) -> bool:
    """Whether two steps moved what is seen, with most pages of shN and its moments forbidden."""
    gaussians, camera = random_scene(3, 6000, width=70, height=50, sh_degree=3, scale=0.02)
    half = slice(3000, 6000)
    gaussians.means[half] = torch.from_numpy(camera.center).float() - 3.0 * torch.from_numpy(camera.viewmat[2, :3])
    gaussians = gaussians.map(lambda t: t, shN=lambda t: MemoryMapped(folder).copy(t, CPU))
    adam, stats = AdamState.zeros_like(gaussians, storage=MemoryMapped(folder)), DensifyStats.zeros(len(gaussians))
    before = gaussians.shN[:3000].clone()
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    for tensor in (gaussians.shN, adam.exp_avg.shN, adam.exp_avg_sq.shN):
        first = -(-(tensor.data_ptr() + 3000 * tensor[:1].nbytes) // PAGE) * PAGE
        end = (tensor.data_ptr() + tensor.nbytes) // PAGE * PAGE
        assert end - first > 100 * PAGE
        assert protect(ctypes.c_void_p(first), ctypes.c_size_t(end - first), 0) == 0
    backend = simulated() if kind == "simt" else float32()
    engine: NativeEngine | AsyncEngine = AsyncEngine(backend) if kind == "simt" else NativeEngine(backend)
    target = torch.zeros(50, 70, 3, dtype=torch.uint8)
    inputs = StepInputs(camera, target, dict.fromkeys(GROUPS, 1e-3), 3, torch.zeros(3), 0.2, False, stats)
    for _ in range(2):
        engine.submit(gaussians, adam, inputs)
    engine.drain()
    return not torch.equal(gaussians.shN[:3000], before) and bool((adam.sh_last_step[half] == 0).all())


# --- steps that were missed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda folder: DEVICE_STORAGE, MemoryMapped], ids=["resident", "mapped"])
def test_missed_steps_are_made_up_for_with_the_same_bits(
    make: Callable[[Path], stores.TensorStorage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flushed(store: stores.TensorStorage) -> tuple[AdamState, Gaussians, Gaussians]:
        gaussians, _ = random_scene(8, 100, sh_degree=2)
        gaussians = gaussians.map(lambda t: t.clone(), shN=lambda t: store.copy(t, CPU))
        adam = AdamState.zeros_like(gaussians, storage=store)
        noise = torch.Generator().manual_seed(1)
        adam.exp_avg.shN.copy_(torch.randn(100, 8, 3, generator=noise))
        adam.exp_avg_sq.shN.copy_(torch.rand(100, 8, 3, generator=noise))
        adam.step = 40
        adam.sh_last_step.copy_(torch.randint(0, 41, (100,), generator=noise))
        shown = adam.flushed(gaussians, 1e-3)
        adam.flush(gaussians, 1e-3)
        return adam, gaussians, shown

    expected = flushed(DEVICE_STORAGE)
    monkeypatch.setattr("splatcli.rasterizer.adam.ROWS", 7)
    adam, gaussians, shown = flushed(make(tmp_path))
    assert torch.equal(shown.shN, gaussians.shN)
    for mine, theirs in ((gaussians, expected[1]), (adam.exp_avg, expected[0].exp_avg)):
        assert torch.equal(mine.shN, theirs.shN)
    assert torch.equal(adam.exp_avg_sq.shN, expected[0].exp_avg_sq.shN)
    assert replace(adam, step=41).storage == adam.storage
