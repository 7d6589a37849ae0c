"""Store: where the SH rest of Gaussians and its moments lie, three quarters of what a run holds of them.

A step reads and writes these rows only of what its view reaches (AdamState.rest_steps), so that they need not lie in
the fastest memory there is. Native code is given their addresses and knows nothing of it: there is no second code path.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from splatcli.errors import ResourceError
from splatcli.rasterizer.memory import SHARE, free_memory
from splatcli.sizes import gib

#: Rows that are worked on at once, so that temporaries stay small.
ROWS = 1 << 16

#: Zeros that are written at once where a file system cannot reserve room.
_BLOCK = 1 << 22

#: How a file system says that it cannot reserve room.
_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}

#: File systems that live in memory.
_IN_MEMORY = {"tmpfs", "ramfs"}


class TensorStorage:
    """With all else, on the Gaussians' device.

    offloads: whether it is elsewhere.
    """

    offloads = False

    def empty(self, rows: int, like: Tensor) -> Tensor:
        """[rows, ...] not initialised, for rows as those of ``like``."""
        return like.new_empty(rows, *like.shape[1:])

    def zeros(self, like: Tensor) -> Tensor:
        return torch.zeros_like(like)

    def copy(self, tensor: Tensor, device: torch.device | str) -> Tensor:
        """``tensor`` for Gaussians on ``device``."""
        return tensor.detach().to(device, copy=True).contiguous()

    def rows(self, tensor: Tensor, source: Tensor) -> Tensor:
        """[M, ...] the rows ``source`` [M] of ``tensor``."""
        return tensor[source]

    def free(self) -> int:
        """Bytes that there are for it beside the device's memory."""
        return 0

    def nbytes(self, tensor_bytes: int) -> int:
        """What a tensor of so many bytes really takes there."""
        return tensor_bytes

    def place(self) -> str:
        """In words."""
        return "on the device"

    def notes(self) -> list[str]:
        """What a person should know of the place."""
        return []


class _Elsewhere(TensorStorage):
    """What pinned memory and files have in common."""

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
    """In the host's memory, locked in its place, where a GPU reaches it at the same address."""

    def empty(self, rows: int, like: Tensor) -> Tensor:
        try:
            return torch.empty(rows, *like.shape[1:], dtype=like.dtype, pin_memory=True)
        except RuntimeError as error:
            nbytes = self.nbytes(rows * math.prod(like.shape[1:]) * like.dtype.itemsize)
            raise ResourceError(
                f"no room for {gib(nbytes)} of offloaded SH coefficients in pinned memory of the host: "
                f"{str(error).splitlines()[0]}",
                remedy="--cap-max for fewer Gaussians, or a lower --sh-degree",
            ) from None

    def free(self) -> int:
        return int(SHARE * free_memory(torch.device("cpu")))

    def nbytes(self, tensor_bytes: int) -> int:
        # torch's allocator of pinned memory gives out powers of two.
        return 1 << max(0, tensor_bytes - 1).bit_length()

    def place(self) -> str:
        return "in the host's memory"


@dataclass(frozen=True)
class MemoryMapped(_Elsewhere):
    """In files that are mapped: what is not in use leaves the memory by itself when others need it.

    folder: where they lie. They have no name there, so that nothing is left of them, however the process ends. All
    their room is reserved when they are made: a full disk is an error then, and cannot become one when a page is
    written, which would end the process.
    """

    folder: Path

    def empty(self, rows: int, like: Tensor) -> Tensor:
        numel = rows * math.prod(like.shape[1:])
        if numel == 0:
            return like.new_empty(rows, *like.shape[1:], device="cpu")
        # The mapping goes when the last tensor on it does, and the file with it.
        pages = self._mapping(numel * like.dtype.itemsize)
        return torch.frombuffer(pages, dtype=like.dtype).view(rows, *like.shape[1:])

    def zeros(self, like: Tensor) -> Tensor:
        return self.empty(len(like), like)  # as a new file is

    def free(self) -> int:
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize

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
        # As RunDir.open() expects it of what a process leaves that is killed before the next line.
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


#: The Store of runs that offload nothing.
DEVICE_STORAGE = TensorStorage()


def storage_for(offload: bool, device: torch.device | str, folder: Path | None) -> TensorStorage:
    """The Store of a run with Gaussians on ``device`` whose files go into ``folder``."""
    if not offload:
        return DEVICE_STORAGE
    if torch.device(device).type == "cuda":
        return Pinned()
    if folder is None:
        raise ValueError("a run that offloads on the CPU needs a folder for it")
    return MemoryMapped(folder)


def file_system(folder: Path) -> str | None:
    """The kind of file system that ``folder`` lies on, as the kernel calls it; None where it does not tell."""
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
    """Makes a new file so long, every byte of it on the disk."""
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        for start in range(0, nbytes, _BLOCK):
            os.pwrite(descriptor, bytes(min(_BLOCK, nbytes - start)), start)
