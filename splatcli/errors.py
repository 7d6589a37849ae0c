"""The tree of errors for users; each has an exit code and a remedy.

    SplatError              70  a bug of ours, if raised bare
    ├── UsageError           2  the command line or the settings
    │   └── PluginError      2  code of a plug-in that has failed
    ├── SceneError           3  input data: images, cameras, points
    ├── ResourceError        4  memory, GPU, compiler
    │   ├── DeviceFaultError 4  a GPU that has failed, so that this process cannot use it any more
    │   └── LaunchRefusedError 4  a launch that CUDA refuses: library, driver and GPU do not fit together
    ├── ModelFileError       5  a checkpoint, PLY or other model file that cannot be trusted
    │   └── UnreadableError  5  one that the system refuses to read; its content may be sound
    ├── VersionError         6  a file made by a version that this one cannot read
    ├── DistributedError     7  ranks disagree
    ├── OutputError          8  the place results go to: permission, space, already there
    ├── LockedError          9  another process holds the run
    ├── DivergedError       10  training diverged
    └── OlderModelError     11  the newest checkpoint of a run is damaged, and only an older one is sound

Interrupted runs leave with 129 (SIGHUP), 130 (SIGINT) or 143 (SIGTERM).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from typing import ClassVar


class SplatError(Exception):
    """An error: what went wrong, where, and what to do about it.

    what: one sentence, with what was found and what was expected.
    where: the file, line, byte, key or flag concerned.
    remedy: what the user can do, a command if there is one; without one, the class's usual remedy.
    """

    exit_code: ClassVar[int] = 70
    code: ClassVar[str] = "E070"
    usual_remedy: ClassVar[str | None] = None

    def __init__(self, what: str, *, where: object = None, remedy: str | None = None) -> None:
        self.what = what
        self.where = None if where is None else str(where)
        self.remedy = remedy or self.usual_remedy
        super().__init__(str(self))

    def __str__(self) -> str:
        text = self.what if self.where is None else f"{self.where}: {self.what}"
        return text if self.remedy is None else f"{text}\n  help: {self.remedy}"

    def lines(self) -> list[str]:
        """Return the lines of the message."""
        lines = [f"error[{self.code}]: {self.what}"]
        if self.where is not None:
            lines.append(f"  where: {self.where}")
        if self.remedy is not None:
            lines.append(f"  help: {self.remedy}")
        return lines

    def as_dict(self) -> dict[str, object]:
        """Return the same facts for ``--json``."""
        return {
            "error": self.code,
            "what": self.what,
            "where": self.where,
            "help": self.remedy,
            "exit_code": self.exit_code,
        }


class UsageError(SplatError):
    """The command line or the settings are not valid."""

    exit_code = 2
    code = "E002"


class PluginError(UsageError):
    """A plug-in does not work. Its cause is what the plug-in's code raised, if that is how it failed."""


class SceneError(SplatError):
    """Images, cameras or points are missing, broken or contradict each other."""

    exit_code = 3
    code = "E003"


class ResourceError(SplatError):
    """Memory, device or compiler is missing or does not suffice."""

    exit_code = 4
    code = "E004"


class DeviceFaultError(ResourceError):
    """A GPU or its driver has failed: every later call of this process fails too."""

    usual_remedy = (
        "run the same command again, or splat resume RUN; dmesg names a fault of the hardware (Xid), and splat doctor "
        "tests the GPU"
    )


class LaunchRefusedError(ResourceError):
    """CUDA refuses to run the kernels: library, driver and GPU do not fit together. The GPU is sound."""


class ModelFileError(SplatError):
    """A model file is unreadable, damaged, or not what it says it is."""

    exit_code = 5
    code = "E005"
    usual_remedy = "get the file anew: copy it again, or export it again from the program that made it"


class UnreadableError(ModelFileError):
    """A model file cannot be read: permissions, the disk or the network. That is no reason to use another one."""

    usual_remedy = (
        "check its permissions, and the disk or network that it is on, and try again; nothing says that the file is "
        "damaged"
    )


class VersionError(SplatError):
    """A file was made by a version that this one does not understand."""

    exit_code = 6
    code = "E006"


class DistributedError(SplatError):
    """Processes that should agree do not."""

    exit_code = 7
    code = "E007"


class OutputError(SplatError):
    """Results cannot be written to the requested place."""

    exit_code = 8
    code = "E008"
    usual_remedy = "make room in that place, or check its permissions"


class LockedError(SplatError):
    """Another process is using the run."""

    exit_code = 9
    code = "E009"


class DivergedError(SplatError):
    """Training diverged and could not recover."""

    exit_code = 10
    code = "E010"


class OlderModelError(SplatError):
    """The newest checkpoint of a run is damaged, and the newest sound one is older."""

    exit_code = 11
    code = "E011"


# --- errors of the operating system -----------------------------------------------------------------------------------

#: Errors of the machine rather than of a file.
_RESOURCES = {
    errno.ENOMEM: ("the machine is out of memory", "end other programs, or use fewer or smaller images (-r)"),
    errno.EMFILE: ("too many files are open in this process", "allow more: ulimit -n 4096"),
    errno.ENFILE: ("too many files are open on this machine", "end other programs"),
    errno.EAGAIN: (
        "no further thread or process can be started",
        "allow more (ulimit -u, the pids limit of a container), or end other programs; lack of memory is a cause too",
    ),
}

