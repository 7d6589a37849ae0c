"""TensorStorage: the place of shN and its moments, which are three quarters of the state of a run.

A step reads and writes these rows only for Gaussians that its view reaches (AdamState.sh_last_step), so they can be in
slower memory. Native code gets their addresses; there is no second code path.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from splatcli import disk
from splatcli.errors import ResourceError, first_line
from splatcli.rasterizer.memory_budget import SHARE, free_memory
from splatcli.sizes import gib

#: Rows that are processed at once, so that temporaries stay small.
ROWS = 1 << 16

#: Zeros that are written at once where space cannot be reserved.
_BLOCK = 1 << 22

#: File systems that live in memory.
_IN_MEMORY = {"tmpfs", "ramfs"}


class TensorStorage:
    """Storage on the Gaussians' device, with all other tensors.

    offloads: whether the storage is outside the device.
    """

    offloads = False

    def empty(self, rows: int, like: Tensor) -> Tensor:
        """Return [rows, ...] uninitialised, for rows shaped as those of ``like``."""
        return like.new_empty(rows, *like.shape[1:])

    def zeros(self, like: Tensor) -> Tensor:
        """Return zeros shaped as ``like``."""
        return torch.zeros_like(like)

    def copy(self, tensor: Tensor, device: torch.device | str) -> Tensor:
        """Return a copy of ``tensor`` for Gaussians on ``device``."""
        return tensor.detach().to(device, copy=True).contiguous()

    def rows(self, tensor: Tensor, source: Tensor) -> Tensor:
        """Return [M, ...] the rows ``source`` [M] of ``tensor``."""
        return tensor[source]

    def free(self) -> int:
        """Return the free bytes of the storage outside the device."""
        return 0

    def nbytes(self, tensor_bytes: int) -> int:
        """Return the bytes that a tensor of ``tensor_bytes`` takes there."""
        return tensor_bytes

    def place(self) -> str:
        """Return the place in words, for messages."""
        return "on the device"

    def notes(self) -> list[str]:
        """Return notes about the place, for the user."""
        return []


class _Elsewhere(TensorStorage):
    """The common part of pinned memory and files."""

    offloads = True

    def zeros(self, like: Tensor) -> Tensor:
        return self.empty(len(like), like).zero_()

    def copy(self, tensor: Tensor, device: torch.device | str) -> Tensor:
        return self.empty(len(tensor), tensor).copy_(tensor.detach())

    def rows(self, tensor: Tensor, source: Tensor) -> Tensor:
        taken = self.empty(len(source), tensor)
        for piece, out in zip(torch.split(source, ROWS), torch.split(taken, ROWS), strict=True):
            torch.index_select(tensor, 0, piece.to(tensor.device), out=out)
        return taken


class Pinned(_Elsewhere):
    """Pinned memory of the host, which a GPU reads and writes at the same address."""

    def empty(self, rows: int, like: Tensor) -> Tensor:
        try:
            return torch.empty(rows, *like.shape[1:], dtype=like.dtype, pin_memory=True)
        except RuntimeError as error:
            nbytes = self.nbytes(rows * math.prod(like.shape[1:]) * like.dtype.itemsize)
            raise ResourceError(
                f"no room for {gib(nbytes)} of offloaded SH coefficients in pinned memory of the host: "
                f"{first_line(error)}",
                remedy="--cap-max for fewer Gaussians, or a lower --sh-degree",
            ) from None

    def free(self) -> int:
        return int(SHARE * free_memory(torch.device("cpu")))

    def nbytes(self, tensor_bytes: int) -> int:
        # torch's allocator of pinned memory rounds up to powers of two.
        return 1 << max(0, tensor_bytes - 1).bit_length()

    def place(self) -> str:
        return "in the host's memory"


@dataclass(frozen=True)
class MemoryMapped(_Elsewhere):
    """Memory-mapped files, whose unused pages the system evicts when others need the memory.

    folder: of the files, which have no name, so that nothing is left of them however the process ends. Their space is
    reserved when they are made: a full disk is an error then, and not when a page is written, which would end the
    process.
    """

    folder: Path

    def empty(self, rows: int, like: Tensor) -> Tensor:
        numel = rows * math.prod(like.shape[1:])
        if numel == 0:
            return like.new_empty(rows, *like.shape[1:], device="cpu")
        # The mapping ends with the last tensor on it, and the file with the mapping.
        pages = self._mapping(numel * like.dtype.itemsize)
        return torch.frombuffer(pages, dtype=like.dtype).view(rows, *like.shape[1:])

    def zeros(self, like: Tensor) -> Tensor:
        return self.empty(len(like), like)  # a new file holds zeros

    def free(self) -> int:
        return disk.free_bytes(self.folder)

    def place(self) -> str:
        return f"in a file in {self.folder}"

    def notes(self) -> list[str]:
        kind = file_system(self.folder)
        if kind not in _IN_MEMORY:
            return []
        return [
            f"{self.folder} is on {kind}, which is memory itself: --offload saves none there; -o names another place"
        ]

    def _mapping(self, nbytes: int) -> mmap.mmap:
        # A name that RunDir.open() removes, should the process be killed before the next line.
        path = self.folder / f"offload.tmp.{os.getpid()}.{secrets.token_hex(4)}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                path.unlink()
                _reserve(descriptor, nbytes)
                return mmap.mmap(descriptor, nbytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            free = 0
            with contextlib.suppress(OSError):
                free = self.free()
            raise ResourceError(
                f"no room for {gib(nbytes)} of offloaded SH coefficients: {error.strerror or error}; {gib(free)} are "
                "free there",
                where=self.folder,
                remedy="free some space, --cap-max for fewer Gaussians, or a run on another disk (-o)",
            ) from None


#: The storage of runs that offload nothing.
DEVICE_STORAGE = TensorStorage()


def storage_for(offload: bool, device: torch.device | str, folder: Path | None) -> TensorStorage:
    """Return the storage of a run with Gaussians on ``device``, with files in ``folder``."""
    if not offload:
        return DEVICE_STORAGE
    if torch.device(device).type == "cuda":
        return Pinned()
    if folder is None:
        raise ValueError("a run that offloads on the CPU needs a folder for it")
    return MemoryMapped(folder)


def file_system(folder: Path) -> str | None:
    """Return the type of file system of ``folder`` by the kernel's name; None where it is unknown."""
    try:
        number = os.stat(folder).st_dev
        wanted = f"{os.major(number)}:{os.minor(number)}"
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            mount, _, rest = line.partition(" - ")
            if mount.split()[2] == wanted:
                return rest.split()[0]
    except (OSError, IndexError):
        pass
    return None


def _reserve(descriptor: int, nbytes: int) -> None:
    """Extend a new file to ``nbytes``, with every byte of it reserved on the disk."""
    if not disk.reserve(descriptor, nbytes):
        for start in range(0, nbytes, _BLOCK):
            os.pwrite(descriptor, bytes(min(_BLOCK, nbytes - start)), start)
