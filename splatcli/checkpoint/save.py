"""Write a checkpoint so that no crash, full disk or divergence can cost the one before it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from splatcli.checkpoint.activation_check import checkpoint_space_problem
from splatcli.checkpoint.atomic import write_atomically
from splatcli.checkpoint.container import DIGEST_KEY, MANIFEST_KEY, read_container
from splatcli.checkpoint.pack import build_manifest, pack_tensors, unpack
from splatcli.checkpoint.schema import (
    listed,
    name_problems,
    nonfinite,
    nonfinite_path,
    parse_manifest,
    shape_problems,
)
from splatcli.checkpoint.state import Checkpoint
from splatcli.errors import DivergedError, ModelFileError, SplatError

#: Room for the zip's own records and for the alignment of members, beside 2 percent of the content.
_MARGIN = 1 << 20

#: The matrix and the lens of one camera as JSON: 20 doubles of at most 25 characters, and the keys.
_CAMERA_JSON = 700


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint to ``path``; when this returns it is complete, verified and on the disk.

    Raises DivergedError when a value is not finite or the parameters are not raw any more, OutputError when it
    cannot be written; in both cases the file that was there is untouched. What is accepted here, ``load_checkpoint``
    accepts: both make the same checks.
    """
    tensors = pack_tensors(checkpoint)
    problems = name_problems(list(tensors))
    problems = problems or shape_problems(tensors)
    if problems:
        raise SplatError(listed("this state is not a checkpoint", problems), where=path)
    _check_finite(tensors, path)
    if (fault := checkpoint_space_problem(checkpoint.gaussians, checkpoint.config)) is not None:
        raise DivergedError(f"not written: {fault}", where=path)
    text = _manifest_text(checkpoint, tensors, path)
    stored: dict[str, Tensor | str] = {
        MANIFEST_KEY: text,
        DIGEST_KEY: hashlib.sha256(text.encode()).hexdigest(),
        **tensors,
    }

    def write(file: BinaryIO) -> None:
        torch.save(stored, file)

    write_atomically(
        path,
        write,
        what="checkpoint",
        reserve=_file_size(sum(tensor.nbytes + 512 for tensor in tensors.values()) + len(text.encode())),
        verify=lambda temporary: read_container(temporary, mmap=True),
    )


def checkpoint_bytes(checkpoint: Checkpoint, count: int | None = None) -> int:
    """What the file of ``checkpoint`` takes at most; ``count`` asks as if it had so many Gaussians."""
    per_row = sum(tensor[:1].nbytes for _, tensor in checkpoint.gaussians.items())
    rows = 3 * per_row if checkpoint.moments is not None else per_row
    rows += 0 if checkpoint.rest_steps is None else checkpoint.rest_steps[:1].nbytes
    rows += 0 if checkpoint.smoothing is None else checkpoint.smoothing[:1].nbytes
    rows += sum(v[:1].nbytes for v in checkpoint.strategy.values() if isinstance(v, Tensor))
    fixed = sum(state.nbytes for states in (checkpoint.rng, checkpoint.views) for state in states.values())
    cameras = sum(_CAMERA_JSON + len(camera.name.encode()) for camera in checkpoint.cameras)
    return _file_size(rows * (len(checkpoint.gaussians) if count is None else count) + fixed + cameras)


def _file_size(content: int) -> int:
    return content + content // 50 + _MARGIN


def _check_finite(tensors: dict[str, Tensor], path: Path) -> None:
    for name, tensor in tensors.items():
        if (found := nonfinite(tensor)) is not None:
            count, index = found
            raise DivergedError(
                f"not written: {name} has {count} NaN or infinite values, the first at {list(index)}",
                where=path,
                remedy="splat resume the last checkpoint, perhaps with a smaller learning rate",
            )


def _manifest_text(checkpoint: Checkpoint, tensors: dict[str, Tensor], path: Path) -> str:
    """The manifest as JSON, already read back once: a state that could not be loaded must not be written."""
    manifest = build_manifest(checkpoint, tensors)
    if (bad := nonfinite_path(manifest.model_dump(mode="python"))) is not None:
        raise DivergedError(f"not written: {bad} is NaN or infinite", where=path)
    text = manifest.to_text()
    try:
        unpack(parse_manifest(text, path), tensors, path)
    except ModelFileError as error:
        raise SplatError(f"this state is not a checkpoint: {error.what}", where=path) from None
    return text
