"""From raw parameters to the units that file formats store, and back: the only activations outside the rasterizer.

What is made here goes straight into a file, or came straight out of one; nothing keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from splatcli.checkpoint.foreign.stored import ImportedModel, RawTables
from splatcli.checkpoint.schema import nonfinite
from splatcli.checkpoint.state import Checkpoint
from splatcli.errors import DivergedError, ModelFileError, UnreadableError, from_os_error
from splatcli.gaussians import SH_C0, Gaussians
from splatcli.scene.camera import Camera, common_up

#: exp() of more leaves float32; exp() of less is no normal float32.
_LOG_SCALE_RANGE = (-87.0, 88.0)
#: A stored opacity of exactly 0 or 1 has no logit: it is moved this far, in steps of its quantisation; so little that
#: it is rounded to the same step again.
_INTO_STEP = 0.25

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ExportMetadata:
    """What a file may say beside the Gaussians, where its format has a place for it.

    comments: lines for a header. antialiased: trained with opacity compensation. camera: where a viewer starts.
    up: [3] unit, where up is; None where nobody knows.
    """

    comments: Sequence[str] = ()
    antialiased: bool = False
    camera: Camera | None = None
    up: Doubles | None = None

    @classmethod
    def of(cls, checkpoint: Checkpoint | None, comments: Sequence[str] = ()) -> ExportMetadata:
        """What a checkpoint has to say; nothing where the model came from another file."""
        if checkpoint is None:
            return cls(comments)
        cameras = checkpoint.refined_cameras()
        first = cameras[0] if cameras else None
        return cls(comments, checkpoint.config.train.antialiased, first, common_up(cameras))


@dataclass(slots=True)
class Encoded:
    """A file's content, and what the user should know of what it could not hold."""

    payload: bytes
    notes: list[str] = field(default_factory=list)


class Columns(NamedTuple):
    """Raw parameters as float32 arrays on the host, all finite; named and shaped as those of Gaussians."""

    means: Floats
    quats: Floats
    log_scales: Floats
    logit_opacities: Floats
    sh0: Floats
    shN: Floats


def columns_of(gaussians: Gaussians) -> Columns:
    """Raises DivergedError when a value is not finite: no reader takes such a file."""
    check_finite(gaussians)
    return Columns(*(tensor.detach().float().cpu().numpy() for _, tensor in gaussians.items()))


def check_finite(gaussians: Gaussians) -> None:
    """Raises DivergedError when a value is not finite."""
    for name, tensor in gaussians.items():
        if (found := nonfinite(tensor)) is not None:
            raise DivergedError(f"{name} has {found[0]} NaN or infinite values, the first at {list(found[1])}")


def stored_of(
    origin: str,
    *,
    means: NDArray[np.floating],
    quats: NDArray[np.floating],
    log_scales: NDArray[np.floating],
    logit_opacities: NDArray[np.floating],
    sh0: NDArray[np.floating],
    shN: NDArray[np.floating],
    notes: Sequence[str] = (),
) -> ImportedModel:
    """What a file holds whose format itself defines the space of its values; they are raw here."""
    with np.errstate(over="ignore", invalid="ignore"):  # what leaves float32 becomes infinite, and is refused as such
        arrays = [
            np.ascontiguousarray(array, dtype=np.float32)
            for array in (means, quats, log_scales, logit_opacities, sh0, shN)
        ]
    return ImportedModel(origin, RawTables(*map(torch.from_numpy, arrays)), declared=True, notes=list(notes))


def unit_quats(quats: NDArray[np.floating]) -> Doubles:
    """[N, 4] of length 1, in the order given; a zero quaternion becomes the identity of w x y z."""
    wide = quats.astype(np.float64)
    norm = np.linalg.norm(wide, axis=1, keepdims=True)
    return np.where(norm > 0, wide / np.where(norm > 0, norm, 1.0), [1.0, 0.0, 0.0, 0.0])


