"""Format: the description of a file format that each module of a format ends with, and the types that it is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from splatcli.checkpoint.foreign.imported import ImportedModel
from splatcli.checkpoint.state import Checkpoint
from splatcli.errors import ModelFileError, UnreadableError, from_os_error
from splatcli.gaussians import Gaussians
from splatcli.scene.camera import Camera, common_up

#: The colour space of photos, and of Gaussians that were trained on them, as glTF and NVIDIA's programs name it.
COLOUR_SPACE = "srgb_rec709_display"
#: Bytes by which formats recognise a file: the header of a compressed PLY has its packed properties there.
HEAD_BYTES = 4096
#: A compressed file may become this many times larger, or this many bytes where that is more. Real scenes shrink to a
#: twentieth at best; deflate and WebP can pretend a thousandfold.
_MAX_EXPANSION = 100
_ALWAYS_ALLOWED = 16 << 20
#: Offsets in the header of a zip's first member: the length of its name, and the name.
_ZIP_NAME_LENGTH, _ZIP_NAME = 26, 30


@dataclass(frozen=True, slots=True)
class ExportMetadata:
    """Facts that go into a file beside the Gaussians, where its format has a place for them.

    comments: lines for a header. antialiased: trained with opacity compensation. camera: where a viewer starts.
    up: [3] unit, up in the scene; None where it is unknown.
    z_up: the scene is georeferenced, so that its z is up. title: of a page.
    """

    comments: Sequence[str] = ()
    antialiased: bool = False
    camera: Camera | None = None
    up: NDArray[np.float64] | None = None
    z_up: bool = False
    title: str = "Gaussian splats"

    @classmethod
    def of(
        cls, checkpoint: Checkpoint | None, comments: Sequence[str] = (), *, antialiased: bool = False
    ) -> ExportMetadata:
        """Return the metadata of a checkpoint. antialiased: of a model from another file, which has no checkpoint."""
        if checkpoint is None:
            return cls(comments, antialiased)
        antialiased, place = checkpoint.config.train.antialiased, checkpoint.dataset.place
        return cls.of_cameras(checkpoint.refined_cameras(), comments, antialiased, place)

    @classmethod
    def of_cameras(
        cls,
        cameras: Sequence[Camera],
        comments: Sequence[str],
        antialiased: bool,
        place: tuple[float, ...] | None,
    ) -> ExportMetadata:
        """Return the metadata of a model with cameras. place: as of DatasetInfo."""
        z_up = place is not None
        up = np.array([0.0, 0.0, 1.0]) if z_up else common_up(cameras)
        return cls(comments, antialiased, cameras[0] if cameras else None, up, z_up)

    def antialiased_notes(self, what: str) -> list[str]:
        """Return the note on a model that was trained antialiased, for a format that cannot say so. what: its name."""
        note = f"trained antialiased; {what} has no word for it, and viewers show it too thick"
        return [note] if self.antialiased else []


@dataclass(slots=True)
class Encoded:
    """A file's content, and notes for the user on what the format could not hold."""

    payload: bytes
    notes: list[str] = field(default_factory=list)


Write = Callable[[Gaussians, ExportMetadata], Encoded]


class Read(Protocol):
    """Reads a file; does not check its parameter space.

    lenient: bytes behind the data are ignored, with a note. Raises ModelFileError.
    """

    def __call__(self, path: Path, *, lenient: bool = False) -> ImportedModel: ...


@dataclass(frozen=True, slots=True)
class Format:
    """A file format of Gaussians.

    name: as ``--format`` takes it. suffix: of its files; "" for a variant that only its name chooses.
    title: a file of it, for messages. sh_degree: the highest that it holds.
    write: returns the file's content; None where the format is only read.
    read: None for a variant that the reader of the other one takes.
    recognises: whether a file with these first HEAD_BYTES bytes is of the format.
    names: patterns of file names, in small letters, that suffice where no format recognises the bytes.
    write_with_palette: as write, with a palette of harmonics of at most so many entries; None for a format without one.
    coarser: as write, each with harmonics that take fewer bits than those of the one before.
    has_comments: whether its files have the comments of ExportMetadata.
    """

    name: str
    suffix: str
    title: str
    sh_degree: int
    write: Write | None = None
    read: Read | None = None
    recognises: Callable[[bytes], bool] | None = None
    names: tuple[str, ...] = ()
    write_with_palette: Callable[[Gaussians, ExportMetadata, int], Encoded] | None = None
    coarser: tuple[Write, ...] = ()
    has_comments: bool = False


def first_member(head: bytes) -> str:
    """Return the name of the first member of a zip that begins with ``head``; "" for any other file."""
    if not head.startswith(b"PK\x03\x04"):
        return ""
    length = int.from_bytes(head[_ZIP_NAME_LENGTH : _ZIP_NAME_LENGTH + 2], "little")
    return head[_ZIP_NAME : _ZIP_NAME + length].decode("ascii", "replace")


def refused_discs(path: Path, evidence: str) -> ModelFileError:
    """Return the refusal of a model of 2D Gaussians. evidence: what tells that."""
    return ModelFileError(
        f"{evidence}: this is a 2D Gaussian (2DGS) model, not a 3D one",
        where=path,
        remedy="discs have no third scale to convert; train 3D Gaussians on the photos: splat train SCENE",
    )


def file_size(path: Path) -> int:
    """Return the bytes of a file that has some. Raises ModelFileError."""
    try:
        size = path.stat().st_size
        with path.open("rb"):
            pass
    except OSError as error:
        raise from_os_error(error, UnreadableError, path) from None
    if not size:
        raise ModelFileError("the file is empty (0 bytes)", where=path)
    return size


def check_expansion(claimed: int, size: int, path: Path, what: str) -> None:
    """Raise ModelFileError when ``size`` bytes claim to unpack to ``claimed``, of ``what``: beyond any scene."""
    if claimed > max(_ALWAYS_ALLOWED, _MAX_EXPANSION * size):
        raise ModelFileError(
            f"it claims {what}, {claimed:,} bytes in {size:,}: beyond {_MAX_EXPANSION} to 1, which no scene reaches",
            where=path,
        )