#: Errors of a disk that takes no data; they always concern output.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

#: What helps where a file grows beyond the limit of the process, or of the file system.
ALLOW_LARGER = "allow larger files: ulimit -f unlimited; or write to another file system"


def from_os_error(error: OSError, kind: type[SplatError], where: object = None) -> SplatError:
    """Return the error for users of a call that the system refused: ``kind``, or a more specific one.

    where: the place concerned, for errors that do not name it themselves.
    """
    place = error.filename if error.filename is not None else where
    reason = error.strerror or str(error) or type(error).__name__
    if error.errno in _RESOURCES and not (error.errno == errno.EAGAIN and place is not None):
        what, remedy = _RESOURCES[error.errno]
        return ResourceError(what, where=place, remedy=remedy)
    if is_without_temporary_folder(error):
        return ResourceError(
            "no temporary folder can be written", where="TMPDIR", remedy="set TMPDIR to a folder where you can write"
        )
    if error.errno in _FULL:
        return OutputError(f"cannot be written: {reason}", where=place, remedy="free some space, or write elsewhere")
    if error.errno == errno.EFBIG:
        return OutputError(f"cannot be written: {reason}", where=place, remedy=ALLOW_LARGER)
    if issubclass(kind, OutputError):
        return kind(f"cannot be written: {reason}", where=place)
    if isinstance(error, FileNotFoundError):
        is_checkpoint = os.path.basename(os.path.dirname(str(place))) == "ckpts"
        gone = "a run that trains deletes its older checkpoints: try again, and name its folder"
        return kind("there is no such file", where=place, remedy=gone if is_checkpoint else None)
    if error.errno == errno.ESPIPE:
        return kind(f"cannot be read: {reason}", where=place, remedy="write its content to a file, and name that")
    remedy = kind.usual_remedy or "check its permissions, and the disk or network that it is on, and try again"
    return kind(f"cannot be read: {reason}", where=place, remedy=remedy)


def is_without_temporary_folder(error: OSError) -> bool:
    """Return whether Python's tempfile has found no folder to write in."""
    return error.filename is None and (error.strerror or "").startswith("No usable temporary directory found")


@contextlib.contextmanager
def os_errors(kind: type[SplatError], where: object) -> Iterator[None]:
    """Turn OSErrors in the block into errors for users, see from_os_error()."""
    try:
        yield
    except OSError as error:
        raise from_os_error(error, kind, where) from error


#: Of torch, and of Pillow.
_NO_MEMORY = (
    *("can't allocate memory", "cannot allocate memory", "Cannot allocate memory", "std::bad_alloc"),
    *("out of memory when", "out of memory error when"),
    "failed to map segment from shared object",
)


def system_error(error: BaseException) -> OSError | None:
    """Return the system's failure that caused an exception of zipfile, torch or another library; None without one.

    Without it such a failure looks like damage: "not a zip file". EINVAL is no such failure: a seek in a file that is
    too short raises it.
    """
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen)
        if isinstance(seen, MemoryError) or any(words in text for words in _NO_MEMORY):
            return OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        if "can't start new thread" in text:  # Python's; the system's EAGAIN
            return OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        if isinstance(seen, OSError) and seen.errno not in (None, errno.EINVAL):
            return seen
        for number in map(int, re.findall(r"\((\d{1,3})\)", text)):  # torch: "...: Too many open files (24)"
            if os.strerror(number) in text and number != errno.EINVAL:
                return OSError(number, os.strerror(number))
        seen = seen.__cause__ or seen.__context__
    return None


# --- out of memory ----------------------------------------------------------------------------------------------------


#: A GPU's lack of memory where torch.OutOfMemoryError does not say it: pinned memory, kernels that are loaded, cuBLAS.
_NO_GPU_MEMORY = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUSOLVER_STATUS_ALLOC_FAILED")


def is_gpu_out_of_memory(error: BaseException) -> bool:
    """Return whether torch lacks memory of a GPU. Such an error is known by its words, so that torch is not loaded."""
    return isinstance(error, RuntimeError) and (
        type(error).__name__ == "OutOfMemoryError" or any(words in str(error) for words in _NO_GPU_MEMORY)
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a smaller model might not have met this error."""
    if isinstance(error, DeviceFaultError | LaunchRefusedError):
        return False
    if isinstance(error, ResourceError | MemoryError) or is_gpu_out_of_memory(error):
        return True
    # torch on a CPU
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says; its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def memory_words(error: BaseException) -> str:
    """Return what an error says of memory, without the advice on torch's allocator that torch adds for a GPU."""
    said, free, _ = first_line(error).partition(" is free.")
    return f"{said}{free}".rstrip(".")


def as_splat_error(error: BaseException) -> SplatError:
    """Return ``error`` in the form that users see; for one that is no SplatError, memory is to blame."""
    if isinstance(error, SplatError):
        return error
    return ResourceError(
        f"memory does not suffice: {memory_words(error)}", remedy="use fewer or smaller images (-r), or --cap-max"
    )