def scales_of(log_scales: NDArray[np.floating]) -> Doubles:
    """Standard deviations, world units; all are normal float32 numbers."""
    return np.exp(np.clip(log_scales.astype(np.float64), *_LOG_SCALE_RANGE))


def log_scales_of(scales: NDArray[np.floating]) -> Doubles:
    """Natural logarithms; a scale of 0 or less is taken for the smallest normal float32, and NaN stays NaN."""
    with np.errstate(invalid="ignore"):  # some NaN of a damaged file
        wide = scales.astype(np.float64)
    return np.log(np.where(wide < np.finfo(np.float32).tiny, np.finfo(np.float32).tiny, wide))


def opacities_of(logits: NDArray[np.floating]) -> Doubles:
    """Opacities in 0...1."""
    wide = logits.astype(np.float64)
    return np.exp(-np.logaddexp(0.0, -wide))


def logits_of(opacities: NDArray[np.floating], step: float) -> Doubles:
    """Logits of opacities in 0...1 that were stored in steps of ``step``."""
    edge = _INTO_STEP * step
    inside = np.clip(opacities.astype(np.float64), edge, 1.0 - edge)
    return np.log(inside) - np.log1p(-inside)


def colours_of(sh0: NDArray[np.floating]) -> Doubles:
    """The constant part of the colour, not clamped."""
    return 0.5 + SH_C0 * sh0.astype(np.float64)


def sh0_of(colours: NDArray[np.floating]) -> Doubles:
    """The constant SH coefficients of colours."""
    return (colours.astype(np.float64) - 0.5) / SH_C0


def quantised(values: NDArray[np.floating], most: int) -> NDArray[np.int64]:
    """Values to the nearest whole number from 0 to ``most``."""
    whole: NDArray[np.int64] = np.clip(np.floor(values + 0.5), 0, most).astype(np.int64)
    return whole


# --- Quaternions as their three smallest components: the largest follows from the length, made positive by a sign

#: For each place of the largest component, the others in order.
_OTHERS = np.array([[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]])


def largest_and_rest(quats: Doubles) -> tuple[NDArray[np.int64], Doubles]:
    """([N] place of the largest component, [N, 3] the others in order) of unit quaternions [N, 4].

    The others are those of q or -q, whichever has a positive largest component; each is within sqrt(1/2) of 0.
    """
    place = np.abs(quats).argmax(axis=1)
    rows = np.arange(len(quats))
    positive = np.where(quats[rows, place] < 0, -1.0, 1.0)[:, None] * quats
    return place, positive[rows[:, None], _OTHERS[place]]


def with_largest(place: NDArray[Any], rest: NDArray[np.floating]) -> Doubles:
    """[N, 4] unit quaternions again; the largest is 0 where the others alone are longer than 1, as junk may be."""
    place = place.astype(np.int64)
    wide = rest.astype(np.float64)
    quats = np.empty((len(wide), 4))
    rows = np.arange(len(wide))
    quats[rows[:, None], _OTHERS[place]] = wide
    quats[rows, place] = np.sqrt(np.maximum(0.0, 1.0 - (wide**2).sum(axis=1)))
    return quats


# --- What a file claims to hold, compared with its size before anything of that size is allocated

#: A compressed file may become this many times larger, or this many bytes where that is more. Real scenes shrink to a
#: twentieth at best; deflate and WebP can pretend a thousandfold.
_MOST_EXPANSION = 100
_ALWAYS_ALLOWED = 16 << 20


def file_size(path: Path) -> int:
    """Bytes of a file that has some. Raises ModelFileError."""
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
    most = max(_ALWAYS_ALLOWED, _MOST_EXPANSION * size)
    if claimed > most:
        raise ModelFileError(
            f"it claims {what}, {claimed:,} bytes in {size:,}: beyond {_MOST_EXPANSION} to 1, which no scene reaches",
            where=path,
        )
